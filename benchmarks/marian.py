"""Marian models made by Transformers, imported and compared: ids, encoder, logits, translations.

    python -m benchmarks.marian                  a table, and 200 steps of tuning
    python -m benchmarks.marian --golden DIR     writes the small model of tests/golden/marian
    python -m benchmarks.marian --speed          translation by a model of OPUS-MT's base size

All need `pip install -e '.[train,benchmark]'`. The task is to write a line of words in capitals,
which 1,200 steps teach well enough that beams end at different lengths. The speed is that of a
model of the base size with random weights, which would never write EOS: every translation is as
long as its source, LENGTH pieces.
"""

import argparse
import dataclasses
import io
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from flax import nnx
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from benchmarks.decoding import race, report
from benchmarks.peers import ctranslate2, marian, this_program
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import OptimizerConfig, TrainConfig
from flaxformer_min.data.batch import padded
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.interop.export import export_marian
from flaxformer_min.interop.marian import import_marian
from flaxformer_min.interop.names import marian_columns
from flaxformer_min.model.build import split_model
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.model.teacher_forcing import forced_states
from flaxformer_min.training.loop import run

DRAW = random.Random(1)
WORDS = ["".join(DRAW.choices("abcdefghijkl", k=DRAW.randint(2, 6))) for _ in range(200)]
LINES = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(2, 9))) for _ in range(3000)]
ODD = ["hello World 123", ">>deu<< abc def", "ß中文 a", "a\u00a0b", "l" * 60, " abc", "abc  d "]
LENGTH, SENTENCES = 27, 64  # pieces of a line, and lines, whose speed is measured
OPUS_VOCABULARY = 58_101  # of opus-mt-en-de
MODELS: dict[str, dict[str, Any]] = {
    "relu, 2 + 1 layers": {"activation_function": "relu", "layers": (2, 1)},
    "swish, 1 + 3 layers": {"layers": (1, 3), "heads": 8},
    "separate embeddings": {"share_encoder_decoder_embeddings": False},
    "trained": {"layers": (2, 2), "d_ff": 128, "steps": 1_200},
}


def sentencepiece_model(lines: Sequence[str], size: int, kind: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type=kind,
        normalization_rule_name="identity", pad_id=-1, bos_id=-1, eos_id=0, unk_id=1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def make(
    folder: Path,
    *,
    layers: tuple[int, int] = (1, 1),
    heads: int = 4,
    d_model: int = 64,
    d_ff: int = 101,
    steps: int = 0,
    vocab_size: int = 0,
    **fields: Any,
) -> None:
    """Writes a Marian directory; without steps every weight is random, biases and norms too.

    With a vocab_size the vocabulary is filled up to it with names of languages, and the model
    never writes EOS.
    """
    torch.manual_seed(1)
    models = {
        "source": sentencepiece_model(LINES, 89, "unigram"),
        "target": sentencepiece_model([line.upper() for line in LINES], 97, "bpe"),
    }
    pieces = {"</s>": 0, "<unk>": 1}
    for side, content in models.items():
        (folder / f"{side}.spm").write_bytes(content)
        found = sentencepiece.SentencePieceProcessor(model_proto=content)
        for i in range(found.get_piece_size()):
            pieces.setdefault(found.id_to_piece(i), len(pieces))
    pieces.setdefault(">>deu<<", len(pieces))
    for i in range(len(pieces), vocab_size - 1):
        pieces[f">>{i}<<"] = i
    pad = pieces["<pad>"] = len(pieces)
    (folder / "vocab.json").write_text(json.dumps(pieces))
    languages = {"source_lang": "aa", "target_lang": "bb", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(languages))
    sides = {}
    for side, count in zip(("encoder", "decoder"), layers, strict=True):
        sides |= {f"{side}_layers": count, f"{side}_ffn_dim": d_ff}
        sides[f"{side}_attention_heads"] = heads
    fields = {"activation_function": "swish", **fields}
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(pieces), d_model=d_model, max_position_embeddings=128, pad_token_id=pad,
            decoder_start_token_id=pad, eos_token_id=0, scale_embedding=True,
            forced_eos_token_id=None, **sides, **fields,
        )
    )  # fmt: skip
    draw_weights(model, pad)
    if vocab_size:
        model.final_logits_bias[0, 0] = -1e4
    if steps:
        train(model, pieces, models, steps)
    model.generation_config.update(num_beams=4, length_penalty=1.0, bad_words_ids=[[pad]])
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)


@torch.no_grad()
def draw_weights(model: MarianMTModel, pad: int) -> None:
    for name, array in [*model.named_parameters(), *model.named_buffers()]:
        if "embed_positions" not in name:
            wide = array.ndim == 1 or name == "final_logits_bias"
            scale = 0.3 if wide else array.shape[-1] ** -0.5
            array.copy_(float(name.endswith("norm.weight")) + scale * torch.randn_like(array))
    model.get_input_embeddings().weight[pad] = 0


def train(model: MarianMTModel, ids: dict[str, int], models: dict[str, bytes], steps: int) -> None:
    """Trains as the paper does, but with a peak of 2e-3 after 100 steps and without smoothing."""
    pad = ids["<pad>"]
    source, target = (
        sentencepiece.SentencePieceProcessor(model_proto=content) for content in models.values()
    )
    pairs = [
        [[*map(ids.__getitem__, side.encode(text, out_type=str)), 0] for side, text in both]
        for both in [((source, line), (target, line.upper())) for line in LINES]
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / 100, (100 / (step + 1)) ** 0.5)
        batch = DRAW.sample(pairs, 64)
        x, y = (
            torch.from_numpy(padded(side, max(map(len, side)), pad).astype(np.int64))
            for side in zip(*batch, strict=True)
        )
        logits = forward(model, x, y, pad).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=pad
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def forward(model: MarianMTModel, source: torch.Tensor, target: torch.Tensor, pad: int) -> Any:
    """Marian's outputs under teacher forcing; pad stands in front of the target."""
    shifted = torch.nn.functional.pad(target, (1, 0), value=pad)[:, :-1]
    return model(input_ids=source, attention_mask=(source != pad).long(), decoder_input_ids=shifted)


def outputs(translator: Translator, source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """This program's memory, with Marian's columns, and its logits."""
    pad = translator.tokenizer.pad_id
    model = nnx.merge(
        split_model(translator.config.model, translator.tokenizer.vocab_size)[0], translator.params
    )
    memory = np.asarray(model.encode(source, padding_mask(source, pad)))
    states = forced_states(model, source, target, pad_id=pad, bos_id=pad)
    order = np.argsort(marian_columns(memory, 2))
    return [memory[:, :, order], np.asarray(model.project(states))]


@torch.inference_mode()
def compare(folder: Path, ours: Path, *, searches: bool) -> dict[str, str]:
    import_marian(folder, ours, None, None)
    translator, theirs = Translator.load(ours), MarianMTModel.from_pretrained(folder).eval()
    tokenizer, lines = MarianTokenizer.from_pretrained(folder), [*LINES[:193], *ODD]
    ids = [translator.tokenizer.encode(line) for line in lines]
    row = {"ids": equal(ids, [tokenizer(line).input_ids for line in lines])}
    targets = [translator.tokenizer.encode(line.upper(), "target") for line in lines]
    wanted = [tokenizer(text_target=line.upper()).input_ids for line in lines]
    row["target ids"] = equal(targets, wanted)
    pad = translator.tokenizer.pad_id
    source, target = (padded(side[:40], max(map(len, side[:40])), pad) for side in (ids, targets))
    here = outputs(translator, source, target)
    there = forward(theirs, *(torch.from_numpy(x.astype(np.int64)) for x in (source, target)), pad)
    for name, mine, its, real in (
        ("encoder", here[0], there.encoder_last_hidden_state, source != pad),
        ("logits", here[1], there.logits, target != pad),
    ):
        row[name] = f"{np.abs(mine - its.numpy())[real].max():.1e}"
    for beam in (1, 4) if searches else ():
        row[f"beam {beam}"] = compare_search(translator, theirs, tokenizer, lines[:50], beam)
    return row


def compare_search(
    translator: Translator, theirs: Any, tokenizer: Any, lines: Sequence[str], beam: int
) -> str:
    """Counts equal translations and, among the others, those where ours is the likelier one."""
    same = likelier = 0
    options = Options(beam_size=beam, length_penalty_alpha=0.0)
    for line, found in zip(lines, translator.translate(lines, options), strict=True):
        more = {"early_stopping": "never", "length_penalty": 0.0} if beam > 1 else {}
        longest = min(len(found.source) + translator.config.decode.max_length_offset, 128)
        generated = theirs.generate(
            **tokenizer(line, return_tensors="pt"), num_beams=beam, do_sample=False,
            max_new_tokens=longest, suppress_tokens=[1], **more,
        )  # fmt: skip
        text = tokenizer.decode(generated[0], skip_special_tokens=True)
        same += text == found.text
        likelier += text != found.text and found.log_prob > translator.score([(line, text)])[0]
    return f"{same} equal, {likelier} likelier, of {len(lines)}"


def tune(ours: Path) -> dict[str, str]:
    """Tunes an imported model on 1,000 pairs of another domain, whose words come in reverse."""
    folder, loaded = ours.parent, load_for_inference(ours)
    lines = LINES[1000:2000]
    sides = {
        "source": lines,
        "target": [" ".join(reversed(line.upper().split())) for line in lines],
    }
    for side, texts in sides.items():
        (folder / f"train.{side}").write_text("".join(f"{text}\n" for text in texts))
        (folder / f"validation.{side}").write_text("".join(f"{text}\n" for text in texts[:100]))
    train = TrainConfig(
        steps=200, evaluate_every=200, checkpoint_every=200, initialize_from=str(ours)
    )
    config = dataclasses.replace(
        loaded.config,
        data=dataclasses.replace(loaded.config.data, dir=str(folder), tokens_per_batch=2048),
        optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=20),
        train=train,
    )
    run(config, folder / "tuned")
    log = (folder / "tuned" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, log) if "loss" in line]
    before, after = Translator.load(ours), Translator.load(folder / "tuned")
    texts = [[found.text for found in each.translate(LINES[:50])] for each in (before, after)]
    export_marian(load_for_inference(folder / "tuned"), folder / "again")
    exported = compare(folder / "again", folder / "imported-again", searches=False)
    return {
        "loss of training": f"{losses[0]:.2f} -> {losses[-1]:.2f}",
        "texts that changed": f"{sum(a != b for a, b in zip(*texts, strict=True))} of 50",
        "logits after export": exported["logits"],
    }


def equal(one: Sequence[Any], other: Sequence[Any]) -> str:
    return f"{sum(a == b for a, b in zip(one, other, strict=True))} of {len(one)}"


def write_golden(folder: Path) -> None:
    """Writes a small model and what Marian makes of two pairs with it."""
    folder.mkdir(parents=True)
    make(folder, layers=(1, 2), heads=2, d_model=22, d_ff=13)
    model, pad = MarianMTModel.from_pretrained(folder).eval(), 0
    pad = model.config.pad_token_id
    source = np.array([[17, 5, 29, 0], [11, 0, pad, pad]])
    target = np.array([[7, 3, 0], [0, pad, pad]])
    with torch.inference_mode():
        found = forward(model, *map(torch.from_numpy, (source, target)), pad)
    np.savez(
        folder / "expected.npz", source=source, target=target, logits=found.logits.numpy(),
        memory=found.encoder_last_hidden_state.numpy(),
    )  # fmt: skip


def measure_speed(folder: Path, repeats: int) -> None:
    """Prints sentences a second of this program, Transformers and CTranslate2, two threads each."""
    folder.mkdir()
    make(folder, layers=(6, 6), heads=8, d_model=512, d_ff=2048, vocab_size=OPUS_VOCABULARY)
    ours = folder.with_name("ours")
    import_marian(folder, ours, None, None)
    loaded = load_for_inference(ours)
    decode = dataclasses.replace(loaded.config.decode, max_length_offset=0)
    config = dataclasses.replace(loaded.config, decode=decode)
    translator = Translator(config, loaded.tokenizer, loaded.params)
    lines = lines_of(LENGTH, translator.tokenizer)
    programs = [this_program(translator), marian(translator, 2)]
    programs += [ctranslate2(translator, 2, at_once) for at_once in (1, 2)]
    record: dict[str, Any] = {"sentences": len(lines), "threads": 2, "beams": {}}
    for beam in (4, 1):
        rates, found = race(programs, lines, beam, repeats)
        lengths = {len(tokens) for each in found.values() for tokens in each}
        assert lengths == {LENGTH}, lengths
        record["beams"][beam] = {"rates": rates, "differences": {}}
        print(report(record), flush=True)


def lines_of(length: int, tokenizer: Tokenizer) -> list[str]:
    """Lines of the task that have `length` pieces, EOS included."""
    words = (" ".join(DRAW.choices(WORDS, k=DRAW.randint(4, 16))) for _ in itertools.count())
    found = (line for line in words if len(tokenizer.encode(line)) == length)
    return list(itertools.islice(found, SENTENCES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.golden:
        write_golden(options.golden)
        return
    if options.speed:
        with tempfile.TemporaryDirectory() as place:
            measure_speed(Path(place) / "marian", options.repeats)
        return
    for name, how in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            folder, ours = Path(place) / "marian", Path(place) / "ours"
            folder.mkdir()
            make(folder, **how)
            row = compare(folder, ours, searches=name == "trained")
            row |= tune(ours) if name == "trained" else {}
            print(f"{name}:", ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()

"""This program, Hugging Face's Marian and CTranslate2 on the weights of one checkpoint.

Each is a Program: text to token ids with the same tokenizer, and forced decoding. The peers know
one greatest length for a batch; what they write beyond that of a sentence is cut. They come with
`pip install -e '.[train,benchmark]'`; nothing else here needs them.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.data.batch import padded
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import score_batch
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.interop.export import export_ctranslate2, export_marian
from flaxformer_min.model.build import split_model

BATCH_SIZES = (8, 16, 32, 64, 128)  # sentences, tried with the peers
SCORED_AT_ONCE = 50

Ids = list[int]


class Program(NamedTuple):
    """What is compared; `settings` are the ones worth trying.

    translate(lines, beam, setting) searches for the likeliest translation (alpha 0) and gives its
    ids, EOS last where it has ended; score(sources, targets) gives the log-probability of each
    target token.
    """

    name: str
    settings: Sequence[Any]
    translate: Callable[[Sequence[str], int, Any], list[Ids]]
    score: Callable[[Sequence[Ids], Sequence[Ids]], list[np.ndarray]]


def this_program(translator: Translator) -> Program:
    tokenizer = translator.tokenizer
    score_rows = jax.jit(functools.partial(score_batch, (_graphdef(translator),), tokenizer))

    def translate(lines: Sequence[str], beam: int, _setting: str) -> list[Ids]:
        options = Options(beam_size=beam, length_penalty_alpha=0.0)
        return [list(found.tokens) for found in translator.translate(lines, options)]

    def log_probs(source: np.ndarray, target: np.ndarray) -> jax.Array:
        return score_rows((translator.params,), (source, target))

    def score(sources: Sequence[Ids], targets: Sequence[Ids]) -> list[np.ndarray]:
        return _score(log_probs, sources, targets, tokenizer)

    return Program("flaxformer_min", ["its own"], translate, score)


def marian(translator: Translator, threads: int) -> Program:
    """MarianMTModel as `export marian` writes it, but with this model's epsilon of layer norms."""
    import torch
    from transformers import MarianMTModel

    torch.set_num_threads(threads)
    tokenizer = translator.tokenizer
    with _exported(export_marian, translator) as directory:
        model = MarianMTModel.from_pretrained(directory).eval()
    # What `translate` gives says the same, and suppress_tokens is faster than bad_words_ids.
    model.generation_config.update(bad_words_ids=None, max_length=None)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = translator.config.model.layer_norm_epsilon

    @torch.inference_mode()
    def translate(lines: Sequence[str], beam: int, size: int) -> list[Ids]:
        sources = tokenizer.encode_batch(lines)
        found: list[Ids] = [[]] * len(sources)
        for places in _by_length(sources, size):
            chosen = [sources[place] for place in places]
            width = max(map(len, chosen))
            batch = padded(chosen, width, tokenizer.pad_id).astype(np.int64)
            generated = model.generate(
                torch.from_numpy(batch),
                attention_mask=torch.from_numpy(batch != tokenizer.pad_id),
                num_beams=beam,
                do_sample=False,
                length_penalty=0.0 if beam > 1 else None,
                max_new_tokens=_max_length(translator, batch.shape[1]),
                suppress_tokens=list(tokenizer.never_generated),
            )
            for place, ids in zip(places, generated[:, 1:].tolist(), strict=True):
                limit = _max_length(translator, len(sources[place]))
                found[place] = _until(ids, tokenizer.eos_id)[:limit]
                tokenizer.decode(ids)
        return found

    @torch.inference_mode()
    def log_probs(source: np.ndarray, target: np.ndarray) -> np.ndarray:
        target_in = np.roll(target, 1, axis=1)
        target_in[:, 0] = tokenizer.bos_id
        logits = model(
            input_ids=torch.from_numpy(source),
            attention_mask=torch.from_numpy(source != tokenizer.pad_id),
            decoder_input_ids=torch.from_numpy(target_in),
        ).logits
        chosen = torch.from_numpy(target)[:, :, None]
        return logits.log_softmax(-1).gather(2, chosen)[:, :, 0].numpy()

    def score(sources: Sequence[Ids], targets: Sequence[Ids]) -> list[np.ndarray]:
        return _score(log_probs, sources, targets, tokenizer)

    return Program("Marian", BATCH_SIZES, translate, score)


def ctranslate2(translator: Translator, threads: int, at_once: int) -> Program:
    """What `export ctranslate2` writes, with `at_once` batches side by side on these threads."""
    import ctranslate2

    tokenizer = translator.tokenizer
    with _exported(export_ctranslate2, translator) as directory:
        peer = ctranslate2.Translator(
            str(directory),
            compute_type="float32",
            inter_threads=at_once,
            intra_threads=threads // at_once,
        )
    names = tokenizer.pieces(range(tokenizer.vocab_size))
    never = [[names[i]] for i in tokenizer.never_generated if i != tokenizer.unk_id]
    ids = {name: i for i, name in enumerate(names)}

    def named(batch: Sequence[Ids]) -> list[list[str]]:
        """The pieces of each row without its EOS, which CTranslate2 adds by itself."""
        return [[names[i] for i in row[:-1]] for row in batch]

    def translate(lines: Sequence[str], beam: int, size: int) -> list[Ids]:
        sources = tokenizer.encode_batch(lines)
        results = peer.translate_batch(
            named(sources),
            max_batch_size=size,
            beam_size=beam,
            length_penalty=0.0,
            max_decoding_length=_max_length(translator, max(map(len, sources))),
            disable_unk=True,
            suppress_sequences=never,
            return_end_token=True,
        )
        found = [[ids[name] for name in result.hypotheses[0]] for result in results]
        for row, source in zip(found, sources, strict=True):
            tokenizer.decode(row)
            del row[_max_length(translator, len(source)) :]
        return found

    def score(sources: Sequence[Ids], targets: Sequence[Ids]) -> list[np.ndarray]:
        sides = named(sources), named(targets)
        results = peer.score_batch(*sides, max_batch_size=SCORED_AT_ONCE)
        return [np.array(result.log_probs) for result in results]

    return Program(f"CTranslate2 x{at_once}", BATCH_SIZES, translate, score)


@contextlib.contextmanager
def _exported(
    export: Callable[[Loaded, Path], list[str]], translator: Translator
) -> Generator[Path, None, None]:
    """A context with a directory that holds the translator's model in another format."""
    params, step = jax.device_get(translator.params), 0
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "exported"
        export(Loaded(translator.config, translator.tokenizer, params, step), directory)
        yield directory


def _graphdef(translator: Translator) -> nnx.GraphDef:
    return split_model(translator.config.model, translator.tokenizer.vocab_size)[0]


def _max_length(translator: Translator, source_length: int) -> int:
    config = translator.config
    return min(source_length + config.decode.max_length_offset, config.model.max_length)


def _score(
    log_probs: Callable[[np.ndarray, np.ndarray], Any],
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    tokenizer: Tokenizer,
) -> list[np.ndarray]:
    """The log-probabilities of each target's tokens, in batches of one shape."""
    found = [np.empty(0)] * len(sources)
    width = max(map(len, [*sources, *targets]), default=0)
    for places in _by_length(sources, SCORED_AT_ONCE):
        fillers: list[Ids] = [[]] * (SCORED_AT_ONCE - len(places))
        sides = (
            padded([*(side[place] for place in places), *fillers], width, tokenizer.pad_id).astype(
                np.int64
            )
            for side in (sources, targets)
        )
        for place, row in zip(places, np.asarray(log_probs(*sides)), strict=False):
            found[place] = row[: len(targets[place])]
    return found


def _by_length(sources: Sequence[Ids], size: int) -> Iterator[list[int]]:
    """Places of the sources, shorter ones first, `size` at once."""
    places = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    for first in range(0, len(places), size):
        yield places[first : first + size]


def _until(ids: Ids, eos_id: int) -> Ids:
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids

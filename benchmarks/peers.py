"""This program, Hugging Face's Marian and CTranslate2 on the weights of one checkpoint.

Each is a Program: text to token ids with the same tokenizer, and forced decoding. The peers come
with `pip install -e '.[train,benchmark]'`; nothing else here needs them.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from flaxformer_min.data.batch import padded
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.programs import score_batch
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.build import split_model
from flaxformer_min.model.positions import sinusoidal_positions

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
    """MarianMTModel. Its tables of positions are replaced by the paper's; its biases are 0."""
    import torch

    torch.set_num_threads(threads)
    model, tokenizer = _marian_model(translator), translator.tokenizer

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
                found[place] = _until(ids, tokenizer.eos_id)
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
    """ctranslate2.Translator with `at_once` batches side by side, which share the threads."""
    import ctranslate2

    tokenizer = translator.tokenizer
    with tempfile.TemporaryDirectory() as directory:
        _ctranslate2_spec(translator).save(directory)
        peer = ctranslate2.Translator(
            directory,
            compute_type="float32",
            inter_threads=at_once,
            intra_threads=threads // at_once,
        )
    names = _token_names(translator)
    never = [[names[i]] for i in tokenizer.never_generated if i != tokenizer.unk_id]
    ids = {name: i for i, name in enumerate(names)}

    def named(batch: Sequence[Ids]) -> list[list[str]]:
        return [[names[i] for i in row] for row in batch]

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
        for row in found:
            tokenizer.decode(row)
        return found

    def score(sources: Sequence[Ids], targets: Sequence[Ids]) -> list[np.ndarray]:
        without_eos = named([target[:-1] for target in targets])
        results = peer.score_batch(named(sources), without_eos, max_batch_size=SCORED_AT_ONCE)
        return [np.array(result.log_probs) for result in results]

    return Program(f"CTranslate2 x{at_once}", BATCH_SIZES, translate, score)


def _marian_model(translator: Translator) -> Any:
    import torch
    from transformers import MarianConfig, MarianMTModel

    config, tokenizer = translator.config.model, translator.tokenizer
    model = MarianMTModel(
        MarianConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_layers,
            decoder_layers=config.num_layers,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            max_position_embeddings=config.max_length,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=tokenizer.pad_id,
            decoder_start_token_id=tokenizer.bos_id,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
            forced_eos_token_id=None,
        )
    ).eval()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, value in _marian_weights(translator):
        assert state[name].shape == value.shape, (name, value.shape)
        state[name] = torch.tensor(np.array(value))
    model.load_state_dict(state)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = config.layer_norm_epsilon
    return model


def _marian_weights(translator: Translator) -> Iterator[tuple[str, np.ndarray]]:
    """Marian's names and layouts: kernels are [out, in]."""
    config, params = translator.config.model, jax.device_get(translator.params)
    positions = np.asarray(sinusoidal_positions(config.max_length, config.d_model))
    for name in ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"):
        yield f"{name}.weight", params["embedding"]
    yield "lm_head.weight", params["embedding"]
    parts = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
    kernels = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", positions
        for number, layer in params[side].items():
            prefix = f"model.{side}.layers.{number}"
            for part, name in parts.items():
                for kernel, projection in kernels.items() if part in layer else ():
                    yield f"{prefix}.{name}.{projection}.weight", layer[part][kernel].T
            for part, name in {**parts, "feed_forward": "final"}.items():
                if residual := layer.get(f"{part}_residual"):
                    norm = f"{prefix}.{name}_layer_norm"
                    yield f"{norm}.weight", residual["scale"]
                    yield f"{norm}.bias", residual["bias"]
            for kernel, name in {"up": "fc1", "down": "fc2"}.items():
                yield f"{prefix}.{name}.weight", layer["feed_forward"][kernel].T
                yield f"{prefix}.{name}.bias", layer["feed_forward"][f"{kernel}_bias"]


def _ctranslate2_spec(translator: Translator) -> Any:
    from ctranslate2.specs import Activation, TransformerSpec

    config, params = translator.config.model, jax.device_get(translator.params)
    layers = (config.num_layers, config.num_layers)
    spec = TransformerSpec.from_config(
        layers, config.num_heads, pre_norm=False, activation=Activation.RELU
    )
    names = _token_names(translator)
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    tokenizer = translator.tokenizer
    spec.config.unk_token = names[tokenizer.unk_id]
    spec.config.bos_token = spec.config.decoder_start_token = names[tokenizer.bos_id]
    spec.config.eos_token = names[tokenizer.eos_id]
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = params["embedding"]
    spec.decoder.projection.weight = params["embedding"]
    for side in ("encoder", "decoder"):
        part = getattr(spec, side)
        part.position_encodings.encodings = np.asarray(
            sinusoidal_positions(config.max_length, config.d_model), np.float32
        )
        for number, layer in params[side].items():
            _fill_layer(part.layer[int(number)], layer)
    spec.validate()
    spec.optimize()
    return spec


def _fill_layer(spec: Any, layer: Any) -> None:
    """CTranslate2's layouts: kernels are [out, in], projections of the same input are stacked."""

    def fill_norm(norm: Any, residual: Any) -> None:
        norm.gamma, norm.beta = residual["scale"], residual["bias"]

    def fill_linear(linear: Any, *kernels: np.ndarray, bias: np.ndarray | None = None) -> None:
        linear.weight = np.concatenate([kernel.T for kernel in kernels])
        if bias is not None:
            linear.bias = bias

    own, ffn = layer["self_attention"], layer["feed_forward"]
    fill_linear(spec.self_attention.linear[0], own["query"], own["key"], own["value"])
    fill_linear(spec.self_attention.linear[1], own["output"])
    fill_norm(spec.self_attention.layer_norm, layer["self_attention_residual"])
    if cross := layer.get("cross_attention"):
        fill_linear(spec.attention.linear[0], cross["query"])
        fill_linear(spec.attention.linear[1], cross["key"], cross["value"])
        fill_linear(spec.attention.linear[2], cross["output"])
        fill_norm(spec.attention.layer_norm, layer["cross_attention_residual"])
    fill_linear(spec.ffn.linear_0, ffn["up"], bias=ffn["up_bias"])
    fill_linear(spec.ffn.linear_1, ffn["down"], bias=ffn["down_bias"])
    fill_norm(spec.ffn.layer_norm, layer["feed_forward_residual"])


def _graphdef(translator: Translator) -> nnx.GraphDef:
    return split_model(translator.config.model, translator.tokenizer.vocab_size)[0]


def _token_names(translator: Translator) -> list[str]:
    """Names for CTranslate2, all different; which, does not matter."""
    return [f"<{i}>" for i in range(translator.tokenizer.vocab_size)]


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

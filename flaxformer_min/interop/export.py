"""Checkpoints of this program in the formats of others: safetensors, Marian, CTranslate2.

Each function writes one directory, which appears whole or not at all, and raises UserError for a
model that the format cannot say.
"""

import contextlib
import json
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.config import ModelConfig
from flaxformer_min.config_rules import config_to_json
from flaxformer_min.data.tokenizer import MarianTokenizer, Tokenizer, unpack
from flaxformer_min.errors import UserError
from flaxformer_min.interop.marian import CONFIG, EPSILON, GENERATION, MODEL, SAFETENSORS, TOKENIZER
from flaxformer_min.interop.names import weights_of
from flaxformer_min.model.positions import sinusoidal_positions


def export_safetensors(loaded: Loaded, output: Path) -> list[str]:
    """Writes model.safetensors with this program's names, weights.txt, config and tokenizer."""
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(loaded.params).items()}
    table = [f"{name}\t{leaf.dtype}\t{list(leaf.shape)}\n" for name, leaf in leaves.items()]
    with new_directory(output) as folder:
        _save_arrays(folder / SAFETENSORS, leaves)
        (folder / "weights.txt").write_text("".join(table), encoding="utf-8")
        (folder / CONFIG).write_text(config_to_json(loaded.config), encoding="utf-8")
        (folder / MODEL).write_bytes(loaded.tokenizer.model_bytes)
    return []


def export_marian(loaded: Loaded, output: Path) -> list[str]:
    """Writes what MarianMTModel and MarianTokenizer load; returns what Marian cannot say."""
    model, tokenizer = loaded.config.model, loaded.tokenizer
    _refuse_unsaid(model, "Marian")
    if model.num_heads * model.d_k != model.d_model or model.share_embeddings == "none":
        raise UserError("Marian has only H x d_k = D, and ties the target embedding to the logits")
    leaves = named_leaves(loaded.params)
    arrays = {}
    for weight in weights_of(model):
        array = leaves.get(weight.here)
        if array is None:  # a model without biases
            size = tokenizer.vocab_size if weight.here == "logits_bias" else model.d_model
            array = np.zeros(size, np.float32)
        arrays[weight.there] = weight.exported(np.asarray(array))
    fields = _marian_config(model, tokenizer)
    decode = loaded.config.decode
    generation = {
        **{name: fields[name] for name in ("pad_token_id", "eos_token_id")},
        "decoder_start_token_id": fields["decoder_start_token_id"],
        "num_beams": decode.beam_size,
        "length_penalty": decode.length_penalty_alpha,
        "max_length": model.max_length,
        "bad_words_ids": [[i] for i in tokenizer.never_generated],
        "forced_eos_token_id": None,
    }
    with new_directory(output) as folder:
        _save_arrays(folder / SAFETENSORS, arrays)
        _write_json(folder / CONFIG, fields)
        _write_json(folder / GENERATION, generation)
        _write_marian_tokenizer(folder, loaded)
    return _told(model, "Marian", "n^length_penalty")


def _marian_config(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    layers = model.num_layers, model.num_decoder_layers or model.num_layers
    sides = {}
    for side, count in zip(("encoder", "decoder"), layers, strict=True):
        sides[f"{side}_layers"] = count
        sides[f"{side}_ffn_dim"] = model.d_ff
        sides[f"{side}_attention_heads"] = model.num_heads
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": tokenizer.vocab_size,
        "decoder_vocab_size": tokenizer.vocab_size,
        "d_model": model.d_model,
        **sides,
        "max_position_embeddings": model.max_length,
        "activation_function": model.activation,
        "dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "activation_dropout": model.ffn_dropout,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": model.share_embeddings == "all",
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
        "forced_eos_token_id": None,
    }


def _write_marian_tokenizer(folder: Path, loaded: Loaded) -> None:
    """Writes source.spm, target.spm, vocab.json and tokenizer_config.json."""
    data, tokenizer = loaded.config.data, loaded.tokenizer
    if isinstance(tokenizer, MarianTokenizer):
        for name, content in unpack(tokenizer.model_bytes).items():
            (folder / name).write_bytes(content)
    else:
        for name in ("source.spm", "target.spm"):
            (folder / name).write_bytes(tokenizer.model_bytes)
        ids = {piece: i for i, piece in enumerate(_pieces(tokenizer))}
        _write_json(folder / "vocab.json", ids)
    names = dict(zip(("pad", "unk", "eos"), _special(tokenizer), strict=True))
    fields = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": data.source_language,
        "target_lang": data.target_language,
        "model_max_length": loaded.config.model.max_length,
        **{f"{name}_token": piece for name, piece in names.items()},
    }
    _write_json(folder / TOKENIZER, fields)


def export_ctranslate2(loaded: Loaded, output: Path) -> list[str]:
    """Writes what ctranslate2.Translator loads, and the tokenizer's files beside it."""
    model = loaded.config.model
    _refuse_unsaid(model, "CTranslate2")
    if not model.num_heads * model.d_k == model.num_heads * model.d_v == model.d_model:
        raise UserError("CTranslate2 has only H x d_k = H x d_v = D")
    spec = ctranslate2_spec(loaded)
    with new_directory(output) as folder:
        spec.save(str(folder))
        if isinstance(loaded.tokenizer, MarianTokenizer):
            _write_marian_tokenizer(folder, loaded)
        else:
            (folder / MODEL).write_bytes(loaded.tokenizer.model_bytes)
    return _told(model, "", "n^length_penalty")


def ctranslate2_spec(loaded: Loaded) -> Any:
    """Returns the specification that CTranslate2 saves. Its names of pieces are the tokenizer's."""
    try:
        from ctranslate2.specs import Activation, TransformerSpec
    except ImportError:
        raise UserError("ctranslate2 is needed: pip install ctranslate2") from None
    model, params, tokenizer = loaded.config.model, loaded.params, loaded.tokenizer
    layers = model.num_layers, model.num_decoder_layers or model.num_layers
    activation = Activation.RELU if model.activation == "relu" else Activation.SWISH
    spec = TransformerSpec.from_config(
        layers, model.num_heads, pre_norm=False, activation=activation
    )
    pieces = _pieces(tokenizer)
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token = pieces[tokenizer.unk_id]
    spec.config.bos_token = spec.config.decoder_start_token = pieces[tokenizer.bos_id]
    spec.config.eos_token = pieces[tokenizer.eos_id]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = model.layer_norm_epsilon
    table = np.asarray(params["embedding"])
    spec.decoder.embeddings.weight = table
    spec.encoder.embeddings[0].weight = np.asarray(params.get("source_embedding", table))
    spec.decoder.projection.weight = np.asarray(params.get("output_embedding", table))
    if model.biases:
        spec.decoder.projection.bias = np.asarray(params["logits_bias"])
    positions = np.asarray(sinusoidal_positions(model.max_length, model.d_model), np.float32)
    for side in ("encoder", "decoder"):
        part = getattr(spec, side)
        part.position_encodings.encodings = positions
        for layer, weights in params[side].items():
            _fill_layer(part.layer[int(layer)], weights)
    spec.validate()
    spec.optimize()
    return spec


def _fill_layer(spec: Any, layer: Mapping[str, Any]) -> None:
    """Fills one layer: matrices are [out, in], and projections of the same input are stacked."""

    def linear(target: Any, weights: Mapping[str, Any], *names: str) -> None:
        target.weight = np.concatenate([np.asarray(weights[name]).T for name in names])
        if f"{names[0]}_bias" in weights:
            target.bias = np.concatenate([np.asarray(weights[f"{name}_bias"]) for name in names])

    def norm(target: Any, residual: Mapping[str, Any]) -> None:
        target.gamma, target.beta = (np.asarray(residual[name]) for name in ("scale", "bias"))

    own, ffn = layer["self_attention"], layer["feed_forward"]
    linear(spec.self_attention.linear[0], own, "query", "key", "value")
    linear(spec.self_attention.linear[1], own, "output")
    norm(spec.self_attention.layer_norm, layer["self_attention_residual"])
    if cross := layer.get("cross_attention"):
        linear(spec.attention.linear[0], cross, "query")
        linear(spec.attention.linear[1], cross, "key", "value")
        linear(spec.attention.linear[2], cross, "output")
        norm(spec.attention.layer_norm, layer["cross_attention_residual"])
    linear(spec.ffn.linear_0, ffn, "up")
    linear(spec.ffn.linear_1, ffn, "down")
    norm(spec.ffn.layer_norm, layer["feed_forward_residual"])


def _refuse_unsaid(model: ModelConfig, name: str) -> None:
    if model.positions == "learned":
        raise UserError(f"{name} computes its positions; a learned table cannot be exported")


def _told(model: ModelConfig, epsilon_of: str, penalty: str) -> list[str]:
    """Returns a line for each thing that the other program does otherwise."""
    lines = [f"its length penalty divides by {penalty}, this program's by ((5 + n) / 6)^alpha"]
    if epsilon_of and model.layer_norm_epsilon != EPSILON:
        lines.append(
            f"{epsilon_of}'s layer norms have epsilon {EPSILON:g}, "
            f"this model's {model.layer_norm_epsilon:g}"
        )
    return lines


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """Returns the names of all ids. Raises UserError if two ids have the same name."""
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    if len(set(pieces)) != len(pieces):
        raise UserError("two pieces of the tokenizer have the same name")
    return pieces


def _special(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.pieces([tokenizer.pad_id, tokenizer.unk_id, tokenizer.eos_id])


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise UserError("safetensors is needed: pip install 'flaxformer_min[interop]'") from None
    save_file(dict(arrays), path, metadata={"format": "pt"})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_directory(path: Path) -> Generator[Path, None, None]:
    """A context with an empty directory, which becomes `path` when all files are in it."""
    if path.exists():
        raise UserError(f"{path}: is there already; give a new directory")
    unfinished = path.with_name(path.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise

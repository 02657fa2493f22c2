"""Marian models: what Transformers made of tests/golden/marian, round trips, hostile directories.

`python -m benchmarks.marian --golden DIR` made the golden directory with Transformers 5.24.
"""

import dataclasses
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_model import CONFIG, VARIANTS, VOCAB_SIZE, random_params

from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import ModelConfig
from flaxformer_min.data import tokenizer as tokenizer_room
from flaxformer_min.data.tokenizer import MarianTokenizer, open_tokenizer, unpack
from flaxformer_min.errors import UserError
from flaxformer_min.interop.export import export_marian, export_safetensors
from flaxformer_min.interop.marian import import_marian, import_safetensors
from flaxformer_min.interop.names import marian_columns, sinusoids
from flaxformer_min.model.build import split_model
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.model.teacher_forcing import forced_states

GOLDEN = Path(__file__).parent / "golden" / "marian"


@pytest.fixture
def marian(tmp_path) -> Path:
    """A copy of the golden directory, to be spoilt."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "marian"))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    output = tmp_path_factory.mktemp("imported") / "model"
    import_marian(GOLDEN, output, None, None)
    return load_for_inference(output)


def refusal(folder: Path) -> str:
    """The one line in which an import is refused; nothing may be left behind."""
    with pytest.raises(UserError) as refused:
        import_marian(folder, folder.parent / "output", None, None)
    assert "\n" not in str(refused.value)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(refused.value)


def change(folder: Path, name: str, **fields: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def random_params_for(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Random weights for a vocabulary of this size; those of the further ids are 0."""
    params, more = random_params(model), vocab_size - VOCAB_SIZE
    for name, leaf in params.items():
        if not isinstance(leaf, dict) and leaf.shape[0] == VOCAB_SIZE:
            params[name] = np.pad(leaf, ((0, more), *[(0, 0)] * (leaf.ndim - 1)))
    return params


@pytest.mark.run
def test_memory_and_logits_of_an_imported_model_are_those_of_transformers(loaded):
    expected = np.load(GOLDEN / "expected.npz")
    source, target = jnp.asarray(expected["source"]), jnp.asarray(expected["target"])
    pad = loaded.tokenizer.pad_id
    graphdef = split_model(loaded.config.model, loaded.tokenizer.vocab_size)[0]
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, loaded.params))

    @jax.jit
    def outputs():
        states = forced_states(model, source, target, pad_id=pad, bos_id=pad)
        return model.encode(source, padding_mask(source, pad)), model.project(states)

    memory, logits = map(np.asarray, outputs())
    columns = marian_columns(memory, 2)
    real, wanted = source != pad, expected["memory"][:, :, columns]
    np.testing.assert_allclose(memory[real], wanted[real], atol=1e-5)
    np.testing.assert_allclose(logits[target != pad], expected["logits"][target != pad], atol=1e-5)


def test_the_columns_of_marian_make_its_positions_those_of_the_paper():
    table = sinusoids(7, 22)
    paper = np.asarray(sinusoidal_positions(7, 22))
    np.testing.assert_allclose(table[:, marian_columns(table, 1)], paper, atol=1e-6)


def test_each_side_has_its_own_pieces_and_the_target_language_is_one_of_them(loaded):
    tokenizer = loaded.tokenizer
    assert isinstance(tokenizer, MarianTokenizer)
    assert tokenizer.bos_id == tokenizer.pad_id
    ids = tokenizer.encode(">>deu<<ab ca")
    assert tokenizer.pieces(ids)[0] == ">>deu<<"
    assert tokenizer.pieces(ids)[-1] == "</s>"
    assert tokenizer.encode("☃")[-2] == tokenizer.unk_id
    target = tokenizer.encode("ABC DE", "target")
    assert tokenizer.decode(target) == "ABC DE"
    assert tokenizer.encode("ABC DE", "source") != target
    assert {tokenizer.pad_id, tokenizer.unk_id} <= set(tokenizer.never_generated)
    assert open_tokenizer(tokenizer.model_bytes).sha256 == tokenizer.sha256
    parts = unpack(tokenizer.model_bytes)
    assert parts == {name: (GOLDEN / name).read_bytes() for name in parts}


def test_exporting_an_imported_model_gives_marians_arrays_and_files_back(loaded, tmp_path):
    export_marian(loaded, tmp_path / "back")
    arrays, back = (load_file(f / "model.safetensors") for f in (GOLDEN, tmp_path / "back"))
    assert arrays.keys() == back.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "back" / name).read_bytes() == (GOLDEN / name).read_bytes()
    wanted = json.loads((GOLDEN / "config.json").read_text())
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    alike = [key for key in found if key in wanted and key != "bos_token_id"]
    assert len(alike) > 15
    assert {key: found[key] for key in alike} == {key: wanted[key] for key in alike}


@pytest.mark.run
@pytest.mark.parametrize("kind", ["all", "target"])
def test_a_model_of_the_paper_comes_back_from_marian_bit_for_bit(tmp_path, loaded, kind):
    model = dataclasses.replace(
        CONFIG, d_k=13, d_v=13, share_embeddings=kind, layer_norm_epsilon=1e-5
    )
    config = dataclasses.replace(loaded.config, model=model)
    params = random_params_for(model, loaded.tokenizer.vocab_size)
    export_marian(loaded._replace(config=config, params=params), tmp_path / "marian")
    import_marian(tmp_path / "marian", tmp_path / "ours", None, None)
    back = named_leaves(load_for_inference(tmp_path / "ours").params)
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(back.pop(name), leaf, err_msg=name)
    assert all(name.endswith("_bias") and not leaf.any() for name, leaf in back.items())


@pytest.mark.run
def test_safetensors_come_back_bit_for_bit_whatever_the_model(loaded, tmp_path):
    for number, model in enumerate(VARIANTS.values()):
        data = dataclasses.replace(loaded.config.data, max_length=model.max_length)
        config = dataclasses.replace(loaded.config, model=model, data=data)
        params = random_params_for(model, loaded.tokenizer.vocab_size)
        exported, back = tmp_path / f"exported{number}", tmp_path / f"back{number}"
        export_safetensors(loaded._replace(config=config, params=params), exported)
        import_safetensors(exported, back)
        found = load_for_inference(back)
        assert found.config == config
        assert found.tokenizer.sha256 == loaded.tokenizer.sha256
        leaves = named_leaves(found.params)
        assert leaves.keys() == named_leaves(params).keys()
        for name, leaf in named_leaves(params).items():
            np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "m2m_100"}, "model_type"),
        ({"model_type": "t5"}, "model_type"),
        ({"activation_function": "gelu"}, "activation_function"),
        ({"scale_embedding": False}, "scale_embedding"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"normalize_before": True}, "normalize_before"),
        ({"normalize_embedding": True}, "normalize_embedding"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm"),
        ({"static_position_embeddings": False}, "static_position_embeddings"),
        ({"add_bias_logits": True}, "add_bias_logits"),
        ({"decoder_ffn_dim": 17}, "ffn_dim"),
        ({"d_model": 23}, "d_model"),
        ({"d_model": 24}, "model.shared.weight"),
        ({"encoder_layers": "many"}, "encoder_layers"),
        ({"decoder_layers": 3}, "model.decoder.layers.2"),
        ({"decoder_layers": 1}, "model.decoder.layers.1"),
        ({"pad_token_id": 3}, "pad_token_id"),
        ({"vocab_size": 90, "decoder_vocab_size": 90}, "vocab_size"),
    ],
)
def test_what_is_not_post_norm_marian_is_refused_by_name(marian, fields, words):
    change(marian, "config.json", **fields)
    assert words in refusal(marian)


@pytest.mark.parametrize(
    "name", ["config.json", "vocab.json", "source.spm", "target.spm", "model.safetensors"]
)
def test_a_missing_or_broken_file_is_named(marian, name):
    path = marian / name
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], b"", b"[1, 2]"):
        path.write_bytes(broken)
        assert name in refusal(marian)
    path.unlink()
    assert (name if name != "model.safetensors" else "pytorch_model.bin") in refusal(marian)


def test_a_vocabulary_that_has_holes_or_lacks_a_name_is_refused(marian):
    ids = json.loads((marian / "vocab.json").read_text())
    for wrong in (
        {piece: 2 * i for piece, i in ids.items()},
        {("<fill>" if piece == "<pad>" else piece): i for piece, i in ids.items()},
        {piece: str(i) for piece, i in ids.items()},
    ):
        (marian / "vocab.json").write_text(json.dumps(wrong))
        assert "vocab.json" in refusal(marian)


def test_another_layer_norm_or_another_table_of_positions_is_refused(marian):
    arrays = load_file(marian / "model.safetensors")
    table = sinusoids(128, 22).astype(np.float32)
    for name, array, good in (
        ("model.encoder.layer_norm.weight", np.ones(22, np.float32), False),
        ("model.encoder.embed_positions.weight", table[:, ::-1].copy(), False),
        ("lm_head.weight", arrays["model.shared.weight"] + 1, False),
        ("model.encoder.embed_positions.weight", table, True),
        ("lm_head.weight", arrays["model.shared.weight"], True),
    ):
        save_file({**arrays, name: array}, marian / "model.safetensors")
        if not good:
            assert name in refusal(marian)
    import_marian(marian, marian.parent / "output", None, None)


def test_numbers_that_are_not_finite_are_refused(marian):
    arrays = load_file(marian / "model.safetensors")
    arrays["model.decoder.layers.1.fc1.bias"][3] = np.nan
    save_file(arrays, marian / "model.safetensors")
    assert "fc1.bias: has numbers that are not finite" in refusal(marian)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_never_run(marian, tmp_path):
    (marian / "model.safetensors").unlink()
    (marian / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Bomb(marian / "bang")}))
    refusal(marian)
    assert not (marian / "bang").exists()


@pytest.mark.run
def test_no_change_of_a_byte_ends_in_a_traceback(marian, monkeypatch):
    monkeypatch.setattr(tokenizer_room, "_try_elsewhere", lambda _: None)  # those are not changed
    draw = random.Random(3)
    names = ["config.json", "vocab.json", "tokenizer_config.json", "model.safetensors"]
    contents = {name: (marian / name).read_bytes() for name in names}
    refused = 0
    for trial in range(200):
        name = names[trial % len(names)]
        content = bytearray(contents[name])
        place = draw.randrange(min(len(content), 3000))
        content[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        (marian / name).write_bytes(content)
        output = marian.parent / f"output{trial}"
        try:
            import_marian(marian, output, None, None)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
        (marian / name).write_bytes(contents[name])
    assert refused > 50


def test_an_output_that_is_there_already_is_kept(marian):
    (marian.parent / "output").mkdir()
    with pytest.raises(UserError, match="is there already"):
        import_marian(marian, marian.parent / "output", None, None)


def test_what_marian_cannot_say_is_refused_and_what_it_says_otherwise_is_told(loaded, tmp_path):
    for change_to in ({"positions": "learned"}, {"share_embeddings": "none"}, {"d_k": 5}):
        model = dataclasses.replace(CONFIG, **change_to)
        config = dataclasses.replace(loaded.config, model=model)
        wrong = loaded._replace(config=config, params=random_params(model))
        with pytest.raises(UserError):
            export_marian(wrong, tmp_path / "wrong")
        assert not (tmp_path / "wrong").exists()
    assert any("length penalty" in line for line in export_marian(loaded, tmp_path / "right"))

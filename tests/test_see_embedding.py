"""Neighbours in the embedding, and the encoder's vectors of words in context."""

import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
from flax import nnx

from flaxformer_min import cli
from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import initializer, split_model
from flaxformer_min.model.masks import padding_mask
from flaxformer_min.see.embedding import OTHERS, arrays, compare, encode, neighbours, sums

CONFIG, TOKENIZER = tiny_checkpoints.CONFIG, tiny_checkpoints.TOKENIZER
PIECES = TOKENIZER.pieces(range(TOKENIZER.vocab_size))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    _, params = initializer(CONFIG.model, TOKENIZER.vocab_size)(jax.random.key(0))
    return Loaded(CONFIG, TOKENIZER, jax.device_get(params), 7)


def with_table(loaded: Loaded, table: np.ndarray) -> Loaded:
    return loaded._replace(params=loaded.params | {"embedding": table})


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("a", [[(1, "a")]]),
        ("a b", [[(1, "a")], [(1, "b")]]),
        ("a - b + c d", [[(1, "a"), (-1, "b"), (1, "c")], [(1, "d")]]),
        ("a + b c - d", [[(1, "a"), (1, "b")], [(1, "c"), (-1, "d")]]),
    ],
)
def test_signs_join_words_into_sums(words, wanted):
    assert sums(words.split()) == wanted


@pytest.mark.parametrize("words", ["- a", "+", "a -", "a - - b", "a + b -"])
def test_a_sum_that_lacks_a_word_is_an_error_of_the_user(words):
    with pytest.raises(UserError, match="a word is missing in"):
        sums(words.split())


def test_neighbours_are_by_cosine_whatever_the_lengths(loaded):
    table = np.random.default_rng(1).normal(size=(len(PIECES), 10)).astype(np.float32)
    a, b, c = (PIECES.index(piece) for piece in ("▁a", "▁b", "▁g"))
    table[b], table[c] = 90 * table[a], table[a] * 0.01
    table[c, 0] += 0.003
    (found,) = neighbours(with_table(loaded, table), ["a"], count=3)
    assert found.title == "▁a"
    assert [piece for piece, _ in found.nearest[:2]] == ["▁b", "▁g"]
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    for piece, cosine in found.nearest:
        assert cosine == pytest.approx(units[a] @ units[PIECES.index(piece)], abs=1e-6)


def test_a_sum_adds_directions_and_does_not_find_its_own_words(loaded):
    table = np.eye(len(PIECES), 12, dtype=np.float32) + 1e-3
    ids = {name: PIECES.index(name) for name in ("▁a", "▁b", "▁g", "f")}
    for axis, name in enumerate(("▁a", "▁b", "▁g")):
        table[ids[name]] = 5 * np.eye(12)[axis]
    table[ids["f"]] = [1, -1, 1, *[0] * 9]
    (found,) = neighbours(with_table(loaded, table), ["a", "-", "b", "+", "g"], count=2)
    assert found.title == "▁a - ▁b + ▁g"
    assert found.nearest[0] == ("f", pytest.approx(1))


def test_pieces_that_training_never_told_apart_are_left_out_and_refused(loaded):
    rng = np.random.default_rng(2)
    table = rng.normal(size=(len(PIECES), 64)).astype(np.float32)
    never = [i for i, piece in enumerate(PIECES) if piece not in ("▁a", "▁b", "g", "f", "e")]
    common = table[PIECES.index("▁a")] + 0.5 * rng.normal(size=64)
    table[never] = common + 0.05 * rng.normal(size=(len(never), 64))
    assert len(never) > OTHERS
    model = with_table(loaded, table)
    (found,) = neighbours(model, ["a"])
    assert {piece for piece, _ in found.nearest} == {"▁b", "g", "f", "e"}
    with pytest.raises(UserError, match="training never met the piece ▁g"):
        neighbours(model, ["▁g"])


@pytest.mark.parametrize(
    ("word", "message"), [("bad", "ask for a part of it, ▁b a d"), ("世", "another word")]
)
def test_a_word_that_is_no_piece_is_an_error_that_names_its_pieces(loaded, word, message):
    with pytest.raises(UserError, match=message):
        neighbours(loaded, [word])


def test_encode_gives_the_models_states_and_nothing_for_a_blank_line(loaded):
    lines = ["a b ab", " ", "g"]
    found = encode(loaded, lines)
    graphdef, _ = split_model(CONFIG.model, TOKENIZER.vocab_size)
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, loaded.params))
    for line, each in zip(lines, found, strict=True):
        ids = jnp.array([TOKENIZER.encode(line)])
        if line == " ":
            assert each.states.shape == each.embedding.shape == (0, 10) and each.pieces == []
            continue
        assert each.pieces == TOKENIZER.pieces(ids[0])
        states = model.encode(ids, padding_mask(ids))[0]
        np.testing.assert_allclose(each.states, states, atol=1e-5)
        wanted = 10**0.5 * loaded.params["embedding"][ids[0]]
        np.testing.assert_allclose(each.embedding, wanted, atol=1e-6)
    pooled = arrays(found, pooled=True)["states"]
    np.testing.assert_allclose(pooled[0], found[0].states.mean(axis=0), atol=1e-6)
    assert (pooled[1] == 0).all() and pooled.shape == (3, 10)
    names = {f"{n}/{name}" for n in (1, 2, 3) for name in ("pieces", "embedding", "states")}
    assert set(arrays(found, pooled=False)) == names


def test_a_words_embedding_is_one_vector_and_its_states_are_several(loaded):
    table = list(compare(loaded, "ab", ["a ab", "g", "ab b"]))
    assert [line[:8].strip() for line in table] == [
        "ab: cosi", "alone", "line 1", "line 3", "ab: cosi", "alone", "line 1", "line 3",
    ]  # fmt: skip
    assert all(line.split()[-3:] == ["1.00"] * 3 for line in table[1:4])
    assert any("1.00" not in line.split()[-2:] for line in table[5:7])
    with pytest.raises(UserError, match="no line of standard input has it"):
        list(compare(loaded, "ab", ["g"]))


def test_the_verbs_work_on_a_run(finished, tmp_path, capsys, monkeypatch):
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n\nsee a cat\n")))
        status = cli.main([words[0], str(finished), *words[1:]])
        written = capsys.readouterr()
        return status, written.out + written.err

    tokenizer = Tokenizer.load(finished / "tokenizer.model")
    one, two, *_ = (p for p in tokenizer.pieces(tokenizer.encode("see a cat")) if p != "▁")
    status, text = run("neighbours", one, "-", two)
    assert status == 0 and " - " in text.split("\n")[0] and 2 < text.count("\n") <= 11
    path = tmp_path / "a.npz"
    assert run("encode", "--output", str(path)) == (0, "")
    with np.load(path) as file:
        assert file["3/states"].shape == (len(file["3/pieces"]), 16)
    assert run("encode", "--output", str(path), "--pooled", "--word", "cat")[0] == 0
    with np.load(path) as file:
        assert file["states"].shape == (3, 16)
    assert run("encode") == (2, "error: encode needs --output FILE.npz or --word WORD, or both\n")
    assert run("neighbours", "a", "-")[0] == run("encode", "--output", "a.txt")[0] == 2

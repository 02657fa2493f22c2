"""Word alignments: pieces are parts of the right words, and the links those of most weight."""

import numpy as np
import pytest

from flaxformer_min.decoding.alignment import links, pharaoh, words_of
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], []),
        (["\u2581a"], [{0}]),
        (["a", "b", "\u2581", "\u2581c", "d"], [{0}, {0}, set(), {1}, {1}]),
        (["\u2581", "a", "\u2581\u2581b"], [set(), {0}, {1}]),
        (["\u2581a\u00a0b", "c"], [{0, 1}, {1}]),
        (["\u2581", "<0xC3>", "<0xBC>", "\u2581x"], [set(), {0}, {0}, {1}]),
        (["<0xFF>", "a", "<0x20>", "b"], [{0}, {0}, set(), {1}]),
        (["\u2581a", "<unk>", "b"], [{0}, {1}, {2}]),
        ([">>deu<<", "\u2581a"], [{0}, {1}]),
    ],
)
def test_pieces_are_parts_of_the_words_that_white_space_divides(pieces, words):
    assert words_of(pieces) == words


def test_a_words_weight_is_the_sum_of_its_pieces_and_eos_takes_part_in_no_link():
    """Three source pieces of two words, two target pieces of one word and one of another; EOS."""
    weights = np.array([[3, 2, 4, 9], [1, 1, 1, 9], [0, 1, 2, 9], [9, 9, 9, 9]], float)
    source, target = [{0}, {0}, {1}], [{0}, {0}, {1}]
    assert links(weights, source, target) == [(0, 0), (1, 1)]  # 7 against 5, 1 against 2
    assert links(weights, [set()] * 3, target) == []
    assert links(weights, source, [set()] * 3) == []


@pytest.mark.parametrize("step", [100, 200])
def test_every_word_of_a_translation_has_one_link_to_a_word_of_its_source(finished, step):
    translator = Translator.load(finished, step=step)
    lines = ["seven dogs", "a cat and trees", "see " * 40]
    for line, found in zip(
        lines, translator.translate(lines, Options(attention=True)), strict=True
    ):
        cross = np.asarray(found.attention.cross)
        text = pharaoh(translator.tokenizer, found.source, found.tokens, cross)
        pairs = [tuple(map(int, link.split("-"))) for link in text.split()]
        assert [target for _, target in pairs] == list(range(len(found.text.split())))
        assert all(0 <= source < len(line.split()) for source, _ in pairs)

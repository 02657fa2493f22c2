"""The BLEU record is sacreBLEU's, and says how it came about."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import sacrebleu

from flaxformer_min.config import DecodeConfig
from flaxformer_min.decoding.bleu import bleu_record
from flaxformer_min.decoding.evaluate import evaluate
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, EMPTY, Translator
from flaxformer_min.errors import UserError

REFERENCES = ["The cat sat, on the mat.", "Two grey dogs ran home .", "", "A B C D E"]
TRANSLATIONS = ["The cat sat on the mat.", "two grey dogs ran home .", "", "A B C D F"]


@pytest.mark.parametrize("tokenize", ["13a", "none", "char"])
def test_the_record_is_that_of_sacrebleu(tokenize):
    decode = DecodeConfig(beam_size=5, length_penalty_alpha=1.0, bleu_tokenize=tokenize)
    record = bleu_record(TRANSLATIONS, REFERENCES, decode, 1200)
    expected = sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES], tokenize=tokenize)
    assert record["score"] == expected.score
    assert f"tok:{tokenize}|" in record["signature"]
    assert "case:mixed|" in record["signature"]
    assert sacrebleu.__version__ in record["signature"]
    assert (record["lines"], record["step"], record["beam_size"]) == (4, 1200, 5)
    assert record["length_penalty_alpha"] == 1.0
    assert json.loads(json.dumps(record)) == record


def test_a_bleu_worked_out_by_hand():
    """5 of 6, 3 of 5, 2 of 4, 1 of 3 n-grams match, and both lengths are 6."""
    record = bleu_record(["a b c d x e"], ["a b c d y e"], DecodeConfig(bleu_tokenize="none"), None)
    by_hand = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert record["score"] == pytest.approx(by_hand, abs=1e-9)


def test_case_counts():
    same = bleu_record(["A b c d"], ["A b c d"], DecodeConfig(), 1)["score"]
    lower = bleu_record(["a b c d"], ["A b c d"], DecodeConfig(), 1)["score"]
    assert same == pytest.approx(100)
    assert lower < 70


class Upper(Translator):
    """A translator that upper-cases."""

    def __init__(self):
        self.config, self.step = SimpleNamespace(decode=DecodeConfig(beam_size=2)), 30

    def translate(self, lines, options=DEFAULT):
        self.options = options
        return [dataclasses.replace(EMPTY, text=line.upper()) for line in lines]


def test_evaluate_translates_the_sources_and_records_how():
    translator, options = Upper(), Options(beam_size=3, length_penalty_alpha=0.25)
    record = evaluate(translator, [("a b c d", "A B C D"), ("", "")], options)
    assert record["score"] == pytest.approx(100)
    assert (record["step"], record["lines"]) == (30, 2)
    assert (record["beam_size"], record["length_penalty_alpha"]) == (3, 0.25)
    assert record["max_length_offset"] == DecodeConfig().max_length_offset
    assert translator.options == options
    assert evaluate(translator, [("a", "A")])["beam_size"] == 2


def test_nothing_to_evaluate_is_an_error_of_the_user():
    with pytest.raises(UserError, match="no lines"):
        evaluate(Upper(), [])

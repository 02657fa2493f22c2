"""The BLEU record is sacreBLEU's, and says how it came about."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from flaxformer_min.config import Config, DecodeConfig
from flaxformer_min.decoding.bleu import bleu_metric, bleu_record
from flaxformer_min.decoding.evaluate import evaluate, paired_bootstrap, rounded
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import DEFAULT, EMPTY, Translator
from flaxformer_min.errors import UserError
from flaxformer_min.training import loop
from tools.tiny_config import changed

REFERENCES = ["The cat sat, on the mat.", "Two grey dogs ran home .", "", "A B C D E"]
TRANSLATIONS = ["The cat sat on the mat.", "two grey dogs ran home .", "", "A B C D F"]


def config_of(tiny: Config, tokenize: str = "13a", language: str = "de") -> Config:
    return changed(
        changed(tiny, "decode", bleu_tokenize=tokenize), "data", target_language=language
    )


def score_of(config: Config, translations: list[str], references: list[str]) -> float:
    metric = bleu_metric(config)
    return bleu_record(metric, translations, references, config.decode, None)["score"]


@pytest.mark.parametrize("tokenize", ["13a", "none", "char"])
def test_the_record_is_that_of_sacrebleu(tiny, tokenize):
    decode = DecodeConfig(beam_size=5, length_penalty_alpha=1.0)
    metric = bleu_metric(config_of(tiny, tokenize))
    record = bleu_record(metric, TRANSLATIONS, REFERENCES, decode, 1200)
    expected = sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES], tokenize=tokenize)
    assert record["score"] == expected.score
    assert f"tok:{tokenize}|" in record["signature"]
    assert "case:mixed|" in record["signature"]
    assert sacrebleu.__version__ in record["signature"]
    assert (record["lines"], record["step"], record["beam_size"]) == (4, 1200, 5)
    assert record["length_penalty_alpha"] == 1.0
    assert json.loads(json.dumps(record)) == record


def test_a_bleu_worked_out_by_hand(tiny):
    """5 of 6, 3 of 5, 2 of 4, 1 of 3 n-grams match, and both lengths are 6."""
    by_hand = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    found = score_of(config_of(tiny, "none"), ["a b c d x e"], ["a b c d y e"])
    assert found == pytest.approx(by_hand, abs=1e-9)


def test_case_counts(tiny):
    assert score_of(tiny, ["A b c d"], ["A b c d"]) == pytest.approx(100)
    assert score_of(tiny, ["a b c d"], ["A b c d"]) < 70


@pytest.mark.parametrize("language", ["zh", "zh_Hant", "ZH-cn"])
def test_chinese_is_counted_by_characters_unless_the_config_says_otherwise(tiny, language):
    """One of ten characters is wrong: n-grams of Chinese characters, 9/10, 7/9, 5/8 and 4/7."""
    texts = ["他昨天在图书馆读书。"], ["他昨天在图书馆看书。"]
    assert score_of(config_of(tiny, "13a", language), *texts) == 0
    by_hand = 100 * (9 / 10 * 7 / 9 * 5 / 8 * 4 / 7) ** 0.25
    assert score_of(config_of(tiny, "auto", language), *texts) == pytest.approx(by_hand)


@pytest.mark.parametrize("language", ["de", "en_GB", "tlh", "x"])
def test_other_languages_are_counted_as_13a(tiny, language):
    record = bleu_record(
        bleu_metric(config_of(tiny, "auto", language)), ["a"], ["a"], tiny.decode, None
    )
    assert "tok:13a|" in record["signature"]


@pytest.mark.parametrize(
    ("tokenize", "language"), [("auto", "ja"), ("ja-mecab", "de"), ("auto", "ko-KR")]
)
def test_a_package_that_bleu_lacks_is_named_before_a_run_writes_anything(
    tiny, tmp_path, monkeypatch, tokenize, language
):
    for name in ("ja", "ko"):
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{name}_mecab.MeCab", None)
    config = config_of(tiny, tokenize, language)
    extra = "ko" if language == "ko-KR" else "ja"
    with pytest.raises(UserError, match=rf"install 'sacrebleu\[{extra}\]'.*'char'") as caught:
        loop.run(config, tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    assert score_of(config_of(tiny, "char", language), ["abcd"], ["abcd"]) == pytest.approx(100)


def test_texts_that_look_the_same_are_the_same(tiny):
    apart = ["Bu\u0308cher fu\u0308r mu\u0308de Hu\u0308te"]
    assert score_of(tiny, apart, ["Bücher für müde Hüte"]) == pytest.approx(100)
    assert score_of(tiny, ["Bücher für müde Hüte"], apart) == pytest.approx(100)


class Upper(Translator):
    """A translator that upper-cases, or says what it is told to say."""

    def __init__(self, config: Config, texts: list[str] | None = None):
        self.config, self.step, self.texts = changed(config, "decode", beam_size=2), 30, texts

    def translate(self, lines, options=DEFAULT, *, tell):
        self.options = options
        tell(len(lines))
        texts = self.texts or [line.upper() for line in lines]
        return [dataclasses.replace(EMPTY, text=text) for text in texts]


def test_evaluate_translates_the_sources_and_records_how(tiny):
    translator, options = Upper(tiny), Options(beam_size=3, length_penalty_alpha=0.25)
    record = evaluate(translator, [("a b c d", "A B C D"), ("", "")], options)
    assert record["score"] == pytest.approx(100)
    assert (record["step"], record["lines"]) == (30, 2)
    assert (record["beam_size"], record["length_penalty_alpha"]) == (3, 0.25)
    assert record["max_length_offset"] == tiny.decode.max_length_offset
    assert translator.options == options
    assert evaluate(translator, [("a", "A")])["beam_size"] == 2


def test_nothing_to_evaluate_is_an_error_of_the_user(tiny):
    with pytest.raises(UserError, match="no lines"):
        evaluate(Upper(tiny), [])


def written(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


@pytest.mark.run
def test_chrf_ter_and_the_paired_bootstrap_are_those_of_sacrebleus_own_command(tiny, tmp_path):
    draw = random.Random(1)
    references = [
        " ".join(draw.choices(["Hund", "Katze", "und", "Baum", "sieben"], k=7)) for _ in range(23)
    ]
    good, bad = (
        [" ".join(w for w in line.split() if draw.random() < keep) for line in references]
        for keep in (0.9, 0.8)
    )
    config = changed(tiny, "decode", bleu_tokenize="13a")
    record = evaluate(Upper(config, good), [("x", reference) for reference in references])
    files = {"ref": references, "bad": bad, "good": good}
    ref, *systems = (written(tmp_path / name, lines) for name, lines in files.items())
    flags = ["-m", "bleu", "chrf", "ter", "-w", "2", "-f", "text"]

    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "sacrebleu", *arguments, *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    alone = said(ref, "-i", systems[1])
    for name, shown in (("BLEU", record), ("chrF2", record["chrf"]), ("TER", record["ter"])):
        line = next(line.strip() for line in alone.splitlines() if f"{name}|" in line)
        assert line.startswith(f"{name}|{shown['signature']} = {shown['score']:.2f}")
    together = said(ref, "-i", *systems, "--paired-bs")
    rows = {name: next(r for r in together.splitlines() if f"{name} │" in r) for name in systems}
    for found in paired_bootstrap(config, good, bad, references).values():
        for name, side in zip(systems, (found["baseline"], found), strict=True):
            cell = f"{side['score']:.2f} ({side['mean']:.2f} ± {side['interval']:.2f})"
            assert cell in rows[name]
        assert f"(p = {found['p_value']:.4f})" in together and found["signature"] in together
        assert found["score"] != found["baseline"]["score"]


def test_a_baseline_is_another_translator_or_its_translations(tiny):
    pairs = [("a b", "A B"), ("c d", "C D"), ("e f", "E G")]
    other = ["A X", "C D", "E F"]
    found = [evaluate(Upper(tiny), pairs, against=each) for each in (other, Upper(tiny, other))]
    assert found[0] == found[1]
    assert found[0]["against"] == paired_bootstrap(
        Upper(tiny).config, ["A B", "C D", "E F"], other, [reference for _, reference in pairs]
    )
    with pytest.raises(ValueError, match="against has 1 lines for 3 pairs"):
        evaluate(Upper(tiny), pairs, against=["A B"])


def test_a_record_is_shown_with_two_decimals_and_its_settings_as_they_are():
    record = {"score": 12.3456, "precisions": [1 / 3], "length_penalty_alpha": 0.123456, "step": 7}
    inner = {"p_value": 0.123456, "mean": 2 / 3, "signature": "x"}
    assert rounded({**record, "brevity_penalty": 0.98765, "against": inner}) == {
        "score": 12.35,
        "precisions": [0.33],
        "length_penalty_alpha": 0.123456,
        "step": 7,
        "brevity_penalty": 0.9877,
        "against": {"p_value": 0.1235, "mean": 0.67, "signature": "x"},
    }

"""The config: what is refused and in which words, JSON, files and flags, what may change."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from flaxformer_min.config import (
    FIELD_TYPES,
    Config,
    DataConfig,
    ModelConfig,
    flat,
)
from flaxformer_min.config_file import SYNONYMS, load_config, load_workdir_config, print_help
from flaxformer_min.config_rules import (
    RETIRED,
    check_resume,
    config_from_json,
    config_to_json,
    typed,
    validate,
)
from flaxformer_min.data.tokenizer_training import TRAINING_LINES
from flaxformer_min.errors import UserError
from flaxformer_min.training.optimizer import BETA1

CONFIG = Config(
    model=ModelConfig(dropout=0.3),
    data=DataConfig(
        train=("a.en", "a.de", "b.en.gz", "b.de.gz"),
        validation=("dev.en", "dev.de"),
        source_language="en",
        target_language="de",
        vocab_size=10_007,
    ),
)

# A value other than CONFIG's, and allowed, for every field that has no number to add 1 to.
OTHER_VALUES = {
    "model.positions": "learned",
    "model.share_embeddings": "target",
    "model.compute_dtype": "bfloat16",
    "model.attention": "cudnn",
    "model.remat": True,
    "model.scan_layers": True,
    "model.d_model": 514,
    "data.source": "phrases",
    "data.train": ("c.en", "c.de"),
    "data.validation": ("c.en", "c.de"),
    "data.test": ("c.en", "c.de"),
    "data.errors": "replace",
    "data.cache": "cache",
    "data.tokenizer": "spm.model",
    "model.num_decoder_layers": 2,
    "model.activation": "swish",
    "model.biases": True,
    "data.byte_fallback": False,
    "data.character_coverage": 0.5,
    "data.row_multiple": 16,
    "optimizer.peak_learning_rate": 1e-3,
    "optimizer.clip_norm": 1.0,
    "optimizer.accumulation": 2,
    "train.evaluate_every": 3_000,
    "train.best_metric": "loss",
    "train.patience": 3,
    "train.checkpoint_every": 500,
    "train.initialize_from": "runs/first",
    "decode.bleu_tokenize": "none",
    "mesh.data": 2,
}


def changed(config: Config, key: str, value: object) -> Config:
    """`config` with one field, named with its section, set to a value."""
    section, field = key.split(".")
    part = dataclasses.replace(getattr(config, section), **{field: value})
    return dataclasses.replace(config, **{section: part})


def other_value(key: str) -> object:
    """An allowed value of the field that CONFIG does not have."""
    value = flat(CONFIG)[key]
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if isinstance(value, str):
        return value + "x"
    return value / 2 + 0.01 if isinstance(value, float) else value + 1


def message_of(action, *arguments) -> str:
    """The text of the UserError that the action ends in, which is one line."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# JSON


@pytest.mark.parametrize("key", [key for key in FIELD_TYPES if key != "data.source"])
def test_a_config_reads_back_from_json_as_it_was(key: str) -> None:
    config = changed(CONFIG, key, other_value(key))
    assert config != CONFIG
    back = config_from_json(config_to_json(config))
    assert back == config
    assert type(flat(back)[key]) is type(flat(config)[key])


def test_json_keeps_the_order_of_the_fields() -> None:
    tree = json.loads(config_to_json(CONFIG))
    assert [f"{s}.{f}" for s, section in tree.items() for f in section] == list(FIELD_TYPES)


def test_a_field_missing_from_json_takes_its_default() -> None:
    tree = json.loads(config_to_json(changed(CONFIG, "optimizer.beta2", 0.5)))
    del tree["optimizer"]["beta2"], tree["mesh"]
    assert config_from_json(json.dumps(tree)) == CONFIG


def test_a_whole_number_is_read_as_a_float_where_one_belongs() -> None:
    tree = json.loads(config_to_json(CONFIG))
    tree["model"]["dropout"] = 0
    dropout = config_from_json(json.dumps(tree)).model.dropout
    assert dropout == 0.0 and isinstance(dropout, float)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("model", "num_layers", "2", "model.num_layers is '2': it must be a whole number"),
        ("model", "num_layers", 2.0, "model.num_layers is 2.0: it must be a whole number"),
        ("model", "num_layers", True, "model.num_layers is True: it must be a whole number"),
        ("model", "num_layers", None, "model.num_layers is None: it must be a whole number"),
        ("model", "dropout", "0.1", "model.dropout is '0.1': it must be a number"),
        ("model", "dropout", 10**400, "it must be a number"),
        ("model", "dropout", float("nan"), "model.dropout is nan: it must be at least 0"),
        ("model", "positions", "none", "is 'none': it must be one of sinusoidal, learned"),
        ("data", "train", "a.en a.de", "is 'a.en a.de': it must be a list of strings"),
        ("data", "train", ["a.en", 3], "data.train is 3: it must be a string"),
        ("data", "tokenizer", 3, "data.tokenizer is 3: it must be a string"),
        ("data", "byte_fallback", 1, "data.byte_fallback is 1: it must be True or False"),
        ("model", "num_layer", 2, "model.num_layer is no field of the config: did you mean"),
    ],
)
def test_a_wrong_field_in_json_is_named(
    section: str, field: str, value: object, message: str
) -> None:
    tree = json.loads(config_to_json(CONFIG))
    tree[section][field] = value
    assert message in message_of(config_from_json, json.dumps(tree))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the config is not JSON"),
        ("{" * 100_000, "the config is not JSON"),
        ("[" * 100_000, "the config is not JSON"),
        ("[]", "the config is []: it must be a JSON object"),
        ("{}", "model is missing"),
        ('{"model": 3, "data": {}}', "section model is 3: it must be a JSON object"),
        ('{"model": {}, "data": {"train": []}}', "data.validation is missing"),
        ('{"model": {}, "data": {}, "optimiser": {}}', "optimiser is no field of the config"),
    ],
)
def test_text_that_is_no_config_is_refused(text: str, message: str) -> None:
    assert message in message_of(config_from_json, text)


def test_a_retired_field_is_read_where_it_has_the_value_that_is_a_constant_now() -> None:
    assert {"optimizer.beta1": BETA1, "data.tokenizer_max_lines": TRAINING_LINES} == RETIRED
    tree = json.loads(config_to_json(CONFIG))
    for key, constant in RETIRED.items():
        section, field = key.split(".")
        tree[section][field] = constant
    assert config_from_json(json.dumps(tree)) == CONFIG
    tree["optimizer"]["beta1"] = 0.5
    text = message_of(config_from_json, json.dumps(tree))
    assert text == "optimizer.beta1 is 0.5: this version always uses 0.9"


class Inner(NamedTuple):
    score: float
    steps: list[int]
    best: int | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    record: Mapping[str, Any] | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    kind: Literal["a", "b"] | None = None


def test_any_record_can_be_read_from_json() -> None:
    inner = {"score": 3, "steps": [5, 7]}
    tree = {"name": "x", "inner": inner, "record": {"n": [1]}, "counts": {"u": 2}, "kind": "b"}
    expected = Outer("x", Inner(3.0, [5, 7]), {"n": [1]}, {"u": 2}, "b")
    assert typed(Outer, tree) == expected
    assert typed(Outer, {"name": "x", "inner": inner}) == Outer("x", Inner(3.0, [5, 7]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {"score": 3, "steps": [5, "7"]}}, "inner.steps is '7': it must be a whole"),
        ({"inner": {"score": 3}}, "inner.steps is missing from x.json"),
        ({"inner": {"score": 3, "steps": [], "bets": 1}}, "inner.bets is no field of x.json: did"),
        ({"inner": []}, "section inner is []: it must be a JSON object"),
        ({"record": []}, "record is []: it must be a JSON object"),
        ({"counts": {"u": None}}, "counts.u is None: it must be a whole number"),
        ({"kind": "c"}, "kind is 'c': it must be one of a, b"),
        ({"name": None}, "name is None: it must be a string"),
    ],
)
def test_a_wrong_value_in_any_record_is_named(change: dict[str, Any], message: str) -> None:
    tree = {"name": "x", "inner": {"score": 3, "steps": []}} | change
    assert message in message_of(typed, Outer, tree, "", "x.json")


# Values


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model.num_layers", 0, "at least 1"),
        ("model.d_v", -1, "at least 1"),
        ("model.d_model", 511, "even for sinusoidal positions"),
        ("model.dropout", 1.0, "at least 0 and below 1"),
        ("model.dropout", -0.1, "at least 0 and below 1"),
        ("model.max_length", 255, "at least data.max_length (256)"),
        ("data.source", "file", "'files', 'phrases', 'tfds:wmt14_translate/de-en' or"),
        ("data.source", "tfds:", "'files', 'phrases', 'tfds:wmt14_translate/de-en' or"),
        ("data.train", ("a.en",), "two file names"),
        ("data.train", (), "given"),
        ("data.validation", (), "given"),
        ("data.source_language", "", "a language such as 'en'"),
        ("data.vocab_size", 260, "at least 261"),
        ("data.character_coverage", 0.0, "above 0 and at most 1"),
        ("train.steps", 99_999_999_999_999, "at least 1"),
        ("data.num_buckets", 0, "at least 1"),
        ("data.max_length", 1, "at least 2"),
        ("data.seed", -1, "from 0"),
        ("optimizer.peak_learning_rate", 0.0, "above 0 (1e-30 to 1e30), or None"),
        ("optimizer.clip_norm", -1.0, "above 0 (1e-30 to 1e30), or None"),
        ("optimizer.warmup_steps", 0, "at least 1"),
        ("optimizer.beta2", 1.0, "at least 0 and below 1"),
        ("optimizer.epsilon", 0.0, "above 0"),
        ("optimizer.accumulation", 3, "a divisor of data.row_multiple (8)"),
        ("optimizer.accumulation", 0, "a divisor of data.row_multiple (8)"),
        ("train.evaluate_every", 0, "at least 1"),
        ("train.evaluate_every", 1_500, "a multiple of train.checkpoint_every (1000)"),
        ("train.checkpoint_every", 0, "at least 1"),
        ("train.keep_last", 0, "at least 1"),
        ("train.keep_best", -1, "at least 0"),
        ("train.label_smoothing", 1.0, "at least 0 and below 1"),
        ("train.seed", 2**32, "from 0 to 4294967295"),
        ("decode.beam_size", 0, "at least 1"),
        ("decode.length_penalty_alpha", float("inf"), "from -10 to 10"),
        # What JAX cannot count, and what is 0, 1 or infinite in float32.
        ("model.num_layers", 10**9, "at most 1000"),
        ("model.num_decoder_layers", 10**9, "at most 1000, or None"),
        ("model.d_model", 2**63, "below 2^31"),
        ("model.max_length", 2**31, "below 2^31"),
        ("model.layer_norm_epsilon", 1e-300, "above 0 (1e-30 to 1e30)"),
        ("data.vocab_size", 10**12, "below 2^31"),
        ("data.row_multiple", 10**15, "below 2^31"),
        ("data.tokens_per_batch", 10**18, "below 2^31"),
        ("optimizer.peak_learning_rate", 1e39, "above 0 (1e-30 to 1e30), or None"),
        ("optimizer.clip_norm", 1e-300, "above 0 (1e-30 to 1e30), or None"),
        ("optimizer.epsilon", 1e-300, "above 0 (1e-30 to 1e30)"),
        ("optimizer.beta2", 1 - 1e-12, "at least 0 and below 1"),
        ("train.patience", 2**31, "below 2^31, or None"),
        ("decode.length_penalty_alpha", 1e38, "from -10 to 10"),
        ("decode.max_length_offset", 10**15, "below 2^31"),
        ("decode.max_length_offset", -1, "at least 0"),
        ("mesh.tensor", 0, "at least 1, or -1 for the rest"),
        ("mesh.tensor", -1, "only one axis can be -1"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: object, rule: str) -> None:
    text = message_of(validate, changed(CONFIG, key, value))
    at_fault = "mesh.data" if rule == "only one axis can be -1" else key
    assert text.startswith(f"{at_fault} is ") and rule in text


def test_learned_positions_take_an_odd_d_model() -> None:
    odd = changed(CONFIG, "model.d_model", 7)
    assert "model.d_model is 7" in message_of(validate, odd)
    validate(changed(odd, "model.positions", "learned"))


def test_phrases_take_one_slice() -> None:
    phrases = changed(changed(CONFIG, "data.source", "phrases"), "data.train", ("train[:7]",))
    assert "data.validation is ('dev.en', 'dev.de')" in message_of(validate, phrases)
    validate(changed(phrases, "data.validation", ("validation[:7]",)))


def test_tfds_takes_any_number_of_splits() -> None:
    tfds = changed(CONFIG, "data.source", "tfds:wmt14_translate/de-en")
    for splits in (("train",), ("train[:1%]", "validation", "test")):
        assert "data.train is " in message_of(validate, changed(CONFIG, "data.train", splits))
        validate(changed(tfds, "data.train", splits))


# Resuming


FREE = {
    *("model.attention", "model.remat", "model.scan_layers"),
    *("data.dir", "data.train", "data.validation", "data.test", "data.tokenizer", "data.cache"),
    *("data.errors", "train.steps", "train.evaluate_every", "train.checkpoint_every"),
    *("train.keep_last", "train.keep_best", "train.patience", "train.initialize_from"),
    *(key for key in FIELD_TYPES if key.startswith(("mesh.", "decode."))),
}


@pytest.mark.parametrize("key", FIELD_TYPES)
def test_a_run_goes_on_only_under_a_config_that_leaves_it_the_same_run(key: str) -> None:
    new = changed(CONFIG, key, other_value(key))
    if key in FREE:
        check_resume(CONFIG, new)
    else:
        text = message_of(check_resume, CONFIG, new)
        assert text.startswith(f"{key} was {flat(CONFIG)[key]!r} ")
        assert f" {other_value(key)!r} now" in text


def test_fewer_steps_than_before_are_refused() -> None:
    text = message_of(check_resume, CONFIG, changed(CONFIG, "train.steps", 99_999))
    assert text.startswith("train.steps was 100000 ") and "it can only grow" in text


# Files and flags

FILE = """
from flaxformer_min.config import Config, DataConfig, ModelConfig

def get_config():
    data = DataConfig(train=("a", "b"), validation=("c", "d"), source_language="en",
                      target_language="de", vocab_size=10_007)
    return Config(model=ModelConfig(dropout=0.3), data=data)
"""
TWO_VARIANTS = (
    FILE.replace("get_config()", "get_config(name)").replace("0.3", "VARIANTS[name]")
    + 'VARIANTS = {"low": 0.1, "high": 0.5}'
)
# Set behind the back of beartype, which checks types in the tests alone.
WRONG_TYPE = (
    FILE.replace("return Config(", "config = Config(")
    + """
    object.__setattr__(config.model, "num_layers", 0.3)
    return config
"""
)


@pytest.fixture
def write(tmp_path: Path):
    """Writes a config file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "recipe.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--model.dropout", "0.2"], "model.dropout", 0.2),
        (["--model.d_ff=7"], "model.d_ff", 7),
        (["--model.d-ff", "7"], "model.d_ff", 7),
        (["--model.positions", "learned"], "model.positions", "learned"),
        (["--data.train", "x", "y", "z", "u"], "data.train", ("x", "y", "z", "u")),
        (["--data.train=x", "y"], "data.train", ("x", "y")),
        (["--data.test", "x", "y"], "data.test", ("x", "y")),
        (["--data.test"], "data.test", ()),
        (["--mesh.data", "-1"], "mesh.data", -1),
        (["--data.tokenizer", "spm.model"], "data.tokenizer", "spm.model"),
        (["--data.dir=--odd=name"], "data.dir", "--odd=name"),
        (["--data.byte_fallback", "False"], "data.byte_fallback", False),
        (["--optimizer.clip_norm", "2"], "optimizer.clip_norm", 2.0),
        (["--optimizer.clip_norm", "None"], "optimizer.clip_norm", None),
        (["--decode.length_penalty_alpha", "-0.5"], "decode.length_penalty_alpha", -0.5),
    ],
)
def test_a_flag_sets_one_field(write, flags: list[str], key: str, value: object) -> None:
    before, after = load_config(write(FILE), []), load_config(write(FILE), flags)
    assert after == changed(before, key, value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--model.droput", "0.2"],
            "--model.droput is no field of the config: did you mean --model.dropout?",
        ),
        (["--dropout", "0.2"], "did you mean --model.dropout?"),
        (["--optim.warmup-step", "3"], "did you mean --optimizer.warmup_steps?"),
        (["--data.train", "a", "b", "--data.train=c"], "--data.train is given twice"),
        (["--model.d-ff", "5", "--model.d_ff", "7"], "--model.d_ff is given twice"),
        (["--data.train", "a", "gs://b/c"], "data.train: gs://b/c is a URL"),
        (["--optimizer.beta1", "0.9"], "--optimizer.beta1 is no field any more: it is always 0.9"),
        (["--train.steps", "two"], "--train.steps two: train.steps must be a whole number"),
        (["--train.steps", "2.5"], "--train.steps 2.5: train.steps must be a whole number"),
        (["--train.steps", "2", "3"], "--train.steps 2 3: train.steps must be a whole number"),
        (["--train.steps"], "--train.steps: train.steps must be a whole number"),
        (["--optimizer.clip_norm", "x"], "must be a number or None"),
        (["--data.byte_fallback", "2"], "must be True or False"),
        (["--model.positions", "sine"], "must be one of sinusoidal, learned"),
        (["model.dropout", "0.2"], "model.dropout belongs to no flag"),
        (["--model.dropout", "1.5"], "model.dropout is 1.5: it must be at least 0 and below 1"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(write, capsys, flags: list[str], message: str) -> None:
    good = ["--train.seed", "3"]
    assert message in message_of(
        load_config, write(FILE), flags if "belongs" in message else good + flags
    )
    assert capsys.readouterr() == ("", "")


def test_every_misspelt_field_leads_to_the_right_one(write) -> None:
    path = write(FILE)
    for key in FIELD_TYPES:
        text = message_of(load_config, path, [f"--{key[:-2]}{key[-1]}z", "1"])
        assert f"did you mean --{key}?" in text


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        ("lr learning-rate train.lr", "did you mean --optimizer.peak_learning_rate?"),
        ("batch_size", "a batch is counted in tokens: --data.tokens_per_batch"),
        ("seed", "--train.seed draws weights and dropout, --data.seed the order of the text"),
        ("epochs num-train-epochs", "a run is counted in steps: --train.steps"),
        ("max_steps steps train_steps", "did you mean --train.steps?"),
        ("hidden_size d_model model.dim", "did you mean --model.d_model?"),
        ("num_heads heads nhead", "did you mean --model.num_heads?"),
        ("num_layers layers n-layers", "did you mean --model.num_layers?"),
        ("vocab_size vocab", "did you mean --data.vocab_size?"),
        ("warmup warmup_steps", "did you mean --optimizer.warmup_steps?"),
        ("beam beams num_beams beam_size", "did you mean --decode.beam_size?"),
        ("dropout", "did you mean --model.dropout?"),
        ("output_dir save-dir", "did you mean --workdir?"),
        ("max_len", "did you mean --data.max_length?"),
        ("accumulation", "did you mean --optimizer.accumulation?"),
        ("weight_decay", "Adam has no weight decay here"),
        ("resume", "the same command with the same --workdir resumes a run"),
    ],
)
def test_what_other_programs_call_a_field_leads_to_it(write, names: str, meant: str) -> None:
    path = write(FILE)
    for name in names.split():
        text = message_of(load_config, path, [f"--{name}", "1"])
        assert f"--{name} is no field of the config: {meant}" in text


def test_a_synonym_is_no_field_and_leads_to_one_or_to_a_sentence() -> None:
    assert len(SYNONYMS) > 100
    last_parts = {key.partition(".")[2] for key in FIELD_TYPES}
    for name, meant in SYNONYMS.items():
        assert name not in last_parts or " " in meant
        assert meant in FIELD_TYPES or meant == "workdir" or " " in meant


def test_paths_are_those_of_this_machine(write, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--data.dir", "~/text", "--data.train", "~/a.en", "a.de", "--data.tokenizer=~/t.model"]
    data = load_config(write(FILE), flags).data
    assert (data.dir, data.tokenizer) == (f"{tmp_path}/text", f"{tmp_path}/t.model")
    assert data.train == (f"{tmp_path}/a.en", "a.de")


def test_help_lists_the_flags_with_the_values_of_the_file(write, capsys) -> None:
    print_help(write(FILE))
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--model.dropout: a number (default: 0.3)" in text
    assert "--optimizer.clip_norm: a number or None (default: None)" in text
    assert "--model.positions: one of sinusoidal, learned (default: sinusoidal)" in text
    assert "--data.train: a list of strings (default: a b)" in text
    assert "The network (paper, section 3)." in text


def test_help_shows_the_comment_on_every_field(write, capsys) -> None:
    print_help(write(FILE))
    shown = capsys.readouterr().out.split("\n  --")[1:]
    assert [text.split(":")[0] for text in shown] == list(FIELD_TYPES)
    comments = {text.split(":")[0]: " ".join(text.split("\n", 1)[1].split()) for text in shown}
    assert all(len(comment) > 2 for comment in comments.values())
    assert comments["model.dropout"].startswith("P_drop, of every sublayer's output")
    assert comments["model.remat"].startswith("Compute each layer again in the backward pass")
    assert comments["data.seed"].startswith("decides the tokenizer's training and the order")
    assert comments["data.test"] == "written as for train"


def test_help_needs_neither_jax_nor_numpy(write) -> None:
    code = f"""
import sys
from flaxformer_min.config_file import print_help
print_help({write(FILE)!r})
assert not {{"jax", "numpy"}} & set(sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_an_argument_chooses_a_variant(write) -> None:
    path = write(TWO_VARIANTS)
    assert load_config(f"{path}:low", []).model.dropout == 0.1
    assert load_config(f"{path}:high", []).model.dropout == 0.5


@pytest.mark.parametrize(
    ("text", "argument", "message"),
    [
        (TWO_VARIANTS, "", "recipe.py needs a variant: write"),
        (TWO_VARIANTS, ":mid", "recipe.py has no variant mid: write"),
        (TWO_VARIANTS, ":mid", "with one of low, high"),
        (FILE, ":low", "recipe.py takes no argument: leave out :low"),
        (FILE.replace("get_config()", "get_config(x)"), "", "recipe.py needs an argument"),
        (FILE.replace("get_config", "get"), "", "recipe.py has no function get_config()"),
        ("get_config = 3", "", "recipe.py has no function get_config()"),
        ("def get_config():\n    return 3", "", "get_config returns int, it must be Config"),
        ("def get_config():\n    return 3 / 0", "", "recipe.py:2: ZeroDivisionError: division"),
        ("def get_config():\n    raise SystemExit(3)", "", "recipe.py:2: SystemExit: 3"),
        ("import no_such_module", "", "recipe.py:1: ModuleNotFoundError: No module named"),
        ("def get_config(:", "", "recipe.py:1: SyntaxError: invalid syntax"),
        (FILE.replace("vocab_size", "vocabulary"), "", "recipe.py:5: TypeError"),
        (
            FILE.replace("vocab_size", "vocab=3, vocab_size"),
            "",
            "'vocab'; did you mean data.vocab_size?",
        ),
        (FILE.replace("dropout", "hidden_size"), "", "size'; did you mean model.d_model?"),
        ("raise SystemExit(0)", "", "recipe.py:1: SystemExit: 0"),
        ("def get_config():\n    exit('no')", "", "recipe.py:2: SystemExit: no"),
        ("import sys\nsys.path.clear()\n1 / 0", "", "recipe.py:3: ZeroDivisionError"),
        (WRONG_TYPE, "", "recipe.py: model.num_layers is 0.3: it must be a whole number"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named(
    write, text: str, argument: str, message: str
) -> None:
    assert message in message_of(load_config, write(text) + argument, [])


@pytest.mark.parametrize("name", ["config.json", "recipe.yaml", "recipe.py.gz", "recipe"])
def test_a_config_that_is_no_python_file_is_told_what_it_must_be(tmp_path, name) -> None:
    (tmp_path / name).write_text('{"model": null}')
    text = message_of(load_config, str(tmp_path / name), [])
    assert text == f"{tmp_path / name}: a config is a Python file with get_config(); see configs/"


def test_a_config_file_that_is_not_there_is_named() -> None:
    for spec in ("configs/none.py", "configs/none.py:base", "configs"):
        text = message_of(load_config, spec, []).partition("; the recipes are")[0]
        assert text == f"{spec.removesuffix(':base')}: there is no such config file"


def test_a_config_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_a_recipe.py").write_text(FILE)
    path = tmp_path / "recipe.py"
    path.write_text("from neighbour_of_a_recipe import get_config")
    assert load_config(str(path), []).model.dropout == 0.3


def test_a_workdir_alone_gives_the_config_of_its_run_with_the_flags_applied(tmp_path) -> None:
    config = load_config("demo", ["--train.steps", "7"])
    (tmp_path / "config.json").write_text(config_to_json(config), encoding="utf-8")
    assert load_workdir_config(tmp_path) == config
    more = load_workdir_config(tmp_path, ["--train.steps", "11"])
    assert more == dataclasses.replace(config, train=dataclasses.replace(config.train, steps=11))
    text = message_of(load_workdir_config, tmp_path / "none", [])
    assert text.endswith("has no run to go on with; give --config to begin one")
    (tmp_path / "manifest.json").write_text("{}")
    assert "is one checkpoint and no workdir" in message_of(load_workdir_config, tmp_path, [])
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert message_of(load_workdir_config, tmp_path, []).endswith("; give --config")

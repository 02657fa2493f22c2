"""Options: the config's values where none are given, and one line for what makes no sense."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from flaxformer_min import cli, flags
from flaxformer_min.config import DecodeConfig
from flaxformer_min.decoding import programs  # noqa: F401, makes Options a pytree
from flaxformer_min.decoding.options import IN_CONFIG, Options
from flaxformer_min.errors import UserError

ROOT = Path(__file__).parent.parent
CONFIG = DecodeConfig(beam_size=5, length_penalty_alpha=0.7, max_length_offset=11)


def test_what_is_not_given_is_the_config_s():
    whole = Options().with_defaults(CONFIG)
    assert (whole.beam_size, whole.length_penalty_alpha, whole.max_length_offset) == (
        5,
        0.7,
        11,
    )
    given = Options(beam_size=3, length_penalty_alpha=0.0, max_length_offset=0, n_best=2)
    whole = given.with_defaults(CONFIG)
    assert (whole.beam_size, whole.length_penalty_alpha, whole.max_length_offset) == (3, 0, 0)
    assert whole.n_best == 2
    assert Options(sample=True, n_best=7).with_defaults(CONFIG).beam_size == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(sample=True, beam_size=2), "sample .* has no beam_size"),
        (Options(temperature=0.5), "temperature is for sampling"),
        (Options(top_k=3), "top_k is for sampling"),
        (Options(top_p=0.5), "top_p is for sampling"),
        (Options(seed=3), "seed is for sampling"),
        (Options(n_best=6), "n_best is 6: it must be at most beam_size, 5"),
        (Options(n_best=0), "n_best is 0"),
        (Options(beam_size=0), "beam_size is 0"),
        (Options(length_penalty_alpha=float("nan")), "length_penalty_alpha is nan"),
        (Options(min_length=-1), "min_length is -1"),
        (Options(max_length_offset=-1), "max_length_offset is -1"),
        (Options(no_repeat_ngram_size=-1), "no_repeat_ngram_size is -1"),
        (Options(sample=True, temperature=0.0), "temperature is 0.0: it must be above 0"),
        (Options(sample=True, temperature=float("inf")), "temperature is inf"),
        (Options(sample=True, temperature=1e300), r"above 0 \(1e-30 to 1e30\)"),
        (Options(sample=True, temperature=1e-45), r"above 0 \(1e-30 to 1e30\)"),
        (Options(sample=True, n_best=10**11), "at least 1 and below 2"),
        (Options(beam_size=10**11), "at least 1 and below 2"),
        (Options(max_length_offset=10**20), "at least 0 and below 2"),
        (Options(no_repeat_ngram_size=10**20), "at least 0 and below 2"),
        (Options(length_penalty_alpha=1e308), "from -10 to 10"),
        (Options(sample=True, top_k=0), "top_k is 0"),
        (Options(sample=True, top_p=1.1), "top_p is 1.1"),
        (Options(sample=True, top_p=0.0), "top_p is 0.0"),
        (Options(sample=True, seed=-1), "seed is -1"),
        (Options(sample=True, seed=2**31), "seed is 2147483648"),
    ],
)
def test_what_makes_no_sense_is_one_line(options, message):
    with pytest.raises(UserError, match=message) as raised:
        options.with_defaults(CONFIG)
    assert "\n" not in str(raised.value)


FLAGS = {
    "beam_size": ("3", 3),
    "length_penalty_alpha": ("0.5", 0.5),
    "n_best": ("3", 3),
    "min_length": ("3", 3),
    "max_length_offset": ("0", 0),
    "no_repeat_ngram_size": ("3", 3),
    "forbid_unknown": (None, True),
    "sample": (None, True),
    "temperature": ("0.5", 0.5),
    "top_k": ("3", 3),
    "top_p": ("0.5", 0.5),
    "seed": ("0", 0),
}  # what follows the flag, and the value that it gives


@pytest.mark.parametrize(
    "name", sorted({f.name for f in dataclasses.fields(Options)} - {"attention"})
)
def test_every_option_has_a_flag_of_its_name_type_and_help(name, capsys):
    text, value = FLAGS[name]
    parser, flag = flags.Parser(), "--" + name.replace("_", "-")
    flags.add_search_flags(parser, [name])
    assert vars(parser.parse_args([])) == {}
    found = flags.search_options(parser.parse_args([flag] if text is None else [flag, text]))
    assert found == Options(**{name: value})
    assert type(getattr(found, name)) is type(value)
    parser.print_help()
    (field,) = [field for field in dataclasses.fields(Options) if field.name == name]
    assert field.metadata["help"] in " ".join(capsys.readouterr().out.split())


def test_an_option_that_the_config_has_too_comes_from_there_and_is_a_flag_of_evaluate(capsys):
    values = {"beam_size": 2, "length_penalty_alpha": 2.0, "max_length_offset": 2}
    assert tuple(values) == IN_CONFIG
    for name, value in values.items():
        changed = dataclasses.replace(CONFIG, **{name: value})
        assert getattr(Options().with_defaults(changed), name) == value
        assert Options(**{name: value}).over(CONFIG) == changed
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    text = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in text for name in IN_CONFIG)
    assert "--sample" not in text and "--min-length" not in text


def test_the_command_line_knows_the_options_without_jax():
    code = "import sys, flaxformer_min.decoding.options; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_only_what_decides_shapes_is_compiled_in():
    def structure(options: Options) -> jax.tree_util.PyTreeDef:
        return jax.tree.structure(options.with_defaults(CONFIG))

    one = structure(Options(length_penalty_alpha=0.1, min_length=2, attention=True))
    assert one == structure(Options(length_penalty_alpha=0.2, min_length=3))
    for other in (Options(beam_size=4), Options(n_best=2), Options(forbid_unknown=False)):
        assert one != structure(other)
    assert one == structure(Options(max_length_offset=CONFIG.max_length_offset))
    drawn = structure(Options(sample=True, top_k=3, temperature=0.5, seed=1))
    assert drawn == structure(Options(sample=True, top_k=4, temperature=0.6, seed=2))


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_size": "4"}, "beam_size is '4': it must be a whole number"),
        ({"beam_size": True}, "beam_size is True: it must be a whole number"),
        ({"n_best": None}, "n_best is None: it must be a whole number"),
        ({"sample": "yes"}, "sample is 'yes': it must be True or False"),
        ({"sample": True, "top_k": 2.5}, "top_k is 2.5: it must be a whole number"),
        ({"length_penalty_alpha": "x"}, "length_penalty_alpha is 'x': it must be a number"),
    ],
)
def test_a_value_of_another_type_is_one_line_that_names_it(values, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Options(**values).with_defaults(CONFIG)
    assert Options(sample=True, temperature=2).with_defaults(CONFIG).temperature == 2.0


@pytest.mark.parametrize(
    ("values", "meant"),
    [({"beam": 4}, "beam_size"), ({"num_beams": 4}, "beam_size"), ({"topk": 4}, "top_k")],
)
def test_a_name_that_is_no_option_leads_to_the_one_meant(values, meant):
    with pytest.raises(TypeError, match=f"is no field of Options: did you mean {meant}"):
        Options(**values)
    with pytest.raises(TypeError, match=r"write Options\(beam_size=4\)"):
        Options(4)
    assert dataclasses.replace(pickle.loads(pickle.dumps(Options(n_best=3))), seed=5).n_best == 3

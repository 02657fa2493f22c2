"""A config from a Python file and the flags after it on the command line."""

import contextlib
import dataclasses
import inspect
import io
import runpy
import sys
import traceback
from collections.abc import Callable, Generator
from pathlib import Path

import tyro

from flaxformer_min.config import FIELD_TYPES, Config, described, meant, typed, validate
from flaxformer_min.errors import UserError, first_line


def load_config(spec: str, overrides: list[str]) -> Config:
    """The config that a file and the flags after it describe, checked.

    Args:
        spec: FILE, Python whose `get_config()` returns the whole tree; or FILE:ARG, for
            `get_config(ARG)`. The ARGs that a file knows are the keys of its dict `VARIANTS`. As
            for any script, modules beside FILE can be imported.
        overrides: flags such as `--model.dropout 0.2` or `--data.train a.en a.de`, applied in
            order. `--help` prints every flag with its value in FILE and exits.

    Raises:
        UserError: the file or a flag cannot be used, or values contradict each other.
    """
    config = _override(_read(spec), overrides, spec)
    validate(config)
    return config


def _read(spec: str) -> Config:
    """What the file's `get_config` returns, with the type of every field checked."""
    path, argument = _split_spec(spec)
    with _users_code(path):
        module = runpy.run_path(str(path))
        get_config, arguments = module.get("get_config"), [argument] if argument else []
        if not callable(get_config):
            raise UserError(f"{path} has no function get_config()")
        _check_argument(path, argument, get_config, module.get("VARIANTS", {}))
        config = get_config(*arguments)
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config returns {type(config).__name__}, it must be Config")
    try:
        return typed(Config, dataclasses.asdict(config), "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _split_spec(spec: str) -> tuple[Path, str]:
    """FILE and ARG of FILE:ARG; ARG is empty if there is none."""
    name, argument = spec, ""
    if not Path(spec).is_file() and ":" in spec:
        name, _, argument = spec.rpartition(":")
    if not Path(name).is_file():
        raise UserError(f"{name}: there is no such config file")
    return Path(name), argument


def _check_argument(path: Path, argument: str, get_config: Callable, variants: dict) -> None:
    """Refuses an ARG that is missing, unknown or not asked for."""
    takes_one = bool(inspect.signature(get_config).parameters)
    if argument and not takes_one:
        raise UserError(f"{path} takes no argument: leave out :{argument}")
    if variants and argument not in variants:
        problem = f"has no variant {argument}" if argument else "needs a variant"
        raise UserError(f"{path} {problem}: write {path}:NAME with one of {', '.join(variants)}")
    if takes_one and not argument:
        raise UserError(f"{path} needs an argument: write {path}:ARG")


@contextlib.contextmanager
def _users_code(path: Path) -> Generator[None]:
    """Within it, modules beside the file can be imported and whatever it raises is a UserError."""
    sys.path.insert(0, str(path.parent))
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}{_line_of(error, path)}: {reason}") from error
    finally:
        sys.path.remove(str(path.parent))


def _line_of(error: Exception, path: Path) -> str:
    """`:LINE` of the deepest call inside the file, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return "".join([f":{frame.lineno}" for frame in frames if frame.filename == str(path)][-1:])


def _override(config: Config, flags: list[str], spec: str) -> Config:
    """Applies flags through tyro, one at a time, so that a wrong one is known by name."""
    if "--help" in flags or "-h" in flags:
        _tyro(config, ["--help"], prog=f"train.py --config {spec} --workdir DIR")
    for key, values in _split_flags(flags):
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's report is a box of many lines
            try:
                one = len(values) == 1  # which may look like a flag itself
                config = _tyro(config, [f"--{key}={values[0]}"] if one else [f"--{key}", *values])
            except SystemExit as error:
                given, rule = " ".join([key, *values]), described(FIELD_TYPES[key])
                raise UserError(f"--{given}: {key} must be {rule}") from error
    return config


def _tyro(config: Config, flags: list[str], prog: str | None = None) -> Config:
    # A bool takes a value as every other field does: --data.byte_fallback False.
    style = (tyro.conf.FlagConversionOff,)
    return tyro.cli(Config, default=config, args=flags, prog=prog, config=style)


def _split_flags(flags: list[str]) -> list[tuple[str, list[str]]]:
    """Field and values of each flag; `--data.max_length 9` may also be `--data.max-length=9`."""
    groups: list[tuple[str, list[str]]] = []
    for flag in flags:
        if flag.startswith("--"):
            name, equals, value = flag.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            if key not in FIELD_TYPES:
                raise UserError(f"{name} is no field of the config: {meant(key)}")
            groups.append((key, [value] if equals else []))
        elif groups:
            groups[-1][1].append(flag)
        else:
            raise UserError(f"{flag} belongs to no flag: a field is set by --model.dropout 0.2")
    return groups

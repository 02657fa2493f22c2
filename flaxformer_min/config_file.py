"""Makes a config from a Python file and the flags that override it on the command line."""

import contextlib
import dataclasses
import inspect
import re
import runpy
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from flaxformer_min.config import FIELD_TYPES, Config
from flaxformer_min.config_rules import RETIRED, described, typed, validate
from flaxformer_min.errors import UserError, first_line, nearest


def load_config(spec: str, overrides: list[str]) -> Config:
    """Returns the config that a file and the flags describe, checked.

    Args:
        spec: FILE, Python whose `get_config()` returns the whole tree; or FILE:ARG, for
            `get_config(ARG)`. The ARGs that a file knows are the keys of its dict `VARIANTS`. As
            for any script, modules beside FILE can be imported.
        overrides: flags such as `--model.dropout 0.2` or `--data.train a.en a.de`, applied in
            order.

    Raises:
        UserError: the file or a flag cannot be used, or values contradict each other.
    """
    config = _override(_run_file(spec), overrides)
    validate(config)
    return config


def print_help(spec: str) -> None:
    """Prints every field with its type, its value in FILE and the comment on it."""
    config, indent = _run_file(spec), " " * 6
    print(f"fields of the config, with their values in {spec}:")
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        comments = _comments(type(values))
        print(f"\n{inspect.getdoc(values)}")
        for name, value in vars(values).items():
            key = f"{section.name}.{name}"
            shown = " ".join(value) if isinstance(value, tuple) else value
            print(f"  --{key}: {described(FIELD_TYPES[key])} (default: {shown})")
            print(textwrap.indent(textwrap.fill(comments[name], 90), indent))


def _run_file(spec: str) -> Config:
    """Returns what the file's `get_config` returns, with the type of every field checked."""
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
        return typed(Config, dataclasses.asdict(config))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _split_spec(spec: str) -> tuple[Path, str]:
    """Returns FILE and ARG of FILE:ARG; ARG is empty if there is none."""
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
    """A context in which modules beside the file can be imported and every error is a UserError."""
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
    """Returns `:LINE` of the deepest call inside the file, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return "".join([f":{frame.lineno}" for frame in frames if frame.filename == str(path)][-1:])


def _override(config: Config, flags: list[str]) -> Config:
    """Returns the config with the fields that flags set, one flag after the other."""
    for key, words in _split_flags(flags):
        kind = FIELD_TYPES[key]
        try:
            value = typed(kind, _value(kind, words), key)
        except (ValueError, UserError):
            given = " ".join([key, *words])
            raise UserError(f"--{given}: {key} must be {described(kind)}") from None
        section, field = key.split(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _split_flags(flags: list[str]) -> list[tuple[str, list[str]]]:
    """Returns the field and the words of each flag.

    `--data.max_length 9` may also be written `--data.max-length=9`.
    """
    groups: list[tuple[str, list[str]]] = []
    for flag in flags:
        if flag.startswith("--"):
            name, equals, word = flag.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            if key in RETIRED:
                raise UserError(f"{name} is no field any more: it is always {RETIRED[key]}")
            if key not in FIELD_TYPES:
                meant = nearest(key, FIELD_TYPES)
                raise UserError(f"{name} is no field of the config: did you mean {meant}?")
            groups.append((key, [word] if equals else []))
        elif groups:
            groups[-1][1].append(flag)
        else:
            raise UserError(f"{flag} belongs to no flag: a field is set by --model.dropout 0.2")
    return groups


def _value(kind: Any, words: list[str]) -> Any:
    """Returns the words of a flag as JSON would have them; raises ValueError if the type is wrong.

    A list of strings takes any number of words, every other type exactly one.
    """
    if typing.get_origin(kind) is tuple:
        return words
    (word,) = words
    if isinstance(kind, types.UnionType):  # X | None
        return None if word == "None" else _value(typing.get_args(kind)[0], words)
    if kind is bool:
        return ("False", "True").index(word) == 1
    return kind(word) if kind in (int, float) else word


def _comments(section: type) -> dict[str, str]:
    """Returns each field's comment: the lines above it in `config`, or else the one beside it."""
    declaration = r"((?: {4}# .*\n)*) {4}(\w+): [^#\n]*(?:# (.*))?"
    return {
        field: " ".join(above.replace("# ", "").split()) or beside
        for above, field, beside in re.findall(declaration, inspect.getsource(section))
    }

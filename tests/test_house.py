"""The rules of the house: who may import whom, and how large things may grow.

Each test says how much it looked at, so that none can come to check nothing. The figures are
printed by `python -m tools.house`.
"""

import ast
import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tools.house import (
    PACKAGE,
    ROOT,
    House,
    code_lines,
    functions,
    imported_names,
    length,
    parameters,
    parsed,
    survey,
)

# A room imports its own files and those of the rooms in the lines above it.
ORDER = [
    {"errors"},
    {"config"},  # and config_rules, config_file
    {"system"},
    {"model", "data"},
    {"checkpoints"},
    {"decoding"},
    {"training"},
    {"planning"},
    {"interop", "see"},
    {"flags"},
    {"cli"},
    {"__main__"},
]
HIGHEST_FLOOR = 9
# What a file, or each file of a room, must not reach through whatever it imports.
CLOSED = {
    "training.step": "data.tokenizer data.corpus data.sources data.tfds data.phrases data.cldr",
    "training.loss": "data.tokenizer data.corpus data.sources data.tfds data.phrases data.cldr",
    "decoding.translator": "data.corpus data.batching data.tfds data.cldr training",
    "decoding.search": "model training",
    "model": "system data checkpoints decoding training planning interop see cli",
}
# Who alone may import a file or a room; the room itself may.
IMPORTERS = {"cli": "__main__", "flags": "cli", "interop": "cli", "see": "cli"}
# Code lines. The aims are 500, 5,000, 600 and 600; three were missed (LOG.md says by what). Between
# additions that an issue asks for, these ceilings only come down.
LARGEST = {"model, without the cache": 514, "everything but interop and see": 7952}
LARGEST |= {"interop": 600, "see": 862}

TESTS, BENCHMARKS, TOOLS = ROOT / "tests", ROOT / "benchmarks", ROOT / "tools"
PROGRAMS = [ROOT / "configs", ROOT / "examples", BENCHMARKS, TOOLS]


@functools.cache
def house() -> House:
    """The package, which is known to be larger than this."""
    found = survey()
    assert len(found.files) > 60, "too few files were found"
    assert len(found.imports) > 150, "too few imports were found"
    return found


def room_of(name: str) -> str:
    room = name.split(".")[0]
    return "config" if room in ("config_rules", "config_file") else room


def within(name: str, places: str) -> bool:
    """Whether a file is one of the places, or lies in one of them; they are divided by spaces."""
    return any(name == place or name.startswith(f"{place}.") for place in places.split())


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def assert_none(wrong: Iterable[str]) -> None:
    """Fails with every complaint on a line of its own."""
    complaints = list(wrong)
    assert not complaints, "\n" + "\n".join(complaints)


def python_files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


# Imports within the package


def test_rooms_import_only_the_rooms_below_them() -> None:
    levels = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
    assert {room_of(name) for name in house().files} <= levels.keys(), "a room without a place"
    wrong = []
    for importer, imported, line in house().imports:
        upper, lower = room_of(importer), room_of(imported)
        if upper != lower and levels[upper] <= levels[lower]:
            place = where(house().files[importer], line)
            wrong.append(f"{place}: {upper} must not import {lower} ({imported})")
    assert_none(wrong)


def test_no_file_imports_itself_through_others_or_stands_too_high() -> None:
    floors = {name: house().floor(name) for name in house().files}  # it raises at a circle
    assert_none(
        f"{where(house().files[name], 1)}: floor {floor}, at most {HIGHEST_FLOOR}; above {below}"
        for name, floor in floors.items()
        if floor > HIGHEST_FLOOR
        for below in sorted({each.imported for each in house().imports_of[name]}, key=floors.get)[
            -1:
        ]
    )


@pytest.mark.parametrize("place", CLOSED)
def test_what_must_stay_small_reaches_nothing_that_it_does_not_need(place: str) -> None:
    starts = [name for name in house().files if within(name, place)]
    assert starts, f"{place} is gone"
    wrong = []
    for start in starts:
        for name, way in house().reached(start).items():
            if within(name, CLOSED[place]):
                links = [where(house().files[each.importer], each.line) for each in way]
                wrong.append(f"{' -> '.join([*links, name])}: {place} must not reach {name}")
    assert_none(wrong)


@pytest.mark.parametrize(
    "forbidden", sorted({n for names in CLOSED.values() for n in names.split()})
)
def test_what_must_not_be_reached_exists_under_that_name(forbidden: str) -> None:
    later = {"interop", "see"}
    assert forbidden in later or any(within(name, forbidden) for name in house().files)


@pytest.mark.parametrize("place", IMPORTERS)
def test_the_outermost_rooms_are_imported_by_one_file_alone(place: str) -> None:
    wrong = [
        f"{where(house().files[importer], line)}: only {IMPORTERS[place]} may import {imported}"
        for importer, imported, line in house().imports
        if within(imported, place) and not within(importer, f"{place} {IMPORTERS[place]}")
    ]
    assert_none(wrong)


def test_init_files_load_nothing() -> None:
    """That of the package has its version, and offers names lazily, by functions.

    Type checkers see the names by imports that do not run.
    """
    lazily = ast.FunctionDef | ast.Assign | ast.AnnAssign
    unrun = ["import importlib", "from typing import TYPE_CHECKING, Any", "if TYPE_CHECKING:"]
    paths = [path for path in python_files(PACKAGE) if path.name == "__init__.py"]
    assert len(paths) > 7
    for path in paths:
        docstring = parsed(path).body[:1] if ast.get_docstring(parsed(path)) else []
        for statement in parsed(path).body[len(docstring) :]:
            begins = ast.unparse(statement).partition("\n")[0]
            allowed = isinstance(statement, lazily) or begins in unrun
            assert path.parent == PACKAGE and allowed, f"{where(path, statement.lineno)}: not empty"


def test_the_package_imports_absolutely_and_nothing_that_stands_around_it() -> None:
    around = {"tests", "benchmarks", "examples", "configs", "tools", "train"}
    names = [(path, *each) for path in python_files(PACKAGE) for each in imported_names(path)]
    assert len(names) > 500
    wrong = [
        f"{where(path, line)}: the package must not import {name}"
        for path, name, line in names
        if name.startswith(".") or name.split(".")[0] in around
    ]
    assert_none(wrong)


# Imports around the package


def test_no_test_imports_a_test_and_tests_and_benchmarks_keep_apart() -> None:
    helpers = {path.stem for path in TESTS.glob("*.py")}
    siblings = {path.stem for path in BENCHMARKS.glob("*.py")}  # benchmarks.NAME is their name
    forbidden = {
        TESTS: {"tests", "benchmarks"},
        BENCHMARKS: {"tests", *helpers, *siblings},
        TOOLS: {"tests", "benchmarks", *helpers},
    }
    names = [
        (f, p, *each) for f in forbidden for p in python_files(f) for each in imported_names(p)
    ]
    assert len({path for _, path, *_ in names}) > 70
    assert_none(
        f"{where(path, line)}: {folder.name} must not import {name}"
        for folder, path, name, line in names
        if name.split(".")[0] in forbidden[folder] or name.split(".")[-1].startswith("test_")
    )


def test_no_benchmark_runs_or_reads_a_file_of_the_tests() -> None:
    strings = [
        (path, node)
        for path in python_files(BENCHMARKS, TOOLS)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(strings) > 500
    wrong = [
        where(path, node.lineno)
        for path, node in strings
        if node.value == "tests" or node.value.startswith("tests/")
    ]
    assert_none(wrong)


# Sizes


def too_large(folders: list[Path], measure: Callable, most: int) -> Iterator[str]:
    """Every function whose measure is above the most."""
    for path in python_files(*folders):
        for function in functions(path):
            if (found := measure(function)) > most:
                yield f"{where(path, function.lineno)} {function.name}: {found}, at most {most}"


def test_a_function_that_is_too_long_is_found_in_any_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name, lines in (("a.py", 3), ("deep/er/b.py", 4)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("class C:\n    def f(self):\n" + "        1\n" * (lines - 1))
    assert list(too_large([tmp_path], length, 3)) == ["deep/er/b.py:2 f: 4, at most 3"]
    assert list(too_large([tmp_path], length, 4)) == []


def test_no_function_is_longer_than_60_lines() -> None:
    folders = [PACKAGE, *PROGRAMS]
    assert sum(len(list(functions(path))) for path in python_files(*folders)) > 700
    assert_none(too_large(folders, length, 60))


def test_no_function_of_the_package_has_more_than_8_parameters() -> None:
    assert sum(len(list(functions(path))) for path in python_files(PACKAGE)) > 500
    assert_none(too_large([PACKAGE], parameters, 8))


@pytest.mark.run
@pytest.mark.parametrize("part", LARGEST)
def test_the_package_keeps_to_its_budget_of_code_lines(part: str) -> None:
    code = {name: code_lines(path) for name, path in house().files.items()}
    model = {name: lines for name, lines in code.items() if within(name, "model")}
    assert len(model) > 8 and model.pop("model.cached") > 100
    parts = {
        "model, without the cache": model,
        "everything but interop and see": {
            n: c for n, c in code.items() if not within(n, "interop see")
        },
        "interop": {n: c for n, c in code.items() if within(n, "interop")},
        "see": {n: c for n, c in code.items() if within(n, "see")},
    }
    total = sum(parts[part].values())
    assert total <= LARGEST[part], f"{part}: {total} code lines, at most {LARGEST[part]}"


# The counter itself


@pytest.fixture
def small(tmp_path: Path) -> House:
    """A package of four files that import one another in every way there is."""
    texts = {
        "__init__.py": "",
        "rooms/__init__.py": "",
        "rooms/ground.py": "import os\n",
        "rooms/first.py": "from small.rooms import ground\n",
        "second.py": "def late():\n    import small.rooms.first\n",
        "third.py": """\
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from small.second import late
            """,
    }
    for name, text in texts.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return survey(tmp_path / "small")


def test_an_import_counts_wherever_it_stands(small: House) -> None:
    assert [tuple(each) for each in small.imports] == [
        ("rooms.first", "rooms.ground", 1),
        ("second", "rooms.first", 2),
        ("third", "second", 3),
    ]
    assert [small.floor(f"rooms.{name}") for name in ("ground", "first")] == [1, 2]
    assert [small.floor(name) for name in ("second", "third")] == [3, 4]
    ways = {name: [each.importer for each in way] for name, way in small.reached("third").items()}
    assert ways == {
        "second": ["third"],
        "rooms.first": ["third", "second"],
        "rooms.ground": ["third", "second", "rooms.first"],
    }


def test_a_circle_of_imports_is_named(small: House) -> None:
    small.files["rooms.ground"].write_text("def late():\n    from small import third\n")
    parsed.cache_clear()
    with pytest.raises(ValueError, match=r"circle of imports: rooms\.ground -> third -> second"):
        survey(small.files["third"].parent).floor("rooms.ground")


def test_blank_lines_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('''\
"""Two
lines."""

# A comment.
def f(self, a, *b, c=1, **d):  # code, and a comment
    """One line."""
    text = """no
    docstring"""
    return text
''')
    assert code_lines(path) == 4
    (function,) = functions(path)
    assert (length(function), parameters(function)) == (5, 4)

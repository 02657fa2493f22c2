"""The figures of the package's house: python -m tools.house [--short].

Prints code lines by room, floors, and the closures that are kept small on purpose. A room is a
sub-package, or a file that lies in no sub-package. A code line is no blank line, no comment and no
part of a docstring. A file's floor is one above the highest file that it imports, wherever in the
file the import stands. A closure is a file with all that it imports, directly or through others.

`__init__.py` files are in none of this: tests/test_house.py sees to it that they import nothing.
"""

import ast
import dataclasses
import functools
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flaxformer_min"
CLOSURES = "training.step", "decoding.translator", "model.transformer"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """A file (dotted, without the package's name) imports another one at this line."""

    importer: str
    imported: str
    line: int


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Every dotted name that a file imports, at its top or further in, with its line.

    `from a import b` gives `a` and `a.b`, since b may be a file. A relative import begins with `.`.
    """
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def functions(path: Path) -> Iterator[Function]:
    """Every function of a file, methods and inner functions included."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, Function):
            yield node


def length(function: Function) -> int:
    """Lines from `def` to the last statement."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function) -> int:
    """The number of parameters, without self and cls."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return sum(each is not None and each.arg not in ("self", "cls") for each in every)


def code_lines(path: Path) -> int:
    """The number of a file's code lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    filled = {number for number, line in enumerate(lines, 1) if line.strip()}
    return len(filled - _docstring_lines(parsed(path)) - _comment_lines(lines))


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            found |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return found


def _comment_lines(lines: list[str]) -> set[int]:
    """The lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline)
    comments = (token.start for token in tokens if token.type == tokenize.COMMENT)
    return {row for row, column in comments if not lines[row - 1][:column].strip()}


@dataclasses.dataclass(frozen=True)
class House:
    """A package: its files by dotted name (`model.layers`), and who imports whom."""

    files: dict[str, Path]
    imports: list[Import]

    @functools.cached_property
    def imports_of(self) -> dict[str, list[Import]]:
        """The imports of each file."""
        found: dict[str, list[Import]] = {name: [] for name in self.files}
        for each in self.imports:
            found[each.importer].append(each)
        return found

    def floor(self, name: str, above: tuple[str, ...] = ()) -> int:
        """The file's floor. Raises ValueError if the file imports itself through others."""
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise ValueError(f"a circle of imports: {circle}")
        if name not in self._floors:
            below = {each.imported for each in self.imports_of[name]}
            highest = max((self.floor(other, (*above, name)) for other in below), default=0)
            self._floors[name] = 1 + highest
        return self._floors[name]

    @functools.cached_property
    def _floors(self) -> dict[str, int]:
        return {}

    def reached(self, start: str) -> dict[str, list[Import]]:
        """Every file that `start` imports, directly or through others, and a shortest way there."""
        ways: dict[str, list[Import]] = {start: []}
        waiting = [start]
        for name in waiting:  # it grows while it is read
            for each in self.imports_of[name]:
                if each.imported not in ways:
                    ways[each.imported] = [*ways[name], each]
                    waiting.append(each.imported)
        del ways[start]
        return ways

    def code(self) -> dict[str, int]:
        """The code lines of each room."""
        found: dict[str, int] = {}
        for name, path in self.files.items():
            room = name.split(".")[0]
            found[room] = found.get(room, 0) + code_lines(path)
        return found


def survey(package: Path = PACKAGE) -> House:
    """The house that a package's files make."""
    paths = [path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py"]
    files = {".".join(path.relative_to(package).with_suffix("").parts): path for path in paths}
    imports = {
        Import(importer, imported, line)
        for importer, path in files.items()
        for name, line in imported_names(path)
        if (imported := name.removeprefix(f"{package.name}.")) != name and imported in files
    }
    return House(files, sorted(imports))


def main() -> None:
    house = survey()
    code, floors = house.code(), [house.floor(name) for name in house.files]
    total = f"{len(house.files)} files, {sum(code.values())} code lines, {max(floors)} floors"
    if "--short" in sys.argv[1:]:
        print(f"the house: {total}")
        return
    print(total)
    for room, lines in code.items():
        print(f"{lines:>6}  {room}")
    for name in CLOSURES:
        closure = {name, *house.reached(name)}
        lines = sum(code_lines(house.files[each]) for each in closure)
        print(f"{name} and all that it imports: {len(closure)} files, {lines} code lines")


if __name__ == "__main__":
    main()

"""Writes the attention weights of translations to a file: .npz, or .jsonl with an object a line.

For line n, counted from 1, an .npz holds `n/source` and `n/target` (the pieces, EOS included) and
`n/encoder`, `n/decoder` and `n/cross`, arrays [L, H, queries, keys] as `AttentionWeights` describes
them. A .jsonl holds an object with `line`, `source`, `target`, `encoder`, `decoder` and `cross`. If
the weights are averaged over heads, `_mean_over_heads` is added to the three names, as in
`cross_mean_over_heads`, and the arrays are [L, queries, keys].
"""

import contextlib
import functools
import json
import zipfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flaxformer_min.errors import UserError
from flaxformer_min.model.attention import AttentionWeights

# line number, source pieces, target pieces, weights [L, H, queries, keys]
Write = Callable[[int, Sequence[str], Sequence[str], AttentionWeights], None]


@contextlib.contextmanager
def attention_file(path: str | Path, *, average_heads: bool) -> Generator[Write, None, None]:
    """A context with an open file, whose value is a function that writes the weights of one line.

    Raises UserError if the file's name ends in neither .npz nor .jsonl, or if it cannot be opened.
    """
    if (ending := Path(path).suffix) not in (".npz", ".jsonl"):
        raise UserError(f"{path}: attention goes to a file that ends in .npz or .jsonl")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "wb"))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        write_line = functools.partial(_write_json, file)
        if ending == ".npz":
            archive = stack.enter_context(zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED))
            write_line = functools.partial(_write_arrays, archive)

        def write(
            line: int, source: Sequence[str], target: Sequence[str], weights: AttentionWeights
        ) -> None:
            sites = weights._asdict()
            if average_heads:
                sites = {f"{name}_mean_over_heads": w.mean(axis=1) for name, w in sites.items()}
            write_line(line, {"source": np.array(source), "target": np.array(target), **sites})

        yield write


def _write_arrays(archive: zipfile.ZipFile, line: int, arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        with archive.open(f"{line}/{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)


def _write_json(file: BinaryIO, line: int, arrays: dict[str, Any]) -> None:
    lists = {name: array.tolist() for name, array in arrays.items()}
    file.write(json.dumps({"line": line, **lists}, ensure_ascii=False).encode() + b"\n")

"""Attention weights of translations in a file: .npz, or .jsonl with one object a line.

For line n, counted from 1, an .npz holds `n/source` and `n/target` (the pieces, EOS included) and
`n/encoder`, `n/decoder` and `n/cross`, [L, H, queries, keys] as `AttentionWeights` says. A .jsonl
holds an object with `line`, `source`, `target`, `encoder`, `decoder` and `cross`. The weights of a
site that are averaged over heads are called `cross_mean_over_heads`, [L, queries, keys].
"""

import contextlib
import json
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flaxformer_min.errors import UserError
from flaxformer_min.model.attention_weights import AttentionWeights

# line number, source pieces, target pieces, weights
Write = Callable[[int, Sequence[str], Sequence[str], AttentionWeights], None]
Store = Callable[[int, Mapping[str, np.ndarray]], None]  # line number and arrays by name


@contextlib.contextmanager
def attention_file(path: str | Path, *, average_heads: bool) -> Generator[Write, None, None]:
    """A function that writes a line's number, its pieces, and its weights [L, H, queries, keys].

    Raises UserError where the file's name has another ending or it cannot be opened.
    """
    kind = {".npz": _npz, ".jsonl": _jsonl}.get(Path(path).suffix)
    if kind is None:
        raise UserError(f"{path}: attention goes to a file that ends in .npz or .jsonl")
    try:
        Path(path).write_bytes(b"")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None

    with open(path, "wb") as file, kind(file) as store:

        def write(
            line: int, source: Sequence[str], target: Sequence[str], weights: AttentionWeights
        ) -> None:
            sites = weights._asdict()
            if average_heads:
                sites = {f"{name}_mean_over_heads": w.mean(axis=1) for name, w in sites.items()}
            store(line, {"source": np.array(source), "target": np.array(target), **sites})

        yield write


@contextlib.contextmanager
def _npz(file: BinaryIO) -> Generator[Store, None, None]:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:

        def store(line: int, arrays: Mapping[str, np.ndarray]) -> None:
            for name, array in arrays.items():
                with archive.open(f"{line}/{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

        yield store


@contextlib.contextmanager
def _jsonl(file: BinaryIO) -> Generator[Store, None, None]:
    def store(line: int, arrays: Mapping[str, np.ndarray]) -> None:
        lists = {name: array.tolist() for name, array in arrays.items()}
        file.write(json.dumps({"line": line, **lists}, ensure_ascii=False).encode() + b"\n")

    yield store

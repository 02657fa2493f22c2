"""The lengths of the pairs of a run, from which the shapes of its programs follow."""

from pathlib import Path

import numpy as np

from flaxformer_min.config import DataConfig
from flaxformer_min.config_file import load_workdir_config
from flaxformer_min.data.corpus import lengths_in
from flaxformer_min.errors import UserError, first_line
from flaxformer_min.training.prepared_data import cache_of, read_digests
from flaxformer_min.training.workdir import CONFIG, CORPUS

SHORTEST = 16  # tokens: the shortest of the lengths that are assumed where no file gives any


def find_lengths(path: str | None, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths [N, 2] of the pairs of training and of validation, in tokens with EOS.

    Without a path they are assumed ones. The path is a file as `read_lengths` describes it, a
    workdir, or a folder of one encoded corpus. Only a workdir says how long the pairs of validation
    are; otherwise they are taken to be as long as those of training. Raises UserError for a path
    that gives no lengths.
    """
    if path is None:
        both = assumed_lengths(config)
    elif not Path(path).is_dir():
        both = read_lengths(path, config)
    else:
        return _of_folder(Path(path), config)
    return both, both


def assumed_lengths(config: DataConfig) -> np.ndarray:
    """Returns lengths [N, 2] of N pairs: a batch each of 16, 32, 64 ... data.max_length tokens.

    So every one of these lengths takes the same share of the steps. Real corpora differ.
    """
    edges = [SHORTEST]
    while edges[-1] * 2 < config.max_length:
        edges.append(edges[-1] * 2)
    edges = [edge for edge in edges if edge < config.max_length][-config.num_buckets + 1 :]
    edges.append(config.max_length)
    multiple = config.row_multiple
    rows = [config.tokens_per_batch // edge // multiple * multiple or 1 for edge in edges]
    return np.repeat(edges, rows)[:, None].repeat(2, axis=1)


def read_lengths(path: str, config: DataConfig) -> np.ndarray:
    """Reads lengths [N, 2] of N pairs in tokens, EOS counted, from a file with one pair a line.

    Pairs over data.max_length are left out, as in training. Raises UserError for a file that cannot
    be read, for a line that is not two numbers above 0, and if all pairs are too long.
    """
    try:
        with open(path, encoding="utf-8") as lines:
            lengths = np.array([line.split() for line in lines], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise UserError(f"--lengths {path}: {first_line(error)}") from error
    if lengths.shape[1:] != (2,) or lengths.size == 0 or lengths.min() < 1:
        raise UserError(f"--lengths {path}: every line must hold two numbers above 0")
    return _kept(lengths, path, config)


def _of_folder(folder: Path, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    try:
        if (folder / CORPUS).is_file() and (folder / CONFIG).is_file():
            digests, cache = read_digests(folder), cache_of(load_workdir_config(folder), folder)
            train, validation = (lengths_in(cache / digests[s]) for s in ("train", "validation"))
        else:
            train = validation = lengths_in(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--lengths {folder}: holds no encoded corpus ({first_line(error)}); give the workdir "
            "of a run whose data is prepared, or a file with the lengths of a pair in each line"
        ) from error
    return _kept(train, str(folder), config), np.minimum(validation, config.max_length)


def _kept(lengths: np.ndarray, path: str, config: DataConfig) -> np.ndarray:
    """Returns the lengths of the pairs that are trained on; raises UserError if none are left."""
    if lengths.max(axis=1).min() > config.max_length:
        raise UserError(
            f"--lengths {path}: all pairs are over data.max_length, {config.max_length}"
        )
    return lengths[lengths.max(axis=1) <= config.max_length]

"""Reads what a run has written: its config, which text it read, and the lines of its log."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_min.config import Config
from flaxformer_min.config_rules import config_from_json
from flaxformer_min.errors import UserError
from flaxformer_min.training.workdir import CONFIG, CORPUS, METRICS


class Run(NamedTuple):
    """A run of `train`."""

    name: str
    config: Config
    text: dict[str, str]  # hashes of the tokenizer and of the text of each split
    rows: list[dict[str, Any]]  # the lines of metrics.jsonl


def read_run(workdir: str) -> Run:
    """Reads a workdir. Raises UserError naming what is missing or cannot be understood."""
    folder = Path(workdir)
    try:
        config = config_from_json((folder / CONFIG).read_text("utf-8"))
        text = _hashes(json.loads((folder / CORPUS).read_bytes()))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; give the workdir of a run") from None
    except (ValueError, LookupError, TypeError, UserError) as error:
        raise UserError(f"{folder}: not the workdir of a run ({error!r:.80})") from None
    return Run(folder.absolute().name, config, text, read_metrics(folder))


def _hashes(report: dict[str, Any]) -> dict[str, str]:
    """Returns the hashes in corpus.json; those of splits are of text alone, not of token ids."""
    hashes = {"tokenizer": report["tokenizer"]}
    for split in ("train", "validation"):
        texts = [source["digest"] for source in report[split]["sources"]]
        hashes[f"{split} text"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return hashes


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's log; older versions did not write the kind of a line.

    Raises UserError naming the file.
    """
    path = folder / METRICS
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        kinds = ("validation" if "validation_loss" in row else "train" for row in rows)
        return [{"kind": kind, **row} for kind, row in zip(kinds, rows, strict=True)]
    except OSError:
        raise UserError(f"{path}: no such file; give the workdir of a run") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a log of this program ({error})") from None


def series(rows: list[dict[str, Any]], kind: str, name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of one metric; a value that is not finite is NaN.

    Of a BLEU record the value is the score.
    """
    found = [(row["step"], row[name]) for row in rows if row["kind"] == kind and name in row]
    values = [value["score"] if name == "bleu" else value for _, value in found]
    return [step for step, _ in found], [math.nan if v is None else v for v in values]

"""An option exists because two recipes disagree about it, or because it is the user's to choose."""

import runpy
import sys
from pathlib import Path

from flaxformer_min.config import FIELD_TYPES, Config, flat

CONFIGS = Path(__file__).parent.parent / "configs"

# Choices of the user and of the machine, about which recipes have nothing to say.
CHOSEN_BY_USERS = {
    *("model.compute_dtype", "model.attention", "model.remat", "model.scan_layers"),
    *("data.dir", "data.cache", "data.source_language", "data.tokenizer", "data.row_multiple"),
    *("data.errors", "data.seed", "train.seed"),
    *("optimizer.accumulation", "train.keep_best", "train.initialize_from"),
    *("decode.max_length_offset", "mesh.data", "mesh.fsdp", "mesh.tensor"),
}


def recipes(monkeypatch) -> list[Config]:
    """Every variant of every file in configs/."""
    monkeypatch.setattr(sys, "path", [str(CONFIGS), *sys.path])
    files = [runpy.run_path(str(path)) for path in CONFIGS.glob("*.py")]
    variants = [config for file in files for config in file.get("VARIANTS", {}).values()]
    return variants + [file["get_config"]() for file in files if "VARIANTS" not in file]


def test_two_recipes_disagree_about_every_option_that_is_not_the_users(monkeypatch) -> None:
    values = [flat(config) for config in recipes(monkeypatch)]
    alike = {key for key in FIELD_TYPES if len({value[key] for value in values}) == 1}
    assert len(values) > 25
    assert alike == CHOSEN_BY_USERS

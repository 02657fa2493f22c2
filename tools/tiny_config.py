"""A config file for the tests of whole runs; its argument is the folder of `write_corpus`.

Everything that could make two runs differ is on: dropout, shuffling over epochs, two bucket shapes,
accumulation, and (under pytest) eight devices.
"""

import dataclasses
import random
from pathlib import Path

from flaxformer_min.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

WORDS = {
    "a cat": "eine Katze",
    "dogs": "Hunde",
    "see": "sehen",
    "and": "und",
    "seven": "sieben",
    "trees": "Bäume",
    "now": "jetzt",
}


def get_config(folder: str) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=1,
            d_model=16,
            d_ff=32,
            num_heads=2,
            d_k=8,
            d_v=8,
            dropout=0.1,
            max_length=16,
        ),
        data=DataConfig(
            dir=folder,
            cache=f"{folder}/cache",
            train=("train.en", "train.de"),
            validation=("validation.en", "validation.de"),
            test=("validation.en", "validation.de"),
            source_language="en",
            target_language="de",
            vocab_size=290,
            max_length=16,
            tokens_per_batch=256,
            num_buckets=2,
            row_multiple=16,
        ),
        optimizer=OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=40, accumulation=2),
        train=TrainConfig(steps=200, evaluate_every=100, checkpoint_every=50, keep_last=3),
        # A run this short gets no word right: characters give a BLEU above 0.
        decode=DecodeConfig(beam_size=2, max_length_offset=5, bleu_tokenize="char"),
    )


def write_corpus(folder: Path, train: int = 200, validation: int = 41) -> None:
    """Sentences of one to three words; the target is the source word by word, backwards."""
    draw = random.Random(1)
    for split, size in (("train", train), ("validation", validation)):
        lines = [draw.choices(list(WORDS), k=draw.randint(1, 3)) for _ in range(size)]
        translated = [[WORDS[word] for word in reversed(line)] for line in lines]
        for language, side in (("en", lines), ("de", translated)):
            text = "".join(" ".join(line) + "\n" for line in side)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def changed(config: Config, section: str, **values) -> Config:
    """The config with other values in one of its sections."""
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})

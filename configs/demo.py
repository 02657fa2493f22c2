"""The built-in task: phrases of Unicode CLDR, English to German. It needs no file and no network.

Data      dates, times, durations, units, currencies, lists and numbers, rendered in both languages
Expected  at least 99% exact match on 1,000 held-out phrases, however they are spelt
Hardware  2 CPU cores
Time      a few minutes
Command   python train.py --config configs/demo.py --workdir runs/demo

Another pair of languages: --data.source_language fr --data.target_language el
"""

from flaxformer_min.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            num_layers=2,
            d_model=128,
            d_ff=512,
            num_heads=4,
            d_k=32,
            d_v=32,
            max_length=256,
        ),
        data=DataConfig(
            source="phrases",
            train=("train[:60000]",),
            validation=("validation[:300]",),
            test=("test[:1000]",),
            source_language="en",
            target_language="de",
            vocab_size=1_500,
            max_length=128,
            tokens_per_batch=2_048,
            num_buckets=4,
        ),
        optimizer=OptimizerConfig(peak_learning_rate=2e-3, warmup_steps=300),
        train=TrainConfig(
            steps=1_300,
            evaluate_every=1_300,
            checkpoint_every=50,
            keep_last=5,
        ),
        decode=DecodeConfig(beam_size=4, length_penalty_alpha=0.6),
    )

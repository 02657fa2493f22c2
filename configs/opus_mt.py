"""Fine-tuning a Marian model of the OPUS-MT project on text of one's own.

First `flaxformer-min import marian DIR --output runs/opus` makes a checkpoint of the model's
directory, and says the size of its vocabulary. The run begins with its weights and its tokenizer,
so the sizes below have to be the model's; they are those of nearly all OPUS-MT models.

Data: pairs of files of your own, a sentence a line.

base: 6 + 6 layers, D 512, F 2048, 8 heads
    Expected  depends on the text; the learning rate is low, so that what was learnt is kept
    Hardware  any; with 58,101 pieces the model has 74 million parameters
    Time      not measured here: no public model can be had on the machine of the measurements
    Command   python train.py --config configs/opus_mt.py:base --workdir runs/opus_tuned \\
                  --train.initialize_from runs/opus --data.vocab_size 58101 --data.dir PATH \\
                  --data.train train.en train.de --data.validation val.en val.de

student: base with a decoder of one layer, such as sshleifer/student_marian_en_ro_6_1
    Expected  as base
    Hardware  as base
    Time      not measured here
    Command   python train.py --config configs/opus_mt.py:student --workdir runs/opus_tuned \\
                  --train.initialize_from runs/opus --data.vocab_size N --data.dir PATH \\
                  --data.train train.en train.ro --data.validation val.en val.ro
"""

import dataclasses

from flaxformer_min.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def base() -> Config:
    return Config(
        model=ModelConfig(activation="swish", biases=True, layer_norm_epsilon=1e-5, max_length=512),
        data=DataConfig(
            train=("train.en", "train.de"),
            validation=("val.en", "val.de"),
            source_language="en",
            target_language="de",
            vocab_size=58_101,
            byte_fallback=False,
            tokens_per_batch=4_000,
        ),
        optimizer=OptimizerConfig(peak_learning_rate=3e-5, warmup_steps=200),
        train=TrainConfig(
            steps=5_000, evaluate_every=500, checkpoint_every=500, best_metric="loss", patience=3
        ),
        decode=DecodeConfig(beam_size=6, length_penalty_alpha=1.0),
    )


def student() -> Config:
    config = base()
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_decoder_layers=1)
    )


VARIANTS = {"base": base(), "student": student()}


def get_config(variant: str) -> Config:
    return VARIANTS[variant]

"""WMT 2014, English to German: the paper's main experiment (Table 2; Table 3, rows base and big).

Data: TFDS prepares it at the first start, in --data.dir or TFDS_DATA_DIR or ~/tensorflow_datasets:
the corpora of WMT 2014 (4.5 million pairs in the paper), newstest2013 for validation, newstest2014
for the test. It downloads these archives, 1.7 GB, except those that lie in downloads/manual in that
folder (tried here with tiny ones in place of them):
    http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz
    http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz
    http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz
    http://data.statmt.org/wmt19/translation-task/dev.tgz
Files of your own instead: --data.source files --data.train A.en A.de ... and so on.

base: 6 + 6 layers, D 512, F 2048, 8 heads, 100,000 steps
    Expected  27.3 BLEU on newstest2014 in the paper, the last 5 checkpoints averaged, beam 4
    Hardware  8 P100 in the paper
    Time      12 hours in the paper, 0.4 s a step; not measured here
    Command   python train.py --config configs/wmt14_en_de.py:base \\
                  --workdir runs/wmt14_en_de_base

big: 6 + 6 layers, D 1024, F 4096, 16 heads, dropout 0.3, 300,000 steps
    Expected  28.4 BLEU on newstest2014 in the paper, the last 20 checkpoints averaged, beam 4
    Hardware  8 P100 in the paper
    Time      3.5 days in the paper, 1.0 s a step; not measured here
    Command   python train.py --config configs/wmt14_en_de.py:big \\
                  --workdir runs/wmt14_en_de_big

marian: base, as Marian trains it (marian-nmt/marian-examples, wmt2017-transformer)
    Expected  not measured here; Marian's figures are for WMT 2017 and back-translated text
    Hardware  4 GPUs of 12 GB in Marian's example
    Time      not measured here; the run ends at the fifth evaluation without a lower loss
    Command   python train.py --config configs/wmt14_en_de.py:marian \\
                  --workdir runs/wmt14_en_de_marian
    The learning rate is lower and warms up longer, gradients are clipped, and the search is wider.
    Marian also keeps a moving average of the weights, and its batches fill the memory; here a batch
    has the paper's size. It ranks by (sum log p) / n; the nearest here is alpha 1, which divides by
    (5 + n) / 6.

The paper's BLEU is tokenised, with compounds split; sacreBLEU's 13a, used here, is another measure
and gives lower figures for the same text.
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
        model=ModelConfig(),
        data=DataConfig(
            source="tfds:wmt14_translate/de-en",
            train=("train",),
            validation=("validation",),
            test=("test",),
            source_language="en",
            target_language="de",
            vocab_size=37_000,
        ),
        # The paper averages checkpoints 10 minutes apart: 1,500 steps of 0.4 s.
        train=TrainConfig(steps=100_000, evaluate_every=6_000, checkpoint_every=1_500, keep_last=5),
    )


def big() -> Config:
    config = base()
    return dataclasses.replace(
        config,
        model=ModelConfig(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
        # 10 minutes are 600 steps of 1.0 s.
        train=TrainConfig(steps=300_000, evaluate_every=6_000, checkpoint_every=600, keep_last=20),
    )


def marian() -> Config:
    config = base()
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, max_length=100),
        optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=16_000, clip_norm=5.0),
        train=TrainConfig(
            steps=500_000,  # more than patience will let it train
            evaluate_every=5_000,
            checkpoint_every=5_000,
            best_metric="loss",
            patience=5,
        ),
        decode=DecodeConfig(beam_size=12, length_penalty_alpha=1.0),
    )


VARIANTS = {"base": base(), "big": big(), "marian": marian()}


def get_config(variant: str) -> Config:
    return VARIANTS[variant]

"""WMT 2014, English to French: the paper's second experiment (Table 2).

Data: the training archives of the WMT 2014 translation task unpacked under --data.dir, 36 million
pairs (the giga-fren files stay compressed), newstest2013 from its `dev` archive, and newstest2014
as plain text, which `sacrebleu -t wmt14/full -l en-fr --echo src > newstest2014.en` writes
(`--echo ref` for .fr).

base: 6 + 6 layers, D 512, F 2048, 8 heads, 100,000 steps
    Expected  38.1 BLEU on newstest2014 in the paper, the last 5 checkpoints averaged, beam 4
    Hardware  8 P100 in the paper
    Time      12 hours in the paper, 0.4 s a step; not measured here
    Command   python train.py --config configs/wmt14_en_fr.py:base \\
                  --workdir runs/wmt14_en_fr_base --data.dir PATH

big: 6 + 6 layers, D 1024, F 4096, 16 heads, dropout 0.1, 300,000 steps
    Expected  41.8 BLEU on newstest2014 in the paper, the last 20 checkpoints averaged, beam 4
    Hardware  8 P100 in the paper
    Time      3.5 days in the paper, 1.0 s a step; not measured here
    Command   python train.py --config configs/wmt14_en_fr.py:big \\
                  --workdir runs/wmt14_en_fr_big --data.dir PATH

The paper's BLEU is tokenised; sacreBLEU's 13a, used here, is another measure of the same text.
"""

import dataclasses

from flaxformer_min.config import Config, DataConfig, ModelConfig, TrainConfig


def base() -> Config:
    return Config(
        model=ModelConfig(),
        data=DataConfig(
            train=(
                "training/europarl-v7.fr-en.en",
                "training/europarl-v7.fr-en.fr",
                "commoncrawl.fr-en.en",
                "commoncrawl.fr-en.fr",
                "un/undoc.2000.fr-en.en",
                "un/undoc.2000.fr-en.fr",
                "training/news-commentary-v9.fr-en.en",
                "training/news-commentary-v9.fr-en.fr",
                "giga-fren.release2.fixed.en.gz",
                "giga-fren.release2.fixed.fr.gz",
            ),
            validation=("dev/newstest2013.en", "dev/newstest2013.fr"),
            test=("newstest2014.en", "newstest2014.fr"),
            source_language="en",
            target_language="fr",
            vocab_size=32_000,
        ),
        # The paper averages checkpoints 10 minutes apart: 1,500 steps of 0.4 s.
        train=TrainConfig(steps=100_000, evaluate_every=6_000, checkpoint_every=1_500, keep_last=5),
    )


def big() -> Config:
    config = base()
    return dataclasses.replace(
        config,
        model=ModelConfig(d_model=1024, d_ff=4096, num_heads=16, dropout=0.1),
        # 10 minutes are 600 steps of 1.0 s.
        train=TrainConfig(steps=300_000, evaluate_every=6_000, checkpoint_every=600, keep_last=20),
    )


VARIANTS = {"base": base(), "big": big()}


def get_config(variant: str) -> Config:
    return VARIANTS[variant]

"""Table 3 of the paper: what each part of the base model is worth, English to German.

Data      as wmt14_en_de.py; perplexity and BLEU are taken on the development set newstest2013
Expected  the paper's figures below, measured without averaging checkpoints, beam 4
Hardware  8 P100 in the paper
Time      12 hours a row in the paper, 3.5 days for big; not measured here
Command   python train.py --config configs/table3.py:C-N2 \\
              --workdir runs/table3_C-N2

name          change to base                        PPL   BLEU  params (M, as printed)
base                                                4.92  25.8   65
A-h1          h 1, d_k = d_v = 512                  5.29  24.9
A-h4          h 4, d_k = d_v = 128                  5.00  25.5
A-h16         h 16, d_k = d_v = 32                  4.91  25.8
A-h32         h 32, d_k = d_v = 16                  5.01  25.4
B-dk16        d_k 16                                5.16  25.1   58
B-dk32        d_k 32                                5.01  25.4   60
C-N2          2 + 2 layers                          6.11  23.7   36
C-N4          4 + 4 layers                          5.19  25.3   50
C-N8          8 + 8 layers                          4.88  25.5   80
C-d256        d_model 256, d_k = d_v = 32           5.75  24.5   28
C-d1024       d_model 1024, d_k = d_v = 128         4.66  26.0  168
C-ff1024      d_ff 1024                             5.12  25.4   53
C-ff4096      d_ff 4096                             4.75  26.2   90
D-dropout0    dropout 0.0                           5.77  24.6
D-dropout0.2  dropout 0.2                           4.95  25.5
D-smooth0     label smoothing 0.0                   4.67  25.3
D-smooth0.2   label smoothing 0.2                   5.47  25.7
E-learned     learned positional embeddings         4.92  25.7
big           d_model 1024, d_ff 4096, h 16,        4.33  26.4  213
              dropout 0.3, 300,000 steps

PPL is per word piece, with the paper's word pieces.
"""

import dataclasses

import wmt14_en_de
from flaxformer_min.config import Config, ModelConfig


def with_model(model: ModelConfig) -> Config:
    return dataclasses.replace(wmt14_en_de.base(), model=model)


def with_smoothing(label_smoothing: float) -> Config:
    config = wmt14_en_de.base()
    train = dataclasses.replace(config.train, label_smoothing=label_smoothing)
    return dataclasses.replace(config, train=train)


VARIANTS = {
    "base": wmt14_en_de.base(),
    "A-h1": with_model(ModelConfig(num_heads=1, d_k=512, d_v=512)),
    "A-h4": with_model(ModelConfig(num_heads=4, d_k=128, d_v=128)),
    "A-h16": with_model(ModelConfig(num_heads=16, d_k=32, d_v=32)),
    "A-h32": with_model(ModelConfig(num_heads=32, d_k=16, d_v=16)),
    "B-dk16": with_model(ModelConfig(d_k=16)),
    "B-dk32": with_model(ModelConfig(d_k=32)),
    "C-N2": with_model(ModelConfig(num_layers=2)),
    "C-N4": with_model(ModelConfig(num_layers=4)),
    "C-N8": with_model(ModelConfig(num_layers=8)),
    "C-d256": with_model(ModelConfig(d_model=256, d_k=32, d_v=32)),
    "C-d1024": with_model(ModelConfig(d_model=1024, d_k=128, d_v=128)),
    "C-ff1024": with_model(ModelConfig(d_ff=1024)),
    "C-ff4096": with_model(ModelConfig(d_ff=4096)),
    "D-dropout0": with_model(ModelConfig(dropout=0.0)),
    "D-dropout0.2": with_model(ModelConfig(dropout=0.2)),
    "D-smooth0": with_smoothing(0.0),
    "D-smooth0.2": with_smoothing(0.2),
    "E-learned": with_model(ModelConfig(positions="learned", max_length=256)),
    "big": wmt14_en_de.big(),
}


def get_config(row: str) -> Config:
    return VARIANTS[row]

"""Trains a Transformer: python train.py --config FILE --workdir DIR [--section.field VALUE ...]."""

import sys

from flaxformer_min.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

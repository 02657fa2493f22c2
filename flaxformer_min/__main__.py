"""Runs the command line: python -m flaxformer_min VERB."""

import sys

from flaxformer_min.cli import main

sys.exit(main(sys.argv[1:]))

"""Opens files that it is told of on standard input, and says on standard output what came of it.

A line is the JSON list [how, path]; the answer is one line of JSON too. The arguments are those of
`load_config`: FILE:ARG and flags.
"""

import dataclasses
import json
import os
import resource
import sys
from pathlib import Path

from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.config import Config
from flaxformer_min.config_file import load_config
from flaxformer_min.data.tokenizer_training import prepare_tokenizer
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import CheckpointError
from flaxformer_min.training.prepared_data import prepare_data
from flaxformer_min.training.workdir import claim

MEMORY = 32 << 30  # bytes of addresses; an absurd length must not take the machine with it


def opened(how: str, path: Path, config: Config) -> None:
    """Opens one thing as the program does."""
    if how in ("checkpoint", "sealed checkpoint"):
        load_for_inference(path)
    elif how == "workdir":
        claim(path, config)
        prepare_data(config, path)
    else:
        data = dataclasses.replace(config.data, tokenizer=str(path.absolute()))
        prepare_tokenizer(data, ())


def answer(how: str, path: Path, config: Config) -> tuple[str, str]:
    """What happened, and the message; what `cli.main` tells in one line is "refused"."""
    try:
        opened(how, path, config)
    except (UserError, CheckpointError, OSError) as error:
        return "refused", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return "read", ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")  # nothing else may be printed there
    os.dup2(2, 1)
    config = load_config(sys.argv[1], sys.argv[2:])
    for line in sys.stdin:
        how, path = json.loads(line)
        print(json.dumps(answer(how, Path(path), config)), file=answers, flush=True)


if __name__ == "__main__":
    main()

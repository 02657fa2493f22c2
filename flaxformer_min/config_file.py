"""Makes a config from a recipe or a workdir, and the flags that override it on the command line.

A recipe is a Python file. Those of this program lie in configs/, which an installed package has as
flaxformer_min/recipes, so that they have names everywhere: `demo`, `wmt14_en_de:base`.
"""

import contextlib
import dataclasses
import inspect
import re
import runpy
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_min.config import FIELD_TYPES, FILES, PATHS, Config, flat
from flaxformer_min.config_rules import (
    RETIRED,
    config_from_json,
    described,
    typed,
    validate,
)
from flaxformer_min.errors import UserError, first_line, local_path, nearest

# What other programs call the fields and flags, names without their section; a sentence tells what
# there is in place of a setting that this program does not have.
_OTHER_NAMES = {
    "workdir": "output_dir output out save_dir model_dir log_dir logdir checkpoint_dir ckpt_dir "
    "work_dir run_dir",
    "model.num_layers": "layers n_layers nlayers num_hidden_layers encoder_layers decoder_layers "
    "num_encoder_layers depth",
    "model.d_model": "hidden_size hidden_dim hidden dim embed_dim embedding_dim emb_dim n_embd "
    "model_dim width encoder_embed_dim decoder_embed_dim",
    "model.d_ff": "ffn_embed_dim encoder_ffn_embed_dim ffn_dim ff_dim ff_size dim_feedforward "
    "intermediate_size mlp_dim",
    "model.num_heads": "heads n_heads nhead nheads n_head num_attention_heads attention_heads",
    "model.compute_dtype": "dtype fp16 bf16 amp precision mixed_precision",
    "model.remat": "gradient_checkpointing checkpoint_activations",
    "data.dir": "data_dir data_path dataset_dir",
    "data.source": "dataset dataset_name",
    "data.train": "train_file train_files trainpref",
    "data.validation": "valid val dev validation_file valid_file dev_file",
    "data.test": "test_file",
    "data.source_language": "src src_lang source_lang",
    "data.target_language": "tgt tgt_lang trg target_lang",
    "data.vocab_size": "vocab vocab_sz num_words",
    "data.max_length": "max_len max_seq_len max_seq_length max_source_length max_target_length",
    "data.tokens_per_batch": "max_tokens batch_tokens",
    "a batch is counted in tokens: --data.tokens_per_batch": "batch_size bs batch train_batch_size "
    "per_device_train_batch_size per_device_batch_size",
    "optimizer.peak_learning_rate": "lr learning_rate max_lr peak_lr base_lr",
    "optimizer.warmup_steps": "warmup warmup_updates num_warmup_steps",
    "optimizer.clip_norm": "clip grad_clip clip_grad max_grad_norm gradient_clip_val",
    "optimizer.accumulation": "accum grad_accum gradient_accumulation_steps update_freq "
    "accumulate_grad_batches",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.beta2": "adam_beta2",
    "train.steps": "max_steps num_steps num_train_steps train_steps total_steps max_updates "
    "max_update iterations iters n_iters",
    "--train.seed draws weights and dropout, --data.seed the order of the text": "seed random_seed",
    "train.label_smoothing": "smoothing label_smoothing_factor",
    "train.evaluate_every": "eval_every eval_steps eval_interval eval_freq val_every valid_freq",
    "train.checkpoint_every": "save_every save_steps save_interval save_freq checkpoint_freq",
    "train.keep_last": "save_total_limit keep_checkpoints max_to_keep",
    "train.patience": "early_stopping early_stopping_patience",
    "train.initialize_from": "init_from pretrained finetune_from restore_file load",
    "decode.beam_size": "beam beams num_beams beam_width",
    "decode.length_penalty_alpha": "alpha lenpen length_penalty",
    "a run is counted in steps: --train.steps": "epochs num_epochs n_epochs max_epochs max_epoch "
    "num_train_epochs epoch",
    "Adam has no weight decay here, as in the paper": "weight_decay wd",
    "the optimizer is Adam with a beta1 of 0.9, as in the paper": "optimizer optim beta1 "
    "adam_beta1",
    "the learning rate is the paper's: --optimizer.warmup_steps and --optimizer.peak_learning_rate "
    "shape it": "scheduler lr_scheduler lr_scheduler_type schedule min_lr lr_decay",
    "every step is in metrics.jsonl and in TensorBoard's events": "log_every log_interval log_freq "
    "logging_steps print_every report_every wandb tensorboard",
    "a thread makes the batches, and nothing is to be set": "workers num_workers",
    "the same command with the same --workdir resumes a run": "resume resume_from "
    "resume_from_checkpoint continue",
    "a run takes all devices: --mesh.data, --mesh.fsdp and --mesh.tensor arrange them, and "
    "JAX_PLATFORMS=cpu keeps to the CPU": "gpus num_gpus n_gpu gpu devices device cuda no_cuda "
    "accelerator cpu",
}
SYNONYMS = {name: meant for meant, names in _OTHER_NAMES.items() for name in names.split()}

RECIPES = {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.py"))}


def load_config(spec: str, overrides: Sequence[str] = ()) -> Config:
    """Returns the config that a file and the flags describe, checked.

    Args:
        spec: FILE, Python whose `get_config()` returns the whole tree; or FILE:ARG, for
            `get_config(ARG)`. The ARGs that a file knows are the keys of its dict `VARIANTS`. As
            for any script, modules beside FILE can be imported. Instead of FILE it can be the name
            of a recipe of this program, such as demo or wmt14_en_de:base.
        overrides: flags such as `--model.dropout 0.2` or `--data.train a.en a.de`.

    Raises:
        UserError: the file or a flag cannot be used, or values contradict each other.

    >>> load_config("wmt14_en_de:base", ["--model.num_layers", "2"]).model.num_layers
    2
    """
    return _finished(_run_file(spec), overrides)


def load_workdir_config(workdir: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of the run in a workdir with the flags applied, checked.

    Raises UserError if there is no run, and for the reasons of `load_config`.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(
            f"--workdir {workdir}: has no run to go on with; give --config to begin one"
        )
    if path.with_name("manifest.json").exists():
        raise UserError(f"--workdir {workdir}: is one checkpoint and no workdir; give its workdir")
    try:
        config = config_from_json(path.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; give --config") from None
    return _finished(config, overrides)


def _finished(config: Config, overrides: Sequence[str]) -> Config:
    """Returns the config with the flags applied and paths expanded, checked."""
    config = _with_local_paths(_override(config, overrides))
    validate(config)
    return config


def print_help(spec: str) -> None:
    """Prints every field with its type, its value in FILE and the comment on it."""
    config, indent = _run_file(spec), " " * 6
    print(f"fields of the config, with their values in {spec}:")
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        comments = _comments(type(values))
        print(f"\n{inspect.getdoc(values)}")
        for name, value in vars(values).items():
            key = f"{section.name}.{name}"
            shown = " ".join(value) if isinstance(value, tuple) else value
            print(f"  --{key}: {described(FIELD_TYPES[key])} (default: {shown})")
            print(textwrap.indent(textwrap.fill(comments[name], 90), indent))


def _run_file(spec: str) -> Config:
    """Returns what the file's `get_config` returns, with the type of every field checked."""
    name, path, argument = _split_spec(spec)
    with _users_code(path):
        module = runpy.run_path(str(path))
        get_config, arguments = module.get("get_config"), [argument] if argument else []
        if not callable(get_config):
            raise UserError(f"{path} has no function get_config()")
        _check_argument(name, argument, get_config, module.get("VARIANTS", {}))
        config = get_config(*arguments)
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config returns {type(config).__name__}, it must be Config")
    try:
        return typed(Config, dataclasses.asdict(config))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _split_spec(spec: str) -> tuple[str, Path, str]:
    """Returns FILE or the recipe's name as it was given, the file, and ARG, empty if there is none.

    A file that is there comes before a recipe of that name.
    """
    name, argument = spec, ""
    if not Path(spec).is_file() and ":" in spec:
        name, _, argument = spec.rpartition(":")
    if not Path(name).is_file() and name in RECIPES:
        return name, RECIPES[name], argument
    if not Path(name).is_file():
        known = f"; the recipes are {', '.join(RECIPES)}" if Path(name).name == name else ""
        raise UserError(f"{name}: there is no such config file{known}")
    if not name.endswith(".py"):
        raise UserError(f"{name}: a config is a Python file with get_config(); see configs/")
    return name, Path(name), argument


def _check_argument(name: str, argument: str, get_config: Callable, variants: dict) -> None:
    """Refuses an ARG that is missing, unknown or not asked for."""
    takes_one = bool(inspect.signature(get_config).parameters)
    if argument and not takes_one:
        raise UserError(f"{name} takes no argument: leave out :{argument}")
    if variants and argument not in variants:
        problem = f"has no variant {argument}" if argument else "needs a variant"
        raise UserError(f"{name} {problem}: write {name}:NAME with one of {', '.join(variants)}")
    if takes_one and not argument:
        raise UserError(f"{name} needs an argument: write {name}:ARG")


@contextlib.contextmanager
def _users_code(path: Path) -> Generator[None]:
    """A context in which modules beside the file can be imported and every error is a UserError."""
    before = sys.path.copy()
    sys.path.insert(0, str(path.parent))
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also exit(0), which would end a start as if all were done
        reason = f"{type(error).__name__}: {first_line(error)}{_hint(error)}"
        raise UserError(f"{path}{_line_of(error, path)}: {reason}") from error
    finally:
        sys.path[:] = before


def _hint(error: BaseException) -> str:
    """Says which field was meant by a name that no section has, as in ModelConfig(hidden=9)."""
    pattern = r"(?:\w+Config\.__init__\(\) )?got an unexpected keyword argument '(\w+)'"
    wrong = re.match(pattern, str(error))
    return f"; {_meant(wrong[1])}".replace("--", "") if wrong else ""


def _line_of(error: BaseException, path: Path) -> str:
    """Returns `:LINE` of the deepest call inside the file, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return "".join([f":{frame.lineno}" for frame in frames if frame.filename == str(path)][-1:])


def _override(config: Config, flags: Sequence[str]) -> Config:
    """Returns the config with the fields that flags set."""
    for key, words in _split_flags(flags):
        kind = FIELD_TYPES[key]
        try:
            value = typed(kind, _value(kind, words), key)
        except (ValueError, UserError):
            given = " ".join([key, *words])
            raise UserError(f"--{given}: {key} must be {described(kind)}") from None
        config = _with_value(config, key, value)
    return config


def _with_value(config: Config, key: str, value: Any) -> Config:
    """Returns the config with another value in one field."""
    section, field = key.split(".")
    changed = dataclasses.replace(getattr(config, section), **{field: value})
    return dataclasses.replace(config, **{section: changed})


def _with_local_paths(config: Config) -> Config:
    """Returns the config with `~` expanded in all paths; raises UserError for what is no path."""
    values = flat(config)
    for key in (*PATHS, *FILES) if config.data.source_kind == "files" else PATHS:
        value = values[key]
        try:
            if isinstance(value, tuple):
                config = _with_value(config, key, tuple(map(local_path, value)))
            elif value is not None:
                config = _with_value(config, key, local_path(value))
        except ValueError as error:
            raise UserError(f"{key}: {error}") from None
    return config


def _split_flags(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the field and the words of each flag.

    `--data.max_length 9` may also be written `--data.max-length=9`.
    """
    groups: list[tuple[str, list[str]]] = []
    for flag in flags:
        if flag.startswith("--"):
            name, equals, word = flag.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            if key in RETIRED:
                raise UserError(f"{name} is no field any more: it is always {RETIRED[key]}")
            if key not in FIELD_TYPES:
                raise UserError(f"{name} is no field of the config: {_meant(key)}")
            if key in dict(groups):
                raise UserError(f"{name} is given twice; leave one out")
            groups.append((key, [word] if equals else []))
        elif groups:
            groups[-1][1].append(flag)
        else:
            raise UserError(f"{flag} belongs to no flag: a field is set by --model.dropout 0.2")
    return groups


def _meant(key: str) -> str:
    """Says which field was meant by a name that is none, or what there is in its place."""
    meant = SYNONYMS.get(key.rpartition(".")[2]) or nearest(key, FIELD_TYPES)
    return meant if " " in meant else f"did you mean --{meant}?"


def _value(kind: Any, words: list[str]) -> Any:
    """Returns the words of a flag as JSON would have them; raises ValueError if the type is wrong.

    A list of strings takes any number of words, every other type exactly one.
    """
    if typing.get_origin(kind) is tuple:
        return words
    (word,) = words
    if isinstance(kind, types.UnionType):  # X | None
        return None if word == "None" else _value(typing.get_args(kind)[0], words)
    if kind is bool:
        return ("False", "True").index(word) == 1
    return kind(word) if kind in (int, float) else word


def _comments(section: type) -> dict[str, str]:
    """Returns each field's comment: the lines above it in `config`, or else the one beside it."""
    declaration = r"((?: {4}# .*\n)*) {4}(\w+): [^#\n]*(?:# (.*))?"
    return {
        field: " ".join(above.replace("# ", "").split()) or beside
        for above, field, beside in re.findall(declaration, inspect.getsource(section))
    }

"""The command line: every verb, its exit status, and one line for every mistake."""

import gzip
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flaxformer_min import cli
from flaxformer_min.decoding.evaluate import rounded
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.system import console, malloc
from flaxformer_min.system.sealed import CheckpointError
from flaxformer_min.training import loop
from tools import tiny_config

ROOT = Path(__file__).parent.parent
LINES = ["a cat", "", " \t", "seven dogs", "now"]
HOSTILE = b"a cat\r\n\n \t\nseven dogs\nnow"  # CRLF, blank lines, no final newline


def main(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def tiny_train(corpus: Path, workdir: Path, *overrides: str) -> list[str | Path]:
    config = f"{tiny_config.__file__}:{corpus}"
    return ["train", "--config", config, "--workdir", workdir, *overrides]


def translations(directory: Path, lines: list[str], **options) -> list[str]:
    translator = Translator.load(directory, step=options.pop("step", None))
    return [translation.text for translation in translator.translate(lines, Options(**options))]


@pytest.fixture
def stdin(monkeypatch):
    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


@pytest.fixture
def two_files(tmp_path):
    """Source and target with the given bytes; names that end in .gz are packed."""

    def write(source: bytes, target: bytes, suffix: str = "") -> list[Path]:
        paths = [tmp_path / f"{side}{suffix}" for side in ("source", "target")]
        for path, data in zip(paths, (source, target), strict=True):
            path.write_bytes(gzip.compress(data) if suffix == ".gz" else data)
        return paths

    return write


def test_translate_reads_a_pipe_and_writes_a_line_for_each_of_its_lines(finished):
    command = [sys.executable, "-m", "flaxformer_min", "translate", str(finished)]
    done = subprocess.run(command, cwd=ROOT, input=HOSTILE, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().split("\n")[:-1] == translations(finished, LINES)
    assert done.stdout.split(b"\n")[1:3] == [b"", b""]


def test_translate_takes_a_step_and_search_options(finished, stdin, capsysbinary):
    for flags, options in (
        (["--step", "best"], {"step": "best"}),
        (["--step", "150", "--beam-size", "1"], {"step": 150, "beam_size": 1}),
        (
            ["--sample", "--temperature", "2", "--top-k", "90", "--top-p", ".99", "--seed", "3"],
            {"sample": True, "temperature": 2.0, "top_k": 90, "top_p": 0.99, "seed": 3},
        ),
        (
            ["--no-repeat-ngram-size", "1", "--max-length-offset", "2", "--no-forbid-unknown"],
            {"no_repeat_ngram_size": 1, "max_length_offset": 2, "forbid_unknown": False},
        ),
        (
            ["--interactive", "--min-length", "4", "--length-penalty-alpha=-1"],
            {"min_length": 4, "length_penalty_alpha": -1.0},
        ),
    ):
        stdin(HOSTILE)
        assert main("translate", finished, *flags) == 0
        written = capsysbinary.readouterr().out.decode()
        assert written.split("\n")[:-1] == translations(finished, LINES, **options)


def test_translate_numbers_lines_over_all_that_it_read(finished, stdin, caplog):
    stdin(b"now\n\nand\n" + b"tree " * 20)
    assert main("translate", finished, "--interactive") == 0
    assert "line 4: " in caplog.text


def test_translate_of_nothing_writes_nothing(finished, stdin, capsysbinary):
    stdin(b"")
    assert main("translate", finished) == 0
    assert capsysbinary.readouterr().out == b""


def test_n_best_is_json_and_attention_a_file(finished, tmp_path, stdin, capsysbinary):
    (tmp_path / "prefix").write_bytes(b"\n\n\nHunde\n\n")
    stdin(HOSTILE)
    flags = ["--n-best", "2", "--prefix", tmp_path / "prefix", "--average-heads"]
    assert main("translate", finished, *flags, "--attention", tmp_path / "a.jsonl") == 0
    found = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [len(line) for line in found] == [2, 1, 1, 2, 2]
    assert found[3][0]["text"].startswith("Hunde")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]
    assert [row["line"] for row in rows] == [1, 4, 5]
    assert len(rows[1]["cross_mean_over_heads"][0]) == found[3][0]["token_count"]


@pytest.mark.parametrize("packed", [False, True])
def test_translate_reads_and_writes_files(finished, tmp_path, capsysbinary, packed):
    source, output, links = (tmp_path / name for name in ("in", "out", "links"))
    source.write_bytes(gzip.compress(HOSTILE) if packed else HOSTILE)
    output.write_text("old")
    flags = ["--input", source, "--output", output, "--alignment", links]
    assert main("translate", finished, *flags) == 0
    assert capsysbinary.readouterr().out == b""
    texts = translations(finished, LINES)
    assert output.read_text().split("\n")[:-1] == texts
    words = [line.split() for line in links.read_text().split("\n")[:-1]]
    assert [len(line) for line in words] == [len(text.split()) for text in texts]
    assert {int(link.split("-")[0]) for link in words[3]} <= {0, 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "links", "out"]


def test_what_translate_writes_is_there_only_when_it_is_whole(finished, tmp_path, capfd):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"now\n\xff\n")
    for before in (None, "old"):
        if before is not None:
            output.write_text(before)
        assert main("translate", finished, "--input", source, "--output", output) == 2
        assert_one_error(capfd.readouterr().err, "in, line 2: not UTF-8")
        assert output.exists() == (before is not None)
        assert not (tmp_path / "out.partial").exists()
    assert output.read_text() == "old"


def test_a_terminal_is_told_that_a_model_is_loaded_and_asked_for_each_line(finished):
    """A pseudo-terminal for standard input and error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flaxformer_min", "translate", str(finished), "--interactive"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.write(ours, b"now\na cat\n\x04")
        out, errors = process.communicate()
    os.close(ours)
    os.close(theirs)
    assert out.decode().split("\n")[:-1] == translations(finished, ["now", "a cat"])
    said = f"loading {finished} ...\ntype a line to translate; Ctrl-D ends\n> > > \n"
    assert errors.decode() == said


def test_several_directories_are_an_ensemble_of_one_tokenizer(finished, stdin, capsysbinary):
    checkpoints = finished / "checkpoints"
    stdin(HOSTILE)
    assert main("translate", checkpoints / "100", checkpoints / "200") == 0
    both = Translator.load(checkpoints / "100", checkpoints / "200")
    expected = [translation.text for translation in both.translate(LINES)]
    assert capsysbinary.readouterr().out.decode().split("\n")[:-1] == expected
    assert both.step == [100, 200]


def test_score_writes_one_number_a_line(finished, two_files, capsys):
    source, target = two_files(b"a cat\nnow\n\n", b"eine Katze\njetzt\nx", ".gz")
    assert main("score", finished, "--source", source, "--target", target) == 0
    pairs = [("a cat", "eine Katze"), ("now", "jetzt"), ("", "x")]
    numbers = [float(line) for line in capsys.readouterr().out.splitlines()]
    translator = Translator.load(finished)
    assert numbers == translator.score(pairs)
    assert main("score", finished, "--source", source, "--target", target, "--per-token") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["score"] for row in rows] == numbers
    for row, scored in zip(rows, translator.score_tokens(pairs), strict=True):
        assert row["tokens"] == translator.tokenizer.pieces(scored.tokens)
        assert row["log_probs"] == list(scored.log_probs)


def test_evaluate_writes_the_record_as_json(finished, corpus, two_files, capsys):
    source, reference = [(corpus / f"validation.{side}").read_bytes() for side in ("en", "de")]
    source, reference = two_files(source, reference, ".gz")
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    for files in ([], ["--source", source, "--reference", reference]):  # the same: its test split
        assert main("evaluate", finished, *files) == 0
        record = json.loads(capsys.readouterr().out)
        assert record | rounded(last["bleu"]) == record
        assert record["chrf"]["score"] > 0 and record["ter"]["signature"].startswith("nrefs:1|")
    flags = ["--beam-size", "1", "--length-penalty-alpha", "0.3", "--max-length-offset", "7"]
    assert main("evaluate", finished, "--source", source, "--reference", reference, *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["beam_size"], record["length_penalty_alpha"]) == (1, 0.3)
    assert record["max_length_offset"] == 7


def test_evaluate_against_a_model_is_that_against_its_translations(
    finished, corpus, tmp_path, capsys
):
    """Of two equal systems every sample has the same score."""
    lines = (corpus / "validation.en").read_text().splitlines()
    texts = translations(finished, lines, step=100)
    (tmp_path / "there").write_text("".join(text + "\n" for text in texts))
    records = []
    for against in (finished / "checkpoints" / "100", tmp_path / "there"):
        assert main("evaluate", finished, "--step", "200", "--against", against) == 0
        records.append(json.loads(capsys.readouterr().out)["against"])
        assert records[-1].pop("system") == str(against)
    assert records[0] == records[1] and set(records[0]) == {"bleu", "chrf", "ter"}
    (tmp_path / "there").write_text("a\n")
    assert main("evaluate", finished, "--against", tmp_path / "there") == 2
    assert_one_error(capsys.readouterr().err, "there has 1 lines but 41 are translated")


def test_average_writes_a_checkpoint_that_translate_reads(finished, tmp_path, stdin, capsysbinary):
    output = tmp_path / "average"
    assert main("average", finished, "--last", "2", "--output", output) == 0
    assert b"the average of steps 150, 200" in capsysbinary.readouterr().err
    stdin(b"now")
    assert main("translate", output) == 0
    assert capsysbinary.readouterr().out.count(b"\n") == 1


SEE = ["trace", "summary", "neighbours", "encode", "plot", "plot attention"]


@pytest.mark.parametrize("verb", ["", "train", "translate", "score", "evaluate", "average", *SEE])
def test_help_is_there_without_loading_anything(verb, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(*verb.split(), "--help")
    assert exit_.value.code == 0
    assert f"usage: flaxformer-min {verb}" in capsys.readouterr().out


def test_the_command_line_imports_no_jax_before_it_needs_it():
    code = "import sys, flaxformer_min.cli; assert not {'jax', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_of_train_after_a_config_lists_every_field(corpus, capsys):
    with pytest.raises(SystemExit) as exit_:
        main("train", "--config", f"{tiny_config.__file__}:{corpus}", "--help")
    assert exit_.value.code == 0
    assert "--model.d_ff: a whole number" in capsys.readouterr().out


def assert_one_error(errors: str, message: str) -> None:
    """Above it may stand how far the command was."""
    errors = re.sub(r"^(training the tokenizer \.\.\.|translating: \d+ lines)\n", "", errors)
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.train no.en no.de", "no.en: No such file"),
        ("--data.train train.en validation.de", "train.en has 200 lines but "),
        ("--data.train empty empty", "data.train: no line"),
        ("--data.train latin1 latin1", "latin1, line 2: not UTF-8"),
        ("--data.vocab_size 5000", "data.vocab_size: 5000 is more than this corpus gives; at most"),
        ("--data.tokenizer no.model", "no.model: No such file"),
        ("--model.droput 0.2", "did you mean --model.dropout?"),
        ("--model.dropout much", "model.dropout must be a number"),
        ("--model.d_model 15", "model.d_model is 15: it must be even"),
        ("--mesh.data 3", "mesh: data x fsdp x tensor = 3 x 1 x 1 does not make the 8 devices"),
        ("--train.initialize_from no", "no: no such directory"),
        ("--model.dropout 0.2 --model.dropout=0.3", "--model.dropout is given twice"),
        ("--workdir twice", "--workdir is given twice"),
        ("--data.dir s3://bucket", "data.dir: s3://bucket is a URL"),
        ("--data.train= x", "data.train: it is empty"),
        ("--data.tokenizer=", "data.tokenizer: it is empty"),
        (
            "--train.initialize_from ~no-such-user/x",
            "train.initialize_from: ~no-such-user/x: there",
        ),
        ("--profile 0", "'0' is no whole number above 0"),
    ],
)
def test_a_mistake_in_training_is_one_line_and_status_2(corpus, tmp_path, capfd, flags, message):
    (corpus / "empty").write_bytes(b"")
    (corpus / "latin1").write_bytes(b"gr\xc3\xbcn\ngr\xfcn\n")
    assert main(*tiny_train(corpus, tmp_path / "workdir", *flags.split())) == 2
    assert_one_error(capfd.readouterr().err, message)


def test_a_workdir_of_another_config_is_one_line_and_status_2(corpus, finished, tmp_path, capfd):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    assert main(*tiny_train(corpus, tmp_path, "--model.dropout", "0.2")) == 2
    message = "model.dropout was 0.1 in this workdir and is 0.2 now"
    assert_one_error(capfd.readouterr().err, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: VERB"),
        ("train --config no.py --workdir w", "no.py: there is no such config file"),
        ("train --config no.py", "required: --workdir"),
        ("fly", "invalid choice: 'fly'"),
        ("translate {empty}/no", "no: no such directory"),
        ("translate {empty}", "no finished checkpoint in it"),
        (
            "translate {finished} --step 25",
            "no checkpoint of step 25; steps there: [100, 150, 200]",
        ),
        ("translate {finished} --step new", "'new' is neither a step number nor 'best'"),
        ("translate {finished} --step " + 5000 * "9", "'99"),
        ("translate {finished} --beam-size " + 5000 * "9", "is no whole number"),
        ("translate {finished} --length-penalty-alpha -1e38", "it must be from -10 to 10"),
        ("translate {finished} --sample --temperature warm", "'warm' is no finite number"),
        ("translate {finished} --min-length 17", "min_length is 17: it must be at most 16"),
        ("translate {finished} --beam-size 0", "'0' is no whole number above 0"),
        ("translate {finished} --beam 3", "unrecognized: --beam 3; did you mean --beam-size?"),
        ("translate {finished} --num_beams=3", "--num_beams=3; did you mean --beam-size?"),
        ("translate {finished} --batch_size 3", "--batch_size 3 (see"),
        ("score {finished} --sorce x --source a --target b", "--sorce x; did you mean --source?"),
        ("translate {finished} --step 50 --step 100", "--step is given twice"),
        ("translate gs://bucket/run", "argument DIR: gs://bucket/run is a URL"),
        ("translate {finished} --prefix=", "argument --prefix: it is empty"),
        ("translate {finished} --attention=file:///x", "argument --attention: file:///x is a URL"),
        ("score {finished} --source= --target x", "argument --source: it is empty"),
        ("score {finished} --source x --target=s3://x", "argument --target: s3://x is a URL"),
        ("evaluate {finished} --source x --reference=", "argument --reference: it is empty"),
        ("average {finished} --output=", "argument --output: it is empty"),
        ("average hdfs://x --output y", "argument DIR: hdfs://x is a URL"),
        ("train --config no.py --workdir=", "argument --workdir: it is empty"),
        ("train --config gs://x.py --workdir w", "argument --config: gs://x.py is a URL"),
        ("plan --config no.py --topology cpu:8 --lengths=", "argument --lengths: it is empty"),
        ("translate {finished} --beam-size -1", "'-1' is no whole number above 0"),
        ("translate {finished} --sample --beam-size 2", "sample draws one token at a time"),
        ("translate {finished} --n-best 3", "n_best is 3: it must be at most beam_size, 2"),
        ("translate {finished} --top-k 3", "top_k is for sampling: give sample too"),
        ("translate {finished} --max-length-offset -1", "max_length_offset is -1"),
        ("translate {finished} --temperature inf", "'inf' is no finite number"),
        ("translate {finished} --errors ignore", "invalid choice: 'ignore'"),
        ("translate {finished} --prefix {two}", "two has more lines than the text, which has 0"),
        ("translate {finished} --input {two} --output {two}", "--input and --output are one file"),
        ("translate {finished} --input {two} --alignment {empty}/../two", "are one file"),
        ("translate {finished} --input {empty}", "empty: no regular file"),
        ("translate {finished} --input no", "no: No such file"),
        ("translate {finished} --output {empty}", "empty: is no file; without the flag"),
        ("translate {finished} --output /dev/null", "/dev/null: is no file; without the flag"),
        ("translate {finished} --output {empty}/a/b", "b: its folder is not there"),
        ("translate {finished} --input {two} --interactive", "--input reads a file: give one"),
        ("evaluate {finished} --against no", "no: No such file"),
        ("evaluate {finished} --against {empty}", "no finished checkpoint in it"),
        ("translate {finished} --prefix no", "no: No such file"),
        ("translate {finished} --attention {two}", "two: attention goes to a file that ends in"),
        ("translate {finished} --average-heads", "--average-heads belongs to --attention FILE"),
        ("translate {finished} {finished} --attention {empty}/x.npz", "this is an ensemble"),
        ("score {finished} --source {three} --target {two}", "three has 3 lines but"),
        ("score {finished} --source {two} --target {latin1}", "latin1, line 2: not UTF-8"),
        ("score {finished} --source {two} --target no", "no: No such file"),
        ("evaluate {finished} --source {two}", "--source and --reference belong together"),
        ("evaluate {finished} --source {none} --reference {none}", "no lines to evaluate"),
        ("average {finished} --last 4 --output {empty}/x", "cannot average the last 4"),
        ("average {finished} --last 2 --output {empty}", "is there already"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(finished, tmp_path, stdin, capfd, arguments, message):
    stdin(b"now" if "npz" in arguments else b"")
    files = {"three": b"a\nb\nc\n", "two": b"a\nb\n", "latin1": b"a\n\xfc\n", "none": b""}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "empty").mkdir()
    names = {name: tmp_path / name for name in [*files, "empty"]}
    assert main(*[word.format(finished=finished, **names) for word in arguments.split()]) == 2
    assert_one_error(capfd.readouterr().err, message)


def test_invalid_utf8_on_standard_input_names_its_line(finished, stdin, capfd):
    stdin(b"now\n\xff\n")
    assert main("translate", finished) == 2
    assert_one_error(capfd.readouterr().err, "standard input, line 2: not UTF-8")


def test_a_damaged_checkpoint_is_one_line_and_status_1(finished, tmp_path, stdin, capfd):
    copy = shutil.copytree(finished / "checkpoints" / "200", tmp_path / "copy")
    (copy / "tokenizer.model").write_bytes(b"x")
    stdin(b"now")
    assert main("translate", copy) == 1
    assert_one_error(capfd.readouterr().err, "tokenizer.model: damaged")


def test_a_workdir_inside_a_file_is_one_line_and_status_2(corpus, tmp_path, capfd):
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file" / "inside"):
        assert main(*tiny_train(corpus, workdir)) == 2
        assert_one_error(capfd.readouterr().err, "is a file; give a directory")


def test_a_workdir_that_cannot_be_read_is_one_line_and_status_1(corpus, tmp_path, capfd):
    (tmp_path / "config.json").mkdir()
    assert main(*tiny_train(corpus, tmp_path)) == 1
    assert_one_error(capfd.readouterr().err, "config.json")


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (FloatingPointError("steps 11 to 20 were not finite"), "steps 11 to 20", 1),
        (CheckpointError("w/checkpoints/5: not saved: OSError"), "w/checkpoints/5: not saved", 1),
        (OSError(28, "No space left on device", "w/metrics.jsonl"), "No space left on device", 1),
        (KeyboardInterrupt(), None, 130),
    ],
)
def test_what_can_be_foreseen_is_one_line(
    corpus, tmp_path, monkeypatch, capfd, error, line, status
):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(loop, "run", run)
    assert main(*tiny_train(corpus, tmp_path)) == status
    if line is None:
        assert capfd.readouterr().err == ""
    else:
        assert_one_error(capfd.readouterr().err, line)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of")])
def test_too_little_memory_is_one_line_that_names_what_to_lower(
    corpus, finished, tmp_path, monkeypatch, stdin, capfd, error
):
    def exhausted(*_, **__):
        raise error

    monkeypatch.setattr(loop, "run", exhausted)
    assert main(*tiny_train(corpus, tmp_path)) == 1
    assert_one_error(capfd.readouterr().err, "lower data.tokens_per_batch, or raise optimizer.acc")
    monkeypatch.setattr(Translator, "decode", exhausted)
    stdin(b"now\n")
    (tmp_path / "lines").write_text("now\n")
    files = ["--source", tmp_path / "lines", "--reference", tmp_path / "lines"]
    for arguments in (["translate", finished], ["evaluate", finished, *files]):
        assert main(*arguments) == 1
        assert_one_error(capfd.readouterr().err, "): lower --beam-size or --max-length-offset")


def run_in_shell(command: str, finished: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    program = f"{sys.executable} -m flaxformer_min"
    (tmp_path / "lines").write_bytes(b"now\n")
    (tmp_path / "bad").write_bytes(b"now\n\xff\n")
    names = {"lines": tmp_path / "lines", "bad": tmp_path / "bad"}
    text = command.format(program=program, finished=finished, **names)
    shell = ["bash", "-o", "pipefail", "-c", text]
    return subprocess.run(shell, cwd=ROOT, capture_output=True)


@pytest.mark.run
@pytest.mark.parametrize(
    ("command", "status", "lines", "errors"),
    [
        ("{program} translate {finished} <&-", 0, 0, b""),
        ("{program} translate {finished} < {lines} >&-", 0, 0, b""),
        ("{program} translate {finished} < {lines} 2>&-", 0, 1, b""),
        ("{program} translate {finished} < {bad} 2>&-", 2, 0, b""),
        ("{program} translate {finished} < {bad} >&- 2>&-", 2, 0, b""),
        ("{program} score {finished} --source {lines} --target {lines} | true", 1, 0, b""),
        (
            "{program} score {finished} --source {lines} --target {lines} > /dev/full",
            1,
            0,
            b"error: [Errno 28] No space left on device\n",
        ),
    ],
)
def test_a_stream_that_is_closed_or_full_changes_nothing_else(
    finished, tmp_path, command, status, lines, errors
):
    done = run_in_shell(command, finished, tmp_path)
    found = (done.returncode, done.stdout.count(b"\n"), done.stderr)
    assert found == (status, lines, errors), done


def test_a_system_without_fcntl_is_told_in_one_line():
    code = "import sys; sys.modules['fcntl'] = None; from flaxformer_min import cli; "
    command = [sys.executable, "-c", code + "sys.exit(cli.main(['translate', 'x']))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert_one_error(done.stderr, "this system has no fcntl: run on Linux or macOS")


def test_a_bug_of_the_program_is_not_dressed_up(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "run", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(*tiny_train(corpus, tmp_path))


@pytest.mark.run
def test_an_error_leaves_a_process_as_one_line_and_its_status(corpus, tmp_path):
    arguments = tiny_train(corpus, tmp_path, "--data.vocab_size", "5000")[1:]
    command = [sys.executable, "train.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_error(done.stderr, "data.vocab_size: 5000 is more than this corpus gives")


def test_a_reader_that_has_seen_enough_ends_translate_quietly(finished):
    command = [sys.executable, "-m", "flaxformer_min", "translate", str(finished)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(b"now\n")
    assert (process.returncode, errors) == (1, b"")


def test_threads_that_come_back_to_a_closed_event_loop_say_nothing(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "__unraisablehook__", said.append)
    errors = RuntimeError("Event loop is closed"), RuntimeError("other")
    events = [SimpleNamespace(exc_value=error) for error in errors]
    for event in events:
        console.unraisable(event)
    assert said == events[1:]


@pytest.mark.run
def test_the_error_is_the_last_line_whatever_a_library_leaves_behind() -> None:
    program = """
import atexit, sys
from flaxformer_min import cli
from flaxformer_min.errors import UserError

async def never_awaited():
    pass

def average(options, rest):
    cli.left_behind = never_awaited()
    raise UserError("mend it")

atexit.register(print, "a library says goodbye", file=sys.stderr)
cli.average = average
sys.exit(cli.main(["average", "x", "--output", "y"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: mend it\n"


def test_train_keeps_the_work_space_of_a_step_before_anything_runs(monkeypatch, tmp_path):
    events = []
    monkeypatch.setattr(malloc, "keep_work_space", lambda: events.append("kept"))
    monkeypatch.setattr(loop, "run", lambda *arguments, **options: events.append("run") or 0)
    assert main(*tiny_train(tmp_path, tmp_path / "run")) == 0
    assert events == ["kept", "run"]

"""Several processes: the same numbers as one, one stop, one end; and nothing for a single one."""

import contextlib
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from flaxformer_min import cli
from flaxformer_min.checkpoints.format import read_meta
from flaxformer_min.checkpoints.retention import find_checkpoints
from flaxformer_min.config import Config
from flaxformer_min.data.batching import assemble
from flaxformer_min.errors import UserError
from flaxformer_min.system import failures, processes, rendezvous
from flaxformer_min.system.processes import broadcast, exchange, on_first
from flaxformer_min.training import loop
from flaxformer_min.training.prepared_data import prepare_data
from flaxformer_min.training.sharding import make_mesh, place_rows, rows_here
from flaxformer_min.training.workdir import claim
from tools import tiny_config
from tools.processes import Accident, free_port, launch, metrics, worst_difference
from tools.tiny_config import changed

FLAGS = "--data.vocab_size 285 --train.steps 30 --train.evaluate_every 20 --train.checkpoint_every"
FLAGS = [*FLAGS.split(), "20", "--decode.bleu_tokenize", "char"]  # of words none is right so soon


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    """The folder of a corpus of 13 pairs, and 5 to evaluate; no batch is full, no share equal."""
    folder = tmp_path_factory.mktemp("uneven")
    tiny_config.write_corpus(folder, train=13, validation=5)
    return folder


def as_flags_say(uneven: Path) -> Config:
    config = changed(tiny_config.get_config(str(uneven)), "data", vocab_size=285)
    config = changed(config, "decode", bleu_tokenize="char")
    return changed(config, "train", steps=30, evaluate_every=20, checkpoint_every=20)


@pytest.mark.run
def test_two_processes_train_as_one_stop_together_and_one_goes_on(uneven, tmp_path):
    accident = Accident(process=1, call=24, number=signal.SIGTERM)
    ended = launch(uneven, tmp_path / "two[2]", 2, *FLAGS, accidents=[accident])
    assert [process.status for process in ended] == [143, 143], ended
    step = list(find_checkpoints(tmp_path / "two[2]" / "checkpoints"))[-1]
    assert 23 <= step <= 26
    assert f"stopped at step {step}; the same command goes on" in ended[0].errors
    assert "step" not in ended[1].errors  # the second process is quiet
    assert read_meta(tmp_path / "two[2]" / "checkpoints" / str(step)).interim
    assert metrics(tmp_path / "two[2]")[-1]["step"] == step
    for workdir in (tmp_path / "two[2]", tmp_path / "one"):  # eight devices in this process
        assert loop.run(as_flags_say(uneven), workdir) == 0
    assert worst_difference(tmp_path / "one", tmp_path / "two[2]") < 1e-5
    evaluated = next(line for line in metrics(tmp_path / "two[2]") if "bleu" in line)  # by both
    assert evaluated["bleu"]["score"] > 0


@pytest.mark.run
def test_a_killed_process_ends_the_other_which_names_it(uneven, tmp_path):
    accident = Accident(process=1, call=3, number=signal.SIGKILL)
    ended = launch(uneven, tmp_path, 2, *FLAGS, accidents=[accident], silence=10)
    assert [process.status for process in ended] == [1, -signal.SIGKILL], ended
    assert "error: process 1 has died or hangs" in ended[0].errors


@pytest.mark.run
def test_a_mistake_ends_both_with_one_line_of_the_first(tmp_path):
    tiny_config.write_corpus(tmp_path, train=3, validation=2)
    (tmp_path / "train.de").unlink()
    ended = launch(tmp_path, tmp_path / "workdir", 2, *FLAGS)
    assert [process.status for process in ended] == [2, 2], ended
    assert ended[0].errors.count("error: ") == 1
    assert "train.de: No such file" in ended[0].errors.splitlines()[-1]
    assert all(line.startswith("process 1: waiting") for line in ended[1].errors.splitlines())


@pytest.mark.parametrize(
    ("silent", "failed", "since", "expected"),
    [
        ([0, 59, 59], {}, None, None),
        ([0, 61, 1], {}, None, (1, True, "process 1 has died or hangs: no sign of life for 61")),
        ([0, 61, 70], {}, None, (1, True, "process 1 has .* seconds; process 2 has .* 70 seconds")),
        ([0, 1, 1], {0: ["bad file", 2]}, 1, None),  # others may have found the same
        ([0, 1, 1], {0: ["bad file", 2]}, 3, (2, False, "^bad file$")),
        ([0, 1, 1], {0: ["bad file", 2], 1: ["bad file", 2]}, 3, (2, False, "^bad file$")),
        ([0, 1, 1], {2: ["no memory", 1], 1: ["lost", 1]}, 3, (1, False, "^process 1: lost$")),
        ([0, 5, 1], {0: ["lost", 1]}, 3, None),  # process 1 may be the reason
        ([0, 16, 1], {0: ["lost", 1]}, 14, (1, True, "^process 1 has died or hangs")),
        ([0, 1, 1], {0: [None, 130]}, 3, (130, False, None)),
    ],
)
def test_how_a_run_ends_follows_from_who_failed_and_who_is_silent(silent, failed, since, expected):
    seconds = {process: float(value) for process, value in enumerate(silent)}
    verdict = failures.verdict_of(seconds, failed, None if since is None else float(since))
    if expected is None:
        assert verdict is None
        return
    assert verdict is not None and (verdict.status, bool(verdict.missing)) == expected[:2]
    if expected[2] is None:
        assert verdict.message is None
    else:
        assert verdict.message is not None
        assert re.search(expected[2], verdict.message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("process 0", "belong together: give all three or none"),
        ("coordinator localhost:1 processes 2", "belong together"),
        ("coordinator localhost:1 processes 2 process 2", "it must be from 0 to 1"),
        (
            "coordinator localhost processes 2 process 0",
            "coordinator is localhost: it must be HOST",
        ),
        ("coordinator localhost:x processes 2 process 0", "localhost:x: it must be HOST:PORT"),
        ("coordinator localhost:1 processes none process 0", "'none' is no whole number above 0"),
        ("coordinator localhost:1 processes 2 process -1", "'-1' is no whole number"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(uneven, tmp_path, capfd, flags, message):
    given = [
        f"--distributed.{word}" if word in ("coordinator", "processes", "process") else word
        for word in flags.split()
    ]
    config = f"{tiny_config.__file__}:{uneven}"
    assert cli.main(["train", "--config", config, "--workdir", str(tmp_path / "w"), *given]) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1 and message in errors


def test_a_process_that_waits_in_vain_says_for_whom_and_gives_up(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.1)
    where = f"127.0.0.1:{free_port()}"
    text = f"process 1: waiting for process 0 at {where}: Connection refused"
    with pytest.raises(TimeoutError, match=f"gave up after 0 seconds: {text}"):
        processes.initialize(where, 2, 1)
    text = f"waiting for the other processes at {where}: 1 of 3 have come, missing: 1, 2"
    with pytest.raises(TimeoutError, match=f"gave up after 0 seconds: {text}"):
        processes.initialize(where, 3, 0)
    assert capfd.readouterr().err.count("waiting for") == 2
    taken = socket.create_server(("", 0))
    where = f"127.0.0.1:{taken.getsockname()[1]}"
    with taken, pytest.raises(UserError, match=f"process 0 cannot listen at {where}: Address alr"):
        processes.initialize(where, 2, 0)


def test_all_come_in_any_order_and_again_and_nobody_goes_before(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "REPEAT", 0.0)
    where, gone = f"127.0.0.1:{free_port()}", []

    def come(process: int) -> None:
        rendezvous.come(where, process)
        gone.append(process)

    def start(work, *arguments) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    def until_said(text: str) -> None:
        said = ""
        while text not in said:
            said += capfd.readouterr().err
            time.sleep(0.02)

    early = start(come, 2)
    until_said("process 2: waiting for process 0")
    first = start(rendezvous.gather, where, 3)
    until_said("2 of 3 have come, missing: 1")
    with socket.create_connection(rendezvous.address_of(where)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\n")
        cut = socket.create_connection(rendezvous.address_of(where))
        cut.sendall(rendezvous.HELLO + b"2\n")  # a second process 2 takes the place of the first
        cut.close()
    until_said("process 2: waiting for process 0 at")
    assert gone == []
    late = start(come, 1)
    first.join()
    with socket.create_server(rendezvous.address_of(where)) as service:  # that of JAX
        late.join()
        assert 1 in gone
        service.settimeout(0.1)
        while early.is_alive():  # the first process 2, which must not wait beyond this test
            with contextlib.suppress(TimeoutError, OSError), service.accept()[0] as guest:
                guest.sendall(rendezvous.GO)


def test_a_relay_passes_bytes_on_and_says_which_side_broke_the_connection():
    lost = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = rendezvous.relay(f"127.0.0.1:{server.getsockname()[1]}", lost.release)

        def connected() -> tuple[socket.socket, socket.socket]:
            client = socket.create_connection(rendezvous.address_of(here))
            return client, server.accept()[0]

        client, served = connected()
        client.sendall(b"question")
        assert served.recv(64) == b"question"
        served.sendall(b"answer")
        assert client.recv(64) == b"answer"
        client.close()  # as JAX does at its end
        assert served.recv(64) == b""
        served.close()
        assert not lost.acquire(timeout=0.3)
        client, served = connected()
        served.close()
        assert lost.acquire(timeout=30)
        assert client.recv(64) == b""
        client.close()


@pytest.mark.run
def test_when_process_0_is_killed_the_other_names_it_in_its_last_line(uneven, tmp_path):
    accident = Accident(process=0, call=3, number=signal.SIGKILL)
    ended = launch(uneven, tmp_path, 2, *FLAGS, accidents=[accident], silence=60)
    assert [process.status for process in ended] == [-signal.SIGKILL, 1], ended
    assert ended[1].errors.splitlines()[-1] == "error: process 0 has died: its connection broke"


@pytest.mark.parametrize(("tasks", "expected"), [(None, False), ("1", False), ("2", True)])
def test_a_cluster_is_one_of_slurm_with_more_than_one_task(monkeypatch, tasks, expected):
    if tasks is not None:
        values = {"JOB_ID": "1", "STEP_NODELIST": "node[7,9]", "PROCID": "1", "LOCALID": "0"}
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("SLURM_NTASKS", tasks)
    joined = []
    monkeypatch.setattr(processes, "_join", lambda *where: joined.append(where))
    processes.initialize(None, None, None)
    assert joined == ([("node7:61441", 2, 1)] if expected else [])


def test_one_process_waits_for_nobody():
    assert exchange() == {} and exchange("a") == {0: "a"}
    assert on_first(lambda: (1, 2)) == (1, 2)
    assert broadcast(lambda: {"score": 0.1}) == {"score": 0.1}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_the_rows_of_all_processes_make_the_batch(tiny, tmp_path, mesh):
    made = make_mesh(changed(tiny, "mesh", **mesh).mesh)
    np.testing.assert_array_equal(rows_here(made, 16), np.arange(16))
    claim(tmp_path, tiny)
    data = prepare_data(tiny, tmp_path)
    for step in range(data.plan.batches_per_epoch):  # one of them is not full
        place = data.plan, data.train, 0, step
        whole = assemble(*place)
        for p in range(3):
            part = assemble(*place, lambda rows, p=p: np.arange(p, rows, 3))
            for side in range(2):
                np.testing.assert_array_equal(part[side], whole[side][p::3])
    assert isinstance(place_rows(made, whole).source, jax.Array)


@pytest.mark.parametrize(
    ("missing", "printed"), [([], "traceback\nerror: what\n"), ([0], "error: what\n")]
)
def test_a_process_tells_its_bug_unless_that_follows_from_the_end_of_another(
    monkeypatch, capsys, missing, printed
):
    watch = object.__new__(failures.Watch)
    watch._traceback = "traceback\n"
    monkeypatch.setattr(failures, "leave", lambda: None)
    monkeypatch.setattr(failures.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        watch._leave(failures.Verdict("what", 3, missing))
    assert (ended.value.code, capsys.readouterr().err) == (3, printed)

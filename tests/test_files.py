"""A file is replaced as a whole or left as it was, and one process at a time holds a lock."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flaxformer_min.system.files import locked, naming, replace_file


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "a"
    for content in (b"first", b""):
        replace_file(path, content)
        assert (path.read_bytes(), list(tmp_path.iterdir())) == (content, [path])


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a"
    replace_file(path, b"old")
    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        replace_file(path, b"new")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_an_error_that_names_its_file_keeps_the_name(tmp_path):
    with pytest.raises(FileNotFoundError) as error, naming(tmp_path):
        (tmp_path / "missing").read_bytes()
    assert error.value.filename == str(tmp_path / "missing")


HOLD = """
import pathlib, sys
from flaxformer_min.system.files import locked
with locked(pathlib.Path(sys.argv[1]), wait=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_held_against_others_until_its_process_is_killed(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
        threading.Timer(0.2, process.kill).start()
        with locked(path, wait=True):
            assert process.wait() == -signal.SIGKILL
    with locked(path, wait=False):
        pass


def test_a_file_that_is_locked_keeps_its_content(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"content")
    with locked(path, wait=False):
        assert path.read_bytes() == b"content"


def test_a_lock_whose_file_its_holder_removed_is_not_held(tmp_path, monkeypatch):
    """Otherwise another process could hold that of a new file of the same name."""
    path = tmp_path / "a"
    for makes_anew in (False, True):

        def removed_meanwhile(*_, makes_anew=makes_anew):
            path.unlink()
            if makes_anew:
                (tmp_path / "b").touch()
                (tmp_path / "b").rename(path)

        monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
        with pytest.raises(BlockingIOError, match=str(path)), locked(path, wait=True):
            pass

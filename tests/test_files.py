"""A file is replaced as a whole or left as it was, and one process at a time holds a lock."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flaxformer_min.system.files import flush, locked, naming, replace_file


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


def test_a_lock_is_held_against_others_until_its_process_is_killed(tmp_path, capsys):
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
    said = f"waiting for another process, which holds {path}\n"
    assert capsys.readouterr().err == said
    with locked(path, wait=False):
        pass


@pytest.fixture
def without(monkeypatch):
    """Makes a function say that the file system does not have it."""

    def remove(module, name: str, error: int) -> None:
        def refuse(*_):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(module, name, refuse)

    return remove


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_file_system_that_cannot_flush_a_directory_is_put_up_with(tmp_path, without, error):
    without(os, "fsync", error)
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        replace_file(tmp_path / "a", b"x")  # a file has to be on the disk
    if error == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            flush(tmp_path)
    else:
        flush(tmp_path)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_without_locks_a_file_that_names_its_owner_keeps_others_out(tmp_path, without, error):
    without(fcntl, "flock", error)
    path, owner = tmp_path / "lock", tmp_path / "lock.owner"
    with locked(path, wait=False):
        assert owner.read_text() == f"{socket.gethostname()} {os.getpid()}"
        with (
            pytest.raises(OSError, match=rf"process {os.getpid()} of .* at work; .*: '{owner}'"),
            locked(path, wait=False),
        ):
            pass
        threading.Timer(0.2, owner.unlink).start()
        with locked(path, wait=True):
            pass
    assert not owner.exists()


@pytest.mark.parametrize("wait", [False, True])
def test_the_owner_file_of_a_killed_process_is_named_and_left(tmp_path, without, wait):
    without(fcntl, "flock", errno.ENOLCK)
    with subprocess.Popen(["true"]) as ended:
        pass
    owner = tmp_path / "lock.owner"
    owner.write_text(f"{socket.gethostname()} {ended.pid}")
    message = rf"process {ended.pid} of .* left this file; delete it: '{owner}'"
    with pytest.raises(OSError, match=message), locked(tmp_path / "lock", wait=wait):
        pass
    assert owner.exists()


def test_another_error_of_a_lock_is_not_taken_for_that(tmp_path, without):
    without(fcntl, "flock", errno.EIO)
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / "lock", wait=False):
        pass
    assert not (tmp_path / "lock.owner").exists()


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

"""A file is replaced as a whole, or left as it was with the error naming it."""

import errno
import os

import pytest

from flaxformer_min.system.files import naming, replace_file


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

"""Paths that a user gives, and what the user's mistakes are called."""

from pathlib import Path

import pytest

from flaxformer_min.errors import is_out_of_memory, local_path


@pytest.mark.parametrize(
    ("text", "path"),
    [("~", "{home}"), ("~/a b/~", "{home}/a b/~"), ("a/~/b", "a/~/b"), ("a:b", "a:b"), (".", ".")],
)
def test_a_path_has_the_home_folder_in_place_of_a_tilde(text, path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path(text) == path.format(home=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("gs://bucket/run", "gs://bucket/run is a URL"),
        ("S3://bucket", "is a URL"),
        ("file:///tmp/x", "is a URL"),
        ("runs/" + "x" * 256, "cannot be the name of a file; give a shorter path"),
        ("é" * 128, "cannot be the name of a file"),
        ("x/" * 2001, "cannot be the name of a file"),
        ("a\0b", "cannot be the name of a file"),
        ("~no-such-user/x", "there is no such user; a file of that name is ./~no-such-user/x"),
    ],
)
def test_what_is_no_path_here_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        local_path(text)


def test_too_little_memory_is_known_by_class_or_text():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3 bytes."))
    assert not is_out_of_memory(RuntimeError("INVALID_ARGUMENT: shapes"))
    assert not is_out_of_memory(OSError(28, "No space left on device", str(Path("x"))))

"""Every change to a checkpoint's bytes is noticed and laid to the file in which it is."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import saved

from flaxformer_min.checkpoints.format import META, read_config, read_meta
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.retention import newest_good
from flaxformer_min.errors import UserError
from flaxformer_min.system.sealed import (
    MANIFEST,
    CheckpointError,
    DeletedError,
    delete,
    publish,
    put_in_place,
    seal,
    unless_deleted,
    verify,
)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints 5 and 11; to be left as it is."""
    return saved(tmp_path_factory.mktemp("run"), 5, 11)


@pytest.fixture
def root(two_steps: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def every_file(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def reseal(folder: Path) -> None:
    """A manifest that agrees with the files, as another program could have written it."""
    (folder / "manifest.json").unlink()
    seal(folder)


def assert_named(root: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The damaged file of checkpoint 11 is named, and 5 is used."""
    with pytest.raises(CheckpointError, match=f"^{path}: damaged"):
        verify(root / "11")
    caplog.clear()
    assert newest_good(root) == 5
    assert [record.message.startswith(f"{path}: damaged") for record in caplog.records] == [True]


def test_a_flipped_bit_anywhere_is_noticed_and_its_file_named(root, caplog):
    draw = random.Random(1)
    files = [path for path in every_file(root / "11") if path.stat().st_size]
    assert len(files) > 10
    for path in [*files, *draw.choices(files, k=60)]:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        assert_named(root, path, caplog)
        path.write_bytes(content)
    verify(root / "11")


def test_any_flipped_bit_of_the_manifest_is_damage_and_never_another_format(root):
    path = root / "5" / "manifest.json"
    content = path.read_bytes()
    for place in range(content.index(b"format"), content.index(b"files")):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"^{path}: damaged: no manifest of format 2"):
                verify(root / "5")


def test_a_cut_an_emptied_and_a_lost_file_are_noticed_and_named(root, caplog):
    for path in every_file(root / "11"):
        content = path.read_bytes()
        for shorter in [content[:-1], content[: len(content) // 2], b""]:
            if shorter != content:
                path.write_bytes(shorter)
                assert_named(root, path, caplog)
        path.unlink()
        assert_named(root, path, caplog)
        path.write_bytes(content)
    verify(root / "11")


@pytest.mark.parametrize(
    "content",
    [
        "null",
        "[]",
        "7",
        '"text"',
        "{}",
        '{"format": 2, "files": {}}',
        '{"sha256": [], "format": 2, "files": {}}',
        "[" * 100_000,
        "{" * 9,
        "",
    ],
)
def test_a_manifest_of_another_kind_is_itself_the_damaged_file(root, content):
    path = root / "11" / "manifest.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: no manifest of format 2"):
        verify(path.parent)


def test_a_manifest_that_names_another_hash_is_itself_the_damaged_file(root):
    path = root / "11" / "manifest.json"
    content = json.loads(path.read_text())
    content["files"]["config.json"]["sha256"] = "0" * 64
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: no manifest"):
        verify(path.parent)


def test_another_format_version_is_named_and_refused(root, monkeypatch):
    monkeypatch.setattr("flaxformer_min.system.sealed.FORMAT", 3)
    reseal(root / "11")
    monkeypatch.undo()
    refusal = "11: checkpoint format 3; this program reads 2"
    with pytest.raises(UserError, match=refusal):
        load_for_inference(root.parent)
    with pytest.raises(UserError, match=refusal):
        newest_good(root)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", "5", "step is '5': it must be a whole number"),
        ("step", True, "step is True: it must be a whole number"),
        ("step", None, "step is None: it must be a whole number"),
        ("tokenizer_sha256", 7, "tokenizer_sha256 is 7: it must be a string"),
        ("evaluation", [1], r"evaluation is \[1\]: it must be a JSON object"),
        ("progress", None, "section progress is None: it must be a JSON object"),
        ("progress", {"best": 1}, "progress.best is no field of meta.json"),
        (
            "progress",
            {"best_score": "high", "best_step": 1, "evaluations_since": 0},
            "progress.best_score is 'high': it must be a number",
        ),
        ("interim", 0, "interim is 0: it must be True or False"),
        ("averaged_steps", "5", "averaged_steps is '5': it must be a list"),
        ("averaged_steps", ["5"], "averaged_steps is '5': it must be a whole number"),
        ("packages", [], r"packages is \[\]: it must be a JSON object"),
        ("best_score", 1, "best_score is no field of meta.json"),
        ("unknown", 1, "unknown is no field of meta.json"),
    ],
)
def test_meta_of_another_type_is_one_line_and_no_traceback(root, key, value, message):
    path = root / "11" / META
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    reseal(root / "11")
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: {message}[^\n]*$"):
        read_meta(root / "11")


def test_meta_without_a_step_is_damaged(root):
    path = root / "11" / META
    content = json.loads(path.read_text())
    del content["step"]
    path.write_text(json.dumps(content))
    reseal(root / "11")
    with pytest.raises(CheckpointError, match=f"^{path}: damaged: step is missing from meta.json$"):
        read_meta(root / "11")


def test_meta_config_tokenizer_and_arrays_of_another_kind_are_one_line(root):
    folder = root / "11"
    for name, content, error in (
        ("meta.json", b"[]", CheckpointError),
        ("meta.json", b"\xff", CheckpointError),
        ("config.json", b"\xff", UserError),
        ("config.json", b'{"model": 7}', UserError),
        ("tokenizer.model", b"none", UserError),
        ("arrays/params/manifest.ocdbt", b"none", CheckpointError),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        reseal(folder)
        with pytest.raises(error, match=rf"^{folder}/[^\n]+$") as caught:
            load_for_inference(folder)
        assert str(caught.value).startswith(f"{folder / name.split('/')[0]}")
        (folder / name).write_bytes(before)
    reseal(folder)
    assert read_config(folder) == load_for_inference(folder).config


# ---- Names


def test_deleting_is_one_step_after_which_nothing_counts(root, monkeypatch):
    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flaxformer_min.system.sealed.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete(root / "11")
    assert sorted(path.name for path in root.iterdir()) == ["11.deleted", "5"]
    assert newest_good(root) == 5
    shutil.copytree(root / "5", root / "11")
    delete(root / "11")  # also where an earlier deletion did not end
    delete(root / "11")  # or there is nothing
    assert [path.name for path in root.iterdir()] == ["5"]


def test_what_is_put_in_place_replaces_what_had_the_name(root):
    content = (root / "11" / "meta.json").read_bytes()
    (root / "11").rename(root / "5.partial")
    put_in_place(root / "5")
    assert [path.name for path in root.iterdir()] == ["5"]
    assert (root / "5" / "meta.json").read_bytes() == content


def test_a_published_directory_is_sealed_and_replaces_what_had_its_name(tmp_path):
    for content in ("old", "new"):
        with publish(tmp_path / "a") as new:
            assert list(new.iterdir()) == []
            (new / "file").write_text(content)
            assert [path.name for path in tmp_path.iterdir() if path == new] == ["a.partial"]
        verify(tmp_path / "a")
        assert (tmp_path / "a" / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_directory_that_is_not_finished_is_not_published_and_leaves_nothing(tmp_path, error):
    with publish(tmp_path / "a") as new:
        (new / "file").write_text("old")
    with pytest.raises(error), publish(tmp_path / "a") as new:
        (new / "file").write_text("new")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "old"


def test_what_a_killed_writer_left_is_not_in_what_is_published(tmp_path):
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "half").write_text("")
    with publish(tmp_path / "a") as new:
        (new / "file").write_text("whole")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["file", "manifest.json"]


# ---- Links


def put(kind: str, path: Path, target: Path) -> None:
    """Makes a link to a directory with a file, a link to nothing, or a file."""
    if kind == "file":
        path.write_text("")
        return
    if kind == "link":
        target.mkdir()
        (target / "kept").write_text("kept")
    path.symlink_to(target)


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
@pytest.mark.parametrize("name", ["a", "a.partial", "a.deleted"])
def test_of_a_link_in_the_way_the_link_is_deleted_and_not_its_target(tmp_path, kind, name):
    put(kind, tmp_path / name, tmp_path / "target")
    for content in ("old", "new"):
        with publish(tmp_path / "a") as new:
            (new / "file").write_text(content)
    verify(tmp_path / "a")
    assert (tmp_path / "a" / "file").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()
    assert [path.name for path in tmp_path.iterdir() if path.name != "target"] == ["a"]
    assert kind != "link" or (tmp_path / "target" / "kept").read_text() == "kept"


def test_a_link_to_what_is_not_there_is_called_so(root, tmp_path):
    (root / "17").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=f"17: is a link to {tmp_path}/unmounted, which is n"):
        verify(root / "17")


# ---- What is damage, and what is not


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        (errno.EIO, True),
        (errno.ENOENT, True),
        (errno.EISDIR, True),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.EACCES, False),
        (errno.EPERM, False),
        (errno.ENOMEM, False),
        (errno.EINTR, False),
        (errno.ESTALE, False),
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.model"])
def test_only_what_is_damaged_is_called_so(root, monkeypatch, caplog, name, number, damage):
    path = root / "11" / name

    def failing(self, mode="r", *rest, opened=Path.open, **others):
        if self == path:
            raise OSError(number, os.strerror(number))  # without a name, as a failed read is
        return opened(self, mode, *rest, **others)

    monkeypatch.setattr(Path, "open", failing)
    if damage:
        assert_named(root, path, caplog)
        return
    for read in (newest_good, lambda root: load_for_inference(root / "11")):
        with pytest.raises(OSError, match=f"{os.strerror(number)}: '{path}'") as caught:
            read(root)
        assert "damaged:" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_an_error_in_reading_what_has_been_deleted_says_so(tmp_path, how):
    folder, deleted = tmp_path / "5", f"^{tmp_path}/5: was deleted while it was being read"
    folder.mkdir()
    (tmp_path / "new").mkdir()
    with pytest.raises(DeletedError, match=deleted), unless_deleted(folder):
        folder.rename(tmp_path / "5.deleted")
        if how == "replaced":
            (tmp_path / "new").rename(folder)
        raise CheckpointError("damaged")
    folder.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=r"^damaged$"), unless_deleted(folder):
        raise CheckpointError("damaged")
    with pytest.raises(DeletedError), unless_deleted(tmp_path / "never"):
        pass


def test_every_file_is_on_the_disk_before_the_manifest_gets_its_name(tmp_path, monkeypatch):
    for name in ("a", "b/c", "b/d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    events, fsync, replace = [], os.fsync, os.replace

    def flushed(number):
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def replaced(source, target):
        events.append(f"-> {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    seal(tmp_path)
    named = events.index(f"-> {tmp_path / MANIFEST}")
    before = {str(tmp_path / name) for name in ("a", "b", "b/c", "b/d", ".")}
    assert before <= set(events[:named]) and str(tmp_path.parent) in events[:named]
    assert str(tmp_path) in events[named:]


def test_a_manifest_says_the_same_in_any_order(tmp_path):
    with publish(tmp_path / "a") as new:
        for name in ("b", "c", "d"):
            (new / name).write_text(name)
    path = tmp_path / "a" / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] = dict(reversed(manifest["files"].items()))
    path.write_text(json.dumps(dict(reversed(manifest.items()))))
    verify(tmp_path / "a")


def test_what_cannot_be_discarded_does_not_hide_the_error_that_matters(tmp_path, monkeypatch):
    def failing(folder):
        raise OSError("cannot be deleted")

    with pytest.raises(ValueError, match="matters"), publish(tmp_path / "a"):
        monkeypatch.setattr("flaxformer_min.system.sealed.delete", failing)
        raise ValueError("this matters")

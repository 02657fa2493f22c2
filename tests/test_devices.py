"""Before the first use of JAX: where compiled programs are kept, and what is said of no device."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tiny_checkpoints import make_state, opened

from flaxformer_min import cli
from flaxformer_min.errors import UserError
from flaxformer_min.system import devices
from flaxformer_min.training import loop
from tools import tiny_config

ROOT = Path(__file__).parent.parent
SETTING = "jax_compilation_cache_dir"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home of its own, and a JAX that has no cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    before = jax.config.values[SETTING]
    jax.config.update(SETTING, None)
    yield tmp_path
    jax.config.update(SETTING, before)


def test_programs_are_kept_in_a_folder_that_only_its_owner_can_open(home):
    devices.keep_programs()
    folder = home / ".cache" / "flaxformer_min" / "compiled"
    assert jax.config.values[SETTING] == str(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]


@pytest.mark.parametrize(("value", "parent"), [("{home}/xdg", "xdg"), ("xdg", ".cache")])
def test_the_folder_follows_an_absolute_xdg_cache_home(home, monkeypatch, value, parent):
    monkeypatch.setenv("XDG_CACHE_HOME", value.format(home=home))
    devices.keep_programs()
    assert jax.config.values[SETTING] == str(home / parent / "flaxformer_min" / "compiled")


def test_a_cache_that_the_users_program_has_chosen_stays(home):
    jax.config.update(SETTING, str(home / "chosen"))
    devices.keep_programs()
    assert jax.config.values[SETTING] == str(home / "chosen")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("which", ["flaxformer_min", "flaxformer_min/compiled"])
@pytest.mark.parametrize("problem", ["group", "others", "owner"])
def test_a_folder_that_others_can_write_to_is_not_used(home, monkeypatch, caplog, which, problem):
    devices.keep_programs()
    jax.config.update(SETTING, None)
    open_to_all = home / ".cache" / which
    if problem == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(open_to_all, 12345, -1)
    else:
        open_to_all.chmod({"group": 0o770, "others": 0o702}[problem])
    devices.keep_programs()
    assert jax.config.values[SETTING] is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{open_to_all}: others can write to it, so compiled programs are not kept there"
    ]


@pytest.mark.parametrize("obstacle", ["file", "no home"])
def test_a_home_that_cannot_be_written_is_passed_over_in_silence(
    home, monkeypatch, caplog, obstacle
):
    if obstacle == "file":
        (home / ".cache").touch()
    else:
        monkeypatch.setattr(Path, "home", lambda: Path("~none").expanduser())  # a RuntimeError
    devices.keep_programs()
    assert jax.config.values[SETTING] is None and not caplog.records


def test_the_oldest_programs_go_when_there_are_too_many(home, monkeypatch):
    devices.keep_programs()
    folder = Path(jax.config.values[SETTING])
    for age, size in enumerate((5, 7, 11, 2)):  # program 0 is the newest
        path = folder / f"{age}-cache"
        path.write_bytes(b"x" * size)
        os.utime(path, (1000 - age, 1000 - age))
    (folder / "other").touch()
    monkeypatch.setattr(devices, "CACHE_SIZE", 13)
    jax.config.update(SETTING, None)
    devices.keep_programs()
    assert sorted(path.name for path in folder.iterdir()) == ["0-cache", "1-cache", "other"]


def test_the_command_line_computes_in_float32_whatever_the_environment_says():
    code = (
        "from flaxformer_min import cli; cli.main([]); import jax; print(jax.numpy.ones(1).dtype)"
    )
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "float32\n"


def test_a_state_of_a_run_in_float64_is_refused_with_the_cause(tmp_path):
    with jax.enable_x64(True), opened(tmp_path) as checkpoints:
        double = jax.tree.map(lambda x: x.astype("f8") if x.dtype == "f4" else x, make_state(3))
        checkpoints.save(double, 3)
    message = "float64.* there and float32.* here; it was trained with JAX_ENABLE_X64"
    with opened(tmp_path) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.restore(3, make_state(3))


def test_training_in_a_process_of_float64_is_refused(tiny, tmp_path):
    with jax.enable_x64(True), pytest.raises(UserError, match="JAX_ENABLE_X64 is on, and tr"):
        loop.run(tiny, tmp_path / "w")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(("chips", "given"), [(0, None), (0, "mine"), (4, None)])
def test_libtpu_is_told_of_one_chip_only_where_there_is_none(monkeypatch, chips, given):
    names = ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
    monkeypatch.setattr(os, "environ", dict.fromkeys(names, given) if given else {})
    monkeypatch.setattr(
        devices.hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (chips, None)
    )
    devices.quiet_libtpu()
    expected = ("localhost", "v5litepod-1") if chips == 0 else (None, None)
    assert tuple(map(os.environ.get, names)) == ((given, given) if given else expected)


FORK = """
import os, sys
from flaxformer_min.decoding.translator import Translator
translator = Translator.load(sys.argv[1])
translator.translate(["now"])
calls = translator.translate, translator.score, lambda _: Translator.load(sys.argv[1])
refused = 0
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for call in calls:
    try:
        call([("now", "jetzt")] if call == translator.score else ["now"])
    except RuntimeError as error:
        refused += "load the Translator in each worker" in str(error)
os._exit(refused)
"""


@pytest.mark.run
def test_a_translator_is_refused_in_a_forked_process_and_does_not_hang(finished):
    command = [sys.executable, "-c", FORK, str(finished)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode == 3


@pytest.mark.run
@pytest.mark.parametrize("platforms", ["cuda", "tpu", "nonsense"])
def test_a_platform_that_is_not_there_is_one_line_that_names_the_variable(platforms):
    code = "from flaxformer_min.system import devices; devices.start()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": platforms},
        capture_output=True,
        text=True,
    )
    *_, last = done.stderr.splitlines()
    assert last.startswith(
        f"flaxformer_min.errors.UserError: JAX_PLATFORMS is {platforms}, but JAX finds no such"
    )
    assert last.endswith("; unset it, or set it to cpu")


@pytest.mark.parametrize("verb", ["train", "translate", "score", "evaluate", "average"])
def test_every_verb_looks_for_its_devices_before_it_reads(verb, tmp_path, monkeypatch, capfd):
    def none() -> list:
        raise RuntimeError("no device")

    monkeypatch.setattr(jax, "local_devices", none)
    (tmp_path / "lines").write_text("a\n")
    files = [["--source", "--target"], ["--source", "--reference"]][verb == "evaluate"]
    flags = {
        "train": ["--config", tiny_config.__file__ + ":x", "--workdir", tmp_path / "w"],
        "translate": [tmp_path],
        "average": [tmp_path, "--output", tmp_path / "a"],
    }.get(verb, [tmp_path, files[0], tmp_path / "lines", files[1], tmp_path / "lines"])
    assert cli.main([verb, *map(str, flags)]) == 2
    assert capfd.readouterr().err == (
        "error: JAX_PLATFORMS is cpu, but JAX finds no such device here: no device; "
        "unset it, or set it to cpu\n"
    )


@pytest.mark.run
def test_what_translate_compiles_lies_in_the_users_cache_and_not_with_the_weights(
    finished, tmp_path
):
    def files(folder: Path) -> set[Path]:
        return {path for path in folder.rglob("*") if path.is_file()}

    before = files(finished)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, "-m", "flaxformer_min", "translate", str(finished)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=b"now\n", capture_output=True, check=True
    )
    assert done.stderr == b""
    assert any(path.name.endswith("-cache") for path in files(tmp_path))
    assert files(finished) == before

"""Which checkpoints a directory holds, which is used, and which are kept."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_checkpoints import CONFIG, TOKENIZER, flip_a_bit, make_state, names, opened, saved
from trees import assert_same_bits

from flaxformer_min.checkpoints import format as checkpoint_format
from flaxformer_min.checkpoints import load
from flaxformer_min.checkpoints import store as checkpoint
from flaxformer_min.checkpoints.average import average
from flaxformer_min.checkpoints.format import Meta, read_meta
from flaxformer_min.checkpoints.load import load_for_inference
from flaxformer_min.checkpoints.progress import Progress
from flaxformer_min.checkpoints.retention import (
    best_steps,
    find_checkpoints,
    kept_steps,
    newest_good,
    scores_of,
    tidy,
)
from flaxformer_min.checkpoints.store import Checkpoints
from flaxformer_min.config_rules import config_to_json
from flaxformer_min.errors import UserError
from flaxformer_min.system import sealed
from flaxformer_min.system.sealed import CheckpointError


@pytest.mark.parametrize(
    ("scores", "interim", "last", "best", "kept"),
    [
        ({900: 1.0, 1000: 9.0, 10000: 3.0}, (), 1, 1, {1000, 10000}),  # by number, not as text
        ({1: 30.0, 2: 20.0, 3: 10.0, 4: 5.0}, (), 2, 1, {1, 3, 4}),  # scores only get worse
        ({1: 30.0, 2: 20.0, 3: 10.0, 4: 5.0}, (), 1, 2, {1, 2, 4}),
        ({1: 30.0, 2: None, 3: None}, (), 1, 1, {1, 3}),  # not every step is evaluated
        ({1: None, 2: None, 3: None}, (), 2, 3, {2, 3}),
        ({1: 5.0, 2: 5.0, 3: 1.0}, (), 1, 1, {1, 3}),  # equal scores: the earlier
        ({1: 5.0, 2: 5.0, 3: 5.0, 4: 5.0}, (), 1, 2, {1, 2, 4}),
        ({1: -9.0, 2: -float("inf"), 3: -float("inf")}, (), 1, 1, {1, 3}),
        ({1: 5.0, 2: 4.0}, (), 1, 0, {2}),
        ({1: None, 2: None, 3: None}, (3,), 1, 0, {2, 3}),  # an interim one takes no place
        ({1: None, 2: None, 3: None}, (2,), 2, 0, {1, 3}),  # and goes when a newer is there
        ({1: None, 2: None, 3: None, 4: None}, (2, 3), 1, 0, {4}),
        ({1: 5.0, 2: 9.0, 3: 1.0}, (2,), 1, 1, {1, 3}),  # nor is it ever the best
        ({1: None}, (1,), 1, 1, {1}),  # nothing else is there
        ({2: None, 5: None}, (2, 5), 3, 1, {5}),
    ],
)
def test_the_newest_and_the_best_regular_ones_are_kept_and_the_newest_of_all(
    scores, interim, last, best, kept
):
    assert kept_steps(scores, interim, last, best) == kept


def test_the_best_have_a_score_and_come_best_first():
    assert best_steps({2: 30.0, 7: 10.0, 9: 30.0, 11: None}, 5) == [2, 9, 7]
    assert best_steps({2: 30.0, 7: 10.0, 9: 30.0, 11: None}, 1) == [2]


def bleu(value: float) -> dict:
    return {"bleu": {"score": value}, "validation_loss": value}


@pytest.mark.run
def test_retention_keeps_the_best_and_the_last_when_scores_only_get_worse(tmp_path):
    with opened(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        for step, value in ((2, 30.0), (3, None), (5, 20.0), (7, 10.0), (11, None)):
            evaluation = None if value is None else bleu(value)
            checkpoints.save(make_state(step), step, evaluation=evaluation)
            checkpoints.wait()
            assert step in checkpoints.steps()
        assert checkpoints.steps() == [2, 7, 11]


@pytest.mark.run
def test_an_interim_checkpoint_is_gone_as_soon_as_a_newer_one_is_there(tmp_path):
    with opened(tmp_path, keep_last=2, keep_best=0) as checkpoints:
        for step, interim, there in (
            (2, False, [2]),
            (4, False, [2, 4]),
            (5, True, [2, 4, 5]),
            (6, False, [4, 6]),
            (7, True, [4, 6, 7]),
            (9, True, [4, 6, 9]),
            (9, False, [6, 9]),  # the same step, reached again as a regular one
        ):
            checkpoints.save(make_state(step), step, interim=interim)
            checkpoints.wait()
            assert checkpoints.steps() == there
            assert checkpoints.latest_good() == step


@pytest.mark.run
@pytest.mark.parametrize(("metric", "best"), [("bleu", 7), ("loss", 3)])
def test_the_best_is_the_best_by_the_metric_of_the_config(tmp_path, metric, best):
    with opened(tmp_path, keep_last=1, keep_best=1, best_metric=metric) as checkpoints:
        for step, value in ((3, 20.5), (7, 31.25), (9, 30.0), (10, 30.5)):
            checkpoints.save(make_state(step), step, evaluation=bleu(value))
        checkpoints.wait()
        assert checkpoints.steps() == [best, 10]
    assert load_for_inference(tmp_path, "best").step == best


@pytest.mark.parametrize(
    ("measures", "expected"),
    [
        ({3: "a", 7: "a", 9: "a"}, {3: 30.0, 7: 20.0, 9: 10.0, 11: None}),
        ({3: "a", 7: "b", 9: "b"}, {3: None, 7: 20.0, 9: 10.0, 11: None}),
        ({3: None, 7: "b", 9: "b"}, {3: 30.0, 7: 20.0, 9: 10.0, 11: None}),  # an older version's
    ],
)
def test_only_what_was_measured_as_the_newest_evaluation_has_a_score(measures, expected):
    scores = {3: 30.0, 7: 20.0, 9: 10.0}
    metas = {
        step: Meta(
            step=step,
            tokenizer_sha256="",
            evaluation=bleu(scores[step]) if step in scores else None,
            progress=Progress(measure=measures.get(step, "c")),
        )
        for step in expected
    }
    assert scores_of(metas, "bleu") == expected


def test_evaluation_and_progress_come_back_as_they_were_saved(tmp_path):
    progress = Progress(0.1 + 0.2, 5, 3)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(make_state(7), 7, evaluation=bleu(1 / 3), progress=progress)
        checkpoints.save(make_state(8), 8, interim=True)
    with opened(tmp_path) as checkpoints:
        seven, eight = checkpoints.meta(7), checkpoints.meta(8)
        assert (seven.evaluation, seven.progress, seven.interim) == (bleu(1 / 3), progress, False)
        assert (eight.evaluation, eight.progress, eight.interim) == (None, Progress(), True)
        with pytest.raises(UserError, match=r"no checkpoint of step 9; steps there: \[7, 8\]"):
            checkpoints.meta(9)


# ---- Damage


@pytest.mark.run
def test_the_newest_good_checkpoint_is_used_instead_of_damaged_ones(tmp_path, caplog):
    root = saved(tmp_path, 5, 11, 17)
    files = [next((root / "11" / "arrays" / "params" / "d").iterdir()), root / "17" / "meta.json"]
    for path in files:
        flip_a_bit(path)
    assert load_for_inference(tmp_path).step == 5
    assert [record.message.split(":")[0] for record in caplog.records] == [
        str(files[1]),
        str(files[0]),
    ]
    with pytest.raises(CheckpointError, match=f"^{files[0]}: damaged"):
        load_for_inference(tmp_path, 11)
    with opened(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.latest_good() == 5
        with pytest.raises(CheckpointError, match=f"^{files[0]}: damaged"):
            checkpoints.restore(11, make_state(11))
        checkpoints.save(make_state(8), 8)  # keep_last=1 must not keep a damaged one in its stead
        checkpoints.wait()
        assert (checkpoints.latest_good(), checkpoints.steps()) == (8, [8, 11, 17])
        checkpoints.save(make_state(11), 11)
        checkpoints.wait()
        assert (checkpoints.latest_good(), checkpoints.steps()) == (11, [11, 17])


def test_when_every_checkpoint_is_damaged_nothing_is_used_and_nothing_removed(tmp_path):
    root = saved(tmp_path, 5, 11)
    flip_a_bit(root / "5" / "tokenizer.model")
    (root / "11" / "manifest.json").unlink()
    with opened(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"no good checkpoint; damaged: \[5, 11\]"):
            checkpoints.latest_good()
        assert checkpoints.steps() == [5, 11]
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        load_for_inference(tmp_path)


def test_a_lost_manifest_is_damage_that_is_named_and_neither_kept_nor_counted(tmp_path, caplog):
    root = saved(tmp_path, 5, 11)
    (root / "11" / "manifest.json").unlink()
    with opened(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.latest_good() == 5
        assert caplog.records[0].message.startswith(f"{root / '11' / 'manifest.json'}: damaged")
        (root / "29").mkdir()  # later than latest_good looked
        checkpoints.save(make_state(8), 8)
        checkpoints.wait()
        assert names(tmp_path) == ["11", "29", "8"]


# ---- What an interrupted run leaves


def test_a_start_removes_what_is_half_written_or_half_deleted_and_nothing_else(tmp_path):
    root = saved(tmp_path, 5, 11)
    for name in ("17.partial", "5.partial", "11.deleted", "3.partial.deleted"):
        shutil.copytree(root / "11", root / name)
        (root / name / "manifest.json").unlink()
    others = ["notes", "7.partial.txt", "017.partial", "best.partial"]
    for name in others:
        (root / name).mkdir()
    assert list(find_checkpoints(root)) == [5, 11]
    assert load_for_inference(tmp_path).step == 11
    with pytest.raises(UserError, match=r"no checkpoint of step 17; steps there: \[5, 11\]"):
        load_for_inference(tmp_path, 17)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest_good() == 11
    assert names(tmp_path) == sorted(["5", "11", *others])


@pytest.mark.run
@pytest.mark.parametrize("older", [False, True])
def test_a_sealed_partial_counts_and_a_start_gives_it_its_name(tmp_path, older):
    root = saved(tmp_path, 5, 11)
    shutil.copytree(root / "11", root / "17.partial")
    if older:
        shutil.copytree(root / "5", root / "17")
    for _ in range(2):
        assert list(find_checkpoints(root)) == [5, 11, 17]
        assert (load_for_inference(tmp_path, 17).params["bias"] == make_state(11).params["bias"])[0]
        assert load_for_inference(tmp_path, 17).step == 11  # what is in it, not the older one
        tidy(root)
    assert names(tmp_path) == ["11", "17", "5"]


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    assert newest_good(tmp_path) is None
    with opened(tmp_path) as checkpoints:
        assert (checkpoints.latest_good(), checkpoints.steps()) == (None, [])


# ---- Space


@pytest.mark.parametrize(
    ("train", "there", "count"),
    [
        ({"keep_last": 3, "keep_best": 2}, 0, 7),  # 3 + 2, one of a stop, one being written
        ({"keep_last": 3, "keep_best": 2}, 2, 5),
        ({"keep_last": 1, "keep_best": 0}, 3, 1),  # the next is written before others go
        ({"keep_last": 9, "keep_best": 9, "steps": 50, "checkpoint_every": 20}, 0, 4),
    ],
)
def test_the_space_that_is_asked_for_is_that_of_the_checkpoints_to_come(
    tmp_path, monkeypatch, train, there, count
):
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))
    for step in range(there):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    state = make_state(1)  # 179 parameters and twice as many moments, and three counters
    one = 4 * (3 * (16 * 5 + 2 * 8 * 2 * 3 + 3) + 3) + len(TOKENIZER.model_bytes) + 1_000_000
    free = [count * one]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    with Checkpoints(tmp_path, config, TOKENIZER) as checkpoints:
        checkpoints.require_space(state)
        free[0] -= 1
        with pytest.raises(UserError, match=rf"MB are free and [0-9.]+ MB needed, for {count} ch"):
            checkpoints.require_space(state)


def test_the_refusal_for_lack_of_space_names_both_numbers_and_the_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=2_345))
    state = {"w": SimpleNamespace(size=500_000_000, dtype=make_state(1).step.dtype)}
    with (
        opened(tmp_path, keep_last=3, keep_best=1) as checkpoints,
        pytest.raises(
            UserError,
            match=r"/checkpoints: 2\.345 kB are free and 12\.01 GB needed, for 6 checkpoints: "
            r"free some space, or lower train\.keep_last \(3\) or train\.keep_best \(1\)",
        ),
    ):
        checkpoints.require_space(state)


def test_a_folder_of_a_disk_says_what_is_free(tmp_path: Path):
    with opened(tmp_path) as checkpoints:
        state = make_state(1)
        checkpoints.require_space(state)  # the real disk has 13 MB
        with pytest.raises(UserError, match=r"are free and .* needed"):
            checkpoints.require_space({"w": SimpleNamespace(size=10**18, dtype=state.step.dtype)})


# ---- What is no state of the run


@pytest.fixture
def strangers(tmp_path) -> dict[str, str]:
    """A workdir with the steps 5 and 11 and, beside them, strangers: name and what is said."""
    root = saved(tmp_path / "run", 5, 11)
    (tmp_path / "run" / "config.json").write_text(config_to_json(CONFIG))
    average(tmp_path / "run", tmp_path / "mean", last=2)
    shutil.copytree(tmp_path / "mean", root / "30")
    shutil.copytree(root / "11", root / "31")
    other = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seed=2))
    with Checkpoints(tmp_path / "other", other, TOKENIZER) as checkpoints:
        checkpoints.save(make_state(32), 32, evaluation=bleu(99.0))
    shutil.copytree(tmp_path / "other" / "checkpoints" / "32", root / "32")
    (root / "33").write_text("a file")
    for name in ("030", "30 copy"):
        shutil.copytree(root / "11", root / name)
    (root / ".hidden").write_text("")
    return {
        "30": "is an average; passed by, until this run saves step 30 in its place",
        "31": "is a copy of step 11; passed by, until this run saves step 31 in its place",
        "32": "is another run's checkpoint; passed by, until this run saves step 32 in its place",
        "33": "has not the name of a checkpoint; passed by",
        "030": "has not the name of a checkpoint; passed by",
        "30 copy": "has not the name of a checkpoint; passed by",
    }


@pytest.mark.run
def test_strangers_are_named_once_and_passed_by_when_a_run_resumes(tmp_path, strangers, caplog):
    run, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    with opened(run, keep_last=1, keep_best=1) as checkpoints:
        assert checkpoints.latest_good() == 11
        assert_same_bits(checkpoints.restore(11, make_state(0)), make_state(11))
        for step in (12, 13):
            checkpoints.save(make_state(step), step)
        checkpoints.wait()
        assert checkpoints.latest_good() == 13
        assert set(names(run)) == {"13", ".hidden", *strangers}  # none counts, none is deleted
        checkpoints.save(make_state(30), 30)
        checkpoints.wait()
        assert (checkpoints.latest_good(), read_meta(root / "30").averaged_steps) == (30, None)
    told = sorted(record.message for record in caplog.records)
    assert told == sorted(f"{root / name}: {text}" for name, text in strangers.items())


@pytest.mark.run
def test_strangers_are_passed_by_when_a_run_is_used(tmp_path, strangers, caplog):
    run, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    assert load_for_inference(run).step == 11
    assert {record.message.partition(":")[2][1:] for record in caplog.records} == {
        *strangers.values()
    }
    assert average(run, tmp_path / "again", last=2) == [5, 11]
    with pytest.raises(UserError, match="no checkpoint has an evaluation"):
        load_for_inference(run, "best")
    assert load_for_inference(root / "30").step == 11  # who names one gets it
    for step in ("5", "11"):
        shutil.rmtree(root / step)
    with pytest.raises(UserError, match=f"{root}: no checkpoint of this run; give the one to use"):
        load_for_inference(run)


def test_a_checkpoint_of_this_run_counts_whatever_may_change_has_changed(tmp_path):
    saved(tmp_path, 5)
    more = dataclasses.replace(CONFIG.train, steps=CONFIG.train.steps + 1, keep_last=2)
    (tmp_path / "config.json").write_text(config_to_json(dataclasses.replace(CONFIG, train=more)))
    assert load_for_inference(tmp_path).step == 5
    (tmp_path / "config.json").write_text("of another version")
    assert load_for_inference(tmp_path).step == 5


# ---- Links


@pytest.mark.run
def test_a_run_goes_on_where_a_checkpoint_lies_on_another_disk(tmp_path):
    root = saved(tmp_path / "run", 5, 11)
    (tmp_path / "disk").mkdir()
    (root / "5").rename(tmp_path / "disk" / "5")
    (root / "5").symlink_to(tmp_path / "disk" / "5")
    (root / "5.deleted").symlink_to(tmp_path / "disk" / "5")  # a deletion that failed
    assert load_for_inference(tmp_path / "run", 5).step == 5
    with opened(tmp_path / "run", keep_last=1) as checkpoints:
        assert checkpoints.latest_good() == 11
        checkpoints.save(make_state(17), 17)
        checkpoints.wait()
    assert names(tmp_path / "run") == ["17"]
    assert load_for_inference(tmp_path / "disk" / "5").step == 5


def test_a_checkpoint_on_a_disk_that_is_not_there_is_named_and_its_link_stays(tmp_path, caplog):
    root = saved(tmp_path / "run", 5, 11)
    for step in (11, 5):
        (root / str(step)).rename(tmp_path / str(step))
        (root / str(step)).symlink_to(tmp_path / "unmounted" / str(step))
        with opened(tmp_path / "run") as checkpoints:
            if step == 11:
                assert checkpoints.latest_good() == 5
                message = caplog.records[0].message
                assert message.startswith(f"{root}/11: is a link to {tmp_path}/unmounted/11, which")
            else:
                with pytest.raises(CheckpointError, match="no good checkpoint"):
                    checkpoints.latest_good()
    assert names(tmp_path / "run") == ["11", "5"]


# ---- A run that deletes what another process reads


def retire(root: Path, step: int, new: int) -> None:
    """What a run with keep_last 1 does between two looks of another process."""
    saved(root.parent, new)
    shutil.rmtree(root / str(step))


@pytest.mark.run
@pytest.mark.parametrize("moment", ["listed", "hashed", "verified", "half read"])
@pytest.mark.parametrize("step", [None, "best", 11])
def test_what_a_run_deletes_while_it_is_read_is_not_called_damaged(
    tmp_path, monkeypatch, caplog, moment, step
):
    """Each moment comes while 11 is looked at; from then on there is 17."""
    with opened(tmp_path) as checkpoints:
        checkpoints.save(make_state(11), 11, evaluation=bleu(1.0))
    root, left = tmp_path / "checkpoints", [1]

    def at(moment_of, owner, name):
        original = getattr(owner, name)

        def hooked(*arguments, **options):
            if moment == moment_of and "11" in Path(arguments[0]).parts and left.pop() == 1:
                left.append(0)
                with opened(tmp_path) as checkpoints:
                    checkpoints.save(make_state(17), 17, evaluation=bleu(1.0))
                shutil.rmtree(root / "11")
            elif not left:
                left.append(0)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, hooked)

    at("listed", sealed, "_identity")
    at("hashed", sealed, "_fingerprint")
    at("verified", load, "read_checkpoint")
    at("half read", checkpoint_format, "read_arrays")
    if step == 11:
        with pytest.raises(UserError, match=f"^{root}/11: was deleted while it was being read"):
            load_for_inference(tmp_path, step)
    else:
        assert_same_bits(load_for_inference(tmp_path, step).params, make_state(17).params)
    assert not caplog.records


def test_a_checkpoint_that_gets_its_name_while_all_are_listed_is_seen(tmp_path, monkeypatch):
    root = saved(tmp_path, 11)
    (root / "11").rename(root / "11.partial")

    def renamed(folder, is_sealed=sealed.is_sealed):
        if folder.exists():
            folder.rename(root / "11")
        return is_sealed(folder)

    monkeypatch.setattr(sealed, "is_sealed", renamed)
    assert find_checkpoints(root) == {11: root / "11"}


@pytest.mark.run
def test_a_reader_that_is_always_too_late_says_so_in_the_end(tmp_path, monkeypatch):
    saved(tmp_path, 11)
    numbers = itertools.count()
    monkeypatch.setattr(sealed, "_identity", lambda folder: next(numbers))

    def fails(folder):
        raise CheckpointError("damaged")

    monkeypatch.setattr(load, "read_checkpoint", fails)
    with pytest.raises(UserError, match=r"11: was deleted while it was being read; .*keep_last$"):
        load_for_inference(tmp_path)
    assert next(numbers) > load.LOOKS


@pytest.mark.run
def test_the_best_step_is_that_of_the_newest_checkpoints_metric(tmp_path):
    for step, metric, bleu_score, loss in ((5, "bleu", 30.0, 2.0), (7, "loss", 20.0, 1.0)):
        with opened(tmp_path, keep_last=9, best_metric=metric) as checkpoints:
            record = {"bleu": {"score": bleu_score}, "validation_loss": loss}
            checkpoints.save(make_state(step), step, evaluation=record)
    assert load_for_inference(tmp_path, "best").step == 7

"""plan: the programs of a run beside the train step, their shapes, times, bounds and processes."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min import cli
from flaxformer_min.cli import main
from flaxformer_min.config import ModelConfig
from flaxformer_min.data.batch import Bucket
from flaxformer_min.decoding.batches import CPU, TPU, capacity_of, rows_at_once
from flaxformer_min.errors import UserError
from flaxformer_min.model import cached
from flaxformer_min.planning import flops, hlo, plan, workers
from flaxformer_min.planning.chips import CHIPS, topology_devices
from flaxformer_min.planning.lengths import find_lengths
from flaxformer_min.planning.plan import KINDS, Program, programs_of
from flaxformer_min.planning.report import ProgramPlan, to_json, to_text
from flaxformer_min.training.sharding import make_mesh
from flaxformer_min.training.step import StepProgram
from tools import tiny_config

CONFIG = tiny_config.get_config(".")
BESIDE = [kind for kind in KINDS if kind != "train"]

# Shapes


def test_the_shapes_of_decoding_follow_from_the_lengths_of_the_validation_split():
    config = tiny_config.changed(CONFIG, "model", max_length=40)
    train = np.full((64, 2), 3)
    validation = np.array([[5, 7]] * 3 + [[16, 11]] + [[17, 2]] * 4)
    devices = jax.devices()[:2]
    lengths = train, validation
    searches = programs_of(config, lengths, devices, ["search"])
    rows = 16  # of a CPU, whatever the width here
    narrow, wide = Bucket(rows * 16 * 2, 16, 16 + 5), Bucket(rows * 16 * 2, 24, 24 + 5)
    assert [(p.bucket, p.beam, p.share, p.steps, p.rows) for p in searches] == [
        (narrow, 1, 0.5, (3 * 7 + 11) / 4, rows),
        (narrow, 2, 0.5, 8.0, rows),
        (wide, 1, 0.5, 2.0, rows),
        (wide, 2, 0.5, 2.0, rows),
    ]
    scorings = programs_of(config, lengths, devices, ["scoring"])
    assert [p.bucket for p in scorings] == [Bucket(2 * rows, 16, 16), Bucket(2 * rows, 24, 24)]
    kinds = [p.kind for p in programs_of(config, lengths, devices, ["init", "validation"])]
    assert set(kinds) == {"init", "validation"} and kinds[-1] == "init"
    every = [p.bucket for p in programs_of(config, lengths, devices, ["validation"])]
    assert max(bucket.source_length for bucket in every) == 17


def test_the_command_line_knows_all_kinds():
    flags = cli._make_parser().parse_args(["plan", "--topology", "cpu:8"])
    assert tuple(flags.only) == KINDS


# Programs


@pytest.fixture(scope="module")
def planned():
    """All but the train step of the tiny config on eight CPU devices."""
    config = tiny_config.changed(CONFIG, "mesh", data=4, fsdp=2)
    return plan.make_plan(config, "cpu:8", find_lengths(None, config.data), BESIDE)


@pytest.mark.run
def test_every_program_of_a_run_compiles_and_says_what_it_takes(planned):
    by_kind = {one.name.split(",")[0]: one for one in planned.programs}
    assert list(by_kind) == BESIDE and not planned.shapes and planned.hours is None
    step = StepProgram(CONFIG, make_mesh(CONFIG.mesh, jax.devices()), pad_id=0, bos_id=2)
    own, moments = plan._bytes(step.shapes.params), plan._bytes(step.shapes.opt_state)
    restored = by_kind["restore"].memory
    assert (restored["parameters"], restored["optimizer"]) == (own, moments)
    assert own + moments <= by_kind["init"].memory["results"] < 1.1 * (own + moments)
    assert by_kind["search"].memory["parameters"] == 4 * planned.parameters  # whole
    assert by_kind["validation"].memory["parameters"] == own
    assert by_kind["search"].beside == own + moments and by_kind["validation"].beside == moments


@pytest.mark.run
def test_the_second_table_has_a_line_for_each_program_and_json_has_the_same(planned):
    text, tree = to_text(planned), json.loads(to_json(planned))
    assert "| search, beam 1 |" in text and "| search, beam 2 |" in text
    assert [one["name"] for one in tree["programs"]] == [one.name for one in planned.programs]
    assert tree["fits"] and tree["hours"] is None


def test_a_program_that_leaves_no_room_for_the_state_beside_it_does_not_fit():
    small = ProgramPlan("search", "", 1.0, beside=9 * 2**30, memory={"parameters": 6 * 2**30})
    assert not plan._fitting(small, CHIPS["v5e"]).refusal
    large = dataclasses.replace(small, beside=10 * 2**30)
    assert plan._fitting(large, CHIPS["v5e"]).refusal == (
        "16.00G of 15.75G with what lies beside it"
    )
    assert not plan._fitting(large, CHIPS["cpu"]).refusal


# Times

NOTE = ', backend_config={{"estimated_cycles":"{}"}}'
SEARCH = f"""HloModule search

%refill (p: f32[2]) -> f32[2] {{
  %r = f32[2]{{0}} copy(%p){NOTE.format(3)}
}}

%bounded (p: s32[]) -> pred[] {{
  %c = s32[] constant(5)
}}

%row (p: f32[2]) -> f32[2] {{
  %w = f32[2]{{0}} copy(%p){NOTE.format(7)}
}}

%step (p: f32[2]) -> f32[2] {{
  %s = f32[2]{{0}} copy(%p){NOTE.format(100)}
  %rows = f32[2] while(%p), condition=%bounded, body=%row, metadata={{op_name="a/while/scatter"}}
  %f = f32[2] while(%p), condition=%bounded, body=%refill, metadata={{op_name="a/while/body/while"}}
}}

%prepare (p: f32[2]) -> f32[2] {{
  %e = f32[2]{{0}} copy(%p){NOTE.format(1000)}
  %g = f32[2] while(%p), condition=%bounded, body=%refill, metadata={{op_name="a/while"}}
  %i = f32[2] while(%p), condition=%bounded, body=%step, metadata={{op_name="a/while"}}
}}

ENTRY %main (p: f32[2]) -> f32[2] {{
  %h = f32[2]{{0}} copy(%p){NOTE.format(11)}
  %o = f32[2] while(%p), condition=%bounded, body=%prepare, metadata={{op_name="a/while"}}
}}
"""


def test_open_loops_turn_as_often_as_the_reader_is_told_by_what_lies_within_them():
    step, prepare = 100 + 5 * 7, 1000  # XLA's own loop over rows turns as its condition says
    assert hlo.read(SEARCH, (0, 0, 0)).cycles == 11
    assert hlo.read(SEARCH, (0, 0, 1)).cycles == 11 + prepare
    assert hlo.read(SEARCH, (0, 13, 2)).cycles == 11 + 2 * (prepare + 13 * step)
    assert hlo.read(SEARCH, (2, 13, 1)).cycles == 11 + prepare + 2 * 3 + 13 * (step + 2 * 3)


@pytest.mark.usefixtures("as_users_have_it")
def test_sentences_a_second_are_those_of_full_rows_and_the_bound_is_beside_them():
    chip = dataclasses.replace(CHIPS["v5e"], clock=1000.0)
    program = Program("search", Bucket(16 * 16, 16, 21), 1.0, beam=2, rows=16, steps=10.0)
    times = plan._times(CONFIG, chip, program, SEARCH, devices=4)
    seconds = (11 + 16 * (1000 + 10 * 135 + 16 * 3)) / 1000
    assert times["seconds"] == pytest.approx(seconds)
    assert times["step_seconds"] == pytest.approx(0.135)
    assert times["sentences_per_second"] == pytest.approx(4 * 16 * 16 / seconds)
    bound = times["bound_seconds"]
    assert times["bound_sentences_per_second"] == pytest.approx(4 * 16 / (10 * bound))
    assert plan._times(CONFIG, CHIPS["cpu"], program, SEARCH, 1) == {}


def test_the_bound_reads_weights_and_keys_once_a_step_or_multiplies_at_the_full_rate():
    model = ModelConfig(num_layers=3, num_decoder_layers=2, d_model=2, d_ff=3, num_heads=5)
    model = dataclasses.replace(model, d_k=7, d_v=11, compute_dtype="bfloat16")
    weights = 2 * (3 * 2 * 5 * 18 + 2 * 2 * 3) + 13 * 2
    keys = 2 * 5 * 18 * 17 * (19 + 23)
    assert flops.search_reads(model, 13, 17, 23, 19.0) == (weights, keys)
    config = tiny_config.changed(dataclasses.replace(CONFIG, model=model), "data", vocab_size=13)
    program = Program("search", Bucket(8 * 17, 23, 28), 1.0, beam=2, rows=17, steps=19.0)
    chip = dataclasses.replace(CHIPS["v5e"], bandwidth=100.0, peak_flops=1e9)
    assert plan._bound(config, chip, program) == 2 * (weights + keys) / 100
    slow = dataclasses.replace(chip, peak_flops=1.0)
    assert plan._bound(config, slow, program) == 2 * weights * 17 * 2


def test_the_memory_of_a_chip_is_read_as_fast_as_its_vendor_says():
    rates = {name: chip.bandwidth for name, chip in CHIPS.items()}
    assert rates == {"v5e": 819e9, "v5p": 2765e9, "v6e": 1638e9, "cpu": None}


# Lengths


def test_a_workdir_gives_the_lengths_of_both_splits_and_its_config(finished, tiny, capsys):
    found = find_lengths(str(finished), tiny.data)
    assert [split.shape for split in found] == [(157, 2), (41, 2)]
    assert found[0].max() <= tiny.data.max_length
    command = ["plan", "--lengths", str(finished), "--topology", "cpu:8", "--only", "restore"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "restore" in out and "1 of 1: restore (" in err


def test_a_folder_without_a_corpus_is_refused_in_one_line(tmp_path, finished, tiny, capsys):
    with pytest.raises(UserError, match="holds no encoded corpus"):
        find_lengths(str(tmp_path), tiny.data)
    for name in ("config.json", "corpus.json"):
        shutil.copy(finished / name, tmp_path)
    config = (tmp_path / "config.json").read_text().replace("/cache", "/nowhere")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"--lengths .*: holds no encoded corpus"):
        find_lengths(str(tmp_path), tiny.data)
    assert main(["plan", "--topology", "cpu:8"]) == 2
    assert "give --config" in capsys.readouterr().err


# Processes


def test_there_are_no_more_processes_than_jobs_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7), raising=False)
    monkeypatch.setattr(workers, "MEMORY", 1)
    assert [workers.room(n) for n in (1, 5, 11)] == [1, 5, 7]
    monkeypatch.setattr(workers, "MEMORY", 2**60)
    assert workers.room(11) == 1


@pytest.mark.run
def test_jobs_are_done_in_processes_and_their_errors_arrive():
    assert dict(workers.each(abs, [-3, 5, -7], 2)) == {0: 3, 1: 5, 2: 7}
    with pytest.raises(UserError, match=r"--topology v9:[12]: write KIND:SIZE"):
        list(workers.each(topology_devices, ["v9:1", "v9:2"], 2))
    with pytest.raises(MemoryError, match="was killed"):
        list(workers.each(os._exit, [3, 3], 2))


@pytest.mark.run
def test_other_processes_plan_what_this_one_does(monkeypatch):
    def made(processes: int):
        monkeypatch.setattr(workers, "room", lambda jobs: processes)
        lengths = find_lengths(None, CONFIG.data)
        return plan.make_plan(CONFIG, "cpu:8", lengths, ["init", "restore", "validation"])

    assert made(2) == made(1)


# Decoding by device


@pytest.mark.parametrize(("width", "rows"), [(16, 16), (64, 16), (65, 15), (96, 10), (1024, 1)])
def test_a_cpu_decodes_as_many_rows_as_ever(width, rows):
    assert rows_at_once(width, 1, capacity_of("cpu")) == rows_at_once(width) == rows
    assert capacity_of("gpu") is CPU and capacity_of("tpu") is TPU


def test_a_tpu_keeps_the_whole_past_in_one_block():
    assert TPU.first_block is not None
    assert cached.block_sizes(307, TPU.first_block) == [307]
    assert cached.block_sizes(53, 20) == [20, 20, 13]


@pytest.mark.parametrize(("axis", "count"), [(2, 2), (3, 3)])
@pytest.mark.parametrize("places", [[0, 1, 2, 5, 6], [-1, -2, 8, 9, 4], [7, 10, 11, -3, 3]])
def test_what_a_tpu_chooses_is_what_others_scatter(axis, count, places):
    shape = [5, 3, 7, 11]
    x = jax.random.normal(jax.random.key(0), shape)
    shape[axis] = count
    new = jax.random.normal(jax.random.key(1), shape)
    wanted = cached._put_by_scattering(x, new, jnp.array(places), axis)
    assert (cached._put_by_selecting(x, new, jnp.array(places), axis) == wanted).all()
    assert (cached.put(x, new, jnp.array(places), axis) == wanted).all()

"""plan: FLOPs by formula, the shapes of the batches, and the verdict."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from flaxformer_min.cli import main
from flaxformer_min.config import ModelConfig
from flaxformer_min.data.batch import Bucket
from flaxformer_min.data.batching import BatchPlan
from flaxformer_min.data.tokenizer import BOS_ID, PAD_ID
from flaxformer_min.errors import UserError
from flaxformer_min.planning import lengths, plan
from flaxformer_min.planning.chips import CHIPS, Chip
from flaxformer_min.planning.hlo import Collective
from flaxformer_min.planning.parts import PARTS
from flaxformer_min.planning.report import MEMORY_KINDS, Plan, ShapePlan, to_json, to_text
from flaxformer_min.training.sharding import make_mesh
from flaxformer_min.training.step import StepProgram
from tools import tiny_config

# FLOPs


@pytest.mark.run
def test_the_formula_agrees_with_xlas_count():
    config = tiny_config.get_config(".")
    model = ModelConfig(
        num_layers=2, d_model=64, d_ff=192, num_heads=2, d_k=24, d_v=40, dropout=0.0, max_length=16
    )
    config = tiny_config.changed(dataclasses.replace(config, model=model), "data", vocab_size=600)
    config = tiny_config.changed(config, "optimizer", accumulation=1)
    bucket = Bucket(8, 7, 11)  # 88 target positions: the loss is one chunk
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    program = StepProgram(config, mesh, pad_id=PAD_ID, bos_id=BOS_ID)
    counted = program.compile(bucket).cost_analysis()["flops"]
    assert plan.step_flops(model, 600, bucket) == pytest.approx(counted, rel=0.15)


def test_the_formula_gives_a_value_worked_out_by_hand():
    model = ModelConfig(num_layers=1, d_model=2, d_ff=3, num_heads=5, d_k=7, d_v=11)
    # Attention of q queries on k keys: (q + k) x 2 x 5 x (7 + 11) + q k 5 (7 + 11).
    encoder = (13 + 13) * 180 + 13 * 13 * 90 + 2 * 13 * 2 * 3
    decoder = (17 + 17) * 180 + 17 * 17 * 90 + (17 + 13) * 180 + 17 * 13 * 90 + 2 * 17 * 2 * 3
    logits = 17 * 2 * 19
    wanted = 3 * 2 * 23 * (encoder + decoder + logits)
    assert plan.step_flops(model, 19, Bucket(23, 13, 17)) == wanted


# Shapes


def test_assumed_lengths_double_up_to_the_longest_and_fill_one_batch_each():
    data = tiny_config.changed(tiny_config.get_config("."), "data", max_length=100).data
    data = dataclasses.replace(data, tokens_per_batch=6400, num_buckets=12)
    assumed = lengths.assumed_lengths(data)
    assert np.unique(assumed).tolist() == [16, 32, 64, 100]
    shapes = plan.buckets(BatchPlan(assumed, data))
    wanted = [(400, 16, 16), (192, 32, 32), (96, 64, 64), (64, 100, 100)]
    assert [tuple(bucket) for bucket, _ in shapes] == wanted
    assert [share for _, share in shapes] == [0.25] * 4
    few = dataclasses.replace(data, num_buckets=2)
    assert np.unique(lengths.assumed_lengths(few)).tolist() == [64, 100]


def test_lengths_of_a_file_give_the_shapes_and_their_shares(tmp_path):
    data = tiny_config.get_config(".").data  # 256 tokens, 2 buckets, rows by 16, 16 tokens at most
    lines = ["3 4"] * 192 + ["9 8"] * 16 + ["40 2"]
    (tmp_path / "lengths").write_text("\n".join(lines))
    found = lengths.read_lengths(str(tmp_path / "lengths"), data)
    assert len(found) == 208
    shares = {tuple(bucket): share for bucket, share in plan.buckets(BatchPlan(found, data))}
    assert shares == {(64, 3, 4): 0.75, (16, 9, 8): 0.25}


@pytest.mark.parametrize("text", ["", "1 2 3", "4 x", "0 5", "17 2\n2 17"])
def test_a_file_that_holds_no_lengths_is_refused(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(UserError, match="--lengths"):
        lengths.read_lengths(str(path), tiny_config.get_config(".").data)


# The verdict


@pytest.fixture(scope="module")
def planned():
    """The tiny config on eight CPU devices, as they are under pytest."""
    config = tiny_config.changed(tiny_config.get_config("."), "mesh", data=-1, fsdp=2)
    return plan.make_plan(config, "cpu:8", lengths.find_lengths(None, config.data), ["train"])


@pytest.mark.run
def test_a_plan_knows_the_bytes_of_a_device(planned):
    assert planned.mesh == {"data": 4, "fsdp": 2, "tensor": 1} and planned.devices == 8
    assert [tuple(shape.bucket) for shape in planned.shapes] == [(16, 16, 16)]
    memory = planned.shapes[0].memory
    whole = 4 * planned.parameters
    assert whole / 8 < memory["parameters"] < 0.2 * whole  # split over data x fsdp
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert memory["temporaries"] > 0
    assert planned.hours is None and not planned.advice


@pytest.mark.run
def test_json_and_table_say_the_same(planned):
    tree, text = json.loads(to_json(planned)), to_text(planned)
    assert tree["fits"] and tree["devices"] == 8 and tree["versions"]["jax"] == jax.__version__
    shape = tree["shapes"][0]
    assert shape["bucket"] == {"rows": 16, "source_length": 16, "target_length": 16}
    assert shape["flops"] == planned.shapes[0].flops and shape["seconds"] is None
    assert {"kind", "bytes", "trips", "source", "chain"} == set(shape["collectives"][0])
    assert "16 x 16 x 16" in text and "exchanges" in text


def test_time_follows_from_cycles_and_from_the_bytes_exchanged(planned):
    shape = dataclasses.replace(planned.shapes[0], parts={"rest": 0.5}, collective_seconds=1.5)
    short = dataclasses.replace(shape, share=0.25, parts={}, collective_seconds=1.0)
    long = dataclasses.replace(shape, share=0.75)
    timed = dataclasses.replace(planned, chip=CHIPS["v5e"], shapes=(short, long), steps=3600)
    assert timed.hours == 0.25 * 1 + 0.75 * 2
    assert timed.utilisation(long) == long.flops / (2 * 8 * 197e12)
    assert "3,600 steps: 1.8 hours, 14 chip-hours" in to_text(timed)


# As users of TPUs have reported it, with the numbers changed.
REFUSAL = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 17.54G of 15.75G hbm. Exceeded hbm capacity by 1.79G.

Total hbm usage >= 18.04G:
    reserved        530.00M
    program          17.54G
    arguments            0B
"""


@pytest.mark.run
def test_a_program_that_does_not_fit_says_so_and_what_would_fit(planned, monkeypatch):
    class OnlyWithRemat(StepProgram):
        def __init__(self, config, mesh, **ids):
            super().__init__(config, mesh, **ids)
            self.remat = config.model.remat

        def compile(self, bucket):
            if not self.remat:
                raise jax.errors.JaxRuntimeError(REFUSAL)
            return super().compile(bucket)

    monkeypatch.setattr(plan, "StepProgram", OnlyWithRemat)
    monkeypatch.setattr(plan.workers, "room", lambda jobs: 1)
    config = tiny_config.get_config(".")
    found = plan.make_plan(config, "cpu:8", lengths.find_lengths(None, config.data), ["train"])
    assert found.shapes[0].refusal == "Used 17.54G of 15.75G hbm"
    assert found.advice == "with --model.remat True it would fit"
    assert "16 x 16 x 16 does not fit: Used 17.54G" in to_text(found)
    assert not json.loads(to_json(found))["fits"]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v9:2x2", "write KIND:SIZE, such as v5e:16x16 or cpu:8, with one of v5e"),
        ("v5e", "write KIND:SIZE"),
        ("cpu:many", "after cpu comes a number of devices"),
        ("cpu:999999999999", "after cpu comes a number of devices of at most 5 digits"),
    ],
)
def test_a_topology_that_is_none_is_refused_in_one_line(capsys, topology, message):
    command = ["plan", "--config", tiny_config.__file__ + ":.", "--topology", topology]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_does_not_divide_is_refused_before_anything_is_compiled(capsys):
    command = ["plan", "--config", tiny_config.__file__ + ":.", "--topology", "cpu:8"]
    assert main([*command, "--mesh.tensor", "8"]) == 2
    assert "does not divide model.num_heads (2)" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_a_tpu_cannot_be_planned_for(capsys):
    command = ["plan", "--config", tiny_config.__file__ + ":.", "--topology", "v5e:2x4"]
    assert main(command) == 2
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_the_clocks_are_those_of_the_chips():
    """Gigahertz, as reports of the chips' users have them."""
    clocks = {name: chip.clock and round(chip.clock / 1e9, 2) for name, chip in CHIPS.items()}
    assert clocks == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "cpu": None}


@pytest.mark.usefixtures("as_users_have_it")
def test_seconds_are_cycles_at_the_clock_and_bytes_at_the_links_an_all_reduce_crossing_twice(
    monkeypatch,
):
    text = """HloModule step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %ag = f32[250]{0} all-gather(%p), dimensions={0}
  %ar = f32[500]{0} all-reduce(%ag), to_apply=%add
  ROOT %out = f32[8]{0} fusion(%ar), backend_config={"estimated_cycles":"600"}
}
"""
    stats = SimpleNamespace(
        argument_size_in_bytes=7,
        output_size_in_bytes=5,
        alias_size_in_bytes=3,
        temp_size_in_bytes=11,
        generated_code_size_in_bytes=13,
    )
    compiled = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: stats)
    shapes = SimpleNamespace(params={}, opt_state={})
    program = SimpleNamespace(compile=lambda bucket: compiled, shapes=shapes)
    monkeypatch.setattr(plan, "StepProgram", lambda *arguments, **ids: program)
    chip = Chip(clock=200.0, interconnect=1000.0)
    config, bucket = tiny_config.get_config("."), Bucket(3, 5, 7)
    found = plan.plan_shape(config, make_mesh(config.mesh), chip, bucket, 0.5)
    assert found.compute_seconds == 600 / 200
    assert found.collective_seconds == (4 * 250 + 2 * 4 * 500) / 1000
    assert found.seconds == 3 + 5 and found.tokens_per_second == 3 * 7 / 8
    wanted = {"other arguments": 7, "results": 5 - 3, "temporaries": 11, "code": 13}
    assert found.memory == {"parameters": 0, "optimizer": 0} | wanted


def made_by_hand() -> Plan:
    """Two shapes on six chips: of one everything is known, of the other only that it fits."""
    gib = 2**30
    memory = dict(zip(MEMORY_KINDS, [gib, 2 * gib, gib // 4, 0, gib // 2, gib // 8], strict=True))
    moved = (
        Collective("all-reduce", gib // 2, 3, "a"),
        Collective("all-reduce", gib, 1, "b"),
        Collective("all-gather", gib // 4, 2, "c"),
    )
    parts = {"products": 0.25, "copies": 0.0625, "rest": 0.0625}
    timed = ShapePlan(Bucket(8, 3, 5), 0.25, 9 * 10**12, "", memory, moved, parts, 0.125)
    other = dataclasses.replace(timed, bucket=Bucket(4, 7, 11), share=0.75, collectives=())
    chip = Chip(memory=16.0 * gib, peak_flops=1e13, clock=1e9, interconnect=1e9)
    mesh = {"data": 3, "fsdp": 2, "tensor": 1}
    return Plan("v5e:2x3", chip, mesh, 12_345, 7200, (timed, other), "")


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of all lines that belong to tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def test_a_row_of_the_table_holds_what_was_planned():
    lines = to_text(made_by_hand()).splitlines()
    table = cells(lines)
    assert table[0][-6:] == [
        *("GiB a device", "TFLOP", "ms", "of it exchange", "utilisation", "target tokens/s"),
    ]
    first = "8 x 3 x 5|25%|1.00|2.00|0.25|0.00|0.50|0.12|3.88|9.00|500.0|125.0|30%|80"
    assert table[2] == first.split("|")
    assert table[3][:2] == ["4 x 7 x 11", "75%"]
    exchanged = "8 x 3 x 5 exchanges: 2 all-gather of 0.500 GiB, 4 all-reduce of 2.500 GiB"
    assert exchanged in lines and "4 x 7 x 11 exchanges: nothing" in lines
    assert lines[-2:] == [
        "it fits into the 16.00 GiB of a chip",
        "7,200 steps: 1.0 hours, 6 chip-hours",
    ]


def test_the_parts_of_a_step_add_up_to_the_whole_and_stand_with_what_would_help():
    table = cells(to_text(made_by_hand()).splitlines())
    assert table[4][:3] == ["part", "8 x 3 x 5", "4 x 7 x 11"]
    rows = {row[0]: row[1:] for row in table[6:]}
    *parts, whole, full = rows.items()
    assert [name for name, _ in parts] == [*PARTS, "exchange"]
    assert rows["products"][0] == "250.0" and rows["exchange"][0] == "125.0"
    assert all(row[2] for _, row in parts)
    assert whole[0] == "whole" and sum(float(row[0]) for _, row in parts) == float(whole[1][0])
    assert whole[1][0] == "500.0"
    assert full == ("(products at full rate)", ["150.0", "150.0", ""])  # 9e12 / (6 x 1e13)


def test_where_the_compiler_estimates_no_time_there_is_no_table_of_parts():
    made = made_by_hand()
    shapes = [dataclasses.replace(shape, parts=None) for shape in made.shapes]
    assert "what would help" not in to_text(dataclasses.replace(made, shapes=tuple(shapes)))


def test_the_json_holds_the_same_numbers_unrounded():
    tree = json.loads(to_json(made_by_hand()))
    assert (tree["fits"], tree["hours"], tree["chip_hours"], tree["devices"]) == (True, 1.0, 6.0, 6)
    shape = tree["shapes"][0]
    assert (shape["seconds"], shape["utilisation"], shape["tokens_per_second"]) == (0.5, 0.3, 80.0)
    assert shape["parts"]["copies"] == 0.0625 and shape["compute_seconds"] == 0.375
    assert shape["memory"]["optimizer"] == 2 * 2**30 and shape["collectives"][0]["trips"] == 3


def test_what_would_save_memory_is_tried_in_order_and_leaves_the_tensor_axis():
    config = tiny_config.changed(tiny_config.get_config("."), "mesh", tensor=2)
    fsdp = "--mesh.data 1 --mesh.fsdp 4"
    changes = dict(plan._changes(config, 8))
    assert list(changes) == ["--model.remat True", fsdp, f"--model.remat True {fsdp}"]
    assert [one.model.remat for one in changes.values()] == [True, False, True]
    assert dataclasses.astuple(changes[fsdp].mesh) == (1, 4, 2)
    remat = tiny_config.changed(config, "model", remat=True)
    assert next(iter(dict(plan._changes(remat, 8)))) == fsdp


def test_the_flops_of_a_shallower_decoder_are_those_of_its_layers():
    model = ModelConfig(num_layers=3, d_model=2, d_ff=3, num_heads=5, d_k=7, d_v=11)
    bucket = Bucket(23, 13, 17)
    flops = [
        plan.step_flops(dataclasses.replace(model, num_decoder_layers=n), 19, bucket)
        for n in (1, 2, 3, None)
    ]
    assert flops[1] - flops[0] == flops[2] - flops[1] > 0 and flops[2] == flops[3]


def test_the_links_of_a_chip_carry_what_its_vendor_says():
    """Gigabytes a second over all links, from the published Gbit/s."""
    links = {name: chip.interconnect for name, chip in CHIPS.items()}
    assert links == {"v5e": 200e9, "v5p": 600e9, "v6e": 448e9, "cpu": None}


def test_pairs_over_the_longest_length_of_training_are_left_out(tmp_path):
    path, data = tmp_path / "lengths", tiny_config.get_config(".").data
    path.write_text("16 3\n17 3\n3 16\n3 17\n1 1\n")
    assert lengths.read_lengths(str(path), data).tolist() == [[16, 3], [3, 16], [1, 1]]

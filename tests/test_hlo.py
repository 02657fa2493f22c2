"""What is read from the text of a compiled program: every computation is counted, or an error."""

import random

import jax
import pytest

from flaxformer_min.planning import hlo
from flaxformer_min.planning.parts import part_of
from flaxformer_min.training.sharding import make_mesh
from tools import tiny_config

# As TPUs' and CPUs' programs are written: a loop in a loop, one whose bound is known and one whose
# bound stands in its condition; collectives that start and end, and one inside a fusion.
PROGRAM = """HloModule jit_step, entry_computation_layout={()->f32[]}

%add (x.0: f32[], y.0: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x.0, %y.0)
}

%inner_condition (p.0: (s32[])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%gte, %bound), direction=LT
}

%inner (p.1: (s32[])) -> (s32[]) {
  %all-reduce.1 = (f32[3,7]{1,0:T(8,128)}, bf16[11]{0}) all-reduce(%a, %b), to_apply=%add
  %work = f32[2]{0} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"10"}
}

%fused (p.2: f32[2]) -> f32[2] {
  %part = f32[2]{0} add(%p.2, %p.2), backend_config={"estimated_cycles":"999"}
}

%scatter (p.3: f32[64]) -> f32[8] {
  %all-reduce.2 = f32[64]{0} all-reduce(%p.3), channel_id=2, to_apply=%add
}

%outer (p.4: (s32[])) -> (s32[]) {
  %while.1 = (s32[]) while(%t), condition=%inner_condition, body=%inner
}

%outer_condition (p.5: (s32[])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (p.6: f32[2]) -> f32[] {
  %while.2 = (s32[]) while(%t), condition=%outer_condition, body=%outer,"known_trip_count":{"n":"3"}
  %ag = (f32[2,16]{1,0}, f32[8,16]{1,0}, u32[]) all-gather-start(%p.6), m={op_name="jit(a)/b"}
  %ag.done = f32[8,16]{1,0} all-gather-done(%ag)
  %rs = f32[8]{0} fusion(%p.6), kind=kCustom, calls=%scatter, x={"estimated_cycles":"7"}
}
"""

SUM = "  %sum = f32[7]{0} all-reduce(%p), to_apply=%add\n"
GATHER = "  %all = f32[9]{0} all-gather(%p), dimensions={0}\n"
ADD = "%add (x: f32[], y: f32[]) -> f32[] {\n  ROOT %z = f32[] add(%x, %y)\n}\n\n"
NOTE = ', backend_config={"estimated_cycles":"1000"}'


def found_in(text: str) -> list[tuple[str, int, int]]:
    return [(one.kind, one.bytes, one.trips) for one in hlo.read(text).collectives]


def work(cycles: int) -> str:
    """An instruction that the compiler expects to take so many cycles."""
    return "  %work = f32[2]{0} copy(%p)" + NOTE.replace("1000", str(cycles)) + "\n"


def computation(name: str, *lines: str) -> str:
    return f"%{name} (p: f32[2]) -> f32[2] {{\n" + "".join(lines) + "}\n\n"


def program(last: str, *computations: str, before: str = "") -> str:
    """A text whose entry ends in the instruction `last`, with the computations that it calls."""
    entry = f"{before}  ROOT %last = f32[2]{{0}} {last}\n"
    return "HloModule m\n\n" + "".join(computations) + "ENTRY " + computation("main", entry)


def test_loops_count_as_often_as_they_turn_and_fusions_once():
    program = hlo.read(PROGRAM)
    assert program.cycles == 3 * 5 * 10 + 7
    assert found_in(PROGRAM) == [
        ("all-reduce", 4 * 3 * 7 + 2 * 11, 15),
        ("all-gather", 4 * 8 * 16, 1),
        ("reduce-scatter", 4 * 64, 1),
    ]
    assert program.collectives[1].source == "jit(a)/b"


def test_a_real_program_of_eight_devices_is_read():
    mesh = make_mesh(tiny_config.get_config(".").mesh)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def total(x):
        return jax.lax.scan(lambda sum, part: (sum + (x * part).sum(), None), 0.0, x[0, :3])[0]

    x = jax.ShapeDtypeStruct((16, 5), "float32", sharding=rows)
    found = hlo.read(jax.jit(total).lower(x).compile().as_text()).collectives
    assert sum(one.trips for one in found if one.kind == "all-reduce") in (3, 4)


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%cheap, %dear}",
        "branch_computations={%dear, %cheap}",
        "true_computation=%dear, false_computation=%cheap",
        "true_computation=%cheap, false_computation=%dear",
    ],
)
def test_a_conditional_counts_as_its_dearest_branch_and_what_that_exchanges(branches):
    cheap, dear = computation("cheap", work(30), SUM, SUM), computation("dear", work(40), GATHER)
    text = program(f"conditional(%c, %p, %p), {branches}", ADD, cheap, dear)
    assert hlo.read(text).cycles == 40
    assert found_in(text) == [("all-gather", 36, 1)]


def test_where_nothing_is_estimated_the_dearest_branch_is_the_one_that_exchanges_most():
    one, other = computation("one"), computation("other", SUM)
    text = program("conditional(%c, %p, %p), branch_computations={%one, %other}", ADD, one, other)
    assert found_in(text) == [("all-reduce", 28, 1)]


def test_the_branches_of_a_real_program_are_read():
    mesh = make_mesh(tiny_config.get_config(".").mesh)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def sums(x, wanted):
        return jax.lax.cond(wanted, lambda x: x.sum(0), lambda x: x[0] * 0, x)

    x = jax.ShapeDtypeStruct((16, 5), "float32", sharding=rows)
    text = jax.jit(sums).lower(x, True).compile().as_text()
    assert " conditional(" in text
    assert ("all-reduce", 20, 1) in found_in(text)


def test_a_call_counts_what_it_calls_and_what_it_takes_itself():
    called = computation("called", work(5), work(6))
    assert hlo.read(program("call(%p), to_apply=%called", called)).cycles == 11
    assert hlo.read(program(f"call(%p), to_apply=%called{NOTE}", called)).cycles == 1011


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    parts = computation("test", work(1)), computation("body", work(10))
    trips = ', backend_config={"known_trip_count":{"n":"4"}}'
    assert hlo.read(program(f"while(%p), condition=%test, body=%body{trips}", *parts)).cycles == 45


@pytest.mark.parametrize(
    "caller",
    [
        "fusion(%p), kind=kLoop, calls=%called",
        "async-start(%p), calls=%called",
        "fusion-start(%p), kind=kLoop, calls=%called",
    ],
)
def test_an_estimate_covers_what_the_instruction_calls(caller):
    called = computation("called", work(5), work(6))
    assert hlo.read(program(caller + NOTE, called)).cycles == 1000
    assert hlo.read(program(caller + NOTE.replace("1000", "0"), called)).cycles == 11
    assert hlo.read(program(caller, called)).cycles == 11


def test_what_runs_in_the_background_counts_once_where_it_starts():
    called = computation("called", work(5), SUM)
    lines = [
        f"  %{name} = ((f32[2]), f32[2], u32[]) async-{name}(%p), calls=%called\n"
        for name in ("start", "update")
    ]
    text = program("async-done(%update), calls=%called", ADD, called, before="".join(lines))
    assert hlo.read(text).cycles == 5
    assert found_in(text) == [("all-reduce", 28, 1)]


@pytest.mark.parametrize(
    "caller",
    [
        "reduce(%p, %zero), dimensions={0}, to_apply=%each",
        "sort(%p), dimensions={0}, to_apply=%each",
        "map(%p), dimensions={0}, to_apply=%each",
        "select-and-scatter(%p, %q, %zero), select=%other, scatter=%each",
        'custom-call(%p), custom_call_target="TopK", called_computations={%other, %each}',
    ],
)
def test_what_is_repeated_for_every_element_is_in_the_estimate_of_the_whole(caller):
    plain = computation("other"), computation("each")
    noted = computation("other"), computation("each", work(3))
    assert hlo.read(program(caller, *plain)).cycles == 0
    assert hlo.read(program(caller + NOTE, *plain)).cycles == 1000
    assert hlo.read(program(caller + NOTE, *noted)).cycles == 1000
    with pytest.raises(AssertionError, match=r"last has no estimate and repeats .*each"):
        hlo.read(program(caller, *noted))


def test_estimates_of_a_computation_that_nothing_calls_are_an_error():
    lost = computation("lost", work(3))
    hlo.read(program("copy(%p)", computation("lost")))
    with pytest.raises(AssertionError, match="lost has estimates, but nothing calls it"):
        hlo.read(program("copy(%p)", lost))
    with pytest.raises(AssertionError, match="lost has estimates, but nothing calls it"):
        hlo.read(program("new-kind-of-call(%p), runs=%lost", lost))


GRADIENT, UPDATE = "jit(train_step)/jvp(jit(one))/", "jit(train_step)/cond/branch_1_fun/"


@pytest.mark.parametrize(
    ("opcodes", "source", "part"),
    [
        ({"fusion", "dot", "add"}, GRADIENT + "dot_general", "products"),
        ({"fusion", "convolution", "copy"}, "", "products"),
        ({"convolution"}, "jit(train_step)/jvp()/shard_map/dot_general", "products"),
        ({"fusion", "rng-bit-generator"}, GRADIENT + "add", "random bits"),
        ({"fusion", "xor"}, GRADIENT + "jit(_threefry_split)/split/xor", "random bits"),
        ({"copy"}, UPDATE + "add", "copies"),
        ({"fusion", "transpose", "bitcast", "parameter"}, GRADIENT + "transpose", "copies"),
        ({"fusion", "transpose", "add"}, GRADIENT + "add", "rest"),
        ({"fusion", "bitcast"}, GRADIENT + "squeeze", "rest"),
        ({"fusion", "exponential"}, "jit(train_step)/jvp()/shard_map/exp", "loss"),
        ({"fusion", "sqrt"}, UPDATE + "sqrt", "optimizer"),
        ({"reduce"}, "jit(train_step)/reduce_sum", "optimizer"),
        ({"reduce"}, "jit(train_step)/transpose(jvp(jit(one)))/reduce_sum", "rest"),
        ({"add"}, "", "rest"),
    ],
)
def test_the_part_of_an_instruction_follows_from_what_it_holds_and_where_it_comes_from(
    opcodes, source, part
):
    assert part_of(opcodes, source) == part


def test_cycles_are_counted_by_part_in_what_is_called_and_repeated():
    product = "  %dot = f32[2]{0} dot(%p, %p)\n"
    fused = computation("fused", product)
    body = computation("body", work(10), f"  %f = f32[2]{{0}} fusion(%p), calls=%fused{NOTE}\n")
    trips = ', backend_config={"known_trip_count":{"n":"3"},"estimated_cycles":"7"}'
    text = program(
        f"while(%p), condition=%test, body=%body{trips}", fused, computation("test"), body
    )
    counted = {part: cycles for part, cycles in hlo.read(text).parts.items() if cycles}
    assert counted == {"copies": 3 * 10, "products": 3 * 1000, "rest": 7}


@pytest.mark.parametrize(
    ("scope", "part"), [("/jvp()/shard_map/exp", "loss"), ("/cond/branch_1_fun/add", "optimizer")]
)
def test_a_fusion_without_an_estimate_hands_up_the_parts_of_what_it_holds(scope, part):
    inside = f'  %x = f32[2]{{0}} add(%p, %p), metadata={{op_name="jit(a){scope}"}}{NOTE}\n'
    text = program("fusion(%p), calls=%called", computation("called", inside, work(5)))
    assert hlo.read(text).parts == {part: 1000, "copies": 5}


def test_a_line_that_cannot_be_read_is_an_error():
    with pytest.raises(AssertionError, match=r"not an instruction: .*estimated_cycles"):
        hlo.read(program("copy(%p)", computation("odd", '  "estimated_cycles":"3"\n')))


def test_a_collective_that_runs_beside_a_chain_of_fusions_counts_once():
    """XLA writes it again in the fusions that begin it, run meanwhile and end it."""
    gather = GATHER.replace("\n", ', channel_id=1, frontend_attributes={chain_id="5"}\n')
    other = GATHER.replace("\n", ", channel_id=1\n")
    bodies = {
        "begin": gather,
        "beside": gather + work(7),
        "end": gather,
        "other": other + other.replace("%all", "%more"),
    }
    calls = [f"  %{name} = f32[2]{{0}} fusion(%p), calls=%{name}\n" for name in bodies]
    computations = [computation(name, body) for name, body in bodies.items()]
    found = hlo.read(program("copy(%other)", *computations, before="".join(calls)))
    counted = [(one.chain, one.bytes, one.trips) for one in found.collectives]
    assert (counted, found.cycles) == ([(5, 36, 1), (0, 36, 1), (0, 36, 1)], 7)


def test_the_estimates_of_collectives_are_left_out():
    lines = [line.replace("\n", NOTE + "\n") for line in (SUM, GATHER)]
    text = program(f"all-gather-done(%p){NOTE}", ADD, before="".join(lines) + work(2))
    assert hlo.read(text).cycles == 2


def test_the_bytes_of_a_reduce_scatter_are_those_that_go_in():
    whole = "  %whole = f32[64]{0} copy(%p)\n"
    part = "  %part = f32[8]{0} reduce-scatter(%whole), dimensions={0}, to_apply=%add\n"
    text = program("call(%p), to_apply=%called", ADD, computation("called", whole, part))
    assert found_in(text) == [("reduce-scatter", 256, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_without_loops_and_conditionals_the_sum_is_that_of_all_top_level_estimates(seed):
    draw, computations, expected = random.Random(seed), [], 0

    def new_computation(depth: int, counts: bool) -> str:
        """Writes a computation down and returns its name; it `counts` if no estimate covers it."""
        nonlocal expected
        lines = []
        for _ in range(draw.randrange(5)):
            cycles = draw.choice([0, draw.randrange(1, 10**6)])
            kind = draw.choice(["copy", "call", "fusion", "async-start"] if depth else ["copy"])
            covered = cycles > 0 and kind in ("fusion", "async-start")
            called = "" if kind == "copy" else new_computation(depth - 1, counts and not covered)
            attribute = {"copy": "", "call": f", to_apply=%{called}"}.get(
                kind, f", calls=%{called}"
            )
            note = f', backend_config={{"estimated_cycles":"{cycles}"}}' if cycles else ""
            lines.append(f"  %i{len(lines)} = f32[2]{{0}} {kind}(%p){attribute}{note}\n")
            expected += cycles * counts
        name = f"computation.{len(computations)}"
        computations.append(computation(name, *lines))
        return name

    entry = new_computation(4, True)
    text = program(f"call(%p), to_apply=%{entry}", *computations)
    assert hlo.read(text).cycles == expected

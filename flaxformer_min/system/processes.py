"""Several processes that train as one: how they find each other, what they tell each other.

The numbers go through JAX's collectives, in programs over all devices. Words go through the
key-value store of jax.distributed, which process 0 serves: it takes text of any length, and who
waits there may wait for hours, where a collective gives up (on CPUs after half a minute). All of
it is here, since JAX has no public name for that store. With one process nothing is sent.
"""

import itertools
import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import clusters
from jax._src import distributed as jax_distributed

from flaxformer_min.errors import UserError

CLUSTERS = ("slurm", "gcetpu", "gketpu")  # in which JAX finds the other processes by itself
NAMESPACE = "flaxformer_min"  # of our keys
START = 240  # seconds within which all processes of a run have to be started
# Seconds after which JAX gives up a silent process, in its own words: ending.py is to be earlier.
HEARTBEAT = 240
WEEK = 7 * 24 * 3600 * 1000  # milliseconds: longer than any preparation of a run

T = TypeVar("T")

_turns = itertools.count()
_to_delete: list[str] = []


def initialize(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins the other processes of a run; to be called before JAX is used for anything else.

    `coordinator` is HOST:PORT, where process 0 listens. Without the three, a cluster that JAX knows
    says where everybody is; elsewhere this process is the only one.
    Raises UserError where the three do not fit together, or the others cannot be reached.
    """
    given = (coordinator, processes, process)
    if any(value is None for value in given) and given != (None, None, None):
        raise UserError(
            "--distributed.coordinator, --distributed.processes and --distributed.process belong "
            "together: give all three or none"
        )
    if coordinator is None or processes is None or process is None:
        if _in_a_cluster():
            _join()
        return
    if process >= processes:
        raise UserError(
            f"--distributed.process is {process}: with --distributed.processes {processes} it must "
            f"be from 0 to {processes - 1}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--distributed.coordinator is {coordinator}: it must be HOST:PORT")
    if process > 0:
        _await(coordinator, host.strip("[]"), int(port))
    _join(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=process,
        cluster_detection_method="deactivate",
    )


def _await(coordinator: str, host: str, port: int) -> None:
    """Returns when process 0 listens; JAX, which would wait as long, aborts when it gives up."""
    until = time.monotonic() + START
    while True:
        try:
            socket.create_connection((host, port), timeout=START).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"--distributed.coordinator {coordinator}: process 0 cannot be reached there "
                    f"for {START} seconds: {error.strerror or error}"
                ) from error
        time.sleep(min(1, START))


def _in_a_cluster() -> bool:
    """Whether JAX knows of several processes: SLURM with more than one task, a pod of TPUs."""
    kinds = [kind for kind in clusters.ClusterEnv._cluster_types if kind.name in CLUSTERS]
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    return found is not None and found.get_process_count() > 1


def _join(**where: Any) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot join the other processes of the run: {reason}") from error


def is_first() -> bool:
    """Whether this is process 0, which does what only one may do."""
    return jax.process_index() == 0


def exchange(text: str | None = None) -> dict[int, str]:
    """What each process gave in this call, without those that gave None; waits for all.

    All processes make the same calls in the same order.
    """
    if jax.process_count() == 1:
        return {} if text is None else {0: text}
    folder = f"{NAMESPACE}/gathered/{next(_turns)}/"
    if text is not None:
        client().key_value_set(f"{folder}{jax.process_index()}", text)
    client().wait_at_barrier(f"{NAMESPACE}/gathered", WEEK)
    if is_first():  # all have read what was gathered before
        while _to_delete:
            client().key_value_delete(_to_delete.pop())
    found = {
        int(key.rpartition("/")[2]): value for key, value in client().key_value_dir_get(folder)
    }
    if found:
        _to_delete.append(folder)
    return found


def on_first(work: Callable[[], T]) -> T | None:
    """What `work` returns, in process 0; None in the others, which wait until it is done."""
    result = work() if is_first() else None
    exchange()
    return result


def broadcast(work: Callable[[], T]) -> T:
    """What `work` returns in process 0, in every process; JSON types only."""
    return json.loads(exchange(json.dumps(work()) if is_first() else None)[0])


def compiled_together(function: Any) -> Callable[..., Any]:
    """A jitted function of (state, batch, ...); processes meet when all have compiled a shape.

    Otherwise one that compiles longer than another could keep it waiting in a collective.
    """
    shapes: set[Any] = set()

    def call(state: Any, batch: Any, *arguments: Any) -> Any:
        shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shape not in shapes and jax.process_count() > 1:
            function.lower(state, batch, *arguments).compile()
            exchange()
        shapes.add(shape)
        return function(state, batch, *arguments)

    return call


def post(key: str, text: str = "") -> None:
    """Leaves a word for all, who look for it with `posted`."""
    if jax.process_count() > 1:
        client().key_value_set(f"{NAMESPACE}/posted/{key}", text, allow_overwrite=True)


def posted(folder: str) -> dict[str, str]:
    """What was posted under FOLDER/NAME up to now, by NAME; does not wait."""
    if jax.process_count() == 1:
        return {}
    found = client().key_value_dir_get(f"{NAMESPACE}/posted/{folder}/")
    return {key.rpartition("/")[2]: text for key, text in found}


def client() -> Any:
    """The connection to the key-value store."""
    return jax_distributed.global_state.client

"""Several processes that train as one: how they find each other and how they exchange text.

Arrays go through JAX's collectives, in programs over all devices. Text goes through the key-value
store of jax.distributed, which process 0 serves: it takes text of any length, and a process may
wait there for hours, whereas a collective gives up (on CPUs after half a minute). JAX has no public
name for that store, so all use of it is in this file. With one process nothing is sent.
"""

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import clusters
from jax._src import distributed as jax_distributed

from flaxformer_min.errors import UserError, first_line
from flaxformer_min.system import rendezvous

CLUSTERS = ("slurm", "gcetpu", "gketpu")  # where JAX finds the other processes by itself
NAMESPACE = "flaxformer_min"  # the beginning of this program's keys in the store
# Seconds after which JAX ends a process that hears nothing; system/failures.py ends it earlier.
HEARTBEAT = 240
WEEK = 7 * 24 * 3600 * 1000  # milliseconds: longer than any preparation of a run

T = TypeVar("T")

_leaving = threading.Event()
_turns = itertools.count()  # the number of each exchange
_to_delete: list[str] = []  # folders of exchanges that may not have been read by all yet


def initialize(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins the other processes of a run; has to be called before any other use of JAX.

    Args:
        coordinator: HOST:PORT, where process 0 listens.
        processes: how many processes there are.
        process: the number of this one, from 0.

    If all three are None, a cluster that JAX knows says where the processes are; elsewhere this
    process is the only one.
    Raises UserError if the three do not fit together, and TimeoutError if not all processes come.
    """
    if coordinator is None and processes is None and process is None:
        if (cluster := _cluster()) is not None:
            coordinator = cluster.get_coordinator_address(rendezvous.PATIENCE, None)
            _join(coordinator, cluster.get_process_count(), cluster.get_process_id())
        return
    if coordinator is None or processes is None or process is None:
        raise UserError(
            "--distributed.coordinator, --distributed.processes and --distributed.process belong "
            "together: give all three or none"
        )
    if process >= processes:
        raise UserError(
            f"--distributed.process is {process}: with --distributed.processes {processes} it must "
            f"be from 0 to {processes - 1}"
        )
    _join(coordinator, processes, process, cluster_detection_method="deactivate")


def _cluster() -> Any:
    """The cluster of several processes, SLURM or a pod, in which JAX finds itself, if any."""
    kinds = [kind for kind in clusters.ClusterEnv._cluster_types if kind.name in CLUSTERS]
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    return found if found is not None and found.get_process_count() > 1 else None


def _join(coordinator: str, processes: int, process: int, **more: Any) -> None:
    try:
        if process == 0:
            rendezvous.gather(coordinator, processes)
        else:
            rendezvous.come(coordinator, process)
            coordinator = rendezvous.relay(coordinator, _lost)
    except ValueError as error:
        raise UserError(str(error)) from error
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    where: dict[str, Any] = {"num_processes": processes, "process_id": process, **more}
    try:
        jax.distributed.initialize(coordinator, **where, heartbeat_timeout_seconds=HEARTBEAT)
    except Exception as error:
        raise UserError(
            f"cannot join the other processes of the run: {first_line(error)}"
        ) from error


def _lost() -> None:
    """Ends this process if process 0 was not expected to go."""
    if not _leaving.is_set():
        print("error: process 0 has died: its connection broke", file=sys.stderr, flush=True)
        os._exit(1)


def leave() -> None:
    """Says that this process is about to end, so that process 0 may go first."""
    _leaving.set()


def is_first() -> bool:
    """Whether this is process 0, which does whatever only one process may do."""
    return jax.process_index() == 0


def exchange(text: str | None = None) -> dict[int, str]:
    """Gives a text to all processes and returns the texts of all, by the number of the process.

    A process that gives None is left out. The call waits until every process has called; all
    processes have to make the same calls in the same order.
    """
    if jax.process_count() == 1:
        return {} if text is None else {0: text}
    folder = f"{NAMESPACE}/exchange/{next(_turns)}/"
    if text is not None:
        _write(folder, text)
    _store().wait_at_barrier(f"{NAMESPACE}/exchange", WEEK)
    while is_first() and _to_delete:  # a process that is here has read all earlier exchanges
        _store().key_value_delete(_to_delete.pop())
    texts = _read(folder)
    if texts:
        _to_delete.append(folder)
    return texts


def on_first(work: Callable[[], T]) -> T | None:
    """Calls `work` in process 0 and returns its result there; the other processes wait for it.

    They return None.
    """
    result = work() if is_first() else None
    exchange()
    return result


def broadcast(work: Callable[[], T]) -> T:
    """Calls `work` in process 0 and returns its result, of JSON types, in every process."""
    return json.loads(exchange(json.dumps(work()) if is_first() else None)[0])


def compiled_together(function: Any) -> Callable[..., Any]:
    """Makes a jitted function of (state, batch, ...) wait until all processes have compiled it.

    It waits once for each shape of the batch. Otherwise a process that compiles longer than another
    could keep that one waiting in a collective, which gives up.
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


def post(topic: str, text: str = "") -> None:
    """Publishes this process's text on a topic, in place of its earlier one; waits for nobody."""
    if jax.process_count() > 1:
        _write(f"{NAMESPACE}/posted/{topic}/", text)


def read_posts(topic: str) -> dict[int, str]:
    """Returns the texts on a topic up to now, by the number of the process; waits for nobody."""
    return _read(f"{NAMESPACE}/posted/{topic}/") if jax.process_count() > 1 else {}


def _write(folder: str, text: str) -> None:
    """Stores a text under FOLDER/NUMBER, the number of this process."""
    _store().key_value_set(f"{folder}{jax.process_index()}", text, allow_overwrite=True)


def _read(folder: str) -> dict[int, str]:
    """Returns the texts under FOLDER/NUMBER, by number."""
    found = _store().key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): text for key, text in found}


def _store() -> Any:
    """Returns the connection to the key-value store."""
    return jax_distributed.global_state.client

"""Measures examples/service.py: python -m benchmarks.service DIR [--requests 1000] [--clients 8].

The service starts without and with its warm-up, each with an empty folder for compiled programs
and with a filled one, and the seconds to its first answer are printed. The last of the four then
answers requests of one line each, of mixed lengths, one after another, and the same lines from
several clients at once. The service logs what JAX compiles, so that the program can say how much
that was after warm-up. A quiet machine is needed.
"""

import argparse
import http.client
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LENGTHS = 1, 60  # words of the shortest and the longest line
WORDS = ["39", "weeks", "and", "2", "days", "EUR", "Monday", "Germany", "7", "October", "2019"]
SERVICE = ROOT / "examples" / "service.py"
NO_WARM_UP = f"""
import runpy
from flaxformer_min import Translator
Translator.warm_up = lambda *_, **__: []
runpy.run_path({str(SERVICE)!r}, run_name="__main__")
"""


class Service:
    """A service that runs; `seconds` passed from its start to its first answer."""

    def __init__(self, directory: str, cache: Path, *, warm: bool) -> None:
        program = [str(SERVICE)] if warm else ["-c", NO_WARM_UP]
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_LOG_COMPILES": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, *program, directory, "0"],
            env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        said = self.process.stdout.readline() if self.process.stdout else ""
        if not said.startswith("http"):
            raise RuntimeError(f"the service did not start: {self.logged()[-500:]}")
        self.port, self.ready = int(said.rpartition(":")[2]), time.perf_counter() - start
        self.ask(http.client.HTTPConnection("localhost", self.port), "39 weeks")
        self.seconds = time.perf_counter() - start

    def ask(self, connection: http.client.HTTPConnection, line: str) -> float:
        """Asks for one translation; returns the seconds that it took."""
        start = time.perf_counter()
        connection.request("POST", "/", line.encode())
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        return time.perf_counter() - start

    def logged(self) -> str:
        self.log.flush()
        self.log.seek(0)
        text = self.log.read()
        self.log.seek(0, os.SEEK_END)
        return text

    def compiled(self) -> int:
        return self.logged().count("Finished XLA compilation")

    def memory(self) -> int:
        """The resident memory, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dir")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(*LENGTHS))) for _ in range(given.requests)]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for name, warm, where in (
            ("cold, nothing compiled, no warm-up", False, cache / "first"),
            ("cold, nothing compiled, warm-up", True, cache / "second"),
            ("compiled programs there, no warm-up", False, cache / "second"),
            ("compiled programs there, warm-up", True, cache / "second"),
        ):
            service = Service(given.dir, where, warm=warm)
            ready, first = service.ready, service.seconds
            print(f"{name}: ready after {ready:.1f} s, first answer after {first:.1f} s")
            if where.name == "second" and warm and name.startswith("compiled"):
                report(service, lines, given.clients)
            service.end()


def report(service: Service, lines: list[str], clients: int) -> None:
    """Prints latencies, requests a second, compilations after warm-up and memory."""
    before = service.compiled()
    connection = http.client.HTTPConnection("localhost", service.port)
    times = [service.ask(connection, line) for line in lines]
    hundredths = statistics.quantiles(times, n=100)
    print(f"{len(lines)} requests of one line, one after another: ", end="")
    print(f"median {1000 * hundredths[49]:.0f} ms, 99th {1000 * hundredths[98]:.0f} ms")
    start = time.perf_counter()
    threads = [
        threading.Thread(target=ask_all, args=(service, lines[n::clients])) for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(lines) / (time.perf_counter() - start)
    print(f"{clients} clients at once: {rate:.1f} requests/s")
    print(f"programs compiled or read in all these requests: {service.compiled() - before}")
    print(f"memory at the end: {service.memory()} MB")


def ask_all(service: Service, lines: list[str]) -> None:
    connection = http.client.HTTPConnection("localhost", service.port)
    for line in lines:
        service.ask(connection, line)


if __name__ == "__main__":
    main()

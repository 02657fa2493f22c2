"""What an experiment found."""

import sys
import time
from collections import Counter
from collections.abc import Iterable


class Tally:
    """Counts trials; one passes if nothing was wrong with it."""

    def __init__(self, name: str) -> None:
        self.name, self.tried, self.failures = name, 0, list[str]()
        self.seen: Counter[str] = Counter()  # what the trials hit
        self.notes: list[str] = []
        self._begun = self._ended = time.monotonic()

    def trial(self, name: str, problems: Iterable[str] = (), *, seen: str | None = None) -> None:
        """One trial more; what went wrong in it is said at once."""
        self.tried += 1
        self._ended = time.monotonic()
        if seen is not None:
            self.seen[seen] += 1
        if found := "; ".join(problems):
            self.failures.append(f"{name}: {found}")
            print(f"{self.name}: FAILED: {self.failures[-1]}", file=sys.__stderr__, flush=True)

    @property
    def row(self) -> list[str]:
        """Experiment, tried, passed, what was seen."""
        seen = [f"{count} {what}" for what, count in sorted(self.seen.items())]
        seconds = f"{self._ended - self._begun:.0f} s"
        passed = self.tried - len(self.failures)
        return [self.name, str(self.tried), str(passed), "; ".join([*seen, *self.notes, seconds])]


def table(rows: list[list[str]]) -> str:
    """A Markdown table."""
    head = ["experiment", "tried", "passed", "what was seen"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

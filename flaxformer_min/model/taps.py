"""Taps: what a reader wants to see of a forward pass, taken from the pass itself.

A tap is a dict that the caller hands in. Each part of the model puts what it computed under a name
of its own, and hands the parts inside it a dict of theirs, so that the names are paths such as
taps["decoder"]["cross_attention"]["weights"]. Without a dict, nothing is kept and nothing costs.
"""

from typing import Any

Taps = dict[str, Any] | None


def inside(taps: Taps, name: str) -> Taps:
    """The dict of a part that has this name; None if nobody looks."""
    return None if taps is None else taps.setdefault(name, {})


def note(taps: Taps, name: str, value: Any) -> None:
    """Keeps a value under this name if somebody looks."""
    if taps is not None:
        taps[name] = value

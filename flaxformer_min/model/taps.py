"""Taps: dicts that collect values from inside a forward pass, such as attention weights.

The caller hands in an empty dict. Each part of the model stores what it computed under a name of
its own, and hands the parts inside it a nested dict, so that the names are paths such as
taps["decoder"]["cross_attention"]["weights"]. With None instead of a dict, nothing is stored, and
it costs nothing.
"""

from typing import Any

Taps = dict[str, Any] | None


def inside(taps: Taps, name: str) -> Taps:
    """Returns the nested dict of the part with this name, or None if `taps` is None."""
    return None if taps is None else taps.setdefault(name, {})


def note(taps: Taps, **values: Any) -> None:
    """Stores each value under its name, unless `taps` is None."""
    if taps is not None:
        taps.update(values)

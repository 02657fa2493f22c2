"""Exact match on held-out phrases."""

from benchmarks.exact_match import exact_match_by_category
from flaxformer_min.data.phrases import Phrase


def test_exact_match_is_counted_by_category() -> None:
    phrases = [
        Phrase("in 2 weeks", "in 2 Wochen", "relative time"),
        Phrase("May", "Mai", "list"),
        Phrase("March", "M\xe4rz", "list"),
    ]
    hypotheses = ["in 2 Wochen", "Mai", "Marz"]
    assert exact_match_by_category(hypotheses, phrases) == {"relative time": 1.0, "list": 0.5}

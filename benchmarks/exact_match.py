"""How many held-out phrases a model translates exactly, for each kind of phrase."""

import collections
from collections.abc import Iterable

from flaxformer_min.data.phrases import Phrase


def exact_match_by_category(
    hypotheses: Iterable[str], phrases: Iterable[Phrase]
) -> dict[str, float]:
    """For each category the share, 0 to 1, of phrases whose hypothesis is the target, exactly."""
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    for hypothesis, (_, target, category) in zip(hypotheses, phrases, strict=True):
        hits[category].append(hypothesis == target)
    return {category: sum(matches) / len(matches) for category, matches in hits.items()}

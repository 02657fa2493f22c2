"""What a search found as a caller gets it: text, score and tokens of each line, without padding."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.decoding.sentences import NO_SENTENCE, Sentence
from flaxformer_min.model.attention import AttentionWeights


@dataclasses.dataclass(frozen=True)
class Translation:
    """The translation of a line.

    score is log_prob, in nats, divided by the length penalty. tokens end in EOS unless the length
    limit came first; then finished is False. The translation of a blank line has no tokens and
    score 0.
    """

    text: str
    score: float
    log_prob: float
    tokens: tuple[int, ...]
    finished: bool
    source: tuple[int, ...] = ()  # the ids that the model read, EOS included: a long line is cut
    others: tuple["Translation", ...] = ()  # the next best, at most n_best - 1 of them
    # Only if asked for: weights [L, H, queries, keys] of each site, without padding.
    attention: AttentionWeights | None = dataclasses.field(default=None, compare=False, repr=False)


EMPTY = Translation("", 0.0, 0.0, (), True)


class TokenScores(NamedTuple):
    """The log-probability of each token of a target, EOS included, in nats."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


def translations(
    tokenizer: Tokenizer,
    sentences: Sequence[Sentence],
    found: Hypotheses,
    weights: Sequence[AttentionWeights] | None,
) -> Iterator[tuple[int, Translation]]:
    """Yields each sentence's place and best hypothesis, which holds all others in `others`.

    `found` and `weights` are those of a batch of these sentences; weights are by rank.
    """

    def hypothesis(row: int, rank: int) -> Translation:
        source, here = tuple(sentences[row].source), (row, rank)
        tokens = tuple(found.tokens[row, rank, : found.lengths[here]].tolist())
        attention = None
        if weights is not None:
            attention = _without_padding(weights[rank], row, len(source), len(tokens))
        return Translation(
            text=tokenizer.decode(tokens),
            score=float(found.scores[here]),
            log_prob=float(found.log_probs[here]),
            tokens=tokens,
            finished=bool(found.finished[here]),
            source=source,
            attention=attention,
        )

    for row, sentence in enumerate(sentences):
        if sentence is not NO_SENTENCE:
            count = max(1, int(np.sum(found.lengths[row] > 0)))
            best, *others = (hypothesis(row, rank) for rank in range(count))
            yield sentence.place, dataclasses.replace(best, others=tuple(others))


def _without_padding(
    weights: AttentionWeights, row: int, source: int, target: int
) -> AttentionWeights:
    """Cuts the weights of one row, [L, H, queries, keys], to these lengths of source and target."""
    return AttentionWeights(
        weights.encoder[row, :, :, :source, :source].copy(),
        weights.decoder[row, :, :, :target, :target].copy(),
        weights.cross[row, :, :, :target, :source].copy(),
    )

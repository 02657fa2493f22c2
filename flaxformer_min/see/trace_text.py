"""A trace as text for a terminal of 80 columns."""

import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from flaxformer_min.see.record import ARRAYS, Trace, axes, digest

WIDTH = 80
KEYS = 32  # columns of an attention picture at most; longer sentences share columns
SHADES = ((0.7, "█"), (0.4, "▓"), (0.2, "▒"), (0.04, "░"), (0.0, " "))
ASCII = str.maketrans("█▓▒░▁·…", "#*+:_..")
HEAD = f"{'':23}{'shape':<16}{'first three values':>24}{'mean':>8}{'std':>8}"
# The parts of a layer in their order, with what they read: their own x, and the keys' source.
LAYERS = {
    "encoder": {"self_attention": "x", "feed_forward": "H1"},
    "decoder": {"self_attention": "y", "cross_attention": "H1", "feed_forward": "H2"},
}


def to_text(trace: Trace) -> str:
    """Returns the whole trace, in lines of at most 80 columns."""
    parts = _tokens, _embedding, _layers, _next_tokens
    return "\n".join(line.rstrip() for part in parts for line in part(trace))


def printable(text: str, encoding: str) -> str:
    """Returns a text as a terminal of this encoding can show it, with other signs in its place."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    return text


def width(text: str) -> int:
    """Returns how many columns of a terminal a text takes: 2 for wide characters, 0 for accents."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def fit(text: str, columns: int) -> str:
    """Returns a text on exactly so many columns: padded, or cut with an ellipsis at its end.

    A character that a terminal would not show is a blank or U+00B7.
    """
    text = "".join(c if c.isprintable() else " " if c.isspace() else "·" for c in text)
    if width(text) > columns:
        while width(text) >= columns:
            text = text[:-1]
        text += "…"
    return text + " " * (columns - width(text))


def flow(items: Sequence[str], gap: str = "  ") -> Iterator[str]:
    """Yields lines of at most 80 columns that hold the items, as many as fit on each."""
    line = ""
    for item in items:
        item = fit(item, min(width(item), WIDTH - 2))
        if width(line + gap + item) > WIDTH - 2:
            yield "  " + line
            line = ""
        line += gap + item if line else item
    yield "  " + line


def _tokens(trace: Trace) -> Iterator[str]:
    sides = {"source": (trace.text, trace.source), "target": (trace.translation, trace.target)}
    for name, (text, side) in sides.items():
        yield f"The {name}: text, pieces and ids (5.1)"
        yield from flow(text.split(" "), " ")
        pieces = zip(side.pieces, side.ids, strict=True)
        yield from flow([f"{n} {piece} ({i})" for n, (piece, i) in enumerate(pieces, 1)])
    yield "Sizes: L layers, S source tokens, T target tokens, the others as in the paper"
    yield from flow([f"{letter} = {size:,}" for letter, size in trace.sizes.items()])


def _embedding(trace: Trace) -> Iterator[str]:
    for part, x in (("encoder", "x"), ("decoder", "y")):
        yield from ("", f"Embedding and position of the {part}'s input (3.4, 3.5)", HEAD)
        yield from (_array(trace, f"{part}/{n}", x=x) for n in ("embedding", "positions", "input"))
    root = trace.config.d_model**0.5
    yield f"  sqrt(D) = {root:.2f}. The decoder reads the target shifted right by one:"
    yield from flow([f"{n} {piece}" for n, piece in enumerate(trace.target_in, 1)])


def _layers(trace: Trace) -> Iterator[str]:
    for part, inside in LAYERS.items():
        for layer in range(trace.config.num_layers):
            for n, (name, x) in enumerate(inside.items(), 1):
                title = f"{part.title()} layer {layer + 1}, {name.replace('_', '-')} (3.1 to 3.3)"
                yield from ("", title, HEAD)
                c = "C" if name == "cross_attention" else x
                yield from _site(trace, f"{part}/{name}", layer, {"x": x, "c": c, "h": f"H{n}"})
        name = "C, the memory" if part == "encoder" else "D, the states"
        yield _array(trace, f"{part}/states", h=name)
    yield _array(trace, "logits", x="D")


def _site(trace: Trace, site: str, layer: int, names: dict[str, str]) -> Iterator[str]:
    """Yields the lines of one sublayer, its residual connection and the picture of its weights."""
    for name in ARRAYS:
        if f"{site}/{name}" in trace.arrays:
            yield _array(trace, f"{site}/{name}", layer, **names)
    if not site.endswith("attention"):
        return
    queries, keys = trace.sides(site)
    weights = trace.arrays[f"{site}/weights"][layer].mean(axis=0)
    share = -(-len(keys) // KEYS)  # neighbouring keys in one column, which shows the largest
    grouped = np.maximum.reduceat(weights, range(0, len(keys), share), axis=1)
    yield f"  A, mean of the heads: rows are queries, {share} key a column, · is masked"
    for query, row, cells in zip(queries, weights, grouped, strict=True):
        order = [k for k in np.argsort(-row, kind="stable")[:2] if row[k] >= 0.005]
        best = "  ".join(f"{keys[k]} {row[k]:.0%}" for k in order)
        picture = "".join(map(_shade, cells.tolist()))
        yield f"  {fit(query, 12)} |{picture}|  {fit(best, WIDTH - 19 - len(picture))}"


def _shade(weight: float) -> str:
    """Returns a block for a weight; a masked key, whose weight is exactly 0, is a dot."""
    return "·" if weight == 0 else next(shade for least, shade in SHADES if weight >= least)


def _array(trace: Trace, path: str, layer: int | None = None, **names: str) -> str:
    """Returns the line of one array: its name, its shape by letters and a few numbers."""
    array, letters = trace.arrays[path], axes(path)
    if layer is not None:
        array, letters = array[layer], letters[1:]
    shape = " ".join(f"{letter}={trace.sizes[letter]}" for letter in letters)
    about = digest(array)
    first = "".join(map(_number, about["first"]))
    label = ARRAYS[path.split("/")[-1]][1].format(**names)
    return (
        f"  {fit(label, 21)}{shape:<16}{first:>24}{_number(about['mean'])}{_number(about['std'])}"
    )


def _number(x: float) -> str:
    """Returns a number on 8 columns."""
    return f"{x:8.3f}" if abs(x) < 99.9 else f"{x:8.1f}" if abs(x) < 9999 else f"{x:8.0e}"


def _next_tokens(trace: Trace) -> Iterator[str]:
    yield from ("", "Next token: the five likeliest after each token read, in percent (3.4)")
    for n, (read, row) in enumerate(zip(trace.target_in, trace.likeliest, strict=True), 1):
        cells = "".join(f" {fit(each.piece, 6)}{each.probability:6.2%}"[:-1] for each in row)
        yield f"{n:>3} {fit(read, 8)} {cells}"
    total, count = sum(trace.log_probs), len(trace.log_probs)
    yield f"log p(target | source) = {total:.6f} nats: {count} tokens, EOS included"

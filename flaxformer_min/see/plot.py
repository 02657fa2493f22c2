"""Draws figures: positions, masks, learning rates, curves of runs, attention. It needs matplotlib.

Blue and copper mean plus and minus; both, and the colours of curves, can be told apart by readers
who see few colours. A hatched cell is masked.
"""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxformer_min.errors import UserError
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.see.record import Trace, writing
from flaxformer_min.see.runs import read_metrics, series
from flaxformer_min.training.optimizer import warmup_inverse_sqrt

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
except ImportError:
    raise UserError(
        "plot needs matplotlib: pip install 'flaxformer_min[plot]' -c constraints.txt"
    ) from None

BLUE, COPPER, GREY = "#2166ac", "#b2622d", "#8c8c8c"
DIVERGING = LinearSegmentedColormap.from_list("copper-blue", ["#8a4513", "#f7f5f2", "#1b4f8a"])
SEQUENTIAL = LinearSegmentedColormap.from_list("paper-blue", ["#f7f5f2", "#1b4f8a"])
LINES = [BLUE, COPPER, "#1a1a1a", "#7b9fc9", "#d9a77f"]  # then again, dashed and dotted
STYLE = {
    "axes.titlesize": 11,
    "axes.labelpad": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.color": "#8c8c8c",
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}
_log = logging.getLogger(__name__)

SITES = {
    "encoder": ("encoder/self_attention", "Self-attention in the encoder"),
    "decoder": ("decoder/self_attention", "Self-attention in the decoder"),
    "cross": ("decoder/cross_attention", "Attention to the encoder's output"),
}


@matplotlib.rc_context(STYLE)
def save(figure: Figure, path: str) -> None:
    """Writes a figure as PNG or SVG, by the name's ending; warns if the font lacks a character.

    Raises UserError if the file cannot be written.
    """
    with warnings.catch_warnings(record=True) as caught, writing(path):
        warnings.simplefilter("always")
        figure.savefig(path, dpi=160)
    if path.endswith(".png") and any("missing from" in str(each.message) for each in caught):
        _log.warning("%s: the font lacks some characters, which an .svg would show", path)


@matplotlib.rc_context(STYLE)
def positions(length: int = 50, shown: int = 64, d_model: int = 512) -> Figure:
    """Draws the first `shown` of D dimensions of the sinusoidal encoding of `length` positions."""
    figure = Figure((8, 4.5))
    axes = figure.subplots()
    table = sinusoidal_positions(length, d_model)[:, :shown]
    image = axes.imshow(table, cmap=DIVERGING, vmin=-1, vmax=1, aspect="auto")
    axes.set(xlabel=f"dimension (the first {shown} of {d_model})", ylabel="position in tokens")
    axes.set_title("Positional encoding: even dimensions are sines, odd ones cosines")
    figure.colorbar(image, ax=axes, label="PE(position, dimension)", ticks=[-1, 0, 1])
    return figure


@matplotlib.rc_context(STYLE)
def masks(pieces: Sequence[str] = ("<s>", "ich", "liebe", "dich", "pad", "pad")) -> Figure:
    """Draws the padding mask, the causal mask and both together; `pad` stands for padding."""
    ids = jnp.array([[piece != "pad" for piece in pieces]], jnp.int32)
    padding, causal = padding_mask(ids), causal_mask(len(pieces))
    grids = {"padding": padding, "causal": causal, "both: the decoder's": padding & causal}
    figure = Figure((9, 3.6))
    for axes, (name, mask) in zip(figure.subplots(1, 3), grids.items(), strict=True):
        allowed = np.broadcast_to(mask[0, 0], (len(pieces), len(pieces)))
        _matrix(axes, allowed * 0.8, ~allowed)
        for edge in range(1, len(pieces)):
            axes.axhline(edge - 0.5, color="white", linewidth=1)
            axes.axvline(edge - 0.5, color="white", linewidth=1)
        _label(axes, pieces, pieces, 9.0)
        axes.set(title=name, xlabel="key")
        axes.set_ylabel("query" if name == "padding" else "")
    figure.suptitle("A query may attend to the filled keys; hatched ones are masked", fontsize=11)
    return figure


@matplotlib.rc_context(STYLE)
def schedule(warmups: Sequence[int] = (4000,), steps: int = 100_000, d_model: int = 512) -> Figure:
    """Draws the paper's learning rate over steps for several numbers of warm-up steps."""
    figure = Figure((8, 4.5))
    axes = figure.subplots()
    # Steps that are dense where the rate rises, and each peak itself.
    counts = np.unique([*np.geomspace(1, steps, 500).round(), *(w for w in warmups if w <= steps)])
    for n, warmup in enumerate(sorted(warmups)):
        rates = warmup_inverse_sqrt(d_model, warmup)(counts - 1)
        peak = (d_model * warmup) ** -0.5
        axes.plot(counts, rates, **_line(n), label=f"{warmup:,} steps, peak {peak:.2e}")
    axes.set(xlabel="step", ylabel="learning rate", xlim=(0, steps), ylim=0)
    axes.set_title(f"Learning rate for D = {d_model}: linear warm-up, then step^-0.5")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    axes.legend(title="warm-up", frameon=False)
    return figure


@matplotlib.rc_context(STYLE)
def curves(workdirs: Sequence[str]) -> Figure:
    """Draws loss and, where it was measured, BLEU over the steps of one or several runs.

    Raises UserError for a directory without a readable metrics.jsonl.
    """
    figure = Figure((9, 4.5))
    left, right = figure.subplots(1, 2, sharex=True)
    for n, workdir in enumerate(workdirs):
        name, rows = Path(workdir).absolute().name, read_metrics(Path(workdir))
        style, measured = _line(n), _line(n) | {"marker": "o"}
        left.plot(*series(rows, "train", "loss"), **style, alpha=0.6, label=f"{name}, training")
        left.plot(
            *series(rows, "validation", "validation_loss"), **measured, label=f"{name}, validation"
        )
        right.plot(*series(rows, "validation", "bleu"), **measured, label=name)
    left.set(title="Loss (training: with label smoothing)", ylabel="nats per target token")
    right.set(title="Validation BLEU", ylabel="BLEU")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


@matplotlib.rc_context(STYLE)
def attention(trace: Trace, site: str, layer: int | None = None, head: int | None = None) -> Figure:
    """Draws the attention weights of a site: all layers and heads, or one of either, from 1.

    Raises UserError for a layer or head that the model does not have.
    """
    name, title = SITES[site]
    weights, (queries, keys) = trace.arrays[f"{name}/weights"], trace.sides(name)
    layers = _chosen("--layer", layer, weights.shape[0])
    heads = _chosen("--head", head, weights.shape[1])
    side = 6.0 if len(layers) * len(heads) == 1 else 2.4
    figure = Figure((side * len(heads) + 1.6, side * len(layers) + 1.4))
    panels = figure.subplots(len(layers), len(heads), squeeze=False)
    hidden = np.triu(np.ones(weights.shape[2:], bool), 1) & (site == "decoder")
    size = min(9.0, 54 * side / max(len(queries), len(keys)))  # points, 72 an inch
    for (row, column), axes in np.ndenumerate(panels):
        _matrix(axes, weights[layers[row], heads[column]], hidden)
        below = keys if row == len(layers) - 1 else ()
        _label(axes, queries if column == 0 else (), below, size)
        axes.set_title(f"layer {layers[row] + 1}, head {heads[column] + 1}", fontsize=9)
    figure.suptitle(f"{title}: rows are queries, columns are keys", fontsize=11)
    about = "weight; the row of a query sums to 1"
    figure.colorbar(panels[0, 0].images[0], ax=panels, label=about, aspect=40)
    return figure


@matplotlib.rc_context(STYLE)
def alignment(trace: Trace) -> Figure:
    """Draws which source pieces the last decoder layer attends to as it writes each target piece.

    The weights are the mean of the heads, in percent.
    """
    weights = trace.arrays["decoder/cross_attention/weights"][-1].mean(axis=0)
    rows, columns = trace.target.pieces, trace.source.pieces
    cell = 0.34 if len(columns) <= 30 else 0.2
    figure = Figure((cell * len(columns) + 3, cell * len(rows) + 2))
    axes = figure.subplots()
    _matrix(axes, weights, np.zeros(weights.shape, bool))
    _label(axes, rows, columns, cell * 26)
    for (row, column), weight in np.ndenumerate(weights):
        if weight >= 0.1:
            color = "white" if weight > 0.55 else "black"
            place = {"ha": "center", "va": "center"}
            axes.text(column, row, f"{100 * weight:.0f}", color=color, fontsize=cell * 24, **place)
    axes.set(xlabel="source piece", ylabel="target piece that is written")
    axes.set_title("Attention of the last decoder layer to the source, in percent")
    figure.colorbar(axes.images[0], ax=axes, label="weight, mean of the heads", aspect=30)
    return figure


def _line(n: int) -> dict[str, Any]:
    """Returns the colour and dashes of curve number n."""
    dashes = ["-", "--", ":"][n // len(LINES) % 3]
    return {"color": LINES[n % len(LINES)], "linestyle": dashes, "linewidth": 1.8}


def _matrix(axes: Axes, weights: np.ndarray, hidden: np.ndarray) -> None:
    """Draws weights with the first row on top; hidden cells show the hatched ground."""
    axes.patch.set(hatch="/////", facecolor="white", edgecolor=GREY)
    axes.spines[:].set_visible(True)
    shown = np.ma.array(weights, mask=hidden)
    axes.imshow(shown, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")


def _label(axes: Axes, rows: Sequence[str], columns: Sequence[str], size: float) -> None:
    """Writes a piece beside each row and below each column; none where they would be unreadable."""
    how: dict[str, Any] = {"fontsize": size, "parse_math": False}  # "$" is a dollar
    rows, columns = (pieces if size >= 4 else () for pieces in (rows, columns))
    axes.set_yticks(range(len(rows)), rows, **how)
    axes.set_xticks(range(len(columns)), columns, rotation=90, **how)
    axes.tick_params(length=0)


def _chosen(flag: str, number: int | None, count: int) -> list[int]:
    """Returns the indices of one layer or head, or of all of them."""
    if number is not None and number > count:
        raise UserError(f"{flag} {number}: the model has {count}, counted from 1")
    return list(range(count)) if number is None else [number - 1]

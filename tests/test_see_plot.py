"""Figures show the numbers that they say they show, and are written as PNG and SVG."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flaxformer_min import cli
from flaxformer_min.config import ModelConfig
from flaxformer_min.errors import UserError
from flaxformer_min.model.positions import sinusoidal_positions
from flaxformer_min.see import plot
from flaxformer_min.see.record import Side, Trace

ROOT = Path(__file__).parent.parent
L, H, S, T = 2, 3, 5, 7


@pytest.fixture
def trace() -> Trace:
    """Random weights, with pieces that a careless label would take for formulas."""
    rng = np.random.default_rng(1)
    shapes = {"encoder/self": (S, S), "decoder/self": (T, T), "decoder/cross": (T, S)}
    arrays = {
        f"{site}_attention/weights": rng.dirichlet(np.ones(keys), (L, H, queries)).astype("f")
        for site, (queries, keys) in shapes.items()
    }
    source = Side(["▁a", "$", "x_1$", "\\frac", "</s>"], [5, 6, 7, 8, 3])
    target = Side(["▁b", "$", "^2$", "{", "c", "d", "</s>"], [4, 6, 7, 8, 9, 5, 3])
    target_in = ["<s>", *target.pieces[:-1]]
    return Trace("a", "b", ModelConfig(), source, target, target_in, [], [], arrays)


def image(axes) -> np.ma.MaskedArray:
    return axes.images[0].get_array()


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.run
def test_positions_are_those_of_the_model():
    axes = plot.positions(11, 6, 26).axes[0]
    np.testing.assert_array_equal(image(axes), sinusoidal_positions(11, 26)[:, :6])
    assert axes.images[0].get_clim() == (-1, 1)
    assert "of 26" in axes.get_xlabel()


def test_masks_hide_padding_the_future_and_both():
    padding, causal, both = plot.masks(["a", "b", "pad"]).axes
    assert np.ma.getmaskarray(image(padding)).tolist() == [[False, False, True]] * 3
    hidden = [[False, True, True], [False, False, True], [False, False, False]]
    assert np.ma.getmaskarray(image(causal)).tolist() == hidden
    assert np.ma.getmaskarray(image(both)).tolist() == [*hidden[:2], [False, False, True]]
    assert padding.patch.get_hatch()


def test_the_schedule_rises_to_the_papers_peak_and_falls():
    lines = plot.schedule([4000, 1000], 100_000, 512).axes[0].lines
    for line, warmup in zip(lines, (1000, 4000), strict=True):
        steps, rates = line.get_data()
        assert steps[np.argmax(rates)] == warmup
        assert max(rates) == pytest.approx((512 * warmup) ** -0.5, rel=1e-6)
        assert (steps[0], steps[-1]) == (1, 100_000)
        assert rates[0] == pytest.approx(512**-0.5 * warmup**-1.5, rel=1e-6)
    assert len({line.get_color() for line in lines}) == 2


def test_curves_are_those_of_the_logs_with_gaps_for_what_is_not_finite(tmp_path):
    rows = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": None}]
    rows += [{"step": 2, "validation_loss": 3.5, "bleu": {"score": 7.25}}]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    left, right = plot.curves([str(tmp_path / "one"), str(tmp_path / "two")]).axes
    training, validation = left.lines[:2]
    assert training.get_xdata().tolist() == [1, 2] and np.isnan(training.get_ydata()[1])
    assert validation.get_xydata().tolist() == [[2, 3.5]]
    assert right.lines[1].get_xydata().tolist() == [[2, 7.25]]
    assert left.lines[0].get_color() != left.lines[2].get_color()
    (tmp_path / "one" / "metrics.jsonl").write_text("{")
    for name, message in (("one", "not a log of this program"), ("no", "give the workdir")):
        with pytest.raises(UserError, match=message):
            plot.curves([str(tmp_path / name)])


@pytest.mark.run
@pytest.mark.parametrize("site", plot.SITES)
def test_attention_has_a_panel_for_each_layer_and_head(trace, site):
    figure = plot.attention(trace, site)
    panels = figure.axes[: L * H]
    weights = trace.arrays[f"{plot.SITES[site][0]}/weights"]
    for n, axes in enumerate(panels):
        np.testing.assert_array_equal(image(axes).data, weights[n // H, n % H])
        future = np.triu(np.ones(weights.shape[2:], bool), 1) & (site == "decoder")
        np.testing.assert_array_equal(np.ma.getmaskarray(image(axes)), future)
    queries, keys = trace.sides(plot.SITES[site][0])
    assert labels(panels[0].yaxis) == queries and labels(panels[-1].xaxis) == keys
    one = plot.attention(trace, site, layer=2, head=3).axes[0]
    np.testing.assert_array_equal(image(one).data, weights[1, 2])


def test_a_layer_or_head_that_is_not_there_is_an_error_of_the_user(trace):
    for choice, message in (({"layer": 3}, "--layer 3: the model has 2"), ({"head": 4}, "has 3")):
        with pytest.raises(UserError, match=message):
            plot.attention(trace, "cross", **choice)


@pytest.mark.run
def test_alignment_is_the_mean_of_the_last_layers_heads_beside_what_is_written(trace, tmp_path):
    figure = plot.alignment(trace)
    weights = trace.arrays["decoder/cross_attention/weights"][-1].mean(axis=0)
    np.testing.assert_array_equal(image(figure.axes[0]).data, weights)
    assert labels(figure.axes[0].yaxis) == trace.target.pieces
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        plot.save(figure, str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "x_1$" in (tmp_path / "a.svg").read_text("utf-8")
    with pytest.raises(UserError, match="No such file"):
        plot.save(figure, str(tmp_path / "no" / "a.png"))


@pytest.mark.run
def test_a_character_that_the_font_lacks_is_a_warning(trace, tmp_path, caplog):
    trace.target.pieces[0] = "世界"
    plot.save(plot.alignment(trace), str(tmp_path / "a.svg"))
    assert caplog.text == ""
    plot.save(plot.alignment(trace), str(tmp_path / "a.png"))
    assert "the font lacks some characters" in caplog.text


def test_every_figure_is_a_verb(finished, tmp_path, capsys):
    for words in (
        ["positions"],
        ["masks"],
        ["schedule", "--warmups", "100", "400", "--steps", "999", "--d-model", "64"],
        ["curves", finished],
        ["attention", finished, "a cat", "--site", "decoder", "--head", "2"],
        ["alignment", finished, "a cat", "--target", "eine Katze", "--step", "100"],
    ):
        path = tmp_path / f"{words[0]}.svg"
        assert cli.main(["plot", *map(str, words), "--output", str(path)]) == 0
        assert path.stat().st_size > 5000
    for words, message in (
        (["masks", "--output", "a.gif"], "a.gif ends in neither .png nor .svg"),
        (["curves", tmp_path, "--output", "a.png"], "give the workdir of a run"),
        (["attention", finished, " ", "--output", "a.png"], "blank sentence"),
    ):
        assert cli.main(["plot", *map(str, words)]) == 2
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1


@pytest.mark.run
def test_without_matplotlib_one_line_says_what_to_install():
    code = """
import sys
sys.modules["matplotlib"] = None
from flaxformer_min import cli
sys.exit(cli.main(["plot", "masks", "--output", "a.png"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: plot needs matplotlib: pip install")
    assert done.stderr.count("\n") == 1

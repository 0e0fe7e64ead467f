"""What is in the pictures, read back from matplotlib and from the pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors, image
from matplotlib.figure import Figure

from ella_cuda.reports import draw_curves, draw_layers
from ella_cuda.reports.pictures import PATH_STYLES
from python_tests.reports.rows import row


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that get saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args, **kwargs) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_bars_are_the_shares_and_stack_to_a_hundred(tmp_path, drawn):
    draw_layers([row("digit"), row("quadrant")], str(tmp_path / "a.png"))
    (figure,) = drawn
    axes = [a for a in figure.axes if a.get_visible()]
    assert len(axes) == 2
    for axis, task in zip(axes, ("digit", "quadrant"), strict=True):
        assert f"task {task}" in axis.get_title()
        assert axis.get_xlabel() == "layer"
        assert axis.get_ylabel().endswith("%")
        lower, upper = axis.containers
        assert [b.get_height() for b in lower] == pytest.approx([20, 50, 80])
        assert [b.get_y() for b in upper] == pytest.approx([20, 50, 80])
        assert [b.get_y() + b.get_height() for b in upper] == pytest.approx([100] * 3)
        assert (lower.get_label(), upper.get_label()) == ("F-FC", "CONV")
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["F-FC", "CONV"]


def test_seeds_share_a_panel_as_their_mean(tmp_path, drawn):
    other = row(seed=1)
    for layer in other["layers"]:
        layer["paths"]["f_fc"]["relative_effective_parameters"] = 0.0
        layer["paths"]["conv"]["relative_effective_parameters"] = 1.0
    draw_layers([row(), other], str(tmp_path / "a.png"))
    (axis,) = [a for a in drawn[0].axes if a.get_visible()]
    assert [b.get_height() for b in axis.containers[0]] == pytest.approx([10, 25, 40])
    assert "mean over 2 seeds" in axis.get_title()


def test_the_files_pixels_have_both_colours(tmp_path):
    draw_layers([row()], str(tmp_path / "a.png"))
    pixels = image.imread(tmp_path / "a.png")[..., :3]
    for path in ("f_fc", "conv"):
        near = np.abs(pixels - np.array(colors.to_rgb(PATH_STYLES[path][0]))).max(-1) < 0.02
        assert near.mean() > 0.02
    assert pixels.shape[0] > 400


def test_other_file_types(tmp_path):
    draw_layers([row()], str(tmp_path / "a.svg"))
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        draw_layers([], str(tmp_path / "a.png"))
    bare = row()
    bare["layers"][0]["paths"]["conv"]["effective_parameters"] = None
    with pytest.raises(ValueError, match="no effective parameters"):
        draw_layers([bare], str(tmp_path / "a.png"))
    with pytest.raises(ValueError, match="got 1 and 0"):
        draw_curves([row()], [], str(tmp_path / "a.png"))
    assert not list(Path(tmp_path).iterdir())


def test_curves_show_every_run_at_its_epochs(tmp_path, drawn):
    evidence = {
        "losses": [3.0, 2.0, 1.0],
        "evaluations": [
            {"epoch": 2, "neg_log_marginal_likelihood": 5.0},
            {"epoch": 3, "neg_log_marginal_likelihood": 4.0},
        ],
    }
    plain = {"losses": [2.5, 2.0, 1.5], "evaluations": [{"epoch": 3, "neg_log_marginal_likelihood": None}]}
    rows = [row(), row(layer="conv", objective="map"), row("quadrant", "conv", "map")]
    draw_curves(rows, [evidence, plain, plain], str(tmp_path / "c.png"))
    losses, values, losses2, values2 = drawn[0].axes
    assert [line.get_ydata().tolist() for line in losses.lines] == [[3, 2, 1], [2.5, 2, 1.5]]
    assert losses.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert [line.get_linestyle() for line in losses.lines] == ["-", "--"]
    assert len(values.lines) == 1
    assert values.lines[0].get_xydata().tolist() == [[2, 5], [3, 4]]
    assert len(losses2.lines) == 1
    assert not values2.lines
    assert values2.texts[0].get_text() == "no evidence step"
    labels = [t.get_text() for t in drawn[0].legends[0].get_texts()]
    assert labels == ["F-FC+CONV, evidence", "CONV, MAP"]

"""The stacked bars, read back from matplotlib and from the pixels."""

from __future__ import annotations

import pytest

from ella_cuda.reports import draw_layers
from python_tests.reports.pictures.pages import shown
from python_tests.reports.rows import row


def test_bars_are_the_shares_and_stack_to_a_hundred():
    figure = draw_layers([row("digit"), row("quadrant")])
    axes = shown(figure)
    assert len(axes) == 2
    for axis, task in zip(axes, ("digit", "quadrant"), strict=True):
        assert axis.get_title() == f"task {task}"
        assert axis.get_xlabel() == "layer"
        lower, upper = axis.containers
        assert [b.get_height() for b in lower] == pytest.approx([20, 50, 80])
        assert [b.get_y() for b in upper] == pytest.approx([20, 50, 80])
        assert [b.get_y() + b.get_height() for b in upper] == pytest.approx([100] * 3)
        assert (lower.get_label(), upper.get_label()) == ("F-FC", "CONV")
        assert not axis.texts
    assert axes[0].get_ylabel().endswith("%") and not axes[1].get_ylabel()
    assert figure.get_suptitle() == "digits, F-FC+CONV, evidence, seed 0"  # what they share
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["F-FC", "CONV"]


def test_layers_without_a_type_are_marked():
    rows = [row(seed=seed) for seed in (0, 1)]
    for made in rows:
        made["layers"][1]["type"] = None
    rows[1]["layers"][2]["type"] = None
    figure = draw_layers(rows)
    (axis,) = shown(figure)
    assert [(t.get_position()[0], t.get_text()) for t in axis.texts] == [(2, "×"), (3, "1/2")]
    assert [bar.get_alpha() is not None for bar in axis.containers[0]] == [False, True, False]
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels[2:] == [
        "no type: less than one effective parameter",
        "no type for 1 of 2 seeds: less than one effective parameter",
    ]


def test_seeds_share_a_panel_as_their_mean():
    other = row(seed=1)
    for layer in other["layers"]:
        layer["paths"]["f_fc"]["relative_effective_parameters"] = 0.0
        layer["paths"]["conv"]["relative_effective_parameters"] = 1.0
    figure = draw_layers([row(), other])
    (axis,) = shown(figure)
    assert [b.get_height() for b in axis.containers[0]] == pytest.approx([10, 25, 40])
    assert "mean ± standard error over 2 seeds" in figure.get_suptitle().replace("\n", " ")
    ends = [bar[:, 1].tolist() for bars in axis.collections for bar in bars.get_segments()]
    assert ends == [pytest.approx(e) for e in ([0, 20], [0, 50], [0, 80])] * 2  # of two values, half their difference

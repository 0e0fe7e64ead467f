"""Reliability diagrams and predictions of turned images, read back from matplotlib."""

from __future__ import annotations

import torch

from ella_cuda.metrics import Reliability
from ella_cuda.reports import draw_reliability, draw_rotations
from ella_cuda.reports.pictures.calibration import draw_left_out
from python_tests.reports.pictures.pages import check_page

# Four bins, the second empty: |0.2 - 0.1|, |0.5 - 0.7| and |1 - 0.9| weigh 10, 20 and 70 of 100.
FOUND = Reliability(
    torch.tensor([10, 0, 20, 70]),
    torch.tensor([0.1, float("nan"), 0.7, 0.9], dtype=torch.float64),
    torch.tensor([0.2, float("nan"), 0.5, 1.0], dtype=torch.float64),
)
ROW = {"degrees": 0.0, "nll": 0.3, "accuracy": 90.0, "confidence": 80.0, "entropy": 0.5}
TURNED = [{key: value + k for key, value in ROW.items()} for k in (2, 0, 1)]


def boxes(axis) -> list[tuple[float, float, float]]:
    """Left edge, width and height of each bar."""
    return [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axis.patches]


def test_bars_are_accuracies_beside_the_diagonal_and_counts_are_below():
    figure = draw_reliability({"MAP": FOUND, "predictive": FOUND}, "whose")
    axes = figure.axes
    assert figure.get_suptitle() == "whose"
    assert [axis.get_title() for axis in axes] == ["MAP, ECE 0.120", "predictive, ECE 0.120", "", ""]
    for upper, lower in (axes[::2], axes[1::2]):
        assert boxes(upper) == [(0, 0.25, 0.2), (0.5, 0.25, 0.5), (0.75, 0.25, 1)]
        assert boxes(lower) == [(0, 0.25, 10), (0.5, 0.25, 20), (0.75, 0.25, 70)]
        diagonal, points = upper.lines
        assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
        assert list(points.get_xdata()) == [0.1, 0.7, 0.9] and list(points.get_ydata()) == [0.2, 0.5, 1]
        assert lower.get_yscale() == "log" and lower.get_xlabel() == "confidence"
    assert [axis.get_ylabel() for axis in axes] == ["accuracy", "", "predictions,\nlog scale", ""]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "accuracy in the bin", "at its mean confidence", "calibrated",
    ]  # fmt: skip


def test_a_line_for_each_method_over_the_angle():
    figure = draw_rotations({"MAP": TURNED, "predictive": [{**row, "nll": 9.0} for row in TURNED]}, "whose")
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "NLL, nats", "accuracy, %", "mean confidence, %", "mean entropy, nats",
    ]  # fmt: skip
    for axis, key in zip(figure.axes, ("nll", "accuracy", "confidence", "entropy"), strict=True):
        first, second = axis.lines
        assert list(first.get_xdata()) == list(second.get_xdata()) == [0, 1, 2]
        assert list(first.get_ydata()) == [ROW[key], ROW[key] + 1, ROW[key] + 2]
        assert (list(second.get_ydata()) == [9, 9, 9]) == (key == "nll")
        styles = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axis.lines]
        assert all(one != other for one, other in zip(*styles, strict=True))
        assert axis.get_ylim()[0] == 0 and axis.get_xlabel() == "degrees"
    assert [figure.axes[k].get_ylim()[1] for k in (1, 2)] == [100, 100]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["MAP", "predictive"]
    check_page(figure)


def test_leverages_and_losses_of_both_precisions():
    one = {"points": 5, "undefined": 2, "nll": 0.25, "leverage": [1, 4], "loss": [0, 3]}
    other = {"points": 5, "undefined": 5, "nll": None, "leverage": [0, 5], "loss": [0, 0]}
    figure = draw_left_out({"exponents": [-1, 0, 1], "learned": other, "predictions": one}, "whose")
    for axis, key in zip(figure.axes, ("leverage", "loss"), strict=True):
        learned, predictions = (patch.get_data() for patch in axis.patches)
        assert list(learned.values) == other[key] and list(predictions.values) == one[key]
        assert list(learned.edges) == [0.1, 1, 10] and axis.get_xscale() == "log"
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 1] and not figure.axes[1].lines
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "at the learned precisions: 5 of 5 without a density", "at those of predictions: NLL 0.250, 2 of 5 without a density",
    ]  # fmt: skip
    check_page(figure)

"""Loss, evidence and accuracy over training, read back from matplotlib."""

from __future__ import annotations

import pytest

from ella_cuda.reports import draw_curves
from python_tests.reports.rows import evaluations, row


def test_curves_show_every_run_at_its_epochs():
    evidence = {"losses": [3.0, 2.5, 2.0, 1.5, 1.2, 1.0], "evaluations": evaluations(row())}
    plain = {"losses": [2.5, 2.0, 1.5], "evaluations": evaluations(row(), 1)}
    rows = [row(accuracy=77.0), row(layer="conv", objective="map"), row("quadrant", "conv", "map", accuracy=33.0)]
    figure = draw_curves(rows, [evidence, plain, plain])
    losses, values, accuracies, losses2, values2, accuracies2 = figure.axes
    assert [list(line.get_ydata()) for line in losses.lines] == [[3.0, 2.5, 2.0, 1.5, 1.2, 1.0], [2.5, 2.0, 1.5]]
    assert list(losses.lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert [line.get_linestyle() for line in losses.lines] == ["-", "--"]
    assert losses.get_yscale() == "log"
    assert len(values.lines) == 1  # MAP has none, evidence none before its first step
    assert values.lines[0].get_xydata().tolist() == [[4, 6], [6, 5]]
    trained, star, mapped, _ = accuracies.lines
    assert trained.get_xydata().tolist() == [pytest.approx(p) for p in ([2, 20], [4, 40], [6, 60])]
    assert star.get_xydata().tolist() == [[6, 77]]
    assert star.get_marker() == "*" and star.get_color() == trained.get_color() != mapped.get_color()
    assert len(losses2.lines) == 1
    assert not values2.lines
    assert values2.texts[0].get_text() == "no evidence step"
    assert accuracies2.lines[1].get_xydata().tolist() == [[2, 33]]
    assert all(axis.get_xlabel() == "epoch" for axis in figure.axes)
    units = [axis.get_ylabel() for axis in (losses, values, accuracies)]
    assert [u.rpartition(", ")[2] for u in units] == ["nats", "nats per data point", "%"]
    assert "task quadrant" in losses2.get_title()
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == ["F-FC+CONV, evidence", "CONV, MAP", "accuracy on test images, at the end"]


def test_a_run_that_is_not_finished_has_its_evaluations_losses_and_no_star():
    running = row()
    del running["accuracy"], running["evaluated_on"]
    figure = draw_curves([running], [{"evaluations": evaluations(running)}])
    losses, _, accuracies = figure.axes
    assert losses.lines[0].get_xydata().tolist() == [[2, 3], [4, 2], [6, 1]]
    assert len(accuracies.lines) == 1
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["F-FC+CONV, evidence"]


def test_held_out_images_are_not_called_test_images():
    figure = draw_curves([row(evaluated_on="holdout")], [{"evaluations": evaluations(row())}])
    assert "held-out images" in figure.legends[0].get_texts()[1].get_text()


def test_a_loss_below_zero_has_no_logarithm():
    figure = draw_curves([row()], [{"losses": [1.0, -1.0], "evaluations": evaluations(row(), 1)}])
    assert figure.axes[0].get_yscale() == "linear"


def test_rows_without_histories_are_refused():
    with pytest.raises(ValueError, match="got 1 and 0"):
        draw_curves([row()], [])
    with pytest.raises(ValueError, match="at least one"):
        draw_curves([], [])

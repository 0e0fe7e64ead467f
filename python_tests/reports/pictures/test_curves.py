"""Loss, evidence and accuracy over training, read back from matplotlib."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from ella_cuda.reports import draw_curves
from ella_cuda.reports.pictures import PATH_STYLES
from python_tests.reports.rows import evaluations, row


def test_curves_show_every_run_at_its_epochs():
    evidence = {"losses": [3.0, 2.5, 2.0, 1.5, 1.2, 1.0], "evaluations": evaluations(row())}
    plain = {"losses": [2.5, 2.0, 1.5], "evaluations": evaluations(row(), 1)}
    rows = [row(), row(layer="conv", objective="map"), row("quadrant", "conv", "map")]
    figure = draw_curves(rows, [evidence, plain, plain])
    losses, values, accuracies, losses2, values2, accuracies2 = figure.axes
    (begins,) = steps_begin(losses)
    assert begins == 4  # the first evaluation with an evidence
    assert [steps_begin(axis) for axis in (values, accuracies, losses2)] == [[4], [4], []]
    for axis in (losses, values, accuracies):
        axis.lines[-1].remove()
    assert [list(line.get_ydata()) for line in losses.lines] == [[3.0, 2.5, 2.0, 1.5, 1.2, 1.0], [2.5, 2.0, 1.5]]
    assert list(losses.lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert [line.get_linestyle() for line in losses.lines] == ["-", "--"]
    # Evidence is marked at its steps, MAP where it was evaluated.
    assert [[line.get_xdata()[k] for k in line.get_markevery()] for line in losses.lines] == [[4, 6], [2]]
    assert losses.lines[1].get_markerfacecolor() == "white" != losses.lines[0].get_markerfacecolor()
    assert losses.get_yscale() == "log"
    assert len(values.lines) == 1  # MAP has none, evidence none before its first step
    assert values.lines[0].get_xydata().tolist() == [[4, 6], [6, 5]]
    trained, mapped = accuracies.lines
    assert trained.get_xydata().tolist() == [pytest.approx(p) for p in ([2, 20], [4, 40], [6, 60])]
    assert trained.get_color() != mapped.get_color()
    assert len(losses2.lines) == 1
    assert not values2.lines
    assert values2.texts[0].get_text() == "no evidence step"
    assert accuracies2.lines[0].get_xydata().tolist() == [[2, pytest.approx(20)]]
    assert all(a.get_xlabel() == "epoch" for a in figure.axes)
    units = [axis.get_ylabel().replace("\n", " ") for axis in (losses, values, accuracies)]
    assert [u.partition(", ")[2] for u in units] == ["nats, log scale", "nats per data point", "%"]
    assert [axis.get_title(loc="left") for axis in figure.axes[::3]] == [
        "digits, task digit, seed 0",
        "digits, task quadrant, seed 0",
    ]
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == [
        "F-FC+CONV, evidence", "CONV, MAP", "evidence step, on the loss", "burn-in ends: the prior changes",
    ]  # fmt: skip


def test_training_accuracies_fill_their_panel():
    history = {"evaluations": [{**e, "accuracy": 0.93 + 0.01 * e["epoch"]} for e in evaluations(row())]}
    low, high = draw_curves([row()], [history]).axes[2].get_ylim()
    assert 94 < low < 95 and 99 < high < 100


def steps_begin(axis) -> list[float]:
    """Where vertical lines are."""
    return [
        line.get_xdata()[0]
        for line in axis.lines
        if list(line.get_ydata()) == [0, 1] and len(set(line.get_xdata())) == 1
    ]


def test_a_network_has_one_colour_whatever_learned_it():
    kinds = [("s_conv", "map", ""), ("s_conv", "evidence", "anchors"), ("s_conv", "evidence", "lengthscales")]
    kinds += [("s_fc+s_conv", "map", ""), ("s_fc+s_conv", "evidence", "anchors"), ("f_fc+conv", "map", "")]
    rows = [row(layer=layer, objective=objective, learn=learn) for layer, objective, learn in kinds]
    figure = draw_curves(rows, [{"evaluations": evaluations(r)} for r in rows])
    lines = figure.axes[0].lines[:6]
    colours = [to_hex(line.get_color()) for line in lines]
    assert colours[0] == colours[1] == colours[2] == PATH_STYLES["s_conv"][0]
    assert colours[3] == colours[4]
    assert len(set(colours)) == 3
    assert len({line.get_linestyle() for line in lines[:3]}) == 3
    assert [line.get_linestyle() for line in lines[::3]] == ["--", "--"]
    assert [len({line.get_marker() for line in some}) for some in (lines[:3], lines[3:5], lines[::3])] == [1, 1, 2]


def test_the_legends_lines_are_the_runs():
    kinds = [("s_conv", "map", ""), ("s_conv", "evidence", "anchors"), ("fc+conv", "evidence", ""), ("conv", "map", "")]
    rows = [row(layer=layer, objective=objective, learn=learn) for layer, objective, learn in kinds]
    figure = draw_curves(rows, [{"evaluations": evaluations(r)} for r in rows])
    (legend,) = figure.legends
    labels = [t.get_text() for t in legend.get_texts()][:4]
    assert labels == ["S-CONV, MAP", "S-CONV, anchors, evidence", "FC+CONV, evidence", "CONV, MAP"]
    losses, _, accuracies = figure.axes
    for handle, *lines in zip(legend.legend_handles[:4], losses.lines, accuracies.lines, strict=False):
        for line in lines:
            same = ("color", "marker", "markerfacecolor", "linestyle")
            assert [getattr(line, f"get_{of}")() for of in same] == [getattr(handle, f"get_{of}")() for of in same]


def test_a_run_that_is_not_finished_has_its_evaluations_losses():
    running = row()
    del running["accuracy"], running["evaluated_on"]
    figure = draw_curves([running], [{"evaluations": evaluations(running)}])
    losses, _, accuracies = figure.axes
    assert losses.lines[0].get_xydata().tolist() == [[2, 3], [4, 2], [6, 1]]
    assert [line.get_marker() for line in accuracies.lines] == ["o", "None"]  # and where burn-in ends


def test_a_loss_below_zero_has_no_logarithm():
    figure = draw_curves([row()], [{"losses": [1.0, -1.0], "evaluations": evaluations(row(), 1)}])
    assert figure.axes[0].get_yscale() == "linear"
    assert "log scale" not in figure.axes[0].get_ylabel()

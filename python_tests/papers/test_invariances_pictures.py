"""Pictures of the experiments on invariances."""

from __future__ import annotations

import numpy as np
import pytest

from ella_cuda.papers.invariances.pictures import draw_rings, draw_sampling, draw_subsets
from python_tests.reports.pictures.pages import check_page, shown

TITLE = "A title of two lines, as people write it: what is shown, of which data and of how many seeds; Fashion-MNIST, 3 seeds"
WAYS = {"full": "full", "kron": "Kronecker, means over copies", "second": "Kronecker, second moments (wrong)"}


def test_rings_have_data_angles_and_evidence_beside_the_reference():
    def result(end: float) -> dict:
        angles = {way: {"angles": [[0, 30.0], [10, end * k]]} for k, way in enumerate(WAYS, start=1)}
        fixed = [{"angle": a, **{way: -a * k / end for k, way in enumerate(WAYS)}} for a in (0, 90, 180)]
        return {"learned": angles, "collapsed": {"angles": [[0, 30.0], [10, 0.0]]}, "fixed": fixed}

    reference = {way: [float(k)] * 7 for k, way in enumerate(WAYS)}
    points = [[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]], [1, 1, 0]
    figure = draw_rings([result(40.0), result(50.0)], points, reference, WAYS, TITLE)
    check_page(figure)
    data, angles, evidence = shown(figure)
    assert [len(line.get_xdata()) for line in data.lines] == [1, 2]
    assert [line.get_ydata()[-1] for line in angles.lines] == [40, 80, 120, 0, 50, 100, 150, 0]
    means = [line.get_ydata() for line in evidence.lines if len(line.get_xdata()) == 3]
    np.testing.assert_allclose(means[1], [0, -(90 / 40 + 90 / 50) / 2, -(180 / 40 + 180 / 50) / 2])
    assert sum(len(line.get_xdata()) == 7 for line in evidence.lines) == 3
    assert len(figure.legends[0].get_texts()) == 5


def test_sampling_marks_each_maximum_and_the_true_angle():
    angles = (0, 90, 180)
    ways = [
        {"sampling": sampling, "copies": count, "evidence": [[-2.0, -1.0, -1.5], [-1.0, -2.0, -3.0]]}
        for sampling in ("independent", "shared", "grid")
        for count in (4, 16)
    ]
    figure = draw_sampling([{"ways": ways}], (90, 0), angles, TITLE)
    check_page(figure)
    axes = shown(figure)
    assert [axis.get_title() for axis in axes] == [f"{t}°, {c} copies" for t in (90, 0) for c in (4, 16)]
    for axis, best, true in zip(axes, (1, 1, 0, 0), (90, 90, 0, 0), strict=True):
        curves = [line for line in axis.lines if len(line.get_xdata()) == 3]
        assert len(curves) == 3 and all(line.get_markevery() == [best] for line in curves)
        assert all(line.get_ydata().max() == 0 for line in curves)
        assert [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 2] == [true]


def test_subsets_are_means_over_seeds_with_their_errors():
    rows = [
        {"size": size, "method": method, "accuracy": 50.0 + k + size / 100, "nll": 1.0 + 0.1 * seed}
        | {"neg_log_marginal_likelihood": None if method == "none" else 2.0}
        for size in (312, 1250, 5000, 6000)
        for k, method in enumerate(("map", "none"))
        for seed in (0, 1)
    ]
    figure = draw_subsets(rows, {"map": "MAP", "none": "no evidence", "never": "never run"}, TITLE)
    check_page(figure)
    accuracy, nll, evidence = shown(figure)
    assert [len(axis.containers) for axis in (accuracy, nll, evidence)] == [2, 2, 1]
    line, _, (bars,) = nll.containers[0].lines
    np.testing.assert_allclose(np.array(line.get_ydata(), float), [1.05] * 4)
    assert accuracy.get_xticks().tolist() == [312, 1250, 6000]
    np.testing.assert_allclose(np.array(bars.get_segments()[0], float)[:, 1], [1.0, 1.1])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["MAP", "no evidence"]


def test_nothing_to_draw_is_refused():
    for draw in (
        lambda: draw_rings([], ([], []), {}, WAYS),
        lambda: draw_sampling([], (), ()),
        lambda: draw_subsets([], {}),
    ):
        with pytest.raises(ValueError, match="must hold at least one, got none"):
            draw()

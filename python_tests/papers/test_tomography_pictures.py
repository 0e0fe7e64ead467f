"""Pictures of tomography."""

from __future__ import annotations

import numpy as np
import pytest

from ella_cuda.papers.tomography.pictures import draw_densities, draw_errors, draw_reconstructions, draw_ways
from ella_cuda.papers.tomography.reconstruction import WAYS
from python_tests.reports.pictures.pages import check_page, shown

TITLE = "A title of two lines, as people write it: which data, how many angles, how much noise, which network, and of which seed; digits, 0"


def test_errors_and_deviations_of_a_line_have_one_scale():
    rng = np.random.default_rng(0)
    error, deviation = rng.random((8, 8)), 3 * rng.random((8, 8))
    images = {"truth": rng.random((8, 8)).tolist(), "deep image\nprior": rng.random((8, 8)).tolist()}
    line = (images, {"|error|": error.tolist(), "network's weights": deviation.tolist()})
    half = (images, {"|error|": (error / 2).tolist(), "network's weights": deviation.tolist()})
    figure = draw_reconstructions({"5 angles,\n5% noise": line, "10 angles,\n5% noise": half}, TITLE)
    check_page(figure)
    axes = shown(figure)
    assert len(axes) == 8
    limits = [axis.images[0].get_clim() for axis in axes]
    assert limits[0] == limits[1] == (0, 1)
    most = np.percentile(error, 99)
    assert limits[2] == limits[3] == (0, pytest.approx(most)) and limits[6] == limits[7] == (0, pytest.approx(most / 2))
    np.testing.assert_array_equal(axes[3].images[0].get_array(), deviation)
    assert axes[0].get_ylabel().startswith("5 angles") and axes[4].get_ylabel().startswith("10 angles")


def test_densities_are_means_over_seeds():
    rows = [
        {"data": "digits", "noise": noise, "angles": angles, "way": way, "seed": seed, "log_density": angles + seed + k}
        for noise in (0.05, 0.1)
        for angles in (5, 20)
        for k, way in enumerate(("network", "linear"))
        for seed in (0, 1)
    ]
    figure = draw_densities(rows, {"network": "network's weights", "linear": "linear mode"}, TITLE)
    check_page(figure)
    first, second = shown(figure)
    assert first.get_title() == "digits, 5% noise" and second.get_title() == "digits, 10% noise"
    lines = [container.lines[0] for container in first.containers]
    assert [list(line.get_ydata()) for line in lines] == [[5.5, 20.5], [6.5, 21.5]]
    assert [list(line.get_xdata()) for line in lines] == [[5, 20]] * 2
    segments = first.containers[1].lines[2][0].get_segments()  # of errors: half the difference of two values
    assert [s[:, 1].tolist() for s in segments] == [
        [pytest.approx(m - 0.5), pytest.approx(m + 0.5)] for m in (6.5, 21.5)
    ]


def test_every_way_of_the_study_has_a_look_of_its_own():
    rows = [{"noise": 0.1, "angles": a, "way": way, "log_density": 1.0} for way in WAYS for a in (5, 20)]
    figure = draw_densities(rows, WAYS)
    lines = [container.lines[0] for container in shown(figure)[0].containers]
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == len(WAYS)


def test_errors_are_beside_the_expected_ones():
    shares = {name: {"found": [0.7, 0.2, 0.1], "expected": [0.5, 0.3, 0.2]} for name in "abcde"}
    figure = draw_errors(shares, (0.0, 0.1, 0.2), TITLE)
    check_page(figure)
    axes = shown(figure)
    assert [axis.get_title() for axis in axes] == ["a", "b", "c", "d", "e"]
    assert [bar.get_height() for bar in axes[0].patches if bar.get_width() == pytest.approx(0.1)][:3] == [0.7, 0.2, 0.1]
    assert list(axes[0].lines[0].get_ydata())[:3] == [0.5, 0.3, 0.2]
    labelled = [any(label.get_visible() for label in axis.get_xticklabels()) for axis in axes]
    assert labelled == [False, True, True, True, True]  # nothing is below the second to fourth


def test_ways_are_beside_the_published_ones():
    rows = [
        {"data": data, "way": way, "nll": nll + seed, "talk_nll": talk}
        for data in ("digits", "fashion-mnist")
        for way, nll, talk in (("network", -1.0, -1.7), ("linear", -2.0, None))
        for seed in (0, 1)
    ]
    figure = draw_ways(rows, {"network": "network's weights", "linear": "linear mode"}, TITLE)
    check_page(figure)
    axis = shown(figure)[0]
    means = [container.lines[0].get_xdata()[0] for container in axis.containers]
    assert means == [-0.5, -1.5]
    errors = [container.lines[2][0].get_segments()[0][:, 0].tolist() for container in axis.containers]
    assert errors == [
        [pytest.approx(mean - 0.5), pytest.approx(mean + 0.5)] for mean in means
    ]  # half of two values' gap
    assert [-1.7] in [list(line.get_xdata()) for line in axis.lines]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_reconstructions({}),
        lambda: draw_densities([], {}),
        lambda: draw_errors({}, ()),
        lambda: draw_ways([], {}),
    ],
)
def test_nothing_to_draw_is_refused(draw):
    with pytest.raises(ValueError, match="at least one"):
        draw()

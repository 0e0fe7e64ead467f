"""Pictures of the linearised talk's experiments."""

from __future__ import annotations

import numpy as np
import pytest

from ella_cuda.papers.linearised.pictures import draw_networks, draw_stopping, draw_sweep, draw_toy
from python_tests.reports.pictures.pages import check_page, shown

AT = ("network", "linear")
TITLE = "A title of two lines, as people write it: what is shown, of how many parameters, and of which seed; 2,600 parameters, seed 0"


def toy_found() -> dict:
    x = np.linspace(-2, 2, 9)
    return {
        "x": [-1.5, 1.0],
        "y": [1.0, 2.0],
        "grid": x.tolist(),
        "chosen": [
            {
                "at": at,
                "structure": structure,
                "precision": {"w": p},
                "mean": (0 * x).tolist(),
                "deviation": (0 * x + d).tolist(),
            }
            for at, p, d in (("network", 0.1, 3.0), ("linear", 10.0, 0.5))
            for structure in ("scalar", "normalised")
        ],
        "evidence": [
            {"precision": 10.0**k, "network": -2 - abs(k + 1.0), "linear": -1 - abs(k - 1.0)} for k in range(-2, 4)
        ],
    }


def test_the_toy_has_both_predictives_and_both_evidences():
    figure = draw_toy(toy_found(), TITLE)
    check_page(figure)
    network, linear, evidence = shown(figure)
    assert "0.100" in network.get_title() and "10.0" in linear.get_title()
    widths = [np.ptp(axis.collections[0].get_paths()[0].vertices[:, 1]) for axis in (network, linear)]
    np.testing.assert_allclose(widths, [6.0, 1.0])
    assert network.get_ylim() == linear.get_ylim()
    tops = [float(line.get_xdata()[0]) for line in evidence.lines if len(line.get_xdata()) == 1]
    assert tops == [0.1, 10.0]


def test_the_sweep_has_a_panel_for_each_evidence_and_a_line_for_each_number_of_precisions():
    rows = [
        {"norm": norm, "at": at, "structure": structure, "k": k, "variance": 0.5 + (structure == "scalar") * k}
        for norm in ("batch", "layer")
        for at in AT
        for structure in ("scalar", "normalised")
        for k in (0.1, 1.0, 10.0)
    ]
    figure = draw_sweep(rows, TITLE)
    check_page(figure)
    axes = shown(figure)
    assert len(axes) == 4
    assert len({axis.get_ylim() for axis in axes}) == 1
    for axis in axes:
        single, grouped = (line.get_ydata() for line in axis.lines)
        np.testing.assert_allclose(single, [0.6, 1.5, 10.5])
        np.testing.assert_allclose(grouped, 0.5)


def test_early_stopping_shows_means_over_seeds():
    rows = [
        {"norm": norm, "seed": seed, "structure": structure, "epoch": epoch, "distance": (1 + 2 * seed) / epoch}
        | {"error_bar_network": 2.0 + seed, "error_bar_linear": 1.0 + seed}
        for norm in ("batch", "layer")
        for seed in (0, 1)
        for structure in ("scalar", "normalised")
        for epoch in (1, 10, 100)
    ]
    figure = draw_stopping(rows, TITLE)
    check_page(figure)
    distances, bars = shown(figure)
    assert (len(distances.lines), len(bars.lines)) == (4, 4)
    np.testing.assert_allclose(distances.lines[0].get_ydata(), [2.0, 0.2, 0.02])
    np.testing.assert_allclose(bars.lines[0].get_ydata(), 2.5)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_networks_are_beside_the_talks(seeds):
    rows = [
        {
            "data": data,
            "network": network,
            "seed": seed,
            "at": at,
            "number": number,
            "nll": 0.1 + 0.2 * seed,
            "talk_nll": 0.02,
        }
        for data in ("digits", "fashion-mnist")
        for network in ("T-Former", "Pre-ResNet")
        for seed in seeds
        for at in AT
        for number in ("single", "several")
    ]
    figure = draw_networks(rows, TITLE)
    check_page(figure)
    left, right = shown(figure)
    for axis in (left, right):
        hollow = [line for line in axis.lines if line.get_markerfacecolor() == "none"]
        ours = [c[0] for c in axis.containers]
        assert len(hollow) == len(ours) == 8
        assert {float(line.get_xdata()[0]) for line in hollow} == {0.02}
        np.testing.assert_allclose([line.get_xdata()[0] for line in ours], 0.1 * len(seeds))
        for one, other in zip(ours, hollow, strict=True):
            assert one.get_ydata()[0] == other.get_ydata()[0]
    assert [text.get_text() for text in left.get_yticklabels()] == ["T-Former", "Pre-ResNet"]


@pytest.mark.parametrize("draw", [draw_sweep, draw_stopping, draw_networks])
def test_nothing_is_no_picture(draw):
    with pytest.raises(ValueError, match="rows must hold at least one"):
        draw([])

"""Pictures on a page: what matplotlib renders stays inside, legible and apart; and the pieces that see to it."""

from __future__ import annotations

import pytest
from matplotlib.lines import Line2D

from ella_cuda.reports import draw_anchors, draw_curves, draw_filters, draw_layers, draw_precisions
from ella_cuda.reports.pictures import page
from ella_cuda.reports.pictures.page import Rooms, arrange, inches, panels, wrapped
from python_tests.reports.pictures.networks import read
from python_tests.reports.pictures.pages import check_page
from python_tests.reports.rows import evaluations, row


def wide_row(task: str = "digit"):
    """With as long a name as runs get."""
    return row(task, group="p4m", group_conv="depthwise_separable", width=10, learn="anchors+lengthscales")


def pictures() -> dict:
    drawn = {}
    for count in (1, 2, 5):
        rows = [wide_row(task) for task in ("digit", "quadrant", "plain", "rotated", "scaled")[:count]]
        drawn[f"layers {count}"] = draw_layers(rows)
    rows = [
        wide_row(),
        *(
            row(layer=layer, objective=o)
            for layer in ("f_fc+conv", "fc", "conv", "f_fc", "fc+conv")
            for o in ("map", "evidence")
        ),
    ]
    drawn["curves"] = draw_curves(rows, [{"evaluations": evaluations(r)} for r in rows])
    drawn["precisions"] = draw_precisions(wide_row(), evaluations(wide_row()))
    for layer in ("conv", "f_fc+s_fc+conv+s_conv+gconv"):
        _, made, weights = read(layer)
        drawn[f"filters {layer}"] = draw_filters(made, weights)
    for layer in ("s_conv", "s_fc+s_conv"):
        model, made, weights = read(layer, inverse_lengthscale=0.4)
        start = {n.removesuffix(".anchors"): b.tolist() for n, b in model.named_buffers() if n.endswith(".anchors")}
        drawn[f"anchors {layer}"] = draw_anchors(made, weights, start)
    return drawn


@pytest.fixture(scope="module")
def drawn():
    return pictures()


def test_pictures_fit_on_a_page(drawn):
    for name, figure in drawn.items():
        try:
            check_page(figure)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_many_panels_go_on_in_the_next_line(drawn):
    def lines(figure) -> int:
        return len({round(a.get_position().y0, 4) for a in figure.axes if a.get_visible() and not a.get_label()})

    assert [lines(drawn[f"layers {count}"]) for count in (1, 2, 5)] == [1, 1, 2]
    assert lines(drawn["anchors s_conv"]) >= 2  # 8 panels
    assert drawn["anchors s_fc+s_conv"].get_size_inches()[1] < 10  # of 23 panels, on one page


def test_text_is_as_wide_as_it_is_rendered():
    figure, _ = panels(1, Rooms(3.0, 2.0))
    figure.canvas.draw()
    for text in ("iiii", "MMMM", "S-FC+S-CONV, lengthscales"):
        artist = figure.text(0.1, 0.5, text, fontsize=8)
        rendered = artist.get_window_extent(figure.canvas.get_renderer()).width / figure.dpi
        assert inches(text, 8) == pytest.approx(rendered, rel=0.1)


def test_wrapped_text_is_whole_and_narrow():
    text = "digits, task digit, F-FC+CONV+GCONV (depthwise_separable), width 10\nseed 0"
    lines = wrapped(text, 1.2, 8).splitlines()
    assert lines[-1] == "seed 0"
    assert " ".join(lines).replace("+ ", "+") == text.replace("\n", " ")
    assert all(inches(line, 8) <= 1.2 for line in lines if " " in line or line.count("+") > 1)
    assert wrapped("a b", 3, 8) == "a b"


@pytest.mark.parametrize(
    "labels", [[f"network {i}" for i in range(11)], ["short", "a very much longer label than the others", "x", "y"]]
)
def test_a_legend_is_as_wide_as_it_may(labels, monkeypatch):
    rooms = Rooms(4.0, 2.0)
    columns = page.legend_columns(labels, 4.0)
    assert columns > 1
    for more, fits in ((0, True), (1, False)):
        monkeypatch.setattr(page, "legend_columns", lambda *_, more=more: columns + more)
        figure, _ = panels(1, rooms)
        arrange(figure, rooms, {label: Line2D([], []) for label in labels})
        rendered = figure.legends[0].get_tightbbox(figure.canvas.get_renderer()).width / figure.dpi
        assert (rendered <= 4.0) == fits

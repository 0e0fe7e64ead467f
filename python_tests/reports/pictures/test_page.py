"""Pictures on a page: what matplotlib renders stays inside, legible and apart, in colours that everybody can tell apart."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import image

from ella_cuda.reports import draw_anchors, draw_curves, draw_filters, draw_layers, draw_precisions, save_picture
from ella_cuda.reports.pictures.page import PATH_STYLES, folded, panels, path_styles
from python_tests.reports.pictures.networks import read
from python_tests.reports.pictures.pages import check_page, check_same_sizes
from python_tests.reports.rows import evaluations, row

RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def wide_row(task: str = "digit"):
    """With as long a name as runs get."""
    return row(task, group="p4m", group_conv="depthwise_separable", width=10, learn="anchors+lengthscales")


def pictures() -> dict:
    drawn = {}
    for count in (1, 2, 5):
        rows = [wide_row(task) for task in ("digit", "quadrant", "plain", "rotated", "scaled")[:count]]
        drawn[f"layers {count}"] = draw_layers(rows)
    untyped = [row(seed=seed, layer=layer) for seed in (0, 1) for layer in ("f_fc+conv", "f_fc+s_fc", "s_conv+gconv")]
    for made in untyped:
        made["layers"][1]["type"] = None
    untyped[3]["layers"][2]["type"] = None
    drawn["layers without types"] = draw_layers(untyped)
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


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/summary.json")), ids=lambda file: file.parent.name)
def test_results_that_are_kept_fit_on_a_page(file):
    rows = json.loads(file.read_text())
    for made in rows:
        assert {"layers", "accuracy"} <= made.keys()
    chose = [
        r for r in rows if r["objective"] == "evidence" and "+" in r["layer"] and r["layers"][0]["type"] is not None
    ]
    layers = draw_layers(chose)
    curves = draw_curves(rows, [{"evaluations": evaluations(r)} for r in rows])
    for figure in (layers, curves):
        check_page(figure)
        check_same_sizes(figure)
    (precisions,) = [draw_precisions(r, evaluations(r)) for r in chose[:1]]
    check_page(precisions)
    check_same_sizes(precisions)


def test_folded_text_is_whole_and_narrow():
    text = "digits, task digit, F-FC+CONV+GCONV (p4m, depthwise_separable), width 10, evidence, seed 0\nand more"
    figure, _ = panels(1, 1, 3.0, 2.0)
    found = folded(text, 2.0, 8)
    assert found.splitlines()[-1] == "and more"
    assert found.replace("\n", " ") == text.replace("\n", " ")
    rendered = figure.text(0, 0, found, fontsize=8).get_window_extent().width / figure.dpi
    assert 1.3 < rendered <= 2.0
    assert folded("", 2.0, 8) == ""


def test_both_files_can_be_read_and_are_the_same_when_drawn_again(tmp_path):
    files = save_picture(draw_layers([row()]), tmp_path / "a")
    assert [f.name for f in files] == ["a.png", "a.svg"]
    assert image.imread(files[0]).ndim == 3
    assert ElementTree.parse(files[1]).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "<dc:date>" not in files[1].read_text()
    again = save_picture(draw_layers([row()]), tmp_path / "b")
    assert [f.read_bytes() for f in again] == [f.read_bytes() for f in files]


def test_paths_that_are_not_the_packages_have_styles_of_their_own():
    styles = path_styles(["conv", "mine", "yours", "theirs"])
    assert styles["conv"] == PATH_STYLES["conv"]
    assert len(set(styles.values())) == 4

"""The paper's tables: their numbers, which of our runs answer them, and both side by side."""

from __future__ import annotations

import csv
import dataclasses
import io
import math

import pytest
import torch

from ella_cuda import run_folder
from ella_cuda.data import SOURCES
from ella_cuda.experiments import configure, recipe
from ella_cuda.models import neyshabur
from ella_cuda.papers import equivariances
from ella_cuda.papers.equivariances import TABLES, Plan, entries, plan_table, scaled
from python_tests.reports.pictures.pages import check_page, check_same_sizes, shown
from python_tests.reports.rows import row as made_row

IMAGES = {"digits": 1437, "mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}


def plan(name: str, **options):
    return plan_table(name, IMAGES.__getitem__, **options)


def printed(table: str, row: str, objective: str) -> equivariances.Printed:
    (found,) = (r for r in TABLES[table].rows if r.key == row)
    return found.printed[objective]


@pytest.mark.parametrize(
    ("table", "row", "objective", "numbers"),
    [
        ("toy", "digit-fc", "evidence", {"accuracy": 97.04}),
        ("toy", "quadrant-conv", "map", {"accuracy": 24.68}),
        ("toy", "quadrant-f_fc+conv", "evidence", {"accuracy": 99.00}),
        ("toy", "digit-f_fc+conv", "map", {"accuracy": None}),
        ("group-convs", "full-6", "map", {"parameters": 371_200, "accuracy": 69.89}),
        ("group-convs", "depthwise_separable", "map", {"parameters": 139_735, "accuracy": 51.63}),
    ],
)
def test_printed_numbers(table, row, objective, numbers):
    found = printed(table, row, objective)
    assert {name: getattr(found, name) for name in numbers} == numbers


# Copied once more from the paper, as text: row, MAP NLL, accuracy, evidence NLL, accuracy, -log q/N.
LAYERS = """
fc 2.423 64.42 1.319 52.36 1.896
conv 1.184 82.81 0.464 84.07 1.022
fc+conv 1.713 76.93 0.489 83.32 1.019
f_fc 4.291 50.47 1.307 53.38 2.119
f_fc+conv 1.343 81.61 0.468 83.92 1.277
s_fc-anchors 5.614 50.21 1.496 46.18 1.926
s_conv-anchors 0.604 82.53 0.562 81.29 1.037
s_fc+s_conv-anchors 5.485 58.80 0.538 81.55 0.978
s_fc-lengthscales 7.783 49.69 1.319 52.22 1.813
s_conv-lengthscales 0.913 81.84 0.549 81.20 1.055
s_fc+s_conv-lengthscales 2.040 77.97 0.564 80.63 1.067
"""
GROUPS = """
mnist 0.172 97.59 0.023 99.21 0.328 10 15 75
translated-mnist 0.812 90.78 0.053 98.27 0.216 0 23 77
rotated-mnist 0.819 91.02 0.136 95.55 0.896 8 8 83
cifar10 3.540 68.33 0.552 80.94 0.926 0 44 56
rotated-cifar10 5.953 48.30 1.236 55.68 1.630 4 14 82
"""


@pytest.mark.parametrize(("table", "text"), [("layers", LAYERS), ("groups", GROUPS)])
def test_every_printed_number(table, text):
    lines = [line.split() for line in text.strip().splitlines()]
    assert [line[0] for line in lines] == [row.key for row in TABLES[table].rows]
    for key, *numbers in lines:
        map_nll, map_accuracy, nll, accuracy, evidence, *shares = map(float, numbers)
        of_map, of_evidence = printed(table, key, "map"), printed(table, key, "evidence")
        assert (of_map.nll, of_map.accuracy, of_map.neg_log_marginal_likelihood) == (map_nll, map_accuracy, None)
        assert (of_evidence.nll, of_evidence.accuracy, of_evidence.neg_log_marginal_likelihood) == (
            nll,
            accuracy,
            evidence,
        )
        assert of_evidence.shares == (tuple(shares) or None)


def test_what_rows_differ_in_is_not_for_the_user():
    with pytest.raises(ValueError, match="group_conv is what the rows of group-convs differ in"):
        plan_table("group-convs", lambda data: 100, data="digits", group_conv="full")
    with pytest.raises(ValueError, match="learn is what the rows of layers differ in"):
        plan_table("layers", lambda data: 100, data="digits", learn="anchors")


@pytest.mark.parametrize(
    ("table", "row", "epochs", "width"),
    [("toy", "digit-conv", 1000, 10), ("layers", "conv", 4000, 10), ("groups", "mnist", 1000, 2)],
)
def test_published_recipe(table, row, epochs, width):
    """Numbers of the paper's appendix, whatever data stand in."""
    images = {"fashion-mnist": 60_000}.get
    configs, plan_ = plan_table(table, images, data="fashion-mnist", rows=[row], whose="published")
    for c in configs:
        assert (c.epochs, c.batch_size, c.lr, c.cooldown, c.fan_in_limit) == (epochs, 128, 0.01, None, None)
        assert (c.prior_prec_init, c.hyper_optimizer, c.lr_hyp, c.hypersteps) == (1.0, "adam", 0.1, 20)
        assert (c.burn_in, c.frequency, c.pool_norm, c.width, c.train_size) == (10, 5, "inf", width, None)
        assert (c.init, c.restarts, c.column_tolerance) == ("published", "none", 0.0)
    assert Plan.from_json(plan_.to_json()) == plan_
    assert "recipe: the paper's" in equivariances.comparison_table(plan_, entries(plan_, configs, []))
    (small, _), _ = plan_table(
        table, images, data="fashion-mnist", rows=[row], whose="published", scale=0.01, width=1, lr=0.002
    )
    assert (small.epochs, small.train_size, small.burn_in, small.frequency) == (epochs // 100, 600, 0, 1)
    assert (small.width, small.lr, small.prior_prec_init) == (1, 0.002, 1.0)
    with pytest.raises(ValueError, match="whose must be one of data, published, got 'mine'"):
        plan_table(table, images, rows=[row], whose="mine")


def test_a_seed_named_twice_is_one():
    configs, _ = plan_table("toy", lambda data: 100, rows=["digit-conv"], seeds=(0, 0, 1))
    assert [c.seed for c in configs] == [0, 0, 1, 1]  # map and evidence


def test_networks_of_the_group_convolutions_have_the_printed_sizes():
    """At full scale on the paper's data; it prints ten parameters too many for one."""
    configs, plan_ = plan("group-convs")
    assert plan_.images == {"cifar10": 50_000}
    counts = {}
    for entry in entries(plan_, configs, []):
        (config,) = entry.configs
        with torch.device("meta"):
            model = neyshabur(config.layer, 3, 10, config.width, group_conv=config.group_conv)
        counts[entry.row.key] = sum(p.numel() for p in model.parameters()) - entry.printed.parameters
    assert counts == {"full": 0, "separable": 0, "depthwise_separable": -10, "full-6": 0, "pointwise": 0, "conv": 0}
    assert {c.task for c in configs} == {"rotated"}


def test_network_of_the_groups_is_as_wide_as_the_papers():
    configs, _ = plan("groups")
    assert {(c.width, c.layer, c.group_conv) for c in configs} == {(2, "f_fc+conv+gconv", "pointwise")}
    assert [(c.data, c.task, c.objective) for c in configs[::2]] == [
        ("mnist", "plain", "map"),
        ("mnist", "translated", "map"),
        ("mnist", "rotated", "map"),
        ("cifar10", "plain", "map"),
        ("cifar10", "rotated", "map"),
    ]


def test_toy_at_full_scale_is_what_train_does():
    configs, _ = plan("toy")
    expected = [
        configure("digits", task, layer, objective)
        for task in ("digit", "quadrant")
        for layer in ("fc", "conv", "f_fc+conv")
        for objective in ("map", "evidence")
        if (layer, objective) != ("fc", "evidence")
    ]
    assert configs == expected


def test_dense_evidence_is_run_only_on_request_and_never_left_out():
    configs, plan_ = plan("layers")
    reasons = {(c.row, c.objective): c.reason for c in plan_.cells if not c.runs}
    assert set(reasons) == {("fc", "evidence"), ("fc+conv", "evidence")}
    assert all("--all" in reason for reason in reasons.values())
    assert len(plan_.cells) == 22
    more, full = plan("layers", dense=True)
    assert all(cell.runs for cell in full.cells)
    assert {c.name for c in more} - {c.name for c in configs} == {
        "cifar10-plain-fc-evidence-seed0",
        "cifar10-plain-fc+conv-evidence-seed0",
    }


def test_rows_that_ask_for_one_run_share_it():
    """MAP learns no bases: both rows of a sparsified layer have one run."""
    configs, plan_ = plan("layers", rows=["s_fc-anchors", "s_fc-lengthscales"])
    assert [(c.objective, c.learn) for c in configs] == [
        ("map", ""),
        ("evidence", "anchors"),
        ("evidence", "lengthscales"),
    ]
    runs = {(c.row, c.objective): c.runs for c in plan_.cells}
    assert runs["s_fc-anchors", "map"] == runs["s_fc-lengthscales", "map"] == (configs[0].name,)
    assert runs["s_fc-lengthscales", "evidence"] == (configs[2].name,)
    assert len(runs) == 4


def test_seeds_come_one_after_the_other():
    configs, plan_ = plan("toy", rows=["digit-conv"], seeds=(3, 1))
    assert [(c.seed, c.objective) for c in configs] == [(3, "map"), (3, "evidence"), (1, "map"), (1, "evidence")]
    assert {c.runs for c in plan_.cells} == {(configs[0].name, configs[2].name), (configs[1].name, configs[3].name)}


@pytest.mark.parametrize(
    ("table", "data", "answered"),
    [
        ("layers", "digits", {"cifar10"}),
        ("group-convs", "fashion-mnist", {"cifar10"}),
        ("toy", "cifar100", {"mnist"}),
        ("groups", "mnist", {"mnist"}),
        ("groups", "fashion-mnist", {"mnist"}),
        ("groups", "digits", {"mnist"}),
        ("groups", "cifar10", {"cifar10"}),
        ("groups", "cifar100", {"cifar10"}),
        ("groups", None, {"mnist", "cifar10"}),
    ],
)
def test_whose_rows_a_data_set_answers(table, data, answered):
    configs, plan_ = plan(table, data=data, dense=True)
    rows = {row.key: row for row in TABLES[table].rows}
    assert {rows[c.row].data for c in plan_.cells if c.runs} == answered
    assert {rows[c.row].data for c in plan_.cells if not c.runs} == {r.data for r in rows.values()} - answered
    assert {c.data for c in configs} == ({data} if data else answered) == set(plan_.images)


@pytest.mark.parametrize(
    ("data", "scale", "epochs", "expected"),
    [  # recipes: digits 60 epochs, burn-in 10, every 20; fashion-mnist 20, 2, 2
        ("digits", 1.0, None, (None, 60, 10, 20)), ("digits", 0.2, None, (287, 12, 2, 4)),
        ("digits", 0.5, None, (719, 30, 5, 10)), ("digits", 0.02, None, (29, 2, 0, 1)),
        ("fashion-mnist", 0.05, None, (3000, 2, 0, 1)), ("fashion-mnist", 0.05, 30, (3000, 30, 2, 4)),
        ("fashion-mnist", 0.05, 5, (3000, 5, 1, 2)), ("digits", 1.0, 9, (None, 9, 2, 3)),
        ("digits", 1.0, 1, (None, 1, 0, 1)),
    ],
)  # fmt: skip
def test_what_follows_the_scale(data, scale, epochs, expected):
    found = scaled(data, IMAGES[data], scale, epochs)
    assert (found["train_size"], found["epochs"], found["burn_in"], found["frequency"]) == expected


def test_the_scale_keeps_the_number_of_evidence_steps_where_it_can():
    """At the epochs that frequency divides and after burn-in, and at the last."""

    def steps(epochs: int, burn_in: int, frequency: int, **_) -> int:
        return sum(e > burn_in and (e % frequency == 0 or e == epochs) for e in range(1, epochs + 1))

    full = steps(**{name: recipe("digits")[name] for name in ("epochs", "burn_in", "frequency")})
    assert full == 3
    for scale in (0.9, 0.8, 0.6, 0.4, 0.2):
        assert abs(steps(**scaled("digits", 1437, scale)) - full) <= 1
    assert steps(**scaled("digits", 1437, 0.001)) == 2
    for data in SOURCES:  # what bases learn, they learn before the last step
        for percent in range(1, 101):
            found = scaled(data, IMAGES[data], percent / 100)
            assert any(e % found["frequency"] == 0 for e in range(found["burn_in"] + 1, found["epochs"]))


def test_everything_else_is_the_recipes_or_what_was_asked_for():
    configs, _ = plan("layers", data="fashion-mnist", scale=0.1, rows=["f_fc+conv"], batch_size=32, frequency=7)
    for config, objective in zip(configs, ("map", "evidence"), strict=True):
        expected = {"train_size": 6000, "epochs": 2, "burn_in": 0, "batch_size": 32, "frequency": 7}
        assert config == configure("fashion-mnist", "plain", "f_fc+conv", objective, **expected)


def test_a_width_asked_for_is_shared_by_rows():
    configs, _ = plan("group-convs", data="digits", width=5)
    assert [(c.layer, c.group_conv, c.width) for c in configs] == [
        ("gconv", "full", 5),
        ("gconv", "separable", 5),
        ("gconv", "depthwise_separable", 5),
        ("gconv", "full", 3),
        ("gconv", "pointwise", 5),
        ("conv", "pointwise", 5),
    ]
    assert len({c.name for c in configs}) == 6


@pytest.mark.parametrize(
    ("width", "title", "narrow"), [(10, "GCONV, full, width 6", 6), (4, "GCONV, full, width 2", 2)]
)
def test_a_narrow_row_is_called_by_its_width(width, title, narrow):
    configs, plan_ = plan("group-convs", data="digits", width=width)
    found = {e.row.key: e for e in entries(plan_, configs, [])}
    assert found["full-6"].title == title and found["full-6"].configs[0].width == narrow
    assert found["full"].title == "GCONV, full"
    text = equivariances.comparison_table(plan_, list(found.values()))
    assert len(lines_of(text)) == 6 and (title, "MAP") in lines_of(text) and "width in the paper is 6" in text


def test_a_row_that_rounds_to_another_is_left_out_and_said():
    """0.6 of a channel is a channel."""
    configs, plan_ = plan("group-convs", data="digits", width=1, seeds=(0, 1))
    assert len(configs) == 2 * 5
    found = entries(plan_, configs, [])
    assert [e.row.key for e in found if e.status == "not run"] == ["full-6"]
    assert "not run: GCONV, full, narrow: at this width it is the row full." in equivariances.comparison_table(
        plan_, found
    )
    (alone,), plan_ = plan("group-convs", data="digits", width=1, rows=["full-6"])
    assert alone.width == 1 and [e.title for e in entries(plan_, [alone], [])] == ["GCONV, full, width 1"]


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("table-3", {}, "table must be one of toy, layers, groups, group-convs"),
        ("toy", {"scale": 0.0}, "scale must be above 0"),
        ("toy", {"scale": 1.01}, "scale must be above 0"),
        ("toy", {"scale": math.nan}, "scale must be above 0"),
        ("toy", {"scale": 1e-4}, "leaves none of the 1437 training images"),
        ("toy", {"rows": ["conv"]}, "the rows of toy are digit-fc, .*; got conv"),
        ("toy", {"data": "svhn"}, "data must be one of"),
        ("groups", {"data": "mnist", "rows": ["cifar10"]}, "none of the rows can be run: .*needs cifar10"),
        ("toy", {"width": 0}, "width must be at least 1"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table, options, words):
    with pytest.raises(ValueError, match=words):
        plan(table, **options)


def test_a_plan_survives_its_file():
    _, made = plan("groups", data="fashion-mnist", scale=0.3, seeds=(0, 1))
    assert Plan.from_json(made.to_json()) == made
    for change in ({"table": "x"}, {"cells": [{"row": "conv"}]}, {"more": 1}):
        with pytest.raises(ValueError, match="plan"):
            Plan.from_json({**made.to_json(), **change})
    with pytest.raises(ValueError, match="rows that table toy has not"):
        Plan.from_json({**made.to_json(), "table": "toy"})


def answer(configs, **by_run) -> list[dict]:
    """Rows of summary.json for these runs, with the numbers named."""
    named = {c.name: c for c in configs}
    rows = []
    for run, more in by_run.items():
        config = named[run]
        made = made_row(config.task, objective=config.objective, seed=config.seed, data=config.data, run=run)
        rows.append({**made, "layer": config.layer, "evaluated_size": 10_000, **more})
    return rows


def lines_of(text: str) -> dict[tuple[str, str], list[str]]:
    """Cells behind title and objective."""
    found, title = {}, ""
    for line in text.splitlines():
        for objective in ("MAP", "evidence"):
            head, mid, tail = line.partition(f"  {objective} ")
            if mid:
                title = head.strip() or title
                found[title, objective] = [cell.strip() for cell in tail.strip().split("  ") if cell.strip()]
    return found


def test_a_table_half_done_says_what_is_there():
    configs, plan_ = plan(
        "layers", data="fashion-mnist", scale=0.05, epochs=30, seeds=(0, 1), rows=["fc", "conv", "f_fc+conv"]
    )
    name = "fashion-mnist-plain-{}-seed{}".format
    rows = answer(
        configs,
        **{
            name("conv-map", 0): {"accuracy": 81.0, "nll": 0.5, "neg_log_marginal_likelihood": 7.0, "parameters": 1234},
            name("conv-map", 1): {"accuracy": 84.0, "nll": 0.9, "neg_log_marginal_likelihood": 9.0, "parameters": 1234},
            name("conv-evidence", 1): {"accuracy": 80.0, "nll": 0.625, "neg_log_marginal_likelihood": 1.25},
            name("f_fc+conv-map", 0): {"accuracy": 82.0, "nll": 0.75, "neg_log_marginal_likelihood": None},
        },
    )
    found = entries(plan_, configs, rows)
    text = equivariances.comparison_table(plan_, found)
    cells = lines_of(text)
    # Standard errors of two values are half their difference.
    assert cells["CONV", "MAP"] == [
        "82.50 ± 1.50", "82.81", "0.700 ± 0.200", "1.184", "8.000 ± 1.000", "-", "1,234",
    ]  # fmt: skip
    assert cells["CONV", "evidence"] == [
        "80.00 (1 of 2 seeds)", "84.07", "0.625", "0.464", "1.250", "1.022", "100",
    ]  # fmt: skip
    assert cells["F-FC+CONV", "MAP"] == ["82.00 (1 of 2 seeds)", "81.61", "0.750", "1.343", "-", "-", "100"]
    assert cells["F-FC+CONV", "evidence"] == ["waiting", "83.92", "-", "0.468", "-", "1.277", "-"]
    assert cells["FC", "evidence"] == ["not run", "52.36", "-", "1.319", "-", "1.896", "-"]
    assert len(cells) == 6
    assert "scale 0.05" in text
    (ours,) = (line for line in text.splitlines() if line.startswith("ours:"))
    assert ours == (
        "ours:  fashion-mnist, 3,000 of 60,000 training images, 30 epochs (recipe: 12), width 4, evidence every 4 epochs after 2; "
        "10,000 test images; mean ± standard error over seeds 0, 1"
    )
    assert "paper: cifar10, all training images, 4000 epochs, width 10" in text
    assert "not run: FC (evidence): the curvature of an FC path is large; --all runs it.\n8 other rows" in text

    table = list(csv.DictReader(io.StringIO(equivariances.comparison_csv(plan_, found))))
    assert len(table) == 6
    (conv,) = (r for r in table if (r["row"], r["objective"]) == ("conv", "map"))
    assert (conv["status"], conv["seeds"], conv["train_size"], conv["epochs"]) == ("done", "0 1", "3000", "30")
    assert (float(conv["accuracy"]), float(conv["accuracy_standard_error"])) == (82.5, 1.5)
    assert (float(conv["paper_nll"]), conv["paper_neg_log_marginal_likelihood"]) == (1.184, "")
    (waits,) = (r for r in table if (r["row"], r["objective"]) == ("f_fc+conv", "evidence"))
    assert (waits["status"], waits["accuracy"], waits["paper_accuracy"]) == ("waiting", "", "83.92")


def test_shares_of_the_groups():
    """Means over three layers, and over seeds; a layer without effective parameters does not count, which is said."""
    configs, plan_ = plan("groups", data="fashion-mnist", scale=0.1, rows=["mnist", "rotated-mnist", "cifar10"])
    shares = [(0.1, 0.2, 0.7), (0.3, 0.0, 0.7), (0.2, 0.1, 0.7)]
    layers = [
        {
            "name": f"blocks.{i}",
            "type": "gconv",
            "paths": {
                path: {"relative_effective_parameters": s}
                for path, s in zip(("f_fc", "conv", "gconv"), of, strict=True)
            },
        }
        for i, of in enumerate(shares)
    ]
    off = {"name": "blocks.3", "type": None, "paths": {p: {} for p in ("f_fc", "conv", "gconv")}}
    run = "fashion-mnist-plain-f_fc+conv+gconv-evidence-p4-pointwise-width2-seed0"
    found = entries(plan_, configs, answer(configs, **{run: {"layers": [*layers, off]}}))
    cells = lines_of(equivariances.comparison_table(plan_, found))
    assert cells["MNIST", "evidence"][-3:] == ["20/10/70 (of 3 of 4 layers)", "10/15/75", "100"]
    assert cells["MNIST", "MAP"][0] == "waiting"
    assert cells["MNIST, rotated", "evidence"][-2] == "8/8/83"
    assert "not run: CIFAR-10: needs cifar10" in equivariances.comparison_table(plan_, found)
    table = list(csv.DictReader(io.StringIO(equivariances.comparison_csv(plan_, found))))
    (line,) = (r for r in table if (r["row"], r["objective"]) == ("mnist", "evidence"))
    assert [float(line[f"{p}_share"]) for p in ("f_fc", "conv", "gconv")] == pytest.approx([20, 10, 70])
    assert [float(line[f"paper_{p}_share"]) for p in ("f_fc", "conv", "gconv")] == [10, 15, 75]
    (none,) = (e for e in entries(plan_, configs, answer(configs, **{run: {"layers": [off]}})) if e.rows)
    assert none.shares() is None


def test_a_miscounted_network_is_said():
    configs, plan_ = plan("group-convs", data="digits")
    text = equivariances.comparison_table(plan_, entries(plan_, configs, []))
    assert "139,735" in text and "139,725" in text
    assert text.count("waiting") == 6
    assert "NLL" not in text  # nobody has one


def dots(axis) -> tuple[dict, dict, list]:
    """Ours and the paper's values by the place of their row, and the ends of our bars."""
    hollow = [line for line in axis.lines if line.get_markerfacecolor() == "none"]
    filled = [line for line in axis.lines if line.get_marker() == "o" and line not in hollow]
    ours, printed = ({y: x for x, y in line.get_xydata().tolist()} for (line,) in (filled, hollow))
    bars = [segment[:, 0].tolist() for bars in axis.collections for segment in bars.get_segments()]
    return ours, printed, bars


def test_a_picture_has_our_numbers_beside_the_papers():
    rows = ["fc", "conv", "f_fc+conv"]
    configs, plan_ = plan("layers", data="fashion-mnist", scale=0.05, epochs=30, seeds=(0, 1), rows=rows)
    name = "fashion-mnist-plain-{}-seed{}".format
    done = answer(
        configs,
        **{
            name("conv-map", 0): {"accuracy": 81.0, "nll": 0.5, "neg_log_marginal_likelihood": 7.0},
            name("conv-map", 1): {"accuracy": 84.0, "nll": 0.9, "neg_log_marginal_likelihood": 9.0},
            name("f_fc+conv-evidence", 1): {"accuracy": 80.0, "nll": 9.0, "neg_log_marginal_likelihood": 1.25},
        },
    )
    figure = equivariances.draw_comparison(plan_, entries(plan_, configs, done))
    check_page(figure)
    check_same_sizes(figure)
    axes = shown(figure)
    assert [axis.get_title() for axis in axes] == ["MAP", "MAP", "evidence", "evidence", "evidence"]
    names = [axis.get_xlabel().split(",")[0] for axis in axes]
    assert names == ["accuracy", "NLL", "accuracy", "NLL", "-log q/N"]  # MAP's -log q/N is nowhere printed
    assert [t.get_text() for t in axes[0].get_yticklabels()] == ["FC (waiting)", "CONV", "F-FC+CONV (waiting)"]
    assert axes[0].get_ylim()[0] > axes[0].get_ylim()[1]  # the table's first row above
    ours, printed, bars = dots(axes[0])
    assert (ours, printed) == ({1: 82.5}, {0: 64.42, 1: 82.81, 2: 81.61})
    assert bars == [pytest.approx([81, 84])]  # of two values the standard error is half their difference
    ours, printed, bars = dots(axes[4])
    assert (ours, printed, bars) == ({2: 1.25}, {0: 1.896, 1: 1.022, 2: 1.277}, [])
    assert [axis.get_xscale() for axis in axes] == ["linear", "log", "linear", "log", "linear"]  # 9.0 over 0.464
    assert ["log scale" in axis.get_xlabel() for axis in axes] == [False, True, False, True, False]
    assert axes[1].get_xlim() == axes[3].get_xlim() and axes[0].get_xlim() == axes[2].get_xlim()
    assert "scale 0.05" in figure.get_suptitle() and "fashion-mnist" in figure.get_suptitle()
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == ["ours", "ours, mean ± standard error over 2 seeds", "the paper's"]


def test_a_failure_does_not_hide_what_the_others_differ_in():
    configs, plan_ = plan("toy")
    found = entries(plan_, configs, answer(configs, **{c.name: {"accuracy": 93.0} for c in configs}))
    figure = equivariances.draw_comparison(plan_, found)  # the paper has 24.68 and 24.5 % for CONV on quadrants
    axes = shown(figure)
    assert [axis.get_xlabel() for axis in axes] == ["accuracy, %, broken axis"] * 2
    assert axes[0].get_xlim() == axes[1].get_xlim()
    for axis in axes:
        left, right = axis.transAxes.inverted().transform(axis.transData.transform([(93, 0), (99, 0)]))[:, 0]
        assert right - left > 0.5  # on a plain axis 0.07


def test_every_table_has_a_picture_that_fits_on_a_page():
    for name, table in TABLES.items():
        configs, plan_ = plan(name, data=None if table.data else "digits", scale=0.5)
        rows = answer(configs, **{c.name: {"accuracy": 90.0, "nll": 0.5} for c in configs})
        check_page(equivariances.draw_comparison(plan_, entries(plan_, configs, rows)))


def test_without_a_number_of_both_there_is_no_picture(tmp_path):
    configs, plan_ = plan("toy", rows=["digit-f_fc+conv"])
    found = entries(plan_, configs, answer(configs, **{configs[0].name: {}}))  # MAP: not in the paper
    with pytest.raises(ValueError, match="both"):
        equivariances.draw_comparison(plan_, found)
    run_folder.write_config(tmp_path, [dataclasses.asdict(c) for c in configs], {"plan": plan_.to_json()})
    equivariances.save_comparison(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "comparison.txt", "comparison.csv"}
    rows = [run_folder.sealed_row(r, tmp_path) for r in answer(configs, **{configs[1].name: {}})]
    run_folder.write_summary(tmp_path, rows)
    equivariances.save_comparison(tmp_path)
    files = {p.name: p.read_bytes() for p in tmp_path.glob("comparison.*")}
    assert set(files) == {f"comparison.{suffix}" for suffix in ("txt", "csv", "png", "svg")}
    equivariances.save_comparison(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("comparison.*")} == files


def test_a_folder_of_other_runs_has_no_comparison(tmp_path):
    run = dataclasses.asdict(configure("digits", "digit", "conv", "map"))
    run_folder.write_config(tmp_path, [run], {})
    with pytest.raises(ValueError, match="not the folder of a table"):
        equivariances.save_comparison(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(table=5),
        lambda p: p.update(scale=5),
        lambda p: p.update(images=5),
        lambda p: p.update(cells=5),
        lambda p: p["cells"][0].update(row=5),
        lambda p: p["cells"][0].update(objective=5),
        lambda p: p["cells"][0].update(runs=["no run"]),
        lambda p: p.pop("cells"),
    ],
)
def test_a_plan_that_does_not_fit_its_runs_is_named(tmp_path, change):
    configs, plan_ = plan("toy", rows=["digit-f_fc+conv"])
    stored = plan_.to_json()
    stored["cells"] = list(stored["cells"])
    change(stored)
    run_folder.write_config(tmp_path, [dataclasses.asdict(c) for c in configs], {"plan": stored})
    with pytest.raises(ValueError, match=r"plan|scale"):
        equivariances.read_comparison(tmp_path)

"""The paper's tables as data: rows and printed numbers.

Source: van der Ouderaa, Immer, van der Wilk, "Learning Layer-wise Equivariances Automatically using Gradients", NeurIPS 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Printed:
    """What the paper prints for a row under one objective; None where it prints nothing.

    Attributes:
        accuracy: on test images, in percent.
        nll: mean negative log likelihood on test images, in nats.
        neg_log_marginal_likelihood: ``-log q / N``, in nats per training image.
        parameters: of the network.
        shares: mean over layers of each path's relative effective parameters, in percent, in the order of the row's layer.
    """

    accuracy: float | None = None
    nll: float | None = None
    neg_log_marginal_likelihood: float | None = None
    parameters: int | None = None
    shares: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        key: names the row within its table, for options and files.
        title: as people write it, without the width.
        data: the paper's data set, a name of :data:`ella_cuda.data.SOURCES`.
        task: a name of :data:`ella_cuda.data.TASKS`.
        layer: see :func:`ella_cuda.models.neyshabur`.
        printed: by objective, for those that are run; a :class:`Printed` of Nones where the paper has no number.
        learn: what the evidence learns of sparsified layers' bases; MAP runs learn nothing of them, so rows that differ in it
            share theirs.
        changes: other attributes of :class:`ella_cuda.experiments.RunConfig` that the row has of its own.
        width_share: the row's width over the table's.
        note: printed below the table.
    """

    key: str
    title: str
    data: str
    task: str
    layer: str
    printed: Mapping[str, Printed]
    learn: str = ""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    width_share: float = 1.0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        name: of the command's argument.
        title: one line on what it shows.
        rows: in the paper's order.
        paper_width: α of the paper's networks.
        data: the data set that stands in for the paper's unless another is named; None for the paper's own.
        width: α where the table's networks must not be as wide as the data set's recipe says; None for the recipe's.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    paper_width: int
    data: str | None = None
    width: int | None = None


PAPER_EPOCHS = {"mnist": 1000, "cifar10": 4000}
# The paper's appendix, in attributes of RunConfig; the norm of polyphase components is the released code's.
PUBLISHED = {
    "init": "published",
    "pool_norm": "inf",
    "batch_size": 128,
    "lr": 0.01,
    "fan_in_limit": None,
    "cooldown": None,
    "restarts": "none",
    "prior_prec_init": 1.0,
    "column_tolerance": 0.0,
    "hyper_optimizer": "adam",
    "lr_hyp": 0.1,
    "burn_in": 10,
    "frequency": 5,
    "hypersteps": 20,
}
WHOSE = ("data", "published")  # recipes: the data set's, or the paper's


def _toy() -> tuple[Row, ...]:
    accuracies = {  # MAP, evidence
        ("digit", "fc"): (95.73, 97.04),
        ("digit", "conv"): (99.38, 99.23),
        ("digit", "f_fc+conv"): (None, 98.86),
        ("quadrant", "fc"): (95.10, 95.46),
        ("quadrant", "conv"): (24.68, 24.50),
        ("quadrant", "f_fc+conv"): (None, 99.00),
    }
    titles = {"fc": "FC", "conv": "CONV", "f_fc+conv": "F-FC+CONV, learned"}
    return tuple(
        Row(
            key=f"{task}-{layer}",
            title=f"{task}, {titles[layer]}",
            data="mnist",
            task=task,
            layer=layer,
            printed={"map": Printed(accuracy=by_map), "evidence": Printed(accuracy=by_evidence)},
        )
        for (task, layer), (by_map, by_evidence) in accuracies.items()
    )


def _both(map_nll: float, map_accuracy: float, nll: float, accuracy: float, evidence: float) -> dict[str, Printed]:
    """A line as the paper orders it."""
    return {"map": Printed(map_accuracy, map_nll), "evidence": Printed(accuracy, nll, evidence)}


def _layers() -> tuple[Row, ...]:
    dense = {
        "fc": ("FC", _both(2.423, 64.42, 1.319, 52.36, 1.896)),
        "conv": ("CONV", _both(1.184, 82.81, 0.464, 84.07, 1.022)),
        "fc+conv": ("FC+CONV", _both(1.713, 76.93, 0.489, 83.32, 1.019)),
        "f_fc": ("F-FC", _both(4.291, 50.47, 1.307, 53.38, 2.119)),
        "f_fc+conv": ("F-FC+CONV", _both(1.343, 81.61, 0.468, 83.92, 1.277)),
    }
    sparse = {
        ("s_fc", "anchors"): ("S-FC", _both(5.614, 50.21, 1.496, 46.18, 1.926)),
        ("s_conv", "anchors"): ("S-CONV", _both(0.604, 82.53, 0.562, 81.29, 1.037)),
        ("s_fc+s_conv", "anchors"): ("S-FC+S-CONV", _both(5.485, 58.80, 0.538, 81.55, 0.978)),
        ("s_fc", "lengthscales"): ("S-FC", _both(7.783, 49.69, 1.319, 52.22, 1.813)),
        ("s_conv", "lengthscales"): ("S-CONV", _both(0.913, 81.84, 0.549, 81.20, 1.055)),
        ("s_fc+s_conv", "lengthscales"): ("S-FC+S-CONV", _both(2.040, 77.97, 0.564, 80.63, 1.067)),
    }
    rows = [Row(layer, title, "cifar10", "plain", layer, printed) for layer, (title, printed) in dense.items()]
    for (layer, learn), (title, printed) in sparse.items():
        rows.append(
            Row(f"{layer}-{learn}", f"{title}, prior on {learn}", "cifar10", "plain", layer, printed, learn=learn)
        )
    return tuple(rows)


def _groups() -> tuple[Row, ...]:
    lines = {  # MAP NLL and accuracy, evidence NLL and accuracy, -log q/N; shares of F-FC, CONV, GCONV
        ("mnist", "plain"): ("MNIST", _both(0.172, 97.59, 0.023, 99.21, 0.328), (10, 15, 75)),
        ("mnist", "translated"): ("MNIST, translated", _both(0.812, 90.78, 0.053, 98.27, 0.216), (0, 23, 77)),
        ("mnist", "rotated"): ("MNIST, rotated", _both(0.819, 91.02, 0.136, 95.55, 0.896), (8, 8, 83)),
        ("cifar10", "plain"): ("CIFAR-10", _both(3.540, 68.33, 0.552, 80.94, 0.926), (0, 44, 56)),
        ("cifar10", "rotated"): ("CIFAR-10, rotated", _both(5.953, 48.30, 1.236, 55.68, 1.630), (4, 14, 82)),
    }
    rows = []
    for (data, task), (title, printed, shares) in lines.items():
        numbers = {**printed, "evidence": dataclasses.replace(printed["evidence"], shares=shares)}
        key = data if task == "plain" else f"{task}-{data}"
        rows.append(Row(key, title, data, task, "f_fc+conv+gconv", numbers, changes={"group_conv": "pointwise"}))
    return tuple(rows)


def _group_convs() -> tuple[Row, ...]:
    def row(key: str, title: str, parameters: int, accuracy: float, variant: str | None, **more: Any) -> Row:
        layer, changes = ("conv", {}) if variant is None else ("gconv", {"group_conv": variant})
        printed = {"map": Printed(accuracy=accuracy, parameters=parameters)}
        return Row(key, title, "cifar10", "rotated", layer, printed, changes=changes, **more)

    miscounted = (
        "the depth-wise separable network of the paper's sizes has 139,725 parameters; the paper prints 139,735"
    )
    return (
        row("full", "GCONV, full", 1_025_380, 73.70, "full"),
        row("separable", "GCONV, separable", 214_550, 61.31, "separable"),
        row(
            "depthwise_separable",
            "GCONV, depth-wise separable",
            139_735,
            51.63,
            "depthwise_separable",
            note=miscounted,
        ),
        row(
            "full-6",
            "GCONV, full",
            371_200,
            69.89,
            "full",
            width_share=0.6,
            note="the narrow row's width in the paper is 6",
        ),
        row("pointwise", "GCONV, pointwise", 338_770, 66.77, "pointwise"),
        row("conv", "CONV", 338_770, 57.89, None),
    )


_ALL = (
    Table("toy", "Toy problem: an image in one of four quadrants; which, or which and where", _toy(), 10, "digits"),
    Table("layers", "Equivariant layers on CIFAR-10", _layers(), 10),
    Table("groups", "Groups: F-FC+CONV+GCONV, mean shares of effective parameters", _groups(), 2, width=2),
    Table("group-convs", "Group convolutions on rotated CIFAR-10, by MAP", _group_convs(), 10),
)
TABLES: dict[str, Table] = {table.name: table for table in _ALL}

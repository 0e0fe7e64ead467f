"""Plan of a table at a scale: the runs that answer each row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ella_cuda.experiments.declaring import settings_of
from ella_cuda.experiments.hyperparameters import DENSE_PATH, DENSE_REASON, RunConfig, configure, recipe
from ella_cuda.papers.equivariances.tables import PAPER_EPOCHS, PUBLISHED, TABLES, WHOSE, Row, Table

# Whose rows a data set answers in a table that has none of its own, where there are several data sets to choose from.
STANDS_FOR = {"digits": "mnist", "fashion-mnist": "mnist", "cifar100": "cifar10"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A row under one objective.

    Attributes:
        row: its key. objective: ``map`` or ``evidence``.
        runs: names of the runs that answer it, one for each seed; rows may share those of an objective, not all.
        reason: why there are none.
    """

    row: str
    objective: str
    runs: tuple[str, ...]
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A table as it is run.

    Attributes:
        table: a name of :data:`ella_cuda.papers.equivariances.TABLES`.
        scale: share of the training images and of the epochs.
        images: by data set, how many training images it has at full scale.
        cells: every row that is asked for, under every objective that it has.
        recipe: ``data``, the data set's, or ``published``, the paper's.
    """

    table: str
    scale: float
    images: dict[str, int]
    cells: tuple[Cell, ...]
    recipe: str = WHOSE[0]

    def to_json(self) -> dict[str, Any]:
        """As ``config.json`` keeps it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Plan:
        """What :meth:`to_json` made.

        Raises:
            ValueError: a table, row or attribute that is not known.
        """
        try:
            cells = tuple(Cell(**{**cell, "runs": tuple(cell["runs"])}) for cell in stored["cells"])
            plan = cls(**{**stored, "cells": cells})
            known = {row.key for row in TABLES[plan.table].rows}
            _check_scale(plan.scale)
            plan.images.items()
            _check_whose("recipe", plan.recipe)
            unknown = {cell.row for cell in cells} - known
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the plan of a table is damaged or of another version ({error!r}).") from error
        if unknown:
            raise ValueError(f"the plan has rows that table {plan.table} has not: {', '.join(map(str, unknown))}.")
        return plan


def scaled(
    data: str, images: int, scale: float, epochs: int | None = None, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The attributes of a run that follow the scale.

    The training images are a share ``scale`` of all, and so are the recipe's epochs. Burn-in and frequency shrink as the epochs do, so
    that a run has as many evidence steps as at full scale, or one every epoch where that is fewer. All are rounded to the next whole
    number. There are at least 2 epochs, frequency is at least 1, and burn-in leaves time for an evidence step before that of the last
    epoch where there is any. Nothing else changes.

    Args:
        data: a name of :data:`ella_cuda.data.SOURCES`.
        images: how many training images there are.
        scale: above 0, at most 1.
        epochs: instead of that share of the recipe's. With more than the recipe has, burn-in and frequency are the recipe's.
        own: a recipe's ``epochs``, ``burn_in`` and ``frequency``; None for the data set's.

    Raises:
        ValueError: the scale is out of range, or leaves no image.
    """
    _check_scale(scale)
    own = recipe(data) if own is None else own
    train_size = _whole(scale * images)
    if train_size < 1:
        raise ValueError(f"scale {scale} leaves none of the {images} training images of {data}; raise it.")
    share = scale if epochs is None else min(1.0, epochs / own["epochs"])
    epochs = max(2, _whole(scale * own["epochs"])) if epochs is None else epochs
    frequency = max(1, _whole(share * own["frequency"]))
    return {
        "train_size": None if train_size == images else train_size,
        "epochs": epochs,
        "burn_in": max(0, min(_whole(share * own["burn_in"]), epochs - 1 - frequency)),
        "frequency": frequency,
    }


def plan_table(
    name: str,
    images_of: Callable[[str], int],
    *,
    data: str | None = None,
    scale: float = 1.0,
    rows: Collection[str] | None = None,
    seeds: Sequence[int] = (0,),
    dense: bool = False,
    whose: str = WHOSE[0],
    **changes: Any,
) -> tuple[list[RunConfig], Plan]:
    """The runs of a table.

    Args:
        name: of :data:`ella_cuda.papers.equivariances.TABLES`.
        images_of: the number of training images of a data set; called once for each that is used.
        data: the data set that stands in for the paper's; None for the table's choice. In a table of several data sets, one of these
            answers its own rows, another the rows of the one it is most like (:data:`STANDS_FOR`).
        scale: see :func:`scaled`.
        rows: keys of the rows to run; None for all.
        seeds: of the runs; every cell has one run for each.
        dense: evidence for layers with an FC path too, whose curvature is large.
        whose: recipe the runs follow: ``data``, the data set's, or ``published``, the paper's with its epochs and width
            (:data:`ella_cuda.papers.equivariances.tables.PUBLISHED`).
        **changes: attributes of :class:`ella_cuda.experiments.RunConfig`, in place of the recipe's, the table's and the scale's; a
            ``width`` is that of the table, of which some rows have a share.

    Returns:
        The runs, each once, seed by seed; and the plan that says which cells they answer.

    Raises:
        ValueError: an unknown table, row or data set, a change of what a row is about, or what :func:`scaled` and :class:`RunConfig` raise.
    """
    if name not in TABLES:
        raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r}.")
    _check_whose("whose", whose)
    _check_scale(scale)
    table = TABLES[name]
    published = PUBLISHED | {"width": table.paper_width} if whose == "published" else {}
    keys = [row.key for row in table.rows]
    rows = keys if rows is None else rows
    if unknown := [key for key in rows if key not in keys]:
        raise ValueError(f"the rows of {name} are {', '.join(keys)}; got {', '.join(unknown)}.")
    known = settings_of(RunConfig)
    for attribute in changes.keys() & known.keys():  # before numbers are made of them
        known[attribute].checked(changes[attribute])
    data = table.data if data is None else known["data"].checked(data)
    answered = _answered(table, data)
    numbers: dict[tuple[str, str], dict[str, Any]] = {}
    images: dict[str, int] = {}
    configs: dict[str, RunConfig] = {}
    runs: dict[tuple[str, str], list[str]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for row in (row for row in table.rows if row.key in rows):
        if fixed := sorted(changes.keys() & {*row.changes, "learn"}):
            raise ValueError(f"{', '.join(fixed)} is what the rows of {name} differ in; choose rows instead.")
    for seed in dict.fromkeys(seeds):
        for row in (row for row in table.rows if row.key in rows):
            for objective in row.printed:
                cell = runs.setdefault((row.key, objective), [])
                reason = _why_not(row, objective, answered, dense)
                if reason:
                    reasons[row.key, objective] = reason
                    continue
                used = data or row.data
                if used not in images:
                    images[used] = images_of(used)
                if (used, row.data) not in numbers:
                    own = published and {**published, "epochs": PAPER_EPOCHS[row.data]}
                    numbers[used, row.data] = published | scaled(
                        used, images[used], scale, changes.get("epochs"), own or None
                    )
                config = _configure(table, row, used, objective, seed, numbers[used, row.data], changes)
                if configs.setdefault(config.name, config) != config:
                    raise ValueError(f"two different runs of {name} have the name {config.name}.")
                cell.append(config.name)
    first: dict[tuple[tuple[str, ...], ...], str] = {}
    for row in (row for row in table.rows if row.key in rows):
        own = tuple(tuple(runs[row.key, objective]) for objective in row.printed)
        same = first.setdefault(own, row.key)
        if same != row.key and any(own):  # a share of a width can be that width, rounded
            for objective in row.printed:
                runs[row.key, objective], reasons[row.key, objective] = [], f"at this width it is the row {same}"
    if not configs:
        raise ValueError(f"none of the rows can be run: {'; '.join(dict.fromkeys(reasons.values()))}.")
    cells = tuple(Cell(*where, tuple(found), reasons.get(where, "")) for where, found in runs.items())
    return list(configs.values()), Plan(name, scale, images, cells, whose)


def _check_scale(scale: float) -> None:
    if not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale}.")


def _check_whose(name: str, value: str) -> None:
    if value not in WHOSE:
        raise ValueError(f"{name} must be one of {', '.join(WHOSE)}, got {value!r}.")


def _answered(table: Table, data: str | None) -> set[str]:
    """The paper's data sets whose rows are run."""
    own = {row.data for row in table.rows}
    if data is None or len(own) == 1:
        return own
    return {data if data in own else STANDS_FOR[data]}


def _why_not(row: Row, objective: str, answered: set[str], dense: bool) -> str:
    if row.data not in answered:
        return f"needs {row.data}, for which the chosen data set does not stand in"
    if objective == "evidence" and DENSE_PATH in row.layer.split("+") and not dense:
        return DENSE_REASON
    return ""


def _configure(
    table: Table, row: Row, data: str, objective: str, seed: int, numbers: dict[str, Any], changes: dict[str, Any]
) -> RunConfig:
    width = changes.get("width", numbers.get("width", table.width or recipe(data)["width"]))
    own = {
        "learn": row.learn if objective == "evidence" else "",
        "width": max(min(1, width), _whole(row.width_share * width)),
        **row.changes,
    }
    return configure(data, row.task, row.layer, objective, seed, **{**numbers, **changes, **own})


def _whole(x: float) -> int:
    return math.floor(x + 0.5)

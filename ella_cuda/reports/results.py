"""The results of a grid of runs: the paper's Table 1, and the files of a run's folder."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.digest import DIGEST
from ella_cuda.files import write_file
from ella_cuda.reports.layers import layer_table
from ella_cuda.reports.pictures import save_pictures
from ella_cuda.reports.text import (
    AMOUNTS,
    CALIBRATION,
    METRICS,
    OBJECTIVE_TITLES,
    WAYS,
    columns,
    mean,
    network_title,
    number,
    run_title,
)
from ella_cuda.run_folder import CSV_FILE, TABLE_FILE, write_summary

Rows = Sequence[Mapping[str, Any]]
NESTED = (
    "layers",
    "other_parameters",
    "reliability",
    "leave_one_out",
    "ood",
    "rotations",
    "augmentation",
    "error_bars",
    DIGEST,
)  # of a row
WHERE = {"test": "test images", "holdout": "held-out training images", "train": "training images"}


def results_table(rows: Rows) -> str:
    """Accuracy, NLL and ``-log q/N``, where rows have them calibration and the AUROC of other data: a line for each data set and task, a
    column for each objective and layer; means over seeds.

    ``-`` stands for what was not run or not computed. ``*`` marks a mean over fewer seeds than others.

    Source: the layout of van der Ouderaa et al., NeurIPS 2023, Table 1.
    """
    if not rows:
        return "no finished run"
    tasks = list(dict.fromkeys((r["data"], r["task"]) for r in rows))
    sets = {r["data"]: f"{r['evaluated_size']} {WHERE[r['evaluated_on']]}" for r in rows}
    kinds = [
        (o, network)
        for o in OBJECTIVE_TITLES
        for network in dict.fromkeys(network_title(r, rows) for r in rows if r["objective"] == o)
    ]
    seeds = sorted({r["seed"] for r in rows})
    objectives = [OBJECTIVE_TITLES[o] if i == 0 or kinds[i - 1][0] != o else "" for i, (o, _) in enumerate(kinds)]
    blocks: list[list[str]] = [["", *objectives]]
    values = [flattened(r) for r in rows]
    known = {
        k: one for k, one in {**METRICS, **CALIBRATION, **_auroc_titles(rows)}.items() if any(k in v for v in values)
    }
    for key, (title, style) in known.items():
        blocks.append([title, *(network for _, network in kinds)])
        for data, task in tasks:
            line = [f"  {task}" if len(sets) == 1 else f"  {data}, {task}"]
            for objective, network in kinds:
                kind = (data, task, objective, network)
                found = [
                    value
                    for r, value in zip(rows, values, strict=True)
                    if (r["data"], r["task"], r["objective"], network_title(r, rows)) == kind
                ]
                value = mean(r.get(key) for r in found)
                line.append("-" if value is None else style.format(value) + ("*" if len(found) < len(seeds) else ""))
            blocks.append(line)
    about = "; ".join(f"{data}, evaluated on {size}" for data, size in sets.items()) + "; "
    about += f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over seeds {', '.join(map(str, seeds))}"
    return about + "\n" + columns(blocks)


def rotations_table(rows: Rows) -> str:
    """Accuracy and NLL of the images that runs turned, empty without such: a line for each run's network and way to predict, a column for
    each angle in degrees; means over seeds."""
    turned = [r for r in rows if "rotations" in r]
    if not turned:
        return ""
    kinds: dict[str, list[list[Mapping[str, Any]]]] = {}
    for row in turned:
        name = f"{row['data']}, {row['task']}, {network_title(row, rows)}, {OBJECTIVE_TITLES[row['objective']]}"
        for way, found in row["rotations"].items():
            kinds.setdefault(f"  {name}, {WAYS[way]}", []).append(found)
    degrees = [one["degrees"] for one in next(iter(kinds.values()))[0]]
    lines = []
    for key in ("accuracy", "nll"):
        title, style = METRICS[key]
        lines.append([f"turned images: {title}", *(f"{d}\u00b0" for d in degrees)])
        for name, found in kinds.items():
            means = [mean(one[key] for one in at) for at in zip(*found, strict=True)]
            lines.append([name, *(style.format(value) for value in means)])
    return columns(lines)


def amounts_table(rows: Rows) -> str:
    """The amounts of learned augmentations, empty without such: a line for each run."""
    learned = [r for r in rows if r.get("augmentation")]
    if not learned:
        return ""
    names = [name for name in AMOUNTS if any(name in r["augmentation"] for r in learned)]
    lines = [
        [
            "learned augmentation",
            *(f"{name}, {unit}" if unit else name for name in names for unit in [AMOUNTS[name][0]]),
        ]
    ]
    for row in learned:
        cells = (row["augmentation"].get(name) for name in names)
        values = (None if v is None else v * AMOUNTS[n][1] for n, v in zip(names, cells, strict=True))
        lines.append([f"  {run_title(row)}", *map(number, values)])
    return columns(lines)


def run_tables(rows: Rows) -> list[str]:
    """The tables of finished runs but for those of layers; no table is empty."""
    return [table for table in (results_table(rows), rotations_table(rows), amounts_table(rows)) if table]


def _auroc_titles(rows: Rows) -> dict[str, tuple[str, str]]:
    """Title and style of what :func:`flattened` makes of ``ood``."""
    found = {}
    for key in dict.fromkeys(key for row in rows for key in flattened({"ood": row.get("ood", {})})):
        _, data, score, *way = key.split()
        score = score.replace("_", " ").replace("max", "maximum")
        found[key] = (f"AUROC of {data}, {score}{'' if way else ', predictive'}", "{:.3f}")
    return found


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's single values, those of other data and of turned images among them: ``ood mnist entropy`` of the predictive, ``ood mnist
    entropy plugin`` of the softmax."""
    cells = {k: v for k, v in row.items() if k not in NESTED}
    for data, ways in row.get("ood", {}).items():
        for way, scores in ways.items():
            cells |= {f"ood {data} {score}{_of(way)}": value for score, value in scores.items()}
    cells |= {f"augmentation {name}": value for name, value in row.get("augmentation", {}).items()}
    for way, turned in row.get("rotations", {}).items():
        for one in turned:
            cells |= {f"rotated {one['degrees']} {k}{_of(way)}": v for k, v in one.items() if k != "degrees"}
    return cells


def _of(way: str) -> str:
    return "" if way == "predictive" else f" {way}"


def results_csv(rows: Rows) -> str:
    """The rows as CSV: their single values, and type and share of effective parameters for every layer."""
    flat = []
    for row in rows:
        cells = flattened(row)
        for layer in row["layers"]:
            cells[f"{layer['name']} type"] = layer["type"]
            for path, entry in layer["paths"].items():
                cells[f"{layer['name']} {path} share"] = entry["relative_effective_parameters"]
                cells[f"{layer['name']} {path} effective_parameters"] = entry["effective_parameters"]
                cells[f"{layer['name']} {path} weight_norm"] = entry.get("weight_norm")
                for key in ("prior_precision", "inverse_lengthscale"):
                    for name, value in entry.get(key, {}).items():
                        cells[f"{layer['name']} {path} {name} {key}"] = value
                for name, moved in entry.get("anchors", {}).items():
                    cells[f"{layer['name']} {path} {name} mean_displacement"] = moved["mean_displacement"]
        flat.append(cells)
    out = io.StringIO()
    writer = csv.DictWriter(
        out, fieldnames=list(dict.fromkeys(k for cells in flat for k in cells)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def learned(rows: Rows) -> Rows:
    """The rows whose layers learned something by the evidence: which of several paths, or the bases of sparsified ones; and those of a
    learned augmentation."""
    return [r for r in rows if r["objective"] == "evidence" and ("+" in r["layer"] or r.get("learn"))]


def save_report(rows: Rows, out_dir: Path) -> None:
    """Write ``summary.json``, ``summary.csv``, ``table.txt`` and the pictures, see
    :func:`ella_cuda.reports.pictures.save_pictures`.

    Each file is whole at any moment, ``summary.json`` comes first and pictures last: one that cannot be drawn is a
    ``RuntimeWarning`` and costs nothing else.

    Raises:
        OSError: the folder cannot be written; the files that were there are untouched.
    """
    write_summary(out_dir, rows)
    write_file(out_dir / CSV_FILE, results_csv(rows))
    text = "\n\n".join(filter(None, (*run_tables(rows), layer_table(learned(rows)))))
    write_file(out_dir / TABLE_FILE, text + "\n")
    for failure in save_pictures(rows, out_dir, out_dir).failures:
        warnings.warn(failure, RuntimeWarning, stacklevel=2)

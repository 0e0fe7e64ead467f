"""Our numbers beside the paper's."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from ella_cuda.experiments.folder import read_grid
from ella_cuda.experiments.hyperparameters import recipe
from ella_cuda.files import damaged, write_file
from ella_cuda.papers.equivariances.entry import Entry, entries
from ella_cuda.papers.equivariances.pictures import draw_comparison
from ella_cuda.papers.equivariances.plan import Plan
from ella_cuda.papers.equivariances.tables import PAPER_EPOCHS, TABLES
from ella_cuda.reports.pictures import Drawn, add_picture
from ella_cuda.reports.text import METRICS, OBJECTIVE_TITLES, PATH_TITLES, columns, counted
from ella_cuda.run_folder import CONFIG_FILE, GRID_ADVICE, read_summary

COMPARISON_TEXT, COMPARISON_CSV, COMPARISON_PICTURE = "comparison.txt", "comparison.csv", "comparison"


def comparison_table(plan: Plan, found: Sequence[Entry]) -> str:
    """A line for each row and objective, ours and the paper's side by side under a header that states our scale.

    ``-`` stands for what was not computed, or not printed in the paper. Columns in which nobody has a number are left out.
    """
    blocks = [["", ""], ["row", "objective"]]
    lines = [
        ["" if i and found[i - 1].row is e.row else e.title, OBJECTIVE_TITLES[e.objective]] for i, e in enumerate(found)
    ]
    for title, ours, printed in _columns(found):
        if not any(x != "-" for x in (*ours, *printed)):
            continue
        if any(x != "-" for x in printed):
            blocks[0] += [title, ""]
            blocks[1] += ["ours", "paper"]
            lines = [[*line, o, p] for line, o, p in zip(lines, ours, printed, strict=True)]
        else:
            blocks[0].append(title)
            blocks[1].append("ours")
            lines = [[*line, o] for line, o in zip(lines, ours, strict=True)]
    return "\n".join([*_header(plan, found), "", columns([*blocks, *lines], left=2), *_notes(plan, found)])


def _columns(found: Sequence[Entry]) -> Iterable[tuple[str, list[str], list[str]]]:
    """Title, our cells and the paper's."""
    for metric, (title, style) in METRICS.items():
        ours = [_shown(e.ours(metric), style) for e in found]
        if metric == "accuracy":  # every run has one: what is missing says why
            ours = [f"{cell} ({e.status})" if " of " in e.status else cell for cell, e in zip(ours, found, strict=True)]
            ours = [e.status if cell == "-" else cell for cell, e in zip(ours, found, strict=True)]
        yield title, ours, [_shown_one(getattr(e.printed, metric), style) for e in found]
    shared = [e for e in found if e.printed.shares is not None]
    if shared:
        paths = shared[0].row.layer.split("+")
        ours = [_shown_shares(e, paths) if e in shared else "-" for e in found]
        printed = ["-" if e.printed.shares is None else "/".join(f"{s:.0f}" for s in e.printed.shares) for e in found]
        yield f"{'/'.join(PATH_TITLES.get(p, p) for p in paths)}, %", ours, printed
    counts = [_shown_one(e.parameters(), "{:,}") for e in found]
    yield "parameters", counts, [_shown_one(e.printed.parameters, "{:,}") for e in found]


def _shown_one(value: float | None, style: str) -> str:
    return "-" if value is None else style.format(value)


def _shown(value: tuple[float, float | None] | None, style: str) -> str:
    if value is None:
        return "-"
    mean, error = value
    return style.format(mean) + ("" if error is None else " ± " + style.format(error))


def _shown_shares(entry: Entry, paths: Sequence[str]) -> str:
    shares, counted = entry.shares(), entry.counted_layers()
    if shares is None or counted is None:
        return "-"
    text = "/".join(f"{shares[p][0]:.0f}" for p in paths)
    errors = [shares[p][1] for p in paths]
    text = text if None in errors else text + " ± " + "/".join(f"{e:.0f}" for e in errors)
    return text if counted[0] == counted[1] else f"{text} (of {counted[0]} of {counted[1]} layers)"


def _header(plan: Plan, found: Sequence[Entry]) -> list[str]:
    table = TABLES[plan.table]
    lines = [f"{table.title}. Table of van der Ouderaa et al., NeurIPS 2023; scale {plan.scale:g}"]
    for data, images in plan.images.items():
        configs = [c for e in found for c in e.configs if c.data == data]
        rows = [r for e in found for r in e.rows if r["data"] == data]
        one = next((c for c in configs if c.objective == "evidence"), configs[0])
        text = f"{one.train_size or images:,} of {images:,} training images, {_epochs(one.epochs)}"
        if plan.recipe == "published":
            text += " (recipe: the paper's)"
        elif one.epochs != (usual := recipe(data)["epochs"]):
            text += f" (recipe: {usual})"
        text += f", width {_listed(c.width for c in configs)}"
        if one.objective == "evidence":
            text += f", evidence every {_epochs(one.frequency, 'epoch')} after {one.burn_in}"
        if rows:
            text += f"; {rows[0]['evaluated_size']:,} test images"
        seeds = sorted({c.seed for c in configs})
        text += f"; seed {seeds[0]}" if len(seeds) == 1 else f"; mean ± standard error over seeds {_listed(seeds)}"
        lines.append(f"ours:  {data}, {text}")
    for data in dict.fromkeys(row.data for row in table.rows):
        lines.append(f"paper: {data}, all training images, {_epochs(PAPER_EPOCHS[data])}, width {table.paper_width}")
    return lines


def _epochs(count: int, one: str = "1 epoch") -> str:
    return one if count == 1 else f"{count} epochs"


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _notes(plan: Plan, found: Sequence[Entry]) -> list[str]:
    """Which rows are not here, why some are not run, and what there is to say about others."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for e in found:
        if e.reason:
            reasons.setdefault(e.reason, {}).setdefault(e.title, []).append(OBJECTIVE_TITLES[e.objective])
    all_of = {e.title: len(e.row.printed) for e in found}
    notes = []
    for reason, which in reasons.items():
        titles = (t if len(o) == all_of[t] else f"{t} ({', '.join(o)})" for t, o in which.items())
        notes.append(f"not run: {'; '.join(titles)}: {reason}.")
    if others := len(TABLES[plan.table].rows) - len(all_of):
        notes.append(f"{counted(others, 'other row')} of the table {'was' if others == 1 else 'were'} not asked for.")
    notes += [f"{note}." for note in dict.fromkeys(e.row.note for e in found if e.row.note)]
    return ["", *notes] if notes else []


def comparison_csv(plan: Plan, found: Sequence[Entry]) -> str:
    """The same as CSV, a line for each row and objective; empty cells for what there is not."""
    lines = []
    for e in found:
        first = e.configs[0] if e.configs else None
        cells = {
            "table": plan.table,
            "row": e.row.key,
            "title": e.title,
            "objective": e.objective,
            "status": e.status,
            "reason": e.reason,
            "scale": plan.scale,
            "data": first and first.data,
            "paper_data": e.row.data,
            "task": e.row.task,
            "layer": e.row.layer,
            "learn": first and first.learn,
            "train_size": first and (first.train_size or plan.images[first.data]),
            "epochs": first and first.epochs,
            "width": first and first.width,
            "seeds": " ".join(str(r["seed"]) for r in e.rows),
            "runs": " ".join(c.name for c in e.configs),
            "seconds": sum(r["seconds"] for r in e.rows) if e.rows else None,
            "parameters": e.parameters(),
            "paper_parameters": e.printed.parameters,
        }
        for metric in METRICS:
            mean, error = e.ours(metric) or (None, None)
            cells |= {metric: mean, f"{metric}_standard_error": error, f"paper_{metric}": getattr(e.printed, metric)}
        paths = e.row.layer.split("+")
        shares = e.shares() if len(paths) > 1 else None
        for i, path in enumerate(paths if len(paths) > 1 else ()):
            mean, error = shares[path] if shares else (None, None)
            printed = e.printed.shares and e.printed.shares[i]
            cells |= {f"{path}_share": mean, f"{path}_share_standard_error": error, f"paper_{path}_share": printed}
        lines.append(cells)
    out = io.StringIO()
    names = list(dict.fromkeys(name for cells in lines for name in cells))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def read_comparison(out_dir: str | os.PathLike[str]) -> tuple[Plan, list[Entry]]:
    """A folder's plan, and its rows with the runs that are finished.

    Raises:
        ValueError: not the folder of a table, or its plan does not fit its runs.
    """
    configs, options = read_grid(out_dir)
    if "plan" not in options:
        raise ValueError(f"{out_dir} is not the folder of a table of the paper: its {CONFIG_FILE} has no plan.")
    plan = Plan.from_json(options["plan"])
    try:
        return plan, entries(plan, configs, read_summary(out_dir))
    except (LookupError, TypeError, AttributeError) as error:
        raise damaged(Path(out_dir) / CONFIG_FILE, f"its plan: {error!r}", GRID_ADVICE) from error


def save_comparison(out_dir: str | os.PathLike[str]) -> str:
    """Bring ``comparison.txt``, ``comparison.csv`` and the picture of a folder up to date with its finished runs.

    There is a picture once we have a number to put beside one of the paper's. One that cannot be drawn is a
    ``RuntimeWarning`` and costs nothing else.

    Returns:
        The text.

    Raises:
        ValueError: not the folder of a table. OSError: it cannot be written; what was there is untouched.
    """
    out_dir = Path(out_dir)
    plan, found = read_comparison(out_dir)
    text = comparison_table(plan, found)
    write_file(out_dir / COMPARISON_TEXT, text + "\n")
    write_file(out_dir / COMPARISON_CSV, comparison_csv(plan, found))
    if any(e.has_both(metric) for e in found for metric in METRICS):
        drawn = Drawn()
        add_picture(drawn, out_dir / COMPARISON_PICTURE, lambda: draw_comparison(plan, found))
        for failure in drawn.failures:
            warnings.warn(failure, RuntimeWarning, stacklevel=2)
    return text

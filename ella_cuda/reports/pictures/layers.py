"""Each layer's path, as stacked bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from ella_cuda.reports.pictures.page import LINE, NORMAL, SMALL, TEXT_WIDTH, finish, folded, panels, path_styles
from ella_cuda.reports.text import OBJECTIVE_TITLES, PATH_TITLES, network_title

PER_LINE = 3
WIDEST = 3.5  # inches of a panel with its labels
NO_TYPE = "×"


def draw_layers(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Stacked bars: how each layer's effective parameters divide among its paths, a panel for each task and network.

    Runs that differ in their seed only share a panel, as means; bars where two paths meet are standard errors. Layers
    without a type, of less than one effective parameter, are pale under a ×; where that is so for some seeds only, the
    bar says for how many.

    Args:
        rows: rows of ``summary.json`` with effective parameters.

    Returns:
        A matplotlib ``Figure``.

    Source: after van der Ouderaa et al., NeurIPS 2023, Figure 3.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        what = (row["data"], f"task {row['task']}", network_title(row, rows), OBJECTIVE_TITLES[row["objective"]])
        groups.setdefault(what, []).append(row)
    title, headings = _titles([(*what, _seeds(members)) for what, members in groups.items()])
    across = min(len(groups), PER_LINE)
    width = min(WIDEST, TEXT_WIDTH / across)
    headings = [folded(heading, width - 0.3, NORMAL) for heading in headings]
    height = 1.85 + max(heading.count("\n") for heading in headings) * NORMAL * LINE / 72
    figure, axes = panels(len(groups), PER_LINE, width * across, height, sharey=True)
    legend: dict[str, Any] = {}
    for k, (axis, heading, members) in enumerate(zip(axes, headings, groups.values(), strict=False)):
        _draw_bars(axis, members, legend)
        axis.set_title(heading, fontsize=NORMAL, y=1.0, pad=10)
        axis.set_xlabel("layer" if k + across >= len(groups) else "", fontsize=NORMAL, labelpad=1)
        axis.set_ylabel("share of effective\nparameters, %" if k % across == 0 else "", fontsize=NORMAL, labelpad=2)
        axis.set_ylim(0, 100)
        axis.spines[["top", "right"]].set_visible(False)
    finish(figure, title, legend)
    return figure


def _titles(kinds: Sequence[tuple[str, ...]]) -> tuple[str, list[str]]:
    """What all panels have in common, and what is each one's own."""
    same = [len(set(parts)) == 1 for parts in zip(*kinds, strict=True)]
    common = ", ".join(part for part, is_same in zip(kinds[0], same, strict=True) if is_same)
    return common, [", ".join(p for p, is_same in zip(kind, same, strict=True) if not is_same) for kind in kinds]


def _seeds(members: Sequence[Mapping[str, Any]]) -> str:
    return f"seed {members[0]['seed']}" if len(members) == 1 else f"mean ± standard error over {len(members)} seeds"


def _draw_bars(axis: Any, members: Sequence[Mapping[str, Any]], legend: dict[str, Any]) -> None:
    count = len(members[0]["layers"])
    places = list(range(1, count + 1))
    without = [sum(row["layers"][i]["type"] is None for row in members) for i in range(count)]
    paths = path_styles(members[0]["layer"].split("+"))
    bottom = [0.0] * count
    for k, (path, (colour, hatch)) in enumerate(paths.items()):
        sums = [_summed_shares(members, i, [*paths][: k + 1]) for i in range(count)]
        shares = [fmean(of) - b for of, b in zip(sums, bottom, strict=True)]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5, "width": 0.8}
        bars = axis.bar(places, shares, bottom=bottom, label=PATH_TITLES.get(path, path), **style)
        legend.setdefault(bars.get_label(), bars)
        for bar, missing in zip(bars, without, strict=True):
            bar.set_alpha(0.3 if missing == len(members) else None)
        bottom = [fmean(of) for of in sums]
        if len(members) > 1 and k + 1 < len(paths):
            errors = [stdev(of) / math.sqrt(len(of)) for of in sums]
            for colour, width in (("white", 2.5), ("black", 1.0)):  # dark bars have dark paths around them
                style = {"linestyle": "", "ecolor": colour, "elinewidth": width, "capsize": 2.5, "capthick": width}
                axis.errorbar(places, bottom, errors, zorder=3, **style)
    for place, missing in zip(places, without, strict=True):
        if missing:
            some = "" if missing == len(members) else f"{missing}/{len(members)}"
            axis.text(place, 101, some or NO_TYPE, ha="center", va="bottom", fontsize=SMALL)
            _explain(legend, some)
    axis.set_xticks(places)


def _explain(legend: dict[str, Any], some: str) -> None:
    from matplotlib.lines import Line2D

    marker = f"${some}$" if some else "x"
    whose = f" for {some.replace('/', ' of ')} seeds" if some else ""
    handle = Line2D([], [], linestyle="", color="black", marker=marker, markersize=9 if some else 4)
    legend.setdefault(f"no type{whose}: less than one effective parameter", handle)


def _summed_shares(members: Sequence[Mapping[str, Any]], layer: int, paths: Sequence[str]) -> list[float]:
    """What some paths have together of a layer's effective parameters, in percent, for each seed."""
    entries = [row["layers"][layer]["paths"] for row in members]
    return [100 * sum(of[path]["relative_effective_parameters"] or 0.0 for path in paths) for of in entries]

"""What the evidence at the linear mode changes: error bars, their dependence on scale, and over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ella_cuda.reports.pictures.page import (
    LINE_STYLES,
    MARKERS,
    SMALL,
    TEXT_WIDTH,
    finish,
    logarithmic_scale,
    panels,
    plain_axes,
)
from ella_cuda.reports.text import EVIDENCE_AT, SHARED, number

COLOURS = {"network": "#cc4c02", "linear": "#1f4e9c"}
STYLES = {"scalar": ("-", "o"), "normalised": ("--", "s"), "layerwise": (":", "^")}
DATA = {"linestyle": "", "marker": ".", "markersize": 3, "color": "#000000", "zorder": 4}
BARS = (1, 2)  # standard deviations


def draw_toy(found: Mapping[str, Any], title: str = "") -> Any:
    """Error bars of a regression with a single precision chosen by the evidence at the network's weights and at the linear mode, a panel
    each of the same scale; and both evidences over the precision, with the chosen ones.

    Args:
        found: ``x, y`` of the data, ``grid``; ``chosen``, with ``at, structure, precision, mean, deviation`` each; ``evidence``, a list of
            ``precision, network, linear``.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.
    """
    figure, axes = panels(3, 3, TEXT_WIDTH, 2.3)
    single = {one["at"]: one for one in found["chosen"] if one["structure"] == "scalar"}
    x, legend = np.array(found["grid"]), {}
    highest = max(abs(y) for y in found["y"])
    for axis, (at, one) in zip(axes, single.items(), strict=False):
        mean, deviation = np.array(one["mean"]), np.array(one["deviation"])
        for times, alpha in zip(BARS, (0.35, 0.18), strict=True):
            band = axis.fill_between(
                x, mean - times * deviation, mean + times * deviation, color=COLOURS[at], alpha=alpha, linewidth=0
            )
            legend[f"{EVIDENCE_AT[at]}, ±{times} s.d."] = band
        axis.plot(x, mean, color=COLOURS[at], linewidth=1.2)
        (legend["data"],) = axis.plot(found["x"], found["y"], **DATA)
        precision = next(iter(one["precision"].values()))
        plain_axes(
            axis, f"precision {number(precision)} at the\n{EVIDENCE_AT[at]}", "x", "y" if axis is axes[0] else ""
        )
        axis.set(xlim=(x[0], x[-1]), ylim=(-2.5 * highest, 2.5 * highest))
    for at, colour in COLOURS.items():
        tried = [one["precision"] for one in found["evidence"]]
        values = [one[at] for one in found["evidence"]]
        (legend[f"evidence at the {EVIDENCE_AT[at]}"],) = axes[2].plot(tried, values, color=colour, linewidth=1.2)
        top = int(np.argmax(values))
        axes[2].plot([tried[top]], [values[top]], color=colour, marker="o", markersize=4)
    logarithmic_scale(axes[2], "x")
    best = max(max(one["network"], one["linear"]) for one in found["evidence"])
    worst = min(max(one[at] for one in found["evidence"]) for at in COLOURS)
    reach = max(3 * (best - worst), 1.0)
    axes[2].set_ylim(best - reach, best + 0.08 * reach)
    plain_axes(axes[2], "evidence of\na single precision", "precision", "log q/N, nats")
    finish(figure, title, legend)
    return figure


def draw_sweep(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """The mean predictive variance over the scale k of a normalised layer, a panel for each normalisation and evidence, with a line for
    a single precision and one for grouped ones.

    Args:
        rows: ``norm, at, structure, k, variance`` each.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    kinds = list(dict.fromkeys((r["norm"], r["at"]) for r in rows))
    figure, axes = panels(len(kinds), 4, TEXT_WIDTH, 2.0)
    legend: dict[str, Any] = {}
    for axis, (norm, at) in zip(axes, kinds, strict=False):
        for structure in dict.fromkeys(r["structure"] for r in rows):
            line = [r for r in rows if (r["norm"], r["at"], r["structure"]) == (norm, at, structure)]
            (style, marker), name = STYLES[structure], SHARED[structure]
            options = {"linestyle": style, "marker": marker, "markersize": 3, "linewidth": 1.0, "color": COLOURS[at]}
            label = f"{name}, {EVIDENCE_AT[at]}"
            (legend[label],) = axis.plot([r["k"] for r in line], [r["variance"] for r in line], **options)
        for which in "xy":
            logarithmic_scale(axis, which)
        plain_axes(axis, f"{norm} norm,\n{EVIDENCE_AT[at]}", "k", "mean variance" if axis is axes[0] else "")
    variances = [r["variance"] for r in rows]
    for axis in axes:  # of the same scale
        axis.set_ylim(min(variances) / 1.3, max(variances) * 1.3)
    finish(figure, title, legend)
    return figure


def draw_stopping(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Over training, how far both predictives are apart, and the error bars of both with a single precision; means over seeds.

    Args:
        rows: ``norm, seed, structure, epoch, distance, error_bar_network, error_bar_linear`` each.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    figure, axes = panels(2, 2, TEXT_WIDTH, 2.4)
    legend: dict[str, Any] = {}
    for k, norm in enumerate(dict.fromkeys(r["norm"] for r in rows)):
        for structure in dict.fromkeys(r["structure"] for r in rows):
            some = [r for r in rows if (r["norm"], r["structure"]) == (norm, structure)]
            style, name = STYLES[structure][0], SHARED[structure]
            options = {"linestyle": style, "marker": MARKERS[k], "markersize": 3, "linewidth": 1.1}
            epochs, distances = _means(some, "distance")
            colour = ("#000000", "#009e73")[k % 2]
            (legend[f"distance, {norm} norm, {name}"],) = axes[0].plot(epochs, distances, color=colour, **options)
            if structure != "scalar":
                continue
            for at, colour in COLOURS.items():
                epochs, values = _means(some, f"error_bar_{at}")
                options["linestyle"] = LINE_STYLES[k]
                (legend[f"error bar, {norm} norm, {EVIDENCE_AT[at]}"],) = axes[1].plot(
                    epochs, values, color=colour, **options
                )
    for axis in axes:
        for which in "xy":
            logarithmic_scale(axis, which)
    plain_axes(axes[0], "between both predictives", "epochs", "Wasserstein distance")
    plain_axes(axes[1], "mean error bar, single precision", "epochs", "standard deviation")
    finish(figure, title, legend)
    return figure


def draw_networks(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Test NLL of networks, a panel for each data set and a place for each network: ours, filled, with standard errors over seeds, beside the
    talk's, hollow; a colour for where the evidence is, a marker for how many precisions it has.

    Args:
        rows: ``data, network, seed, at, number`` ("single" or "several") ``, nll, talk_nll`` each.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    data = list(dict.fromkeys(r["data"] for r in rows))
    names = list(dict.fromkeys(r["network"] for r in rows))
    ways = list(dict.fromkeys((r["at"], r["number"]) for r in rows))
    figure, axes = panels(len(data), 2, TEXT_WIDTH, 0.7 + 0.45 * len(names))
    legend: dict[str, Any] = {}
    for axis, source in zip(axes, data, strict=False):
        for k, (at, count) in enumerate(ways):
            style = {"linestyle": "", "marker": {"single": "o", "several": "s"}[count], "color": COLOURS[at]}
            place = 0.6 * ((k + 0.5) / len(ways) - 0.5)
            for i, name in enumerate(names):
                some = [r for r in rows if (r["data"], r["network"], r["at"], r["number"]) == (source, name, at, count)]
                if not some:
                    continue
                values = np.array([r["nll"] for r in some])
                error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
                label = f"{count}, {EVIDENCE_AT[at]}"
                legend[label] = axis.errorbar(
                    [values.mean()], [i + place], xerr=[error], markersize=3.5, elinewidth=0.9, capsize=1.5, **style
                )
                hollow = {"markersize": 5.5, "markerfacecolor": "none"}
                (legend[f"{label}, talk"],) = axis.plot([some[0]["talk_nll"]], [i + place], **style, **hollow)
        logarithmic_scale(axis, "x")
        plain_axes(axis, source, "test NLL, nats, log scale", "")
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [], fontsize=SMALL)
        axis.set_ylim(len(names) - 0.5, -0.5)
    finish(figure, title, legend)
    return figure


def _means(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Epochs, and the mean over seeds at each."""
    epochs = sorted({r["epoch"] for r in rows})
    return epochs, [float(np.mean([r[key] for r in rows if r["epoch"] == epoch])) for epoch in epochs]

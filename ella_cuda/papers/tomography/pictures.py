"""Tomography: reconstructions with their error bars, log densities, and errors beside those that were expected."""

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
    panels,
    plain_axes,
)

COLOURS = ("#cc4c02", "#f0b020", "#1f4e9c", "#7cc7f0", "#009e73", "#777777", "#000000")  # of the ways
FOUND = "#b0b0b0"
ACROSS = 4  # histograms in a line
Image = Sequence[Sequence[float]]


def draw_reconstructions(lines: Mapping[str, tuple[Mapping[str, Image], Mapping[str, Image]]], title: str = "") -> Any:
    """A line of images for each measurement: images of pixels in 0..1, then the absolute error and predicted deviations, which have a scale
    of the line, from 0 to the 99th percentile of the error.

    Args:
        lines: by label, images ``(H, W)`` by title and errors and deviations by title, the error first.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no line.
    """
    if not lines:
        raise ValueError("lines must hold at least one, got none.")
    columns = max(len(images) + len(errors) for images, errors in lines.values())
    figure, axes = panels(len(lines) * columns, columns, TEXT_WIDTH, 0.93 * TEXT_WIDTH / columns)
    figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015)
    for i, (label, (images, errors)) in enumerate(lines.items()):
        line = axes[i * columns : (i + 1) * columns]
        highest = float(np.percentile(np.array(next(iter(errors.values()))), 99)) or 1.0
        shown = [(name, image, "gray", 1.0) for name, image in images.items()]
        shown += [(name, image, "inferno", highest) for name, image in errors.items()]
        for axis, (name, image, colours, most) in zip(line, shown, strict=False):
            axis.imshow(np.array(image), cmap=colours, vmin=0, vmax=most, interpolation="nearest")
            if i == 0:
                axis.set_title(name.replace(", ", ",\n").replace(" weights", "\nweights"), fontsize=SMALL, y=1.0, pad=3)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        for axis in line[len(shown) :]:
            axis.set_visible(False)
        line[0].set_ylabel(label, fontsize=SMALL, labelpad=2)
    finish(
        figure,
        title,
        note="Errors and deviations of a line have one scale, from 0 (black) to the error's 99th percentile. The error is the deep "
        "image prior's; dropout has a mean of its own.",
    )
    return figure


def draw_densities(rows: Sequence[Mapping[str, Any]], ways: Mapping[str, str], title: str = "") -> Any:
    """Log density per pixel over the number of angles: a panel for each kind of image and noise, a line for each way; means over seeds with
    standard errors.

    Args:
        rows: ``noise, angles, way, log_density`` each, and maybe ``data``.
        ways: titles. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    cases = list(dict.fromkeys((r.get("data"), r["noise"]) for r in rows))
    figure, axes = panels(len(cases), 2, TEXT_WIDTH, 2.4, sharey=True)
    legend: dict[str, Any] = {}
    for i, (axis, (data, noise)) in enumerate(zip(axes, cases, strict=False)):
        some = [r for r in rows if (r.get("data"), r["noise"]) == (data, noise)]
        angles = sorted({r["angles"] for r in some})
        for k, (way, name) in enumerate(ways.items()):
            values = {a: [r["log_density"] for r in some if (r["angles"], r["way"]) == (a, way)] for a in angles}
            present = {a: np.array(found) for a, found in values.items() if found}
            if not present:
                continue
            errors = [v.std(ddof=1) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in present.values()]
            style = {
                "color": COLOURS[k % len(COLOURS)],
                "linestyle": LINE_STYLES[k % len(LINE_STYLES)],
                "marker": MARKERS[k],
            }
            means = [v.mean() for v in present.values()]
            legend[name] = axis.errorbar(
                list(present), means, yerr=errors, markersize=3.5, linewidth=1.1, capsize=1.5, **style
            )
        axis.set_xticks(angles)
        last = i >= len(cases) - 2
        heading = f"{data}, {noise:.0%} noise" if data else f"{noise:.0%} noise"
        plain_axes(axis, heading, "angles" if last else "", "log density per pixel, nats" if i % 2 == 0 else "")
    finish(figure, title, legend)
    return figure


def draw_errors(shares: Mapping[str, Mapping[str, Sequence[float]]], bins: Sequence[float], title: str = "") -> Any:
    """For each way, a histogram of absolute errors, as bars, beside the expectation under the predicted deviations, as a line; the last bin
    has all larger errors.

    Args:
        shares: by the way's title, ``found`` and ``expected`` of every bin.
        bins: their lower ends.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no way.
    """
    if not shares:
        raise ValueError("shares must hold at least one way, got none.")
    figure, axes = panels(len(shares), ACROSS, TEXT_WIDTH, 1.6, sharey=True)
    legend: dict[str, Any] = {}
    width = bins[1] - bins[0]
    ends = [*bins, bins[-1] + width]
    for k, (axis, (name, one)) in enumerate(zip(axes, shares.items(), strict=False)):
        legend["pixels"] = axis.bar(bins, np.maximum(one["found"], 1e-9), width=width, align="edge", color=FOUND)
        (legend["expected of the deviations"],) = axis.step(
            ends, [*one["expected"], one["expected"][-1]], where="post", color="#cc4c02", linewidth=1.3
        )
        axis.set_yscale("log")
        axis.set_ylim(1e-4, 1)
        last = k >= len(shares) - ACROSS
        plain_axes(axis, name, "|error|" if last else "", "share of pixels" if k % ACROSS == 0 else "")
        axis.tick_params(labelbottom=last)
    finish(figure, title, legend, note="The last bin has all larger errors.")
    return figure


def draw_ways(rows: Sequence[Mapping[str, Any]], ways: Mapping[str, str], title: str = "") -> Any:
    """NLL per pixel, a line for each way: a mark for every image and one for their mean with its standard error, by data set, beside a
    published one, hollow.

    Args:
        rows: ``data, way, nll, talk_nll`` each; the last may be None.
        ways: titles. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    data = list(dict.fromkeys(r["data"] for r in rows))
    figure, axes = panels(len(data), 2, TEXT_WIDTH, 0.7 + 0.35 * len(ways))
    legend: dict[str, Any] = {}
    for axis, source in zip(axes, data, strict=False):
        for i, way in enumerate(ways):
            some = [r for r in rows if (r["data"], r["way"]) == (source, way)]
            if not some:
                continue
            values = np.array([r["nll"] for r in some])
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
            (legend["an image"],) = axis.plot(
                values, [i] * len(values), color=FOUND, linestyle="", marker="|", markersize=9
            )
            style = {"linestyle": "", "marker": "o", "color": COLOURS[2]}
            legend["mean"] = axis.errorbar([values.mean()], [i], xerr=[error], markersize=4, capsize=1.5, **style)
            if some[0]["talk_nll"] is not None:
                hollow = {"markersize": 6.5, "markerfacecolor": "none"}
                (legend["talk"],) = axis.plot([some[0]["talk_nll"]], [i], **style, **hollow)
        plain_axes(axis, source, "NLL per pixel, nats", "")
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(range(len(ways)), ways.values() if axis is axes[0] else [], fontsize=SMALL)
        axis.set_ylim(len(ways) - 0.5, -0.5)
    finish(figure, title, legend)
    return figure

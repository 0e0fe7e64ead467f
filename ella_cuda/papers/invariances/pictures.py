"""What the evidence learns of invariances: angles of rings, ways to draw copies, and what comes of it on few images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ella_cuda.papers.studies import Study
from ella_cuda.reports.pictures.amounts import draw_samples
from ella_cuda.reports.pictures.page import (
    LINE_STYLES,
    MARKERS,
    TEXT_WIDTH,
    finish,
    logarithmic_scale,
    panels,
    plain_axes,
)

FACTOR_COLOURS = {"full": "#000000", "kron": "#1f4e9c", "second": "#cc4c02"}
LOSS_COLOUR = "#777777"
SAMPLING_COLOURS = {"independent": "#cc4c02", "shared": "#009e73", "grid": "#1f4e9c"}
METHOD_COLOURS = ("#000000", "#009e73", "#cc4c02", "#1f4e9c", "#8000e0")
NEAREST = 0.22  # of labels, as a share of the axis
HOLLOW = {"linestyle": "", "markerfacecolor": "none", "markersize": 5}


def draw_first_copies(found: Sequence[tuple[Study, dict[str, Any]]], title: Callable[[Mapping[str, Any]], str]) -> Any:
    """Test images of the first seed's studies, and copies at the learned amounts; ``title`` is of a study's settings."""
    seed = min(study.settings["seed"] for study, _ in found)
    groups = {
        f"{study.settings['data']}, {title(study.settings)}": result["samples"]
        for study, result in found
        if study.settings["seed"] == seed and result["samples"]
    }
    return draw_samples(groups, f"Test images and copies at the learned amounts, seed {seed}")


def draw_rings(
    results: Sequence[Mapping[str, Any]],
    points: tuple[Sequence[Sequence[float]], Sequence[int]],
    reference: Mapping[str, Sequence[float]],
    titles: Mapping[str, str],
    title: str = "",
) -> Any:
    """The data; the angle over training, a line for each seed; the evidence at fixed angles, means over seeds, with reference values hollow.

    Args:
        results: of seeds: ``learned`` by curvature with ``angles`` (steps and degrees), ``collapsed`` with these, ``fixed`` with ``angle``
            and the evidence by curvature.
        points: inputs ``(N, 2)`` and classes.
        reference: by curvature, the evidence at 0, 30, ..., 180 degrees.
        titles: of the curvatures. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no result.
    """
    if not results:
        raise ValueError("results must hold at least one, got none.")
    figure, axes = panels(3, 3, TEXT_WIDTH, 2.3)
    x, y = np.array(points[0]), np.array(points[1])
    for label, colour in ((0, "#f0b020"), (1, "#1f4e9c")):
        axes[0].plot(*x[y == label].T, linestyle="", marker=MARKERS[label], markersize=2, color=colour)
    axes[0].set_aspect("equal")
    plain_axes(axes[0], "data of one seed", "", "")
    legend: dict[str, Any] = {}
    for result in results:
        for way, name in titles.items():
            steps, angles = np.array(result["learned"][way]["angles"]).T
            (legend[name],) = axes[1].plot(steps, angles, color=FACTOR_COLOURS[way], linewidth=1.0)
        steps, angles = np.array(result["collapsed"]["angles"]).T
        (legend["training loss"],) = axes[1].plot(steps, angles, color=LOSS_COLOUR, linewidth=1.0, linestyle="--")
    axes[1].set_ylim(-5, 185)
    axes[1].set_yticks(range(0, 181, 45))
    plain_axes(axes[1], "learned angle", "step", "degrees")
    fixed = [found["angle"] for found in results[0]["fixed"]]
    for way in titles:
        values = np.mean([[found[way] for found in result["fixed"]] for result in results], 0)
        style = {"color": FACTOR_COLOURS[way], "marker": "o"}
        axes[2].plot(fixed, values, linewidth=1.0, markersize=3, **style)
        if way in reference:
            axes[2].plot(range(0, 181, 30), reference[way], **style, **HOLLOW)
            hollow = {"marker": "o", "color": "#777777", **HOLLOW}
            (legend["reference, other data"],) = axes[2].plot([], [], **hollow)
    axes[2].set_xticks(range(0, 181, 45))
    plain_axes(axes[2], "evidence at fixed angles", "degrees", "nats")
    finish(figure, title, legend)
    return figure


def draw_sampling(
    results: Sequence[Mapping[str, Any]], true: Sequence[float], angles: Sequence[float], title: str = ""
) -> Any:
    """The expected evidence over angles, less its maximum; a line of panels for each true angle, which a vertical line shows, a panel for
    each number of copies.

    Args:
        results: of seeds: ``ways`` with ``sampling, copies`` and, by true angle, ``evidence`` over the angles.
        true: true angles in degrees. angles: those of the evidence. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no result.
    """
    if not results:
        raise ValueError("results must hold at least one, got none.")
    counts = list(dict.fromkeys(way["copies"] for way in results[0]["ways"]))
    figure, axes = panels(len(true) * len(counts), len(counts), TEXT_WIDTH, 1.8, sharex=True, sharey=True)
    legend: dict[str, Any] = {}
    for i, degrees in enumerate(true):
        for j, count in enumerate(counts):
            axis = axes[i * len(counts) + j]
            for k, (sampling, colour) in enumerate(SAMPLING_COLOURS.items()):
                found = [
                    way["evidence"][i]
                    for result in results
                    for way in result["ways"]
                    if (way["sampling"], way["copies"]) == (sampling, count)
                ]
                if not found:
                    continue
                values = np.mean(found, 0)
                style = {"color": colour, "linewidth": 1.0, "linestyle": LINE_STYLES[k]}
                marks = {"marker": MARKERS[k], "markersize": 3, "markevery": [int(values.argmax())]}
                (legend[f"{sampling}, with its maximum"],) = axis.plot(angles, values - values.max(), **style, **marks)
            legend["true angle"] = axis.axvline(degrees, color="#777777", linewidth=0.8, linestyle=":")
            axis.set_xticks(range(0, 181, 45))
            axis.set_ylim(-1.0, 0.05)
            last = i == len(true) - 1
            plain_axes(
                axis, f"{degrees:g}°, {count} copies", "degrees" if last else "", "nats per point" if j == 0 else ""
            )
    finish(figure, title, legend)
    return figure


def draw_subsets(rows: Sequence[Mapping[str, Any]], methods: Mapping[str, str], title: str = "") -> Any:
    """Accuracy, NLL and ``-log q/N`` over the number of training images, a line for each method: means over seeds with standard errors.

    Args:
        rows: ``size, method, accuracy, nll, neg_log_marginal_likelihood`` each, the last may be None.
        methods: titles of the methods. title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("rows must hold at least one, got none.")
    figure, axes = panels(3, 3, TEXT_WIDTH, 2.2)
    legend: dict[str, Any] = {}
    for axis, (key, what) in zip(
        axes,
        {
            "accuracy": "test accuracy, %",
            "nll": "test NLL, nats",
            "neg_log_marginal_likelihood": "-log q/N, nats",
        }.items(),
        strict=True,
    ):
        for k, (method, name) in enumerate(methods.items()):
            some = [r for r in rows if r["method"] == method and r[key] is not None]
            sizes = sorted({r["size"] for r in some})
            if not sizes:
                continue
            values = [np.array([r[key] for r in some if r["size"] == size]) for size in sizes]
            errors = [v.std(ddof=1) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in values]
            style = {"color": METHOD_COLOURS[k % len(METHOD_COLOURS)], "marker": MARKERS[k], "markersize": 3.5}
            legend[name] = axis.errorbar(
                sizes, [v.mean() for v in values], yerr=errors, linewidth=1.0, elinewidth=0.8, capsize=1.5, **style
            )
        axis.set_xscale("log")
        axis.minorticks_off()
        ticks = _apart(sorted({r["size"] for r in rows}))
        axis.set_xticks(ticks, [f"{size:,}" for size in ticks])
        plain_axes(axis, "", "training images", what)
    finish(figure, title, legend)
    return figure


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those that have room for a label on a logarithmic axis, the last among them."""
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept or math.log(kept[-1] / size) >= NEAREST * math.log(sizes[-1] / sizes[0]):
            kept.append(size)
    return kept[::-1]


def draw_lengthscales(
    results: Sequence[Sequence[Mapping[str, Any]]],
    tried: Sequence[float],
    kinds: Mapping[str, str],
    half: float,
    title: str = "",
) -> Any:
    """A line of panels for each true lengthscale: data and learned functions of the first seed; lengthscales over the training, a line for
    each seed; evidence and loss over lengthscales, each from 0 to 1, means over seeds.

    Args:
        results: of seeds, by true lengthscale: ``true, points, functions, trajectories, curves``, the last three by kind.
        tried: lengthscales of the curves. kinds: titles of "evidence" and "loss". half: inputs are between its negative and it.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.

    Raises:
        ValueError: no result.
    """
    if not results:
        raise ValueError("results must hold at least one, got none.")
    colours = dict(zip(kinds, (FACTOR_COLOURS["kron"], FACTOR_COLOURS["second"]), strict=True))
    figure, axes = panels(3 * len(results[0]), 3, TEXT_WIDTH, 1.8)
    legend: dict[str, Any] = {}
    for i, one in enumerate(results[0]):
        functions, course, curves = axes[3 * i : 3 * i + 3]
        last = i + 1 == len(results[0])
        dots = {"linestyle": "", "marker": "o", "markersize": 2, "color": "#777777"}
        (legend["data"],) = functions.plot(*one["points"], **dots)
        for kind in reversed(kinds):
            colour, values = colours[kind], one["functions"][kind]
            functions.plot(np.linspace(-half, half, len(values)), values, color=colour, linewidth=1.0)
            for result in results:
                steps, scales = np.array(result[i]["trajectories"][kind]).T
                (legend[kinds[kind]],) = course.plot(steps / steps[-1], scales, color=colour, linewidth=1.0)
            found = np.mean([result[i]["curves"][kind] for result in results], 0)
            low, high = found.min(), found.max()
            curves.plot(tried, (found - low) / (high - low), color=colour, linewidth=1.0)
        low, high = min(one["points"][1]), max(one["points"][1])
        functions.set_ylim(low - 0.5 * (high - low), high + 0.5 * (high - low))
        for axis, line in ((course, "axhline"), (curves, "axvline")):
            legend["true"] = getattr(axis, line)(one["true"], color="#777777", linewidth=0.8, linestyle=":")
        logarithmic_scale(course, "y")
        logarithmic_scale(curves, "x")
        plain_axes(functions, f"true lengthscale {one['true']:g}", "input" if last else "", "")
        plain_axes(course, "learned" if i == 0 else "", "share of the steps" if last else "", "lengthscale")
        plain_axes(curves, "evidence and loss, each from 0 to 1" if i == 0 else "", "lengthscale" if last else "", "")
    finish(figure, title, legend)
    return figure

"""Pictures of calibration: confidence against accuracy, training images left out, and predictions of images that turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ella_cuda.metrics import Reliability
from ella_cuda.reports.pictures.page import (
    LINE_STYLES,
    MARKERS,
    OTHER_STYLES,
    TEXT_WIDTH,
    finish,
    logarithmic_scale,
    panels,
    plain_axes,
)

PER_LINE = 4
TURNED = {  # of a row: the axis' label
    "nll": "NLL, nats",
    "accuracy": "accuracy, %",
    "confidence": "mean confidence, %",
    "entropy": "mean entropy, nats",
}
DIAGONAL = {"color": "#555555", "linewidth": 1.0, "linestyle": "--", "zorder": 3}


def draw_reliability(methods: Mapping[str, Reliability], title: str = "") -> Any:
    """Reliability diagrams (Guo et al. 2017, figure 1), a panel for each method: a bar for each bin, as high as its predictions are
    right, beside the diagonal of a calibrated prediction; a point at the bin's mean confidence. Below, how many predictions are in
    each bin, on a logarithmic scale. The panel's title has the expected calibration error.

    Args:
        methods: what :func:`ella_cuda.metrics.reliability` returns, by the method's name.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.
    """
    across = min(len(methods), PER_LINE)
    down = math.ceil(len(methods) / across)
    width = min(TEXT_WIDTH, 1.0 + 2.2 * across)
    figure, axes = panels(2 * across * down, across, width, 1.4, height_ratios=[2.5, 1] * down, sharex=True)
    largest = max(int(found.count.max()) for found in methods.values())
    legend: dict[str, Any] = {}
    for k, (name, found) in enumerate(methods.items()):
        first = k % across == 0
        top = 2 * across * (k // across) + k % across
        _draw_bins(axes[top], name, found, first, legend)
        _draw_counts(axes[top + across], found, largest, first)
    for k in range(len(methods), across * down):
        for axis in axes[2 * across * (k // across) + k % across :: across][:2]:
            axis.set_visible(False)
    finish(figure, title, legend)
    return figure


def _draw_bins(axis: Any, name: str, found: Reliability, first: bool, legend: dict[str, Any]) -> None:
    bins = len(found.count)
    filled = [m for m in range(bins) if found.count[m]]
    left, heights = [m / bins for m in filled], [float(found.accuracy[m]) for m in filled]
    bars = axis.bar(
        left, heights, 1 / bins, align="edge", color="#9db7dd", edgecolor="#1f4e9c", linewidth=0.6, zorder=2
    )
    (diagonal,) = axis.plot([0, 1], [0, 1], **DIAGONAL)
    point = {"marker": "o", "markersize": 3, "linestyle": "", "color": "#cc4c02", "zorder": 4, "clip_on": False}
    (points,) = axis.plot([float(found.confidence[m]) for m in filled], heights, **point)
    legend |= {"accuracy in the bin": bars, "at its mean confidence": points, "calibrated": diagonal}
    plain_axes(axis, f"{name}, ECE {float(found.error()):.3f}", "", "accuracy" if first else "")
    axis.set(xlim=(0, 1), ylim=(0, 1), yticks=[0, 0.5, 1])
    axis.tick_params(labelbottom=False, labelleft=first)


def _draw_counts(axis: Any, found: Reliability, largest: int, first: bool) -> None:
    bins = len(found.count)
    filled = [m for m in range(bins) if found.count[m]]
    logarithmic_scale(axis, "y")
    counts = [int(found.count[m]) for m in filled]
    axis.bar(
        [m / bins for m in filled], counts, 1 / bins, align="edge", color="#bbbbbb", edgecolor="#555555", linewidth=0.6
    )
    plain_axes(axis, "", "confidence", "predictions,\nlog scale" if first else "")
    axis.set(xlim=(0, 1), ylim=(0.5, 2 * largest), xticks=[0, 0.5, 1])
    axis.minorticks_off()
    axis.tick_params(labelbottom=True, labelleft=first)


def draw_left_out(found: Mapping[str, Any], title: str = "") -> Any:
    """Histograms of the leverages of training images, and of minus their leave-one-out log densities, at the precisions that were learned
    and at those of predictions. From a leverage of 1 on, at the line, an image has no leave-one-out density.

    Args:
        found: a row's ``leave_one_out``.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.
    """
    figure, axes = panels(2, 2, TEXT_WIDTH, 1.8)
    edges, legend = [10.0**e for e in found["exponents"]], {}
    for number, (way, name) in enumerate(
        (("learned", "at the learned precisions"), ("predictions", "at those of predictions"))
    ):
        one = found[way]
        nll = "" if one["nll"] is None else f"NLL {one['nll']:.3f}, "
        label = f"{name}: {nll}{one['undefined']} of {one['points']} without a density"
        style = {"color": OTHER_STYLES[number][0], "linestyle": LINE_STYLES[number], "linewidth": 1.2}
        for axis, key in zip(axes, ("leverage", "loss"), strict=True):
            legend[label] = axis.stairs(one[key], edges, **style)
    for axis, label in zip(axes, ("leverage", "minus leave-one-out log density, nats"), strict=True):
        axis.set_xscale("log")
        plain_axes(axis, "", label, "training images" if axis is axes[0] else "")
    axes[0].axvline(1, **DIAGONAL)
    finish(figure, title, legend)
    return figure


def draw_rotations(methods: Mapping[str, Sequence[Mapping[str, float]]], title: str = "") -> Any:
    """NLL, accuracy, confidence and entropy of predictions of test images that are turned, over the angle: a colour, marker and line
    style for each method. Confidence that stays where accuracy falls is not to be trusted.

    Args:
        methods: by the method's name a row for each angle, with ``degrees``, ``nll`` and ``entropy`` in nats, ``accuracy`` and
            ``confidence`` (the mean largest probability) in percent; sorted here.
        title: of the picture.

    Returns:
        A matplotlib ``Figure``.
    """
    figure, axes = panels(len(TURNED), len(TURNED), TEXT_WIDTH, 1.8)
    legend: dict[str, Any] = {}
    for k, (name, rows) in enumerate(methods.items()):
        style = {"color": OTHER_STYLES[k % len(OTHER_STYLES)][0], "linestyle": LINE_STYLES[k % len(LINE_STYLES)]}
        style |= {"marker": MARKERS[k % len(MARKERS)], "markersize": 3, "linewidth": 1.0}
        ordered = sorted(rows, key=lambda row: row["degrees"])
        for axis, key in zip(axes, TURNED, strict=True):
            (legend[name],) = axis.plot([r["degrees"] for r in ordered], [r[key] for r in ordered], **style)
    for axis, label in zip(axes, TURNED.values(), strict=True):
        plain_axes(axis, "", "degrees", label)
        axis.set_xticks([0, 60, 120, 180])
        axis.set_ylim(bottom=0, top=100 if label.endswith("%") else None)
    finish(figure, title, legend)
    return figure

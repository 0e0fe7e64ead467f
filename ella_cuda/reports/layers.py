"""Layers after training: prior precisions, effective parameters, and the symmetry they add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ella_cuda.laplace.evidence import layer_type
from ella_cuda.nn import RelaxedEquivariance
from ella_cuda.reports.text import PATH_TITLES, columns, number, run_title

# {"layers": [{"name", "paths": {path: {tensor: number of parameters}}}], "others": {tensor: number of parameters}}
Layout = dict[str, Any]


def layout(model: nn.Module) -> Layout:
    """Which parameter tensors belong to which path of which relaxed layer, and how many parameters each has.

    Returns:
        ``{"layers": [{"name": "blocks.0", "paths": {"conv": {"weight": 90, ...}}}, ...], "others": {"head.0.weight":
        ...}}``; tensors are named within their path.
    """
    count = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    layers = []
    for layer_name, layer in model.named_modules():
        if isinstance(layer, RelaxedEquivariance):
            paths = {}
            for path in layer.path_names:
                prefix = f"{layer_name}.{path}."
                own = [n for n in count if n.startswith(prefix)]
                paths[path] = {n.removeprefix(prefix): count.pop(n) for n in own}
            layers.append({"name": layer_name, "paths": paths})
    return {"layers": layers, "others": count}


def describe_layers(
    model_layout: Layout,
    prior_precision: Mapping[str, float],
    effective_parameters: Mapping[str, float] | None,
    inverse_lengthscale: Mapping[str, float] | None = None,
    anchors: Mapping[str, Mapping[str, float]] | None = None,
    weight_norm: Mapping[str, float] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    r"""Precisions and effective parameters by layer and path.

    A path's share is its part of the layer's :math:`\sum_l \gamma_l` over paths; the path with the largest names the
    layer's type, which is None where that sum is below one: there the data determine less than a single parameter.

    Args:
        model_layout: of :func:`layout`.
        prior_precision: δ by parameter name.
        effective_parameters: γ by parameter name, between 0 and the number of parameters; None where it was not
            computed.
        inverse_lengthscale: ω by the name of a :class:`ella_cuda.nn.SpatialBasis`, where there are any.
        anchors: by the same names, ``count`` of anchors, and ``mean_displacement`` and ``largest_displacement`` from where
            they started, in pixels.
        weight_norm: Euclidean norms by parameter name; None where they are not known.

    Returns:
        ``(layers, others)`` as in a row of ``summary.json``: a list with ``name``, ``type`` and, by path, ``prior_precision`` (by
        tensor), where there are bases ``inverse_lengthscale`` (by basis, per pixel) and ``anchors`` (by basis), ``parameters``,
        ``effective_parameters``, ``relative_effective_parameters`` and ``weight_norm`` (of all its parameters, where it is known) for
        each relaxed layer; and the same but the share, the norm and the bases for every other tensor.

    Source: van der Ouderaa et al., NeurIPS 2023, section 5.2 and Figure 3.
    """
    gamma = effective_parameters
    layers = []
    for layer in model_layout["layers"]:
        paths = {}
        for path, tensors in layer["paths"].items():
            prefix = f"{layer['name']}.{path}."
            names = {t: prefix + t for t in tensors}
            paths[path] = {
                "prior_precision": {t: prior_precision[n] for t, n in names.items()},
                "parameters": sum(tensors.values()),
                "effective_parameters": None if gamma is None else sum(gamma[n] for n in names.values()),
                "relative_effective_parameters": None,
            }
            if weight_norm is not None:
                paths[path]["weight_norm"] = math.hypot(*(weight_norm[n] for n in names.values()))
            for key, values in (("inverse_lengthscale", inverse_lengthscale), ("anchors", anchors)):
                own = {n.removeprefix(prefix): v for n, v in (values or {}).items() if n.startswith(prefix)}
                if own:
                    paths[path][key] = own
        by_path = {} if gamma is None else {path: entry["effective_parameters"] for path, entry in paths.items()}
        total = sum(by_path.values())
        if total:
            for entry in paths.values():
                entry["relative_effective_parameters"] = entry["effective_parameters"] / total
        layers.append({"name": layer["name"], "type": layer_type(by_path), "paths": paths})
    others = {
        n: {
            "prior_precision": prior_precision[n],
            "parameters": count,
            "effective_parameters": gamma[n] if gamma else None,
        }
        for n, count in model_layout["others"].items()
    }
    return layers, others


def layer_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for each row of ``summary.json``: a line for each layer and path."""
    return "\n\n".join(_one_table(row) for row in rows)


def _one_table(row: Mapping[str, Any]) -> str:
    what = ["prior precision"]
    if any(p.get("inverse_lengthscale") for layer in row["layers"] for p in layer["paths"].values()):
        what.append("inverse lengthscale per pixel")
    moved = "anchors" in row.get("learn", "").split("+")
    if moved:
        what.append("anchors moved by, mean, pixels")
    lines = [["layer", "type", "path", "share", "effective", "of", "γ/P", "norm", "; ".join(what)]]
    for layer in row["layers"]:
        name, kind = layer["name"], PATH_TITLES.get(layer["type"], layer["type"] or "-")
        for path, entry in layer["paths"].items():
            share = entry["relative_effective_parameters"]
            learned = [_by_name(entry[key]) for key in ("prior_precision", "inverse_lengthscale") if entry.get(key)]
            if moved and entry.get("anchors"):
                learned.append(_by_name({n: a["mean_displacement"] for n, a in entry["anchors"].items()}))
            lines.append(
                [
                    name,
                    kind,
                    PATH_TITLES.get(path, path),
                    "-" if share is None else f"{100 * share:.1f} %",
                    number(entry["effective_parameters"]),
                    f"{entry['parameters']:,}",
                    _normalised(entry),
                    number(entry.get("weight_norm")),
                    "; ".join(learned),
                ]
            )
            name = kind = ""
    for name, entry in row["other_parameters"].items():
        precision = number(entry["prior_precision"])
        counts = [number(entry["effective_parameters"]), f"{entry['parameters']:,}", _normalised(entry)]
        lines.append([name, "", "", "", *counts, "", precision])
    width = max(len(line[-1]) for line in lines)
    return run_title(row) + "\n" + columns([[*line[:-1], line[-1].ljust(width)] for line in lines], left=3)


def _normalised(entry: Mapping[str, Any]) -> str:
    """γ/P as text."""
    gamma = entry["effective_parameters"]
    return number(None if gamma is None else gamma / entry["parameters"])


def _by_name(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {number(value)}" for name, value in values.items())

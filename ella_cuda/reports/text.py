"""Names and plain-text tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PATH_TITLES = {
    "fc": "FC",
    "f_fc": "F-FC",
    "conv": "CONV",
    "s_fc": "S-FC",
    "s_conv": "S-CONV",
    "gconv": "GCONV",
    "gf_fc": "G-F-FC",
}
OBJECTIVE_TITLES = {"map": "MAP", "evidence": "evidence"}
METRICS = {  # of a row of summary.json: title, style
    "accuracy": ("accuracy, %", "{:.2f}"),
    "nll": ("NLL, nats", "{:.3f}"),
    "neg_log_marginal_likelihood": ("-log q/N, nats", "{:.3f}"),
}
CALIBRATION = {  # the same
    "nll_predictive": ("NLL, predictive, nats", "{:.3f}"),
    "ece_plugin": ("ECE", "{:.3f}"),
    "ece": ("ECE, predictive", "{:.3f}"),
    "brier_plugin": ("Brier score", "{:.3f}"),
    "brier": ("Brier score, predictive", "{:.3f}"),
}
# Of the evidence: where it is taken, and which tensors share a precision.
EVIDENCE_AT = {"network": "network's weights", "linear": "linear mode"}
SHARED = {"scalar": "single", "normalised": "grouped", "layerwise": "layer-wise"}
AMOUNTS = {  # of a learned augmentation: unit, times the amount
    "rotation": ("°", 180 / math.pi),
    **dict.fromkeys(("tx", "ty"), ("half images", 1.0)),
    **dict.fromkeys(("sx", "sy", "shear"), ("", 1.0)),
}
WAYS = {"plugin": "softmax", "predictive": "predictive"}  # how predictions are made


def layer_title(layer: str) -> str:
    """How people write a sum of paths: ``f_fc+conv`` is F-FC+CONV."""
    return "+".join(PATH_TITLES.get(p, p) for p in layer.split("+"))


def network_title(row: Mapping[str, Any], among: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The name of a row's network, or its sum of paths and what else tells it from others of the sum: what of its sparsified layers' bases
    the evidence learned (``S-FC, lengthscales``); with group convolutions the group, how they are factored and how wide the network is
    (``GCONV (p4, full), width 6``), of the last two, where ``among`` is given, what these rows differ in (``GCONV (p4)``)."""
    learn = row.get("learn", "")
    title = (row.get("model") or layer_title(row["layer"])) + (f", {learn}" if learn else "")
    if not row.get("group_conv"):
        return title

    def said(name: str) -> bool:
        return among is None or len({r[name] for r in among if r.get("group_conv")}) > 1

    title += f" ({', '.join([row['group'], *([row['group_conv']] if said('group_conv') else [])])})"
    return f"{title}, width {row['width']}" if said("width") else title


def tensor_title(path: str, tensor: str) -> str:
    """A parameter tensor of a path: ``conv``'s ``0.weight`` and ``layer.weight`` are CONV weight; modules that only hold the path's
    layer are left out."""
    names = [name for name in tensor.split(".") if not name.isdigit() and name != "layer"]
    return f"{PATH_TITLES.get(path, path)} {'.'.join(names)}"


def run_title(row: Mapping[str, Any]) -> str:
    """Which run a row is of, and how far it is if it is not finished."""
    title = f"{row['data']}, task {row['task']}, {network_title(row)}, {row['objective']}, seed {row['seed']}"
    if row.get("epoch") is not None:
        title += f" (begun: epoch {row['epoch']} of {row['epochs']})"
    return title


def number(value: float | None, digits: int = 3) -> str:
    """A number of any size in few characters; ``-`` for None."""
    if value is None:
        return "-"
    if value == 0 or 0.01 <= abs(value) < 10**5:
        decimals = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}e}"


def counted(count: int, one: str) -> str:
    """A number of things: 1 run, 2 runs."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def error_bars_note(found: Mapping[str, Any]) -> str:
    """A row's entry ``error_bars`` in words."""
    whose = "of all layers" if found["layer"] is None else f"of the last layer, {found['layer']}"
    if found["factor"] is None:
        return f"error bars {whose}, by the learned precisions: not calibrated"
    times = f"{found['factor']:,.3g}" if found["factor"] < 1000 else f"{found['factor']:,.0f}"
    if found["off"]:
        return (
            f"error bars {whose}, turned off by calibration, which took {times} times the learned precisions, its largest factor: "
            "probabilities are the softmax's, and the epistemic part is next to nothing"
        )
    return f"error bars {whose}, calibrated to {times} times the learned precisions"


def doubt_of_order(rows: Sequence[Mapping[str, Any]]) -> str:
    """What is to be said of rows in the order of the evidence, best first, where leaving one out puts another first; empty where it does
    not."""
    known = [row for row in rows if row.get("nll_leave_one_out") is not None]
    best = min(known, key=lambda row: row["nll_leave_one_out"]) if known else rows[0]
    if best is rows[0]:
        return ""
    return (
        f"leave-one-out puts {network_title(best)} first: of networks that trained too short for their evidence to settle, believe it "
        "rather than the evidence"
    )


def duration(seconds: float) -> str:
    """A time in the largest unit of which it has one: 59 s, 1 min, 23 h, 5 d."""
    size, unit = next(((n, u) for n, u in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= n), (1, "s"))
    return f"{max(0, int(seconds // size))} {unit}"


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if there is nothing or anything is None."""
    values = list(values)
    return None if not values or None in values else sum(values) / len(values)  # type: ignore[arg-type]


def columns(lines: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> str:
    """Lines of cells as aligned text; the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))]
    out = []
    for line in lines:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False)))
        out.append(gap.join(cells).rstrip())
    return "\n".join(out)

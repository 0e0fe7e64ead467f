"""Text of the parts' tables."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ella_cuda.reports.text import columns


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], notes: Iterable[str], left: int) -> str:
    """A title, columns, and sentences below them; the first ``left`` columns to the left."""
    return "\n".join([title, "", columns([head, *lines], left=left), "", *notes])


def csv_of(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV; empty cells where a row has no such entry."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error; None of one value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def with_error(values: Sequence[float], style: str = "{:.3f}") -> str:
    """Mean ± standard error; ``-`` for nothing."""
    if not values:
        return "-"
    mean, error = mean_and_error(values)
    return style.format(mean) + ("" if error is None else " ± " + style.format(error))


def seeds_said(seeds: Sequence[int]) -> str:
    """Of which seeds a table is."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"mean ± standard error over seeds {', '.join(map(str, seeds))}"

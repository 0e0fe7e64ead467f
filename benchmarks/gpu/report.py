"""The end of a call's output: its failures, its steps, and short tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.gpu.run import GOOD, Row

MOST, FAILURES = 11_500, 4_000  # characters in all, and of the failures


def text(rows: Sequence[Row]) -> str:
    """Failures first; the longest tables last, for what is too long is cut."""
    failures = _cut(_failures(rows), FAILURES)
    tables = [_steps, _facts, _profiles, _ncu, _runs, _paths, _times]
    return failures + _cut([line for table in tables for line in table(rows)], MOST - len(failures))


def _cut(lines: Sequence[str], most: int) -> str:
    """As many whole lines as fit, and how many do not."""
    out = ""
    for at, line in enumerate(lines):
        if len(out) + len(line) > most - 50:
            return f"{out}({len(lines) - at} more lines are in rows.jsonl)\n"
        out += f"{line}\n"
    return out


def _failures(rows: Sequence[Row]) -> list[str]:
    bad = [row for row in rows if row["status"] not in GOOD]
    unrun = any(row["status"] == "not run" for row in rows)
    good = "no failures in what ran, but not all ran; see below" if unrun else "no failures"
    lines = [f"FAILURES: {len(bad)}" if bad else good]
    for row in bad:
        where = " ".join(str(row[key]) for key in ("step", "item") if key in row)
        lines.append(f"  {where}: {row['status']}: {str(row.get('message', ''))[:240]}")
    return lines


def _steps(rows: Sequence[Row]) -> list[str]:
    done = [row for row in rows if row.get("step_done")]
    lines = ["steps:", *(f"  {row['step']:12s} {row['seconds']:6.1f} s" for row in done)]
    missing = [row for row in rows if row["status"] in ("skipped", "not run")]
    return lines + [f"  {row['step']}: {row['status']}: {row.get('message', '')[:200]}" for row in missing]


def _facts(rows: Sequence[Row]) -> list[str]:
    machine = [f"{row['device']}, torch {row['torch']}" for row in rows if "device" in row]
    rates = [f"{row['item']} {row['rate']} {row['unit']}" for row in rows if "rate" in row]
    return [", ".join(machine + rates)] if rates else []


def _times(rows: Sequence[Row]) -> list[str]:
    """A line a work: ours, its floor, and the fastest of the others in the same precision."""
    works: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if "who" in row and row["status"] == "ok":
            works[row["work"]][row["who"]] = row
    title = f"{'us a call':52s} {'ours':>9s} {'floor':>8s} {'ratio':>6s} {'TF32':>9s}  fastest other; with TF32"
    lines = [title] if works else []
    for name, found in works.items():
        ours, allowed = found.get("ella_cuda", {}), found.get("ella_cuda, TF32", {})
        others = [row for who, row in found.items() if not who.startswith("ella_cuda")]
        loose = [row for row in others if row["who"].endswith((", TF32", ", float32"))]
        exact = [row for row in others if row not in loose]
        cells = f"{_number(ours, 'microseconds'):>9s} {_number(ours, 'floor'):>8s} {_number(ours, 'ratio'):>6s}"
        cells += f" {_number(allowed, 'microseconds'):>9s}  {_fastest(exact)}; {_fastest(loose)}"
        lines.append(f"{name[:52]:52s} {cells}{' (in L2)' * any('in_cache' in row for row in found.values())}")
    return lines


def _number(row: Row, key: str) -> str:
    return f"{row[key]:.4g}" if key in row else "-"


def _fastest(rows: Iterable[Row]) -> str:
    best = min(rows, key=lambda row: row["microseconds"], default=None)
    return "-" if best is None else f"{best['microseconds']:.4g} {best['who'].removesuffix(', TF32')}"


def _paths(rows: Sequence[Row]) -> list[str]:
    """A line a work: the launcher's own choice, and the fastest path."""
    works: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if "path" in row and row["status"] == "ok":
            works[row["work"]][row["path"]] = row["microseconds"]
    lines = [f"{'path':52s} {'automatic':>9s}  fastest"] if works else []
    for name, found in works.items():
        best = min(found, key=found.__getitem__)
        lines.append(f"{name[:52]:52s} {found.get('automatic', float('nan')):9.4g}  {found[best]:.4g} {best}")
    return lines


def _profiles(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "kernels" in row:
            lines.append(f"{row['item']}: {row['microseconds']:.0f} us, {row['in_kernels']:.0f} us in kernels")
            lines += [f"  {time:9.1f} us {count:4d} x {name[:80]}" for name, time, count in row["kernels"][:6]]
    return lines


def _ncu(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if "Duration" in row]
    return [f"ncu {row['item']}: {', '.join(f'{key} {row[key]}' for key in row if key[0].isupper())}" for row in found]


def _runs(rows: Sequence[Row]) -> list[str]:
    runs = [(row["item"], run) for row in rows for run in row.get("runs", [])]
    return [f"{item} {run['run']}: {run['accuracy']:.2f} %, {run['seconds']} s" for item, run in runs]

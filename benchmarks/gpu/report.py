"""What a call prints last: its failures, its steps, and a short table. The end of an output is what is seen first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.gpu.run import GOOD, Row

MOST = 11_500  # characters in all
FAILURES, STEPS = 4_000, 1_500  # and of these


def text(rows: Sequence[Row]) -> str:
    parts = [_cut(_failures(rows), FAILURES), _cut(_steps(rows), STEPS)]
    tables = [_facts(rows), _times(rows), _paths(rows), _profiles(rows), _ncu(rows), _runs(rows)]
    shares = _shares([_length(table) for table in tables], MOST - sum(map(len, parts)) - 50)
    parts += [_cut(table, share) for table, share in zip(tables, shares, strict=True) if table]
    return "\n".join(parts) + "\n"


def _length(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines)


def _shares(wanted: Sequence[int], left: int) -> list[int]:
    """What each gets of so many characters: what it wants, or as many as any other that gets less."""
    out = [0] * len(wanted)
    for count, at in enumerate(sorted(range(len(wanted)), key=lambda at: wanted[at])):
        out[at] = min(wanted[at], left // (len(wanted) - count))
        left -= out[at]
    return out


def _cut(lines: Sequence[str], most: int) -> str:
    """As many whole lines as fit, and how many do not."""
    if _length(lines) <= most:
        return "\n".join(lines)
    out, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > most - 40:
            break
        out.append(line)
    return "\n".join([*out, f"({len(lines) - len(out)} more lines are in rows.jsonl)"])


def _failures(rows: Sequence[Row]) -> list[str]:
    """A line a failure; of a case that was bisected the paths that are right stand in its own."""
    verdicts = {row["item"]: ", ".join(row["right_by"]) or "no path" for row in rows if "right_by" in row}
    bad = [row for row in rows if row["status"] not in GOOD]
    bad = [row for row in bad if row.get("item") not in verdicts or row.get("path", "memcheck") == "memcheck"]
    unrun = any(row["status"] == "not run" for row in rows)
    good = "no failures in what ran, but not all ran; see below" if unrun else "no failures"
    lines = [f"FAILURES: {len(bad)}" if bad else good]
    for row in bad:
        where = " ".join(str(row[key]) for key in ("step", "tool", "item", "path") if row.get(key))
        bisected = row["step"] == "cases" and row.get("item") in verdicts
        by = f"; right by {verdicts[row['item']]}" if bisected else ""
        lines.append(f"  {where}: {row['status']}{by}: {str(row.get('message', ''))[:240]}")
    return lines


def _steps(rows: Sequence[Row]) -> list[str]:
    lines = ["steps:"]
    for row in rows:
        if row.get("step_done"):
            own = [r for r in rows if r["step"] == row["step"] and not r.get("step_done")]
            bad = sum(r["status"] not in GOOD for r in own)
            lines.append(f"  {row['step']:12s} {row['seconds']:6.1f} s, {len(own)} rows, {bad} failures")
    for row in rows:
        if row["status"] in ("skipped", "not run"):
            lines.append(f"  {row['step']}: {row['status']}: {row.get('message', '')[:200]}")
    return lines


def _facts(rows: Sequence[Row]) -> list[str]:
    rates = [f"{row['item']} {row['rate']} {row['unit']}" for row in rows if "rate" in row]
    machine = next((row for row in rows if row.get("item") == "machine" and "device" in row), None)
    name = [f"{machine['device']}, torch {machine['torch']}"] if machine else []
    return [", ".join(name + rates)] if name or rates else []


def _times(rows: Sequence[Row]) -> list[str]:
    """A line a work: ours, its floor, and the fastest of the others in the same precision."""
    works: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if "who" in row and "microseconds" in row and row["status"] == "ok":
            works[row["work"]][row["who"]] = row
    if not works:
        return []
    lines = [f"{'us a call':52s} {'ours':>9s} {'floor':>8s} {'ratio':>6s} {'TF32':>9s}  fastest other; with TF32"]
    for name, found in works.items():
        ours, allowed = found.get("ella_cuda", {}), found.get("ella_cuda, TF32", {})
        others = {who: row for who, row in found.items() if not who.startswith("ella_cuda")}
        exact = _fastest(row for who, row in others.items() if not who.endswith((", TF32", ", float32")))
        loose = _fastest(row for who, row in others.items() if who.endswith((", TF32", ", float32")))
        cells = [
            f"{_number(ours, 'microseconds'):>9s}",
            f"{_number(ours, 'floor'):>8s}",
            f"{_number(ours, 'ratio'):>6s}",
        ]
        cached = " (in L2)" * any("in_cache" in row for row in found.values())
        lines.append(
            f"{name[:52]:52s} {' '.join(cells)} {_number(allowed, 'microseconds'):>9s}  {exact}; {loose}{cached}"
        )
    return lines


def _number(row: Row, key: str) -> str:
    return f"{row[key]:.4g}" if key in row else "-"


def _fastest(rows: Iterable[Row]) -> str:
    best = min(rows, key=lambda row: row["microseconds"], default=None)
    return "-" if best is None else f"{best['microseconds']:.4g} {best['who'].removesuffix(', TF32')}"


def _paths(rows: Sequence[Row]) -> list[str]:
    """A line a work: the launcher's own choice, and the fastest path."""
    works: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["step"] == "sweep" and "microseconds" in row and row["status"] == "ok":
            works[row["work"]].append(row)
    lines = [f"{'path':52s} {'automatic':>9s}  fastest"] if works else []
    for name, found in works.items():
        own = next((row for row in found if row["path"] == "automatic"), {})
        best = min(found, key=lambda row: row["microseconds"])
        lines.append(f"{name[:52]:52s} {_number(own, 'microseconds'):>9s}  {best['microseconds']:.4g} {best['path']}")
    return lines


def _profiles(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "kernels" in row:
            lines.append(f"{row['item']}: {row['microseconds']:.0f} us, {row['in_kernels']:.0f} us in kernels")
            lines += [f"  {time:9.1f} us {count:4d} x {name[:80]}" for name, time, count in row["kernels"][:6]]
    return lines


def _ncu(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "Duration" in row:
            numbers = [f"{key} {row[key]}" for key in row if key[0].isupper()]
            lines.append(f"ncu {row['item']}: {', '.join(numbers)}")
    return lines


def _runs(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        for run, accuracy in row.get("runs", {}).get("accuracy", {}).items():
            graph = " in CUDA graphs" * ("--cuda-graph" in row["item"])
            lines.append(f"{run}{graph}: {accuracy:.2f} %, {row['runs']['seconds'][run]} s")
    return lines

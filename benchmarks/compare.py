"""Print what ``pytest benchmarks --benchmark-json FILE`` measured: ratios, floors, peak memory.

    python -m benchmarks.compare FILE [FILE ...]

One line for each work and candidate: the median's ratio to ours (above 1: slower than ours), to the counted floor, and
the peak memory above what was there before. Of several files, the later one's lines come after the earlier one's.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

OURS = "ella_cuda"


def lines(report: dict[str, Any]) -> list[str]:
    """The table of one pytest-benchmark report."""
    works: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for entry in report["benchmarks"]:
        info = entry.get("extra_info", {})
        if "work" in info:
            works[info["work"]][info["who"]] = {**info, "median": entry["stats"]["median"]}
    out = [f"{'work':52s} {'candidate':24s} {'x ours':>8s} {'x floor':>8s} {'peak MB':>8s}"]
    for work, candidates in works.items():
        ours = candidates.get(OURS)
        for who, row in sorted(candidates.items(), key=lambda item: (item[0] != OURS, item[1]["median"])):
            ratio = f"{row['median'] / ours['median']:8.2f}" if ours else f"{'-':>8s}"
            peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"
            out.append(f"{work:52s} {who:24s} {ratio} {row['median'] / row['floor_seconds']:8.2f} {peak:>8s}")
    runs = [entry["extra_info"].get("whole_run_seconds") for entry in report["benchmarks"]]
    if any(runs):
        out.append(f"the paper's whole run, counted from its phases: {sum(filter(None, runs)) / 60:.0f} min")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args().files:
        report = json.loads(path.read_text(encoding="utf-8"))
        machine = report["machine_info"].get("ella_cuda", {})
        commit = report.get("commit_info", {})
        state = f"commit {commit.get('id', '?')[:7]}{', changed' if commit.get('dirty') else ''}"
        where = f"{machine.get('device', '?')}, {machine.get('cpu', '?')}, {machine.get('threads', '?')} threads"
        print(f"{path.name}: {where}, torch {machine.get('torch', '?')}, {state}")
        print("\n".join(lines(report)))


if __name__ == "__main__":
    main()

"""Print what ``pytest benchmarks --benchmark-json FILE`` measured: ratios, floors, peak memory.

    python -m benchmarks.compare FILE [FILE ...]
    python -m benchmarks.compare --least FILE FILE [...]

One line for each work and candidate: the median's ratio to ours (above 1: slower than ours), to the counted floor, and
the peak memory above what was there before. Of several files, the later one's lines come after the earlier one's; with
``--least`` they are repetitions, on a machine that has other work too, and every candidate's least median counts, against the
highest of the machine's peaks.

What was run on a smaller problem and extrapolated says so at the end of its line. Where a work's parts were run one by one,
their sum has a line beside the whole. Below the table, for works at several stages of the network, sums over them, and for works of
several sizes the exponents of growth.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS = "ella_cuda"
Row = dict[str, Any]


def row(entry: dict[str, Any]) -> Row:
    """One benchmark's ``extra_info`` with its ``seconds``, extrapolated where it says so, and a ``remark`` that tells."""
    info, scale = entry["extra_info"], entry["extra_info"].get("extrapolation", {"seconds": 1, "bytes": 1})
    peak = info["peak_bytes"]
    return {
        **info,
        "seconds": entry["stats"]["median"] * scale["seconds"],
        "peak_bytes": None if peak is None else peak * scale["bytes"],
        "remark": f"extrapolated, {scale['note']}" if "note" in scale else info.get("remark", ""),
    }


def sum_of_parts(parts: Sequence[Row]) -> Row:
    """The parts run one after the other, where all of what each keeps stays until the end."""
    peaks = [p["peak_bytes"] for p in parts]
    kept = sum(p["kept_bytes"] for p in parts)
    guessed = sum(bool(p["remark"]) for p in parts)
    remark = f"{parts[0]['part_name']}, sum of {len(parts)}" + (f", {guessed} extrapolated" if guessed else "")
    return {
        "who": parts[0]["who"],
        "seconds": sum(p["seconds"] for p in parts),
        "peak_bytes": None if None in peaks else kept + max(p["peak_bytes"] - p["kept_bytes"] for p in parts),
        "remark": remark,
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares e of ``values ~ sizes ** e``; nan for fewer than two sizes or a value that is not positive."""
    if len(set(sizes)) < 2 or min(values) <= 0:
        return math.nan
    logs = [math.log(s) for s in sizes], [math.log(v) for v in values]
    means = [sum(each) / len(each) for each in logs]
    pairs = [(s - means[0], v - means[1]) for s, v in zip(*logs, strict=True)]
    return sum(s * v for s, v in pairs) / sum(s * s for s, _ in pairs)


def growth(rows: Sequence[Row]) -> list[str]:
    """A line for each candidate of works that differ in one size only."""
    series: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for each in rows:
        if "series" in each:
            series[each["series"]["of"], each["series"]["in"], each["who"]].append(each)
    out = []
    for (of, name, who), each in series.items():
        each.sort(key=lambda r: r["series"]["size"])
        sizes = [r["series"]["size"] for r in each]
        if len(sizes) < 2:
            continue
        peaks = [r["peak_bytes"] for r in each]
        memory = "-" if None in peaks else f"{exponent(sizes, peaks):.2f}, {peaks[-1] / peaks[0]:.2f} times"
        time = exponent(sizes, [r["seconds"] for r in each])
        out.append(
            f"{of}, {who}, from {sizes[0]} to {sizes[-1]} {name}: time grows with exponent {time:.2f}, peak memory {memory}"
        )
    return out


def over_stages(works: dict[str, list[Row]]) -> list[str]:
    """A line for all works that differ in the network's stage only: every stage by the best of the others, summed, over ours."""
    sums: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for work, candidates in works.items():
        stage = re.fullmatch(r"(.*), stage \d+", work)
        ours = next((r for r in candidates if r["who"] == OURS), None)
        others = [r["seconds"] for r in candidates if r["who"] != OURS]
        if stage and ours and others:
            sums[stage[1]].append((ours["seconds"], min(others), ours["floor_seconds"]))
    out = []
    for name, stages in sums.items():
        own, best, floor = map(sum, zip(*stages, strict=True))
        ratios = [b / o for o, b, _ in stages]
        out.append(
            f"{name}, sum over {len(stages)} stages: the best of the others {best / own:.2f} x ours ({min(ratios):.2f} to "
            f"{max(ratios):.2f} a stage), ours {own / floor:.2f} x floor"
        )
    return out


def least(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several of the same benchmarks, machine and commit: for each entry the run with the least median, with
    the least floor and the largest peak memory of all runs."""
    where = [(r["machine_info"].get("ella_cuda"), r.get("commit_info", {}).get("id")) for r in reports]
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in (entry for report in reports for entry in report["benchmarks"]):
        runs[entry["fullname"]].append(entry)
    if any(each != where[0] for each in where) or any(len(entries) != len(reports) for entries in runs.values()):
        raise ValueError(
            "--least expects runs of the same benchmarks on the same machine and commit; give files of different ones without it"
        )
    out = []
    for entries in runs.values():
        best = min(entries, key=lambda e: e["stats"]["median"])
        infos = [e["extra_info"] for e in entries]
        if "work" in infos[0]:
            peaks = [info["peak_bytes"] for info in infos]
            over_all = {
                "floor_seconds": min(info["floor_seconds"] for info in infos),
                "peak_bytes": None if None in peaks else max(peaks),
            }
            best = {**best, "extra_info": {**best["extra_info"], **over_all}}
        out.append(best)
    return {**reports[0], "benchmarks": out}


def lines(report: dict[str, Any]) -> list[str]:
    """The table of one pytest-benchmark report."""
    rows = [row(entry) for entry in report["benchmarks"] if "work" in entry.get("extra_info", {})]
    works: dict[str, list[Row]] = defaultdict(list)
    parts: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for each in rows:
        works[each["work"]].append(each)
        if "part_of" in each and each["who"] != OURS:
            parts[each["part_of"], each["who"]].append(each)
    for (work, _), found in parts.items():
        if work in works and len(found) == found[0]["parts"]:
            works[work].append({**works[work][0], **sum_of_parts(found)})
    out = [f"{'work':52s} {'candidate':24s} {'x ours':>8s} {'x floor':>8s} {'peak MB':>8s}"]
    for work, candidates in works.items():
        ours = next((r["seconds"] for r in candidates if r["who"] == OURS), None)
        for each in sorted(candidates, key=lambda r: (r["who"] != OURS, r["seconds"])):
            ratio = f"{each['seconds'] / ours:8.2f}" if ours else f"{'-':>8s}"
            peak = "-" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 1e6:.1f}"
            line = f"{work:52s} {each['who']:24s} {ratio} {each['seconds'] / each['floor_seconds']:8.2f} {peak:>8s}"
            out.append(f"{line}  {each['remark']}".rstrip())
    out += over_stages(works)
    out += growth(rows)
    runs = [each.get("whole_run_seconds") for each in rows]
    if any(runs):
        out.append(f"the paper's whole run, counted from its phases: {sum(filter(None, runs)) / 60:.0f} min")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--least", action="store_true", help="the files are repetitions: print one table of the least medians"
    )
    args = parser.parse_args()
    reports = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in args.files]
    if args.least:
        try:
            reports = [(f"least of {len(reports)} runs", least([report for _, report in reports]))]
        except ValueError as error:
            parser.error(str(error))
    for name, report in reports:
        machine = report["machine_info"].get("ella_cuda", {})
        commit = report.get("commit_info", {})
        state = f"commit {commit.get('id', '?')[:7]}{', changed' if commit.get('dirty') else ''}"
        where = f"{machine.get('device', '?')}, {machine.get('cpu', '?')}, {machine.get('threads', '?')} threads"
        print(f"{name}: {where}, torch {machine.get('torch', '?')}, {state}")
        print("\n".join(lines(report)))


if __name__ == "__main__":
    main()

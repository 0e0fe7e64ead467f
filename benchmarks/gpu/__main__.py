"""The command; see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu import build, steps
from benchmarks.gpu.run import ROOT

BUILD = ROOT / "build" / "gpu"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="compile for the GPU", description=build.__doc__)
    make.add_argument("--to", type=Path, default=BUILD, metavar="FOLDER", help="of the build (build/gpu)")
    for name, names in steps.CALLS.items():
        call = commands.add_parser(name, help=" ".join(names), formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        out = ROOT / "benchmarks" / "results" / f"gpu-{date.today()}-{name}"
        call.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="of the results")
        call.add_argument("--build", type=Path, default=BUILD, metavar="FOLDER", help="with the carried build")
        call.add_argument("--rehearse", type=float, default=0, metavar="SECONDS", help="on the CPU, at small sizes")
        call.add_argument(
            "--steps", nargs="+", default=names, metavar="NAME", help="in order, NAME=SECONDS for a limit"
        )
    args = parser.parse_args()
    if args.command == "build":
        try:
            build.compile_to(args.to.resolve())
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"build: {error}", file=sys.stderr)
            return 1
        print(f"in {args.to}")
        return 0
    try:
        planned = steps.chosen(args.steps)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="gpu-call-", ignore_cleanup_errors=True) as scratch:
        return steps.carry_out(args.out.resolve(), args.build.resolve(), Path(scratch), planned, args.rehearse)


if __name__ == "__main__":
    sys.exit(main())

"""The command; see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu import build, steps
from benchmarks.gpu.run import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("first", "kernels, times, profiles, tests"),
        ("second", "sanitizers, paper's scale, experiments"),
        ("third", "curvlinops, paths of launches, Nsight Compute, experiments"),
    ):
        call = commands.add_parser(name, help=what, description=f"Run {what}, for {steps.SECONDS} seconds at most.")
        call.add_argument(
            "--out", type=Path, metavar="FOLDER", help="of the results (benchmarks/results/gpu-DATE-CALL)"
        )
        call.add_argument(
            "--build", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER", help="the carried build (build/gpu)"
        )
        call.add_argument(
            "--rehearse",
            type=float,
            default=0,
            metavar="SECONDS",
            help="on the CPU, at small sizes, in so many seconds",
        )
        call.add_argument(
            "--steps",
            nargs="+",
            default=steps.CALLS[name],
            metavar="NAME",
            help=f"in this order, NAME=SECONDS with another limit (all of the call: {' '.join(steps.CALLS[name])})",
        )
    make = commands.add_parser("build", help="compile for compute capability 9.0a", description=build.__doc__)
    make.add_argument("--to", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER", help="(build/gpu)")
    make.add_argument(
        "--env",
        type=Path,
        default=ROOT / "build" / "gpu-env",
        metavar="FOLDER",
        help="Python environment (build/gpu-env)",
    )
    make.add_argument("--python", default=f"python{build.PYTHON}", help=f"makes the environment (python{build.PYTHON})")
    make.add_argument("--here", action="store_true", help="by this Python and torch, for this machine's GPU")
    args = parser.parse_args()
    if args.command == "build":
        try:
            python = Path(sys.executable) if args.here else build.environment_of(args.env.resolve(), args.python)
            build.compile_to(args.to.resolve(), python, build.archs_here() if args.here else build.ARCHS)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"build: {error}", file=sys.stderr)
            return 1
        print(f"in {args.to}")
        return 0
    try:
        planned = steps.chosen(args.steps)
    except ValueError as error:
        parser.error(str(error))
    out = args.out.resolve() if args.out else None
    with tempfile.TemporaryDirectory(prefix="gpu-call-", ignore_cleanup_errors=True) as scratch:
        return steps.carry_out(
            args.command, out, args.build.resolve(), Path(scratch), rehearse=args.rehearse, steps=planned
        )


if __name__ == "__main__":
    sys.exit(main())

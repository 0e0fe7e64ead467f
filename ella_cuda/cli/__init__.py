"""The command ``ella-cuda``: train, reproduce, inspect, info."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from ella_cuda import __version__
from ella_cuda.cli.common import FAILED, INTERRUPTED, USAGE, UsageError
from ella_cuda.cli.info import add_info
from ella_cuda.cli.inspect import add_inspect
from ella_cuda.cli.reproduce import add_reproduce
from ella_cuda.cli.train import add_train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; default ``sys.argv[1:]``.

    Returns:
        The exit code: 0 done, 1 failed (one line on stderr; with ``--verbose`` a traceback too), 2 wrong usage, 130
        interrupted.
    """
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return int(stop.code or 0)
    try:
        return int(args.command(args))
    except UsageError as error:
        return _fail(args, "wrong usage", error, USAGE)
    except KeyboardInterrupt:
        print("ella-cuda: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left
        sys.stderr.close()
        return FAILED
    except Exception as error:
        return _fail(args, "failed", error, FAILED)


def _fail(args: argparse.Namespace, what: str, error: Exception, code: int) -> int:
    if args.verbose:
        traceback.print_exc()
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, UsageError | ValueError | OSError | RuntimeError | FloatingPointError):
        text = f"{type(error).__name__}: {text}"  # a defect: its message alone says little
    print(f"ella-cuda: {what}: {text}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ella-cuda", description="Learn layer-wise symmetries from training data.")
    parser.add_argument("--version", action="version", version=f"ella-cuda {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_reproduce(commands)
    add_inspect(commands)
    add_info(commands)
    for command in commands.choices.values():
        command.add_argument("--verbose", action="store_true", help="on failure, show the traceback")
    return parser

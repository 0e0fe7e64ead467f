"""The command ``ella-cuda``: train, reproduce, inspect, info."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
        with warnings.catch_warnings():
            warnings.showwarning = _warner()
            code = int(args.command(args))
        sys.stdout.flush()  # here, where it may fail
        return code
    except UsageError as error:
        return _fail(args, "wrong usage", error, USAGE)
    except KeyboardInterrupt:
        print("ella-cuda: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left; what is still to be written goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _fail(args, "failed", error, FAILED)


def _warner() -> Callable[..., None]:
    """What shows warnings: each in a line, once wherever it comes from, as data are loaded for several purposes."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            print(f"ella-cuda: warning: {text}", file=sys.stderr)
        said.add(text)

    return show


def _fail(args: argparse.Namespace, what: str, error: Exception, code: int) -> int:
    if args.verbose:
        traceback.print_exc()
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, UsageError | ValueError | OSError | RuntimeError | FloatingPointError):
        text = f"{type(error).__name__}: {text}"  # a defect: its message alone says little
    print(f"ella-cuda: {what}: {text}", file=sys.stderr)
    return code


class _Command(argparse.ArgumentParser):
    """A command's parser, which refuses unknown options itself: the top level, to which argparse leaves them, knows no usage of them."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else ""))
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ella-cuda", description="Learn layer-wise symmetries from training data.")
    parser.add_argument("--version", action="version", version=f"ella-cuda {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    add_train(commands)
    add_reproduce(commands)
    add_inspect(commands)
    add_info(commands)
    for command in commands.choices.values():
        command.add_argument("--verbose", action="store_true", help="on failure, show the traceback")
    return parser

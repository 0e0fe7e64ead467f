"""The command ``ella-cuda``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

from ella_cuda.cli.check import add_check
from ella_cuda.cli.common import DONE, FAILED, INTERRUPTED, USAGE, UsageError
from ella_cuda.cli.compact import add_compact
from ella_cuda.cli.compare import add_compare
from ella_cuda.cli.evaluate import add_evaluate
from ella_cuda.cli.info import add_info
from ella_cuda.cli.inspect import add_inspect
from ella_cuda.cli.parsing import Command, Parser, Version
from ella_cuda.cli.predict import add_predict
from ella_cuda.cli.report import add_report
from ella_cuda.cli.reproduce import add_reproduce
from ella_cuda.cli.train import add_train
from ella_cuda_command import Stop, lead_nowhere


def main(argv: Sequence[str] | None = None, stop: Stop | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; default ``sys.argv[1:]``.
        stop: the signals that interrupt it; default Python's own handling, an interruption by SIGINT.

    Returns:
        The exit code: 0 done, 1 failed (one line on stderr; with ``--verbose`` a traceback too), 2 wrong usage, 130
        interrupted (128 and the signal's number).
    """
    verbose = False
    interruption: BaseException | None = None
    args = None
    try:
        if stop is not None:
            stop.cleanly = True
        args = _parser().parse_args(argv)
        verbose = args.verbose
        with warnings.catch_warnings():
            warnings.showwarning = _warner()
            code = args.command(args) or DONE
        if stop is not None:
            stop.cleanly = False
    except BaseException as error:
        if stop is not None:
            stop.cleanly = False
        if isinstance(error, KeyboardInterrupt):
            interruption = error
        elif not (stop is not None and stop.came):  # what came of an interruption says nothing else
            code = _code_of(error, verbose)
    if interruption is not None or (stop is not None and stop.came):
        _complain("; ".join(("interrupted", *([args.go_on] if hasattr(args, "go_on") else []))))
        code = INTERRUPTED if stop is None else stop.code
    return code if _flushed(failed=code != 0) else code or FAILED


def _code_of(error: BaseException, verbose: bool) -> int:
    """The exit code of what ended the command, which is said here."""
    if isinstance(error, SystemExit):  # argparse has said what is wrong, or printed the help
        return int(error.code or 0)
    if isinstance(error, UsageError):
        return _fail("wrong usage", error, verbose, USAGE)
    if isinstance(error, BrokenPipeError):  # whoever read our output has left
        return FAILED
    if isinstance(error, Exception):
        return _fail("failed", error, verbose, FAILED)
    raise error


def _flushed(failed: bool) -> bool:
    """Write out what was printed, here, where it may fail; what cannot be written then goes nowhere, and is spoken of unless the command
    has failed already, and said so."""
    whole = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            whole = False
            lead_nowhere(stream.fileno())
            if not failed and not isinstance(error, BrokenPipeError):
                _complain(f"failed: the output could not be written: {error}")
    return whole


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody is there to read it
        print(f"ella-cuda: {text}", file=sys.stderr, flush=True)


def _warner() -> Callable[..., None]:
    """What shows warnings: each in a line, once wherever it comes from, as data are loaded for several purposes."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            print(f"ella-cuda: warning: {text}", file=sys.stderr)
        said.add(text)

    return show


def _fail(what: str, error: Exception, verbose: bool, code: int) -> int:
    if verbose:
        traceback.print_exc()
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, UsageError | ValueError | OSError | RuntimeError | FloatingPointError):
        text = f"{type(error).__name__}: {text}"  # a defect: its message alone says little
    _complain(f"{what}: {text}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ella-cuda",
        description="Neural networks that learn weight decay, augmentation and symmetries from their training data, by Laplace evidence.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    parser.set_defaults(command=lambda _: print(parser.format_help(), end=""), verbose=False)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Command)
    for add in (
        add_train,
        add_evaluate,
        add_predict,
        add_compare,
        add_report,
        add_compact,
        add_inspect,
        add_check,
        add_info,
        add_reproduce,
    ):
        add(commands)
    for command in commands.choices.values():
        command.add_argument("--verbose", action="store_true", help="on failure, show the traceback")
    return parser

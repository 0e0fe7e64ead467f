"""Parsers whose help begins with the options of every day, and whose errors are two lines with the nearest right word."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from ella_cuda import __version__
from ella_cuda.cli.common import USAGE
from ella_cuda.cli.config import arguments_of
from ella_cuda.experiments.declaring import nearest
from ella_cuda.reports.text import columns

# What `--help` shows of commands with many options, in a line each; None is the option's own help.
COMMON: dict[str, dict[str, str | None]] = {
    "train": {
        "data": None,
        "model": None,
        "layer": "sums of paths, such as f_fc+conv (conv f_fc+conv)",
        "objective": None,
        "learn": "what the evidence learns beside the precisions, such as augmentation (none)",
        "epochs": None,
        "device": None,
        "out": None,
        "resume": None,
        "config": None,
    },
    "compare": {"data": None, "model": None, "epochs": None, "device": None, "out": None, "resume": None},
    "reproduce": {
        "part": "only these parts of an experiment (all)",
        "row": "only these rows of a table (all)",
        "scale": "share of the images and epochs, above 0 and at most 1 (1)",
        "data": "the data set that stands in for the paper's",
        "seed": None,
        "jobs": None,
        "device": None,
        "out": None,
        "resume": None,
    },
}
KINDS = {int: "a whole number", float: "a number"}
EXAMPLES = """\
  ella-cuda check                      does it work here?
  ella-cuda train --epochs 20          scikit-learn's digits, a few minutes
  ella-cuda train photos/              your images, a folder for each class
  ella-cuda report runs/NAME           what was learned, as a page for the browser"""


class Parser(argparse.ArgumentParser):
    """The top level: help that fails where it cannot be written, of which argparse keeps silent, and errors of two lines."""

    nearest = ""  # what the user may have meant
    where = ""  # the file that is read, for errors

    def format_help(self) -> str:
        commands = next(a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        lines = [[f"  {command.dest}", str(command.help)] for command in commands._get_subactions()]
        return (
            f"{self.description}\n\ncommands:\n{columns(lines, left=2)}\n\nto begin with:\n{EXAMPLES}\n\n"
            f"{self.prog} COMMAND --help says more; --version: {__version__}\n"
        )

    def print_help(self, file: Any = None) -> None:
        _print(self.format_help(), file)

    def error(self, message: str) -> Any:
        meant = f"Did you mean {self.nearest}? " if self.nearest else ""
        self.exit(
            USAGE, f"{self.prog}: {self.where}{message.removeprefix('argument ')}\n{meant}See: {self.prog} --help\n"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.nearest = nearest(value, map(str, action.choices))
            self.error(f"{_name(action)} {value!r} is none of {', '.join(map(str, action.choices))}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in KINDS:
                raise
            self.error(f"{_name(action)} must be {KINDS[action.type]}, got {arg_string!r}")


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else action.metavar or action.dest.upper()


class Command(Parser):
    """A command's parser. Unknown options are its own errors: the top level, to which argparse leaves them, knows none of its options."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.common = COMMON.get(self.prog.split()[-1], {})
        if self.common:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        unknown = self._unknown(args)  # first: the words after them would be taken for a PATH
        if not unknown:
            found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.nearest = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if file := getattr(found, "config", None):
            self.where = f"{file}: "
            settings = self._settings(file)
            super().parse_known_args(settings)  # what is wrong with them is said of the file
            self.where = ""
            # The command line's own come last, which wins; --config keeps them from being more values of a setting.
            return super().parse_known_args([*settings, "--config", file, *args], namespace)
        return found, unknown

    def _unknown(self, args: Sequence[str]) -> list[str]:
        """The words that look like long options and begin none."""
        words = itertools.takewhile(lambda word: word != "--", args)
        long = [word for word in words if word.startswith("--") and " " not in word]
        return [w for w in long if not any(o.startswith(w.partition("=")[0]) for o in self._option_string_actions)]

    def _settings(self, file: str) -> list[str]:
        try:
            return arguments_of(file, self._option_string_actions)
        except (OSError, ValueError) as error:
            self.nearest = getattr(error, "nearest", "")
            return self.error(getattr(error, "strerror", None) or str(error))

    def format_help(self) -> str:
        return self._short_help() if self.common else self.format_all()

    def format_all(self) -> str:
        """The help of all options, group by group."""
        self.usage = self._usage()
        return argparse.ArgumentParser.format_help(self)

    def _usage(self) -> str:
        signs = {"?": "[{}]", "+": "{} ...", "*": "[{} ...]"}
        names = [signs.get(str(a.nargs), "{}").format(_name(a)) for a in self._get_positional_actions()]
        return " ".join([self.prog, *names, "[options]"])

    def _short_help(self) -> str:
        known = {action.dest: action for action in self._actions}
        lines = []
        for name, text in self.common.items():
            if action := known.get(name):
                metavar = "" if action.nargs == 0 else f" {action.metavar or name.upper()}"
                lines.append([f"  --{name.replace('_', '-')}{metavar}", text or str(action.help)])
        formatter = self._get_formatter()
        formatter.add_usage(self._usage(), self._actions, self._mutually_exclusive_groups)
        formatter.add_text(str(self.description).partition(". ")[0].removesuffix(".") + ".")
        for action in self._get_positional_actions():
            lines.insert(0, [f"  {_name(action)}", str(action.help)])
        options = len([a for a in self._actions if a.option_strings])
        return (
            f"{formatter.format_help()}\n{columns(lines, left=2)}\n\nAll {options} options in groups, with what each is "
            f"unless given: {self.prog} --help-all\n"
        )


class _HelpAll(argparse.Action):
    """Prints the help of all options and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        _print(parser.format_all())  # type: ignore[attr-defined]
        parser.exit()


class Version(argparse.Action):
    """Prints the version and ends; fails where it cannot be written, as argparse's own action does not."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        _print(f"ella-cuda {__version__}\n")
        parser.exit()


def _print(text: str, file: Any = None) -> None:
    """Print the parser's text at once, since argparse ends the command."""
    try:
        print(text, end="", file=file, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"the output could not be written: {error}") from error

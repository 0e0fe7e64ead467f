"""The settings of ``ella-cuda train`` in a file of TOML, read by ``--config`` and written by ``--write-config``."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.cli.common import flag
from ella_cuda.experiments import RunConfig
from ella_cuda.experiments.declaring import nearest, settings_of, titled_settings

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

CONFIG_TOML = "config.toml"  # in a folder of runs
NOT_IN_FILES = ("config", "help", "help_all", "verbose", "write_config")


def add_config(command: argparse.ArgumentParser) -> None:
    """The options that read and write files of settings."""
    command.add_argument("--config", metavar="FILE", help="settings from a TOML file; options given beside it win")
    command.add_argument("--write-config", metavar="FILE", help="write all settings to a TOML file and end")


def arguments_of(file: str, options: Mapping[str, argparse.Action]) -> list[str]:
    """The settings in a TOML file as words of a command line.

    Args:
        file: its path.
        options: of the command, by their strings.

    Raises:
        OSError: the file cannot be read. ValueError: no TOML, no option of that name, or a table or time where a value should be; its
            ``nearest`` is the option that may have been meant.
    """
    try:
        found = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or tomllib.TOMLDecodeError
        raise ValueError(f"no TOML: {error}") from error
    words: list[str] = []
    for name, value in found.items():
        option = options.get(flag(name))
        if option is None or option.dest in NOT_IN_FILES:
            wrong = ValueError(f"{name} is no setting of the command")
            wrong.nearest = nearest(flag(name), options).removeprefix("--").replace("-", "_")  # type: ignore[attr-defined]
            raise wrong
        values = value if isinstance(value, list) else [value]
        if option.nargs == 0 and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        if isinstance(value, list) and option.nargs != "+":
            raise ValueError(f"{name} must be a single value, got {value!r}")
        if wrong := [one for one in values if not isinstance(one, str | int | float)]:
            raise ValueError(f"{name} must be text or a number, got {wrong[0]!r}")
        if option.nargs == 0:
            words += [flag(name)] if value else []
        elif option.nargs == "+":
            words += [flag(name), *map(str, values)]
        else:
            words.append(f"{flag(name)}={value}")
    return words


def settings_text(options: Mapping[str, Any], configs: Sequence[RunConfig], idle: Collection[str], empty: str) -> str:
    """All settings of a grid as TOML, each below its help: a file that ``--config`` makes the same runs of.

    Args:
        options: the grid's, of ``config.json``. configs: its runs.
        idle: settings that none of the runs heeds, which are comments, as those are that have no value or that recipes choose by run.
        empty: the word for an empty value.
    """
    return "\n".join(_lines(options, configs, idle, empty)) + "\n"


def _lines(
    options: Mapping[str, Any], configs: Sequence[RunConfig], idle: Collection[str], empty: str
) -> Iterator[str]:
    yield "# ella-cuda train --config FILE"
    known = settings_of(RunConfig)
    for title, names in titled_settings(RunConfig).items():
        yield f"\n# {title}"
        for name in names:
            one, values = known[name], {getattr(config, name) for config in configs}
            value = options[name] if name in options else next(iter(values)) if len(values) == 1 else None
            if one.several and isinstance(value, str):
                value = [word for word in value.split("+") if word]
            if one.choices and not one.axis:
                value = value or (empty if "" in one.choices else None)
            yield textwrap.fill(one.help, 110, initial_indent="\n# ", subsequent_indent="# ")
            if len(values) > 1 and name not in options:
                yield f"# {name}: by the recipe of each run"
            elif value in (None, []):
                yield f"# {name}: none"
            else:
                yield ("# " if name in idle else "") + f"{name} = {_toml(value)}"
    yield "\n# This session"
    for name in ("all", *sorted({*options} - {*known, "all", "table"}), "device"):
        if name in options:
            yield f"{name} = {_toml(options[name])}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)

"""Settings: fields of dataclasses that say all there is to say about themselves, once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING
from typing import Any

MANY = 2**31 - 1
KEY = "setting"  # of a field's metadata


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like another, empty where none is like it."""
    return next(iter(difflib.get_close_matches(word, [*known], n=1, cutoff=0.5)), "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a field says of itself. Its annotation gives the type: int, float or str, or one of these and None.

    Attributes:
        help: the option's, without the default, which is added.
        default: what a record without the field means; MISSING makes the field required.
        recipe: what data sets' recipes say, where that is not the default. Of an axis, the tuple of values that a grid has unless told.
        by_data: where a data set's recipe says something else, by name or tuple of names. by_layer: and for a network of that layer.
        choices: of a str. minimum, maximum: of a number, in place of 1 and 2³¹-1 (int) or all positive numbers (float).
        check: of a str: raises ValueError for a wrong value; called with name and value.
        read: makes the one value out of several that mean the same; called with a str.
        several: of a str: whether it is several words, joined by "+" in any order.
        axis: whether it is what the runs of a grid differ in. option: whether the command line has an option of its name.
        title: how names and rows say a value; None as it is.
        path: the path without which it means nothing.
        named: its part of a run's name, a format of the value; "" for none, "{}" for axes. named_with: the path without which it has
            none.
    """

    name: str = ""
    kind: type = str
    optional: bool = False
    help: str
    default: Any
    recipe: Any
    by_data: Mapping[str | tuple[str, ...], Any] = dataclasses.field(default_factory=dict)
    by_layer: Mapping[str, Mapping[str | tuple[str, ...], Any]] = dataclasses.field(default_factory=dict)
    choices: Collection[str] = ()
    minimum: float | None = None
    maximum: float | None = None
    check: Callable[[str, Any], None] | None = None
    read: Callable[[str], str] | None = None
    several: bool = False
    axis: bool = False
    option: bool = True
    title: Callable[[Any], Any] | None = None
    path: str = ""
    named: str = ""
    named_with: str = ""

    def titled(self, value: Any) -> Any:
        """The value as names and rows say it."""
        return value if self.title is None else self.title(value)

    def in_recipe(self, data: str, layer: str = "") -> Any:
        """What the data set's recipe says for networks of that layer."""
        for values in (self.by_layer.get(layer, {}), self.by_data):
            for names, value in values.items():
                if data in (names if isinstance(names, tuple) else (names,)):
                    return value
        return self.recipe

    def checked(self, value: Any) -> Any:
        """The value, a number as Python's own.

        Raises:
            ValueError: another type, out of range, or none of the choices; the message names the setting.
        """
        if value is None and self.optional:
            return None
        if self.several and isinstance(value, str):
            value = "+".join(sorted({word for word in value.split("+") if word}))
        if self.read is not None and isinstance(value, str):
            value = self.read(value)
        value = {int: self._whole, float: self._real, str: self._word}[self.kind](value)
        if self.check is not None:
            self.check(self.name, value)
        return value

    def _word(self, value: Any) -> str:
        if self.choices and value not in [*self.choices]:
            words = map(repr, self.choices) if "" in self.choices else self.choices
            meant = nearest(str(value), self.choices)
            raise ValueError(
                f"{self.name} must be one of {', '.join(words)}, got {value!r}{meant and f'; did you mean {meant}?'}"
            )
        if not isinstance(value, str):
            raise ValueError(f"{self.name} must be a string, got {value!r}.")
        return value

    def _whole(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{self.name} must be a whole number, got {value!r}.")
        minimum, maximum = 1 if self.minimum is None else self.minimum, MANY if self.maximum is None else self.maximum
        if value < minimum:
            raise ValueError(f"{self.name} must be at least {minimum}, got {value}.")
        if value > maximum:
            raise ValueError(f"{self.name} must be at most {maximum}, got {value}.")
        return int(value)

    def _real(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{self.name} must be a real number, got {value!r}.")
        value, maximum = float(value), math.inf if self.maximum is None else self.maximum
        if self.minimum is None and not 0 < value < math.inf:
            raise ValueError(f"{self.name} must be positive and finite, got {value}.")
        if not (self.minimum or 0) <= value <= maximum:
            least = "positive" if self.minimum is None else f"at least {self.minimum:g}"
            raise ValueError(f"{self.name} must be {least} and at most {maximum:g}, got {value}.")
        return value


def setting(default: Any = MISSING, **says: Any) -> Any:
    """A dataclass's field that is a setting, see :class:`Setting` for what it says."""
    usual = {"recipe": default, "named": "{}" if says.get("axis") else ""}
    return dataclasses.field(default=default, metadata={KEY: Setting(default=default, **{**usual, **says})})


@functools.cache
def settings_of(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass by name, in the order of its fields.

    Raises:
        TypeError: a setting of another type than int, float, str and None.
    """
    hints, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        kind, *others = (kind for kind in kinds if kind is not types.NoneType)
        if others or kind not in (int, float, str):
            raise TypeError(f"{field.name} must be int, float or str, or one of these and None, got {field.type}.")
        known = {"name": field.name, "kind": kind, "optional": len(kinds) > 1}
        found[field.name] = dataclasses.replace(field.metadata[KEY], **known)
    return found


@functools.cache
def titled_settings(cls: type) -> dict[str, list[str]]:
    """The settings that have options, by the titles of the classes that declare them: the first words of their docstrings."""
    known, found = settings_of(cls), {}
    for part in reversed(cls.__mro__):
        names = [name for name in inspect.get_annotations(part) if name in known and known[name].option]
        if names:
            found[str(part.__doc__).partition(":")[0].removesuffix(".")] = names
    return found

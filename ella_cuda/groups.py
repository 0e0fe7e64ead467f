"""Finite groups that act on images: a Cayley table and what every element does to the grid."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

Action = Callable[[Tensor, int], Tensor]


class Group:
    r"""A finite group and how its elements move the pixels of an image.

    Elements are numbered from 0.

    Args:
        name: what it is called.
        cayley: ``cayley[g][h]`` is the element that first does h, then g.
        action: ``(x, g) -> g . x``, ``(..., H, W)`` tensors: the same pixels in other places. A ``ValueError`` where the grid does not
            fit. It must be picklable if a model of the group's layers is to be, so no lambda.

    Attributes:
        order: the number of elements.
        identity: the element that does nothing.
        inverse: for every element the one that undoes it.

    Raises:
        ValueError: the table is not that of a group.
        TypeError: the table does not hold integers, or the action is no function.
    """

    def __init__(self, name: str, cayley: Sequence[Sequence[int]], action: Action) -> None:
        if not callable(action):
            raise TypeError(f"action must be a function (x, element) -> x, got {type(action).__name__}.")
        try:
            table = tuple(tuple(operator.index(e) for e in row) for row in cayley)
        except TypeError as error:
            raise TypeError(
                f"cayley must be a table of integers, one list for each element, got {cayley!r}."
            ) from error
        self.name, self.action, self.cayley, self.order = name, action, table, len(table)
        elements = range(self.order)
        lines = [*table, *zip(*table, strict=False)]
        if not table or len(lines) != 2 * self.order or any(sorted(line) != list(elements) for line in lines):
            raise ValueError(
                f"cayley must be a square table of which every row and column holds each of 0..{self.order - 1} once, got {table}."
            )
        for a, b, c in itertools.product(elements, repeat=3):
            if self.cayley[self.cayley[a][b]][c] != self.cayley[a][self.cayley[b][c]]:
                raise ValueError(f"cayley is not associative: ({a} {b}) {c} differs from {a} ({b} {c}).")
        # Rows and columns are permutations and products associate: that makes a group.
        self.identity = next(e for e in elements if self.cayley[e] == tuple(elements))
        self.inverse = tuple(self.cayley[g].index(self.identity) for g in elements)
        self._checked: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        return f"Group({self.name!r}, order {self.order})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and (self.name, self.cayley, self.action) == (
            other.name,
            other.cayley,
            other.action,
        )

    def __hash__(self) -> int:
        return hash((self.name, self.cayley))

    def act(self, x: Tensor, element: int) -> Tensor:
        """The image moved by an element: ``(..., H, W) -> (..., H, W)``.

        Raises:
            ValueError: no such element, x no image, or the action does not fit the grid or is no action of this group on it.
        """
        if not 0 <= element < self.order:
            raise ValueError(f"element must be in 0..{self.order - 1}, the elements of {self.name}, got {element}.")
        if x.dim() < 2:
            raise ValueError(f"x must be images (..., H, W), got shape {tuple(x.shape)}.")
        if not torch.compiler.is_compiling():  # tracing cannot compare tensors
            self.check(*x.shape[-2:])
        return self.action(x, element)

    def check(self, height: int, width: int) -> None:
        """ValueError unless the group acts on such a grid: ``g h`` moves pixels as h and then g do. Checked once for every size."""
        if (height, width) in self._checked:
            return
        grid = torch.arange(height * width, device="cpu").view(height, width)
        moved = [self.action(grid, g) for g in range(self.order)]
        if any(m.shape != grid.shape or not torch.equal(m.flatten().sort().values, grid.flatten()) for m in moved):
            raise ValueError(f"{self}: action must move the pixels of a {height}x{width} grid, each to one place.")
        for g, h in itertools.product(range(self.order), repeat=2):
            if not torch.equal(moved[self.cayley[g][h]], self.action(moved[h], g)):
                raise ValueError(
                    f"{self}: action of {self.cayley[g][h]} on a {height}x{width} grid is not that of {h} and then {g}, as its Cayley "
                    "table says."
                )
        self._checked.add((height, width))

    def relative(self, g: int, h: int) -> int:
        """The element u with ``u g = h``."""
        return self.cayley[h][self.inverse[g]]

    def turn_kernel(self, kernel: Tensor, element: int) -> Tensor:
        """The kernel ``(..., k, k)`` that sees an image as the given one sees the moved image.

        ``correlate(kernel, g . x) = g . correlate(turn_kernel(kernel, g), x)`` with circular padding. Shifts leave kernels as they are.
        """
        transposed, flips = self._linear[element]
        kernel = kernel.flip(flips) if flips else kernel
        return kernel.transpose(-2, -1) if transposed else kernel

    def require_kernel(self, kernel_size: tuple[int, int]) -> None:
        """ValueError unless every element turns such a kernel onto its own rectangle; what turns are is known from then on."""
        if any(transposed for transposed, _ in self._linear) and kernel_size[0] != kernel_size[1]:
            raise ValueError(
                f"{self} does not map a {kernel_size[0]}x{kernel_size[1]} kernel onto itself; use a square one."
            )

    @property
    def _linear(self) -> tuple[tuple[bool, tuple[int, ...]], ...]:
        """For every element how it turns a kernel: flipped along these axes, then transposed.

        Raises:
            ValueError: an element is no symmetry of the periodic grid.
        """
        if not hasattr(self, "_turns"):
            self._turns = tuple(self._linear_part(g) for g in range(self.order))
        return self._turns

    def _linear_part(self, element: int) -> tuple[bool, tuple[int, ...]]:
        size = (
            4 * self.order
        )  # so large that neighbours are told apart; divisible by what a group may divide the grid by
        grid = torch.arange(size * size, device="cpu").view(size, size)
        moved = self.action(grid, element)
        steps = []
        for axis in (0, 1):
            ahead = moved.roll(-1, axis)
            down, right = (ahead // size - moved // size) % size, (ahead % size - moved % size) % size
            steps.append((down.unique().tolist(), right.unique().tolist()))
        # One step along each axis is one step along an axis of the image, forwards or backwards, everywhere.
        for transposed in (False, True):
            for flips in ((), (-2,), (-1,), (-2, -1)):
                signs = [[size - 1 if axis in flips else 1] for axis in (-2, -1)]
                expected = [(signs[0], [0]), ([0], signs[1])]
                if transposed:
                    expected = [([0], signs[0]), (signs[1], [0])]
                if steps == expected:
                    return transposed, flips
        raise ValueError(
            f"{self}: element {element} moves neighbouring pixels apart; it is no symmetry of the periodic grid."
        )

    def act_on_features(self, x: Tensor, element: int) -> Tensor:
        """What :class:`ella_cuda.nn.GroupLift` makes of the image moved by an element, from what it makes of the image: slice g is what
        slice ``g * element`` was. ``(N, C, G, H, W) -> (N, C, G, H, W)``."""
        return torch.stack([x[:, :, self.cayley[g][element]] for g in range(self.order)], 2)


@dataclass(frozen=True)
class _Rotations:
    """Quarter turns, after a mirror for the elements from 4 on."""

    def __call__(self, x: Tensor, element: int) -> Tensor:
        if x.shape[-2] != x.shape[-1]:
            raise ValueError(f"rotations by 90 degrees need square images, got {x.shape[-2]}x{x.shape[-1]}.")
        return torch.rot90(x.flip(-1) if element >= 4 else x, element % 4, (-2, -1))


@dataclass(frozen=True)
class _Shifts:
    """Shifts along the width by multiples of an equal part of it."""

    parts: int

    def __call__(self, x: Tensor, element: int) -> Tensor:
        if x.shape[-1] % self.parts:
            raise ValueError(
                f"shifts by 1/{self.parts} of the width need a width divisible by {self.parts}, got {x.shape[-1]}."
            )
        return x.roll(element * (x.shape[-1] // self.parts), -1)


def cyclic(order: int) -> list[list[int]]:
    """The Cayley table of the cyclic group: addition modulo its order."""
    return [[(g + h) % order for h in range(order)] for g in range(order)]


def cyclic_shifts(parts: int) -> Group:
    """The group of shifts along the width by multiples of ``width / parts``, of ``parts`` elements."""
    if not isinstance(parts, Integral) or isinstance(parts, bool) or parts < 1:
        raise ValueError(f"parts must be a positive integer, got {parts!r}.")
    return Group(f"shifts{parts}", cyclic(parts), _Shifts(int(parts)))


def _dihedral() -> list[list[int]]:
    """Element r + 4m mirrors m times, then turns r times; a turn passes a mirror as its inverse."""
    product = [[0] * 8 for _ in range(8)]
    for g, h in itertools.product(range(8), repeat=2):
        (m, r), (n, s) = divmod(g, 4), divmod(h, 4)
        product[g][h] = (r + (-s if m else s)) % 4 + 4 * ((m + n) % 2)
    return product


# Element r of p4 is torch.rot90(x, r, (-2, -1)); p4m has the mirror images too.
GROUPS = {"p4": Group("p4", cyclic(4), _Rotations()), "p4m": Group("p4m", _dihedral(), _Rotations())}


def as_group(group: str | Group) -> Group:
    """The group of that name, or the group itself.

    Raises:
        ValueError: an unknown name.
        TypeError: neither.
    """
    if isinstance(group, Group):
        return group
    if not isinstance(group, str):
        raise TypeError(f"group must be a name or an ella_cuda.groups.Group, got {type(group).__name__}.")
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(GROUPS)} or an ella_cuda.groups.Group, got {group!r}.")
    return GROUPS[group]

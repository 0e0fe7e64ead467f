"""Finite groups that act on images: a Cayley table and a permutation of the grid for every element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Action = Callable[[int, int, int], Tensor]


class Group:
    r"""A finite group and how its elements move the pixels of an image.

    Elements are numbered from 0. ``action(g, H, W)`` gives for every position of the moved image, in reading order, the position
    that its value comes from: ``(g . x).flatten()[p] = x.flatten()[action(g, H, W)[p]]``.

    Args:
        name: what it is called.
        cayley: ``cayley[g][h]`` is the element that first does h, then g.
        action: ``(g, height, width) -> (height * width,)`` int64 on the CPU; a ``ValueError`` where the grid does not fit. It must be
            picklable if a model of the group's layers is to be, so no lambda.

    Attributes:
        order: the number of elements.
        identity: the element that does nothing.
        inverse: for every element the one that undoes it.

    Raises:
        ValueError: the table is not that of a group.
    """

    def __init__(self, name: str, cayley: Sequence[Sequence[int]], action: Action) -> None:
        self.name, self.action = name, action
        self.cayley = tuple(tuple(int(e) for e in row) for row in cayley)
        self.order = len(self.cayley)
        elements = range(self.order)
        if not self.cayley or any(sorted(row) != list(elements) for row in self.cayley):
            raise ValueError(
                f"cayley must be a square table of which every row holds each of 0..{self.order - 1} once, got {self.cayley}."
            )
        for a, b, c in itertools.product(elements, repeat=3):
            if self.cayley[self.cayley[a][b]][c] != self.cayley[a][self.cayley[b][c]]:
                raise ValueError(f"cayley is not associative: ({a} {b}) {c} differs from {a} ({b} {c}).")
        # Rows are permutations and products associate: there is a left and right identity, and every element has its inverse.
        self.identity = next(e for e in elements if self.cayley[e] == tuple(elements))
        self.inverse = tuple(self.cayley[g].index(self.identity) for g in elements)
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def __repr__(self) -> str:
        return f"Group({self.name!r}, order {self.order})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and (self.name, self.cayley) == (other.name, other.cayley)

    def __hash__(self) -> int:
        return hash((self.name, self.cayley))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tables": {}}

    def positions(self, height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
        """The action of every element on a grid, ``(order, height * width)`` int64.

        Raises:
            ValueError: the action does not fit the grid, or is no action of this group on it: ``gh`` does not move pixels as h and then
                g do.
        """
        return self.cached(("positions", height, width), device, lambda: self._checked_action(height, width))

    def _checked_action(self, height: int, width: int) -> Tensor:
        table = torch.stack([self.action(g, height, width) for g in range(self.order)])
        if table.dtype != torch.int64 or table.shape[1:] != (height * width,):
            raise ValueError(
                f"{self}: action must give int64 tensors of shape ({height * width},) on a {height}x{width} grid, got {table.dtype} "
                f"{tuple(table.shape[1:])}."
            )
        for g, h in itertools.product(range(self.order), repeat=2):
            if not torch.equal(table[self.cayley[g][h]], table[h][table[g]]):
                raise ValueError(
                    f"{self}: action of {self.cayley[g][h]} on a {height}x{width} grid is not that of {h} and then {g}, as its Cayley "
                    "table says."
                )
        return table

    def relative(self) -> list[list[int]]:
        """``relative[g][g']`` is the element u with ``u g = g'``."""
        return [[self.cayley[h][self.inverse[g]] for h in range(self.order)] for g in range(self.order)]

    def offsets(self, kernel_size: tuple[int, int]) -> Tensor:
        """How every element turns a kernel: ``(order, kh * kw)`` int64, the entry of the kernel that each entry of the turned one is.

        With it, ``correlate(k, g . x) = g . correlate(k.flatten()[offsets[g]], x)`` on a torus.

        Raises:
            ValueError: an element is no symmetry of the torus, or takes the kernel out of its rectangle.
        """
        # Large enough that no two entries of the kernel meet, and divisible by what the group may divide the grid by.
        size = self.order * -(-2 * max(kernel_size) // self.order)
        table = self.positions(size, size)
        kh, kw = kernel_size
        out = torch.full((self.order, kh * kw), -1, dtype=torch.int64)
        row, column = torch.arange(size)[:, None], torch.arange(size)[None, :]
        for g, (i, j) in itertools.product(range(self.order), itertools.product(range(kh), range(kw))):
            r, s = i - kh // 2, j - kw // 2
            moved = table[g].view(size, size)
            shifted = moved[(row + r) % size, (column + s) % size]
            down, right = (shifted // size - moved // size) % size, (shifted % size - moved % size) % size
            if not ((down == down[0, 0]).all() and (right == right[0, 0]).all()):
                raise ValueError(
                    f"{self}: element {g} moves neighbouring pixels apart; it is no symmetry of the torus."
                )
            at = [int(d + k // 2) % size for d, k in ((down[0, 0], kh), (right[0, 0], kw))]
            if at[0] >= kh or at[1] >= kw:
                raise ValueError(f"{self}: element {g} does not map a {kh}x{kw} kernel onto itself; use a square one.")
            out[g, at[0] * kw + at[1]] = i * kw + j
        return out

    def act(self, x: Tensor, element: int) -> Tensor:
        """The image moved by an element: ``(..., H, W) -> (..., H, W)``."""
        return x.flatten(-2)[..., self.positions(*x.shape[-2:], x.device)[element]].unflatten(-1, x.shape[-2:])

    def act_on_features(self, x: Tensor, element: int) -> Tensor:
        """What :class:`ella_cuda.nn.GroupLift` makes of the image moved by an element, from what it makes of the image: slice g is what
        slice ``g * element`` was. ``(N, C, G, H, W) -> (N, C, G, H, W)``."""
        return x[:, :, [self.cayley[g][element] for g in range(self.order)]]

    def cached(self, key: tuple[object, ...], device: torch.device | str, make: Callable[[], Tensor]) -> Tensor:
        """``make()`` on the device, made once for every key and device: tables of indices that belong to this group."""
        full = (*key, str(device))
        if full not in self._tables:
            self._tables[full] = make().to(device)
        return self._tables[full]


@dataclass(frozen=True)
class _Rotations:
    """Quarter turns, after a mirror for the elements from 4 on."""

    def __call__(self, element: int, height: int, width: int) -> Tensor:
        if height != width:
            raise ValueError(f"rotations by 90 degrees need square images, got {height}x{width}.")
        grid = torch.arange(height * width).view(height, width)
        return torch.rot90(grid.flip(1) if element >= 4 else grid, element % 4).flatten()


@dataclass(frozen=True)
class _Shifts:
    """Shifts along the width by multiples of an equal part of it."""

    parts: int

    def __call__(self, element: int, height: int, width: int) -> Tensor:
        if width % self.parts:
            raise ValueError(
                f"shifts by 1/{self.parts} of the width need a width divisible by {self.parts}, got {width}."
            )
        return torch.arange(height * width).view(height, width).roll(element * width // self.parts, 1).flatten()


def cyclic(order: int) -> list[list[int]]:
    """The Cayley table of the cyclic group: addition modulo its order."""
    return [[(g + h) % order for h in range(order)] for g in range(order)]


def cyclic_shifts(parts: int) -> Group:
    """The group of shifts along the width by multiples of ``width / parts``, of ``parts`` elements."""
    if not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts must be a positive integer, got {parts!r}.")
    return Group(f"shifts{parts}", cyclic(parts), _Shifts(parts))


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

"""Rows: one side of what a layer's call says of a parameter.

With input rows a ``(N, T, G, d)`` and output rows g ``(K N, T, G, e)``, of T shared positions and G blocks, the gradient of a data point in
a parameter is :math:`\\sum_t a_t g_t^T`, block by block. Only this file, and rules with rows of their own, know which kernel adds them up.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.nn._autocast import full

if TYPE_CHECKING:
    from ella_cuda.laplace.second_moment import SecondMoment

MANY = 32  # columns that make a product of their own fast


class Rows(ABC):
    """One side of a parameter's rows in one call of its layer.

    Attributes:
        values: what the rows are made of, data points first, or columns times data points. Rows are linear in them, so that rows of copies
            and of calls add up.
        blocks: the factor's blocks that these belong to; None is all.
    """

    blocks: range | None = None

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    @abstractmethod
    def positions(self) -> int:
        """T, shared positions of a data point."""

    @property
    def count(self) -> int:
        """Rows of a block."""
        return self.values.shape[0] * self.positions

    @property
    def mean_over(self) -> int:
        """Positions that :meth:`mean` is over."""
        return self.positions

    @abstractmethod
    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        """Add alpha times the rows' outer products to a moment, in place. A moment of one block gets the mean over blocks."""

    @abstractmethod
    def dense(self) -> Tensor:
        """``(R, T, G, d)``."""

    def quadratic(self, matrix: Tensor) -> Tensor:
        """:math:`\\sum_r r^T C r` over all rows, 0-dim, in their graph; the mean over blocks where C has one.

        Args:
            matrix: C, symmetric and constant, ``(G or 1, d, d)``.
        """
        return Dense(self.dense(), self.blocks).quadratic(matrix)

    def products(self, groups: int) -> Tensor | None:
        """The sum of outer products of a factor's side of so many blocks, ``(G, d, d)``, float64, in the rows' graph; None of rows that are
        constants."""
        return Dense(self.dense(), self.blocks).products(groups)

    def summed(self) -> Rows:
        """The sum over positions, as rows of one position."""
        return Dense(full(self.dense()).sum(1, keepdim=True), self.blocks)

    def mean(self) -> Rows:
        """The mean over positions, as rows of one position."""
        return self.summed().times(1 / max(self.positions, 1))

    def over_copies(self, copies: int, mean: bool) -> Rows:
        """The mean, or the sum, over so many copies of each data point, which follow each other."""
        if copies == 1:
            return self
        apart = full(self.values).unflatten(0, (-1, copies))
        return self.with_values(apart.mean(1) if mean else apart.sum(1))

    def times(self, weight: float) -> Rows:
        """Every row times a number."""
        return self if weight == 1 else self.with_values(full(self.values) * weight)

    def plus(self, other: Rows) -> Rows:
        """Row by row, the sum with those of another call.

        Raises:
            ValueError: their numbers differ.
        """
        if self._alike(other):
            return self.with_values(self.values + other.values)
        one, its = self.dense(), other.dense()
        if one.shape != its.shape or self.blocks != other.blocks:
            raise ValueError(f"rows of calls that are summed differ: {tuple(one.shape)} and {tuple(its.shape)}.")
        return Dense(one + its, self.blocks)

    def settled(self) -> Rows:
        """The same rows as a function of :meth:`tensors` alone, which is the same for all data points' copies."""
        return self

    def tensors(self) -> list[Tensor]:
        """The tensors that the rows are linear in."""
        return [self.values]

    def put(self, tensors: Iterator[Tensor]) -> None:
        """Put others in the place of :meth:`tensors`."""
        self.values = next(tensors)

    def with_values(self, values: Tensor) -> Rows:
        """The same rows of other values."""
        rows = copy.copy(self)
        rows.values = values
        return rows

    def _alike(self, other: Rows) -> bool:
        """Whether the two are the same function of values of one shape."""
        mine, its = vars(self), vars(other)
        if type(self) is not type(other) or mine.keys() != its.keys() or self.values.shape != other.values.shape:
            return False
        return all(name == "values" or same(value, its[name]) for name, value in mine.items())


class Dense(Rows):
    """Rows that are written out.

    Args:
        values: ``(R, T, G, d)``.
        blocks: see :class:`Rows`; rows of one block belong to each of several.
    """

    def __init__(self, values: Tensor, blocks: range | None = None) -> None:
        super().__init__(values)
        self.blocks = blocks

    @property
    def positions(self) -> int:
        return self.values.shape[1]

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        rows = self._weighted()
        groups, size = rows.shape[2:]
        if groups > 1 and moment.total.shape[0] == 1:
            flat = rows.flatten(0, 1)
            flat = flat.transpose(0, 1) if flat.stride(0) < flat.stride(1) else flat  # in the order of memory
            moment.add(flat.reshape(-1, 1, size), alpha / groups)
        elif self.blocks is None:
            moment.add(rows.flatten(0, 1), alpha)
        else:
            moment.add_to(self.blocks, rows.flatten(0, 1), alpha)

    def quadratic(self, matrix: Tensor) -> Tensor:
        rows = self._weighted().flatten(0, 1)
        groups = rows.shape[1]
        if self.blocks is not None:
            matrix = matrix[self.blocks.start : self.blocks.stop]
        if groups == 1 < matrix.shape[0]:
            matrix = matrix.sum(0, keepdim=True)
        found = Quadratic.apply(rows.transpose(0, 1), matrix)
        return found / groups if matrix.shape[0] < groups else found

    def products(self, groups: int) -> Tensor:
        rows = self._weighted().flatten(0, 1).double()
        found = torch.einsum("rgi,rgj->gij", rows, rows)
        if groups == 1 < len(found):
            return found.mean(0, keepdim=True)
        if self.blocks is None:
            return found
        blocks, whole = self.blocks, found.new_zeros(groups, *found.shape[1:])
        return whole.index_add(
            0, torch.arange(blocks.start, blocks.stop, device=found.device), found.expand(len(blocks), -1, -1)
        )

    def dense(self) -> Tensor:
        return self.values

    def summed(self) -> Rows:
        return self if self.values.shape[1] == 1 else super().summed()

    def _weighted(self) -> Tensor:
        """The rows whose outer products are summed."""
        return self.values


class Patches(Rows):
    """Patches of images, one at each position of a convolution, channels first; not written out where a kernel reads the images.

    Args:
        values: images of one to three axes, ``(R, G C, ...)``; d is C times the taps.
        kernel_size: by axis. stride, dilation: likewise; None is 1.
        groups: G.
        sides: padding before and after, by axis; None is none.
        padding_mode: "zeros", "circular", "reflect" or "replicate".
        images: that make a data point, one after the other.
    """

    def __init__(
        self,
        values: Tensor,
        kernel_size: Sequence[int],
        groups: int = 1,
        *,
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        sides: Sequence[tuple[int, int]] | None = None,
        padding_mode: str = "zeros",
        images: int = 1,
    ) -> None:
        super().__init__(values)
        ones = (1,) * len(kernel_size)
        self.kernel_size, self.groups, self.padding_mode = tuple(kernel_size), groups, padding_mode
        self.stride, self.dilation = tuple(stride or ones), tuple(dilation or ones)
        self.sides = tuple(map(tuple, sides or [(0, 0)] * len(ones)))
        self.images = images
        self._positions: int | None = None

    @classmethod
    def of_planes(cls, values: Tensor, groups: int = 1) -> Patches:
        """Channels at every position of images ``(R, G C, ...)``."""
        return cls(values, (1,) * (values.dim() - 2), groups)

    def among(self, positions: int) -> Patches:
        """The same patches, of which there are so many at a data point, the others zero."""
        rows = copy.copy(self)
        rows._positions = positions
        return rows

    @property
    def positions(self) -> int:
        if self._positions is not None:
            return self._positions
        return self.images * math.prod(map(self._along, range(len(self.kernel_size))))

    @property
    def count(self) -> int:
        return self.values.shape[0] // self.images * self.positions

    def _along(self, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        return (self.values.shape[2 + axis] + sum(self.sides[axis]) - reach) // self.stride[axis] + 1

    def _is_pointwise(self) -> bool:
        """Whether every pixel is a patch."""
        ones = {*self.kernel_size, *self.stride} == {1}
        return ones and not any(map(any, self.sides))

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        if len(self.kernel_size) == 3 and not self._is_pointwise():
            moment.add_windows(self._padded(), self.kernel_size, self.stride, self.dilation, alpha)
            return
        if self._is_pointwise():
            flat = self.values if self.values.dim() == 4 else self.values.flatten(2)[:, :, None]
            moment.add_patches(flat, 1, alpha=alpha)
        else:
            images, mode, padding = self._in_the_plane()
            lift = (1,) * (2 - len(self.kernel_size))
            stride, dilation = lift + self.stride, lift + self.dilation
            kernel = lift + self.kernel_size
            moment.add_patches(images, kernel, mode, alpha, stride=stride, padding=padding, dilation=dilation)
        moment.count(self.count)

    def _in_the_plane(self) -> tuple[Tensor, str, tuple[int, int]]:
        """Images of two axes, with the padding that the kernel does, and those of other kinds padded."""
        symmetric = all(before == after for before, after in self.sides)
        if len(self.kernel_size) == 2 and symmetric and self.padding_mode in ("zeros", "circular"):
            (down, _), (right, _) = self.sides
            return self.values, self.padding_mode, (down, right)
        images = self._padded()
        return images if len(self.kernel_size) == 2 else images[:, :, None], "zeros", (0, 0)

    def _padded(self) -> Tensor:
        return pad(self.values, self.sides, self.padding_mode)

    def dense(self) -> Tensor:
        if self._is_pointwise() and self.images == 1:
            images, channels, *planes = self.values.shape
            apart = self.values.reshape(images, self.groups, channels // self.groups, math.prod(planes))
            return apart.permute(0, 3, 1, 2)  # a view
        x, axes = self._padded(), len(self.kernel_size)
        for axis, (k, s, d) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True), start=2):
            x = x.unfold(axis, d * (k - 1) + 1, s)
            x = x if d == 1 else x[..., ::d]
        images, channels, *sizes = x.shape  # (R, G C, *positions, *taps)
        positions, taps = sizes[:axes], channels // self.groups * math.prod(sizes[axes:])
        rows = x.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
        rows = rows.reshape(images, math.prod(positions), self.groups, taps)
        return rows if self.images == 1 else rows.unflatten(0, (-1, self.images)).flatten(1, 2)

    def over_copies(self, copies: int, mean: bool) -> Rows:
        if self.images == 1 or copies == 1:
            return super().over_copies(copies, mean)
        apart = full(self.values).unflatten(0, (-1, copies, self.images))
        return self.with_values((apart.mean(1) if mean else apart.sum(1)).flatten(0, 1))

    def quadratic(self, matrix: Tensor) -> Tensor:
        if len(self.kernel_size) == 3 and not self._is_pointwise():
            return super().quadratic(matrix)
        if self._is_pointwise():
            columns = self.values.flatten(2)
        else:
            images, mode, padding = self._in_the_plane()
            if mode == "circular":
                images, padding = pad(self.values, self.sides, mode), (0, 0)
            lift = (1,) * (2 - len(self.kernel_size))
            columns = F.unfold(images, lift + self.kernel_size, lift + self.dilation, padding, lift + self.stride)
        columns = columns.unflatten(1, (self.groups, -1))  # (R, G, d, T)
        if columns.shape[3] >= MANY:
            return Quadratic.apply(columns, matrix, True)
        return Quadratic.apply(columns.permute(1, 0, 3, 2).flatten(1, 2), matrix)

    def summed(self) -> Rows:
        x = full(self.values)
        if self._is_pointwise():
            sums = x.flatten(2).sum(2)
        else:  # along each axis, how often each tap meets each pixel
            axes = zip(x.shape[2:], self.kernel_size, self.stride, self.dilation, self.sides, strict=True)
            matrices = [_tap_counts(*axis, self.padding_mode).to(x) for axis in axes]
            pixels, taps = "xyz"[: len(matrices)], "ijk"[: len(matrices)]
            each = ",".join(map("".join, zip(pixels, taps, strict=True)))
            sums = torch.einsum(f"nc{pixels},{each}->nc{taps}", x, *matrices).flatten(1)
        sums = sums if self.images == 1 else sums.unflatten(0, (-1, self.images)).sum(1)
        return Dense(sums.unflatten(1, (self.groups, -1))[:, None], self.blocks)


class OneHot(Rows):
    """One-hot rows, stored by their index: the input side of a table, whose blocks are its rows.

    Args:
        index: ``(N, T)``.
        counted: ``(N, T)``, where there is a row; positions that are padding have none.
        groups: rows of the table.
    """

    def __init__(self, index: Tensor, counted: Tensor, groups: int) -> None:
        super().__init__(index)
        self.counted, self.groups = counted, groups

    @property
    def positions(self) -> int:
        return self.values.shape[1]

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        counts = self.counted.new_zeros(self.groups, dtype=torch.float64)
        counts.index_add_(0, self.values.flatten(), self.counted.flatten().double())  # whole numbers, in any order
        # Several calls share the output side by their positions, padding included: how much of a batch is padding must not matter.
        moment.add_diagonal(counts if alpha == 1 else counts * alpha, self.count)

    def quadratic(self, matrix: Tensor) -> Tensor:
        return matrix.new_zeros(())  # indices have no gradient

    def products(self, groups: int) -> None:
        return None

    def dense(self) -> Tensor:
        raise NotImplementedError("OneHot: rows of a table are not written out.")

    def mean(self) -> Rows:
        """The diagonal of the outer products of each data point's mean: between two rows of the table there is nothing."""
        index, order = self.values.sort(1)
        shares = self.counted.double()
        shares = (shares / shares.sum(1, keepdim=True).clamp(min=1)).gather(1, order)
        # Numbers of the runs of one index; the positions behind the last run have no share.
        run = index.diff(dim=1, prepend=index[:, :1]).ne(0).cumsum(1)
        shares = torch.zeros_like(shares).scatter_add(1, run, shares)
        index = torch.zeros_like(index).scatter(1, run, index)
        seen = shares.new_zeros(self.groups)
        seen.index_put_((index.flatten(),), shares.square().flatten(), accumulate=True)  # in a fixed order on CUDA
        return Diagonal(seen, self.count)

    def over_copies(self, copies: int, mean: bool) -> Rows:
        if copies == 1:
            return self
        raise ValueError("OneHot: indices have no mean over copies.")


class Diagonal(Rows):
    """Sums of squares in the place of rows, one for each of G blocks of size 1.

    Args:
        values: ``(G,)``.
        count: rows that the sums are of.
    """

    def __init__(self, values: Tensor, count: int) -> None:
        super().__init__(values)
        self._count = count

    @property
    def positions(self) -> int:
        return 1

    @property
    def count(self) -> int:
        return self._count

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        moment.add_diagonal(self.values if alpha == 1 else self.values * alpha, self._count)

    def products(self, groups: int) -> Tensor:
        return self.values.double()[:, None, None]

    def quadratic(self, matrix: Tensor) -> Tensor:
        return (matrix[:, 0, 0] * self.values).sum()

    def dense(self) -> Tensor:
        raise NotImplementedError("Diagonal: sums of squares have no rows.")

    def summed(self) -> Rows:
        return self

    def times(self, weight: float) -> Rows:
        return self if weight == 1 else self.with_values(self.values * weight**2)


class Quadratic(torch.autograd.Function):
    """The sum of :math:`r^T C r` over rows ``(..., R, d)``, or over columns ``(..., d, R)``: one product for both ways."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, columns: bool = False) -> Tensor:
        matrix = matrix.to(rows.dtype)
        products = matrix @ rows if columns else rows @ matrix
        ctx.save_for_backward(products)
        if rows.is_contiguous() and products.is_contiguous():
            return torch.dot(rows.flatten(), products.flatten())
        return torch.einsum("...ij,...ij->", rows, products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (products,) = ctx.saved_tensors
        return products * (2 * gradient), None, None


def patches_of(x: Tensor, m: nn.Module) -> Patches:
    """Patches that a convolution sees of images ``(N, C, ...)``."""
    geometry = {"stride": m.stride, "dilation": m.dilation, "sides": side_padding(m), "padding_mode": m.padding_mode}
    return Patches(x, m.kernel_size, m.groups, **geometry)


def same_circular_patches(x: Tensor, kernel_size: Sequence[int], groups: int = 1, images: int = 1) -> Patches:
    """Patches around every pixel of images on a torus."""
    sides = [(k // 2, k // 2) for k in kernel_size]
    return Patches(x, kernel_size, groups, sides=sides, padding_mode="circular", images=images)


def planes_of(gradient: Tensor, m: nn.Module) -> dict[str, Rows]:
    """Rows of a convolution's weight and bias from gradients ``(K, N, D, ...)`` at its output."""
    flat = gradient.flatten(0, 1)
    bias = Patches.of_planes(flat)
    return {"weight": bias if m.groups == 1 else Patches.of_planes(flat, m.groups), "bias": bias}


def side_padding(m: nn.Module) -> list[tuple[int, int]]:
    """A convolution's padding before and after, for every axis; "same" with an even kernel has different ones on the two sides."""
    if m.padding == "valid":
        return [(0, 0)] * len(m.kernel_size)
    if m.padding == "same":
        total = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in m.padding]


def pad(x: Tensor, sides: Sequence[tuple[int, int]], padding_mode: str) -> Tensor:
    """Images with padding before and after, by axis."""
    amounts = [p for side in reversed(sides) for p in side]
    return F.pad(x, amounts, mode="constant" if padding_mode == "zeros" else padding_mode) if any(amounts) else x


def _tap_counts(
    size: int, kernel: int, stride: int, dilation: int, sides: tuple[int, int], padding_mode: str
) -> Tensor:
    """Along an axis of ``size`` pixels, over the positions of a convolution, how often each tap meets each pixel, ``(size, kernel)``."""
    pixels = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")[None, None]  # 0 is what zeros pad
    padded = pad(pixels, [sides], padding_mode)[0, 0].long()
    met = padded.unfold(0, dilation * (kernel - 1) + 1, stride)[:, ::dilation]  # (positions, taps)
    counts = torch.zeros(size + 1, kernel, dtype=torch.float64, device="cpu")
    return counts.scatter_add_(0, met, torch.ones(met.shape, dtype=torch.float64, device="cpu"))[1:]


def same(one: Any, other: Any) -> bool:
    """Whether two attributes of rows are one value, tensors one memory."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.data_ptr() == other.data_ptr()
    return type(one) is type(other) and not isinstance(one, Tensor) and one == other

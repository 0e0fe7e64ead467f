"""Streaming sums of outer products, and their eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.distributed import Ranks, owners
from ella_cuda.laplace.eigenvalues import eigenvalues, eigenvalues_of_all
from ella_cuda.nn import SpatialBasis

# Rows of a single block up to this size are multiplied in float64: products of float32 would lose the zero eigenvalue that the softmax
# Hessian has, whose noise the evidence multiplies with the input side's largest eigenvalue. For blocks so small that takes little time.
WHOLE = 128
WINDOWS = 1 << 20  # elements of the patches of images of three axes that are there at a time, or those of a plane
# Sums of up to so many products of two numbers are float64's too: they take little time, and with more rows rounding averages out.
SMALL = 1 << 25
# Of rows that hardly differ in direction but for a few, such as those far from zero, products are float64's: rounding is relative to the
# largest eigenvalue. They are those of which so many, of so many numbers, spread over the first that are added and normalised, have half
# of their eigenvalues below this share of the largest; or of which twice as many numbers side by side have one, as of smooth images and
# of gradients of units that are never off.
SAMPLE, NUMBERS, ALIKE = 32, 2048, 1e-5
DOUBLED = 1 << 22  # numbers that are copied to float64 at a time


class SecondMoment:
    """A streaming sum of outer products in blocks: ``total[g] = sum_rows alpha * row[g] row[g]^T``, ``(G, d, d)``.

    Where weights are given at the A anchors of a basis, rows are collected at its X positions, as for a layer without one, and
    ``total`` is projected when it is read: d is then a multiple of X.

    ``total`` is float64 whatever the rows' dtype: products of float32, bfloat16 or float16 rows are summed in float32 over short runs of
    them, and these sums in float64. A float32 total would lose the small eigenvalues of rows that are not centred, the more the more
    batches there are. Where float32 products would lose eigenvalues too, and where they cost little, they are float64's: in narrow blocks,
    in small sums, and of rows that differ in few directions.

    Args:
        groups: G.
        size: d.
        like: a tensor of the dtype (float32 or float64) in which rows are multiplied and on their device.
        name: what it belongs to, for error messages.
        basis: of the weights, or None.
    """

    sums: Any = ops  # by whose functions rows are added

    def __init__(self, groups: int, size: int, like: Tensor, name: str, basis: SpatialBasis | None = None) -> None:
        self.total = torch.zeros(groups, size, size, dtype=torch.float64, device=like.device)
        self.dtype = like.dtype  # of the rows, or of their products
        self.rows = 0
        self.name = name
        self.basis = basis
        self._products = 0  # that were taken
        self._are_alike: bool | None = None  # rows, but for a few directions
        self._eigenvalues: Tensor | None = None
        self._decomposed_on: Tensor | None = None  # the basis' matrix that they belong to

    def add(self, rows: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the outer products of ``rows``, ``(R, G, d)``, any strides."""
        self._accumulate(self.total, rows, alpha)
        self.count(rows.shape[0])

    def add_to(self, blocks: range, rows: Tensor, alpha: float = 1.0) -> None:
        """As :meth:`add`, to these of the blocks; rows ``(R, 1, d)`` are those of every block."""
        total = self.total[blocks.start : blocks.stop]
        if rows.shape[1] == 1 and total.shape[0] > 1:
            total += self._accumulate(torch.zeros_like(total[:1]), rows, alpha)
        else:
            self._accumulate(total, rows, alpha)
        self.count(rows.shape[0])

    def add_weighted(self, rows: Tensor, weights: Tensor) -> None:
        """Add ``weights`` ``(G, d, d)``, symmetric, times the sum of the outer products of ``rows``, ``(R, d)``, entry by entry. Where
        the weights are sums of outer products too, so is what is added (Schur).
        """
        self.total += self._accumulate(torch.zeros_like(self.total[:1]), rows[:, None], 1.0) * weights
        self.count(rows.shape[0] * weights.shape[2])  # the rank of what is added is at most that of both

    def add_counts(self, counts: Tensor) -> None:
        """Add one-hot rows of size G, ``counts`` ``(G,)`` of each, to G blocks of size 1: the diagonal of their sum of outer products. Or
        weights, in the place of numbers of rows."""
        self.add_diagonal(counts, int(counts.sum()))

    def add_diagonal(self, values: Tensor, rows: int) -> None:
        """Add ``values`` ``(G,)``, which are sums of squares of so many rows, to G blocks of size 1."""
        self.total = self.total + values.to(self.total.dtype)[:, None, None]
        self.count(rows)

    def add_windows(
        self, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], alpha: float = 1.0
    ) -> None:
        """As :meth:`add_patches`, of images of three axes, ``(N, G*C, D, H, W)``, that are padded already; :meth:`count` included. Patches
        are written out, of some images or planes at a time.
        """
        for axis, (k, s, d) in enumerate(zip(kernel_size, stride, dilation, strict=True), start=2):
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]  # (N, G*C, D', H', W', kd, kh, kw)
        planes = x.shape[2]
        each = max(x.numel() // max(x.shape[0] * planes, 1), 1)  # elements of an image's plane
        for images in x.split(max(WINDOWS // (each * max(planes, 1)), 1)):
            for part in images.split(max(WINDOWS // (each * max(images.shape[0], 1)), 1), 2):
                rows = part.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4).flatten(0, 3)
                self.add(rows.unflatten(1, (self.total.shape[0], -1)), alpha)

    def add_patches(
        self,
        x: Tensor,
        kernel_size: int | tuple[int, int],
        padding_mode: str = "circular",
        alpha: float = 1.0,
        **geometry: Any,
    ) -> None:
        """Add the outer products of the patches of x, ``(N, G*C, H, W)``, block g those of its g-th C channels; see
        :func:`ella_cuda.ops.conv_kron_accumulate_`. :meth:`count` them.
        """
        for some in self._in_its_dtype(x, x.numel() * self.total.numel() // x.shape[1]):
            for block, part in zip(self.total, some.chunk(self.total.shape[0], 1), strict=True):
                self.sums.conv_kron_accumulate_(block, part, kernel_size, padding_mode, alpha, **geometry)

    def _accumulate(self, total: Tensor, rows: Tensor, alpha: float) -> Tensor:
        sums = self.sums if total is self.total else ops
        for some in self._in_its_dtype(
            rows, rows.numel() * rows.shape[2], rows.shape[1] == 1 and rows.shape[2] <= WHOLE
        ):
            sums.kron_accumulate_(total, some, alpha)
        return total

    def _in_its_dtype(self, rows: Tensor, products: int, narrow: bool = False) -> Iterator[Tensor]:
        """Rows, or images, in the dtype in which so many products of theirs are to be taken: all of them, or in float64 some at a time."""
        small = self._products + products <= SMALL
        self._products += products
        if rows.dtype == torch.float64 or not (narrow or small or self._alike(rows)):
            yield rows
        else:
            each = max(rows.numel() // max(rows.shape[0], 1), 1)
            yield from (part.double() for part in rows.split(max(DOUBLED // each, 1)))

    def _alike(self, rows: Tensor) -> bool:
        """Whether rows differ in few directions, by the first that are several."""
        if self._are_alike is None and rows.shape[0] > 1:
            sample = rows[:: max(rows.shape[0] // SAMPLE, 1)][:SAMPLE].flatten(1)
            self._are_alike = _of_few_directions(sample[:, :: max(sample.shape[1] // NUMBERS, 1)])
            if not self._are_alike and rows.dim() == 3 and min(rows.shape[0], rows[0].numel()) >= 4 * SAMPLE:
                beside = rows[:: rows.shape[0] // (4 * SAMPLE)][: 4 * SAMPLE].flatten(1)
                self._are_alike = _of_few_directions(beside.narrow(1, beside.shape[1] // 2 - SAMPLE, 2 * SAMPLE).T, 0.0)
        return bool(self._are_alike)

    def count(self, rows: int) -> None:
        """Say that this many rows were added to ``total`` by other means; no fewer, for a sum has no larger rank."""
        self.rows += rows
        self._eigenvalues = None

    @property
    def rank(self) -> tuple[int, float]:
        """What bounds the rank, and the relative rounding error of the products."""
        return self.rows, torch.finfo(self.dtype).eps

    def clone(self, name: str) -> SecondMoment:
        """An independent copy under another name."""
        other = type(self)(0, 0, self.total.new_empty(0, dtype=self.dtype), name, self.basis)
        other.total, other.rows = self.total.clone(), self.rows
        return other

    def projected(self) -> Tensor:
        r"""``total``, or on a basis :math:`(I \otimes \Psi)\, total\, (I \otimes \Psi)^T` at its present state.

        ``(G, d, d)``, or ``(G, d/X * A, d/X * A)``, differentiable in the basis' anchors and inverse lengthscale.

        Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix, on sparsified layers.
        """
        if self.basis is None:
            return self.total
        psi, groups = self.basis.matrix().double(), self.total.shape[0]
        half = self.total.unflatten(2, (-1, psi.shape[1])) @ psi.T  # (G, d, d/X, A)
        whole = half.flatten(2).mT.unflatten(2, (-1, psi.shape[1])) @ psi.T  # (G, d/X * A, d/X, A)
        return whole.reshape(groups, half[0, 0].numel(), -1)

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of every block of :meth:`projected`, ascending, ``(G, a)``, float64.

        Computed once and kept until rows are added or the basis changes; where the basis' anchors or inverse lengthscale require a
        gradient, anew at every call and differentiable in them.

        The decomposition is in float64 as the sum is. An eigensolver's error is eps times the *largest* eigenvalue, in
        every eigenvalue; the evidence compares products of small ones with the prior precision. Inputs of very
        different scales (a nearly dead channel beside a live one) give sums whose small eigenvalues a float32 solver
        replaces by noise of either sign.

        A sum of R outer products has rank R at most: of the ``d - R`` smallest eigenvalues, those up to
        :math:`\\epsilon (d + \\sqrt R) \\lambda_{max}` are zero, :math:`\\epsilon` the products' rounding.

        Raises:
            FloatingPointError: the sum is not finite.
            ArithmeticError: an eigenvalue is negative beyond rounding; the sum is then no sum of outer products.
            torch.linalg.LinAlgError: a block's eigenvalues did not converge.
        """
        if self._eigenvalues is not None and not self._learns() and self._matrix() is self._decomposed_on:
            return self._eigenvalues
        (blocks,) = _blocks([self])
        (values,) = _checked([self], [eigenvalues(blocks)])
        if not self._learns():
            self._keep(values)
        return values

    @staticmethod
    def decompose_all(moments: Iterable[SecondMoment]) -> None:
        """Compute what :meth:`eigenvalues` of each keeps, of many at once: see :func:`ella_cuda.laplace.eigenvalues.eigenvalues_of_all`.

        Raises:
            What :meth:`eigenvalues` raises; other moments may have theirs.
        """
        lacking = [m for m in moments if m._eigenvalues is None or m._matrix() is not m._decomposed_on]
        for numbers in _at_once(dict(enumerate(lacking))):
            together = [lacking[number] for number in numbers]
            found = _checked(together, eigenvalues_of_all(_blocks(together), [m.rank for m in together]))
            for moment, values in zip(together, found, strict=True):
                moment._keep(values)

    @staticmethod
    def decompose_together(moments: Sequence[SecondMoment], ranks: Ranks) -> None:
        """As :meth:`decompose_all`, of sums that all ranks have alike: each block by one rank, whose eigenvalues all get. Blocks of one row,
        of which a moment may have millions, are their eigenvalues, and nobody's.

        Raises:
            What :meth:`eigenvalues` raises, on all ranks.
        """
        small, nothing = [m for m in moments if _projected_rows(m) == 1], moments[0].total.new_empty(0)
        moments = [m for m in moments if m not in small]
        sizes = [(m.total.shape[0], _projected_rows(m)) for m in moments]
        blocks = [(number, block) for number, (groups, _) in enumerate(sizes) for block in range(groups)]
        owner = owners([float(sizes[number][1]) ** 3 for number, _ in blocks], ranks.size)
        mine: dict[int, list[int]] = {}
        for (number, block), rank in zip(blocks, owner, strict=True):
            if rank == ranks.rank:
                mine.setdefault(number, []).append(block)

        def decompose() -> Tensor:
            SecondMoment.decompose_all(small)
            found: dict[int, Tensor] = {}
            for some in _at_once({number: moments[number] for number in mine}):
                wholes = _blocks([moments[number] for number in some])
                own = [
                    whole if len(mine[number]) == len(whole) else whole[mine[number]]
                    for whole, number in zip(wholes, some, strict=True)
                ]
                found |= zip(some, eigenvalues_of_all(own, [moments[number].rank for number in some]), strict=True)
            return torch.cat([found[number].flatten() for number in mine]) if mine else nothing

        found = ranks.together(decompose)
        counts = [0] * ranks.size
        for (number, _), rank in zip(blocks, owner, strict=True):
            counts[rank] += sizes[number][1]
        pieces = [
            list(part.split(_of_rank(blocks, owner, sizes, rank)))
            for rank, part in enumerate(ranks.gather_uneven(found, counts))
        ]
        taken = [iter(part) for part in pieces]
        by_moment: list[list[Tensor]] = [[] for _ in moments]
        for (number, _), rank in zip(blocks, owner, strict=True):
            by_moment[number].append(next(taken[rank]))
        for moment, values in zip(moments, _checked(moments, [torch.stack(v) for v in by_moment]), strict=True):
            moment._keep(values)

    def _learns(self) -> bool:
        """Whether the eigenvalues are wanted as a function of the basis."""
        return self.basis is not None and torch.is_grad_enabled() and self.basis.learns()

    def _matrix(self) -> Tensor | None:
        return None if self.basis is None else self.basis.matrix()

    def _keep(self, values: Tensor) -> None:
        self._eigenvalues, self._decomposed_on = values, self._matrix()

    def _tolerance(self, values: Tensor) -> Tensor:
        """How far below zero rounding may have taken eigenvalues, ``(G,)``."""
        # A sum of R rounded terms carries an error of about sqrt(R) eps relative to the largest eigenvalue, d eps
        # at the least; eps is that of the products, whose dtype is the rows'. Below the smallest normal number, where
        # the moments of a layer that was switched off end, rounding is absolute: a product can lose up to that
        # number, in each of R terms and d entries.
        number = torch.finfo(self.dtype)
        size = self.total.shape[-1]
        largest, growth = values.amax(-1).clamp(min=0), 1.0
        if self.basis is not None:
            # The error is that of the sum before it was projected, times |Psi|^2 at most. Sums of rows and columns bound the norms.
            psi = self.basis.matrix().double().abs()
            growth = psi.sum(0).amax() * psi.sum(1).amax()
            largest = self.total.abs().sum(-1).amax(-1) * growth
        tolerance = number.eps * (size + math.sqrt(self.rows)) * largest
        return tolerance + number.tiny * size * max(self.rows, 1) * growth

    def _refuse(self, values: Tensor) -> None:
        """Raise what is wrong with these eigenvalues."""
        undefined = values.isnan().any(-1)
        if undefined.any():
            raise torch.linalg.LinAlgError(
                f"{self.name}: the eigenvalues of block {int(undefined.nonzero()[0])} of the factor did not converge; use float64 "
                "parameters, or fit on data of another scale."
            )
        tolerance = self._tolerance(values)
        block = int((~(values.amin(-1) >= -tolerance)).nonzero()[0])
        raise ArithmeticError(
            f"{self.name}: block {block} of the factor has the eigenvalue {values[block].min().item():.6g}, "
            f"negative beyond rounding (tolerance {tolerance[block].item():.3g}); a sum of outer products "
            "cannot. If a rule of your own filled it, check that only positive multiples of outer products are "
            "added."
        )


class UnkeptMoment(SecondMoment):
    """A sum of which nothing is kept, for passes that want what rules do beside adding; it takes no memory."""

    def __init__(self, groups: int, size: int, like: Tensor, name: str, basis: SpatialBasis | None = None) -> None:
        super().__init__(0, 0, like, name, basis)
        self.total = self.total.new_zeros(()).expand(groups, size, size)

    def _ignore(self, *_: Any, **__: Any) -> None: ...

    add = add_to = add_weighted = add_counts = add_diagonal = add_windows = add_patches = count = _ignore

    def clone(self, name: str) -> UnkeptMoment:
        return self


def _blocks(moments: Sequence[SecondMoment]) -> list[Tensor]:
    """:meth:`SecondMoment.projected` of each, once all sums are found to be finite, for which the device is waited for once."""
    finite = [moment.total.sum().isfinite() for moment in moments]  # without a copy, as isfinite makes
    for moment, fine in zip(moments, _each(finite), strict=True):
        if not fine:
            raise FloatingPointError(
                f"{moment.name}: the factor has entries that are not finite; the activations or gradients of this "
                "layer overflowed. Check the inputs and the parameters for inf and nan, or use float64."
            )
    return [moment.projected() for moment in moments]


def _checked(moments: Sequence[SecondMoment], found: Sequence[Tensor]) -> list[Tensor]:
    """Eigenvalues without what rounding took below zero, or makes of zeros that are known, once none is nan or further below, for which the
    device is waited for once."""
    with torch.no_grad():
        tolerances = [m._tolerance(v) for m, v in zip(moments, found, strict=True)]
        fine = [(v.amin(-1) >= -tolerance).all() for v, tolerance in zip(found, tolerances, strict=True)]
        for moment, values, is_fine in zip(moments, found, _each(fine), strict=True):
            if not is_fine:
                moment._refuse(values)
    return [
        _within_rank(values.clamp(min=0), moment.rows, tolerance)
        for moment, values, tolerance in zip(moments, found, tolerances, strict=True)
    ]


def _of_few_directions(vectors: Tensor, share: float = 0.5) -> bool:
    """Whether that share of the eigenvalues of the normalised vectors' products, or one, is next to nothing; without those of zeros."""
    norms = vectors.double().norm(dim=1, keepdim=True)
    fine = ((norms > 0) & norms.isfinite())[:, 0]  # what is not finite whoever reads the sum refuses
    vectors = (vectors.double() / norms)[fine]
    if len(vectors) < 2:
        return False
    values = torch.linalg.eigvalsh((vectors @ vectors.T).cpu())
    return bool(values[max(int(share * len(values)) - 1, 0)] < ALIKE * values[-1])


def _within_rank(values: Tensor, rows: int, tolerance: Tensor) -> Tensor:
    """Ascending eigenvalues ``(G, d)`` of sums of so many outer products: zeros beyond that rank, where rounding can make them."""
    beyond = values.shape[1] - rows
    if beyond <= 0:
        return values
    first = values[:, :beyond]
    return torch.cat([first.masked_fill(first <= tolerance[:, None], 0.0), values[:, beyond:]], 1)


def _at_once(moments: Mapping[int, SecondMoment]) -> list[list[int]]:
    """Which of the moments are decomposed together. On the CPU one projection after the other: they are copies, in float64."""
    apart = [number for number, m in moments.items() if m.total.is_cpu and m.basis is not None]
    return [[number for number in moments if number not in apart], *([number] for number in apart)]


def _projected_rows(moment: SecondMoment) -> int:
    """Rows of a block of :meth:`SecondMoment.projected`."""
    rows = moment.total.shape[-1]
    if moment.basis is None:
        return rows
    anchors, positions = moment.basis.matrix().shape
    return rows // positions * anchors


def _of_rank(
    blocks: Sequence[tuple[int, int]], owner: Sequence[int], sizes: Sequence[tuple[int, int]], rank: int
) -> list[int]:
    """Rows of a rank's blocks, in their order."""
    return [sizes[number][1] for (number, _), its_owner in zip(blocks, owner, strict=True) if its_owner == rank]


def _each(flags: Sequence[Tensor]) -> list[bool]:
    """What they hold, in one wait for a device."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []

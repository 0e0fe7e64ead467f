"""Streaming sums of outer products, and their eigenvalues."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.distributed import Ranks, owners
from ella_cuda.laplace.eigenvalues import eigenbases_of_all, eigenvalues_of_all
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
ALONE = 1 << 21  # numbers of sums from which they have memory of their own
ALIGNED = 32  # numbers at a multiple of which other sums begin


class Use(NamedTuple):
    """Rows that a batch added to a sum.

    Attributes:
        products: of two numbers. doubled: whether these were taken in float64.
        free: whether the sum's state decides on that. several: whether there were several rows.
    """

    products: int
    doubled: bool
    free: bool
    several: bool


@dataclasses.dataclass
class Watch:
    """What a batch does to a sum.

    Attributes:
        samples: whether ``likeness`` is wanted.
        likeness: of the rows that a sum without rows decides by, see :func:`likeness`; none where it does not decide.
    """

    samples: bool = False
    uses: list[Use] = dataclasses.field(default_factory=list)
    likeness: tuple[Tensor, ...] = ()

    def add(self, use: Use, rows: Tensor) -> None:
        """Note a use, and what it may be decided by."""
        self.uses.append(use)
        if (
            self.samples
            and not self.likeness
            and use.free
            and use.several
            and sum(u.products for u in self.uses) > SMALL
        ):
            self.likeness = likeness(rows)


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
        total: zeros ``(G, d, d)`` in the place of new ones.
    """

    sums: Any = ops  # by whose functions rows are added

    def __init__(
        self,
        groups: int,
        size: int,
        like: Tensor,
        name: str,
        basis: SpatialBasis | None = None,
        total: Tensor | None = None,
    ) -> None:
        new = partial(torch.zeros, groups, size, size, dtype=torch.float64, device=like.device)
        self.total = new() if total is None else total
        self.dtype = like.dtype  # of the rows, or of their products
        self.rows = 0
        self.name = name
        self.basis = basis
        self.products = 0  # that were taken
        self.are_alike: bool | None = None  # rows, but for a few directions
        self.watch: Watch | None = None  # of a batch
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
        self.total += values.to(self.total.dtype)[:, None, None]
        self.count(rows)

    def add_sum(self, total: Tensor, rows: int) -> None:
        """Add a sum ``(d, d)`` of the outer products of so many rows to every block."""
        self.total += total
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
        small, free = self.products + products <= SMALL, rows.dtype != torch.float64 and not narrow
        self.products += products
        doubled = rows.dtype != torch.float64 and (narrow or small or self._alike(rows))
        if self.watch is not None:
            self.watch.add(Use(products, doubled, free, rows.shape[0] > 1), rows)
        if not doubled:
            yield rows
        else:
            each = max(rows.numel() // max(rows.shape[0], 1), 1)
            yield from (part.double() for part in rows.split(max(DOUBLED // each, 1)))

    def _alike(self, rows: Tensor) -> bool:
        """Whether rows differ in few directions, by the first that are several."""
        if self.are_alike is None and rows.shape[0] > 1:
            (self.are_alike,) = are_alike([likeness(rows)])
        return bool(self.are_alike)

    def choices(self, uses: Sequence[Use], likely: bool | None) -> tuple[tuple[bool, ...], bool | None, bool]:
        """The ``doubled`` of uses that are to come, ``are_alike`` after them, and whether data decide on these, of which ``likely`` is then
        taken for the decision."""
        products, alike, asked, found = self.products, self.are_alike, False, []
        for use in uses:
            products += use.products
            if use.free and products > SMALL and use.several and alike is None:
                alike, asked = likely, True
            found.append((products <= SMALL or bool(alike)) if use.free else use.doubled)
        return tuple(found), alike, asked

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

        The decomposition is in float64 as the sum is: an eigensolver's error is eps times the *largest* eigenvalue, and the evidence compares
        products of small ones with the prior precision. Inputs of very different scales (a nearly dead channel beside a live one) have
        small eigenvalues that a float32 solver replaces by noise of either sign.

        A sum of R outer products has rank R at most: of the ``d - R`` smallest eigenvalues, those up to
        :math:`\\epsilon (d + \\sqrt R) \\lambda_{max}` are zero, :math:`\\epsilon` the products' rounding.

        Raises:
            FloatingPointError: the sum is not finite.
            ArithmeticError: an eigenvalue is negative beyond rounding; the sum is then no sum of outer products.
            torch.linalg.LinAlgError: a block's eigenvalues did not converge.
        """
        if self._learns():
            self._require_finite()
            return _checked([self], torch.linalg.eigvalsh(self.projected()).flatten())[0]
        SecondMoment.decompose_all([self])
        return self._eigenvalues

    @staticmethod
    def decompose_all(moments: Iterable[SecondMoment]) -> None:
        """Compute what :meth:`eigenvalues` of each keeps, of many at once: see :func:`ella_cuda.laplace.eigenvalues.eigenvalues_of_all`.
        Raises what :meth:`eigenvalues` raises; other moments may have theirs."""
        lacking = [m for m in moments if m._eigenvalues is None or m._matrix() is not m._decomposed_on]
        for together in _at_once(lacking):
            _keep_all(together, eigenvalues_of_all([m.projected() for m in together], [m.rank for m in together]))

    @staticmethod
    def bases_of_all(moments: Iterable[SecondMoment]) -> dict[SecondMoment, tuple[Tensor, Tensor]]:
        """Eigenvalues of each, as :meth:`eigenvalues`, which keeps them, and the eigenvectors ``(G, a, a)``, columns, of the rows' dtype.
        Raises what :meth:`eigenvalues` raises."""
        found: dict[SecondMoment, tuple[Tensor, Tensor]] = {}
        for together in _at_once(moments):
            values, vectors = eigenbases_of_all([m.projected() for m in together], [m.rank for m in together])
            _keep_all(together, values)
            found |= {m: (m._eigenvalues, own.to(m.dtype)) for m, own in zip(together, vectors, strict=True)}
        return found

    @staticmethod
    def bases_together(moments: Iterable[SecondMoment], ranks: Ranks) -> dict[SecondMoment, tuple[Tensor, Tensor]]:
        """As :meth:`bases_of_all`, of sums that all ranks have alike: each sum by one rank, whose bits all get. Raises what
        :meth:`bases_of_all` raises, on all ranks."""
        moments = list(moments)
        sizes = [(moment.total.shape[0], _projected_rows(moment)) for moment in moments]
        owner = owners([float(groups) * rows**3 for groups, rows in sizes], ranks.size)
        mine = [moment for moment, rank in zip(moments, owner, strict=True) if rank == ranks.rank]
        found = ranks.together(lambda: SecondMoment.bases_of_all(mine))
        for moment, (groups, rows) in zip(moments, sizes, strict=True):
            if moment not in found:
                values = moment.total.new_zeros(groups, rows)
                found[moment] = values, values.new_zeros(groups, rows, rows, dtype=moment.dtype)
            for tensor in found[moment]:
                ranks.sum_(tensor)
        return found

    @staticmethod
    def decompose_together(moments: Sequence[SecondMoment], ranks: Ranks) -> None:
        """As :meth:`decompose_all`, of sums that all ranks have alike: each block by one rank, whose eigenvalues all get. Blocks of one row,
        of which a moment may have millions, are their eigenvalues, and nobody's. Raises what :meth:`eigenvalues` raises, on all ranks."""
        small, nothing = [m for m in moments if _projected_rows(m) == 1], moments[0].total.new_empty(0)
        moments = [m for m in moments if m not in small]
        blocks = [(moment, block) for moment in moments for block in range(moment.total.shape[0])]
        sizes = [_projected_rows(moment) for moment, _ in blocks]
        owner = owners([float(size) ** 3 for size in sizes], ranks.size)
        mine: dict[SecondMoment, list[int]] = {}
        for (moment, block), rank in zip(blocks, owner, strict=True):
            if rank == ranks.rank:
                mine.setdefault(moment, []).append(block)

        def decompose() -> Tensor:
            SecondMoment.decompose_all(small)
            found: dict[SecondMoment, Tensor] = {}
            for some in _at_once(mine):
                wholes = [(mine[moment], moment.projected()) for moment in some]
                own = [whole if len(its) == len(whole) else whole[its] for its, whole in wholes]
                values = eigenvalues_of_all(own, [moment.rank for moment in some])
                found |= zip(some, values.split([part.shape[0] * part.shape[1] for part in own]), strict=True)
            return torch.cat([found[moment] for moment in mine]) if mine else nothing

        of_rank = [[s for s, o in zip(sizes, owner, strict=True) if o == rank] for rank in range(ranks.size)]
        found = ranks.gather_uneven(ranks.together(decompose), [sum(own) for own in of_rank])
        taken = [iter(part.split(own)) for part, own in zip(found, of_rank, strict=True)]
        if moments:  # whose blocks are in their order
            _keep_all(moments, torch.cat([next(taken[rank]) for rank in owner]))

    def _learns(self) -> bool:
        """Whether the eigenvalues are wanted as a function of the basis."""
        return self.basis is not None and torch.is_grad_enabled() and self.basis.learns()

    def _matrix(self) -> Tensor | None:
        return None if self.basis is None else self.basis.matrix()

    def _rounding(self) -> tuple[float, float]:
        """How far below zero rounding may have taken eigenvalues: relative to a block's largest, and in absolute terms."""
        # R rounded terms carry an error of about sqrt(R) eps relative to the largest eigenvalue, d eps at the least; eps is that of the
        # products, whose dtype is the rows'. Below the smallest normal number, where the moments of a layer that was switched off end,
        # rounding is absolute: a product can lose up to that number, in each of R terms and d entries.
        number, size = torch.finfo(self.dtype), self.total.shape[-1]
        return number.eps * (size + math.sqrt(self.rows)), number.tiny * size * max(self.rows, 1)

    def _rounding_on_basis(self) -> Tensor:
        """How far below zero rounding may have taken eigenvalues of the sum on its basis, ``(G,)``."""
        # The error is that of the sum before it was projected, times |Psi|^2 at most. Sums of rows and columns bound the norms.
        psi, (relative, absolute) = self.basis.matrix().double().abs(), self._rounding()
        return (psi.sum(0).amax() * psi.sum(1).amax()) * (relative * self.total.abs().sum(-1).amax(-1) + absolute)

    def _require_finite(self) -> None:
        if not bool(self.total.isfinite().all()):
            raise FloatingPointError(
                f"{self.name}: the factor has entries that are not finite; the activations or gradients of this layer overflowed. Check "
                "the inputs and the parameters for inf and nan, or use float64."
            )

    def _refuse(self, values: Tensor, tolerance: Tensor) -> None:
        """Raise what is wrong with eigenvalues ``(G, d)`` of which some are nan or below the tolerance ``(G,)``."""
        self._require_finite()
        undefined = values.isnan().any(-1)
        if undefined.any():
            raise torch.linalg.LinAlgError(
                f"{self.name}: the eigenvalues of block {int(undefined.nonzero()[0])} of the factor did not converge; use float64 "
                "parameters, or fit on data of another scale."
            )
        block = int((~(values.amin(-1) >= -tolerance)).nonzero()[0])
        raise ArithmeticError(
            f"{self.name}: block {block} of the factor has the eigenvalue {values[block].min().item():.6g}, negative beyond rounding "
            f"(tolerance {tolerance[block].item():.3g}); a sum of outer products cannot. If a rule of your own filled it, check that only "
            "positive multiples of outer products are added."
        )


def zeros_together(shapes: Iterable[tuple[int, int]], device: torch.device) -> dict[tuple[int, int], list[Tensor]]:
    """Zeros ``(G, d, d)``, float64, for each small sum of these ``(G, d)``, by the shape: parts of one memory, which few operators make."""
    counts = Counter(shape for shape in shapes if shape[0] * shape[1] ** 2 <= ALONE)
    places, end = {}, 0
    for groups, size in counts:
        places[groups, size] = end, (step := -(groups * size**2) % ALIGNED + groups * size**2)
        end += counts[groups, size] * step
    memory = torch.zeros(end, dtype=torch.float64, device=device)
    found = {}
    for (groups, size), (begin, step) in places.items():
        shape, strides = (counts[groups, size], groups, size, size), (step, size**2, size, 1)
        found[groups, size] = [*memory.as_strided(shape, strides, begin).unbind()]
    return found


class UnkeptMoment(SecondMoment):
    """A sum of which nothing is kept, for passes that want what rules do beside adding; it takes no memory."""

    def __init__(self, groups: int, size: int, like: Tensor, name: str, basis: SpatialBasis | None = None) -> None:
        super().__init__(0, 0, like, name, basis)
        self.total = self.total.new_zeros(()).expand(groups, size, size)

    def _ignore(self, *_: Any, **__: Any) -> None: ...

    add = add_to = add_weighted = add_counts = add_diagonal = add_windows = add_patches = count = _ignore

    def clone(self, name: str) -> UnkeptMoment:
        return self


def _keep_all(moments: Sequence[SecondMoment], values: Tensor) -> None:
    """Have the moments keep their eigenvalues, given one block's after the other."""
    for moment, own in zip(moments, _checked(moments, values), strict=True):
        moment._eigenvalues, moment._decomposed_on = own, moment._matrix()


def _checked(moments: Sequence[SecondMoment], values: Tensor) -> list[Tensor]:
    """Each moment's eigenvalues ``(G, d)``, of those of one block after the other, without what rounding took below zero or makes of
    zeros beyond the rank, once none is nan or further below, for which the device is waited for once."""
    shapes = [(m.total.shape[0], _projected_rows(m)) for m in moments]
    alone = all(groups == 1 for groups, _ in shapes)
    with torch.no_grad():
        table = [(g, d, max(d - m.rows, 0), *m._rounding()) for (g, d), m in zip(shapes, moments, strict=True)]
        table = torch.tensor(
            [*zip(*table, strict=True)], dtype=torch.float64, device=values.device
        )  # one copy from the host
        if not alone:
            table = table.repeat_interleave(table[0].long(), 1, output_size=sum(groups for groups, _ in shapes))
        _, lengths, beyond, relative, absolute = table.unbind()
        lengths = lengths.long()
        ends = lengths.cumsum(0)
        starts = ends - lengths
        smallest, largest = values[torch.stack([starts, ends - 1])].unbind()
        tolerances = torch.addcmul(absolute, relative, largest.clamp(min=0))
        by_moment = tolerances.split([groups for groups, _ in shapes])
        for moment, own in zip(moments, by_moment, strict=True):
            if moment.basis is not None:
                own.copy_(moment._rounding_on_basis())
        fine = bool((smallest >= -tolerances).all())
    numbers = [groups * rows for groups, rows in shapes]
    if not fine:
        for moment, own, tolerance, shape in zip(moments, values.split(numbers), by_moment, shapes, strict=True):
            if not bool((own.view(shape).amin(-1) >= -tolerance).all()):
                moment._refuse(own.view(shape), tolerance)
    values = values.clamp(min=0)
    if any(rows > moment.rows for (_, rows), moment in zip(shapes, moments, strict=True)):
        bounds = torch.stack([starts + beyond, tolerances])
        first, least = bounds.repeat_interleave(lengths, 1, output_size=len(values))
        zero = (torch.arange(len(values), device=values.device) < first) & (values <= least)
        values = values.masked_fill(zero, 0.0)
    if alone:
        return list(values[None].split(numbers, 1))
    return [own.view(shape) for own, shape in zip(values.split(numbers), shapes, strict=True)]


def likeness(rows: Tensor) -> tuple[Tensor, ...]:
    """What decides whether rows ``(R, ...)``, several, differ in few directions: products of normalised vectors among them."""
    sample = rows[:: max(rows.shape[0] // SAMPLE, 1)][:SAMPLE].flatten(1)
    found = _of_normalised(sample[:, :: max(sample.shape[1] // NUMBERS, 1)])
    if rows.dim() != 3 or min(rows.shape[0], rows[0].numel()) < 4 * SAMPLE:
        return (found,)
    beside = rows[:: rows.shape[0] // (4 * SAMPLE)][: 4 * SAMPLE].flatten(1)
    return found, _of_normalised(beside.narrow(1, beside.shape[1] // 2 - SAMPLE, 2 * SAMPLE).T)


def are_alike(found: Sequence[tuple[Tensor, ...]]) -> list[bool]:
    """Whether rows of this likeness differ in few directions, sum by sum. Waits for the device once."""
    matrices = [matrix for of_sum in found for matrix in of_sum]
    sizes = [len(matrix) for matrix in matrices]
    flat = torch.cat([matrix.flatten() for matrix in matrices]).to("cpu").split([size**2 for size in sizes])
    by_size: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        by_size.setdefault(size, []).append(number)
    values = [torch.linalg.eigvalsh(torch.stack([flat[n].view(d, d) for n in its])) for d, its in by_size.items()]
    numbers = iter(torch.cat([of_size.flatten() for of_size in values]).tolist())
    spectra = {n: [next(numbers) for _ in range(d)] for d, its in by_size.items() for n in its}
    # Of rows spread over all, half of the eigenvalues; of numbers side by side, one.
    shares = [share for of_sum in found for share, _ in zip((0.5, 0.0), of_sum, strict=False)]
    few = iter([_are_of_few_directions(spectra[n], share) for n, share in enumerate(shares)])
    return [any([next(few) for _ in of_sum]) for of_sum in found]


def _of_normalised(vectors: Tensor) -> Tensor:
    """Products of the normalised vectors, float64; -1 of one with itself that has no direction."""
    vectors = vectors.double()
    norms = vectors.norm(dim=1, keepdim=True)
    fine = (norms > 0) & norms.isfinite()  # what is not finite whoever reads the sum refuses
    vectors = (vectors / norms).masked_fill(~fine, 0.0)
    return (vectors @ vectors.T).diagonal_scatter(2.0 * fine[:, 0].double() - 1.0)


def _are_of_few_directions(values: Sequence[float], share: float) -> bool:
    """Whether that share of the eigenvalues, ascending, or one is next to nothing; without those of vectors that have no direction."""
    values = [value for value in values if value > -0.5]
    return len(values) > 1 and values[max(int(share * len(values)) - 1, 0)] < ALIKE * values[-1]


def _at_once(moments: Iterable[SecondMoment]) -> list[list[SecondMoment]]:
    """The moments of one device, which are decomposed together; on the CPU one projection after the other, for they are copies."""
    together: dict[object, list[SecondMoment]] = {}
    for m in moments:
        together.setdefault(m if m.total.is_cpu and m.basis is not None else m.total.device, []).append(m)
    return list(together.values())


def _projected_rows(moment: SecondMoment) -> int:
    """Rows of a block of :meth:`SecondMoment.projected`."""
    rows = moment.total.shape[-1]
    if moment.basis is None:
        return rows
    anchors, positions = moment.basis.matrix().shape
    return rows // positions * anchors

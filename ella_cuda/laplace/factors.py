"""Curvature of parameter tensors as blocks of Kronecker products, and Jacobians in these blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.digest import values_digest
from ella_cuda.laplace.rows import OneHot, Rows
from ella_cuda.nn import SpatialBasis

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule
    from ella_cuda.laplace.second_moment import SecondMoment

CHECKSUM = "checksum"  # of a state's other entries
# Bytes of a Jacobian that are written out at a time: on the CPU, there for squares, and elsewhere.
ON_CPU, SQUARED_ON_CPU, ELSEWHERE = 32 << 20, 2 << 20, 256 << 20


class FactorShape(NamedTuple):
    """Sizes of one parameter tensor's block-Kronecker factor; the tensor has ``groups * inputs * outputs`` elements.

    ``output_groups`` is ``groups``, or 1 where all blocks share one output-side factor. ``constant_input`` says that the input side is the
    number one, as for a bias. A side whose numbers are values at the anchors of a basis names it; its rows are then collected at the basis'
    positions. ``layout`` is the order in which the tensor's elements have block g, input a and output b, the last fastest: "gba" as a linear
    layer's or a convolution's weight, "bga" or "gab". ``units`` says what an output unit of the layer is, see :attr:`unit_axes`;
    it has so many consecutive outputs of a block, ``unit_outputs``.
    """

    groups: int
    inputs: int
    outputs: int
    output_groups: int
    constant_input: bool = False
    input_basis: SpatialBasis | None = None
    output_basis: SpatialBasis | None = None
    layout: str = "gba"
    units: str | None = None
    unit_outputs: int = 1

    @classmethod
    def bias(cls, size: int) -> FactorShape:
        """The shape of a parameter that is added to the output: no input side, one dense block."""
        return cls(1, 1, size, 1, True)

    @classmethod
    def of_convolution(cls, m: nn.Module) -> FactorShape:
        """The shape of a convolution's weight: one block per group."""
        a = m.in_channels // m.groups * math.prod(m.kernel_size)
        return cls(m.groups, a, m.out_channels // m.groups, m.groups)

    def is_transpose_of(self, other: FactorShape) -> bool:
        """Whether a matrix with this factor could be the transpose of one with the other, the input side being one block."""
        if self.constant_input or other.constant_input or (self.input_basis or self.output_basis) is not None:
            return False
        sizes = [(s.groups * s.inputs, s.outputs) for s in (self, other) if s.output_groups == 1]
        # Of a square, the sizes do not tell; the tensor's first axis is the one's inputs and the other's outputs.
        apart = (self.layout == "gab") != (other.layout == "gab") or len({*sizes}) == 2
        return apart and len(sizes) == 2 and sizes[0] == sizes[1][::-1]

    @property
    def numel(self) -> int:
        """Elements of the parameter tensor."""
        return self.groups * self.inputs * self.outputs

    def to_blocks(self, tensor: Tensor, axes: int = 0) -> Tensor:
        """The parameter tensor, or what belongs to its elements, ``(..., *parameter.shape)`` with so many axes in front, as
        ``(..., G, inputs, outputs)``; a view where torch allows for one."""
        sizes = {"g": self.groups, "a": self.inputs, "b": self.outputs}
        split = tensor.reshape(*tensor.shape[:axes], *(sizes[axis] for axis in self.layout))
        return split.permute(*range(axes), *(axes + self.layout.index(axis) for axis in "gab"))

    def from_blocks(self, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`to_blocks`: ``(..., G, inputs, outputs) -> (..., *shape)``, shape that of the parameter tensor."""
        axes = blocks.dim() - 3
        split = blocks.permute(*range(axes), *(axes + "gab".index(axis) for axis in self.layout))
        return split.reshape((*blocks.shape[:axes], *shape))

    @property
    def unit_axes(self) -> str:
        """The axes of an output unit's number: "b", an output in all blocks, "gb", an output of a block, or "g", a block; "" of a tensor
        that is one unit, as a bias is. ``units`` where it is told; else blocks with output sides of their own have outputs of their own."""
        return "" if self.constant_input else self.units or ("b" if self.output_groups == 1 else "gb")

    @property
    def unit_count(self) -> int:
        """Output units."""
        sizes = {"g": self.groups, "b": self.outputs // self.unit_outputs}
        return math.prod(sizes[axis] for axis in self.unit_axes)

    def over_units(self, values: Tensor) -> Tensor:
        """One value for each unit ``(units,)`` as ``(G or 1, 1, b or 1)``, which goes with blocks."""
        axes = self.unit_axes
        if "b" in axes and self.unit_outputs > 1:
            values = values.repeat_interleave(self.unit_outputs)
        return values.reshape(self.groups if "g" in axes else 1, 1, self.outputs if "b" in axes else 1)

    def of_elements(self, values: Tensor) -> Tensor:
        """The value of each element's unit, from ``(units,)``: ``(numel,)``."""
        return self.from_blocks(self.over_units(values).expand(self.groups, self.inputs, self.outputs), (self.numel,))

    def unit_sums(self, blocks: Tensor) -> Tensor:
        """The sums ``(units,)`` over the elements of each unit of ``(G, a, b)``."""
        blocks = blocks.unflatten(2, (-1, self.unit_outputs)).sum(3)
        return blocks.sum([place for place, axis in enumerate("gab") if axis not in self.unit_axes]).flatten()

    @property
    def row_inputs(self) -> int:
        """Length of the input side's rows, per block."""
        return _at_positions(self.inputs, self.input_basis)

    @property
    def row_outputs(self) -> int:
        """Length of the output side's rows, per block."""
        return _at_positions(self.outputs, self.output_basis)


def _at_positions(size: int, basis: SpatialBasis | None) -> int:
    return size if basis is None else size // basis.num_anchors * basis.num_points


class KroneckerFactor:
    r"""Curvature of one parameter tensor: ``G`` blocks, block g being :math:`A_g \otimes B_g`.

    A averages over the data, B sums over it, so that a tensor's Hessian is the product. Raw sums are kept in float64 and divided when read,
    so more data can be added at any time and nothing depends on the batch size beyond what single products of the parameters' dtype lose.

    Attributes:
        input_moment: raw sum of the input side; None for a bias, whose input is the constant one.
        output_moment: raw sum of the output side; may be one object with another tensor's.
        n_data: data points in the sums.

    Source: Martens and Grosse, ICML 2015 (KFAC); the exact blocks of factored layers: van der Ouderaa et al., NeurIPS
    2023, appendix.
    """

    def __init__(self, shape: FactorShape, input_moment: SecondMoment | None, output_moment: SecondMoment) -> None:
        self.shape = shape
        self.input_moment = input_moment
        self.output_moment = output_moment
        self.n_data = 0

    @property
    def inputs(self) -> Tensor:
        """A, the input side, ``(G, a, a)``, float64: mean over the data of the sum over shared positions; ones for a bias."""
        if self.input_moment is None:
            return self.output_moment.total.new_ones(1, 1, 1)
        return self.input_moment.projected() / self.n_data

    @property
    def outputs(self) -> Tensor:
        """B, the output side, ``(G, b, b)`` or ``(1, b, b)``, float64: sum over the data, mean over shared positions."""
        return self.output_moment.projected()

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of both sides, ``(G, a)`` and ``(G or 1, b)``, float64, ascending, not negative.

        Raises:
            FloatingPointError: a factor is not finite.
            ArithmeticError: an eigenvalue is negative beyond rounding.
        """
        outputs = self.output_moment.eigenvalues()
        if self.input_moment is None:
            return outputs.new_ones(1, 1), outputs
        return self.input_moment.eigenvalues() / self.n_data, outputs

    def logdet(self, precision: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """``log|scale * (A x B) + precision * I|`` over all blocks, 0-dim float64, differentiable in both arguments, 0-dim too."""
        inputs, outputs = self.eigenvalues()
        return ops.kron_logdet(inputs, outputs * scale, precision.double())

    def to_dense(self) -> Tensor:
        """All blocks as matrices, ``(G, a*b, a*b)``; index ``i * b + j`` is input i, output j."""
        inputs, outputs = self.inputs, self.outputs
        outputs = outputs.expand(inputs.shape[0], -1, -1)
        return torch.stack([torch.kron(a, b) for a, b in zip(inputs, outputs, strict=True)])


# a weight that one layer uses as another uses its transpose: one factor of both ---------------------------------------


def by_parameter(rules: Sequence[Rule]) -> dict[str, KroneckerFactor]:
    """The factors of these rules by their parameters' names, which are those of the first layer that has the parameter; merged where two
    layers have one for each other's transpose."""
    found: dict[int, tuple[str, KroneckerFactor]] = {}
    taken: set[KroneckerFactor] = set()  # layers that use the weight in one way have one factor
    for rule in rules:
        parameters = rule.parameters()
        for name, factor in rule.factors.items():
            key = id(parameters[name])
            first, before = found.setdefault(key, (rule.full_name(name), factor))
            if before is not factor and factor not in taken:
                found[key] = first, _of_both(first, before, factor)
            taken.add(factor)
    return dict(found.values())


def merged_shapes(rules: Sequence[Rule]) -> dict[str, FactorShape]:
    """The shapes of the factors that :func:`by_parameter` makes of two, which take memory beside these, by the parameters' names."""
    first: dict[int, tuple[str, FactorShape]] = {}
    found: dict[str, FactorShape] = {}
    for rule in rules:
        parameters, shapes = rule.parameters(), rule.shapes()
        for parameter in rule.trainable:
            shape = shapes[parameter]
            name, before = first.setdefault(id(parameters[parameter]), (rule.full_name(parameter), shape))
            if shape != before:
                found[name] = _whole_shape(before)
    return found


def _whole_shape(shape: FactorShape) -> FactorShape:
    """The shape of the factor as one block."""
    layout = "gab" if shape.layout == "gab" else "gba"
    return FactorShape(1, shape.groups * shape.inputs, shape.outputs, 1, layout=layout)


def _of_both(name: str, one: KroneckerFactor, other: KroneckerFactor) -> KroneckerFactor:
    r"""A Kronecker product in the place of :math:`A_1 \otimes B_1 + B_2 \otimes A_2`, where the second layer's input side is the first's
    output side: the one whose partial traces are those of the sum,

    .. math::
        (\mathrm{tr} B_1\, A_1 + \mathrm{tr} A_2\, B_2) \otimes (\mathrm{tr} A_1\, B_1 + \mathrm{tr} B_2\, A_2)
        / (\mathrm{tr} A_1 \mathrm{tr} B_1 + \mathrm{tr} A_2 \mathrm{tr} B_2).

    It does not depend on how a layer's scale is shared out between its inputs and its gradients, and is the layer's own where the other
    one has none.
    """
    mine, its = (one.input_moment, one.output_moment), (other.input_moment, other.output_moment)
    (a, b), (c, d) = map(_whole, mine), map(_whole, its)  # raw sums: A times the number of data
    tr_a, tr_b, tr_c, tr_d = (t.trace() for t in (a, b, c, d))
    scale = (tr_a * tr_b + tr_c * tr_d).clamp(min=a.new_tensor(2.0**-1000))
    totals, moments = (tr_b * a + tr_c * d, (tr_a * b + tr_d * c) / scale), []
    for side, total, like, joined in zip(("input", "output"), totals, mine, its[::-1], strict=True):
        moment = like.clone(f"{name} ({side} side)")
        moment.total, moment.rows = total[None], like.rows + joined.rows
        moments.append(moment)
    factor = KroneckerFactor(_whole_shape(one.shape), *moments)
    factor.n_data = one.n_data
    return factor


def _whole(moment: SecondMoment) -> Tensor:
    """The sum as one block: of several blocks, which are of size 1, their diagonal."""
    return moment.total.flatten().diag() if moment.total.shape[0] > 1 else moment.total[0]


# Jacobians in the layout of a factor ----------------------------------------------------------------------------------


class Jacobian(NamedTuple):
    r"""The Jacobian of K outputs of each of N data points,
    :math:`M_{kngij} = \sum_t \mathtt{inputs}_{ntgi}\, \mathtt{outputs}_{kntgj}` over T shared positions.

    Attributes:
        outputs: ``(K, N, T, G, b)``; without ``inputs`` and ``index`` M itself, ``(K, N, G, a, b)``.
        inputs: ``(N, T, G, a)``, or None.
        index: ``(N, T)``, where the inputs are one-hot, as an embedding's: the block of each position, in the place of ``inputs``; a = 1
            and ``outputs`` is ``(K, N, T, 1, b)``.
        blocks: the blocks that g counts, of all that the tensor has; None is all.
    """

    outputs: Tensor
    inputs: Tensor | None = None
    index: Tensor | None = None
    blocks: range | None = None

    @classmethod
    def of_bias(cls, rows: Tensor) -> Jacobian:
        """The Jacobian of a parameter without an input side, from ``rows`` ``(K, N, b)``."""
        return cls(rows[:, :, None, None])

    @classmethod
    def of_rows(cls, shape: FactorShape, inputs: Rows | None, outputs: Rows, columns: int) -> Jacobian:
        """The Jacobian of a parameter with a factor of this shape, from the rows of a call and of so many columns."""
        if shape.constant_input:
            return cls.of_bias(outputs.summed().dense()[:, 0, 0].unflatten(0, (columns, -1)))
        g = on_basis(outputs.dense(), shape.output_basis).unflatten(0, (columns, -1))
        if isinstance(inputs, OneHot):
            return cls(g, index=inputs.values)
        a = on_basis(inputs.dense(), shape.input_basis)
        a = a if a.shape[2] == g.shape[3] else a.expand(-1, -1, g.shape[3], -1)
        return cls(g, a, blocks=inputs.blocks)

    def dense(self, groups: int) -> Tensor:
        """M, ``(K, N, groups, a, b)``."""
        if self.index is not None:
            columns, n, _, _, b = self.outputs.shape
            whole = self.outputs.new_zeros(columns, n, groups, b)
            return whole.scatter_add(
                2, self.index[None, :, :, None].expand(columns, -1, -1, b), self.outputs[:, :, :, 0]
            )[:, :, :, None]
        return self._among_all(self._product(slice(None)), groups)

    def written_out(self, on_cpu: int) -> Iterator[tuple[slice, Tensor]]:
        """M of some data points at a time, at least one, of so many bytes on the CPU: the data points, and ``(K, n, G, a, b)`` of the blocks
        that g counts. Not with an index."""
        columns, n, *sizes = self.outputs.shape
        sizes[0] = sizes[0] if self.inputs is None else self.inputs.shape[3]  # in the place of positions
        each = columns * math.prod(sizes) * self.outputs.element_size()
        step = max((on_cpu if self.outputs.is_cpu else ELSEWHERE) // max(each, 1), 1)
        for begin in range(0, max(n, 1), step):
            some = slice(begin, begin + step)
            yield some, self._product(some)

    def _product(self, some: slice) -> Tensor:
        outputs = self.outputs[:, some]
        if self.inputs is None:
            return outputs
        columns, n, positions, groups, b = outputs.shape
        left = self.inputs[some].permute(0, 2, 3, 1).reshape(n * groups, self.inputs.shape[3], positions)
        right = outputs.permute(1, 3, 2, 0, 4).reshape(n * groups, positions, columns * b)
        return (left @ right).unflatten(0, (n, groups)).unflatten(3, (columns, b)).permute(3, 0, 1, 2, 4)

    def square_sums(self, groups: int, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """``sum_kn M^2``, ``(groups, a, b)``, float64; of what ``change`` makes of M, written out, if not None."""
        if self.index is not None:
            rows = without_repeats(self)
            sums = rows.double().square().sum(0)  # (N, T, b)
            whole = sums.new_zeros(groups, sums.shape[2]).index_add_(0, self.index.flatten(), sums.flatten(0, 1))
            return whole[:, None]
        if self.inputs is not None and self.inputs.shape[1] == 1 and change is None:
            of_inputs, of_outputs = self.inputs[:, 0].double().square(), self.outputs[:, :, 0].double().square().sum(0)
            found = torch.einsum("ngi,ngj->gij", of_inputs, of_outputs)
        else:
            parts = (m if change is None else change(m) for _, m in self.written_out(SQUARED_ON_CPU))
            found = sum(m.flatten(0, 1).double().square().sum(0) for m in parts)
        return self._among_all(found, groups)

    def _among_all(self, of_blocks: Tensor, groups: int) -> Tensor:
        """``(..., G, a, b)`` of these blocks as ``(..., groups, a, b)``, zero in the others."""
        if self.blocks is None or len(self.blocks) == groups:
            return of_blocks
        whole = of_blocks.new_zeros(*of_blocks.shape[:-3], groups, *of_blocks.shape[-2:])
        whole[..., self.blocks.start : self.blocks.stop, :, :] = of_blocks
        return whole

    def over_copies(self, copies: int) -> Jacobian:
        """The Jacobian of the mean over so many copies of each data point, one after the other, which are here as if they were data points:
        the outputs' gradients have the mean's weight already, and copies are positions."""
        if copies == 1:
            return self
        outputs = self.outputs.unflatten(1, (-1, copies))
        if self.inputs is None and self.index is None:
            return self._replace(outputs=outputs.sum(2))
        inputs, index = (
            t if t is None else t.unflatten(0, (-1, copies)).flatten(1, 2) for t in (self.inputs, self.index)
        )
        return self._replace(outputs=outputs.flatten(2, 3), inputs=inputs, index=index)

    def in_shape(self, shape: FactorShape, other: FactorShape, parameter: Tensor) -> Jacobian:
        """The same Jacobian by the blocks of another factor of the parameter."""
        if shape == other:
            return self
        tensor = shape.from_blocks(self.dense(shape.groups), parameter.shape)
        return Jacobian(other.to_blocks(tensor, 2))


def on_basis(rows: Tensor, basis: SpatialBasis | None) -> Tensor:
    """Rows at the positions of a basis as a weight at the basis' anchors sees them."""
    if basis is None:
        return rows
    psi = basis.matrix().to(rows)
    return (rows.unflatten(-1, (-1, psi.shape[1])) @ psi.T).flatten(-2)


def without_repeats(jacobian: Jacobian) -> Tensor:
    """The rows ``(K, N, T, b)`` of a Jacobian with an index, where those of a data point's positions of one block are summed at the first
    of these, and zero at the others."""
    rows, index = jacobian.outputs[:, :, :, 0], jacobian.index
    first = (index[:, :, None] == index[:, None]).to(torch.uint8).argmax(2)  # (N, T)
    return torch.zeros_like(rows).scatter_add(2, first[None, :, :, None].expand(rows.shape), rows)


def sum_of_jacobians(parts: Sequence[Jacobian], groups: int) -> Jacobian:
    """The sum of Jacobians in the same blocks: positions of several calls are positions of one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(part.inputs is None, part.index is None, part.blocks) for part in parts}) == 1:
        if first.inputs is None and first.index is None:
            return first._replace(outputs=torch.stack([part.outputs for part in parts]).sum(0))
        inputs = None if first.inputs is None else torch.cat([part.inputs for part in parts], 1)
        index = None if first.index is None else torch.cat([part.index for part in parts], 1)
        return first._replace(outputs=torch.cat([part.outputs for part in parts], 2), inputs=inputs, index=index)
    return Jacobian(torch.stack([part.dense(groups) for part in parts]).sum(0))


# saved factors ----------------------------------------------------------------------------------------------------------


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with a digest of its entries, by which :func:`require_checksum` knows it again."""
    return {**state, CHECKSUM: values_digest(state)}


def require_checksum(state: Mapping[str, Any], where: str, what: str) -> dict[str, Any]:
    """The entries without the checksum; ValueError where they are not those that :func:`with_checksum` was given, in words for ``where``
    and ``what``."""
    entries = {key: value for key, value in state.items() if key != CHECKSUM}
    if state.get(CHECKSUM) != values_digest(entries):
        raise ValueError(f"{where}: {CHECKSUM} does not fit the other entries: {what}.")
    return entries


def _with_owners(rules: Sequence[Rule]) -> dict[str, tuple[KroneckerFactor, str]]:
    """The factors that rules have, by the parameters' names in the rules' layers, that of several layers once; with the parameter whose
    output side each shares, "" if its own."""
    factors = {r.full_name(name): factor for r in rules for name, factor in r.factors.items() if name not in r.tied}
    lent = [(r.factors[o], r.full_name(o)) for r in rules if r.factors for o in r.output_owners().values()]
    owners = {id(factor.output_moment): name for factor, name in lent}
    found = {}
    for name, factor in factors.items():
        owner = owners.setdefault(id(factor.output_moment), name)
        found[name] = factor, "" if owner == name else owner
    return found


def save_factors(rules: Sequence[Rule]) -> dict[str, dict[str, Any]]:
    """Parameter name -> raw sums and row counts; ``outputs_of`` names the parameter whose output side it shares, "" if its own."""
    saved = {}
    for name, (factor, owner) in _with_owners(rules).items():
        inputs, outputs = factor.input_moment, factor.output_moment
        saved[name] = {
            "inputs": None if inputs is None else inputs.total.clone(),
            "input_rows": 0 if inputs is None else inputs.rows,
            "outputs": None if owner else outputs.total.clone(),
            "output_rows": outputs.rows,
            "outputs_of": owner,
        }
    return saved


def load_factors(rules: Sequence[Rule], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Allocate the factors of these rules with copies of the sums that :func:`save_factors` saved; ValueError where they are of others."""
    own = {name for name, entry in saved.items() if entry["outputs_of"] == ""}
    for rule in rules:
        rule.allocate()
        rule.separate_outputs(own)
    factors = _with_owners(rules)
    if wrong := sorted(factors.keys() ^ saved.keys()):
        raise ValueError(f"load_state_dict: factors are of other parameters than here: {', '.join(wrong)}.")
    for name, (factor, owner) in factors.items():
        for side, moment in (("input", factor.input_moment), ("output", None if owner else factor.output_moment)):
            if moment is not None:
                moment.total.copy_(checked_tensor(moment.name, saved[name][f"{side}s"], moment.total.shape))
                moment.count(saved[name][f"{side}_rows"])


def checked_tensor(name: str, value: Any, shape: Sequence[int]) -> Tensor:
    """A state's tensor; ValueError where it is none of that shape."""
    if not isinstance(value, Tensor) or value.shape != torch.Size(shape):
        got = tuple(value.shape) if isinstance(value, Tensor) else value
        raise ValueError(f"load_state_dict: {name}: expected a tensor {tuple(shape)}, got {got}.")
    return value

"""The Gaussian posterior of an approximation, its base and the Kronecker-factored one, in the eigenbases of the factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.distributed import Ranks
from ella_cuda.laplace.factors import ELSEWHERE, ON_CPU, FactorShape, Jacobian, KroneckerFactor, without_repeats
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import in_own_precision


class KroneckerEigenvalues(NamedTuple):
    r"""Eigenvalues :math:`\lambda_{gi} \mu_{gj}` of blocks g: :math:`\lambda` ``(G, a)`` and :math:`\mu` ``(G or 1, b)``, float64."""

    inputs: Tensor
    outputs: Tensor

    def whole(self) -> Tensor:
        """All of them, ``(..., a, b)``."""
        return self.inputs[..., :, None] * self.outputs[..., None, :]

    def at(self, blocks: slice | Tensor, inputs: slice = slice(None)) -> KroneckerEigenvalues:
        """Those of some blocks, and some inputs; of numbers of blocks ``(...)``, with these axes in the place of g."""
        outputs = self.outputs if len(self.outputs) == 1 else self.outputs[blocks]
        return KroneckerEigenvalues(self.inputs[blocks][..., inputs], outputs)

    def pair(self) -> tuple[Tensor, Tensor]:
        """Two sides whose products are the eigenvalues, as :func:`ella_cuda.ops.kron_logdet` takes them."""
        return self

    def takes_rows(self, positions: int) -> bool:
        """Whether :meth:`add_variance_` takes rows of so many shared positions, not M alone."""
        return True

    def add_variance_(
        self, variance: Tensor, inputs: Tensor | None, outputs: Tensor, prior: Tensor, scale: Tensor
    ) -> None:
        """:func:`ella_cuda.ops.kron_variance_` with these eigenvalues."""
        ops.kron_variance_(variance, inputs, outputs, self.inputs, self.outputs, prior, scale)


class CorrectedEigenvalues(NamedTuple):
    """Any numbers in the place of eigenvalues of a Kronecker product, with the methods of :class:`KroneckerEigenvalues`; ``values`` is
    ``(G, a, b)``, float64, not negative."""

    values: Tensor

    def whole(self) -> Tensor:
        return self.values

    def at(self, blocks: slice | Tensor, inputs: slice = slice(None)) -> CorrectedEigenvalues:
        return CorrectedEigenvalues(self.values[blocks][..., inputs, :])

    def pair(self) -> tuple[Tensor, Tensor]:
        return self.values.reshape(1, -1), self.values.new_ones(1, 1)

    def takes_rows(self, positions: int) -> bool:
        return positions == 1

    def add_variance_(
        self, variance: Tensor, inputs: Tensor | None, outputs: Tensor, prior: Tensor, scale: Tensor
    ) -> None:
        covariance = 1 / (scale * self.values + prior)
        if inputs is None:
            m = outputs * covariance.sqrt().to(outputs.dtype)
            zeros = covariance.new_zeros(len(covariance), sum(covariance.shape[1:]))
            sides = zeros.split(covariance.shape[1:], 1)
            ops.kron_variance_(variance, None, m, *sides, torch.ones_like(prior))
            return
        # At one position M is a product of two rows.
        weights = torch.einsum("ngi,gij->ngj", inputs[:, 0].square(), covariance.to(inputs.dtype))
        rows = outputs[:, :, 0].transpose(0, 1)  # (N, K, G, b)
        weighted = rows * weights[:, None]
        if variance.dim() == 2:
            variance += (weighted * rows).sum((2, 3), dtype=variance.dtype)
        else:
            variance += weighted.flatten(2) @ rows.flatten(2).mT


class Eigenbasis(NamedTuple):
    r"""The eigenvectors of a parameter tensor's curvature, in block g
    :math:`(U_g \otimes V_g)\, \mathrm{diag}(\Lambda_g)\, (U_g \otimes V_g)^T`.

    Attributes:
        shape: of the factor.
        parameter_shape: of the tensor.
        values: :math:`\Lambda`.
        vectors_in: U, ``(G, a, a)``, of the parameter's dtype; None where it is the number one.
        vectors_out: V, ``(G or 1, b, b)``.
    """

    shape: FactorShape
    parameter_shape: torch.Size
    values: KroneckerEigenvalues | CorrectedEigenvalues
    vectors_in: Tensor | None
    vectors_out: Tensor

    def precisions(self, prior: Tensor, scale: Tensor) -> Tensor:
        r""":math:`s \Lambda + \delta`, ``(G, a, b)``, float64."""
        return scale * self.values.whole() + prior

    def rotated(self, blocks: Tensor) -> Tensor:
        """``(..., G, a, b)`` into the basis."""
        return self.outputs_in(self.inputs_in(blocks))

    @in_own_precision
    def inputs_in(self, blocks: Tensor) -> Tensor:
        """The input side alone of ``(..., G, a, b)``."""
        return blocks if self.vectors_in is None else self.vectors_in.to(blocks.dtype).mT @ blocks

    @in_own_precision
    def outputs_in(self, blocks: Tensor) -> Tensor:
        """The output side alone of ``(..., G, a, b)``."""
        return blocks @ _whole(self.vectors_out).to(blocks.dtype)

    @in_own_precision
    def back(self, blocks: Tensor) -> Tensor:
        """``(..., G, a, b)`` out of the basis."""
        blocks = blocks if self.vectors_in is None else self.vectors_in.to(blocks.dtype) @ blocks
        return blocks @ _whole(self.vectors_out).to(blocks.dtype).mT

    def input_rows_in(self, rows: Tensor) -> Tensor:
        """The rows ``(..., G, a)`` of the input side."""
        return rows if self.vectors_in is None else _rows_in(rows, self.vectors_in)

    def output_rows_in(self, rows: Tensor) -> Tensor:
        """The rows ``(..., G, b)`` of the output side."""
        return _rows_in(rows, self.vectors_out)

    def restricted(self, blocks: range | None) -> Eigenbasis:
        """The basis of these blocks alone."""
        if blocks is None or len(blocks) == self.shape.groups:
            return self
        some = slice(blocks.start, blocks.stop)
        return self._replace(
            values=self.values.at(some),
            vectors_in=None if self.vectors_in is None else self.vectors_in[some],
            vectors_out=self.vectors_out if len(self.vectors_out) == 1 else self.vectors_out[some],
        )

    def rows_in(self, jacobian: Jacobian) -> tuple[Jacobian, Callable[[Tensor], Tensor] | None]:
        """The Jacobian with rows in the basis, of each side where there are fewer of them than M has; and what brings M, written out of these
        rows, there on the other sides, None where there are none. Not with an index."""
        inputs, outputs = jacobian.inputs, jacobian.outputs
        if inputs is None:
            return jacobian, self.rotated
        columns, _, positions, _, b = outputs.shape
        early_in, early_out = positions <= columns * b, positions <= inputs.shape[3]
        rows = jacobian._replace(
            inputs=self.input_rows_in(inputs) if early_in else inputs,
            outputs=self.output_rows_in(outputs) if early_out else outputs,
        )
        if early_in:
            return rows, None if early_out else self.outputs_in
        return rows, self.inputs_in if early_out else self.rotated

    def square_sums(self, jacobian: Jacobian) -> Tensor:
        """``sum_kn M^2`` in the basis, ``(G, a, b)`` of all blocks, float64."""
        groups = self.shape.groups
        if jacobian.index is not None:
            return jacobian._replace(outputs=self.output_rows_in(jacobian.outputs)).square_sums(groups)
        rows, rest = self.restricted(jacobian.blocks).rows_in(jacobian)
        return rows.square_sums(groups, rest)


def _whole(vectors: Tensor) -> Tensor:
    """Vectors that all blocks share without their axis, so that a product with them is one of all rows."""
    return vectors[0] if vectors.shape[0] == 1 else vectors


def _rows_in(rows: Tensor, vectors: Tensor) -> Tensor:
    vectors = _whole(vectors).to(rows.dtype)
    if vectors.dim() == 2:
        return rows @ vectors
    return torch.einsum("...gi,gij->...gj", rows, vectors)


def eigenbases(
    factors: Mapping[str, KroneckerFactor],
    parameter_shapes: Mapping[str, torch.Size],
    decompose: Callable[[Iterable[SecondMoment]], Any] = SecondMoment.bases_of_all,
) -> dict[str, Eigenbasis]:
    """The eigenbases of all factors, by ``decompose``; factors that share a side have one decomposition of it.

    Raises:
        FloatingPointError, ArithmeticError, torch.linalg.LinAlgError: see :meth:`SecondMoment.eigenvalues`.
    """
    sides = {m: None for f in factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    with torch.no_grad():
        found = decompose(sides)
    with_inputs = {name: factor for name, factor in factors.items() if factor.input_moment is not None}
    raw, counts = [found[f.input_moment][0] for f in with_inputs.values()], [f.n_data for f in with_inputs.values()]
    means = dict(zip(with_inputs, torch._foreach_div(raw, counts) if raw else (), strict=True))
    result = {}
    for name, factor in factors.items():
        values_out, vectors_out = found[factor.output_moment]
        if factor.input_moment is None:
            values_in, vectors_in = values_out.new_ones(factor.shape.groups, 1), None
        else:
            values_in, vectors_in = means[name], found[factor.input_moment][1]
        vectors_in = None if factor.shape.inputs == 1 else vectors_in
        values = KroneckerEigenvalues(values_in, values_out)
        result[name] = Eigenbasis(factor.shape, parameter_shapes[name], values, vectors_in, vectors_out)
    return result


class Spectra:
    """Eigenvalues of factors as :func:`ella_cuda.ops.kron_evidence` takes them, packed once for as long as no factor changes.

    Args:
        factors: of all parameter tensors, in their order.
    """

    def __init__(self, factors: Iterable[KroneckerFactor]) -> None:
        self._factors = list(factors)
        self._moments = list(
            {m: None for f in self._factors for m in (f.input_moment, f.output_moment) if m is not None}
        )
        self._packed: ops.KronSpectra | None = None
        self._rows: list[int] = []  # in every moment when they were packed

    @classmethod
    def of_bases(cls, bases: Iterable[Eigenbasis]) -> Spectra:
        """The eigenvalues that bases have, which are constants."""
        found = cls(())
        found._packed = ops.pack_spectra([basis.values.pair() for basis in bases])
        return found

    def decompose_together(self, ranks: Ranks) -> None:
        """Have the eigenvalues of all factors, each block's by one rank; raises as :meth:`packed`, on all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            SecondMoment.decompose_together(self._moments, ranks)

    def packed(self) -> ops.KronSpectra:
        """Constants: no gradient leads to a basis, whose state is taken to be that of the first call.

        Raises:
            FloatingPointError, ArithmeticError: see :meth:`ella_cuda.laplace.second_moment.SecondMoment.eigenvalues`.
        """
        rows = [moment.rows for moment in self._moments]
        if self._packed is None or rows != self._rows:
            with torch.inference_mode(False), torch.no_grad():  # later calls may want gradients
                SecondMoment.decompose_all(self._moments)
                self._packed, self._rows = ops.pack_spectra([f.eigenvalues() for f in self._factors]), rows
        return self._packed


def eigenbases_of(la: Any) -> dict[str, Eigenbasis]:
    """The eigenbases of all factors of a KronLaplace, by parameter name, computed once for a fit."""
    la.fitted_model.require_fit()
    if la._eigenbases is None:
        shapes = {name: la.model.get_parameter(name).shape for name in la.parameter_names}
        la._eigenbases = eigenbases(la._factors, shapes)
    return la._eigenbases


class Contraction(NamedTuple):
    """Adds to a covariance of outputs.

    Attributes:
        take: ``(name, *piece)``, with what :meth:`Posterior.pieces` yields of one parameter.
        finish: once all parameters' are there.
    """

    take: Callable[[str, slice, Jacobian], None]
    finish: Callable[[], None] = lambda: None


class Posterior(ABC):
    """The precision P of a Gaussian over parameters. Vectors of all parameters are in ``model.named_parameters()`` order, flattened one after
    the other.

    Attributes:
        shapes: of the factors that Jacobians come in, by parameter name, in order.
        n_params: how many elements have a posterior.
        dtype: of samples and of what :meth:`diag` and :meth:`to_matrix` give. device: of all.
        row_bytes: what a contraction keeps of a data point's output.
    """

    shapes: Mapping[str, FactorShape]
    n_params: int
    dtype: torch.dtype
    device: torch.device
    row_bytes: int = 0

    @abstractmethod
    def logdet(self) -> Tensor:
        """``log|P|``, 0-dim float64."""

    @abstractmethod
    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        """``P^exponent`` times vectors ``(..., P)``."""

    @abstractmethod
    def diag(self, exponent: float = 1) -> Tensor:
        """The diagonal of ``P^exponent``, ``(P,)``: with -1 the parameters' variances."""

    def pieces(self, name: str, jacobian: Jacobian, joint: bool = False) -> Iterator[tuple[slice, Jacobian]]:
        """A parameter's Jacobian as the contractions of all posteriors of the same curvature take it: data points, and what is of them. A
        piece is used before the next one is made."""
        yield slice(None), jacobian

    @abstractmethod
    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        """A contraction that adds Jacobians' parts of ``J P^-1 J^T`` to the variance.

        Args:
            variance: float64, ``(N, K, K)``, or ``(N, K)`` for the diagonal alone, or with ``joint`` ``(N K, N K)``.
        """

    def of_linear(self, features: Tensor, names: Mapping[str, str], diagonal: bool) -> Tensor:
        """The covariance ``(N, K, K)``, or variances ``(N, K)`` with ``diagonal``, float64, of a linear layer at features ``(N, D)``.

        Args:
            names: of the layer's "weight" and "bias", as far as they have a posterior, those in :attr:`shapes`.
        """
        size = self.shapes[next(iter(names.values()))].outputs
        variance = features.new_zeros(len(features), *[size] * (1 if diagonal else 2), dtype=torch.float64)
        units = torch.eye(size, dtype=features.dtype, device=features.device)[:, None, None, None]
        step = max((ON_CPU if features.is_cpu else ELSEWHERE) // max(self.row_bytes * size, 1), 1)
        for part, its in zip(variance.split(step), features.split(step), strict=True):
            contraction, columns = self.contraction(part), units.expand(-1, len(its), -1, -1, -1)
            for name, own in names.items():
                inputs = its[:, None, None] if name == "weight" else None
                self._take(contraction, own, Jacobian(columns, inputs))
            contraction.finish()
        return variance

    @abstractmethod
    def own(self) -> list[Tensor]:
        """Tensors that other posteriors of the same curvature have others of."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """Tensors that all posteriors of the same curvature have."""

    @abstractmethod
    def of(self, own: Sequence[Tensor]) -> Posterior:
        """The posterior of the same curvature with these in the place of :meth:`own`."""

    @abstractmethod
    def _coloured(self, white: Tensor) -> Tensor:
        """A square root of the covariance times standard normal numbers, ``(..., n_params)``: ``(..., P)``."""

    def square_form(self, vectors: Tensor) -> Tensor:
        """``v^T P v`` of vectors ``(..., P)``: ``(...)``, float64."""
        return (vectors.double() * self.bmm(vectors.double(), 1)).sum(-1)

    def inv_square_form(self, jacobians: Tensor) -> Tensor:
        """``J P^-1 J^T`` of ``(N, K, P)``: ``(N, K, K)``."""
        variance = jacobians.new_zeros(*jacobians.shape[:2], jacobians.shape[1], dtype=torch.float64)
        contraction = self.contraction(variance)
        parts = jacobians.split([shape.numel for shape in self.shapes.values()], -1)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            self._take(contraction, name, Jacobian(shape.to_blocks(part, 2).transpose(0, 1)))
        contraction.finish()
        return variance.to(jacobians.dtype)

    def _take(self, contraction: Contraction, name: str, jacobian: Jacobian) -> None:
        for piece in self.pieces(name, jacobian):
            contraction.take(name, *piece)

    def joint_square_form(self, jacobians: Tensor) -> Tensor:
        """``J P^-1 J^T`` of all rows of ``(N, K, P)`` or ``(N K, P)``: ``(N K, N K)``."""
        return self.inv_square_form(jacobians.reshape(1, -1, jacobians.shape[-1]))[0]

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """``P^exponent`` of the elements that have a posterior, ``(n_params, n_params)``. For small networks and tests."""
        return self.bmm(torch.eye(self.n_params, dtype=self.dtype, device=self.device), exponent)

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from ``N(0, P^-1)``, ``(n_samples, P)``."""
        where = self.device if generator is None else generator.device
        drawn = torch.empty(as_count("n_samples", n_samples), self.n_params, dtype=self.dtype, device=where)
        for one in drawn:  # torch draws other numbers for several at once
            one.normal_(generator=generator)
        return self._coloured(drawn.to(self.device))


class KronPosterior(Posterior):
    r"""The precision :math:`P = s H + \delta` of a posterior whose curvature H has the eigenvectors of Kronecker products, with a prior
    precision for each tensor.

    Nothing of the size of P is formed but by :meth:`to_matrix`.

    Args:
        bases: of the factors, by parameter name, in order.
        prior_precision: one value per tensor, float64.
        scale: s, 0-dim float64: :math:`1/(\sigma^2 T)`.
        dtype: of samples and of what :meth:`diag` and :meth:`to_matrix` give.
    """

    def __init__(self, bases: Mapping[str, Eigenbasis], prior_precision: Tensor, scale: Tensor, dtype: torch.dtype):
        self.bases, self.scale, self.dtype = bases, scale, dtype
        self.prior = dict(zip(bases, prior_precision.unbind(), strict=True))
        self._sizes = [basis.shape.numel for basis in bases.values()]
        self.n_params, self.device = sum(self._sizes), scale.device
        self.shapes = {name: basis.shape for name, basis in bases.items()}
        self._own = [prior_precision, scale]

    def own(self) -> list[Tensor]:
        return self._own

    def held(self) -> list[Tensor]:
        sides = [(*basis.values, basis.vectors_in, basis.vectors_out) for basis in self.bases.values()]
        return [side for its in sides for side in its if side is not None]

    def of(self, own: Sequence[Tensor]) -> KronPosterior:
        return KronPosterior(self.bases, *own, self.dtype)

    def logdet(self) -> Tensor:
        pairs = {name: basis.values.pair() for name, basis in self.bases.items()}
        parts = [ops.kron_logdet(one, other * self.scale, self.prior[name]) for name, (one, other) in pairs.items()]
        return torch.stack(parts).sum()

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        found = [
            basis.back(basis.rotated(part) * self._power(name, exponent)) for name, basis, part in self._parts(vectors)
        ]
        return self._joined(found).to(vectors.dtype)

    def diag(self, exponent: float = 1) -> Tensor:
        found = []
        for name, basis in self.bases.items():
            values = self._power(name, exponent)
            if basis.vectors_in is not None:
                values = basis.vectors_in.double().square() @ values
            found.append(values @ basis.vectors_out.double().square().mT)
        return self._joined(found).to(self.dtype)

    def _coloured(self, white: Tensor) -> Tensor:
        found = [basis.back(part * self._power(name, -0.5).to(self.dtype)) for name, basis, part in self._parts(white)]
        return self._joined(found)

    def pieces(self, name: str, jacobian: Jacobian, joint: bool = False) -> Iterator[tuple[slice, Jacobian]]:
        """In the eigenbasis, which all these posteriors share; with ``joint`` as it is."""
        basis, every = self.bases[name].restricted(jacobian.blocks), slice(None)
        if joint:
            yield every, jacobian
        elif jacobian.index is not None:
            rows = without_repeats(jacobian)[:, :, :, None]
            yield every, jacobian._replace(outputs=basis.output_rows_in(rows))
        else:
            rows, rest = basis.rows_in(jacobian)
            if rest is None and basis.values.takes_rows(rows.inputs.shape[1]):
                yield every, rows
                return
            for some, m in rows.written_out(ON_CPU):
                yield some, rows._replace(outputs=m if rest is None else rest(m), inputs=None)

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        def take(name: str, some: slice, rows: Jacobian) -> None:
            basis, prior = self.bases[name].restricted(rows.blocks), self.prior[name]
            if joint:
                self._add_joint(variance, rows, basis, prior)
            elif rows.index is not None:
                self._add_looked_up(variance, rows, basis, prior)
            else:
                basis.values.add_variance_(
                    variance if some == slice(None) else variance[some], rows.inputs, rows.outputs, prior, self.scale
                )

        return Contraction(take)

    def of_linear(self, features: Tensor, names: Mapping[str, str], diagonal: bool) -> Tensor:
        """Per output eigenvector v_b the variance is ``sum_a (U^T x)_a^2 / p_ab``, and the covariance ``sum_b v_b v_b^T`` times these."""
        sums: dict[int, tuple[Tensor, Tensor]] = {}  # by output eigenvectors, which a bias may share with the weight
        for name, parameter in names.items():
            basis = self.bases[parameter]
            rows = features if name == "weight" else features.new_ones(len(features), 1)
            found = basis.input_rows_in(rows[:, None])[:, 0].double().square() @ self._power(parameter, -1)[0]
            vectors, before = sums.get(id(basis.vectors_out), (basis.vectors_out[0].double(), 0))
            sums[id(basis.vectors_out)] = vectors, found + before
        if diagonal:
            return sum(found @ vectors.square().T for vectors, found in sums.values())
        size = next(iter(sums.values()))[0].shape[0]
        covariance = features.new_zeros(len(features), size, size, dtype=torch.float64)
        step = max((ON_CPU if features.is_cpu else ELSEWHERE) // (size**2 * covariance.element_size()), 1)
        for vectors, found in sums.values():
            for part, its in zip(covariance.split(step), found.split(step), strict=True):
                part += (its[:, None] * vectors) @ vectors.T
        return covariance

    def _add_looked_up(self, variance: Tensor, jacobian: Jacobian, basis: Eigenbasis, prior: Tensor) -> None:
        rows, index = jacobian.outputs[:, :, :, 0], jacobian.index  # (K, N, T, b), (N, T)
        precisions = self.scale * basis.values.at(index).whole()[:, :, 0] + prior  # (N, T, b)
        scaled = (rows.double() / precisions).transpose(0, 1).flatten(2)  # (N, K, T b)
        rows = rows.transpose(0, 1).flatten(2).double()
        variance += (scaled * rows).sum(2) if variance.dim() == 2 else scaled @ rows.mT

    def _add_joint(self, variance: Tensor, jacobian: Jacobian, basis: Eigenbasis, prior: Tensor) -> None:
        outputs, inputs = jacobian.outputs, jacobian.inputs
        columns, count = outputs.shape[:2]
        if jacobian.index is not None:
            groups, inverse = jacobian.index.unique(return_inverse=True)
            m = jacobian._replace(index=inverse).dense(len(groups))
            self._add_rows(variance, basis.rotated(m), basis.values.at(groups), prior)
        elif inputs is None:
            self._add_rows(variance, basis.rotated(outputs), basis.values, prior)
        else:
            inputs, outputs = basis.input_rows_in(inputs), basis.output_rows_in(outputs)
            a, b = inputs.shape[3], outputs.shape[4]
            each = columns * count * b * outputs.element_size()
            step = max((ON_CPU if outputs.is_cpu else ELSEWHERE) // max(each, 1), 1)
            for g in range(inputs.shape[2]):
                own = slice(g, g + 1)
                for begin in range(0, a, step):
                    some = slice(begin, begin + step)
                    part = Jacobian(outputs[:, :, :, own], inputs[:, :, own, some])
                    self._add_rows(variance, part.dense(1), basis.values.at(own, some), prior)

    def _add_rows(self, variance: Tensor, m: Tensor, values: Any, prior: Tensor) -> None:
        """Add what M ``(K, N, G, a, b)``, in the eigenbases, says of all pairs of data points."""
        rows = m.transpose(0, 1).flatten(0, 1)[:, None]  # (N K, 1, G, a, b)
        values.add_variance_(variance[None], None, rows, prior, self.scale)

    def _power(self, name: str, exponent: float) -> Tensor:
        return self.bases[name].precisions(self.prior[name], self.scale).pow(exponent)

    def _parts(self, vectors: Tensor) -> Iterator[tuple[str, Eigenbasis, Tensor]]:
        """The parts of vectors ``(..., P)`` that belong to each parameter, ``(..., G, a, b)``."""
        axes = vectors.dim() - 1
        for (name, basis), part in zip(self.bases.items(), vectors.split(self._sizes, -1), strict=True):
            yield name, basis, basis.shape.to_blocks(part, axes)

    def _joined(self, blocks: list[Tensor]) -> Tensor:
        flat = [
            basis.shape.from_blocks(part, (basis.shape.numel,))
            for basis, part in zip(self.bases.values(), blocks, strict=True)
        ]
        return torch.cat(flat, -1)

"""The Gaussian posterior of an approximation, its base and the Kronecker-factored one, in the eigenbases of the factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.distributed import Ranks
from ella_cuda.laplace.factors import FactorShape, Jacobian, KroneckerFactor, without_repeats
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import in_own_precision


class Eigenbasis(NamedTuple):
    r"""The eigenvectors of a parameter tensor's curvature, in block g
    :math:`(U_g \otimes V_g)\, \mathrm{diag}(\lambda_g \otimes \mu_g)\, (U_g \otimes V_g)^T`.

    Attributes:
        shape: of the factor.
        parameter_shape: of the tensor.
        values_in: :math:`\lambda`, ``(G, a)``, float64. values_out: :math:`\mu`, ``(G or 1, b)``, float64.
        vectors_in: U, ``(G, a, a)``, of the parameter's dtype; None where it is the number one.
        vectors_out: V, ``(G or 1, b, b)``.
    """

    shape: FactorShape
    parameter_shape: torch.Size
    values_in: Tensor
    values_out: Tensor
    vectors_in: Tensor | None
    vectors_out: Tensor

    def precisions(self, prior: Tensor, scale: Tensor) -> Tensor:
        r""":math:`s \lambda \mu + \delta`, ``(G, a, b)``, float64."""
        return scale * self.values_in[:, :, None] * self.values_out[:, None] + prior

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
        vectors_in = None if self.vectors_in is None else _some(self.vectors_in, blocks)
        return self._replace(
            values_in=_some(self.values_in, blocks),
            values_out=_some(self.values_out, blocks),
            vectors_in=vectors_in,
            vectors_out=_some(self.vectors_out, blocks),
        )


def _some(of_blocks: Tensor, blocks: range | None) -> Tensor:
    """The part of these blocks; what all share as it is."""
    whole = blocks is None or of_blocks.shape[0] == 1
    return of_blocks if whole else of_blocks[blocks.start : blocks.stop]


def _whole(vectors: Tensor) -> Tensor:
    """Vectors that all blocks share without their axis, so that a product with them is one of all rows."""
    return vectors[0] if vectors.shape[0] == 1 else vectors


def _rows_in(rows: Tensor, vectors: Tensor) -> Tensor:
    vectors = _whole(vectors).to(rows.dtype)
    if vectors.dim() == 2:
        return rows @ vectors
    return torch.einsum("...gi,gij->...gj", rows, vectors)


def eigenbases(
    factors: Mapping[str, KroneckerFactor], parameter_shapes: Mapping[str, torch.Size]
) -> dict[str, Eigenbasis]:
    """The eigenbases of all factors; factors that share a side have one decomposition of it.

    Raises:
        FloatingPointError, ArithmeticError, torch.linalg.LinAlgError: see :meth:`SecondMoment.eigenvalues`.
    """
    sides = {m: None for f in factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    with torch.no_grad():
        found = SecondMoment.bases_of_all(sides)
    result = {}
    for name, factor in factors.items():
        values_out, vectors_out = found[factor.output_moment]
        values_in, vectors_in = values_out.new_ones(factor.shape.groups, 1), None
        if factor.input_moment is not None:
            values_in, vectors_in = found[factor.input_moment]
            values_in = values_in / factor.n_data
        vectors_in = None if factor.shape.inputs == 1 else vectors_in
        result[name] = Eigenbasis(factor.shape, parameter_shapes[name], values_in, values_out, vectors_in, vectors_out)
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


ON_CPU, ELSEWHERE = 32 << 20, 256 << 20  # bytes of a Jacobian that are written out at a time


class Contraction(NamedTuple):
    """Adds to a covariance of outputs.

    Attributes:
        take: ``(name, Jacobian)``, of one parameter.
        finish: once all parameters' are there.
    """

    take: Callable[[str, Jacobian], None]
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

    @abstractmethod
    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        """A contraction that adds Jacobians' parts of ``J P^-1 J^T`` to the variance.

        Args:
            variance: float64, ``(N, K, K)``, or ``(N, K)`` for the diagonal alone, or with ``joint`` ``(N K, N K)``.
        """

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
            contraction.take(name, Jacobian(shape.to_blocks(part, 2).transpose(0, 1)))
        contraction.finish()
        return variance.to(jacobians.dtype)

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
    r"""The precision :math:`P = s H + \delta` of a posterior whose curvature H is Kronecker-factored, with a prior precision for each tensor.

    Nothing of the size of P is formed but by :meth:`to_matrix`.

    Args:
        bases: of the factors, by parameter name, in order.
        prior_precision: one value per tensor, float64.
        scale: s, 0-dim float64: :math:`1/(\sigma^2 T)`.
        dtype: of samples and of what :meth:`diag` and :meth:`to_matrix` give.
    """

    def __init__(self, bases: Mapping[str, Eigenbasis], prior_precision: Tensor, scale: Tensor, dtype: torch.dtype):
        self.bases, self.scale, self.dtype = bases, scale, dtype
        self._prior = dict(zip(bases, prior_precision.unbind(), strict=True))
        self._sizes = [basis.shape.numel for basis in bases.values()]
        self.n_params, self.device = sum(self._sizes), scale.device
        self.shapes = {name: basis.shape for name, basis in bases.items()}
        self._own = [prior_precision, scale]

    def own(self) -> list[Tensor]:
        return self._own

    def held(self) -> list[Tensor]:
        return [value for basis in self.bases.values() for value in basis if isinstance(value, Tensor)]

    def of(self, own: Sequence[Tensor]) -> KronPosterior:
        return KronPosterior(self.bases, *own, self.dtype)

    def logdet(self) -> Tensor:
        parts = [
            ops.kron_logdet(basis.values_in, basis.values_out * self.scale, self._prior[name])
            for name, basis in self.bases.items()
        ]
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

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        def take(name: str, jacobian: Jacobian) -> None:
            basis = self.bases[name].restricted(jacobian.blocks)
            jacobian = jacobian._replace(blocks=None)
            if joint:
                self._add_joint(variance, jacobian, basis, self._prior[name])
            elif jacobian.index is not None:
                self._add_looked_up(variance, jacobian, basis, self._prior[name])
            else:
                self._add(variance, jacobian, basis, self._prior[name])

        return Contraction(take)

    def _add(self, variance: Tensor, jacobian: Jacobian, basis: Eigenbasis, prior: Tensor) -> None:
        outputs, inputs = jacobian.outputs, jacobian.inputs
        given = (basis.values_in, basis.values_out, prior, self.scale)
        if inputs is not None:
            columns, _, positions, groups, b = outputs.shape
            a = inputs.shape[3]
            # Rows are rotated where there are fewer of them than the Jacobian has, which is otherwise rotated when it is written out.
            early_in, early_out = positions <= columns * b, positions <= a
            inputs = basis.input_rows_in(inputs) if early_in else inputs
            outputs = basis.output_rows_in(outputs) if early_out else outputs
            if early_in and early_out:
                ops.kron_variance_(variance, inputs, outputs, *given)
                return
            each = columns * groups * a * b * outputs.element_size()
        else:
            early_in = early_out = False
            each = outputs[:, :1].numel() * outputs.element_size()
        step = max((ON_CPU if outputs.is_cpu else ELSEWHERE) // max(each, 1), 1)
        for begin in range(0, outputs.shape[1], step):
            some = slice(begin, begin + step)
            m = _written_out(outputs[:, some], None if inputs is None else inputs[some])  # (K, N, G, a, b)
            m = m if early_in else basis.inputs_in(m)
            m = m if early_out else basis.outputs_in(m)
            ops.kron_variance_(variance[some], None, m, *given)

    def _add_looked_up(self, variance: Tensor, jacobian: Jacobian, basis: Eigenbasis, prior: Tensor) -> None:
        rows, index = without_repeats(jacobian), jacobian.index  # (K, N, T, b), (N, T)
        rows = basis.output_rows_in(rows[:, :, :, None])[:, :, :, 0]
        values_out = basis.values_out if len(basis.values_out) == 1 else basis.values_out[index]
        precisions = self.scale * basis.values_in[index] * values_out + prior  # (N, T, b)
        scaled = (rows.double() / precisions).transpose(0, 1).flatten(2)  # (N, K, T b)
        rows = rows.transpose(0, 1).flatten(2).double()
        variance += (scaled * rows).sum(2) if variance.dim() == 2 else scaled @ rows.mT

    def _add_joint(self, variance: Tensor, jacobian: Jacobian, basis: Eigenbasis, prior: Tensor) -> None:
        outputs, inputs = jacobian.outputs, jacobian.inputs
        columns, count = outputs.shape[:2]
        if jacobian.index is not None:
            groups, inverse = jacobian.index.unique(return_inverse=True)
            m = jacobian._replace(index=inverse).dense(len(groups))
            values_out = basis.values_out if len(basis.values_out) == 1 else basis.values_out[groups]
            self._add_rows(variance, basis.rotated(m), basis.values_in[groups], values_out, prior)
        elif inputs is None:
            self._add_rows(variance, basis.rotated(outputs), basis.values_in, basis.values_out, prior)
        else:
            inputs, outputs = basis.input_rows_in(inputs), basis.output_rows_in(outputs)
            a, b = inputs.shape[3], outputs.shape[4]
            each = columns * count * b * outputs.element_size()
            step = max((ON_CPU if outputs.is_cpu else ELSEWHERE) // max(each, 1), 1)
            for g in range(inputs.shape[2]):
                own = min(g, len(basis.values_out) - 1)
                for begin in range(0, a, step):
                    some = slice(begin, begin + step)
                    m = _written_out(outputs[:, :, :, g : g + 1], inputs[:, :, g : g + 1, some])
                    values = basis.values_in[g : g + 1, some], basis.values_out[own : own + 1]
                    self._add_rows(variance, m, *values, prior)

    def _add_rows(self, variance: Tensor, m: Tensor, values_in: Tensor, values_out: Tensor, prior: Tensor) -> None:
        """Add what M ``(K, N, G, a, b)``, in the eigenbases, says of all pairs of data points."""
        rows = m.transpose(0, 1).flatten(0, 1)[:, None]  # (N K, 1, G, a, b)
        ops.kron_variance_(variance[None], None, rows, values_in, values_out, prior, self.scale)

    def _power(self, name: str, exponent: float) -> Tensor:
        return self.bases[name].precisions(self._prior[name], self.scale).pow(exponent)

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


def _written_out(outputs: Tensor, inputs: Tensor | None) -> Tensor:
    """M ``(K, N, G, a, b)``."""
    if inputs is None:
        return outputs
    columns, n, positions, groups, b = outputs.shape
    left = inputs.permute(0, 2, 3, 1).reshape(n * groups, -1, positions)
    right = outputs.permute(1, 3, 2, 0, 4).reshape(n * groups, positions, columns * b)
    return (left @ right).unflatten(0, (n, groups)).unflatten(3, (columns, b)).permute(3, 0, 1, 2, 4)

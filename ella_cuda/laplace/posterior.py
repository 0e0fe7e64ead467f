"""The Gaussian posterior of a Kronecker-factored approximation: its precision, covariances of outputs, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.laplace.eigenbases import Eigenbasis
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian, without_repeats
from ella_cuda.laplace.values import check_samples
from ella_cuda.nn._sizes import as_count

ON_CPU, ELSEWHERE = 32 << 20, 256 << 20  # bytes of a Jacobian that are written out at a time


class Contraction(NamedTuple):
    """Adds to a covariance of outputs.

    Attributes:
        take: ``(name, Jacobian)``, of one parameter.
        finish: once all parameters' are there.
    """

    take: Callable[[str, Jacobian], None]
    finish: Callable[[], None] = lambda: None


class Posterior(Protocol):
    """The precision P of a Gaussian over parameters. Vectors of all parameters are in ``model.named_parameters()`` order, flattened one after
    the other."""

    n_params: int
    shapes: Mapping[str, FactorShape]
    row_bytes: int = 0  # what a contraction keeps of a data point's output

    def logdet(self) -> Tensor:
        """``log|P|``, 0-dim float64."""

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        """``P^exponent`` times vectors ``(..., P)``."""

    def square_form(self, vectors: Tensor) -> Tensor:
        """``v^T P v`` of vectors ``(..., P)``: ``(...)``, float64."""

    def inv_square_form(self, jacobians: Tensor) -> Tensor:
        """``J P^-1 J^T`` of ``(N, K, P)``: ``(N, K, K)``."""

    def joint_square_form(self, jacobians: Tensor) -> Tensor:
        """``J P^-1 J^T`` of all rows of ``(N, K, P)`` or ``(N K, P)``: ``(N K, N K)``."""

    def diag(self, exponent: float = 1) -> Tensor:
        """The diagonal of ``P^exponent``, ``(P,)``: with -1 the parameters' variances."""

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """``P^exponent``, ``(P, P)``. For small networks and tests."""

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from ``N(0, P^-1)``, ``(n_samples, P)``."""

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        """What adds Jacobians' parts of ``J P^-1 J^T`` to the variance.

        Args:
            variance: float64, ``(N, K, K)``, or ``(N, K)`` for the diagonal alone, or with ``joint`` ``(N K, N K)``.
        """


class KronPosterior(Posterior):
    r"""The precision :math:`P = s H + \delta` of a posterior whose curvature H is Kronecker-factored, with a prior precision for each tensor.

    Vectors of all parameters are in ``model.named_parameters()`` order, flattened one after the other. Nothing of the size of P is formed but
    by :meth:`to_matrix`.

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
        self.n_params = sum(self._sizes)

    @property
    def shapes(self) -> dict[str, FactorShape]:
        """Of the factors, by parameter name."""
        return {name: basis.shape for name, basis in self.bases.items()}

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

    def square_form(self, vectors: Tensor) -> Tensor:
        terms = [
            (basis.rotated(part).square() * self._power(name, 1)).sum((-3, -2, -1))
            for name, basis, part in self._parts(vectors)
        ]
        return torch.stack(terms).sum(0)

    def inv_square_form(self, jacobians: Tensor) -> Tensor:
        variance = jacobians.new_zeros(*jacobians.shape[:2], jacobians.shape[1], dtype=torch.float64)
        self._add_flat(variance, jacobians)
        return variance.to(jacobians.dtype)

    def joint_square_form(self, jacobians: Tensor) -> Tensor:
        rows = jacobians.reshape(1, -1, self.n_params)
        return self.inv_square_form(rows)[0]

    def diag(self, exponent: float = 1) -> Tensor:
        found = []
        for name, basis in self.bases.items():
            values = self._power(name, exponent)
            if basis.vectors_in is not None:
                values = basis.vectors_in.double().square() @ values
            found.append(values @ basis.vectors_out.double().square().mT)
        return self._joined(found).to(self.dtype)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        return self.bmm(torch.eye(self.n_params, dtype=self.dtype, device=self.scale.device), exponent)

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from ``N(0, P^-1)``, ``(n_samples, P)``: the generator's numbers in the eigenbases."""
        drawn = _drawn(n_samples, self.n_params, self.dtype, self.scale.device, generator)
        found = [basis.back(part * self._power(name, -0.5).to(self.dtype)) for name, basis, part in self._parts(drawn)]
        return self._joined(found)

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        def add(name: str, jacobian: Jacobian) -> None:
            basis = self.bases[name].restricted(jacobian.blocks)
            jacobian = jacobian._replace(blocks=None)
            if joint:
                self._add_joint(variance, jacobian, basis, self._prior[name])
            elif jacobian.index is not None:
                self._add_looked_up(variance, jacobian, basis, self._prior[name])
            else:
                self._add(variance, jacobian, basis, self._prior[name])

        return Contraction(add)

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
            self._add_rows(variance, basis.outputs_in(m), basis.values_in[groups], values_out, prior)
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

    def _add_flat(self, variance: Tensor, jacobians: Tensor) -> None:
        contraction = self.contraction(variance)
        for name, _, part in self._parts(jacobians):
            contraction.take(name, Jacobian(part.transpose(0, 1)))

    def _power(self, name: str, exponent: float) -> Tensor:
        return self.bases[name].precisions(self._prior[name], self.scale).pow(exponent)

    def _parts(self, vectors: Tensor) -> Iterator[tuple[str, Eigenbasis, Tensor]]:
        """Of vectors ``(..., P)`` what belongs to each parameter, ``(..., G, a, b)``."""
        axes = vectors.dim() - 1
        for (name, basis), part in zip(self.bases.items(), vectors.split(self._sizes, -1), strict=True):
            whole = part.reshape((*part.shape[:-1], *basis.parameter_shape))
            yield name, basis, basis.shape.to_blocks(whole, axes)

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


class Layout:
    """Where the elements of parameters that have a posterior are among all, flattened one after the other.

    Attributes:
        shapes: of the factors that Jacobians come in, by parameter name, in order.
        indices: of the elements, int64 ``(S,)``; None is all.
        counts: how many elements of each parameter have a posterior.
        count: S. n_params: how many elements there are.
        where: by parameter name, the slice of the S elements that are the parameter's.

    Args:
        shapes, indices: as above.

    Raises:
        ValueError: the indices are none.
    """

    def __init__(self, shapes: Mapping[str, FactorShape], indices: Tensor | None = None) -> None:
        self.shapes = dict(shapes)
        sizes = [shape.numel for shape in self.shapes.values()]
        self.n_params = sum(sizes)
        self.indices = None if indices is None else checked_indices(indices, self.n_params)
        self._local: dict[str, Tensor] = {}
        if self.indices is None:
            self.counts = sizes
        else:
            ends = torch.tensor(sizes, device="cpu").cumsum(0)
            cuts = torch.searchsorted(self.indices.cpu(), ends).tolist()
            self.counts = [end - begin for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)]
            starts = (ends - torch.tensor(sizes, device="cpu")).tolist()
            parts = self.indices.split(self.counts)
            self._local = {n: part - start for n, part, start in zip(self.shapes, parts, starts, strict=True)}
        self.count = sum(self.counts)
        self.where: dict[str, slice] = {}
        begin = 0
        for name, count in zip(self.shapes, self.counts, strict=True):
            self.where[name] = slice(begin, begin + count)
            begin += count

    def selected(self, name: str, values: Tensor) -> Tensor:
        """Of a parameter's values ``(..., numel)`` those whose elements have a posterior."""
        return values if self.indices is None else values[..., self._local[name].to(values.device)]

    def add_to(self, rows: Tensor, name: str, jacobian: Jacobian) -> None:
        """Add a Jacobian to its columns of ``rows`` ``(K, N, S)``."""
        where = self.where[name]
        if where.stop > where.start:
            shape = self.shapes[name]
            whole = shape.from_blocks(jacobian.dense(shape.groups), (shape.numel,))
            rows[:, :, where] += self.selected(name, whole)

    def restricted(self, vectors: Tensor) -> Tensor:
        """Of vectors ``(..., P)`` the elements that have a posterior; those of ``(..., S)`` as they are."""
        if self.indices is None or vectors.shape[-1] == self.count:
            return vectors
        return vectors[..., self.indices.to(vectors.device)]

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors ``(..., S)`` as ``(..., P)``, zero elsewhere."""
        if self.indices is None:
            return vectors
        whole = vectors.new_zeros(*vectors.shape[:-1], self.n_params)
        whole[..., self.indices.to(vectors.device)] = vectors
        return whole


def checked_indices(indices: Tensor, n_params: int) -> Tensor:
    """They themselves; ValueError where they are none of so many parameters."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.dim() != 1 or not len(indices):
        got = f"{tuple(indices.shape)} {indices.dtype}" if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"subnetwork_indices: expected an int64 tensor (S,) with S > 0, got {got}.")
    in_order = (indices[1:] > indices[:-1]).all()
    if not in_order or indices[0] < 0 or indices[-1] >= n_params:
        raise ValueError(
            f"subnetwork_indices: expected ascending indices, each once, below the {n_params} trainable parameters, got "
            f"{indices.min().item()} to {indices.max().item()}{'' if in_order else ', not in order'}."
        )
    return indices


class _Collected(Posterior):
    """A posterior that contracts the Jacobians of all parameters together, ``(K, N, S)``."""

    layout: Layout
    dtype: torch.dtype
    n_params: int

    @property
    def row_bytes(self) -> int:
        """What a contraction keeps of a data point's output."""
        return 2 * torch.float64.itemsize * self.layout.count

    @property
    def shapes(self) -> dict[str, FactorShape]:
        return self.layout.shapes

    def whitened(self, rows: Tensor) -> Tensor:
        """Rows ``(R, S)`` times a square root of the covariance, float64, ``(R, S)``: their products are covariances."""
        raise NotImplementedError

    def inv_square_form(self, jacobians: Tensor) -> Tensor:
        rows = self.layout.restricted(jacobians)
        white = self.whitened(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        return (white @ white.mT).to(jacobians.dtype)

    def joint_square_form(self, jacobians: Tensor) -> Tensor:
        rows = jacobians.reshape(-1, jacobians.shape[-1])
        return self.inv_square_form(rows[None])[0]

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        rows: list[Tensor] = []

        def take(name: str, jacobian: Jacobian) -> None:
            if not rows:
                rows.append(jacobian.outputs.new_zeros(*jacobian.outputs.shape[:2], self.layout.count))
            self.layout.add_to(rows[0], name, jacobian)

        def finish() -> None:
            for each in rows:
                by_data = each.transpose(0, 1)
                white = self.whitened(by_data.flatten(0, 1))
                if joint:
                    variance.add_(white @ white.mT)
                    continue
                white = white.unflatten(0, by_data.shape[:2])
                variance.add_(white.square().sum(2) if variance.dim() == 2 else white @ white.mT)

        return Contraction(take, finish)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """``P^exponent`` of the elements that have a posterior, ``(S, S)``."""
        return self._power(torch.eye(self.n_params, dtype=torch.float64, device=self._device), exponent).to(self.dtype)

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        found = self._power(self.layout.restricted(vectors).double(), exponent)
        return self.layout.spread(found).to(vectors.dtype)

    def square_form(self, vectors: Tensor) -> Tensor:
        rows = self.layout.restricted(vectors).double()
        return (rows * self._power(rows, 1)).sum(-1)

    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        """``P^exponent`` times float64 vectors ``(..., S)``."""
        raise NotImplementedError

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError


class FullPosterior(_Collected):
    """A precision that is a matrix, ``(S, S)``, float64, of the elements of a layout.

    Raises:
        torch.linalg.LinAlgError: it is not positive definite.
    """

    def __init__(self, precision: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.precision, self.layout, self.dtype = precision, layout, dtype
        self.n_params = layout.count
        self.factor = torch.linalg.cholesky(precision)

    @property
    def _device(self) -> torch.device:
        return self.precision.device

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    def whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, rows.double().mT, upper=False).mT

    def diag(self, exponent: float = 1) -> Tensor:
        inverse = exponent == -1
        values = torch.cholesky_inverse(self.factor).diagonal() if inverse else self.to_matrix(exponent).diagonal()
        return self.layout.spread(values.to(self.dtype))

    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        if exponent == 1:
            return vectors @ self.precision
        if exponent == -1:
            return torch.cholesky_solve(vectors.reshape(-1, self.n_params).mT, self.factor).mT.view_as(vectors)
        values, basis = torch.linalg.eigh(self.precision)
        return (vectors @ basis * values.pow(exponent)) @ basis.mT

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        drawn = _drawn(n_samples, self.n_params, self.dtype, self._device, generator).double()
        found = torch.linalg.solve_triangular(self.factor.mT, drawn.mT, upper=True).mT
        return self.layout.spread(found.to(self.dtype))


class DiagonalPosterior(_Collected):
    """A precision that is a diagonal, ``(S,)``, float64, of the elements of a layout."""

    def __init__(self, precision: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.precision, self.layout, self.dtype = precision, layout, dtype
        self.n_params = layout.count

    row_bytes = 0

    @property
    def _device(self) -> torch.device:
        return self.precision.device

    def logdet(self) -> Tensor:
        return self.precision.log().sum()

    def whitened(self, rows: Tensor) -> Tensor:
        return rows.double() * self.precision.rsqrt()

    def diag(self, exponent: float = 1) -> Tensor:
        return self.layout.spread(self.precision.pow(exponent).to(self.dtype))

    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        return vectors * self.precision.pow(exponent)

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        drawn = _drawn(n_samples, self.n_params, self.dtype, self._device, generator)
        return self.layout.spread(drawn * self.precision.rsqrt().to(self.dtype))

    def contraction(self, variance: Tensor, joint: bool = False) -> Contraction:
        """One parameter after the other: nothing is there for all of them."""

        def take(name: str, jacobian: Jacobian) -> None:
            where = self.layout.where[name]
            if where.stop == where.start:
                return
            shape = self.layout.shapes[name]
            whole = shape.from_blocks(jacobian.dense(shape.groups), (shape.numel,))
            rows = self.layout.selected(name, whole).transpose(0, 1) * self.precision[where].rsqrt().to(whole.dtype)
            if joint:
                rows = rows.flatten(0, 1)
            if variance.dim() == 2 and not joint:
                variance.add_(rows.square().sum(2, dtype=torch.float64))
            else:
                variance.add_(rows @ rows.mT)

        return Contraction(take)


def _drawn(
    n_samples: int, size: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Standard normal numbers ``(n_samples, size)``. Each sample has a call of its own: torch draws other numbers for several at once."""
    where = device if generator is None else generator.device
    check_samples(as_count("n_samples", n_samples), size, torch.empty((), dtype=dtype, device=where))
    return torch.stack(
        [torch.randn(size, dtype=dtype, device=where, generator=generator) for _ in range(n_samples)]
    ).to(device)

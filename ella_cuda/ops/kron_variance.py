"""The predictive variance under one Kronecker-factored block of the posterior, in place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._operator import (
    COORDINATES,
    map_in_place_over_batch,
    operand_sizes,
    refuse_graph,
    register_in_place,
    require_backend,
    require_countable,
    require_own_memory,
)
from ella_cuda.ops._precision import without_autocast

TILE = 1 << 18  # numbers of a tile: 2 MiB in float64, which stay in a second-level cache
POSITIONS = 1024  # summed by one product


def kron_variance_(
    variance: Tensor,
    inputs: Tensor | None,
    outputs: Tensor,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Add ``J (scale A ⊗ B + precision)^-1 J^T`` of one parameter to the variance of the outputs of every data point.

    With the Jacobian in the eigenbases of both sides, ``M[n,k,g,i,j] = sum_t inputs[n,t,g,i] outputs[k,n,t,g,j]``::

        variance[n,k,l] += sum_{g,i,j} M[n,k,g,i,j] M[n,l,g,i,j] / (scale eigenvalues_in[g,i] eigenvalues_out[g,j] + precision)

    Equivalent to :func:`kron_variance_torch_`, without M or the denominators as a whole: only tiles of a few MiB exist. At a single
    position M has rank one, and the sum over i becomes one product with the denominators' inverses per group.

    Args:
        variance: ``(N, K, K)``, or ``(N, K)`` for the diagonal alone; float32 or float64, contiguous; changed in place.
        inputs: ``(N, T, G, a)``, any strides: the input rows of T shared positions in the eigenbasis of the input side. None if
            ``outputs`` is the Jacobian itself.
        outputs: ``(K, N, T, G, b)``, any strides: the gradients of output k at these positions in the eigenbasis of the output side;
            with ``inputs=None``, ``(K, N, G, a, b)``: M. Of the variance's dtype, or float32 beside a float64 variance;
            ``inputs`` has the same dtype. Products are taken in it, their sums over tiles are float64, in a fixed order.
        eigenvalues_in: ``(G, a)`` float64, not negative.
        eigenvalues_out: ``(G, b)``, or ``(1, b)`` for all groups alike; float64, not negative.
        precision: ``()`` float64, positive. The values of tensors are not checked.
        scale: ``()`` float64 tensor or number, positive.

    Returns:
        ``variance``.

    Raises:
        ValueError: a tensor carries a graph or a tangent, as the op has no derivative; or scale is a number that is not positive and finite.
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.

    Source: Immer, Korzepa and Bauer, "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021, eq. 9,
    with the Kronecker-factored posterior of Ritter, Botev and Barber, ICLR 2018.
    """
    tensors = {"variance": variance, "outputs": outputs, "inputs": inputs}
    tensors |= {"eigenvalues_in": eigenvalues_in, "eigenvalues_out": eigenvalues_out, "precision": precision}
    tensors["scale"] = scale if isinstance(scale, Tensor) else None
    refuse_graph("kron_variance_", **{name: tensor for name, tensor in tensors.items() if tensor is not None})
    require_backend("kron_variance_", variance)
    _add(variance, outputs, inputs, _scaled(eigenvalues_in, scale), eigenvalues_out, precision)
    return variance


def kron_variance_torch_(
    variance: Tensor,
    inputs: Tensor | None,
    outputs: Tensor,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Plain-torch reference of :func:`kron_variance_`: M and the denominators as a whole, products in the dtype of ``outputs``."""
    jacobian = outputs if inputs is None else torch.einsum("ntgi,kntgj->kngij", inputs, outputs)
    denominators = scale * eigenvalues_in[:, :, None] * eigenvalues_out[:, None] + precision
    weighted = jacobian / denominators.to(jacobian.dtype)
    equation = "kngij,kngij->nk" if variance.dim() == 2 else "kngij,lngij->nkl"
    return variance.add_(torch.einsum(equation, weighted, jacobian))


def _scaled(eigenvalues: Tensor, scale: Tensor | float) -> Tensor:
    if isinstance(scale, Tensor):
        operand_sizes("kron_variance_", eigenvalues_in=(eigenvalues, None), scale=(scale, "", COORDINATES))
    elif not 0 < scale < math.inf:
        raise ValueError(f"ella_cuda.ops.kron_variance_: scale must be a positive, finite number, got {scale}.")
    elif scale == 1:
        return eigenvalues
    return eigenvalues * scale


def _fake(
    variance: Tensor,
    outputs: Tensor,
    inputs: Tensor | None,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
) -> None:
    op = "kron_variance_"
    narrower = (torch.float32,) if variance.dtype == torch.float64 else ()
    sizes = operand_sizes(
        op,
        variance=(variance, "N K" if variance.dim() == 2 else "N K K"),
        outputs=(outputs, "K N G a b" if inputs is None else "K N T G b", (variance.dtype, *narrower)),
    )
    if inputs is not None:
        operand_sizes(op, sizes, outputs=(outputs, None), inputs=(inputs, "N T G a"))
        sizes["a"] = inputs.shape[-1]
    shared = eigenvalues_out.dim() == 2 and eigenvalues_out.shape[0] == 1
    operand_sizes(
        op,
        sizes,
        variance=(variance, None),
        eigenvalues_in=(eigenvalues_in, "G a", COORDINATES),
        eigenvalues_out=(eigenvalues_out, "1 b" if shared else "G b", COORDINATES),
        precision=(precision, "", COORDINATES),
    )
    require_countable(op, variance=variance, outputs=outputs, inputs=inputs)
    torch._check(variance.is_contiguous(), lambda: f"{op}: variance must be contiguous, it is updated in place")


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[None, None]:
    return map_in_place_over_batch(torch.ops.ella_cuda.kron_variance_, info, in_dims, args)


def _parts(size: int, each: int) -> Iterator[slice]:
    return (slice(begin, min(begin + each, size)) for begin in range(0, size, max(each, 1)))


def _tiled(
    variance: Tensor,
    outputs: Tensor,
    inputs: Tensor | None,
    eigenvalues_in: Tensor,
    eigenvalues_out: Tensor,
    precision: Tensor,
) -> None:
    """The op on the CPU, by torch's products of tiles."""
    _fake(variance, outputs, inputs, eigenvalues_in, eigenvalues_out, precision)
    for name, tensor in (("outputs", outputs), ("inputs", inputs)):
        if tensor is not None:
            require_own_memory("kron_variance_", "variance", name, variance, tensor)
    if 0 in variance.shape or outputs.numel() == 0 or eigenvalues_in.numel() == 0:
        return
    total = variance if variance.dtype == torch.float64 else torch.zeros_like(variance, dtype=torch.float64)
    spectra = eigenvalues_in, eigenvalues_out.expand(eigenvalues_in.shape[0], -1), precision
    with torch.no_grad(), without_autocast(variance.device.type):
        if inputs is not None and inputs.shape[1] == 1:
            _add_rank_one(total, inputs[:, 0], outputs[:, :, 0], *spectra)
        else:
            _add_any_rank(total, inputs, outputs, *spectra)
        if total is not variance:
            variance += total


def _inverses(eigenvalues_in: Tensor, eigenvalues_out: Tensor, precision: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / (l_i m_j + p) of some groups, rows and columns; (g, i, j)."""
    return torch.mul(eigenvalues_in[:, :, None], eigenvalues_out[:, None]).add_(precision).reciprocal_().to(dtype)


def _add_rank_one(total: Tensor, inputs: Tensor, outputs: Tensor, l: Tensor, m: Tensor, precision: Tensor) -> None:
    """inputs (N, G, a), outputs (K, N, G, b). Weights w[g,n,j] = sum_i inputs[n,g,i]^2 / (l_i m_j + p) are sums of positive terms, which lose
    nothing in the rows' dtype; they are taken for some groups and columns at a time."""
    (k, n, groups, b), a = outputs.shape, inputs.shape[-1]
    columns = min(b, 256)
    rows = min(a, TILE // columns)  # of the inverses
    together = min(groups, max(TILE // (columns * rows), 1))
    points = min(n, max(TILE // (together * max(rows, k * columns)), 1))
    # The inverses cost more than the products with them where there are few data points: all points see a tile before the next is made.
    for group in _parts(groups, together):
        for column in _parts(b, columns):
            # Weights of all points at once would be as large as the outputs' gradient of one output; they are kept for some points.
            for chunk in _parts(n, max(points, TILE // ((group.stop - group.start) * (column.stop - column.start)))):
                weights = _weights(inputs[chunk, group], l[group], m[group, column], precision, rows, points)
                for part in _parts(chunk.stop - chunk.start, points):
                    here = slice(chunk.start + part.start, chunk.start + part.stop)
                    _add_weighted(total[here], outputs[:, here, group, column], weights[:, part])


def _weights(inputs: Tensor, l: Tensor, m: Tensor, precision: Tensor, rows: int, points: int) -> Tensor:
    """(g, n, j) of the inputs (n, g, i)."""
    n, groups, a = inputs.shape
    weights = inputs.new_zeros(groups, n, m.shape[1])
    for row in _parts(a, rows):
        inverses = _inverses(l[:, row], m, precision, inputs.dtype)
        for part in _parts(n, points):
            squares = inputs[part, :, row].movedim(0, 1).square()
            if a == 1:
                weights[:, part] = squares * inverses
            else:
                torch.baddbmm(weights[:, part], squares, inverses, out=weights[:, part])
    return weights


def _add_weighted(total: Tensor, outputs: Tensor, weights: Tensor) -> None:
    """total[n] += sum_{g,j} outputs[k,n,g,j] weights[g,n,j] outputs[l,n,g,j], or its diagonal."""
    rows = outputs.movedim(0, 1).flatten(2)  # n, k, (g, j)
    weights = weights.movedim(0, 1).flatten(1)[:, None]
    if total.dim() == 2:
        total += (rows.square() * weights).sum(2, dtype=torch.float64)
    else:
        total += torch.bmm(rows * weights, rows.mT)


def _add_any_rank(
    total: Tensor, inputs: Tensor | None, outputs: Tensor, l: Tensor, m: Tensor, precision: Tensor
) -> None:
    """Tiles of M for some data points, groups, rows and columns, (n g, k, j i)."""
    k, n = outputs.shape[:2]
    (groups, a), b = l.shape, m.shape[1]
    rows = min(a, max(TILE // (k * min(b, 64)), 1))
    columns = min(b, max(TILE // (k * rows), 1))
    together = min(groups, max(TILE // (k * rows * columns), 1))
    points = min(n, max(TILE // (k * rows * columns * together), 1))
    for group in _parts(groups, together):
        for row in _parts(a, rows):
            for column in _parts(b, columns):
                inverses = _inverses(l[group, row], m[group, column], precision, outputs.dtype).mT.flatten(1)
                for part in _parts(n, points):
                    tile = _jacobian_tile(inputs, outputs, part, group, row, column)
                    tile = tile.view(part.stop - part.start, -1, k, inverses.shape[1])
                    if total.dim() == 2:
                        added = torch.matmul(tile.square(), inverses[:, :, None])[..., 0]
                    else:
                        added = torch.matmul(tile * inverses[:, None], tile.mT)
                    total[part] += added.sum(1, dtype=torch.float64)


def _jacobian_tile(
    inputs: Tensor | None, outputs: Tensor, part: slice, group: slice, row: slice, column: slice
) -> Tensor:
    if inputs is None:  # k n g i j
        return outputs[:, part, group, row, column].permute(1, 2, 0, 4, 3).contiguous()
    tile: Tensor | None = None
    for positions in _parts(inputs.shape[1], POSITIONS):
        left = outputs[:, part, positions, group, column].permute(1, 3, 0, 4, 2).flatten(2, 3).flatten(0, 1)
        right = inputs[part, positions, group, row].permute(0, 2, 1, 3).flatten(0, 1)
        tile = torch.bmm(left, right) if tile is None else tile.baddbmm_(left, right)
    assert tile is not None
    return tile


torch.library.impl("ella_cuda::kron_variance_", "cpu")(_tiled)
_add = register_in_place("kron_variance_", fake=_fake, vmap=_vmap)

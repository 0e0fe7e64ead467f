"""The part of the Laplace evidence that depends on the prior precisions, of all tensors of a network at once, from eigenvalues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ella_cuda.ops._cases import KernelCase, cases, normal
from ella_cuda.ops._operator import (
    INDEX,
    carries_tangent,
    differentiable,
    keep,
    nested_forward_mode,
    operand_sizes,
    sum_of_parts,
)

# One tile is a block's work on CUDA, 64 products a thread, and a task on the CPU, a few microseconds; its columns fit the first cache.
TILE_PRODUCTS, TILE_COLUMNS = 16384, 1024


class KronSpectra(NamedTuple):
    """Eigenvalues of many tensors' Kronecker factors as :func:`kron_evidence` takes them; made by :func:`pack_spectra`.

    Attributes:
        eigenvalues: all of them, ``(E,)``.
        tiles: ``(T, 5)`` int64: tensor, first row, rows, first column, columns. Rows and columns are ranges of ``eigenvalues`` whose
            products belong to the tensor; a tensor's tiles hold each of its products once.
        starts: ``(B + 1,)`` int64: the tiles of tensor b are ``tiles[starts[b]:starts[b + 1]]``.
        blocks: for every tensor its blocks before they were cut into tiles: first row, rows, first column, columns.
    """

    eigenvalues: Tensor
    tiles: Tensor
    starts: Tensor
    blocks: tuple[tuple[tuple[int, int, int, int], ...], ...]


class KronEvidence(NamedTuple):
    """What :func:`kron_evidence` returns.

    Attributes:
        value: 0-dim.
        slope: its derivatives in the log precisions, ``(B,)``.
        effective: effective number of parameters of every tensor, ``(B,)``.
    """

    value: Tensor
    slope: Tensor
    effective: Tensor


def pack_spectra(pairs: Sequence[tuple[Tensor, Tensor]]) -> KronSpectra:
    r"""Put the eigenvalues of B tensors into one array, once for any number of calls of :func:`kron_evidence`.

    Args:
        pairs: for every tensor :math:`\lambda` ``(G, a)`` and :math:`\mu` ``(G, b)`` or ``(1, b)``, as for :func:`kron_logdet`; all of
            one dtype, float32 or float64, and on one device. They are copied.

    Raises:
        ValueError: no pair, a shape, dtype or device that does not fit, or eigenvalues that require grad or carry a tangent.
    """
    if not pairs:
        raise ValueError("pack_spectra: pairs must hold the eigenvalues of at least one tensor, got none.")
    like, sides, blocks, offset = pairs[0][0], [], [], 0
    for index, pair in enumerate(pairs):
        for side, name in zip(pair, ("first", "second"), strict=True):
            where = f"pack_spectra: the {name} of pair {index}"
            if side.dim() != 2:
                raise ValueError(f"{where} must have shape (groups, eigenvalues), got {tuple(side.shape)}.")
            if side.dtype != like.dtype or side.device != like.device:
                raise ValueError(
                    f"{where} must be {like.dtype} on {like.device} as the first pair is, got {side.dtype} on {side.device}."
                )
            if not side.is_floating_point():
                raise ValueError(f"{where} must be float32 or float64, got {side.dtype}.")
            _refuse_derivatives(where, side)
        inputs, outputs = pair
        if len(outputs) not in (1, len(inputs)):
            raise ValueError(
                f"pack_spectra: the second of pair {index} must have 1 or {len(inputs)} groups, as many as the first, got {len(outputs)}."
            )
        groups = len(outputs)
        lengths = inputs.numel() // max(groups, 1), outputs.shape[1]
        own = []
        for group in range(groups if inputs.numel() and outputs.numel() else 0):
            first = offset + group * lengths[0], offset + inputs.numel() + group * lengths[1]
            short, long = sorted(((lengths[0], first[0]), (lengths[1], first[1])))
            own.append((short[1], short[0], long[1], long[0]))
        sides += [inputs.reshape(-1), outputs.reshape(-1)]
        blocks.append(tuple(own))
        offset += inputs.numel() + outputs.numel()
    tiles = [[(tensor, *tile) for block in own for tile in _tiles(*block)] for tensor, own in enumerate(blocks)]
    starts = [0, *itertools.accumulate(map(len, tiles))]
    numbers = [*starts, *(number for own in tiles for tile in own for number in tile)]
    table = torch.tensor(numbers, dtype=torch.int64, device=like.device)  # one copy to the device
    return KronSpectra(torch.cat(sides), table[len(starts) :].view(-1, 5), table[: len(starts)], tuple(blocks))


def _refuse_derivatives(where: str, eigenvalues: Tensor) -> None:
    if eigenvalues.requires_grad or carries_tangent(eigenvalues):
        raise ValueError(
            f"{where} requires grad or carries a forward-mode tangent, but kron_evidence has no derivative in eigenvalues; use "
            "kron_logdet, or pass .detach()."
        )


def _tiles(row: int, rows: int, column: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """A block in pieces of about equal size."""
    width = _piece(columns, TILE_COLUMNS)
    height = _piece(rows, max(1, TILE_PRODUCTS // width))
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            yield row + i, min(height, rows - i), column + j, min(width, columns - j)


def _piece(length: int, maximum: int) -> int:
    pieces = -(-length // maximum)
    return -(-length // pieces)


def kron_evidence(
    spectra: KronSpectra, square_norms: Tensor, log_precision: Tensor, log_scale: Tensor | float = 0.0
) -> KronEvidence:
    r"""The terms of the Laplace evidence in the prior precisions, for all tensors in one pass, without storing products of eigenvalues.

    With :math:`\delta_b` the exponential of ``log_precision`` and :math:`c` that of ``log_scale``,

    .. math::
        \sum_b \Big( \log \frac{|c\, A_b \otimes B_b + \delta_b I|}{|\delta_b I|} + \delta_b \|\theta_b\|^2 \Big)
        = \sum_b \Big( \sum_{ij} \log\Big(1 + \frac{c \lambda_i \mu_j}{\delta_b}\Big) + \delta_b \|\theta_b\|^2 \Big)

    is minus twice the log evidence, up to the data fit. The derivative in :math:`\log\delta_b` is
    :math:`\delta_b \|\theta_b\|^2 - \gamma_b` with the effective number of parameters
    :math:`\gamma_b = \sum_{ij} c\lambda_i\mu_j / (c\lambda_i\mu_j + \delta_b)`. Sums in float64 throughout, of positive terms: no
    difference of large numbers, as long as :math:`c\lambda_i/\delta_b` and :math:`\delta_b` are numbers that a double can hold. Only
    products of many terms have their logarithm taken, so that each is exact to 2e-16 absolutely, in the value; gamma's terms are exact
    to rounding.

    Differentiable in all but the eigenvalues: twice in value, once in slope and effective. Equivalent to :func:`kron_evidence_torch`,
    which has every derivative and serves forward mode over forward mode.

    Args:
        spectra: the eigenvalues, not negative, from :func:`pack_spectra`.
        square_norms: :math:`\|\theta_b\|^2`, ``(B,)``, of the eigenvalues' dtype, as are the next two.
        log_precision: :math:`\log\delta_b`, ``(B,)``.
        log_scale: :math:`\log c`, a number or a tensor of one element: the curvature's factor, e.g. :math:`-2\log\sigma`.

    Returns:
        value, slope and effective number of parameters; NaN where :math:`1 + c\lambda_i\mu_j/\delta_b` is negative.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument. In a backward or forward-mode pass: a third
            derivative of value, or a second of slope or effective.
        ValueError: eigenvalues that are to be differentiated in.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021, section 3.2;
    MacKay, "Bayesian interpolation", Neural Computation 1992 (the derivative by the effective number of parameters).
    """
    _refuse_derivatives("kron_evidence: spectra.eigenvalues", spectra.eigenvalues)
    scale = _scalar(log_scale, log_precision)
    if nested_forward_mode():
        return kron_evidence_torch(spectra, square_norms, log_precision, scale)
    return KronEvidence(
        *_evidence(spectra.eigenvalues, spectra.tiles, spectra.starts, square_norms, log_precision, scale)
    )


def kron_evidence_torch(
    spectra: KronSpectra, square_norms: Tensor, log_precision: Tensor, log_scale: Tensor | float = 0.0
) -> KronEvidence:
    """Plain-torch reference of :func:`kron_evidence`; stores the products, and is differentiable in the eigenvalues too."""
    values, prior = spectra.eigenvalues, log_precision.exp() * square_norms
    logs, quotients = [], []
    for blocks, ratio in zip(
        spectra.blocks, (_scalar(log_scale, log_precision) - log_precision).exp().unbind(), strict=True
    ):
        products = [
            torch.outer(values[row : row + rows], values[column : column + columns]).reshape(-1)
            for row, rows, column, columns in blocks
        ]
        q = ratio * (torch.cat(products) if products else values[:0])
        logs.append(torch.log1p(q).sum())
        quotients.append((q / (1 + q)).sum())
    effective = torch.stack(quotients)
    return KronEvidence(torch.stack(logs).sum() + prior.sum(), prior - effective, effective)


def _scalar(log_scale: Tensor | float, like: Tensor) -> Tensor:
    if not isinstance(log_scale, Tensor):
        return torch.full(
            (), log_scale, dtype=like.dtype, device=like.device
        )  # filled where it is: a graph can capture it
    if log_scale.numel() != 1:
        raise ValueError(f"kron_evidence: log_scale must have one element, got shape {tuple(log_scale.shape)}.")
    return log_scale.reshape(()) if log_scale.dim() else log_scale


# In what follows z = log_scale - log_precision, so that effective is a function of z alone, with the derivative `bend`.


def _evidence_save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    keep(ctx, *inputs, *output[1:])


def _evidence_backward(
    ctx: Any, value: Tensor | None, slope: Tensor | None, effective: Tensor | None
) -> tuple[Tensor | None, ...]:
    *spectra, norms, u, v, slopes, gammas = ctx.saved_tensors
    _, _, _, wants_norms, wants_u, wants_v = ctx.needs_input_grad
    d_norms = d_u = d_v = None
    if value is not None:
        d_u = value * slopes if wants_u else None
        d_v = value * gammas.sum() if wants_v else None
        d_norms = value * u.exp() if wants_norms else None
    if slope is not None or effective is not None:
        along = _minus(slope, effective) * _bend(*spectra, v - u)
        if slope is not None:
            prior = slope * u.exp()
            d_norms = sum_of_parts(d_norms, prior) if wants_norms else None
            d_u = sum_of_parts(d_u, prior * norms) if wants_u else None
        d_u = sum_of_parts(d_u, along) if wants_u else None
        d_v = sum_of_parts(d_v, -along.sum()) if wants_v else None
    return None, None, None, d_norms, d_u, d_v


def _evidence_jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    *spectra, norms, u, v, slopes, gammas = ctx.saved_tensors
    norms_t, u_t, v_t = (
        torch.zeros_like(x) if t is None else t for t, x in zip(tangents[3:], (norms, u, v), strict=True)
    )
    precision = u.exp()
    value = (slopes * u_t).sum() + gammas.sum() * v_t + (precision * norms_t).sum()
    effective = (v_t - u_t) * _bend(*spectra, v - u)
    return value, precision * (norms * u_t + norms_t) - effective, effective


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor:
    return a if b is None else -b if a is None else a - b


def _evidence_fake(
    eigenvalues: Tensor, tiles: Tensor, starts: Tensor, norms: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    others = {"square_norms": (norms, "B"), "log_precision": (u, "B"), "log_scale": (v, "")}
    _require_spectra("kron_evidence", eigenvalues, tiles, starts, **others)
    return v.new_empty(()), u.new_empty(u.shape), u.new_empty(u.shape)


def _bend_fake(eigenvalues: Tensor, tiles: Tensor, starts: Tensor, z: Tensor) -> Tensor:
    _require_spectra("kron_evidence_bend", eigenvalues, tiles, starts, log_ratio=(z, "B"))
    return z.new_empty(z.shape)


def _require_spectra(op: str, eigenvalues: Tensor, tiles: Tensor, starts: Tensor, **others: tuple[Tensor, str]) -> None:
    operand_sizes(op, eigenvalues=(eigenvalues, "E"), tiles=(tiles, "T 5", INDEX), starts=(starts, ("B + 1",), INDEX))
    torch._check(tiles.is_contiguous() and starts.is_contiguous(), lambda: f"{op}: tiles and starts must be contiguous")
    torch._check(starts.shape[0] > 0, lambda: f"{op}: starts must have B + 1 entries, got none")
    operand_sizes(op, {"B": starts.shape[0] - 1}, eigenvalues=(eigenvalues, None), **others)


def _bend_save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    keep(ctx)


def _bend_backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None, None]:
    if grad is not None:
        raise _no_further_derivative()
    return None, None, None, None


def _bend_jvp(ctx: Any, *tangents: Tensor | None) -> None:
    if tangents[3] is not None:
        raise _no_further_derivative()


def _no_further_derivative() -> RuntimeError:
    return RuntimeError(
        "kron_evidence is differentiable twice in value and once in slope and effective, but a further derivative was asked for; use "
        "kron_evidence_torch, which has every derivative and stores the products of eigenvalues."
    )


_bend = differentiable(
    "kron_evidence_bend",
    fake=_bend_fake,
    save=_bend_save,
    backward=_bend_backward,
    jvp=_bend_jvp,
)
_evidence = differentiable(
    "kron_evidence",
    fake=_evidence_fake,
    save=_evidence_save,
    backward=_evidence_backward,
    jvp=_evidence_jvp,
)


def kernel_cases() -> list[KernelCase]:
    def network() -> tuple[Tensor, ...]:  # eigenvalues of two tensors, square norms, log precisions
        sides = (normal(3, 17), normal(1, 9), normal(1, 300), normal(1, 70))
        return *(side.square() + 0.1 for side in sides), normal(2).square(), normal(2)

    def value(function: Callable[..., KronEvidence]) -> Callable[..., KronEvidence]:
        return lambda l, m, n, o, *rest: function(pack_spectra([(l, m), (n, o)]), *rest)

    def second(function: Callable[..., KronEvidence]) -> Callable[..., Tensor]:
        def call(*inputs: Tensor) -> Tensor:
            leaf = inputs[-1].requires_grad_()
            return torch.autograd.grad(value(function)(*inputs[:-1], leaf)[1].sum(), leaf)[0]

        return call

    op, reference = kron_evidence, kron_evidence_torch
    return [
        *cases("kron_evidence", network, value(op), value(reference)),
        *cases("kron_evidence second derivative", network, second(op), second(reference)),
    ]

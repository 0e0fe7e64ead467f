"""Points of the plane, copies of them that are turned about the origin, and the evidence of a small network that averages over these."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.augment import Augment, AveragedFunction

NOISE = 0.06  # standard deviation of the rings
FACTORS = ("full", "kron", "second")
UPDATES, TOLERANCE = 200, 1e-6  # of a precision
LOWEST, HIGHEST = 1e-6, 1e6


class Turn(Augment):
    """Turned copies: ``(N, 2) -> (N, S, 2)``, by up to ``rotation`` radians either way.

    Args:
        n_samples, init, sampling: of :class:`ella_cuda.augment.Augment`.
    """

    def __init__(self, n_samples: int, init: float, sampling: str = "grid") -> None:
        limits = {"rotation": math.pi}
        super().__init__(n_samples, ("rotation",), init, sampling, "raw", limits=limits, dtype=torch.float64)

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        angle = (eps * eta)[..., 0]
        cosine, sine = angle.cos(), angle.sin()
        across, up = x[:, None, 0], x[:, None, 1]
        return torch.stack([cosine * across - sine * up, sine * across + cosine * up], 2)


class Points(NamedTuple):
    """Inputs ``(N, 2)``, float64, and classes ``(N,)``."""

    x: Tensor
    y: Tensor


def rings(count: int, arc: float, seed: int) -> Points:
    """Noisy points under an arc in degrees: half are of class 0, at radius 1/2; of class 1 a third is at the centre, the others at radius
    1."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(count)
    y = place % 2
    radius = torch.where(y == 0, 0.5, torch.where(place % 6 == 1, 0.0, 1.0)).double()
    angle = (torch.rand(count, generator=generator, dtype=torch.float64) - 0.5) * math.radians(arc)
    x = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return Points(x + NOISE * torch.randn(count, 2, generator=generator, dtype=torch.float64), y)


def network(width: int, seed: int) -> nn.Sequential:
    """2-width-2, tanh, float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)).double()


def curvature(
    model: AveragedFunction, points: Points, raw: Tensor, factors: str
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    r"""Of an averaged :func:`network`, in the graph of ``raw``: the log likelihood, and the blocks of the curvature, Kronecker products.

    With "full" the one block is the matrix :math:`\sum_n \bar J_n^T \Lambda_n \bar J_n` of means over copies. With "kron" each layer's
    block is the product of the second moments of means over copies, as :class:`ella_cuda.laplace.KronLaplace` has it. With "second" it is
    that of second moments over copies too, as if copies were data points: this is wrong, and here to show what comes of it.

    Args:
        model: of :class:`Turn` and :func:`network`.
        points: the data.
        raw: amounts, as ``model.augment.raw``.
        factors: of :data:`FACTORS`.

    Raises:
        ValueError: another word for factors.
    """
    if factors not in FACTORS:
        raise ValueError(f"factors must be one of {', '.join(FACTORS)}, got {factors!r}.")
    (first, _, second), (x, y) = model.network, points
    copies = model.augment.transform(x, model.augment.draw(), raw)  # (N, S, 2)
    hidden = first(copies)
    inputs = copies, hidden.tanh()
    outputs = second(inputs[1])
    mean = outputs.mean(1)
    p = mean.softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]  # root root^T is the likelihood's Hessian
    columns = [
        torch.autograd.grad(mean, [hidden, outputs], root[:, :, k], retain_graph=True, create_graph=raw.requires_grad)
        for k in range(root.shape[2])
    ]
    one, blocks = torch.ones(1, 1, dtype=x.dtype), []
    if factors == "full":
        rows = []
        for gradients in columns:
            parts = []
            for g, a in zip(gradients, inputs, strict=True):  # each copy's gradients have the factor 1/S
                parts += [torch.einsum("nsi,nsj->nij", g, a).flatten(1), g.sum(1)]
            rows.append(torch.cat(parts, 1))
        jacobian = torch.cat(rows)
        blocks.append((one, jacobian.T @ jacobian))
    for i, a in enumerate(inputs) if factors != "full" else ():
        if factors == "kron":
            rows, gradients = a.mean(1), [column[i].sum(1) for column in columns]
            inner, outer = rows.T @ rows / len(x), sum(g.T @ g for g in gradients)
        else:
            rows, gradients = a.flatten(0, 1), [column[i].flatten(0, 1) for column in columns]
            inner, outer = rows.T @ rows / len(rows), sum(g.T @ g for g in gradients) * copies.shape[1]
        blocks += [(inner, outer), (one, outer)]  # of weight and bias
    return -F.cross_entropy(mean, y, reduction="sum"), blocks


def evidence(model: AveragedFunction, points: Points, raw: Tensor, precision: float, factors: str) -> Tensor:
    """The Laplace evidence, in the graph of ``raw``, weights held; see :func:`curvature`.

    Args:
        precision: one of all parameters.
    """
    total, blocks = curvature(model, points, raw, factors)
    for inner, outer in blocks:
        block = torch.kron(inner, outer) / precision
        total = total - 0.5 * torch.logdet(block + torch.eye(len(block), dtype=block.dtype))
    return total - 0.5 * precision * square_norm(model)


def best_precision(model: AveragedFunction, points: Points, factors: str) -> float:
    """The one with the most evidence at the model's weights and angle, by MacKay's fixed point."""
    _, blocks = curvature(model, points, model.augment.raw, factors)
    with torch.no_grad():
        sides = [[torch.linalg.eigvalsh(side).clamp(min=0) for side in block] for block in blocks]
        values = torch.cat([torch.outer(*block).flatten() for block in sides])
        norm, precision = square_norm(model), torch.ones((), dtype=torch.float64)
        for _ in range(UPDATES):
            before = precision
            precision = ((values / (values + precision)).sum() / norm).clamp(LOWEST, HIGHEST)
            if (precision / before - 1).abs() < TOLERANCE:
                break
    return precision.item()


def square_norm(model: AveragedFunction) -> Tensor:
    """Of all parameters."""
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()

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


def evidence(model: AveragedFunction, points: Points, raw: Tensor, precision: Tensor, factors: str) -> Tensor:
    r"""The Laplace evidence of an averaged :func:`network`, in the graph of ``raw`` and ``precision``, weights held.

    With "full" the curvature is the matrix :math:`\sum_n \bar J_n^T \Lambda_n \bar J_n` of means over copies. With "kron" each layer's
    block is the Kronecker product of the second moments of means over copies, as :class:`ella_cuda.laplace.KronLaplace` has it. With
    "second" it is that of second moments over copies too, as if copies were data points: this is wrong, and here to show what comes of it.

    Args:
        model: of :class:`Turn` and :func:`network`.
        points: the data.
        raw: amounts, as ``model.augment.raw``. precision: one of all parameters, 0-dim.
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
        torch.autograd.grad(mean, [hidden, outputs], root[:, :, k], create_graph=True) for k in range(root.shape[2])
    ]
    norms = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    total = -F.cross_entropy(mean, y, reduction="sum") - 0.5 * precision * norms
    if factors == "full":
        rows = []
        for gradients in columns:
            parts = []
            for g, a in zip(gradients, inputs, strict=True):  # each copy's gradients have the factor 1/S
                parts += [torch.einsum("nsi,nsj->nij", g, a).flatten(1), g.sum(1)]
            rows.append(torch.cat(parts, 1))
        jacobian = torch.cat(rows)
        return total - 0.5 * _log_det(jacobian.T @ jacobian, precision)
    for i, a in enumerate(inputs):
        if factors == "kron":
            a, gradients = a.mean(1), [column[i].sum(1) for column in columns]
            inner, outer = a.T @ a / len(x), sum(g.T @ g for g in gradients)
        else:
            a, gradients = a.flatten(0, 1), [column[i].flatten(0, 1) for column in columns]
            inner, outer = a.T @ a / len(a), sum(g.T @ g for g in gradients) * copies.shape[1]
        total = total - 0.5 * _log_det(torch.kron(inner, outer), precision) - 0.5 * _log_det(outer, precision)
    return total


def _log_det(curvature: Tensor, precision: Tensor) -> Tensor:
    """Of ``curvature / precision + I``."""
    return torch.logdet(curvature / precision + torch.eye(len(curvature), dtype=curvature.dtype))

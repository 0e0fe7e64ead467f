"""One step on the hyperparameters of a linearised deep image prior, and its parts that kernels could take.

28 x 28 pixels, 20 angles of 41 detectors, a U-Net of 16 channels. The evidence with its gradient in 13 variances and lengthscales and the
noise: ours is a sum of 33 matrices that are there before, a Cholesky factorisation and an inverse; beside it, as a user would write it, the
covariance is made anew of the projected Jacobian and the prior of filters, in float64, and autograd goes back through both. Then what takes
part in it: the sum of the matrices, which data in memory bound; filters of the Jacobian's rows times the matrices of their blocks; the
expected total variation and its derivatives by TV-PredCP's closed form, beside an estimate by 500 images as the authors take it.

    pytest benchmarks/bench_tomography.py --threads 1
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet, total_variation, total_variation_gaussian
from ella_cuda.tomography.evidence import LogNormalTerms

SIDE, ANGLES, CHANNELS, SAMPLES = 28, 20, 16, 500
OURS = "ella_cuda"


@functools.cache
def linearised(device: torch.device) -> LinearisedDIP:
    torch.manual_seed(0)
    rays = RayTransform(SIDE, ANGLES)
    place = torch.linspace(-1, 1, SIDE)
    truth = ((place[:, None].square() + 2 * place.square()) < 0.6).float().to(device)
    y = rays.forward(truth)
    y = y + 0.05 * y.abs().mean() * torch.randn_like(y)
    dip = LinearisedDIP(UNet(channels=CHANNELS).to(device), rays, tv_weight=1e-4, method="dense")
    dip.reconstruct(y, n_steps=200, lr=1e-3, progress_bar=False)
    return dip.linearise()


@functools.cache
def projected_jacobian(device: torch.device) -> Tensor:
    """A J, ``(n, P)``, float64."""
    dip = linearised(device)
    units = torch.eye(SIDE * SIDE, device=device).view(-1, SIDE, SIDE)
    return dip._measured.operator @ dip._image.pull(units).double()


def raw(dip: LinearisedDIP) -> dict[str, Tensor]:
    return {key: value.detach().clone().requires_grad_() for key, value in dip._raw.items()}


def ours(dip: LinearisedDIP, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    weights = dip.prior.weights(leaves["log_variance"], leaves["log_lengthscale"])
    value = LogNormalTerms.apply(dip._measured, weights, leaves["log_noise"].exp(), dip._linear_residual())
    return value, *torch.autograd.grad(value, list(leaves.values()))


def written_out(dip: LinearisedDIP, leaves: dict[str, Tensor], aj: Tensor) -> tuple[Tensor, ...]:
    """The same of A J and S, with autograd through the assembly and the Cholesky factor."""
    taps = dip.prior.tap_covariances(dip.prior.weights(leaves["log_variance"], leaves["log_lengthscale"]))
    k = dip.prior.multiply(aj, taps) @ aj.T + leaves["log_noise"].exp() * torch.eye(
        len(aj), dtype=aj.dtype, device=aj.device
    )
    factor, r = torch.linalg.cholesky(k), dip._linear_residual()
    if dip._measured.basis is not None:
        r = dip._measured.basis.T @ r
    white = torch.linalg.solve_triangular(factor, r[:, None], upper=False)
    value = 2 * factor.diagonal().log().sum() + white.square().sum()
    if dip._measured.basis is not None:
        left = dip._linear_residual().square().sum() - r.square().sum()
        more = dip._measured.n_data - len(r)
        value = value + more * leaves["log_noise"] + left / leaves["log_noise"].exp()
    return value, *torch.autograd.grad(value, list(leaves.values()))


@pytest.mark.parametrize("who", [OURS, "torch, A J and autograd"])
def test_evidence(who, time, device):
    dip = linearised(device)
    leaves, aj = raw(dip), projected_jacobian(device)
    for found, expected in zip(ours(dip, leaves), written_out(dip, leaves, aj), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    n, terms = len(dip._measured.operator), len(dip._measured.terms)
    call = (lambda: ours(dip, leaves)) if who == OURS else (lambda: written_out(dip, leaves, aj))
    time(
        call,
        work=f"evidence and gradient, {n} measurements",
        who=who,
        flops=n**3,
        bytes=2 * terms * n * n * 8,
        rounds=3,
    )


def test_sum_of_matrices(time, device):
    """What a kernel that makes the covariance of its 33 terms could save is what is above the floor."""
    dip = linearised(device)
    weights = dip._weights(dip._raw)
    terms = dip._measured.terms
    time(
        lambda: weights @ terms.flatten(1),
        work=f"sum of {len(terms)} matrices of {len(terms[0])} rows",
        who=OURS,
        flops=2 * terms.numel(),
        bytes=terms.numel() * 8,
    )


@pytest.mark.parametrize("who", [OURS, "torch.einsum"])
def test_block_prior(who, time, device):
    """Rows of the projected Jacobian times the prior's covariance."""
    dip, aj = linearised(device), projected_jacobian(device)
    taps = dip.prior.tap_covariances(dip._weights(dip._raw))

    def einsum() -> Tensor:
        parts = zip(dip.prior.split(aj), taps, strict=True)
        return torch.cat([torch.einsum("sfa,ab->sfb", part, k).flatten(1) for part, k in parts], 1)

    time(
        (lambda: dip.prior.multiply(aj, taps)) if who == OURS else einsum,
        work=f"prior times {len(aj)} rows of {aj.shape[1]} weights",
        who=who,
        flops=2 * sum(len(aj) * b.n_filters * b.n_taps**2 for b in dip.prior.blocks),
        bytes=2 * aj.numel() * 8,
    )


@pytest.mark.parametrize("who", [OURS, "torch, 500 images"])
def test_tv_prior(who, time, device):
    """The expected total variation of every block and its derivative in every lengthscale, by the closed form or by samples of images."""
    dip = linearised(device)
    terms, leaves = dip._measured.difference_terms(), raw(dip)

    def closed() -> tuple[Tensor, ...]:
        value = dip._tv_prior(leaves, terms, 1.0)
        return torch.autograd.grad(value, [leaves["log_variance"], leaves["log_lengthscale"]])

    covariance = dip._measured.prior_covariance(dip._weights(dip._raw))
    root = torch.linalg.cholesky(
        covariance + 1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance), device=device)
    )
    mean = dip.reconstruction.double()

    def sampled() -> Tensor:  # of all blocks together, and no derivative: less than what is asked for
        drawn = torch.randn(SAMPLES, len(root), dtype=torch.float64, device=device) @ root.T
        return total_variation(mean + drawn.view(-1, SIDE, SIDE)).mean()

    exact = total_variation_gaussian(mean, covariance).item()
    assert math.isclose(sampled().item(), exact, rel_tol=0.1)
    call = closed if who == OURS else sampled
    pairs = terms.shape[1]
    time(
        call,
        work="expected total variation",
        who=who,
        flops=20 * pairs * len(dip.prior.smooth),
        bytes=terms.numel() * 8,
    )

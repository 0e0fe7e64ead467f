"""Anisotropic total variation, of images and in expectation of Gaussian ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def total_variation(x: Tensor) -> Tensor:
    """The sum of absolute differences between neighbours along both axes: ``(..., H, W) -> (...)``.

    Raises:
        ValueError: x has no two axes.
    """
    _check_image("total_variation", "x", x)
    return differences(x).abs().sum(-1)


def differences(x: Tensor) -> Tensor:
    """Of neighbours, along the first axis and then along the second: ``(..., H, W) -> (..., (H - 1) W + H (W - 1))``."""
    return torch.cat([x.diff(dim=-2).flatten(-2), x.diff(dim=-1).flatten(-2)], -1)


def difference_variances(covariance: Tensor, image_shape: tuple[int, int]) -> Tensor:
    """Of neighbours in the order of :func:`differences`, from the image's covariance: ``(..., d, d) -> (..., pairs)``. Any quadratic form
    will do."""
    first, second = neighbours(image_shape, covariance.device)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    crossed = covariance[..., first, second] + covariance[..., second, first]
    return diagonal[..., first] + diagonal[..., second] - crossed


def neighbours(image_shape: tuple[int, int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Numbers of the pixels of every pair, in the order of :func:`differences`."""
    number = torch.arange(math.prod(image_shape), device=device).view(image_shape)
    first = torch.cat([number[:-1].flatten(), number[:, :-1].flatten()])
    second = torch.cat([number[1:].flatten(), number[:, 1:].flatten()])
    return first, second


def expected_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    r"""E|d| of :math:`d \sim N(m, v)`, elementwise: :math:`\sqrt{2v/\pi}\, e^{-m^2/2v} + m\, \mathrm{erf}(m/\sqrt{2v})`; :math:`|m|` where
    v is 0, or so small beside :math:`m^2` that the exponential is 0. Differentiable twice where v is positive."""
    tiny = torch.finfo(variance.dtype).tiny
    known = (variance <= tiny) | (mean.square() >= -2 * math.log(tiny) * variance)
    v = torch.where(known, 1.0, variance)  # a branch that is not taken has finite derivatives
    mean, outside = torch.where(known, 0.0, mean), mean.abs()
    spread = (2 * v / math.pi).sqrt() * torch.exp(-(mean * mean) / (2 * v)) + mean * torch.erf(mean / (2 * v).sqrt())
    return torch.where(known, outside, spread)


def total_variation_gaussian(mean: Tensor, covariance: Tensor) -> Tensor:
    r"""The expected anisotropic total variation of a Gaussian image, in closed form: ``(..., H, W), (..., H*W, H*W) -> (...)``.

    Every difference of neighbours is Gaussian, with mean :math:`m_i - m_j` and variance :math:`K_{ii} + K_{jj} - 2 K_{ij}`, and the
    expectation of its absolute value has a closed form; TV is their sum. No sampling; differentiable twice in both arguments.

    Args:
        mean: of the pixels, float32 or float64.
        covariance: of the pixels, row after row; its leading axes broadcast against those of ``mean``.

    Raises:
        ValueError: the covariance does not have the image's size, or a difference has a negative variance beyond rounding.

    Source: the folded normal's mean; Antoran, Barbano et al., TMLR 2023, section 4.2, has the expectation by sampling.
    """
    _check_image("total_variation_gaussian", "mean", mean)
    shape = mean.shape[-2], mean.shape[-1]
    count = math.prod(shape)
    if covariance.dim() < 2 or covariance.shape[-2:] != (count, count):
        raise ValueError(
            f"total_variation_gaussian: covariance must have shape (..., {count}, {count}) for a {shape} image, got "
            f"{tuple(covariance.shape)}."
        )
    variance = difference_variances(covariance, shape)
    size = covariance.diagonal(dim1=-2, dim2=-1).abs().amax() if count else covariance.new_zeros(())
    if variance.numel() and not variance.amin() >= -(torch.finfo(variance.dtype).eps ** 0.5) * size:
        raise ValueError(
            f"total_variation_gaussian: covariance must be positive semi-definite, got a difference of variance {variance.amin().item():.3g}."
        )
    return expected_absolute(differences(mean), variance).sum(-1)


def _check_image(where: str, name: str, value: Tensor) -> None:
    if value.dim() < 2:
        raise ValueError(f"{where}: {name} must have shape (..., H, W), got {tuple(value.shape)}.")

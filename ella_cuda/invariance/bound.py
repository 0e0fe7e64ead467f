"""The multi-sample lower bound on the evidence of a function averaged over transformations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.invariance.bayesian_linear import BayesianLinear
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.training.checks import positive, positive_integer

LIKELIHOODS = ("classification", "regression")


def multisample_elbo(
    layer: BayesianLinear,
    features: Tensor,
    y: Tensor,
    likelihood: str = "classification",
    *,
    n_data: int | None = None,
    sigma_noise: float | Tensor = 1.0,
    n_samples: int = 10,
    unbiased: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""A lower bound on :math:`\log p(y)`, in nats of all data, from a batch, ``()``; differentiable in whatever has a graph.

    .. math:: \frac{N_\mathrm{data}}{N} \sum_n E_{q(w)} \log p\Big(y_n \Big|\; \frac1S \sum_s \phi(T_s x_n)^T w\Big) - KL(q \| p)

    The likelihood's logarithm is concave, so the bound's expectation over transformations grows with S, to the bound of the averaged
    function. Where all data share the transformations it is a bound for every S.

    "regression" has it in closed form: :math:`-\frac12 \log 2\pi\sigma^2 - [(y - \bar\phi^T\mu)^2 + \bar\phi^T\Sigma\bar\phi]/2\sigma^2`.
    "classification" draws logits from :math:`N(\bar\phi^T\mu_k, \bar\phi^T\Sigma_k\bar\phi)`, so that no weights are drawn.

    Args:
        layer: q and the prior.
        features: means over copies ``(N, D)``, or by copy ``(N, S, D)``, which are averaged.
        y: classes ``(N,)``, int64, or targets ``(N, K)``.
        likelihood: "classification" (softmax) or "regression" (Gaussian).
        n_data: N_data; None is N.
        sigma_noise: standard deviation of targets, one number; a tensor may have a graph.
        n_samples: draws of logits for each data point.
        unbiased: "regression" with features by copy: the square of the mean over copies by products of different copies alone. Where copies
            are drawn independently of each other, the expectation is the same for all S > 1, that of the averaged function. One value is
            then no lower bound.
        generator: of the features' device; None is torch's global one.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: van der Wilk, "Learnable inductive biases in neural networks", 2022, equation 10; van der Ouderaa and van der Wilk, "Learning
    invariant weights in neural networks", UAI 2022. Draws of logits: Kingma, Salimans and Welling, "Variational dropout and the local
    reparameterization trick", NeurIPS 2015. The unbiased square is derived here.
    """
    check_choice("multisample_elbo: likelihood", likelihood, LIKELIHOODS)
    if features.dim() not in (2, 3) or not features.numel():
        raise ValueError(
            f"multisample_elbo: features must be (N, D) or (N, S, D), not empty, got {tuple(features.shape)}."
        )
    positive_integer("n_samples", n_samples, "multisample_elbo")
    n_data = len(features) if n_data is None else positive_integer("n_data", n_data, "multisample_elbo")
    if unbiased and (likelihood != "regression" or features.dim() != 3 or features.shape[1] < 2):
        raise ValueError(
            "multisample_elbo: unbiased=True needs likelihood='regression' and features by copy, (N, S, D) with S > 1, got "
            f"likelihood={likelihood!r} and {tuple(features.shape)}."
        )
    check_targets("multisample_elbo", (len(features), layer.out_features), features.dtype, y, likelihood)
    if likelihood == "classification":
        mean, variance = layer.moments(features if features.dim() == 2 else features.mean(1))
        fit = _softmax(mean, variance, y, n_samples, generator)
    else:
        fit = _gaussian(layer, features, y, _sigma(sigma_noise, features), unbiased)
    return n_data / len(features) * fit - layer.kl()


def _sigma(sigma_noise: float | Tensor, like: Tensor) -> Tensor:
    if not isinstance(sigma_noise, Tensor):
        sigma_noise = positive("sigma_noise", sigma_noise, "multisample_elbo")
    elif sigma_noise.numel() != 1:
        raise ValueError(f"multisample_elbo: sigma_noise must be one number, got shape {tuple(sigma_noise.shape)}.")
    return torch.as_tensor(sigma_noise, dtype=like.dtype, device=like.device).reshape(())


def _softmax(mean: Tensor, variance: Tensor, y: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """The sum over data of expected log probabilities, by draws of logits."""
    on = mean.device if generator is None else generator.device
    drawn = torch.randn(count, *mean.shape, generator=generator, device=on, dtype=mean.dtype).to(mean.device)
    logits = mean + (variance + torch.finfo(variance.dtype).tiny).sqrt() * drawn  # at 0 the root has no derivative
    return -F.cross_entropy(logits.flatten(0, 1), y.repeat(count), reduction="sum") / count


def _gaussian(layer: BayesianLinear, features: Tensor, y: Tensor, sigma: Tensor, unbiased: bool) -> Tensor:
    """The sum over data and outputs of expected log densities."""
    if unbiased:
        means, scaled, s = layer(features), layer.scaled(features), features.shape[1]
        square = _off_diagonal(means, s) + _off_diagonal(scaled, s).sum(-1)
        quadratic = y.square() - 2 * y * means.mean(1) + square
    else:
        mean, variance = layer.moments(features if features.dim() == 2 else features.mean(1))
        quadratic = (y - mean).square() + variance
    return log_normal(quadratic, sigma)


def log_normal(square: Tensor, sigma: Tensor) -> Tensor:
    """The sum of Gaussian log densities with that standard deviation, of squares of distances from the mean."""
    return -(square / (2 * sigma**2) + sigma.log() + 0.5 * math.log(2 * math.pi)).sum()


def _off_diagonal(values: Tensor, s: int) -> Tensor:
    """The mean of products of different copies, ``(N, S, ...) -> (N, ...)``."""
    return (s * values.mean(1).square() - values.square().mean(1)) / (s - 1)


def check_targets(where: str, shape: tuple[int, int], dtype: torch.dtype, y: Tensor, likelihood: str) -> None:
    """TypeError or ValueError unless y are targets of functions' values of a shape (N, K) and dtype."""
    n, k = shape
    if likelihood == "regression":
        if y.shape != (n, k) or y.dtype != dtype:
            raise ValueError(f"{where}: y must be targets {(n, k)}, {dtype}, got {tuple(y.shape)}, {y.dtype}.")
    elif y.shape != (n,) or y.dtype != torch.int64:
        raise ValueError(f"{where}: y must be classes {(n,)}, torch.int64, got {tuple(y.shape)}, {y.dtype}.")
    elif y.min() < 0 or y.max() >= k:
        raise ValueError(f"{where}: y must be classes from 0 to {k - 1}, got {int(y.min())} to {int(y.max())}.")

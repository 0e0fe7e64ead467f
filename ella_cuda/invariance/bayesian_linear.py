"""A linear layer whose weights have a Gaussian posterior, by which a bound on the evidence is had."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda.laplace.parameters import check_choice
from ella_cuda.ops._precision import without_autocast
from ella_cuda.training.checks import positive, positive_integer

POSTERIORS = ("full", "diag")
START = 0.1  # standard deviation of q over the prior's, before training


class BayesianLinear(nn.Module):
    r"""K functions :math:`f_k = \phi^T w_k` of D features, whose weights have a Gaussian q: ``(N, D) -> (N, K)``.

    .. math:: w_k \sim N(0, \delta^{-1} I), \qquad q(w_k) = N(\mu_k, \Sigma_k)

    q is a variational posterior: independent over outputs, with a covariance of its own for each, :math:`\Sigma_k = L_k L_k^T` ("full") or
    diagonal ("diag"). The prior has one precision :math:`\delta = 1/s_p^2`, which a bound on the evidence may learn. There is no bias:
    append a feature that is 1 for one.

    Parameters:
        mean: ``(K, D)``. log_scale: ``(K, D)``, logarithms of L's diagonal. lower: ``(K, D, D)``, of which the part below the diagonal is
            L's; "full" alone. log_prior_precision: ``()``.

    Args:
        in_features, out_features: D and K.
        q: "full" or "diag".
        prior_precision: :math:`\delta` at the start.
        device, dtype: of the parameters; None is torch's default.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: van der Ouderaa and van der Wilk, "Learning invariant weights in neural networks", UAI 2022; van der Wilk, "Learnable inductive
    biases in neural networks", 2022, equations 8 to 10. The closed forms are those of Gaussian distributions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        q: str = "full",
        *,
        prior_precision: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = positive_integer("in_features", in_features, "BayesianLinear")
        self.out_features = positive_integer("out_features", out_features, "BayesianLinear")
        self.q = check_choice("BayesianLinear: q", q, POSTERIORS)
        log_precision = math.log(positive("prior_precision", prior_precision, "BayesianLinear"))
        kind = {"device": device, "dtype": dtype}
        shape = (self.out_features, self.in_features)
        self.mean = nn.Parameter(torch.zeros(shape, **kind))
        self.log_scale = nn.Parameter(torch.full(shape, math.log(START) - log_precision / 2, **kind))
        if q == "full":
            self.lower = nn.Parameter(torch.zeros(*shape, self.in_features, **kind))
        self.log_prior_precision = nn.Parameter(torch.tensor(log_precision, **kind))

    @property
    def prior_precision(self) -> Tensor:
        r""":math:`\delta`, ``()``, differentiable."""
        return self.log_prior_precision.exp()

    @property
    def scale_tril(self) -> Tensor:
        """L, ``(K, D, D)``: lower triangular; of "diag" a diagonal matrix."""
        diagonal = torch.diag_embed(self.log_scale.exp())
        return self.lower.tril(-1) + diagonal if self.q == "full" else diagonal

    def forward(self, features: Tensor) -> Tensor:
        """The mean of f, ``(N, D) -> (N, K)``."""
        self._check(features)
        with without_autocast(features.device.type):
            return features @ self.mean.T

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f under q, each ``(..., D) -> (..., K)``.

        Raises:
            TypeError, ValueError: features are no tensor ``(..., D)`` of the layer's dtype and device.
        """
        mean = self(features)
        return mean, self.scaled(features).square().sum(-1)

    def scaled(self, features: Tensor) -> Tensor:
        r""":math:`L_k^T \phi`, whose square norm is f's variance: ``(..., D) -> (..., K, D)``."""
        self._check(features)
        if self.q == "diag":
            return features[..., None, :] * self.log_scale.exp()
        k, d = self.mean.shape
        with without_autocast(features.device.type):
            return (features @ self.scale_tril.transpose(0, 1).reshape(d, k * d)).unflatten(-1, (k, d))

    def kl(self) -> Tensor:
        r"""KL(q || prior) in nats, summed over outputs, ``()``:

        .. math:: \frac12 \sum_k [\delta\, \mathrm{tr}\, \Sigma_k + \delta\, \mu_k^T \mu_k - D - D \log\delta - \log|\Sigma_k|]
        """
        square = self.log_scale.mul(2).exp().sum()
        if self.q == "full":
            square = square + self.lower.tril(-1).square().sum()
        count = self.mean.numel()
        norm = square + self.mean.square().sum()
        return 0.5 * (self.prior_precision * norm - count - count * self.log_prior_precision) - self.log_scale.sum()

    def _check(self, features: Tensor) -> None:
        if not features.dim() or features.shape[-1] != self.in_features:
            raise ValueError(
                f"BayesianLinear: features must have shape (..., {self.in_features}), got {tuple(features.shape)}."
            )
        if features.dtype != self.mean.dtype or features.device != self.mean.device:
            raise ValueError(
                f"BayesianLinear: features are {features.dtype} on {features.device}, the weights {self.mean.dtype} on {self.mean.device}; "
                "convert one with .to()."
            )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, q={self.q!r}"

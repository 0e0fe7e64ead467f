"""A shallow network: features, and a Bayesian layer on them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ella_cuda.augment import Augment
from ella_cuda.invariance.bayesian_linear import BayesianLinear
from ella_cuda.invariance.bound import LIKELIHOODS, multisample_elbo
from ella_cuda.invariance.filter_bank import InvariantFilterBank
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.training.checks import positive, positive_integer

INDEPENDENT_COPIES = ("independent", "shared")  # samplings whose S draws are independent of each other


class ShallowNetwork(nn.Module):
    """Features with weights of their own, a :class:`BayesianLinear` on them, a likelihood: ``(N, ...) -> (N, K)``, f's mean.

    Parameters:
        log_sigma_noise: ``()``, "regression" alone.

    Args:
        features: a module ``(N, ...) -> (N, D)``, such as :class:`InvariantFilterBank`.
        layer: on them.
        likelihood: "classification" (softmax) or "regression" (Gaussian).
        sigma_noise: standard deviation of targets at the start.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: van der Ouderaa and van der Wilk, "Learning invariant weights in neural networks", UAI 2022.
    """

    def __init__(
        self,
        features: nn.Module,
        layer: BayesianLinear,
        likelihood: str = "classification",
        *,
        sigma_noise: float = 1.0,
    ) -> None:
        super().__init__()
        self.likelihood = check_choice("ShallowNetwork: likelihood", likelihood, LIKELIHOODS)
        self.features, self.layer = features, layer
        log_sigma = layer.mean.new_tensor(math.log(positive("sigma_noise", sigma_noise, "ShallowNetwork")))
        self.register_parameter("log_sigma_noise", nn.Parameter(log_sigma) if likelihood == "regression" else None)

    @property
    def sigma_noise(self) -> Tensor | None:
        """``()``, differentiable; None of classes."""
        return None if self.log_sigma_noise is None else self.log_sigma_noise.exp()

    def forward(self, x: Tensor) -> Tensor:
        """The mean of f, ``(N, K)``: logits, or the targets' mean."""
        return self.layer(self.features(x))

    def elbo(
        self,
        x: Tensor,
        y: Tensor,
        n_data: int | None = None,
        *,
        n_samples: int = 10,
        unbiased: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """:func:`multisample_elbo` of a batch; ``unbiased`` needs features of :class:`InvariantFilterBank`, whose draws are independent or
        shared: points of a grid or a Sobol sequence depend on each other."""
        if unbiased:
            self.check_unbiased()
        features = self.features.by_copy(x) if unbiased else self.features(x)
        noise = {} if self.sigma_noise is None else {"sigma_noise": self.sigma_noise}
        options = {"n_samples": n_samples, "unbiased": unbiased, "generator": generator}
        return multisample_elbo(self.layer, features, y, self.likelihood, n_data=n_data, **noise, **options)

    def check_unbiased(self) -> None:
        """ValueError where ``unbiased=True`` is none for this network."""
        if self.likelihood != "regression":
            raise ValueError(f"ShallowNetwork: unbiased=True needs likelihood='regression', got {self.likelihood!r}.")
        if not isinstance(self.features, InvariantFilterBank):
            raise ValueError(
                f"ShallowNetwork: unbiased=True needs features of InvariantFilterBank, got {type(self.features).__name__}."
            )
        if (sampling := self.features.augment.sampling) not in INDEPENDENT_COPIES:
            raise ValueError(
                f"ShallowNetwork: unbiased=True needs copies that are drawn independently of each other, by sampling "
                f"{' or '.join(map(repr, INDEPENDENT_COPIES))}, got {sampling!r}."
            )

    @torch.no_grad()
    def predict(
        self, x: Tensor, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities ``(N, K)``, means over draws of logits; of "regression" mean and variance of targets, each ``(N, K)``."""
        positive_integer("n_samples", n_samples, "ShallowNetwork")
        mean, variance = self.layer.moments(self.features(x))
        if self.sigma_noise is not None:
            return mean, variance + self.sigma_noise**2
        on = mean.device if generator is None else generator.device
        total = torch.zeros_like(mean)
        for _ in range(n_samples):
            drawn = torch.randn(mean.shape, generator=generator, device=on, dtype=mean.dtype).to(mean.device)
            total += (mean + variance.sqrt() * drawn).softmax(1)
        return total / n_samples

    def augments(self) -> Iterator[Augment]:
        """Those among the features' modules."""
        return (module for module in self.features.modules() if isinstance(module, Augment))

    def hyperparameters(self) -> dict[str, float]:
        """What the bound learns beside weights: ``prior_precision``, ``sigma_noise`` of "regression", and amounts by generator, after the
        module's name and a dot where two augmentations have an amount of the same name."""
        found = {"prior_precision": self.layer.prior_precision.item()}
        if self.sigma_noise is not None:
            found["sigma_noise"] = self.sigma_noise.item()
        amounts = [
            (module, name, value)
            for module, augment in self.features.named_modules()
            if isinstance(augment, Augment)
            for name, value in augment.amounts().items()
        ]
        names = [name for _, name, _ in amounts]
        return found | {f"{m}.{name}" if names.count(name) > 1 else name: value for m, name, value in amounts}

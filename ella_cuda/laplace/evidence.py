"""Interface of an evidence: what the choice of hyperparameters and the linear mode need of a Laplace approximation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs
from ella_cuda.laplace.likelihoods import Likelihood
from ella_cuda.laplace.posterior import Posterior


class Mean(NamedTuple):
    """What the evidence takes from the parameters that stand for the posterior's mean.

    Attributes:
        statistic: what the log likelihood is a function of, 0-dim float64.
        square_norms: of each parameter tensor, the squared distance from the prior's mean, float64.
    """

    statistic: Tensor
    square_norms: Tensor


class Evidence(Protocol):
    """A fitted approximation, as :class:`ella_cuda.laplace.KronLaplace` documents these attributes and methods."""

    model: nn.Module
    likelihood: str
    likelihood_function: Likelihood
    parameter_names: list[str]
    n_params: int
    n_data: int
    n_targets: int
    temperature: float
    prior_precision: Tensor
    prior_mean: Tensor
    sigma_noise: Tensor
    posterior_precision: Posterior
    dict_key_x: str
    dict_key_y: str
    _linear: Any  # a LinearMode once it was found

    def batch_of(self, batch: Any, where: str) -> tuple[Inputs, Tensor]: ...

    def data_weight(self) -> Tensor: ...

    def effective_by_tensor(self) -> Tensor: ...

    def evidence_at(self, log_precision: Tensor, log_sigma: Tensor | None = None, at: str = "network") -> Tensor: ...

    def free_elements(self) -> Tensor | None: ...

    def log_marginal_likelihood(
        self, prior_precision: Any = None, sigma_noise: Any = None, at: str = "network"
    ) -> Tensor: ...

    def mean_at(self, at: str) -> Mean: ...

    def norms(self, parameters: Mapping[str, Tensor], mean: Tensor | None = None) -> Tensor: ...

    def predictions_at(
        self, prior_precisions: Tensor, x: Any, pred_type: str, link_approx: str, n_samples: int
    ) -> Iterator[Any]: ...

    def prior_covariance(self, x: Inputs) -> Tensor: ...

"""How uncertain predictions are: by noise in the data, and by what the data leave open about the parameters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ella_cuda.laplace.batches import data_points, inputs_on, take
from ella_cuda.laplace.leave_one_out import room
from ella_cuda.modes import running_the_model
from ella_cuda.ops._precision import in_own_precision

if TYPE_CHECKING:
    from ella_cuda.laplace.predictive import Predictive


@dataclasses.dataclass(frozen=True, eq=False)
class Uncertainty:
    """Entropies of predictions, nats, ``(N,)`` each, float64.

    Attributes:
        total: of the predictive.
        aleatoric: of the targets given the parameters, on average: the noise of the data.
    """

    total: Tensor
    aleatoric: Tensor

    @property
    def epistemic(self) -> Tensor:
        """The difference: the mutual information of the target and the parameters, which more data would lower."""
        return self.total - self.aleatoric


@running_the_model
@torch.no_grad()
@in_own_precision
def uncertainty(la: Predictive, x: Any, n_samples: int, generator: torch.Generator | None, mean: str) -> Uncertainty:
    """See :meth:`ella_cuda.laplace.KronLaplace.uncertainty`."""
    la.fitted_model.require_unchanged()
    x, posterior = inputs_on(x, la.fitted_model.device, "uncertainty"), la._predictive_posterior
    found = []
    points, _ = room(la, 1, "uncertainty")
    for begin in range(0, max(data_points(x), 1), points):
        some = take(x, slice(begin, begin + points))
        outputs, (covariance,) = la._moments_under(la.fitted_model.inputs(some), [posterior])
        outputs = (outputs + la._shift(some, mean)).double()
        how = la.sigma_noise.detach(), n_samples, generator
        found.append(la.likelihood_function.uncertainty(outputs, covariance.double(), *how))
    return Uncertainty(*(torch.cat(parts) for parts in zip(*found, strict=True)))

"""Gaussian processes averaged over transformed inputs, with inducing points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda.progress import bar_size
from ella_cuda.training.checkpoint import read_checkpoint, save_checkpoint

JITTER = 1e-6  # of the inducing points' covariance, as a share of the amplitude
NOISE = 0.3  # standard deviation of one-hot targets at the start
LOOKS = 40  # at the amounts during a training
CHUNK = 500  # inputs of the test at a time


class Moments(NamedTuple):
    """Covariances: of inducing values ``(M, M)``, of these and the averaged function ``(M, N)``, variances of the function ``(N,)``."""

    inducing: Tensor
    cross: Tensor
    variance: Tensor


class AveragedProcess(nn.Module):
    r"""A Gaussian process :math:`\bar f(x) = \frac1S \sum_s g(T_s x)` of a process g with the kernel
    :math:`a^2 \exp(-|x - x'|^2 / 2 l^2)`, and values of g, not of :math:`\bar f`, at inducing points: the average is in covariances alone.

    Parameters:
        points: ``(M, D)``. log_amplitude, log_length, log_noise: ``()``.

    Args:
        points: at the start. length: l at the start.

    Source: van der Wilk et al., "Learning invariances using the marginal likelihood", NeurIPS 2018, equations 11 to 14.
    """

    def __init__(self, points: Tensor, length: float) -> None:
        super().__init__()
        self.points = nn.Parameter(points.clone())
        for name, value in (("amplitude", 1.0), ("length", length), ("noise", NOISE)):
            self.register_parameter(f"log_{name}", nn.Parameter(points.new_tensor(math.log(value))))

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        """``(..., N, D), (..., M, D) -> (..., N, M)``."""
        square = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * a @ b.transpose(-1, -2)
        return (2 * self.log_amplitude - 0.5 * square.clamp(min=0) * (-2 * self.log_length).exp()).exp()

    def moments(self, copies: Tensor) -> Moments:
        """Of copies ``(N, S, D)``, float64."""
        n, s = copies.shape[:2]
        points = self.points.double()
        inducing = self.kernel(points, points)
        inducing = inducing + JITTER * (2 * self.log_amplitude).exp() * torch.eye(len(points)).to(inducing)
        cross = self.kernel(copies.flatten(0, 1), self.points).unflatten(0, (n, s)).mean(1).T
        return Moments(inducing, cross.double(), self.kernel(copies, copies).mean((1, 2)).double())

    def bound(self, copies: Tensor, y: Tensor) -> Tensor:
        r"""A lower bound on :math:`\log p(y)` of all K outputs, of the best Gaussian q(u), ``()``; equal to it where inducing values
        determine the function.

        .. math:: \sum_k \log N(y_k; 0, Q + \sigma^2 I) - \frac{K}{2\sigma^2} \mathrm{tr}(K_{ff} - Q), \qquad Q = K_{fu} K_{uu}^{-1} K_{uf}

        Args:
            copies: ``(N, S, D)``. y: targets ``(N, K)``.

        Source: Titsias, "Variational learning of inducing variables in sparse Gaussian processes", AISTATS 2009, equation 9.
        """
        moments, y = self.moments(copies), y.double()
        (n, k), variance = y.shape, (2 * self.log_noise.double()).exp()
        _, scaled, root, mean = self._solved(moments, y)
        left = (moments.variance.sum() - variance * scaled.square().sum()) / variance
        log_determinant = 2 * k * root.diagonal().log().sum() + n * k * variance.log()
        fit = y.square().sum() / variance - mean.square().sum()
        return -0.5 * (n * k * math.log(2 * math.pi) + log_determinant + fit + k * left)

    def predicted(self, copies: Tensor, y: Tensor, others: Iterable[Tensor]) -> Tensor:
        """The mean of the function at other inputs, ``(M, K)``, of whose copies parts ``(m, S, D)`` come one after the other."""
        lower, _, root, mean = self._solved(self.moments(copies), y.double())
        found = []
        for some in others:
            at = torch.linalg.solve_triangular(lower, self.moments(some).cross, upper=False)
            found.append(torch.linalg.solve_triangular(root, at, upper=False).T @ mean)
        return torch.cat(found)

    def _solved(self, moments: Moments, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""L of :math:`K_{uu} = LL^T`, :math:`A = L^{-1} K_{uf} / \sigma`, R of :math:`RR^T = I + AA^T`, and :math:`R^{-1} A y / \sigma`."""
        noise = self.log_noise.double().exp()
        lower = torch.linalg.cholesky(moments.inducing)
        scaled = torch.linalg.solve_triangular(lower, moments.cross, upper=False) / noise
        root = torch.linalg.cholesky(scaled @ scaled.T + torch.eye(len(lower)).to(lower))
        return lower, scaled, root, torch.linalg.solve_triangular(root, scaled @ y / noise, upper=False)


def targets(labels: Tensor, classes: int) -> Tensor:
    """One-hot, with the mean 0 over the classes: ``(N, K)``."""
    return F.one_hot(labels, classes).double() - 1 / classes


def median_distance(points: Tensor) -> float:
    """Between points ``(N, D)``."""
    return torch.pdist(points).median().item()


def climbed(
    value: Callable[[], Tensor],
    groups: Sequence[Mapping[str, Any]],
    steps: int,
    checkpoint: Any,
    state: nn.Module,
    look: Callable[[], Any],
    frozen: Callable[[int], Sequence[int]] = lambda step: (),
    progress: bool = False,
    description: str = "",
) -> list[tuple[int, Any]]:
    """Raise a value by Adam. A killed ascent goes on from its checkpoint.

    Args:
        value: a number with a graph, of draws of torch's global generator, of the device too.
        groups: of the optimizer. steps: of it.
        checkpoint: its file. state: a module that has all that is learned.
        look: what is kept of the state over the steps.
        frozen: of a step, numbers of the groups that it leaves as they are.

    Returns:
        Steps, and what was seen after them.

    Raises:
        FloatingPointError: the value is not finite. ValueError: the checkpoint is damaged.
    """
    optimizer, found, begin = torch.optim.Adam(groups), [(0, look())], 0
    if checkpoint.exists():
        kept = read_checkpoint(checkpoint)
        state.load_state_dict(kept["state"])
        optimizer.load_state_dict(kept["optimizer"])
        found, begin = [tuple(one) for one in kept["found"]], kept["step"]
        torch.set_rng_state(kept["random"])
    every = max(1, steps // LOOKS)
    for step in tqdm(
        range(begin, steps), description, steps, initial=begin, disable=not progress, leave=False, **bar_size()
    ):
        optimizer.zero_grad()
        loss = -value()
        if not loss.isfinite():
            raise FloatingPointError(f"{description}: the bound is not finite after {step} steps.")
        loss.backward()
        for number in frozen(step):
            for parameter in optimizer.param_groups[number]["params"]:
                parameter.grad = None
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            found.append((step + 1, look()))
            kept = {"state": state.state_dict(), "optimizer": optimizer.state_dict(), "found": found, "step": step + 1}
            save_checkpoint(checkpoint, {**kept, "random": torch.get_rng_state()})
    return found

"""How prior precisions and noise are chosen after a fit: by the evidence, its fixed points, or validation data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.laplace.batches import dict_keys, pair_on
from ella_cuda.laplace.links import LINKS
from ella_cuda.laplace.values import check_choice

if TYPE_CHECKING:
    from ella_cuda.laplace.kron import KronLaplace

METHODS = ("marglik", "mackay", "gridsearch")
STRUCTURES = ("layerwise", "scalar")
SMALLEST, LARGEST = 1e-6, 1e10  # precisions that fixed points are held between
STILL = 1e-6  # the largest change of a logarithm at which fixed points have come to rest

Loss = Callable[[Any, Tensor], Tensor | float]  # (predictions, targets)


def raise_evidence(
    la: KronLaplace, n_steps: int, lr: float, scalar: bool, tune_sigma: bool, progress_bar: bool
) -> None:
    """Adam on the logarithms of the precisions, one for all if ``scalar``, and of sigma."""
    with torch.inference_mode(False), torch.enable_grad():
        start = la.prior_precision.detach().log()
        log_precision = (start.mean() if scalar else start).clone().requires_grad_()
        log_sigma = la.sigma_noise.detach().log().requires_grad_() if tune_sigma else None
        learnt = [log_precision] if log_sigma is None else [log_precision, log_sigma]
        optimizer = torch.optim.Adam(learnt, lr=lr, maximize=True)
        for _ in tqdm(range(n_steps), desc="evidence", disable=not progress_bar, leave=False):
            evidence = la.evidence_at(log_precision.expand(len(start)) if scalar else log_precision, log_sigma)
            for tensor, gradient in zip(learnt, torch.autograd.grad(evidence, learnt), strict=True):
                tensor.grad = gradient
            optimizer.step()
    la.prior_precision = log_precision.detach().exp()
    if log_sigma is not None:
        la.sigma_noise = log_sigma.detach().exp()


def fixed_points(la: KronLaplace, n_steps: int, scalar: bool, tune_sigma: bool, progress_bar: bool) -> None:
    r"""MacKay's updates :math:`\delta_l \leftarrow \gamma_l / \|\theta_l - \mu_l\|^2` until they rest, of all tensors together if ``scalar``;
    of the noise :math:`\sigma^2 \leftarrow \|y - f\|^2 / (T (N K - \gamma))`, T the temperature. Where the data determine more than half of
    their own number, sigma takes the slower step :math:`\sigma^2 \leftarrow (\|y - f\|^2 / T + \gamma \sigma^2) / (N K)` to the same point:
    the diagonal's :math:`\gamma` may be above N K.

    Warns:
        UserWarning: they do not rest after ``n_steps``.

    Source: MacKay, "Bayesian interpolation", 1992, section 4.
    """
    norms = la.square_norms
    for _ in tqdm(range(n_steps), desc="fixed points", disable=not progress_bar, leave=False):
        before = torch.cat([la.prior_precision.detach(), la.sigma_noise.detach()[None]])
        gamma = torch.tensor(list(la.effective_parameters().values()), dtype=norms.dtype, device=norms.device)
        precision = (gamma.sum() / norms.sum()).expand(len(norms)) if scalar else gamma / norms
        # Of a tensor at its prior's mean that the data say nothing about, nothing is learned.
        precision = torch.where(precision.isnan(), before[:-1], precision)
        la.prior_precision = precision.clamp(SMALLEST, LARGEST)
        if tune_sigma:
            error, determined = la.square_error / la.temperature, gamma.sum()
            few = 2 * determined < la.n_targets
            square = (
                error / (la.n_targets - determined)
                if few
                else (error + determined * la.sigma_noise.detach().square()) / la.n_targets
            )
            la.sigma_noise = square.sqrt()
        after = torch.cat([la.prior_precision.detach(), la.sigma_noise.detach()[None]])
        if (after.log() - before.log()).abs().max() < STILL:
            return
    warnings.warn(
        f"optimize_prior_precision: the fixed points do not rest after n_steps={n_steps}; take more, or method='marglik'.",
        UserWarning,
        stacklevel=3,
    )


def grid_search(
    la: KronLaplace,
    grid: Tensor,
    val_loader: Iterable[Any],
    loss: Loss | None,
    pred_type: str,
    link_approx: str,
    n_samples: int,
    progress_bar: bool,
) -> Tensor:
    """The precision of the grid, one for all tensors, whose predictions have the smallest loss on the loader's data. Of linearised networks
    a batch goes through the network once for all of the grid."""
    losses = [_Total(la, loss) for _ in grid]
    seen = False
    for batch in tqdm(val_loader, desc="grid", disable=not progress_bar, leave=False):
        x, y = pair_on(
            batch, la.prior_precision.device, "optimize_prior_precision", dict_keys(la.dict_key_x, la.dict_key_y)
        )
        seen = seen or bool(len(y))
        for total, predictions in zip(
            losses, la.predictions_at(grid, x, pred_type, link_approx, n_samples), strict=True
        ):
            total.add(predictions, y)
    if not seen:
        raise ValueError(
            "optimize_prior_precision: val_loader gave no data; pass a re-iterable loader such as a DataLoader."
        )
    values = torch.tensor([total.value() for total in losses], dtype=torch.float64)
    if values.isnan().all():
        raise ValueError("optimize_prior_precision: the loss is not a number at every precision of the grid.")
    if values.isnan().any():
        wrong = ", ".join(f"{v:.3g}" for v in grid[values.isnan().to(grid.device)].tolist()[:5])
        warnings.warn(
            f"optimize_prior_precision: the loss is not a number at {int(values.isnan().sum())} of {len(values)} precisions ({wrong}), which "
            "are left out.",
            UserWarning,
            stacklevel=3,
        )
    return grid[values.nan_to_num(nan=math.inf).argmin()]


class _Total:
    """The loss of some batches: the mean negative log predictive density, or a user's function of all predictions and targets."""

    def __init__(self, la: KronLaplace, loss: Loss | None) -> None:
        self._la, self._loss = la, loss
        self._sum, self._count = 0.0, 0
        self._kept: list[tuple[Any, Tensor]] = []

    def add(self, predictions: Any, targets: Tensor) -> None:
        """A batch's."""
        if self._loss is None:
            self._sum -= self._la.log_density(predictions, targets).item()
            self._count += len(targets)
        else:
            self._kept.append((predictions, targets))

    def value(self) -> float:
        """Of all batches."""
        if self._loss is None:
            return self._sum / self._count
        predictions, targets = zip(*self._kept, strict=True)
        joined = (
            tuple(torch.cat(part) for part in zip(*predictions, strict=True))
            if isinstance(predictions[0], tuple)
            else torch.cat(predictions)
        )
        return float(self._loss(joined, torch.cat(targets)))


def check_arguments(
    method: str, prior_structure: str, link_approx: str, n_steps: int, lr: float, val_loader: Any
) -> None:
    """ValueError where one does not fit."""
    check_choice("method", method, METHODS)
    check_choice("link_approx", link_approx, LINKS)
    if prior_structure in ("diag", "diagonal"):
        raise ValueError(
            f"prior_structure={prior_structure!r} has a precision for every parameter, of which there is one for every tensor here; use "
            "'layerwise'."
        )
    check_choice("prior_structure", prior_structure, STRUCTURES)
    if n_steps < 1 or lr <= 0:
        raise ValueError(f"optimize_prior_precision: n_steps and lr must be positive, got {n_steps!r} and {lr!r}.")
    if method == "gridsearch" and val_loader is None:
        raise ValueError("optimize_prior_precision: method='gridsearch' needs val_loader, which yields (x, y).")
    if method == "gridsearch" and prior_structure == "layerwise":
        raise ValueError("method='gridsearch' tries one precision for all tensors; pass prior_structure='scalar'.")

"""One step on the weights: data loss, the prior's gradient, the optimizer. What it adds up over an epoch stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.ops._autocast import without_autocast


class TrainingStep:
    r"""Steps along the gradient of mean loss :math:`+ \frac{1}{2N} \sum_l \delta_l \|\theta_l\|^2`.

    Everything that changes from step to step or from epoch to epoch is in tensors that stay where they are, and a step without
    checks reads nothing back: what it does on the device is the same work on the same tensors every time.

    Attributes:
        total: 0-dim, float64: sum over the epoch's steps of the mean data losses.
        correct: 0-dim, float64: number of the epoch's images whose class was predicted.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], likelihood: str
    ) -> None:
        self.model, self.optimizer, self.parameters = model, optimizer, list(parameters)
        self.classifies = likelihood == "classification"
        like = self.parameters[0]
        self.total, self.correct = (torch.zeros((), dtype=torch.float64, device=like.device) for _ in range(2))
        self._weights = like.new_zeros(len(self.parameters))  # δ/N
        self._weight_of = list(self._weights.unbind())
        self._twice_variance = like.new_zeros(())

    def begin_epoch(self, precision: Tensor, sigma: float, n_data: int) -> float:
        """Start the epoch's sums at the precisions, one per parameter tensor, and the noise scale; returns the prior's part of the
        objective at the present weights."""
        weights = precision / n_data
        with torch.no_grad():
            self._weights.copy_(weights)
            self._twice_variance.fill_(2 * sigma**2)
            self.total.zero_()
            self.correct.zero_()
            norms = torch.stack([n.double() for n in torch._foreach_norm(self.parameters)])
            return float((0.5 * weights * norms.square()).sum())

    def epoch_means(self, steps: int, images: int) -> tuple[float, float | None]:
        """Mean of the epoch's data losses, and share of its images whose class was predicted; None for regression."""
        return float(self.total) / steps, float(self.correct) / images if self.classifies else None

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        checked_labels: Callable[[Tensor, Tensor], Tensor],
        check_loss: Callable[[Tensor], None],
    ) -> None:
        """One step on a batch.

        Args:
            x: the batch. y: its labels, ``(N,)`` class indices or ``(N, K)`` targets.
            checked_labels: ``(outputs, y) -> y``, for class indices: labels that are none fail later on, on CUDA beyond repair.
            check_loss: called with the 0-dim data loss before the weights change.

        Raises:
            ValueError: y's shape or dtype is wrong; see :func:`marglik_training`. What the checks raise.
        """
        outputs = self.model(x)
        _require_targets(outputs, y, self.classifies)
        if self.classifies:
            loss = F.cross_entropy(outputs, checked_labels(outputs, y).long())
        else:
            loss = (outputs - y).square().sum() / (self._twice_variance * max(len(y), 1))
        self.optimizer.zero_grad(set_to_none=True)
        # As torch asks: the backward of each operation is then in its forward's precision.
        with without_autocast(loss.device.type):
            loss.backward()
        with torch.no_grad():
            check_loss(loss)
            # The prior's gradient, added in one call: temporaries of all weights would cost a page fault for every 4 KiB.
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            grads = [parameter.grad for parameter in self.parameters]
            torch._foreach_addcmul_(grads, self.parameters, self._weight_of)
            self.total.add_(loss)
            if self.classifies:
                self.correct.add_((outputs.argmax(-1) == y).sum())
        self.optimizer.step()


def _require_targets(outputs: Tensor, y: Tensor, classifies: bool) -> None:
    """ValueError where y's shape or dtype is not that of targets of the outputs."""
    if classifies and (y.is_floating_point() or y.is_complex() or y.dim() != 1):
        raise ValueError(
            f"marglik_training: labels must be class indices (N,), int64; got {y.dtype} of shape {tuple(y.shape)}. For Gaussian "
            "targets pass likelihood='regression'."
        )
    if not classifies and outputs.shape != y.shape:
        raise ValueError(
            f"marglik_training: y must have the outputs' shape {tuple(outputs.shape)}, got {tuple(y.shape)}."
        )


def require_classes(outputs: Tensor, y: Tensor) -> Tensor:
    """y; ValueError where a label is no class of the outputs."""
    classes = outputs.shape[-1]
    low, high = torch.stack(torch.aminmax(y)).tolist() if y.numel() else (0, 0)  # one wait for the device
    if low < 0 or high >= classes:
        raise ValueError(
            f"marglik_training: labels must lie in 0..{classes - 1} ({classes} outputs), got {low}..{high}."
        )
    return y


def first_bad_layer(model: nn.Module, x: Tensor) -> str:
    """Which layer is the first whose parameters or output are not finite for x, in words."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if not torch.isfinite(parameter).all():
                    found.append(f"the first layer that is not finite is {name!r} (its parameter {parameter_name})")
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(f"the first layer that is not finite is {name!r} (its output)")

        return hook

    handles = [m.register_forward_hook(look(n)) for n, m in model.named_modules() if n and not any(m.children())]
    try:
        if not torch.isfinite(x).all():
            return "the batch itself is not finite"
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "all layers are finite: the loss or the prior overflowed"

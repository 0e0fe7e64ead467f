"""The optimiser of a run and the schedule of its learning rate."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ella_cuda.nn import FactoredLinear2d, SparseConv2d, SparseFactoredLinear2d, SpatialBasis


@dataclasses.dataclass(frozen=True)
class Cooldown:
    """Share of the learning rate at a step: 1, then in the last ``falling`` of a cycle's steps linearly towards 0; anew in each cycle.

    Attributes:
        ends: the steps that follow each cycle, ascending; the last is the number of all steps.
        falling: share of a cycle's steps, above 0 and at most 1.
    """

    ends: tuple[int, ...]
    falling: float

    def __call__(self, step: int) -> float:
        cycle = min(bisect.bisect_right(self.ends, step), len(self.ends) - 1)
        begin, end = (0, *self.ends)[cycle], self.ends[cycle]
        return min(1.0, max(0.0, (end - step) / max(1, round(self.falling * (end - begin)))))


def learning_rate_schedule(cooldown: float | None, ends: Sequence[int]) -> dict[str, Any]:
    """``scheduler_cls`` and ``scheduler_kwargs`` of :func:`ella_cuda.marglik_training`.

    Args:
        cooldown: share of a cycle's steps, the last ones, in which the rate falls linearly towards 0; None is a cosine over
            all steps, which has one cycle.
        ends: in minibatches from the start, where the cycles end: ascending, the last is the whole run's length. The rate
            starts anew after each.
    """
    if cooldown is None:
        return {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": ends[-1]}}
    share = Cooldown(tuple(ends), cooldown)
    return {"scheduler_cls": torch.optim.lr_scheduler.LambdaLR, "scheduler_kwargs": {"lr_lambda": share}}


def adam_for(model: nn.Module, fan_in_limit: int | None) -> Callable[..., torch.optim.Adam]:
    """Adam with a learning rate for each weight of the model: ``lr * min(1, fan_in_limit / fan_in)``.

    Adam moves every entry by about lr a step, so an output that sums ``fan_in`` entries moves ``fan_in`` times as far.
    ``fan_in`` is the number of inputs that an output sums: height times width for ``weight_in`` of an F-FC path, the
    channels for its ``weight_out``, both times what a value at an anchor moves on the average where weights are given at anchors, one
    for biases and vectors, and for every other parameter the size of its first slice,
    as is right for ``Linear`` and ``Conv*d`` but not for embeddings and transposed convolutions.

    Args:
        model: of such layers.
        fan_in_limit: None leaves every rate at lr.

    Returns:
        ``(parameters, lr=..., **options) -> Adam``, for ``optimizer_cls`` of :func:`ella_cuda.marglik_training`.

    Source: Yang et al., "Tuning large neural networks via zero-shot hyperparameter transfer", NeurIPS 2021, table 3.
    """
    if fan_in_limit is None:
        return torch.optim.Adam
    fan_in = {id(p): p[0].numel() if p.dim() > 1 else 1 for p in model.parameters()}
    for layer in model.modules():
        if isinstance(layer, FactoredLinear2d):
            fan_in[id(layer.weight_in)] = layer.in_size[0] * layer.in_size[1]
            fan_in[id(layer.weight_out)] = layer.in_channels
            if layer.bias_out is not None:
                fan_in[id(layer.bias_out)] = 1
        elif isinstance(layer, SparseFactoredLinear2d):
            fan_in[id(layer.weight_in)] = _reach(layer.basis_in)
            fan_in[id(layer.weight_out)] = layer.in_channels * _reach(layer.basis_out) / layer.basis_out.num_points
        elif isinstance(layer, SparseConv2d):
            fan_in[id(layer.weight)] = layer.in_channels * _reach(layer.basis)

    def adam_by_fan_in(parameters: Sequence[nn.Parameter], lr: float, **options: Any) -> torch.optim.Adam:
        groups: dict[float, list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault(min(1.0, fan_in_limit / fan_in[id(p)]), []).append(p)
        return torch.optim.Adam([{"params": g, "lr": lr * share} for share, g in groups.items()], lr=lr, **options)

    return adam_by_fan_in


def _reach(basis: SpatialBasis) -> float:
    """How far the function's values at all positions move together, by size, when the value at every anchor moves by one."""
    return float(basis.matrix().abs().sum())

"""Normalisation layers, and PReLU: layers whose parameters scale and shift."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Dense, Rows
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn._autocast import full


class ScaleRule(Rule):
    r"""A layer :math:`y = \gamma \odot n(x) + \beta` whose function n has no parameters and treats every input alone.

    ``weight``: B = sum over data of s sᵀ with s the sum over shared positions of g ⊙ n(x), the exact GGN block of γ. ``bias``: B = sum
    over data of s sᵀ with s the sum over positions of g, the exact block of β. Neither has an input side.
    """

    sees_copies = True  # where a subclass adds to moments: rows are not linear in inputs

    def shapes(self) -> dict[str, FactorShape]:
        size = self._size()
        return {"weight": FactorShape.bias(size), "bias": FactorShape.bias(size)}

    def _size(self) -> int:
        """Elements of γ."""
        return self.module.num_features

    @abstractmethod
    def _normalised(self, x: Tensor) -> Tensor:
        """n(x), of x's shape."""

    def _summed(self, values: Tensor) -> Tensor:
        """``(R, ...)``, summed over positions: ``(R, size)``. Channels are the axis after the batch."""
        return values.flatten(2).sum(2) if values.dim() > 2 else values

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        return {}

    def keep(self, x: Tensor) -> Tensor | None:
        return self._normalised(full(x)) if "weight" in self.trainable else None

    def output_rows(self, gradient: Tensor, kept: Tensor | None) -> dict[str, Rows]:
        values = {} if kept is None else {"weight": gradient * kept}
        return {
            name: Dense(self._summed(of.flatten(0, 1))[:, None, None])
            for name, of in (values | {"bias": gradient}).items()
            if name in self.trainable
        }


@register(nn.BatchNorm1d)
@register(nn.BatchNorm2d)
@register(nn.BatchNorm3d)
@register(nn.SyncBatchNorm)
class BatchNormRule(ScaleRule):
    """:class:`torch.nn.BatchNorm1d`, ``2d`` and ``3d`` on ``(N, C, ...)`` in evaluation mode: n(x) takes the running statistics, which are
    constants.

    Raises:
        ValueError: the layer has no running statistics, so that each output depends on all inputs of its batch.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        if module.running_mean is None or module.running_var is None:
            raise ValueError(
                f"{self.label} has no running statistics (track_running_stats=False): its outputs depend on the whole batch, and the "
                "curvature is no sum over data. Build it with track_running_stats=True, or use GroupNorm."
            )

    def _normalised(self, x: Tensor) -> Tensor:
        m = self.module
        return F.batch_norm(x, m.running_mean, m.running_var, training=False, eps=m.eps)


@register(nn.InstanceNorm1d)
@register(nn.InstanceNorm2d)
@register(nn.InstanceNorm3d)
class InstanceNormRule(ScaleRule):
    """:class:`torch.nn.InstanceNorm1d`, ``2d`` and ``3d`` on ``(N, C, ...)``: n(x) takes each input's own statistics, or the running ones
    where the layer tracks them."""

    def _normalised(self, x: Tensor) -> Tensor:
        m = self.module
        return F.instance_norm(x, m.running_mean, m.running_var, use_input_stats=not m.track_running_stats, eps=m.eps)


@register(nn.GroupNorm)
class GroupNormRule(ScaleRule):
    """:class:`torch.nn.GroupNorm` on ``(N, C, ...)``."""

    def _size(self) -> int:
        return self.module.num_channels

    def _normalised(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)


@register(nn.LayerNorm)
class LayerNormRule(ScaleRule):
    """:class:`torch.nn.LayerNorm` on ``(N, ..., *normalized_shape)``; over one axis also on ``(T, N, ..., C)``."""

    def _size(self) -> int:
        return int(torch.Size(self.module.normalized_shape).numel())

    def _summed(self, values: Tensor) -> Tensor:
        values = values.flatten(-len(self.module.normalized_shape))
        return values.flatten(1, -2).sum(1) if values.dim() > 2 else values

    def _normalised(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)


@register(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """:class:`torch.nn.RMSNorm` on ``(N, ..., *normalized_shape)``; over one axis also on ``(T, N, ..., C)``."""

    def _normalised(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.module.normalized_shape, eps=self.module.eps)


@register(nn.PReLU)
class PReLURule(ScaleRule):
    """:class:`torch.nn.PReLU` on ``(N, ...)``, with one slope or one for each channel: its block, that of a scale of min(x, 0), is exact."""

    def shapes(self) -> dict[str, FactorShape]:
        return {"weight": FactorShape.bias(self.module.num_parameters)}

    def _summed(self, values: Tensor) -> Tensor:
        one = self.module.num_parameters == 1
        return values.reshape(len(values), -1).sum(1, keepdim=True) if one else super()._summed(values)

    def _normalised(self, x: Tensor) -> Tensor:
        return x.clamp(max=0)

"""Normalisation layers, and PReLU: layers whose parameters scale and shift."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register


class ScaleRule(Rule):
    r"""A layer :math:`y = \gamma \odot n(x) + \beta` whose function n has no parameters and treats every input alone.

    ``weight``: B = sum over data of s sᵀ with s the sum over shared positions of g ⊙ n(x), the exact GGN block of γ. ``bias``: B = sum
    over data of s sᵀ with s the sum over positions of g, the exact block of β. Neither has an input side.
    """

    reduces = True
    averages = True
    sees_copies = True

    def shapes(self) -> dict[str, FactorShape]:
        size = self._size()
        return {"weight": FactorShape.bias(size), "bias": FactorShape.bias(size)}

    def _size(self) -> int:
        """Elements of γ."""
        return self.module.num_features

    @abstractmethod
    def _normalised(self, x: Tensor) -> Tensor:
        """n(x), of x's shape."""

    def _rows(self, values: Tensor) -> Tensor:
        """``(K, N, ...)``, summed over positions: ``(K*N, 1, size)``. Channels are the axis after the batch."""
        return values.flatten(3).sum(3).flatten(0, 1)[:, None] if values.dim() > 3 else values.flatten(0, 1)[:, None]

    def inputs(self, x: Tensor) -> None:
        if "weight" in self.factors:
            self.kept = self._normalised(x)

    def outputs(self, gradient: Tensor) -> None:
        if "weight" in self.factors:
            self._add("weight", self._rows(gradient * self.kept))
        if "bias" in self.factors:
            self._add("bias", self._rows(gradient))

    def _add(self, name: str, rows: Tensor) -> None:
        """Rows ``(K*N*S, 1, size)``, summed over the copies of a data point."""
        rows = rows.unflatten(0, (-1, self.copies)).sum(1) if self.copies > 1 else rows
        self.factors[name].output_moment.add(rows)

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        values = {"weight": lambda: gradient * self._normalised(arguments[0]), "bias": lambda: gradient}
        return {
            name: Jacobian.of_bias(self._rows(values[name]()).unflatten(0, gradient.shape[:2])[:, :, 0])
            for name in self.trainable
        }


def constant_scale(module: nn.Module) -> Tensor | None:
    """γ/√(σ²+ε) ``(C,)`` of a batch normalisation in evaluation mode, by which gradients go back; None of anything else."""
    if not isinstance(module, _BatchNorm) or module.running_mean is None or module.running_var is None:
        return None
    own = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if type(module).forward not in own or "forward" in vars(module):
        return None
    scale = (module.running_var.double() + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * module.weight.detach()
    return scale.to(torch.promote_types(module.running_var.dtype, torch.float32))


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
    where the layer tracks them.
    """

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

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        super().__init__(module, name, resolution)
        self.batch_second = len(module.normalized_shape) == 1

    def _size(self) -> int:
        return int(torch.Size(self.module.normalized_shape).numel())

    def _rows(self, values: Tensor) -> Tensor:
        values = values.flatten(-len(self.module.normalized_shape))
        if values.dim() > 3:
            values = values.flatten(2, -2).sum(2)
        return values.reshape(-1, 1, values.shape[-1])

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

    def _rows(self, values: Tensor) -> Tensor:
        return (
            super()._rows(values)
            if self.module.num_parameters > 1
            else values.reshape(*values.shape[:2], -1).sum(2).reshape(-1, 1, 1)
        )

    def _normalised(self, x: Tensor) -> Tensor:
        return x.clamp(max=0)

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        return super().jacobians(arguments, gradient)

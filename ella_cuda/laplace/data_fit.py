"""The gradient of the data fit in hyperparameters that act inside the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ella_cuda.nn import SpatialBasis


def hyperparameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers that require a gradient, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.requires_grad}


class DataFitGradient:
    """Sum over batches, in float64, of the gradient of a batch's statistic in :func:`hyperparameters`.

    The matrix of a basis is as large as hundreds of images and costs more to build than a batch takes, so batches give the gradient in
    the matrix, and :meth:`total` goes through the basis once.

    Args:
        model: in evaluation mode when batches are added.

    Raises:
        ValueError: a buffer that requires a gradient is not a leaf, or has none in torch: running statistics of its norms.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers = hyperparameters(model)
        for name, buffer in self.buffers.items():
            if not buffer.is_leaf:
                raise ValueError(
                    f"the buffer {name!r} requires a gradient but is not a leaf of the graph: it was computed from another tensor. Give the "
                    "model a leaf (tensor.detach().requires_grad_()) and go on from its gradient by hand, or use marglik_training's `learn`."
                )
        _require_constant_statistics(model)
        self.bases = [m for m in model.modules() if isinstance(m, SpatialBasis) and m.learns()]
        own = {id(b) for basis in self.bases for b in basis.buffers(recurse=False)}
        self.others = {name: b for name, b in self.buffers.items() if id(b) not in own}
        self._sums: list[Tensor | None] = [None] * (len(self.others) + len(self.bases))

    def add(self, statistic: Callable[[], Tensor], beside: Sequence[Tensor] = ()) -> list[Tensor | None]:
        """Differentiate what ``statistic`` computes by running the model on a batch; returns its gradients in tensors beside the buffers."""
        if not self.buffers:
            return [None] * len(beside)
        with ExitStack() as stack, torch.enable_grad():
            matrices = [stack.enter_context(basis.held()) for basis in self.bases]
            wanted = [*self.others.values(), *matrices]
            value = statistic()
            if not value.requires_grad:  # it depends on none of them
                return [None] * len(beside)
            found = torch.autograd.grad(value, [*wanted, *beside], allow_unused=True)
            found, others = found[: len(wanted)], found[len(wanted) :]
        self._sums = [
            old if new is None else new.double() if old is None else old + new
            for old, new in zip(self._sums, found, strict=True)
        ]
        return list(others)

    def total(self) -> dict[str, Tensor]:
        """The gradient of the sum of all batches' statistics in float64, by the buffers' names; zeros where nothing depends on one."""
        gradients = {id(b): s for b, s in zip(self.others.values(), self._sums, strict=False)}
        for basis, slope in zip(self.bases, self._sums[len(self.others) :], strict=True):
            own = [b for b in basis.buffers(recurse=False) if b.requires_grad]
            if slope is not None:
                with torch.enable_grad():
                    matrix = basis.matrix()
                    found = torch.autograd.grad(matrix, own, slope.to(matrix.dtype))
                gradients |= {id(b): g.double() for b, g in zip(own, found, strict=True)}
        return {
            name: torch.zeros_like(b, dtype=torch.float64) if gradients.get(id(b)) is None else gradients[id(b)]
            for name, b in self.buffers.items()
        }


def _require_constant_statistics(model: nn.Module) -> None:
    """ValueError where running statistics that a function of torch normalises by require a gradient, which it does not have."""
    for module_name, module in model.named_modules():
        if not isinstance(module, _NormBase) or not module.forward.__module__.startswith("torch."):
            continue
        for name in ("running_mean", "running_var"):
            buffer = getattr(module, name)
            if buffer is not None and buffer.requires_grad:
                raise ValueError(
                    f"layer {module_name or type(module).__name__!r} ({type(module).__name__}): its {name} requires a gradient, for which "
                    f"torch has no derivative. Leave it out of what is learned, {name}.requires_grad_(False); the layer's weight and bias do "
                    "the same, and are trained."
                )

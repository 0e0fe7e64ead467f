"""Operations that a network's mathematics needs, counted layer by layer; a multiplication and an addition are two."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ella_cuda.nn import CircularConv2d, FactoredLinear2d, StridedCircularConv2d


@dataclass(frozen=True)
class Work:
    """Operations for a batch. Biases, sums and decompositions are not counted; zeros in a gradient are counted as numbers.

    Attributes:
        forward: outputs from inputs.
        activations: gradients of activations, for one column at the output; none at the images.
        weights: gradients of weights from those of activations, for one column.
        inputs: input sides of the Kronecker factors, upper triangles.
        outputs: output sides, for one column.
        shared: gradients of single data points in weights that positions share, for one output.
        alone: squares of inputs times inverse precisions, for weights that no positions share: of these such a gradient has rank one.
    """

    forward: int = 0
    activations: int = 0
    weights: int = 0
    inputs: int = 0
    outputs: int = 0
    shared: int = 0
    alone: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def step(self) -> int:
        """Loss and gradients."""
        return self.forward + self.activations + self.weights

    def fit(self, columns: int) -> int:
        """Kronecker factors from so many columns of the output Hessian's square root."""
        return self.forward + self.inputs + columns * (self.activations + self.outputs)

    def predict(self, outputs: int) -> int:
        """Variances of so many outputs of each data point, in the factors' eigenbases; what brings rows there is not counted."""
        return self.forward + self.alone + outputs * (self.activations + self.shared)


def _layer(module: torch.nn.Module, x: torch.Tensor, out: torch.Tensor, first: bool) -> Work:
    n = len(x)
    if isinstance(module, (CircularConv2d, StridedCircularConv2d)):
        # A kernel larger than the image folds into as many entries as there are pixels; so do the lags of A.
        d, c, *sides = module.weight.shape
        entries = prod(min(k, size) for k, size in zip(sides, x.shape[2:], strict=True))
        lags = prod(min(2 * k - 1, size) for k, size in zip(sides, x.shape[2:], strict=True))
        positions = n * prod(x.shape[2:])
        product = 2 * positions * entries * c * d
        # Gradients are zero outside the chosen polyphase component.
        parts = 4 if isinstance(module, StridedCircularConv2d) else 1
        of_factors, back = (positions * lags * c * c, positions * d * (d + 1) // parts), product // parts
        return Work(product, 0 if first else back, back, *of_factors, shared=back)
    if isinstance(module, torch.nn.Conv2d):
        d, c, *_ = module.weight.shape
        positions = out[0, 0].numel() * n
        product, patch = 2 * positions * module.weight.numel(), module.weight[0].numel()
        of_factors = positions * module.groups * patch * (patch + 1), positions * d * (d // module.groups + 1)
        return Work(product, 0 if first else product, product, *of_factors, shared=product)
    if isinstance(module, FactoredLinear2d):
        d, c, *sides = module.weight_in.shape
        inner, outer = prod(sides), prod(module.weight_out.shape[2:])
        into, out = 2 * n * d * c * inner, 2 * n * d * c * outer
        if 1 in (inner, outer):  # one product with the weights multiplied out
            into, out = into * outer, 0
        inputs = n * c * inner * (inner + 1) + n * d * c * (c + 1)
        outputs = n * c * d * (d + 1) + n * d * outer * (outer + 1)
        whole, alone = into + out, 2 * n * d * c * (inner + outer)
        return Work(into + out, out if first else whole, whole, inputs, outputs, alone=alone)
    d, c = module.weight.shape
    rows = x.numel() // c
    product = 2 * rows * d * c
    of_variance = {"alone" if rows == n else "shared": product}
    return Work(product, 0 if first else product, product, rows * c * (c + 1), rows * d * (d + 1), **of_variance)


def count(model: torch.nn.Module, x: torch.Tensor) -> Work:
    """The work of ``model``, whose layers are convolutions, F-FC and linear ones, on the batch ``x``."""
    total = Work()

    def add(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        nonlocal total
        total += _layer(module, args[0], out, args[0] is x)

    kinds = (CircularConv2d, StridedCircularConv2d, FactoredLinear2d, torch.nn.Conv2d, torch.nn.Linear)
    handles = [m.register_forward_hook(add) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return total

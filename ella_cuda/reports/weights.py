"""A run's spatial weights, read from the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.reports.text import tensor_title


@dataclass(frozen=True)
class Basis:
    """What shapes a sparsified weight.

    Attributes:
        name: of the :class:`ella_cuda.nn.SpatialBasis` in the model.
        anchors: ``(A, 2)``, rows and columns in pixels from the grid's centre.
        inverse_lengthscale: ω per pixel.
    """

    name: str
    anchors: Tensor
    inverse_lengthscale: float


@dataclass(frozen=True)
class SpatialWeight:
    """A weight as images over positions.

    Attributes:
        layer: name of the relaxed layer. path: of its path. tensor: of the weight within the path.
        images: ``(D, C*E, H, W)`` by output and input channel; a channel's elements stand next to each other.
        basis: of a sparsified weight, whose images are expanded; None of others.
        elements: E, how many elements of a group have an image of their own for each pair of channels; 1 without a group.
    """

    layer: str
    path: str
    tensor: str
    images: Tensor
    basis: Basis | None
    elements: int = 1

    @property
    def positions(self) -> int:
        """Of an image."""
        return self.images.shape[-2:].numel()


def spatial_weights(layers: Sequence[Mapping[str, Any]], state: Mapping[str, Tensor], kind: str) -> list[SpatialWeight]:
    """All weights over positions: kernels, the two weights of F-FC, and those of sparsified layers, expanded.

    The matrix of an FC path has no images of its own and is left out, and so are weights that have a single position in
    every layer.

    Args:
        layers: of a row of ``summary.json``.
        state: the model's ``state_dict``.
        kind: of the sparsified layers' basis functions, see :func:`ella_cuda.ops.basis_matrix`.
    """
    found = []
    for layer in layers:
        for path, entry in layer["paths"].items():
            prefix = f"{layer['name']}.{path}."
            for tensor in entry["prior_precision"]:
                values = state[prefix + tensor].detach().cpu()
                elements = values.shape[2:-2].numel()
                basis_name = prefix + _basis_of(tensor)
                if f"{basis_name}.anchors" in state:
                    images, basis = _expanded(values, basis_name, state, kind)
                elif values.dim() >= 4:
                    images, basis = values.flatten(1, -3), None
                else:
                    continue
                found.append(SpatialWeight(layer["name"], path, tensor, images, basis, elements))
    seen = {tensor_title(w.path, w.tensor) for w in found if w.positions > 1}
    return [w for w in found if tensor_title(w.path, w.tensor) in seen]


def _basis_of(tensor: str) -> str:
    """``0.weight_in`` is given on ``0.basis_in``; no basis has the name of another tensor's."""
    module, dot, name = tensor.rpartition(".")
    return module + dot + name.replace("weight", "basis", 1)


def _expanded(values: Tensor, name: str, state: Mapping[str, Tensor], kind: str) -> tuple[Tensor, Basis]:
    buffers = [state[f"{name}.{part}"].detach().cpu() for part in ("points", "anchors", "inverse_lengthscale")]
    points, anchors, inverse_lengthscale = buffers
    with torch.no_grad():
        functions = values @ ops.basis_matrix(points, anchors, inverse_lengthscale, kind)
    size = [len(points[:, axis].unique()) for axis in (0, 1)]
    return functions.unflatten(-1, size), Basis(name, anchors, float(inverse_lengthscale))


def strongest_channels(weights: Sequence[SpatialWeight], count: int) -> list[tuple[int, int]]:
    """The pairs (output channel, input channel) in which weights of one path are largest, largest first.

    A pair's size is the product of the Euclidean norms of its images: that of the map, where a path is the product of
    its weights.

    Args:
        weights: of one path, all of ``(D, C, ...)`` channels.
        count: how many pairs at most.
    """
    size = torch.stack([w.images.double().flatten(2).norm(dim=2) for w in weights]).prod(0)
    order = size.flatten().argsort(descending=True, stable=True)[:count]
    return [divmod(int(i), size.shape[1]) for i in order]

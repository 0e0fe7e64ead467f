"""What a fit and its evidence will take of memory, before they do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, take
from ella_cuda.laplace.curvature import curvature_pass
from ella_cuda.laplace.eigenvalues import workspace
from ella_cuda.laplace.rules import Rule
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.nn import SpatialBasis
from ella_cuda.ops._precision import without_autocast

COLUMN = 24  # bytes for each class that building a column of the softmax Hessian takes, beside the column
ROUND = 2  # what passes take for each byte of gradients: layers make copies, and an allocator keeps what was freed for another size


def peak_bytes(model: nn.Module, rules: Sequence[Rule], memory_budget: int, x: Inputs | None) -> int:
    """The most that is allocated at once beside what is there before: the factors, and the larger of what a pass over a batch and
    what the eigenvalues take.

    Args:
        model: the network.
        rules: of its layers.
        memory_budget: of the gradients of one backward pass.
        x: a batch of the size that the loader yields, on the model's device; None leaves out what its forward pass keeps.
    """
    factors, blocks = sum(rule.bytes() for rule in rules), [shape for rule in rules for shape in rule.blocks()]
    device = next(rules[0].module.parameters()).device
    kept, column, columns = (0, 0, memory_budget) if x is None else _of_a_batch(model, rules, x)
    return factors + max(max(ROUND * min(columns, memory_budget), column) + kept, workspace(blocks, device))


class _NoMoment(SecondMoment):
    """A sum that nothing is added to."""

    def __init__(self, groups: int, size: int, like: Tensor, name: str, basis: SpatialBasis | None = None) -> None:
        super().__init__(0, 0, like, name, basis)

    def add(self, *_: Any, **__: Any) -> None: ...

    add_weighted = add_patches = add_windows = add_diagonal = add_to = add


def _of_a_batch(model: nn.Module, rules: Sequence[Rule], x: Inputs) -> tuple[int, int, int]:
    """Bytes that the graph of a fit keeps of a batch, those of a column's gradients, and of all columns': from its first image's, for
    each."""
    kept: dict[int, int] = {}
    constants = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for rule in rules:
        rule.allocate(_NoMoment)
    with curvature_pass(model, rules, 1) as run, without_autocast(next(model.parameters()).device.type):
        run.try_out(x, several=False)
        with run.nodes(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = run.forward(take(x, slice(1)))
            of_rules = run.uses.kept_bytes()
    images, count = data_points(x), math.prod(outputs.shape[1:])
    column = images * max(run.column_bytes, COLUMN * outputs.shape[-1] + outputs.element_size() * count)
    return images * (sum(kept.values()) + of_rules), column, count * column

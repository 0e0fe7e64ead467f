"""Batches of a labelled data set that are balanced, or of one class each, for evidence steps from subsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ella_cuda.laplace.parameters import check_choice
from ella_cuda.training.checks import positive_integer


class ClassBatches(Sampler[list[int]]):
    """A partition of labelled data points, anew in each pass, for ``DataLoader(data_set, batch_sampler=ClassBatches(labels, 64))``.

    Batches are as even as can be. A pass begins with one that is drawn by its size: divided by the size, each data point counts as much on
    average, as :func:`ella_cuda.laplace.evidence_bound` of the first batch wants.

    Args:
        labels: one for each data point.
        batch_size: of the largest batch.
        kind: "balanced", each batch with the classes in proportion; "single", each of one class.
        generator: what it draws from; None is torch's global one.

    Raises:
        ValueError: there are no labels, or an argument is out of its range.

    Source: Immer et al., "Stochastic marginal likelihood gradients using neural tangent kernels", ICML 2023.
    """

    def __init__(
        self,
        labels: Sequence[int] | Tensor,
        batch_size: int,
        kind: str = "balanced",
        generator: torch.Generator | None = None,
    ) -> None:
        self.kind = check_choice("ClassBatches: kind", kind, ("balanced", "single"))
        self.batch_size, self.generator = positive_integer("batch_size", batch_size, "ClassBatches"), generator
        labels = torch.as_tensor(labels).cpu()
        if labels.dim() != 1 or not len(labels):
            raise ValueError(f"ClassBatches: labels must be one for each data point, got shape {tuple(labels.shape)}.")
        self._classes = [(labels == value).nonzero().flatten() for value in labels.unique()]
        wholes = [sum(map(len, self._classes))] if kind == "balanced" else list(map(len, self._classes))
        self._counts = [-(-whole // self.batch_size) for whole in wholes]

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[list[int]]:
        draw = {"generator": self.generator}
        wholes = [members[torch.randperm(len(members), **draw)] for members in self._classes]
        if self.kind == "balanced":  # a class's points at even distances, from a random start
            at = [(torch.arange(len(some)) + torch.rand((), **draw)) / len(some) for some in wholes]
            wholes = [torch.cat(wholes)[torch.cat(at).argsort()]]
        parts = [part for whole, n in zip(wholes, self._counts, strict=True) for part in whole.tensor_split(n)]
        sizes = torch.tensor([float(len(part)) for part in parts])
        for number in torch.multinomial(sizes, len(parts), **draw).tolist():
            yield parts[number].tolist()

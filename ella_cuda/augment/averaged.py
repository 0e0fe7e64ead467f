"""A network whose outputs are averaged over transformed copies of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ella_cuda.augment.base import Augment
from ella_cuda.nn._sizes import as_count


class AveragedFunction(nn.Module):
    r"""The invariant function :math:`\bar f(x) = \frac1S \sum_s f(T_s x)`: ``(N, ...) -> (N, K)``, in training and evaluation alike.

    Outputs are averaged before the likelihood's softmax, so the symmetry is one of the function, and its evidence is proper; a mean of
    losses, as of plain augmentation, has none.

    Args:
        network: ``(M, ...) -> (M, ...)``; it sees N S copies at once, sample by sample.
        augment: a module ``(N, ...) -> (N, S, ...)``, such as :class:`AffineAugment`.
        chunk_size: copies of each input that go through the network at a time where no graph is recorded; None is all. With an
            :class:`Augment` the copies are made so too. The numbers are the same but for rounding inside the network.

    Raises:
        TypeError: network or augment is no module; in forward, one of them returns no tensor.
        ValueError: chunk_size is not positive; in forward, a returned shape does not fit.
        RuntimeError: in forward, the network has a BatchNorm that takes its statistics from the batch, which would mix copies. Calls of
            torch's function ``batch_norm`` in a module of another kind are not seen.

    Source: van der Wilk et al., "Learning invariances using the marginal likelihood", NeurIPS 2018; Immer, van der Ouderaa et al.,
    NeurIPS 2022, section 3.
    """

    def __init__(self, network: nn.Module, augment: nn.Module, chunk_size: int | None = None) -> None:
        super().__init__()
        for name, module in (("network", network), ("augment", augment)):
            if not isinstance(module, nn.Module):
                raise TypeError(f"AveragedFunction: {name} must be a module, got {_shown(module)}.")
        if chunk_size is not None:
            as_count("AveragedFunction: chunk_size", chunk_size)
        self.network, self.augment, self.chunk_size = network, augment, chunk_size

    def forward(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """``(N, ...) -> (N, ...)``: the network's outputs, averaged over copies, at given draws or the augmentation's own."""
        self._require_separate_copies()
        if self.chunk_size is None or torch.is_grad_enabled():
            return self._outputs(self.copies(x, eps)).mean(1)
        return torch.cat([self._outputs(copies) for copies in self._chunks(x, eps, self.chunk_size)], 1).mean(1)

    def copies(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """What the augmentation makes of x, ``(N, S, ...)``, at given draws or its own."""
        copies = self.augment(x) if eps is None else self.augment(x, eps=eps)
        if not isinstance(copies, Tensor):
            raise TypeError(f"AveragedFunction: augment must return a tensor (N, S, ...), got {_shown(copies)}.")
        if copies.dim() < 2 or copies.shape[0] != len(x) or not copies.shape[1]:
            raise ValueError(
                f"AveragedFunction: augment must return (N, S, ...) for N = {len(x)} inputs and S copies, got {tuple(copies.shape)}."
            )
        return copies

    def _chunks(self, x: Tensor, eps: Tensor | None, size: int) -> Iterator[Tensor]:
        if isinstance(self.augment, Augment):
            for some in self.augment.eps_for(x, eps).split(size, 1):
                yield self.copies(x, some)
        else:
            yield from self.copies(x, eps).split(size, 1)

    def _outputs(self, copies: Tensor) -> Tensor:
        """``(N, S, ...) -> (N, S, ...)`` through the network."""
        outputs = self.network(copies.flatten(0, 1))
        n, s = copies.shape[:2]
        if not isinstance(outputs, Tensor):
            raise TypeError(f"AveragedFunction: network must return a tensor (N S, ...), got {_shown(outputs)}.")
        if not outputs.dim() or outputs.shape[0] != n * s:
            raise ValueError(
                f"AveragedFunction: network must return (N S, ...) for N S = {n * s} copies, got {tuple(outputs.shape)}."
            )
        return outputs.unflatten(0, (n, s))

    def _require_separate_copies(self) -> None:
        for name, module in self.network.named_modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise RuntimeError(
                    f"AveragedFunction: the {type(module).__name__} {name or 'network'!r} takes its statistics from the batch, in which the "
                    "copies of all inputs are mixed: the average is no function of one input. Use a norm of single inputs (GroupNorm, "
                    "LayerNorm), or keep the module in evaluation mode, with running statistics; training leaves it there where its class "
                    "has a train() that does."
                )

    def extra_repr(self) -> str:
        return "" if self.chunk_size is None else f"chunk_size={self.chunk_size}"


def _shown(thing: object) -> str:
    return f"the type {thing.__name__}; pass an instance" if isinstance(thing, type) else type(thing).__name__

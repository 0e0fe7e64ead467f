"""One call of a layer in one pass of a network."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.laplace.column_functions import Before

# (arguments of a projection, its output, axis of the data points) -> the output, whose gradient the rule gets
Tap = Callable[[tuple[Any, ...], Tensor, int], Tensor]


class Place(NamedTuple):
    """The axis of the data points in a layer's input and output.

    Attributes:
        axis: that they are along, 0 or 1.
        folded: positions of a data point that follow each other there: the axis has the data points in front, the positions behind.
        copies: of a data point that follow each other there, in front of the positions, see :mod:`ella_cuda.laplace.copies`.
        channels_last: whether the layer's channels, which it has behind the batch, are behind the folded positions.
    """

    axis: int = 0
    folded: int = 1
    copies: int = 1
    channels_last: bool = False

    @property
    def rows(self) -> int:
        """Length of the axis for one data point."""
        return self.folded * self.copies


def batch_first(tensor: Tensor, place: Place, ahead: int = 0) -> Tensor:
    """The tensor with the data points along the first axis behind ``ahead`` others."""
    if place.folded > 1:
        apart = tensor.unflatten(ahead, (-1, place.folded))
        return apart.movedim(ahead + 1, -1) if place.channels_last else apart
    return tensor.transpose(ahead, ahead + 1) if place.axis else tensor


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a rule's layer.

    Attributes:
        rule: the layer's.
        place: of the data points in the layer's input and output.
        input_shape: of the layer's first argument, data points first.
        kept: what :meth:`ella_cuda.laplace.Rule.keep` made of the arguments.
        before: what stands before the input, for a rule that takes gradients further at once.
        samples: None, or of the output's size along each axis of an image and the steps between positions, ``(H, W, down, right)``: the
            gradient is at every so-manieth position alone, from the first on, and zero elsewhere.
        handed: gradients at the output, ``(K, *output.shape)``, which others have taken this far in the graph's place.
        can_sample: whether whoever gets the rows takes them at some positions alone.
        blocks: by parameter that took part, the blocks of its factor that did; None is all.
    """

    rule: Any
    place: Place = dataclasses.field(default_factory=Place)
    input_shape: torch.Size | None = None
    kept: Any = None
    before: Before = dataclasses.field(default_factory=Before)
    samples: tuple[int, ...] | None = None
    handed: Tensor | None = None
    can_sample: bool = False
    blocks: dict[str, range | None] = dataclasses.field(default_factory=dict)

    @property
    def copies(self) -> int:
        """Copies of each data point."""
        return self.place.copies

    def takes_samples(self) -> bool:
        """Whether the rule takes gradients at some positions alone."""
        return self.can_sample and self.place == Place() and self.rule.takes_samples()

    def hand(self, columns: Tensor, samples: tuple[int, ...] | None) -> None:
        """Hand gradients at the output on."""
        self.handed, self.samples = columns, samples

    def kept_bytes(self) -> int:
        """Bytes of what the rule kept."""
        kept = self.kept
        tensors = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, tuple) else [kept]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def arguments_in_order(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> list[Any]:
    """The arguments of a call of a module's forward, or of another one, in the order of its parameters, whichever were named."""
    if not kwargs:
        return list(args)
    try:
        bound = inspect.signature(forward or module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a forward that has no signature, or hides it
        return [*args, *kwargs.values()]
    return [*bound.args, *bound.kwargs.values()]

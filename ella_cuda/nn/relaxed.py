"""A relaxed equivariance layer: several paths over one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class RelaxedEquivariance(nn.Module):
    """The mean of several paths over the same input, each with its own symmetry.

    The prior precision of each path's parameters says how much the path may do; learned from the marginal likelihood, it says how
    much symmetry the layer wants. Paths are children under their own names: ``layer.conv``, ``layer.f_fc``.

    Args:
        paths: name -> module; every module maps the layer's input to outputs of one shape.

    Raises:
        TypeError: paths are not named, or one is no module.
        ValueError: no path, or a name that no child can have. In forward: two paths give outputs of different shapes (the message names
            them).

    Source: van der Ouderaa et al., NeurIPS 2023, section 3.4; their released code divides the sum by the number of paths.
    """

    def __init__(self, paths: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not paths:
            raise ValueError("RelaxedEquivariance: paths must name at least one module, got an empty mapping.")
        self.path_names = tuple(paths)
        for name, module in paths.items():
            try:
                self.add_module(name, module)
            except KeyError as error:
                raise ValueError(f"RelaxedEquivariance: {error.args[0]}; choose another name for the path.") from error

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the paths' outputs. In a recorded CUDA graph the paths run beside one another."""
        first, *others = self.path_names
        outputs = self._beside(x) if x.is_cuda and torch.cuda.is_current_stream_capturing() else self._in_turn(x)
        total = next(outputs)
        for name, y in zip(others, outputs, strict=True):
            if y.shape != total.shape:
                raise ValueError(
                    f"RelaxedEquivariance: path {name!r} gives shape {tuple(y.shape)} where path {first!r} gives {tuple(total.shape)}; "
                    "all paths of a layer must agree."
                )
            total = total + y
        if not others:
            return total
        if not total.is_floating_point():  # a mean of whole numbers is none
            return total / len(self.path_names)
        return total.div_(len(self.path_names))  # nobody else's yet, and new memory costs a page fault for every 4 KiB

    def _in_turn(self, x: Tensor) -> Iterator[Tensor]:
        return (getattr(self, name)(x) for name in self.path_names)

    def _beside(self, x: Tensor) -> Iterator[Tensor]:
        """Each path but the first on a stream of its own, which autograd takes for its gradients too."""
        here = torch.cuda.current_stream(x.device)
        first, *others = self.path_names
        found: list[tuple[torch.cuda.Stream, Tensor]] = []
        for name in others:
            stream = torch.cuda.Stream(x.device)
            stream.wait_stream(here)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                found.append((stream, getattr(self, name)(x)))
        yield getattr(self, first)(x)
        for stream, y in found:
            here.wait_stream(stream)
            y.record_stream(here)
            yield y

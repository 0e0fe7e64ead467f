"""From images to features over a group and back, and other layers on such features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.groups import Group, as_group
from ella_cuda.nn._autocast import full_precision, widened
from ella_cuda.nn._sizes import Size, as_size, check_same_kind
from ella_cuda.nn.factored import FactoredLinear2d
from ella_cuda.ops._precision import autocast_is_on
from ella_cuda.ops.polyphase_pool import check_norm

FRAMES = ("own", "common")


def as_frames(frames: str) -> str:
    """The name; ValueError if it is unknown."""
    if frames not in FRAMES:
        raise ValueError(f"frames must be one of {', '.join(FRAMES)}, got {frames!r}.")
    return frames


def require_tensor(layer: str, x: Tensor) -> None:
    """TypeError for anything else."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer}: x must be a tensor, got {type(x).__name__}.")


def check_features(layer: str, x: Tensor, channels: int | None, group: Group, weight: Tensor | None = None) -> None:
    """ValueError unless x is ``(N, channels, order, H, W)``, of the weight's dtype and on its device; None channels are any number.
    TypeError unless it is a tensor."""
    require_tensor(layer, x)
    if weight is not None:
        check_same_kind(layer, x, weight)
    if x.dim() != 5 or x.shape[2] != group.order or channels not in (None, x.shape[1]):
        wanted = "C" if channels is None else channels
        raise ValueError(
            f"{layer}: x must have shape (N, {wanted}, {group.order}, H, W), with a slice for each element of {group.name}, got "
            f"{tuple(x.shape)}; GroupLift makes such features of images."
        )


def turn_slices(x: Tensor, group: Group, to: str) -> Tensor:
    """Features with every slice turned from the image's frame, common to all, to its own, or back.

    Args:
        x: ``(N, C, G, H, W)``.
        group: of G elements.
        to: "own", slice g is moved by g; "common", by its inverse.
    """
    elements = range(group.order) if to == "own" else group.inverse
    return torch.stack([group.act(s, g) for s, g in zip(x.unbind(2), elements, strict=True)], 2)


class _GroupModule(nn.Module):
    """A layer that knows its group."""

    def __init__(self, group: str | Group = "p4") -> None:
        super().__init__()
        self.group = as_group(group)

    def extra_repr(self) -> str:
        return f"group={self.group.name!r}"


class GroupLift(_GroupModule):
    """Features over a group from images: slice g is the image moved by g. ``(N, C, H, W) -> (N, C, G, H, W)``.

    An image moved by h gives the same slices in other places: slice g is what slice ``g h`` was
    (:meth:`ella_cuda.groups.Group.act_on_features`).

    Args:
        group: "p4" (slice g is ``torch.rot90(x, g, (-2, -1))``), "p4m", or a :class:`ella_cuda.groups.Group`.

    Raises:
        ValueError: an unknown group; in forward, an input that is no batch of images or that the group does not act on.

    Source: van der Ouderaa et al., NeurIPS 2023, section 6 and appendix.
    """

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, C, G, H, W)``."""
        require_tensor("GroupLift", x)
        if x.dim() != 4:
            raise ValueError(f"GroupLift: x must have shape (N, C, H, W), got {tuple(x.shape)}.")
        return torch.stack([self.group.act(x, g) for g in range(self.group.order)], 2)


class GroupMaxPool(_GroupModule):
    """The largest value over a group's slices: ``(N, C, G, H, W) -> (N, C, H, W)``.

    On a single position that is invariant to the group; of equal values the first gets the gradient.

    Args:
        group: see :class:`GroupLift`.
    """

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, G, H, W) -> (N, C, H, W)``."""
        check_features("GroupMaxPool", x, None, self.group)
        return x.max(2).values


class GroupPolyphasePool2d(_GroupModule):
    """Subsample features over a group by two, ``(N, C, G, H, W) -> (N, C, G, H/2, W/2)``, equivariantly.

    Args:
        group: see :class:`GroupLift`.
        frames: see :class:`ella_cuda.nn.GroupConv2d`. "own": every slice of every image has its largest component chosen by itself.
            "common": one component of the image's grid for all slices of an image, so that they stay aligned.
        norm: see :func:`ella_cuda.ops.polyphase_pool`.
    """

    def __init__(self, group: str | Group = "p4", frames: str = "own", norm: float = 2) -> None:
        super().__init__(group)
        check_norm("GroupPolyphasePool2d", norm)
        self.frames, self.norm = as_frames(frames), norm

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, G, H, W) -> (N, C, G, H/2, W/2)``."""
        check_features("GroupPolyphasePool2d", x, None, self.group)
        n, order = x.shape[0], self.group.order
        if self.frames == "own":
            return (
                ops.polyphase_pool(x.transpose(1, 2).flatten(0, 1), self.norm).unflatten(0, (n, order)).transpose(1, 2)
            )
        pooled = ops.polyphase_pool(turn_slices(x, self.group, "common").flatten(1, 2), self.norm)
        return turn_slices(pooled.unflatten(1, (-1, order)), self.group, "own")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frames={self.frames!r}, norm={self.norm}"


class SlicesAsChannels(_GroupModule):
    """A layer on images applied to features over a group, whose slices are channels to it.

    ``(N, C, G, H, W) -> (N, C*G, H, W) -> layer -> (N, D*G, H', W') -> (N, D, G, H', W')``, channel ``c*G + g`` being slice g of
    channel c. It knows nothing of the group: of the multi-group network it is the CONV and the F-FC path.

    Args:
        layer: ``(N, C*G, H, W) -> (N, D*G, H', W')``.
        group: see :class:`GroupLift`.
        frames: "own" leaves the slices as they are; "common" turns them to the image's frame and back, so that a convolution of the
            slices is one of images, equivariant to their translation.

    Source: van der Ouderaa et al., NeurIPS 2023, appendix.
    """

    def __init__(self, layer: nn.Module, group: str | Group = "p4", frames: str = "own") -> None:
        super().__init__(group)
        if not isinstance(layer, nn.Module):
            raise TypeError(f"SlicesAsChannels: layer must be a module, got {type(layer).__name__}.")
        self.layer, self.frames = layer, as_frames(frames)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, G, H, W) -> (N, D, G, H', W')``."""
        check_features("SlicesAsChannels", x, None, self.group)
        if autocast_is_on(x.device.type):  # which then is the layer's own affair
            x = widened(x, self)
        if self.frames == "common":
            x = turn_slices(x, self.group, "common")
        y = self.layer(x.flatten(1, 2))
        if y.dim() != 4 or y.shape[1] % self.group.order:
            raise ValueError(
                f"SlicesAsChannels: the layer must give (N, D * {self.group.order}, H', W'), got {tuple(y.shape)}."
            )
        y = y.unflatten(1, (-1, self.group.order))
        return turn_slices(y, self.group, "own") if self.frames == "common" else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frames={self.frames!r}"


class GroupFactoredLinear2d(_GroupModule):
    """F-FC over the domain of a group, group and grid together: ``(N, C, G, H, W) -> (N, D, G, H', W')``.

    Its weights are those of a :class:`ella_cuda.nn.FactoredLinear2d` on ``G*H x W`` images: ``D*C*G*(H*W + H'*W')`` of them.

    Args:
        in_channels: C.
        out_channels: D.
        in_size: H and W, or one number for both.
        out_size: H' and W', or one number for both.
        group: see :class:`GroupLift`.
        bias: whether the layer has biases.
        device, dtype: of the parameters, float32 or float64; None is torch's default.

    Raises:
        ValueError: a size is not positive; in forward, the input does not fit.

    Source: van der Ouderaa et al., NeurIPS 2023, section 3.1, with positions in a group.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_size: Size,
        out_size: Size,
        group: str | Group = "p4",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_size, self.out_size = as_size("in_size", in_size), as_size("out_size", out_size)
        sizes = [(self.group.order * height, width) for height, width in (self.in_size, self.out_size)]
        self.factored = FactoredLinear2d(in_channels, out_channels, *sizes, bias, device, dtype)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, G, H, W) -> (N, D, G, H', W')``."""
        check_features("GroupFactoredLinear2d", x, self.factored.in_channels, self.group, self.factored.weight_in)
        if tuple(x.shape[3:]) != self.in_size:
            raise ValueError(
                f"GroupFactoredLinear2d: x must have slices of {self.in_size[0]}x{self.in_size[1]}, got {tuple(x.shape)}."
            )
        return self.factored(x.flatten(2, 3)).unflatten(2, (self.group.order, self.out_size[0]))

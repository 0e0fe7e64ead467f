"""The network of the paper, for any sum of paths."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ella_cuda.groups import Group, as_group
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    FullyConnected2d,
    GroupConv2d,
    GroupFactoredLinear2d,
    GroupLift,
    GroupMaxPool,
    GroupPolyphasePool2d,
    PolyphasePool2d,
    RelaxedEquivariance,
    SlicesAsChannels,
    SparseConv2d,
    SparseFactoredLinear2d,
    StridedCircularConv2d,
)
from ella_cuda.nn._sizes import as_count
from ella_cuda.nn.group_layers import as_frames
from ella_cuda.ops.polyphase_pool import check_norm

# Output channels in units of the width, and the factor by which each side shrinks from the layer's input to its output.
STAGES = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 2), (16, 2))
HEAD_CHANNELS = 64  # hidden units of the head, in units of the width


def conv_path(in_channels: int, out_channels: int, in_size: int, out_size: int, norm: float = 2) -> nn.Module:
    """A 3x3 convolution with circular padding; where the stage halves the size, with adaptive polyphase sampling by ``norm``."""
    same = in_size == out_size
    conv = (
        CircularConv2d(in_channels, out_channels)
        if same
        else StridedCircularConv2d(in_channels, out_channels, norm=norm)
    )
    nn.init.kaiming_uniform_(conv.weight, nonlinearity="relu")
    nn.init.zeros_(conv.bias)
    return conv if same else nn.Sequential(conv)  # every halving path is a sequence, so that tensors are named alike


def sparse_conv_path(
    in_channels: int, out_channels: int, in_size: int, out_size: int, basis: str = "interpolating", norm: float = 2
) -> nn.Module:
    """As :func:`conv_path`, with the kernel given at five anchors."""
    conv = SparseConv2d(in_channels, out_channels, basis=basis)
    return conv if in_size == out_size else nn.Sequential(conv, PolyphasePool2d(norm))


def group_conv_path(
    in_channels: int,
    out_channels: int,
    in_size: int,
    out_size: int,
    variant: str = "pointwise",
    group: str | Group = "p4",
    frames: str = "own",
    norm: float = 2,
) -> nn.Module:
    """As :func:`conv_path`, a convolution over a group and the grid on features over the group."""
    conv = GroupConv2d(in_channels, out_channels, variant=variant, group=group, frames=frames)
    filters = list(conv)
    for part in filters:
        nn.init.kaiming_uniform_(part.weight, nonlinearity="relu" if part is filters[-1] else "linear")
    return conv if in_size == out_size else nn.Sequential(conv, GroupPolyphasePool2d(group, frames, norm))


Path = Callable[[int, int, int, int], nn.Module]
PATHS: dict[str, Path] = {
    "fc": FullyConnected2d,
    "f_fc": FactoredLinear2d,
    "conv": conv_path,
    "s_fc": SparseFactoredLinear2d,
    "s_conv": sparse_conv_path,
    "gconv": group_conv_path,
    "gf_fc": GroupFactoredLinear2d,
}
GROUP_PATH = "gconv"  # with it, all layers are on features over the group
BESIDE_GROUP = frozenset({"gf_fc"})  # paths on features over the group that need it


def require_paths(name: str, layer: str) -> tuple[str, ...]:
    """The paths of a layer.

    Raises:
        ValueError: an unknown or repeated one, or one over a group without GCONV; the message names the argument.
    """
    paths = tuple(layer.split("+"))
    if not set(paths) <= set(PATHS) or len(set(paths)) != len(paths):
        raise ValueError(f"{name} must be different names out of {', '.join(PATHS)} joined by '+', got {layer!r}.")
    if BESIDE_GROUP & set(paths) and GROUP_PATH not in paths:
        raise ValueError(f"{name} must name {GROUP_PATH} beside {', '.join(BESIDE_GROUP)}, got {layer!r}.")
    return paths


def over_slices(path: Path, group: Group, frames: str) -> Path:
    """The path of a multi-group layer: it sees and gives the slices of features over the group as channels."""

    def make(in_channels: int, out_channels: int, in_size: int, out_size: int) -> nn.Module:
        layer = path(in_channels * group.order, out_channels * group.order, in_size, out_size)
        return SlicesAsChannels(layer, group, frames)

    return make


EQUIVARIANT_PATHS = ("conv", "s_conv", "gconv")
SPARSE_PATHS = frozenset({"s_fc", "s_conv"})  # with bases to learn
INITS = ("published", "equivariant")
QUIET = 0.3  # of the published size: where weight_in of an F-FC path that is off starts


def restore_variance(path: nn.Module) -> None:
    """Scale a freshly initialised sparsified path so that its weights at all positions vary as a dense path's do.

    A least squares fit keeps only what smooth functions can follow of white noise, half of its variance or less. Eight layers of that
    leave nothing of a signal, and the evidence switches off what does not learn.

    Raises:
        ValueError: the weights are zero everywhere, as where an inverse lengthscale is so large that no position is near an anchor.
    """

    def scale(values: Tensor, expanded: Tensor, deviation: float) -> None:
        found = expanded.square().mean().sqrt()
        if found.device.type != "meta" and not found > 0:
            raise ValueError(
                "inverse_lengthscale is so large that the basis functions vanish at all positions; lower it to about one per pixel."
            )
        values.mul_(deviation / found)

    for layer in path.modules():
        with torch.no_grad():
            if isinstance(layer, SparseConv2d):
                scale(layer.weight, layer.kernel(), math.sqrt(2 / (layer.in_channels * layer.basis.num_points)))
            elif isinstance(layer, SparseFactoredLinear2d):
                scale(layer.weight_in, layer.basis_in.expand(layer.weight_in), 1 / math.sqrt(layer.basis_in.num_points))
                scale(layer.weight_out, layer.basis_out.expand(layer.weight_out), 1 / math.sqrt(layer.in_channels))


def start_equivariant(block: RelaxedEquivariance) -> None:
    """Make a freshly initialised layer as equivariant as it can be: its other paths' outputs are zero, and its equivariant
    paths, ``m`` of ``n``, have their weights multiplied by ``n / sqrt(m)``, so that the mean over paths has the variance
    of one path alone.

    An FC path starts at ``weight = 0``, an F-FC or S-FC path at ``weight_out = 0``: both have a gradient at once. What of their
    ``weight_in`` no data ask for is noise that the prior has to shrink before it can switch the path off, so it starts
    smaller than published, at :data:`QUIET` times. A layer without an equivariant path stays as it is, but for the variance of
    sparsified paths (:func:`restore_variance`).

    With one equivariant path that is strict. Several paths of a subsampling layer choose their polyphase components each by itself,
    so that their sum is equivariant to fewer translations, and a convolution of slices does not know the group.
    """
    for name in block.path_names:
        restore_variance(block.get_submodule(name))
    equivariant = [name for name in block.path_names if name in EQUIVARIANT_PATHS]
    if not equivariant:
        return
    scale = len(block.path_names) / math.sqrt(len(equivariant))
    for name in block.path_names:
        path = block.get_submodule(name)
        with torch.no_grad():
            if name in equivariant:
                [p for p in path.parameters() if p.dim() > 1][-1].mul_(scale)  # the last of filters in a row
                continue
            for layer in path.modules():
                if isinstance(layer, (FactoredLinear2d, SparseFactoredLinear2d)):
                    layer.weight_out.zero_()
                    layer.weight_in.mul_(QUIET)
                elif isinstance(layer, FullyConnected2d):
                    layer.linear.weight.zero_()


class Neyshabur(nn.Module):
    """Eight relaxed equivariance layers and a fully connected head; see :func:`neyshabur`."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        in_channels: int,
        num_classes: int,
        width: int,
        image_size: int,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.image_size = in_channels, image_size
        self.lift = nn.Identity() if group is None else GroupLift(group)
        self.blocks = nn.ModuleList()
        channels, size = in_channels, image_size
        for multiple, shrink in STAGES:
            geometry = (channels, multiple * width, size, size // shrink)
            self.blocks.append(RelaxedEquivariance({name: make(*geometry) for name, make in paths.items()}))
            channels, size = multiple * width, size // shrink
        self.activation = nn.ReLU()
        self.pool = nn.Identity() if group is None else GroupMaxPool(group)
        features = channels * size * size
        hidden = HEAD_CHANNELS * width
        self.head = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
        for linear in (self.head[0], self.head[2]):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, in_channels, image_size, image_size) -> (N, num_classes)``, logits."""
        if x.dim() != 4 or tuple(x.shape[1:]) != (self.in_channels, self.image_size, self.image_size):
            raise ValueError(
                f"x must have shape (N, {self.in_channels}, {self.image_size}, {self.image_size}), got {tuple(x.shape)}."
            )
        x = self.lift(x)
        for block in self.blocks:
            x = self.activation(block(x))
        return self.head(self.pool(x).flatten(1))


def require_image_size(size: int) -> None:
    """ValueError for height and width that :func:`neyshabur` does not take."""
    if size % 32:
        raise ValueError(f"image_size must be a multiple of 32 (the network halves it five times), got {size}.")


def neyshabur(
    layer: str = "f_fc+conv",
    in_channels: int = 3,
    num_classes: int = 10,
    width: int = 10,
    image_size: int = 32,
    init: str = "published",
    basis: str = "interpolating",
    inverse_lengthscale: float = 1.0,
    group: str | Group = "p4",
    group_conv: str = "pointwise",
    frames: str = "own",
    pool_norm: float = 2,
) -> Neyshabur:
    """The paper's network, after Neyshabur (2020), with every layer a sum of the named paths.

    Eight stages (channels from ``width`` to ``16 * width``, sides ``image_size`` down to ``image_size / 32``), ReLU after each, then two
    fully connected layers. With ``image_size=32``, ``width=10`` it has 1,771,945 parameters for "f_fc+conv" on 3 channels and 10 classes.

    Args:
        layer: names joined by "+", any sum of ``fc``, ``conv``, ``f_fc``, ``s_fc``, ``s_conv``, ``gconv``, ``gf_fc``; the names are the
            paths' in ``model.blocks[i]``. With ``gconv`` the image is lifted to a group first, ``gf_fc`` is F-FC over group and grid
            together, all other paths see the slices as channels, and the head sees their maximum. ``gf_fc`` needs ``gconv`` beside it.
        in_channels: channels of the images.
        num_classes: K, the number of outputs.
        width: α, the multiple of all channel counts.
        image_size: height and width of the images, a multiple of 32.
        init: "published", every path as if it were alone; or "equivariant", of every layer that has equivariant paths
            these alone on at the start, see :func:`start_equivariant`.
        basis: of S-FC and S-CONV paths, "interpolating" or "exponential".
        inverse_lengthscale: ω per pixel of S-FC paths at the start; the 3x3 kernels of S-CONV paths start at 1.
        group: of GCONV paths: "p4", "p4m" or a :class:`ella_cuda.groups.Group`.
        group_conv: variant of GCONV paths, see :class:`ella_cuda.nn.GroupConv2d`.
        frames: of GCONV and, beside them, convolutional paths: "own", as published, or "common", see there.
        pool_norm: of polyphase components, which decides in halving stages of convolutional paths: 1, 2 or ``math.inf``; the released code
            takes the maximum.

    Returns:
        A module ``(N, in_channels, image_size, image_size) -> (N, num_classes)``.

    Raises:
        TypeError: layer is no string.
        ValueError: an unknown or repeated path, ``gf_fc`` without ``gconv``, an unknown init, a size that is not positive or not a multiple
            of 32, or a norm that there is not.

    Source: van der Ouderaa et al., NeurIPS 2023, section 6 and appendix; Neyshabur, "Towards learning convolutions from scratch",
    NeurIPS 2020.
    """
    if not isinstance(layer, str):
        raise TypeError(f"layer must be names of paths joined by '+', such as \"f_fc+conv\", got {layer!r}.")
    paths = require_paths("layer", layer)
    sizes = {"in_channels": in_channels, "num_classes": num_classes, "width": width, "image_size": image_size}
    for name, value in sizes.items():
        as_count(name, value)
    require_image_size(image_size)
    as_frames(frames)
    check_norm("neyshabur", pool_norm)
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}.")
    chosen = None
    own = {
        "conv": {"norm": pool_norm},
        "s_fc": {"basis": basis, "inverse_lengthscale": inverse_lengthscale},
        "s_conv": {"basis": basis, "norm": pool_norm},
        GROUP_PATH: {"norm": pool_norm},
    }
    makers = {name: functools.partial(PATHS[name], **own.get(name, {})) for name in paths}
    if GROUP_PATH in makers:
        chosen = as_group(group)
        makers = {
            name: functools.partial(make, variant=group_conv, group=chosen, frames=frames)
            if name == GROUP_PATH
            else functools.partial(make, group=chosen)
            if name in BESIDE_GROUP
            else over_slices(make, chosen, frames if name in EQUIVARIANT_PATHS else "own")
            for name, make in makers.items()
        }
    model = Neyshabur(makers, in_channels, num_classes, width, image_size, chosen)
    if init == "equivariant":
        for block in model.blocks:
            start_equivariant(block)
    return model

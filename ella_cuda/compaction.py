"""A smaller network of torch's own modules out of a trained one: paths and units that the evidence switched off are removed."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ella_cuda.laplace import KronLaplace
from ella_cuda.models import Neyshabur
from ella_cuda.modes import evaluation_mode
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    FullyConnected2d,
    PolyphasePool2d,
    RelaxedEquivariance,
    SparseConv2d,
    SparseFactoredLinear2d,
    StridedCircularConv2d,
)
from ella_cuda.ops.factored_linear import factored_linear_torch
from ella_cuda.ops.polyphase_pool import polyphase_pool_torch

# Modules through which each channel goes by itself.
CHANNELWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish),
    *(nn.Identity, nn.Dropout, nn.Dropout2d, nn.BatchNorm1d, nn.BatchNorm2d),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)


@dataclasses.dataclass
class Layer:
    """A layer by its name in the network: its ``paths``, number of output ``units`` and of ``parameters``, each before and after."""

    name: str
    paths: tuple[tuple[str, ...], tuple[str, ...]]
    units: tuple[int, int]
    parameters: tuple[int, int]


@dataclasses.dataclass
class Report:
    """Number of ``parameters`` and ``flops`` of one example, each before and after, and the :class:`Layer` s of the network."""

    layers: list[Layer]
    parameters: tuple[int, int]
    flops: tuple[int, int]

    @property
    def sparsity(self) -> float:
        """The share of parameters that are gone; negative where a dense weight took the place of a sparsified one."""
        return 1 - self.parameters[1] / self.parameters[0]


class PolyphaseSample(nn.Module):
    """:class:`ella_cuda.nn.PolyphasePool2d` in torch's ops."""

    def __init__(self, norm: float = 2) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, C, H/2, W/2)``."""
        return polyphase_pool_torch(x, self.norm)


class Factored(nn.Module):
    """:class:`ella_cuda.nn.FactoredLinear2d` without its output bias, in torch's products."""

    def __init__(self, weight_in: Tensor, weight_out: Tensor, bias_in: Tensor | None) -> None:
        super().__init__()
        self.weight_in, self.weight_out = nn.Parameter(weight_in), nn.Parameter(weight_out)
        self.bias_in = None if bias_in is None else nn.Parameter(bias_in)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        weights = self.weight_in.flatten(2), self.weight_out.flatten(2)
        return factored_linear_torch(x.flatten(2), *weights, self.bias_in).unflatten(2, self.weight_out.shape[2:])


class Dense(nn.Module):
    """:class:`ella_cuda.nn.FullyConnected2d` without a bias."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)  # (D, H', W', C, H, W)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        outputs = self.weight.shape[:3]
        return F.linear(x.flatten(1), self.weight.flatten(3).flatten(0, 2)).unflatten(1, outputs)


class Placed(nn.Module):
    """A path whose outputs are some of a layer's channels; zeros are the others."""

    def __init__(self, path: nn.Module, kept: list[int], channels: int) -> None:
        super().__init__()
        self.path, self.kept = path, kept
        self.place: Tensor
        self.register_buffer("place", torch.empty(0, dtype=torch.long))
        self.among([*range(channels)])

    def among(self, channels: list[int]) -> None:
        """Have these channels of the layer alone, by their numbers at the start."""
        where = [self.kept.index(c) if c in self.kept else len(self.kept) for c in channels]
        self.place = torch.tensor(where, device=next(self.path.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        return F.pad(self.path(x), (0, 0, 0, 0, 0, 1)).index_select(1, self.place)


class Sum(nn.Module):
    """The sum of paths, of a ``bias``, ``(D, H', W')`` or ``(D, 1, 1)``, and of a bias of all channels, ``(1, H', W')``; each may be None."""

    def __init__(self, paths: Mapping[str, nn.Module], bias: Any, of_positions: Any) -> None:
        super().__init__()
        self.paths = nn.ModuleDict(paths)
        self.bias, self.of_positions = _spread(bias), _spread(of_positions)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        first, *others = self.paths.values()
        total = first(x)
        for path in others:
            total = total + path(x)
        for bias in (self.bias, self.of_positions):
            if bias is not None:
                total = total + bias
        return total


@torch.no_grad()
def compact(
    model: nn.Module, la: KronLaplace | None = None, example: Tensor | None = None, *, threshold: float = 0.5
) -> tuple[nn.Module, Report]:
    r"""A plain network of the same map, without what the evidence switched off.

    Layers become torch's convolutions and products: the mean over paths is folded into their weights, kernels and factors given at anchors
    are expanded, and a factored path whose dense weight is no larger becomes that. Without ``la`` that is all, and exact.

    A unit is an output channel or feature. It is off in a path where the data determine fewer than ``threshold`` of the elements of one of
    its weights, by ``la.effective_parameters(per_unit=True)``. Such a unit leaves the path; a path without units leaves its layer; a
    unit that is off in all paths leaves the network with the weights that read it, and its mean over ``example`` goes into the next layer's
    bias, for a convolution the mean over positions. That is exact for units whose weights are zero and whose bias is the same at all
    positions, unless zero padding ends what a convolution reads of them; else it is an approximation, so compare the NLL. One unit of a
    layer stays. Training with a precision per unit (``prior_structure="unit"``) shrinks weights of units that the data do not ask for.

    Args:
        model: :func:`ella_cuda.models.neyshabur`'s, or an ``nn.Sequential``, flat or nested, of which units leave linear layers and
            convolutions with one group that others of them read through activations, pooling, batch norms and flattening. Outputs
            stay. The model itself is not changed.
        la: fitted to it, for paths and units.
        example: a batch of training inputs, for sizes and means; not needed of neyshabur's without ``la``.
        threshold: elements, positive.

    Returns:
        The network, in evaluation mode, and the :class:`Report`.

    Raises:
        TypeError: model is of another kind, or la no :class:`~ella_cuda.laplace.KronLaplace`.
        ValueError: a layer has no plain form (group convolutions); la is of another model, or not fitted; threshold is not positive;
            example is None where it is needed.

    Source: van der Ouderaa et al., NeurIPS 2023, section 5 (paths); Dhahri et al., "Shaving weights with Occam's razor", NeurIPS 2024
    (structured priors).
    """
    if la is not None and not isinstance(la, KronLaplace):
        raise TypeError(f"compact: la must be a KronLaplace, got {type(la).__name__}.")
    if la is not None and la.model is not model:
        raise ValueError("compact: la must be fitted to this model, and is of another one.")
    if not threshold > 0:
        raise ValueError(f"compact: threshold must be positive, got {threshold!r}.")
    if example is None and (la is not None or not isinstance(model, Neyshabur)):
        raise ValueError("compact: example must be training inputs, got None; pass a batch of them, (N, ...).")
    gamma = {} if la is None else la.effective_parameters(per_unit=True)
    with evaluation_mode(model):
        items = list(_items(model))
        if example is None:
            example = next(model.parameters()).new_zeros(1, model.in_channels, model.image_size, model.image_size)
        example = example.clone()  # for modules that work in place
        whole = nn.Sequential(*(_plain(name, module, {}, 0.0)[0] for name, module in items)).eval()
        chain, layers = [], []
        for name, module in items:
            plain, layer = _plain(name, module, gamma, threshold)
            chain.append(plain)
            if layer is not None:
                layers.append((len(chain) - 1, layer))
    small = _without_units(chain, layers, whole, example)
    parameters = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in small.parameters())
    return small, Report(
        [layer for _, (layer, _) in layers], parameters, (_flops(whole, example[:1]), _flops(small, example[:1]))
    )


def _items(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The network's modules in the order of their calls."""
    if isinstance(model, Neyshabur):
        if not isinstance(model.lift, nn.Identity):
            raise ValueError(
                "compact: group convolutions have no plain form here; the network must have CONV and FC paths alone."
            )
        for i, block in enumerate(model.blocks):
            yield from ((f"blocks.{i}", block), ("", nn.ReLU()))
        yield "", nn.Flatten()
        model, prefix = model.head, "head."
    if type(model) is not nn.Sequential:
        raise TypeError(
            f"compact: model must be ella_cuda.models.neyshabur's or an nn.Sequential, got {type(model).__name__}."
        )
    for name, module in model._modules.items():  # named_children() has a module that is used twice once
        if type(module) is nn.Sequential:
            yield from _items(module, f"{prefix}{name}.")
        else:
            yield prefix + name, module


# (the layer's entry in the report, its units that are off in all paths)
Outcome = tuple[Layer, list[int]]


def _plain(
    name: str, module: nn.Module, gamma: Mapping[str, Tensor], threshold: float
) -> tuple[nn.Module, Outcome | None]:
    """The plain module, without units and paths that are off, but with all its output channels."""
    if isinstance(module, RelaxedEquivariance):
        paths = {p: getattr(module, p) for p in module.path_names}
    elif isinstance(
        module,
        (
            nn.Linear,
            nn.Conv2d,
            FactoredLinear2d,
            SparseFactoredLinear2d,
            SparseConv2d,
            StridedCircularConv2d,
            FullyConnected2d,
        ),
    ):
        paths = {"": module}
    elif isinstance(module, (*CHANNELWISE, nn.Flatten)):
        return copy.deepcopy(module), None
    elif isinstance(module, PolyphasePool2d):
        return PolyphaseSample(module.norm), None
    else:
        raise ValueError(f"compact: {name} is a {type(module).__name__}, which has no plain form here.")
    found, biases, maps, dead, channels = {}, [], [], [], 0
    for path, layer in paths.items():
        within = ".".join(part for part in (name, path) if part)
        made, bias, of_positions, channels = _plain_path(within, layer, 1 / len(paths))
        off = _off(within, layer, gamma, threshold, channels)
        dead.append(off)
        kept = [c for c in range(channels) if c not in off]
        if off and path:  # of a single layer, units leave later, or not at all
            bias = bias + _constants(made, off)
            if kept:
                _keep_outputs(made, kept)
                made = Placed(made, kept, channels)
        biases.append(bias)
        maps.append(of_positions)
        if kept or not path:
            found[path] = made
    gone = sorted(set.intersection(*dead))
    size = sum(p.numel() for p in module.parameters())
    layer = Layer(name, (tuple(paths), tuple(found)), (channels, channels), (size, size))
    if "" in paths:
        made = found[""]
        if not isinstance(made, (nn.Linear, nn.Conv2d)):
            made = Sum({"path": made}, biases[0], maps[0])
        return made, (layer, gone)
    if not found:  # one path with one unit stays
        path = min(paths, key=lambda p: sum(q.numel() for q in paths[p].parameters()))
        own, gamma = f"{name}.{path}.", dict(gamma)
        for n in [n for n in gamma if n.startswith(own)]:
            gamma[n] = gamma[n].clone()
            gamma[n][: max(1, len(gamma[n]) // channels)] = math.inf
        return _plain(name, module, gamma, threshold)
    return Sum(found, sum(biases), sum(maps)), (layer, gone)


def _plain_path(name: str, layer: nn.Module, weight: float) -> tuple[nn.Module, Any, Any, int]:
    """A path times a weight: its module, constants to be added, ``(D, H', W')`` and ``(1, H', W')`` or 0, and its output channels."""
    if type(layer) is nn.Sequential:
        parts = [_plain_path(name, part, weight if i == 0 else 1.0) for i, part in enumerate(layer)]
        return nn.Sequential(*(m for m, *_ in parts)), 0, 0, parts[0][3]
    if isinstance(layer, PolyphasePool2d):
        return PolyphaseSample(layer.norm), 0, 0, 0
    if isinstance(layer, (SparseConv2d, SparseFactoredLinear2d)):
        layer = layer.to_dense()
    if type(layer) is nn.Linear:
        return copy.deepcopy(layer), 0, 0, layer.out_features
    if type(layer) in (nn.Conv2d, CircularConv2d):  # another class has another map
        return _convolution(layer, weight), 0, 0, layer.out_channels
    if isinstance(layer, StridedCircularConv2d):
        return nn.Sequential(_convolution(layer, weight), PolyphaseSample(layer.norm)), 0, 0, layer.out_channels
    if isinstance(layer, FullyConnected2d):
        sizes = layer.out_channels, *layer.out_size
        dense = layer.linear.weight.detach().view(*sizes, layer.in_channels, *layer.in_size)
        bias = 0 if layer.linear.bias is None else layer.linear.bias.detach().view(sizes) * weight
        return Dense(dense * weight), bias, 0, layer.out_channels
    if isinstance(layer, FactoredLinear2d):
        first, last, biased = layer.weight_in.detach(), layer.weight_out.detach() * weight, layer.bias_in is not None
        bias = layer.bias_in.detach().clone() if biased else None
        of_positions = layer.bias_out.detach()[None] * weight if biased else 0
        path = Factored(first.clone(), last, bias)
        if math.prod(layer.in_size) * math.prod(layer.out_size) > math.prod(layer.in_size) + math.prod(layer.out_size):
            return path, 0, of_positions, layer.out_channels
        dense = torch.einsum("dcxy,dcuv->duvcxy", first, last)
        return Dense(dense), _of_bias_in(path), of_positions, layer.out_channels
    raise ValueError(f"compact: {name} has a {type(layer).__name__}, which has no plain form here.")


def _of_bias_in(path: Factored) -> Any:
    """The input's bias as one of the output, ``(D, H', W')``, or 0."""
    return 0 if path.bias_in is None else path.weight_out.detach().sum(1) * path.bias_in.detach()[:, None, None]


def _convolution(layer: Any, weight: float) -> nn.Conv2d:
    if type(layer) is nn.Conv2d:
        conv = copy.deepcopy(layer)
    else:
        padding = tuple(k // 2 for k in layer.kernel_size)
        kind = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        conv = nn.utils.skip_init(  # nothing is drawn
            nn.Conv2d,
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            padding=padding,
            padding_mode="circular",
            bias=layer.bias is not None,
            **kind,
        )
        conv.weight.copy_(layer.weight)
        if layer.bias is not None:
            conv.bias.copy_(layer.bias)
    for p in conv.parameters():
        p.mul_(weight)
    return conv


def _off(name: str, layer: nn.Module, gamma: Mapping[str, Tensor], threshold: float, channels: int) -> set[int]:
    """The units of which one of a path's weights is determined in fewer elements."""
    off: set[int] = set()
    for parameter, p in layer.named_parameters():
        found = gamma.get(f"{name}.{parameter}")
        if found is not None and p.dim() > 1 and not parameter.rpartition(".")[2].startswith("bias"):
            of_channels = found.view(channels, -1).sum(1) if len(found) % channels == 0 else None
            if of_channels is not None:
                off |= set((of_channels < threshold).nonzero().flatten().tolist())
    return off


def _of(path: nn.Module) -> nn.Module:
    """The module of a path that has its weights."""
    while isinstance(path, (nn.Sequential, Placed)):
        path = path[0] if isinstance(path, nn.Sequential) else path.path
    return path


def _constants(path: nn.Module, off: set[int]) -> Any:
    """Outputs of units without their weights, means over positions, ``(D, 1, 1)``, or 0."""
    layer = _of(path)
    if isinstance(layer, Factored):
        bias = _of_bias_in(layer)
        bias = None if isinstance(bias, int) else bias.mean((1, 2))
    else:
        bias = getattr(layer, "bias", None)
    if bias is None:
        return 0
    at = torch.tensor([c in off for c in range(len(bias))], device=bias.device)
    return torch.where(at, bias.detach(), torch.zeros_like(bias))[:, None, None]


def _spread(bias: Any) -> nn.Parameter | None:
    """A constant as a bias: none where it is zero, one number a channel where positions do not differ."""
    if not isinstance(bias, Tensor) or not bias.any():
        return None
    first = bias[:, :1, :1]
    return nn.Parameter((first if torch.equal(bias, first.expand_as(bias)) else bias).detach().clone())


def _keep_outputs(path: nn.Module, kept: list[int]) -> None:
    layer = _of(path)
    for name, p in layer.named_parameters():
        setattr(layer, name, nn.Parameter(p.detach()[kept].clone()))
    if isinstance(layer, nn.Conv2d):
        layer.out_channels = len(kept)
    if isinstance(layer, nn.Linear):
        layer.out_features = len(kept)


def _keep_inputs(path: nn.Module, kept: list[int], each: int) -> None:
    """Have the path read these channels alone, of which each is ``each`` features of a linear layer."""
    layer = _of(path)
    if isinstance(layer, nn.Linear):
        features = [c * each + i for c in kept for i in range(each)]
        layer.weight = nn.Parameter(layer.weight.detach()[:, features].clone())
        layer.in_features = len(features)
    elif isinstance(layer, nn.Conv2d):
        layer.weight = nn.Parameter(layer.weight.detach()[:, kept].clone())
        layer.in_channels = len(kept)
    elif isinstance(layer, Dense):
        layer.weight = nn.Parameter(layer.weight.detach()[:, :, :, kept].clone())
    else:
        layer.weight_in = nn.Parameter(layer.weight_in.detach()[:, kept].clone())
        layer.weight_out = nn.Parameter(layer.weight_out.detach()[:, kept].clone())


def _paths(layer: nn.Module) -> list[nn.Module]:
    return [*layer.paths.values()] if isinstance(layer, Sum) else [layer]


def _readable(layer: nn.Module) -> bool:
    """Whether inputs can leave: all of it are weights of one group."""
    return all(not isinstance(_of(p), nn.Conv2d) or _of(p).groups == 1 for p in _paths(layer))


def _without_units(
    chain: list[nn.Module], layers: list[tuple[int, Outcome]], whole: nn.Sequential, example: Tensor
) -> nn.Module:
    """The chain without the units that are off and followed by a layer; entries of the report are completed. ``whole`` is the chain with all
    units, from which their means come."""
    stages, means, usual, x = dict(layers), {}, {}, example
    for place, module in enumerate(whole):
        sizes = (2, 4) if place not in stages else (2,) if isinstance(module, nn.Linear) else (4,)
        usual[place] = x.dim() in sizes and len(x) == len(example)  # channels are the second dimension
        if place in stages:
            means[place] = x.mean(0, keepdim=True)
        x = module(x)
    for place, following in zip([*stages], [*stages][1:], strict=False):
        entry, gone = stages[place]
        layer, reader = chain[place], chain[following]
        between = range(place + 1, following)
        if (
            not gone
            or not _readable(layer)
            or not _readable(reader)
            or any(isinstance(chain[i], PolyphaseSample) for i in between)
            or not all(usual[i] for i in range(place, following + 1))
        ):
            continue
        gone = gone[1:] if len(gone) == entry.units[0] else gone
        kept = [c for c in range(entry.units[0]) if c not in gone]
        each = means[following].shape[1] // entry.units[0]
        _absorb(reader, means[following], gone, each)
        for path in _paths(layer):
            if isinstance(path, Placed):
                path.among(kept)
            else:
                _keep_outputs(path, kept)
        if isinstance(layer, Sum) and layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach()[kept].clone())
        for i in between:
            if isinstance(chain[i], nn.BatchNorm1d):
                _keep_norm(chain[i], [c * each + i for c in kept for i in range(each)])
            elif isinstance(chain[i], nn.BatchNorm2d):
                _keep_norm(chain[i], kept)
        for path in _paths(reader):
            _keep_inputs(path, kept, each)
        entry.units = (entry.units[0], len(kept))
    for place, (entry, _) in layers:
        entry.parameters = entry.parameters[0], sum(p.numel() for p in chain[place].parameters())
    return nn.Sequential(*chain).eval()


def _absorb(reader: nn.Module, constant: Tensor, gone: list[int], each: int) -> None:
    """Put what channels that leave bring to the reader into its bias; of a convolution the mean over positions."""
    features = [c * each + i for c in gone for i in range(each)]
    for path in _paths(reader):
        layer = _of(path)
        if isinstance(layer, nn.Linear):
            brought = layer.weight[:, features] @ constant[0, features]
            layer.bias = nn.Parameter(brought if layer.bias is None else layer.bias + brought)
        elif isinstance(layer, nn.Conv2d):
            brought = layer.weight[:, gone].sum((2, 3)) @ constant[0, gone].mean((1, 2))
            layer.bias = nn.Parameter(brought if layer.bias is None else layer.bias + brought)
        else:
            alone = copy.deepcopy(path)
            _keep_inputs(alone, gone, each)
            brought = alone(constant[:, gone])[0]
            reader.bias = _spread(brought if reader.bias is None else reader.bias + brought)


def _keep_norm(norm: Any, kept: list[int]) -> None:
    norm.num_features = len(kept)
    for name in ("weight", "bias"):
        if getattr(norm, name) is not None:
            setattr(norm, name, nn.Parameter(getattr(norm, name).detach()[kept].clone()))
    for name in ("running_mean", "running_var"):
        if getattr(norm, name) is not None:
            setattr(norm, name, getattr(norm, name)[kept].clone())


def _flops(model: nn.Module, example: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops()

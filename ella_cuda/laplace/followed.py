"""Layers that a normalisation follows, by a trace of the network's graph."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ella_cuda import nn as own
from ella_cuda.models import Neyshabur
from ella_cuda.modes import evaluation_mode

# Modules are known by the forward method that they run: a subclass with a forward of its own is another layer.

# Their output is homogeneous of degree one in weight and bias together.
LAYERS = {
    nn.Linear.forward,
    nn.Bilinear.forward,
    nn.Conv1d.forward,
    nn.Conv2d.forward,
    nn.Conv3d.forward,
    nn.ConvTranspose1d.forward,
    nn.ConvTranspose2d.forward,
    nn.ConvTranspose3d.forward,
    nn.Embedding.forward,
    nn.EmbeddingBag.forward,
    own.CircularConv2d.forward,
    own.StridedCircularConv2d.forward,
    own.SparseConv2d.forward,
    own.GroupFilter2d.forward,
}
FACTORED = {own.FactoredLinear2d.forward, own.SparseFactoredLinear2d.forward}  # W_out (W_in x + b_in) + b_out
# Without a bias, input times k is output times k.
PASSING = (LAYERS | FACTORED) - {nn.Bilinear.forward, nn.Embedding.forward, nn.EmbeddingBag.forward}

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
NORM_FORWARDS = {*(norm.forward for norm in NORMS), nn.SyncBatchNorm.forward}
NORM_FUNCTIONS = {F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm, F.rms_norm, F.normalize} | {
    torch.batch_norm, torch.instance_norm, torch.group_norm, torch.layer_norm, torch.rms_norm
}  # fmt: skip

# What a positive factor goes through, in the first argument.
MODULES = (
    nn.Identity,
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.Flatten, nn.Unflatten, nn.Unfold, nn.Fold),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d),
    *(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
    *(own.PolyphasePool2d, own.GroupPolyphasePool2d, own.GroupLift),
)
MODULE_FORWARDS = {module.forward for module in MODULES}
FUNCTIONS = {
    *(operator.getitem, torch.clone, torch.narrow, torch.select, torch.index_select, torch.take_along_dim),
    *(torch.chunk, torch.split, torch.unbind, torch.roll, torch.flip, torch.rot90),
    *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze, torch.permute),
    *(torch.transpose, torch.swapaxes, torch.swapdims, torch.movedim, torch.moveaxis, torch.t),
    *(torch.mean, torch.sum, torch.neg, operator.neg),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.interpolate, F.grid_sample, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, F.unfold, F.fold),
}
METHODS = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "repeat", "contiguous", "clone"),
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t"),
    *("narrow", "select", "index_select", "chunk", "split", "unbind", "roll", "flip", "unfold"),
    *("mean", "sum", "neg", "to", "float", "double", "half", "bfloat16"),
}
MULTIPLES = {operator.mul, operator.truediv, torch.mul, torch.div, torch.multiply, torch.divide, "mul", "div"}
ATTRIBUTES = {"T", "mT"}

# Of a tensor, what its scale has no part in.
ABOUT = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"}
ABOUT_METHODS = {"size", "dim", "ndimension", "numel", "stride", "is_contiguous", "is_floating_point"}


def _relaxed(layer: own.RelaxedEquivariance, x: Any) -> Any:
    first, *others = (getattr(layer, name)(x) for name in layer.path_names)
    for y in others:
        first = first + y
    return first / len(layer.path_names)


def _slices(layer: own.SlicesAsChannels, x: Any) -> Any:
    return layer.layer(x.flatten(1, 2)).unflatten(1, (-1, layer.group.order))


def _dense(layer: own.FullyConnected2d, x: Any) -> Any:
    return layer.linear(x.flatten(1)).unflatten(1, (layer.out_channels, *layer.out_size))


def _group_factored(layer: own.GroupFactoredLinear2d, x: Any) -> Any:
    return layer.factored(x.flatten(2, 3)).unflatten(2, (layer.group.order, layer.out_size[0]))


def _neyshabur(model: Neyshabur, x: Any) -> Any:
    x = model.lift(x)
    for block in model.blocks:
        x = model.activation(block(x))
    return model.head(model.pool(x).flatten(1))


# The package's modules of modules, without their tests of shapes, which no trace goes through.
TRACEABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    own.RelaxedEquivariance.forward: _relaxed,
    own.SlicesAsChannels.forward: _slices,
    own.FullyConnected2d.forward: _dense,
    own.GroupFactoredLinear2d.forward: _group_factored,
    Neyshabur.forward: _neyshabur,
}

_tracing = threading.Lock()  # torch.fx puts its own methods into torch.nn.Module while it traces


class Trace:
    """A network's graph in evaluation mode.

    Attributes:
        used: ids of the parameters that something else than their own layer uses.

    Raises:
        Exception: whatever torch.fx or the model raise where the model cannot be traced.
    """

    def __init__(self, model: nn.Module) -> None:
        tracer = _Tracer()
        root = _Whole(model) if _is_leaf(model) or _forward(model) in TRACEABLE else model
        optional = {
            name: parameter.default
            for name, parameter in inspect.signature(root.forward).parameters.items()
            if parameter.default is not parameter.empty
        }
        # A model may draw random numbers as it is traced.
        devices = list({p.device for p in model.parameters() if p.is_cuda})
        with evaluation_mode(model), torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            graph = tracer.trace(root, optional)
        self._root = root
        self._calls: dict[nn.Module, list[fx.Node]] = {}
        self.used = tracer.used
        for node in graph.nodes:
            if node.op == "call_module":
                self._calls.setdefault(root.get_submodule(node.target), []).append(node)
            elif node.op == "get_attr" and not all(_is_about(user) for user in node.users):
                self.used.add(id(operator.attrgetter(node.target)(root)))

    def is_followed(self, module: nn.Module) -> bool:
        """Whether the module is called, and every call's output goes to normalisations, and to nothing else before them."""
        calls = self._calls.get(module, [])
        return bool(calls) and all(self._is_followed(node) for node in calls)

    def _is_followed(self, node: fx.Node) -> bool:
        users = [user for user in node.users if not _is_about(user)]
        return bool(users) and all(self._goes_on(node, user) for user in users)

    def _goes_on(self, node: fx.Node, user: fx.Node) -> bool:
        if _is_multiple(node, user):
            return self._is_followed(user)
        if not _is_first(node, user):
            return False
        module = self._root.get_submodule(user.target) if user.op == "call_module" else None
        if user.target in NORM_FUNCTIONS if module is None else _forward(module) in NORM_FORWARDS:
            return True
        return (_is_passing(user) if module is None else _is_passing_module(module)) and self._is_followed(user)


def scaled_together(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The module's own parameters in sets: the output is homogeneous of degree one in each. None of a layer that is not known."""
    forward = _forward(module)
    if forward in LAYERS and getattr(module, "max_norm", None) is None:
        sets = [["weight", "bias"]]
    elif forward in FACTORED:
        sets = [["weight_out", "bias_out"]]
        if getattr(module, "bias_out", None) is None:
            sets.append(["weight_in", "bias_in"])
    else:
        return
    held = dict(module.named_parameters(remove_duplicate=False))
    named = {"weight", "bias", "weight_in", "bias_in", "weight_out", "bias_out"}
    computed = any(isinstance(getattr(module, name, None), Tensor) and name not in held for name in named)
    if computed or not held.keys() <= named:  # as weight normalisation does
        return
    for names in sets:
        yield [held[name] for name in names if name in held]


class _Whole(nn.Module):
    """A model that is called, for those into which no trace goes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training, self.model = model.training, model

    def forward(self, x: Any) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    """Calls of torch's modules, the package's, and modules with parameters of their own are nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self._thread = threading.get_ident()

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _tracing:
            return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        plain = TRACEABLE.get(_forward(m))
        return super().call_module(m, forward, args, kwargs) if plain is None else plain(m, *args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and a.requires_grad:
            self.used |= set(map(id, _leaves(a)))
        return super().create_arg(a)


def _leaves(tensor: Tensor) -> Iterable[Tensor]:
    """The parameters that it was computed of."""
    if tensor.grad_fn is None:
        return [tensor]
    seen, waiting, found = set(), [tensor.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def _forward(module: nn.Module) -> Callable[..., Any] | None:
    """The method that calls run; None where the module has a function in its place."""
    return None if "forward" in vars(module) else type(module).forward


def _is_leaf(module: nn.Module) -> bool:
    forward = _forward(module)
    if forward in TRACEABLE or forward is nn.Sequential.forward:
        return False
    if type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.", "ella_cuda.nn.")):
        return True
    if isinstance(module, NORMS) and forward not in NORM_FORWARDS:  # such as one that moves the channels' axis and back
        return False
    held = [p for p in module._parameters.values() if p is not None]
    return bool(held) and len(held) == len(list(module.parameters()))


def _is_about(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target in ABOUT_METHODS
    return user.target is getattr and user.args[1] in ABOUT


def _is_first(node: fx.Node, user: fx.Node) -> bool:
    """Whether the user takes the node as its input, and as nothing else."""
    if user.args:
        first, others = user.args[0], (user.args[1:], user.kwargs)
    else:
        kwargs = dict(user.kwargs)
        first, others = kwargs.pop("input", None), ((), kwargs)
    found: list[fx.Node] = []
    fx.node.map_arg(others, found.append)
    return first is node and node not in found


def _is_multiple(node: fx.Node, user: fx.Node) -> bool:
    if user.target not in MULTIPLES or user.kwargs or len(user.args) != 2:
        return False
    first, second = user.args
    if first is node:
        return isinstance(second, (int, float))
    return isinstance(first, (int, float)) and user.target in (operator.mul, torch.mul, torch.multiply)


def _is_passing(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target in METHODS
    if user.target is F.pad:
        mode = user.args[2] if len(user.args) > 2 else user.kwargs.get("mode", "constant")
        value = user.args[3] if len(user.args) > 3 else user.kwargs.get("value")
        return mode != "constant" or not (isinstance(value, fx.Node) or value)
    return user.target in FUNCTIONS or (user.target is getattr and user.args[1] in ATTRIBUTES)


def _is_passing_module(module: nn.Module) -> bool:
    if _forward(module) in PASSING:
        return all(getattr(module, name, None) is None for name in ("bias", "bias_in", "bias_out"))
    return _forward(module) in MODULE_FORWARDS

"""Parameter tensors that share a prior precision, and the layers that a normalisation follows in a network's graph."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from ella_cuda.laplace.parameters import trainable
from ella_cuda.modes import evaluation_mode

PriorStructure = Literal["layerwise", "module", "normalised", "scalar", "unit"]
STRUCTURES: tuple[str, ...] = get_args(PriorStructure)
REST = "unnormalised"  # the group of all tensors that no normalisation follows

# Classes of torch and the package, functions of torch, methods and attributes of tensors.
LINEAR = re.compile(r"(Linear|(Circular|StridedCircular|Sparse)?Conv(Transpose)?|GroupFilter)(\dd)?")
TABLES = {"Bilinear", "Embedding", "EmbeddingBag"}  # homogeneous of degree one in the weight as linear layers are
FACTORED = {"FactoredLinear2d", "SparseFactoredLinear2d"}  # W_out (W_in x + b_in) + b_out
NORMS = re.compile(r"_?(Sync)?(Batch|Instance|Group|Layer|RMS)Norm|(batch|instance|group|layer|rms)_norm|normalize")
# A positive factor of the first argument is one of the result.
PASSING = re.compile(
    r"""
    Identity | (Feature)?(Alpha)?Dropout(\dd)? | (Adaptive)?AvgPool\dd | (Un)?[Ff]latten | (Un)?Fold | Upsample | GroupLift
    | _(Constant|Circular|Reflection|Replication)PadNd | Pixel(Uns|S)huffle | ChannelShuffle | (Group)?PolyphasePool2d
    | (feature_)?(alpha_)?dropout(\dd)? | (adaptive_)?avg_pool\dd | interpolate | grid_sample | pixel_(un)?shuffle | channel_shuffle
    | getitem | narrow | (index_)?select | take_along_dim | chunk | split | unbind | roll | flip | rot90 | (un)?fold
    | view | reshape | (un)?flatten | (un)?squeeze | expand | repeat | contiguous | clone
    | permute | transpose | swap(axes|dims) | move(axis|dim) | t | T | mT | mean | sum | neg | to | float | double | half | bfloat16
    """,
    re.VERBOSE,
)
# Properties of a tensor in which its scale has no part.
ABOUT = re.compile("shape|dtype|device|n?dim|ndimension|layout|requires_grad|size|numel|stride|is_[a-z_]+")


def group_indices(structure: str, names: Sequence[str], model: nn.Module) -> list[int]:
    """The number of each named parameter tensor's group, whose tensors have one precision, in the order of their coming: "layerwise" (every
    tensor is a group), "module" (those of one module are), "normalised" (:func:`prior_groups`, with its errors) or "scalar" (all are)."""
    if structure == "normalised":
        keys = {name: group for group, members, _ in prior_groups(model) for name in members}
    else:
        key = {"layerwise": lambda n: n, "module": lambda n: n.rpartition(".")[0], "scalar": lambda n: ""}[structure]
        keys = {name: key(name) for name in names}
    numbers: dict[str, int] = {}
    return [numbers.setdefault(keys[name], len(numbers)) for name in names]


def prior_groups(model: nn.Module) -> list[tuple[str, list[str], bool]]:
    r"""The trainable parameter tensors in groups of one prior precision each: every layer that a normalisation follows has a group of its
    own, all other tensors are one group.

    With batch statistics a normalised group :math:`\theta_n` may be multiplied by any :math:`k > 0` without a change of the network's
    function. Where it has a precision of its own, the best one is in proportion to :math:`1 / k^2`, and predictions do not depend on k. Where
    it shares one with other tensors, they do.

    A layer is normalised where every call of it leads to a normalisation on all ways through the network's graph, which
    :mod:`torch.fx` traces in evaluation mode. Normalisations are BatchNorm, SyncBatchNorm, InstanceNorm, GroupNorm, LayerNorm and RMSNorm,
    and their functions. On a way there may be what a positive factor goes through: padding with zeros or by the input, slices, other
    shapes, average pooling, dropout, sampling, multiples, linear layers without a bias. Nonlinearities, sums, concatenations and the
    output end a way.

    Layers are torch's linear layers, convolutions and embeddings, and those of :mod:`ella_cuda.nn`. Weight and bias of a layer are one group,
    for invariance needs k in both. Of a factored layer :math:`W_{out} (W_{in} x + b_{in}) + b_{out}` ``weight_out`` and ``bias_out`` are
    one; ``weight_in`` and ``bias_in`` are another one where there is no ``bias_out``, else they are not normalised. Layers that share a
    tensor are one group, which is normalised if each of them is. Not normalised are parameters of normalisations, of layers that are not
    known here, parameters that something else than their layer uses, and tensors whose group has a frozen one.

    Returns:
        ``(name, parameter names, normalised)`` of every group, parameters by their names in ``model.named_parameters()``. A normalised
        group has the name of its first module, or of its first parameter where the module has two groups. The others, if there are any,
        come last as "unnormalised".

    Raises:
        TypeError: model is no module, or a parameter has a dtype that no approximation takes.
        ValueError: torch.fx cannot trace the model, or nothing of it is trainable.

    Source: Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022, recommendation 2.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prior_groups: model must be a torch.nn.Module, got {type(model).__name__}.")
    names = {id(p): name for name, p in trainable(model).items()}
    try:
        graph = _Graph(model)
    except Exception as error:
        raise ValueError(
            f"prior_groups: torch.fx cannot trace {type(model).__name__}, so that nobody knows which tensors a normalisation follows "
            f"({type(error).__name__}: {error}). Use prior_structure='layerwise' or 'module', or write forward without conditions on "
            "values and shapes."
        ) from error
    groups: dict[int, _Group] = {}  # by the id of a parameter

    def add(name: str, members: Iterable[int], normalised: bool) -> None:
        """Add a set, joined with those that have a parameter of it."""
        group = _Group(name, set(members), normalised)
        for before in dict.fromkeys(groups[p] for p in group.members if p in groups):
            group = _Group(before.name, group.members | before.members, group.normalised and before.normalised)
        groups.update(dict.fromkeys(group.members, group))

    for path, module in model.named_modules():
        sets, is_followed = list(_scaled_together(module)), graph.is_followed(module)
        for members in sets:
            first = next(n for n, p in module.named_parameters(path, remove_duplicate=False) if p is members[0])
            ids = set(map(id, members))
            add(path if path and len(sets) == 1 else first, ids, is_followed and not ids & graph.used)
        for p in module.parameters(recurse=False):
            if all(p is not other for members in sets for other in members):
                add("", [id(p)], False)
    found: dict[str, list[str]] = {}
    rest: list[str] = []
    for p, name in names.items():
        alone = groups[p].normalised and groups[p].members <= names.keys()
        (found.setdefault(groups[p].name, []) if alone else rest).append(name)
    return [(group, members, True) for group, members in found.items()] + ([(REST, rest, False)] if rest else [])


@dataclasses.dataclass(eq=False)
class _Group:
    name: str
    members: set[int]  # ids of parameters
    normalised: bool


def _scaled_together(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The module's own parameters in sets, in each of which the output is homogeneous of degree one. None of a layer that is not known."""
    kind = _kind(module)
    if (kind in TABLES or LINEAR.fullmatch(kind)) and getattr(module, "max_norm", None) is None:
        sets = [["weight", "bias"]]
    elif kind in FACTORED:
        sets = [["weight_out", "bias_out"]]
        if getattr(module, "bias_out", None) is None:
            sets.append(["weight_in", "bias_in"])
    else:
        return
    held = dict(module.named_parameters(remove_duplicate=False))
    if not held.keys() <= {name for own in ("weight", "bias") for name in (own, f"{own}_in", f"{own}_out")}:
        return  # weights that are computed, as weight normalisation does
    for names in sets:
        if names[0] in held:
            yield [held[name] for name in names if name in held]


class _Graph:
    """A network's graph in evaluation mode, by torch.fx, with its errors; ``used`` are ids of the parameters that something else than their
    own layer uses."""

    def __init__(self, model: nn.Module) -> None:
        self._root = nn.Sequential(model) if _is_leaf(model) or _kind(model) in INSIDE else model
        signature = inspect.signature(self._root.forward).parameters
        optional = {name: p.default for name, p in signature.items() if p.default is not p.empty}
        # A model may draw random numbers as it is traced.
        devices = list({p.device for p in model.parameters() if p.is_cuda})
        with _tracing, evaluation_mode(model), torch.random.fork_rng(devices), torch.inference_mode(False):
            graph = _Tracer().trace(self._root, optional)
        self._calls: dict[nn.Module, list[fx.Node]] = {}
        self.used: set[int] = set()
        for node in graph.nodes:
            if node.op == "call_module":
                self._calls.setdefault(self._root.get_submodule(node.target), []).append(node)
            elif node.op == "get_attr" and not all(ABOUT.fullmatch(_name(user)) for user in node.users):
                self.used.add(id(operator.attrgetter(node.target)(self._root)))

    def is_followed(self, module: nn.Module) -> bool:
        """Whether the module is called, and every call's output goes to normalisations, and to nothing else before them."""
        calls = self._calls.get(module, [])
        return bool(calls) and all(map(self._leads_to_norms, calls))

    def _leads_to_norms(self, node: fx.Node) -> bool:
        users = [user for user in node.users if not ABOUT.fullmatch(_name(user))]
        return bool(users) and all(self._goes_on(node, user) for user in users)

    def _goes_on(self, node: fx.Node, user: fx.Node) -> bool:
        if _is_multiple(node, user):
            return self._leads_to_norms(user)
        module = self._root.get_submodule(user.target) if user.op == "call_module" else None
        name = _name(user) if module is None else _kind(module)
        if not _is_input(node, user) or NORMS.fullmatch(name):
            return _is_input(node, user)
        return (_is_passing(user) if module is None else _is_passing_module(module)) and self._leads_to_norms(user)


_tracing = threading.Lock()  # torch.fx puts its own methods into torch.nn.Module while it traces


class _Tracer(fx.Tracer):
    """Calls of torch's modules, the package's, and modules with parameters of their own are nodes. Other threads run their models."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        inside = INSIDE.get(_kind(m))
        return super().call_module(m, forward, args, kwargs) if inside is None else inside(m, *args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _mean_of_paths(layer: nn.Module, x: Any) -> Any:
    first, *others = (getattr(layer, name)(x) for name in layer.path_names)
    return sum(others, first) / len(layer.path_names)


NORM_CLASSES = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# The forwards of the package's modules of modules, without their checks of shapes, which no trace goes through.
INSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "RelaxedEquivariance": _mean_of_paths,
    "SlicesAsChannels": lambda m, x: m.layer(x.flatten(1, 2)).unflatten(1, (-1, m.group.order)),
    "FullyConnected2d": lambda m, x: m.linear(x.flatten(1)).unflatten(1, (m.out_channels, *m.out_size)),
    "GroupFactoredLinear2d": lambda m, x: m.factored(x.flatten(2, 3)).unflatten(2, (m.group.order, m.out_size[0])),
}


def _kind(module: nn.Module) -> str:
    """The class of torch or the package whose forward a call of the module runs; "" of another forward."""
    forward = type(module).forward
    known = forward.__module__.startswith(("torch.nn.", "torch.ao.nn.", "ella_cuda.nn."))
    return forward.__qualname__.partition(".")[0] if known and "forward" not in vars(module) else ""


def _is_leaf(module: nn.Module) -> bool:
    kind = _kind(module)
    if kind in INSIDE or kind == "Sequential":
        return False
    if kind or type(module).forward.__module__ == "ella_cuda.models":  # the paper's network has no norms
        return True
    if isinstance(module, NORM_CLASSES):  # a forward of its own may move the channels' axis and back
        return False
    held = list(module.parameters(recurse=False))
    return bool(held) and len(held) == len(list(module.parameters()))


def _name(user: fx.Node) -> str:
    """The name of the function of torch or Python, or of the method or attribute of a tensor, that a node is."""
    if user.op == "call_method":
        return user.target
    if user.target is getattr:
        return user.args[1]
    known = user.op == "call_function" and user.target.__module__.partition(".")[0] in ("torch", "_operator")
    return user.target.__name__ if known else ""


def _is_passing_module(module: nn.Module) -> bool:
    kind = _kind(module)
    if LINEAR.fullmatch(kind) or kind in FACTORED:
        return all(getattr(module, name, None) is None for name in ("bias", "bias_in", "bias_out"))
    return bool(PASSING.fullmatch(kind)) and getattr(module, "value", 0) == 0  # of a padding


def _is_passing(user: fx.Node) -> bool:
    if _name(user) != "pad":
        return bool(PASSING.fullmatch(_name(user)))
    given = dict(enumerate(user.args)) | user.kwargs
    return given.get(2, given.get("mode", "constant")) != "constant" or given.get(3, given.get("value")) in (None, 0)


def _is_input(node: fx.Node, user: fx.Node) -> bool:
    """Whether the user takes the node as its first argument, and as nothing else."""
    kwargs = dict(user.kwargs)
    first, *others = user.args or (kwargs.pop("input", None),)
    found: list[fx.Node] = []
    fx.node.map_arg((others, kwargs), found.append)
    return first is node and node not in found


def _is_multiple(node: fx.Node, user: fx.Node) -> bool:
    """Whether the user is the node times or over a number."""
    others = [a for a in user.args if a is not node]
    if user.kwargs or len(user.args) != 2 or len(others) != 1 or not isinstance(others[0], (int, float)):
        return False
    name = _name(user)
    return name in ("mul", "multiply") or (name in ("truediv", "div", "divide") and user.args[0] is node)

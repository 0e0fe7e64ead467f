"""The interface of a curvature rule and the registry of rules."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import FactorShape, Jacobian, KroneckerFactor
from ella_cuda.laplace.rows import Dense, Rows
from ella_cuda.laplace.rules.recorded import AddsToMoments, complete, promises
from ella_cuda.laplace.second_moment import SecondMoment

RESOLUTIONS = ("shared", "per_channel")
APPROXIMATIONS = ("expand", "reduce")


class Rule(AddsToMoments, ABC):
    """Says what a layer's call is to the curvature of the layer's parameters: input rows a and output rows g, whose products summed over a
    data point's shared positions are the parameters' gradients.

    Subclass it, decorate it with :func:`register`, and define :meth:`shapes`, :meth:`input_rows` and :meth:`output_rows`; see
    :mod:`ella_cuda.laplace.rows`. What becomes of the rows is not the rule's business: KFAC-expand and KFAC-reduce, calls that share a
    weight, copies of data points, Jacobians and hypergradients are made of them. A rule that defines :meth:`input_gradient` takes the
    gradients at the layer's output back through the layer; otherwise autograd does.

    A class may define, in the place of these, methods that add to the moments of :attr:`factors`: ``inputs(*arguments)`` adds to
    ``input_moment`` the rows whose outer products, divided by the number of data points, are A; ``outputs(gradient)``, of gradients
    ``(K, N, ...)``, adds to ``output_moment`` those whose outer products are B; ``vjp(gradient, input_shape)`` does as ``outputs`` and
    returns the gradient at the input, unless ``input_shape`` is None. What ``inputs`` leaves on the rule is there again when the gradient
    of the same call comes back. Such a class says with ``reduces = True`` that its methods follow :attr:`approximation`: with "reduce"
    ``inputs`` adds the mean over positions and sets :attr:`positions`, ``outputs`` the sum; with ``averages = True`` that its rows are
    linear in inputs and gradients, of which it gets means and sums over :attr:`copies`; with ``sees_copies = True`` too that it gets all
    copies and adds means and sums itself.

    Attributes:
        module: the layer. name: its name in the model, "" for the model itself.
        resolution: "shared" or "per_channel": whether blocks that share an output-side factor in the paper keep doing so.
        approximation: "expand" or "reduce", what is done about shared positions; set by :func:`rules_for`.
        factors: parameter name (inside the layer) -> :class:`KroneckerFactor`, for the trainable parameters only.
        tied: parameters of the layer whose factor is that of another layer that has them too: name -> (its rule, the name there).
        lent: parameters of the layer that others have in their ``tied``.
        outside: parameters of the layer that are used outside of its calls too; set by a trial of the network.
        copies: of each data point, that methods which add to moments see; 1 unless the network averages over copies.

    Raises:
        TypeError: the layer has trainable parameters that the rule does not know.
        ValueError: the rule cannot handle this layer's configuration, or its shapes contradict the parameters.

    Source: Eschenhagen et al., "Kronecker-factored approximate curvature for modern neural network architectures", NeurIPS 2023
    (KFAC-expand and KFAC-reduce).
    """

    approximation: str = "expand"
    copies: int = 1
    positions: int = 1
    sees_copies: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        complete(cls)

    def __init__(self, module: nn.Module, name: str, resolution: str = "shared") -> None:
        self.module, self.name, self.resolution = module, name, resolution
        self.factors: dict[str, KroneckerFactor] = {}
        self.tied: dict[str, tuple[Rule, str]] = {}
        self.lent: set[str] = set()
        self.outside: frozenset[str] = frozenset()
        self.trainable = tuple(n for n, p in self.parameters().items() if p.requires_grad)
        known = self.shapes()
        self.require_known([parameter for parameter in self.trainable if parameter not in known])
        self.trainable = tuple(parameter for parameter in self.trainable if parameter in known)
        for parameter in self.trainable:
            size = module.get_parameter(parameter).numel()
            if known[parameter].numel != size:
                raise ValueError(
                    f"{type(self).__name__}.shapes gives {parameter!r} of {self.label} {known[parameter].numel} "
                    f"elements ({known[parameter]}), but the parameter has {size}."
                )

    @property
    def label(self) -> str:
        """The layer's name and type, for messages."""
        return f"layer {self.name or '(the model itself)'!r} ({type(self.module).__name__})"

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are the layer's own, by their names inside it."""
        return dict(self.module.named_parameters(recurse=False))

    def inner_modules(self) -> list[nn.Module]:
        """Modules inside the layer whose parameters are among :meth:`parameters`; a rule that has some also has ``tapped``, which shows the
        calls inside of the layer, see :class:`ella_cuda.laplace.rules.MultiheadAttentionRule`."""
        return []

    def unknown_to_it(self, names: Iterable[str]) -> TypeError:
        """The error for trainable parameters of these names."""
        return TypeError(
            f"{self.label} has the trainable parameter {', '.join(map(repr, names))}, which {type(self).__name__} does not know (it knows "
            f"{', '.join(self.shapes())}). "
            + (as_plain_weight(self.module, self.name) or "Write a rule for it with ella_cuda.laplace.register, or ")
            + "freeze the parameter."
        )

    @abstractmethod
    def shapes(self) -> dict[str, FactorShape]:
        """Sizes of the factors of every parameter the rule knows, and the order of the parameter's elements (``FactorShape.layout``), which
        predictions and samples follow; called before anything is allocated."""

    def input_rows(self, *arguments: Any) -> dict[str, Rows]:
        """Rows a of parameters with an input side, from the layer's arguments, ``(N, ...)``. They may be more than the trainable ones'."""
        raise NotImplementedError(f"{type(self).__name__} must define input_rows.")

    def output_rows(self, gradient: Tensor, kept: Any) -> dict[str, Rows]:
        """Rows g of the parameters, from K gradients at the layer's output, ``(K, N, ...)``. Of a parameter without an input side they are
        the gradients, summed over positions by whoever wants them."""
        raise NotImplementedError(f"{type(self).__name__} must define output_rows.")

    def keep(self, *arguments: Any) -> Any:
        """The part of a call's arguments that :meth:`output_rows` and :meth:`input_gradient` need."""
        return None

    def keeps(self) -> bool:
        """Whether :meth:`keep` keeps anything."""
        return type(self).keep is not Rule.keep

    def sees_calls(self) -> bool:
        """Whether the rule takes the layer's calls; else it takes gradients of single data points."""
        return True

    def input_gradient(self, gradient: Tensor, call: Call) -> Tensor:
        """The gradient at the layer's input, ``(K, *call.input_shape)``, of K gradients at its output, ``(K, N, ...)``."""
        raise NotImplementedError(f"{type(self).__name__} leaves the layer's vector-Jacobian product to autograd.")

    def has_input_gradient(self) -> bool:
        """Whether the rule, not autograd, takes gradients back through the layer."""
        return type(self).input_gradient is not Rule.input_gradient

    def takes_samples(self) -> bool:
        """Whether :meth:`input_gradient` takes gradients at some positions alone; see :class:`Call`."""
        return False

    def backward(
        self, gradient: Tensor, call: Call, take: Callable[[dict[str, Rows]], None], wanted: bool
    ) -> Tensor | None:
        """Hand :meth:`output_rows` on, and return :meth:`input_gradient` if it is wanted; for rules that have both by one product. Rows may
        come in several parts of data points or columns."""
        take(self.output_rows(gradient, call.kept))
        return self.input_gradient(gradient, call) if wanted else None

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        """The gradients of single data points in the parameters that took part in a call, from its arguments, as :meth:`input_rows` gets
        them, and K gradients at its output, ``(K, N, ...)``."""
        kept, shapes = self.keep(*arguments), self.shapes()
        # Of a class that adds to moments, weighted and summed as it is there, no gradients are made.
        inputs, outputs = self.input_rows(*arguments), self._said("output_rows")(self, gradient, kept)
        return {
            name: Jacobian.of_rows(shapes[name], inputs.get(name), outputs[name], len(gradient))
            for name in self.touched(kept)
        }

    def serves(self, approximation: str) -> bool:
        """Whether the rule follows the approximation."""
        return approximation == "expand" or promises(type(self), "reduces", "inputs", "outputs", "vjp")

    def serves_copies(self) -> bool:
        """Whether the rule follows a network that averages over copies."""
        return promises(type(self), "averages", "inputs", "outputs", "vjp")

    def require_known(self, unknown: Sequence[str]) -> None:
        """TypeError where trainable parameters are unknown to the rule; a rule whose others are served otherwise defines this anew."""
        if unknown:
            raise self.unknown_to_it(unknown)

    def rows(self, name: str, gradients: Tensor, data_too: bool) -> tuple[Rows | None, Rows | None]:
        """Rows of both sides of the factor of a parameter without an input side, from the gradients of K columns of N data points,
        ``(K, N, *parameter.shape)``; ``data_too``: whether columns are the last of these data points."""
        return None, Dense(gradients.reshape(-1, 1, 1, gradients[0, 0].numel()))

    def touched(self, kept: Any) -> dict[str, range | None]:
        """Parameters that took part in a call, each with the blocks of its factor that did; None is all of them."""
        return dict.fromkeys(name for name in self.trainable if name not in self.outside)

    def shares_outputs(self) -> dict[str, str]:
        """Parameters whose output side is another one's: name -> that one's name. Both trainable."""
        return {}

    def separate_outputs(self, names: Collection[str] | None = None) -> None:
        """Give parameters, all or those of these names in the model, output sides of their own, which start at what the shared one is."""
        for parameter, owner in self.output_owners().items():
            factor, name = self.factors[parameter], self.full_name(parameter)
            shared = factor.output_moment is self.factors[owner].output_moment
            if shared and (names is None or name in names):
                factor.output_moment = factor.output_moment.clone(f"{name} (output side)")

    def allocate(self, moment_class: type[SecondMoment] = SecondMoment) -> None:
        """Start from zero factors; MemoryError, with the layer and their bytes, where there is no room for them."""
        try:
            self._allocate(moment_class)
        except RuntimeError as error:
            if "alloc" not in str(error) and "memory" not in str(error):
                raise
            raise MemoryError(
                f"{self.label}: the system has no memory for its factors, {self.bytes():,} bytes in (blocks, rows) = {self.blocks()}. Freeze "
                "parameters of the layer; KronLaplace.summary() lists what each takes."
            ) from error

    def _allocate(self, moment_class: type[SecondMoment]) -> None:
        shapes, shared = self.shapes(), self.output_owners()
        moments: dict[str, SecondMoment] = {}
        self.factors = dict.fromkeys(self.trainable)
        for parameter in sorted(self.trainable, key=shared.__contains__):  # a layer may have its bias first
            if parameter in self.tied:
                owner, name = self.tied[parameter]
                self.factors[parameter] = owner.factors[name]
                continue
            shape, tensor = shapes[parameter], self.module.get_parameter(parameter)
            label = self.full_name(parameter)
            if parameter not in shared:
                sizes, where = (shape.output_groups, shape.row_outputs), f"{label} (output side)"
                moments[parameter] = moment_class(*sizes, tensor, where, shape.output_basis)
            inputs, sizes, where = None, (shape.groups, shape.row_inputs), f"{label} (input side)"
            if not shape.constant_input:
                inputs = moment_class(*sizes, tensor, where, shape.input_basis)
            self.factors[parameter] = KroneckerFactor(shape, inputs, moments[shared.get(parameter, parameter)])

    def output_owners(self) -> dict[str, str]:
        """:meth:`shares_outputs` without what parameters of several layers would share."""
        of_several = self.tied.keys() | self.lent
        return {p: owner for p, owner in self.shares_outputs().items() if not {p, owner} & of_several}

    def blocks(self, *parameters: str) -> list[tuple[int, int]]:
        """Blocks and rows of each of the sums that the factors of these parameters will be made of, of all if none is named; a side that
        two parameters share is the first one's, and a factor of several layers the first layer's."""
        shapes, shared = self.shapes(), self.output_owners()
        sides: list[tuple[int, int]] = []
        for name in parameters or self.trainable:
            shape = shapes[name]
            if name not in self.tied:
                sides += [] if shape.constant_input else [(shape.groups, shape.row_inputs)]
                sides += [] if name in shared else [(shape.output_groups, shape.row_outputs)]
        return sides

    def bytes(self, *parameters: str) -> int:
        """The bytes of the factors of these parameters, or of all; they are float64."""
        return sum(groups * rows**2 for groups, rows in self.blocks(*parameters)) * torch.float64.itemsize

    def full_name(self, parameter: str) -> str:
        """The parameter's name in the model."""
        return f"{self.name}.{parameter}" if self.name else parameter


# What a layer's weight is computed by before a call, and what takes that off.
_REMOVALS = {
    WeightNorm: "remove_weight_norm",
    SpectralNorm: "remove_spectral_norm",
    BasePruningMethod: "prune.remove",
}

RuleType = TypeVar("RuleType", bound=type[Rule])
_RULES: dict[type[nn.Module], type[Rule]] = {}
_BY_NAME: dict[str, type[Rule]] = {}  # of classes of libraries that may not be there

# What a subclass may define anew without changing what the layer computes.
_HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "__constants__"}
# What every class statement defines by itself.
_AUTOMATIC = set(vars(type("Empty", (nn.Module,), {}))) | {"__annotations__", "__annotate_func__"}
_AUTOMATIC |= {"__annotations_cache__", "__qualname__", "__firstlineno__", "__static_attributes__"}
_AUTOMATIC |= {"__parameters__", "__orig_bases__"}


def register(module_class: type[nn.Module]) -> Callable[[RuleType], RuleType]:
    """Class decorator: use the decorated :class:`Rule` for layers of ``module_class``, and of those subclasses that change nothing but
    construction and printing. Registering a class again replaces its rule.

    Example::

        @ella_cuda.laplace.register(MyScale)
        class MyScaleRule(ella_cuda.laplace.Rule):
            def shapes(self): ...
            def input_rows(self, x): ...
            def output_rows(self, gradient, kept): ...

    Raises:
        TypeError: ``module_class`` is no Module class, or the decorated class no Rule.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(
            f"register: expected a subclass of torch.nn.Module, got {module_class!r}; write @register(MyLayer)."
        )

    def decorate(rule: RuleType) -> RuleType:
        if not (isinstance(rule, type) and issubclass(rule, Rule)):
            raise TypeError(
                f"register({module_class.__name__}): expected a subclass of ella_cuda.laplace.Rule, got {rule!r}."
            )
        _RULES[module_class] = rule
        return rule

    return decorate


def register_by_name(name: str) -> Callable[[RuleType], RuleType]:
    """Class decorator: :func:`register`, for a class that is not imported here, by its module and name."""

    def decorate(rule: RuleType) -> RuleType:
        _BY_NAME[name] = rule
        return rule

    return decorate


def rule_for(module: nn.Module, name: str, resolution: str = "shared", approximation: str = "expand") -> Rule:
    """The rule of a layer with trainable parameters.

    Raises:
        TypeError: no rule is registered for its class; the message names the layer, the reason and ``ella_cuda.laplace.register``.
        ValueError: the rule cannot handle this layer's configuration, or does not serve the approximation.
    """
    kind, label = layer_kind(module), f"layer {name or '(the model itself)'!r}"
    if "forward" in vars(module):
        raise TypeError(
            f"{label} is a {kind.__name__} whose forward was replaced on the instance; no rule can know what it computes. Make it a class of "
            "its own and register a rule for that with @ella_cuda.laplace.register."
        )
    for ancestor in kind.__mro__:
        rule = _RULES.get(ancestor) or _BY_NAME.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if rule is None:
            continue
        changed = sorted(_overrides(kind, ancestor))
        if not changed:
            return _approximated(rule(module, name, resolution), approximation)
        raise TypeError(
            f"{label} is a {kind.__name__}, a subclass of {ancestor.__name__} that overrides {', '.join(changed)}; the rule of "
            f"{ancestor.__name__} may be wrong for it. Register one for {kind.__name__} with @ella_cuda.laplace.register({kind.__name__})."
        )
    parameters = ", ".join(n for n, p in module.named_parameters(recurse=False) if p.requires_grad)
    remedy = f"Write one and register it with @ella_cuda.laplace.register({kind.__name__}), or "
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        remedy = "Write the recurrence as a loop over nn.Linear layers, which may be called once a step, or "
    raise TypeError(
        f"{label} ({kind.__name__}) has trainable parameters ({parameters}) but no curvature rule. {as_plain_weight(module, name) or remedy}"
        f"freeze the parameters with requires_grad_(False).{served()}"
    )


def layer_kind(module: nn.Module) -> type[nn.Module]:
    """The class whose rule a layer has: its own, or :class:`torch.nn.Linear` where a subclass without attributes of its own computes the same
    by a forward of its own, as timm's ``Linear``."""
    kind = type(module)
    if (
        kind not in _RULES
        and issubclass(kind, nn.Linear)
        and vars(module).keys() <= vars(nn.Linear(1, 1, device="meta")).keys()
    ):
        same = _computes_linear(kind, module.in_features == module.out_features, module.bias is not None)
        return nn.Linear if same else kind
    return kind


@functools.cache
def _computes_linear(kind: type[nn.Linear], square: bool, bias: bool) -> bool:
    """Whether layers of a subclass have the outputs and gradients of :func:`torch.nn.functional.linear` at trial inputs."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            layer = nn.Linear(3, 3 if square else 2, bias, dtype=torch.float64, device="meta").eval()
            for name, parameter in layer.named_parameters():
                setattr(layer, name, nn.Parameter(draw(*parameter.shape)))
            layer.__class__ = kind
            for scale, *shape in ((1, 5, 3), (1e4, 5, 4, 3), (1, 5, 2, 4, 3)):
                x = (scale * draw(*shape)).requires_grad_()
                outputs = kind.forward(layer, x), F.linear(x, layer.weight, layer.bias)
                column, leaves = draw(*outputs[1].shape), (x, *layer.parameters())
                pulled = [torch.autograd.grad(out, leaves, column, materialize_grads=True) for out in outputs]
                (out, expected), (found, wanted) = outputs, pulled
                if not all(map(torch.allclose, (out, *found), (expected, *wanted))):
                    return False
            return True
    except Exception:  # whatever a forward raises that needs what the trial does not have
        return False


def _approximated(rule: Rule, approximation: str) -> Rule:
    """The rule, told of the approximation."""
    if not rule.serves(approximation):
        raise ValueError(
            f"{rule.label}: {type(rule).__name__} does not serve approximation={approximation!r}. Use approximation='expand', freeze the "
            "layer, or have its rule follow Rule.approximation and say so with reduces = True."
        )
    rule.approximation = approximation
    return rule


def as_plain_weight(module: nn.Module, name: str) -> str:
    """Words on how to have a weight that torch computes from other parameters, as for weight or spectral normalisation and pruning, as a
    parameter with the values it has; "" where there is none."""
    if isinstance(module, ParametrizationList):
        (layer, _, tensor), how = name.rpartition("parametrizations."), "parametrize.remove_parametrizations"
    else:
        for hook in module._forward_pre_hooks.values():
            how = next((how for kind, how in _REMOVALS.items() if isinstance(hook, kind)), "")
            if how:
                layer, tensor = name, getattr(hook, "_tensor_name", "") or hook.name
                break
        else:
            return ""
    call = f"torch.nn.utils.{how}(model.get_submodule({layer.rstrip('.')!r}), {tensor!r})"
    return f"The layer's {tensor!r} is computed from that; call {call}, which keeps its values, or "


def served() -> str:
    """Words on the layers that have rules."""
    return f" Layers with rules: {', '.join(sorted(c.__name__ for c in _RULES))}."


def _overrides(kind: type, ancestor: type) -> set[str]:
    """Names that ``kind`` or a class between it and ``ancestor`` redefines, of those that ``ancestor`` has."""
    between = kind.__mro__[: kind.__mro__.index(ancestor)]
    return {n for c in between for n in vars(c) if hasattr(ancestor, n)} - _HARMLESS - _AUTOMATIC

"""Derivatives of a network along directions of its parameters."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ella_cuda.laplace.batches import tensors_of
from ella_cuda.laplace.interception import hookable_modules, hooks
from ella_cuda.laplace.parameters import rounding_of

Values = dict[str, Tensor]
OfPoint = Callable[[Values, Sequence[Tensor]], Tensor]


class NoGradientError(NotImplementedError):
    """Torch has no gradient of a function."""


class ReplacedParameters:
    """A model's named parameters under other values, wherever a module has them; and other parameters and buffers, which :meth:`split` does
    not have."""

    def __init__(self, model: nn.Module, names: Sequence[str], others: Sequence[str] = ()) -> None:
        self.parameters = {name: model.get_parameter(name) for name in names}
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())} if others else {}
        self._own = {**self.parameters, **{name: held[name] for name in others}}
        known = {id(tensor): name for name, tensor in self._own.items()}
        # Every module that has one, under whatever names the model has the module.
        self._places = [
            (held, own, known[id(tensor)])
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for own, tensor in held.items()
            if id(tensor) in known
        ]

    def values(self) -> Values:
        """The parameters' own, detached."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """For the duration of the context, the modules have these values as their parameters and buffers. torch.func.functional_call does
        not put back the parameter of a module that the model has under two names."""
        try:
            for held, own, name in self._places:
                held[own] = values[name]
            yield
        finally:
            for held, own, name in self._places:
                held[own] = self._own[name]

    def split(self, vectors: Tensor) -> Values:
        """Vectors ``(..., P)`` of all these parameters, one after the other, by name: ``(..., *parameter.shape)``."""
        parts = vectors.split([p.numel() for p in self.parameters.values()], -1)
        shapes = zip(self.parameters.items(), parts, strict=True)
        return {name: part.reshape((*part.shape[:-1], *p.shape)).to(p.dtype) for (name, p), part in shapes}


@functools.cache
def load_forward_mode() -> None:
    """Let torch load its forward mode, which compiles functions by torch.jit.script and warns of that."""
    if forward_ad._current_level >= 0:  # levels do not nest
        return
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        forward_ad.make_dual(torch.zeros((), device="cpu"), torch.zeros((), device="cpu"))


def push(function: Callable[[Values], Tensor], values: Values, direction: Values) -> tuple[Tensor, Tensor]:
    """A function's outputs, in the graph of the values, and its derivative along a direction, in forward mode."""
    load_forward_mode()
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, direction[name]) for name, value in values.items()}
        outputs, along = forward_ad.unpack_dual(function(duals))
        return outputs, torch.zeros_like(outputs) if along is None else along.detach()


def push_by_gradients(function: Callable[[Values], Tensor], values: Values, direction: Values) -> tuple[Tensor, Tensor]:
    """:func:`push` by a gradient of gradients; values require one."""
    outputs = function(values)
    seed = torch.ones_like(outputs).requires_grad_()
    pulled = torch.autograd.grad(outputs, [*values.values()], seed, create_graph=True, materialize_grads=True)
    product = sum((g * direction[name]).sum() for name, g in zip(values, pulled, strict=True))
    return outputs, torch.autograd.grad(product, seed, retain_graph=True)[0]


def has_forward_mode(function: Callable[[Values], Tensor], values: Values, rounding: float = 0.0) -> bool:
    """Whether derivatives are to be taken in forward mode; otherwise by two gradients. It is the way whose derivative J u along a random
    direction is the transpose of gradients: <J u, r> = <u, J^T r>, for a random r. Where only the forward mode differs, differences of
    outputs say which of both is wrong. ``rounding``: that of numbers inside of the function, if these are coarser.

    Raises:
        NotImplementedError: neither way is there, :class:`NoGradientError` where gradients are not either.
        ArithmeticError: gradients are not those of the function.
        RuntimeError: the outputs are no function of the values to autograd.
    """

    def drawn(like: Tensor, seed: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)  # the global one is not ours to move
        return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)

    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    u = {name: drawn(value, seed) for seed, (name, value) in enumerate(values.items())}
    with torch.enable_grad():
        for way in (push, push_by_gradients):
            try:
                outputs, along = way(function, leaves, u)
                r = drawn(outputs, len(u))
                pulled = torch.autograd.grad(outputs, [*leaves.values()], r, materialize_grads=True)
            except Exception:  # whatever functions without this way raise
                continue
            rounding = max(rounding, *map(rounding_of, (along, *values.values())))
            wanted = torch.cat([(u[n] * g).double().flatten() for n, g in zip(u, pulled, strict=True)])
            agrees, known = not apart((along * r).double(), wanted, rounding), way is push
            if not known:
                with (
                    suppress(Exception),
                    torch.no_grad(),
                ):  # without modules' backward hooks, which have no forward mode
                    along, known = push(function, values, u)[1], True
            found = (along * r).double()
            sums = found.sum(), wanted.sum()
            if known and apart(found, wanted, rounding) and _follows_first(function, values, u, r, *sums):
                raise ArithmeticError("its gradients are not its derivatives: a backward hook or a flag changes them")
            if agrees:
                return way is push
        outputs = function(leaves)
        if not outputs.requires_grad:
            raise RuntimeError(
                "the output does not depend on the parameters through autograd (is it computed under no_grad?)"
            )
        try:
            torch.autograd.grad(outputs.sum(), [*leaves.values()], materialize_grads=True)
        except NotImplementedError as error:
            raise NoGradientError(f"torch has no gradient of it ({error})") from error
    raise NotImplementedError("it has no forward mode and is differentiable once")


def _follows_first(
    function: Callable[[Values], Tensor], values: Values, u: Values, r: Tensor, one: Tensor, other: Tensor
) -> bool:
    """Whether a difference of outputs along u, times r, is much nearer to the one number than to the other."""
    step = torch.finfo(r.dtype).eps ** (1 / 3)
    with torch.no_grad():
        ahead, back = (function({n: v + s * u[n] for n, v in values.items()}) for s in (step, -step))
        difference = ((ahead - back) * r).double().sum() / (2 * step)
    return bool((difference - one).abs() < (difference - other).abs() / 4)


def apart(one: Tensor, other: Tensor, rounding: float) -> Tensor:
    """Whether two sums of terms differ by more than rounding of these; False where one is not finite. 0-dim bool."""
    size = one.abs().sum() + other.abs().sum()
    return ((one.sum() - other.sum()).abs() > rounding * size) & size.isfinite()


def jvp(
    function: Callable[[Values], Tensor], values: Values, directions: Values, in_forward_mode: bool = True
) -> Tensor:
    """The derivatives ``(S, *function(values).shape)`` of a function of values by name along S directions, ``(S, *shape)`` each,
    differentiable in these in forward mode. ``in_forward_mode``: what :func:`has_forward_mode` says."""

    def forward(direction: Values) -> Tensor:
        return torch.func.jvp(function, (values,), (direction,))[1]

    def reverse(direction: Values) -> Tensor:
        # By autograd itself: torch.func refuses a torch.autograd.Function without setup_context.
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            return push_by_gradients(function, leaves, direction)[1]

    load_forward_mode()
    way = forward if in_forward_mode else reverse
    count = len(next(iter(directions.values())))
    *others, direction = ({name: d[sample] for name, d in directions.items()} for sample in range(count))
    try:
        last = way(direction)
    except Exception:  # a function that torch.func cannot take, such as one that differentiates itself
        if not in_forward_mode:
            raise
        way, last = reverse, reverse(direction)
    if way is forward and others:
        with suppress(Exception):  # whatever functions that vmap cannot take raise
            together = torch.func.vmap(way)(directions)
            # Some functions have wrong derivatives there, all but the first.
            if not differ({"": together[-1]}, {"": last}):
                return together
    return torch.stack([*map(way, others), last])


def differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two ways to the same derivatives differ beyond rounding, in what is finite."""
    sizes = {name: b.abs().amax() for name, b in other.items()}
    return any(
        bool(size.isfinite() and (one[name] - other[name]).abs().amax() > rounding_of(size) * size)
        for name, size in sizes.items()
    )


def first_at_fault(model: nn.Module, run: Callable[[], Any], error: Exception) -> tuple[str, Exception]:
    """The innermost module whose call has an error of this kind by itself, which is one of :func:`has_forward_mode`, in words, and its error;
    else the model and the given one. ``run`` calls the model."""
    names = hookable_modules(model)
    calls: list[tuple[nn.Module, Any, Any]] = []  # a module's after those in its forward
    with hooks(names, after=lambda m, a, k, _: calls.append((m, a, k)), with_kwargs=True), torch.no_grad():
        run()
    with embeddings_have_derivatives(model):
        for module, args, kwargs in calls:
            try:
                has_forward_mode(*_alone(module, args, kwargs))
            except type(error) as its:
                return f"layer {names[module] or type(module).__name__!r} ({type(module).__name__})", its
            except Exception:  # a module that does not run by itself
                continue
    return type(model).__name__, error


def _alone(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[Values], Tensor], Values]:
    """A module's call as a function of its parameters and of its arguments that are tensors, and their values."""
    names = [name for name, _ in module.named_parameters()]
    own = ReplacedParameters(module, names)
    real = {f"argument {i}": a for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()}

    def function(values: Values) -> Tensor:
        given = [values.get(f"argument {i}", a) for i, a in enumerate(args)]
        with own.replaced({name: values[name] for name in names}):
            found = module(*given, **kwargs)
        parts = [found] if isinstance(found, Tensor) else tensors_of(found)
        return torch.cat([part.flatten() for part in parts if part.is_floating_point()])

    return function, {**own.values(), **{name: a.detach().clone() for name, a in real.items()}}


@contextmanager
def embeddings_have_derivatives(model: nn.Module) -> Iterator[None]:
    """For the duration of the context, embeddings' forward mode has no derivative along the rows of their padding, whose gradient torch.nn
    leaves out; other uses of the weight do. Gradients that ``scale_grad_by_freq`` divides are no derivatives; sums and means of bags go
    through functions that have a forward mode."""
    whole: list[Tensor] = []

    def before(module: nn.Module, _: Any) -> None:
        weight = module._parameters["weight"]
        whole.append(weight)
        value, along = forward_ad.unpack_dual(weight)
        if along is not None:
            kept = torch.ones(len(weight), 1, dtype=weight.dtype, device=weight.device)
            kept[module.padding_idx] = 0
            module._parameters["weight"] = forward_ad.make_dual(value, along * kept)

    def after(module: nn.Module, *_: Any) -> None:
        module._parameters["weight"] = whole.pop()

    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    padded = [m for m in embeddings if m.padding_idx is not None]
    flags = [(m, flag) for m in embeddings for flag in ("scale_grad_by_freq", "sparse") if getattr(m, flag)]
    bags = [m for m in embeddings if type(m) is nn.EmbeddingBag and m.mode != "max" and m.max_norm is None]
    bags = [m for m in bags if "forward" not in vars(m)]
    with hooks(padded, before, after, always_call=True):
        try:
            for module, flag in flags:
                setattr(module, flag, False)
            for bag in bags:
                bag.forward = functools.partial(_of_bags, bag)
            yield
        finally:
            for bag in bags:
                bag.__dict__.pop("forward", None)
            for module, flag in flags:
                setattr(module, flag, True)


def _of_bags(
    bag: nn.EmbeddingBag,
    indices: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """The forward of bags ``(N, L)``; of others torch's own."""
    if indices.dim() != 2 or offsets is not None:
        return nn.EmbeddingBag.forward(bag, indices, offsets, per_sample_weights)
    counted = indices != (-1 if bag.padding_idx is None else bag.padding_idx)
    shares = counted.to(bag.weight.dtype) if per_sample_weights is None else per_sample_weights * counted
    found = (F.embedding(indices, bag.weight, bag.padding_idx) * shares[..., None]).sum(1)
    return found / counted.sum(1, keepdim=True).clamp(min=1) if bag.mode == "mean" else found


def by_vmap(outputs: OfPoint, values: Values, tensors: Sequence[Tensor], columns: Tensor) -> Values:
    """Gradients ``(K, N, *value.shape)`` of single data points in values, all together by :func:`torch.func.vmap`, of columns
    ``(K, N, ...)`` at the outputs of a data point's tensors; these are ``(N, ...)``."""

    def of_one(parts: list[Tensor], its_columns: Tensor) -> Values:
        _, vjp = torch.func.vjp(lambda values: outputs(values, parts), values)
        return torch.func.vmap(lambda column: vjp(column)[0])(its_columns)

    return torch.func.vmap(of_one, in_dims=(0, 1), out_dims=1)(list(tensors), columns)


def one_by_one(
    outputs: OfPoint, values: Values, tensors: Sequence[Tensor], columns: Tensor, keep: bool = False
) -> Values:
    """:func:`by_vmap` by plain autograd, in the graph if ``keep``."""
    rows = []
    for n, its_columns in enumerate(columns.unbind(1)):
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        with torch.enable_grad():
            out = outputs(leaves, [t[n] for t in tensors])
        how = {"retain_graph": True, "create_graph": keep, "materialize_grads": True}
        for column in its_columns:
            found = torch.autograd.grad(out, [*leaves.values()], column, **how) if out.requires_grad else None
            rows.append([torch.zeros_like(v) for v in values.values()] if found is None else found)
    shape = columns.shape[1], columns.shape[0]
    stacked = (torch.stack(parts).unflatten(0, shape).transpose(0, 1) for parts in zip(*rows, strict=True))
    return {name: found if keep else found.detach() for name, found in zip(values, stacked, strict=True)}


def by_autograd(module: nn.Module, names: Sequence[str], arguments: Sequence[Any], gradient: Tensor) -> Values:
    """Gradients ``(K, N, *parameter.shape)`` in a layer's named parameters from those at its output, ``(K, N, ...)``, by autograd of the
    layer alone, without hooks; one data point after the other where :func:`torch.func.vmap` cannot take the layer."""
    own = ReplacedParameters(module, names)
    values, tensors = own.values(), [a for a in arguments if isinstance(a, Tensor)]

    def outputs(parameters: Values, parts: Sequence[Tensor]) -> Tensor:
        those = iter(parts)
        call = [next(those)[None] if isinstance(a, Tensor) else a for a in arguments]
        with own.replaced(parameters):
            return module.forward(*call)[0]

    with _without_hooks(module):
        with suppress(Exception):  # whatever the layer's functions raise under vmap
            found, last = by_vmap(outputs, values, tensors, gradient), [t[-1:] for t in tensors]
            # Some functions have wrong gradients there, all but the first.
            if not differ(
                {n: g[-1:, -1:] for n, g in found.items()}, one_by_one(outputs, values, last, gradient[-1:, -1:])
            ):
                return found
        return one_by_one(outputs, values, tensors, gradient)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """For the duration of the context, modules inside of the layer call none of their hooks: those of a pass are among them."""
    before = {m: m._forward_hooks for m in module.modules()}
    try:
        for m in before:
            m._forward_hooks = OrderedDict()
        yield
    finally:
        for m, hooks in before.items():
            m._forward_hooks = hooks

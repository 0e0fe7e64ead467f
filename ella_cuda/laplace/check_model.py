"""Checks before a fit: batch axes, independence over the batch, parameters used only in registered modules."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from ella_cuda.laplace.batches import (
    Inputs,
    checked_outputs,
    data_points,
    map_tensors,
    outputs_of,
    run_model,
    take,
    tensors_of,
)
from ella_cuda.laplace.call import Place, batch_first
from ella_cuda.laplace.one_function import generator_states, refusing_changes_of_gradients, require_one_function
from ella_cuda.laplace.parameters import rounding_of

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

LARGE = 2.0**10  # columns of a fit have sizes of 1 and less
APART = 32  # images of a first batch whose outputs are compared


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a network turned out to be.

    Attributes:
        places: where the images are in each of a layer's calls, of every rule whose layer was called.
        by_function: the rules of linear layers that are never called, whose weight :func:`torch.nn.functional.linear` uses.
        batched: whether several columns may go back at once, by ``torch.func.vmap``.
        image_bytes: of all layers' outputs of an image.
    """

    places: dict[Rule, tuple[Place, ...]]
    by_function: frozenset[Rule]
    batched: bool
    image_bytes: int = 0


@dataclasses.dataclass
class _Call:
    """A module's call, as a forward hook saw it. Of an output of several parts, the first."""

    module: nn.Module
    inside: tuple[nn.Module, ...]  # the watched modules whose forward ran, the outermost first
    inputs: list[Tensor]
    out: Any
    nodes: list[Node | None]  # of the inputs, as they were then: what follows may work in place
    node: Node | None  # of the output
    shape: torch.Size | None
    parameters: dict[str, Tensor | None]  # what the module had under its parameters' names
    by_function: bool = False
    place: Place | None = None  # of the images in the output, where it is known


def probe(model: nn.Module, rules: Sequence[Rule], x: Inputs, several: bool = True, copies: int = 1) -> Findings:
    """Run the network on two and on three of the images, and take the outputs of three back to its layers.

    Args:
        model: in evaluation mode, without hooks of a fit; parameters require a gradient as they do in training.
        rules: of its layers.
        x: a batch of at least one image.
        several: whether several columns are to go back at once, if that is possible.
        copies: of each image, that layers see.

    Raises:
        TypeError: the model returns no tensor.
        RuntimeError: torch's, of a checkpoint with ``use_reentrant=True``, and what others the model raises.
        ValueError: the images are not along the first axis of a layer's output, nor along the second of a layer whose rule allows for
            that; a parameter is used outside of its layer's call too; an image's outputs depend on other images of the batch; the model
            takes no batch of another size; its outputs for the same images differ; or a hook changes gradients. The message names the layer.

    Warns:
        UserWarning: gradients of several columns at once are wrong or impossible; names the module. The model draws random numbers to no
            effect that is seen.
    """
    known = {rule.module: rule for rule in rules}
    parameters = {rule: rule.parameters() for rule in rules}
    device = tensors_of(x)[0].device
    with refusing_changes_of_gradients(model, known):
        before = generator_states(device)
        two, of_two, calls, outputs = _two_and_three(model, known, x)
        if generator_states(device) != before:
            require_one_function(model, _images(x, 2), drew=True)
        places = _places(known, two, calls, copies)
        by_function = frozenset(known[call.module] for call in calls if call.by_function)
        _require_own_parameters(known, parameters, calls, outputs)
        if any(isinstance(call.out, Tensor) and not call.out.requires_grad for call in calls):
            require_no_reentrant_checkpoint(model, x)
        image_bytes = sum(c.out.numel() * c.out.element_size() for c in calls if isinstance(c.out, Tensor)) // 3
        if not outputs.requires_grad:
            if calls and any(p.requires_grad for of in parameters.values() for p in of.values()):
                raise ValueError(
                    "fit: the model's output does not depend on its layers through autograd (is it computed under no_grad?)."
                )
            return Findings(places, by_function, True, image_bytes)
        generator = torch.Generator("cpu").manual_seed(0)  # the global one is not ours to move
        directions = torch.randn(2, *outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs)
        found = [call for call in calls if isinstance(call.out, Tensor) and call.out.requires_grad]
        for image in (0, 1):  # the second alone stays where it is when images are put in reverse
            # Larger than those of a fit, so that hooks that clip gradients do.
            _require_independence(known, found, outputs, LARGE * directions[0], image)
        if _differ_by_images(of_two, outputs):
            require_one_function(model, _images(x, 2), drew=False)
            raise ValueError(
                "fit: the model's outputs for two images are others when a third is in the batch, so the curvature is no sum over images. "
                "Take the images apart: batch statistics (a normalisation without running statistics), and functions along the batch's axis "
                "or of its size, mix them."
            )
    reason = _unbatched(outputs, [call.out for call in found], directions) if several and found else None
    if reason is None:
        return Findings(places, by_function, True, image_bytes)
    warnings.warn(
        f"fit: {reason or _culprit(model, x)}; columns go back one at a time, which takes longer.",
        UserWarning,
        stacklevel=5,
    )
    return Findings(places, by_function, False, image_bytes)


def require_rows_of_their_own(model: nn.Module, x: Inputs, alone: Tensor, rows: Tensor, outputs: Tensor) -> None:
    """ValueError where the outputs of some images are not what they are in other batches, here and with the batch in reverse.

    Args:
        x: a batch. alone: the outputs of some of its images in other batches. rows: which these are. outputs: of all.
    """
    if _alike(outputs[rows], alone):
        return
    with torch.enable_grad():
        again = checked_outputs(
            run_model(model, take(x, torch.arange(len(outputs) - 1, -1, -1, device=rows.device))), len(outputs)
        )
    if _alike(again.flip(0), outputs):  # a function with steps, which rounding in batches of other sizes passes
        return
    require_one_function(model, take(x, rows[:2]), drew=False)
    raise ValueError(
        f"fit: outputs of the first batch's {len(outputs)} images are others when these are in another order or in other batches, so that "
        "rows are not those of their images. Return outputs in the order of the inputs, and have no image's depend on others: sorting, "
        "capacities and statistics of a batch do that."
    )


def outputs_apart(model: nn.Module, x: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs of up to ``APART`` images of a batch, in an order of their own and in two batches, and which images these are."""
    count, device = data_points(x), tensors_of(x)[0].device
    rows = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")[:APART].to(device)
    with torch.enable_grad():  # a forward may put hooks on its tensors
        parts = [outputs_of(model, take(x, r)).detach() for r in rows.chunk(2)]
    return torch.cat(parts), rows


def _two_and_three(
    model: nn.Module, known: dict[nn.Module, Rule], x: Inputs
) -> tuple[list[_Call], Tensor, list[_Call], Tensor]:
    """The layers' calls on two and on three images, and the outputs."""
    with torch.enable_grad():  # for both: a forward may put hooks on its tensors
        try:
            two, of_two = _run(model, known, _images(x, 2))
            calls, outputs = _run(model, known, _images(x, 3))
        except Exception as error:
            run_model(model, x)  # if it does not take the batch either, that is the error to show
            raise ValueError(
                f"fit: the model takes a batch of {data_points(x)} but not of two or three images ({type(error).__name__}: {error}). Images "
                "must be independent of each other, and their number free: take it from the input's shape."
            ) from error
    return two, checked_outputs(of_two, 2), calls, checked_outputs(outputs, 3)


class LinearFunctions(TorchFunctionMode):
    """While the mode is on, calls of :func:`torch.nn.functional.linear` with the weight and the bias of one of these layers are handed on,
    unless the layer's own forward makes them.

    Args:
        layers: of :class:`torch.nn.Linear`.
        take: ``(layer, x, output) -> output``.
        running: the modules whose forward runs.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        take: Callable[[nn.Module, Tensor, Tensor], Tensor],
        running: Sequence[nn.Module],
    ) -> None:
        self._layers = {id(layer.weight): layer for layer in layers}
        self._take, self._running = take, running

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.linear:
            return out
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        layer = self._layers.get(id(given["weight"]))
        if layer is None or given.get("bias") is not layer.bias or layer in self._running:
            return out
        return self._take(layer, given["input"], out)


@contextmanager
def _watched(modules: Iterable[nn.Module], calls: list[_Call]) -> Iterator[None]:
    """For the duration of the context, note the calls of the modules in the order in which they end."""
    running: list[nn.Module] = []

    def begin(module: nn.Module, args: Any) -> None:
        running.append(module)

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        running.pop()
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if isinstance(out, tuple) and out and isinstance(module, nn.MultiheadAttention):
            out = out[0]
        node, shape = (out.grad_fn, out.shape) if isinstance(out, Tensor) else (None, None)
        nodes = [a.grad_fn for a in inputs]
        calls.append(_Call(module, tuple(running), inputs, out, nodes, node, shape, dict(module.named_parameters())))

    def by_function(module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        parameters = dict(module.named_parameters())
        call = _Call(module, tuple(running), [x], out, [x.grad_fn], out.grad_fn, out.shape, parameters, True)
        calls.append(call)
        return out

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(begin, prepend=True))
            handles.append(module.register_forward_hook(end, prepend=True, with_kwargs=True))
        linear = [module for module in modules if type(module) is nn.Linear]
        with LinearFunctions(linear, by_function, running):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _images(x: Inputs, count: int) -> Inputs:
    """A copy of so many of the batch's images. Where the batch has one, the others are made of it, because images that are all the same
    would not show that they mix.
    """
    few = take(x, torch.arange(count, device=tensors_of(x)[0].device) % data_points(x))
    return map_tensors(few, _scaled if data_points(x) == 1 else Tensor.detach)


def _scaled(few: Tensor) -> Tensor:
    """Images of which each is smaller than the one before, where they are real or complex numbers."""
    few = few.detach()
    if few.is_floating_point() or few.is_complex():
        powers = torch.arange(len(few), device=few.device, dtype=torch.float32)
        few *= 0.75 ** powers.view(-1, *[1] * (few.dim() - 1)).to(few.dtype)
    return few


def _run(model: nn.Module, modules: Iterable[nn.Module], few: Inputs) -> tuple[list[_Call], Any]:
    """The calls of the modules on these images, and what the model returns."""
    calls: list[_Call] = []
    with _watched(modules, calls):
        return calls, run_model(model, few)


def _differ_by_images(one: Tensor, other: Tensor) -> bool:
    """Whether outputs of the first two images differ beyond rounding."""
    return not _alike(one[:2], other[:2])


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether outputs are the same up to rounding."""
    one, other = one.detach(), other.detach()
    bound = rounding_of(other) * other.abs().amax() if other.numel() else 0
    return not ((one - other).abs() > bound).any()  # what is not finite is found in the factors


def _places(
    known: dict[nn.Module, Rule], two: Sequence[_Call], three: Sequence[_Call], copies: int
) -> dict[Rule, tuple[Place, ...]]:
    """Where the images are in the outputs of the layers' calls: along the axis that is 2 in the one and 3 in the other, or these numbers
    times that of positions, all of it times that of copies. Set in the calls too.
    """
    places: dict[Rule, tuple[Place, ...]] = {}
    of_three = collections.defaultdict(list)
    for call in three:
        of_three[call.module].append(call)
    for call in two:
        others = of_three[call.module]
        other = others.pop(0) if others else None
        rule, shape = known[call.module], call.shape
        if shape is None or other is None or other.shape is None or len(shape) != len(other.shape):
            continue  # what is no tensor is refused when the layer is called
        sizes = zip(shape, other.shape, strict=True)
        along = [axis for axis, of in enumerate(sizes) if of == (2 * copies, 3 * copies)]
        each = other.shape[0] - shape[0] if shape else 0
        place = None
        if 0 in along:
            place = Place(0, 1, copies)
        elif 1 in along and len(shape) > 2 and _is_alike(call, Place(1)):
            place = Place(1, 1, copies)
        elif each > copies and not each % copies and (shape[0], other.shape[0]) == (2 * each, 3 * each):
            folded = Place(0, each // copies, copies)
            place = folded if _is_alike(call, folded) else None
        if place is None and shape == other.shape:
            raise ValueError(
                f"{rule.label}: its output has the shape {tuple(shape)} whatever the number of data points, so that the gradients of single "
                "ones are not there. Expand its input, as torch.arange(T).expand(N, -1) for embeddings of T positions, or freeze the layer "
                "with requires_grad_(False)."
            )
        if place is None:
            raise ValueError(
                f"{rule.label}: expected an output with the batch in front, (N, ...), got {tuple(shape)} for N = 2 and {tuple(other.shape)} "
                "for N = 3. Positions that share weights must be dimensions of their own, not folded into the batch, and the batch the first "
                "axis, or the second of a layer that treats all axes but the last alike."
            )
        other.place = place
        places[rule] = (*places.get(rule, ()), place)
    return places


def _is_alike(call: _Call, place: Place) -> bool:
    """Whether the layer of a call treats the data points alike when they are the first axis, as its rule gets them."""
    module = call.module
    if isinstance(module, nn.MultiheadAttention):
        return True  # whose projections are linear layers
    with torch.no_grad():
        inputs = [t.detach() for t in call.inputs]
        try:
            out, again = module.forward(*inputs), module.forward(*(batch_first(t, place) for t in inputs))
        except Exception:  # whatever a layer raises of an input of another shape
            return False
    expected = batch_first(out, place)
    return again.shape == expected.shape and _alike(again, expected)


def _require_own_parameters(
    known: dict[nn.Module, Rule],
    parameters: dict[Rule, dict[str, nn.Parameter]],
    calls: Sequence[_Call],
    outputs: Tensor,
) -> None:
    """ValueError where a layer was called with something else in its parameter's place, or the graph reaches the parameter by another way
    than through the calls of layers that have it."""
    everywhere = leaf_uses(outputs.grad_fn)
    called = {call.module for call in calls if not call.by_function}
    own: collections.Counter[int] = collections.Counter()
    for call in calls:
        rule = known[call.module]
        for name, parameter in parameters[rule].items():
            if call.parameters.get(name) is not parameter:
                raise ValueError(
                    f"{rule.label}: its parameter {name!r} is replaced by another tensor while the network runs, as "
                    "torch.func.functional_call does: the curvature of what the parameter goes through first is no Kronecker product. "
                    "Call the layer with its own parameter, or freeze it."
                )
        if call.by_function and call.module in called:
            continue  # of both, only calls of the layer are its own
        mine = {id(parameter) for parameter in parameters[rule].values()}
        own.update({leaf: count for leaf, count in leaf_uses(call.node, call.nodes).items() if leaf in mine})
    for rule, its_own in parameters.items():
        for name, parameter in its_own.items():
            if everywhere[id(parameter)] > own[id(parameter)]:
                raise ValueError(
                    f"{rule.label}: its parameter {name!r} is used outside of the layer's call too, by a function such as "
                    "torch.nn.functional.linear, where no rule sees it. Call a layer that has the parameter too, such as nn.Linear with its "
                    "weight set to this one, or freeze it with requires_grad_(False)."
                )


def leaf_uses(end: Node | None, beginnings: Iterable[Node | None] = ()) -> collections.Counter[int]:
    """By the id of a leaf, how many edges lead to it in the graph behind ``end``, up to ``beginnings``."""
    uses: collections.Counter[int] = collections.Counter()
    seen = {node for node in beginnings if node is not None}
    waiting = [end] if end is not None and end not in seen else []
    seen.update(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                uses[id(leaf)] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return uses


def require_no_reentrant_checkpoint(model: nn.Module, x: Inputs) -> None:
    """RuntimeError where a layer has no gradient because torch.utils.checkpoint, with use_reentrant=True, takes those of its inputs for
    granted: with inputs that require one its node is in the graph.
    """
    if not any(tensor.is_floating_point() for tensor in tensors_of(x)):
        return
    buffers = [buffer for buffer in model.buffers() if not buffer.requires_grad]
    with torch.enable_grad():
        try:
            few = map_tensors(_images(x, 2), lambda t: t.requires_grad_() * 1 if t.is_floating_point() else t)
            outputs = run_model(model, few)
        except Exception:
            return  # a forward that takes no such inputs
        finally:
            for buffer in buffers:
                buffer.detach_()  # in which the forward may have kept something of the inputs
    end = outputs.grad_fn if isinstance(outputs, Tensor) else None
    seen, waiting = {end}, [end] if end is not None else []
    while waiting:
        node = waiting.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError("torch.utils.checkpoint is called with use_reentrant=True")
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        waiting += following


def _require_independence(
    known: dict[nn.Module, Rule],
    calls: Sequence[_Call],
    outputs: Tensor,
    direction: Tensor,
    image: int,
) -> None:
    """ValueError where the outputs of one of three images depend on a layer's output for the others."""
    calls = [call for call in calls if call.place is not None]
    if not calls:
        return
    of_image = torch.zeros_like(outputs)
    of_image[image] = direction[image]
    gradients = torch.autograd.grad(
        outputs, [call.out for call in calls], of_image, retain_graph=True, allow_unused=True
    )
    parts: list[tuple[_Call, Tensor]] = []
    rest = torch.tensor([i for i in range(3) if i != image], device=outputs.device)  # a wait for the device, once
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is not None and gradient.shape == call.shape:
            axis = call.place.axis
            gradient = gradient.unflatten(axis, (3, call.place.rows))
            others = gradient.index_select(axis, rest.to(gradient.device))
            # What is not finite is found in the factors.
            parts.append((call, (others.isfinite() & (others != 0)).any()))
    mixed = torch.stack([flag for _, flag in parts]).tolist() if parts else []  # one wait for the device
    for (call, _), wrong in zip(parts, mixed, strict=True):
        label, folded = known[call.module].label, call.place.folded
        if wrong and folded > 1:
            raise ValueError(
                f"{label}: {folded} positions of every image are folded into the first axis of its output {tuple(call.shape)}, for three "
                "images, and an image's positions do not lie together there. Fold them with the batch in front, as flatten(0, 1) of "
                "(N, T, ...) does, or keep them a dimension of their own."
            )
        if wrong:
            raise ValueError(
                f"{label}: an image's outputs depend on its part for other images of the batch, so the curvature is no sum over images. "
                "Take the images apart: batch statistics (a normalisation without running statistics) and functions along the batch's "
                "axis, behind this place, mix them."
            )


def _unbatched(outputs: Tensor, tensors: Sequence[Tensor], directions: Tensor) -> str | None:
    """None where gradients under vmap are those of plain backward passes; else why not, "" where they differ."""
    try:
        differ = _differ(outputs, tensors, directions)
    except Exception as error:  # a backward of the user's own may look at its argument's type
        return f"gradients of this model cannot be taken by torch.func.vmap ({' '.join(str(error).split())[:300]})"
    return "" if any(differ) else None


def _differ(outputs: Tensor, tensors: Sequence[Tensor], directions: Tensor) -> list[bool]:
    """Of which tensors the gradients along two directions at once are not those along one after the other, beyond rounding."""

    def vjp(direction: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.autograd.grad(outputs, tensors, direction, retain_graph=True, allow_unused=True)
        return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True))

    together = torch.func.vmap(vjp)(directions)
    apart = [torch.stack(parts) for parts in zip(*(vjp(d) for d in directions), strict=True)]
    differ = []
    for one, other in zip(together, apart, strict=True):
        size = other.abs().amax() if other.numel() else other.new_zeros(())
        bound = rounding_of(other) * size
        # What is not finite is found in the factors.
        differ.append(((one - other).abs().amax() > bound) & size.isfinite() if other.numel() else size > 0)
    return torch.stack(differ).tolist()  # one wait for the device


def _culprit(model: nn.Module, x: Inputs) -> str:
    """Words for the module in whose forward the gradients of several columns at once go wrong."""
    # Scripted modules take no hooks.
    names = {m: name for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
    with torch.enable_grad():
        calls, _ = _run(model, names, _images(x, 2))
    generator = torch.Generator("cpu").manual_seed(0)
    # In the order in which calls end: a module comes after those in its forward.
    for at, call in enumerate(calls):
        if not isinstance(call.out, Tensor) or not call.out.requires_grad:
            continue
        behind = [c.out for c in calls[:at] if call.module in c.inside]
        tensors = {id(t): t for t in (*call.inputs, *behind) if isinstance(t, Tensor) and t.requires_grad}
        directions = torch.randn(2, *call.out.shape, generator=generator, dtype=torch.float64, device="cpu").to(
            call.out
        )
        if tensors and any(_differ(call.out, list(tensors.values()), directions)):
            module = call.module
            break
    else:
        module = model
    return f"torch.func.vmap takes wrong gradients through {names.get(module) or '(the model itself)'!r} ({type(module).__name__})"

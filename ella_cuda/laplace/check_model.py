"""Checks before a fit: batch axes, independence over the batch, parameters used only in registered modules, one function whose gradients
are its derivatives."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as of_all_modules
from torch.utils._pytree import tree_leaves

from ella_cuda.laplace.batches import (
    Inputs,
    checked_outputs,
    data_points,
    map_tensors,
    model_outputs,
    run_model,
    take,
    tensors_of,
)
from ella_cuda.laplace.call import Place, batch_first
from ella_cuda.laplace.interception import FunctionMode, hookable_modules, hooks
from ella_cuda.laplace.parameters import rounding_of

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

LARGE = 2.0**10  # columns of a fit have sizes of 1 and less
APART = 32  # images of a first batch whose outputs are compared
OUTPUT = -1  # among a forward hook's arguments
RUNS = 8  # that are compared where a generator moved
Hook = Callable[..., Any]
# Of every call that ended: the module in words, its inputs, its outputs.
Recorded = list[tuple[str, list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Findings:
    """The result of :func:`probe`.

    Attributes:
        places: where the images are in each of a layer's calls, of every rule whose layer was called.
        by_function: the rules of linear layers that are never called, whose weight :func:`torch.nn.functional.linear` uses.
        shared: the rules of layers whose outputs have no batch axis, such as embeddings of positions: all data points share them.
        outside: by rule, parameters without an input side that are used outside of the layer's calls too.
        batched: whether several columns may go back at once, by ``torch.func.vmap``.
        image_bytes: of all layers' outputs of an image.
    """

    places: dict[Rule, tuple[Place, ...]]
    by_function: frozenset[Rule]
    batched: bool
    image_bytes: int = 0
    shared: frozenset[Rule] = frozenset()
    outside: Mapping[Rule, frozenset[str]] = dataclasses.field(default_factory=dict)

    def numbered(self, rules: Sequence[Rule]) -> Findings:
        """These findings with the rules' numbers in their place, to be kept as long as other rules of the same layers may come."""
        number = {rule: n for n, rule in enumerate(rules)}
        return self._with(number)

    def of(self, rules: Sequence[Rule]) -> Findings:
        """:meth:`numbered` findings of these rules."""
        return self._with(dict(enumerate(rules)))

    def _with(self, others: Mapping[Any, Any]) -> Findings:
        def of(rules: Iterable[Any]) -> frozenset[Any]:
            return frozenset(others[rule] for rule in rules)

        places, outside = ({others[rule]: v for rule, v in d.items()} for d in (self.places, self.outside))
        return Findings(places, of(self.by_function), self.batched, self.image_bytes, of(self.shared), outside)


class _Call:
    """A module's call, as a forward hook saw it. Of an output of several parts, the first.

    Attributes:
        inside: the watched modules whose forward ran, the outermost first.
        by_function: whether :func:`torch.nn.functional.linear` was called, with the module's parameters.
        place: of the images in the output, where it is known.
    """

    def __init__(
        self, module: nn.Module, inside: Sequence[nn.Module], inputs: list[Tensor], out: Any, by_function: bool = False
    ) -> None:
        self.module, self.inside, self.inputs, self.out, self.by_function = module, (*inside,), inputs, out, by_function
        self.place: Place | None = None
        # As they are now: what follows may work in place, and replace parameters.
        self.nodes = [tensor.grad_fn for tensor in inputs]
        self.node, self.shape = (out.grad_fn, out.shape) if isinstance(out, Tensor) else (None, None)
        self.parameters = dict(module.named_parameters())


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
        places, shared = _places(known, two, calls, copies)
        by_function = frozenset(known[call.module] for call in calls if call.by_function)
        outside = _outside(known, parameters, calls, outputs)
        tensors = [call for call in calls if isinstance(call.out, Tensor)]
        found = [call for call in tensors if call.out.requires_grad]
        if len(found) < len(tensors):
            require_no_reentrant_checkpoint(model, x)
        image_bytes = sum(call.out.numel() * call.out.element_size() for call in tensors) // 3
        if not outputs.requires_grad:
            if calls and any(p.requires_grad for of in parameters.values() for p in of.values()):
                raise ValueError(
                    "fit: the model's output does not depend on its layers through autograd (is it computed under no_grad?)."
                )
            return Findings(places, by_function, True, image_bytes, shared, outside)
        direction = LARGE * _directions(outputs)[0]
        for image in (0, 1):  # the second alone stays where it is when images are put in reverse
            # Larger than those of a fit, so that hooks that clip gradients do.
            _require_independence(known, found, outputs, direction, image)
        if not alike(of_two, outputs[:2]):
            require_one_function(model, _images(x, 2), drew=False)
            raise ValueError(
                "fit: the model's outputs for two images are others when a third is in the batch, so the curvature is no sum over images. "
                "Take the images apart: batch statistics (a normalisation without running statistics), and functions along the batch's axis "
                "or of its size, mix them."
            )
    together = not several or _go_together(model, x, outputs, found)
    return Findings(places, by_function, together, image_bytes, shared, outside)


def columns_together(model: nn.Module, rules: Sequence[Rule], x: Inputs) -> bool:
    """Whether several columns may go back at once, which :func:`probe` finds with ``several``; arguments and warnings are its own."""
    with torch.enable_grad():
        calls, outputs = _run(model, [rule.module for rule in rules], _images(x, 3))
    outputs = checked_outputs(outputs, 3)
    found = [call for call in calls if isinstance(call.out, Tensor) and call.out.requires_grad]
    return not outputs.requires_grad or _go_together(model, x, outputs, found)


def _go_together(model: nn.Module, x: Inputs, outputs: Tensor, calls: Sequence[_Call]) -> bool:
    reason = _unbatched(model, x, outputs, [call.out for call in calls]) if calls else None
    if reason is not None:
        warnings.warn(
            f"fit: {reason}; columns go back one at a time, which takes longer.",
            UserWarning,
            stacklevel=6,
        )
    return reason is None


def require_rows_of_their_own(model: nn.Module, x: Inputs, alone: Tensor, rows: Tensor, outputs: Tensor) -> None:
    """ValueError where the outputs of some images are not what they are in other batches, here and with the batch in reverse.

    Args:
        x: a batch. alone: the outputs of some of its images in other batches. rows: which these are. outputs: of all.
    """
    if alike(outputs[rows], alone):
        return
    with torch.enable_grad():
        again = model_outputs(model, take(x, torch.arange(len(outputs) - 1, -1, -1, device=rows.device)))
    if alike(again.flip(0), outputs):  # a function with steps, which rounding in batches of other sizes passes
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
        parts = [model_outputs(model, take(x, r)).detach() for r in rows.chunk(2)]
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


def linear_functions(
    layers: Iterable[nn.Module], take: Callable[[nn.Module, Tensor, Tensor], Tensor], running: Sequence[nn.Module]
) -> FunctionMode:
    """While the mode is on, calls of :func:`torch.nn.functional.linear` with the weight of one of these layers are handed on, unless the
    layer's own forward makes them. Another bias than the layer's is added behind what is handed on.

    Args:
        layers: of :class:`torch.nn.Linear`.
        take: ``(layer, x, output) -> output``.
        running: the modules whose forward runs.
    """
    by_weight = {id(layer.weight): layer for layer in layers}

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if func is not F.linear:
            return out
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        layer = by_weight.get(id(given["weight"]))
        its_own = any(getattr(module, "weight", None) is given["weight"] for module in running)  # or of who shares it
        if layer is None or its_own:
            return out
        x, bias = given["input"], given.get("bias")
        if bias is None or bias is layer.bias:
            return take(layer, x, out)
        return take(layer, x, F.linear(x, layer.weight)) + bias

    return FunctionMode(handle)


def _images(x: Inputs, count: int) -> Inputs:
    """A copy of so many of the batch's images. Where the batch has one, the others are made of it, because images that are all the same
    would not show that they mix.
    """

    def scaled(few: Tensor) -> Tensor:
        if few.is_floating_point() or few.is_complex():
            powers = torch.arange(count, device=few.device, dtype=torch.float32)
            few = few.detach() * (0.75 ** powers.view(-1, *[1] * (few.dim() - 1))).to(few.dtype)
        return few

    few = take(x, torch.arange(count, device=tensors_of(x)[0].device) % data_points(x))
    return map_tensors(few, scaled if data_points(x) == 1 else Tensor.detach)


def _run(model: nn.Module, modules: Iterable[nn.Module], few: Inputs) -> tuple[list[_Call], Any]:
    """The calls of the modules on these images, in the order in which the calls end, and what the model returns."""
    calls: list[_Call] = []
    running: list[nn.Module] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        running.pop()
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        several = isinstance(out, tuple) and out and isinstance(module, nn.MultiheadAttention)
        calls.append(_Call(module, running, inputs, out[0] if several else out))

    def by_function(module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        calls.append(_Call(module, running, [x], out, by_function=True))
        return out

    linear = [module for module in modules if type(module) is nn.Linear]
    with hooks(modules, begin, end, prepend=True, with_kwargs=True), linear_functions(linear, by_function, running):
        outputs = run_model(model, few)
    called = {call.module for call in calls if not call.by_function}  # of both, only calls of the layer are its own
    return [call for call in calls if not (call.by_function and call.module in called)], outputs


def _places(
    known: dict[nn.Module, Rule], two: Sequence[_Call], three: Sequence[_Call], copies: int
) -> tuple[dict[Rule, tuple[Place, ...]], frozenset[Rule]]:
    """Where the images are in the outputs of the layers' calls: along the axis that is 2 in the one and 3 in the other, or these numbers
    times that of positions, all of it times that of copies. Set in the calls too. Beside these, the rules whose layers' outputs have no
    such axis.
    """
    places: dict[Rule, tuple[Place, ...]] = {}
    without: dict[Rule, list[tuple[_Call, _Call]]] = {}
    of_three = {module: iter([call for call in three if call.module is module]) for module in known}
    for call in two:
        other = next(of_three[call.module], None)
        rule, shape = known[call.module], call.shape
        if shape is None or other is None or other.shape is None or len(shape) != len(other.shape):
            continue  # what is no tensor is refused when the layer is called
        sizes = zip(shape, other.shape, strict=True)
        along = [axis for axis, of in enumerate(sizes) if of == (2 * copies, 3 * copies)]
        each = other.shape[0] - shape[0] if shape else 0
        place = None
        if 0 in along:
            place = Place(0, 1, copies)
        elif 1 in along and len(shape) > 2 and _treats_alike(call, Place(1)):
            place = Place(1, 1, copies)
        elif each > copies and not each % copies and (shape[0], other.shape[0]) == (2 * each, 3 * each):
            folded = (Place(0, each // copies, copies, last) for last in (False, True))
            place = next((there for there in folded if _treats_alike(call, there)), None)
        if place is None and shape == other.shape:
            without.setdefault(rule, []).append((call, other))
            continue
        if place is None:
            raise ValueError(
                f"{rule.label}: expected an output with the batch in front, (N, ...), got {tuple(shape)} for N = 2 and {tuple(other.shape)} "
                "for N = 3. Positions that share weights must be dimensions of their own, not folded into the batch, and the batch the first "
                "axis, or the second of a layer that treats all axes but the last alike."
            )
        other.place = place
        places[rule] = (*places.get(rule, ()), place)
    counts = [collections.Counter(call.module for call in calls) for calls in (two, three)]
    alone = {rule for rule in without if rule not in places and counts[0][rule.module] == counts[1][rule.module]}
    refused = {
        rule: calls
        for rule, calls in without.items()
        if rule not in alone or not all(_is_shared(rule, *c) for c in calls)
    }
    if refused:
        shapes = [f"- {rule.label}: {tuple(calls[0][0].shape)}" for rule, calls in refused.items()]
        raise ValueError(
            "fit: expand the inputs of these layers along the batch, as torch.arange(T).expand(N, -1) for embeddings of T positions (the "
            "argument position_ids of transformers' networks), or freeze them with requires_grad_(False). Their outputs have these shapes "
            "whatever the number of data points, so that they are all data points' at once, and their inputs are not, or their weights are "
            "those of other layers too:\n" + "\n".join(shapes)
        )
    return places, frozenset(without)


def led(tensor: Tensor, count: int, out: torch.Size) -> Tensor:
    """The argument or output of a call without a batch axis, whose output has this shape, for so many data points: along the first axis where
    that has length one."""
    one = tensor.shape[:1] == out[:1] == (1,)
    return (tensor if one else tensor[None]).expand(count, *(tensor.shape[1:] if one else tensor.shape))


def _is_shared(rule: Rule, call: _Call, other: _Call) -> bool:
    """Whether a layer's call is the same one for all data points, and the layer takes these as a batch."""
    of_others = rule.tied or rule.lent or rule.inner_modules() or call.by_function
    based = any((shape.input_basis or shape.output_basis) is not None for shape in rule.shapes().values())
    same = _all_alike(call.inputs, other.inputs)
    if of_others or based or not same:
        return False
    with torch.no_grad():
        inputs = [t.detach() for t in call.inputs]
        try:
            out, again = call.module.forward(*inputs), call.module.forward(*(led(t, 2, call.shape) for t in inputs))
        except Exception:  # whatever a layer raises of an input of another shape
            return False
    return alike(again, led(out, 2, call.shape))


def _treats_alike(call: _Call, place: Place) -> bool:
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
    return again.shape == expected.shape and alike(again, expected)


def _outside(
    known: dict[nn.Module, Rule],
    parameters: dict[Rule, dict[str, nn.Parameter]],
    calls: Sequence[_Call],
    outputs: Tensor,
) -> dict[Rule, frozenset[str]]:
    """By rule, the parameters that the graph reaches by another way than through the calls of layers that have them. ValueError where one of
    these has an input side or is another layer's too, or where a layer was called with something else in its parameter's place."""
    everywhere = leaf_uses(outputs.grad_fn)
    own: collections.Counter[int] = collections.Counter()
    absent: dict[Rule, set[str]] = {}
    for call in calls:
        rule = known[call.module]
        for name, parameter in parameters[rule].items():
            if call.parameters.get(name) is not parameter:
                raise ValueError(
                    f"{rule.label}: its parameter {name!r} is replaced by another tensor while the network runs, as "
                    "torch.func.functional_call does: the curvature of what the parameter goes through first is no Kronecker product. "
                    "Call the layer with its own parameter, or freeze it."
                )
        mine, uses = {id(parameter) for parameter in parameters[rule].values()}, leaf_uses(call.node, call.nodes)
        own.update({leaf: count for leaf, count in uses.items() if leaf in mine})
        if call.by_function:  # maybe with another bias than the layer's
            absent.setdefault(rule, set()).update(n for n in rule.trainable if not uses[id(parameters[rule][n])])
    found, refused = {}, []
    for rule, its_own in parameters.items():
        names = {name for name in rule.trainable if everywhere[id(its_own[name])] > own[id(its_own[name])]}
        names |= absent.get(rule, set())
        shapes, of_others = rule.shapes(), rule.tied.keys() | rule.lent
        served = {n for n in names if shapes[n].constant_input and n not in of_others}
        found |= {rule: frozenset(served)} if served and not rule.inner_modules() else {}
        refused += [
            f"\n- {rule.label}: its parameter {name!r} is used outside of the layer's call too"
            for name in sorted(names - found.get(rule, frozenset()))
        ]
    if refused:
        raise ValueError(
            "fit: call a layer that has the parameter too, such as nn.Linear with its weight set to this one, in the place of a function "
            "such as torch.nn.functional.linear, where no rule sees it, or freeze it with requires_grad_(False):"
            + "".join(refused)
        )
    return found


def leaf_uses(end: Node | None, beginnings: Iterable[Node | None] = ()) -> collections.Counter[int]:
    """By the id of a leaf, how many edges lead to it in the graph behind ``end``, up to ``beginnings``."""
    uses: collections.Counter[int] = collections.Counter()
    for node in _nodes(end, beginnings):
        leaves = [getattr(before, "variable", None) for before, _ in node.next_functions]
        uses.update(id(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    return uses


def _nodes(end: Node | None, beginnings: Iterable[Node | None] = ()) -> Iterator[Node]:
    """The nodes of the graph behind ``end``, up to ``beginnings``, each once."""
    seen, waiting = {None, *beginnings}, [end]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


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
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(end)):
        raise RuntimeError("torch.utils.checkpoint is called with use_reentrant=True")


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
    rest = torch.tensor([i for i in range(3) if i != image], device=outputs.device)  # a wait for the device, once
    parts = [
        (c, g) for c, g in zip(calls, gradients, strict=True) if g is not None and g.shape == c.shape and g.numel()
    ]
    mixed = []
    for call, gradient in parts:
        axis = call.place.axis
        others = gradient.unflatten(axis, (3, call.place.rows)).index_select(axis, rest.to(gradient.device))
        mixed.append(others.nan_to_num(0.0, 0.0, 0.0))  # what is not finite is found in the factors
    wrong = _sizes(mixed).tolist() if mixed else []  # one wait for the device
    for call in itertools.compress([call for call, _ in parts], wrong):
        label, folded = known[call.module].label, call.place.folded
        if folded > 1:
            raise ValueError(
                f"{label}: {folded} positions of every image are folded into the first axis of its output {tuple(call.shape)}, for three "
                "images, and an image's positions do not lie together there. Fold them with the batch in front, as flatten(0, 1) of "
                "(N, T, ...) does, or keep them a dimension of their own."
            )
        raise ValueError(
            f"{label}: an image's outputs depend on its part for other images of the batch, so the curvature is no sum over images. "
            "Take the images apart: batch statistics (a normalisation without running statistics) and functions along the batch's "
            "axis, behind this place, mix them."
        )


def _directions(outputs: Tensor) -> Tensor:
    """Two random directions of outputs, ``(2, N, ...)``. The global generator stays where it is."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(2, *outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs)


def _unbatched(model: nn.Module, x: Inputs, outputs: Tensor, tensors: Sequence[Tensor]) -> str | None:
    """None where gradients under vmap are those of plain backward passes; else why not."""
    try:
        if not _differ(outputs, tensors):
            return None
    except Exception as error:  # a backward of the user's own may look at its argument's type
        return f"gradients of this model cannot be taken by torch.func.vmap ({' '.join(str(error).split())[:300]})"
    return _culprit(model, x)


def _differ(outputs: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether gradients along two directions at once are not those along one after the other, beyond rounding."""

    def vjp(direction: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, tensors, direction, retain_graph=True, materialize_grads=True)

    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return False
    directions = _directions(outputs)
    together = torch.func.vmap(vjp)(directions)
    gaps, sizes = [], []
    for number, direction in enumerate(directions):
        apart = vjp(direction)
        gaps.append(_sizes(torch._foreach_sub([t[number] for t in together], apart)))
        sizes.append(_sizes(torch._foreach_mul(apart, [rounding_of(t) for t in apart])))
    gap, size = torch.stack(gaps).amax(0), torch.stack(sizes).amax(0)
    # What is not finite is found in the factors. One wait for the device.
    return bool(((gap > size) & size.isfinite()).any())


def _sizes(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of each, nan where there is one."""
    return torch.stack(torch._foreach_norm(tensors, torch.inf))


def _culprit(model: nn.Module, x: Inputs) -> str:
    """Words for the module in whose forward the gradients of several columns at once go wrong."""
    names = hookable_modules(model)
    with torch.enable_grad():
        calls, _ = _run(model, names, _images(x, 2))
    # In the order in which calls end: a module comes after those in its forward.
    for at, call in enumerate(calls):
        if not isinstance(call.out, Tensor) or not call.out.requires_grad:
            continue
        behind = [c.out for c in calls[:at] if call.module in c.inside]
        tensors = {id(t): t for t in (*call.inputs, *behind) if isinstance(t, Tensor) and t.requires_grad}
        if tensors and _differ(call.out, list(tensors.values())):
            model = call.module
            break
    return f"torch.func.vmap takes wrong gradients through {names.get(model) or '(the model itself)'!r} ({type(model).__name__})"


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the global generators that a forward on the device may draw from: Python's, numpy's and torch's."""
    _, keys, *rest = np.random.get_state()
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return random.getstate(), keys.tobytes(), *rest, *(state.numpy().tobytes() for state in states)


def require_one_function(model: nn.Module, few: Inputs, drew: bool) -> None:
    """Run the network on the same images several times.

    Args:
        few: images.
        drew: whether a global generator moved while the network ran; else outputs differed.

    Raises:
        ValueError: outputs differ; names the innermost module that makes the difference.

    Warns:
        UserWarning: a generator moved, and outputs do not differ.
    """
    first = _recorded(model, few)
    for _ in range(RUNS):
        again = _recorded(model, few)
        differing = [not _all_alike(one[2], other[2]) for one, other in zip(first, again, strict=False)]
        if len(first) != len(again) or differing[-1]:
            # A module ends after those inside of it; what it got may differ because of others.
            culprits = (a[0] for a, b, d in zip(first, again, differing, strict=False) if d and _all_alike(a[1], b[1]))
            raise ValueError(
                f"fit: {next(culprits, type(model).__name__)} draws random numbers in evaluation mode, or keeps something from call to call: "
                "the model's outputs for the same images differ, and the evidence would be that of one draw. Draw in training alone "
                "(F.dropout(x, p, self.training)), keep the draws in a buffer, or hold them: an Augment's by its context held()."
            )
    if drew:
        warnings.warn(
            f"fit: the model draws random numbers in evaluation mode. Outputs of {RUNS} runs are the same; where they depend on what is "
            "drawn all the same, the evidence is that of one draw.",
            UserWarning,
            stacklevel=6,
        )


def _all_alike(one: list[Any], other: list[Any]) -> bool:
    """Whether tensors are the same; on CUDA, where sums have no order, up to rounding."""
    return len(one) == len(other) and all(
        alike(a, b) if isinstance(a, Tensor) and a.is_cuda and a.is_floating_point() else identical(a, b)
        for a, b in zip(one, other, strict=True)
    )


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same up to rounding, as are those that are not finite at the same entries."""
    return bool(alike_flag(one, other))


def alike_flag(one: Tensor, other: Tensor) -> Tensor:
    """:func:`alike`, 0-dim, on the device of ``other``, which nobody waits for."""
    if one.shape != other.shape or not one.numel():
        return torch.full((), one.shape == other.shape, device=other.device)
    one, other = one.detach(), other.detach()
    close = (one - other).abs() <= rounding_of(other) * other.abs().nan_to_num().amax()
    return (close | (one == other) | (one.isnan() & other.isnan())).all()


def _recorded(model: nn.Module, few: Inputs) -> Recorded:
    """The calls of all modules, the model's own last, with copies of what they get and return."""
    calls: Recorded = []
    given: list[list[Any]] = []

    def copied(*values: Any) -> list[Any]:
        return [v.detach().clone() if isinstance(v, Tensor) else v for v in tree_leaves(values)]

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:  # what follows may work in place
        given.append(copied(args, kwargs))

    def end(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls.append((f"{names[module]!r} ({type(module).__name__})", given.pop(), copied(out)))

    names = {m: name for m, name in hookable_modules(model).items() if name}
    with hooks(names, begin, end, with_kwargs=True), torch.enable_grad():  # a forward may put hooks on its tensors
        out = run_model(model, map_tensors(few, Tensor.clone))
    calls.append((type(model).__name__, [], copied(out)))
    return calls


def identical(one: Any, other: Any) -> bool:
    """Whether tensors have the same numbers, nan and nan being the same; what is no tensor is."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


@contextmanager
def refusing_changes_of_gradients(model: nn.Module, layers: Collection[nn.Module]) -> Iterator[None]:
    """Watch hooks during a forward pass and plain backward passes of it inside the context: backward hooks of modules, of all modules, and
    of tensors, and forward hooks of all modules, which stand before those of a fit on these layers. Hooks of the graph's nodes cannot be
    watched.

    Raises:
        ValueError: at the end of the context, one changed what it got; names it.
    """
    found: list[str] = []
    watching = True

    def watched(hook: Hook, at: int, words: str) -> Hook:
        """The hook, which is compared with what it gets, its argument number ``at``; of a hook that gets an output, of these layers."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if not watching or (at == OUTPUT and args[0] not in layers):
                return hook(*args, **kwargs)
            before = [v.clone() if isinstance(v, Tensor) else v for v in tree_leaves(args[at])]
            out = hook(*args, **kwargs)
            after = tree_leaves(args[at] if out is None else out)
            if len(after) != len(before) or not all(map(identical, before, after)):
                found.append(f"{words} ({getattr(hook, '__qualname__', type(hook).__name__)})")
            return out

        return called

    def watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.register_hook and len(args) == 2 and args[0].grad_fn is not None:
            args = args[0], watched(args[1], 0, "a hook that the forward puts on a tensor")
        return func(*args, **kwargs)

    tables: list[tuple[dict[Any, Hook], int, str]] = [
        (of_all_modules._global_backward_hooks, 1, "a backward hook of all modules"),
        (of_all_modules._global_backward_pre_hooks, 1, "a backward hook of all modules"),
        (of_all_modules._global_forward_hooks, OUTPUT, "a forward hook of all modules"),
    ]
    for name, module in model.named_modules():
        words = f"a backward hook of {name or 'the model'!r} ({type(module).__name__})"
        tables += [(module._backward_hooks, 1, words), (module._backward_pre_hooks, 1, words)]
    replaced = [(table, key, hook) for table, _, _ in tables for key, hook in table.items()]
    try:
        for table, at, words in tables:
            table.update({key: watched(hook, at, words) for key, hook in table.items()})
        with FunctionMode(watch):
            yield
    finally:
        watching = False
        for table, key, hook in replaced:
            if key in table:  # a hook may remove itself
                table[key] = hook
    if found:
        raise ValueError(
            f"fit: {found[0]} changes what passes it, so that gradients are no derivatives of the model's outputs. Remove it by its "
            "handle for the fit; a hook that looks on may stay."
        )

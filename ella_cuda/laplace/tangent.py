"""Derivatives of a network along directions of its parameters."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Values = dict[str, Tensor]


class ReplacedParameters:
    """A model's parameters under other values, wherever a module has them; and other tensors of it, if wanted.

    Args:
        model: the network.
        names: of the parameters, as ``model.named_parameters()`` has them.
        others: names of more parameters and of buffers, which :meth:`split` does not have.
    """

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
        return {name: part.reshape(*part.shape[:-1], *p.shape).to(p.dtype) for (name, p), part in shapes}


@functools.cache
def load_forward_mode() -> None:
    """Let torch load its forward mode, which compiles functions by torch.jit.script and warns of that."""
    if forward_ad._current_level >= 0:  # levels do not nest
        return
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        forward_ad.make_dual(torch.zeros((), device="cpu"), torch.zeros((), device="cpu"))


def jvp(function: Callable[[Values], Tensor], values: Values, directions: Values) -> Tensor:
    """The derivatives of a function of parameters along S directions, in forward mode, or by two passes of reverse mode where a function
    has no forward mode.

    Args:
        function: of values by name, to a tensor.
        values: where it is differentiated.
        directions: ``(S, *shape)`` each.

    Returns:
        ``(S, *function(values).shape)``.

    Raises:
        NotImplementedError: a function without a forward mode is differentiable once.
    """

    def forward(direction: Values) -> Tensor:
        return torch.func.jvp(function, (values,), (direction,))[1]

    def reverse(direction: Values) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative; and a cotangent c with what c^T J d is by one pass."""
        # By autograd itself: torch.func refuses a torch.autograd.Function without setup_context.
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            outputs = function(leaves)
            cotangent = torch.ones_like(outputs).requires_grad_()
            pulled = torch.autograd.grad(
                outputs, [*leaves.values()], cotangent, create_graph=True, materialize_grads=True
            )
            product = sum((g * direction[name]).sum() for name, g in zip(leaves, pulled, strict=True))
            return torch.autograd.grad(product, cotangent)[0], cotangent.detach(), product.detach()

    def along(way: Callable[[Values], Any], sample: int) -> Any:
        return way({name: d[sample] for name, d in directions.items()})

    count = len(next(iter(directions.values())))
    load_forward_mode()
    try:
        last, way = along(forward, count - 1), forward
    except Exception:  # whatever functions without a forward mode raise
        last, cotangent, product = along(reverse, count - 1)
        # Of a function that is differentiable once, autograd leaves the second derivative out without a word.
        terms = last * cotangent
        if differ({"": terms.sum()}, {"": product}, terms.abs().sum()):
            raise NotImplementedError("jvp: a function without a forward mode is differentiable once.") from None

        def way(direction: Values) -> Tensor:
            return reverse(direction)[0]

    if count > 1:
        with suppress(Exception):  # whatever functions that vmap cannot take raise
            together = torch.func.vmap(way)(directions)
            # Some functions have wrong derivatives there, all but the first.
            if not differ({"": together[-1]}, {"": last}):
                return together
    return torch.stack([*(along(way, sample) for sample in range(count - 1)), last])


def rounding_of(tensor: Tensor) -> float:
    """By how much, of its largest number, a tensor's derivative may differ from the same by another way. On CUDA cuDNN takes TF32 for
    float32 by default, through many layers; what is wrong is off by more."""
    return 2.0**-6 if tensor.is_cuda and tensor.dtype == torch.float32 else torch.finfo(tensor.dtype).eps ** 0.5


def differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor], of: Tensor | None = None) -> bool:
    """Whether two ways to the same derivatives differ beyond rounding, in what is finite; ``of`` is the size of what was added up, where
    that is not theirs."""
    for name, b in other.items():
        size = b.abs().amax() if of is None else of
        if size.isfinite() and (one[name] - b).abs().amax() > rounding_of(b) * size:
            return True
    return False

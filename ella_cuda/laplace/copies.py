r"""Networks that average their outputs over transformed copies of each data point: :class:`ella_cuda.augment.AveragedFunction`.

With :math:`\bar f(x) = \frac1S \sum_s f(T_s x)` the Jacobian of a data point is the mean of its copies', and a layer's block of the
generalised Gauss-Newton matrix is that of :math:`\sum_s a_s g_s^T` with :math:`g_s` the gradients of the averaged outputs, which have the
factor 1/S. The Kronecker product in its place is that of :math:`\bar a = \frac1S \sum_s a_s` and :math:`\bar g = \sum_s g_s`, at every
position, as if these were a data point's: means come before outer products. Second moments over copies, as if these were data points, would
reward amounts of augmentation for noise, and turn the sign of the evidence's gradient in them. Blocks without an input side, such as
biases' and norms', stay exact, and so are Jacobians.

Draws are inputs of the network beside the data, so that what runs it several times on a batch, or in parts, runs one function.

Source: Immer, van der Ouderaa et al., "Invariance learning in deep neural networks with differentiable Laplace approximations", NeurIPS
2022, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.augment import Augment, AveragedFunction
from ella_cuda.laplace.batches import Inputs, take
from ella_cuda.laplace.rules import Rule


def augment_of(model: nn.Module) -> Augment | None:
    """What draws the copies that the model averages over; None of other models, and where copies are not drawn."""
    augment = model.augment if isinstance(model, AveragedFunction) else None
    return augment if isinstance(augment, Augment) else None


def copies_of(model: nn.Module) -> int:
    """S: how many copies of each data point the model averages over."""
    if not isinstance(model, AveragedFunction):
        return 1
    count = getattr(model.augment, "n_samples", None)
    if not isinstance(count, int):
        raise TypeError(
            f"KronLaplace: the augmentation of an AveragedFunction must say in its attribute n_samples how many copies it makes, got a "
            f"{type(model.augment).__name__}."
        )
    return count


def require_copies(model: nn.Module, x: Inputs) -> None:
    """ValueError where the model averages over another number of copies of inputs than it says, by which factors would be wrong."""
    if not isinstance(model, AveragedFunction):
        return
    with torch.no_grad():
        one = take(x, slice(1))
        found = model.copies(*one if isinstance(one, tuple) else (one,)).shape[1]
    if found != copies_of(model):
        raise ValueError(
            f"KronLaplace: the augmentation made {found} copies of an input, and its n_samples is {copies_of(model)}; both must agree."
        )


def require_served(model: nn.Module, rules: Sequence[Rule]) -> None:
    """Tell rules how many copies their layers see.

    Raises:
        ValueError: a part of the model averages over copies, which is not all of it; a rule cannot follow.
    """
    inside = [name for name, m in model.named_modules() if name and isinstance(m, AveragedFunction)]
    compiled = [name for name in inside if name.rpartition(".")[2] == "_orig_mod"]
    if compiled:
        raise ValueError(
            "KronLaplace: an AveragedFunction that torch.compile wraps is not seen; compile its network, as in "
            "AveragedFunction(torch.compile(network), augment), or in place by its method compile()."
        )
    if inside:
        raise ValueError(
            f"KronLaplace: {inside[0]!r} is an AveragedFunction inside of the model; make the whole network its network, as in "
            "AveragedFunction(network, augment), so that outputs are averaged last."
        )
    copies = copies_of(model)
    for rule in rules if copies > 1 else ():
        if not rule.serves_copies():
            raise ValueError(
                f"{rule.label}: {type(rule).__name__} does not serve an AveragedFunction, whose factors are those of means over copies. "
                "Freeze the layer, or, where its rows are linear in inputs and gradients, have its rule say so with averages = True."
            )
        rule.copies = copies


def fixed_draws(model: nn.Module) -> Tensor | None:
    """The draws of a pass over data, ``(1, S, ...)``; None where each data point has its own, or there are none."""
    augment = augment_of(model)
    if augment is None:
        return None
    augment.rewind()
    eps = augment.eps_for(augment.raw.new_empty(2, 0))
    return eps if len(eps) == 1 else None


def with_draws(model: nn.Module, x: Inputs, eps: Tensor | None) -> Inputs:
    """Inputs of the model with the draws beside them: these, or new ones for each data point."""
    augment = augment_of(model)
    if augment is None or not isinstance(x, Tensor):
        return x
    eps = augment.eps_for(x) if eps is None else eps
    if eps.shape[1] != augment.n_samples:
        raise ValueError(
            f"KronLaplace: the augmentation holds draws of {eps.shape[1]} copies, {tuple(eps.shape)}; its n_samples is {augment.n_samples}."
        )
    return x, eps.expand(len(x), *eps.shape[1:])


def checked_draws(model: nn.Module, draws: Any) -> Tensor | None:
    """A state's draws, copied to the model's device; ValueError where they are none of the model's augmentation."""
    augment = augment_of(model)
    if draws is None:
        return None
    # By a generator of its own: the global one is not to move.
    like = None if augment is None else augment.draw(2, "shared", torch.Generator())
    if like is None or not isinstance(draws, Tensor) or draws.shape != like.shape or draws.dtype != like.dtype:
        own = "" if like is None else f" or the model's augmentation's, {tuple(like.shape)} of {like.dtype}"
        got = f"{tuple(draws.shape)} of {draws.dtype}" if isinstance(draws, Tensor) else type(draws).__name__
        raise ValueError(f"load_state_dict: draws must be None{own}, got {got}.")
    return draws.detach().to(like.device, copy=True)


def require_constant_amounts(model: nn.Module) -> None:
    """ValueError where a buffer of the augmentation requires a gradient, of which a fit would have the data fit's part alone."""
    if not isinstance(model, AveragedFunction):
        return
    learnt = [name for name, buffer in model.augment.named_buffers() if buffer.requires_grad]
    if learnt:
        raise ValueError(
            f"fit: the augmentation's buffer {learnt[0]!r} requires a gradient; factors depend on it, and the data fit's gradient alone "
            "drives amounts to 0. Fit without, and take the evidence's gradient by ella_cuda.laplace.evidence_gradient."
        )

r"""Networks that average their outputs over transformed copies of each data point: :class:`ella_cuda.augment.AveragedFunction`.

With :math:`\bar f(x) = \frac1S \sum_s f(T_s x)` the Jacobian of a data point is the mean of its copies', and a layer's block of the
generalised Gauss-Newton matrix is that of :math:`\sum_s a_s g_s^T` with :math:`g_s` the gradients of the averaged outputs, which have the
factor 1/S. The Kronecker product in its place is that of :math:`\bar a = \frac1S \sum_s a_s` and :math:`\bar g = \sum_s g_s`, at every
position, as if these were a data point's: means come before outer products. Second moments over copies, as if these were data points, would
reward amounts of augmentation for noise, and turn the sign of the evidence's gradient in them. Blocks without an input side, such as
biases' and norms', stay exact, and so are Jacobians.

Draws are inputs of the network beside the data, so that what runs it several times on a batch, or in parts, runs one function. Where not
even one data point's copies have room together, they go through the network in chunks: all that is wanted of copies are sums.

Source: Immer, van der Ouderaa et al., "Invariance learning in deep neural networks with differentiable Laplace approximations", NeurIPS
2022, section 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ella_cuda.augment import Augment, AveragedFunction
from ella_cuda.laplace.batches import Inputs, data_points, take
from ella_cuda.laplace.interception import HOOKS

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

FEW = 8  # copies of images, which always go together
PROBED = 2  # copies of each data point, by which a network is tried
SAME = 1e-4  # the part in which numbers of a copy may differ that is made alone, and one that is made beside another

Chunk = tuple[Inputs, float]  # data points with some of their copies, and the share of these in all


def augment_of(model: nn.Module) -> Augment | None:
    """The augmentation that draws the copies that the model averages over; None of other models, and where copies are not drawn."""
    augment = model.augment if isinstance(model, AveragedFunction) else None
    return augment if isinstance(augment, Augment) else None


def copies_of(model: nn.Module) -> int:
    """The number S of copies of each data point that the model averages over."""
    if not isinstance(model, AveragedFunction):
        return 1
    count = getattr(model.augment, "n_samples", None)
    if not isinstance(count, Integral):
        raise TypeError(
            f"KronLaplace: the augmentation of an AveragedFunction must say in its attribute n_samples how many copies it makes, got a "
            f"{type(model.augment).__name__}."
        )
    return int(count)


def is_plain_average(model: nn.Module) -> bool:
    """Whether the model returns its network's outputs, averaged over copies, and nothing else."""
    return type(model) is AveragedFunction and not is_changed(model) and not _has_any_global_hook()


def is_changed(module: nn.Module) -> bool:
    """Whether a call may return other than the class's forward."""
    return any(getattr(module, hooks) for hooks in HOOKS) or "forward" in vars(module)


def require_copies(model: nn.Module, x: Inputs) -> None:
    """ValueError where the model averages over another number of copies of inputs than it says, by which factors would be wrong."""
    if not isinstance(model, AveragedFunction):
        return
    few, wanted = tried_copies(model, take(x, slice(1)))
    with torch.no_grad():
        found = model.copies(*few if isinstance(few, tuple) else (few,)).shape[1]
    if found != wanted:
        raise ValueError(
            f"KronLaplace: the augmentation made {found} copies of an input, and its n_samples is {wanted}; both must agree."
        )


def require_served(model: nn.Module, rules: Sequence[Rule]) -> None:
    """Tell rules how many copies their layers see; ValueError where a part of the model averages over copies, or a rule cannot follow."""
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


def has_chunks(model: nn.Module, x: Inputs) -> bool:
    """Whether some of the copies of these inputs can go through the model alone, and its outputs of all are their mean."""
    if augment_of(model) is None or not is_plain_average(model) or not isinstance(x, tuple) or len(x) != 2:
        return False
    drawn = all(isinstance(t, Tensor) for t in x) and x[1].dim() > 1 and 1 < x[1].shape[1] == copies_of(model)
    return drawn and _is_made_alone(model, x[0][:1], x[1][:1, :PROBED])


@torch.no_grad()
def _is_made_alone(model: AveragedFunction, x: Tensor, eps: Tensor) -> bool:
    """Whether the last copy of a data point is of its own draws alone, and none is made beside: an augmentation may have another forward, or
    a transform that knows a copy's number."""
    together, alone = model.copies(x, eps), model.copies(x, eps[:, -1:])
    last = together[:, -1:]
    if together.shape[1] != eps.shape[1] or alone.shape != last.shape:
        return False
    if not (alone.is_floating_point() and alone.numel()):
        return torch.equal(alone, last)
    size = float(last.nan_to_num().abs().max())
    return torch.allclose(alone, last, rtol=SAME, atol=SAME * size, equal_nan=True)


def tried_copies(model: nn.Module, x: Inputs) -> tuple[Inputs, int]:
    """Inputs with as many copies as show what the network does with them, and how many these are."""
    copies = copies_of(model)
    if copies <= PROBED or not has_chunks(model, x):
        return x, copies
    return (x[0], x[1][:, :PROBED]), PROBED


def chunks_of(x: tuple[Tensor, Tensor], most: int) -> list[Chunk]:
    """Inputs with at most so many of their copies at a time, the largest chunk first."""
    copies = x[1].shape[1]
    step = -(-copies // -(-copies // most))
    return [((x[0], some), some.shape[1] / copies) for some in x[1].split(step, 1)]


def copies_together(model: nn.Module, x: Inputs, room: int, image_bytes: int) -> int:
    """The number of copies of each of these data points that go through the network together in ``room`` bytes, where all copies of a data
    point keep ``image_bytes``."""
    copies, count = copies_of(model), max(data_points(x), 1)
    if copies * count <= FEW or image_bytes * count <= room or not has_chunks(model, x):
        return copies
    return min(max(room * copies // (image_bytes * count), FEW // count, 1), copies)


@contextmanager
def seeing(rules: Iterable[Rule], copies: int) -> Iterator[None]:
    """For the duration of the context, the rules' layers see so many copies."""
    before = [(rule, rule.copies) for rule in rules]
    for rule, _ in before:
        rule.copies = copies
    try:
        yield
    finally:
        for rule, count in before:
            rule.copies = count


def warn_of_all_copies(model: nn.Module, x: Inputs, room: int, image_bytes: int, where: str) -> None:
    """Tell where the copies of a data point have no room and must go together all the same."""
    if copies_of(model) <= FEW or image_bytes <= room or has_chunks(model, x):
        return
    reason = (
        "a hook, a subclass or another forward may change the average, or a copy depends on others"
        if augment_of(model) is not None
        else f"a {type(model.augment).__name__} is no ella_cuda.augment.Augment, whose draws are known"
    )
    warnings.warn(
        f"{where}: all {copies_of(model)} copies of a data point go through the network together, {image_bytes:,} bytes of layers' outputs "
        f"where memory_budget has room for {room:,}: {reason}. A plain AveragedFunction(network, augment) with an Augment is split.",
        UserWarning,
        stacklevel=5,
    )


def checked_draws(model: nn.Module, draws: Any) -> Tensor | None:
    """A state's draws, copied to the model's device; ValueError where they are none of the model's augmentation."""
    augment = augment_of(model)
    if draws is None:
        return None
    # By a generator of its own: the global one is not to move.
    like = None if augment is None else augment.draw(2, "shared", torch.Generator("cpu"))
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

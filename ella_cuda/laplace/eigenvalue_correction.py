r"""Eigenvalue-corrected Kronecker factors (EKFAC): the curvature's diagonal in the eigenbasis of the factors.

A block :math:`A \otimes B` has the eigenvectors :math:`U \otimes V`. In their place as eigenvalues come the entries of the generalised
Gauss-Newton matrix' own diagonal in this basis, :math:`\Lambda_{ij} = \sum_{nk} (U^T M_{nk} V)_{ij}^2`, with :math:`M_{nk}` the gradient of
data point n along column k of the output Hessian's square root. Of all diagonals this one is nearest to the block in the Frobenius norm, and
its trace is the block's. The basis is known once all data were seen, so that a fit passes over the data twice.

Source: George et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ella_cuda.distributed import Ranks
from ella_cuda.laplace.batches import Inputs, data_points
from ella_cuda.laplace.copies import augment_of
from ella_cuda.laplace.distributed_fit import plan_of, require_one_plan, seeded_together
from ella_cuda.laplace.factors import FactorShape, Jacobian, checked_tensor
from ella_cuda.laplace.jacobian_pass import JacobianConsumer, JacobianPass
from ella_cuda.laplace.likelihoods import Columns
from ella_cuda.laplace.posterior import CorrectedEigenvalues, Eigenbasis, eigenbases
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.ops._precision import without_autocast


class DiagonalInEigenbases(JacobianConsumer):
    """Sums of squares of gradients in eigenbases.

    Attributes:
        totals: by parameter, ``(G, a, b)``, float64.
    """

    def __init__(self, bases: Mapping[str, Eigenbasis], device: torch.device) -> None:
        self._bases = bases
        sizes = {name: (b.shape.groups, b.shape.inputs, b.shape.outputs) for name, b in bases.items()}
        self.totals = {n: torch.zeros(size, dtype=torch.float64, device=device) for n, size in sizes.items()}

    def take(self, name: str, jacobian: Jacobian) -> None:
        self.totals[name] += self._bases[name].square_sums(jacobian)


def require_two_passes(la: Any, loader: Any, override: bool) -> None:
    """Refuse, before a fit, what a second pass over all data cannot follow.

    Raises:
        TypeError: the loader is an iterator.
        ValueError: the fit is to add to one whose data are not there; a basis of the model learns.
    """
    if isinstance(loader, Iterator):
        raise TypeError(
            "fit: with eigenvalue_correction=True the loader must be one that can be iterated twice, such as a DataLoader or a list of "
            f"batches, got the iterator {type(loader).__name__}: the second pass is in the eigenbasis of the first. Pass list(loader)."
        )
    if override is False and la.n_data and not la._loaders:
        raise ValueError(
            "fit(override=False): more data change the eigenbasis, in which eigenvalue_correction=True passes over all data again, and the "
            "loaders of the earlier data are not there: the fit was loaded or copied, or is a group's. Fit all data at once."
        )
    require_held(la, "fit")


def require_held(la: Any, where: str) -> None:
    """ValueError where a basis of sparsified layers requires a gradient, in which corrected eigenvalues have none."""
    if la.fitted_model.bases.learn():
        raise ValueError(
            f"{where}: eigenvalue_correction=True has no derivatives in the bases of sparsified layers, whose anchors or inverse_lengthscale "
            "require a gradient. Take the gradient by a KronLaplace without the correction, or requires_grad_(False)."
        )


def require_same_draws(la: Any) -> None:
    """ValueError where the model's copies are drawn anew in the second pass."""
    if augment_of(la.model) is not None and la.fitted_model.draws is None:
        raise ValueError(
            "fit: with eigenvalue_correction=True the copies of the data must be of the same draws in both passes, but the augmentation "
            "draws for each data point anew. Fit inside of model.augment.held(sampling='shared'), or make it with another sampling."
        )


@torch.no_grad()
def corrected_bases(
    la: Any,
    before: Sequence[Iterable[Any]],
    loader: Iterable[Any],
    progress_bar: bool = False,
    group: Any = None,
    generator: torch.Generator | None = None,
    hessian_at: Callable[[Inputs], Tensor] | None = None,
) -> dict[str, Eigenbasis]:
    """The eigenbases of a fit's factors with the curvature's own diagonal, from a pass over the data.

    Args:
        la: a :class:`ella_cuda.laplace.KronLaplace` with the factors of these data.
        before: loaders of the data that the fit has added to.
        loader: of the others; with a group, of this process' part.
        progress_bar, group, generator, hessian_at: as of the pass before.

    Raises:
        ValueError: the pass has another number of data points than the fit.
        FloatingPointError, ArithmeticError, torch.linalg.LinAlgError: a factor or a sum is not finite, or a factor has no eigenvalues.
    """
    shapes = {name: la.model.get_parameter(name).shape for name in la.parameter_names}
    if group is None:
        bases = eigenbases(la._factors, shapes)
        totals, seen = _pass_over(la, bases, [*before, loader], progress_bar, lambda _: generator, hessian_at)
    else:
        ranks = Ranks(group, "fit")
        bases = eigenbases(la._factors, shapes, partial(SecondMoment.bases_together, ranks=ranks))
        generator_of = seeded_together(la, generator, ranks)
        mine = [*(before if ranks.is_first else []), loader]

        def work() -> tuple[dict[str, Tensor], int, str | None]:
            found = _pass_over(la, bases, mine, progress_bar and ranks.is_first, generator_of, hessian_at)
            return *found, plan_of(la, loader, "fit")

        totals, seen, plan = ranks.together(work)
        headers = ranks.agree(plan=plan, seen=seen)
        require_one_plan(ranks, [one["plan"] for one in headers])
        seen = sum(one["seen"] for one in headers)
        for total in totals.values():
            ranks.sum_(total)
    if seen != la.n_data:
        raise ValueError(
            f"fit: with eigenvalue_correction=True the loader must yield the same data twice, got {la.n_data} data points and then {seen}; "
            "pass a loader that can be iterated again, such as a DataLoader."
        )
    finite = torch.stack([total.sum() for total in totals.values()]).isfinite().tolist()
    for name, fine in zip(totals, finite, strict=True):
        if not fine:
            raise FloatingPointError(
                f"fit: the curvature of {name!r} in its eigenbasis is not finite; check the data and the parameters, or use float64."
            )
    return {name: basis._replace(values=CorrectedEigenvalues(totals[name])) for name, basis in bases.items()}


def _pass_over(
    la: Any,
    bases: Mapping[str, Eigenbasis],
    loaders: Sequence[Iterable[Any]],
    progress_bar: bool,
    generator_of: Callable[[int], torch.Generator | None],
    hessian_at: Callable[[Inputs], Tensor] | None,
) -> tuple[dict[str, Tensor], int]:
    """The sums of squares, and the number of data points. ``generator_of`` gives the generator of a batch, by its number."""
    device, seen = la.fitted_model.device, 0
    sums = DiagonalInEigenbases(bases, device)
    shapes = {name: basis.shape for name, basis in bases.items()}
    run = JacobianPass(la.model, la.fitted_model.present_rules(), shapes, la.memory_budget)
    batches = tqdm(itertools.chain.from_iterable(loaders), desc="eigenvalues", disable=not progress_bar, leave=False)
    with la.fitted_model.filling(), run.running(), without_autocast(device.type):
        for number, batch in enumerate(batches):
            x, y = la.fitted_model.batch(batch, "fit")
            if not data_points(x):
                continue
            if not run.tried_out:
                run.try_out(x, several=la._several_columns)
            others, own = None if hessian_at is None else hessian_at(x), generator_of(number)

            def columns(outputs: Tensor, which: slice, y=y, others=others, own=own) -> Columns | Tensor:
                at = outputs if others is None else others[which].to(outputs.dtype)
                la.likelihood_function.check(outputs, y[which])
                return la._columns(at, y[which], own)

            run.run(x, columns, sums, each_alone=True)
            seen += data_points(x)
    return sums.totals, seen


# saved eigenbases -----------------------------------------------------------------------------------------------------


def save_bases(bases: Mapping[str, Eigenbasis]) -> dict[str, dict[str, Tensor | None]]:
    """By parameter, corrected eigenvalues and eigenvectors, copied; what two parameters share is copied once. The vectors are saved, for
    those that another machine finds may be others where eigenvalues are equal."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else copies.setdefault(id(tensor), tensor.clone())

    return {
        name: {"values": basis.values.values.clone(), "in": copied(basis.vectors_in), "out": copied(basis.vectors_out)}
        for name, basis in bases.items()
    }


def load_bases(
    la: Any, saved: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, FactorShape]
) -> dict[str, Eigenbasis]:
    """What :func:`save_bases` saved, for factors of these shapes; ValueError where it is of others."""
    if saved.keys() != shapes.keys():
        raise ValueError(f"load_state_dict: eigenbases are of other parameters than here: {', '.join(sorted(saved))}.")
    copies: dict[int, Tensor] = {}
    found = {}
    for name, shape in shapes.items():
        entry, parameter = saved[name], la.model.get_parameter(name)
        groups, a, b = shape.groups, shape.inputs, shape.outputs
        sizes = {"in": None if a == 1 else (groups, a, a), "out": (shape.output_groups, b, b)}
        vectors: dict[str, Tensor | None] = {"in": None}
        for side, size in sizes.items():
            if size is not None:
                given = checked_tensor(f"eigenbases[{name!r}][{side!r}]", entry[side], size)
                vectors[side] = copies.setdefault(id(given), given.to(parameter, copy=True))
        values = checked_tensor(f"eigenbases[{name!r}]['values']", entry["values"], (groups, a, b))
        values = CorrectedEigenvalues(values.to(parameter.device, torch.float64, copy=True))
        found[name] = Eigenbasis(shape, parameter.shape, values, vectors["in"], vectors["out"])
    return found

r"""Hypergradients of the Laplace evidence through the Kronecker factors, by minibatch; and the evidence in a graph, for small networks.

At the fit's A and B, :math:`d \log|c A \otimes B + \delta| = \langle C_A, dA\rangle + \langle C_B, dB\rangle`, where the cotangents C
are known from the eigendecompositions of A and B, which a fit has once. A and B are sums over data. So the gradient of the evidence at
fixed weights is a sum over batches, of

.. math::
    \log p(y | f) - \tfrac12 \sum_l \big( \langle C_A, A\rangle + \langle C_B, B\rangle \big)

with the batch's own A and B in the graph. Nothing differentiates an eigendecomposition, and no batch's A or B is formed: what is added
to them are rows a, and :math:`\langle C, a a^T\rangle = a^T C a`; patches of a convolution are not written out.

Source: Immer, van der Ouderaa et al., "Invariance learning in deep neural networks with differentiable Laplace approximations", NeurIPS
2022, appendix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.augment import AveragedFunction
from ella_cuda.distributed import Ranks
from ella_cuda.laplace.batches import (
    Inputs,
    data_points,
    inputs_on,
    map_tensors,
    model_outputs,
    plain_tensor,
    require_loader,
    run_model,
    shapes_of,
    take,
    tensors_of,
)
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.chains import Seen, chain_of_average
from ella_cuda.laplace.check_model import probe
from ella_cuda.laplace.copies import (
    Chunk,
    augment_of,
    chunks_of,
    copies_of,
    copies_together,
    fixed_draws,
    seeing,
    tried_copies,
    warn_of_all_copies,
)
from ella_cuda.laplace.distributed_fit import agree_on_gradient, plan_of
from ella_cuda.laplace.evidence import (
    DataFitGradient,
    data_weight,
    is_finer,
    require_likelihood_of_fit,
    resolved,
    square_distances,
)
from ella_cuda.laplace.factors import KroneckerFactor, by_parameter, merged_shapes
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.kronecker_sums import KroneckerSums, SummedCopies
from ella_cuda.laplace.layer_pass import GraphPass
from ella_cuda.laplace.likelihoods import Likelihood
from ella_cuda.laplace.parameters import Value, check_choice
from ella_cuda.laplace.per_example import PerExampleGradients
from ella_cuda.laplace.posterior import Eigenbasis
from ella_cuda.laplace.recorded_batches import Kind, Name, RecordedPasses, apart, tensors_of_model
from ella_cuda.laplace.rows import Rows
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.laplace.tangent import first_at_fault
from ella_cuda.laplace.test_time import at_test_time, in_plain_products, refusing_reentrant, requiring_grad
from ella_cuda.modes import exclusively
from ella_cuda.nn import SpatialBasis
from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import without_autocast

if TYPE_CHECKING:
    from ella_cuda.laplace.kron import KronLaplace
    from ella_cuda.laplace.rules.base import Rule

COLUMNS = ("all", "one")
GRAPH = 4  # what the graph of a column keeps, in units of the layers' outputs
COPIES = 8  # the part of the memory budget that copies of images take whose network has yet to run


def evidence_gradient(
    la: KronLaplace,
    loader: Iterable[Any],
    buffers: Sequence[str] | None = None,
    *,
    n_data: int | None = None,
    columns: str = "all",
    generator: torch.Generator | None = None,
    group: Any = None,
) -> dict[str, Tensor]:
    """The gradient of ``la.log_marginal_likelihood()`` in buffers of the network, such as the amounts of an augmentation, at the fit's
    weights and hyperparameters, with all that the factors depend on in it.

    Of a part of the data, both terms are the part's, times N over the part's number: of random parts, the average is the gradient. The
    network goes over each batch once, in parts of some data points, each with a graph of its own. Where ``la.memory_budget`` has no room
    for the copies of one, these go in chunks, several times, and memory does not grow with their number.

    The output Hessian is exact and whole: of a fit with ``fisher="mc"`` or a ``column_tolerance`` the gradient is not that of the sampled
    or kept columns alone.

    Args:
        la: fitted, at the network's present parameters and buffers.
        loader, group: as for :meth:`KronLaplace.fit`; a group's processes pass over batches of their own, and get the gradients of all.
        buffers: names in ``la.model.named_buffers()``, of leaves; None is those of the augmentation of an
            :class:`ella_cuda.augment.AveragedFunction`.
        n_data: how many data points are used, a random part of each batch; None is all.
        columns: "all" of the output Hessian's square root, or "one": their sum with random signs, which is right on average.
        generator: of parts and signs, of the CPU; None is torch's global one.

    Returns:
        The gradients, float64, by the buffers' names.

    Raises:
        RuntimeError: la is not fitted, or the network changed since.
        ValueError: a name is no buffer's of floating point numbers, or there are none; the loader gives no data; a weight has a
            factor merged with that of its transpose in another layer; a module draws random numbers in
            evaluation mode.
        NotImplementedError: torch has no second derivative of a layer, which the message names.
    """
    if group is None:
        sums = _summed_over(la, loader, buffers, n_data, columns, generator)
    else:
        ranks = Ranks(group, "evidence_gradient")

        def own() -> tuple[_GradientSums, str | None]:
            found = _summed_over(la, loader, buffers, n_data, columns, generator)
            return found, plan_of(la, loader, "evidence_gradient")

        sums, plan = ranks.together(own)
        shapes = {name: list(g.shape) for name, g in sums.gradients.items()}
        settings = {"buffers": shapes, "n_data": n_data, "columns": columns, "data points of the fit": la.n_data}
        agree_on_gradient(ranks, la, plan, **settings)
        count = data_weight(la).new_tensor([float(sums.seen)], dtype=torch.float64)
        flat = torch.cat([count, *(g.flatten() for g in sums.gradients.values())])
        ranks.sum_(flat)
        parts = flat[1:].split([g.numel() for g in sums.gradients.values()])
        summed = {n: p.view(g.shape) for p, (n, g) in zip(parts, sums.gradients.items(), strict=True)}
        sums = sums._replace(gradients=summed, seen=int(flat[0]))
    if not sums.seen:
        raise ValueError("evidence_gradient: the loader gave no data; pass one that can be iterated again.")
    with torch.inference_mode(False):
        found = {name: g * (la.n_data / sums.seen) for name, g in sums.gradients.items()}
        return {name: found[name] + sums.of_projections.get(id(buffer), 0) for name, buffer in sums.wanted.items()}


class _GradientSums(NamedTuple):
    """The buffers that are differentiated, the sums of their gradients over a pass' ``seen`` data points, by name, and the gradients of the
    factors' projections, by the buffers' ids, which are of all data."""

    wanted: dict[str, Tensor]
    gradients: dict[str, Tensor]
    seen: int
    of_projections: dict[int, Tensor]


def _summed_over(
    la: KronLaplace,
    loader: Iterable[Any],
    buffers: Sequence[str] | None,
    n_data: int | None,
    columns: str,
    generator: torch.Generator | None,
) -> _GradientSums:
    require_loader(loader, "evidence_gradient: loader")
    check_choice("evidence_gradient: columns", columns, COLUMNS)
    if n_data is not None:
        as_count("evidence_gradient: n_data", n_data)
    with torch.inference_mode(False), exclusively(la.model):
        wanted = _buffers(la.model, buffers)
        _require_products(la, "evidence_gradient")
        la.fitted_model.require_unchanged()
        require_likelihood_of_fit(la)
        run = _Passes(la, wanted, columns, generator)
        parameters = [p for p in la.model.parameters() if p.requires_grad]
        learnt = [b for b in wanted.values() if not b.requires_grad]
        fixed_draws(la.model)  # those of single data points begin as they began in the fit
        seen = passed = 0
        share = None if n_data is None or n_data >= la.n_data else n_data / la.n_data
        if share is not None:  # of every batch on average: what is due of all so far is rounded after a random start
            start = torch.rand((), generator=generator, dtype=torch.float64, device="cpu").item()
        with (
            at_test_time(la.model),
            requiring_grad(parameters, False),
            requiring_grad(learnt, True),
            run.hooks,
            without_autocast(data_weight(la).device.type),
        ):
            gradients = DataFitGradient(la.model)
            for batch in loader:
                x, y = la.fitted_model.batch(batch, "evidence_gradient")
                passed += data_points(x)
                if share is not None:
                    few = int(passed * share + start) - seen
                    some = torch.randperm(data_points(x), generator=generator)[:few].to(y.device)
                    x, y = take(x, some), y[some]
                try:
                    run.add(gradients, x, y)
                except RuntimeError as error:
                    _require_second_derivatives(la.model, take(x, slice(2)), error)
                    raise
                seen += data_points(x)
            run.recorded.finish()
            return _GradientSums(wanted, gradients.total(), seen, run.of_projections(gradients.bases))


def _require_second_derivatives(model: nn.Module, x: Inputs, error: RuntimeError) -> None:
    """NotImplementedError with the layer's name where torch's error is that a layer is differentiable once."""
    layer, its = first_at_fault(model, lambda: run_model(model, x), NotImplementedError())
    if its.args:
        raise NotImplementedError(
            f"evidence_gradient: {layer}: {its} ({error}), and the gradient of the curvature is a second derivative. Replace the layer's "
            "function, or learn no buffers in front of it."
        ) from error


def _require_products(la: KronLaplace, where: str) -> None:
    """ValueError where the curvature is no Kronecker product, whose derivatives are those of the factors."""
    if la.eigenvalue_correction:
        raise ValueError(
            f"{where}: la must be without eigenvalue_correction: corrected eigenvalues depend on the network through eigenvectors too, whose "
            "derivatives are not taken. Pass a KronLaplace without it."
        )


def _buffers(model: nn.Module, names: Sequence[str] | None) -> dict[str, Tensor]:
    known = dict(model.named_buffers())
    if names is None:
        augment = augment_of(model)
        names = [] if augment is None else [f"augment.{name}" for name, _ in augment.named_buffers()]
    if isinstance(names, str) or not names or not set(names) <= known.keys():
        raise ValueError(
            f"evidence_gradient: buffers must name buffers of the model ({', '.join(known) or 'it has none'}), got {names!r}."
        )
    for name in names:
        if not known[name].is_floating_point():
            raise ValueError(
                f"evidence_gradient: buffers must be of floating point numbers, got {name!r} of {known[name].dtype}."
            )
    return {name: known[name] for name in names}


def cotangents(basis: Eigenbasis, prior: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Roots R of the derivatives R R^T of ``sum log(scale l m + prior)`` in A and in B, ``(G, a, a)`` and ``(G or 1, b, b)``, float64; the
    prior's precision and the curvature's scale are 0-dim."""
    each = scale / basis.precisions(prior, scale)  # (G, a, b)
    of_inputs = (each * basis.values.outputs[:, None]).sum(2)  # (G, a)
    of_outputs = (each * basis.values.inputs[:, :, None]).sum(1)  # (G, b)
    if basis.values.outputs.shape[0] == 1:
        of_outputs = of_outputs.sum(0, keepdim=True)
    vectors_in = basis.vectors_in
    root_in = of_inputs.sqrt()[:, None] if vectors_in is None else vectors_in.double() * of_inputs.sqrt()[:, None]
    return root_in, basis.vectors_out.double() * of_outputs.sqrt()[:, None]


class Cotangent:
    """A constant symmetric matrix in a moment's place: the derivative :math:`R R^T` of the evidence in the moment.

    Args:
        root: R, ``(G, d, r)``, before it is expanded to a basis' positions.
        like: a tensor of the rows' dtype, on their device.
        name, basis: of the moment.
    """

    def __init__(self, root: Tensor, like: Tensor, name: str, basis: SpatialBasis | None) -> None:
        self.root, self.dtype, self.name, self.basis = root, like.dtype, name, basis
        if basis is not None:
            with torch.no_grad():
                psi = basis.matrix().double()
            parts = root.unflatten(1, (-1, psi.shape[0]))  # (G, d/A, A, r)
            root = torch.einsum("ax,gpar->gpxr", psi, parts).flatten(1, 2)
        self.matrix = self.total = root @ root.mT  # whose shape methods of rules read
        self._reduced = self.matrix.to(like.dtype)

    def tensors(self) -> list[Tensor]:
        """All that there is."""
        return [self.root, self.matrix, self._reduced]

    def of(self, dtype: torch.dtype) -> Tensor:
        """The matrix in a dtype."""
        return self._reduced if dtype == self.dtype else self.matrix


class EvidenceTerms(KroneckerSums):
    """The inner product of what calls add to factors with cotangents, in the calls' graph.

    Attributes:
        value: 0-dim, float64, since the last :meth:`taken`; None where there is nothing.
    """

    takes_samples = False

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    def add(self, factor: KroneckerFactor, side: str, rows: Rows, alpha: float = 1.0) -> None:
        cotangent = getattr(factor, f"{side}_moment")
        value = rows.quadratic(cotangent.of(rows.values.dtype)).double()
        value = value if alpha == 1 else alpha * value
        self.value = value if self.value is None else self.value + value

    def taken(self) -> Tensor | float:
        """The sum since the last call."""
        value, self.value = self.value, None
        return 0.0 if value is None else value


class _Passes:
    """The evidence of parts of batches, up to constants, in the graph."""

    def __init__(
        self, la: KronLaplace, wanted: Mapping[str, Tensor], columns: str, generator: torch.Generator | None
    ) -> None:
        self.la, self.columns, self.generator = la, columns, generator
        self.rules = la.fitted_model.present_rules()
        _require_served(self.rules)
        self._others = [rule for rule in self.rules if not rule.sees_calls()]
        self.per_example = PerExampleGradients(la.model, self._others) if self._others else None
        self._layers = [rule for rule in self.rules if rule not in self._others]
        self._allocate()
        self.terms = EvidenceTerms()
        self.run = GraphPass(la.model, self._layers, self.terms)
        self.hooks = ExitStack()  # entered by the caller; those of the pass come with what the trial finds
        self.chain = None
        if augment_of(la.model) is not None and all(name.startswith("augment.") for name in wanted):
            chain = chain_of_average(la.model)
            if chain is not None and [rule.module for rule in self.rules] == chain.layers:
                self.chain = chain
        self._weight = self._weight_of_statistic()
        self._image_bytes = 0
        self.seen: Callable[[Tensor, Tensor, bool], Tensor] = self._checked
        self.recorded = RecordedGradients(self)

    def _allocate(self) -> None:
        """Give the rules factors of cotangents, each parameter its own."""
        scale = data_weight(self.la)
        posterior = self.la._posterior(self.la.prior_precision.detach(), scale)
        for rule in self.rules:
            shapes = rule.shapes()
            rule.factors = {}
            for name in rule.trainable:
                if name in rule.tied:
                    owner, its_name = rule.tied[name]
                    rule.factors[name] = owner.factors[its_name]
                    continue
                full, shape, like = rule.full_name(name), shapes[name], rule.module.get_parameter(name)
                root_in, root_out = cotangents(posterior.bases[full], posterior.prior[full], scale)
                outputs = Cotangent(root_out, like, full, shape.output_basis)
                inputs = None
                if not shape.constant_input:
                    # Of A as a mean over all data.
                    root_in = root_in.expand(shape.groups, -1, -1) / math.sqrt(self.la.n_data)
                    inputs = Cotangent(root_in, like, full, shape.input_basis)
                rule.factors[name] = KroneckerFactor(shape, inputs, outputs)

    def _weight_of_statistic(self) -> Tensor:
        """The derivative of the log likelihood in the statistic of the data."""
        la = self.la
        with torch.enable_grad():
            statistic = la.statistic.detach().clone().requires_grad_()
            value = la.likelihood_function.log_likelihood(
                statistic / la.temperature, la.n_targets, la.sigma_noise.detach()
            )
            (weight,) = torch.autograd.grad(value, statistic)
        return weight

    def _graph_bytes(self) -> int:
        """The bytes of a data point's graph, with all copies."""
        columns = self.la.n_outputs if self.columns == "all" else 1
        return self._image_bytes * ((1 if self.chain else GRAPH) * columns + 4)

    def add(self, gradients: DataFitGradient, x: Inputs, y: Tensor) -> None:
        """Add the gradient of a batch's :meth:`value`, of as many data points, or copies of one, at a time as the budget has room for."""
        if not data_points(x):
            return
        if not self._image_bytes:
            self._try_out(x)
        self.recorded.add(gradients, x, y)

    def add_eagerly(self, gradients: DataFitGradient, x: Inputs, y: Tensor) -> None:
        """:meth:`add` as it is."""
        count = data_points(x)
        model, budget, graph, one = self.la.model, self.la.memory_budget, self._graph_bytes(), take(x, slice(1))
        warn_of_all_copies(model, one, budget, graph, "evidence_gradient")
        most, step = copies_together(model, one, budget, graph), max(budget // graph, 1)
        if most < copies_of(model):
            for some in _evenly(count, 1):
                chunks = chunks_of(take(x, some), most)
                if self.chain is None:
                    self._by_chunks(gradients, chunks, y[some])
                else:
                    self._along_chain(gradients, [few for few, _ in chunks], y[some])
        elif self.chain is None:
            for some in _evenly(count, step):
                gradients.add(lambda some=some: self.value(take(x, some), y[some]))
        else:
            # Matrices of transformations, and their graph, are many small numbers: made for more data points than go together later.
            size = copies_of(model) * one[0].numel() * one[0].element_size()
            for some in _evenly(count, max(budget // (COPIES * size), step)):
                self._of_copies(gradients, take(x, some), y[some], step)

    def _try_out(self, x: Inputs) -> None:
        x, copies = tried_copies(self.la.model, x)
        own = {id(p): p for rule in self.rules for name, p in rule.parameters().items() if name in rule.trainable}
        with requiring_grad(list(own.values()), True):  # as in training
            found = probe(self.la.model, self._layers, x, several=False, copies=copies)
            for rule in self._layers:
                rule.outside = found.outside.get(rule, frozenset())
            if found.shared or found.outside:
                self.per_example = PerExampleGradients(self.la.model, self._others, found)
            if self.per_example is not None:
                with in_plain_products():
                    self.per_example.try_out(x)
        self.run.findings = found
        self.hooks.enter_context(self.run.layers())
        self._image_bytes = max(found.image_bytes * copies_of(self.la.model) // copies, 1)

    def value(self, x: Inputs, y: Tensor) -> Tensor:
        """The log likelihood of some data points, and minus a half of the cotangents' products with their part of the factors."""
        with in_plain_products():
            outputs = self.run.forward(x)
            back = self._columns_of(outputs, y)
            self.run.hand_on(self.run.gradients(outputs, back, keep=True))
        self._add_per_example(self._of_single_points(x, back, keep=True))
        self.run.forget()
        return self._total(outputs, y)

    def _of_single_points(self, x: Inputs, back: Tensor, keep: bool) -> dict[str, Tensor]:
        """The gradients that no layer's rule takes, in the graph if ``keep``."""
        with in_plain_products():
            return {} if self.per_example is None else self.per_example.gradients(x, back, keep, at_outputs=True)

    def _add_per_example(self, found: Mapping[str, Tensor]) -> None:
        if self.per_example is not None:
            self.per_example.begin(self.terms, next(iter(found.values())).shape[1])
            self.per_example.hand_on(self.terms, found, data_too=True)

    def _by_chunks(self, gradients: DataFitGradient, chunks: Sequence[Chunk], y: Tensor) -> None:
        """Add the gradient of :meth:`value`, a function of sums over copies: the averaged outputs, and what rules get of a layer's call. The
        sums come first, of one chunk after the other, without a graph; then the value's derivatives in them; then each chunk's sums times
        these, in the chunk's graph. Columns depend on all chunks' outputs, so what comes of them goes back through every chunk once more."""
        model = self.la.model
        with torch.no_grad():
            f = sum(share * model_outputs(model, x) for x, share in chunks)
        f.requires_grad_()
        with torch.enable_grad():
            columns = self._columns_of(f, y)
            back, sums = columns.detach(), []
            for x, share in chunks:
                _, calls, alone = self._of_chunk(x, share, back, keep=False)
                own = [t.detach() for t in (*calls.tensors(), *alone.values())]
                sums = own if not sums else [a + b for a, b in zip(sums, own, strict=True)]
        leaves = [t.requires_grad_() for t in sums]
        remaining = iter(leaves)
        calls.put(remaining)
        alone = dict(zip(alone, remaining, strict=True))

        def of_sums() -> Tensor:
            calls.add()
            self._add_per_example(alone)
            return self._total(f, y)

        *slopes, of_outputs = gradients.add(of_sums, [*leaves, f])  # rows of some rules depend on buffers beside
        of_columns = torch.zeros_like(back)
        for x, share in chunks:
            leaf = back.clone().requires_grad_()

            def value(x: Inputs = x, share: float = share, leaf: Tensor = leaf) -> Tensor:
                outputs, calls, alone = self._of_chunk(x, share, leaf, keep=True)
                pairs = zip(slopes, (*calls.tensors(), *alone.values()), strict=True)
                products = [(slope * part).sum() for slope, part in pairs if slope is not None]
                return sum(products, share * (outputs * of_outputs).sum())

            (found,) = gradients.add(value, [leaf])
            of_columns += 0 if found is None else found
        if columns.requires_grad:
            (further,) = torch.autograd.grad(columns, f, of_columns)
            for x, share in chunks:
                gradients.add(lambda x=x, share=share: share * (run_model(model, x) * further).sum())

    def _of_chunk(
        self, x: Inputs, share: float, back: Tensor, keep: bool
    ) -> tuple[Tensor, SummedCopies, dict[str, Tensor]]:
        """The outputs of some copies, the rows of layers' calls over copies, and gradients of single data points, in the graph if ``keep``;
        all but the outputs count as their share in all copies says."""
        calls, run = SummedCopies(self.terms), self.run
        calls.chunk(share)
        run.consumer, run.copies = calls, x[1].shape[1]
        try:
            with seeing(self._layers, run.copies), in_plain_products():
                outputs = run.forward(x)
                run.hand_on(run.gradients(outputs, back * share, keep))
        finally:
            run.consumer, run.copies = self.terms, copies_of(self.la.model)
        run.forget()
        return outputs, calls, self._of_single_points(x, back * share, keep)

    def _total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The log likelihood at these outputs, with what was added to the factors."""
        y = self.seen(outputs, y, False)
        return self._weight * self.la.likelihood_function.statistic(outputs, y) - 0.5 * self.terms.taken()

    def _checked(self, outputs: Tensor, y: Tensor, first: bool) -> Tensor:
        """Targets, where they are ``first`` seen with these outputs; raises as the likelihood's ``check``."""
        if first:
            with torch.no_grad():
                self.la.likelihood_function.check(outputs, y)
        return y

    def tensors(self) -> dict[Name, Tensor]:
        """What a pass finds there beside its batch, by name."""
        factors = [factor for rule in self.rules for factor in rule.factors.values()]
        sides = [side for f in factors for side in (f.input_moment, f.output_moment) if side is not None]
        found = tensors_of_model(self.la.model) | {("weight", ""): self._weight}
        return found | {("cotangent", n): t for n, t in enumerate(t for side in sides for t in side.tensors())}

    def forget(self) -> None:
        """Drop what a pass that was left has kept."""
        self.seen = self._checked
        self.run.forget()
        self.terms.begin()
        self.terms.taken()

    def _columns_of(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The output Hessian's square root, in the outputs' graph."""
        likelihood, y = self.la.likelihood_function, self.seen(outputs, y, True)
        if self.columns == "all":
            return likelihood.columns(outputs, y)[:]
        return Likelihood.sampled_column(likelihood, outputs, y, self.generator)

    def _of_copies(self, gradients: DataFitGradient, x: Inputs, y: Tensor, step: int) -> None:
        """Add the gradient of :meth:`value`, by that in the copies of so many data points at a time."""
        with torch.enable_grad():
            copies = self.la.model.copies(*x)
        parts = [
            found
            for some in _evenly(len(y), step)
            for found in self._in_copies([lambda some=some: copies.detach()[some]], y[some])
        ]
        gradients.add(lambda: (copies * torch.cat(parts)).sum())

    def _along_chain(self, gradients: DataFitGradient, chunks: Sequence[Inputs], y: Tensor) -> None:
        """Add the gradient of :meth:`value`, by that in a chunk of copies after the other."""
        model = self.la.model
        found = self._in_copies([lambda x=x: model.copies(*x) for x in chunks], y)
        for x, gradient in zip(chunks, found, strict=True):
            gradients.add(lambda x=x, gradient=gradient: (model.copies(*x) * gradient).sum())

    def _in_copies(self, chunks: Sequence[Callable[[], Tensor]], y: Tensor) -> Iterator[Tensor]:
        """The gradient of :meth:`value` in each chunk of copies."""

        def derivatives(seen: Seen, outputs: Tensor) -> tuple[Seen, Tensor]:
            with torch.enable_grad():
                leaves = [t.requires_grad_() for part in seen for t in part]
                self.terms.begin()
                calls = [Call(rule) for rule in self._layers]
                for call, a in zip(calls, seen.inputs, strict=True):
                    self.terms.forward(call, [a])
                self.terms.close()
                for call, g in zip(calls, seen.gradients, strict=True):
                    self.terms.backward(call, g, False)
                found = torch.autograd.grad(self._total(outputs, y), [*leaves, outputs], allow_unused=True)
            found = [torch.zeros_like(t) if d is None else d for t, d in zip([*leaves, outputs], found, strict=True)]
            count = len(seen.inputs)
            return Seen(found[:count], found[count:-1]), found[-1]

        return self.chain.gradient(chunks, lambda outputs: self._columns_of(outputs, y), derivatives)

    def of_projections(self, bases: Sequence[SpatialBasis]) -> dict[int, Tensor]:
        """The part of the gradient in bases that the factors' projections have, rows held: of all the fit's data, by the buffers' ids."""
        learnt = [b for basis in bases for b in basis.buffers(recurse=False) if b.requires_grad]
        if not learnt:
            return {}
        terms = []
        with torch.enable_grad():
            for rule in self.rules:
                for name, factor in rule.factors.items():
                    fitted = self.la.factors[rule.full_name(name)]
                    for mine, theirs in (
                        (factor.input_moment, fitted.input_moment),
                        (factor.output_moment, fitted.output_moment),
                    ):
                        if mine is not None and mine.basis is not None and mine.basis.learns():
                            terms.append(-0.5 * (theirs.projected() * (mine.root @ mine.root.mT)).sum())
            found = torch.autograd.grad(torch.stack(terms).sum(), learnt, allow_unused=True) if terms else []
        return {id(b): g.double() for b, g in zip(learnt, found, strict=False) if g is not None}


class RecordedGradients(RecordedPasses):
    """The gradients of one pass' batches, as they are or recorded."""

    def __init__(self, passes: _Passes) -> None:
        la = passes.la
        likelihood = la.likelihood_function
        how = [(rule.approximation, rule.resolution) for rule in passes.rules]
        settings = "evidence gradient", passes.columns, la.temperature, repr(how), la.memory_budget
        super().__init__(passes.run, passes.rules, settings, likelihood)
        self._passes, self._likelihood = passes, likelihood
        self._fine: Tensor | None = None

    def add(self, gradients: DataFitGradient, x: Inputs, y: Tensor) -> None:
        """Add a batch's gradient."""
        drawn = None if self._passes.generator is None else self._passes.generator.device
        wanted = [name for name, b in self._passes.la.model.named_buffers() if b.requires_grad]
        state = drawn, tuple(wanted), *(sum_ is None for sum_ in gradients.sums)
        sums = [sum_ for sum_ in gradients.sums if sum_ is not None]
        key, passes = self._key(x, [y, *sums], *state), self._passes
        kind = None if key is None else self._kind(key)
        if kind is not None:
            if self._is_due(kind, y.device):
                self._record(kind, gradients, x, y)
            if kind.tape is not None:
                inputs, given = [*tensors_of(x), y, *sums], self._of_pass(kind, passes.tensors)
                if self._is_the_network(kind, inputs, given, lambda: [self._own(x)]):
                    outputs, fine, *found = self._outputs(kind, inputs, given, passes.generator)
                    self._require_fit(kind, outputs, fine, y)
                    there = iter([t.clone() for t in found] if kind in self._graphs else found)
                    gradients.sums = [next(there) if is_there else None for is_there in kind.has_sums]
                    return
        passes.add_eagerly(gradients, x, y)

    def finish(self) -> None:
        """ValueError where targets of recorded batches do not fit the likelihood. Waits for the device."""
        if self._fine is not None and not self._fine:
            raise ValueError("evidence_gradient: the data have targets that do not fit the likelihood.")

    def _own(self, x: Inputs) -> Tensor:
        """The outputs of the network itself."""
        return model_outputs(self._passes.la.model, map_tensors(x, Tensor.clone))

    def _require_fit(self, kind: Kind, outputs: Tensor, fine: Tensor, y: Tensor) -> None:
        if kind in self._graphs:
            self._fine = fine.clone() if self._fine is None else self._fine.logical_and_(fine)
        elif not fine:
            self._likelihood.check(outputs, y)

    def _record(self, kind: Kind, gradients: DataFitGradient, x: Inputs, y: Tensor) -> None:
        passes, fine, outputs = self._passes, [], []
        x, y, sums = map_tensors(x, apart), apart(y), [s if s is None else apart(s) for s in gradients.sums]

        def seen(of: Tensor, targets: Tensor, first: bool) -> Tensor:
            targets, fit = self._likelihood.admitted(of.detach(), targets)
            if first:
                fine.append(fit)
                outputs.append(of.detach())
            return targets

        def function() -> list[Tensor]:
            gradients.sums = [*sums]
            passes.add_eagerly(gradients, x, y)
            kind.has_sums = [sum_ is not None for sum_ in gradients.sums]
            found = [sum_ for sum_ in gradients.sums if sum_ is not None]
            with torch.no_grad():
                return [torch.cat(outputs), torch.stack(fine).all(), *found]

        before, passes.seen = gradients.sums, seen
        inputs = [*tensors_of(x), y, *(s for s in sums if s is not None)]
        try:
            tensors = passes.tensors
            kind.tape = self._taped(kind, function, inputs, tensors, tensors().values(), [0], passes.generator)
        except Exception as error:  # whatever a mode makes a model raise: the batch runs as it is, with its own errors
            kind.refused = f"{type(error).__name__}: {error}"
        finally:
            gradients.sums = before
            passes.forget()


def _evenly(count: int, most: int) -> Iterator[slice]:
    """Slices of about one size, none of more."""
    step = -(-count // -(-count // most))
    for begin in range(0, count, step):
        yield slice(begin, begin + step)


def _require_served(rules: Sequence[Rule]) -> None:
    """ValueError where a factor is not a sum of what calls add to it."""
    merged = merged_shapes(rules)
    if merged:
        raise ValueError(
            f"evidence_gradient: {next(iter(merged))!r} is the weight of one layer and its transpose that of another, whose factors are "
            "merged; freeze it."
        )


# the evidence with its curvature inside the graph, for small networks ----------------------------------------------------


class _GraphMoment(SecondMoment):
    """A second moment whose total is in a graph."""

    def _learns(self) -> bool:
        return True


class _GraphSums(KroneckerSums):
    """Adds both sides to factors, in the graph of the rows."""

    takes_samples = False

    def add(self, factor: KroneckerFactor, side: str, rows: Rows, alpha: float = 1.0) -> None:
        moment = getattr(factor, f"{side}_moment")
        products = rows.products(moment.total.shape[0])
        if products is None:
            rows.gram_(moment, alpha)
            return
        moment.total = moment.total + alpha * products
        moment.count(rows.count)


def exact_log_marginal_likelihood(
    la: KronLaplace, x: Inputs, y: Tensor, prior_precision: Value | None = None, sigma_noise: Value | None = None
) -> Tensor:
    """The evidence of :meth:`KronLaplace.log_marginal_likelihood` on one batch, with everything that depends on the network inside
    the graph.

    The same number as ``la.fit([(x, y)]).log_marginal_likelihood()``. That one is differentiable in the network's hyperparameters (its
    buffers) with the unprojected factors held; this one also through the factors, by double backward: outputs, their Hessian, the
    activations and the gradients that the factors are made of. Memory grows with the number of outputs times all activations: for
    small networks, and to see what holding the factors costs. The model's parameters are constants.

    Args:
        la: of the model; neither needs a fit nor changes. Its ``resolution`` and ``approximation`` are followed, its column tolerance and
            ``fisher`` are not: all columns are used.
        x: ``(N, ...)``, all data; moved to the model's device, as ``la.fit`` does. A tuple, list or mapping has the model's arguments.
        y: targets, as for ``la.fit``, moved likewise.
        prior_precision: a number, or one value per parameter tensor; None is la's.
        sigma_noise: None is la's.

    Returns:
        0-dim float64, differentiable in the model's buffers that require a gradient and in the two hyperparameters.

    Raises:
        TypeError: la is no :class:`KronLaplace`, x or y no tensor, or y of a wrong dtype.
        ValueError: no data, an x that the model cannot be evaluated at, targets that do not fit, a layer that was never called, parameters
            without a rule, or a model that calls :func:`torch.utils.checkpoint.checkpoint`.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4; Immer et al., "Invariance learning in deep neural networks with
    differentiable Laplace approximations", NeurIPS 2022 (gradients through the curvature).
    """
    if not hasattr(type(la), "factors"):
        raise TypeError(
            f"exact_log_marginal_likelihood: la must be a KronLaplace, got {type(la).__name__}; pass KronLaplace(model), fitted or not."
        )
    _require_products(la, "exact_log_marginal_likelihood")
    device = next(iter(la.fitted_model.present_parameters().values())).device
    x = inputs_on(x, device, "exact_log_marginal_likelihood")
    if not isinstance(y, Tensor):
        raise TypeError(
            f"exact_log_marginal_likelihood: y must be a tensor with all data along its first axis, got {type(y).__name__}; concatenate a "
            "loader's batches with torch.cat."
        )
    if isinstance(la.model, AveragedFunction):
        raise ValueError(
            "exact_log_marginal_likelihood: an AveragedFunction's factors are those of means over copies; use KronLaplace.fit, and "
            "ella_cuda.laplace.evidence_gradient for gradients in its amounts."
        )
    precision, sigma = (value.to(device) for value in resolved(la, prior_precision, sigma_noise))
    if is_finer(la, precision):
        raise ValueError(
            "exact_log_marginal_likelihood: prior_precision must be a number or one per parameter tensor, got one per output unit; "
            "evidence_gradient takes those."
        )
    rules = la.fitted_model.present_rules()
    for rule in rules:
        if not rule.sees_calls():
            raise ValueError(
                f"exact_log_marginal_likelihood: {rule.label} has no rule of its own; use KronLaplace.fit, or freeze its parameters."
            )
        rule.allocate(_GraphMoment)
    if not data_points(x):
        raise ValueError(
            f"exact_log_marginal_likelihood: x has no data points; it must have shape (N, ...), got {shapes_of(x)}."
        )
    y = plain_tensor(y).to(device)
    with exclusively(la.model), without_autocast(precision.device.type):
        return _evidence(la, rules, x, y, precision, sigma)


def _evidence(la: KronLaplace, rules: list[Rule], x: Inputs, y: Tensor, precision: Tensor, sigma: Tensor) -> Tensor:
    """The evidence at checked arguments."""
    dtype = next(p for p in la.model.parameters() if p.requires_grad).dtype
    likelihood, run = la.likelihood_function, GraphPass(la.model, rules, _GraphSums())
    parameters = [p for p in la.model.parameters() if p.requires_grad]
    with at_test_time(la.model):
        with _in_words(x, dtype):
            run.findings = found = probe(la.model, rules, x, several=False)
            if found.shared or found.outside:
                rule = next(iter(found.shared or found.outside))
                raise ValueError(
                    f"exact_log_marginal_likelihood: {rule.label} has parameters that are used outside of calls of single data points; use "
                    "KronLaplace.fit, or freeze them."
                )
        with hooks(la.model.modules(), before=_require_no_checkpoint), requiring_grad(parameters, False), run.layers():
            with _in_words(x, dtype), torch.enable_grad():
                outputs = run.forward(x)
            for rule in rules:
                if all(noted.call.rule is not rule for noted in run.noted):
                    raise ValueError(
                        f"{rule.label} has trainable parameters but was never called; freeze it with requires_grad_(False) if the model "
                        "does not use it."
                    )
            with torch.no_grad():
                likelihood.check(outputs, y)
            gradients = run.gradients(outputs, likelihood.columns(outputs, y)[:], keep=True)
    with torch.enable_grad(), _in_words(x, dtype):
        run.hand_on(gradients)
    for factor in (f for rule in rules for f in rule.factors.values()):
        factor.n_data = data_points(x)
    factors = by_parameter(rules)
    statistic = likelihood.statistic(outputs, y)
    statistic = statistic if la.temperature == 1 else statistic / la.temperature
    total = likelihood.log_likelihood(statistic, y.numel(), sigma)
    norms = square_distances(la, la.fitted_model.parameters())
    for name, delta, norm in zip(la.parameter_names, precision.unbind(), norms.unbind(), strict=True):
        factor, size = factors[name], la.model.get_parameter(name).numel()
        log_det_ratio = factor.logdet(delta, sigma**-2 / la.temperature) - size * delta.log()
        total = total - 0.5 * (log_det_ratio + delta * norm)
    return total


def _require_no_checkpoint(*_: Any) -> None:
    """ValueError inside of a checkpoint, which would compute a layer anew for a gradient that is taken when no layer is seen any more."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise ValueError(
            "exact_log_marginal_likelihood: the model calls torch.utils.checkpoint, which computes layers anew; call it without."
        )


@contextmanager
def _in_words(x: Inputs, dtype: torch.dtype) -> Iterator[None]:
    """Have torch's own errors, which name no argument, say what was done."""
    try:
        with refusing_reentrant("exact_log_marginal_likelihood"):
            yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        dtypes = ", ".join(str(tensor.dtype) for tensor in tensors_of(x))
        raise ValueError(
            f"exact_log_marginal_likelihood: the model cannot be evaluated at x of shape {shapes_of(x)}, {dtypes}; pass what the "
            f"model takes, all data along the first axis (the parameters are {dtype}). It failed with: {error}"
        ) from error

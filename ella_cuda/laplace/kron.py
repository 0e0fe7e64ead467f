"""The Laplace approximation with Kronecker factors: fit, evidence, effective parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.laplace.base import BaseLaplace, LaplaceOptions
from ella_cuda.laplace.batches import Inputs, data_points, inputs_on, merged, model_outputs, run_model
from ella_cuda.laplace.copies import Chunk, with_draws
from ella_cuda.laplace.curvature import CurvaturePass, curvature_pass
from ella_cuda.laplace.distributed_fit import FitSums
from ella_cuda.laplace.eigenvalue_correction import (
    corrected_bases,
    load_bases,
    require_held,
    require_same_draws,
    require_two_passes,
    save_bases,
)
from ella_cuda.laplace.evidence import DataFitGradient, elements, is_finer
from ella_cuda.laplace.factors import (
    FactorShape,
    KroneckerFactor,
    by_parameter,
    checked_tensor,
    load_factors,
    merged_shapes,
    save_factors,
)
from ella_cuda.laplace.likelihoods import Columns, Likelihood, hessian_sum
from ella_cuda.laplace.memory import peak_bytes, require_memory, telling_needs
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.laplace.posterior import Eigenbasis, KronPosterior, Spectra, eigenbases_of
from ella_cuda.laplace.recorded_batches import NotTheNetwork, RecordedBatches, can_be_again, states
from ella_cuda.laplace.rules.base import APPROXIMATIONS, RESOLUTIONS, Rule
from ella_cuda.laplace.rules.linear import LinearRule
from ella_cuda.laplace.second_moment import SecondMoment, zeros_together
from ella_cuda.laplace.test_time import requiring_grad
from ella_cuda.laplace.unit_priors import (
    Side,
    UnitPosterior,
    normalised,
    sides_of,
    unit_evidence,
    unit_shapes,
    whitened,
)
from ella_cuda.modes import running_the_model
from ella_cuda.ops._precision import without_autocast

FISHERS = ("exact", "mc")
HEAD = ("parameter", "shape", "rule", "input side", "output side", "bytes", "block")


class KronLaplace(BaseLaplace):
    r"""Laplace approximation of a network's posterior with block-Kronecker curvature.

    Every parameter tensor is a block of its own, with a prior precision of its own. Names follow laplace-torch. ``fit``
    streams once over the data, or twice; the evidence

    .. math::
        \log q(D \mid \delta) = \log p(D \mid \theta)
        - \tfrac12 \sum_l \big( \delta_l \|\theta_l\|^2 + \log|H_l + \delta_l I| - P_l \log \delta_l \big)

    is then a differentiable function of the precisions (and of a Gaussian likelihood's sigma), from eigenvalues
    computed once per fit. Curvature is that of the network in evaluation mode, the generalised Gauss-Newton matrix with
    the sum over the data; conventions per layer are in the rules' docstrings. Biases get their exact GGN block, where
    laplace-torch uses the weight's output factor.

    Hyperparameters that act inside the network, such as the anchors and inverse lengthscales of
    :class:`ella_cuda.nn.SpatialBasis`, are buffers of the model. Those that require a gradient when ``fit`` is called
    can be differentiated: the data fit through the network, the log determinants through the projection of the factors,
    which are held as they were fitted. :func:`ella_cuda.laplace.exact_log_marginal_likelihood` holds nothing.

    Args:
        model: ``(N, ...) -> (N, K)``, or ``(N, ..., K)`` for outputs at several positions, float32 or float64; its layers' outputs have the
            batch in front, or second where a layer's rule allows for it, as ``nn.Linear``'s does. Parameters that do not require a gradient
            are constants. Layers may be called several times in a forward pass, and share weights: see
            :mod:`ella_cuda.laplace.kronecker_sums` and :func:`ella_cuda.laplace.factors.by_parameter`.
        likelihood: "classification" (softmax over the outputs' last axis, integer labels of the other axes' shape), "regression" (Gaussian),
            "binary" (logits, targets 0 or 1), "poisson" (log rates, counts), each with targets of the outputs' shape, "heteroscedastic"
            (Gaussians by natural parameters, outputs ``(N, 2K)``, targets ``(N, K)``), "reward_modeling" (which of two rewards is the
            better, outputs ``(N, 2)``, integer targets ``(N,)``), a name of :func:`register_likelihood`, or an object
            of a class with such a name. The log probability of a data point is the sum over its targets.
        prior_precision: a positive number, or one per trainable parameter tensor in ``model.named_parameters()`` order, or one per output
            unit of these, see ``unit_precisions``.
        sigma_noise: standard deviation of the Gaussian likelihood of a regression; must be 1 for others.
        prior_mean: of the parameters, a number or one per element, ``(P,)``.
        temperature: T, positive: likelihood and curvature are divided by it, so that a smaller one concentrates the posterior.
        fisher: "exact", or "mc": random columns in the place of the output Hessian's, unbiased; one is K-1 times cheaper.
        mc_samples: random columns of a data point with ``fisher="mc"``, whose outer products are averaged.
        resolution: "shared" (the paper): one output-side factor for all channels of an F-FC weight; "per_channel": one
            per channel, with which each channel's own part of the block is exact for a single data point.
        approximation: what is done about positions that share weights, such as those of a convolution or a sequence: "expand" sums over
            them as if they were data points, "reduce" takes the outer products of each data point's mean input and summed gradient. The
            first is exact for deep linear networks whose positions have losses of their own, the second for those that average or sum
            positions before the loss; it multiplies fewer rows. Biases and norms have the same, exact blocks in both.
        memory_budget: bytes that the layers' outputs of images that go through the network together may take (or half of the factors, if
            that is more), and the batched gradients of one backward pass. Batches, columns and an
            :class:`ella_cuda.augment.AveragedFunction`'s copies are split accordingly. None is 64 MiB on the CPU and 2 GiB elsewhere. The
            result does not depend on it beyond rounding, but for the draws of ``fisher="mc"``, which are those of the parts.
        column_tolerance: with ``fisher="exact"``, the relative trace of the output Hessian, summed over images that go through the network
            together, that may be dropped to save columns, least first; 0 is exact. Trained networks need a few of the K-1 columns for 99 %.
            A regression's columns are all of one size, so that none is dropped.
        subset_of_weights: the parameters that have a posterior, as if the others did not require a gradient: "all", "last_layer", or names
            of parameters or of modules with all parameters inside. The last layer is the last module of ``model.named_modules()`` that has
            trainable parameters; its output must be the model's.
        dict_key_x, dict_key_y: keys of batches that are mappings, see :meth:`fit`.
        ignore_index: the label of positions that have no part in a classification's likelihood and Hessian. Their inputs still are among
            those that the input sides of factors are sums over.
        unknown: what becomes of parameters that no rule knows and that have several axes longer than one, such as position embeddings:
            "diagonal" gives them the exact diagonal of their block, from gradients of single data points; "error" does so where they are
            at most a tenth of the trainable numbers, and refuses more; "freeze" takes them for constants, those beside them in a module, and
            layers that a rule refuses. Others, such as FixUp's scales, layer scales and class tokens, get their exact blocks.
        eigenvalue_correction: whether the curvature's own diagonal in the eigenbasis of each parameter's factors takes the place of the
            Kronecker product's eigenvalues (EKFAC): traces are those of the generalised Gauss-Newton matrix. :meth:`fit` then passes over the
            data twice, and as many float64 numbers as there are parameters are kept, with the eigenvectors; see
            :mod:`ella_cuda.laplace.eigenvalue_correction`.
        enable_backprop: whether predictions have gradients in inputs that require one: then by Jacobians ``(N, K, P)`` of
            :mod:`torch.func`, which need memory. The posterior is held.
        options: what the signature does not have, with the defaults of :class:`ella_cuda.laplace.base.LaplaceOptions`.

    Attributes:
        parameter_names: of the trainable tensors, in ``model.named_parameters()`` order; precisions and factors are in that order.
        n_params: entries of these tensors together.
        n_data: data points that ``fit`` saw; 0 before.
        n_outputs: entries of a data point's outputs, of the last batch; 0 before ``fit``.
        likelihood_function: the :class:`Likelihood`.

    Raises:
        TypeError: model is no module, or layers have trainable parameters without a rule; one message names them,
            ``unknown`` and ``ella_cuda.laplace.register``.
        ValueError: an argument out of range, a parameter of several layers whose factors do not fit, no trainable parameter.
        RuntimeError: a parameter was made in ``torch.inference_mode()``.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021; van
    der Ouderaa et al., NeurIPS 2023, section 4 (factored layers).
    """

    _records_steps = True
    _finer_word = "output unit"
    _settings = ("fisher", "resolution", "unknown", "subset_of_weights", "approximation", "eigenvalue_correction")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        fisher: str = "exact",
        mc_samples: int = 1,
        resolution: str = "shared",
        approximation: str = "expand",
        column_tolerance: float = 0.0,
        eigenvalue_correction: bool = False,
        **options: Any,
    ) -> None:
        self.fisher, self.resolution, self.approximation = (
            check_choice("fisher", fisher, FISHERS),
            check_choice("resolution", resolution, RESOLUTIONS),
            check_choice("approximation", approximation, APPROXIMATIONS),
        )
        if type(mc_samples) is not int or mc_samples < 1 or (mc_samples > 1 and fisher != "mc"):
            raise ValueError(
                f'mc_samples must be a positive int, 1 but for fisher="mc", got {mc_samples!r} with {fisher=}.'
            )
        if not 0 <= column_tolerance < 1:
            raise ValueError(f"column_tolerance must be in [0, 1), got {column_tolerance!r}.")
        if not isinstance(eigenvalue_correction, bool):
            raise TypeError(f"eigenvalue_correction must be a bool, got {eigenvalue_correction!r}.")
        self.column_tolerance, self.eigenvalue_correction = column_tolerance, eigenvalue_correction
        self.mc_samples, self._several_columns = mc_samples, fisher == "exact" or mc_samples > 1
        self._recorded: dict[str, str] = {}
        super().__init__(model, likelihood, LaplaceOptions(**options), self.resolution, self.approximation)
        self._hold()

    def _described(self) -> str:
        approximation = "" if self.approximation == "expand" else f", approximation={self.approximation!r}"
        approximation += ", eigenvalue_correction=True" if self.eigenvalue_correction else ""
        return (
            f"fisher={self.fisher!r}, resolution={self.resolution!r}{approximation}: {len(self.parameter_names)} parameter tensors of "
            f"{self.n_params} entries"
        )

    def _hold(self) -> None:
        for factor in (f for rule in self._rules for f in rule.factors.values()):
            factor.n_data = self.n_data
        self._factors = self._by_name(self._rules) if self.n_data else {}
        self._spectra = Spectra(self._factors.values())
        self._eigenbases: dict[str, Eigenbasis] | None = None
        self._sides: list[Side] | None = None
        self._whitened: tuple[Tensor, dict[str, Eigenbasis]] | None = None

    @functools.cached_property
    def _units(self) -> dict[str, FactorShape]:
        """The shapes whose units have precisions, by parameter name."""
        return unit_shapes(self._rules, self.parameter_names)

    @property
    def _unit_counts(self) -> list[int]:
        """ValueError with ``eigenvalue_correction``, whose blocks are of no Kronecker product."""
        if self.eigenvalue_correction:
            raise ValueError(
                "KronLaplace: prior_structure='unit' needs Kronecker products; pass eigenvalue_correction=False, or use 'layerwise'."
            )
        return [shape.unit_count for shape in self._units.values()]

    @property
    def _finer_counts(self) -> list[int] | None:
        return None if self.eigenvalue_correction else self._unit_counts

    def _of_elements(self, precision: Tensor) -> Tensor:
        parts = zip(self._units.values(), precision.split(self._unit_counts), strict=True)
        return torch.cat([shape.of_elements(part) for shape, part in parts])

    def _weigh_elements(self) -> None:
        self.element_norms = None
        if is_finer(self, self.prior_precision):
            self.element_norms = self._norms_of_finer()

    def _norms_of_finer(self) -> Tensor:
        """Those at the fit, of the model's parameters, which must be as they were unless the norms were taken."""
        if self.element_norms is None:
            self.fitted_model.require_unchanged()
            theta = torch.cat([p.detach().double().flatten() for p in self.fitted_model.parameters()])
            parts = (theta - self.prior_mean).square().split(self.counts)
            pairs = zip(self._units.values(), parts, strict=True)
            self.element_norms = torch.cat([s.unit_sums(s.to_blocks(part)) for s, part in pairs])
        return self.element_norms

    def _by_name(self, rules: Sequence[Rule]) -> dict[str, KroneckerFactor]:
        """The factors of these rules, in order."""
        factors = by_parameter(rules)
        return {name: factors[name] for name in self.parameter_names}

    @running_the_model
    def fit(
        self,
        loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        generator: torch.Generator | None = None,
        group: Any = None,
    ) -> KronLaplace:
        """One streaming pass over the data at the model's present parameters; with ``eigenvalue_correction`` a second one.

        The result does not depend on the batch size, but for what sequences are padded to, ``column_tolerance``, the draws of
        ``fisher="mc"`` and rounding: in sums of more than 2^25 multiply-adds in float32, eigenvalues of a factor below 1e-7 of its largest
        are noise, which the evidence sees where they compare with the prior's precision; ``model.double()`` has them right. A compiled model
        runs as it is written, and without autocast. An error or an interruption leaves the approximation unfitted. All answers are about the
        parameters as they were here: after they changed, fit again.

        Args:
            loader: yields ``(x, y)``; moved to the model's device batch by batch. A GPU wants batches of a thousand images: a batch is some
                300 kernels, however many images it has. x is a tensor, a tuple or list (``model(*x)``) or a mapping (``model(**x)``). A batch
                may be a mapping: y is under ``dict_key_y``, and the model gets what is under ``dict_key_x`` if that is all the rest, else
                the rest by name. Tensors have the data points along their first axis; what is no tensor is passed on.
            override: start anew; False adds to what was fitted before at the same parameters. With ``eigenvalue_correction`` the loaders of
                that are iterated once more, for more data change the eigenbasis.
            progress_bar: show one.
            generator: seeds the sampling of ``fisher="mc"``; None is torch's global one.
            group: a ``torch.distributed`` group whose processes each pass batches of their own, such as
                :func:`ella_cuda.distributed.shard` takes of a loader; all must call ``fit``, and all have the fit of all data after it.
                A process may have no batch. Sums are added once, after the pass; eigenvalues are computed by one process each, at once.
                With ``fisher="mc"`` a batch's draws follow from its number, one seed of rank 0's generator, and nothing else. What
                later passes over the data needs their loader again. None is this process alone.

        Returns:
            self.

        Raises:
            TypeError: the loader is a data set or a tensor, or yields neither pairs nor mappings as above; override is no bool; group is no
                process group. With ``eigenvalue_correction`` also: the loader is an iterator.
            RuntimeError: a parameter was made in ``torch.inference_mode()``.
            ValueError: the loader is empty, targets or shapes do not fit, a layer was never called, or
                parameters changed since the fit that ``override=False`` is to add to. With a group also: ranks have other parameters or
                settings, a ``DistributedSampler``, or all the same batches. What one rank raises, all raise, naming it. With
                ``eigenvalue_correction`` also: loaders of earlier data are not there, copies are drawn anew in each pass, a sparsified
                layer's basis requires a gradient, or the second pass has another number of data points.
            FloatingPointError: the log likelihood or a factor is not finite; the message names the layer.
            MemoryError: the device has no room for the factors and their eigenvalues; raised before anything is allocated.
            torch.OutOfMemoryError, RuntimeError: torch's, where a batch finds no room; with what :meth:`memory_estimate` says of it.
        """
        self._fit(loader, override, progress_bar, generator=generator, group=group)
        return self

    def _fit(
        self, loader: Iterable[Any], override: bool = True, progress_bar: bool = False, group: Any = None, **how: Any
    ) -> None:
        before = self._loaders if self.n_data else []
        self._fit_once_or_again(loader, override, progress_bar, group, **how)
        if not self.eigenvalue_correction:
            return
        try:
            before = [] if override else before
            self._hold_bases(corrected_bases(self, before, loader, progress_bar, group, **how))
        except BaseException:
            self.n_data, self.fitted_model.fingerprint = 0, None
            raise

    def _fit_once_or_again(
        self, loader: Iterable[Any], override: bool, progress_bar: bool, group: Any, **how: Any
    ) -> None:
        """A fit without a group passes over a loader's data once more, with the same draws, where tapes were not the network."""
        again = group is None and can_be_again(loader, self._device)
        draws = states(self._device, how.get("generator")) if again else []
        while True:
            try:
                super()._fit(loader, override, progress_bar, group, **how, **({"defers": True} if again else {}))
                return
            except NotTheNetwork:  # whose tapes are gone, so that this ends
                for generator, state in draws:
                    generator.set_state(state)

    def _begin(
        self, loader: Iterable[Any], override: bool, hessian_at: Callable[[Inputs], Tensor] | None = None
    ) -> FitSums:
        if self.eigenvalue_correction:
            require_two_passes(self, loader, override)
        sums = super()._begin(loader, override, hessian_at)
        if self.eigenvalue_correction:
            require_same_draws(self)
        return sums

    def _require_additive(self) -> None:
        if self.eigenvalue_correction:
            raise ValueError(
                "update: with eigenvalue_correction=True further data change the eigenbasis, for which past data are needed again; use "
                "fit(loader, override=False), which passes over these too, or a KronLaplace without the correction."
            )

    def _hold_bases(self, bases: dict[str, Eigenbasis]) -> None:
        """Take these, with corrected eigenvalues."""
        self._eigenbases, self._spectra = bases, Spectra.of_bases(bases.values())

    def _require_room(self, rules: Sequence[Rule]) -> None:
        require_memory(self.model, rules, self.eigenvalue_correction)

    def _allocate(self, rules: Sequence[Rule]) -> None:
        zeros = zeros_together((shape for rule in rules for shape in rule.blocks()), self._device)

        def moment(groups: int, size: int, *args: Any) -> SecondMoment:
            there = zeros.get((groups, size))
            return SecondMoment(groups, size, *args, total=there.pop() if there else None)

        for rule in rules:
            rule.allocate(moment)

    def _pass_over(
        self,
        sums: FitSums,
        loader: Iterable[Any],
        progress_bar: bool,
        generator: torch.Generator | None = None,
        hessian_at: Callable[[Inputs], Tensor] | None = None,
        generator_of: Callable[[int], torch.Generator] | None = None,
        defers: bool = False,
    ) -> None:
        """The pass over the data. ``generator_of`` gives each batch, by its number in the loader, a generator of its own. ``defers``: the fit
        may be done again, see :class:`RecordedBatches`."""
        needs = telling_needs(lambda: sums.batch, self._peak_bytes, sum(rule.bytes() for rule in self._rules))
        with needs, curvature_pass(self.model, self._rules, self.memory_budget) as run:
            batches = self._batches(sums, loader, progress_bar, run, several=self._several_columns)
            pairs = merged(batches, run.merged_images) if generator_of is None else batches
            of_columns = self.fisher, self.mc_samples, self.column_tolerance
            settings = (*of_columns, self.resolution, self.approximation, self.memory_budget)
            add, defers = functools.partial(self._add, run), defers and sums.anew
            recorded = RecordedBatches(run, add, self.likelihood_function, settings, defers)
            for number, (x, y) in enumerate(pairs):
                its_own = generator if generator_of is None else generator_of(number)
                with without_autocast(self._device.type):
                    for part in run.parts(x, y):
                        sums.statistic = sums.statistic + self._add_part(
                            recorded, run, sums, *part, its_own, hessian_at
                        )
        sums.fit, sums.ran = recorded.fine, sums.tried or not recorded.changeless
        sums.compared, self._recorded = recorded.compared, recorded.ways
        sums.calls = dict(run.calls)
        sums.gradients = sums.data_fit.total()

    def _add_part(
        self,
        recorded: RecordedBatches,
        run: CurvaturePass,
        sums: FitSums,
        x: Inputs,
        y: Tensor,
        generator: torch.Generator | None,
        hessian_at: Callable[[Inputs], Tensor] | None,
    ) -> Tensor:
        """Add a part of a batch to the factors and to the data fit's gradient; returns its part of the statistic.

        Data points whose copies have no room together go through the network once for the outputs, and once for all else.
        """
        chunks = run.chunks(x)
        if chunks is None and hessian_at is None and data_points(x):
            statistic, f = recorded.add(x, y, generator)
        else:
            recorded.changeless = False
            statistic, f = self._add(run, x, y, generator, self._checked, hessian_at, chunks)
        if sums.data_fit.buffers:
            recorded.changeless = False
            self._add_data_fit(run, sums.data_fit, f, x, y, chunks)
        self.n_outputs = math.prod(f.shape[1:])
        return statistic

    def _add(
        self,
        run: CurvaturePass,
        x: Inputs,
        y: Tensor,
        generator: torch.Generator | None,
        admitted: Callable[[Tensor, Tensor], Tensor],
        hessian_at: Callable[[Inputs], Tensor] | None = None,
        chunks: Sequence[Chunk] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add data points to the factors; returns their part of the statistic, and the outputs. ``admitted`` takes outputs and targets, and
        returns targets that fit the likelihood."""

        def mean(outputs: Callable[[Inputs], Tensor]) -> Tensor:
            return sum(share * outputs(some) for some, share in chunks or [(x, 1)])

        others = None if hessian_at is None else mean(hessian_at)
        with run.nodes() if chunks is None else torch.no_grad():
            outputs = run.forward(x) if chunks is None else mean(lambda some: model_outputs(self.model, some))
            f = outputs.detach()
            y, at = admitted(f, y), f if others is None else others.to(f.dtype)
            if chunks is None and self._add_last_layer(run, outputs, at, y):
                return self.likelihood_function.statistic(f, y), f
            statistic, columns = self._columns_at(f, at, y, generator)
            if chunks is None and data_points(x):
                run.backward(outputs, columns)
        if chunks is not None:
            run.add_chunks(chunks, columns)
        if data_points(x):
            run.add_per_example(x, columns, None if chunks is None else chunks[0][0][1].shape[1])
        return statistic, f

    def _add_last_layer(self, run: CurvaturePass, outputs: Tensor, at: Tensor, y: Tensor) -> bool:
        """Add the Hessian at outputs ``(N, K)`` to a linear last layer's output side, which is its sum: N K^2 products, where columns take
        N K^3. False, and nothing is added, of other layers, and where columns are drawn or left out."""
        call = run.last_call(outputs) if self.fisher == "exact" and not self.column_tolerance else None
        if call is None or type(call.rule) is not LinearRule:
            return False
        with torch.no_grad():
            found = hessian_sum(self.likelihood_function, at, y)
            for moment in {f.output_moment: None for f in call.rule.factors.values()} if found is not None else ():
                moment.add_sum(*found)
        if found is not None:
            run.release()
        return found is not None

    def _checked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.likelihood_function.check(outputs, targets)
        return targets

    def _add_data_fit(
        self,
        run: CurvaturePass,
        data_fit: DataFitGradient,
        f: Tensor,
        x: Inputs,
        y: Tensor,
        chunks: Sequence[Chunk] | None,
    ) -> None:
        with requiring_grad(run.hyperparameters, True):
            if chunks is None:
                data_fit.add(lambda: self.likelihood_function.statistic(run_model(self.model, x), y))
                return
            at = f.clone().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.likelihood_function.statistic(at, y), at)
            for some, share in chunks:
                data_fit.add(lambda some=some, share=share: share * (run_model(self.model, some) * slope).sum())

    @torch.no_grad()
    def _columns_at(
        self, f: Tensor, at: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Columns | Tensor]:
        """The statistic of a batch at outputs f, and the columns of the Hessian at other ones."""
        return self.likelihood_function.statistic(f, y), self._columns(at, y, generator)

    def _columns(self, outputs: Tensor, y: Tensor, generator: torch.Generator | None) -> Columns | Tensor:
        if self.fisher == "exact":
            return self.likelihood_function.columns(outputs, y, self.column_tolerance)
        draws = [self.likelihood_function.sampled_column(outputs, y, generator) for _ in range(self.mc_samples)]
        return draws[0] if len(draws) == 1 else torch.cat([one[:] for one in draws]) / math.sqrt(len(draws))

    def _check_finite(self, sums: FitSums) -> None:
        sides = [
            (rule.full_name(name), side, moment.total)
            for rule in self._rules
            for name, factor in rule.factors.items()
            for side, moment in (("input", factor.input_moment), ("output", factor.output_moment))
            if moment is not None
        ]
        norms = torch._foreach_norm([total for *_, total in sides], 1)
        flags, read = torch.stack([*norms, sums.statistic]).isfinite(), [*sums.compared.values()]
        read += [] if sums.fit is None else [sums.fit]
        found = (torch.cat([flags, torch.stack(read)]) if read else flags).tolist()  # one wait for the device
        finite, likelihood_is, rest = found[: len(sides)], found[len(sides)], found[len(sides) + 1 :]
        if wrong := [kind for kind, same in zip(sums.compared, rest, strict=False) if not same]:
            raise NotTheNetwork(wrong)
        if not all(rest):
            raise ValueError(
                "targets: a batch has some that do not fit the likelihood, such as labels that are no classes."
            )
        for (name, side, _), fine in zip(sides, finite, strict=True):
            if not fine:
                raise FloatingPointError(
                    f"fit: the {side} side of the factor of {name!r} is not finite; check the data and the parameters, or use float64."
                )
        if not likelihood_is:
            raise FloatingPointError(
                "fit: the log likelihood is not finite; the model's outputs or the targets contain inf or nan."
            )

    @property
    def H(self) -> KronPosterior:
        """The curvature at sigma = 1, of all parameters, with the methods of a posterior's precision; ``to_matrix()`` is the matrix."""
        self.fitted_model.require_fit()
        nothing = torch.zeros(len(self.parameter_names), dtype=torch.float64, device=self._device)
        return self._posterior(nothing, torch.ones_like(self.fitted_model.zero))

    @property
    def recorded(self) -> dict[str, str]:
        """Shape of a batch's inputs in the last fit -> how the last batch of this shape ran: "recorded", "as it is", where there were too few
        for a recording, or "as it is: " and why there is none. The number of columns that ``column_tolerance`` leaves, and of outputs at
        several positions with ``fisher="exact"``, depends on the data, so that such batches are never recorded."""
        return dict(self._recorded)

    @property
    def factors(self) -> dict[str, KroneckerFactor]:
        """Parameter name -> its :class:`KroneckerFactor`, in ``named_parameters()`` order; a dictionary of the caller's own."""
        self.fitted_model.require_fit()
        return dict(self._factors)

    @running_the_model
    def memory_estimate(self, x: Inputs | None = None) -> int:
        """Bytes that a fit and its evidence take at their peak, beside what is there before: the factors, which stay, and the larger of
        two passing needs, that of a batch's way back (``memory_budget``, and as much that an allocator keeps; on CUDA the graph of a
        recorded batch, too) and that of the eigenvalues.

        Args:
            x: the inputs of a batch as the loader yields it, without the targets: a tensor ``(N, ...)``, or several in a tuple, list or
                mapping; what its forward pass keeps is added, from a run of its first image. None leaves it out.
        """
        device = next(iter(self.fitted_model.present_parameters().values())).device
        draws = self.fitted_model.draws
        x = None if x is None else with_draws(self.model, inputs_on(x, device, "memory_estimate"), draws)
        return self._peak_bytes(x)

    def _peak_bytes(self, x: Inputs | None) -> int:
        rules = self.fitted_model.present_rules()
        summed = self.fisher == "exact" and not self.column_tolerance
        return peak_bytes(self.model, rules, self.memory_budget, x, self.eigenvalue_correction, summed)

    def summary(self) -> str:
        """A table of what is done with every parameter, before or after a fit: the rule of its layer, the sides of its factors as blocks x
        rows, their bytes, and whether its block is that of the generalised Gauss-Newton matrix ("exact"), its diagonal, or a Kronecker
        product in its place, with ``approximation="reduce"`` and ``eigenvalue_correction`` so named. The last line says where
        ``column_tolerance`` or ``fisher="mc"`` leave out columns of the output Hessian, of which no block is exact. A parameter of several
        layers has a line for each: "that of" names the one whose factor it has, "one with" the one with whose factor the layer's is merged.
        Frozen parameters, and those that are left out, have no rule. Before a fit, a bias that may have an output side of its own, where its
        layer meets shared positions, is counted so. Print it.
        """
        present = self.fitted_model.present_rules()
        self.fitted_model.present_parameters(present)
        columns = f"without {self.column_tolerance:.3g} of the Hessian's trace" if self.column_tolerance else ""
        drawn = "of one sampled column" if self.mc_samples == 1 else f"of {self.mc_samples} sampled columns"
        columns = drawn if self.fisher == "mc" else columns
        return _summary(self.model, self._rules if self.n_data else present, columns, self.eigenvalue_correction)

    def _penalty(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> Tensor:
        """One op, unless bases learn."""
        bases = self.fitted_model.bases
        bases.check()
        if torch.is_grad_enabled() and self.eigenvalue_correction:
            require_held(self, type(self).__name__)
        if is_finer(self, log_precision):
            return self._terms(log_precision, log_scale, square_norms).value
        if torch.is_grad_enabled() and bases.learn():
            precision, scale = log_precision.exp(), log_scale.exp()
            log_dets = [f.logdet(d, scale) for f, d in zip(self._factors.values(), precision.unbind(), strict=True)]
            ratio = torch.stack(log_dets).sum() - (elements(self) * log_precision).sum()
            return ratio + (precision * square_norms).sum()
        return self._terms(log_precision, log_scale, square_norms).value

    def _terms(self, log_precision: Tensor, log_scale: Tensor, square_norms: Tensor) -> ops.KronEvidence:
        if is_finer(self, log_precision):
            learn = torch.is_grad_enabled() and self.fitted_model.bases.learn()
            if learn or self._sides is None:
                sides = sides_of(self._factors.values())
                self._sides = None if learn else sides
            return unit_evidence(sides if learn else self._sides, log_precision, log_scale, square_norms)
        return ops.kron_evidence(self._spectra.packed(), square_norms, log_precision, log_scale)

    def _posterior(self, precision: Tensor, scale: Tensor) -> KronPosterior:
        bases, dtype = eigenbases_of(self), self.fitted_model.dtype
        if not is_finer(self, precision):
            return KronPosterior(bases, precision, scale, dtype)
        # Posteriors whose precisions differ by a factor, as those of a calibration, share one whitened basis.
        means, shares = normalised(precision, self._unit_counts)
        if self._whitened is None or not torch.allclose(shares, self._whitened[0], rtol=1e-12, atol=0):
            self._whitened = shares, whitened(bases, self._factors, shares)
        return UnitPosterior(self._whitened[1], means, scale, dtype, self._whitened[0])

    def _curvature_state(self) -> dict[str, Any]:
        return {
            "statistic_gradients": {name: g.clone() for name, g in self.statistic_gradients.items()},
            "factors": save_factors(self._rules) if self.n_data else {},
            "eigenbases": save_bases(self._eigenbases) if self.n_data and self.eigenvalue_correction else {},
        }

    def _read(self, state: Mapping[str, Any], n_data: int) -> Callable[[], None]:
        gradients, buffers = state["statistic_gradients"], dict(self.model.named_buffers())
        if wrong := [name for name in gradients if name not in buffers]:
            raise ValueError(f"load_state_dict: statistic_gradients of no buffers of the model: {', '.join(wrong)}.")
        gradients = {
            name: checked_tensor(f"statistic_gradients[{name!r}]", g, buffers[name].shape).to(self._device, copy=True)
            for name, g in gradients.items()
        }
        rules = self.fitted_model.present_rules()
        if n_data:
            load_factors(rules, state["factors"])
        bases = None
        if n_data and self.eigenvalue_correction:
            bases = load_bases(self, state["eigenbases"], {n: f.shape for n, f in self._by_name(rules).items()})

        def take() -> None:
            self.statistic_gradients, self._rules = gradients, rules
            self._hold()
            if bases is not None:
                self._hold_bases(bases)

        return take


def _summary(model: nn.Module, rules: Sequence[Rule], columns: str, corrected: bool) -> str:
    """:meth:`KronLaplace.summary` by these rules, with what the blocks are made of, where that is not all columns, in the last line."""
    lines: dict[int, list[tuple[str, ...]]] = {}
    total = 0
    merges = merged_shapes(rules)
    for rule in rules:
        shapes, shared, parameters = rule.shapes(), rule.output_owners(), rule.parameters()
        for parameter in rule.trainable:
            shape, name = shapes[parameter], rule.full_name(parameter)
            inputs, outputs = (shape.groups, shape.row_inputs), (shape.output_groups, shape.row_outputs)
            owner = shared.get(parameter, "")
            is_shared = bool(owner) and (
                rule.factors[parameter].output_moment is rule.factors[owner].output_moment
                if rule.factors
                else rule.approximation == "reduce"
            )
            if parameter in rule.tied:
                first, its_name = rule.tied[parameter]
                cells = (f"that of {first.full_name(its_name)}", "", "0")
            else:
                sides = ([] if shape.constant_input else [inputs]) + ([] if is_shared else [outputs])
                size = sum(groups * rows**2 for groups, rows in sides) * torch.float64.itemsize
                total += size
                cells = (
                    "-" if shape.constant_input else f"{inputs[0]} x {inputs[1]}",
                    f"that of {rule.full_name(owner)}" if is_shared else f"{outputs[0]} x {outputs[1]}",
                    f"{size:,}",
                )
            diagonal = not rule.sees_calls() and not shape.constant_input
            reduced = ", reduce" if rule.approximation == "reduce" else ""
            product = f"Kronecker{reduced}{', corrected' if corrected else ''}"
            block = "diagonal" if diagonal else "exact" if shape.constant_input else product
            size_of = str(tuple(parameters[parameter].shape))
            same = lines.setdefault(id(parameters[parameter]), [])
            if same and same[0][0] in merges and parameter not in rule.tied:
                block += f", one with {same[0][0]}"
            same.append((name, size_of, type(rule).__name__, *cells, block))
    total += sum(s.inputs**2 + s.outputs**2 for s in merges.values()) * torch.float64.itemsize
    rows = [HEAD]
    for name, p in model.named_parameters():
        rows += lines.get(
            id(p), [(name, str(tuple(p.shape)), "left out" if p.requires_grad else "frozen", "-", "-", "0", "-")]
        )
    count = sum(p.numel() for p in model.parameters() if id(p) in lines)
    rows.append(("in all", f"{count:,} parameters", "", "", "", f"{total:,}", columns))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

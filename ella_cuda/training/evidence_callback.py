"""Evidence steps for a training loop of one's own: learned prior precisions as weight decay, or as a term of the loss."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ella_cuda.distributed import Ranks, Shard, require_whole
from ella_cuda.laplace import DiagLaplace, KronLaplace, Likelihood, NTKLaplace
from ella_cuda.laplace.base import BaseLaplace
from ella_cuda.laplace.batches import dict_keys
from ella_cuda.laplace.copies import augment_of
from ella_cuda.laplace.evidence import evidence_bound, set_values, sharing_prior
from ella_cuda.laplace.exact_ggn import OUTPUTS
from ella_cuda.laplace.likelihoods import likelihood_of
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.modes import differentiating
from ella_cuda.training.arguments import Curvature, PriorOptions
from ella_cuda.training.checkpoint import agree, kept_random_state, plain
from ella_cuda.training.checks import positive_integer, whole
from ella_cuda.training.learners import Prior
from ella_cuda.training.points import Points, points_of
from ella_cuda.training.processes import OneProcess, share_random_state, step_together
from ella_cuda.training.start import require_passes, try_evidence
from ella_cuda.training.subsets import require_shuffled

OWNER = "EvidenceCallback"
FORMS = {"kron": KronLaplace, "diag": DiagLaplace, "ntk": NTKLaplace}
# A schedule's lists of one entry for each of the optimizer's groups.
OF_GROUPS = (
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "min_momentums",
    "max_momentums",
)


class EvidenceCallback:
    r"""Evidence steps between the epochs of a loop of one's own, which learn one prior precision per parameter tensor::

        evidence = EvidenceCallback(model, loader)
        evidence.attach(optimizer)
        for epoch in range(30):
            for x, y in loader:
                loss = evidence.penalised(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            evidence.step(epoch)

    The weights are to be at the MAP of mean loss :math:`+ \frac{1}{2N} \sum_l \delta_l \|\theta_l\|^2`, N the number of data points. The
    prior's part is in the optimizer's ``weight_decay`` where :meth:`attach` put it, and in :meth:`penalised` elsewhere. Steps on the
    precisions are those of :func:`ella_cuda.marglik_training`.

    Args:
        model: in training, on its device; of a ``DistributedDataParallel`` its module.
        loader: of the training data without augmentation, as :func:`ella_cuda.marglik_training` takes ``marglik_loader``. Its first images
            are tried here.
        likelihood: "classification", "regression", "binary", "poisson", "heteroscedastic", or an object; the loop's loss is the mean over
            data points of its ``-log p``, which :meth:`loss` computes.
        every: epochs from one evidence step to the next. burn_in: epochs before the first.
        form: curvature: "kron", of :class:`~ella_cuda.laplace.KronLaplace`; "diag", of :class:`~ella_cuda.laplace.DiagLaplace`; "ntk", of
            :class:`~ella_cuda.laplace.NTKLaplace`.
        batches: batches of the loader in an evidence step, from the start of a new pass, which must be others each time; None is all. The
            step is then up a stochastic lower bound of the evidence with "ntk" and "diag", see
            :func:`~ella_cuda.laplace.evidence_bound`. With "kron" it is no bound.
        outputs: of "ntk", "together" or "apart".
        n_data: N, where a pass over the loader does not yield it.
        group: a ``torch.distributed`` group, whose processes make the evidence step together: all call this with the same arguments and
            the same whole loader, and :meth:`step` in the same epochs. Each takes its share of the loader's batches, or of the step's
            ``batches``.
        options: ``prior_structure``, ``prior_prec_init``, ``sigma_noise_init``, ``fix_sigma_noise``, ``hyper_optimizer``,
            ``hyper_step_limit``, ``lr_hyp``, ``n_hypersteps``, ``fisher``, ``resolution``, ``approximation``, ``unknown``,
            ``column_tolerance``, ``dict_key_x``, ``dict_key_y``, ``ignore_index``: as of :func:`ella_cuda.marglik_training`.

    Attributes:
        la: the Laplace approximation of the last evidence step; None before.
        margliks: ``-log q`` of every evidence step, of N data points; an estimate from ``batches``.
        n_data: N.

    Raises:
        TypeError, ValueError: as :func:`ella_cuda.marglik_training`; ``batches`` of a loader that is never shuffled, another form
            than "kron" with a group.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021, algorithm 1; Immer et
    al., "Stochastic marginal likelihood gradients using neural tangent kernels", ICML 2023 (``batches``).
    """

    @differentiating
    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        likelihood: str | Likelihood = "classification",
        *,
        every: int = 1,
        burn_in: int = 0,
        form: str = "kron",
        batches: int | None = None,
        outputs: str = "together",
        n_data: int | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        with _named():
            self.every, self.burn_in = whole("every", every, 1), whole("burn_in", burn_in, 0)
            given, self._curvature = _parted(options)
        self.form = check_choice(f"{OWNER}: form", form, tuple(FORMS))
        self.batches = None if batches is None else positive_integer("batches", batches, OWNER)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._likelihood = likelihood_of(likelihood, self._curvature.ignore_index, f"{OWNER}: ")
        keys = dict_keys(self._curvature.dict_key_x, self._curvature.dict_key_y, f"{OWNER}: ")
        require_passes(loader, f"{OWNER}: loader")
        self._ranks = OneProcess() if group is None else Ranks(group, OWNER)
        self._whole = self._loader = loader
        if self.batches is not None:
            require_shuffled(loader, f"{OWNER}: batches")
        if group is not None:
            if self.form != "kron":
                raise ValueError(f"{OWNER}: a group shares a fit of form='kron', got form={form!r}; leave out one.")
            require_whole(loader, self._ranks.size, f"{OWNER}: loader")
            self._loader = Shard(loader, self._ranks.rank, self._ranks.size, group)
        self._settings = self._of_form(options, outputs)
        la = self._new_laplace(sigma_noise=given.sigma_noise_init)
        with _named():
            self._prior = Prior(self.model, self._likelihood, la, given)
        if n_data is None:
            self._points = points_of(loader, "loader", keys=keys, where=OWNER)
        else:
            self._points = Points(positive_integer("n_data", n_data, OWNER), f"{OWNER}: loader", "")
        self.n_data = self._points.count
        self.la: BaseLaplace | None = None
        self.margliks: list[float] = []
        self._attached: list[tuple[torch.optim.Optimizer, dict[int, int]]] = []
        self._decayed: set[int] = set()  # ids of parameters that an optimizer decays
        self._put()
        self._ranks.together(lambda: try_evidence(la, loader, "loader", where=OWNER))

    @property
    def prior_precision(self) -> Tensor:
        """δ, one per parameter tensor in ``la.parameter_names`` order, or per output unit with ``prior_structure="unit"``, float64."""
        return self._prior.precision().detach()

    @property
    def sigma_noise(self) -> Tensor:
        """σ of a regression, 0-dim, float64; 1 for others."""
        return self._prior.sigma().detach()

    @property
    def weight_decay(self) -> dict[str, float]:
        """δ/N by the name of the parameter; ValueError where it has several."""
        self._require_one_each("weight_decay")
        return dict(zip(self._prior.names, (self.prior_precision / self.n_data).tolist(), strict=True))

    def attach(self, optimizer: torch.optim.Optimizer, scheduler: Any = None, weight_decay: bool = True) -> None:
        r"""Have an optimizer decay the weights by δ/N, anew after each evidence step. :meth:`penalised` adds nothing for these weights then.

        The optimizer's groups are split, so that parameters of one group have one precision; new groups come last, and settings and state
        stay. Parameters without a precision keep their decay. With ``SGD``, ``Adam`` and others that add ``weight_decay`` times the weight
        to the gradient, a stationary point is the MAP. ``AdamW`` decays each step by ``lr * weight_decay * weight`` beside the step that it
        divides by :math:`\sqrt{v} + \epsilon`: its stationary point is where :math:`g / (\sqrt{v} + \epsilon) = -\delta \theta / N`, a
        precision of :math:`\delta (\sqrt{v} + \epsilon)` for each weight. No value of ``weight_decay`` makes that the MAP, which the evidence
        is taken to be at; ``weight_decay=False`` does.

        Args:
            optimizer: of torch, with ``weight_decay`` among its groups' settings unless that is False here. Load its state, and that of
                its schedule, after this.
            scheduler: of ``torch.optim.lr_scheduler``, the schedule of its learning rates where there is one already, or a list of several.
            weight_decay: False puts these parameters' decay to 0, and the prior's part is :meth:`penalised`'s.

        Raises:
            TypeError: the optimizer is none of torch's.
            ValueError: weights of one tensor have several precisions, and ``weight_decay`` is not False; a group has no ``weight_decay``;
                the optimizer, or a parameter, is attached already; the optimizer has none of the model's parameters, or has a schedule that
                is not given; the schedule is another optimizer's, or none of torch's.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{OWNER}.attach: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        if weight_decay:
            self._require_one_each("attach")
        numbers = self._prior.numbers or range(len(self._prior.names))
        number = {id(p): g for p, g in zip(self._prior.parameters, numbers, strict=False)}
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in number]
        if not own:
            raise ValueError(f"{OWNER}.attach: optimizer has none of the model's parameters that have a precision.")
        held = {id(p) for other, _ in self._attached for group in other.param_groups for p in group["params"]}
        if held & {id(p) for p in own}:
            raise ValueError(f"{OWNER}.attach: a parameter of optimizer is attached already; attach each one once.")
        lacking = [i for i, group in enumerate(optimizer.param_groups) if "weight_decay" not in group]
        if lacking and weight_decay:
            raise ValueError(
                f"{OWNER}.attach: group {lacking[0]} of the {type(optimizer).__name__} has no weight_decay; pass weight_decay=False, or "
                "leave attach out, for penalised(loss) has the prior's term."
            )
        if weight_decay:
            places = _split(optimizer, scheduler, number)
            self._decayed |= {id(p) for p in own}
        else:
            places, decaying = {}, []
            for place, group in enumerate(optimizer.param_groups):
                ours = [id(p) in number for p in group["params"]]
                if not any(ours) or not group.get("weight_decay"):
                    continue
                if not all(ours):
                    raise ValueError(
                        f"{OWNER}.attach: group {place} of the optimizer has parameters with a precision and others, and a weight_decay; "
                        "give the others a group of their own."
                    )
                decaying.append(group)
            for group in decaying:  # once none of them is refused
                group["weight_decay"] = 0.0
        self._attached.append((optimizer, places))
        self._put()

    def penalised(self, loss: Tensor) -> Tensor:
        """The mean loss of a batch and the prior's part of weights that no optimizer decays, ``sum_l delta_l ||theta_l||^2 / (2 N)``."""
        if not self._left:
            return loss
        if self._prior.has_units:
            return loss + 0.5 * sum((w * p.square()).sum().to(loss.dtype) for p, w in self._left)
        norms = torch._foreach_norm([p for p, _ in self._left])
        return loss + 0.5 * sum(w * n.to(loss.dtype).square() for n, (_, w) in zip(norms, self._left, strict=True))

    @torch.no_grad()
    def add_prior(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Add the gradient of :meth:`penalised`'s term, in its place, to the gradients, between ``backward`` and the optimizer's step; of its
        parameters alone where it is given."""
        groups = () if optimizer is None else optimizer.param_groups
        own = {id(p) for group in groups for p in group["params"]}
        for parameter, weight in self._left:
            if optimizer is not None and id(parameter) not in own:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(weight, Tensor):
                parameter.grad.addcmul_(parameter, weight)
            else:
                parameter.grad.add_(parameter, alpha=weight)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over data points of ``-log p``, 0-dim, up to what does not depend on the outputs: of a regression at the learned
        noise."""
        return self._likelihood.loss(outputs, targets, self.sigma_noise.square().to(outputs.dtype))

    @differentiating
    def step(self, epoch: int) -> float | None:
        """Do the evidence step that is due after an epoch, counted from 0, and give optimizers the new decay.

        Returns:
            ``-log q / N`` at the new precisions, nats per data point; None where no step is due.

        Raises:
            ValueError: the model's parameters, or their device, are others than at the start; a pass yields another number of data points.
            FloatingPointError: a factor or the likelihood is not finite.
        """
        with _named():
            done = whole("epoch", epoch, 0) + 1
            if done <= self.burn_in or done % self.every:
                return None
            self._prior.require_parameters_of(self.model)
        device = self._prior.parameters[0].device
        if device != self._prior.log_sigma.device:
            raise ValueError(
                f"{OWNER}.step: the model is on {device} and was on {self._prior.log_sigma.device} when {OWNER} was made; make it after "
                "model.to(device)."
            )
        self.la = None  # before the next one is made, or the factors of both are in memory
        augment = augment_of(self.model)
        with contextlib.ExitStack() as stack:
            if self._ranks.group is not None:
                if self.batches is not None:
                    torch.rand(())  # or the next step, from the state that is kept, may draw the same data points
                stack.enter_context(kept_random_state([] if self.batches is not None else [self._whole]))
                share_random_state([self._whole], device, self._ranks)
            if augment is not None:
                stack.enter_context(augment.held())
            la = self._fitted()
        of = self.n_data if self.batches is not None else la.n_data  # a pass may have other points than training has
        with sharing_prior(la, of), torch.no_grad():
            step_together(la, self._prior, [self._prior], self._ranks)
        with torch.no_grad():
            value = self._ranks.from_first(-float(evidence_bound(la, of)))
        self.la = la
        self.margliks.append(value)
        self._put()
        return value / of

    def state_dict(self) -> dict[str, Any]:
        """What a resumed loop needs beside the model's, the optimizer's and the schedule's states; loadable with ``weights_only=True``."""
        return plain(
            {"settings": self._described(), "prior": self._prior.state_dict(), "margliks": list(self.margliks)}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was called. ValueError, with nothing changed, where settings are others."""
        own, found = self._described(), state.get("settings", {})
        for name in dict.fromkeys([*own, *found]):
            if not agree(found.get(name), own.get(name)):
                raise ValueError(
                    f"{OWNER}.load_state_dict: the state is of {name} = {found.get(name)!r}, here it is {own.get(name)!r}; make it with the "
                    "same arguments and data."
                )
        self._prior.load_state_dict(state["prior"])
        self.margliks, self.la = list(state["margliks"]), None
        self._put()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{OWNER}: a callback cannot be copied or pickled, for it is of these parameters and optimizers; copy its state_dict, and load "
            "it into a callback of the same arguments."
        )

    def _described(self) -> dict[str, Any]:
        given = {"every": self.every, "burn_in": self.burn_in, "form": self.form, "batches": self.batches}
        return {
            **{"likelihood": repr(self._likelihood), "n_data": self.n_data, "parameters": self._prior.names},
            **given,
            **self._settings,
            **self._prior.settings(),
        }

    def _of_form(self, options: Mapping[str, Any], outputs: str) -> dict[str, Any]:
        """The arguments of the approximation; TypeError where one is given that it does not have."""
        curvature = self._curvature
        every = {**curvature.settings, **curvature.keys, "ignore_index": curvature.ignore_index, "outputs": outputs}
        of_factors = {"fisher", "resolution", "approximation", "column_tolerance"}
        foreign = {"kron": {"outputs"}, "diag": of_factors | {"outputs"}, "ntk": of_factors}[self.form]
        given = {*options, *(["outputs"] if outputs != OUTPUTS[0] else [])}
        if wrong := foreign & given:
            raise TypeError(f"{OWNER}: {min(wrong)} is not an argument of form={self.form!r}; leave it out.")
        return {name: value for name, value in every.items() if name not in foreign}

    def _new_laplace(self, **values: Any) -> BaseLaplace:
        la = FORMS[self.form](self.model, self._likelihood, **values, **self._settings)
        if not values:
            set_values(la, self._prior.precision(), self._prior.sigma(), checked=True)
        return la

    def _fitted(self) -> BaseLaplace:
        """At the present weights, of all data or of some batches."""
        la, loader, how = self._new_laplace(), self._loader, {}
        if self._ranks.group is not None:
            how = {"group": self._ranks.group}
        if self.batches is not None:
            loader = self._ranks.together(lambda: list(itertools.islice(self._whole, self.batches)))
            if how:
                loader = Shard(loader, self._ranks.rank, self._ranks.size, self._ranks.group)
        la.fit(loader, **how)
        if self.batches is None:
            self._points.require(la.n_data)
        return la

    def _put(self) -> None:
        """Give optimizers, and :meth:`penalised`, the present precisions."""
        if self._prior.has_units:
            pairs = zip(self._prior.parameters, self._prior.of_parameters(), strict=False)
            self._left = [(p, (own / self.n_data).to(p.dtype)) for p, own in pairs]
            return
        precisions = (self._prior.log_precision.detach().exp() / self.n_data).tolist()
        for optimizer, places in self._attached:
            for place, number in places.items():
                optimizer.param_groups[place]["weight_decay"] = precisions[number]
        pairs = zip(self._prior.parameters, self._prior.numbers, strict=False)
        self._left = [(p, precisions[number]) for p, number in pairs if id(p) not in self._decayed]

    def _require_one_each(self, where: str) -> None:
        """ValueError where a parameter tensor has several precisions."""
        if self._prior.has_units:
            raise ValueError(
                f"{OWNER}.{where}: prior_structure='unit' has a precision for each row, and an optimizer one weight_decay for a tensor; "
                "attach(optimizer, weight_decay=False), and take the loss' penalised(loss)."
            )


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Errors of arguments that :func:`ella_cuda.marglik_training` has too name this callback."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("marglik_training: ", f"{OWNER}: ", 1)) from None


def _parted(options: Mapping[str, Any]) -> tuple[PriorOptions, Curvature]:
    """Options by group; TypeError where one is unknown."""
    names = {kind: {field.name for field in dataclasses.fields(kind)} for kind in (PriorOptions, Curvature)}
    if unknown := options.keys() - set().union(*names.values()):
        raise TypeError(f"{OWNER}: got an unexpected keyword argument {min(unknown)!r}.")
    prior, curvature = (kind(**{k: v for k, v in options.items() if k in own}) for kind, own in names.items())
    return prior, curvature


def _split(optimizer: torch.optim.Optimizer, scheduler: Any, number: Mapping[int, int]) -> dict[int, int]:
    """Split groups, so that parameters of one have one number, by their ids, or none; returns the numbers by the groups' places. New groups
    have the settings of those that they come from, and are last. ValueError where there is a schedule that is not given, or one whose lists
    are not known."""
    groups = optimizer.param_groups
    parts, named = [], []  # of each group, its parameters by their number, and their names
    for group in groups:
        parts.append(by_number := {})
        for p in group["params"]:
            by_number.setdefault(number.get(id(p)), []).append(p)
        names = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
        named.append({key: [names[id(p)] for p in of] for key, of in by_number.items()} if names else {})
    schedules = scheduler if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    for one in schedules:
        if not (isinstance(one, LRScheduler) and one.optimizer is optimizer):
            raise ValueError(
                f"{OWNER}.attach: scheduler must be of torch.optim.lr_scheduler for this optimizer, got a {type(one).__name__}; attach "
                "before a schedule of another kind is made."
            )
    if not schedules and any(len(of) > 1 and "initial_lr" in g for of, g in zip(parts, groups, strict=True)):
        raise ValueError(
            f"{OWNER}.attach: the optimizer has a schedule, whose lists are of its groups, which are to be split: pass it, "
            "attach(optimizer, scheduler), or attach before it is made."
        )
    places, origins = {}, list(range(len(parts)))
    for origin, by_number in enumerate(parts):
        for i, (key, parameters) in enumerate(by_number.items()):
            place = len(groups) if i else origin
            if i:
                groups.append(
                    {k: v.clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in groups[origin].items()}
                )
                origins.append(origin)
            groups[place]["params"] = parameters
            if named[origin]:
                groups[place]["param_names"] = named[origin][key]
            if key is not None:
                places[place] = key
    for one in schedules:
        _extend(one, len(parts), origins)
    return places


def _extend(scheduler: Any, count: int, origins: list[int]) -> None:
    """Give a schedule of ``count`` groups, and those inside of it, lists of the groups that came of these."""
    for name in OF_GROUPS:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) == count:
            setattr(scheduler, name, [values[origin] for origin in origins])
    for inner in getattr(scheduler, "_schedulers", ()):
        _extend(inner, count, origins)

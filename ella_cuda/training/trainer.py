"""Training of weights and hyperparameters together: MAP steps on the weights, evidence steps on what learners learn."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ella_cuda.augment import AveragedFunction
from ella_cuda.distributed import Shard
from ella_cuda.laplace import KronLaplace, Likelihood
from ella_cuda.laplace.batches import dict_keys
from ella_cuda.laplace.copies import augment_of
from ella_cuda.laplace.evidence import present_terms, set_values, sharing_prior
from ella_cuda.laplace.likelihoods import likelihood_of
from ella_cuda.laplace.parameters import check_positive
from ella_cuda.modes import differentiating
from ella_cuda.progress import bar_size
from ella_cuda.recording import CudaGraphs
from ella_cuda.training.arguments import parted, signature
from ella_cuda.training.checkpoint import (
    Checkpoint,
    kept_random_state,
    plain,
    random_state,
    require_loadable,
    restore,
    threads_of,
    warn_of_unsaved_state,
)
from ella_cuda.training.checks import in_words, name_of
from ella_cuda.training.data import data_digest
from ella_cuda.training.epoch import train_epoch
from ella_cuda.training.graph import GraphedStep
from ella_cuda.training.learners import Learner, Prior, add_settings, learners_of
from ella_cuda.training.learners.spatial_basis import bases_of
from ella_cuda.training.points import points_of_both
from ella_cuda.training.processes import (
    Processes,
    StepTogether,
    all_raise_together,
    own_random_state,
    require_same_gradients,
    require_served,
    restore_own_random_state,
    share_learners,
    share_random_state,
    step_together,
    train_epoch_together,
    without_cuda,
)
from ella_cuda.training.start import make_optimizer, make_scheduler, require_passes, try_evidence
from ella_cuda.training.step import TrainingStep
from ella_cuda.training.subsets import first_points, require_shuffled

PLAN = ("batch_size", "shuffle", "drop_last", "sampler", "augment")  # of a loader, what its batches depend on
CALIBRATED_OUTPUTS = 100  # of a data point, of which calibrating takes gradients, and their square for each factor
Result = tuple[KronLaplace, nn.Module, list[float], list[float]]


@dataclasses.dataclass
class Evaluation:
    """What is recorded at every evaluation; a list of these is in the checkpoint under ``history``."""

    epoch: int  # epochs done
    loss: (
        float | None
    )  # data fit, mean over the epoch's data points, plus the prior's part at the epoch's start; None before the first
    accuracy: float | None  # of the training batches as they were seen, fraction; None without classes
    neg_log_marginal_likelihood: float | None  # per data point; None without an evidence step
    prior_precision: list[float]  # per parameter tensor, the geometric mean of its units'
    effective_parameters: dict[str, float] | None  # per parameter tensor
    sigma_noise: float
    inverse_lengthscale: dict[str, float]  # per basis of a sparsified layer, by its name
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)  # what learners record, by their names


class MarglikTrainer:
    """The training of :func:`ella_cuda.marglik_training` in parts, for loops of a user's own. :meth:`run` is the whole of it::

        trainer = MarglikTrainer(model, train_loader, n_epochs=30)
        for _ in range(30):
            trainer.epoch()
            trainer.evidence_step()
        la = trainer.finish()

    Args:
        Those of :func:`ella_cuda.marglik_training`, which raises and warns of the same. All are checked here, before the first step.

    Attributes:
        model: in training.
        learners: what the evidence steps move: the prior's precisions and the noise scale, then those of ``learn``.
        epochs: how many are done.
        losses: of every epoch. margliks: ``-log q`` of every evidence step. history: every :class:`Evaluation`, as a dict.
        la: the Laplace approximation of the last evidence step; None before.
    """

    @all_raise_together
    @differentiating
    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        likelihood: str | Likelihood = "classification",
        **arguments: Any,
    ) -> None:
        steps, prior, curvature, session, of_learners = parted(arguments)
        self._ranks: Processes = session.group  # which all_raise_together makes of the caller's
        first = self._ranks.is_first
        self._likelihood = likelihood_of(likelihood, curvature.ignore_index, "marglik_training: ")
        self._keys = dict_keys(curvature.dict_key_x, curvature.dict_key_y, "marglik_training: ")
        self.model = _averaged(model, session.augment)
        self._steps, self._curvature, self._on_evaluation = steps, curvature, session.on_evaluation
        self._calibrate = session.calibrate
        self._loaders = [train_loader, train_loader if session.marglik_loader is None else session.marglik_loader]
        self._evidence_name = "train_loader" if session.marglik_loader is None else "marglik_loader"
        for loader, name in zip(self._loaders, ("train_loader", self._evidence_name), strict=True):
            require_passes(loader, f"marglik_training: {name}")
        self._checkpoint = Checkpoint(session.checkpoint if first else None)
        if self._ranks.group is not None:
            require_served(self.model, self._loaders, steps.cuda_graph, self._ranks)
        steps.check_schedule(session.learn)
        la = self._new_laplace(sigma_noise=prior.sigma_noise_init)  # refuses what no evidence step could do
        evidence = steps.objective == "evidence"
        if evidence and session.marglik_loader is None and getattr(train_loader, "augment", None) is not None:
            raise ValueError(
                "marglik_training: marglik_loader must be given where train_loader augments its images: the evidence is that of the data "
                "as they are. Pass a TensorLoader of the same data without augment."
            )
        self._prior = Prior(self.model, self._likelihood, la, prior)
        self._prior.graphs = CudaGraphs if steps.cuda_graph else None
        self._optimizer = make_optimizer(steps.optimizer_cls, self._prior.parameters, steps.optimizer_kwargs)
        groups = self._prior.described(self._optimizer)  # before a scheduler changes their rates
        self._scheduler = make_scheduler(steps.scheduler_cls, self._optimizer, steps.scheduler_kwargs)
        self._step = TrainingStep(self.model, self._optimizer, self._prior.parameters, self._likelihood)
        self._together = None if self._ranks.group is None else StepTogether(self._step, self._ranks)
        device = self._prior.parameters[0].device
        self._graphed = GraphedStep(self._step, CudaGraphs(device)) if steps.cuda_graph else None
        of_words = learners_of(session.learn, self.model, steps.before_the_last, of_learners)
        self.learners: list[Learner] = [self._prior, *of_words]
        self._points, self._evidence_points = points_of_both(
            train_loader,
            session.marglik_loader if evidence else None,
            session.n_data,
            session.progress_bar and first,
            self._keys,
        )
        if evidence and steps.evidence_batch is not None:
            require_shuffled(self._loaders[1], f"marglik_training: {self._evidence_name}: evidence_batch")
        self._evidence_loader = self._own_part(self._loaders[1])
        self._augment, self._aug_sampling = augment_of(self.model), of_learners.get("aug_sampling")
        if self._augment is not None:
            with kept_random_state(self._loaders), self._held():  # refuses a sampling that it does not have
                pass
        self._settings = {
            "likelihood": repr(self._likelihood),
            **curvature.settings,
            **steps.schedule,
            "learn": [learner.name for learner in of_words],
            "parameters": self._prior.names,
            "optimizer_cls": name_of(steps.optimizer_cls),
            "optimizer_kwargs": in_words(steps.optimizer_kwargs),
            "optimizer_groups": groups,
            "scheduler_cls": None if steps.scheduler_cls is None else name_of(steps.scheduler_cls),
            "scheduler_kwargs": in_words(steps.scheduler_kwargs),
            "n_data": self._points.count,
            "depends_on": in_words(session.depends_on),
            "augment": repr(self.model.augment) if isinstance(self.model, AveragedFunction) else None,
            "aug_sampling": self._aug_sampling,
            "keep": steps.keep,
        }
        for learner in self.learners:
            add_settings(self._settings, learner)
        if self._checkpoint:
            warn_of_unsaved_state(self._loaders)
            self._describe_data()
            for learner in self.learners:
                require_loadable(learner)
        self._bar = {"desc": session.description, "disable": not (session.progress_bar and first)}
        self.epochs = 0
        self.margliks: list[float] = []
        self.losses: list[float] = []
        self.history: list[dict[str, Any]] = []
        self.la: KronLaplace | None = None
        self._accuracy: float | None = None
        self._tried = False
        self._random_at_fit: dict[str, Any] | None = None
        self._best: dict[str, Any] | None = None

    @differentiating
    def run(self) -> KronLaplace:
        """Epochs, evidence steps and checkpoints from where the training is, or its checkpoint was, to the last epoch; returns the
        Laplace approximation at the weights that are kept, not fitted for "map"."""
        last = self._steps.n_epochs
        with ExitStack() as stack:
            self._ranks.together(lambda: stack.enter_context(self._checkpoint.claimed()))
            state = self._ranks.from_first(self._ranks.together(self._checkpoint.read))
            if state is not None:
                self._ranks.together(lambda: self._restore(self._checkpoint.source, state))
            with tqdm(total=last, initial=self.epochs, unit="epoch", **self._bar, **bar_size()) as bar:
                while self.epochs < last:
                    loss, accuracy = self.epoch()
                    shown = {"loss": f"{loss:.3f}"} | ({} if accuracy is None else {"acc": f"{100 * accuracy:.1f}%"})
                    if self.epochs % self._steps.marglik_frequency == 0 or self.epochs == last:
                        if self._has_evidence and self.epochs > self._steps.n_epochs_burnin:
                            bar.set_postfix(shown | {"-log q/N": "..."})  # it takes as long as some epochs
                            shown["-log q/N"] = f"{self.evidence_step().neg_log_marginal_likelihood:.3f}"
                        else:
                            self._record()
                        self._ranks.together(self._save)
                    bar.set_postfix(shown, refresh=False)
                    bar.update()
        return self.finish()

    @differentiating
    def finish(self) -> KronLaplace:
        """End a loop of a user's own: with ``keep="best"`` the network, precisions and noise are those of the highest evidence again, amounts
        and other buffers included; returns the Laplace approximation at the weights that are kept, fitted once more where the last fit is
        of others, not fitted for "map"."""
        self._require_level()
        if self._best is not None and self._on_any(self.la is None or not self._is_at_best()):
            self.model.load_state_dict(self._best["model"])
            torch.clear_autocast_cache()
            self._prior.put(self._best["log_precision"], self._best["log_sigma"])
            self._random_at_fit, self.la = self._best["random_at_fit"], None
            if self._graphed is not None:
                self._graphed.forget()
        if self._on_any(self.la is None or not self._is_present(self.la) or self._is_of_subset):
            self.la = self._new_laplace()
            # The fit of a finished run, resumed, of the best evidence again, or of a network that moved on since.
            if self._has_evidence:
                with self._as_at_fit(), self._differentiable():
                    self._fit(self.la)
        if self._has_evidence and self._calibrate and self._likelihood.has_classes:
            with self._as_at_fit():
                chosen = self._ranks.from_first(
                    self._ranks.together(lambda: self._calibrated() if self._ranks.is_first else None)
                )
            self.la.predictive_prior_precision = chosen
        return self.la

    def _calibrated(self) -> Tensor | None:
        return calibrated(self.la, self._loaders[1], not self._bar["disable"])

    @contextmanager
    def _as_at_fit(self) -> Iterator[None]:
        """For the duration of the context all generators, and the copies' draws, are those of the last evidence step's fit."""
        with kept_random_state(self._loaders):
            if self._random_at_fit is not None:
                restore_own_random_state(self._random_at_fit, self._loaders, self._device, self._ranks)
            else:
                share_random_state(self._loaders, self._device, self._ranks)
            with self._held():
                yield

    @property
    def _has_evidence(self) -> bool:
        return self._steps.objective == "evidence"

    @property
    def _device(self) -> torch.device:
        return self._prior.parameters[0].device

    def _on_any(self, here: bool) -> bool:
        """Whether it is so on any rank: what decides on work that waits for others must not follow from one rank alone."""
        return any(self._ranks.exchange(here))

    def _require_level(self, **facts: Any) -> None:
        """ValueError where ranks are not equally far, by which they would wait for each other in vain."""
        if self._ranks.group is not None:
            done = {"number of epochs done": self.epochs, "number of evidence steps done": len(self.margliks), **facts}
            self._ranks.require_same_facts(
                self._ranks.exchange(done), "Load one state on all ranks, and let all do the same steps."
            )

    @property
    def _is_of_subset(self) -> bool:
        """Whether the last fit is of an evidence step's subset."""
        return self._steps.evidence_batch is not None and self.la.n_data < self._evidence_points.count

    def _own_part(self, loader: Iterable[Any]) -> Iterable[Any]:
        """This rank's batches of a loader that all have alike."""
        ranks = self._ranks
        return loader if ranks.group is None else Shard(loader, ranks.rank, ranks.size, ranks.group)

    def _fit(self, la: KronLaplace, loader: Iterable[Any] | None = None) -> None:
        """Fit to the evidence's data, or this rank's part of a subset, all ranks' where there are several."""
        la.fit(self._evidence_loader if loader is None else loader, group=self._ranks.group)

    def _random_state(self) -> dict[str, Any]:
        return own_random_state(self._loaders, self._device, self._ranks)

    def _save(self) -> None:
        if self._checkpoint:
            self._checkpoint.save(self.state_dict())

    def _is_at_best(self) -> bool:
        """Whether the last evidence step is the best one, and the network where it was there: learners inside of it move after the
        evidence is known, and a loop of a user's own may train on."""
        if self.margliks[-1] > min(self.margliks):
            return False
        present = self.model.state_dict()
        return all(
            isinstance(value, Tensor) and torch.equal(value, present[name].to(value.device))
            for name, value in self._best["model"].items()
        )

    @staticmethod
    def _is_present(la: KronLaplace) -> bool:
        """Whether the fit is of the network as it is."""
        try:
            la.fitted_model.require_unchanged()
        except RuntimeError:
            return False
        return True

    @differentiating
    def epoch(self) -> tuple[float, float | None]:
        """One pass of steps on the weights; returns its mean loss, the prior's term included, and the accuracy of its batches as they
        were seen, None without classes. Before its first step the first one tries the evidence on a few images."""
        if self._has_evidence and not self._tried:
            whole = self._loaders[1]  # the first images of all, alike on all ranks
            with self._differentiable():
                self._ranks.together(
                    lambda: try_evidence(self._new_laplace(), whole, self._evidence_name, self._try_gradients)
                )
            self._tried = True
        self._ranks.together(lambda: self._prior.require_parameters_of(self.model))
        known = (self._loaders[0], self._keys, self._points, self._scheduler, self._prior, self.epochs + 1)
        share_random_state(self._loaders, self._device, self._ranks)
        if self._together is None:
            loss, self._accuracy = train_epoch(self._step, self._graphed, *known)
        else:
            loss, self._accuracy = train_epoch_together(self._together, *known)
        torch.clear_autocast_cache()  # which a caller's autocast filled before the steps
        self._ranks.together(lambda: self._prior.check_finite(self.epochs + 1))
        self.epochs += 1
        self.losses.append(loss)
        return loss, self._accuracy

    def _try_gradients(self, la: KronLaplace, loader: Iterable[Any]) -> None:
        """Have the learners whose gradients are their own refuse what these do not serve."""
        for learner in self.learners:
            if learner.tensors():
                learner.gradients(la, loader)

    @differentiating
    def evidence_step(self, last: bool | None = None) -> Evaluation:
        """Fit the Laplace approximation at the present weights and let the learners step on its evidence.

        Args:
            last: no epoch follows, so that learners inside the network stay where they are and ``la`` is of the network as it is. None:
                whether ``n_epochs`` are done.

        Returns:
            What is recorded of it, in ``history`` too. Its evidence is that at the new precisions, before the network changed.

        Raises:
            ValueError: the objective is "map"; a pass over the evidence's data yields another number of points than N.
            FloatingPointError: a factor, the likelihood or a learner's gradient is not finite.
        """
        if not self._has_evidence:
            raise ValueError("evidence_step: objective='map' has no evidence steps; pass objective='evidence'.")
        last = self.epochs >= self._steps.n_epochs if last is None else bool(last)
        self._require_level(last=last)
        share_random_state(self._loaders, self._device, self._ranks)
        self._random_at_fit = self._random_state()
        self.la = None  # before the next one is made, or the factors of both are in memory
        with self._held():
            return self._evidence_step(last)

    def _evidence_step(self, last: bool) -> Evaluation:
        la, loader, size = self._new_laplace(), self._evidence_loader, self._steps.evidence_batch
        if size is not None:
            where = f"marglik_training ({self._evidence_name})"
            loader = self._own_part(
                self._ranks.together(lambda: first_points(self._loaders[1], size, where, self._keys))
            )
        inside = [learner for learner in self.learners if learner.tensors()]
        outside = [learner for learner in self.learners if learner not in inside]
        with self._differentiable():
            self._fit(la, loader)
        if size is None:
            self._evidence_points.require(la.n_data)
        of = la.n_data if size is None else self._evidence_points.count
        with sharing_prior(la, of):
            step_together(la, self._prior, outside, self._ranks)
            evaluation = self._ranks.together(lambda: self._evaluation(la))
        evaluation.neg_log_marginal_likelihood = self._ranks.from_first(evaluation.neg_log_marginal_likelihood)
        self.margliks.append(evaluation.neg_log_marginal_likelihood * of)
        self.la = la
        if self._steps.keep == "best" and self.margliks[-1] <= min(self.margliks):
            self._best = {
                "epoch": self.epochs,
                "model": {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in self.model.state_dict().items()
                },
                "log_precision": self._prior.log_precision.clone(),
                "log_sigma": self._prior.log_sigma.clone(),
                "random_at_fit": self._random_at_fit,
            }
        if inside and not last:
            self._move_network(la, inside, loader)
        if self._graphed is not None and (inside or bases_of(self.model)):
            self._graphed.forget()  # bases keep matrices, which are others now
        return self._record(evaluation)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the training goes on from, random generators included; with that of model and optimizer it shares their
        tensors. Loadable with ``weights_only=True``."""
        self._describe_data()
        state = {
            "epoch": self.epochs,
            "margliks": list(self.margliks),
            "losses": list(self.losses),
            "history": list(self.history),
            "random": self._random_state(),
            "random_at_fit": self._random_at_fit,
            "best": self._best,
            "settings": dict(self._settings),
            "threads": threads_of(self.model),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "learners": {learner.name: learner.state_dict() for learner in self.learners},
        }
        return plain(state)

    @differentiating
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was called, the global random generators and the loaders' own included.

        Raises:
            ValueError: the state is of other settings, data or another model, or an entry is missing or does not fit; nothing is changed
                then.
        """
        self._restore("the state", state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "MarglikTrainer: a trainer cannot be copied or pickled, for torch's schedules cannot; copy its state_dict, and load it into a "
            "trainer of the same arguments."
        )

    def _restore(self, source: str, state: Mapping[str, Any]) -> None:
        self._describe_data()
        restore(
            source,
            without_cuda(state, self._ranks),
            self._settings,
            self.model,
            self._optimizer,
            self._loaders,
            scheduler=self._scheduler,
            learners=self.learners,
        )
        restore_own_random_state(state["random"], self._loaders, self._device, self._ranks)
        torch.clear_autocast_cache()
        # Rates as they were rounded at first.
        self._settings = {**self._settings, "optimizer_groups": state["settings"]["optimizer_groups"]}
        self.margliks, self.losses, self.history = (list(state[key]) for key in ("margliks", "losses", "history"))
        self.epochs, self._random_at_fit, self.la = state["epoch"], state.get("random_at_fit"), None
        self._best = state.get("best")
        if self._graphed is not None:
            self._graphed.forget()

    def described_settings(self) -> dict[str, Any]:
        """What processes that train together must agree on: settings, dtypes, what decides on passes and on their batches."""
        self._describe_data()
        plans = {
            f"plan of {name}": in_words({key: getattr(loader, key, None) for key in PLAN})
            | {"generators": len(random_state([loader])["loaders"])}
            for name, loader in zip(("train_loader", "marglik_loader"), self._loaders, strict=True)
        }
        points = (self._points, self._evidence_points)
        return {
            "dtype": ", ".join(
                sorted({str(t.dtype) for t in self.model.state_dict().values() if isinstance(t, Tensor)})
            ),
            "marglik_loader": self._evidence_name == "marglik_loader",
            "dict_key_x": self._keys.x,
            "dict_key_y": self._keys.y,
            **plans,
            **self._settings,
            "n_data": [[one.count, bool(one.source)] for one in points],
        }

    def _describe_data(self) -> None:
        """Digests of the data, among the settings; they take a pass over their bytes."""
        if "data" not in self._settings:
            digests = map(data_digest, self._loaders)
            self._settings["data"] = dict(zip(("training", "evidence"), digests, strict=True))

    def _new_laplace(self, **values: Any) -> KronLaplace:
        curvature = self._curvature
        la = KronLaplace(self.model, self._likelihood, **values, **curvature.settings, **curvature.keys)
        if not values:
            set_values(la, self._prior.precision(), self._prior.sigma(), checked=True)
        return la

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        with ExitStack() as stack:
            for learner in self.learners:
                stack.enter_context(learner.differentiable())
            yield

    @contextmanager
    def _held(self) -> Iterator[None]:
        """For the duration of the context, all passes over the evidence's data average over the same draws."""
        if self._augment is None:
            yield
            return
        with self._augment.held(sampling=self._aug_sampling):
            yield

    def _move_network(self, la: KronLaplace, learners: Sequence[Learner], loader: Iterable[Any]) -> None:
        """One step of learners inside the network, all along the gradient at the present values, of this rank's part of the fit's data.

        Raises:
            FloatingPointError: a gradient is not finite; nothing has moved then.
        """
        found = {}
        for learner in learners:
            # A rank draws for its own data alone; batches must be of one plan.
            share_random_state(self._loaders, self._device, self._ranks)
            found[learner] = self._ranks.together(lambda its=learner: its.gradients(la, loader))
        self._ranks.together(lambda: self._complete(la, learners, found))
        require_same_gradients(found, self._ranks)
        self._ranks.together(lambda: [learner.step(la, its_own) for learner, its_own in found.items()])
        share_learners(learners, self._ranks)

    def _complete(
        self, la: KronLaplace, learners: Sequence[Learner], found: dict[Learner, dict[str, Tensor] | None]
    ) -> None:
        """Add the gradients at held factors to those that are learners' own; FloatingPointError where one is not finite."""
        held = [
            (learner, *item) for learner in learners if found[learner] is None for item in learner.tensors().items()
        ]
        if held:
            with self._differentiable(), torch.enable_grad():
                evidence = la.log_marginal_likelihood() / la.n_data
                gradients = torch.autograd.grad(evidence, [tensor for *_, tensor in held])
            for (learner, name, _), gradient in zip(held, gradients, strict=True):
                found[learner] = {**(found[learner] or {}), name: gradient}
        for learner, its_own in found.items():
            for name, gradient in its_own.items():
                if not gradient.isfinite().all():
                    raise FloatingPointError(
                        f"marglik_training: after epoch {self.epochs} the evidence's gradient in {name!r} of the learner "
                        f"{learner.name!r} is not finite. Lower its learning rate, or leave it out of learn; the last checkpoint, if any, is "
                        "from before this step."
                    )

    @torch.no_grad()
    def _evaluation(self, la: KronLaplace | None) -> Evaluation:
        """What is recorded, of an evidence step with la's evidence, for one wait for the device; ValueError where a precision or the noise
        scale is not positive and finite."""
        bases, neg_log_q, effective = bases_of(self.model), None, None
        parts = [self._prior.of_tensors(), *(basis.inverse_lengthscale.double() for basis in bases.values())]
        if la is not None:
            terms = present_terms(la)
            parts += [terms.effective, torch.add(la.log_likelihood, terms.value, alpha=-0.5)]
        sigma, *numbers = torch.cat([part.reshape(-1) for part in (self._prior.sigma(), *parts)]).tolist()
        precisions, numbers = numbers[: len(parts[0])], numbers[len(parts[0]) :]
        check_positive("prior_precision", precisions)
        check_positive("sigma_noise", [sigma])
        if la is not None:
            neg_log_q = -numbers.pop() / la.n_data
            effective = dict(zip(la.parameter_names, numbers[len(bases) :], strict=True))
        records = {learner.name: learner.record() for learner in self.learners}
        return Evaluation(
            self.epochs,
            self.losses[-1] if self.losses else None,
            self._accuracy,
            neg_log_q,
            precisions,
            effective,
            sigma,
            dict(zip(bases, numbers, strict=False)),
            {name: record for name, record in records.items() if record is not None},
        )

    def _record(self, evaluation: Evaluation | None = None) -> Evaluation:
        evaluation = self._ranks.together(lambda: self._evaluation(None)) if evaluation is None else evaluation
        self.history.append(dataclasses.asdict(evaluation))
        shown = self._on_evaluation
        self._ranks.together(lambda: None if shown is None else shown(evaluation))
        return evaluation


def calibrated(la: KronLaplace, loader: Iterable[Any], progress_bar: bool = False) -> Tensor | None:
    """The precisions of la's predictions by :meth:`ella_cuda.laplace.KronLaplace.calibrate`; None, with a warning, where a data point has too
    many outputs for it."""
    try:
        if la.n_outputs > CALIBRATED_OUTPUTS:
            raise MemoryError(
                f"a data point has {la.n_outputs:,} outputs, and la.calibrate(loader) takes long with more than {CALIBRATED_OUTPUTS}."
            )
        la.log_marginal_likelihood()  # its eigenvalues first: those that come with a basis differ in the last bits
        with warnings.catch_warnings():  # there is no other network whose advice could be had
            warnings.filterwarnings("ignore", "calibrate: .* by heart", UserWarning)
            return la.calibrate(loader, progress_bar=progress_bar)
    except MemoryError as error:
        warnings.warn(f"predictions are not calibrated, and are by prior_precision: {error}", stacklevel=2)
        return None


def _averaged(model: nn.Module, augment: nn.Module | None) -> nn.Module:
    """The model, averaged over what ``augment`` makes of its inputs."""
    if augment is None:
        return model
    if isinstance(model, AveragedFunction):
        raise ValueError(
            "marglik_training: augment must be None where the model is an AveragedFunction, which has its own."
        )
    return AveragedFunction(model, augment)


def marglik_training(*args: Any, **kwargs: Any) -> Result:
    r"""Train ``model`` and learn one prior precision per parameter tensor by gradient ascent on the marginal likelihood.

    Every step minimises mean loss :math:`+ \frac{1}{2N} \sum_l \delta_l \|\theta_l\|^2`. After ``n_epochs_burnin`` epochs, every
    ``marglik_frequency`` epochs, one pass over ``marglik_loader`` accumulates the curvature at the present weights and
    ``n_hypersteps`` steps on :math:`\log\delta` (and :math:`\log\sigma`) raise the Laplace evidence. ``objective="map"`` is the
    same loop without evidence steps. Arguments named as in laplace-torch mean the same, and defaults are its own unless noted.

    Args:
        model: maps a batch to ``(N, K)`` or ``(N, ..., K)`` outputs (logits for classification). Trained in place.
        train_loader: yields ``(x, y)`` batches, or mappings, as :meth:`ella_cuda.laplace.KronLaplace.fit` takes them; they are moved to the
            model's device; iterated once per epoch.
        likelihood: "classification" (softmax over the last axis; y are class indices), "regression" (Gaussian), "binary" (logits), "poisson"
            (log rates), "heteroscedastic", or an object; see :class:`ella_cuda.laplace.KronLaplace`. A step's loss is the mean over data
            points of the sum over a point's targets.
        optimizer_cls: of the weights, called with their list. Default: Adam with its own defaults.
        optimizer_kwargs: its other arguments. Pass ``weight_decay=0`` to an optimizer that decays weights unasked, such as AdamW: the prior
            is the weight decay, and another is added to it, of which a warning tells.
        scheduler_cls: of the weights' learning rate, stepped after every batch. scheduler_kwargs: its arguments.
        n_epochs: passes over ``train_loader``.
        hyper_optimizer: what an evidence step does with the precisions and the noise scale, the curvature held. "adam": ``n_hypersteps``
            steps along the evidence's gradient, Adam's state kept from one evidence step to the next. "mackay": at most ``n_hypersteps`` of
            MacKay's fixed-point updates in closed form, fewer where they rest, each two thirds of its way in the logarithm: ten leave
            less than 2e-5 of it. The evidence does not fall, and precisions stay between 1e-6 and 1e10. It has no state.
        hyper_step_limit: of "mackay", the most that the logarithm of a precision, the noise's :math:`1/\sigma^2` too, may change in an
            evidence step, for the weights are no optimum at the new precisions yet; None is as far as the updates go. The default is a
            factor of ten.
        lr_hyp: Adam's learning rate on the log hyperparameters.
        prior_structure: which tensors share a precision: "layerwise" (none: one precision per tensor), "module" (the tensors of
            one module), "normalised" (all tensors that no normalisation layer follows; those of every layer that one follows, see
            :func:`ella_cuda.laplace.prior_groups`), "scalar" (all), or "unit": each output unit of a weight, a row or an output channel, has
            one, and each other tensor (see :attr:`ella_cuda.laplace.KronLaplace.unit_precisions`).
        n_epochs_burnin: the first evidence step is after the first multiple of ``marglik_frequency`` above it, as in the paper's
            recipe (laplace-torch does one at a multiple equal to it too).
        n_hypersteps: hyperparameter steps per evidence step, of "mackay" at most.
        marglik_frequency: epochs between evaluations (evidence step and checkpoint).
        prior_prec_init: δ at the start. With N data points the prior weighs δ/N against one data point's loss.
        sigma_noise_init: σ at the start, regression only. fix_sigma_noise: whether to keep it there.
        cuda_graph: whether to record a step as a CUDA graph, once for each shape of batch (at most eight), and replay it, so that the GPU
            does not wait for Python between small kernels; also Adam's step on the hyperparameters, once an evidence step. For models on
            CUDA whose work depends on shapes alone and that keep no tensor from one call to the next; optimizers with the option
            ``capturable``, such as Adam; schedules of the learning rate alone. Takes one more copy of weights and optimizer state: where a
            loss is not finite or a label no class, the epoch is done again without graphs, so that the error can name layer and step.
        learn: what the evidence learns beside the precisions. Words are of sparsified layers: "lengthscales" (log
            :math:`\omega` of every :class:`ella_cuda.nn.SpatialBasis`) and "anchors" (their locations, in pixels), and "augmentation", see
            ``augment``. At the end of every
            evidence step but one at the last epoch, which no training would follow, they make one Adam step
            along the evidence's gradient; one, because the data fit's part is a gradient at the present values. With
            ``objective="map"`` they stay. Beside words, objects of :class:`ella_cuda.training.Learner`: a
            :class:`ella_cuda.training.BufferLearner` learns other buffers of the network in the same way, a class of your own anything.
        learners: more objects for ``learn``.
        lr_lengthscales: Adam's learning rate on log ω.
        lr_anchors: Adam's learning rate on anchors, in pixels. Low, since where anchors nearly coincide the interpolating basis changes
            wholly over a fraction of their distance, and the network with it.
        hold_factors: whether the gradients in ω and anchors are those at held factors, as in the paper: the data fit's, and that of the
            factors' projections. Otherwise factors follow them (:func:`ella_cuda.laplace.evidence_gradient`), for some more passes over
            the data; the two may differ in sign.
        augment: a module ``(N, ...) -> (N, S, ...)`` such as :class:`ella_cuda.augment.AffineAugment`: what is trained, and returned, is
            ``AveragedFunction(model, augment)``. Epochs draw as its ``sampling`` says; the fit of an evidence step and its gradients hold one
            set of draws. With "augmentation" in ``learn`` the evidence learns its amounts by one Adam step at each evidence step, along the
            gradient with the factors in it (:func:`ella_cuda.laplace.evidence_gradient`); records have them by name.
        lr_aug: Adam's learning rate on amounts, in units of ``augment.raw``, by about which a step moves it at most. lr_aug_min: at the last
            step, along half a cosine; None keeps it. A warning tells where the sum of all steps' rates brings an amount not to its limit.
        aug_sampling: of evidence steps; None is the augmentation's own, but "shared" for "independent", whose draws act as noise that the
            evidence reduces.
        aug_data: data points of the gradient in amounts, a random part of each batch, weighted by N over their number; None is all.
        aug_columns: "all" columns of the output Hessian's square root in that gradient, or "one" at random, as for large data.
        keep: "last", or "best": at the end, parameters, buffers and precisions are those of the evidence step with the highest evidence.
        progress_bar: whether to show a tqdm bar with loss, accuracy and ``-log q/N``.
        objective: "evidence" or "map".
        fisher: "exact" or "mc" curvature in the evidence steps; see :class:`ella_cuda.laplace.KronLaplace`.
        resolution: "shared" or "per_channel" output factors of F-FC.
        approximation: "expand" or "reduce", for positions that share weights; see :class:`ella_cuda.laplace.KronLaplace`.
        unknown: "error", "freeze" or "diagonal", for parameters that no curvature rule knows; see there. With "freeze" they are trained,
            without a prior, and the evidence takes them for constants.
        column_tolerance: share of the output Hessian's trace that may be left out; see :class:`ella_cuda.laplace.KronLaplace`.
        dict_key_x: key of the model's input in batches that are mappings, where it is alone. dict_key_y: key of the targets there.
        ignore_index: label of positions that have no part in a classification's likelihood.
        hessian_structure, temperature, backend: laplace-torch's, not in the signature: "kron", 1 and None, which change nothing.
        marglik_loader: the training data without augmentation, for the evidence; default ``train_loader``, unless that is a
            :class:`ella_cuda.data.TensorLoader` that augments. Its first images are tried before the first step.
        evidence_batch: M, data points in an evidence step, the first of a new pass over a shuffled ``marglik_loader``; None is all N.
            Precisions, noise, amounts, lengthscales and anchors then move up the estimate of :func:`ella_cuda.laplace.evidence_bound`: sums
            over these data points, times N/M. The data fit's gradient, all that moves lengthscales and anchors beside the projections of held
            factors, is right on average over subsets. That of the log determinant is not: it is biased towards higher precisions, less with
            larger M. ``margliks`` and effective parameters are those of the M data points; ``la`` is fitted to all at the end.
        n_data: N, where it is not what a pass over ``train_loader`` and one over ``marglik_loader`` both yield: some images are drawn
            several times, dropped, or left out of the evidence. None takes N from the loader's ``dataset_size``, or from a
            ``DataLoader``'s data set and samplers; where these do not tell, batches are counted in one pass before the first step.
        checkpoint: a file, written atomically at every evaluation and at the end. If it exists, training resumes from it. On the
            CPU a resumed run gives the numbers of an uninterrupted one bit for bit on the same machine with the same number of torch's
            threads, and the same run up to rounding on another, which a warning says for threads. That covers what is drawn
            from the global generators of torch, numpy and Python and from the ``generator`` of a loader or of its samplers, by
            a ``DataLoader``'s workers too, which are seeded anew every epoch. It does not cover workers that go on from epoch to epoch
            (``persistent_workers=True``) or batches in the order in which they are ready (``in_order=False``), of both of which it
            warns; nor generators that a data set has of its own, where it is read in this process (``num_workers=0``), nor any other
            state that a loader or data set keeps from one epoch to the next. One call at a time works on a file.
            A file of other settings or other data is refused, as far as the data tell without a pass over them: by the loader's attribute
            ``data_digest`` (a string of your choice, None for unknown), which :class:`ella_cuda.data.TensorLoader` has, or the tensors of a
            DataLoader's ``TensorDataset``; for others by the number of data points alone.
        depends_on: what else the numbers depend on, by name, such as how the data were made; a checkpoint of another is refused.
        on_evaluation: called with an :class:`Evaluation` after every evaluation.
        description: of the progress bar.
        group: a ``torch.distributed`` group, such as ``torch.distributed.group.WORLD``, whose processes train together; all call this with
            the same arguments, networks in the same state and the same whole loaders. Each takes a slice of every batch of
            ``train_loader`` and whole batches of ``marglik_loader``; the numbers are those of one process up to rounding, but for what a
            network draws. All generators are set to rank 0's at the start of an epoch and of an evidence step. Rank 0 alone shows a bar,
            writes the checkpoint, which has nothing of the group in it; the first rank that has an ``on_evaluation`` calls it, so that both
            may be given on rank 0 alone. What one rank raises, all raise. A loader with a method ``parts``, as
            :class:`ella_cuda.data.TensorLoader` has, makes its slices alone.
        calibrate: whether, with "evidence" and a likelihood with classes, :meth:`ella_cuda.laplace.KronLaplace.calibrate` chooses the
            precisions of ``la``'s predictions on data points of ``marglik_loader``, in the random state of the last fit. False: predictions
            are by the learned precisions, as in laplace-torch. A regression's always are: the rule compares with the noise at the training
            data, and leaves no error bars away from these. Where the network knows its labels by heart, predictions stay near the softmax;
            ``la.calibrate(folds=...)`` sees more. Of several processes rank 0 chooses. Where a data point has too many outputs for the memory
            budget, a warning says so, and predictions are by the learned precisions.

    Returns:
        ``(la, model, margliks, losses)``: the Laplace approximation at the last weights (fitted for "evidence"; for "map" not fitted, call
        ``la.fit``, and ``la.calibrate`` before predictions), the trained model, ``-log q`` after every evidence step, and the mean loss of
        every epoch, the prior's term included.
        Unlike laplace-torch, the last weights are kept, unless ``keep="best"``.

    Raises:
        TypeError: an argument is of a wrong type; layers have no curvature rule, all of which are named; a loader yields something else
            than pairs or mappings, or can be passed over once only; a schedule whose ``step`` needs arguments, after the first batch.
        ValueError: an argument out of range, or a burn-in that leaves no epoch for an evidence step; outputs or labels that do not fit
            the likelihood; an empty loader; a pass with another number of data points than N; a checkpoint of other settings or
            data, or one that cannot be read.
        OSError: the checkpoint cannot be written.
        RuntimeError: another call, of this process or another, works on the checkpoint; an optimizer's step asks for a closure.
        FloatingPointError: the loss, a factor, or a parameter after an epoch is not finite; the message names layer, epoch and
            step. The last good checkpoint stays.

    Source: Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning", ICML 2021, algorithm 1;
    van der Ouderaa et al., NeurIPS 2023, section 5.
    """
    trainer = MarglikTrainer(*args, **kwargs)
    la = trainer.run()
    return la, trainer.model, trainer.margliks, trainer.losses


marglik_training.__signature__ = signature(MarglikTrainer, Result)  # type: ignore[attr-defined]
MarglikTrainer.__signature__ = signature(MarglikTrainer, None)  # type: ignore[attr-defined]

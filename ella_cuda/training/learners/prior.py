"""The prior's precisions and the likelihood's noise scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, Likelihood
from ella_cuda.laplace.base import BaseLaplace
from ella_cuda.laplace.evidence import set_values
from ella_cuda.laplace.prior_structure import group_indices
from ella_cuda.laplace.tuning import climb, fixed_points, groups_of
from ella_cuda.training.checks import in_words
from ella_cuda.training.learners.learner import Learner

if TYPE_CHECKING:
    from ella_cuda.training.arguments import PriorOptions

HyperOptimizer = Literal["adam", "mackay"]
HYPER_OPTIMIZERS: tuple[str, ...] = get_args(HyperOptimizer)
STEP_LIMIT = 2.3  # of a logarithm: a factor of ten


class Prior(Learner):
    """Log precisions, one per group of parameter tensors or per output unit, and the log noise scale; float64 whatever the model's dtype.

    Args:
        model: of the parameters.
        likelihood: whether there is a noise scale to learn.
        la: of the trainable parameters that have a precision; others are trained without a prior.
        options: :class:`ella_cuda.training.arguments.PriorOptions`.
    """

    name = "prior"
    graphs: Callable[[torch.device], Any] | None = None  # what makes the CudaGraphs that record steps of Adam

    def __init__(self, model: nn.Module, likelihood: Likelihood, la: BaseLaplace, options: PriorOptions) -> None:
        self._options = options
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(la.parameter_names)
        self._all_names = [*self.names, *(name for name in named if name not in set(self.names))]
        self.parameters = [named[name] for name in self._all_names]  # those without a precision come last
        device = self.parameters[0].device
        self.groups, self.has_units = groups_of(la, options.prior_structure), options.prior_structure == "unit"
        self._units = [*la._units.values()] if self.has_units else []  # of each tensor
        # Of each tensor's precision; of units a tensor has several.
        self.numbers = [] if self.has_units else group_indices(options.prior_structure, self.names, model)
        like: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.log_precision = torch.full((self.groups.count,), math.log(options.prior_prec_init), **like)
        self.log_sigma = torch.tensor(math.log(options.sigma_noise_init), **like)
        self._learns_sigma = likelihood.has_noise and not options.fix_sigma_noise
        if options.hyper_optimizer == "adam":
            learned = [self.log_precision, *([self.log_sigma] if self._learns_sigma else [])]
            self.optimizer = torch.optim.Adam(learned, lr=options.lr_hyp, fused=True)

    def precision(self) -> Tensor:
        """δ, one per parameter tensor or unit."""
        return self.groups.spread(self.log_precision.exp())

    def of_tensors(self) -> Tensor:
        """δ, one per parameter tensor, the geometric mean of its units'."""
        if not self.has_units:
            return self.precision()
        return torch.stack([part.mean() for part in self._of_units(self.log_precision)]).exp()

    def of_parameters(self) -> Tensor | list[Tensor]:
        """δ, one per parameter tensor in one vector; of units as large as each tensor that has a precision."""
        if not self.has_units:
            return self.precision().detach()
        parts = zip(self._units, self._of_units(self.precision().detach()), self.parameters, strict=False)
        return [shape.of_elements(own).view_as(p) for shape, own, p in parts]

    def _of_units(self, values: Tensor) -> tuple[Tensor, ...]:
        return values.split([shape.unit_count for shape in self._units])

    def sigma(self) -> Tensor:
        """σ, 0-dim."""
        return self.log_sigma.exp()

    def described(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The optimizer's groups in words: each one's numbers, such as its learning rate, and its parameters by name."""
        names = dict(zip(map(id, self.parameters), self._all_names, strict=True))
        return [
            in_words({key: value for key, value in group.items() if key != "params"})
            | {"params": [names.get(id(p), "?") for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def require_parameters_of(self, model: nn.Module) -> None:
        """ValueError where the model's trainable parameters are not those that the optimizer and the precisions belong to."""
        present = {name: p for name, p in model.named_parameters() if p.requires_grad}
        mine = dict(zip(self._all_names, self.parameters, strict=True))
        changed = [name for name in {**mine, **present} if mine.get(name) is not present.get(name)]
        if changed:
            raise ValueError(
                f"marglik_training: the model's parameters must stay those that training began with, but {changed[0]!r} was exchanged, "
                "frozen, unfrozen, added or removed since; change values in place (load_state_dict without assign), or train anew."
            )

    def check_finite(self, epoch: int) -> None:
        """Raise FloatingPointError when a parameter is not finite: such weights must not replace a good checkpoint."""
        bad = ~torch.stack([norm.isfinite() for norm in torch._foreach_norm([p.detach() for p in self.parameters])])
        if bad.any():
            name = self._all_names[int(bad.nonzero()[0])]
            raise FloatingPointError(
                f"marglik_training: the parameter {name} is not finite after epoch {epoch}, although the loss was: a gradient or the "
                "optimizer's step was not. Lower the learning rate, or look for values in the data that are not finite, or for a function "
                "with an infinite derivative in the model; the last checkpoint, if any, is from before this epoch."
            )

    def step(self, la: KronLaplace, gradients: Mapping[str, Tensor]) -> None:
        """Steps with the curvature held; la has the last ones' values, which are finite where la's evidence step reads them."""
        steps = self._options.n_hypersteps
        if self.optimizer is None:
            limit = self._options.hyper_step_limit
            log_precision, log_sigma, _ = fixed_points(la, steps, self.groups, self._learns_sigma, limit=limit)
            self.put(log_precision, log_sigma if self._learns_sigma else self.log_sigma)
        else:
            graphs = None if self.graphs is None or self.has_units else self.graphs(self.log_sigma.device)
            climb(la, self.optimizer, self.groups, steps, 1 / la.n_data, graphs, progress_bar=False)
        set_values(la, self.precision(), self.sigma(), checked=True)

    def settings(self) -> dict[str, Any]:
        unused = {"mackay": (), "adam": ("hyper_step_limit",)}[self._options.hyper_optimizer]
        return {key: value for key, value in dataclasses.asdict(self._options).items() if key not in unused}

    def state_dict(self) -> dict[str, Any]:
        values = {"log_precision": self.log_precision.clone(), "log_sigma": self.log_sigma.clone()}
        return values | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.put(state["log_precision"], state["log_sigma"])
        super().load_state_dict(state)

    def put(self, log_precision: Tensor, log_sigma: Tensor) -> None:
        """Set the values."""
        self.log_precision.copy_(log_precision)
        self.log_sigma.copy_(log_sigma)

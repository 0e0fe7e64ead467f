"""One step on the weights: data loss, the prior's gradient, the optimizer. What it adds up over an epoch stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, model_outputs, run_model, tensors_of
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.likelihoods import Likelihood
from ella_cuda.ops._precision import casting_anew, without_autocast


class TrainingStep:
    r"""Steps along the gradient of mean loss :math:`+ \frac{1}{2N} \sum_l \delta_l \|\theta_l\|^2`.

    Everything that changes from step to step or from epoch to epoch is in tensors that stay where they are, and a step without
    checks reads nothing back: what it does on the device is the same work on the same tensors every time.

    Attributes:
        total: 0-dim, float64: sum of the data losses of the epoch's images.
        correct, counted: 0-dim, float64: number of the epoch's targets that were predicted, and of those that could be; of a likelihood
            with classes.
        likelihood: whose loss it takes.
        variance: 0-dim: of the epoch's noise.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], likelihood: Likelihood
    ) -> None:
        self.model, self.optimizer, self.parameters = model, optimizer, list(parameters)
        self.likelihood = likelihood
        like = self.parameters[0]
        sums = (torch.zeros((), dtype=torch.float64, device=like.device) for _ in range(3))
        self.total, self.correct, self.counted = sums
        self._weights = like.new_zeros(len(self.parameters))  # δ/N
        self._weight_of = list(self._weights.unbind())
        self.variance = like.new_zeros(())

    def begin_epoch(self, precision: Tensor | Sequence[Tensor], sigma: float, n_data: int) -> float:
        """Start the epoch's sums at the precisions of the first parameter tensors, a number for each or as large as each, and the noise
        scale; the others have no prior. Returns the prior's part of the objective at the present weights."""
        with torch.no_grad():
            self.variance.fill_(sigma**2)
            for total in (self.total, self.correct, self.counted):
                total.zero_()
            if isinstance(precision, Tensor):
                weights = F.pad(precision / n_data, (0, len(self.parameters) - len(precision)))
                self._weights.copy_(weights)
                norms = torch.stack([n.double() for n in torch._foreach_norm(self.parameters)])
                return float((0.5 * weights * norms.square()).sum())
            for place, own in enumerate(precision):
                if not self._weight_of[place].dim():  # recorded steps read where the first epoch has put it
                    self._weight_of[place] = torch.empty_like(self.parameters[place])
                self._weight_of[place].copy_(own / n_data)
            pairs = zip(precision, self.parameters, strict=False)
            return float(sum(0.5 / n_data * (own * p.double().square()).sum() for own, p in pairs))

    def epoch_means(self, images: int) -> tuple[float, float | None]:
        """Mean of the data losses of the epoch's images, and share of the targets that were predicted; None where there are no classes, or
        no targets."""
        counted = float(self.counted)
        return float(self.total) / images, float(self.correct) / counted if counted else None

    def checked(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y; TypeError or ValueError where outputs and y do not fit the likelihood. Reads labels back from the device."""
        with torch.no_grad():
            self.likelihood.check(outputs, y)
        return y

    def __call__(
        self,
        x: Inputs,
        y: Tensor,
        checked: Callable[[Tensor, Tensor], Tensor],
        check_loss: Callable[[Tensor], None],
    ) -> None:
        """One step on a batch.

        Args:
            x: the batch, of at least one image. y: its targets, as the likelihood takes them.
            checked: ``(outputs, y) -> y``, such as :meth:`checked`, called before anything is done with them: labels that are no class
                fail later on, on CUDA beyond repair.
            check_loss: called with the 0-dim data loss before the weights change.

        Raises:
            What the checks raise. RuntimeError: the optimizer's step asks for a closure.
        """
        device = self.variance.device.type
        with casting_anew(device):
            outputs = model_outputs(self.model, x)
        # As torch asks: the backward of each operation is then in its forward's precision.
        with without_autocast(device):
            y = checked(outputs, y)
            loss = self.likelihood.loss(outputs, y, self.variance)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        with torch.no_grad():
            check_loss(loss)
            self.add_prior()
            self.total.add_(loss, alpha=len(y))
            if self.likelihood.has_classes:
                right, of = self.likelihood.hits(outputs, y)
                self.correct.add_(right)
                self.counted.add_(of)
        self.move()

    def add_prior(self) -> None:
        """Add the prior's gradient to the parameters', in one call: temporaries of all weights would cost a page fault for every 4 KiB."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in self.parameters]
        torch._foreach_addcmul_(grads, self.parameters, self._weight_of)

    def move(self) -> None:
        """The optimizer's step; RuntimeError where it asks for a closure."""
        try:
            with without_autocast(self.variance.device.type):
                self.optimizer.step()
        except (AssertionError, TypeError) as error:  # it asserts that there is a closure, or calls it
            raise RuntimeError(
                f"marglik_training: the step of optimizer_cls, a {type(self.optimizer).__name__}, raised {error!r}; it is called without a "
                "closure. Use an optimizer that steps along a gradient, such as torch.optim.Adam or SGD."
            ) from error


def what_is_not_finite(model: nn.Module, x: Inputs, y: Tensor) -> str:
    """Why the loss of a batch is not finite, and what to do: the batch, its targets, or the first layer whose parameters or output are
    not finite for it."""
    for what, parts in (("the batch itself is", tensors_of(x)), ("the batch's targets are", [y])):
        if not all(torch.isfinite(part).all() for part in parts):
            return f"{what} not finite: check the data set and what it does to its examples for nan and inf"
    found: list[str] = []
    names = {m: name for name, m in model.named_modules() if name and not any(m.children())}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if not torch.isfinite(parameter).all():
                found.append(
                    f"{names[module]!r} (its parameter {parameter_name}) since before this step, perhaps because a batch before this one "
                    "had nan or inf in it"
                )
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            found.append(f"{names[module]!r} (its output)")

    with torch.no_grad(), hooks(names, after=look):
        run_model(model, x)
    where = (
        f"the first layer that is not finite is {found[0]}"
        if found
        else "all layers are finite: the loss or the prior overflowed"
    )
    return f"{where}. Lower the learning rate or raise prior_prec_init"

"""The model of an approximation: the parameters that have a posterior, rules of its layers, and its function at the fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import DictKeys, Inputs, inputs_on, map_tensors, pair_on
from ella_cuda.laplace.copies import require_served, with_draws
from ella_cuda.laplace.fingerprint import filled_since, fingerprint_of
from ella_cuda.laplace.known_model import FunctionDescription
from ella_cuda.laplace.parameters import (
    FittedBases,
    is_inside,
    require_local,
    require_no_inference,
    trainable,
)
from ella_cuda.laplace.rules.base import Rule
from ella_cuda.laplace.rules.network import restricted, rules_for
from ella_cuda.modes import exclusively
from ella_cuda.nn._autocast import widened
from ella_cuda.ops._precision import autocast_is_on


class FittedModel:
    """A model some of whose parameters have a posterior, and its state at the fit.

    Args:
        model: the network.
        owner: name of the approximation's class, for messages.
        keys: of batches that are mappings.
        settings: ``resolution``, ``approximation``, ``unknown`` and ``subset_of_weights`` of :class:`ella_cuda.laplace.KronLaplace`.

    Attributes:
        parameter_names: of the tensors with a posterior, in ``model.named_parameters()`` order.
        numels: entries of each of these. device: where they are. zero: 0-dim float64, there.
        fingerprint: sum over the numbers of the model at the fit, 0-dim float64; None before.
        filled: names of buffers that the forward fills itself.
        draws: of the copies that the model averages over, for all data points; None of other models.
        inputs_shape: of a data point of the last batch; None where the inputs are no tensor.

    Raises:
        TypeError, ValueError, RuntimeError: see :class:`ella_cuda.laplace.KronLaplace`.
    """

    fingerprint: Tensor | None
    _function: FunctionDescription | None

    def __init__(self, model: nn.Module, owner: str, keys: DictKeys, **settings: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{owner}: model must be a torch.nn.Module, got {type(model).__name__}.")
        require_local(model)
        self.model, self.owner, self.keys = model, owner, keys
        self.subset_of_weights = settings.pop("subset_of_weights")
        self._settings = settings
        with exclusively(model):
            trainable(model)  # refuses what no rule could serve
            self.parameter_names: list[str] = []
            parameters = self._served(self.present_rules())
            require_no_inference(parameters)
            self.parameter_names = list(parameters)
            self.describe(parameters)
        self.draws: Tensor | None = None
        self.forget()

    def describe(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the sizes and the device of these parameters, and the modules."""
        self.numels = [p.numel() for p in parameters.values()]
        self.device = next(iter(parameters.values())).device
        self.zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self._modules = list(self.model.modules())  # an evidence step is shorter than a walk through them

    def forget(self) -> None:
        """Be unfitted."""
        self.fingerprint, self.filled, self.inputs_shape = None, frozenset(), None
        self.bases = FittedBases(self.model)
        # None where it is that of the model at its first use.
        self._function = FunctionDescription(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return self.model.get_parameter(self.parameter_names[0]).dtype

    def parameters(self) -> list[nn.Parameter]:
        """The tensors of ``parameter_names``."""
        return [self.model.get_parameter(name) for name in self.parameter_names]

    def has_hyperparameters(self) -> bool:
        """Whether a buffer requires a gradient."""
        return any(b.requires_grad for m in self._modules for b in m._buffers.values() if b is not None)

    # layers and parameters as they are -------------------------------------------------------------------------------

    def present_rules(self) -> list[Rule]:
        """New rules, without factors, of the model's layers as they are; raises as :func:`ella_cuda.laplace.rules.rules_for`, of layers in
        ``subset_of_weights``."""
        rules = self._rules_of_subset() or restricted(rules_for(self.model, **self._settings), self.subset_of_weights)
        require_served(self.model, rules)
        return rules

    def _rules_of_subset(self) -> list[Rule] | None:
        """The rules of a subset, beside which other layers need none; None of all layers, and where the subset itself lacks a rule."""
        subset = self.subset_of_weights
        known = subset == "last_layer" or (isinstance(subset, Iterable) and not isinstance(subset, str))
        if not known or self._settings["unknown"] != "error":
            return None
        parameters = trainable(self.model)
        if subset == "last_layer":
            layer = [*parameters][-1].rpartition(".")[0]
            inside = [p for name, p in parameters.items() if name.rpartition(".")[0] == layer]
        else:
            inside = [p for name, p in parameters.items() if any(is_inside(name, one) for one in subset)]
        try:
            rules = restricted(rules_for(self.model, **self._settings | {"unknown": "freeze"}), subset)
        except (TypeError, ValueError):
            return None
        served = {id(rule.parameters()[name]) for rule in rules for name in rule.trainable}
        return rules if {id(p) for p in inside} <= served else None

    def _served(self, rules: Sequence[Rule]) -> dict[str, nn.Parameter]:
        """The trainable parameters that these rules have, by name; ``unknown="freeze"`` leaves some out."""
        served = {id(rule.parameters()[name]) for rule in rules for name in rule.trainable}
        parameters = {name: p for name, p in trainable(self.model).items() if id(p) in served}
        if not parameters:
            raise ValueError(
                f"{self.owner}: no trainable parameter has a rule, and unknown='freeze' leaves out the others."
            )
        return parameters

    def present_parameters(self, rules: Sequence[Rule] | None = None) -> dict[str, nn.Parameter]:
        """The parameters with a posterior as they are, by name, in the order of ``parameter_names``.

        Args:
            rules: of the layers as they are; None makes them.

        Raises:
            ValueError: others are trainable than when this object was made, which has a precision for each.
            RuntimeError: one was made in ``torch.inference_mode()``.
        """
        parameters = self._served(self.present_rules() if rules is None else rules)
        if list(parameters) != self.parameter_names:
            gone = [name for name in self.parameter_names if name not in parameters]
            new = [name for name in parameters if name not in set(self.parameter_names)]
            changes = [
                f"{', '.join(names[:5])}{', ...' if names[5:] else ''} {what}"
                for names, what in ((gone, "are gone or frozen"), (new, "are new or unfrozen"))
                if names
            ]
            raise ValueError(
                f"{self.owner}: the model's trainable parameters are not those that this object has precisions for: "
                f"{'; '.join(changes) or 'their order is another one'}. Make a new {self.owner}(model)."
            )
        require_no_inference(parameters)
        return parameters

    # inputs ----------------------------------------------------------------------------------------------------------

    def batch(self, batch: Any, where: str) -> tuple[Inputs, Tensor]:
        """Inputs and targets of a loader's batch, on the model's device, as tensors that autograd may save; under autocast the reduced
        inputs of a full network in full. Of a model that averages over copies, the draws are with the inputs. ``where`` begins messages."""
        x, y = pair_on(batch, self.device, where, self.keys)
        self.inputs_shape = x.shape[1:] if isinstance(x, Tensor) else None
        return self._ready(x), y

    def inputs(self, x: Any) -> Inputs:
        """The inputs of a prediction, likewise; of a mapping without the targets."""
        if isinstance(x, Mapping) and self.keys.x in x and x.keys() <= set(self.keys):
            x = x[self.keys.x]
        elif isinstance(x, Mapping):
            x = {key: value for key, value in x.items() if key != self.keys.y}
        x = inputs_on(x, self.device, self.owner)
        return self._ready(map_tensors(x, lambda t: t.clone() if t.is_inference() else t))

    def _ready(self, x: Inputs) -> Inputs:
        x = map_tensors(x, lambda t: widened(t, self.model)) if autocast_is_on(self.device.type) else x
        return with_draws(self.model, x, self.draws)

    # the function at the fit -----------------------------------------------------------------------------------------

    def settle(self, fingerprint: Tensor, buffers: Mapping[str, Tensor | None] | None) -> None:
        """Be of the model as it is after a pass, before which it had this fingerprint and these sums of its buffers; None where the pass has
        changed none."""
        filled = frozenset() if buffers is None else filled_since(self.model, buffers)
        self.filled = self.filled | filled
        self.fingerprint = fingerprint_of(self.model, self.filled) if filled else fingerprint
        self.fingerprint = self.fingerprint.to(self.device)
        self.bases = FittedBases(self.model)
        self._function = FunctionDescription(self.model)

    def restore(self, fingerprint: Tensor | None, filled: Collection[str], draws: Tensor | None) -> None:
        """Be of the model as it is, with what a saved fit has; no fingerprint is no fit."""
        self.forget()
        self.fingerprint = None if fingerprint is None else fingerprint.to(self.device, copy=True)
        self.filled, self.draws = frozenset(filled), draws

    def require_unchanged(self) -> None:
        """RuntimeError where this is not fitted, or the model's function, parameters or buffers are not what they were at the fit, but for
        buffers that its forward fills."""
        self.require_fit()
        if change := self._change():
            raise RuntimeError(
                f"{self.owner}: the model changed since the fit, whose curvature is not its own: {change}. Put it back, or call fit again."
            )
        if not self._has(fingerprint_of(self.model, self.filled)):
            raise RuntimeError(
                f"{self.owner}: the model's parameters or buffers changed since the fit, whose curvature is not theirs; call fit again."
            )

    def require_fit(self) -> None:
        """RuntimeError before a fit."""
        if self.fingerprint is None:
            raise RuntimeError(
                f"{self.owner}: call fit (successfully) before asking for the evidence, the curvature or predictions."
            )

    def require_same(self, fingerprint: Tensor, layers: bool) -> None:
        """ValueError where the model is not that of the fit: with this fingerprint of its numbers, and the same ``layers`` or not."""
        change = "" if layers and self._has(fingerprint) else "its parameters, buffers or layers"
        if change := self._change() or change:
            raise ValueError(
                f"fit(override=False): the model's layers or parameters changed since the fit it would add to ({change}); use override=True."
            )

    def holds(self, name: str, buffer: Tensor) -> bool:
        """Whether :meth:`require_unchanged` sees a buffer change."""
        return buffer.is_floating_point() and name not in self.filled

    def _has(self, fingerprint: Tensor) -> bool:
        return torch.allclose(fingerprint.to(self.device), self.fingerprint, rtol=1e-12, atol=0)

    def _change(self) -> str:
        """The change of the model's function since the fit, in words; "" where there is none."""
        if self._function is None:
            self._function = FunctionDescription(self.model)
        return self._function.change(self.model)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """For the duration of the context, in which a model that is that of the fit runs, buffers that it changes are its own to fill."""

        def marks() -> dict[str, tuple[int, ...]]:
            named = self.model.named_buffers(remove_duplicate=False)
            return {name: (id(b), b._version, b.data_ptr()) for name, b in named}

        before = marks()
        try:
            yield
        finally:
            if filled := {name for name, mark in marks().items() if before.get(name) != mark} - self.filled:
                self.filled = self.filled | filled
                self.fingerprint = fingerprint_of(self.model, self.filled).to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_function": not self._change()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is of the modules that it has, where the original is of its own."""
        self.__dict__.update(state)
        try:
            self._function = FunctionDescription(self.model if state["_function"] else nn.Module())
        except AttributeError:  # this is an attribute of its model, which is filled after it
            self._function = None

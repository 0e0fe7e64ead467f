"""The network that is linear in its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import (
    Inputs,
    data_points,
    inputs_on,
    map_tensors,
    model_outputs,
    run_model,
    take,
)
from ella_cuda.laplace.check_model import (
    generator_states,
    require_no_reentrant_checkpoint,
    require_one_function,
)
from ella_cuda.laplace.parameters import check_choice, checked_names, require_no_inference, rounding_of, trainable
from ella_cuda.laplace.tangent import (
    ReplacedParameters,
    Values,
    apart,
    embeddings_have_derivatives,
    first_at_fault,
    has_forward_mode,
    jvp,
    push,
    push_by_gradients,
)
from ella_cuda.laplace.test_time import at_test_time, in_plain_products, refusing_reentrant
from ella_cuda.modes import exclusively, running_the_model
from ella_cuda.ops._precision import without_autocast

FORMS = ("full", "simple")
TRIED = 8  # data points of the first batch that derivatives are tried out on
GROSS = 16.0  # rounding errors that two products may differ by along a direction that is not random

Cotangent = Callable[[Tensor, Tensor], Tensor]


class TangentModel:
    r"""A network's linearisation at its parameters :math:`\tilde\theta`, a model that is linear in :math:`\theta`:

    .. math::
        h(\theta, x) = f(\tilde\theta, x) + J(x) (\theta - \tilde\theta) = o(x) + J(x) \theta

    The network is the one it is in evaluation mode, with the buffers and parameters that it has when this object is made, of which copies
    are kept. Products with the Jacobian J are derivatives along a direction, in forward mode where the network's functions have it, and
    gradients; J is never formed. Any network that :func:`torch.func.jvp` takes is served, whether or not a curvature rule knows its layers.

    :math:`\theta` is all trainable parameters flattened one after the other, in ``model.named_parameters()`` order.

    Args:
        model: ``(N, ...) -> (N, ..., K)``, float32 or float64.
        form: "full"; or "simple", which leaves the offset o out: :math:`h(\theta, x) = J(x) \theta`. Both are the same for networks with
            normalised layers, a linear head and no other parameters, whose offset is zero.
        names: of the parameters that :math:`\theta` has, the others being constants; None is all trainable ones.

    Attributes:
        parameter_names: of theta. n_params: P, its entries. point: where the network is linearised, ``(P,)``.

    Raises:
        ValueError: no such form, no trainable parameter, no name or one of no parameter, or parameters on several devices.
        TypeError: a parameter is neither float32 nor float64.
        RuntimeError: a parameter was made in ``torch.inference_mode()``.

    Source: Antoran et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022, eq. 2.
    """

    def __init__(self, model: nn.Module, form: str = "full", names: Sequence[str] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"TangentModel: model must be a torch.nn.Module, got {type(model).__name__}.")
        self.model, self.form = model, check_choice("form", form, FORMS)
        with exclusively(model):
            if names is None:
                parameters = trainable(model)
            else:
                every = dict(model.named_parameters(remove_duplicate=False))
                parameters = {name: every[name] for name in checked_names("names", names, every)}
            require_no_inference(parameters)
            others = {n: p for n, p in model.named_parameters() if n not in parameters} | dict(model.named_buffers())
            self._replaced = ReplacedParameters(model, list(parameters), list(others))
            self._values = {name: p.detach().clone() for name, p in parameters.items()}
            self._constants = {name: tensor.detach().clone() for name, tensor in others.items()}
        halves = [t for t in self._constants.values() if t.is_floating_point() and torch.finfo(t.dtype).bits < 32]
        self._rounding = max(map(rounding_of, halves), default=0.0)  # of frozen parameters in reduced precision
        self.parameter_names = list(parameters)
        self.n_params = sum(p.numel() for p in self._values.values())
        self.device = next(iter(self._values.values())).device
        # How many data points derivatives were tried out on, and whether there is a forward mode, or why there are no products.
        self.ways: list[tuple[int, bool | Exception]] = []

    @property
    def point(self) -> Tensor:
        return self._flat(self._values)

    def __call__(self, theta: Tensor, x: Any) -> Tensor:
        """h(theta, x), ``(N, ...)``; of several vectors ``(S, P)``, ``(S, N, ...)``. Differentiable in theta where the network's functions
        have a forward mode."""
        theta = self._vectors("theta", theta)
        if self.form == "simple":
            return self.jvp(x, theta)
        return self.outputs(x) + self.jvp(x, theta - self.point.to(theta.dtype))

    @running_the_model
    def outputs(self, x: Any) -> Tensor:
        """The network's, ``(N, ...)``."""
        x = self._inputs(x)
        with self._running(), torch.no_grad():
            return self._run(x, self._values)

    @running_the_model
    def jvp(self, x: Any, u: Tensor) -> Tensor:
        """J(x) u of a direction ``(P,)``: ``(N, ...)``; of several ``(S, P)``, ``(S, N, ...)``.

        Raises:
            ValueError: u is no such tensor.
            NotImplementedError: a function of the network has no forward mode and is differentiable once.
            ArithmeticError: its gradients are not its derivatives; both errors name the layer.
        """
        x, u = self._inputs(x), self._vectors("u", u)
        directions = self._replaced.split(u.reshape(-1, self.n_params))
        with self._running():
            self._try_out(x)
            found = jvp(lambda values: self._run(x, values), dict(self._values), directions, self._way is not False)
        return found if u.dim() > 1 else found[0]

    @running_the_model
    def vjp(self, x: Any, r: Tensor) -> Tensor:
        """J(x)^T r of a cotangent of the outputs' shape ``(N, ...)``: ``(P,)``, summed over the data points; of several ``(S, N, ...)``,
        ``(S, P)``.

        Raises:
            ValueError: r does not have the outputs' shape.
            ArithmeticError: the network's gradients are not its derivatives; names the layer.
        """
        x = self._inputs(x)
        with self._running(), torch.enable_grad():
            with suppress(NotImplementedError):  # gradients are all that is wanted
                self._try_out(x)
            leaves = self._leaves()
            outputs = self._run(x, leaves)
            several = isinstance(r, Tensor) and r.dim() == outputs.dim() + 1
            if not isinstance(r, Tensor) or r.shape[several:] != outputs.shape:
                got = tuple(r.shape) if isinstance(r, Tensor) else type(r).__name__
                raise ValueError(f"r: expected a tensor of the outputs' shape {tuple(outputs.shape)}, got {got}.")
            rows = r.to(outputs.device, outputs.dtype)
            try:
                found = [self._pulled(outputs, leaves, row, True) for row in (rows if several else rows[None])]
            except RuntimeError as error:  # of functions without a derivative
                raise self._way if isinstance(self._way, NotImplementedError) else error from None
        return torch.stack(found) if several else found[0]

    def offset(self, x: Any) -> Tensor:
        """o(x) = f(x) - J(x) theta at the point of linearisation, ``(N, ...)``; zeros in the simple form."""
        if self.form == "simple":
            return torch.zeros_like(self.outputs(x))
        return self.outputs(x) - self.jvp(x, self.point)

    @running_the_model
    def push_pull(self, x: Any, u: Tensor, cotangent: Cotangent) -> Tensor:
        """``J^T c``, ``(P,)``, summed over the data points, for cotangents c of the outputs' shape that ``cotangent(f, J u)`` gives, of a
        direction u ``(P,)``: in one pass through the network.

        Raises:
            NotImplementedError: a function of the network has no forward mode and is differentiable once.
            ArithmeticError: its gradients are not the transpose of its derivatives along directions; names the layer.
        """
        x, directions = self._inputs(x), self._replaced.split(self._vectors("u", u))
        with self._running(), torch.enable_grad():
            self._try_out(x)
            leaves, way = self._leaves(), push if self._way else push_by_gradients
            outputs, along = way(lambda values: self._run(x, values), leaves, directions)
            c = cotangent(outputs.detach(), along)
            pulled = self._pulled(outputs, leaves, c).double()
            of_outputs, of_parameters = along.double() * c, self._flat(directions) * pulled
            if apart(
                of_outputs, of_parameters, GROSS * max(self._rounding, *map(rounding_of, (along, *directions.values())))
            ):
                raise self._blamed(
                    x, ArithmeticError("derivatives in forward mode and gradients do not belong together")
                )
        return pulled

    # one part ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _flat(values: Values) -> Tensor:
        return torch.cat([value.flatten() for value in values.values()])

    def _pulled(self, outputs: Tensor, leaves: Values, cotangent: Tensor, again: bool = False) -> Tensor:
        found = torch.autograd.grad(outputs, [*leaves.values()], cotangent, retain_graph=again, materialize_grads=True)
        return torch.cat([g.flatten() for g in found])

    def _try_out(self, x: Inputs) -> None:
        """Find the way to derivatives along directions, once, by some data points of the batch; errors as of :func:`has_forward_mode`, and
        ValueError where the forward changes a parameter, calls a reentrant checkpoint, or draws random numbers."""
        count, tried = data_points(x), self.ways[-1][0] if self.ways else 0
        if min(count, TRIED) > tried:
            places = torch.linspace(0, count - 1, min(count, TRIED), device="cpu").long()
            some = take(x, places.to(self.device))
            with refusing_reentrant("TangentModel"):
                require_no_reentrant_checkpoint(self.model, x)
            before, drawn = [value._version for value in self._values.values()], generator_states(self.device)
            try:
                found: bool | Exception = has_forward_mode(
                    lambda values: self._run(some, values), self._values, self._rounding
                )
            except (NotImplementedError, ArithmeticError) as error:
                found = self._blamed(some, error)
            for (name, value), version in zip(self._values.items(), before, strict=True):
                if value._version != version:
                    found = ValueError(
                        f"TangentModel: the forward changes the parameter {name!r} in place, as max_norm of an embedding does; build the "
                        "layer with max_norm=None, or freeze it with requires_grad_(False)."
                    )
            if not isinstance(found, ValueError):
                few, drew = take(some, slice(2)), generator_states(self.device) != drawn
                with at_test_time(self.model), torch.no_grad():
                    if drew or not torch.equal(run_model(self.model, few), run_model(self.model, few)):
                        require_one_function(self.model, few, drew)
            self.ways.append((len(places), found))
        if isinstance(self._way, Exception):
            raise self._way

    @property
    def _way(self) -> bool | Exception | None:
        """Whether derivatives along directions are taken in forward mode; why there are none; None before the first product."""
        return self.ways[-1][1] if self.ways else None

    def _blamed(self, x: Inputs, error: Exception) -> Exception:
        """The error of these data points in words, with the innermost module that has it by itself."""
        layer, error = first_at_fault(self.model, lambda: self._run(x, self._values), error)
        advice = (
            "Remove what changes them, or replace the function"
            if isinstance(error, ArithmeticError)
            else "Replace the function, give its torch.autograd.Function a jvp or a backward of functions that autograd knows, or freeze "
            "with requires_grad_(False) the parameters of the layer and of those in front of it"
        )
        return type(error)(
            f"TangentModel: {layer}: {error}, so that there are no products with the Jacobian. {advice}."
        )

    # arguments ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        with at_test_time(self.model), in_plain_products(), without_autocast(self.device.type):
            yield

    def _run(self, x: Inputs, values: Mapping[str, Tensor]) -> Tensor:
        with self._replaced.replaced({**self._constants, **values}), embeddings_have_derivatives(self.model):
            return model_outputs(self.model, x)

    def _leaves(self) -> Values:
        return {name: value.detach().requires_grad_() for name, value in self._values.items()}

    def _inputs(self, x: Any) -> Inputs:
        x = inputs_on(x, self.device, "TangentModel")
        return map_tensors(x, lambda t: t.clone() if t.is_inference() else t)

    def _vectors(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(value, Tensor) or value.dim() not in (1, 2) or value.shape[-1] != self.n_params:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{name}: expected all parameters flattened one after the other, a tensor ({self.n_params},) or (S, {self.n_params}), got "
                f"{got}."
            )
        return value.to(self.device)

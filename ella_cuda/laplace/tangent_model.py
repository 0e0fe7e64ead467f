"""The network that is linear in its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ella_cuda.laplace.batches import Inputs, data_points, inputs_on, map_tensors, run_model, take, tensors_of
from ella_cuda.laplace.curvature import at_test_time, in_plain_products
from ella_cuda.laplace.likelihoods import checked_outputs
from ella_cuda.laplace.parameters import require_no_inference, trainable
from ella_cuda.laplace.tangent import ReplacedParameters, Values, jvp, load_forward_mode, rounding_of
from ella_cuda.laplace.values import check_choice
from ella_cuda.modes import exclusively, running_the_model
from ella_cuda.ops._precision import without_autocast

FORMS = ("full", "simple")
ON_CPU, ELSEWHERE = 256 << 20, 2 << 30  # bytes that the graph of data points that go together may keep

Cotangent = Callable[[Tensor, Tensor, slice], Tensor]


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
        model, form: as given.
        parameter_names: of theta. n_params: P, its entries.
        point: where the network is linearised, ``(P,)``.

    Raises:
        ValueError: no such form, no trainable parameter, or parameters on several devices.
        TypeError: a parameter is neither float32 nor float64.
        RuntimeError: a parameter was made in ``torch.inference_mode()``.

    Source: Antoran et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022, eq. 2.
    """

    def __init__(self, model: nn.Module, form: str = "full", names: Sequence[str] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"TangentModel: model must be a torch.nn.Module, got {type(model).__name__}.")
        self.model, self.form = model, check_choice("form", form, FORMS)
        with exclusively(model):
            parameters = trainable(model) if names is None else {name: model.get_parameter(name) for name in names}
            require_no_inference(parameters)
            others = {n: p for n, p in model.named_parameters() if n not in parameters} | dict(model.named_buffers())
            self._replaced = ReplacedParameters(model, list(parameters), list(others))
            self._values = {name: p.detach().clone() for name, p in parameters.items()}
            self._constants = {name: tensor.detach().clone() for name, tensor in others.items()}
        self.parameter_names = list(parameters)
        self.n_params = sum(p.numel() for p in self._values.values())
        self.device = next(iter(self._values.values())).device
        self._forward_mode: bool | None = None  # not known before the first product
        self._points: dict[Any, int] = {}  # that go together, by the inputs' shapes

    @property
    def point(self) -> Tensor:
        return torch.cat([value.flatten() for value in self._values.values()])

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
        """
        x, u = self._inputs(x), self._vectors("u", u)
        directions = self._split(u.reshape(-1, self.n_params))
        with self._running():
            found = jvp(lambda values: self._run(x, values), dict(self._values), directions)
        return found if u.dim() > 1 else found[0]

    @running_the_model
    def vjp(self, x: Any, r: Tensor) -> Tensor:
        """J(x)^T r of a cotangent of the outputs' shape ``(N, ...)``: ``(P,)``, summed over the data points; of several ``(S, N, ...)``,
        ``(S, P)``.

        Raises:
            ValueError: r does not have the outputs' shape.
        """
        x = self._inputs(x)
        with self._running(), torch.enable_grad():
            leaves = self._leaves()
            outputs = self._run(x, leaves)
            several = isinstance(r, Tensor) and r.dim() == outputs.dim() + 1
            if not isinstance(r, Tensor) or r.shape[several:] != outputs.shape:
                got = tuple(r.shape) if isinstance(r, Tensor) else type(r).__name__
                raise ValueError(f"r: expected a tensor of the outputs' shape {tuple(outputs.shape)}, got {got}.")
            rows = r.to(outputs.device, outputs.dtype)
            found = [self._pulled(outputs, leaves, row) for row in (rows if several else rows[None])]
        return torch.stack(found) if several else found[0]

    def offset(self, x: Any) -> Tensor:
        """o(x) = f(x) - J(x) theta at the point of linearisation, ``(N, ...)``; zeros in the simple form."""
        if self.form == "simple":
            return torch.zeros_like(self.outputs(x))
        return self.outputs(x) - self.jvp(x, self.point)

    @running_the_model
    def push_pull(self, x: Any, u: Tensor, cotangent: Cotangent) -> Tensor:
        """``J^T c`` for cotangents c that depend on ``J u``, in one pass through the network: ``(P,)``, summed over the data points.

        Args:
            x: inputs ``(N, ...)``; some data points at a time go through the network, as many as there is room for.
            u: a direction ``(P,)``.
            cotangent: ``(f, J u, which)``, of the data points ``which``, -> c, of the outputs' shape.

        Raises:
            NotImplementedError: a function of the network has no forward mode and is differentiable once.
        """
        x, directions = self._inputs(x), self._split(self._vectors("u", u))
        count, total = data_points(x), torch.zeros(self.n_params, dtype=torch.float64, device=self.device)
        with self._running(), torch.enable_grad():
            step = self._together(x)
            for begin in range(0, max(count, 1), step):
                which = slice(begin, min(begin + step, count))
                total += self._push_pull(take(x, which), directions, lambda f, t, which=which: cotangent(f, t, which))
        return total

    # one part ----------------------------------------------------------------------------------------------------

    def _push_pull(self, x: Inputs, u: Values, cotangent: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        leaves = self._leaves()
        if self._forward_mode:
            load_forward_mode()
            with forward_ad.dual_level():
                duals = {name: forward_ad.make_dual(leaf, u[name]) for name, leaf in leaves.items()}
                outputs, tangent = forward_ad.unpack_dual(self._run(x, duals))
                along = torch.zeros_like(outputs) if tangent is None else tangent.detach()
                del tangent  # and its graph
        else:
            outputs = self._run(x, leaves)
            seed = torch.zeros_like(outputs).requires_grad_()
            pulled = torch.autograd.grad(
                outputs, list(leaves.values()), seed, create_graph=True, materialize_grads=True
            )
            product = sum((g * u[name]).sum() for name, g in zip(leaves, pulled, strict=True))
            along = torch.autograd.grad(product, seed, retain_graph=True)[0]
        return self._pulled(outputs, leaves, cotangent(outputs.detach(), along), last=True).double()

    def _pulled(self, outputs: Tensor, leaves: Values, cotangent: Tensor, last: bool = False) -> Tensor:
        found = torch.autograd.grad(
            outputs, list(leaves.values()), cotangent, retain_graph=not last, materialize_grads=True
        )
        return torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in found])

    def _together(self, x: Inputs) -> int:
        """How many data points go through the network together; and, once, whether in forward mode."""
        key = tuple((tuple(t.shape[1:]), t.dtype) for t in tensors_of(x))
        if not data_points(x):
            return 1
        first = take(x, slice(1))
        if self._forward_mode is None:
            try:
                self._forward_mode = self._has_forward_mode(first)
            except BaseException:
                self._forward_mode = None
                raise
        if key in self._points:
            return self._points[key]
        if data_points(x) == 1:
            return 1
        # Two data points keep more than one by what one keeps; parameters are kept once.
        more = self._kept_bytes(take(x, slice(2))) - self._kept_bytes(first)
        room = ON_CPU if self.device.type == "cpu" else ELSEWHERE
        self._points[key] = max(room // max(more, 1), 1)
        return self._points[key]

    def _kept_bytes(self, x: Inputs) -> int:
        """Of all that the graph of these data points keeps."""
        sizes: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())  # a sparse one's as if it were dense
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self._push_pull(x, self._split(self.point), lambda f, _: f)
        return sum(sizes)

    def _has_forward_mode(self, x: Inputs) -> bool:
        """Whether derivatives in forward mode are there and the transpose of gradients, tried along a random direction.

        Raises:
            NotImplementedError: neither they nor those by two gradients are.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        u = self._split(
            torch.randn(self.n_params, generator=generator, dtype=torch.float64, device="cpu").to(self.device)
        )
        c: Tensor | None = None
        along: Tensor | None = None

        def drawn(f: Tensor, t: Tensor) -> Tensor:
            nonlocal c, along
            c, along = torch.randn(f.shape, generator=generator, dtype=torch.float64, device="cpu").to(f), t
            return c

        flat = torch.cat([value.flatten() for value in u.values()]).double()
        for self._forward_mode in (True, False):
            with suppress(Exception if self._forward_mode else ()):  # whatever functions without a forward mode raise
                pulled = self._push_pull(x, u, drawn)
                one, other = (c.double() * along.double()).flatten(), pulled * flat
                # Their sums are float64; their rounding is the network's.
                rounding = max(map(rounding_of, (along, *self._values.values())))
                gap, size = (one.sum() - other.sum()).abs(), one.abs().sum() + other.abs().sum()
                if not size.isfinite() or gap <= rounding * size:
                    return self._forward_mode
        raise NotImplementedError(
            "TangentModel: a function of the network has no forward mode and is differentiable once, so that there are no derivatives along "
            "directions; give its torch.autograd.Function a jvp, or a backward made of functions that autograd knows."
        )

    # arguments ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        with at_test_time(self.model), in_plain_products(), without_autocast(self.device.type):
            yield

    def _run(self, x: Inputs, values: Mapping[str, Tensor]) -> Tensor:
        with self._replaced.replaced({**self._constants, **values}), _padding_is_constant(self.model):
            return checked_outputs(run_model(self.model, x), data_points(x))

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

    def _split(self, vectors: Tensor) -> Values:
        """By parameter name."""
        return self._replaced.split(vectors)


@contextmanager
def _padding_is_constant(model: nn.Module) -> Iterator[None]:
    """Embeddings have no derivative along the rows of their padding, whose gradient torch.nn leaves out: its forward mode does not know of
    them. What else uses the weight has all of its derivatives."""
    whole: list[Tensor] = []

    def before(module: nn.Module, _: Any) -> None:
        weight = module._parameters["weight"]
        whole.append(weight)
        value, along = forward_ad.unpack_dual(weight)
        if along is not None:
            kept = torch.ones(len(weight), 1, dtype=weight.dtype, device=weight.device)
            kept[module.padding_idx] = 0
            module._parameters["weight"] = forward_ad.make_dual(value, along * kept)

    def after(module: nn.Module, *_: Any) -> None:
        module._parameters["weight"] = whole.pop()

    padded = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.padding_idx is not None]
    handles = [m.register_forward_pre_hook(before) for m in padded]
    handles += [m.register_forward_hook(after, always_call=True) for m in padded]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

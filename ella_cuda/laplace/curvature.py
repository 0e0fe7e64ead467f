"""One batch through the network: forward once, then the columns of the output Hessian's square root back through it.

Only gradients of activations are computed. A layer's forward hook replaces the layer's node in the autograd graph by
one that hands the gradient, all columns together, to the layer's rule; the rule accumulates its factors and returns the
gradient at its input. So nothing is kept for all layers at once, and no gradient of a parameter is ever formed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import plain_tensor
from ella_cuda.laplace.data_fit import hyperparameters
from ella_cuda.laplace.likelihoods import Columns, checked_outputs
from ella_cuda.laplace.probe import Findings, probe
from ella_cuda.laplace.rectified import Rectifiers, plain, sequential
from ella_cuda.laplace.rules import Rule
from ella_cuda.laplace.rules.conv import Conv2dRule
from ella_cuda.modes import evaluation_mode
from ella_cuda.nn import PolyphasePool2d
from ella_cuda.nn._autocast import full
from ella_cuda.ops._autocast import without_autocast

Pull = Callable[[Tensor], Tensor]


class _OnColumns(torch.autograd.Function):
    """Call ``pull`` on the physical gradient with the column axis in front, whether or not ``vmap`` carries one."""

    @staticmethod
    def forward(gradient: Tensor, pull: Pull) -> Tensor:
        return pull(gradient[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, pull: Pull) -> tuple[Tensor, int]:
        dim = in_dims[0]
        columns = gradient.expand(info.batch_size, *gradient.shape) if dim is None else gradient.movedim(dim, 0)
        return pull(columns), 0


class _LayerNode(torch.autograd.Function):
    """Stands in the graph for a layer whose rule differentiates it.

    ``out`` becomes the output itself, not a view or copy of it, so that the next layer may work on it in place.
    ``anchor`` requires a gradient that is never formed: it makes the engine visit the first layer too.
    ``rectified``, or None: the layer's input, where it came out of an ``nn.ReLU`` whose own input is x; the node is then that
    of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rectified: Tensor | None,
        out: Tensor,
        anchor: Tensor,
        rule: Rule | _Pooled | _BatchSecond,
        run: CurvaturePass,
    ) -> Tensor:
        ctx.mark_dirty(out)
        ctx.rule, ctx.shape, ctx.run = rule, x.shape, run
        ctx.save_for_backward(rectified)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        rule, shape = ctx.rule, ctx.shape if ctx.needs_input_grad[0] else None
        ctx.run.require_backward()
        (rectified,) = ctx.saved_tensors

        def pull(columns: Tensor) -> Tensor:
            # A network's own autocast reduces what is between its layers; rules have their parameters' precision.
            pulled = rule.pull_back(full(columns), shape)
            if pulled is None:
                return columns.new_zeros(columns.shape[0])
            if rectified is not None:
                source = full(rectified).expand_as(pulled)
                torch.ops.aten.threshold_backward.grad_input(pulled, source, 0, grad_input=pulled)
            return pulled

        pulled = _OnColumns.apply(gradient, pull)
        return pulled if shape is not None else None, None, None, None, None, None


class _OutputTap(torch.autograd.Function):
    """Identity on a layer's output that shows its gradient to the rule; a copy, so that the next layer may work in
    place.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, rule: Rule | _BatchSecond, run: CurvaturePass) -> Tensor:
        ctx.rule, ctx.run = rule, run
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rule = ctx.rule
        ctx.run.require_backward()

        def pull(columns: Tensor) -> Tensor:
            rule.outputs(full(columns))
            return columns

        return _OnColumns.apply(gradient, pull), None, None, None


class _BatchSecond:
    """In the place of a rule whose layer has the batch along the second axis of its input and output."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def outputs(self, gradient: Tensor) -> None:
        self.rule.outputs(gradient.transpose(1, 2))

    def pull_back(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        shape = None if input_shape is None else torch.Size((input_shape[1], input_shape[0], *input_shape[2:]))
        pulled = self.rule.pull_back(gradient.transpose(1, 2), shape)
        return None if pulled is None else pulled.transpose(1, 2)


class _Pooled:
    """In the place of a convolution's rule at the output of the polyphase choice that follows it."""

    def __init__(self, rule: Conv2dRule, index: Tensor) -> None:
        self.rule, self.index = rule, index

    def pull_back(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        return self.rule.pull_back_pooled(gradient, self.index, input_shape)


@dataclasses.dataclass
class _Between:
    """What stands between a convolution and the polyphase choice that follows it: the one's input and output."""

    rule: Conv2dRule
    x: Tensor
    out: Tensor


class CurvaturePass:
    """The hooks of one fit; see :func:`curvature_pass`.

    Attributes:
        column_bytes: of the largest layer's gradients of a column, in the last forward pass.

    Args:
        model: the network, ``(N, ...) -> (N, K)``.
        rules: one per layer with trainable parameters, factors allocated.
        memory_budget: bytes that the gradients of one pass over some of the columns may take.
    """

    def __init__(self, model: nn.Module, rules: Sequence[Rule], memory_budget: int) -> None:
        self.model, self.rules, self.memory_budget = model, rules, memory_budget
        self.calls = {rule: 0 for rule in rules}
        self._anchor = torch.zeros((), requires_grad=True)
        self._batch_size = 0
        self.column_bytes = 0
        self._called: set[Rule] = set()
        self._paused = False
        self._pulling = False  # whether columns are on their way back
        self._strided = _strided_layers(model, rules)
        self._inside: list[nn.Sequential] = []  # those of them whose forward runs
        self._between: _Between | None = None
        self.rectifiers = Rectifiers(model, rules)
        self.hyperparameters = list(hyperparameters(model).values())
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.findings = Findings({}, True)

    def try_out(self, x: Tensor, several: bool) -> None:
        """:func:`ella_cuda.laplace.probe.probe` on a batch."""
        with self.paused(), gradients_of(self.parameters), refusing_reentrant("fit"):
            self.findings = probe(self.model, self.rules, x, several)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For the duration of the context the network is as it was, without our nodes, but in evaluation mode and with constant
        parameters."""
        self._paused = True
        try:
            with gradients_of(self.hyperparameters):
                yield
        finally:
            self._paused = False
            self.rectifiers.forget()

    def forward(self, x: Tensor) -> Tensor:
        """The outputs ``(N, K)``, with the graph of our nodes; the input sides are accumulated on the way."""
        self._batch_size, self.column_bytes = x.shape[0], 1
        self._called.clear()
        try:
            with torch.enable_grad():
                return checked_outputs(self.model(x))
        finally:
            self.rectifiers.forget()

    def backward(self, outputs: Tensor, columns: Columns) -> None:
        """Send the columns back from the outputs, as many at once as the budget allows; output sides accumulate."""
        if not self._called:
            raise ValueError("fit: no layer with trainable parameters was called in the model's forward.")
        if not outputs.requires_grad:
            raise ValueError(
                "fit: the model's output does not depend on its layers through autograd (is it computed under "
                "no_grad?)."
            )
        count, each = len(columns), max(self.column_bytes, columns.bytes_each)
        passes = min(max(-(-count * each // self.memory_budget), 1), count) if self.findings.batched else count
        self._pulling = True
        try:
            for i in range(passes):
                last = i + 1 == passes
                chunk = columns[i * count // passes : (i + 1) * count // passes]

                def pull(column: Tensor, keep: bool = not last) -> Tensor:
                    torch.autograd.grad(outputs, self._anchor, column, retain_graph=keep, allow_unused=True)
                    return column.new_zeros(())

                if chunk.shape[0] == 1:
                    pull(chunk[0])
                else:
                    torch.func.vmap(pull)(chunk)
        finally:
            self._pulling = False

    def require_backward(self) -> None:
        """ValueError where somebody else than :meth:`backward` differentiates."""
        if not self._pulling:
            raise ValueError(
                "fit: the model differentiates through its layers in its own forward (torch.autograd.grad, as for forces of an energy): the "
                "curvature of weights that both passes use is no Kronecker product. Freeze these layers, or fit those behind them alone."
            )

    def hook(self, rule: Rule) -> Callable[..., Tensor]:
        """The forward hook of a rule's layer."""

        def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            if self._paused:
                return out
            kind = type(out)
            if self._pulling:
                # A checkpoint computes the layer anew, for what others saved: our nodes and this sum save nothing.
                out = plain_tensor(out)
                again = (out.detach() if rule.differentiates else out) + self._anchor
                return again if kind is Tensor else again.as_subclass(kind)
            if rule in self._called:
                raise ValueError(
                    f"{rule.label} was called twice in one forward pass: the curvature of weights used twice is no "
                    "Kronecker product. Call it once on inputs stacked along a shared dimension, or give each use its "
                    "own layer."
                )
            axis = self.findings.axes.get(rule, 0)
            if not isinstance(out, Tensor) or out.dim() <= axis or out.shape[axis] != self._batch_size:
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"{rule.label}: expected an output with the batch in front, ({self._batch_size}, ...), got {got}. "
                    "Positions that share weights must be dimensions of their own, not folded into the batch."
                )
            out = plain_tensor(out)
            arguments = [plain_tensor(a) if isinstance(a, Tensor) else a for a in (*args, *kwargs.values())]
            x = arguments[0]
            self._called.add(rule)
            self.calls[rule] += 1
            with torch.no_grad(), without_autocast(out.device.type):  # the network's own
                seen = (a.detach() if isinstance(a, Tensor) else a for a in arguments)
                if not rule.reads_reduced():
                    seen = (full(a) if isinstance(a, Tensor) else a for a in seen)
                rule.inputs(*(a.transpose(0, 1) if axis and isinstance(a, Tensor) else a for a in seen))
            pulls = _BatchSecond(rule) if axis else rule
            if not rule.differentiates:
                self._charge(x, out)
                tapped = _OutputTap.apply(out, self._anchor, pulls, self)
                return tapped if kind is Tensor else tapped.as_subclass(kind)
            out = self._node(rule, x, out, pulls)
            if self._inside:
                self._between = _Between(rule, x, out)
            else:
                self._charge(x, out)
            return out if kind is Tensor else out.as_subclass(kind)

        return replace

    def _node(self, rule: Rule, x: Tensor, out: Tensor, pulls: Rule | _Pooled | _BatchSecond) -> Tensor:
        """The output of a rule's layer, in the graph by a node of ours."""
        x, rectified = self.rectifiers.before(rule, x)
        return _LayerNode.apply(x, rectified, out.detach(), self._anchor, pulls, self)

    def _charge(self, *tensors: Tensor) -> None:
        """A column's gradients of these exist at once, and as much again for temporaries."""
        size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        self.column_bytes = max(self.column_bytes, 2 * size)

    @contextmanager
    def strided(self) -> Iterator[None]:
        """For the duration of the context, convolutions followed by a polyphase choice are one node, so that a rule can do without
        the gradient between them, three quarters of which are zeros.
        """
        handles = []

        def enter(module: nn.Sequential, args: Any) -> None:
            self._inside.append(module)

        def leave(module: nn.Sequential, args: Any, out: Tensor | None) -> None:
            if self._inside and self._inside[-1] is module:
                self._inside.pop()
            self._between = None

        def replace(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            between = self._between
            if between is None or not args or args[0] is not between.out:
                return out
            self._between = None
            self._charge(between.x, out if between.rule.skips_zeros(out.device) else between.out)
            with torch.no_grad():
                index = torch.ops.ella_cuda.polyphase_pool(full(between.out.detach()), float(module.norm))[1]
            return self._node(between.rule, between.x, out, _Pooled(between.rule, index))

        try:
            for sequence in self._strided:
                handles.append(sequence.register_forward_pre_hook(enter))
                handles.append(sequence.register_forward_hook(leave, prepend=True, always_call=True))
                handles.append(sequence[1].register_forward_hook(replace, prepend=True))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _strided_layers(model: nn.Module, rules: Sequence[Rule]) -> list[nn.Sequential]:
    """Convolutions in a :func:`sequential` module of their own with a polyphase choice, where nothing else sees what is between the two."""
    if torch.nn.modules.module._has_any_global_hook():
        return []
    convolutions = {rule.module for rule in rules if isinstance(rule, Conv2dRule) and rule.pools()}
    return [
        m
        for m in model.modules()
        if sequential(m)
        and "forward" not in vars(m)  # a hook on it sees its input and output only
        and len(m) == 2
        and m[0] in convolutions
        and type(m[1]) is PolyphasePool2d
        and plain(m[0])
        and plain(m[1])
    ]


@contextmanager
def curvature_pass(model: nn.Module, rules: Sequence[Rule], memory_budget: int) -> Iterator[CurvaturePass]:
    """The nodes of a fit, in :func:`hooked` layers of a model whose parameters and buffers are constants."""
    run = CurvaturePass(model, rules, memory_budget)
    constants = [*run.parameters, *run.hyperparameters]
    hooks = {rule: run.hook(rule) for rule in rules}
    with hooked(model, hooks, constants), run.strided(), run.rectifiers.watched():
        yield run


_uncompiled_lock = threading.Lock()
_uncompiled = ExitStack()  # what leaves the stance that was there before the first of the fits that run
_uncompiled_fits = 0


@contextmanager
def run_as_written() -> Iterator[None]:
    """For the duration of the context, compiled modules run as they are written. The compiler's stance is the process': the first of
    several threads sets it and the last puts it back.
    """
    global _uncompiled_fits
    with _uncompiled_lock:
        if not _uncompiled_fits:
            _uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        _uncompiled_fits += 1
    try:
        yield
    finally:
        with _uncompiled_lock:
            _uncompiled_fits -= 1
            if not _uncompiled_fits:
                _uncompiled.close()


@contextmanager
def refusing_reentrant(where: str) -> Iterator[None]:
    """Have torch's refusal of a reentrant checkpoint, which speaks of calls that are not the user's, say what to do."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            f"{where}: the model calls torch.utils.checkpoint with use_reentrant=True, which serves plain backward() alone; the curvature "
            "takes gradients in activations. Call it with use_reentrant=False."
        ) from error


@contextmanager
def gradients_of(tensors: Sequence[Tensor]) -> Iterator[None]:
    """For the duration of the context, the tensors require a gradient."""
    for tensor in tensors:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)


@contextmanager
def hooked(
    model: nn.Module, hooks: Mapping[Rule, Callable[..., Tensor]], constants: Sequence[Tensor]
) -> Iterator[None]:
    """Evaluation mode, no gradients of ``constants``, a forward hook on the layer of every rule, and compiled modules run as they
    are written, for the duration of the context; all restored at its end.

    A compiler would trace the hooks, which add to views of factors: inductor forgets where such a view begins in dynamic shapes,
    and what aot_autograd compiled cannot be differentiated under vmap.

    Dropout is off and batch statistics are frozen: the curvature is that of the function the model is at test time.
    """
    # First among the hooks: a user's own forward hook then sees, and may change, what comes after the layer.
    handles = [r.module.register_forward_hook(hook, prepend=True, with_kwargs=True) for r, hook in hooks.items()]
    try:
        with evaluation_mode(model), run_as_written():
            for tensor in constants:
                tensor.requires_grad_(False)
            yield
    finally:
        for handle in handles:
            handle.remove()
        for tensor in constants:
            tensor.requires_grad_(True)

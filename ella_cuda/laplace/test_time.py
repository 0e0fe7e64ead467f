"""A network as the function that it is at test time, for the duration of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ella_cuda.laplace.interception import hooks
from ella_cuda.modes import evaluation_mode


class _ProcessWide:
    """A setting of the process for as long as one of several threads wants it: the first sets it, the last puts it back."""

    def __init__(self, enter: Callable[[ExitStack], None]) -> None:
        self._enter, self._lock, self._stack, self._wanted = enter, threading.Lock(), ExitStack(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._wanted:
                self._enter(self._stack)
            self._wanted += 1
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if not self._wanted:
                    self._stack.close()


def _run_eagerly(stack: ExitStack) -> None:
    stack.enter_context(torch.compiler.set_stance("force_eager"))


def _leave_fastpath(stack: ExitStack) -> None:
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)


def _multiply_attention_out(stack: ExitStack) -> None:
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))


run_as_written = _ProcessWide(_run_eagerly)
"""For the duration of the context, compiled modules run as they are written."""
_without_fastpath = _ProcessWide(_leave_fastpath)
"""For the duration of the context, transformer layers call their parts, which they skip where nothing requires a gradient."""
in_plain_products = _ProcessWide(_multiply_attention_out)
"""For the duration of the context, attention is products and a softmax, which vmap takes; it loops over the columns of a fused kernel."""


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
def requiring_grad(tensors: Sequence[Tensor], value: bool) -> Iterator[None]:
    """For the duration of the context, the tensors require a gradient, or, where ``value`` is False, do not."""
    for tensor in tensors:
        tensor.requires_grad_(value)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(not value)


@contextmanager
def at_test_time(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and compiled modules run as they are written, for the duration of the context.

    Dropout is off and batch statistics are frozen: the curvature is that of the function the model is at test time. A compiler would
    trace the hooks, which add to views of factors: inductor forgets where such a view begins in dynamic shapes, and what aot_autograd
    compiled cannot be differentiated under vmap.
    """
    with evaluation_mode(model), run_as_written(), _without_fastpath(), _differentiable_recurrence(model):
        yield


@contextmanager
def _differentiable_recurrence(model: nn.Module) -> Iterator[None]:
    """For the duration of the context, recurrent layers on CUDA are torch's own: cuDNN's have no gradients in evaluation mode."""
    enabled: list[bool] = []  # before a layer's call

    def enter(*_: Any) -> None:
        enabled.append(torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False

    def leave(*_: Any) -> None:
        if enabled:
            torch.backends.cudnn.enabled = enabled.pop()

    recurrent = [
        m for m in model.modules() if isinstance(m, nn.RNNBase) and any(p.is_cuda for p in m.parameters(False))
    ]
    with hooks(recurrent, before=enter), hooks(recurrent, after=leave, prepend=True, always_call=True):
        yield

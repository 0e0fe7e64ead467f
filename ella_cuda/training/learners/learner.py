"""Interface of what the evidence steps of a training move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, evidence_gradient
from ella_cuda.training.checks import positive


class Learner:
    """Hyperparameters that the evidence steps of :class:`ella_cuda.training.MarglikTrainer` move. A subclass sets ``name`` and
    implements :meth:`step`; the other methods have defaults.

    An evidence step fits the Laplace approximation inside :meth:`differentiable` of all learners, calls :meth:`step` of those without
    tensors in the network, records, and last calls :meth:`step` of those with tensors.

    A learner of the package is called with the model, the number of evidence steps, and its keyword arguments, which are arguments of
    :class:`ella_cuda.training.MarglikTrainer` too.

    Attributes:
        name: of the learner in checkpoints, settings and evaluations; no two of a training are the same.
        optimizer: of what it learns, or None; its state is in :meth:`state_dict`.
        run_settings: of a learner of the package: the default and the help of the arguments that ``ella-cuda train`` has as options.
        paths: of a learner of the package: the paths of :data:`ella_cuda.models.PATHS` one of which has what it learns; empty where any
            network has.
        alone: of a learner of the package: whether ``ella-cuda train`` learns it in runs of its own.
    """

    name: str
    optimizer: torch.optim.Optimizer | None = None
    run_settings: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    paths: ClassVar[frozenset[str]] = frozenset()
    alone: ClassVar[bool] = False

    def tensors(self) -> dict[str, Tensor]:
        """The network's buffers that it learns, by names of its choice; none for hyperparameters outside the network."""
        return {}

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """The tensors require a gradient for the duration of the context."""
        before = [(tensor, tensor.requires_grad) for tensor in self.tensors().values()]
        for tensor, _ in before:
            tensor.requires_grad_()
        try:
            yield
        finally:
            for tensor, required in before:
                tensor.requires_grad_(required)

    def gradients(self, la: KronLaplace, loader: Iterable[Any]) -> dict[str, Tensor] | None:
        """The gradients for :meth:`step` by a way of the learner's own; None where those of ``la``, whose factors are held, are wanted.

        Args:
            la: fitted at the present values.
            loader: of the evidence's data; of this process' part where several train together, whose group is ``loader.group``.
        """
        return None

    def step(self, la: KronLaplace, gradients: Mapping[str, Tensor]) -> None:
        """Move what it learns.

        Args:
            la: fitted to the evidence's data at the present values.
            gradients: of ``la.log_marginal_likelihood() / la.n_data`` in :meth:`tensors`, by their names; see :meth:`gradients`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement step(la, gradients).")

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on, by names that no other setting of the training has, such as ``lr_<name>``."""
        return {}

    def record(self) -> Any:
        """What an evaluation records, numbers in lists and dicts; None for nothing. At an evidence step: the values that its evidence
        is of."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs beside the network's buffers, in tensors and plain values."""
        return {} if self.optimizer is None else {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave; the network's buffers are back already."""
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


class BufferLearner(Learner):
    """Buffers of the network, learned by one Adam step along the evidence's gradient at each evidence step.

    The buffers are the truth, so that users may change them: Adam's leaves, float64 whatever the buffers' dtype, are read from them
    before a step, and the buffers are written after it.

    Args:
        name: of the learner.
        model: the network.
        buffers: their names in the network.
        lr: Adam's learning rate.
        logarithmic: whether Adam moves their logarithms, so that they stay positive.
        hold_factors: whether the gradient is that at held factors, which costs no further pass over the data; otherwise factors follow the
            buffers, see :func:`ella_cuda.laplace.evidence_gradient`.

    Raises:
        AttributeError: the network has no buffer of that name.
        TypeError: lr is no number.
        ValueError: lr is not positive, or an entry whose logarithm is to be learned is not.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        buffers: Sequence[str],
        lr: float,
        logarithmic: bool = False,
        hold_factors: bool = True,
    ) -> None:
        self.name, self.logarithmic, self.hold_factors = name, logarithmic, hold_factors
        self.lr = positive("lr", lr, f"learner {name!r}")
        self._model, self._names = model, tuple(buffers)
        self._leaves = [buffer.detach().double().clone().requires_grad_() for buffer in self.tensors().values()]
        self._read()
        self.optimizer = torch.optim.Adam(self._leaves, lr=self.lr)

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._model.get_buffer(name) for name in self._names}

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        if not self.hold_factors:
            yield
            return
        with super().differentiable():
            yield

    def gradients(self, la: KronLaplace, loader: Iterable[Any]) -> dict[str, Tensor] | None:
        return None if self.hold_factors else self._followed(la, loader)

    def _followed(self, la: KronLaplace, loader: Iterable[Any], **how: Any) -> dict[str, Tensor]:
        """:func:`ella_cuda.laplace.evidence_gradient` for a data point."""
        found = evidence_gradient(la, loader, list(self._names), group=getattr(loader, "group", None), **how)
        return {name: gradient / la.n_data for name, gradient in found.items()}

    def step(self, la: KronLaplace, gradients: Mapping[str, Tensor]) -> None:
        self._read()
        for leaf, (name, buffer) in zip(self._leaves, self.tensors().items(), strict=True):
            gradient = gradients[name]
            leaf.grad = -(gradient * buffer if self.logarithmic else gradient).double()
        self.optimizer.step()
        with torch.no_grad():
            for leaf, buffer in zip(self._leaves, self.tensors().values(), strict=True):
                buffer.copy_(leaf.exp() if self.logarithmic else leaf)

    def _read(self) -> None:
        with torch.no_grad():
            for leaf, (name, buffer) in zip(self._leaves, self.tensors().items(), strict=True):
                if self.logarithmic and not (buffer > 0).all():
                    raise ValueError(
                        f"learner {self.name!r}: the buffer {name!r} must be positive, for its logarithm is learned."
                    )
                leaf.copy_(buffer.double().log() if self.logarithmic else buffer)

    def settings(self) -> dict[str, Any]:
        held = {} if self.hold_factors else {f"hold_factors_{self.name}": False}
        return {f"lr_{self.name}": self.lr, **held}

    def record(self) -> dict[str, Any]:
        return {name: buffer.tolist() for name, buffer in self.tensors().items()}

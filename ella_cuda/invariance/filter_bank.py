"""A first layer that is invariant to learned degrees: every filter transformed in S ways, its activations averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment
from ella_cuda.augment.affine import with_room
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.ops._precision import without_autocast
from ella_cuda.ops.affine_copies import affine_adjoint
from ella_cuda.ops.averaged_filters import ACTIVATIONS, activated, averaged_filters
from ella_cuda.training.checks import positive_integer

PATHS = ("filters", "inputs")


class InvariantFilterBank(nn.Module):
    r"""H features of an image, averaged over S affine transformations with learned amounts: ``(N, C, H, W) -> (N, n_filters)``.

    .. math:: \bar\phi_h(x) = \frac1S \sum_s a(w_h^T T_s x + b_h) = \frac1S \sum_s a\big((T_s^T w_h)^T x + b_h\big)

    With ``path="filters"`` it is filters that are transformed: S H of them for a batch, and one matrix product. With ``path="inputs"`` it is
    images, N S of them: the reference. Both are the same: filters are transformed by the transpose of the images' bilinear
    interpolation.

    Draws are those of ``augment``. Filters are transformed once for a batch, so all of its images have the same draws: "independent" draws
    S anew at each call. ``path="inputs"`` draws for each image. ``with bank.augment.held():`` keeps draws over calls.

    Amounts make the invariance partial: features change little under transformations within them, and as they do otherwise beyond. Which
    transformations there are is said by the augmentation's ``generators``. Amounts are hyperparameters: :class:`ElboTrainer` learns them by
    the bound.

    Parameters:
        weight: ``(n_filters, C, H, W)``. bias: ``(n_filters,)``.

    Args:
        in_shape: ``(C, H, W)`` of the images.
        n_filters: features.
        augment: the transformations; filters have its dtype and device.
        activation: "relu", "tanh", "identity" or "gaussian", :math:`\exp(-z^2/2)`.
        bias: whether there is one.
        path: "filters" or "inputs"; may be changed.

    Raises:
        TypeError: augment is no :class:`ella_cuda.augment.AffineAugment`.
        ValueError: an argument does not fit; in forward, x has another shape, dtype or device, or draws are not shared.

    Source: van der Ouderaa and van der Wilk, "Learning invariant weights in neural networks", UAI 2022; van der Wilk, "Learnable inductive
    biases in neural networks", 2022, equations 8, 9 and 11.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        n_filters: int,
        augment: AffineAugment,
        *,
        activation: str = "relu",
        bias: bool = True,
        path: str = "filters",
    ) -> None:
        super().__init__()
        if not isinstance(augment, AffineAugment):
            raise TypeError(f"InvariantFilterBank: augment must be an AffineAugment, got {type(augment).__name__}.")
        if len(in_shape) != 3:
            raise ValueError(f"InvariantFilterBank: in_shape must be (C, H, W), positive integers, got {in_shape!r}.")
        self.in_shape = tuple(
            positive_integer("each size of in_shape", side, "InvariantFilterBank") for side in in_shape
        )
        self.n_filters, self.augment = positive_integer("n_filters", n_filters, "InvariantFilterBank"), augment
        self.activation = check_choice("InvariantFilterBank: activation", activation, tuple(ACTIVATIONS))
        self.path = path
        kind = {"device": augment.raw.device, "dtype": augment.raw.dtype}
        self.weight = nn.Parameter(torch.empty(self.n_filters, *self.in_shape, **kind))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.n_filters, **kind)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform as those of ``nn.Linear``."""
        bound = 1 / math.sqrt(math.prod(self.in_shape))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def path(self) -> str:
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        self._path = check_choice("InvariantFilterBank: path", path, PATHS)

    def filters(self, eps: Tensor | None = None) -> Tensor:
        """The transformed filters, ``(S, n_filters, C, H, W)``.

        Args:
            eps: draws ``(S, k)`` or ``(1, S, k)``; None takes those held, or draws.

        Raises:
            TypeError, ValueError: draws do not fit, or are not shared.
        """
        eps = self.augment.eps_for(self.weight[:1], eps)
        if len(eps) != 1:
            raise ValueError(
                f"InvariantFilterBank: path='filters' needs draws that all inputs share, (1, S, k), got {tuple(eps.shape)}; take "
                "path='inputs' for draws of each input."
            )
        # (S, 1, 2, 3): the copies are a batch.
        maps = self.augment.maps(eps, self.augment.eta, self.in_shape[1:]).transpose(0, 1)
        found = with_room(affine_adjoint, self.weight.flatten(0, 1).expand(len(maps), 1, -1, -1, -1), maps)
        return found.unflatten(1, self.weight.shape[:2])

    def forward(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """``(N, C, H, W) -> (N, n_filters)``, at given draws or the augmentation's own."""
        self._check(x)
        with without_autocast(x.device.type):
            if self.path == "inputs":
                return self._activated(self._of_copies(x, eps)).mean(1)
            return averaged_filters(x.flatten(1), self.filters(eps).flatten(2), self.bias, self.activation)

    def by_copy(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """The features before they are averaged, ``(N, C, H, W) -> (N, S, n_filters)``; as :meth:`forward` takes them."""
        self._check(x)
        with without_autocast(x.device.type):
            if self.path == "inputs":
                return self._activated(self._of_copies(x, eps))
            return self._activated(torch.einsum("nd,shd->nsh", x.flatten(1), self.filters(eps).flatten(2)))

    def _of_copies(self, x: Tensor, eps: Tensor | None) -> Tensor:
        copies = self.augment(x) if eps is None else self.augment(x, eps=eps)
        return copies.flatten(2) @ self.weight.flatten(1).T

    def _activated(self, z: Tensor) -> Tensor:
        return activated(z if self.bias is None else z + self.bias, ACTIVATIONS[self.activation])

    def _check(self, x: Tensor) -> None:
        if x.dim() != 4 or tuple(x.shape[1:]) != self.in_shape:
            raise ValueError(
                f"InvariantFilterBank: x must have shape (N, {', '.join(map(str, self.in_shape))}), got {tuple(x.shape)}."
            )
        if x.dtype != self.weight.dtype or x.device != self.weight.device:
            raise ValueError(
                f"InvariantFilterBank: x is {x.dtype} on {x.device}, the filters are {self.weight.dtype} on {self.weight.device}; convert "
                "one with .to()."
            )

    def extra_repr(self) -> str:
        said = f"{self.in_shape}, {self.n_filters}, activation={self.activation!r}, bias={self.bias is not None}"
        return f"{said}, path={self.path!r}"

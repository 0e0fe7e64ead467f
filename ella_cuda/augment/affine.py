"""The affine transformations of images, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ella_cuda.augment.base import Augment, Init
from ella_cuda.ops import affine_copies

GENERATORS = ("tx", "ty", "rotation", "sx", "sy", "shear")
ENTRIES = {  # (row, column): value
    "tx": {(0, 2): 1.0},
    "ty": {(1, 2): 1.0},
    "rotation": {(0, 1): -1.0, (1, 0): 1.0},
    "sx": {(0, 0): 1.0},
    "sy": {(1, 1): 1.0},
    "shear": {(0, 1): 1.0, (1, 0): 1.0},
}
SERIES = 10  # terms after the first, of functions of |D| < 1: 1/20! is below float64's rounding
HALVINGS, TAYLOR = 4, 14  # of the translation's integral: 1e-16 for eigenvalues up to 8 in absolute value


def lie_generators(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The generators of the affine group of the plane, ``(6, 3, 3)``, in the order of ``GENERATORS``: translations along x and y, rotation,
    scalings along x and y, shear. They act on homogeneous coordinates (x, y, 1).

    Args:
        device, dtype: None is torch's default.

    Source: van der Ouderaa and van der Wilk, "Learning invariant weights in neural networks", UAI 2022.
    """
    found = torch.zeros(len(GENERATORS), 3, 3, dtype=dtype)
    for matrix, name in zip(found, GENERATORS, strict=True):
        for place, value in ENTRIES[name].items():
            matrix[place] = value
    return found.to(device)


def affine_matrix(eps: Tensor, eta: Tensor, generators: str | Sequence[str] = "all", aspect: float = 1.0) -> Tensor:
    r"""Affine transformations :math:`T = \exp(\sum_i \epsilon_i \eta_i G_i)`, in closed form: ``(..., k), (k,) -> (..., 3, 3)``.

    Differentiable to any order in eps and eta, everywhere. The linear part is :math:`e^a = e^m (C I + S (a - m I))` with
    :math:`m = \mathrm{tr}(a)/2`, :math:`D = (a_{00} - a_{11})^2/4 + a_{01} a_{10}`, :math:`C = \cosh\sqrt D` and
    :math:`S = \sinh\sqrt D/\sqrt D`: cosine and sine for D < 0, a series where D is small. The translation is
    :math:`\int_0^1 e^{ua} du\, b`, by a Taylor series of a / 16 and four doublings, which divide by nothing that may be 0.

    Units: translations in half images (1 moves the middle to the border), rotation in radians, scales and shear logarithmic.

    Args:
        eps: draws, usually in [-1, 1].
        eta: amounts, ``(k,)`` or what broadcasts against eps.
        generators: "all", a name of ``GENERATORS`` or several; the k of eps and eta in their order.
        aspect: width over height. Coordinates are normalised: both sides have length 2. With another aspect than 1 rotations and shear are
            those of the image, not of normalised coordinates.

    Raises:
        TypeError: eps or eta is no floating point tensor, or generators are no words.
        ValueError: the last axes are not k long, or a generator is unknown or named twice.

    Source: Immer, van der Ouderaa et al., "Invariance learning in deep neural networks with differentiable Laplace approximations",
    NeurIPS 2022, for the parameterisation; the closed form is the matrix exponential's of 2 x 2 matrices.
    """
    names = as_generators("affine_matrix", generators)
    for name, tensor in (("eps", eps), ("eta", eta)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"affine_matrix: {name} must be a floating point tensor (..., {len(names)}), got {got}.")
        if not tensor.dim() or tensor.shape[-1] != len(names):
            raise ValueError(
                f"affine_matrix: {name} must have shape (..., {len(names)}), for {', '.join(names)}, got {tuple(tensor.shape)}."
            )
    steps = dict(zip(names, (eps * eta).unbind(-1), strict=True))
    zero = torch.zeros_like(next(iter(steps.values())))
    tx, ty, rotation, sx, sy, shear = (steps.get(name, zero) for name in GENERATORS)
    upper, lower = (shear - rotation) / aspect, (shear + rotation) * aspect
    mean, difference = (sx + sy) / 2, (sx - sy) / 2
    squared = difference * difference + upper * lower
    even, odd = _cosh_sinhc(squared)
    scale = mean.exp()
    even, odd = scale * even, scale * odd
    rows = [even + odd * difference, odd * upper, zero, odd * lower, even - odd * difference, zero]
    if "tx" in steps or "ty" in steps:
        moves, turns = _integral(mean, squared)
        rows[2] = moves * tx + turns * (difference * tx + upper * ty)
        rows[5] = moves * ty + turns * (lower * tx - difference * ty)
    rows += [zero, zero, zero + 1]
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def as_generators(where: str, generators: str | Sequence[str]) -> tuple[str, ...]:
    """Their names; TypeError where they are no words, ValueError where one is unknown or named twice, or none is named."""
    if not isinstance(generators, (str, list, tuple)):
        raise TypeError(
            f"{where}: generators must be a name or a list or tuple of names, got {type(generators).__name__}."
        )
    names = (generators,) if isinstance(generators, str) else tuple(generators)
    names = GENERATORS if names == ("all",) else names
    unknown = [name for name in names if name not in GENERATORS]
    if unknown or not names or len({*names}) < len(names):
        raise ValueError(
            f"{where}: generators must be 'all' or some of {', '.join(GENERATORS)}, each once, got {generators!r}."
        )
    return names


def _cosh_sinhc(squared: Tensor) -> tuple[Tensor, Tensor]:
    """cosh(r) and sinh(r)/r as functions of r squared, of any sign."""
    large, negative = squared >= 1, squared <= -1
    # A branch that is not taken has an argument at which its derivatives are finite: 0 times infinity would be NaN.
    small = torch.where(large | negative, 0.0, squared)
    cosh, sinhc = torch.ones_like(small), torch.ones_like(small)
    for n in range(SERIES, 0, -1):
        cosh = 1 + cosh * small / (2 * n * (2 * n - 1))
        sinhc = 1 + sinhc * small / (2 * n * (2 * n + 1))
    root = torch.where(large, squared, 1.0).sqrt()
    angle = torch.where(negative, -squared, 1.0).sqrt()
    cosh = torch.where(large, root.cosh(), torch.where(negative, angle.cos(), cosh))
    sinhc = torch.where(large, root.sinh() / root, torch.where(negative, angle.sin() / angle, sinhc))
    return cosh, sinhc


def _integral(mean: Tensor, squared: Tensor) -> tuple[Tensor, Tensor]:
    """P and Q of the integral of exp(u a) over u from 0 to 1, P I + Q (a - m I), where the square of a - m I is ``squared`` times I."""
    m, d = mean / 2**HALVINGS, squared / 4**HALVINGS
    p, q = torch.ones_like(m), torch.zeros_like(m)
    for n in range(TAYLOR + 1, 1, -1):  # Horner's scheme of the sum of z^n / (n + 1)!
        p, q = 1 + (m * p + d * q) / n, (p + m * q) / n
    even, odd = 1 + m * p + d * q, p + m * q  # exp(z) = 1 + z times the integral
    for i in range(HALVINGS):
        if i:
            even, odd = even * even + d * odd * odd, 2 * even * odd
        p, q = (p * (even + 1) + d * q * odd) / 2, (q * (even + 1) + p * odd) / 2
    return p, q / 2**HALVINGS


def with_room(op: Callable[[Tensor, Tensor], Tensor], x: Tensor, maps: Tensor) -> Tensor:
    """``op(x, maps)``, a copy or its adjoint, of maps of :meth:`AffineAugment.maps`. A side of one pixel gets a zero before and after it for
    that: all its normalised coordinates are 0, so that no map would lead out of it.
    """
    down, right = (int(side == 1) for side in x.shape[-2:])
    if not (down or right):
        return op(x, maps)
    found = op(F.pad(x, (right, right, down, down)), maps)
    return found[..., down : found.shape[-2] - down, right : found.shape[-1] - right].contiguous()


class AffineAugment(Augment):
    r"""S affine copies of each image: ``(N, C, H, W) -> (N, S, C, H, W)``, with learned amounts of translation, rotation, scale and shear.

    .. math:: T = \exp(\sum_i \epsilon_i \eta_i G_i), \qquad \epsilon \sim U[-1, 1]^k

    T maps the copy's normalised coordinates to the image's; copies are bilinear, with zeros outside, and corners aligned. Rotations are
    those of the image, rectangular ones too. At :math:`\eta = 0` copies are the image; rotation at :math:`\pi` alone is the full circle.
    See :class:`Augment` for draws and amounts; ``eta``, ``amounts()``, ``set_eta`` and ``held`` are there.

    Sampling decides what is learned: few independent draws act as noise, and the evidence pushes amounts down. Training draws independently;
    an evidence pass holds one shared set: ``with augment.held(): la.fit(loader)``.

    Units: ``tx`` and ``ty`` in half images, ``rotation`` in radians, at most :math:`\pi`, scales and shear logarithmic.

    Args:
        n_samples: S.
        generators: "all", or some of "tx", "ty", "rotation", "sx", "sy", "shear".
        init: amounts at the start, a number, numbers in the order of ``generators`` or a mapping by name; positive with
            constraint="softplus", not 0 with sampling="grid".
        sampling: "independent", "shared", "grid" (S is a power m**k) or "sobol", see :class:`Augment`.
        constraint: "softplus" or "raw".
        device, dtype: of the amounts, float32 or float64; None is torch's default.

    Raises:
        TypeError, ValueError: an argument does not fit; in forward, x is no tensor ``(N, C, H, W)`` of the amounts' dtype and device.

    Source: Immer, van der Ouderaa et al., NeurIPS 2022; the augmentation of Benton et al., "Learning invariances in neural networks",
    NeurIPS 2020, has other generators of scale.
    """

    def __init__(
        self,
        n_samples: int,
        generators: str | Sequence[str] = "all",
        init: Init = 0.1,
        sampling: str = "independent",
        constraint: str = "softplus",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        names = as_generators(type(self).__name__, generators)
        kind = {"limits": {"rotation": math.pi}, "device": device, "dtype": dtype}
        super().__init__(n_samples, names, init, sampling, constraint, **kind)

    @property
    def generators(self) -> tuple[str, ...]:
        return self.names

    def check_input(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise ValueError(f"{self._name}: x must have shape (N, C, H, W), got {tuple(x.shape)}.")

    def maps(self, eps: Tensor, eta: Tensor, size: Sequence[int]) -> Tensor:
        """The first two rows of the matrices of images of a size ``(H, W)``: ``(..., k), (k,) -> (..., 2, 3)``. Those of images with a side
        of one pixel are for :func:`with_room`; half of such an image is 0 pixels, and so is a translation along that side."""
        height, width = (
            2 if side == 1 else max(side - 1, 1) for side in size
        )  # corners are aligned: pixel centres are side - 1 apart
        if 1 in size:
            flat = {name for name, side in (("ty", size[0]), ("tx", size[1])) if side == 1}
            parts = zip(self.names, eta.unbind(-1), strict=True)
            eta = torch.stack([amount * (name not in flat) for name, amount in parts], -1)
        return affine_matrix(eps, eta, self.names, width / height)[..., :2, :]

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        return with_room(affine_copies, x, self.maps(eps, eta, x.shape[2:]))

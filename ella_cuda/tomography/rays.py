"""Linear maps from images to measurements: line integrals of parallel rays, and users' own pairs of a map and its adjoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ella_cuda.ops._precision import in_own_precision
from ella_cuda.training.checks import positive_integer

DTYPES = (torch.float32, torch.float64)
DENSE = 1 << 22  # entries of a matrix, at most, that is held dense too
SINGULAR_VECTORS = 100  # of A, that the noise in the image is counted along
PROBES = 3  # random images and data by which a user's adjoint is checked


class LinearMap:
    """A linear map A from images to measurements, with its adjoint: what :class:`LinearisedDIP` needs of one.

    Both directions are differentiable to any order, in reverse and in forward mode, and under ``torch.func.vmap``: the derivative of a
    linear map is the map, and its transpose the adjoint. A subclass implements ``_product``.

    Attributes:
        image_shape: ``(H, W)``.
        data_shape: of the measurements of an image.
    """

    image_shape: tuple[int, int]
    data_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """A x: ``(..., H, W) -> (..., *data_shape)``.

        Raises:
            TypeError: x is no float32 or float64 tensor.
            ValueError: x does not end with the image's shape.
        """
        return _Product.apply(self, self._checked("x", x, self.image_shape), False)

    def adjoint(self, y: Tensor) -> Tensor:
        """A' y: ``(..., *data_shape) -> (..., H, W)``.

        Raises:
            TypeError: y is no float32 or float64 tensor.
            ValueError: y does not end with the data's shape.
        """
        return _Product.apply(self, self._checked("y", y, self.data_shape), True)

    def fbp(self, y: Tensor) -> Tensor:
        """An image from measurements, the network's input: ``(..., *data_shape) -> (..., H, W)``.

        Here the multiple of A' y whose measurements are nearest to y; :class:`RayTransform` has filtered back-projection.
        """
        image = self.adjoint(y)
        again = self.forward(image).flatten(-len(self.data_shape))
        y = y.flatten(-len(self.data_shape))
        size = (again * again).sum(-1)
        return image * ((again * y).sum(-1) / torch.where(size > 0, size, 1.0))[..., None, None]

    def noise_gain(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> float:
        """Variance of a pixel, on average, for measurements' noise of variance 1 as the image sees it: the mean of the diagonal of the
        pseudo-inverse of A'A along A's first 100 singular vectors.

        Args:
            dtype, device: that products are taken in.

        Source: Antoran, Barbano et al., TMLR 2023, appendix.
        """
        d, n = math.prod(self.image_shape), math.prod(self.data_shape)
        count = min(SINGULAR_VECTORS, d, n)
        kind = {"dtype": dtype, "device": device}
        if d * n <= DENSE:
            matrix = self.forward(torch.eye(d, **kind).view(d, *self.image_shape)).reshape(d, n)
            values = torch.linalg.svdvals(matrix.double())[:count].square()
        else:
            generator = torch.Generator("cpu").manual_seed(0)
            basis = torch.randn(d, min(count + 10, d), generator=generator, dtype=torch.float64, device="cpu").to(
                device
            )
            for _ in range(20):
                basis = torch.linalg.qr(self._normal(basis, dtype)).Q
            values = torch.linalg.eigvalsh(basis.T @ self._normal(basis, dtype)).flip(0)[:count]
        seen = values > values[0] * torch.finfo(dtype).eps * d
        return float((1 / values[seen]).sum() / d)

    def _normal(self, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """A'A of every column, ``(d, S)``."""
        images = columns.T.to(dtype).reshape(-1, *self.image_shape)
        return self.adjoint(self.forward(images)).reshape(len(images), -1).T.double()

    def _product(self, x: Tensor, adjoint: bool) -> Tensor:
        raise NotImplementedError

    def _checked(self, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        where = type(self).__name__
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{where}: {name} must be a float32 or float64 tensor, got {got}.")
        if tuple(value.shape[-len(shape) :]) != shape:
            axes = ", ".join(map(str, shape))
            raise ValueError(f"{where}: {name} must have shape (..., {axes}), got {tuple(value.shape)}.")
        return value


class _Product(torch.autograd.Function):
    """A x or A' y of a linear map."""

    @staticmethod
    def forward(linear: LinearMap, x: Tensor, adjoint: bool) -> Tensor:
        return linear._product(x, adjoint)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[LinearMap, Tensor, bool], output: Tensor) -> None:
        ctx.linear, _, ctx.adjoint = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, _Product.apply(ctx.linear, gradient, not ctx.adjoint), None

    @staticmethod
    def jvp(ctx: Any, _: None, along: Tensor, __: None) -> Tensor:
        return _Product.apply(ctx.linear, along, ctx.adjoint)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], linear: LinearMap, x: Tensor, adjoint: bool) -> tuple[Tensor, int]:
        return _Product.apply(linear, x.movedim(in_dims[1], 0), adjoint), 0


class RayTransform(LinearMap):
    r"""Line integrals of an image along parallel rays, by Joseph's linear interpolation: ``(..., H, W) -> (..., angles, detectors)``.

    At angle :math:`\varphi` the detector at position s measures the integral along :math:`x \cos\varphi + y \sin\varphi = s`, with x to the
    right and y downwards from the image's middle. A ray that is steeper than 45 degrees meets every row once, between two pixel centres
    whose values it interpolates; a flatter one every column. The image is 0 outside. At 0 the measurements are sums of columns, at
    :math:`\pi/2` of rows. The map is a sparse matrix, and its adjoint that matrix's transpose.

    Units: lengths in sides of a pixel, detectors at distance 1, angles in radians.

    Args:
        image_size: the side of a square image, or ``(H, W)``.
        angles: radians, ``(angles,)``; a number n is n angles evenly over half a turn, from 0.
        detector_size: detectors of each angle, around the image's middle; None is the least odd number that sees the diagonal (41 for
            28 x 28).

    Attributes:
        angles: ``(angles,)``, float64.
        image_shape, data_shape: ``(H, W)`` and ``(angles, detectors)``.

    Raises:
        ValueError: an argument is out of range; in ``forward`` and ``adjoint``, a shape does not fit.

    Source: Joseph, "An improved algorithm for reprojecting rays through pixel images", IEEE Trans. Med. Imaging 1982.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        angles: int | Sequence[float] | Tensor,
        detector_size: int | None = None,
    ) -> None:
        self.image_shape = _image_shape("RayTransform", image_size)
        self.angles = _angles(angles)
        if detector_size is None:
            detector_size = math.ceil(math.hypot(*self.image_shape)) // 2 * 2 + 1
        detectors = positive_integer("detector_size", detector_size, "RayTransform")
        self.data_shape = len(self.angles), detectors
        self._sparse = _joseph(self.image_shape, self.angles, detectors)
        self._matrices: dict[tuple[torch.dtype, torch.device, bool], Tensor] = {}

    def matrix(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
        """A as a sparse COO tensor ``(angles * detectors, H * W)``."""
        return self._sparse.to(device, dtype)

    def fbp(self, y: Tensor) -> Tensor:
        """Filtered back-projection, for angles evenly over half a turn: ``(..., angles, detectors) -> (..., H, W)``.

        The filter is the band-limited ramp, whose values are 1/4 at 0, :math:`-1/(\\pi n)^2` at odd distances n and 0 at others.

        Source: Ramachandran and Lakshminarayanan, PNAS 1971.
        """
        y = self._checked("y", y, self.data_shape)
        detectors = self.data_shape[1]
        distance = torch.arange(1 - detectors, detectors, dtype=torch.float64, device="cpu")
        ramp = torch.where(distance % 2 == 0, 0.0, -1 / (math.pi * distance) ** 2)
        ramp[detectors - 1] = 0.25
        size = 2 * detectors - 1 + detectors - 1  # of a convolution that does not wrap
        spectrum = torch.fft.rfft(ramp.to(y), n=size) * torch.fft.rfft(y, n=size)
        filtered = torch.fft.irfft(spectrum, n=size)[..., detectors - 1 : 2 * detectors - 1]
        # Each pixel looks its value up between two detectors: smoother than the adjoint.
        height, width = self.image_shape
        rows = torch.arange(height, dtype=torch.float64, device="cpu")[:, None] - (height - 1) / 2
        columns = torch.arange(width, dtype=torch.float64, device="cpu") - (width - 1) / 2
        padded = torch.nn.functional.pad(filtered, (1, 2))
        image = y.new_zeros(*y.shape[:-2], height, width)
        for index, angle in enumerate(self.angles):
            at = (columns * angle.cos() + rows * angle.sin() + (detectors + 1) / 2).clamp(0, detectors + 1)
            left = at.long().to(y.device)
            share = (at - at.floor()).to(y)
            image = image + padded[..., index, left] * (1 - share) + padded[..., index, left + 1] * share
        return image * (math.pi / len(self.angles))

    @in_own_precision
    def _product(self, x: Tensor, adjoint: bool) -> Tensor:
        within, into = (self.data_shape, self.image_shape) if adjoint else (self.image_shape, self.data_shape)
        lead = x.shape[: x.dim() - 2]
        rows = x.reshape(math.prod(lead), math.prod(within))
        matrix = self._held(x.dtype, x.device, adjoint)
        if matrix.layout == torch.strided:
            return (rows @ matrix.T).reshape(*lead, *into)
        return torch.sparse.mm(matrix, rows.T.contiguous()).T.reshape(*lead, *into)

    def _held(self, dtype: torch.dtype, device: torch.device, adjoint: bool) -> Tensor:
        """The matrix or its transpose, made once for each type and device; a dense copy where that is small, whose products are faster."""
        key = dtype, device, adjoint
        if key not in self._matrices:
            matrix = (self._sparse.t() if adjoint else self._sparse).to(device, dtype)
            self._matrices[key] = matrix.to_dense() if matrix.numel() <= DENSE else matrix.coalesce()
        return self._matrices[key]


class RayOperator(LinearMap):
    """A map and its adjoint that somebody else computes, in place of a :class:`RayTransform`: of deepinv, tomosipo, ODL, or any functions.

    That the map is linear and the other its exact adjoint is checked once, here, on random images: covariances and gradients are wrong
    with back-projections that are none, as those with another interpolation than the projection's.

    Args:
        forward, adjoint: functions of a tensor that return one, such as ``physics.A`` and ``physics.A_adjoint`` of deepinv, or ``A`` and
            ``A.T`` of tomosipo. They need not be differentiable, may change their argument, a copy, and may return one
            buffer each time.
        image_size: the side of a square image, or ``(H, W)``.
        image_shape: the shape in which ``forward`` takes an image and ``adjoint`` returns it, as many numbers as the image has:
            ``(1, 1, H, W)`` for deepinv, ``(1, H, W)`` for tomosipo; None is ``(H, W)``.
        batched: whether both functions take several images or data at once, along a new first axis; else they are called for each.
        fbp: a function of data that returns an image, for the network's input; None is the best multiple of the adjoint's image.
        dtype, device: of the check.

    Attributes:
        image_shape: ``(H, W)``.
        data_shape: what ``forward`` returns for an image.

    Raises:
        TypeError: a function returns no float32 or float64 tensor.
        ValueError: a shape does not fit, the map is not linear, or the adjoint is not the map's.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        image_size: int | tuple[int, int],
        *,
        image_shape: Sequence[int] | None = None,
        batched: bool = False,
        fbp: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.image_shape = _image_shape("RayOperator", image_size)
        self._takes = self.image_shape if image_shape is None else tuple(image_shape)
        if math.prod(self._takes) != math.prod(self.image_shape):
            raise ValueError(
                f"RayOperator: image_shape must have the {math.prod(self.image_shape)} numbers of a {self.image_shape} image, got "
                f"{self._takes}."
            )
        self._functions, self._batched, self._fbp = (forward, adjoint), batched, fbp
        blank = torch.zeros(self._takes, dtype=dtype, device=device)
        found = forward(blank[None] if batched else blank)
        _returned("forward", found)
        self.data_shape = tuple(found.shape[1:] if batched else found.shape)
        if not self.data_shape:
            raise ValueError(
                "RayOperator: forward must return measurements along one axis at least, got a single number."
            )
        self._check(dtype, torch.device(device))

    def fbp(self, y: Tensor) -> Tensor:
        if self._fbp is None:
            return super().fbp(y)
        y = self._checked("y", y, self.data_shape)
        rows = y.reshape(-1, *self.data_shape).clone()
        found = [_returned("fbp", self._fbp(row[None] if self._batched else row)) for row in rows]
        if wrong := [tuple(image.shape) for image in found if image.numel() != math.prod(self.image_shape)]:
            raise ValueError(f"RayOperator: fbp must return an image {self.image_shape}, got {wrong[0]}.")
        return torch.stack(found).reshape(*y.shape[: y.dim() - len(self.data_shape)], *self.image_shape)

    def _product(self, x: Tensor, adjoint: bool) -> Tensor:
        within, into = (self.data_shape, self.image_shape) if adjoint else (self.image_shape, self.data_shape)
        takes = within if adjoint else self._takes
        lead = x.shape[: x.dim() - len(within)]
        rows, function = x.reshape(math.prod(lead), *takes).clone(), self._functions[adjoint]  # which may change it
        if not len(rows):
            return x.new_zeros(*lead, *into)
        name = "adjoint" if adjoint else "forward"
        several = rows[None] if self._batched else rows
        found = torch.stack([_returned(name, function(some)) for some in several])
        if found.numel() != math.prod(lead) * math.prod(into):
            got = tuple(found.shape)
            raise ValueError(f"RayOperator: {name} must return {into} for each of {len(rows)} inputs, got {got}.")
        return found.reshape(*lead, *into)

    def _check(self, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator("cpu").manual_seed(0)

        def drawn(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(PROBES, *shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)

        x, y = drawn(self.image_shape), drawn(self.data_shape)
        rounding = torch.finfo(dtype).eps ** 0.5
        projected = self.forward(x)
        together = self.forward((x[0] - 2 * x[1])[None])[0]
        size = projected[0].norm() + 2 * projected[1].norm()
        if not (together - projected[0] + 2 * projected[1]).norm() <= rounding * size:
            raise ValueError(
                "RayOperator: forward must be linear: the measurements of a combination of two images are not that combination of theirs. "
                "Pass the map without offset and noise."
            )
        one = (projected * y).flatten(1).double().sum(1)
        other = (x * self.adjoint(y)).flatten(1).double().sum(1)
        size = (projected.flatten(1).norm(dim=1) * y.flatten(1).norm(dim=1)).double()
        gap = ((one - other).abs() / size.clamp_min(torch.finfo(dtype).tiny)).max().item()
        if not gap <= rounding:
            raise ValueError(
                f"RayOperator: adjoint must be forward's: <A x, y> and <x, A' y> differ by {gap:.1e} of the norms of A x and y, expected at "
                f"most {rounding:.1e}. Pass a matched back-projection; where the library has none, forward's gradient is one."
            )


def _returned(name: str, found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.dtype not in DTYPES:
        got = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"RayOperator: {name} must return a float32 or float64 tensor, got {got}; wrap it.")
    return found.clone()  # a function may return one buffer each time


def _joseph(image_shape: tuple[int, int], angles: Tensor, detectors: int) -> Tensor:
    """Joseph's weights: a sparse matrix ``(angles * detectors, H * W)``, float64."""
    height, width = image_shape
    positions = torch.arange(detectors, dtype=torch.float64, device="cpu") - (detectors - 1) / 2
    rows, columns, values = [], [], []
    for index, angle in enumerate(angles.tolist()):
        cos, sin = math.cos(angle), math.sin(angle)
        steep = abs(cos) >= abs(sin)  # the ray meets every row once, else every column
        along, across = (height, width) if steep else (width, height)
        slope, shift = (cos, sin) if steep else (sin, cos)
        lines = torch.arange(along, dtype=torch.float64, device="cpu") - (along - 1) / 2
        # (detectors, along): where the ray meets the line, in pixels across.
        meets = (positions[:, None] - lines * shift) / slope + (across - 1) / 2
        first = meets.floor()
        for pixel, share in ((first, 1 - (meets - first)), (first + 1, meets - first)):
            inside = (pixel >= 0) & (pixel < across) & (share > 0)
            detector, line = inside.nonzero(as_tuple=True)
            other = pixel[inside].long()
            rows.append(index * detectors + detector)
            columns.append(line * width + other if steep else other * width + line)
            values.append(share[inside] / abs(slope))
    where = torch.stack([torch.cat(rows), torch.cat(columns)])
    size = (len(angles) * detectors, height * width)
    return torch.sparse_coo_tensor(where, torch.cat(values), size, check_invariants=False, device="cpu").coalesce()


def _angles(angles: int | Sequence[float] | Tensor) -> Tensor:
    """Radians, float64."""
    if isinstance(angles, Integral):
        count = positive_integer("angles", angles, "RayTransform")
        return torch.arange(count, dtype=torch.float64, device="cpu") * (math.pi / count)
    found = torch.as_tensor(angles, dtype=torch.float64, device="cpu")
    if found.dim() != 1 or not len(found) or not found.isfinite().all():
        raise ValueError(f"RayTransform: angles must be a positive number or finite radians (angles,), got {angles!r}.")
    return found.detach().clone()


def _image_shape(where: str, size: int | Sequence[int]) -> tuple[int, int]:
    height, width = (
        positive_integer("image_size", side, where) for side in ((size, size) if isinstance(size, Integral) else size)
    )
    return height, width

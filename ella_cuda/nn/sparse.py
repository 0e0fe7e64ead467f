"""Sparsified layers (S-FC, S-CONV): weights that are smooth functions of the position."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ella_cuda import ops
from ella_cuda.nn._autocast import full_precision
from ella_cuda.nn._sizes import Size, as_count, as_kernel_size, as_size, check_image
from ella_cuda.nn.basis import Scale, SpatialBasis
from ella_cuda.nn.circular_conv import CircularConv2d
from ella_cuda.nn.factored import FactoredLinear2d

Anchors = tuple[Tensor | None, Tensor | None]
MANY = 1 << 20


class SparseFactoredLinear2d(nn.Module):
    r"""An F-FC layer (:class:`FactoredLinear2d`) whose two weights are given at anchors: ``(N, C, H, W) -> (N, D, H', W')``.

    .. math:: U[d,c,x] = \sum_a \tilde U[d,c,a] \Psi_{in}[a,x], \qquad V[d,c,y] = \sum_a \tilde V[d,c,a] \Psi_{out}[a,y]

    As an inverse lengthscale goes to 0 the weight becomes constant over positions: with both at 0 the layer sums over the input's
    positions and gives one number for all of the output's. Each side projects its images on the basis or expands its weight,
    whichever takes fewer multiplications for the batch at hand.

    Parameters:
        weight_in: ``(D, C, A)``. weight_out: ``(D, C, A')``. bias_in: ``(D,)``, or None with ``bias=False``.
    Submodules:
        basis_in, basis_out: a :class:`SpatialBasis` each, on the input's and the output's positions.

    Args:
        in_channels: C.
        out_channels: D.
        in_size: H and W, or one number for both.
        out_size: H' and W', or one number for both.
        num_anchors: A and A', a pair or one number for both; None is half the positions of each side, rounded up.
        basis: "interpolating" or "exponential", see :func:`ella_cuda.ops.basis_matrix`.
        bias: whether the layer has a bias.
        inverse_lengthscale: :math:`\omega` per pixel at the start, a pair or one for both sides.
        anchors: a pair of ``(A, 2)`` and ``(A', 2)``, rows and columns in centred pixels at the start, each None to draw them; None
            draws both.
        device, dtype: of the parameters and buffers, float32 or float64; None is torch's default.

    Raises:
        TypeError: inverse_lengthscale or anchors are no numbers or tensors; in forward, the input is no tensor.
        ValueError: a size is not positive, or the basis unknown, or inverse_lengthscale negative, or anchors do not fit; in forward,
            the input does not fit.

    Source: van der Ouderaa et al., NeurIPS 2023, section 3.2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_size: Size,
        out_size: Size,
        num_anchors: int | tuple[int, int] | None = None,
        basis: str = "interpolating",
        bias: bool = True,
        inverse_lengthscale: Scale | tuple[Scale, Scale] = 1.0,
        anchors: Anchors | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = (
            as_count("in_channels", in_channels),
            as_count("out_channels", out_channels),
        )
        self.in_size, self.out_size = as_size("in_size", in_size), as_size("out_size", out_size)
        sides = zip(*_pairs(num_anchors, inverse_lengthscale, anchors), strict=True)
        kind = {"device": device, "dtype": dtype}
        made = []
        for side, size, (count, scale, places) in zip(("in", "out"), (self.in_size, self.out_size), sides, strict=True):
            try:
                made.append(SpatialBasis(size, count, basis, scale, places, **kind))
            except (TypeError, ValueError) as error:
                raise type(error)(f"SparseFactoredLinear2d, basis_{side}: {error}") from None
        self.basis_in, self.basis_out = made
        self.weight_in = nn.Parameter(torch.empty(out_channels, in_channels, self.basis_in.num_anchors, **kind))
        self.weight_out = nn.Parameter(torch.empty(out_channels, in_channels, self.basis_out.num_anchors, **kind))
        self.bias_in = nn.Parameter(torch.empty(out_channels, **kind)) if bias else None
        self.residuals: dict[str, float] | None = None
        self._draw_weights()

    def reset_parameters(self) -> None:
        """Begin anew: the bases where they start, then an F-FC layer's initial weights, from torch's global generator, by their least
        squares fit at the anchors."""
        self.basis_in.reset()
        self.basis_out.reset()
        self._draw_weights()

    def _draw_weights(self) -> None:
        sizes = (self.in_channels, self.out_channels, self.in_size, self.out_size)
        self._fit(FactoredLinear2d(*sizes, bias=False, device=self.weight_in.device, dtype=self.weight_in.dtype))
        if self.bias_in is not None:
            nn.init.zeros_(self.bias_in)

    def _fit(self, dense: FactoredLinear2d) -> None:
        with torch.no_grad():
            self.weight_in.copy_(self.basis_in.fit(dense.weight_in.flatten(2)))
            self.weight_out.copy_(self.basis_out.fit(dense.weight_out.flatten(2)))

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H', W')``."""
        check_image("SparseFactoredLinear2d", x, self.in_channels, self.in_size, self.weight_in)
        x, weight_in, weight_out = x.flatten(2), self.weight_in, self.weight_out
        if self.projects_input(x.shape[0]):
            x = self.basis_in.project(x)
        else:
            weight_in = self.basis_in.expand(weight_in)
        if self.projects_output(x.shape[0]):
            y = self.basis_out.expand(ops.factored_linear(x, weight_in, weight_out, self.bias_in))
        else:
            y = ops.factored_linear(x, weight_in, self.basis_out.expand(weight_out), self.bias_in)
        return y.unflatten(2, self.out_size)

    def projects_input(self, batch: int) -> bool:
        """Whether projecting so many images takes fewer multiplications than expanding ``weight_in``, the use of each included."""
        batch = _at_hand(batch)
        c, d, a, x = self.in_channels, self.out_channels, self.basis_in.num_anchors, self.basis_in.num_points
        return batch * c * a * x + batch * d * c * a < d * c * a * x + batch * d * c * x

    def projects_output(self, batch: int) -> bool:
        """Whether expanding so many outputs takes fewer multiplications than expanding ``weight_out``, the use of each included."""
        batch = _at_hand(batch)
        c, d, a, y = self.in_channels, self.out_channels, self.basis_out.num_anchors, self.basis_out.num_points
        return batch * d * a * y + batch * d * c * a < d * c * a * y + batch * d * c * y

    @classmethod
    def from_dense(
        cls,
        dense: FactoredLinear2d,
        num_anchors: int | tuple[int, int] | None = None,
        basis: str = "interpolating",
        inverse_lengthscale: Scale | tuple[Scale, Scale] = 1.0,
        anchors: Anchors | None = None,
    ) -> SparseFactoredLinear2d:
        """The layer whose weights are nearest to an F-FC layer's, at given anchors or at ones drawn anew.

        Args:
            dense: the layer to convert. num_anchors, basis, inverse_lengthscale, anchors: of the new layer; those of another one are
                ``(other.basis_in.anchors, other.basis_out.anchors)``, and its lengthscales likewise.

        Returns:
            The layer. Its attribute ``residuals`` says what was lost: for each of the dense layer's tensors ``|old - new| / |old|``
            (Euclidean norm); about 0.7 for random weights, of which half as many anchors can follow half. There is no output bias
            here: where ``bias_out`` is not zero its residual is 1.

        Raises:
            TypeError, ValueError: dense is no F-FC layer; what the layer itself raises.
        """
        if not isinstance(dense, FactoredLinear2d):
            raise TypeError(
                f"SparseFactoredLinear2d.from_dense: expected a FactoredLinear2d, got {type(dense).__name__}."
            )
        sizes = (dense.in_channels, dense.out_channels, dense.in_size, dense.out_size)
        given = (num_anchors, basis, dense.bias_in is not None, inverse_lengthscale, anchors)
        layer = cls(*sizes, *given, dense.weight_in.device, dense.weight_in.dtype)
        layer._fit(dense)
        layer.residuals = {
            "weight_in": layer.basis_in.residual(dense.weight_in.flatten(2), layer.weight_in),
            "weight_out": layer.basis_out.residual(dense.weight_out.flatten(2), layer.weight_out),
        }
        if layer.bias_in is not None:
            with torch.no_grad():
                layer.bias_in.copy_(dense.bias_in)
            layer.residuals |= {"bias_in": 0.0, "bias_out": float(bool(dense.bias_out.any()))}
        return layer

    def to_dense(self) -> FactoredLinear2d:
        """The F-FC layer of the same map; nothing is lost, every smooth weight is a weight. Its ``bias_out`` is zero."""
        sizes = (self.in_channels, self.out_channels, self.in_size, self.out_size)
        dense = FactoredLinear2d(*sizes, self.bias_in is not None, "meta", self.weight_in.dtype)  # nothing is drawn
        dense = dense.to_empty(device=self.weight_in.device)
        with torch.no_grad():
            dense.weight_in.copy_(self.basis_in.expand(self.weight_in).unflatten(2, self.in_size))
            dense.weight_out.copy_(self.basis_out.expand(self.weight_out).unflatten(2, self.out_size))
            if self.bias_in is not None:
                dense.bias_in.copy_(self.bias_in)
                dense.bias_out.zero_()
        return dense

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, in_size={self.in_size}, out_size={self.out_size}, bias={self.bias_in is not None}"


def _at_hand(count: int | torch.SymInt) -> int:
    """A number of images or positions; very many where a program is exported for any number, which a comparison would fix. A strict
    export shows no difference between any number and a certain one."""
    if not torch.compiler.is_exporting():
        return count
    return MANY if isinstance(count, torch.SymInt) or torch.compiler.is_dynamo_compiling() else count


def _pairs(
    num_anchors: int | tuple[int, int] | None, inverse_lengthscale: Scale | tuple[Scale, Scale], anchors: Anchors | None
) -> tuple[tuple, tuple, tuple]:
    """What is given of the two bases, as pairs of the input's and the output's."""
    pairs = []
    for name, value in (("num_anchors", num_anchors), ("inverse_lengthscale", inverse_lengthscale)):
        pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
        if len(pair) != 2:
            raise ValueError(
                f"{name} must be one number or a pair, of the input's and the output's side, got {value!r}."
            )
        pairs.append(pair)
    if anchors is None:
        return *pairs, (None, None)
    if not isinstance(anchors, (tuple, list)):
        raise TypeError(
            f"anchors must be a pair, of the input's and the output's side, each a tensor or None, got {type(anchors).__name__}."
        )
    if len(anchors) != 2:
        raise ValueError(f"anchors must be a pair, of the input's and the output's side, got {len(anchors)} of them.")
    return *pairs, tuple(anchors)


class SparseConv2d(nn.Module):
    r"""A circular convolution whose kernel is given at anchors: ``(N, C, H, W) -> (N, D, H, W)``.

    .. math:: k[d,c,r] = \sum_a w[d,c,a] \Psi[a,r]

    Computed as a depth-wise convolution with the basis followed by a 1x1 convolution, or with the expanded kernel, whichever takes
    fewer multiplications for the batch at hand.

    Parameters:
        weight: ``(D, C, A)``. bias: ``(D,)``, or None with ``bias=False``.
    Submodules:
        basis: a :class:`SpatialBasis` on the kernel's positions.

    Args:
        in_channels: C.
        out_channels: D.
        kernel_size: odd height and width, or one odd number for both.
        num_anchors: A; None is half the kernel's positions, rounded up: 5 of 9.
        basis: "interpolating" or "exponential", see :func:`ella_cuda.ops.basis_matrix`.
        bias: whether the layer has a bias.
        inverse_lengthscale: :math:`\omega` per pixel at the start.
        anchors: ``(A, 2)``, rows and columns in centred pixels at the start; None draws them.
        device, dtype: of the parameters and buffers, float32 or float64; None is torch's default.

    Raises:
        TypeError: inverse_lengthscale or anchors are no numbers or tensors; in forward, the input is no tensor.
        ValueError: kernel_size is not positive or even, the basis unknown, or inverse_lengthscale negative, or anchors do not fit; in
            forward, the input does not fit.

    Source: van der Ouderaa et al., NeurIPS 2023, section 3.2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        num_anchors: int | None = None,
        basis: str = "interpolating",
        bias: bool = True,
        inverse_lengthscale: Scale = 1.0,
        anchors: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = (
            as_count("in_channels", in_channels),
            as_count("out_channels", out_channels),
        )
        self.kernel_size = as_kernel_size(kernel_size)
        kind = {"device": device, "dtype": dtype}
        self.basis = SpatialBasis(self.kernel_size, num_anchors, basis, inverse_lengthscale, anchors, **kind)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, self.basis.num_anchors, **kind))
        self.bias = nn.Parameter(torch.empty(out_channels, **kind)) if bias else None
        self._draw_weights()

    def reset_parameters(self) -> None:
        """Begin anew: the basis where it starts, then a CONV layer's initial kernel (Kaiming-uniform for ReLU, as published) by its least
        squares fit, and zero bias."""
        self.basis.reset()
        self._draw_weights()

    def _draw_weights(self) -> None:
        kernel = self.weight.new_empty(self.out_channels, self.in_channels, *self.kernel_size)
        nn.init.kaiming_uniform_(kernel, nonlinearity="relu")
        with torch.no_grad():
            self.weight.copy_(self.basis.fit(kernel.flatten(2)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def kernel(self) -> Tensor:
        """The expanded kernel, ``(D, C, kh, kw)``, differentiable."""
        return self.basis.expand(self.weight).unflatten(2, self.kernel_size)

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        """``(N, C, H, W) -> (N, D, H, W)``."""
        check_image("SparseConv2d", x, self.in_channels, None, self.weight)
        if not self.projects_input(x.shape[0], math.prod(x.shape[2:])):
            return ops.circular_conv2d(x, self.kernel(), self.bias)
        # Correlating with function a gives the anchors' projections of every patch: (N*C, 1, H, W) -> (N*C, A, H, W).
        functions = self.basis.matrix().unflatten(1, (1, *self.kernel_size))
        projected = ops.circular_conv2d(x.flatten(0, 1)[:, None], functions).unflatten(0, x.shape[:2]).flatten(1, 2)
        return ops.circular_conv2d(projected, self.weight.flatten(1)[:, :, None, None], self.bias)

    def projects_input(self, batch: int, positions: int) -> bool:
        """Whether projecting the patches of so many images takes fewer multiplications than expanding the kernel, the use of each
        included."""
        c, d, a, r = self.in_channels, self.out_channels, self.basis.num_anchors, self.basis.num_points
        pixels = _at_hand(batch) * _at_hand(positions)
        return pixels * c * a * r + pixels * d * c * a < d * c * a * r + pixels * d * c * r

    def to_dense(self) -> CircularConv2d:
        """The convolution of the same map; nothing is lost, every smooth kernel is a kernel."""
        sizes = (self.in_channels, self.out_channels, self.kernel_size)
        dense = CircularConv2d(*sizes, self.bias is not None, "meta", self.weight.dtype)  # nothing is drawn
        dense = dense.to_empty(device=self.weight.device)
        with torch.no_grad():
            dense.weight.copy_(self.kernel())
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"

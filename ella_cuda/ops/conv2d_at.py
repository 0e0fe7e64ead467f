"""A convolution at chosen positions of its results, and its transpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair

from ella_cuda.ops._operator import INDEX, operand_sizes, plain_autograd, require_pair
from ella_cuda.ops._precision import without_autocast

Size = int | tuple[int, int]


def conv2d_at(
    x: Tensor, weight: Tensor, places: Tensor, stride: Size = 1, padding: Size = 0, dilation: Size = 1
) -> Tensor:
    r"""With the convolution :math:`y = w * x` of columns k of images n, whose flat plane of results is p:

    .. math:: \text{out}[k,n,d,m] = y[k,n,d,\,\text{places}[n,d,m]]

    Tangents need no other positions in front of a pool: those of its largest values. Equivalent to :func:`conv2d_at_torch`, which it is
    on CUDA and where somebody differentiates it or looks on; else on the CPU one op, which computes these positions alone, columns
    being the lanes of its vectors: fastest where their number is a multiple of those, slow for one column.

    Args:
        x: ``(K, N, C, H, W)``, any strides.
        weight: ``(D, C, kh, kw)``.
        places: ``(N, D, M)`` int64, from 0 to below the number of positions.
        stride: of the convolution, ``s`` or ``(sh, sw)``.
        padding: zeros on each side.
        dilation: of the convolution.

    Returns:
        ``(K, N, D, M)``, contiguous.

    Raises:
        RuntimeError: a shape, dtype, device or size does not fit; the message names the argument. Where torch computes, a place out of the
            plane, and images or weights without numbers, are refused in its words.

    Source: chain rule through torch.nn.MaxPool2d.
    """
    geometry = tuple(list(_pair(size)) for size in (stride, padding, dilation))
    _sizes_of_images(x, weight, places, *geometry)
    args = (x, weight, places)
    if _by_torch(args):
        with without_autocast(x.device.type):  # no lower precision than the op's
            return conv2d_at_torch(*args, *geometry)
    return torch.ops.ella_cuda.conv2d_at(*args, *geometry)


def conv2d_at_torch(
    x: Tensor, weight: Tensor, places: Tensor, stride: Size = 1, padding: Size = 0, dilation: Size = 1
) -> Tensor:
    """Plain-torch reference of :func:`conv2d_at`: the whole convolution."""
    whole = F.conv2d(x.flatten(0, 1), weight, None, stride, padding, dilation)
    return whole.unflatten(0, x.shape[:2]).flatten(3).gather(3, places.expand(x.shape[0], *places.shape))


def conv2d_at_transpose(
    values: Tensor,
    weight: Tensor,
    places: Tensor,
    size: tuple[int, int],
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
) -> Tensor:
    r"""The transpose of :func:`conv2d_at` in its images: the gradient in x of :math:`\sum \text{values} \cdot \text{out}`.

    Values at one place add up, in the order of d and m. Ways as there; the reference is :func:`conv2d_at_transpose_torch`.

    Args:
        values: ``(K, N, D, M)``, any strides.
        weight: ``(D, C, kh, kw)``.
        places: ``(N, D, M)`` int64.
        size: ``(H, W)`` of the images.
        stride, padding, dilation: of the convolution.

    Returns:
        ``(K, N, C, H, W)``, contiguous.

    Raises:
        RuntimeError: a shape, dtype, device or size does not fit; the message names the argument. Where torch computes, a place out of the
            plane, and images or weights without numbers, are refused in its words.

    Source: chain rule through torch.nn.MaxPool2d.
    """
    geometry = tuple(list(_pair(pair)) for pair in (size, stride, padding, dilation))
    _sizes_of_values(values, weight, places, *geometry)
    args = (values, weight, places)
    if _by_torch(args):
        with without_autocast(values.device.type):
            return conv2d_at_transpose_torch(*args, *geometry)
    return torch.ops.ella_cuda.conv2d_at_transpose(*args, *geometry)


def conv2d_at_transpose_torch(
    values: Tensor,
    weight: Tensor,
    places: Tensor,
    size: tuple[int, int],
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
) -> Tensor:
    """Plain-torch reference of :func:`conv2d_at_transpose`: values among zeros, then the whole transpose."""
    steps, pads, spread = (_pair(pair) for pair in (stride, padding, dilation))
    plane = _positions(size, weight.shape[2:], steps, pads, spread)
    among = values.new_zeros(*values.shape[:3], plane[0] * plane[1])
    among = among.scatter_add(3, places.expand(values.shape[0], *places.shape), values).unflatten(3, plane)
    sides = zip(size, pads, spread, weight.shape[2:], steps, plane, strict=True)
    beyond = [n - (d * (k - 1) + 1 + s * (o - 1) - 2 * p) for n, p, d, k, s, o in sides]
    images = F.conv_transpose2d(among.flatten(0, 1), weight, None, steps, pads, beyond, 1, spread)
    return images.unflatten(0, values.shape[:2])


def _by_torch(args: tuple[Tensor, ...]) -> bool:
    recording = torch.is_grad_enabled()
    differentiated = recording and any(a.requires_grad for a in args)
    return not args[0].is_cpu or differentiated or not plain_autograd(args, graph=recording)


def _positions(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Height and width of the plane of a convolution's results."""
    sides = zip(size, kernel, stride, padding, dilation, strict=True)
    high, wide = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    return high, wide


def _sizes_of_images(
    x: Tensor, weight: Tensor, places: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> dict[str, int]:
    """Raise the RuntimeError of an op whose arguments do not fit, whoever computes it."""
    op = "conv2d_at"
    s = operand_sizes(op, x=(x, "K N C H W"), weight=(weight, "D C kh kw"), places=(places, "N D M", INDEX))
    _require_geometry(op, [s["H"], s["W"]], weight, stride, padding, dilation)
    return s


def _sizes_of_values(
    values: Tensor,
    weight: Tensor,
    places: Tensor,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> dict[str, int]:
    op = "conv2d_at_transpose"
    s = operand_sizes(op, values=(values, "K N D M"), weight=(weight, "D C kh kw"), places=(places, "N D M", INDEX))
    _require_geometry(op, size, weight, stride, padding, dilation)
    return s


def _require_geometry(
    op: str, size: list[int], weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    kernel = list(weight.shape[2:])
    require_pair(op, "size", size, 0)
    require_pair(op, "the kernel", kernel, 1)
    require_pair(op, "stride", stride, 1)
    require_pair(op, "padding", padding, 0)
    require_pair(op, "dilation", dilation, 1)
    padded = tuple(n + 2 * p for n, p in zip(size, padding, strict=True))
    if any(d * (k - 1) >= n for n, k, d in zip(padded, kernel, dilation, strict=True)):
        raise RuntimeError(
            f"{op}: weight of {tuple(kernel)} with dilation {tuple(dilation)} does not fit the padded image {padded}"
        )


@torch.library.register_fake("ella_cuda::conv2d_at")
def _fake(
    x: Tensor, weight: Tensor, places: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    s = _sizes_of_images(x, weight, places, stride, padding, dilation)
    return x.new_empty(s["K"], s["N"], s["D"], s["M"])


@torch.library.register_fake("ella_cuda::conv2d_at_transpose")
def _fake_transpose(
    values: Tensor,
    weight: Tensor,
    places: Tensor,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    s = _sizes_of_values(values, weight, places, size, stride, padding, dilation)
    return values.new_empty(s["K"], s["N"], s["C"], *size)

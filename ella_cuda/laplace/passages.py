"""How gradients go back through functions without parameters: ReLU, max pooling, padding, slices, and normalisation by constants.

They go in pieces of some images, each through as many functions as follow each other, so that a piece is in the processor's cache and
what is between the functions is never there for all columns.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

PIECE = 1 << 20  # bytes of gradients that a thread takes back at a time
WINDOW = 64  # places of a pooling window up to which each is looked for
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_IN_PLACE = {torch.relu_, F.relu_, Tensor.relu_}
_POOLS = {F.max_pool2d, torch.max_pool2d}
_INTERCEPTED = {
    **dict.fromkeys(_IN_PLACE | {torch.relu, Tensor.relu}, inspect.signature(lambda input: None)),
    F.relu: inspect.signature(lambda input, inplace=False: None),
    F.pad: inspect.signature(lambda input, pad, mode="constant", value=None: None),
    **dict.fromkeys(
        _POOLS,
        inspect.signature(
            lambda input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False: None
        ),
    ),
}


class Passage(ABC):
    """How gradients go back through a call of a function of images.

    Attributes:
        input_shape: of the function's input, ``(N, ...)``.
        before: what stands before the input.
        handed: what others have taken back through this passage, the last of theirs, ``(K, *input_shape)``.
        skipped: whether they have taken gradients through this passage and on through others.
        kept_bytes: what it keeps.

    Args:
        input_shape: of the function's input.
    """

    def __init__(self, input_shape: Sequence[int]) -> None:
        self.input_shape = tuple(input_shape)
        self.before = Before()
        self.handed: Tensor | None = None
        self.skipped = False

    kept_bytes: int = 0

    @abstractmethod
    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        """Take a piece ``(k, n, ...)`` of gradients at outputs back, of some columns and these images: in place, where the piece is the
        caller's ``own`` and has the result's shape."""

    def vjp(self, columns: Tensor) -> Tensor:
        """``(K, *output.shape)``, back to the function's input, and as far on as nothing else has a part: see :func:`through`."""
        last = (self, *self.before.passages)[-1]
        found = empty_columns(columns, last.input_shape, layout_of(columns))
        for some, images in pieces(found):
            piece = self.take(columns[some, images], images, own=False)
            found[some, images] = self.before.take(piece, images)
        return self.before.hand(found, self.input_shape)


@dataclass(frozen=True)
class Before:
    """What stands before a call's input in the graph.

    Attributes:
        passages: of the functions that end in the input and that nothing else uses, last first. Who takes gradients back through
            a call may take them through these too, piece by piece, while a piece is in the processor's cache.
        any_layout: whether what is before these takes gradients in a layout of their own. Elementwise work on two layouts at once is slow.
    """

    passages: Sequence[Passage] = ()
    any_layout: bool = False

    def shape(self, input_shape: Sequence[int]) -> Sequence[int]:
        """Of what the first of the functions gets."""
        return self.passages[-1].input_shape if self.passages else input_shape

    def take(self, piece: Tensor, images: slice) -> Tensor:
        """Take a piece of gradients at the call's input, the caller's own, back through all of the passages."""
        for passage in self.passages:
            piece = passage.take(piece, images, own=True)
        return piece

    def hand(self, found: Tensor, input_shape: Sequence[int]) -> Tensor:
        """The gradients that the call's node is to return for gradients ``found`` before all passages: those, or zeros that take no room in
        place of what the last passage's node will return."""
        if not self.passages:
            return found
        for passage in self.passages:
            passage.skipped = True
        self.passages[-1].handed = found
        return nothing(found, input_shape)


class ConstantScale(Passage):
    """Of a normalisation by constants: gradients are scaled, those of each channel by its own ``scale``, which broadcasts to the output.
    Autograd's backward copies the gradients of all columns three times."""

    def __init__(self, input_shape: Sequence[int], scale: Tensor) -> None:
        super().__init__(input_shape)
        self._scale = scale

    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        return piece.mul_(self._scale) if own else (piece * self._scale).to(piece.dtype)


class ReLU(Passage):
    """Of a ReLU: gradients go back where its output ``out`` is positive, or nan. A byte is kept for each; autograd keeps the output."""

    def __init__(self, out: Tensor) -> None:
        super().__init__(out.shape)
        self._alive = _InAnyLayout((out <= 0).logical_not_())
        self.kept_bytes = out.numel()

    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        alive = self._alive.like(piece)[images]
        if not own:
            return _masked(piece, alive)
        _bits(piece).mul_(alive)
        return piece


class Slice(Passage):
    """Of a slice of images ``(N, ...)``, by a slice of each further axis; none has a negative step."""

    def __init__(self, input_shape: Sequence[int], slices: Sequence[slice]) -> None:
        super().__init__(input_shape)
        self._slices = (..., *slices)

    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        found = empty_columns(piece, (piece.shape[1], *self.input_shape[1:]), layout_of(piece)).zero_()
        found[self._slices] = piece
        return found


class Pad2d(Passage):
    """Of a padding of images ``(N, C, H, W)`` by a constant, or circular.

    Args:
        input_shape: of the images.
        sides: padding on the left, right, top and bottom.
        circular: whether it is the image again.
    """

    def __init__(self, input_shape: Sequence[int], sides: tuple[int, int, int, int], circular: bool) -> None:
        super().__init__(input_shape)
        self._sides, self._circular = sides, circular

    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        (left, right, top, bottom), (height, width) = self._sides, self.input_shape[2:]
        core = piece[..., top : top + height, :]
        if not self._circular:
            return core[..., left : left + width]
        if not own:
            core = (piece := piece.clone())[..., top : top + height, :]
        core[..., height - top :, :] += piece[..., :top, :]
        core[..., :bottom, :] += piece[..., top + height :, :]
        found = core[..., left : left + width]
        found[..., width - left :] += core[..., :left]
        found[..., :right] += core[..., left + width :]
        return found


class MaxPool2d(Passage):
    """Of a max pooling of images ``(N, C, H, W)``: gradients go back to where the maxima were. A byte is kept for each; autograd keeps eight,
    and the input, and its backward copies both for every column under :func:`torch.vmap`.

    Args:
        input_shape: of the images.
        index: where the maxima were in the images' planes, ``(N, C, H', W')``.
        kernel_size: of the pooling, as are stride, padding and dilation; pairs.
    """

    def __init__(
        self, input_shape: Sequence[int], index: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> None:
        super().__init__(input_shape)
        self._kernel_size, self._stride, self._padding, self._dilation = kernel_size, stride, padding, dilation
        taps = torch.zeros_like(index, dtype=torch.uint8)
        for axis, place in ((2, index // input_shape[3]), (3, index % input_shape[3])):
            k, s, p, d = (each[axis - 2] for each in (kernel_size, stride, padding, dilation))
            first = torch.arange(index.shape[axis], device=index.device) * s - p
            taps = taps * k + ((place - first.view(-1, *(1,) * (3 - axis))) // d).to(torch.uint8)
        self._taps = _InAnyLayout(taps)  # which place of its window
        self.kept_bytes = taps.numel()

    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        taps, size, outputs = self._taps.like(piece)[images], self.input_shape[2:], piece.shape[3:]
        reach = [
            (o - 1) * s + d * (k - 1) + 1
            for o, s, d, k in zip(outputs, self._stride, self._dilation, self._kernel_size, strict=True)
        ]
        # Windows that cover the images, each pixel once.
        tiled = self._stride == self._kernel_size and self._dilation == (1, 1) and tuple(reach) == size
        (top, left), (height, width) = self._padding, size
        padded = [max(n + 2 * p, r) for n, p, r in zip(size, self._padding, reach, strict=True)]
        found = empty_columns(piece, (*piece.shape[1:3], *padded), layout_of(piece))
        if not tiled:
            found.zero_()
        for tap in range(math.prod(self._kernel_size)):
            at = divmod(tap, self._kernel_size[1])
            rows, across = (
                slice(i * d, i * d + (o - 1) * s + 1, s)
                for i, d, o, s in zip(at, self._dilation, outputs, self._stride, strict=True)
            )
            chosen = _masked(piece, taps == tap)
            if tiled:
                found[..., rows, across] = chosen
            else:
                found[..., rows, across] += chosen
        return found[..., top : top + height, left : left + width]


class InterceptedFunctions(TorchFunctionMode):
    """While the mode is on, calls of ReLU, and of padding and max pooling of images, are given a :class:`Passage` where a gradient is wanted.

    Args:
        passed: makes the output of an input, of the output without a graph (the input's memory, where it is changed in place), and of the
            passage.
        wanted: whether passages are.
    """

    def __init__(self, passed: Callable[[Tensor, Tensor, Passage], Tensor], wanted: Callable[[], bool]) -> None:
        self._passed, self._wanted = passed, wanted

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _INTERCEPTED and self._wanted():
            x = args[0] if args else kwargs.get("input")
            if type(x) is Tensor and x.requires_grad and x.element_size() in _BITS and x.is_floating_point():
                given = _INTERCEPTED[func].bind(*args, **kwargs)
                given.apply_defaults()
                if func in _POOLS:
                    out = self._max_pool(**given.arguments)
                elif func is F.pad:
                    out = self._pad(**given.arguments)
                else:
                    out = self._relu(x, func in _IN_PLACE or given.arguments.get("inplace", False))
                if out is not None:
                    return out
        return func(*args, **kwargs)

    def _relu(self, x: Tensor, in_place: bool) -> Tensor | None:
        if in_place and (x.is_leaf or x._is_view()):
            return None
        detached = x.detach()
        out = detached.relu_() if in_place else detached.relu()
        return self._passed(x, out, ReLU(out))

    def _pad(self, input: Tensor, pad: Sequence[int], mode: str, value: float | None) -> Tensor | None:
        if (
            input.dim() != 4
            or len(pad) > 4
            or mode not in ("constant", "circular")
            or min(pad, default=0) < 0
            or not any(pad)
        ):
            return None
        out = F.pad(input.detach(), pad, mode, value)
        sides = (*pad, *(0,) * (4 - len(pad)))
        return self._passed(input, out, Pad2d(input.shape, sides, mode == "circular"))

    def _max_pool(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        return_indices: bool,
    ) -> Tensor | None:
        kernel_size, padding, dilation = (tuple(_pair(each)) for each in (kernel_size, padding, dilation))
        if input.dim() != 4 or return_indices or math.prod(kernel_size) > WINDOW:
            return None
        geometry = (kernel_size, tuple(_pair(stride)) if stride else kernel_size, padding, dilation)
        out, index = torch.ops.aten.max_pool2d_with_indices(input.detach(), *geometry, ceil_mode)
        return self._passed(input, out, MaxPool2d(input.shape, index, *geometry))


def through(passage: Passage, columns: Tensor) -> Tensor:
    """Gradients ``(K, *output.shape)`` on their way back through a passage: from who has taken them already, or by :meth:`Passage.vjp`."""
    if not passage.skipped:
        return passage.vjp(columns)
    passage.skipped, handed, passage.handed = False, passage.handed, None
    return nothing(columns, passage.input_shape) if handed is None else handed


def nothing(columns: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros ``(K, *shape)`` that take no room."""
    return columns.new_zeros(()).expand(columns.shape[0], *shape)


def pieces(columns: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of columns ``(K, N, ...)`` that are in the cache of a CPU at once: of the columns, and of the images. Columns are contiguous, or
    so with channels innermost, and the parts of them, flattened to ``(k * n, ...)``, are views."""
    count, images = columns.shape[:2]
    if not columns.is_cpu:
        yield slice(count), slice(images)
        return
    each = max(columns[:1, :1].numel() * columns.element_size(), 1)
    together = max(torch.get_num_threads() * PIECE // each, 1)  # images
    if together < images:
        for k in range(count):
            for begin in range(0, images, together):
                yield slice(k, k + 1), slice(begin, begin + together)
    else:
        step = max(together // max(images, 1), 1)
        for k in range(0, count, step):
            yield slice(k, k + step), slice(images)


def empty_columns(columns: Tensor, shape: Sequence[int], layout: torch.memory_format) -> Tensor:
    """Room for as many columns ``(K, *shape)`` of images, with their channels innermost if ``layout`` says so."""
    whole = (columns.shape[0] * shape[0], *shape[1:])
    found = torch.empty(whole, dtype=columns.dtype, device=columns.device, memory_format=layout)
    return found.unflatten(0, (columns.shape[0], shape[0]))


def layout_of(columns: Tensor) -> torch.memory_format:
    """Whether columns ``(K, N, C, H, W)`` have their channels innermost."""
    inside = columns.dim() == 5 and columns.stride(2) == 1 and columns.shape[2] > 1 and columns.stride(4) != 1
    return torch.channels_last if inside else torch.contiguous_format


class _InAnyLayout:
    """A tensor of the shape of outputs, in the layout of gradients."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def like(self, columns: Tensor) -> Tensor:
        """The tensor, in the layout of columns."""
        self._tensor = self._tensor.contiguous(memory_format=layout_of(columns))
        return self._tensor


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


def _masked(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient where the mask is true, else zero; a product of floating-point numbers would make nan of infinity."""
    return (_bits(gradient) * mask).view(gradient.dtype)

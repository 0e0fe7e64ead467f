"""Batched vector-Jacobian products of ReLU, max pooling, padding, slices and eval-mode batch norm.

They go in pieces of some images, each through as many functions as follow each other, so that a piece is in the processor's cache and
what is between the functions is never there for all columns.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.utils import _pair

PIECE = 1 << 20  # bytes of gradients that a thread takes back at a time
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
_HOOKS = {Tensor.register_hook, Tensor.retain_grad}  # see gradients on their way


class Passage(ABC):
    """How gradients go back through a call of a function of images.

    Attributes:
        input_shape: of the function's input, ``(N, ...)``.
        before: what stands before the input.
        handed: what others have taken back through this passage, the last of theirs, ``(K, *input_shape)``.
        skipped: whether they have taken gradients through this passage and on through others.
        kept_bytes: what it keeps.
        pointwise: whether the function is of single entries; ``take`` then has ``steps``, between the positions that a piece has of those of
            an image.

    Args:
        input_shape: of the function's input.
    """

    kept_bytes: int = 0
    pointwise: ClassVar[bool] = False

    def __init__(self, input_shape: Sequence[int]) -> None:
        self.input_shape = tuple(input_shape)
        self.before = Before()
        self.handed: Tensor | None = None
        self.skipped = False

    @abstractmethod
    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        """Take a piece ``(k, n, ...)`` of gradients at outputs back, of some columns and these images. A piece that is the caller's ``own``
        may be changed; another stays as it is, and has no memory in common with what is returned."""

    def back(self, columns: Tensor) -> Tensor:
        """``(K, *output.shape)``, back to the function's input: as :meth:`vjp`, or from who has taken them already."""
        if not self.skipped:
            return self.vjp(columns)
        self.skipped, handed, self.handed = False, self.handed, None
        return handed

    def vjp(self, columns: Tensor) -> Tensor:
        """``(K, *output.shape)``, back to the function's input, and as far on as nothing else has a part; see :meth:`Before.hand`."""
        if self.pointwise and not self.before.passages:
            return self.take(columns, slice(None), own=False)
        take = partial(self.take, own=False)
        return self.before.back(columns, take, self.input_shape, layout_of(columns))


class Layer(Protocol):
    """A call of a layer, which takes gradients at its output past the graph."""

    def takes_samples(self) -> bool:
        """Whether gradients may be those at some positions alone."""

    def hand(self, columns: Tensor, samples: tuple[int, ...] | None) -> None:
        """Gradients ``(K, *output.shape)``, or at some positions: see :attr:`ella_cuda.laplace.rules.Rule.samples`."""


class Before:
    """What stands before a call's input in the graph.

    Args:
        passages: of the functions that end in the input and that nothing else uses, last first. Who takes gradients back through
            a call may take them through these too, piece by piece, while a piece is in the processor's cache.
        any_layout: whether what is before these takes gradients in a layout of their own. Elementwise work on two layouts at once is slow.
        layer: the call whose output is the first function's input, and nothing else's.
    """

    def __init__(self, passages: Sequence[Passage] = (), any_layout: bool = False, layer: Layer | None = None) -> None:
        self.passages, self.any_layout, self._layer = passages, any_layout, layer
        # A slice that only functions of single entries stand before is left to the layer, which need not see the zeros beside it.
        places = [i for i, p in enumerate(passages) if isinstance(p, Slice) and p.steps is not None]
        last = places[-1] if places else None
        if (
            last is None
            or layer is None
            or not layer.takes_samples()
            or any(not p.pointwise for p in passages[last + 1 :])
        ):
            last = None
        self._left_out = last

    def shape(self, input_shape: Sequence[int]) -> Sequence[int]:
        """Of what :meth:`take` returns, for all images."""
        if self._left_out is not None:
            return self.passages[self._left_out].output_shape
        return self.passages[-1].input_shape if self.passages else input_shape

    def take(self, piece: Tensor, images: slice) -> Tensor:
        """Take a piece of gradients at the call's input, the caller's own, back through all of the passages."""
        steps: tuple[int, int] = (1, 1)
        for place, passage in enumerate(self.passages):
            if place == self._left_out:
                steps = passage.steps
            elif passage.pointwise:
                piece = passage.take(piece, images, own=True, steps=steps)
            else:
                piece = passage.take(piece, images, own=True)
        return piece

    def back(
        self,
        columns: Tensor,
        take: Callable[[Tensor, slice], Tensor],
        input_shape: Sequence[int],
        layout: torch.memory_format,
    ) -> Tensor:
        """What :meth:`hand` makes of gradients ``(K, N, ...)`` at the call's output: taken back through it by ``take``, which gets a piece
        and its images, then as by :meth:`take`. All at once, unless pieces are for a cache: they are copied together, into a layout."""
        if not in_pieces(columns):
            return self.hand(self.take(take(columns, slice(None)), slice(None)), input_shape)
        found = empty_columns(columns, self.shape(input_shape), layout)
        for some, images in pieces(found):
            found[some, images] = self.take(take(columns[some, images], images), images)
        return self.hand(found, input_shape)

    def hand(self, found: Tensor, input_shape: Sequence[int]) -> Tensor:
        """The gradients that the call's node is to return for gradients ``found`` before all passages: those, or zeros that take no room in
        place of what the layer before gets, or else the last passage's node will return."""
        if not self.passages:
            return found
        for passage in self.passages:
            passage.skipped = True
        if self._layer is None:
            self.passages[-1].handed = found
        elif self._left_out is None:
            self._layer.hand(found, None)
        else:
            self._layer.hand(found, (*self.passages[-1].input_shape[2:], *self.passages[self._left_out].steps))
        return nothing(found, input_shape)


class ConstantScale(Passage):
    """Of a normalisation by constants: gradients are scaled, those of each channel by its own ``scale``, which broadcasts to the output.
    Autograd's backward copies the gradients of all columns three times."""

    pointwise = True

    def __init__(self, input_shape: Sequence[int], scale: Tensor) -> None:
        super().__init__(input_shape)
        self._scale = scale

    def take(self, piece: Tensor, images: slice, own: bool, steps: tuple[int, int] = (1, 1)) -> Tensor:
        return piece.mul_(self._scale) if own else (piece * self._scale).to(piece.dtype)


def constant_scales(modules: Iterable[nn.Module]) -> dict[nn.Module, Tensor]:
    """γ/√(σ²+ε) ``(C,)`` of each batch normalisation in evaluation mode, by which gradients go back."""
    together: dict[tuple[Any, ...], list[_BatchNorm]] = {}
    for module in modules:
        if _scales_by_constants(module):
            tensors = [module.running_var] if module.weight is None else [module.running_var, module.weight]
            alike = (module.eps, *((t.dtype, t.device) for t in tensors))
            together.setdefault(alike, []).append(module)
    found = {}
    for (eps, (dtype, _), *_), norms in together.items():
        scale = (torch.cat([norm.running_var for norm in norms]).double() + eps).rsqrt()
        if norms[0].weight is not None:
            scale = scale * torch.cat([norm.weight for norm in norms]).detach()
        scale = scale.to(torch.promote_types(dtype, torch.float32))
        found |= zip(norms, scale.split([len(norm.running_var) for norm in norms]), strict=True)
    return found


def _scales_by_constants(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm) or module.running_mean is None or module.running_var is None:
        return False
    own = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return type(module).forward in own and "forward" not in vars(module)


class ReLU(Passage):
    """Of a ReLU: gradients go back where its output ``out`` is positive, or nan. A byte is kept for each; autograd keeps the output."""

    pointwise = True

    def __init__(self, out: Tensor) -> None:
        super().__init__(out.shape)
        self._alive = _InAnyLayout(out != 0)  # it is never negative
        self.kept_bytes = out.numel()

    def take(self, piece: Tensor, images: slice, own: bool, steps: tuple[int, int] = (1, 1)) -> Tensor:
        alive = some_of(self._alive.like(piece), images)
        if steps != (1, 1):
            alive = alive[..., :: steps[0], :: steps[1]]
        if not own:
            return _masked(piece, alive)
        _bits(piece).mul_(alive)
        return piece


class Slice(Passage):
    """Of a slice of images ``(N, ...)``, by a slice of each further axis; none has a negative step.

    Attributes:
        steps: down and right, where it is every so-manieth position of a plane from the first on; else None.
    """

    def __init__(self, input_shape: Sequence[int], output_shape: Sequence[int], slices: Sequence[slice]) -> None:
        super().__init__(input_shape)
        self._slices, self.output_shape = (..., *slices), tuple(output_shape)
        ranges = [range(*s.indices(size)) for s, size in zip(slices, self.input_shape[1:], strict=True)]
        steps = tuple(each.step for each in ranges)
        from_the_first_on = [
            range(0, size, step) for size, step in zip(self.input_shape[1:], steps, strict=True)
        ] == ranges
        self.steps = steps[1:] if from_the_first_on and len(steps) == 3 and steps[0] == 1 else None

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
            return core[..., left : left + width] if own else core[..., left : left + width].clone()
        if not own:
            core = (piece := piece.clone())[..., top : top + height, :]
        core[..., height - top :, :] += piece[..., :top, :]
        core[..., :bottom, :] += piece[..., top + height :, :]
        found = core[..., left : left + width]
        found[..., width - left :] += core[..., :left]
        found[..., :right] += core[..., left + width :]
        return found


class MaxPool2d(Passage):
    """Of a max pooling of images ``(N, C, H, W)``: gradients go back to where the maxima were. Autograd keeps the input too, and its backward
    copies input and ``index`` for every column under :func:`torch.vmap`.

    Args:
        input_shape: of the images.
        index: where the maxima were in the images' planes, ``(N, C, H', W')``.
        geometry: kernel size, stride, padding and dilation, and whether sizes are rounded up.
    """

    def __init__(self, input_shape: Sequence[int], index: Tensor, geometry: Sequence[Any]) -> None:
        super().__init__(input_shape)
        self._index, self._geometry = _InAnyLayout(index), geometry
        self.kept_bytes = index.numel() * index.element_size()

    def take(self, piece: Tensor, images: slice, own: bool) -> Tensor:
        index = some_of(self._index.like(piece), images).expand(piece.shape).flatten(0, 1)
        shape = (piece.shape[1], *self.input_shape[1:])
        of_its_shape = empty_columns(piece, shape, layout_of(piece)).flatten(0, 1)  # nothing in it is read
        found = torch.ops.aten.max_pool2d_with_indices_backward(
            piece.flatten(0, 1), of_its_shape, *self._geometry, index
        )
        return found.unflatten(0, piece.shape[:2])


class InterceptedFunctions:
    """The handler of a function mode in which calls of ReLU, and of padding and max pooling of images, are given a :class:`Passage` where a
    gradient is wanted. Nodes of tensors that get hooks are noted.

    Args:
        passed: makes the output of an input, of the output without a graph (the input's memory, where it is changed in place), and of the
            passage.
        wanted: whether passages are.
        hooked: gets the nodes.
    """

    def __init__(
        self, passed: Callable[[Tensor, Tensor, Passage], Tensor], wanted: Callable[[], bool], hooked: set[Any]
    ) -> None:
        self._passed, self._wanted, self._hooked = passed, wanted, hooked

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _HOOKS and args[0].grad_fn is not None:
            self._hooked.add(args[0].grad_fn)
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
        kernel_size, stride, padding, dilation = (
            _pair(each) for each in (kernel_size, stride or (), padding, dilation)
        )
        if input.dim() != 4 or return_indices:
            return None
        geometry = (kernel_size, stride or kernel_size, padding, dilation, ceil_mode)
        out, index = torch.ops.aten.max_pool2d_with_indices(input.detach(), *geometry)
        return self._passed(input, out, MaxPool2d(input.shape, index, geometry))


def some_of(tensor: Tensor, which: slice) -> Tensor:
    """The tensor at some places of its first axis."""
    return tensor if which == slice(None) else tensor[which]


def nothing(columns: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros ``(K, *shape)`` that take no room."""
    return columns.new_zeros(()).expand(columns.shape[0], *shape)


def in_pieces(columns: Tensor) -> bool:
    """Whether gradients go back a piece at a time."""
    return columns.is_cpu


def pieces(columns: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of columns ``(K, N, ...)`` that are in the cache of a CPU at once: of the columns, and of the images. Columns are contiguous, or
    so with channels innermost, and the parts of them, flattened to ``(k * n, ...)``, are views."""
    count, images = columns.shape[:2]
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

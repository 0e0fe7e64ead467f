"""Make a registered C++ op differentiable everywhere: one definition serves eager autograd, ``torch.compile`` and ``torch.func``.

``torch.library`` covers eager mode, double backward, ``vmap`` and ``torch.compile``, but ``torch.func.grad`` refuses such an op and
``torch.func.jvp`` silently returns zero tangents. A :class:`torch.autograd.Function` covers all of ``torch.func`` but not
``torch.compile(fullgraph=True)``. In eager mode, where either would do, the way through the dispatcher's Python key costs twice the
time of a Function that calls the kernel directly. :func:`differentiable` builds all three from the same formulas and picks by what
is active.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses.fake_tensor import is_fake

from ella_cuda._extension import build_info

NAMESPACE = "ella_cuda"
MOST = 1 << 30  # of a convolution's sizes, stride, padding and dilation; the kernels' limit


def _built_for_cuda() -> bool:
    return bool(build_info()["cuda"])


# As torch.compiler.assume_constant_result, which would import the compiler; Dynamo does not trace what C++ says.
_built_for_cuda._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require_backend(name: str, tensor: Tensor) -> None:
    """Raise a RuntimeError that says how to get one when this build has no kernel for the tensor's device."""
    device = tensor.device.type
    if device == "cpu" or device == "meta" or (device == "cuda" and _built_for_cuda()):
        return
    if device == "cuda":
        raise RuntimeError(
            f"ella_cuda.ops.{name}: the tensors are on {tensor.device}, but this ella_cuda was built without CUDA. Install the CUDA toolkit "
            "(nvcc), then `ELLA_CUDA=1 pip install --force-reinstall --no-deps .`; `ella-cuda info` shows what was built."
        )
    raise RuntimeError(
        f"ella_cuda.ops.{name}: expected tensors on cpu or cuda, got {tensor.device}; move them with .to('cpu')."
    )


def operand_sizes(op: str, known: dict[str, int] | None = None, **operands: tuple[Any, ...]) -> dict[str, int]:
    """Check tensors that have no memory as the kernels check theirs, for an op's fake.

    Args:
        op: its name, for the messages.
        known: sizes of axes by their letters, beside those of the tensors.
        operands: by name ``(tensor or None, axes)`` or ``(tensor, axes, dtypes)``: axes are letters in the order of the axes, of which
            equal ones stand for equal sizes, numbers, or a known letter's part such as ``H/2``; None stands for any. dtypes are those
            allowed, by default that of the first tensor, which is float32 or float64. All are on the first's device.

    Returns:
        The axes' sizes by their letters.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message, in the kernels' words, names the argument.
    """
    sizes = dict(known or {})
    (reference_name, (reference, *_)), *_ = operands.items()
    if reference.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"{op}: {reference_name} must be float32 or float64, got {_short(reference.dtype)}")
    for name, (tensor, axes, *rest) in operands.items():
        if tensor is None:
            continue
        if axes is not None:
            _require_shape(op, name, tensor, axes.split() if isinstance(axes, str) else axes, sizes)
        if tensor.dtype not in (rest[0] if rest else (reference.dtype,)):
            words = _dtypes_in_words(reference_name, reference.dtype, *rest)
            raise RuntimeError(f"{op}: {name} must {words}, got {_short(tensor.dtype)}")
        if tensor.device != reference.device:
            raise RuntimeError(
                f"{op}: {name} must be on the device of {reference_name} ({reference.device}), got {tensor.device}"
            )
    return sizes


def _require_shape(op: str, name: str, tensor: Tensor, axes: Sequence[str], sizes: dict[str, int]) -> None:
    """Check one tensor's shape against the sizes known, to which its own are added."""
    expected = [_known(axis, sizes) for axis in axes]
    fits = tensor.dim() == len(axes)
    if fits:
        for axis, size in zip(axes, tensor.shape, strict=True):
            known = _known(axis, sizes)
            if known is None:
                sizes[axis] = size
            fits = fits and (known is None or size == known)
        if len(set(axes)) < len(axes):
            expected = [_known(axis, sizes) for axis in axes]
    if not fits:
        comma = "," if len(axes) == 1 else ""
        numbers = ", ".join("*" if size is None else str(size) for size in expected)
        equal = f" = ({numbers}{comma})" if any(size is not None for size in expected) else ""
        raise RuntimeError(f"{op}: {name} must have shape ({', '.join(axes)}{comma}){equal}, got {tuple(tensor.shape)}")


def _dtypes_in_words(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...] | None = None) -> str:
    """What a tensor must do whose dtype is not allowed, beside the reference of that name and dtype."""
    if allowed == INDEX:
        return "be int64"
    if allowed == COORDINATES:
        return f"be float64 whatever the dtype of {name}"
    *others, last = map(_short, allowed or (dtype,))
    own = f"have the dtype of {name} ({_short(dtype)})"
    return f"{own} or be {' or '.join(filter(None, (', '.join(others[1:]), last)))}" if others else own


def _known(axis: str, sizes: dict[str, int]) -> int | None:
    if axis.isdigit():
        return int(axis)
    letter, _, divisor = axis.partition("/")
    return sizes[letter] // int(divisor) if divisor else sizes.get(axis)


INDEX, COORDINATES = (torch.int64,), (torch.float64,)


def summands(factor: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes of numbers whose products may be added to a factor."""
    wider = (torch.float32,) if factor.dtype == torch.float64 else ()
    return (factor.dtype, *wider, torch.bfloat16, torch.float16)


def require_countable(op: str, **tensors: Tensor | None) -> None:
    """Check that no tensor has more numbers than kernels count, an axis without entries counted as 1, for an op's fake."""
    for name, tensor in tensors.items():
        if tensor is not None and math.prod(max(size, 1) for size in tensor.shape) > 1 << 53:
            raise RuntimeError(f"{op}: {name} must have at most 2^53 numbers, got shape {tuple(tensor.shape)}")


def require_pair(op: str, name: str, pair: list[int], least: int) -> None:
    """Check a height and a width of a convolution."""
    if len(pair) != 2:
        raise RuntimeError(f"{op}: {name} must have 2 values (height, width), got {len(pair)}")
    if min(pair) < least or max(pair) > MOST:
        raise RuntimeError(f"{op}: {name} must be at least {least} and at most {MOST}, got ({pair[0]}, {pair[1]})")


def require_factor(op: str, factor: Tensor) -> None:
    """Check that a factor, which is written, is contiguous, for an op's fake."""
    torch._check(factor.is_contiguous(), lambda: f"{op}: factor must be contiguous, it is updated in place")


def require_weight_of_sum(op: str, alpha: float, factor: Tensor) -> None:
    """Check that the weight of what is added to a factor is a finite number in its dtype, for an op's fake."""
    most = torch.finfo(factor.dtype).max
    torch._check(
        -most <= alpha <= most,
        lambda: (
            f"{op}: alpha must be a finite number in the dtype of factor ({_short(factor.dtype)}), got {float(alpha):g}"
        ),
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _transforms_active() -> bool:
    """Whether a ``torch.func`` transform or forward-mode AD is on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def nested_forward_mode() -> bool:
    """Whether ``torch.func`` transforms with more than one forward-mode level are on. There torch runs the jvp rule of an
    :class:`torch.autograd.Function` with forward mode off, and the tangents of the other levels are silently zero: an op that is
    to be right there has to be written in plain torch."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    levels = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return levels.count(torch._C._functorch.TransformType.Jvp) > 1


def _intercepted(args: tuple[Any, ...]) -> bool:
    """Whether somebody wants to see the op itself, with autograd still to come: a compiler, a tracer, a tensor subclass or a mode
    with ``__torch_function__``."""
    return torch.compiler.is_compiling() or torch.overrides.has_torch_function(args) or torch.jit.is_tracing()


def plain_autograd(args: tuple[Any, ...], graph: bool = True) -> bool:
    """Whether nobody but eager autograd sees an op on these arguments: no compiler, tracer, transform, mode, tensor subclass or
    batch of gradients. An op without rules for those may then be called. Nor are there hooks on saved tensors, as of a checkpoint,
    which counts what its forward saves in a second one under modes of its own.

    Args:
        args: the op's arguments.
        graph: whether autograd is to record, or not to.
    """
    if torch.is_grad_enabled() != graph or _intercepted(args) or _transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or (graph and torch._C._autograd._top_saved_tensors_default_hooks(True)):
        return False
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is torch.nn.Parameter:
            if torch._C._functorch.is_legacy_batchedtensor(a):
                return False
        elif isinstance(a, Tensor):
            return False
    return True


def differentiable(
    name: str,
    *,
    fake: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register the rules of ``torch.ops.ella_cuda.<name>`` and return a callable that uses whichever mechanism applies.

    Args:
        name: the op's name in ``csrc/schemas.cpp``.
        fake: shapes, dtypes and strides of the outputs.
        save: ``save(ctx, inputs, output)``; keeps tensors with :func:`keep`.
        backward: ``backward(ctx, *grads)`` -> one gradient or None per input; may only call differentiable code.
        jvp: ``jvp(ctx, *tangents)`` -> tangents of the outputs.
        vmap: ``vmap(info, in_dims, *inputs)`` -> ``(outputs, out_dims)``, on physical tensors; by default a call per batch entry.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake)
    torch.library.register_autograd(qualified, backward, setup_context=save)
    torch.library.register_vmap(qualified, vmap or _loop(name))

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def forward_and_save(ctx: Any, *args: Any) -> Any:
        output = below_autograd(*args)
        save(ctx, args, output)
        return output

    title = "".join(part.capitalize() for part in name.split("_"))
    eager = type(
        title,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward_and_save), "backward": staticmethod(backward)},
    )
    transformed = type(
        title,
        (torch.autograd.Function,),
        {
            "generate_vmap_rule": True,
            "forward": staticmethod(lambda *args: op(*args)),
            "setup_context": staticmethod(save),
            "backward": staticmethod(backward),
            "jvp": staticmethod(jvp),
        },
    )

    def call(*args: Any) -> Any:
        if _intercepted(args):
            return op(*args)
        require_backend(name, args[0])
        if _transforms_active():
            return transformed.apply(*args)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return eager.apply(*args)
        return below_autograd(*args)

    call.__name__ = name
    return call


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for backward and forward mode alike."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def batched_first(tensor: Tensor | None, dim: int | None) -> Tensor | None:
    """The physical tensor of a vmapped argument with its batch axis in front; an unbatched one as it is."""
    return tensor if tensor is None or dim is None else tensor.movedim(dim, 0)


def map_over_batch(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The vmap rule of last resort: one call per batch entry, outputs stacked along a new leading axis."""
    moved = [
        batched_first(arg, dim) if isinstance(arg, Tensor) else arg for arg, dim in zip(args, in_dims, strict=True)
    ]
    if info.batch_size == 0:
        raise ValueError(f"ella_cuda.ops.{call.__name__}: expected a vmap axis with at least one entry, got none.")
    results = [
        call(*(arg if dim is None else arg[i] for arg, dim in zip(moved, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    if results[0] is None:
        return None, None
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def _loop(name: str) -> Callable[..., Any]:
    """The vmap rule of the op of that name by :func:`map_over_batch`."""

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return map_over_batch(getattr(getattr(torch.ops, NAMESPACE), name), info, in_dims, args)

    return vmap


def joins_rows(name: str) -> Callable[..., Any]:
    """The vmap rule of the op of that name whose results have a row for each of the first argument's: where no other argument is batched,
    the batch joins the rows; else a call per batch entry."""

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        op = getattr(getattr(torch.ops, NAMESPACE), name)
        if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
            return map_over_batch(op, info, in_dims, args)
        x = batched_first(args[0], in_dims[0])
        found = op(x.flatten(0, 1), *args[1:])
        if isinstance(found, Tensor):
            return found.unflatten(0, x.shape[:2]), 0
        return tuple(part.unflatten(0, x.shape[:2]) for part in found), (0,) * len(found)

    return vmap


def sum_of_parts(*parts: Any) -> Any:
    """The sum of tensors, or of tuples of tensors by their parts, that are not None; None where there is none."""
    total = None
    for part in parts:
        if total is None or part is None:
            total = part if total is None else total
        elif isinstance(part, tuple):
            total = tuple(map(sum_of_parts, total, part))
        else:
            total = total + part
    return total


def carries_tangent(tensor: Tensor) -> bool:
    """Whether forward mode differentiates in the tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def refuse_graph(name: str, **tensors: Tensor) -> None:
    """Raise ValueError when a tensor of an in-place op carries a graph or a tangent: the op has no derivative.

    Args:
        name: the op's name, for the message.
        tensors: the op's tensor arguments by name, the one that is written first.
    """
    written = next(iter(tensors))
    for label, tensor in tensors.items():
        if tensor.requires_grad and (torch.is_grad_enabled() or label == written):
            raise ValueError(
                f"ella_cuda.ops.{name}: {label} requires grad, but {name} writes in place and has no derivative; pass {label}.detach()."
            )
        if carries_tangent(tensor):
            raise ValueError(
                f"ella_cuda.ops.{name}: {label} carries a forward-mode tangent, but {name} has no derivative; pass the primal only."
            )


def register_in_place(
    name: str, *, fake: Callable[..., None], vmap: Callable[..., Any] | None = None
) -> Callable[..., None]:
    """Register the rules of an op that writes its first argument, and return a callable that keeps the version counter honest.

    Autograd notices a tensor changed after it was saved by its version counter, which the dispatcher does not move for such ops. Without
    a vmap rule there is a call per batch entry.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name)
    written, operand, *_ = (argument.name for argument in op.default._schema.arguments)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)

    def physical(info: Any, in_dims: tuple[Any, ...], target: Tensor, *rest: Any) -> tuple[Any, Any]:
        if in_dims[0] is None:
            raise ValueError(
                f"ella_cuda.ops.{name}: under vmap the first argument, which is written, must have the vmapped axis too."
            )
        require_own_memory(name, written, operand, target, rest[0])
        if vmap is None:
            return _map_in_place_over_batch(op, info, in_dims, (target, *rest))
        return vmap(info, in_dims, target, *rest)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", physical)

    def call(target: Tensor, *rest: Any) -> None:
        op(target, *rest)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(target)

    return call


def require_own_memory(name: str, written: str, read_name: str, target: Tensor, read: Tensor) -> None:
    """Refuse, as kernels do, a target whose numbers share memory with each other or with what is read: of tensors with a vmapped axis,
    before a contiguous copy hides it."""
    target, read = unwrapped(target), unwrapped(read)
    if any(t.device.type == "meta" or is_fake(t) or not t.numel() for t in (target, read)):
        return
    reach = 0  # how far the numbers lie apart along the axes of smaller strides
    for stride, size in sorted(
        (stride, size) for stride, size in zip(target.stride(), target.shape, strict=True) if size > 1
    ):
        if stride <= reach:
            raise RuntimeError(
                f"{name}: {written} must not share memory between entries of the vmapped axis, it is updated in place; pass a clone"
            )
        reach += stride * (size - 1)
    (begin, end), (first, last) = _extent(target), _extent(read)
    if first < end and begin < last:
        raise RuntimeError(
            f"{name}: {read_name} must not share memory with {written}, which is updated in place; pass a clone"
        )


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor in memory below those of ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def begin_together(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in memory, below those of ``torch.func``, have the same address."""
    one, other = unwrapped(one), unwrapped(other)
    return not (is_fake(one) or is_fake(other)) and one.data_ptr() == other.data_ptr()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses from the first number to behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _map_in_place_over_batch(
    op: Callable[..., None], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[None, None]:
    """One in-place call per batch entry, each on its own slice of the first argument."""
    moved = [arg.movedim(dim, 0) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
    for i in range(info.batch_size):
        entry = [arg[i] if isinstance(dim, int) else arg for arg, dim in zip(moved, in_dims, strict=True)]
        target = entry[0].contiguous()
        op(target, *entry[1:])
        if not entry[0].is_contiguous():
            entry[0].copy_(target)
    return None, None

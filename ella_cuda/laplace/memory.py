"""Memory that a fit and its evidence need, estimated before the fit, and memory that a device has."""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, take, tensors_of
from ella_cuda.laplace.curvature import curvature_pass
from ella_cuda.laplace.eigenvalues import workspace
from ella_cuda.laplace.factors import merged_shapes
from ella_cuda.laplace.interception import saved_tensors
from ella_cuda.laplace.kronecker_sums import WAITING, WORKSPACE
from ella_cuda.laplace.rules.linear import LinearRule
from ella_cuda.laplace.second_moment import UnkeptMoment
from ella_cuda.ops._precision import without_autocast
from ella_cuda.recording import has_graphs

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

ROOT = 100  # bytes for each output that the softmax Hessian's square root takes before its columns are built
COLUMN = 24  # bytes for each class that building a column of the softmax Hessian takes, beside the column
ROUND = 2  # what passes take for each byte of gradients: layers make copies, and an allocator keeps what was freed for another size


def peak_bytes(
    model: nn.Module,
    rules: Sequence[Rule],
    memory_budget: int,
    x: Inputs | None,
    corrected: bool = False,
    summed: bool = False,
) -> int:
    """The most that a fit allocates at once: the factors, and the larger of what a pass over a batch and what the eigenvalues take. A
    batch's graph has memory of its own, which stays while other batches run as they are.

    Args:
        memory_budget: of the gradients of one backward pass.
        x: a batch of the size that the loader yields, on the model's device; None leaves out what its forward pass keeps.
        corrected: whether eigenvectors and corrected eigenvalues are kept too.
        summed: whether a linear layer that alone has factors takes the sum of Hessians, without columns.
    """
    of_ties = [side for s in merged_shapes(rules).values() for side in ((1, s.inputs), (1, s.outputs))]
    blocks = [side for rule in rules for side in rule.blocks()] + of_ties
    factors = sum(rule.bytes() for rule in rules) + sum(rows**2 for _, rows in of_ties) * torch.float64.itemsize
    like = next(rules[0].module.parameters())
    device = like.device
    if corrected:  # eigenvalues twice: in a basis, and as the evidence takes them
        factors += sum(groups * rows**2 for groups, rows in blocks) * like.element_size()
        factors += 2 * sum(s.numel for rule in rules for s in rule.shapes().values()) * torch.float64.itemsize
    kept, column, columns = (0, 0, memory_budget) if x is None else _of_a_batch(model, rules, memory_budget, x, summed)
    kept += WAITING + WORKSPACE if x is not None and device.type == "cuda" else 0
    columns = min(columns, memory_budget)
    graph = 0
    if x is not None and has_graphs(device):  # which has copies of the inputs, and frees what a batch is done with
        graph = max(columns, column) + kept + sum(t.numel() * t.element_size() for t in tensors_of(x))
    return factors + max(max(ROUND * columns, column) + kept + graph, workspace(blocks, device))


def require_memory(model: nn.Module, rules: Sequence[Rule], corrected: bool = False) -> None:
    """MemoryError where the factors of a fit, which are not allocated yet, and their eigenvalues, with the eigenvectors if these are
    ``corrected``, will take more than the device has."""
    device = next(rules[0].module.parameters()).device
    needed, available = peak_bytes(model, rules, 0, None, corrected), available_bytes(device)
    if available is None or needed <= available:
        return
    each = sorted(((rule.bytes(p), rule.full_name(p)) for rule in rules for p in rule.trainable), reverse=True)
    largest = ", ".join(f"{name!r} {size:,}" for size, name in each[:3] if size)
    raise MemoryError(
        f"fit: the factors of the curvature and their eigenvalues take {needed:,} bytes, and {device} has {available:,} available. The "
        f"largest factors, in bytes: {largest}. Freeze parameters with requires_grad_(False), or give the network a smaller head or narrower "
        "layers; KronLaplace.summary() lists what each parameter takes."
    )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device, what torch's allocator keeps for later included; None where nothing tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _of_the_system(Path("/")) if device.type == "cpu" else None


def _of_the_system(root: Path) -> int | None:
    """The least of what Linux says is available, and what the process' control groups, of version 2, leave below their limits."""
    known = [int(line.split()[1]) << 10 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    group = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), None)
    # A container may see its group as the root, under the name that it has outside.
    for part in [] if group is None else [group.lstrip("/"), *PurePosixPath(group.lstrip("/")).parents]:
        folder = root / "sys/fs/cgroup" / part
        limit, used = (_lines(folder / name)[:1] for name in ("memory.max", "memory.current"))
        if limit and used and limit[0].isdigit():
            files = ("inactive_file ", "active_file ")  # given back when somebody needs room
            cached = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(files))
            known.append(max(int(limit[0]) - int(used[0]) + cached, 0))
    return min(known, default=None)


def _lines(file: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


@contextmanager
def telling_needs(
    batch: Callable[[], tuple[Any, Tensor | None]], estimate: Callable[[Any], int], factors: int
) -> Iterator[None]:
    """For the duration of the context, have an error that says that there is no memory say what a fit takes, too.

    Args:
        batch: gives the last batch's x and y, y None before the first.
        estimate: the bytes of a fit on batches like x, ``factors`` of them for these; runs the model on its first data points.
    """
    try:
        yield
    except RuntimeError as error:
        x, y = batch()
        if y is None or not _says_no_memory(error):
            raise
        kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
        traceback.clear_frames(error.__traceback__)  # what the pass held has made room when the model runs again
        try:
            needs = f"about {estimate(x):,} bytes (KronLaplace.memory_estimate), {factors:,} of them for factors"
        except RuntimeError:
            needs = f"{factors:,} bytes for factors, and more than there is for one data point"
        raise kind(
            f"fit: there is no memory left ({error}). With batches of {len(y)} a fit and its evidence take {needs}. Use a smaller "
            "memory_budget, smaller batches, or freeze parameters."
        ) from error


def _says_no_memory(error: RuntimeError) -> bool:
    words = ("DefaultCPUAllocator", "no memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


class _Held:
    """A tensor that a graph keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _of_a_batch(
    model: nn.Module, rules: Sequence[Rule], memory_budget: int, x: Inputs, summed: bool
) -> tuple[int, int, int]:
    """Bytes that the graph of a fit keeps of a batch's images that go together, those of a column's gradients, and of all columns', estimated
    from its first image."""
    constants = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: weakref.WeakSet[_Held] = weakref.WeakSet()  # what no node holds any more is not among it

    def keep(tensor: Tensor) -> _Held:
        found = _Held(tensor)
        held.add(found)
        return found

    for rule in rules:
        rule.allocate(UnkeptMoment)
    with curvature_pass(model, rules, memory_budget) as run, without_autocast(next(model.parameters()).device.type):
        run.try_out(x, several=False)
        run.watched, one, sums = keep, take(x, slice(1)), 0
        with ExitStack() as stack:
            if (chunks := run.chunks(one)) is not None:
                sums = run.findings.image_bytes // run.copies
                one = chunks[0][0]
                stack.enter_context(run.of_copies(one, run.consumer))
            stack.enter_context(run.nodes())
            stack.enter_context(saved_tensors(keep, lambda held: held.tensor))
            outputs = run.forward(one)
            last = run.last_call(outputs) if summed else None
            ours = run.kept_bytes()
            storages = [one.tensor.untyped_storage() for one in held]
            kept = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in constants}
    together = max(data_points(x), run.merged_images(x))
    images, count = run.images_at_once(together), math.prod(outputs.shape[1:])
    column = images * max(run.column_bytes, COLUMN * outputs.shape[-1] + outputs.element_size() * count)
    if last is not None and type(last.rule) is LinearRule:
        column = images * COLUMN * count + 2 * torch.float64.itemsize * count**2  # the sum of Hessians
        return images * (sum(kept.values()) + ours + ROOT * count), column, 0
    of_copies = sums + max(min(count * sums, memory_budget), sums)  # means of inputs, and sums of gradients
    return images * (sum(kept.values()) + ours + of_copies + ROOT * count), column, count * column

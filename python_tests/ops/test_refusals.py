"""What every op refuses before it asks for memory: sizes that cannot be counted, values and tensors that do not fit, with memory
or without."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ella_cuda import ops
from python_tests.ops.test_conv_kron_accumulate import PLAIN, geometry

FLOAT64, INT64 = torch.float64, torch.int64
OF_OPS = [
    importlib.import_module(f"python_tests.ops.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path.stem not in (Path(__file__).stem, "test_conformance", "test_kernel_sets")
]
OPS = {name: operands for module in OF_OPS for name, operands in getattr(module, "OPERANDS", {}).items()}
# An op, its tensors as there, what follows them, and words of the refusal.
REFUSALS = [refused for module in OF_OPS for refused in getattr(module, "REFUSALS", ())]
SMALL = dict(zip("NCXDYGabMAPHWdETBSK", (3, 2, 5, 2, 5, 2, 3, 4, 3, 4, 2, 6, 6, 4, 9, 1, 2, 3, 4), strict=True))


def test_every_schema_has_operands():
    schemas = re.findall(r'm\.def\(\s*"(\w+)\(', (Path(__file__).parents[2] / "csrc/schemas.cpp").read_text())
    plain = {"factored_linear_keeping", "factored_linear_backward_keeping"}  # no fakes: autograd alone calls them
    plain |= {"kron_accumulate_many_", "conv_kron_accumulate_many_"}  # nor these: a fit alone
    assert len(schemas) > 20 and set(OPS) == set(schemas) - plain


def letters(name: str) -> list[str]:
    return sorted({axis for axes, *_ in OPS[name].tensors for axis in axes.split() if not axis.isdigit()})


def tensors(name: str, sizes: dict[str, int], device: str = "cpu") -> list[Tensor]:
    """Ones without memory of their own."""
    made = []
    for axes, *dtype in OPS[name].tensors:
        shape = [int(axis) if axis.isdigit() else sizes[axis] for axis in axes.split()]
        made.append(torch.ones((), dtype=dtype[0] if dtype else torch.float32, device=device).expand(shape))
    return made


def arguments(name: str, made: list[Any], rest: Sequence[Any] | None = None) -> list[Any]:
    return [*([made] if OPS[name].listed else made), *(OPS[name].rest if rest is None else rest)]


def call(name: str, made: list[Tensor]) -> None:
    getattr(torch.ops.ella_cuda, name)(*arguments(name, made))


def with_own_factor(name: str, made: list[Tensor]) -> list[Tensor]:
    """With memory for what has to be contiguous."""
    needed = OPS[name].contiguous
    return [t.contiguous() if (i == 0 and name.endswith("_")) or needed else t for i, t in enumerate(made)]


def refusal(name: str, args: list[Any] | tuple[Any, ...]) -> str:
    """The words of the RuntimeError, and of no other error."""
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.ella_cuda, name)(*args)
    assert not isinstance(caught.value, NotImplementedError)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in OPS if not OPS[name].contiguous])
def test_virtual_sizes_that_cannot_be_counted_are_refused(name):
    """Products of sizes that overflow 63 bits in numbers, in bytes, or once rounded up to vectors; other sizes are empty or not."""
    tried = 0
    for letter in letters(name):
        for power in (54, 57, 60, 61):
            for others in (0, 1, 2):
                sizes = {key: others for key in SMALL} | {letter: 1 << power}
                try:
                    made = with_own_factor(name, tensors(name, sizes))
                except RuntimeError:  # no memory for the factor, or torch counts no such tensor
                    continue
                with pytest.raises(RuntimeError, match=r"2\^53 numbers|must|not fit"):
                    call(name, made)
                tried += 1
    assert tried > 4


@pytest.mark.parametrize("name", ["factored_linear", "kron_logdet", "circular_conv2d", "gaussian_project"])
def test_virtual_sizes_that_do_not_fit_memory_are_refused(name):
    first = OPS[name].tensors[0][0].split()[0]
    made = tensors(name, dict.fromkeys(SMALL, 64) | {first: 1 << 40, "H": 4, "W": 4})
    # Built with the headers of torch 2.11, an op says which of torch's calls failed, not why.
    with pytest.raises(RuntimeError, match=r"memory|aten::new_empty.* failed"):
        call(name, made)


@pytest.mark.parametrize("name", OPS)
def test_tensors_without_memory_are_checked_as_others_are(name):
    """Fakes refuse a wrong shape, dtype and device of every tensor, as kernels do and in their words; and take what is right."""
    right, in_memory = (with_own_factor(name, tensors(name, SMALL, device)) for device in ("meta", "cpu"))
    call(name, right)

    def refused(place: int, change: Callable[[Tensor], Tensor]) -> str:
        words = [
            refusal(name, arguments(name, [*made[:place], change(made[place]), *made[place + 1 :]]))
            for made in (in_memory, right)
        ]
        # Of a shape that is another argument's, or one of two, the kernel says so.
        assert words[0] == words[1] or ("eigenvalues_out" in words[0] and "must have shape" in words[1]), words
        return words[1]

    for place, tensor in enumerate(right):
        assert "must have shape" in refused(place, lambda t: t[None])
        summand = name.endswith("kron_accumulate_") and place == 1  # which may have 16 bits
        for dtype in (torch.int32, *([] if summand else [torch.float16, torch.bfloat16])):
            assert "must" in refused(place, lambda t, dtype=dtype: t.to(dtype))
        if len(right) > 1:
            elsewhere = torch.ones(tensor.shape, dtype=tensor.dtype)
            made = [*right[:place], elsewhere, *right[place + 1 :], *OPS[name].rest]
            assert "must be on the device of" in refusal(name, made)
        elsewhere = {a for i, (axes, *_) in enumerate(OPS[name].tensors) if i != place for a in axes.split()}
        for letter in set(OPS[name].tensors[place][0].split()) & elsewhere & SMALL.keys():
            larger = SMALL | {letter: SMALL[letter] + 1}
            words = refused(
                place, lambda t, i=place, sizes=larger: with_own_factor(name, tensors(name, sizes, t.device.type))[i]
            )
            assert "must have shape" in words


def ones(axes: str, dtype: torch.dtype, device: str) -> Tensor:
    return torch.ones([int(size) for size in axes.split()], dtype=dtype, device=device)


@pytest.mark.parametrize(("name", "made", "rest", "words"), REFUSALS)
def test_values_are_refused_in_the_same_words_with_and_without_memory(name, made, rest, words):
    def given(args: Any, device: str) -> list[Any]:
        return [ones(a[0], [*a, torch.float32][1], device) if isinstance(a, tuple) else a for a in args]

    cpu, meta = (refusal(name, arguments(name, given(made, d), given(rest, d))) for d in ("cpu", "meta"))
    assert words in cpu
    assert meta == cpu


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layouts_that_no_kernel_can_write_or_read_are_refused_with_and_without_memory(device):
    square = torch.ones(1, 4, 4, device=device)[:, ::2, ::2]
    words = "factor must be contiguous, it is updated in place"
    assert words in refusal("kron_accumulate_", (square, torch.ones(3, 1, 2, device=device), 1.0))
    assert words in refusal("conv_kron_accumulate_", (square[0], torch.ones(1, 2, 2, 2, device=device), *PLAIN))
    spectra = torch.ones(4, device=device), torch.ones(5, 2, dtype=INT64, device=device).T
    starts, log_ratio = torch.ones(4, dtype=INT64, device=device)[::2], torch.ones(1, device=device)
    words = "tiles and starts must be contiguous"
    for tiles, start in ((spectra[1], starts.contiguous()), (spectra[1].contiguous(), starts)):
        assert words in refusal("kron_evidence_bend", (spectra[0], tiles, start, log_ratio))


@pytest.mark.parametrize(("call", "target", "read"), [
    (lambda f, x: ops.kron_accumulate_(f, x), (1, 2, 2), (3, 1, 2)),
    (lambda f, x: ops.conv_kron_accumulate_(f, x, 1), (2, 2), (3, 2, 1, 1)),
])  # fmt: skip
def test_a_factor_that_shares_memory_is_refused_under_vmap(call, target, read):
    """Between its entries, or with what is read; whether or not a copy is made of it. What only lies beside it is taken."""
    memory, x = torch.arange(40.0), torch.randn(2, *read)
    before = memory.clone()
    shared = memory[:4].view(target).expand(2, *target)
    sliding = memory.as_strided((2, *target), (1, *memory[:4].view(target).stride()))
    for factor in (shared, sliding):
        with pytest.raises(RuntimeError, match="factor must not share memory between entries of the vmapped axis"):
            torch.vmap(call)(factor, x)
    apart = {False: memory[:8].view(2, *target), True: memory[:8].view(*target, 2).movedim(-1, 0)}
    for factor in apart.values():
        for nested in (False, True):
            overlapping = memory[7:19].view(2, *read)
            mapped = torch.vmap(torch.vmap(call)) if nested else torch.vmap(call)
            args = (factor[None], overlapping[None]) if nested else (factor, overlapping)
            with pytest.raises(RuntimeError, match=r"(rows|x) must not share memory with factor"):
                mapped(*args)
    assert torch.equal(memory, before)
    for factor in apart.values():
        beside = memory[8:20].view(2, *read)
        expected = factor.clone() + torch.einsum("bni,bnj->bij", *[beside.reshape(2, 3, 2)] * 2).view(2, *target)
        torch.vmap(call)(factor, beside)
        torch.testing.assert_close(factor, expected)


@pytest.mark.parametrize("vmaps", [1, 2, 3])
@pytest.mark.parametrize("begin", [0, 20, 28])  # far before the factor, directly before it, directly behind it
def test_what_lies_apart_from_a_factor_is_taken_under_vmap(begin, vmaps):
    """And what reaches into it from either side is refused; whatever the number of vmaps."""
    call, memory = ops.kron_accumulate_, torch.randn(60)
    start = begin + 12 if begin == 20 else 20 if begin == 28 else 32
    for _ in range(vmaps):
        call = torch.vmap(call)

    def wrapped(tensor: Tensor, *shape: int) -> Tensor:
        return tensor.view(*[1] * (vmaps - 1), *shape)

    factor, rows = wrapped(memory[start : start + 8], 2, 1, 2, 2), wrapped(memory[begin : begin + 12], 2, 3, 1, 2)
    expected = factor + torch.einsum("...nki,...nkj->...kij", rows, rows)
    call(factor, rows)
    torch.testing.assert_close(factor, expected)
    for shift in (-11, 7):
        reaching = wrapped(memory[start + shift : start + shift + 12], 2, 3, 1, 2)
        with pytest.raises(RuntimeError, match="rows must not share memory with factor"):
            call(factor, reaching)
    torch.testing.assert_close(factor, expected)


def test_an_axis_of_one_entry_shares_no_memory_under_vmap():
    memory, rows = torch.zeros(4), torch.randn(1, 3, 1, 2)
    torch.vmap(ops.kron_accumulate_)(memory.as_strided((1, 1, 2, 2), (0, 0, 2, 1)), rows)
    torch.testing.assert_close(memory.view(2, 2), rows[0, :, 0].T @ rows[0, :, 0])


def test_what_has_no_entries_shares_no_memory_under_vmap():
    memory = torch.randn(8)
    before = memory.clone()
    torch.vmap(ops.kron_accumulate_)(memory.view(2, 1, 2, 2), memory[2:2].view(2, 0, 1, 2))
    torch.vmap(ops.kron_accumulate_)(memory[:1].expand(2, 0, 2, 2), memory[:0].view(2, 3, 0, 2))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("circular", "padding", "image", "kernel"), [
    (True, 2, (2, 2), 3),  # padding as large as the image
    (False, 3, (2, 2), 3),  # zeros, of which there may be more than of pixels
    (False, 2, (0, 0), 3),
    (True, 0, (2, 2), 1),
])  # fmt: skip
def test_the_largest_paddings_are_taken_with_and_without_memory(device, circular, padding, image, kernel):
    factor = torch.zeros(kernel**2, kernel**2, device=device)
    values = geometry(kernel_size=[kernel] * 2, padding=[padding] * 2, circular=circular)
    torch.ops.ella_cuda.conv_kron_accumulate_(factor, torch.ones(1, 1, *image, device=device), *values)
    assert device == "meta" or image[0] == 0 or factor.sum() > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_empty_image_that_is_not_padded_is_taken_with_and_without_memory(device):
    image = torch.ones(1, 1, 0, 3, device=device)
    assert torch.ops.ella_cuda.circular_pad2d(image, 0, 1, None).shape == (1, 1, 0, 5)
    assert torch.ops.ella_cuda.circular_pad2d(image, 0, 0, None).shape == image.shape


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wide_rows_beside_a_narrow_factor_are_refused_with_and_without_memory(device):
    factor, rows = torch.zeros(1, 2, 2, device=device), torch.ones(3, 1, 2, device=device)
    words = "must have the dtype of factor (float32) or be bfloat16 or float16, got float64"
    assert words in refusal("kron_accumulate_", (factor, rows.double(), 1.0))
    assert words in refusal(
        "conv_kron_accumulate_", (factor[0], torch.ones(1, 2, 2, 2, device=device).double(), *PLAIN)
    )
    torch.ops.ella_cuda.kron_accumulate_(factor.double(), rows, 1.0)


@pytest.mark.parametrize("name", ["polyphase_select", "polyphase_scatter", "circular_pad2d", "circular_fold2d"])
def test_a_virtual_batch_whose_index_does_not_fit_memory_is_refused(name):
    """Of images without channels, so that the index alone takes memory."""
    images = torch.ones(()).expand(1 << 46, 0, 2, 2)
    index = torch.zeros((), dtype=INT64).expand(1 << 46)
    pads = (0, 0) if name.startswith("circular") else ()
    assert f"{name}: the system has no memory left for the index" in refusal(name, (images, *pads, index))
    if pads:
        assert getattr(torch.ops.ella_cuda, name)(images, *pads, None).shape == images.shape

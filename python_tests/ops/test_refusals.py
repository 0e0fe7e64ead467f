"""What every op refuses before it asks for memory: sizes that cannot be counted, tensors without memory that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# By op: the tensors' axes by their letters, in the op's order, with a dtype where it is not float32; then what follows them.
FLOAT64, INT64 = torch.float64, torch.int64
POINTS = [("X P", FLOAT64), ("A P", FLOAT64)]
SPECTRA = [("E",), ("T 5", INT64), ("S", INT64)]
OPS = {
    "factored_linear": ([("N C X",), ("D C X",), ("D C Y",)], (None, None)),
    "factored_linear_backward": ([("N D Y",), ("N C X",), ("D C X",), ("D C Y",)], (None, *[True] * 5)),
    "factored_linear_pull_back": ([("N D Y",), ("D C X",), ("D C Y",)], (True, True)),
    "kron_logdet": ([("G a",), ("G b",), ("",)], ()),
    "kron_logdet_gradient": ([("G a",), ("G b",), ("",)], ()),
    "kron_logdet_hvp": ([("G a",), ("G b",), ("",)] * 2, ()),
    "gaussian_project": ([("M X",), *POINTS], ()),
    "gaussian_project_tangent": ([("M X",), *POINTS, *POINTS], ()),
    "gaussian_project_gradient": ([("M A",), ("M X",), *POINTS], ()),
    "gaussian_project_hvp": ([("M A",), ("M X",), *POINTS, *POINTS], ()),
    "polyphase_pool": ([("N C H H",)], (2.0,)),
    "polyphase_select": ([("N C H H",), ("N", INT64)], ()),
    "polyphase_scatter": ([("N C H W",), ("N", INT64)], ()),
    "circular_pad2d": ([("N C H W",)], (1, 1, None)),
    "circular_fold2d": ([("N C H W",)], (1, 1, None)),
    "circular_conv2d": ([("N C H W",), ("D C 3 3",)], (None,)),
    "circular_conv2d_weight_grad": ([("N D H W",), ("N C H W",)], (3, 3)),
    "circular_conv2d_pool": ([("N C H H",), ("D C 3 3",)], (None, 2.0)),
    "circular_conv2d_scattered": ([("N C H W",), ("N", INT64), ("D C 3 3",)], ()),
    "circular_conv2d_scattered_weight_grad": ([("N D 2 2",), ("N", INT64), ("N C 4 4",)], (3, 3)),
    "kron_accumulate_": ([("G d d",), ("N G d",)], (1.0,)),
    "conv_kron_accumulate_": ([("C C",), ("N C H W",)], ([1, 1], [1, 1], [0, 0], [1, 1], True, 1.0)),
    "kron_evidence": ([*SPECTRA, ("B",), ("B",), ("",)], ()),
    "kron_evidence_derivative": ([*SPECTRA, ("B",)], (2,)),
}
SMALL = dict(zip("NCXDYGabMAPHWdETBS", (3, 2, 5, 2, 5, 2, 3, 4, 3, 4, 2, 6, 6, 4, 9, 1, 2, 3), strict=True))


def letters(name: str) -> list[str]:
    return sorted({axis for axes, *_ in OPS[name][0] for axis in axes.split() if not axis.isdigit()})


def tensors(name: str, sizes: dict[str, int], device: str = "cpu") -> list[Tensor]:
    """Ones without memory of their own."""
    made = []
    for axes, *dtype in OPS[name][0]:
        shape = [int(axis) if axis.isdigit() else sizes[axis] for axis in axes.split()]
        made.append(torch.ones((), dtype=dtype[0] if dtype else torch.float32, device=device).expand(shape))
    return made


def call(name: str, made: list[Tensor]) -> None:
    getattr(torch.ops.ella_cuda, name)(*made, *OPS[name][1])


def with_own_factor(name: str, made: list[Tensor]) -> list[Tensor]:
    return [made[0].contiguous(), *made[1:]] if name.endswith("_") else made


@pytest.mark.parametrize("name", [name for name in OPS if "evidence" not in name])
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
    first = OPS[name][0][0][0].split()[0]
    made = tensors(name, dict.fromkeys(SMALL, 64) | {first: 1 << 40, "H": 4, "W": 4})
    with pytest.raises(RuntimeError, match="memory"):
        call(name, made)


@pytest.mark.parametrize("name", OPS)
def test_tensors_without_memory_are_checked_as_others_are(name):
    """Fakes refuse a wrong shape, dtype and device of every tensor, as kernels do; and take what is right."""
    right = with_own_factor(name, tensors(name, SMALL, "meta"))
    call(name, right)
    for place, tensor in enumerate(right):
        other_dtype = torch.float16 if tensor.is_floating_point() else torch.int32
        wrong = [tensor[None], tensor.to(other_dtype), torch.ones(tensor.shape, dtype=tensor.dtype)]
        for replaced in wrong[: 2 if len(right) == 1 else 3]:
            made = [*right[:place], replaced, *right[place + 1 :]]
            with pytest.raises(RuntimeError, match=r"must|expected"):
                call(name, made)
        elsewhere = {a for i, (axes, *_) in enumerate(OPS[name][0]) if i != place for a in axes.split()}
        for letter in set(OPS[name][0][place][0].split()) & elsewhere & SMALL.keys():
            larger = with_own_factor(name, tensors(name, SMALL | {letter: SMALL[letter] + 1}, "meta"))[place]
            with pytest.raises(RuntimeError, match="must have shape"):
                call(name, [*right[:place], larger, *right[place + 1 :]])

"""Which lane holds which element of a tensor-core product, held against what Triton's compiler believes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from . import products
from .fault import Array

# In a process of its own: Gluon is experimental, and what of it changes may end the process.
ASK = """
import json
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl

context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
warp = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
warpgroup = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 8])
asked = {
    "c": (warp, [16, 8]),
    "a": (gl.DotOperandLayout(operand_index=0, parent=warp, k_width=1), [16, 8]),
    "b": (gl.DotOperandLayout(operand_index=1, parent=warp, k_width=1), [8, 8]),
    "c of a warpgroup": (warpgroup, [64, 64]),
    "a of a warpgroup": (gl.DotOperandLayout(operand_index=0, parent=warpgroup, k_width=1), [64, 8]),
    "shared memory": (gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2), [64, 32]),
}
answers = {name: builder.to_linear_layout(layout._to_ir(builder), shape) for name, (layout, shape) in asked.items()}
print(json.dumps({name: {k: v for k, v in vars(answer).items() if k.endswith("bases")} for name, answer in answers.items()}))
"""


@pytest.fixture(scope="module")
def layouts() -> dict[str, dict[str, list[list[int]]]]:
    """Layouts of Triton's by name: the images (row, column) of the bits of register, lane, warp and offset numbers."""
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=120)
    if answer.returncode:
        pytest.skip(
            f"this Triton cannot be asked for its layouts: {(answer.stderr.splitlines() or ['it crashed'])[-1]}"
        )
    return json.loads(answer.stdout)


def image(bases: Sequence[Sequence[int]], numbers: Array) -> Array:
    """(numbers, axes): the exclusive or of the bases of each number's bits."""
    result = np.zeros((len(numbers), 2), int)
    for bit, base in enumerate(bases):
        result ^= (numbers >> bit & 1)[:, None] * np.array(base)
    return result


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("c", products.C_PLACES),
        ("a", products.A_PLACES),
        ("b", products.B_PLACES),
        ("c of a warpgroup", products.WIDE_PLACES),
        ("a of a warpgroup", products.A_PLACES),
    ],
)
def test_registers(layouts, name: str, ours: tuple[Array, Array]) -> None:
    theirs, registers = layouts[name], np.arange(ours[0].shape[1])
    both = image(theirs["lane_bases"], products.LANES)[:, None] ^ image(theirs["reg_bases"], registers)[None]
    assert np.array_equal(np.stack(ours, -1), both)
    assert theirs["warp_bases"] == ([[16, 0], [32, 0]] if "warpgroup" in name else [])


def test_operand_in_shared_memory(layouts) -> None:
    """64 columns of 32 values, swizzled by 128 bytes: the first eight depths, and the next from a later start."""
    theirs = image(layouts["shared memory"]["offset_bases"], np.arange(64 * 32))  # (column, depth) of each offset
    descriptor = 1 << 62 | (1024 // 16) << 32 | 1 << 16 | 4096 // 16
    for step in range(4):
        offsets = (products.operand_bytes(descriptor + step * 32 // 16) - 4096) // 4
        for depth, column in np.ndindex(8, 64):
            assert theirs[offsets[depth, column]].tolist() == [column, 8 * step + depth]


def test_arithmetic() -> None:
    """Products of TF32 numbers are exact but for what is cut from sums, always towards zero."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32).view(np.uint32) for shape in ((16, 8), (8, 12)))
    c = random.standard_normal((16, 12)).astype(np.float32)
    left, right = ((words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for words in (a, b))
    exact, got = c + left @ right, products.multiply(c, a, b).astype(np.float64)
    size = np.abs(c) + np.abs(left) @ np.abs(right)
    assert np.all(np.abs(got - exact) <= 12 * 2.0**-23 * size)
    cut = products.multiply(np.zeros((16, 12), np.float32), a | 0x1FFF, b | 0x1FFF)
    assert np.array_equal(cut, products.multiply(np.zeros((16, 12), np.float32), a, b)), "lower bits are not looked at"
    ones = np.ones((16, 8), np.float32).view(np.uint32), np.full((8, 12), 2.0**-24, np.float32).view(np.uint32)
    large = np.ones((16, 12), np.float32)
    assert np.array_equal(products.multiply(large, *ones), large), "small terms beside a large sum are cut off"

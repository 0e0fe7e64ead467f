"""Counts of memory traffic where they are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .device import PtxDevice
from .test_machine import OPERAND, PRODUCT, STORE, VISIBLE, WAIT, WIDE, launch
from .traffic import Traffic


def counted(body: str, threads: int = 32, words: int = 4096) -> Traffic:
    traffic = Traffic()
    launch(body, np.zeros(words, np.uint32), threads, blocks=1, shared=8192, traffic=traffic)
    return traffic


@pytest.mark.parametrize(
    ("stride", "threads", "sectors", "needed"),
    [
        (4, 32, 4, 4),
        (8, 32, 8, 4),
        (32, 32, 32, 4),
        (128, 32, 32, 4),
        (0, 1, 1, 1),
        (4, 5, 1, 1),
        (4, 64, 8, 8),
        (40, 3, 3, 1),
    ],
)
def test_sectors(stride: int, threads: int, sectors: int, needed: int) -> None:
    body = f"mul.lo.u32 %r6, %r1, {stride};\ncvt.u64.u32 %rd5, %r6;\nadd.s64 %rd5, %rd1, %rd5;\nst.global.u32 [%rd5], %r1;\n"
    out = np.zeros(4096 + 8, np.uint32)
    out = out[(-out.ctypes.data // 4) % 8 :][:4096]  # begins with a sector
    traffic = Traffic()
    launch(body, out, threads, 1, 0, traffic=traffic)
    assert traffic.moved == {"global write": sectors} and traffic.needed == {"global write": needed}


@pytest.mark.parametrize(
    ("access", "stride", "turns", "needed"),
    [
        ("st.shared.u32 [%rd5], %r1;", 4, 1, 1),
        ("st.shared.u32 [%rd5], %r1;", 8, 2, 1),
        ("st.shared.u32 [%rd5], %r1;", 128, 32, 1),
        ("st.shared.u32 [%rd5], %r1;", 132, 1, 1),
        ("st.shared.v2.u32 [%rd5], {%r1, %r1};", 8, 2, 2),
        ("st.shared.v2.u32 [%rd5], {%r1, %r1};", 16, 4, 2),
        ("st.shared.v4.u32 [%rd5], {%r1, %r1, %r1, %r1};", 16, 4, 4),
        ("st.shared.v4.u32 [%rd5], {%r1, %r1, %r1, %r1};", 32, 8, 4),
        ("st.shared.v4.u32 [%rd5], {%r1, %r1, %r1, %r1};", 144, 4, 4),
    ],
)
def test_turns(access: str, stride: int, turns: int, needed: int) -> None:
    traffic = counted(f"mad.lo.u32 %r6, %r1, {stride}, 1024;\ncvt.u64.u32 %rd5, %r6;\n{access}\n")
    assert traffic.moved == {"shared write": turns} and traffic.needed == {"shared write": needed}


def test_one_word_for_all_is_read_in_one_turn() -> None:
    body = "mov.u64 %rd5, 1024;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 st.shared.u32 [%rd5], %r1;\nbar.sync 0;\nld.shared.u32 %r5, [%rd5];\n"
    traffic = counted(body, threads=64)
    assert traffic.moved == {"shared write": 1, "shared read": 2} and traffic.needed == traffic.moved


def test_products_are_those_of_tensor_cores() -> None:
    assert counted(PRODUCT).products == 1
    body = OPERAND + VISIBLE + "bar.sync 0;\n" + WIDE + WAIT
    traffic = counted(body, threads=128)
    assert traffic.products == 4  # one product of a warpgroup; fence, commit and wait are none


def test_instructions_of_warps() -> None:
    """Those of warps that part are counted for both sides; of a warp that is predicated off too."""
    before = counted("").instructions
    assert counted("mov.u32 %r5, 1;\n").instructions == before + 1
    assert counted("mov.u32 %r5, 1;\n", threads=96).instructions == 3 * before + 3
    assert counted("setp.gt.u32 %p1, %r1, 99;\n@%p1 mov.u32 %r5, 1;\n").instructions == before + 2
    part = "setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $L1;\nmov.u32 %r5, 1;\nbra $L2;\n$L1:\nmov.u32 %r5, 2;\n$L2:\n"
    assert counted(part + STORE).instructions == before + 2 + 2 + 1 + 1


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("most", "ran"), [(2, 2), (9, 4)])
def test_blocks_of_a_launch(ampere: PtxDevice, most: int, ran: int) -> None:
    """Padding to 4,096 numbers, which four blocks write 1,024 at a time, each sector of eight once."""
    with ampere.scheduled(), ampere.counting(most) as launches:
        ampere.ops.circular_pad2d(torch.randn(2, 2, 30, 30), 1, 1, None)
    (launch,) = launches
    assert (launch.blocks, launch.ran) == (4, ran)
    assert launch.traffic.moved["global write"] == launch.traffic.needed["global write"] == ran * 1024 // 8

"""The machine that runs PTX: what it computes where a closed form is known, and that it notices each kind of fault."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from .arithmetic import operation
from .fault import Fault
from .global_memory import Elements
from .machine import Program
from .parse import parse
from .traffic import Traffic

HEAD = """
.visible .entry k(.param .u64 k_param_0)
.maxntid 256, 1, 1
{
.reg .pred %p<9>;
.reg .f32 %f<99>;
.reg .b32 %r<99>;
.reg .b64 %rd<99>;
ld.param.u64 %rd1, [k_param_0];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2; // this thread's word of the output
mov.u32 %r2, ella_shared_bytesE;
shl.b32 %r3, %r1, 2;
add.s32 %r4, %r2, %r3; // and of shared memory
cvt.u64.u32 %rd4, %r4;
"""


def run(body: str, threads: int = 32, blocks: int = 1, shared: int = 1024, words: int = 256) -> np.ndarray:
    """The output of one launch of a kernel with that body, `words` words that start as 7."""
    out = np.full(words, 7, np.uint32)
    launch(body, out, threads, blocks, shared)
    return out


def launch(
    body: str,
    out: np.ndarray,
    threads: int,
    blocks: int,
    shared: int,
    order: str = "forward",
    traffic: Traffic | None = None,
    **elements: object,
) -> None:
    """A kernel with that body on a tensor that is `out`, but where told otherwise (`elements`)."""
    whole = Elements(out.ctypes.data, out.shape, (1,), out.itemsize, True)._replace(**elements)
    program = Program(parse(HEAD + body + "\nret;\n}\n")["k"])
    program.run(blocks, threads, shared, [struct.pack("Q", out.ctypes.data)], [whole], order, traffic)


STORE = "st.global.u32 [%rd3], %r5;\n"


def test_threads_that_part_meet_again() -> None:
    """A loop as many times as the thread's number, then a sum over the warp, which needs all lanes."""
    loop = """
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
    $L1:
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra $L2;
    add.s32 %r5, %r5, 3;
    add.s32 %r6, %r6, 1;
    bra $L1;
    $L2:
    """
    assert run(loop + STORE)[:32].tolist() == [3 * i for i in range(32)]
    for lane in (1, 2, 4, 8, 16):
        loop += f"shfl.sync.bfly.b32 %r7|%p2, %r5, {lane}, 31, -1;\nadd.s32 %r5, %r5, %r7;\n"
    assert run(loop + STORE)[:32].tolist() == [3 * 31 * 16] * 32


def test_some_that_go_on_early_wait_for_the_others() -> None:
    """Odd lanes leave out the second half of each round, and meet the others in the shuffle at its begin."""
    body = """
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
    and.b32 %r8, %r1, 1;
    setp.eq.u32 %p1, %r8, 1;
    $L1:
    shfl.sync.bfly.b32 %r7|%p2, %r1, 33, 31, -1;
    add.s32 %r5, %r5, %r7;
    add.s32 %r6, %r6, 1;
    setp.lt.u32 %p3, %r6, 3;
    @!%p3 bra $L3;
    @%p1 bra $L1;
    add.s32 %r5, %r5, 100;
    bra $L1;
    $L3:
    """
    assert run(body + STORE)[:32].tolist() == [3 * (i ^ 1) + (0 if i % 2 else 200) for i in range(32)]


def test_lanes_that_have_ended_are_not_waited_for() -> None:
    body = "setp.gt.u32 %p1, %r1, 7;\n@!%p1 bra $L1;\nmov.u32 %r5, 1;\n" + STORE + "ret;\n$L1:\n"
    body += "shfl.sync.bfly.b32 %r5|%p2, %r1, 1, 31, -1;\n" + STORE
    assert run(body)[:32].tolist() == [i ^ 1 for i in range(8)] + [1] * 24


def test_values_pass_through_shared_memory() -> None:
    swap = (
        "st.shared.u32 [%rd4], %r1;\nbar.sync 0;\nxor.b32 %r6, %r1, 33;\nshl.b32 %r6, %r6, 2;\nadd.s32 %r6, %r2, %r6;\n"
    )
    swap += "cvt.u64.u32 %rd5, %r6;\nld.shared.u32 %r5, [%rd5];\n" + STORE
    assert run(swap, threads=64)[:64].tolist() == [i ^ 33 for i in range(64)]


COPY = "cp.async.ca.shared.global [%rd4], [%rd3], 4, 4;\ncp.async.commit_group;\n"
READ = "ld.shared.u32 %r5, [%rd4];\n" + STORE
NEIGHBOUR = "xor.b32 %r6, %r4, 4;\ncvt.u64.u32 %rd5, %r6;\n"


def test_copies_arrive() -> None:
    assert run(COPY + "cp.async.wait_group 0;\n" + READ + "bar.sync 0;")[:33].tolist() == [7] * 33
    zeros = "cp.async.ca.shared.global [%rd4], [0], 4, 0;\ncp.async.commit_group;\ncp.async.wait_group 0;\n"
    assert run(zeros + READ)[:32].tolist() == [0] * 32


PRODUCT = """
mov.f32 %f1, 0f00000000;
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f2, %f3, %f4, %f5}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f1, %f1, %f1, %f1};
"""
# One operand of 64 columns by 32 depths at the begin of shared memory, by 128 threads of 16 words each.
OPERAND = "mov.u32 %r7, 0;\n" + "".join(
    f"mad.lo.s32 %r8, %r1, 64, {1024 + 4 * i};\ncvt.u64.u32 %rd6, %r8;\nst.shared.u32 [%rd6], %r7;\n" for i in range(16)
)
RESULTS = ", ".join(f"%f{i}" for i in range(10, 42))
WIDE = f"""
mov.b64 %rd7, {1 << 62 | 64 << 32 | 1 << 16 | 1024 // 16};
setp.ne.s32 %p3, %r7, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {{{RESULTS}}}, {{%r1, %r1, %r1, %r1}}, %rd7, %p3, 1, 1;
wgmma.commit_group.sync.aligned;
"""
VISIBLE, WAIT = "fence.proxy.async.shared::cta;\n", "wgmma.wait_group.sync.aligned 0;\n"


def test_a_product_of_a_warpgroup() -> None:
    shown = "mov.b32 %r5, %f11;\n" + STORE
    assert run(OPERAND + VISIBLE + "bar.sync 0;\n" + WIDE + WAIT + shown, 128, shared=8192)[:128].tolist() == [0] * 128


FAULTS = {
    "read before it was written": (READ, 32, "nobody wrote"),
    "read without a barrier": (
        "st.shared.u32 [%rd4], %r1;\n" + NEIGHBOUR + "ld.shared.u32 %r5, [%rd5];",
        32,
        "another thread wrote",
    ),
    "written without a barrier": (
        "st.shared.u32 [%rd4], %r1;\nbar.sync 0;\nld.shared.u32 %r5, [%rd4];\n"
        + NEIGHBOUR
        + "st.shared.u32 [%rd5], %r1;",
        32,
        "another thread read",
    ),
    "written after all have read, the last one twice": (
        "st.shared.u32 [%rd4], %r1;\nbar.sync 0;\nmov.u64 %rd5, 1024;\nsetp.ne.u32 %p1, %r1, 31;\n"
        "@!%p1 ld.shared.u32 %r5, [%rd5];\nld.shared.u32 %r5, [%rd5];\n@!%p1 st.shared.u32 [%rd5], %r1;",
        32,
        "another thread read",
    ),
    "copies to one word": (
        "cvt.u64.u32 %rd5, %r2;\ncp.async.ca.shared.global [%rd5], [%rd3], 4, 4;",
        32,
        "two asynchronous copies",
    ),
    "written by two at once": ("cvt.u64.u32 %rd5, %r2;\nst.shared.u32 [%rd5], %r1;", 32, "two threads"),
    "outside": ("mov.u64 %rd5, 2048;\nld.shared.u32 %r5, [%rd5];", 32, "outside the block's"),
    "not aligned": ("ld.global.v2.u32 {%r5, %r6}, [%rd3];", 32, "multiple of 8"),
    "global memory read without a barrier": (
        STORE.replace("%r5", "%r1") + "xor.b32 %r6, %r1, 1;\nmul.wide.u32 %rd5, %r6, 4;\nadd.s64 %rd5, %rd1, %rd5;\n"
        "ld.global.u32 %r5, [%rd5];",
        32,
        "another thread wrote to global",
    ),
    "global memory written without a barrier": (
        "xor.b32 %r6, %r1, 1;\nmul.wide.u32 %rd5, %r6, 4;\nadd.s64 %rd5, %rd1, %rd5;\nld.global.u32 %r5, [%rd5];\n"
        + STORE,
        32,
        "another thread read in global",
    ),
    "global memory written by two at once": ("st.global.u32 [%rd1], %r1;", 32, "two threads write one word of global"),
    "what was written, by an instruction for what is not": (
        STORE.replace("%r5", "%r1") + "ld.global.nc.u32 %r5, [%rd3];",
        32,
        "what the kernel wrote",
    ),
    "what was read by an instruction for what is not written": (
        "ld.global.nc.u32 %r5, [%rd3];\n" + STORE,
        32,
        "what the kernel read by an instruction",
    ),
    "a read of a counter": (
        "atom.global.add.u32 %r5, [%rd1], 1;\nld.global.u32 %r5, [%rd1];",
        1,
        "read of what atomic",
    ),
    "a write to a counter": (
        "atom.global.add.u32 %r5, [%rd1], 1;\nst.global.u32 [%rd1], %r1;",
        1,
        "write to what atomic",
    ),
    "a count on what another thread wrote": (
        STORE.replace("%r5", "%r1") + "atom.global.add.u32 %r5, [%rd1], 1;",
        32,
        "change of what another thread wrote",
    ),
    "a null pointer": ("mov.u64 %rd5, 0;\nld.global.u32 %r5, [%rd5];", 32, "address 0"),
    "a copy not waited for": (COPY + READ, 32, "nobody wrote|on its way"),
    "a copy of a newer group": (COPY + "cp.async.wait_group 1;\n" + READ, 32, "nobody wrote|on its way"),
    "a copy over what others read": (
        "st.shared.u32 [%rd4], %r1;\nbar.sync 0;\n" + NEIGHBOUR + "ld.shared.u32 %r5, [%rd5];\n" + COPY,
        32,
        "another thread read",
    ),
    "a copy left alone": (COPY, 32, "before its asynchronous copies"),
    "a barrier that some miss": (
        "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L1;\nbar.sync 0;\nbra $L2;\n$L1:\nbar.sync 0;\n$L2:",
        64,
        "cannot come",
    ),
    "a shuffle that some miss": (
        "setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $L1;\nshfl.sync.bfly.b32 %r7|%p2, %r1, 1, 31, -1;\n$L1:\nbar.sync 0;",
        32,
        "cannot come",
    ),
    "a product that some miss": (
        "setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $L1;" + PRODUCT + "$L1:\nbar.sync 0;",
        32,
        "cannot come",
    ),
    "a product of a part of a warp": (PRODUCT, 16, "less than all of 32"),
    "a product of what it does not see": (OPERAND + "bar.sync 0;\n" + WIDE + WAIT, 128, "without making it visible"),
    "a product without a barrier": (OPERAND + VISIBLE + WIDE + WAIT, 128, "without a barrier"),
    "a product not waited for": (OPERAND + VISIBLE + "bar.sync 0;\n" + WIDE, 128, "before its products"),
    "a product without a fence": (
        OPERAND + VISIBLE + "bar.sync 0;\n" + WIDE.replace("wgmma.fence.sync.aligned;", "") + WAIT,
        128,
        "without a fence",
    ),
    "a result before the wait": (
        OPERAND + VISIBLE + "bar.sync 0;\n" + WIDE + "mov.b32 %r5, %f11;\n" + WAIT,
        128,
        "%f11 is used while a product",
    ),
    "a write under a product": (
        OPERAND + VISIBLE + "bar.sync 0;\n" + WIDE + "bar.sync 0;\n" + OPERAND + WAIT,
        128,
        "under way",
    ),
    "more threads than compiled for": ("", 512, "compiled for 256"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    body, threads, says = FAULTS[name]
    with pytest.raises(Fault, match=says):
        run(body, threads, shared=8192 if threads == 128 else 1024, words=1024)


@pytest.mark.parametrize(
    "body", ["bar.sync 1, 32;", "bar.warp.sync -1;", "mul.rz.f32 %f1, %f1, %f1;", "vote.sync.any.pred %p1, %p1, -1;"]
)
def test_what_is_not_known_is_refused(body: str) -> None:
    with pytest.raises(AssertionError, match="known"):
        run(body)


def test_blocks_run_in_any_order() -> None:
    """Each draws a number from the first word and leaves it in a word of its own."""
    body = BLOCKS_WORD + "atom.global.add.u32 %r5, [%rd1], 1;\nst.global.u32 [%rd5+4], %r5;\n"
    out = np.zeros(4, np.uint32)
    for order, expected in (("forward", [3, 0, 1, 2]), ("reverse", [3, 2, 1, 0])):
        out[:] = 0
        launch(body, out, threads=1, blocks=3, shared=0, order=order)
        assert out.tolist() == expected


# %rd5: the block's word of the output. Thread 0 of each block leaves something there and draws a number from word 9; the last
# block's threads read a block's word each.
BLOCKS_WORD = "mov.u32 %r6, %ctaid.x;\nmul.wide.u32 %rd6, %r6, 4;\nadd.s64 %rd5, %rd1, %rd6;\n"
LAST_BLOCK = (
    BLOCKS_WORD
    + """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $L1;
    add.s32 %r7, %r6, 50;
    st.global.u32 [%rd5], %r7;
    membar.gl; // release
    atom.global.add.u32 %r8, [%rd1+36], 1;
    st.shared.u32 [%rd4], %r8;
    $L1:
    bar.sync 0;
    ld.shared.u32 %r8, [1024];
    setp.ne.u32 %p2, %r8, 2;
    @%p2 bra $L2;
    membar.gl; // acquire
    setp.gt.u32 %p3, %r1, 2;
    @%p3 bra $L2;
    ld.global.u32 %r5, [%rd3];
    st.global.u32 [%rd3+64], %r5;
    $L2:
    """
)


def test_the_last_block_sees_what_the_others_left() -> None:
    for order in ("forward", "reverse"):
        out = np.zeros(64, np.uint32)
        launch(LAST_BLOCK, out, threads=32, blocks=3, shared=256, order=order)
        assert out[16:20].tolist() == [50, 51, 52, 0]


@pytest.mark.parametrize(("by_all", "by_one"), [("membar.gl;", ""), ("", "membar.gl;")])
def test_a_barrier_joins_writes_and_fences_to_the_count(by_all: str, by_one: str) -> None:
    """Thread 1 writes, thread 0 counts, and the last block's thread 0 reads: with a barrier between them, whether all fence before
    it or thread 0 after it, not else."""
    body = (
        BLOCKS_WORD
        + f"""
        setp.ne.u32 %p1, %r1, 1;
        @!%p1 st.global.u32 [%rd5], %r6;
        {by_all}
        bar.sync 0; // between them
        setp.ne.u32 %p2, %r1, 0;
        @%p2 bra $L1;
        {by_one}
        atom.global.add.u32 %r8, [%rd1+36], 1;
        setp.ne.u32 %p3, %r8, 1;
        @%p3 bra $L1;
        membar.gl;
        ld.global.u32 %r5, [%rd1];
        $L1:
        """
    )
    launch(body, np.zeros(64, np.uint32), threads=2, blocks=2, shared=0)
    with pytest.raises(Fault, match="another block wrote"):
        launch(body.replace("bar.sync 0; // between them", ""), np.zeros(64, np.uint32), threads=2, blocks=2, shared=0)


@pytest.mark.parametrize("left_out", ["membar.gl; // release", "membar.gl; // acquire", "atom", "all"])
def test_blocks_that_do_not_wait_for_each_other(left_out: str) -> None:
    body = LAST_BLOCK.replace(left_out, "")
    if left_out == "atom":
        body = LAST_BLOCK.replace("atom.global.add.u32 %r8, [%rd1+36], 1;", "mov.u32 %r8, %r6;")
    if left_out == "all":
        body = BLOCKS_WORD + "ld.global.u32 %r5, [%rd1+4];\nst.global.u32 [%rd5], %r5;\n"
    with pytest.raises(Fault, match=r"another block (wrote|read)"):
        launch(body, np.zeros(64, np.uint32), threads=32 if left_out != "all" else 1, blocks=3, shared=256)


@pytest.mark.parametrize(
    ("body", "elements", "says"),
    [
        ("ld.global.u32 %r5, [%rd3];", {"sizes": (31,)}, "outside all tensors"),
        ("ld.global.u32 %r5, [%rd3];", {"sizes": (17,), "strides": (2,)}, "no element"),
        (STORE, {"sizes": (31,)}, "outside all tensors"),
        (STORE, {"sizes": (17,), "strides": (2,)}, "no element"),
        (STORE, {"writable": False}, "asked for reading"),
        ("atom.global.add.u32 %r5, [%rd3], 1;", {"writable": False}, "asked for reading"),
    ],
)
def test_elements_of_tensors(body: str, elements: dict, says: str) -> None:
    out = np.zeros(64, np.uint32)
    launch("mov.u32 %r5, %r1;\n" + body, out, 32, 1, 0)
    with pytest.raises(Fault, match=says):
        launch("mov.u32 %r5, %r1;\n" + body, out, 32, 1, 0, **elements)


LIBM = ctypes.CDLL(None)
LIBM.fma.restype = ctypes.c_double
LIBM.fma.argtypes = [ctypes.c_double] * 3
NUMBERS = np.random.default_rng(3).standard_normal(400)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("div.s32", ([7, -7, 7, -7], [2, 2, -2, -2]), [3, -3, -3, 3]),
        ("rem.s64", ([7, -7, 7, -7], [2, 2, -2, -2]), [1, -1, 1, -1]),
        ("shl.b32", ([1, 1, 3], [31, 32, 40]), [1 << 31, 0, 0]),
        ("shr.s32", ([-8, -8, 8], [1, 40, 40]), [-4, -1, 0]),
        ("shr.u32", ([8, 8], [1, 32]), [4, 0]),
        ("mul.wide.s32", ([-5, 1 << 30], [3, 8]), [-15, 1 << 33]),
        ("mul.hi.s32", ([-5, 7, 1 << 30], [1431655766, 1431655766, 8]), [-2, 2, 2]),
        ("mul.hi.u32", ([(1 << 32) - 1, 9], [(1 << 32) - 1, 0x38E38E39]), [(1 << 32) - 2, 2]),
        ("mad.lo.s32", ([1 << 30], [4], [5]), [5]),
        ("bfi.b32", ([0xFF], [0x12345678], [8], [4]), [0x12345F78]),
        ("setp.ltu.f32", ([1.0, 3.0, np.nan], [2.0, 2.0, 2.0]), [True, False, True]),
        ("setp.ne.f32", ([1.0, 2.0, np.nan], [2.0, 2.0, 2.0]), [True, False, False]),
        ("setp.num.f64", ([1.0, np.nan], [1.0, 1.0]), [True, False]),
        ("max.f32", ([1.0, np.nan], [2.0, 2.0]), [2.0, 2.0]),
        ("cvt.rzi.s64.f64", ([2.7, -2.7, 1e300, np.nan],), [2, -2, 2**63 - 1, -(2**63)]),
        ("cvt.rni.s32.f32", ([2.5, -3.5, 1e30, np.nan],), [2, -4, 2**31 - 1, 0]),
        ("cvt.rmi.u32.f64", ([2.7, -2.7, np.nan],), [2, 0, 2**31]),
        ("cvt.rmi.f32.f32", ([2.7, -2.7, -3.0, np.inf],), [2.0, -3.0, -3.0, np.inf]),
        ("cvt.rpi.f64.f64", ([2.3, -2.7, np.inf],), [3.0, -2.0, np.inf]),
        ("cvt.rn.f32.f64", ([1 + 2.0**-30],), [1.0]),
        ("cvt.f32.f16", ([1 + 2.0**-10, 2.0**-24, np.inf],), [1 + 2.0**-10, 2.0**-24, np.inf]),
        ("cvt.sat.f32.f32", ([-1.0, 0.5, 7.0, np.nan],), [0.0, 0.5, 1.0, 0.0]),
        ("cvt.s64.s32", ([-3],), [-3]),
        # Nearest, ties away from zero; the last 13 bits are not part of the number.
        ("cvt.rna.tf32.f32", ([1 + 2.0**-11, -1 - 2.0**-11],), [0x3F802000, 0xBF802000]),
        ("cvt.rna.tf32.f32", ([np.nan, np.inf],), [0x7FFFFFFF, 0x7F801000]),
        ("fma.rm.f32", ([1.0, 1.0], [1.0, 1.0], [2.0**-30, -(2.0**-60)]), [1.0, 1 - 2.0**-24]),
        # 1 + 2^-24 + 2^-60: rounded to float64 first it would be halfway, and go down.
        ("fma.rn.f32", ([1774001 * 2.0**-30], [38737 * 2.0**-30], [1.0]), [1 + 2.0**-23]),
        ("fma.rn.f32", ([3.0], [1.0], [np.inf]), [np.inf]),
        ("fma.rn.f64", (NUMBERS, NUMBERS[::-1], -NUMBERS * NUMBERS[::-1]), None),
    ],
)
def test_arithmetic(name: str, arguments: tuple, expected: list | None) -> None:
    compute = operation(name.split("."))
    assert compute is not None
    values = [np.array(a).astype(dtype) for a, dtype in zip(arguments, compute.sources, strict=True)]
    with np.errstate(all="ignore"):
        got = compute.compute(*values).astype(compute.result, copy=False)
    if expected is None:  # rounded once, by the C library
        expected = [LIBM.fma(*numbers) for numbers in zip(*values, strict=True)]
    assert got.tolist() == np.array(expected).astype(compute.result).tolist()

"""Peak memory of a call above what was there before it."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LARGE = 64 << 10  # bytes of a block that is mapped on its own
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@contextmanager
def _every_block_on_its_own() -> Iterator[None]:
    """With glibc: large blocks are mapped and unmapped one by one, so that the resident set is what is in use.

    The heap gives back what is free, and what it does not give back is held: a block in pages that are resident already would not
    be seen. Afterwards free blocks are reused, as they are when time is measured.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        yield
        return
    libc.mallinfo2.restype = _MallocInfo
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    m_mmap_threshold, m_mmap_max = -3, -4
    libc.mallopt(m_mmap_threshold, LARGE)
    libc.mallopt(m_mmap_max, 65536)  # the default: what trains in this process may have set none
    libc.malloc_trim(0)
    held, size = [], 1 << libc.mallinfo2().fordblks.bit_length()
    while size >= LARGE:
        before = libc.mallinfo2()
        block = libc.malloc(size)
        after = libc.mallinfo2()
        if block is not None and after.fordblks < before.fordblks and after.arena == before.arena:
            held.append(block)  # it was free
            continue
        libc.free(block)
        size //= 2
    try:
        yield
    finally:
        for block in held:
            libc.free(block)
        libc.mallopt(m_mmap_threshold, 32 << 20)
        libc.malloc_trim(0)


def _restart_high_water_mark() -> int | None:
    """Bytes in use, from which the high-water mark now starts; None where the system does not let it."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status("VmRSS")


def peak_bytes(call: Callable[[], Any], device: torch.device, once: bool = False) -> int | None:
    """Bytes by which the call's peak exceeds the memory before it; None where the system does not tell.

    The call is done once before, so that what it compiles or caches does not count, unless ``once`` says that this is little
    beside the rest. On CUDA torch's allocator is asked. On Linux it is the resident set's high-water mark, reset before the call.
    """
    if not once:
        call()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with _every_block_on_its_own():
        before = _restart_high_water_mark()
        call()
        return None if before is None else max(0, _status("VmHWM") - before)


def in_a_process(module: str, *arguments: str) -> Any:
    """What ``python -m module arguments`` prints in its last line, as JSON.

    Raises:
        RuntimeError: with the last line of its errors.
    """
    call = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parent.parent
    result = subprocess.run(call, capture_output=True, text=True, cwd=root)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1])
    return json.loads(result.stdout.splitlines()[-1])

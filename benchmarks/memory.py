"""Peak memory of a call above what was there before it."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LARGE = 64 << 10  # bytes of a block that is mapped on its own
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def _every_block_on_its_own(on: bool) -> None:
    """With glibc: have large blocks mapped and unmapped one by one, and give back what the heap holds, so that the resident set is
    what is in use; or (off) have them reused, as they are when time is measured."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        m_mmap_threshold = -3
        libc.mallopt(m_mmap_threshold, LARGE if on else 32 << 20)
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
    _every_block_on_its_own(True)
    try:
        before = _restart_high_water_mark()
        call()
        return None if before is None else max(0, _status("VmHWM") - before)
    finally:
        _every_block_on_its_own(False)


def in_a_process(module: str, *arguments: str, watched: bool = False) -> Any:
    """What ``python -m module arguments`` prints in its last line, as JSON.

    Args:
        watched: for memory. With glibc, large blocks are mapped and unmapped one by one from the start: of a heap with free holes a call
            fills some, and the resident set has them from then on. It takes longer.

    Raises:
        RuntimeError: with the last line of its errors.
    """
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": str(LARGE)} if watched else {})
    call = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parent.parent
    result = subprocess.run(call, capture_output=True, text=True, cwd=root, env=environment)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1])
    return json.loads(result.stdout.splitlines()[-1])

"""Peak memory of a call above what was there before it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes by which the call's peak exceeds the memory before it; None where the system does not tell.

    On CUDA torch's allocator is asked. On Linux it is the resident set's high-water mark, reset before the call: memory
    that an earlier call left in the process' heap and this one reuses is not seen, so the first call is the one to ask.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if not _RESET.exists():
        return None
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return None
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)

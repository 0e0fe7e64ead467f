"""The device of a run, and its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from ella_cuda import build_info

CPUINFO = Path("/proc/cpuinfo")  # of Linux


def resolve_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU where there is one that this build has kernels for, else the CPU.

    Raises:
        ValueError: not the name of a CPU or CUDA device.
        RuntimeError: a CUDA device where torch finds none, or where ella_cuda was built without CUDA.
    """
    built = bool(build_info()["cuda"])
    if name == "auto":
        return torch.device("cuda" if built and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:<index>, got {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:<index>, got {name!r}.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"device {name}: torch {torch.__version__} finds no CUDA device; use cpu.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {name}: there are only {torch.cuda.device_count()} CUDA devices.")
        if not built:
            raise RuntimeError(
                f"device {name}: ella_cuda was built without CUDA; install it where nvcc is found (ELLA_CUDA=1 pip "
                f"install .)."
            )
    return device


def device_of_process(device: torch.device) -> torch.device:
    """Of several processes on a machine that ``torchrun`` started, each has a GPU of its own, that of its local rank; else the device."""
    local = os.environ.get("LOCAL_RANK")
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if device.type != "cuda" or device.index is not None or local is None or not together:
        return device
    count = torch.cuda.device_count()
    if int(local) >= count:
        raise ValueError(
            f"device {device}: the process of local rank {local} needs a GPU of its own, and there are {count}; start with "
            f"--nproc-per-node {count}."
        )
    found = torch.device("cuda", int(local))
    torch.cuda.set_device(found)
    return found


def device_name(device: torch.device) -> str:
    """The model of the GPU or of the processor, or the processor's architecture where the system does not tell more."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    table = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    models = [line.partition(":")[2].strip() for line in table.splitlines() if line.startswith("model name")]
    return next(filter(None, (*models, platform.processor(), platform.machine())), "unknown")

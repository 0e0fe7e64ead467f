"""``ella-cuda info``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from ella_cuda import build_info
from ella_cuda.cli.common import DONE, named_device
from ella_cuda.laplace.eigenvalues import solver
from ella_cuda.reports.text import columns, counted
from ella_cuda.testing import KernelCheck, check_kernels
from ella_cuda.workers import threads_note


def add_info(commands: Any) -> None:
    """The command ``info``, among the parser's others."""
    info = commands.add_parser(
        "info",
        help="what was built, the device, and a check of every kernel",
        description="Show what was built and which device would be used, and check each kernel against its plain-torch "
        "reference there.",
    )
    info.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (auto)")
    info.set_defaults(command=_info)


def _info(args: argparse.Namespace) -> int:
    device = named_device(args.device)
    built = build_info()
    for key, value in built.items():
        print(f"{key:14}{value if value != '' else '(none: CPU only)' if key == 'cuda' else ''}")
    print(f"{'torch':14}{torch.__version__}")
    name = (
        f" ({torch.cuda.get_device_name(device)})"
        if device.type == "cuda"
        else f" ({counted(torch.get_num_threads(), 'thread')})"
    )
    print(f"{'device':14}{device}{name}")
    print(f"{'threads':14}{threads_note()}")
    if device.type == "cpu" and torch.cuda.is_available() and not built["cuda"]:
        print(
            "              torch finds a GPU, but ella_cuda was built without CUDA; install it where nvcc is found to "
            "use it"
        )
    print(f"{'eigenvalues':14}{solver(device)}")
    checks = check_kernels(device)
    print("\n" + kernel_table(checks))
    require_all(checks, device)
    return DONE


def require_all(checks: Sequence[KernelCheck], device: torch.device) -> None:
    """RuntimeError where a check failed."""
    if names := ", ".join(dict.fromkeys(c.name for c in checks if not c.ok)):
        raise RuntimeError(
            f"{names} disagree(s) with the plain-torch reference on {device}; "
            "rebuild ella_cuda (pip install --force-reinstall .)."
        )


def kernel_table(checks: Sequence[KernelCheck]) -> str:
    """The checks as text, a line each."""
    lines = [["kernel", "precision", "error", "allowed", ""]]
    for c in checks:
        dtype = str(c.dtype).removeprefix("torch.")
        lines.append([c.name, dtype, f"{c.error:.1e}", f"{c.bound:.1e}", "ok" if c.ok else "FAILED"])
        if c.failure:
            lines[-1][-1] += f": {c.failure}"
    width = max(len(line[-1]) for line in lines)
    return columns([[*line[:-1], line[-1].ljust(width)] for line in lines], left=2)

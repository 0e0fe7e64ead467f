"""``ella-cuda check``."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ella_cuda import build_info
from ella_cuda.cli.common import DONE, named_device
from ella_cuda.cli.info import require_all
from ella_cuda.reports.text import counted
from ella_cuda.testing import check_kernels

INSTRUCTIONS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON"}  # others are said as they are


def add_check(commands: Any) -> None:
    """The command ``check``, among the parser's others."""
    check = commands.add_parser(
        "check",
        help="whether everything works here, in one line",
        description="Check each kernel against its plain-torch reference and say so in one line; `ella-cuda info` shows each check.",
    )
    check.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (auto)")
    check.set_defaults(command=_check)


def _check(args: argparse.Namespace) -> int:
    device = named_device(args.device)
    built = build_info()
    checks = check_kernels(device)
    require_all(checks, device)
    cpu = str(built["cpu_kernels"])
    cuda = (
        f"{built['cuda']} on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else built["cuda"] or "none"
    )
    print(f"{counted(len(checks), 'check')} ok, CPU: {INSTRUCTIONS.get(cpu, cpu)}, CUDA: {cuda}")
    return DONE

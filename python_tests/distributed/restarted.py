"""A training that ``torchrun -m python_tests.distributed.restarted DIR`` starts: a process is killed in its first start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from python_tests.distributed.works import train_stoppably

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    how = "killed" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else ""
    found = train_stoppably(str(folder / "checkpoint.pt"), how)
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()

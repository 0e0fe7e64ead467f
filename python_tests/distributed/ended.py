"""The command as ``torchrun -m python_tests.distributed.ended train ...`` starts it, and what is left of its group at its end."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ella_cuda import cli


def threads_of_groups() -> list[str]:
    """Names of this process' threads that gloo started."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    code = cli.main(sys.argv[1:])
    # The interpreter would end while such a thread still drops its last tensors, which aborts the process now and then.
    if left := threads_of_groups():
        sys.exit(f"threads left: {left}")
    sys.exit(code)

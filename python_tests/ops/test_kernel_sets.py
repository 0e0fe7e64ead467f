"""The accuracy of ops by the vectors of each set of instructions that this processor has, of other lengths than the running ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from python_tests.ops import checks
from python_tests.ops.test_refusals import OF_OPS

TESTS = [f"{module.__file__}::{test}" for module in OF_OPS for test in getattr(module, "VECTORISED", ())]
CODE = """
import sys, ella_cuda, pytest
assert ella_cuda.build_info()["cpu_kernels"] == sys.argv[1]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", "not convolutions and not inf", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("capability", checks.OTHER_KERNEL_SETS)
def test_each_set_of_instructions(capability, beside_the_tests):
    command = [sys.executable, "-c", CODE, checks.KERNEL_SETS[capability], *TESTS]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, cwd=beside_the_tests, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr

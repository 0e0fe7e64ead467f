"""The compiled kernels as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from .device import PtxDevice


@pytest.fixture(scope="session")
def ampere(nvcc: Path) -> PtxDevice:
    """All sources as compiled for compute capability 8.0, which is what every shipped architecture runs."""
    return PtxDevice(nvcc, "80")


@pytest.fixture(scope="session")
def hopper(nvcc: Path) -> PtxDevice:
    """The Kronecker accumulations as compiled for 9.0a."""
    return PtxDevice(nvcc, "90a", ["kron_accumulate", "conv_kron_accumulate"])

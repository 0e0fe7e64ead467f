"""csrc's CUDA sources without a GPU: the simulator and nvcc as fixtures. All tests of this folder have the marker `simulator`."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import nvcc as compiler
from . import simulator as build


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nvcc: compiles csrc's CUDA sources, needs nvcc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.simulator)


@pytest.fixture(scope="session")
def simulator() -> build.Simulator:
    """All CUDA sources, unmodified, as torch.ops.ella_sim on the CPU."""
    if reason := build.unavailable():
        pytest.skip(reason)
    return build.Simulator(build.build(build.all_sources()))


@pytest.fixture(scope="session")
def nvcc() -> Path:
    """The compiler of the CUDA toolkit."""
    found, reason = compiler.find_nvcc()
    if found is None:
        pytest.skip(reason)
    return found

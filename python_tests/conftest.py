"""Fixtures of the whole suite: the same tests run on every device there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ella_cuda


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of this machine."""
    if request.param == "cuda" and not ella_cuda.build_info()["cuda"]:
        pytest.skip("this machine has a GPU, but ella_cuda was built without CUDA")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def beside_the_tests(tmp_path: Path) -> Path:
    """A working directory for a new Python process that can import ``python_tests`` but not the checkout's unbuilt package."""
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "python_tests").symlink_to(Path(__file__).parent, target_is_directory=True)
    return folder

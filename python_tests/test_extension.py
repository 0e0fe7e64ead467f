"""What a package without its compiled module says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ella_cuda import _C
from ella_cuda._extension import _advice

PACKAGE = Path(_C.__file__).parent


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A checkout's package, without a build."""
    return shutil.copytree(
        PACKAGE, tmp_path / "checkout" / "ella_cuda", ignore=shutil.ignore_patterns("_C.*", "__pycache__")
    )


def error_in(folder: Path, *path: Path) -> str:
    """What `import ella_cuda` there says, with those folders behind it on sys.path and nothing else of this package."""
    others = [p for p in sys.path if p and Path(p).resolve() != PACKAGE.parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *others])}
    command = [sys.executable, "-c", "import ella_cuda"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "ImportError" in done.stderr
    return done.stderr


def test_an_unbuilt_checkout_says_which_installed_copy_it_hides(unbuilt, tmp_path):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "ella_cuda").symlink_to(PACKAGE, target_is_directory=True)
    said = error_in(unbuilt.parent, installed)
    assert f"{unbuilt} was not built for this Python, and hides the installed {PACKAGE}" in said
    assert "another folder" in said and "build_ext --inplace" in said and "CONTRIBUTING.md" in said


def test_an_unbuilt_checkout_alone_hides_nothing(unbuilt, tmp_path):
    (tmp_path / "also" / "ella_cuda").mkdir(parents=True)  # no build either
    path = [str(unbuilt.parent), str(tmp_path / "also"), str(tmp_path / "not-there")]
    said = _advice(unbuilt, path, ImportError("circular"))
    assert "was not built" in said and "install it" in said and "hides" not in said
    assert "circular" not in said  # Python's guess, which is wrong here


def test_a_build_that_does_not_load_is_not_said_to_be_missing(unbuilt):
    (unbuilt / Path(_C.__file__).name).write_bytes(b"no library")
    said = error_in(unbuilt.parent)
    assert "built for another torch" in said and "was not built" not in said and "hides" not in said

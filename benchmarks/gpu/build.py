"""The extension for a GPU of compute capability 9.0, made where there is nvcc and carried to where there is the GPU.

What is carried is the compiled module and a note of what it was made of; the Python sources are always the checkout's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import ROOT

ARCHS, TORCH, PYTHON = "9.0a", "2.11.0", "3.12"
NEEDED = [f"torch=={TORCH}", "torchvision==0.26.0", "numpy", "tqdm", "matplotlib", "scikit-learn"]
NEEDED += ["setuptools>=77", "wheel", "ninja", "pybind11"]
SOURCES = ["csrc", "setup.py", "build_config.py", "pyproject.toml"]
NOTE = "build.json"
# Import, and ops of the three kinds, on the CPU: of the package that the path holds, not of the checkout.
CHECK = """
import ella_cuda
from ella_cuda.testing import check_kernel, kernel_cases
info = ella_cuda.build_info()
assert info["cuda"] and info["cuda_archs"] == ARCHS, info
assert ella_cuda.__file__.startswith(SITE), ella_cuda.__file__
names = {"factored_linear backward", "kron_accumulate_ blocks of 61", "kron_evidence", "polyphase_pool"}
checks = [check for case in kernel_cases() if case[0] in names for check in check_kernel(case, "cpu")]
assert len(checks) == 2 * len(names) and all(check.ok for check in checks), checks
print(info["summary"])
"""


def digest() -> str:
    """Of what is compiled."""
    found = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found.hexdigest()


def module_of(folder: Path) -> Path | None:
    """The compiled module in a folder that fits this Python."""
    return next((folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES if (folder / f"_C{suffix}").exists()), None)


def misfit(folder: Path) -> str | None:
    """Why a folder's build cannot be used here, or None; whether it loads only a process can tell."""
    try:
        note = json.loads((folder / NOTE).read_text())
    except (OSError, ValueError) as error:
        return f"{folder} holds no build: {error}"
    if module_of(folder) is None:
        return f"{folder} holds a build for Python {note.get('python')}, not for {sys.version.split()[0]}"
    return None if note.get("sources") == digest() else f"{folder} was built of other sources"


def assemble(site: Path, folder: Path) -> None:
    """A folder for the path: the checkout's package with the compiled module of another folder."""
    shutil.rmtree(site, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ella_cuda", site / "ella_cuda", ignore=ignored)
    shutil.copy(ROOT / "ella_cuda_command.py", site)
    for module in folder.glob("_C*.so"):
        shutil.copy(module, site / "ella_cuda")


def environment_of(folder: Path, python: str) -> Path:
    """The Python of an environment in that folder, which is made where there is none yet, with torch 2.11."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    there = subprocess.run(
        [inside, "-c", "import torch, sklearn, ninja; print(torch.__version__)"], capture_output=True
    )
    if not there.stdout.decode().startswith(TORCH):
        subprocess.run([inside, "-m", "pip", "install", *NEEDED], check=True)
    return inside


def compile_to(folder: Path, python: Path, archs: str = ARCHS) -> None:
    """Compile the checkout's sources and check that what comes of it loads and computes on the CPU.

    Raises:
        subprocess.CalledProcessError: it does not compile, or a check fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = digest()
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "copy"
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        for name in [*SOURCES, "ella_cuda"]:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy)
        for name in ("README.md", "LICENSE", "ella_cuda_command.py"):
            shutil.copy(ROOT / name, copy)
        path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])  # ninja lies beside Python
        env = os.environ | {"ELLA_CUDA": "1", "TORCH_CUDA_ARCH_LIST": archs, "PATH": path}
        made = Path(work) / "lib"
        command = [python, "setup.py", "build_ext", "--build-lib", made, "--build-temp", Path(work) / "temp"]
        subprocess.run(command, cwd=copy, env=env, check=True)
        for old in folder.glob("_C*.so"):
            old.unlink()
        for module in (made / "ella_cuda").glob("_C*.so"):
            shutil.copy(module, folder)
        site = Path(work) / "site"
        assemble(site, folder)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}
        check = f"ARCHS, SITE = {archs!r}, {str(site)!r}\n{CHECK}"
        subprocess.run([python, "-c", check], cwd=work, env=env, check=True)
        facts = "import sys, torch; print(sys.version.split()[0]); print(torch.__version__)"
        said = subprocess.run([python, "-c", facts], cwd=work, capture_output=True, text=True, check=True)
    version, torch = said.stdout.split()
    note: dict[str, Any] = {"sources": sources, "archs": archs, "python": version, "torch": torch}
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n")


def archs_here() -> str:
    """Of this machine's GPU, with the instructions of warpgroups."""
    import torch

    number = "{}.{}".format(*torch.cuda.get_device_capability())
    return ARCHS if number == "9.0" else number

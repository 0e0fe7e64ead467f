"""The extension for the GPU, compiled by this Python and torch where there is nvcc, to be carried to the machine with the GPU.

For compute capability 9.0a, or those that TORCH_CUDA_ARCH_LIST names. The folder has the compiled module and a note of its sources,
Python and torch; the Python sources are the checkout's.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.run import ROOT

SOURCES = ["csrc", "setup.py", "build_config.py", "pyproject.toml"]
NOTE = "build.json"
# Import, and ops of the three kinds on the CPU, by the package in SITE.
CHECK = """
import ella_cuda
from ella_cuda.testing import check_kernel, kernel_cases
info = ella_cuda.build_info()
assert info["cuda"] and ella_cuda.__file__.startswith(SITE), (info, ella_cuda.__file__)
names = {"factored_linear backward", "kron_accumulate_ blocks of 61", "kron_evidence", "polyphase_pool"}
checks = [check for case in kernel_cases() if case[0] in names for check in check_kernel(case, "cpu")]
assert len(checks) == 2 * len(names) and all(check.ok for check in checks), checks
print(info["summary"])
"""


def note() -> dict[str, str]:
    """Digest of the compiled sources, and the versions that load the module."""
    found = hashlib.sha256()
    for path in [file for name in SOURCES for file in sorted([ROOT / name, *(ROOT / name).rglob("*")])]:
        if path.is_file():
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return {"sources": found.hexdigest(), "python": platform.python_version(), "torch": version("torch")}


def misfit(folder: Path) -> str | None:
    """Why a folder's build cannot be used here, or None."""
    try:
        carried = json.loads((folder / NOTE).read_text())
    except (OSError, ValueError) as error:
        return f"{folder} holds no build: {error}"
    here = note()
    other = [f"{key} {carried.get(key)} instead of {here[key]}" for key in here if carried.get(key) != here[key]]
    return f"{folder} was built with {', '.join(other)}" if other else None


def assemble(site: Path, folder: Path) -> None:
    """A folder for the path: the checkout's package with the compiled module of another folder."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ella_cuda", site / "ella_cuda", ignore=ignored)
    shutil.copy(ROOT / "ella_cuda_command.py", site)
    for module in folder.glob("_C*.so"):
        shutil.copy(module, site / "ella_cuda")


def compile_to(folder: Path) -> None:
    """Compile the checkout's sources; import the result and run some of its ops on the CPU.

    Raises:
        subprocess.CalledProcessError: the sources do not compile, or a check fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_of = note()
    with tempfile.TemporaryDirectory() as work:
        path = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )  # ninja lies beside Python
        env = {"TORCH_CUDA_ARCH_LIST": "9.0a", **os.environ, "ELLA_CUDA": "1", "PATH": path}
        command = [
            sys.executable,
            "setup.py",
            "build_ext",
            "--build-lib",
            f"{work}/lib",
            "--build-temp",
            f"{work}/temp",
        ]
        subprocess.run(command, cwd=ROOT, env=env, check=True)
        for old in folder.glob("_C*.so"):
            old.unlink()
        for module in Path(work, "lib", "ella_cuda").glob("_C*.so"):
            shutil.copy(module, folder)
        site = Path(work) / "site"
        assemble(site, folder)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        subprocess.run([sys.executable, "-c", f"SITE = {str(site)!r}\n{CHECK}"], cwd=work, env=env, check=True)
    (folder / NOTE).write_text(json.dumps(made_of, indent=1) + "\n")

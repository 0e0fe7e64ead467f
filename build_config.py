"""What setup.py decides: with or without CUDA, for which architectures, from which sources, with which flags.

Apart from setup.py only the tests import this file; it is not part of the installed package.

One extension module has to load under every torch from 2.11 on, with or without CUDA. Hence the sources keep to torch's
stable ABI, cudart is linked statically and libtorch_cuda not at all. The toolkit, never a GPU, decides whether CUDA is
built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MINIMUM_TORCH = (2, 11)
TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"  # the stable ABI of 2.11, also under newer headers
DEFAULT_ARCHS = "8.0;9.0a;10.0+PTX"
WARPGROUP_ARCH = "9.0a"
HEADERS = {".h", ".cuh", ".inc"}
NAMED_ARCHS = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}


class BuildError(Exception):
    """The build cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler, its folder and its version ("13.0")."""

    nvcc: Path
    root: Path
    version: str


def check_platform(platform: str = sys.platform) -> None:
    """Refuses what has no compiler for the kernels."""
    if platform == "win32":
        raise BuildError(
            "Windows' own compiler lacks the vector extensions that the kernels are written in: install in WSL (wsl --install)"
        )


def cuda_request(environ: Mapping[str, str]) -> bool | None:
    """ELLA_CUDA: False (0), True (1, an nvcc is required) or None (unset or empty, CUDA if there is an nvcc)."""
    value = environ.get("ELLA_CUDA", "").strip()
    if value not in ("", "0", "1"):
        raise BuildError(f"ELLA_CUDA must be 0 (build without CUDA), 1 (fail without nvcc) or unset, got {value!r}")
    return None if value == "" else value == "1"


def nvcc_candidates(environ: Mapping[str, str], usual: Path = Path("/usr/local/cuda")) -> list[Path]:
    """The nvcc files that exist, in the order CUDA_HOME, CUDA_PATH, PATH, the usual place."""
    found = [Path(environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path:
        found.append(Path(on_path))
    found.append(usual / "bin" / "nvcc")
    return [nvcc for nvcc in dict.fromkeys(found) if nvcc.is_file()]


def probe_toolkit(nvcc: Path) -> Toolkit:
    """Asks nvcc where its toolkit is (it may be a wrapper that lies elsewhere) and what version it has."""
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=120)
        dryrun = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull],
            capture_output=True,
            text=True,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{nvcc} cannot be run ({error})") from error
    release = re.search(r"release (\d+\.\d+)", version.stdout)
    top = re.search(r"^#\$ TOP=(.*)$", dryrun.stderr, re.MULTILINE)
    if not release or not top:
        said = (version.stdout + version.stderr + dryrun.stderr).strip().splitlines()
        raise BuildError(f"{nvcc} does not answer like nvcc: {said[-1] if said else 'it printed nothing'}")
    root = Path(top.group(1).strip()).resolve()
    if not (root / "bin" / "nvcc").is_file():
        raise BuildError(f"{nvcc} names {root} as its toolkit, which holds no bin/nvcc")
    return Toolkit(nvcc, root, release.group(1))


def find_toolkit(environ: Mapping[str, str], usual: Path = Path("/usr/local/cuda")) -> tuple[Toolkit | None, str]:
    """The toolkit to build with (None: without CUDA) and the reason for that.

    An nvcc that is there and does not work is an error: the user would not expect a build without CUDA.
    """
    request = cuda_request(environ)
    if request is False:
        return None, "ELLA_CUDA=0"
    candidates = nvcc_candidates(environ, usual)
    if not candidates:
        looked = f"no nvcc in CUDA_HOME, CUDA_PATH, PATH or {usual}"
        if request:
            raise BuildError(f"ELLA_CUDA=1, but {looked}. Install a CUDA toolkit, or build without CUDA: ELLA_CUDA=0")
        return None, looked
    try:
        toolkit = probe_toolkit(candidates[0])
    except BuildError as error:
        raise BuildError(f"{error}. Repair it, set CUDA_HOME, or build without CUDA: ELLA_CUDA=0") from error
    return toolkit, f"nvcc {toolkit.version} in {toolkit.root}"


def arch_list(environ: Mapping[str, str]) -> list[str]:
    """TORCH_CUDA_ARCH_LIST (torch's numbers or names, separated by ; or spaces) or the default: ["8.0", "10.0+PTX"].

    9.0 is built as 9.0a: GPUs of compute capability 9.0 load either, and only 9.0a has products of warpgroups. No newer GPU loads 9.0a's
    PTX, so that 9.0+PTX becomes 9.0a and, as "compute_90", the PTX of 9.0.
    """
    text = environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or DEFAULT_ARCHS
    archs: list[str] = []
    for item in re.split(r"[;,\s]+", text.strip(";, ")):
        name, plus, _ = item.partition("+PTX")
        expanded = NAMED_ARCHS.get(name, item)
        if plus and name in NAMED_ARCHS and not expanded.endswith("+PTX"):
            expanded += "+PTX"
        for arch in expanded.split(";"):
            if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST: {item!r} is not an architecture. Use numbers like {DEFAULT_ARCHS!r} "
                    f"or the names {', '.join(NAMED_ARCHS)}"
                )
            with_ptx = [WARPGROUP_ARCH, "compute_90"]
            archs += {"9.0": [WARPGROUP_ARCH], "9.0+PTX": with_ptx}.get(arch, [arch])
    return [arch for arch in dict.fromkeys(archs) if f"{arch}+PTX" not in archs]


def gencode_flags(archs: list[str]) -> list[str]:
    """nvcc's flags for an arch list; +PTX adds code that newer GPUs compile when they load it, "compute_90" is that code alone.

    9.0a, and only that, has the asynchronous products of warpgroups; the kernels made of them are built where it is named, and
    launched on GPUs of compute capability 9.0.
    """
    flags = ["-DELLA_WARPGROUPS"] if any(arch.startswith(WARPGROUP_ARCH) for arch in archs) else []
    for arch in archs:
        number = arch.removesuffix("+PTX").removeprefix("compute_").replace(".", "")
        if arch.startswith("compute_"):
            flags += ["-gencode", f"arch={arch},code={arch}"]
            continue
        code = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def probe_headers(toolkit: Toolkit, torch_include: Path) -> None:
    """Compiles a file with torch's stable headers by nvcc, so that a mismatch is told in a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <torch/csrc/stable/tensor.h>\n__global__ void probe() {}\n")
        command = [toolkit.root / "bin" / "nvcc", "-std=c++17", TARGET_VERSION, "-DUSE_CUDA", f"-I{torch_include}"]
        command += ["-arch", "sm_80", "-c", source, "-o", Path(folder) / "probe.o"]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        said = (result.stderr + result.stdout).strip()
        first = next((line for line in said.splitlines() if "error" in line.lower()), said[:300])
        raise BuildError(
            f"nvcc {toolkit.version} in {toolkit.root} cannot compile a file with this torch's headers: {first}\n"
            "Use another toolkit or host compiler (CUDA_HOME, NVCC_PREPEND_FLAGS), or build without CUDA: ELLA_CUDA=0"
        )


def summary_line(toolkit: Toolkit | None, reason: str, archs: list[str], torch_version: str) -> str:
    """What is built and why, in one line."""
    kind = f"CPU and CUDA {toolkit.version} for {';'.join(archs)}" if toolkit else "CPU only"
    return f"ella_cuda: {kind} ({reason}; headers of torch {torch_version})"


def project_version(root: Path) -> str:
    """The version in pyproject.toml, its only home."""
    return re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE).group(1)


def build_info_header(version: str, toolkit: Toolkit | None, archs: list[str], torch_version: str, summary: str) -> str:
    """The header behind build_info()."""
    values = {
        "ELLA_VERSION": version,
        "ELLA_CUDA_VERSION": toolkit.version if toolkit else "",
        "ELLA_CUDA_ARCHS": ";".join(archs) if toolkit else "",
        "ELLA_TORCH_HEADERS": torch_version,
        "ELLA_BUILD_SUMMARY": summary,
    }
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in values.items()}
    return "".join(f'#define {name} "{value}"\n' for name, value in quoted.items())


def sources(root: Path, pattern: str) -> list[str]:
    """The sources under csrc that match, relative to `root`."""
    return sorted(str(path.relative_to(root)) for path in (root / "csrc").rglob(pattern))


def setup_arguments(root: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """ext_modules and cmdclass for setuptools.setup()."""
    from setuptools import Extension

    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(f"ella_cuda: building needs torch >= {'.'.join(map(str, MINIMUM_TORCH))} ({error})") from error

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's, told which toolkit to use and not to compare it with the CUDA torch was built with."""

        def build_extensions(self) -> None:
            try:
                self._configure()
            except BuildError as error:
                raise SystemExit(f"ella_cuda: {error}") from None
            super().build_extensions()
            print(self.summary, flush=True)

        def _configure(self) -> None:
            check_platform()
            version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
            if version < MINIMUM_TORCH:
                raise BuildError(f"torch >= {'.'.join(map(str, MINIMUM_TORCH))} is needed, got {torch.__version__}")
            torch_root = Path(torch.__file__).resolve().parent
            toolkit, reason = find_toolkit(environ)
            archs = arch_list(environ) if toolkit else []
            self.summary = summary_line(toolkit, reason, archs, torch.__version__)
            print(self.summary, flush=True)
            generated = Path(self.build_temp).resolve() / "generated"
            generated.mkdir(parents=True, exist_ok=True)
            header = generated / "ella_build_info.h"
            text = build_info_header(project_version(root), toolkit, archs, torch.__version__, self.summary)
            if not header.exists() or header.read_text() != text:
                header.write_text(text)

            (extension,) = self.extensions
            extension.include_dirs += [str(root / "csrc"), str(torch_root / "include"), str(generated)]
            extension.library_dirs += [str(torch_root / "lib")]
            extension.libraries += ["torch_cpu"]
            common = ["-std=c++17", TARGET_VERSION, "-O3", "-g0"]
            extension.extra_compile_args = {
                "cxx": [*common, "-Wall", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast"],
                "nvcc": [*common[:-1], "-DUSE_CUDA", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden"],
            }
            if toolkit:
                probe_headers(toolkit, torch_root / "include")
                # Neither the CUDA of this torch nor the place of a wrapper matters here.
                cpp_extension.CUDA_HOME = str(toolkit.root)
                cpp_extension._check_cuda_version = lambda *_: None
                extension.sources += sources(root, "*.cu")
                extension.extra_compile_args["nvcc"] += gencode_flags(archs)
                if environ.get("ELLA_PTXAS_VERBOSE") == "1":
                    extension.extra_compile_args["nvcc"] += ["-Xptxas", "-v"]
                extension.library_dirs += [str(toolkit.root / "lib64")]
                extension.libraries += ["cudart_static", "dl", "rt", "pthread"]
                extension.include_dirs += [str(toolkit.root / "include")]

    depends = sorted(str(path.relative_to(root)) for path in (root / "csrc").rglob("*") if path.suffix in HEADERS)
    return {
        "ext_modules": [Extension("ella_cuda._C", sources(root, "*.cpp"), language="c++", depends=depends)],
        "cmdclass": {"build_ext": BuildExtension},
    }

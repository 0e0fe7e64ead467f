"""The build: what it decides, and what the extension it made may and may not contain."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import ella_cuda
from ella_cuda import _C

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = Path(_C.__file__)


def load_build_config():
    spec = importlib.util.spec_from_file_location("build_config", ROOT / "build_config.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_config"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


config = load_build_config()


def run_python(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(EXTENSION.parents[1])}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=EXTENSION.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- the extension ----


def binary_tool(name: str, *arguments: str) -> list[str]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} (binutils) is not installed")
    command = [name, *arguments, str(EXTENSION)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def forbidden_symbols(lines: list[str]) -> list[str]:
    """Names that would tie the extension to one torch (C++ symbols) or keep it from loading without CUDA."""
    strong = [line.split()[-1].split("@")[0] for line in lines if line.split()[-2:-1] == ["U"]]
    pattern = r"_ZNK?(2at|3c10|5torch|6caffe2)|_ZT[ISV]N(2at|3c10|5torch)|cu[A-Z]|cuda|cublas|nv"
    only_in_libtorch_cuda = r"aoti_torch_(get_current_cuda_stream|create_cuda|delete_cuda|cuda_)"
    return [name for name in strong if re.match(f"{pattern}|{only_in_libtorch_cuda}", name)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_no_symbol_of_one_torch_or_of_cuda():
    lines = binary_tool("nm", "-D", "--undefined-only")
    assert any(line.split()[-1].startswith("aoti_torch_") for line in lines), "nm shows nothing of torch: wrong file?"
    assert forbidden_symbols(lines) == []


@pytest.mark.parametrize(
    "name",
    [
        "_ZN2at10parallel_forEv",
        "_ZNK3c1010TensorImpl5sizesEv",
        "_ZTIN3c105ErrorE",
        "cudaMalloc@libcudart.so.13",
        "cuLaunchKernel",
        "aoti_torch_get_current_cuda_stream",
    ],
)
def test_the_symbol_guard_notices(name: str):
    assert forbidden_symbols([f"                 U {name}"]) == [name.split("@")[0]]
    assert forbidden_symbols([f"                 w {name}"]) == []


def test_needs_no_cuda_library():
    needed = [line for line in binary_tool("readelf", "-d") if "NEEDED" in line]
    assert any("libtorch_cpu" in line for line in needed)
    assert not [line for line in needed if re.search("cuda|cublas|nvrtc|libc10|torch_python", line)]


def foreign_includes(text: str) -> list[str]:
    includes = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    torch_headers = [name for name in includes if re.match(r"(torch|ATen|c10|caffe2|aten)/", name)]
    return [name for name in torch_headers if not re.match(r"torch/(headeronly|csrc/stable)/", name)]


def test_sources_include_stable_headers_only():
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".cu", ".h", ".cuh", ".inc"}]
    assert len(sources) > 10
    assert {
        str(path.relative_to(ROOT)): found for path in sources if (found := foreign_includes(path.read_text()))
    } == {}


def test_the_include_guard_notices():
    lines = ["<torch/csrc/stable/tensor.h>", "<torch/extension.h>", "<ATen/ATen.h>", "<vector>"]
    assert foreign_includes("".join(f"# include {line}\n" for line in lines)) == ["torch/extension.h", "ATen/ATen.h"]


def test_build_info():
    info = ella_cuda.build_info()
    assert set(info) >= {"version", "cuda", "cuda_archs", "compiler", "torch_headers"}
    assert all(isinstance(value, str) for value in info.values())
    assert info["version"] == config.project_version(ROOT)
    assert bool(info["cuda"]) == bool(info["cuda_archs"])
    assert info["torch_headers"] in info["summary"]
    assert (f"CUDA {info['cuda']}" if info["cuda"] else "CPU only") in info["summary"]


def ops_of_schemas() -> list[str]:
    return re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc/schemas.cpp").read_text())


CPU_ONLY = {
    "circular_conv2d",  # on CUDA Python calls cuDNN through torch
    "circular_conv2d_scattered",
    "circular_conv2d_scattered_weight_grad",
    "circular_conv2d_weight_grad",
}


def test_every_schema_has_its_kernels():
    keys = ["CPU"] + (["CUDA"] if ella_cuda.build_info()["cuda"] else [])
    assert len(ops_of_schemas()) >= 10
    # Python's, in any build:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("ella_cuda::circular_conv2d_pool", "CUDA")
    for op in ops_of_schemas():
        for key in keys[: 1 if op in CPU_ONLY else None]:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ella_cuda::{op}", key), f"{op} has no {key} kernel"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_importing_opens_no_device():
    output = run_python(
        "import os, torch, ella_cuda\n"
        "files = [f'/proc/self/fd/{number}' for number in os.listdir('/proc/self/fd')]\n"
        "names = [os.readlink(file) for file in files if os.path.lexists(file)]\n"
        "print(torch.cuda.is_initialized(), [name for name in names if 'nvidia' in name])"
    )
    assert output.split("\n")[0] == "False []"


@pytest.mark.simulator
@pytest.mark.parametrize("compiler", ["g++", "clang++", "aarch64-linux-gnu-g++"])
def test_each_set_of_kernels_has_its_instructions(compiler):
    """And no function that the linker might take in place of another file's, on a processor that has less."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    if sys.platform != "linux":
        pytest.skip("reads assembly for Linux")
    texts = {}
    for source in (ROOT / "csrc/cpu/simd").glob("kernels_*.cpp"):
        flags = ["-std=c++17", "-O1", "-fPIC", "-fno-math-errno", "-Wall", "-Werror"]
        command = [compiler, *flags, "-I", ROOT / "csrc", "-S", "-o", "-", source]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        texts[source.stem.removeprefix("kernels_")] = result.stdout
    assert not any(re.search(r"^\s*\.weak\s", text, re.MULTILINE) for text in texts.values())
    of_arm = {name: "v31.4s" in text for name, text in texts.items()}  # of 32 registers the last
    if any(of_arm.values()):
        assert [name for name, has in of_arm.items() if has] == ["neon"]
        return
    widest = {name: ["zmm" in text, "ymm" in text] for name, text in texts.items()}
    assert widest["avx512"][0] and widest["avx2"] == [False, True]
    assert widest["baseline"] == widest["neon"] == [False, False]


# ---- what the build decides ----


def test_windows_is_told_where_to_go():
    config.check_platform("linux")
    config.check_platform("darwin")
    with pytest.raises(config.BuildError, match="WSL"):
        config.check_platform("win32")


def test_a_build_refuses_a_platform_that_will_not_do(monkeypatch):
    check = config.check_platform
    monkeypatch.setattr(config, "check_platform", lambda: check("win32"))
    command = config.setup_arguments(ROOT)["cmdclass"]["build_ext"]
    with pytest.raises(SystemExit, match=r"ella_cuda: .*WSL"):
        command.__new__(command).build_extensions()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def toolkit(root: Path, version: str = "13.0", compiles: bool = True) -> Path:
    """A folder that looks like a toolkit; its nvcc answers the questions of the build."""
    return script(
        root / "bin" / "nvcc",
        f'case "$1" in\n--version) echo "Cuda compilation tools, release {version}, V{version}.88";;\n'
        f'--dryrun) echo "#$ _SPACE_= " >&2; echo "#$ TOP={root}/bin/.." >&2;;\n'
        f"*) {'exit 0' if compiles else 'echo probe.cu: error: unsupported GNU version! >&2; exit 1'};;\nesac\n",
    )


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    return tmp_path / "nowhere"


def test_nvcc_behind_a_wrapper_tells_its_toolkit(tmp_path: Path, nowhere: Path):
    real = toolkit(tmp_path / "opt" / "cuda-13.0")
    wrapper = script(tmp_path / "bin" / "nvcc", f'exec {real} "$@"\n')
    found, reason = config.find_toolkit({"PATH": str(wrapper.parent)}, nowhere)
    assert found == config.Toolkit(wrapper, real.parents[1], "13.0")
    assert "13.0" in reason and str(real.parents[1]) in reason


def test_order_of_the_places(tmp_path: Path):
    nvccs = {name: toolkit(tmp_path / name) for name in ("home", "path", "bin", "usual")}
    environ = {"CUDA_HOME": "home", "CUDA_PATH": "path", "PATH": "bin/bin"}
    environ = {name: str(tmp_path / value) for name, value in environ.items()}
    assert config.nvcc_candidates(environ, tmp_path / "usual") == list(nvccs.values())
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        del environ[name]
        nvccs.pop(next(iter(nvccs)))
        assert config.find_toolkit(environ, tmp_path / "usual")[0].nvcc == next(iter(nvccs.values()))


def test_without_nvcc(nowhere: Path):
    found, reason = config.find_toolkit({"PATH": ""}, nowhere)
    assert found is None and "no nvcc" in reason
    with pytest.raises(config.BuildError, match=r"ELLA_CUDA=1, but no nvcc.*ELLA_CUDA=0"):
        config.find_toolkit({"PATH": "", "ELLA_CUDA": "1"}, nowhere)


def test_ella_cuda_0_ignores_nvcc(tmp_path: Path, nowhere: Path):
    environ = {"CUDA_HOME": str(toolkit(tmp_path).parents[1])}
    assert config.find_toolkit({**environ, "ELLA_CUDA": "0"}, nowhere) == (None, "ELLA_CUDA=0")
    for value in ("1", ""):
        assert config.find_toolkit({**environ, "ELLA_CUDA": value}, nowhere)[0].version == "13.0"
    with pytest.raises(config.BuildError, match=r"must be 0 .* got 'yes'"):
        config.find_toolkit({**environ, "ELLA_CUDA": "yes"}, nowhere)


@pytest.mark.parametrize(
    "text", ["exit 1\n", "echo not a compiler\n", "echo release 13.0; echo '#$ TOP=/nonexistent' >&2\n"]
)
def test_a_broken_nvcc_is_an_error(tmp_path: Path, nowhere: Path, text: str):
    script(tmp_path / "bin" / "nvcc", text)
    with pytest.raises(config.BuildError, match=r"nvcc.*ELLA_CUDA=0"):
        config.find_toolkit({"CUDA_HOME": str(tmp_path)}, nowhere)


def test_headers_that_nvcc_cannot_compile(tmp_path: Path):
    good, bad = (config.probe_toolkit(toolkit(tmp_path / name, compiles=name == "good")) for name in ("good", "bad"))
    config.probe_headers(good, tmp_path)
    with pytest.raises(config.BuildError, match=r"cannot compile.*unsupported GNU version(.|\n)*ELLA_CUDA=0"):
        config.probe_headers(bad, tmp_path)


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        (None, ["8.0", "9.0a", "10.0+PTX"]),
        ("", ["8.0", "9.0a", "10.0+PTX"]),
        ("8.6", ["8.6"]),
        ("8.0;8.0 8.0+PTX", ["8.0+PTX"]),
        ("8.0 9.0;8.0", ["8.0", "9.0a"]),
        ("9.0a;12.0 9.0", ["9.0a", "12.0"]),
        ("9.0 9.0a+PTX", ["9.0a+PTX"]),
        ("9.0+PTX", ["9.0a", "compute_90"]),
        ("Ampere;Hopper", ["8.0", "8.6+PTX", "9.0a", "compute_90"]),
    ],
)
def test_arch_list(text: str | None, archs: list[str]):
    assert config.arch_list({} if text is None else {"TORCH_CUDA_ARCH_LIST": text}) == archs


@pytest.mark.parametrize("text", ["sm_90", "9", "8.0;Zen", "9.0+ptx"])
def test_arch_list_refuses(text: str):
    with pytest.raises(config.BuildError, match="TORCH_CUDA_ARCH_LIST"):
        config.arch_list({"TORCH_CUDA_ARCH_LIST": text})


def test_gencode_flags():
    flags = config.gencode_flags(["8.0", "10.0+PTX"])
    assert flags[1::2] == ["arch=compute_80,code=sm_80", "arch=compute_100,code=[sm_100,compute_100]"]
    assert set(flags[::2]) == {"-gencode"}


def test_kernels_of_warpgroups_are_built_wherever_their_architecture_is():
    """In a build that names none too; the code of newer GPUs comes from the PTX of 9.0, since they load none of 9.0a."""
    cases = [(None, True), ("9.0", True), ("8.0;9.0a", True), ("9.0a+PTX", True), ("8.0;8.6", False), ("10.0a", False)]
    for text, built in cases:
        archs = config.arch_list({} if text is None else {"TORCH_CUDA_ARCH_LIST": text})
        flags = config.gencode_flags(archs)
        assert ("-DELLA_WARPGROUPS" in flags) == built
        assert any("sm_90a" in flag for flag in flags) == built
    flags = config.gencode_flags(config.arch_list({"TORCH_CUDA_ARCH_LIST": "9.0+PTX"}))
    assert flags[2::2] == ["arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]


@pytest.mark.parametrize("archs", [None, "9.0+PTX"])
def test_what_a_build_says_it_has_is_what_nvcc_makes(archs: str | None, tmp_path: Path):
    """The architectures of build_info() are those of a file that nvcc compiled with the flags of the build."""
    kit, reason = config.find_toolkit({k: v for k, v in os.environ.items() if k != "ELLA_CUDA"})
    if kit is None:
        pytest.skip(reason)
    listed = config.arch_list({} if archs is None else {"TORCH_CUDA_ARCH_LIST": archs})
    source = tmp_path / "a.cu"
    source.write_text("__global__ void kernel() {}\n")
    command = [kit.root / "bin" / "nvcc", *config.gencode_flags(listed), "-fatbin", source, "-o", tmp_path / "a.fatbin"]
    done = subprocess.run([*command, "--verbose"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    images = re.findall(r"kind=(elf|ptx),sm=(\w+)", done.stderr)
    made = {("sm_" if kind == "elf" else "compute_") + number for kind, number in images}
    said = set()
    for arch in listed:
        number = arch.removesuffix("+PTX").replace(".", "")
        said |= {arch} if arch.startswith("compute_") else {f"sm_{number}"}
        said |= {f"compute_{number}"} if arch.endswith("+PTX") else set()
    assert made == said


def test_summary_and_header(tmp_path: Path):
    kit = config.Toolkit(tmp_path / "nvcc", tmp_path, "13.0")
    summary = config.summary_line(kit, 'nvcc in "here"', ["8.0"], "2.13.0")
    assert "\n" not in summary and "CUDA 13.0 for 8.0" in summary and "2.13.0" in summary
    header = config.build_info_header("0.1.0", kit, ["8.0"], "2.13.0", summary)
    assert '#define ELLA_CUDA_ARCHS "8.0"' in header and r"\"here\"" in header
    without = config.build_info_header(
        "0.1.0", None, [], "2.13.0", config.summary_line(None, "ELLA_CUDA=0", [], "2.13.0")
    )
    assert '#define ELLA_CUDA_VERSION ""' in without and "CPU only (ELLA_CUDA=0" in without


def test_extension_sources():
    (extension,) = config.setup_arguments(ROOT)["ext_modules"]
    assert set(extension.sources) >= {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")}
    assert all((ROOT / source).is_file() for source in extension.sources)


# ---- packages ----


@pytest.mark.slow
def test_sdist_holds_all_that_a_build_and_its_tests_need(tmp_path: Path):
    pytest.importorskip("setuptools")
    code = f"import os; os.chdir({str(ROOT)!r})\n"
    code += f"from setuptools import build_meta\nbuild_meta.build_sdist({str(tmp_path)!r})"
    egg_info = ROOT / "ella_cuda.egg-info"
    existed = egg_info.exists()
    run_python(code)
    if not existed:
        shutil.rmtree(egg_info, ignore_errors=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "ella_cuda").rglob("*.py")}
    needed |= {
        "build_config.py",
        "setup.py",
        "pyproject.toml",
        "ella_cuda/py.typed",
        "CONTRIBUTING.md",
        "docker/Dockerfile",
    }
    for folder in ("python_tests", "benchmarks"):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        needed |= {str(path.relative_to(ROOT)) for path in files}
    assert needed - names == set()
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_only_the_package_is_installed():
    setuptools = pytest.importorskip("setuptools")
    packages = setuptools.find_namespace_packages(str(ROOT), include=["ella_cuda*"])
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in (ROOT / "ella_cuda").rglob("*.py")}
    assert folders <= set(packages)
    # pyproject.toml looks for packages with an __init__.py: every folder of the package needs one.
    assert folders <= set(setuptools.find_packages(str(ROOT), include=["ella_cuda*"]))
    assert not [name for name in packages if "test" in name]

"""Builds csrc's CUDA sources with a host compiler and cusim.h into a torch library for the CPU, and loads it.

The sources are compiled as they are, one object per source, and kept in a cache folder under a hash of everything that
goes into them, so that a second run only loads. Set ELLA_SIM_CACHE to choose the folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
HEADERS = Path(__file__).resolve().parent / "cusim"
TORCH = Path(torch.__file__).resolve().parent
# Limits of the sources, so small that shapes of these tests cross them.
LIMITS = {
    "INDEX_32": 3000,  # above them kernels count places in 63 bits
    "PADDED_ELEMENTS": 2000,  # of the images with their border at a time
    "ELEMENTS": 8000,  # of other images at a time, or one of them with its border
    "WIDENED_ELEMENTS": 300,  # of 16-bit numbers that are copied to float32 at a time
    "PART_BYTES": 1 << 19,  # of sums of rows that are shared out, if a split has no more
    "LAG_ELEMENTS": 20000,  # of sums by lags in the workspace, if blocks are enough then
    "MATRIX": 1000,  # values of a matrix of Gaussians at a time
    "INTERMEDIATE": 3000,  # numbers of F-FC's intermediate at a time
    "TICKET_ROWS": 3,  # of tickets, beside five orders of kernels
    "ACTIVATIONS": 6000,  # of a bank's activations, or slopes, at a time
}
FLAGS = [
    "-std=c++17",
    "-g0",
    "-fPIC",
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to change stacks, which is what fibers do
    "-w",  # a build warns about these sources already
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
    "-DELLA_LIBRARY=ella_sim",
    "-DELLA_DISPATCH_KEY=CPU",
    *(f"-DELLA_MAX_{name}={number}" for name, number in LIMITS.items()),
]
ORDERS = {"forward": 0, "reverse": 1, "random": 2, "none": 3}


def compiler() -> str | None:
    """The host compiler that torch's extensions use, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def unavailable() -> str | None:
    """Why the simulator cannot be built here, if it cannot: its fibers and its shared object are Linux's."""
    if sys.platform != "linux":
        return f"the simulator is for Linux, this is {sys.platform}"
    return None if compiler() else "no C++ compiler (CXX or g++) to build the simulator with"


@functools.cache
def is_clang(cxx: str) -> bool:
    """Whether a compiler is clang, by whatever name."""
    return "clang" in subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout


def jobs() -> int:
    """How many compilers may run at once."""
    return max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))


def cache_folder() -> Path:
    """Where objects and libraries are kept between runs."""
    folder = os.environ.get("ELLA_SIM_CACHE") or f"{tempfile.gettempdir()}/ella-cuda-sim-{os.getuid()}"
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def digest(paths: Iterable[Path], *texts: str) -> str:
    """A hash of files and texts."""
    hasher = hashlib.sha256("\0".join(texts).encode())
    for path in sorted(paths):
        hasher.update(f"\0{path.name}\0".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:24]


@contextmanager
def one_maker(target: Path) -> Iterator[None]:
    """Whoever else wants to make this file, thread or process, waits outside of the block: look whether it is there inside."""
    import fcntl  # which Windows lacks, where this module is imported too

    lock = target.with_name(f"{target.name}.lock")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # whoever waits for it finds the file made


def run(command: list[str | Path], target: Path) -> None:
    """Runs a compiler whose last argument names its output, which appears at `target` only once it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = Path(folder) / target.name
        result = subprocess.run([*command, partial], capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{result.stderr}")
        os.replace(partial, target)


def source_of(name: str, csrc: Path = SOURCES) -> Path:
    """The CUDA source <name>.cu."""
    (source,) = csrc.glob(f"*/cuda/{name}.cu")
    return source


def headers_of(csrc: Path) -> list[Path]:
    """The headers that a CUDA source may include."""
    return sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cuh"} and "cpu" not in p.relative_to(csrc).parts)


def compile_object(source: Path, csrc: Path, optimisation: str) -> Path:
    """The object file of one source of the tree `csrc`, from the cache if it is there."""
    cxx = str(compiler())
    flags = [optimisation, *FLAGS]
    if not is_clang(cxx):  # which has no such symbols, nor the flag
        flags.append("-fno-gnu-unique")
    headers = [*headers_of(csrc), *HEADERS.glob("*.h")]
    target = cache_folder() / f"{source.stem}-{digest([source, *headers], torch.__version__, cxx, *flags)}.o"
    with one_maker(target):
        if not target.exists():
            includes = ["-include", HEADERS / "cusim.h", "-I", csrc, "-isystem", TORCH / "include"]
            run([cxx, *flags, *includes, "-x", "c++", "-c", source, "-o"], target)
    return target


def build(names: Iterable[str], csrc: Path = SOURCES, optimisation: str = "-O1") -> Path:
    """A shared object with the schemas and the CUDA implementations <family>/cuda/<name>.cu, as torch.ops.ella_sim."""
    sources = [csrc / "schemas.cpp", *(source_of(name, csrc) for name in names)]
    with ThreadPoolExecutor(jobs()) as pool:
        objects = list(pool.map(lambda source: compile_object(source, csrc, optimisation), sources))
    target = cache_folder() / f"libella_sim-{digest(objects, torch.__version__)}.so"
    with one_maker(target):
        if not target.exists():
            lib = TORCH / "lib"
            libraries = ["-L", lib, f"-Wl,-rpath,{lib}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
            run([str(compiler()), "-shared", *objects, *libraries, "-o"], target)
    return target


@dataclass(frozen=True, order=True)
class Launch:
    """How a kernel was launched: its mangled name, the threads of a block, the bytes of its dynamic shared memory."""

    kernel: str
    threads: int
    shared: int


class Simulator:
    """The loaded library: its ops, the order in which threads and blocks run, the launches it has seen."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self.ops = torch.ops.ella_sim
        self._path, self._library = library, ctypes.CDLL(str(library))
        self._set = self._library.cusim_set_schedule
        self.schedule()

    def counts(self) -> tuple[int, int, int]:
        """Launches since the library was loaded, of one kernel as often as it was launched, their blocks, and clearings of memory."""
        counts = self._library.cusim_counts
        counts.restype = ctypes.POINTER(ctypes.c_longlong * 3)
        return tuple(counts().contents)

    def launch_count(self) -> int:
        return self.counts()[0]

    def launches(self) -> list[Launch]:
        """The different launches since the library was loaded or since the last call."""
        listed = subprocess.run(["nm", self._path], capture_output=True, text=True, check=True).stdout
        symbols = {int(line.split()[0], 16): line.split()[2] for line in listed.splitlines() if line[:1].isdigit()}
        offsets = {name: offset for offset, name in symbols.items()}
        base = ctypes.cast(self._set, ctypes.c_void_p).value - offsets["cusim_set_schedule"]
        take = self._library.cusim_take_launch
        take.restype = ctypes.c_bool
        kernel, threads, shared = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_size_t()
        seen = []
        while take(ctypes.byref(kernel), ctypes.byref(threads), ctypes.byref(shared)):
            seen.append(Launch(symbols[kernel.value - base], threads.value, shared.value))
        return sorted(seen)

    def schedule(
        self,
        threads: str = "forward",
        blocks: str = "forward",
        multiprocessors: int = 2,
        seed: int = 1,
        warpgroups: bool = False,
        runs: bool = True,
    ) -> None:
        """Orders "forward", "reverse" or "random"; `multiprocessors` and `warpgroups` are what launchers are told about the
        device: how many, and asynchronous products of compute capability 9.0 or none. Unless `runs` launches are counted alone."""
        self._set(ORDERS[threads], ORDERS[blocks], multiprocessors, seed, warpgroups, runs)

    @contextmanager
    def scheduled(self, **schedule: str | int) -> Iterator[None]:
        """`schedule` for the duration of a block."""
        self.schedule(**schedule)
        try:
            yield
        finally:
            self.schedule()

    @contextmanager
    def on_cpu_tensors(self) -> Iterator[None]:
        """For the duration of a block ops of ``torch.ops.ella_cuda`` that have a CUDA kernel run it, on tensors of the CPU."""
        library = torch.library.Library("ella_cuda", "IMPL")
        prefix = "ella_sim::"
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
            if name.startswith(prefix):
                op = getattr(self.ops, name.removeprefix(prefix)).default
                library.impl(name.removeprefix(prefix), op, "CPU", allow_override=True)
        try:
            yield
        finally:
            library._destroy()

    @contextmanager
    def path(self, **choices: str | int) -> Iterator[None]:
        """`ella_cuda.cuda_path.cuda_path` for this library, for the duration of a block; none is fixed outside of it."""
        text = ",".join(f"{key}={value}" for key, value in choices.items())
        set_path = self._library.cusim_set_path
        set_path.argtypes, set_path.restype = [ctypes.c_char_p], ctypes.c_bool
        assert set_path(text.encode()), text
        try:
            yield
        finally:
            set_path(b"")


def all_sources() -> list[str]:
    """The names of the CUDA sources."""
    return sorted(path.stem for path in SOURCES.glob("*/cuda/*.cu"))

"""csrc's CUDA sources as nvcc compiles it, host code and PTX, as a torch library for the CPU whose launches run the PTX in machine.py."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import nvcc as compiler
from .. import simulator as build
from .global_memory import Elements
from .machine import Program
from .parse import parse
from .traffic import Traffic

RUNTIME = Path(__file__).with_name("runtime.cpp")
BY_CACHE = "-DELLA_LARGEST_INTERMEDIATE=0"  # F-FC's intermediate is stored where the cache that a test says can hold it, and only there
WRAPPED = [
    "dlopen",
    "dlsym",
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "aoti_torch_get_data_ptr",
    "torch_get_mutable_data_ptr",
    "torch_get_const_data_ptr",
]


def compile_source(nvcc: Path, name: str, arch: str, library: str, small: bool) -> tuple[Path, Path]:
    """Object and PTX of csrc/<family>/cuda/<name>.cu for one architecture ("80", "90a"), from the cache if they are there."""
    source, headers = build.source_of(name), build.headers_of(build.SOURCES)
    options = [
        *compiler.language_flags("-O0"),
        f"-gencode=arch=compute_{arch},code=compute_{arch}",
        "-Xcompiler",
        "-fPIC",
    ]
    options += [f"-DELLA_LIBRARY={library}", "-DELLA_DISPATCH_KEY=CPU"]
    options += [build.FEW_PLACES, BY_CACHE] if small else []
    options += ["-DELLA_WARPGROUPS"] if arch == "90a" else []
    key = build.digest([source, *headers], str(nvcc.resolve()), build.torch.__version__, *options)
    made, ptx = (build.cache_folder() / f"{name}-{key}.{kind}" for kind in ("o", "ptx"))
    with build.one_maker(made):
        if not (made.exists() and ptx.exists()):
            folder = build.cache_folder() / f"{name}-{key}-{os.getpid()}"
            folder.mkdir()
            command = [nvcc, *options, "-keep", "-keep-dir", folder, "-c", source, "-o", folder / "made.o"]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, f"nvcc cannot compile {name}.cu:\n{result.stderr}"
            os.replace(folder / f"{name}.ptx", ptx)
            os.replace(folder / "made.o", made)
            for rest in folder.iterdir():
                rest.unlink()
            folder.rmdir()
    return made, ptx


class Counted(NamedTuple):
    """A launch, of which `ran` blocks were run, and what they did."""

    kernel: str
    blocks: int
    threads: int
    ran: int
    traffic: Traffic


class Ops:
    """A library's ops, with something done before each call."""

    def __init__(self, ops: Any, before: Callable[[], None]) -> None:
        self._ops, self._before = ops, before

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def call(*arguments: Any) -> Any:
            self._before()
            return op(*arguments)

        return call


class PtxDevice:
    """The loaded library: its ops on tensors of the CPU, and what was launched.

    `arch` is what the sources (all, or those named) are compiled for; `small`: with limits at which small shapes already take the
    ways of large ones. Uninitialised tensors are filled with NaN while an op runs.
    """

    def __init__(self, nvcc: Path, arch: str, names: Iterable[str] | None = None, small: bool = True) -> None:
        library, names = f"ella_ptx_{arch}", names or build.all_sources()
        with ThreadPoolExecutor(build.jobs()) as pool:
            compiled = list(pool.map(lambda name: compile_source(nvcc, name, arch, library, small), names))
        self._path = self._link(nvcc, library, [made for made, _ in compiled])
        torch.ops.load_library(str(self._path))
        self._tensors: list[Elements] = []  # of the op that runs: those whose addresses its host code asked for
        self.ops = Ops(getattr(torch.ops, library), self._tensors.clear)
        self.kernels = {name: kernel for _, ptx in compiled for name, kernel in parse(ptx.read_text()).items()}
        self._programs: dict[str, Program] = {}
        self.launched: set[str] = set()
        self.stopped_by: Exception | None = None
        self._counted: list[Counted] | None = None
        self._max_blocks = 0
        numbers, pointers = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_void_p)
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, pointers)(
                self._launch
            ),
            ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int64, numbers, numbers, ctypes.c_int64, ctypes.c_bool)(
                self._address_asked
            ),
        )
        loaded = ctypes.CDLL(str(self._path))
        self._attach, self._set_path = loaded.ella_ptx_attach, loaded.ella_ptx_set_path
        self._capability = int(arch.rstrip("a"))
        self.schedule()

    def _link(self, nvcc: Path, library: str, objects: list[Path]) -> Path:
        headers = [*(build.SOURCES / "common").glob("*.h"), build.SOURCES / "schemas.cpp", RUNTIME]
        key = build.digest([*objects, *headers], str(nvcc.resolve()), build.torch.__version__, library)
        target = build.cache_folder() / f"lib{library}-{key}.so"
        with build.one_maker(target):
            if not target.exists():
                flags = [
                    "-std=c++17",
                    "-O1",
                    "-fPIC",
                    "-w",
                    compiler.build_config().TARGET_VERSION,
                    f"-DELLA_LIBRARY={library}",
                ]
                includes = ["-I", build.SOURCES, "-I", build.TORCH / "include", "-I", nvcc.parents[1] / "include"]
                libraries = ["-L", build.TORCH / "lib", f"-Wl,-rpath,{build.TORCH / 'lib'}", "-Wl,--no-as-needed"]
                libraries += [
                    "-ltorch",
                    "-ltorch_cpu",
                    "-lc10",
                    *(f"-Wl,--wrap={name}" for name in WRAPPED),
                    "-Wl,-Bsymbolic",
                ]
                sources = [build.SOURCES / "schemas.cpp", RUNTIME]
                build.run(
                    [str(build.compiler()), *flags, *includes, "-shared", *sources, *objects, *libraries, "-o"], target
                )
        return target

    def schedule(self, blocks: str = "forward", multiprocessors: int = 2, cache_bytes: int = 8192) -> None:
        """The order of blocks ("forward", "reverse", "random") and what launchers are told about the device."""
        self._order = blocks
        self._attach(*self._callbacks, multiprocessors, cache_bytes, self._capability)

    @contextmanager
    def scheduled(self, blocks: str = "forward", **device: int) -> Iterator[None]:
        """`schedule` for the duration of a block; what an op leaves uninitialised is NaN there. Faults are raised as such."""
        self.schedule(blocks, **device)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        self.stopped_by = None
        try:
            yield
        except RuntimeError:
            if self.stopped_by:
                raise self.stopped_by from None
            raise
        finally:
            torch.use_deterministic_algorithms(before)
            self.schedule()

    @contextmanager
    def path(self, **choices: str | int) -> Iterator[None]:
        """`ella_cuda.cuda_path.cuda_path` for this library, for the duration of a block; none is fixed outside of it."""
        self._set_path(",".join(f"{key}={value}" for key, value in choices.items()).encode())
        try:
            yield
        finally:
            self._set_path(b"")

    @contextmanager
    def counting(self, max_blocks: int) -> Iterator[list[Counted]]:
        """The launches of a block of code, of each only so many thread blocks, evenly spaced: what is computed is incomplete."""
        self._counted, self._max_blocks = [], max_blocks
        try:
            yield self._counted
        finally:
            self._counted = None

    def _address_asked(
        self, address: int, axes: int, sizes: ctypes.Array, strides: ctypes.Array, item: int, writable: bool
    ) -> None:
        self._tensors.append(Elements(address, tuple(sizes[:axes]), tuple(strides[:axes]), item, writable))

    def _launch(self, name: bytes, blocks: int, threads: int, shared_bytes: int, arguments: ctypes.Array) -> bool:
        kernel = self.kernels[name.decode()]
        self.launched.add(kernel.name)
        values = [ctypes.string_at(arguments[i], size) for i, size in enumerate(kernel.parameters.values())]
        try:
            if kernel.name not in self._programs:
                self._programs[kernel.name] = Program(kernel)
            order, traffic = self._order, None
            if self._counted is not None:
                order = np.unique(
                    ((np.arange(self._max_blocks) + 0.5) * blocks / self._max_blocks).astype(int)
                ).tolist()
                traffic = Traffic()
                self._counted.append(Counted(kernel.name, blocks, threads, len(order), traffic))
            self._programs[kernel.name].run(blocks, threads, shared_bytes, values, self._tensors, order, traffic)
        except Exception as error:  # raised again where the op was called: an exception cannot cross the library
            self.stopped_by = error
            return False
        return True

"""Eigenvalues of many symmetric matrices by one call of cuSOLVER, in the library that torch has loaded.

Before version 2.12 torch makes a call for each matrix of more than 32 rows on CUDA, which takes up to a hundred times as long
(pytorch issue 175585). Nothing is linked: the routine is looked for when it is first wanted.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

BATCHED_IN_TORCH = (2, 12)
MAX_BLOCKS = 1 << 14  # of a call: from 2^15 or 2^16 on cuSOLVER refuses it (mjlab pull request 732)
MAX_WORKSPACE = 2 << 30  # bytes

# Of the headers library_types.h, cublas_api.h and cusolver_common.h.
R_64F, UPPER, NO_VECTORS = 1, 1, 0
STATUS = (
    "SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "ARCH_MISMATCH", "MAPPING_ERROR", "EXECUTION_FAILED",
    "INTERNAL_ERROR", "MATRIX_TYPE_NOT_SUPPORTED", "NOT_SUPPORTED",
)  # fmt: skip

_pointer, _enum, _count, _bytes = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_problem = (_pointer, _pointer, _enum, _enum, _count, _enum, _pointer, _count, _enum, _pointer, _enum)
ROUTINES: dict[str, tuple[type, ...]] = {
    "cusolverDnCreate": (_pointer,),
    "cusolverDnSetStream": (_pointer, _pointer),
    "cusolverDnCreateParams": (_pointer,),
    "cusolverDnXsyevBatched_bufferSize": (*_problem, _pointer, _pointer, _count),
    "cusolverDnXsyevBatched": (*_problem, _pointer, _bytes, _pointer, _bytes, _pointer, _count),
}


class CusolverError(RuntimeError):
    """A call of cuSOLVER returned a status other than success."""


class BatchedEigenvalues:
    """The routine ``cusolverDnXsyevBatched`` of one library.

    Args:
        library: the file, of cuSOLVER 11.7.1 (CUDA 12.6 update 2) or newer.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it has no such routine.

    Source: NVIDIA, cuSOLVER API reference, cusolverDnXsyevBatched.
    """

    def __init__(self, library: str) -> None:
        loaded = ctypes.CDLL(library)
        self._routines = {name: getattr(loaded, name) for name in ROUTINES}
        for name, arguments in ROUTINES.items():
            self._routines[name].argtypes, self._routines[name].restype = arguments, ctypes.c_int
        self._opened: dict[torch.device, tuple[ctypes.c_void_p, ctypes.c_void_p]] = {}
        self._lock = threading.Lock()  # a handle is one thread's at a time

    def __call__(self, blocks: Tensor) -> Tensor:
        """Ascending eigenvalues ``(G, d)`` of symmetric blocks ``(G, d, d)``, of which the lower triangles are read; contiguous float64,
        overwritten. A block's that did not converge are nan.

        Raises:
            CusolverError: cuSOLVER failed.
        """
        if not blocks.numel():
            return blocks.new_empty(blocks.shape[:2])
        with self._lock, _current(blocks.device):
            return torch.cat([self._call(part) for part in blocks.split(MAX_BLOCKS)])

    def _call(self, blocks: Tensor) -> Tensor:
        (groups, size, _), device = blocks.shape, blocks.device
        handle, parameters = self._open(device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        self._run("cusolverDnSetStream", handle, stream)
        values = blocks.new_empty(groups, size)
        # Lower triangles by rows are upper ones by columns.
        matrices, results = (R_64F, blocks.data_ptr(), size), (R_64F, values.data_ptr(), R_64F)
        problem = (handle, parameters, NO_VECTORS, UPPER, size, *matrices, *results)
        on_device, on_host = ctypes.c_size_t(), ctypes.c_size_t()
        self._run("cusolverDnXsyevBatched_bufferSize", *problem, ctypes.byref(on_device), ctypes.byref(on_host), groups)
        if on_device.value > MAX_WORKSPACE and groups > 1:
            return torch.cat([self._call(part) for part in blocks.split(-(-groups // 2))])
        room = torch.empty(on_device.value, dtype=torch.uint8, device=device)
        host_room = torch.empty(on_host.value, dtype=torch.uint8)
        failed = torch.empty(groups, dtype=torch.int32, device=device)
        rooms = (room.data_ptr(), on_device.value, host_room.data_ptr(), on_host.value)
        self._run("cusolverDnXsyevBatched", *problem, *rooms, failed.data_ptr(), groups)
        if failed.any():  # waits for the call, until when the rooms have to be there
            values[failed != 0] = math.nan
        return values

    def _open(self, device: torch.device) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """A handle for the device and default parameters."""
        if device not in self._opened:
            handle, parameters = ctypes.c_void_p(), ctypes.c_void_p()
            self._run("cusolverDnCreate", ctypes.byref(handle))
            self._run("cusolverDnCreateParams", ctypes.byref(parameters))
            self._opened[device] = handle, parameters
        return self._opened[device]

    def _run(self, name: str, *arguments: object) -> None:
        status = self._routines[name](*arguments)
        if status:
            said = STATUS[status] if status < len(STATUS) else "unknown"
            raise CusolverError(f"cuSOLVER: {name} failed with status {status} ({said}).")


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def batched_eigenvalues(device: torch.device) -> BatchedEigenvalues | None:
    """cuSOLVER's routine for a CUDA device where torch does not call it itself; None where it does, or where its library has none."""
    if torch.version.cuda is None or torch.__version__ >= BATCHED_IN_TORCH:
        return None
    _have_cusolver_loaded(device)
    try:
        return BatchedEigenvalues(_loaded("libcusolver.so"))
    except (OSError, AttributeError):
        return None


def _have_cusolver_loaded(device: torch.device) -> None:
    """By torch, which does so when it first needs it."""
    torch.linalg.eigvalsh(torch.zeros(1, 1, device=device))


def _loaded(name: str) -> str:
    """The file of a library of this process; OSError where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    raise OSError(f"{name} is not loaded.")

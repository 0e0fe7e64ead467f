"""Code paths of CUDA launches: one build finds by halving which path gives a wrong result, and by a sweep which is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ella_cuda._extension import _C


@contextmanager
def cuda_path(**choices: str | int) -> Iterator[None]:
    """For the duration of the context, fix code paths of CUDA launches; of the whole process, all threads of it.

    Outside of it the environment variable ``ELLA_CUDA_PATH`` says what is fixed, as ``product=mma,split=4``. A captured CUDA graph keeps
    the path it was captured with. Ops that have no such path, and the CPU's, take no notice.

    Args:
        choices: by key; the launchers choose where a key is not named.
            ``product``: "scalar" (ordinary instructions), "mma" (tensor cores by warp) or "wgmma" (by warpgroup, compute capability 9.0).
            ``split``: blocks that share a sum (split-K), from 1 on.
            ``tile``: rows and columns of a block's results.
            ``lags``: "yes" or "no", whether :func:`~ella_cuda.ops.conv_kron_accumulate_` sums products of images at each distance
                once; of 3x3 and 5x5 convolutions, among others, with circular padding that keeps the size.

    Raises:
        RuntimeError: a key or value that there is not; or, when an op is called, a path that the device or the build does not have.
    """
    before = _C.cuda_path()
    _C.set_cuda_path(",".join(f"{key}={value}" for key, value in choices.items()))
    try:
        yield
    finally:
        _C.set_cuda_path(before)

"""The compiled module: loading it registers ``torch.ops.ella_cuda``."""

from __future__ import annotations

import functools

import torch  # noqa: F401  (its libraries must be in the process before the extension is loaded)

try:
    from ella_cuda import _C
except ImportError as error:
    raise ImportError(
        f"ella_cuda's compiled module ella_cuda._C could not be loaded: {error}\n"
        "Likely causes: the package is imported from a source checkout where it was not built (run `pip install .`, or import from another "
        "folder); the installed torch is older than 2.11; or the extension was built for another Python version or C++ library."
    ) from error


@functools.cache
def build_info() -> dict[str, object]:
    """What was built: ``version``, ``cuda`` (toolkit version, "" if built without), ``cuda_archs``, ``compiler``, ``torch_headers``."""
    return dict(_C.build_info())

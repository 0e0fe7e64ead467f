"""The compiled module: loading it registers ``torch.ops.ella_cuda``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # noqa: F401  (its libraries must be in the process before the extension is loaded)


def _is_built(package: Path) -> bool:
    """Whether a package's folder holds the compiled module for this Python."""
    return any((package / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _advice(package: Path, path: Sequence[str], error: ImportError) -> str:
    """Why the compiled module of the package in that folder, found along ``path``, did not load, and what to do."""
    if _is_built(package):
        return (
            f"{error}\nLikely causes: the installed torch is older than 2.11, or the extension was built for another torch or C++ library; "
            "build it anew (pip install --force-reinstall .)."
        )
    others = ((Path(entry) / package.name).resolve() for entry in path)
    hidden = next((other for other in others if other != package and _is_built(other)), None)
    if hidden is None:
        return (
            f"{package} was not built for this Python: install it (pip install . in its checkout), then run from another folder; or build "
            "it in place (python setup.py build_ext --inplace, see CONTRIBUTING.md)."
        )
    return (
        f"{package} was not built for this Python, and hides the installed {hidden}: Python looks in the folder it runs in first. Run from "
        "another folder, or build this one in place (python setup.py build_ext --inplace, see CONTRIBUTING.md)."
    )


try:
    from ella_cuda import _C
except ImportError as error:
    raise ImportError(
        f"ella_cuda's compiled module ella_cuda._C could not be loaded: {_advice(Path(__file__).resolve().parent, sys.path, error)}"
    ) from (error if _is_built(Path(__file__).resolve().parent) else None)


@functools.cache
def build_info() -> dict[str, object]:
    """What was built: ``version``, ``cuda`` (toolkit version, "" if built without), ``cuda_archs``, ``compiler``, ``torch_headers``."""
    return dict(_C.build_info())

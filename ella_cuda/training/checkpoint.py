"""Checkpoints that survive a crash at any moment, and the random state that makes a resumed run repeat an uninterrupted one."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FORMAT = 3


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write ``state`` beside ``path``, flush it to the disk, then rename it: ``path`` is always a whole checkpoint.

    Raises:
        OSError: the disk is full or the folder cannot be written; what was at ``path`` before is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb") as file:
            torch.save(_plain({"format": FORMAT, **state}), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        beside.unlink(missing_ok=True)
        raise OSError(
            f"the checkpoint {path} could not be written ({error}); free space or choose another folder. The one before it, if any, is "
            "untouched."
        ) from error


def _plain(state: Any) -> Any:
    """The state with Python's numbers in place of numpy's, which would not be loaded: torch takes them for code."""
    if type(state) is dict:  # no other kind, which may have attributes, as a module's state dict has
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    return state.item() if isinstance(state, np.generic) else state


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, on the CPU. Loading executes no code from the file.

    Raises:
        ValueError: the file is truncated, damaged in any bit of its content, of another format or no checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums it stores
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of its part {damaged} does not fit")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    # What torch raises on damaged files; OSError where a damaged offset makes it seek before the file's start.
    except (
        zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, LookupError, TypeError,
        AttributeError, OSError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"{path} is not a readable checkpoint ({error}); it may be truncated or damaged. Move it away to start anew."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of this version of ella_cuda (format {FORMAT} expected). Move it away to start anew."
        )
    return state


def load_checkpoint(path: str | Path, settings: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Read a checkpoint and make sure that it belongs to this run.

    Raises:
        ValueError: it cannot be read, or was written with other settings or for another model; the message names the difference.
    """
    state = read_checkpoint(path)
    for key, expected in settings.items():
        found = state["settings"].get(key)
        if found != expected:
            where, found, expected = _first_difference(key, found, expected)
            raise ValueError(
                f"the checkpoint {path} was written with {where}={found!r}, this run has {expected!r}; use another file."
            )
    for name, tensor in model.state_dict().items():
        saved = state["model"].get(name)
        if saved is None or saved.shape != tensor.shape:
            shape = None if saved is None else tuple(saved.shape)
            raise ValueError(
                f"the checkpoint {path} has {name} of shape {shape}, the model {tuple(tensor.shape)}; use another file."
            )
    return state


def _first_difference(name: str, found: Any, expected: Any) -> tuple[str, Any, Any]:
    """Where two unequal settings differ first, as deep as both have the same form, and what is there."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(f"{name}[{key!r}]", found[key], expected[key]) for key in expected]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return name, found, expected
    return _first_difference(*next(pair for pair in pairs if pair[1] != pair[2]))


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The loaders' own generators, each once."""
    found = [getattr(loader, "generator", None) for loader in loaders]
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found += [getattr(sampler, "generator", None) for sampler in samplers]
    return list({id(g): g for g in found if g is not None}.values())


def random_state(loaders: Iterable[Any]) -> dict[str, Any]:
    """The state of every generator a training loop draws from: torch's, numpy's, Python's and the loaders' own."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "loaders": [g.get_state() for g in _generators(loaders)],
        "python": [version, list(words), gauss],
        "numpy": [torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def restore_random_state(state: dict[str, Any], loaders: Iterable[Any]) -> None:
    """Put every generator back to where :func:`random_state` found it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    for generator, saved in zip(_generators(loaders), state["loaders"], strict=True):
        generator.set_state(saved)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))

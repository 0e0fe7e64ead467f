"""Checkpoints that survive a crash at any moment, and the random state that makes a resumed run repeat an uninterrupted one."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pickle
import random
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ella_cuda.claim import claim
from ella_cuda.files import remove_temporary_files, write_file

FORMAT = 3
ENTRIES = {
    "epoch": int,
    "margliks": list,
    "losses": list,
    "history": list,
    "random": dict,
    "settings": dict,
    "model": dict,
    "prior": dict,
    "optimizer": dict,
    "hyper_optimizer": dict,
}
ROUNDED = "optimizer_groups"  # whose rates may follow from sums, so that they hang on the number of threads by rounding
ROUNDING = 1e-6  # relative
OTHER_THREADS = "the same run up to rounding, not bit for bit"  # what the warning of other threads says


def claimed(path: str | Path | None) -> contextlib.AbstractContextManager[None]:
    """Work alone on a checkpoint, see :func:`ella_cuda.claim.claim`: its folder is made, and what killed processes left of its temporary
    files is removed. Nothing for None."""
    return contextlib.nullcontext() if path is None else _claimed(Path(path))


@contextlib.contextmanager
def _claimed(path: Path) -> Any:
    lacking = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno, f"the folder {path.parent} of the checkpoint cannot be made ({error.strerror}); name another."
        ) from error
    try:
        with claim(path.with_name(f".{path.name}.lock"), f"the checkpoint {path}"):
            remove_temporary_files(path.parent, path.name)
            yield
    finally:
        with contextlib.suppress(OSError):  # the first of them that is not empty
            for folder in lacking:
                folder.rmdir()


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write ``state``; ``path`` is always a whole checkpoint, see :func:`ella_cuda.files.write_file`.

    Raises:
        OSError: the disk is full or the folder cannot be written; what was at ``path`` before is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(name: str) -> None:
        try:
            with open(name, "wb") as file:  # by a name torch would store it in the file
                torch.save(_plain({"format": FORMAT, **state}), file)
        except RuntimeError as error:  # torch's word for a failed write, or for its end after one
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error

    write_file(path, save)


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
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("a part is compressed, which torch's never are")
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of its part {damaged} does not fit")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:  # torch's words for it advise to load the file unsafely
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f", {named[1]}," if named else ""
        raise _unreadable(
            path, f"it holds something else{what} than tensors and plain values; loading that could run code"
        ) from error
    # What torch raises on damaged files; OSError where a damaged offset makes it seek before the file's start.
    except (
        zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError,
        MemoryError, RecursionError,
    ) as error:  # fmt: skip
        raise _unreadable(path, error) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of this version of ella_cuda (format {FORMAT} expected). Move it away to start anew."
        )
    return state


def _unreadable(path: str | Path, why: object) -> ValueError:
    return ValueError(
        f"{path} is not a readable checkpoint ({why}); it may be truncated or damaged. Move it away to start anew."
    )


def load_checkpoint(path: str | Path, settings: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Read a checkpoint and make sure that it belongs to this run.

    Settings are compared exactly, but for the rates of the optimizer's groups, which may follow from sums: they agree to six digits.
    Digests of data are compared where both sides have one.

    Raises:
        ValueError: it cannot be read, or was written with other settings or data, or for another model; the message names the difference.
    """
    state = read_checkpoint(path)
    for key in ("settings", "model"):
        if not isinstance(state.get(key), dict):
            raise _does_not_fit(path, f"has no {key}")
    for key, expected in settings.items():
        if key not in state["settings"]:
            raise ValueError(
                f"the checkpoint {path} does not say with which {key} it was written, as other versions' do; go on with the version that "
                "wrote it, or use another file."
            )
        found = state["settings"][key]
        if key == "data":
            _check_data(path, found, expected)
        elif not _agree(found, expected, ROUNDING if key == ROUNDED else 0.0):
            where, found, expected = _first_difference(key, found, expected, ROUNDING if key == ROUNDED else 0.0)
            raise ValueError(
                f"the checkpoint {path} was written with {where}={found!r}, this run has {expected!r}; use another file, or go on as it was "
                "begun."
            )
    expected = model.state_dict()
    if extra := [name for name in state["model"] if name not in expected]:
        raise ValueError(f"the checkpoint {path} has {extra[0]}, which the model has not; use another file.")
    for name, tensor in expected.items():
        if not isinstance(tensor, Tensor):  # what a module keeps beside tensors is its own
            continue
        saved = state["model"].get(name)
        shape, dtype = (tuple(saved.shape), saved.dtype) if isinstance(saved, Tensor) else (None, None)
        if shape != tensor.shape:
            raise ValueError(
                f"the checkpoint {path} has {name} of shape {shape}, the model {tuple(tensor.shape)}; use another file."
            )
        if dtype != tensor.dtype:
            raise ValueError(
                f"the checkpoint {path} has {name} in {dtype}, the model {tensor.dtype}; use another file."
            )
    return state


def check_entries(path: str | Path, state: dict[str, Any]) -> None:
    """Make sure that a checkpoint has everything that a run writes.

    Raises:
        ValueError: an entry is missing or of another type; the message names it.
    """
    for key, kind in ENTRIES.items():
        if not isinstance(state.get(key), kind):
            what = f"{key} is a {type(state[key]).__name__}" if key in state else f"has no {key}"
            raise _does_not_fit(path, what)
    for key, form in (("losses", float), ("margliks", float), ("history", dict)):
        if any(not isinstance(value, form) for value in state[key]):
            raise _does_not_fit(path, f"{key} holds something else than {form.__name__}s")
    if state["epoch"] < 1 or len(state["losses"]) != state["epoch"]:
        raise _does_not_fit(path, f"has {len(state['losses'])} losses of {state['epoch']} epochs")
    last = state["history"][-1] if state["history"] else {}
    for key in ("epoch", "prior_precision", "sigma_noise"):
        if key not in last:
            raise _does_not_fit(path, f"has no {key} in its last evaluation")


def resume(path: str | Path, settings: dict[str, Any], parts: dict[str, Any], loaders: Iterable[Any]) -> dict[str, Any]:
    """Put a run back to where its checkpoint was written. All of it is checked before anything changes.

    Args:
        path: the checkpoint.
        settings: of this run.
        parts: what has a state: ``model``, ``prior``, ``optimizer``, ``hyper_optimizer``, and ``scheduler`` and ``shape_optimizer`` or None.
        loaders: whose generators go on.

    Returns:
        The checkpoint.

    Raises:
        ValueError: it does not fit; see :func:`load_checkpoint`, or an entry is missing or of another form.

    Warns:
        UserWarning: the run was on another number of threads, on the CPU: its numbers are those of one run up to rounding.
    """
    state = load_checkpoint(path, settings, parts["model"])
    check_entries(path, state)
    for key, part in parts.items():
        if key == "model":
            continue
        if (part is None) != (state.get(key) is None):
            raise _does_not_fit(path, f"has {'a' if part is None else 'no'} {key}")
        if isinstance(part, torch.optim.Optimizer):
            stepped = key == "optimizer" or bool(state["margliks"])
            wrong = _wrong_optimizer_state(state[key], part, stepped)
        else:
            wrong = None if part is None else _wrong_form(state[key], part.state_dict())
        if wrong:
            raise _does_not_fit(path, f"{key} {wrong}")
    _check_random_state(path, "random", state["random"], loaders)
    if state["margliks"]:
        _check_random_state(path, "random_at_fit", state.get("random_at_fit"), loaders)
    for key, part in parts.items():
        if part is not None:
            part.load_state_dict(state[key])
    restore_random_state(state["random"], loaders)
    before, now = state.get("threads"), threads_of(parts["model"])
    if None not in (before, now) and before != now:
        warnings.warn(
            f"the run of {path} goes on with {now} thread(s), before it had {before}: {OTHER_THREADS}. Set OMP_NUM_THREADS={before} to "
            "repeat it.",
            stacklevel=3,  # whoever called marglik_training
        )
    return state


def threads_of(model: nn.Module) -> int | None:
    """On how many threads a model's numbers depend by rounding: torch's on the CPU, None on other devices."""
    first = next(model.parameters(), None)
    return torch.get_num_threads() if first is not None and first.device.type == "cpu" else None


def _does_not_fit(path: str | Path, what: str) -> ValueError:
    return ValueError(
        f"the checkpoint {path} cannot be gone on with: {what}. It is damaged, or another program's; move it away to start anew."
    )


def _check_data(path: str | Path, found: Any, expected: dict[str, str | None]) -> None:
    found = found if isinstance(found, dict) else {}
    for name, digest in expected.items():
        if None not in (digest, found.get(name)) and found[name] != digest:
            raise ValueError(
                f"the checkpoint {path} was written with other {name} data, although equally many (digest {found[name]}, here {digest}); "
                "go on with those it was begun with, or use another file."
            )


def _agree(found: Any, expected: Any, rounding: float) -> bool:
    """Whether settings are equal, numbers in words among them to a relative error."""
    if rounding and isinstance(found, str) and isinstance(expected, str) and found != expected:
        try:
            return math.isclose(float(found), float(expected), rel_tol=rounding)
        except ValueError:  # other words
            return False
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_agree(found[k], expected[k], rounding) for k in expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_agree, found, expected, [rounding] * len(found)))
    return found == expected


def _first_difference(name: str, found: Any, expected: Any, rounding: float) -> tuple[str, Any, Any]:
    """Where two settings that do not agree differ first, as deep as both have the same form, and what is there."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = dict.fromkeys([*expected, *found])
        pairs = [(f"{name}[{key!r}]", found.get(key), expected.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return name, found, expected
    return _first_difference(*next(pair for pair in pairs if not _agree(pair[1], pair[2], rounding)), rounding)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _wrong_form(found: Any, expected: Any) -> str | None:
    """What a part's saved state has of another form than its own, which stands for all values of its type; None if nothing."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return f"is a {type(found).__name__}, not a dict"
        for key, value in expected.items():
            if key not in found:
                if not str(key).startswith("_"):  # torch's versions differ in those
                    return f"has no {key}"
            elif wrong := _wrong_form(found[key], value):
                return f"[{key!r}] {wrong}"
    elif isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            return f"is not a list of {len(expected)}"
        return next((f"[{i}] {w}" for i, w in enumerate(map(_wrong_form, found, expected)) if w), None)
    elif isinstance(expected, Tensor) and not (_is_number(expected) and _is_number(found)):
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else f"none, but a {type(found).__name__}"
            return f"has shape {shape}, here {tuple(expected.shape)}"
    elif isinstance(expected, (bool, int, float)) and not _is_number(found):
        return f"is a {type(found).__name__}, not a number"
    return None


def _wrong_optimizer_state(found: Any, optimizer: torch.optim.Optimizer, stepped: bool) -> str | None:
    """What is wrong with an optimizer's saved state, None if nothing. ``stepped``: whether it has done a step."""
    if wrong := _wrong_form(found, {**optimizer.state_dict(), "state": {}}):
        return wrong
    groups = [[*group["params"]] for group in optimizer.state_dict()["param_groups"]]
    if [list(group["params"]) for group in found["param_groups"]] != groups:
        return "has other groups of parameters"
    for numbers, group in zip(groups, optimizer.param_groups, strict=True):
        form = _form_of_state(optimizer, group)
        for number, parameter in zip(numbers, group["params"], strict=True):
            state = found["state"].get(number)
            if state is None:
                if stepped and form:
                    return f"has no state of parameter {number}"
                continue
            expected = {key: parameter if whole else torch.zeros(()) for key, whole in form.items()}
            if wrong := _wrong_form(state, expected):
                return f"['state'][{number}] {wrong}"
    return None


def _form_of_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """The tensors that the optimizer keeps for a parameter after a step: whether they have its shape (True) or are one number (False).

    Found by a step on a small parameter. Nothing is known of optimizers that take other arguments than their groups have, and of tensors
    of other shapes.
    """
    first = group["params"][0]
    small = torch.zeros(2, 3, dtype=first.dtype, device=first.device, requires_grad=True)
    small.grad = torch.zeros_like(small)
    options = {key: value for key, value in group.items() if key != "params"}
    try:
        twin = type(optimizer)([{**options, "params": [small]}])
        twin.step()
        kept = dict(twin.state[small])
    except Exception:  # someone else's class, whose first step says what does not fit
        return {}
    tensors = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
    return {key: value.dim() > 0 for key, value in tensors.items() if value.shape in ((2, 3), ())}


def _check_random_state(path: str | Path, name: str, state: Any, loaders: Iterable[Any]) -> None:
    """Put the state into generators of our own: what they refuse, is damaged."""
    try:
        torch.Generator().set_state(state["torch"])
        generators = _generators(loaders)
        if len(state["loaders"]) != len(generators):
            raise ValueError(f"{len(state['loaders'])} generators of loaders, this run has {len(generators)}")
        for generator, saved in zip(generators, state["loaders"], strict=True):
            torch.Generator(generator.device).set_state(saved)
        if len(state["cuda"]) > torch.cuda.device_count():
            raise ValueError(f"generators of {len(state['cuda'])} CUDA devices, here are {torch.cuda.device_count()}")
        random.Random().setstate(_python_state(state["python"]))
        np.random.RandomState().set_state(_numpy_state(state["numpy"]))
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise _does_not_fit(path, f"{name} is no state of generators ({error})") from error


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


def warn_of_unsaved_state(loaders: Iterable[Any]) -> None:
    """Warn, once for each, of loaders whose batches depend on what no checkpoint holds."""
    for loader in {id(loader): loader for loader in loaders}.values():
        if getattr(loader, "num_workers", 0) == 0:
            continue
        for name, value, why in (
            (
                "persistent_workers",
                True,
                "the random state of its workers, which go on from epoch to epoch, is in no checkpoint",
            ),
            ("in_order", False, "its batches come in the order in which workers finish them"),
        ):
            if getattr(loader, name, not value) is value:
                warnings.warn(
                    f"marglik_training: checkpoint: a resumed run will not repeat an uninterrupted one, for a loader has {name}={value}: "
                    f"{why}. Pass {name}={not value} to have it so.",
                    stacklevel=3,
                )


def restore_random_state(state: dict[str, Any], loaders: Iterable[Any]) -> None:
    """Put every generator back to where :func:`random_state` found it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    for generator, saved in zip(_generators(loaders), state["loaders"], strict=True):
        generator.set_state(saved)
    random.setstate(_python_state(state["python"]))
    np.random.set_state(_numpy_state(state["numpy"]))


def _python_state(saved: Any) -> tuple[Any, ...]:
    version, words, gauss = saved
    return version, tuple(words), gauss


def _numpy_state(saved: Any) -> tuple[Any, ...]:
    keys, position, has_gauss, cached = saved
    return "MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached

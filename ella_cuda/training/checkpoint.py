"""Checkpoints that survive a crash at any moment, and the random state that makes a resumed run repeat an uninterrupted one."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import math
import os
import pickle
import random
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ella_cuda.claim import claim
from ella_cuda.files import no_file, remove_temporary_files, write_file
from ella_cuda.training.checks import warn
from ella_cuda.training.learners import Learner

FORMAT = 4
ENTRIES = {  # of a state of a trainer
    "epoch": int,
    "margliks": list,
    "losses": list,
    "history": list,
    "random": dict,
    "settings": dict,
    "model": dict,
    "learners": dict,
    "optimizer": dict,
}
BEFORE = {
    "hyper_optimizer": "adam",
    "augment": None,
    "aug_sampling": None,
    "keep": "last",
}  # settings that older states do not name, and what they were
ROUNDED = "optimizer_groups"  # whose rates may follow from sums, so that they hang on the number of threads by rounding
ROUNDING = 1e-6  # relative
OTHER_THREADS = "the same run up to rounding, not bit for bit"  # what the warning of other threads says


class Checkpoint:
    """The file that a training goes on from: claimed while it trains, replaced at every evaluation. Without a path, nothing is kept.

    Args:
        path: the file, or None.
        owner: whose argument it is, for messages.
        check: raises ValueError where a state lacks an entry; see :func:`check_entries`.

    Raises:
        TypeError: the path is none.
        OSError: it is no file, or its folder is none, cannot be made or cannot be written to.
    """

    def __init__(
        self,
        path: str | Path | None,
        owner: str = "marglik_training",
        check: Callable[[Path, dict[str, Any]], None] | None = None,
    ) -> None:
        self.source = f"the checkpoint {path}"
        if path is not None:
            _require_writable(path, owner)
        self._path = None if path is None else Path(path)
        self._check = check_entries if check is None else check

    def __bool__(self) -> bool:
        return self._path is not None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Work alone on the file, see :func:`ella_cuda.claim.claim`: its folder is made, and what killed processes left of its temporary
        files is removed."""
        if self._path is None:
            yield
            return
        path, lacking = self._path, [folder for folder in self._path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the folder {path.parent} of the checkpoint cannot be made ({error.strerror}); name another.",
            ) from error
        try:
            with claim(path.with_name(f".{path.name}.lock"), self.source):
                remove_temporary_files(path.parent, path.name)
                yield
        finally:
            with contextlib.suppress(OSError):  # the first of them that is not empty
                for folder in lacking:
                    folder.rmdir()

    def read(self) -> dict[str, Any] | None:
        """What was saved and checked, see :func:`read_checkpoint`; None where nothing was."""
        if self._path is None or not self._path.exists():
            return None
        state = read_checkpoint(self._path)
        self._check(self._path, state)
        return state

    def save(self, state: dict[str, Any]) -> None:
        """See :func:`save_checkpoint`."""
        if self._path is not None:
            save_checkpoint(self._path, state)


def _require_writable(checkpoint: str | Path, owner: str) -> None:
    """Make sure that a checkpoint can be written, without leaving a trace."""
    if not isinstance(checkpoint, (str, Path)):
        raise TypeError(f"{owner}: checkpoint must be a path or None, got {type(checkpoint).__name__}.")
    path = Path(checkpoint).absolute()
    if path.is_dir():
        raise IsADirectoryError(f"{owner}: checkpoint must be a file, but {checkpoint} is a folder; name a file in it.")
    if path.exists() and (what := no_file(path)):
        raise OSError(f"{owner}: checkpoint must be a file, but {checkpoint} is {what}; name another.")
    folder = next(parent for parent in path.parents if parent.exists())  # below it folders are made
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"{owner}: the checkpoint {checkpoint} cannot be written: {folder} takes no file ({error}); choose another folder."
        ) from error


def require_loadable(learner: Learner) -> None:
    """TypeError where a checkpoint could not give back what a learner keeps and records: loading executes no code, so that it takes
    tensors and plain values alone."""
    file = io.BytesIO()
    try:
        torch.save(plain([learner.state_dict(), learner.record()]), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TypeError(
            f"marglik_training: state_dict and record of the learner {learner.name!r} must hold tensors and plain values alone, or no "
            f"checkpoint could be loaded ({str(error).splitlines()[0]})."
        ) from error


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
                torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:  # torch's word for a failed write, or for its end after one
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error

    write_file(path, save)


def plain(state: Any) -> Any:
    """The state with Python's numbers in place of numpy's, which would not be loaded: torch takes them for code."""
    if type(state) is dict:  # no other kind, which may have attributes, as a module's state dict has
        return {key: plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(plain, state))
    return state.item() if isinstance(state, np.generic) else state


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, on the CPU. Loading executes no code from the file.

    Raises:
        ValueError: the file is truncated, damaged in any bit of its content, of another format or no checkpoint.
    """
    try:
        if what := no_file(path):
            raise ValueError(f"it is {what}")
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums it stores
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
    _check_run(f"the checkpoint {path}", state, settings, model)
    return state


def _check_run(source: str, state: Mapping[str, Any], settings: Mapping[str, Any], model: nn.Module) -> None:
    """ValueError where a state is of other settings, data or another model."""
    for key in ("settings", "model"):
        if not isinstance(state.get(key), dict):
            raise _does_not_fit(source, f"has no {key}")
    present = BEFORE | state["settings"]
    for key, expected in settings.items():
        if key not in present:
            raise ValueError(
                f"{source} does not say with which {key} it was written, as other versions' do; go on with the version that wrote it, or use "
                "another file."
            )
        found, rounding = present[key], ROUNDING if key == ROUNDED else 0.0
        if key == "data":
            _check_data(source, found, expected)
        elif not agree(found, expected, rounding):
            where, found, expected = _first_difference(key, found, expected, rounding)
            raise ValueError(
                f"{source} was written with {where}={found!r}, this run has {expected!r}; use another file, or go on as it was begun."
            )
    expected = model.state_dict()
    if extra := [name for name in state["model"] if name not in expected]:
        raise ValueError(f"{source} has {extra[0]}, which the model has not; use another file.")
    for name, tensor in expected.items():
        if not isinstance(tensor, Tensor):  # what a module keeps beside tensors is its own
            continue
        saved = state["model"].get(name)
        shape, dtype = (tuple(saved.shape), saved.dtype) if isinstance(saved, Tensor) else (None, None)
        if shape != tensor.shape:
            raise ValueError(
                f"{source} has {name} of shape {shape}, the model {tuple(tensor.shape)}; use another file."
            )
        if dtype != tensor.dtype:
            raise ValueError(f"{source} has {name} in {dtype}, the model {tensor.dtype}; use another file.")


def check_entries(path: str | Path, state: dict[str, Any]) -> None:
    """Make sure that a checkpoint has everything that a run writes.

    Raises:
        ValueError: an entry is missing or of another type; the message names it.
    """
    source = f"the checkpoint {path}"
    _check_forms(source, state, ENTRIES)
    last = state["history"][-1] if state["history"] else {}
    for key in ("epoch", "prior_precision", "sigma_noise"):
        if key not in last:
            raise _does_not_fit(source, f"has no {key} in its last evaluation")


def _check_forms(source: str, state: Mapping[str, Any], entries: Mapping[str, type]) -> None:
    for key, kind in entries.items():
        if not isinstance(state.get(key), kind):
            what = f"{key} is a {type(state[key]).__name__}" if key in state else f"has no {key}"
            raise _does_not_fit(source, what)
    counted = "losses" if "losses" in entries else "history"
    if len(state[counted]) != state["epoch"]:
        raise _does_not_fit(source, f"{counted} has {len(state[counted])} entries of {state['epoch']} epochs")


def restore(
    source: str,
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loaders: Sequence[Any],
    entries: Mapping[str, type] = ENTRIES,
    scheduler: Any = None,
    learners: Sequence[Learner] = (),
) -> None:
    """Put a training back to a state of its own; a state that does not fit changes nothing.

    Args:
        source: what the state is, for messages.
        state: as :meth:`ella_cuda.training.MarglikTrainer.state_dict` gives it.
        settings: of this training.
        model, optimizer, scheduler, learners: what has a state; ``scheduler`` may be None.
        loaders: whose generators go on.
        entries: types of what the state must have, by name.

    Raises:
        ValueError: the state does not fit; see :func:`load_checkpoint`, or an entry is missing or of another form.

    Warns:
        UserWarning: the run was on another number of threads, on the CPU: its numbers are those of one run up to rounding.
    """
    _check_run(source, state, settings, model)
    _check_forms(source, state, entries)
    if (scheduler is None) != (state.get("scheduler") is None):
        raise _does_not_fit(source, f"has {'a' if scheduler is None else 'no'} scheduler")
    parts = {"model": (model, state["model"]), "optimizer": (optimizer, state["optimizer"])}
    if scheduler is not None:
        parts["scheduler"] = (scheduler, state["scheduler"])
    parts |= {f"learner {one.name}": (one, state["learners"].get(one.name)) for one in learners}
    before, random_before = Snapshot(*(part for part, _ in parts.values())), random_state(loaders)
    name = "random"
    try:
        restore_random_state(state["random"], loaders)
        for name in parts:
            part, saved = parts[name]
            part.load_state_dict(saved)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        before.restore()
        restore_random_state(random_before, loaders)
        raise _does_not_fit(source, f"{name} is of another form ({error})") from error
    _warn_of_threads(source, state, model)


class Snapshot:
    """Copies of the states of parts of a training."""

    def __init__(self, *parts: Any) -> None:
        self._parts = [part for part in parts if part is not None]
        self._states = [copy.deepcopy(part.state_dict()) for part in self._parts]

    def restore(self) -> None:
        for part, state in zip(self._parts, self._states, strict=True):
            part.load_state_dict(state)


def _warn_of_threads(source: str, state: Mapping[str, Any], model: nn.Module) -> None:
    before, now = state.get("threads"), threads_of(model)
    if None not in (before, now) and before != now:
        warn(
            f"the run of {source.removeprefix('the checkpoint ')} goes on with {now} thread(s), before it had {before}: {OTHER_THREADS}. Set "
            f"OMP_NUM_THREADS={before} to repeat it."
        )


def threads_of(model: nn.Module) -> int | None:
    """On how many threads a model's numbers depend by rounding: torch's on the CPU, None on other devices."""
    first = next(model.parameters(), None)
    return torch.get_num_threads() if first is not None and first.device.type == "cpu" else None


def _does_not_fit(source: str, what: str) -> ValueError:
    return ValueError(
        f"{source} cannot be gone on with: {what}. It is damaged, or another program's; move it away to start anew."
    )


def _check_data(source: str, found: Any, expected: dict[str, str | None]) -> None:
    if not isinstance(found, dict):
        raise _does_not_fit(source, f"data of its settings is a {type(found).__name__}")
    for name, digest in expected.items():
        if None not in (digest, found.get(name)) and found[name] != digest:
            raise ValueError(
                f"{source} was written with other {name} data, although equally many (digest {found[name]}, here {digest}); "
                "go on with those it was begun with, or use another file."
            )


def agree(found: Any, expected: Any, rounding: float = 0.0) -> bool:
    """Whether settings are equal, numbers in words among them to a relative error."""
    if rounding and isinstance(found, str) and isinstance(expected, str) and found != expected:
        try:
            return math.isclose(float(found), float(expected), rel_tol=rounding)
        except ValueError:  # other words
            return False
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(agree(found[k], expected[k], rounding) for k in expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(agree, found, expected, [rounding] * len(found)))
    return not isinstance(found, Tensor) and found == expected


def _first_difference(name: str, found: Any, expected: Any, rounding: float) -> tuple[str, Any, Any]:
    """Where two settings that do not agree differ first, as deep as both have the same form, and what is there."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = dict.fromkeys([*expected, *found])
        pairs = [(f"{name}[{key!r}]", found.get(key), expected.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return name, found, expected
    return _first_difference(*next(pair for pair in pairs if not agree(pair[1], pair[2], rounding)), rounding)


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


def warn_of_unsaved_state(loaders: Iterable[Any], owner: str = "marglik_training") -> None:
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
                warn(
                    f"{owner}: checkpoint: a resumed run will not repeat an uninterrupted one, for a loader has {name}={value}: "
                    f"{why}. Pass {name}={not value} to have it so."
                )


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


@contextlib.contextmanager
def kept_random_state(loaders: Sequence[Any]) -> Iterator[None]:
    """What happens in the context moves no generator."""
    before = random_state(loaders)
    try:
        yield
    finally:
        restore_random_state(before, loaders)

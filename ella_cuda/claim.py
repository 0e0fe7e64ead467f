"""Claims: one process at a time works on a folder or a file."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"  # of a folder
PATIENCE = 3.0  # seconds for a process that was killed, and for its workers, to be gone
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_held: set[int] = set()


@contextlib.contextmanager
def claim(lock: Path, what: str, patience: float = PATIENCE) -> Iterator[None]:
    """Work alone on what the lock file stands for, until the context ends.

    The claim is ``flock``'s lock on the file: the system releases it when the process ends, however it ends. The file says as JSON whose
    it is (``pid``, ``host``, ``since``); it is removed at the end, and one that a killed process left is taken over.

    On network file systems the claim holds between machines where the mount passes ``flock`` on to the server (NFS on Linux does, but for
    the mount option ``local_lock``), else between the processes of one machine.

    Args:
        lock: the lock file; its folder must exist.
        what: is claimed, for messages.
        patience: how long to wait for another's claim to end, in seconds.

    Raises:
        RuntimeError: another process, or another call in this one, works there; the message says who and since when.
        OSError: the folder cannot be written.

    Warns:
        RuntimeWarning: the file system has no locks, so that nothing keeps a second process out.
    """
    descriptor, owner = _locked(lock, what, patience), os.getpid()
    _held.add(descriptor)
    try:
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk is for what needs the space to say
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": owner, "host": socket.gethostname(), "since": since}).encode())
        yield
    finally:
        if os.getpid() == owner:  # else a fork of the owner: the claim is not its own
            with contextlib.suppress(OSError):
                if _is(descriptor, lock):
                    lock.unlink()
            _held.discard(descriptor)
            os.close(descriptor)


def _locked(lock: Path, what: str, patience: float) -> int:
    """The lock file's descriptor, once it is locked."""
    deadline = time.monotonic() + patience
    while True:
        try:
            # Closed when another program is executed. A link would have another file written over.
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{what} cannot be worked on: {lock} cannot be written ({error.strerror}); choose another folder.",
            ) from error
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "this system has no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(descriptor, lock):
                return descriptor
            os.close(descriptor)  # whoever held it has removed the file meanwhile
        except OSError as error:
            if error.errno in NOT_SUPPORTED:
                warnings.warn(
                    f"{what} cannot be locked ({error.strerror}): make sure that no other process works there.",
                    RuntimeWarning,
                    stacklevel=4,  # whoever entered the claim
                )
                return descriptor
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what} is in use by {_holder(lock)}; wait until it is done or stop it, or work elsewhere."
                ) from error
            time.sleep(0.05)


def _is(descriptor: int, lock: Path) -> bool:
    """Whether the file at that path is the open one."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(lock))
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    """Who holds the lock, in words."""
    try:
        said = json.loads(lock.read_text(encoding="utf-8"))
        return f"process {said['pid']} on {said['host']} since {said['since']}"
    except (OSError, ValueError, LookupError, TypeError):  # released meanwhile, or not written yet
        return "another process"


def _forget_in_fork() -> None:
    """A forked process, such as a DataLoader's worker, would keep its parent's claims after the parent's end."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)

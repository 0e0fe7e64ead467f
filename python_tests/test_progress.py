"""What a terminal shows of runs."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest

from ella_cuda.experiments import configure, run_grid
from ella_cuda.progress import bar_size

SMALL = {"width": 1, "epochs": 1, "train_size": 40, "test_size": 40}


@pytest.mark.parametrize(("columns", "width"), [(0, 80), (60, 59)])
def test_runs_have_a_bar_whatever_the_terminal_says_of_its_size(columns, width, tmp_path, monkeypatch):
    shown, terminal = pty.openpty()
    read: list[bytes] = []

    def read_all() -> None:  # while it is written: a terminal holds a few kilobytes
        with contextlib.suppress(OSError):  # the end, where the other side is closed
            while part := os.read(shown, 4096):
                read.append(part)

    reader = threading.Thread(target=read_all, daemon=True)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", min(columns, 24), columns, 0, 0))
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        reader.start()
        config = configure("digits", "digit", "conv", "map", **SMALL)
        run_grid([config], tmp_path / "runs", on_row=lambda row: print("a row", flush=True))
    reader.join()
    os.close(shown)
    text = re.sub(r"\x1b\[[A-Z]", "", b"".join(read).decode())  # without the cursor's moves
    pictures = re.split(r"[\r\n]", text)
    whole = [p for p in pictures if p.startswith("1 run: 100%") and "1/1" in p]
    assert whole and max(map(len, whole)) == width
    assert any(p.startswith("digits-digit-conv-map-seed0: ") for p in pictures)  # the run's own
    assert "a row" in pictures  # on a line of its own


def test_what_is_no_terminal_is_left_to_tqdm(monkeypatch, tmp_path):
    for stream in (io.StringIO(), (tmp_path / "log").open("w"), object()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert bar_size() == {"dynamic_ncols": True}

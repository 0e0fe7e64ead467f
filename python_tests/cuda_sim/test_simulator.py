"""What several processes want compiled, one of them compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import simulator as build

COMPILER = """#!/bin/sh
# In a compiler's place: notes that it was called, takes its time, and writes its last argument.
[ "$1" = --version ] && exit
echo called >> "{log}"
sleep 1
for last; do :; done
echo object > "$last"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the simulator is for Linux")
def test_two_processes_compile_an_object_once(tmp_path: Path) -> None:
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    code = "from python_tests.cuda_sim import simulator as s; print(s.compile_object(s.SOURCES / 'schemas.cpp', s.SOURCES, '-O0'))"
    env = {**os.environ, "CXX": str(compiler), "ELLA_SIM_CACHE": str(tmp_path / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=build.ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    made = {process.communicate(timeout=60)[0].strip() for process in both}
    assert len(made) == 1 and Path(made.pop()).read_text() == "object\n"
    assert log.read_text() == "called\n"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".o"]  # no lock stays

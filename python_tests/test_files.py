"""A file is whole at any moment."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ella_cuda.files import path_part, read_json, remove_temporary_files, write_file

WRITE_UNDER_A_SIZE_LIMIT = """
import resource, signal, sys
from ella_cuda.files import write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(sys.argv[1], "x" * 100000)
except OSError as error:
    print("refused:", error)
"""


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, "one")
    write_file(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_names_of_files_that_are_not_utf_8_are_kept_as_they_are(tmp_path):
    write_file(tmp_path / "a.csv", os.fsdecode(b"\xff.png,ok"))
    assert (tmp_path / "a.csv").read_bytes() == b"\xff.png,ok"


def test_a_function_gets_a_name_with_the_suffix(tmp_path):
    def draw(name: str) -> None:
        assert name.endswith(".png")
        with open(name, "w") as file:
            file.write("picture")

    write_file(tmp_path / "p.png", draw)
    assert (tmp_path / "p.png").read_text() == "picture"


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, "old")

    def fail(name: str) -> None:
        with open(name, "w") as file:
            file.write("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_file(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_FSIZE") or not hasattr(signal, "SIGXFSZ"), reason="no file size limits here"
)
def test_a_write_that_the_system_cuts_short_leaves_the_old_file(tmp_path):
    """The real thing: the operating system refuses to go on writing, as it does when a disk is full."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    command = [sys.executable, "-c", WRITE_UNDER_A_SIZE_LIMIT, str(path)]
    elsewhere = tmp_path.parent  # not the checkout, whose package may not be built
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=elsewhere)
    assert "refused:" in done.stdout, done.stderr
    assert "could not be written" in done.stdout
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OSError, match=r"none/a.txt could not be written \(No such file or directory\)"):
        write_file(tmp_path / "none" / "a.txt", "x")


KILLED_WHILE_WRITING = """
import sys, time
from ella_cuda.files import write_file

def write(name):
    with open(name, "w") as file:
        file.write("half")
        file.flush()
        print("writing", flush=True)
        time.sleep(600)

write_file(sys.argv[1], write)
"""


def test_what_a_killed_process_leaves_can_be_removed(tmp_path):
    """Its own names only: a user's hidden files stay, and another file's where one is named."""
    kept = {".bashrc", ".a.1.txt", "a.txt", ".b.12-3.tmp.txt"}
    for name in kept:
        (tmp_path / name).write_text("old")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path / "a.txt")],
        stdout=subprocess.PIPE,
        cwd=tmp_path.parent,
    )
    with process.stdout:
        assert process.stdout.readline() == b"writing\n"
        process.kill()
        process.wait()
    (left,) = set(os.listdir(tmp_path)) - kept
    assert f".{process.pid}-" in left and (tmp_path / "a.txt").read_text() == "old"
    remove_temporary_files(tmp_path, "a.txt")
    assert set(os.listdir(tmp_path)) == kept
    remove_temporary_files(tmp_path)
    assert set(os.listdir(tmp_path)) == kept - {".b.12-3.tmp.txt"}


def test_threads_that_write_one_file_leave_one_of_their_texts_whole(tmp_path):
    texts = [str(i) * 100_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda text: write_file(tmp_path / "a.txt", text), texts))
            assert (tmp_path / "a.txt").read_text() in texts
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe{}", b"{", b"[" * 100_000, b"9" * 10_000, b'{"a": NaN}', b"[-Infinity]", b"[1.5, 1e999]"],
    ids=["not UTF-8", "cut", "too deep", "too many digits", "no number", "infinite", "too large"],
)
def test_json_that_cannot_be_read_names_its_file(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is damaged or of another version \(.*\); do this\.$"):
        read_json(tmp_path / "a.json", "do this")


def test_what_is_no_file_in_place_of_json_is_named_at_once(tmp_path):
    (tmp_path / "a.json").mkdir()
    os.mkfifo(tmp_path / "b.json")
    (tmp_path / "c.json").symlink_to("/dev/zero")
    for name, what in (("a.json", "a folder"), ("b.json", "a pipe or device"), ("c.json", "a pipe or device")):
        with pytest.raises(ValueError, match=rf"{name} is damaged or of another version \({what}\); do this\.$"):
            read_json(tmp_path / name, "do this")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "/tmp", "a/b", "a\\b", "a\0", "a\n", "\ud800", "a\x7f", 3, None]
)
def test_a_name_is_one_part_of_a_path(name):
    with pytest.raises(ValueError, match="a name must be one part of a path"):
        path_part(name)


@pytest.mark.parametrize("name", ["a", "...", "digits-conv+f_fc-seed0", "größe 3", ".lock"])
def test_a_name_that_is_one_part_of_a_path_stays(tmp_path, name):
    assert (tmp_path / path_part(name)).parent == tmp_path and path_part(name) == name

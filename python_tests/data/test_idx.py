"""The IDX reader on files written byte by byte."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from ella_cuda.data.idx import read_idx

# Two images of 2 rows and 3 columns: magic, three big-endian sizes, twelve pixels.
IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(100, 112))
LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 4]) + bytes([3, 0, 9, 255])


@pytest.mark.parametrize("compress", [False, True])
def test_reads_what_the_bytes_say(tmp_path, compress):
    for name, raw in (("images", IMAGES), ("labels", LABELS)):
        (tmp_path / name).write_bytes(gzip.compress(raw, mtime=0) if compress else raw)
    (content, images), (_, labels) = read_idx(tmp_path / "images"), read_idx(tmp_path / "labels")
    assert content == IMAGES
    assert images.dtype == np.uint8
    assert images.tolist() == [[[100, 101, 102], [103, 104, 105]], [[106, 107, 108], [109, 110, 111]]]
    assert labels.tolist() == [3, 0, 9, 255]


def test_sizes_are_big_endian_and_of_four_bytes(tmp_path):
    (tmp_path / "f").write_bytes(bytes([0, 0, 8, 1, 0, 0, 1, 2]) + bytes(258))
    assert read_idx(tmp_path / "f")[1].shape == (258,)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "an empty file"),
        (b"\x01\x00\x08\x01", "must begin with 00 00 08, got 01 00"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "got 00 00 0d"),
        (IMAGES[:10], r"got -6"),
        (IMAGES[:-1], "must hold 12 bytes"),
        (IMAGES + b"\0", "got 13"),
        (gzip.compress(IMAGES, mtime=0)[:-6], "damaged or truncated gzip"),
        (
            gzip.compress(IMAGES, mtime=0)[:15] + b"\xff\xff\xff" + gzip.compress(IMAGES, mtime=0)[18:],
            "damaged or truncated gzip",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, raw, message):
    (tmp_path / "broken").write_bytes(raw)
    with pytest.raises(ValueError, match=message) as raised:
        read_idx(tmp_path / "broken")
    assert "broken" in str(raised.value)

"""Each data set from small files in its real format."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ella_cuda.data import Dataset, load, make_task, sources, subsample
from ella_cuda.data.checksums import PUBLISHED
from ella_cuda.data.cifar import parse_cifar_batch, read_archive

# Most files here are generated, which `load` says; what it says has tests of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*not as published")
DIGITS_TEST_BEGINNING = [11, 15, 17, 20, 21, 28, 29, 31]
DIGITS_TEST_SUM = 321119


def write_idx(path: Path, array: np.ndarray, compress: bool) -> None:
    raw = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + (".gz" if compress else "")).write_bytes(gzip.compress(raw) if compress else raw)


def mnist_arrays(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 28, 28)), rng.integers(0, 10, n)


def write_mnist(folder: Path, compress: bool = True) -> dict[str, np.ndarray]:
    arrays = {}
    for part, n, seed in (("train", 12, 0), ("t10k", 5, 1)):
        arrays[f"{part} images"], arrays[f"{part} labels"] = mnist_arrays(n, seed)
        write_idx(folder / f"{part}-images-idx3-ubyte", arrays[f"{part} images"], compress)
        write_idx(folder / f"{part}-labels-idx1-ubyte", arrays[f"{part} labels"], compress)
    return arrays


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "."), ("mnist", "MNIST/raw"), ("fashion-mnist", "."), ("fashion-mnist", "FashionMNIST/raw")],
)
def test_idx_data_sets_from_every_folder(tmp_path, name, folder, compress):
    arrays = write_mnist(tmp_path / folder, compress)
    data = load(name, tmp_path)
    assert data.train_images.shape == (12, 1, 28, 28)
    assert data.test_images.shape == (5, 1, 28, 28)
    assert data.num_classes == 10
    assert (data.train_images.double() * 255 - torch.from_numpy(arrays["train images"])[:, None]).abs().max() < 1e-4
    assert (data.test_images.double() * 255 - torch.from_numpy(arrays["t10k images"])[:, None]).abs().max() < 1e-4
    assert data.train_labels.tolist() == arrays["train labels"].tolist()
    assert data.test_labels.tolist() == arrays["t10k labels"].tolist()
    assert data.train_ids.tolist() == list(range(12))
    assert data.test_ids.tolist() == list(range(12, 17))


@pytest.mark.parametrize(
    ("file", "array", "words"),
    [
        ("t10k-labels-idx1-ubyte", np.zeros(6), r"5 images and .* 6 labels"),
        ("train-labels-idx1-ubyte", np.full(12, 10), r"train_labels must lie in 0\.\.9"),
        ("train-images-idx3-ubyte", np.zeros(12), r"train-images-idx3-ubyte.gz must have 3 dimension"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, file, array, words):
    write_mnist(tmp_path)
    write_idx(tmp_path / file, array, compress=True)
    with pytest.raises(ValueError, match=words):
        load("mnist", tmp_path)


def test_missing_files_say_where_and_how(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"MNIST/raw.*--download"):
        load("mnist", tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError):
        load("mnist", tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"cifar-10-python\.tar\.gz not found, nor .*cifar-10-batches-py/data_batch_1"
    ):
        load("cifar10", tmp_path)


def test_fashion_mnist_names_its_debian_package(tmp_path, monkeypatch):
    missing = sources._idx_source(
        "fashion-mnist", "Fashion-MNIST", "FashionMNIST", (tmp_path / "none",), "apt-get install x"
    )
    with pytest.raises(FileNotFoundError, match=r"none\. apt-get install x"):
        missing(tmp_path, False)
    if not sources.DEBIAN_FASHION_MNIST.exists():
        with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
            load("fashion-mnist", tmp_path)


needs_fashion_mnist = pytest.mark.skipif(
    not sources.DEBIAN_FASHION_MNIST.exists(), reason="Debian's dataset-fashion-mnist is not installed"
)


@pytest.fixture(scope="module")
def fashion_mnist() -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is as published, though Debian compressed it anew
        return load("fashion-mnist", "there-is-no-such-folder")


@needs_fashion_mnist
def test_the_real_fashion_mnist(fashion_mnist):
    data = fashion_mnist
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_images.shape == (10000, 1, 28, 28)
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    # The mean and standard deviation that everyone normalises Fashion-MNIST with.
    assert abs(float(data.train_images.double().mean()) - 0.2860) < 5e-5
    assert abs(float(data.train_images.double().std()) - 0.3530) < 5e-5


@needs_fashion_mnist
@pytest.mark.parametrize("task", ["quadrant", "rotated", "translated", "scaled"])
def test_the_real_fashion_mnist_in_parts_is_part_of_the_whole(fashion_mnist, task):
    data = subsample(fashion_mnist, 1000)
    data = replace(data, test_images=data.test_images[:9], test_labels=data.test_labels[:9], test_ids=data.test_ids[:9])
    part = subsample(data, 100, seed=1)
    whole, made = make_task(data, task), make_task(part, task)
    place = {int(i): k for k, i in enumerate(whole.train_ids)}
    index = torch.tensor([place[int(i)] for i in made.train_ids])
    assert torch.equal(made.train_images, whole.train_images[index])
    assert torch.equal(made.train_labels, whole.train_labels[index])
    assert 0 <= float(made.train_images.min()) < float(made.train_images.max()) <= 1 + 1e-6


@needs_fashion_mnist
def test_fashion_mnist_is_not_taken_for_mnist():
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is fashion-mnist's file, not mnist's"):
        load("mnist", sources.DEBIAN_FASHION_MNIST)


def test_digits_are_scikit_learns(tmp_path):
    from sklearn.datasets import load_digits

    bunch = load_digits()
    data = load("digits")
    assert (len(data.train_images), len(data.test_images), data.num_classes) == (1437, 360, 10)
    ids = torch.cat([data.train_ids, data.test_ids])
    assert ids.sort().values.tolist() == list(range(1797))
    images = torch.cat([data.train_images, data.test_images])
    assert torch.equal(images[:, 0].double(), torch.from_numpy(bunch.images)[ids] / 16)
    assert torch.cat([data.train_labels, data.test_labels]).tolist() == bunch.target[ids].tolist()


def test_the_digits_split_keeps_classes_in_proportion_and_never_changes():
    """Published numbers belong to this split."""
    data = load("digits")
    test, everything = data.test_labels.bincount(), torch.cat([data.train_labels, data.test_labels]).bincount()
    assert ((test - everything * 360 / 1797).abs() < 1.5).all()
    assert data.test_ids[:8].tolist() == DIGITS_TEST_BEGINNING
    assert int(data.test_ids.sum()) == DIGITS_TEST_SUM


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its str: bytes or text, as whoever reads the file chooses."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_str_of_python_2(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_str_of_python_2


def dumps(value: object, protocol: int) -> bytes:
    file = io.BytesIO()
    (Python2Pickler if protocol == 2 else pickle.Pickler)(file, protocol=protocol).dump(value)
    return file.getvalue()


def write_cifar(root: Path, hundred: bool, protocol: int) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Files of the python version; the archives' own were pickled by Python 2 with protocol 2."""
    rng = np.random.default_rng(2)
    folder = root / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    names = ["train", "test"] if hundred else [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    written = {}
    for name in names:
        pixels = rng.integers(0, 256, (3, 3072)).astype(np.uint8)
        labels = rng.integers(0, 100 if hundred else 10, 3).tolist()
        batch = {b"data": pixels, b"filenames": [b"a.png", b"b.png", b"c.png"], b"batch_label": b"testing"}
        batch |= {b"fine_labels": labels, b"coarse_labels": [0, 1, 2]} if hundred else {b"labels": labels}
        (folder / name).write_bytes(dumps(batch, protocol))
        written[name] = (pixels, labels)
    return written


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("hundred", [False, True])
def test_cifar_from_the_python_version(tmp_path, hundred, protocol):
    written = write_cifar(tmp_path, hundred, protocol)
    data = load("cifar100" if hundred else "cifar10", tmp_path)
    *train, test = written
    assert data.num_classes == (100 if hundred else 10)
    assert data.train_images.shape == (3 * len(train), 3, 32, 32)
    assert data.train_labels.tolist() == [label for name in train for label in written[name][1]]
    assert data.test_labels.tolist() == written[test][1]
    # A row is 1024 red values in row order, then green, then blue.
    pixels = written[train[-1]][0]
    image = data.train_images[-1]
    for channel, row, column in ((0, 0, 1), (1, 2, 3), (2, 31, 31)):
        expected = int(pixels[-1, 1024 * channel + 32 * row + column])
        assert round(float(image[channel, row, column]) * 255) == expected


class Hostile:
    def __reduce__(self):
        return os.system, ("touch should-not-exist",)


def test_a_cifar_file_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, False, 2)
    payload = pickle.dumps({b"data": Hostile(), b"labels": [1]})
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(payload)
    with pytest.raises(ValueError, match=r"data_batch_3.*system"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "should-not-exist").exists()


@pytest.mark.parametrize("damage", ["truncated", "labels", "shape"])
def test_a_damaged_cifar_file_is_named(tmp_path, damage):
    write_cifar(tmp_path, False, 2)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    batch = pickle.loads(path.read_bytes(), encoding="bytes")
    if damage == "labels":
        batch[b"labels"] = [1]
    if damage == "shape":
        batch[b"data"] = batch[b"data"][:, :3000]
    raw = dumps(batch, protocol=2)
    path.write_bytes(raw[: len(raw) // 2] if damage == "truncated" else raw)
    with pytest.raises(ValueError, match=r"test_batch .*fetch it again"):
        load("cifar10", tmp_path)


FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def pack(root: Path, name: str, prefix: str = "") -> Path:
    """The archive in place of the folder."""
    folder, archive = root / FOLDERS[name], root / ARCHIVES[name]
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, prefix + folder.name)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return archive


FUZZ = """
import pickle, random, sys
import numpy as np
from ella_cuda.data.cifar import parse_cifar_batch

for protocol in (0, 2, 5):
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"batch_label": b"x", b"filenames": [b"a"] * 2}
    whole = pickle.dumps(batch, protocol=protocol)
    rng = random.Random(protocol)
    refused = 0
    head = [i for i in range(len(whole)) if i < 300 or i > len(whole) - 300]
    for _ in range(300):
        raw = bytearray(whole)
        raw[rng.choice(head)] = rng.randrange(256)
        try:
            parse_cifar_batch(bytes(raw), "the file", b"labels")
        except ValueError as error:
            assert "the file" in str(error)
            refused += 1
    assert refused > 75, refused
print("survived")
"""


def test_no_damaged_byte_does_more_than_a_clear_error(tmp_path):
    """In a process of its own: what is at stake is a crash."""
    done = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "survived\n", done.stderr[-2000:]


def test_a_number_of_bytes_that_a_file_does_not_have_takes_no_memory():
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}
    raw = pickle.dumps(batch, protocol=5)
    place = raw.index(pickle.BYTEARRAY8) + 1
    assert raw[place : place + 8] == (2 * 3072).to_bytes(8, "little")
    for count in (1 << 28, (1 << 64) - 1):
        damaged = raw[:place] + count.to_bytes(8, "little") + raw[place + 8 :]
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="it is not a readable CIFAR batch"):
                parse_cifar_batch(damaged, "it", b"labels")
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


class Records:
    """Pickles to an array whose type has an object field, its pointers taken from the file."""

    def __reduce__(self):
        array = np.zeros(2, np.dtype([("a", "u8")]))
        return array.__reduce__()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Records(), "records|type"),
        (np.zeros(2, np.float32), "type 'f4'"),
        ([1, "2"], "list of integers"),
        ([True, 2], "list of integers"),
    ],
)
def test_labels_are_integers_and_nothing_else(tmp_path, labels, message):
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": labels}
    with pytest.raises(ValueError, match=message):
        parse_cifar_batch(pickle.dumps(batch, protocol=2), "it", b"labels")


def test_a_file_cannot_change_what_reads_it():
    """A state for a stand-in's class would outlive the file."""
    payload = b"\x80\x02cnumpy\ndtype\n}(X\x08\x00\x00\x00resolvedK\x01ub."
    with pytest.raises(ValueError, match="a state for a type"):
        parse_cifar_batch(payload, "it", b"labels")


@pytest.mark.parametrize(("name", "prefix"), [("cifar10", ""), ("cifar100", "./")])
def test_an_archive_is_its_folder_and_is_not_unpacked(tmp_path, name, prefix):
    write_cifar(tmp_path, name == "cifar100", 2)
    unpacked = load(name, tmp_path)
    pack(tmp_path, name, prefix)
    packed = load(name, tmp_path)
    for part in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(packed, part), getattr(unpacked, part))
    assert [p.name for p in tmp_path.iterdir()] == [ARCHIVES[name]]


@pytest.mark.parametrize("kept", ["half", "all but the checksum", "a bit changed", "another format"])
def test_a_damaged_archive_is_named(tmp_path, kept):
    write_cifar(tmp_path, False, 2)
    archive = pack(tmp_path, "cifar10")
    padded = gzip.decompress(archive.read_bytes()) + bytes(1 << 20)  # past the end that tar looks for
    raw = bytearray(gzip.compress(padded))
    archive.write_bytes(raw)
    load("cifar10", tmp_path)
    raw[len(raw) // 2] ^= kept == "a bit changed"
    cut = {"half": raw[: len(raw) // 2], "all but the checksum": raw[:-6], "another format": b"<html>not here</html>"}
    archive.write_bytes(cut.get(kept, raw))
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz is a damaged or truncated"):
        load("cifar10", tmp_path)


def test_an_archive_without_a_batch_names_it(tmp_path):
    write_cifar(tmp_path, False, 2)
    (tmp_path / FOLDERS["cifar10"] / "data_batch_4").unlink()
    pack(tmp_path, "cifar10")
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz has no cifar-10-batches-py/data_batch_4"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, tarfile.REGTYPE])
def test_a_small_archive_of_many_zeros_is_refused_in_little_memory(tmp_path, kind):
    """As a header's own text, as a name, as the map of a sparse file, and as a file that nobody asks for."""
    size = 200_000_000
    header = tarfile.TarInfo("b")
    header.type, header.size = kind, 300_000_000 if kind == tarfile.REGTYPE else size
    head = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    if kind == tarfile.GNUTYPE_SPARSE:
        head[482] = 1  # the map goes on in the next block, and so on
        head[148:156] = b"%06o\0 " % (sum(head[:148]) + 256 + sum(head[156:]))
    block = bytearray(512)
    block[504] = kind == tarfile.GNUTYPE_SPARSE
    with gzip.open(tmp_path / "a.tar.gz", "wb", compresslevel=1) as file:
        file.write(head)
        file.write(bytes(block) * (size // 512))
    words = "more than the 268435456" if kind == tarfile.REGTYPE else "has more headers than CIFAR's archives have"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=words):
            read_archive(tmp_path / "a.tar.gz", ["a"])
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_an_archive_can_neither_write_nor_run_nor_point_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, True, 2)
    outside = tmp_path / "outside"
    outside.write_bytes((tmp_path / FOLDERS["cifar100"] / "train").read_bytes())
    with tarfile.open(tmp_path / ARCHIVES["cifar100"], "w:gz") as tar:
        tar.add(outside, "../should-not-exist")
        tar.add(tmp_path / FOLDERS["cifar100"] / "test", "cifar-100-python/test")
        link = tarfile.TarInfo("cifar-100-python/train")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(link)
    (tmp_path / FOLDERS["cifar100"] / "train").unlink()
    with pytest.raises(ValueError, match=r"has no cifar-100-python/train"):
        load("cifar100", tmp_path)
    (tmp_path / FOLDERS["cifar100"] / "train").write_bytes(pickle.dumps({b"data": Hostile(), b"fine_labels": [1]}))
    pack(tmp_path, "cifar100")
    with pytest.raises(ValueError, match=r"tar\.gz: cifar-100-python/train.*system"):
        load("cifar100", tmp_path)
    assert not [p for p in (*tmp_path.rglob("should-not-exist"), *tmp_path.parent.glob("should-not-exist"))]


def test_a_file_too_large_for_cifar_is_not_read(tmp_path, monkeypatch):
    write_cifar(tmp_path, True, 2)
    pack(tmp_path, "cifar100")
    monkeypatch.setattr("ella_cuda.data.cifar.MAX_MEMBER_BYTES", 1000)
    with pytest.raises(ValueError, match=r"cifar-100-python/(train|test) has \d+ bytes, more than the 1000"):
        load("cifar100", tmp_path)


def test_an_archive_with_a_file_twice_is_refused_before_it_is_read_again(tmp_path):
    size = 40_000_000
    header = tarfile.TarInfo("a")
    header.size = size
    with gzip.open(tmp_path / "a.tar.gz", "wb", compresslevel=1) as file:
        for name in ("a", "./a"):
            header.name = name
            file.write(header.tobuf(tarfile.GNU_FORMAT) + bytes(-(-size // 512) * 512))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"a\.tar\.gz has a twice in it"):
            read_archive(tmp_path / "a.tar.gz", ["a"])
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size  # its parts, and the whole
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_archive_with_a_file_of_negative_size_is_refused(tmp_path, name):
    header = tarfile.TarInfo(name)
    header.size = -1
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
    with pytest.raises(ValueError, match=rf"a\.tar\.gz.*({name} has -1 bytes|damaged or truncated)"):
        read_archive(tmp_path / "a.tar.gz", ["a"])


def digests(folder: Path) -> dict[str, str]:
    """The MD5 of every file's content, compressed or not, by its name without .gz."""
    contents = {p.name.removesuffix(".gz"): p for p in folder.iterdir()}
    return {
        name: hashlib.md5(gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()).hexdigest()
        for name, p in contents.items()
    }


@pytest.mark.parametrize("compress", [False, True])
def test_files_as_published_are_silent_and_others_named_once(tmp_path, monkeypatch, compress):
    write_mnist(tmp_path, compress)
    monkeypatch.setitem(PUBLISHED, "mnist", digests(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("mnist", tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.arange(5), compress)
    with pytest.warns(UserWarning, match="mnist: not as published") as caught:
        data = load("mnist", tmp_path)
    assert data.test_labels.tolist() == [0, 1, 2, 3, 4]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert f"t10k-labels-idx1-ubyte in {tmp_path};" in message and len(message) < 150 + len(str(tmp_path))
    assert message.count("ubyte") == 1


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_as_published_is_silent_and_a_changed_pixel_is_not(tmp_path, monkeypatch, packed):
    written = write_cifar(tmp_path, False, 2)
    monkeypatch.setitem(PUBLISHED, "cifar10", digests(tmp_path / FOLDERS["cifar10"]))
    path = tmp_path / FOLDERS["cifar10"] / "data_batch_2"
    raw, pixels = path.read_bytes(), written["data_batch_2"][0].tobytes()
    at = raw.find(pixels[:40]) + 20
    changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    files = {p: p.read_bytes() for p in path.parent.iterdir()}
    for content, expected in ((raw, 0), (changed, 1)):
        path.parent.mkdir(exist_ok=True)
        for file, as_written in files.items():
            file.write_bytes(content if file == path else as_written)
        if packed:
            pack(tmp_path, "cifar10")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load("cifar10", tmp_path)
        assert len(caught) == expected
    assert "data_batch_2" in str(caught[0].message) and "data_batch_1" not in str(caught[0].message)


def test_another_data_sets_file_is_refused(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setitem(PUBLISHED, "fashion-mnist", digests(tmp_path))
    with pytest.raises(ValueError, match="is fashion-mnist's file, not mnist's"):
        load("mnist", tmp_path)
    assert len(load("fashion-mnist", tmp_path).train_images) == 12


def test_every_checksum_names_one_file():
    names = {(data, file) for data, files in PUBLISHED.items() for file in files}
    assert len({d for files in PUBLISHED.values() for d in files.values()}) == len(names) == 16
    assert all(set(PUBLISHED[d]) == set(sources.IDX_FILES) for d in ("mnist", "fashion-mnist"))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifars_checksums_are_torchvisions(name):
    try:
        from torchvision import datasets
    except Exception as error:
        pytest.skip(f"torchvision does not import: {error}")
    kind = getattr(datasets, name.upper())
    assert PUBLISHED[name] == {file: digest for file, digest in [*kind.train_list, *kind.test_list]}
    assert (kind.filename, kind.base_folder) == (ARCHIVES[name], FOLDERS[name])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_our_cifar_is_torchvisions(tmp_path, name):
    try:
        from torchvision import datasets
    except Exception as error:
        pytest.skip(f"torchvision does not import: {error}")
    write_cifar(tmp_path, name == "cifar100", 2)
    kind = getattr(datasets, name.upper())

    class Unchecked(kind):  # the checksums are those of the real archives
        def _check_integrity(self) -> bool:
            return True

        def _load_meta(self) -> None:
            pass

    data = load(name, tmp_path)
    for train, images, labels in (
        (True, data.train_images, data.train_labels),
        (False, data.test_images, data.test_labels),
    ):
        theirs = Unchecked(str(tmp_path), train=train)
        assert torch.equal((images * 255).round().byte().permute(0, 2, 3, 1), torch.from_numpy(theirs.data))
        assert labels.tolist() == list(theirs.targets)


def test_download_goes_through_torchvision_into_its_layout(tmp_path, monkeypatch):
    asked = []

    def fetch(name: str, root: Path) -> None:
        asked.append(name)
        write_mnist(root / name / "raw")

    monkeypatch.setattr(sources, "_download", fetch)
    assert len(load("mnist", tmp_path, download=True).train_images) == 12
    assert len(load("mnist", tmp_path, download=True).train_images) == 12
    assert asked == ["MNIST"]  # what is there is not fetched again

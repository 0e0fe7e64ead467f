"""Each data set from small files in its real format."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ella_cuda.data import Dataset, load, sources
from ella_cuda.data.checksums import PUBLISHED
from ella_cuda.data.cifar import parse_cifar_batch

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
    ("file", "count", "words"),
    [
        ("t10k-labels-idx1-ubyte", 6, r"5 images and .* 6 labels"),
        ("train-images-idx3-ubyte", 12, r"train-images-idx3-ubyte.gz must have 3 dimension"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, file, count, words):
    write_mnist(tmp_path)
    write_idx(tmp_path / file, np.zeros(count), compress=True)
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
        FileNotFoundError, match=r"cifar-10-python\.tar\.gz not found, nor all of .*cifar-10-batches-py/data_batch_1"
    ):
        load("cifar10", tmp_path)


def test_fashion_mnist_names_its_debian_package(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"none\. .*apt-get install dataset-fashion-mnist"):
        sources._idx("fashion-mnist", "FashionMNIST", (tmp_path / "none",), tmp_path, False)
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


def test_the_digits_split_keeps_classes_in_proportion():
    data = load("digits")
    test, everything = data.test_labels.bincount(), torch.cat([data.train_labels, data.test_labels]).bincount()
    assert ((test - everything * 360 / 1797).abs() < 1.5).all()


def test_the_digits_split_never_changes():
    """Published numbers belong to this split."""
    data = load("digits")
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


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(2, [("a", "u8")]), "type 'V8'"),
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
    with pytest.raises(ValueError, match="not a readable CIFAR batch"):
        parse_cifar_batch(payload, "it", b"labels")


@pytest.mark.parametrize("prefix", ["", "./"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
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


@pytest.fixture
def of_torchvision(name):
    """Torchvision's class of a data set."""
    try:
        from torchvision import datasets
    except Exception as error:
        pytest.skip(f"torchvision does not import: {error}")
    return getattr(datasets, name.upper())


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifars_checksums_are_torchvisions(name, of_torchvision):
    published = [*of_torchvision.train_list, *of_torchvision.test_list]
    assert PUBLISHED[name] == dict(published)
    assert (of_torchvision.filename, of_torchvision.base_folder) == (ARCHIVES[name], FOLDERS[name])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_our_cifar_is_torchvisions(tmp_path, name, of_torchvision):
    write_cifar(tmp_path, name == "cifar100", 2)

    class Unchecked(of_torchvision):  # the checksums are those of the real archives
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

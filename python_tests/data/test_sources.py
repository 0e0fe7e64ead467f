"""Each data set from small files in its real format."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ella_cuda.data import load, sources

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


def test_images_and_labels_must_be_equally_many(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(6), compress=True)
    with pytest.raises(ValueError, match=r"5 images and .* 6 labels"):
        load("mnist", tmp_path)


def test_labels_outside_the_classes_are_refused(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(12, 10), compress=True)
    with pytest.raises(ValueError, match=r"train_labels must lie in 0\.\.9"):
        load("mnist", tmp_path)


def test_images_of_one_dimension_are_refused(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros(12), compress=True)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz must have 3 dimension"):
        load("mnist", tmp_path)


def test_missing_files_say_where_and_how(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"MNIST/raw.*--download"):
        load("mnist", tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError):
        load("mnist", tmp_path)
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py"):
        load("cifar10", tmp_path)


def test_fashion_mnist_names_its_debian_package(tmp_path, monkeypatch):
    missing = sources._idx_source("Fashion-MNIST", "FashionMNIST", (tmp_path / "none",), "apt-get install x")
    with pytest.raises(FileNotFoundError, match=r"none\. apt-get install x"):
        missing(tmp_path, False)
    if not sources.DEBIAN_FASHION_MNIST.exists():
        with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
            load("fashion-mnist", tmp_path)


@pytest.mark.skipif(not sources.DEBIAN_FASHION_MNIST.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist(tmp_path):
    data = load("fashion-mnist", tmp_path)
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_images.shape == (10000, 1, 28, 28)
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    # The mean and standard deviation that everyone normalises Fashion-MNIST with.
    assert abs(float(data.train_images.double().mean()) - 0.2860) < 5e-5
    assert abs(float(data.train_images.double().std()) - 0.3530) < 5e-5


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


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"digits, mnist, fashion-mnist, cifar10, cifar100, got 'svhn'"):
        load("svhn")

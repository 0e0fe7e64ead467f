"""Where each data set comes from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ella_cuda.data import labelled
from ella_cuda.data.checksums import PUBLISHED, compare, md5
from ella_cuda.data.cifar import parse_cifar_batch, read_archive
from ella_cuda.data.dataset import Dataset
from ella_cuda.data.draws import stratified_order
from ella_cuda.data.idx import read_idx

DEFAULT_ROOT = Path("data")
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
DIGITS_TEST_SIZE = 360
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
    """Load a data set by name, or from a path, see :func:`ella_cuda.data.folder`.

    Args:
        name: ``digits`` (the 1797 8x8 images that ship with scikit-learn, split 1437/360 once and for all, classes in
            proportion), ``mnist``, ``fashion-mnist``, ``cifar10`` or ``cifar100``; or a path, which has a separator or is there.
        root: the folder with the data, laid out as torchvision does (``root/MNIST/raw``, ``root/FashionMNIST/raw``,
            ``root/cifar-10-batches-py``, ``root/cifar-100-python``), or holding an IDX data set's four files itself,
            plain or ``.gz``, or CIFAR's archive as published (``root/cifar-10-python.tar.gz``,
            ``root/cifar-100-python.tar.gz``), which is read without unpacking it. Default ``data``. Fashion-MNIST is
            also found where Debian's package ``dataset-fashion-mnist`` puts it.
        download: fetch what is missing into ``root``, through torchvision.

    Returns:
        A :class:`Dataset` with pixels in 0..1.

    Warns:
        UserWarning: a file's content is not the published one, by its MD5. Files of your own in the same format load;
            the warning is for those that are not.

    Raises:
        ValueError: an unknown name, a file that is damaged or truncated, or one that is another data set's.
        FileNotFoundError: the files are not there; the message lists where they were looked for and how to get them.
        RuntimeError: a download failed.
    """
    if name not in SOURCES:
        if is_path(name):
            return labelled.folder(name)
        raise ValueError(f"name must be one of {', '.join(SOURCES)}, or a path that is there; got {name!r}.")
    return SOURCES[name](DEFAULT_ROOT if root is None else Path(root), download)


def is_path(name: str) -> bool:
    """Whether that is a path and not a data set's name: it has a separator or is there."""
    return name not in SOURCES and bool(name) and (os.sep in name or "/" in name or os.path.lexists(name))


def _tensors(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], num_classes: int) -> Dataset:
    (train_images, train_labels), (test_images, test_labels) = train, test

    def images(pixels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pixels.astype(np.float32)).div_(255)

    def labels(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64))

    return Dataset(images(train_images), labels(train_labels), images(test_images), labels(test_labels), num_classes)


def _digits(root: Path, download: bool) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).div_(16)[:, None]
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    ids = torch.arange(len(images))
    order = stratified_order(labels, ids, seed=0, purpose="digits test split")
    test, train = order[:DIGITS_TEST_SIZE].sort().values, order[DIGITS_TEST_SIZE:].sort().values
    return Dataset(images[train], labels[train], images[test], labels[test], 10, train, test)


def _idx(name: str, torchvision_name: str, system_folders: tuple[Path, ...], root: Path, download: bool) -> Dataset:
    folders = (root, root / torchvision_name / "raw", *system_folders)
    files = _find_idx(folders)
    if files is None and download:
        _download(torchvision_name, root)
        files = _find_idx(folders)
    if files is None:
        package = (
            f"install Debian's package dataset-{name} (apt-get install dataset-{name}), " if system_folders else ""
        )
        raise FileNotFoundError(
            f"{name}: no folder holds {', '.join(IDX_FILES)} (plain or .gz); looked in {', '.join(map(str, folders))}. Name the folder that "
            f"holds them as root (--data-dir), {package}or let download=True (--download) fetch them."
        )
    contents, arrays = zip(*map(read_idx, files), strict=True)
    train_images, train_labels, test_images, test_labels = arrays
    compare(name, [(str(f), n, md5(raw)) for f, n, raw in zip(files, IDX_FILES, contents, strict=True)])
    return _tensors((train_images[:, None], train_labels), (test_images[:, None], test_labels), 10)


def _find_idx(folders: tuple[Path, ...]) -> list[Path] | None:
    """The four files of the first folder that has all of them, in the order of IDX_FILES."""
    for folder in folders:
        found = [next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None) for name in IDX_FILES]
        if all(found):
            return [p for p in found if p is not None]
    return None


def _cifar(
    name: str, archive: str, folder: str, label_key: bytes, num_classes: int, root: Path, download: bool
) -> Dataset:
    read = _cifar_contents(root, archive, folder, list(PUBLISHED[name]))
    if read is None and download:
        _download(name.upper(), root)
        read = _cifar_contents(root, archive, folder, list(PUBLISHED[name]))
    if read is None:
        raise FileNotFoundError(
            f"{name}: {root / archive} not found, nor all of {', '.join(str(root / folder / f) for f in PUBLISHED[name])}. Name the folder "
            f"that holds {archive} (the python version) or {folder}/ (what is in it) as root (--data-dir), or let download=True "
            "(--download) fetch it."
        )
    *train, test = (parse_cifar_batch(raw, where, label_key) for where, raw in read.values())
    compare(name, [(where, f, md5(raw)) for f, (where, raw) in read.items()])
    images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return _tensors((images, labels), test, num_classes)


def _cifar_contents(root: Path, archive: str, folder: str, names: list[str]) -> dict[str, tuple[str, bytes]] | None:
    """Each file's place, for messages, and content, from the folder if it has them all or else from the archive."""
    paths = {n: root / folder / n for n in names}
    if all(p.is_file() for p in paths.values()):
        return {n: (str(p), p.read_bytes()) for n, p in paths.items()}
    if not (root / archive).is_file():
        return None
    contents = read_archive(root / archive, [f"{folder}/{n}" for n in names])
    return {n: (f"{root / archive}: {folder}/{n}", contents[f"{folder}/{n}"]) for n in names}


def _download(torchvision_name: str, root: Path) -> None:
    try:
        from torchvision import datasets
    except Exception as error:  # torchvision beside a torch it was not built for fails with errors of many types
        raise RuntimeError(
            f"downloading needs torchvision, and importing it failed ({error}). Install the torchvision that belongs "
            f"to torch {torch.__version__}, or fetch the files yourself."
        ) from error
    try:
        for train in (True, False):
            getattr(datasets, torchvision_name)(str(root), train=train, download=True)
    except Exception as error:  # network, disk and checksum errors alike
        raise RuntimeError(f"downloading {torchvision_name} to {root} failed: {error}") from error


SOURCES: dict[str, Callable[[Path, bool], Dataset]] = {
    "digits": _digits,
    "mnist": functools.partial(_idx, "mnist", "MNIST", ()),
    "fashion-mnist": functools.partial(_idx, "fashion-mnist", "FashionMNIST", (DEBIAN_FASHION_MNIST,)),
    "cifar10": functools.partial(_cifar, "cifar10", "cifar-10-python.tar.gz", "cifar-10-batches-py", b"labels", 10),
    "cifar100": functools.partial(
        _cifar, "cifar100", "cifar-100-python.tar.gz", "cifar-100-python", b"fine_labels", 100
    ),
}

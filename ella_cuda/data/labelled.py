"""Labelled images of one's own: a folder of each class, a ``.npz`` of arrays, or a ``.csv`` of paths and labels.

torchvision's ``ImageFolder`` gives the endings of image files. Its walk is not used: the walk skips folders that cannot be read, takes hidden
folders for classes, follows links in circles, and does not say what it left out.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ella_cuda.data.dataset import Dataset
from ella_cuda.data.draws import bits
from ella_cuda.files import no_file
from ella_cuda.progress import bar_size

IMAGE_SIZE = 64  # pixels
SPLIT = 0.2  # share of each class to evaluate on
MAX_CLASSES = 1000
SHOWN = 5  # names in a message
IMBALANCE = 10.0  # times the smallest class, from which the largest is named
TEST_PARTS = ("test", "val", "valid", "validation")  # folders beside train/, the first that is there
PARTS = ("train", "training", "testing", *TEST_PARTS)  # folders that are taken for no classes where there are no others
COLUMNS = {  # of a table: names of each column
    "path": ("path", "file", "filename", "image"),
    "label": ("label", "class", "target"),
    "part": ("split", "part", "set"),
}
ARRAYS = (("images", "labels", ""), ("train_images", "train_labels", "train"), ("test_images", "test_labels", "test"))
IGNORED = ("__MACOSX",)  # folders that archives bring

Source = Path | np.ndarray


@dataclasses.dataclass
class Labelled:
    """Images that are not read yet.

    Attributes:
        where: what they are of.
        names: of each, for messages and tables.
        labels: the class' name of each; empty where nobody knows.
        parts: of each "train", "test", or "" where that is left to a split.
        sources: files, or ``(h, w)`` or ``(h, w, C)`` arrays of uint8.
        notes: what should be said of them.
    """

    where: Path
    names: list[str] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)
    parts: list[str] = dataclasses.field(default_factory=list)
    sources: list[Source] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, label: str, part: str, source: Source) -> None:
        for values, value in zip(
            (self.names, self.labels, self.parts, self.sources), (name, label, part, source), strict=True
        ):
            values.append(value)  # type: ignore[arg-type]

    def only(self, chosen: Sequence[bool]) -> Labelled:
        """Those that are chosen."""
        lists = {name: [*compress(getattr(self, name), chosen)] for name in ("names", "labels", "parts", "sources")}
        return dataclasses.replace(self, **lists)


def folder(
    path: str | os.PathLike[str],
    image_size: int | None = None,
    split: float = SPLIT,
    *,
    seed: int = 0,
    skip_unreadable: bool = False,
) -> Dataset:
    """Labelled images as a data set.

    ``path`` is one of

    - a folder with a folder of images for each class, whose names are the classes', at any depth below; or with ``train/`` and ``test/`` (or
      ``val/``) that hold such folders;
    - a ``.npz`` with ``images`` and ``labels``, or ``train_images``, ``train_labels``, ``test_images``, ``test_labels``: images
      ``(N, h, w)``, ``(N, h, w, C)`` or ``(N, C, h, w)`` of uint8, or of floats in 0..1, with 1 or 3 channels; labels integers or strings;
    - a ``.csv`` in UTF-8 with a header: columns ``path`` (from the table's folder on) and ``label``, where there is one also ``split``
      (train or test).

    Images are stretched to squares. They are grey if all of them are, else RGB; transparency is dropped. Files are turned as their EXIF
    entry says.

    Args:
        path: the folder or file.
        image_size: height and width, in pixels; None is 64.
        split: share of each class' images to evaluate on, at least 0 and below 1, where no test part is given; 0 leaves it empty.
        seed: chooses them.
        skip_unreadable: leave out files that cannot be read, and name them in ``notes``, in place of an error.

    Returns:
        A :class:`Dataset` with pixels in 0..1; ``class_names``, ``names`` of the images by id, and ``notes``: what is to be known before
        training.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: no such layout, fewer than two classes, more than 1,000, a class without images, a class only in the test part, images
            that cannot be read, or arrays or a table that do not fit. The message names what is wrong.
    """
    size = IMAGE_SIZE if image_size is None else image_size
    if size < 1:
        raise ValueError(f"image_size must be at least 1 pixel, got {size}.")
    if not 0 <= split < 1:
        raise ValueError(f"split must be at least 0 and below 1, got {split}.")
    found = labelled(path)
    classes = _classes(found)
    pixels, kept = read_images(found, size, skip_unreadable)
    position = {name: i for i, name in enumerate(classes)}
    labels = torch.tensor([position[found.labels[i]] for i in kept], dtype=torch.int64)
    if gone := set(range(len(classes))) - set(labels.tolist()):
        raise ValueError(f"{found.where}: no image of {_few(classes[i] for i in sorted(gone))} can be read.")
    parts = [found.parts[i] for i in kept]
    is_test = torch.tensor([part == "test" for part in parts])
    if not is_test.any() and split:
        is_test = _split(labels, split, seed)
        found.notes.append(f"{int(is_test.sum())} of {len(kept)} images, {split:g} of each class, are evaluated on")
    order = torch.cat([torch.nonzero(~is_test).flatten(), torch.nonzero(is_test).flatten()])
    count = int((~is_test).sum())
    train, test = order[:count], order[count:]
    untrained = [classes[i] for i in sorted(set(labels[test].tolist()) - set(labels[train].tolist()))]
    if untrained:
        raise ValueError(f"{found.where}: no training image of {_few(untrained)}; add some, or leave the class out.")
    images = pixels.to(torch.float32).div_(255)
    names = [found.names[i] for i in kept]
    notes = _survey(found.notes, classes, names, labels, pixels, is_test)
    return Dataset(
        images[train],
        labels[train],
        images[test],
        labels[test],
        len(classes),
        class_names=tuple(classes),
        names=tuple(names[i] for i in order.tolist()),
        notes=tuple(notes),
    )


def labelled(path: str | os.PathLike[str]) -> Labelled:
    """The images that ``path`` names, see :func:`folder`; files are not read yet.

    Raises:
        FileNotFoundError, ValueError: as :func:`folder`.
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{path} does not exist; name a folder with a folder of images for each class, a .npz or a .csv."
        )
    if path.is_dir():
        return _of_folder(path)
    readers: dict[str, Callable[[Path], Labelled]] = {".npz": _of_arrays, ".csv": _of_table}
    if path.suffix.lower() not in readers or no_file(path):
        raise ValueError(
            f"{path} must be a folder with a folder of images for each class, a .npz of arrays or a .csv of paths and labels."
        )
    return readers[path.suffix.lower()](path)


def image_files(paths: Iterable[str | os.PathLike[str]]) -> Labelled:
    """The images of files, whatever their names, and those in and below folders; without labels.

    Raises:
        FileNotFoundError: a path is not there. ValueError: there is no image, or a folder cannot be read.
    """
    given = [Path(path) for path in paths]
    found, others = Labelled(given[0] if len(given) == 1 else Path("the files")), Counter[str]()
    for path in given:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path} does not exist; name files of images, or folders of them.")
        for file in _files(path) if path.is_dir() else [path]:
            if file == path or file.suffix.lower() in _endings():
                found.add(str(file), "", "", file)
            else:
                others[file.suffix.lower() or file.name] += 1
    found.notes += _others(others)
    if not found.names:
        raise ValueError(f"{', '.join(map(str, given[:SHOWN]))}: no images there (of {', '.join(_endings())}).")
    return found


def _of_folder(path: Path) -> Labelled:
    found, others = Labelled(path), Counter[str]()
    top = _folders(path)
    parts = {"": path}
    if "train" in top and _folders(path / "train"):
        tests = [name for name in TEST_PARTS if name in top]
        parts = {"train": path / "train", **({"test": path / tests[0]} if tests else {})}
        left = [name for name in top if path / name not in parts.values()]
        if left:
            found.notes.append(f"not read: {_few(left)} beside {' and '.join(p.name for p in parts.values())}")
        if not tests:
            parts = {"": path / "train"}
    elif top and all(name.lower() in PARTS for name in top):
        raise ValueError(
            f"{path} has the folders {_few(top)}, which are called like parts of the data; call them train and test, with a folder of images "
            "for each class in both."
        )
    if loose := [name for root in dict.fromkeys((path, *parts.values())) for name in _loose(root)]:
        found.notes.append(f"not read: {_few(loose)} beside the folders")
    for part, root in parts.items():
        for name in _folders(root):
            before = len(found.names)
            for file in _files(root / name):
                if file.suffix.lower() in _endings():
                    found.add(str(file.relative_to(path)), name, part, file)
                else:
                    others[file.suffix.lower() or file.name] += 1
            if len(found.names) == before and part != "test":
                raise ValueError(
                    f"{root / name} holds no images (of {', '.join(_endings())}); remove the folder, or put its class' images there."
                )
    found.notes += _others(others)
    if not found.names:
        loose = sum(file.suffix.lower() in _endings() for file in _files(path))
        has = f"{loose} images and no folders" if loose else "no folders"
        raise ValueError(
            f"{path} holds {has}; it must have a folder of images for each class, or name a .csv of paths and labels."
        )
    return found


def _others(counts: Counter[str]) -> list[str]:
    """A note of files by their endings that are not read, where there are any."""
    what = ", ".join(f"{count} {ending}" for ending, count in counts.most_common(SHOWN))
    return [f"not read: {what}: images are {', '.join(_endings())}"] if what else []


def _endings() -> tuple[str, ...]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return IMG_EXTENSIONS


def _folders(path: Path) -> list[str]:
    """The names of the folders in a folder, but for hidden ones, in order."""
    try:
        return sorted(
            entry.name
            for entry in os.scandir(path)
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in IGNORED
        )
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); change its permissions, or leave it out."
        ) from error


def _loose(path: Path) -> list[str]:
    """The names of the images in a folder itself, and of links there that lead nowhere, but for hidden ones, in order."""
    return sorted(
        entry.name
        for entry in os.scandir(path)
        if not entry.name.startswith(".")
        and (not os.path.exists(entry) or (entry.is_file() and entry.name.lower().endswith(_endings())))
    )


def _files(path: Path) -> Iterator[Path]:
    """The files in and below a folder but for hidden ones, in order; a folder that links lead back to is read once, and none above it."""

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"{error.filename} cannot be read ({error.strerror}); change its permissions, or leave it out."
        )

    seen = set(map(str, Path(os.path.realpath(path)).parents))
    for at, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(at))
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(os.path.join(at, name)) not in seen
        )
        yield from (Path(at, name) for name in sorted(files) if not name.startswith("."))


def _of_arrays(path: Path) -> Labelled:
    found = Labelled(path)
    try:
        arrays = np.load(path, allow_pickle=False)  # a pickle may run code
        if isinstance(arrays, np.ndarray):
            raise ValueError("it is a single array")
        with arrays:
            named = {name: arrays[name] for kinds in ARRAYS for name in kinds[:2] if name in arrays.files}
            names = arrays.files
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(
            f"{path} is no readable .npz of plain arrays ({error}); write it by numpy.savez with images and labels of numbers or strings."
        ) from error
    for images_name, labels_name, part in ARRAYS:
        if images_name in named and labels_name in named:
            images, labels = _checked_arrays(path, images_name, named[images_name], labels_name, named[labels_name])
            for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                found.add(f"{images_name}[{i}]", str(label), part, image)
    if not found.names or set(found.parts) == {"test"}:
        raise ValueError(
            f"{path} must hold images and labels, or train_images, train_labels, test_images and test_labels, and some images; got "
            f"{', '.join(names) or 'nothing'}."
        )
    return found


def _checked_arrays(
    path: Path, images_name: str, images: np.ndarray, labels_name: str, labels: np.ndarray
) -> tuple[np.ndarray, list[Any]]:
    """Images ``(N, h, w)`` or ``(N, h, w, 3)`` of uint8, and labels."""
    where = f"{path}: {images_name}"
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] != 3) or 0 in images.shape[1:]:
        raise ValueError(
            f"{where} must have shape (N, h, w), (N, h, w, C) or (N, C, h, w) with C 1 or 3, got {images.shape}."
        )
    if images.dtype.kind == "f":
        if not (np.isfinite(images).all() and images.min(initial=0) >= 0 and images.max(initial=0) <= 1):
            raise ValueError(f"{where} of floats must lie in 0..1, got {images.min()} to {images.max()}.")
        images = np.rint(images * 255).astype(np.uint8)
    if images.dtype != np.uint8:
        raise ValueError(f"{where} must be uint8, or floats in 0..1, got {images.dtype}.")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iuUS":
        raise ValueError(
            f"{path}: {labels_name} must be {len(images)} integers or strings, one for each image, got {labels.dtype} {labels.shape}."
        )
    return images, [
        label.decode("utf-8", "replace") if isinstance(label, bytes) else label for label in labels.tolist()
    ]


def _of_table(path: Path) -> Labelled:
    found = Labelled(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no readable table ({error}); save it as CSV in UTF-8.") from error
    header = text.split("\n", 1)[0]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=next((d for d in ",;\t" if d in header), ","))
    names = {(name or "").strip().lower(): name for name in rows.fieldnames or ()}
    columns = {key: next((names[w] for w in words if w in names), None) for key, words in COLUMNS.items()}
    if columns["path"] is None or columns["label"] is None:
        raise ValueError(
            f"{path} must begin with a line that names the columns path and label, got {header.strip()[:80]!r}."
        )
    given: dict[str, str] = {}
    try:
        for row in rows:
            name, label = ((row[columns[key]] or "").strip(" ") for key in ("path", "label"))
            part = (row[columns["part"]] or "").strip().lower() if columns["part"] is not None else ""
            if not name or not label:
                raise ValueError(
                    f"{path}, line {rows.line_num}: path and label must not be empty, got {name!r}, {label!r}."
                )
            if part not in ("", "train", *TEST_PARTS):
                raise ValueError(
                    f"{path}, line {rows.line_num}: {columns['part']} must be train or test, got {part!r}."
                )
            if given.setdefault(name, label) != label:
                raise ValueError(
                    f"{path}, line {rows.line_num}: {name} has the labels {given[name]!r} and {label!r}; keep one."
                )
            found.add(name, label, "test" if part in TEST_PARTS else part, path.parent / name)
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}; save it as CSV in UTF-8.") from error
    if not found.names:
        raise ValueError(f"{path} has no lines below the names of its columns.")
    return found


def _classes(found: Labelled) -> list[str]:
    """The classes' names in order, numbers by size.

    Raises:
        ValueError: too few or too many, one that the training images lack.
    """
    names = {label for label, part in zip(found.labels, found.parts, strict=True) if part != "test"}
    classes = sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    if others := sorted(set(found.labels) - names):
        raise ValueError(
            f"{found.where}: the test part has classes that the training part lacks: {_few(others)}; add training images or leave them out."
        )
    if len(classes) < 2:
        raise ValueError(f"{found.where} must have at least two classes, got {len(classes)}: {_few(classes)}.")
    if len(classes) > MAX_CLASSES:
        each = len(found.names) / len(classes)
        raise ValueError(
            f"{found.where} must have at most {MAX_CLASSES} classes, as error bars take a K x K matrix for each image; got {len(classes)} of "
            f"{each:.1f} images each. Are the labels names of images?"
        )
    return classes


def read_images(
    found: Labelled, size: int, skip_unreadable: bool = False, channels: int | None = None
) -> tuple[Tensor, list[int]]:
    """Read all images.

    Args:
        found: the images.
        size: their new height and width, in pixels.
        skip_unreadable: leave out those that cannot be read, and name them in ``found.notes``.
        channels: 1 or 3; None is 1 if all images are grey.

    Returns:
        ``(N, C, size, size)`` uint8, and the positions among ``found.sources`` of those that were read.

    Raises:
        ValueError: images that cannot be read; all of them with ``skip_unreadable``.
    """
    images: list[np.ndarray] = []
    kept, failures, sizes = [], [], set()
    reading = tqdm(found.sources, desc="reading images", unit="image", disable=None, delay=1, leave=False, **bar_size())
    for i, source in enumerate(reading):
        try:
            image, shape = read_image(source, size)
        except ValueError as error:
            failures.append(f"{found.names[i]} ({error})")
            continue
        images.append(image)
        kept.append(i)
        sizes.add(shape)
    if failures and (not skip_unreadable or not images):
        raise ValueError(
            f"{found.where}: {len(failures)} of {len(found.names)} images cannot be read: {_few(failures)}. Remove them"
            + (", or leave them out by --skip-unreadable (skip_unreadable=True)." if images else ".")
        )
    if failures:
        found.notes.append(f"left out, {len(failures)} that cannot be read: {'; '.join(failures)}")
    grey = sum(image.ndim == 2 for image in images)
    if channels is None:
        channels = 1 if grey == len(images) else 3
        if 0 < grey < len(images):
            found.notes.append(f"{grey} of {len(images)} images are grey, and read as RGB, as the others are")
    low, high = min(sizes), max(sizes)
    sides = f"{low[0]} x {low[1]}" if low == high else f"{low[0]} x {low[1]} to {high[0]} x {high[1]}"
    found.notes.append(f"{'grey' if channels == 1 else 'RGB'} images of {sides} pixels, stretched to {size} x {size}")
    out = torch.empty(len(images), channels, size, size, dtype=torch.uint8)
    for i, image in enumerate(images):
        out[i] = _with_channels(image, channels)
    return out, kept


def _with_channels(image: np.ndarray, channels: int) -> Tensor:
    """``(C, h, w)``; grey of colours by ITU-R 601-2's weights, as PIL's."""
    pixels = torch.from_numpy(image)
    if pixels.dim() == 2:
        return pixels.expand(channels, -1, -1)
    if channels == 3:
        return pixels.movedim(-1, 0)
    return (pixels.float() @ torch.tensor([0.299, 0.587, 0.114])).round().to(torch.uint8)[None]


def read_image(source: Source, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """An image as ``(size, size)`` or ``(size, size, 3)`` uint8, and the width and height that it had.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    from PIL import Image, ImageOps

    try:
        if isinstance(source, np.ndarray):
            image, kind = Image.fromarray(source), None
        else:
            if what := no_file(source):
                raise OSError(f"it is {what}")
            image = Image.open(source)
            kind = image.format
            image.draft("RGB", (2 * size, 2 * size))  # of a large JPEG, in less time
            image = ImageOps.exif_transpose(image)
        shape = image.size
        if image.mode == "F" or (image.mode == "I" and kind != "PPM"):
            raise ValueError("its pixels have 32 bits and no known scale; save it with 8 or 16 bits")
        if image.mode.startswith("I"):  # of which convert cuts off all above 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
        return np.array(image.resize((size, size), Image.Resampling.BILINEAR)), shape
    except Exception as error:  # decoders fail in whatever way a damaged file leads to
        raise ValueError(_reason(error, source)) from error


def _reason(error: Exception, source: Source) -> str:
    """Why an image cannot be read, in words without its name."""
    from PIL import UnidentifiedImageError

    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, UnidentifiedImageError):
        return "it is no image, or of a format that PIL does not read here"
    name = "" if isinstance(source, np.ndarray) else repr(os.fspath(source))
    return " ".join(str(error).replace(name, "it").split() if name else str(error).split()) or type(error).__name__


def _split(labels: Tensor, share: float, seed: int) -> Tensor:
    """Whether each image is evaluated on, ``(N,)`` bool; every class keeps one to train on."""
    drawn = bits(torch.arange(len(labels)), seed, "folder split")
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for c in labels.unique():
        members = torch.nonzero(labels == c).flatten()
        order = torch.from_numpy(np.argsort(drawn[members.numpy()], kind="stable"))
        chosen[members[order[: min(len(members) - 1, round(share * len(members)))]]] = True
    return chosen


def _survey(
    notes: Sequence[str], classes: Sequence[str], names: Sequence[str], labels: Tensor, pixels: Tensor, is_test: Tensor
) -> list[str]:
    """Notes to be read before training, a line each, the given ones among them."""
    counts = torch.bincount(labels[~is_test], minlength=len(classes)).tolist()
    shown = ", ".join(f"{name!r} {count}" for name, count in [*zip(classes, counts, strict=True)][: 4 * SHOWN])
    more = f" and {len(classes) - 4 * SHOWN} more" if len(classes) > 4 * SHOWN else ""
    lines = [
        f"{len(labels)} images of {len(classes)} classes: {sum(counts)} to train on ({shown}{more}), {int(is_test.sum())} to evaluate on",
        *notes,
    ]
    if few := [name for name, count in zip(classes, counts, strict=True) if count == 1]:
        lines.append(f"warning: one training image only: {_few(few)}")
    if max(counts) >= IMBALANCE * min(counts):
        least, most = (classes[counts.index(n)] for n in (min(counts), max(counts)))
        lines.append(
            f"warning: the classes are unequal: {most!r} has {max(counts)} training images, {least!r} {min(counts)}"
        )
    by_image: dict[bytes, list[int]] = {}
    for i, image in enumerate(pixels):
        by_image.setdefault(image.numpy().tobytes(), []).append(i)
    several = [same for same in by_image.values() if len(same) > 1]
    for what, of in (("under several labels", labels), ("both to train and to evaluate on", is_test)):
        if bad := [same for same in several if len({of[i].item() for i in same}) > 1]:
            which = " and ".join(names[i] for i in bad[0][:2])
            lines.append(f"warning: the same pixels {what}, {len(bad)} times, such as {which}")
    own = [(same, {(labels[i].item(), is_test[i].item()) for i in same}) for same in several]
    if copies := sum(len(same) - len(kinds) for same, kinds in own):
        lines.append(
            f"warning: {copies} of {len(labels)} images have the pixels of another one of their class, and count as more data"
        )
    return lines


def _few(names: Any) -> str:
    """Some of the names, and how many more; line breaks are shown as such."""
    names = [name if name.isprintable() else repr(name) for name in names]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

"""Labelled images of one's own: layouts that load, folders that must not, and what is said before training."""

import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ella_cuda import data

SIZE = 8


def image(path, value=100, size=(9, 7), mode="RGB", **save):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (value,) * len(mode) if mode in ("RGB", "RGBA") else value).save(path, **save)


def folders(root, classes=("a", "b"), count=5, mode="RGB"):
    for c, name in enumerate(classes):
        for i in range(count):
            image(root / name / f"{i}.png", 40 * c + i, mode=mode)
    return root


@pytest.mark.parametrize("mode, channels", [("RGB", 3), ("L", 1)])
def test_class_folders_give_their_pixels_names_and_a_split_by_class(tmp_path, mode, channels):
    found = data.folder(folders(tmp_path, count=10, mode=mode), SIZE, split=0.3)
    assert found.class_names == ("a", "b") and found.num_classes == 2
    assert found.train_images.shape == (14, channels, SIZE, SIZE)
    assert torch.bincount(found.test_labels).tolist() == [3, 3]
    for part in ("train", "test"):
        for x, y, i in zip(*(getattr(found, f"{part}_{k}") for k in ("images", "labels", "ids")), strict=True):
            label, _, file = found.names[i].partition(os.sep)
            assert label == "ab"[y]
            assert torch.equal(x, torch.full_like(x, 40 * int(y) + int(file[0])).div(255))


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    folders(tmp_path / "train", count=3)
    folders(tmp_path / "test", count=2)
    folders(tmp_path / "extra", count=2)
    found = data.folder(tmp_path, SIZE)
    assert [len(found.train_images), len(found.test_images)] == [6, 4]
    assert all(found.names[i].startswith("test") for i in found.test_ids)
    assert any("extra" in note for note in found.notes)


def test_a_class_called_train_is_a_class(tmp_path):
    assert data.folder(folders(tmp_path, ("train", "bus")), SIZE).class_names == ("bus", "train")


@pytest.mark.parametrize("shape", [(8, 6, 6), (8, 6, 6, 3), (8, 3, 6, 6), (8, 6, 6, 1)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_arrays(tmp_path, shape, kind):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    given = pixels if kind is np.uint8 else (pixels / 255).astype(kind)
    np.savez(tmp_path / "x.npz", images=given, labels=np.arange(8) % 2)
    found = data.folder(tmp_path / "x.npz", 6, split=0)
    first = pixels if shape[1] == 3 else pixels[:, None] if len(shape) == 3 else np.moveaxis(pixels, -1, 1)
    assert torch.equal(found.train_images, torch.from_numpy(np.ascontiguousarray(first)).div(255))
    assert found.train_labels.tolist() == [0, 1] * 4 and found.class_names == ("0", "1")
    assert len(found.test_images) == 0


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_of_paths_with_umlauts_spaces_and_line_breaks(tmp_path, delimiter):
    names = ["ä ö.png", "b\nb.png", "c d/e.png", "f.png"]
    lines = ["path,label,split"]
    for i, name in enumerate(names):
        image(tmp_path / name, 50 * i)
        lines.append(f'"{name}",{("10", "9")[i % 2]},{"train" if i < 3 else "test"}')
    (tmp_path / "t.csv").write_text("\ufeff" + "\n".join(lines).replace(",", delimiter), encoding="utf-8")
    found = data.folder(tmp_path / "t.csv", SIZE)
    assert found.names == tuple(names) and found.class_names == ("9", "10")
    assert found.train_labels.tolist() == [1, 0, 1] and found.test_labels.tolist() == [0]


def test_pixels_of_16_bits_palettes_transparency_and_turned_files(tmp_path):
    for label in "ab":
        image(tmp_path / label / "grey.png", 128 if label == "a" else 0, mode="L")
    (tmp_path / "b").joinpath("deep.png").parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((5, 5), 256 * 200 + 7, dtype=np.uint16)).save(tmp_path / "b" / "deep.png")
    (tmp_path / "b" / "deep.pgm").write_bytes(b"P5\n5 5\n65535\n" + bytes([200, 7] * 25))
    found = data.folder(tmp_path, SIZE, split=0)
    deep = found.train_images[["deep" in name for name in found.names]]
    assert found.channels == 1 and torch.equal(deep, torch.full((2, 1, SIZE, SIZE), 200 / 255))
    turned = Image.new("RGB", (4, 8))
    turned.paste(
        (255, 255, 255), (0, 0, 4, 4)
    )  # white above; EXIF 6 turns it by 90 degrees clockwise: white to the right
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a" / "turned.png", exif=exif)
    found = data.folder(tmp_path, 4, split=0)
    (x,) = found.train_images[[name.endswith("turned.png") for name in found.names]]
    assert found.channels == 3 and x[:, :, -1].min() == 1 and x[:, :, 0].max() == 0
    assert any("4 of 5 images are grey, and read as RGB" in note for note in found.notes)


def arrays(path, **named):
    np.savez(path / "x.npz", **named)
    return path / "x.npz"


def table(path, text, encoding="utf-8"):
    image(path / "a.png")
    (path / "t.csv").write_text(text, encoding=encoding)
    return path / "t.csv"


def with_file(path, name, content=b"no image"):
    folders(path)
    (path / name).write_bytes(content)
    return path


def truncated(path):
    folders(path)
    image(path / "a" / "cut.jpg", size=(64, 64))
    whole = (path / "a" / "cut.jpg").read_bytes()
    (path / "a" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    return path


def piped(path):
    folders(path)
    os.mkfifo(path / "a" / "pipe.png")
    return path


def dangling(path):
    folders(path)
    (path / "a" / "gone.png").symlink_to(path / "nowhere.png")
    return path


def bomb(path):
    folders(path)
    header = b"P6\n60000 60000\n255\n"
    (path / "a" / "bomb.ppm").write_bytes(header + b"\0" * 100)
    return path


def unseen_test_class(path):
    folders(path / "train")
    folders(path / "test", ("a", "c"))
    return path


def empty_folder_of(path, name):
    folders(path)
    (path / name).mkdir()
    return path


def damaged_archive(path):
    np.savez_compressed(path / "x.npz", images=np.zeros((4, 64, 64), np.uint8), labels=np.arange(4))
    content = bytearray((path / "x.npz").read_bytes())
    content[100:110] = b"\xff" * 10
    (path / "x.npz").write_bytes(content)
    return path / "x.npz"


ONES = np.ones((4, 5, 5), np.uint8)
HOSTILE = {  # a folder or file, and words of the error
    "nothing": (lambda p: p / "missing", "does not exist"),
    "an empty folder": (lambda p: p, "no folders"),
    "images without folders": (lambda p: [image(p / f"{i}.png") for i in range(3)] and p, "3 images and no folders"),
    "one class": (lambda p: folders(p, ("only",)), "at least two classes, got 1: only"),
    "an empty class": (lambda p: empty_folder_of(p, "empty"), "empty holds no images"),
    "more classes than error bars are for": (
        lambda p: arrays(p, images=np.zeros((1001, 1, 1), np.uint8), labels=np.arange(1001)),
        "at most 1000 classes",
    ),
    "a text file called .jpg": (
        lambda p: with_file(p, "a/x.jpg"),
        "1 of 11 images cannot be read: a/x.jpg (it is no image, or of a format",
    ),
    "an empty image": (lambda p: with_file(p, "b/x.png", b""), "b/x.png"),
    "a truncated image": (truncated, "cut.jpg"),
    "a pipe": (piped, "a pipe or device"),
    "a dangling link": (dangling, "gone.png (it does not exist)"),
    "pixels of no known scale": (
        lambda p: Image.fromarray(np.ones((5, 5), np.float32)).save(folders(p) / "a" / "x.tif") or p,
        "a/x.tif (its pixels have 32 bits",
    ),
    "parts without classes": (lambda p: folders(p, ("train", "test")), "folders test, train"),
    "parts of other names": (lambda p: folders(p / "Train") and folders(p / "Test") and p, "call them train and test"),
    "a decompression bomb": (bomb, "bomb.ppm"),
    "a resource fork's class alone": (lambda p: with_file(folders(p, ("a",)), "a/._x.jpg") and p, None),
    "a class only to evaluate on": (unseen_test_class, "classes that the training part lacks: c"),
    "a file of another kind": (lambda p: with_file(p, "x.txt") / "x.txt", "must be a folder"),
    "no archive": (lambda p: with_file(p, "x.npz") / "x.npz", "no readable .npz"),
    "pickled arrays": (
        lambda p: arrays(p, images=np.array([{}], dtype=object), labels=np.arange(1)),
        "no readable .npz of plain arrays",
    ),
    "a single array": (lambda p: np.save(p / "x.npy", ONES) or (p / "x.npy").rename(p / "x.npz"), "a single array"),
    "a damaged archive": (damaged_archive, "no readable .npz"),
    "arrays of other names": (lambda p: arrays(p, x=ONES, y=np.arange(4)), "got x, y"),
    "labels too few": (lambda p: arrays(p, images=ONES, labels=np.arange(3)), "labels must be 4"),
    "labels of numbers between": (lambda p: arrays(p, images=ONES, labels=np.ones(4)), "integers or strings"),
    "images of two channels": (
        lambda p: arrays(p, images=np.ones((4, 5, 5, 2), np.uint8), labels=np.arange(4)),
        "C 1 or 3",
    ),
    "floats beyond 1": (lambda p: arrays(p, images=ONES * 2.0, labels=np.arange(4)), "0..1"),
    "not a number": (lambda p: arrays(p, images=ONES * np.nan, labels=np.arange(4)), "0..1"),
    "images of 32 bits": (lambda p: arrays(p, images=ONES.astype(np.int32), labels=np.arange(4)), "uint8"),
    "no image in arrays": (lambda p: arrays(p, images=ONES[:0], labels=np.arange(0)), "some images"),
    "a table without columns": (lambda p: table(p, "a.png,cat\n"), "path and label"),
    "a table without lines": (lambda p: table(p, "path,label\n"), "no lines"),
    "an empty table": (lambda p: table(p, ""), "path and label"),
    "a table of another encoding": (lambda p: table(p, "path,label\nä.png,x\n", "latin-1"), "UTF-8"),
    "a table of a missing file": (lambda p: table(p, "path,label\na.png,x\nb.png,y\n"), "b.png"),
    "two labels of a file": (lambda p: table(p, "path,label\na.png,x\na.png,y\n"), "labels 'x' and 'y'"),
    "a line without label": (lambda p: table(p, "path,label\na.png,\n"), "line 2"),
    "another part": (lambda p: table(p, "path,label,split\na.png,x,later\n"), "train or test"),
}


@pytest.mark.parametrize("make, words", [pytest.param(*row, id=name) for name, row in HOSTILE.items()])
def test_what_cannot_be_trained_on_is_refused_by_its_name(tmp_path, make, words):
    path = make(tmp_path)
    if words is None:  # nothing is wrong
        assert data.folder(path, SIZE).class_names == ("a", "b")
        return
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)) as raised:
        data.folder(path, SIZE)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("change", [{"split": 1.0}, {"split": -0.1}, {"image_size": 0}])
def test_arguments_out_of_range(tmp_path, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        data.folder(folders(tmp_path), **change)


def test_unreadable_images_are_left_out_and_named_on_request(tmp_path):
    with_file(tmp_path, "a/x.jpg")
    found = data.folder(tmp_path, SIZE, split=0, skip_unreadable=True)
    assert len(found.train_images) == 10 and "a/x.jpg" not in found.names
    assert any("left out, 1 that cannot be read: a/x.jpg" in note for note in found.notes)
    for file in (tmp_path / "a").iterdir():
        file.write_bytes(b"none")
    with pytest.raises(ValueError, match="no image of a can be read"):
        data.folder(tmp_path, SIZE, skip_unreadable=True)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    folders(tmp_path)
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ValueError, match=r"b cannot be read \(Permission denied\)"):
        data.folder(tmp_path, SIZE)


def test_links_back_are_read_once_and_hidden_folders_are_no_classes(tmp_path):
    folders(tmp_path)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    (tmp_path / "b" / "above").symlink_to(tmp_path)
    folders(tmp_path, (".ipynb_checkpoints", "__MACOSX"))
    found = data.folder(tmp_path, SIZE, split=0)
    assert found.class_names == ("a", "b") and len(found.train_images) == 10


def test_what_is_said_before_training(tmp_path):
    folders(tmp_path, count=12)
    image(tmp_path / "single" / "one.png", 40)  # of b's pixels
    (tmp_path / "a" / "notes.txt").write_text("")
    image(tmp_path / "loose.png")
    image(tmp_path / "a" / "copy.png", 3)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    notes = "\n".join(data.folder(tmp_path, SIZE, split=0).notes)
    for words in (
        "26 images of 3 classes: 26 to train on ('a' 13, 'b' 12, 'single' 1), 0 to evaluate on",
        "1 .txt",
        "not read: gone, loose.png beside the folders",
        "warning: 1 of 26 images have the pixels of another one of their class",
        "RGB images of 9 x 7 pixels, stretched to 8 x 8",
        "warning: one training image only: single",
        "warning: the classes are unequal: 'a' has 13 training images, 'single' 1",
        f"warning: the same pixels under several labels, 1 times, such as {Path('b', '0.png')} and {Path('single', 'one.png')}",
    ):
        assert words in notes


def test_the_split_depends_on_the_seed_alone_and_keeps_an_image_of_each_class(tmp_path):
    folders(tmp_path, count=10)
    image(tmp_path / "single" / "one.png", 200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, same, other = (data.folder(tmp_path, SIZE, 0.5, seed=s) for s in (0, 0, 1))
    tests = [{d.names[i] for i in d.test_ids} for d in (first, same, other)]
    assert tests[0] == tests[1] != tests[2] and len(tests[0]) == 10
    assert 2 in first.train_labels and 2 not in first.test_labels


def test_load_takes_paths_too(tmp_path, monkeypatch):
    folders(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    assert data.load("photos").class_names == ("a", "b")
    with pytest.raises(ValueError, match=r"must be one of digits.*or a path that is there; got 'photo'"):
        data.load("photo")

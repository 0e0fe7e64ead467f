"""Checksums of data sets as they were published."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable

# MD5 of each file's content, uncompressed: archives were recompressed by whoever passes them on (Debian's Fashion-MNIST
# was), what they hold is the same. CIFAR's are those that torchvision checks.
PUBLISHED: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar100": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
}


NOT_AS_PUBLISHED = r"\S+: not as published"  # the warning's beginning


def md5(content: bytes | bytearray) -> str:
    """The content's MD5 in hexadecimal digits; it tells files apart, it is no protection against forgery."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def compare(name: str, files: Iterable[tuple[str, str, str]]) -> None:
    """Compare the files of a data set with those published.

    A file that is another data set's published one is an error. One that is nobody's may be the user's own in the same
    format, or damaged where its format cannot tell: a warning names it. Damage that the format shows is for the readers
    to refuse.

    Args:
        name: the data set, of :data:`PUBLISHED`.
        files: ``(where, file, md5)`` of each: its place for messages, all in one folder or archive, its name as published, its
            content's MD5.

    Raises:
        ValueError: a file is another data set's; the message names both.

    Warns:
        UserWarning: a file is not the published one; one warning for all.
    """
    owners = {digest: other for other, published in PUBLISHED.items() for digest in published.values()}
    unknown = []
    for where, file, digest in files:
        if digest == PUBLISHED[name][file]:
            continue
        if owners.get(digest, name) != name:
            raise ValueError(
                f"{where} is {owners[digest]}'s file, not {name}'s (MD5 {digest}); load {owners[digest]}, or name the "
                f"folder of {name}."
            )
        unknown.append((file, os.path.dirname(where)))
    if unknown:
        files = ", ".join(file for file, _ in unknown)
        warnings.warn(
            f"{name}: not as published, by MD5: {files} in {unknown[0][1]}; right for files of your own, else damaged or another release: "
            "fetch them again.",
            stacklevel=4,  # whoever called load
        )

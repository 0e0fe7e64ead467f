"""True images: those of a data set, and the Shepp-Logan phantom."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.data import load
from ella_cuda.data.draws import stratified_order
from ella_cuda.papers.studies import Work

SUBPIXELS = 8  # along a side: a pixel of the phantom is the mean over these points
# Value, half axes, centre and angle in degrees of the phantom's ellipses, in a square from -1 to 1 with y upwards; values are Toft's.
ELLIPSES = (
    (1.0, 0.69, 0.92, 0.0, 0.0, 0.0),
    (-0.8, 0.6624, 0.874, 0.0, -0.0184, 0.0),
    (-0.2, 0.11, 0.31, 0.22, 0.0, -18.0),
    (-0.2, 0.16, 0.41, -0.22, 0.0, 18.0),
    (0.1, 0.21, 0.25, 0.0, 0.35, 0.0),
    (0.1, 0.046, 0.046, 0.0, 0.1, 0.0),
    (0.1, 0.046, 0.046, 0.0, -0.1, 0.0),
    (0.1, 0.046, 0.023, -0.08, -0.605, 0.0),
    (0.1, 0.023, 0.023, 0.0, -0.606, 0.0),
    (0.1, 0.023, 0.046, 0.06, -0.605, 0.0),
)


def shepp_logan(size: int) -> Tensor:
    """The modified phantom, ``(size, size)`` in 0..1, float32.

    Source: Shepp and Logan, IEEE Trans. Nucl. Sci. 1974; the values of Toft, "The Radon transform", PhD thesis, DTU 1996.
    """
    fine = size * SUBPIXELS
    places = (2 * torch.arange(fine, dtype=torch.float64) + 1) / fine - 1
    x, y = places[None, :], -places[:, None]
    image = torch.zeros(fine, fine, dtype=torch.float64)
    for value, across, along, x0, y0, degrees in ELLIPSES:
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        u, v = (x - x0) * cos + (y - y0) * sin, (y - y0) * cos - (x - x0) * sin
        image += value * ((u / across).square() + (v / along).square() <= 1)
    return F.avg_pool2d(image[None, None], SUBPIXELS)[0, 0].clamp(0, 1).float()


def image_of(name: str, size: int, number: int, work: Work) -> Tensor:
    """One of a data set's test images, ``(size, size)`` in 0..1, grey, interpolated where it has another size; of a number from 0 on."""
    dataset = load(name, work.data_dir, work.download)
    order = stratified_order(dataset.test_labels, dataset.test_ids, seed=0, purpose="tomography")
    image = dataset.test_images[order[number % len(order)]].mean(0, keepdim=True)[None]
    if image.shape[2:] != (size, size):
        image = F.interpolate(image, (size, size), mode="bicubic", align_corners=False, antialias=True)
    return image[0, 0].clamp(0, 1)

"""Affine copies of images against look-ups by torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.augment import AffineAugment, affine_matrix
from python_tests.augment.augments import DOUBLE, raw, smooth_images
from python_tests.ops.checks import assert_same


def test_copies_are_bilinear_look_ups_at_the_mapped_places(device):
    augment, x = (
        AffineAugment(5, init=0.4, **DOUBLE).to(device),
        torch.randn(3, 2, 7, 7, dtype=torch.float64, device=device),
    )
    eps = augment.draw(3)
    found = augment(x, eps=eps)
    assert found.shape == (3, 5, 2, 7, 7)
    maps = affine_matrix(eps, augment.eta)[..., :2, :]
    for n in range(3):
        for s in range(5):
            grid = F.affine_grid(maps[n, s][None], (1, 2, 7, 7), align_corners=True)
            expected = F.grid_sample(x[n : n + 1], grid, "bilinear", "zeros", align_corners=True)[0]
            assert_same(found[n, s], expected)


def test_without_amounts_copies_are_the_images():
    x = torch.randn(2, 3, 6, 9, dtype=torch.float64)
    assert_same(raw(4, init=0.0)(x), x[:, None].expand(-1, 4, -1, -1, -1))


@pytest.mark.parametrize(("name", "shift"), [("tx", (0, 1)), ("ty", (1, 0))])
def test_a_translation_by_a_pixel_moves_the_image_by_one(name, shift):
    """The copy looks up at larger coordinates, so the image moves towards smaller ones; zeros come in."""
    x = torch.randn(1, 1, 5, 9, dtype=torch.float64)
    pixel = 2 / (x.shape[3 if name == "tx" else 2] - 1)  # in half images, of corner-aligned coordinates
    (found,) = raw(1, name, pixel)(x, eps=torch.ones(1, 1, **DOUBLE))
    expected = F.pad(x, (0, shift[1], 0, shift[0]))[..., shift[0] :, shift[1] :]
    assert_same(found[0], expected[0])


@pytest.mark.parametrize("quarter", [1, 2, 3, -1])
def test_quarter_turns_are_exact(quarter):
    """Coordinates turn from x to y, which is downwards: the looked-up image turns the other way, as rot90 does."""
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    eps = torch.full((1, 1), quarter / 2, **DOUBLE)
    assert_same(raw(1, "rotation", math.pi)(x, eps=eps)[:, 0], torch.rot90(x, quarter, (2, 3)))


def test_rotation_of_a_rectangle_is_that_of_its_square():
    """A rectangle inside a square of zeros turns as the square does, by any angle, and so do scales and shear."""
    x = torch.randn(2, 1, 5, 9, dtype=torch.float64)
    names = ("rotation", "sx", "sy", "shear")
    augment, eps = raw(30, names, 0.9), torch.rand(30, 4, **DOUBLE) * 2 - 1
    inside = slice(2, 7)
    square = augment(F.pad(x, (0, 0, 2, 2)), eps=eps)[..., inside, :]
    assert_same(augment(x, eps=eps), square)
    wide = augment(F.pad(x, (0, 0, 2, 2)).mT, eps=eps)[..., inside]
    assert_same(augment(x.mT, eps=eps), wide)


@pytest.mark.parametrize(("down", "right"), [(2, 0), (0, 2), (2, 2)])
def test_sides_of_one_pixel_turn_as_inside_of_zeros(down, right):
    """A row inside a square of zeros turns as the square does. Half of its height is 0 pixels, and so are translations along it."""
    x = torch.randn(2, 1, 1 if down else 5, 1 if right else 5, dtype=torch.float64)
    names = ("ty", "tx", "rotation", "sx", "sy", "shear")
    augment, eps = raw(30, names, 0.9), torch.rand(30, 6, **DOUBLE) * 2 - 1
    still = eps * torch.tensor([not down, not right, True, True, True, True])
    square = augment(F.pad(x, (right, right, down, down)), eps=still)
    inside = square[..., down : 5 - down, right : 5 - right]
    found = augment(x, eps=eps)
    assert found.is_contiguous()
    assert_same(found, inside)
    assert down == right or (found == 0).any()


def test_images_of_one_row():
    x = torch.randn(2, 1, 1, 9, dtype=torch.float64)
    assert torch.isfinite(AffineAugment(3, **DOUBLE)(x)).all()
    assert AffineAugment(3)(torch.zeros(0, 1, 4, 4)).shape == (0, 3, 1, 4, 4)


def test_gradient_in_the_amounts_is_that_of_finite_differences():
    x = smooth_images(3, 2, 12, 12)
    augment, eps, weight = (
        AffineAugment(4, init=0.2, **DOUBLE),
        torch.rand(3, 4, 6, **DOUBLE) * 2 - 1,
        torch.randn(3, 4, 2, 12, 12, **DOUBLE),
    )
    augment.raw.requires_grad_()
    (gradient,) = torch.autograd.grad((augment(x, eps=eps) * weight).sum(), augment.raw)

    def value(raw: Tensor) -> Tensor:
        return (torch.func.functional_call(augment, {"raw": raw}, (x,), {"eps": eps}) * weight).sum().detach()

    h = 1e-7  # bilinear copies have kinks where a place crosses a pixel
    for i in range(6):
        step = h * torch.eye(6, **DOUBLE)[i]
        difference = (value(augment.raw.detach() + step) - value(augment.raw.detach() - step)) / (2 * h)
        assert float(gradient[i]) == pytest.approx(float(difference), rel=1e-5)


def test_under_autocast_copies_are_in_single_precision():
    x, augment = torch.randn(2, 1, 8, 8), AffineAugment(3, sampling="grid", generators="rotation")
    with torch.autocast("cpu", torch.bfloat16):
        assert augment(x.bfloat16()).dtype == torch.float32
        assert torch.equal(augment(x), AffineAugment(3, sampling="grid", generators="rotation")(x))

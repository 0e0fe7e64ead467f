"""Local deformations: the field's law, and what its amounts do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ella_cuda.augment import AffineAugment, AveragedFunction, LocalDeformation
from python_tests.augment.augments import DOUBLE, smooth_images
from python_tests.ops.checks import assert_same


def field(strength: float, smoothness: float, n: int = 4000, size: tuple[int, int] = (9, 9)) -> Tensor:
    """n fields, on the coarse grid's points where ``size`` is that of the grid."""
    deformation = LocalDeformation(1, (strength, smoothness), grid_size=9, **DOUBLE)
    return deformation.displacement(deformation.draw(n)[:, 0], deformation.eta, size)


@pytest.mark.parametrize("smoothness", [0.05, 0.5, 2.0])
def test_strength_is_the_displacements_deviation_whatever_the_smoothness(smoothness):
    u = field(0.3, smoothness)
    assert u.mean((0,)).abs().max() < 5 * 0.3 / 4000**0.5
    assert (u.std(0) / 0.3 - 1).abs().max() < 0.06
    assert abs(torch.corrcoef(u[:, :, 4, 4].T)[0, 1]) < 0.06  # x and y


def test_smoothness_is_the_distance_over_which_neighbours_move_together():
    def correlation(smoothness: float, steps: int) -> float:
        u = field(1.0, smoothness)[:, 0, 4]
        return float(torch.corrcoef(u[:, [4 - steps // 2, 4 - steps // 2 + steps]].T)[0, 1])

    assert abs(correlation(0.02, 1)) < 0.06  # points are 0.25 apart
    assert correlation(0.02, 1) < correlation(0.25, 1) < correlation(0.5, 1) < correlation(1.0, 1)
    # Of two Gaussians of deviation tau at distance d the normalised product is exp(-d^2 / (4 tau^2)), away from the border.
    assert correlation(0.5, 2) == pytest.approx(torch.tensor(-(0.5**2) / (4 * 0.5**2)).exp().item(), abs=0.06)
    rigid = field(1.0, 100.0)
    assert (rigid - rigid[..., :1, :1]).abs().max() < 1e-2


def test_copies():
    x = smooth_images(3, 2, 9, 12)
    deformation = LocalDeformation(4, (1e-9, 0.5), **DOUBLE)
    assert_same(deformation(x), x[:, None].expand(-1, 4, -1, -1, -1), atol=1e-7, rtol=0)
    deformation.set_eta((0.1, 0.5))
    assert deformation.amounts() == pytest.approx({"strength": 0.1, "smoothness": 0.5})
    copies = deformation(x)
    assert copies.shape == (3, 4, 2, 9, 12) and (copies - x[:, None]).abs().max() > 1e-3
    eps = deformation.draw(3, "shared")
    assert eps.shape == (1, 4, 2, 8, 8) and deformation.draw(3).shape == (3, 4, 2, 8, 8)
    assert torch.equal(deformation(x, eps=eps), deformation(x, eps=eps.expand(3, -1, -1, -1, -1)))
    with deformation.held(sampling="independent"):
        first = deformation(x)
        deformation.rewind()
        assert torch.equal(deformation(x), first)


def test_a_rigid_deformation_is_a_translation():
    """Displacements along x come first: all of them the same, copies are those of tx and ty."""
    x, deformation = smooth_images(2, 1, 9, 12), LocalDeformation(1, (0.2, 1e6), grid_size=2, **DOUBLE)
    eps = torch.tensor([0.7, -0.4], **DOUBLE).view(1, 1, 2, 1, 1).expand(1, 1, 2, 2, 2)
    size = 0.2 * 2  # 4 points of weight 1/2 each
    moved = AffineAugment(1, ("tx", "ty"), size, **DOUBLE)(x, eps=torch.tensor([[0.7, -0.4]], **DOUBLE))
    assert_same(deformation(x, eps=eps), moved)


def test_gradient_in_strength_and_smoothness():
    x, deformation = smooth_images(3, 1, 10, 10), LocalDeformation(4, (0.1, 0.4), **DOUBLE)
    eps, weight = deformation.draw(3), torch.randn(3, 4, 1, 10, 10, **DOUBLE)

    def value(raw: Tensor) -> Tensor:
        return (torch.func.functional_call(deformation, {"raw": raw}, (x,), {"eps": eps}) * weight).sum()

    raw = deformation.raw.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(raw), raw)
    for i in range(2):
        step = 1e-7 * torch.eye(2, **DOUBLE)[i]
        with torch.no_grad():
            difference = (value(raw + step) - value(raw - step)) / 2e-7
        assert float(gradient[i]) == pytest.approx(float(difference), rel=1e-5)


def test_under_autocast_displacements_are_in_single_precision():
    x, deformation = smooth_images(2, 1, 9, 9).float(), LocalDeformation(3, (0.2, 0.5))
    with deformation.held():
        expected = deformation(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(deformation(x), expected)
    draws, amounts = deformation.draw().flatten(0, 1), deformation.eta
    expected = deformation.displacement(draws, amounts, (9, 9))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(deformation.displacement(draws, amounts, (9, 9)), expected)


def test_an_average_over_deformations():
    function = AveragedFunction(torch.nn.Flatten(), LocalDeformation(3, sampling="shared"))
    assert function(torch.randn(2, 1, 5, 5)).shape == (2, 25)

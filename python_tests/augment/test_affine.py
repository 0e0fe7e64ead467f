"""The affine group's closed form against torch's matrix exponential."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from ella_cuda.augment import GENERATORS, affine_matrix, lie_generators
from ella_cuda.augment.affine import ENTRIES

SUBSETS = [names for k in range(1, 7) for names in itertools.combinations(GENERATORS, k)]
# tx, ty, rotation, sx, sy, shear: D = (sx - sy)^2/4 + shear^2 - rotation^2.
POINTS = {
    "all zero": (0, 0, 0, 0, 0, 0),
    "translation alone": (0.3, -0.7, 0, 0, 0, 0),
    "D = 0, a = 0": (0.3, -0.7, 0, 0.4, 0.4, 0),
    "D = 0, a nilpotent": (0.3, -0.7, 0.6, 0, 0, 0.6),
    "D = 0, a neither": (0.3, -0.7, 0.5, 0.7, 0.1, 0.4),
    "D barely above 0": (0.3, -0.7, 0.6, 0.1, 0.1, 0.6 + 1e-12),
    "D barely below 0": (0.3, -0.7, 0.6 + 1e-12, 0.1, 0.1, 0.6),
    "D = 1": (0.3, -0.7, 0, 0.2, 0.2, 1),
    "D = -1": (0.3, -0.7, 1, 0.2, 0.2, 0),
    "D barely below 1": (0.3, -0.7, 0, 0.2, 0.2, 1 - 1e-9),
    "D = 2.2": (0.3, -0.7, 0.2, 0.4, -0.2, 1.5),
    "D = -pi^2": (0.9, 0.8, math.pi, 0, 0, 0),
    "det a = 0": (0.3, -0.7, 0, 1.2, 0, 0),  # the translation's integral is no quotient
    "det a barely 0": (0.3, -0.7, 0, 1.2, 1e-13, 0),
    "large": (2, -3, 3, 1.5, -2, 1),
}


def oracle(eps: Tensor, eta: Tensor, names: tuple[str, ...] = GENERATORS) -> Tensor:
    chosen = lie_generators(dtype=eps.dtype, device=eps.device)[[GENERATORS.index(name) for name in names]]
    return torch.matrix_exp(torch.einsum("...k,k,kij->...ij", eps, eta, chosen))


def error(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest entry of each matrix."""
    scale = expected.abs().amax((-2, -1), keepdim=True)
    return float(((found - expected).abs() / scale).max())


def test_generators_are_those_of_the_definition():
    found = lie_generators(dtype=torch.float64)
    assert found.shape == (6, 3, 3)
    x, y = 0.4, -0.3
    velocities = {"tx": (1, 0), "ty": (0, 1), "rotation": (-y, x), "sx": (x, 0), "sy": (0, y), "shear": (y, x)}
    for matrix, name in zip(found, GENERATORS, strict=True):
        moved = matrix @ torch.tensor([x, y, 1], dtype=torch.float64)
        assert moved.tolist() == pytest.approx([*velocities[name], 0])
    assert tuple(ENTRIES) == GENERATORS and lie_generators().dtype == torch.float32


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_every_subset_is_the_matrix_exponential(names, device):
    eps = torch.rand(40, len(names), dtype=torch.float64, device=device) * 2 - 1
    for scale in (1e-12, 1e-4, 0.1, 1, math.pi):
        eta = scale * (torch.rand(len(names), dtype=torch.float64, device=device) + 0.5)
        assert error(affine_matrix(eps, eta, names), oracle(eps, eta, names)) < 2e-14


@pytest.mark.parametrize("point", POINTS)
def test_every_kind_of_exponent(point):
    eps = torch.tensor(POINTS[point], dtype=torch.float64)
    assert error(affine_matrix(eps, torch.ones(6).double()), oracle(eps, torch.ones(6).double())) < 2e-14
    found = affine_matrix(torch.ones(6).double(), eps)  # as amounts
    assert torch.equal(found, affine_matrix(eps, torch.ones(6).double()))


def test_zero_is_exactly_the_identity():
    for eps, eta in ((torch.zeros(6), torch.ones(6)), (torch.ones(6), torch.zeros(6))):
        assert torch.equal(affine_matrix(eps, eta), torch.eye(3))


@pytest.mark.parametrize("point", POINTS)
def test_derivatives_are_those_of_finite_differences(point):
    """Of the exponent's entries at every kind of exponent, NaN where a branch that is not taken spoils the gradient."""
    eps = torch.tensor(POINTS[point], dtype=torch.float64, requires_grad=True)
    eta = torch.tensor([0.9, 1.1, 1, 1, 1, 1], dtype=torch.float64, requires_grad=True)
    assert gradcheck(affine_matrix, (eps, eta))
    assert gradgradcheck(affine_matrix, (eps, eta))


@pytest.mark.parametrize("point", POINTS)
def test_derivatives_are_the_matrix_exponentials(point):
    eps = torch.tensor(POINTS[point], dtype=torch.float64)
    eta = torch.ones(6, dtype=torch.float64)
    mine, theirs = (torch.func.jacrev(f, argnums=1)(eps, eta) for f in (affine_matrix, oracle))
    assert float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)) < 2e-14
    mine, theirs = (torch.func.jacfwd(f, argnums=0)(eps, eta) for f in (affine_matrix, oracle))
    assert float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)) < 2e-14


def test_single_precision_is_as_accurate_as_torchs():
    eps = torch.rand(2000, 6) * 2 - 1
    eta = torch.tensor([0.5, 0.5, math.pi, 0.7, 0.7, 0.7])
    exact = oracle(eps.double(), eta.double())
    assert error(affine_matrix(eps, eta).double(), exact) <= 2 * error(oracle(eps, eta).double(), exact)


def test_turns_of_many_circles_have_derivatives():
    """The series, which is not taken there, is beyond single precision's range."""
    eta = torch.tensor([1e4], requires_grad=True)
    affine_matrix(torch.ones(1), eta, "rotation")[0, 0].backward()
    assert float(eta.grad) == pytest.approx(-math.sin(1e4), rel=1e-4)


def test_broadcasts_over_leading_axes():
    eps, eta = torch.randn(2, 3, 4, 2), torch.randn(2)
    found = affine_matrix(eps, eta, ("shear", "tx"))
    assert found.shape == (2, 3, 4, 3, 3)
    assert torch.equal(found[1, 2, 3], affine_matrix(eps[1, 2, 3], eta, ["shear", "tx"]))
    assert affine_matrix(eps[:0], eta, ("shear", "tx")).shape == (0, 3, 4, 3, 3)
    swapped = affine_matrix(eps.flip(-1), eta.flip(-1), ("tx", "shear"))
    assert torch.equal(found, swapped)


def test_aspect_conjugates_by_the_sides():
    """In coordinates of the same unit along x and y the map is that of the generators; translations are in half images of each side."""
    eps, eta = torch.rand(50, 6, dtype=torch.float64) * 2 - 1, torch.full((6,), 0.8, dtype=torch.float64)
    width, height = 3.0, 2.0
    units = torch.tensor([width, height, 1.0], dtype=torch.float64)
    exponent = torch.einsum("nk,k,kij->nij", eps, eta, lie_generators(dtype=torch.float64))
    linear = exponent.clone()
    linear[:, :2, 2] *= units[:2]
    expected = torch.matrix_exp(linear) * units / units[:, None]
    assert error(affine_matrix(eps, eta, aspect=width / height), expected) < 2e-14


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: affine_matrix([0.0] * 6, torch.ones(6)), TypeError, r"eps must be a floating point tensor .* got list"),
        (lambda: affine_matrix(torch.ones(6, dtype=torch.int64), torch.ones(6)), TypeError, "eps .* got torch.int64"),
        (lambda: affine_matrix(torch.ones(6), 1.0), TypeError, "eta must .* got float"),
        (lambda: affine_matrix(torch.ones(5), torch.ones(6)), ValueError, r"eps must have shape \(\.\.\., 6\), .* got \(5,\)"),
        (lambda: affine_matrix(torch.ones(2), torch.ones(1), ("tx", "ty")), ValueError, r"eta must have shape .* tx, ty, got \(1,\)"),
        (lambda: affine_matrix(torch.tensor(1.0), torch.ones(1), "tx"), ValueError, r"eps must have shape .* got \(\)"),
        (lambda: affine_matrix(torch.ones(1), torch.ones(1), "turn"), ValueError, "generators must be 'all' or some of tx, .* got 'turn'"),
        (lambda: affine_matrix(torch.ones(2), torch.ones(2), ("tx", "tx")), ValueError, "each once"),
        (lambda: affine_matrix(torch.ones(0), torch.ones(0), ()), ValueError, r"got \(\)"),
    ],
)  # fmt: skip
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call()

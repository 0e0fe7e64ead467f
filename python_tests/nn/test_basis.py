"""Bases on a grid: coordinates, fits, and the matrix that is kept."""

from __future__ import annotations

import copy

import pytest
import torch

from ella_cuda.nn import SpatialBasis
from ella_cuda.nn.basis import LEAST_SQUARES_CUTOFF
from python_tests.ops.checks import assert_same

KINDS = ("interpolating", "exponential")


def test_points_are_centred_pixels_in_row_major_order():
    basis = SpatialBasis((3, 2))
    expected = [[-1, -0.5], [-1, 0.5], [0, -0.5], [0, 0.5], [1, -0.5], [1, 0.5]]
    assert basis.points.tolist() == expected
    assert basis.num_anchors == 3 and basis.num_points == 6
    assert SpatialBasis(3).num_anchors == 5  # half of nine, rounded up


def test_anchors_start_anywhere_on_the_grid_and_omega_at_one():
    basis = SpatialBasis((40, 20), num_anchors=4000)
    assert basis.inverse_lengthscale == 1
    low, high = basis.anchors.amin(0), basis.anchors.amax(0)
    assert_same(torch.stack([low, high]), torch.tensor([[-19.5, -9.5], [19.5, 9.5]]), atol=0.1, rtol=0)
    assert (basis.anchors.mean(0).abs() < 0.6).all()  # uniform: a standard error of 0.18 and 0.09
    assert SpatialBasis(1).anchors.abs().max() == 0
    torch.manual_seed(5)
    first = SpatialBasis(4).anchors
    torch.manual_seed(5)
    assert torch.equal(SpatialBasis(4).anchors, first)


@pytest.mark.parametrize("kind", KINDS)
def test_projection_and_expansion_are_transposes(kind, device):
    basis = SpatialBasis((4, 5), 7, kind).to(device, torch.float64)
    x, values = torch.randn(2, 3, 20, device=device).double(), torch.randn(2, 3, 7, device=device).double()
    psi = basis.matrix()
    assert psi.shape == (7, 20)
    assert_same(basis.project(x), torch.einsum("ncx,ax->nca", x, psi))
    assert_same(basis.expand(values), torch.einsum("nca,ax->ncx", values, psi))


def test_interpolating_functions_take_their_values_at_the_anchors():
    basis = SpatialBasis(5, 4).double()
    chosen = [0, 7, 13, 24]
    basis.anchors = basis.points[chosen].clone()
    values = torch.randn(6, 4, dtype=torch.float64)
    assert_same(basis.expand(values)[:, chosen], values, atol=2e-3, rtol=0)  # up to the noise of 0.01 squared


@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_is_the_least_squares_solution(kind):
    basis = SpatialBasis(6, 5, kind).double()
    values = torch.randn(3, 5, dtype=torch.float64)
    assert_same(basis.fit(basis.expand(values)), values, rtol=1e-6, atol=1e-6)
    functions = torch.randn(3, 36, dtype=torch.float64)
    expected = torch.linalg.lstsq(basis.matrix().T, functions.T).solution.T
    assert_same(basis.fit(functions), expected)
    left = (functions - expected @ basis.matrix()).norm() / functions.norm()
    assert basis.residual(functions, expected) == pytest.approx(float(left))
    assert basis.residual(torch.zeros(2, 36).double(), torch.zeros(2, 5).double()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_between_coinciding_anchors_is_bounded(kind):
    basis = SpatialBasis(4, 6, kind)
    basis.anchors[1:] = basis.anchors[0] + 1e-6 * torch.randn(5, 2)
    values = basis.fit(torch.ones(16))
    assert torch.isfinite(values).all() and values.abs().max() < 100


def test_the_fit_leaves_out_what_is_weaker_than_the_cutoff():
    basis = SpatialBasis(8, kind="exponential", inverse_lengthscale=0.5).double()
    u, s, vh = torch.linalg.svd(basis.matrix(), full_matrices=False)
    functions = torch.randn(64, dtype=torch.float64)
    kept = s > LEAST_SQUARES_CUTOFF * s[0]
    assert 0 < kept.sum() < len(s)
    assert_same(basis.fit(functions), u[:, kept] @ ((vh[kept] @ functions) / s[kept]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_at_zero_every_function_is_constant(kind):
    basis = SpatialBasis(6, 4, kind).double()
    basis.inverse_lengthscale.zero_()
    functions = basis.expand(torch.randn(5, 4, dtype=torch.float64))
    assert_same(functions, functions[:, :1].expand_as(functions), rtol=1e-9, atol=0)
    assert functions.abs().min() > 0


def test_the_kept_matrix_follows_the_buffers():
    basis = SpatialBasis(4, 3)

    def fresh():
        return copy.deepcopy(basis).matrix()

    first = basis.matrix()
    assert basis.matrix() is first
    basis.inverse_lengthscale.fill_(0.5)  # in place
    assert basis.matrix() is not first
    assert_same(basis.matrix(), fresh())
    basis.anchors = torch.randn(3, 2)  # assigned
    assert_same(basis.matrix(), fresh())
    other = SpatialBasis(4, 3)
    basis.load_state_dict(other.state_dict())
    assert_same(basis.matrix(), other.matrix())
    assert basis.double().matrix().dtype == torch.float64


def in_inference(basis: SpatialBasis) -> None:
    with torch.inference_mode():
        basis.matrix()


def in_vmap(basis: SpatialBasis) -> None:
    """Over anchors: the matrix is a batch of matrices there."""

    def total(anchors: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(basis, {"anchors": anchors}, (torch.ones(1, 16),)).sum()

    basis.forward = basis.project
    torch.func.vmap(total)(torch.stack([basis.anchors, 2 * basis.anchors]))


@pytest.mark.parametrize("where", [in_inference, in_vmap])
def test_what_was_computed_elsewhere_is_not_kept(where):
    """Neither can be used outside: autograd refuses the one, the other is no tensor any more."""
    basis = SpatialBasis(4, 3)
    where(basis)
    assert basis._kept is None
    x = torch.randn(2, 16, requires_grad=True)
    basis.project(x).sum().backward()
    assert_same(x.grad, basis.matrix().sum(0).expand(2, 16))


def test_a_layer_made_without_memory_is_whole_once_it_is_loaded():
    basis = SpatialBasis((4, 3))
    with torch.device("meta"):
        empty = SpatialBasis((4, 3))
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(basis.state_dict())
    assert_same(empty.matrix(), basis.matrix())


def test_a_wanted_gradient_is_never_lost_to_the_kept_matrix():
    basis = SpatialBasis(4, 3).double()
    basis.matrix()
    omega = basis.inverse_lengthscale.requires_grad_()
    (gradient,) = torch.autograd.grad(basis.matrix().sum(), omega)

    def total(value: float) -> float:
        with torch.no_grad():
            omega.fill_(value)
            return float(basis.matrix().sum())

    assert float(gradient) == pytest.approx((total(1 + 1e-6) - total(1 - 1e-6)) / 2e-6, rel=1e-5)
    omega.requires_grad_(False)
    assert not basis.matrix().requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_matrix_collects_its_gradient(kind):
    basis = SpatialBasis(4, 3, kind).double()
    x, values = torch.randn(5, 16, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    with basis.held() as matrix:
        (gradient,) = torch.autograd.grad(basis.project(x).sum() + basis.expand(values).sum(), matrix)
    assert_same(gradient, x.sum(0).expand(3, 16) + values.sum(0)[:, None])
    assert not basis.matrix().requires_grad


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SpatialBasis(0), "size"),
        (lambda: SpatialBasis(3, 0), "num_anchors"),
        (lambda: SpatialBasis(3, inverse_lengthscale=-1.0), "inverse_lengthscale"),
        (lambda: SpatialBasis(3, kind="linear"), "exponential, interpolating"),
        (lambda: SpatialBasis(3, 2, anchors=torch.zeros(3, 2)), "anchors must be num_anchors = 2 rows, got 3"),
        (
            lambda: SpatialBasis(3, 2).residual(torch.zeros(4, 9), torch.zeros(3, 2)),
            "residual: functions and values must have the same axes",
        ),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: SpatialBasis(3, inverse_lengthscale="1"),
            "inverse_lengthscale must be a number or a tensor of one element, got str",
        ),
        (lambda: SpatialBasis(3, anchors=[[0, 0]]), r"anchors must be a tensor \(A, 2\).*got list"),
        (
            lambda: SpatialBasis(3, 2).fit(torch.zeros(4, 9).long()),
            r"fit: functions must be floating point, got torch\.int64",
        ),
    ],
)
def test_wrong_types(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_the_documented_cutoff_is_the_one():
    """Two anchors of which one's function is almost the other's: the direction between them counts from 0.01 on."""
    for distance, kept in ((0.01, False), (0.05, True)):
        basis = SpatialBasis((1, 9), kind="exponential", anchors=torch.tensor([[0.0, 0.0], [0.0, distance]])).double()
        difference = basis.matrix()[1] - basis.matrix()[0]
        singular = torch.linalg.svdvals(basis.matrix())
        assert (float(singular[1] / singular[0]) > 0.01) == kept
        assert (float(basis.fit(difference).abs().max()) > 0.5) == kept

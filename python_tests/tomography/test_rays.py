"""Ray transforms against sums and integrals known in closed form, and as linear maps with an exact adjoint."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ella_cuda.tomography import RayOperator, RayTransform
from ella_cuda.tomography import rays as module
from python_tests.tomography.small import drawn


@pytest.fixture(params=["dense", "sparse"])
def held(request, monkeypatch):
    """Products by the dense copy and by the sparse matrix."""
    if request.param == "sparse":
        monkeypatch.setattr(module, "DENSE", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_adjoint_is_the_transpose(held, dtype, device):
    rays = RayTransform((5, 8), torch.linspace(-1.0, 4.0, 9), 11)
    x = drawn(2, 3, 5, 8).to(device, dtype)
    y = drawn(2, 3, 9, 11, seed=1).to(device, dtype)
    one, other = (rays.forward(x) * y).sum(), (x * rays.adjoint(y)).sum()
    assert one.dtype == dtype and one.item() == pytest.approx(
        other.item(), rel=1e-13 if dtype == torch.float64 else 1e-5
    )
    matrix = rays.matrix(dtype, device).to_dense()
    torch.testing.assert_close(rays.forward(x).flatten(2), x.flatten(2) @ matrix.T)
    torch.testing.assert_close(rays.adjoint(y).flatten(2), y.flatten(2) @ matrix)
    assert rays.forward(x[:0]).shape == (0, 3, 9, 11) and rays.forward(x[0, 0]).shape == (9, 11)


def test_at_right_angles_measurements_are_sums_of_columns_and_rows(held):
    x = drawn(5, 8)
    y = RayTransform((5, 8), [0.0, math.pi / 2, math.pi], 8).forward(x)
    torch.testing.assert_close(y[0], x.sum(0))
    torch.testing.assert_close(y[2], x.sum(0).flip(0))
    y = RayTransform((5, 8), [math.pi / 2], 5).forward(x)
    torch.testing.assert_close(y[0], x.sum(1))


def test_integrals_of_a_gaussian_are_those_in_closed_form():
    height, width, spread, at = 40, 50, 3.0, torch.tensor([4.0, -3.0], dtype=torch.float64)
    rows = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    x = torch.exp(-((columns - at[0]) ** 2 + (rows - at[1]) ** 2) / (2 * spread**2))
    rays = RayTransform((height, width), 12)
    s = torch.arange(rays.data_shape[1], dtype=torch.float64) - (rays.data_shape[1] - 1) / 2
    middle = at[0] * rays.angles.cos() + at[1] * rays.angles.sin()
    expected = spread * math.sqrt(2 * math.pi) * torch.exp(-((s - middle[:, None]) ** 2) / (2 * spread**2))
    assert (rays.forward(x) - expected).abs().max() < 0.02 * expected.max()  # of linear interpolation


def test_filtered_back_projection_finds_a_smooth_image():
    rows = torch.arange(32, dtype=torch.float64)[:, None] - 15.5
    x = torch.exp(-(rows**2 + (rows.T - 3) ** 2) / 32)
    rays = RayTransform(32, 60)
    assert (rays.fbp(rays.forward(x)) - x).abs().max() < 0.02
    assert rays.fbp(rays.forward(x).float()).dtype == torch.float32


def test_both_directions_are_differentiable_in_every_mode():
    rays = RayTransform((3, 4), [0.2, 1.1], 5)
    x, y = drawn(2, 3, 4).requires_grad_(), drawn(2, 2, 5).requires_grad_()
    for function, argument in ((rays.forward, x), (rays.adjoint, y)):
        assert torch.autograd.gradcheck(lambda t, f=function: f(t).square(), argument, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda t, f=function: f(t).square(), argument)
    torch.testing.assert_close(torch.func.vmap(rays.forward, 1)(x.movedim(0, 1)), rays.forward(x))
    matrix = torch.func.jacrev(rays.forward)(x[0].detach()).flatten(2).flatten(0, 1)
    torch.testing.assert_close(matrix, rays.matrix().to_dense())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 3), "image_size must be a positive integer, got 0"),
        ((4, 0), "angles must be a positive integer, got 0"),
        ((4, []), "angles must be a positive number or finite radians"),
        ((4, [math.nan]), "angles must be"),
        ((4, 3, 0), "detector_size must be a positive integer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RayTransform(*arguments)


def test_wrong_images_and_data_are_refused():
    rays = RayTransform(4, 3, 5)
    with pytest.raises(ValueError, match=r"x must have shape \(..., 4, 4\), got \(4, 5\)"):
        rays.forward(drawn(4, 5))
    with pytest.raises(ValueError, match=r"y must have shape \(..., 3, 5\)"):
        rays.adjoint(drawn(5))
    with pytest.raises(TypeError, match=r"x must be a float32 or float64 tensor, got torch.int64"):
        rays.forward(torch.ones(4, 4, dtype=torch.int64))


# users' own ----------------------------------------------------------------------------------------------------------


def as_of_deepinv(rays, calls):
    """Batches of images with channels, no derivatives."""

    def forward(x):
        calls.append(tuple(x.shape))
        return rays.forward(x.detach())

    return forward, lambda y: rays.adjoint(y.detach())


@pytest.mark.parametrize("batched", [False, True])
def test_functions_of_others_stand_in_for_a_ray_transform(batched):
    rays, calls = RayTransform((4, 5), 3, 7), []
    forward, adjoint = as_of_deepinv(rays, calls)
    shape = (1, 4, 5) if batched else (1, 1, 4, 5)
    operator = RayOperator(
        forward, adjoint, (4, 5), image_shape=shape, batched=batched, dtype=torch.float64, fbp=lambda y: 2 * rays.fbp(y)
    )
    assert operator.data_shape == ((1, 3, 7) if batched else (1, 1, 3, 7)) and operator.image_shape == (4, 5)
    x = drawn(6, 4, 5).requires_grad_()
    y = operator.forward(x)
    assert calls[-1] == ((6, 1, 4, 5) if batched else (1, 1, 4, 5))
    torch.testing.assert_close(y.flatten(1), rays.forward(x).flatten(1))
    (slope,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(slope, torch.autograd.grad(rays.forward(x).square().sum(), x)[0])
    torch.testing.assert_close(operator.fbp(y.detach()), 2 * rays.fbp(rays.forward(x.detach())))


@pytest.mark.parametrize("batched", [False, True])
def test_functions_may_return_one_buffer_each_time(batched):
    rays = RayTransform(4, 3, 7)

    def into_a_buffer(function):
        kept = {}

        def called(x):
            found = function(x)
            return kept.setdefault(found.shape, torch.empty_like(found)).copy_(found)

        return called

    functions = [into_a_buffer(f) for f in (rays.forward, rays.adjoint)]
    operator = RayOperator(*functions, 4, batched=batched, dtype=torch.float64, fbp=into_a_buffer(rays.fbp))
    x, y = drawn(3, 4, 4), drawn(3, 3, 7, seed=1)
    torch.testing.assert_close(operator.forward(x), rays.forward(x))
    torch.testing.assert_close(operator.adjoint(y), rays.adjoint(y))
    torch.testing.assert_close(operator.fbp(y), rays.fbp(y))


def test_without_a_filtered_back_projection_the_best_multiple_of_the_adjoint_is_taken():
    rays = RayTransform(4, 3, 7)
    operator = RayOperator(rays.forward, rays.adjoint, 4)
    y = drawn(3, 7)
    image, found = rays.adjoint(y), operator.fbp(y)
    scale = torch.linalg.lstsq(rays.forward(image).reshape(-1, 1), y.reshape(-1, 1)).solution.item()
    torch.testing.assert_close(found, scale * image)


def test_pairs_that_are_none_are_refused():
    rays = RayTransform(4, 3, 7)
    forward, adjoint = rays.forward, rays.adjoint
    for error, words, pair, options in (
        (ValueError, "adjoint must be forward's", (forward, lambda y: 1.01 * adjoint(y)), {}),
        (ValueError, "forward must be linear", (lambda x: forward(x) + 0.1, adjoint), {}),
        (ValueError, "adjoint must return", (forward, lambda y: adjoint(y)[:2]), {}),
        (TypeError, "forward must return a float32 or float64 tensor, got ndarray", (lambda x: x.numpy(), adjoint), {}),
        (ValueError, "measurements along one axis at least", (lambda x: x.sum(), lambda y: y.expand(4, 4)), {}),
        (ValueError, "image_shape must have the 16 numbers", (forward, adjoint), {"image_shape": (1, 4, 5)}),
    ):
        with pytest.raises(error, match=words):
            RayOperator(*pair, 4, **options)
    with pytest.raises(ValueError, match=r"fbp must return an image \(4, 4\), got \(3, 7\)"):
        RayOperator(forward, adjoint, 4, fbp=lambda y: y).fbp(drawn(3, 7))


def test_a_convolution_is_a_pair_too():
    conv = nn.Conv2d(1, 2, 3, bias=False)
    weight = conv.weight.detach()
    operator = RayOperator(
        lambda x: torch.nn.functional.conv2d(x, weight),
        lambda y: torch.nn.functional.conv_transpose2d(y, weight),
        6,
        image_shape=(1, 6, 6),
        batched=True,
    )
    assert operator.data_shape == (2, 4, 4)


@pytest.mark.parametrize("held", [1 << 30, 0], ids=["dense", "iterative"])
@pytest.mark.parametrize("vectors", [5, 100])
def test_noise_in_the_image_is_along_as_many_singular_vectors_as_are_asked_for(held, vectors, monkeypatch):
    """Of pixels' variance: the pseudo-inverse's squared norm over pixels, cut off after some vectors."""
    monkeypatch.setattr(module, "DENSE", held)
    monkeypatch.setattr(module, "SINGULAR_VECTORS", vectors)
    rays = RayTransform(7, 4)
    matrix = rays.forward(torch.eye(49, dtype=torch.float64).view(49, 7, 7)).reshape(49, -1)
    values = torch.linalg.svdvals(matrix)
    rank = int((values > 1e-6 * values[0]).sum())
    expected = (values[: min(vectors, rank)] ** -2).sum().item() / 49
    assert rays.noise_gain(torch.float64) == pytest.approx(expected, rel=1e-4)
    assert rays.noise_gain() == pytest.approx(expected, rel=1e-2)

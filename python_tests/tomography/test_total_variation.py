"""The expected total variation of Gaussian images, against sampling, quadrature and differences one by one."""

from __future__ import annotations

import math

import pytest
import torch

from ella_cuda.tomography import total_variation, total_variation_gaussian
from ella_cuda.tomography.total_variation import expected_absolute
from python_tests.tomography.small import drawn


def covariance(d: int, seed: int = 1):
    root = drawn(d, d, seed=seed)
    return root @ root.T / d


def by_loops(x):
    height, width = x.shape
    total = 0.0
    for i in range(height):
        for j in range(width):
            total += abs(x[i, j] - x[i + 1, j]).item() if i + 1 < height else 0.0
            total += abs(x[i, j] - x[i, j + 1]).item() if j + 1 < width else 0.0
    return total


def test_total_variation_is_that_of_neighbours():
    x = drawn(3, 4, 5)
    assert total_variation(x).tolist() == pytest.approx([by_loops(image) for image in x])


def test_expectation_is_that_of_samples():
    mean, k = drawn(3, 4), covariance(12)
    samples = mean.flatten() + drawn(200_000, 12, seed=5) @ torch.linalg.cholesky(k).T
    values = total_variation(samples.view(-1, 3, 4))
    error = values.std() / math.sqrt(len(values))
    assert (total_variation_gaussian(mean, k) - values.mean()).abs() < 4 * error
    assert error < 0.001 * values.mean()


def test_a_differences_expectation_is_its_integral():
    t = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    for m, v in ((0.3, 2.0), (-1.5, 0.04), (0.0, 1.0)):
        m, v = torch.tensor(m, dtype=torch.float64), torch.tensor(v, dtype=torch.float64)
        density = torch.exp(-((t - m) ** 2) / (2 * v)) / (2 * math.pi * v).sqrt()
        assert expected_absolute(m, v).item() == pytest.approx(torch.trapezoid(density * t.abs(), t).item(), rel=1e-6)


def test_without_variance_it_is_the_means_total_variation_and_batches_broadcast():
    mean, none = drawn(2, 3, 4), torch.zeros(12, 12, dtype=torch.float64)
    torch.testing.assert_close(total_variation_gaussian(mean, none), total_variation(mean))
    mean.requires_grad_()
    total_variation_gaussian(mean, none).sum().backward()
    assert mean.grad.isfinite().all()
    both = torch.stack([covariance(12), covariance(12, 2)])
    found = total_variation_gaussian(mean.detach(), both)
    torch.testing.assert_close(found[1], total_variation_gaussian(mean.detach()[1], both[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_are_finite_however_small_the_variance_is_beside_the_mean(dtype):
    tiny = torch.finfo(dtype).tiny
    for v in (0.0, tiny, 10 * tiny, tiny**0.75, tiny**0.5, 1e-6):
        m = torch.tensor([-0.3, 0.1], dtype=dtype, requires_grad=True)
        variance = torch.full((2,), v, dtype=dtype, requires_grad=True)
        found = expected_absolute(m, variance)
        by_mean, by_variance = torch.autograd.grad(found.sum(), (m, variance), create_graph=True)
        assert found.tolist() == m.abs().tolist() and by_mean.tolist() == [-1.0, 1.0]
        assert by_variance.tolist() == [0.0, 0.0]
        if by_variance.requires_grad:
            (second,) = torch.autograd.grad(by_variance.sum(), variance)
            assert second.tolist() == [0.0, 0.0]


def test_it_is_differentiable_twice():
    root = drawn(6, 6, seed=2).requires_grad_()
    mean = drawn(2, 3).requires_grad_()

    def function(mean, root):
        return total_variation_gaussian(mean, root @ root.T)

    assert torch.autograd.gradcheck(function, (mean, root)) and torch.autograd.gradgradcheck(function, (mean, root))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"total_variation: x must have shape \(..., H, W\), got \(6,\)"):
        total_variation(drawn(6))
    with pytest.raises(ValueError, match=r"covariance must have shape \(..., 6, 6\)"):
        total_variation_gaussian(drawn(2, 3), covariance(5))
    with pytest.raises(ValueError, match=r"mean must have shape \(..., H, W\)"):
        total_variation_gaussian(drawn(6), covariance(6))
    with pytest.raises(ValueError, match="positive semi-definite"):
        total_variation_gaussian(drawn(2, 3), -covariance(6))

"""Class probabilities from Gaussian logits, in their limits."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from ella_cuda.laplace.likelihoods import LINKS, sigmoid_probabilities, softmax_probabilities

CLOSED = [link for link in LINKS if link != "mc"]


def gaussian(classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(6, classes, generator=generator, dtype=torch.float64)
    root = torch.randn(6, classes, classes, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT + 0.1 * torch.eye(classes, dtype=torch.float64)


def probabilities(link: str, mean: Tensor, covariance: Tensor) -> Tensor:
    return softmax_probabilities(link, mean, covariance.diagonal(dim1=-2, dim2=-1) if link == "probit" else covariance)


@pytest.mark.parametrize("link", CLOSED)
def test_probabilities_are_distributions_in_the_logits_order(link: str) -> None:
    mean, _ = gaussian()
    found = probabilities(link, mean, 0.3 * torch.eye(4, dtype=torch.float64).expand(6, 4, 4))
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64))
    assert found.min() > 0
    assert torch.equal(found.argsort(1), mean.argsort(1))


@pytest.mark.parametrize("link", ["probit", "probit_full"])
def test_without_variance_they_are_the_softmax_and_with_much_uniform(link: str) -> None:
    mean, covariance = gaussian()
    torch.testing.assert_close(probabilities(link, mean, 0 * covariance), torch.softmax(mean, 1))
    unit = torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
    torch.testing.assert_close(probabilities(link, mean, 1e16 * unit), torch.full_like(mean, 0.25), rtol=1e-6, atol=0)


def test_what_is_added_to_all_logits_does_not_matter_to_differences() -> None:
    mean, covariance = gaussian()
    found = probabilities("probit_full", mean, covariance)
    torch.testing.assert_close(probabilities("probit_full", mean + 3, covariance + 5), found)
    assert not torch.allclose(probabilities("probit", mean, covariance + 5), probabilities("probit", mean, covariance))


def test_two_classes_are_a_sigmoid_of_their_difference() -> None:
    mean, covariance = gaussian(2)
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    expected = sigmoid_probabilities("probit", mean[:, 0] - mean[:, 1], variance)
    found = probabilities("probit_full", mean, covariance)[:, 0]
    # Of two classes the unnormalised values are 1 / (1 + e^d) and 1 / (1 + e^-d).
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("link", ["bridge", "bridge_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dirichlet_needs_variance_in_every_direction(link: str, dtype: torch.dtype) -> None:
    mean, covariance = gaussian()
    row = torch.randn(6, 4, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Of rank one, none at all, of rank one beside a common shift, which is whole too given the sum, and two that are whole.
    flat = torch.cat([row[:2] @ row[:2].mT, 0 * covariance[2:3], row[3:4] @ row[3:4].mT + 2.0, covariance[4:]])
    mean, flat = mean.to(dtype), flat.to(dtype)
    with pytest.warns(UserWarning, match="3 of 6 predictions have logits without a variance of their own"):
        found = softmax_probabilities(link, mean, flat)
    parts = softmax_probabilities("probit_full", mean, flat)[:3], softmax_probabilities(link, mean[3:], flat[3:])
    torch.testing.assert_close(found, torch.cat(parts))
    torch.testing.assert_close(found[2], torch.softmax(mean[2], 0))


@pytest.mark.parametrize("link", CLOSED)
def test_positions_are_apart_and_large_logits_finite(link: str) -> None:
    mean, covariance = gaussian()
    both = probabilities(link, mean.view(2, 3, 4), covariance.view(2, 3, 4, 4))
    torch.testing.assert_close(both.flatten(0, 1), probabilities(link, mean, covariance))
    assert probabilities(link, 1e5 * mean, covariance).isfinite().all()


@pytest.mark.parametrize("link", CLOSED)
@pytest.mark.parametrize("of_masked", ["nothing", "everything"])
def test_masked_classes_leave_the_links_of_the_others(link: str, of_masked: str) -> None:
    """A class at minus infinity has probability 0, whatever its covariance; one class alone is certain, without a warning."""
    mean, covariance = gaussian(5)
    masked = torch.zeros(6, 5, dtype=torch.bool)
    masked[0, 2] = masked[1, :2] = masked[2, 1:] = masked[3, [0, 2, 4]] = True
    given = covariance.masked_fill(masked[:, :, None] | masked[:, None], 0.0) if of_masked == "nothing" else covariance
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = probabilities(link, mean.masked_fill(masked, -math.inf), given)
        for p, m, c, gone in zip(found, mean, covariance, masked, strict=True):
            left = (~gone).nonzero()[:, 0]
            alone = len(left) == 1
            expected = p.new_ones(1) if alone else probabilities(link, m[left][None], c[left][:, left][None])[0]
            torch.testing.assert_close(p[left], expected, rtol=1e-12, atol=0)
            assert (p[gone] == 0).all()

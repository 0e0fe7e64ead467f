"""Priors of filters against covariances written entry by entry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda.tomography import FilterPrior, UNet, filter_blocks
from python_tests.tomography.small import drawn, tap_covariance


@pytest.fixture
def network():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 5)).double()


@pytest.fixture
def values():
    return torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64), torch.tensor([-0.4, 0.7], dtype=torch.float64)


def dense(values):
    """The weights' covariance: 3 filters of 9 taps, 6 of one, 2 of 25."""
    variance, lengthscale = values[0].exp(), values[1].exp()
    parts = [variance[0] * tap_covariance(3, lengthscale[0])] * 3 + [variance[1][None, None]] * 6
    return torch.block_diag(*parts, *[variance[2] * tap_covariance(5, lengthscale[1])] * 2)


def test_the_papers_network_has_33_terms_of_six_distances():
    prior = FilterPrior(UNet(channels=4))
    assert len(prior.terms) == 33 and len(prior.smooth) == 5 and len(prior.blocks) == 8
    distances = [d**2 for block, d in prior.terms if block == 0]
    assert distances == pytest.approx([0, 1, 2, 4, 5, 8])


def test_products_draws_and_penalties_are_those_of_the_dense_covariance(network, values):
    prior = FilterPrior(network)
    weights = prior.weights(*values)
    s = dense(values)
    taps = prior.tap_covariances(weights)
    theta = drawn(prior.n_params)
    torch.testing.assert_close(prior.multiply(drawn(4, prior.n_params), taps), drawn(4, prior.n_params) @ s)
    torch.testing.assert_close(prior.penalty(prior.moments(theta), weights), theta @ torch.linalg.solve(s, theta))
    units = prior.draw(torch.eye(prior.n_params, dtype=torch.float64), taps)
    torch.testing.assert_close(units.T @ units, s)


def test_terms_add_up_to_the_covariance(network, values):
    prior = FilterPrior(network)
    weights, rows = prior.weights(*values), drawn(5, prior.n_params)
    found = sum(w * prior.gram(rows, t, chunk=800) for t, w in enumerate(weights))
    torch.testing.assert_close(found, rows @ dense(values) @ rows.T)
    u, v = drawn(3, prior.n_params, seed=1), drawn(3, prior.n_params, seed=2)
    torch.testing.assert_close(weights @ prior.pairings(u, v), (u @ dense(values) * v).sum())


def test_derivatives_are_those_of_the_dense_covariance(network, values):
    prior, theta = FilterPrior(network), drawn(3 * 9 + 6 + 50)
    moments = prior.moments(theta)
    leaves = [v.clone().requires_grad_() for v in values]
    found = torch.autograd.grad(prior.penalty(moments, prior.weights(*leaves)), leaves)
    expected = torch.autograd.grad(theta @ torch.linalg.solve(dense(leaves), theta), leaves)
    torch.testing.assert_close(found, expected)


def test_blocks_are_the_outermost_modules_that_are_no_lists():
    network = nn.ModuleDict(
        {"a": nn.ModuleList([nn.Conv2d(1, 1, 3), nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 1))])}
    )
    assert filter_blocks(network) == {
        "a.0 3x3": ["a.0.weight"],
        "a.1 3x3": ["a.1.0.weight"],
        "a.1 1x1": ["a.1.1.weight"],
    }
    assert filter_blocks(nn.Conv2d(1, 1, 3)) == {"conv 3x3": ["weight"]}
    network["a"][0].weight.requires_grad_(False)
    assert "a.0 3x3" not in filter_blocks(network)


def test_a_weight_of_several_convolutions_is_in_the_firsts_block():
    network = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3))
    network[1].weight = network[0].weight
    assert filter_blocks(network) == {"0 3x3": ["0.weight"], "2 3x3": ["2.weight"]}
    assert FilterPrior(network).n_params == 18


def test_blocks_of_ones_own(network):
    prior = FilterPrior(network, {"first": ["2.weight"], "second": ["0.weight"]})
    assert prior.parameter_names == ["2.weight", "0.weight"] and prior.n_params == 6 + 27 and prior.smooth == [1]


@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        ({"a": ["0.weight", "2.weight"]}, ValueError, "must have one kernel size"),
        ({"a": ["0.weight"], "b": ["0.weight"]}, ValueError, "must name each weight once"),
        ({"a": ["0.bias"]}, TypeError, r"must name weights .* got '0.bias', of shape"),
        ({"a": ["9.weight"]}, TypeError, "which the network lacks"),
        ({}, ValueError, "must have a torch.nn.Conv2d"),
    ],
)
def test_wrong_blocks_are_refused(network, blocks, error, words):
    with pytest.raises(error, match=words):
        FilterPrior(network, blocks)

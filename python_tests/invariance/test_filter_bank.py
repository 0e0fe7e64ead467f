"""Filters that are transformed in place of images: the same features, exactly by the adjoint, and without N S images."""

from __future__ import annotations

import math

import pytest
import torch

from ella_cuda.augment import AffineAugment, Augment
from ella_cuda.invariance import InvariantFilterBank
from ella_cuda.ops.averaged_filters import ACTIVATIONS
from python_tests.augment.augments import DOUBLE, raw
from python_tests.ops.checks import Largest

SHAPE = (2, 7, 9)


def bank_of(
    augment: AffineAugment | None = None, n_filters: int = 5, shape: tuple[int, int, int] = SHAPE, **options: object
) -> InvariantFilterBank:
    return InvariantFilterBank(shape, n_filters, AffineAugment(4, **DOUBLE) if augment is None else augment, **options)


def by_both_paths(bank: InvariantFilterBank, x: torch.Tensor, eps: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for path in ("filters", "inputs"):
        bank.path = path
        found.append(bank(x, eps))
    return found


@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 6)])
@pytest.mark.parametrize("activation", [*ACTIVATIONS])
def test_by_the_adjoint_both_paths_are_the_same(activation, shape, device):
    """All generators at once, images and filters with anything at their borders, in values and gradients."""
    augment = AffineAugment(6, init=0.4, **DOUBLE).to(device)
    bank = bank_of(augment, shape=shape, activation=activation)
    x = torch.randn(3, *shape, device=device, **DOUBLE).requires_grad_()
    eps, leaves = augment.draw(1, "shared"), [augment.raw.requires_grad_(), *bank.parameters(), x]
    values = by_both_paths(bank, x, eps)
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
    assert values[0].shape == (3, 5)
    slopes = [torch.autograd.grad((value * torch.arange(5, device=device)).sum(), leaves) for value in values]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert a.abs().max() > 1e-6


def test_transformed_filters_are_those_of_transformed_images():
    augment = raw(3, init=0.5)
    bank, eps = bank_of(augment), augment.draw(1, "shared")
    x = torch.randn(2, *SHAPE, **DOUBLE)
    filters, copies = bank.filters(eps), augment(x, eps=eps)
    assert filters.shape == (3, 5, *SHAPE)
    products = torch.einsum("nchw,sdchw->nsd", x, filters)
    torch.testing.assert_close(products, torch.einsum("nschw,dchw->nsd", copies, bank.weight))


def test_filters_path_never_has_images_for_all_copies():
    """A forward and a backward pass; what is largest are the filters' activations, N S H numbers."""
    n, s, h, side = 64, 6, 4, 12
    augment = AffineAugment(s, dtype=torch.float32)
    augment.raw.requires_grad_()
    bank = InvariantFilterBank((1, side, side), h, augment)
    x, largest = torch.randn(n, 1, side, side), {}
    for path in ("filters", "inputs"):
        bank.path = path
        with Largest() as seen:
            bank(x).sum().backward()
        largest[path] = seen.numbers
    assert largest["inputs"] >= n * s * side**2
    assert largest["filters"] <= max(n * s * h, s * h * side**2, n * side**2) < n * s * side**2


@pytest.mark.parametrize("path", ["filters", "inputs"])
def test_features_by_copy_average_to_features(path):
    augment = raw(4, init=0.3)
    bank = bank_of(augment, path=path)
    x = torch.randn(3, *SHAPE, **DOUBLE)
    with augment.held():
        copies = bank.by_copy(x)
        assert copies.shape == (3, 4, 5)
        torch.testing.assert_close(copies.mean(1), bank(x))


def test_draws_of_a_batch_are_shared_by_filters_alone():
    x = torch.randn(1, *SHAPE, **DOUBLE).expand(3, *SHAPE)
    augment = raw(4, init=0.5)
    bank = bank_of(augment)
    first, second = bank(x), bank(x)
    torch.testing.assert_close(first[0], first[2])  # the images are the same
    assert not torch.allclose(first, second)
    bank.path = "inputs"
    assert not torch.allclose(*bank(x)[:2])
    with augment.held() as eps:
        torch.testing.assert_close(bank(x), bank(x))
        assert eps.shape == (1, 4, 6)


def test_a_full_circle_is_invariant_to_its_quarter_turns():
    augment = raw(4, "rotation", math.pi * (1 - 1e-15), sampling="grid")
    bank = bank_of(augment, shape=(1, 8, 8))
    x = torch.randn(3, 1, 8, 8, **DOUBLE)
    torch.testing.assert_close(bank(x), bank(x.rot90(1, (2, 3))), rtol=0, atol=1e-10)
    augment.set_eta(0.5)
    assert not torch.allclose(bank(x), bank(x.rot90(1, (2, 3))), atol=1e-3)


def test_under_autocast_features_are_float32():
    augment = AffineAugment(3, sampling="grid", generators="rotation")
    bank = InvariantFilterBank((1, 8, 8), 4, augment)
    x = torch.randn(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = bank(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, bank(x))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"in_shape": (8, 8)}, ValueError, r"in_shape must be \(C, H, W\)"),
        ({"in_shape": (1, 0, 8)}, ValueError, "in_shape"),
        ({"n_filters": 0}, ValueError, "n_filters must be a positive integer, got 0"),
        ({"augment": Augment(3, ("a",))}, TypeError, "augment must be an AffineAugment, got Augment"),
        (
            {"activation": "gelu"},
            ValueError,
            "activation must be one of 'identity', 'relu', 'tanh', 'gaussian', got 'gelu'",
        ),
        ({"path": "outputs"}, ValueError, "path must be one of 'filters', 'inputs', got 'outputs'"),
    ],
)
def test_wrong_arguments_are_refused(change, kind, words):
    arguments = {"in_shape": (1, 8, 8), "n_filters": 3, "augment": AffineAugment(2)} | change
    with pytest.raises(kind, match=words):
        InvariantFilterBank(**arguments)


def test_wrong_inputs_and_draws_are_refused():
    bank = bank_of()
    for x, words in (
        (torch.ones(3, 2, 7, 8, **DOUBLE), r"x must have shape \(N, 2, 7, 9\), got \(3, 2, 7, 8\)"),
        (torch.ones(2, 7, 9, **DOUBLE), "x must have shape"),
        (torch.ones(3, *SHAPE), "x is torch.float32"),
    ):
        for call in (bank, bank.by_copy):
            with pytest.raises(ValueError, match=words):
                call(x)
    x, own = torch.ones(3, *SHAPE, **DOUBLE), bank.augment.draw(3, "independent")
    with pytest.raises(ValueError, match="path='filters' needs draws that all inputs share"):
        bank(x, own)
    with bank.augment.held(own), pytest.raises(ValueError, match="take path='inputs'"):
        bank(x)
    with pytest.raises(ValueError, match="path must be one of"):
        bank.path = "both"
    bank.path = "inputs"
    assert bank(x, own).shape == (3, 5)

"""Amounts: hyperparameters in a buffer, their constraints, and what is refused."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ella_cuda.augment import GENERATORS, AffineAugment, Augment, AveragedFunction, LocalDeformation
from python_tests.augment.augments import DOUBLE, raw
from python_tests.ops.checks import assert_same


def test_amounts_are_buffers_that_the_optimizer_of_the_weights_leaves_alone():
    augment = AffineAugment(3, init=0.2)
    function = AveragedFunction(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), augment)
    assert [name for name, _ in augment.named_buffers()] == ["raw"] and not list(augment.parameters())
    assert "augment.raw" in function.state_dict() and not augment.raw.requires_grad
    before = augment.raw.clone()
    optimizer = torch.optim.SGD(function.parameters(), lr=0.1)
    function(torch.randn(4, 1, 6, 6)).square().sum().backward()
    optimizer.step()
    assert torch.equal(augment.raw, before)


@pytest.mark.parametrize("constraint", ["softplus", "raw"])
def test_amounts_start_where_they_are_told(constraint):
    init = dict(zip(GENERATORS, (0.1, 0.2, 1.5, 0.05, 0.3, 5.0), strict=True))
    for given in (init, [*init.values()], torch.tensor([*init.values()], **DOUBLE)):
        augment = AffineAugment(3, init=given, constraint=constraint, **DOUBLE)
        assert augment.amounts() == pytest.approx(init, rel=1e-12)
        assert augment.generators == GENERATORS and list(augment.amounts()) == [*GENERATORS]
    augment = AffineAugment(3, ("shear", "tx"), {"tx": 0.1, "shear": 0.7}, constraint=constraint)
    assert augment.amounts() == pytest.approx({"shear": 0.7, "tx": 0.1})
    augment.set_eta(np.float32(0.4))
    assert augment.eta.tolist() == pytest.approx([0.4, 0.4])
    signed = raw(3, ("tx", "ty"), [0.0, -0.5])
    assert signed.eta.tolist() == [0, -0.5] and signed.amounts() == {"tx": 0, "ty": 0.5}


def test_constraints_have_their_derivatives():
    augment = AffineAugment(3, init=0.3, **DOUBLE)
    slope = torch.func.jacrev(lambda raw: torch.func.functional_call(Eta(augment), {"augment.raw": raw}, ()))(
        augment.raw
    )
    assert_same(slope, torch.diag(augment.raw.sigmoid()))
    assert_same(augment.eta, augment.raw.exp().log1p())
    assert raw(3, "rotation").eta.equal(raw(3, "rotation").raw)


class Eta(nn.Module):
    def __init__(self, augment: Augment) -> None:
        super().__init__()
        self.augment = augment

    def forward(self) -> Tensor:
        return self.augment.eta


@pytest.mark.parametrize("constraint", ["softplus", "raw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_is_clamped_at_the_full_circle_and_comes_back(constraint, dtype):
    augment = AffineAugment(3, ("tx", "rotation"), 3.0, constraint=constraint, dtype=dtype)
    with torch.no_grad():
        augment.raw += 1
    tx, rotation = augment.eta.tolist()
    assert rotation == pytest.approx(math.pi) and tx > 3.5
    augment.raw.requires_grad_()
    assert torch.autograd.grad(augment.eta.sum(), augment.raw)[0].tolist()[1] == 0
    augment.project_()
    assert augment.amounts()["rotation"] == pytest.approx(math.pi) and augment.amounts()["tx"] == tx
    assert torch.autograd.grad(augment.eta.sum(), augment.raw)[0][1] > 0.9
    if constraint == "raw":
        augment.set_eta([1.0, -3.0])
        with torch.no_grad():
            augment.raw.sub_(2)
        assert augment.eta.tolist() == pytest.approx([-1, -math.pi])
    augment.set_eta({"tx": 0.1, "rotation": float(torch.tensor(math.pi))})  # in single precision it is above pi
    assert torch.autograd.grad(augment.eta.sum(), augment.raw)[0][1] > 0.9


def test_states_have_the_amounts():
    x, augment = torch.randn(2, 1, 6, 6), AffineAugment(4, "rotation", 0.8, "grid")
    expected = augment(x)
    other = AffineAugment(4, "rotation", 0.1, "grid")
    assert not torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(augment.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), expected)


def test_a_device_and_a_dtype_are_taken():
    augment = AffineAugment(2, device="meta", dtype=torch.float64)
    assert augment.raw.device.type == "meta" and augment.raw.dtype == torch.float64
    assert AffineAugment(2).double().raw.dtype == torch.float64
    assert repr(AffineAugment(2, "tx")) == "AffineAugment(2, tx, sampling='independent', constraint='softplus')"


X = torch.zeros(2, 1, 4, 4)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: AffineAugment(0), ValueError, "AffineAugment: n_samples must be a positive integer, got 0"),
        (lambda: AffineAugment(True), ValueError, "n_samples must be a positive integer, got True"),
        (lambda: AffineAugment(2.0), ValueError, "n_samples must be a positive integer, got 2.0"),
        (lambda: AffineAugment(2, "turn"), ValueError, "AffineAugment: generators must be 'all' or some of tx, .* got 'turn'"),
        (lambda: AffineAugment(2, ("tx", "tx")), ValueError, "each once"),
        (lambda: AffineAugment(2, None), TypeError, "generators must be a name or a list or tuple of names, got NoneType"),
        (lambda: AffineAugment(2, dtype=torch.float16), ValueError, "dtype must be torch.float32 or torch.float64, got torch.float16"),
        (lambda: AffineAugment(2, sampling="random"), ValueError, "sampling must be one of independent, shared, grid, sobol, got 'random'"),
        (lambda: AffineAugment(2, constraint="exp"), ValueError, "constraint must be one of softplus, raw, got 'exp'"),
        (lambda: AffineAugment(2, init=0.0), ValueError, r"init must be positive with constraint='softplus', got 0.0 for tx; start at 0.05"),
        (lambda: AffineAugment(2, init=-0.1), ValueError, "init must be positive .* got -0.1"),
        (lambda: AffineAugment(2, init=math.nan), ValueError, "init must be finite, got nan for tx"),
        (lambda: AffineAugment(2, init="0.1"), TypeError, "init must be a number, 6 numbers or a mapping .* got str"),
        (lambda: AffineAugment(2, init=True), TypeError, "init must be a number, .* got bool"),
        (lambda: AffineAugment(2, init=[0.1, 0.1]), ValueError, "init must have 6 numbers, for tx, ty, .* got 2"),
        (lambda: AffineAugment(2, "tx", init=["0.1"]), TypeError, "init must be numbers, got str for tx"),
        (lambda: AffineAugment(2, init={"tx": 0.1}), ValueError, "init must have the names tx, ty, .* got tx"),
        (lambda: AffineAugment(2, "rotation", 3.2), ValueError, r"init must be at most 3.141593 in absolute value for rotation, got 3.2"),
        (lambda: AffineAugment(2, "rotation").set_eta(0), ValueError, "eta must be positive"),
        (lambda: AffineAugment(1, "rotation", sampling="grid"), ValueError, "n_samples must be at least 2 with sampling='grid', got 1"),
        (lambda: AffineAugment(8, ("tx", "ty"), sampling="grid"), ValueError, r"n_samples must be m\*\*2 with m >= 2, .* got 8; .*sobol"),
        (lambda: raw(4, "tx", 0.0, sampling="grid"), ValueError, "init must not be 0 with sampling='grid', got 0.0.* Start at 0.05"),
        (lambda: AffineAugment(2)([[0.0]]), TypeError, "x must be a tensor .* got list"),
        (lambda: AffineAugment(2)(torch.tensor(1.0)), ValueError, r"x must have shape \(N, \.\.\.\), got \(\)"),
        (lambda: AffineAugment(2)(X[0]), ValueError, r"AffineAugment: x must have shape \(N, C, H, W\), got \(1, 4, 4\)"),
        (lambda: AffineAugment(2)(X.double()), ValueError, "x is torch.float64, the amounts are torch.float32; convert one with .to()"),
        (lambda: AffineAugment(2)(X.to(torch.uint8)), ValueError, "x is torch.uint8"),
        (lambda: AffineAugment(2)(X.to("meta")), ValueError, r"x is on meta, the amounts are on cpu; move one .* x.to\('cpu'\)"),
        (lambda: AffineAugment(2)(X, eps=0.5), TypeError, r"eps must be a tensor \(S, 6\) or \(N or 1, S, 6\), got float"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(3, 5)), ValueError, r"eps must have shape .* got \(3, 5\)"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(0, 6)), ValueError, r"eps must have shape .* got \(0, 6\)"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(3, 2, 6)), ValueError, r"eps must be for 1 or all 2 inputs, got \(3, 2, 6\)"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(2, 6).double()), ValueError, "eps is torch.float64"),
        (lambda: AffineAugment(2).draw(3, "normal"), ValueError, "sampling must be one of"),
        (lambda: AffineAugment(2).held(torch.zeros(2, 5)).__enter__(), ValueError, "eps must have shape"),
        (lambda: AffineAugment(2).held(sampling="grid").__enter__(), ValueError, r"n_samples must be m\*\*6"),
        (lambda: setattr(AffineAugment(2), "sampling", "none"), ValueError, "sampling must be one of"),
        (lambda: LocalDeformation(2, sampling="grid"), ValueError, "sampling must be one of independent, shared, got 'grid'"),
        (lambda: LocalDeformation(2, grid_size=1), ValueError, "grid_size must be an integer of at least 2, got 1"),
        (lambda: LocalDeformation(2)(X[0]), ValueError, r"LocalDeformation: x must have shape \(N, C, H, W\)"),
        (lambda: Augment(2, ("a",))(X), NotImplementedError, r"Augment must implement transform\(x, eps, eta\)"),
    ],
)  # fmt: skip
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call()

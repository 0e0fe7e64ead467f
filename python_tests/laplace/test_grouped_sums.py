"""What a pass does on CUDA, on the CPU: Kronecker sums wait for each other, gradients go back all at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ella_cuda.laplace import KronLaplace, column_functions, kronecker_sums
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.rules.base import rule_for
from ella_cuda.ops.conv_kron_accumulate import GroupedSums


class Calls(TorchDispatchMode):
    """Which ops that group sums were called, with how many sums, and how often gradients were copied."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.single, self.copies = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("ella_cuda::")
        if name.endswith("accumulate_many_"):
            self.grouped.append((name, len(args[0])))
        self.single += name.endswith("kron_accumulate_")
        self.copies += name in ("aten::clone", "aten::copy_") and args[0].dim() > 3
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    """Convolutions with strides and without, a layer called twice, sequences, a bias that shares an output side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).requires_grad_(False)
        self.twice, self.down = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 6, 3, 2, 1, bias=False)
        self.positions, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.twice(torch.relu_(self.twice(x))) + x
        return self.head(self.positions(self.down(x).flatten(2).mT).relu().mean(1))


def fitted(model: nn.Module, approximation: str = "expand", batches: int = 2) -> tuple[list[Tensor], Calls]:
    """All factors after so many batches."""
    torch.manual_seed(1)
    data = [(torch.randn(5, 2, 8, 8), torch.randint(3, (5,))) for _ in range(batches)]
    la = KronLaplace(model, approximation=approximation)
    with Calls() as calls:
        la.fit(data)
    sides = [side for f in la.factors.values() for side in (f.input_moment, f.output_moment) if side is not None]
    return [side.total.clone() for side in sides], calls


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_factors_are_the_same_bits(monkeypatch, model, approximation):
    alone, calls = fitted(model, approximation)
    assert not calls.grouped and calls.single
    monkeypatch.setattr(kronecker_sums, "together", lambda values: True)
    grouped, calls = fitted(model, approximation)
    assert not calls.single
    assert all(torch.equal(one, other) for one, other in zip(alone, grouped, strict=True))


def test_sums_of_a_pass_go_together(monkeypatch, model):
    """Or as soon as what waits takes more than its room."""
    monkeypatch.setattr(kronecker_sums, "together", lambda values: True)
    _, calls = fitted(model)  # in the first batch once more: a bias gets an output side of its own
    assert calls.grouped[-2:] == [("conv_kron_accumulate_many_", 8), ("kron_accumulate_many_", 6)]
    assert len(calls.grouped) == 6
    monkeypatch.setattr(kronecker_sums, "WAITING", 5000)  # a batch's images have 2,560 bytes, the first outputs 5,120
    _, calls = fitted(model)
    assert max(count for _, count in calls.grouped) <= 4 and len(calls.grouped) > 8


def test_a_bias_takes_over_what_waits(monkeypatch):
    """Which was the weight's too until one of its gradients has several positions."""
    monkeypatch.setattr(kronecker_sums, "together", lambda values: True)
    rule, sums = rule_for(nn.Linear(3, 2), "layer"), kronecker_sums.KroneckerSums()
    rule.allocate()
    call, one, several = Call(rule), torch.randn(1, 4, 2), torch.randn(1, 4, 5, 2)
    sums.forward(call, [torch.randn(4, 3)])
    for gradient in (one, several):
        sums.add_outputs(call, rule.output_rows(gradient, None))
    sums.flush()
    rows = torch.cat([one[0], several[0].sum(1)]).double()
    torch.testing.assert_close(rule.factors["bias"].output_moment.total[0], rows.T @ rows)


def test_rows_that_changed_are_refused():
    sums, factor, rows = GroupedSums(1 << 20), torch.zeros(1, 3, 3), torch.randn(5, 1, 3)
    sums.kron_accumulate_(factor, rows)
    rows += 1
    with pytest.raises(RuntimeError, match="rows were changed in place before they were added"):
        sums.launch()
    assert not factor.any()


def test_gradients_go_back_without_copies(monkeypatch):
    """All at once, in the layout in which they come; as in pieces."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 3))

    def copies_of_a_batch() -> int:
        return fitted(model, batches=2)[1].copies - fitted(model, batches=1)[1].copies

    expected, _ = fitted(model)
    assert copies_of_a_batch() >= 4
    monkeypatch.setattr(column_functions, "in_pieces", lambda columns: False)
    assert copies_of_a_batch() == 0
    for one, other in zip(expected, fitted(model)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))

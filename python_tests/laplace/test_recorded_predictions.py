"""Recorded predictions have the numbers of those that run as they are, to the last bit, at the precisions of each call."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace, recorded_batches, tape
from ella_cuda.laplace.jacobian_pass import JacobianPass
from ella_cuda.laplace.predictive import predictions_at
from ella_cuda.laplace.recorded_predictions import RecordedPredictions
from python_tests.benchmark_files import load
from python_tests.laplace.checks import randomised
from python_tests.laplace.test_conformance import CASES, Network, each_case
from python_tests.laplace.test_recorded_batches import NEVER, SETTINGS, Turning, perceptron, stand_in, vectors

PRECISIONS = (
    1.0,
    2.0,
    0.1,
    7.0,
)  # of passes: one that runs as it is, one that is recorded, one that is compared, one that is not


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The second pass of a kind is recorded; the function that sets another number."""

    def at(passes: float) -> None:
        monkeypatch.setattr(recorded_batches, "PATIENCE", {"cpu": passes, "cuda": passes})

    at(2)
    return at


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of data points of the passes that a tape ran on."""
    found: list[int] = []
    again = RecordedPredictions._again
    monkeypatch.setattr(
        RecordedPredictions,
        "_again",
        lambda self, kind, inputs, given: found.append(len(inputs[0])) or again(self, kind, inputs, given),
    )
    return found


def of_one(la: Any, x: Any) -> list[Tensor]:
    return [la.functional_variance(x), la.functional_covariance(x)]


def of_several(la: Any, x: Any) -> list[Tensor]:
    """Variances alone too, and under two precisions."""
    precisions = torch.tensor([0.3, 5.0], dtype=torch.float64)
    both = predictions_at(la, precisions, x, "glm", "probit", 1)
    return [*la(x, diagonal_output=True), *of_one(la, x), *(t for found in both for t in found)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check(la: Any, x: Any, asked: Callable[[Any, Any], list[Tensor]], patience: Callable[[float], None]) -> None:
    """Passes over three of five data points, other ones each time, at other precisions."""
    batches, found = [], []
    for start, precision in enumerate(PRECISIONS):
        which = torch.arange(start, start + 3) % 5
        batches.append(x[which] if isinstance(x, Tensor) else tuple(t[which] for t in x))
        la.prior_precision = precision
        found.append(asked(la, batches[-1]))
    patience(NEVER)
    for batch, precision, before in list(zip(batches, PRECISIONS, found, strict=True))[1:]:
        la._predicting = None
        la.prior_precision = precision
        assert same(before, asked(la, batch))


@each_case
def test_every_rule(case, patience, replays):
    model = Network(case)
    model.images = collections.deque()  # whose entries no description of the model has
    x, _ = model.data(5)
    la = KronLaplace(model, "regression").fit([(x, model(x).detach())])
    check(la, x, of_one, patience)
    assert len(replays) in (3, 6)  # the blocks of an embedding that all data points have are counted


def subnet(model: nn.Module, likelihood: str) -> SubnetLaplace:
    last = sum(p.numel() for p in model.parameters() if p.requires_grad) - 1
    return SubnetLaplace(model, likelihood, subnetwork_indices=torch.tensor([0, 3, last // 2, last]))


def corrected(model: nn.Module, likelihood: str) -> KronLaplace:
    return KronLaplace(model, likelihood, eigenvalue_correction=True)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", [KronLaplace, corrected, FullLaplace, DiagLaplace, subnet])
@pytest.mark.parametrize("last", [False, True])
def test_every_structure(last, kind, graphs, monkeypatch, patience, replays):
    """Of a linear last layer, covariances of all data points together are recorded, the others are algebra with features."""
    made = stand_in(monkeypatch) if graphs else []
    (x, _), model = vectors(5), perceptron()
    if last:
        model.requires_grad_(False)[-1].requires_grad_(True)
    la = kind(model, "regression").fit([(x, x[:, :4])])
    check(la, x, of_several, patience)
    kinds = 1 if last else 4
    assert len(replays) == 3 * kinds
    assert [(g.recorded, g.replayed) for g in made] == [(kinds, 2 * kinds)] * graphs


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_nothing_inside_reads_a_number(graphs, joint, monkeypatch, replays):
    if graphs:
        stand_in(monkeypatch)
    la = KronLaplace(Network(CASES["Conv2d"]), "regression")
    la.model.images = collections.deque()
    x, _ = la.model.data(5)
    la.fit([(x, la.model(x).detach())])
    for scale in range(1, 5):
        la._moments_under(scale * x, [la.posterior_precision], joint)
    with load("counted_ops").Counted(refuse=True) as counted:
        la._pass(x)(x, [la.posterior_precision], joint, False)
    assert len(replays) == 4 and counted.ops


def test_outputs_are_compared_until_they_are_others(monkeypatch, replays):
    """A tape may hold numbers of the inputs that it was recorded with, which only other inputs show."""
    compared, own = [], RecordedPredictions._own
    monkeypatch.setattr(RecordedPredictions, "_own", lambda self, x: compared.append(len(x)) or own(self, x))
    x, _ = vectors(5)
    la = KronLaplace(perceptron(), "regression").fit([(x, x[:, :4])])
    for number, scale in enumerate((1.0, 1.0, 1.0, 1.0, 2.0, 3.0)):  # the second is recorded
        la._moments_under(scale * x, [la.posterior_precision])
        assert len(compared) == min(number, 4) and len(replays) == number


def test_parts_are_passes(monkeypatch, patience, replays):
    monkeypatch.setattr(JacobianPass, "step", lambda *_: 2)
    x, _ = vectors(9)
    la = KronLaplace(perceptron(), "regression").fit([(x, x[:, :4])])
    found = of_several(la, x)
    assert replays == [2] * 9
    patience(NEVER)
    la._predicting = None
    assert same(found, of_several(la, x))


def test_long_programs_run_as_they_are(monkeypatch, replays):
    monkeypatch.setattr(tape, "MOST_STEPS", 20)
    x, _ = vectors(5)
    la = KronLaplace(perceptron(), "regression").fit([(x, x[:, :4])])
    assert len({la.functional_variance(x).sum().item() for _ in range(4)}) == 1
    assert not replays


@pytest.mark.parametrize("reads", ["item", "mask"])
def test_a_network_that_reads_numbers_runs_as_it_is(reads, replays):
    (x, y), model = vectors(9), Turning(reads)
    la = KronLaplace(model).fit([(x, y)])
    found = [la.functional_variance(1e12 * x if last else x) for last in (False, False, False, True)]
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[3])
    assert not replays


def test_a_change_where_nobody_looks_is_seen_by_the_next_pass(monkeypatch, replays):
    (x, y), model = vectors(5), Turning()
    la = KronLaplace(model).fit([(x, y)])
    before = [la.functional_variance(x) for _ in range(2)]
    monkeypatch.setitem(SETTINGS, "factor", 2.0)
    assert torch.equal(la.functional_variance(x), 4 * before[1])
    assert len(replays) == 1


class Weighted(nn.Module):
    """A layer of inputs times a table of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).double()
        self.register_buffer("which", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x * (self.which + 1))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("change", ["in place", "another", "parameters elsewhere"])
def test_what_changes_between_passes(change, graphs, monkeypatch, patience, replays):
    """Whatever no fingerprint has, where the model is the fit's."""
    if graphs:
        stand_in(monkeypatch)
    model, (x, y) = randomised(Weighted()), vectors(5)
    la = KronLaplace(model).fit([(x, y)])
    for _ in range(4):
        la.functional_variance(x)
    if change == "in place":
        model.which.copy_(model.which.flip(0))
    elif change == "another":
        model.which = model.which.flip(0)
    else:
        old = model.layer.weight.data
        model.layer.weight.data = old.clone()
        old.zero_()
    found = la.functional_variance(x)
    assert len(replays) == 4
    patience(NEVER)
    la._predicting = None
    assert torch.equal(found, la.functional_variance(x))

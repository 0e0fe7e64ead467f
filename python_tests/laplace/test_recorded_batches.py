"""Recorded batches have the numbers of batches that run as they are, to the last bit, or are refused; and a model is tried once."""

from __future__ import annotations

import copy
import ctypes
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.counted_ops import Counted as CountedOps
from ella_cuda.laplace import (
    FactorShape,
    IndependentLikelihood,
    KronLaplace,
    Rule,
    base,
    curvature,
    fitted_model,
    known_model,
    kronecker_sums,
    recorded_batches,
    register,
    register_likelihood,
    second_moment,
)
from ella_cuda.laplace.interception import OperatorMode
from ella_cuda.laplace.likelihoods import Classification
from ella_cuda.laplace.recorded_batches import RecordedBatches, _Sums
from ella_cuda.laplace.tape import NotRecordable, record
from python_tests.laplace.checks import randomised
from python_tests.laplace.test_conformance import CASES, Network, averages, each_case
from python_tests.laplace.test_outputs import FITS
from python_tests.recorded import RecordedGraphs

NEVER = math.inf


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch):
    """The second batch of a kind is recorded; the function that sets another number."""

    def at(batches: float) -> None:
        monkeypatch.setattr(recorded_batches, "PATIENCE", {"cpu": batches, "cuda": batches})

    at(2)
    return at


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of data points of the batches that a tape ran on."""
    found: list[int] = []
    again = RecordedBatches._again
    monkeypatch.setattr(
        RecordedBatches,
        "_again",
        lambda self, kind, plan, inputs, *rest: found.append(len(inputs[-1])) or again(self, kind, plan, inputs, *rest),
    )
    return found


class Sums:
    """What a fit has left."""

    def __init__(self, la: KronLaplace) -> None:
        run = type("Run", (), {"model": la.model, "all_rules": la._rules})()
        self.moments = _Sums(run).moments
        self.totals = [moment.total.clone() for moment in self.moments]
        self.rows = [moment.rows for moment in self.moments]
        self.statistic, self.n_targets = la.log_likelihood, la.n_targets

    def __eq__(self, other: object) -> bool:
        same = map(torch.equal, (*self.totals, self.statistic), (*other.totals, other.statistic))
        return all(same) and (self.rows, self.n_targets) == (other.rows, other.n_targets)


def in_threes(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Seven batches of three data points, each another, and one of two."""
    rows = [torch.arange(i, i + 3) % len(x) for i in range(7)]
    return [(x[r], y[r]) for r in rows] + [(x[:2], y[:2])]


def both_ways(model: nn.Module, loader, patient, likelihood="classification", **options) -> tuple[Sums, Sums]:
    """A fit with recorded batches, and one without."""
    found = []
    for batches in (2, NEVER):
        patient(batches)
        known_model._known.clear()
        torch.manual_seed(3)
        found.append(Sums(KronLaplace(model, likelihood, **options).fit(loader)))
    return found[0], found[1]


@each_case
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_every_rule(case, fisher, patient, replays):
    for approximation in ("expand", "reduce")[: 1 + case.reduce]:
        model = Network(case)
        recorded, plain = both_ways(
            model, in_threes(*model.data(5)), patient, fisher=fisher, approximation=approximation
        )
        assert recorded == plain
    assert set(replays) == {3} and 5 * (1 + case.reduce) <= len(replays) <= 6 * (1 + case.reduce)


@pytest.mark.parametrize("arrangement", ["twice", "tied", "copies", "float32", "per channel"])
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "FactoredLinear2d"])
def test_arrangements(name, arrangement, patient, replays):
    case, options = CASES[name], {}
    model = Network(case, 1 + (arrangement in ("twice", "tied")), arrangement == "tied")
    x, y = model.data(5)
    if arrangement == "copies":
        model, x, y = averages(case, 2, 5)[:3]
    elif arrangement == "float32":
        model, x = model.float(), x.float()
    elif arrangement == "per channel":
        options = {"resolution": "per_channel"}
    recorded, plain = both_ways(model, in_threes(x, y), patient, **options)
    assert recorded == plain
    assert len(replays) in (5, 6)


@pytest.mark.parametrize("case", FITS)
def test_likelihoods(case, patient, replays):
    make, x, y, likelihood, _ = FITS[case]
    recorded, plain = both_ways(make(), in_threes(x, y), patient, likelihood)
    assert recorded == plain
    assert len(replays) in (
        (0,) if case in ("sequences", "ignoring", "segmentation") else (5, 6)
    )  # columns are counted there


@pytest.mark.parametrize("small", [0, 40, 100, 150, 1 << 40])
def test_sums_that_grow_past_those_that_are_multiplied_in_double(small, monkeypatch, patient, replays):
    """One batch of a layer has 3 rows of 3 or 4 numbers: 27 or 48 products."""
    monkeypatch.setattr(second_moment, "SMALL", small)
    monkeypatch.setattr(second_moment, "WHOLE", 0)
    model = Network(CASES["Linear"]).float()
    x, y = model.data(5)
    recorded, plain = both_ways(model, in_threes(x.float(), y) * 2, patient)
    assert recorded == plain
    assert replays


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_the_first_batch_of_a_later_fit(seeded, graphs, monkeypatch, patient, replays):
    """Its data decide on the dtypes of products, which the tape takes for what they were: it is run again where they are others."""
    monkeypatch.setattr(second_moment, "SMALL", 0)
    monkeypatch.setattr(second_moment, "WHOLE", 0)
    if graphs:
        stand_in(monkeypatch)
    model, (x, y) = perceptron().float(), vectors(9)
    loaders = [in_threes(rows.float(), y) for rows in (x, x + 1e4)]

    def fit(loader) -> tuple[Sums, Tensor]:
        generator = torch.Generator().manual_seed(3) if seeded else None
        torch.manual_seed(3)
        sums = Sums(KronLaplace(model, fisher="mc").fit(loader, generator=generator))
        return sums, torch.rand(2, generator=generator)

    patient(NEVER)
    known_model._known.clear()
    plain = [fit(loader) for loader in loaders]
    alike = [[moment.are_alike for moment in sums.moments] for sums, _ in plain]
    assert alike[0] != alike[1]
    patient(2)
    known_model._known.clear()
    for _ in range(3):
        replays.clear()
        sums, drawn = fit(loaders[0])
        assert sums == plain[0][0] and torch.equal(drawn, plain[0][1])
    assert replays[0] == 3 and len(replays) == 8
    sums, drawn = fit(loaders[1])
    assert sums == plain[1][0] and torch.equal(drawn, plain[1][1])


class Scaled(nn.Module):
    """A table of scales that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).unflatten(1, (2, 2)) * self.scale).flatten(1)


def vectors(count: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


def test_parameters_that_no_rule_knows(patient, replays):
    recorded, plain = both_ways(randomised(Scaled()), in_threes(*vectors(9)), patient, unknown="diagonal")
    assert recorded == plain
    assert len(replays) in (5, 6)


TARGETS = {  # of outputs (N, 4)
    "classification": lambda f: f.argmax(1),
    "regression": lambda f: f + 1.0,
    "binary": lambda f: f > 0,
    "poisson": lambda f: f.exp().floor(),
    "heteroscedastic": lambda f: f[:, :2].neg(),
}


class Shared(nn.Module):
    """A convolution that is called twice, linear layers with one weight, and scales that no rule knows."""

    def __init__(self, natural: bool) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(2, 2, (1, 3), padding=(0, 1)), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight, self.last, self.natural = self.one.weight, nn.Linear(6, 4), natural
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        images = torch.cat([x, x.flip(1)], 1).view(-1, 2, 2, 3)
        at_positions = self.two(self.one(self.conv(self.conv(images).tanh()).flatten(2)).tanh() * self.scale)
        f = self.last(at_positions.sum(1))
        return torch.cat([f[:, :2], -0.1 - f[:, 2:].square()], 1) if self.natural else f


@pytest.mark.parametrize("unknown", ["diagonal", "freeze"])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("likelihood", TARGETS)
def test_likelihoods_of_shared_layers(likelihood, approximation, unknown, patient, replays):
    model, (x, _) = randomised(Shared(likelihood == "heteroscedastic")), vectors(9)
    loader = in_threes(x, TARGETS[likelihood](model(x).detach()))
    for fisher in ("exact", "mc"):
        options = {"approximation": approximation, "unknown": unknown, "fisher": fisher}
        recorded, plain = both_ways(model, loader, patient, likelihood, **options)
        assert recorded == plain and len(plain.totals) > 4
        assert all(total.abs().max() > 0 for total in plain.totals)
    assert len(replays) >= 10


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)).double().eval()


def fitted(model: nn.Module, loader, patient, batches: float = NEVER, **options) -> Sums:
    patient(batches)
    return Sums(KronLaplace(model, **options).fit(loader))


def test_a_second_fit_has_the_weights_and_statistics_as_they_are(patient, replays):
    """In place, as other tensors, and by what a norm makes of its statistics once in a fit."""
    model, loader = perceptron(), in_threes(*vectors(9))
    la = KronLaplace(model).fit(loader)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
        model[1].running_var.mul_(3.0)
        model[3].weight.data = model[3].weight.data * 0.7
    la.fit(loader)
    assert Sums(la) == fitted(copy.deepcopy(model), loader, patient)
    assert len(replays) in (5 + 8, 6 + 8)


def test_sums_that_are_added_to(patient, replays):
    model, (x, y) = perceptron(), vectors(9)
    la = KronLaplace(model).fit(in_threes(x, y)).fit(in_threes(x, y), override=False)
    patient(NEVER)
    plain = KronLaplace(copy.deepcopy(model)).fit(in_threes(x, y)).fit(in_threes(x, y), override=False)
    assert Sums(la) == Sums(plain)
    assert len(replays) >= 10


def test_the_batch_that_gives_a_bias_a_side_of_its_own(patient):
    """The first of each fit, and so the second of its kind, which is recorded in the second fit."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 5).double(), nn.Linear(5, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x.unflatten(1, (3, 2))).tanh().mean(1))

    model, loader = randomised(Positions()), in_threes(*vectors(9))
    first, second = (fitted(model, loader, patient, 2) for _ in range(2))
    plain = fitted(copy.deepcopy(model), loader, patient)
    assert first == plain
    assert second == plain


def test_a_generator_gives_each_batch_its_draws(patient, replays):
    ours, loader, found = perceptron(), in_threes(*vectors(9)), []
    for model, batches in ((ours, 2), (copy.deepcopy(ours), NEVER), (ours, 2)):
        patient(batches)
        generator = torch.Generator().manual_seed(7)
        found.append(
            (Sums(KronLaplace(model, fisher="mc").fit(loader, generator=generator)), torch.rand(1, generator=generator))
        )
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] == found[1][1] == found[2][1]  # and is left where it would be
    assert len(replays) in (5 + 8, 6 + 8)


SETTINGS = {"factor": 1.0}


class Turning(nn.Module):
    """What Python decides: by a setting, and by numbers that it reads."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reads = nn.Linear(6, 4).double(), reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads == "item" and x.abs().sum() > 1e9:
            return -self.layer(x)
        if self.reads == "tolist":
            x = x * x.new_tensor([1.0] * len(x.sum(1).tolist()))[:, None]
        if self.reads == "mask":
            return self.layer(x.masked_fill(x.new_zeros(x.shape, dtype=torch.bool), x[x > 0].sum().detach()))
        return SETTINGS["factor"] * self.layer(x)


@pytest.mark.parametrize("reads", ["item", "tolist", "mask"])
def test_a_network_that_reads_numbers_runs_as_it_is(reads, patient, replays):
    recorded, plain = both_ways(Turning(reads), in_threes(*vectors(9)), patient)
    assert recorded == plain
    assert not replays


class Sum(nn.Module):
    """Of two layers, each of an input, and of a buffer of rows like these."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
        self.register_buffer("rows", vectors(9)[0])

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.one(x).tanh() + self.two(z + self.rows[0])


@pytest.mark.parametrize("where", ["columns of a table", "one tensor, then two", "a buffer's rows, then others"])
def test_inputs_and_targets_that_share_memory(where, patient, replays):
    model, (rows, _), table = randomised(Sum()), vectors(9), torch.randn(30, 16, dtype=torch.float64)
    loader = [((t[:, :6], t[:, 6:12]), t[:, 12:]) for t in table.split(3)]
    if where == "one tensor, then two":
        loader = [((x.contiguous(), z.contiguous()), y) for (x, z), y in loader]
        loader[:3] = [((x, x), y) for (x, _), y in loader[:3]]
    elif where == "a buffer's rows, then others":
        loader = [
            ((model.rows[i : i + 3] if i < 3 else rows[i % 6 :][:3], z), y) for i, ((_, z), y) in enumerate(loader)
        ]
    recorded, plain = both_ways(model, loader, patient, "regression")
    assert recorded == plain
    assert len(replays) >= 6


def by_pointer(x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    ctypes.memmove(found.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    return found


class Reading(torch.autograd.Function):
    """tanh, whose gradient goes through memory that no operator reads."""

    @staticmethod
    def forward(ctx, x: Tensor, through) -> Tensor:
        ctx.save_for_backward(x)
        ctx.through = through
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.through(1 - ctx.saved_tensors[0].tanh().square()), None


READS = {
    "numpy": lambda x: torch.tensor(x.detach().numpy().tolist(), dtype=x.dtype),
    "dlpack": lambda x: torch.tensor(np.from_dlpack(x.detach()).tolist(), dtype=x.dtype),
    "pointer": by_pointer,
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_network_that_reads_memory_runs_as_it_is(backward, reads, patient, replays):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 5).double(), nn.Linear(5, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(
                Reading.apply(self.one(x if backward else READS[reads](x)), READS[reads] if backward else abs)
            )

    recorded, plain = both_ways(randomised(Network()), in_threes(*vectors(9)), patient)
    assert recorded == plain
    assert not replays


def test_numbers_that_nobody_sees_being_read(patient, replays):
    """Where the kernel of an operator reads them before it calls others, the next batch's outputs tell."""

    class Splitting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4).double()

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            one, other = x.tensor_split(ends[0], dim=1)
            return self.layer(torch.cat([other, one], 1))

    x, y = vectors(9)
    ends = [torch.full((3, 1), end) for end in (1, 1, 4, 2, 5, 3)]
    loader = [((x[i : i + 3].clone(), end), y[i : i + 3]) for i, end in enumerate(ends)]
    recorded, plain = both_ways(randomised(Splitting()), loader, patient)
    assert recorded == plain
    assert len(replays) == 1


@pytest.mark.parametrize("of_class", [False, True])
def test_a_likelihood_keeps_a_setting_for_itself(of_class, patient):
    @register_likelihood("scaled")
    class ScaledSquares(IndependentLikelihood):
        def __init__(self, scale: float = 1.0) -> None:
            vars(self).update({} if of_class else {"_scale": scale})
            type(self)._scale = scale

        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -0.5 * self._scale * (outputs - targets).square()

        def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.full_like(outputs, self._scale)

    model, (x, _) = perceptron(), vectors(9)
    fits = [fitted(model, in_threes(x, x[:, :4]), patient, 2, likelihood=ScaledSquares(s)) for s in (1.0, 3.0)]
    assert fits[1] == fitted(copy.deepcopy(model), in_threes(x, x[:, :4]), patient, likelihood=ScaledSquares(3.0))
    assert fits[1] != fits[0]


class Late(Turning):
    """Reads numbers behind its first layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h if h.abs().sum() < 1e9 else -h


def test_sums_that_wait_are_not_those_of_a_refused_recording(patient, replays, monkeypatch):
    monkeypatch.setattr(kronecker_sums, "together", lambda values: True)  # as on CUDA
    recorded, plain = both_ways(Late(), in_threes(*vectors(9)), patient)
    assert recorded == plain
    assert not replays


@pytest.mark.parametrize("graphs, once", [(False, False), (True, False), (True, True)])
def test_a_network_that_changed_between_fits_runs_as_it_is(graphs, once, patient, replays, monkeypatch):
    """With graphs the comparison is read at the end of a fit, which is done again where its loader allows for it."""
    if graphs:
        stand_in(monkeypatch)
    model, loader = Turning(), in_threes(*vectors(9))[:7]
    la = KronLaplace(model, fisher="mc").fit(loader)
    assert len(replays) in (5, 6)
    monkeypatch.setitem(SETTINGS, "factor", 2.0)  # where no description of the model looks
    replays.clear()
    torch.manual_seed(3)
    la.fit(iter(loader) if once else loader)
    assert len(replays) == (7 if graphs and not once else 0)
    assert any("not those of the recorded function" in k.refused for k in known_model.known_of(model).kinds.values())
    torch.manual_seed(3)
    assert Sums(la) == fitted(copy.deepcopy(model), loader, patient, fisher="mc")


@pytest.mark.parametrize("how", ["plain", "tolerance", "positions", "hooks", "few"])
def test_how_batches_ran_is_told(how):
    model, (x, y) = perceptron(), vectors(9)
    if how == "positions":
        model, x, y = nn.Linear(6, 4).double(), x[:, None].expand(-1, 2, -1), y[:, None].expand(-1, 2)
    if how == "hooks":
        model[0].register_forward_hook(lambda *_: None)
    la = KronLaplace(model, column_tolerance=0.1 * (how == "tolerance"))
    la.fit(in_threes(x, y)[: 1 if how == "few" else 7])
    why = {"plain": "recorded", "hooks": "as it is: the model has hooks", "few": "as it is"}.get(
        how, "as it is: NotRecordable: aten._local_scalar_dense.default reads a tensor's numbers"
    )
    ((shape, told),) = la.recorded.items()
    assert shape == str((3, *x.shape[1:])) and told.startswith(why) and (how != "few" or told == why)


def test_host_reads_of_a_second_fit(monkeypatch):
    stand_in(monkeypatch)
    model, loader = perceptron(), in_threes(*vectors(9))
    KronLaplace(model, fisher="mc").fit(loader)
    with CountedOps() as counted:
        KronLaplace(model, fisher="mc").fit(loader[:7])
    assert counted.reads.total() == 1  # what is finite, and of the network


class Halving(nn.Module):
    """Gradients that are halved, or not, at the same outputs."""

    HALVED = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.config = nn.Linear(6, 4).double(), SimpleNamespace(of={"halved": False})

    def twice(self, h: Tensor) -> Tensor:
        return h + (h.detach() if self.config.of["halved"] or self.HALVED else h)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.layer(x))


@pytest.mark.parametrize("change", ["a setting", "a method", "a constant"])
def test_another_gradient_at_the_same_outputs(change, patient, replays, monkeypatch):
    model, loader = Halving(), in_threes(*vectors(9))
    la = KronLaplace(model).fit(loader)
    if change == "a setting":
        model.config.of["halved"] = True
    elif change == "a constant":
        monkeypatch.setattr(Halving, "HALVED", True)
    else:
        monkeypatch.setattr(Halving, "twice", lambda self, h: h + h.detach())
    assert Sums(la.fit(loader)) == fitted(copy.deepcopy(model), loader, patient)


def layers_of_one_memory() -> nn.Sequential:
    """Norms whose weights are parts of one tensor, and norms of the same weights."""
    table, norms = torch.ones(18, dtype=torch.float64), [nn.LayerNorm(6) for _ in range(4)]
    for norm, part in zip(norms, table.split(6) + table.split(6)[2:], strict=True):
        norm.weight.data = part
    return nn.Sequential(nn.Linear(6, 6), *norms, nn.Linear(6, 4))


def of_norm(number: int):
    def change(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = torch.arange(1.0, 7.0, dtype=torch.float64)
        if number == 1:
            model[1].weight.data.copy_(weights)
        else:
            model[number].weight.data = weights

    return change


def tied(model: nn.Module) -> nn.Module:
    model[3].weight = model[0].weight
    return model


CHANGES = {  # a network, and what happens to it between fits
    "a module again": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        lambda model, monkeypatch: model.append(model[1]),
    ),
    "another order": (
        lambda: nn.Sequential(nn.Linear(6, 4), act := nn.Tanh(), nn.Hardtanh(-0.3, 0.3), act),
        lambda model, monkeypatch: model.insert(2, model.pop(3)),
    ),
    "another tie": (
        lambda: tied(nn.Sequential(*(nn.Linear(6, 6).requires_grad_(False) for _ in range(4)), nn.Linear(6, 4))),
        lambda model, monkeypatch: setattr(model[3], "weight", model[2].weight),
    ),
    "parts of one memory": (layers_of_one_memory, of_norm(1)),
    "memory of its own": (layers_of_one_memory, of_norm(4)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_network_between_fits(what, patient, replays, monkeypatch):
    make, change = CHANGES[what]
    torch.manual_seed(0)
    model, loader = make().double(), in_threes(*vectors(9))
    la = KronLaplace(model).fit(loader)
    before = Sums(la.fit(loader))
    assert replays
    change(model, monkeypatch)
    again = Sums(la.fit(loader))
    known_model._known.clear()
    assert again == fitted(model, loader, patient)
    assert again != before


@pytest.mark.parametrize("of", ["likelihood", "rule"])
def test_a_change_of_users_classes_between_fits(of, patient, replays, monkeypatch):
    """Of what a likelihood's Hessian and a rule read, which no outputs show."""
    scale, one = lambda: SETTINGS["factor"], lambda: 1.0
    of_likelihood, of_rule = (scale, one) if of == "likelihood" else (one, scale)

    @register_likelihood("half seen")
    class HalfSeen(IndependentLikelihood):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -0.5 * (outputs - targets).square()

        def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.full_like(outputs, of_likelihood())

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class GainRule(Rule):
        def shapes(self) -> dict[str, FactorShape]:
            return {"weight": FactorShape.bias(4)}

        def inputs(self, x: Tensor) -> None:
            self.kept = x

        def outputs(self, gradient: Tensor) -> None:
            rows = of_rule() * gradient * self.kept
            self.factors["weight"].output_moment.add(rows.flatten(0, 1)[:, None])

    monkeypatch.setattr(base, "check_likelihood", lambda *_: None)
    monkeypatch.setattr(curvature, "check_rules", lambda *_: None)
    register(Gain)(GainRule)
    model, (x, _) = nn.Sequential(nn.Linear(6, 4), Gain()).double(), vectors(18)
    loader = in_threes(x, x[:, :4])[:7]
    fitted(model, loader, patient, 2, likelihood=HalfSeen())
    assert replays
    monkeypatch.setitem(SETTINGS, "factor", 2.0)
    again = fitted(model, loader, patient, 2, likelihood=HalfSeen())
    known_model._known.clear()
    assert again == fitted(model, loader, patient, likelihood=HalfSeen())


def test_an_approximation_is_not_that_of_a_network_with_a_module_again():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    la = KronLaplace(model).fit(in_threes(*vectors(9)))
    model.append(model[1])
    with pytest.raises(RuntimeError, match="number of its modules"):
        la.fitted_model.require_unchanged()


def test_hooks_see_every_batch(replays):
    model, seen = perceptron(), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    KronLaplace(model).fit(in_threes(*vectors(9)))
    assert seen[-8:] == [3] * 7 + [2]
    assert not replays


def test_a_buffer_that_the_network_counts_in(patient, replays):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4).double()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x)

    model, loader = randomised(Counting()), in_threes(*vectors(9))
    recorded, plain = both_ways(model, loader, patient)
    assert recorded == plain
    assert len(replays) in (5, 6)


@pytest.mark.parametrize("fills", [False, True])
def test_buffers_are_looked_at_after_a_fit_that_may_have_filled_them(fills, patient, monkeypatch):
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4).double()
            self.register_buffer("total", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            if fills:
                self.total += x.abs().sum()
            return self.layer(x)

    looked, filled_since = [], fitted_model.filled_since
    monkeypatch.setattr(fitted_model, "filled_since", lambda *a: looked.append(1) or filled_since(*a))
    la, loader = KronLaplace(randomised(Filling())), in_threes(*vectors(18))[:7]
    for number in range(3):
        la.fit(loader)
        assert len(looked) == (number + 1 if fills else 1)
        assert la.fitted_model.filled == ({"total"} if fills else set())
        la.fitted_model.require_unchanged()
    with torch.no_grad():
        la.model.layer.weight.data[0, 0] += 1e-3
    with pytest.raises(RuntimeError, match="changed since the fit"):
        la.fitted_model.require_unchanged()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_label_that_is_no_class_in_a_recorded_batch(graphs, monkeypatch, replays):
    if graphs:
        stand_in(monkeypatch)
    x, y = vectors(9)
    loader = in_threes(x, y)
    loader[5] = loader[5][0], torch.tensor([0, 4, 1])
    la = KronLaplace(perceptron())
    with pytest.raises(
        ValueError, match=r"labels that are no classes" if graphs else r"labels must lie in 0\.\.3.* got 0\.\.4"
    ):
        la.fit(loader)
    assert la.n_data == 0
    assert len(replays) >= 4


def test_a_check_of_values_that_admitted_does_not_know(replays):
    @register_likelihood("at most two")
    class AtMostTwo(IndependentLikelihood):
        def check(self, outputs: Tensor, targets: Tensor) -> None:
            super().check(outputs, targets)
            if (targets > 2).any():
                raise ValueError("targets: at most 2")

        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -0.5 * (outputs - targets).square()

        def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.ones_like(outputs)

    x, _ = vectors(9)
    loader = in_threes(x, x[:, :4].clamp(max=1))
    loader[5][1][0, 0] = 3.0
    with pytest.raises(ValueError, match="at most 2"):
        KronLaplace(perceptron(), AtMostTwo()).fit(loader)
    assert len(replays) >= 4


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraphs]:
    """Graphs of batches by a stand-in for CUDA's, which refuses what these do."""
    made: list[RecordedGraphs] = []
    monkeypatch.setattr(RecordedGraphs, "made", made, raising=False)
    monkeypatch.setattr(recorded_batches, "CudaGraphs", RecordedGraphs)
    monkeypatch.setattr(recorded_batches, "has_graphs", lambda device: True)
    return made


@pytest.mark.parametrize("fisher", ["exact", "mc"])
@pytest.mark.parametrize("name", ["Conv2d", "FactoredLinear2d", "LayerNorm", "Embedding", "MultiheadAttention"])
def test_graphs(name, fisher, monkeypatch, patient):
    made = stand_in(monkeypatch)
    case = CASES.get(name) or next(c for n, c in CASES.items() if n.startswith(name))
    model = Network(case)
    recorded, plain = both_ways(model, in_threes(*model.data(5)), patient, fisher=fisher)
    assert recorded == plain
    assert [(g.warmed, g.recorded) for g in made] == [(1, 1)] and made[0].replayed in (4, 5)


@pytest.mark.parametrize("graphs", [False, True])
def test_inputs_without_memory_for_each_row(graphs, monkeypatch, patient, replays):
    if graphs:
        stand_in(monkeypatch)
    x, y = vectors(9)
    loader = [(x[i].expand(3, 6), y[i : i + 3]) for i in range(6)]
    recorded, plain = both_ways(perceptron(), loader, patient)
    assert recorded == plain
    assert len(replays) in (4, 5)


def test_draws_that_depend_on_the_inputs_are_not_in_a_graph(monkeypatch, patient, replays):
    """They would be those of torch's own generator."""

    @register_likelihood("drawing")
    class Drawing(Classification):
        def sampled_column(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Tensor:
            return torch.bernoulli(outputs.softmax(1), generator=generator)[None]

    monkeypatch.setattr(base, "check_likelihood", lambda *_: None)  # whose oracle takes columns that are right
    stand_in(monkeypatch)
    loader, found = in_threes(*vectors(9)), []
    for model, batches in ((perceptron(), 2), (perceptron(), NEVER)):
        patient(batches)
        generator = torch.Generator().manual_seed(7)
        found.append(Sums(KronLaplace(model, Drawing(), fisher="mc").fit(loader, generator=generator)))
    assert found[0] == found[1]
    assert not replays


def test_a_capture_that_fails_is_told_and_changes_nothing(monkeypatch, patient):
    stand_in(monkeypatch)

    def refuse(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedGraphs, "record", refuse)
    model = Network(CASES["Conv2d"])
    with pytest.warns(UserWarning, match="one by one"):
        recorded, plain = both_ways(model, in_threes(*model.data(5)), patient)
    assert recorded == plain


class Counted(nn.Module):
    """Counts its calls where no description of it looks."""

    calls: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 5), nn.Linear(5, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return self.head(self.layer(x).tanh())


def test_a_model_is_tried_once(patient, monkeypatch):
    patient(NEVER)
    tried, model, loader = [], Counted(), in_threes(*vectors(9))[:1]
    monkeypatch.setattr(curvature, "probe", lambda *a, probe=curvature.probe: tried.append(a[0]) or probe(*a))
    la = KronLaplace(model).fit(loader)
    first = len(model.calls)
    la.fit(loader)
    KronLaplace(model).fit(loader)
    assert len(tried) == 1
    assert model.calls[first:] == [3, 3]
    for change in (
        lambda: model.head.weight.requires_grad_(False),
        lambda: setattr(model, "more", 1.0),
        lambda: setattr(model, "head", nn.Linear(5, 4).double()),
        lambda: model.float(),
    ):
        change()
        KronLaplace(model).fit([(x.to(model.head.weight), y) for x, y in loader])
        KronLaplace(model).fit([(x.to(model.head.weight), y) for x, y in loader])
        tried.append(change)
    assert [one is model for one in tried] == [True] + [True, False] * 4
    KronLaplace(model, approximation="reduce").fit([(x.float(), y) for x, y in loader])
    assert tried[-1] is model


# tapes ----------------------------------------------------------------------------------------------------------------


def run(tape, inputs, given, generator=None) -> list[Tensor]:
    return tape.run(inputs, given, tape.prepared(given), tape.draws(generator), generator)


def program(seed: int, x: Tensor, y: Tensor, weight: Tensor, total: Tensor) -> list[Tensor]:
    """Operators on two inputs, a constant and a sum, with views, writes in place and gradients, by chance."""
    choose = random.Random(seed).randrange
    there = [x.clone(), y, weight @ weight.t(), torch.full((4, 4), 2.0, dtype=x.dtype)]
    for _ in range(25):
        a, b = (there[choose(len(there))] for _ in range(2))
        kind = choose(9)
        if kind == 0:
            there.append(a @ b)
        elif kind == 1:
            there.append(a.t())
        elif kind == 2:
            there.append(torch.tanh(a) + b.flip(0))
        elif kind == 3 and a is not weight:
            fresh = a.clone()
            fresh[choose(4)] *= 0.5
            fresh.diagonal().add_(b.sum(0))
            there.append(fresh)
        elif kind == 4:
            total.add_(a * b, alpha=0.1)
        elif kind == 5:
            leaf = a.detach().clone().requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad((leaf.sin() * b).sum(), leaf)
            there.append(gradient)
        elif kind == 6:
            there.append(torch.func.vmap(lambda row, b=b: row * b.sum(0))(a))
        elif kind == 7:
            total[choose(4) :].mul_(0.9)
        else:
            there.append(torch.rand(4, 4, dtype=x.dtype) * a)
    return [there[-1], there[-2] + 0.0]


@pytest.mark.parametrize("seed", range(40))
def test_programs(seed):
    torch.manual_seed(seed)
    x, y, weight = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    total = torch.randn(4, 4, dtype=torch.float64)
    before = [t.clone() for t in (x, y, weight, total)]
    state = torch.get_rng_state()
    tape, given = record(lambda: program(seed, x, y, weight, total), [x, y], staying=[weight])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, (x, y, weight, total)))
    others = {id(weight): torch.randn(4, 4, dtype=torch.float64), id(total): total.clone()}
    for _ in range(2):
        inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
        of_tape, expected = others[id(total)].clone(), others[id(total)].clone()
        torch.manual_seed(1)
        wanted = program(seed, *inputs, others[id(weight)], expected)
        torch.manual_seed(1)
        found = run(tape, inputs, [of_tape if t is total else others[id(weight)] for t in given])
        assert all(map(torch.equal, found, wanted))
        assert torch.equal(of_tape, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x * len(x.nonzero()),
        lambda x: x * sum(x.flatten().tolist()),
        lambda x: x * float(x.numpy().sum()),
        lambda x: x.clone().resize_(2),
    ],
)
def test_what_cannot_be_recorded(function):
    x = torch.randn(4)
    with pytest.raises(NotRecordable):
        record(lambda: [function(x)], [x])


def test_tensors_of_one_memory_are_told_apart():
    """A tape runs on tensors that have their memory in common otherwise, or not at all."""
    x, memory = torch.randn(3), torch.zeros(8)
    one, other = memory[:3], memory[5:]
    tape, given = record(lambda: [one.add_(x) * 1, other.add_(2 * x) * 1], [x], there=[one, other])
    assert [id(tensor) for tensor in given] == [id(one), id(other)] and not memory.any()
    apart = torch.zeros(3), torch.zeros(3)
    run(tape, [x], apart)
    assert torch.equal(apart[0], x) and torch.equal(apart[1], 2 * x)


def test_zeros_of_small_sums():
    shapes = [(1, 3), (2, 5), (1, 3), (1, 2000)]
    found = second_moment.zeros_together(shapes, torch.device("cpu"))
    sums = [*found[1, 3], *found[2, 5]]
    assert [tuple(t.shape) for t in sums] == [(1, 3, 3), (1, 3, 3), (2, 5, 5)] and (1, 2000) not in found
    assert len({t.untyped_storage().data_ptr() for t in sums}) == 1 and not any(t.any() for t in sums)
    assert all(t.is_contiguous() and t.storage_offset() % second_moment.ALIGNED == 0 for t in sums)
    for number, total in enumerate(sums, 1):
        total += number
    assert [t.unique().tolist() for t in sums] == [[1], [2], [3]]


def test_what_stays_is_computed_once():
    weight, total, calls = torch.randn(3, 3), torch.zeros(3, 3), []
    tape, given = record(lambda: [total.add_(torch.randn(3, 3) @ weight.exp().inverse())], [], staying=[weight])
    prepared = tape.prepared(given)
    with OperatorMode(lambda op, args, kwargs: calls.append(str(op)) or op(*args, **kwargs)):
        tape.run([], given, prepared, tape.draws(None))
    assert calls == ["aten.randn.default", "aten.mm.default", "aten.add_.Tensor"]

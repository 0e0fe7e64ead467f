"""Prior precisions and noise after a fit."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, tuning
from ella_cuda.laplace.prior_structure import group_indices
from ella_cuda.laplace.tuning import NOTHING, Groups, climb, fixed_points, log_density, logarithms, raise_evidence
from ella_cuda.training import MarglikTrainer
from python_tests.benchmark_files import load
from python_tests.laplace.checks import Reusing, randomised
from python_tests.recorded import RecordedGraphs

Batches = list[tuple[Tensor, Tensor]]
GRID: dict[str, Any] = {"method": "gridsearch", "prior_structure": "scalar"}


def data(count: int, seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return [(part, target) for part, target in zip(x.split(16), (x[:, :2].sin() + noise).split(16), strict=True)]


def regression() -> KronLaplace:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return KronLaplace(model, "regression").fit(data(50, 0))


def classifier() -> KronLaplace:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 1.5)
    return KronLaplace(model).fit([(x, y.argmax(1)) for x, y in data(50, 0)])


def slopes(la: KronLaplace) -> tuple[Tensor, Tensor]:
    """Of the evidence in the logarithms of the precisions and of sigma, with the temperature dividing the normaliser too."""
    precision, sigma = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    evidence = la.log_marginal_likelihood(precision.exp(), sigma.exp())
    return torch.autograd.grad(evidence + (1 - 1 / la.temperature) * la.n_targets * sigma, (precision, sigma))


@pytest.mark.parametrize("kind", [KronLaplace, DiagLaplace, FullLaplace])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_fixed_points_are_the_tempered_evidences(kind: Any, temperature: float) -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    la = kind(model, "regression", temperature=temperature).fit(data(50, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(method="mackay", n_steps=3000)
    assert max(*(slope.abs().max() for slope in slopes(la))) < 1e-4


@pytest.mark.parametrize("method", ["marglik", "mackay"])
@pytest.mark.parametrize("temperature", [0.2, 5.0])
def test_the_temperature_of_a_tuned_noise_is_that_of_the_whole_likelihood(method: str, temperature: float) -> None:
    """Bayesian linear regression: the maximum of the log integral of likelihood^(1/T) times prior, over a grid, by dense algebra."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = x @ x.new_tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.linalg.lstsq(x, y).solution.T
    la = FullLaplace(model, "regression", temperature=temperature).fit([(x, y)])
    la.optimize_prior_precision(method=method, n_steps=2000, lr=0.05)
    error, curvature = (y - model(x)).square().sum().detach(), x.T @ x
    delta, square_norm = la.prior_precision.item(), model.weight.square().sum().item()

    def tempered(sigma: Tensor) -> Tensor:
        fit = -60 * (sigma.log() + 0.5 * math.log(2 * math.pi)) - error / (2 * sigma**2)
        posterior = curvature / (sigma**2 * temperature) + delta * torch.eye(2, dtype=torch.float64)
        return fit / temperature - 0.5 * (torch.logdet(posterior) - 2 * math.log(delta) + delta * square_norm)

    sigmas = torch.logspace(-1, 1, 4001, dtype=torch.float64)
    best = sigmas[torch.stack([tempered(sigma) for sigma in sigmas]).argmax()]
    assert abs(la.sigma_noise.log() - best.log()) < 2e-3


def test_fixed_points_where_the_diagonal_counts_more_than_there_is() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    la = DiagLaplace(model, "regression").fit([(torch.randn(12, 3).double(), torch.randn(12, 3).double())])
    la.sigma_noise = 0.01
    assert sum(la.effective_parameters().values()) > la.n_targets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(method="mackay", n_steps=20000)
    assert max(*(slope.abs().max() for slope in slopes(la))) < 1e-3
    with pytest.warns(UserWarning, match="the fixed points do not rest after n_steps=2"):
        regression().optimize_prior_precision(method="mackay", n_steps=2)


def test_what_the_data_say_nothing_about_is_held() -> None:
    la = regression()
    la.prior_mean = la.mean  # then there is no distance from it
    la.optimize_prior_precision(method="mackay", n_steps=5)
    assert torch.equal(la.prior_precision, torch.full((4,), 1e10, dtype=torch.float64))


def test_of_what_is_at_its_mean_and_without_data_nothing_is_learned() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    la = KronLaplace(model, "regression").fit([(torch.zeros_like(x), y) for x, y in data(50, 0)])
    la.prior_mean = la.mean
    la.optimize_prior_precision(method="mackay", init_prior_prec=3.0)
    assert la.effective_parameters()["0.weight"] == 0
    assert la.prior_precision[0] == pytest.approx(3.0, abs=1e-14)
    assert torch.equal(la.prior_precision[1:], torch.full((3,), 1e10, dtype=torch.float64))


def normalised(kind: type[Any] = KronLaplace) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    return kind(randomised(model), "regression").fit(data(50, 0))


# By hand: the tensors of each group, of weight and bias of the modules 0, 1, 3, 4 and 5.
MEMBERS = {
    "layerwise": [[i] for i in range(10)],
    "module": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],
    "normalised": [[0, 1], [4, 5], [2, 3, 6, 7, 8, 9]],
    "scalar": [list(range(10))],
}


@pytest.mark.parametrize("method", ["marglik", "mackay"])
@pytest.mark.parametrize(("structure", "tune_sigma"), zip(MEMBERS, [True, False, True, False], strict=True))
def test_every_groups_slope_is_zero(method: str, structure: str, tune_sigma: bool) -> None:
    la = normalised()
    la.sigma_noise = 0.5
    la.prior_precision = torch.linspace(0.01, 30, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(
            method=method, prior_structure=structure, n_steps=3000, lr=0.03, tune_sigma=tune_sigma
        )
    of_precision, of_sigma = slopes(la)
    gammas = torch.tensor(list(la.effective_parameters().values()), dtype=torch.float64)
    for members in MEMBERS[structure]:
        assert len(set(la.prior_precision[members].tolist())) == 1
        assert of_precision[members].sum().abs() < (1e-6 if method == "mackay" else 1e-4)
        fixed = gammas[members].sum() / la.square_norms[members].sum()
        torch.testing.assert_close(
            la.prior_precision[members[0]], fixed, rtol=1e-6 if method == "mackay" else 1e-3, atol=0
        )
    assert len(set(la.prior_precision.tolist())) == len(MEMBERS[structure])
    assert of_sigma.abs() < (1e-5 if method == "mackay" else 1e-4) if tune_sigma else la.sigma_noise == 0.5


@pytest.mark.filterwarnings("ignore:optimize_prior_precision. the fixed points do not rest")
def test_the_host_reads_once_an_update() -> None:
    found = load("counted_ops").phases(normalised().model, "regression", data(50, 0))
    mackay = found.pop("20 rounds of mackay")
    assert 1 < mackay.reads.total() == mackay.ops["ella_cuda::kron_evidence"] - 1
    for phase in ("first fit", "second fit", "a further batch", "eigenvalues"):
        found.pop(phase)
    predictions = {phase: found.pop(phase) for phase in [*found] if phase.endswith("prediction")}
    recorded = [counts for phase, counts in predictions.items() if "recorded" in phase]
    assert len(recorded) == 2 and all(counts.reads.total() == 1 and counts.ops.total() < 50 for counts in recorded)
    reads = {phase: counted.reads.total() for phase, counted in found.items()}
    assert reads.pop("first evidence with them") == reads.pop("evidence again") == 0
    assert set(reads.values()) == {1}


@pytest.mark.parametrize(("structure", "tune_sigma"), [("layerwise", False), ("layerwise", True), ("module", True)])
def test_a_graph_replays_steps_up_the_evidence(structure: str, tune_sigma: bool) -> None:
    """To the bits of eager ones: each is the same few ops, and reads nothing."""
    la, found, counts = normalised(), [], []
    groups = Groups(group_indices(structure, la.parameter_names, la.model), torch.device("cpu"))
    la.prior_precision = torch.linspace(0.01, 30, 10)
    start, _ = logarithms(la, groups), la.log_marginal_likelihood()  # which has the eigenvalues
    graphs = RecordedGraphs(torch.device("cpu"))
    for n_steps, recorder in ((10, None), (20, graphs), (20, None)):
        learnt = [start[:-1].clone(), -0.5 * start[-1]][: 1 + tune_sigma]
        with load("counted_ops").Counted(refuse=True) as counted:
            climb(la, torch.optim.Adam(learnt, lr=0.1, fused=True), groups, n_steps, 0.02, recorder, False)
        found.append(learnt)
        counts.append(counted)
    assert all(map(torch.equal, found[1], found[2])) and not torch.equal(found[0][0], found[1][0])
    assert (graphs.warmed, graphs.recorded, graphs.replayed) == (1, 1, 19)
    ten = counts[2] - counts[0]
    assert ten.ops["ella_cuda::kron_evidence"] == 10
    assert ten.ops.total() - ten.views.total() <= 10 * (7 + 4 * (structure != "layerwise") + 24 * tune_sigma)


@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_steps_on_the_precisions_are_recorded_where_there_are_graphs(kind, monkeypatch) -> None:
    found, graphs = [], []
    monkeypatch.setattr(tuning, "CudaGraphs", lambda device: graphs.append(RecordedGraphs(device)) or graphs[-1])
    for there in (False, True):
        monkeypatch.setattr(tuning, "has_graphs", lambda device, there=there: there)
        la = normalised(kind)
        found.append(la.optimize_prior_precision(method="marglik", n_steps=7, init_prior_prec=2.0))
    assert torch.equal(*found)
    assert [(one.warmed, one.recorded, one.replayed) for one in graphs] == [(1, 1, 6)] * (kind is KronLaplace)


def test_steps_that_lead_to_no_number_are_refused_at_the_end() -> None:
    la = classifier()
    with pytest.raises(ValueError, match=r"prior_precision: expected positive finite values, got (inf|0\.0)"):
        raise_evidence(la, 2, 1e4, Groups(range(4), torch.device("cpu")), False, False)
    assert torch.equal(la.prior_precision, torch.ones(4, dtype=torch.float64))
    trainer = MarglikTrainer(la.model, data(20, 0), "regression", lr_hyp=1e4, n_hypersteps=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"prior_precision: expected positive finite values, got (inf|0\.0)"):
        trainer.evidence_step()
    assert trainer.margliks == [] and trainer.history == []


@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_the_scale_of_what_a_norm_follows_does_not_matter_to_groups(kind: Any) -> None:
    """Precisions are in proportion to 1/k², evidence and predictions as they were; with one precision for all they are not."""
    x, loader = data(50, 0)[0][0], [(x, y.argmax(1)) for x, y in data(50, 0)]
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"normalised": [], "layerwise": [], "scalar": []}
    for k, l in ((1.0, 1.0), (3.0, 3.0**1.5)):
        model = normalised().model.double()
        model[1].eps = model[4].eps = 1e-30
        with torch.no_grad():
            for factor, layer in ((k, model[0]), (l, model[3])):
                layer.weight *= factor
                layer.bias *= factor
        la = kind(model).fit(loader)
        for structure, results in found.items():
            la.optimize_prior_precision(method="mackay", prior_structure=structure, n_steps=500, init_prior_prec=1.0)
            results.append((la.prior_precision, la.log_marginal_likelihood(), la.functional_variance(x)))
    factors = torch.tensor([9.0, 9.0, 1, 1, 27.0, 27.0, 1, 1, 1, 1], dtype=torch.float64)
    for structure in ("normalised", "layerwise"):
        (precision, evidence, variance), after = found[structure]
        torch.testing.assert_close(after[0] * factors, precision, rtol=1e-6, atol=0)
        torch.testing.assert_close(after[1:], (evidence, variance), rtol=1e-7, atol=1e-9)
    (_, evidence, variance), after = found["scalar"]
    assert (after[1] - evidence).abs() > 0.01 * evidence.abs() and (after[2] / variance - 1).abs().max() > 0.01


@pytest.mark.parametrize("start", [1e-5, 1.0, 1e8])
@pytest.mark.parametrize("kind", [KronLaplace, DiagLaplace])
def test_the_evidence_climbs_fast_from_anywhere(start: float, kind: Any) -> None:
    """The distance from the fixed points falls to a third in every update, also where the data determine next to nothing."""
    la = kind(randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), "regression").fit(data(50, 0))
    la.sigma_noise, groups = 300.0, Groups(range(4), torch.device("cpu"))
    la.prior_precision = 1e3
    end, *_ = fixed_points(la, 1000, groups, tune_sigma=False)
    assert min(la.effective_parameters().values()) < 0.05  # where whole updates would swing
    la.prior_precision = start
    evidence, distance = la.log_marginal_likelihood().item(), (la.prior_precision.log() - end).abs()
    for _ in range(12):
        at, _, _ = fixed_points(la, 1, groups, tune_sigma=False)
        after = la.log_marginal_likelihood().item()
        assert after >= evidence - 1e-12 * abs(evidence)
        assert ((at - end).abs() <= distance * 0.334 + 1e-6).all()
        evidence, distance = after, (at - end).abs()
    assert distance.max() < 1e-4


def test_updates_under_which_the_evidence_would_fall_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    la, groups = regression(), Groups(range(4), torch.device("cpu"))
    monkeypatch.setattr("ella_cuda.laplace.tuning.SHARE", 40.0)  # far too long a way
    fallen, evidence = [], la.log_marginal_likelihood().item()
    for _ in range(30):
        fixed_points(la, 1, groups, tune_sigma=True)
        after = la.log_marginal_likelihood().item()
        fallen.append(after - evidence)
        evidence = after
    assert min(fallen) >= -1e-10 and max(fallen) > 1


@pytest.mark.parametrize("limit", [0.1, 1.0, 5.0])
def test_no_logarithm_goes_further_than_the_limit(limit: float) -> None:
    la, groups = regression(), Groups(range(4), torch.device("cpu"))
    la.prior_precision, la.sigma_noise = 1e-3, 20.0
    free, free_sigma, _ = fixed_points(copy.copy(la), 300, groups, tune_sigma=True)
    assert (free - math.log(1e-3)).abs().max() > 5 and 2 * (free_sigma - math.log(20)).abs() > 5
    at, sigma, rested = fixed_points(la, 300, groups, tune_sigma=True, limit=limit)
    ways = torch.cat([at - math.log(1e-3), -2 * (sigma - math.log(20))[None]])
    assert rested and ways.abs().max() == pytest.approx(limit)
    assert ways[-1].abs() == pytest.approx(limit)
    torch.testing.assert_close(la.prior_precision, at.exp())
    torch.testing.assert_close(la.sigma_noise, sigma.exp())


def test_a_group_of_which_the_data_determine_nothing_rests() -> None:
    """Its logarithm still moves, but the evidence and what is determined do not."""
    la, groups = classifier(), Groups(range(4), torch.device("cpu"))
    end, _, rested = fixed_points(la, 300, groups, tune_sigma=False)
    assert rested
    la.prior_precision = torch.cat([torch.tensor([1e9], dtype=torch.float64), la.prior_precision[1:]])
    trace = la.effective_parameters()["0.weight"] * 1e9
    la.square_norms[0] = trace / 9e9**2  # which puts the fixed point there
    at, _, rested = fixed_points(la, 5, groups, tune_sigma=False)
    assert rested and (at[0] - math.log(9e9)).abs() > 1e-4
    assert la.effective_parameters()["0.weight"] < NOTHING
    la.prior_precision = torch.cat([torch.tensor([1e9], dtype=torch.float64), end[1:].exp() * 2])
    assert not fixed_points(la, 5, groups, tune_sigma=False)[2]  # others still move


@pytest.mark.parametrize("link", ["probit", "probit_full", "bridge"])
def test_the_grids_best_is_that_of_predictions(link: str) -> None:
    la, validation = classifier(), [(x, y.argmax(1)) for x, y in data(40, 1)]
    losses = {}
    for exponent in (-2.0, -1.0, 0.0, 1.0, 2.0):
        la.prior_precision = 10**exponent
        log_p = torch.cat([la(x, link_approx=link)[torch.arange(len(y)), y].log() for x, y in validation])
        losses[exponent] = -log_p.mean().item()
    best = min(losses, key=losses.__getitem__)
    la.prior_precision = 7.0
    grid = GRID | {"val_loader": validation, "grid_size": 5, "link_approx": link}
    grid |= {"log_prior_prec_min": -2, "log_prior_prec_max": 2}
    found = la.optimize_prior_precision(**grid)
    torch.testing.assert_close(found, torch.full((4,), 10**best, dtype=torch.float64))

    def seen(predictions: Tensor, targets: Tensor) -> float:
        assert predictions.shape == (40, 2)
        assert targets.shape == (40,)
        return predictions[:, 0].std().item()

    spread = la.optimize_prior_precision(**grid, loss=seen)
    if link != "bridge":
        assert spread[0] == 0.01  # a wide posterior makes predictions alike


def test_the_grid_of_a_regression_sees_the_variance() -> None:
    la, validation = regression(), data(40, 1)
    la.sigma_noise = 0.4
    densities = {}
    for exponent in (-3.0, -1.0, 1.0, 3.0):
        la.prior_precision = 10**exponent
        total = torch.zeros((), dtype=torch.float64)
        for x, y in validation:
            mean, variance = la(x, diagonal_output=True)
            total += torch.distributions.Normal(mean, (variance + 0.16).sqrt()).log_prob(y).sum()
        densities[exponent] = total.item()
    best = max(densities, key=densities.__getitem__)
    ends = {"log_prior_prec_min": -3, "log_prior_prec_max": 3}
    found = la.optimize_prior_precision(**GRID, val_loader=validation, grid_size=4, **ends)
    assert found[0] == pytest.approx(10**best)


def test_targets_of_a_grid_may_lie_in_memory_that_is_used_again() -> None:
    loader, seen = data(40, 2), []

    def loss(predictions: tuple[Tensor, Tensor], targets: Tensor) -> float:
        seen.append(targets)
        return 0.0

    regression().optimize_prior_precision(val_loader=Reusing(loader), **GRID, grid_size=1, loss=loss)
    assert torch.equal(seen[0], torch.cat([y for _, y in loader]))


def test_density_of_a_heteroscedastic_prediction_is_of_negative_second_parameters() -> None:
    model = randomised(nn.Linear(3, 2))
    with torch.no_grad():
        model.weight[1], model.bias[1] = 0.1, -2.0
    x, y = data(8, 0)[0]
    la = KronLaplace(model, "heteroscedastic").fit([(x, y[:, 0])])
    grid = torch.linspace(-40, 40, 4001, dtype=torch.float64)
    for precision in (0.03, 100.0):
        la.prior_precision = precision
        mean, variance = la(x, diagonal_output=True)
        found = log_density(la, (mean, variance), y[:, 0], n_samples=4000)
        total = 0.0
        for n in range(len(x)):
            # Of eta_1 the integral is a Gaussian's in closed form; of eta_2 < 0 a sum.
            second = torch.distributions.Normal(mean[n, 1].detach(), variance[n, 1].sqrt())
            eta_2 = grid[grid < 0] / 40 * (4 - mean[n, 1].detach() + 8 * variance[n, 1].sqrt())
            weights = second.log_prob(eta_2).exp()
            noise = -0.5 / eta_2
            given = torch.distributions.Normal(mean[n, 0] * noise, (noise + variance[n, 0] * noise.square()).sqrt())
            total += ((given.log_prob(y[n, 0]).exp() * weights).sum() / weights.sum()).log().item()
        assert found.item() == pytest.approx(total, abs=0.04 * len(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = la.optimize_prior_precision(**GRID, val_loader=[(x, y[:, 0])], grid_size=5)
    assert chosen[0] > 0


def test_targets_of_the_grid_that_do_not_fit_are_refused() -> None:
    la, x = regression(), data(20, 1)[0][0]
    how = GRID | {"grid_size": 2}
    with pytest.raises(ValueError, match="targets: expected the outputs' shape"):
        la.optimize_prior_precision(val_loader=[(x, torch.zeros(len(x), 1))], **how)
    with pytest.raises(ValueError, match="label"):
        classifier().optimize_prior_precision(val_loader=[(x, torch.full((len(x),), 2))], **how)


@pytest.mark.filterwarnings("ignore:pred_type='nn'")
@pytest.mark.parametrize("how", [{}, {"pred_type": "nn"}], ids=str)
def test_the_grid_samples_where_asked(how: dict[str, Any]) -> None:
    la = classifier()
    how = {"link_approx": "mc", "n_samples": 300, **how}
    loader = [(x, y.argmax(1)) for x, y in data(20, 1)]
    losses = {}
    for exponent in (-1.0, 1.0, 3.0):
        la.prior_precision = 10**exponent
        log_p = torch.cat([la(x, **how)[torch.arange(len(y)), y].log() for x, y in loader])
        losses[10**exponent] = -log_p.mean().item()
    best, second, _ = sorted(losses, key=losses.__getitem__)
    assert losses[second] - losses[best] > 0.03  # ten times what samples do
    ends = {"log_prior_prec_min": -1, "log_prior_prec_max": 3}
    found = la.optimize_prior_precision(**GRID, val_loader=loader, grid_size=3, **ends, **how)
    assert found[0] == pytest.approx(best)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"method": "adam"}, "method must be one of 'marglik', 'mackay', 'gridsearch', 'loo', got 'adam'"),
        ({"prior_structure": "diag"}, "prior_structure='diag' has a precision for every element"),
        ({"method": "gridsearch", "prior_structure": "scalar"}, "needs val_loader"),
        ({"method": "gridsearch", "val_loader": [1], "prior_structure": "layerwise"}, "pass prior_structure='scalar'"),
        ({"prior_structure": "groups"}, "prior_structure must be one of 'layerwise', 'module', 'normalised', 'scalar'"),
        ({"method": "gridsearch", "prior_structure": "scalar", "val_loader": []}, "val_loader gave no data"),
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"lr": math.nan}, "lr: expected positive finite values, got nan"),
        ({"pred_type": 7}, "pred_type must be one of 'glm', 'nn', got 7"),
        ({"init_prior_prec": math.inf}, "init_prior_prec: expected positive finite values, got inf"),
        ({"grid_size": 0}, "grid_size must be a positive integer, got 0"),
        ({"log_prior_prec_min": 2, "log_prior_prec_max": 1}, "powers of ten, the first no larger.* got 2 and 1"),
        ({"log_prior_prec_max": math.inf}, "powers of ten, the first no larger.* got -4.0 and inf"),
    ],
    ids=str,
)
def test_wrong_arguments_change_nothing(how: dict[str, Any], words: str) -> None:
    la = classifier()
    with pytest.raises(ValueError, match=words):
        la.optimize_prior_precision(**how)
    assert torch.equal(la.prior_precision, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_precision_is_chosen_where_no_loss_is_finite(value: float) -> None:
    la, loader = classifier(), [(x, y.argmax(1)) for x, y in data(20, 2)]
    how = GRID | {"val_loader": loader, "grid_size": 3}
    with pytest.raises(ValueError, match="the loss must be finite somewhere on the grid, got"):
        la.optimize_prior_precision(**how, loss=lambda p, y: value)
    with pytest.raises(TypeError, match=r"loss must return one number, got shape \(20,\)"):
        la.optimize_prior_precision(**how, loss=lambda p, y: p[:, 0])
    assert torch.equal(la.prior_precision, torch.ones(4, dtype=torch.float64))
    losses = iter([value, 2.0, 1.0])
    with pytest.warns(UserWarning, match=r"not finite at 1 of 3 precisions \(0\.0001\)"):
        assert la.optimize_prior_precision(**how, loss=lambda p, y: next(losses))[0] == 1e4

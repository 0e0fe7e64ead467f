"""Precisions of predictions alone: the rule that chooses them, what predicts by them, and what sets them back."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.laplace import FullLaplace, KronLaplace, leave_one_out
from ella_cuda.laplace.factors import with_checksum
from python_tests.laplace.checks import drawn, randomised

N = 40


def network(outputs: int = 3) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)), 0.6)


def data(count: int = N, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    x = drawn(count, 3, seed=1)
    return x, (x + noise * drawn(count, 3, seed=2)).argmax(1)


def fitted(kind: Any = KronLaplace, **options: Any) -> Any:
    return kind(network(), **{"prior_precision": 0.3} | options).fit([data()])


def excesses(la: Any, x: Tensor, y: Tensor) -> list[float]:
    """By factor, how far the leave-one-out NLL of x is above the softmax', by dense matrices; infinite where a data point has none."""
    parameters = {name: p.detach() for name, p in la.model.named_parameters()}

    def jacobians(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = torch.func.jacrev(lambda p: torch.func.functional_call(la.model, p, (x,)))(parameters)
        f = la.model(x).detach()
        p = f.softmax(1)
        return (
            f,
            p,
            torch.cat([j.flatten(2) for j in found.values()], 2),
            torch.diag_embed(p) - p[:, :, None] * p[:, None],
        )

    _, _, j, hessians = jacobians(data()[0])
    curvature = torch.einsum("nki,nkl,nlj->ij", j, hessians, j)
    f, p, j, hessians = jacobians(x)
    found = []
    for k in range(29):
        prior = 0.3 * 10 ** (k / 4) * torch.eye(j.shape[2], dtype=j.dtype)
        s = j @ torch.linalg.inv(curvature + prior) @ j.mT
        if (torch.linalg.eigvals(s @ hessians).real >= 1).any():
            found.append(math.inf)
            continue
        s = torch.linalg.solve(torch.eye(3, dtype=f.dtype) - s @ hessians, s)
        mean = f + (s @ (p - F.one_hot(y, 3))[..., None])[..., 0]
        scaled = mean / (1 + math.pi / 8 * s.diagonal(dim1=1, dim2=2)).sqrt()
        found.append((F.cross_entropy(scaled, y) - F.cross_entropy(f, y)).item())
    return found


@pytest.mark.parametrize("tolerance", [0.002, 0.01, 0.3])
def test_the_widest_posterior_within_the_tolerance_is_chosen(tolerance: float) -> None:
    la, (x, y) = fitted(FullLaplace), data()
    found = la.calibrate(tolerance=tolerance)
    chosen = next(k for k, value in enumerate(excesses(la, x, y)) if value <= tolerance)
    assert 0 < chosen < 28
    torch.testing.assert_close(found, la.prior_precision * 10 ** (chosen / 4))
    assert la.predictive_prior_precision is found


@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_folds_choose_by_data_that_they_have_not_seen(kind: Any) -> None:
    """The precisions of the network that is calibrated, the posteriors and the data of the others, by their calls."""
    x, folds, totals = drawn(60, 3, seed=1), [], torch.zeros(37, dtype=torch.float64)
    y = (3 * network()(x) + 2 * drawn(60, 3, seed=2)).argmax(1)
    for seen in (slice(30), slice(30, 60)):
        unseen = slice(30, 60) if seen.start is None else slice(30)
        other = kind(network(), prior_precision=7.0)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(4)  # too sure
        other.fit([(x[seen], y[seen])])
        folds.append((other, DataLoader(TensorDataset(x[unseen], y[unseen]), 7)))
        again = kind(other.model).fit([(x[seen], y[seen])])
        for k in range(37):
            again.prior_precision = 0.01 * 10 ** (k / 4 - 2)
            totals[k] += again(x[unseen]).log()[torch.arange(30), y[unseen]].sum()
    la = kind(network(), prior_precision=0.01).fit([(x, y)])
    chosen = int(totals.argmax())
    assert 0 < chosen < 36
    torch.testing.assert_close(la.calibrate(folds=folds), la.prior_precision * 10 ** (chosen / 4 - 2))
    assert [(other.predictive_prior_precision, float(other.prior_precision[0])) for other, _ in folds] == [
        (None, 7.0)
    ] * 2


def by_scale(scale: float, y: Tensor, x: Tensor) -> tuple[Any, float]:
    """An approximation of a network whose logits are the more sure the larger the scale is, and its NLL of labels."""
    model = network()
    model[2].weight.data *= scale
    model[2].bias.data *= scale
    return KronLaplace(model).fit([(x, y)]), F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_data_known_by_heart_are_told(temperature: float) -> None:
    x = drawn(N, 3, seed=1)
    y = network()(x).argmax(1)
    for scale in (3, 30, 300):
        la, nll = by_scale(scale, y, x)
        la.temperature = temperature
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            la.calibrate(tolerance=10)
        told = [str(w.message) for w in said if "by heart" in str(w.message)]
        assert len(told) == (nll < 0.1) and all(f"at {nll:.2g} nats" in t and "folds=" in t for t in told)
    assert by_scale(3, y, x)[1] > 0.1 > nll


@pytest.mark.parametrize("scale", [5, 300])
def test_folds_that_have_learned_less_are_not_asked(scale: float) -> None:
    """The folds' mean NLL is just above or below twice the network's own, or twice 0.1, by the scale of one's logits."""
    x = drawn(N, 3, seed=1)
    y = network()(x).argmax(1)
    (la, nll), (sure, own) = by_scale(scale, y, x), by_scale(300, y[:10], x[:10])
    assert (nll > 0.1) == (scale == 5)
    limit = (2 * max(0.1, nll) * 40 - 10 * own) / 30  # of the other fold's 30 data points
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if by_scale(middle, y[10:], x[10:])[1] < limit else (middle, high)
    alone = la.calibrate().clone()
    for factor in (1.05, 0.95):
        other, _ = by_scale(factor * high, y[10:], x[10:])
        folds = [(sure, [(x[10:], y[10:])]), (other, [(x[:10], y[:10])])]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = la.calibrate(folds=folds)
        assert any("learned their own data far less" in str(w.message) for w in said) == (factor < 1)
        assert factor > 1 or torch.equal(found, alone)
    again = KronLaplace(la.model)
    again.load_state_dict(la.state_dict())  # knows no loader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="pass loader"):
            again.calibrate(folds=folds)
        assert torch.equal(again.calibrate([(x, y)], folds=folds), alone)


def test_large_networks_are_calibrated_by_fewer_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the products that it may take allow, but at least as many as are due; folds by variances alone."""
    la, seen = fitted(), []
    real = type(la)._moments_under
    monkeypatch.setattr(
        type(la), "_moments_under", lambda self, x, *how, **more: seen.append(len(x)) or real(self, x, *how, **more)
    )
    each = 29 * la.n_params * 9
    for work, wanted in ((21.5 * each, 21), (3 * each, 5), (1e3 * each, N)):
        monkeypatch.setattr(leave_one_out, "WORK", work)
        monkeypatch.setattr(leave_one_out, "LEAST", 5)
        seen.clear()
        la.calibrate([data()])
        assert sum(seen) == wanted
    monkeypatch.setattr(leave_one_out, "WORK", 1.75 * 37 * la.n_params * 3)
    seen.clear()
    la.calibrate(folds=[(la, DataLoader(TensorDataset(*data()), 10))])
    assert sum(seen) == 17


def test_folds_of_something_else_are_refused() -> None:
    la, loader = fitted(), [data()]
    for folds, message in [
        ([(KronLaplace(network(), "regression").fit([data()[:1] * 2]), loader)], "likelihood"),
        ([(KronLaplace(network(4)).fit([data()]), loader)], "n_outputs"),
        ([(la, [])], "no data"),
        ([], "got none"),
    ]:
        with pytest.raises(ValueError, match=message):
            la.calibrate(folds=folds)
    with pytest.raises(TypeError, match="calibrate: loader"):
        la.calibrate(3, folds=[(la, loader)])
    assert la.predictive_prior_precision is None


def test_a_posterior_that_leaves_a_point_undefined_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one data point: an undefined one comes after others that are not."""
    monkeypatch.setattr("ella_cuda.laplace.leave_one_out.PIECES", (1, 1))
    la = fitted(prior_precision=1e-3)
    expected = next(k for k in range(29) if not undefined(la, k))
    assert expected > 0 and undefined(la, 0) < N
    torch.testing.assert_close(la.calibrate(tolerance=1e3), la.prior_precision * 10 ** (expected / 4))


def undefined(la: Any, k: int) -> int:
    other = copy.copy(la)
    other.prior_precision = la.prior_precision * 10 ** (k / 4)
    return other.leave_one_out([data()]).n_undefined


def test_the_first_data_points_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ella_cuda.laplace.leave_one_out.CALIBRATION_POINTS", 11)
    monkeypatch.setattr("ella_cuda.laplace.leave_one_out.PIECES", (2, 3))
    la, (x, y) = fitted(FullLaplace), data()
    found = la.calibrate([(x[:8], y[:8]), (x[8:], y[8:])], tolerance=0.02)
    some, all_points = ([value <= 0.02 for value in excesses(la, x[:n], y[:n])].index(True) for n in (11, N))
    assert some != all_points
    torch.testing.assert_close(found, la.prior_precision * 10 ** (some / 4))


def test_where_no_factor_is_large_enough_a_warning_gives_numbers() -> None:
    la = fitted(prior_precision=1e-9)
    with pytest.warns(UserWarning, match=r"calibrate: .* 1e\+07 times .* tolerance=1e-06"):
        found = la.calibrate(tolerance=1e-6)
    torch.testing.assert_close(found, la.prior_precision * 1e7)
    with pytest.raises(ValueError, match="tolerance"):
        la.calibrate(tolerance=0.0)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


BY_PREDICTIVE: dict[str, Callable[[Any, Tensor], Any]] = {
    "probit": lambda la, x: la(x),
    "mc": lambda la, x: la(x, link_approx="mc", generator=seeded()),
    "variance": lambda la, x: la.functional_variance(x),
    "variance of a Jacobian": lambda la, x: la.functional_variance(drawn(2, 3, la.n_params, seed=3)),
    "covariance": lambda la, x: la.functional_covariance(x),
    "covariance of a Jacobian": lambda la, x: la.functional_covariance(drawn(2, 3, la.n_params, seed=3)),
    "samples": lambda la, x: la.functional_samples(x, n_samples=3, generator=seeded()),
    "predictive samples": lambda la, x: la.predictive_samples(x, n_samples=3, generator=seeded()),
    "uncertainty": lambda la, x: la.uncertainty(x, generator=seeded()).epistemic,
}
BY_PRIOR: dict[str, Callable[[Any, Tensor], Any]] = {
    "evidence": lambda la, x: la.log_marginal_likelihood(),
    "effective parameters": lambda la, x: torch.tensor(list(la.effective_parameters().values())),
    "sample": lambda la, x: la.sample(2, generator=seeded()),
    "log density": lambda la, x: la.log_prob(la.mean + 0.1),
    "leave one out": lambda la, x: la.leave_one_out().log_density,
}


@pytest.mark.parametrize("what", [*BY_PREDICTIVE, *BY_PRIOR])
def test_what_is_by_the_precisions_of_predictions(what: str) -> None:
    la, wide, narrow, x = (
        fitted(prior_precision=20.0),
        fitted(prior_precision=20.0),
        fitted(prior_precision=500.0),
        data(5)[0],
    )
    la.predictive_prior_precision = 500.0
    ask = (BY_PREDICTIVE | BY_PRIOR)[what]
    right, wrong = (narrow, wide) if what in BY_PREDICTIVE else (wide, narrow)
    torch.testing.assert_close(ask(la, x), ask(right, x), rtol=1e-12, atol=0)
    assert not torch.allclose(ask(la, x), ask(wrong, x), rtol=1e-3, atol=0)


RESETS: dict[str, Callable[[Any], Any]] = {
    "precision": lambda la: setattr(la, "prior_precision", 2.0),
    "none": lambda la: setattr(la, "predictive_prior_precision", None),
    "marglik": lambda la: la.optimize_prior_precision(n_steps=1),
    "mackay": lambda la: la.optimize_prior_precision(method="mackay"),
    "gridsearch": lambda la: la.optimize_prior_precision(
        method="gridsearch", prior_structure="scalar", val_loader=[data()], grid_size=2
    ),
    "fit": lambda la: la.fit([data()]),
    "more data": lambda la: la.fit([data()], override=False),
}


@pytest.mark.parametrize("what", RESETS)
def test_what_sets_predictions_back(what: str) -> None:
    la = fitted()
    la.predictive_prior_precision = 7.0
    RESETS[what](la)
    assert la.predictive_prior_precision is None


def test_a_failed_optimisation_leaves_them() -> None:
    la = fitted()
    la.predictive_prior_precision = 7.0
    with pytest.raises(ZeroDivisionError):
        la.optimize_prior_precision(
            method="gridsearch",
            prior_structure="scalar",
            val_loader=[data()],
            loss=lambda p, y: 1 / 0,
            link_approx="mc",
        )
    assert la.predictive_prior_precision.tolist() == [7.0] * 4 and la.prior_precision.tolist() == [0.3] * 4


def test_states_and_copies_have_them() -> None:
    la, x = fitted(), data(5)[0]
    la.predictive_prior_precision = torch.tensor([1.0, 2.0, 3.0, 4.0])
    other = KronLaplace(la.model)
    other.load_state_dict(la.state_dict())
    for one in (other, copy.copy(la)):
        assert one.predictive_prior_precision.tolist() == [1.0, 2.0, 3.0, 4.0]
        torch.testing.assert_close(one(x), la(x))
    la.predictive_prior_precision = None
    other.load_state_dict(la.state_dict())
    assert other.predictive_prior_precision is None
    for wrong in (-1.0, torch.ones(3)):
        with pytest.raises(ValueError, match="predictive_prior_precision"):
            la.predictive_prior_precision = wrong
        with pytest.raises(ValueError, match="predictive_prior_precision"):
            other.load_state_dict(with_checksum({**la._state(), "predictive_prior_precision": wrong}))


# after a training -----------------------------------------------------------------------------------------------------


def trained(epochs: int = 20, **options: Any) -> Any:
    torch.manual_seed(0)
    model = randomised(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 3)), 0.6)
    loader = DataLoader(TensorDataset(*data(200, 0.0)), batch_size=20, shuffle=True)
    how = {"n_epochs": epochs, "optimizer_kwargs": {"lr": 0.02}, "progress_bar": False} | options
    la, *_ = marglik_training(model, loader, **how)
    return la, torch.get_rng_state()


def test_a_training_predicts_no_worse_than_the_softmax() -> None:
    la, _ = trained()
    wide, random = trained(calibrate=False)
    x, y = (part[200:] for part in data(1200, 0.0))
    softmax, found, before = (F.nll_loss(p.log(), y).item() for p in (la.model(x).softmax(1), la(x), wide(x)))
    assert found <= softmax + 0.02 < before - 0.02
    assert wide.predictive_prior_precision is None
    assert torch.equal(la.prior_precision, wide.prior_precision) and torch.equal(trained()[1], random)


def test_a_resumed_training_is_calibrated_alike(tmp_path: Path) -> None:
    whole, random = trained(4, checkpoint=tmp_path / "whole.pt")
    for la, after in (trained(4, checkpoint=tmp_path / "whole.pt"), trained(4)):
        assert torch.equal(la.predictive_prior_precision, whole.predictive_prior_precision)
        assert torch.equal(after, random)


def test_trainings_that_are_not_calibrated() -> None:
    torch.manual_seed(0)
    x, y = data()
    how = {"n_epochs": 1, "progress_bar": False}
    for options in ({"likelihood": "regression"}, {"objective": "map"}):
        la, *_ = marglik_training(
            network(), [(x, F.one_hot(y, 3).double() if "likelihood" in options else y)], **how, **options
        )
        assert la.predictive_prior_precision is None


def test_a_training_of_too_many_outputs_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise MemoryError("no room")

    for name, value, words in (
        ("laplace.leave_one_out.room", full, "no room"),
        ("training.trainer.CALIBRATED_OUTPUTS", 2, "3 outputs"),
    ):
        monkeypatch.setattr(f"ella_cuda.{name}", value)
        with pytest.warns(UserWarning, match=f"not calibrated.*{words}"):
            la, _ = trained(1)
        assert la.predictive_prior_precision is None

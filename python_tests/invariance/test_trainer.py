"""Training by the bound: what moves, checkpoints, predictions, and what is refused."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda.augment import AffineAugment
from ella_cuda.data import TensorLoader
from ella_cuda.invariance import BayesianLinear, ElboTrainer, InvariantFilterBank, ShallowNetwork
from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.interrupting import interrupted


def images(n: int = 40, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 8, 8, generator=generator), torch.arange(n) % classes


def network(likelihood: str = "classification", q: str = "full", path: str = "filters") -> ShallowNetwork:
    torch.manual_seed(0)
    bank = InvariantFilterBank((1, 8, 8), 6, AffineAugment(3, ("rotation", "tx")), path=path)
    return ShallowNetwork(bank, BayesianLinear(6, 3, q), likelihood)


def loader(batch: int = 16) -> TensorLoader:
    """With a generator of its own, whose state a checkpoint has too."""
    return TensorLoader(*images(), batch, shuffle=True, generator=torch.Generator().manual_seed(7))


def trainer(model: ShallowNetwork | None = None, **options: object) -> ElboTrainer:
    return ElboTrainer(
        network() if model is None else model, loader(), **{"n_epochs": 3, "progress_bar": False, **options}
    )


def numbers(model: ShallowNetwork) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def moved(model: ShallowNetwork, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_bound_moves_everything_and_a_point_estimate_its_own(likelihood):
    x, y = images()
    targets = nn.functional.one_hot(y).float()
    data = TensorLoader(x, y if likelihood == "classification" else targets, 20)
    features = {"features.weight", "features.bias", "features.augment.raw", "layer.mean"}
    of_q = {"layer.log_scale", "layer.lower", "layer.log_prior_precision"} | (
        {"log_sigma_noise"} if likelihood == "regression" else set()
    )
    for objective, expected in (("bound", features | of_q), ("point", features)):
        model = network(likelihood)
        before = numbers(model)
        trained = ElboTrainer(model, data, n_epochs=1, objective=objective, progress_bar=False)
        trained.run()
        assert moved(model, before) == expected
        assert not model.features.augment.raw.requires_grad  # as augmentations have it outside of training
        entry = trained.history[0]
        assert entry == {"epoch": 1, "objective": entry["objective"], **model.hyperparameters()}
    before = numbers(model)
    ElboTrainer(model, data, n_epochs=1, learn_amounts=False, progress_bar=False).run()
    assert "features.augment.raw" not in moved(model, before)


def test_the_first_step_is_adams_along_the_bound():
    model = network()
    x, y = images()
    raw, before = model.features.augment.raw, numbers(model)
    raw.requires_grad_()
    torch.manual_seed(5)
    (slope,) = torch.autograd.grad(model.elbo(x, y), raw)
    raw.requires_grad_(False)
    torch.manual_seed(5)
    trained = ElboTrainer(model, TensorLoader(x, y, 40), n_epochs=1, lr=1e-3, lr_hyp=3e-2, progress_bar=False)
    trained.run()
    torch.testing.assert_close(raw - before["features.augment.raw"], 3e-2 * slope.sign(), rtol=1e-3, atol=1e-6)
    assert (model.layer.mean - before["layer.mean"]).abs().max().item() == pytest.approx(1e-3, rel=1e-3)
    torch.manual_seed(5)
    model.load_state_dict(before)
    assert trained.history[0]["objective"] == pytest.approx(model.elbo(x, y).item() / 40, rel=1e-5)


def test_batches_have_the_weight_of_all_data():
    """The mean over an epoch of bounds of batches is that of all data, where nothing moves and draws are held."""
    model = network("regression")
    x, y = images()
    data = TensorLoader(x, nn.functional.one_hot(y).float(), 16)
    with model.features.augment.held():
        trained = ElboTrainer(model, data, n_epochs=1, lr=1e-12, lr_hyp=1e-12, progress_bar=False)
        assert trained.epoch() == pytest.approx(model.elbo(data.images, data.labels).item() / 40, rel=1e-5)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_point_estimates_objective_is_the_log_posterior(likelihood):
    model = network(likelihood)
    with torch.no_grad():
        model.layer.mean.add_(torch.randn(3, 6))
        model.layer.log_prior_precision.fill_(0.5)
    x, y = images()
    targets = nn.functional.one_hot(y).float()
    data = TensorLoader(x, y if likelihood == "classification" else targets, 20)
    with model.features.augment.held():
        with torch.no_grad():
            mean = model(x)
            if likelihood == "classification":
                fit = mean.log_softmax(1)[torch.arange(40), y].sum()
            else:
                fit = torch.distributions.Normal(mean, model.sigma_noise).log_prob(targets).sum()
            expected = fit - 0.5 * model.layer.prior_precision * model.layer.mean.square().sum()
        trained = ElboTrainer(model, data, objective="point", lr=1e-12, lr_hyp=1e-12, progress_bar=False)
        assert trained.epoch() == pytest.approx(expected.item() / 40, rel=1e-5)


@pytest.mark.parametrize("objective", ["bound", "point"])
def test_a_resumed_training_is_one_that_was_not_interrupted(objective, tmp_path):
    whole = trainer(n_epochs=5, objective=objective, checkpoint=tmp_path / "whole.pt")
    torch.manual_seed(3)
    whole.run()
    options = {"n_epochs": 5, "objective": objective, "checkpoint": tmp_path / "stopped.pt"}
    stopped = trainer(**options)
    torch.manual_seed(3)
    with interrupted(ElboTrainer, "epoch", lambda self: self.epochs == 3), pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = trainer(**options)
    torch.manual_seed(17)
    resumed.run()
    assert resumed.history == whole.history and len(whole.history) == 5
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    again = trainer(**options)  # finished: nothing is left to do
    again.run()
    assert again.history == whole.history


@pytest.mark.parametrize("frozen", ["log_prior_precision", "log_scale", "mean"])
def test_frozen_parameters_stay_and_a_training_goes_on(frozen, tmp_path):
    for n in (1, 2):  # the second finds the first one's checkpoint
        model = network()
        model.layer.get_parameter(frozen).requires_grad_(False)
        before = numbers(model)
        done = trainer(model, checkpoint=tmp_path / "checkpoint.pt")
        done.run()
        assert done.epochs == 3 and f"layer.{frozen}" not in moved(model, before), n
        assert "features.weight" in moved(model, before)


def test_amounts_that_need_a_gradient_do_so_afterwards():
    model = network()
    model.features.augment.raw.requires_grad_()
    trainer(model, n_epochs=1).run()
    assert model.features.augment.raw.requires_grad


def test_states_go_on_without_a_file():
    first = trainer()
    first.epoch()
    state = copy.deepcopy(first.state_dict())
    expected = first.epoch()
    other = trainer()
    other.load_state_dict(state)
    assert other.epoch() == expected and other.history == first.history


def test_checkpoints_come_as_often_as_asked(tmp_path, monkeypatch):
    path, seen = tmp_path / "deep" / "checkpoint.pt", []
    state_dict = ElboTrainer.state_dict
    monkeypatch.setattr(ElboTrainer, "state_dict", lambda self: seen.append(self.epochs) or state_dict(self))
    trainer(n_epochs=5, checkpoint=path, checkpoint_frequency=2).run()
    assert seen == [2, 4, 5] and read_checkpoint(path)["epoch"] == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.5}, "written with lr=0.001, this run has 0.5"),
        ({"objective": "point"}, "objective='bound'"),
        ({"n_epochs": 9}, "n_epochs=3"),
        ({"depends_on": {"seed": 1}}, "depends_on"),
        ({"model": {"q": "diag"}}, "network="),
        ({"model": {"frozen": "log_scale"}}, "learned[2]='layer.log_scale', this run has 'layer.mean'"),
        ({"n_samples": 3}, "n_samples=10"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(change, words, tmp_path):
    path = tmp_path / "checkpoint.pt"
    first, model = network(), change.get("model", {})
    first.layer.mean.requires_grad_("frozen" not in model)  # of the shape of another that is frozen
    trainer(first, checkpoint=path).run()
    before, second = path.read_bytes(), network(q=model.get("q", "full"))
    if "frozen" in model:
        second.layer.get_parameter(model["frozen"]).requires_grad_(False)
    other = trainer(second, **{"checkpoint": path} | {k: v for k, v in change.items() if k != "model"})
    with pytest.raises(ValueError, match=re.escape(words)):
        other.run()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state["optimizer"].pop("param_groups"), "optimizer is of another form"),
        (lambda state: state["history"].pop(), "history has 2 entries of 3 epochs"),
        (lambda state: state.pop("random"), "has no random"),
        (lambda state: state["model"].pop("layer.mean"), "layer.mean of shape None"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, words, tmp_path):
    first = trainer(checkpoint=tmp_path / "checkpoint.pt")
    first.run()
    state = read_checkpoint(tmp_path / "checkpoint.pt")
    damage(state)
    model = network()
    before = numbers(model)
    other = trainer(model)
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    assert not moved(model, before) and other.epochs == 0


def test_what_is_not_finite_stops_training_and_keeps_the_last_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    model = network()
    first = trainer(model, checkpoint=path, n_epochs=4)
    epoch = first.epoch

    def breaking() -> float:
        if first.epochs == 2:
            model.features.bias.data[0] = math.nan
        return epoch()

    first.epoch = breaking
    with pytest.raises(FloatingPointError, match="in epoch 3 the objective is not finite"):
        first.run()
    assert read_checkpoint(path)["epoch"] == 2


def test_amounts_beyond_their_limit_come_back():
    model = network()
    model.features.augment.set_eta({"rotation": math.pi, "tx": 0.1})
    trainer(model, lr_hyp=0.5).run()
    assert model.features.augment.amounts()["rotation"] <= math.pi
    raw = model.features.augment.raw.requires_grad_()
    assert torch.autograd.grad(model.features.augment.eta.sum(), raw)[0].min() > 0


def test_predictions_are_those_of_q():
    x, _ = images()
    model = network()
    with torch.no_grad():
        model.layer.mean.add_(torch.randn(3, 6))
        model.layer.log_scale.add_(2.0)
    with model.features.augment.held():
        probabilities = model.predict(x, 4000, torch.Generator().manual_seed(0))
        mean, variance = model.layer.moments(model.features(x))
        drawn = (mean + variance.sqrt() * torch.randn(4000, *mean.shape)).softmax(2).mean(0)
    torch.testing.assert_close(probabilities, drawn, rtol=0, atol=0.03)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(x)))
    assert not probabilities.requires_grad and model(x).shape == (40, 3)
    regression = network("regression")
    with regression.features.augment.held():
        mean, variance = regression.predict(x)
        own_mean, own = regression.layer.moments(regression.features(x))
        torch.testing.assert_close(mean, own_mean)
        torch.testing.assert_close(variance, own + regression.sigma_noise**2)
    assert model.hyperparameters().keys() == {"prior_precision", "rotation", "tx"}
    assert regression.hyperparameters().keys() == {"prior_precision", "sigma_noise", "rotation", "tx"}


def test_amounts_of_two_augmentations_have_names_of_their_own():
    first, second = network().features, network().features
    first.augment.set_eta({"rotation": 0.5, "tx": 0.1})
    second.augment = AffineAugment(4, ("rotation", "ty"), (0.25, 0.2))
    model = ShallowNetwork(nn.ModuleDict({"a": first, "b": second}), BayesianLinear(6, 3))
    amounts = {k: v for k, v in model.hyperparameters().items() if k != "prior_precision"}
    assert amounts == pytest.approx({"a.augment.rotation": 0.5, "b.augment.rotation": 0.25, "tx": 0.1, "ty": 0.2})


def test_features_may_be_any_module():
    x, y = images()
    features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = ShallowNetwork(features, BayesianLinear(6, 3))
    found = ElboTrainer(model, DataLoader(TensorDataset(x, y), 20), n_epochs=2, progress_bar=False).run()
    assert found is model and model.hyperparameters().keys() == {"prior_precision"}
    regression = ShallowNetwork(features, BayesianLinear(6, 3), "regression")
    with pytest.raises(ValueError, match="unbiased=True needs features of InvariantFilterBank, got Sequential"):
        regression.elbo(x, torch.rand(40, 3), unbiased=True)


def test_wrong_arguments_are_refused():
    model = network()
    for options, kind, words in (
        ({"objective": "map"}, ValueError, "objective must be one of 'bound', 'point', got 'map'"),
        ({"n_epochs": 0}, ValueError, "n_epochs must be a positive integer, got 0"),
        ({"checkpoint_frequency": -1}, ValueError, "checkpoint_frequency must be a positive integer"),
        ({"unbiased": True}, ValueError, "unbiased=True needs likelihood='regression', got 'classification'"),
        ({"n_samples": 0}, ValueError, "ElboTrainer: n_samples must be a positive integer, got 0"),
        ({"lr": 0.0}, ValueError, "lr must be positive"),
        ({"lr_hyp": "a"}, TypeError, "lr_hyp must be one number"),
        ({"n_data": 0}, ValueError, "n_data must be a positive integer"),
        ({"objective": "point", "unbiased": True}, ValueError, "unbiased=True is of objective='bound'"),
    ):
        with pytest.raises(kind, match=words):
            trainer(model, **options)
    with pytest.raises(ValueError, match="ShallowNetwork: n_samples must be a positive integer, got 0"):
        model.predict(images()[0], 0)
    with pytest.raises(
        TypeError, match="ElboTrainer: train_loader must be a loader that is iterated anew in every epoch"
    ):
        ElboTrainer(model, iter([images()]))
    with pytest.raises(ValueError, match="ElboTrainer: train_loader has no data points"):
        ElboTrainer(model, [])
    with pytest.raises(ValueError, match="must yield at least one batch"):
        ElboTrainer(model, [], n_data=3, progress_bar=False).run()
    with pytest.raises(ValueError, match="likelihood must be one of"):
        ShallowNetwork(model.features, model.layer, "poisson")
    with pytest.raises(ValueError, match="sigma_noise must be positive"):
        ShallowNetwork(model.features, model.layer, "regression", sigma_noise=0)


@pytest.mark.parametrize(
    ("batches", "words"), [([3, 3], "yielded 6 data points or more"), ([3], "yielded 3 data points")]
)
def test_passes_of_another_number_of_images_are_refused(batches, words):
    class Uneven:
        dataset_size = 4

        def __iter__(self):
            return (images(n) for n in batches)

    with pytest.raises(ValueError, match=f"ElboTrainer: train_loader must yield 4 data points in every pass.*{words}"):
        ElboTrainer(network(), Uneven(), progress_bar=False).run()


def test_autocast_changes_no_training():
    found = []
    for autocast in (True, False):
        torch.manual_seed(0)
        features = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU())
        model = ShallowNetwork(features, BayesianLinear(6, 3))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            features(images()[0])
            trainer(model).run()
            assert torch.allclose(features(images()[0]).float(), copy.deepcopy(features)(images()[0]).float())
        found.append(numbers(model))
    torch.testing.assert_close(*found)

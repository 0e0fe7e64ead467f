"""The parameters that precisions belong to, and what evidence steps do with the precisions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.training import MarglikTrainer


def exchange(model: nn.Module) -> None:
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)


def freeze(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


def add(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("change", "name"), [(exchange, "0.weight"), (freeze, "0.bias"), (add, "1.weight")], ids=["exchange", "freeze", "add"]
)  # fmt: skip
@pytest.mark.parametrize("objective", ["evidence", "map"])
def test_parameters_that_change_hands_in_training_are_refused(change, name, objective):
    model, loader = nn.Sequential(nn.Linear(5, 3)), TensorLoader(torch.randn(12, 5), torch.arange(12) % 3, 6)

    def at_two(evaluation) -> None:
        if evaluation.epoch == 2:
            change(model)

    with pytest.raises(ValueError, match=f"stay those that training began with, but '{name}' was exchanged"):
        marglik_training(model, loader, n_epochs=4, objective=objective, on_evaluation=at_two, progress_bar=False)


def test_values_may_change_in_training():
    model, loader = nn.Sequential(nn.Linear(5, 3)), TensorLoader(torch.randn(12, 5), torch.arange(12) % 3, 6)

    def zero(evaluation) -> None:
        model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()})

    marglik_training(model, loader, n_epochs=2, on_evaluation=zero, progress_bar=False)
    assert not any(p.any() for p in model.parameters())


def norm_network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


def regression_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin() + 0.2 * torch.randn(40, 3, generator=generator, dtype=torch.float64)


def mackay(**options) -> MarglikTrainer:
    arguments = {"n_epochs": 4, "n_hypersteps": 300, "hyper_step_limit": None, "progress_bar": False}
    arguments |= {"hyper_optimizer": "mackay", "likelihood": "regression"} | options
    return MarglikTrainer(norm_network(), TensorLoader(*regression_data(), 20, shuffle=True), **arguments)


# By hand: which of the six tensors share a precision.
MEMBERS = {
    "layerwise": [[0], [1], [2], [3], [4], [5]],
    "module": [[0, 1], [2, 3], [4, 5]],
    "normalised": [[0, 1], [2, 3, 4, 5]],
    "scalar": [[0, 1, 2, 3, 4, 5]],
}


@pytest.mark.parametrize("structure", MEMBERS)
@pytest.mark.parametrize("fixed", [False, True])
def test_an_evidence_step_of_mackays_ends_at_the_optimum(structure, fixed):
    trainer = mackay(prior_structure=structure, fix_sigma_noise=fixed, sigma_noise_init=0.7)
    trainer.epoch()
    evaluation = trainer.evidence_step()
    la = trainer.la
    log_precision, log_sigma = la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()
    evidence = la.log_marginal_likelihood(log_precision.exp(), log_sigma.exp())
    slopes, of_sigma = torch.autograd.grad(evidence, (log_precision, log_sigma))
    for members in MEMBERS[structure]:
        assert slopes[members].sum().abs() < 1e-6
        assert len(set(la.prior_precision[members].tolist())) == 1
    assert len(set(evaluation.prior_precision)) == len(MEMBERS[structure])
    assert evaluation.prior_precision == la.prior_precision.tolist() and evaluation.sigma_noise == float(la.sigma_noise)
    assert evaluation.neg_log_marginal_likelihood == pytest.approx(-evidence.item() / 40, rel=1e-12)
    assert (of_sigma.abs() < 1e-5) is not fixed
    assert (evaluation.sigma_noise == pytest.approx(0.7, abs=1e-15)) is fixed


@pytest.mark.parametrize(("options", "limit"), [({"hyper_step_limit": 0.25}, 0.25), ({}, 2.3)])
def test_an_evidence_step_goes_no_further_than_the_limit(options, limit):
    start = {"prior_prec_init": 1e-4, "sigma_noise_init": 10.0}
    free = mackay(**start)
    free.evidence_step()
    assert free.la.prior_precision.log().min() > math.log(1e-4) + 5
    arguments = {"n_hypersteps": 300, "progress_bar": False, "hyper_optimizer": "mackay", "likelihood": "regression"}
    limited = MarglikTrainer(norm_network(), TensorLoader(*regression_data(), 20), **arguments, **start, **options)
    before = torch.tensor([math.log(1e-4)] * 6, dtype=torch.float64), -2 * math.log(10)
    for step in range(2):
        evaluation = limited.evidence_step()
        precisions = torch.tensor(evaluation.prior_precision, dtype=torch.float64)
        after = precisions.log(), -2 * math.log(evaluation.sigma_noise)
        ways, of_noise = (after[0] - before[0]).abs(), abs(after[1] - before[1])
        assert ways.max() == pytest.approx(limit) and of_noise <= limit + 1e-9
        assert step or of_noise == pytest.approx(limit)
        before = after


@pytest.mark.parametrize("n_hypersteps", [1, 3, 50])
def test_the_evidence_never_falls(n_hypersteps):
    """With the weights held, from one evidence step to the next."""
    options = {"prior_prec_init": 1e4, "sigma_noise_init": 20.0, "hyper_step_limit": 1.0, "optimizer_kwargs": {"lr": 0.0}}  # fmt: skip
    trainer = mackay(n_hypersteps=n_hypersteps, **options)
    start = KronLaplace(trainer.model, "regression", prior_precision=1e4, sigma_noise=20.0).fit([regression_data()])
    margliks = [-start.log_marginal_likelihood().item()]
    for _ in range(12):
        trainer.evidence_step()
        margliks.append(trainer.margliks[-1])
    assert all(after <= before + 1e-10 * abs(before) for before, after in itertools.pairwise(margliks))
    assert margliks[3] < margliks[0] - 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hyper_optimizer": "adam"}, "hyper_optimizer='mackay', this run has 'adam'"),
        ({"hyper_step_limit": 2.0}, r"hyper_step_limit='None', this run has 2\.0"),
        ({"prior_structure": "normalised"}, "prior_structure='layerwise', this run has 'normalised'"),
    ],
)
def test_a_state_of_another_hyper_optimizer_is_refused(options, words):
    begun, other = mackay(), mackay(**options)
    begun.epoch()
    begun.evidence_step()
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(begun.state_dict())
    if "hyper_optimizer" in options:
        other.epoch()
        other.evidence_step()
        with pytest.raises(ValueError, match="hyper_optimizer='adam', this run has 'mackay'"):
            begun.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hyper_optimizer": "lbfgs"}, ValueError, "hyper_optimizer must be one of 'adam', 'mackay', got 'lbfgs'"),
        ({"hyper_step_limit": 0.0}, ValueError, "hyper_step_limit must be positive and finite"),
        ({"hyper_step_limit": "1"}, TypeError, "hyper_step_limit must be one number"),
    ],
)
def test_wrong_arguments_of_evidence_steps(options, error, words):
    with pytest.raises(error, match=words):
        mackay(**options)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.shape[0] else x


def test_a_network_without_a_graph_has_no_normalised_structure():
    loader = TensorLoader(torch.randn(12, 5), torch.arange(12) % 3, 6)
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace Branches.*prior_structure='layerwise' or 'module'"):
        marglik_training(Branches(), loader, prior_structure="normalised", progress_bar=False)
    marglik_training(Branches(), loader, prior_structure="module", n_epochs=1, progress_bar=False)

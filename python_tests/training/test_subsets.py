"""Evidence steps from subsets in marglik_training; the oracles are steps from all data, autograd, and closed forms of linear regression."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import SparseFactoredLinear2d
from ella_cuda.training import Learner, MarglikTrainer
from python_tests.laplace.checks import drawn


class Scaled(nn.Module):
    """A network with a buffer in front."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.register_buffer("scale", torch.tensor([0.7, 1.3, 1.0, 0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


class Noted(Learner):
    """Keeps the evidence's gradients in a buffer, which stays where it is."""

    name = "noted"

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.seen, self.inputs = buffer, [], []

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.buffer}

    def gradients(self, la, loader) -> None:
        self.inputs.append(torch.cat([x for x, _ in loader]))

    def step(self, la, gradients) -> None:
        self.seen.append(gradients["scale"].clone())


class Orders:
    """A loader whose passes have given orders."""

    def __init__(self, x: Tensor, y: Tensor, orders) -> None:
        self.x, self.y, self.orders, self.dataset_size = x, y, iter(orders), len(x)

    def __iter__(self):
        order = next(self.orders)
        return iter([(self.x[some], self.y[some]) for some in order.split(4)])


def sparse_run(evidence_batch: int | None, learn: list[str], **options) -> MarglikTrainer:
    torch.manual_seed(1)
    x, y = drawn(20, 1, 6, 6), torch.arange(20) % 3
    layers = [SparseFactoredLinear2d(1, 2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)]
    of_evidence = TensorLoader(x, y, 8, shuffle=True, generator=torch.Generator().manual_seed(2))
    how = {"n_epochs": 3, "n_hypersteps": 3, "progress_bar": False, "calibrate": False, **options}
    model = nn.Sequential(*layers).double()
    loaders = {"train_loader": TensorLoader(x, y, 8), "marglik_loader": of_evidence}
    trainer = MarglikTrainer(model, **loaders, evidence_batch=evidence_batch, learn=learn, **how)
    trainer.run()
    return trainer


@pytest.mark.parametrize(
    ("learn", "options"),
    [
        (["lengthscales", "anchors"], {"hyper_optimizer": "mackay"}),
        (["lengthscales"], {"hold_factors": False}),
        (["augmentation"], {"aug_sampling": "shared", "lr_aug": 3.0}),
    ],
    ids=lambda value: "+".join(value),
)
def test_a_subset_of_all_data_points_makes_the_steps_of_all(learn, options):
    found = []
    for size in (None, 20, 7):
        torch.manual_seed(4)
        augment = {"augment": AffineAugment(2, init=0.1).double()} if "augmentation" in learn else {}
        found.append(sparse_run(size, learn, **options, **augment))
    whole, every, few = found
    assert every.margliks == pytest.approx(whole.margliks, rel=1e-9)
    torch.testing.assert_close(every.la.prior_precision, whole.la.prior_precision, rtol=1e-9, atol=0)
    for (name, buffer), expected, of_few in zip(
        every.model.named_buffers(), whole.model.buffers(), few.model.buffers(), strict=True
    ):
        torch.testing.assert_close(buffer, expected, rtol=1e-7, atol=1e-9)
        if name.endswith("raw" if augment else "inverse_lengthscale"):
            assert not torch.equal(of_few, expected)
    assert few.la.n_data == 20 and few.margliks != pytest.approx(whole.margliks, rel=1e-3)


def test_the_data_fits_gradient_is_right_on_average_over_all_subsets():
    model, x, y = Scaled(), drawn(8, 4), torch.arange(8) % 3
    subsets = [torch.tensor(some) for some in itertools.combinations(range(8), 3)]
    rest = [torch.tensor([i for i in range(8) if i not in some.tolist()]) for some in subsets]
    orders = Orders(x, y, (torch.cat(pair) for pair in zip(subsets, rest, strict=True)))
    noted = Noted(model.scale)
    how = {"n_epochs": 99, "progress_bar": False, "learn": [noted], "lr_hyp": 1e-9, "evidence_batch": 3}
    trainer = MarglikTrainer(model, [(x, y)], marglik_loader=orders, **how)
    for _ in subsets:
        trainer.evidence_step()
    assert all(torch.equal(seen, x[some]) for seen, some in zip(noted.inputs, subsets, strict=True))
    scale = model.scale.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model.layers(x * scale), y)
    (expected,) = torch.autograd.grad(-loss, [scale])
    torch.testing.assert_close(torch.stack(noted.seen).mean(0), expected, rtol=1e-10, atol=1e-12)
    assert (torch.stack(noted.seen) - expected).abs().max() > 0.01


def test_precisions_and_noise_maximise_the_bound_of_a_linear_regression():
    """Its Kronecker factors are exact: one output, no bias."""
    model, x = nn.Linear(3, 1, bias=False).double(), drawn(30, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * drawn(30, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.9, -1.8, 0.4]]))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    how = {"n_epochs": 9, "progress_bar": False, "hyper_optimizer": "mackay", "n_hypersteps": 500}
    loaders = {"train_loader": [(x, y)], "marglik_loader": Orders(x, y, [order])}
    trainer = MarglikTrainer(model, **loaders, likelihood="regression", hyper_step_limit=None, evidence_batch=6, **how)
    record = trainer.evidence_step()
    few = x[order[:6]], y[order[:6]]
    logs = torch.tensor([record.prior_precision[0], record.sigma_noise], dtype=torch.float64).log().requires_grad_()
    delta, sigma = logs.exp()
    fit = torch.distributions.Normal(few[0] @ model.weight.detach().T, sigma).log_prob(few[1]).sum()
    precision = few[0].T @ few[0] / sigma**2 / delta + torch.eye(3, dtype=torch.float64)
    bound = 30 / 6 * (fit - 0.5 * torch.logdet(precision)) - 0.5 * delta * model.weight.detach().square().sum()
    (slope,) = torch.autograd.grad(bound, [logs])
    assert slope.abs().max() < 1e-5
    assert record.neg_log_marginal_likelihood == pytest.approx(-bound.item() / 30, rel=1e-9)
    assert trainer.margliks == [pytest.approx(-bound.item(), rel=1e-9)]


def small(evidence_batch: int | None = 6, loader=None, **options) -> MarglikTrainer:
    torch.manual_seed(3)
    loader = TensorLoader(drawn(20, 4), torch.arange(20) % 3, 7, shuffle=True) if loader is None else loader
    how = {"n_epochs": 4, "n_hypersteps": 3, "progress_bar": False, "evidence_batch": evidence_batch}
    return MarglikTrainer(Scaled(), loader, **how | options)


def test_a_state_is_gone_on_from_and_the_last_fit_is_of_all_data(tmp_path):
    whole = small(checkpoint=tmp_path / "whole.pt")
    la = whole.run()
    assert la.n_data == 20 and la is whole.finish() and len(set(whole.margliks)) == 4
    expected = KronLaplace(whole.model, "classification", prior_precision=la.prior_precision)
    expected.fit(TensorLoader(drawn(20, 4), torch.arange(20) % 3, 20))
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(expected.log_marginal_likelihood()), rel=1e-10)
    half = small()
    for _ in range(2):
        half.epoch()
        half.evidence_step()
    torch.save(half.state_dict(), tmp_path / "half.pt")
    again = small()
    again.load_state_dict(torch.load(tmp_path / "half.pt"))
    assert torch.equal(again.run().prior_precision, la.prior_precision) and again.margliks == whole.margliks
    assert float(again.la.log_marginal_likelihood()) == float(la.log_marginal_likelihood())
    with pytest.raises(ValueError, match="evidence_batch"):
        small(evidence_batch=5, checkpoint=tmp_path / "whole.pt").run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evidence_batch": 0}, "evidence_batch must be at least 1, got 0"),
        ({"keep": "best"}, "keep must be 'last' with evidence_batch"),
        (
            {"loader": TensorLoader(drawn(9, 4), torch.arange(9) % 3, 3)},
            "train_loader: evidence_batch takes the first of a new pass, which of this loader are the same",
        ),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)

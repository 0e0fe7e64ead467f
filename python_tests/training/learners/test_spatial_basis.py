"""Learning what shapes sparsified layers: lengthscales and anchors by the evidence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.laplace import KronLaplace, evidence_gradient
from ella_cuda.nn import RelaxedEquivariance, SparseConv2d, SparseFactoredLinear2d
from ella_cuda.training import MarglikTrainer
from python_tests.ops.checks import assert_same

BOTH = ("anchors", "lengthscales")


def network() -> nn.Module:
    torch.manual_seed(3)
    paths = {"s_fc": SparseFactoredLinear2d(1, 2, 4, 4), "s_conv": SparseConv2d(1, 2)}
    return nn.Sequential(RelaxedEquivariance(paths), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))


def data(n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 1, 4, 4, generator=generator), torch.randint(5, (n,), generator=generator))


def run(model: nn.Module, learn=BOTH, n_epochs: int = 6, **options):
    loader = DataLoader(data(), batch_size=10, shuffle=True)
    arguments = {"n_epochs_burnin": 1, "marglik_frequency": 2, "n_hypersteps": 3, "progress_bar": False} | options
    return marglik_training(model, loader, n_epochs=n_epochs, learn=learn, **arguments)


def shape(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.clone() for n, b in model.named_buffers() if not n.endswith("points")}


@pytest.mark.parametrize(
    ("learn", "moves"),
    [((), ()), (["anchors"], ("anchors",)), (["lengthscales"], ("inverse_lengthscale",)), (BOTH, ("anchors", "inverse_lengthscale"))],
)  # fmt: skip
def test_only_what_is_asked_for_moves(learn, moves):
    model = network()
    before = shape(model)
    run(model, learn)
    for name, buffer in shape(model).items():
        assert torch.equal(buffer, before[name]) == (name.rpartition(".")[2] not in moves)
    assert not any(b.requires_grad for b in model.buffers())


@pytest.mark.parametrize("learn", [BOTH, ["anchors"], ["lengthscales"]])
def test_lengthscales_and_anchors_have_rates_of_their_own(learn):
    def moved(**options) -> dict[str, float]:
        model = network()
        before = shape(model)
        run(model, learn, n_epochs=3, lr_hyp=0.05, **options)
        after = shape(model)
        logs = {
            n: (after[n].log() - before[n].log()) if n.endswith("lengthscale") else after[n] - before[n] for n in before
        }
        found = {"lengthscales": [v for n, v in logs.items() if n.endswith("lengthscale")]}
        found["anchors"] = [v for n, v in logs.items() if n.endswith("anchors")]
        return {kind: max(float(v.abs().max()) for v in found[kind]) for kind in learn}

    expected = {"lengthscales": 0.02, "anchors": 0.01}
    steps = moved(lr_lengthscales=0.02, lr_anchors=0.01)
    assert steps == {kind: pytest.approx(expected[kind], rel=1e-2) for kind in learn}
    defaults = {"lengthscales": 0.03, "anchors": 0.003}
    assert moved() == {kind: pytest.approx(defaults[kind], rel=1e-2) for kind in learn}


@pytest.mark.parametrize("rate", ["lr_lengthscales", "lr_anchors"])
def test_rates_of_the_shape_belong_to_a_run(rate, tmp_path):
    run(network(), BOTH, n_epochs=3, checkpoint=tmp_path / "c.pt")
    with pytest.raises(ValueError, match=rate):
        run(network(), BOTH, n_epochs=3, checkpoint=tmp_path / "c.pt", **{rate: 0.02})
    with pytest.raises(ValueError, match=f"{rate} must be positive"):
        run(network(), **{rate: 0.0})


def test_a_step_follows_the_gradient_at_the_fit():
    """Weights held (learning rate 0): after one evidence step every hyperparameter has moved by its rate up the evidence's gradient."""
    model = network()
    before = shape(model)
    x, y = data().tensors
    reference = network()
    for buffer in reference.buffers():
        buffer.requires_grad_()
    seen = []
    rates = {"optimizer_kwargs": {"lr": 0.0}, "lr_lengthscales": 0.05, "lr_anchors": 0.05}
    run(model, n_epochs=3, n_epochs_burnin=1, on_evaluation=seen.append, **rates)
    assert [e.epoch for e in seen] == [2, 3]
    # The step is taken at the precisions after their own three.
    la = KronLaplace(reference, prior_precision=torch.tensor(seen[0].prior_precision)).fit([(x, y)])
    names = [n for n, _ in reference.named_buffers() if not n.endswith("points")]
    found = [dict(reference.named_buffers())[n] for n in names]
    gradients = torch.autograd.grad(la.log_marginal_likelihood(), found)
    for name, gradient in zip(names, gradients, strict=True):
        moved = shape(model)[name] - before[name]
        if gradient.dim() == 0:
            moved = shape(model)[name].log() - before[name].log()
        clear = gradient.abs() > 1e-5 * la.n_data  # Adam's epsilon is 1e-8
        assert clear.any()
        assert_same(moved[clear], 0.05 * gradient[clear].sign(), rtol=1e-2, atol=1e-5)


def test_the_last_evaluation_moves_nothing_and_is_returned():
    model = network()
    seen = []
    la, *_ = run(model, on_evaluation=seen.append)
    now = {n: float(b) for n, b in shape(model).items() if n.endswith("inverse_lengthscale")}
    last = {f"{n}.inverse_lengthscale": v for n, v in seen[-1].inverse_lengthscale.items()}
    assert last == now and seen[-2].inverse_lengthscale != seen[-1].inverse_lengthscale
    x, y = data().tensors
    again = KronLaplace(model, prior_precision=la.prior_precision).fit([(x, y)])
    assert la.log_marginal_likelihood().item() == pytest.approx(again.log_marginal_likelihood().item(), rel=1e-6)


def test_with_the_weights_held_the_shape_climbs_the_evidence():
    schedule = {"n_epochs": 12, "n_epochs_burnin": 0, "marglik_frequency": 1, "n_hypersteps": 30, "lr_hyp": 0.02}
    margliks, without = (run(network(), learn, optimizer_kwargs={"lr": 0.0}, **schedule)[2] for learn in (BOTH, ()))
    for each in (margliks, without):
        assert all(b < a for a, b in itertools.pairwise(each))
    assert margliks[-1] < without[-1] - 0.5  # nats of all data


def test_learn_must_list_what_there_is():
    with pytest.raises(ValueError, match=r"must list any of anchors, augmentation, lengthscales, got \['omega'\]"):
        run(network(), ["omega"])
    with pytest.raises(ValueError, match=r"must be a list of names, got 'anchors'; pass a list, such as \['anchors'\]"):
        run(network(), "anchors")
    with pytest.raises(ValueError, match=r"must be a list of names, got None; pass a list, such as \['augmentation'\]"):
        run(network(), None)


def test_a_schedule_that_never_moves_the_shape_is_refused():
    with pytest.raises(ValueError, match="an evidence step after n_epochs_burnin = 1 and before the last epoch, 2"):
        run(network(), n_epochs=2)
    run(network(), n_epochs=2, objective="map")


def test_there_must_be_something_to_learn():
    with pytest.raises(ValueError, match="SparseFactoredLinear2d"):
        run(nn.Sequential(nn.Flatten(), nn.Linear(16, 5)))
    model = network()
    model[0].s_conv.basis.inverse_lengthscale.zero_()
    with pytest.raises(ValueError, match=r"inverse_lengthscale' must be positive"):
        run(model)
    run(model, ["anchors"], n_epochs=4)
    assert math.isfinite(float(model[0].s_conv.weight.sum()))


@pytest.mark.parametrize("word", BOTH)
def test_factors_may_follow(word):
    """The first step of Adam has the signs of the evidence's gradient with the factors in it."""
    held, followed = network().double(), network().double()
    loader = [(x.double(), y) for x, y in DataLoader(data(), batch_size=10)]
    schedule = {"n_epochs": 2, "progress_bar": False, "learn": [word]}
    trainers = [MarglikTrainer(m, loader, hold_factors=m is held, **schedule) for m in (held, followed)]
    before = shape(followed)
    for trainer in trainers:
        trainer.epoch()
        trainer.evidence_step()
    moved = shape(followed)
    names = [name for name in before if not torch.equal(before[name], moved[name])]
    ends = {"anchors": "anchors", "lengthscales": "inverse_lengthscale"}[word]
    assert names and all(name.endswith(ends) for name in names)
    assert not any(b.requires_grad for b in followed.buffers())
    assert any(not torch.equal(shape(held)[name], moved[name]) for name in names)
    for name in names:
        followed.get_buffer(name).copy_(before[name])
    gradients = evidence_gradient(trainers[1].la, loader, names)
    for name in names:
        assert torch.equal((moved[name] - before[name]).sign(), gradients[name].sign()), name

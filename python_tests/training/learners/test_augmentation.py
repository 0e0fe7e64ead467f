"""Learning the amounts of an augmentation: steps along the evidence's gradient, the best evidence, limits."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.laplace import evidence_gradient
from ella_cuda.nn import SparseConv2d
from ella_cuda.training import MarglikTrainer

NAMES = ("tx", "ty", "rotation", "sx", "sy", "shear")


def convolutional(sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    first = SparseConv2d(1, 2) if sparse else nn.Conv2d(1, 2, 3, padding=1)
    return nn.Sequential(first, nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3))


def loader(n: int = 30) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 1, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)


def trainer(sparse: bool = False, **options) -> MarglikTrainer:
    model = convolutional(sparse)
    arguments = {"augment": lambda: AffineAugment(4, init=0.2), "learn": ["augmentation"], "n_epochs": 6, "n_hypersteps": 2}  # fmt: skip
    arguments |= options
    augment = arguments.pop("augment")
    return MarglikTrainer(model, loader(), progress_bar=False, augment=augment and augment(), **arguments)


def at_zero(augment: AffineAugment) -> AffineAugment:
    augment.set_eta(0.0)
    return augment


def test_the_best_evidence_is_kept_with_its_amounts():
    unsteady = {"optimizer_kwargs": {"lr": 0.1}, "n_epochs": 2}  # too fast, so that the evidence falls
    made = trainer(keep="best", **unsteady)
    la = made.run()
    best = min(range(len(made.margliks)), key=made.margliks.__getitem__)
    assert best < len(made.margliks) - 1
    assert la.log_marginal_likelihood().item() == pytest.approx(-made.margliks[best], rel=1e-9)
    recorded = made.history[best]
    assert made.model.augment.amounts() == recorded["learned"]["augmentation"]
    assert la.prior_precision.tolist() == recorded["prior_precision"]
    last = trainer(**unsteady)
    assert last.run().log_marginal_likelihood().item() == pytest.approx(-made.margliks[-1], rel=1e-9)


def goes_on(made: MarglikTrainer, then: str, amounts: torch.Tensor) -> None:
    """What a loop of a user's own does after its best evidence step, which was at these amounts."""
    if then == "epoch":
        made.epoch()
    elif then == "evidence step":
        made.model.augment.raw.copy_(amounts)
        made.learners[0].log_precision.data.add_(3)
        made.evidence_step(last=True)
    elif then == "failed evidence step":

        def step(la, gradients):
            made.learners[0].log_precision.data.add_(1)
            raise FloatingPointError

        made.learners[0].step = step
        made.model.augment.raw.copy_(amounts)
        with pytest.raises(FloatingPointError):
            made.evidence_step()


@pytest.mark.parametrize("then", ["", "epoch", "evidence step", "failed evidence step"])
def test_the_best_evidence_of_an_own_loop_is_kept_with_its_amounts(then):
    made = trainer(keep="best", n_epochs=20, lr_aug=0.8)
    for _ in range(4):
        made.epoch()
        amounts = made.model.augment.raw.clone()
        made.evidence_step()
    best = min(range(len(made.margliks)), key=made.margliks.__getitem__)
    recorded = made.history[best]
    assert made.model.augment.amounts() != recorded["learned"]["augmentation"]  # they moved when the evidence was known
    goes_on(made, then, amounts)
    assert made.margliks[best] == min(made.margliks)
    before = torch.get_rng_state()
    la = made.finish()
    assert torch.equal(torch.get_rng_state(), before) and made.epochs == recorded["epoch"] + (then == "epoch")
    assert la.log_marginal_likelihood().item() == pytest.approx(-made.margliks[best], rel=1e-9)
    assert made.model.augment.amounts() == recorded["learned"]["augmentation"]
    assert la.prior_precision.tolist() == recorded["prior_precision"] == made.learners[0].precision().tolist()
    assert made.finish().log_marginal_likelihood().item() == la.log_marginal_likelihood().item()


def test_an_own_loop_ends_with_an_approximation_of_its_network():
    made, (x, _) = trainer(n_epochs=20), next(iter(loader()))
    made.epoch()
    made.evidence_step(last=True)
    la = made.la
    assert made.finish() is la
    for go_on in (made.epoch, made.evidence_step):  # after either the network is another than the last fit's
        go_on()
        amounts = made.model.augment.raw.clone()
        assert made.finish()(x).shape == (10, 3) and torch.equal(made.model.augment.raw, amounts)


def test_a_step_goes_along_the_evidences_gradient():
    made = trainer(lr_aug=0.03)
    before = made.model.augment.raw.clone()
    made.epoch()
    assert torch.equal(made.model.augment.raw, before) and not made.model.augment.raw.requires_grad
    evaluation = made.evidence_step()
    draws = made.la.state_dict()["draws"]
    assert draws.shape == (1, 4, 6) and made.model.augment.sampling == "independent"
    moved = made.model.augment.raw.clone()
    made.model.augment.raw.copy_(before)
    gradient = evidence_gradient(made.la, loader())["augment.raw"]
    torch.testing.assert_close(moved - before, (0.03 * gradient.sign()).float())  # Adam's first step
    assert tuple(evaluation.learned["augmentation"]) == NAMES
    assert evaluation.learned["augmentation"]["tx"] == pytest.approx(0.2)


def test_rates_follow_half_a_cosine_and_none_moves_after_the_last_epoch():
    made = trainer(lr_aug=0.1, lr_aug_min=0.02, n_epochs=11, marglik_frequency=2, n_epochs_burnin=2)
    rates, step = [], made.learners[1].optimizer.step
    made.learners[1].optimizer.step = lambda: (rates.append(made.learners[1].optimizer.param_groups[0]["lr"]), step())
    made.run()
    expected = [0.02 + 0.04 * (1 + math.cos(math.pi * t / 3)) for t in range(4)]  # after epochs 4, 6, 8, 10
    assert rates == pytest.approx(expected)
    amounts = [h["learned"]["augmentation"]["rotation"] for h in made.history]
    assert amounts[-1] == made.model.augment.amounts()["rotation"] and amounts[0] == amounts[1] != amounts[2]


@pytest.mark.parametrize(("constraint", "start"), [("softplus", math.log(math.expm1(0.1))), ("raw", 0.1)])
@pytest.mark.parametrize("lr_aug_min", [None, 0.05])
def test_amounts_that_no_gradient_brings_to_their_limit_are_told(constraint, start, lr_aug_min):
    """At a gradient of one sign Adam goes the sum of its rates."""
    options = {"augment": lambda: AffineAugment(4, ["rotation", "tx"], 0.1, constraint=constraint), "lr_aug": 0.2}
    options |= {"lr_aug_min": lr_aug_min, "n_epochs": 10, "marglik_frequency": 2, "n_epochs_burnin": 1}
    with pytest.warns(UserWarning, match="rotation to at most") as seen:
        made = trainer(**options)
    (told,) = (str(one.message) for one in seen if "rotation" in str(one.message))
    learner = made.learners[1]
    for _ in range(4):  # after epochs 2, 4, 6 and 8
        learner.step(None, {"augment.raw": torch.ones(2)})
    way = 4 * 0.2 if lr_aug_min is None else 4 * (0.2 + 0.05) / 2
    most = math.log1p(math.exp(start + way)) if constraint == "softplus" else start + way
    assert f"rotation to at most {most:.3g} of its limit 3.14, " in told and "tx" not in told
    assert made.model.augment.amounts()["rotation"] == pytest.approx(most, rel=1e-5)
    reaching = float(re.search(r"lr_aug=([\d.]+) \(--lr-aug\)", told)[1])
    need = (math.log(math.expm1(math.pi)) if constraint == "softplus" else math.pi) - start
    assert need <= 4 * reaching < 1.02 * need
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(**options | {"lr_aug": reaching, "lr_aug_min": None})
        trainer(**options | {"objective": "map"})
        trainer(**options | {"augment": lambda: AffineAugment(4, ["tx", "shear"])})  # without limits


def test_it_learns_beside_lengthscales():
    made = trainer(sparse=True, learn=["augmentation", "lengthscales"], n_epochs=2)
    scale, amounts = made.model.network[0].basis.inverse_lengthscale.clone(), made.model.augment.raw.clone()
    made.run()
    assert not torch.equal(made.model.network[0].basis.inverse_lengthscale, scale)
    assert not torch.equal(made.model.augment.raw, amounts)
    assert not any(b.requires_grad for b in made.model.buffers())


def test_amounts_stay_within_their_limits():
    made = trainer(augment=lambda: AffineAugment(4, "rotation", 3.14, constraint="raw"), lr_aug=1.0, n_epochs=4)
    made.run()
    made.model.augment.raw.requires_grad_()
    assert made.model.augment.eta.abs().item() < math.pi + 1e-6
    assert torch.autograd.grad(made.model.augment.eta.sum(), made.model.augment.raw)[0].item() != 0


def test_amounts_that_are_not_learned_stay_and_are_averaged_over():
    made = trainer(learn=(), n_epochs=2)
    amounts = made.model.augment.raw.clone()
    la = made.run()
    assert torch.equal(made.model.augment.raw, amounts) and la.state_dict()["draws"] is not None
    learned = trainer(objective="map", n_epochs=2)
    learned.run()
    assert torch.equal(learned.model.augment.raw, amounts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"augment": None}, r"learn=\['augmentation'\] needs a network that is averaged"),
        ({"aug_data": 0}, "aug_data must be at least 1"),
        ({"aug_columns": "two"}, "aug_columns"),
        ({"aug_sampling": "two"}, "sampling must be one of"),
        ({"keep": "first"}, "keep"),
        ({"lr_aug": -1.0}, "lr_aug must be positive"),
        ({"lr_aug_min": 0.0}, "lr_aug_min must be positive"),
        ({"augment": lambda: AffineAugment(4, ["tx", "ty"], 0.0, constraint="raw"), "aug_sampling": "grid"}, "amounts that are not 0"),
        ({"augment": lambda: at_zero(AffineAugment(4, ["tx", "ty"], 0.1, "grid", "raw"))}, "amounts that are not 0"),
        ({"n_epochs_burnin": 5}, "needs an evidence step after n_epochs_burnin"),
    ],
)  # fmt: skip
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        trainer(**options)


def test_a_network_without_that_gradient_is_refused_before_its_first_step():
    """At evidence steps a fit takes a weight that another layer has transposed, and the gradient in amounts does not."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 4, 1, bias=False), nn.ConvTranspose2d(4, 1, 1, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(64, 3))
    before = [p.clone() for p in model.parameters()]
    options = {"augment": AffineAugment(4), "n_epochs": 6, "n_epochs_burnin": 3, "progress_bar": False}
    with pytest.raises(ValueError, match=r"evidence_gradient: .* is the weight of one layer and its transpose"):
        marglik_training(model, loader(), learn=["augmentation"], **options)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_one_augmentation_alone():
    with pytest.raises(ValueError, match="augment must be None where the model is an AveragedFunction"):
        MarglikTrainer(AveragedFunction(convolutional(), AffineAugment(2)), loader(), augment=AffineAugment(2))


def test_a_checkpoint_of_another_augmentation_is_refused(tmp_path):
    path = tmp_path / "c.pt"
    trainer(checkpoint=path, n_epochs=2).run()
    with pytest.raises(ValueError, match="augment"):
        trainer(checkpoint=path, n_epochs=2, augment=lambda: AffineAugment(5, init=0.2)).run()
    with pytest.raises(ValueError, match="aug_data"):
        trainer(checkpoint=path, n_epochs=2, aug_data=3).run()

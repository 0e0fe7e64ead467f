"""MarglikTrainer and marglik_training: schedule, resume, interruption, errors, and what it learns on problems with a known answer."""

from __future__ import annotations

import enum
import functools
import inspect
import io
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.data import FlipsShifts, TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import FactoredLinear2d, PolyphasePool2d, RelaxedEquivariance
from ella_cuda.training import MarglikTrainer, trainer
from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.laplace.checks import Function
from python_tests.ops.checks import assert_same, threads


class Network(nn.Module):
    """One relaxed layer and a linear head on 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
        self.layer = RelaxedEquivariance(
            {"f_fc": FactoredLinear2d(1, 2, 8, 4), "conv": nn.Sequential(conv, PolyphasePool2d())}
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(x)).flatten(1))


def images(n: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.randint(10, (n,), generator=generator)


def small_run(checkpoint: Path | None = None, n_epochs: int = 6, **options):
    torch.manual_seed(3)
    model = Network()
    loader = DataLoader(TensorDataset(*images()), batch_size=10, shuffle=True)
    arguments = {"n_epochs_burnin": 1, "marglik_frequency": 2, "n_hypersteps": 3, "progress_bar": False, "fisher": "mc"}
    arguments |= {
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {"T_max": 3 * n_epochs},
    }
    return marglik_training(model, loader, n_epochs=n_epochs, checkpoint=checkpoint, **arguments | options)


def same_results(first, second) -> None:
    (la, model, margliks, losses), (la_2, model_2, margliks_2, losses_2) = first, second
    assert margliks == margliks_2 and losses == losses_2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_2.parameters(), strict=True))
    assert torch.equal(la.prior_precision, la_2.prior_precision)
    assert torch.equal(la.log_marginal_likelihood(), la_2.log_marginal_likelihood())


def test_schedule():
    seen = []
    la, _, margliks, losses = small_run(on_evaluation=seen.append, n_epochs=7, n_epochs_burnin=3)
    assert [e.epoch for e in seen] == [2, 4, 6, 7]
    assert [e.neg_log_marginal_likelihood is not None for e in seen] == [False, True, True, True]
    assert len(margliks) == 3 and len(losses) == 7
    assert seen[0].prior_precision == [1.0] * len(la.parameter_names)
    assert seen[1].prior_precision != seen[2].prior_precision
    assert seen[-1].prior_precision == la.prior_precision.tolist()
    # Adam's first step moves every log precision by lr_hyp; three steps by at most three times that
    moved = torch.tensor(seen[1].prior_precision).log().abs()
    assert (moved > 0.05).any() and (moved < 0.31).all()


def test_map_is_the_same_loop_without_evidence_steps():
    la, model, margliks, losses = small_run(objective="map")
    assert margliks == [] and losses[-1] < losses[0]
    assert set(la.prior_precision.tolist()) == {1.0}
    _, delayed, _, delayed_losses = small_run(n_epochs_burnin=5)  # the first evidence step follows the last epoch
    assert delayed_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), delayed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer_kwargs": {"lr": 0.5}}, "optimizer_kwargs"),
        ({"optimizer_cls": torch.optim.SGD}, "optimizer_cls"),
        ({"scheduler_cls": None, "scheduler_kwargs": None}, "scheduler_cls"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, change, message):
    small_run(tmp_path / "c.pt", n_epochs=2, optimizer_kwargs={"lr": 1e-3})
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path / "c.pt", n_epochs=2, **{"optimizer_kwargs": {"lr": 1e-3}, **change})


def test_functions_of_a_schedule_are_compared_by_name(tmp_path):
    """Another session's function is another object at another address; both are kept here, or they might share it."""
    functions = [lambda step: 0.5 for _ in range(2)]

    def run(function):
        schedule = {"scheduler_cls": torch.optim.lr_scheduler.LambdaLR, "scheduler_kwargs": {"lr_lambda": [function]}}
        return small_run(tmp_path / "c.pt", n_epochs=2, **schedule)

    same_results(run(functions[0]), run(functions[1]))
    partial = [functools.partial(lambda step, rate: rate, rate=rate) for rate in (0.5, 0.25)]
    (tmp_path / "c.pt").unlink()
    run(partial[0])
    with pytest.raises(ValueError, match="scheduler_kwargs"):
        run(partial[1])


def test_one_approximation_at_a_time_is_in_memory(monkeypatch):
    alive, at_fit = weakref.WeakSet(), []

    class Counted(trainer.KronLaplace):
        def fit(self, *args, **kwargs):
            alive.add(self)
            at_fit.append(len(alive))
            return super().fit(*args, **kwargs)

    monkeypatch.setattr(trainer, "KronLaplace", Counted)
    small_run(n_epochs=3, n_epochs_burnin=0, marglik_frequency=1)
    assert at_fit == [1, 1, 1, 1]  # the first before training


def test_the_evidence_returned_is_that_of_an_independent_fit():
    """-log q summed over the data, at the new precisions; the last one is at the weights and precisions that are returned."""
    seen = []
    la, model, margliks, _ = small_run(fisher="exact", on_evaluation=seen.append)
    fresh = KronLaplace(model, prior_precision=torch.tensor(seen[-1].prior_precision, dtype=torch.float64))
    fresh.fit([images()])
    assert margliks[-1] == pytest.approx(-float(fresh.log_marginal_likelihood()), rel=1e-5)
    assert seen[-1].neg_log_marginal_likelihood == pytest.approx(margliks[-1] / 24)
    gamma = fresh.effective_parameters()
    assert seen[-1].effective_parameters == pytest.approx(gamma, rel=1e-4, abs=1e-6)
    assert la.n_data == 24


def test_weights_see_the_training_loader_and_the_evidence_its_own():
    passes = {"train": 0, "evidence": 0}

    class Counted(TensorLoader):
        name = ""

        def __iter__(self):
            passes[self.name] += 1
            return super().__iter__()

    train, evidence = Counted(*images(24), 8), Counted(*images(16), 8)
    train.name, evidence.name = "train", "evidence"
    la, *_ = marglik_training(
        Network(), train, n_epochs=4, marglik_frequency=2, marglik_loader=evidence, n_data=24, progress_bar=False
    )
    assert passes == {
        "train": 4,
        "evidence": 4,
    }  # one for its first batch, one to calibrate; what is returned is the last one
    assert la.n_data == 16


def test_column_tolerance_reaches_the_curvature_and_the_checkpoint(tmp_path):
    options = {"fisher": "exact", "n_epochs": 2}
    exact = small_run(**options)[0]
    rough = small_run(tmp_path / "c.pt", column_tolerance=0.5, **options)[0]
    traces = [
        sum(float(f.outputs.diagonal(dim1=1, dim2=2).sum()) for f in la.factors.values()) for la in (rough, exact)
    ]
    assert 0.3 < traces[0] / traces[1] < 0.95
    with pytest.raises(ValueError, match="column_tolerance"):
        small_run(tmp_path / "c.pt", **options)


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path):
    """The loss is finite, its gradient is not: the square root's derivative at 0 times 0."""

    def forward(m, x):
        h = m.first(x)
        return m.last(torch.where(h > 0, torch.sqrt(h), torch.zeros_like(h)))

    torch.manual_seed(0)
    rooted = Function(forward, first=nn.Linear(5, 8), last=nn.Linear(8, 3))
    loader = TensorLoader(torch.randn(40, 5), torch.randint(3, (40,)), 40)
    with pytest.raises(FloatingPointError, match=r"first\.weight is not finite after epoch 1"):
        marglik_training(rooted, loader, n_epochs=1, objective="map", checkpoint=tmp_path / "c.pt", progress_bar=False)
    assert not (tmp_path / "c.pt").exists()


def test_one_step_minimises_the_stated_objective():
    """Plain gradient descent against the gradient of mean cross-entropy + (1/2N) sum delta |theta|^2 by autograd."""
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    model, reference = nn.Linear(5, 3), nn.Linear(5, 3)
    reference.load_state_dict(model.state_dict())
    loader = TensorLoader(x, y, 8)
    _, _, _, losses = marglik_training(
        model, loader, n_epochs=1, objective="map", prior_prec_init=2.5, progress_bar=False,
        optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.1},
    )  # fmt: skip
    squares = sum(p.square().sum() for p in reference.parameters())
    loss = nn.functional.cross_entropy(reference(x), y) + 2.5 / 16 * squares
    loss.backward()
    assert abs(losses[0] - loss.item()) < 1e-6
    for p, r in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same(p.detach(), (r - 0.1 * r.grad).detach())


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_what_is_recorded_of_an_epoch(likelihood):
    """With the weights held fixed: the objective at the precisions and the noise that the evidence step before it left, and the
    accuracy of the model as it is."""
    torch.manual_seed(2)
    x, model, seen = torch.randn(30, 5), nn.Linear(5, 3), []
    y = torch.randint(3, (30,)) if likelihood == "classification" else torch.randn(30, 3)
    *_, losses = marglik_training(
        model, TensorLoader(x, y, 6), likelihood, n_epochs=3, n_hypersteps=4, on_evaluation=seen.append, progress_bar=False,
        optimizer_kwargs={"lr": 0.0}, prior_prec_init=3.0, sigma_noise_init=0.7 if likelihood == "regression" else 1.0,
    )  # fmt: skip
    before = [([3.0, 3.0], 0.7), *((e.prior_precision, e.sigma_noise) for e in seen[:-1])]
    with torch.no_grad():
        outputs = model(x).double()
        norms = [float(p.double().square().sum()) for p in model.parameters()]
        for loss, evaluation, (precision, sigma) in zip(losses, seen, before, strict=True):
            if likelihood == "classification":
                data = float(-outputs.log_softmax(1)[range(30), y].mean())
                assert evaluation.accuracy == float((outputs.argmax(1) == y).double().mean())
            else:
                data = float((outputs - y).square().sum()) / (2 * sigma**2 * 30)
                assert evaluation.accuracy is None
            prior = sum(d * n for d, n in zip(precision, norms, strict=True)) / (2 * 30)
            assert loss == pytest.approx(data + prior, rel=1e-5)
    assert losses[0] != losses[1] != losses[2]


def test_regression_finds_the_noise():
    """Bayesian linear regression with known noise: the learned sigma is the true one within its standard error."""
    n, sigma = 400, 0.3
    x = torch.randn(n, 3, dtype=torch.float64)
    y = x @ torch.randn(3, 2, dtype=torch.float64) + sigma * torch.randn(n, 2, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    la, *_ = marglik_training(
        model, TensorLoader(x, y, n), "regression", n_epochs=150, lr_hyp=0.05, n_hypersteps=5, marglik_frequency=5,
        optimizer_kwargs={"lr": 0.05}, progress_bar=False,
    )  # fmt: skip
    assert abs(float(la.sigma_noise) / sigma - 1) < 4 / (2 * 2 * n) ** 0.5


@pytest.mark.parametrize("structure", ["scalar", "module"])
def test_tied_precisions(structure):
    la, *_ = small_run(prior_structure=structure, n_epochs=4)
    groups = {}
    for name, value in zip(la.parameter_names, la.prior_precision.tolist(), strict=True):
        groups.setdefault(name.rpartition(".")[0] if structure == "module" else "", set()).add(value)
    assert all(len(values) == 1 for values in groups.values())
    assert len(set.union(*groups.values())) == len(groups)


def test_evidence_of_augmented_images_is_refused():
    x, y = images()
    augmenting = TensorLoader(x, y, 10, augment=FlipsShifts(torch.zeros(x.shape[1]), 1))
    with pytest.raises(ValueError, match="marglik_loader must be given"):
        marglik_training(Network(), augmenting, n_epochs=2, progress_bar=False)
    marglik_training(Network(), augmenting, n_epochs=1, objective="map", progress_bar=False)
    marglik_training(Network(), augmenting, n_epochs=1, marglik_loader=TensorLoader(x, y, 10), progress_bar=False)


def test_killed_process_resumes(tmp_path, beside_the_tests):
    """SIGKILL in the middle of a run, whenever: the next call finishes it with the same numbers."""
    script = beside_the_tests / "run.py"
    script.write_text(
        "import sys, torch\n"
        "from python_tests.training.test_trainer import small_run\n"
        "torch.set_num_threads(1)\n"
        "def tell(evaluation): print(evaluation.epoch, flush=True)\n"
        "small_run(sys.argv[1], n_epochs=12, on_evaluation=tell)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run.pt")], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.strip() == "6":
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    assert read_checkpoint(tmp_path / "run.pt")["epoch"] in (4, 6)
    with threads(1):
        same_results(small_run(tmp_path / "run.pt", n_epochs=12), small_run(n_epochs=12))


@pytest.mark.parametrize("where", ["images", "targets"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_data_that_are_not_finite_are_named(where, value):
    """Not a layer, nor the learning rate."""
    x, y = torch.randn(20, 5), torch.randn(20, 3)
    (x if where == "images" else y)[13, 1] = float(value)
    what = "the batch itself is" if where == "images" else "the batch's targets are"
    with pytest.raises(FloatingPointError, match=f"epoch 1, step 2; {what} not finite: check the data set") as raised:
        marglik_training(
            nn.Linear(5, 3), TensorLoader(x, y, 10), "regression", n_epochs=1, objective="map", progress_bar=False
        )
    assert "learning rate" not in str(raised.value)


def test_a_batch_before_may_have_made_a_parameter_not_finite():
    """Where a function levels off, the loss of an infinite image is finite, and its gradient is not."""
    x, y = torch.randn(30, 5), torch.randint(3, (30,))
    x[13, 1] = torch.inf
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(FloatingPointError, match=r"step 3; .*'0' \(its parameter weight\) .*because a batch before"):
        marglik_training(model, TensorLoader(x, y, 10), n_epochs=1, objective="map", progress_bar=False)


class Choice(str, enum.Enum):
    """As laplace-torch has them."""

    CLASSIFICATION = "classification"
    EVIDENCE = "evidence"
    MODULE = "module"
    MC = "mc"
    SHARED = "shared"


def test_members_of_string_enums_are_their_strings_to_a_checkpoint(tmp_path):
    names = {"objective": "evidence", "prior_structure": "module", "fisher": "mc", "resolution": "shared"}
    names |= {"likelihood": "classification", "n_epochs": 2}
    members = {key: Choice(value) if isinstance(value, str) else value for key, value in names.items()}
    same_results(small_run(tmp_path / "c.pt", **members), small_run(tmp_path / "c.pt", **names))
    settings = torch.load(tmp_path / "c.pt", weights_only=True)["settings"]
    assert {key: settings[key] for key in names} == names
    assert {type(settings[key]) for key in names} == {str, int}


@pytest.mark.parametrize(
    ("error", "name", "value", "words"),
    [
        (ValueError, "n_epochs", 0, "n_epochs"),
        (ValueError, "marglik_frequency", 0, "marglik_frequency"),
        (ValueError, "lr_hyp", -1.0, "lr_hyp"),
        (ValueError, "prior_prec_init", float("nan"), "prior_prec_init"),
        (ValueError, "objective", "mle", "objective"),
        (ValueError, "prior_structure", "diagonal", "prior_structure"),
        (TypeError, "n_epochs", True, "n_epochs must be an integer, got True"),
        (TypeError, "marglik_frequency", 2.0, r"marglik_frequency must be an integer, got 2\.0"),
        (TypeError, "prior_prec_init", torch.ones(3), "prior_prec_init must be one number, got Tensor"),
        (TypeError, "lr_hyp", "0.1", "lr_hyp must be one number, got str"),
        (TypeError, "sigma_noise_init", None, "sigma_noise_init must be one number, got NoneType"),
    ],
)
def test_bad_arguments(error, name, value, words):
    with pytest.raises(error, match=words):
        small_run(**{name: value})


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    """Also to the checkpoint, which loads nothing but plain numbers and tensors, and to the comparison with its settings."""
    others = {"n_epochs": np.int64(2), "prior_prec_init": np.array(0.5), "lr_hyp": torch.tensor(0.25)}
    others |= {"lr_anchors": np.array(0.5), "column_tolerance": np.float64(0.125)}
    others |= {"scheduler_kwargs": {"T_max": np.int64(6)}}
    others |= {"optimizer_kwargs": {"lr": np.float64(0.5**10), "betas": (np.float64(0.5), 0.75)}}
    plain = {"n_epochs": 2, "prior_prec_init": 0.5, "lr_hyp": 0.25, "lr_anchors": 0.5, "column_tolerance": 0.125}
    plain |= {"scheduler_kwargs": {"T_max": 6}, "optimizer_kwargs": {"lr": 0.5**10, "betas": (0.5, 0.75)}}
    *_, losses = small_run(tmp_path / "c.pt", **others)
    assert losses == small_run(**plain)[-1] != small_run(**plain | {"prior_prec_init": 0.25})[-1]
    for again in (others, plain):
        assert small_run(tmp_path / "c.pt", **again)[-1] == losses
    with pytest.raises(ValueError, match=r"optimizer_kwargs\['lr'\]='0\.0009765625', this run has '0\.5'"):
        small_run(tmp_path / "c.pt", **others | {"optimizer_kwargs": {"lr": torch.tensor(0.5), "betas": (0.5, 0.75)}})


def small_trainer(**options) -> MarglikTrainer:
    """Of :func:`small_run`, with an evidence step after every epoch."""
    torch.manual_seed(3)
    loader = TensorLoader(*images(), 10, shuffle=True)
    arguments = {"n_epochs": 4, "n_hypersteps": 3, "progress_bar": False, "fisher": "mc"}
    return MarglikTrainer(Network(), loader, **arguments | options)


def results(of: MarglikTrainer) -> tuple:
    return of.la, of.model, of.margliks, of.losses


def test_a_loop_by_hand_is_the_run():
    whole, seen = small_trainer(), []
    assert whole.run() is whole.la
    by_hand = small_trainer(on_evaluation=seen.append)
    for epoch in range(1, 5):
        assert by_hand.epoch()[0] == by_hand.losses[-1] == whole.losses[epoch - 1]
        evaluation = by_hand.evidence_step()
        assert evaluation is seen[-1] and evaluation.epoch == epoch == by_hand.epochs
        assert 24 * evaluation.neg_log_marginal_likelihood == by_hand.margliks[-1]
    same_results(results(whole), results(by_hand))
    assert by_hand.history == whole.history
    assert by_hand.run() is by_hand.la and len(by_hand.losses) == 4  # nothing is left to do


@pytest.mark.parametrize("done", [0, 2, 4])
def test_a_state_is_gone_on_from(done):
    """By another trainer, whose own weights and random state are others; through a file that loads without code."""
    options = {"optimizer_kwargs": {"lr": np.float64(1e-3)}, "scheduler_cls": torch.optim.lr_scheduler.StepLR}
    options |= {"scheduler_kwargs": {"step_size": 2}}
    whole, begun, other = (small_trainer(**options) for _ in range(3))
    torch.manual_seed(8)
    for _ in range(done):
        begun.epoch()
        begun.evidence_step()
    torch.save(begun.state_dict(), file := io.BytesIO())
    torch.rand(5)
    other.epoch()
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.epochs == done and other.la is None
    other.run()
    torch.manual_seed(8)
    whole.run()
    same_results(results(whole), results(other))
    assert other.history == whole.history


def test_a_state_that_does_not_fit_changes_nothing():
    other = small_trainer(n_hypersteps=4)
    state, before = other.state_dict(), {n: t.clone() for n, t in other.model.state_dict().items()}
    begun = small_trainer()
    begun.epoch()
    with pytest.raises(ValueError, match="the state was written with n_hypersteps=3, this run has 4"):
        other.load_state_dict(begun.state_dict())
    del state["losses"]
    with pytest.raises(ValueError, match="the state cannot be gone on with: has no losses"):
        other.load_state_dict(state)
    assert other.epochs == 0 and all(torch.equal(t, before[n]) for n, t in other.model.state_dict().items())


def test_weights_that_were_trained_elsewhere():
    """Evidence steps alone."""
    alone = small_trainer(fisher="exact")
    first, second = alone.evidence_step(), alone.evidence_step()
    assert first.loss is None and alone.losses == [] and first.epoch == 0
    assert second.neg_log_marginal_likelihood < first.neg_log_marginal_likelihood
    fresh = KronLaplace(alone.model, prior_precision=torch.tensor(second.prior_precision, dtype=torch.float64))
    assert alone.margliks[1] == pytest.approx(-float(fresh.fit([images()]).log_marginal_likelihood()), rel=1e-6)


def test_the_evidence_is_tried_before_the_first_step_of_a_loop_by_hand():
    x, y = images()
    by_hand = MarglikTrainer(Network(), TensorLoader(x, y.float(), 10), n_epochs=2, progress_bar=False)
    before = [p.clone() for p in by_hand.model.parameters()]
    with pytest.raises(TypeError, match="on 3 images of train_loader"):
        by_hand.epoch()
    assert all(map(torch.equal, before, by_hand.model.parameters()))


def test_the_function_has_the_trainer_s_arguments_and_explains_each():
    of_function, of_class = inspect.signature(marglik_training), inspect.signature(MarglikTrainer)
    assert list(of_function.parameters.values()) == list(of_class.parameters.values())
    named = {"n_epochs": 300, "lr_hyp": 0.1, "prior_prec_init": 1.0, "n_epochs_burnin": 0, "n_hypersteps": 10}
    named |= {"likelihood": "classification", "marglik_frequency": 1, "lr_anchors": 0.003, "lr_aug": 0.05}
    named |= {"checkpoint": None, "progress_bar": True}
    assert named.items() <= {name: p.default for name, p in of_class.parameters.items()}.items()
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        small_trainer(epochs=3)
    explained = marglik_training.__doc__.split("Args:")[1].split("Returns:")[0]
    assert [name for name in of_function.parameters if not re.search(rf"^ +(.*\. )?{name}: ", explained, re.M)] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hessian_structure": "full"}, "marglik_training: hessian_structure must be one of 'kron', 'ella_kron', got 'full'"),
        ({"temperature": 0.5}, r"marglik_training: temperature must be 1, got 0\.5.*la\.temperature"),
        ({"backend": KronLaplace}, r"marglik_training: backend must be None, got .*KronLaplace.*fisher='mc'"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_laplace_torch_change_nothing_or_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        small_trainer(**given)
    small_trainer(hessian_structure="kron", temperature=1.0, backend=None)

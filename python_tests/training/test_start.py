"""What is wrong from the start is refused before a weight has moved, in words that say what to do; and what looks leaves no trace."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader

X, Y = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


class Watched(nn.Sequential):
    """Counts how often it runs in training mode."""

    steps = 0

    def forward(self, x):
        self.steps += self.training
        return super().forward(x)


class Mystery(nn.Module):
    """A layer that no rule will ever know."""

    def __init__(self) -> None:
        super().__init__()
        self.secret, self.calls = nn.Parameter(torch.ones(20, 20)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.secret.sin()


def network(*more: nn.Module) -> Watched:
    torch.manual_seed(0)
    return Watched(nn.Linear(5, 4), nn.Tanh(), *more, nn.Linear(4, 3))


def refused(error, message: str, *, model=None, loader=None, likelihood="classification", passes=0, **options):
    """Training with a long burn-in is refused after at most so many forward passes, and the weights are what they were."""
    model = network() if model is None else model
    before = [p.clone() for p in model.parameters()]
    loader = DataLoader(TensorDataset(X, Y), 10) if loader is None else loader
    arguments = {"n_epochs": 30, "n_epochs_burnin": 20, "progress_bar": False} | options
    with pytest.raises(error, match=message):
        marglik_training(model, loader, likelihood, **arguments)
    assert model.steps <= passes
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("objective", ["evidence", "map"])
def test_layers_without_a_rule(objective):
    model = network(Mystery(), Mystery())
    words = r"2 layers .*\n- layer '2' \(\S+Mystery\) and 1 more \('3'\) has"
    refused(TypeError, words, model=model, objective=objective)
    assert model[2].calls == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fisher": "empirical"}, ValueError, "fisher must be one of"),
        ({"resolution": "fine"}, ValueError, "resolution must be one of"),
        ({"column_tolerance": 1.5}, ValueError, "column_tolerance must be in"),
        ({"sigma_noise_init": 2.0}, ValueError, "sigma_noise .* must be 1 for classification"),
        ({"on_evaluation": 3}, TypeError, "on_evaluation must be None or a function of an Evaluation, got 3"),
        ({"checkpoint": 3}, TypeError, "checkpoint must be a path or None, got int"),
        ({"marglik_loader": iter([(X, Y)])}, TypeError, "marglik_loader .*got an iterator"),
        ({"marglik_loader": TensorDataset(X, Y)}, TypeError, "marglik_loader .*a data set yields single examples"),
    ],
)
@pytest.mark.parametrize("objective", ["evidence", "map"])
def test_arguments(options, error, message, objective):
    refused(error, message, objective=objective, **options)


@pytest.mark.parametrize("kind", [iter, lambda batches: (b for b in batches), lambda batches: map(tuple, batches)])
def test_loaders_of_one_pass(kind):
    refused(TypeError, "train_loader must be a loader that is iterated anew .*got an iterator", loader=kind([(X, Y)]))


@pytest.mark.parametrize(
    ("y", "likelihood", "error", "message"),
    [
        (Y[:, None], "regression", TypeError, "real numbers for likelihood='regression', got dtype torch.int64"),
        (Y.float(), "regression", ValueError, r"expected the outputs' shape \((3|10), 3\), got \((3|10),\)"),
        (Y.float(), "classification", TypeError, "expected integer class indices, got dtype torch.float32"),
        (Y + 1, "classification", ValueError, r"labels must lie in 0\.\.2 .*got 1\.\.3"),
    ],
)
@pytest.mark.parametrize("objective", ["evidence", "map"])
def test_labels_that_do_not_fit(y, likelihood, error, message, objective):
    """With evidence three images are tried, without it the first batch is the first to be seen."""
    model = network()
    if y.dtype == torch.int64 and likelihood == "regression":
        model = Watched(nn.Linear(5, 1))
    loader = DataLoader(TensorDataset(X, y), 10)
    refused(error, message, model=model, loader=loader, likelihood=likelihood, objective=objective, passes=1)


def test_outputs_that_are_no_matrix():
    class Wrapped(Watched):
        def forward(self, x):
            return super().forward(x), None

    words = r"the model must return a tensor \(N, K\), got tuple"
    refused(TypeError, words, model=Wrapped(nn.Linear(5, 3)), passes=1, objective="map")


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"x": X, "y": Y}, KeyError, r"marglik_training \(marglik_loader\): .*pairs of tensors \(x, y\), got dict"),
        ((X, Y.float()), TypeError, "expected integer class indices"),
        ((X, Y + 1), ValueError, r"labels must lie in 0\.\.2"),
        ((X[:0], Y[:0]), ValueError, "marglik_loader yielded no data"),
    ],
)
def test_the_evidence_s_data_are_looked_at_first(batch, error, message):
    refused(error, message, marglik_loader=[batch], n_data=20)


def test_networks_that_the_evidence_cannot_serve():
    class Unused(Watched):
        def forward(self, x):
            self.steps += self.training
            return self[0](x)

    refused(ValueError, "layer '1' .*was never called", model=Unused(nn.Linear(5, 3), nn.Linear(5, 3)))


def test_looking_leaves_no_trace():
    """Neither in the random state, which the sampled curvature draws from, nor in layers that keep statistics, nor in a mode."""
    norm, seen = nn.BatchNorm1d(4, affine=False), []
    torch.manual_seed(1)

    def note(evaluation) -> None:
        seen.append([p.clone() for p in model.state_dict().values()])

    for objective in ("evidence", "map"):
        torch.manual_seed(1)
        model = network(norm.train())
        norm.reset_running_stats()
        marglik_training(
            model, DataLoader(TensorDataset(X, Y), 6, shuffle=True), n_epochs=3, n_epochs_burnin=2, fisher="mc", on_evaluation=note,
            objective=objective, progress_bar=False,
        )  # fmt: skip
        assert norm.num_batches_tracked == 12
    for evidence, plain in zip(seen[:3], seen[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(evidence, plain, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"optimizer_kwargs": {"rate": 0.1}},
            TypeError,
            r"optimizer_cls = Adam .*optimizer_kwargs = \{'rate': '0.1'\}: .*'rate'",
        ),
        ({"optimizer_kwargs": {"lr": -1.0}}, ValueError, "optimizer_kwargs = .*Invalid learning rate: -1.0"),
        (
            {"scheduler_cls": lr_scheduler.StepLR},
            TypeError,
            "scheduler_cls = StepLR .*scheduler_kwargs = .*'step_size'",
        ),
        (
            {"scheduler_cls": lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 2, "epochs": 3}},
            TypeError,
            "scheduler_cls = StepLR cannot be made .*'epochs'",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_optimizers_and_schedules(options, error, message):
    refused(error, message, **options)


def test_optimizers_that_ask_for_a_closure_in_their_step():
    class Asserting(torch.optim.SGD):
        def step(self, closure=None):
            assert closure is not None

    class Calling(torch.optim.SGD):
        def step(self, closure=None):
            return closure()

    for kind in (Asserting, Calling, torch.optim.LBFGS):
        message = f"the step of optimizer_cls, a {kind.__name__}, raised .*; it is called without a closure"
        refused(RuntimeError, message, optimizer_cls=kind, passes=1)


def trained_with(optimizer_cls, **kwargs) -> None:
    options = {"optimizer_cls": optimizer_cls, "optimizer_kwargs": kwargs, "progress_bar": False}
    marglik_training(network(), [(X, Y)], n_epochs=1, **options)


def test_a_weight_decay_beside_the_prior_is_warned_of():
    def grouped(parameters):
        return torch.optim.SGD([{"params": parameters[:2], "weight_decay": 0.25}, {"params": parameters[2:]}], lr=0.1)

    for optimizer_cls, kwargs, words in (
        (torch.optim.Adam, {"weight_decay": 0.5}, "Adam has weight_decay = 0.5, which"),
        (torch.optim.AdamW, {}, "AdamW has weight_decay = 0.01, which"),
        (grouped, {}, "SGD has weight_decay = 0.25 in group 0, which"),
    ):
        with pytest.warns(UserWarning, match=f"{words} .*Pass weight_decay=0 .*prior_prec_init = N") as caught:
            trained_with(optimizer_cls, **kwargs)
        assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained_with(torch.optim.AdamW, weight_decay=0)
        trained_with(torch.optim.Adam)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_cls": functools.partial(torch.optim.SGD, lr=0.1)},
        {"scheduler_cls": lr_scheduler.OneCycleLR, "scheduler_kwargs": {"max_lr": 0.1, "total_steps": 4}},
        {"scheduler_cls": lr_scheduler.LinearLR},
        {"scheduler_cls": lr_scheduler.ConstantLR, "scheduler_kwargs": {}},
        {"scheduler_kwargs": {}},
    ],
)
def test_optimizers_and_schedules_that_fit(options):
    *_, losses = marglik_training(network(), TensorLoader(X, Y, 10), n_epochs=2, progress_bar=False, **options)
    assert len(losses) == 2


def test_a_place_that_takes_no_checkpoint(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    (tmp_path / "folder").mkdir()
    for place, message in (
        (file / "c.pt", "cannot be written: .*file takes no file"),
        (file / "deep" / "c.pt", "cannot be written: .*file takes no file"),
        (tmp_path / "folder", "checkpoint must be a file, but .* is a folder"),
        (Path("/proc/none/c.pt"), "/proc takes no file"),
    ):
        refused(OSError, message, checkpoint=place)
    refused(ValueError, "labels must lie", loader=[(X, Y + 1)], passes=1, checkpoint=tmp_path / "new" / "c.pt")
    assert file.read_text() == "kept" and {p.name for p in tmp_path.rglob("*")} == {"file", "folder"}

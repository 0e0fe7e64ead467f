"""Learners of a user's own: in the network, outside of it, and what is wrong with one is said before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.nn import SparseConv2d
from ella_cuda.training import BufferLearner, Learner, MarglikTrainer
from ella_cuda.training.checkpoint import read_checkpoint


class Scaled(nn.Module):
    """A linear layer on inputs times a scale, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.scale * x))


class ScaleLearner(Learner):
    name = "scale"

    def __init__(self, model: Scaled, rate: float = 0.1) -> None:
        self.model, self.rate = model, rate

    def tensors(self):
        return {"scale": self.model.scale}

    def step(self, la, gradients):
        self.model.scale += self.rate * gradients["scale"]


def network() -> Scaled:
    torch.manual_seed(2)
    return Scaled().double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def train(model: nn.Module, *learners: Learner | str, kind: Callable = marglik_training, **options):
    torch.manual_seed(9)
    loader = TensorLoader(*data(), 10, shuffle=True)
    arguments = {"n_epochs": 6, "marglik_frequency": 2, "n_hypersteps": 3, "progress_bar": False} | options
    return kind(model, loader, learn=learners, **arguments)


def test_the_gradient_is_the_evidence_s_with_the_factors_held():
    """Finite differences of the log likelihood, which alone depends on the scale where the factors are held."""
    found, model = [], network()

    class Kept(ScaleLearner):
        def step(self, la, gradients):
            found.append((gradients["scale"], model.scale.clone(), model.linear.weight.clone(), la.n_data))
            super().step(la, gradients)

    train(model, Kept(model), optimizer_kwargs={"lr": 0.0})
    x, y = data()

    def log_likelihood(scale: torch.Tensor) -> float:
        outputs = model.linear(torch.tanh(scale * x)).detach()
        return float(-nn.functional.cross_entropy(outputs, y, reduction="sum"))

    assert len(found) == 2  # not after the last epoch
    for gradient, scale, weight, n_data in found:
        assert torch.equal(weight, model.linear.weight) and n_data == 30
        steps = 1e-5 * torch.eye(4, dtype=torch.float64)
        slopes = [(log_likelihood(scale + h) - log_likelihood(scale - h)) / 2e-5 / 30 for h in steps]
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9) and gradient.abs().max() > 1e-3
    assert torch.equal(found[1][1], found[0][1] + 0.1 * found[0][0])
    assert torch.equal(model.scale, found[1][1] + 0.1 * found[1][0])
    assert not model.scale.requires_grad


def adam_learner(model: Scaled) -> Learner:
    return BufferLearner("scale", model, ["scale"], lr=0.05)


class Counting(ScaleLearner):
    """Its rate falls from step to step: it has a state."""

    steps = 0

    def step(self, la, gradients):
        self.steps += 1
        self.model.scale += self.rate / self.steps * gradients["scale"]

    def record(self):
        return {"steps": self.steps, "mean": float(self.model.scale.mean())}

    def settings(self):
        return {"scale_rate": self.rate}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_records_are_of_the_values_that_the_evidence_is_of(tmp_path):
    model, seen = network(), []
    start = float(model.scale.mean())
    train(model, Counting(model), n_epochs_burnin=2, on_evaluation=seen.append, checkpoint=tmp_path / "c.pt")
    records = [e.learned["scale"] for e in seen]
    assert [record["steps"] for record in records] == [0, 0, 1]
    assert records[0]["mean"] == records[1]["mean"] == start != records[2]["mean"] == float(model.scale.mean())
    assert read_checkpoint(tmp_path / "c.pt")["history"][2]["learned"] == {"scale": records[2]}


def test_a_learner_outside_the_network_steps_before_the_evidence_is_taken():
    """Also after the last epoch; here it doubles one precision, which the evidence is then at."""

    class Doubling(Learner):
        name = "doubling"

        def step(self, la, gradients):
            assert gradients == {}
            la.prior_precision = la.prior_precision * torch.tensor([2.0, 1.0])
            self.precision = la.prior_precision.clone()

    model, learner, seen = network(), Doubling(), []
    la, _, margliks, _ = train(model, learner, on_evaluation=seen.append)
    assert torch.equal(la.prior_precision, learner.precision)
    assert learner.precision.tolist() == [2 * seen[-1].prior_precision[0], seen[-1].prior_precision[1]]
    assert margliks[-1] == pytest.approx(-float(la.log_marginal_likelihood()), rel=1e-12)


def sparse() -> nn.Module:
    torch.manual_seed(4)
    layer = SparseConv2d(1, 2, 3)
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), layer, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    model.register_buffer("unused", torch.ones(2))
    return model


def test_all_learners_in_the_network_step_along_one_gradient():
    """In either order: at values that another has changed the fit would not hold."""
    found = []
    for order in (1, -1):
        model = sparse()
        name = next(n for n, _ in model.named_buffers() if n.endswith("anchors"))
        learners = [
            BufferLearner("all anchors", model, [name], lr=0.01),
            BufferLearner("scale", model, [name.replace("anchors", "inverse_lengthscale")], lr=0.02, logarithmic=True),
            BufferLearner("nothing", model, ["unused"], lr=0.5),
        ]
        start = dict(model.named_buffers())[name].clone()
        train(model, *learners[::order])
        found.append(model.state_dict())
        assert not torch.equal(found[-1][name], start) and torch.equal(model.unused, torch.ones(2).double())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_words_are_learners_of_buffers():
    """The same numbers as from objects that do what the words say."""
    words, objects = sparse(), sparse()
    names = [n for n, _ in objects.named_buffers()]
    anchors, scales = ([n for n in names if n.endswith(end)] for end in ("anchors", "inverse_lengthscale"))
    by_words = train(words, "lengthscales", "anchors", lr_anchors=0.02, lr_lengthscales=0.04)
    own = [BufferLearner("a", objects, anchors, 0.02), BufferLearner("l", objects, scales, 0.04, logarithmic=True)]
    assert by_words[2:] == train(objects, own[0], learners=own[1:])[2:]
    assert all(map(torch.equal, words.buffers(), objects.buffers()))


def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path):
    class Rooted(Scaled):
        def forward(self, x):
            return self.linear(torch.tanh(x + self.scale.sqrt()))

    torch.manual_seed(0)
    model = Rooted().double()
    model.scale.zero_()
    learners = [BufferLearner("first", model, ["scale"], 0.1), ScaleLearner(model)]
    with pytest.raises(FloatingPointError, match=r"after epoch 2 the evidence's gradient in 'scale' of .* 'first'"):
        train(model, *learners, checkpoint=tmp_path / "c.pt")
    assert not model.scale.any() and not (tmp_path / "c.pt").exists()


def named(name: str) -> Learner:
    learner = Learner()
    learner.name = name
    return learner


class Of(ScaleLearner):
    """Learns a tensor of the test's choice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def tensors(self):
        return {"mine": self.tensor}


class Clashing(Counting):
    def settings(self):
        return {"n_epochs": 3}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: [3], TypeError, "learn must list names and objects .* got int"),
        (lambda m: [Learner()], TypeError, "that has a name, got Learner"),
        (lambda m: [named("a"), named("a")], ValueError, "several named 'a'"),
        (lambda m: [named("prior")], ValueError, "several named 'prior'"),
        (lambda m: [Of(torch.zeros(3))], ValueError, "'scale' calls 'mine' must be a persistent buffer of the model"),
        (lambda m: [Of(m.linear.weight)], ValueError, "'scale' calls 'mine' must be a persistent buffer"),
        (lambda m: [Of(m.lost)], ValueError, "'scale' calls 'mine' must be a persistent buffer"),
        (lambda m: [Of(m.whole)], ValueError, "of floating point numbers"),
        (lambda m: [Clashing(m)], ValueError, "the setting 'n_epochs' of the learner 'scale' is another's"),
        (lambda m: [BufferLearner("b", m, ["scale"], -1.0)], ValueError, "learner 'b': lr must be positive"),
        (lambda m: [BufferLearner("b", m, ["scale"], 1.0, True)], ValueError, "buffer 'scale' must be positive"),
    ],
)
def test_learners_that_do_not_fit(make, error, message):
    model = network()
    model.register_buffer("lost", torch.zeros(3), persistent=False)
    model.register_buffer("whole", torch.zeros(3, dtype=torch.int64))
    model.scale[0] = -1.0
    with pytest.raises(error, match=message):
        train(model, *make(model), kind=MarglikTrainer)


@pytest.mark.parametrize("method", ["state_dict", "record"])
def test_what_no_checkpoint_gives_back_is_refused_before_the_first_step(tmp_path: Path, method):
    model = network()
    learner, before = Counting(model), model.linear.weight.clone()
    setattr(learner, method, lambda: {"steps": object()})
    with pytest.raises(TypeError, match="state_dict and record of the learner 'scale' must hold tensors and plain"):
        train(model, learner, checkpoint=tmp_path / "c.pt")
    assert torch.equal(model.linear.weight, before)
    train(model, learner, n_epochs=3)


def test_a_checkpoint_of_other_learners_is_refused(tmp_path):
    def run(*make) -> None:
        model = network()
        train(model, *(learner(model) for learner in make), checkpoint=tmp_path / "c.pt")

    run(Counting)
    run(Counting)
    for others, message in (
        ([], r"learn=\['scale'\], this run has \[\]"),
        ([lambda m: Counting(m, 0.2)], "scale_rate=0.1, this run has 0.2"),
        ([adam_learner], "does not say with which lr_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*others)


def test_the_step_is_the_subclass_s_to_write():
    with pytest.raises(NotImplementedError, match=r"Learner must implement step\(la, gradients\)"):
        train(network(), named("nothing"))

"""EvidenceCallback in plain loops; the oracles are marglik_training, closed forms of linear regression, and loops without the callback."""

from __future__ import annotations

import copy
import io
import types

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.laplace import evidence_bound
from ella_cuda.training import EvidenceCallback
from python_tests.laplace.checks import drawn
from python_tests.training.test_unknown import Tagged

OPTIONS = {"n_hypersteps": 4, "prior_structure": "module"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def points(shuffle: bool = False) -> DataLoader:
    x, y = drawn(40, 4), torch.arange(40) % 3
    return DataLoader(TensorDataset(x, y), batch_size=10, shuffle=shuffle)


def train(model, loader, optimizer, evidence, epochs, scheduler=None) -> None:
    for epoch in epochs:
        model.train()
        for x, y in loader:
            loss = evidence.penalised(nn.functional.cross_entropy(model(x), y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        evidence.step(epoch)


def assert_near(first: nn.Module, second: nn.Module, **tolerance: float) -> None:
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance or {"rtol": 1e-12, "atol": 1e-12})


@pytest.mark.parametrize("weight_decay", [True, False, None])
@pytest.mark.parametrize("hyper_optimizer", ["adam", "mackay"])
@pytest.mark.parametrize(("kind", "how"), [(torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})])  # fmt: skip
def test_a_loop_is_marglik_training_step_for_step(kind, how, hyper_optimizer, weight_decay):
    options = OPTIONS | {"hyper_optimizer": hyper_optimizer, "fisher": "mc"}
    torch.manual_seed(5)
    start = network()
    torch.manual_seed(7)
    la, expected, margliks, _ = marglik_training(
        copy.deepcopy(start),
        points(shuffle=True),
        optimizer_cls=kind,
        optimizer_kwargs=how,
        scheduler_cls=lr_scheduler.CosineAnnealingLR,
        scheduler_kwargs={"T_max": 24},
        n_epochs=6,
        n_epochs_burnin=2,
        marglik_frequency=2,
        calibrate=False,
        progress_bar=False,
        **options,
    )
    torch.manual_seed(7)
    evidence = EvidenceCallback(start, loader := points(shuffle=True), every=2, burn_in=2, **options)
    optimizer = kind(start.parameters(), **how)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    if weight_decay is not None:
        evidence.attach(optimizer, scheduler, weight_decay)
    train(start, loader, optimizer, evidence, range(6), scheduler)
    assert len(margliks) == 2 and evidence.margliks == pytest.approx(margliks, rel=1e-12)
    torch.testing.assert_close(evidence.prior_precision, la.prior_precision, rtol=1e-12, atol=0)
    assert_near(start, expected)
    assert len(optimizer.param_groups) == (2 if weight_decay else 1)


def regression() -> tuple[Tensor, Tensor]:
    x = drawn(30, 3) * torch.tensor([1.0, 2.0, 0.5])
    return x, x @ torch.tensor([[0.5], [-0.2], [0.0]]).double() + 0.5 * drawn(30, 1, seed=1)


def test_a_linear_regressions_precision_goes_to_the_best_of_its_closed_form():
    (x, y), sigma, n = regression(), 0.5, 30
    grid = torch.logspace(-3, 3, 200001, dtype=torch.float64)
    # log N(y; 0, sigma^2 I + X X^T / delta), by the eigenvalues of X X^T
    values, vectors = torch.linalg.eigh(x @ x.T)
    spectra = sigma**2 + values / grid[:, None]
    evidence_of = -0.5 * ((vectors.T @ y).T.square() / spectra + spectra.log() + torch.log(torch.tensor(2 * torch.pi))).sum(1)  # fmt: skip
    best = evidence_of.argmax()
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"hyper_optimizer": "mackay", "sigma_noise_init": sigma, "fix_sigma_noise": True}
    evidence = EvidenceCallback(model, [(x, y)], "regression", **options)
    evidence.attach(optimizer)
    for epoch in range(12):
        for _ in range(80):
            optimizer.zero_grad()
            evidence.penalised(evidence.loss(model(x), y)).backward()
            optimizer.step()
        found = evidence.step(epoch)
    assert float(evidence.prior_precision) == pytest.approx(float(grid[best]), rel=1e-4)
    assert -found * n == pytest.approx(float(evidence_of[best]), rel=1e-6)
    assert evidence.weight_decay == {"weight": pytest.approx(float(grid[best]) / n, rel=1e-4)}


def test_stationary_points_of_decay_by_the_gradient_and_beside_it():
    """SGD's is the MAP, in closed form; AdamW's has the precision delta (sqrt(v) + eps), and is another."""
    (x, y), delta, n = regression(), 20.0, 30
    closed_form = torch.linalg.solve(x.T @ x + delta * torch.eye(3), x.T @ y).T
    found = {}
    for kind, how in (
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.02, "eps": 0.1, "betas": (0.9, 0.9)}),
    ):
        for weight_decay in (True, False):
            model = nn.Linear(3, 1, bias=False).double()
            nn.init.zeros_(model.weight)  # where the norm has no derivative
            optimizer = kind(model.parameters(), **how)
            evidence = EvidenceCallback(model, [(x, y)], "regression", prior_prec_init=delta)
            evidence.attach(optimizer, weight_decay=weight_decay)
            for _ in range(800):
                optimizer.zero_grad()
                evidence.penalised(evidence.loss(model(x), y)).backward()
                optimizer.step()
            found[kind, weight_decay] = model.weight.detach()
    for which in ((torch.optim.SGD, True), (torch.optim.SGD, False), (torch.optim.AdamW, False)):
        torch.testing.assert_close(found[which], closed_form, rtol=1e-6, atol=1e-8)
    theta = found[torch.optim.AdamW, True]
    gradient = (theta @ x.T - y.T) @ x / n
    torch.testing.assert_close(gradient, -delta / n * theta * (gradient.abs() + 0.1), rtol=1e-5, atol=1e-8)
    assert (theta - closed_form).abs().max() > 0.05


def test_a_resumed_loop_is_equal_bit_for_bit():
    def parts():
        model, loader = network(), points(shuffle=True)
        evidence = EvidenceCallback(model, loader, fisher="mc", **OPTIONS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        evidence.attach(optimizer)
        scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
        return model, loader, optimizer, evidence, scheduler

    model, loader, optimizer, evidence, scheduler = parts()
    torch.manual_seed(2)
    train(model, loader, optimizer, evidence, range(2), scheduler)
    file = io.BytesIO()
    torch.save([torch.get_rng_state(), *(p.state_dict() for p in (model, optimizer, evidence, scheduler))], file)
    train(model, loader, optimizer, evidence, range(2, 4), scheduler)
    again, loader, optimizer_again, resumed, scheduler = parts()
    file.seek(0)
    random, *states = torch.load(file, weights_only=True)
    for part, state in zip((again, optimizer_again, resumed, scheduler), states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random)
    train(again, loader, optimizer_again, resumed, range(2, 4), scheduler)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(evidence.prior_precision, resumed.prior_precision) and evidence.margliks == resumed.margliks
    assert evidence.prior_precision.std() > 0.01
    other = EvidenceCallback(network(), loader, n_hypersteps=5)
    with pytest.raises(ValueError, match=r"load_state_dict: the state is of fisher = 'mc', here it is 'exact'"):
        other.load_state_dict(evidence.state_dict())


def test_groups_are_split_without_their_settings_or_state():
    """Of two groups with rates of their own, in the midst of training; the oracle keeps them whole, the prior in the loss."""
    runs = []
    for weight_decay in (False, True):
        model, loader = network(), points()
        groups = [{"params": [model[0].weight, model[2].bias], "lr": 0.2}, {"params": [model[0].bias, model[2].weight]}]
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [group | {"params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        evidence = EvidenceCallback(model, loader, n_hypersteps=4)
        for x, y in loader:  # momentum
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        evidence.attach(optimizer, weight_decay=weight_decay)
        train(model, loader, optimizer, evidence, range(4))
        runs.append((model, optimizer, evidence))
    (expected, whole, _), (model, split, evidence) = runs
    assert_near(model, expected)
    assert [len(g["params"]) for g in whole.param_groups] == [2, 2]
    assert [(g["lr"], g["nesterov"]) for g in split.param_groups] == [(0.2, True), (0.05, True), (0.2, True), (0.05, True)]  # fmt: skip
    named = {name: p for g in split.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)}
    assert named.keys() == evidence.weight_decay.keys() and all(model.get_parameter(n) is p for n, p in named.items())
    decays = {id(p): g["weight_decay"] for g in split.param_groups for p in g["params"]}
    assert evidence.weight_decay == {n: decays[id(p)] for n, p in model.named_parameters()}
    assert len(set(decays.values())) == 4


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda t: 0.9, lambda t: 0.8]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], step_size_up=2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.3], total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=[1e-3, 0.05]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)], [2, 5]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_without_the_callback(name):
    rates = []
    for attached in (False, True):
        model = network()
        layers = [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[2].parameters()), "lr": 0.2},
        ]
        optimizer = torch.optim.SGD(layers, momentum=0.9)
        scheduler = SCHEDULES[name](optimizer)
        if attached:
            evidence = EvidenceCallback(model, points())
            if name != "plateau":  # which leaves no trace in the optimizer
                with pytest.raises(ValueError, match=r"attach\(optimizer, scheduler\)"):
                    evidence.attach(optimizer)
            evidence.attach(optimizer, scheduler)
            assert len(optimizer.param_groups) == 4
        seen = []
        for _ in range(8):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            by_id = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
            seen.append([by_id[id(p)] for p in model.parameters()])
        rates.append(seen)
    assert rates[0] == rates[1] and rates[0][0] != rates[0][-1]


@pytest.mark.parametrize("form", ["kron", "diag", "ntk"])
def test_steps_from_batches_are_up_the_bound_and_those_from_all_the_evidence(form):
    how = {"form": form, "hyper_optimizer": "mackay", "n_hypersteps": 400, "hyper_step_limit": None}
    model = network()
    evidence = EvidenceCallback(model, points(shuffle=True), batches=1, **how)
    value, seen = evidence.step(0), evidence.la
    assert seen.n_data == 10 and value == pytest.approx(-float(evidence_bound(seen, 40)) / 40, rel=1e-12)
    delta = seen.prior_precision.clone().requires_grad_()
    (slope,) = torch.autograd.grad(evidence_bound(seen, 40, delta), delta)
    assert (slope * delta).abs().max() < 1e-5
    evidence.step(1)
    assert evidence.la.log_likelihood != seen.log_likelihood, "the same subset twice"
    if form != "ntk":  # whose blocks are batches
        whole, every = EvidenceCallback(model, points(), **how), EvidenceCallback(model, points(True), batches=4, **how)
        assert every.step(0) == pytest.approx(whole.step(0), rel=1e-12)
        torch.testing.assert_close(every.prior_precision, whole.prior_precision, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, r"EvidenceCallback: every must be at least 1, got 0"),
        ({"lr_hyp": -1.0}, r"EvidenceCallback: lr_hyp must be positive"),
        ({"forms": "ntk"}, r"EvidenceCallback: got an unexpected keyword argument 'forms'"),
        ({"form": "full"}, r"EvidenceCallback: form must be"),
        ({"form": "ntk", "fisher": "mc"}, r"fisher is not an argument of form='ntk'"),
        ({"outputs": "apart"}, r"outputs is not an argument of form='kron'"),
        ({"batches": 1}, r"the first of a new pass, which of this loader are the same in every pass"),
        (
            {"batches": 1, "loader": DataLoader([(drawn(9, 4), torch.arange(9) % 3)], batch_size=None)},
            r"the first of a new pass, which of this loader are the same in every pass",
        ),
        ({"n_data": 0}, r"EvidenceCallback: n_data must be a positive integer"),
        ({"likelihood": "binary"}, r"EvidenceCallback: on 3 images of loader: "),
    ],
)
def test_wrong_arguments_are_named_before_the_first_step(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        EvidenceCallback(network(), **{"loader": points()} | arguments)


def test_the_priors_gradient_is_that_of_the_penalty_for_one_optimizer_at_a_time():
    model = network()
    evidence = EvidenceCallback(model, points(), prior_prec_init=3.0)
    loss = evidence.penalised(torch.zeros((), dtype=torch.float64))
    assert float(loss) == pytest.approx(3 / 80 * sum(float(p.square().sum()) for p in model.parameters()))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    first, second = (torch.optim.SGD(layer.parameters()) for layer in (model[0], model[2]))
    evidence.add_prior(first)
    assert model[2].weight.grad is None and model[2].bias.grad is None
    evidence.add_prior(second)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_a_given_number_weighs_the_decay_and_evidence_is_of_the_data_of_a_pass():
    found = []
    for n_data in (None, 400):
        evidence = EvidenceCallback(network(), points(), n_data=n_data, **OPTIONS)
        found.append((evidence.step(0), evidence.margliks, evidence.prior_precision, evidence.weight_decay))
    (value, margliks, precision, decay), given = found
    assert given[:2] == (value, margliks) and torch.equal(given[2], precision)
    assert given[3] == {name: pytest.approx(each / 10) for name, each in decay.items()}


def test_parameters_without_a_precision_keep_their_decay():
    model, loader = Tagged(), [(torch.randn(40, 3, 4), torch.arange(40) % 3)]
    evidence = EvidenceCallback(model, loader, unknown="freeze", prior_prec_init=8.0)
    served = ["inner.weight", "inner.bias", "head.weight", "head.bias"]
    assert evidence.weight_decay == dict.fromkeys(served, pytest.approx(0.2))
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=0.5)
    with pytest.raises(ValueError, match="group 0 of the optimizer has parameters with a precision and others"):
        evidence.attach(optimizer, weight_decay=False)
    evidence.attach(optimizer)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    found = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert found == {"token": 0.5, "idle": 0.5} | evidence.weight_decay
    assert evidence.penalised(loss := torch.ones(())) is loss


def test_what_cannot_be_attached_is_refused():
    model = network()
    evidence = EvidenceCallback(model, points())
    with pytest.raises(ValueError, match="none of the model's parameters"):
        evidence.attach(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    with pytest.raises(ValueError, match="group 0 of the Rprop has no weight_decay"):
        evidence.attach(torch.optim.Rprop(model.parameters()))
    first, mixed = {"params": [model[0].weight]}, {"params": [model[0].bias, nn.Parameter(torch.ones(2))]}
    optimizer = torch.optim.SGD([first, mixed], weight_decay=0.5)
    with pytest.raises(ValueError, match="group 1 of the optimizer has parameters with a precision and others"):
        evidence.attach(optimizer, weight_decay=False)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5], "a refused optimizer is changed"
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got Sequential"):
        evidence.attach(model)
    optimizer, other = (torch.optim.AdamW(net.parameters()) for net in (model, network()))
    of_another_kind = types.SimpleNamespace(optimizer=optimizer, base_values=[1e-3])  # as timm's
    for scheduler in (lr_scheduler.StepLR(other, 2), of_another_kind):
        with pytest.raises(ValueError, match=f"for this optimizer, got a {type(scheduler).__name__}; attach before"):
            evidence.attach(optimizer, scheduler)
    evidence.attach(optimizer)
    with pytest.raises(ValueError, match="is attached already"):
        evidence.attach(optimizer)
    model[0].weight = nn.Parameter(torch.zeros(5, 4).double())
    with pytest.raises(ValueError, match=r"EvidenceCallback: .* '0\.weight' was exchanged"):
        evidence.step(0)
    with pytest.raises(ValueError, match="EvidenceCallback: epoch must be at least 0"):
        evidence.step(-1)

"""A fit and its evidence inside what users may have around them: autocast and inference mode."""

from __future__ import annotations

import copy
import types
from typing import ClassVar

import pytest
import torch
from torch import nn

from ella_cuda import ops
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood, register, register_likelihood
from ella_cuda.laplace.likelihoods import Classification, Regression
from ella_cuda.laplace.rules.conv import Conv2dRule
from ella_cuda.nn import CircularConv2d, FactoredLinear2d, RelaxedEquivariance, SparseFactoredLinear2d
from ella_cuda.training import MarglikTrainer, marglik_training
from ella_cuda.training.processes import StepTogether
from ella_cuda.training.step import TrainingStep
from python_tests.laplace.checks import Function


def network() -> nn.Module:
    paths = {"conv": CircularConv2d(1, 3), "f_fc": FactoredLinear2d(1, 3, 4, 4), "s_fc": SparseFactoredLinear2d(1, 3, 4, 4)}  # fmt: skip
    return nn.Sequential(RelaxedEquivariance(paths), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 4))


def numbers(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    la = KronLaplace(model, prior_precision=0.5).fit(TensorLoader(x, y, batch_size=7))
    count = len(la.prior_precision)
    with torch.inference_mode(False), torch.enable_grad():
        precision = torch.full((count,), 0.5, dtype=torch.float64, device=x.device).requires_grad_()
        evidence = la.log_marginal_likelihood(precision)
        (slope,) = torch.autograd.grad(evidence, precision)
    optimized = la.optimize_prior_precision(n_steps=3)
    effective = torch.tensor(list(la.effective_parameters().values()))
    return [evidence.detach(), slope, la.log_likelihood, optimized, effective]


@pytest.fixture
def case(device):
    model = network().to(device)
    return model, torch.randn(20, 1, 4, 4, device=device), torch.randint(4, (20,), device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_changes_nothing(case, dtype, device):
    expected = numbers(*case)
    with torch.autocast(device.type, dtype):
        found = numbers(*case)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inference_mode_changes_nothing(case):
    """With data that were made in it too, which autograd may not save."""
    model, x, y = case
    expected = numbers(model, x, y)
    with torch.inference_mode():
        found = numbers(model, x.clone(), y.clone())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        batch = x.clone(), y.clone()
        la = KronLaplace(model, prior_precision=0.5).fit([batch])  # as it is, not a part of it
    assert torch.allclose(la.log_marginal_likelihood(), expected[0], rtol=1e-6)


def test_inference_mode_and_learned_lengthscales(case):
    """The data fit's gradient in a buffer goes through the network, which saves its inputs."""
    model, x, y = case
    scale = model[0].s_fc.basis_in.inverse_lengthscale.requires_grad_()
    expected = KronLaplace(model).fit([(x, y)])
    with torch.inference_mode():
        found = KronLaplace(model).fit([(x.clone(), y.clone())])
    slopes = [torch.autograd.grad(la.log_marginal_likelihood(), scale) for la in (found, expected)]
    assert slopes[1][0] != 0
    torch.testing.assert_close(*slopes)


def test_exact_evidence_under_autocast(case, device):
    model, x, y = case
    basis = model[0].s_fc.basis_in
    wanted = [basis.inverse_lengthscale.requires_grad_(), basis.anchors.requires_grad_()]

    def evidence():
        value = exact_log_marginal_likelihood(KronLaplace(model), x, y)
        return value, torch.autograd.grad(value, wanted)

    expected = evidence()
    with torch.autocast(device.type, torch.bfloat16):
        value = exact_log_marginal_likelihood(KronLaplace(model), x, y)
    torch.testing.assert_close((value, torch.autograd.grad(value, wanted)), expected, rtol=1e-5, atol=1e-5)


def test_reduced_images_are_taken_in_full_under_autocast(case, device):
    model, x, y = case
    x = x.bfloat16()
    expected = KronLaplace(model).fit([(x.float(), y)]).log_marginal_likelihood()
    with torch.autocast(device.type, torch.bfloat16):
        found = KronLaplace(model).fit([(x, y)]).log_marginal_likelihood()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_a_loader_runs_in_the_modes_of_whoever_fits(case, grad, inference, device):
    """It may compute features by a network of its own."""
    model, x, y = case
    seen = []

    def batches():
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled(device.type)))
        yield x, y

    with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast(device.type, torch.bfloat16):
        KronLaplace(model).fit(batches())
    assert seen == [(grad, True)]


def test_training_under_autocast(case, device):
    """The backward is in each operation's own precision: that of our layers is not reduced."""
    model, x, y = case
    model = model[0]  # of our layers alone, whose products torch would reduce in a backward under autocast
    step = {}
    for name, context in (
        ("without", torch.autocast(device.type, enabled=False)),
        ("with", torch.autocast(device.type, torch.bfloat16)),
    ):
        copied = nn.Sequential(copy.deepcopy(model), nn.Flatten())
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        train = TrainingStep(copied, optimizer, list(copied.parameters()), Classification())
        train.begin_epoch(torch.zeros(len(train.parameters), device=device), 1.0, len(x))
        with context:
            train(x, y, lambda outputs, labels: labels, lambda loss: None)
        step[name] = list(copied.state_dict().values())
    torch.testing.assert_close(step["with"], step["without"])


def test_what_is_asked_of_a_posterior_is_that_without_autocast(case, device):
    """Float32 vectors meet float32 eigenvectors, whose products autocast would reduce."""
    model, x, y = case
    la = KronLaplace(model, prior_precision=0.5).fit([(x, y)])
    vectors, jacobians = torch.randn(2, la.n_params, device=device), torch.randn(2, 4, la.n_params, device=device)

    def asked(la):
        generator = torch.Generator(device).manual_seed(0)
        posterior = la.posterior_precision
        products = posterior.bmm(vectors), posterior.square_form(vectors), posterior.to_matrix(), posterior.diag(-1)
        drawn = la.sample(2, generator), la.log_prob(vectors)
        return [*products, *drawn, la.functional_variance(jacobians), la.functional_covariance(jacobians)]

    with torch.autocast(device.type, torch.bfloat16):
        found = asked(KronLaplace(model, prior_precision=0.5).fit([(x, y)]))
    torch.testing.assert_close(found, asked(la), rtol=1e-6, atol=1e-6)
    dense = la.posterior_precision.to_matrix().double()
    torch.testing.assert_close(found[1], ((vectors.double() @ dense) * vectors.double()).sum(1), rtol=1e-5, atol=0)


@register_likelihood("watching")
class Watching(Classification):
    """Notes in which precision its products would be."""

    seen: ClassVar[dict[str, list[bool]]] = {}


def noting(name):
    def method(self, first, *args, **kwargs):
        tensor = next(one for one in (first, *args) if isinstance(one, torch.Tensor))
        self.seen.setdefault(name, []).append(torch.is_autocast_enabled(tensor.device.type))
        return getattr(Classification, name)(self, first, *args, **kwargs)

    return method


WATCHED = ("loss", "statistic", "probabilities", "response", "log_predictive", "gradient", "entropy")
for watched in WATCHED:
    setattr(Watching, watched, noting(watched))


def test_likelihoods_and_optimizers_of_a_user_compute_without_autocast(case, device):
    model, x, y = case

    class Step(torch.optim.SGD):
        def step(self, closure=None):
            Watching.seen.setdefault("step", []).append(torch.is_autocast_enabled(device.type))
            return super().step(closure)

    Watching.seen.clear()
    with torch.autocast(device.type, torch.bfloat16):
        la, *_ = marglik_training(model, [(x, y)], Watching(), optimizer_cls=Step, n_epochs=1, progress_bar=False)
        la(x)
        la(x, link_approx="mc", n_samples=2)
        la.predictive_samples(x, n_samples=2)
        la.optimize_prior_precision(method="gridsearch", prior_structure="scalar", val_loader=[(x, y)], grid_size=2)
        la.leave_one_out([(x, y)])
        la.uncertainty(x, 2)
    assert Watching.seen.keys() == {"step", *WATCHED} and not any(map(any, Watching.seen.values()))


@pytest.mark.parametrize("together", [False, True])
def test_steps_under_autocast_are_of_the_present_weights(device, together):
    """Of a line by least squares, whose steps are known, where autocast has casts of the weights before, made without gradients."""
    x, rate, n = torch.linspace(-1, 1, 8, device=device)[:, None], 0.25, 8
    y, line = 3 * x, nn.Linear(1, 1, bias=False).to(device)
    nn.init.constant_(line.weight, 0.5)
    train = TrainingStep(line, torch.optim.SGD(line.parameters(), lr=rate), list(line.parameters()), Regression())
    train.begin_epoch(torch.ones(1, device=device), 1.0, n)
    one = StepTogether(train, types.SimpleNamespace(size=1, sum_=lambda tensor: tensor)) if together else None
    expected = 0.5
    with torch.autocast(device.type, torch.bfloat16):
        with torch.no_grad():
            line(x)
        for _ in range(20):
            if together:
                one((x, y, n), False, None, 0.0, "")
            else:
                train(x, y, train.checked, lambda loss: None)
            expected -= rate * ((expected - 3) * x.double().square().mean().item() + expected / n)
    assert abs(line.weight.item() - expected) < 2**-7 * expected and expected > 1.5


def test_outputs_after_a_training_under_autocast_are_of_its_weights(device):
    x = torch.ones(4, 1, device=device)
    line = nn.Linear(1, 1, bias=False).to(device)
    nn.init.constant_(line.weight, 0.5)
    options = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.5}, "progress_bar": False}
    with torch.autocast(device.type, torch.bfloat16):
        line(x)
        trainer = MarglikTrainer(line, [(x, 3 * x)], "regression", objective="map", n_epochs=3, **options)
        before = copy.deepcopy(trainer.state_dict())
        trainer.run()
        assert line.weight.item() > 1.5 and line(x)[0].item() == pytest.approx(line.weight.item(), rel=2**-8)
        trainer.load_state_dict(before)
        assert line(x)[0].item() == 0.5


def own_autocast(reduces: bool) -> nn.Module:
    """A network that reduces a part of itself."""

    def forward(m, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=reduces):
            x = m.third(m.relu(m.second(m.first(x))))
            return m.last(x.flatten(1))

    convs = {"first": nn.Conv2d(1, 3, 3, padding=1), "second": CircularConv2d(3, 3)}
    return Function(forward, **convs, third=FactoredLinear2d(3, 2, 4, 2), last=nn.Linear(8, 4), relu=nn.ReLU())


def test_a_network_with_autocast_of_its_own(case, device):
    """Its factors are those of the network without, to bfloat16's digits."""
    _, x, y = case
    reduced, full = own_autocast(True).to(device), own_autocast(False).to(device)
    full.load_state_dict(reduced.state_dict())
    found, expected = (KronLaplace(m).fit([(x, y)]) for m in (reduced, full))
    for name, factor in expected.factors.items():
        for mine, theirs in (
            (found.factors[name].inputs, factor.inputs),
            (found.factors[name].outputs, factor.outputs),
        ):
            assert mine.dtype == theirs.dtype and (mine - theirs).norm() <= 0.03 * theirs.norm(), name
    torch.testing.assert_close(found.log_likelihood, expected.log_likelihood, rtol=0.01, atol=0)
    logits = reduced.eval()(x)
    assert logits.dtype == torch.bfloat16
    likelihood = -nn.functional.cross_entropy(logits.double(), y, reduction="sum")
    torch.testing.assert_close(found.log_likelihood, likelihood, rtol=1e-6, atol=0)
    p = logits.double().softmax(1)
    hessian = torch.diag(p.sum(0)) - p.T @ p
    last = found.factors["last.bias"].outputs[0].double()
    torch.testing.assert_close(last, hessian, rtol=4e-3, atol=0)  # bfloat16 rounds a column once


def test_reduced_activations_lose_nothing_in_the_input_sides(case, device):
    """The oracle is float64 on the same 16-bit numbers."""
    _, x, y = case
    model, seen = own_autocast(True).to(device), {}
    for name in ("second", "last"):
        layer = getattr(model, name)
        layer.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0].detach()}))
    la = KronLaplace(model).fit([(x, y)])
    assert seen["second"].dtype == torch.bfloat16
    exact = ops.conv_kron_accumulate_torch_(torch.zeros(27, 27, dtype=torch.float64, device=device), seen["second"], 3)
    torch.testing.assert_close(la.factors["second.weight"].inputs[0], exact / len(x), rtol=1e-6, atol=1e-6)
    rows = seen["last"].double()
    torch.testing.assert_close(la.factors["last.weight"].inputs[0], rows.T @ rows / len(x), rtol=1e-6, atol=1e-6)


class OwnConv(CircularConv2d):
    pass


@register(OwnConv)
class OwnConvRule(Conv2dRule):
    def inputs(self, x):
        assert x.dtype == torch.float32
        super().inputs(x)


def test_a_rule_with_inputs_of_its_own_gets_float32(case, device):
    _, x, y = case
    model = own_autocast(True)
    model.second = OwnConv(3, 3)
    KronLaplace(model.to(device)).fit([(x, y)])


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_model_moved_in_inference_mode_is_refused_and_left_as_it_was(case, when):
    model, x, y = nn.Sequential(CircularConv2d(1, 3), nn.Flatten(), nn.Linear(48, 4)).to(case[1].device), *case[1:]
    with torch.inference_mode():
        la = KronLaplace(model) if when == "between" else None
        model.double().float()  # stands for .to("cuda")
        with pytest.raises(RuntimeError, match=r"parameter '0.weight' was made in torch.inference_mode"):
            (la or KronLaplace(model)).fit([(x, y)])
    assert model.training and all(p.requires_grad for p in model.parameters())

"""Parameters that no rule knows."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, TangentModel, exact_log_marginal_likelihood
from python_tests.laplace import checks

IMAGES, CLASSES = 6, 3


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return checks.sequences(IMAGES, CLASSES)


class Tokens(nn.Module):
    """A class token, a position embedding, a layer scale and FixUp's numbers."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 6, 4))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.gains = nn.Parameter(torch.ones(4))
        self.inner, self.head, self.looks = nn.Linear(4, 4), nn.Linear(4, CLASSES), looks

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        if self.looks and h.sum().item() == 0:  # which torch.func.vmap cannot take
            return x.new_zeros(len(x), CLASSES)
        h = self.gains * self.inner(h).tanh() * self.scale + self.shift
        return self.head(h.sin().mean(1) + self.scale.cos())


OF_THE_MODULE = ["token", "position", "scale", "shift", "gains"]
EXACT = ["token", "scale", "shift", "gains", "inner.bias", "head.bias"]


def test_they_are_refused_in_one_message_that_names_them():
    model = nn.Sequential(Tokens(), Tokens())
    with pytest.raises(TypeError) as refusal:
        KronLaplace(model)
    head, line, *_ = str(refusal.value).splitlines()
    assert head.startswith("Pass unknown='diagonal'") and "unknown='freeze'" in head and "35%" in head
    assert line.startswith(
        f"- layer '0' ({__name__}.Tokens) and 1 more ('1') has trainable parameters (token, position,"
    )
    assert "Those with several axes are at fault (position)" in line
    with pytest.raises(ValueError, match="unknown must be one of 'error', 'freeze', 'diagonal', got 'none'"):
        KronLaplace(model, unknown="none")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("budget", [None, 1, 5000])
def test_diagonals_and_blocks_are_those_of_the_dense_matrix(likelihood, budget, data, dense_ggn):
    model, (x, y) = checks.randomised(Tokens()), data
    if likelihood == "regression":
        y = torch.randn(IMAGES, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    la = KronLaplace(model, likelihood, unknown="diagonal", memory_budget=budget)
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    assert la.parameter_names == [name for name, _ in model.named_parameters()]
    dense = dense_ggn(model, x, y, likelihood)
    diagonal = la.factors["position"].to_dense().flatten()
    torch.testing.assert_close(diagonal, dense["position"].diagonal(), rtol=1e-10, atol=1e-13)
    for name in EXACT:
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name], rtol=1e-10, atol=1e-13)
    found = la.factors["position"].logdet(torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(found, torch.log1p(dense["position"].diagonal()).sum())
    assert 0 < la.effective_parameters()["position"] < 24


def test_frozen_ones_are_constants(data):
    model = checks.randomised(Tokens())
    la = KronLaplace(model, unknown="freeze").fit([data])
    assert all(p.requires_grad for p in model.parameters())
    same = copy.deepcopy(model)
    for name in OF_THE_MODULE:
        same.get_parameter(name).requires_grad_(False)
    expected = KronLaplace(same).fit([data])
    names = [n for n, _ in model.named_parameters() if n not in OF_THE_MODULE]
    assert la.parameter_names == expected.parameter_names == names
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=0, atol=0)
    assert la.n_params == sum(p.numel() for n, p in model.named_parameters() if n not in OF_THE_MODULE)
    (line,) = (line for line in la.summary().splitlines() if line.startswith("token"))
    assert "left out" in line


def test_a_model_of_which_freezing_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter has a rule"):
        KronLaplace(checks.Function(lambda m, x: x, weight=nn.Parameter(torch.ones(2, 2))), unknown="freeze")


def test_layers_that_a_rule_refuses_are_frozen_but_not_given_a_diagonal():
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, CLASSES)).double()
    for unknown in ("error", "diagonal"):
        with pytest.raises(ValueError, match="max_norm"):
            KronLaplace(model, unknown=unknown)
    x, y = torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 2])
    assert KronLaplace(model, unknown="freeze").fit([(x, y)]).parameter_names == ["2.weight", "2.bias"]


def test_a_model_that_vmap_cannot_take_goes_one_data_point_at_a_time(data, dense_ggn):
    model = checks.randomised(Tokens(looks=True))
    with pytest.warns(UserWarning, match=r"vmap cannot take the model.*\(token, position, scale, ...\)"):
        la = KronLaplace(model, unknown="diagonal").fit([data])
    dense = dense_ggn(checks.randomised(Tokens()), *data)
    torch.testing.assert_close(la.factors["position"].to_dense().flatten(), dense["position"].diagonal())
    torch.testing.assert_close(la.factors["gains"].to_dense()[0], dense["gains"])


def test_there_is_no_warning_where_vmap_takes_it(data):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        KronLaplace(checks.randomised(Tokens()), unknown="diagonal").fit([data])


class ChannelNorm(nn.LayerNorm):
    """A normalisation over the channels of images, as torchvision's networks have."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def test_a_subclass_with_a_forward_of_its_own_has_exact_blocks(dense_ggn):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), ChannelNorm(4), nn.GELU(), nn.Flatten(), nn.Linear(16, CLASSES))
    model = checks.randomised(net)
    x, y = torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1])
    la, dense = KronLaplace(model).fit([(x, y)]), dense_ggn(model, x, y)
    for name in ("1.weight", "1.bias", "0.bias"):
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name])


def test_a_number_of_two_modules(data, dense_ggn):
    one, other = nn.Module(), nn.Module()
    one.scale = other.scale = nn.Parameter(torch.ones(4))
    layers = {"one": one, "other": other, "head": nn.Linear(4, CLASSES)}
    model = checks.Function(lambda m, x: m.head((x.mean(1) * m.one.scale).sin() * m.other.scale), **layers)
    model = checks.randomised(model)
    la = KronLaplace(model).fit([data])
    assert list(la.factors) == ["one.scale", "head.weight", "head.bias"]
    torch.testing.assert_close(la.factors["one.scale"].to_dense()[0], dense_ggn(model, *data)["one.scale"])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "DataParallel"])
def test_a_module_under_two_names_keeps_its_parameter(wrap, data):
    scaled, (x, y) = Scaled(), data
    model = wrap(checks.randomised(nn.Sequential(scaled, nn.Tanh(), scaled, nn.Flatten(), nn.Linear(20, CLASSES))))
    scale, expected = scaled.scale, torch.zeros(4, 4, dtype=torch.float64)
    la = KronLaplace(model).fit([(x[:2], y[:2]), (x[2:], y[2:])])
    assert scaled.scale is scale and scale.requires_grad and scale.grad is None
    for outputs in model(x):
        jacobian = torch.stack([torch.autograd.grad(f, scale, retain_graph=True)[0] for f in outputs])
        p = outputs.detach().softmax(0)
        expected += jacobian.T @ (p.diag() - p.outer(p)) @ jacobian
    torch.testing.assert_close(la.factors[la.parameter_names[0]].to_dense()[0], expected)


def test_a_parameter_that_the_forward_takes_from_elsewhere_is_refused(data):
    class Listed(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [self.scale]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scales[0]

    model = checks.randomised(nn.Sequential(Listed(), nn.Flatten(), nn.Linear(20, CLASSES)))
    with pytest.raises(ValueError, match=r"'0\.scale' from somewhere else than the module.*freeze it"):
        KronLaplace(model).fit([data])
    assert model[0].scale is model[0].scales[0] and model[0].scale.requires_grad


@pytest.mark.parametrize("unknown", ["freeze", "diagonal"])
def test_they_are_saved_added_to_and_listed(unknown, data):
    model, (x, y) = checks.randomised(Tokens()), data
    whole = KronLaplace(model, unknown=unknown).fit([data])
    half = KronLaplace(model, unknown=unknown).fit([(x[:2], y[:2])])
    other = KronLaplace(model, unknown=unknown)
    other.load_state_dict(half.state_dict())
    torch.testing.assert_close(other.log_marginal_likelihood(), half.log_marginal_likelihood(), rtol=0, atol=0)
    other.fit([(x[2:], y[2:])], override=False)
    torch.testing.assert_close(other.log_marginal_likelihood(), whole.log_marginal_likelihood())
    with pytest.raises(ValueError, match=r"unknown is|parameter_names is"):
        KronLaplace(nn.Sequential(nn.Linear(2, 2))).load_state_dict(half.state_dict())
    blocks = {line.split()[0]: line.split()[-1] for line in whole.summary().splitlines()[1:-1]}
    assert blocks["gains"] == blocks["scale"] == ("exact" if unknown == "diagonal" else "-")
    assert blocks["position"] == ("diagonal" if unknown == "diagonal" else "-")
    assert whole.memory_estimate(x) > 0


def test_one_sampled_column_is_right_on_average(data, dense_ggn):
    """Of as many data points as draws."""
    model, draws = checks.randomised(Tokens()), 1000
    expected = dense_ggn(model, *data)["position"].diagonal()
    repeated = [t.repeat(draws, *[1] * (t.dim() - 1)) for t in data]
    la = KronLaplace(model, unknown="diagonal", fisher="mc").fit([repeated], generator=torch.Generator().manual_seed(0))
    found = la.factors["position"].to_dense().flatten() / draws
    assert 0 < (found - expected).abs().max() < 0.1 * expected.mean()


def test_the_exact_evidence_refuses_them(data):
    with pytest.raises(ValueError, match=r"layer '\(the model itself\)' \(Tokens\) has no rule of its own"):
        exact_log_marginal_likelihood(KronLaplace(checks.randomised(Tokens()), unknown="diagonal"), *data)


@pytest.mark.parametrize("kind", [FullLaplace, DiagLaplace, KronLaplace])
def test_parameters_without_axes_have_modes_tangents_and_samples(kind):
    """ReZero, a logit scale, and numbers in a list."""
    torch.manual_seed(0)
    numbers = nn.ParameterList([nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.rand(2))])
    parts = {"a": nn.Parameter(torch.tensor(0.4)), "f": nn.Linear(4, 2), "numbers": numbers}
    model = checks.Function(
        lambda m, x: (x[:, :2] + m.a * m.f(x).tanh()) * m.numbers[0].exp() + m.numbers[1], **parts
    ).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    la = kind(model, likelihood="regression", prior_precision=2.0).fit([(x, y)])
    parameters = {name: p.detach() for name, p in model.named_parameters() if name in la.parameter_names}
    sizes = [parameters[name].numel() for name in la.parameter_names]

    def outputs(theta: Tensor) -> Tensor:
        parts = zip(la.parameter_names, theta.split(sizes), strict=True)
        return torch.func.functional_call(model, {n: p.view(parameters[n].shape) for n, p in parts}, (x,)).flatten()

    jacobian = torch.func.jacrev(outputs)(la.mean)
    u = torch.randn(la.n_params, dtype=torch.float64)
    torch.testing.assert_close(TangentModel(model, names=la.parameter_names).jvp(x, u).flatten(), jacobian @ u)
    precision = jacobian.T @ jacobian + 2 * torch.eye(la.n_params, dtype=torch.float64)
    residual = y.flatten() - outputs(la.mean) + jacobian @ la.mean
    torch.testing.assert_close(la.fit_linear_mode([(x, y)]), torch.linalg.solve(precision, jacobian.T @ residual))
    normal = torch.distributions.MultivariateNormal(la.mean, precision_matrix=la.posterior_precision.to_matrix())
    torch.testing.assert_close(la.log_prob(la.mean + 0.1 * u), normal.log_prob(la.mean + 0.1 * u), check_dtype=False)
    with pytest.warns(UserWarning, match="pred_type='nn'"):
        drawn = la.functional_samples(x, "nn", 3, generator=torch.Generator().manual_seed(1))
    expected = [outputs(theta).view(6, 2) for theta in la.sample(3, torch.Generator().manual_seed(1))]
    torch.testing.assert_close(drawn, torch.stack(expected))

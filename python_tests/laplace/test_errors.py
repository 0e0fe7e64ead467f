"""Arguments and states that cannot be right are refused with the argument's name, what was expected and what came."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace, exact_log_marginal_likelihood
from python_tests.laplace.checks import Function


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))


@pytest.fixture
def data():
    return torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(fisher="empirical"), ValueError, "fisher must be one of 'exact', 'mc'"),
        (dict(resolution="fine"), ValueError, "resolution must be one of 'shared', 'per_channel'"),
        (dict(memory_budget=0), ValueError, "memory_budget must be a positive"),
        (dict(prior_precision=0.0), ValueError, "prior_precision: expected positive finite values, got"),
        (dict(prior_precision=float("nan")), ValueError, "prior_precision: expected positive"),
        (
            dict(prior_precision=torch.tensor([1.0, 2.0, -3.0, float("inf")])),
            ValueError,
            r"^prior_precision: expected positive finite values, got -3.0 at index 2\.$",
        ),
        (dict(prior_precision=-2.0), ValueError, r"expected positive finite values, got -2.0\.$"),
        (dict(prior_precision=torch.ones(3)), ValueError, r"vector of 4 values.*got shape \(3,\)"),
        (dict(prior_precision=torch.ones(2, 2)), ValueError, r"got shape \(2, 2\)"),
        (dict(prior_precision="1"), TypeError, "prior_precision: expected a number or a tensor, got str"),
        (dict(likelihood="regression", sigma_noise=-1.0), ValueError, "sigma_noise: expected positive"),
        (dict(likelihood="regression", sigma_noise=torch.ones(2)), ValueError, "sigma_noise: expected one number"),
        (dict(sigma_noise=2.0), ValueError, "must be 1 for classification, got 2.0"),
    ],
)  # fmt: skip
def test_arguments(model, arguments, error, message):
    with pytest.raises(error, match=message):
        KronLaplace(model, **arguments)


def test_precisions_are_the_approximations_own(model):
    """Numbers of any kind; what becomes of the caller's tensor is nobody's matter, nor its graph that of the optimizer."""
    given = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    la = KronLaplace(model, prior_precision=given)
    noise = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    noisy = KronLaplace(model, "regression", sigma_noise=noise)
    with torch.no_grad():
        given.fill_(-1.0), noise.fill_(-1.0)
    assert noisy.sigma_noise.item() == 0.5 and noisy.sigma_noise.requires_grad
    assert la.prior_precision.tolist() == [2.0] * 4 and la.prior_precision.requires_grad
    la.prior_precision = np.float32(3)
    la.prior_precision.mul_(2)
    assert la.prior_precision.tolist() == [6.0] * 4
    la.prior_precision = given.detach().square().requires_grad_()
    la.fit([(torch.randn(5, 3), torch.randint(2, (5,)))])
    assert not la.optimize_prior_precision(n_steps=2).requires_grad


def test_models_that_cannot_be_fitted(model):
    with pytest.raises(ValueError, match="no trainable parameters"):
        KronLaplace(nn.ReLU())
    with pytest.raises(TypeError, match=r"'0.weight' has dtype torch.float16"):
        KronLaplace(model.half())
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        KronLaplace(lambda x: x)


@pytest.mark.parametrize("loader", [[], iter([])])
def test_an_empty_loader(model, loader):
    with pytest.raises(ValueError, match="loader gave no data"):
        KronLaplace(model).fit(loader)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        # ``fit(X, Y)``, as of scikit-learn, would take Y for ``override``.
        (lambda x, y: (x, y), r"loader of batches \(x, y\).*TensorLoader\(x, y, batch_size="),
        (lambda x, y: (x,), r"loader of batches \(x, y\).*TensorLoader\(x, y, batch_size="),
        (lambda x, y: ([(x, y)], y), r"loader of batches \(x, y\).*TensorLoader\(x, y, batch_size="),
    ],
)
def test_what_is_no_loader_of_pairs(model, data, loader, message):
    for kind in (KronLaplace, DiagLaplace):
        with pytest.raises(TypeError, match=message):
            kind(model).fit(*loader(*data))


def test_evidence_before_a_fit(model):
    la = KronLaplace(model)
    parts = lambda: la.factors, lambda: la.log_likelihood, lambda: la.scatter, lambda: la.log_det_ratio
    for ask in (la.log_marginal_likelihood, la.effective_parameters, la.optimize_prior_precision, *parts):
        with pytest.raises(RuntimeError, match="call fit"):
            ask()


def test_what_it_prints(model, data):
    la = KronLaplace(model, fisher="mc")
    tensors, entries = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    settings = "likelihood='classification', fisher='mc', resolution='shared'"
    start = f"KronLaplace({type(model).__name__}, {settings}: {tensors} parameter tensors"
    assert repr(la) == f"{start} of {entries} entries, not fitted)"
    assert repr(la.fit([data])) == f"{start} of {entries} entries, fitted to {len(data[0])} data points)"


def test_evidence_after_a_failed_fit(model, data):
    la = KronLaplace(model).fit([data])
    with pytest.raises(ValueError, match="labels"):
        la.fit([data, (data[0], data[1] + 5)], override=False)
    with pytest.raises(RuntimeError, match="call fit"):
        la.log_marginal_likelihood()
    expected = KronLaplace(model).fit([data]).log_marginal_likelihood()
    assert la.fit([data], override=False).log_marginal_likelihood() == expected


def test_a_forward_replaced_on_the_instance_is_refused(model):
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    with pytest.raises(TypeError, match="forward was replaced on the instance"):
        KronLaplace(model)


@pytest.mark.parametrize("change", ["shift", "sign", "order", "frozen"])
def test_adding_after_the_parameters_changed(model, data, change):
    first, last = model[0].weight, model[-1].weight
    first.requires_grad_(change != "frozen")
    la = KronLaplace(model).fit([data])
    with torch.no_grad():
        if change == "shift":
            last += 0.1
        elif change == "sign":
            last.neg_()
        elif change == "order":
            last.copy_(last.flip(0))
        else:
            first.mul_(3.0)
    with pytest.raises(ValueError, match="parameters changed"):
        la.fit([data], override=False)


def test_precisions_of_the_evidence(model, data):
    la = KronLaplace(model).fit([data])
    with pytest.raises(ValueError, match="prior_precision: expected positive"):
        la.log_marginal_likelihood(torch.tensor([1.0, 1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="vector of 4 values"):
        la.log_marginal_likelihood(torch.ones(5))
    with pytest.raises(ValueError, match="must be 1 for classification"):
        la.log_marginal_likelihood(1.0, 0.5)
    with pytest.raises(ValueError, match="prior_precision"):
        la.prior_precision = -1.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda la, x, y: (la.model, x, y), TypeError, r"la must be a KronLaplace, got Sequential; pass KronLaplace\(model\)"),
        (lambda la, x, y: (la, x.numpy(), y), TypeError, "x must be a tensor.*got ndarray"),
        (lambda la, x, y: (la, [(x, y)], y), TypeError, r"x must be a tensor.*got list; concatenate a loader's batches"),
        (lambda la, x, y: (la, x, y.tolist()), TypeError, "y must be a tensor.*got list"),
        (lambda la, x, y: (la, x[0, 0], y), ValueError, r"x has no data points; it must have shape \(N, \.\.\.\), got \(\)"),
        (lambda la, x, y: (la, x[:, :2], y), ValueError, r"cannot be evaluated at x of shape \(4, 2\), torch\.float32; .*failed with: \w"),
        (lambda la, x, y: (la, x.double(), y), TypeError, r"a batch x of torch\.float64, its parameters being torch\.float32"),
        (lambda la, x, y: (la, x, y[:3]), ValueError, r"targets: expected class indices of shape \(4,\), got shape \(3,\)"),
        (lambda la, x, y: (la, x, y.float()), TypeError, r"targets: expected integer class indices, got dtype torch\.float32"),
        (lambda la, x, y: (la, x, y, "1"), TypeError, "prior_precision: expected a number or a tensor, got str"),
    ],
)  # fmt: skip
def test_arguments_of_the_exact_evidence(model, data, change, error, message):
    la = KronLaplace(model)
    assert exact_log_marginal_likelihood(la, *data).isfinite()
    with pytest.raises(error, match=message):
        exact_log_marginal_likelihood(*change(la, *data))


@pytest.mark.parametrize("error", [ValueError("not this"), torch.OutOfMemoryError("no memory")])
def test_errors_that_are_not_of_the_data_are_left_alone(data, error):
    def refuse(m, x):
        raise error

    la = KronLaplace(nn.Sequential(Function(refuse), nn.Linear(3, 2)))
    with pytest.raises(type(error), match=f"^{error}$"):
        exact_log_marginal_likelihood(la, *data)


class Zeta(nn.Module):
    """Of which torch has no gradient."""

    def forward(self, x):
        return torch.special.zeta(x.abs() + 2, torch.ones_like(x))


@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace, DiagLaplace])
@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        (Zeta(), NotImplementedError, r"fit: layer '1\.0' \(Zeta\): torch has no gradient of it"),
        (Function(lambda m, x: x.detach()), ValueError, "does not depend on its layers through autograd"),
    ],
)
def test_functions_without_a_gradient(kind, last, error, message):
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(last))
    with pytest.raises(error, match=message):
        kind(model, "regression").fit([(torch.randn(4, 3), torch.randn(4, 2))])


@pytest.mark.parametrize("kind", [KronLaplace, DiagLaplace, FullLaplace, SubnetLaplace])
def test_signatures_say_every_argument(kind):
    found = inspect.signature(kind).parameters
    assert {"model", "likelihood", "prior_precision", "memory_budget", "ignore_index"} <= found.keys()
    assert found["temperature"].default == 1.0 and not any(p.kind is p.VAR_KEYWORD for p in found.values())

"""A fit is of a network that is one function, whose gradients are its derivatives: others are refused by name."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as of_all_modules

from ella_cuda import marglik_training
from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, exact_log_marginal_likelihood
from python_tests.laplace.checks import Function


class Net(nn.Module):
    """Two layers, with a hook on what is between them."""

    def __init__(self, hook=None):
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(4, 5), nn.Linear(5, 3), hook

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.hook is not None:
            h.register_hook(self.hook)
        return self.last(h)


def data():
    return torch.randn(6, 4), torch.arange(6) % 3


def halved_in_place(g):
    g.mul_(0.5)


@pytest.mark.parametrize("change", [lambda g: g.clamp(-3, 3), halved_in_place])
@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_hooks_on_tensors_that_change_gradients_are_refused(change, kind):
    with pytest.raises(ValueError, match=r"a hook that the forward puts on a tensor \(.*\) changes what passes it"):
        kind(Net(change)).fit([data()])


@pytest.mark.parametrize("pre", [False, True])
def test_backward_hooks_of_modules_that_change_gradients_are_refused(pre):
    model = Net()
    if pre:
        model.last.register_full_backward_pre_hook(lambda module, of_output: (of_output[0] / 2,))
    else:
        model.last.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] / 2,))
    with pytest.raises(ValueError, match=r"a backward hook of 'last' \(Linear\) .* changes what passes it"):
        KronLaplace(model).fit([data()])


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (of_all_modules.register_module_forward_hook, lambda module, args, out: out * 0.5),
        (
            of_all_modules.register_module_full_backward_hook,
            lambda module, g, of_output: tuple(None if one is None else 0.5 * one for one in g),
        ),
        (of_all_modules.register_module_full_backward_pre_hook, lambda module, g: (0.5 * g[0],)),
    ],
)
def test_hooks_of_all_modules_are_refused_and_left_where_they_are(register, hook):
    handle = register(hook)
    try:
        with pytest.raises(ValueError, match="hook of all modules"):
            KronLaplace(Net()).fit([data()])
        names = "_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
        tables = [getattr(of_all_modules, name) for name in names]
        assert [one for table in tables for one in table.values()] == [hook]
    finally:
        handle.remove()


def test_hooks_that_look_on_may_stay():
    seen, batch, model = [], data(), Net()
    expected = KronLaplace(model).fit([batch]).log_marginal_likelihood()
    model.hook = lambda g: seen.append(g.shape)
    model.last.register_full_backward_hook(lambda module, of_input, of_output: seen.append(len(of_output)))
    handle = of_all_modules.register_module_forward_hook(lambda module, args, out: seen.append(out.shape))
    try:
        got = KronLaplace(model).fit([batch]).log_marginal_likelihood()
    finally:
        handle.remove()
    assert seen and torch.allclose(got, expected)


def test_gradients_of_parameters_are_the_users():
    """They are clipped for training; a fit forms none of them."""
    model, batch = Net(), data()
    expected = KronLaplace(model).fit([batch]).log_marginal_likelihood()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    assert KronLaplace(model).fit([batch]).log_marginal_likelihood() == expected


def test_straight_through_functions_are_allowed():
    straight = Function(lambda m, h: h + (h.round() - h).detach())
    assert KronLaplace(nn.Sequential(nn.Linear(4, 5), straight, nn.Linear(5, 3))).fit([data()]).n_data == 6


# random numbers ---------------------------------------------------------------------------------------------------------

own = torch.Generator().manual_seed(0)
numbers = np.random.default_rng(0)
calls = iter(range(1000))


class Drawn(nn.Module):
    """What a module between two layers makes of features."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, h):
        return self.draw(h)


DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "dropout in place": lambda h: F.dropout(h, 0.5, inplace=True),
    "noise": lambda h: h + 1e-7 * torch.randn_like(h),
    "noise of a shape": lambda h: h + torch.randn(h.shape),
    "stochastic depth": lambda h: h * (torch.rand(len(h), 1) > 0.5),
    "one coin": lambda h: 2 * h if torch.rand(()) > 0.5 else h,
    "gumbel": lambda h: F.gumbel_softmax(h, 1.0),
    "Python's": lambda h: h * random.random(),
    "numpy's": lambda h: h * np.random.rand(),
    "a generator of its own": lambda h: h + torch.randn(h.shape, generator=own),
    "numpy's generator": lambda h: h * numbers.uniform(1, 2),
    "a count of calls": lambda h: h * (1 + next(calls)),
}


def network(draw):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Drawn(draw), nn.Linear(6, 3))


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_in_evaluation_mode_are_refused_by_the_module_that_makes_them(draw):
    model, batch = network(DRAWS[draw]), data()
    for kind in (KronLaplace, FullLaplace, DiagLaplace):
        with pytest.raises(ValueError, match=r"fit: '1' \(Drawn\) draws random numbers in evaluation mode"):
            kind(model).fit([batch])
    with pytest.raises(ValueError, match=r"'1' \(Drawn\) draws random numbers"):
        marglik_training(model, [batch], n_epochs=9, n_epochs_burnin=8, progress_bar=False)


def test_a_loaded_state_of_a_random_network_does_not_predict():
    model, batch = network(lambda h: h), data()
    state = KronLaplace(model).fit([batch]).state_dict()
    model[1].draw = DRAWS["dropout"]
    la = KronLaplace(model)
    la.load_state_dict(state)
    with pytest.raises(ValueError, match="draws random numbers"):
        la(batch[0])


def test_the_evidence_as_a_function_of_buffers_is_refused_too():
    with pytest.raises(ValueError, match="draws random numbers"):
        exact_log_marginal_likelihood(KronLaplace(network(DRAWS["dropout"])), *data())


def test_dropout_that_evaluation_ends_is_exact():
    model, batch = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)), data()
    plain = nn.Sequential(model[0], model[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, expected = (KronLaplace(m).fit([batch]).log_marginal_likelihood() for m in (model, plain))
    torch.testing.assert_close(got, expected)


def test_a_network_that_draws_between_its_layers_is_named_itself():
    model = Function(lambda m, x: m.last(F.dropout(m.first(x))), first=nn.Linear(4, 6), last=nn.Linear(6, 3))
    with pytest.raises(ValueError, match="fit: Function draws random numbers"):
        KronLaplace(model).fit([data()])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_numbers_that_are_drawn_to_no_effect_are_told(draw):
    def layer_drop(h):  # as networks draw that look at self.training afterwards
        draw()
        return h

    model, batch = network(layer_drop), data()
    with pytest.warns(UserWarning, match="draws random numbers in evaluation mode. Outputs of 8 runs are the same"):
        la = KronLaplace(model).fit([batch])
    assert la.log_marginal_likelihood() == KronLaplace(network(lambda h: h)).fit([batch]).log_marginal_likelihood()

"""Hooks that change gradients on their way, or outputs before a layer's own hook has them, are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from ella_cuda.laplace import FullLaplace, KronLaplace


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


CHANGES = {
    "half": lambda g: g / 2,
    "clipped": lambda g: g.clamp(-3, 3),
    "normalised": lambda g: g / g.norm(),
    "in place": halved_in_place,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [KronLaplace, FullLaplace])
def test_hooks_on_tensors_that_change_gradients_are_refused(change, kind):
    with pytest.raises(ValueError, match=r"a hook that the forward puts on a tensor \(.*\) changes what passes it"):
        kind(Net(CHANGES[change])).fit([data()])


@pytest.mark.parametrize("change", ["half", "clipped", "normalised"])
@pytest.mark.parametrize("pre", [False, True])
def test_backward_hooks_of_modules_that_change_gradients_are_refused(change, pre):
    model, change = Net(), CHANGES[change]
    if pre:
        model.last.register_full_backward_pre_hook(lambda module, of_output: (change(of_output[0]),))
    else:
        model.last.register_full_backward_hook(lambda module, of_input, of_output: (change(of_input[0]),))
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
        tables = (
            of_all_modules._global_forward_hooks,
            of_all_modules._global_backward_hooks,
            of_all_modules._global_backward_pre_hooks,
        )
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
    class Straight(nn.Module):
        def forward(self, h):
            return h + (h.round() - h).detach()

    assert KronLaplace(nn.Sequential(nn.Linear(4, 5), Straight(), nn.Linear(5, 3))).fit([data()]).n_data == 6

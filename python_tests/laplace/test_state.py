"""Saving and loading a fit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import FactoredLinear2d


def make(resolution="shared", likelihood="classification"):
    model = nn.Sequential(FactoredLinear2d(2, 2, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    return KronLaplace(model, likelihood, prior_precision=0.5, resolution=resolution)


@pytest.fixture
def data():
    return torch.randn(5, 2, 2, 2), torch.randint(3, (5,))


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("resolution", ["shared", "per_channel"])
def test_a_round_trip_is_bit_for_bit_and_can_be_added_to(data, resolution):
    la = make(resolution).fit([data])
    other = make(resolution)
    other.model.load_state_dict(la.model.state_dict())
    other.load_state_dict(through_a_file(la.state_dict()))
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert other.effective_parameters() == la.effective_parameters()
    assert other.factors["2.weight"].output_moment is other.factors["2.bias"].output_moment
    more = [(data[0] + 1, data[1])]
    assert (
        other.fit(more, override=False).log_marginal_likelihood()
        == la.fit(more, override=False).log_marginal_likelihood()
    )


def test_a_state_replaces_a_fit_whose_evidence_was_read(data):
    la, other = make().fit([data]), make().fit([(data[0] + 1, data[1])])
    assert other.log_marginal_likelihood() != la.log_marginal_likelihood()
    other.model.load_state_dict(la.model.state_dict())
    other.load_state_dict(la.state_dict())
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert other.effective_parameters() == la.effective_parameters()


def test_a_saved_state_is_a_copy(data):
    la = make().fit([data])
    state, before = la.state_dict(), la.log_marginal_likelihood()
    la.fit([data], override=False)
    other = make()
    other.load_state_dict(state)
    assert other.log_marginal_likelihood() == before
    other.factors["2.weight"].output_moment.total.zero_()
    assert state["factors"]["2.weight"]["outputs"].any()


def test_an_unfitted_state(data):
    la = make().fit([data])
    la.load_state_dict(make().state_dict())
    with pytest.raises(RuntimeError, match="call fit"):
        la.log_marginal_likelihood()


def test_states_that_do_not_fit_are_refused_and_change_nothing(data):
    la = make().fit([data])
    before = la.log_marginal_likelihood()
    state = la.state_dict()
    wrong = [
        ({k: v for k, v in state.items() if k != "statistic"}, "entries missing .* statistic"),
        (make("per_channel").fit([data]).state_dict(), "resolution is 'per_channel' in the state, but 'shared' here"),
        (state | {"parameter_names": ["a"]}, "parameter_names is"),
        (state | {"factors": {k: v for k, v in state["factors"].items() if k != "2.bias"}}, "no factor for '2.bias'"),
        (state | {"prior_precision": torch.ones(2)}, "vector of 6 values"),
    ]
    shrunk = {k: dict(v) for k, v in state["factors"].items()}
    shrunk["2.weight"]["outputs"] = torch.zeros(1, 2, 2)
    wrong.append((state | {"factors": shrunk}, r"2.weight \(output side\): expected a tensor \(1, 3, 3\)"))
    for bad, message in wrong:
        with pytest.raises(ValueError, match=message):
            la.load_state_dict(bad)
        assert la.log_marginal_likelihood() == before

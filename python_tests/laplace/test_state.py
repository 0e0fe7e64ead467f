"""Saving and loading a fit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace
from ella_cuda.laplace.factors import with_checksum
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
    for one in (other, la):
        one.fit(more, override=False)
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()


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


def changed(state, path, value):
    """A copy of the state with another value at the end of a path of keys; ``...`` takes the entry away."""
    first, *rest = path
    copy = dict(state)
    if rest:
        copy[first] = changed(copy[first], rest, value)
    elif value is ...:
        del copy[first]
    else:
        copy[first] = value
    return copy


def sealed(state, path, value):
    """As :func:`changed`, of an approximation that had it so."""
    return with_checksum({key: entry for key, entry in changed(state, path, value).items() if key != "checksum"})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("statistic",), ..., "entries missing .* statistic"),
        (("more",), 1, "unknown entries in the state: 'more'"),
        (("checksum",), ..., "checksum does not fit the other entries"),
        (("resolution",), "per_channel", "resolution is 'per_channel' in the state, but 'shared' here"),
        (("likelihood",), torch.tensor(1.0), "likelihood is"),
        (("prior_precision",), torch.ones(5).double(), "prior_precision: expected a number or a vector of 6 values"),
        (("prior_mean",), torch.ones(5).double(), "prior_mean: expected a number or one value for each"),
        (("statistic_gradients",), {"a": torch.zeros(())}, "statistic_gradients of no buffers of the model: a"),
        (("factors", "2.bias"), ..., "factors are of other parameters than here: 2.bias"),
        (("factors", "0.weight_in", "inputs"), None, r"0.weight_in \(input side\): expected a tensor"),
        (
            ("factors", "2.weight", "outputs"),
            torch.ones(1, 2, 2).double(),
            r"2.weight \(output side\): expected a tensor \(1, 3, 3\)",
        ),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_changes_nothing(data, path, value, message):
    la = make().fit([data])
    other = make().fit([(data[0] + 1, data[1])])
    la.model.load_state_dict(other.model.state_dict())
    state, before = other.state_dict(), la.state_dict()
    assert la.log_marginal_likelihood() != other.log_marginal_likelihood()  # and eigenvalues are kept
    with pytest.raises(ValueError, match=message):
        la.load_state_dict(changed(state, path, value) if path == ("checksum",) else sealed(state, path, value))
    assert la.state_dict()["checksum"] == before["checksum"]
    rules = {rule.full_name(parameter): factor for rule in la._rules for parameter, factor in rule.factors.items()}
    assert rules == dict(la.factors), "a later fit would add to other factors than those that are read"
    la.load_state_dict(state)
    assert la.log_marginal_likelihood() == other.log_marginal_likelihood()
    assert la.effective_parameters() == other.effective_parameters()


def test_what_is_no_mapping_is_refused(data):
    for wrong in ([1], 5, None):
        with pytest.raises(TypeError, match="expected a mapping as state_dict gives it, got "):
            make().load_state_dict(wrong)


KINDS = {
    "kron": KronLaplace,
    "full": FullLaplace,
    "diag": DiagLaplace,
    "subnet": lambda *args: SubnetLaplace(*args, subnetwork_indices=torch.arange(3, 9)),
}


def fitted(kind, likelihood):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(6, 2).double()
    y = {"classification": torch.arange(6) % 2, "binary": torch.arange(12).view(6, 2) % 2}.get(likelihood)
    la = KINDS[kind](model, likelihood).fit([(x, torch.arange(12.0).view(6, 2).double() if y is None else y)])
    return la, KINDS[kind](model, likelihood)


def entries_of(state, path=()):
    """Every number, string and tensor of a state, and the mappings that hold them, by their paths."""
    for key, value in state.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from entries_of(value, (*path, key))


def another(value):
    if isinstance(value, torch.Tensor):
        return value.roll(1) if value.numel() > 1 and not torch.equal(value, value.roll(1)) else value * 1.01 + 1e-9
    return {bool: lambda: not value, int: lambda: value + 1, float: lambda: value * 1.01, str: lambda: value + "x"}.get(
        type(value), lambda: 5
    )()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("likelihood", ["classification", "poisson"])
def test_a_state_whose_entries_were_changed_is_refused(kind, likelihood):
    """Every entry in turn, among them those whose new values could be those of another fit."""
    la, other = fitted(kind, likelihood)
    state = through_a_file(la.state_dict())
    for path, value in entries_of(state):
        for wrong in (another(value), 5):
            with pytest.raises(ValueError, match="load_state_dict: checksum does not fit"):
                other.load_state_dict(changed(state, path, wrong))
        assert other.n_data == 0
    with pytest.raises(ValueError, match=r"load_state_dict: checksum does not fit .* load it as it was saved\."):
        other.load_state_dict(changed(state, ("square_norms",), state["square_norms"].flip(0)))
    shuffled = dict(reversed(state.items()))
    other.load_state_dict(shuffled)
    assert other.log_marginal_likelihood() == la.log_marginal_likelihood()


def test_a_loaded_state_is_a_copy(data):
    la, other = make().fit([data]), make()
    state = la.state_dict()
    other.load_state_dict(state)
    for key in ("statistic", "square_norms", "fingerprint", "prior_precision"):
        state[key].zero_()
    assert all(other.state_dict()[key].any() for key in ("statistic", "square_norms", "fingerprint", "prior_precision"))

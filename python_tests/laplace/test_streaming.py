"""The result of a fit depends on the data only: not on batches, chunks of columns, passes, or what the model was doing
before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda.laplace import KronLaplace, SecondMoment
from ella_cuda.laplace.likelihoods import Classification, Columns
from ella_cuda.nn import FactoredLinear2d
from ella_cuda.ops import _lapack


@pytest.fixture
def data():
    return torch.randn(7, 2, 4, 4, dtype=torch.float64), torch.randint(4, (7,))


@pytest.fixture
def model():
    conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    return nn.Sequential(
        conv, nn.ReLU(), FactoredLinear2d(3, 4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)
    ).double()


def assert_same(first: KronLaplace, second: KronLaplace) -> None:
    assert list(first.factors) == list(second.factors)
    for name, factor in first.factors.items():
        torch.testing.assert_close(factor.inputs, second.factors[name].inputs, rtol=1e-11, atol=1e-14, msg=name)
        torch.testing.assert_close(factor.outputs, second.factors[name].outputs, rtol=1e-11, atol=1e-14, msg=name)
    torch.testing.assert_close(first.log_marginal_likelihood(), second.log_marginal_likelihood(), rtol=1e-12, atol=0)
    assert first.n_data == second.n_data


def test_an_empty_batch_changes_nothing(model, data):
    x, y = data
    assert_same(KronLaplace(model).fit([(x[:0], y[:0]), (x, y)]), KronLaplace(model).fit([data]))


def test_adding_with_override_false(model, data, batches):
    first, second, third = batches(*data, 3)
    la = KronLaplace(model).fit([first])
    la.log_marginal_likelihood()  # eigenvalues of the first part must not survive
    la.fit([second], override=False).fit(iter([third]), override=False)
    assert_same(la, KronLaplace(model).fit([data]))


def test_override_starts_anew(model, data, batches):
    la = KronLaplace(model).fit(batches(*data, 3))
    la.log_marginal_likelihood()
    assert_same(la.fit([data]), KronLaplace(model).fit([data]))


def test_columns_of_many_classes_are_built_within_the_budget(monkeypatch):
    """Slices of them, never all; the factors are those of all at once."""
    sizes = []
    original = Columns.__getitem__
    monkeypatch.setattr(
        Columns, "__getitem__", lambda self, part: (out := original(self, part), sizes.append(out.numel()))[0]
    )
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 200)).double()  # a last layer alone needs none
    x, y = torch.randn(6, 3).double(), torch.randint(200, (6,))
    whole = KronLaplace(model).fit([(x, y)])
    assert sizes == [199 * 6 * 200]
    sizes.clear()
    parts = KronLaplace(model, memory_budget=1 << 20).fit([(x, y)])
    # A number takes 8 bytes of the result and 24 of temporaries, which is more than its gradients take in these layers.
    assert sum(sizes) == 199 * 6 * 200 and max(sizes) * 32 <= 1 << 20
    for ours, theirs in zip(parts.factors.values(), whole.factors.values(), strict=True):
        torch.testing.assert_close(ours.outputs, theirs.outputs)
    columns = Classification().columns(model(x).detach(), y)
    torch.testing.assert_close(torch.cat([columns[:7], columns[7:60], columns[60:]]), columns[:], rtol=0, atol=0)


def test_a_narrow_block_keeps_its_zero_eigenvalue():
    """Of softmax columns, which sum to zero over the classes but for the rounding of each number."""
    torch.manual_seed(0)
    f = 3 * torch.randn(2000, 10)
    columns = Classification().columns(f, torch.zeros(2000).long())[:].flatten(0, 1)
    moment = SecondMoment(1, 10, f, "head (output side)")
    for part in columns.split(1152):
        moment.add(part[:, None])
    values = torch.linalg.eigvalsh(moment.total[0])
    assert values[0].abs() < 1e-12 * values[-1]  # products of float32 leave 1e-8


def test_the_model_is_left_as_it_was(data):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    model[2].eval()
    model[4].bias.requires_grad_(False)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    KronLaplace(model).fit([data])
    assert [m.training for m in model] == [True, True, False, True, True]
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, False]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_the_model_is_left_as_it_was_after_an_error(model, data):
    with pytest.raises(ValueError, match="labels"):
        KronLaplace(model).fit([data, (data[0], data[1] + 9)])
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_blocks_are_decomposed_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(_lapack, "AT_ONCE_ON_CPU", 50)
    rows = torch.randn(9, 7, 4)
    moment = SecondMoment(7, 4, rows, "layer.weight (input side)")
    moment.add(rows)
    seen, eigvalsh = [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(a.numel() // 16) or eigvalsh(a))
    torch.testing.assert_close(moment.eigenvalues(), eigvalsh(moment.total.double()).clamp(min=0))
    assert seen == [3, 3, 1]

"""What is read from a model is read when it is used: a fit is about the parameters and layers that are there then."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import pytest
import torch
from torch import nn

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood, fingerprint
from ella_cuda.laplace.fingerprint import uneven_sum


def network():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def one_point():
    """One data point, where the Kronecker product is exact."""
    return torch.randn(1, 5, dtype=torch.float64), torch.tensor([1])


def by_hand(model, x, y, dense_ggn):
    """The evidence at precision 1 from dense blocks."""
    total = model(x).log_softmax(1)[0, y[0]].item()
    for name, block in dense_ggn(model, x, y).items():
        log_det = torch.logdet(block + torch.eye(len(block), dtype=block.dtype))
        total -= 0.5 * float(log_det + model.get_parameter(name).detach().square().sum())
    return total


def assign(model):
    model.load_state_dict({k: 3 * v + 1 for k, v in model.state_dict().items()}, assign=True)


def replace_parameter(model):
    model[0].weight = nn.Parameter(3 * model[0].weight.detach())


def replace_layer(model):
    model[2] = nn.Linear(4, 3).double()


def replace_by_another_size(model):
    model[0], model[2] = nn.Linear(5, 7).double(), nn.Linear(7, 3).double()


def replace_by_an_equal(model):
    """The factors hang on the layer's numbers."""
    model[2] = copy.deepcopy(model[2])


CHANGES = [replace_by_an_equal, assign, replace_parameter, replace_layer, replace_by_another_size]


@pytest.mark.parametrize("change", CHANGES)
def test_a_fit_is_of_the_present_parameters(change, dense_ggn):
    model, (x, y) = network(), one_point()
    la = KronLaplace(model)
    change(model)
    expected = by_hand(model, x, y, dense_ggn)
    assert math.isclose(la.fit([(x, y)]).log_marginal_likelihood().item(), expected, rel_tol=1e-9)
    assert math.isclose(exact_log_marginal_likelihood(la, x, y).item(), expected, rel_tol=1e-9)
    assert la.n_params == sum(p.numel() for p in model.parameters())
    assert la.memory_estimate() == KronLaplace(model).memory_estimate()
    change(model)
    assert math.isclose(la.log_marginal_likelihood().item(), expected, rel_tol=1e-9)  # until the next fit


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_added_to_a_fit_of_others(change):
    model, batch = network(), one_point()
    la = KronLaplace(model).fit([batch])
    change(model)
    with pytest.raises(ValueError, match="layers or parameters changed since the fit"):
        la.fit([batch], override=False)


@pytest.mark.parametrize("start", [True, False])
def test_other_trainable_parameters_than_there_are_precisions_for_are_refused(start):
    model, batch = network(), one_point()
    model[0].requires_grad_(start)
    la = KronLaplace(model)
    model[0].requires_grad_(not start)
    message = rf"0\.weight, 0\.bias are {'gone or frozen' if start else 'new or unfrozen'}\. Make a new KronLaplace"
    with pytest.raises(ValueError, match=message):
        la.fit([batch])
    with pytest.raises(ValueError, match=message):
        exact_log_marginal_likelihood(la, *batch)
    model[0].requires_grad_(start)
    la.fit([batch])


def test_hyperparameters_are_named():
    """laplace-torch's third positional argument is sigma_noise."""
    with pytest.raises(TypeError, match="positional"):
        KronLaplace(network(), "regression", 0.5)


# ---- modes ----


class Expanding(nn.Module):
    """A frozen layer that keeps its filter while it is evaluated."""

    def __init__(self):
        super().__init__()
        self.register_buffer("basis", torch.randn(4, 4, dtype=torch.float64))

    def train(self, mode=True):
        if mode:
            self._buffers.pop("filter", None)
        elif self.training:
            self.register_buffer("filter", self.basis.square())
        return super().train(mode)

    def forward(self, x):
        return x @ (self.basis.square() if self.training else self.filter)


class Frozen(nn.BatchNorm1d):
    """Whose statistics never move."""

    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize("modes", [(True, True), (True, False), (False, True), (False, False)])
def test_modes_are_put_back_by_train(modes):
    expanding, frozen = Expanding(), Frozen(4, affine=False).double()
    model = nn.Sequential(nn.Linear(5, 4).double(), nn.Sequential(expanding, frozen), nn.Linear(4, 3).double())
    model.train(modes[0])
    expanding.train(modes[1])
    before = [(m, m.training) for m in model.modules()], list(model.state_dict())
    KronLaplace(model).fit([(torch.randn(6, 5).double(), torch.randint(3, (6,)))])
    assert ([(m, m.training) for m in model.modules()], list(model.state_dict())) == before


class Stubborn(nn.Linear):
    """Whose train() changes nothing once it was put into a mode by hand."""

    def train(self, mode=True):
        return self


def test_a_mode_that_train_does_not_set_is_set():
    model = nn.Sequential(Stubborn(5, 4), nn.Linear(4, 3)).double()
    stubborn = model[0]
    stubborn.requires_grad_(False)
    model.register_forward_hook(lambda *_: setattr(stubborn, "training", False))
    KronLaplace(model).fit([(torch.randn(6, 5).double(), torch.randint(3, (6,)))])
    assert stubborn.training


def test_fits_of_one_model_by_two_threads_wait_for_each_other():
    model, evidence = network(), []
    batches = [(torch.randn(8, 5).double(), torch.randint(3, (8,))) for _ in range(5)]
    expected = KronLaplace(model).fit(batches).log_marginal_likelihood().item()

    def fit():
        for _ in range(10):
            evidence.append(KronLaplace(model).fit(batches).log_marginal_likelihood().item())

    threads = [threading.Thread(target=fit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(evidence) == 30 and set(evidence) == {expected}
    assert all(m.training for m in model.modules()) and all(p.requires_grad for p in model.parameters())


def test_a_shallow_copy_has_sums_of_its_own():
    model, batch = network(), one_point()
    la = KronLaplace(model).fit([batch])
    before = la.factors["0.weight"].outputs.clone()
    other = copy.copy(la)
    assert other.model is model
    other.fit([batch], override=False)
    assert other.n_data == 2 and la.n_data == 1
    torch.testing.assert_close(la.factors["0.weight"].outputs, before, rtol=0, atol=0)
    torch.testing.assert_close(other.factors["0.weight"].outputs, 2 * before)


def test_fits_of_several_threads_leave_the_compiler_as_it_was():
    """The stance is the process': one fit begins while another runs, and ends after it."""
    from torch._dynamo import eval_frame

    seen, first_runs, second_runs, first_ended = [], threading.Event(), threading.Event(), threading.Event()

    class Loader:
        def __init__(self, began, until):
            self.began, self.until = began, until

        def __iter__(self):
            yield torch.randn(4, 5).double(), torch.randint(3, (4,))
            self.began.set()
            assert self.until.wait(60)
            seen.append(eval_frame._stance.stance)

    before = eval_frame._stance
    threads = [
        threading.Thread(
            target=lambda: (KronLaplace(network()).fit(Loader(first_runs, second_runs)), first_ended.set())
        ),
        threading.Thread(target=lambda: KronLaplace(network()).fit(Loader(second_runs, first_ended))),
    ]
    threads[0].start()
    assert first_runs.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert seen == ["force_eager", "force_eager"]
    assert eval_frame._stance == before


def test_factors_pickle_and_are_the_callers_own():
    la = KronLaplace(network()).fit([one_point()])
    again = pickle.loads(pickle.dumps(la.factors))
    for name, factor in la.factors.items():
        torch.testing.assert_close(again[name].outputs[0], factor.outputs[0], rtol=0, atol=0)
    la.factors.clear()
    assert list(la.factors) == list(again)


@pytest.mark.parametrize("shape", [(800, 500), (3, 5), (0, 4)])
def test_the_sum_that_sees_changes_has_all_elements(shape):
    values = torch.randn(shape, dtype=torch.float64)
    weights = [0.5 + 0.6180339887498949 * i % 1 for i in range(1, values.numel() + 1)]
    expected = math.fsum(w * v for w, v in zip(weights, values.flatten().tolist(), strict=True))
    torch.testing.assert_close(uneven_sum(values).item(), expected, rtol=1e-9, atol=1e-9)


def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.data.clone()
    one.data.copy_(other.data)
    other.data.copy_(kept)


CHANGES = {
    "two layers swapped": lambda m: swapped(m[0].weight, m[1].weight),
    "rows swapped": lambda m: swapped(m[1].weight[0], m[1].weight[1]),
    "another sign": lambda m: m[1].bias.data.neg_(),
    "little": lambda m: m[0].bias.data[2].add_(1e-9),
    "two statistics swapped": lambda m: swapped(m[2].running_mean, m[2].running_var),
    "a large buffer": lambda m: m.table.mul_(1.0 + 1e-6),
    "a frozen row that is looked up": lambda m: m[3].weight.data[1].mul_(0.5),
}


@pytest.mark.parametrize("at_once", [1, 50, 1 << 22])
def test_what_moves_the_fingerprint(at_once, monkeypatch):
    monkeypatch.setattr(fingerprint, "AT_ONCE", at_once)
    monkeypatch.setattr(fingerprint, "SMALL", 20)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Embedding(3, 4, max_norm=1e3)
    ).double()
    model[2].running_mean.normal_()
    model.register_buffer("table", torch.randn(5, 5, dtype=torch.float64), persistent=False)
    for change in CHANGES.values():
        other = copy.deepcopy(model)
        change(other)
        before, after = (fingerprint.fingerprint_of(m).item() for m in (model, other))
        assert before == fingerprint.fingerprint_of(copy.deepcopy(model)).item()
        assert abs(after - before) > 2e-12 * abs(before)
        assert fingerprint.filled_since(other, fingerprint.buffer_sums(model)) <= {
            "2.running_mean",
            "2.running_var",
            "table",
        }
    with torch.inference_mode():
        assert fingerprint.fingerprint_of(model) == before
    assert fingerprint.fingerprint_of(model, {"table"}) != before

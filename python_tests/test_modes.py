"""Threads that change parts of one model take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.modes import evaluation_mode, exclusively


def same(model: nn.Sequential) -> nn.Module:
    return model


def compiled(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")


def another_head(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(model[0], nn.Flatten(), nn.Linear(16, 4))


def tied(model: nn.Sequential) -> nn.Module:
    """Modules of its own with the same parameters."""
    other = network()
    for mine, theirs in zip(other[0], model[0], strict=True):
        for name, parameter in theirs.named_parameters(recurse=False):
            setattr(mine, name, parameter)
    return other


def network() -> nn.Sequential:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).requires_grad_(False), nn.ReLU())
    return nn.Sequential(backbone, nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize("view", [same, compiled, another_head, tied])
def test_fits_of_models_that_share_parts_take_turns(view):
    """While one has yielded its first batch, the other begins; it ends first if nothing holds it back."""
    model = network()
    models = model, view(model)
    x, y = torch.randn(8, 3, 4, 4), torch.arange(8) % 4
    first_runs, second_done = threading.Event(), threading.Event()

    def evidence(model: nn.Module, loader) -> float:
        return float(KronLaplace(model).fit(loader).log_marginal_likelihood())

    def slow() -> Iterator[tuple[Tensor, Tensor]]:
        yield x, y
        first_runs.set()
        assert not second_done.wait(0.3), "the other fit did not wait"
        yield x, y

    alone = [evidence(models[0], [(x, y)] * 2), evidence(models[1], [(x, y)])]
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(evidence, models[0], slow())
        assert first_runs.wait(60)
        other = pool.submit(evidence, models[1], [(x, y)])
        other.add_done_callback(lambda _: second_done.set())
        assert [one.result(60), other.result(60)] == alone
    for module in models:
        assert all(m.training for m in module.modules())
        assert [p.requires_grad for p in module.parameters()] == [True, True, False, False, True, True]


def test_a_loader_may_fit_a_model_that_shares_parts():
    """In the thread that has them; it does not wait for itself."""
    model = network()
    sharing = nn.Sequential(model[0][1], nn.Flatten(), nn.Linear(16, 5))
    x, y, features = torch.randn(8, 3, 4, 4), torch.arange(8) % 5, torch.randn(8, 4, 2, 2)

    def evidence(model: nn.Module, loader) -> float:
        return float(KronLaplace(model).fit(loader).log_marginal_likelihood())

    alone = [evidence(sharing, [(features, y)]), evidence(model, [(x, y)])]
    found = []

    def fitting() -> Iterator[tuple[Tensor, Tensor]]:
        found.append(evidence(sharing, [(features, y)]))
        yield x, y

    with ThreadPoolExecutor(1) as pool:
        found.append(pool.submit(evidence, model, fitting()).result(60))
    assert found == alone


def test_threads_that_want_parts_in_another_order_do_not_wait_for_each_other():
    """One has a part and wants another; the other wants both, and holds none meanwhile, whatever their order."""
    parts = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for first, second in (parts, parts[::-1]):
        both, wanted = nn.ModuleList([first, second]), threading.Event()

        def take(model: nn.Module = both, wanted: threading.Event = wanted) -> bool:
            wanted.set()
            with exclusively(model):
                return True

        with ThreadPoolExecutor(1) as pool:
            with exclusively(first):
                other = pool.submit(take)
                assert wanted.wait(60)
                with pytest.raises(TimeoutError):
                    other.result(0.1)
                with exclusively(second):
                    assert not other.done()
            assert other.result(60)


def test_evaluation_mode_is_one_threads_at_a_time():
    model, begun = network(), threading.Event()

    def evaluate() -> bool:
        begun.set()
        with evaluation_mode(model[0]):
            return model[2].training

    with ThreadPoolExecutor(1) as pool:
        with evaluation_mode(model):
            other = pool.submit(evaluate)
            assert begun.wait(60)
            with pytest.raises(TimeoutError):
                other.result(0.1)
        assert other.result(60)
    assert all(m.training for m in model.modules())

"""The parameters that precisions belong to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader


def exchange(model: nn.Module) -> None:
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)


def freeze(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


def add(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("change", "name"),
    [(exchange, "0.weight"), (freeze, "0.bias"), (add, "1.weight")],
    ids=["exchange", "freeze", "add"],
)
@pytest.mark.parametrize("objective", ["evidence", "map"])
def test_parameters_that_change_hands_in_training_are_refused(change, name, objective):
    model, loader = nn.Sequential(nn.Linear(5, 3)), TensorLoader(torch.randn(12, 5), torch.arange(12) % 3, 6)

    def at_two(evaluation) -> None:
        if evaluation.epoch == 2:
            change(model)

    with pytest.raises(ValueError, match=f"stay those that training began with, but '{name}' was exchanged"):
        marglik_training(model, loader, n_epochs=4, objective=objective, on_evaluation=at_two, progress_bar=False)


def test_values_may_change_in_training():
    model, loader = nn.Sequential(nn.Linear(5, 3)), TensorLoader(torch.randn(12, 5), torch.arange(12) % 3, 6)

    def zero(evaluation) -> None:
        model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()})

    marglik_training(model, loader, n_epochs=2, on_evaluation=zero, progress_bar=False)
    assert not any(p.any() for p in model.parameters())

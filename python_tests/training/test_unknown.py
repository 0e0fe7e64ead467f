"""Training of networks with parameters that no curvature rule knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader

ARGUMENTS = {"n_epochs": 4, "marglik_frequency": 2, "progress_bar": False, "prior_prec_init": 5.0}


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.idle = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.ones(2, 2))
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.inner(h).tanh().mean(1)) + 0 * self.idle.sum()


def train(unknown: str, **arguments: object) -> tuple:
    torch.manual_seed(0)
    model = Tagged()
    x, y = torch.randn(24, 3, 4), torch.arange(24) % 3
    loader = TensorLoader(x, y, batch_size=8)
    return marglik_training(model, loader, unknown=unknown, **{**ARGUMENTS, **arguments})


def test_left_out_parameters_are_trained_without_a_prior():
    la, model, margliks, _ = train("freeze")
    assert len(margliks) == 2 and la.parameter_names == ["inner.weight", "inner.bias", "head.weight", "head.bias"]
    assert model.token.abs().min() > 0, "the data loss moves it"
    assert torch.equal(model.idle, torch.ones(2, 2)), "and no prior draws it to zero"


def test_those_with_a_diagonal_have_a_prior():
    la, model, _, _ = train("diagonal")
    assert la.parameter_names[:2] == ["token", "idle"] and len(la.prior_precision) == 6
    assert (model.idle < 1).all()
    assert la.effective_parameters()["idle"] == 0
    assert la.prior_precision[1] < 5

"""Agreement with laplace-torch on a convolutional network.

Conventions that differ: laplace-torch (through curvlinops or ASDL) scales A by 1/(N T) and leaves B a plain sum, T the
number of shared positions, where ours has A by 1/N and B by 1/T: the same product. Its bias block is the weight's B,
ours the exact GGN block, so biases are left out. It unfolds ``padding_mode="circular"`` with zeros, so the padding is
an explicit layer here.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.laplace import KronLaplace

laplace = pytest.importorskip("laplace", exc_type=ImportError)


class CircularPad(nn.Module):
    def forward(self, x):
        return F.pad(x, (1, 1, 1, 1), mode="circular")


def network(explicit: bool) -> nn.Sequential:
    def conv(c, d, stride):
        if explicit:
            return nn.Sequential(CircularPad(), nn.Conv2d(c, d, 3, stride=stride, bias=False))
        return nn.Sequential(
            nn.Identity(), nn.Conv2d(c, d, 3, stride=stride, padding=1, padding_mode="circular", bias=False)
        )

    layers = [conv(2, 4, 1), nn.ReLU(), conv(4, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(20, 6, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 4, bias=False)).double()


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit padding", "padding_mode"])
def test_factors_and_evidence(explicit, batches):
    theirs_model, model = network(True), network(explicit)
    model.load_state_dict(theirs_model.state_dict())
    x, y = torch.randn(24, 2, 4, 4, dtype=torch.float64), torch.randint(4, (24,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    theirs = laplace.KronLaplace(theirs_model, "classification")
    theirs.fit(loader)
    la = KronLaplace(model).fit(loader)

    decomposed = theirs.H_facs.kfacs if hasattr(theirs, "H_facs") else theirs.H.kfacs
    assert len(decomposed) == len(la.factors)
    for factor, sides in zip(la.factors.values(), decomposed, strict=True):
        b, a = sides  # output side first
        ours = torch.kron(factor.outputs[0], factor.inputs[0])
        torch.testing.assert_close(ours, torch.kron(b.double(), a.double()), rtol=1e-6, atol=1e-10)
    for precision in (0.1, 1.0, 30.0):
        expected = theirs.log_marginal_likelihood(torch.tensor(precision, dtype=torch.float64)).detach()
        torch.testing.assert_close(la.log_marginal_likelihood(precision), expected.double(), rtol=1e-7, atol=0)

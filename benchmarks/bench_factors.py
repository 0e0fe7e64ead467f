"""Kronecker factors of the CONV network and their evidence, on 1,000 images, on a GPU on 50,000: ours and laplace-torch's, on curvlinops
and on ASDL (asdfghjkl 0.1a4); exact, and from one sampled column.

laplace-torch decomposes the factors at the end of a fit, we when the evidence is asked for; so both do both. The peers unfold
``padding_mode="circular"`` with zeros (ASDL 0.1a4 does not know ``padding="same"`` at all), so they get the same network with an
explicit padding layer, for which they are right; the factors are compared on a few images first. Biases are left out there:
laplace-torch takes the weight's output factor for them.

BackPACK 1.7.1 cannot: its KFLR and KFAC raise NotImplementedError for layers they have no rule for, and they have none that pads
circularly or chooses a polyphase component.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from benchmarks.counting import count
from ella_cuda import models
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import CircularConv2d, PolyphasePool2d, StridedCircularConv2d
from ella_cuda.testing import float32_convolutions

IMAGES, BATCH = {"cpu": 1000, "cuda": 50_000}, {"cpu": 125, "cuda": 1000}
WIDTH, CLASSES = 10, 10
PEERS = {"laplace-torch, curvlinops": "CurvlinopsGGN", "laplace-torch, ASDL": "AsdlGGN"}


class CircularPad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (1, 1, 1, 1), mode="circular")


def explicit_padding(model: nn.Module) -> nn.Module:
    """A copy in torch's own convolutions, each after a padding layer, and polyphase sampling where a stage halves the size."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, (CircularConv2d, StridedCircularConv2d)):
                conv = nn.Conv2d(child.in_channels, child.out_channels, child.kernel_size, device=child.weight.device)
                conv.load_state_dict(child.state_dict())
                pool = [PolyphasePool2d(child.norm)] if isinstance(child, StridedCircularConv2d) else []
                setattr(parent, name, nn.Sequential(CircularPad(), conv, *pool))
    return model


@pytest.fixture(scope="module")
def problem(device):
    torch.manual_seed(0)
    model = models.neyshabur("conv", 3, CLASSES, WIDTH).to(device)
    count = IMAGES[device.type]
    x = torch.randn(count, 3, 32, 32, device=device)
    y = torch.randint(CLASSES, (count,), device=device)
    return model, x, y


def batches(x: torch.Tensor, y: torch.Tensor, size: int) -> DataLoader:
    """A loader as laplace-torch wants it that takes a batch out of the tensors at once, not image by image."""
    data = TensorDataset(x, y)
    return DataLoader(data, sampler=BatchSampler(SequentialSampler(data), size, drop_last=False), batch_size=None)


def log_determinants(la, model: nn.Module) -> list[torch.Tensor]:
    """``log|A x B + I|`` of every weight, ours or laplace-torch's."""
    if isinstance(la, KronLaplace):
        one = torch.ones((), device=next(model.parameters()).device)
        return [f.logdet(one) for n, f in la.factors.items() if n.endswith("weight")]
    sides = [s for s, p in zip(la.H.eigenvalues, la.params, strict=True) if p.dim() > 1]
    return [torch.log1p(torch.outer(*(v.double() for v in values))).sum() for values in sides]


@pytest.mark.parametrize("fisher", ["exact", "mc"])
@pytest.mark.parametrize("who", ["ella_cuda", *PEERS])
def test_factors_of_the_convolutional_network(time, problem, device, who, fisher):
    ours, x, y = problem
    if who == "ella_cuda":
        model = ours

        def laplace(fisher):
            return KronLaplace(model, fisher=fisher)
    else:
        peer = pytest.importorskip("laplace", reason="laplace-torch is not installed")
        backend = getattr(peer.curvature, PEERS[who], None)
        if backend is None:
            pytest.skip(f"laplace-torch has no {PEERS[who]} here")
        model = explicit_padding(ours)

        def laplace(fisher):
            sampled = {"stochastic": fisher == "mc"}
            return peer.KronLaplace(model, "classification", backend=backend, backend_kwargs=sampled)

    few = batches(x[:20], y[:20], 10)
    found, expected = laplace("exact"), KronLaplace(ours)
    with float32_convolutions():
        found.fit(few)
        expected.fit(few)
    wanted = log_determinants(expected, ours)
    assert len(wanted) == 10
    for theirs, value in zip(log_determinants(found, model), wanted, strict=True):
        torch.testing.assert_close(theirs, value, rtol=1e-3, atol=1e-3)

    loader = batches(x, y, BATCH[device.type])

    def evidence() -> None:
        la = laplace(fisher)
        la.fit(loader)
        assert torch.isfinite(la.log_marginal_likelihood())

    columns = CLASSES - 1 if fisher == "exact" else 1
    time(
        evidence,
        work=f"factors + evidence of CONV, {len(x):,} images{', sampled' if fisher == 'mc' else ''}",
        who=who,
        flops=len(x) * count(ours, x[:1]).fit(columns),
        bytes=0,
        rounds=3,
        once=device.type == "cuda" and who != "ella_cuda",
        warmups=0,
    )

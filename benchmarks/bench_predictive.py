"""Predictions with error bars: covariances of all outputs under the posterior of Kronecker factors, ours and laplace-torch's.

laplace-torch writes every data point's Jacobian in all parameters out and multiplies it by the eigenvectors; it gets few images, from which
its time is extrapolated to all, and its memory is that of these few. Both have the eigenvectors of their factors before: of a fit to a few
images from one sampled column, since what they are does not change the work. Norms are frozen for both, which laplace-torch has no
factors for.
"""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from benchmarks.bench_factors import batches, explicit_padding
from benchmarks.counting import count
from ella_cuda import models
from ella_cuda.laplace import KronLaplace

CLASSES = 10
# network: images, images that laplace-torch gets, and how many of these at a time
SIZES = {"conv": (1000, 20, 20), "f_fc+conv": (1000, None, None), "resnet18": (100, 1, 1)}
TITLES = {"conv": "CONV", "f_fc+conv": "F-FC+CONV", "resnet18": "resnet18, 32x32"}


def network(name: str) -> nn.Module:
    if name != "resnet18":
        return models.neyshabur(name, 3, CLASSES, 10).eval()
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model.eval()


@pytest.mark.parametrize("who", ["ella_cuda", "laplace-torch, curvlinops"])
@pytest.mark.parametrize("name", SIZES)
def test_predictive(time, device, name, who):
    images, few, at_once = SIZES[name]
    if few is None and who != "ella_cuda":
        pytest.skip("laplace-torch has no factors for F-FC layers")
    model = network(name).to(device)
    x = torch.randn(images, 3, 32, 32, device=device)
    y = torch.randint(CLASSES, (images,), device=device)
    loader = batches(x[:8], y[:8], 8)
    ours = KronLaplace(model, fisher="mc", prior_precision=1.0).fit(loader)
    if who == "ella_cuda":
        la = ours
        la.functional_variance(x[:1])  # decomposes the factors

        def predict() -> torch.Tensor:
            return la.functional_variance(x)

        extra = {}
    else:
        peer = pytest.importorskip("laplace", reason="laplace-torch is not installed")
        model = explicit_padding(model) if name == "conv" else model
        la = peer.KronLaplace(model, "classification", backend=peer.curvature.CurvlinopsGGN)
        la.fit(loader)

        def predict() -> torch.Tensor:
            parts = [la.functional_variance(la.backend.jacobians(part)[0]).detach() for part in x[:few].split(at_once)]
            return torch.cat(parts)

        scale = images / few
        extra = {"extrapolation": {"seconds": scale, "bytes": 1, "note": f"{few} of {images} images"}}
    found = predict()
    assert found.isfinite().all()
    assert found.shape[1:] == (CLASSES, CLASSES)
    time(
        predict,
        work=f"covariances of {images} images, {TITLES[name]}",
        who=who,
        flops=images * count(network(name), x[:1].cpu()).predict(CLASSES),
        bytes=0,
        once=True,
        **extra,
    )

"""Predictions with error bars: covariances of all outputs under the posterior of Kronecker factors, ours and laplace-torch's.

laplace-torch writes every data point's Jacobian in all parameters out and multiplies it by the eigenvectors; it gets few images, from which
its time is extrapolated to all, and its memory is that of these few. Memory is that of a process of its own, in ours of as many images as
more do not change: they go through the network some at a time. Both have the eigenvectors of their factors before: of a fit to a few
images from one sampled column, since what they are does not change the work. Norms are frozen for both, which laplace-torch has no
factors for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.bench_factors import batches, explicit_padding
from benchmarks.counting import count
from benchmarks.memory import in_a_process, peak_bytes
from benchmarks.torchvision_networks import small_resnet18
from ella_cuda import models
from ella_cuda.laplace import KronLaplace

CLASSES, OURS, PEER = 10, "ella_cuda", "laplace-torch, curvlinops"
GPU = 10  # times as many images there
# network: images, images that laplace-torch gets, and how many of these at a time
SIZES = {"conv": (1000, 20, 20), "f_fc+conv": (1000, None, None), "resnet18": (100, 1, 1)}
WATCHED = {"conv": 200, "f_fc+conv": 200, "resnet18": 12}
TITLES = {"conv": "CONV", "f_fc+conv": "F-FC+CONV", "resnet18": "resnet18, 32x32"}


def network(name: str) -> nn.Module:
    if name != "resnet18":
        return models.neyshabur(name, 3, CLASSES, 10).eval()
    model = small_resnet18()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model.eval()


def predictor(name: str, who: str, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives the covariances of images; its factors are decomposed."""
    torch.manual_seed(0)
    model = network(name).to(device)
    x = torch.randn(8, 3, 32, 32, device=device)
    loader = batches(x, torch.randint(CLASSES, (8,), device=device), 8)
    if who == OURS:
        la = KronLaplace(model, fisher="mc", prior_precision=1.0).fit(loader)
        la.functional_variance(x[:1])
        return la.functional_variance
    peer = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    model = explicit_padding(model) if name == "conv" else model
    la = peer.KronLaplace(model, "classification", backend=peer.curvature.CurvlinopsGGN)
    la.fit(loader)
    at_once = SIZES[name][2]
    return lambda x: torch.cat([la.functional_variance(la.backend.jacobians(p)[0]).detach() for p in x.split(at_once)])


@pytest.mark.parametrize("who", [OURS, PEER])
@pytest.mark.parametrize("name", SIZES)
def test_predictive(time, device, threads, name, who):
    images, few, _ = SIZES[name]
    if device.type == "cuda":
        images, few = GPU * images, few and GPU * few
    if few is None and who != OURS:
        pytest.skip("laplace-torch has no factors for F-FC layers")
    predict = predictor(name, who, device)
    x = torch.randn(images if who == OURS else few, 3, 32, 32, device=device)
    found = predict(x)
    assert found.isfinite().all()
    assert found.shape == (len(x), CLASSES, CLASSES)
    extra = {}
    if who != OURS:
        extra = {"extrapolation": {"seconds": images / few, "bytes": 1, "note": f"{few} of {images} images"}}
    if device.type == "cpu":
        extra["peak"] = lambda: in_a_process("benchmarks.bench_predictive", name, who, str(threads))
    time(
        lambda: predict(x),
        work=f"covariances of {images} images, {TITLES[name]}",
        who=who,
        flops=images * count(network(name), x[:1].cpu()).predict(CLASSES),
        bytes=0,
        once=True,
        **extra,
    )


if __name__ == "__main__":
    name, who, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    watched = predictor(name, who, torch.device("cpu"))
    images = torch.randn(WATCHED[name] if who == OURS else SIZES[name][2], 3, 32, 32)
    print(json.dumps(peak_bytes(lambda: watched(images), torch.device("cpu"), once=True)))

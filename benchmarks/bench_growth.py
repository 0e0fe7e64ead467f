"""How a fit of F-FC+CONV grows with the number of images and of outputs: time, and peak memory with all that a fit allocates.

Time is to be linear in both, memory constant in the images. In the outputs it is bounded by the column budget, beyond which the
columns of the output Hessian go back through the network in several passes; the other candidate sends all of them at once. The
network is at its start, where every column counts. ``benchmarks.compare`` prints the exponents. On a GPU there are 125 times the
images, 50,000 at the most, in batches 40 times as large.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.counting import count
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import neyshabur
from ella_cuda.testing import float32_convolutions

WIDTH, BATCH, CLASSES = 10, 25, 10
BUDGETS = {"ella_cuda": None, "all columns at once": 1 << 60}


def batch_size(device):
    return BATCH * (40 if device.type == "cuda" else 1)


def measure(time, device, images, outputs, who, **series):
    x = torch.randn(images, 3, 32, 32, device=device)
    y = torch.randint(outputs, (images,), device=device)
    model = neyshabur("f_fc+conv", 3, outputs, WIDTH).to(device)
    loader = TensorLoader(x, y, batch_size(device))
    with float32_convolutions():
        same = [KronLaplace(model, memory_budget=b).fit([(x[:5], y[:5])]).factors for b in (BUDGETS[who], 1)]
    for name, factor in same[0].items():
        expected = same[1][name].outputs
        torch.testing.assert_close(factor.outputs, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    del same, factor, expected
    time(
        lambda: KronLaplace(model, memory_budget=BUDGETS[who]).fit(loader),
        work=f"{series['of']}, {series['size']} {series['in']}",
        who=who,
        flops=images * count(model, x[:1]).fit(outputs - 1),
        bytes=0,
        rounds=2,
        warmups=0,
        series=series,
    )


@pytest.mark.parametrize("images", [50, 100, 200, 400])
def test_images(time, device, images):
    images *= 125 if device.type == "cuda" else 1
    series = {"of": "fit of F-FC+CONV, 10 outputs", "in": "images", "size": images}
    measure(time, device, images, CLASSES, "ella_cuda", **series)


@pytest.mark.parametrize("who", BUDGETS)
@pytest.mark.parametrize("outputs", [10, 20, 40, 80])
def test_outputs(time, device, outputs, who):
    images = 2 * batch_size(device)
    series = {"of": f"fit of F-FC+CONV, {images} images", "in": "outputs", "size": outputs}
    measure(time, device, images, outputs, who, **series)

"""The network of the deep image prior: sizes and parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ella_cuda.tomography import UNet, filter_blocks


def test_the_papers_network_has_its_parameters_and_blocks():
    network = UNet()
    assert sum(p.numel() for p in network.parameters()) == 76_905
    blocks = filter_blocks(network)
    assert list(blocks) == [
        "inc 3x3",
        "down.0 3x3",
        "down.1 3x3",
        "up.0 1x1",
        "up.0 3x3",
        "up.1 1x1",
        "up.1 3x3",
        "outc 1x1",
    ]
    assert blocks["up.1 3x3"] == ["up.1.convs.0.weight", "up.1.convs.2.weight"]
    weights = {n for n, p in network.named_parameters() if p.dim() == 4}
    assert {name for members in blocks.values() for name in members} == weights


@pytest.mark.parametrize("size", [(28, 28), (7, 9), (4, 4)])
def test_outputs_have_the_inputs_size_whatever_it_is(size):
    network = UNet(in_channels=2, channels=4, skip_channels=(0, 0, 2))
    found = network(torch.randn(2, 2, *size))
    assert found.shape == (2, 1, *size) and found.min() > 0 and found.max() < 1
    assert UNet(channels=2, sigmoid=False)(1e4 * torch.randn(1, 1, *size)).abs().max() > 1
    assert not any(isinstance(m, (nn.GroupNorm, nn.BatchNorm2d)) for m in network.modules())


def test_outputs_are_those_of_its_layers_one_by_one():
    torch.manual_seed(0)
    network = UNet(channels=3, scales=2, skip_channels=(0, 2)).double()
    weights, x = dict(network.named_parameters()), torch.randn(1, 1, 6, 9, dtype=torch.float64)

    def conv(x, name, **options):
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], **options)

    def active(x, name, stride=1):
        x = conv(x, name, stride=stride, padding=1)
        return torch.where(x > 0, x, 0.2 * x)

    fine = active(x, "inc.0")
    coarse = active(active(fine, "down.0.convs.0", stride=2), "down.0.convs.2")
    assert coarse.shape == (1, 3, 3, 5)
    # Bilinear, corners on corners.
    grid = torch.meshgrid(torch.linspace(-1, 1, 6), torch.linspace(-1, 1, 9), indexing="ij")
    at = torch.stack([grid[1], grid[0]], -1)[None].double()
    raised = F.grid_sample(coarse, at, mode="bilinear", align_corners=True, padding_mode="border")
    joined = torch.cat([raised, conv(fine, "up.0.skip")], 1)
    expected = conv(active(active(joined, "up.0.convs.0"), "up.0.convs.2"), "outc").sigmoid()
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": 0}, "channels must be a positive integer, got 0"),
        ({"scales": 0}, "scales must be a positive integer, got 0"),
        ({"skip_channels": (0, 4)}, "skip_channels must be 3 numbers"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        UNet(**options)

"""Small networks made of torchvision's parts: what has an exact block is compared with Jacobians of torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torchvision import models

from ella_cuda.laplace import KronLaplace
from python_tests.laplace.checks import Function

CLASSES, IMAGES = 3, 2


def resnet() -> nn.Module:
    whole = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1, *head)


def bottlenecks() -> nn.Module:
    block = models.resnet.Bottleneck(16, 4, downsample=None)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 4), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


def vgg() -> nn.Module:
    features = models.vgg.make_layers([4, "M", 8, "M"], batch_norm=True)
    head = nn.Linear(32, 6), nn.ReLU(True), nn.Dropout(), nn.Linear(6, CLASSES)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *head)


def mobilenet() -> nn.Module:
    setting = [
        models.mobilenetv3.InvertedResidualConfig(8, 3, 12, 8, True, "RE", 2, 1, 1.0),
        models.mobilenetv3.InvertedResidualConfig(8, 5, 16, 8, True, "HS", 1, 1, 1.0),
    ]
    return models.MobileNetV3(setting, 16, num_classes=CLASSES)


def efficientnet() -> nn.Module:
    setting = [models.efficientnet.MBConvConfig(2, 3, 2, 8, 8, 1, 1.0, 1.0)]
    return models.EfficientNet(setting, dropout=0.2, num_classes=CLASSES, last_channel=16)


def densenet() -> nn.Module:
    return models.DenseNet(4, (2, 2), 8, num_classes=CLASSES)


def convnext() -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(8, 12, 1), block(12, None, 1)], layer_scale=0.5, num_classes=CLASSES)


def vit() -> nn.Module:
    return models.VisionTransformer(16, 8, 2, 2, 8, 12, num_classes=CLASSES)


def swin(block: type | None = None, depth: int = 1) -> nn.Module:
    """Whose attention takes the weights of its linear layers by functions, on windows that are folded into the batch."""
    merging = {"downsample_layer": models.swin_transformer.PatchMergingV2} if block else {}
    return models.SwinTransformer([4, 4], 8, [depth, 1], [2, 2], [2, 2], num_classes=CLASSES, block=block, **merging)


def unet() -> nn.Module:
    """Two scales, with transposed convolutions on the way up."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.down(x)
        h = torch.cat([h, m.up(m.inner(h).relu())], 1)
        return m.head(m.last(h).sigmoid().mean((2, 3)))

    down = {
        "down": nn.Conv2d(3, 6, 3, 2, 1),
        "inner": nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 6, 3, 2, 1)),
    }
    up = {"up": nn.ConvTranspose2d(6, 6, 4, 2, 1), "last": nn.ConvTranspose2d(12, 4, 2, 2), "head": nn.Linear(4, CLASSES)}  # fmt: skip
    return Function(forward, **down, **up)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (resnet, 16),
    "bottlenecks": (bottlenecks, 16),
    "vgg": (vgg, 8),
    "mobilenet": (mobilenet, 16),
    "efficientnet": (efficientnet, 16),
    "densenet": (densenet, 32),
    "convnext": (convnext, 32),
    "vit": (vit, 16),
    "swin": (swin, 32),
    "swin, shifted": (lambda: swin(depth=2), 32),
    "swin v2": (lambda: swin(models.swin_transformer.SwinTransformerBlockV2), 32),
    "U-Net": (unet, 8),
}


def at_test_time(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().double().eval()
    for name, p in model.named_parameters():
        nn.init.normal_(p, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            nn.init.uniform_(buffer, 0.5, 1.5)
    return model


@pytest.fixture(params=NETWORKS)
def network(request) -> tuple[nn.Module, Tensor, Tensor]:
    build, side = NETWORKS[request.param]
    model = at_test_time(build)
    return model, torch.randn(IMAGES, 3, side, side, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))


def test_every_parameter_has_its_block_and_the_exact_ones_are_right(network):
    model, x, y = network
    la = KronLaplace(model, unknown="diagonal").fit([(x, y)])
    assert la.parameter_names == [name for name, _ in model.named_parameters()]
    assert la.log_marginal_likelihood().isfinite()
    blocks = {line.split()[0]: line.split()[-1] for line in la.summary().splitlines()[1:-1]}
    whole = {n: p.detach() for n, p in model.named_parameters() if blocks[n] != "Kronecker"}
    assert any(kind == "Kronecker" for kind in blocks.values()) and len(whole) > 2
    dense = {name: torch.zeros(p.numel(), p.numel(), dtype=p.dtype) for name, p in whole.items()}
    for one in x:

        def outputs(values: dict[str, Tensor], one: Tensor = one) -> Tensor:
            return functional_call(model, values, (one[None],))[0]

        p = outputs(whole).softmax(0)
        hessian = p.diag() - p[:, None] * p
        for name, jacobian in jacrev(outputs)(whole).items():
            dense[name] += jacobian.flatten(1).T @ hessian @ jacobian.flatten(1)
    for name, expected in dense.items():
        found = la.factors[name].to_dense()
        if blocks[name] == "diagonal":
            torch.testing.assert_close(found.flatten(), expected.diagonal(), rtol=1e-7, atol=1e-12)
        else:
            torch.testing.assert_close(found[0], expected, rtol=1e-7, atol=1e-12)


def test_a_recurrent_classifier_is_refused_or_served_as_it_says():
    def build() -> nn.Module:
        layers = {"lstm": nn.LSTM(3, 4, batch_first=True), "head": nn.Linear(4, CLASSES)}
        return Function(lambda m, x: m.head(m.lstm(x)[0][:, -1]), **layers)

    model = at_test_time(build)
    x, y = torch.randn(IMAGES, 5, 3, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    with pytest.raises(TypeError, match=r"'lstm' \(\S+LSTM\)"):
        KronLaplace(model)
    assert KronLaplace(model, unknown="freeze").fit([(x, y)]).parameter_names[-2:] == ["head.weight", "head.bias"]

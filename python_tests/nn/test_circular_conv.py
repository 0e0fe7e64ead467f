"""The convolutional layer against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import CircularConv2d, StridedCircularConv2d
from python_tests.ops.checks import assert_same

SIZES = [(3, 8, 8), ((3, 5), 4, 20), ((1, 3), 2, 2), (3, 1, 1)]  # kernel_size, H, W


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kernel_size", "height", "width"), SIZES)
def test_equals_torchs_layer(kernel_size, height, width, bias, device):
    torch.manual_seed(1)
    ours = CircularConv2d(3, 5, kernel_size, bias=bias).to(device)
    torch.manual_seed(1)
    theirs = nn.Conv2d(3, 5, kernel_size, padding="same", padding_mode="circular", bias=bias).to(device)
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=0, atol=0)  # one initialisation
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ours.load_state_dict(theirs.state_dict())
    a, b = (
        torch.randn(4, 3, height, width, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
        for _ in range(2)
    )
    y, exact = ours(a), theirs(b)
    assert_same(y, exact)
    grad = torch.randn_like(y)
    assert_same(
        torch.autograd.grad(y, [a, *ours.parameters()], grad),
        torch.autograd.grad(exact, [b, *theirs.parameters()], grad),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("kernel_size", [2, (3, 4), 0, (3, 3, 3)])
def test_sizes_that_keep_no_size_are_refused(kernel_size):
    with pytest.raises(ValueError, match="kernel_size"):
        CircularConv2d(1, 1, kernel_size)


@pytest.mark.parametrize("layer", [CircularConv2d, StridedCircularConv2d])
def test_images_that_do_not_fit_are_refused(layer):
    with pytest.raises(ValueError, match=rf"{layer.__name__}: x must have shape \(N, 2, H, W\), got \(1, 3, 4, 4\)"):
        layer(2, 3)(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"x must have shape .* got \(2, 4, 4\)"):
        layer(2, 3)(torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match=r"x is torch.float64, the layer's parameters are torch.float32"):
        layer(2, 3)(torch.zeros(1, 2, 4, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="x must be a tensor"):
        layer(2, 3)([[0.0]])


@pytest.mark.parametrize(("kernel_size", "height", "width"), [(3, 6, 6), ((3, 5), 4, 16), (3, 2, 2)])
def test_its_curvature_is_that_of_torchs_layer(kernel_size, height, width):
    """Two layers in a row, so that gradients pass through one; the zeros padding of the reference is done by hand."""

    def network(conv: type[nn.Conv2d], **kwargs: str) -> nn.Sequential:
        torch.manual_seed(3)
        layers = [conv(2, 4, kernel_size, **kwargs), nn.Tanh(), conv(4, 3, kernel_size, **kwargs), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(3 * height * width, 3)).double()

    class Padded(nn.Module):
        """Wraps around by indexing, then a convolution without padding: another path through the rule."""

        def __init__(self, conv: nn.Conv2d) -> None:
            super().__init__()
            self.conv = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size).double()
            self.conv.load_state_dict(conv.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half_h, half_w = (k // 2 for k in self.conv.kernel_size)
            rows = torch.arange(-half_h, height + half_h) % height
            return self.conv(x[:, :, rows][..., torch.arange(-half_w, width + half_w) % width])

    ours = network(CircularConv2d)
    plain = network(nn.Conv2d, padding="same", padding_mode="circular")
    by_hand = nn.Sequential(
        *(Padded(layer) if isinstance(layer, nn.Conv2d) else layer for layer in network(CircularConv2d))
    )
    x, y = torch.randn(7, 2, height, width, dtype=torch.float64), torch.randint(3, (7,))
    fitted = [KronLaplace(model).fit([(x[:4], y[:4]), (x[4:], y[4:])]) for model in (ours, plain, by_hand)]
    names = [name.replace(".conv.", ".") for name in fitted[2].factors]
    assert list(fitted[0].factors) == list(fitted[1].factors) == names
    for one, other, last in zip(*(la.factors.values() for la in fitted), strict=True):
        assert_same(one.outputs, last.outputs)
        assert_same(other.outputs, last.outputs)
        if last.inputs is not None:
            assert_same(one.inputs, last.inputs)

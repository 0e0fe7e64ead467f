"""The paper's network: sizes, symmetry, independence of images."""

from __future__ import annotations

import pytest
import torch

from ella_cuda.laplace import KronLaplace
from ella_cuda.models import neyshabur
from python_tests.ops.checks import assert_same


@pytest.mark.parametrize(
    ("layer", "in_channels", "count"),
    [
        ("fc", 3, 133_635_690),
        ("conv", 3, 338_770),
        ("fc+conv", 3, 133_865_010),
        ("f_fc", 3, 1_542_625),
        ("f_fc+conv", 3, 1_771_945),
        ("fc", 1, 112_664_170),
        ("conv", 1, 338_590),
        ("f_fc+conv", 1, 1_730_805),
        # Values and biases; anchors and lengthscales are hyperparameters. The paper has 0.8, 0.2 and 1.0 million.
        ("s_fc", 3, 831_820),
        ("s_conv", 3, 237_050),
        ("s_fc+s_conv", 3, 959_420),
    ],
)
def test_parameter_counts_of_the_paper(layer, in_channels, count):
    with torch.device("meta"):
        model = neyshabur(layer, in_channels)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("layer", ["fc", "conv", "f_fc", "f_fc+conv", "fc+f_fc+conv", "s_fc", "s_fc+s_conv"])
def test_an_image_does_not_feel_its_neighbours(layer, device):
    model = neyshabur(layer, 1, 10, width=2).to(device, torch.float64)
    x = torch.randn(5, 1, 32, 32, dtype=torch.float64, device=device)
    together = model(x)
    assert together.shape == (5, 10)
    assert_same(torch.cat([model(image[None]) for image in x]), together)
    assert_same(model(torch.cat([x[:1], 100 * x[1:]]))[:1], together[:1])


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (7, 18), (31, 31)])
@pytest.mark.parametrize("layer", ["conv", "s_conv"])
def test_convolutional_network_ignores_translations(shift, layer, device):
    model = neyshabur(layer, 3, 10, width=2).to(device, torch.float64)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64, device=device)
    assert_same(model(x.roll(shift, (2, 3))), model(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", ["conv", "s_conv", "gconv"])
def test_the_norm_of_components_is_as_asked(layer):
    """The maximum keeps other components of some random images than the sum of squares."""
    outputs = {}
    for norm in (2, torch.inf):
        torch.manual_seed(0)
        path = neyshabur(layer, 1, 3, width=1, pool_norm=norm).blocks[1].get_submodule(layer)
        x = torch.randn(16, 1, 4, 32, 32) if layer == "gconv" else torch.randn(16, 1, 32, 32)
        found, full = path(x), path[0](x)
        if layer == "conv":
            full = torch.conv2d(torch.nn.functional.pad(x, (1, 1, 1, 1), mode="circular"), path[0].weight, path[0].bias)
        if layer == "gconv":  # each slice chooses by itself
            found, full = (a.transpose(1, 2).flatten(0, 1) for a in (found, full))
        parts = torch.stack([full[..., i::2, j::2] for i in (0, 1) for j in (0, 1)])
        kept = torch.linalg.vector_norm(parts.flatten(2), norm, dim=2).argmax(0)
        expected = parts.transpose(0, 1)[torch.arange(len(kept)), kept]
        torch.testing.assert_close(
            found.sum((1, 2, 3)), expected.sum((1, 2, 3))
        )  # the order of components is no matter
        outputs[norm] = found
    assert not torch.allclose(outputs[2], outputs[torch.inf])


def test_factored_paths_over_the_group():
    """Off, they leave the network invariant to rotations; on, they do not. Their curvature is theirs alone."""
    torch.manual_seed(0)
    model = neyshabur("gf_fc+gconv", 1, 3, width=1, init="equivariant").double()
    x, y = torch.randn(2, 1, 32, 32, dtype=torch.float64), torch.tensor([0, 2])
    assert_same(model(torch.rot90(x, 1, (2, 3))), model(x), rtol=1e-9, atol=1e-12)
    path = model.blocks[1].gf_fc.factored
    assert path.weight_in.shape == (2, 1, 4 * 32, 32) and path.weight_out.shape == (2, 1, 4 * 16, 16)
    with torch.no_grad():
        for block in model.blocks:
            block.gf_fc.factored.weight_out.normal_()
    assert not torch.allclose(model(torch.rot90(x, 1, (2, 3))), model(x))
    name, tail = "blocks.7.gf_fc.factored.weight_out", model.blocks[7].gf_fc.factored.weight_out

    def outputs(weight):
        return torch.func.functional_call(model, {name: weight}, (x[:1],))[0]

    jacobian = torch.func.jacrev(outputs)(tail.detach()).flatten(1)
    p = outputs(tail).detach().softmax(0)
    la = KronLaplace(model, resolution="per_channel").fit([(x[:1], y[:1])])
    diagonal = (jacobian * ((torch.diag(p) - torch.outer(p, p)) @ jacobian)).sum(0)
    la.prior_precision = torch.full_like(la.prior_precision, 1e12)
    trace = la.effective_parameters()[name] * 1e12  # each is λ / (λ + δ), nearly λ / δ
    assert trace == pytest.approx(diagonal.sum().item(), rel=1e-5)
    with pytest.raises(ValueError, match="layer must name gconv beside gf_fc, got 'gf_fc\\+conv'"):
        neyshabur("gf_fc+conv")


def test_relaxed_network_feels_translations():
    model = neyshabur("f_fc+conv", 3, 10, width=2).double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert (model(x.roll((3, 5), (2, 3))) - model(x)).abs().max() > 1e-3


def test_sparse_paths_start_as_asked():
    model = neyshabur("s_fc+s_conv", 1, 10, width=1, basis="exponential", inverse_lengthscale=0.3)
    for block in model.blocks:
        s_fc = block.s_fc
        conv = block.s_conv if hasattr(block.s_conv, "basis") else block.s_conv[0]
        assert {b.kind for b in (s_fc.basis_in, s_fc.basis_out, conv.basis)} == {"exponential"}
        assert [round(float(b.inverse_lengthscale), 6) for b in (s_fc.basis_in, s_fc.basis_out, conv.basis)] == [
            0.3,
            0.3,
            1,
        ]
    assert neyshabur("s_fc", 1, 10, width=1).blocks[0].s_fc.basis_in.kind == "interpolating"


@pytest.mark.parametrize("layer", ["f_fc+conv", "conv+fc", "fc+f_fc+conv"])
def test_equivariant_init_starts_as_the_convolution(layer):
    torch.manual_seed(0)
    model = neyshabur(layer, 3, 10, width=4, init="equivariant").double()
    count = len(layer.split("+"))
    conv = neyshabur("conv", 3, 10, width=4).double()
    conv.load_state_dict(
        {n: p / count if "blocks" in n else p for n, p in model.state_dict().items() if n in conv.state_dict()}
    )
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert_same(model(x), conv(x))
    assert_same(model(x.roll((3, 5), (2, 3))), model(x), rtol=1e-9, atol=1e-12)
    for block in conv.blocks[2:]:  # the mean's kernels have the variance that He et al. give a convolution alone
        weight = next(p for p in block.parameters() if p.dim() == 4)
        assert float(weight.detach().std()) == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.1)
    model(x).square().sum().backward()
    off = {n: p for n, p in model.named_parameters() if n.endswith(("weight_out", "fc.linear.weight"))}
    assert len(off) == 8 * (count - 1)
    for name, p in model.named_parameters():
        if name.endswith("weight_in"):  # 0.3 of sqrt(1 / X), the published standard deviation
            assert float(p.detach().std()) == pytest.approx(0.3 * p[0, 0].numel() ** -0.5, rel=0.1), name
    for name, p in off.items():  # off, and able to come on
        assert not p.any() and p.grad.any(), name


def test_equivariant_init_of_sparse_paths():
    torch.manual_seed(0)
    model = neyshabur("s_fc+s_conv", 3, 10, width=2, init="equivariant").double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert_same(model(x.roll((3, 5), (2, 3))), model(x), rtol=1e-9, atol=1e-12)
    model(x).square().sum().backward()
    for i, block in enumerate(model.blocks):
        off = block.s_fc.weight_out
        assert not off.any() and off.grad.any()
        conv = block.s_conv if hasattr(block.s_conv, "basis") else block.s_conv[0]
        if i > 1:  # the mean of two paths has the variance that He et al. give a convolution alone
            kernel = torch.einsum("dca,ar->dcr", conv.weight, conv.basis.matrix()) / 2
            assert float(kernel.detach().square().mean()) == pytest.approx(2 / kernel[0].numel(), rel=1e-5)
    alone = neyshabur("s_fc", 3, 10, width=4, init="equivariant")
    for block in alone.blocks:
        layer = block.s_fc
        for weight, basis, variance in (
            (layer.weight_in, layer.basis_in, 1 / layer.basis_in.num_points),
            (layer.weight_out, layer.basis_out, 1 / layer.in_channels),
        ):
            expanded = torch.einsum("dca,ax->dcx", weight, basis.matrix()).detach()
            assert float(expanded.square().mean()) == pytest.approx(variance, rel=1e-4)


@pytest.mark.parametrize("layer", ["fc", "f_fc", "fc+f_fc", "conv"])
def test_equivariant_init_of_layers_with_nothing_to_switch_off_is_the_published_one(layer):
    models = []
    for init in ("published", "equivariant"):
        torch.manual_seed(0)
        models.append(neyshabur(layer, 1, 10, width=1, init=init).state_dict())
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def test_names_that_users_rely_on():
    names = dict(neyshabur("f_fc+conv+fc", 1, width=1).named_parameters())
    blocks = {f"blocks.{name}" for name in ("0.f_fc.weight_in", "0.conv.weight", "1.conv.0.weight", "7.fc.linear.bias")}
    assert {*blocks, "head.2.weight"} <= names.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layer": "fc+dense"}, "layer must be"),
        ({"layer": "conv+conv"}, "layer must be"),
        ({"init": "zero"}, "init must be one of published, equivariant"),
        ({"width": 0}, "width"),
        ({"num_classes": 2.5}, "num_classes"),
        ({"image_size": 28}, "multiple of 32"),
        (
            {"layer": "s_fc", "basis": "exponential", "inverse_lengthscale": 30, "init": "equivariant"},
            "inverse_lengthscale is so large",
        ),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        neyshabur(**{"width": 1, **arguments})


def test_a_list_of_paths_is_refused():
    with pytest.raises(TypeError, match="joined by"):
        neyshabur(["f_fc", "conv"])


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(ValueError, match="x must have shape"):
        neyshabur("conv", 1, width=1)(torch.zeros(2, 1, 28, 28))

"""Curvature of convolutions over groups: against Jacobians by torch.func, the dense GGN, and plain convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from ella_cuda.groups import Group, cyclic_shifts
from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from ella_cuda.models import neyshabur
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    GroupConv2d,
    GroupFilter2d,
    GroupLift,
    GroupMaxPool,
    GroupPolyphasePool2d,
    RelaxedEquivariance,
    SlicesAsChannels,
)

VARIANTS = ("full", "separable", "depthwise_separable", "pointwise")
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_frame = pytest.mark.parametrize("frames", ["own", "common"])


def randomise(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    return model.double()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11 * expected.abs().max().item())


def network(variant: str, group: str | Group, frames: str) -> nn.Sequential:
    """Two outputs per image, two convolutions over the group, both pools."""
    common = {"group": group, "frames": frames}
    return randomise(
        nn.Sequential(
            GroupLift(group),
            GroupConv2d(2, 3, 3, variant, **common),
            nn.Tanh(),
            GroupPolyphasePool2d(**common),
            GroupConv2d(3, 2, 1, variant, **common),
            nn.Tanh(),
            GroupMaxPool(group),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    )


class Probe:
    """A filter's input, and a perturbation of its output."""

    def __init__(self, layer: GroupFilter2d) -> None:
        self.added: Tensor | float = 0.0
        self.handle = layer.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        self.seen = args[0]
        return out + self.added


@each_variant
@each_frame
@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_factors_are_the_sums_over_positions_of_jacobians(variant, group, frames, batches):
    """A from the Jacobian of the layer's output in its weight, B from the Jacobian of the network in the layer's output."""
    torch.manual_seed(0)
    model = network(variant, group, frames)
    x, y = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1])
    factors = KronLaplace(model).fit(batches(x, y, 2)).factors
    filters = {n: m for n, m in model.named_modules() if isinstance(m, GroupFilter2d)}
    assert len(filters) == 2 * {"full": 1, "separable": 2, "depthwise_separable": 3, "pointwise": 1}[variant]
    for name, layer in filters.items():
        probe = Probe(layer)
        d, blocks = layer.out_channels, layer.in_channels if layer.depthwise else 1
        a_sum, b_sum = 0.0, 0.0
        for x_n in x:
            f = model(x_n[None])[0].detach()
            seen = probe.seen.detach()

            def of_weight(w: Tensor, seen: Tensor = seen, layer: nn.Module = layer) -> Tensor:
                layer._forward_hooks.clear()
                return functional_call(layer, {"weight": w}, (seen,))[0]

            patches = jacrev(of_weight)(layer.weight.detach())  # (D, G, H, W, *weight)
            layer.register_forward_hook(probe.hook)
            positions = patches[0, :, :, :, 0].numel() // layer.weight[0].numel()
            a = torch.stack([patches[c, :, :, :, c].reshape(positions, -1) for c in range(blocks)])
            a_sum = a_sum + a.mT @ a

            def of_output(added: Tensor, x_n: Tensor = x_n, probe: Probe = probe) -> Tensor:
                probe.added = added
                return model(x_n[None])[0]

            j = jacrev(of_output)(torch.zeros_like(model.get_submodule(name)(seen)[:1].detach()))[:, 0].flatten(2)
            probe.added = 0.0
            curvature = hessian(lambda f: torch.logsumexp(f, 0))(f)
            j = j.unflatten(1, (blocks, d // blocks))  # (K, blocks, D / blocks, positions)
            b_sum = b_sum + torch.einsum("kbdt,kl,lbet->bde", j, curvature, j) / positions
        layer._forward_hooks.clear()
        close(factors[f"{name}.weight"].inputs, a_sum / len(x))
        close(factors[f"{name}.weight"].outputs, b_sum)


class ReadOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1, 2, 3]


@each_frame
def test_constant_features_read_at_one_place_are_exact_for_one_data_point(frames, dense_ggn):
    model = randomise(
        nn.Sequential(GroupLift(), GroupFilter2d(2, 3, 3, frames=frames), ReadOne(), nn.Tanh(), nn.Linear(3, 3))
    )
    x, y = torch.randn(1, 2, 1, 1, dtype=torch.float64).expand(1, 2, 5, 5), torch.tensor([1])
    factor = KronLaplace(model).fit([(x, y)]).factors["1.weight"]
    ggn = dense_ggn(model, x, y)["1.weight"].view(3, 72, 3, 72).permute(1, 0, 3, 2).reshape(216, 216)
    close(factor.to_dense()[0], ggn)


@each_variant
@each_frame
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_biases_are_exact_for_many_data_points(variant, frames, likelihood, dense_ggn, batches):
    model = network(variant, "p4", frames)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    y = torch.randint(3, (5,)) if likelihood == "classification" else torch.randn(5, 3, dtype=torch.float64)
    factors = KronLaplace(model, likelihood).fit(batches(x, y, 2)).factors
    biases = {n: ggn for n, ggn in dense_ggn(model, x, y, likelihood).items() if n.endswith("bias")}
    assert len(biases) == len([n for n in factors if n.endswith("bias")])
    for name, ggn in biases.items():
        close(factors[name].to_dense()[0], ggn)


def test_pointwise_factors_are_a_convolutions():
    """Over a group of one element the layer is a convolution; over p4 its input side is that of all turned images."""
    conv = randomise(nn.Sequential(CircularConv2d(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)))
    one = cyclic_shifts(1)
    same = nn.Sequential(
        GroupLift(one),
        GroupConv2d(2, 3, 3, "pointwise", one),
        nn.Tanh(),
        GroupMaxPool(one),
        nn.Flatten(),
        nn.Linear(48, 3),
    ).double()
    with torch.no_grad():
        for p, q in zip(same.parameters(), conv.parameters(), strict=True):
            p.copy_(q.view_as(p))
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    plain, over_one = KronLaplace(conv).fit([(x, y)]), KronLaplace(same).fit([(x, y)])
    for (_, a), (_, b) in zip(plain.factors.items(), over_one.factors.items(), strict=True):
        close(b.to_dense(), a.to_dense())
    assert over_one.log_marginal_likelihood().item() == pytest.approx(plain.log_marginal_likelihood().item(), rel=1e-12)
    turned = torch.cat([torch.rot90(x, g, (2, 3)) for g in range(4)])
    p4 = nn.Sequential(GroupLift(), GroupConv2d(2, 3, 3, "pointwise"), GroupMaxPool(), nn.Flatten(), nn.Linear(48, 3))
    a = KronLaplace(p4.double()).fit([(x, y)]).factors["1.spatial.weight"].inputs
    close(a, 4 * KronLaplace(conv).fit([(turned, y.repeat(4))]).factors["0.weight"].inputs)


@each_variant
@each_frame
def test_evidence_is_that_of_the_rules_inside_the_graph_whatever_the_batches(variant, frames, batches):
    model = network(variant, "p4", frames)
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    values = [KronLaplace(model).fit(batches(x, y, size)).log_marginal_likelihood().item() for size in (1, 2, 5)]
    assert values == pytest.approx([exact_log_marginal_likelihood(KronLaplace(model), x, y).item()] * 3, rel=1e-11)


def test_multi_group_layers_have_the_factors_of_their_layers_on_channels(dense_ggn):
    """Every path of a layer at once: biases exact, one entry per parameter, effective parameters by path."""
    paths = {
        "f_fc": SlicesAsChannels(FactoredLinear2d(8, 12, 4, 2)),
        "conv": SlicesAsChannels(nn.Sequential(CircularConv2d(8, 12), nn.AvgPool2d(2)), frames="common"),
        "gconv": nn.Sequential(GroupConv2d(2, 3, variant="pointwise"), GroupPolyphasePool2d()),
    }
    model = nn.Sequential(
        GroupLift(), RelaxedEquivariance(paths), nn.Tanh(), GroupMaxPool(), nn.Flatten(), nn.Linear(12, 3)
    )
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 0])
    la = KronLaplace(randomise(model)).fit([(x, y)])
    for name, ggn in dense_ggn(model, x, y).items():
        if "bias" in name:
            close(la.factors[name].to_dense()[0], ggn)
    assert set(la.factors) == {n for n, _ in model.named_parameters()}
    assert set(la.layer_types()) == {"1"} and la.layer_types()["1"] in paths


def test_frozen_parameters_of_a_filter_are_left_alone():
    model = network("full", "p4", "own")
    model[1].full.weight.requires_grad_(False)
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 0])
    la = KronLaplace(model).fit([(x, y)])
    assert "1.full.weight" not in la.factors and "1.full.bias" in la.factors


def test_float32_factors_of_the_papers_network_agree_with_float64():
    torch.manual_seed(0)
    model = neyshabur("f_fc+conv+gconv", 1, 4, 1)
    x, y = torch.randn(6, 1, 32, 32), torch.tensor([0, 1, 2, 3, 0, 1])
    single = KronLaplace(model).fit([(x, y)]).log_marginal_likelihood().item()
    double = KronLaplace(model.double()).fit([(x.double(), y)]).log_marginal_likelihood().item()
    assert single == pytest.approx(double, rel=1e-4)

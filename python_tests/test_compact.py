"""Plain networks of trained ones, against the networks themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ella_cuda.compaction import compact
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import neyshabur
from ella_cuda.nn import PolyphasePool2d


def network(layer: str) -> nn.Module:
    torch.manual_seed(0)
    model = neyshabur(layer, 1, 3, width=1, image_size=32).double().eval()
    for p in model.parameters():
        if p.dim() < 3:  # biases
            p.data.normal_(std=0.1)
    return model


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 1, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def switched_off(model: nn.Module, off: dict[str, list[int]]) -> KronLaplace:
    """A posterior that determines nothing of these rows of weights, and nearly all of all others."""
    la = KronLaplace(model)

    def gamma(per_unit: bool = False) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in model.named_parameters():
            found[name] = torch.full((p.shape[0] if p.dim() > 1 else 1,), 9.0, dtype=torch.float64)
            found[name][off.get(name, [])] = 0.1
        return found

    la.effective_parameters = gamma
    return la


@pytest.mark.parametrize("layer", ["conv", "f_fc+conv", "fc", "s_fc+s_conv", "f_fc"])
def test_without_a_posterior_the_map_is_the_same_in_modules_of_torch(layer: str) -> None:
    model, x = network(layer), images()
    before = {n: p.clone() for n, p in model.named_parameters()}
    small, report = compact(model)
    torch.testing.assert_close(small(x), model(x))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert report.parameters == tuple(sum(p.numel() for p in m.parameters()) for m in (model, small))
    assert report.flops[0] == report.flops[1] > 0
    assert [entry.units[0] for entry in report.layers] == [1, 2, 2, 4, 4, 8, 8, 16, 64, 3]
    if layer == "conv":
        assert report.sparsity == 0 and len(report.layers) == 10


OFF = {
    "blocks.1.f_fc.weight_out": [0, 1],  # the whole path
    "blocks.3.f_fc.weight_in": [1, 2],  # units of a path
    "blocks.3.conv.weight": [0, 2],  # and of the other: the third leaves
    "blocks.5.f_fc.weight_out": [*range(8)],
    "blocks.5.conv.weight": [1, 3, 4],
    "blocks.7.conv.0.weight": [5, 6],
    "blocks.7.f_fc.weight_in": [5],
    "head.0.weight": [*range(40)],
}


def without(model: nn.Module, off: dict[str, list[int]]) -> nn.Module:
    """The same with these rows at zero."""
    for name, rows in off.items():
        model.get_parameter(name).data[rows] = 0
    for block in (model.blocks[3], model.blocks[5]):  # whose removed units have the same bias everywhere
        block.f_fc.bias_out.data.zero_()
    model.blocks[3].f_fc.bias_in.data.zero_()
    return model


def test_units_and_paths_that_are_off_leave_and_the_map_stays() -> None:
    model = network("f_fc+conv")
    names = dict(model.named_parameters())
    off = {n if n in names else n.replace("conv.", "conv.0."): rows for n, rows in OFF.items()}
    model, x = without(model, off), images()
    small, report = compact(model, switched_off(model, off), x)
    torch.testing.assert_close(small(x), model(x))
    entries = {entry.name: entry for entry in report.layers}
    assert entries["blocks.1"].paths == (("f_fc", "conv"), ("conv",))
    assert entries["blocks.5"].paths[1] == ("conv",) and entries["blocks.5"].units == (8, 5)
    assert entries["blocks.3"].units == (4, 3) and entries["blocks.7"].units == (16, 15)
    assert entries["head.0"].units == (64, 24) and entries["head.2"].units == (3, 3)
    assert report.parameters[1] == sum(p.numel() for p in small.parameters()) < report.parameters[0]
    assert report.flops[1] < report.flops[0] and report.sparsity > 0.2
    assert entries["blocks.5"].parameters[1] == sum(p.numel() for p in small[10].parameters())
    # and where the rows are not zero the map is another: they have left
    for name, rows in off.items():
        model.get_parameter(name).data[rows] = 1
    assert (compact(model, switched_off(model, off), x)[0](x) - model(x)).abs().max() > 1e-3


def plain() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3)]
    rest = [nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh()]
    model = nn.Sequential(nn.Sequential(*first), *rest, nn.Linear(8, 3)).double().eval()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.bias)
    return model


def test_units_leave_ordinary_networks_with_their_norms() -> None:
    model, x = plain(), torch.randn(5, 2, 10, 10, dtype=torch.float64)
    off = {"0.0.weight": [0, 4], "0.4.weight": [2], "4.weight": [1, 5, 7]}
    for name, rows in off.items():
        model.get_parameter(name).data[rows] = 0
    small, report = compact(model, switched_off(model, off), x)
    torch.testing.assert_close(small(x), model(x))
    assert [entry.units for entry in report.layers] == [(6, 4), (4, 3), (8, 5), (3, 3)]
    shapes = [tuple(p.shape) for p in small.parameters() if p.dim() > 1]
    assert shapes == [(4, 2, 3, 3), (3, 4, 3, 3), (5, 12), (3, 5)]
    everything = {"0.0.weight": [*range(6)]}
    assert compact(model, switched_off(model, everything), x)[1].layers[0].units == (6, 1)


def test_modules_used_twice_stay_twice() -> None:
    torch.manual_seed(0)
    relu, layer = nn.ReLU(), nn.Linear(4, 4)
    model, x = nn.Sequential(layer, relu, layer, relu, nn.Linear(4, 2)).double(), torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(compact(model, None, x)[0](x), model(x))


@pytest.mark.parametrize(
    "rest",
    [
        (nn.ReLU(), nn.Linear(6, 3), nn.Flatten(), nn.Linear(108, 2)),
        (nn.Flatten(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 2)),
        (nn.Flatten(0, 1), nn.Flatten(1), nn.Linear(36, 2)),
    ],
)
def test_units_stay_where_no_layer_reads_channels(rest: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 6, 1), *rest).double(), torch.randn(3, 2, 6, 6, dtype=torch.float64)
    model[0].weight.data[[1, 2]] = 0
    small, report = compact(model, switched_off(model, {"0.weight": [1, 2]}), x)
    torch.testing.assert_close(small(x), model(x))
    assert report.layers[0].units == (6, 6)


def test_of_a_layer_whose_paths_are_off_one_unit_stays() -> None:
    model = network("f_fc+conv")
    off = {n: [*range(len(p))] for n, p in model.named_parameters() if n.startswith("blocks.4.") and p.dim() > 1}
    entry = compact(model, switched_off(model, off), images())[1].layers[4]
    assert entry.paths[1] == ("conv",) and entry.units == (4, 1)


def test_nothing_is_drawn() -> None:
    model, state = network("conv"), torch.get_rng_state()
    compact(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_units_of_a_fit_are_output_channels() -> None:
    model, x = network("f_fc+s_fc+s_conv"), images(4)
    la = KronLaplace(model).fit([(x, torch.tensor([0, 1, 2, 0]))])
    found = la.effective_parameters(per_unit=True)
    shapes = {name: p.shape for name, p in model.named_parameters() if "weight" in name}
    assert {name: len(found[name]) for name in shapes} == {name: shape[0] for name, shape in shapes.items()}
    assert compact(model, la, x, threshold=1e9)[1].layers[0].units == (1, 1)


def test_units_that_evidence_switches_off_leave() -> None:
    """A unit that is never active has no curvature, and its precision per unit grows without bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    model[0].bias.data[3:] = -50
    x = torch.randn(60, 4, dtype=torch.float64)
    la = KronLaplace(model).fit([(x, (x[:, 0] > 0).long())])
    la.optimize_prior_precision(method="mackay", prior_structure="unit", n_steps=300)
    small, report = compact(model, la, x, threshold=1e-3)
    assert report.layers[0].units == (6, 3)
    torch.testing.assert_close(small(x), model(x))


@pytest.mark.parametrize("layer", ["f_fc+conv", "s_fc+s_conv"])
def test_the_network_is_exported(layer: str) -> None:
    model = network(layer).float()
    off = {n: [0, 1] for n, p in model.named_parameters() if ".5." in n and p.dim() > 2}
    x = images(2).float()
    small, _ = compact(model, switched_off(model, off), x)
    program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    torch.testing.assert_close(program.module()(images(5).float()), small(images(5).float()))
    assert not any("ella_cuda" in str(node.target) for node in program.graph.nodes)


def test_the_network_runs_in_onnx(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    small, _ = compact(network("f_fc+conv").float())
    x, file = images(4).float(), tmp_path / "small.onnx"
    torch.onnx.export(small, (x,), file, dynamo=True, verbose=False)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), small(x).detach(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_plain_says_so() -> None:
    model = plain()
    x = torch.randn(1, 2, 10, 10, dtype=torch.float64)
    with pytest.raises(ValueError, match="group convolutions have no plain form"):
        compact(neyshabur("gconv", width=1))
    with pytest.raises(ValueError, match="example must be training inputs, got None"):
        compact(model)
    with pytest.raises(TypeError, match=r"or an nn\.Sequential, got Bilinear"):
        compact(nn.Bilinear(2, 2, 2), None, x)
    with pytest.raises(ValueError, match="1 is a Transformer"):
        compact(nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(2, 1)), None, x)
    subclass = type("Own", (nn.Conv2d,), {})
    with pytest.raises(ValueError, match="0 has a Own, which has no plain form"):
        compact(nn.Sequential(subclass(2, 2, 3, stride=2)).double(), None, x)
    with pytest.raises(ValueError, match="of another one"):
        compact(model, KronLaplace(plain()), x)
    with pytest.raises(TypeError, match="la must be a KronLaplace, got int"):
        compact(model, 3, x)
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        compact(model, None, x, threshold=0)
    assert not model.training
    pooled = nn.Sequential(nn.Conv2d(2, 3, 1), PolyphasePool2d()).double()
    torch.testing.assert_close(compact(pooled, None, x)[0](x), pooled(x))

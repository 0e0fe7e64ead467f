"""Which tensors share a prior precision: groups of a network's graph, against what a factor of each group does to the outputs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, prior_groups
from ella_cuda.laplace.prior_structure import STRUCTURES, group_indices
from ella_cuda.models import neyshabur
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    FullyConnected2d,
    GroupConv2d,
    GroupFactoredLinear2d,
    GroupLift,
    GroupMaxPool,
    PolyphasePool2d,
    RelaxedEquivariance,
    SlicesAsChannels,
    SparseConv2d,
    SparseFactoredLinear2d,
    StridedCircularConv2d,
)
from python_tests.laplace import checks
from python_tests.laplace.checks import randomised

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Function(checks.Function):
    """With the one argument that torch.fx traces."""

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


class PreActivation(nn.Module):
    """Norm, ReLU, convolution; the sum ends the second convolution's way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.norm3, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv1(torch.relu(self.norm1(x)))
        x = x + self.conv2(torch.relu(self.norm2(y)))
        return self.head(torch.relu(self.norm3(x)).mean((2, 3)))


class OwnLinear(nn.Module):
    """A layer that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.tanh(self.weight)


class Standardised(nn.Conv2d):
    """A convolution with a forward of its own, which is not homogeneous."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, torch.tanh(self.weight), self.bias)


class ChannelsLast(nn.LayerNorm):
    """As in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


def images(channels: int = 2, size: int = 6) -> Tensor:
    return torch.randn(5, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(1))


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(4, 3))


def shared(several: bool) -> nn.Module:
    """One layer called twice, each time before a norm, or the second time before none."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.layer(torch.relu(m.norm1(m.layer(x))))
        return m.head(torch.relu(m.norm2(x) if several else x))

    layers = {"layer": nn.Linear(4, 4), "norm1": nn.LayerNorm(4), "norm2": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
    return Function(forward, **layers)


def tied(*followed: bool) -> nn.Module:
    """Two layers with one weight and biases of their own."""
    norms = [nn.LayerNorm(4) if one else nn.Identity() for one in followed]
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), nn.Linear(4, 3))


def sliced(value: float) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.pad(m.conv(x), (1, 1, 0, 0), value=value)[:, :, 1:, ::2]
        return m.head(torch.relu(m.norm(2 * m.drop(x))).flatten(2).mean(2))

    layers = {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "drop": nn.Dropout(0.0), "head": nn.Linear(4, 3)}
    return Function(forward, **layers)


def factored(bias: bool) -> nn.Module:
    return nn.Sequential(
        FactoredLinear2d(2, 4, 6, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def in_between(bias: bool) -> nn.Module:
    return mlp(nn.Linear(4, 4), nn.Linear(4, 4, bias=bias), nn.LayerNorm(4))


def residual(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.relu(m.norm(x + m.one(torch.relu(x)))))


def used_elsewhere(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.relu(m.norm(m.one(x)))) + m.one.weight.sum()


def about_shapes(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.head(torch.relu(m.norm(y)).view(y.size(0), y.shape[1], -1).mean(2))


def slice_goes_by(m: Any, x: Tensor) -> Tensor:
    y = m.one(x)
    return m.head(torch.relu(m.norm(y))) + y[:, :3]


def as_weight(m: Any, x: Tensor) -> Tensor:
    """What a norm takes as its own weight is not followed by it."""
    return m.head(F.layer_norm(x, (4,), m.one(x.mean(0))))


def relaxed(*more: str) -> nn.Module:
    paths = {"conv": nn.Sequential(StridedCircularConv2d(2, 4), nn.Identity()), "f_fc": FactoredLinear2d(2, 4, 6, 3)}
    layer = RelaxedEquivariance({name: paths[name] for name in ("conv", *more)})
    return nn.Sequential(layer, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def over_group() -> nn.Module:
    conv = GroupConv2d(2, 3, variant="separable", group="p4")
    inner = SlicesAsChannels(CircularConv2d(12, 8), "p4")
    last = GroupFactoredLinear2d(2, 2, 6, 3, bias=False)
    layers = {"lift": GroupLift(), "conv": conv, "norm": nn.BatchNorm3d(3), "inner": inner, "norm2": nn.BatchNorm3d(2)}
    layers |= {"last": last, "norm3": nn.InstanceNorm3d(2), "pool": GroupMaxPool(), "head": nn.Linear(18, 3)}

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.norm(m.conv(m.lift(x))))
        x = torch.tanh(m.norm3(m.last(torch.tanh(m.norm2(m.inner(x))))))
        return m.head(m.pool(x).flatten(1))

    return Function(forward, **layers)


def parametrised() -> nn.Module:
    return mlp(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.LayerNorm(4))


def frozen(name: str) -> nn.Module:
    model = mlp(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    model.get_parameter(name).requires_grad_(False)
    return model


def norms(norm: nn.Module, **how: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, **how), norm, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


def linear(forward: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Function(forward, one=nn.Linear(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 3))


FIRST = {"0": ["0.weight", "0.bias"]}
# Name -> network, input, and its normalised groups.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, list[str]]]] = {
    "pre-activation": (PreActivation, images, {"conv1": ["conv1.weight", "conv1.bias"]}),
    "ln-mlp": (
        lambda: mlp(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)),
        rows,
        {"0": ["0.weight", "0.bias"], "3": ["3.weight"]},
    ),
    "pad and slice": (lambda: sliced(0), images, {"conv": ["conv.weight", "conv.bias"]}),
    "pad with ones": (lambda: sliced(1), images, {}),
    "residual": (linear(residual), rows, {}),
    "shared layer": (lambda: shared(True), rows, {"layer": ["layer.weight", "layer.bias"]}),
    "shared layer, once without": (lambda: shared(False), rows, {}),
    "tied weights": (lambda: tied(True, True), rows, {"0": ["0.weight", "0.bias", "3.bias"]}),
    "tied weights, the second without": (lambda: tied(True, False), rows, {}),
    "tied weights, the first without": (lambda: tied(False, True), rows, {}),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(16, 3)), tokens, {"0": ["0.weight"]}),
    "embedding of bounded norm": (
        lambda: nn.Sequential(nn.Embedding(7, 4, max_norm=2.0), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)),
        tokens,
        {},
    ),
    "own layer": (lambda: mlp(OwnLinear(), nn.LayerNorm(4)), rows, {}),
    "own convolution": (lambda: nn.Sequential(Standardised(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), images, {}),
    "own norm": (lambda: norms(ChannelsLast(4)), images, FIRST),
    "weight normalisation": (parametrised, rows, {}),
    "frozen bias": (lambda: frozen("0.bias"), rows, {"3": ["3.weight"]}),
    "frozen weight": (lambda: frozen("3.weight"), rows, FIRST),
    "factored": (lambda: factored(True), images, {"0": ["0.weight_out", "0.bias_out"]}),
    "factored without biases": (lambda: factored(False), images, {"0.weight_in": ["0.weight_in"], "0.weight_out": ["0.weight_out"]}),
    "sparse": (
        lambda: nn.Sequential(
            SparseConv2d(2, 3),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            SparseFactoredLinear2d(3, 4, 6, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        images,
        {"0": ["0.weight", "0.bias"], "3.weight_in": ["3.weight_in", "3.bias_in"], "3.weight_out": ["3.weight_out"]},
    ),
    "linear in between": (lambda: in_between(False), rows, {"0": ["0.weight", "0.bias"], "1": ["1.weight"]}),
    "bias in between": (lambda: in_between(True), rows, {"1": ["1.weight", "1.bias"]}),
    "dense": (
        lambda: nn.Sequential(FullyConnected2d(2, 4, 6, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 3)),
        images,
        {"0.linear": ["0.linear.weight", "0.linear.bias"]},
    ),
    "a single path": (lambda: relaxed(), images, {"0.conv.0": ["0.conv.0.weight", "0.conv.0.bias"]}),
    "several paths": (lambda: relaxed("f_fc"), images, {}),
    "polyphase": (lambda: norms(nn.Sequential(nn.Identity(), PolyphasePool2d(), nn.BatchNorm2d(4)), padding=1), images, FIRST),
    "over a group": (
        over_group,
        images,
        {
            "conv.mixing": ["conv.mixing.weight", "conv.mixing.bias"],
            "inner.layer": ["inner.layer.weight", "inner.layer.bias"],
            "last.factored.weight_in": ["last.factored.weight_in"],
            "last.factored.weight_out": ["last.factored.weight_out"],
        },
    ),
    "used elsewhere": (linear(used_elsewhere), rows, {}),
    "shapes": (
        lambda: Function(about_shapes, conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4), head=nn.Linear(4, 3)),
        images,
        {"conv": ["conv.weight", "conv.bias"]},
    ),
    "a slice goes by": (linear(slice_goes_by), rows, {}),
    "a norm's weight": (linear(as_weight), rows, {}),
    "instance norm": (lambda: norms(nn.InstanceNorm2d(4)), images, FIRST),
    "group norm": (lambda: norms(nn.GroupNorm(2, 4)), images, FIRST),
    "rms norm": (lambda: norms(nn.RMSNorm([4, 4, 4])), images, FIRST),
    "local response norm": (lambda: norms(nn.LocalResponseNorm(2)), images, {}),
    "max pool": (lambda: norms(nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(4))), images, {}),
    "average pool": (lambda: norms(nn.Sequential(nn.AvgPool2d(2), nn.BatchNorm2d(4))), images, FIRST),
    "padding with ones": (lambda: norms(nn.Sequential(nn.ConstantPad2d(1, 1.0), nn.BatchNorm2d(4))), images, {}),
    "padded by the input": (lambda: norms(nn.BatchNorm2d(4), padding=1, padding_mode="reflect"), images, FIRST),
}  # fmt: skip
# Layers of the rest that may have a factor all the same: max pooling is a nonlinearity, but positive factors go through it, and the
# statistics of a batch take the bias away that follows a depthwise filter.
INVARIANT = {("max pool", "0"), ("over a group", "conv.spatial")}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    make, inputs, _ = NETWORKS[name]
    model = make().double()
    model(inputs())  # lazy layers take shape
    model = randomised(model)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-30
    return model.train()


@pytest.mark.parametrize("name", NETWORKS)
def test_groups_are_those_of_the_graph(name: str) -> None:
    model = made(name)
    before = copy.deepcopy(model.state_dict())
    groups = prior_groups(model)
    expected = NETWORKS[name][2]
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    rest = [n for n in trainable if not any(n in names for names in expected.values())]
    assert groups == [*((group, names, True) for group, names in expected.items()), ("unnormalised", rest, False)]
    assert model.training and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_factor_of_a_group_changes_nothing_if_and_only_if_a_norm_follows(name: str) -> None:
    """In float64, with the statistics of the batch and next to no eps."""
    model, x = made(name), NETWORKS[name][1]()
    outputs = model(x).detach()

    def with_factor(names: list[str]) -> Tensor:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in names:
                other.get_parameter(parameter).mul_(3)
        return other(x).detach()

    *groups, (_, rest, _) = prior_groups(model)
    for _, names, _ in groups:
        torch.testing.assert_close(with_factor(names), outputs, rtol=1e-9, atol=1e-9)
    layers = {name.rpartition(".")[0] for name in rest} - {layer for case, layer in INVARIANT if case == name}
    for layer in layers - {n for n, m in model.named_modules() if isinstance(m, NORMS)}:
        together = [n for n in rest if n.rpartition(".")[0] == layer]
        assert (with_factor(together) - outputs).abs().max() > 1e-4, together


def test_every_convolution_of_resnet18_is_a_group() -> None:
    model = torchvision.models.resnet18(weights=None)
    groups = prior_groups(model)
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert groups[:-1] == [(name, [f"{name}.weight"], True) for name in convolutions]
    assert {n.rpartition(".")[0].rpartition(".")[2][:2] for n in groups[-1][1]} <= {"bn", "fc", "1"}
    assert len(groups[-1][1]) == 42


@pytest.mark.parametrize("make", [lambda: neyshabur("gconv+s_conv+f_fc", 1, 3, width=1), lambda: nn.Linear(3, 2), OwnLinear])  # fmt: skip
def test_networks_without_norms(make: Callable[[], nn.Module]) -> None:
    """The paper's, and models that are one layer."""
    model = make()
    assert prior_groups(model) == [("unnormalised", [n for n, _ in model.named_parameters()], False)]


class Asks(nn.Module):
    """Arguments with defaults, and another use of the layer in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, twice: bool = False, mask: Tensor | None = None) -> Tensor:
        y = self.layer(x)
        x = self.norm(y) + y if self.training else self.norm(y)
        if mask is not None:
            x = x * mask
        return self.layer(x) if twice else x


class Branches(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) if x.shape[1] == 4 else x


@pytest.mark.parametrize("module", [Asks.__module__, "ella_cuda.experiments.networks"])
def test_arguments_have_their_defaults_and_modules_are_in_evaluation_mode(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of networks of the package itself, beside its layers."""
    monkeypatch.setattr(Asks, "__module__", module)
    model = Asks()
    assert prior_groups(model)[0] == ("layer", ["layer.weight", "layer.bias"], True)
    assert model.training and model.norm.training


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace Branches.*TraceError.*prior_structure='layerwise'"):
        prior_groups(Branches())
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        prior_groups(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no trainable parameters"):
        prior_groups(nn.Linear(3, 2).requires_grad_(False))
    la = KronLaplace(Branches()).fit([(torch.randn(5, 4), torch.arange(5) % 3)])
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace Branches"):
        la.optimize_prior_precision(prior_structure="normalised")
    la.optimize_prior_precision(prior_structure="module", n_steps=2)


def test_a_trace_leaves_random_numbers_alone() -> None:
    model = Function(lambda m, x: m.head(x) + torch.randn(()), head=nn.Linear(4, 3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    prior_groups(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_threads_run_their_models_meanwhile() -> None:
    """One that has a layer of the traced model, and parameters of its own."""
    seen: list[Any] = []

    def run() -> None:
        try:
            seen.append(other(rows()))
        except Exception as error:
            seen.append(error)

    def forward(m: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return m.head(m.norm(m.one(x)))

    model = Function(forward, one=nn.Linear(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 3)).double()
    other = nn.Sequential(model.one, OwnLinear().double())
    expected = other(rows())
    assert prior_groups(model)[0] == ("one", ["one.weight", "one.bias"], True)
    assert len(seen) == 1 and isinstance(seen[0], Tensor) and torch.equal(seen[0], expected)


def test_structures_by_name() -> None:
    model = made("ln-mlp")
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "4.weight", "4.bias", "6.weight", "6.bias"]
    of_tensors = [structure for structure in STRUCTURES if structure != "unit"]
    found = {structure: group_indices(structure, names, model) for structure in of_tensors}
    assert found == {
        "layerwise": [0, 1, 2, 3, 4, 5, 6, 7, 8],
        "module": [0, 0, 1, 1, 2, 3, 3, 4, 4],
        "normalised": [0, 0, 1, 1, 2, 1, 1, 1, 1],
        "scalar": [0] * 9,
    }
    assert group_indices("normalised", names[2:5], model) == [0, 0, 1]

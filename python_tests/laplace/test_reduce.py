"""KFAC-reduce: factors from each data point's mean input and summed gradient, written out; the dense GGN where they are exact; and what
knows the setting.

A layer's inputs at its positions come from its Jacobian: the output of a channel d at a position is linear in that channel's weights,
with the position's input as its slope. Output gradients come from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import ella_cuda
from ella_cuda.laplace import KronLaplace, Rule, exact_log_marginal_likelihood, register
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    GroupFilter2d,
    PolyphasePool2d,
    SparseConv2d,
    StridedCircularConv2d,
)
from python_tests.laplace.test_convolutions import CASES, CONV, TRANSPOSED, TRANSPOSED_CASES, columns, network, patches

IMAGES, CLASSES = 5, 2


def reduced(model: nn.Module, *batches: tuple[Tensor, Tensor], **options: object) -> KronLaplace:
    return KronLaplace(model, approximation="reduce", **options).fit(batches)


def data(*size: int, images: int = IMAGES) -> tuple[Tensor, Tensor]:
    return torch.randn(images, *size, dtype=torch.float64), torch.randint(CLASSES, (images,))


def slopes(layer: nn.Module, x: Tensor, channel: int, axis: int = 1) -> Tensor:
    """What the outputs in a channel are the products of, with the channel's weights: ``(N, positions, weights)``."""

    def outputs(weight: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight}, (x,)).select(axis, channel)

    found = jacrev(outputs)(layer.weight.detach())
    found = found.select(x.dim() - 1, channel)  # of this channel's weights alone
    return found.flatten(x.dim() - 1).unflatten(0, (len(x), -1)).flatten(1, -2)


def require(
    model: nn.Module, x: Tensor, y: Tensor, inputs: Tensor, outputs: Tensor, bias: Tensor | None, layer: str = "1"
) -> None:
    """The layer's factors are these, from one batch and from several, from one column at a time and from all."""
    for size, budget in ((len(x), None), (2, 1)):
        la = reduced(model, *zip(x.split(size), y.split(size), strict=True), memory_budget=budget)
        torch.testing.assert_close(la.factors[f"{layer}.weight"].inputs, inputs, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(la.factors[f"{layer}.weight"].outputs, outputs, rtol=1e-9, atol=1e-12)
        if bias is not None:
            torch.testing.assert_close(la.factors[f"{layer}.bias"].outputs[0], bias, rtol=1e-9, atol=1e-12)
    assert KronLaplace(model, approximation="reduce").memory_estimate(x) > 0
    evidence = exact_log_marginal_likelihood(la, x, y)
    torch.testing.assert_close(evidence, la.log_marginal_likelihood(), rtol=1e-9, atol=0)
    single = reduced(model.float(), (x.float(), y) if x.is_floating_point() else (x, y)).factors[f"{layer}.weight"]
    for found, exact in ((single.inputs, inputs), (single.outputs, outputs)):
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def products(rows: Tensor) -> Tensor:
    """The sum of outer products in blocks, of rows ``(..., G, a)``."""
    rows = rows.flatten(0, -3)
    return torch.einsum("ngi,ngj->gij", rows, rows)


MORE_CASES = [
    (2, 2, 3, (6, 5), dict(kernel_size=3, padding=1)),
    (2, 4, 6, (7, 6), dict(kernel_size=(3, 2), padding=(2, 1), stride=(2, 1), dilation=(1, 2), groups=2)),
    (2, 2, 3, (5, 6), dict(kernel_size=(3, 4), padding=(1, 2), padding_mode="circular", stride=2)),
    (2, 2, 3, (5, 5), dict(kernel_size=3, bias=False)),
]


@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=str)
def test_a_convolution(case, dense_ggn):
    axes, c, d, size, options = case
    layer = CONV[axes](c, d, **options)
    model = network(layer, c, size)
    x, y = data(c, *size)
    inner, gradient = columns(model, x)
    seen = torch.stack([slopes(layer, inner, g * d // layer.groups) for g in range(layer.groups)], 2)  # (N, T, G, a)
    assert seen.shape[1] == math.prod(gradient.shape[3:]) > 1
    summed = gradient.flatten(3).sum(3).unflatten(2, (layer.groups, -1))
    inputs, outputs = products(seen.mean(1)) / IMAGES, products(summed)
    require(model, x, y, inputs, outputs, dense_ggn(model, x, y).get("1.bias"))


@pytest.mark.parametrize("case", TRANSPOSED_CASES, ids=str)
def test_a_transposed_convolution(case, dense_ggn):
    axes, c, d, size, options = case
    layer = TRANSPOSED[axes](c, d, **options)
    model = network(layer, c, size)
    x, y = data(c, *size)
    inner, gradient = columns(model, x)
    mean = inner.flatten(2).mean(2).unflatten(1, (layer.groups, -1))
    summed = patches(gradient.flatten(0, 1), layer, layer.groups, layer.padding).sum(-1)
    inputs, outputs = products(mean) / IMAGES, products(summed)
    require(model, x, y, inputs, outputs, dense_ggn(model, x, y).get("1.bias"))


@pytest.mark.parametrize("make", [CircularConv2d, StridedCircularConv2d, SparseConv2d])
def test_this_librarys_convolutions(make, dense_ggn):
    layer = make(2, 3, 3)
    model = network(layer, 2, (6, 4))
    x, y = data(2, 6, 4)
    inner, gradient = columns(model, x)
    seen, psi = inner, None
    if make is SparseConv2d:
        psi = layer.basis.matrix().detach()
        layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular").double()
    elif make is StridedCircularConv2d:  # the positions are those of the convolution in it
        layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular").double()
    rows = slopes(layer, seen, 0).mean(1)
    if psi is not None:
        rows = (rows.unflatten(1, (2, -1)) @ psi.T).flatten(1)
    inputs, outputs = products(rows[:, None]) / IMAGES, products(gradient.flatten(3).sum(3)[..., None, :])
    require(model, x, y, inputs, outputs, dense_ggn(model, x, y)["1.bias"])


def test_a_strided_convolution_is_one_and_a_pool():
    apart = nn.Sequential(CircularConv2d(2, 3), PolyphasePool2d(2), nn.Flatten(), nn.Linear(18, CLASSES)).double()
    model = nn.Sequential(StridedCircularConv2d(2, 3), nn.Flatten(), nn.Linear(18, CLASSES)).double()
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        ours.data = theirs.data.clone()
    batch = data(2, 6, 4)
    one, other = reduced(model, batch), reduced(apart, batch)
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("frames", ["own", "common"])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("depthwise", [True, False])
def test_a_filter_over_a_group(frames, mixes, depthwise, dense_ggn):
    layer = GroupFilter2d(2, 2 if depthwise else 3, 3, mixes, depthwise, frames=frames, bias=mixes)
    model = network(layer, 2, (4, 4, 4))
    x, y = data(2, 4, 4, 4)
    inner, gradient = columns(model, x)
    seen = torch.stack([slopes(layer, inner, c) for c in range(2 if depthwise else 1)], 2)
    assert seen.shape[1] == 4 * 16
    summed = gradient.flatten(3).sum(3)
    summed = summed[..., None] if depthwise else summed[..., None, :]
    inputs, outputs = products(seen.mean(1)) / IMAGES, products(summed)
    require(model, x, y, inputs, outputs, dense_ggn(model, x, y).get("1.bias"))


@pytest.mark.parametrize("positions", [(3,), (2, 2)])
def test_a_linear_layer_on_positions(positions, dense_ggn):
    model = network(nn.Linear(4, 3), *positions, (4,)) if len(positions) == 1 else network(nn.Linear(4, 3), 2, (2, 4))
    x, y = data(*positions, 4)
    inner, gradient = columns(model, x)
    inputs = products(inner.flatten(1, -2).mean(1)[:, None]) / IMAGES
    outputs = products(gradient.flatten(2, -2).sum(2)[..., None, :])
    require(model, x, y, inputs, outputs, dense_ggn(model, x, y)["1.bias"])
    la = reduced(model, (x.to(torch.float32), y))
    assert la.factors["1.bias"].output_moment is la.factors["1.weight"].output_moment  # it is the same sum


class SequenceFirst(nn.Module):
    """A linear layer that has the batch second."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.embed, self.last = first, nn.Linear(4, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.transpose(0, 1)).transpose(0, 1) if self.first else self.embed(x)
        return self.last(hidden.tanh().square().sum(1))


def test_the_batch_may_be_second():
    models = [SequenceFirst(first).double() for first in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    batch = data(6, 4)
    one, other = (reduced(model, batch) for model in models)
    torch.testing.assert_close(one.factors["embed.weight"].inputs, other.factors["embed.weight"].inputs)
    torch.testing.assert_close(one.factors["embed.weight"].outputs, other.factors["embed.weight"].outputs)


class Products(nn.Module):
    """A bilinear layer on the two halves of its input's last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., :2], x[..., 2:])


@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_bilinear_layer(positions, dense_ggn):
    model = nn.Sequential(nn.Tanh(), Products(), nn.Tanh(), nn.Flatten(), nn.Linear(4 * math.prod(positions), CLASSES))
    model = model.double()
    x, y = data(*positions, 5)
    inner, gradient = columns(model, x)
    pairs = torch.einsum("...i,...j->...ij", inner[..., :2], inner[..., 2:]).flatten(-2).unflatten(0, (-1, 1))
    inputs = products(pairs.flatten(1, -2).mean(1)[:, None]) / IMAGES
    outputs = products(gradient.unflatten(1, (-1, 1)).flatten(2, -2).sum(2)[..., None, :])
    require(model, x, y, inputs, outputs, dense_ggn(model, x, y)["1.layer.bias"], "1.layer")


class Lookup(nn.Module):
    """Sequences of indices to logits, with a table, or a linear layer on one-hot vectors; index 0 is padding."""

    def __init__(self, table: nn.Module, pooled: bool, one_hot: bool) -> None:
        super().__init__()
        self.table, self.pooled, self.one_hot, self.head = table, pooled, one_hot, nn.Linear(3, CLASSES)

    def forward(self, indices: Tensor) -> Tensor:
        words = nn.functional.one_hot(indices, 7).to(self.head.weight.dtype)[..., 1:] if self.one_hot else indices
        found = self.table(words)
        return self.head((found if self.pooled else found.tanh()).flatten(1, -2).sum(1) if found.dim() > 2 else found)


def on_one_hot(model: Lookup) -> Lookup:
    other = Lookup(nn.Linear(6, 3, bias=False), model.pooled, True).double()
    other.table.weight.data = model.table.weight.detach()[1:].T.clone()
    other.head.load_state_dict(model.head.state_dict())
    return other


@pytest.mark.parametrize("pooled", [True, False])
def test_an_embedding_has_the_diagonal_of_a_linear_layer_on_one_hot_vectors(pooled):
    table = nn.Embedding(7, 3, padding_idx=0)
    model = Lookup(table, pooled, False).double()
    x, y = torch.randint(1, 7, (IMAGES, 4)), torch.randint(CLASSES, (IMAGES,))
    x[0] = torch.tensor([2, 2, 2, 5])
    one, other = reduced(model, (x[:2], y[:2]), (x[2:], y[2:])), reduced(on_one_hot(model), (x, y))
    ours, theirs = one.factors["table.weight"], other.factors["table.weight"]
    torch.testing.assert_close(ours.inputs[1:, 0, 0], theirs.inputs[0].diagonal(), rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-9, atol=1e-12)
    assert ours.inputs[0] == 0
    torch.testing.assert_close(
        exact_log_marginal_likelihood(one, x, y), one.log_marginal_likelihood(), rtol=1e-9, atol=0
    )


def test_padding_has_no_part_in_means():
    model = Lookup(nn.Embedding(7, 3, padding_idx=0), False, False).double()
    x, y = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 1, 2, 3]]), torch.tensor([0, 1])
    padded, apart = reduced(model, (x, y)), reduced(model, (x[:1, :2], y[:1]), (x[1:], y[1:]))
    for name, factor in padded.factors.items():
        torch.testing.assert_close(factor.inputs, apart.factors[name].inputs, rtol=1e-12, atol=0)
        torch.testing.assert_close(factor.outputs, apart.factors[name].outputs, rtol=1e-9, atol=1e-12)
    assert padded.factors["table.weight"].inputs[:, 0, 0].tolist() == pytest.approx(
        [0, (1 / 4 + 1 / 25) / 2, (1 / 4 + 1 / 25) / 2, 4 / 25 / 2, 1 / 25 / 2, 0, 0]
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_of_one_data_point_has_the_exact_blocks_of_its_rows(mode, dense_ggn):
    """What is between rows of the table is left out."""
    model = nn.Sequential(nn.EmbeddingBag(7, 3, mode=mode, padding_idx=0), nn.Tanh(), nn.Linear(3, CLASSES)).double()
    x, y = torch.tensor([[1, 2, 2, 2, 5, 0, 0]]), torch.tensor([1])
    blocks = reduced(model, (x, y)).factors["0.weight"].to_dense()
    exact = dense_ggn(model, x, y)["0.weight"].view(7, 3, 7, 3)
    for row in range(1, 7):
        torch.testing.assert_close(blocks[row], exact[row, :, row], rtol=1e-9, atol=1e-12)
    assert blocks[2].any() and not blocks[0].any()


# where it is exact ---------------------------------------------------------------------------------------------------


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Linear layers, and the mean over positions between them and the head."""
    model = nn.Sequential(*layers).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    return model


class MeanOfPositions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


DEEP_LINEAR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "positions": (lambda: pooled(nn.Linear(3, 2), nn.Linear(2, 4), MeanOfPositions(), nn.Linear(4, 2)), (5, 3)),
    "images": (
        lambda: pooled(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
            nn.Conv2d(3, 2, (1, 3), padding=(0, 1), padding_mode="circular"),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2, 2),
        ),
        (2, 4, 3),
    ),
}


def in_order(block: Tensor, parameter: Tensor) -> Tensor:
    """A dense block with the index (input, output) of the factors."""
    out = parameter.shape[0]
    return block.view(out, -1, out, parameter[0].numel()).permute(1, 0, 3, 2).reshape(block.shape)


@pytest.mark.parametrize("name", DEEP_LINEAR)
def test_it_is_exact_where_a_linear_network_averages_positions(name, dense_ggn):
    """For many data points too, with a Gaussian likelihood; expanding is not.

    Source: Eschenhagen et al., NeurIPS 2023, proposition 2.
    """
    make, size = DEEP_LINEAR[name]
    model = make()
    x, y = torch.randn(IMAGES, *size, dtype=torch.float64), torch.randn(IMAGES, 2, dtype=torch.float64)
    exact = dense_ggn(model, x, y, "regression")
    found = reduced(model, (x, y), likelihood="regression").factors
    expanded = KronLaplace(model, "regression").fit([(x, y)]).factors
    for key, block in exact.items():
        parameter = model.get_parameter(key)
        block = in_order(block, parameter) if parameter.dim() > 1 else block
        torch.testing.assert_close(found[key].to_dense()[0], block, rtol=1e-9, atol=1e-10)
    first = in_order(exact["0.weight"], model[0].weight)
    assert (expanded["0.weight"].to_dense()[0] - first).norm() > 0.1 * first.norm()


def test_without_shared_positions_both_are_one():
    layers = nn.Conv2d(2, 3, 1), FactoredLinear2d(3, 4, 1, 1), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
    model = nn.Sequential(*layers).double()
    batch = data(2, 1, 1)
    one, other = reduced(model, batch), KronLaplace(model).fit([batch])
    for name, factor in one.factors.items():
        torch.testing.assert_close(factor.to_dense(), other.factors[name].to_dense(), rtol=1e-12, atol=1e-14)


def test_norms_are_the_same_exact_blocks():
    model = network(nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.PReLU(3), nn.BatchNorm1d(3)), 2, (6,))
    batch = data(2, 6)
    one, other = reduced(model, batch).factors, KronLaplace(model).fit([batch]).factors
    for name in [n for n in one if not n.startswith(("1.0.weight", "4"))]:
        assert torch.equal(one[name].outputs, other[name].outputs), name
    assert not torch.allclose(one["1.0.weight"].outputs, other["1.0.weight"].outputs)


# who knows the setting -----------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@register(Scale)
class ScaleRule(Rule):
    def shapes(self):
        return {"weight": ella_cuda.laplace.factors.FactorShape.bias(3)}

    def inputs(self, x):
        self.kept = x

    def outputs(self, gradient):
        self.factors["weight"].output_moment.add((gradient * self.kept).flatten(0, 1)[:, None])


class Convolution(nn.Conv1d):
    """A layer of its own, for the rule below."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@register(Convolution)
class OwnInputsRule(ella_cuda.laplace.rules.ConvNdRule):
    """Its class says nothing of the inputs that it defines."""

    def inputs(self, x):
        self.factors["weight"].input_moment.add(x.unfold(2, 2, 1).transpose(1, 2).flatten(2).flatten(0, 1)[:, None])


def test_rules_that_do_not_reduce_are_refused_in_one_message():
    model = nn.Sequential(Convolution(2, 3, 2), nn.Flatten(), nn.Linear(6, 3), Scale(), Scale()).double()
    with pytest.raises(ValueError) as error:
        KronLaplace(model, approximation="reduce")
    said = str(error.value)
    for words in (
        "layer '0' (Convolution): OwnInputsRule",
        "layer '3' (Scale)",
        "layer '4' (Scale): ScaleRule does not serve",
    ):
        assert words in said
    assert "approximation='reduce'. Use approximation='expand', freeze" in said and "'2'" not in said
    KronLaplace(model).fit([(data(2, 3)[0], torch.randint(3, (IMAGES,)))])


def test_an_unknown_approximation():
    with pytest.raises(ValueError, match=r"approximation must be one of 'expand', 'reduce', got 'shrink'"):
        KronLaplace(nn.Linear(2, 2), approximation="shrink")


def test_repr_state_and_summary():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, CLASSES)).double()
    x, y = data(2, 4)
    la = reduced(model, (x, y))
    assert "approximation='reduce'" in repr(la)
    other = KronLaplace(model, approximation="reduce")
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    with pytest.raises(ValueError, match="approximation is 'reduce' in the state, but 'expand' here"):
        KronLaplace(model).load_state_dict(la.state_dict())
    before = KronLaplace(model, approximation="reduce").summary()
    assert before == la.summary() and "that of 0.weight" in before  # the bias's side is never one of its own
    assert before.count("Kronecker, reduce") == 2 and "reduce" not in KronLaplace(model).summary()


def test_the_exact_evidence_is_differentiable():
    """In what the mean patches and summed gradients depend on, by central differences of fits."""
    model = nn.Sequential(SparseConv2d(2, 3), nn.Tanh(), SparseConv2d(3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2))
    model, (x, y) = model.double(), data(2, 4, 3)
    for layer in (model[0], model[2]):
        scale = layer.basis.inverse_lengthscale.requires_grad_()
        la = KronLaplace(model, approximation="reduce")
        (slope,) = torch.autograd.grad(exact_log_marginal_likelihood(la, x, y), scale)
        scale.requires_grad_(False)
        values = []
        for step in (1e-5, -2e-5):
            scale += step
            values.append(la.fit([(x, y)]).log_marginal_likelihood())
        scale += 1e-5
        torch.testing.assert_close(slope.sum(), (values[0] - values[1]) / 2e-5, rtol=1e-5, atol=0)


def test_more_data_may_be_added():
    model = network(nn.Conv1d(2, 3, 3), 2, (6,))
    x, y = data(2, 6)
    la = reduced(model, (x[:2], y[:2])).fit([(x[2:], y[2:])], override=False)
    torch.testing.assert_close(la.log_marginal_likelihood(), reduced(model, (x, y)).log_marginal_likelihood())


def test_training_takes_it():
    model = network(nn.Conv1d(2, 3, 3), 2, (6,)).float()
    x, y = data(2, 6)
    batch = x.float(), y
    la, *_ = ella_cuda.marglik_training(model, [batch], n_epochs=2, approximation="reduce", progress_bar=False)
    assert la.approximation == "reduce"
    expected = reduced(model, batch).log_marginal_likelihood(la.prior_precision)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected)
    with pytest.raises(ValueError, match="marglik_training: approximation must be one of"):
        ella_cuda.marglik_training(model, [batch], approximation="sum")


class Autocast(nn.Module):
    """Reduces what is between its layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, CLASSES)
        self.seen: list[Tensor] = []
        self.second.register_forward_pre_hook(lambda module, args: self.seen.append(args[0].detach()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.second(self.first(x)).float().mean(1))


def test_means_of_reduced_inputs_are_not_rounded_to_their_type():
    model = Autocast()
    x = torch.randn(IMAGES, 30, 4)
    la = reduced(model, (x, torch.randint(CLASSES, (IMAGES,))))
    seen = next(s for s in model.seen if len(s) == IMAGES)
    assert seen.dtype == torch.bfloat16
    expected = products(seen.double().mean(1)[:, None]) / IMAGES
    torch.testing.assert_close(la.factors["second.weight"].inputs, expected, rtol=1e-5, atol=1e-7)

"""What single kinds of layers serve and refuse, beside the rows of :mod:`python_tests.laplace.test_conformance`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    GroupConv2d,
    GroupLift,
    GroupMaxPool,
    GroupPolyphasePool2d,
    RelaxedEquivariance,
    SlicesAsChannels,
)
from python_tests.laplace.checks import Function, randomised


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.ConvTranspose1d(2, 3, 3, dilation=2, output_padding=1), "output_padding must be below the stride"),
        (nn.Embedding(3, 2, max_norm=1.0), "has max_norm=1.0"),
        (nn.EmbeddingBag(3, 2, mode="max"), "mode must be 'sum' or 'mean', got 'max'"),
        (nn.BatchNorm1d(6, track_running_stats=False), "has no running statistics .*track_running_stats=True"),
    ],
)
def test_layers_that_are_refused(layer, words):
    with pytest.raises(ValueError, match=rf"layer '0' \([\w.]+\.{type(layer).__name__}\):? {words}"):
        KronLaplace(nn.Sequential(layer))


def test_weights_of_words_are_refused():
    """A bag with a weight for each word."""
    bag = nn.EmbeddingBag(7, 3, mode="sum")
    model = Function(lambda m, words: m.bag(words, per_sample_weights=torch.ones(words.shape)), bag=bag)
    with pytest.raises(ValueError, match="without offsets and per_sample_weights"):
        KronLaplace(model).fit([(torch.randint(7, (4, 2)), torch.randint(3, (4,)))])


@pytest.mark.parametrize("size", [None, [6, 5], [5, 6]])
def test_a_call_of_a_transposed_convolution_may_say_the_size(size):
    extra = (0, 0) if size is None else tuple(s - 5 for s in size)
    told, plain = (nn.ConvTranspose2d(2, 3, 3, 2, 1, padding) for padding in (0, extra))
    plain.load_state_dict(told.state_dict())
    behind = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(3 * (5 + extra[0]) * (5 + extra[1]), 2))
    x, y = torch.randn(4, 2, 3, 3).double(), torch.randint(2, (4,))
    models = (
        nn.Sequential(layer, copy.deepcopy(behind)).double()
        for layer in (Function(lambda m, x: m.layer(x, output_size=size), layer=told), plain)
    )
    found, expected = (KronLaplace(model).fit([(x, y)]) for model in models)
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood())
    torch.testing.assert_close(exact_log_marginal_likelihood(found, x, y), expected.log_marginal_likelihood())


def test_a_table_is_stored_as_a_diagonal():
    model = nn.Sequential(nn.Embedding(50_000, 2), nn.Flatten(), nn.Linear(2, 2))
    la = KronLaplace(model).fit([(torch.randint(50_000, (4, 1)), torch.randint(2, (4,)))])
    assert la.factors["0.weight"].inputs.numel() == 50_000
    assert torch.isfinite(la.log_marginal_likelihood())


def test_a_linear_layer_met_first_without_and_then_with_shared_positions():
    """As the batch has them."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(m.linear(x))
        return y if y.dim() == 2 else y.sum(1)

    model = Function(forward, linear=nn.Linear(2, 3)).double()
    batches = [(torch.randn(n, *size, 2).double(), torch.randint(3, (n,))) for n, size in ((3, ()), (4, (2,)))]
    both, *each = (KronLaplace(model).fit(some) for some in (batches, batches[:1], batches[1:]))
    for name, factor in both.factors.items():
        torch.testing.assert_close(factor.outputs, sum(la.factors[name].outputs for la in each))


class Sizes(TorchDispatchMode):
    """Numbers of elements of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen.update(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


@pytest.mark.parametrize("side, formed", [(1, False), (2, True)])
def test_the_inner_gradient_of_a_factored_layer_is_formed_for_several_positions_only(side, formed):
    n, c, d, columns = 3, 5, 7, 2
    layer = FactoredLinear2d(c, d, (2, 4), (1, side))
    model = nn.Sequential(nn.Conv2d(2, c, 1), layer, nn.Flatten(), nn.Linear(d * side, columns + 1))
    with Sizes() as sizes:
        KronLaplace(model).fit([(torch.randn(n, 2, 2, 4), torch.randint(columns + 1, (n,)))])
    assert (columns * n * d * c in sizes.seen) == formed


def test_layers_of_several_groups(dense_ggn):
    """Every path of a layer at once: biases exact, one entry per parameter, effective parameters by path."""
    paths = {
        "f_fc": SlicesAsChannels(FactoredLinear2d(8, 12, 4, 2)),
        "conv": SlicesAsChannels(nn.Sequential(CircularConv2d(8, 12), nn.AvgPool2d(2)), frames="common"),
        "gconv": nn.Sequential(GroupConv2d(2, 3, variant="pointwise"), GroupPolyphasePool2d()),
    }
    layers = GroupLift(), RelaxedEquivariance(paths), nn.Tanh(), GroupMaxPool(), nn.Flatten(), nn.Linear(12, 3)
    model = randomised(nn.Sequential(*layers))
    x, y = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 0])
    la = KronLaplace(model).fit([(x, y)])
    for name, ggn in dense_ggn(model, x, y).items():
        if "bias" in name:
            torch.testing.assert_close(la.factors[name].to_dense()[0], ggn, rtol=1e-9, atol=1e-11)
    assert set(la.factors) == {n for n, _ in model.named_parameters()}
    assert set(la.layer_types()) == {"1"} and la.layer_types()["1"] in paths

"""Every curvature rule against oracles of plain autograd: see :mod:`python_tests.laplace.conformance`. A new rule takes a row of CASES."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import nn as ella_nn
from ella_cuda.laplace import (
    DiagLaplace,
    FactorShape,
    FullLaplace,
    KronLaplace,
    Rule,
    evidence_gradient,
    exact_log_marginal_likelihood,
    register,
)
from python_tests.laplace.conformance import (
    PRIOR,
    WORDS,
    Case,
    Network,
    Oracle,
    at_inputs,
    at_outputs,
    attention,
    averaged,
    exact,
    factored,
    looked_up,
    through_pool,
)
from python_tests.laplace.jacobians import Scaled

APPROXIMATIONS = ("expand", "reduce")


class Mixed(nn.Module):
    """A linear map whose weight is stored the other way round, a layer of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@register(Mixed)
class MixedRule(Rule):
    batch_second = True

    def shapes(self) -> dict[str, FactorShape]:
        return {"weight": FactorShape(1, 3, 4, 1, layout="gab")}

    def inputs(self, x: Tensor) -> None:
        self.kept = x
        self.factors["weight"].input_moment.add(x.reshape(-1, 1, 3))

    def outputs(self, gradient: Tensor) -> None:
        positions = self.kept[0].numel() // 3
        self.factors["weight"].output_moment.add(gradient.reshape(-1, 1, 4), 1 / positions)


def mixed(layer: nn.Module, arguments: tuple[Tensor, ...], gradient: Tensor) -> dict:
    plain = nn.Linear(3, 4, bias=False).double()
    found = at_outputs(-1)(plain, arguments, gradient)["weight"]
    return {"weight": found._replace(layout="gab")}


def conv(kind: type[nn.Module], *args: object, size: tuple[int, ...], **kwargs: object) -> Case:
    return Case(lambda: kind(*args, **kwargs), ((args[0], *size),), at_outputs(1))


def transposed(kind: type[nn.Module], *args: object, size: tuple[int, ...], **kwargs: object) -> Case:
    return Case(lambda: kind(*args, **kwargs), ((args[0], *size),), at_inputs)


def norm(kind: type[nn.Module], *args: object, shape: tuple[int, ...], moved: bool = False, **kwargs: object) -> Case:
    return Case(lambda: kind(*args, **kwargs), (shape,), exact, second=moved, folded=moved)


def table(kind: type[nn.Module], shape: tuple[int, ...], padded: bool = False, **kwargs: object) -> Case:
    kwargs = kwargs | ({"padding_idx": 1} if padded else {})
    twice = () if padded else ("expand",)
    return Case(lambda: kind(WORDS, 3, **kwargs), (shape,), looked_up, words=True, twice=twice, copies=False)


def attending(*shapes: tuple[int, ...], **kwargs: object) -> Case:
    return Case(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True, **kwargs), shapes, attention, second=True, one_call=False
    )


CASES = {
    "Linear": Case(lambda: nn.Linear(3, 4), ((3,),), at_outputs(-1)),
    "Linear, no bias": Case(lambda: nn.Linear(3, 4, bias=False), ((3,),), at_outputs(-1)),
    "Linear, positions": Case(lambda: nn.Linear(3, 2), ((3, 3),), at_outputs(-1), second=True, folded=True),
    "Linear, grid": Case(lambda: nn.Linear(2, 2), ((3, 2, 2),), at_outputs(-1), second=True),
    "Bilinear": Case(lambda: nn.Bilinear(2, 3, 2), ((2,), (3,)), at_outputs(-1)),
    "Bilinear, positions": Case(lambda: nn.Bilinear(2, 2, 3), ((3, 2), (3, 2)), at_outputs(-1)),
    "Conv1d": conv(nn.Conv1d, 2, 3, 3, size=(4,)),
    "Conv1d, all": conv(nn.Conv1d, 4, 4, 2, 2, 1, 2, 2, size=(7,), bias=False, padding_mode="replicate"),
    "Conv1d, same": conv(nn.Conv1d, 2, 2, 4, size=(5,), padding="same", padding_mode="reflect"),
    "Conv2d": conv(nn.Conv2d, 2, 3, 3, size=(4, 4)),
    "Conv2d, zeros": conv(nn.Conv2d, 2, 2, 3, size=(3, 4), padding=1),
    "Conv2d, stride": conv(nn.Conv2d, 1, 3, (3, 2), size=(6, 5), stride=(2, 1), padding=(1, 0)),
    "Conv2d, dilation": conv(nn.Conv2d, 1, 2, (2, 3), size=(5, 6), dilation=(3, 2), padding=(1, 2)),
    "Conv2d, groups": conv(nn.Conv2d, 4, 6, 2, size=(3, 3), groups=2),
    "Conv2d, depthwise": conv(nn.Conv2d, 3, 3, 3, size=(3, 3), groups=3, padding=1, bias=False),
    "Conv2d, circular": conv(nn.Conv2d, 2, 2, 3, size=(3, 4), padding=1, padding_mode="circular"),
    "Conv2d, circular, stride": conv(nn.Conv2d, 2, 2, (3, 1), size=(4, 4), stride=2, padding=(2, 1), padding_mode="circular"),
    "Conv2d, circular, groups": conv(nn.Conv2d, 4, 2, 3, size=(3, 3), padding="same", padding_mode="circular", groups=2),
    "Conv2d, same, even": conv(nn.Conv2d, 1, 2, (2, 4), size=(4, 5), padding="same"),
    "Conv2d, same, even, circular": conv(nn.Conv2d, 1, 2, (4, 2), size=(4, 4), padding="same", padding_mode="circular"),
    "Conv2d, reflect": conv(nn.Conv2d, 1, 2, 3, size=(3, 4), padding=(2, 1), padding_mode="reflect", stride=2),
    "Conv2d, replicate": conv(nn.Conv2d, 2, 2, 2, size=(3, 3), padding=1, padding_mode="replicate", dilation=2),
    "Conv2d, positions of its own": conv(nn.Conv2d, 2, 3, 2, size=(2, 2)),
    "Conv3d": conv(nn.Conv3d, 2, 2, 2, size=(2, 3, 2)),
    "Conv3d, all": conv(nn.Conv3d, 2, 4, (1, 2, 2), (1, 2, 1), (0, 1, 1), (1, 1, 2), 2, size=(2, 3, 3)),
    "Conv3d, same, circular": conv(nn.Conv3d, 1, 2, (2, 1, 3), size=(3, 2, 3), padding="same", padding_mode="circular"),
    "ConvTranspose1d": transposed(nn.ConvTranspose1d, 2, 3, 3, size=(3,)),
    "ConvTranspose1d, all": transposed(nn.ConvTranspose1d, 4, 4, 3, 2, 1, 1, 2, dilation=2, size=(3,), bias=False),
    "ConvTranspose2d": transposed(nn.ConvTranspose2d, 2, 2, 2, size=(2, 3)),
    "ConvTranspose2d, all": transposed(nn.ConvTranspose2d, 2, 4, (3, 2), 2, 1, 1, 2, size=(3, 2)),
    "ConvTranspose3d": transposed(nn.ConvTranspose3d, 2, 2, (1, 2, 2), (1, 2, 1), (0, 1, 0), size=(2, 2, 2)),
    "Embedding": table(nn.Embedding, (3,)),
    "Embedding, one word": table(nn.Embedding, ()),
    "Embedding, grid": table(nn.Embedding, (2, 2)),
    "Embedding, padding": table(nn.Embedding, (4,), True),
    "EmbeddingBag, sum": table(nn.EmbeddingBag, (3,), mode="sum"),
    "EmbeddingBag, mean": table(nn.EmbeddingBag, (4,), True, mode="mean"),
    "BatchNorm1d": norm(nn.BatchNorm1d, 4, shape=(4,)),
    "BatchNorm1d, sequences": norm(nn.BatchNorm1d, 3, shape=(3, 4)),
    "BatchNorm2d": norm(nn.BatchNorm2d, 3, 0.5, shape=(3, 2, 2)),
    "BatchNorm3d": norm(nn.BatchNorm3d, 2, shape=(2, 2, 1, 3)),
    "SyncBatchNorm": norm(nn.SyncBatchNorm, 3, shape=(3, 2, 2)),
    "InstanceNorm1d": norm(nn.InstanceNorm1d, 3, affine=True, shape=(3, 4)),
    "InstanceNorm2d": norm(nn.InstanceNorm2d, 3, 0.1, affine=True, shape=(3, 2, 3)),
    "InstanceNorm2d, tracking": norm(nn.InstanceNorm2d, 3, affine=True, track_running_stats=True, shape=(3, 2, 3)),
    "InstanceNorm3d": norm(nn.InstanceNorm3d, 2, affine=True, shape=(2, 2, 2, 2)),
    "GroupNorm": norm(nn.GroupNorm, 2, 4, 0.1, shape=(4, 2, 2)),
    "GroupNorm, vectors": norm(nn.GroupNorm, 2, 6, 0.1, shape=(6,)),
    "LayerNorm": norm(nn.LayerNorm, 5, 0.1, shape=(5,)),
    "LayerNorm, positions": norm(nn.LayerNorm, 4, shape=(3, 4), moved=True),
    "LayerNorm, axes": norm(nn.LayerNorm, (2, 3), bias=False, shape=(2, 2, 3)),
    "RMSNorm": norm(nn.RMSNorm, 5, 0.1, shape=(5,)),
    "RMSNorm, positions": norm(nn.RMSNorm, 4, shape=(3, 4), moved=True),
    "RMSNorm, axes": norm(nn.RMSNorm, (2, 3), shape=(2, 2, 3)),
    "PReLU": norm(nn.PReLU, shape=(3, 2)),
    "PReLU, channels": norm(nn.PReLU, 3, shape=(3, 2, 2)),
    "PReLU, numbers": norm(nn.PReLU, shape=()),
    "PReLU, vectors": norm(nn.PReLU, 4, shape=(4,)),
    "MultiheadAttention": attending((3, 4), (3, 4), (3, 4)),
    "MultiheadAttention, no biases": attending((2, 4), (2, 4), (2, 4), bias=False),
    "MultiheadAttention, cross": attending((2, 4), (3, 4), (3, 4)),
    "MultiheadAttention, sizes": attending((2, 4), (3, 3), (3, 2), kdim=3, vdim=2),
    "FactoredLinear2d": Case(lambda: ella_nn.FactoredLinear2d(2, 3, 2, (2, 1)), ((2, 2, 2),), factored),
    "FactoredLinear2d, no bias": Case(lambda: ella_nn.FactoredLinear2d(2, 2, 2, 2, bias=False), ((2, 2, 2),), factored),
    "FactoredLinear2d, one position": Case(lambda: ella_nn.FactoredLinear2d(2, 3, 2, 1), ((2, 2, 2),), factored),
    "SparseFactoredLinear2d": Case(lambda: ella_nn.SparseFactoredLinear2d(2, 2, 3, 3, num_anchors=4), ((2, 3, 3),), factored),
    "SparseFactoredLinear2d, exponential": Case(
        lambda: ella_nn.SparseFactoredLinear2d(1, 2, 3, 2, basis="exponential"), ((1, 3, 3),), factored
    ),
    "SparseConv2d, exponential": Case(lambda: ella_nn.SparseConv2d(2, 2, 3, basis="exponential"), ((2, 3, 3),), at_outputs(1)),
    "SparseConv2d": Case(lambda: ella_nn.SparseConv2d(2, 3, 3, num_anchors=4), ((2, 3, 4),), at_outputs(1)),
    "CircularConv2d": Case(lambda: ella_nn.CircularConv2d(2, 3, (3, 1)), ((2, 3, 3),), at_outputs(1)),
    "StridedCircularConv2d": Case(lambda: ella_nn.StridedCircularConv2d(2, 3, 3), ((2, 4, 4),), through_pool),
    "StridedCircularConv2d, norm": Case(
        lambda: ella_nn.StridedCircularConv2d(2, 2, (1, 3), False, norm=1), ((2, 4, 2),), through_pool, copies=False
    ),
    "GroupFilter2d": Case(lambda: ella_nn.GroupFilter2d(1, 2, 3), ((1, 4, 3, 3),), at_outputs(1)),
    "GroupFilter2d, common": Case(lambda: ella_nn.GroupFilter2d(1, 2, 3, frames="common"), ((1, 4, 3, 3),), at_outputs(1)),
    "GroupFilter2d, depthwise": Case(lambda: ella_nn.GroupFilter2d(2, 2, 3, depthwise=True), ((2, 4, 3, 3),), at_outputs(1)),
    "GroupFilter2d, apart": Case(lambda: ella_nn.GroupFilter2d(2, 2, 3, mixes_slices=False), ((2, 4, 3, 3),), at_outputs(1)),
    "a user's": Case(Mixed, ((2, 3),), mixed, second=True, folded=True, reduce=False, twice=("expand",), copies=False),
    "a user's, exact": Case(Scaled, ((3, 4),), exact, reduce=False, twice=("expand",), copies=False),
}  # fmt: skip


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
KINDS = {type(case.make()): case for case in reversed(CASES.values())}
each_kind = pytest.mark.parametrize("case", KINDS.values(), ids=[kind.__name__ for kind in KINDS])


def close(found: Tensor, expected: Tensor, relative: float = 1e-9) -> None:
    """Equality up to a share of the largest number."""
    assert found.shape == expected.shape
    torch.testing.assert_close(
        found.double(), expected, rtol=relative, atol=relative * max(float(expected.abs().max()), 1e-9)
    )


def check_factors(la: KronLaplace, oracle: Oracle, relative: float = 1e-9) -> None:
    """Both sides of each parameter's factor."""
    assert la.parameter_names == list(la.factors) == list(oracle.parameters)
    for name, factor in la.factors.items():
        inputs, outputs = oracle.factor(name, la.approximation)
        assert factor.inputs.dtype == factor.outputs.dtype == torch.float64
        close(factor.inputs, inputs, relative)
        close(factor.outputs, outputs, relative)


def check(la: KronLaplace, oracle: Oracle, x: Tensor, relative: float = 1e-9) -> None:
    """The factors and the evidence; with "expand", whose Jacobians are those of "reduce", the outputs' covariance."""
    check_factors(la, oracle, relative)
    close(la.log_marginal_likelihood(), oracle.evidence(la.approximation), relative)
    if la.approximation == "expand":
        close(la.functional_variance(x), oracle.covariance("expand"), relative)


@functools.lru_cache(maxsize=2)
def problem(case: Case, calls: int = 1, tied: bool = False, arrangement: str = "plain") -> tuple:
    """A network, which tests leave as it is, its data and their oracle."""
    model = Network(case, calls, tied, arrangement)
    x, y = model.data()
    return model, x, y, Oracle(model, x, y)


def fitted(model: nn.Module, x: Tensor, y: Tensor, size: int = 3, kind: type = KronLaplace, **options: object):
    """A fit in batches of so many data points."""
    return kind(model, prior_precision=PRIOR, **options).fit(list(zip(x.split(size), y.split(size), strict=True)))


def rows(*needs: str) -> pytest.MarkDecorator:
    """A test of all cases that serve these attributes of :class:`Case`, in each of the approximations that they serve."""

    def serves(case: Case, need: str, approximation: str) -> bool:
        has = getattr(case, need)
        return approximation in has if isinstance(has, tuple) else has

    chosen = [
        pytest.param(case, approximation, id=f"{name}-{approximation}")
        for name, case in CASES.items()
        for approximation in APPROXIMATIONS[: 1 + case.reduce]
        if all(serves(case, need, approximation) for need in needs)
    ]
    return pytest.mark.parametrize(("case", "approximation"), chosen)


@rows()
def test_one_call(case, approximation):
    """In batches, and with images and columns one by one; the network stays as it is."""
    model, x, y, oracle = problem(case)
    before = copy.deepcopy(model.state_dict())
    check(fitted(model.train(), x, y, approximation=approximation), oracle, x)
    assert model.training and all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    check_factors(fitted(model.eval(), x, y, 4, approximation=approximation, memory_budget=1), oracle)


@rows("one_call")
def test_the_evidence_inside_of_a_graph(case, approximation):
    model, x, y, oracle = problem(case)
    la = KronLaplace(model, prior_precision=PRIOR, approximation=approximation)
    close(exact_log_marginal_likelihood(la, x, y), oracle.evidence(approximation))


@rows("twice")
def test_two_calls(case, approximation):
    """Positions of both are shared positions, in checkpoints too."""
    model, x, y, oracle = problem(case, calls=2)
    check(fitted(model, x, y, approximation=approximation), oracle, x)
    if case not in KINDS.values():
        return
    model.checkpointed = True
    la = fitted(model, x, y, 4, approximation=approximation, memory_budget=1)
    model.checkpointed = False
    check_factors(la, oracle)


# The first call counts twice where no layer has a bias by which a function's call is told from a layer's.
@rows("twice")
def test_a_weight_of_two_layers(case, approximation):
    model, x, y, oracle = problem(case, calls=2, tied=True)
    check(fitted(model, x, y, approximation=approximation), oracle, x)


@pytest.mark.parametrize("name", [name for name in CASES if "Factored" in name])
def test_an_output_side_of_each_channel(name):
    model, x, y, _ = problem(CASES[name])
    oracle = Oracle(model, x, y)
    oracle.weights = {n: blocks._replace(shared=False) for n, blocks in oracle.weights.items()}
    check(fitted(model, x, y, resolution="per_channel"), oracle, x)
    check_factors(fitted(model, x, y, 1, resolution="per_channel", memory_budget=1), oracle)


@each_case
def test_the_whole_matrix_and_its_diagonal(case):
    model, x, y, oracle = problem(case)
    expected = oracle.whole()
    close(fitted(model, x, y, kind=FullLaplace).H, expected)
    close(fitted(model, x, y, kind=DiagLaplace).H, expected.diagonal())


@rows("second")
def test_the_batch_second(case, approximation):
    model, x, y, oracle = problem(case, arrangement="second")
    check(la := fitted(model, x, y, approximation=approximation), oracle, x)
    if case.one_call:
        close(exact_log_marginal_likelihood(la, x, y), oracle.evidence(approximation))


@rows("folded")
def test_positions_folded_into_the_batch(case, approximation):
    model, x, y, oracle = problem(case, arrangement="folded")
    check(fitted(model, x, y, approximation=approximation), oracle, x)


# Copies of which other components are returned have their gradients at other positions, and are summed as if at the same.


@functools.lru_cache(maxsize=2)
def averages(case: Case, copies: int, count: int, moved: float = 0.0) -> tuple:
    """As :func:`problem`, of a network averaged over copies, and the draws; ``moved`` is added to the amounts for the oracle alone."""
    model = averaged(case, copies)
    x, y = model.network.data(count)
    generator = torch.Generator().manual_seed(2)
    eps = model.augment.draw(count, "shared" if copies == 3 else "independent", generator)
    model.augment.raw += moved
    oracle = Oracle(model, x, y, eps)
    model.augment.raw -= moved
    return model, x, y, oracle, eps


@pytest.mark.parametrize(("copies", "count"), [(3, 4), (16, 3)], ids=["together", "in chunks"])
@rows("copies")
def test_copies(case, approximation, copies, count):
    model, x, y, oracle, eps = averages(case, copies, count)
    together = copies == 3
    model.network.images.clear()
    with model.augment.held(eps):
        la = fitted(model, x, y, 4, approximation=approximation, memory_budget=1 << 30 if together else 1)
        assert (max(model.network.images) == copies * count) == together
        check(la, oracle, x)
        if case in KINDS.values() and together and approximation == "expand":
            close(fitted(model, x, y, kind=FullLaplace).H, oracle.whole())
            close(fitted(model, x, y, kind=DiagLaplace).H, oracle.whole().diagonal())


@rows("copies", "one_call")
def test_the_gradient_of_the_evidence(case, approximation):
    """In the amounts of an augmentation, against central differences."""
    step = 1e-4
    values = [averages(case, 3, 4, sign * step)[3].evidence(approximation) for sign in (1, -1)]
    model, x, y, _, eps = averages(case, 3, 4, -step)
    with model.augment.held(eps):
        found = evidence_gradient(fitted(model, x, y, 4, approximation=approximation), [(x, y)])
    close(found["augment.raw"].sum(), (values[0] - values[1]) / (2 * step), 1e-6)


@each_case
def test_frozen_parameters(case):
    """Each parameter of the layer by itself."""
    names = [name for name, _ in Network(case).layers[0].named_parameters()]
    for name in names if len(names) > 1 else ():
        model = Network(case)
        model.layers[0].get_parameter(name).requires_grad_(False)
        x, y = model.data()
        check(fitted(model, x, y), Oracle(model, x, y), x)


@each_kind
def test_single_precision(case):
    model, x, y, oracle = problem(case)
    x = x if case.words else x.float()
    check(fitted(copy.deepcopy(model).float(), x, y), oracle, x, 2e-4)


@each_kind
def test_a_layer_under_autocast(case):
    model, x, y, oracle = problem(case)
    model, x = copy.deepcopy(model).float(), x if case.words else x.float()
    model.autocast = torch.bfloat16
    check_factors(fitted(model, x, y), oracle, 0.05)


def test_every_registered_rule_has_a_row():
    class Nobodys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.secret = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(TypeError) as refusal:
        KronLaplace(Nobodys())
    names = str(refusal.value).rpartition("Layers with rules: ")[2].rstrip(".").split(", ")
    package = {name for name in names if hasattr(nn, name) or hasattr(ella_nn, name)}
    assert len(package) >= 25
    assert package - {kind.__name__ for kind in KINDS} == set()

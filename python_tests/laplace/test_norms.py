"""Normalisation layers and PReLU: their blocks are those of the dense generalised Gauss-Newton matrix, of any number of data points."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import marglik_training
from ella_cuda.laplace import KronLaplace, memory
from ella_cuda.laplace.column_functions import constant_scale
from ella_cuda.laplace.rules import rules_for
from python_tests.laplace import checks

IMAGES, CLASSES = 5, 3


class Transposed(nn.Module):
    """``inner`` on ``(T, N, ...)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def around(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A network with the layer between nonlinear ones, whose input at the layer is ``(N, *shape)``."""
    size = int(torch.Size(shape).numel())
    layers = (
        nn.Linear(4, size),
        nn.Tanh(),
        nn.Unflatten(1, shape),
        norm,
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(size, CLASSES),
    )
    return checks.randomised(nn.Sequential(*layers), 0.7)


LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (6,)),
    "BatchNorm1d, sequences": (lambda: nn.BatchNorm1d(3), (3, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 1, 3)),
    "BatchNorm2d, eps": (lambda: nn.BatchNorm2d(3, eps=0.5), (3, 2, 2)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (3, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, eps=0.1), (3, 2, 3)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 2)),
    "InstanceNorm2d, tracking": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6, eps=0.1), (6, 2, 2)),
    "GroupNorm, vectors": (lambda: nn.GroupNorm(3, 6), (6,)),
    "LayerNorm": (lambda: nn.LayerNorm(6, eps=0.1), (6,)),
    "LayerNorm, positions": (lambda: nn.LayerNorm(4), (3, 2, 4)),
    "LayerNorm, two axes": (lambda: nn.LayerNorm((2, 4)), (3, 2, 4)),
    "LayerNorm, three axes": (lambda: nn.LayerNorm((3, 2, 4)), (3, 2, 4)),
    "LayerNorm, without a bias": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "LayerNorm, the batch second": (lambda: Transposed(nn.LayerNorm(4)), (3, 4)),
    "PReLU": (lambda: nn.PReLU(), (3, 2, 2)),
    "PReLU, channels": (lambda: nn.PReLU(3), (3, 2, 2)),
    "PReLU, vectors": (lambda: nn.PReLU(6), (6,)),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=0.1), (6,)),
    "RMSNorm, positions": (lambda: nn.RMSNorm(4), (3, 4)),
    "RMSNorm, two axes": (lambda: nn.RMSNorm((2, 4)), (3, 2, 4)),
    "RMSNorm, the batch second": (lambda: Transposed(nn.RMSNorm(4)), (3, 4)),
}


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("layer", LAYERS)
def test_blocks_are_those_of_the_dense_matrix(layer, likelihood, dense_ggn, batches):
    make, shape = LAYERS[layer]
    model = around(make(), shape)
    x = torch.randn(IMAGES, 4, dtype=torch.float64)
    y = torch.randint(CLASSES, (IMAGES,)) if likelihood == "classification" else torch.randn(IMAGES, CLASSES).double()
    before = copy.deepcopy(model.state_dict())
    expected = dense_ggn(model, x, y, likelihood)
    own = [name for name in expected if name.startswith("3.")]
    assert own
    for loader in ([(x, y)], batches(x, y, 2)):
        factors = KronLaplace(model.train(), likelihood).fit(loader).factors
        for name in own:
            exact = expected[name]
            torch.testing.assert_close(
                factors[name].to_dense()[0], exact, rtol=1e-9, atol=1e-11 * float(exact.abs().max())
            )
    assert model.training and all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("parameters", ["trained", "frozen", "none"])
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if "Batch" in layer])
def test_gradients_go_back_through_a_norm_of_constants(layer, parameters, dense_ggn):
    """To the bias before it, whose block is exact; an activation in place follows."""
    make, shape = LAYERS[layer]
    model = around(make(), shape)
    model[4] = nn.ReLU(inplace=True)
    if parameters == "none":
        model[3].weight = model[3].bias = None
    model[3].requires_grad_(parameters == "trained")
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    expected = dense_ggn(model, x, y, "classification")["0.bias"]
    found = KronLaplace(model).fit([(x, y)]).factors["0.bias"].to_dense()[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11 * float(expected.abs().max()))


@pytest.mark.parametrize(
    (
        "kind",
        "trained",
    ),  # of a trained norm the hook of all is refused: what comes back is no gradient at its own output
    [("own forward", True), ("own forward", False), ("hook of all", False), ("subclass", True), ("subclass", False)],
)
def test_another_output_than_the_norms_is_left_to_autograd(kind, trained, dense_ggn):
    class Activated(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sin())

    model = around(Activated(6) if kind == "subclass" else nn.BatchNorm1d(6), (6,))
    norm = model[3].requires_grad_(trained)
    if kind == "own forward":
        forward = norm.forward
        norm.forward = lambda x: forward(x.sin())
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    hook = None
    if kind == "hook of all":
        hook = nn.modules.module.register_module_forward_hook(lambda m, _, out: out.sin() if m is norm else None)
    try:
        expected = dense_ggn(model, x, y, "classification")["0.bias"]
        found = KronLaplace(model).fit([(x, y)]).factors["0.bias"].to_dense()[0]
    finally:
        if hook is not None:
            hook.remove()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11 * float(expected.abs().max()))


@pytest.mark.parametrize("transform", ["grad", "dual numbers"])
def test_a_norm_inside_of_a_transform_of_the_forward(transform):
    """A frozen part whose derivative is an input of the rest."""

    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if transform == "grad":
                return self.head(torch.func.grad(lambda v: self.part(v).square().sum())(x))
            with torch.autograd.forward_ad.dual_level():
                dual = self.part(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
                return self.head(torch.autograd.forward_ad.unpack_dual(dual).tangent + x)

    model = checks.randomised(Slopes(), 0.7)
    model.part.requires_grad_(False)
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    found = KronLaplace(model).fit([(x, y)]).factors["head.bias"].to_dense()[0]
    p = model.eval()(x).softmax(1).detach()
    torch.testing.assert_close(found, (p.diag_embed() - p[:, :, None] * p[:, None]).sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_scale_of_a_norm_in_any_precision(dtype):
    norm = nn.BatchNorm2d(5, eps=0.01).to(dtype)
    norm.running_var.copy_(torch.rand(5))
    norm.weight.detach().copy_(torch.randn(5))
    expected = norm.weight.double() / (norm.running_var.double() + 0.01).sqrt()
    scale = constant_scale(norm)
    assert scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(scale.double(), expected.detach(), rtol=2e-7, atol=0)


def test_an_estimate_counts_what_is_kept_behind_a_norm():
    """Its input is let go, and another tensor may lie where it was."""
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(3 * 64, CLASSES))
    la, x = KronLaplace(model), torch.randn(7, 3, 8, 8)
    estimates = set()
    for size in range(5):
        between = [torch.empty(1 << (size + 6)) for _ in range(5)]
        estimates.add(la.memory_estimate(x))
        del between
    assert len(estimates) == 1


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("layer", ["BatchNorm2d", "LayerNorm, positions", "GroupNorm"])
def test_one_parameter_may_be_frozen(layer, frozen, dense_ggn):
    make, shape = LAYERS[layer]
    model = around(make(), shape)
    model.get_parameter(f"3.{frozen}").requires_grad_(False)
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    factors, expected = KronLaplace(model).fit([(x, y)]).factors, dense_ggn(model, x, y)
    (name,) = (n for n in factors if n.startswith("3."))
    assert frozen not in name
    torch.testing.assert_close(factors[name].to_dense()[0], expected[name], rtol=1e-9, atol=1e-12)


def test_statistics_of_the_batch_are_refused():
    model = around(nn.BatchNorm1d(6, track_running_stats=False), (6,))
    with pytest.raises(
        ValueError, match=r"layer '3' \(BatchNorm1d\) has no running statistics .*track_running_stats=True"
    ):
        KronLaplace(model)


def test_nothing_of_a_batch_is_kept():
    """What a fit holds afterwards does not grow with the batch."""
    sizes = []
    for images in (4, 400):
        model = around(nn.LayerNorm(6), (6,))
        la = KronLaplace(model).fit([(torch.randn(images, 4).double(), torch.randint(CLASSES, (images,)))])
        sizes.append(len(pickle.dumps(la)))
    assert abs(sizes[1] - sizes[0]) < 1000


def test_float32_agrees_with_float64():
    model = around(nn.BatchNorm2d(3), (3, 2, 4))
    x, y = torch.randn(64, 4, dtype=torch.float64), torch.randint(CLASSES, (64,))
    exact = KronLaplace(model).fit([(x, y)])
    single = KronLaplace(copy.deepcopy(model).float()).fit([(x.float(), y)])
    for name, factor in exact.factors.items():
        torch.testing.assert_close(single.factors[name].outputs, factor.outputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        single.log_marginal_likelihood().double(), exact.log_marginal_likelihood(), rtol=1e-5, atol=0
    )


def test_the_evidence_learns_their_precisions():
    torch.manual_seed(0)
    x = torch.randn(60, 1, 8, 8)
    y = (x.mean((1, 2, 3)) > 0).long()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    loader = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 60, 20)]
    la, _, margliks, _ = marglik_training(model, loader, n_epochs=3, n_hypersteps=2, progress_bar=False)
    assert len(margliks) == 3 and all(map(torch.isfinite, map(torch.as_tensor, margliks)))
    assert la.prior_precision[[*dict(model.named_parameters())].index("1.weight")] != 1


def test_a_slope_of_numbers(dense_ggn):
    """PReLU on one number a data point."""

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.slope, self.last = nn.Linear(4, 1), nn.PReLU(), nn.Linear(1, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.slope(self.first(x).squeeze(1))[:, None])

    model = checks.randomised(Numbers())
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    found = KronLaplace(model).fit([(x, y)]).factors["slope.weight"].to_dense()[0]
    torch.testing.assert_close(found, dense_ggn(model, x, y)["slope.weight"], rtol=1e-9, atol=1e-12)


def test_what_is_kept_is_in_the_estimate():
    x = torch.randn(20_000, 4).double()  # the passes need more than the eigenvalues, whatever the number of threads
    together = 1 << 30  # of all images
    model = around(nn.LayerNorm(600), (600,))
    free = KronLaplace(model, memory_budget=together).memory_estimate(x)
    model[3].weight.requires_grad_(False)
    assert (
        free - KronLaplace(model, memory_budget=together).memory_estimate(x) >= 20_000 * 600 * 8 + 600 * 600 * 8
    )  # n(x), and the block of the scale


def test_a_layer_too_large_is_named(monkeypatch):
    layers = nn.Conv2d(1, 1, 1), nn.LayerNorm((1, 2048, 2048)), nn.Flatten(), nn.AdaptiveAvgPool1d(2)
    batch = torch.randn(2, 1, 2048, 2048), torch.randint(2, (2,))
    model = nn.Sequential(*layers)
    with pytest.raises(
        MemoryError, match=r"layer '1' \(LayerNorm\): the system has no memory for its factors, [\d,]+ bytes"
    ):
        rules_for(model, "shared")[1].allocate()
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)  # where nothing tells
    with pytest.raises(MemoryError, match=r"layer '1' \(LayerNorm\): the system has no memory"):
        KronLaplace(model).fit([batch])

"""Normalisation layers beside others: how gradients pass them, and what of them is kept."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, memory
from python_tests.laplace import checks

IMAGES, CLASSES = 5, 3


def around(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A network with the layer between nonlinear ones, whose input at the layer is ``(N, *shape)``."""
    size = int(torch.Size(shape).numel())
    before = nn.Linear(4, size), nn.Tanh(), nn.Unflatten(1, shape)
    return checks.randomised(nn.Sequential(*before, norm, nn.Tanh(), nn.Flatten(), nn.Linear(size, CLASSES)), 0.7)


@pytest.mark.parametrize("parameters", ["trained", "frozen", "none"])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, (3,)), (nn.BatchNorm1d, (3, 5)), (nn.BatchNorm3d, (3, 2, 1, 3))])  # fmt: skip
def test_gradients_go_back_through_a_norm_of_constants(kind, shape, parameters, dense_ggn):
    """To the bias before it, whose block is exact; an activation in place follows."""
    model = around(kind(3), shape)
    model[4] = nn.ReLU(inplace=True)
    if parameters == "none":
        model[3].weight = model[3].bias = None
    model[3].requires_grad_(parameters == "trained")
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    expected = dense_ggn(model, x, y, "classification")["0.bias"]
    found = KronLaplace(model).fit([(x, y)]).factors["0.bias"].to_dense()[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11 * float(expected.abs().max()))


# Of a trained norm the hook of all is refused: what comes back is no gradient at its own output.
@pytest.mark.parametrize(
    ("kind", "trained"),
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

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.first(x)
        if transform == "grad":
            return m.head(torch.func.grad(lambda v: m.part(v).square().sum())(x))
        with torch.autograd.forward_ad.dual_level():
            dual = m.part(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            return m.head(torch.autograd.forward_ad.unpack_dual(dual).tangent + x)

    layers = {"first": nn.Linear(4, 6), "part": nn.BatchNorm1d(6), "head": nn.Linear(6, CLASSES)}
    model = checks.randomised(checks.Function(forward, **layers), 0.7)
    model.part.requires_grad_(False)
    x, y = torch.randn(IMAGES, 4, dtype=torch.float64), torch.randint(CLASSES, (IMAGES,))
    found = KronLaplace(model).fit([(x, y)]).factors["head.bias"].to_dense()[0]
    p = model.eval()(x).softmax(1).detach()
    torch.testing.assert_close(found, (p.diag_embed() - p[:, :, None] * p[:, None]).sum(0))


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


def test_nothing_of_a_batch_is_kept():
    """What a fit holds afterwards does not grow with the batch."""
    sizes = []
    for images in (4, 400):
        model = around(nn.LayerNorm(6), (6,))
        la = KronLaplace(model).fit([(torch.randn(images, 4).double(), torch.randint(CLASSES, (images,)))])
        sizes.append(len(pickle.dumps(la)))
    assert abs(sizes[1] - sizes[0]) < 1000


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
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.LayerNorm((1, 2048, 2048)), nn.Flatten(), nn.AdaptiveAvgPool1d(2))
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)  # where nothing tells
    with pytest.raises(MemoryError, match=r"layer '1' \(LayerNorm\): the system has no memory .*, [\d,]+ bytes"):
        KronLaplace(model).fit([(torch.randn(2, 1, 2048, 2048), torch.randint(2, (2,)))])

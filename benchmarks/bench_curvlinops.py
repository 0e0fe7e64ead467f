"""The benchmark of Kronecker factors that curvlinops publishes, beside ours: ResNet18 on 512 images of 32x32 pixels, ResNet50 on 64 of
224x224 with 1,000 classes, one sampled column, the factors of all convolutions and linear layers, without their eigenvalues.

Curvlinops has a candidate with hooks, and, in versions that trace a batch as a graph, one compiled by ``torch.compile``, which is made for
the shape of the batch before time is measured. CURVLINOPS may name a folder that holds such a version: laplace-torch needs an older one.
Input factors are compared on a few images first; output factors are drawn.

And eigenvalue-corrected factors, whose two passes, eigenvectors and corrected eigenvalues of all columns are timed, and whose traces, which
depend on no basis, are compared first. Of ResNet18 two stages learn: of blocks of 4,608 rows, whose rank few images do not fill, cuSOLVER's
and LAPACK's float32 eigenvectors, which curvlinops takes, do not converge.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.counting import count
from benchmarks.predictions import network as small_cnn
from ella_cuda.laplace import KronLaplace
from ella_cuda.testing import float32_convolutions

sys.path[:0] = filter(None, [os.environ.get("CURVLINOPS")])
pytest.importorskip("curvlinops", reason="curvlinops is not installed")


@dataclass(frozen=True)
class Case:
    images: int
    size: int
    classes: int


CASES = {"resnet18": Case(512, 32, 10), "resnet50": Case(64, 224, 1000)}
OURS, HOOKS, COMPILED = "ella_cuda", "curvlinops, hooks", "curvlinops, compiled"


def network(name: str) -> nn.Module:
    """With convolutions and linear layers alone to be learned."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=CASES[name].classes).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.requires_grad_(True)
    return model.eval()


def factors(who: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor]]:
    """What takes all factors, and gives the input factors by parameter, summed over positions, mean over data."""
    if who == OURS:

        def ours() -> dict[str, Tensor]:
            la = KronLaplace(model, fisher="mc").fit([(x, y)])
            return {name: factor.inputs[0] for name, factor in la.factors.items() if name.endswith("weight")}

        return ours
    loss = nn.CrossEntropyLoss()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    positions = {f"{name}.weight": 1 for name, _ in model.named_modules()}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            positions[f"{name}.weight"] = out[0, 0].numel() if out.dim() == 4 else 1

        return hook

    hooks = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    model(x[:1])
    for hook in hooks:
        hook.remove()
    computers = pytest.importorskip("curvlinops.computers.kfac_make_fx", reason="this curvlinops traces no graphs")
    if who == HOOKS:
        from curvlinops.computers.kfac_hooks import HooksKFACComputer as Hooks

        def hooked() -> dict[str, Tensor]:
            computer = Hooks(model, loss, weights, [(x, y)], check_deterministic=False, mc_samples=1)
            sides, _, _ = computer.compute()
            return {_name(key): positions[_name(key)] * side for key, side in sides.items()}

        return hooked

    def forward(values: dict[str, Tensor], images: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (images,))

    traced, _ = computers.make_compute_kfac_batch(forward, loss, weights, x, y, mc_samples=1)
    graph = torch.compile(traced)

    def compiled() -> dict[str, Tensor]:
        with torch.no_grad():
            sides, _ = graph(weights, x, y)
        return {_name(key): positions[_name(key)] * side for key, side in sides.items()}

    return compiled


def corrected_trace(who: str, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The trace of the eigenvalue-corrected curvature, which is made for it."""
    if who == OURS:
        la = KronLaplace(model, eigenvalue_correction=True).fit(batches)
        return sum(float(basis.values.whole().sum()) for basis in la.posterior_precision.bases.values())
    from curvlinops import EKFACLinearOperator

    loss, weights = nn.CrossEntropyLoss(reduction="sum"), [p for p in model.parameters() if p.requires_grad]
    operator = EKFACLinearOperator(model, loss, weights, batches, check_deterministic=False, fisher_type="type-2")
    return float(operator.trace)


def _name(key: tuple[str, ...]) -> str:
    return next(name for name in key if name.endswith("weight"))


@pytest.mark.parametrize("who", [OURS, HOOKS, COMPILED])
@pytest.mark.parametrize("name", CASES)
def test_factors(time, device, name, who):
    case, model = CASES[name], network(name).to(device)
    images = case.images if device.type == "cuda" else 4
    x = torch.rand(images, 3, case.size, case.size, device=device)
    y = torch.randint(case.classes, (images,), device=device)
    call = factors(who, model, x, y)
    with float32_convolutions():
        found, wanted = call(), factors(OURS, model, x, y)()
    weights = [name for name, p in model.named_parameters() if p.requires_grad and name.endswith("weight")]
    assert set(found) == set(weights)
    for key in weights:
        scale = float(wanted[key].abs().max())
        torch.testing.assert_close(found[key].double(), wanted[key].double(), rtol=1e-3, atol=1e-3 * scale)
    time(
        call,
        work=f"factors of {name}, {images} images of {case.size}x{case.size}, sampled",
        who=who,
        flops=images * count(network(name), torch.randn(1, 3, case.size, case.size)).fit(1),
        bytes=0,
        rounds=5,
        warmups=2,
    )


@pytest.mark.parametrize("who", [OURS, "curvlinops"])
@pytest.mark.parametrize("name", ["small CNN", "resnet18, two stages"])
def test_corrected_eigenvalues(time, device, name, who):
    torch.manual_seed(0)
    if name == "small CNN":
        model, x = small_cnn(), torch.rand(256, 1, 28, 28)
    else:
        model, x = network("resnet18"), torch.rand(64, 3, 32, 32)
        model.layer3.requires_grad_(False)
        model.layer4.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    model, x, y = model.to(device).eval(), x.to(device), torch.randint(10, (len(x),), device=device)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    if who != OURS:
        assert corrected_trace(who, model, batches) == pytest.approx(corrected_trace(OURS, model, batches), rel=1e-3)
    time(
        lambda: corrected_trace(who, model, batches),
        work=f"corrected eigenvalues of {name}, {len(x)} images",
        who=who,
        flops=0,
        bytes=0,
        rounds=2,
        warmups=1,
    )

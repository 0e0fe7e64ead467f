"""Walks CONTRIBUTING.md: every op has the files it lists, and its example layer and learner are right."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, jacrev

from ella_cuda import marglik_training, ops
from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import PATHS, neyshabur
from python_tests.ops.checks import assert_same

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
COMPOSED = {
    "basis_matrix": None,
    "basis_project": "gaussian_project",
    "pack_spectra": None,
}  # of torch and, where there is one, an op of another name
LIBRARIES_ON_CUDA = ("circular_conv2d", "circular_conv2d_pool", "factored_linear_vjp")  # as the page says
PUBLIC = {name.rstrip("_") for name in ops.__all__ if name.islower() and not name.rstrip("_").endswith("_torch")}
OPS = sorted(PUBLIC - COMPOSED.keys() | {op for op in COMPOSED.values() if op})


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_files_of_the_page(op):
    section = PAGE.split("## Adding an op")[1].split("## Adding a layer or a curvature rule")[0]
    paths = [p for p in re.findall(r"`([\w/<>.]+\.\w+)`", section) if "/" in p]
    assert len(paths) >= 8
    (family,) = {source.parent.parent.name for source in (ROOT / "csrc").glob(f"*/*/{op}.c*")}
    for path in paths:
        if path in ("csrc/<family>/cuda/<op>.cu", "python_tests/cuda_sim/test_<op>.py") and op in LIBRARIES_ON_CUDA:
            continue
        pattern = path.replace("<op>", op).replace("<family>", family)
        assert (ROOT / pattern).is_file(), f"{op} lacks {path}"
    module = importlib.import_module(f"ella_cuda.ops.{op}")
    in_place = hasattr(ops, f"{op}_")
    assert callable(getattr(module, f"{op}_torch_" if in_place else f"{op}_torch"))
    assert f'"{op}' in (ROOT / "csrc/schemas.cpp").read_text()


def executed(section: str) -> dict[str, Any]:
    """What the block of a section defines."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    (source,) = re.findall(r"<!-- the test suite executes this block -->\n```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_example_layer_is_exact():
    """The example's block against the dense generalised Gauss-Newton, N > 1."""
    names = executed("Adding a layer or a curvature rule")
    model = torch.nn.Sequential(names["ChannelScale"](3), torch.nn.Flatten(), torch.nn.Linear(12, 4)).double()
    x, y = torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.randint(4, (5,))
    la, reduced = (
        KronLaplace(model, approximation=how).fit([(x[:2], y[:2]), (x[2:], y[2:])]) for how in ("expand", "reduce")
    )
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda scale: functional_call(model, parameters | {"0.scale": scale}, (x,)))(
        parameters["0.scale"]
    )
    p = model(x).detach().softmax(-1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    block = torch.einsum("nka,nkl,nlb->ab", jacobian, hessian, jacobian)
    assert_same(la.factors["0.scale"].outputs[0], block)
    assert_same(reduced.factors["0.scale"].outputs[0], block)


def test_the_example_augmentation_turns_points():
    """Against multiplication by complex numbers of modulus 1."""
    augment = executed("Adding an augmentation")["RotatePoints"](4, init=0.7, constraint="raw", dtype=torch.float64)
    x, eps = torch.randn(5, 2, dtype=torch.float64), torch.rand(5, 4, 1, dtype=torch.float64) * 2 - 1
    turned = torch.view_as_complex(x)[:, None] * torch.exp(0.7j * eps[..., 0])
    assert_same(augment(x, eps=eps), torch.view_as_real(turned))
    function = AveragedFunction(torch.nn.Linear(2, 3).double(), augment)
    augment.raw.requires_grad_()
    function(x).square().sum().backward()
    assert function(x).shape == (5, 3) and float(augment.raw.grad) != 0


class Slope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.slope * x)


def test_the_example_learner_climbs_the_evidence(tmp_path):
    """With the weights held, every step is along the slope of the log likelihood in the logarithm, by finite differences."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), Slope(), torch.nn.Linear(5, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3

    def log_likelihood(slope: float) -> float:
        inside = torch.tanh(slope * model[0](x))
        return -float(torch.nn.functional.cross_entropy(model[2](inside), y).detach())

    seen = []
    learner = executed("Adding a learner")["SlopeLearner"](model[1], 0.5)
    options = {"n_epochs": 4, "optimizer_kwargs": {"lr": 0.0}, "progress_bar": False, "checkpoint": tmp_path / "c.pt"}
    for _ in range(2):  # the second call is a finished run, resumed
        marglik_training(model, [(x, y)], learn=[learner], on_evaluation=seen.append, **options)
    slopes = [evaluation.learned["slope"] for evaluation in seen]
    assert len(slopes) == 4 and slopes[-1] == float(model[1].slope)
    for before, after in itertools.pairwise(slopes):
        uphill = (log_likelihood(before + 1e-6) - log_likelihood(before - 1e-6)) / 2e-6
        assert after == pytest.approx(before * math.exp(0.5 * before * uphill), rel=1e-6) and after != before


def test_every_path_of_the_network_has_curvature():
    for name in PATHS:
        assert KronLaplace(neyshabur(name, 1, 3, width=1)).memory_estimate() > 0

"""Walks CONTRIBUTING.md: every op has the files it lists, and its example layer is right."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, jacrev

from ella_cuda import ops
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
LIBRARIES_ON_CUDA = ("circular_conv2d", "circular_conv2d_pool", "factored_linear_pull_back")  # as the page says
PUBLIC = {name.rstrip("_") for name in ops.__all__ if name.islower() and not name.rstrip("_").endswith("_torch")}
OPS = sorted(PUBLIC - COMPOSED.keys() | {op for op in COMPOSED.values() if op})


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_files_of_the_page(op):
    section = PAGE.split("## Adding an op")[1].split("## Adding a layer")[0]
    paths = [p for p in re.findall(r"`([\w/<>.]+\.\w+)`", section) if "/" in p]
    assert len(paths) >= 7
    for path in paths:
        if path == "csrc/cuda/<op>.cu" and op in LIBRARIES_ON_CUDA:
            continue
        assert (ROOT / path.replace("<op>", op)).is_file(), f"{op} lacks {path}"
    module = importlib.import_module(f"ella_cuda.ops.{op}")
    in_place = hasattr(ops, f"{op}_")
    assert callable(getattr(module, f"{op}_torch_" if in_place else f"{op}_torch"))
    assert f'"{op}' in (ROOT / "csrc/schemas.cpp").read_text()


def test_the_example_layer_is_exact():
    """The example's block against the dense generalised Gauss-Newton, N > 1."""
    (source,) = re.findall(r"<!-- the test suite executes this block -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(source, "CONTRIBUTING.md", "exec"), names)
    model = torch.nn.Sequential(names["ChannelScale"](3), torch.nn.Flatten(), torch.nn.Linear(12, 4)).double()
    x, y = torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.randint(4, (5,))
    la = KronLaplace(model).fit([(x[:2], y[:2]), (x[2:], y[2:])])
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda scale: functional_call(model, parameters | {"0.scale": scale}, (x,)))(
        parameters["0.scale"]
    )
    p = model(x).detach().softmax(-1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    block = torch.einsum("nka,nkl,nlb->ab", jacobian, hessian, jacobian)
    assert_same(la.factors["0.scale"].outputs[0], block)


def test_every_path_of_the_network_has_curvature():
    for name in PATHS:
        assert KronLaplace(neyshabur(name, 1, 3, width=1)).memory_estimate() > 0

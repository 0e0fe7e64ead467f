"""Walks CONTRIBUTING.md: every op has the files of its list and no others, and its example layer and learner are right."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, jacrev

from ella_cuda import marglik_training, ops
from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import BESIDE_GROUP, PATHS, neyshabur
from python_tests.ops.checks import assert_same

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
COMPOSED = {
    "basis_matrix": None,
    "basis_project": "gaussian_project",
    "factored_linear_vjp": None,
    "pack_spectra": None,
}  # of torch and, where there is one, an op of another name
LIBRARIES_ON_CUDA = ("circular_conv2d", "circular_conv2d_pool")  # as the page says
PUBLIC = {name.rstrip("_") for name in ops.__all__ if name.islower() and not name.rstrip("_").endswith("_torch")}
OPS = sorted(PUBLIC - COMPOSED.keys() | {op for op in COMPOSED.values() if op})


SECTION = PAGE.split("## Adding an op")[1].split("## Adding a layer or a curvature rule")[0]


def files_of(op: str) -> set[str]:
    """Files of the page's list, each item's first, for an op."""
    named = [re.findall(r"`([\w/<>.]+\.\w+)`", item)[0] for item in re.findall(r"^\d\. (.*)", SECTION, re.MULTILINE)]
    (family,) = {source.parent.parent.name for source in (ROOT / "csrc").glob(f"*/*/{op}.c*")}
    return {path.replace("<op>", op).replace("<family>", family) for path in named}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_files_of_the_page(op):
    files = {path for path in files_of(op) if not (path.endswith(".cu") and op in LIBRARIES_ON_CUDA)}
    assert len(files) >= 6
    assert [path for path in sorted(files) if not (ROOT / path).is_file()] == []
    module = importlib.import_module(f"ella_cuda.ops.{op}")
    in_place = hasattr(ops, f"{op}_")
    assert callable(getattr(module, f"{op}_torch_" if in_place else f"{op}_torch"))
    assert f'"{op}' in (ROOT / "csrc/schemas.cpp").read_text()


@pytest.mark.parametrize("op", ["affine_copies", "averaged_filters"])
def test_no_other_file_lists_the_simplest_op(op):
    """Those that mention it use it: layers and data, their tests, benchmarks; in the simulator, tests of paths."""
    files = files_of(op)
    assert len(files) == 7
    places = ("csrc", "ella_cuda/ops", "ella_cuda", "python_tests/ops", "python_tests")
    sources = [p for place in places for p in (ROOT / place).glob("**/*" if place == "csrc" else "*") if p.is_file()]
    text = {
        str(p.relative_to(ROOT)): p.read_text() for p in sources if p.suffix in (".py", ".cpp", ".cu", ".h", ".inc")
    }
    mentioned = {path for path, source in text.items() if op in source} - {"python_tests/test_contributing.py"}
    assert mentioned <= files and len(mentioned) >= 6


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


def test_a_learner_of_the_package_is_two_files(tmp_path):
    """A copy of the package with the page's file and its word: arguments, command, run and checkpoint follow."""
    source = Path(marglik_training.__code__.co_filename).parents[1]
    package = tmp_path / "ella_cuda"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "ella_cuda_command.py", tmp_path)
    (code,) = re.findall(r"<!-- the test suite adds this file .*? -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (package / "training/learners/scale.py").write_text(code)
    registry = package / "training/learners/__init__.py"
    text = registry.read_text()
    assert text.count("WORDS: dict[str, type[Learner]] = {") == 1
    text = text.replace(
        "WORDS: dict[str, type[Learner]] = {", 'WORDS: dict[str, type[Learner]] = {"scale": InputScale, '
    )
    registry.write_text(
        text.replace("\nWORDS: ", "\nfrom ella_cuda.training.learners.scale import InputScale\n\nWORDS: ")
    )
    train = ["--task", "digit", "--objective", "evidence", "--epochs", "2", "--burn-in", "0", "--frequency", "1"]
    train += ["--train-size", "20", "--test-size", "20", "--width", "1", "--jobs", "1", "--hypersteps", "1"]
    calls = (
        f"import inspect, json, sys; sys.path.insert(0, {str(tmp_path)!r}); import ella_cuda, torch; from ella_cuda import cli;",
        "from ella_cuda.training.checkpoint import read_checkpoint;",
        "parameters = inspect.signature(ella_cuda.marglik_training).parameters;",
        "print(parameters['lr_scale'].default);",
        f"codes = [cli.main(['train', '--layer', 's_conv', '--learn', 'scale', '--lr-scale', '0.5', '--out', 'run', *{train}])];",
        f"codes += [cli.main(['train', '--layer', 'conv', '--learn', 'scale', *{train}])];",
        f"codes += [cli.main(['train', '--layer', 'conv', '--lr-scale', '0.5', *{train}])];",
        "(row,) = json.load(open('run/summary.json'));",
        "saved = read_checkpoint(f'run/{row[\"run\"]}/checkpoint.pt');",
        "print(codes, row['learn'], saved['settings']['learn'], saved['settings']['lr_scale']);",
        "print(*(float(v.log()) for n, v in saved['model'].items() if n.endswith('lengthscale')))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "".join(calls)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    default, *_, outcome, logs = done.stdout.splitlines() or [done.stderr]
    assert (default, outcome) == ("0.01", "[0, 2, 2] scale ['scale'] 0.5"), done.stderr
    assert [abs(float(log)) for log in logs.split()] == pytest.approx([0.5] * 8, rel=1e-3)  # Adam's first step
    assert "--learn scale needs evidence runs of a layer with s_conv" in done.stderr
    assert "--lr-scale: of what is learned; no run learns scale (--learn scale)" in done.stderr


def test_every_path_of_the_network_has_curvature():
    for name in PATHS:
        layer = f"{name}+gconv" if name in BESIDE_GROUP else name
        assert KronLaplace(neyshabur(layer, 1, 3, width=1)).memory_estimate() > 0

"""What the library leaves of the process it is called in: everything as it was."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ella_cuda import augment, data, experiments, marglik_training, models, reports
from ella_cuda.invariance import BayesianLinear, ElboTrainer, InvariantFilterBank, ShallowNetwork
from ella_cuda.laplace import FullLaplace, KronLaplace, exact_log_marginal_likelihood
from ella_cuda.testing import check_kernels
from ella_cuda.tomography import RayTransform

TINY = {"width": 1, "epochs": 2, "burn_in": 0, "frequency": 1, "hypersteps": 2, "train_size": 40, "test_size": 40}
# Whose work is random draws, from torch's generator of the CPU, as torch's own functions' is.
DRAWS = ("AffineAugment", "marglik_training", "marglik_training, resumed", "neyshabur")


def global_state() -> dict[str, Any]:
    """All that a library might change for others in its process."""
    numbers = np.random.get_state()
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "onednn": torch.backends.mkldnn.enabled,
        "flushed": float(torch.full((64,), 1e-30).mul(1e-12).sum()) == 0,
        "stance": torch._dynamo.eval_frame._stance,
        "module hooks": torch.nn.modules.module._has_any_global_hook(),
        "anomalies": torch.is_anomaly_enabled(),
        "torch's draws": torch.get_rng_state().numpy().tobytes(),
        "numpy's draws": (numbers[1].tobytes(), numbers[2:]),
        "Python's draws": random.getstate(),
        "numpy's errors": np.geterr(),
        "numpy's printing": np.get_printoptions(),
        "warnings": list(warnings.filters),
        "shows warnings": warnings.showwarning,
        "matplotlib": {k: v for k, v in dict.items(matplotlib.rcParams) if k != "backend"},
        "backend": matplotlib.rcParams._get_backend_or_none(),
        "pyplot": "matplotlib.pyplot" in sys.modules and len(sys.modules["matplotlib.pyplot"].get_fignums()),
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "recursion": sys.getrecursionlimit(),
        "log": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "locale": locale.setlocale(locale.LC_ALL),
        "start of processes": multiprocessing.get_start_method(allow_none=True),
        "children": len(multiprocessing.active_children()),
    }


def changed(before: dict[str, Any]) -> set[str]:
    """What of it is another now."""
    after = global_state()
    return {name for name, value in before.items() if value != after[name]}


class Work:
    """A model that has modes of its own, data, and a folder of finished runs."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = network()
        self.x, self.y = torch.randn(24, 3, 4, 4), torch.arange(24) % 5
        self.loader = data.TensorLoader(self.x, self.y, 8, shuffle=True)
        self.rows = experiments.run_grid(configs(), folder / "runs", progress=False)
        self.la = KronLaplace(self.model).fit([(self.x, self.y)])

    def train(self) -> None:
        kinds = {"n_epochs": 2, "n_hypersteps": 2, "progress_bar": False, "checkpoint": self.folder / "own.pt"}
        marglik_training(self.model, self.loader, **kinds)

    def fail(self) -> None:
        with pytest.raises(ValueError, match="labels"):
            KronLaplace(self.model).fit([(self.x, self.y), (self.x, self.y + 9)])


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).requires_grad_(False), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    )


def configs(objective: str = "map") -> list[experiments.RunConfig]:
    return [experiments.configure("digits", "digit", "conv", objective, seed, **TINY) for seed in (0, 1)]


CALLS: dict[str, Callable[[Work], Any]] = {
    "fit": lambda w: KronLaplace(w.model).fit([(w.x, w.y)]),
    "fit that fails": lambda w: w.fail(),
    "evidence": lambda w: w.la.log_marginal_likelihood(torch.tensor(2.0, requires_grad=True)).backward(),
    "effective_parameters": lambda w: w.la.effective_parameters(),
    "exact evidence": lambda w: exact_log_marginal_likelihood(KronLaplace(w.model), w.x, w.y),
    "marglik_training": lambda w: w.train(),
    "marglik_training, resumed": lambda w: w.train(),
    "neyshabur": lambda w: models.neyshabur("s_fc+s_conv", 1, 10, 1)(torch.zeros(1, 1, 32, 32)),
    "AffineAugment": lambda w: augment.AffineAugment(4, sampling="sobol")(w.x),
    "AffineAugment, on a grid": lambda w: augment.AffineAugment(4, "rotation", sampling="grid")(w.x),
    "load": lambda w: data.load("digits"),
    "prepare": lambda w: experiments.prepare("digits", "translated", 16, 5, 50, 0.2),
    "run_one": lambda w: experiments.run_one(configs("evidence")[0], w.folder / "one", progress=False),
    "run_grid, one at a time": lambda w: experiments.run_grid(configs(), w.folder / "serial", progress=False),
    "run_grid, two at once": lambda w: experiments.run_grid(configs(), w.folder / "parallel", progress=False, jobs=2),
    "run_grid, resumed": lambda w: experiments.run_grid(configs(), w.folder / "runs", progress=False),
    "evaluate": lambda w: experiments.evaluate(w.model, w.x, w.y),
    "load_run": lambda w: experiments.load_run(w.folder / "runs" / configs()[0].name, "cpu"),
    "save_report": lambda w: reports.save_report(w.rows, w.folder / "runs"),
    "save_pictures": lambda w: reports.save_pictures(w.rows, w.folder / "runs", w.folder),
    "check_kernels": lambda w: check_kernels(torch.device("cpu")),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("work"))


@pytest.mark.parametrize("what", CALLS)
def test_a_call_leaves_everything_as_it_was(what, work):
    training = {m for m in work.model.modules() if m.training}
    learned = {name for name, p in work.model.named_parameters() if p.requires_grad}
    before = global_state()
    CALLS[what](work)
    assert changed(before) <= ({"torch's draws"} if what in DRAWS else set())
    assert {m for m in work.model.modules() if m.training} == training
    assert {name for name, p in work.model.named_parameters() if p.requires_grad} == learned


def test_fits_that_overlap_in_two_threads_leave_everything_as_it_was():
    """The second begins while the first runs, and ends after it."""
    x, y = torch.randn(8, 3, 4, 4), torch.arange(8) % 5
    first_runs, second_runs, first_done = (threading.Event() for _ in range(3))

    def first() -> Iterator[tuple[Tensor, Tensor]]:
        first_runs.set()
        assert second_runs.wait(60)
        yield x, y

    def second() -> Iterator[tuple[Tensor, Tensor]]:
        second_runs.set()
        assert first_done.wait(60)
        yield x, y

    def evidence(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        return float(KronLaplace(model).fit(batches).log_marginal_likelihood())

    networks = [network(), network()]
    alone = [evidence(model, [(x, y)]) for model in networks]
    before = global_state()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(evidence, networks[0], first())
        assert first_runs.wait(60)
        other = pool.submit(evidence, networks[1], second())
        together = [one.result()]
        first_done.set()
        together.append(other.result())
    assert together == alone
    assert changed(before) == set()


# ---- what the surrounding program is in ----


def trained() -> list[Tensor]:
    """What two epochs of either trainer make of a network."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    with torch.inference_mode(False), torch.enable_grad():
        network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        bank = InvariantFilterBank((1, 4, 4), 2, augment.AffineAugment(2, ("rotation",)))
        shallow = ShallowNetwork(bank, BayesianLinear(2, 3))
    la, *_ = marglik_training(network, [(x, y)], n_epochs=2, progress_bar=False)
    ElboTrainer(shallow, [(x, y)], n_epochs=2, n_data=6, progress_bar=False).run()
    return [*(p.detach() for p in (*network.parameters(), *shallow.parameters())), la(x).detach()]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_inside_of_modes_that_record_nothing(mode):
    expected = trained()
    with mode():
        got = trained()
        assert not torch.is_grad_enabled() and torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def everything_of(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    found = []
    for kind in (KronLaplace, FullLaplace):
        la = kind(model).fit([(x, y)])
        la.optimize_prior_precision(method="gridsearch", prior_structure="scalar", val_loader=[(x, y)], grid_size=3)
        found += [la.log_marginal_likelihood(), la(x), la.fit_linear_mode([(x, y)]), la.prior_precision]
        la.optimize_prior_precision(method="loo", prior_structure="scalar", grid_size=3)
        found += [
            la.influence().score,
            la.uncertainty(x, generator=torch.Generator("cpu").manual_seed(0)).total,
            la.prior_precision,
        ]
        again = kind(model)
        again.load_state_dict(la.state_dict())
        found.append(again.functional_variance(x))
    rays = RayTransform(4, 3)
    return [value.detach() for value in (*found, rays.fbp(rays.forward(x[0].view(4, 4))))]


def test_another_default_device_is_not_the_models():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(16, 3)), torch.randn(6, 16), torch.randint(3, (6,))
    expected = everything_of(model, x, y)
    with torch.device("meta"):
        got = everything_of(model, x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

"""The mode of the linearised network, and MacKay's updates beside Adam's steps on the evidence.

The network is the paper's CONV, trained for some steps on 1,000 digits on a canvas of 32 x 32, at the precisions of the evidence at its
weights ("network"), and at those of the evidence at a mode, after two rounds ("mode"). From the network's weights the mode is found by
Newton's method with conjugate gradients, to the same residual with the posterior's covariance as preconditioner and without one, and as a
user would write it in torch.func: L-BFGS on the linearised network's loss, whose gradient is a derivative along a direction and a gradient,
until the loss is as low. How many passes over the data each takes is remarked; all stop at the most that is allowed. The floor counts two
runs forward, one for the derivative, and one back for each pass that the preconditioned solver takes.

    pytest benchmarks/bench_linear_mode.py --threads 2
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, jvp

from benchmarks.bench_factors import batches
from benchmarks.counting import count
from ella_cuda.data import load, make_task
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.linear_mode import LinearMode
from ella_cuda.laplace.tuning import Groups, fixed_points
from ella_cuda.models import neyshabur

IMAGES, BATCH, WIDTH, TRAINING = 1000, 250, 4, 150
RESIDUAL, MOST = 0.1, 300
OURS, PLAIN, LBFGS = "ella_cuda", "ella_cuda, not preconditioned", "torch.func, L-BFGS"


@functools.cache
def fitted(device: torch.device) -> tuple[KronLaplace, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    data = make_task(load("digits"), "plain")
    x = (data.train_images[:IMAGES] - data.train_images.mean()) / data.train_images.std()
    y = data.train_labels[:IMAGES].to(device)
    x = x.float().to(device)
    model = neyshabur("conv", 1, 10, WIDTH).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(TRAINING):
        some = torch.arange(BATCH, device=device) + BATCH * (step % (IMAGES // BATCH))
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    loader = list(batches(x, y, BATCH))
    la = KronLaplace(model.eval()).fit(loader)
    _ = la.posterior_precision  # its eigenvectors
    return la, loader


@functools.cache
def precisions(device: torch.device, of: str) -> torch.Tensor:
    la, _ = fitted(device)
    la.prior_precision = 1.0
    la.optimize_prior_precision(method="mackay")
    if of == "mode":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="optimize_prior_precision: the fixed points do not rest")
            la.optimize_prior_precision(at="linear", n_steps=2)
    return la.prior_precision.clone()


class ByHand:
    """The linearised network's loss and gradient, and how many passes were asked for."""

    def __init__(self, la: KronLaplace, loader: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.model, self.loader, self.passes = la.model, loader, 0
        self.point = {name: p.detach() for name, p in la.model.named_parameters()}
        self.precision = dict(zip(self.point, la.prior_precision.tolist(), strict=True))

    def __call__(self, moved: dict[str, torch.Tensor]) -> torch.Tensor:
        self.passes += 1
        total = sum(0.5 * self.precision[name] * (self.point[name] + d).square().sum() for name, d in moved.items())
        for x, y in self.loader:
            f, along = jvp(lambda p, x=x: functional_call(self.model, p, (x,)), (self.point,), (moved,))
            total = total + F.cross_entropy(f + along, y, reduction="sum")
        return total


def by_lbfgs(la: KronLaplace, loader: list[tuple[torch.Tensor, torch.Tensor]], target: float) -> ByHand:
    """Until the loss is as low."""
    loss = ByHand(la, loader)
    moved = {name: torch.zeros_like(p).requires_grad_() for name, p in loss.point.items()}
    optimizer = torch.optim.LBFGS(list(moved.values()), max_iter=1, history_size=20, line_search_fn="strong_wolfe")
    value = float("inf")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(moved)
        found.backward()
        return found

    while value > target and loss.passes < MOST:
        value = min(value, optimizer.step(closure).item())
    return loss


@functools.cache
def best(device: torch.device, of: str) -> LinearMode:
    """What the preconditioned solver finds."""
    la, loader = fitted(device)
    la.prior_precision = precisions(device, of)
    solve(la, loader, True)
    return la.linear_fit


def solve(la: KronLaplace, loader: list[tuple[torch.Tensor, torch.Tensor]], precondition: bool) -> int:
    """From the network's weights; returns the passes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fit_linear_mode: the residual")
        la.fit_linear_mode(loader, RESIDUAL, start=la.mean, precondition=precondition, max_passes=MOST)
    return la.linear_fit.passes


@pytest.mark.parametrize("who", [OURS, PLAIN, LBFGS])
@pytest.mark.parametrize("of", ["network", "mode"])
def test_linear_mode(time, benchmark, device, of, who):
    (la, loader), reached = fitted(device), best(device, of)
    la.prior_precision = precisions(device, of)
    passes, left = 0, ""

    def run() -> None:
        nonlocal passes, left
        if who == LBFGS:
            passes = by_lbfgs(la, loader, reached.loss * (1 + 1e-3)).passes
            return
        passes = solve(la, loader, who == OURS)
        left = f", residual {la.linear_fit.residual:.2f}"

    work = count(la.model, loader[0][0].cpu() if device.type == "cpu" else loader[0][0])
    time(
        run,
        work=f"mode of the linearised CONV, {IMAGES} images, precisions of the {of}",
        who=who,
        flops=reached.passes * len(loader) * (2 * work.forward + work.activations + work.weights),
        bytes=0,
        once=True,
    )
    benchmark.extra_info["remark"] = f"{passes} passes{left}"


@pytest.mark.parametrize("who", ["MacKay, to rest", "Adam, 20 steps", "Adam, 100 steps"])
def test_updates_of_the_precisions(time, device, who):
    la, _ = fitted(device)
    groups = Groups(range(len(la.parameter_names)), la.prior_precision.device)
    words = {"method": "marglik", "n_steps": int(who.split()[1])} if who.startswith("Adam") else {}

    def run() -> None:
        la.prior_precision = 1.0
        if words:
            la.optimize_prior_precision(**words)
        else:
            fixed_points(la, 200, groups, False)

    run()
    reached = la.log_marginal_likelihood().item() / la.n_data
    elements = sum(f.shape.numel for f in la.factors.values())
    time(
        run,
        work="precisions at a fit's evidence, CONV",
        who=who,
        flops=2 * 6 * elements,
        bytes=8 * sum(side.numel() for f in la.factors.values() for side in f.eigenvalues()),
        remark=f"-log q/N {-reached:.4f}",
    )

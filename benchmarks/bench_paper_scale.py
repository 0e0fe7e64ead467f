"""The paper's CIFAR-10 recipe: an epoch, an evidence update, and what the whole run would take on this machine.

Random images and labels in CIFAR-10's shape, F-FC+CONV of width 10 at its start: every prediction is unsure, so that all nine
columns of the output Hessian count, as in no later update. On a GPU 50,000 images, as in the paper; on the CPU 1,000 (both
times are linear in the number of images, which `whole_run_seconds` uses; it is counted from the two, not run). On a GPU epochs are
also timed with their steps recorded as CUDA graphs, eight at a time: the first two record.

Source of the schedule: van der Ouderaa et al., NeurIPS 2023, section 6: 4000 epochs of batches of 128, evidence every 5 epochs
after 10, each time 20 steps on the precisions.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.counting import count
from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.experiments.run import EVIDENCE_BATCH_SIZES
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import neyshabur

IMAGES, EPOCHS, BURN_IN, FREQUENCY, HYPERSTEPS = 50_000, 4000, 10, 5, 20
RECORDED = 8
TIMES = {"epoch": EPOCHS, "epochs in CUDA graphs": EPOCHS / RECORDED, "update": (EPOCHS - BURN_IN) // FREQUENCY}
BATCH, CLASSES, WIDTH = 128, 10, 10


@pytest.mark.parametrize("phase", TIMES)
def test_paper_scale(time, benchmark, device, phase):
    graphs = phase == "epochs in CUDA graphs"
    if graphs and device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    images = IMAGES if device.type == "cuda" else 1000
    x = torch.randn(images, 3, 32, 32, device=device)
    y = torch.randint(CLASSES, (images,), device=device)
    model = neyshabur("f_fc+conv", 3, CLASSES, WIDTH).to(device)
    train, evidence = TensorLoader(x, y, BATCH, shuffle=True), TensorLoader(x, y, EVIDENCE_BATCH_SIZES[device.type])
    epochs = RECORDED if graphs else 1
    la = KronLaplace(model)
    log_precision = torch.zeros(len(la.parameter_names), dtype=torch.float64, device=device, requires_grad=True)

    def epoch() -> None:
        options = {"cuda_graph": graphs, "optimizer_kwargs": {"lr": 0.01, "fused": True}}
        marglik_training(model, train, n_epochs=epochs, objective="map", progress_bar=False, **options)

    def update() -> None:
        la.fit(evidence)
        optimizer = torch.optim.Adam([log_precision], lr=0.1)
        for _ in range(HYPERSTEPS):
            optimizer.zero_grad()
            (-la.log_marginal_likelihood(log_precision.exp()) / la.n_data).backward()
            optimizer.step()

    work = count(model, x[:1])
    operations = images * (work.fit(CLASSES - 1) if phase == "update" else epochs * work.step)
    run = update if phase == "update" else epoch
    time(
        run,
        work=f"paper scale, {RECORDED if graphs else 1} {phase}, {images} images",
        who="ella_cuda",
        flops=operations,
        bytes=0,
        rounds=2,
        warmups=0,
    )
    if phase != "epoch" or device.type != "cuda":  # where there are graphs, the whole run is theirs
        seconds = benchmark.stats.stats.median * IMAGES / images
        benchmark.extra_info["whole_run_seconds"] = seconds * TIMES[phase]

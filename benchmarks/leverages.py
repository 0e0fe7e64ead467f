"""Leverages, traces and predictions of a trained run's Kronecker posterior, with and without corrected eigenvalues.

    python -m benchmarks.leverages RUN_DIR [--images N]

RUN_DIR is a folder of ``ella-cuda train`` with an evidence run. Of a data point with the outputs' covariance S and the Hessian H of its
``-log p`` in the outputs, the leverages are the eigenvalues of S H. In a posterior with the whole Gauss-Newton matrix they are below one, and
over the training data they sum to the effective number of parameters.

gamma          effective parameters
leverages      their sum over the training images, by N of them
largest        of a training image
above 1        training images, in percent, with a leverage above one
test NLL, ECE  of the predictive (probit) on all test images
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor

from ella_cuda import metrics
from ella_cuda.data import TensorLoader
from ella_cuda.experiments import load_run, prepare_for
from ella_cuda.laplace import KronLaplace
from ella_cuda.reports.text import columns

HEAD = ("precisions", "eigenvalues", "gamma", "leverages", "largest", "above 1, %", "test NLL", "test ECE")


def scores(predictions: Tensor, labels: Tensor) -> tuple[str, str]:
    return tuple(f"{of(predictions, labels):.3f}" for of in (metrics.nll, metrics.expected_calibration_error))


def row(la: KronLaplace, precisions: str, train: TensorLoader, test: Tensor, labels: Tensor) -> tuple[str, ...]:
    found = la.leave_one_out(train)
    numbers = (
        f"{sum(la.effective_parameters().values()):,.0f}",
        f"{found.total_leverage.item() * la.n_data / len(found.leverage):,.0f}",
        f"{found.leverage.max().item():.3g}",
        f"{100 * found.n_undefined / len(found.leverage):.1f}",
    )
    predictions = torch.cat([la(part) for part in test.split(100)])
    return precisions, "corrected" if la.eigenvalue_correction else "product", *numbers, *scores(predictions, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--images", type=int, default=500, help="training images whose leverages are taken (500)")
    args = parser.parse_args()
    run = load_run(args.run_dir)
    data = prepare_for(run.config)
    loader = TensorLoader(data.train_images, data.train_labels, 100)
    some = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(0))[: args.images]
    train = TensorLoader(data.train_images[some], data.train_labels[some], 100)
    learned = run.la.prior_precision
    fits = [
        KronLaplace(run.model, prior_precision=learned, eigenvalue_correction=corrected).fit(loader)
        for corrected in (False, True)
    ]
    traces = {
        la.eigenvalue_correction: {n: float(b.values.whole().sum()) for n, b in la.posterior_precision.bases.items()}
        for la in fits
    }
    ratios = [
        (n, f"{traces[False][n]:.3g}", f"{t:.3g}", f"{traces[False][n] / t:.2f}") for n, t in traces[True].items()
    ]
    print(columns([("parameter", "product's trace", "trace", "ratio"), *ratios]), "\n")
    softmax = torch.softmax(run.model(data.test_images).detach(), 1)
    rows = [HEAD, ("", "softmax", "", "", "", "", *scores(softmax, data.test_labels))]
    for precisions, structure in (
        ("learned", ""),
        ("evidence's, layerwise", "layerwise"),
        ("evidence's, scalar", "scalar"),
    ):
        for fit in fits:
            la = copy.copy(fit)
            if structure:
                la.optimize_prior_precision(method="mackay", prior_structure=structure, n_steps=300)
            rows.append(row(la, precisions, train, data.test_images, data.test_labels))
    print(columns(rows))


if __name__ == "__main__":
    main()

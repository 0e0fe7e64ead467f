"""Settings that are numpy's numbers: they mean what Python's mean, and what is saved of them is read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ella_cuda import groups, metrics, models, ops
from ella_cuda.augment import AffineAugment, AveragedFunction, LocalDeformation
from ella_cuda.data import TensorLoader
from ella_cuda.invariance import BayesianLinear, ElboTrainer, InvariantFilterBank, ShallowNetwork
from ella_cuda.laplace import FullLaplace, KronLaplace, evidence_gradient
from ella_cuda.laplace.likelihoods import Classification
from ella_cuda.ops import conv_kron_accumulate_
from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet

X, Y = torch.linspace(-1, 1, 80).view(20, 4).sin(), torch.arange(20) % 3
PYTHON, NUMPY = (int, float), (np.uint8, np.float32)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Copies(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.n_samples = count

    def forward(self, x):
        return torch.stack([x + i for i in range(int(self.n_samples))], 1)


def fitted(whole, real):
    la = KronLaplace(
        network(), prior_precision=real(2), temperature=real(0.5), memory_budget=whole(100), ignore_index=np.int8(-1)
    )
    return la.fit([(X, Y)])


def tuned(whole, real):
    la = fitted(whole, real)
    la.optimize_prior_precision(n_steps=whole(2), lr=real(0.5))
    la.optimize_prior_precision(
        method="gridsearch", prior_structure="scalar", val_loader=[(X, Y)], grid_size=whole(3), n_samples=whole(3)
    )
    return la.prior_precision


def reconstructed(whole, real):
    torch.manual_seed(0)
    rays = RayTransform(whole(8), whole(5))
    found = []
    for method in ("dense", "iterative"):
        counts = {"batch_size": whole(4), "n_probes": whole(2), "max_iterations": whole(5), "rank": whole(3)}
        network = UNet(channels=whole(2), scales=whole(2), skip_channels=(whole(0), whole(1)), dropout=real(0))
        dip = LinearisedDIP(network, rays, method=method, tv_weight=real(0.5), tol=real(0.25), **counts)
        y = rays.forward(torch.linspace(0, 1, 64).view(8, 8))
        quiet, path = {"progress_bar": False, "checkpoint_every": whole(1)}, Path(f"{method}-{whole.__name__}")
        dip.reconstruct(y, n_steps=whole(2), lr=real(0.125), checkpoint=path, **quiet)
        dip.linearise()
        other = path.with_suffix(".h")
        counts = {"n_steps": whole(2), "linear_steps": whole(2)}
        rates = {"lr": real(0.125), "linear_lr": real(0.125), "tv_prior": real(0.5)}
        generator = torch.Generator().manual_seed(0)
        dip.optimize_hyperparameters(checkpoint=other, generator=generator, **counts, **rates, **quiet)
        for file in (path, other):
            torch.load(file, weights_only=True)
        found += [dip.sample(whole(2), generator), dip.variance(n_samples=whole(3), generator=generator)]
        found.append(dip.log_density(torch.ones(8, 8), patch_size=whole(4), n_samples=whole(9), generator=generator))
    return found


def bounded(whole, real):
    torch.manual_seed(0)
    bank = InvariantFilterBank((whole(1), 6, 6), whole(4), AffineAugment(whole(3), ("rotation",), init=real(0.125)))
    model = ShallowNetwork(bank, BayesianLinear(whole(4), whole(3), prior_precision=real(1.5)))
    counts = {"n_epochs": whole(2), "n_samples": whole(3), "n_data": whole(20), "checkpoint_frequency": whole(1)}
    data, path = TensorLoader(X.repeat(1, 9).view(20, 1, 6, 6), Y, batch_size=whole(7)), Path(f"elbo-{whole.__name__}")
    ElboTrainer(model, data, lr=real(0.5), lr_hyp=real(0.5), progress_bar=False, checkpoint=path, **counts).run()
    torch.load(path, weights_only=True)
    return list(model.parameters())


def deformed(whole, real):
    augment = LocalDeformation(whole(3), grid_size=whole(4), init=real(0.125))
    return augment(torch.ones(2, 1, 8, 8), eps=torch.ones(augment.eps_shape())[None]).shape, augment.grid_size


def evidence_slope(whole, real):
    torch.manual_seed(0)
    model = AveragedFunction(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), AffineAugment(whole(2), ("rotation",)))
    nn.init.ones_(model.network[1].weight)
    la = KronLaplace(model).fit([(X.repeat(1, 9).view(20, 1, 6, 6), Y)])
    return evidence_gradient(la, [(X.repeat(1, 9).view(20, 1, 6, 6), Y)], n_data=whole(20))


def sizes(whole, real):
    counts = {"in_channels": whole(1), "num_classes": whole(3), "width": whole(1), "image_size": whole(32)}
    model = models.neyshabur("s_fc", inverse_lengthscale=real(0.5), **counts)
    return sum(p.numel() for p in model.parameters())


USES = {
    "KronLaplace": lambda whole, real: fitted(whole, real).log_marginal_likelihood(),
    "FullLaplace": lambda whole, real: FullLaplace(network(), memory_budget=whole(100)).fit([(X, Y)])(X),
    "predictions": lambda whole, real: fitted(whole, real).functional_samples(
        X, n_samples=whole(3), generator=torch.Generator().manual_seed(0)
    ),
    "tuning": tuned,
    "linear mode": lambda whole, real: fitted(whole, real).fit_linear_mode(
        [(X, Y)], tol=real(0.25), max_passes=whole(20)
    ),
    "own copies": lambda whole, real: KronLaplace(AveragedFunction(network(), Copies(whole(3)))).fit([(X, Y)])(X),
    "local": deformed,
    "evidence_gradient": evidence_slope,
    "loader": lambda whole, real: [x for x, _ in TensorLoader(X, Y, batch_size=whole(7))],
    "reliability": lambda whole, real: metrics.reliability(X[:, :3].softmax(1), Y, whole(5)),
    "ece": lambda whole, real: metrics.expected_calibration_error(X[:, :3].softmax(1), Y, bins=whole(5)),
    "tomography": reconstructed,
    "bound": bounded,
    "network": sizes,
    "shifts": lambda whole, real: groups.cyclic_shifts(whole(4)) == groups.cyclic_shifts(4),
    "convolutions": lambda whole, real: conv_kron_accumulate_(
        torch.zeros(9, 9),
        X.view(5, 1, 4, 4),
        whole(3),
        stride=whole(1),
        padding=(whole(1), whole(1)),
        dilation=whole(1),
    ),
    "bases": lambda whole, real: ops.basis_matrix(X[:, :2], X[:3, :2], real(0.5)),
}


@pytest.mark.parametrize("use", USES)
def test_they_mean_what_pythons_mean(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        expected, found = (USES[use](*kinds) for kinds in (PYTHON, NUMPY))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_states_read_a_label_of_numpys():
    la = KronLaplace(network(), Classification(ignore_index=np.int64(-1))).fit([(X, Y)])
    other = KronLaplace(network(), Classification(ignore_index=-1))
    other.load_state_dict(la.state_dict())
    assert other.n_data == 20


REFUSED = {
    "ignore_index": lambda: KronLaplace(network(), ignore_index=True),
    "bins": lambda: metrics.reliability(X[:, :3].softmax(1), Y, True),
    "grid_size": lambda: LocalDeformation(3, grid_size=True),
    "parts": lambda: groups.cyclic_shifts(True),
    "max_passes": lambda: fitted(*PYTHON).fit_linear_mode([(X, Y)], max_passes=True),
    "n_steps": lambda: LinearisedDIP(UNet(channels=2), RayTransform(8, 5), n_probes=True),
    "inverse_lengthscale": lambda: ops.basis_matrix(X[:, :2], X[:3, :2], True),
    "batch_size": lambda: TensorLoader(X, Y, batch_size=2.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_booleans_and_fractions_are_none(name):
    with pytest.raises((TypeError, ValueError)):
        REFUSED[name]()

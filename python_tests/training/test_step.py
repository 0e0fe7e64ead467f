"""The loss, accuracy and checkpoints of trainings by likelihood."""

from __future__ import annotations

import math

import pytest
import torch

from ella_cuda import marglik_training
from ella_cuda.laplace.likelihoods import Classification
from ella_cuda.training import MarglikTrainer
from python_tests.laplace.test_outputs import FITS, LABELS, SEQUENCES, sequences


@pytest.mark.parametrize("case", FITS)
def test_a_steps_loss_is_the_mean_over_data_points_and_its_accuracy_that_of_the_labels(case):
    make, x, y, likelihood, log_prob = FITS[case]
    model, seen = make(), []
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    options = {"n_epochs": 2, "optimizer_kwargs": {"lr": 0.0}, "prior_prec_init": 0.5, "progress_bar": False}
    options |= {"likelihood": likelihood, "sigma_noise_init": 0.5 if likelihood == "regression" else 1.0}
    la, _, margliks, losses = marglik_training(model, batches, on_evaluation=seen.append, n_epochs_burnin=1, **options)
    f = model(x).detach()
    squares = sum(float(p.detach().square().sum()) for p in model.parameters())
    total = (f - y).square() / (2 * 0.5**2) if likelihood == "regression" else -log_prob(f, y)
    expected = float(total.sum()) / 5
    assert losses[0] == pytest.approx(expected + 0.5 * squares / (2 * 5), rel=1e-10)
    assert len(margliks) == 1 and math.isfinite(margliks[0]) and la.likelihood == likelihood
    # Only a regression's noise is learned.
    assert (float(la.sigma_noise) != options["sigma_noise_init"]) == (likelihood == "regression")
    accuracy = seen[0].accuracy
    if likelihood == "classification":
        counted = y != -100
        assert accuracy == pytest.approx(float((f.argmax(-1) == y)[counted].double().mean()))
    elif likelihood == "binary":
        assert accuracy == pytest.approx(float(((f > 0) == y.view(f.shape)).double().mean()))
    else:
        assert accuracy is None


def test_an_epoch_without_labels_has_no_accuracy():
    nothing, seen = torch.full_like(LABELS, -100), []
    marglik_training(
        sequences(), [(SEQUENCES, nothing)], n_epochs=1, objective="map", progress_bar=False, on_evaluation=seen.append
    )
    assert seen[0].accuracy is None and math.isfinite(seen[0].loss)


def test_checkpoints_are_of_a_likelihood_with_its_settings(tmp_path):
    options = {"n_epochs": 2, "progress_bar": False, "checkpoint": tmp_path / "c.pt"}
    data = [(SEQUENCES, LABELS.masked_fill(LABELS == -100, 2))]
    first = marglik_training(sequences(), data, ignore_index=2, **options)
    again = marglik_training(sequences(), data, Classification(2), **options)
    assert again[2:] == first[2:]
    for other in ({"ignore_index": 1}, {}):
        with pytest.raises(ValueError, match=r"written with likelihood='classification\(ignore_index=2\)'"):
            marglik_training(sequences(), data, **other, **options)
    trainer = MarglikTrainer(sequences(), data, n_epochs=2)
    assert trainer.state_dict()["settings"]["likelihood"] == "classification"


def test_what_is_no_likelihood_is_refused_before_the_first_step():
    data = [(SEQUENCES, LABELS)]
    with pytest.raises(ValueError, match=r"likelihood must be one of 'classification', .*got 'normal'"):
        marglik_training(sequences(), data, "normal")
    with pytest.raises(ValueError, match="marglik_training: ignore_index belongs to likelihood='classification'"):
        marglik_training(sequences(), data, "poisson", ignore_index=0)

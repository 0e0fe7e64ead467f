"""A training that is interrupted and gone on with gives the numbers of one that was not, bit for bit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from ella_cuda.augment import AffineAugment
from ella_cuda.data import TensorLoader
from ella_cuda.training import MarglikTrainer
from ella_cuda.training.checkpoint import read_checkpoint
from python_tests.training.learners import test_augmentation, test_learner, test_prior, test_spatial_basis
from python_tests.training.test_points import DATA, Buckets
from python_tests.training.test_trainer import Network, images
from python_tests.training.test_unknown import Tagged


def loader(kind: str) -> Any:
    data, generator = TensorDataset(*images()), torch.Generator().manual_seed(7)
    return {
        "global generator": lambda: DataLoader(data, 10, shuffle=True),
        "own generator": lambda: DataLoader(data, 10, shuffle=True, generator=generator),
        "batch sampler's": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator), 8, False)),
        "tensor loader": lambda: TensorLoader(*images(), 10, shuffle=True),
    }[kind]()  # fmt: skip


def relaxed(kind: str, **options: Any) -> MarglikTrainer:
    return MarglikTrainer(Network(), loader(kind), **options)


def counted(**options: Any) -> MarglikTrainer:
    return MarglikTrainer(nn.Linear(5, 3), DataLoader(DATA, batch_sampler=Buckets()), fisher="mc", **options)


def bases(learn: Any, **options: Any) -> MarglikTrainer:
    shuffled = DataLoader(test_spatial_basis.data(), 10, shuffle=True)
    return MarglikTrainer(test_spatial_basis.network(), shuffled, learn=learn, **options)


def own(learner: Any, **options: Any) -> MarglikTrainer:
    model = test_learner.network()
    return MarglikTrainer(
        model, TensorLoader(*test_learner.data(), 10, shuffle=True), learn=[learner(model)], **options
    )


def augmented(make: Any = lambda: AffineAugment(4, init=0.2), **options: Any) -> MarglikTrainer:
    options = {"augment": make(), "learn": ["augmentation"]} | options
    return MarglikTrainer(test_augmentation.convolutional(), test_augmentation.loader(), **options)


def mackay(**options: Any) -> MarglikTrainer:
    data = TensorLoader(*test_prior.regression_data(), 20, shuffle=True)
    options = {"hyper_optimizer": "mackay", "hyper_step_limit": 1.0} | options
    return MarglikTrainer(test_prior.norm_network(), data, "regression", **options)


def tagged(**options: Any) -> MarglikTrainer:
    x = torch.randn(24, 3, 4, generator=torch.Generator().manual_seed(2))
    return MarglikTrainer(Tagged(), TensorLoader(x, torch.arange(24) % 3, 8, shuffle=True), **options)


KINDS = ("global generator", "own generator", "batch sampler's", "tensor loader")


class Own(torch.optim.SGD):
    """Cannot be made of its groups, and keeps a state of its own form."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(7)
        super().step()


OPTIMIZERS = (torch.optim.SGD, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Rprop, Own)
COSINE = {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": 18}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{k}, {f}": (relaxed, {"kind": k, "fisher": f}) for k, f in itertools.product(KINDS, ("exact", "mc"))},
    **{kind.__name__: (relaxed, {"kind": KINDS[0], "optimizer_cls": kind}) for kind in OPTIMIZERS},
    "map, schedule": (relaxed, {"kind": KINDS[0], "objective": "map", **COSINE}),
    "counted": (counted, {}),
    "anchors and lengthscales": (bases, {"learn": ("anchors", "lengthscales")}),
    "lengthscales": (bases, {"learn": ["lengthscales"]}),
    "learner without a state": (own, {"learner": test_learner.ScaleLearner}),
    "learner with a state": (own, {"learner": test_learner.Counting}),
    "buffer learner": (own, {"learner": test_learner.adam_learner}),
    "amounts": (augmented, {"lr_aug": 0.8}),
    "amounts of the best": (augmented, {"keep": "best", "optimizer_kwargs": {"lr": 0.1}}),
    "amounts of some data": (augmented, {"aug_sampling": "independent", "aug_data": 20}),
    "amounts by one column": (augmented, {"aug_columns": "one", "aug_sampling": "sobol"}),
    "raw amounts of a grid": (augmented, {"make": lambda: AffineAugment(4, "rotation", 0.2, "grid", "raw"), "lr_aug_min": 0.01}),
    "mackay, layerwise": (mackay, {}),
    "mackay, normalised": (mackay, {"prior_structure": "normalised"}),
    "unknown, freeze": (tagged, {"unknown": "freeze"}),
    "unknown, diagonal": (tagged, {"unknown": "diagonal"}),
}  # fmt: skip


class Stop(Exception):
    pass


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:marglik_training. learn=.'augmentation'")
def test_an_interrupted_training_repeats_one_that_was_not(case, tmp_path):
    make, options = CASES[case]

    def stop(evaluation) -> None:
        if evaluation.epoch == 4:
            raise Stop  # before the checkpoint of epoch 4 is written: two epochs are lost

    def run(**more: Any) -> MarglikTrainer:
        random.seed(5)
        torch.manual_seed(5)
        schedule = {"n_epochs": 6, "n_epochs_burnin": 1, "marglik_frequency": 2, "n_hypersteps": 2}
        trainer = make(**schedule | {"progress_bar": False} | options | more)
        torch.manual_seed(5)
        trainer.run()
        return trainer

    path = tmp_path / "run.pt"
    whole, after = run(), torch.rand(3)
    with pytest.raises(Stop):
        run(checkpoint=path, on_evaluation=stop)
    assert read_checkpoint(path)["epoch"] == 2
    torch.rand(17)
    for _ in range(2):  # the second time the run is finished, and only refitted
        resumed = run(checkpoint=path)
        assert torch.equal(torch.rand(3), after)
        assert resumed.history == whole.history and resumed.losses == whole.losses
        assert resumed.margliks == whole.margliks and bool(whole.margliks) != (options.get("objective") == "map")
        states = resumed.model.state_dict(), whole.model.state_dict()
        assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
        assert torch.equal(resumed.la.prior_precision, whole.la.prior_precision)
        assert torch.equal(resumed.la.sigma_noise, whole.la.sigma_noise)
        if whole.margliks:
            assert torch.equal(resumed.la.log_marginal_likelihood(), whole.la.log_marginal_likelihood())

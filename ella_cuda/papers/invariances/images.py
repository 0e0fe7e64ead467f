"""Images, the published networks and their training, of ranges and subsets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, Augment, AveragedFunction
from ella_cuda.data import Dataset, TensorLoader, black_as_zero
from ella_cuda.experiments.evaluation import evaluate
from ella_cuda.experiments.run import prepare
from ella_cuda.papers.invariances.sizes import LARGE, TWO_CORES, of_small
from ella_cuda.papers.studies import Work, share
from ella_cuda.run_folder import CHECKPOINT_FILE
from ella_cuda.training import MarglikTrainer

# Of a data set: images of training and of the test; the small ones are whole from the usual share on.
COUNTS = {"digits": (1437, 360), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
OTHER_COUNTS = (60_000, 10_000)
SMALL_DATA = ("digits",)
IMAGE_SIZE, SMALL_SIZE = 28, 16
COPIES, SMALL_COPIES = 31, 16
HIDDEN, CHANNELS = 1000, (6, 16, 120, 84)
BATCH, RATE = 1000, 5e-3  # of the weights, by Adam, down to 1e-6 along a cosine
LEAST_RATE = 1e-6
AMOUNT_RATE = 0.05  # of the amounts, before the softplus
REACH, FASTEST = 8.0, 0.6  # where steps are few, the rate with which all reach so far, at most the second
INIT = 0.1
BURN_IN = 10
EVIDENCE_BATCH = 256
FULL_RANGE = {
    "rotation": math.pi,
    "tx": 8 / 14,
    "ty": 8 / 14,
    "sx": math.log(2),
    "sy": math.log(2),
    "shear": math.log(2),
}


def counts(data: str, scale: float) -> tuple[int, int]:
    """Images of training and of the test."""
    train, test = COUNTS.get(data, OTHER_COUNTS)
    if data in SMALL_DATA:
        return of_small(scale, train, 60), of_small(scale, test, 40)
    return share(scale, train, 60), share(max(scale, min(1.0, 4 * scale)), test, 40)


def settings_of(data: str, scale: float) -> dict[str, Any]:
    """What all studies on a data set have in common."""
    train, test = counts(data, scale)
    return {
        "data": data,
        "image_size": IMAGE_SIZE if scale >= LARGE else SMALL_SIZE,
        "train_size": train,
        "test_size": test,
        "copies": COPIES if scale >= LARGE else of_small(scale, SMALL_COPIES, 2),
        "batch": share(scale, BATCH, 20),
    }


def sizes_said(settings: Mapping[str, Any]) -> str:
    """The sizes in words."""
    s = settings
    return f"{s['data']}, {s['image_size']} x {s['image_size']} pixels, {s['copies']} copies"


def small_said(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where rows are of less than the published size."""
    if all(r["batch"] == BATCH and r["image_size"] == IMAGE_SIZE for r in rows):
        return ""
    return f"Sizes are below the published ones, which `--scale 1` has; those of {TWO_CORES:g} are for two cores.\n"


def schedule(epochs: int) -> dict[str, int]:
    """Epochs, and those before the first evidence step, a fifth at most."""
    return {"epochs": epochs, "burn_in": min(BURN_IN, max(1, epochs // 5)) if epochs > 1 else 0}


def data_of(settings: Mapping[str, Any], work: Work) -> Dataset:
    """Images whose black is 0, on the study's device."""
    dataset = prepare(
        settings["data"],
        settings["task"],
        settings["image_size"],
        train_size=settings["train_size"],
        test_size=settings["test_size"],
        data_dir=work.data_dir,
        download=work.download,
    )
    return black_as_zero(dataset).to(work.device)


def mlp(hidden: int, channels: int, size: int, classes: int) -> nn.Sequential:
    """One hidden layer, tanh."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def cnn(channels: int, size: int, classes: int) -> nn.Sequential:
    """Three convolutions, tanh, max pooling after the first two; the last one covers what is left: 5 x 5 of 28 x 28 images."""
    first, second, third, hidden = CHANNELS
    left = ((size - 4) // 2 - 2) // 2
    return nn.Sequential(
        *(nn.Conv2d(channels, first, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(second, third, left), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(third, hidden), nn.Tanh(), nn.Linear(hidden, classes)),
    )


class Trained(NamedTuple):
    """A network, and what its training says of it."""

    model: nn.Module
    trainer: MarglikTrainer
    epochs: list[int]
    amounts: dict[str, list[float]]  # by generator, over the epochs; empty without an augmentation


class OneDraw:
    """One affine copy in place of each image, for :class:`ella_cuda.data.TensorLoader`.

    Args:
        amounts: by generator.
    """

    STEPS = 2**20  # of a draw: the loader's draws are whole numbers

    def __init__(self, amounts: Mapping[str, float]) -> None:
        self.augment = AffineAugment(1, list(amounts), dict(amounts), constraint="raw")

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randint(self.STEPS + 1, (count, len(self.augment.names)), generator=generator)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        eps = (2 * draws.to(images) / self.STEPS - 1)[:, None]
        with torch.no_grad():
            return self.augment.to(images.device)(images, eps)[:, 0]


class Augerino(torch.optim.Adam):
    r"""Adam on weights and amounts, these along the loss :math:`-\lambda \|\eta\|` too.

    Source: Benton et al., "Learning invariances in neural networks from training data", NeurIPS 2020.
    """

    STRENGTH, AMOUNT_RATE = 0.01, 5e-3

    def __init__(self, parameters: list[Tensor], augment: AffineAugment, lr: float) -> None:
        self.augment = augment
        augment.raw.requires_grad_()
        super().__init__([{"params": parameters}, {"params": [augment.raw], "lr": self.AMOUNT_RATE}], lr=lr)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        raw = self.augment.raw
        with torch.no_grad():
            raw.grad -= self.STRENGTH * raw / raw.norm()
        result = super().step(closure)
        self.augment.project_()
        return result


def amount_rate(steps: int) -> float:
    """Of the amounts, in each of so many evidence steps: from 9 steps on their sum takes rotation from ``INIT`` to 180°."""
    return min(max(AMOUNT_RATE, REACH / steps), FASTEST)


def trained(
    make: Callable[[], nn.Module],
    dataset: Dataset,
    settings: Mapping[str, Any],
    work: Work,
    method: str,
    amounts: Mapping[str, float] | None = None,
    augment: Augment | None = None,
) -> Trained:
    """A network after its training, from its checkpoint where there is one.

    Args:
        make: the network, with weights of torch's global generator.
        dataset: of :func:`data_of`.
        settings: of the study: ``seed, copies, batch, epochs, burn_in``.
        method: "map" has one precision by the evidence; "augmented" learns from one copy of each image at fixed amounts, in the evidence too
            from the image itself; "augerino" learns amounts by its loss, with all precisions 1; "evidence" learns them by the evidence.
        amounts: of "augmented". augment: of "evidence"; None is an affine one.
    """
    torch.manual_seed(settings["seed"])
    network = make().to(work.device)
    epochs, batch = settings["epochs"], settings["batch"]
    data = dataset.train_images, dataset.train_labels
    one = OneDraw(amounts or {}) if method == "augmented" else None
    loader = TensorLoader(*data, batch, shuffle=True, augment=one, data_digest=dataset.digest)
    steps = max(epochs - settings["burn_in"] - 1, 1)
    options: dict[str, Any] = {"optimizer_kwargs": {"lr": RATE}}
    if method == "evidence":
        augment = (AffineAugment(settings["copies"], init=INIT) if augment is None else augment).to(work.device)
        options |= {
            "augment": augment,
            "learn": ["augmentation"],
            "lr_aug": amount_rate(steps),
            "aug_sampling": "sobol" if "sobol" in augment.samplings else "shared",
        }
    elif method == "augerino":
        augment = AffineAugment(settings["copies"], init=INIT, constraint="raw").to(work.device)
        network = AveragedFunction(network, augment)
        options |= {"objective": "map", "optimizer_cls": _augerino(augment)}
    trainer = MarglikTrainer(
        network,
        loader,
        "classification",
        n_epochs=epochs,
        n_epochs_burnin=settings["burn_in"],
        hyper_optimizer="mackay",
        prior_structure="scalar",
        scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
        scheduler_kwargs={"T_max": epochs * len(loader), "eta_min": LEAST_RATE},
        marglik_loader=TensorLoader(*data, EVIDENCE_BATCH, data_digest=dataset.digest),
        progress_bar=work.progress,
        checkpoint=work.folder / CHECKPOINT_FILE,
        depends_on=dict(settings),
        description=work.folder.name,
        **options,
    )
    trainer.run()
    trainer.model.eval()
    found = [e for e in trainer.history if "augmentation" in e["learned"]]
    trajectory = {
        name: [e["learned"]["augmentation"][name] for e in found]
        for name in (found[0]["learned"]["augmentation"] if found else ())
    }
    return Trained(trainer.model, trainer, [e["epoch"] for e in found], trajectory)


def _augerino(augment: AffineAugment) -> Callable[..., Augerino]:
    def augerino(parameters: list[Tensor], lr: float) -> Augerino:
        return Augerino(parameters, augment, lr)

    return augerino


def measured(found: Trained, dataset: Dataset, refit: bool = False) -> dict[str, Any]:
    """Accuracy in percent, NLL, ``-log q/N`` and the amounts.

    Args:
        found: trained. dataset: its own.
        refit: whether the evidence is that of a fit with a precision chosen for it.
    """
    model, la = found.model, found.trainer.la
    averaged = isinstance(model, AveragedFunction)
    if averaged:
        model.augment.raw.requires_grad_(False)
        sampling = "sobol" if "sobol" in model.augment.samplings else "shared"
        draws = model.augment.draw(1, sampling, torch.Generator().manual_seed(0))
        with model.augment.held(draws):
            accuracy, nll = evaluate(model, dataset.test_images, dataset.test_labels)
            if refit:
                la = _refitted(la, dataset)
    else:
        accuracy, nll = evaluate(model, dataset.test_images, dataset.test_labels)
        la = _refitted(la, dataset) if refit else la
    return {
        "accuracy": accuracy,
        "nll": nll,
        "neg_log_marginal_likelihood": -la.log_marginal_likelihood().item() / la.n_data,
        "amounts": model.augment.amounts() if averaged else {},
    }


def _refitted(la: Any, dataset: Dataset) -> Any:
    loader = TensorLoader(dataset.train_images, dataset.train_labels, EVIDENCE_BATCH)
    la.fit(loader).optimize_prior_precision(method="mackay", prior_structure="scalar")
    return la

"""Predictions of a trained run for images in files, and what they are worth where labels are known."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ella_cuda import metrics
from ella_cuda.data import TASKS, TensorLoader
from ella_cuda.data.labelled import Labelled, image_files, labelled, read_images
from ella_cuda.experiments.error_bars import marks
from ella_cuda.experiments.examples import pixels
from ella_cuda.experiments.run import prepare_for
from ella_cuda.files import write_file
from ella_cuda.modes import evaluation_mode
from ella_cuda.progress import bar_size
from ella_cuda.run_folder import PREDICTIONS_FILE, read_predictions

if TYPE_CHECKING:
    from ella_cuda.experiments.load import LoadedRun

BATCH = 64  # images, whose covariances are there at once
COLUMNS = ("file", "label", "probability", "epistemic", "ask")
SAMPLES = 1000  # of the outputs, for the epistemic part
SCORE = {"entropy": metrics.entropy, "max_probability": lambda p: 1 - p.amax(1)}


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a run for N images.

    Attributes:
        names: N names of files.
        class_names: K.
        probabilities: ``(N, K)`` float64.
        epistemic: ``(N,)`` float64, nats: the part of the entropy that more data would lower.
        labels: ``(N,)`` int64; None where nobody knows them.
        unreadable: names of the files that were left out.
        notes: what should be said of the images.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    probabilities: Tensor
    epistemic: Tensor
    labels: Tensor | None = None
    unreadable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def probability(self) -> Tensor:
        """``(N,)``, of the most probable class."""
        return self.probabilities.amax(1)

    @property
    def classes(self) -> list[str]:
        """The most probable class of each image."""
        return [self.class_names[i] for i in self.probabilities.argmax(1).tolist()]

    def table(self, threshold: float) -> list[Sequence[Any]]:
        """The names of the columns and a line for each image, whose ``ask`` is "yes" below the threshold and for files that were left out."""
        lines: list[Sequence[Any]] = [COLUMNS]
        values = zip(self.names, self.classes, self.probability.tolist(), self.epistemic.tolist(), strict=True)
        for name, label, probability, epistemic in values:
            ask = "yes" if probability < threshold else "no"
            lines.append([name, label, f"{probability:.6f}", f"{epistemic:.6f}", ask])
        lines += [[name, "", "", "", "yes"] for name in self.unreadable]
        return lines

    def write_csv(self, path: str | os.PathLike[str], threshold: float) -> None:
        """Write :meth:`table`, see :func:`write_table`."""
        write_table(path, self.table(threshold))


def write_table(path: str | os.PathLike[str], lines: Iterable[Sequence[Any]]) -> None:
    """Write a CSV in UTF-8.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_file(path, text.getvalue())


def predict(
    run: LoadedRun, files: Iterable[str | os.PathLike[str]], skip_unreadable: bool = False, progress: bool = False
) -> Predictions:
    """See :meth:`ella_cuda.experiments.LoadedRun.predict`."""
    return _predicted(run, _read(run, image_files(files), skip_unreadable), progress, "predictions")


class _Read(NamedTuple):
    """Images that were read: ``pixels`` ``(N, C, S, S)`` uint8, those that are ``kept`` by position in ``found``."""

    found: Labelled
    pixels: Tensor
    kept: list[int]


def _read(run: LoadedRun, found: Labelled, skip_unreadable: bool) -> _Read:
    """The images as the run's network takes them, but for their scale."""
    if TASKS[run.config.task].halved or run.black is None or run.white is None:
        why = (
            "its images are made of halves"
            if run.black is not None
            else "its folder does not say how images are scaled"
        )
        raise ValueError(f"the run {run.config.name} predicts no images in files: {why}. Train another run.")
    return _Read(found, *read_images(found, run.config.image_size, skip_unreadable, len(run.black)))


def _predicted(run: LoadedRun, read: _Read, progress: bool, what: str) -> Predictions:
    found, pixels, kept = read
    black, white = (scale.cpu()[:, None, None] for scale in (run.black, run.white))
    generator = torch.Generator(run.black.device).manual_seed(0)
    probabilities, epistemic = [], []
    desc = {"desc": f"{run.config.name}: {what}", "unit": "image", "disable": not progress}
    with evaluation_mode(run.model), torch.no_grad(), tqdm(total=len(pixels), **desc, **bar_size()) as bar:
        for part in pixels.split(BATCH):
            x = (black + (white - black) * part.to(torch.float32).div(255)).to(run.black.device)
            probabilities.append(run.la(x).double().cpu())
            epistemic.append(run.la.uncertainty(x, SAMPLES, generator).epistemic.clamp_min(0).cpu())
            bar.update(len(part))
    left = set(range(len(found.names))) - set(kept)
    position = {name: i for i, name in enumerate(run.class_names)}
    labels = torch.tensor([position[found.labels[i]] for i in kept]) if found.labels[0] in position else None
    return Predictions(
        tuple(found.names[i] for i in kept),
        run.class_names,
        torch.cat(probabilities),
        torch.cat(epistemic),
        labels,
        tuple(found.names[i] for i in sorted(left)),
        tuple(found.notes),
    )


def evaluate_on(
    run: LoadedRun,
    path: str | os.PathLike[str],
    ood: str | os.PathLike[str] | None = None,
    skip_unreadable: bool = False,
    progress: bool = False,
) -> tuple[Predictions, dict[str, float]]:
    """See :meth:`ella_cuda.experiments.LoadedRun.evaluate`."""
    found = labelled(path)
    if "test" in found.parts:
        found = found.only([part == "test" for part in found.parts])
    unknown = sorted(set(found.labels) - set(run.class_names))
    if unknown:
        raise ValueError(
            f"{path}: the run {run.config.name} knows no class {', '.join(map(repr, unknown[:5]))}, but {', '.join(run.class_names[:20])}."
        )
    images = _read(run, found, skip_unreadable)
    if run.learned is not None and (seen := int(torch.isin(marks(images.pixels), run.learned).sum())):
        found.notes.append(
            f"warning: the run learned from {seen} of these images, which flatters it; name images that it has not seen"
        )
    others = None if ood is None else _read(run, image_files([ood]), skip_unreadable)  # before the first step
    own = _predicted(run, images, progress, "predictions")
    p, labels = own.probabilities, own.labels
    scores = {
        "images": len(p),
        "accuracy": 100 * float(metrics.accuracy(p, labels)),
        "nll": float(metrics.nll(p, labels)),
        "ece": float(metrics.expected_calibration_error(p, labels)),
        "brier": float(metrics.brier_score(p, labels)),
        "aurc": float(metrics.aurc(p, labels)),
    }
    if others is not None:
        far = _predicted(run, others, progress, "other images")
        scores["ood_images"] = len(far.probabilities)
        for name, score in SCORE.items():
            inside, outside = score(p), score(far.probabilities)
            scores[f"auroc_{name}"] = float(metrics.auroc(inside, outside))
            scores[f"fpr95_{name}"] = float(metrics.fpr_at_recall(inside, outside))
    return own, scores


def wrong_labels(
    run: LoadedRun, count: int, data_dir: str | None = None, download: bool = False, progress: bool = False
) -> list[tuple[str, str, float]]:
    """See :meth:`ella_cuda.experiments.LoadedRun.wrong_labels`."""
    data = prepare_for(run.config, data_dir, download)
    there = marks(pixels(data.train_images, data.black, data.white))
    learned = there if run.learned is None else run.learned
    if len(there) != run.la.n_data or not torch.equal(there.sort().values, learned.sort().values):
        same = int(torch.isin(learned, there).sum())
        raise ValueError(
            f"{run.config.data} has {same} of the {run.la.n_data} images that the run {run.config.name} learned from, and {len(there)} "
            "training images; put back what was there."
        )
    data = data.to(next(run.model.parameters()).device)
    loader = TensorLoader(data.train_images, data.train_labels, run.config.evidence_batch_size or BATCH)
    found = run.la.influence(loader, progress_bar=progress)
    suspects = []
    for i in found.order[:count].tolist():
        number, label = int(data.train_ids[i]), run.class_names[int(data.train_labels[i])]
        name = data.names[number] if data.names else f"image {number}"
        suspects.append((name, label, float(found.log_density[i].exp())))
    return suspects


def threshold(run_dir: Path, risk: float) -> tuple[float, str]:
    """The probability below which a person should be asked, for errors among the others to be at most ``risk``; and in words where it comes
    from.

    Of held-out images it is the smallest under which ``(errors + 1) / (images + 1)``, of those at or above it, is at most ``risk``. Without
    them it is ``1 - risk`` (Chow 1970), of the probabilities as the run's calibration left them.

    Raises:
        ValueError: ``risk`` is not between 0 and 1, or the run's file of predictions is damaged.
    """
    if not 0 < risk < 1:
        raise ValueError(f"risk must be above 0 and below 1, got {risk}.")
    kept = read_predictions(run_dir) if (run_dir / PREDICTIONS_FILE).exists() else {"evaluated_on": "train"}
    if kept["evaluated_on"] == "train":
        return 1 - risk, (
            f"probabilities below {1 - risk:g}, as the run's calibration left them; the run kept no held-out images"
        )
    p, labels = torch.tensor(kept["probabilities"], dtype=torch.float64), torch.tensor(kept["labels"])
    confidence, order = p.amax(1).sort(descending=True)
    wrong = (p.argmax(1) != labels)[order].double().cumsum(0)
    count = torch.arange(1, len(p) + 1)
    last = torch.cat([confidence[1:] < confidence[:-1], torch.tensor([True])])  # of equal ones
    fine = torch.nonzero(last & ((wrong + 1) / (count + 1) <= risk)).flatten()
    if not len(fine):
        return float("inf"), (
            f"all: the run's {len(p)} held-out images, {int(wrong[-1])} of them wrong, show none above which a risk of {risk:g} holds"
        )
    i = int(fine[-1])
    return float(confidence[i]), (
        f"probabilities below {float(confidence[i]):.4f}: of {len(p)} held-out images {i + 1} were at or above it, {int(wrong[i])} wrong"
    )

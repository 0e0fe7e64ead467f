"""A trained network, back from its run's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.data import TensorLoader
from ella_cuda.experiments.device import resolve_device
from ella_cuda.experiments.error_bars import by_last_layer, described, marks, of_last_layer
from ella_cuda.experiments.examples import pixels
from ella_cuda.experiments.hyperparameters import CurvatureConfig, RunConfig
from ella_cuda.experiments.networks import build_network, runs_code
from ella_cuda.experiments.predictions import Predictions, evaluate_on, predict, threshold, wrong_labels
from ella_cuda.experiments.run import averaged, own_random_state, prepare_for, same_copies
from ella_cuda.files import damaged
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.evidence import finer, is_finer, of_tensors
from ella_cuda.run_folder import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    DIARY_FILE,
    LAPLACE_FILE,
    PREDICTIVE,
    SAMPLES_FILE,
    read_diary,
    read_history,
    read_samples,
)
from ella_cuda.training.checkpoint import check_entries, load_checkpoint
from ella_cuda.training.trainer import calibrated

ADVICE = "do the run again"


class _Loaded(NamedTuple):
    model: nn.Module  # in evaluation mode
    # Of all layers or of the last, with the run's prior precisions; fitted if asked for, at a finished run's copies.
    la: KronLaplace
    config: RunConfig
    epoch: int  # epochs done: config.epochs in a finished run


class LoadedRun(_Loaded):
    """A run as :func:`load_run` gives it: ``(model, la, config, epoch)``, and what predictions for images in files need.

    Attributes:
        class_names: of the classes; their numbers where they have no names.
        black: ``(C,)``, what the network takes for a pixel that is 0; None in runs of earlier versions. white: and for one that is 1.
        run_dir: the run's folder.
        learned: ``(N,)``, :func:`ella_cuda.experiments.error_bars.marks` of the training images; None before the factors are there, and
            where the caller fitted la.
    """

    class_names: tuple[str, ...] = ()
    black: Tensor | None = None
    white: Tensor | None = None
    run_dir: Path | None = None
    learned: Tensor | None = None

    @property
    def error_bars(self) -> dict[str, Any]:
        """Whose error bars predictions have, and what calibration made of them: the row's entry, see :func:`run_one`."""
        self._need_factors()
        return described(self.la)

    def predict(
        self, files: Iterable[str | os.PathLike[str]], *, skip_unreadable: bool = False, progress: bool = False
    ) -> Predictions:
        """Classes of images, with error bars.

        Args:
            files: files of images, or folders in and below which all images are taken.
            skip_unreadable: leave out files that cannot be read, in place of an error.
            progress: whether to show a progress bar.

        Returns:
            The :class:`ella_cuda.experiments.predictions.Predictions`; its names tell the files.

        Raises:
            FileNotFoundError: a file is not there. ValueError: a file cannot be read, or the run's images are made of several.
            RuntimeError: la is not fitted, and the run keeps no factors: load it with ``fit=True``.
        """
        self._need_factors()
        return predict(self, files, skip_unreadable, progress)

    def evaluate(
        self,
        path: str | os.PathLike[str],
        ood: str | os.PathLike[str] | None = None,
        *,
        skip_unreadable: bool = False,
        progress: bool = False,
    ) -> tuple[Predictions, dict[str, float]]:
        """Scores of predictions of labelled images.

        Args:
            path: labelled images, see :func:`ella_cuda.data.folder`, of classes that the run knows; the test part where there is one.
            ood: a folder or file of images of something else.
            skip_unreadable, progress: as of :meth:`predict`.

        Returns:
            The predictions, and by name ``images``, ``accuracy`` (percent), ``nll`` (nats), ``ece``, ``brier``, ``aurc``; with ``ood``
            ``ood_images`` and, of the scores ``entropy`` and ``max_probability``, ``auroc_...`` and ``fpr95_...``.

        Raises:
            As :meth:`predict` and :func:`ella_cuda.data.folder`; ValueError where a class is not the run's.
        """
        self._need_factors()
        return evaluate_on(self, path, ood, skip_unreadable, progress)

    def wrong_labels(
        self, count: int = 10, *, data_dir: str | None = None, download: bool = False, progress: bool = False
    ) -> list[tuple[str, str, float]]:
        """Training images whose labels all others contradict, by :meth:`ella_cuda.laplace.KronLaplace.influence`.

        Args:
            count: how many.
            data_dir, download: see :func:`ella_cuda.data.load`; the run's training data are read.
            progress: whether to show a progress bar.

        Returns:
            Name, label, and the label's probability by all others, of the most contradicted first.

        Raises:
            FileNotFoundError, ValueError: the training data are not there, or are others.
            RuntimeError: as :meth:`predict`.
        """
        self._need_factors()
        return wrong_labels(self, count, data_dir, download, progress)

    def threshold(self, risk: float) -> tuple[float, str]:
        """See :func:`ella_cuda.experiments.predictions.threshold`."""
        return threshold(self.run_dir, risk)

    def _need_factors(self) -> None:
        if not self.la.n_data:
            self.learned = _with_factors(self.la, self.run_dir)
        if not self.la.n_data:
            raise RuntimeError(f"the run {self.config.name} keeps no factors for predictions; load it with fit=True.")


def load_run(
    run_dir: str | os.PathLike[str],
    device: str = "cpu",
    *,
    fit: bool = False,
    model: str | None = None,
    data_dir: str | None = None,
    download: bool = False,
) -> LoadedRun:
    """The network of a run, finished or not, as of its last checkpoint; bases of sparsified layers as they were learned.

    Predictions with error bars, the evidence and effective parameters need ``fit=True``: the factors that finished runs on images of one's
    own keep are read; other runs take one pass over their training data, as ``la.fit`` does with those that :func:`prepare_for` gives.
    Nothing is written, without ``fit`` no data are read, and torch's random generators stay as they are. Loading executes no code from the
    files, and of a network ``module:function`` only code that ``model`` names too.

    Args:
        run_dir: the run's own folder, which holds ``checkpoint.pt``: a folder of ``ella-cuda train`` has one for each run.
        device: ``cpu``, ``cuda`` or ``cuda:<index>``, whatever the run was on; ``auto`` is the GPU if there is one.
        fit: fit ``la`` and calibrate it, so that it predicts as at the run's end; of a run that has not ended, by leave-one-out.
        model: of a run whose network is ``module:function``, that name.
        data_dir, download: see :func:`ella_cuda.data.load`.

    Returns:
        The :class:`LoadedRun`, a tuple ``(model, la, config, epoch)``.

    Raises:
        ValueError: the folder is not that of a run, or has no checkpoint yet, or a file in it is damaged or of another version.
        RuntimeError: the device is not there. With ``fit`` also what :func:`ella_cuda.data.load` raises.
    """
    run_dir = Path(run_dir)
    target = resolve_device(device)
    config, network, known = _described(run_dir)
    if runs_code(config.model) and model != config.model:
        raise ValueError(
            f"{run_dir} is of the network {config.model}, whose code is run where it is loaded: name it (model={config.model!r}, or "
            f"--model {config.model}), if you trust it."
        )
    path = run_dir / CHECKPOINT_FILE
    with torch.random.fork_rng(devices=[]):
        net = averaged(config, build_network(config, **network))
    try:
        state = load_checkpoint(path, {}, net)
    except FileNotFoundError as error:
        raise ValueError(
            f"{run_dir} has no {CHECKPOINT_FILE}: its run has not come to its first evaluation; go on with it."
        ) from error
    check_entries(path, state)
    net.load_state_dict(state["model"])
    net.to(target).eval()
    last = state["history"][-1]
    precisions = torch.tensor(last["prior_precision"], dtype=torch.float64)  # of units the means of each tensor's
    if config.prior_structure == "unit":
        precisions = state["learners"]["prior"]["log_precision"].exp()
    try:
        la = KronLaplace(
            net,
            state["settings"]["likelihood"],
            prior_precision=precisions,
            sigma_noise=last["sigma_noise"],
            **config.of(CurvatureConfig),
        )
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, error, ADVICE) from error
    if by_last_layer(config, net, network["num_classes"]):
        la = of_last_layer(config, la, network["num_classes"])
    learned = _with_factors(la, run_dir) if fit else None
    if fit and not la.n_data:
        data = prepare_for(config, data_dir, download).to(target)
        learned = marks(pixels(data.train_images, data.black, data.white))
        draws = None
        if (run_dir / SAMPLES_FILE).exists():
            draws = torch.tensor(read_samples(run_dir)["draws"], device=target)
        with own_random_state(), same_copies(net, draws):
            loader = TensorLoader(data.train_images, data.train_labels, config.evidence_batch_size)
            la.fit(loader)
            history = read_history(run_dir)
            if PREDICTIVE not in history:  # the run is not finished
                if config.calibration != "none":
                    calibrated(la, loader)
            elif by_name := history[PREDICTIVE]:
                values = [by_name[name] for name in la.parameter_names]
                values = torch.tensor(values, dtype=torch.float64, device=target)
                if is_finer(la, la.prior_precision):
                    values = la.prior_precision * finer(la, values / of_tensors(la, la.prior_precision))
                la.predictive_prior_precision = values
    run = LoadedRun(net, la, config, state["epoch"])
    run.class_names = tuple(known.get("class_names") or map(str, range(network["num_classes"])))
    run.black, run.white = (torch.tensor(known[k], device=target) if k in known else None for k in ("black", "white"))
    run.run_dir, run.learned = run_dir, learned
    return run


def _with_factors(la: KronLaplace, run_dir: Path) -> Tensor | None:
    """The marks of the images that the run learned from, and la has the factors that it keeps; None where it keeps none."""
    path = run_dir / LAPLACE_FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["run"] != read_diary(run_dir)["run"]:
            raise ValueError(f"it is of the run {state['run']!r}")
        learned = state.get("learned")
        if not isinstance(learned, Tensor):
            raise ValueError("it does not say which images the run learned from")
        la.load_state_dict(state["laplace"])
    except Exception as error:  # torch.load fails in many ways, and its messages are long
        why = error if isinstance(error, ValueError) else f"reading it raised {type(error).__name__}"
        raise damaged(path, why, "delete it to have the factors computed from the training data") from error
    return learned


def _described(run_dir: Path) -> tuple[RunConfig, dict[str, Any], dict[str, Any]]:
    """The run's configuration, its network's numbers, and all that predictions need to know of the data, out of its diary."""
    path = run_dir / DIARY_FILE
    try:
        diary = read_diary(run_dir)
    except (FileNotFoundError, NotADirectoryError) as error:
        runs = sorted(p.parent.name for p in run_dir.glob(f"*/{CHECKPOINT_FILE}"))
        if (run_dir / CONFIG_FILE).exists() and runs:
            raise ValueError(f"{run_dir} holds several runs; name the folder of one: {', '.join(runs)}.") from error
        lacks = "is a file" if run_dir.is_file() else f"has no {DIARY_FILE}" if run_dir.exists() else "does not exist"
        raise ValueError(f"{run_dir} is not the folder of a run: it {lacks}.") from error
    try:
        numbers = {name: int(diary["network"][name]) for name in ("in_channels", "num_classes")}
        return RunConfig(**diary["config"]), numbers, diary["network"]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, repr(error), ADVICE) from error

"""A trained network, back from its run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ella_cuda.augment import AveragedFunction
from ella_cuda.data import TensorLoader
from ella_cuda.experiments.device import resolve_device
from ella_cuda.experiments.hyperparameters import CurvatureConfig, RunConfig
from ella_cuda.experiments.run import averaged, build_network, own_random_state, prepare_for, same_copies
from ella_cuda.files import damaged
from ella_cuda.laplace import KronLaplace
from ella_cuda.models import Neyshabur
from ella_cuda.run_folder import CHECKPOINT_FILE, CONFIG_FILE, DIARY_FILE, SAMPLES_FILE, read_diary, read_samples
from ella_cuda.training.checkpoint import check_entries, load_checkpoint
from ella_cuda.training.trainer import calibrated

ADVICE = "do the run again"


class LoadedRun(NamedTuple):
    """What :func:`load_run` gives."""

    model: Neyshabur | AveragedFunction  # in evaluation mode
    la: KronLaplace  # of the model, with the run's prior precisions; fitted if asked for, at a finished run's copies
    config: RunConfig
    epoch: int  # epochs done: config.epochs in a finished run


def load_run(
    run_dir: str | os.PathLike[str],
    device: str = "cpu",
    *,
    fit: bool = False,
    data_dir: str | None = None,
    download: bool = False,
) -> LoadedRun:
    """The network of a run, finished or not, as of its last checkpoint; bases of sparsified layers as they were learned.

    Factors are not kept in a folder: predictions with error bars, the evidence and effective parameters need ``fit=True``, one pass over
    the run's training data, or ``la.fit`` with those that :func:`prepare_for` gives. Nothing is written, without ``fit`` no data are
    read, and torch's random generators stay as they are. Loading executes no code from the files.

    Args:
        run_dir: the run's own folder, which holds ``checkpoint.pt``: a folder of ``ella-cuda train`` has one for each run.
        device: ``cpu``, ``cuda`` or ``cuda:<index>``, whatever the run was on; ``auto`` is the GPU if there is one.
        fit: fit ``la`` and calibrate it, so that it predicts as at the run's end.
        data_dir, download: see :func:`ella_cuda.data.load`.

    Returns:
        ``(model, la, config, epoch)``.

    Raises:
        ValueError: the folder is not that of a run, or has no checkpoint yet, or a file in it is damaged or of another version.
        RuntimeError: the device is not there. With ``fit`` also what :func:`ella_cuda.data.load` raises.
    """
    run_dir = Path(run_dir)
    target = resolve_device(device)
    config, network = _described(run_dir)
    path = run_dir / CHECKPOINT_FILE
    with torch.random.fork_rng(devices=[]):
        model = averaged(config, build_network(config, **network))
    try:
        state = load_checkpoint(path, {}, model)
    except FileNotFoundError as error:
        raise ValueError(
            f"{run_dir} has no {CHECKPOINT_FILE}: its run has not come to its first evaluation; go on with it."
        ) from error
    check_entries(path, state)
    model.load_state_dict(state["model"])
    model.to(target).eval()
    last = state["history"][-1]
    try:
        la = KronLaplace(
            model,
            state["settings"]["likelihood"],
            prior_precision=torch.tensor(last["prior_precision"], dtype=torch.float64),
            sigma_noise=last["sigma_noise"],
            **config.of(CurvatureConfig),
        )
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, error, ADVICE) from error
    if fit:
        data = prepare_for(config, data_dir, download).to(target)
        draws = None
        if (run_dir / SAMPLES_FILE).exists():
            draws = torch.tensor(read_samples(run_dir)["draws"], device=target)
        with own_random_state(), same_copies(model, draws):
            loader = TensorLoader(data.train_images, data.train_labels, config.evidence_batch_size)
            calibrated(la.fit(loader), loader)
    return LoadedRun(model, la, config, state["epoch"])


def _described(run_dir: Path) -> tuple[RunConfig, dict[str, Any]]:
    """The run's configuration and its network's numbers, out of its diary."""
    path = run_dir / DIARY_FILE
    try:
        diary = read_diary(run_dir)
    except (FileNotFoundError, NotADirectoryError) as error:
        runs = sorted(p.parent.name for p in run_dir.glob(f"*/{CHECKPOINT_FILE}"))
        if (run_dir / CONFIG_FILE).exists() and runs:
            raise ValueError(f"{run_dir} holds several runs; name the folder of one: {', '.join(runs)}.") from error
        raise ValueError(f"{run_dir} is not the folder of a run: it has no {DIARY_FILE}.") from error
    try:
        return RunConfig(**diary["config"]), {
            name: int(diary["network"][name]) for name in ("in_channels", "num_classes")
        }
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, repr(error), ADVICE) from error

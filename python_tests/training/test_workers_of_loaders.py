"""Resumed runs whose data come from a DataLoader's worker processes."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ella_cuda import marglik_training


class Noisy(Dataset):
    """Points that each look sees otherwise, by draws from the global generators of torch, numpy and Python."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(24, 6, generator=torch.Generator().manual_seed(5)), torch.arange(24) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + torch.rand(1) + np.random.rand() + random.random(), self.y[i]


class Interrupted(Exception):
    pass


def train(checkpoint: Path, seeded: bool, until: int = 3, **how: object) -> tuple[list[float], ...]:
    """Three epochs, interrupted before the checkpoint of the one after ``until``."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(3) if seeded else None
    loader = DataLoader(Noisy(), 8, shuffle=True, generator=generator, **how)

    def interrupt(evaluation: object) -> None:
        if evaluation.epoch > until:
            raise Interrupted

    settings = {"n_epochs": 3, "n_hypersteps": 2, "progress_bar": False, "checkpoint": checkpoint}
    _, model, margliks, losses = marglik_training(model, loader, on_evaluation=interrupt, **settings)
    return margliks, losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def seed(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


@pytest.mark.parametrize("seeded", [False, True], ids=["global generator", "generator of its own"])
def test_a_resumed_run_repeats_what_workers_draw(seeded, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seed(0)
        whole = train(tmp_path / "whole.pt", seeded, num_workers=2)
        seed(0)
        with pytest.raises(Interrupted):
            train(tmp_path / "resumed.pt", seeded, until=1, num_workers=2)
        seed(1)
        resumed = train(tmp_path / "resumed.pt", seeded, num_workers=2)
    assert resumed == whole
    seed(1)
    assert train(tmp_path / "other.pt", seeded, num_workers=2) != whole  # what is drawn matters


@pytest.mark.parametrize("how", [{"persistent_workers": True}, {"in_order": False}])
def test_what_a_resumed_run_cannot_repeat_is_said(how, tmp_path):
    (name,) = how
    with pytest.warns(UserWarning, match=f"will not repeat.*{name}"):
        train(tmp_path / "run.pt", False, num_workers=1, **how)


def test_nothing_is_said_where_there_are_no_workers_or_no_checkpoint(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run.pt", False, in_order=False)
        train(None, False, num_workers=1, persistent_workers=True)

"""Fixtures of experiments in parts."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, which takes longer than small networks do."""
    monkeypatch.setattr("ella_cuda.experiments.studies.experiment.add_picture", lambda *_: None)

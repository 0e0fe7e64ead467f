"""README.md's Python runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ella_cuda import laplace

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8"), re.S
)


def test_every_block_runs():
    assert len(BLOCKS) == 3
    names: dict[str, object] = {}
    training, groups, hyperparameters = BLOCKS
    # The same training at a size for tests: the numbers of the page come from its commands, not from here.
    small = training.replace('load("digits")', 'subsample(ella_cuda.data.load("digits"), 60, 0)')
    small = small.replace("n_epochs=30, n_epochs_burnin=10, marglik_frequency=5", "n_epochs=2, n_epochs_burnin=1")
    assert small.count("subsample") == 1 and "n_epochs=2" in small
    exec(compile(small, "README.md", "exec"), names)
    assert isinstance(names["la"], laplace.KronLaplace) and names["precision"].grad.isfinite().all()
    exec(compile(groups, "README.md", "exec"), names)
    exec(compile(hyperparameters, "README.md", "exec"), names)
    with pytest.raises(RuntimeError, match="call fit again"):
        names["la"].log_marginal_likelihood()

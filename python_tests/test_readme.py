"""README.md's Python runs as it stands, one block after the other."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from ella_cuda import cli, experiments, laplace

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_every_block_runs(tmp_path, monkeypatch):
    names: dict[str, object] = {}
    loading = next(b for b in BLOCKS if "load_run" in b)
    training, own, groups, hyperparameters = (b for b in BLOCKS if b != loading)
    # The same training at a size for tests: the numbers of the page come from its commands, not from here.
    small = training.replace('load("digits")', 'subsample(ella_cuda.data.load("digits"), 60, 0)')
    small = small.replace("n_epochs=30, n_epochs_burnin=10, marglik_frequency=5", "n_epochs=2, n_epochs_burnin=1")
    assert small.count("subsample") == 1 and "n_epochs=2" in small
    exec(compile(small, "README.md", "exec"), names)
    assert isinstance(names["la"], laplace.KronLaplace) and names["precision"].grad.isfinite().all()
    exec(compile(own, "README.md", "exec"), names)
    assert names["la"].prior_precision.ne(1).all() and set(names["la"].layer_types()) == {"0"}
    exec(compile(groups, "README.md", "exec"), names)
    exec(compile(hyperparameters, "README.md", "exec"), names)
    with pytest.raises(RuntimeError, match="call fit again"):
        names["la"].log_marginal_likelihood()
    # The folder that the page names, from a run as its name says, at a size for tests.
    (folder,) = re.findall(r'load_run\("(.*?)"\)', loading)
    sizes = {"width": 1, "epochs": 3, "burn_in": 0, "frequency": 1, "hypersteps": 1, "train_size": 40}
    config = experiments.configure("digits", "digit", "s_fc+s_conv", "evidence", learn="lengthscales", **sizes)
    assert Path(folder).name == config.name
    monkeypatch.chdir(tmp_path)
    experiments.run_one(config, folder, progress=False)
    exec(compile(loading, "README.md", "exec"), names)
    assert names["config"] == dataclasses.replace(config, evidence_batch_size=150) and names["la"].n_data == 40


def test_a_command_makes_the_folder_that_is_loaded(asked):
    (folder,) = re.findall(r'load_run\("(.*?)"\)', README)
    (command,) = re.findall(rf"`ella-cuda (train [^`]*--out {Path(folder).parent})`", README)
    assert cli.main(shlex.split(command)) == 0
    assert Path(folder) in [grid.folder / config.name for grid in asked for config in grid.configs]


def test_what_is_installed_for_a_build_without_isolation_is_what_a_build_requires():
    (required,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    (installed,) = re.findall(
        r"`(pip install torch torchvision [^`]*)`, then `pip install --no-build-isolation \.`", README
    )
    names = {re.split(r"[<>=]", word)[0] for word in shlex.split(installed)}
    assert {re.split(r"[<>=]", word)[0] for word in re.findall(r'"(.*?)"', required)} <= names

"""The Python of README.md and of docs runs as it stands, one block of a page after the other; its commands and links hold."""

from __future__ import annotations

import dataclasses
import re
import shlex
import warnings
from pathlib import Path

import pytest
from PIL import Image

from ella_cuda import cli, experiments, laplace

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
USE = (ROOT / "docs/use.md").read_text(encoding="utf-8")
METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docker/README.md"]
PAGES.append(ROOT / "benchmarks/results/README.md")


def blocks(page: str) -> list[str]:
    """The page's Python, in order."""
    return re.findall(r"```python\n(.*?)```", page, re.S)


def test_the_blocks_of_readme_and_use_run_one_after_the_other(tmp_path, monkeypatch):
    names: dict[str, object] = {}
    (training,) = blocks(README)
    (
        own,
        looping,
        compacting,
        predicting,
        alone,
        at_mode,
        others,
        further,
        augmented,
        banks,
        imaged,
        tagged,
        outputs,
        loading,
        photos,
    ) = blocks(USE)
    # The same training at a size for tests: the numbers of the page come from its commands, not from here.
    small = training.replace('load("digits")', 'subsample(ella_cuda.data.load("digits"), 60, 0)')
    small = small.replace("n_epochs=30, n_epochs_burnin=10, marglik_frequency=5", "n_epochs=2, n_epochs_burnin=1")
    assert small.count("subsample") == 1 and "n_epochs=2" in small
    exec(compile(small, "README.md", "exec"), names)
    assert isinstance(names["la"], laplace.KronLaplace)
    exec(compile(own, "use.md", "exec"), names)
    assert names["precision"].grad.isfinite().all()
    assert names["la"].prior_precision.ne(1).all() and set(names["la"].layer_types()) == {"0"}
    exec(compile(looping, "use.md", "exec"), names)
    decays = [group["weight_decay"] for group in names["optimizer"].param_groups]
    assert decays == list(names["evidence"].weight_decay.values()) and len(names["evidence"].margliks) == 2
    exec(compile(compacting, "use.md", "exec"), names)
    assert names["report"].layers[-1].units == (10, 10) and names["small"](names["x"]).shape[1] == 10
    exec(compile(predicting, "use.md", "exec"), names)
    assert names["covariance"].shape == (20, 10, 10) and names["functions"].shape == (5, 20, 10)
    exec(compile(alone, "use.md", "exec"), names)
    assert len(names["left"].leverage) == names["la"].n_data and names["unsure"].epistemic.shape == (20,)
    assert at_mode.count("tol=0.01") == 1  # fewer rounds here
    exec(compile(at_mode.replace("tol=0.01", "tol=1.0"), "use.md", "exec"), names)
    apart = names["apart"]
    assert names["theta"].shape == (apart.n_params,) and apart.linear_fit.passes > 0
    assert apart.log_marginal_likelihood(at="linear") > apart.log_marginal_likelihood()
    exec(compile(others, "use.md", "exec"), names)
    assert names["last"].parameter_names == ["4.weight", "4.bias"] and len(names["chosen"]) == 50
    count = names["last"].n_data
    exec(compile(further, "use.md", "exec"), names)
    assert names["last"].n_data > count and names["last"].linear_mode is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a schedule that ends before the amounts' limits
        exec(compile(augmented, "use.md", "exec"), names)
    assert names["copies"].shape == (5, 8, 1, 16, 16) and list(names["averaged"].augment.amounts()) == [
        "rotation",
        "tx",
        "ty",
    ]
    exec(compile(banks, "use.md", "exec"), names)
    assert list(names["shallow"].hyperparameters()) == ["prior_precision", "rotation", "tx", "ty"]
    assert imaged.count("n_steps=1500") == 1 and imaged.count("n_steps=300") == 1  # fewer here
    imaged = imaged.replace("n_steps=1500", "n_steps=50").replace("n_steps=300", "n_steps=10")
    exec(compile(imaged, "use.md", "exec"), names)
    assert names["deviation"].gt(0).all() and names["samples"].shape == (100, 16, 16)
    exec(compile(tagged, "use.md", "exec"), names)
    assert names["with_token"].n_data and "PerExampleRule" in names["with_token"].summary()
    monkeypatch.setattr(laplace.likelihoods, "LIKELIHOODS", dict(laplace.likelihoods.LIKELIHOODS))
    exec(compile(outputs, "use.md", "exec"), names)
    assert names["la"].n_outputs == 35 and names["waiting"].likelihood == "exponential"
    # The folder that the page names, from a run as its name says, at a size for tests.
    (folder,) = re.findall(r'run = "(.*?)"', loading)
    sizes = {"width": 1, "epochs": 3, "burn_in": 0, "frequency": 1, "hypersteps": 1, "train_size": 40, "test_size": 40}
    config = experiments.configure("digits", "digit", "s_fc+s_conv", "evidence", learn="lengthscales", **sizes)
    assert Path(folder).name == config.name
    monkeypatch.chdir(tmp_path)
    experiments.run_one(config, folder, progress=False)
    exec(compile(loading, "use.md", "exec"), names)
    assert names["config"] == dataclasses.replace(config, evidence_batch_size=150) and names["la"].n_data == 40
    for i, name in enumerate(("photos/a/1", "photos/a/2", "photos/b/1", "photos/b/2", "test/a/1", "test/b/1", "new")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 5), (10 * i, 90 * ("a/" in name), 200 - 30 * i)).save(f"{name}.png")
    Path("new.png").rename("new.jpg")  # readers go by content
    sizes = {"model": "", "width": 1, "epochs": 1, "image_size": 32, "split": 0.5}
    config = experiments.configure("./photos", "plain", "conv", "evidence", **sizes)
    (folder,) = re.findall(r'load_run\("(.*?)"\)', photos)
    assert Path(folder).name.replace("resnet18", "conv") == config.name
    experiments.run_one(config, folder.replace("resnet18", "conv"), progress=False)
    exec(compile(photos.replace("resnet18", "conv"), "use.md", "exec"), names)
    assert len(names["answers"].classes) == 1 and names["photos"].class_names == ("a", "b")


def test_the_blocks_of_method_run():
    names: dict[str, object] = {}
    for block in blocks(METHOD):
        exec(compile(block, "method.md", "exec"), names)
    with pytest.raises(RuntimeError, match="call fit again"):
        names["la"].log_marginal_likelihood()


def test_errors_for_many_outputs_are_those_of_the_benchmark():
    table = (ROOT / "benchmarks/results/large-outputs/table.txt").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in table[2:]]
    shown = [f"| {state} | `{setting}` | {' | '.join(numbers)} |" for state, setting, *numbers in rows]
    assert [line for line in USE.splitlines() if line in shown] == [row for row in shown if "`exact`" not in row]
    assert len(rows) == 10 and table[0] == "1000 classes, 300 data points"


def test_a_command_makes_the_folder_that_is_loaded(asked):
    (folder,) = re.findall(r'\nrun = "(.*?)"\n', USE)
    (command,) = re.findall(rf"`ella-cuda (train [^`]*--out {Path(folder).parent})`", USE)
    assert cli.main(shlex.split(command)) == 0
    assert Path(folder) in [grid.folder / config.name for grid in asked for config in grid.configs]


def test_what_is_installed_for_a_build_without_isolation_is_what_a_build_requires():
    (required,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    (installed,) = re.findall(
        r"`(pip install torch torchvision [^`]*)`, then `pip install --no-build-isolation \.`", README
    )
    names = {re.split(r"[<>=]", word)[0] for word in shlex.split(installed)}
    assert {re.split(r"[<>=]", word)[0] for word in re.findall(r'"(.*?)"', required)} <= names


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name}: {target}"

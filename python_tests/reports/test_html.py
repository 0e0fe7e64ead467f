"""Reports as pages for the browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ella_cuda import cli, experiments
from ella_cuda.data import Dataset, TensorLoader
from ella_cuda.experiments.examples import find_examples, keep_examples
from ella_cuda.experiments.report import command_of
from ella_cuda.laplace import KronLaplace

VOID = {"meta", "img", "br", "wbr"}
SECTIONS = ["learned", "training", "calibration", "confusion", "unsure", "suspects", "settings", "again"]
CONFIGS = [
    experiments.configure(
        "digits", "plain", "conv", "evidence", 0, learn="augmentation", generators="rotation", copies=2, epochs=2, burn_in=0,
        frequency=1, lr_aug=20.0, hypersteps=1, width=1, train_size=30, test_size=30,
    )
]  # fmt: skip


class Page(HTMLParser):
    """A page's tags with their attributes; AssertionError where an element is not closed in its turn."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.open, self.texts = [], [], {}
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("runs")
    experiments.run_grid(CONFIGS, out_dir, progress=False)
    return out_dir


def test_a_run_has_a_page_of_its_own_with_its_numbers(folder):
    page, (row,) = Page(folder / CONFIGS[0].name / "report.html"), json.loads((folder / "summary.json").read_text())
    assert ("html", {"lang": "en"}) in page.tags
    assert [attrs["id"] for tag, attrs in page.tags if tag == "h2"] == SECTIONS
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) >= 12 + 5 and all(image["alt"] for image in images)
    for image in images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/png;base64" and Image.open(io.BytesIO(base64.b64decode(data))).size > (1, 1)
    links = [attrs[name] for _, attrs in page.tags for name in ("href", "src", "action", "srcset") if name in attrs]
    assert all(link.startswith(("#", "data:")) for link in links) and "url(" not in "".join(map(str, page.tags))
    assert page.texts["accuracy"] == f"{row['accuracy']:.2f}"
    for key in ("nll", "nll_predictive", "ece", "brier", "neg_log_marginal_likelihood"):
        assert page.texts[key] == f"{row[key]:.3f}"
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_the_folders_page_leads_to_its_runs(folder):
    page = Page(folder / "report.html")
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and not attrs["href"].startswith("#")]
    assert [(folder / link).exists() for link in links] == [True]


def test_the_command_writes_what_training_wrote(folder, capsys):
    run = folder / CONFIGS[0].name
    before = {path: path.read_bytes() for path in (folder / "report.html", run / "report.html")}
    for path in before:
        path.unlink()
    assert cli.main(["report", str(run)]) == 0 and not (folder / "report.html").exists()
    assert cli.main(["report", str(folder)]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert cli.main(["report", str(folder.parent)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_report_that_fails_is_a_warning_that_says_how_to_write_it(folder, monkeypatch):
    run = folder / CONFIGS[0].name
    kept = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    monkeypatch.setattr("ella_cuda.experiments.report.run_page", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match=re.escape(f"ella-cuda report {shlex.quote(str(run))}")):
        (row,) = experiments.run_grid(CONFIGS, folder, progress=False)
    assert row["run"] == run.name
    (run / "report.html").write_bytes(kept)


@pytest.mark.parametrize(
    "options",
    [
        "--task digit --seed 3 --width 2",
        "--layer s_fc --learn anchors --lr 0.1",
        "--learn augmentation --generators tx ty --task plain",
    ],
)
def test_the_command_of_a_run_makes_that_run(options, asked):
    assert cli.main(["train", *options.split()]) == 0
    config = asked[0].configs[-1]
    assert cli.main(shlex.split(command_of(config))[1:]) == 0
    assert asked[1].configs == [config]


def test_examples_are_the_least_sure_images_and_those_with_wrong_labels():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    images = (0.5 + 0.2 * (2 * labels - 1)[:, None] + 0.05 * torch.randn(40, 4, generator=generator)).reshape(
        40, 1, 2, 2
    )
    images, wrong = images.clamp(0, 1), labels.clone()
    wrong[[4, 7]] = 1 - wrong[[4, 7]]
    data = Dataset(images, wrong, images[:10], labels[:10], 2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), wrong).backward()
        optimizer.step()
    la = KronLaplace(model).fit(TensorLoader(images, wrong, 20))
    sure = torch.linspace(0.55, 0.99, 10).flip(0)
    predicted = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1, 0])
    probabilities = torch.where(torch.arange(2) == predicted[:, None], sure[:, None], 1 - sure[:, None])
    found = find_examples(model, la, data, probabilities)
    assert found["confusion"] == [[0, 0, 4], [0, 1, 1], [1, 0, 1], [1, 1, 4]]
    assert [one["probability"] for one in found["least_sure"]] == pytest.approx(sorted(sure.tolist()))
    assert (found["least_sure"][0]["label"], found["least_sure"][0]["predicted"]) == (1, 0)
    shown = {(one["png"], one["label"], one["predicted"]) for one in found["suspects"]}
    expected = np.round(255 * images[[4, 7], 0].numpy())
    decoded = [np.array(Image.open(io.BytesIO(base64.b64decode(png)))) for png, *_ in shown]
    assert sorted(map(np.ndarray.tolist, decoded)) == sorted(map(np.ndarray.tolist, expected))
    assert {one[1:] for one in shown} == {(1, 0), (0, 1)} and found["examined"] == 40
    assert find_examples(model, None, data, probabilities)["reason"]


def test_examples_that_fail_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("ella_cuda.experiments.examples.find_examples", lambda *_: {}["missing"])
    with pytest.warns(RuntimeWarning, match="images to look at could not be found .KeyError: 'missing'"):
        keep_examples(tmp_path, "run", nn.Linear(1, 1), None, None, None)
    assert not [*tmp_path.iterdir()]

"""``ella-cuda reproduce invariances --part lengthscale gp local lastlayer``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal

from ella_cuda.data import Dataset
from ella_cuda.laplace import FullLaplace
from ella_cuda.papers.invariances import EXPERIMENT, gp, lastlayer, lengthscale, local, processes
from ella_cuda.papers.studies import study
from ella_cuda.training.checkpoint import read_checkpoint
from ella_cuda.training.trainer import MarglikTrainer
from python_tests.papers.studies import check_goes_on, table

SMALL = ["--data", "digits", "--scale", "0.002", "--jobs", "1", "--device", "cpu"]
DOUBLE = {"dtype": torch.float64}


def test_the_evidence_of_basis_functions_is_that_of_the_normal_distribution():
    x, y, _, _ = lengthscale.data_of(0.6, 0)
    scale, weight, noise = (torch.tensor(v, **DOUBLE) for v in (0.5, 1.3, 0.2))
    bumps = (-((x[:, None] - torch.linspace(-4, 4, 200, **DOUBLE)) ** 2) / (2 * scale**2)).exp()
    phi = bumps / bumps.norm(dim=1, keepdim=True)
    torch.testing.assert_close(lengthscale.features(x, scale), phi)
    exact = MultivariateNormal(torch.zeros(40, **DOUBLE), weight**2 * phi @ phi.T + noise**2 * torch.eye(40, **DOUBLE))
    assert lengthscale.evidence(phi, y, weight, noise).item() == pytest.approx(exact.log_prob(y).item(), rel=1e-9)

    layer = torch.nn.Linear(200, 1, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(lengthscale.posterior_mean(phi, y, weight, noise)[None])
    la = FullLaplace(layer, "regression", sigma_noise=noise.item(), prior_precision=weight.item() ** -2)
    la.fit([(phi, y[:, None])])
    assert la.log_marginal_likelihood().item() == pytest.approx(exact.log_prob(y).item(), rel=1e-9)


def test_the_evidence_finds_a_lengthscale_that_the_loss_goes_past():
    x, y, _, _ = lengthscale.data_of(0.6, 1)
    by_evidence, (_, noise) = lengthscale.learned_by_evidence(x, y, 200)
    by_loss, weights = lengthscale.learned_by_loss(x, y, 2500)
    assert by_evidence[0] == by_loss[0] == (0, 1.0) and by_evidence[-1][0] == 200
    assert by_evidence[-1][1] == pytest.approx(0.6, abs=0.15) and noise.item() == pytest.approx(0.1, abs=0.04)
    assert by_loss[-1][1] < 0.3
    left = y - lengthscale.features(x, torch.tensor(by_loss[-1][1], **DOUBLE)) @ weights
    assert left.square().mean().sqrt() < 0.08 < lengthscale.NOISE


def process(points: torch.Tensor) -> processes.AveragedProcess:
    made = processes.AveragedProcess(points, 1.7)
    with torch.no_grad():
        made.log_amplitude.fill_(0.2)
    return made


def test_the_bound_is_the_exact_evidence_where_all_copies_are_inducing_points(monkeypatch):
    monkeypatch.setattr(processes, "JITTER", 1e-12)
    drawn = torch.Generator().manual_seed(0)
    n, s, d = 5, 3, 4
    copies, y, others = (torch.randn(size, generator=drawn, **DOUBLE) for size in ((n, s, d), (n, 2), (2, s, d)))

    def k(a, b):
        return sum(math.exp(0.4 - (u - v).square().sum().item() / (2 * 1.7**2)) for u in a for v in b) / s**2

    exact = torch.tensor([[k(a, b) for b in copies] for a in copies], **DOUBLE)
    noisy = exact + processes.NOISE**2 * torch.eye(n, **DOUBLE)
    normal = MultivariateNormal(torch.zeros(n, **DOUBLE), noisy)
    whole = process(copies.flatten(0, 1))
    evidence = normal.log_prob(y.T).sum().item()
    assert whole.bound(copies, y).item() == pytest.approx(evidence, rel=1e-7)
    cross = torch.tensor([[k(a, b) for b in copies] for a in others], **DOUBLE)
    mean = whole.predicted(copies, y, iter(others.split(1)))
    torch.testing.assert_close(mean, cross @ torch.linalg.solve(noisy, y), rtol=1e-6, atol=1e-8)

    below = [process(copies.flatten(0, 1)[:m]).bound(copies, y).item() for m in (2, 7)]
    assert below[0] < below[1] < evidence - 1e-3
    points = copies.flatten(0, 1)[:7]
    between = torch.tensor([[k(a[None], b) * s for b in copies] for a in points], **DOUBLE)
    among = torch.tensor([[k(a[None], b[None]) * s**2 for b in points] for a in points], **DOUBLE)
    low = between.T @ torch.linalg.solve(among, between)
    near = MultivariateNormal(torch.zeros(n, **DOUBLE), low + processes.NOISE**2 * torch.eye(n, **DOUBLE))
    lost = 2 * (exact - low).trace() / (2 * processes.NOISE**2)
    assert below[1] == pytest.approx((near.log_prob(y.T).sum() - lost).item(), rel=1e-7)


def test_an_ascent_that_was_killed_goes_on(tmp_path):
    def ascent(name: str, steps: int) -> tuple[list, torch.nn.Module]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)

        def value():
            return -(model(torch.randn(5, 3)) - 1).square().mean()

        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.1}]

        frozen = [(1,)] * 4 + [()] * 4
        return processes.climbed(
            value, groups, steps, tmp_path / name, model, model.bias.item, frozen.__getitem__
        ), model

    found, whole = ascent("whole", 8)
    ascent("killed", 5)
    again, model = ascent("killed", 8)
    assert again == found and torch.equal(model.weight, whole.weight)
    assert [seen for _, seen in found[:5]] == [found[0][1]] * 5 and found[8][1] != found[4][1]


def test_in_turns_the_network_and_the_amounts_are_held():
    x, y = torch.rand(12, 1, 16, 16), torch.arange(12) % 3
    dataset = Dataset(x, y, x, y, 3)
    network = lastlayer.pretrained(dataset, 16, 1, "", False)
    model = gp.OfImages(dataset, {"copies": 2, "inducing": 4}, True, network)
    groups = lastlayer.groups_of(model, "in-turns", 4)
    held = [lastlayer.held_groups("in-turns", step, 2) for step in range(5)]
    assert held == [(3,), (3,), (2,), (2,), (3,)]
    assert groups[2]["params"][0] is model.augment.raw and groups[3]["params"] == [*network.parameters()]
    assert [p.requires_grad for p in network.parameters()] == [True] * 8
    assert len(lastlayer.groups_of(model, "held", 4)) == 3 and not any(p.requires_grad for p in network.parameters())
    copies = model.copies(x, torch.zeros(1, 2, 6))
    torch.testing.assert_close(copies, network(x)[:, None].expand(-1, 2, -1), rtol=1e-4, atol=1e-5)


def test_images_are_deformed_by_the_strength():
    ramp = torch.linspace(-1, 1, 17).expand(400, 1, 17, 17)  # a pixel's value is its place
    y = torch.arange(400) % 2
    made = local.deformed(Dataset(ramp, y, ramp, y, 2, digest="0"), "strong")
    for images in (made.train_images, made.test_images):
        assert images[:, 0, 8, 8].std().item() == pytest.approx(0.25, rel=0.12)
    assert not torch.equal(made.train_images, made.test_images) and made.digest != "0"


@pytest.mark.usefixtures("undrawn")
def test_a_killed_session_goes_on_to_the_files_of_one_that_was_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gp, "TASKS", ("rotated",))
    monkeypatch.setattr(lastlayer, "TASKS", ("plain",))
    monkeypatch.setattr(local, "TRUE", {kind: local.TRUE[kind] for kind in ("strong", "plain")})
    monkeypatch.setattr(lengthscale, "TRUE", (0.6,))
    stops = [
        (MarglikTrainer, "epoch", lambda self: self.epochs == 2 and "strong-evidence" in self._bar["desc"]),
        (gp.OfImages, "measured", lambda self, _: isinstance(self.network, torch.nn.Sequential)),
    ]
    options = ["invariances", "--part", "gp", "local", "lastlayer", "lengthscale", *SMALL, "--seed", "0"]
    check_goes_on(options, tmp_path, stops, capsys)
    folder = tmp_path / "whole"
    for r in table(folder, "local"):
        state = read_checkpoint(folder / f"local-digits-{r['deformation']}-{r['method']}-seed0" / "checkpoint.pt")
        amounts = F.softplus(state["model"]["augment.raw"]).tolist() if r["method"] == "evidence" else ["", ""]
        assert [r[name] and pytest.approx(float(r[name])) for name in local.AMOUNTS] == amounts
    for r in [*table(folder, "gp"), *table(folder, "lastlayer")]:
        part, way = ("gp", r["kernel"]) if "kernel" in r else ("lastlayer", r["method"])
        state = read_checkpoint(folder / f"{part}-digits-{r['task']}-{way}-seed0" / "checkpoint.pt")["state"]
        amounts = F.softplus(state["augment.raw"])[2].item() if way != "plain" else None
        assert (float(r["share_rotation"]) * math.pi if r["share_rotation"] else None) == pytest.approx(amounts)


def test_parts_are_pictures(tmp_path):
    for name, more in (("gp", 1), ("local", 1), ("lastlayer", 0), ("lengthscale", 0)):
        one, part = EXPERIMENT.plan([name], (0,), 0.002, ["digits"])[0], EXPERIMENT.parts[name]
        (tmp_path / name).mkdir()
        found = [(one, part.run(one, study.Work(tmp_path / name)))]
        assert len(part.pictures) == more and part.draw(found).axes[0].lines
        assert all(draw(found).axes[0].images for draw in part.pictures.values())

"""``ella-cuda reproduce tomography``: its parts at the size of a test, from end to end; images, and how they are judged."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch

from ella_cuda import cli
from ella_cuda.data import load
from ella_cuda.experiments.studies import study
from ella_cuda.experiments.tomography import EXPERIMENT, images, phantom, reconstruction
from ella_cuda.experiments.tomography.quality import error_shares, inside, psnr, ssim
from ella_cuda.experiments.tomography.sources import image_of, shepp_logan
from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet
from python_tests.experiments.studies import files, run, table

SMALL = ["--data", "digits", "--scale", "0.002", "--jobs", "1", "--device", "cpu"]


@pytest.fixture
def few(monkeypatch):
    """Fewer numbers of angles and noises than people look at."""
    for part, angles in ((images, (20,)), (phantom, (5, 20))):
        monkeypatch.setattr(part, "ANGLES", angles)
        monkeypatch.setattr(part, "NOISES", (0.1,))


@pytest.mark.usefixtures("few")
def test_parts_are_tables_and_pictures(tmp_path, capsys):
    folder = tmp_path / "out"
    run("tomography", *SMALL, "--seed", "0", "1", "--out", str(folder))
    printed = capsys.readouterr().out
    assert "6 networks on cpu, 1 at once, 0 done before" in printed
    for part in ("phantom", "images"):
        assert (folder / f"{part}.txt").read_text().strip() in printed
        assert {p.suffix for p in folder.glob(f"{part}.*")} == {".txt", ".csv", ".png", ".svg"}
        for picture in ("densities", "errors"):
            assert {p.suffix for p in folder.glob(f"{part}-{picture}.*")} == {".png", ".svg"}
        rows = table(folder, part)
        some = [(str(a), seed) for a in (phantom if part == "phantom" else images).ANGLES for seed in "01"]
        assert [r["way"] for r in rows] == [*reconstruction.WAYS] * len(some)
        assert [(r["angles"], r["seed"]) for r in rows[:: len(reconstruction.WAYS)]] == some
        lines = (folder / f"{part}.txt").read_text().splitlines()
        begin = lines.index("Log density per pixel, nats")
        cells = lines[begin + 2 + len(some) // 2].replace(" ± ", "±").split()  # 20 angles
        for way, cell in zip(reconstruction.WAYS, cells[2:], strict=True):
            values = [float(r["log_density"]) for r in rows if (r["angles"], r["way"]) == ("20", way)]
            assert cell == f"{statistics.mean(values):.2f}±{statistics.stdev(values) / 2**0.5:.2f}"


def test_a_row_is_that_of_the_network_in_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "ANGLES", (5,))
    monkeypatch.setattr(images, "NOISES", (0.05,))
    run("tomography", "--part", "images", *SMALL, "--seed", "3", "--out", str(tmp_path / "out"))
    folder = tmp_path / "out" / "images-digits-5angles-5noise-seed3"
    result = json.loads((folder / "result.json").read_text())
    (planned,) = EXPERIMENT.read(tmp_path / "out")[0]
    s = planned.settings
    truth = image_of("digits", s["image_size"], 3, study.Work(folder))
    rays = RayTransform(s["image_size"], 5)
    y = rays.forward(truth)
    deviation = 0.05 * y.abs().mean()
    y = y + deviation * torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    assert result["true_noise"] == pytest.approx(deviation.item() ** 2, rel=1e-6)
    dip = LinearisedDIP(UNet(channels=s["channels"]), rays, tv_weight=s["tv_weight"])
    dip.reconstruct(y, n_steps=s["steps"], lr=s["rate"], checkpoint=folder / "checkpoint.pt", progress_bar=False)
    np.testing.assert_allclose(result["reconstruction"], dip.reconstruction.numpy(), atol=1e-4)
    error = (truth - dip.reconstruction).double().flatten()
    for way, at in (("network", "network"), ("linear-tv", "linear")):
        one = result["ways"][way]
        dip.linearise().set_hyperparameters(one["variance"], one["lengthscale"], one["noise"])
        assert one["log_marginal_likelihood"] == pytest.approx(dip.log_marginal_likelihood(at).item(), rel=1e-5)
        c = dip.covariance(image_noise=True)
        density = torch.distributions.MultivariateNormal(torch.zeros(len(error)).double(), c).log_prob(error) / len(
            error
        )
        assert one["log_density"] == pytest.approx(density.item(), rel=1e-3)
        np.testing.assert_allclose(np.array(one["deviation"]).ravel(), c.diagonal().sqrt(), atol=1e-4)
    gain = rays.noise_gain()
    fixed = result["ways"]["fixed"]["log_density"]
    assert fixed == pytest.approx(-0.5 * (error.square().mean().item() / gain + math.log(2 * math.pi * gain)), rel=1e-5)


def test_dropouts_mean_and_covariance_are_of_its_samples(tmp_path, monkeypatch):
    settings = {**reconstruction.settings_of(0.002, 28, 5, 0.1), "seed": 0, "dropout_samples": 400, "steps": 40}
    truth = shepp_logan(8)
    work = study.Work(tmp_path)
    found = reconstruction.measured(truth, settings, work, ["dropout"])["ways"]["dropout"]
    taken = []
    judged = reconstruction._judged
    monkeypatch.setattr(reconstruction, "_judged", lambda *given: taken.append(given) or judged(*given))
    again = reconstruction.measured(truth, settings, study.Work(tmp_path / "other"), ["dropout"])
    assert again["ways"]["dropout"] == found
    ((mean, covariance, _),) = taken
    rays = RayTransform(8, 5)
    y = rays.forward(truth)
    y = y + 0.1 * y.abs().mean() * torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    network = UNet(channels=settings["channels"], dropout=reconstruction.DROPOUT)
    dip = LinearisedDIP(network, rays, tv_weight=settings["tv_weight"])
    dip.reconstruct(
        y, n_steps=40, lr=settings["rate"], checkpoint=tmp_path / reconstruction.DROPOUT_FILE, progress_bar=False
    )
    network.train()
    torch.manual_seed(7)
    with torch.no_grad():
        drawn = network(rays.fbp(y)[None, None].expand(4000, -1, -1, -1))[:, 0].double()
    spread = drawn.var(0)
    assert ((mean - drawn.mean(0)).abs() < 5 * (spread * (1 / 400 + 1 / 4000)).sqrt() + 1e-6).all()
    noise = (rays.forward(mean) - y).square().mean() * rays.noise_gain()
    assert found["noise"] == pytest.approx(noise.item() / rays.noise_gain(), rel=1e-4)
    own = covariance.diagonal().view(8, 8) - noise
    assert (own / spread).median().item() == pytest.approx(1, abs=0.2) and spread.max() > 10 * torch.finfo(
        torch.float32
    ).eps


@pytest.mark.usefixtures("few", "undrawn")
def test_a_killed_session_goes_on_to_the_files_of_one_that_was_not(tmp_path, monkeypatch, capsys):
    options = ["tomography", "--part", "phantom", "--scale", "0.002", "--seed", "0", "--jobs", "1", "--device", "cpu"]
    run(*options, "--out", str(tmp_path / "whole"))
    killed = str(tmp_path / "killed")
    measure = study.Work.kept

    def stop(self, name, measured):
        if name == "simple":
            raise KeyboardInterrupt
        return measure(self, name, measured)

    with monkeypatch.context() as patched:
        patched.setattr(study.Work, "kept", stop)
        assert cli.main(["reproduce", *options, "--out", killed]) == 130
    assert f"go on with: ella-cuda reproduce --resume {killed}" in capsys.readouterr().err
    run("tomography", "--resume", killed)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_the_phantom_has_its_ellipses_values():
    """A square from -1 to 1, y upwards: the skull, the brain, the right and left ventricle, the large tumour, outside."""
    image = shepp_logan(128)
    at = {
        (0.0, 0.9): 1.0,
        (0.5, 0.0): 0.2,
        (0.22, 0.0): 0.0,
        (-0.22, 0.0): 0.0,
        (0.0, 0.5): 0.3,
        (0.9, 0.9): 0.0,
        (0.0, -0.1): 0.3,
        (0.0, 0.12): 0.4,
    }
    at |= {
        (-0.313, 0.285): 0.0,
        (-0.127, -0.285): 0.0,
        (-0.313, -0.285): 0.2,
    }  # the left one leans to the left as it rises
    for (x, y), value in at.items():
        row, column = round((1 - y) * 64 - 0.5), round((1 + x) * 64 - 0.5)
        assert image[row, column].item() == pytest.approx(value, abs=1e-6), (x, y)
    coarse = shepp_logan(32)
    torch.testing.assert_close(coarse, image.view(32, 4, 32, 4).mean((1, 3)), atol=0.06, rtol=0)
    assert coarse.min() >= 0 and coarse.max() <= 1


def test_images_are_test_images_of_all_classes(tmp_path):
    work = study.Work(tmp_path)
    some = [image_of("digits", 28, k, work) for k in range(10)]
    assert all(x.shape == (28, 28) and x.min() >= 0 and 0.8 < x.max() <= 1 for x in some)
    assert len({x.sum().item() for x in some}) == 10
    own = image_of("digits", 8, 0, work)
    assert any(torch.equal(own, x[0]) for x in load("digits").test_images)


def window_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Window by window."""
    values = []
    for i in range(len(a) - 6):
        for j in range(a.shape[1] - 6):
            x, y = a[i : i + 7, j : j + 7].ravel(), b[i : i + 7, j : j + 7].ravel()
            c = np.cov(x, y)
            top = (2 * x.mean() * y.mean() + 1e-4) * (2 * c[0, 1] + 9e-4)
            values.append(top / ((x.mean() ** 2 + y.mean() ** 2 + 1e-4) * (c[0, 0] + c[1, 1] + 9e-4)))
    return float(np.mean(values))


def test_quality_of_an_image():
    truth = shepp_logan(16)
    image = (truth + 0.1 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    mse = float(np.mean((truth.double().numpy() - image.double().numpy()) ** 2))
    assert psnr(image, truth) == pytest.approx(10 * math.log10(1 / mse))
    assert ssim(image, truth) == pytest.approx(window_ssim(image.double().numpy(), truth.double().numpy()), rel=1e-9)
    assert ssim(truth, truth) == pytest.approx(1)


def test_shares_of_errors_are_those_of_normal_ones():
    deviation = torch.rand(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.01
    error = deviation * torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shares = error_shares(error, deviation)
    assert sum(shares["found"]) == pytest.approx(1) and sum(shares["expected"]) == pytest.approx(1)
    np.testing.assert_allclose(shares["found"], shares["expected"], atol=0.005)
    assert inside(error, deviation) == pytest.approx(0.9545, abs=0.003)
    far = error_shares(error * 100, deviation)["found"]
    assert far[-1] > 0.9 and sum(far) == pytest.approx(1)
    one = error_shares(torch.tensor([[0.03]]), torch.tensor([[0.05]]), (0.0, 0.02, 0.04))
    normal = statistics.NormalDist(0, 0.05)
    assert one["found"] == [0, 1, 0]
    assert one["expected"][1] == pytest.approx(2 * (normal.cdf(0.04) - normal.cdf(0.02)), rel=1e-6)


def test_published_sizes_at_full_scale():
    s = reconstruction.settings_of(1, 28, 20, 0.05)
    assert (s["channels"], s["steps"], s["rate"], s["tv_weight"]) == (32, 41_000, 1e-4, 1e-4)
    assert (s["evidence_steps"], s["evidence_rate"], s["dropout_samples"]) == (1500, 0.01, 16_384)
    small = reconstruction.settings_of(0.05, 28, 20, 0.05)
    assert (small["channels"], small["steps"], small["rate"]) == (16, 4100, 1e-3)

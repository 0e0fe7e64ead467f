"""``ella-cuda reproduce tomography``: its parts at the size of a test, from end to end; images, and how they are judged."""

from __future__ import annotations

import json
import math
import statistics
import types

import numpy as np
import pytest
import torch

from ella_cuda.data import load
from ella_cuda.papers import linearised
from ella_cuda.papers.linearised import unet
from ella_cuda.papers.studies import study
from ella_cuda.papers.tomography import EXPERIMENT, drawn, images, phantom, reconstruction, sources
from ella_cuda.papers.tomography.quality import error_shares, inside, psnr, ssim
from ella_cuda.papers.tomography.sources import image_of, shepp_logan
from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet
from python_tests.papers.studies import check_goes_on, run, table

SMALL = ["--data", "digits", "--scale", "0.002", "--jobs", "1", "--device", "cpu"]


@pytest.fixture
def few(monkeypatch):
    """Fewer numbers of angles and noises than people look at."""
    for part, angles in ((images, (20,)), (phantom, (5, 20))):
        monkeypatch.setattr(part, "ANGLES", angles)
        monkeypatch.setattr(part, "NOISES", (0.1,))


@pytest.mark.usefixtures("few")
def test_parts_are_tables_and_pictures(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    with monkeypatch.context() as patched:  # pictures are drawn once, not after each study
        patched.setattr("ella_cuda.papers.studies.experiment.add_picture", lambda *_: None)
        run("tomography", *SMALL, "--seed", "0", "1", "--out", str(folder))
    assert "6 networks on cpu, 1 at once, 0 done before" in capsys.readouterr().out
    run("--resume", str(folder))
    printed = capsys.readouterr().out
    assert "6 done before" in printed
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


def test_ways_are_what_their_names_say(tmp_path, monkeypatch):
    """Form, place and hyperprior of each, with the settings' steps; each starts anew, at the reconstruction."""
    settings = {**reconstruction.settings_of(0.002, 28, 5, 0.1), "seed": 0, "linear_steps": 7}
    taken, optimize = [], LinearisedDIP.optimize_hyperparameters

    def optimized(self, n_steps, lr, **given):
        begun = set(self.hyperparameters.variance.values()) == {1.0}
        taken.append(
            (self._image.tangent.form, given["at"], given["tv_prior"], n_steps, lr, given["linear_steps"], begun)
        )
        return optimize(self, n_steps, lr, **given)

    monkeypatch.setattr(LinearisedDIP, "optimize_hyperparameters", optimized)
    ways = [way for way in reconstruction.WAYS if way not in ("dropout", "fixed")]
    found = reconstruction.measured(shepp_logan(8), settings, study.Work(tmp_path), ways)["ways"]
    places = [
        ("full", "network", 0),
        ("full", "network", 1),
        ("full", "linear", 0),
        ("full", "linear", 1),
        ("simple", "linear_tv", 0),
    ]
    assert ways == ["network", "network-tv", "linear", "linear-tv", "simple"] == list(found)
    steps = settings["evidence_steps"], settings["evidence_rate"], 7, True
    assert taken == [(*place, *steps) for place in places]
    assert len({one["log_density"] for one in found.values()}) == 5


def made(k, ways=tuple(reconstruction.WAYS)):
    """A study's result, whose numbers follow from k; dropout has quality of its own."""
    of = {way: {"log_density": k - 0.125 * i, "inside": 0.5, "noise": 0.25} for i, way in enumerate(ways)}
    errors = {"found": [k, 1 - k], "expected": [0.5, 0.5]}
    for one in of.values():
        one |= {"errors": errors, "deviation": [[0.25]], "variance": {"inc": 2.0}, "lengthscale": {"inc": 3.0}}
    if "dropout" in of:
        of["dropout"] |= {"psnr": 13.0, "ssim": 0.75}
    images = {"truth": [[k]], "fbp": [[0.5]], "reconstruction": [[0.0]]}
    fbp, own = {"psnr": 11.0, "ssim": 0.25}, {"psnr": 12.0, "ssim": 0.5}
    return {"parameters": 7, "true_noise": 1.0, "quality": own, "quality_fbp": fbp, "ways": of, **images}


def planned(seed, angles, noise=0.05, data="digits"):
    settings = {**reconstruction.settings_of(0.002, 28, angles, noise), "seed": seed, "data": data}
    return study.Study("images", f"{data} {angles} {noise} {seed}", settings)


def test_columns_and_sentences_of_the_tables():
    ways = reconstruction.WAYS
    results = [made(1.0), made(3.0)]
    results[1]["ways"]["linear"]["log_density"] = 3.5
    rows = [row for seed in (0, 1) for row in images.PART.rows(planned(seed, 5), results[seed])]
    assert [r["psnr"] for r in rows[:7]] == [12, 12, 12, 12, 12, 13, 12]
    assert rows[0]["variance inc"] == 2 and rows[0]["lengthscale inc"] == 3
    lines = images.PART.text(rows).splitlines()

    def cells(title):
        return lines[lines.index(title) + 3].replace(" ± ", "±").split()

    (quality,) = [line for line in lines if line.startswith("Quality: digits, 10 x 10 pixels")]
    assert quality.endswith("7 parameters; mean ± standard error over seeds 0, 1")
    head = "5% 5 11.0±0.0 12.0±0.0 13.0±0.0 0.25±0.00 0.50±0.00 0.75±0.00"
    assert cells(quality) == head.split()
    densities = [2 - 0.125 * i for i in range(7)]
    densities[2] = 2.125
    errors = ["1.00"] * 7
    errors[2] = "1.38"
    assert cells("Log density per pixel, nats")[2:] == [f"{d:.2f}±{e}" for d, e in zip(densities, errors, strict=True)]
    assert cells("Pixels within two deviations, %; 95 where errors are as predicted")[2:] == ["50±0"] * 7
    order = next(line for line in lines if line.startswith("In order"))
    best = sorted(zip(densities, ways.values(), strict=True), reverse=True)
    assert order.endswith(" > ".join(f"{name} ({d:.2f})" for d, name in best) + ".")
    assert (
        "linear mode above network's weights in 1 of 2 studies; linear loss, simple above network's weights in 0 "
        in (images.PART.text(rows))
    )


def test_pictures_are_of_the_first_seed_and_the_means(monkeypatch):
    taken = {}
    for name in ("reconstructions", "errors"):
        monkeypatch.setattr(drawn, f"draw_{name}", lambda *given, name=name: taken.update({name: given}))
    cases = [(1, 20, 0.1), (0, 20, 0.1), (0, 5, 0.1), (0, 20, 0.05), (1, 5, 0.1)]
    found = [(planned(*case), made(k / 8)) for k, case in enumerate(cases)]
    found.append((planned(0, 10, 0.05, "fashion-mnist"), made(0.5)))
    drawn.drawn_images(found)
    lines, title = taken["reconstructions"]
    assert title == "digits, seed 0"
    assert list(lines) == ["20 angles,\n5% noise", "5 angles,\n10% noise", "20 angles,\n10% noise"]
    assert [images["truth"] for images, _ in lines.values()] == [[[3 / 8]], [[2 / 8]], [[1 / 8]]]
    errors = next(iter(lines.values()))[1]
    assert errors["|error|"] == [[3 / 8]] and list(errors)[1:] == [reconstruction.WAYS[way] for way in drawn.SHOWN]
    drawn.drawn_errors(found)
    shares, _ = taken["errors"]
    mean = (0 + 1 + 2 + 3 + 4 + 4) / 8 / 6
    assert list(shares) == list(reconstruction.WAYS.values())
    assert shares["MC dropout"] == {"found": pytest.approx([mean, 1 - mean]), "expected": [0.5, 0.5]}


@pytest.mark.usefixtures("undrawn")
def test_the_talks_column_is_nll_beside_its_numbers(tmp_path, capsys):
    folder = tmp_path / "out"
    args = ["--data", "digits", "--scale", "0.01", "--seed", "0", "1", "--jobs", "1", "--device", "cpu"]
    run("linearised", "--part", "unet", *args, "--out", str(folder))
    assert (folder / "unet.txt").read_text().strip() in capsys.readouterr().out
    rows, text = table(folder, "unet"), (folder / "unet.txt").read_text()
    assert [r["way"] for r in rows] == ["network", "linear", "simple"] * 2
    assert [r["talk_nll"] for r in rows[:3]] == ["-1.703", "", "-2.24"]
    assert all(float(r["nll"]) == -float(r["log_density"]) for r in rows)
    assert {(r["angles"], r["noise"], r["steps"]) for r in rows} == {("20", "0.05", "41")}
    means = []
    for way, name in unet.WAYS.items():
        values = [float(r["nll"]) for r in rows if r["way"] == way]
        means.append(statistics.mean(values))
        (line,) = [line for line in text.splitlines() if line.startswith(name) and "±" in line]
        assert f"{means[-1]:.3f} ± {statistics.stdev(values) / 2**0.5:.3f}" in line
        assert ("-1.703 ± 0.023" in line) == (way == "network") and ("-2.240 ± 0.027" in line) == (way == "simple")
    kept = ["yes" if m <= means[0] else "no" for m in means[1:]]
    assert f"No worse than the network's weights: linear mode: {kept[0]}, linear loss, simple form: {kept[1]}." in text
    done = [(s, study.read_result(folder / s.name, s)) for s in linearised.EXPERIMENT.read(folder)[0]]
    assert [axis.get_title() for axis in unet.draw(done).axes if axis.get_visible()] == ["digits"]


@pytest.mark.usefixtures("few", "undrawn")
def test_a_killed_session_goes_on_to_the_files_of_one_that_was_not(tmp_path, capsys):
    options = ["tomography", "--part", "phantom", "--scale", "0.002", "--seed", "0", "--jobs", "1", "--device", "cpu"]
    check_goes_on(options, tmp_path, [(study.Work, "kept", lambda _, name, measured: name == "simple")], capsys)


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


def test_colours_are_made_grey(tmp_path, monkeypatch):
    colours = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = types.SimpleNamespace(test_images=colours, test_labels=torch.arange(4), test_ids=torch.arange(4))
    monkeypatch.setattr(sources, "load", lambda *_: found)
    some = [image_of("cifar10", 8, k, study.Work(tmp_path)) for k in range(4)]
    assert sorted(x.sum().item() for x in some) == pytest.approx(sorted(colours.mean(1).sum((1, 2)).tolist()))
    assert torch.equal(image_of("cifar10", 8, 5, study.Work(tmp_path)), some[1])  # there are no more


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
    some = [reconstruction.settings_of(1, 28, angles, noise) for noise in (0.05, 0.1) for angles in (5, 10, 20, 30)]
    assert [s["steps"] for s in some] == [14_000, 29_000, 41_000, 50_000, 7400, 13_000, 17_000, 22_000]
    assert [s["tv_weight"] for s in some] == [1e-5, 3e-5, 1e-4, 1e-4, 3e-5, 1e-4, 3e-4, 3e-4]
    assert reconstruction.DROPOUT == 0.05 and sum(p.numel() for p in UNet(channels=32).parameters()) == 76_905
    small = reconstruction.settings_of(0.05, 28, 20, 0.05)
    assert (small["channels"], small["steps"], small["rate"]) == (16, 4100, 1e-3)

"""One image from few angles: its reconstruction, and error bars in several ways; of all parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda.modes import evaluation_mode
from ella_cuda.papers.invariances.sizes import LARGE, of_small
from ella_cuda.papers.studies import Study, Work, share
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.papers.tomography.quality import error_shares, inside, psnr, ssim
from ella_cuda.run_folder import CHECKPOINT_FILE
from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet

ANGLES, NOISES = (5, 10, 20, 30), (0.05, 0.1)
STEPS = {  # of the network, published
    (5, 0.05): 14_000, (10, 0.05): 29_000, (20, 0.05): 41_000, (30, 0.05): 50_000,
    (5, 0.1): 7400, (10, 0.1): 13_000, (20, 0.1): 17_000, (30, 0.1): 22_000,
}  # fmt: skip
TV_WEIGHTS = {  # published
    (5, 0.05): 1e-5, (10, 0.05): 3e-5, (20, 0.05): 1e-4, (30, 0.05): 1e-4,
    (5, 0.1): 3e-5, (10, 0.1): 1e-4, (20, 0.1): 3e-4, (30, 0.1): 3e-4,
}  # fmt: skip
CHANNELS, SMALL_CHANNELS = 32, 16
RATE, SMALL_RATE = 1e-4, 1e-3  # of the network; the second with a tenth of the steps
FEWER = 10
EVIDENCE_STEPS, SMALL_EVIDENCE_STEPS = 1500, 500
EVIDENCE_RATE, SMALL_EVIDENCE_RATE = 0.01, 0.03
LINEAR_STEPS = 1000  # of the linear weights
DROPOUT, DROPOUT_SAMPLES, SMALL_DROPOUT_SAMPLES, DROPOUT_BATCH = 0.05, 16_384, 4096, 256
MEMORY = 8 << 30
DROPOUT_FILE = "dropout.pt"
EVIDENCE = {  # form of the linear model, where its evidence is taken, and TV-PredCP's scale
    "network": ("full", "network", 0.0),
    "network-tv": ("full", "network", 1.0),
    "linear": ("full", "linear", 0.0),
    "linear-tv": ("full", "linear", 1.0),
    "simple": ("simple", "linear_tv", 0.0),
}
WAYS = {  # in tables and pictures
    "network": "network's weights",
    "network-tv": "network's weights, TV",
    "linear": "linear mode",
    "linear-tv": "linear mode, TV",
    "simple": "linear loss, simple",
    "dropout": "MC dropout",
    "fixed": "noise 1",
}
DIGITS = 4  # of a pixel, in files


def settings_of(scale: float, size: int, angles: int, noise: float) -> dict[str, Any]:
    """What a study of an image with sides of ``size`` pixels at full scale is done with."""
    large = scale >= LARGE
    steps = STEPS[angles, noise]
    return {
        "image_size": size if large else of_small(scale, size, 10),
        "angles": angles,
        "noise": noise,
        "channels": CHANNELS if large else of_small(scale, SMALL_CHANNELS, 2),
        "steps": share(scale, steps, 1) if large else of_small(scale, steps // FEWER, 20),
        "rate": RATE if large else SMALL_RATE,
        "tv_weight": TV_WEIGHTS[angles, noise],
        "evidence_steps": EVIDENCE_STEPS if large else of_small(scale, SMALL_EVIDENCE_STEPS, 5),
        "evidence_rate": EVIDENCE_RATE if large else SMALL_EVIDENCE_RATE,
        "linear_steps": LINEAR_STEPS if large else of_small(scale, LINEAR_STEPS, 5),
        "dropout_samples": DROPOUT_SAMPLES if large else of_small(scale, SMALL_DROPOUT_SAMPLES, 8),
    }


def measured(truth: Tensor, settings: Mapping[str, Any], work: Work, ways: Iterable[str] = WAYS) -> dict[str, Any]:
    """Reconstruct an image ``(H, W)`` from noisy measurements, and predict the error in each way.

    Noise has the deviation of ``noise`` times the mean absolute measurement.
    """
    s, truth = settings, truth.to(work.device)
    rays = RayTransform(tuple(truth.shape), s["angles"])
    y = rays.forward(truth)
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(s["seed"]))
    deviation = s["noise"] * y.abs().mean()
    y = y + deviation * drawn.to(y)
    dip = _reconstructed(rays, y, s, work, CHECKPOINT_FILE, 0.0)

    def found(way: str) -> dict[str, Any]:
        if way == "dropout":
            return _by_dropout(rays, y, truth, s, work)
        if way == "fixed":
            return _judged(dip.reconstruction, torch.eye(truth.numel()).to(y).double() * rays.noise_gain(), truth)
        dip.form, at, tv_prior = EVIDENCE[way]
        dip.linearise()
        dip.optimize_hyperparameters(
            s["evidence_steps"],
            s["evidence_rate"],
            at=at,
            tv_prior=tv_prior,
            linear_steps=s["linear_steps"],
            progress_bar=work.progress,
        )
        learned = dip.hyperparameters
        judged = _judged(dip.reconstruction, dip.covariance(image_noise=True), truth)
        return judged | {
            "log_marginal_likelihood": float(dip.log_marginal_likelihood(at)),
            **{key: getattr(learned, key) for key in learned._fields},
        }

    fbp = rays.fbp(y)
    return {
        "parameters": sum(p.numel() for p in dip.network.parameters()),
        "true_noise": float(deviation**2),
        "truth": _rounded(truth),
        "fbp": _rounded(fbp),
        "reconstruction": _rounded(dip.reconstruction),
        "quality": {"psnr": psnr(dip.reconstruction, truth), "ssim": ssim(dip.reconstruction, truth)},
        "quality_fbp": {"psnr": psnr(fbp, truth), "ssim": ssim(fbp, truth)},
        "ways": {way: work.kept(way, lambda way=way: found(way)) for way in ways},
    }


def _reconstructed(
    rays: RayTransform, y: Tensor, s: Mapping[str, Any], work: Work, file: str, dropout: float
) -> LinearisedDIP:
    torch.manual_seed(s["seed"])
    network = UNet(channels=s["channels"], dropout=dropout).to(work.device)
    dip = LinearisedDIP(network, rays, tv_weight=s["tv_weight"], method="dense", memory_budget=MEMORY)
    dip.reconstruct(y, n_steps=s["steps"], lr=s["rate"], checkpoint=work.folder / file, progress_bar=work.progress)
    return dip


def _by_dropout(rays: RayTransform, y: Tensor, truth: Tensor, s: Mapping[str, Any], work: Work) -> dict[str, Any]:
    """The mean and the covariance of what a network with dropout makes, and noise of the size of its residuals."""
    dip = _reconstructed(rays, y, s, work, DROPOUT_FILE, DROPOUT)
    x, network, samples = rays.fbp(y)[None, None], dip.network, []
    torch.manual_seed(s["seed"])
    with torch.no_grad(), evaluation_mode(network):  # which puts back the mode
        network.train()
        for begin in range(0, s["dropout_samples"], DROPOUT_BATCH):
            count = min(DROPOUT_BATCH, s["dropout_samples"] - begin)
            samples.append(network(x.expand(count, -1, -1, -1))[:, 0].double())
    drawn = torch.cat(samples)
    mean = drawn.mean(0)
    noise = (rays.forward(mean) - y).square().mean()
    covariance = torch.cov(drawn.flatten(1).T)
    covariance.diagonal().add_(noise * rays.noise_gain())
    judged = _judged(mean, covariance, truth)
    return judged | {"noise": float(noise), "psnr": psnr(mean, truth), "ssim": ssim(mean, truth)}


def _judged(mean: Tensor, covariance: Tensor, truth: Tensor) -> dict[str, Any]:
    """How a Gaussian image ``(H, W)`` with a covariance ``(H*W, H*W)`` predicts the true one."""
    error = truth.double() - mean.double()
    deviation = covariance.diagonal().sqrt().view(truth.shape)
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(error).flatten(), covariance)
    return {
        "log_density": float(normal.log_prob(error.flatten())) / truth.numel(),
        "inside": inside(error, deviation),
        "deviation": _rounded(deviation),
        "errors": error_shares(error.cpu(), deviation.cpu()),
    }


def _rounded(image: Tensor) -> list[list[float]]:
    return image.double().mul(10**DIGITS).round().div(10**DIGITS).tolist()


# tables --------------------------------------------------------------------------------------------------------------


def rows(study: Study, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    settings = study.settings
    keys = ("data", "seed", "image_size", "angles", "noise", "channels", "steps", "evidence_steps", "dropout_samples")
    common = {key: settings[key] for key in keys if key in settings} | {"parameters": result["parameters"]}
    made = []
    for way, one in result["ways"].items():
        row = {**common, "way": way, "log_density": one["log_density"], "inside": one["inside"]}
        row |= {key: one.get(key, result["quality"][key]) for key in ("psnr", "ssim")}
        row |= {f"{key}_fbp": value for key, value in result["quality_fbp"].items()}
        row |= {"true_noise": result["true_noise"], "learned_noise": one.get("noise")}
        row |= {"log_marginal_likelihood": one.get("log_marginal_likelihood")}
        for name in ("variance", "lengthscale"):
            row |= {f"{name} {block}": value for block, value in one.get(name, {}).items()}
        made.append(row)
    return made


def text(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """For people: tables of quality and of densities for each kind of image, and the ways in order."""
    blocks = [title]
    for data in dict.fromkeys(r.get("data") for r in rows):
        blocks += _tables(data, [r for r in rows if r.get("data") == data])
    blocks.append(
        "Densities: mean log density of the true image under the predicted Gaussian, whole covariance, in nats per pixel; higher is better. "
        "Every covariance has noise in the image on its diagonal. The evidence chooses variances, lengthscales and noise of the linearised "
        "network: at the network's weights; at the linear model's mode, which is exact; at weights of least error and total variation in the "
        "simple form of the linear model (linear loss, simple), as in the authors' code. TV: with TV-PredCP. MC dropout has its own mean. "
        "A seed has noise, a network and, of a data set, an image of its own. "
        "Noise 1: no linearised network, and measurements with noise of variance 1."
    )
    return "\n\n".join(blocks)


def _tables(data: str | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    one, seeds = rows[0], sorted({r["seed"] for r in rows})
    ways = [way for way in WAYS if any(r["way"] == way for r in rows)]
    cases = sorted({(r["noise"], r["angles"]) for r in rows})
    said = (
        f"{data or 'Shepp-Logan'}, {one['image_size']} x {one['image_size']} pixels, {one['channels']} channels, {one['parameters']:,} "
        f"parameters; {seeds_said(seeds)}"
    )

    def values(case: tuple[float, int], way: str, key: str) -> list[float]:
        return [r[key] for r in rows if (r["noise"], r["angles"], r["way"]) == (*case, way)]

    def names(case: tuple[float, int]) -> list[str]:
        return [f"{case[0]:.0%}", str(case[1])]

    quality, density, within = [], [], []
    for case in cases:
        cells = [values(case, ways[0], key) for key in ("psnr_fbp", "psnr", "ssim_fbp", "ssim")]
        dropout = [values(case, "dropout", key) for key in ("psnr", "ssim")] if "dropout" in ways else [[], []]
        styles = ("{:.1f}", "{:.1f}", "{:.1f}", "{:.2f}", "{:.2f}", "{:.2f}")
        ordered = (cells[0], cells[1], dropout[0], cells[2], cells[3], dropout[1])
        quality.append([*names(case), *(with_error(v, style) for v, style in zip(ordered, styles, strict=True))])
        density.append([*names(case), *(with_error(values(case, way, "log_density"), "{:.2f}") for way in ways)])
        within.append(
            [*names(case), *(with_error([100 * v for v in values(case, way, "inside")], "{:.0f}") for way in ways)]
        )
    head = [WAYS[way] for way in ways]
    of = ["PSNR, FBP", "DIP", "with dropout", "SSIM, FBP", "DIP", "with dropout"]
    means = {
        way: sum(found) / len(found) for way in ways if (found := [r["log_density"] for r in rows if r["way"] == way])
    }
    ranked = sorted(means, key=lambda way: -means[way])
    order = " > ".join(f"{WAYS[way]} ({means[way]:.2f})" for way in ranked)
    return [
        table(f"Quality: {said}", ["noise", "angles", *of], quality, [], left=0).rstrip(),
        table("Log density per pixel, nats", ["noise", "angles", *head], density, [], left=0).rstrip(),
        table(
            "Pixels within two deviations, %; 95 where errors are as predicted",
            ["noise", "angles", *head],
            within,
            [],
            left=0,
        ).rstrip(),
        f"In order, of the mean over all: {order}.\n" + _compared(rows),
    ]


def _compared(rows: Sequence[Mapping[str, Any]]) -> str:
    """In how many studies a way is above another."""
    by = {}
    for r in rows:
        by.setdefault((r["noise"], r["angles"], r["seed"]), {})[r["way"]] = r["log_density"]
    said = []
    for way, other in (("linear", "network"), ("simple", "network"), ("network", "dropout"), ("simple", "dropout")):
        both = [one for one in by.values() if {way, other} <= one.keys()]
        if both:
            above = sum(one[way] > one[other] for one in both)
            said.append(f"{WAYS[way]} above {WAYS[other]} in {above} of {len(both)} studies")
    return "; ".join(said) + "." if said else ""

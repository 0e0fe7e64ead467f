"""The linearised deep image prior against Gaussian conditioning, regression and evidence by dense matrices of other origin."""

from __future__ import annotations

import copy
import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

from ella_cuda.tomography import LinearisedDIP, RayTransform, UNet, total_variation_gaussian
from ella_cuda.tomography.evidence import DenseMeasured
from python_tests.tomography.small import (
    EXACT,
    SIDE,
    drawn,
    fitted,
    jacobian,
    projection,
    set_apart,
    weight_covariance,
    weights_of,
)

WAYS = ({"method": "dense"}, {"method": "iterative", **EXACT})
QUIET = {"progress_bar": False}
FEW, MANY = 4, 8  # angles: 28 and 56 measurements of 36 pixels


@pytest.fixture(scope="module", params=[FEW, MANY], ids=["fewer data than pixels", "more data than pixels"])
def dense(request):
    dip = fitted(request.param, method="dense")
    set_apart(dip)
    return dip


@pytest.fixture(scope="module", params=WAYS, ids=["dense", "iterative"])
def either(request):
    dip = fitted(**request.param)
    set_apart(dip)
    return dip


def given_measurements(dip):
    """The image's covariance, by conditioning the joint Gaussian of image and measurements."""
    j, a, s = jacobian(dip), projection(dip), weight_covariance(dip)
    image = j @ s @ j.T
    joint = torch.cat(
        [
            torch.cat([image, image @ a.T], 1),
            torch.cat([a @ image, a @ image @ a.T + dip.hyperparameters.noise * torch.eye(len(a), dtype=a.dtype)], 1),
        ]
    )
    d = len(image)
    gain = torch.linalg.solve(joint[d:, d:], joint[d:, :d]).T
    return joint[:d, :d] - gain @ joint[d:, :d]


def test_covariance_is_that_of_joint_gaussian_conditioning(dense):
    expected = given_measurements(dense)
    torch.testing.assert_close(dense.covariance(), expected, rtol=0, atol=1e-11 * expected.abs().max().item())
    # In weight space, where no covariance of measurements is.
    j, a, s = jacobian(dense), projection(dense), weight_covariance(dense)
    precision = j.T @ a.T @ a @ j / dense.hyperparameters.noise + torch.linalg.inv(s)
    torch.testing.assert_close(dense.covariance(), j @ torch.linalg.solve(precision, j.T), rtol=1e-8, atol=1e-10)
    assert torch.equal(dense.variance().flatten(), dense.covariance().diagonal())


def test_the_sum_of_33_terms_is_the_direct_product(dense):
    j, a, s = jacobian(dense), projection(dense), weight_covariance(dense)
    measured, noise = dense._measured, dense._raw["log_noise"].exp()
    weights = dense._weights(dense._raw)
    assert isinstance(measured, DenseMeasured) and len(weights) == 3 * 6 + 2
    found = (weights @ measured.terms.flatten(1)).view(measured.terms.shape[1:])
    if measured.basis is not None:
        found = measured.basis @ found @ measured.basis.T
    direct = a @ j @ s @ j.T @ a.T
    torch.testing.assert_close(found, direct, rtol=0, atol=1e-13 * direct.abs().max().item())
    k = direct + noise * torch.eye(len(a), dtype=a.dtype)
    torch.testing.assert_close(measured.log_determinant(weights, noise), torch.logdet(k))
    r = drawn(3, len(a))
    torch.testing.assert_close(measured.solve(weights, noise, r), torch.linalg.solve(k, r.T).T)
    torch.testing.assert_close(measured.smoothed(weights, r).flatten(1), r @ a @ j @ s @ j.T)


def evidence(dip, raw, at, form="full"):
    """Of the measurements, differentiable in the hyperparameters."""
    j, a, s = jacobian(dip), projection(dip), weight_covariance(dip, raw)
    noise = raw["log_noise"].exp()
    k = a @ j @ s @ j.T @ a.T + noise * torch.eye(len(a), dtype=a.dtype)
    y, w, image = dip._y.flatten(), weights_of(dip), dip.reconstruction.flatten()
    if at == "linear":
        offset = image - j @ w if form == "full" else torch.zeros_like(image)
        return MultivariateNormal(a @ offset, k).log_prob(y)
    w = dip.theta if at == "linear_tv" else w
    fit = (y - a @ image).square().sum() / noise + w @ torch.linalg.solve(s, w)
    return -0.5 * (fit + torch.logdet(k) + len(y) * math.log(2 * math.pi))


@pytest.mark.parametrize("at", ["network", "linear", "linear_tv"])
def test_evidence_and_its_gradient_are_those_of_dense_autograd(dense, at):
    raw = {key: value.clone().requires_grad_() for key, value in dense._raw.items()}
    before = dense.theta
    if at == "linear_tv":
        dense.theta = weights_of(dense) + 0.1 * drawn(dense.prior.n_params)
    try:
        value = evidence(dense, raw, at)
        expected = torch.autograd.grad(value, list(raw.values()))
        moments = None if at == "linear" else dense.prior.moments(dense.theta)
        found = dense._objective(raw, moments, 0.0, None)
        assert found.item() == pytest.approx(value.item(), rel=1e-10)
        assert dense.log_marginal_likelihood(at).item() == pytest.approx(value.item(), rel=1e-10)
        slopes = torch.autograd.grad(found, list(raw.values()))
    finally:
        dense.theta = before
    torch.testing.assert_close(slopes, expected, rtol=1e-7, atol=1e-9)


def test_the_linear_mode_is_that_of_ridge_regression(either):
    j, a, s = jacobian(either), projection(either), weight_covariance(either)
    noise, w = either.hyperparameters.noise, weights_of(either)
    features, y = a @ j, either._y.flatten() - a @ (either.reconstruction.flatten() - j @ w)
    expected = torch.linalg.solve(features.T @ features / noise + torch.linalg.inv(s), features.T @ y / noise)
    torch.testing.assert_close(either.linear_mode(), expected, rtol=1e-6, atol=1e-9)
    # The evidence at the mode has the residual and the norm there.
    if either.is_dense:
        fit = (y - features @ expected).square().sum() / noise + expected @ torch.linalg.solve(s, expected)
        k = features @ s @ features.T + noise * torch.eye(len(a), dtype=a.dtype)
        value = -0.5 * (fit + torch.logdet(k) + len(y) * math.log(2 * math.pi))
        assert either.log_marginal_likelihood("linear").item() == pytest.approx(value.item(), rel=1e-10)


def test_the_simple_form_has_no_offset():
    dip = fitted(form="simple", method="dense")
    set_apart(dip)
    value = evidence(dip, dip._raw, "linear", "simple").item()
    assert dip.log_marginal_likelihood("linear").item() == pytest.approx(value, rel=1e-10)
    assert value != pytest.approx(evidence(dip, dip._raw, "linear").item(), rel=1e-3)


def tv_prior(dip, raw, strength):
    """TV-PredCP by block covariances of the image."""
    j, total, place = jacobian(dip), 0.0, 0
    for i, block in enumerate(dip.prior.blocks):
        if block.n_taps == 1:
            continue
        s = weight_covariance(dip, raw, only=i)
        kappa = total_variation_gaussian(dip.reconstruction, j @ s @ j.T)
        (slope,) = torch.autograd.grad(kappa, raw["log_lengthscale"], create_graph=True)
        total = total - strength * kappa + slope[place].abs().log()
        place += 1
    return total


def test_the_hyperprior_is_expected_total_variation_of_each_block(dense):
    raw = {key: value.clone().requires_grad_() for key, value in dense._raw.items()}
    names = ["log_variance", "log_lengthscale"]
    expected = tv_prior(dense, raw, 2.0 * dense._y.numel() * dense.tv_weight)
    terms = dense._measured.difference_terms()
    moments = dense.prior.moments(dense.theta)
    found = dense._objective(raw, moments, 2.0, terms) - dense._objective(raw, moments, 0.0, None)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    slopes = torch.autograd.grad(expected, [raw[n] for n in names])
    torch.testing.assert_close(torch.autograd.grad(found, [raw[n] for n in names]), slopes, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("at", "scale"), [("network", 0.0), ("linear", 0.0), ("network", 1.0)])
def test_optimised_hyperparameters_are_stationary(at, scale):
    dip = fitted(method="dense")
    values = dip.optimize_hyperparameters(600, lr=0.03, at=at, tv_prior=scale, **QUIET)
    assert values[-1] > values[0]
    raw = {key: value.clone().requires_grad_() for key, value in dip._raw.items()}
    objective = evidence(dip, raw, at)
    if scale:
        objective = objective + tv_prior(dip, raw, dip._y.numel() * dip.tv_weight)
    slopes = dict(zip(raw, torch.autograd.grad(objective, list(raw.values())), strict=True))
    free = dip._raw["log_variance"] > -6.8
    assert slopes["log_noise"].abs() < 0.05 and slopes["log_variance"][free].abs().max() < 0.05
    if at == "linear":
        torch.testing.assert_close(dip.theta, dip.linear_mode())
    else:
        assert torch.equal(dip.theta, weights_of(dip))


def test_variances_do_not_fall_below_their_bound():
    dip = fitted(method="dense")
    dip.set_hyperparameters(1e-4)
    dip.optimize_hyperparameters(1, **QUIET)
    assert list(dip.hyperparameters.variance.values()) == pytest.approx([math.exp(-6.9)] * len(dip.prior.blocks))


@pytest.mark.parametrize("form", ["full", "simple"])
def test_weights_of_the_papers_code_are_adams_on_the_linear_models_loss(form):
    dip = fitted(method="dense", form=form)
    j, a, w = jacobian(dip), projection(dip), weights_of(dip)
    theta = (w.clone() if form == "full" else torch.zeros_like(w)).requires_grad_()
    offset = dip.reconstruction.flatten() - j @ w if form == "full" else 0.0
    optimizer, best = torch.optim.Adam([theta], lr=0.3, weight_decay=1e-6), (math.inf, None)
    for _ in range(8):
        image = (offset + j @ theta).view(SIDE, SIDE)
        loss = (a @ image.flatten() - dip._y.flatten()).square().mean()
        loss = loss + dip.tv_weight * (image.diff(dim=0).abs().sum() + image.diff(dim=1).abs().sum())
        if loss.item() < best[0]:
            best = loss.item(), theta.detach().clone()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert best[0] < 0.9 * loss.item()  # it jumps about
    dip.optimize_hyperparameters(1, at="linear_tv", linear_steps=8, linear_lr=0.3, **QUIET)
    torch.testing.assert_close(dip.theta, best[1], rtol=1e-7, atol=1e-9)


def test_weights_of_the_papers_code_go_on_where_they_were_interrupted(tmp_path, monkeypatch):
    options = {"at": "linear_tv", "linear_lr": 0.3, "checkpoint_every": 3, **QUIET}
    whole, killed, again, last = (fitted(method="dense") for _ in range(4))
    whole.optimize_hyperparameters(2, linear_steps=8, **options)
    path, taken = tmp_path / "evidence.pt", []

    def counted(dip, most):
        push_pull = dip._image.tangent.push_pull

        def step(*args):
            if len(taken) == most:
                raise KeyboardInterrupt
            taken.append(None)
            return push_pull(*args)

        monkeypatch.setattr(dip._image.tangent, "push_pull", step)

    counted(killed, 5)
    with pytest.raises(KeyboardInterrupt):
        killed.optimize_hyperparameters(2, linear_steps=8, checkpoint=path, **options)
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == ["evidence.pt.linear"]
    taken.clear()
    counted(again, 5)  # from the third step on
    again.optimize_hyperparameters(2, linear_steps=8, checkpoint=path, **options)
    assert len(taken) == 5 and torch.equal(again.theta, whole.theta)
    assert again.hyperparameters == whole.hyperparameters
    counted(last, 5)
    last.optimize_hyperparameters(4, linear_steps=8, checkpoint=path, **options)
    assert len(taken) == 5 and torch.equal(last.theta, whole.theta)
    with pytest.raises(ValueError, match="of another run: linear"):
        last.optimize_hyperparameters(4, linear_steps=8, checkpoint=path, **{**options, "linear_lr": 0.2})


def test_linearising_anew_has_one_set_of_matrices_at_a_time(monkeypatch):
    dip, found = fitted(method="dense"), []
    before, make = weakref.ref(dip._measured), DenseMeasured.__init__
    monkeypatch.setattr(DenseMeasured, "__init__", lambda self, *given: (found.append(before()), make(self, *given))[1])
    dip.linearise()
    assert found == [None] and dip.is_dense


def test_samples_have_the_posterior_covariance_and_the_reconstruction_as_mean(dense):
    count, expected = 40_000, dense.covariance()
    samples = dense.sample(count, torch.Generator().manual_seed(2)).flatten(1) - dense.reconstruction.flatten()
    assert samples.shape == (count, SIDE * SIDE)
    diagonal = expected.diagonal()
    spread = ((diagonal[:, None] * diagonal + expected.square()) / count).sqrt()
    assert ((samples.T @ samples / count - expected) / spread).abs().max() < 5
    assert (samples.mean(0) / (diagonal / count).sqrt()).abs().max() < 4.5
    again = dense.sample(2, torch.Generator().manual_seed(2))
    assert torch.equal(again, dense.sample(2, torch.Generator().manual_seed(2)))


class Pixels(nn.Module):
    """A network whose weights are the image: its Jacobian is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, SIDE * SIDE, 1).double()

    def forward(self, x):
        return self.conv(torch.ones_like(x[..., :1, :1])).view(1, 1, SIDE, SIDE)


def test_an_identity_network_is_gaussian_process_regression():
    """White noise as prior; and the patches of a fixed image, weighted by one filter."""
    pixels = fitted(network=Pixels(), method="dense")
    pixels.set_hyperparameters(0.7, noise=0.03)
    filtered = fitted(network=nn.Conv2d(1, 1, 3, padding=1).double(), method="dense")
    filtered.set_hyperparameters(0.7, 1.3, 0.03)
    patches = torch.nn.functional.unfold(filtered._x, 3, padding=1)[0].T
    places = [(r, c) for r in range(3) for c in range(3)]
    taps = torch.tensor([[math.exp(-math.dist(a, b) / 1.3) + 1e-6 * (a == b) for b in places] for a in places])
    kernels = {
        pixels: 0.7 * torch.eye(SIDE * SIDE, dtype=torch.float64),
        filtered: 0.7 * patches @ taps.double() @ patches.T,
    }
    for dip, k in kernels.items():
        a = projection(dip)
        noisy = a @ k @ a.T + 0.03 * torch.eye(len(a), dtype=torch.float64)
        torch.testing.assert_close(
            dip.covariance(), k - k @ a.T @ torch.linalg.solve(noisy, a @ k), atol=1e-6, rtol=1e-6
        )
        # Biases are held: without them the linear model's mean is that of the regression.
        bias = next(p for n, p in dip.network.named_parameters() if n.endswith("bias")).detach()
        offset = bias if len(bias) > 1 else bias.expand(SIDE * SIDE)
        mean = dip.prior.split(dip.linear_mode())[0].flatten() if dip is pixels else patches @ dip.linear_mode()
        y = dip._y.flatten() - a @ offset
        torch.testing.assert_close(mean, k @ a.T @ torch.linalg.solve(noisy, y), atol=1e-6, rtol=1e-6)
        value = MultivariateNormal(a @ offset, noisy).log_prob(dip._y.flatten())
        assert dip.log_marginal_likelihood("linear").item() == pytest.approx(value.item(), rel=1e-6)


def test_log_density_is_that_of_the_gaussian(dense):
    x = dense.reconstruction + 0.05 * drawn(SIDE, SIDE, seed=9)
    a = projection(dense)
    extra = dense.hyperparameters.noise * torch.linalg.pinv(a.T @ a, hermitian=True).diagonal().mean()
    covariance = dense.covariance() + extra * torch.eye(SIDE * SIDE, dtype=torch.float64)
    torch.testing.assert_close(dense.covariance(image_noise=True), covariance)
    expected = MultivariateNormal(dense.reconstruction.flatten(), covariance).log_prob(x.flatten()) / SIDE**2
    torch.testing.assert_close(dense.log_density(x), expected)
    parts = 0.0
    number = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    for rows in (slice(0, 4), slice(4, 6)):
        for columns in (slice(0, 4), slice(4, 6)):
            patch = number[rows, columns].flatten()
            block = MultivariateNormal(dense.reconstruction.flatten()[patch], covariance[patch][:, patch])
            parts = parts + block.log_prob(x.flatten()[patch])
    torch.testing.assert_close(dense.log_density(x, patch_size=4), parts / SIDE**2)


def test_without_noise_in_the_image_a_singular_covariance_is_said():
    dip = fitted(network=nn.Conv2d(1, 1, 3, padding=1).double(), method="dense")  # 9 weights, 36 pixels
    with pytest.raises(FloatingPointError, match="image_noise=True"):
        dip.log_density(dip.reconstruction, image_noise=False)
    assert dip.log_density(dip.reconstruction).isfinite()


def test_float32_networks_agree_with_float64_ones():
    double = fitted(method="dense")
    network = nn.Sequential(double.network).float()
    rays = RayTransform(SIDE, FEW, 7)
    single = LinearisedDIP(network[0], rays, tv_weight=1e-3, method="dense")
    single.reconstruct(double._y.float(), double._x.float(), n_steps=1, lr=1e-30, **QUIET)
    single.linearise()
    set_apart(single)
    set_apart(double)
    kept = double.covariance()  # its matrices are those of the float64 weights
    torch.testing.assert_close(single.covariance(), kept, rtol=0, atol=1e-5 * kept.abs().max().item())


@pytest.mark.parametrize("way", WAYS, ids=["dense", "iterative"])
def test_every_device_gives_the_same_numbers(way, device):
    here = fitted(2, **way)
    there = LinearisedDIP(copy.deepcopy(here.network).to(device), here.ray_transform, tv_weight=1e-3, **way)
    there.reconstruct(here._y.to(device), here._x.to(device), n_steps=1, lr=1e-30, **QUIET)
    there.linearise()
    set_apart(here)
    set_apart(there)
    expected = here.covariance()
    found = there.covariance(image_noise=True) - here.ray_transform.noise_gain() * 0.02 * torch.eye(
        SIDE**2, device=device
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-9)
    assert there.sample(2).device.type == device.type and there.linear_mode().device.type == device.type
    there.optimize_hyperparameters(2, at="linear_tv", tv_prior=1.0, linear_steps=2, **QUIET)
    there.optimize_hyperparameters(2, at="linear", **QUIET)
    assert there.log_density(here.reconstruction, patch_size=3, n_samples=20).isfinite()


def test_hyperparameters_are_set_by_name():
    dip = fitted(method="dense")
    assert set(dip.hyperparameters.variance.values()) == {1.0}
    assert list(dip.hyperparameters.lengthscale.values()) == pytest.approx([0.1] * 3)
    residual = dip._y - dip.ray_transform.forward(dip.reconstruction)
    assert dip.hyperparameters.noise == pytest.approx(residual.square().mean().item())
    dip.set_hyperparameters(variance={"outc 1x1": 3.0}, lengthscale=2.0)
    found = dip.hyperparameters
    assert found.variance["outc 1x1"] == pytest.approx(3.0) and found.variance["inc 3x3"] == 1.0
    assert list(found.lengthscale.values()) == pytest.approx([2.0] * 3)
    for arguments, words in (
        ({"variance": {"head": 1.0}}, "variance must be of the blocks inc 3x3, .* got 'head'"),
        ({"lengthscale": {"outc 1x1": 1.0}}, "lengthscale must be of the blocks"),
        ({"variance": -1.0}, "must be positive and finite, got -1.0"),
        ({"noise": math.inf}, "noise must be positive and finite"),
    ):
        with pytest.raises(ValueError, match=words):
            dip.set_hyperparameters(**arguments)
    assert dip.hyperparameters == found


def test_what_needs_the_linear_model_says_so_and_wrong_arguments_are_refused():
    rays = RayTransform(SIDE, FEW, 7)
    dip = LinearisedDIP(nn.Conv2d(1, 1, 3, padding=1).double(), rays)
    for name in ("sample", "covariance", "optimize_hyperparameters", "linear_mode", "log_marginal_likelihood"):
        with pytest.raises(RuntimeError, match="call linearise first"):
            getattr(dip, name)()
    with pytest.raises(RuntimeError, match="call reconstruct first"):
        dip.linearise()
    dip = fitted(method="dense")
    for call, words in (
        (lambda: dip.optimize_hyperparameters(0), "n_steps must be a positive integer"),
        (lambda: dip.optimize_hyperparameters(at="mode"), "at must be one of"),
        (lambda: dip.optimize_hyperparameters(tv_prior=-1.0), "tv_prior must be positive"),
        (lambda: dip.optimize_hyperparameters(lr=math.nan), "lr must be positive"),
        (lambda: dip.sample(0), "n must be a positive integer"),
        (lambda: dip.log_density(torch.zeros(3, 3)), r"x must be a finite image \(6, 6\), got \(3, 3\)"),
        (lambda: dip.log_density(dip.reconstruction, patch_size=0), "patch_size must be a positive integer"),
        (
            lambda: dip.log_density(dip.reconstruction, patch_size=2, n_samples=0),
            "n_samples must be a positive integer",
        ),
        (lambda: dip.log_marginal_likelihood("theta"), "at must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    dip.set_hyperparameters(1e12, noise=1e-12)
    with pytest.raises(FloatingPointError, match="not positive definite at noise variance 1e-12"):
        dip.covariance()
    dip.memory_budget = 1000
    with pytest.raises(MemoryError, match="use sample"):
        dip.covariance()
    dip.method = "dense"
    with pytest.raises(MemoryError, match="pass method='iterative'"):
        dip.linearise()


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("method", ["dense", "iterative"])
def test_autocast_changes_nothing(method):
    found = []
    for autocast in (True, False):
        torch.manual_seed(1)
        network = UNet(channels=3, scales=2, skip_channels=(0, 2))
        rays = RayTransform(SIDE, FEW, 7)
        y = rays.forward(torch.ones(SIDE, SIDE))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            network(torch.ones(1, 1, SIDE, SIDE))
            dip = LinearisedDIP(network, rays, tv_weight=1e-3, method=method)
            image = dip.reconstruct(rays.forward(rays.adjoint(y)) / 30, n_steps=3, lr=1e-2, **QUIET).clone()
            shown = torch.ones(1, 1, SIDE, SIDE)
            torch.testing.assert_close(network(shown), copy.deepcopy(network)(shown))
            dip.linearise()
            set_apart(dip)
            mode, evidence = dip.linear_mode(), dip.log_marginal_likelihood(generator=seeded())
            drawn_of = [dip.sample(2, seeded()), dip.covariance(), dip.variance(n_samples=4, generator=seeded())]
            dip.optimize_hyperparameters(n_steps=2, **QUIET)
            learned = [*dip.hyperparameters.variance.values(), dip.hyperparameters.noise]
            found.append([image, *dip.losses, mode, evidence, *drawn_of, *learned])
    torch.testing.assert_close(*found)

"""Products, conjugate gradients and probes in place of dense matrices: the same numbers, without the matrices."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from scipy.linalg import hadamard

from ella_cuda.tomography import LinearisedDIP, RayOperator, RayTransform, UNet, filter_blocks
from ella_cuda.tomography import evidence as evidence_module
from ella_cuda.tomography import rays as rays_module
from ella_cuda.tomography.evidence import DenseMeasured, IterativeMeasured
from python_tests.ops.checks import Largest
from python_tests.tomography.small import (
    EXACT,
    SIDE,
    drawn,
    fitted,
    jacobian,
    phantom,
    projection,
    set_apart,
    small_unet,
    weight_covariance,
)

QUIET = {"progress_bar": False}


@pytest.fixture(scope="module")
def both():
    """The same linear model, dense and iterative."""
    found = fitted(2, method="dense"), fitted(2, method="iterative", **EXACT)
    for dip in found:
        set_apart(dip)
    assert isinstance(found[1]._measured, IterativeMeasured)
    return found


def hyperparameters(dip):
    return dip._weights(dip._raw), dip._raw["log_noise"].exp()


def every_direction(dip):
    """Probes whose mean is the trace."""
    n = dip._y.numel()
    return math.sqrt(n) * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("with_residual", [True, False])
def test_gradients_are_those_of_dense_matrices(both, with_residual):
    dense, iterative = both
    r = drawn(dense._y.numel()) if with_residual else None
    expected = dense._measured.evaluate(*hyperparameters(dense), r)
    found = iterative._measured.evaluate(*hyperparameters(iterative), r, every_direction(iterative))
    assert found[0].isnan()
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_random_probes_are_unbiased(both):
    dense, iterative = both
    expected = dense._measured.evaluate(*hyperparameters(dense), None)[1]
    probes = torch.cat([iterative._measured._probes() for _ in range(6)])
    assert set(probes.unique().tolist()) == {-1.0, 1.0}
    single = torch.stack([iterative._measured.evaluate(*hyperparameters(dense), None, z[None])[1] for z in probes])
    error = single.std(0) / math.sqrt(len(single))
    assert ((single.mean(0) - expected).abs() < 4.5 * error + 1e-9).all()


def test_covariance_samples_and_evidence_are_those_of_dense_matrices(both):
    dense, iterative = both
    torch.testing.assert_close(iterative.covariance(), dense.covariance(), rtol=1e-8, atol=1e-10)
    weights, noise = hyperparameters(iterative)
    found = iterative._measured.log_determinant(weights, noise, every_direction(iterative))
    torch.testing.assert_close(found, dense._measured.log_determinant(weights, noise), rtol=1e-9, atol=1e-9)
    many = iterative.log_marginal_likelihood("linear")  # by ten probes
    assert many.item() == pytest.approx(dense.log_marginal_likelihood("linear").item(), rel=0.2)


def test_the_preconditioner_is_made_again_now_and_then(monkeypatch):
    monkeypatch.setattr(evidence_module, "REFRESH", 3)
    dip, made = fitted(2, method="iterative"), []
    precondition = dip._measured.precondition
    monkeypatch.setattr(dip._measured, "precondition", lambda weights: made.append(weights) or precondition(weights))
    dip.optimize_hyperparameters(7, lr=0.1, **QUIET)
    assert len(made) == 3 and not torch.equal(made[0], made[2])


def test_samples_are_matherons_of_prior_draws(both):
    _, dip = both
    j, a, s = jacobian(dip), projection(dip), weight_covariance(dip)
    found = dip.sample(3, torch.Generator().manual_seed(5)).flatten(1) - dip.reconstruction.flatten()
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(3, dip.prior.n_params, dtype=torch.float64, generator=generator)
    noise = dip.hyperparameters.noise**0.5 * torch.randn(3, len(a), dtype=torch.float64, generator=generator)
    x = normal @ torch.linalg.cholesky(s).T @ j.T
    k = a @ j @ s @ j.T @ a.T + dip.hyperparameters.noise * torch.eye(len(a), dtype=torch.float64)
    expected = x + torch.linalg.solve(k, (noise - x @ a.T).T).T @ a @ j @ s @ j.T
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_variance_and_patches_come_from_samples(both, monkeypatch):
    dense, iterative = both
    monkeypatch.setattr(iterative._measured, "tol", 1e-6)
    x = dense.reconstruction + 0.02 * drawn(SIDE, SIDE, seed=8)
    samples = {"n_samples": 200, "generator": torch.Generator().manual_seed(1)}
    expected = dense.variance()
    assert ((iterative.variance(**samples) - expected).abs() < 5 * expected * math.sqrt(2 / 200)).all()
    one = iterative.log_density(x, patch_size=1, **samples)
    assert one.item() == pytest.approx(dense.log_density(x, patch_size=1).item(), abs=0.1)
    # Off the diagonal, half of the samples' covariance.
    drawn_again = {"n_samples": 16, "generator": torch.Generator().manual_seed(3)}
    found = iterative.log_density(x, patch_size=6, **drawn_again)
    d = iterative.sample(16, torch.Generator().manual_seed(3)).flatten(1) - dense.reconstruction.flatten()
    c = d.T @ d / 16
    c = (c + c.diagonal().diag()) / 2
    c += dense.hyperparameters.noise * dense.ray_transform.noise_gain() * torch.eye(SIDE * SIDE, dtype=torch.float64)
    gaussian = torch.distributions.MultivariateNormal(dense.reconstruction.flatten(), c)
    assert found.item() == pytest.approx(gaussian.log_prob(x.flatten()).item() / SIDE**2, rel=1e-4)


def test_variances_of_differences_are_exact_with_signs_of_a_design(both, monkeypatch):
    dense, iterative = both
    most = max(block.n_filters for block in iterative.prior.blocks)
    size = 1 << (most - 1).bit_length()
    rows, turn = torch.from_numpy(hadamard(size)).double(), iter(range(10**6))
    measured = iterative._measured
    monkeypatch.setattr(measured, "n_probes", size)
    monkeypatch.setattr(measured, "_signs", lambda count, generator=None: rows[next(turn) % size, :count])
    torch.testing.assert_close(measured.difference_terms(), dense._measured.difference_terms(), rtol=1e-9, atol=1e-12)


def test_a_preconditioner_saves_iterations_and_changes_no_solution(both, monkeypatch):
    _, dip = both
    weights, noise = hyperparameters(dip)[0], torch.tensor(1e-3, dtype=torch.float64)
    a, j, s = projection(dip), jacobian(dip), weight_covariance(dip)
    k = a @ j @ s @ j.T @ a.T + noise * torch.eye(len(a), dtype=torch.float64)
    r, counts = drawn(2, len(a)), {}
    for rank in (0, len(a) // 2):
        measured = IterativeMeasured(dip._image, dip.ray_transform, dip.prior, tol=1e-8, max_iterations=500, rank=rank)
        measured.precondition(weights)
        calls = []
        product = measured.product
        monkeypatch.setattr(measured, "product", lambda *args, p=product, c=calls: c.append(1) or p(*args))
        torch.testing.assert_close(
            measured.solve(weights, noise, r), torch.linalg.solve(k, r.T).T, rtol=1e-4, atol=1e-4
        )
        counts[rank] = len(calls)
    assert counts[len(a) // 2] < 0.7 * counts[0]


def test_hyperparameters_end_near_those_of_dense_matrices():
    dense, iterative = fitted(2, method="dense"), fitted(2, method="iterative", n_probes=8, tol=1e-4)
    started = dense.hyperparameters.noise
    torch.manual_seed(0)
    values = iterative.optimize_hyperparameters(20, lr=0.1, at="linear", **QUIET)
    dense.optimize_hyperparameters(20, lr=0.1, at="linear", **QUIET)
    assert all(math.isnan(v) for v in values)
    noise = iterative.hyperparameters.noise / dense.hyperparameters.noise
    assert 0.8 < noise < 1.25
    assert dense.hyperparameters.noise < 0.5 * started


@pytest.mark.parametrize("method", ["dense", "iterative"])
def test_optimisation_goes_on_where_it_was_interrupted(method, tmp_path, monkeypatch):
    options = {"lr": 0.05, "checkpoint_every": 2, "tv_prior": 1.0, **QUIET}

    def start():
        return fitted(method=method, n_probes=2, rank=9, max_iterations=4)

    whole = start()
    torch.manual_seed(3)
    values = whole.optimize_hyperparameters(6, **options)
    first, path = start(), tmp_path / "evidence.pt"
    torch.manual_seed(3)
    objective, left = first._objective, iter(range(5))
    monkeypatch.setattr(first, "_objective", lambda *args: (next(left), objective(*args))[1])
    with pytest.raises(StopIteration):
        first.optimize_hyperparameters(6, checkpoint=path, **options)
    again = start()
    torch.manual_seed(11)
    found = again.optimize_hyperparameters(6, checkpoint=path, **options)
    assert again.hyperparameters == whole.hyperparameters and len(found) == 6
    assert found == values or all(map(math.isnan, found))
    with pytest.raises(ValueError, match="of another run: at"):
        start().optimize_hyperparameters(6, at="linear", checkpoint=path, **options)
    renamed = {name + "!": weights for name, weights in filter_blocks(small_unet()).items()}
    scaled, turned = start(), start()
    scaled._x = 2 * scaled._x
    matrix = turned.ray_transform.matrix().to_dense() * 1.1
    turned.ray_transform._matrices = {
        (torch.float64, torch.device("cpu"), t): (matrix.T if t else matrix) for t in (0, 1)
    }
    others = [(fitted(method=method, n_probes=3, rank=9, max_iterations=4), "run: iterative")] * (method == "iterative")
    others += [(fitted(method=method, n_probes=2, rank=9, max_iterations=4, blocks=renamed), r"run: .*blocks")]
    others += [(scaled.linearise(), "run: data"), (turned, "the network or ray_transform is another")]
    for other, words in others:
        with pytest.raises(ValueError, match=words):
            other.optimize_hyperparameters(6, checkpoint=path, **options)


def test_estimates_are_their_generators(tmp_path, monkeypatch):
    """The global one is left alone; a checkpoint keeps the state."""
    options = {"lr": 0.05, "checkpoint_every": 2, "tv_prior": 1.0, **QUIET}

    def start():
        return fitted(2, method="iterative", n_probes=2), torch.Generator().manual_seed(5)

    whole, generator = start()
    before = torch.get_rng_state()
    evidence = whole.log_marginal_likelihood(generator=generator)
    assert whole.log_marginal_likelihood(generator=generator.manual_seed(5)) == evidence
    whole.optimize_hyperparameters(5, generator=generator.manual_seed(5), **options)
    assert torch.equal(torch.get_rng_state(), before)
    (first, generator), path = start(), tmp_path / "evidence.pt"
    objective, left = first._objective, iter(range(3))
    monkeypatch.setattr(first, "_objective", lambda *args: (next(left), objective(*args))[1])
    with pytest.raises(StopIteration):
        first.optimize_hyperparameters(5, generator=generator, checkpoint=path, **options)
    again, generator = start()
    again.optimize_hyperparameters(5, generator=generator.manual_seed(6), checkpoint=path, **options)
    assert again.hyperparameters == whole.hyperparameters
    with pytest.raises(ValueError, match="of another run: generator"):
        start()[0].optimize_hyperparameters(5, checkpoint=path, **options)


@pytest.mark.parametrize(("rank", "iterations"), [(200, 50), (10, 50), (0, 300)])
def test_error_bars_are_right_where_the_prior_is_large_beside_the_noise(rank, iterations, recwarn):
    """There a residual that is small beside the right side is large beside the noise, which error bars hang on."""
    dense = fitted(method="dense")
    dip = fitted(method="iterative", rank=rank, max_iterations=iterations)
    for some in (dense, dip):
        some.optimize_hyperparameters(1, **QUIET)  # a preconditioner of other hyperparameters
        some.set_hyperparameters(50.0, 1.0, 1e-3)
    before = torch.get_rng_state()
    expected, found = dense.covariance().diagonal(), dip.covariance().diagonal()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(dip.linear_mode(), dense.linear_mode(), rtol=0, atol=1e-3 * dense.linear_mode().norm())
    dip.sample(2, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)  # draws are the generator's alone
    assert not [w for w in recwarn if "conjugate" in str(w.message)]


def test_conjugate_gradients_that_end_early_are_said(recwarn):
    dip = fitted(2, method="iterative", max_iterations=2, rank=0)
    dip.set_hyperparameters(noise=1e-6)
    with pytest.warns(UserWarning, match="conjugate gradients ended at max_iterations=2, before tol=0.001"):
        dip.covariance()
    recwarn.clear()
    fitted(2, method="iterative", **EXACT).covariance()
    assert not [w for w in recwarn if "conjugate" in str(w.message)]


def test_nothing_of_the_size_of_a_covariance_is_formed(monkeypatch):
    monkeypatch.setattr(rays_module, "DENSE", 0)
    side, sizes = 16, {}
    rays = RayTransform(side, 8, 16)
    y = rays.forward(phantom(side))
    rays.adjoint(y)  # holds its matrices
    for method in ("iterative", "dense"):
        options = {"batch_size": 2, "n_probes": 2, "rank": 4, "max_iterations": 3}
        dip = LinearisedDIP(small_unet(), rays, method=method, **options)
        dip.reconstruct(y, n_steps=1, **QUIET)
        with Largest() as largest:
            dip.linearise().optimize_hyperparameters(1, at="linear", tv_prior=1.0, **QUIET)
            dip.sample(2)
        sizes[method] = largest.numbers
    assert sizes["iterative"] < side**4 / 5 <= side**4 <= sizes["dense"]


def allocated(call):
    """The most bytes that a call holds at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize(("side", "angles"), [(20, 4), (10, 40)], ids=["few data", "many data"])
def test_dense_matrices_take_what_the_budget_is_compared_with(side, angles):
    rays = RayTransform(side, angles)
    dip = LinearisedDIP(UNet(channels=4), rays, method="dense")
    dip.reconstruct(rays.forward(phantom(side)), n_steps=1, **QUIET)
    dip.linearise()
    bound = DenseMeasured.bytes(dip._image, rays, dip.prior)
    dip._measured = None

    def work():
        dip.linearise().optimize_hyperparameters(1, at="linear", **QUIET)
        dip.covariance()

    assert 0.8 * bound < allocated(work) <= bound


def test_a_users_pair_of_functions_gives_the_same_covariance():
    rays = RayTransform(SIDE, 4, 7)
    kind = {"image_shape": (1, 1, SIDE, SIDE), "dtype": torch.float64, "fbp": rays.fbp}
    operator = RayOperator(
        lambda x: rays.forward(x)[0].detach(), lambda y: rays.adjoint(y)[None].detach(), SIDE, **kind
    )
    found = []
    for linear in (rays, operator):
        dip = LinearisedDIP(small_unet(), linear)
        y = rays.forward(phantom()).view(linear.data_shape)
        dip.reconstruct(y, n_steps=3, lr=0.01, **QUIET)
        dip.linearise().optimize_hyperparameters(3, **QUIET)
        found.append((dip.covariance(), dip.losses))
    torch.testing.assert_close(*[f[0] for f in found])
    assert found[0][1] == pytest.approx(found[1][1])

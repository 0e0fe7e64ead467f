"""The covariance of the measurements under a linearised network, its evidence, and Gaussian conditioning on them.

With images :math:`x = o + J\\theta`, :math:`\\theta \\sim N(0, S)`, and measurements :math:`y = A x + \\eta`,
:math:`\\eta \\sim N(0, \\sigma^2 I)`, measurements have covariance
:math:`K_{yy} = A J S J' A' + \\sigma^2 I`. S is a sum of terms times weights, see :class:`FilterPrior`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from tqdm import tqdm

from ella_cuda.laplace import TangentModel
from ella_cuda.progress import bar_size
from ella_cuda.tomography.filter_prior import CHUNK, FilterPrior
from ella_cuda.tomography.rays import LinearMap
from ella_cuda.tomography.total_variation import difference_variances, differences

REFRESH = 100  # evaluations of the evidence between preconditioners


class LinearisedImage:
    """The image that a linearised network makes of its input, as a linear map of weights.

    Args:
        tangent: whose output is ``(1, 1, H, W)``.
        x: the network's input.
        image_shape: ``(H, W)``.
        batch_size: directions that go through the network together.
    """

    def __init__(self, tangent: TangentModel, x: Tensor, image_shape: tuple[int, int], batch_size: int) -> None:
        self.tangent, self.x, self.image_shape, self.batch_size = tangent, x, image_shape, batch_size
        self.dtype, self.device = x.dtype, x.device
        self.n_pixels = math.prod(image_shape)
        self.offset: Tensor | None = None  # f - J theta, ``(H, W)``, once it is needed

    def push(self, u: Tensor) -> Tensor:
        """J u of every row: ``(S, P) -> (S, H, W)``."""
        parts = [self.tangent.jvp(self.x, part.to(self.dtype)) for part in u.split(self.batch_size)]
        return torch.cat(parts).view(-1, *self.image_shape)

    def pull(self, images: Tensor) -> Tensor:
        """J' of every image: ``(S, H, W) -> (S, P)``."""
        cotangents = images.to(self.dtype).reshape(-1, 1, 1, *self.image_shape)
        found = torch.empty(len(images), self.tangent.n_params, dtype=self.dtype, device=self.device)
        for begin in range(0, len(images), self.batch_size):
            some = slice(begin, begin + self.batch_size)
            found[some] = self.tangent.vjp(self.x, cotangents[some])
        return found


class DenseMeasured:
    """By dense matrices: the terms in image space and in data space, once; then every evaluation is a sum of matrices and a Cholesky
    factorisation. With more measurements than pixels, data space is that of the pixels, by A = QR.

    Hyperparameters are the terms' weights ``(T,)`` and the noise's variance, float64; images are ``(S, H, W)`` and data ``(S, n)``, n
    measurements each. Estimates are by draws of the generator.

    Attributes:
        operator: A, or R, float64 ``(k, d)``, k = min(n, d). basis: Q, or None. image_terms: ``(T, d, d)``. terms: ``(T, k, k)``.
    """

    def __init__(self, image: LinearisedImage, rays: LinearMap, prior: FilterPrior, progress_bar: bool = False) -> None:
        d, device = image.n_pixels, image.device
        units = torch.eye(d, dtype=image.dtype, device=device).view(d, *image.image_shape)
        self.image_shape, self.n_data = image.image_shape, math.prod(rays.data_shape)
        operator = rays.forward(units).reshape(d, -1).T.double()
        self.basis: Tensor | None = None
        if self.n_data > d:
            self.basis, operator = torch.linalg.qr(operator)
        self.operator = operator.contiguous()
        jacobian = image.pull(units)
        count = len(prior.terms)
        self.image_terms = torch.empty(count, d, d, dtype=torch.float64, device=device)
        label = {"desc": "LinearisedDIP.linearise", "disable": not progress_bar}
        for term in tqdm(range(count), **label, **bar_size()):
            self.image_terms[term] = prior.gram(jacobian, term)
        del jacobian
        k = len(self.operator)
        self.terms = torch.empty(count, k, k, dtype=torch.float64, device=device)
        for term, of_image in zip(self.terms, self.image_terms, strict=True):
            torch.matmul(self.operator @ of_image, self.operator.T, out=term)

    @staticmethod
    def bytes(image: LinearisedImage, rays: LinearMap, prior: FilterPrior) -> int:
        """At the peak, of matrices."""
        d, n, count = image.n_pixels, math.prod(rays.data_shape), len(prior.terms)
        k = min(d, n)
        # With the Jacobian, copies of a part of it; with the terms, what covariance and draws take.
        jacobian = d * prior.n_params * torch.finfo(image.dtype).bits // 8 + 2 * min(CHUNK, 8 * d * prior.n_params)
        return 8 * ((count + 2) * d * d + 3 * d * n) + max(jacobian, 8 * ((count + 3) * k * k + 3 * d * d))

    def evaluate(
        self, weights: Tensor, noise: Tensor, residual: Tensor | None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ...]:
        """log|Kyy|, and with a residual r ``(n,)`` the sum of that and r' Kyy^-1 r; its gradients in weights and noise."""
        factor = self._factor(weights, noise)
        flat, more = self.terms.flatten(1), self.n_data - len(factor)  # those outside of A's range are noise alone
        inverse = torch.cholesky_inverse(factor)
        logdet = 2 * factor.diagonal().log().sum() + more * noise.log()
        by_noise = inverse.diagonal().sum() + more / noise
        if residual is None:
            return logdet, flat @ inverse.flatten(), by_noise
        r = residual.double()
        inside = r if self.basis is None else self.basis.T @ r
        outside = r.new_zeros(()) if self.basis is None else (r - self.basis @ inside).square().sum()
        solved = inverse @ inside
        by_noise = by_noise - solved.square().sum() - outside / noise.square()
        inverse.addr_(solved, solved, alpha=-1)
        return logdet + inside @ solved + outside / noise, flat @ inverse.flatten(), by_noise

    def log_determinant(self, weights: Tensor, noise: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """log|Kyy|."""
        factor = self._factor(weights, noise)
        return 2 * factor.diagonal().log().sum() + (self.n_data - len(factor)) * noise.log()

    def solve(self, weights: Tensor, noise: Tensor, data: Tensor) -> Tensor:
        """Kyy^-1 of each row."""
        data, factor = data.double(), self._factor(weights, noise)
        if self.basis is None:
            return torch.cholesky_solve(data.T, factor).T
        inside = data @ self.basis
        return torch.cholesky_solve(inside.T, factor).T @ self.basis.T + (data - inside @ self.basis.T) / noise

    def difference_terms(self, generator: torch.Generator | None = None) -> Tensor:
        """For each term C, the variances of neighbours' differences under J C J', ``(T, pairs)``."""
        return difference_variances(self.image_terms, self.image_shape)

    def prior_covariance(self, weights: Tensor) -> Tensor:
        """J S J', ``(d, d)``."""
        return (weights @ self.image_terms.flatten(1)).view(self.image_terms.shape[1:])

    def prior_draws(self, weights: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """J S^(1/2) e, e normal: ``(n, H, W)``, float64."""
        values, vectors = torch.linalg.eigh(self.prior_covariance(weights))
        normal = torch.randn(n, len(values), dtype=torch.float64, device=values.device, generator=generator)
        return ((normal * values.clamp_min(0).sqrt()) @ vectors.T).view(n, *self.image_shape)

    def smoothed(self, weights: Tensor, data: Tensor) -> Tensor:
        """J S J' A' of each row: ``(S, n) -> (S, H, W)``."""
        inside = data.double() if self.basis is None else data.double() @ self.basis
        return (inside @ self.operator @ self.prior_covariance(weights)).view(-1, *self.image_shape)

    def covariance(self, weights: Tensor, noise: Tensor) -> Tensor:
        """Covariance of the image given measurements, ``(d, d)``."""
        prior = self.prior_covariance(weights)
        reduced = torch.linalg.solve_triangular(self._factor(weights, noise), self.operator @ prior, upper=False)
        return prior - reduced.T @ reduced

    def state_dict(self) -> dict[str, Any]:
        """What the next evaluations depend on besides their arguments and torch's generator."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _factor(self, weights: Tensor, noise: Tensor) -> Tensor:
        matrix = (weights @ self.terms.flatten(1)).view(self.terms.shape[1:])
        matrix.diagonal().add_(noise)
        factor, info = torch.linalg.cholesky_ex(matrix)
        if info:
            raise FloatingPointError(
                f"the covariance of the measurements is not positive definite at noise variance {noise.item():.3g}: rounding of the "
                "prior's part is larger than the noise. Raise the noise, or use a float64 network."
            )
        return factor


class IterativeMeasured:
    """The methods of :class:`DenseMeasured` by products with the Jacobian, conjugate gradients and random probes: memory is that of a few
    data and weight vectors, not of matrices. Gradients of the log determinant are Hutchinson's unbiased estimates.

    Args:
        n_probes: for an estimate.
        max_iterations, tol: of conjugate gradients; tol bounds each solution's relative error, for which residuals must be small beside the
            noise: right sides are mostly in the few directions that the prior makes large, and error bars come from the others.
        rank: of the preconditioner, a randomised low-rank approximation (Nystrom's) of the prior's part; 0 is none.

    Source: Antoran, Barbano et al., TMLR 2023, section 4.3; Frangella, Tropp and Udell, "Randomized Nystrom preconditioning", 2023.
    """

    def __init__(
        self,
        image: LinearisedImage,
        rays: LinearMap,
        prior: FilterPrior,
        n_probes: int = 10,
        max_iterations: int = 50,
        tol: float = 1e-3,
        rank: int = 200,
    ) -> None:
        self.image, self.rays, self.prior = image, rays, prior
        self.n_data = math.prod(rays.data_shape)
        self.n_probes, self.max_iterations, self.tol = n_probes, max_iterations, tol
        self.rank = min(rank, self.n_data)
        self._low_rank: tuple[Tensor, Tensor] | None = None
        self._conditioned_at: Tensor | None = None  # the terms' weights
        self._evaluations = 0

    def evaluate(
        self,
        weights: Tensor,
        noise: Tensor,
        residual: Tensor | None,
        probes: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, ...]:
        """The value itself is not estimated: NaN."""
        if self._evaluations % REFRESH == 0:
            self.precondition(weights)
        self._evaluations += 1
        z = self._probes(generator) if probes is None else probes
        right = z if residual is None else torch.cat([z, residual[None].double()])
        solved, _ = self._solved(weights, noise, right)
        pulled = self.pull(torch.cat([z, solved]))
        n = len(z)
        by_weights = self.prior.pairings(pulled[:n], pulled[n : 2 * n]) / n
        by_noise = (z * solved[:n]).sum() / n
        if residual is not None:
            by_weights = by_weights - self.prior.pairings(pulled[-1:], pulled[-1:])
            by_noise = by_noise - solved[n].square().sum()
        return torch.full_like(noise, math.nan), by_weights, by_noise

    def product(self, weights: Tensor, noise: Tensor | float, data: Tensor) -> Tensor:
        """Kyy times each row."""
        taps = self.prior.tap_covariances(weights)
        return self.measure(self.image.push(self.prior.multiply(self.pull(data), taps))) + noise * data

    def solve(self, weights: Tensor, noise: Tensor, data: Tensor) -> Tensor:
        """By preconditioned conjugate gradients, for all rows at once. Warns where ``max_iterations`` end them before ``tol``; gradients of
        the evidence take what they have."""
        if self._conditioned_at is None or not torch.equal(self._conditioned_at, weights):
            self.precondition(weights)
        found, reached = self._solved(weights, noise, data)
        if not reached:
            warnings.warn(
                f"LinearisedDIP: conjugate gradients ended at max_iterations={self.max_iterations}, before tol={self.tol}: results are "
                "inexact. Raise max_iterations or rank.",
                stacklevel=2,
            )
        return found

    def _solved(self, weights: Tensor, noise: Tensor, data: Tensor) -> tuple[Tensor, bool]:
        """Kyy^-1 of each row, and whether all are within ``tol``."""
        right = data.double()
        found, rest = torch.zeros_like(right), right.clone()
        conditioned = self._conditioned(rest, noise)
        direction, size = conditioned, (rest * conditioned).sum(1)
        for _ in range(self.max_iterations):
            moving = self._moving(rest, found, noise)
            if not moving.any():
                break
            pushed = self.product(weights, noise, direction)
            bend = (direction * pushed).sum(1)
            step = torch.where(moving & (bend > 0), size / bend, 0.0)[:, None]
            found, rest = found + step * direction, rest - step * pushed
            conditioned = self._conditioned(rest, noise)
            before, size = size, (rest * conditioned).sum(1)
            direction = conditioned + torch.where(before > 0, size / before, 0.0)[:, None] * direction
        return found, not self._moving(rest, found, noise).any()

    def _moving(self, rest: Tensor, found: Tensor, noise: Tensor) -> Tensor:
        """Which rows' errors, of norm ``|rest| / noise`` at most, are not within ``tol``."""
        return rest.norm(dim=1) > self.tol * noise * found.norm(dim=1)

    def log_determinant(
        self,
        weights: Tensor,
        noise: Tensor,
        probes: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """By stochastic Lanczos quadrature, an estimate.

        Source: Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", 2017.
        """
        z = self._probes(generator) if probes is None else probes
        total = z.new_zeros(())
        for probe in z:
            norm = probe.norm()
            basis, diagonal, beside = [probe / norm], [], []
            for _ in range(min(self.max_iterations, self.n_data)):
                new = self.product(weights, noise, basis[-1][None])[0]
                diagonal.append(basis[-1] @ new)
                known = torch.stack(basis)
                for _ in range(2):  # once more against rounding
                    new = new - known.T @ (known @ new)
                length = new.norm()
                if not length > 1e-12 * diagonal[0]:
                    break
                beside.append(length)
                basis.append(new / length)
            steps = torch.stack(diagonal).diag()
            if len(diagonal) > 1:
                off = torch.stack(beside[: len(diagonal) - 1])
                steps = steps + off.diag(1) + off.diag(-1)
            values, vectors = torch.linalg.eigh(steps)
            total = total + norm.square() * (vectors[0].square() * values.clamp_min(noise).log()).sum()
        return total / len(z)

    def difference_terms(self, generator: torch.Generator | None = None) -> Tensor:
        """Unbiased estimates by random signs of filters, tap by tap."""
        prior, image = self.prior, self.image
        found: list[Tensor] = []
        for i, block in enumerate(prior.blocks):
            sums: Any = 0
            for _ in range(self.n_probes):
                rows = torch.zeros(block.n_taps, prior.n_params, dtype=image.dtype, device=image.device)
                signs = self._signs(block.n_filters, generator)
                for tap, part in enumerate(prior.split(rows)[i]):
                    part[:, tap] = signs.to(part)
                along = differences(image.push(rows).double())
                sums = sums + torch.stack([(along * (mask @ along)).sum(0) for mask in prior.masks[i]])
            found.append(sums / self.n_probes)
        return torch.cat(found)

    def prior_draws(self, weights: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        taps, parts = self.prior.tap_covariances(weights), []
        for begin in range(0, n, self.image.batch_size):
            count = min(self.image.batch_size, n - begin)
            normal = torch.randn(
                count, self.prior.n_params, dtype=torch.float64, device=self.image.device, generator=generator
            )
            parts.append(self.image.push(self.prior.draw(normal, taps)).double())
        return torch.cat(parts)

    def smoothed(self, weights: Tensor, data: Tensor) -> Tensor:
        return self.image.push(self.prior.multiply(self.pull(data), self.prior.tap_covariances(weights))).double()

    def covariance(self, weights: Tensor, noise: Tensor) -> Tensor:
        taps, d = self.prior.tap_covariances(weights), self.image.n_pixels
        found = torch.empty(d, d, dtype=torch.float64, device=self.image.device)
        for begin in range(0, d, self.image.batch_size):
            rows = torch.arange(begin, min(begin + self.image.batch_size, d), device=found.device)
            units = torch.zeros(len(rows), d, dtype=torch.float64, device=found.device)
            units[rows - begin, rows] = 1
            pulled = self.image.pull(units.view(-1, *self.image.image_shape))
            before = self.image.push(self.prior.multiply(pulled, taps)).double()
            explained = self.smoothed(weights, self.solve(weights, noise, self.measure(before)))
            found[rows] = (before - explained).flatten(1)
        return found.add_(found.T.clone()).div_(2)

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self._evaluations, "low_rank": self._low_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        low_rank = state["low_rank"]
        if type(state["evaluations"]) is not int or any(part.dtype != torch.float64 for part in low_rank or ()):
            raise ValueError("evaluations must be an integer, and low_rank None or two tensors torch.float64")
        self._low_rank = None if low_rank is None else tuple(part.to(self.image.device) for part in low_rank)
        self._evaluations, self._conditioned_at = state["evaluations"], None

    def measure(self, images: Tensor) -> Tensor:
        """A x: ``(S, H, W) -> (S, n)``, float64."""
        return self.rays.forward(images.to(self.image.dtype)).reshape(len(images), -1).double()

    def pull(self, data: Tensor) -> Tensor:
        """J' A' y: ``(S, n) -> (S, P)``."""
        shaped = data.to(self.image.dtype).view(-1, *self.rays.data_shape)
        return self.image.pull(self.rays.adjoint(shaped))

    def precondition(self, weights: Tensor) -> None:
        """Make the preconditioner at these weights."""
        self._conditioned_at = weights.detach().clone()
        if not self.rank:
            return
        generator = torch.Generator("cpu").manual_seed(0)  # of its own: a sample is its generator's alone
        drawn = torch.randn(self.n_data, self.rank, generator=generator, dtype=torch.float64, device="cpu")
        basis = torch.linalg.qr(drawn.to(self.image.device)).Q.T
        image = torch.cat([self.product(weights, 0.0, part) for part in basis.split(self.image.batch_size)])
        shift = torch.finfo(self.image.dtype).eps * image.norm()
        image = image + shift * basis
        inner = basis @ image.T
        factor, info = torch.linalg.cholesky_ex((inner + inner.T) / 2)
        if info:  # the prior's part is too near to singular for this rank
            self._low_rank = None
            return
        vectors, values, _ = torch.linalg.svd(
            torch.linalg.solve_triangular(factor, image, upper=False).T, full_matrices=False
        )
        self._low_rank = vectors, (values.square() - shift).clamp_min(0)

    def _conditioned(self, rest: Tensor, noise: Tensor) -> Tensor:
        if self._low_rank is None:
            return rest
        vectors, values = self._low_rank
        inside = rest @ vectors
        scale = (values[-1] + noise) / (values + noise) - 1
        return rest + (inside * scale) @ vectors.T

    def _probes(self, generator: torch.Generator | None = None) -> Tensor:
        return self._signs(self.n_probes * self.n_data, generator).view(self.n_probes, self.n_data)

    def _signs(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        drawn = torch.randint(0, 2, (count,), device=self.image.device, generator=generator)
        return drawn.double() * 2 - 1


class LogNormalTerms(torch.autograd.Function):
    """log|Kyy| + r' Kyy^-1 r, differentiable once in the terms' weights and the noise: gradients are computed with the value."""

    @staticmethod
    def forward(
        ctx: Any,
        measured: DenseMeasured | IterativeMeasured,
        weights: Tensor,
        noise: Tensor,
        residual: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        value, by_weights, by_noise = measured.evaluate(weights, noise, residual, generator=generator)
        ctx.save_for_backward(by_weights, by_noise)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, None, None]:
        by_weights, by_noise = ctx.saved_tensors
        return None, gradient * by_weights, gradient * by_noise, None, None

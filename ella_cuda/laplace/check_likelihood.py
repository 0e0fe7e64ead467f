"""Likelihoods of a user's own against derivatives of their ``log_prob``, on a few data points of a fit's first batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ella_cuda.laplace.check_rule import is_own, owner_of
from ella_cuda.laplace.likelihoods import IndependentLikelihood, Likelihood, bytes_each
from ella_cuda.laplace.one_function import identical

POINTS, ENTRIES = 3, 64  # data points, and how many of their outputs' entries have their Hessian compared
COLUMNS_BYTES = 16 << 20
STEP, NOISE = 1e-5, 1e-8  # of differences of gradients, relative: torch lacks second derivatives of some functions


def check_likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Compare a likelihood that is not the package's with what :class:`Likelihood` says of its methods.

    Args:
        likelihood: that has checked these data points.
        outputs: of a few data points, ``(N, ...)``.
        targets: of them.

    Raises:
        ValueError: a method contradicts ``log_prob``, or changes what it gets; names the class and the method.
    """
    if not is_own(type(likelihood)) and len(outputs) and outputs.isfinite().all():
        _Check(likelihood, outputs.detach(), targets).run()


class _Check:
    """One comparison, of outputs ``(N, ...)`` and their targets."""

    def __init__(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
        self.likelihood, self.kind = likelihood, type(likelihood)
        self.outputs, self.f, self.y = outputs, outputs.double(), targets
        # Gradients of torch's losses take one dtype.
        self.wide = targets.double() if targets.is_floating_point() else targets
        self.rounding = torch.finfo(outputs.dtype).eps
        self.tolerance = max(1e-3, 16 * self.rounding)
        self.variances = (1.0, 2.0) if likelihood.has_noise else (1.0,)

    @torch.no_grad()
    def run(self) -> None:
        points = range(len(self.f))
        singles = [self._called("log_prob", self.f[n : n + 1], self.wide[n : n + 1]).sum() for n in points]
        total = self._called("log_prob", self.f, self.wide).sum()
        self._compare("log_prob", total, sum(singles), "its sum over data points is not that of each data point alone")
        slope = self._slope(self.f)
        self._check_hessian(slope)
        if not is_own(owner_of(self.kind, "loss")):
            self._check_loss(slope)
        if self.likelihood.has_noise or not all(
            is_own(owner_of(self.kind, m)) for m in ("statistic", "log_likelihood")
        ):
            self._check_log_likelihood(total, singles)

    def _slope(self, f: Tensor) -> Tensor:
        """The gradient of the sum of ``log_prob``."""
        with torch.enable_grad():
            leaf = f.clone().requires_grad_()
            total = self.likelihood.log_prob(leaf * 1, self.wide).sum()
            if not total.requires_grad:
                raise self._error("log_prob", "it has no gradient in the outputs; compute it by functions of torch")
            (slope,) = torch.autograd.grad(total, leaf)
        if not slope.isfinite().all():
            raise self._error("log_prob", "its gradient in the outputs is not finite")
        return slope

    def _check_hessian(self, slope: Tensor) -> None:
        """Compare some entries with the Hessian of ``-log_prob``, data points being independent."""
        entries = self._entries(self.f[0].numel())
        independent, method = isinstance(self.likelihood, IndependentLikelihood), "columns"
        if independent and owner_of(self.kind, "columns") is IndependentLikelihood:
            method, second = "second_derivative", self._called("second_derivative", self.f, self.wide)
            if second.shape != self.f.shape:
                raise self._error(
                    method, f"expected the outputs' shape {tuple(self.f.shape)}, got {tuple(second.shape)}"
                )
            found = torch.diag_embed(second.flatten(1)[:, entries].double())
        else:
            found = self._outer_products(entries)
        values, vectors = torch.linalg.eigh(self._hessian(entries))
        floor = 8 * self.rounding + NOISE * slope.abs().amax()
        bound = self.tolerance * values.abs().amax() + floor
        expected = vectors @ (values.clamp(min=0)[:, :, None] * vectors.mT)
        # Where outputs depend on each other and the Hessian has both signs, there is no such root: any other is believed.
        clear = independent | (values.amin(1) >= -bound) | (values.amax(1) <= bound)
        gaps = (found - expected).flatten(1).norm(dim=1)[clear]
        size = torch.cat([expected, found]).flatten(1).norm(dim=1).amax()
        if not (gaps <= self.tolerance * size + floor).all():
            raise self._error(
                method,
                "it is not the Hessian of -log_prob in the outputs, zero where that is negative: relative difference "
                f"{gaps.amax() / size:.2g}, expected at most {self.tolerance:g}",
            )

    def _entries(self, count: int) -> Tensor:
        """Entries of a data point's outputs, the first ones, which lie together, and some others, in order."""
        others = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        first = torch.arange(min(count, ENTRIES // 2), device="cpu")
        return torch.cat([first, others[: ENTRIES // 2]]).unique().to(self.f.device)

    def _hessian(self, entries: Tensor) -> Tensor:
        """The Hessian of ``-log_prob`` in the entries, ``(N, E, E)``, by differences of gradients."""
        columns = []
        for entry in entries.tolist():
            step = torch.zeros_like(self.f).flatten(1)
            step[:, entry] = STEP * self.f.flatten(1)[:, entry].abs().clamp(min=0.1)
            ahead, behind = (self._slope(self.f + s.view(self.f.shape)).flatten(1) for s in (step, -step))
            columns.append((behind - ahead)[:, entries] / (2 * step[:, entry, None]))
        found = torch.stack(columns, 2)
        return (found + found.mT) / 2

    def _outer_products(self, entries: Tensor) -> Tensor:
        columns = self._called("columns", self.outputs, self.y)
        total = self.f.new_zeros(len(self.f), len(entries), len(entries))
        step = max(1, COLUMNS_BYTES // max(1, bytes_each(columns)))
        for begin in range(0, len(columns), step):
            part = columns[begin : begin + step]
            if part.shape[1:] != self.f.shape:
                raise self._error("columns", f"expected (columns, {tuple(self.f.shape)}), got {tuple(part.shape)}")
            some = part.flatten(2)[:, :, entries].double()
            total += torch.einsum("kne,knf->nef", some, some)
        return total

    def _check_loss(self, slope: Tensor) -> None:
        for variance in self.variances:
            with torch.enable_grad():
                leaf = self.outputs.clone().requires_grad_()
                loss = self.likelihood.loss(leaf * 1, self.y, self.outputs.new_tensor(variance))
                (found,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
            words = "its gradient is not that of the mean of -log_prob over the data points, over sigma^2 = "
            self._compare("loss", found.double(), -slope / (len(self.f) * variance), f"{words}{variance:g}")

    def _check_log_likelihood(self, total: Tensor, singles: list[Tensor]) -> None:
        """Compare the sum of ``log_prob``; with noise, up to a normaliser, differences of two data points."""

        def found(f: Tensor, y: Tensor, variance: float) -> Tensor:
            sigma = torch.tensor(variance**0.5, dtype=f.dtype, device=f.device)
            return self.likelihood.log_likelihood(self._called("statistic", f, y), y.numel(), sigma)

        if not self.likelihood.has_noise:
            self._compare("log_likelihood", found(self.f, self.wide, 1.0), total, "it is not the sum of log_prob")
            return
        for variance in self.variances:
            one, other = (found(self.f[n], self.wide[n], variance) for n in (slice(1), slice(-1, None)))
            words = f"the differences of data points are not those of log_prob over sigma^2 = {variance:g}"
            self._compare("log_likelihood", one - other, (singles[0] - singles[-1]) / variance, words)

    def _called(self, method: str, *arguments: Tensor) -> Any:
        """The method's result; the method gets copies, and may not change them."""
        given = [copy.deepcopy(a) for a in arguments]
        found = getattr(self.likelihood, method)(*given)
        if not all(map(identical, given, arguments)):
            raise self._error(method, "it changes its arguments in place, which others get too; change a copy")
        return found

    def _compare(self, method: str, found: Tensor, expected: Tensor, words: str) -> None:
        size, gap = torch.maximum(found.norm(), expected.norm()).item(), (found - expected).norm().item()
        if not gap <= self.tolerance * size + 8 * self.rounding:
            raise self._error(
                method, f"{words}: relative difference {gap / size:.2g}, expected at most {self.tolerance:g}"
            )

    def _error(self, method: str, words: str) -> ValueError:
        return ValueError(
            f"fit: {self.kind.__name__}.{method} of the likelihood {self.likelihood!r}, on the first batch: {words}."
        )

"""Likelihoods of a user's own against autograd of their ``log_prob``, on a few data points of a fit's first batch."""

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
STEP = 1e-5  # of differences of gradients, where torch has no second derivative


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
        self.generator = torch.Generator("cpu").manual_seed(0)

    @torch.no_grad()
    def run(self) -> None:
        total, slope = self._slope(self.f)
        singles = [
            self._called("log_prob", self._one(self.f, n), self._one(self.wide, n)).sum() for n in range(len(self.f))
        ]
        self._compare("log_prob", total, sum(singles), "its sum over data points is not that of each data point alone")
        self._check_hessian(slope)
        if not is_own(owner_of(self.kind, "loss")):
            self._check_loss(slope)
        self._check_log_likelihood(total, singles)
        shapes = {"response": [self.f.shape], "admitted": [self.y.shape, ()], "hits": [(), ()]}
        for method, expected in shapes.items():
            if is_own(owner_of(self.kind, method)):
                continue
            found = self._called(method, self.outputs, *([self.y] if method != "response" else []))
            got = [tuple(t.shape) for t in (found if isinstance(found, tuple) else (found,))]
            if got != list(map(tuple, expected)):
                raise self._error(method, f"expected shapes {list(map(tuple, expected))}, got {got}")
            if method == "admitted" and not found[1]:
                raise self._error(method, "it does not admit targets that check takes")

    def _check_hessian(self, slope: Tensor) -> None:
        entries = self._entries(self.f[0].numel())
        method = "columns"
        if (
            isinstance(self.likelihood, IndependentLikelihood)
            and owner_of(self.kind, "columns") is IndependentLikelihood
        ):
            method, second = "second_derivative", self._called("second_derivative", self.f, self.wide)
            if second.shape != self.f.shape:
                raise self._error(
                    method, f"expected the outputs' shape {tuple(self.f.shape)}, got {tuple(second.shape)}"
                )
            found = torch.diag_embed(second.flatten(1)[:, entries].double())
        else:
            found = self._outer_products(entries)
        gap = self._gap(found, self._hessian(slope, entries))
        if gap > 0:  # or torch has none: of a function that is differentiable once it may be zero, without a word
            gap = self._gap(found, self._hessian(None, entries))
        if gap > 0:
            raise self._error(
                method,
                f"it is not the Hessian of -log_prob in the outputs, zero where that is negative: relative difference {gap:.2g}, expected at "
                f"most {self.tolerance:g}",
            )

    def _gap(self, found: Tensor, expected: Tensor) -> float:
        """The relative difference, zero within rounding."""
        if not expected.isfinite().all():
            return torch.inf
        values, vectors = torch.linalg.eigh(expected)
        floor = 8 * self.rounding
        bound = self.tolerance * values.abs().amax() + floor
        nearest = vectors @ (values.clamp(min=0)[:, :, None] * vectors.mT)
        # Where outputs depend on each other and the Hessian has both signs, there is no such root: any other is believed.
        independent = isinstance(self.likelihood, IndependentLikelihood)
        clear = independent | (values.amin(1) >= -bound) | (values.amax(1) <= bound)
        gaps = (found - nearest).flatten(1).norm(dim=1)[clear].nan_to_num(torch.inf)
        sizes = torch.cat([nearest, found]).flatten(1).norm(dim=1).nan_to_num(0.0)
        if (gaps <= self.tolerance * sizes.amax() + floor).all():
            return 0.0
        return (gaps.amax() / sizes.amax()).item()

    def _entries(self, count: int) -> Tensor:
        """Entries of a data point's outputs, some that lie together and some others, in order."""
        if count <= ENTRIES:
            return torch.arange(count, device=self.f.device)
        first = torch.randint(count - ENTRIES // 2, (), generator=self.generator, device="cpu")
        others = torch.randint(count, (ENTRIES // 2,), generator=self.generator, device="cpu")
        return torch.cat([first + torch.arange(ENTRIES // 2, device="cpu"), others]).unique().to(self.f.device)

    def _slope(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of ``log_prob`` and its gradient, in its graph."""
        self._called("log_prob", f, self.wide)
        with torch.enable_grad():
            self._leaf = f.clone().requires_grad_()
            total = self.likelihood.log_prob(self._leaf * 1, self.wide).sum()
            if not total.requires_grad:
                raise self._error("log_prob", "it has no gradient in the outputs; compute it by functions of torch")
            (slope,) = torch.autograd.grad(total, self._leaf, create_graph=True)
        return total.detach(), slope

    def _hessian(self, slope: Tensor | None, entries: Tensor) -> Tensor:
        """The Hessian of ``-log_prob``, ``(N, E, E)``, data points being independent: by autograd of its gradient, or by differences of
        gradients."""
        leaf, rows = self._leaf, []
        for entry in entries.tolist():
            if slope is None:
                step = torch.zeros_like(self.f).flatten(1)
                step[:, entry] = STEP * self.f.flatten(1)[:, entry].abs().clamp(min=0.1)
                ahead, behind = (self._slope(self.f + s.view(self.f.shape))[1].flatten(1) for s in (step, -step))
                row = (ahead - behind) / (2 * step[:, entry, None])
            else:
                one = slope.flatten(1)[:, entry].sum()
                try:
                    row = torch.autograd.grad(one, leaf, retain_graph=True, materialize_grads=True)[0].flatten(1)
                except RuntimeError:  # torch has no second derivative, or it is zero
                    row = torch.zeros_like(leaf).flatten(1)
            rows.append(-row.detach()[:, entries])
        found = torch.stack(rows, 2)
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
        for variance in (1.0, 2.0) if self.likelihood.has_noise else (1.0,):
            given = self.outputs.new_tensor(variance)
            self._called("loss", self.outputs, self.y, given)
            with torch.enable_grad():
                leaf = self.outputs.clone().requires_grad_()
                loss = self.likelihood.loss(leaf * 1, self.y, given)
                (found,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
            words = "its gradient is not that of the mean of -log_prob over the data points"
            words += f", over sigma^2 = {variance:g}" if self.likelihood.has_noise else ""
            self._compare("loss", found.double(), -slope.detach() / (len(self.f) * variance), words)

    def _check_log_likelihood(self, total: Tensor, singles: list[Tensor]) -> None:
        """Of two data points the difference, at two sigmas; without noise it is the sum."""
        if not self.likelihood.has_noise and all(
            is_own(owner_of(self.kind, m)) for m in ("statistic", "log_likelihood")
        ):
            return

        def found(f: Tensor, y: Tensor, sigma: float) -> Tensor:
            statistic = self._called("statistic", f, y)
            return self.likelihood.log_likelihood(
                statistic, y.numel(), torch.tensor(sigma, dtype=f.dtype, device=f.device)
            )

        last = len(self.f) - 1
        for sigma in (1.0, 1.5) if self.likelihood.has_noise else (1.0,):
            one, other = (found(self._one(self.f, n), self._one(self.wide, n), sigma) for n in (0, last))
            size = max(abs(singles[0].item()), abs(singles[last].item())) * self.rounding
            expected = (singles[0] - singles[last]) / sigma**2
            words = "the differences of data points are not those of log_prob"
            words += f" over sigma^2 = {sigma**2:g}" if self.likelihood.has_noise else ""
            self._compare("log_likelihood", one - other, expected, words, 64 * size)
        if not self.likelihood.has_noise:
            self._compare("log_likelihood", found(self.f, self.wide, 1.0), total, "it is not the sum of log_prob")

    def _called(self, method: str, *arguments: Tensor) -> Any:
        """What the method returns; it gets copies, and may not change them."""
        given = [copy.deepcopy(a) for a in arguments]
        found = getattr(self.likelihood, method)(*given)
        if not all(map(identical, given, arguments)):
            raise self._error(method, "it changes its arguments in place, which others get too; change a copy")
        return found

    @staticmethod
    def _one(tensor: Tensor, n: int) -> Tensor:
        return tensor[n : n + 1]

    def _compare(self, method: str, found: Tensor, expected: Tensor, words: str, rounding: float = 0.0) -> None:
        size, gap = torch.maximum(found.norm(), expected.norm()).item(), (found - expected).norm().item()
        if not gap <= self.tolerance * size + rounding + 8 * self.rounding:
            raise self._error(
                method, f"{words}: relative difference {gap / size:.2g}, expected at most {self.tolerance:g}"
            )

    def _error(self, method: str, words: str) -> ValueError:
        return ValueError(
            f"fit: {self.kind.__name__}.{method} of the likelihood {self.likelihood!r}, on the first batch: {words}."
        )

"""Rules and likelihoods of a user's own against autograd, on a few data points of a fit's first batch.

A rule's gradients at the input and Jacobians of single data points are autograd's. Jacobians are made of rows, unless the class has
``jacobians`` of its own or adds to moments. Of those, blocks without an input side are exact, and the rows of some data points are those of
each alone. Where products of the two sides' rows are parallel to gradients, their size must be theirs; others are believed, as
approximations of a user's own.

A likelihood's methods are compared with derivatives of its ``log_prob``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ella_cuda.laplace.batches import Inputs, data_points, plain_tensor, run_model, take, tensors_of
from ella_cuda.laplace.call import Call, Place, arguments_in_order, batch_first
from ella_cuda.laplace.check_model import identical
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.likelihoods import IndependentLikelihood, Likelihood, bytes_each
from ella_cuda.laplace.rows import Rows
from ella_cuda.laplace.rules.recorded import adds
from ella_cuda.laplace.second_moment import UnkeptMoment
from ella_cuda.laplace.tangent import by_autograd
from ella_cuda.nn._autocast import full

if TYPE_CHECKING:
    from ella_cuda.laplace.rules.base import Rule

POINTS = 3  # data points of a likelihood
RULE_POINTS = 5  # data points of a rule
TOLERANCE = 1e-3  # relative
PARALLEL = 1 - 1e-6
ENTRIES = 64  # of a data point's outputs that have their Hessian compared
COLUMNS_BYTES = 16 << 20
STEP, NOISE = 1e-5, 1e-8  # of differences of gradients, relative: torch lacks second derivatives of some functions


def is_own(kind: type, method: str | None = None) -> bool:
    """Whether a class, or the one that defines its method, is the package's."""
    owner = kind if method is None else next(c for c in kind.__mro__ if method in vars(c))
    return owner.__module__.partition(".")[0] == "ella_cuda"


def check_rules(model: nn.Module, rules: Sequence[Rule], x: Inputs, places: Mapping[Rule, Sequence[Place]]) -> None:
    """Compare the rules that are not the package's, or whose layers have a forward of others, with autograd, at these layers' first calls;
    ValueError, with the class and the method, where one contradicts autograd, or changes what it gets.

    Args:
        model: in evaluation mode, without hooks of a fit.
        x: a batch of at least one data point. places: of these in the layers' calls.
    """
    foreign = {r.module: r for r in rules if r in places and r.trainable and not _is_known(r)}
    foreign = {module: rule for module, rule in foreign.items() if not rule.inner_modules()}
    if not foreign:
        return
    calls: dict[Rule, tuple[list[Any], Tensor]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        rule = foreign[module]
        if rule not in calls and isinstance(out, Tensor):
            given = (*arguments_in_order(module, args, kwargs), out)
            place = places[rule][0]
            *arguments, out = [
                batch_first(full(plain_tensor(a).detach()), place)[:RULE_POINTS].clone() if isinstance(a, Tensor) else a
                for a in given
            ]
            calls[rule] = arguments, out

    count = data_points(x)
    few = take(x, torch.arange(RULE_POINTS, device=tensors_of(x)[0].device) % count)
    with torch.no_grad():
        with hooks(foreign, after=keep, prepend=True, with_kwargs=True):
            run_model(model, few)
        for rule, (arguments, out) in calls.items():
            if out.is_floating_point() and out.isfinite().all():
                _RuleCheck(rule, arguments, out).run()


def _is_known(rule: Rule) -> bool:
    """Whether the rule is the package's, and the forward of its layer is torch's or the package's."""
    kind = type(rule.module)
    owner = next(c for c in kind.__mro__ if "forward" in vars(c))
    return is_own(type(rule)) and owner.__module__.partition(".")[0] in ("torch", "ella_cuda")


def check_likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Compare a likelihood that is not the package's with what :class:`Likelihood` says of its methods, at outputs ``(N, ...)`` and targets
    of a few data points; ValueError, with the class and the method, where one contradicts ``log_prob``, or changes what it gets."""
    if not is_own(type(likelihood)) and len(outputs) and outputs.isfinite().all():
        _LikelihoodCheck(likelihood, outputs.detach(), targets).run()


class _Contradiction(ValueError):
    """The error of a comparison, beside errors that a user's class raises itself."""


class _Check(ABC):
    """Comparisons of what the methods of a user's class return with what autograd says."""

    tolerance, floor = TOLERANCE, 0.0  # relative, and absolute

    @abstractmethod
    def error(self, method: str, words: str) -> _Contradiction:
        """The error of a method."""

    def unchanged(self, method: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The return value of the method, which gets copies and may not change them."""
        given = copy.deepcopy(arguments)
        found = call(*given)
        if not all(map(identical, tree_leaves(given), tree_leaves(arguments))):
            raise self.error(method, "it changes its arguments in place, which others get too; change a copy")
        return found

    def compare(self, method: str, found: Tensor, expected: Tensor, words: str) -> None:
        """Refuse a result of another shape, or of another value."""
        if found.shape != expected.shape:
            raise self.error(method, f"{words}: expected shape {tuple(expected.shape)}, got {tuple(found.shape)}")
        size, gap = torch.maximum(found.norm(), expected.norm()).item(), (found - expected).norm().item()
        if not gap <= self.tolerance * size + self.floor:
            raise self.error(
                method, f"{words}: relative difference {gap / size:.2g}, expected at most {self.tolerance:g}"
            )


class _RuleCheck(_Check):
    """The comparisons of a rule, at a call of its layer with these arguments and output, data points first."""

    def __init__(self, rule: Rule, arguments: list[Any], out: Tensor) -> None:
        self.rule, self.arguments, self.out = rule, arguments, out
        self.names, self.shapes = list(rule.trainable), rule.shapes()
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.of_rows = not adds(type(rule)) and is_own(type(rule), "jacobians")

    def run(self) -> None:
        count = len(self.out)
        gradient = self._drawn(2, *self.out.shape)
        exact, together = self._exact(self.arguments, gradient), self._shown(self.arguments, gradient)
        if exact is None or together is None or self.of_rows:
            return
        singles = [self._shown(self._only(n), gradient[:, n : n + 1]) for n in range(count)]
        for side, rows in together.items() if None not in singles else ():
            for name, whole in rows.items():
                alone = [single[side][name] for single in singles if name in single[side]]
                if len(alone) == count:
                    words = f"the rows that it adds for {name!r} of {count} data points are not those of each one alone"
                    self._compare_sums(f"{side}s", whole, alone, words)
        for name, rows in together["output"].items():
            shape = self.shapes[name]
            if name in exact and shape.constant_input and shape.output_basis is None:
                its = exact[name].flatten(0, 1).flatten(1).double()[:, None]  # (K N, 1, b)
                words = f"the outer products of the rows that it adds for {name!r} are not those of its gradients, the block being exact"
                self._compare_sums("outputs", rows, [its], words)
        for name, rows in together["input"].items():
            shape = self.shapes[name]
            plain = shape.groups == shape.output_groups and shape.input_basis is None and shape.output_basis is None
            if plain and name in together["output"]:
                self._compare_size(name, rows, together["output"][name], exact[name].double())

    def _compare_sums(self, method: str, rows: Tensor, others: Sequence[Tensor], words: str) -> None:
        """Compare sums of outer products of rows ``(R, G, d)`` by their products with random vectors."""
        vectors = self._drawn(*rows.shape[1:]).double()
        found, *expected = (
            torch.einsum("rgd,rg->gd", each, torch.einsum("rgd,gd->rg", each, vectors)) for each in (rows, *others)
        )
        self.compare(method, found, sum(expected), words)

    def _compare_size(self, name: str, inputs: Tensor, outputs: Tensor, exact: Tensor) -> None:
        """Compare the size of products of rows ``(N T, G, a)`` and ``(K N T, G, b)`` with gradients ``(K, N, G, a, b)``, where these are
        parallel; B is the mean over positions."""
        columns, n = exact.shape[:2]
        positions = len(inputs) // n
        rows = inputs.shape[2] * outputs.shape[2], max(inputs.shape[1], outputs.shape[1])
        others = rows != (exact.shape[3] * exact.shape[4], exact.shape[2])  # rows that are added in a way of their own
        if others or len(inputs) % n or len(outputs) != columns * len(inputs) or not exact.any():
            return
        a, g = inputs.unflatten(0, (n, positions)), outputs.unflatten(0, (columns, n, positions))
        found = torch.einsum("ntgi,kntgj->kngij", a, g) * positions**0.5
        inner, norm = (found * exact).sum(), exact.norm()
        ratio = (inner / norm.square()).item()
        if inner.abs() >= PARALLEL * found.norm() * norm and abs(ratio - 1) > TOLERANCE:
            raise self.error(
                "inputs and outputs",
                f"for {name!r}, the products of positions' input rows and output rows are {ratio:.4g} times the parameter's gradients, "
                "expected 1: a weight of the rows is wrong. A is the sum of the outer products over positions, B their mean",
            )

    def _shown(self, arguments: list[Any], gradient: Tensor) -> dict[str, dict[str, Tensor]] | None:
        """The rows ``(R, G, d)`` of both sides, by parameter, those of B times the roots of their weights, but for rows that are not written
        out; None where the rule cannot say them here."""
        rule = copy.copy(self.rule)
        rule.tied, rule.lent, rule.copies = {}, set(), 1
        call = Call(rule, input_shape=arguments[0].shape)
        pulled = None
        try:
            rule.allocate(UnkeptMoment)
            inputs = self.unchanged("inputs", rule.input_rows, *arguments)
            call.kept = rule.keep(*arguments)
            outputs: dict[str, Rows] = {}
            if rule.has_input_gradient():
                pulled = self.unchanged("vjp", lambda g: rule.backward(g, call, outputs.update, True), gradient)
            else:
                outputs = self.unchanged("outputs", lambda g: rule.output_rows(g, call.kept), gradient)
        except _Contradiction:
            raise
        except Exception:  # it may do in the fit what it cannot do here, as adding to a factor by itself
            return None
        if pulled is not None and arguments[0].is_floating_point():
            expected = self._pulled(arguments, gradient)
            self.compare("vjp", pulled, expected, "it does not return the gradient at the input")
        if self.of_rows or not is_own(type(rule), "jacobians"):
            method, exact = "inputs and outputs" if self.of_rows else "jacobians", self._exact(arguments, gradient)
            with suppress(NotImplementedError):  # of rows that are not written out
                found = self.unchanged(method, rule.jacobians, arguments, gradient)
                for name, jacobian in found.items() if exact is not None else ():
                    words = f"they are not the gradients of single data points in {name!r}"
                    self.compare(method, jacobian.dense(self.shapes[name].groups), exact[name], words)
        return {"input": self._written(inputs, False), "output": self._written(outputs, True)}

    def _written(self, rows: Mapping[str, Rows], outputs: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, side in rows.items():
            constant = self.shapes[name].constant_input
            alpha = 1 / max(side.positions, 1) if outputs and not constant else 1.0
            with suppress(NotImplementedError):
                dense = (side.summed() if outputs and constant else side).dense()
                found[name] = dense.flatten(0, 1).detach().double() * alpha**0.5
        return found

    def _exact(self, arguments: list[Any], gradient: Tensor) -> dict[str, Tensor] | None:
        """Autograd's gradients of single data points, ``(K, N, G, a, b)``; None where the layer alone has none."""
        try:
            found = by_autograd(self.rule.module, self.names, arguments, gradient)
        except Exception:  # whatever a layer raises that is run outside of its network
            return None
        if not all(found[name].isfinite().all() for name in self.names):
            return None  # which is found in the factors
        return {name: self.shapes[name].to_blocks(found[name], 2) for name in self.names}

    def _pulled(self, arguments: list[Any], gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = arguments[0].clone().requires_grad_()
            out = self.rule.module.forward(x, *arguments[1:])
            return torch.stack([torch.autograd.grad(out, x, column, retain_graph=True)[0] for column in gradient])

    def _only(self, n: int) -> list[Any]:
        return [a[n : n + 1] if isinstance(a, Tensor) else a for a in self.arguments]

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu").to(self.out)

    def _named(self, method: str) -> str:
        """The rule's own method of that kind."""
        own = {"inputs": "input_rows", "outputs": "output_rows", "vjp": "input_gradient"}
        rule = self.rule
        if not adds(type(rule)):
            return " and ".join(own.get(m, m) for m in method.split(" and "))
        return "vjp" if method == "outputs" and rule.has_input_gradient() else method

    def error(self, method: str, words: str) -> _Contradiction:
        where = f"{type(self.rule).__name__}.{self._named(method)}"
        return _Contradiction(
            f"fit: {self.rule.label}: {where} contradicts autograd of the layer, on data of the first batch: {words}."
        )


class _LikelihoodCheck(_Check):
    """The comparisons of a likelihood, of outputs ``(N, ...)`` and their targets."""

    def __init__(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
        self.likelihood, self.kind = likelihood, type(likelihood)
        self.outputs, self.f, self.y = outputs, outputs.double(), targets
        # Gradients of torch's losses take one dtype.
        self.wide = targets.double() if targets.is_floating_point() else targets
        rounding = torch.finfo(outputs.dtype).eps
        self.tolerance, self.floor = max(TOLERANCE, 16 * rounding), 8 * rounding
        self.variances = (1.0, 2.0) if likelihood.has_noise else (1.0,)

    @torch.no_grad()
    def run(self) -> None:
        points = range(len(self.f))
        singles = [self._called("log_prob", self.f[n : n + 1], self.wide[n : n + 1]).sum() for n in points]
        total = self._called("log_prob", self.f, self.wide).sum()
        self.compare("log_prob", total, sum(singles), "its sum over data points is not that of each data point alone")
        slope = self._slope(self.f)
        self._check_hessian(slope)
        if not is_own(self.kind, "loss"):
            self._check_loss(slope)
        if self.likelihood.has_noise or not all(is_own(self.kind, m) for m in ("statistic", "log_likelihood")):
            self._check_log_likelihood(total, singles)

    def _slope(self, f: Tensor) -> Tensor:
        """The gradient of the sum of ``log_prob``."""
        with torch.enable_grad():
            leaf = f.clone().requires_grad_()
            total = self.likelihood.log_prob(leaf * 1, self.wide).sum()
            if not total.requires_grad:
                raise self.error("log_prob", "it has no gradient in the outputs; compute it by functions of torch")
            (slope,) = torch.autograd.grad(total, leaf)
        if not slope.isfinite().all():
            raise self.error("log_prob", "its gradient in the outputs is not finite")
        return slope

    def _check_hessian(self, slope: Tensor) -> None:
        """Compare some entries with the Hessian of ``-log_prob``, data points being independent."""
        entries = torch.arange(min(self.f[0].numel(), ENTRIES), device=self.f.device)
        independent, method = isinstance(self.likelihood, IndependentLikelihood), "columns"
        if independent and self.kind.columns is IndependentLikelihood.columns:
            method, second = "second_derivative", self._called("second_derivative", self.f, self.wide)
            if second.shape != self.f.shape:
                raise self.error(
                    method, f"expected the outputs' shape {tuple(self.f.shape)}, got {tuple(second.shape)}"
                )
            found = torch.diag_embed(second.flatten(1)[:, entries].double())
        else:
            found = self._outer_products(entries)
        values, vectors = torch.linalg.eigh(self._hessian(entries))
        floor = self.floor + NOISE * slope.abs().amax()
        bound = self.tolerance * values.abs().amax() + floor
        expected = vectors @ (values.clamp(min=0)[:, :, None] * vectors.mT)
        # Where outputs depend on each other and the Hessian has both signs, there is no such root: any other is believed.
        clear = independent | (values.amin(1) >= -bound) | (values.amax(1) <= bound)
        gaps = (found - expected).flatten(1).norm(dim=1)[clear]
        size = torch.cat([expected, found]).flatten(1).norm(dim=1).amax()
        if not (gaps <= self.tolerance * size + floor).all():
            raise self.error(
                method,
                "it is not the Hessian of -log_prob in the outputs, zero where that is negative: relative difference "
                f"{gaps.amax() / size:.2g}, expected at most {self.tolerance:g}",
            )

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
                raise self.error("columns", f"expected (columns, {tuple(self.f.shape)}), got {tuple(part.shape)}")
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
            self.compare("loss", found.double(), -slope / (len(self.f) * variance), f"{words}{variance:g}")

    def _check_log_likelihood(self, total: Tensor, singles: list[Tensor]) -> None:
        """Compare the sum of ``log_prob``; with noise, up to a normaliser, differences of two data points."""

        def found(f: Tensor, y: Tensor, variance: float) -> Tensor:
            sigma = torch.tensor(variance**0.5, dtype=f.dtype, device=f.device)
            return self.likelihood.log_likelihood(self._called("statistic", f, y), y.numel(), sigma)

        if not self.likelihood.has_noise:
            self.compare("log_likelihood", found(self.f, self.wide, 1.0), total, "it is not the sum of log_prob")
            return
        for variance in self.variances:
            one, other = (found(self.f[n], self.wide[n], variance) for n in (slice(1), slice(-1, None)))
            words = f"the differences of data points are not those of log_prob over sigma^2 = {variance:g}"
            self.compare("log_likelihood", one - other, (singles[0] - singles[-1]) / variance, words)

    def _called(self, method: str, *arguments: Tensor) -> Any:
        return self.unchanged(method, getattr(self.likelihood, method), *arguments)

    def error(self, method: str, words: str) -> _Contradiction:
        return _Contradiction(
            f"fit: {self.kind.__name__}.{method} of the likelihood {self.likelihood!r}, on the first batch: {words}."
        )

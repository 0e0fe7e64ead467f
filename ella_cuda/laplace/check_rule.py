"""Rules of a user's own against autograd of their layers alone, on a few data points before a fit's first batch.

Every honest rule passes. Blocks without an input side are exact, :meth:`Rule.jacobians` and the gradient of :meth:`Rule.vjp` too. The rows
of some data points are those of each alone. Of a gradient that is zero but at one output, one position's rows make the parameter's
gradient: where rows are parallel to it, their size must be its. What is no such product, as an approximation of a user's own, is believed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.batches import Inputs, data_points, plain_tensor, run_model, take, tensors_of
from ella_cuda.laplace.call import Call, Place, arguments_in_order, batch_first
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.one_function import identical
from ella_cuda.laplace.rows import Rows
from ella_cuda.laplace.rules.recorded import adds
from ella_cuda.laplace.second_moment import UnkeptMoment
from ella_cuda.laplace.tangent import by_autograd
from ella_cuda.nn._autocast import full

if TYPE_CHECKING:
    from ella_cuda.laplace.rules.base import Rule

POINTS, PROBES = 5, 3  # data points, and outputs whose gradients are tried one by one
TOLERANCE = 1e-3  # relative
PARALLEL = 1 - 1e-6


def is_own(kind: type) -> bool:
    """Whether a class is the package's."""
    return kind.__module__.partition(".")[0] == "ella_cuda"


def check_rules(model: nn.Module, rules: Sequence[Rule], x: Inputs, places: Mapping[Rule, Sequence[Place]]) -> None:
    """Compare the rules that are not the package's with autograd, at their layers' first calls.

    Args:
        model: in evaluation mode, without hooks of a fit.
        rules: of its layers.
        x: a batch of at least one data point.
        places: of the images in the layers' calls.

    Raises:
        ValueError: a rule contradicts autograd, or changes what it gets; names the class and the method.
    """
    foreign = {r.module: r for r in rules if r in places and not is_own(type(r)) and r.trainable}
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
                batch_first(full(plain_tensor(a).detach()), place)[:POINTS].clone() if isinstance(a, Tensor) else a
                for a in given
            ]
            calls[rule] = arguments, out

    count = data_points(x)
    few = take(x, torch.arange(POINTS, device=tensors_of(x)[0].device) % count)
    with torch.no_grad():
        with hooks(foreign, after=keep, prepend=True, with_kwargs=True):
            run_model(model, few)
        for rule, (arguments, out) in calls.items():
            if out.is_floating_point() and out.isfinite().all():
                _Check(rule, arguments, out).run()


class _Check:
    """One comparison, at a call of the rule's layer with these arguments and output, data points first."""

    def __init__(self, rule: Rule, arguments: list[Any], out: Tensor) -> None:
        self.rule, self.arguments, self.out = rule, arguments, out
        self.names, self.shapes = list(rule.trainable), rule.shapes()
        self.generator = torch.Generator("cpu").manual_seed(0)

    def run(self) -> None:
        count = len(self.out)
        gradient = self._drawn(2, *self.out.shape)
        exact = self._exact(self.arguments, gradient)
        together = self._shown(self.arguments, gradient)
        if exact is None or together is None:
            return
        singles = [self._shown(self._only(n), gradient[:, n : n + 1]) for n in range(count)]
        for side, rows in together.items():
            for name, whole in rows.items():
                alone = [single[side].get(name) for single in singles if single is not None]
                if whole is None or len(alone) < count or any(each is None for each in alone):
                    continue
                vectors = self._drawn(*whole.shape[1:]).double()
                self._compare(
                    f"{side}s",
                    _times(whole, vectors),
                    sum(_times(each, vectors) for each in alone),
                    f"the rows that it adds for {name!r} of {count} data points are not those of each data point alone",
                )
        for name, shape in self.shapes.items():
            rows = together["output"].get(name)
            if rows is not None and name in exact and shape.constant_input and shape.output_basis is None:
                vectors = self._drawn(*rows.shape[1:]).double()
                its = exact[name].flatten(0, 1).flatten(1).double()  # (K N, b)
                self._compare(
                    "outputs",
                    _times(rows, vectors),
                    ((its @ vectors[0]) @ its)[None],
                    f"the outer products of the rows that it adds for {name!r} are not those of its gradients, the block being exact",
                )
        for i in range(PROBES):
            self._probe(i % count)

    def _probe(self, n: int) -> None:
        """The gradient at one output of a data point."""
        unit = torch.zeros_like(self.out[n : n + 1])[None]
        place = int(torch.randint(unit.numel(), (), generator=self.generator, device="cpu"))
        unit.view(-1)[place] = 1
        only = self._only(n)
        found, exact = self._shown(only, unit), self._exact(only, unit)
        if found is None or exact is None:
            return
        for name in self.names:
            shape = self.shapes[name]
            inputs, outputs = found["input"].get(name), found["output"].get(name)
            on_bases = shape.input_basis is not None or shape.output_basis is not None
            if (
                shape.constant_input
                or shape.groups != shape.output_groups
                or on_bases
                or inputs is None
                or outputs is None
            ):
                continue
            if inputs.shape[1] != shape.groups or outputs.shape[1] != shape.groups:
                continue
            there = outputs.flatten(1).any(1)
            m = exact[name][0, 0].double()  # (G, a, b)
            if int(there.sum()) != 1 or not m.any():
                continue
            row = outputs[there][0] * len(outputs) ** 0.5  # B is the mean over positions
            inner = torch.einsum("rga,gab,gb->r", inputs, m, row).abs()
            sizes = torch.einsum("rg,g->r", inputs.square().sum(2), row.square().sum(1)).sqrt()
            norm = m.square().sum().sqrt()
            near = (inner >= PARALLEL * sizes * norm) & (sizes > 0)
            ratios = (sizes / norm)[near]
            words = f"for {name!r}, the product of a position's input row and output row"
            if len(ratios):
                ratio = ratios[(ratios - 1).abs().argmin()].item()
                if abs(ratio - 1) > TOLERANCE:
                    raise self._error(
                        "inputs and outputs",
                        f"{words} is {ratio:.4g} times the parameter's gradient, expected 1: a weight of the rows is wrong. A is the sum of "
                        "the outer products over positions, B their mean",
                    )
            elif len(inputs) == len(outputs) == 1 and self._has_one_position(name, only):
                gap = 1 - (inner / (sizes * norm)).nan_to_num().item()
                raise self._error(
                    "inputs and outputs", f"{words} is not the parameter's gradient: relative difference {gap:.2g}"
                )

    def _has_one_position(self, name: str, only: list[Any]) -> bool:
        """Whether gradients of a data point in a parameter are outer products."""
        exact = self._exact(only, self._drawn(1, 1, *self.out.shape[1:]))
        if exact is None:
            return False
        m = exact[name][0, 0].double()
        one, other = (m @ self._drawn(m.shape[2], 1).double() for _ in range(2))
        inner, sizes = (one * other).sum((1, 2)).abs(), one.flatten(1).norm(dim=1) * other.flatten(1).norm(dim=1)
        return bool((inner >= PARALLEL * sizes).all())

    def _shown(self, arguments: list[Any], gradient: Tensor) -> dict[str, dict[str, Tensor | None]] | None:
        """The rows ``(R, G, d)`` of both sides, by parameter, those of B times the roots of their weights; None of rows that are not written
        out, and in the whole's place where the rule cannot say them here."""
        rule = copy.copy(self.rule)
        rule.tied, rule.lent, rule.copies = {}, set(), 1
        call = Call(rule, input_shape=arguments[0].shape)
        pulled = None
        try:
            rule.allocate(UnkeptMoment)
            inputs = self._unchanged("inputs", rule.input_rows, arguments)
            call.kept = rule.keep(*arguments)
            outputs: dict[str, Rows] = {}
            if rule.has_input_gradient():
                pulled = self._unchanged("vjp", lambda g: rule.backward(g, call, outputs.update, True), [gradient])
            else:
                outputs = self._unchanged("outputs", lambda g: rule.output_rows(g, call.kept), [gradient])
        except _Contradiction:
            raise
        except Exception:  # it may do in the fit what it cannot do here, as adding to a factor by itself
            return None
        x = arguments[0]
        if pulled is not None and x.is_floating_point():
            self._compare(
                "vjp", pulled, self._pulled(arguments, gradient), "it does not return the gradient at the input"
            )
        if not is_own(owner_of(type(rule), "jacobians")):
            found = self._unchanged("jacobians", rule.jacobians, [arguments, gradient])
            exact = self._exact(arguments, gradient)
            for name, jacobian in found.items() if exact is not None else ():
                self._compare(
                    "jacobians",
                    jacobian.dense(self.shapes[name].groups),
                    exact[name],
                    f"they are not the gradients of single data points in {name!r}",
                )
        return {"input": self._written(inputs, False), "output": self._written(outputs, True)}

    def _written(self, rows: Mapping[str, Rows], outputs: bool) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for name, side in rows.items():
            shape, alpha = self.shapes[name], 1.0
            if outputs and shape.constant_input:
                side = side.summed()
            elif outputs:
                alpha = 1 / max(side.positions, 1)
            try:
                found[name] = side.dense().flatten(0, 1).detach().double() * alpha**0.5
            except NotImplementedError:
                found[name] = None
        return found

    def _exact(self, arguments: list[Any], gradient: Tensor) -> dict[str, Tensor] | None:
        """Autograd's gradients of single data points, ``(K, N, G, a, b)``; None where the layer alone has none."""
        try:
            found = by_autograd(self.rule.module, self.names, arguments, gradient)
        except Exception:  # whatever a layer raises that is run outside of its network
            return None
        return {name: self.shapes[name].to_blocks(found[name], 2) for name in self.names}

    def _pulled(self, arguments: list[Any], gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = arguments[0].clone().requires_grad_()
            out = self.rule.module.forward(x, *arguments[1:])
            return torch.stack([torch.autograd.grad(out, x, column, retain_graph=True)[0] for column in gradient])

    def _unchanged(self, method: str, call: Callable[..., Any], arguments: list[Any]) -> Any:
        """What the method returns; it gets copies, and may not change them."""
        given = [copy.deepcopy(a) for a in arguments]
        found = call(*given)
        for one, other in zip(_tensors(given), _tensors(arguments), strict=True):
            if not identical(one, other):
                raise self._error(method, "it changes its arguments in place, which others get too; change a copy")
        return found

    def _only(self, n: int) -> list[Any]:
        return [a[n : n + 1] if isinstance(a, Tensor) else a for a in self.arguments]

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu").to(self.out)

    def _compare(self, method: str, found: Tensor, expected: Tensor, words: str) -> None:
        if found.shape != expected.shape:
            raise self._error(method, f"{words}: expected shape {tuple(expected.shape)}, got {tuple(found.shape)}")
        size, gap = torch.maximum(found.norm(), expected.norm()).item(), (found - expected).norm().item()
        if gap > TOLERANCE * size:
            raise self._error(method, f"{words}: relative difference {gap / size:.2g}, expected at most {TOLERANCE:g}")

    def _named(self, method: str) -> str:
        """The rule's own method of that kind."""
        own = {"inputs": "input_rows", "outputs": "output_rows", "vjp": "input_gradient"}
        rule = self.rule
        if not adds(type(rule)):
            return " and ".join(own.get(m, m) for m in method.split(" and "))
        return "vjp" if method == "outputs" and rule.has_input_gradient() else method

    def _error(self, method: str, words: str) -> ValueError:
        where = f"{type(self.rule).__name__}.{self._named(method)}"
        return _Contradiction(
            f"fit: {self.rule.label}: {where} contradicts autograd of the layer, on data of the first batch: {words}."
        )


class _Contradiction(ValueError):
    """The error of a comparison, beside errors that a rule raises itself."""


def _times(rows: Tensor, vectors: Tensor) -> Tensor:
    """The sum of the outer products of rows ``(R, G, d)``, times vectors ``(G, d)``."""
    return torch.einsum("rgd,rg->gd", rows, torch.einsum("rgd,gd->rg", rows, vectors))


def owner_of(kind: type, method: str) -> type:
    """The class that defines the method."""
    return next(c for c in kind.__mro__ if method in vars(c))


def _tensors(parts: Sequence[Any]) -> list[Tensor]:
    flat = [b for a in parts for b in (a if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size) else [a])]
    return [a for a in flat if isinstance(a, Tensor)]

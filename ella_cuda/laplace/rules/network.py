"""The rules of a whole network: which layer gets which, what serves parameters that none knows, who shares a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.parameters import is_inside
from ella_cuda.laplace.rows import Dense, Diagonal, Rows
from ella_cuda.laplace.rules.base import Rule, rule_for, served

UNKNOWN = ("error", "freeze", "diagonal")


class PerExampleRule(Rule):
    """Named parameters that a module's forward uses in a way no rule knows.

    Parameters without or with one axis, such as FixUp's scales and biases, get their exact GGN block: B = sum over data of g gᵀ, with g
    the gradient of a data point's column. Others get the block's exact diagonal: A has one block of size 1 for every entry, the mean over
    data of the squares of g's entry, and B is the number of data. :mod:`ella_cuda.laplace.per_example` takes these gradients.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str, names: Sequence[str]) -> None:
        self._names = tuple(names)
        super().__init__(module, name, resolution)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in super().parameters().items() if name in self._names}

    @staticmethod
    def is_exact(parameter: Tensor) -> bool:
        """Whether the parameter's whole block is computed, not its diagonal alone."""
        return parameter.dim() < 2

    def shapes(self) -> dict[str, FactorShape]:
        return {
            name: FactorShape.bias(p.numel()) if self.is_exact(p) else FactorShape(p.numel(), 1, 1, 1)
            for name, p in self.parameters().items()
        }

    def sees_calls(self) -> bool:
        return False

    def input_rows(self, *arguments: Any) -> dict[str, Rows]:
        raise NotImplementedError("PerExampleRule takes gradients, not inputs.")

    def output_rows(self, gradient: Tensor, kept: Any) -> dict[str, Rows]:
        raise NotImplementedError("PerExampleRule takes gradients, not inputs.")

    def rows(self, name: str, gradients: Tensor, data_too: bool) -> tuple[Rows | None, Rows | None]:
        """Rows of both sides of a parameter's factor, from the gradients of K columns of N data points, ``(K, N, *parameter.shape)``;
        ``data_too`` of the data points' last columns, with which the points are counted."""
        rows = gradients.reshape(-1, self.module.get_parameter(name).numel())
        if self.shapes()[name].constant_input:
            return None, Dense(rows[:, None, None])
        squares = Diagonal(rows.double().square().sum(0), len(rows))
        count = gradients.shape[1]
        return squares, Diagonal(rows.new_full((1,), count), count) if data_too else None


def rules_for(model: nn.Module, resolution: str, approximation: str = "expand", unknown: str = "error") -> list[Rule]:
    """One rule per module that itself holds trainable parameters. Where all parameters of a module that no rule knows have one axis or none,
    they get their exact blocks, see :class:`PerExampleRule`.

    Args:
        resolution, approximation: see :class:`Rule`.
        unknown: what becomes of a module's parameters that no rule knows where one has more axes. "error" refuses them; "freeze" leaves
            them out, and layers too that a rule refuses; "diagonal" gives those with more axes the exact diagonal of their blocks.

    Raises:
        TypeError, ValueError: as :func:`rule_for`, of all layers in one message; ValueError where every layer has a rule and none of
            these can handle its layer, or two layers share a parameter and their factors do not fit.
    """
    rules: list[Rule] = []
    refusals: list[TypeError | ValueError] = []
    inside: set[nn.Module] = set()  # of layers whose rule has the parameters of these modules too
    for name, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        deep = isinstance(module, nn.MultiheadAttention) and any(p.requires_grad for p in module.parameters())
        if module in inside or not (own or deep):
            continue
        try:
            rule = rule_for(module, name, resolution, approximation)
        except (TypeError, ValueError) as refusal:
            left, refused = own, refusal
        else:
            inside.update(rule.inner_modules())
            left = {n: p for n, p in own.items() if n not in rule.trainable}
            refused = rule.unknown_to_it(left)
            rules.append(rule)
        several_axes = [n for n, p in left.items() if not PerExampleRule.is_exact(p)]
        if left and isinstance(refused, TypeError) and (not several_axes or unknown == "diagonal"):
            rules.append(PerExampleRule(module, name, resolution, list(left)))
        elif left and unknown != "freeze":
            refusals.append(_at_fault(refused, several_axes, left))
    if refusals:
        raise _together(refusals, unknown)
    _tie(rules)
    return rules


def restricted(rules: Sequence[Rule], subset: str | Sequence[str]) -> list[Rule]:
    """The rules of "all" parameters, those of the "last_layer", or those named, of modules for those inside; ValueError where the subset is
    none of these, a name is no parameter's with a rule, or a layer of the subset shares a parameter with another."""
    word = isinstance(subset, str)
    names = list(subset) if isinstance(subset, Iterable) else []
    if not names or (word and subset not in ("all", "last_layer")):
        raise ValueError(
            f"subset_of_weights must be 'all', 'last_layer', or a list of names of parameters or modules, got {subset!r}."
        )
    if word:
        if subset == "all" or not rules:
            return list(rules)
        names = [rules[-1].full_name(name) for name in rules[-1].trainable]
    found = set()
    for rule in rules:
        chosen = [n for n in rule.trainable if any(is_inside(rule.full_name(n), name) for name in names)]
        found.update(name for name in names for n in chosen if is_inside(rule.full_name(n), name))
        if chosen and (rule.tied or rule.lent):
            shared = ", ".join(repr(rule.full_name(n)) for n in (*rule.tied, *sorted(rule.lent)))
            raise ValueError(
                f"subset_of_weights: {rule.label} shares {shared} with another layer; use subset_of_weights='all'."
            )
        rule.trainable = tuple(chosen)
    if lacking := [name for name in names if name not in found]:
        raise ValueError(
            f"subset_of_weights: no parameter with a rule is, or is inside of, {', '.join(map(repr, lacking))}; names are those of "
            "model.named_parameters() and model.named_modules()."
        )
    return [rule for rule in rules if rule.trainable]


def _at_fault(refusal: TypeError | ValueError, names: Sequence[str], of: Sequence[str]) -> TypeError | ValueError:
    """The refusal of a module without a rule; where some of its parameters would have been served, with the names of the others."""
    if not isinstance(refusal, TypeError) or len(names) == len(of):
        return refusal
    words = f" Those with several axes are at fault ({', '.join(names)}): without them in this module, the others get exact blocks."
    return TypeError(str(refusal).removesuffix(served()) + words + served())


def _together(refusals: Sequence[TypeError | ValueError], unknown: str) -> TypeError | ValueError:
    """One error of all."""
    of_types = any(isinstance(refusal, TypeError) for refusal in refusals)
    words = [str(refusal).removesuffix(served()) for refusal in refusals]
    if len(words) > 1:
        words = [f"{len(words)} layers have no curvature rule that serves them:", *(f"- {word}" for word in words)]
    text = "\n".join(words)
    gap = "\n" if len(refusals) > 1 else " "
    if of_types and unknown == "error":
        text += (
            f"{gap}KronLaplace(unknown='freeze') leaves parameters without a rule out of the posterior, unknown='diagonal' gives them the "
            "exact diagonal."
        )
    if any(str(refusal).endswith(served()) for refusal in refusals):
        text += gap + served().strip()
    return (TypeError if of_types else ValueError)(text)


def _tie(rules: Sequence[Rule]) -> None:
    """Have layers that share a parameter share its factor, or say that their factors are to be merged. Gradients of single data points
    are of all uses already: the second module's rule leaves such a parameter to the first's.

    Raises:
        ValueError: the two factors are neither of one shape nor each other's transposes.
    """
    owners: dict[int, list[tuple[Rule, str]]] = {}  # of a parameter, the first layer of each use
    for rule in rules:
        parameters, shapes = rule.parameters(), rule.shapes()
        for name in rule.trainable:
            before, here = owners.setdefault(id(parameters[name]), []), shapes[name]
            alike = [(owner, its_name) for owner, its_name in before if owner.shapes()[its_name] == here]
            if not alike:
                before.append((rule, name))
            owner, its_name = (alike or before)[0]
            if owner is rule:
                continue
            there = owner.shapes()[its_name]
            per_example = [isinstance(r, PerExampleRule) for r in (rule, owner)]
            if all(per_example):
                rule.trainable = tuple(n for n in rule.trainable if n != name)
            elif here == there and not any(per_example):
                rule.tied[name] = owner, its_name
                owner.lent.add(its_name)
            elif any(per_example) or not there.is_transpose_of(here):
                raise ValueError(
                    f"KronLaplace: {rule.full_name(name)!r} and {owner.full_name(its_name)!r} are one tied parameter, and the curvature of "
                    f"the two uses has different blocks ({_sizes(here)} and {_sizes(there)}, inputs x outputs). Give each layer its own "
                    "copy, or freeze it."
                )
            else:
                rule.lent.add(name)
                owner.lent.add(its_name)


def _sizes(shape: FactorShape) -> str:
    return f"{shape.groups} of {shape.inputs} x {shape.outputs}"

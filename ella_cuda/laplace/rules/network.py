"""The rules of a whole network: which layer gets which, what serves parameters that none knows, who shares a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.parameters import is_inside
from ella_cuda.laplace.rows import Diagonal, Rows
from ella_cuda.laplace.rules.base import Rule, rule_for, served

UNKNOWN = ("error", "freeze", "diagonal")
FEW = 0.1  # the share in a model's trainable numbers of those without a rule that get a diagonal unasked


class PerExampleRule(Rule):
    """Named parameters that a module's forward uses in a way no rule knows.

    Parameters with at most one axis longer than one, such as FixUp's scales and biases, layer scales ``(C, 1, 1)`` and class tokens
    ``(1, 1, C)``, get their exact GGN block: B = sum over data of g gᵀ, with g the gradient of a data point's column. Others get the block's
    exact diagonal: A has one block of size 1 for every entry, the mean over data of the squares of g's entry, and B is the number of data.
    :mod:`ella_cuda.laplace.per_example` takes these gradients.
    """

    def __init__(self, module: nn.Module, name: str, resolution: str, names: Sequence[str]) -> None:
        self._names = tuple(names)
        super().__init__(module, name, resolution)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in super().parameters().items() if name in self._names}

    @staticmethod
    def is_exact(parameter: Tensor) -> bool:
        """Whether the parameter's whole block is computed, not its diagonal alone."""
        return sum(size > 1 for size in parameter.shape) < 2

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
        """As :meth:`Rule.rows`; of a diagonal, squares, and the number of data points with their last columns."""
        if self.shapes()[name].constant_input:
            return super().rows(name, gradients, data_too)
        rows = gradients.reshape(-1, self.module.get_parameter(name).numel())
        squares = Diagonal(rows.double().square().sum(0), len(rows))
        count = gradients.shape[1]
        return squares, Diagonal(rows.new_full((1,), count), count) if data_too else None


def rules_for(model: nn.Module, resolution: str, approximation: str = "expand", unknown: str = "error") -> list[Rule]:
    """One rule per module that itself holds trainable parameters. Parameters that no rule knows get exact blocks where all of a module's have
    at most one axis longer than one, else the exact diagonals of their blocks, see :class:`PerExampleRule`.

    Args:
        resolution, approximation: see :class:`Rule`.
        unknown: what becomes of parameters that no rule knows. "error" refuses those with several axes longer than one where these are more
            than a tenth of the trainable numbers; "freeze" leaves these out, those beside them in a module, and layers too that a rule
            refuses; "diagonal" serves them.

    Raises:
        TypeError, ValueError: as :func:`rule_for`, of all layers in one message; ValueError where every layer has a rule and none of
            these can handle its layer, or two layers share a parameter and their factors do not fit.
    """
    rules: list[Rule] = []
    refusals: list[Refusal] = []
    unasked: list[Refusal] = []
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
        if not left:
            continue
        several_axes = [n for n, p in left.items() if not PerExampleRule.is_exact(p)]
        refusal = Refusal(module, name, refused, several_axes)
        if isinstance(refused, TypeError) and not (several_axes and unknown == "freeze"):
            if several_axes and unknown == "error":
                unasked.append(refusal)
            rules.append(PerExampleRule(module, name, resolution, list(left)))
        elif unknown != "freeze":
            refusals.append(refusal)
    count = sum({id(p): p.numel() for r in unasked for p in r.parameters()}.values())
    share = count / max(sum(p.numel() for p in model.parameters() if p.requires_grad), 1)
    if refusals or share > FEW:
        raise _together(refusals + (unasked if share > FEW else []), unknown, share)
    _tie(rules)
    return rules


class Refusal(NamedTuple):
    """A module with parameters that no rule serves.

    Attributes:
        name: its name in the model. error: why. several_axes: the names of its parameters that have several axes longer than one.
    """

    module: nn.Module
    name: str
    error: TypeError | ValueError
    several_axes: list[str]

    def parameters(self) -> list[nn.Parameter]:
        """Those with several axes longer than one."""
        return [self.module.get_parameter(name) for name in self.several_axes]

    def words(self) -> str:
        """The error's text behind the layer's name and class, without the layers that have rules."""
        text, label = str(self.error).removesuffix(served()), f"layer {self.name or '(the model itself)'!r}"
        text = (
            text[len(label) :].removeprefix(f" ({type(self.module).__name__})")
            if text.startswith(label)
            else ": " + text
        )
        own = [n for n, p in self.module.named_parameters(recurse=False) if p.requires_grad]
        if isinstance(self.error, TypeError) and len(self.several_axes) < len(own):
            names = ", ".join(self.several_axes)
            text += f" Those with several axes are at fault ({names}): without them in this module, the others get exact blocks."
        return text


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
                f"subset_of_weights: {rule.label} shares {shared} with another layer. Give this one its own copy, "
                "module.weight = nn.Parameter(module.weight.detach().clone()), or use subset_of_weights='all'."
            )
        rule.trainable = tuple(chosen)
    if lacking := [name for name in names if name not in found]:
        raise ValueError(
            f"subset_of_weights: no parameter with a rule is, or is inside of, {', '.join(map(repr, lacking))}; names are those of "
            "model.named_parameters() and model.named_modules()."
        )
    return [rule for rule in rules if rule.trainable]


def _together(refusals: Sequence[Refusal], unknown: str, share: float) -> TypeError | ValueError:
    """One error of all: what to do, then a line for the layers of a class that are refused alike."""
    of_types = any(isinstance(refusal.error, TypeError) for refusal in refusals)
    alike: dict[tuple[type[nn.Module], str], list[str]] = {}
    for refusal in refusals:
        alike.setdefault((type(refusal.module), refusal.words()), []).append(refusal.name)
    lines = []
    for (kind, words), names in alike.items():
        first, *others = (repr(name or "(the model itself)") for name in names)
        more = f" and {len(others)} more ({', '.join(others[:3])}{', ...' if others[3:] else ''})" if others else ""
        lines.append(f"layer {first} ({kind.__module__}.{kind.__qualname__}){more}{words}")
    text = ""
    if of_types and unknown == "error":
        text = (
            "Pass unknown='diagonal', which gives parameters without a rule the exact diagonal of their blocks, or unknown='freeze', which "
            f"leaves them out of the posterior: {share:.0%} of the trainable numbers have none, and up to {FEW:.0%} get the diagonal "
            "unasked. "
        )
    if len(refusals) > 1:
        text += f"{len(refusals)} layers have no curvature rule that serves them:\n- "
    text += "\n- ".join(lines)
    if any(str(refusal.error).endswith(served()) for refusal in refusals):
        text += ("\n" if len(refusals) > 1 else " ") + served().strip()
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

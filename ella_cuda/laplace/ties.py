"""A weight that one layer uses as another uses its transpose: one factor of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ella_cuda.laplace.factors import FactorShape, KroneckerFactor

if TYPE_CHECKING:
    from ella_cuda.laplace.second_moment import SecondMoment

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule


def by_parameter(rules: Sequence[Rule]) -> dict[str, KroneckerFactor]:
    """The factors of these rules by their parameters' names, which are those of the first layer that has the parameter; merged where two
    layers have one for each other's transpose.
    """
    found: dict[int, tuple[str, KroneckerFactor]] = {}
    taken: set[KroneckerFactor] = set()  # layers that use the weight in one way have one factor
    for rule in rules:
        parameters = rule.parameters()
        for name, factor in rule.factors.items():
            key = id(parameters[name])
            first, before = found.setdefault(key, (rule.full_name(name), factor))
            if before is not factor and factor not in taken:
                found[key] = first, merged(first, before, factor)
            taken.add(factor)
    return dict(found.values())


def merged_shapes(rules: Sequence[Rule]) -> dict[str, FactorShape]:
    """The shapes of the factors that :func:`by_parameter` makes of two, which take memory beside these, by the parameters' names."""
    first: dict[int, tuple[str, FactorShape]] = {}
    found: dict[str, FactorShape] = {}
    for rule in rules:
        parameters, shapes = rule.parameters(), rule.shapes()
        for parameter in rule.trainable:
            shape = shapes[parameter]
            name, before = first.setdefault(id(parameters[parameter]), (rule.full_name(parameter), shape))
            if shape != before:
                found[name] = _whole_shape(before)
    return found


def _whole_shape(shape: FactorShape) -> FactorShape:
    """The shape of the factor as one block."""
    layout = "gab" if shape.layout == "gab" else "gba"
    return FactorShape(1, shape.groups * shape.inputs, shape.outputs, 1, layout=layout)


def merged(name: str, one: KroneckerFactor, other: KroneckerFactor) -> KroneckerFactor:
    r"""A Kronecker product in the place of :math:`A_1 \otimes B_1 + B_2 \otimes A_2`, where the second layer's input side is the first's
    output side: the one whose partial traces are those of the sum,

    .. math::
        (\mathrm{tr} B_1\, A_1 + \mathrm{tr} A_2\, B_2) \otimes (\mathrm{tr} A_1\, B_1 + \mathrm{tr} B_2\, A_2)
        / (\mathrm{tr} A_1 \mathrm{tr} B_1 + \mathrm{tr} A_2 \mathrm{tr} B_2).

    It does not depend on how a layer's scale is shared out between its inputs and its gradients, and is the layer's own where the other
    one has none.
    """
    inputs, outputs = (_whole(m) for m in (one.input_moment, one.output_moment))  # raw sums: A times the number of data
    its_inputs, its_outputs = (_whole(m) for m in (other.input_moment, other.output_moment))
    tr_inputs, tr_outputs, tr_its_inputs, tr_its_outputs = (
        t.trace() for t in (inputs, outputs, its_inputs, its_outputs)
    )
    scale = tr_inputs * tr_outputs + tr_its_inputs * tr_its_outputs
    sides = (
        tr_outputs * inputs + tr_its_inputs * its_outputs,
        (tr_inputs * outputs + tr_its_outputs * its_inputs) / scale.clamp(min=scale.new_tensor(2.0**-1000)),
    )
    moments = []
    for side, total, like, joined in (
        ("input", sides[0], one.input_moment, other.output_moment),
        ("output", sides[1], one.output_moment, other.input_moment),
    ):
        moment = like.clone(f"{name} ({side} side)")
        moment.total, moment.rows = total[None], like.rows + joined.rows
        moments.append(moment)
    factor = KroneckerFactor(_whole_shape(one.shape), *moments)
    factor.n_data = one.n_data
    return factor


def _whole(moment: SecondMoment) -> Tensor:
    """The sum as one block: of several blocks, which are of size 1, their diagonal."""
    return moment.total.flatten().diag() if moment.total.shape[0] > 1 else moment.total[0]

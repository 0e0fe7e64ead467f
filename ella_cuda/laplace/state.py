"""Factors to plain tensors and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ella_cuda.digest import values_digest
from ella_cuda.laplace.factors import FactorShape, KroneckerFactor
from ella_cuda.laplace.rules import Rule
from ella_cuda.laplace.second_moment import SecondMoment

CHECKSUM = "checksum"  # of a state's other entries
NEVER_POSITIVE = ("classification", "regression", "binary", "poisson")  # likelihoods whose statistic is not
ROUNDING = 1e-6  # of a sum's trace: products of float32 rows are summed in float32


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with a digest of its entries, by which :func:`require_checksum` knows it again."""
    return {**state, CHECKSUM: values_digest(state)}


def require_checksum(state: Mapping[str, Any], where: str, what: str) -> dict[str, Any]:
    """The entries without the checksum; ValueError where they are not those that :func:`with_checksum` was given, in words for ``where``
    and ``what``."""
    entries = {key: value for key, value in state.items() if key != CHECKSUM}
    if state.get(CHECKSUM) != values_digest(entries):
        raise ValueError(f"{where}: {CHECKSUM} does not fit the other entries: {what}.")
    return entries


def factors_of(rules: Sequence[Rule]) -> dict[str, KroneckerFactor]:
    """The factors that rules have, by the parameters' names in the rules' layers; that of several layers once."""
    return {r.full_name(name): factor for r in rules for name, factor in r.factors.items() if name not in r.tied}


def save_factors(rules: Sequence[Rule]) -> dict[str, dict[str, Any]]:
    """Parameter name -> raw sums and row counts; ``outputs_of`` names the parameter whose output side it shares, "" if
    its own.
    """
    factors = factors_of(rules)
    lent = [(r.factors[o], r.full_name(o)) for r in rules if r.factors for o in r.output_owners().values()]
    owners = {id(factor.output_moment): name for factor, name in lent}
    saved = {}
    for name, factor in factors.items():
        owner = owners.setdefault(id(factor.output_moment), name)
        inputs, outputs = factor.input_moment, factor.output_moment
        saved[name] = {
            "inputs": None if inputs is None else inputs.total.clone(),
            "input_rows": 0 if inputs is None else inputs.rows,
            "outputs": outputs.total.clone() if owner == name else None,
            "output_rows": outputs.rows,
            "outputs_of": "" if owner == name else owner,
        }
    return saved


def read_factors(
    rules: Sequence[Rule], saved: Mapping[str, Mapping[str, Any]], n_data: int, exactly: bool
) -> dict[str, KroneckerFactor]:
    """The factors that :func:`save_factors` saved, by the names of all parameters of the rules' layers; they are copies. ``exactly``: see
    :func:`require_moment`.

    Raises:
        ValueError: an entry is missing, unknown or does not fit the rules' shapes, or its values are no sum of outer products.
    """
    names = {rule.full_name(parameter) for rule in rules for parameter in rule.trainable if parameter not in rule.tied}
    if not isinstance(saved, Mapping) or saved.keys() != names:
        given = set(saved) if isinstance(saved, Mapping) else set()
        lacking, unknown = sorted(names - given), sorted(map(repr, given - names))
        raise ValueError(
            f"load_state_dict: factors must have one entry per parameter; no factor for {', '.join(map(repr, lacking)) or 'none'}, unknown: "
            f"{', '.join(unknown) or 'none'}."
        )
    loaded: dict[str, KroneckerFactor] = {}
    for rule in rules:
        shapes, shared = rule.shapes(), rule.output_owners()
        for parameter in sorted(rule.trainable, key=shared.__contains__):
            name, like = rule.full_name(parameter), rule.module.get_parameter(parameter)
            if parameter in rule.tied:
                owner_rule, its_name = rule.tied[parameter]
                loaded[name] = loaded[owner_rule.full_name(its_name)]
                continue
            owner = rule.full_name(shared[parameter]) if parameter in shared else ""
            loaded[name] = _read(name, shapes[parameter], like, saved[name], loaded, owner, exactly)
            loaded[name].n_data = n_data
    return loaded


_ENTRIES = ("inputs", "input_rows", "outputs", "output_rows", "outputs_of")


def _read(
    name: str,
    shape: FactorShape,
    like: torch.Tensor,
    entry: Mapping[str, Any],
    loaded: Mapping[str, KroneckerFactor],
    owner: str,
    exactly: bool,
) -> KroneckerFactor:
    """One factor; ``owner`` is the parameter whose output side it may share, "" if none."""
    if not isinstance(entry, Mapping) or set(entry) != set(_ENTRIES):
        got = ", ".join(map(repr, entry)) if isinstance(entry, Mapping) else repr(entry)
        raise ValueError(
            f"load_state_dict: the factor of {name!r} must have the entries {', '.join(_ENTRIES)}, got {got}."
        )
    sharing = entry["outputs_of"]
    if sharing not in ("", owner):
        allowed = f"'' or {owner!r}" if owner else "''"
        raise ValueError(f"load_state_dict: outputs_of of {name!r} must be {allowed}, got {sharing!r}.")
    for absent, key in ((shape.constant_input, "inputs"), (bool(sharing), "outputs")):
        if absent and entry[key] is not None:
            raise ValueError(f"load_state_dict: {key} of {name!r} must be None, got {_described(entry[key])}.")
    inputs = None
    if not shape.constant_input:
        inputs = SecondMoment(shape.groups, shape.row_inputs, like, f"{name} (input side)", shape.input_basis)
        _fill(inputs, entry["inputs"], exactly)
    input_rows = checked_count(f"input_rows of {name!r}", entry["input_rows"])
    output_rows = checked_count(f"output_rows of {name!r}", entry["output_rows"])
    if sharing:
        outputs = loaded[owner].output_moment
    else:
        outputs = SecondMoment(
            shape.output_groups, shape.row_outputs, like, f"{name} (output side)", shape.output_basis
        )
        _fill(outputs, entry["outputs"], exactly)
        outputs.count(output_rows)
    if inputs is not None:
        inputs.count(input_rows)
    return KroneckerFactor(shape, inputs, outputs)


def _fill(moment: SecondMoment, total: Any, exactly: bool) -> None:
    given = checked_tensor(moment.name, total, moment.total.shape)
    require_moment(moment.name, given, exactly)
    moment.total.copy_(given)


def require_moment(name: str, total: torch.Tensor, exactly: bool) -> None:
    """ValueError where ``(..., d, d)`` is no sum of outer products, up to rounding of its trace. ``exactly``: by a Cholesky factorisation
    too, for what has no checksum."""
    diagonal = total.diagonal(dim1=-2, dim2=-1)
    slack = ROUNDING * diagonal.sum(-1) + torch.finfo(total.dtype).tiny
    if (diagonal < 0).any():
        got = "negative numbers on its diagonal"
    elif ((total - total.mT).abs().amax((-2, -1)) > slack).any():
        got = "one that is not symmetric"
    elif exactly and torch.linalg.cholesky_ex(total + torch.diag_embed(slack[..., None].expand_as(diagonal)))[1].any():
        got = "negative eigenvalues"
    else:
        return
    raise ValueError(f"load_state_dict: {name}: expected a sum of outer products, got {got}.")


def checked_tensor(name: str, value: Any, shape: Sequence[int]) -> torch.Tensor:
    """A state's float64 tensor, detached; ValueError where it is none of that shape, or not finite."""
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    if not plain or value.shape != torch.Size(shape) or value.dtype != torch.float64:
        raise ValueError(
            f"load_state_dict: {name}: expected a tensor {tuple(shape)} torch.float64, got {_described(value)}."
        )
    if not value.isfinite().all():
        raise ValueError(f"load_state_dict: {name}: expected finite numbers, got inf or nan.")
    return value.detach()


def checked_count(name: str, value: Any) -> int:
    """A state's number of things; ValueError where it is no integer from 0 to 2^63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"load_state_dict: {name} must be an integer from 0 to 2^63 - 1, got {_described(value)}.")
    return value


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}" + (" without memory" if value.is_meta else "")
    return repr(value)[:100]

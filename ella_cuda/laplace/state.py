"""Factors to plain tensors and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ella_cuda.digest import values_digest
from ella_cuda.laplace.factors import KroneckerFactor

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

CHECKSUM = "checksum"  # of a state's other entries
ENTRIES = ("inputs", "input_rows", "outputs", "output_rows", "outputs_of")  # of a factor
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


def _with_owners(rules: Sequence[Rule]) -> dict[str, tuple[KroneckerFactor, str]]:
    """The factors that rules have, by the parameters' names in the rules' layers, that of several layers once; with the parameter whose
    output side each shares, "" if its own."""
    factors = {r.full_name(name): factor for r in rules for name, factor in r.factors.items() if name not in r.tied}
    lent = [(r.factors[o], r.full_name(o)) for r in rules if r.factors for o in r.output_owners().values()]
    owners = {id(factor.output_moment): name for factor, name in lent}
    found = {}
    for name, factor in factors.items():
        owner = owners.setdefault(id(factor.output_moment), name)
        found[name] = factor, "" if owner == name else owner
    return found


def save_factors(rules: Sequence[Rule]) -> dict[str, dict[str, Any]]:
    """Parameter name -> raw sums and row counts; ``outputs_of`` names the parameter whose output side it shares, "" if its own."""
    saved = {}
    for name, (factor, owner) in _with_owners(rules).items():
        inputs, outputs = factor.input_moment, factor.output_moment
        saved[name] = {
            "inputs": None if inputs is None else inputs.total.clone(),
            "input_rows": 0 if inputs is None else inputs.rows,
            "outputs": None if owner else outputs.total.clone(),
            "output_rows": outputs.rows,
            "outputs_of": owner,
        }
    return saved


def load_factors(rules: Sequence[Rule], saved: Mapping[str, Mapping[str, Any]], exactly: bool) -> None:
    """Allocate the factors of these rules with copies of the sums that :func:`save_factors` saved; ValueError where an entry is missing,
    unknown or does not fit, or is no sum of outer products, see :func:`require_moment`."""
    entries = saved if isinstance(saved, Mapping) else {}
    own = {name for name, entry in entries.items() if isinstance(entry, Mapping) and entry.get("outputs_of") == ""}
    for rule in rules:
        rule.allocate()
        rule.separate_outputs(own)
    factors = _with_owners(rules)
    _require_keys("factors", saved, factors)
    for name, (factor, owner) in factors.items():
        entry = saved[name]
        _require_keys(f"the factor of {name!r}", entry, ENTRIES)
        if entry["outputs_of"] != owner:
            raise ValueError(
                f"load_state_dict: outputs_of of {name!r} must be {owner!r}, or '' where a bias has its own, got {entry['outputs_of']!r}."
            )
        for side, moment in (("input", factor.input_moment), ("output", None if owner else factor.output_moment)):
            total, rows = entry[f"{side}s"], checked_count(f"{side}_rows of {name!r}", entry[f"{side}_rows"])
            if moment is not None:
                moment.total.copy_(checked_tensor(moment.name, total, moment.total.shape))
                require_moment(moment.name, moment.total, exactly)
                moment.count(rows)
            elif total is not None:
                raise ValueError(f"load_state_dict: {side}s of {name!r} must be None, got {_described(total)}.")


def _require_keys(where: str, value: Any, expected: Collection[str]) -> None:
    """ValueError where the value is no mapping of these keys."""
    if not isinstance(value, Mapping) or value.keys() != set(expected):
        wrong = sorted(map(repr, value.keys() ^ set(expected))) if isinstance(value, Mapping) else [_described(value)]
        raise ValueError(
            f"load_state_dict: {where} must have the entries {', '.join(map(repr, expected))}; missing or unknown: {', '.join(wrong)}."
        )


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

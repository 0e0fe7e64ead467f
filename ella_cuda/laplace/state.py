"""Factors to plain tensors and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ella_cuda.digest import values_digest
from ella_cuda.laplace.factors import KroneckerFactor

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule

CHECKSUM = "checksum"  # of a state's other entries


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


def load_factors(rules: Sequence[Rule], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Allocate the factors of these rules with copies of the sums that :func:`save_factors` saved; ValueError where they are of others."""
    own = {name for name, entry in saved.items() if entry["outputs_of"] == ""}
    for rule in rules:
        rule.allocate()
        rule.separate_outputs(own)
    factors = _with_owners(rules)
    if wrong := sorted(factors.keys() ^ saved.keys()):
        raise ValueError(f"load_state_dict: factors are of other parameters than here: {', '.join(wrong)}.")
    for name, (factor, owner) in factors.items():
        for side, moment in (("input", factor.input_moment), ("output", None if owner else factor.output_moment)):
            if moment is not None:
                moment.total.copy_(checked_tensor(moment.name, saved[name][f"{side}s"], moment.total.shape))
                moment.count(saved[name][f"{side}_rows"])


def checked_tensor(name: str, value: Any, shape: Sequence[int]) -> torch.Tensor:
    """A state's tensor; ValueError where it is none of that shape."""
    if not isinstance(value, torch.Tensor) or value.shape != torch.Size(shape):
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        raise ValueError(f"load_state_dict: {name}: expected a tensor {tuple(shape)}, got {got}.")
    return value

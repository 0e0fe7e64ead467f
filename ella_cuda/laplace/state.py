"""Factors to plain tensors and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ella_cuda.laplace.factors import FactorShape, KroneckerFactor
from ella_cuda.laplace.rules import Rule
from ella_cuda.laplace.second_moment import SecondMoment


def save_factors(factors: Mapping[str, KroneckerFactor]) -> dict[str, dict[str, Any]]:
    """Parameter name -> raw sums and row counts; ``outputs_of`` names the parameter whose output side it shares, "" if
    its own.
    """
    owners: dict[int, str] = {}
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


def load_factors(rules: Sequence[Rule], saved: Mapping[str, Mapping[str, Any]], n_data: int) -> None:
    """Give the rules the factors that :func:`save_factors` saved; ValueError, before anything is changed, where they do
    not fit.
    """
    loaded: dict[str, KroneckerFactor] = {}
    for rule in rules:
        for parameter in rule.trainable:
            name, shape, like = rule.full_name(parameter), rule.shapes()[parameter], getattr(rule.module, parameter)
            if name not in saved:
                raise ValueError(f"load_state_dict: the state has no factor for {name!r}.")
            loaded[name] = _load(name, shape, like, saved, loaded, n_data)
    for rule in rules:
        rule.factors = {parameter: loaded[rule.full_name(parameter)] for parameter in rule.trainable}


def _load(
    name: str,
    shape: FactorShape,
    like: torch.Tensor,
    saved: Mapping[str, Mapping[str, Any]],
    loaded: dict[str, KroneckerFactor],
    n_data: int,
) -> KroneckerFactor:
    entry = saved[name]
    inputs = None
    if not shape.constant_input:
        inputs = SecondMoment(shape.groups, shape.row_inputs, like, f"{name} (input side)", shape.input_basis)
        _fill(inputs, entry["inputs"], entry["input_rows"])
    owner = entry["outputs_of"]
    if owner:
        if owner not in loaded:
            raise ValueError(
                f"load_state_dict: {name!r} shares the output side of {owner!r}, which the state does not give before "
                "it."
            )
        outputs = loaded[owner].output_moment
    else:
        outputs = SecondMoment(
            shape.output_groups, shape.row_outputs, like, f"{name} (output side)", shape.output_basis
        )
        _fill(outputs, entry["outputs"], entry["output_rows"])
    factor = KroneckerFactor(shape, inputs, outputs)
    factor.n_data = n_data
    return factor


def _fill(moment: SecondMoment, total: torch.Tensor | None, rows: int) -> None:
    like = moment.total
    if not isinstance(total, torch.Tensor) or total.shape != like.shape or total.dtype != like.dtype:
        got = f"{tuple(total.shape)} {total.dtype}" if isinstance(total, torch.Tensor) else repr(total)
        raise ValueError(
            f"load_state_dict: {moment.name}: expected a tensor {tuple(like.shape)} {like.dtype}, got {got}."
        )
    like.copy_(total)
    moment.count(rows)

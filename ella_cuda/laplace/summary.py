"""Table of what an approximation does with every parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ella_cuda.laplace.rules import PerExampleRule, Rule
from ella_cuda.laplace.ties import merged_shapes

HEAD = ("parameter", "shape", "rule", "input side", "output side", "bytes", "block")
REDUCED = ", reduce"  # what is said of a Kronecker product beside that


def summary(model: nn.Module, rules: Sequence[Rule], columns: str = "") -> str:
    """One line for each parameter tensor of the model: its shape, the rule of its layer, the two sides of its factors as blocks x rows,
    the bytes these take, and whether the block is that of the generalised Gauss-Newton matrix ("exact"), its diagonal ("diagonal"), or a
    Kronecker product in its place, of KFAC-reduce where it says so. A parameter of several layers has a line for each: "that of" names the
    one whose factor it has, "one with" the one with whose factor the layer's is merged. Frozen parameters, and those that are left out,
    have no rule. The last line has the sums, without these.

    Args:
        model: the network.
        rules: of its layers; before a fit they have no factors, and a bias that may have an output side of its own, where its layer meets
            shared positions, is counted so.
        columns: what of the output Hessian's columns the blocks are made of, where that is not all; for the last line.
    """
    lines: dict[int, list[tuple[str, ...]]] = {}
    total = 0
    merges = merged_shapes(rules)
    for rule in rules:
        shapes, shared, parameters = rule.shapes(), rule.output_owners(), rule.parameters()
        for parameter in rule.trainable:
            shape, name = shapes[parameter], rule.full_name(parameter)
            inputs, outputs = (shape.groups, shape.row_inputs), (shape.output_groups, shape.row_outputs)
            owner = shared.get(parameter, "")
            is_shared = bool(owner) and (
                rule.factors[parameter].output_moment is rule.factors[owner].output_moment
                if rule.factors
                else rule.approximation == "reduce"
            )
            if parameter in rule.tied:
                first, its_name = rule.tied[parameter]
                cells = (f"that of {first.full_name(its_name)}", "", "0")
            else:
                sides = ([] if shape.constant_input else [inputs]) + ([] if is_shared else [outputs])
                size = sum(groups * rows**2 for groups, rows in sides) * torch.float64.itemsize
                total += size
                cells = (
                    "-" if shape.constant_input else f"{inputs[0]} x {inputs[1]}",
                    f"that of {rule.full_name(owner)}" if is_shared else f"{outputs[0]} x {outputs[1]}",
                    f"{size:,}",
                )
            diagonal = isinstance(rule, PerExampleRule) and not shape.constant_input
            product = f"Kronecker{REDUCED if rule.approximation == 'reduce' else ''}"
            block = "diagonal" if diagonal else "exact" if shape.constant_input else product
            size_of = str(tuple(parameters[parameter].shape))
            same = lines.setdefault(id(parameters[parameter]), [])
            if same and same[0][0] in merges and parameter not in rule.tied:
                block += f", one with {same[0][0]}"
            same.append((name, size_of, type(rule).__name__, *cells, block))
    total += sum(s.inputs**2 + s.outputs**2 for s in merges.values()) * torch.float64.itemsize
    rows = [HEAD]
    for name, p in model.named_parameters():
        rows += lines.get(
            id(p), [(name, str(tuple(p.shape)), "left out" if p.requires_grad else "frozen", "-", "-", "0", "-")]
        )
    count = sum(p.numel() for p in model.parameters() if id(p) in lines)
    rows.append(("in all", f"{count:,} parameters", "", "", "", f"{total:,}", columns))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

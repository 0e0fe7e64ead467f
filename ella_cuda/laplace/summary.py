"""What an approximation does with every parameter, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ella_cuda.laplace.factors import KroneckerFactor
from ella_cuda.laplace.rules import Rule

HEAD = ("parameter", "shape", "rule", "input side", "output side", "bytes", "block")


def summary(model: nn.Module, rules: Sequence[Rule], factors: Mapping[str, KroneckerFactor]) -> str:
    """One line for each parameter tensor of the model: its shape, the rule of its layer, the two sides of its factors as blocks x rows,
    the bytes these take, and whether the block is that of the generalised Gauss-Newton matrix ("exact") or a Kronecker product in its
    place. Frozen parameters have no rule. The last line has the sums.

    Args:
        model: the network.
        rules: of its layers.
        factors: by parameter; before a fit there are none, and a bias that may have an output side of its own, where its layer meets
            shared positions, is counted so.
    """
    lines: dict[str, tuple[str, ...]] = {}
    total = 0
    for rule in rules:
        shapes, shared = rule.shapes(), rule.shares_outputs()
        for parameter in rule.trainable:
            shape = shapes[parameter]
            inputs, outputs = (shape.groups, shape.row_inputs), (shape.output_groups, shape.row_outputs)
            owner = rule.full_name(shared[parameter]) if parameter in shared else ""
            held = factors.get(rule.full_name(parameter))
            is_shared = bool(owner) and held is not None and held.output_moment is factors[owner].output_moment
            sides = ([] if shape.constant_input else [inputs]) + ([] if is_shared else [outputs])
            size = sum(groups * rows**2 for groups, rows in sides) * torch.float64.itemsize
            total += size
            lines[rule.full_name(parameter)] = (
                type(rule).__name__,
                "-" if shape.constant_input else f"{inputs[0]} x {inputs[1]}",
                f"that of {owner}" if is_shared else f"{outputs[0]} x {outputs[1]}",
                f"{size:,}",
                "exact" if shape.constant_input else "Kronecker",
            )
    rows = [HEAD]
    for name, p in model.named_parameters():
        rows.append((name, str(tuple(p.shape)), *lines.get(name, ("frozen", "-", "-", "0", "-"))))
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows.append(("in all", f"{count:,} parameters", "", "", "", f"{total:,}", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

"""What the summary says of every parameter."""

from __future__ import annotations

import torch
from torch import nn

from ella_cuda.laplace import KronLaplace


def network() -> nn.Sequential:
    layers = nn.Embedding(7, 2), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
    model = nn.Sequential(*layers)
    model[5].bias.requires_grad_(False)
    return model


def test_every_parameter_has_a_line():
    model = network()
    la = KronLaplace(model)
    before = la.summary()
    lines = [line.split("  ") for line in before.splitlines()]
    table = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert list(table) == ["parameter", *dict(model.named_parameters()), "in all"]
    assert table["0.weight"] == ["(7, 2)", "EmbeddingRule", "7 x 1", "1 x 2", "88", "Kronecker"]
    assert table["2.weight"] == ["(6,)", "BatchNormRule", "-", "1 x 6", "288", "exact"]
    assert table["3.weight"] == ["(4, 6)", "LinearRule", "1 x 6", "1 x 4", "416", "Kronecker"]
    assert table["3.bias"] == ["(4,)", "LinearRule", "-", "1 x 4", "128", "exact"]
    assert table["5.weight"] == ["(3, 4)", "LinearRule", "1 x 4", "1 x 3", "200", "Kronecker"]
    assert table["5.bias"] == ["(3,)", "frozen", "-", "-", "0", "-"]
    assert table["in all"] == ["66 parameters", "1,408"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 66
    la.fit([(torch.randint(7, (5, 3)), torch.randint(3, (5,)))])
    assert before != la.summary()
    (bias,) = (line for line in la.summary().splitlines() if line.startswith("3.bias"))
    assert " ".join(bias.split()).endswith("- that of 3.weight 0 exact")
    assert la.summary().splitlines()[-1].split()[-1] == "1,280"
    held = {id(m): m.total for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    assert sum(t.numel() * t.element_size() for t in held.values()) == 1280


def test_a_bias_of_shared_positions_has_a_side_of_its_own():
    la = KronLaplace(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)))
    la.fit([(torch.randn(6, 3, 4), torch.randint(2, (6,)))])
    held = {id(m): m.total for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    assert la.summary().splitlines()[-1].split()[-1] == f"{sum(t.numel() * 8 for t in held.values()):,}"
    line = next(line for line in la.summary().splitlines() if line.startswith("0.bias"))
    assert line.split()[-3:] == ["5", "200", "exact"]


def test_the_last_line_says_which_columns_are_left_out():
    def last(**settings: object) -> str:
        return KronLaplace(network(), **settings).summary().splitlines()[-1]

    assert last().endswith("1,408")
    assert last(fisher="mc").endswith("1,408  of one sampled column")
    assert last(column_tolerance=0.05).endswith("1,408  without 0.05 of the Hessian's trace")

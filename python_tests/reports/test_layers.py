"""Effective parameters by path, against KronLaplace's own account and by hand."""

from __future__ import annotations

import pytest
import torch

from ella_cuda.laplace import KronLaplace
from ella_cuda.models import neyshabur
from ella_cuda.reports import describe_layers, layer_table, layout
from python_tests.reports.rows import row

TWO_PATHS = {
    "layers": [{"name": "l", "paths": {"a": {"weight": 8, "bias": 2}, "b": {"weight": 5}}}],
    "others": {"head.weight": 3},
}
PRECISION = {"l.a.weight": 1.0, "l.a.bias": 2.0, "l.b.weight": 3.0, "head.weight": 4.0}


def test_shares_by_hand():
    gamma = {"l.a.weight": 2.5, "l.a.bias": 0.5, "l.b.weight": 1.0, "head.weight": 2.0}
    (layer,), others = describe_layers(TWO_PATHS, PRECISION, gamma)
    assert layer["type"] == "a"
    assert layer["paths"]["a"] == {
        "prior_precision": {"weight": 1.0, "bias": 2.0},
        "parameters": 10,
        "effective_parameters": 3.0,
        "relative_effective_parameters": 0.75,
    }
    assert layer["paths"]["b"]["relative_effective_parameters"] == 0.25
    assert others == {"head.weight": {"prior_precision": 4.0, "parameters": 3, "effective_parameters": 2.0}}


def test_without_curvature_there_are_precisions_only():
    (layer,), others = describe_layers(TWO_PATHS, PRECISION, None)
    assert layer["type"] is None
    assert layer["paths"]["b"]["prior_precision"] == {"weight": 3.0}
    assert layer["paths"]["b"]["effective_parameters"] is None
    assert others["head.weight"]["effective_parameters"] is None


def test_the_norm_of_a_path_is_that_of_all_its_parameters():
    """The table has it beside γ/P, as the paper's Table 4."""
    norms = {"l.a.weight": 3.0, "l.a.bias": 4.0, "l.b.weight": 0.5, "head.weight": 9.0}
    gamma = {"l.a.weight": 2.5, "l.a.bias": 0.5, "l.b.weight": 1.0, "head.weight": 2.0}
    layers, others = describe_layers(TWO_PATHS, PRECISION, gamma, weight_norm=norms)
    assert {path: one["weight_norm"] for path, one in layers[0]["paths"].items()} == {"a": 5.0, "b": 0.5}
    lines = layer_table([row() | {"layers": layers, "other_parameters": others}]).splitlines()
    assert lines[1].split()[5:8] == ["of", "γ/P", "norm"]
    assert lines[2].split()[6:9] == ["10", "0.300", "5.00"]


@pytest.mark.parametrize(("of_b", "kind"), [(0.49, None), (0.5, "a"), (0.51, "b")])
def test_a_type_needs_one_effective_parameter_in_all(of_b, kind):
    gamma = {"l.a.weight": 0.3, "l.a.bias": 0.2, "l.b.weight": of_b, "head.weight": 2.0}
    (layer,), _ = describe_layers(TWO_PATHS, PRECISION, gamma)
    assert layer["type"] == kind
    assert layer["paths"]["b"]["relative_effective_parameters"] == pytest.approx(of_b / (0.5 + of_b))


def test_every_parameter_is_in_the_layout_once():
    model = neyshabur("f_fc+conv", 1, 4, width=1)
    found = layout(model)
    assert [la["name"] for la in found["layers"]] == [f"blocks.{i}" for i in range(8)]
    counts = [n for la in found["layers"] for path in la["paths"].values() for n in path.values()]
    assert sum(counts) + sum(found["others"].values()) == sum(p.numel() for p in model.parameters())
    assert set(found["others"]) == {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}
    assert found["layers"][1]["paths"]["conv"] == {"0.weight": 18, "0.bias": 2}


def test_shares_and_types_are_kron_laplaces():
    model = neyshabur("f_fc+conv", 1, 3, width=1)
    x, y = torch.randn(6, 1, 32, 32), torch.randint(0, 3, (6,))
    la = KronLaplace(model, prior_precision=0.1).fit([(x, y)])
    precision = dict(zip(la.parameter_names, la.prior_precision.tolist(), strict=True))
    layers, _ = describe_layers(layout(model), precision, la.effective_parameters())
    gammas, types = la.effective_parameters(), la.layer_types()
    assert len(layers) == len(types) == 8
    for layer in layers:
        assert (layer["type"] or "none") == types[layer["name"]]
        of_layer = sum(gamma for name, gamma in gammas.items() if name.startswith(f"{layer['name']}."))
        for path, entry in layer["paths"].items():
            of_path = sum(gamma for name, gamma in gammas.items() if name.startswith(f"{layer['name']}.{path}."))
            assert entry["relative_effective_parameters"] == pytest.approx(of_path / of_layer)


def test_the_table_has_a_line_for_each_layer_and_path():
    lines = layer_table([row()]).splitlines()
    assert lines[0] == "digits, task digit, F-FC+CONV, evidence, seed 0"
    assert len(lines) == 2 + 2 * 3 + 1
    assert lines[2].split() == [
        "blocks.0",
        "CONV",
        "F-FC",
        "20.0",
        "%",
        "20.0",
        "1,234",
        "0.0162",
        "-",
        "weight",
        "1.00,",
        "bias",
        "0.250",
    ]
    assert lines[3].split()[:3] == ["CONV", "80.0", "%"]
    assert lines[6].split()[:3] == ["blocks.2", "F-FC", "F-FC"]
    assert lines[8].split() == ["head.bias", "4.00", "10", "0.400", "0.500"]


def test_lengthscales_stand_beside_the_precisions():
    one = row(layer="s_fc", learn="lengthscales")
    for entry in one["layers"]:
        entry["paths"]["s_fc"]["inverse_lengthscale"] = {"basis_in": 0.25, "basis_out": 1.0}
    lines = layer_table([one]).splitlines()
    assert lines[0] == "digits, task digit, S-FC, lengthscales, evidence, seed 0"
    assert lines[1].rstrip().endswith("prior precision; inverse lengthscale per pixel")
    assert "weight 1.00, bias 0.250; basis_in 0.250, basis_out 1.00" in lines[2]

"""Untrained networks, to draw their weights."""

from __future__ import annotations

import torch

from ella_cuda.models import neyshabur
from ella_cuda.reports import describe_layers, layout
from ella_cuda.reports.weights import spatial_weights
from python_tests.reports.rows import row


def network(layer: str, **options) -> tuple[torch.nn.Module, dict]:
    """An untrained network and a row with its layers."""
    model = neyshabur(layer, 1, 4, width=2, **options)
    precision = {name: 1.0 for name, _ in model.named_parameters()}
    layers, others = describe_layers(layout(model), precision, None)
    return model, row() | {"layer": layer, "layers": layers, "other_parameters": others}


def read(layer: str, **options):
    """The same with its spatial weights."""
    model, made = network(layer, **options)
    kind = options.get("basis", "interpolating")
    return model, made, spatial_weights(made["layers"], model.state_dict(), kind)

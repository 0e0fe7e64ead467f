"""Type of a layer of several paths, by its effective parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from ella_cuda.nn import RelaxedEquivariance

# Below this many in all, the data determine less than a single one of the layer's parameters: it does nothing that a type could name.
MIN_EFFECTIVE_PARAMETERS = 1.0


def layer_type(effective_parameters: Mapping[str, float]) -> str | None:
    r"""The path with the most effective parameters, the first of equals; None where all paths together have fewer than one.

    Args:
        effective_parameters: :math:`\gamma` by path.

    Source: van der Ouderaa et al., NeurIPS 2023, section 5.2 (the type); MacKay, "Bayesian interpolation", 1992 (:math:`\gamma` as the
    number of parameters that the data determine).
    """
    if not math.fsum(effective_parameters.values()) >= MIN_EFFECTIVE_PARAMETERS:
        return None
    return max(effective_parameters, key=lambda path: effective_parameters[path])


def effective_by_path(model: nn.Module, effective_parameters: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Name of every :class:`ella_cuda.nn.RelaxedEquivariance` of the model -> path -> its effective parameters, the sum over those by
    parameter name."""
    return {
        layer: {
            path: math.fsum(
                gamma
                for name, gamma in effective_parameters.items()
                if name.startswith(f"{layer}.{path}.".removeprefix("."))
            )
            for path in module.path_names
        }
        for layer, module in model.named_modules()
        if isinstance(module, RelaxedEquivariance)
    }

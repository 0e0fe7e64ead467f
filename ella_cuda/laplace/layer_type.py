"""Type of a layer of several paths, by its effective parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

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

"""Arguments that symmetric_eigenvalues refuses; ``python_tests/laplace/test_eigenvalues.py`` tests its values."""

from __future__ import annotations

import torch

from python_tests.ops import checks

OPERANDS = {
    "symmetric_eigenvalues": checks.Operands([("G d d", torch.float64)], ([4], [0.0]), contiguous=True, listed=True),
}
REFUSALS = [
    ("symmetric_eigenvalues", [("1 2 3", torch.float64)], ([2], [0.0]), "(G, d, d) = (1, 2, 2), got (1, 2, 3)"),
    ("symmetric_eigenvalues", [("1 2 2", torch.float64)], ([2, 2], [0.0]), "as sets (1), or none, got 2 and 1"),
]

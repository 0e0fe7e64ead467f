"""Arguments that symmetric_eigenvalues refuses; ``python_tests/laplace/test_eigenvalues.py`` tests its values."""

from __future__ import annotations

import torch

from python_tests.ops import checks

OPERANDS = {"symmetric_eigenvalues": checks.Operands([("E", torch.float64)], ([1], [3]), contiguous=True)}
REFUSALS = [
    ("symmetric_eigenvalues", [("4", torch.float64)], ([1, 1], [2]), "as many entries as rows (1), got 2"),
    ("symmetric_eigenvalues", [("4", torch.float64)], ([1], [1025]), "rows must be from 0 to 1024, got 1025"),
    ("symmetric_eigenvalues", [("4", torch.float64)], ([1], [-2]), "rows must be from 0 to 1024, got -2"),
    ("symmetric_eigenvalues", [("4", torch.float64)], ([-1], [2]), "groups must be from 0 to 2^53, got -1"),
    ("symmetric_eigenvalues", [("4", torch.float64)], ([2], [2]), "sum(groups * rows^2) entries, got fewer (4)"),
    ("symmetric_eigenvalues", [("5", torch.float64)], ([1], [2]), "sum(groups * rows^2) entries, got more (5)"),
]

"""Experiments on shallow networks whose filters are averaged over learned transformations.

Source: van der Ouderaa and van der Wilk, "Learning invariant weights in neural networks", UAI 2022; van der Wilk, "Learnable inductive
biases in neural networks", 2022. Neither publishes code, and settings are this package's own.
"""

from ella_cuda.papers.filter_banks.parts import EXPERIMENT

__all__ = ["EXPERIMENT"]

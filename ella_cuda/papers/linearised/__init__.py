"""Experiments on the evidence of linearised networks: at the network's weights, and at the linear model's mode.

Source: Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022.
"""

from ella_cuda.papers.linearised.parts import EXPERIMENT

__all__ = ["EXPERIMENT"]

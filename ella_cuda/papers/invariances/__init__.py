"""Experiments on learned invariances: how much of a transformation a network should average over, learned by the evidence.

Source: Immer, van der Ouderaa et al., "Invariance learning in deep neural networks with differentiable Laplace approximations", NeurIPS
2022.
"""

from ella_cuda.papers.invariances.parts import EXPERIMENT

__all__ = ["EXPERIMENT"]

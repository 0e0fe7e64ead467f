"""Experiments on tomography by a deep image prior with error bars.

Source: Antoran, Barbano, Leuschner, Hernandez-Lobato, Jin, "Uncertainty estimation for computed tomography with a linearised deep image
prior", TMLR 2023.
"""

from ella_cuda.papers.tomography.parts import EXPERIMENT

__all__ = ["EXPERIMENT"]

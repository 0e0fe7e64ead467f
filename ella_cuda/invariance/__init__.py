"""Shallow networks with learned invariances: filter banks averaged over transformations, and the multi-sample bound that learns amounts."""

from ella_cuda.invariance.bayesian_linear import BayesianLinear
from ella_cuda.invariance.bound import multisample_elbo
from ella_cuda.invariance.filter_bank import InvariantFilterBank
from ella_cuda.invariance.shallow import ShallowNetwork
from ella_cuda.invariance.trainer import ElboTrainer

__all__ = ["BayesianLinear", "ElboTrainer", "InvariantFilterBank", "ShallowNetwork", "multisample_elbo"]

"""Kronecker-factored curvature with exact block structure, and the Laplace evidence on it."""

from ella_cuda.laplace.exact import exact_log_marginal_likelihood
from ella_cuda.laplace.factors import FactorShape, KroneckerFactor
from ella_cuda.laplace.kron import KronLaplace
from ella_cuda.laplace.likelihoods import IndependentLikelihood, Likelihood, register_likelihood
from ella_cuda.laplace.rules import Rule, register
from ella_cuda.laplace.second_moment import SecondMoment

__all__ = [
    "FactorShape",
    "IndependentLikelihood",
    "KronLaplace",
    "KroneckerFactor",
    "Likelihood",
    "Rule",
    "SecondMoment",
    "exact_log_marginal_likelihood",
    "register",
    "register_likelihood",
]

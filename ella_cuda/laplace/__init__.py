"""Kronecker-factored curvature with exact block structure, and the Laplace evidence on it."""

from ella_cuda.laplace.evidence import evidence_bound
from ella_cuda.laplace.exact_ggn import (
    DiagLaplace,
    FullLaplace,
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    NTKLaplace,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetLaplace,
    SubnetMask,
)
from ella_cuda.laplace.factors import FactorShape, KroneckerFactor
from ella_cuda.laplace.hypergradients import evidence_gradient, exact_log_marginal_likelihood
from ella_cuda.laplace.kron import KronLaplace
from ella_cuda.laplace.likelihoods import IndependentLikelihood, Likelihood, register_likelihood
from ella_cuda.laplace.prior_structure import prior_groups
from ella_cuda.laplace.rows import Dense, Patches, Rows
from ella_cuda.laplace.rules import Rule, register
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.laplace.tangent_model import TangentModel

__all__ = [
    "Dense",
    "DiagLaplace",
    "FactorShape",
    "FullLaplace",
    "IndependentLikelihood",
    "KronLaplace",
    "KroneckerFactor",
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LastLayerSubnetMask",
    "Likelihood",
    "ModuleNameSubnetMask",
    "NTKLaplace",
    "ParamNameSubnetMask",
    "Patches",
    "RandomSubnetMask",
    "Rows",
    "Rule",
    "SecondMoment",
    "SubnetLaplace",
    "SubnetMask",
    "TangentModel",
    "evidence_bound",
    "evidence_gradient",
    "exact_log_marginal_likelihood",
    "prior_groups",
    "register",
    "register_likelihood",
]

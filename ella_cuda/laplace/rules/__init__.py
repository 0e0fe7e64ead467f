"""Curvature rules of layers: one :class:`Rule` per type, found by :func:`register`."""

from ella_cuda.laplace.rules.attention import MultiheadAttentionRule
from ella_cuda.laplace.rules.base import Rule, register, rule_for
from ella_cuda.laplace.rules.conv import Conv2dRule, SparseConv2dRule, StridedCircularConv2dRule
from ella_cuda.laplace.rules.conv_nd import ConvNdRule, ConvTransposeRule, GroupFilter2dRule
from ella_cuda.laplace.rules.factored import FactoredLinear2dRule, SparseFactoredLinear2dRule
from ella_cuda.laplace.rules.linear import BilinearRule, Conv1DRule, EmbeddingBagRule, EmbeddingRule, LinearRule
from ella_cuda.laplace.rules.network import UNKNOWN, PerExampleRule, restricted, rules_for
from ella_cuda.laplace.rules.norm import (
    BatchNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    PReLURule,
    RMSNormRule,
)

__all__ = [
    "UNKNOWN",
    "BatchNormRule",
    "BilinearRule",
    "Conv1DRule",
    "Conv2dRule",
    "ConvNdRule",
    "ConvTransposeRule",
    "EmbeddingBagRule",
    "EmbeddingRule",
    "FactoredLinear2dRule",
    "GroupFilter2dRule",
    "GroupNormRule",
    "InstanceNormRule",
    "LayerNormRule",
    "LinearRule",
    "MultiheadAttentionRule",
    "PReLURule",
    "PerExampleRule",
    "RMSNormRule",
    "Rule",
    "SparseConv2dRule",
    "SparseFactoredLinear2dRule",
    "StridedCircularConv2dRule",
    "register",
    "restricted",
    "rule_for",
    "rules_for",
]

"""Functions on tensors, each a compiled op with CPU and CUDA kernels and a plain-torch reference (``<name>_torch``) of the same signature;
:func:`basis_matrix`, which is as small as a weight, and :func:`factored_linear_vjp` are plain torch themselves."""

from ella_cuda.ops.affine_copies import affine_copies, affine_copies_torch
from ella_cuda.ops.averaged_filters import averaged_filters, averaged_filters_torch
from ella_cuda.ops.basis import basis_matrix, basis_project, basis_project_torch
from ella_cuda.ops.circular_conv2d import circular_conv2d, circular_conv2d_torch
from ella_cuda.ops.circular_conv2d_pool import circular_conv2d_pool, circular_conv2d_pool_torch
from ella_cuda.ops.circular_pad2d import circular_pad2d, circular_pad2d_torch
from ella_cuda.ops.conv_kron_accumulate import conv_kron_accumulate_, conv_kron_accumulate_torch_
from ella_cuda.ops.factored_linear import factored_linear, factored_linear_torch
from ella_cuda.ops.factored_linear_vjp import factored_linear_vjp
from ella_cuda.ops.kron_accumulate import kron_accumulate_, kron_accumulate_torch_
from ella_cuda.ops.kron_evidence import (
    KronEvidence,
    KronSpectra,
    kron_evidence,
    kron_evidence_torch,
    pack_spectra,
)
from ella_cuda.ops.kron_logdet import kron_logdet, kron_logdet_torch
from ella_cuda.ops.kron_variance import kron_variance_, kron_variance_torch_
from ella_cuda.ops.polyphase_pool import polyphase_pool, polyphase_pool_torch

__all__ = [
    "KronEvidence",
    "KronSpectra",
    "affine_copies",
    "affine_copies_torch",
    "averaged_filters",
    "averaged_filters_torch",
    "basis_matrix",
    "basis_project",
    "basis_project_torch",
    "circular_conv2d",
    "circular_conv2d_pool",
    "circular_conv2d_pool_torch",
    "circular_conv2d_torch",
    "circular_pad2d",
    "circular_pad2d_torch",
    "conv_kron_accumulate_",
    "conv_kron_accumulate_torch_",
    "factored_linear",
    "factored_linear_torch",
    "factored_linear_vjp",
    "kron_accumulate_",
    "kron_accumulate_torch_",
    "kron_evidence",
    "kron_evidence_torch",
    "kron_logdet",
    "kron_logdet_torch",
    "kron_variance_",
    "kron_variance_torch_",
    "pack_spectra",
    "polyphase_pool",
    "polyphase_pool_torch",
]

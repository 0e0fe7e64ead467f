"""Learn layer-wise equivariance from training data: relaxed layers, block-Kronecker Laplace evidence, compiled CPU and CUDA kernels."""

from ella_cuda._extension import build_info
from ella_cuda import models, nn, ops

__version__ = build_info()["version"]
__all__ = ["build_info", "models", "nn", "ops"]

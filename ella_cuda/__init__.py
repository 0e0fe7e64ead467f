"""Learn layer-wise equivariance from training data: relaxed layers, block-Kronecker Laplace evidence, compiled CPU and CUDA kernels."""

from ella_cuda import augment, data, groups, invariance, laplace, models, nn, ops, tomography
from ella_cuda._extension import build_info
from ella_cuda.compaction import compact
from ella_cuda.training import marglik_training

__version__ = build_info()["version"]
__all__ = [
    "augment",
    "build_info",
    "compact",
    "data",
    "groups",
    "invariance",
    "laplace",
    "marglik_training",
    "models",
    "nn",
    "ops",
    "tomography",
]

"""Layers that hold, relax or learn a symmetry."""

from ella_cuda.nn.basis import SpatialBasis
from ella_cuda.nn.circular_conv import CircularConv2d
from ella_cuda.nn.factored import FactoredLinear2d
from ella_cuda.nn.fully_connected import FullyConnected2d
from ella_cuda.nn.group_conv import GroupConv2d, GroupFilter2d
from ella_cuda.nn.group_layers import (
    GroupFactoredLinear2d,
    GroupLift,
    GroupMaxPool,
    GroupPolyphasePool2d,
    SlicesAsChannels,
)
from ella_cuda.nn.pooling import PolyphasePool2d
from ella_cuda.nn.relaxed import RelaxedEquivariance
from ella_cuda.nn.sparse import SparseConv2d, SparseFactoredLinear2d
from ella_cuda.nn.strided_conv import StridedCircularConv2d

__all__ = [
    "CircularConv2d",
    "FactoredLinear2d",
    "FullyConnected2d",
    "GroupConv2d",
    "GroupFactoredLinear2d",
    "GroupFilter2d",
    "GroupLift",
    "GroupMaxPool",
    "GroupPolyphasePool2d",
    "PolyphasePool2d",
    "RelaxedEquivariance",
    "SlicesAsChannels",
    "SparseConv2d",
    "SparseFactoredLinear2d",
    "SpatialBasis",
    "StridedCircularConv2d",
]

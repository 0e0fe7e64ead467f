"""Every layer, small: what makes it, given a device and a dtype too where it has parameters, and the shape of its input."""

from __future__ import annotations

from functools import partial

from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    FullyConnected2d,
    GroupConv2d,
    GroupFactoredLinear2d,
    GroupLift,
    GroupMaxPool,
    GroupPolyphasePool2d,
    PolyphasePool2d,
    SlicesAsChannels,
    SparseConv2d,
    SparseFactoredLinear2d,
    StridedCircularConv2d,
)

IMAGES, FEATURES = (3, 2, 4, 4), (3, 2, 4, 4, 4)
WITH_PARAMETERS = {
    "FactoredLinear2d": (partial(FactoredLinear2d, 2, 3, 4, 2), IMAGES),
    "FullyConnected2d": (partial(FullyConnected2d, 2, 3, 4, 2), IMAGES),
    "CircularConv2d": (partial(CircularConv2d, 2, 3), IMAGES),
    "StridedCircularConv2d": (partial(StridedCircularConv2d, 2, 3), IMAGES),
    "SparseFactoredLinear2d": (partial(SparseFactoredLinear2d, 2, 3, 4, 2), IMAGES),
    "SparseFactoredLinear2d, exponential": (partial(SparseFactoredLinear2d, 2, 3, 4, 2, basis="exponential"), IMAGES),
    "SparseConv2d": (partial(SparseConv2d, 2, 3), IMAGES),
    "GroupConv2d": (partial(GroupConv2d, 2, 3), FEATURES),
    "GroupConv2d, separable": (partial(GroupConv2d, 2, 3, variant="separable"), FEATURES),
    "GroupConv2d, depth-wise separable": (partial(GroupConv2d, 2, 3, variant="depthwise_separable"), FEATURES),
    "GroupFactoredLinear2d": (partial(GroupFactoredLinear2d, 2, 3, 4, 2), FEATURES),
}
OTHERS = {
    "PolyphasePool2d": (PolyphasePool2d, IMAGES),
    "GroupLift": (GroupLift, IMAGES),
    "GroupMaxPool": (GroupMaxPool, FEATURES),
    "GroupPolyphasePool2d": (GroupPolyphasePool2d, FEATURES),
    "SlicesAsChannels": (lambda: SlicesAsChannels(CircularConv2d(8, 12), frames="common"), FEATURES),
}

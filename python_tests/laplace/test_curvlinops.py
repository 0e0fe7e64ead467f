"""Agreement with the KFAC of curvlinops, expanded and reduced.

Where its blocks are others than ours, the dense generalised Gauss-Newton matrix says which are right: biases, whose block it takes
from the weight's output factor; convolutions in groups, whose patches it averages over groups; and padding that is not with zeros,
which it takes for zeros.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace

curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)

both = pytest.mark.parametrize("approximation", ["expand", "reduce"])
N, CLASSES = 7, 3


def their_blocks(model: nn.Module, batches: list[tuple[Tensor, Tensor]], approximation: str) -> dict[str, Tensor]:
    """Parameter name -> the diagonal block, in flatten order, of the sum over data."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    operator = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        list(parameters.values()),
        batches,
        check_deterministic=False,
        fisher_type="type-2",
        kfac_approx=approximation,
    )
    count = sum(p.numel() for p in parameters.values())
    whole = operator @ torch.eye(count, dtype=torch.float64)
    blocks, begin = {}, 0
    for name, p in parameters.items():
        blocks[name] = whole[begin : begin + p.numel(), begin : begin + p.numel()].detach()
        begin += p.numel()
    return blocks


def our_blocks(model: nn.Module, batches: list[tuple[Tensor, Tensor]], approximation: str) -> dict[str, Tensor]:
    """The same, of layers whose weights are ``(output, input...)`` with one block for each group of outputs."""
    blocks = {}
    for name, factor in KronLaplace(model, approximation=approximation).fit(batches).factors.items():
        of_groups = [torch.kron(b, a) for a, b in zip(factor.inputs, factor.outputs, strict=True)]
        blocks[name] = torch.block_diag(*of_groups)
    return blocks


def close(actual: Tensor, expected: Tensor) -> None:
    # The keys' gradients sum to zero over positions, up to rounding: a softmax does not see what is added to all of them.
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12 * expected.abs().max().item() + 1e-18)


class Positions(nn.Module):
    """The mean of positions, or all of them, as features."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) if self.mean else x.flatten(1)


class Attention(nn.Module):
    """Softmax attention of two heads, from linear layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    """Patches by a convolution, one layer of attention and one of two linear maps with norms before them, mean pooling."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(2, size, 2, stride=2), Attention(size)
        self.before, self.between = nn.LayerNorm(size, elementwise_affine=False), nn.LayerNorm(size)
        self.between.requires_grad_(False)
        self.mlp = nn.Sequential(nn.Linear(size, 5), nn.GELU(), nn.Linear(5, size))
        self.head = nn.Linear(size, CLASSES)
        self.register_buffer("places", torch.randn(4, size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        x = x + self.attention(self.before(x))
        x = x + self.mlp(self.between(x))
        return self.head(x.mean(1))


NETWORKS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, stride=2),
            nn.Tanh(),
            nn.Conv2d(3, 4, (2, 3), padding=(1, 2), dilation=(1, 2)),
            nn.GELU(),
            nn.Conv2d(4, 3, 3, padding="same", bias=False),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(12, CLASSES),
        ),
        (2, 6, 5),
    ),
    "positions, averaged": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), Positions(True), nn.Linear(3, CLASSES)
        ),
        (6, 4),
    ),
    "positions, all": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Positions(False), nn.Linear(15, CLASSES)),
        (3, 4),
    ),
    "transformer": (VisionTransformer, (2, 4, 4)),
}


@both
@pytest.mark.parametrize("name", NETWORKS)
def test_weights(name, approximation, batches, dense_ggn):
    make, size = NETWORKS[name]
    model = make().double()
    x, y = torch.randn(N, *size, dtype=torch.float64), torch.randint(CLASSES, (N,))
    loader = batches(x, y, 3)
    ours, theirs = our_blocks(model, loader, approximation), their_blocks(model, loader, approximation)
    exact = dense_ggn(model, x, y)
    assert ours.keys() == theirs.keys() == exact.keys()
    for key, block in ours.items():
        if key.endswith("weight"):
            close(block, theirs[key])
        else:  # ours is the exact one; theirs is the output factor of the weight, which is the same only where it is that of sums
            close(block, exact[key])
            if approximation == "reduce":
                close(theirs[key], exact[key])
    assert len(ours) >= 4
    zero = {key for key, block in ours.items() if block.norm() < 1e-18}
    assert zero <= {"attention.k.weight", "attention.k.bias"}

"""Agreement with the KFAC of curvlinops, expanded and reduced, on a transformer; :mod:`python_tests.compat.test_laplace` has convolutions.

Biases are compared with the dense generalised Gauss-Newton matrix: curvlinops takes their block from the weight's output factor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace
from python_tests.laplace.checks import Function

curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)

N, CLASSES = 7, 3


def their_blocks(model: nn.Module, batches: list[tuple[Tensor, Tensor]], approximation: str) -> dict[str, Tensor]:
    """Parameter name -> the diagonal block, in flatten order, of the sum over data."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    how = {"check_deterministic": False, "fisher_type": "type-2", "kfac_approx": approximation}
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = curvlinops.KFACLinearOperator(model, loss, list(parameters.values()), batches, **how)
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


def attention(size: int) -> nn.Module:
    """Softmax attention of two heads, from linear layers."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (2, -1)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return m.out((weights @ v).transpose(1, 2).flatten(2))

    return Function(forward, **{name: nn.Linear(size, size) for name in ("q", "k", "v", "out")})


def vision_transformer(size: int = 4) -> nn.Module:
    """Patches by a convolution, one layer of attention and one of two linear maps with norms before them, mean pooling."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.patches(x).flatten(2).transpose(1, 2) + m.places
        x = x + m.attention(m.before(x))
        x = x + m.mlp(m.between(x))
        return m.head(x.mean(1))

    layers = {"patches": nn.Conv2d(2, size, 2, stride=2), "attention": attention(size), "head": nn.Linear(size, CLASSES)}  # fmt: skip
    layers |= {
        "before": nn.LayerNorm(size, elementwise_affine=False),
        "between": nn.LayerNorm(size).requires_grad_(False),
    }
    mlp = nn.Sequential(nn.Linear(size, 5), nn.GELU(), nn.Linear(5, size))
    return Function(forward, **layers, mlp=mlp, places=nn.Buffer(torch.randn(4, size)))


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_weights(approximation, batches, dense_ggn):
    model = vision_transformer().double()
    x, y = torch.randn(N, 2, 4, 4, dtype=torch.float64), torch.randint(CLASSES, (N,))
    loader = batches(x, y, 3)
    ours, theirs = our_blocks(model, loader, approximation), their_blocks(model, loader, approximation)
    exact = dense_ggn(model, x, y)
    assert ours.keys() == theirs.keys() == exact.keys() and len(ours) > 8
    for key, block in ours.items():
        if key.endswith("weight"):
            close(block, theirs[key])
        else:  # ours is the exact one; theirs is the output factor of the weight, which is the same only where it is that of sums
            close(block, exact[key])
            if approximation == "reduce":
                close(theirs[key], exact[key])
    assert {key for key, block in ours.items() if block.norm() < 1e-18} <= {"attention.k.weight", "attention.k.bias"}

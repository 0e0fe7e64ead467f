"""Forward over forward: torch runs an op's jvp rule there with forward mode off, so that the ops must not be used as they are."""

from __future__ import annotations

import pytest
import torch
from torch.func import jvp

from ella_cuda import ops


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


SPECTRA = ops.pack_spectra(
    [(normal(2, 3).square(), normal(2, 4).square()), (normal(1, 1).square(), normal(1, 5).square())]
)
ARGUMENTS = {
    "affine_copies": lambda: (normal(2, 1, 3, 4), normal(2, 2, 2, 3)),
    "averaged_filters": lambda: (normal(3, 4), normal(2, 5, 4), normal(5)),
    "kron_evidence": lambda: (normal(2), normal(2), normal()),
    "factored_linear": lambda: (normal(3, 2, 4), normal(3, 2, 4), normal(3, 2, 2), normal(3), normal(2)),
    "kron_logdet": lambda: (normal(2, 3).exp(), normal(2, 4).exp(), normal().exp()),
    "polyphase_pool": lambda: (normal(2, 3, 4, 4),),
    "circular_pad2d": lambda: (normal(2, 3, 4, 4),),
    "circular_conv2d": lambda: (normal(2, 3, 4, 4), normal(2, 3, 3, 3), normal(2)),
    "circular_conv2d_pool": lambda: (normal(2, 3, 4, 4), normal(2, 3, 3, 3), normal(2)),
    "basis_project": lambda: (normal(3, 5), normal(5, 2), normal(4, 2), normal().exp()),
}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_second_directional_derivatives_agree_with_the_reference(op):
    arguments = ARGUMENTS[op]()
    first, second = (tuple(torch.randn_like(a) for a in arguments) for _ in range(2))
    kind = {"basis_project": ("exponential",), "circular_pad2d": (1, 5), "averaged_filters": ("tanh",)}.get(op, ())
    found = []
    for function in (getattr(ops, op), getattr(ops, f"{op}_torch")):

        def value(*args: torch.Tensor, function=function) -> torch.Tensor:
            squares = [a.square() for a in args]
            if op == "kron_evidence":
                return sum(part.square().sum() for part in function(SPECTRA, *squares))
            return function(*squares, *kind).square().sum()

        found.append(jvp(lambda *args, value=value: jvp(value, args, first)[1], arguments, second)[1])
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)
    step = 1e-5  # and the reference's are the derivative's differences

    def slope(sign: int, value=value) -> torch.Tensor:
        moved = tuple(a + sign * step * s for a, s in zip(arguments, second, strict=True))
        return jvp(value, moved, first)[1]

    torch.testing.assert_close(found[0], (slope(1) - slope(-1)) / (2 * step), rtol=1e-5, atol=1e-6)

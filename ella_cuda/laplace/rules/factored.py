"""Factored fully connected layers (F-FC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.jacobian import Jacobian
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn import FactoredLinear2d, SparseFactoredLinear2d

# The largest dz in bytes that exists at a time on the CPU, and the smallest number of rows of g in a chunk: the C library maps larger
# memory anew every time, and its pages cost more than all products do.
MAX_INTERMEDIATE, MIN_ROWS = 32 << 20, 64


@register(FactoredLinear2d)
class FactoredLinear2dRule(Rule):
    """:class:`ella_cuda.nn.FactoredLinear2d`. With z the intermediate between the two maps and dz its gradient:

    ``weight_in`` U[d,c,x]: C blocks, A_c = mean over data of x[n,c,:] x[n,c,:]ᵀ; B = 1/C of the sum over data and c of
    dz[n,:,c] dz[n,:,c]ᵀ, or with resolution "per_channel" one B_c without the mean; block index (x, d).
    ``weight_out`` V[d,c,y]: D blocks, A_d = mean over data of z[n,d,:] z[n,d,:]ᵀ; B = 1/D of the sum over data and d of
    g[n,d,:] g[n,d,:]ᵀ, or one B_d; block index (c, y).
    ``bias_in``, ``bias_out``: the exact GGN blocks, from the sums of dz over c and of g over d.

    The block structure of A is exact: a channel's input is zero outside its own slice of the weights.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix.
    """

    differentiates = True
    reduces = True
    averages = True

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights at all positions, ``(D, C, X)`` and ``(D, C, Y)``."""
        return self.module.weight_in.detach().flatten(2), self.module.weight_out.detach().flatten(2)

    def collect_weights(self) -> None:
        """Keep :meth:`weights` for this batch and the gradients that come back for it."""
        self._weight_in, self._weight_out = self.weights()

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        c, d, x, y = m.in_channels, m.out_channels, m.weight_in[0, 0].numel(), m.weight_out[0, 0].numel()
        per_channel = self.resolution == "per_channel"
        shapes = {
            "weight_in": FactorShape(c, x, d, c if per_channel else 1, layout="bga"),
            "weight_out": FactorShape(d, c, y, d if per_channel else 1, layout="gab"),
        }
        return shapes | {"bias_in": FactorShape.bias(d), "bias_out": FactorShape.bias(y)}

    def inputs(self, x: Tensor) -> None:
        x = x.flatten(2)
        self.collect_weights()
        if "weight_in" in self.factors:
            self.factors["weight_in"].input_moment.add(x)
        if "weight_out" in self.factors:
            self.factors["weight_out"].input_moment.add(self.intermediate(x))

    def vjp(self, gradient: Tensor, input_shape: torch.Size | None) -> Tensor | None:
        factors = self.factors
        columns, g = gradient.shape[0], gradient.flatten(3).flatten(0, 1)  # (KN, D, Y)
        per_channel = self.resolution == "per_channel"
        if "weight_out" in factors:
            rows, alpha = (g, 1.0) if per_channel else (g.reshape(-1, 1, g.shape[2]), 1 / g.shape[1])
            factors["weight_out"].output_moment.add(rows, alpha)
        if "bias_out" in factors:
            factors["bias_out"].output_moment.add(g.sum(1, keepdim=True))
        inner_sides, of_one_position = "weight_in" in factors or "bias_in" in factors, g.shape[2] == 1
        if inner_sides and of_one_position:
            self._inner_sides_of_one_position(g[:, :, 0])
        wants_x, wants_z = input_shape is not None, inner_sides and not of_one_position
        found = []
        for rows in g.split(self._rows_at_once(g)) if wants_z else [g]:
            dx, dz = ops.factored_linear_vjp(rows, self._weight_in, self._weight_out, wants_x, wants_z)
            if dz is not None:
                self._inner_sides(dz)
            found.append(dx)
        if not wants_x:
            return None
        dx = found[0] if len(found) == 1 else torch.cat(found)
        return dx.unflatten(2, input_shape[2:]).unflatten(0, (columns, -1))

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        x, g = arguments[0].flatten(2), gradient.flatten(3)  # (N, C, X), (K, N, D, Y)
        found = {}
        if "weight_out" in self.trainable:
            found["weight_out"] = Jacobian(self.on_basis(g, "out")[:, :, None], self.intermediate(x)[:, None])
        if "weight_in" in self.trainable or "bias_in" in self.trainable:
            rows = g.flatten(0, 1).transpose(0, 1)  # (D, KN, Y)
            dz = torch.bmm(rows, self._weight_out.transpose(1, 2)).unflatten(1, gradient.shape[:2])  # (D, K, N, C)
            if "weight_in" in self.trainable:
                found["weight_in"] = Jacobian(dz.permute(1, 2, 3, 0)[:, :, None], self.on_basis(x, "in")[:, None])
            if "bias_in" in self.trainable:
                found["bias_in"] = Jacobian.of_bias(dz.sum(3).permute(1, 2, 0))
        if "bias_out" in self.trainable:
            found["bias_out"] = Jacobian.of_bias(g.sum(2))
        return found

    def on_basis(self, values: Tensor, side: str) -> Tensor:
        """What a side's weight sees of values at all positions, ``(..., X)``."""
        return values

    def intermediate(self, x: Tensor) -> Tensor:
        """z ``(N, D, C)`` of x ``(N, C, X)``."""
        z = torch.bmm(x.transpose(0, 1), self._weight_in.permute(1, 2, 0))  # (C, N, D)
        if self.module.bias_in is not None:
            z += self.module.bias_in.detach()
        return z.permute(1, 2, 0)

    def _rows_at_once(self, g: Tensor) -> int:
        """Rows of g in a chunk: a multiple of :data:`MIN_ROWS` whose dz takes at most :data:`MAX_INTERMEDIATE`; on other devices than
        the CPU all."""
        row = self._weight_out[:, :, 0].numel() * g.element_size()
        return max(MAX_INTERMEDIATE // row // MIN_ROWS, 1) * MIN_ROWS if g.is_cpu else max(g.shape[0], 1)

    def _inner_sides(self, dz: Tensor) -> None:
        """Add the output sides of weight_in and bias_in, dz ``(D, C, KN)``."""
        if "weight_in" in self.factors:
            moment = self.factors["weight_in"].output_moment
            if self.resolution == "per_channel":
                moment.add(dz.permute(2, 1, 0))
            else:
                moment.add(dz.flatten(1).t()[:, None], 1 / dz.shape[1])
        if "bias_in" in self.factors:
            self.factors["bias_in"].output_moment.add(dz.sum(1).t()[:, None])

    def _inner_sides_of_one_position(self, g: Tensor) -> None:
        """The same where Y = 1, g ``(KN, D)``, without dz[n,d,c] = g[n,d] V[d,c]: the sum over n of dz[n,d,c] dz[n,e,c] is that of
        g[n,d] g[n,e], times V[d,c] V[e,c]. No sum of these cancels.
        """
        v = self._weight_out[:, :, 0]  # (D, C)
        if "weight_in" in self.factors:
            per_channel = self.resolution == "per_channel"
            weights = v.t()[:, :, None] * v.t()[:, None, :] if per_channel else (v @ v.t())[None] / v.shape[1]
            self.factors["weight_in"].output_moment.add_weighted(g, weights)
        if "bias_in" in self.factors:
            self.factors["bias_in"].output_moment.add((g * v.sum(1))[:, None])


@register(SparseFactoredLinear2d)
class SparseFactoredLinear2dRule(FactoredLinear2dRule):
    r""":class:`ella_cuda.nn.SparseFactoredLinear2d`: the factors of the F-FC layer it is, projected on the bases.

    ``weight_in``: :math:`\Psi_{in} A_c \Psi_{in}^T` in place of A_c; block index (anchor, d).
    ``weight_out``: :math:`\Psi_{out} B \Psi_{out}^T` in place of B; block index (c, anchor).
    ``bias_in``: the exact GGN block.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix.
    """

    def weights(self) -> tuple[Tensor, Tensor]:
        m = self.module
        return m.basis_in.expand(m.weight_in.detach()), m.basis_out.expand(m.weight_out.detach())

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        c, d, a, b = m.in_channels, m.out_channels, m.basis_in.num_anchors, m.basis_out.num_anchors
        per_channel = self.resolution == "per_channel"
        return {
            "weight_in": FactorShape(c, a, d, c if per_channel else 1, input_basis=m.basis_in, layout="bga"),
            "weight_out": FactorShape(d, c, b, d if per_channel else 1, output_basis=m.basis_out, layout="gab"),
            "bias_in": FactorShape.bias(d),
        }

    def on_basis(self, values: Tensor, side: str) -> Tensor:
        return values @ getattr(self.module, f"basis_{side}").matrix().to(values).T

    def jacobians(self, arguments: Sequence[Any], gradient: Tensor) -> dict[str, Jacobian]:
        return super().jacobians(arguments, gradient)

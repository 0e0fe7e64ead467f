"""Factored fully connected layers (F-FC)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ella_cuda import ops
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.rows import Dense, Rows
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.laplace.second_moment import SecondMoment
from ella_cuda.nn import FactoredLinear2d, SparseFactoredLinear2d
from ella_cuda.nn._autocast import full

# The largest dz in bytes that exists at a time on the CPU, for the C library maps larger memory anew every time, whose pages cost more than
# all products do; and the smallest number of rows of g in a chunk.
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

    def weights(self, kept: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The weights at all positions, ``(D, C, X)`` and ``(D, C, Y)``."""
        return self.module.weight_in.detach().flatten(2), self.module.weight_out.detach().flatten(2)

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        c, d, x, y = m.in_channels, m.out_channels, m.weight_in[0, 0].numel(), m.weight_out[0, 0].numel()
        per_channel = self.resolution == "per_channel"
        shapes = {
            "weight_in": FactorShape(c, x, d, c if per_channel else 1, layout="bga", units="b"),
            "weight_out": FactorShape(d, c, y, d if per_channel else 1, layout="gab", units="g"),
        }
        return shapes | {"bias_in": FactorShape.bias(d), "bias_out": FactorShape.bias(y)}

    def input_rows(self, x: Tensor) -> dict[str, Rows]:
        x, bias = full(x).flatten(2), self.module.bias_in
        weight_in = self.weights()[0] if "weight_out" in self.trainable else None
        return {"weight_in": Dense(x[:, None]), "weight_out": Intermediate(x, weight_in, bias)}

    def output_rows(self, gradient: Tensor, kept: tuple[Tensor, Tensor] | None) -> dict[str, Rows]:
        g, weight_out = gradient.flatten(3).flatten(0, 1), self.weights(kept)[1]
        return self._outer_rows(g, weight_out) | {"weight_in": IntermediateGradients(g, weight_out)}

    def _outer_rows(self, g: Tensor, weight_out: Tensor) -> dict[str, Rows]:
        """Output rows of all parameters but ``weight_in``, of g ``(K N, D, Y)``."""
        found = {"weight_out": Dense(g[:, None]), "bias_out": Dense(g.sum(1)[:, None, None])}
        if "bias_in" in self.trainable:
            # The intermediate's gradient, over channels, in parts: einsum copies its operand.
            parts = [torch.einsum("rdy,dy->rd", part, weight_out.sum(1)) for part in parts_of(g, weight_out)]
            found["bias_in"] = Dense(torch.cat(parts)[:, None, None])
        return found

    def input_gradient(self, gradient: Tensor, call: Call) -> Tensor:
        g = gradient.flatten(3).flatten(0, 1)
        dx, _ = ops.factored_linear_vjp(g, *self.weights(call.kept), True, False)
        return self._shaped(dx, gradient, call)

    def backward(
        self, gradient: Tensor, call: Call, take: Callable[[dict[str, Rows]], None], wanted: bool
    ) -> Tensor | None:
        g, weights = gradient.flatten(3).flatten(0, 1), self.weights(call.kept)
        if not wanted or "weight_in" not in self.trainable or g.shape[2] == 1:
            return super().backward(gradient, call, take, wanted)
        take(self._outer_rows(g, weights[1]))
        found = []
        for part in parts_of(g, weights[1]):
            dx, dz = ops.factored_linear_vjp(part, *weights, True, True)
            take({"weight_in": Dense(dz.permute(2, 1, 0)[:, None])})
            found.append(dx)
        return self._shaped(found[0] if len(found) == 1 else torch.cat(found), gradient, call)

    def _shaped(self, dx: Tensor, gradient: Tensor, call: Call) -> Tensor:
        return dx.unflatten(2, call.input_shape[2:]).unflatten(0, gradient.shape[:2])


class Intermediate(Rows):
    """Rows z ``(N, 1, D, C)`` between the two maps of an F-FC layer, of x ``(N, C, X)``, U ``(D, C, X)`` and a bias ``(D,)``, or none."""

    def __init__(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(values)
        self.weight, self.bias = weight, bias

    @property
    def positions(self) -> int:
        return 1

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        Dense(self.dense()).gram_(moment, alpha)

    def settled(self) -> Rows:
        return Dense(self.dense())

    def dense(self) -> Tensor:
        z = torch.bmm(self.values.transpose(0, 1), self.weight.permute(1, 2, 0))  # (C, N, D)
        if self.bias is not None:
            z += self.bias.detach()
        return z.permute(1, 2, 0)[:, None]

    def summed(self) -> Rows:
        return self

    def times(self, weight: float) -> Rows:
        return self if weight == 1 else Dense(self.dense()).times(weight)  # rows are affine in x

    def _alike(self, other: Rows) -> bool:
        return False  # z adds up, x does not


class IntermediateGradients(Rows):
    """Rows dz ``(K N, 1, C, D)``, gradients between the two maps of an F-FC layer, of g ``(K N, D, Y)`` and V ``(D, C, Y)``."""

    def __init__(self, values: Tensor, weight: Tensor) -> None:
        super().__init__(values)
        self.weight = weight

    @property
    def positions(self) -> int:
        return 1

    def gram_(self, moment: SecondMoment, alpha: float = 1.0) -> None:
        if self.values.shape[2] == 1:
            self._gram_of_one_position(moment, alpha)
            return
        for part in parts_of(self.values, self.weight):
            Dense(_inner(part, self.weight)).gram_(moment, alpha)

    def _gram_of_one_position(self, moment: SecondMoment, alpha: float) -> None:
        """The sums where Y = 1, without dz[n,d,c] = g[n,d] V[d,c]: that over n of dz[n,d,c] dz[n,e,c] is that of g[n,d] g[n,e], times
        V[d,c] V[e,c]. No sum of these cancels."""
        g, v = self.values[:, :, 0], self.weight[:, :, 0]  # (KN, D), (D, C)
        apart = moment.total.shape[0] > 1 or v.shape[1] == 1
        weights = v.t()[:, :, None] * v.t()[:, None, :] if apart else (v @ v.t())[None] / v.shape[1]
        moment.add_weighted(g, weights if alpha == 1 else weights * alpha)

    def quadratic(self, matrix: Tensor) -> Tensor:
        if self.values.shape[2] > 1:
            return super().quadratic(matrix)
        g, v = self.values[:, :, 0], self.weight[:, :, 0]
        products = v.t()[:, :, None] * v.t()[:, None, :]  # (C, D, D)
        weighted = (matrix.to(g.dtype) * products).sum(0)
        return ((g @ weighted) * g).sum() / (v.shape[1] if matrix.shape[0] == 1 else 1)

    def settled(self) -> Rows:
        return Dense(self.dense()) if self.weight.requires_grad else self

    def dense(self) -> Tensor:
        return _inner(self.values, self.weight)

    def summed(self) -> Rows:
        return self


def _inner(g: Tensor, weight: Tensor) -> Tensor:
    """dz ``(R, 1, C, D)`` of g ``(R, D, Y)`` and V ``(D, C, Y)``."""
    dz = torch.bmm(g.transpose(0, 1), weight.transpose(1, 2))  # (D, R, C)
    return dz.permute(1, 2, 0)[:, None]


def parts_of(g: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """Parts of g ``(R, D, Y)``, a multiple of :data:`MIN_ROWS` each whose intermediate takes at most :data:`MAX_INTERMEDIATE`; on other
    devices than the CPU all."""
    row = weight[:, :, 0].numel() * g.element_size()
    size = max(MAX_INTERMEDIATE // row // MIN_ROWS, 1) * MIN_ROWS if g.is_cpu else max(g.shape[0], 1)
    yield from g.split(size)


@register(SparseFactoredLinear2d)
class SparseFactoredLinear2dRule(FactoredLinear2dRule):
    r""":class:`ella_cuda.nn.SparseFactoredLinear2d`: the factors of the F-FC layer it is, projected on the bases.

    ``weight_in``: :math:`\Psi_{in} A_c \Psi_{in}^T` in place of A_c; block index (anchor, d).
    ``weight_out``: :math:`\Psi_{out} B \Psi_{out}^T` in place of B; block index (c, anchor).
    ``bias_in``: the exact GGN block.

    Source: van der Ouderaa et al., NeurIPS 2023, section 4 and appendix.
    """

    def weights(self, kept: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        m = self.module
        return kept or (m.basis_in.expand(m.weight_in.detach()), m.basis_out.expand(m.weight_out.detach()))

    def keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weights()

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        c, d, a, b = m.in_channels, m.out_channels, m.basis_in.num_anchors, m.basis_out.num_anchors
        per_channel = self.resolution == "per_channel"
        return {
            "weight_in": FactorShape(c, a, d, c if per_channel else 1, input_basis=m.basis_in, layout="bga", units="b"),
            "weight_out": FactorShape(
                d, c, b, d if per_channel else 1, output_basis=m.basis_out, layout="gab", units="g"
            ),
            "bias_in": FactorShape.bias(d),
        }

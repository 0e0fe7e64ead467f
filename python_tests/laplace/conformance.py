"""The conformance test of a curvature rule: a row of a table, ``(module, inputs)``, and oracles made of plain autograd.

A parameter's gradient of a data point is a sum over shared positions t of outer products, ``sum_t a_t g_t^T`` in each block. The operands
are found without the package: :class:`Blocks` holds them, by the definition of the layer and by autograd's gradient at the layer's output,
and :class:`Oracle` requires that their products are the gradients of single data points that autograd gives. All that a posterior is made of
follows: the factors of KFAC-expand and KFAC-reduce, exact blocks, the evidence, the covariance of the outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ella_cuda.augment import Augment, AveragedFunction
from python_tests.laplace.checks import randomised

FEATURES, CLASSES, WORDS = 3, 3, 5
PRIOR = 0.7


class Blocks(NamedTuple):
    """A weight's operands in one call of its layer.

    Attributes:
        layout: the order of the weight's elements: block g, input a, output b, the last fastest.
        rows: by block, inputs ``(N, T, a)`` and gradients ``(K, N, T, b)``.
        shared: whether the output side is the mean over blocks.
        counts: positions of each data point that count, ``(N,)``; None is T.
    """

    layout: str
    rows: list[tuple[Tensor, Tensor]]
    shared: bool = False
    counts: Tensor | None = None

    def to_blocks(self, values: Tensor, axes: int) -> Tensor:
        """What belongs to the weight's elements, behind so many axes, as ``(..., G, a, b)``."""
        a, b = self.rows[0]
        sizes = {"g": len(self.rows), "a": a.shape[-1], "b": b.shape[-1]}
        split = values.reshape(*values.shape[:axes], *(sizes[axis] for axis in self.layout))
        return split.permute(*range(axes), *(axes + self.layout.index(axis) for axis in "gab"))

    def factors(self, approximation: str) -> tuple[Tensor, Tensor]:
        """A ``(G, a, a)``, the mean over data, and B ``(G or 1, b, b)``, the sum over data, by their definition."""
        inputs, outputs = [], []
        for a, g in self.rows:
            count = a.new_full((len(a),), a.shape[1]) if self.counts is None else self.counts.to(a)
            if approximation == "reduce":
                a, g = a.sum(1, keepdim=True) / count[:, None, None], g.sum(2, keepdim=True)
                count = torch.ones_like(count)
            inputs.append(torch.einsum("nti,ntj->ij", a, a) / len(a))
            outputs.append(torch.einsum("kntb,kntc,n->bc", g, g, 1 / count))
        outputs = torch.stack(outputs)
        return torch.stack(inputs), outputs.mean(0, keepdim=True) if self.shared else outputs

    def and_those_of(self, other: Blocks) -> Blocks:
        """With the positions of another call."""
        rows = [
            (torch.cat([a, c], 1), torch.cat([b, d], 2)) for (a, b), (c, d) in zip(self.rows, other.rows, strict=True)
        ]
        counts = None if self.counts is None else self.counts + other.counts
        return self._replace(rows=rows, counts=counts)

    def averaged(self, copies: int) -> Blocks:
        """Means of the inputs and sums of the gradients over the copies of a data point, of N S copies."""
        rows = [(a.unflatten(0, (-1, copies)).mean(1), g.unflatten(1, (-1, copies)).sum(2)) for a, g in self.rows]
        return self._replace(rows=rows)


RowsOf = Callable[[nn.Module, Sequence[Tensor], Tensor], dict[str, Blocks]]


# The operands of each kind of layer -----------------------------------------------------------------------------------


def exact(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """No operands: all blocks are those of the generalised Gauss-Newton matrix."""
    return {}


def at_outputs(axis: int, weight: str = "weight") -> RowsOf:
    """A layer that is linear in its weight, whose positions are those of its output, channels along ``axis``. The input of a position is
    what the layer returns there at unit weights."""

    def rows_of(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
        w = layer.get_parameter(weight)
        channels = gradient.shape[axis + 1 if axis > 0 else axis]
        groups = getattr(layer, "groups", channels if getattr(layer, "depthwise", False) else 1)
        size, each = w.numel() // channels, channels // groups

        def positions(out: Tensor, front: int) -> Tensor:
            last = out.movedim(axis + front - 1 if axis > 0 else axis, -1)
            return last.reshape(*out.shape[:front], -1, groups, each)

        nothing = functional_call(layer, {weight: torch.zeros_like(w)}, tuple(arguments))
        seen = []
        for i in range(size):
            unit = torch.zeros(groups, each, size, dtype=w.dtype)
            unit[:, 0, i] = 1
            out = functional_call(layer, {weight: unit.view_as(w)}, tuple(arguments))
            seen.append(positions(out - nothing, 1)[..., 0])
        a, g = torch.stack(seen, -1), positions(gradient, 2)  # (N, T, G, a), (K, N, T, G, b)
        return {weight: Blocks("gba", [(a[:, :, i], g[:, :, :, i]) for i in range(groups)])}

    return rows_of


def at_inputs(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """A transposed convolution, whose positions are those of its input. The gradient of a position is the output's, times what the layer
    returns at unit weights of a unit input there."""
    (x,), w, groups = arguments, layer.weight, layer.groups
    c, places = x.shape[1] // groups, math.prod(x.shape[2:])
    units = torch.eye(places, dtype=x.dtype).view(places, 1, *x.shape[2:]).expand(-1, x.shape[1], *x.shape[2:])
    nothing, size = layer(torch.zeros_like(units)), w.numel() // x.shape[1]
    rows = []
    for group in range(groups):
        seen = []
        for i in range(size):
            unit = torch.zeros(groups, c, size, dtype=w.dtype)
            unit[group, 0, i] = 1
            patch = functional_call(layer, {"weight": unit.view_as(w)}, (units,)) - nothing
            seen.append(torch.einsum("knp,tp->knt", gradient.flatten(2), patch.flatten(1)))
        a = x.flatten(2).transpose(1, 2)[..., group * c : (group + 1) * c]
        rows.append((a, torch.stack(seen, -1)))
    return {"weight": Blocks("gab", rows)}


def through_pool(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """A circular convolution of which one of four polyphase components is returned: gradients at all others are zero."""
    options = {"padding": "same", "padding_mode": "circular", "bias": layer.bias is not None}
    plain = nn.Conv2d(*layer.weight.shape[1::-1], layer.kernel_size, **options).double()
    plain.load_state_dict(layer.state_dict())
    everywhere, out = plain(*arguments), layer(*arguments)
    full = gradient.new_zeros(*gradient.shape[:2], *everywhere.shape[1:])
    for n in range(len(out)):
        (place,) = ((i, j) for i in (0, 1) for j in (0, 1) if torch.allclose(everywhere[n, :, i::2, j::2], out[n]))
        full[:, n, :, place[0] :: 2, place[1] :: 2] = gradient[:, n]
    return at_outputs(1)(plain, arguments, full)


def factored(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """F-FC and S-FC: blocks are channels, and a data point has one position."""
    x, g = arguments[0].flatten(2), gradient.flatten(3)  # (N, C, X), (K, N, D, Y)
    u, v = layer.weight_in.flatten(2), layer.weight_out.flatten(2)
    if hasattr(layer, "basis_in"):
        into, onto = (basis.matrix().to(x) for basis in (layer.basis_in, layer.basis_out))
        x, g = x @ into.T, g @ onto.T
    z = torch.einsum("ncx,dcx->ndc", x, u) + (0 if layer.bias_in is None else layer.bias_in[:, None])
    dz = torch.einsum("kndy,dcy->kncd", g, v)
    return {
        "weight_in": Blocks("bga", [(x[:, None, c], dz[:, :, None, c]) for c in range(x.shape[1])], True),
        "weight_out": Blocks("gab", [(z[:, None, d], g[:, :, None, d]) for d in range(z.shape[1])], True),
    }


def looked_up(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """A table: blocks are its words, and a position's input is whether it looks the word up."""
    words = arguments[0].reshape(len(arguments[0]), -1)
    counted = words != (-1 if layer.padding_idx is None else layer.padding_idx)
    seen = (F.one_hot(words, layer.num_embeddings) * counted[..., None]).to(gradient)  # (N, T, V)
    if isinstance(layer, nn.EmbeddingBag):
        each = counted.sum(1).clamp(min=1) if layer.mode == "mean" else torch.ones(len(words))
        gradient = (gradient / each[:, None])[:, :, None].expand(-1, -1, words.shape[1], -1)
    g = gradient.reshape(*gradient.shape[:2], words.shape[1], -1) * counted[..., None]
    rows = [(seen[..., v, None], g) for v in range(layer.num_embeddings)]
    return {"weight": Blocks("gab", rows, True, counted.sum(1).clamp(min=1))}


def attention(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """Multi-head attention written out: its projections are linear layers."""
    e, heads = layer.embed_dim, layer.num_heads
    packed = layer.in_proj_weight is not None
    apart = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    weights = layer.in_proj_weight.chunk(3) if packed else apart
    shifts = (0, 0, 0) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    inputs = [x.detach() for x in arguments]
    inner = [(x @ w.T + s).detach().requires_grad_() for x, w, s in zip(inputs, weights, shifts, strict=True)]
    q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in inner)
    mixed = ((q @ k.mT / math.sqrt(e // heads)).softmax(-1) @ v).transpose(1, 2).flatten(2)
    at_mixed = gradient @ layer.out_proj.weight
    pulled = [torch.autograd.grad(mixed, inner, g, retain_graph=True) for g in at_mixed]
    rows = [(x, torch.stack(g)) for x, g in zip(inputs, zip(*pulled, strict=True), strict=True)]
    found = {"out_proj.weight": Blocks("gba", [(mixed.detach(), gradient)])}
    if packed:
        return found | {"in_proj_weight": Blocks("gba", rows)}
    return found | {f"{name}_proj_weight": Blocks("gba", [row]) for name, row in zip("qkv", rows, strict=True)}


# The network around a layer -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        make: the layer.
        shapes: of its arguments, without the batch; ``(L, E)`` of an attention.
        rows_of: the operands of its weights; see :class:`Blocks`.
        words: whether the argument is indices.
        reduce: whether KFAC-reduce is served.
        twice: the approximations in which two calls, or two layers with one weight, are served.
        copies: whether an averaged function is served.
        one_call: whether its factors are what one call adds, as gradients of the evidence need it.
        second, folded: whether the batch may be the second axis, or positions be folded into it.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    rows_of: RowsOf
    words: bool = False
    reduce: bool = True
    twice: tuple[str, ...] = ("expand", "reduce")
    copies: bool = True
    one_call: bool = True
    second: bool = False
    folded: bool = False


class Network(nn.Module):
    """Layers of a case between a linear layer, which makes their arguments of numbers ``(N, FEATURES)``, and another. Of a case of words
    the numbers are indices.

    Args:
        case: of the layers.
        calls: how often the layer is called.
        tied: whether each call has a layer of its own, with the weights of the first.
        arrangement: "plain", "second" for arguments with the batch second, "folded" for positions folded into the batch.
    """

    def __init__(self, case: Case, calls: int = 1, tied: bool = False, arrangement: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.arrangement, self.calls = case, arrangement, calls
        self.recorded: list[tuple[nn.Module, tuple[Tensor, ...], Tensor]] | None = None
        self.images: list[int] = []
        self.autocast: torch.dtype | None = None  # of the layer's call
        self.checkpointed = False
        self.sizes = [math.prod(shape) for shape in case.shapes]
        if not case.words:
            self.first = nn.Linear(FEATURES, calls * sum(self.sizes))
        self.layers = nn.ModuleList(case.make() for _ in range(calls if tied else 1))
        for layer in self.layers:
            if arrangement == "second" and hasattr(layer, "batch_first"):
                layer.batch_first = False
        self.head = nn.LazyLinear(CLASSES)
        with torch.no_grad():
            self(self.data(2)[0].float() if not case.words else self.data(2)[0])
        randomised(self)
        if tied:
            self._tie()

    def _tie(self) -> None:
        """Weights that have operands are those of the first layer."""
        first = self.layers[0]
        for layer in self.layers[1:]:
            for name, module in first.named_modules():  # a basis is of both layers
                if module is not first and "basis" in name and "." not in name:
                    setattr(layer, name, module)
            for name, parameter in first.named_parameters():
                if "weight" in name and not name.startswith("basis"):
                    owner, _, last = name.rpartition(".")
                    setattr(layer.get_submodule(owner), last, parameter)

    def data(self, count: int = 4) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        generator = torch.Generator().manual_seed(1)
        y = torch.randint(CLASSES, (count,), generator=generator)
        if self.case.words:
            return torch.randint(WORDS, (count, *self.case.shapes[0]), generator=generator), y
        return torch.randn(count, FEATURES, generator=generator, dtype=torch.float64), y

    def forward(self, x: Tensor) -> Tensor:
        self.images.append(len(x))
        if self.case.words:
            given = [[(x + i) % WORDS] for i in range(self.calls)]
        else:
            numbers = self._note(self.first, (x,), self.first(x)).tanh().split(self.sizes * self.calls, 1)
            arguments = [
                part.reshape(len(x), *s) for part, s in zip(numbers, self.case.shapes * self.calls, strict=True)
            ]
            each = len(self.sizes)
            given = [arguments[i * each : (i + 1) * each] for i in range(self.calls)]
        out = [self._call(i, arguments) for i, arguments in enumerate(given)]
        h = torch.tanh(torch.cat([o.reshape(len(x), -1) for o in out], 1))
        return self._note(self.head, (h,), self.head(h))

    def _call(self, i: int, arguments: list[Tensor]) -> Tensor:
        layer, moved = self.layers[i % len(self.layers)], arguments
        if self.arrangement == "second":
            moved = [a.transpose(0, 1) for a in arguments]
        elif self.arrangement == "folded":
            moved = [a.flatten(0, 1) for a in arguments]
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            out = checkpoint(layer, *moved, use_reentrant=False) if self.checkpointed else layer(*moved)
        out = out[0] if isinstance(out, tuple) else out
        out = out if self.autocast is None else out.float()
        if self.arrangement == "second":
            out = out.transpose(0, 1)
        elif self.arrangement == "folded":
            out = out.unflatten(0, arguments[0].shape[:2])
        return self._note(layer, tuple(arguments), out)

    def _note(self, layer: nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if self.recorded is not None:
            self.recorded.append((layer, tuple(a.detach() for a in arguments), out))
        return out


class Shifts(Augment):
    """Copies of vectors, moved by ``eta * eps``."""

    def __init__(self, copies: int) -> None:
        super().__init__(copies, [f"x{i}" for i in range(FEATURES)], 0.8, "shared", dtype=torch.float64)

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        return x[:, None] + eta * eps


# The oracle -----------------------------------------------------------------------------------------------------------


def root_of(p: Tensor) -> Tensor:
    """A square root of ``diag(p) - p p^T``, ``(N, K, K)``; column k in ``[..., k]``."""
    return torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]


class Oracle:
    """The posterior of a network, dense and by plain autograd.

    Attributes:
        jacobians: by parameter, ``(N, K, P)``.
        hessian: of the outputs, ``(N, K, K)``.
        ggn: by parameter, its dense block.
        weights: by parameter, the operands of those that have any.

    Args:
        model: a :class:`Network`, or an averaged function of one.
        x, y: all data.
        eps: draws of the averaged function.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, eps: Tensor | None = None) -> None:
        network = model if eps is None else model.network
        copies = 1 if eps is None else eps.shape[1]
        if eps is not None:
            x = (x[:, None] + F.softplus(model.augment.raw.detach()) * eps).flatten(0, 1)
        network.recorded = []
        logits = network(x).unflatten(0, (-1, copies)).mean(1)
        calls, network.recorded = network.recorded, None
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.fit = -F.cross_entropy(logits, y, reduction="sum").detach()
        p = logits.softmax(1).detach()
        root, names = root_of(p), {id(q): n for n, q in self.parameters.items()}
        rows = [
            torch.autograd.grad(f, list(self.parameters.values()), retain_graph=True) for f in logits.flatten().unbind()
        ]
        self.jacobians = {
            name: torch.stack(parts).view(len(y), CLASSES, -1)
            for name, parts in zip(self.parameters, zip(*rows, strict=True), strict=True)
        }
        self.hessian = root @ root.mT
        self.ggn = {name: torch.einsum("nki,nkl,nlj->ij", j, self.hessian, j) for name, j in self.jacobians.items()}
        outs = [out for _, _, out in calls]
        columns = [torch.autograd.grad(logits, outs, root[..., k], retain_graph=True) for k in range(CLASSES)]
        self.weights: dict[str, Blocks] = {}
        with torch.no_grad():
            for (layer, arguments, _), gradients in zip(calls, zip(*columns, strict=True), strict=True):
                own = network.case.rows_of if layer in network.layers else linear
                with torch.enable_grad():
                    found = own(layer, arguments, torch.stack(gradients))
                for name, blocks in found.items():
                    if (full := names.get(id(layer.get_parameter(name)))) is not None:
                        blocks = blocks._replace(rows=[(a.detach(), g.detach()) for a, g in blocks.rows])
                        before = self.weights.get(full)
                        self.weights[full] = blocks if before is None else before.and_those_of(blocks)
            self._require_products(root, copies)
        self.weights = {name: blocks.averaged(copies) for name, blocks in self.weights.items()}

    def _require_products(self, root: Tensor, copies: int) -> None:
        """Operands make the gradients that autograd gives."""
        for name, blocks in self.weights.items():
            expected = blocks.to_blocks(torch.einsum("nlk,nlp->knp", root, self.jacobians[name]), 2)
            found = torch.stack([torch.einsum("nta,kntb->knab", a, g) for a, g in blocks.rows], 2)
            found = found.unflatten(1, (-1, copies)).sum(2)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def factor(self, name: str, approximation: str) -> tuple[Tensor, Tensor]:
        """A and B; of an exact block one, and the block."""
        if name in self.weights:
            return self.weights[name].factors(approximation)
        return torch.ones(1, 1, 1, dtype=torch.float64), self.ggn[name][None]

    def precision(self, name: str, approximation: str) -> Tensor:
        """The posterior's, of each block: ``(G, a b, a b)``."""
        inputs, outputs = self.factor(name, approximation)
        outputs = outputs.expand(len(inputs), -1, -1)
        blocks = torch.stack([torch.kron(a, b) for a, b in zip(inputs, outputs, strict=True)])
        return blocks + PRIOR * torch.eye(blocks.shape[1], dtype=torch.float64)

    def whole(self) -> Tensor:
        """The generalised Gauss-Newton matrix of all parameters, ``(P, P)``."""
        j = torch.cat(list(self.jacobians.values()), 2)
        return torch.einsum("nki,nkl,nlj->ij", j, self.hessian, j)

    def covariance(self, approximation: str) -> Tensor:
        """Of the linearised outputs, ``(N, K, K)``."""
        total = 0
        for name, j in self.jacobians.items():
            blocks = self.weights[name].to_blocks(j, 2) if name in self.weights else j[:, :, None]
            rows = blocks.reshape(*j.shape[:2], blocks.shape[2], -1)
            solved = torch.linalg.solve(self.precision(name, approximation), rows.permute(2, 3, 0, 1).flatten(2))
            total = total + torch.einsum("nkgp,gpnl->nkl", rows, solved.unflatten(2, j.shape[:2]))
        return total

    def evidence(self, approximation: str) -> Tensor:
        """The log marginal likelihood."""
        total = self.fit
        for name, parameter in self.parameters.items():
            ratio = torch.logdet(self.precision(name, approximation) / PRIOR).sum()
            total = total - 0.5 * (ratio + PRIOR * parameter.detach().square().sum())
        return total


def linear(layer: nn.Module, arguments: Sequence[Tensor], gradient: Tensor) -> dict[str, Blocks]:
    """A linear layer without shared positions."""
    return {"weight": Blocks("gba", [(arguments[0][:, None], gradient[:, :, None])])}


def averaged(case: Case, copies: int, **options: Any) -> AveragedFunction:
    """A case's network, averaged over so many copies."""
    return AveragedFunction(Network(case, **options), Shifts(copies))

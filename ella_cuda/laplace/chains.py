r"""Second derivatives of networks that are chains of layers, all columns together and without a graph of any column.

What is wanted is the gradient in a network's inputs of a function :math:`F(\bar a, \bar g, \bar f)` of the mean inputs of layers, the summed
gradients at their outputs and the averaged outputs. The gradients g of a column are what goes back through the chain. With
:math:`v = \partial F / \partial \bar g` the derivative of :math:`\langle v, g\rangle` is that of the outputs along tangents t that v is added
to at each layer: they go forward through the same linear maps. Where a function :math:`\phi` is between, its second derivative puts
:math:`\phi''(h) \sum_c t_c g_c` into the way back of F itself, which there is one of for all columns. Autograd would go through the
graph of every column's gradients for the same numbers.

Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
ELEMENTWISE = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.Mish)
LAYERS = (nn.Linear, nn.Conv2d)


class Link(Protocol):
    """A module of a chain at the inputs of one pass: rows ``(R, ...)``, or columns of them ``(K R, ...)`` of the same derivative."""

    out: Tensor

    def along(self, t: Tensor, times: int) -> Tensor:
        """The derivative along tangents of the input, ``(times R, ...)``."""

    def back(self, g: Tensor, times: int) -> Tensor:
        """Gradients at the input of those at the output."""


class Layer:
    """A linear layer or a convolution."""

    def __init__(self, module: nn.Linear | nn.Conv2d, x: Tensor) -> None:
        self.module, self.shape = module, x.shape
        self.out = module.forward(x)

    def along(self, t: Tensor, times: int) -> Tensor:
        m = self.module
        if isinstance(m, nn.Linear):
            return F.linear(t, m.weight)
        return F.conv2d(t, m.weight, None, m.stride, m.padding, m.dilation, m.groups)

    def back(self, g: Tensor, times: int) -> Tensor:
        m = self.module
        if isinstance(m, nn.Linear):
            return g @ m.weight
        sides = zip(self.shape[2:], m.padding, m.dilation, m.kernel_size, m.stride, g.shape[2:], strict=True)
        beyond = [size - (d * (k - 1) + 1 + step * (o - 1) - 2 * p) for size, p, d, k, step, o in sides]
        return F.conv_transpose2d(g, m.weight, None, m.stride, m.padding, beyond, m.groups, m.dilation)


class Reshaped:
    """Another shape, or the same."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.shape = x.shape
        self.out = module.forward(x)

    def along(self, t: Tensor, times: int) -> Tensor:
        return t.reshape(len(t), *self.out.shape[1:])

    def back(self, g: Tensor, times: int) -> Tensor:
        return g.reshape(len(g), *self.shape[1:])


class Pooled:
    """Largest values of windows: those that were the largest."""

    def __init__(self, module: nn.MaxPool2d, x: Tensor) -> None:
        self.module, self.x = module, x
        m = module
        self.out, self.places = F.max_pool2d(
            x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, return_indices=True
        )

    def along(self, t: Tensor, times: int) -> Tensor:
        places = self.places.flatten(2)
        flat = t.flatten(2).unflatten(0, (times, -1))
        return flat.gather(3, places.expand(times, *places.shape)).view(-1, *self.out.shape[1:])

    def back(self, g: Tensor, times: int) -> Tensor:
        m, found = self.module, g.new_empty(len(g), *self.x.shape[1:])
        sizes = [_pair(size) for size in (m.kernel_size, m.stride, m.padding, m.dilation)]
        for of_column, into in zip(g.chunk(times), found.chunk(times), strict=True):
            torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                of_column, self.x, *sizes, m.ceil_mode, self.places, grad_input=into
            )
        return found


def _pair(size: int | tuple[int, int]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


class Elementwise:
    """A function of every entry, with its two derivatives."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.curved = not isinstance(module, nn.ReLU)
        if isinstance(module, nn.Tanh):
            self.out = x.tanh()
            self.first = 1 - self.out * self.out
            self.second = -2 * self.out * self.first
            return
        if isinstance(module, nn.ReLU):
            self.out = x.relu()
            self.first = (self.out > 0).to(x.dtype)
            return
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = module.forward(x)
            (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        self.out, self.first, self.second = out.detach(), first.detach(), second

    def along(self, t: Tensor, times: int) -> Tensor:
        return (t.unflatten(0, (times, -1)) * self.first).flatten(0, 1)

    back = along

    def bent(self, t: Tensor, g: Tensor, times: int) -> Tensor:
        """The gradient at the input that tangents there and gradients at the output have together."""
        return (t.unflatten(0, (times, -1)) * g.unflatten(0, (times, -1))).sum(0) * self.second


class Seen(NamedTuple):
    """What F is a function of.

    Attributes:
        inputs: of each layer the mean over copies, ``(N, ...)``. gradients: at its output the sum over copies, ``(K, N, ...)``.
    """

    inputs: list[Tensor]
    gradients: list[Tensor]


class Chain:
    """A network of modules one after the other.

    Args:
        modules: as :func:`chain_of` gives them.

    Attributes:
        layers: those with parameters, in order.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.layers = [m for m in self.modules if isinstance(m, LAYERS)]

    @torch.no_grad()
    def gradient(
        self,
        copies: Tensor,
        columns_of: Callable[[Tensor], Tensor],
        derivatives: Callable[[Seen, Tensor], tuple[Seen, Tensor]],
    ) -> Tensor:
        """The gradient of F in the copies ``(N, S, ...)``.

        Args:
            copies: of N data points.
            columns_of: of the averaged outputs ``(N, ...)``, columns ``(K, N, ...)`` in their graph.
            derivatives: ``(seen, outputs) -> (those of F in seen, that in the outputs)``.
        """
        n, s = copies.shape[:2]
        links: list[Link] = []
        x = copies.flatten(0, 1)
        inputs = []
        for module in self.modules:
            if isinstance(module, LAYERS):
                inputs.append(_mean(x, s))
            links.append(_link(module, x))
            x = links[-1].out
        outputs = _mean(x, s).requires_grad_()
        with torch.enable_grad():
            columns = columns_of(outputs)
        k = len(columns)
        first = next(i for i, m in enumerate(self.modules) if isinstance(m, LAYERS))
        # Columns back to the first layer's output; what is before each function is kept.
        g = _expanded(columns.detach() / s, s)
        behind: dict[int, Tensor] = {}
        gradients: list[Tensor] = []
        for i in range(len(links) - 1, first - 1, -1):
            if isinstance(links[i], Layer):
                gradients.insert(0, g.view(k, n, s, *g.shape[1:]).sum(2))
            elif isinstance(links[i], Elementwise) and links[i].curved:
                behind[i] = g
            if i > first:
                g = links[i].back(g, k)
        of_seen, of_outputs = derivatives(Seen(inputs, gradients), outputs)
        # Tangents forward, from there.
        bent: dict[int, Tensor] = {}
        tangents = iter(of_seen.gradients)
        t: Tensor | None = None
        for i in range(first, len(links)):
            if i in behind:
                bent[i] = links[i].bent(t, behind.pop(i), k)
            if t is not None:
                t = links[i].along(t, k)
            if isinstance(links[i], Layer):
                added = next(tangents)
                if t is None:
                    t = _expanded(added, s)
                else:
                    t.view(k, n, s, *t.shape[1:]).add_(added[:, :, None])
        of_columns = t.view(k, n, s, *t.shape[1:]).mean(2)
        if columns.requires_grad:
            of_outputs = of_outputs + torch.autograd.grad(columns, outputs, of_columns)[0]
        # Back with F itself.
        b = _expanded(of_outputs[None] / s, s)
        for i in range(len(links) - 1, -1, -1):
            b = links[i].back(b, 1)
            if i in bent:
                b = b + bent.pop(i)
            if isinstance(links[i], Layer):
                b.view(n, s, *b.shape[1:]).add_(of_seen.inputs.pop()[:, None] / s)
        return b.view(copies.shape)


def _mean(x: Tensor, copies: int) -> Tensor:
    return x.unflatten(0, (-1, copies)).mean(1)


def _expanded(columns: Tensor, copies: int) -> Tensor:
    """``(K, N, ...)`` as ``(K N S, ...)``, the same for all copies."""
    k, n, *rest = columns.shape
    return columns[:, :, None].expand(k, n, copies, *rest).reshape(-1, *rest)


def _link(module: nn.Module, x: Tensor) -> Link:
    if isinstance(module, LAYERS):
        return Layer(module, x)
    if isinstance(module, nn.MaxPool2d):
        return Pooled(module, x)
    return Elementwise(module, x) if isinstance(module, ELEMENTWISE) else Reshaped(module, x)


def chain_of(network: nn.Module) -> Chain | None:
    """The network as a chain; None where it is none of known modules, each called once, without hooks of a user's."""
    modules: list[nn.Module] = []
    if not _add(network, modules) or len(set(modules)) < len(modules):
        return None
    return Chain(modules) if any(isinstance(m, LAYERS) for m in modules) else None


def _add(module: nn.Module, modules: list[nn.Module]) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
        return False
    if type(module) is nn.Sequential:
        return all(_add(child, modules) for child in module)
    modules.append(module)
    if type(module) is nn.Flatten:
        return module.start_dim >= 1
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if getattr(module, "inplace", False) and type(module) is not nn.ReLU and type(module) not in IDENTITIES:
        return False
    return type(module) in (*IDENTITIES, *ELEMENTWISE, nn.Linear, nn.MaxPool2d)

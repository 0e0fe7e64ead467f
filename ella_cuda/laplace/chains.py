r"""Second derivatives of networks that are chains of layers, for all columns together and without a graph of any column.

Wanted is the gradient in a network's inputs of a function :math:`F(\bar a, \bar g, \bar f)` of the layers' mean inputs, the summed gradients
at their outputs, and the averaged outputs. The gradients g of a column are what goes back through the chain. With
:math:`v = \partial F / \partial \bar g`, the derivative of :math:`\langle v, g\rangle` is that of the outputs along tangents t: each layer
adds its v to them, and they go forward through the same linear maps. At a function :math:`\phi` between layers the second derivative adds
:math:`\phi''(h) \sum_c t_c g_c` to the gradient of F itself, of which there is one for all columns. Autograd would go through the graph of
every column's gradients for the same numbers.

Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace.copies import is_changed, is_plain_average

IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
ELEMENTWISE = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.Mish)
INCREASING = (nn.Tanh, nn.ReLU)  # a pool may be computed before these, at fewer positions
LAYERS = (nn.Linear, nn.Conv2d)


class Link(ABC):
    """A module of a chain at the inputs of one pass, ``(N, S, ...)``, S copies of N data points.

    Columns of tangents and gradients are ``(K, N, S, ...)``; tangents that are the same for all copies may be ``(K, N, 1, ...)``.

    Attributes:
        out: the output, ``(N, S, ...)``.
    """

    out: Tensor

    @abstractmethod
    def along(self, t: Tensor) -> Tensor:
        """Tangents at the output of tangents at the input."""

    @abstractmethod
    def back(self, g: Tensor) -> Tensor:
        """Gradients at the input of gradients at the output."""

    def back_summed(self, g: Tensor) -> Tensor:
        """:meth:`back`, summed over copies, ``(K, N, ...)``."""
        return self.back(g).sum(2)


class Layer(Link):
    """A linear layer or a convolution."""

    def __init__(self, module: nn.Linear | nn.Conv2d, x: Tensor) -> None:
        self.module, self.shape = module, x.shape
        self.out = module.forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def along(self, t: Tensor) -> Tensor:
        m, (n, s) = self.module, self.shape[:2]
        t = t.expand(-1, -1, s, *t.shape[3:])
        if isinstance(m, nn.Linear):
            return F.linear(t, m.weight)
        found = F.conv2d(t.reshape(-1, *t.shape[3:]), m.weight, None, m.stride, m.padding, m.dilation, m.groups)
        return found.view(-1, n, s, *found.shape[1:])

    def back(self, g: Tensor) -> Tensor:
        m, size = self.module, self.shape[2:]
        if isinstance(m, nn.Linear):
            alike = g.stride(2) == 0 and g.shape[2] > 1  # for all copies, as at the outputs
            return (g[:, :, :1] @ m.weight).expand(-1, -1, g.shape[2], *size) if alike else g @ m.weight
        rows = g.reshape(-1, *g.shape[3:])
        reach = [d * (k - 1) - p for k, d, p in zip(m.kernel_size, m.dilation, m.padding, strict=True)]
        if m.stride == (1, 1) and m.groups == 1 and min(reach) >= 0 and size[1:].numel() <= 2 * g.shape[4:].numel():
            # With few channels a convolution with the mirrored kernel is several times faster than torch's transpose.
            kernel = m.weight.transpose(0, 1).flip(2, 3)
            return F.conv2d(rows, kernel, None, 1, reach, m.dilation).view(-1, *self.shape)
        geometry = (m.stride, m.padding, m.dilation, m.groups)
        return torch.nn.grad.conv2d_input((len(rows), *size), m.weight, rows, *geometry).view(-1, *self.shape)


class Reshaped(Link):
    """Another shape, or the same."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.shape = x.shape
        self.out = module.forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def along(self, t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:3], *self.out.shape[2:])

    def back(self, g: Tensor) -> Tensor:
        return g.reshape(-1, *self.shape)


class Pooled(Link):
    """Largest values of windows of planes, the last two axes."""

    def __init__(self, module: nn.MaxPool2d, x: Tensor) -> None:
        self.module, self.shape = module, x.shape
        self.out, self._places = _largest(module, x)

    def along(self, t: Tensor) -> Tensor:
        places = self._places.flatten(-2).expand(len(t), *self.out.shape[:-2], -1)
        flat = t.flatten(-2).expand(-1, -1, places.shape[2], *t.shape[3:-2], -1)
        return flat.gather(-1, places).view(len(t), *self.out.shape)

    def back(self, g: Tensor) -> Tensor:
        if g.is_cpu:
            found = g.new_zeros(len(g), *self.shape[:-2], self.shape[-2:].numel())
            places = self._places.flatten(-2).expand(len(g), *self.out.shape[:-2], -1)
            return found.scatter_add_(-1, places, g.flatten(-2)).view(-1, *self.shape)
        m, found = self.module, g.new_empty(len(g), *self.shape)
        sizes = [list(_pair(size)) for size in (m.kernel_size, m.stride, m.padding, m.dilation)]
        where = self._places.flatten(0, 1)
        for of_column, into in zip(g.flatten(1, 2), found.flatten(1, 2), strict=True):
            torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                of_column, into, *sizes, m.ceil_mode, where, grad_input=into
            )
        return found

    def back_summed(self, g: Tensor) -> Tensor:
        if not g.is_cpu:  # scatter_add_ there adds values that meet in any order
            return super().back_summed(g)
        n, size, channels = self.shape[0], self.shape[-2:].numel(), self.shape[2:-2]
        planes = torch.arange(n * channels.numel(), device=g.device).view(n, 1, *channels, 1) * size
        places = (self._places.flatten(-2) + planes).flatten()  # in the planes of all data points
        found = g.new_zeros(len(g), planes.numel() * size)
        found.scatter_add_(1, places.expand(len(g), -1), g.reshape(len(g), -1))
        return found.view(-1, n, *self.shape[2:])


def _largest(module: nn.MaxPool2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest values of windows of planes ``(N, S, ..., H, W)``, and their flat positions there, the first of equal values."""
    m = module
    kernel, stride, pads, dilation = (_pair(n) for n in (m.kernel_size, m.stride, m.padding, m.dilation))
    if any(pads) or m.ceil_mode or not x.is_cpu:
        found = F.max_pool2d(x.flatten(0, 1), kernel, stride, pads, dilation, m.ceil_mode, return_indices=True)
        return tuple(t.unflatten(0, x.shape[:2]) for t in found)
    # Tap by tap, where torch's kernel goes window by window. Later taps are farther from the first: the largest distance counts.
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[-2:], kernel, stride, dilation, strict=True)]
    rows, columns = (
        torch.arange(n, dtype=torch.int32, device=x.device) * s for n, s in zip(sizes, stride, strict=True)
    )
    value = distance = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            down, right = i * dilation[0], j * dilation[1]
            tap = x[..., down :: stride[0], right :: stride[1]][..., : sizes[0], : sizes[1]].contiguous()
            if value is None:
                value, distance = tap, torch.zeros_like(tap, dtype=torch.int32)
                continue
            larger = (tap > value).int().mul_(down * x.shape[-1] + right)
            distance, value = torch.maximum(distance, larger), torch.maximum(tap, value)
    return value, (distance + (rows[:, None] * x.shape[-1] + columns)).long()


class Elementwise(Link):
    """A function of every entry, with its two derivatives.

    Attributes:
        first, second: the derivatives, ``(N, S, ...)``; no second where it is zero.
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.second: Tensor | None = None
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

    def along(self, t: Tensor) -> Tensor:
        return t * self.first

    back = along

    def bent(self, t: Tensor, g: Tensor) -> Tensor:
        """Derivative at the input, ``(N, S, ...)``, of the summed products of tangents there and gradients from the output."""
        total = t[0] * g[0]
        for one, other in zip(t[1:], g[1:], strict=True):  # without the products of all columns
            total.addcmul_(one, other)
        return total * self.second


class Seen(NamedTuple):
    """The arguments of F.

    Attributes:
        inputs: for each layer the mean over copies, ``(N, ...)``.
        gradients: for each layer the sum over copies of gradients at its output, ``(K, N, ...)``.
    """

    inputs: list[Tensor]
    gradients: list[Tensor]


ColumnsOf = Callable[[Tensor], Tensor]
Derivatives = Callable[[Seen, Tensor], tuple[Seen, Tensor]]


class Chain:
    """A network of modules one after the other.

    Args:
        modules: as :func:`chain_of` gives them.

    Attributes:
        layers: those with parameters, in order.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.layers = [m for m in modules if isinstance(m, LAYERS)]
        self._modules: list[nn.Module] = []
        for module in modules:
            last = self._modules[-1:]
            if isinstance(module, nn.MaxPool2d) and last and isinstance(last[0], INCREASING):
                self._modules[-1:] = [module, *last]
            else:
                self._modules.append(module)

    @torch.no_grad()
    def gradient(
        self, chunks: Sequence[Callable[[], Tensor]], columns_of: ColumnsOf, derivatives: Derivatives
    ) -> Iterator[Tensor]:
        """The gradient of F in the copies ``(N, s, ...)`` of each chunk, one after the other.

        One chunk goes through the network once. Several go through it in four passes over all chunks: for the averages, the sums of
        gradients, the tangents at the outputs, and the gradients in copies. What is kept from one chunk to the next has no copies.

        Args:
            chunks: each makes some of the copies of N data points, the same ones in every call.
            columns_of: of the averaged outputs ``(N, ...)``, columns ``(K, N, ...)`` in their graph.
            derivatives: ``(seen, outputs) -> (those of F in seen, that in the outputs)``.
        """
        whole = [Way(self._modules, chunks[0]())] if len(chunks) == 1 else None

        def ways() -> Iterator[Way]:
            yield from (Way(self._modules, chunk()) for chunk in chunks) if whole is None else whole

        count, sums = 0, None
        for way in ways():
            count += way.copies
            sums = _added(sums, way.sums())
        *inputs, outputs = (total / count for total in sums)
        outputs.requires_grad_()
        with torch.enable_grad():
            columns = columns_of(outputs)
        back, gradients = columns.detach() / count, None
        for way in ways():
            gradients = _added(gradients, way.columns(back))
        of_seen, of_outputs = derivatives(Seen(inputs, gradients), outputs)
        tangent = None
        if columns.requires_grad or whole is not None:
            for way in ways():
                tangent = _added(tangent, [way.tangents(of_seen.gradients)])
        if columns.requires_grad:
            of_outputs = of_outputs + torch.autograd.grad(columns, outputs, tangent[0] / count)[0]
        for way in ways():
            if whole is None:
                way.columns(back)
                way.tangents(of_seen.gradients)
            yield way.gradient(of_outputs / count, [d / count for d in of_seen.inputs])


class Way:
    """The pass of some copies through a chain and back.

    Args:
        modules: of the chain.
        copies: ``(N, s, ...)``.
    """

    def __init__(self, modules: Sequence[nn.Module], copies: Tensor) -> None:
        self.copies, self._links, self._sums, x = copies.shape[1], [], [], copies
        for module in modules:
            if isinstance(module, LAYERS):
                self._sums.append(x.sum(1))
            self._links.append(_link(module, x))
            x = self._links[-1].out
        self._sums.append(x.sum(1))
        self._first = next(i for i, link in enumerate(self._links) if isinstance(link, Layer))
        self._behind: dict[int, Tensor] = {}
        self._bent: dict[int, Tensor] = {}

    def sums(self) -> list[Tensor]:
        """Sums over copies of each layer's inputs and of the outputs."""
        return self._sums

    def columns(self, columns: Tensor) -> list[Tensor]:
        """Take columns ``(K, N, ...)`` at the outputs back to the first layer's output.

        Returns:
            For each layer the sum over copies at its output, ``(K, N, ...)``. Gradients behind curved functions are kept.
        """
        links, gradients = self._links, []
        g = columns[:, :, None].expand(-1, -1, self.copies, *columns.shape[2:])
        for i in range(len(links) - 1, self._first, -1):
            if isinstance(links[i], Layer):
                gradients.insert(0, g.sum(2))
            elif isinstance(links[i], Elementwise) and links[i].second is not None:
                self._behind[i] = g
            if i > self._first + 1:
                g = links[i].back(g)
        summed = g.sum(2) if self._first + 1 == len(links) else links[self._first + 1].back_summed(g)
        return [summed, *gradients]

    def tangents(self, at_layers: Sequence[Tensor]) -> Tensor:
        """Take tangents forward, ``(K, N, ...)`` of which are added at each layer's output.

        Returns:
            Their sum over copies at the outputs. After :meth:`columns`, derivatives of curved functions are kept in place of gradients.
        """
        links, added, t = self._links, iter(at_layers), None
        for i in range(self._first, len(links)):
            if i in self._behind:
                self._bent[i] = links[i].bent(t, self._behind.pop(i))
            t = None if t is None else links[i].along(t)
            if isinstance(links[i], Layer):
                own = next(added)[:, :, None]
                t = own if t is None else t.add_(own)
        return t.expand(-1, -1, self.copies, *t.shape[3:]).sum(2)

    def gradient(self, of_outputs: Tensor, of_inputs: Sequence[Tensor]) -> Tensor:
        """Gradient in the copies, of derivatives at each copy's outputs and layers' inputs and of the curved functions'."""
        links, of_inputs = self._links, list(of_inputs)
        b = of_outputs[None, :, None].expand(1, -1, self.copies, *of_outputs.shape[1:])
        for i in range(len(links) - 1, -1, -1):
            b = links[i].back(b)
            if i in self._bent:
                b = b + self._bent.pop(i)
            if isinstance(links[i], Layer):
                b = b + of_inputs.pop()[:, None]
        return b[0]


def _added(total: list[Tensor] | None, more: list[Tensor]) -> list[Tensor]:
    return more if total is None else [a + b for a, b in zip(total, more, strict=True)]


def _link(module: nn.Module, x: Tensor) -> Link:
    if isinstance(module, LAYERS):
        return Layer(module, x)
    if isinstance(module, nn.MaxPool2d):
        return Pooled(module, x)
    return Elementwise(module, x) if isinstance(module, ELEMENTWISE) else Reshaped(module, x)


def chain_of(network: nn.Module) -> Chain | None:
    """The network as a chain; None unless it has known modules alone, each called once, without hooks of a user's."""
    modules: list[nn.Module] = []
    if not _add(network, modules) or len(set(modules)) < len(modules):
        return None
    return Chain(modules) if any(isinstance(m, LAYERS) for m in modules) else None


def chain_of_average(model: AveragedFunction) -> Chain | None:
    """The averaged network as a chain; None where it is none, or where a subclass or hooks may return other than its outputs' mean."""
    return chain_of(model.network) if is_plain_average(model) else None


def _add(module: nn.Module, modules: list[nn.Module]) -> bool:
    if is_changed(module):
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

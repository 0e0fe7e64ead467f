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
INCREASING = (nn.Tanh, nn.ReLU)
LAYERS = (nn.Linear, nn.Conv2d)
LANES = {"AVX512": 16, "AVX2": 8}  # of a vector of oneDNN's, by what torch says of the processor
PHASES = (1, 2, 4)  # rows or columns beside each other that may be channels of their own
WORTH = 0.75  # of a convolution's work, as the positions are to be put in order


class Link(ABC):
    """A module of a chain, or two, at the inputs of one pass, copies ``(N, S, ...)`` of data points. Columns of tangents and gradients are
    ``(K, N, S, ...)``; tangents that are the same for all copies may be ``(K, N, 1, ...)``.

    Attributes:
        out: the output, ``(N, S, ...)``.
        curved: whether there is a second derivative.
    """

    out: Tensor
    curved: bool = False

    @abstractmethod
    def along(self, t: Tensor) -> Tensor:
        """The derivative along tangents at the input."""

    @abstractmethod
    def back(self, g: Tensor) -> Tensor:
        """Gradients at the input of those at the output."""

    def back_summed(self, g: Tensor) -> Tensor:
        """:meth:`back`, summed over copies, ``(K, N, ...)``."""
        return self.back(g).sum(2)

    def bent(self, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative at the input, ``(N, S, ...)``, of the sum of products of tangents there and gradients at the output; and
        :meth:`along` of the tangents."""
        raise NotImplementedError


class Layer(Link):
    """A linear layer or a convolution."""

    def __init__(self, module: nn.Linear | nn.Conv2d, x: Tensor) -> None:
        self.module, self.shape, m = module, x.shape, module
        # The transpose of a convolution with the mirrored kernel, where oneDNN is faster by it.
        self._mirrored = (
            isinstance(m, nn.Conv2d)
            and x.is_cpu
            and m.out_channels > m.in_channels >= 16
            and m.stride == (1, 1)
            and m.groups == 1
            and min(self._reach()) >= 0
        )
        self.out = module.forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def _reach(self) -> list[int]:
        """The kernel's reach beyond the padding, along each axis."""
        m = self.module
        return [d * (k - 1) - p for k, d, p in zip(m.kernel_size, m.dilation, m.padding, strict=True)]

    def along(self, t: Tensor) -> Tensor:
        m, (n, s) = self.module, self.shape[:2]
        t = t if t.shape[2] == s else t.expand(-1, -1, s, *t.shape[3:])
        if isinstance(m, nn.Linear):
            return F.linear(t, m.weight)
        rows = t.reshape(-1, *t.shape[3:])
        if self._mirrored:
            kernel = m.weight.transpose(0, 1).flip(2, 3)
            found = F.conv_transpose2d(rows, kernel, None, 1, self._reach(), dilation=m.dilation)
        else:
            found = F.conv2d(rows, m.weight, None, m.stride, m.padding, m.dilation, m.groups)
        return found.view(-1, n, s, *found.shape[1:])

    def back(self, g: Tensor) -> Tensor:
        m = self.module
        if isinstance(m, nn.Linear):
            alike = g.stride(2) == 0 and g.shape[2] > 1  # for all copies, as at the outputs
            return (g[:, :, :1] @ m.weight).expand(-1, -1, g.shape[2], *self.shape[2:]) if alike else g @ m.weight
        rows = g.reshape(-1, *g.shape[3:])
        pads = self._reach()
        if (
            m.stride == (1, 1)
            and m.groups == 1
            and min(pads) >= 0
            and self.shape[3:].numel() <= 2 * g.shape[4:].numel()
        ):
            # A convolution with the mirrored kernel, which of few channels is several times faster than torch's transpose of one.
            kernel = m.weight.transpose(0, 1).flip(2, 3)
            if (phases := _phases(m, self.shape[3:], rows)) != (1, 1):
                return _by_phases(rows, kernel, pads, phases).view(-1, *self.shape)
            return F.conv2d(rows, kernel, None, 1, pads, m.dilation).view(-1, *self.shape)
        sides = zip(self.shape[3:], m.padding, m.dilation, m.kernel_size, m.stride, g.shape[4:], strict=True)
        beyond = [size - (d * (k - 1) + 1 + step * (o - 1) - 2 * p) for size, p, d, k, step, o in sides]
        found = F.conv_transpose2d(rows, m.weight, None, m.stride, m.padding, beyond, m.groups, m.dilation)
        return found.view(-1, *self.shape)


def _phases(module: nn.Conv2d, size: Sequence[int], g: Tensor) -> tuple[int, int]:
    """The numbers of rows and columns of planes of that size, of gradients in a convolution's input, that are channels of their own. OneDNN
    computes channels by whole vectors: positions as channels fill these, but the kernel must then reach them all, with zeros in it."""
    lanes = LANES.get(torch.backends.cpu.get_cpu_capability())
    if not g.is_cpu or g.dtype != torch.float32 or module.dilation != (1, 1) or lanes is None:
        return 1, 1
    kernel, channels = module.kernel_size, module.in_channels

    def work(phases: tuple[int, int]) -> float:  # of a position
        vectors = -(-channels * phases[0] * phases[1] // lanes)
        return vectors * (kernel[0] + phases[0] - 1) * (kernel[1] + phases[1] - 1) / (phases[0] * phases[1])

    ways = [(i, j) for i in PHASES for j in PHASES if size[0] % i == 0 == size[1] % j]
    best = min(ways, key=work)
    return best if work(best) < WORTH * work((1, 1)) else (1, 1)


def _by_phases(x: Tensor, kernel: Tensor, pads: Sequence[int], phases: tuple[int, int]) -> Tensor:
    """``conv2d(x, kernel, padding=pads)``, whose planes are multiples of the phases."""
    (down, right), (channels, inputs, high, wide) = phases, kernel.shape
    moved = kernel.new_zeros(channels, down, right, inputs, high + down - 1, wide + right - 1)
    for i in range(down):
        for j in range(right):
            moved[:, i, j, :, i : i + high, j : j + wide] = kernel
    found = F.conv2d(x, moved.flatten(0, 2), None, phases, pads).unflatten(1, (channels, down, right))
    return found.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)


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
    """Largest values of windows of planes, the last two axes, as they are or of a function of every entry, whose derivatives then count
    where these are."""

    def __init__(self, module: nn.MaxPool2d, x: Tensor, function: nn.Module | None = None) -> None:
        self.module, self.shape = module, x.shape
        rises = isinstance(function, INCREASING)  # so that its largest values are where its arguments' are
        whole = None if function is None or rises else Elementwise(function, x)
        self.out, places = _largest(module, x if whole is None else whole.out)
        self._whole_places, self._places = places, places.flatten(-2)
        self._first = self._second = None
        if rises:
            there = Elementwise(function, self.out)
            self.out, self.curved, self._first, self._second = there.out, there.curved, there.first, there.second
        elif whole is not None:
            self.curved, self._first = whole.curved, self._there(whole.first[None])[0]
            self._second = self._there(whole.second[None])[0] if whole.curved else None

    def _there(self, values: Tensor) -> Tensor:
        """``(K, N, S or 1, ...)`` where the largest values are."""
        places = self._places.expand(len(values), *self._places.shape)
        flat = values.flatten(-2).expand(-1, -1, places.shape[2], *values.shape[3:-2], -1)
        return flat.gather(-1, places).view(len(values), *self.out.shape)

    def along(self, t: Tensor) -> Tensor:
        there = self._there(t)
        return there if self._first is None else there.mul_(self._first)

    def back(self, g: Tensor) -> Tensor:
        return self._spread(g if self._first is None else g * self._first)

    def back_summed(self, g: Tensor) -> Tensor:
        if not g.is_cpu:  # where values that meet would be added in any order
            return super().back_summed(g)
        g = g if self._first is None else g * self._first
        n, size, channels = self.shape[0], self.shape[-2:].numel(), self.shape[2:-2]
        planes = torch.arange(n * channels.numel(), device=g.device).view(n, 1, *channels, 1) * size
        places = (self._places + planes).flatten()  # in the planes of all data points
        found = g.new_zeros(len(g), planes.numel() * size)
        found.scatter_add_(1, places.expand(len(g), -1), g.reshape(len(g), -1))
        return found.view(-1, n, *self.shape[2:])

    def bent(self, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        there = self._there(t)
        return self._spread((_over_columns(there, g) * self._second)[None])[0], there.mul_(self._first)

    def _spread(self, values: Tensor) -> Tensor:
        """Values at the largest ones among zeros."""
        if not values.is_cpu:
            m, found = self.module, values.new_empty(len(values), *self.shape)
            sizes = [list(_pair(size)) for size in (m.kernel_size, m.stride, m.padding, m.dilation)]
            where = self._whole_places.flatten(0, 1)
            for of_column, into in zip(values.flatten(1, 2), found.flatten(1, 2), strict=True):
                torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                    of_column, into, *sizes, m.ceil_mode, where, grad_input=into
                )
            return found
        found = values.new_zeros(len(values), *self.shape[:-2], self.shape[-2:].numel())
        places = self._places.expand(len(values), *self._places.shape)
        return found.scatter_add_(-1, places, values.flatten(-2)).view(-1, *self.shape)


def _largest(module: nn.MaxPool2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values of windows of planes ``(N, S, ..., H, W)``, and where they are in the planes, the first of equal ones."""
    m = module
    kernel, stride, pads, dilation = (_pair(n) for n in (m.kernel_size, m.stride, m.padding, m.dilation))
    if any(pads) or m.ceil_mode or not x.is_cpu:
        found = F.max_pool2d(x.flatten(0, 1), kernel, stride, pads, dilation, m.ceil_mode, return_indices=True)
        return tuple(t.unflatten(0, x.shape[:2]) for t in found)
    # One tap after the other; torch's kernel goes through windows. A tap's distance from the first grows, so that the largest one counts.
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
    """A function of every entry, with its two derivatives."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.curved, self.second = not isinstance(module, nn.ReLU), None
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

    def bent(self, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return _over_columns(t, g) * self.second, self.along(t)


class Seen(NamedTuple):
    """The arguments of F: of each layer the inputs' mean over copies, ``(N, ...)``, and the sum over copies of gradients at its output,
    ``(K, N, ...)``."""

    inputs: list[Tensor]
    gradients: list[Tensor]


ColumnsOf = Callable[[Tensor], Tensor]
Derivatives = Callable[[Seen, Tensor], tuple[Seen, Tensor]]


class Chain:
    """A network of modules one after the other, as :func:`chain_of` gives them; ``layers`` are those with parameters, in order."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.layers = [m for m in modules if isinstance(m, LAYERS)]
        self._parts: list[list[nn.Module]] = []
        for module in modules:
            if isinstance(module, nn.MaxPool2d) and self._parts and isinstance(self._parts[-1][-1], ELEMENTWISE):
                self._parts[-1].append(module)  # a function and the pool behind it
            else:
                self._parts.append([module])

    @torch.no_grad()
    def gradient(
        self, chunks: Sequence[Callable[[], Tensor]], columns_of: ColumnsOf, derivatives: Derivatives
    ) -> Iterator[Tensor]:
        """The gradient of F in the copies ``(N, s, ...)`` of each chunk, one after another. One chunk goes through the network once. Several
        do so for the averages, for the sums of gradients, for tangents at the outputs, and for the gradients in copies; what is kept from one
        to the next has no copies.

        Args:
            chunks: each makes some of the copies of N data points, the same ones in every call.
            columns_of: of the averaged outputs ``(N, ...)``, columns ``(K, N, ...)`` in their graph.
            derivatives: ``(seen, outputs) -> (those of F in seen, that in the outputs)``.
        """
        whole = [Way(self._parts, chunks[0]())] if len(chunks) == 1 else None

        def ways() -> Iterator[Way]:
            yield from (Way(self._parts, chunk()) for chunk in chunks) if whole is None else whole

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
    """The way of some copies ``(N, s, ...)`` through a chain and back."""

    def __init__(self, parts: Sequence[Sequence[nn.Module]], copies: Tensor) -> None:
        self.copies, self._links, self._sums, x = copies.shape[1], [], [], copies
        for part in parts:
            if isinstance(part[0], LAYERS):
                self._sums.append(x.sum(1))
            self._links.append(_link(part, x))
            x = self._links[-1].out
        self._sums.append(x.sum(1))
        self._first = next(i for i, link in enumerate(self._links) if isinstance(link, Layer))
        self._behind: dict[int, Tensor] = {}
        self._bent: dict[int, Tensor] = {}

    def sums(self) -> list[Tensor]:
        """Over copies, of each layer's inputs and of the outputs."""
        return self._sums

    def columns(self, columns: Tensor) -> list[Tensor]:
        """Columns ``(K, N, ...)`` back to the first layer's output; of each layer, the sum over copies there. What is behind each curved
        function is kept."""
        links, gradients = self._links, []
        g = columns[:, :, None].expand(-1, -1, self.copies, *columns.shape[2:])
        for i in range(len(links) - 1, self._first, -1):
            if isinstance(links[i], Layer):
                gradients.insert(0, g.sum(2))
            elif links[i].curved:
                self._behind[i] = g
            if i > self._first + 1:
                g = links[i].back(g)
        summed = g.sum(2) if self._first + 1 == len(links) else links[self._first + 1].back_summed(g)
        return [summed, *gradients]

    def tangents(self, at_layers: Sequence[Tensor]) -> Tensor:
        """Tangents forward, ``(K, N, ...)`` of which are added at each layer's output; their sum over copies at the outputs. Where columns
        were there before, what they bend is kept in their place."""
        links, added, t = self._links, iter(at_layers), None
        for i in range(self._first, len(links)):
            if i in self._behind:
                self._bent[i], t = links[i].bent(t, self._behind.pop(i))
            else:
                t = None if t is None else links[i].along(t)
            if isinstance(links[i], Layer):
                own = next(added)[:, :, None]
                t = own if t is None else t.add_(own)
        return t.expand(-1, -1, self.copies, *t.shape[3:]).sum(2)

    def gradient(self, of_outputs: Tensor, of_inputs: Sequence[Tensor]) -> Tensor:
        """The gradient in the copies of what has these derivatives at each copy's outputs and layers' inputs, and of what is bent."""
        links, of_inputs = self._links, list(of_inputs)
        b = of_outputs[None, :, None].expand(1, -1, self.copies, *of_outputs.shape[1:])
        for i in range(len(links) - 1, -1, -1):
            b = links[i].back(b)
            if i in self._bent:
                b = b + self._bent.pop(i)
            if isinstance(links[i], Layer):
                b = b + of_inputs.pop()[:, None]
        return b[0]


def _over_columns(t: Tensor, g: Tensor) -> Tensor:
    """The sum over columns of products, without these."""
    total = t[0] * g[0]
    for one, other in zip(t[1:], g[1:], strict=True):
        total.addcmul_(one, other)
    return total


def _added(total: list[Tensor] | None, more: list[Tensor]) -> list[Tensor]:
    return more if total is None else [a + b for a, b in zip(total, more, strict=True)]


def _link(part: Sequence[nn.Module], x: Tensor) -> Link:
    module = part[0]
    if isinstance(module, LAYERS):
        return Layer(module, x)
    if isinstance(module, nn.MaxPool2d):
        return Pooled(module, x)
    if not isinstance(module, ELEMENTWISE):
        return Reshaped(module, x)
    return Pooled(part[1], x, module) if len(part) == 2 else Elementwise(module, x)


def chain_of(network: nn.Module) -> Chain | None:
    """The network as a chain; None where it is none of known modules, each called once, without hooks of a user's."""
    modules: list[nn.Module] = []
    if not _add(network, modules) or len(set(modules)) < len(modules):
        return None
    return Chain(modules) if any(isinstance(m, LAYERS) for m in modules) else None


def chain_of_average(model: AveragedFunction) -> Chain | None:
    """The averaged network as a chain; None where it is none, or what the model returns may be other than its outputs' mean: of a subclass,
    and with hooks."""
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

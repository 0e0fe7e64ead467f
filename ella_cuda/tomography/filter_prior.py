"""Gaussian priors of convolution filters, one for each block of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

JITTER = 1e-6  # on the diagonal of the correlations of taps
CHUNK = 1 << 26  # bytes of a copy


class Block(NamedTuple):
    """Filters with a common prior.

    Attributes:
        name: of the block and its kernel size. parameters: of the weights, ``(out, in, *kernel_size)`` each.
        kernel_size: of all of them. n_filters: in all of them.
    """

    name: str
    parameters: tuple[str, ...]
    kernel_size: tuple[int, int]
    n_filters: int

    @property
    def n_taps(self) -> int:
        return self.kernel_size[0] * self.kernel_size[1]


def filter_blocks(network: nn.Module) -> dict[str, list[str]]:
    """The weights of a network's 2-D convolutions by block: those of one kernel size in the network's outermost module that is no
    ``ModuleList`` or ``ModuleDict``. Of :class:`UNet`, ``inc``, ``down.i``, ``up.i`` and ``outc``, where the 1x1
    convolutions of ``up.i`` are a block of their own. A weight of several convolutions is in the first one's."""
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for path, module in network.named_modules():
        if not isinstance(module, nn.Conv2d) or not module.weight.requires_grad or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        parts, outer, depth = path.split(".") if path else [], network, 0
        while depth < len(parts) and (depth == 0 or isinstance(outer, (nn.ModuleList, nn.ModuleDict))):
            outer, depth = outer.get_submodule(parts[depth]), depth + 1
        name = ".".join(parts[:depth]) or "conv"
        size = "x".join(map(str, module.kernel_size))
        found.setdefault(f"{name} {size}", []).append(f"{path}.weight" if path else "weight")
    return found


class FilterPrior:
    r"""Independent Gaussian filters: in block d, each has covariance :math:`\sigma_d^2 K(\ell_d)` over its taps,
    :math:`K_{ab} = \exp(-|a - b| / \ell_d) + 10^{-6} \delta_{ab}` (Matern-1/2, Euclidean distance between taps); filters of one tap have
    variance :math:`\sigma_d^2` alone.

    K depends on the lengthscale through the distances of taps only, six for 3x3 filters. So the covariance of all weights is a sum of
    constant matrices, called terms here, one for each block and distance, times weights that hyperparameters decide: 33 for the paper's
    network. :math:`\theta` is the weights of all blocks, one after the other, as ``parameter_names`` has them.

    Args:
        network: whose filters have the prior. Its other parameters have none and are held.
        blocks: names of weights by block; None is :func:`filter_blocks`. Weights that no block names are held.

    Attributes:
        blocks: a tuple of :class:`Block`. smooth: numbers of the blocks that have a lengthscale.
        terms: ``(block, distance)`` of every term, block after block. of_block: their blocks, a tensor. masks: of each block, for each of its
            terms the pairs of taps at that distance, ``(terms, taps, taps)``. parameter_names: of theta. n_params: P.

    Raises:
        TypeError: a block's weight is no convolution's.
        ValueError: no block, a weight named twice, or weights of one block with several kernel sizes.

    Source: Antoran, Barbano et al., TMLR 2023, section 4.1.
    """

    def __init__(self, network: nn.Module, blocks: Mapping[str, Sequence[str]] | None = None) -> None:
        named = filter_blocks(network) if blocks is None else blocks
        if not named:
            raise ValueError(
                "FilterPrior: the network must have a torch.nn.Conv2d with a trainable weight, or blocks must name weights; got none."
            )
        weights = dict(network.named_parameters())
        found, seen = [], set()
        for name, members in named.items():
            for member in members:
                if member not in weights or weights[member].dim() != 4:
                    got = f"of shape {tuple(weights[member].shape)}" if member in weights else "which the network lacks"
                    raise TypeError(
                        f"FilterPrior: blocks[{name!r}] must name weights (out, in, height, width), got {member!r}, {got}."
                    )
                if member in seen:
                    raise ValueError(f"FilterPrior: blocks must name each weight once, got {member!r} twice.")
                seen.add(member)
            sizes = {tuple(weights[member].shape[2:]) for member in members}
            if len(sizes) > 1:
                raise ValueError(f"FilterPrior: blocks[{name!r}] must have one kernel size, got {sorted(sizes)}.")
            (size,) = sizes
            count = sum(weights[member].numel() for member in members) // (size[0] * size[1])
            found.append(Block(name, tuple(members), size, count))
        self.blocks = tuple(found)
        self.parameter_names = [name for block in self.blocks for name in block.parameters]
        self._sizes = [block.n_filters * block.n_taps for block in self.blocks]
        self.n_params = sum(self._sizes)
        self.smooth = [i for i, block in enumerate(self.blocks) if block.n_taps > 1]
        self.terms: list[tuple[int, float]] = []
        masks: list[Tensor] = []  # of each block: for each term, the pairs of taps at its distance
        for i, block in enumerate(self.blocks):
            squares = _square_distances(block.kernel_size)
            found_here = squares.unique()
            self.terms += [(i, square**0.5) for square in found_here.tolist()]
            masks.append((squares == found_here[:, None, None]).double())
        device = weights[self.parameter_names[0]].device
        self.masks = [mask.to(device) for mask in masks]
        of_block, distance = zip(*self.terms, strict=True)
        self.of_block = torch.tensor(of_block, device=device)
        self._distance = torch.tensor(distance, dtype=torch.float64, device=device)
        place = {block: i for i, block in enumerate(self.smooth)}
        self._place = torch.tensor([place.get(i, len(place)) for i in of_block], device=device)  # of its lengthscale
        self._jitter = JITTER * ((self._distance == 0) & (self._place < len(place)))

    def weights(self, log_variance: Tensor, log_lengthscale: Tensor) -> Tensor:
        """Of the terms, ``(T,)``, from logarithms of variances ``(blocks,)`` and of lengthscales ``(smooth blocks,)``; differentiable."""
        inverse = torch.cat([(-log_lengthscale).exp(), log_lengthscale.new_zeros(1)])
        return log_variance.exp()[self.of_block] * ((-self._distance * inverse[self._place]).exp() + self._jitter)

    def by_block(self, values: Tensor) -> list[Tensor]:
        """Values of terms ``(T, ...)``, block by block."""
        return list(values.split([len(mask) for mask in self.masks]))

    def tap_covariances(self, weights: Tensor) -> list[Tensor]:
        """Of a filter of each block, ``(taps, taps)``, from the terms' weights; differentiable."""
        parts = zip(self.by_block(weights), self.masks, strict=True)
        return [torch.tensordot(some, mask, 1) for some, mask in parts]

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Vectors ``(..., P)`` by block: ``(..., filters, taps)``."""
        parts = vectors.split(self._sizes, -1)
        return [p.unflatten(-1, (b.n_filters, b.n_taps)) for b, p in zip(self.blocks, parts, strict=True)]

    def multiply(self, vectors: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Each filter of ``(..., P)`` times the matrix of its block: with covariances of taps, the prior's covariance times vectors."""
        parts = zip(self.split(vectors), taps, strict=True)
        return torch.cat([(part @ matrix.to(part)).flatten(-2) for part, matrix in parts], -1)

    def draw(self, normal: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Weights drawn from the prior, of standard normal ``(..., P)``."""
        return self.multiply(normal, [torch.linalg.cholesky(matrix.double()).T for matrix in taps])

    def moments(self, theta: Tensor) -> list[Tensor]:
        """Sums over filters of their outer products, ``(taps, taps)`` for each block: all that :meth:`penalty` needs of theta."""
        return [part.T @ part for part in self.split(theta.double())]

    def penalty(self, moments: Sequence[Tensor], weights: Tensor) -> Tensor:
        """theta' S^-1 theta, differentiable in the terms' weights."""
        taps = self.tap_covariances(weights)
        return sum(torch.linalg.solve(k, m).diagonal().sum() for k, m in zip(taps, moments, strict=True))

    def pairings(self, u: Tensor, v: Tensor) -> Tensor:
        """u' (term) v for every term, summed over rows ``(S, P)``: ``(T,)``, float64."""
        parts = zip(self.split(u), self.split(v), self.masks, strict=True)
        crossed = [(torch.einsum("sfa,sfb->ab", a.double(), b.double()) * mask).sum((1, 2)) for a, b, mask in parts]
        return torch.cat(crossed)

    def gram(self, rows: Tensor, term: int, chunk: int = CHUNK) -> Tensor:
        """rows (term) rows' of ``(n, P)``: ``(n, n)``, float64, by as many filters at a time as a copy of ``chunk`` bytes holds."""
        block = self.terms[term][0]
        mask = self.masks[block][term - [of for of, _ in self.terms].index(block)]
        part, found = (
            self.split(rows)[block],
            torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device),
        )
        step = max(1, chunk // (8 * max(1, len(rows)) * self.blocks[block].n_taps))
        for some in part.split(step, 1):
            wide = some.double()
            found.addmm_((wide @ mask).flatten(1), wide.flatten(1).T)
        return found


def _square_distances(kernel_size: tuple[int, int]) -> Tensor:
    """Between taps, row after row: ``(taps, taps)``, whole numbers."""
    rows, columns = torch.meshgrid(*(torch.arange(n, device="cpu") for n in kernel_size), indexing="ij")
    at = torch.stack([rows.flatten(), columns.flatten()], 1)
    return ((at[:, None] - at) ** 2).sum(-1)

"""What several tests of fits need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace


class Function(nn.Module):
    """A network of layers and parameters by name, and a function of it and its inputs."""

    def __init__(self, function: Callable[..., Tensor], /, **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, *inputs: Tensor, **named: object) -> Tensor:
        return self._function(self, *inputs, **named)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(model: nn.Module, std: float = 0.5) -> nn.Module:
    """In float64 and evaluation mode, with parameters and statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=std, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            nn.init.normal_(buffer, generator=generator)
        elif name.endswith("running_var"):
            nn.init.uniform_(buffer, 0.3, 2.0, generator=generator)
    return model.double().eval()


def sequences(images: int, classes: int) -> tuple[Tensor, Tensor]:
    """Data of five positions of four numbers each, float64, with a label each."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(images, 5, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (images,), generator=generator)


def image_batches(device: torch.device, side: int) -> list[tuple[Tensor, Tensor]]:
    """Seven images of two channels with one of three labels, float64, in two batches."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 2, side, side, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(3, (7,), generator=generator).to(device)
    return [(x[:4], y[:4]), (x[4:], y[4:])]


class Reusing:
    """Yields batches in the same memory, which it spoils when the next one is asked for and when the pass ends."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        places = [torch.empty_like(part) for part in max(self.batches, key=lambda batch: len(batch[1]))]
        for batch in self.batches:
            views = tuple(place[: len(part)].copy_(part) for place, part in zip(places, batch, strict=True))
            try:
                yield views
            finally:
                for place in places:
                    place.fill_(99)


def assert_same_factors(one: KronLaplace, other: KronLaplace) -> None:
    """Equal up to rounding in float64."""
    assert len(one.factors) == len(other.factors) > 0
    for ours, theirs in zip(one.factors.values(), other.factors.values(), strict=True):
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-11, atol=1e-13)


def assert_exact_biases(model: nn.Module, x: Tensor, **settings: object) -> None:
    """Blocks of all biases of a classification are those of the Gauss-Newton matrix, by plain backward passes of single outputs. One of a
    layer's position each shows what gradients come there.
    """
    la = KronLaplace(model, **settings).fit([(x, torch.arange(len(x)) % 3)])
    biases = {name: p for name, p in model.named_parameters() if p.requires_grad and name.endswith("bias")}
    f = model.eval()(x)
    rows = [torch.autograd.grad(output, list(biases.values()), retain_graph=True) for output in f.flatten()]
    p = f.detach().softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    for name, parts in zip(biases, zip(*rows, strict=True), strict=True):
        j = torch.stack(parts).view(*f.shape, -1)
        expected = torch.einsum("nki,nkl,nlj->ij", j, hessian, j)
        assert expected.abs().max() > 1e-8
        found = la.factors[name].to_dense()[0]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11 * float(expected.abs().max()), msg=name)

"""What a fit makes of the networks that people bring: time, peak memory, or why the network is refused.

    python -m benchmarks.torchvision_networks [--images N] [--size N] [--fisher exact|mc] [--unknown error|freeze|diagonal] [NAME ...]

Networks of torchvision and of ``torch.nn`` with random weights, 10 classes, on random images. A line for each: parameters, seconds of a
fit, MB at its peak above what was there before, how many parameter tensors have which blocks, or the first line of the refusal.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.memory import peak_bytes
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.rules import UNKNOWN
from ella_cuda.reports.text import columns

CLASSES = 10
TORCHVISION = (
    "resnet18",
    "resnet50",
    "vgg16_bn",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
)


def small_resnet18() -> nn.Module:
    """For images of 32x32 pixels: a first convolution of 3x3 without stride, no pooling behind it."""
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


class UNet(nn.Module):
    """Two resolutions, transposed convolutions on the way up, a mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.Sequential(
            nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2)
        )
        self.head = nn.Conv2d(32, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        return self.head(torch.cat([high, self.inner(high)], 1)).mean((2, 3))


class Sequences(nn.Module):
    """The rows of an image as a sequence, through a recurrent network or an encoder."""

    def __init__(self, body: nn.Module, size: int) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(3 * size, 32), body, nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self.embed(x.transpose(1, 2).flatten(2)))
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


def networks(size: int) -> dict[str, Callable[[], nn.Module]]:
    """Constructors by name; image sizes are those of the argument where a network asks for one."""
    made = {name: lambda name=name: getattr(torchvision.models, name)(num_classes=CLASSES) for name in TORCHVISION}
    made["vit_b_16"] = lambda: torchvision.models.vit_b_16(num_classes=CLASSES, image_size=size)
    made["U-Net"] = UNet
    made["LSTM"] = lambda: Sequences(nn.LSTM(32, 32, batch_first=True), size)
    layer = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "batch_first": True}
    made["TransformerEncoder"] = lambda: Sequences(nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2), size)
    return made


def row(name: str, make: Callable[[], nn.Module], x: Tensor, y: Tensor, **settings: str) -> list[str]:
    """The cells of a network's line."""
    torch.manual_seed(0)
    model = make()
    count = f"{sum(p.numel() for p in model.parameters()):,}"
    try:
        la = KronLaplace(model, **settings)
        started = time.perf_counter()
        peak = peak_bytes(lambda: la.fit([(x, y)]), x.device, once=True)
        seconds = time.perf_counter() - started
    except (TypeError, ValueError, MemoryError) as refusal:
        return [name, count, "-", "-", "-", str(refusal).splitlines()[0][:120]]
    blocks = Counter(line.split()[-1] for line in la.summary().splitlines()[1:-1])
    return [
        name,
        count,
        f"{seconds:.1f}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
        ", ".join(f"{count} {kind}" for kind, count in blocks.most_common() if kind != "-"),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, if none is named")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="pixels a side, a multiple of 32")
    parser.add_argument("--fisher", choices=["exact", "mc"], default="mc")
    parser.add_argument("--unknown", choices=UNKNOWN, default="diagonal")
    arguments = parser.parse_args()
    made = networks(arguments.size)
    for name in arguments.names:
        if name not in made:
            parser.error(f"no network {name!r}; there are {', '.join(made)}")
    torch.manual_seed(0)
    x, y = torch.randn(arguments.images, 3, arguments.size, arguments.size), torch.randint(CLASSES, (arguments.images,))
    rows = [["network", "parameters", "fit, s", "peak, MB", "blocks", "refused"]]
    rows += [
        row(name, made[name], x, y, fisher=arguments.fisher, unknown=arguments.unknown)
        for name in tqdm(arguments.names or list(made))
    ]
    print(columns(rows))


if __name__ == "__main__":
    main()

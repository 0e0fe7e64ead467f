"""How many kernels the Kronecker sums of one batch launch on CUDA, counted without a GPU.

    python -m benchmarks.fit_launches [--multiprocessors 132]

The launchers are those of csrc, compiled for the simulator of the test suite; their kernels do not run. Layers' calls are those of networks
of torchvision with frozen norms, one sampled column, the second batch of a fit; nothing is counted but the sums.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import torch
import torchvision
from torch import nn

from ella_cuda.laplace import kronecker_sums
from ella_cuda.laplace.call import Call
from ella_cuda.laplace.kronecker_sums import KroneckerSums
from ella_cuda.laplace.rules.base import rule_for
from python_tests.cuda_sim import simulator as build

NETWORKS = [("resnet18", 512, 32), ("resnet50", 64, 224)]  # images, their rows and columns


def shapes_of(name: str, images: int, size: int) -> list[tuple[str, nn.Module, torch.Size, torch.Size]]:
    """Layers with factors in the order of their calls, and the shapes of their inputs and outputs."""
    found = []
    with torch.device("meta"):
        model = getattr(torchvision.models, name)(num_classes=10)
        for layer, module in model.named_modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(
                    lambda m, x, out, layer=layer: found.append((layer, m, x[0].shape, out.shape))
                )
        model(torch.empty(images, 3, size, size))
    return found


def count(simulator: build.Simulator, name: str, images: int, size: int) -> dict[str, int]:
    """Launches on the way forward and back."""
    sums, calls = KroneckerSums(), []
    for layer, module, x, out in shapes_of(name, images, size):
        rule = rule_for(module.to_empty(device="cpu"), layer)
        rule.allocate()
        for side in rule.factors["weight"].input_moment, rule.factors["weight"].output_moment:
            side.products, side.are_alike = 1 << 60, False  # as after many batches, and of rows that differ
        calls.append((Call(rule), x, out))
    found: dict[str, int] = {}
    before = simulator.launch_count()
    for call, x, _ in calls:
        sums.forward(call, [torch.empty(x)])
    sums.close()
    found["forward"] = simulator.launch_count() - before
    for call, _, out in reversed(calls):
        sums.add_outputs(call, call.rule.output_rows(torch.empty(1, *out), call.kept))
    sums.flush()
    found["back"] = simulator.launch_count() - before - found["forward"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--multiprocessors", type=int, default=132)
    options = parser.parse_args()
    with patch.object(build, "FLAGS", [flag for flag in build.FLAGS if not flag.startswith("-DELLA_MAX")]):
        simulator = build.Simulator(build.build(["kron_accumulate", "conv_kron_accumulate"]))
    device = {"multiprocessors": options.multiprocessors, "warpgroups": True, "blocks": "none"}
    with simulator.scheduled(**device), simulator.on_cpu_tensors():
        for name, images, size in NETWORKS:
            for together in (False, True):
                with patch.object(kronecker_sums, "together", lambda values, together=together: together):
                    found = count(simulator, name, images, size)
                words = "together" if together else "one by one"
                print(f"{name}, {images} images {size}x{size}, sums {words}: {sum(found.values())} launches {found}")


if __name__ == "__main__":
    main()

"""What decomposing all factors of a network asks of torch: ops, reads of the host, and the cubes of the rows.

    python -m benchmarks.decomposition [--images N] [--size N] [--rows N] [--bases] [--cuda]

The factors are those of torchvision's resnet18 with its norms frozen, of one sampled column of the output Hessian; ``--rows`` says that
they are sums of so many outer products more, as of more data. ``--bases`` has the eigenvectors too. ``--cuda`` takes the way that tensors
on CUDA take, on the CPU: the op stands for our kernel, and each of torch's decompositions waits for the device once. Ops are those of the
calling thread.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torchvision
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ella_cuda.laplace import KronLaplace, SecondMoment

READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
}
DECOMPOSITIONS = {"aten._linalg_eigh.default", "ella_cuda.symmetric_eigenvalues.default"}


class Elsewhere(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cpu = False
    is_cuda = True


class Reads(TorchFunctionMode):
    """Counts the functions that give the host values of tensors elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in READS and isinstance(args[0], Elsewhere)
        return function(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Counts ops, those that are no views, and the cubes of the rows of what is decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.views = self.cubes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(op)] += 1
        aliases = (result.alias_info for result in op._schema.returns)
        self.views += any(alias is not None and not alias.is_write for alias in aliases)
        if str(op) in DECOMPOSITIONS:
            self.cubes += cubes(args[0] if isinstance(args[0], (list, tuple)) else args[:1])
        return op(*args, **(kwargs or {}))


def cubes(sets: Any) -> int:
    return sum(blocks.shape[:-2].numel() * blocks.shape[-1] ** 3 for blocks in sets)


def moments(images: int, size: int) -> list[SecondMoment]:
    """The sides of the factors."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.requires_grad_(False)
    batch = torch.randn(images, 3, size, size), torch.randint(10, (images,))
    la = KronLaplace(model, fisher="mc").fit([batch])
    sides = (m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None)
    return list(dict.fromkeys(sides))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--bases", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    arguments = parser.parse_args()
    given = moments(arguments.images, arguments.size)
    whole = cubes([m.total for m in given])
    for moment in given:
        moment.count(arguments.rows)
        if arguments.cuda:
            moment.total = moment.total.as_subclass(Elsewhere)
    by_lapack: list[int] = []
    ops, reads = Ops(), Reads()
    with ExitStack() as stack:
        stack.enter_context(mock.patch("ella_cuda.laplace.eigenvalues.own_rows", lambda device: 1024))
        for name in ("eigvalsh", "eigh"):
            solve = getattr(torch.linalg, name)
            noting = lambda blocks, solve=solve: by_lapack.append(cubes([blocks])) or solve(blocks)  # noqa: E731
            stack.enter_context(mock.patch(f"torch.linalg.{name}", noting))
        for mode in (reads, ops):
            stack.enter_context(mode)
        (SecondMoment.bases_of_all if arguments.bases else SecondMoment.decompose_all)(given)
    waits = reads.count + (ops.ops["aten._linalg_eigh.default"] if arguments.cuda else 0)
    total = sum(ops.ops.values())
    print(f"sides {len(given)}, sum of cubes of rows {whole:.3g}")
    print(f"ops {total}, without views {total - ops.views}: {dict(ops.ops.most_common(12))}")
    print(f"reads of the host {waits}, of them by torch's decompositions {waits - reads.count}")
    print(f"sum of cubes of what is decomposed {ops.cubes if arguments.cuda else sum(by_lapack):.3g}")


if __name__ == "__main__":
    main()

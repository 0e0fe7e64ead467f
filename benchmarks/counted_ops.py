"""What torch dispatches in a call, and how often the host waits to read a tensor: numbers that no machine's speed moves.

    python -m benchmarks.counted_ops [--device cpu|cuda] [--network resnet18|regression]

A line for each phase of an evidence update of resnet18 with frozen norms, and of a regression, and for predictions of a batch: ops, those
that are no views, host reads. On the CPU predictions take the branches of CUDA, and a stand-in for its graphs is not counted when it is
replayed. A read is counted where a GPU's tensor would be waited for; what threads of the decomposition do is not seen.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ella_cuda.laplace import (
    KronLaplace,
    column_functions,
    fingerprint,
    kronecker_sums,
    recorded_batches,
    second_moment,
)
from python_tests.recorded import RecordedGraphs

aten = torch.ops.aten
# Those whose result, or the size of whose result, the host needs.
READING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
}
INDEXING = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
}  # by masks, which become numbers of elements
TO_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}  # of which a tensor on the CPU dispatches nothing


class Counted:
    """Counts ops and host reads of this thread for the duration of a context.

    Attributes:
        ops: how often each op was dispatched, by its name. views: those of them that make no numbers.
        reads: how often the host read a tensor, by the name of what read it.

    Args:
        refuse: whether a host read raises RuntimeError.
    """

    def __init__(self, refuse: bool = False) -> None:
        self.ops: Counter[str] = Counter()
        self.views: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._refuse = refuse

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_Functions(self))
            stack.enter_context(_Dispatched(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def read(self, name: str) -> None:
        """Note a host read."""
        self.reads[name] += 1
        if self._refuse:
            raise RuntimeError(f"{name} reads a tensor's values")

    def __sub__(self, other: Counted) -> Counted:
        """What the other did not count."""
        rest = Counted()
        for name in ("ops", "views", "reads"):
            setattr(rest, name, getattr(self, name) - getattr(other, name))
        return rest

    def __str__(self) -> str:
        made, read = self.ops.total() - self.views.total(), self.reads.total()
        return f"{self.ops.total():>7,} ops {made:>7,} no views {read:>5} reads"


class _Functions(TorchFunctionMode):
    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in TO_HOST and args[0].is_cpu:
            self._counted.read(function.__name__)
        return function(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted, name, kwargs = self._counted, op._schema.name, kwargs or {}
        counted.ops[name] += not name.startswith("profiler::")
        if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
            counted.views[name] += 1
        if op.overloadpacket in READING or (op.overloadpacket in INDEXING and _masked(args[1])):
            counted.read(name)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = op(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_cpu and not all(tensor.is_cpu for tensor in given):
            counted.read(name)
        return result


def _masked(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def counted(function: Callable[[], Any]) -> Counted:
    """The counts of a call."""
    with Counted() as found:
        function()
    return found


class _Graphs(RecordedGraphs):
    """Replays are one launch, whatever is in them."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        replay = super().record(work)

        def once() -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                replay()

        return once


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """For the duration of the context, passes on the CPU take the branches of CUDA. Sums are float64's from the size on that batches of 512
    images have, where there are 8."""
    branches = [
        (recorded_batches, "PATIENCE", dict.fromkeys(("cpu", "cuda"), 2)),
        (recorded_batches, "LARGE", 1 << 40),
        (recorded_batches, "CudaGraphs", _Graphs),
        (recorded_batches, "has_graphs", lambda device: True),
        (fingerprint, "AT_ONCE", fingerprint.AT_ONCE_ON_CUDA),
        (second_moment, "SMALL", second_moment.SMALL // 64),
        (column_functions, "in_pieces", lambda columns: False),
        (kronecker_sums, "together", lambda values: True),
    ]
    with ExitStack() as stack:
        for branch in branches:
            stack.enter_context(patch.object(*branch))
        yield


def _resnet18() -> tuple[nn.Module, str, list[tuple[Tensor, Tensor]]]:
    from benchmarks.torchvision_networks import small_resnet18

    model = small_resnet18()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model, "classification", [(torch.randn(8, 3, 32, 32), torch.arange(8) % 10)]


def _regression() -> tuple[nn.Module, str, list[tuple[Tensor, Tensor]]]:
    layers = nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)
    return nn.Sequential(*layers), "regression", [(torch.randn(64, 20), torch.randn(64, 2))]


NETWORKS = {"resnet18": _resnet18, "regression": _regression}


def phases(model: nn.Module, likelihood: str, loader: list[tuple[Tensor, Tensor]]) -> dict[str, Counted]:
    """The counts of an evidence update's phases; those of training are without the fit and its eigenvalues."""
    from ella_cuda.laplace.second_moment import SecondMoment
    from ella_cuda.training import MarglikTrainer

    class Trainer(MarglikTrainer):
        def _fit(self, la: KronLaplace, loader: Any = None) -> None:
            with Counted() as self.of_fit:
                super()._fit(la, loader)
                la._spectra.packed()

    fits = {
        f"{word} fit": counted(lambda: KronLaplace(model, likelihood, fisher="mc").fit(loader))
        for word in ("first", "second")
    }
    two = counted(lambda: KronLaplace(model, likelihood, fisher="mc").fit(loader * 2))
    fits["a further batch"] = two - fits["second fit"]
    la = KronLaplace(model, likelihood, fisher="mc").fit(loader)

    def tuned(method: str) -> Counted:
        return counted(lambda: la.optimize_prior_precision(method=method, n_steps=20, init_prior_prec=1.0))

    def of_training() -> Counted:
        trainer = Trainer(model, loader, likelihood, n_hypersteps=20, fisher="mc", progress_bar=False)
        return counted(trainer.evidence_step) - trainer.of_fit

    return (
        fits
        | _predictions(model, likelihood, loader)
        | {
            "eigenvalues": counted(lambda: SecondMoment.decompose_all(la._spectra._moments)),
            "first evidence with them": counted(la.log_marginal_likelihood),
            "evidence again": counted(la.log_marginal_likelihood),
            "effective parameters": counted(la.effective_parameters),
            "20 steps of marglik": tuned("marglik"),
            "20 rounds of mackay": tuned("mackay"),
            "training, 20 steps": of_training(),
        }
    )


def _predictions(model: nn.Module, likelihood: str, loader: list[tuple[Tensor, Tensor]]) -> dict[str, Counted]:
    """The counts of predictions of a batch: of the model's first ones, and of those after another fit."""
    x, found = loader[0][0], {}
    with as_on_cuda() if x.is_cpu else ExitStack():
        for fit in ("first", "later"):
            la = KronLaplace(model, likelihood, fisher="mc", memory_budget=2 << 30).fit(loader)
            # Other outputs than the recorded ones end the comparison with the network.
            for scale, word in enumerate(("first", "second", "third", "fourth", "recorded"), start=1):
                found[f"{fit} fit, {word} prediction"] = counted(lambda by=scale: la.functional_variance(by * x))  # noqa: B023
    return {phase: counts for phase, counts in found.items() if "third" not in phase and "fourth" not in phase}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", choices=NETWORKS, action="append")
    args = parser.parse_args()
    device = args.device
    for name in args.network or NETWORKS:
        make = NETWORKS[name]
        torch.manual_seed(0)
        model, likelihood, loader = make()
        print(name)
        for phase, found in phases(
            model.to(device), likelihood, [(x.to(device), y.to(device)) for x, y in loader]
        ).items():
            print(f"  {phase:30}{found}")


if __name__ == "__main__":
    main()

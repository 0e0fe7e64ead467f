"""What the processes of tests do, by name: each function is called on every rank of a group, and returns what ``torch.save`` takes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ella_cuda.data import TensorLoader
from ella_cuda.distributed import Ranks, gathered, packed_numbers, shard, slice_of
from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import FactoredLinear2d, PolyphasePool2d, RelaxedEquivariance, SparseFactoredLinear2d

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SIZE = 101  # data points, in batches of which ranks have different numbers


def data(dtype: torch.dtype = torch.float32, count: int = SIZE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(10, (count,), generator=generator)


def network(name: str = "relaxed", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    if name == "relaxed":
        conv = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), PolyphasePool2d())
        layer = RelaxedEquivariance({"f_fc": FactoredLinear2d(1, 2, 8, 4), "conv": conv})
        model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
    elif name == "sparse":
        model = nn.Sequential(SparseFactoredLinear2d(1, 3, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10))
    elif name == "positions":  # a linear layer at 8 shared positions
        model = nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 6), nn.Tanh(), nn.Flatten(), nn.Linear(48, 10))
    else:
        raise ValueError(name)
    return model.to(dtype)


def trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """After some steps, so that output Hessians differ between data points."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def facts(la: KronLaplace) -> dict[str, Any]:
    """What tests compare of a fit."""
    found: dict[str, Any] = {"n_data": la.n_data, "n_outputs": la.n_outputs, "n_targets": la.n_targets}
    for name, factor in la.factors.items():
        found[f"{name} inputs"] = factor.inputs
        found[f"{name} outputs"] = factor.outputs
        found[f"{name} rows"] = [0 if m is None else m.rows for m in (factor.input_moment, factor.output_moment)]
    found["gamma"] = torch.tensor([*la.effective_parameters().values()], dtype=torch.float64)
    found["evidence"] = la.log_marginal_likelihood().detach()
    return found


def loader_of(batches: int, dtype: torch.dtype, count: int = SIZE) -> TensorLoader:
    return TensorLoader(*data(dtype, count), batch_size=-(-count // batches))


def fitted(name: str, dtype: str, batches: int, group: Any, **settings: Any) -> KronLaplace:
    x, y = data(DTYPES[dtype])
    model = trained(network(name, DTYPES[dtype]), x, y)
    loader = loader_of(batches, DTYPES[dtype])
    la = KronLaplace(model, prior_precision=0.7, **settings)
    return la.fit(loader) if group is None else la.fit(shard(loader, group), group=group)


def fit(name: str, dtype: str, batches: int, settings: dict[str, Any]) -> dict[str, Any]:
    return facts(fitted(name, dtype, batches, dist.group.WORLD, **settings))


def fit_twice(name: str, dtype: str, batches: int) -> dict[str, Any]:
    """The same data as two parts, the second added to the first."""
    x, y = data(DTYPES[dtype])
    la = KronLaplace(trained(network(name, DTYPES[dtype]), x, y), prior_precision=0.7)
    loaders = [TensorLoader(x[part], y[part], -(-SIZE // batches)) for part in (slice(0, 40), slice(40, SIZE))]
    group = dist.group.WORLD
    for number, loader in enumerate(loaders):
        la.fit(shard(loader, group), override=number == 0, group=group)
    return facts(la)


def gradients(la: KronLaplace, names: list[str]) -> dict[str, Tensor]:
    buffers = dict(la.model.named_buffers())
    found = torch.autograd.grad(la.log_marginal_likelihood(), [buffers[name] for name in names])
    return dict(zip(names, (g.detach() for g in found), strict=True))


LEARNED = ["0.basis_in.anchors", "0.basis_in.inverse_lengthscale"]


def learning(dtype: str) -> tuple[nn.Module, list[str]]:
    model = trained(network("sparse", DTYPES[dtype]), *data(DTYPES[dtype]))
    names = [n for n, b in model.named_buffers() if n.endswith(("anchors", "inverse_lengthscale"))]
    for name in names:
        model.get_buffer(name).requires_grad_()
    return model, names


def fit_of_buffers(dtype: str, batches: int) -> dict[str, Tensor]:
    model, names = learning(dtype)
    la = KronLaplace(model, prior_precision=0.7)
    la.fit(shard(loader_of(batches, DTYPES[dtype]), dist.group.WORLD), group=dist.group.WORLD)
    return gradients(la, names)


def fit_wrongly(what: str) -> None:
    """A fit that must be refused on all ranks; rank 1 is to blame, or all are."""
    x, y = data()
    model, rank = network(), dist.get_rank()
    group = dist.group.WORLD
    loader: Any = shard(TensorLoader(x, y, 10), group)
    if what == "sampler":
        dataset = TensorDataset(x, y)
        loader = DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset, shuffle=False))
    elif what == "whole":
        loader = DataLoader(TensorDataset(x, y), batch_size=10)
    elif what == "whole, shuffled":
        loader = DataLoader(
            TensorDataset(x, y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(rank)
        )
    elif what == "nan" and rank == 1:
        x[15] = float("nan")
    elif what == "label" and rank == 1:
        y[15] = 10
    elif what == "parameters" and rank == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-3
    elif what == "settings" and rank == 1:
        KronLaplace(model, resolution="per_channel").fit(loader, group=group)
        return
    elif what == "dataset" and rank == 1:
        loader = TensorDataset(x, y)
    elif what == "nothing":
        loader = []
    elif what == "never called":
        model = nn.ModuleDict({"used": nn.Linear(64, 10), "not": nn.Linear(3, 3)})
        model.forward = lambda x: model["used"](x.flatten(1))
    KronLaplace(model).fit(loader, group=group)


def fit_on_one(dtype: str) -> dict[str, Any]:
    """A loader's only batch, on rank 0."""
    return fit("positions", dtype, 1, {})


def fit_data_of_its_own(dtype: str) -> dict[str, Any]:
    """Every rank has a data set of its own."""
    x, y = data(DTYPES[dtype])
    mine = slice_of(SIZE, dist.get_rank(), dist.get_world_size())
    la = KronLaplace(trained(network("relaxed", DTYPES[dtype]), x, y), prior_precision=0.7)
    loader = DataLoader(TensorDataset(x[mine], y[mine]), batch_size=10)
    return facts(la.fit(loader, group=dist.group.WORLD))


class Counted:
    """Collectives that ranks call, with their bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        for name in ("all_reduce", "all_gather", "broadcast"):
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, real: Any) -> Any:
        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent = args[0] if name == "all_gather" else tensor
            self.calls.append((name, sent.numel() * sent.element_size()))
            return real(tensor, *args, **kwargs)

        return counted


def count_fit(name: str, batches: int) -> dict[str, Any]:
    counted = Counted()
    la = fitted(name, "float32", batches, dist.group.WORLD)
    moments = {m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    numbers = sum(packed_numbers(*m.total.shape[:2]) for m in moments)
    before = len(counted.calls)
    float(la.log_marginal_likelihood())
    la.effective_parameters()
    return {
        "calls": [list(c) for c in counted.calls],
        "numbers": numbers,
        "moments": len(moments),
        "later": len(counted.calls) - before,
    }


def predictions() -> dict[str, Tensor]:
    la = fitted("relaxed", "float64", 11, dist.group.WORLD)
    x, _ = data(torch.float64)
    mine = slice_of(len(x), dist.get_rank(), dist.get_world_size())
    return {"gathered": gathered(la(x[mine]), dist.group.WORLD), "whole": la(x)}


def wrapped(how: str) -> int:
    """A fit by a model that is wrapped for training; with "gathered" by what its refusal says to do."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    group, loader = dist.group.WORLD, loader_of(11, torch.float32)
    if how == "replicated":
        KronLaplace(DistributedDataParallel(network()))
    sharded = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    torch.manual_seed(0)
    for parameter in sharded.parameters():
        nn.init.normal_(parameter)
    weight = sharded[1].weight.detach().clone()
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    if how == "sharded":
        KronLaplace(sharded)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    plain.load_state_dict(get_model_state_dict(sharded, options=options))
    assert torch.equal(plain[1].weight, weight)
    return KronLaplace(plain).fit(shard(loader, group), group=group).n_data


def exchange(size: int) -> list[Any]:
    ranks = Ranks(dist.group.WORLD, "test")
    return ranks.exchange({"rank": ranks.rank, "text": "x" * size})


def pid() -> int:
    return os.getpid()

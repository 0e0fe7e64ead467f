"""What the processes of tests do, by name: each function is called on every rank of a group, and returns what ``torch.save`` takes."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ella_cuda import distributed
from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.data import FlipsShifts, TensorLoader
from ella_cuda.distributed import Ranks, gathered, packed_numbers, shard, slice_of
from ella_cuda.laplace import KronLaplace, evidence_gradient
from ella_cuda.nn import FactoredLinear2d, PolyphasePool2d, RelaxedEquivariance, SparseFactoredLinear2d
from ella_cuda.training import EvidenceCallback, Learner, MarglikTrainer
from python_tests.laplace.checks import Function, Reusing
from python_tests.test_experiments import small

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
    elif name == "unknown":  # parameters that no rule knows, with and without a block of their own
        parts = {"scales": nn.Parameter(torch.rand(8, 8) + 0.5), "shift": nn.Parameter(torch.randn(4))}
        scaled = Function(lambda m, x: x * m.scales.flatten() + m.shift.repeat(16), **parts)
        model = nn.Sequential(nn.Flatten(), scaled, nn.Linear(64, 10))
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


def learning(dtype: str) -> tuple[nn.Module, list[str]]:
    model = trained(network("sparse", DTYPES[dtype]), *data(DTYPES[dtype]))
    names = [n for n, b in model.named_buffers() if n.endswith(("anchors", "inverse_lengthscale"))]
    for name in names:
        model.get_buffer(name).requires_grad_()
    return model, names


def fit_of_buffers(dtype: str, ends: list[int]) -> dict[str, Tensor]:
    """The same data as parts that end there, each added to those before it."""
    model, names = learning(dtype)
    la, (x, y) = KronLaplace(model, prior_precision=0.7), data(DTYPES[dtype])
    for begin, end in itertools.pairwise([0, *ends]):
        part = shard(TensorLoader(x[begin:end], y[begin:end], 10), dist.group.WORLD)
        la.fit(part, override=not begin, group=dist.group.WORLD)
    return gradients(la, names)


def later_pass(added: bool) -> str:
    """What asking for a pass over a fit's own loader says, which has a part of the data; also where a process alone added to it."""
    la = fitted("relaxed", "float32", 11, dist.group.WORLD)
    if added:
        la.fit(loader_of(1, torch.float32), override=False)
    try:
        la.optimize_prior_precision(at="linear", n_steps=1)
    except ValueError as error:
        return str(error)
    return ""


def refused_addition() -> tuple[str, int]:
    """An addition that rank 1 refuses before its pass: what it says, and the data points that the rank's fit has then."""
    la = fitted("relaxed", "float32", 2, dist.group.WORLD)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(la.model.parameters()).add_(1)
    try:
        la.fit(loader_of(2, torch.float32), override=False, group=dist.group.WORLD)
    except ValueError as error:
        return str(error), la.n_data
    return "", la.n_data


APART: dict[str, dict[str, Any]] = {  # what the fit of one rank alone is given
    "dtype": {},
    "prior_precision": {"prior_precision": 2.0},
    "prior_mean": {"prior_mean": 0.5},
    "temperature": {"temperature": 0.5},
    "dict_key_y": {"dict_key_y": "others"},
}


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
    elif what == "shuffled":
        generator = torch.Generator().manual_seed(rank)
        loader = shard(DataLoader(TensorDataset(x, y), 10, shuffle=True, generator=generator), group)
    elif what == "nan" and rank == 1:
        x[15] = float("nan")
    elif what == "label" and rank == 1:
        y[15] = 10
    elif (what == "parameters" and rank == 1) or (what == "parameters of rank 0" and rank == 0):
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-3
    elif what == "settings" and rank == 1:
        KronLaplace(model, resolution="per_channel").fit(loader, group=group)
        return
    elif what in APART and rank == 1:
        KronLaplace(model.double() if what == "dtype" else model, **APART[what]).fit(loader, group=group)
        return
    elif what == "override" and rank == 1:
        KronLaplace(model).fit(loader, y, group=group)
        return
    elif what == "draws":
        model = AveragedFunction(model, AffineAugment(4, sampling="independent"))
    elif what == "dataset" and rank == 1:
        loader = TensorDataset(x, y)
    elif what == "nothing":
        loader = []
    elif what == "never called":
        model = nn.ModuleDict({"used": nn.Linear(64, 10), "not": nn.Linear(3, 3)})
        model.forward = lambda x: model["used"](x.flatten(1))
    KronLaplace(model).fit(loader, group=group)


def of_amounts(group: Any, batches: int = 1, wrong: str = "") -> Tensor:
    """The evidence's gradient in amounts of an augmentation; "shuffled" has other plans, other words are of what rank 1 has alone."""
    x, y = data(torch.float64, 20)
    model = AveragedFunction(network("relaxed", torch.float64), AffineAugment(4, sampling="shared").double())
    model.register_buffer("extra", torch.ones(2, dtype=torch.float64))
    loader: Any = TensorLoader(x, y, -(-20 // batches))
    names = None
    if wrong == "buffers" and dist.get_rank() == 1:
        names = ["augment.raw", "extra"]
    torch.manual_seed(0)
    with model.augment.held():
        if group is None:
            la = KronLaplace(model, prior_precision=0.7).fit(loader)
        else:
            la = KronLaplace(model, prior_precision=0.7).fit(shard(loader, group), group=group)
            if wrong == "shuffled":
                loader.shuffle, loader.generator = True, torch.Generator().manual_seed(dist.get_rank())
            loader = shard(loader, group)
            if wrong == "temperature" and dist.get_rank() == 1:
                la.temperature = 0.5
        own = {"columns": {"columns": "one"}, "n_data": {"n_data": 5}}.get(wrong, {})
        own = own if own and dist.get_rank() == 1 else {}
        return evidence_gradient(la, loader, names, group=group, **own)["augment.raw"]


def gradient_of_amounts(batches: int, wrong: str = "") -> Tensor:
    return of_amounts(dist.group.WORLD, batches, wrong)


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
    sizes = {"numbers": numbers, "moments": len(moments), "later": len(counted.calls) - before}
    return {"calls": [list(c) for c in counted.calls], **sizes}


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


def sum_in_parts(most: int) -> dict[str, Any]:
    """Matrices summed so many numbers at once."""
    distributed.AT_ONCE = most
    counted, ranks = Counted(), Ranks(dist.group.WORLD, "test")
    generator = torch.Generator().manual_seed(ranks.rank)
    halves = [
        torch.randn(g, d, d, dtype=torch.float64, generator=generator) for g, d in ((1, 1), (2, 4), (3, 5), (1, 6))
    ]
    totals = [half + half.mT for half in halves]
    before = [total.clone() for total in totals]
    extra = ranks.sum_matrices_(totals, torch.arange(3).double() + ranks.rank)
    return {"before": before, "totals": totals, "extra": extra, "sums": len(counted.calls)}


def exchange(size: int) -> list[Any]:
    ranks = Ranks(dist.group.WORLD, "test")
    return ranks.exchange({"rank": ranks.rank, "text": "x" * size})


# training -------------------------------------------------------------------------------------------------------------


def training(dtype: str, group: Any, **options: Any) -> dict[str, Any]:
    """A training, and what tests compare of it."""
    kind = options.pop("network", "relaxed")
    model = network(kind, DTYPES[dtype])
    x, y = data(DTYPES[dtype])
    torch.manual_seed(5 + (options.pop("other_seeds", False) and dist.is_initialized() and dist.get_rank()))
    augment = FlipsShifts(torch.zeros(1, dtype=x.dtype), 1) if options.pop("shifted", False) else None
    if options.pop("averaged", False):
        options |= {"augment": AffineAugment(4, sampling="shared").to(DTYPES[dtype]), "learn": ["augmentation"]}
    kind_of_loader = options.pop("loader", "tensors")
    if kind_of_loader == "tensors":
        loader: Any = TensorLoader(x, y, 32, shuffle=True, augment=augment)
    elif kind_of_loader == "reusing":
        loader = Reusing(list(zip(x.split(32), y.split(32), strict=True)))
    else:
        loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    evidence = None if options.pop("same_loader", False) else TensorLoader(x, y, 10)
    schedule = {"n_epochs": 4, "n_epochs_burnin": 1, "marglik_frequency": 1, "n_hypersteps": 3, "progress_bar": False}
    schedule |= {"optimizer_kwargs": {"lr": 0.01}} | options
    trainer = MarglikTrainer(model, loader, marglik_loader=evidence, group=group, **schedule)
    return described(trainer, trainer.run())


def described(trainer: MarglikTrainer, la: KronLaplace) -> dict[str, Any]:
    """What tests compare of a training."""
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    buffers = [torch.zeros(1).double(), *(b.detach().double().flatten() for b in trainer.model.buffers())]
    found = {"losses": trainer.losses, "margliks": trainer.margliks, "weights": weights, "buffers": torch.cat(buffers)}
    found |= {"accuracies": [one["accuracy"] for one in trainer.history], "sigma": float(la.sigma_noise)}
    return found | {"log_precision": la.prior_precision.log()}


def train(dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    return training(dtype, dist.group.WORLD, **options)


def plain_loop(options: dict[str, Any], distributed: bool = True) -> dict[str, Any]:
    """A loop of a user's own around EvidenceCallback, with DistributedDataParallel and ranks in random states of their own."""
    x, y = data(torch.float64, 100)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    model: nn.Module = network(dtype=torch.float64)
    torch.manual_seed(5 + rank)
    model = nn.parallel.DistributedDataParallel(model) if distributed else model
    how = options | ({"group": dist.group.WORLD} if distributed else {})
    loader = TensorLoader(x, y, 8, shuffle=True, generator=torch.Generator().manual_seed(4))
    evidence = EvidenceCallback(model, loader, every=2, n_hypersteps=3, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evidence.attach(optimizer)
    for epoch in range(4):
        optimizer.zero_grad()
        evidence.penalised(nn.functional.cross_entropy(model(x[rank::ranks]), y[rank::ranks])).backward()
        optimizer.step()
        evidence.step(epoch)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = {"margliks": list(evidence.margliks), "precision": evidence.prior_precision, "weights": weights}
    loader.generator, fits = None, []
    for epoch in (5, 7):  # with nothing drawn in between
        evidence.step(epoch)
        fits.append(float(evidence.la.log_likelihood))
    return {"found": found, "fits": fits, "drawn next": float(torch.rand(()))}


class Dying:
    """A loader whose process is killed on a rank, at a batch of an epoch."""

    def __init__(self, loader: TensorLoader, rank: int, epoch: int, batch: int) -> None:
        self.loader, self.rank, self.at, self.epochs = loader, rank, (epoch, batch), 0
        self.dataset_size, self.data_digest, self.augment = loader.dataset_size, loader.data_digest, None

    def parts(self, rank: int, ranks: int) -> Any:
        self.epochs += 1
        for number, part in enumerate(self.loader.parts(rank, ranks), start=1):
            if dist.get_rank() == self.rank and (self.epochs, number) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    def __iter__(self) -> Any:
        return iter(self.loader)


def stoppable(checkpoint: str | None, group: Any, how: str = "") -> dict[str, Any]:
    """A training with a checkpoint, of which "killed" is its second rank in the middle of epoch 3, "interrupted" its third epoch, and "saved
    before" and "saved after" its rank 0 before and after the third checkpoint takes its place."""
    torch.manual_seed(5)
    x, y = data()
    loader: Any = TensorLoader(x, y, 32, shuffle=True)
    if how == "killed":
        loader = Dying(loader, 1, 3, 2)
    saved = 0
    replace = os.replace

    def dying_replace(*names: Any) -> None:
        nonlocal saved
        saved += str(names[1]) == checkpoint
        if saved == 3 and how == "saved before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*names)
        if saved == 3 and how == "saved after":
            os.kill(os.getpid(), signal.SIGKILL)

    def shown(evaluation: Any) -> None:
        if how == "interrupted" and evaluation.epoch == 3:
            raise RuntimeError("interrupted")

    if how.startswith("saved"):
        os.replace = dying_replace
    options = {"n_epochs": 5, "n_epochs_burnin": 1, "n_hypersteps": 3, "progress_bar": False, "checkpoint": checkpoint}
    options |= {"marglik_loader": TensorLoader(x, y, 10), "optimizer_kwargs": {"lr": 0.01}, "on_evaluation": shown}
    trainer = MarglikTrainer(network(), loader, group=group, **options)
    return described(trainer, trainer.run())


def train_stoppably(checkpoint: str, how: str = "", alone: bool = False) -> dict[str, Any]:
    return stoppable(None if alone and dist.get_rank() else checkpoint, dist.group.WORLD, how)


def train_wrongly(what: str, folder: str) -> None:
    """A training that must be refused on all ranks; rank 1 is to blame, or all are."""
    torch.manual_seed(5)
    (x, y), rank, model = data(), dist.get_rank(), network()
    options: dict[str, Any] = {}
    if what == "batch norm":
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    elif what == "graph":
        options["cuda_graph"] = True
    elif what == "label" and rank == 1:
        y[:] = 10
    elif what in ("nan", "nan, and fails") and rank == 1:
        x[:] = float("nan")
    elif what == "parameters" and rank == 1:
        nn.init.zeros_(next(model.parameters()))
    elif what == "argument" and rank == 1:
        options["lr_hyp"] = -1.0
    elif what == "checkpoint":
        options["checkpoint"] = folder
    elif what == "callback":
        options["on_evaluation"] = lambda evaluation: 1 / 0
    elif what == "settings" and rank == 1:
        options["lr_hyp"] = 0.2
    elif what == "checkpoint on rank 1" and rank == 1:
        options["checkpoint"] = f"{folder}/c.pt"
    elif what == "dtype" and rank == 1:
        model = model.double()
    elif what == "learner":
        model.register_buffer("drifting", torch.zeros(()))
        options["learn"] = [Failing(model, rank == 1)]
    digest = None if what == "data" else "told to be the same"
    if what == "data" and rank == 1:
        x[-1] += 1
    loader: Any = TensorLoader(x, y, 10, data_digest=digest)
    batches = [(x[i : i + 10], y[i : i + 10]) for i in range(0, SIZE, 10)]
    if what == "ends" and rank == 1:
        options |= {"n_data": SIZE}
        loader = batches[:5]
    elif what == "ends":
        options |= {"n_data": SIZE}
        loader = batches
    elif what == "shuffle":
        loader = TensorLoader(x, y, 10, shuffle=rank == 1)
    elif what == "n_data" and rank == 1:
        options["n_data"] = SIZE
    elif what == "first batch":
        loader = batches[rank:] + batches[:rank]
    elif what == "sampler":
        dataset = TensorDataset(x, y)
        loader = DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset))
    elif what == "targets":
        options |= {"n_data": 2}
        loader = [(x[:2], y[:3])]  # of which the second rank's slices fit each other
    elif what == "nan, and fails":

        def forward(m: nn.Module, x: Tensor) -> Tensor:  # fails when it sees numbers that are none a second time
            m.seen += bool(x.isnan().any())
            if rank == 1 and m.seen == 2:
                raise OSError("it fails")
            return m.model(x)

        model = Function(forward, model=model, seen=0)
    elif what == "loader":
        loader = Broken(batches, rank)
    options |= {"n_epochs": 2, "progress_bar": False, "group": dist.group.WORLD}
    evidence = None if what == "marglik_loader" and rank == 1 else TensorLoader(*data(), 10)
    MarglikTrainer(model, loader, marglik_loader=evidence, **options).run()


def train_alone(what: str, rank: int, folder: str) -> dict[str, Any]:
    """A training where one rank alone is given something; "seen" are the epochs that its callback was called after."""
    seen: list[int] = []
    options = {
        "on_evaluation": {"on_evaluation": lambda evaluation: seen.append(evaluation.epoch)},
        "checkpoint": {"checkpoint": f"{folder}/checkpoint.pt"},
        "progress_bar": {"progress_bar": True},
    }[what]
    own = options if dist.get_rank() == rank else {}
    return training("float32", dist.group.WORLD, n_epochs=3, **own) | {"seen": seen}


def part_ways(how: str) -> None:
    """A loop of a user's own in which rank 1 alone changes its training."""
    torch.manual_seed(5)
    model, (x, y) = network(), data()
    options = {"n_epochs": 4, "n_hypersteps": 1, "progress_bar": False, "group": dist.group.WORLD}
    options["keep"] = "best" if how == "loaded" else "last"
    trainer = MarglikTrainer(model, TensorLoader(x, y, 40), **options)
    before = trainer.state_dict()
    trainer.epoch()
    if how == "ahead" and dist.get_rank() == 1:
        trainer.epoch()
    trainer.evidence_step(last=dist.get_rank() == 1 if how == "last" else None)
    if how == "loaded" and dist.get_rank() == 1:
        trainer.load_state_dict(before)
    if how == "moved" and dist.get_rank() == 1:
        nn.init.zeros_(next(model.parameters()))
    trainer.finish()


class Broken:
    """A loader that raises on rank 1 in its second pass."""

    dataset_size = SIZE

    def __init__(self, batches: list[Any], rank: int) -> None:
        self.batches, self.rank, self.passes = batches, rank, 0

    def __iter__(self) -> Any:
        self.passes += 1
        for number, batch in enumerate(self.batches):
            if self.rank == 1 and self.passes == 2 and number == 4:
                raise OSError("a file is gone")
            yield batch


def count_steps() -> dict[str, Any]:
    """Sums of a training's epochs, by their sizes."""
    counted = Counted()
    model = network()
    x, y = data()
    trainer = MarglikTrainer(
        model, TensorLoader(x, y, 10), n_epochs=2, progress_bar=False, objective="map", group=dist.group.WORLD
    )
    trainer.epoch()
    before = len(counted.calls)
    trainer.epoch()
    size = 4 * (sum(p.numel() for p in model.parameters()) + 5)
    return {"calls": [list(c) for c in counted.calls[before:]], "bytes": size, "steps": len(trainer._loaders[0])}


class Drifting(Learner):
    """Moves a buffer by what depends on the rank, as rounding of other machines does; or has gradients of the rank's own data."""

    name = "drifting"

    def __init__(self, model: nn.Module, of_own_data: bool) -> None:
        self.buffer, self.of_own_data, self.moved = model.drifting, of_own_data, 0.0

    def tensors(self) -> dict[str, Tensor]:
        return {"drifting": self.buffer}

    def gradients(self, la: KronLaplace, loader: Any) -> dict[str, Tensor]:
        first = next(iter(loader))[0].mean()
        return {"drifting": first if self.of_own_data else torch.ones(())}

    def step(self, la: KronLaplace, gradients: Any) -> None:
        self.buffer += 1 + 0.1 * dist.get_rank()
        self.moved += 1 + 0.1 * dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved}

    def load_state_dict(self, state: Any) -> None:
        self.moved = state["moved"]


def train_drifting(of_own_data: bool) -> list[float]:
    torch.manual_seed(5)
    (x, y), model = data(), network()
    model.register_buffer("drifting", torch.zeros(()))
    learner, options = Drifting(model, of_own_data), {"n_epochs": 3, "n_hypersteps": 1, "progress_bar": False}
    MarglikTrainer(model, TensorLoader(x, y, 10), learn=[learner], group=dist.group.WORLD, **options).run()
    return [float(model.drifting), learner.moved]


class Failing(Drifting):
    """Raises on one rank where the others wait for its gradients."""

    def gradients(self, la: KronLaplace, loader: Any) -> dict[str, Tensor]:
        if self.of_own_data and hasattr(loader, "group"):
            raise ArithmeticError("no gradient")
        return evidence_gradient(la, loader, ["drifting"], group=getattr(loader, "group", None))


class Drawing(Drifting):
    """Draws a number, and then as many more as the rank's number says."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name, self.buffer, self.seen = name, getattr(model, name), []

    def tensors(self) -> dict[str, Tensor]:
        return {self.name: self.buffer}

    def gradients(self, la: KronLaplace, loader: Any) -> dict[str, Tensor]:
        self.seen.append(float(torch.rand(())))
        torch.rand(dist.get_rank())
        return {self.name: torch.ones(())}

    def step(self, la: KronLaplace, gradients: Any) -> None:
        self.buffer += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        assert not state


def train_drawing() -> list[list[float]]:
    """What each of two learners draws at the start of its gradients, after those of the try before the training."""
    torch.manual_seed(5)
    (x, y), model = data(), network()
    for name in ("one", "two"):
        model.register_buffer(name, torch.zeros(()))
    learners = [Drawing(model, "one"), Drawing(model, "two")]
    loader, options = TensorLoader(x, y, 10), {"n_epochs": 3, "n_hypersteps": 1, "progress_bar": False}
    MarglikTrainer(model, loader, learn=learners, group=dist.group.WORLD, **options).run()
    return [learner.seen[1:] for learner in learners]


def documented(block: str) -> float:
    """Run a page's code, in a group that is there already."""
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    names: dict[str, Any] = {}
    exec(compile(block, "distributed.md", "exec"), names)
    return float(names["la"].log_marginal_likelihood())


def shown() -> str:
    """What a training with a progress bar writes."""
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as file:
        training("float32", dist.group.WORLD, n_epochs=2, progress_bar=True)
    return file.getvalue()


# grids ----------------------------------------------------------------------------------------------------------------


def grid(folder: str, spread: str, changes: list[dict[str, Any]], how: str = "") -> dict[str, Any]:
    """A grid of small runs; "fails" is its second run, "killed" the process that does it, "unrecorded" a row on rank 0."""
    from ella_cuda.experiments import grid as grids
    from ella_cuda.reports import results
    from ella_cuda.reports.pictures import Drawn

    configs = [small(**one) for one in changes]
    did, real = [], grids.run_one

    def noted(config: Any, *args: Any, **options: Any) -> Any:
        did.append(config.name)
        if how == "fails" and config.name == configs[1].name:
            raise FloatingPointError("it diverged")
        if how == "killed" and config.name == configs[1].name:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(config, *args, **options)

    drawn = results.save_pictures
    grids.run_one, results.save_pictures = noted, lambda *_: Drawn()  # which takes longer than runs do
    seen: list[str] = []

    def on_row(row: dict[str, Any]) -> None:
        seen.append(row["run"])
        if how == "unrecorded":
            raise OSError("the disk is full")

    try:
        group = dist.group.WORLD if dist.is_initialized() else None
        rows = grids.run_grid(configs, folder, progress=False, group=group, spread=spread, on_row=on_row)
    finally:
        grids.run_one, results.save_pictures = real, drawn
    return {"rows": rows, "did": did, "seen": seen}


def grid_apart(folder: str, what: str) -> None:
    """A grid of which rank 1 is given something else."""
    from ella_cuda.experiments.grid import run_grid

    own = dist.get_rank() == 1
    options = {"spread": "runs" if what == "spread" and own else "data", "jobs": 0 if what == "jobs" and own else 1}
    config = small(seed=int(what == "configs" and own), epochs=1)
    run_grid([config], folder, progress=False, group=dist.group.WORLD, **options)

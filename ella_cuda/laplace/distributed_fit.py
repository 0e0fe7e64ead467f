"""A fit of several processes: each passes over batches of its own, and all have the sums of all."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ella_cuda.digest import tensors_digest
from ella_cuda.distributed import Ranks, Shard, dataset_size, layout_hash, require_whole
from ella_cuda.laplace.batches import pair_of, require_loader, tensors_of
from ella_cuda.laplace.copies import augment_of
from ella_cuda.laplace.evidence import DataFitGradient
from ella_cuda.laplace.fingerprint import uneven_sum

if TYPE_CHECKING:
    from ella_cuda.laplace.rules import Rule
    from ella_cuda.laplace.second_moment import SecondMoment

NEAR = 1e-12  # relative: fingerprints are sums, whose rounding may depend on the machine
REMEDIES = {
    "parameters and buffers": "Seed all ranks alike before the model is made, load one state on all, or broadcast rank 0's.",
    "draws of the augmentation": "Hold rank 0's draws.",
}
STEP = 0x9E3779B97F4A7C15  # between the seeds of batches


@dataclasses.dataclass
class FitSums:
    """The sums of a fit beside the curvature.

    Attributes:
        anew: whether nothing is added to. n_data: of the fit that is added to. seen: data points of the pass.
        n_targets, statistic: of both.
        batch: x and y, the last one; y is None before the first.
        calls: of every layer with a rule. gradients: of the pass' statistic in buffers.
        ran: whether the network's own forward did, which may have changed buffers. tried: whether it did before the first batch.
        fit: whether all targets do that nobody has looked at, 0-dim; None where there are none.
        compared: see :class:`ella_cuda.laplace.recorded_batches.RecordedBatches`.
    """

    data_fit: DataFitGradient
    fingerprint: Tensor
    buffers: dict[str, Tensor | None]
    norms: Tensor
    anew: bool
    n_data: int
    n_targets: int
    statistic: Tensor
    seen: int = 0
    batch: tuple[Any, Tensor | None] = (None, None)
    calls: dict[Rule, int] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    ran: bool = True
    tried: bool = False
    fit: Tensor | None = None
    compared: dict[Any, Tensor] = dataclasses.field(default_factory=dict)


def accumulate_together(
    la: Any, loader: Iterable[Any], override: bool, progress_bar: bool, generator: torch.Generator | None, group: Any
) -> None:
    """The pass over the data of a fit of a group; see :meth:`ella_cuda.laplace.KronLaplace.fit`."""
    ranks = Ranks(group, "fit")
    sums, facts, error = None, {}, None
    try:
        require_loader(loader, "fit: loader")
        require_whole(loader, ranks.size, "fit: loader")
        sums = la._begin(loader, override)
        facts = _facts_before(la, sums, loader, generator)
    except Exception as raised:
        error = raised
    try:
        headers = ranks.agree(error, **facts)
        ranks.require_same_facts([one["settings"] for one in headers], "Pass all ranks the same arguments.")
        _require_same_values(ranks, [one["values"] for one in headers])
        if not ranks.is_first and not sums.anew:
            _drop_before(la, sums)
        generator_of = _generators(la, generator, headers[0]["seed"], ranks)
        try:
            la._pass_over(sums, loader, progress_bar and ranks.is_first, generator, generator_of=generator_of)
            la._check_finite(sums)
            facts = _facts_after(la, sums, loader)
        except Exception as raised:
            error = raised
        after = ranks.agree(error, **facts)
        require_one_plan(ranks, [one["plan"] for one in after])
        _require_counted_once(ranks, [one["loader"] for one in headers], after)
        for rule in la._rules:
            rule.separate_outputs({name for header in after for name in header["apart"]})
        calls = [sum(numbers) for numbers in zip(*(one["calls"] for one in after), strict=True)]
        sums.calls = dict(zip(sums.calls, calls, strict=True))
        sums.n_data = headers[0]["n_data"]
        sums.seen = sum(one["seen"] for one in after)
        la._require_pass(sums)
        _sum(la, ranks, sums)
        la._check_finite(sums)
        la._end(sums)
        seen = next(one["of_data"] for one in after if one["seen"])
        la.n_outputs = seen["n_outputs"]
        la.fitted_model.inputs_shape = None if seen["shape"] is None else torch.Size(seen["shape"])
        if not la.eigenvalue_correction:
            la._spectra.decompose_together(ranks)
    except BaseException:
        la.n_data, la.fitted_model.fingerprint = 0, None
        raise


# what ranks tell each other -------------------------------------------------------------------------------------------


def _facts_before(la: Any, sums: FitSums, loader: Any, generator: torch.Generator | None) -> dict[str, Any]:
    if la.fitted_model.draws is None and augment_of(la.model) is not None:
        raise ValueError(
            "fit: with a group the copies of all data points must be of the same draws, which all ranks have, but the augmentation draws for "
            'each data point. Fit inside of model.augment.held(sampling="shared"), or make it with sampling="shared".'
        )
    draws = None if la.fitted_model.draws is None else float(uneven_sum(la.fitted_model.draws))
    return {
        "settings": {
            "dtype": _dtypes(la),
            "likelihood": repr(la.likelihood_function),
            **{name: getattr(la, name) for name in (*la._settings, "column_tolerance", "mc_samples")},
            "dict_key_x": la.dict_key_x,
            "dict_key_y": la.dict_key_y,
            "parameters": layout_hash(la.parameter_names),
            "buffers that require a gradient": sorted(sums.data_fit.buffers),
            "override": sums.anew,
        },
        "values": {
            **_values(la),
            "parameters and buffers": float(sums.fingerprint),
            "draws of the augmentation": draws,
        },
        "n_data": sums.n_data,
        "seed": _seed(la, generator),
        "loader": {"size": dataset_size(loader), "sharded": isinstance(loader, Shard), "data": _data_of(loader)},
    }


def _dtypes(la: Any) -> str:
    return ", ".join(sorted({str(p.dtype) for p in la.model.parameters()}))


def _values(la: Any) -> dict[str, Any]:
    """The numbers beside the data's sums that the evidence depends on."""
    return {
        "prior_precision": la.prior_precision.tolist(),
        "sigma_noise": la.sigma_noise.item(),
        "prior_mean": uneven_sum(la.prior_mean).item(),
        "temperature": la.temperature,
    }


def _require_same_values(ranks: Ranks, found: Sequence[dict[str, Any]]) -> None:
    same = {name: rounded([one[name] for one in found]) for name in found[0]}
    for name, values in same.items():
        ranks.require_same(values, name, REMEDIES.get(name, "Pass all ranks the same arguments."))


def agree_on_gradient(ranks: Ranks, la: Any, plan: str | None, **settings: Any) -> None:
    """ValueError where ranks are about to sum gradients that are not of one evidence and one loader."""
    headers = ranks.agree(settings={"dtype": _dtypes(la), **settings}, values=_values(la), plan=plan)
    ranks.require_same_facts([one["settings"] for one in headers], "Pass all ranks the same arguments.")
    _require_same_values(ranks, [one["values"] for one in headers])
    require_one_plan(ranks, [one["plan"] for one in headers])


def _facts_after(la: Any, sums: FitSums, loader: Any) -> dict[str, Any]:
    shape = la.fitted_model.inputs_shape
    return {
        "seen": sums.seen,
        "plan": plan_of(la, loader, "fit"),
        "last": _digest(*sums.batch),
        "calls": list(sums.calls.values()),
        "apart": _apart(la._rules),
        "of_data": {"n_outputs": la.n_outputs, "shape": None if shape is None else list(shape)},
    }


def _digest(x: Any, y: Tensor | None) -> str | None:
    """A digest of a batch; None of none, and of one without data."""
    return None if y is None or not len(y) else tensors_digest(*tensors_of(x), y)


def plan_of(la: Any, loader: Any, where: str) -> str | None:
    """A digest of the first of all ranks' batches, in the pass over a :class:`Shard` that has begun; None of other loaders."""
    first = loader.taken_first() if isinstance(loader, Shard) else None
    return None if first is None else _digest(*pair_of(first, where, la.fitted_model.keys))


def require_one_plan(ranks: Ranks, plans: Sequence[str | None]) -> None:
    """ValueError where the loaders that shards are taken of yield other batches: some data would count twice, others not at all."""
    if None not in plans:
        ranks.require_same(
            plans,
            "first batch of the loader that shard shares out",
            "Give all ranks the same data in the same order: no shuffling, or a generator of the loader's own that is seeded alike.",
        )


def _data_of(loader: Any) -> str | None:
    """A digest that tells the loader's data apart from others, as far as that is quick: its attribute ``data_digest``, or a digest of a
    data set's first example."""
    if isinstance(loader, Shard):
        return None
    if (named := getattr(loader, "data_digest", None)) is not None:
        return str(named)
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    try:
        example = loader.dataset[0]
    except (LookupError, TypeError):
        return None
    tensors = tensors_of(example)
    return tensors_digest(*tensors) if tensors else None


def _require_counted_once(ranks: Ranks, loaders: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """ValueError where two ranks had the same last batch, or loaders of one data set yielded more data points together than it has."""
    size, seen, last = loaders[0]["size"], sum(one["seen"] for one in after), [one["last"] for one in after]
    again = any(batch is not None and batch in last[:rank] for rank, batch in enumerate(last))
    alike = all(one["size"] == size and one["data"] == loaders[0]["data"] for one in loaders)
    whole = size is not None and alike and ranks.size > 1 and not any(one["sharded"] for one in loaders)
    if again or (whole and seen > size):
        of = "" if size is None else f" of the data set's {size}"
        raise ValueError(
            f"fit: loader must yield every batch on one rank alone, but the {ranks.size} ranks saw {seen} data points{of}: the whole loader "
            "on every rank? Pass ella_cuda.distributed.shard(loader, group). Data sets of a rank's own are told apart by their first "
            "example, or by an attribute data_digest of the loader."
        )


def rounded(values: Sequence[Any]) -> list[Any]:
    """The values, numbers, lists of numbers or None, those that are near the commonest one in its place."""

    def near(a: Any, b: Any) -> bool:
        if isinstance(a, list):
            return len(a) == len(b) and all(map(near, a, b))
        if a is None or b is None:
            return a is b
        return math.isclose(a, b, rel_tol=NEAR) or (math.isnan(a) and math.isnan(b))

    common = max(values, key=lambda value: sum(near(value, other) for other in values))
    return [json.dumps(common if near(value, common) else value) for value in values]


# sums -----------------------------------------------------------------------------------------------------------------


def _apart(rules: Sequence[Rule]) -> list[str]:
    """Parameters whose output side could be another one's, and was separated when the pass met shared positions."""
    return [
        rule.full_name(name)
        for rule in rules
        for name, owner in rule.output_owners().items()
        if rule.factors[name].output_moment is not rule.factors[owner].output_moment
    ]


def _moments(rules: Sequence[Rule]) -> list[SecondMoment]:
    sides = (m for rule in rules for f in rule.factors.values() for m in (f.input_moment, f.output_moment))
    return list({moment: None for moment in sides if moment is not None})


def _drop_before(la: Any, sums: FitSums) -> None:
    """Leave the fit that is added to with rank 0."""
    for moment in _moments(la._rules):
        moment.total = torch.zeros_like(moment.total)
        moment.count(-moment.rows)
    sums.n_targets, sums.statistic = 0, torch.zeros_like(sums.statistic)
    la.statistic_gradients = {}


def _sum(la: Any, ranks: Ranks, sums: FitSums) -> None:
    """All ranks' sums in the place of this one's."""
    moments = _moments(la._rules)
    gradients = {name: g + la.statistic_gradients.get(name, 0) for name, g in sums.gradients.items()}
    counts = sums.statistic.new_tensor([float(moment.rows) for moment in moments] + [float(sums.n_targets)])
    extra = torch.cat([counts, sums.statistic.view(1), *(g.flatten() for g in gradients.values())])
    extra = ranks.sum_matrices_([moment.total for moment in moments], extra)
    *rows, n_targets = extra[: len(counts)].tolist()
    for moment, count in zip(moments, rows, strict=True):
        moment.count(int(count) - moment.rows)
    sums.n_targets, sums.statistic = int(n_targets), extra[len(counts)].clone()
    parts = extra[len(counts) + 1 :].split([g.numel() for g in gradients.values()]) if gradients else ()
    sums.gradients = {
        name: part.view(g.shape).clone() for (name, g), part in zip(gradients.items(), parts, strict=True)
    }
    la.statistic_gradients = {}


def _seed(la: Any, generator: torch.Generator | None) -> int:
    """A seed of the draws of a pass; 0 where there are none."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device)) if la.fisher == "mc" else 0


def _generators(
    la: Any, generator: torch.Generator | None, seed: int, ranks: Ranks
) -> Callable[[int], torch.Generator] | None:
    """A generator for each of this rank's batches, which follows from the batch's number among all ranks' alone; None without draws."""
    if la.fisher != "mc":
        return None
    device = next(la.model.parameters()).device if generator is None else generator.device
    begin, step = seed + STEP * ranks.rank, STEP * ranks.size
    return lambda number: torch.Generator(device).manual_seed((begin + step * number) % 2**63)


def seeded_together(
    la: Any, generator: torch.Generator | None, ranks: Ranks
) -> Callable[[int], torch.Generator | None]:
    """:func:`_generators` of a further pass, from a new seed of rank 0's generator; ``None`` for each batch without draws."""
    seed = ranks.agree(seed=_seed(la, generator))[0]["seed"]
    return _generators(la, generator, seed, ranks) or (lambda number: None)

"""Parameter tensors that share a prior precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from torch import nn

from ella_cuda.laplace.followed import Trace, scaled_together
from ella_cuda.laplace.parameters import trainable

PriorStructure = Literal["layerwise", "module", "normalised", "scalar"]
STRUCTURES: tuple[str, ...] = get_args(PriorStructure)
REST = "unnormalised"  # the group of all tensors that no normalisation follows


def group_indices(structure: str, names: Sequence[str], model: nn.Module) -> list[int]:
    """Of each parameter tensor, the number of its group, whose tensors have one precision. Groups are numbered as they come.

    Args:
        structure: one of :data:`STRUCTURES`: "layerwise" (every tensor is a group), "module" (those of one module are), "normalised"
            (:func:`prior_groups`) or "scalar" (all of them are).
        names: of parameters of the model, of all or of some.
        model: whose graph "normalised" needs.

    Raises:
        ValueError: see :func:`prior_groups`.
    """
    if structure == "normalised":
        keys = {name: group for group, members, _ in prior_groups(model) for name in members}
    else:
        key = {"layerwise": lambda n: n, "module": lambda n: n.rpartition(".")[0], "scalar": lambda n: ""}[structure]
        keys = {name: key(name) for name in names}
    numbers: dict[str, int] = {}
    return [numbers.setdefault(keys[name], len(numbers)) for name in names]


def prior_groups(model: nn.Module) -> list[tuple[str, list[str], bool]]:
    r"""The trainable parameter tensors in groups of one prior precision each: every layer that a normalisation follows has a group of its
    own, all other tensors are one group.

    With batch statistics a normalised group :math:`\theta_n` may be multiplied by any :math:`k > 0` without a change of the network's
    function. Where it has a precision of its own, the best one is in proportion to :math:`1 / k^2`, and predictions do not depend on k. Where
    it shares one with other tensors, they do.

    A layer is normalised where every call of it leads to a normalisation on all ways through the network's graph, which
    :mod:`torch.fx` traces in evaluation mode. Normalisations are BatchNorm, SyncBatchNorm, InstanceNorm, GroupNorm, LayerNorm and RMSNorm,
    and their functions. On a way there may be what a positive factor goes through: padding with zeros or by the input, slices, other
    shapes, average pooling, dropout, sampling, multiples, linear layers without a bias. Nonlinearities, sums, concatenations and the
    output end a way.

    Layers are torch's linear layers, convolutions and embeddings, and those of :mod:`ella_cuda.nn`. Weight and bias of a layer are one group,
    for invariance needs k in both. Of a factored layer :math:`W_{out} (W_{in} x + b_{in}) + b_{out}` ``weight_out`` and ``bias_out`` are
    one; ``weight_in`` and ``bias_in`` are another one where there is no ``bias_out``, else they are not normalised. Layers that share a
    tensor are one group, which is normalised if each of them is. Not normalised are parameters of normalisations, of layers that are not
    known here, parameters that something else than their layer uses, and tensors whose group has a frozen one.

    Args:
        model: the network.

    Returns:
        ``(name, parameter names, normalised)`` of every group, parameters by their names in ``model.named_parameters()``. A normalised
        group has the name of its first module, or of its first parameter where the module has two groups. The others, if there are any,
        come last as "unnormalised".

    Raises:
        TypeError: model is no module, or a parameter has a dtype that no approximation takes.
        ValueError: torch.fx cannot trace the model, or nothing of it is trainable.

    Source: Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022, recommendation 2.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prior_groups: model must be a torch.nn.Module, got {type(model).__name__}.")
    names = {id(p): name for name, p in trainable(model).items()}
    try:
        trace = Trace(model)
    except Exception as error:
        raise ValueError(
            f"prior_groups: torch.fx cannot trace {type(model).__name__}, so that nobody knows which tensors a normalisation follows "
            f"({type(error).__name__}: {error}). Use prior_structure='layerwise' or 'module', or write forward without conditions on "
            "values and shapes."
        ) from error
    found = _Groups(names)
    for path, module in model.named_modules():
        sets = list(scaled_together(module))
        followed = trace.is_followed(module)
        for members in sets:
            first = next(n for n, p in module.named_parameters(path, remove_duplicate=False) if p is members[0])
            free = not any(id(p) in trace.used for p in members)
            found.add(path if path and len(sets) == 1 else first, map(id, members), followed and free)
        known = {id(p) for members in sets for p in members}
        for p in module._parameters.values():
            if p is not None and id(p) not in known:
                found.add("", [id(p)], False)
    return found.listed()


@dataclasses.dataclass(eq=False)
class _Group:
    name: str
    members: set[int]  # ids of parameters
    normalised: bool


class _Groups:
    """Sets of parameters, which are one where they share a parameter."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._of: dict[int, _Group] = {}

    def add(self, name: str, members: Iterable[int], normalised: bool) -> None:
        group = _Group(name, set(members), normalised)
        for before in dict.fromkeys(self._of[p] for p in group.members if p in self._of):
            group.name = before.name
            group.members |= before.members
            group.normalised &= before.normalised
        self._of |= dict.fromkeys(group.members, group)

    def listed(self) -> list[tuple[str, list[str], bool]]:
        members: dict[_Group | None, list[str]] = {}
        for p, name in self._names.items():
            group = self._of[p]
            alone = group.normalised and group.members <= self._names.keys()
            members.setdefault(group if alone else None, []).append(name)
        rest = members.pop(None, [])
        return [(group.name, names, True) for group, names in members.items()] + ([(REST, rest, False)] if rest else [])

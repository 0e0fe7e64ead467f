"""Checks of arguments, and of the parameters and bases of an approximation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ella_cuda.nn import SpatialBasis

Value = float | Tensor


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The choice that the value equals, as a plain string whatever the value is (members of string enums are equal to theirs);
    ValueError where it is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return choices[choices.index(value)]


class NotANumberError(TypeError, ValueError):
    """An argument is neither a number nor a tensor; laplace-torch raises ValueError."""


def as_float64(name: str, value: Value, device: torch.device) -> Tensor:
    """A float64 tensor on the device, still attached to the graph of what was given; NotANumberError where that is neither number nor
    tensor."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's numbers are
        raise NotANumberError(
            f"{name}: expected a number or a tensor, got {type(value).__name__}; of several make torch.tensor(...)."
        )
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def check_positive(name: str, values: Sequence[float]) -> None:
    """ValueError where an entry is not positive and finite; the message has its index."""
    for index, value in enumerate(values):
        if not 0 < value < math.inf:
            where = f" at index {index}" if len(values) > 1 else ""
            raise ValueError(f"{name}: expected positive finite values, got {value}{where}.")


def number(name: str, value: Value) -> float:
    """The value as a float; ValueError where it is not one number, NotANumberError where it is none."""
    found = as_float64(name, value, torch.device("cpu"))
    if found.numel() != 1 or found.dim() > 1:
        raise ValueError(f"{name}: expected one number, got shape {tuple(found.shape)}.")
    return found.item() if isinstance(value, Tensor) else float(value)


def positive_number(name: str, value: Value) -> float:
    """The value as :func:`number`; ValueError where it is not positive and finite, too."""
    check_positive(name, [found := number(name, value)])
    return found


def rounding_of(tensor: Tensor) -> float:
    """By how much, of its largest number, a tensor's derivative may differ from the same by another way. On CUDA cuDNN takes TF32 for
    float32 by default, through many layers; what is wrong is off by more."""
    return 2.0**-6 if tensor.is_cuda and tensor.dtype == torch.float32 else torch.finfo(tensor.dtype).eps ** 0.5


def require_local(model: nn.Module) -> None:
    """TypeError where the model is a wrapper that spreads it over processes, or has parts of its parameters alone."""
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "KronLaplace: model must be the network itself, got a DistributedDataParallel; pass its module, KronLaplace(ddp.module), and the "
            "group to fit(loader, group=...)."
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or hasattr(parameter, "_is_sharded"):
            raise TypeError(
                f"KronLaplace: the model's parameters must be whole on every process, but {name!r} is a {type(parameter).__name__}, of "
                "which a process has a part (fully_shard, tensor parallelism). Gather them into a network that is not wrapped: "
                "plain.load_state_dict(torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, broadcast_from_rank0=False))) on every process, and pass KronLaplace(plain)."
            )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in ``model.named_parameters()`` order; those of several names by the first. ValueError where there are
    none, or they are spread over devices; TypeError where one is of a wrong dtype."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("KronLaplace: the model has no trainable parameters; set requires_grad of some.")
    for name, p in parameters.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"KronLaplace: parameter {name!r} has dtype {p.dtype}; expected float32 or float64: model.float() and x.float()."
            )
    devices = {str(p.device) for p in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"KronLaplace: the parameters must be on one device, found {', '.join(sorted(devices))}.")
    return parameters


def checked_names(argument: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names as a list; ValueError where there are none or one is not known, TypeError where they are no list."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{argument}: expected a list of names, got {names!r}.")
    names, known = list(names), dict.fromkeys(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(f"{argument}: expected names among {', '.join(map(repr, list(known)[:8]))}, ...; got {wrong}.")
    return names


def is_inside(parameter: str, name: str) -> bool:
    """Whether a parameter's name is this one, or that of a parameter inside of the module of this name."""
    return not name or parameter == name or parameter.startswith(f"{name}.")


def require_no_inference(parameters: Mapping[str, nn.Parameter]) -> None:
    """RuntimeError where one was made in inference mode."""
    for name, parameter in parameters.items():
        if parameter.is_inference():
            raise RuntimeError(
                f"KronLaplace: parameter {name!r} was made in torch.inference_mode(); make, move and convert the model outside of it."
            )


class FittedBases:
    """The bases of a model's sparsified layers as they were: log determinants at others would be of another network than the data fit's."""

    def __init__(self, model: nn.Module) -> None:
        self.found = {n: (m, m.versions()) for n, m in model.named_modules() if isinstance(m, SpatialBasis)}

    def learn(self) -> bool:
        """Whether one is wanted as something to differentiate in."""
        return any(basis.learns() for basis, _ in self.found.values())

    def check(self) -> None:
        """RuntimeError where one has changed."""
        for name, (basis, versions) in self.found.items():
            if basis.versions() != versions:
                raise RuntimeError(f"KronLaplace: the basis {name!r} changed after the fit; call fit again.")

"""A run's network: the paper's, torchvision's or timm's by name, or one that a function of the user's builds."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ella_cuda.experiments.hyperparameters import NetworkConfig, RunConfig
from ella_cuda.files import no_file
from ella_cuda.models import neyshabur
from ella_cuda.modes import evaluation_mode

TIMM = "timm:"


def build_network(config: RunConfig, in_channels: int, num_classes: int) -> nn.Module:
    """A run's network with weights drawn from torch's global generator, on the CPU; the data say the two numbers. One by name that learns an
    augmentation has GroupNorm in the place of BatchNorm, whose statistics of a batch would mix the copies of its images.

    Raises:
        ValueError: no network of that name, or one that does not take such images.
    """
    if not config.model:
        sizes = {**config.of(NetworkConfig), "pool_norm": float(config.pool_norm)}
        return neyshabur(config.layer, in_channels, num_classes, image_size=config.image_size, **sizes)
    network = _named(config.model, in_channels, num_classes)
    if not isinstance(network, nn.Module):
        raise ValueError(f"model {config.model} must give a torch.nn.Module, got a {type(network).__name__}.")
    return _with_group_norms(network) if config.learns_amounts else network


def _with_group_norms(network: nn.Module) -> nn.Module:
    """The network with a GroupNorm of at most 32 groups for each of torch's own BatchNorms."""
    for parent in [*network.modules()]:
        for name, norm in parent.named_children():
            if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                count = norm.num_features
                setattr(parent, name, nn.GroupNorm(math.gcd(32, count), count, norm.eps, norm.affine))
    return network


def require_named(config: RunConfig) -> None:
    """Raise, in no time, where torchvision or timm has no network of the run's name, or the file of its weights is not there.

    Raises:
        ValueError, FileNotFoundError: as :func:`require_network`.
    """
    if config.model and not runs_code(config.model):
        _require_known(config.model)
    if config.weights:
        _require_file(config.weights)


def _require_file(weights: str) -> None:
    if not os.path.exists(weights):
        raise FileNotFoundError(f"weights {weights} do not exist; name a file of torch.save or safetensors.")


def _require_known(name: str) -> None:
    if not name.startswith(TIMM):
        from torchvision import models

        known = models.list_models(module=models)
        wrong = f"model must be a network of torchvision ({', '.join(known[:3])}, ...), {TIMM}NAME of timm or module:function, got {name!r}"
    else:
        try:
            import timm
        except ImportError as error:
            raise ValueError(f"model {name} needs the package timm, which cannot be imported ({error}).") from error
        if timm.is_model(name.removeprefix(TIMM)):
            return
        known = [TIMM + each for each in timm.list_models()]
        wrong = f"model: timm has no network {name.removeprefix(TIMM)!r}"
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(wrong + (f"; did you mean {near[0]}?" if near else "."))


def _named(name: str, in_channels: int, num_classes: int) -> nn.Module:
    if runs_code(name):
        return _of_function(name, in_channels, num_classes)
    _require_known(name)
    if name.startswith(TIMM):
        import timm

        return timm.create_model(
            name.removeprefix(TIMM), pretrained=False, num_classes=num_classes, in_chans=in_channels
        )
    from torchvision import models

    return _taking(models.get_model(name, weights=None, num_classes=num_classes), in_channels)


def _taking(network: nn.Module, in_channels: int) -> nn.Module:
    """The network with a first convolution of that many channels; torchvision's take three."""
    if in_channels == 3:
        return network
    name, first = next((n, m) for n, m in network.named_modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        fewer = nn.Conv2d(
            in_channels,
            first.out_channels,
            first.kernel_size,  # type: ignore[arg-type]
            first.stride,  # type: ignore[arg-type]
            first.padding,  # type: ignore[arg-type]
            bias=first.bias is not None,
        )
        fewer.weight.copy_(first.weight.sum(1, keepdim=True))  # as grey images repeated three times
        if first.bias is not None:
            fewer.bias.copy_(first.bias)
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, fewer)
    return network


def _of_function(name: str, in_channels: int, num_classes: int) -> nn.Module:
    module, _, function = name.partition(":")
    try:
        with _here():
            make = getattr(importlib.import_module(module), function)
            return make(in_channels=in_channels, num_classes=num_classes)
    except Exception as error:  # the user's code fails in any way
        raise ValueError(
            f"model {name}: calling {function}(in_channels={in_channels}, num_classes={num_classes}) of {module} raised {error!r}; the "
            "module must be importable from the present folder, and the function must take these arguments by name."
        ) from error


@contextlib.contextmanager
def _here() -> Iterator[None]:
    """For the duration of the context, modules of the present folder can be imported."""
    before, sys.path[:] = sys.path[:], [os.getcwd(), *sys.path]
    try:
        yield
    finally:
        sys.path[:] = before


def runs_code(model: str) -> bool:
    """Whether building the network runs code that the name alone chooses."""
    return ":" in model and not model.startswith(TIMM)


def require_network(config: RunConfig, images: Tensor, num_classes: int) -> None:
    """Raise what a run raises whose network cannot be built, started from its weights, or given such images.

    Args:
        config: the run.
        images: ``(N, C, S, S)``, N at least 2.
        num_classes: K.

    Raises:
        ValueError: see above; also where the network does not give ``(N, K)`` logits.
    """
    with torch.random.fork_rng(devices=[]):
        network = build_network(config, images.shape[1], num_classes)
        if config.weights:
            load_weights(network, config.weights, num_classes)
        network.train()
        for training in (True, False):
            try:
                with torch.no_grad(), contextlib.nullcontext() if training else evaluation_mode(network):
                    found = network(images[:2])
            except Exception as error:  # of a network that takes other images, in any way
                raise ValueError(
                    f"model {config.model or config.layer} does not take images of shape {tuple(images.shape[1:])}: {error}; choose another "
                    "--image-size or network."
                ) from error
            if not isinstance(found, Tensor) or found.shape != (len(images[:2]), num_classes):
                got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(
                    f"model {config.model} must give one tensor (N, {num_classes}) of logits in both modes, got {got}; choose "
                    "a network without auxiliary outputs."
                )


def load_weights(network: nn.Module, path: str, num_classes: int) -> None:
    """Start a network from the weights in a file of ``torch.save`` or safetensors, from which no code is run.

    The tensors of the last layer may be of another number of classes: the network keeps its own then. A first convolution of three channels
    is summed where the network's takes one.

    Args:
        network: it is changed.
        path: a mapping of names to tensors, or one with the entry ``state_dict`` or ``model``.
        num_classes: of the network.

    Raises:
        FileNotFoundError: there is no file. ValueError: it is none of weights, or of another network.
    """
    given = _tensors_of(path)
    own, left = network.state_dict(), []
    for name, mine in own.items():
        theirs = given.pop(name, None)
        if theirs is None:
            if not name.endswith("num_batches_tracked"):
                left.append(f"{name} is missing")
            continue
        if theirs.dim() == 4 and mine.shape[1] == 1 and theirs.shape[1] == 3 and mine.shape[0] == theirs.shape[0]:
            theirs = theirs.sum(1, keepdim=True)
        if theirs.shape == mine.shape:
            mine.copy_(theirs)
        elif not (mine.shape[1:] == theirs.shape[1:] and len(mine) == num_classes):
            left.append(f"{name} is {tuple(theirs.shape)} and not {tuple(mine.shape)}")
    left += [f"{name} is of no layer" for name in given]
    if left:
        raise ValueError(
            f"weights {path} are of another network: {'; '.join(left[:3])}{f' and {len(left) - 3} more' if len(left) > 3 else ''}."
        )


def _tensors_of(path: str) -> dict[str, Tensor]:
    _require_file(path)
    try:
        if what := no_file(path):
            raise ValueError(f"it is {what}")
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            found: object = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files fail in many ways
        text = str(error).split("\n", 1)[0]
        raise ValueError(f"weights {path} cannot be read without running code from the file: {text}") from error
    for entry in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(entry), Mapping):
            found = found[entry]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"weights {path} must hold tensors by name, got a {type(found).__name__}.")
    return dict(found)

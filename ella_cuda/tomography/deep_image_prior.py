"""The deep image prior: a network fitted to one image's measurements."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda.modes import evaluation_mode, exclusively
from ella_cuda.progress import bar_size
from ella_cuda.tomography.rays import LinearMap
from ella_cuda.tomography.total_variation import total_variation
from ella_cuda.training.checkpoint import Checkpoint, random_state, restore, threads_of

LARGEST = 1000.0  # absolute value of a weight
GRADIENT_NORM = 1.0  # at most
SAME = 1e-3  # relative: projections that differ by less differ by rounding
ENTRIES = {  # of a state
    "epoch": int,
    "history": list,
    **dict.fromkeys(("settings", "model", "optimizer", "random", "best"), dict),
    "projected": Tensor,
}


def data_loss(image: Tensor, y: Tensor, rays: LinearMap, tv_weight: float) -> Tensor:
    """Mean squared error of the measurements and weighted total variation of the image ``(..., H, W)``."""
    return (rays.forward(image) - y).square().mean() + tv_weight * total_variation(image).sum()


def fit_network(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    rays: LinearMap,
    tv_weight: float,
    n_steps: int,
    lr: float,
    checkpoint: Checkpoint,
    every: int,
    settings: dict[str, Any],
    progress_bar: bool,
) -> list[float]:
    """Adam on :func:`data_loss` of the network's image of x, with gradients of norm 1 at most and weights within 1000; the network ends at
    the weights of the least loss, also where an exception ends the steps. Returns the losses.

    Args:
        checkpoint: what the steps go on from, replaced every so many steps and at the end.
        settings: what the numbers depend on; a checkpoint of others is refused.

    Raises:
        ValueError: the network's output is no image; the checkpoint is damaged, of other settings or has more steps.
        FloatingPointError: a loss is not finite. RuntimeError: another call works on the checkpoint.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    losses: list[float] = []
    best: dict[str, Any] = {"loss": math.inf, "network": copy.deepcopy(network.state_dict())}

    def step() -> float:
        optimizer.zero_grad()
        loss = data_loss(as_image(network(x), rays), y, rays, tv_weight)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"LinearisedDIP.reconstruct: the loss is {value}; lower lr. The network has the best weights before; the last checkpoint, if "
                "any, is good."
            )
        if value < best["loss"]:
            best.update(loss=value, network={k: v.clone() for k, v in network.state_dict().items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
        optimizer.step()
        with torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(-LARGEST, LARGEST)
        return value

    @torch.no_grad()
    def projected() -> Tensor:
        with evaluation_mode(network):
            return rays.forward(as_image(network(x), rays))

    def go_on(state: Mapping[str, Any]) -> None:
        source = checkpoint.source
        restore(source, state, settings, network, optimizer, (), ENTRIES)
        if state["epoch"] > n_steps:
            raise ValueError(
                f"{source} has {state['epoch']} steps, more than the {n_steps} asked for; name another file."
            )
        kept, here = state["projected"], projected()
        if kept.shape != here.shape or not (kept.to(here) - here).norm() <= SAME * here.norm():
            raise ValueError(
                f"{source} has an image of other measurements: the network or ray_transform is another. Name another file."
            )
        losses.extend(state["history"])
        best.update(state["best"])

    def save() -> None:
        state = {"epoch": len(losses), "history": losses, "settings": settings, "best": best, "projected": projected()}
        state |= {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "random": random_state(())}
        checkpoint.save({**state, "threads": threads_of(network)})

    shown = {"desc": "LinearisedDIP.reconstruct", "disable": not progress_bar, **bar_size()}
    # The outer context puts back the mode of every part.
    with torch.enable_grad(), checkpoint.claimed(), exclusively(network), evaluation_mode(network):
        network.train()
        try:
            if (state := checkpoint.read()) is not None:
                go_on(state)
            with tqdm(total=n_steps, initial=len(losses), **shown) as bar:
                while len(losses) < n_steps:
                    losses.append(step())
                    bar.update()
                    if len(losses) % 10 == 0:
                        bar.set_postfix_str(f"{losses[-1]:.4g}", refresh=False)
                    if checkpoint and (len(losses) % every == 0 or len(losses) == n_steps):
                        save()
            return losses
        finally:
            optimizer.zero_grad()
            network.load_state_dict(best["network"])
            torch.clear_autocast_cache()  # which a caller's autocast filled before the steps


def as_image(output: Any, rays: LinearMap) -> Tensor:
    """The network's ``(1, 1, H, W)`` as ``(H, W)``."""
    if not isinstance(output, Tensor) or tuple(output.shape) != (1, 1, *rays.image_shape):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"LinearisedDIP: network must map (1, 1, H, W) to {(1, 1, *rays.image_shape)}, the image of ray_transform, got {got}."
        )
    return output[0, 0]

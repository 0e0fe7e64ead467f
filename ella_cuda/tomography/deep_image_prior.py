"""The deep image prior: a network fitted to one image's measurements."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda.modes import evaluation_mode, exclusively
from ella_cuda.progress import bar_size
from ella_cuda.tomography.rays import LinearMap
from ella_cuda.tomography.total_variation import total_variation
from ella_cuda.training.checkpoint import (
    Checkpoint,
    agree,
    plain,
    random_state,
    restore_random_state,
)

LARGEST = 1000.0  # absolute value of a weight
GRADIENT_NORM = 1.0  # at most
SAME = 1e-3  # relative: projections that differ by less differ by rounding

Step = Callable[[], float]


class Loop:
    """Steps with a progress bar, a checkpoint and what is best so far.

    Args:
        where: the public method, for messages.
        checkpoint: a file or None.
        settings: what the numbers depend on; a checkpoint of others is refused.
        every: steps between checkpoints.
        progress_bar: show one.

    Raises:
        TypeError, OSError: see :class:`ella_cuda.training.checkpoint.Checkpoint`.
    """

    def __init__(
        self, where: str, checkpoint: str | Path | None, settings: dict[str, Any], every: int, progress_bar: bool
    ) -> None:
        self.where, self.settings, self.every, self.progress_bar = where, settings, every, progress_bar
        self._checkpoint = Checkpoint(checkpoint, where, self._check)

    def run(
        self,
        n_steps: int,
        step: Step,
        state: Callable[[], dict[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
    ) -> list[float]:
        """The values of all steps, those before an interruption included.

        Args:
            n_steps: in all.
            step: takes one and returns what is recorded.
            state, restore: what the steps go on from, tensors and plain values.

        Raises:
            ValueError: the checkpoint is damaged, of other settings or has more steps.
            RuntimeError: another call works on the checkpoint.
        """
        values: list[float] = []
        with self._checkpoint.claimed():
            if (kept := self._checkpoint.read()) is not None:
                if len(kept["values"]) > n_steps:
                    raise ValueError(
                        f"{self.where}: {self._checkpoint.source} has {len(kept['values'])} steps, more than the {n_steps} asked for. "
                        "Ask for as many, or name another file."
                    )
                try:
                    restore(kept["state"])
                    restore_random_state(kept["random"], ())
                except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                    raise ValueError(
                        f"{self.where}: {self._checkpoint.source} does not fit ({error}). Name another file, or move it away to start anew."
                    ) from error
                values = list(kept["values"])
            bar = tqdm(total=n_steps, initial=len(values), desc=self.where, disable=not self.progress_bar, **bar_size())
            with bar:
                while len(values) < n_steps:
                    values.append(step())
                    bar.update()
                    if len(values) % 10 == 0:
                        bar.set_postfix_str(f"{values[-1]:.4g}", refresh=False)
                    if self._checkpoint and (len(values) % self.every == 0 or len(values) == n_steps):
                        self._save(values, state())
        return values

    def _save(self, values: list[float], state: dict[str, Any]) -> None:
        kept = {"of": self.where, "settings": self.settings, "values": values, "state": state}
        self._checkpoint.save(plain({**kept, "random": random_state(())}))

    def _check(self, path: Path, kept: dict[str, Any]) -> None:
        if not isinstance(kept.get("of"), str):
            raise ValueError(
                f"{self.where}: {path} is a checkpoint of something else. Name another file, or move it away to start anew."
            )
        for key, kind in {"settings": dict, "values": list, "state": dict, "random": dict}.items():
            if not isinstance(kept.get(key), kind):
                raise ValueError(f"{self.where}: the checkpoint {path} has no {key}; move it away to start anew.")
        of_another = kept["of"] != self.where or kept["settings"].keys() != self.settings.keys()
        other = [key for key, value in self.settings.items() if not agree(kept["settings"].get(key), value)]
        if of_another or other:
            what = ", ".join(other) if other and kept["of"] == self.where else kept["of"]
            raise ValueError(
                f"{self.where}: the checkpoint {path} is of another run: {what}. Pass what that run had, or name another file."
            )


def require_same(kept: Tensor, projected: Tensor) -> None:
    """ValueError where a checkpoint's image has other measurements than the network and the transform at hand give it."""
    if kept.shape != projected.shape or not (kept.to(projected) - projected).norm() <= SAME * projected.norm():
        raise ValueError("its image has other measurements: the network or ray_transform is another")


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
    loop: Loop,
) -> list[float]:
    """Adam on :func:`data_loss` of the network's image of x, with gradients of norm 1 at most and weights within 1000; the network ends at
    the weights of the least loss, also where an exception ends the steps. Returns the losses.

    Raises:
        ValueError: the network's output is no image.
        FloatingPointError: a loss is not finite.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    best: dict[str, Any] = {"loss": math.inf, "network": copy.deepcopy(network.state_dict())}

    def step() -> float:
        optimizer.zero_grad()
        loss = data_loss(as_image(network(x), rays), y, rays, tv_weight)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{loop.where}: the loss is {value}; lower lr. The network has the best weights before; the last checkpoint, if any, "
                "is good."
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

    def state() -> dict[str, Any]:
        return {
            "network": dict(network.state_dict()),
            "best": best,
            "optimizer": optimizer.state_dict(),
            "projected": projected(),
        }

    @torch.no_grad()
    def projected() -> Tensor:
        with evaluation_mode(network):
            return rays.forward(as_image(network(x), rays))

    def restore(kept: Mapping[str, Any]) -> None:
        network.load_state_dict(kept["network"])
        require_same(kept["projected"], projected())
        optimizer.load_state_dict(kept["optimizer"])
        best.update(loss=float(kept["best"]["loss"]), network=dict(kept["best"]["network"]))

    # The outer context puts back the mode of every part.
    with torch.enable_grad(), exclusively(network), evaluation_mode(network):
        network.train()
        try:
            return loop.run(n_steps, step, state, restore)
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

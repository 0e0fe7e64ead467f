"""Evidence steps in the training loop of Lightning; needs ``pip install 'ella_cuda[lightning]'``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ella_cuda.training import evidence_callback

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise ImportError(
        "ella_cuda.training.lightning needs Lightning 2: pip install 'ella_cuda[lightning]'. It is not installed."
    ) from error


class EvidenceCallback(pl.Callback):
    """:class:`ella_cuda.training.EvidenceCallback` for ``lightning.pytorch.Trainer(callbacks=[EvidenceCallback(loader)])``.

    The prior's gradient is added to that of the loss before each step of an optimizer, and before gradients are clipped, so that any
    optimizer serves; its own weight decay is put to 0. Optimizers without parameters of the network stay. ``training_step`` returns the
    mean loss, without the prior. An evidence step follows the training epoch, and logs ``neg_log_marginal_likelihood`` per data point. The
    state is in Lightning's checkpoints; those that are written at a validation's end, before the epoch's evidence step, are of the step
    before. Processes of one trainer make evidence steps together.

    Args:
        loader, likelihood: see there.
        network: name of the module's submodule that maps inputs to outputs; "" is the module itself, by its ``forward``.
        weight_decay: True has the optimizers decay the weights in the gradient's place, see
            :meth:`ella_cuda.training.EvidenceCallback.attach`.
        options: others of :class:`ella_cuda.training.EvidenceCallback`.

    Attributes:
        evidence: the :class:`ella_cuda.training.EvidenceCallback`, from the start of the fit; None before.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        likelihood: Any = "classification",
        *,
        network: str = "",
        weight_decay: bool = False,
        **options: Any,
    ) -> None:
        self._loader, self._likelihood, self._options = loader, likelihood, options
        self._network, self._weight_decay = network, weight_decay
        self._state: Mapping[str, Any] | None = None
        self.evidence: evidence_callback.EvidenceCallback | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the evidence of the module on its device, and attach the optimizers, before their states are read."""
        model: nn.Module = pl_module.get_submodule(self._network)
        group = {"group": torch.distributed.group.WORLD} if trainer.world_size > 1 else {}
        self.evidence = evidence_callback.EvidenceCallback(
            model, self._loader, self._likelihood, **group, **self._options
        )
        if self._state is not None:
            self.evidence.load_state_dict(self._state)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        weights = set(model.parameters())
        having = [
            o for o in trainer.optimizers if any(p in weights for group in o.param_groups for p in group["params"])
        ]
        for optimizer in having or trainer.optimizers:  # which is refused where none has any
            own = [schedule for schedule in schedules if getattr(schedule, "optimizer", None) is optimizer]
            self.evidence.attach(optimizer, own, weight_decay=self._weight_decay)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Add the prior's gradient to that optimizer's parameters."""
        self.evidence.add_prior(optimizer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do the evidence step that is due."""
        value = self.evidence.step(trainer.current_epoch)
        if value is not None:
            pl_module.log("neg_log_marginal_likelihood", value)

    def state_dict(self) -> dict[str, Any]:
        """That of :attr:`evidence`."""
        return {} if self.evidence is None else self.evidence.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the fit starts."""
        self._state = state_dict or None

"""Evidence steps in the training loop of Hugging Face's Trainer; needs ``pip install 'ella_cuda[transformers]'``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ella_cuda.laplace.batches import DEFAULT_KEYS
from ella_cuda.training import evidence_callback
from ella_cuda.training.checkpoint import read_checkpoint, save_checkpoint

try:
    import accelerate  # noqa: F401  transformers' Trainer needs it
    import transformers
except ModuleNotFoundError as error:
    raise ImportError(
        f"ella_cuda.training.transformers needs transformers and accelerate: pip install 'ella_cuda[transformers]'. {error.name} is not "
        "installed."
    ) from error

FILE = "evidence.pt"


class EvidenceCallback(transformers.TrainerCallback):
    """:class:`ella_cuda.training.EvidenceCallback` for ``transformers.Trainer(callbacks=[EvidenceCallback(loader)])``.

    The prior's gradient is added to that of the loss before each step of the optimizer, after gradients are clipped, so that any
    optimizer serves; its own weight decay, that of ``TrainingArguments``, is put to 0. The Trainer's loss is to be the mean over data
    points, without the prior. An evidence step follows each epoch. A checkpoint's folder has the state in ``evidence.pt``, which a training
    that is resumed from it reads. Processes of one training make evidence steps together.

    Args:
        loader: of batches with inputs and labels that are mappings, as the Trainer's data collator makes them. It is no loader of the
            Trainer's, whose samplers count passes: ``DataLoader(train_dataset, batch_size, collate_fn=collator)``.
        likelihood, options: of :class:`ella_cuda.training.EvidenceCallback`.

    Attributes:
        evidence: the :class:`ella_cuda.training.EvidenceCallback`, from the start of training; None before.
    """

    def __init__(self, loader: Iterable[Any], likelihood: Any = "classification", **options: Any) -> None:
        self._loader, self._likelihood, self._options = loader, likelihood, options
        self.evidence: evidence_callback.EvidenceCallback | None = None
        self._epochs = 0  # whole ones, after which the step that was due is done

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any, **_: Any) -> None:
        """Make the evidence of the model on its device, and read its state where training is resumed.

        Raises:
            FileNotFoundError: the checkpoint's folder has no state of the evidence.
        """
        group = {"group": torch.distributed.group.WORLD} if args.world_size > 1 else {}
        self.evidence = evidence_callback.EvidenceCallback(
            _Logits(model, self._options.get("dict_key_x", DEFAULT_KEYS.x)),
            self._loader,
            self._likelihood,
            **group,
            **self._options,
        )
        self._epochs = 0
        self.evidence.attach(getattr(optimizer, "optimizer", optimizer), weight_decay=False)
        if state.global_step:
            file = _folder(args, state) / FILE
            if not file.exists():
                raise FileNotFoundError(
                    f"EvidenceCallback: training is resumed from step {state.global_step}, but {file} is not there: the checkpoint must be "
                    "one of args.output_dir, written with this callback."
                )
            found = read_checkpoint(file)
            self.evidence.load_state_dict(found)
            self._epochs = found["epochs"]
            self._step(state)  # of a checkpoint that was written at an epoch's last step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the prior's gradient."""
        self.evidence.add_prior()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do the evidence step that is due after whole epochs."""
        self._step(state)

    def _step(self, state: Any) -> None:
        done = round(state.epoch)
        if done > self._epochs and math.isclose(state.epoch, done, abs_tol=1e-6):
            self.evidence.step(done - 1)
            self._epochs = done

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state beside that of the Trainer."""
        if state.is_world_process_zero:
            save_checkpoint(_folder(args, state) / FILE, self.evidence.state_dict() | {"epochs": self._epochs})


class _Logits(nn.Module):
    """The logits of a model that is called with a batch's entries by name."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model, self._key = getattr(model, "module", model), key

    def forward(self, *only: torch.Tensor, **entries: Any) -> torch.Tensor:
        found = self.model(**({self._key: only[0]} if only else entries))
        return found if isinstance(found, torch.Tensor) else found["logits"]


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"

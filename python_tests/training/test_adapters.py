"""Evidence steps in Lightning's and Hugging Face's loops: the oracle is a plain loop over the same batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from ella_cuda.training import EvidenceCallback
from python_tests.laplace.checks import Function, drawn

OPTIONS = {"n_hypersteps": 3, "every": 2}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def points() -> DataLoader:
    return DataLoader(TensorDataset(drawn(24, 4), torch.arange(24) % 3), batch_size=8)


def plain_loop(
    model, loader, epochs, weight_decay=False, schedule=None, kind=torch.optim.AdamW, **how
) -> EvidenceCallback:
    optimizer = kind(model.parameters(), **how)
    evidence = EvidenceCallback(model, loader, **OPTIONS)
    evidence.attach(optimizer, weight_decay=weight_decay)
    schedulers = [] if schedule is None else schedule(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            evidence.penalised(nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        evidence.step(epoch)
    return evidence


def schedules(optimizer) -> list:
    """Two of one optimizer."""
    kind = torch.optim.lr_scheduler
    return [kind.StepLR(optimizer, 2, 0.5), kind.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def assert_near(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("missing", ["lightning", "transformers"])
def test_a_missing_extra_is_named(missing, beside_the_tests):
    code = f"import sys; sys.modules['{missing}'] = None; import ella_cuda.training.{missing}"
    found = subprocess.run([sys.executable, "-c", code], cwd=beside_the_tests, capture_output=True, text=True)
    assert found.returncode and f"pip install 'ella_cuda[{missing}]'" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("weight_decay", [False, True])
def test_lightnings_loop_is_the_plain_one_and_resumes_bit_for_bit(tmp_path, weight_decay):
    pl = pytest.importorskip("lightning.pytorch")
    from ella_cuda.training.lightning import EvidenceCallback as Adapter

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.05, weight_decay=0.3)
            return [optimizer], schedules(optimizer)

    def fit(epochs, checkpoint=None):
        module = Module()
        adapter = Adapter(points(), network="network", weight_decay=weight_decay, **OPTIONS)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = pl.Trainer(max_epochs=epochs, callbacks=[adapter], enable_checkpointing=False, **quiet)
        trainer.fit(module, points(), ckpt_path=checkpoint)
        return module.network, adapter.evidence, trainer

    found, evidence, trainer = fit(5)
    expected = network()
    oracle = plain_loop(expected, points(), 5, weight_decay, schedules, lr=0.05)
    assert_near(found, expected, 1e-10)
    assert evidence.margliks == pytest.approx(oracle.margliks, rel=1e-10) and len(evidence.margliks) == 2
    assert trainer.callback_metrics["neg_log_marginal_likelihood"] == pytest.approx(evidence.margliks[-1] / 24)
    _, _, trainer = fit(3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    again, resumed, _ = fit(5, tmp_path / "three.ckpt")
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), found.parameters(), strict=True))
    assert torch.equal(resumed.prior_precision, evidence.prior_precision) and resumed.margliks == evidence.margliks


def test_lightnings_optimizers_may_have_no_decay_or_none_of_the_network():
    pl = pytest.importorskip("lightning.pytorch")
    from ella_cuda.training.lightning import EvidenceCallback as Adapter

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.other = network(), nn.Linear(4, 3).double()
            self.automatic_optimization = False

        def training_step(self, batch, _):
            for optimizer, part in zip(self.optimizers(), (self.network, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(part(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            other = torch.optim.SGD(self.other.parameters(), lr=0.1, weight_decay=0.3)
            return [torch.optim.Rprop(self.network.parameters(), lr=0.01), other]

    module, adapter = Module(), Adapter(points(), network="network", **OPTIONS)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=3, callbacks=[adapter], enable_checkpointing=False, **quiet)
    trainer.fit(module, points())
    expected = network()
    oracle = plain_loop(expected, points(), 3, kind=torch.optim.Rprop, lr=0.01)
    assert_near(module.network, expected, 1e-10)
    assert adapter.evidence.margliks == pytest.approx(oracle.margliks, rel=1e-10)
    assert trainer.optimizers[1].param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_hugging_faces_loop_is_the_plain_one_and_resumes_bit_for_bit(tmp_path, strategy):
    """Checkpoints "steps" are written at an epoch's last step, before the evidence step."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from ella_cuda.training.transformers import EvidenceCallback as Adapter

    words = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": w, "labels": torch.tensor(i % 3)} for i, w in enumerate(words)]

    def bert() -> nn.Module:
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 20,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **sizes, **still))

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    def fit(epochs, folder, resume=False):
        model, adapter = bert(), Adapter(DataLoader(rows, 8), **OPTIONS)
        quiet = {
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": strategy,
            "save_steps": 3,
            "logging_strategy": "no",
            "use_cpu": True,
        }
        recipe = {"learning_rate": 0.3, "weight_decay": 0.3, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        args = transformers.TrainingArguments(
            tmp_path / folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=8,
            optim="sgd",
            **quiet,
            **recipe,
        )
        InOrder(model, args, train_dataset=rows, callbacks=[adapter]).train(resume_from_checkpoint=resume)
        return model, adapter.evidence

    # Not Adam's, whose steps have any sign where gradients are rounding alone, as of the keys' biases.
    found, evidence = fit(4, "whole")
    expected = bert()
    batches = [(b["input_ids"], b["labels"]) for b in DataLoader(rows, 8)]
    oracle = plain_loop(
        Function(lambda m, x: m.bert(x).logits, bert=expected), batches, 4, kind=torch.optim.SGD, lr=0.3
    )
    assert_near(found, expected, 1e-4)
    assert evidence.margliks == pytest.approx(oracle.margliks, rel=1e-5) and len(evidence.margliks) == 2
    fit(2, "parts")
    again, resumed = fit(4, "parts", resume=True)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), found.parameters(), strict=True))
    assert torch.equal(resumed.prior_precision, evidence.prior_precision) and resumed.margliks == evidence.margliks
    (tmp_path / "parts/checkpoint-12/evidence.pt").unlink()
    with pytest.raises(FileNotFoundError, match="resumed from step 12, but"):
        fit(5, "parts", resume=True)

"""Weight decay learned in one training, in three loops people have, beside the best of eight by held-out images.

    python -m benchmarks.loops --out DIR [--networks NAME ...] [--loops NAME ...] [--images N] [--epochs N] [--seeds N]

Networks of torchvision on Fashion-MNIST, trained by AdamW at 1e-3 on a cosine, without augmentation:

resnet18   with BatchNorm, its first convolution of one channel; 28x28 images, batches of 128
vit        VisionTransformer of 4 layers, 64 channels, 4 heads, patches of 4x4

Ways:

grid                        eight values of AdamW's weight decay on four fifths of the images; the one whose NLL on the other fifth is the
                            lowest trains on all
plain, lightning, trainer   EvidenceCallback in a loop of one's own, Lightning's Trainer, Hugging Face's: all images, one training. AdamW's
                            own decay is off, the prior is in the gradient, and evidence steps follow epochs from a third of them on,
                            one sampled column of the curvature in each

The three loops see the same images in the same order. DIR has rows.csv, table.md and loops.png (NLL of every value of the grid, beside
learned ones) and is gone on with where it has results. NLL and accuracy are the softmax' on the 10,000 test images; seconds are the
processor's on one thread.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchvision.models import VisionTransformer, resnet18

from ella_cuda.data import load
from ella_cuda.files import write_file
from ella_cuda.training import EvidenceCallback

GRID = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LOOPS = ("plain", "lightning", "trainer")
BATCH, RATE = 128, 1e-3


class Order(Sampler[int]):
    """All images in an order that the seed and the pass give, in any loop."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.generator = count, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


class Vit(VisionTransformer):
    """torchvision's, of images of one channel."""

    def __init__(self) -> None:
        super().__init__(
            image_size=28, patch_size=4, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
        )
        self.conv_proj = nn.Conv2d(1, 64, 4, 4)


def network(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == "vit":
        return Vit()
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    return model


class Work:
    """A training: its network, images in batches, optimizer, and schedule by the step."""

    def __init__(self, name: str, seed: int, images: Tensor, labels: Tensor, epochs: int, decay: float) -> None:
        self.model, self.epochs, self.data = network(name, seed), epochs, TensorDataset(images, labels)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=decay)
        self.steps = epochs * (len(images) // BATCH)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.steps)
        self.of_evidence = DataLoader(self.data, 500)
        self.options = {"burn_in": epochs // 3, "every": 2, "fisher": "mc", "n_hypersteps": 20, "lr_hyp": 0.3}
        self.seed = seed

    def loader(self, collate: Any = None) -> DataLoader:
        return DataLoader(
            self.data, BATCH, sampler=Order(len(self.data), self.seed), drop_last=True, collate_fn=collate
        )

    def plain(self, with_evidence: bool = True) -> EvidenceCallback | None:
        evidence = EvidenceCallback(self.model, self.of_evidence, **self.options) if with_evidence else None
        if evidence is not None:
            evidence.attach(self.optimizer, self.schedule, weight_decay=False)
        loader = self.loader()
        for epoch in range(self.epochs):
            self.model.train()
            for x, y in loader:
                loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                (loss if evidence is None else evidence.penalised(loss)).backward()
                self.optimizer.step()
                self.schedule.step()
            if evidence is not None:
                evidence.step(epoch)
        return evidence

    def lightning(self) -> EvidenceCallback:
        import lightning.pytorch as pl

        from ella_cuda.training.lightning import EvidenceCallback as Callback

        work = self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = work.model

            def training_step(self, batch: Any) -> Tensor:
                return F.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return [work.optimizer], [{"scheduler": work.schedule, "interval": "step"}]

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        callback = Callback(self.of_evidence, network="net", **self.options)
        quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary", "logger"), False)
        trainer = pl.Trainer(max_epochs=self.epochs, accelerator="cpu", devices=1, callbacks=[callback], **quiet)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(num_workers|log_every_n_steps|litlogger)")
            trainer.fit(Module(), self.loader())
        return callback.evidence

    def trainer(self) -> EvidenceCallback:
        import transformers

        from ella_cuda.training.transformers import EvidenceCallback as Callback

        def collate(points: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            x, y = zip(*points, strict=True)
            return {"input_ids": torch.stack(x), "labels": torch.stack(y)}

        class Net(nn.Module):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net

            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
                logits = self.net(input_ids)
                return (
                    {"logits": logits}
                    if labels is None
                    else {"loss": F.cross_entropy(logits, labels), "logits": logits}
                )

        work = self

        class Trainer(transformers.Trainer):
            def get_train_dataloader(self) -> DataLoader:
                return work.loader(collate)

        callback = Callback(DataLoader(self.data, 500, collate_fn=collate), **self.options)
        with tempfile.TemporaryDirectory() as folder:
            settings = transformers.TrainingArguments(
                folder,
                num_train_epochs=self.epochs,
                per_device_train_batch_size=BATCH,
                max_grad_norm=0,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            )
            # The Trainer seeds the generators; the images' order has its own.
            Trainer(
                Net(self.model),
                settings,
                train_dataset=self.data,
                callbacks=[callback],
                optimizers=(self.optimizer, self.schedule),
            ).train()
        return callback.evidence


@torch.no_grad()
def measured(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    model.eval()
    logits = torch.cat([model(x) for x in images.split(500)])
    nll, right = F.cross_entropy(logits, labels), logits.argmax(1) == labels
    return {"nll": nll.item(), "accuracy": 100 * right.float().mean().item()}


class Table:
    """Rows by what they are of, kept in DIR/rows.json."""

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / "rows.json"
        self.rows: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []

    def of(self, make: Any, **key: Any) -> dict[str, Any]:
        """The row of this key, which ``make`` computes where it is not there yet."""
        for row in self.rows:
            if all(row[k] == v for k, v in key.items()):
                return row
        begin = time.process_time()
        row = {**key, **make()}
        row["seconds"] = time.process_time() - begin
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        write_file(self.file, json.dumps(self.rows, indent=1))
        return row


def run(table: Table, name: str, seed: int, data: Any, loops: list[str], images: int, epochs: int) -> None:
    order = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(seed))[:images]
    x, y = data.train_images[order], data.train_labels[order]
    part, test = images * 4 // 5, (data.test_images, data.test_labels)
    of = {"network": name, "seed": seed, "images": images, "epochs": epochs}

    def trained(decay: float, size: int) -> dict[str, float]:
        work = Work(name, seed, x[:size], y[:size], epochs, decay)
        work.plain(with_evidence=False)
        found = measured(work.model, *test)
        return found if size == images else {**found, "held_out_nll": measured(work.model, x[part:], y[part:])["nll"]}

    def learned(loop: str) -> dict[str, Any]:
        work = Work(name, seed, x, y, epochs, 0.0)
        evidence = getattr(work, loop)()
        logs = evidence.prior_precision.log()
        return {
            **measured(work.model, *test),
            "log_precisions": logs.tolist(),
            "evidence": evidence.margliks[-1] / images,
        }

    for loop in loops:
        table.of(lambda loop=loop: learned(loop), way=loop, decay=None, **of)
    grid = [table.of(lambda decay=decay: trained(decay, part), way="grid", decay=decay, **of) for decay in GRID]
    best = min(grid, key=lambda row: row["held_out_nll"])["decay"]
    table.of(lambda: trained(best, images), way="grid, best on all", decay=best, **of)


def save(table: Table) -> str:
    """Write table.md, rows.csv and loops.png; returns the table."""
    lines = [["network", "seed", "way", "trainings", "NLL", "accuracy, %", "CPU s", "precisions' distance"]]
    for of in dict.fromkeys((r["network"], r["seed"], r["images"], r["epochs"]) for r in table.rows):
        own = [r for r in table.rows if (r["network"], r["seed"], r["images"], r["epochs"]) == of]
        plain = next((r for r in own if r["way"] == "plain"), None)
        for r in own:
            if r["way"] == "grid":
                continue
            grid = [g for g in own if g["way"].startswith("grid")] if r["decay"] is not None else [r]
            off = "–"
            if plain is not None and r["decay"] is None:
                pairs = zip(r["log_precisions"], plain["log_precisions"], strict=True)
                off = f"{max(abs(a - b) for a, b in pairs):.1e}"
            way = f"{r['way']} (decay {r['decay']:g})" if r["decay"] is not None else r["way"]
            seconds = sum(g["seconds"] for g in grid)
            lines.append(
                [
                    of[0],
                    str(of[1]),
                    way,
                    str(len(grid)),
                    f"{r['nll']:.3f}",
                    f"{r['accuracy']:.1f}",
                    f"{seconds:.0f}",
                    off,
                ]
            )
    marked = [f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]]]
    text = "\n".join(marked) + "\n"
    write_file(table.out / "table.md", text)
    found = io.StringIO()
    names = [
        "network",
        "seed",
        "images",
        "epochs",
        "way",
        "decay",
        "held_out_nll",
        "nll",
        "accuracy",
        "evidence",
        "seconds",
    ]
    writer = csv.DictWriter(found, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    write_file(table.out / "rows.csv", found.getvalue())
    picture(table.rows, table.out / "loops.png")
    return text


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    networks = [*dict.fromkeys(r["network"] for r in rows)]
    figure, axes = plt.subplots(
        1, len(networks), figsize=(4.5 * len(networks), 3.2), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], networks, strict=True):
        own = [r for r in rows if r["network"] == name]
        for way, colour, label in (
            ("grid", "C0", "grid, 4/5 of the images"),
            ("grid, best on all", "C1", "best of the grid, on all"),
        ):
            points = sorted((r["decay"], r["nll"]) for r in own if r["way"] == way)
            axis.plot(
                *zip(*points, strict=True), "o" if way != "grid" else ".-", color=colour, label=label
            ) if points else None
        for k, r in enumerate(r for r in own if r["way"] == "plain"):
            axis.axhline(r["nll"], color="C2", lw=1.2, label="learned, one training on all" if not k else None)
        axis.set(xscale="log", xlabel="weight decay of AdamW", ylabel="test NLL, nats", title=name)
        axis.legend(fontsize=7)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the results")
    parser.add_argument("--networks", nargs="+", choices=("resnet18", "vit"), default=["resnet18", "vit"])
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=[*LOOPS], help="with evidence (all three)")
    parser.add_argument("--images", type=int, default=5000, metavar="N", help="to train on (5000)")
    parser.add_argument("--epochs", type=int, default=20, metavar="N", help="of each training (20)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of networks and images (1)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    data, table = load("fashion-mnist"), Table(args.out)
    for name in args.networks:
        for seed in range(args.seeds):
            run(table, name, seed, data, args.loops, args.images, args.epochs)
    print(save(table))


if __name__ == "__main__":
    main()

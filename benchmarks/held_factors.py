"""How good is the evidence's gradient in lengthscales and anchors when the factors are held? On networks small enough to know.

    python -m benchmarks.held_factors [--seeds N] [--out FILE]

Two relaxed layers S-FC+S-CONV (4 and 8 channels) and a linear head on 100 of scikit-learn's 8x8 digits, as initialised, after 100
epochs with evidence steps on the precisions, and so with lengthscales too. The gradient of ``-log q/N`` with the unprojected factors
held (``KronLaplace.log_marginal_likelihood``) is set beside the exact one (``exact_log_marginal_likelihood``), and that beside central
differences of the fitted evidence, in float64. A line for each kind of basis, state and hyperparameter:

signs       share of the gradient's entries whose sign is the exact one's; an entry below 1e-4 of the largest counts as agreeing
weighted    the same, each entry weighted by its exact size
cosine      between the two gradients
error       |held - exact| / |exact|, Euclidean
differences |exact - differences| / |differences| over eight entries of each gradient; for their sake the network has no kinks (GELU,
            mean pooling)
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader, load, normalize, subsample
from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from ella_cuda.nn import RelaxedEquivariance, SparseConv2d, SparseFactoredLinear2d
from ella_cuda.ops.basis import BASIS_KINDS
from ella_cuda.reports.text import columns

IMAGES, EPOCHS, STEP, CHECKED = 100, 100, 1e-4, 8
STATES = ("initial", "trained", "trained, lengthscales learned")
HEADINGS = ("signs", "weighted", "cosine", "error", "differences")


def network(kind: str) -> nn.Sequential:
    """8x8 images of one channel to ten logits."""
    first = {"s_fc": SparseFactoredLinear2d(1, 4, 8, 8, basis=kind), "s_conv": SparseConv2d(1, 4, basis=kind)}
    halved = nn.Sequential(SparseConv2d(4, 8, basis=kind), nn.AvgPool2d(2))
    second = {"s_fc": SparseFactoredLinear2d(4, 8, 8, 4, basis=kind), "s_conv": halved}
    relaxed = (RelaxedEquivariance(first), nn.GELU(), RelaxedEquivariance(second), nn.GELU())
    return nn.Sequential(*relaxed, nn.Flatten(), nn.Linear(128, 10))


def states(kind: str, x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[str, nn.Sequential, Tensor]]:
    """Networks of the three states, with their prior precisions."""
    for state in STATES:
        torch.manual_seed(seed)
        model = network(kind).double()
        precision = torch.tensor(0.1, dtype=torch.float64)
        if state != "initial":
            la, *_ = marglik_training(
                model,
                TensorLoader(x, y, 25, shuffle=True),
                n_epochs=EPOCHS,
                n_epochs_burnin=20,
                marglik_frequency=5,
                n_hypersteps=20,
                prior_prec_init=0.1,
                learn=["lengthscales"] if state == STATES[2] else [],
                optimizer_kwargs={"lr": 3e-3},
                progress_bar=False,
            )
            precision = la.prior_precision
        yield state, model, precision


def by_differences(la: KronLaplace, x: Tensor, y: Tensor, buffer: Tensor, entries: Tensor) -> Tensor:
    """Central differences of the fitted evidence in some entries of a buffer."""
    slopes = []
    flat = buffer.detach().view(-1)
    with torch.no_grad():
        for entry in entries:
            values = []
            for step in (STEP, -2 * STEP):
                flat[entry] += step
                values.append(la.fit([(x, y)]).log_marginal_likelihood())
            flat[entry] += STEP
            slopes.append((values[0] - values[1]) / (2 * STEP))
    return torch.stack(slopes)


def compare(model: nn.Sequential, precision: Tensor, x: Tensor, y: Tensor) -> Iterator[tuple[str, list[float]]]:
    """For each hyperparameter of the network, by what it is, the numbers of a line."""
    la = KronLaplace(model, prior_precision=precision)
    for what in ("inverse_lengthscale", "anchors"):
        found = [b.requires_grad_() for n, b in model.named_buffers() if n.endswith(what)]
        held = torch.autograd.grad(la.fit([(x, y)]).log_marginal_likelihood(), found)
        exact = torch.autograd.grad(exact_log_marginal_likelihood(la, x, y), found)
        for buffer in found:
            buffer.requires_grad_(False)
        pairs = []
        for buffer, gradient in zip(found, exact, strict=True):
            entries = torch.linspace(0, buffer.numel() - 1, min(CHECKED, buffer.numel())).long()
            pairs.append((gradient.flatten()[entries], by_differences(la, x, y, buffer, entries)))
        ours, differences = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in (held, exact))
        agree = ((a * b > 0) | (b.abs() < 1e-4 * b.abs().max())).double()
        yield (
            what,
            [
                float(agree.mean()),
                float((agree * b.abs()).sum() / b.abs().sum()),
                float(torch.cosine_similarity(a, b, 0)),
                float((a - b).norm() / b.norm()),
                float((ours - differences).norm() / differences.norm()),
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="networks of each kind and state (5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args()
    found: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    total = args.seeds * len(BASIS_KINDS) * len(STATES)
    with tqdm(total=total, unit="network") as bar:
        for seed in range(args.seeds):
            data = normalize(subsample(load("digits"), IMAGES, seed))
            x, y = data.train_images.double(), data.train_labels
            for kind in BASIS_KINDS:
                for state, model, precision in states(kind, x, y, seed):
                    for what, numbers in compare(model, precision, x, y):
                        found[kind, state, what].append(numbers)
                    bar.update()
    lines = [["basis", "state", "hyperparameter", *HEADINGS]]
    for key, rows in found.items():
        means = torch.tensor(rows).mean(0).tolist()
        lines.append(
            [*key, *(f"{100 * m:.0f} %" for m in means[:2]), f"{means[2]:.2f}", f"{means[3]:.2f}", f"{means[4]:.1e}"]
        )
    text = f"means over {args.seeds} networks, {IMAGES} images\n" + columns(lines, left=3) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""What a fit and its evidence are said to take of memory, beside what a process took."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from ella_cuda.laplace import KronLaplace, memory
from ella_cuda.laplace.rules import rules_for

PROCESS = """
import sys, torch
from pathlib import Path
from torch import nn
from ella_cuda.laplace import KronLaplace, memory
torch.manual_seed(0)
model, shape, classes = {{
    "classes": lambda: (nn.Linear(16, 1000), (16,), 1000),
    "wide": lambda: (nn.Sequential(nn.Linear(2500, 2500), nn.ReLU(), nn.Linear(2500, 10)), (2500,), 10),
    "images": lambda: (nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                       nn.Flatten(), nn.Linear(256, 10)), (3, 32, 32), 10),
}}[{name!r}]()
def status(key):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
x, y = torch.randn(64, *shape), torch.randint(classes, (64,))
KronLaplace(nn.Linear(16, 3)).fit([(torch.randn(4, 16), torch.tensor([0, 1, 2, 0]))]).log_marginal_likelihood()  # what is loaded once
la = KronLaplace(model)
said = la.memory_estimate(x)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
la.fit([(x, y)]).log_marginal_likelihood()
print(said, status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["classes", "wide", "images"])
def test_the_estimate_is_about_what_a_process_takes(name, beside_the_tests):
    """The three sides of it: columns of many classes, eigenvalues of large blocks, activations."""
    command = [sys.executable, "-c", PROCESS.format(name=name)]
    done = subprocess.run(command, cwd=beside_the_tests, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said, taken = map(int, done.stdout.split())
    assert 0.5 < said / taken < 2, (said, taken)


def network():
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)).double()


def test_its_parts():
    model = network()
    la = KronLaplace(model, memory_budget=1 << 22).fit([(torch.randn(3, 2, 4, 4).double(), torch.randint(3, (3,)))])
    moments = {m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None}
    factors = sum(m.total.numel() * 8 for m in moments)
    rules = rules_for(model, "shared")
    assert factors == sum(rule.bytes() for rule in rules)
    assert sorted(b for rule in rules for b in rule.blocks()) == sorted(
        (m.total.shape[0], m.total.shape[1]) for m in moments
    )
    assert la.memory_estimate() == factors + memory.ROUND * (1 << 22)


@pytest.mark.parametrize("images", [1, 7])
def test_a_batch_adds_what_its_graph_keeps_and_its_columns(images):
    """Kept are a ReLU's results alone: nothing of layers, nor of what is flattened. A column has the larger layer's gradients twice."""
    model = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(50, 3))
    la = KronLaplace(model, memory_budget=1 << 30)
    before = [p.requires_grad for p in model.parameters()], model.training
    x = torch.randn(images, 3)
    kept, gradients = images * 50 * 4, 3 * images * 2 * (3 + 50) * 4
    factors = sum(rule.bytes() for rule in rules_for(model, "shared"))
    assert la.memory_estimate(x) == factors + max(memory.ROUND * gradients + kept, 3 * factors)
    assert ([p.requires_grad for p in model.parameters()], model.training) == before
    assert la.n_data == 0


@pytest.mark.parametrize("rows", [500, 3000])
def test_eigenvalues_of_large_blocks_are_what_takes_most(rows):
    """What is decomposed at once, thrice: the largest block, or as many of them as threads have."""
    la = KronLaplace(nn.Linear(rows, 2), memory_budget=1)
    block = 8 * rows**2
    assert la.memory_estimate(torch.randn(1, rows)) == pytest.approx(block + 3 * block, rel=1e-2)


def test_it_knows_where_the_batch_is():
    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(torch.relu(self.embed(x.transpose(0, 1))).mean(0))

    assert KronLaplace(SequenceFirst()).memory_estimate(torch.randn(4, 9, 6)) > 0

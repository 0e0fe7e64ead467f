"""The numbers that all rows of a data set's table share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The numbers every row of a data set's table shares, whatever its layer and objective."""

    tasks: tuple[str, ...]  # what `train` runs when no task is named
    width: int = 4
    init: str = "equivariant"
    epochs: int = 100
    batch_size: int = 128
    lr: float = 3e-3  # of Adam
    fan_in_limit: int | None = None  # weights with more inputs learn at lower rates, see `adam_for`
    fc_fan_in_limit: int | None = None  # that of a network with no path but FC; None: the same
    # Share of the steps, or of each cycle's, the last, in which lr falls linearly; None is a cosine over all steps.
    cooldown: float | None = None
    restarts: str = "none"  # "evidence": lr falls before every evidence step but the first, and at the end
    prior_prec_init: float = 0.03  # δ at the start of evidence training
    map_prior_prec: float = 0.03  # δ of MAP training
    lr_hyp: float = 0.1
    burn_in: int = 10  # epochs before the first evidence step
    frequency: int = 5  # epochs between evidence steps
    hypersteps: int = 20
    fisher: str = "exact"
    column_tolerance: float = 0.0
    prior_structure: str = "layerwise"
    augment: str = "none"  # for the weights only; tasks whose labels say where things are go without


CIFAR = Recipe(
    tasks=("plain",),
    width=10,
    init="published",
    lr=0.01,
    prior_prec_init=1.0,
    map_prior_prec=1.0,
    augment="flips-shifts",
)

# One recipe for all rows of a table, to be chosen on held-out training data (`--holdout`);
# benchmarks/results/README.md says how the digits one was.
RECIPES: dict[str, Recipe] = {
    "digits": Recipe(
        tasks=("digit", "quadrant"),
        width=4,
        epochs=60,
        batch_size=64,
        lr=5e-3,
        fan_in_limit=256,
        fc_fan_in_limit=64,
        cooldown=0.3,
        lr_hyp=0.3,
        restarts="evidence",
        frequency=20,
        hypersteps=40,
        column_tolerance=0.05,
    ),
    "mnist": Recipe(tasks=("digit", "quadrant"), epochs=20, burn_in=2, frequency=2),
    "fashion-mnist": Recipe(tasks=("plain", "quadrant"), epochs=20, burn_in=2, frequency=2),
    "cifar10": CIFAR,
    "cifar100": CIFAR,
}

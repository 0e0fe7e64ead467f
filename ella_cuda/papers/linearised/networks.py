"""The talk's first table in small: five architectures, test NLL of the predictive by mean and number of precisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ella_cuda.data import Dataset, TensorLoader
from ella_cuda.experiments.run import prepare
from ella_cuda.laplace import KronLaplace
from ella_cuda.metrics import accuracy, expected_calibration_error, nll
from ella_cuda.papers.linearised.architectures import NETWORKS, network
from ella_cuda.papers.linearised.pictures import draw_networks
from ella_cuda.papers.linearised.precisions import chosen, grouped_structure
from ella_cuda.papers.studies import Part, Study, Work, share
from ella_cuda.papers.studies.text import seeds_said, table, with_error
from ella_cuda.reports.text import EVIDENCE_AT
from ella_cuda.run_folder import CHECKPOINT_FILE
from ella_cuda.training import marglik_training

PARAMETERS = 46_000
SIZES = {  # images: of training, of the test, along a side; epochs
    "digits": {"train_size": 1437, "test_size": 360, "image_size": 8, "epochs": 30},
    "fashion-mnist": {"train_size": 4000, "test_size": 2000, "image_size": 16, "epochs": 15},
}
OTHER_SIZES = {"train_size": 4000, "test_size": 2000, "image_size": 16, "epochs": 15}
ROUNDS, TOLERANCE = 15, 0.02  # of precisions at the linear mode; the authors take 10 rounds
BATCH, EVIDENCE_BATCH = 100, 250
RATE = 2e-3
HARDLY = 1e-6  # the prior's precision of the training, which is stopped early
TITLES = {"t-former": "T-Former", "cnn": "CNN", "resnet": "ResNet", "pre-resnet": "Pre-ResNet", "fixup": "FixUp"}
# Mean and error of the talk's first table, MNIST, full curvature, by where the evidence is and how many precisions there are.
TALK = {
    "t-former": {
        ("linear", "single"): (0.162, 0.042),
        ("linear", "several"): (0.162, 0.042),
        ("network", "single"): (0.310, 0.060),
        ("network", "several"): (0.162, 0.042),
    },
    "cnn": {
        ("linear", "single"): (0.025, 0.000),
        ("linear", "several"): (0.025, 0.000),
        ("network", "single"): (0.253, 0.001),
        ("network", "several"): (0.205, 0.002),
    },
    "resnet": {
        ("linear", "single"): (0.017, 0.000),
        ("linear", "several"): (0.016, 0.001),
        ("network", "single"): (0.252, 0.006),
        ("network", "several"): (0.236, 0.005),
    },
    "pre-resnet": {
        ("linear", "single"): (0.017, 0.000),
        ("linear", "several"): (0.016, 0.000),
        ("network", "single"): (0.220, 0.004),
        ("network", "several"): (0.239, 0.004),
    },
    "fixup": {
        ("linear", "single"): (0.055, 0.006),
        ("linear", "several"): (0.061, 0.005),
        ("network", "single"): (0.153, 0.021),
        ("network", "several"): (0.200, 0.018),
    },
}
WAYS = tuple(TALK["cnn"])


def plan(seeds: Sequence[int], scale: float, data: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A study for each data set, seed and architecture."""
    made = {}
    for name in data:
        sizes = SIZES.get(name, OTHER_SIZES)
        settings = {
            "data": name,
            "image_size": sizes["image_size"],
            "train_size": share(scale, sizes["train_size"], 50),
            "test_size": share(scale, sizes["test_size"], 50),
            "epochs": sizes["epochs"],
            "batch_size": share(scale, BATCH, 16),  # as many steps at every scale
            "parameters": share(scale, PARAMETERS, 400),
        }
        for seed in seeds:
            for one in NETWORKS:
                made[f"networks-{name}-{one}-seed{seed}"] = {**settings, "network": one, "seed": seed}
    return made


def run(study: Study, work: Work) -> dict[str, Any]:
    """Train, and choose precisions in four ways."""
    s = study.settings
    dataset = prepare(
        s["data"],
        "plain",
        s["image_size"],
        train_size=s["train_size"],
        test_size=s["test_size"],
        data_dir=work.data_dir,
        download=work.download,
    ).to(work.device)
    torch.manual_seed(s["seed"])
    model = network(s["network"], s["parameters"], s["image_size"], dataset.channels, dataset.num_classes)
    model = model.to(work.device)
    data = dataset.train_images, dataset.train_labels
    marglik_training(
        model,
        TensorLoader(*data, s["batch_size"], shuffle=True, data_digest=dataset.digest),
        "classification",
        optimizer_kwargs={"lr": RATE},
        n_epochs=s["epochs"],
        prior_prec_init=HARDLY,
        objective="map",
        progress_bar=work.progress,
        checkpoint=work.folder / CHECKPOINT_FILE,
        depends_on=dict(s),
        description=work.folder.name,
    )
    model.eval()
    loader = TensorLoader(*data, EVIDENCE_BATCH, data_digest=dataset.digest)
    fitted = KronLaplace(model, "classification").fit(loader)

    def choose(at: str, structure: str) -> dict[str, Any]:
        one = chosen(fitted, loader, at, structure, work.progress, ROUNDS, TOLERANCE)
        return one.described() | measured(torch.cat([one.la(x) for x in _test(dataset)]), dataset)

    with torch.no_grad():
        softmax = torch.cat([model(x).softmax(1) for x in _test(dataset)])
    return {
        "parameters": fitted.n_params,
        "softmax": measured(softmax, dataset),
        "chosen": [
            work.kept(f"{at}-{structure}", lambda at=at, structure=structure: choose(at, structure))
            for structure in ("scalar", grouped_structure(model))
            for at in EVIDENCE_AT
        ],
    }


def _test(dataset: Dataset) -> Sequence[torch.Tensor]:
    return dataset.test_images.split(EVIDENCE_BATCH)


def measured(probabilities: torch.Tensor, dataset: Dataset) -> dict[str, float]:
    """Of the test images' classes."""
    found = {"nll": nll, "accuracy": accuracy, "ece": expected_calibration_error}
    return {key: float(function(probabilities, dataset.test_labels)) for key, function in found.items()}


def rows(study: Study, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    s = study.settings
    made = []
    for one in result["chosen"]:
        number = "single" if one["structure"] == "scalar" else "several"
        printed, error = TALK[s["network"]][one["at"], number]
        made.append(
            {
                **{key: s[key] for key in ("data", "network", "seed", "train_size", "test_size", "epochs")},
                "parameters": result["parameters"],
                "at": one["at"],
                "number": number,
                "structure": one["structure"],
                "rest": one["rest"],
                **{key: one[key] for key in ("nll", "accuracy", "ece")},
                "nll_softmax": result["softmax"]["nll"],
                "neg_log_marginal_likelihood": one["neg_log_marginal_likelihood"],
                "effective_parameters": one["effective_parameters"],
                "talk_nll": printed,
                "talk_error": error,
            }
        )
    return made


def text(rows: Sequence[dict[str, Any]]) -> str:
    """For people: a table for each data set, and whether the order is the talk's."""
    blocks = []
    for data in dict.fromkeys(r["data"] for r in rows):
        some = [r for r in rows if r["data"] == data]
        names = [name for name in NETWORKS if any(r["network"] == name for r in some)]
        lines = []
        for at, number in WAYS:
            cells = []
            for name in names:
                cells.append(with_error(_values(some, name, at, number)))
                printed, error = TALK[name][at, number]
                cells.append(f"{printed:.3f} ± {error:.3f}")
            lines.append([EVIDENCE_AT[at], number, *cells])
        lines.append(["softmax", "", *(x for name in names for x in (with_error(_softmax(some, name)), "-"))])
        head = ["evidence at", "precisions", *(x for name in names for x in (TITLES[name], "talk"))]
        blocks.append(table(_title(some), head, lines, [_order(some, name) for name in names], left=2))
    notes = [
        "Test NLL in nats of the probit predictive, whose mean is the network's output. The talk's: MNIST, about 46,000 parameters, full "
        "curvature, which takes 17 GB; ours has Kronecker factors.",
        "Several precisions: one of every layer that a normalisation follows and one of all others; of a network without such a layer, one "
        "of every tensor.",
    ]
    if restless := sum(not r["rest"] for r in rows):
        notes.append(f"{restless} of {len(rows)} choices do not rest within {ROUNDS} rounds.")
    return "\n\n".join([PART.title, *blocks, "\n".join(notes)])


def _values(rows: Sequence[dict[str, Any]], name: str, at: str, number: str) -> list[float]:
    return [r["nll"] for r in rows if (r["network"], r["at"], r["number"]) == (name, at, number)]


def _softmax(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return list({r["seed"]: r["nll_softmax"] for r in rows if r["network"] == name}.values())


def _title(rows: Sequence[dict[str, Any]]) -> str:
    one, seeds = rows[0], sorted({r["seed"] for r in rows})
    counts = sorted({r["parameters"] for r in rows})
    parameters = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    return f"{one['data']}: {one['train_size']:,} images, {one['epochs']} epochs, {parameters} parameters; {seeds_said(seeds)}"


def _order(rows: Sequence[dict[str, Any]], name: str) -> str:
    """The four ways from the lowest NLL to the highest, ours and the talk's."""
    means = {way: sum(found) / len(found) for way in WAYS if (found := _values(rows, name, *way))}
    talks = {way: TALK[name][way][0] for way in means}
    kept = [
        f"{number}: {'yes' if means['linear', number] <= means['network', number] else 'no'}"
        for number in ("single", "several")
    ]
    return f"{TITLES[name]}: ours {_ordered(means)}; talk {_ordered(talks)}. Linear mode no worse: {', '.join(kept)}."


def _ordered(means: dict[tuple[str, str], float]) -> str:
    """Ways in order, with ``=`` between those that are equal as printed."""
    words = ""
    before: float | None = None
    for (at, number), value in sorted(means.items(), key=lambda item: round(item[1], 3)):
        if before is not None:
            words += " = " if round(value, 3) == before else " < "
        words, before = words + f"{at} {number}", round(value, 3)
    return words


def draw(found: Sequence[tuple[Study, dict[str, Any]]]) -> Any:
    """All data sets."""
    made = [{**row, "network": TITLES[row["network"]]} for study, result in found for row in rows(study, result)]
    return draw_networks(made, f"{PART.title}; the talk's: MNIST")


PART = Part(
    "networks",
    "Networks: test NLL by where the evidence is and how many precisions it has",
    plan,
    run,
    rows,
    text,
    draw,
    data=("digits", "fashion-mnist"),
)

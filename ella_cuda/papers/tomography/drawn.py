"""The pictures of a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ella_cuda.papers.studies import Study
from ella_cuda.papers.tomography.pictures import draw_densities, draw_errors, draw_reconstructions
from ella_cuda.papers.tomography.quality import BINS
from ella_cuda.papers.tomography.reconstruction import WAYS, rows

Found = Sequence[tuple[Study, dict[str, Any]]]
SHOWN = ("network", "linear", "simple", "dropout")  # whose deviations are images
IMAGES = {"truth": "truth", "fbp": "filtered\nback-projection", "reconstruction": "deep image\nprior"}


def drawn_images(found: Found) -> Any:
    """A line for each noise and number of angles, of the first kind of image's first seed."""
    data = found[0][0].settings.get("data")
    some = [(s.settings, result) for s, result in found if s.settings.get("data") == data]
    seed = min(s["seed"] for s, _ in some)
    lines = {}
    for s, result in sorted(some, key=lambda one: (one[0]["noise"], one[0]["angles"])):
        if s["seed"] != seed:
            continue
        error = np.abs(np.array(result["truth"]) - np.array(result["reconstruction"]))
        deviations = {WAYS[way]: result["ways"][way]["deviation"] for way in SHOWN if way in result["ways"]}
        images = {IMAGES[key]: result[key] for key in IMAGES}
        lines[f"{s['angles']} angles,\n{s['noise']:.0%} noise"] = (images, {"|error|": error.tolist(), **deviations})
    return draw_reconstructions(lines, f"{data or 'Shepp-Logan phantom'}, seed {seed}")


def drawn_densities(found: Found) -> Any:
    """Log density over the number of angles."""
    return draw_densities([row for study, result in found for row in rows(study, result)], WAYS)


def drawn_errors(found: Found) -> Any:
    """Absolute errors of all studies beside those that each way expects."""
    shares: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        some = [result["ways"][way]["errors"] for _, result in found if way in result["ways"]]
        if some:
            shares[WAYS[way]] = {key: np.mean([one[key] for one in some], 0).tolist() for key in ("found", "expected")}
    return draw_errors(shares, BINS)

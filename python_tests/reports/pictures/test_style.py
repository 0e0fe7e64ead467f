"""Colours that everybody can tell apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from ella_cuda.reports.pictures.style import OTHER_STYLES, PATH_STYLES, path_styles

# On linear RGB, complete dichromacy. Source: Machado, Oliveira, Fernandes, IEEE TVCG 15(6), 2009.
VISIONS = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(colour: str, vision) -> np.ndarray:
    """CIE L*a*b* under D65, as somebody sees an sRGB colour."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(vision) @ linear, 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = np.cbrt(np.maximum(np.array(to_xyz) @ seen / [0.95047, 1, 1.08883], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_are_apart_for_every_vision(vision):
    colours = [style[0] for style in (*PATH_STYLES.values(), *OTHER_STYLES[:3])]
    seen = [lab(colour, VISIONS[vision]) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20  # 2.3 is just noticeable


def test_the_papers_paths_are_apart_in_grey():
    greys = sorted(lab(PATH_STYLES[path][0], VISIONS["usual"])[0] for path in ("f_fc", "conv", "gconv"))
    assert np.diff(greys).min() > 12


def test_paths_that_are_not_the_packages_have_styles_of_their_own():
    styles = path_styles(["conv", "mine", "yours", "theirs"])
    assert styles["conv"] == PATH_STYLES["conv"]
    assert len(set(styles.values())) == 4

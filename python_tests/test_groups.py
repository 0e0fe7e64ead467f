"""Groups: tables against the images they move, actions against torch's own turns, flips and rolls."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.groups import GROUPS, Group, as_group, cyclic, cyclic_shifts

ALL = [GROUPS["p4"], GROUPS["p4m"], cyclic_shifts(4)]
NAMES = [g.name for g in ALL]


def moved(group: Group, x: Tensor, element: int) -> Tensor:
    """By torch's own functions."""
    if group.name.startswith("shifts"):
        return x.roll(element * x.shape[-1] // group.order, -1)
    return torch.rot90(x.flip(-1) if element >= 4 else x, element % 4, (-2, -1))


@pytest.mark.parametrize("group", ALL, ids=NAMES)
def test_elements_move_images_as_named_and_products_as_the_table_says(group):
    x = torch.randn(2, 3, 8, 8)
    images = [group.act(x, g) for g in range(group.order)]
    for g, image in enumerate(images):
        assert torch.equal(image, moved(group, x, g))
        assert torch.equal(group.act(image, group.inverse[g]), x)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(images, 2))
    for g, h in itertools.product(range(group.order), repeat=2):
        assert torch.equal(moved(group, moved(group, x, h), g), images[group.cayley[g][h]])
    assert torch.equal(images[group.identity], x)


def test_p4m_does_not_commute():
    cayley = GROUPS["p4m"].cayley
    assert any(cayley[g][h] != cayley[h][g] for g, h in itertools.product(range(8), repeat=2))


@pytest.mark.parametrize("group", ALL, ids=NAMES)
def test_relative_elements(group):
    for g, h in itertools.product(range(group.order), repeat=2):
        assert group.cayley[group.relative(g, h)][g] == h


@pytest.mark.parametrize("group", ALL, ids=NAMES)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_turned_kernel_sees_a_moved_image_as_the_kernel_sees_the_image(group, size):
    def correlate(kernel: Tensor, x: Tensor) -> Tensor:
        half = kernel.shape[0] // 2
        return F.conv2d(F.pad(x[None, None], (half,) * 4, mode="circular"), kernel[None, None])[0, 0]

    kernel, x = torch.randn(size, size, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    for g in range(group.order):
        turned = group.turn_kernel(kernel, g)
        torch.testing.assert_close(correlate(kernel, moved(group, x, g)), moved(group, correlate(turned, x), g))


P4 = GROUPS["p4"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Group("no", [[0, 1, 2], [1, 1, 0], [2, 0, 1]], P4.action), ValueError, r"each of 0\.\.2 once"),
        # Associative, rows are permutations, no group.
        (lambda: Group("no", [[0, 1], [0, 1]], P4.action), ValueError, r"each of 0\.\.1 once"),
        (lambda: Group("no", [], P4.action), ValueError, "square table"),
        (lambda: Group("no", None, P4.action), TypeError, "cayley must be a table of integers"),
        (lambda: Group("no", [[0.7, 1.2], [1.9, 0]], P4.action), TypeError, "cayley must be a table of integers"),
        (lambda: Group("no", [0, 1], P4.action), TypeError, "cayley must be a table of integers"),
        (lambda: Group("no", cyclic(2), "flip"), TypeError, "action must be a function"),
        (lambda: P4.act(torch.zeros(4, 4), 4), ValueError, r"element must be in 0\.\.3, the elements of p4"),
        (lambda: P4.act(torch.zeros(4, 4), -1), ValueError, r"element must be in 0\.\.3, the elements of p4"),
        (lambda: P4.act(torch.zeros(4), 0), ValueError, r"images \(\.\.\., H, W\), got shape \(4,\)"),
        (lambda: Group("no", [[(g - h) % 3 for h in range(3)] for g in range(3)], P4.action), ValueError, "not associative"),
        (lambda: Group("no", cyclic(8), GROUPS["p4m"].action).act(torch.zeros(4, 4), 0), ValueError, "not that of"),
        (lambda: Group("no", cyclic(1), lambda x, g: x.clamp(max=3)).act(torch.zeros(4, 4), 0), ValueError, "each to one place"),
        (lambda: Group("no", cyclic(1), lambda x, g: x[1:]).act(torch.zeros(4, 4), 0), ValueError, "each to one place"),
        (lambda: P4.act(torch.zeros(1, 4, 6), 1), ValueError, "square images, got 4x6"),
        (lambda: cyclic_shifts(4).act(torch.zeros(1, 6, 6), 1), ValueError, "divisible by 4, got 6"),
        (lambda: P4.require_kernel((3, 1)), ValueError, "3x1 kernel onto itself"),
        (lambda: cyclic_shifts(True), ValueError, "parts must be a positive integer"),
        (lambda: as_group("p6"), ValueError, "group must be one of p4, p4m"),
        (lambda: as_group(4), TypeError, "got int"),
    ],
)  # fmt: skip
def test_wrong_tables_and_actions_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def swap_pairs(x: Tensor, element: int) -> Tensor:
    """Every other column with the one beside it: an involution, but no symmetry of the periodic grid."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if element else x


def test_an_action_that_tears_neighbours_apart_cannot_turn_kernels():
    torn = Group("torn", cyclic(2), swap_pairs)
    torn.check(4, 4)
    with pytest.raises(ValueError, match="no symmetry of the periodic grid"):
        torn.turn_kernel(torch.zeros(3, 3), 1)


def test_groups_compare_by_what_they_are_and_survive_pickling():
    p4 = GROUPS["p4"]
    p4.check(4, 4)
    copy = pickle.loads(pickle.dumps(p4))
    assert copy == p4 and hash(copy) == hash(p4) and copy != GROUPS["p4m"] and p4 != "p4"
    x = torch.randn(4, 4)
    assert torch.equal(copy.act(x, 1), p4.act(x, 1))
    assert as_group("p4") is p4 and as_group(copy) is copy

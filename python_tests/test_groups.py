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


def test_wrong_tables_and_actions_are_refused():
    p4 = GROUPS["p4"]
    with pytest.raises(ValueError, match=r"each of 0\.\.2 once"):
        Group("no", [[0, 1, 2], [1, 1, 0], [2, 0, 1]], p4.action)
    with pytest.raises(ValueError, match=r"each of 0\.\.1 once"):  # associative, rows are permutations, no group
        Group("no", [[0, 1], [0, 1]], p4.action)
    with pytest.raises(ValueError, match="square table"):
        Group("no", [], p4.action)
    for table in (None, [[0.7, 1.2], [1.9, 0]], [0, 1]):
        with pytest.raises(TypeError, match="cayley must be a table of integers"):
            Group("no", table, p4.action)
    with pytest.raises(TypeError, match="action must be a function"):
        Group("no", cyclic(2), "flip")
    for element in (4, -1):
        with pytest.raises(ValueError, match=r"element must be in 0\.\.3, the elements of p4"):
            p4.act(torch.zeros(4, 4), element)
    with pytest.raises(ValueError, match=r"images \(\.\.\., H, W\), got shape \(4,\)"):
        p4.act(torch.zeros(4), 0)
    with pytest.raises(ValueError, match="not associative"):
        Group("no", [[(g - h) % 3 for h in range(3)] for g in range(3)], p4.action)
    with pytest.raises(ValueError, match="not that of"):
        Group("no", cyclic(8), GROUPS["p4m"].action).act(torch.zeros(4, 4), 0)
    with pytest.raises(ValueError, match="each to one place"):
        Group("no", cyclic(1), lambda x, g: x.clamp(max=3)).act(torch.zeros(4, 4), 0)
    with pytest.raises(ValueError, match="each to one place"):
        Group("no", cyclic(1), lambda x, g: x[1:]).act(torch.zeros(4, 4), 0)
    with pytest.raises(ValueError, match="square images, got 4x6"):
        p4.act(torch.zeros(1, 4, 6), 1)
    with pytest.raises(ValueError, match="divisible by 4, got 6"):
        cyclic_shifts(4).act(torch.zeros(1, 6, 6), 1)
    with pytest.raises(ValueError, match="3x1 kernel onto itself"):
        p4.require_kernel((3, 1))
    with pytest.raises(ValueError, match="parts must be a positive integer"):
        cyclic_shifts(True)
    with pytest.raises(ValueError, match="group must be one of p4, p4m"):
        as_group("p6")
    with pytest.raises(TypeError, match="got int"):
        as_group(4)


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

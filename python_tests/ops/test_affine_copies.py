"""Copies of images under affine maps against sums over single pixels, torch's affine_grid and grid_sample, and finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda import ops
from ella_cuda.ops.affine_copies import _copies, _gradients, _second_tangent, _second_tangent_in_x, affine_adjoint
from python_tests.ops import checks

IMAGE = ("1 1 4 4",)
OPERANDS = {
    "affine_copies": checks.Operands([("N C H W",), ("N S 2 3",)], (None,)),
    "affine_copies_backward": checks.Operands([("N S C H W",), ("N C H W",), ("N S 2 3",)], (None, True, True)),
}
REFUSALS = [
    ("affine_copies", [("2 1 3 3",), ("3 4 2 3",)], (None,), "M = N = 2 or M = 1, got (3, 4, 2, 3)"),
    ("affine_copies", [("1 0 65536 32768",), ("1 1 2 3",)], (None,), "fewer than 2^31 pixels in a plane with a border"),
    ("affine_copies", [IMAGE, ("1 3 2 3",), ("1 2 2 3",)], (), "(M, S, 2, 3) = (1, 3, 2, 3), got (1, 2, 2, 3)"),
]
VECTORISED = ["test_sums_over_single_pixels", "test_the_accuracy_of_grid_sample"]

pytestmark = pytest.mark.filterwarnings("ignore:.*unit-size grids")

# N, S, C, H, W and whether all images share maps: odd sides, sides of one pixel, whole vectors of places and not, several blocks of
# rows, one image whose channels are several tasks', more images than tasks are wanted.
SHAPES = [
    (3, 4, 2, 5, 6, False), (3, 4, 2, 7, 6, True), (2, 3, 1, 1, 5, False), (2, 3, 1, 4, 1, True),
    (1, 2, 1, 1, 1, False), (1, 5, 7, 3, 3, True), (40, 2, 2, 3, 4, True), (2, 3, 3, 4, 40, False),
    (1, 2, 2, 40, 33, False),
]  # fmt: skip


def arguments(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """grad, x, maps and a direction. Of the maps some look far outside, at one point alone, or mirror the image."""
    n, s, c, h, w, shared = shape
    m = 1 if shared else n
    maps = torch.eye(2, 3).double() + 0.4 * torch.randn(m, s, 2, 3).double()
    if s > 2:
        maps[0, 0] = torch.tensor([[0.9, 0, 3.0], [0, 1.1, 0]])
        maps[0, 1] = torch.tensor([[0, 0, 0.123], [0, 0, -0.234]])
        maps[-1, 2] = torch.tensor([[-0.77, 0, 0.01], [0.05, 0.93, 0]])
    made = torch.randn(n, s, c, h, w).double(), torch.randn(n, c, h, w).double(), maps, torch.randn(m, s, 2, 3).double()
    return tuple(t.to(device, dtype) for t in made)


def pixel_by_pixel(
    grad: Tensor, x: Tensor, maps: Tensor, direction: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies, or their derivative along a direction, and the gradients in x and maps, in float64: sums of hat functions around each
    pixel's coordinates, whose slopes at a whole number are those to its right."""
    grad, x, maps = (t.detach().double().cpu() for t in (grad, x, maps))
    (n_images, s_copies, _, height, width), y = grad.shape, torch.zeros_like(grad)
    moves = None if direction is None else direction.detach().double().cpu()
    by_x, by_maps = torch.zeros_like(x), torch.zeros_like(maps)
    for n, s, i, j in itertools.product(*map(range, (n_images, s_copies, height, width))):
        m = n if len(maps) == n_images else 0
        middle = [(width - 1) / 2, (height - 1) / 2]
        across, down = ((2 * k / (size - 1) - 1) if size > 1 else 0.0 for k, size in ((j, width), (i, height)))
        point = torch.tensor([across, down, 1.0], dtype=torch.float64)
        u, v = (((maps[m, s, k] @ point).item() + 1) * middle[k] for k in (0, 1))
        left, up = math.floor(u), math.floor(v)
        a, b = u - left, v - up
        f = g = None
        if moves is not None:
            f, g = ((moves[m, s, k] @ point).item() * middle[k] for k in (0, 1))
        for down, right in itertools.product((0, 1), (0, 1)):
            row, column = up + down, left + right
            if not (0 <= row < height and 0 <= column < width):
                continue
            hat_u, hat_v = (a if right else 1 - a), (b if down else 1 - b)
            slope_u, slope_v = (1 if right else -1), (1 if down else -1)
            weight, in_u, in_v = hat_u * hat_v, slope_u * hat_v, hat_u * slope_v
            if moves is not None:
                weight = f * slope_u * hat_v + g * hat_u * slope_v
                in_u, in_v = g * slope_u * slope_v, f * slope_u * slope_v
            pixel, incoming = x[n, :, row, column], grad[n, s, :, i, j]
            y[n, s, :, i, j] += weight * pixel
            by_x[n, :, row, column] += weight * incoming
            by_maps[m, s, 0] += (incoming @ pixel) * in_u * middle[0] * point
            by_maps[m, s, 1] += (incoming @ pixel) * in_v * middle[1] * point
    return y, by_x, by_maps


def by_torch(x: Tensor, maps: Tensor) -> Tensor:
    """As a user would write it."""
    (n, c, h, w), s = x.shape, maps.shape[1]
    grid = F.affine_grid(maps.expand(n, s, 2, 3).reshape(n * s, 2, 3), (n * s, c, h, w), align_corners=True)
    return F.grid_sample(x.repeat_interleave(s, 0), grid, align_corners=True).view(n, s, c, h, w)


def away_from_kinks(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Arguments none of whose coordinates is near a whole number."""
    while True:
        grad, x, maps, direction = arguments(shape, torch.device("cpu"))
        maps = torch.eye(2, 3).double() + 0.4 * torch.randn_like(maps)
        grid = F.affine_grid(maps.flatten(0, 1), (maps.shape[0] * maps.shape[1], 1, *x.shape[2:]), align_corners=True)
        pixels = (grid + 1) * (torch.tensor(x.shape[:1:-1]) - 1) / 2
        if (pixels - pixels.round()).abs().min() > 1e-3:
            return tuple(t.to(device) for t in (grad, x, maps, direction))


DIFFERENTIABLE = {
    f"affine_copies {'shared' if shared else 'own'}": checks.Case(
        ops.affine_copies,
        ops.affine_copies_torch,
        ops.affine_copies_torch,
        lambda shape, device, dtype: (away_from_kinks if shape[0] else arguments)(shape, device)[1:3],
        small=[(2, 2, 1, 3, 3, shared), (2, 2, 2, 3, 4, shared)],
        empty=[(0, 2, 3, 4, 5, shared)],
    )
    for shared in (False, True)
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("moving", [False, True])
def test_sums_over_single_pixels(shape, moving, device):
    grad, x, maps, direction = arguments(shape, device)
    direction = direction if moving else None
    y, by_x, by_maps = pixel_by_pixel(grad, x, maps, direction)
    ours = _copies(x, maps, direction)
    assert ours.is_contiguous()
    checks.assert_same(ours.cpu(), y)
    found = _gradients(grad, x, maps, direction, True, True)
    checks.assert_same([g.cpu() for g in found], (by_x, by_maps))
    (only_x, none), (nothing, only_maps) = (
        _gradients(grad, x, maps, direction, wants_x, not wants_x) for wants_x in (True, False)
    )
    checks.assert_same(only_x, found[0], rtol=0, atol=0)
    checks.assert_same(only_maps, found[1], rtol=0, atol=1e-12)
    assert none.shape == nothing.shape == (0,)
    if not moving:
        checks.assert_same(ops.affine_copies(x, maps), ours, rtol=0, atol=0)
        leaves = x.clone().requires_grad_(), maps.clone().requires_grad_()
        reference = ops.affine_copies_torch(*leaves)
        checks.assert_same(reference.cpu().detach(), y)
        checks.assert_same([g.cpu() for g in torch.autograd.grad(reference, leaves, grad)], (by_x, by_maps))


@pytest.mark.parametrize(
    "shape", [*SHAPES, (33, 2, 9, 64, 64, True), (2, 3, 2, 3, 2000, False), (2, 31, 3, 28, 28, False)]
)
def test_the_accuracy_of_grid_sample(shape, device):
    """In float32, beside torch's own error; the last image has channels for several blocks of cells."""
    grad, x, maps, _ = arguments(shape, device, torch.float32)
    results = []
    for function, dtype in ((ops.affine_copies, torch.float32), (by_torch, torch.float32), (by_torch, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, maps)]
        y = function(*leaves)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))))
    sizes = (x.abs(), grad.abs().sum(1), (grad.abs().sum((2, 3, 4)) * x.abs().max() * max(shape[3:5]))[..., None, None])
    for ours, theirs, exact, terms in zip(*results, sizes, strict=True):
        checks.error_at_most_twice(ours, theirs, exact, terms)


def test_the_identity_and_turns_are_exact(device):
    x = torch.randn(2, 3, 6, 6, device=device)
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]], device=device)
    maps = torch.stack([torch.eye(2, 3, device=device)] * 4)
    linear = torch.eye(2, device=device)
    for k in range(4):
        maps[k, :, :2] = linear
        linear = linear @ turn[:, :2]
    y = ops.affine_copies(x, maps[None])
    for k in range(4):
        assert torch.equal(y[:, k], x.rot90(k, (2, 3)))
    (wide,) = ops.affine_copies(
        torch.arange(15.0, device=device).view(1, 1, 3, 5), torch.eye(2, 3, device=device)[None, None]
    )
    assert torch.equal(wide.flatten(), torch.arange(15.0, device=device))


@pytest.mark.parametrize(("down", "right"), [(0, 2), (1, -3), (-2, 0), (7, 0)])
def test_whole_shifts(down, right, device):
    x = torch.randn(2, 1, 5, 9, dtype=torch.float64, device=device)
    maps = torch.eye(2, 3, dtype=torch.float64, device=device)[None, None].clone()
    maps[..., 2] = torch.tensor([right / 4, down / 2])
    padded = F.pad(x, (9, 9, 9, 9))
    checks.assert_same(ops.affine_copies(x, maps)[:, 0], padded[..., 9 + down : 14 + down, 9 + right : 18 + right])


def test_finite_differences_of_smooth_images(device):
    """Across kinks too, which are weak there."""
    i, j = torch.meshgrid(*[torch.linspace(-1, 1, 40, dtype=torch.float64, device=device)] * 2, indexing="ij")
    x = torch.stack([torch.exp(-4 * ((i - c) ** 2 + (j + c) ** 2)) for c in (0.0, 0.2)])[:, None]
    maps = (torch.eye(2, 3).double() + 0.1 * torch.randn(2, 3, 2, 3).double()).to(device)
    weight = torch.randn(40, 40, dtype=torch.float64, device=device).cumsum(0).cumsum(1) / 40

    def value(m: Tensor) -> Tensor:
        return (ops.affine_copies(x, m).square() * weight).sum()

    (slopes,) = torch.autograd.grad(value(leaf := maps.clone().requires_grad_()), leaf)
    step = 1e-2
    for _ in range(5):
        way = torch.randn_like(maps)
        way /= way.norm()
        difference = (value(maps + step * way) - value(maps - step * way)) / (2 * step)
        torch.testing.assert_close((slopes * way).sum(), difference, rtol=0, atol=2e-3 * float(slopes.norm()))


@pytest.mark.parametrize("shape", [(2, 2, 2, 3, 4, False), (2, 2, 1, 3, 3, True)])
def test_derivatives(shape, device):
    grad, x, maps, direction = away_from_kinks(shape, device)
    args = tuple(t.clone().requires_grad_() for t in (x, maps))
    moving = (*args, direction.clone().requires_grad_())
    checks.check_derivatives(_copies, moving)
    checks.check_derivatives(
        lambda g, a, m: _gradients(g, a, m, None, True, True), (grad.clone().requires_grad_(), *args), second=False
    )
    checks.check_derivatives(
        lambda g, *a: _gradients(g, *a, True, True), (grad.clone().requires_grad_(), *moving), second=False
    )


@pytest.mark.parametrize("shared", [False, True])
def test_plain_torch_of_the_orders_beyond(shared, device):
    """The second derivative along two directions and its transpose against autograd of the reference."""
    grad, x, maps, first = away_from_kinks((2, 2, 2, 3, 4, shared), device)
    second = torch.randn_like(first)

    def along(function, way):
        return lambda m: torch.func.jvp(function, (m,), (way,))[1]

    expected = along(along(lambda m: ops.affine_copies_torch(x, m), first), second)(maps)
    checks.assert_same(_second_tangent(x, maps, first, second), expected)
    moved = _second_tangent_in_x(grad, maps, first, second)
    checks.assert_same((moved * x).sum(), (grad * expected).sum())


@pytest.mark.parametrize("shared", [False, True])
def test_vmap_along_a_direction(shared, device):
    checks.check_vmap(_copies, away_from_kinks((2, 2, 1, 3, 3, shared), device)[1:])


@pytest.mark.parametrize("shape", [(3, 4, 2, 5, 6, False), (3, 2, 2, 40, 33, True)])
def test_every_layout(shape, device):
    grad, x, maps, direction = arguments(shape, device)
    for number, given in enumerate((grad, x, maps, direction)):
        for _, laid_out in checks.layouts(given):
            args = [laid_out if i == number else t for i, t in enumerate((grad, x, maps, direction))]
            dense = [t.contiguous() for t in args]
            for along in (None, 3):
                one, other = ([*a[1:3], a[3] if along else None] for a in (args, dense))
                checks.assert_same(_copies(*one), _copies(*other), rtol=0, atol=0)
                found, expected = (_gradients(a[0], *b, True, True) for a, b in ((args, one), (dense, other)))
                checks.assert_same(found, expected, rtol=0, atol=0)
                assert all(g.is_contiguous() for g in found)
    total = torch.autograd.grad(ops.affine_copies(leaf := x.clone().requires_grad_(), maps).sum(), leaf)
    checks.assert_same(total[0], _gradients(torch.ones_like(grad), x, maps, None, True, False)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_read_past_the_end(shape, dtype):
    given = [checks.before_a_guard_page(t) for t in arguments(shape, torch.device("cpu"), dtype)]
    for direction in (None, given[3]):
        assert torch.isfinite(_copies(*given[1:3], direction)).all()
        assert all(torch.isfinite(g).all() for g in _gradients(*given[:3], direction, True, True))


def test_one_set_of_maps_is_that_of_every_image(device):
    grad, x, maps, _ = arguments((5, 3, 2, 6, 5, True), device)
    repeated = maps.expand(5, 3, 2, 3).contiguous()
    assert torch.equal(ops.affine_copies(x, maps), ops.affine_copies(x, repeated))
    by_x, by_maps = _gradients(grad, x, maps, None, True, True)
    own_x, own_maps = _gradients(grad, x, repeated, None, True, True)
    assert torch.equal(by_x, own_x)
    checks.assert_same(by_maps, own_maps.sum(0, keepdim=True))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 2)])
def test_a_map_that_is_not_finite(number, place, device):
    """Its copies are NaN, and so are the gradients in it and in its image, and no others."""
    grad, x, maps, _ = arguments((3, 2, 2, 4, 5, False), device)
    maps[1, 0][place] = number
    y = ops.affine_copies(x, maps)
    broken = torch.zeros(3, 2, dtype=torch.bool, device=device)
    broken[1, 0] = True
    assert torch.equal(y.isnan(), broken[:, :, None, None, None].expand_as(y))
    by_x, by_maps = _gradients(grad, x, maps, None, True, True)
    assert torch.equal(by_x.isnan(), broken.any(1)[:, None, None, None].expand_as(x))
    assert torch.equal(by_maps.isnan(), broken[:, :, None, None].expand_as(maps))


def test_maps_that_look_far_outside(device):
    """Numbers as large as float32 has: nothing is read there, and there is nothing."""
    x = torch.ones(1, 1, 4, 4, device=device)
    maps = torch.tensor(
        [[[1e38, 0, 0], [0, 1, 0]], [[1, 0, 1e38], [0, 1, 0]], [[1, 0, 0], [3e9, 1, -1e38]]], device=device
    )
    y = ops.affine_copies(x, maps[None])
    assert torch.equal(y, torch.zeros_like(y))
    by_x, by_maps = _gradients(torch.ones_like(y), x, maps[None], None, True, True)
    assert not by_x.any() and not by_maps.any()


@pytest.mark.parametrize("shared", [False, True])
def test_same_numbers_for_any_number_of_threads(shared):
    given = arguments((7, 5, 5, 20, 30, shared), torch.device("cpu"), torch.float32)

    def results():
        both = _gradients(*given[:3], None, True, True)
        return _copies(*given[1:3], None), both, _gradients(*given[:3], None, False, True)[1]

    checks.same_for_any_number_of_threads(results)


def test_no_grid_and_no_repeated_image_is_stored():
    x, maps = torch.randn(100, 1, 28, 28), torch.eye(2, 3) + 0.1 * torch.randn(100, 31, 2, 3)
    grad = torch.randn(100, 31, 1, 28, 28)
    size = grad.numel() * grad.element_size()
    assert checks.peak_bytes(lambda: ops.affine_copies(x, maps)) < 1.2 * size
    assert checks.peak_bytes(lambda: _gradients(grad, x, maps, None, True, True)) < 0.2 * size
    assert checks.peak_bytes(lambda: by_torch(x, maps)) > 2.5 * size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_adjoint_is_that_of_the_copies(shape, device):
    y, x, maps, _ = arguments(shape, device)
    copies, back = ops.affine_copies(x, maps), affine_adjoint(y, maps)
    assert back.shape == x.shape
    torch.testing.assert_close((y * copies).sum(), (back * x).sum(), rtol=1e-10, atol=1e-10)


def test_the_adjoint_is_differentiable_in_copies_and_maps():
    """Of maps in general position, away from whole coordinates."""
    y = torch.randn(2, 3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    maps = (torch.eye(2, 3) + 0.3 * torch.randn(2, 3, 2, 3)).double().requires_grad_()
    assert torch.autograd.gradcheck(affine_adjoint, (y, maps), eps=1e-7, atol=1e-5)


def test_the_adjoint_says_what_copies_are():
    with pytest.raises(RuntimeError, match=r"affine_adjoint: y must have shape \(N, S, C, H, W\), got \(3,\)"):
        affine_adjoint(torch.ones(3), torch.ones(1, 1, 2, 3))

"""Affine copies of images: what they are, how their amounts and draws behave."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda import marglik_training
from ella_cuda.augment import GENERATORS, AffineAugment, Augment, AveragedFunction, LocalDeformation, affine_matrix
from ella_cuda.data import TensorLoader
from ella_cuda.training import Evaluation
from ella_cuda.training.checkpoint import random_state, restore_random_state
from python_tests.augment.augments import RotatePoints, smooth_images, turned
from python_tests.ops.checks import assert_same

SAMPLINGS = ("independent", "shared", "grid", "sobol")
FULL_CIRCLE = {"generators": "rotation", "init": math.pi, "constraint": "raw"}
double = {"dtype": torch.float64}


def raw(
    n_samples: int, generators: str | tuple[str, ...] = "all", init: float = 0.3, **options: object
) -> AffineAugment:
    return AffineAugment(n_samples, generators, init, constraint="raw", **double | options)


# copies ---------------------------------------------------------------------------------------------------------------


def test_copies_are_bilinear_look_ups_at_the_mapped_places(device):
    augment, x = (
        AffineAugment(5, init=0.4, **double).to(device),
        torch.randn(3, 2, 7, 7, dtype=torch.float64, device=device),
    )
    eps = augment.draw(3)
    found = augment(x, eps=eps)
    assert found.shape == (3, 5, 2, 7, 7)
    maps = affine_matrix(eps, augment.eta)[..., :2, :]
    for n in range(3):
        for s in range(5):
            grid = F.affine_grid(maps[n, s][None], (1, 2, 7, 7), align_corners=True)
            expected = F.grid_sample(x[n : n + 1], grid, "bilinear", "zeros", align_corners=True)[0]
            assert_same(found[n, s], expected)


def test_without_amounts_copies_are_the_images():
    x = torch.randn(2, 3, 6, 9, dtype=torch.float64)
    assert_same(raw(4, init=0.0)(x), x[:, None].expand(-1, 4, -1, -1, -1))


@pytest.mark.parametrize(("name", "shift"), [("tx", (0, 1)), ("ty", (1, 0))])
def test_a_translation_by_a_pixel_moves_the_image_by_one(name, shift):
    """The copy looks up at larger coordinates, so the image moves towards smaller ones; zeros come in."""
    x = torch.randn(1, 1, 5, 9, dtype=torch.float64)
    pixel = 2 / (x.shape[3 if name == "tx" else 2] - 1)  # in half images, of corner-aligned coordinates
    (found,) = raw(1, name, pixel)(x, eps=torch.ones(1, 1, **double))
    expected = F.pad(x, (0, shift[1], 0, shift[0]))[..., shift[0] :, shift[1] :]
    assert_same(found[0], expected[0])


@pytest.mark.parametrize("quarter", [1, 2, 3, -1])
def test_quarter_turns_are_exact(quarter):
    """Coordinates turn from x to y, which is downwards: the looked-up image turns the other way, as rot90 does."""
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    eps = torch.full((1, 1), quarter / 2, **double)
    assert_same(raw(1, "rotation", math.pi)(x, eps=eps)[:, 0], torch.rot90(x, quarter, (2, 3)))


def test_rotation_of_a_rectangle_is_that_of_its_square():
    """A rectangle inside a square of zeros turns as the square does, by any angle, and so do scales and shear."""
    x = torch.randn(2, 1, 5, 9, dtype=torch.float64)
    names = ("rotation", "sx", "sy", "shear")
    augment, eps = raw(30, names, 0.9), torch.rand(30, 4, **double) * 2 - 1
    inside = slice(2, 7)
    square = augment(F.pad(x, (0, 0, 2, 2)), eps=eps)[..., inside, :]
    assert_same(augment(x, eps=eps), square)
    wide = augment(F.pad(x, (0, 0, 2, 2)).mT, eps=eps)[..., inside]
    assert_same(augment(x.mT, eps=eps), wide)


def test_images_of_one_row():
    x = torch.randn(2, 1, 1, 9, dtype=torch.float64)
    assert torch.isfinite(AffineAugment(3, **double)(x)).all()
    assert AffineAugment(3)(torch.zeros(0, 1, 4, 4)).shape == (0, 3, 1, 4, 4)


def test_gradient_in_the_amounts_is_that_of_finite_differences():
    x = smooth_images(3, 2, 12, 12)
    augment, eps, weight = (
        AffineAugment(4, init=0.2, **double),
        torch.rand(3, 4, 6, **double) * 2 - 1,
        torch.randn(3, 4, 2, 12, 12, **double),
    )
    augment.raw.requires_grad_()
    (gradient,) = torch.autograd.grad((augment(x, eps=eps) * weight).sum(), augment.raw)

    def value(raw: Tensor) -> Tensor:
        return (torch.func.functional_call(augment, {"raw": raw}, (x,), {"eps": eps}) * weight).sum().detach()

    h = 1e-7  # bilinear copies have kinks where a place crosses a pixel
    for i in range(6):
        step = h * torch.eye(6, **double)[i]
        difference = (value(augment.raw.detach() + step) - value(augment.raw.detach() - step)) / (2 * h)
        assert float(gradient[i]) == pytest.approx(float(difference), rel=1e-5)


def test_under_autocast_copies_are_in_single_precision():
    x, augment = torch.randn(2, 1, 8, 8), AffineAugment(3, sampling="grid", generators="rotation")
    with torch.autocast("cpu", torch.bfloat16):
        assert augment(x.bfloat16()).dtype == torch.float32
        assert torch.equal(augment(x), AffineAugment(3, sampling="grid", generators="rotation")(x))


# the fully invariant limit --------------------------------------------------------------------------------------------


def spread(function: nn.Module, x: Tensor, turn: Callable[[Tensor], Tensor]) -> float:
    """How much an output changes as the input turns, relative to outputs."""
    before, after = function(x).detach(), function(turn(x)).detach()
    return float((after - before).abs().max() / before.abs().max())


def closed_twice(augment: Augment) -> Tensor:
    """The planted bug: a grid whose ends are the same place of a closed circle."""
    return torch.linspace(-1, 1, augment.n_samples, **double)[:, None]


@pytest.mark.parametrize("n_samples", [3, 5, 8, 31])
def test_points_on_a_full_circle_of_angles(n_samples):
    network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    augment = RotatePoints(n_samples, init=math.pi, constraint="raw", sampling="grid", **double)
    function, x = AveragedFunction(network, augment), torch.randn(40, 2, dtype=torch.float64)
    for k in (1, 2, -1):
        assert spread(function, x, lambda x, k=k: turned(x, 2 * math.pi * k / n_samples)) < 1e-14
    if n_samples == 31:  # the sum is nearly the integral, for any angle
        assert spread(function, x, lambda x: turned(x, 0.123)) < 1e-6
    with augment.held(closed_twice(augment)):
        assert spread(function, x, lambda x: turned(x, 2 * math.pi / n_samples)) > 1e-3


@pytest.mark.parametrize("draws", ["grid", "quarter turns"])
def test_images_on_four_angles(draws):
    network = nn.Sequential(nn.Flatten(), nn.Linear(98, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    augment = AffineAugment(4, **FULL_CIRCLE, sampling="grid", **double)
    function, x = AveragedFunction(network, augment), torch.randn(6, 2, 7, 7, dtype=torch.float64)
    turn = lambda x: torch.rot90(x, 1, (2, 3))  # noqa: E731
    quarters = torch.tensor([-0.5, 0, 0.5, 1], **double)[:, None]
    with augment.held(quarters if draws == "quarter turns" else None):
        assert spread(function, x, turn) < 1e-13
    with augment.held(closed_twice(augment)):
        assert spread(function, x, turn) > 1e-3


# the saddle at 0 ------------------------------------------------------------------------------------------------------


def squares(augment: Augment, network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (AveragedFunction(network, augment)(x) - y).square().sum()


@pytest.mark.parametrize("kind", ["rotation", "two generators"])
def test_on_a_symmetric_grid_the_gradient_at_zero_is_zero_and_elsewhere_not(kind):
    """For points and for images. The reason why init=0 is refused there; amounts that start at 0.05 move, and so do drawn ones at 0."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    x, y = smooth_images(10, 1, 8, 8), torch.randn(10, 2, dtype=torch.float64)
    names = ("rotation",) if kind == "rotation" else ("sx", "rotation")
    grid = raw(4 ** len(names), names, 0.05, sampling="grid")

    def gradient(augment: Augment) -> Tensor:
        augment.raw.requires_grad_()
        return torch.autograd.grad(squares(augment, network, x, y), augment.raw)[0]

    scale = float(gradient(grid).abs().min())
    assert scale > 1e-5
    grid.set_eta(0.0)
    assert float(gradient(grid).abs().max()) < 1e-12 * scale
    drawn = raw(16, names, 0.0, sampling="shared")
    assert float(gradient(drawn).abs().min()) > 0
    if kind == "rotation":
        with pytest.raises(
            ValueError, match=r"init must not be 0 .*even in every amount, so the gradient at 0 is exactly 0"
        ):
            raw(4, "rotation", 0.0, sampling="grid")


def test_for_points_it_is_zero_to_the_last_digit_and_steps_from_elsewhere_leave():
    network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.randn(30, 2, dtype=torch.float64)
    augment = RotatePoints(7, init=1.5, constraint="raw", sampling="grid", **double)
    y = AveragedFunction(network, augment)(x).detach()
    augment.set_eta(0.0)
    augment.raw.requires_grad_()
    squares(augment, network, x, y).backward()
    assert float(augment.raw.grad) == pytest.approx(0, abs=1e-14)
    augment.set_eta(0.05)
    optimizer = torch.optim.Adam([augment.raw], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        squares(augment, network, x, y).backward()
        optimizer.step()
    assert augment.amounts()["rotation"] == pytest.approx(1.5, abs=0.03)


# draws ----------------------------------------------------------------------------------------------------------------


def test_independent_draws_are_uniform_and_differ_by_image_and_copy():
    eps = AffineAugment(50, **double).draw(400)
    assert eps.shape == (400, 50, 6) and eps.dtype == torch.float64
    assert eps.abs().max() <= 1 and eps.abs().max() > 0.999
    count = math.sqrt(400 * 50)
    assert eps.mean((0, 1)).abs().max() < 4 / math.sqrt(3) / count
    assert (eps.square().mean((0, 1)) - 1 / 3).abs().max() < 4 * math.sqrt(4 / 45) / count
    flat = eps.flatten(0, 1)
    assert torch.corrcoef(flat.T).fill_diagonal_(0).abs().max() < 4 / count
    assert flat[:, 0].unique().numel() == 400 * 50


@pytest.mark.parametrize("sampling", SAMPLINGS[1:])
def test_other_draws_are_one_set_for_all_images(sampling):
    augment = raw(9, ("rotation", "tx"), sampling=sampling)
    assert augment.draw(5).shape == (1, 9, 2)
    x = torch.randn(1, 1, 6, 6, dtype=torch.float64).expand(4, -1, -1, -1)
    copies = augment(x)
    assert torch.equal(copies[0], copies[3])
    assert not torch.equal(copies[0, 0], copies[0, 1])
    again = augment(x)
    assert torch.equal(copies, again) == (sampling == "grid")
    mixed = raw(9, ("rotation", "tx"))(x)
    assert not torch.equal(mixed[0], mixed[3])


def test_grid_has_the_midpoints_of_every_side():
    assert_same(raw(4, "tx", sampling="grid").draw()[0, :, 0], torch.tensor([-0.75, -0.25, 0.25, 0.75], **double))
    eps = raw(9, ("tx", "ty"), sampling="grid").draw()[0]
    assert len({*map(tuple, eps.tolist())}) == 9
    side = {round(v, 12) for v in eps.flatten().tolist()}
    assert side == {round(v, 12) for v in (-2 / 3, 0.0, 2 / 3)}
    assert_same(eps.sum(0), torch.zeros(2, **double))
    assert raw(64, sampling="grid").draw().shape == (1, 64, 6)


def test_sobol_points_are_balanced_and_scrambled():
    augment = raw(64, sampling="sobol")
    eps = augment.draw()[0]
    assert eps.shape == (64, 6) and eps.abs().max() <= 1
    for column in eps.T:  # one in each of 64 intervals, where draws leave a third of them empty
        assert ((column + 1) * 32).floor().unique().numel() == 64
    assert not torch.equal(eps, augment.draw()[0])
    many = torch.stack([augment.draw()[0] for _ in range(200)])
    assert many.mean((0, 1)).abs().max() < 2e-3  # draws: 5e-3 is one standard deviation
    assert (many[:, 5].square().mean(0) - 1 / 3).abs().max() < 0.1  # each point is uniform


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_restored_random_state_gives_the_same_copies(sampling):
    """What a resumed training restores; other draws come in between."""
    augment, x = raw(9, ("rotation", "tx"), sampling=sampling), torch.randn(3, 1, 6, 6, dtype=torch.float64)
    augment(x)
    state = random_state([])
    first, second = augment(x), augment(x)
    torch.rand(5)
    restore_random_state(state, [])
    assert torch.equal(augment(x), first) and torch.equal(augment(x), second)


def test_a_resumed_training_has_the_copies_of_one_that_was_not_interrupted(tmp_path):
    x, y = torch.randn(20, 1, 6, 6), torch.arange(20) % 3

    def run(name: str, stop_after: int | None = None) -> list[Tensor]:
        torch.manual_seed(4)
        network = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
        model = AveragedFunction(network, AffineAugment(3, init=0.3))

        def stop(evaluation: Evaluation) -> None:
            if evaluation.epoch == stop_after:
                raise KeyboardInterrupt

        marglik_training(
            model, TensorLoader(x, y, 5, shuffle=True), n_epochs=4, objective="map", checkpoint=tmp_path / name, on_evaluation=stop,
            progress_bar=False,
        )  # fmt: skip
        return [*model.parameters(), *model.buffers()]

    whole = run("whole.pt")
    with pytest.raises(KeyboardInterrupt):
        run("resumed.pt", stop_after=2)
    assert all(map(torch.equal, whole, run("resumed.pt")))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_compiled_functions_draw_and_hold(sampling):
    function = AveragedFunction(nn.Flatten(), AffineAugment(4, ("rotation", "tx"), 0.3, sampling))
    compiled, x = torch.compile(function, backend="eager"), torch.randn(3, 1, 6, 6)
    for _ in range(2):
        torch.manual_seed(1)
        found = compiled(x)
        torch.manual_seed(1)
        assert torch.equal(found, function(x))
        with function.augment.held():
            assert torch.equal(compiled(x), function(x))


def test_under_transforms_held_draws_are_taken():
    augment, x = AffineAugment(3, init=0.3, **double), smooth_images(4, 1, 6, 6)
    with augment.held():
        assert_same(torch.func.vmap(lambda image: augment(image[None])[0])(x), augment(x))
        by = torch.func.jacrev(lambda raw: torch.func.functional_call(augment, {"raw": raw}, (x,)))(augment.raw)
        ahead = torch.func.jacfwd(lambda raw: torch.func.functional_call(augment, {"raw": raw}, (x,)))(augment.raw)
        assert_same(by, ahead)


@pytest.mark.parametrize("sampling", ["independent", "shared", "sobol"])
def test_draws_from_a_generator_leave_the_global_one(sampling):
    augment, before = raw(4, ("rotation", "tx"), sampling=sampling), torch.get_rng_state()
    one, other = (augment.draw(3, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, other) and torch.equal(torch.get_rng_state(), before)


def test_held_draws_are_the_same_in_every_call():
    augment, x = raw(4, ("rotation", "tx")), torch.randn(3, 1, 6, 6, dtype=torch.float64)
    with augment.held() as eps:
        assert eps.shape == (1, 4, 2)  # shared, although the module draws independently
        first = augment(x)
        assert torch.equal(augment(x), first) and torch.equal(augment(x, eps=eps), first)
        assert torch.equal(augment(x[1:]), first[1:])
        with augment.held(torch.zeros(1, 2, **double)):
            assert_same(augment(x), x[:, None])
        assert torch.equal(augment(x), first)
        assert not torch.equal(copy.deepcopy(augment)(x), first)  # a copy is in no context
    assert not torch.equal(augment(x), first)
    with pytest.raises(ZeroDivisionError), augment.held():
        raise ZeroDivisionError
    assert not torch.equal(augment(x), augment(x))
    with raw(4, ("rotation", "tx"), sampling="grid").held() as eps:
        assert torch.equal(eps, raw(4, ("rotation", "tx"), sampling="grid").draw())


def test_independent_draws_are_held_by_rewinding():
    """Two passes over the same batches have the same copies, image by image."""
    augment, x = raw(4, ("rotation", "tx")), torch.randn(7, 1, 6, 6, dtype=torch.float64)
    with augment.held(sampling="independent") as eps:
        assert eps is None
        first = [augment(batch) for batch in x.split(3)]
        assert not torch.equal(augment(x[:3]), first[0])
        augment.rewind()
        assert all(map(torch.equal, first, [augment(batch) for batch in x.split(3)]))
    augment.rewind()  # outside there is nothing to do
    assert augment._held is None


# amounts --------------------------------------------------------------------------------------------------------------


def test_amounts_are_buffers_that_the_optimizer_of_the_weights_leaves_alone():
    augment = AffineAugment(3, init=0.2)
    function = AveragedFunction(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), augment)
    assert [name for name, _ in augment.named_buffers()] == ["raw"] and not list(augment.parameters())
    assert "augment.raw" in function.state_dict() and not augment.raw.requires_grad
    before = augment.raw.clone()
    optimizer = torch.optim.SGD(function.parameters(), lr=0.1)
    function(torch.randn(4, 1, 6, 6)).square().sum().backward()
    optimizer.step()
    assert torch.equal(augment.raw, before)


@pytest.mark.parametrize("constraint", ["softplus", "raw"])
def test_amounts_start_where_they_are_told(constraint):
    init = dict(zip(GENERATORS, (0.1, 0.2, 1.5, 0.05, 0.3, 5.0), strict=True))
    for given in (init, [*init.values()], torch.tensor([*init.values()], **double)):
        augment = AffineAugment(3, init=given, constraint=constraint, **double)
        assert augment.amounts() == pytest.approx(init, rel=1e-12)
        assert augment.generators == GENERATORS and list(augment.amounts()) == [*GENERATORS]
    augment = AffineAugment(3, ("shear", "tx"), {"tx": 0.1, "shear": 0.7}, constraint=constraint)
    assert augment.amounts() == pytest.approx({"shear": 0.7, "tx": 0.1})
    augment.set_eta(np.float32(0.4))
    assert augment.eta.tolist() == pytest.approx([0.4, 0.4])
    assert raw(3, ("tx", "ty"), [0.0, -0.5]).amounts() == {"tx": 0, "ty": -0.5}


def test_constraints_have_their_derivatives():
    augment = AffineAugment(3, init=0.3, **double)
    slope = torch.func.jacrev(lambda raw: torch.func.functional_call(Eta(augment), {"augment.raw": raw}, ()))(
        augment.raw
    )
    assert_same(slope, torch.diag(augment.raw.sigmoid()))
    assert_same(augment.eta, augment.raw.exp().log1p())
    assert raw(3, "rotation").eta.equal(raw(3, "rotation").raw)


class Eta(nn.Module):
    def __init__(self, augment: Augment) -> None:
        super().__init__()
        self.augment = augment

    def forward(self) -> Tensor:
        return self.augment.eta


@pytest.mark.parametrize("constraint", ["softplus", "raw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_is_clamped_at_the_full_circle_and_comes_back(constraint, dtype):
    augment = AffineAugment(3, ("tx", "rotation"), 3.0, constraint=constraint, dtype=dtype)
    with torch.no_grad():
        augment.raw += 1
    tx, rotation = augment.eta.tolist()
    assert rotation == pytest.approx(math.pi) and tx > 3.5
    augment.raw.requires_grad_()
    assert torch.autograd.grad(augment.eta.sum(), augment.raw)[0].tolist()[1] == 0
    augment.project_()
    assert augment.amounts()["rotation"] == pytest.approx(math.pi) and augment.amounts()["tx"] == tx
    assert torch.autograd.grad(augment.eta.sum(), augment.raw)[0][1] > 0.9
    if constraint == "raw":
        augment.set_eta([1.0, -3.0])
        with torch.no_grad():
            augment.raw.sub_(2)
        assert augment.amounts() == pytest.approx({"tx": -1, "rotation": -math.pi})
    augment.set_eta({"tx": 0.1, "rotation": math.pi})
    assert torch.autograd.grad(augment.eta.sum(), augment.raw)[0][1] > 0.9


def test_states_and_copies_have_the_amounts():
    x, augment = torch.randn(2, 1, 6, 6), AffineAugment(4, "rotation", 0.8, "grid")
    expected = augment(x)
    other = AffineAugment(4, "rotation", 0.1, "grid")
    assert not torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(augment.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), expected)
    copied = copy.deepcopy(augment)
    with torch.no_grad():
        augment.raw += 1
    assert torch.equal(copied(x), expected) and not torch.equal(augment(x), expected)


def test_a_device_and_a_dtype_are_taken():
    augment = AffineAugment(2, device="meta", dtype=torch.float64)
    assert augment.raw.device.type == "meta" and augment.raw.dtype == torch.float64
    assert AffineAugment(2).double().raw.dtype == torch.float64
    assert repr(AffineAugment(2, "tx")) == "AffineAugment(2, tx, sampling='independent', constraint='softplus')"


# refusals -------------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 1, 4, 4)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: AffineAugment(0), ValueError, "AffineAugment: n_samples must be a positive integer, got 0"),
        (lambda: AffineAugment(True), ValueError, "n_samples must be a positive integer, got True"),
        (lambda: AffineAugment(2.0), ValueError, "n_samples must be a positive integer, got 2.0"),
        (lambda: AffineAugment(2, "turn"), ValueError, "AffineAugment: generators must be 'all' or some of tx, .* got 'turn'"),
        (lambda: AffineAugment(2, ("tx", "tx")), ValueError, "each once"),
        (lambda: AffineAugment(2, None), TypeError, "generators must be a name or a list or tuple of names, got NoneType"),
        (lambda: AffineAugment(2, dtype=torch.float16), ValueError, "dtype must be torch.float32 or torch.float64, got torch.float16"),
        (lambda: AffineAugment(2, sampling="random"), ValueError, "sampling must be one of independent, shared, grid, sobol, got 'random'"),
        (lambda: AffineAugment(2, constraint="exp"), ValueError, "constraint must be one of softplus, raw, got 'exp'"),
        (lambda: AffineAugment(2, init=0.0), ValueError, r"init must be positive with constraint='softplus', got 0.0 for tx; start at 0.05"),
        (lambda: AffineAugment(2, init=-0.1), ValueError, "init must be positive .* got -0.1"),
        (lambda: AffineAugment(2, init=math.nan), ValueError, "init must be finite, got nan for tx"),
        (lambda: AffineAugment(2, init="0.1"), TypeError, "init must be a number, 6 numbers or a mapping .* got str"),
        (lambda: AffineAugment(2, init=True), TypeError, "init must be a number, .* got bool"),
        (lambda: AffineAugment(2, init=[0.1, 0.1]), ValueError, "init must have 6 numbers, for tx, ty, .* got 2"),
        (lambda: AffineAugment(2, "tx", init=["0.1"]), TypeError, "init must be numbers, got str for tx"),
        (lambda: AffineAugment(2, init={"tx": 0.1}), ValueError, "init must have the names tx, ty, .* got tx"),
        (lambda: AffineAugment(2, "rotation", 3.2), ValueError, r"init must be at most 3.141593 in absolute value for rotation, got 3.2"),
        (lambda: AffineAugment(2, "rotation").set_eta(0), ValueError, "eta must be positive"),
        (lambda: AffineAugment(1, "rotation", sampling="grid"), ValueError, "n_samples must be at least 2 with sampling='grid', got 1"),
        (lambda: AffineAugment(8, ("tx", "ty"), sampling="grid"), ValueError, r"n_samples must be m\*\*2 with m >= 2, .* got 8; .*sobol"),
        (lambda: raw(4, "tx", 0.0, sampling="grid"), ValueError, "init must not be 0 with sampling='grid', got 0.0.* Start at 0.05"),
        (lambda: AffineAugment(2)([[0.0]]), TypeError, "x must be a tensor .* got list"),
        (lambda: AffineAugment(2)(torch.tensor(1.0)), ValueError, r"x must have shape \(N, \.\.\.\), got \(\)"),
        (lambda: AffineAugment(2)(X[0]), ValueError, r"AffineAugment: x must have shape \(N, C, H, W\), got \(1, 4, 4\)"),
        (lambda: AffineAugment(2)(X.double()), ValueError, "x is torch.float64, the amounts are torch.float32; convert one with .to()"),
        (lambda: AffineAugment(2)(X.to(torch.uint8)), ValueError, "x is torch.uint8"),
        (lambda: AffineAugment(2)(X.to("meta")), ValueError, r"x is on meta, the amounts are on cpu; move one .* x.to\('cpu'\)"),
        (lambda: AffineAugment(2)(X, eps=0.5), TypeError, r"eps must be a tensor \(S, 6\) or \(N or 1, S, 6\), got float"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(3, 5)), ValueError, r"eps must have shape .* got \(3, 5\)"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(0, 6)), ValueError, r"eps must have shape .* got \(0, 6\)"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(3, 2, 6)), ValueError, r"eps must be for 1 or all 2 inputs, got \(3, 2, 6\)"),
        (lambda: AffineAugment(2)(X, eps=torch.zeros(2, 6).double()), ValueError, "eps is torch.float64"),
        (lambda: AffineAugment(2).draw(3, "normal"), ValueError, "sampling must be one of"),
        (lambda: AffineAugment(2).held(torch.zeros(2, 5)).__enter__(), ValueError, "eps must have shape"),
        (lambda: AffineAugment(2).held(sampling="grid").__enter__(), ValueError, r"n_samples must be m\*\*6"),
        (lambda: setattr(AffineAugment(2), "sampling", "none"), ValueError, "sampling must be one of"),
        (lambda: LocalDeformation(2, sampling="grid"), ValueError, "sampling must be one of independent, shared, got 'grid'"),
        (lambda: LocalDeformation(2, grid_size=1), ValueError, "grid_size must be an integer of at least 2, got 1"),
        (lambda: LocalDeformation(2)(X[0]), ValueError, r"LocalDeformation: x must have shape \(N, C, H, W\)"),
        (lambda: Augment(2, ("a",))(X), NotImplementedError, r"Augment must implement transform\(x, eps, eta\)"),
    ],
)  # fmt: skip
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call()

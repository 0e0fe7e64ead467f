"""How copies are drawn, drawn again and held."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from ella_cuda import marglik_training
from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.data import TensorLoader
from ella_cuda.training import Evaluation
from ella_cuda.training.checkpoint import random_state, restore_random_state
from python_tests.augment.augments import DOUBLE, raw, smooth_images
from python_tests.ops.checks import assert_same

SAMPLINGS = ("independent", "shared", "grid", "sobol")


def test_independent_draws_are_uniform_and_differ_by_image_and_copy():
    eps = AffineAugment(50, **DOUBLE).draw(400)
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
    assert_same(raw(4, "tx", sampling="grid").draw()[0, :, 0], torch.tensor([-0.75, -0.25, 0.25, 0.75], **DOUBLE))
    eps = raw(9, ("tx", "ty"), sampling="grid").draw()[0]
    assert len({*map(tuple, eps.tolist())}) == 9
    side = {round(v, 12) for v in eps.flatten().tolist()}
    assert side == {round(v, 12) for v in (-2 / 3, 0.0, 2 / 3)}
    assert_same(eps.sum(0), torch.zeros(2, **DOUBLE))
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
    augment, x = AffineAugment(3, init=0.3, **DOUBLE), smooth_images(4, 1, 6, 6)
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
        with augment.held(torch.zeros(1, 2, **DOUBLE)):
            assert_same(augment(x), x[:, None])
        assert torch.equal(augment(x), first)
        assert not torch.equal(copy.deepcopy(augment)(x), first)  # a copy is in no context
    assert not torch.equal(augment(x), first)
    with pytest.raises(ZeroDivisionError), augment.held():
        raise ZeroDivisionError
    assert not torch.equal(augment(x), augment(x))
    with raw(4, ("rotation", "tx"), sampling="grid").held() as eps:
        assert torch.equal(eps, raw(4, ("rotation", "tx"), sampling="grid").draw())
    with augment.held(sampling="grid") as eps:  # another than the module's own
        assert torch.equal(eps, augment.draw(1, "grid"))


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

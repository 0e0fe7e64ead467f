"""Functions averaged over copies: what they are, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, AveragedFunction, LocalDeformation
from python_tests.augment.augments import DOUBLE, RotatePoints, smooth_images
from python_tests.ops.checks import assert_same


def network(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), *inner, nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()


@pytest.mark.parametrize("training", [True, False])
def test_it_is_the_mean_of_outputs_in_training_and_evaluation(training, device):
    net, augment = network().to(device), AffineAugment(5, init=0.4, **DOUBLE).to(device)
    function = AveragedFunction(net, augment).train(training)
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64, device=device)
    with augment.held(augment.draw(3)) as eps:
        found = function(x)
    expected = torch.stack([net(augment(x, eps=eps[:, s : s + 1])[:, 0]) for s in range(5)]).mean(0)
    assert_same(found, expected)
    softmaxes = torch.stack([net(c).softmax(-1) for c in augment(x, eps=eps).unbind(1)]).mean(0)
    assert (found.softmax(-1) - softmaxes).abs().max() > 1e-4  # outputs are averaged, not probabilities


def test_gradients_reach_the_amounts_and_the_weights():
    net, augment, x = network(), AffineAugment(4, init=0.3, **DOUBLE), smooth_images(3, 1, 6, 6)
    function, eps = AveragedFunction(net, augment), augment.draw(3)
    augment.raw.requires_grad_()
    with augment.held(eps):
        found = torch.autograd.grad(function(x).square().sum(), [augment.raw, *net.parameters()])
    mean = sum(net(augment(x, eps=eps)[:, s]) for s in range(4)) / 4
    assert_same(found, torch.autograd.grad(mean.square().sum(), [augment.raw, *net.parameters()]))


@pytest.mark.parametrize("kind", ["affine", "a module that only maps"])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 9])
def test_chunks_without_a_graph_give_the_same_numbers(chunk_size, kind):
    x, augment, sizes = torch.randn(3, 1, 6, 6, dtype=torch.float64), AffineAugment(5, **DOUBLE), []
    net = network()
    net.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    change = augment if kind == "affine" else Flips()
    whole, chunked = AveragedFunction(net, change), AveragedFunction(net, change, chunk_size)
    state = torch.get_rng_state()
    with torch.no_grad():
        expected = whole(x)
        torch.set_rng_state(state)
        found = chunked(x)
    assert_same(found, expected)
    copies = 5 if kind == "affine" else 2
    full, rest = divmod(copies, chunk_size)
    assert sizes == [3 * copies] + [3 * chunk_size] * full + [3 * rest] * (rest > 0)
    sizes.clear()
    chunked(x)  # a graph keeps all of them anyway
    assert sizes == [3 * copies]


def test_chunks_take_the_held_draws():
    function = AveragedFunction(network(), AffineAugment(5, init=0.4, **DOUBLE), 2)
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    with function.augment.held(), torch.no_grad():
        found = function(x)
        assert torch.equal(function(x), found)
        with torch.enable_grad():
            assert_same(function(x).detach(), found)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_given_draws_are_taken(chunk_size):
    x, eps = torch.randn(3, 1, 6, 6, dtype=torch.float64), torch.rand(5, 6, **DOUBLE) * 2 - 1
    function = AveragedFunction(network(), AffineAugment(2, init=0.4, **DOUBLE), chunk_size)
    with torch.no_grad():
        found = function(x, eps=eps)  # of 5 copies, whatever the augmentation draws
        assert_same(found, function.network(function.augment(x, eps=eps).flatten(0, 1)).view(3, 5, 4).mean(1))
        assert_same(function(x, eps[None].expand(3, -1, -1)), found)
        deformed = AveragedFunction(network(), LocalDeformation(5, **DOUBLE), chunk_size)
        assert_same(deformed(x, torch.zeros(5, 2, 8, 8, **DOUBLE)), deformed.network(x))
        with pytest.raises(TypeError, match="eps"):  # of an augmentation that draws nothing
            AveragedFunction(network(), Flips(), chunk_size)(x, eps)


class Flips(nn.Module):
    """The image and its mirror image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.flip(-1)], 1)


def test_any_module_that_makes_copies_will_do():
    net, x = network(), torch.randn(3, 1, 6, 6, dtype=torch.float64)
    function = AveragedFunction(net, Flips())
    assert_same(function(x), (net(x) + net(x.flip(-1))) / 2)
    assert_same(function(x.flip(-1)), function(x))
    points = AveragedFunction(nn.Linear(2, 3), RotatePoints(6))
    assert points(torch.randn(7, 2)).shape == (7, 3)
    images = AveragedFunction(nn.Conv2d(1, 2, 3), AffineAugment(2))  # outputs of any shape
    assert images(torch.randn(3, 1, 6, 6)).shape == (3, 2, 4, 4)
    assert AveragedFunction(nn.Flatten(), AffineAugment(2))(torch.zeros(0, 1, 3, 3)).shape == (0, 9)


def test_norms_over_the_batch_are_refused_before_the_first_step():
    x, batch, called = torch.randn(3, 1, 6, 6, dtype=torch.float64), nn.BatchNorm2d(3), []
    net = network(batch)
    net.register_forward_pre_hook(lambda *_: called.append(True))
    function = AveragedFunction(net, AffineAugment(3, **DOUBLE))
    before = batch.running_mean.clone()
    with pytest.raises(
        RuntimeError, match=r"the BatchNorm2d '1' takes its statistics .* copies of all inputs are mixed.*GroupNorm"
    ):
        function(x)
    assert not called and torch.equal(batch.running_mean, before)
    batch.eval()  # frozen inside a network that trains
    assert function(x).shape == (3, 4)
    function.train()
    with pytest.raises(RuntimeError, match="BatchNorm2d"):
        function(x)
    assert function.eval()(x).shape == (3, 4)
    own = AveragedFunction(network(nn.BatchNorm2d(3, track_running_stats=False)), AffineAugment(3, **DOUBLE))
    with pytest.raises(RuntimeError, match="running statistics"):
        own.eval()(x)
    with pytest.raises(RuntimeError, match="BatchNorm1d 'network'"):
        AveragedFunction(nn.BatchNorm1d(2), RotatePoints(3))(torch.randn(4, 2))
    for norm in (nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.LayerNorm((3, 4, 4))):  # of single inputs
        assert AveragedFunction(network(norm), AffineAugment(3, **DOUBLE))(x).shape == (3, 4)


class Returns(nn.Module):
    def __init__(self, what: object) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> object:
        return self.what


def average(network: nn.Module, augment: nn.Module) -> Tensor:
    return AveragedFunction(network, augment)(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: average(torch.tanh, Flips()), TypeError, "network must be a module, got builtin_function_or_method"),
        (lambda: average(nn.Flatten(), Flips), TypeError, "augment must be a module, got the type Flips; pass an instance"),
        (lambda: AveragedFunction(nn.Flatten(), Flips(), 0), ValueError, "chunk_size must be a positive integer, got 0"),
        (lambda: average(nn.Flatten(), Returns(None)), TypeError, r"augment must return a tensor \(N, S, \.\.\.\), got NoneType"),
        (lambda: average(nn.Flatten(), nn.Flatten(0)), ValueError, r"augment must return .* N = 2 .* got \(6,\)"),
        (lambda: average(nn.Flatten(), Returns(torch.zeros(2, 0, 3))), ValueError, r"got \(2, 0, 3\)"),
        (lambda: average(Returns((1,)), Flips()), TypeError, "network must return a tensor .* got tuple"),
        (lambda: average(nn.Flatten(0), Flips()), ValueError, r"network must return .* N S = 4 copies, got \(12,\)"),
    ],
)  # fmt: skip
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call()

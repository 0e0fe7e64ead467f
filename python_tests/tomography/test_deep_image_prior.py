"""Reconstructions: the loss and its steps, the best weights, and a run that goes on where it was interrupted."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from ella_cuda.tomography import LinearisedDIP, RayOperator, RayTransform, UNet
from ella_cuda.training.checkpoint import read_checkpoint, save_checkpoint
from python_tests.tomography.small import drawn, phantom, small_unet

QUIET = {"progress_bar": False}
RAYS = RayTransform(6, 4, 7)


def measured():
    y = RAYS.forward(phantom())
    return y + 0.1 * drawn(*y.shape, seed=3)


def test_steps_are_adams_on_error_and_total_variation_with_clipped_gradients():
    network, y = small_unet(), measured() * 30  # large gradients
    reference = copy.deepcopy(network)
    dip = LinearisedDIP(network, RAYS, tv_weight=0.05)
    dip.reconstruct(y, n_steps=6, lr=0.02, **QUIET)
    optimizer, losses = torch.optim.Adam(reference.parameters(), lr=0.02), []
    x, matrix = RAYS.fbp(y)[None, None], RAYS.matrix().to_dense()
    for _ in range(6):
        optimizer.zero_grad()
        image = reference(x)[0, 0]
        misfit = (matrix @ image.flatten() - y.flatten()).square().sum() / y.numel()
        steps = (image[1:] - image[:-1]).abs().sum() + (image[:, 1:] - image[:, :-1]).abs().sum()
        loss = misfit + 0.05 * steps
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
        assert norm > 1
        for p in reference.parameters():
            p.grad /= norm
        optimizer.step()
        losses.append(loss.item())
    assert dip.losses == pytest.approx(losses, rel=1e-6)


def test_the_network_ends_at_the_least_loss_and_as_it_was():
    network = small_unet().eval()
    dip = LinearisedDIP(network, RAYS)
    image = dip.reconstruct(measured(), n_steps=30, lr=0.5, **QUIET)  # jumps about
    assert min(dip.losses) < dip.losses[-1] * 0.9 and not network.training
    loss = (RAYS.forward(image) - measured()).square().mean() + 1e-4 * (
        image.diff(dim=0).abs().sum() + image.diff(dim=1).abs().sum()
    )
    assert loss.item() == pytest.approx(min(dip.losses), rel=1e-12)
    assert torch.equal(image, network(dip._x)[0, 0]) and all(p.grad is None for p in network.parameters())


def test_every_part_has_its_mode_again():
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1)).double()
    network[1].eval()
    LinearisedDIP(network, RAYS).reconstruct(measured(), n_steps=2, **QUIET)
    assert [part.training for part in network.modules()] == [True, True, False, True]


def test_data_and_input_are_kept_as_they_were():
    y, x = measured(), RAYS.fbp(measured())
    dip = LinearisedDIP(small_unet(), RAYS)
    dip.reconstruct(y, x, n_steps=2, **QUIET)
    expected = dip.linearise().hyperparameters.noise, dip.covariance()
    y.zero_(), x.zero_()
    dip.linearise()
    assert dip.hyperparameters.noise == expected[0] and torch.equal(dip.covariance(), expected[1])


def test_all_of_it_runs_in_inference_mode():
    network = small_unet()
    with torch.inference_mode():
        dip = LinearisedDIP(network, RAYS)
        dip.reconstruct(measured(), RAYS.fbp(measured()), n_steps=2, **QUIET)
        dip.linearise()
        for at in ("linear", "linear_tv", "network"):
            dip.optimize_hyperparameters(2, at=at, tv_prior=1.0, linear_steps=2, **QUIET)
        dip.sample(2)
        assert dip.log_density(phantom()).isfinite()


def test_weights_stay_within_bounds():
    network = small_unet()
    with torch.no_grad():
        network.outc.bias.fill_(2000.0)
    LinearisedDIP(network, RAYS).reconstruct(measured(), n_steps=2, **QUIET)
    assert network.outc.bias.item() <= 2000.0  # the best weights may be the first
    network = nn.Sequential(nn.Conv2d(1, 1, 1)).double()
    with torch.no_grad():
        network[0].bias.fill_(-5000.0)
    LinearisedDIP(network, RAYS).reconstruct(measured(), n_steps=3, lr=1.0, **QUIET)
    assert network[0].bias.item() >= -1000.0


class Interrupted(nn.Module):
    """A network that stops at one of its calls in training."""

    def __init__(self, network: nn.Module, at: int) -> None:
        super().__init__()
        self.network, self.left = network, at

    def forward(self, x):
        if self.training:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.network(x)


def dropping(at: int) -> Interrupted:
    torch.manual_seed(4)
    return Interrupted(UNet(channels=3, scales=2, skip_channels=(0, 2), dropout=0.2).double(), at)


def test_a_run_that_goes_on_is_one_that_was_not_interrupted(tmp_path):
    y, options = measured(), {"n_steps": 12, "lr": 0.02, "checkpoint_every": 4, **QUIET}
    torch.manual_seed(7)
    whole = LinearisedDIP(dropping(10**6), RAYS)
    whole.reconstruct(y, **options)
    torch.manual_seed(7)
    first = LinearisedDIP(dropping(9), RAYS)
    with pytest.raises(KeyboardInterrupt):
        first.reconstruct(y, checkpoint=tmp_path / "new" / "dip.pt", **options)
    torch.manual_seed(7)
    short = LinearisedDIP(dropping(10**6), RAYS)
    short.reconstruct(y, **{**options, "n_steps": 9})
    for one, other in zip(first.network.parameters(), short.network.parameters(), strict=True):
        assert torch.equal(one, other)  # the best of nine steps
    torch.manual_seed(99)
    again = LinearisedDIP(dropping(10**6), RAYS)
    with torch.no_grad():
        for p in again.network.parameters():
            p.mul_(2)
    again.reconstruct(y, checkpoint=tmp_path / "new" / "dip.pt", **options)
    assert again.losses == whole.losses and torch.equal(again.reconstruction, whole.reconstruction)
    for one, other in zip(again.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(one, other)
    calls = again.network.left
    again.reconstruct(y, checkpoint=tmp_path / "new" / "dip.pt", **options)  # it is done
    assert again.network.left == calls and again.losses == whole.losses
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"dip.pt"}


def test_checkpoints_of_others_and_damaged_ones_are_refused_and_kept(tmp_path):
    y, path = measured(), tmp_path / "dip.pt"
    LinearisedDIP(small_unet(), RAYS).reconstruct(y, n_steps=4, checkpoint=path, **QUIET)
    content = path.read_bytes()
    for other, tv_weight, steps, words in (
        (y + 1, 1e-4, 4, "of another run: data, network_input"),
        (y, 1e-3, 4, "of another run: tv_weight"),
        (y, 1e-4, 3, "has 4 steps, more than the 3"),
    ):
        with pytest.raises(ValueError, match=words):
            LinearisedDIP(small_unet(), RAYS, tv_weight=tv_weight).reconstruct(
                other, n_steps=steps, checkpoint=path, **QUIET
            )
    turned = RayTransform(6, RAYS.angles + 0.1, 7)
    with pytest.raises(ValueError, match="of another run: ray_transform"):
        LinearisedDIP(small_unet(), turned).reconstruct(y, RAYS.fbp(y), n_steps=4, checkpoint=path, **QUIET)
    assert path.read_bytes() == content
    dip = LinearisedDIP(small_unet(), RAYS)
    dip.reconstruct(y, n_steps=2, **QUIET)
    with pytest.raises(ValueError, match="is of another run"):
        dip.linearise().optimize_hyperparameters(2, checkpoint=path, **QUIET)
    save_checkpoint(path, {"epoch": 1})
    with pytest.raises(ValueError, match="is a checkpoint of something else"):
        LinearisedDIP(small_unet(), RAYS).reconstruct(y, n_steps=4, checkpoint=path, **QUIET)
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        LinearisedDIP(small_unet(), RAYS).reconstruct(y, n_steps=4, checkpoint=path, **QUIET)
    with pytest.raises(IsADirectoryError, match=r"LinearisedDIP.reconstruct: checkpoint must be a file"):
        LinearisedDIP(small_unet(), RAYS).reconstruct(y, checkpoint=tmp_path, **QUIET)


def scaled(by: float) -> RayOperator:
    return RayOperator(lambda x: by * RAYS.forward(x), lambda y: by * RAYS.adjoint(y), 6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda k: k["state"].pop("best"), "does not fit .'best'"),
        (lambda k: k["state"]["optimizer"].pop("param_groups"), "does not fit .'param_groups'"),
        (lambda k: k.update(state=5), "has no state"),
        (lambda k: k.update(settings=5), "has no settings"),
        (lambda k: k["settings"].update(lr=torch.ones(3)), "is of another run: lr"),
        (lambda k: k["settings"].update(lr=5), "is of another run: lr"),
    ],
)
def test_an_entry_of_another_form_is_named(tmp_path, kept, change, words):
    y, path, state = measured(), tmp_path / "dip.pt", copy.deepcopy(kept)
    change(state)
    save_checkpoint(path, state)
    before, dip = path.read_bytes(), LinearisedDIP(small_unet(), RAYS)
    weights = [p.detach().clone() for p in dip.network.parameters()]
    with pytest.raises(ValueError, match=words):
        dip.reconstruct(y, n_steps=4, checkpoint=path, **QUIET)
    assert path.read_bytes() == before and all(map(torch.equal, weights, dip.network.parameters()))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = tmp_path_factory.mktemp("dip") / "dip.pt"
    LinearisedDIP(small_unet(), RAYS).reconstruct(measured(), n_steps=2, checkpoint=path, **QUIET)
    return read_checkpoint(path)


def test_checkpoints_of_functions_with_the_same_shapes_are_told_apart(tmp_path):
    y, path, options = measured(), tmp_path / "dip.pt", {"n_steps": 4, **QUIET}
    x = RAYS.fbp(y)
    LinearisedDIP(small_unet(), scaled(1.0)).reconstruct(y, x, checkpoint=path, **options)
    linear = UNet(channels=3, scales=2, skip_channels=(0, 2), sigmoid=False).double()
    for network, rays in ((small_unet(2), scaled(3.0)), (linear, scaled(1.0))):
        before = copy.deepcopy(network.state_dict())
        with pytest.raises(ValueError, match=r"does not fit .*the network or ray_transform is another"):
            LinearisedDIP(network, rays).reconstruct(y, x, checkpoint=path, **options)
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    LinearisedDIP(small_unet(2), scaled(1.0)).reconstruct(y, x, checkpoint=path, **options)


class Breaks(nn.Module):
    """Whose output is not a number from some call in training on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.calls, self.after = nn.Conv2d(1, 1, 3, padding=1).double(), 0, after

    def forward(self, x):
        self.calls += self.training
        return self.conv(x) * (math.nan if self.calls > self.after and self.training else 1.0)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_best_weights():
    network, whole = Breaks(3), Breaks(99)
    dip = LinearisedDIP(network, RAYS)
    with pytest.raises(FloatingPointError, match="the loss is nan; lower lr"):
        dip.reconstruct(measured(), n_steps=9, lr=5.0, **QUIET)
    kept = LinearisedDIP(whole, RAYS)
    kept.reconstruct(measured(), n_steps=3, lr=5.0, **QUIET)
    assert min(kept.losses) < kept.losses[-1]
    assert torch.equal(network.conv.weight, whole.conv.weight)
    with pytest.raises(RuntimeError, match="call reconstruct first"):
        dip.linearise()


def test_wrong_arguments_are_refused():
    for options, words in (
        ({"tv_weight": -1.0}, "tv_weight must be positive"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"n_probes": 1.5}, "n_probes must be a positive integer"),
        ({"form": "half"}, "form must be one of 'full', 'simple'"),
        ({"method": "exact"}, "method must be one of"),
        ({"rank": -1}, "rank must be a positive integer"),
        ({"tol": math.nan}, "tol must be positive and finite"),
        ({"memory_budget": -1}, "memory_budget must be positive"),
    ):
        with pytest.raises(ValueError, match=words):
            LinearisedDIP(small_unet(), RAYS, **options)
    with pytest.raises(TypeError, match="memory_budget must be one number, got str"):
        LinearisedDIP(small_unet(), RAYS, memory_budget="2GB")
    with pytest.raises(TypeError, match=r"network must be float32 or float64, got torch\.bfloat16"):
        LinearisedDIP(small_unet().bfloat16(), RAYS)
    frozen = small_unet().requires_grad_(False)
    with pytest.raises(ValueError, match="network must have a parameter that requires a gradient"):
        LinearisedDIP(frozen, RAYS, blocks={"a": ["outc.weight"]}).reconstruct(measured(), **QUIET)
    dip, y = LinearisedDIP(small_unet(), RAYS), measured()
    for arguments, words in (
        ({"y": y[:2]}, r"y must be floating point measurements \(4, 7\), got torch.float64 \(2, 7\)"),
        ({"y": y / 0}, "y must be finite, got"),
        ({"y": y, "n_steps": 0}, "n_steps must be a positive integer"),
        ({"y": y, "lr": 0.0}, "lr must be positive and finite"),
        ({"y": y, "network_input": torch.ones(3)}, "network_input must be finite and of shape"),
        ({"y": y, "network_input": torch.ones(8, 8)}, r"network must map .* got \(1, 1, 8, 8\)"),
    ):
        with pytest.raises(ValueError, match=words):
            dip.reconstruct(**arguments, **QUIET)

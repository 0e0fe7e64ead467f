"""What users do with a network of torch's own modules, in float32 on every device, against the same in float64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import Tensor, nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace
from ella_cuda.nn import (
    CircularConv2d,
    FactoredLinear2d,
    RelaxedEquivariance,
    SparseFactoredLinear2d,
    StridedCircularConv2d,
)
from python_tests.laplace.checks import Function

CLASSES = 4


def padded(step: int) -> nn.Module:
    return Function(lambda m, x: nn.functional.pad(x, (1, 1, 1, 1), mode="circular")[:, :, ::step])


def tokens() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layers = {"embedding": nn.Embedding(7, 8), "encoder": encoder, "head": nn.Linear(8, CLASSES)}
    return Function(lambda m, x: m.head(m.encoder(m.embedding(x)).mean(1)), **layers)


def tied() -> nn.Module:
    """An embedding whose weight is the output layer's, and a layer that is called twice."""
    layers = {"embedding": nn.Embedding(CLASSES, 6), "twice": nn.Linear(6, 6), "head": nn.Linear(6, CLASSES, bias=False)}  # fmt: skip
    layers["head"].weight = layers["embedding"].weight
    return Function(lambda m, x: m.head(m.twice(m.twice(m.embedding(x)).tanh()).tanh().mean(1)), **layers)


def recurrent() -> nn.Module:
    layers = {"cell": nn.GRU(6, 5, batch_first=True), "head": nn.Linear(5, CLASSES)}
    return Function(lambda m, x: m.head(m.cell(x[:, 0])[0][:, -1]), **layers)


def conv_net(*norms: nn.Module) -> nn.Module:
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, groups=2)
    behind = nn.ReLU(), nn.MaxPool2d(2), second, nn.GELU(), nn.Flatten(), nn.Linear(4, CLASSES)
    return nn.Sequential(first, *norms, *behind)


def equivariant() -> nn.Module:
    paths = {"conv": CircularConv2d(1, 3), "f_fc": FactoredLinear2d(1, 3, 6, 6), "s_fc": SparseFactoredLinear2d(1, 3, 6, 6)}  # fmt: skip
    behind = StridedCircularConv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)
    return nn.Sequential(RelaxedEquivariance(paths), nn.ReLU(), *behind)


def resnet() -> nn.Module:
    """The stem and two of the stages, the second with a path of its own around its block."""
    whole = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    stem = nn.Conv2d(1, 64, 3, 2, 1, bias=False), whole.bn1, whole.relu, whole.maxpool
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)
    model = nn.Sequential(*stem, whole.layer1, whole.layer2, *head)
    for block in model.modules():
        if isinstance(block, nn.BatchNorm2d):
            block.running_mean.uniform_(-0.1, 0.1)
            block.running_var.uniform_(0.5, 2)
    return model


NETWORKS = {
    "linear layers": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "convolutions": conv_net,
    "norms": lambda: conv_net(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm([4, 6, 6])),
    "circular padding by hand": lambda: nn.Sequential(
        padded(1), nn.Conv2d(1, 4, 3), nn.ReLU(), padded(2), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(36, CLASSES)
    ),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 2, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, 2), nn.Flatten(), nn.Linear(72, CLASSES)
    ),
    "own layers": equivariant,
    "attention": tokens,
    "tied": tied,
    "recurrent": recurrent,
    "resnet": resnet,
}


def data(name: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    count, side = 24, 16 if name == "resnet" else 6
    tokens = {"attention": 7, "tied": CLASSES}
    x = torch.randint(tokens[name], (count, 5)) if name in tokens else torch.randn(count, 1, side, side)
    return x, torch.randint(CLASSES, (count,))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().eval()


def on(
    device: torch.device, dtype: torch.dtype, model: nn.Module, x: Tensor, y: Tensor
) -> tuple[nn.Module, Tensor, Tensor]:
    moved = x.to(device, dtype) if x.is_floating_point() else x.to(device)
    return copy.deepcopy(model).to(device, dtype), moved, y.to(device)


def both(device: torch.device, name: str) -> list[tuple[nn.Module, Tensor, Tensor]]:
    model, (x, y) = model_of(name), data(name)
    return [on(device, torch.float32, model, x, y), on(torch.device("cpu"), torch.float64, model, x, y)]


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-3) -> None:
    found, wanted = found.detach().cpu().double(), wanted.detach().double()
    assert float((found - wanted).norm()) <= tolerance * float(wanted.norm())


def fitted(model: nn.Module, x: Tensor, y: Tensor, **settings: object) -> KronLaplace:
    return KronLaplace(model, prior_precision=0.5, unknown="diagonal", **settings).fit(TensorLoader(x, y, batch_size=9))


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_evidence_and_its_gradient(device, name, approximation):
    values = []
    for model, x, y in both(device, name):
        la = fitted(model, x, y, approximation=approximation)
        precision = la.prior_precision.clone().requires_grad_()
        evidence = la.log_marginal_likelihood(precision)
        (slope,) = torch.autograd.grad(evidence, precision)
        values.append((evidence, slope, torch.tensor(list(la.effective_parameters().values()))))
        assert la.prior_precision.device.type == x.device.type
    for found, wanted in zip(*values, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("name", ["convolutions", "own layers", "attention"])
def test_sampled_columns(device, name):
    """Output sides of sampled columns are right on average, here over copies of the data, and the same for a generator of the same state."""
    (model, x, y), (reference, x64, y64) = both(device, name)
    draws, fits = 40, []
    repeated = [t.repeat(draws, *[1] * (t.dim() - 1)) for t in (x, y)]
    for _ in range(2):
        generator = torch.Generator(device=device).manual_seed(0)
        fits.append(KronLaplace(model, fisher="mc").fit([repeated], generator=generator))
    for key, factor in KronLaplace(reference).fit([(x64, y64)]).factors.items():
        sides = fits[0].factors[key].outputs / draws, factor.outputs
        trace, exact = (float(side.diagonal(dim1=-2, dim2=-1).sum()) for side in sides)
        assert abs(trace - exact) <= 0.25 * exact + 1e-12, key
    assert_close(*(la.log_marginal_likelihood().cpu() for la in fits), 1e-6)


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"resnet"}))
def test_predictions(device, name):
    values = []
    for model, x, y in both(device, name):
        la = fitted(model, x, y)
        some = x[:5]
        found = [la(some), la(some, link_approx="bridge"), la.functional_variance(some), la.functional_covariance(some)]
        values.append([*found, la.posterior_precision.diag(-1)])
        draws = la(some, link_approx="mc", n_samples=20, generator=torch.Generator(device=x.device).manual_seed(0))
        assert draws.device.type == x.device.type and torch.allclose(draws.sum(1), draws.new_ones(()))
        assert la.sample(2).shape == (2, la.n_params)
    for found, wanted in zip(*values, strict=True):
        assert_close(found, wanted, 5e-3)


@pytest.mark.parametrize("method", ["marglik", "mackay", "gridsearch"])
def test_precisions_are_optimised(device, method):
    values = []
    for model, x, y in both(device, "convolutions"):
        la = fitted(model, x, y)
        grid = {"val_loader": [(x, y)], "prior_structure": "scalar", "grid_size": 5}
        settings = grid if method == "gridsearch" else {}
        values.append(la.optimize_prior_precision(method=method, n_steps=10, **settings))
    assert_close(*values, tolerance=1e-2)


@pytest.mark.parametrize("make", [DiagLaplace, FullLaplace, SubnetLaplace], ids=lambda make: make.__name__)
def test_other_posteriors(device, make):
    values = []
    for model, x, y in both(device, "convolutions"):
        chosen = {"subnetwork_indices": torch.arange(0, 40, 3)} if make is SubnetLaplace else {}
        la = make(model, prior_precision=0.5, **chosen).fit([(x, y)])
        values.append([la.log_marginal_likelihood(), la(x[:5]), la.functional_variance(x[:5])])
        left = la.leave_one_out()
        values[-1] += [left.log_density.nan_to_num(0.0), left.leverage, left.influence.nan_to_num(0.0)]
    for found, wanted in zip(*values, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("likelihood", ["regression", "poisson", "binary"])
def test_likelihoods(device, likelihood):
    values = []
    for model, x, y in both(device, "convolutions"):
        targets = torch.stack([(y == k).to(x.dtype) for k in range(CLASSES)], 1)
        la = KronLaplace(model, likelihood, prior_precision=0.5).fit([(x, targets)])
        predicted = la(x[:5])
        values.append([la.log_marginal_likelihood(), *((predicted,) if isinstance(predicted, Tensor) else predicted)])
    for found, wanted in zip(*values, strict=True):
        assert_close(found, wanted)


def test_a_fit_moves_between_devices(device):
    (model, x, y), (reference, x64, y64) = both(device, "convolutions")
    la, kept = fitted(model, x, y), fitted(reference, x64, y64)
    cpu = KronLaplace(copy.deepcopy(model).cpu(), unknown="diagonal")
    cpu.load_state_dict(la.state_dict())
    back = KronLaplace(model, unknown="diagonal")
    back.load_state_dict(cpu.state_dict())
    for one, images in ((cpu, x.cpu()), (back, x)):
        assert_close(one.log_marginal_likelihood(), kept.log_marginal_likelihood())
        assert_close(one(images[:5]), kept(x64[:5]), 5e-3)


@pytest.mark.parametrize("name", ["own layers", "norms"])
def test_training_by_evidence(device, name):
    """Training is chaotic in float32, so that steps are few."""
    values = []
    for model, x, y in both(device, name):
        loader = TensorLoader(x, y, batch_size=12)
        schedule = {"n_epochs": 4, "n_epochs_burnin": 1, "marglik_frequency": 2, "n_hypersteps": 5}
        la, _, margliks, losses = marglik_training(
            model, loader, **schedule, optimizer_kwargs={"lr": 1e-4}, progress_bar=False
        )
        values.append([torch.tensor(margliks), torch.tensor(losses), la.prior_precision])
    for found, wanted in zip(*values, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("name", ["convolutions", "attention"])
def test_batches_of_any_size(device, name, size):
    values = []
    for model, x, y in both(device, name):
        la = KronLaplace(model, prior_precision=0.5).fit(TensorLoader(x[:6], y[:6], batch_size=size))
        values.append(la.log_marginal_likelihood())
    assert_close(*values)

"""The plug for laplace-torch, against the installed laplace-torch, dense algebra and our own approximation."""

from __future__ import annotations

import copy
import importlib
import io
import sys
import warnings
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.utils.data import DataLoader, TensorDataset

from ella_cuda.laplace import KronLaplace
from ella_cuda.nn import FactoredLinear2d
from python_tests.laplace.checks import Function

laplace = pytest.importorskip("laplace", exc_type=ImportError)
pytest.importorskip("ella_cuda.compat.laplace", exc_type=ImportError)

from laplace.curvature import CurvlinopsGGN  # noqa: E402

from ella_cuda.compat.laplace import BlockKron, EllaGGN, EllaKronLaplace  # noqa: E402

CLASSES, N = 3, 11
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def convolutions(pad: bool = True) -> nn.Sequential:
    explicit = [Function(lambda m, x: F.pad(x, (1, 1, 1, 1), mode="circular")), nn.Conv2d(2, 3, 3)]
    first = explicit if pad else [nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")]
    rest = nn.Conv2d(3, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    return nn.Sequential(nn.Sequential(*first), nn.ReLU(), *rest)


def attention() -> nn.Module:
    """An embedding, an attention, a class token that no layer has, a head."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.embedding(x) + m.token
        return m.head(m.norm(m.attention(x, x, x, need_weights=False)[0]).mean(1))

    parts = {"token": nn.Parameter(torch.randn(1, 1, 4)), "embedding": nn.Embedding(6, 4)}
    parts |= {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "norm": nn.LayerNorm(4)}
    return Function(forward, **parts, head=nn.Linear(4, CLASSES))


def tied() -> nn.Module:
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4), "head": nn.Linear(4, CLASSES)}
    layers["two"].weight = layers["one"].weight
    return Function(lambda m, x: m.head(torch.tanh(m.two(torch.tanh(m.one(x))))), **layers)


def normed() -> nn.Sequential:
    layers = nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    layers[1].running_mean.normal_()
    return nn.Sequential(*layers)


def factored() -> nn.Sequential:
    return nn.Sequential(FactoredLinear2d(2, 3, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))


NETWORKS = {"factored": factored, "grouped, normed": normed, "attention": attention, "tied": tied}


def case(name: str, likelihood: str = "classification"):
    """A network in float64, inputs and targets, settings."""
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    x = torch.randn(N, 2, 6, 6, dtype=torch.float64)
    if name == "attention":
        x = torch.randint(6, (N, 5))
    if name == "tied":
        x = x[:, 0, 0, :4]
    settings = {"unknown": "diagonal"} if name == "attention" else {}
    return model, x, targets(likelihood), settings


def targets(likelihood: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randint(CLASSES, (N,)) if likelihood == "classification" else torch.randn(N, CLASSES, dtype=dtype)


def loader(x: Tensor, y: Tensor, size: int = 4) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=size)


def plugged(model: nn.Module, likelihood: str = "classification", **kwargs: object) -> EllaKronLaplace:
    la = laplace.Laplace(model, likelihood, "all", "ella_kron", **kwargs)
    assert type(la) is EllaKronLaplace
    return la


def fitted(name: str, likelihood: str = "classification", **kwargs: object):
    model, x, y, settings = case(name, likelihood)
    la = plugged(model, likelihood, backend_kwargs=settings, **kwargs)
    la.fit(loader(x, y))
    return la, x, y


def dense_curvature(la: KronLaplace) -> Tensor:
    """Blocks of the factors, put to their parameters' elements one after the other."""
    parts = []
    for factor in la.factors.values():
        where = factor.shape.to_blocks(torch.arange(factor.shape.numel)).flatten(1)
        part = torch.zeros(factor.shape.numel, factor.shape.numel, dtype=torch.float64)
        for index, block in zip(where, factor.to_dense(), strict=True):
            part[index[:, None], index] = block
        parts.append(part)
    return torch.block_diag(*parts)


# the backend ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kfac", [{}, {"kfac_approx": "reduce"}], ids=["expand", "reduce"])
def test_factors_of_weights_are_those_of_curvlinops(likelihood, dtype, rtol, kfac):
    torch.manual_seed(0)
    model, x = convolutions().to(dtype), torch.randn(N, 2, 6, 6, dtype=dtype)
    data = loader(x, targets(likelihood, dtype))
    ours, theirs = (
        laplace.KronLaplace(model, likelihood, backend=backend, asdl_fisher_kwargs=dict(kfac))
        for backend in (EllaGGN, CurvlinopsGGN)
    )
    ours.fit(data)
    theirs.fit(data)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=rtol, atol=0)
    found, expected = ours.H_facs.kfacs, theirs.H_facs.kfacs
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(found)
    exact_there = {"5.bias", "7.bias", "4.bias", "6.bias"}  # one position
    for name, mine, other in zip(names, found, expected, strict=True):
        assert [f.dtype for f in mine] == [dtype] * len(mine)
        assert [f.shape for f in mine] == [f.shape for f in other]
        if len(mine) == 2:
            mine, other = [torch.kron(*mine)], [torch.kron(*other)]
            if likelihood == "classification":  # of a regression they share their factor 1/2 out to both sides
                mine, other = mine + found[names.index(name)], other + expected[names.index(name)]
        elif name not in exact_there:
            continue
        for f, g in zip(mine, other, strict=True):
            assert (f - g).abs().max() <= rtol * g.abs().max(), name


def test_biases_and_circular_padding_have_the_exact_convention():
    """Weights as with explicit padding; biases the block of the generalised Gauss-Newton matrix."""
    torch.manual_seed(0)
    model, explicit = convolutions(pad=False).double(), convolutions().double()
    for own, other in zip(model.parameters(), explicit.parameters(), strict=True):
        other.data = own.data
    x, y = torch.randn(N, 2, 6, 6, dtype=torch.float64), targets("classification")
    _, found = EllaGGN(model, "classification").kron(x, y, N)
    _, expected = CurvlinopsGGN(explicit, "classification").kron(x, y, N)
    torch.testing.assert_close(found.kfacs[0], expected.kfacs[0], rtol=1e-9, atol=1e-12)
    _, wrong = CurvlinopsGGN(model, "classification").kron(x, y, N)
    assert (wrong.kfacs[0][1] - found.kfacs[0][1]).abs().max() > 0.01 * found.kfacs[0][1].abs().max()
    name, bias = "0.0.bias", dict(model.named_parameters())["0.0.bias"].detach()
    block = torch.zeros(3, 3, dtype=torch.float64)
    for one, label in zip(x, y, strict=True):

        def outputs(b: Tensor, one: Tensor = one) -> Tensor:
            return functional_call(model, {name: b}, one[None])[0]

        curvature = hessian(lambda f, label=label: F.cross_entropy(f, label))(outputs(bias).detach())
        j = jacrev(outputs)(bias).detach()
        block += j.T @ curvature @ j
    torch.testing.assert_close(found.kfacs[1], [block], rtol=1e-9, atol=1e-12)


def test_transposed_convolutions_and_norms_are_held():
    """``Kron.to_matrix`` of one batch is our curvature, in the parameters' order."""
    torch.manual_seed(0)
    layers = nn.ConvTranspose2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, CLASSES)
    model = nn.Sequential(*layers).double().eval()
    x, y = torch.randn(N, 2, 3, 3, dtype=torch.float64), targets("classification")
    _, found = EllaGGN(model, "classification").kron(x, y, N)
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(found.to_matrix(), dense_curvature(la), rtol=1e-9, atol=1e-12)
    peer = laplace.KronLaplace(model, "classification", backend=EllaGGN)
    peer.fit(loader(x, y))
    torch.testing.assert_close(peer.log_marginal_likelihood(), la.log_marginal_likelihood(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("embedding_first", [True, False])
def test_an_embedding_that_is_the_output_layer_too_is_held(embedding_first):
    """Its blocks alone could not be."""
    torch.manual_seed(0)
    layers = {"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
    layers["head"].weight = layers["embedding"].weight
    layers = layers if embedding_first else dict(reversed(layers.items()))
    model = Function(lambda m, x: m.head(torch.tanh(m.embedding(x).mean(1))), **layers).double()
    x, y = torch.randint(6, (N, 3)), torch.randint(6, (N,))
    _, found = EllaGGN(model, "classification").kron(x, y, N)
    torch.testing.assert_close(
        found.to_matrix(), dense_curvature(KronLaplace(model).fit([(x, y)])), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize(
    ("subset", "structure"),
    [("last_layer", "kron"), ("last_layer", "full"), ("last_layer", "diag"), ("all", "full"), ("all", "diag")],
)
def test_the_last_layer_and_other_structures_are_those_of_the_interface(likelihood, subset, structure):
    torch.manual_seed(0)
    model, x = convolutions().double(), torch.randn(N, 2, 6, 6, dtype=torch.float64)
    data = loader(x, targets(likelihood))
    found, expected = (
        laplace.Laplace(model, likelihood, subset, structure, backend=backend) for backend in (EllaGGN, CurvlinopsGGN)
    )
    found.fit(data)
    expected.fit(data)
    rtol = 1e-5 if structure == "full" else 1e-9  # their backend multiplies the full matrix by a float32 identity
    if subset == "all":
        assert (found.H - expected.H).abs().max() <= rtol * expected.H.abs().max()
    torch.testing.assert_close(found(x), expected(x), rtol=rtol, atol=rtol * 1e-3)
    torch.testing.assert_close(
        found.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=rtol, atol=1e-9
    )


def test_one_sampled_column_has_the_exact_factor_for_mean():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, CLASSES)).double(), torch.randn(N, 4, dtype=torch.float64)
    y = targets("classification")
    _, exact = EllaGGN(model, "classification").kron(x, y, N)
    sampled = EllaGGN(model, "classification", stochastic=True)
    draws = [sampled.kron(x, y, N)[1].kfacs[0] for _ in range(100)]
    assert all(torch.equal(a, draws[0][1]) for _, a in draws)
    assert torch.linalg.matrix_rank(draws[0][0]) == CLASSES - 1  # N columns, whose entries sum to zero
    b = torch.stack([b for b, _ in draws])
    z = (b.mean(0) - exact.kfacs[0][0]) / (b.std(0) / len(b) ** 0.5)
    assert b.std(0).min() > 0
    assert z.abs().max() < 4


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_several_sampled_columns_are_the_mean_of_single_ones(likelihood):
    """Draws follow each other in torch's generator; their mean comes to the exact factor."""
    torch.manual_seed(0)
    model, x, y = convolutions().double(), torch.randn(N, 2, 6, 6, dtype=torch.float64), targets(likelihood)
    backend = EllaGGN(model, likelihood, stochastic=True)

    def factors(**kwargs: int) -> list[list[Tensor]]:
        return backend.kron(x, y, N, **kwargs)[1].kfacs

    torch.manual_seed(1)
    single = [factors() for _ in range(3)]
    torch.manual_seed(1)
    found = factors(mc_samples=3)
    for side, *parts in zip(*([side for pair in one for side in pair] for one in (found, *single)), strict=True):
        torch.testing.assert_close(side, torch.stack(parts).mean(0), rtol=1e-9, atol=1e-12)
    many = EllaGGN(model, likelihood, stochastic=True, num_samples=4000)
    _, exact = EllaGGN(model, likelihood).kron(x, y, N)
    for parts, expected in zip(many.kron(x, y, N)[1].kfacs, exact.kfacs, strict=True):
        assert (parts[0] - expected[0]).norm() < 0.05 * expected[0].norm()  # 1 / sqrt(4000 N) = 0.005 times the spread


@pytest.mark.parametrize("other", [False, True], ids=["one entry", "more entries"])
def test_batches_that_are_mappings(other):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    x, mask = torch.randn(N, 4, dtype=torch.float64), torch.rand(N, 1, dtype=torch.float64)
    y = targets("classification")
    whole = Function(lambda m, batch: m.inner(batch["x"] * batch["mask"] if other else batch["x"]), inner=inner)
    rows = [{"x": a, "y": b} | ({"mask": m} if other else {}) for a, m, b in zip(x, mask, y, strict=True)]
    mappings = DataLoader(rows, batch_size=4)
    pairs = loader(x * mask if other else x, y)
    keys = {"dict_key_x": "x", "dict_key_y": "y"}
    expected = KronLaplace(inner).fit(pairs)
    for structure, extra in (("kron", {"backend": EllaGGN}), ("ella_kron", {})):
        la = laplace.Laplace(whole, "classification", "all", structure, **keys, **extra)
        la.fit(mappings)
        torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-9, atol=0)
        batch = next(iter(mappings))
        inputs = {key: value for key, value in batch.items() if key != "y"}
        torch.testing.assert_close(la(inputs), expected((x * mask if other else x)[:4]), rtol=1e-9, atol=0)
        torch.testing.assert_close(la(batch), la(inputs), rtol=1e-12, atol=0)
    again = plugged(whole, **keys)
    again.load_state_dict(la.state_dict())
    torch.testing.assert_close(again(inputs), la(inputs), rtol=0, atol=0)
    with pytest.raises(ValueError, match="batches are mappings"):
        la.fit(pairs, override=False)


@pytest.mark.parametrize(
    ("name", "named"), [("factored", "0.weight_in"), ("grouped, normed", "0.weight"), ("attention", "embedding.weight")]
)
def test_what_their_factors_cannot_hold_is_refused_by_name(name, named):
    model, x, y, settings = case(name)
    with pytest.raises(ValueError, match=rf"{named} \(\d+ blocks .*hessian_structure=\"ella_kron\""):
        EllaGGN(model, "classification", **settings).kron(x, y, N)


def test_arguments_that_do_not_fit_are_refused():
    model, x, y, _ = case("tied")
    with pytest.raises(TypeError, match=r"'fisher'.*stochastic"):
        EllaGGN(model, "classification", fisher="mc")
    with pytest.raises(ValueError, match="requires_grad_"):
        EllaGGN(model, "classification", unknown="freeze")
    with pytest.raises(ValueError, match=r"mc_samples must be 1.*got 3.*stochastic=True"):
        EllaGGN(model, "classification").kron(x, y, N, mc_samples=3)
    with pytest.raises(ValueError, match=r"mc_samples must be a positive int.*got 0"):
        EllaGGN(model, "classification", stochastic=True).kron(x, y, N, mc_samples=0)
    with pytest.raises(TypeError, match="'kfac'"):
        EllaGGN(model, "classification").kron(x, y, N, kfac="reduce")
    with pytest.raises(ValueError, match="damping must be False"):
        plugged(model, damping=True)
    with pytest.raises(ValueError, match="backend_kwargs"):
        plugged(model, asdl_fisher_kwargs={"a": 1})
    with pytest.raises(AttributeError, match="not fitted"):
        plugged(model).log_marginal_likelihood()


@pytest.mark.parametrize("version", [None, "0.2.2"])
def test_without_laplace_torch_the_extra_is_named(monkeypatch, version):
    def found(name: str) -> str:
        assert name == "laplace-torch"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    module = sys.modules["ella_cuda.compat.laplace"]
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", found)
        patch.delitem(sys.modules, "ella_cuda.compat.laplace")
        with pytest.raises(ImportError, match=rf"ella_cuda\[laplace\]'.*{version or 'not installed'}"):
            importlib.import_module("ella_cuda.compat.laplace")
    assert sys.modules["ella_cuda.compat.laplace"] is module


# the structure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_algebra_is_that_of_the_dense_matrix(name):
    la, _, _ = fitted(name)
    count = len(la.params)
    delta = torch.linspace(0.5, 2.0, count, dtype=torch.float64)
    h = dense_curvature(la.ella)
    sizes = torch.tensor([p.numel() for p in la.params])
    dense = 3.0 * h + delta.repeat_interleave(sizes).diag()
    kron = la.H * 3.0 + 0.25 * delta + 0.75 * delta
    assert isinstance(kron, BlockKron) and len(kron) == count and len(dense) == la.n_params
    values, vectors = torch.linalg.eigh(dense)
    w = torch.randn(2, 3, la.n_params, dtype=torch.float64)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)

    for exponent in (-1.0, -0.5, 1.0):
        power = vectors * values.pow(exponent) @ vectors.T
        close(kron.bmm(w, exponent), w @ power)
        close(kron.bmm(w[0, 0], exponent), power @ w[0, 0])
        close(kron.diag(exponent), power.diagonal())
        close(kron.to_matrix(exponent), power)
    close(kron.inv_square_form(w), w @ torch.linalg.inv(dense) @ w.mT)
    close(kron.inv_square_form(w.clone().requires_grad_()), w @ torch.linalg.inv(dense) @ w.mT)
    close(kron.logdet(), values.log().sum())
    close((2.0 * la.H.decompose() + 1.0).logdet(), torch.logdet(2 * h + torch.eye(len(h), dtype=torch.float64)))
    for wrong in (la.H + torch.ones(count + 1), la.H * torch.ones(2)):
        with pytest.raises(RuntimeError):
            wrong.logdet()


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("name", NETWORKS)
def test_evidence_and_its_gradients_are_ours(name, likelihood):
    la, x, y = fitted(name, likelihood, temperature=1.5, prior_mean=0.1)
    model, *_, settings = case(name, likelihood)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), la.params, strict=True))
    ours = KronLaplace(model, likelihood, temperature=1.5, prior_mean=0.1, **settings).fit(loader(x, y, N))
    for structure in (1, len(la.params)):
        precision = torch.linspace(0.5, 2.0, structure, dtype=torch.float64)
        sigma = None if likelihood == "classification" else torch.tensor(0.7, dtype=torch.float64)
        given = [v.clone().requires_grad_() for v in (precision, sigma) if v is not None]
        wanted = [v.clone().requires_grad_() for v in (precision, sigma) if v is not None]
        found, expected = la.log_marginal_likelihood(*given), ours.log_marginal_likelihood(*wanted)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        slopes = torch.autograd.grad(found, given), torch.autograd.grad(expected, wanted)
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)
    parts = la.log_likelihood - 0.5 * (la.log_det_posterior_precision - la.log_det_prior_precision + la.scatter)
    torch.testing.assert_close(parts, found, rtol=1e-9, atol=0)
    theirs = la.posterior_precision.logdet()  # what laplace-torch's own property reads
    torch.testing.assert_close(theirs, la.log_det_posterior_precision, rtol=1e-9, atol=0)


def test_the_same_numbers_as_laplace_torch_where_conventions_agree():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    x, precision = torch.randn(N, 4, dtype=torch.float64), torch.tensor([0.3, 0.5, 2.0, 4.0], dtype=torch.float64)
    for likelihood in ("classification", "regression"):
        data = loader(x, targets(likelihood))
        sigma = 0.6 if likelihood == "regression" else 1.0
        kwargs = {"prior_precision": precision, "sigma_noise": sigma, "temperature": 0.5}
        found, expected = plugged(model, likelihood, **kwargs), laplace.KronLaplace(model, likelihood, **kwargs)
        found.fit(data)
        expected.fit(data)
        for attribute in ("log_likelihood", "scatter", "log_det_ratio", "log_det_prior_precision"):
            torch.testing.assert_close(getattr(found, attribute), getattr(expected, attribute), rtol=1e-9, atol=1e-9)
        v = found.mean + 0.1 * torch.randn(found.n_params, dtype=torch.float64)
        for normalized in (True, False):
            torch.testing.assert_close(found.log_prob(v, normalized), expected.log_prob(v, normalized))
        links = ("probit", "bridge", "bridge_norm") if likelihood == "classification" else ("probit",)
        for link in links:
            torch.testing.assert_close(found(x, link_approx=link), expected(x, link_approx=link), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found(x, joint=True), expected(x, joint=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_are_those_of_the_dense_posterior(name):
    la, x, _ = fitted(name, "regression", prior_precision=0.7, sigma_noise=0.5)
    theta = {n: p.detach() for n, p in la.model.named_parameters()}
    j = jacrev(lambda t: functional_call(la.model, t, x))(theta)
    j = torch.cat([v.flatten(2) for v in j.values()], 2)  # (N, K, P)
    covariance = torch.linalg.inv(dense_curvature(la.ella) / 0.25 + 0.7 * torch.eye(la.n_params, dtype=torch.float64))
    mean, variance = la(x)
    torch.testing.assert_close(mean, la.model(x).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(variance, j @ covariance @ j.mT, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(la.functional_variance(j), variance, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(la(x, diagonal_output=True)[1], variance.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=0)
    mean, joint = la(x, joint=True)
    rows = j.flatten(0, 1)
    assert mean.shape == (N * CLASSES,)
    torch.testing.assert_close(joint, rows @ covariance @ rows.T, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(la.functional_covariance(j), joint, rtol=1e-9, atol=1e-10)


def test_samples_are_the_generators():
    la, x, _ = fitted("tied", prior_precision=5.0)
    for how in ({"link_approx": "mc"}, {"pred_type": "nn", "link_approx": "mc"}):
        found = [la(x, generator=torch.Generator().manual_seed(s), n_samples=4, **how) for s in (3, 3, 4)]
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
        torch.testing.assert_close(found[0].sum(1), torch.ones(N, dtype=torch.float64))
    for pred_type in ("glm", "nn"):
        assert la.functional_samples(x, pred_type, n_samples=3).shape == (3, N, CLASSES)
        assert la.predictive_samples(x, pred_type, n_samples=3).sum(2).allclose(torch.ones(3, N, dtype=torch.float64))
    values = la.sample(3, torch.Generator().manual_seed(0))
    each = torch.stack([la.log_prob(value) for value in values])
    torch.testing.assert_close(la.log_prob(values), each)
    gaussian = torch.distributions.MultivariateNormal(la.mean, precision_matrix=la.posterior_precision.to_matrix())
    torch.testing.assert_close(each, gaussian.log_prob(values), rtol=1e-9, atol=1e-8)


def test_outputs_at_positions_are_predicted_by_the_approximation_inside():
    model = nn.Linear(4, 3).double()
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    la = plugged(model)
    la.fit(loader(x, torch.randint(3, (6, 2))))
    with pytest.raises(ValueError, match=r"predicts outputs \(N, K\), the model's are \(6, 2, 3\); the attribute ella"):
        la(x)
    assert la.ella(x).shape == (6, 2, 3)


def test_gradients_at_the_inputs():
    model, x, y, _ = case("tied", "regression")
    la = plugged(model, "regression", enable_backprop=True)
    la.fit(loader(x, y))
    plain = plugged(model, "regression")
    plain.fit(loader(x, y))
    z = x[:2].clone().requires_grad_()
    mean, variance = la(z)
    torch.testing.assert_close((mean, variance), plain(x[:2]), rtol=1e-9, atol=1e-10)
    (found,) = torch.autograd.grad(variance.sum(), z)
    step = torch.zeros_like(x[:2])
    step[1, 2] = 1e-5
    slope = (plain(x[:2] + step)[1].sum() - plain(x[:2] - step)[1].sum()) / 2e-5
    torch.testing.assert_close(found[1, 2].detach(), slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_prior_precisions_are_tuned(name):
    la, x, y = fitted(name)
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(method="marglik", prior_structure="layerwise", n_steps=30)
    assert la.prior_precision.shape == (len(la.params),)
    assert la.log_marginal_likelihood().item() > before
    seen: list[tuple[float, float]] = []

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        value = F.nll_loss(found.log(), wanted)
        seen.append((la.prior_precision.item(), value.item()))
        return value

    la.optimize_prior_precision(method="gridsearch", val_loader=loader(x, y), grid_size=4, loss=loss)
    assert len({value for _, value in seen}) == 4
    assert la.prior_precision.item() == min(seen, key=lambda pair: pair[1])[0]


def test_training_by_the_evidence():
    for likelihood in ("classification", "regression"):
        model, x, y, _ = case("factored", likelihood)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la, model, margliks, losses = laplace.marglik_training(
                model, loader(x, y), likelihood, "ella_kron", n_epochs=6, n_hypersteps=3, optimizer_kwargs={"lr": 1e-2}
            )
        assert type(la) is EllaKronLaplace
        assert len(margliks) == 18
        assert len(losses) == 6
        assert margliks[-1] < margliks[0]
        torch.testing.assert_close(la.mean, nn.utils.parameters_to_vector(model.parameters()).detach())
        precision = la.prior_precision.detach()
        sigma = la.sigma_noise.item()
        expected = KronLaplace(model, likelihood, prior_precision=precision, sigma_noise=sigma).fit(loader(x, y))
        found = la.log_marginal_likelihood()
        torch.testing.assert_close(found, expected.log_marginal_likelihood(), rtol=1e-9, atol=0)


# fits and files -------------------------------------------------------------------------------------------------------


def test_a_fit_reads_the_loader_once_and_can_be_added_to():
    model, x, y, _ = case("grouped, normed")
    whole, parts = plugged(model), plugged(model)
    model.train()
    whole.fit(iter([(x, y)]))
    assert not model.training
    assert whole.n_data == N
    parts.fit(loader(x[:5], y[:5]))
    parts.fit(loader(x[5:], y[5:]), override=False)
    assert parts.n_data == N
    torch.testing.assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-9, atol=0)
    parts.fit(loader(x[:5], y[:5]))
    assert parts.n_data == 5
    with pytest.raises(ValueError, match="no data"):
        parts.fit([])
    with pytest.raises(AttributeError, match="not fitted"):
        parts(x)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_files(tmp_path, name, likelihood):
    la, x, y = fitted(name, likelihood)
    la.log_marginal_likelihood(torch.full((len(la.params),), 3.0, dtype=torch.float64, requires_grad=True))
    torch.save(la.state_dict(), tmp_path / "la.pt")
    model, *_, settings = case(name, likelihood)
    other = plugged(model, likelihood, backend_kwargs=settings)
    other.load_state_dict(torch.load(tmp_path / "la.pt", weights_only=True))
    torch.testing.assert_close(other(x), la(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(other.log_marginal_likelihood(), la.log_marginal_likelihood(), rtol=1e-12, atol=0)
    torch.testing.assert_close(*(one.sample(2, torch.Generator().manual_seed(0)) for one in (other, la)))
    assert (other.n_data, other.n_outputs, other.loss) == (la.n_data, la.n_outputs, la.loss)
    other.fit(loader(x, y), override=False)
    assert other.n_data == 2 * N


def test_the_loss_is_that_of_the_data_at_any_temperature():
    for likelihood in ("classification", "regression"):
        la, x, y = fitted("tied", likelihood, temperature=1.5)
        f = la.model(x).detach()
        expected = F.cross_entropy(f, y, reduction="sum") if y.dim() == 1 else 0.5 * F.mse_loss(f, y, reduction="sum")
        for _ in range(2):  # after the evidence, which has the temperature
            torch.testing.assert_close(la.loss, expected, rtol=1e-12, atol=0)
            la.log_marginal_likelihood()
            la.fit(loader(x, y))


def test_states_that_do_not_fit_change_nothing():
    la, x, _ = fitted("tied")
    before = la(x)
    model, _, _, _ = case("tied")
    peer = laplace.DiagLaplace(model, "classification", backend=EllaGGN)
    peer.fit(loader(x, targets("classification")))
    sampled = plugged(model, backend_kwargs={"stochastic": True}, prior_precision=9.0)
    sampled.fit(loader(x, targets("classification")))
    for state, words in ((peer.state_dict(), "'DiagLaplace'"), (sampled.state_dict(), "fisher is 'mc'")):
        with pytest.raises(ValueError, match=words):
            la.load_state_dict(state)
        torch.testing.assert_close(la(x), before, rtol=0, atol=0)


def test_copies_are_independent():
    la, x, _ = fitted("factored")
    other = copy.deepcopy(la)
    torch.save(la.state_dict(), io.BytesIO())
    other.prior_precision = 9.0
    assert not torch.allclose(other(x), la(x))
    assert la.prior_precision.item() == 1


def test_the_prior_is_there_before_a_fit_and_a_clone_stays_after_the_next():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    la = laplace.Laplace(model, "regression", "all", "ella_kron", prior_precision=0.3)
    value = torch.randn(26).double()
    torch.testing.assert_close(la.log_prob(value), torch.distributions.Normal(0.0, 0.3**-0.5).log_prob(value).sum())
    la.fit([(data, data[:, :2])])
    before, clone = la.H.to_matrix(), la.H.clone()
    la.fit([(data, data[:, :2])], override=False)
    torch.testing.assert_close(clone.to_matrix(), before, rtol=0, atol=0)
    torch.testing.assert_close(la.H.to_matrix(), 2 * before)

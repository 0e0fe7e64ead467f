"""Curvature of averaged functions: means over copies before outer products, exact Jacobians and blocks, refusals."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.laplace import FullLaplace, KronLaplace, TangentModel
from ella_cuda.laplace.factors import with_checksum
from ella_cuda.nn import FactoredLinear2d, GroupConv2d, GroupLift, SparseConv2d, SparseFactoredLinear2d
from python_tests.laplace.checks import Function, assert_same_factors
from python_tests.laplace.jacobians import Scaled

SIZE, CLASSES, COPIES = 6, 3, 4


class Same(nn.Module):
    """Copies that are all the image."""

    def __init__(self, n_samples: int) -> None:
        super().__init__()
        self.n_samples = n_samples

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None].expand(-1, self.n_samples, *x.shape[1:])


def twice() -> nn.Module:
    """One layer on two parts of the image, and a layer of two inputs."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        one, two = x.flatten(1).chunk(2, 1)
        return m.bilinear(torch.tanh(m.linear(one)), torch.tanh(m.linear(two)))

    return Function(forward, linear=nn.Linear(SIZE * SIZE // 2, 4), bilinear=nn.Bilinear(4, 4, CLASSES))


def sequence() -> nn.Module:
    """Rows of the image as a sequence: attention, a norm and a layer with positions, and one with the batch second."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x[:, 0]
        x = m.norm(x + m.attention(x, x, x, need_weights=False)[0])
        return m.head(torch.tanh(m.mixed(x.transpose(0, 1))).mean(0))

    attention, norm = nn.MultiheadAttention(SIZE, 2, batch_first=True), nn.LayerNorm(SIZE)
    return Function(forward, attention=attention, norm=norm, mixed=nn.Linear(SIZE, 4), head=nn.Linear(4, CLASSES))


def scaled() -> nn.Module:
    """FixUp's scalars, which no rule knows."""
    scale, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    return Function(lambda m, x: m.scale * x + m.bias, scale=scale, bias=bias)


def head(channels: int, size: int = SIZE) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(channels * size * size, CLASSES)]


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.Flatten(),
        nn.ReLU(inplace=True), nn.Linear(4, CLASSES),
    ),
    "norms": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, padding_mode="circular", padding=1), nn.GroupNorm(2, 4), nn.PReLU(4), nn.BatchNorm2d(4).eval(),
        *head(4, 3),
    ),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 3, padding=1), nn.Tanh(), *head(2)),
    "factored": lambda: nn.Sequential(FactoredLinear2d(1, 2, SIZE, SIZE), nn.Tanh(), FactoredLinear2d(2, CLASSES, SIZE, 1), nn.Flatten()),
    "sparse": lambda: nn.Sequential(
        SparseFactoredLinear2d(1, 2, SIZE, SIZE), nn.Tanh(), SparseConv2d(2, 2), nn.Tanh(), *head(2)
    ),
    "group": lambda: nn.Sequential(GroupLift(), GroupConv2d(1, 2), nn.Tanh(), *head(8)),
    "fixup": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), scaled(), nn.Tanh(), *head(2, 4)),
    "twice": twice,
    "sequence": sequence,
}  # fmt: skip


def network(name: str) -> nn.Module:
    torch.manual_seed(3)
    made = NETWORKS[name]().double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made


def data(n: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def averaged(name: str, sampling: str = "shared", copies: int = COPIES) -> AveragedFunction:
    return AveragedFunction(network(name), AffineAugment(copies, init=0.3, sampling=sampling, dtype=torch.float64))


def test_draws_are_the_fits_and_saved(tmp_path):
    x, y = data()
    model = averaged("conv")
    la = KronLaplace(model).fit([(x, y)])
    before = torch.get_rng_state()
    torch.testing.assert_close(la(x), la(x), rtol=0, atol=0)
    other = KronLaplace(model)
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other(x), la(x), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(KronLaplace(model).fit([(x, y)])(x), la(x))
    with pytest.raises(ValueError, match="draws must be None"):
        plain = KronLaplace(network("conv"))
        own = {key: value for key, value in plain.state_dict().items() if key != "checksum"}
        plain.load_state_dict(with_checksum({**own, "draws": la.state_dict()["draws"]}))
    fewer = KronLaplace(averaged("conv", copies=COPIES - 1))
    with pytest.raises(ValueError, match=r"\(1, 3, 6\) of torch.float64, got \(1, 4, 6\) of torch.float64"):
        fewer.load_state_dict(la.state_dict())
    independent = KronLaplace(averaged("conv", "independent")).fit([(x, y)])
    assert independent.state_dict()["draws"] is None and not torch.equal(independent(x), independent(x))


def test_batches_parts_and_the_linear_mode_average_over_the_same_draws():
    x, y = data()
    model = averaged("conv")
    with model.augment.held():
        whole = KronLaplace(model).fit([(x, y)])
        parts = KronLaplace(model, memory_budget=1).fit(list(zip(x.split(2), y.split(2), strict=True)))
    assert_same_factors(parts, whole)
    whole.fit_linear_mode([(x, y)])
    outputs = TangentModel(model)(whole.linear_mode, (x, whole.state_dict()["draws"].expand(len(x), -1, -1)))
    found = torch.nn.functional.cross_entropy(outputs, y, reduction="sum")
    torch.testing.assert_close(-whole.linear_fit.statistic, found)
    with pytest.raises(ValueError, match="draws anew in every pass"):
        KronLaplace(averaged("conv", "independent")).fit([(x, y)]).fit_linear_mode([(x, y)])


def test_the_last_layer_alone():
    x, y = data()
    model = averaged("conv")
    with model.augment.held():
        last = KronLaplace(model, subset_of_weights="last_layer").fit([(x, y)])
        whole = KronLaplace(model).fit([(x, y)])
    for name in ("network.6.weight", "network.6.bias"):
        torch.testing.assert_close(last.factors[name].to_dense(), whole.factors[name].to_dense())


def test_what_would_be_wrong_is_refused():
    x, y = data()
    with pytest.raises(ValueError, match="'0' is an AveragedFunction inside of the model"):
        KronLaplace(nn.Sequential(averaged("mlp"), nn.Linear(CLASSES, CLASSES).double()))
    indices = AveragedFunction(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 3)), Same(2))
    with pytest.raises(ValueError, match="EmbeddingRule does not serve an AveragedFunction"):
        KronLaplace(indices)

    class Lying(Same):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x)] * 2, 1)

    with pytest.raises(ValueError, match="made 4 copies of an input, and its n_samples is 2"):
        KronLaplace(AveragedFunction(network("mlp"), Lying(2))).fit([(x, y)])
    with pytest.raises(TypeError, match="must say in its attribute n_samples"):
        KronLaplace(AveragedFunction(network("mlp"), nn.Identity()))
    model = averaged("conv")
    with model.augment.held(torch.zeros(2, 6).double()), pytest.raises(ValueError, match="holds draws of 2 copies"):
        KronLaplace(model).fit([(x, y)])
    model.augment.raw.requires_grad_()
    for kind in (KronLaplace, FullLaplace):
        with pytest.raises(ValueError, match=r"'raw' requires a gradient; .*evidence_gradient"):
            kind(model).fit([(x, y)])


def test_a_compiled_average_is_told_where_to_compile():
    x, y = data()
    model = averaged("mlp")
    with pytest.raises(ValueError, match=r"AveragedFunction\(torch.compile\(network\), augment\)"):
        KronLaplace(torch.compile(model, backend="eager"))
    with model.augment.held():
        expected = KronLaplace(model).fit([(x, y)])
        model.network.compile(backend="eager")
        inside = KronLaplace(model).fit([(x, y)])
        model.compile(backend="eager")
        assert_same_factors(inside, expected)
        assert_same_factors(KronLaplace(model).fit([(x, y)]), expected)


def test_a_rule_of_ones_own_must_promise():
    layers = nn.Flatten(), nn.Linear(SIZE * SIZE, 4), Scaled(), nn.Linear(4, CLASSES)
    with pytest.raises(ValueError, match="ScaledRule does not serve an AveragedFunction"):
        KronLaplace(AveragedFunction(nn.Sequential(*layers).double(), Same(2)))


# chunks of copies ----------------------------------------------------------------------------------------------------

MANY = 37


def many(name: str, sampling: str = "shared") -> AveragedFunction:
    return averaged(name, sampling, MANY)


def in_chunks(model: nn.Module, loader, seen: list[int] | None = None, **options) -> KronLaplace:
    """A fit with little room; ``seen`` gets how many copies the network had, each time."""
    generator, found = options.pop("generator", None), []
    first = next(m for m in model.network.modules() if next(m.parameters(recurse=False), None) is not None)
    handle = first.register_forward_pre_hook(lambda m, args: found.append(len(args[0])))
    la = KronLaplace(model, memory_budget=1, **options).fit(loader, generator=generator)
    handle.remove()
    assert seen is not None or max(found) < MANY * len(loader[0][0])
    if seen is not None:
        seen.extend(found)
    return la


def assert_equal_factors(one: KronLaplace, other: KronLaplace) -> None:
    for name, factor in one.factors.items():
        expected = other.factors[name]
        for side in ("inputs", "outputs"):
            found, wanted = getattr(factor, side), getattr(expected, side)
            size = max(getattr(f, side).abs().max().item() for f in other.factors.values())
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13 * size, msg=f"{name}, {side}")
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{"fisher": "mc"}, {"resolution": "per_channel"}, {"likelihood": "regression"}])
@pytest.mark.parametrize("sampling", ["shared", "independent"])
def test_chunks_of_each_data_points_own_copies(sampling, options):
    x, y = data(2)
    y = torch.randn(2, CLASSES).double() if "likelihood" in options else y
    model = many("factored", sampling)
    generators = (torch.Generator().manual_seed(1) for _ in range(2))
    with model.augment.held(model.augment.draw(2)):
        whole = KronLaplace(model, **options).fit([(x, y)], generator=next(generators))
        parts = in_chunks(model, [(x, y)], **options, generator=next(generators))
    assert_equal_factors(parts, whole)


def test_draws_of_both_passes_over_chunks_are_the_same():
    """Drawn for each data point alone, from the global generator: once."""
    x, y = data(2)
    model = many("conv", "independent")
    torch.manual_seed(11)
    parts = in_chunks(model, [(x, y)])
    after = torch.get_rng_state()
    torch.manual_seed(11)
    whole = KronLaplace(model).fit([(x, y)])
    assert_equal_factors(parts, whole)
    assert torch.equal(torch.get_rng_state(), after)


def test_chunks_of_copies_give_the_data_fits_gradient():
    x, y = data(3)
    model = many("sparse")
    names = [n for n, _ in model.named_buffers() if n.endswith("inverse_lengthscale")]
    for name in names:
        model.get_buffer(name).requires_grad_()
    with model.augment.held():
        whole, parts = KronLaplace(model).fit([(x, y)]), in_chunks(model, [(x, y)])
    buffers = [model.get_buffer(name) for name in names]
    for found, expected in zip(
        *(torch.autograd.grad(la.log_marginal_likelihood(), buffers) for la in (parts, whole)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        assert expected.abs().max() > 1e-6


def test_chunks_of_copies_at_the_linear_mode():
    x, y = data(3)
    model = many("mlp")
    with model.augment.held():
        whole, parts = (KronLaplace(model, memory_budget=budget).fit([(x, y)]) for budget in (1 << 30, 1))
    for la in (whole, parts):
        la.fit_linear_mode([(x, y)], hessian_at="linear")
    torch.testing.assert_close(parts.linear_mode, whole.linear_mode, rtol=1e-9, atol=1e-12)
    assert_same_factors(parts, whole)


class Halved(AveragedFunction):
    """More than a mean."""

    def forward(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        return 0.5 * super().forward(x, eps)


@pytest.mark.parametrize("kind", [AveragedFunction, Halved])
def test_copies_that_cannot_be_split_go_together_and_a_warning_says_so(kind):
    x, y = data(2)
    same = kind is AveragedFunction
    augment = Same(MANY) if same else AffineAugment(MANY, sampling="shared", dtype=torch.float64)
    model, seen = kind(network("fixup"), augment), []
    words = r"a Same is no ella_cuda.augment.Augment" if same else "a subclass or another forward"
    with nullcontext() if same else augment.held():
        with pytest.warns(UserWarning, match=rf"all {MANY} copies of a data point go .* together.*{words}"):
            parts = in_chunks(model, [(x, y)], seen)
        assert_equal_factors(parts, KronLaplace(model).fit([(x, y)]))
    assert 2 * MANY in seen


class ImageFirst(AffineAugment):
    """The first copy is the image itself."""

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        return torch.cat([x[:, None], super().transform(x, eps, eta)[:, 1:]], 1)


class AllAlways(AffineAugment):
    """Makes all its copies, however few draws there are."""

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        return super().transform(x, eps.expand(-1, self.n_samples, -1) if eps.shape[1] == 1 else eps, eta)


@pytest.mark.parametrize("kind", [ImageFirst, AllAlways])
def test_copies_that_depend_on_others_go_together(kind):
    x, y = data(2)
    model, seen = AveragedFunction(network("fixup"), kind(MANY, sampling="shared", dtype=torch.float64)), []
    with model.augment.held():
        with pytest.warns(UserWarning, match="a copy depends on others"):
            parts = in_chunks(model, [(x, y)], seen)
        assert_equal_factors(parts, KronLaplace(model).fit([(x, y)]))
    assert 2 * MANY in seen


@pytest.mark.parametrize("chunk", [-1, -2])  # the last one alone, and all others
def test_a_networks_way_must_be_the_same_for_all_chunks(chunk):
    """A layer is called twice for so many copies."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.conv(x) + m.conv(x.tanh()) if len(x) == m.twice else m.conv(x)
        return m.head(h.tanh().mean((2, 3)))

    x, y = data(1)
    wavering = Function(forward, conv=nn.Conv2d(1, 2, 1), head=nn.Linear(2, CLASSES), twice=0).double()
    model = AveragedFunction(wavering, AffineAugment(MANY, sampling="shared", dtype=torch.float64))
    sizes: list[int] = []
    in_chunks(model, [(x, y)], sizes)
    wavering.twice = sizes[chunk]
    assert sizes[-1] != sizes[-2]
    with pytest.raises(ValueError, match=r"'network.conv' \(Conv2d\).* another number of times.*larger memory_budget"):
        in_chunks(model, [(x, y)])


def test_the_estimate_of_memory_and_the_probe_are_those_of_few_copies():
    x, _ = data(2)
    estimates, seen = [], []
    for copies in (100, 10_000):
        model = averaged("conv", copies=copies)
        model.network[0].register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
        estimates.append(KronLaplace(model, memory_budget=1).memory_estimate(x))
    assert estimates[0] == estimates[1] and max(seen) < 100

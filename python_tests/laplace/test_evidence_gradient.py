"""Hypergradients of the evidence: batches, chunks of copies, chains of layers, random parts of the data, and refusals."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.augment import AffineAugment, AveragedFunction
from ella_cuda.laplace import KronLaplace, evidence_gradient, exact_log_marginal_likelihood, recorded_batches
from ella_cuda.laplace.chains import _largest, chain_of
from ella_cuda.laplace.hypergradients import RecordedGradients
from ella_cuda.laplace.known_model import known_of
from ella_cuda.nn import SparseConv2d, SparseFactoredLinear2d
from python_tests.laplace.checks import Function
from python_tests.laplace.test_averaged import CLASSES, COPIES, MANY, SIZE, Halved, averaged, data, many, network
from python_tests.laplace.test_recorded_batches import stand_in


def fitted(model: nn.Module, loader, **options) -> KronLaplace:
    torch.manual_seed(5)
    precision = torch.linspace(0.5, 2, len(list(model.parameters())))
    return KronLaplace(model, prior_precision=precision, **options).fit(loader)


@pytest.mark.parametrize("budget", [1, 1 << 20])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_it_does_not_depend_on_the_batches(size, budget):
    x, y = data()
    model = averaged("conv")
    la = fitted(model, [(x, y)])
    whole = evidence_gradient(la, [(x, y)])["augment.raw"]
    la.memory_budget = budget
    parts = evidence_gradient(la, list(zip(x.split(size), y.split(size), strict=True)))["augment.raw"]
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("columns", ["all", "one"])
@pytest.mark.parametrize("name", ["mlp", "conv", "norms", "sparse", "twice", "sequence"])
def test_chunks_of_copies_are_all_copies(name, columns, approximation):
    x, y = data(2 if columns == "all" else 1)  # signs are drawn for what goes together
    model, seen = many(name), []
    generators = (torch.Generator().manual_seed(1) for _ in range(2))
    model.augment.register_forward_hook(
        lambda module, args, out: seen.append(out.shape[1])
    )  # a hook is part of the fit's function
    with model.augment.held():
        la = fitted(model, [(x, y)], approximation=approximation)
        whole = evidence_gradient(la, [(x, y)], columns=columns, generator=next(generators))["augment.raw"]
        la.memory_budget = 1
        seen.clear()
        batches = [(x, y)] if columns == "one" else [(x[:1], y[:1]), (x[1:], y[1:])]
        parts = evidence_gradient(la, batches, columns=columns, generator=next(generators))["augment.raw"]
    torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-13 * float(whole.abs().max()))
    assert max(seen) < MANY and whole.abs().min() > 0


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("name", ["mlp", "norms"])  # a chain, and none
def test_chunks_of_each_data_points_own_copies(name, likelihood):
    x, y = data(2)
    y = torch.randn(2, CLASSES).double() if likelihood == "regression" else y
    model = many(name, "independent")
    with model.augment.held(sampling="independent"):
        la = fitted(model, [(x, y)], likelihood=likelihood)
        whole = evidence_gradient(la, [(x, y)])["augment.raw"]
        la.memory_budget = 1
        parts = evidence_gradient(la, [(x, y)])["augment.raw"]
    torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-13 * float(whole.abs().max()))


def test_chunks_of_copies_for_buffers_inside_of_the_network():
    x, y = data(2)
    model = many("sparse")
    names = ["augment.raw", *(n for n, _ in model.named_buffers() if n.endswith("inverse_lengthscale"))]
    with model.augment.held():
        la = fitted(model, [(x, y)])
        whole = evidence_gradient(la, [(x, y)], names)
        la.memory_budget = 1
        parts = evidence_gradient(la, [(x, y)], names)
    for name in names:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-10, atol=1e-12, msg=name)
        assert whole[name].abs().max() > 1e-6


@pytest.mark.parametrize("copies", [COPIES, MANY])  # together, and in chunks
def test_parameters_whose_gradients_vmap_cannot_take(copies):
    """The gradients of single data points, taken one by one, are in the graph too."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(x.flatten(1) @ m.weight)
        if m.reads and not x.sum().item() < math.inf:
            raise AssertionError
        return m.head(x)

    torch.manual_seed(3)
    parts = {"weight": nn.Parameter(0.2 * torch.randn(SIZE**2, 4).double()), "head": nn.Linear(4, CLASSES).double()}
    x, y = data(2)
    augment, found = AffineAugment(copies, init=0.3, sampling="shared", dtype=torch.float64), []
    with augment.held():
        for reads, warns in ((False, nullcontext()), (True, pytest.warns(UserWarning, match="vmap cannot take"))):
            with warns:
                la = fitted(
                    AveragedFunction(Function(forward, reads=reads, **parts), augment), [(x, y)], unknown="diagonal"
                )
                la.memory_budget = 1
                found.append(evidence_gradient(la, [(x, y)])["augment.raw"])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)
    assert found[0].abs().min() > 1e-6


def test_copies_that_cannot_be_split_go_together_and_a_warning_says_so():
    x, y = data(2)
    model = Halved(network("mlp"), AffineAugment(MANY, sampling="shared", dtype=torch.float64))
    with model.augment.held():
        la = fitted(model, [(x, y)])
        whole = evidence_gradient(la, [(x, y)])["augment.raw"]
        la.memory_budget = 1
        with pytest.warns(UserWarning, match=f"evidence_gradient: all {MANY} copies of a data point go .* together"):
            parts = evidence_gradient(la, [(x, y)])["augment.raw"]
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-11)


CHAINS = {
    "smooth functions": lambda: [
        *(nn.Conv2d(1, 2, 3, padding=2, dilation=2), nn.GELU(), nn.Conv2d(2, 4, 2, stride=2, groups=2), nn.Softplus()),
        *(nn.Flatten(), nn.Linear(36, 6), nn.Sigmoid(), nn.Identity(), nn.Linear(6, CLASSES, bias=False)),
    ],
    "pools": lambda: [
        *(nn.MaxPool2d(2, 1), nn.Conv2d(1, 3, (2, 3), padding=(0, 1), bias=False), nn.MaxPool2d(3, 1, padding=1), nn.Tanh()),
        *(nn.MaxPool2d(2, ceil_mode=True), nn.Dropout(), nn.Flatten(), nn.Linear(18, CLASSES)),
    ],
    "nested": lambda: [
        nn.Flatten(), nn.Sequential(nn.Linear(36, 5), nn.ELU()), nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True)), nn.Linear(6, CLASSES),
    ],
    "mirrored kernels": lambda: [
        *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 17, 2, dilation=2, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(17, 18, (1, 2)), nn.Flatten(), nn.Linear(36, CLASSES)),
    ],
    "functions before pools": lambda: [
        *(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 3, 2, padding=1), nn.GELU(), nn.MaxPool2d((2, 3), (2, 1)), nn.Flatten(), nn.Linear(12, CLASSES)),
    ],
    "pools before functions": lambda: [
        *(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 4, (1, 2), dilation=2, groups=2), nn.MaxPool2d((1, 2)), nn.Tanh()),
        *(nn.Conv2d(4, 4, (3, 1), (1, 2), padding=1), nn.Tanh(), nn.MaxPool2d((2, 1), 1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        nn.Linear(8, CLASSES),
    ],
    "planes without channels": lambda: [
        *(nn.Flatten(1, 2), nn.Linear(6, 6), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Linear(5, 5), nn.GELU(), nn.MaxPool2d(2, padding=1)),
        *(nn.Flatten(), nn.Linear(9, CLASSES)),
    ],
    "one layer": lambda: [nn.Flatten(), nn.Linear(36, CLASSES)],
}  # fmt: skip


@pytest.mark.parametrize("copies", [1, COPIES])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_layers_are_differentiated_as_autograd_does(name, copies):
    x, y = data()
    torch.manual_seed(4)
    network = nn.Sequential(*CHAINS[name]()).double()
    augment = AffineAugment(copies, init=0.3, dtype=torch.float64)
    plain = AveragedFunction(network, augment)
    hidden = AveragedFunction(Function(lambda m, x: m.layers(x), layers=network), augment)
    assert chain_of(network) is not None and chain_of(hidden.network) is None
    with augment.held():
        for columns in ("all", "one"):
            found = []
            for model in (plain, hidden):
                how = {"columns": columns, "generator": torch.Generator().manual_seed(1)}
                found.append(evidence_gradient(fitted(model, [(x, y)]), [(x, y)], **how)["augment.raw"])
            torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
            assert found[0].abs().min() > 1e-8


@pytest.mark.parametrize(
    ("args", "options"),
    [((2,), {}), ((3, 2), {}), (((2, 3), (1, 2)), {}), ((2, 1), {"dilation": 2}), ((3,), {"padding": 1}), ((2,), {"ceil_mode": True})],
)  # fmt: skip
def test_largest_values_and_their_places_are_torchs(args, options):
    """Of planes without channels too, as of one channel."""
    pool = nn.MaxPool2d(*args, **options)
    x = torch.randn(2, 3, 2, 7, 8, generator=torch.Generator().manual_seed(0)).relu()  # equal values too
    expected = F.max_pool2d(
        x.flatten(0, 1), pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, return_indices=True
    )
    for found, of_planes, wanted in zip(_largest(pool, x), _largest(pool, x[:, :, 0]), expected, strict=True):
        assert torch.equal(found.flatten(0, 1), wanted) and torch.equal(of_planes.flatten(0, 1), wanted[:, 0])


def test_what_is_no_chain():
    shared = nn.Linear(3, 3)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, args, out: 2 * out)
    networks = [
        nn.Sequential(shared, nn.Tanh(), shared),
        hooked,
        nn.Sequential(nn.Conv2d(1, 2, 3, padding_mode="circular")),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding="same")),
        nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Flatten(0), nn.Linear(3, 3)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
        nn.Sequential(nn.Tanh()),
    ]
    assert [chain_of(network) for network in networks] == [None] * len(networks)


def half(*arguments: object) -> Tensor:
    return 0.5 * arguments[-1]


def replaced(model: AveragedFunction) -> None:
    plain = model.forward
    model.forward = lambda x, eps=None: 0.5 * plain(x, eps)


CHANGED = {
    "subclass": (Halved, lambda model: None),
    "hook": (AveragedFunction, lambda model: model.register_forward_hook(half)),
    "pre-hook": (AveragedFunction, lambda model: model.register_forward_pre_hook(lambda m, args: (0.5 * args[0], *args[1:]))),
    "forward": (AveragedFunction, replaced),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGED)
def test_what_an_average_is_changed_to_is_in_the_gradient(change):
    x, y = data()
    kind, changed = CHANGED[change]
    model = kind(network("mlp"), AffineAugment(COPIES, "rotation", 0.3, "shared", dtype=torch.float64))
    changed(model)
    eps, h = model.augment.draw(), 1e-6
    raw, values = model.augment.raw, []
    with model.augment.held(eps):
        found = evidence_gradient(fitted(model, [(x, y)]), [(x, y)])["augment.raw"]
        for step in (h, -2 * h):
            raw += step
            values.append(fitted(model, [(x, y)]).log_marginal_likelihood())
    assert found.item() == pytest.approx(float((values[0] - values[1]) / (2 * h)), rel=1e-6)


def test_a_hook_for_all_modules_is_in_the_gradient():
    x, y = data()
    model = averaged("mlp")
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 0.5 * out if isinstance(module, nn.Tanh) else None
    )
    try:
        with model.augment.held():
            la = fitted(model, [(x, y)])
            found = evidence_gradient(la, [(x, y)])["augment.raw"]
            model.network[1].register_forward_hook(lambda module, args, out: out.clone())
            la = fitted(model, [(x, y)])
            expected = evidence_gradient(la, [(x, y)])["augment.raw"]
    finally:
        handle.remove()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_parts_of_the_data_are_right_on_average():
    x, y = data()
    la = fitted(averaged("conv"), [(x, y)])
    whole = evidence_gradient(la, [(x, y)])["augment.raw"]
    each = [evidence_gradient(la, [(x[n : n + 1], y[n : n + 1])])["augment.raw"] for n in range(len(x))]
    torch.testing.assert_close(torch.stack(each).mean(0), whole, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(each[0], whole, rtol=0.1)
    pairs = [  # without the weight N / N_seen they would be a fourth and a half of that
        evidence_gradient(
            la, list(zip(x.split(3), y.split(3), strict=True)), n_data=n, generator=torch.Generator().manual_seed(s)
        )
        for n, s in itertools.product((2, 4), range(16))
    ]
    found = torch.stack([p["augment.raw"] for p in pairs]).unflatten(0, (2, 16))
    error = found.std(1) / 16**0.5
    assert ((found.mean(1) - whole).abs() < 5 * error).all()


def test_a_part_of_equal_data_points_has_the_whole_gradient():
    x, y = (t[:1].repeat(8, *[1] * (t.dim() - 1)) for t in data())
    la = fitted(averaged("conv"), [(x, y)])
    whole, part = (evidence_gradient(la, [(x[:5], y[:5]), (x[5:], y[5:])], n_data=n)["augment.raw"] for n in (None, 3))
    torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-11)


def test_one_column_is_right_on_average():
    x, y = data(3)
    la = fitted(averaged("conv"), [(x, y)])
    whole = evidence_gradient(la, [(x, y)])["augment.raw"]
    generator = torch.Generator().manual_seed(0)
    found = torch.stack(
        [evidence_gradient(la, [(x, y)], columns="one", generator=generator)["augment.raw"] for _ in range(40)]
    )
    assert ((found.mean(0) - whole).abs() < 5 * found.std(0) / 40**0.5).all() and (found.std(0) > 0).all()
    # Of two classes there is one column, whose sign does not matter.
    two = AveragedFunction(nn.Sequential(network("mlp"), nn.Tanh(), nn.Linear(CLASSES, 2).double()), la.model.augment)
    la, y = fitted(two, [(x, y % 2)]), y % 2
    one = evidence_gradient(la, [(x, y)], columns="one")["augment.raw"]
    torch.testing.assert_close(one, evidence_gradient(la, [(x, y)])["augment.raw"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("resolution", "likelihood", "noise"), [("shared", "classification", 1.0), ("per_channel", "regression", 0.7)]
)
def test_bases_of_sparse_layers(resolution, likelihood, noise):
    """Lengthscales and anchors, with factors that follow them: as by autograd of the whole evidence."""
    torch.manual_seed(3)
    layers = SparseFactoredLinear2d(1, 2, SIZE, SIZE), nn.Tanh(), SparseConv2d(2, 2), nn.Tanh(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(2 * SIZE * SIZE, CLASSES)).double()
    x, y = data()
    y = y if likelihood == "classification" else torch.randn(len(x), CLASSES, dtype=torch.float64)
    options = {"resolution": resolution, "likelihood": likelihood, "sigma_noise": noise}
    la = fitted(model, list(zip(x.split(4), y.split(4), strict=True)), **options)
    names = [n for n, _ in model.named_buffers() if n.endswith(("anchors", "inverse_lengthscale"))]
    found = evidence_gradient(la, list(zip(x.split(5), y.split(5), strict=True)), names)
    buffers = [model.get_buffer(name).requires_grad_() for name in names]
    value = exact_log_marginal_likelihood(la, x, y, la.prior_precision)
    expected = torch.autograd.grad(value, buffers)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9, msg=name)
        assert gradient.abs().max() > 1e-3


def test_single_precision():
    x, y = data()
    model = averaged("conv")
    with model.augment.held():
        double = evidence_gradient(fitted(model, [(x, y)]), [(x, y)])["augment.raw"]
        eps = model.augment.eps_for(x)
    model.float()
    with model.augment.held(eps.float()):
        single = evidence_gradient(fitted(model, [(x.float(), y)]), [(x.float(), y)])["augment.raw"]
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-4)


def test_what_is_refused():
    x, y = data()
    model = averaged("conv")
    la = KronLaplace(model)
    with pytest.raises(RuntimeError, match="call fit"):
        evidence_gradient(la, [(x, y)])
    la.fit([(x, y)])
    with pytest.raises(ValueError, match=r"buffers must name buffers of the model \(augment.raw\), got \['raw'\]"):
        evidence_gradient(la, [(x, y)], ["raw"])
    norms = KronLaplace(averaged("norms")).fit([(x, y)])
    with pytest.raises(ValueError, match=r"floating point numbers, got 'network.3.num_batches_tracked' of torch.int64"):
        evidence_gradient(norms, [(x, y)], ["network.3.num_batches_tracked"])
    with pytest.raises(ValueError, match="evidence_gradient: columns"):
        evidence_gradient(la, [(x, y)], columns="two")
    with pytest.raises(ValueError, match="n_data must be a positive integer"):
        evidence_gradient(la, [(x, y)], n_data=0)
    with pytest.raises(ValueError, match="gave no data"):
        evidence_gradient(la, [])
    model.augment.raw += 0.1
    with pytest.raises(RuntimeError, match="changed since the fit"):
        evidence_gradient(la, [(x, y)])
    plain = KronLaplace(network("mlp")).fit([(x, y)])
    with pytest.raises(ValueError, match="it has none"):
        evidence_gradient(plain, [(x, y)])
    assert not model.augment.raw.requires_grad and all(p.requires_grad for p in model.parameters())


class Drawing(nn.Module):
    """Draws in evaluation mode too."""

    def forward(self, x):
        return F.dropout(x, 0.2)


def with_inside(*modules: nn.Module) -> AveragedFunction:
    torch.manual_seed(3)
    layers = (nn.Sequential(nn.Conv2d(1, 2, 3), *modules), nn.Tanh(), nn.Flatten(), nn.Linear(2 * (SIZE - 2) ** 2, CLASSES))  # fmt: skip
    return AveragedFunction(nn.Sequential(*layers).double(), AffineAugment(COPIES, dtype=torch.float64))


def test_a_network_that_draws_in_evaluation_mode_is_refused_by_its_module():
    """Its evidence and the gradient would be of different functions; draws of training alone, and held ones, are none."""
    batches = [data()]
    inside = Function(lambda m, x: m.augment(x).mean(1), augment=AffineAugment(2, dtype=torch.float64))
    for sampling in ("shared", "independent"):
        model = with_inside(nn.Dropout(0.5))
        model.augment.sampling = sampling
        la = KronLaplace(model).fit(batches)
        assert evidence_gradient(la, batches)["augment.raw"].abs().min() > 0
    for module, words in (
        (Drawing(), r"'network.0.1' \(Drawing\) draws"),
        (nn.Sequential(nn.Identity(), Drawing()), r"'network.0.1.1' \(Drawing\) draws"),
        (inside, r"'network.0.1.augment' \(AffineAugment\) draws .* by its context held"),
    ):
        model = with_inside(module)
        with pytest.raises(ValueError, match=words):
            KronLaplace(model).fit(batches)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with model.network[0][1].augment.held():
        la = KronLaplace(model).fit(batches)
        assert evidence_gradient(la, batches)["augment.raw"].abs().min() > 0


def test_the_layer_without_a_second_derivative_is_named() -> None:
    slope = Function(lambda m, x: m.slope * x, slope=nn.Buffer(torch.tensor(1.3)))
    parts = [nn.Linear(3, 4), slope, nn.Unflatten(1, (4, 1, 1)), nn.Sequential(nn.CrossMapLRN2d(2)), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(4, 2)).double()
    data = [(torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))]
    la = KronLaplace(model, "regression").fit(data)
    with pytest.raises(NotImplementedError, match=r"layer '3\.0' \(CrossMapLRN2d\).*second derivative"):
        evidence_gradient(la, data, ["1.slope"])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("name", "columns"), [("mlp", "one"), ("norms", "all"), ("sparse", "one"), ("conv", "all")])
def test_recorded_batches_have_the_same_gradients(name, columns, graphs, monkeypatch):
    """To the last bit, in later passes and at other amounts too, by the chain of an averaged network ("conv") and without one."""
    made = stand_in(monkeypatch) if graphs else []
    x, y = data(8)
    model, loader = (averaged if name == "conv" else many)(name), list(zip(x.split(2), y.split(2), strict=True)) * 2
    replays, outputs = [], RecordedGradients._outputs
    monkeypatch.setattr(RecordedGradients, "_outputs", lambda *a: replays.append(1) or outputs(*a))
    for raw in (0.3, 0.5):
        with torch.no_grad():
            model.augment.raw.fill_(raw)
        la, found = fitted(model, [(x, y)]), []
        for patience in (2, math.inf):
            monkeypatch.setattr(recorded_batches, "PATIENCE", {"cpu": patience})
            generator = torch.Generator().manual_seed(1)
            found.append(evidence_gradient(la, loader, columns=columns, generator=generator)["augment.raw"])
            if patience == 2:
                known_kinds = dict(known_of(model).kinds)
            known_of(model).kinds.clear()
        assert torch.equal(*found) and found[0].abs().min() > 0
        known_of(model).kinds.update(known_kinds)
    assert len(replays) == 6 + 8  # the first batch of a pass finds no sums, and is of another kind
    assert sum(g.recorded for g in made) == 2 * graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_a_label_that_is_no_class_in_a_recorded_batch(graphs, monkeypatch):
    if graphs:
        stand_in(monkeypatch)
    monkeypatch.setattr(recorded_batches, "PATIENCE", {"cpu": 2})
    x, y = data(8)
    model = many("mlp")
    la, loader = fitted(model, [(x, y)]), list(zip(x.split(2), y.split(2), strict=True))
    loader[3] = loader[3][0], torch.tensor([0, CLASSES])
    with pytest.raises(ValueError, match="do not fit" if graphs else "labels must lie in"):
        evidence_gradient(la, loader)

"""Sparsified layers against the dense layers they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ella_cuda.nn import CircularConv2d, FactoredLinear2d, SparseConv2d, SparseFactoredLinear2d, SpatialBasis
from python_tests.ops.checks import assert_same

KINDS = ("interpolating", "exponential")
ANCHORS = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.5], [0.5, -1.0]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("projects", [(False, False), (True, False), (False, True), (True, True)])
def test_factored_layer_is_a_dense_layer_with_smooth_weights(kind, projects, device, monkeypatch):
    layer = SparseFactoredLinear2d(2, 3, (4, 5), (2, 3), basis=kind).to(device, torch.float64)
    assert layer.weight_in.shape == (3, 2, 10) and layer.weight_out.shape == (3, 2, 3)
    nn.init.normal_(layer.bias_in)
    layer.basis_in.inverse_lengthscale.fill_(0.7)
    monkeypatch.setattr(layer, "projects_input", lambda batch: projects[0])
    monkeypatch.setattr(layer, "projects_output", lambda batch: projects[1])
    x = torch.randn(6, 2, 4, 5, dtype=torch.float64, device=device)
    u = torch.einsum("dca,ax->dcx", layer.weight_in, layer.basis_in.matrix())
    v = torch.einsum("dca,ay->dcy", layer.weight_out, layer.basis_out.matrix())
    z = torch.einsum("dcx,ncx->ndc", u, x.flatten(2)) + layer.bias_in[:, None]
    assert_same(layer(x), torch.einsum("dcy,ndc->ndy", v, z).unflatten(2, (2, 3)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("projects", [False, True])
@pytest.mark.parametrize("kernel_size", [3, (1, 5)])
def test_convolution_is_a_convolution_with_a_smooth_kernel(kind, projects, kernel_size, device, monkeypatch):
    layer = SparseConv2d(3, 4, kernel_size, basis=kind).to(device, torch.float64)
    nn.init.normal_(layer.bias)
    layer.basis.inverse_lengthscale.fill_(0.7)
    monkeypatch.setattr(layer, "projects_input", lambda batch, positions: projects)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64, device=device)
    kernel = torch.einsum("dca,ar->dcr", layer.weight, layer.basis.matrix()).unflatten(2, layer.kernel_size)
    half = [k // 2 for k in layer.kernel_size]
    padded = nn.functional.pad(x, (half[1], half[1], half[0], half[0]), mode="circular")
    assert_same(layer(x), nn.functional.conv2d(padded, kernel, layer.bias))


def test_the_way_that_is_chosen_is_taken(monkeypatch):
    taken: list[str] = []
    for name in ("project", "expand"):
        real = getattr(SpatialBasis, name)
        monkeypatch.setattr(
            SpatialBasis, name, lambda self, x, real=real, name=name: taken.append(name) or real(self, x)
        )
    layer, conv = SparseFactoredLinear2d(2, 3, 4, 4), SparseConv2d(2, 3)
    x = torch.randn(2, 2, 4, 4)
    for projects_in, projects_out, expected in (
        (True, True, ["project", "expand"]),  # the input projected, the output expanded
        (True, False, ["project", "expand"]),
        (False, True, ["expand", "expand"]),
    ):
        taken.clear()
        monkeypatch.setattr(layer, "projects_input", lambda batch, way=projects_in: way)
        monkeypatch.setattr(layer, "projects_output", lambda batch, way=projects_out: way)
        layer(x)
        assert taken == expected
    for way, expected in ((True, []), (False, ["expand"])):  # of the convolution's two, one goes through the kernel
        taken.clear()
        monkeypatch.setattr(conv, "projects_input", lambda batch, positions, way=way: way)
        conv(x)
        assert taken == expected


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_and_compilation_see_the_present_basis(kind):
    layer = nn.Sequential(SparseFactoredLinear2d(2, 3, 4, 4, basis=kind), SparseConv2d(3, 2, basis=kind)).double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    layer(x)  # the matrices are kept from here on
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for omega in (1.0, 0.5):
        layer[0].basis_in.inverse_lengthscale.fill_(omega)
        assert_same(compiled(x), layer(x))
    values = dict(layer.named_parameters()) | dict(layer.named_buffers())
    stacked = {n: torch.stack([v, v * 0.9]).detach() for n, v in values.items()}
    both = torch.func.vmap(lambda v: torch.func.functional_call(layer, v, (x,)))(stacked)
    for i in range(2):
        single = copy.deepcopy(layer)
        for name, value in (*single.named_parameters(), *single.named_buffers()):
            value.data.copy_(stacked[name][i])
        for module in single.modules():
            if isinstance(module, SpatialBasis):
                module.anchors.add_(0)  # .data leaves no trace
        assert_same(both[i], single(x))
    images = torch.func.vmap(lambda image: layer(image[None])[0])(x)
    assert_same(images, layer(x))


def count_products(*terms: tuple[int, ...]) -> int:
    """Multiplications of matrix products, each given by the sizes of its three or four loops."""
    total = 0
    for sizes in terms:
        product = 1
        for size in sizes:
            product *= size
        total += product
    return total


@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize(
    ("c", "d", "x", "y"), [(3, 10, 1024, 1024), (10, 20, 1024, 256), (80, 160, 4, 1), (2, 2, 16, 16)]
)
def test_the_cheaper_way_is_taken(batch, c, d, x, y):
    side = {1024: 32, 256: 16, 16: 4, 4: 2, 1: 1}
    with torch.device("meta"):
        layer = SparseFactoredLinear2d(c, d, side[x], side[y])
        conv = SparseConv2d(c, d)
    a, b = -(-x // 2), -(-y // 2)
    projecting = count_products((batch, c, x, a), (batch, d, c, a))
    assert layer.projects_input(batch) == (projecting < count_products((d, c, a, x), (batch, d, c, x)))
    projecting = count_products((batch, d, c, b), (batch, d, b, y))
    assert layer.projects_output(batch) == (projecting < count_products((d, c, b, y), (batch, d, c, y)))
    projecting = count_products((batch, x, c, 9, 5), (batch, x, d, c, 5))
    assert conv.projects_input(batch, x) == (projecting < count_products((d, c, 5, 9), (batch, x, d, c, 9)))


def test_both_ways_are_taken_somewhere_in_the_network():
    with torch.device("meta"):
        early, late = SparseFactoredLinear2d(10, 20, 32, 16), SparseFactoredLinear2d(80, 160, 2, 1)
        few, many = SparseConv2d(3, 10), SparseConv2d(20, 40)
    assert not early.projects_input(128) and late.projects_input(128)
    assert not few.projects_input(128, 1024) and many.projects_input(128, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_weights_are_strictly_symmetric(kind, device):
    layer = SparseFactoredLinear2d(2, 3, 4, 4, basis=kind).to(device, torch.float64)
    for basis in (layer.basis_in, layer.basis_out):
        basis.inverse_lengthscale.fill_(1e-9)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64, device=device)
    shuffled = x.flatten(2)[:, :, torch.randperm(16)].unflatten(2, (4, 4))
    y = layer(x)
    assert_same(layer(shuffled), y, rtol=1e-9, atol=1e-12)  # invariant to every permutation of positions
    assert_same(y, y[:, :, :1, :1].expand_as(y), rtol=1e-9, atol=1e-12)
    for basis in (layer.basis_in, layer.basis_out):
        basis.inverse_lengthscale.fill_(1)
    assert (layer(shuffled) - layer(x)).abs().max() > 1e-2
    conv = SparseConv2d(2, 3, basis=kind).to(device, torch.float64)
    conv.basis.inverse_lengthscale.fill_(1e-9)
    turned = conv(x.rot90(1, (2, 3)))
    assert_same(turned, conv(x).rot90(1, (2, 3)), rtol=1e-9, atol=1e-12)  # a constant kernel has no direction


@pytest.mark.parametrize("kind", KINDS)
def test_layers_start_nearest_to_the_dense_ones(kind):
    torch.manual_seed(4)
    layer = SparseFactoredLinear2d(3, 4, 6, 3, basis=kind)
    conv = SparseConv2d(3, 4, basis=kind)
    torch.manual_seed(4)
    basis_in, basis_out = SpatialBasis(6, kind=kind), SpatialBasis(3, kind=kind)
    dense = FactoredLinear2d(3, 4, 6, 3, bias=False)
    assert_same(layer.weight_in, basis_in.fit(dense.weight_in.flatten(2)))
    assert_same(layer.weight_out, basis_out.fit(dense.weight_out.flatten(2)))
    kernel_basis, kernel = SpatialBasis(3, kind=kind), torch.empty(4, 3, 3, 3)
    nn.init.kaiming_uniform_(kernel, nonlinearity="relu")
    assert_same(conv.weight, kernel_basis.fit(kernel.flatten(2)))
    assert layer.bias_in.abs().max() == 0 and conv.bias.abs().max() == 0


def test_only_layers_of_the_same_map_are_converted():
    with pytest.raises(TypeError, match=r"expected a FactoredLinear2d, got Conv2d"):
        SparseFactoredLinear2d.from_dense(nn.Conv2d(2, 3, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_there_and_back(kind, device):
    layer = SparseFactoredLinear2d(2, 3, 4, (2, 3), basis=kind).to(device, torch.float64)
    conv = SparseConv2d(2, 3, basis=kind).to(device, torch.float64)
    for bias in (layer.bias_in, conv.bias):
        nn.init.normal_(bias)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64, device=device)
    before = torch.random.get_rng_state()
    dense, dense_conv = layer.to_dense(), conv.to_dense()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(dense, FactoredLinear2d) and isinstance(dense_conv, CircularConv2d)
    assert_same(dense(x), layer(x))
    assert_same(dense_conv(x), conv(x))
    # As many anchors as positions, at the positions: nothing is lost.
    for anchors, small in ((16, False), (3, True)):
        back = SparseFactoredLinear2d.from_dense(dense, (anchors, 6), kind)
        if small:
            assert back.residuals["weight_in"] > 0.05
        difference = dense.weight_in.flatten(2) - back.weight_in @ back.basis_in.matrix()
        expected = float(difference.norm() / dense.weight_in.norm())
        assert back.residuals["weight_in"] == pytest.approx(expected, rel=1e-9)
        assert back.residuals["bias_in"] == back.residuals["bias_out"] == 0
        assert_same(back.bias_in, dense.bias_in)
    nn.init.ones_(dense.bias_out)
    assert SparseFactoredLinear2d.from_dense(dense).residuals["bias_out"] == 1
    plain = SparseFactoredLinear2d.from_dense(FactoredLinear2d(2, 3, 4, 2, bias=False))
    assert plain.bias_in is None and plain.residuals.keys() == {"weight_in", "weight_out"}
    assert plain.to_dense().bias_out is None


def spread(count: int, size: tuple[int, int]) -> torch.Tensor:
    """So many anchors at different places of the grid, nowhere near another: (row, column) in centred pixels, float64."""
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in size), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], 1)
    return places[torch.linspace(0, len(places) - 1, count).round().long()] + 0.1 * torch.rand(count, 2).double()


def least_squares(functions: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(psi.T, functions.flatten(0, 1).T).solution.T.unflatten(0, functions.shape[:2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conversion_to_given_anchors_and_lengthscales(kind, dtype, device):
    places = (spread(5, (4, 4)).to(device), spread(3, (2, 3)).to(device))
    omegas = (1.1, torch.tensor(0.9, dtype=torch.float64, device=device))
    dense = FactoredLinear2d(2, 3, 4, (2, 3)).to(device, dtype)
    layer = SparseFactoredLinear2d.from_dense(dense, basis=kind, inverse_lengthscale=omegas, anchors=places)
    sides = ((layer.basis_in, layer.weight_in, dense.weight_in), (layer.basis_out, layer.weight_out, dense.weight_out))
    for (basis, values, weight), anchors, omega in zip(sides, places, (1.1, 0.9), strict=True):
        assert torch.equal(basis.anchors, anchors.to(dtype))  # in full precision
        assert torch.equal(basis.inverse_lengthscale, torch.tensor(omega, dtype=dtype, device=device))
        distances = (anchors[:, None] - basis.points.double()).square().sum(2)
        psi = torch.exp(-0.5 * omega**2 * distances)
        if kind == "interpolating":
            gram = torch.exp(-0.5 * omega**2 * (anchors[:, None] - anchors).square().sum(2))
            psi = torch.linalg.solve(gram + 1e-4 * torch.eye(len(anchors), dtype=gram.dtype, device=device), psi)
        expected = least_squares(weight.detach().double().flatten(2), psi).to(dtype)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-9
        assert_same(values.detach(), expected, rtol=tolerance, atol=tolerance)
    # What is smooth at these anchors already comes back whole.
    back = SparseFactoredLinear2d.from_dense(layer.to_dense(), None, kind, omegas, places)
    assert max(back.residuals.values()) < (1e-4 if dtype == torch.float32 else 1e-9)
    assert_same(back.weight_in, layer.weight_in, rtol=1e-3, atol=1e-4)

    places, omega = spread(4, (3, 3)).to(device), torch.tensor(0.7, dtype=torch.float64, device=device)
    kind_of = {"device": device, "dtype": dtype}
    other = SparseConv2d(2, 3, 3, None, kind, inverse_lengthscale=omega, anchors=places, **kind_of).basis
    assert torch.equal(other.anchors, places.to(dtype)) and torch.equal(other.inverse_lengthscale, omega.to(dtype))
    places.add_(1)
    assert not torch.equal(other.anchors, places.to(dtype))  # a copy


def test_anchors_of_one_side_only_are_given():
    places = torch.tensor([[0.5, -1.5], [-1.0, 1.0]])
    torch.manual_seed(1)
    layer = SparseFactoredLinear2d(1, 2, 4, 2, (None, 3), inverse_lengthscale=(0.5, 2.0), anchors=(places, None))
    assert torch.equal(layer.basis_in.anchors, places) and layer.weight_in.shape == (2, 1, 2)
    assert layer.weight_out.shape == (2, 1, 3) and layer.basis_out.anchors.unique().numel() == 6
    assert (float(layer.basis_in.inverse_lengthscale), float(layer.basis_out.inverse_lengthscale)) == (0.5, 2.0)


def test_anchors_and_lengthscales_are_no_parameters_but_saved():
    layer = SparseFactoredLinear2d(2, 3, 4, 2)
    assert {n for n, _ in layer.named_parameters()} == {"weight_in", "weight_out", "bias_in"}
    saved = {"basis_in.anchors", "basis_in.inverse_lengthscale", "basis_out.anchors", "basis_out.inverse_lengthscale"}
    assert saved <= layer.state_dict().keys()
    other = SparseFactoredLinear2d(2, 3, 4, 2)
    x = torch.randn(2, 2, 4, 4)
    assert (other(x) - layer(x)).abs().max() > 1e-3
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SparseFactoredLinear2d(2, 3, 0, 4), "in_size"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, num_anchors=0), "num_anchors"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4)(torch.zeros(1, 2, 4, 5)), "SparseFactoredLinear2d"),
        (lambda: SparseConv2d(2, 3, 4), "kernel_size"),
        (lambda: SparseConv2d(0, 3), "in_channels"),
        (lambda: SparseFactoredLinear2d(2, 2.5, 4, 4), "out_channels"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, num_anchors=(1, 2, 3)), "num_anchors"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, num_anchors=True), "num_anchors"),
        (lambda: SparseConv2d(20, 40)(torch.zeros(128, 7, 4, 4)), r"\(N, 20, H, W\)"),
        (lambda: SparseConv2d(2, 3).double()(torch.zeros(1, 2, 4, 4)), "SparseConv2d: x is torch.float32"),
        (lambda: SparseConv2d(2, 3, basis="cubic"), "cubic"),
        (lambda: SparseFactoredLinear2d(2, 3, None, 4), "in_size must be a positive integer or a pair.*got None"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4.0), r"out_size must be.*got 4\.0"),
        (lambda: SparseFactoredLinear2d(2, 3, True, 4), "in_size must be.*got True"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, basis=["exponential"]), r"basis must be one of.*got \['exponential'\]"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, anchors=(ANCHORS,)), "anchors must be a pair.*got 1"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, (3, 3), anchors=(ANCHORS, None)), "basis_in: anchors must be num_anchors = 3"),
        (
            lambda: SparseFactoredLinear2d(2, 3, 4, 4, anchors=(None, ANCHORS.T[:1])),
            r"basis_out: anchors must have shape \(A, 2\).*got \(1, 4\)",
        ),
        (
            lambda: SparseFactoredLinear2d(2, 3, 4, 4, inverse_lengthscale=(1.0,)),
            r"inverse_lengthscale must be one number or a pair.*got \(1\.0,\)",
        ),
        (
            lambda: SparseFactoredLinear2d(2, 3, 4, 4)(torch.zeros(1, 2, 4, 4, device="meta")),
            "x is on meta, the layer's parameters are on cpu",
        ),
        (lambda: SparseConv2d(2, 3)(torch.zeros(1, 2, 4)), r"SparseConv2d: x must have shape \(N, 2, H, W\), got \(1, 2, 4\)"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, anchors=ANCHORS), "anchors must be a pair.*got Tensor"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, anchors=(ANCHORS, [[0, 0]])), r"basis_out: anchors must be a tensor \(A, 2\).*got list"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4, inverse_lengthscale="1"), "basis_in: inverse_lengthscale must be a number.*got str"),
        (lambda: SparseFactoredLinear2d(2, 3, 4, 4)(None), r"SparseFactoredLinear2d: x must be a tensor \(N, 2, 4, 4\), got NoneType"),
        (lambda: SparseConv2d(2, 3)(torch.zeros(1, 2, 4, 4).numpy()), r"SparseConv2d: x must be a tensor \(N, 2, H, W\), got ndarray"),
    ],
)  # fmt: skip
def test_errors(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "layer", [SparseFactoredLinear2d(2, 3, 4, 2), SparseConv2d(2, 30, num_anchors=8)], ids=["s_fc", "s_conv"]
)
def test_exports_for_any_number_of_images(layer, strict):
    """One program for numbers of images that eager mode computes in different ways."""
    images = {0: torch.export.Dim("images")}
    program = torch.export.export(layer, (torch.randn(3, 2, 4, 4),), dynamic_shapes=(images,), strict=strict).module()
    for n in (2, 3, 700):
        x = torch.randn(n, 2, 4, 4)
        assert_same(program(x), layer(x))
    counts = []
    for call in (program, layer):  # in the way that many images take
        with FlopCounterMode(display=False) as counter:
            call(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_exports_for_images_of_any_size():
    layer = SparseConv2d(2, 3)
    sizes = {0: torch.export.Dim("images"), 2: torch.export.Dim("rows", min=3), 3: torch.export.Dim("columns", min=3)}
    program = torch.export.export(layer, (torch.randn(3, 2, 5, 6),), dynamic_shapes=(sizes,)).module()
    for shape in [(2, 2, 3, 4), (5, 2, 40, 50)]:
        x = torch.randn(shape)
        assert_same(program(x), layer(x))

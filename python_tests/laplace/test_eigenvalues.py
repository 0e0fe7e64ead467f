"""Eigenvalues of blocks: of all sizes that our kernel takes together, of larger ones one by one."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from ella_cuda.laplace import KronLaplace, SecondMoment, eigenvalues
from ella_cuda.models import neyshabur
from ella_cuda.nn import SpatialBasis
from ella_cuda.ops.symmetric_eigenvalues import most_rows, symmetric_eigenvalues
from python_tests.recorded import Recorder

CUDA = torch.device("cuda", 1)


def symmetric(groups: int, size: int, **kind) -> Tensor:
    half = torch.randn(groups, size, size, **{"dtype": torch.float64, **kind})
    return half + half.mT


def decompose_by(monkeypatch, own: int) -> None:
    """What decomposes blocks on a GPU: our kernel up to so many rows, else torch."""
    monkeypatch.setattr(eigenvalues, "own_rows", lambda device: own)


def test_blocks_that_do_not_converge_are_named(monkeypatch):
    """By the factor that has them, wherever they were in the call."""
    decompose_by(monkeypatch, 0)
    eigvalsh = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: eigvalsh(a) * (torch.nan if a[0, 0] == -1234 else 1))
    moments = moments_elsewhere((2, 3), (5, 3))
    moments[1].total[3, 0, 0] = moments[1].total[4, 0, 0] = -1234
    with pytest.raises(
        torch.linalg.LinAlgError, match=r"5x3: the eigenvalues of block 3 of the factor did not converge"
    ):
        SecondMoment.decompose_all(moments)
    torch.testing.assert_close(
        moments[0].eigenvalues().as_subclass(Tensor),
        eigvalsh(moments[0].total.as_subclass(Tensor).double()),
    )


def test_large_blocks_one_by_one(monkeypatch):
    moments = [symmetric(*shape) for shape in [(3, 4), (0, 6), (1, 5)]]
    moments.append(symmetric(2, 4, dtype=torch.float32))
    decompose_by(monkeypatch, 0)
    seen, eigvalsh = [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(tuple(a.shape)) or eigvalsh(a))
    found = eigenvalues.eigenvalues_of_all([blocks.as_subclass(Elsewhere) for blocks in moments])
    assert seen == [(4, 4)] * 3 + [(5, 5)] + [(4, 4)] * 2
    for mine, blocks in zip(found, moments, strict=True):
        torch.testing.assert_close(mine.as_subclass(Tensor), eigvalsh(blocks.double()))


@pytest.fixture
def own_calls(monkeypatch):
    """The groups and rows of each call of our kernel."""
    seen, op = [], torch.ops.ella_cuda.symmetric_eigenvalues

    class Ops:
        @staticmethod
        def symmetric_eigenvalues(numbers, groups, rows):
            if torch._C._is_torch_function_enabled():  # a subclass comes here again without
                seen.append((groups, rows))
            return op(numbers, groups, rows)

    monkeypatch.setattr(torch.ops, "ella_cuda", Ops)
    return seen


def test_blocks_of_all_sizes_by_our_kernel_together(monkeypatch, own_calls):
    """The largest come first; larger ones than it takes go where they went."""
    sets = [symmetric(*shape) for shape in [(3, 4), (1, 9), (2, 7), (2, 4), (0, 3), (5, 1)]]
    decompose_by(monkeypatch, 7)
    seen, eigvalsh = [], torch.linalg.eigvalsh
    expected = [eigvalsh(blocks) for blocks in sets]
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(tuple(a.shape)) or eigvalsh(a))
    found = eigenvalues.eigenvalues_of_all([blocks.as_subclass(Elsewhere) for blocks in sets])
    assert own_calls == [([2, 5, 0, 5], [7, 4, 3, 1])] and (9, 9) in seen
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.as_subclass(Tensor), wanted)


def test_our_kernel_has_no_more_numbers_at_once_than_memory_allows(monkeypatch, own_calls):
    decompose_by(monkeypatch, 7)
    monkeypatch.setattr(eigenvalues, "AT_ONCE_ELSEWHERE", 40)
    sets = [symmetric(3, 4), symmetric(1, 7), symmetric(2, 2)]
    found = eigenvalues.eigenvalues_of_all([blocks.as_subclass(Elsewhere) for blocks in sets])
    assert own_calls == [([1], [7]), ([2], [4]), ([1, 2], [4, 2])]
    for mine, blocks in zip(found, sets, strict=True):
        torch.testing.assert_close(mine.as_subclass(Tensor), torch.linalg.eigvalsh(blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_our_kernel_leaves_what_is_to_be_differentiated_to_torch(monkeypatch, own_calls, dtype):
    decompose_by(monkeypatch, 7)
    blocks = symmetric(3, 5, dtype=dtype)
    before = blocks.clone()
    found = eigenvalues.eigenvalues(blocks.as_subclass(Elsewhere))
    assert own_calls == [([3], [5])] and torch.equal(blocks, before) and found.dtype == torch.float64
    torch.testing.assert_close(found.as_subclass(Tensor), torch.linalg.eigvalsh(blocks.double()))
    wanted = symmetric(3, 5).requires_grad_()
    eigenvalues.eigenvalues(wanted.as_subclass(Elsewhere)).sum().backward()
    assert len(own_calls) == 1 and torch.allclose(wanted.grad, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_build_without_our_kernel_has_none(monkeypatch, cuda):
    monkeypatch.setattr(eigenvalues, "build_info", lambda: {"cuda": cuda})
    assert eigenvalues.own_rows(torch.device("cpu")) == (1024 if cuda else 0)


@pytest.mark.parametrize(("shared", "rows"), [(227 << 10, 1024), (163 << 10, 1024), (99 << 10, 640)])
def test_our_kernel_takes_what_the_shared_memory_holds(monkeypatch, shared, rows):
    properties = types.SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    most_rows.cache_clear()
    assert most_rows(CUDA) == rows
    most_rows.cache_clear()


OWN_SIZES = [1, 2, 3, 5, 17, 33, 64, 70, 127, 256, 300, 511, 512, 513, 720, 1000, 1023, 1024]


def test_our_kernel_is_lapack(device):
    """All sizes in one launch, and the largest alone; on the CPU by LAPACK block after block."""
    sizes = OWN_SIZES if device.type == "cuda" else OWN_SIZES[:8]
    sets = [symmetric(3, size) for size in sizes]
    sets += [half @ half.mT for half in (torch.randn(2, d, max(d // 5, 1), dtype=torch.float64) for d in sizes)]
    for together in (sets, *[[blocks] for blocks in sets[len(sizes) - 1 :: len(sizes)]]):
        for found, blocks in zip(symmetric_eigenvalues([b.to(device) for b in together]), together, strict=True):
            exact = torch.linalg.eigvalsh(blocks)
            error = (found.cpu() - exact).abs().amax(1)
            assert bool((error <= 1e-14 * (10 + blocks.shape[1] ** 0.5) * exact.abs().amax(1)).all()), blocks.shape
            assert bool((found.diff() >= 0).all())
    again = [symmetric_eigenvalues([b.to(device) for b in sets]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))
    sets[0][1] = torch.nan
    found = symmetric_eigenvalues([b.to(device) for b in sets[:2]])
    assert found[0].isnan().flatten().tolist() == [False, True, False] and not found[1].isnan().any()


class Elsewhere(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cpu = False
    is_cuda = True


def moments_elsewhere(*shapes: tuple[int, int], basis: SpatialBasis | None = None) -> list[SecondMoment]:
    moments = []
    for groups, size in shapes:
        moment = SecondMoment(groups, size, torch.zeros(0, dtype=torch.float32), f"{groups}x{size}", basis)
        moment.add(torch.randn(9, groups, size))
        moment.total = moment.total.as_subclass(Elsewhere)
        moments.append(moment)
    return moments


def test_moments_on_a_basis_are_decomposed_as_projected(monkeypatch):
    decompose_by(monkeypatch, 0)
    basis = SpatialBasis(2)
    moments = [*moments_elsewhere((3, 4), (2, 8), basis=basis), *moments_elsewhere((1, 4))]
    SecondMoment.decompose_all(moments)
    psi = torch.block_diag(basis.matrix(), basis.matrix()).double()
    for moment, projection in zip(moments, (basis.matrix().double(), psi, torch.eye(4).double()), strict=True):
        expected = torch.linalg.eigvalsh(projection @ moment.total.as_subclass(Tensor).double() @ projection.mT)
        torch.testing.assert_close(moment.eigenvalues().as_subclass(Tensor), expected, atol=1e-6, rtol=1e-6)


def test_moments_decomposed_together_are_checked(monkeypatch):
    decompose_by(monkeypatch, 0)
    (negative, fine), (infinite,) = moments_elsewhere((2, 3), (1, 3)), moments_elsewhere((1, 5))
    negative.total[1] -= 100 * torch.eye(3)
    with pytest.raises(ArithmeticError, match="2x3: block 1 of the factor has the eigenvalue"):
        SecondMoment.decompose_all([fine, negative])
    infinite.total[0, 0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="1x5: the factor has entries that are not finite"):
        SecondMoment.decompose_all([fine, infinite])


def test_moments_decomposed_together_are_checked_together(monkeypatch):
    """The device is waited for twice, for one row of numbers each time, however many moments there are."""
    decompose_by(monkeypatch, 0)
    moments = moments_elsewhere((2, 3), (1, 5), (4, 3)) + moments_elsewhere((2, 4), basis=SpatialBasis(2))
    read, tolist = [], Tensor.tolist

    def note(values: Tensor) -> list:
        if torch._C._is_torch_function_enabled():  # a subclass comes here again without
            read.append(tuple(values.shape))
        return tolist(values)

    monkeypatch.setattr(Tensor, "tolist", note)
    with Recorder():  # refuses whatever else reads values
        SecondMoment.decompose_all(moments)
    assert read == [(4,), (4,)]


def test_the_evidence_decomposes_all_moments_together(monkeypatch):
    la = KronLaplace(torch.nn.Linear(3, 2)).fit([(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))])
    asked = []
    monkeypatch.setattr(SecondMoment, "decompose_all", staticmethod(lambda moments: asked.extend(moments)))
    la.log_marginal_likelihood()
    assert asked == [la.factors["weight"].input_moment, la.factors["weight"].output_moment]


def test_our_kernel_is_named_first(monkeypatch):
    decompose_by(monkeypatch, 640)
    assert eigenvalues.solver(CUDA) == (
        "our kernel up to 640 rows, all sizes at once; above torch's cuSOLVER, one after the other"
    )
    decompose_by(monkeypatch, 0)
    assert eigenvalues.solver(CUDA) == "torch's cuSOLVER, one after the other"


def test_moments_decomposed_together_keep_their_eigenvalues(monkeypatch):
    """Whatever is asked afterwards: nothing is decomposed again, unless rows were added."""
    moments = moments_elsewhere((2, 3), (1, 5), (4, 3))
    seen, eigvalsh = [], torch.linalg.eigvalsh
    decompose_by(monkeypatch, 0)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(tuple(a.shape)) or eigvalsh(a))
    SecondMoment.decompose_all(moments)
    assert seen == [(3, 3)] * 2 + [(5, 5)] + [(3, 3)] * 4
    for moment in moments:
        expected = eigvalsh(moment.total.as_subclass(Tensor).double())
        torch.testing.assert_close(moment.eigenvalues().as_subclass(Tensor), expected)
    SecondMoment.decompose_all(moments)
    assert len(seen) == 7
    moments[1].count(1)
    SecondMoment.decompose_all(moments)
    assert seen[7:] == [(5, 5)]


def test_eigenvalues_of_a_network(device):
    """On a GPU by what is used there; on the CPU by the function that is used elsewhere."""
    model = neyshabur("f_fc+conv", width=1, in_channels=1).to(device)
    batch = torch.randn(20, 1, 32, 32, device=device), torch.randint(10, (20,), device=device)
    la = KronLaplace(model).fit([batch])
    sides = (m for f in la.factors.values() for m in (f.input_moment, f.output_moment) if m is not None)
    moments = list(dict.fromkeys(m for m in sides if m.total.shape[1] <= 256))  # larger ones take LAPACK seconds
    together = eigenvalues.eigenvalues_of_all([m.total for m in moments])
    for moment, values in zip(moments, together, strict=True):
        single = torch.linalg.eigvalsh(moment.total.cpu().double())
        close = {"rtol": 1e-9, "atol": 1e-12 * float(single.max())}
        torch.testing.assert_close(values.cpu(), single, **close)
        torch.testing.assert_close(moment.eigenvalues().cpu(), single.clamp(min=0), **close)

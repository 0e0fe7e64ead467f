"""Eigenvalues of blocks; oracles are LAPACK by torch, and matrices whose eigenvalues are known."""

from __future__ import annotations

import ctypes
import math
import threading
import types
from collections.abc import Iterator
from pathlib import Path

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


# On the CPU, several calls of LAPACK at once


@pytest.fixture
def threads() -> Iterator[int]:
    """Of torch, of which LAPACK can be given one where it is MKL, linked so that its functions are found."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists() or not hasattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local"):
        pytest.skip("this torch has no MKL, or not on Linux")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def known(groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Blocks, second differences times g + 1 in a random basis, and their eigenvalues."""
    k = torch.arange(1, size + 1, dtype=torch.float64)
    values = (2 - 2 * torch.cos(math.pi * k / (size + 1))) * torch.arange(1, groups + 1)[:, None]
    bases = torch.linalg.qr(torch.randn(groups, size, size, dtype=torch.float64))[0]
    return bases * values[:, None] @ bases.mT, values


def test_each_call_has_a_thread_of_its_own(threads):
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    together = threading.Barrier(threads)

    def team(item: int) -> tuple[int, int, int]:
        together.wait(60)  # breaks unless all are at it
        a = torch.randn(300, 300)
        torch.linalg.eigvalsh((a + a.T).double())  # what may set the numbers again
        return item, torch.get_num_threads(), library.MKL_Get_Max_Threads()

    assert eigenvalues.calls_at_once() == threads
    assert eigenvalues.map_at_once(team, range(2 * threads)) == [(item, 1, 1) for item in range(2 * threads)]
    assert torch.get_num_threads() == library.MKL_Get_Max_Threads() == threads
    assert eigenvalues.solver(torch.device("cpu")) == f"torch's LAPACK, {threads} at once"


def test_what_fails_is_raised_and_ends_the_others(threads):
    begun, stop = [], threading.Event()

    def fail(item: int) -> None:
        begun.append(item)
        threading.Event().wait(0.01)
        if item == 0:
            assert stop.wait(60)  # the first takes longest
        if item == 1:
            stop.set()
            raise torch.linalg.LinAlgError("of item 1")

    with pytest.raises(torch.linalg.LinAlgError, match="of item 1"):
        eigenvalues.map_at_once(fail, range(1000))
    assert len(begun) < 500


def test_one_call_after_the_other_where_threads_cannot_be_limited(monkeypatch):
    monkeypatch.setattr(eigenvalues, "_limits", lambda: None)
    assert eigenvalues.calls_at_once() == 1
    assert eigenvalues.map_at_once(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
    assert eigenvalues.solver(torch.device("cpu")) == "torch's LAPACK, one after the other"


@pytest.mark.parametrize("without", ["mkl", "openmp", ""])
def test_other_libraries_are_left_alone(without, monkeypatch):
    """Also one that lacks the functions."""
    for name in ("mkl", "openmp"):
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda name=name: name != without)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    assert eigenvalues._limits.__wrapped__() is None


def test_eigenvalues_by_threads(threads):
    sets, expected = zip(
        *(known(*shape) for shape in [(3, 200), (40, 5), (1, 1), (9, 64), (2, 300), (1, 65)]), strict=True
    )
    found = eigenvalues.eigenvalues_of_all(sets)
    for values, right in zip(found, expected, strict=True):
        torch.testing.assert_close(values, right.sort().values, rtol=1e-12, atol=1e-12 * float(right.max()))
    single = eigenvalues.eigenvalues_of_all([blocks.float() for blocks in sets])
    for values, right in zip(single, expected, strict=True):
        torch.testing.assert_close(values, right.sort().values, rtol=1e-6, atol=1e-6 * float(right.max()))
        assert values.dtype == torch.float64


@pytest.fixture
def decomposed(monkeypatch) -> dict[int, list[tuple[int, bool, int]]]:
    """By the rows of blocks, how many went together, whether in a thread beside the main one, and its threads."""
    seen, eigvalsh = {}, torch.linalg.eigvalsh

    def note(blocks: Tensor) -> Tensor:
        own = threading.current_thread() is not threading.main_thread()
        seen.setdefault(blocks.shape[1], []).append((blocks.shape[0], own, torch.get_num_threads()))
        return eigvalsh(blocks)

    monkeypatch.setattr(torch.linalg, "eigvalsh", note)
    return seen


def test_threads_share_the_blocks_of_one_set_and_large_blocks_have_all(threads, decomposed, monkeypatch):
    monkeypatch.setattr(eigenvalues, "AT_ONCE_ON_CPU", 50)
    sets, expected = zip(*(known(*shape) for shape in [(7, 5), (2, 8), (3, 7)]), strict=True)
    for values, right in zip(eigenvalues.eigenvalues_of_all(sets), expected, strict=True):
        torch.testing.assert_close(values, right)
    assert sorted(decomposed[5]) == [(1, True, 1), (2, True, 1), (2, True, 1), (2, True, 1)]
    assert decomposed[7] == [(1, True, 1)] * 3  # 49 numbers
    assert decomposed[8] == [(1, False, threads)] * 2


def test_what_most_of_the_time_goes_into_has_all_threads(threads, decomposed):
    eigenvalues.eigenvalues_of_all([known(1, size)[0] for size in (40, 4, 5)])
    assert decomposed == {40: [(1, False, threads)], 4: [(1, True, 1)], 5: [(1, True, 1)]}


def test_nothing_to_decompose():
    shapes = [(0, 4), (3, 0), (0, 0)]
    assert eigenvalues.eigenvalues_of_all([]) == []
    found = eigenvalues.eigenvalues_of_all([torch.zeros(groups, size, size) for groups, size in shapes])
    assert [tuple(values.shape) for values in found] == shapes


def test_constants_whatever_is_asked_for(threads):
    """Threads have modes of their own."""
    blocks = torch.eye(3).expand(2, 3, 3).clone().requires_grad_()
    found = eigenvalues.eigenvalues_of_all([blocks, blocks.detach()])
    assert not any(values.requires_grad for values in found)
    with torch.inference_mode():
        moments = [SecondMoment(2, size, torch.zeros(0), str(size)) for size in (3, 4, 5)]
        for moment in moments:
            moment.add(torch.eye(moment.total.shape[1])[:, None].expand(-1, 2, -1))
        SecondMoment.decompose_all(moments)
    for moment in moments:
        assert torch.equal(moment.eigenvalues(), torch.ones(moment.total.shape[:2], dtype=torch.float64))


def test_projections_are_made_one_after_the_other(monkeypatch):
    basis = SpatialBasis(2)
    moments = [
        SecondMoment(2, size, torch.zeros(0), str(place), which)
        for place, (size, which) in enumerate([(8, None), (8, basis), (4, None), (12, basis)])
    ]
    for moment in moments:
        moment.add(torch.randn(20, *moment.total.shape[:2]))
    alive, projected = [], SecondMoment.projected
    monkeypatch.setattr(SecondMoment, "projected", lambda m: alive.append(m.name) or projected(m))
    at_once, of_all = [], eigenvalues.eigenvalues_of_all
    monkeypatch.setattr(
        "ella_cuda.laplace.second_moment.eigenvalues_of_all",
        lambda sets, rows: at_once.append(alive[:]) or alive.clear() or of_all(sets, rows),
    )
    SecondMoment.decompose_all(moments)
    assert at_once == [["0", "2"], ["1"], ["3"]]
    for moment in moments:
        psi = torch.eye(4) if moment.basis is None else basis.matrix()
        psi = torch.block_diag(*[psi.double()] * (moment.total.shape[1] // 4))
        expected = torch.linalg.eigvalsh(psi @ moment.total.double() @ psi.mT)
        torch.testing.assert_close(moment.eigenvalues(), expected, atol=1e-6 * float(expected.max()), rtol=1e-6)


def few_rows(count: int, size: int) -> tuple[Tensor, Tensor]:
    """A sum of outer products ``(1, size, size)`` and its eigenvalues, which are twelve orders of magnitude apart, ascending."""
    values = torch.logspace(-6, 6, count, dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(size, count, dtype=torch.float64))[0]
    return ((vectors * values) @ vectors.T)[None], torch.cat([values.new_zeros(size - count), values])[None]


def test_sums_of_few_outer_products_have_as_many_eigenvalues(threads):
    (few, expected), (whole, all_of_them) = few_rows(40, 300), few_rows(300, 300)
    error = torch.finfo(torch.float64).eps
    sets, rows = [few, whole, few.expand(2, -1, -1)], [(40, error), (300, error), (40, error)]
    found = eigenvalues.eigenvalues_of_all(sets, rows)
    for values, right in zip(found, (expected, all_of_them, expected.expand(2, -1)), strict=True):
        torch.testing.assert_close(values, right, rtol=1e-12, atol=300 * error * 1e6)
    assert (found[0] == 0).sum() >= 300 - 40 - eigenvalues.SPARE  # exactly


def test_a_bound_that_is_too_small_is_noticed():
    """Sums of other things than rows, of which a rule counts too few."""
    blocks, expected = few_rows(60, 300)
    error = torch.finfo(torch.float64).eps
    assert eigenvalues.of_rank(blocks, 45, error) is None
    (found,) = eigenvalues.eigenvalues_of_all([blocks], [(45, error)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize(("rows", "size"), [(50, 50 + 8), (200, 300)])
def test_a_moment_knows_how_many_rows_it_has(rows, size, monkeypatch):
    moment = SecondMoment(1, 300, torch.zeros(()), "few")
    for part in torch.randn(rows, 1, 300).split(30):
        moment.add(part)
    sizes, eigvalsh = [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda blocks: sizes.append(blocks.shape[-1]) or eigvalsh(blocks))
    SecondMoment.decompose_all([moment])
    assert sizes == [size]
    expected = eigvalsh(moment.total)
    torch.testing.assert_close(moment.eigenvalues(), expected, rtol=1e-5, atol=1e-6 * float(expected.max()))

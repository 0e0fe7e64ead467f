"""Eigenvalues of blocks; oracles are LAPACK by torch, and matrices whose eigenvalues are known."""

from __future__ import annotations

import ctypes
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.decomposition import Elsewhere, Ops, Reads
from ella_cuda.laplace import KronLaplace, SecondMoment, eigenvalues
from ella_cuda.laplace.posterior import eigenbases_of
from ella_cuda.nn import SpatialBasis
from ella_cuda.ops import _lapack
from ella_cuda.ops.symmetric_eigenvalues import most_rows, symmetric_eigenvalues

CUDA = torch.device("cuda", 1)


def symmetric(groups: int, size: int, **kind) -> Tensor:
    half = torch.randn(groups, size, size, **{"dtype": torch.float64, **kind})
    return half + half.mT


def of_each(sets: Sequence[Tensor], rows: Sequence[tuple[int, float]] = ()) -> list[Tensor]:
    return per_set(eigenvalues.eigenvalues_of_all(sets, rows), sets)


def per_set(values: Tensor, sets: Sequence[Tensor]) -> list[Tensor]:
    parts = values.as_subclass(Tensor).split([blocks.shape[0] * blocks.shape[1] for blocks in sets])
    return [part.view(blocks.shape[:2]) for part, blocks in zip(parts, sets, strict=True)]


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
def decomposed(monkeypatch) -> dict[int, list[tuple[int, bool, int]]]:
    """By the rows of blocks, how many went to torch together, whether in a thread beside the main one, and its threads."""
    seen: dict[int, list[tuple[int, bool, int]]] = {}

    def noting(solve: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def note(blocks: Tensor) -> Any:
            own = threading.current_thread() is not threading.main_thread()
            seen.setdefault(blocks.shape[-1], []).append((blocks.shape[:-2].numel(), own, torch.get_num_threads()))
            return solve(blocks)

        return note

    for name in ("eigvalsh", "eigh"):
        monkeypatch.setattr(torch.linalg, name, noting(getattr(torch.linalg, name)))
    return seen


@pytest.fixture
def own_calls(monkeypatch):
    """The groups and rows of the sets of each call of our kernel."""
    seen, op = [], torch.ops.ella_cuda.symmetric_eigenvalues

    class Ops:
        @staticmethod
        def symmetric_eigenvalues(sets, ranks, errors):
            if torch._C._is_torch_function_enabled():  # a subclass comes here again without
                seen.append([tuple(blocks.shape[:2]) for blocks in sets])
            return op(sets, ranks, errors)

    monkeypatch.setattr(torch.ops, "ella_cuda", Ops)
    return seen


def test_blocks_of_all_sizes_by_our_kernel_together(monkeypatch, own_calls, decomposed):
    """The largest come first; larger ones than it takes go where they went."""
    sets = [symmetric(*shape) for shape in [(3, 4), (1, 9), (2, 7), (2, 4), (0, 3), (5, 1)]]
    decompose_by(monkeypatch, 7)
    expected = [torch.linalg.eigh(blocks)[0] for blocks in sets]
    decomposed.clear()
    found = of_each([blocks.as_subclass(Elsewhere) for blocks in sets])
    assert own_calls == [[(2, 7), (3, 4), (2, 4), (0, 3), (5, 1)]] and 9 in decomposed
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_our_kernel_has_no_more_numbers_at_once_than_memory_allows(monkeypatch, own_calls):
    decompose_by(monkeypatch, 7)
    monkeypatch.setattr(_lapack, "AT_ONCE_ELSEWHERE", 40)
    sets = [symmetric(3, 4, dtype=torch.float32), symmetric(1, 7), symmetric(2, 2)]
    found = of_each([blocks.as_subclass(Elsewhere) for blocks in sets])
    assert own_calls == [[(1, 7)], [(2, 4)], [(1, 4), (2, 2)]]
    for mine, blocks in zip(found, sets, strict=True):
        torch.testing.assert_close(mine, torch.linalg.eigvalsh(blocks.double()))


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
        flat = symmetric_eigenvalues([b.to(device) for b in together])
        for found, blocks in zip(per_set(flat, together), together, strict=True):
            exact = torch.linalg.eigvalsh(blocks)
            error = (found.cpu() - exact).abs().amax(1)
            assert bool((error <= 1e-14 * (10 + blocks.shape[1] ** 0.5) * exact.abs().amax(1)).all()), blocks.shape
            assert bool((found.diff() >= 0).all())
    assert torch.equal(*(symmetric_eigenvalues([b.to(device) for b in sets]) for _ in range(2)))
    sets[0][1] = torch.nan
    found = per_set(symmetric_eigenvalues([b.to(device) for b in sets[:2]]), sets[:2])
    assert found[0].isnan().flatten().tolist() == [False, True, False] and not found[1].isnan().any()


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


@pytest.mark.parametrize(("own", "reads"), [(0, 2), (5, 1)])
def test_the_device_is_waited_for_together(monkeypatch, own, reads):
    """However many moments there are: for what is zero in blocks larger than our kernel takes, and for what is wrong."""
    decompose_by(monkeypatch, own)
    moments = moments_elsewhere((2, 3), (1, 5), (4, 3)) + moments_elsewhere((2, 4), basis=SpatialBasis(2))
    with Reads() as counted:
        SecondMoment.decompose_all(moments)
    assert counted.count == reads


def test_the_evidence_decomposes_all_moments_together():
    la = KronLaplace(torch.nn.Linear(3, 2)).fit([(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))])
    with Ops() as counted:
        la.log_marginal_likelihood()
    assert counted.ops["ella_cuda.symmetric_eigenvalues.default"] == 1


def test_moments_decomposed_together_keep_their_eigenvalues(monkeypatch, decomposed):
    """Whatever is asked afterwards: nothing is decomposed again, unless rows were added."""
    moments = moments_elsewhere((2, 3), (1, 5), (4, 3))
    decompose_by(monkeypatch, 0)
    SecondMoment.decompose_all(moments)
    for moment in moments:
        expected = torch.from_numpy(np.linalg.eigvalsh(moment.total.as_subclass(Tensor).numpy()))
        torch.testing.assert_close(moment.eigenvalues().as_subclass(Tensor), expected)
    moments[1].count(1)
    SecondMoment.decompose_all(moments)
    assert {rows: len(calls) for rows, calls in decomposed.items()} == {3: 6, 5: 2}


def with_rows_of_zeros(size: int, *kept: int) -> Tensor:
    """Positive definite blocks of so many rows in random places, and rows of zeros."""
    blocks = torch.zeros(len(kept), size, size, dtype=torch.float64)
    for block, rows in zip(blocks, kept, strict=True):
        half, places = torch.randn(rows, 2 * rows + 1, dtype=torch.float64), torch.randperm(size)[:rows]
        block[places[:, None], places] = half @ half.T
    return blocks


@pytest.mark.parametrize("own", [None, 0, 150], ids=["CPU", "cuSOLVER", "our kernel"])
def test_rows_of_zeros_are_not_decomposed(monkeypatch, own_calls, decomposed, own):
    """Nor is a block that is not finite, whose eigenvalues are nan."""
    sets = [with_rows_of_zeros(300, 120, 300, 0, 299), with_rows_of_zeros(40, 7)]
    expected = list(map(torch.linalg.eigvalsh, sets))
    sets[0][1, 5, 5] = expected[0][1] = torch.nan
    decomposed.clear()
    if own is not None:
        decompose_by(monkeypatch, own)
    given = sets if own is None else [blocks.as_subclass(Elsewhere) for blocks in sets]
    for found, right in zip(of_each(given), expected, strict=True):
        torch.testing.assert_close(
            found, right, rtol=1e-13, atol=1e-13 * float(right.nan_to_num().max()), equal_nan=True
        )
    assert sorted(decomposed) == [0, 7 if own == 0 else 40, 120, 299, 300]
    assert own != 150 or own_calls == [[(1, 120), (1, 40), (1, 0)]]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("rows", "kept"), [(1000, 290), (20, 290), (120, 290), (20, 300), (1000, 0)])
def test_eigenvectors_beside_rows_of_zeros(decomposed, rows, kept, elsewhere):
    """An orthonormal basis that has the unit vectors of such rows, of all ranks."""
    block = with_rows_of_zeros(300, kept)
    if rows < kept:
        halves = block[:, :, :rows]
        block = halves @ halves.mT
    given = [block.as_subclass(Elsewhere) if elsewhere else block]
    values, (vectors,) = eigenvalues.eigenbases_of_all(given, [(rows, torch.finfo(torch.float64).eps)])
    values, vectors = values.as_subclass(Tensor), vectors.as_subclass(Tensor)[0]
    assert list(decomposed) == [min(rows + _lapack.SPARE, kept)] and bool((values.diff() >= 0).all())
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(300, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        vectors * values @ vectors.mT, block[0], rtol=0, atol=1e-12 * float(block.abs().max()) + 1e-300
    )


def test_eigenvectors_of_small_blocks_of_one_size_are_taken_together(decomposed, monkeypatch):
    monkeypatch.setattr(_lapack, "AT_ONCE_ON_CPU", 3 * 25)
    sets = [
        torch.randn(groups, rows, 2 * rows, dtype=torch.float64) for groups, rows in ((1, 5), (2, 7), (2, 5), (2, 5))
    ]
    sets = [half @ half.mT for half in sets]
    values, vectors = eigenvalues.eigenbases_of_all(sets)
    assert {rows: len(calls) for rows, calls in decomposed.items()} == {5: 2, 7: 2}  # three of 25 numbers, one of 49
    split = values.split([blocks.shape[0] * blocks.shape[1] for blocks in sets])
    for blocks, own_values, own in zip(sets, split, vectors, strict=True):
        torch.testing.assert_close((own * own_values.view(len(blocks), 1, -1)) @ own.mT, blocks, rtol=0, atol=1e-12)


@pytest.mark.parametrize("largest", [((4, 1024), 1), ((5, 1024), 0), ((2, 720), 1), ((3, 720), 0)])
def test_cusolver_takes_the_largest_where_they_are_few(largest):
    """As an H200 has it: 8 blocks of 1,024 take our kernel 45 ms and cuSOLVER 9.8 each; 2 of 720 take 15.7 and 7.1 each."""
    assert eigenvalues.left_to_cusolver([largest[0], (9, 64)]) == largest[1]


def test_a_prediction_decomposes_once(decomposed):
    """Also what was not decomposed before, whose eigenvalues the evidence then takes; a 3x3 filter sees the centre of one pixel alone."""
    model = torch.nn.Sequential(torch.nn.Conv2d(32, 5, 3, padding=1, bias=False), torch.nn.Flatten())
    la = KronLaplace(model).fit([(torch.randn(400, 32, 1, 1), torch.randint(5, (400,)))])
    basis = eigenbases_of(la)["0.weight"]
    la.log_marginal_likelihood()
    assert {rows: len(calls) for rows, calls in decomposed.items()} == {5: 1, 32: 1}
    values, vectors = basis.values.inputs[0], basis.vectors_in[0].double()
    torch.testing.assert_close(vectors * values @ vectors.mT, la.factors["0.weight"].inputs[0], rtol=0, atol=1e-5)


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

    assert _lapack.calls_at_once() == threads
    assert _lapack.map_at_once(team, range(2 * threads)) == [(item, 1, 1) for item in range(2 * threads)]
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
        _lapack.map_at_once(fail, range(1000))
    assert len(begun) < 500


@pytest.mark.parametrize("without", ["mkl", "openmp", ""])
def test_other_libraries_are_left_alone(without, monkeypatch):
    """Also one that lacks the functions: one call comes after the other."""
    for name in ("mkl", "openmp"):
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda name=name: name != without)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    monkeypatch.setattr(_lapack, "_limits", _lapack._limits.__wrapped__)
    assert _lapack.calls_at_once() == 1
    assert _lapack.map_at_once(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
    assert eigenvalues.solver(torch.device("cpu")) == "torch's LAPACK, one after the other"


def test_threads_share_the_blocks_of_one_set_and_large_blocks_have_all(threads, decomposed, monkeypatch):
    monkeypatch.setattr(_lapack, "AT_ONCE_ON_CPU", 50)
    sets, expected = zip(*(known(*shape) for shape in [(7, 5), (2, 8), (3, 7)]), strict=True)
    for values, right in zip(of_each(sets), expected, strict=True):
        torch.testing.assert_close(values, right)
    assert sorted(decomposed[5]) == [(1, True, 1), (2, True, 1), (2, True, 1), (2, True, 1)]
    assert decomposed[7] == [(1, True, 1)] * 3  # 49 numbers
    assert decomposed[8] == [(1, False, threads)] * 2


def test_what_most_of_the_time_goes_into_has_all_threads(threads, decomposed):
    eigenvalues.eigenvalues_of_all([known(1, size)[0] for size in (40, 4, 5)])
    assert decomposed == {40: [(1, False, threads)], 4: [(1, True, 1)], 5: [(1, True, 1)]}


def test_nothing_to_decompose():
    shapes = [(0, 4), (3, 0), (0, 0)]
    assert eigenvalues.eigenvalues_of_all([]).shape == (0,)
    found = of_each([torch.zeros(groups, size, size) for groups, size in shapes])
    assert [tuple(values.shape) for values in found] == shapes


def test_constants_whatever_is_asked_for(threads):
    """Threads have modes of their own."""
    blocks = torch.eye(3).expand(2, 3, 3).clone().requires_grad_()
    found = eigenvalues.eigenvalues_of_all([blocks, blocks.detach()])
    assert not found.requires_grad
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
    found = of_each(sets, rows)
    for values, right in zip(found, (expected, all_of_them, expected.expand(2, -1)), strict=True):
        torch.testing.assert_close(values, right, rtol=1e-12, atol=300 * error * 1e6)
    assert (found[0] == 0).sum() >= 300 - 40 - _lapack.SPARE  # exactly


def test_a_bound_that_is_too_small_is_noticed():
    """Sums of other things than rows, of which a rule counts too few."""
    (blocks, expected), error = few_rows(60, 300), torch.finfo(torch.float64).eps
    assert not _lapack.within_range(blocks[0], 45, error)[2]
    (found,) = of_each([blocks], [(45, error)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize(("rows", "size"), [(50, 50 + 8), (200, 300)])
def test_a_moment_knows_how_many_rows_it_has(rows, size, decomposed):
    moment = SecondMoment(1, 300, torch.zeros(()), "few")
    for part in torch.randn(rows, 1, 300).split(30):
        moment.add(part)
    SecondMoment.decompose_all([moment])
    assert list(decomposed) == [size]
    expected = torch.linalg.eigvalsh(moment.total)
    torch.testing.assert_close(moment.eigenvalues(), expected, rtol=1e-5, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("columns", ["of a basis", "unit vectors", "with a unit vector"])
def test_columns_are_completed_to_an_orthogonal_matrix(columns):
    torch.manual_seed(0)
    given = torch.linalg.qr(torch.randn(60, 7, dtype=torch.float64)).Q
    if columns == "unit vectors":
        given = torch.eye(60, dtype=torch.float64)[:, :7]
    if columns == "with a unit vector":
        given = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), given)
    whole, size = _lapack.completed(given), len(given)
    torch.testing.assert_close(whole.T @ whole, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-13)
    signs = (whole[:, : given.shape[1]] * given).sum(0).sign()
    torch.testing.assert_close(whole[:, : given.shape[1]] * signs, given, rtol=0, atol=1e-13)

"""Eigenvalues on the CPU by several calls of LAPACK at once; oracles are matrices whose eigenvalues are known."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ella_cuda.laplace import SecondMoment, eigenvalues, lapack
from ella_cuda.nn import SpatialBasis


@pytest.fixture(params=[2, 5])
def threads(request) -> Iterator[int]:
    """Of torch, of which LAPACK can be given one where it is MKL, linked so that its functions are found."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists() or not hasattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local"):
        pytest.skip("this torch has no MKL, or not on Linux")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
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

    assert lapack.calls_at_once() == threads
    assert lapack.map_at_once(team, range(2 * threads)) == [(item, 1, 1) for item in range(2 * threads)]
    assert torch.get_num_threads() == library.MKL_Get_Max_Threads() == threads


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
        lapack.map_at_once(fail, range(1000))
    assert len(begun) < 500


def test_one_call_after_the_other_where_threads_cannot_be_limited(monkeypatch):
    monkeypatch.setattr(lapack, "_limits", lambda: None)
    assert lapack.calls_at_once() == 1
    assert lapack.map_at_once(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
    assert eigenvalues.solver(torch.device("cpu")) == "torch's LAPACK, one after the other"


def test_the_number_of_calls_is_said(threads):
    assert eigenvalues.solver(torch.device("cpu")) == f"torch's LAPACK, {threads} at once"


@pytest.mark.parametrize("without", ["mkl", "openmp"])
def test_other_libraries_are_left_alone(without, monkeypatch):
    monkeypatch.setattr(getattr(torch.backends, without), "is_available", lambda: False)
    assert lapack._limits.__wrapped__() is None


def test_a_library_without_the_functions(monkeypatch):
    for name in ("mkl", "openmp"):
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    assert lapack._limits.__wrapped__() is None


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


def test_threads_share_the_blocks_of_one_set_and_large_blocks_have_all(threads, monkeypatch):
    monkeypatch.setattr(eigenvalues, "AT_ONCE_ON_CPU", 50)
    seen, eigvalsh = {}, torch.linalg.eigvalsh

    def note(blocks: Tensor) -> Tensor:
        own = threading.current_thread() is not threading.main_thread()
        seen.setdefault(blocks.shape[1], []).append((blocks.shape[0], own, torch.get_num_threads()))
        return eigvalsh(blocks)

    monkeypatch.setattr(torch.linalg, "eigvalsh", note)
    sets, expected = zip(*(known(*shape) for shape in [(7, 5), (2, 8), (3, 7)]), strict=True)
    for values, right in zip(eigenvalues.eigenvalues_of_all(sets), expected, strict=True):
        torch.testing.assert_close(values, right)
    assert sorted(seen[5]) == [(1, True, 1), (2, True, 1), (2, True, 1), (2, True, 1)]
    assert seen[7] == [(1, True, 1)] * 3  # 49 numbers
    assert seen[8] == [(1, False, threads)] * 2


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


def test_what_most_of_the_time_goes_into_has_all_threads(threads, monkeypatch):
    own, eigvalsh = {}, torch.linalg.eigvalsh

    def note(blocks: Tensor) -> Tensor:
        own[blocks.shape[1]] = threading.current_thread() is not threading.main_thread()
        return eigvalsh(blocks)

    monkeypatch.setattr(torch.linalg, "eigvalsh", note)
    sets, expected = zip(*(known(*shape) for shape in [(1, 40), (1, 4), (1, 5)]), strict=True)
    for values, right in zip(eigenvalues.eigenvalues_of_all(sets), expected, strict=True):
        torch.testing.assert_close(values, right)
    assert own == {40: False, 4: True, 5: True}


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
    assert eigenvalues.eigenvalues_of_rank(blocks, 45, error) is None
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

"""Eigenvalues of blocks by cuSOLVER's batched routine, in a stand-in for its library on the CPU and, where there is a GPU, in itself;
of blocks of one size together, and of all sizes that our kernel takes."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ella_cuda.laplace import KronLaplace, SecondMoment, cusolver, eigenvalues
from ella_cuda.laplace.cusolver import ROUTINES, BatchedEigenvalues
from ella_cuda.models import neyshabur
from ella_cuda.nn import SpatialBasis
from ella_cuda.ops.symmetric_eigenvalues import most_rows, symmetric_eigenvalues
from python_tests.cuda_sim.simulator import compiler
from python_tests.recorded import Recorder


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return compiled(tmp_path_factory.mktemp("cusolver") / "libella_stand_in.so.0")


def compiled(target: Path, *flags: str) -> Path:
    if compiler() is None:
        pytest.skip("needs a C++ compiler")
    source = Path(__file__).with_name("cusolver_stand_in.cpp")
    subprocess.run([compiler(), "-std=c++17", "-O2", "-shared", "-fPIC", *flags, source, "-o", target], check=True)
    return target


@pytest.fixture
def calls(library):
    """How many calls the stand-in has had since."""
    count = ctypes.CDLL(str(library)).stand_in_calls
    count.restype = ctypes.c_int64
    before = count()
    return lambda: count() - before


@pytest.fixture
def solve(library) -> BatchedEigenvalues:
    return BatchedEigenvalues(str(library))


def symmetric(groups: int, size: int, **kind) -> Tensor:
    half = torch.randn(groups, size, size, **{"dtype": torch.float64, **kind})
    return half + half.mT


def decompose_by(monkeypatch, solve: BatchedEigenvalues | None, own: int = 0) -> None:
    """What decomposes blocks on a GPU: our kernel up to so many rows, else this routine, or torch where it is None."""
    monkeypatch.setattr(eigenvalues, "batched_eigenvalues", lambda device: solve)
    monkeypatch.setattr(eigenvalues, "own_rows", lambda device: own)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (3, 2), (5, 33), (40, 6)])
def test_one_call_for_all(solve, calls, shape):
    blocks = symmetric(*shape)
    torch.testing.assert_close(solve(blocks.clone()), torch.linalg.eigvalsh(blocks))
    assert calls() == 1


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_decompose(solve, calls, shape):
    assert solve(symmetric(*shape)).shape == shape
    assert calls() == 0


def test_the_triangle_that_torch_reads(solve):
    blocks = torch.randn(4, 6, 6, dtype=torch.float64)  # not symmetric
    torch.testing.assert_close(solve(blocks.clone()), torch.linalg.eigvalsh(blocks))


def test_calls_are_no_larger_than_the_library_takes(solve, calls):
    blocks = symmetric(40_000, 2)
    torch.testing.assert_close(solve(blocks.clone()), torch.linalg.eigvalsh(blocks))
    assert calls() == 3


def test_large_workspaces_are_parted(solve, calls, monkeypatch):
    monkeypatch.setattr(cusolver, "MAX_WORKSPACE", 256 + 2 * 4 * 8)  # of two blocks
    blocks = symmetric(7, 4)
    torch.testing.assert_close(solve(blocks.clone()), torch.linalg.eigvalsh(blocks))
    assert calls() == 4
    monkeypatch.setattr(cusolver, "MAX_WORKSPACE", 0)  # a single block has to fit
    torch.testing.assert_close(solve(blocks.clone()), torch.linalg.eigvalsh(blocks))


def test_blocks_that_do_not_converge_are_named(solve, monkeypatch):
    """By the factor that has them, wherever they were in the call."""
    decompose_by(monkeypatch, solve)
    moments = moments_elsewhere((2, 3), (5, 3))
    moments[1].total[3, 0, 0] = moments[1].total[4, 0, 0] = -1234
    with pytest.raises(
        torch.linalg.LinAlgError, match=r"5x3: the eigenvalues of block 3 of the factor did not converge"
    ):
        SecondMoment.decompose_all(moments)
    torch.testing.assert_close(
        moments[0].eigenvalues().as_subclass(Tensor),
        torch.linalg.eigvalsh(moments[0].total.as_subclass(Tensor).double()),
    )


def test_a_failing_call_is_named(solve):
    with pytest.raises(RuntimeError, match=r"cusolverDnXsyevBatched failed with status 7 \(INTERNAL_ERROR\)"):
        solve(symmetric(2, 13))
    assert solve(symmetric(2, 12)).shape == (2, 12)  # and the next one works


def test_libraries_without_the_routine(tmp_path):
    with pytest.raises(AttributeError, match="XsyevBatched"):
        BatchedEigenvalues(str(compiled(tmp_path / "libcusolver.so.old", "-DWITHOUT_BATCHED")))
    with pytest.raises(OSError):
        BatchedEigenvalues(str(tmp_path / "none"))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="where CUDA is, there is /proc")
def test_the_loaded_library_is_found(library, solve):
    assert cusolver._loaded("libella_stand_in.so") == str(library)
    with pytest.raises(OSError, match="is not loaded"):
        cusolver._loaded("libnobody")


def headers() -> Path | None:
    """NVIDIA's, which come with torch for CUDA."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return next((path.parent for folder in folders for path in Path(folder).rglob("cusolverDn.h")), None)


def test_signatures_are_those_of_the_header():
    folder = headers()
    if folder is None:
        pytest.skip("needs the header cusolverDn.h, which comes with torch for CUDA")
    text = (folder / "cusolverDn.h").read_text()
    handles = {"cusolverDnHandle_t", "cusolverDnParams_t", "cudaStream_t"}  # pointers to structures
    enums = {"cusolverEigMode_t", "cublasFillMode_t", "cudaDataType"}
    for name, kinds in ROUTINES.items():
        (arguments,) = re.findall(rf"\b{name}\(([^)]*)\)", text)
        expected = []
        for argument in arguments.split(","):
            *words, _ = argument.replace("*", " * ").split()
            kind = next(w for w in words if w != "const")
            if "*" in words or kind in handles:
                expected.append(ctypes.c_void_p)
            else:
                expected.append(
                    ctypes.c_int if kind in enums else {"int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t}[kind]
                )
        assert kinds == tuple(expected), name
    numbers = {
        "CUSOLVER_EIG_MODE_NOVECTOR": cusolver.NO_VECTORS,
        "CUBLAS_FILL_MODE_UPPER": cusolver.UPPER,
        "CUDA_R_64F": cusolver.R_64F,
        **{f"CUSOLVER_STATUS_{word}": number for number, word in enumerate(cusolver.STATUS)},
    }
    found = {}
    for header in ("cusolver_common.h", "cublas_api.h", "library_types.h"):
        path = next(iter(folder.parent.rglob(header)), None)
        if path is not None:
            found |= {k: int(v) for k, v in re.findall(r"(C[A-Z0-9_]+) *= *(\d+)", path.read_text())}
    known = {name: number for name, number in numbers.items() if name in found}
    assert len(known) >= 10 and known == {name: found[name] for name in known}


def test_blocks_of_one_size_together(monkeypatch):
    moments = [symmetric(*shape) for shape in [(3, 4), (1, 5), (2, 4), (5, 1), (4, 4), (2, 5)]]
    moments.append(symmetric(2, 4, dtype=torch.float32))
    decompose_by(monkeypatch, None)
    # Of the nine of four rows, the last four are on their own.
    monkeypatch.setattr(eigenvalues, "AT_ONCE_ELSEWHERE", 5 * 16)
    seen, eigvalsh = [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(tuple(a.shape[:2])) or eigvalsh(a))
    found = eigenvalues.eigenvalues_of_all([blocks.as_subclass(Elsewhere) for blocks in moments])
    assert seen == [(5, 4), (4, 4), (3, 5), (5, 1), (2, 4)]
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
    decompose_by(monkeypatch, None, own=7)
    seen, eigvalsh = [], torch.linalg.eigvalsh
    expected = [eigvalsh(blocks) for blocks in sets]
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(tuple(a.shape)) or eigvalsh(a))
    found = eigenvalues.eigenvalues_of_all([blocks.as_subclass(Elsewhere) for blocks in sets])
    assert own_calls == [([2, 5, 0, 5], [7, 4, 3, 1])] and (1, 9, 9) in seen
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.as_subclass(Tensor), wanted)


def test_our_kernel_has_no_more_numbers_at_once_than_memory_allows(monkeypatch, own_calls):
    decompose_by(monkeypatch, None, own=7)
    monkeypatch.setattr(eigenvalues, "AT_ONCE_ELSEWHERE", 40)
    sets = [symmetric(3, 4), symmetric(1, 7), symmetric(2, 2)]
    found = eigenvalues.eigenvalues_of_all([blocks.as_subclass(Elsewhere) for blocks in sets])
    assert own_calls == [([1], [7]), ([2], [4]), ([1, 2], [4, 2])]
    for mine, blocks in zip(found, sets, strict=True):
        torch.testing.assert_close(mine.as_subclass(Tensor), torch.linalg.eigvalsh(blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_our_kernel_leaves_what_is_to_be_differentiated_to_torch(monkeypatch, own_calls, dtype):
    decompose_by(monkeypatch, None, own=7)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_cuda_blocks_go_to_the_batched_routine(dtype, solve, calls, monkeypatch):
    decompose_by(monkeypatch, solve)
    blocks = symmetric(3, 5, dtype=dtype)
    before = blocks.clone()
    found = eigenvalues.eigenvalues(blocks.as_subclass(Elsewhere))
    assert calls() == 1 and torch.equal(blocks, before)  # the routine overwrites a copy
    torch.testing.assert_close(found.as_subclass(Tensor), torch.linalg.eigvalsh(blocks.double()))
    wanted = symmetric(3, 5).requires_grad_()
    eigenvalues.eigenvalues(wanted.as_subclass(Elsewhere)).sum().backward()
    assert calls() == 1 and torch.allclose(wanted.grad, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))


def test_torch_decomposes_what_a_failing_call_left(solve, monkeypatch):
    decompose_by(monkeypatch, solve)
    blocks = symmetric(2, 13)  # the size at which the stand-in fails
    with pytest.warns(UserWarning, match=r"status 7 \(INTERNAL_ERROR\)\. Torch decomposes these \(2, 13, 13\) blocks"):
        found = eigenvalues.eigenvalues(blocks.as_subclass(Elsewhere))
    torch.testing.assert_close(found.as_subclass(Tensor), torch.linalg.eigvalsh(blocks))


def moments_elsewhere(*shapes: tuple[int, int], basis: SpatialBasis | None = None) -> list[SecondMoment]:
    moments = []
    for groups, size in shapes:
        moment = SecondMoment(groups, size, torch.zeros(0, dtype=torch.float32), f"{groups}x{size}", basis)
        moment.add(torch.randn(9, groups, size))
        moment.total = moment.total.as_subclass(Elsewhere)
        moments.append(moment)
    return moments


def test_moments_on_a_basis_are_decomposed_as_projected(monkeypatch):
    decompose_by(monkeypatch, None)
    basis = SpatialBasis(2)
    moments = [*moments_elsewhere((3, 4), (2, 8), basis=basis), *moments_elsewhere((1, 4))]
    SecondMoment.decompose_all(moments)
    psi = torch.block_diag(basis.matrix(), basis.matrix()).double()
    for moment, projection in zip(moments, (basis.matrix().double(), psi, torch.eye(4).double()), strict=True):
        expected = torch.linalg.eigvalsh(projection @ moment.total.as_subclass(Tensor).double() @ projection.mT)
        torch.testing.assert_close(moment.eigenvalues().as_subclass(Tensor), expected, atol=1e-6, rtol=1e-6)


def test_moments_decomposed_together_are_checked(monkeypatch):
    decompose_by(monkeypatch, None)
    (negative, fine), (infinite,) = moments_elsewhere((2, 3), (1, 3)), moments_elsewhere((1, 5))
    negative.total[1] -= 100 * torch.eye(3)
    with pytest.raises(ArithmeticError, match="2x3: block 1 of the factor has the eigenvalue"):
        SecondMoment.decompose_all([fine, negative])
    infinite.total[0, 0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="1x5: the factor has entries that are not finite"):
        SecondMoment.decompose_all([fine, infinite])


def test_moments_decomposed_together_are_checked_together(monkeypatch):
    """The device is waited for twice, for one row of numbers each time, however many moments there are."""
    decompose_by(monkeypatch, None)
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


CUDA = torch.device("cuda", 1)


@pytest.fixture
def cuda_torch(monkeypatch, library):
    """A torch for CUDA of some version, which loads the stand-in when it needs cuSOLVER."""
    cusolver.batched_eigenvalues.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked = []
    monkeypatch.setattr(cusolver, "_have_cusolver_loaded", asked.append)
    monkeypatch.setattr(cusolver, "_loaded", lambda name: str(library))

    monkeypatch.setattr(eigenvalues, "own_rows", lambda device: 0)

    def of(version: str):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        return asked

    yield of
    cusolver.batched_eigenvalues.cache_clear()


def test_cusolver_is_called_where_torch_does_not(cuda_torch, calls):
    asked = cuda_torch("2.11.0+cu130")
    blocks = symmetric(3, 4)
    torch.testing.assert_close(cusolver.batched_eigenvalues(CUDA)(blocks.clone()), torch.linalg.eigvalsh(blocks))
    assert calls() == 1 and asked == [CUDA]
    assert eigenvalues.solver(CUDA) == "cuSOLVER, many at once" and asked == [CUDA]  # once for a device


@pytest.mark.parametrize("version", ["2.12.0+cu130", "2.14.1", "3.0"])
def test_cusolver_is_left_to_a_torch_that_calls_it_so(cuda_torch, version):
    assert not cuda_torch(version) and cusolver.batched_eigenvalues(CUDA) is None
    assert eigenvalues.solver(CUDA) == "torch's cuSOLVER, many at once"


def test_our_kernel_is_named_first(cuda_torch, monkeypatch):
    cuda_torch("2.12")
    monkeypatch.setattr(eigenvalues, "own_rows", lambda device: 640)
    assert (
        eigenvalues.solver(CUDA) == "our kernel up to 640 rows, all sizes at once; above torch's cuSOLVER, many at once"
    )


def test_an_old_cusolver_leaves_torch_alone_with_it(cuda_torch, monkeypatch):
    def none(name):
        raise OSError(f"{name} is not loaded.")

    cuda_torch("2.11.0")
    monkeypatch.setattr(cusolver, "_loaded", none)
    assert cusolver.batched_eigenvalues(CUDA) is None
    assert "one after the other above 32 rows" in eigenvalues.solver(CUDA)


def test_torch_without_cuda(cuda_torch, monkeypatch):
    asked = cuda_torch("2.11.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cusolver.batched_eigenvalues(CUDA) is None and not asked


def test_moments_decomposed_together_keep_their_eigenvalues(monkeypatch):
    """Whatever is asked afterwards: nothing is decomposed again, unless rows were added."""
    moments = moments_elsewhere((2, 3), (1, 5), (4, 3))
    seen, eigvalsh = [], torch.linalg.eigvalsh
    decompose_by(monkeypatch, None)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: seen.append(tuple(a.shape[:2])) or eigvalsh(a))
    SecondMoment.decompose_all(moments)
    assert seen == [(6, 3), (1, 5)]
    for moment in moments:
        expected = eigvalsh(moment.total.as_subclass(Tensor).double())
        torch.testing.assert_close(moment.eigenvalues().as_subclass(Tensor), expected)
    SecondMoment.decompose_all(moments)
    assert len(seen) == 2
    moments[1].count(1)
    SecondMoment.decompose_all(moments)
    assert seen[2:] == [(1, 5)]


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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 40), (60, 20), (60, 33), (40, 64), (9, 300), (2, 1000)])
def test_cusolver_itself(shape, device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    torch.linalg.eigvalsh(torch.eye(2, device=device))
    try:
        solve = BatchedEigenvalues(cusolver._loaded("libcusolver.so"))
    except AttributeError:
        pytest.skip("this cuSOLVER has no batched routine")
    blocks = symmetric(*shape)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = solve(blocks.to(device)).cpu()
    torch.testing.assert_close(found, torch.linalg.eigvalsh(blocks), rtol=1e-10, atol=1e-10)

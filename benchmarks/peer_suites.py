"""laplace-torch's and curvlinops' own tests with this package in the place of their classes or of their curvature.

    python -m benchmarks.peer_suites --laplace-torch DIR [--way names|backend|ella_kron] [-k EXPRESSION]
    python -m benchmarks.peer_suites --curvlinops DIR [-k EXPRESSION]

DIR is a checkout. laplace-torch's ``tests`` run with the ``laplace`` that is installed, of backends each test once, with one.

- names: ``KronLaplace``, ``FullLaplace`` and ``DiagLaplace`` are those of :mod:`ella_cuda.laplace`. An argument ``backend`` is dropped.
- backend: laplace-torch's classes, with :class:`ella_cuda.compat.laplace.EllaGGN` as the backend, given or by default.
- ella_kron: ``KronLaplace`` is :class:`ella_cuda.compat.laplace.EllaKronLaplace`; tests of other classes are laplace-torch's own.

Tests of networks in half precision are apart, since both packages refuse these. curvlinops' ``test`` runs with the ``curvlinops`` of the
checkout, see :mod:`benchmarks.peer_curvlinops`. Printed are the counts, each failure with its error, and why tests were skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WAY, REPORT = "ELLA_PEER_SUITES_WAY", "ELLA_PEER_SUITES_REPORT"
WAYS = ("names", "backend", "ella_kron")
FILES = ("test_baselaplace", "test_subset_params")
CURVLINOPS = [
    "test/test_kfac.py",
    "test/test_ekfac.py",
    "test/test_ggn_diagonal.py",
    "test/computers/test_ggn_diagonal.py",
]
Tests = list[list[str]]
NAMES = ("KronLaplace", "FullLaplace", "DiagLaplace")
BACKEND = "CurvlinopsGGN"  # of the tests that are of several
# Of other backends than this, and of which of them there are.
NOT_OURS = ("test_dict_data_diagEF_curvlinops_fails", "test_compatible_backend", "test_incompatible_backend")


# the plugin, in pytest's process --------------------------------------------------------------------------------------


_before: list[tuple[Any, str, Any]] = []  # module, name, what it was


def pytest_configure(config: pytest.Config) -> None:
    """Put this package where the tests import from, while they do."""
    if WAY not in os.environ:
        return
    import laplace
    import laplace.curvature.curvlinops

    way = os.environ[WAY]
    if way == "names":
        import ella_cuda.laplace

        found = {name: _without_backend(getattr(ella_cuda.laplace, name)) for name in NAMES}
    else:
        from ella_cuda.compat.laplace import EllaGGN, EllaKronLaplace

        found = {"KronLaplace": EllaKronLaplace} if way == "ella_kron" else {BACKEND: EllaGGN}
    for module in (laplace, laplace.curvature, laplace.curvature.curvlinops, laplace.baselaplace):
        for name, replacement in found.items():
            # EllaKronLaplace is a subclass of what it replaces, which laplace-torch calls by this name.
            if hasattr(module, name) and not (way == "ella_kron" and module is laplace.baselaplace):
                _before.append((module, name, getattr(module, name)))
                setattr(module, name, replacement)


def _without_backend(kind: type) -> type:
    def start(self: Any, *args: Any, backend: Any = None, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__init__": start})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the way has no part in, and all backends of a test but one."""
    if WAY not in os.environ:
        return
    way = os.environ[WAY]
    if way == "ella_kron":
        for module, name, own in _before:
            setattr(module, name, own)
    kept = [item for item in items if _belongs(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _belongs(item: Any) -> bool:
    values = item.callspec.params if hasattr(item, "callspec") else {}
    backend, kind = (getattr(values.get(name), "__name__", "") for name in ("backend", "laplace"))
    if backend not in ("", BACKEND, "EllaGGN") or kind == "LowRankLaplace":
        return False
    return item.originalname not in NOT_OURS


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome to the report."""
    if REPORT not in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    reason = getattr(crash, "message", message).strip().split("\n")[0]
    where = ""
    if crash is not None:
        entries = [e for e in report.longrepr.reprtraceback.reprentries if e.reprfileloc is not None]
        own = [e.reprfileloc for e in entries if "test" in e.reprfileloc.path.split(os.sep)[-1]]
        where = f":{own[-1].lineno}" if own else ""
    with open(os.environ[REPORT], "a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, reason, where]) + "\n")


# the command ----------------------------------------------------------------------------------------------------------


def run(root: Path, paths: list[str], plugins: list[str], imports: list[Path], expression: str, way: str = "") -> Tests:
    """Of each test the id, the outcome, the error and the line that raised it.

    Args:
        root: of the checkout; ``paths`` are files in it.
        plugins: of pytest, beside this one.
        imports: folders that modules come from, before what is installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        report.touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(root),
            "-c",
            os.devnull,
        ]
        command += [word for name in ("peer_suites", *plugins) for word in ("-p", f"benchmarks.{name}")]
        command += [*(["-k", expression] if expression else []), *(str(root / path) for path in paths)]
        environment = os.environ | {REPORT: str(report), "PYTHONDONTWRITEBYTECODE": "1"} | ({WAY: way} if way else {})
        inherited = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, imports), str(ROOT), inherited])
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [json.loads(line) for line in report.read_text().splitlines()]


def counted(tests: Tests) -> str:
    """Words for how many of the tests passed; those that were skipped do not count."""
    counts = Counter(outcome for _, outcome, _, _ in tests)
    return f"{counts['passed']} of {counts['passed'] + counts['failed']}"


def print_others(tests: Tests, folder: str) -> None:
    """Each failure with its error, and how many were skipped for which reason."""
    for name, outcome, reason, where in tests:
        if outcome == "failed":
            print(f"  {name.rpartition(f'{folder}/')[2]}{where}: {reason[:200]}")
    for reason, count in Counter(reason for _, outcome, reason, _ in tests if outcome == "skipped").most_common():
        print(f"  {count} skipped: {reason.removeprefix('Skipped: ')}")


def of_laplace_torch(root: Path, way: str, expression: str) -> None:
    """Print what its tests say of one of :data:`WAYS`."""
    found = run(root, [f"tests/{name}.py" for name in FILES], [], [], expression, way)
    half = [test for test in found if "dtype0" in test[0]]
    dtypes = [test for test in found if "test_dtype" in test[0] and test not in half]
    subsets = [test for test in found if "test_subset_params" in test[0]]
    rest = [test for test in found if test not in (*half, *dtypes, *subsets)]
    whole = [*rest, *subsets, *dtypes]
    print(
        f"{way}: {counted(whole)} ({counted(rest)} of test_baselaplace, {counted(subsets)} of test_subset_params, "
        f"{counted(dtypes)} of test_dtype); half precision apart: {counted(half)}"
    )
    if way == "ella_kron":
        kron = [test for test in whole if "EllaKronLaplace" in test[0] or test[0].partition("[")[0].endswith("_kron")]
        print(f"  of KronLaplace, which is the structure's: {counted(kron)}; the others are laplace-torch's own")
    print_others(found, "tests")


def of_curvlinops(root: Path, expression: str) -> None:
    """Print what its tests say of our factors, eigenbases and diagonals."""
    found = run(root, CURVLINOPS, ["peer_curvlinops"], [root], expression)
    files = Counter(name.partition("::")[0] for name, *_ in found)
    of_files = (f"{counted([t for t in found if t[0].startswith(f'{f}::')])} of {f.rpartition('/')[2]}" for f in files)
    print(f"curvlinops: {counted(found)} ({', '.join(of_files)})")
    print_others(found, "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laplace-torch", type=Path, metavar="DIR", help="a checkout, with its tests")
    parser.add_argument("--curvlinops", type=Path, metavar="DIR", help="a checkout, with its tests")
    parser.add_argument("--way", choices=WAYS, action="append", help="of laplace-torch one way alone; all by default")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="of pytest")
    given = parser.parse_args()
    if given.laplace_torch is None and given.curvlinops is None:
        parser.error("expected --laplace-torch DIR, --curvlinops DIR or both")
    for option, root, file in (
        ("--laplace-torch", given.laplace_torch, "tests/test_baselaplace.py"),
        ("--curvlinops", given.curvlinops, CURVLINOPS[0]),
    ):
        if root is not None and not (root / file).is_file():
            parser.error(f"{option}: {root} has no {file}; pass a checkout.")
    for way in (given.way or WAYS) if given.laplace_torch else ():
        of_laplace_torch(given.laplace_torch.resolve(), way, given.k)
    if given.curvlinops:
        of_curvlinops(given.curvlinops.resolve(), given.k)


if __name__ == "__main__":
    main()

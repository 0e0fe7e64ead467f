"""laplace-torch's own tests with this package in the place of its classes or of its curvature.

    python -m benchmarks.peer_suites --laplace-torch DIR [--way names|backend|ella_kron] [-k EXPRESSION]

DIR is a checkout of laplace-torch, whose ``tests`` run with the ``laplace`` that is installed. Of backends each test runs once, with one.

- names: ``KronLaplace``, ``FullLaplace`` and ``DiagLaplace`` are those of :mod:`ella_cuda.laplace`. An argument ``backend`` is dropped.
- backend: laplace-torch's classes, with :class:`ella_cuda.compat.laplace.EllaGGN` as the backend, given or by default.
- ella_kron: ``KronLaplace`` is :class:`ella_cuda.compat.laplace.EllaKronLaplace`; tests without it are left out.

Tests of networks in half precision are apart, since both packages refuse these. Printed are the counts, and each failure with its error.
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
    kept = [item for item in items if _belongs(item, way)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _belongs(item: Any, way: str) -> bool:
    values = item.callspec.params if hasattr(item, "callspec") else {}
    backend, kind = (getattr(values.get(name), "__name__", "") for name in ("backend", "laplace"))
    if backend not in ("", BACKEND, "EllaGGN") or kind == "LowRankLaplace":
        return False
    if item.originalname in NOT_OURS:
        return False
    return way != "ella_kron" or kind == "EllaKronLaplace" or item.originalname.endswith("_kron")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome to the report."""
    if WAY not in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = getattr(crash, "message", str(report.longrepr or "")).strip().split("\n")[0]
    where = ""
    if crash is not None:
        entries = [e for e in report.longrepr.reprtraceback.reprentries if e.reprfileloc is not None]
        own = [e.reprfileloc for e in entries if "tests" in e.reprfileloc.path]
        where = f":{own[-1].lineno}" if own else ""
    with open(os.environ[REPORT], "a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, reason, where]) + "\n")


# the command ----------------------------------------------------------------------------------------------------------


def run(tests: Path, way: str, expression: str) -> list[list[str]]:
    """Of each test the id, the outcome, the error and the line that raised it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        report.touch()
        paths = [str(tests / "tests" / f"{name}.py") for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.peer_suites", "-p", "no:cacheprovider"]
        command += ["--rootdir", str(tests), "-c", os.devnull, *(["-k", expression] if expression else []), *paths]
        environment = os.environ | {WAY: way, REPORT: str(report), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [json.loads(line) for line in report.read_text().splitlines()]


def counted(tests: list[list[str]]) -> str:
    """Words for how many of the tests passed; those that were skipped do not count."""
    counts = Counter(outcome for _, outcome, _, _ in tests)
    return f"{counts['passed']} of {counts['passed'] + counts['failed']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laplace-torch", type=Path, required=True, metavar="DIR", help="a checkout, with its tests")
    parser.add_argument("--way", choices=WAYS, action="append", help="one way alone; all by default")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="of pytest")
    given = parser.parse_args()
    if not (given.laplace_torch / "tests" / "test_baselaplace.py").is_file():
        parser.error(f"--laplace-torch: {given.laplace_torch} has no tests/test_baselaplace.py; pass a checkout.")
    for way in given.way or WAYS:
        found = run(given.laplace_torch.resolve(), way, given.k)
        half = [test for test in found if "dtype0" in test[0]]
        dtypes = [test for test in found if "test_dtype" in test[0] and test not in half]
        subsets = [test for test in found if "test_subset_params" in test[0]]
        rest = [test for test in found if test not in (*half, *dtypes, *subsets)]
        print(
            f"{way}: {counted([*rest, *subsets, *dtypes])} ({counted(rest)} of test_baselaplace, {counted(subsets)} of test_subset_params, "
            f"{counted(dtypes)} of test_dtype); half precision apart: {counted(half)}"
        )
        for name, outcome, reason, where in found:
            if outcome == "failed":
                print(f"  {name.partition('tests/')[2]}{where}: {reason[:200]}")


if __name__ == "__main__":
    main()

"""A pytest plugin that says in lines of JSON how many tests there are, which begin and end, and what fails, when it happens: a session
that hangs has no end, and its summary is never written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.gpu.run import TEST


def message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What a report says in one line: the exception, else the last line. The first line names only the process, under pytest-xdist."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return next((line for line in crash.message.splitlines() if line.strip()), "")
    lines = [line.strip() for line in str(report.longrepr or "").splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[-1]


class Failures:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def _say(self, **values: Any) -> None:
        self._terminal.write(f"\n{TEST}{json.dumps(values)}\n", flush=True)

    def _failed(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self._say(failed=report.nodeid, message=message(report)[:600], text=report.longreprtext[-6000:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._say(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._say(collected=len(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._failed(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say(ended=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Iterator[Any]:
        """No letters: the lines above tell more."""
        category, *_ = yield
        return category, "", ""


@pytest.hookimpl(trylast=True)  # the terminal's reporter is there then; xdist's workers have none
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Failures(terminal))

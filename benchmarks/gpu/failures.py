"""A pytest plugin that prints a failure when it happens, as the summary does at the end: a session that hangs has no end."""

from __future__ import annotations

from typing import Any

import pytest


class Failures:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else report.longreprtext
            self._terminal.ensure_newline()
            word = "FAILED" if report.when == "call" else "ERROR"
            self._terminal.write_line(f"{word} {report.nodeid} - {(said.splitlines() or [''])[0]}")
            self._terminal.flush()


@pytest.hookimpl(trylast=True)  # the terminal's reporter is there then; xdist's workers have none
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Failures(terminal))

"""Processes for the tests of groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from python_tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("processes"))
    yield made
    made.close()

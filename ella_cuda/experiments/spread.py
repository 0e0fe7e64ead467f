"""The runs of a grid on several processes: shared out among them, or each done by all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ella_cuda.distributed import Ranks
from ella_cuda.experiments.hyperparameters import RunConfig

SPREADS = ("data", "runs")
WAIT = 0.2  # seconds between looks at who is done

RunOne = Callable[..., dict[str, Any]]


class Spread:
    """What a grid's processes do together. Rank 0 has the folder: it says which runs are to be done, and gets all rows.

    Args:
        ranks: the processes.
        by: "data": every run is one of all processes, each with its part of the data. "runs": every run is one process', who is done with
            one takes the next.
    """

    def __init__(self, ranks: Ranks, by: str) -> None:
        self.ranks, self.by = ranks, by
        self._others_wait = True  # for rank 0, before its runs and after them

    def rows(
        self, run_one: RunOne, waiting: Sequence[RunConfig], out_dir: Path, how: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """On rank 0: the rows of runs that are to be done, as they come. What rank 0 fails with at a row is to be thrown in: all raise it."""
        self._others_wait = False
        self.ranks.agree()
        self.ranks.agree()  # others have the data
        self.ranks.from_first([config.name for config in waiting])
        rows = self._by_data if self.by == "data" else self._by_runs
        yield from rows(run_one, waiting, out_dir, how)
        self._others_wait = True

    def follow(
        self,
        run_one: RunOne,
        configs: Sequence[RunConfig],
        out_dir: Path,
        how: dict[str, Any],
        require: Callable[[], None],
    ) -> None:
        """On other ranks: their part of what rank 0 does in :meth:`rows`; ``require`` raises where this rank lacks what runs need."""
        self.ranks.agree()  # rank 0 may have fetched the data
        self.ranks.together(require)
        known = {config.name: config for config in configs}
        waiting = [known[name] for name in self.ranks.from_first(None)]
        rows = self._by_data if self.by == "data" else self._by_runs
        for _ in rows(run_one, waiting, out_dir, how):
            pass
        self.ranks.agree()  # rank 0 may have failed since

    def end(self) -> None:
        """On rank 0, after the runs: say that all that it had to do is done."""
        self._others_wait = False
        self.ranks.agree()

    def give_up(self, error: Exception) -> None:
        """On rank 0: have all raise what it raised, if the others wait for it."""
        if self._others_wait:
            self._others_wait = False
            self.ranks.agree(error)

    def _by_data(
        self, run_one: RunOne, waiting: Sequence[RunConfig], out_dir: Path, how: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        for config in waiting:
            row = run_one(config, out_dir / config.name, group=self.ranks.group, **how)
            error = None
            try:
                yield row
            except Exception as raised:
                error = raised
            self.ranks.agree(error)

    def _by_runs(
        self, run_one: RunOne, waiting: Sequence[RunConfig], out_dir: Path, how: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        store, error = _store(self.ranks), None
        lacking = set(range(len(waiting)))
        how = {**how, "progress": False}
        try:
            while not store.check(["failed"]) and (number := store.add("next", 1) - 1) < len(waiting):
                row = run_one(waiting[number], out_dir / waiting[number].name, **how)
                store.set(f"row {number}", json.dumps(row))
                if self.ranks.is_first:
                    yield from _come(store, lacking)
        except Exception as raised:
            error = raised
            store.set("failed", "")
        done = self.ranks.wait_for_all()  # not before all are here, or one has died
        while not done():
            if self.ranks.is_first and error is None:
                try:
                    yield from _come(store, lacking)
                except Exception as raised:
                    error = raised
            time.sleep(WAIT)
        self.ranks.agree(error)
        if self.ranks.is_first:
            try:
                yield from _come(store, lacking)
            except Exception as raised:
                error = raised
        self.ranks.agree(error)  # the store is rank 0's


def _come(store: Any, lacking: set[int]) -> Iterator[dict[str, Any]]:
    """Rows that have come since."""
    for number in sorted(lacking):
        if store.check([f"row {number}"]):
            lacking.discard(number)
            yield json.loads(store.get(f"row {number}"))


def _store(ranks: Ranks) -> Any:
    """What the ranks count in, in the memory of rank 0: another one for every grid and every start."""
    from torch.distributed import TCPStore

    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if ranks.is_first:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        ranks.from_first([host, store.port])
        return store
    host, port = ranks.from_first(None)
    return TCPStore(host, port, is_master=False)

"""The predicted scaling: by hand."""

from __future__ import annotations

import pytest

from python_tests.benchmark_files import importable, load

importable()
scaling = load("distributed_scaling")


def test_predicted_times_are_those_by_hand():
    measured = scaling.Measured(per_point=0.01, blocks=[4.0, 3.0, 3.0, 2.0], steps=0.5, packed=900, values=90)
    alone = {"pass": 10.0, "sum": 0.0, "eigenvalues": 12.0, "gather": 0.0, "steps": 0.5}
    assert scaling.predicted(measured, 1000, 1) == alone
    found = scaling.predicted(measured, 1000, 2)
    assert found["pass"] == pytest.approx(5.0) and found["eigenvalues"] == 6.0 and found["steps"] == 0.5
    assert found["sum"] == pytest.approx(900 / 450e9) and found["gather"] == pytest.approx(45 / 450e9)
    assert scaling.predicted(measured, 1000, 16)["sum"] == pytest.approx(2 * 15 / 16 * 900 / 50e9)
    assert scaling.predicted(measured, 1001, 16)["pass"] == pytest.approx(0.63)
    last = scaling.table(measured, 1000, (1, 2)).splitlines()[-1]
    assert last.split()[0] == "2" and last.split()[-1] == f"{22.5 / 11.5:.1f}x"


def test_a_small_network_is_measured():
    measured = scaling.measure(width=1, layer="conv", images=4, batch_size=4)
    assert measured.packed > 0 and measured.values > 0 and measured.steps > 0
    assert len(measured.blocks) > 8 and all(seconds > 0 for seconds in measured.blocks)

import subprocess
import sys

import pytest

from ella_cuda import _C
from ella_cuda.cuda_path import cuda_path


def test_the_path_holds_within_the_context():
    with cuda_path(product="mma", split=4):
        with cuda_path(tile=64, lags="no", product="wgmma"):
            assert _C.cuda_path() == "tile=64,lags=no,product=wgmma"
        assert _C.cuda_path() == "product=mma,split=4"
    assert _C.cuda_path() == ""


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"product": "dot"}, "product must be one of scalar, mma, wgmma, got 'dot'"),
        ({"product": ""}, "product must be one of scalar, mma, wgmma, got ''"),
        ({"lags": 1}, "lags must be one of yes, no, got '1'"),
        ({"split": 0}, "split must be a whole number from 1 on, got '0'"),
        ({"tile": "-64"}, "tile must be a whole number from 1 on, got '-64'"),
        ({"split": 1 << 40}, "split must be a whole number"),
        ({"depth": 3}, "a key of product, split, tile, lags, .* got 'depth=3'"),
    ],
)
def test_what_there_is_not_is_refused_and_changes_nothing(choices, message):
    with cuda_path(split=2):
        with pytest.raises(RuntimeError, match=message), cuda_path(**choices):
            raise AssertionError
        assert _C.cuda_path() == "split=2"


AT_FIRST = """
import os, torch
for path in ("product=scalar,split=3", "", "scalar"):
    if not os.fork():
        os.environ["ELLA_CUDA_PATH"] = path
        import ella_cuda
        try:
            print(ella_cuda._C.cuda_path(), flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_environment_says_it_at_first(beside_the_tests):
    """In processes that load the package anew, forked from one that has loaded torch."""
    command = [sys.executable, "-c", AT_FIRST]
    done = subprocess.run(command, cwd=beside_the_tests, capture_output=True, text=True, check=True, timeout=300)
    chosen, none, refused = done.stdout.splitlines()
    assert chosen == "product=scalar,split=3"
    assert none == ""
    assert "KEY=VALUE" in refused

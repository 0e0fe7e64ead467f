"""The check of the kernels passes for them and fails for wrong ones."""

from __future__ import annotations

import importlib

import pytest
import torch

from ella_cuda import ops, testing
from ella_cuda.cli.info import kernel_table
from ella_cuda.testing import check_kernel, check_kernels, kernel_cases
from python_tests.ops import checks as of_ops

PLAIN_TORCH = {"basis_matrix", "factored_linear_vjp", "pack_spectra"}  # on every device
PUBLIC = {n for n in ops.__all__ if n.islower() and "_torch" not in n} - PLAIN_TORCH
OPS = sorted({*PUBLIC, "symmetric_eigenvalues"})
MODULES = {"basis_project": "basis"}  # of another name than the op


def test_every_op_passes_in_both_precisions(device):
    checks = check_kernels(device)
    assert [(c.name, c.error, c.bound) for c in checks if not c.ok] == []
    for dtype in (torch.float32, torch.float64):
        assert {c.name.split()[0] for c in checks if c.dtype == dtype} == set(OPS)
    assert "FAILED" not in kernel_table(checks)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("damage", ["scaled", "nan", "shape", "raises"])
def test_a_wrong_kernel_fails(monkeypatch, name, damage):
    module = importlib.import_module(f"ella_cuda.ops.{MODULES.get(name, name.rstrip('_'))}")
    right = getattr(module, name)

    def wrong(*args, **kwargs):
        if damage == "raises":
            raise RuntimeError("no kernel\nfor this device")
        y = right(*args, **kwargs)
        spoil = {"scaled": lambda t: t * (1 + 1e-4), "nan": lambda t: t * float("nan"), "shape": lambda t: t[None]}[
            damage
        ]
        return spoil(y) if isinstance(y, torch.Tensor) else tuple(map(spoil, y))

    monkeypatch.setattr(module, name, wrong)
    named, others = [], {}
    for case in kernel_cases():
        op = case[0].split()[0]
        if op == name:
            named.append(case)
        else:
            others.setdefault(op, case)
    checks = [check for case in named for check in check_kernel(case, "cpu")]
    assert checks
    assert not any(c.ok for c in checks if " " not in c.name or "kron_accumulate_" in name)
    assert all(c.ok for case in list(others.values())[:2] for c in check_kernel(case, "cpu"))
    table = kernel_table(checks)
    assert "FAILED" in table
    assert damage != "raises" or "FAILED: no kernel" in table


CASES = kernel_cases()
TWICE = [case for case in CASES if " " not in case[0] and f"{case[0]} backward" in {name for name, *_ in CASES}]


@pytest.mark.parametrize("case", TWICE, ids=lambda case: case[0])
def test_forward_over_forward_is_that_of_the_reference(case):
    _, inputs, op, reference = case
    of_ops.check_forward_over_forward(op, reference, inputs())


def test_the_check_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    check_kernels("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_convolutions_are_checked_in_float32_and_left_as_they_were(monkeypatch):
    """cuDNN may take TF32 for one of two convolutions and not for the other."""
    for before in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
        seen = []

        def look(*inputs, seen=seen):
            seen.append(torch.backends.cudnn.allow_tf32)
            return inputs

        monkeypatch.setattr(
            testing, "kernel_cases", lambda look=look: [("looked at", lambda: (torch.ones(2),), look, look)]
        )
        (check, _) = check_kernels("cpu")
        assert check.ok and seen and not any(seen)
        assert torch.backends.cudnn.allow_tf32 == before


def test_products_are_checked_in_float32_and_left_as_the_user_allows_them(monkeypatch):
    """The bound is that of torch in float32, and of two products torch may take TF32 for one alone."""
    matmul, seen = torch.backends.cuda.matmul, []

    def look(*inputs):
        seen.append(matmul.fp32_precision)
        return inputs

    monkeypatch.setattr(testing, "kernel_cases", lambda: [("looked at", lambda: (torch.ones(2),), look, look)])
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        (check, _) = check_kernels("cpu")
        assert check.ok and set(seen) == {"ieee"} and matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_a_device_that_is_lost_leaves_the_table(monkeypatch):
    """After an illegal access nothing works there any more: neither the reference nor a copy."""
    lost = []

    def breaks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lost.append(x)
        raise RuntimeError("illegal address")

    def reference(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(lost) > 1 and x.dtype == torch.float32:
            raise RuntimeError("context lost")
        return (2 * x,)

    cases = [(name, lambda: (torch.ones(2, dtype=torch.float64),), breaks, reference) for name in ("first", "second")]
    monkeypatch.setattr(testing, "kernel_cases", lambda: cases)
    checks = check_kernels("cpu")
    assert [(c.name, c.ok, c.failure) for c in checks] == [
        ("first", False, "illegal address"),
        ("first", False, "illegal address"),
        ("second", False, "context lost"),
        ("second", False, "illegal address"),
    ]
    assert "FAILED: context lost" in kernel_table(checks)

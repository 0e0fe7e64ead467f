"""Which float32 products on CUDA may be in TF32: what torch's setting says, however it was made, reaches the ops and their derivatives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ella_cuda import ops

# Every way there is to say so, in an order in which torch does not complain of two ways at once.
WAYS = """
import os, torch, warnings
warnings.simplefilter("error")
from ella_cuda.ops._precision import _torch_allows_tf32

def say(expected):
    assert _torch_allows_tf32() is expected

matmul = torch.backends.cuda.matmul
say(False)
if not (child := os.fork()):  # the setting for all of torch, alone
    torch.backends.fp32_precision = "tf32"
    os._exit(not _torch_allows_tf32())
assert os.waitpid(child, 0)[1] == 0
for setting in (True, False):
    matmul.allow_tf32 = setting
    say(setting)
warnings.simplefilter("ignore")  # torch's own, at each of the calls that follow
for setting in ("high", "highest", "medium", "highest"):
    torch.set_float32_matmul_precision(setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say(setting != "highest")
for setting in ("tf32", "ieee", "tf32", "ieee"):
    matmul.fp32_precision = setting
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say(setting == "tf32")
"""


def test_every_way_to_allow_it_is_seen(beside_the_tests: Path) -> None:
    result = subprocess.run([sys.executable, "-c", WAYS], cwd=beside_the_tests, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def setting() -> Iterator[None]:
    """The old name of the setting, set back at the end."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


class Flags(TorchDispatchMode):
    """What our ops get for allow_tf32; the dispatcher leaves out what is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [argument.name for argument in function._schema.arguments]
        if "allow_tf32" in names:
            at = names.index("allow_tf32")
            self.seen.append((function._schema.name.removeprefix("ella_cuda::"), at < len(args) and args[at]))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors of CUDA without memory, and a build for them."""
    monkeypatch.setattr("ella_cuda.ops._operator.build_info", lambda: {"cuda": "13.0"})
    with FakeTensorMode() as mode:
        yield mode


@pytest.mark.parametrize("allowed", [False, True])
def test_the_setting_reaches_the_ops(cuda: FakeTensorMode, setting: None, allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    factor, rows = torch.zeros(2, 40, 40, device="cuda"), torch.zeros(7, 2, 40, device="cuda")
    image = torch.zeros(2, 5, 8, 8, device="cuda")
    with Flags() as flags:
        ops.kron_accumulate_(factor, rows)
        ops.conv_kron_accumulate_(torch.zeros(45, 45, device="cuda"), image, 3)
    assert flags.seen == [("kron_accumulate_", allowed), ("conv_kron_accumulate_", allowed)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Its last entry is the setting, for tensors of the CPU too."""
    answers = [False]
    for module in ("factored_linear", "kron_accumulate"):
        monkeypatch.setattr(sys.modules[f"ella_cuda.ops.{module}"], "allows_tf32", lambda tensor: answers[-1])
    return answers


@pytest.mark.parametrize("allowed", [False, True])
def test_derivatives_have_the_setting_of_the_forward_pass(asked: list[bool], allowed: bool) -> None:
    """The backward pass, and that of the backward pass, whatever is set by then."""
    leaves = [torch.randn(size, requires_grad=True) for size in ((4, 3, 6), (5, 3, 6), (5, 3, 7))]
    with Flags() as flags:
        asked.append(allowed)
        y = ops.factored_linear(*leaves)
        asked.append(not allowed)
        gradients = torch.autograd.grad(y.sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)
    assert {"factored_linear", "factored_linear_backward"} == {name for name, _ in flags.seen} and len(flags.seen) > 4
    assert all(flag == allowed for _, flag in flags.seen), flags.seen


@pytest.mark.parametrize("allowed", [False, True])
def test_so_have_those_of_an_op_that_keeps_its_intermediate(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    module, seen = sys.modules["ella_cuda.ops.factored_linear"], []
    for name in ("_OP_KEEPING", "_OP_BACKWARD_KEEPING"):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, op=op: seen.append(args[-1]) or op(*args))
    leaves = [torch.randn(size, requires_grad=True) for size in ((4, 3, 6), (5, 3, 6), (5, 3, 7))]
    asked.append(allowed)
    y = ops.factored_linear(*leaves)
    asked.append(not allowed)
    y.sum().backward()
    assert seen == [allowed, allowed]


@pytest.mark.parametrize("allowed", [False, True])
def test_so_have_those_of_weights_multiplied_out(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    module, seen = sys.modules["ella_cuda.ops.factored_linear"], []
    backward = module._backward
    monkeypatch.setattr(module._C, "factored_linear_by_torch", lambda *_: True)
    monkeypatch.setattr(module, "_backward", lambda *args: seen.append(args[-1]) or backward(*args))
    leaves = [torch.randn(size, requires_grad=True) for size in ((4, 3, 1), (5, 3, 1), (5, 3, 7))]
    asked.append(allowed)
    y = ops.factored_linear(*leaves)
    asked.append(not allowed)
    torch.autograd.grad(y.sum(), leaves, create_graph=True)
    assert seen == [allowed]


def test_the_forward_mode_of_the_backward_has_it(asked: list[bool]) -> None:
    asked.append(True)
    x, u, v = (torch.randn(size) for size in ((4, 3, 6), (5, 3, 6), (5, 3, 7)))
    with Flags() as flags:
        torch.func.jvp(torch.func.grad(lambda u: ops.factored_linear(x, u, v).square().sum()), (u,), (u,))
    assert len(flags.seen) > 3 and all(flag for _, flag in flags.seen), flags.seen


def test_the_forward_mode_and_vmap_have_it(asked: list[bool]) -> None:
    asked.append(True)
    x, u, v = (torch.randn(size) for size in ((4, 3, 6), (5, 3, 6), (5, 3, 7)))
    with Flags() as flags:
        torch.func.jvp(ops.factored_linear, (x, u, v), (x, u, v))
        torch.func.vmap(ops.factored_linear, (None, 0, 0))(x, torch.stack([u, u]), torch.stack([v, v]))
        torch.func.vmap(ops.factored_linear, (0, None, None))(torch.stack([x, x]), u, v)
        torch.func.vmap(torch.func.grad(lambda u: ops.factored_linear(x, u, v).sum()))(torch.stack([u, u]))
        torch.func.vmap(torch.func.grad(lambda x: ops.factored_linear(x, u, v).sum()))(torch.stack([x, x]))
        torch.func.vmap(ops.kron_accumulate_)(torch.zeros(3, 2, 8, 8), torch.randn(3, 7, 2, 8))
    assert {name for name, _ in flags.seen} == {"factored_linear", "factored_linear_backward", "kron_accumulate_"}
    assert all(flag for _, flag in flags.seen), flags.seen


@pytest.mark.parametrize("allowed", [False, True])
def test_a_compiled_graph_has_it(asked: list[bool], allowed: bool) -> None:
    """In both directions."""
    asked.append(allowed)
    seen: list[bool] = []

    def look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        for node in graph.graph.nodes:
            if str(node.target).startswith("ella_cuda."):
                seen.append(node.args[-1] is True)
        return graph.forward

    leaves = [torch.randn(size, requires_grad=True) for size in ((4, 3, 6), (5, 3, 6), (5, 3, 7))]
    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    torch.compile(ops.factored_linear, backend=backend, fullgraph=True)(*leaves).sum().backward()
    assert len(seen) >= 2 and all(flag == allowed for flag in seen)


def test_what_is_compiled_is_compiled_again(setting: None) -> None:
    """For another setting; and in one graph."""
    from ella_cuda.ops._precision import _torch_allows_tf32

    compiled = torch.compile(lambda x: x + 1 if _torch_allows_tf32() else x, backend="eager", fullgraph=True)
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert compiled(torch.zeros(())).item() == allowed


def test_the_cpu_takes_no_notice(setting: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    factor, rows = torch.zeros(1, 40, 40), torch.randn(7, 1, 40)
    arguments = torch.randn(4, 3, 6), torch.randn(5, 3, 6), torch.randn(5, 3, 7)
    with Flags() as flags:
        ops.kron_accumulate_(factor, rows)
        ops.factored_linear(*arguments)
    assert len(flags.seen) == 2 and not any(flag for _, flag in flags.seen)
    by_op = torch.zeros_like(factor)
    torch.ops.ella_cuda.kron_accumulate_(by_op, rows, 1.0, True)
    assert torch.equal(by_op, factor)
    both = [torch.ops.ella_cuda.factored_linear(*arguments, None, None, flag) for flag in (False, True)]
    assert torch.equal(*both)

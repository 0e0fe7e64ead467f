"""MultiheadAttention and transformers: against the dense matrix, and against attention written with linear layers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import FullLaplace, KronLaplace, exact_log_marginal_likelihood
from python_tests.laplace import checks

IMAGES, CLASSES, WIDTH = 4, 3, 4


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return checks.sequences(IMAGES, CLASSES)


class Attention(nn.Module):
    """A head on a self-attention of torch's."""

    def __init__(self, call: dict[str, object] | None = None, checkpointed: bool = False, **kwargs: object) -> None:
        super().__init__()
        self.call, self.checkpointed = call or {}, checkpointed
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **kwargs)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        attend = partial(self.attention, **self.call)
        h = checkpoint(attend, x, x, x, use_reentrant=False) if self.checkpointed else attend(x, x, x)
        return self.head(h[0].sin().mean(1))


def exact_blocks(la: KronLaplace) -> list[str]:
    return [name for name, factor in la.factors.items() if factor.shape.constant_input]


def assert_exact(la: KronLaplace, dense: dict[str, Tensor]) -> None:
    for name in exact_blocks(la):
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    "settings",
    [
        {"call": {"need_weights": False}},
        {"call": {"average_attn_weights": False}},
        {"call": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}},
        {"call": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False}},
        {"call": {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)}},
        {"add_zero_attn": True},
        # As transformer layers call it: torch then has fused kernels, which save other tensors than plain products do.
        {"call": {"need_weights": False}, "checkpointed": True},
    ],
    ids=["no weights", "weights of heads", "mask", "causal", "additive mask", "a row of zeros", "checkpoint"],
)
@pytest.mark.parametrize("budget", [None, 1])
def test_whatever_the_call_asks_for(settings, budget, data, dense_ggn):
    model = checks.randomised(Attention(**settings))
    la = KronLaplace(model, memory_budget=budget).fit([data])
    model.checkpointed = False
    assert_exact(la, dense_ggn(model, *data))


def test_calls_with_one_input_and_with_several_are_refused(data):
    def forward(m, x):
        return m.head(m.attention(m.attention(x, x, x)[0], x, x)[0].mean(1))

    layers = {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True), "head": nn.Linear(WIDTH, CLASSES)}
    with pytest.raises(ValueError, match=r"'attention' \(MultiheadAttention\).*a part of 'in_proj_weight' in common"):
        KronLaplace(checks.Function(forward, **layers).double()).fit([data])


def test_biases_of_keys_and_values_have_exact_blocks(data, dense_ggn):
    model = checks.randomised(Attention(add_bias_kv=True))
    la, dense = KronLaplace(model).fit([data]), dense_ggn(model, *data)
    assert_exact(la, dense)
    for name in ("attention.bias_k", "attention.bias_v"):
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name], rtol=1e-9, atol=1e-12)


def encoder(**kwargs: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, batch_first=True, **kwargs)
    layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    return checks.Function(lambda m, x: m.head(m.layers(x).mean(1)), layers=layers, head=nn.Linear(WIDTH, CLASSES))


def with_decoder() -> nn.Module:
    both = nn.Transformer(WIDTH, 2, 1, 1, 6, batch_first=True, activation="gelu")
    head = nn.Linear(WIDTH, CLASSES)
    return checks.Function(lambda m, x: m.head(m.both(x, x[:, :3].sin()).mean(1)), both=both, head=head)


@pytest.mark.parametrize(
    "build",
    [encoder, lambda: encoder(norm_first=True, activation="gelu"), with_decoder],
    ids=["encoder", "norm first", "encoder and decoder"],
)
def test_transformers(build, data, dense_ggn):
    model, seen = checks.randomised(build()), []
    fastpath, before = torch.backends.mha.get_fastpath_enabled(), copy.deepcopy(model.state_dict())
    hook = model.head.register_forward_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    la = KronLaplace(model).fit([data])
    hook.remove()
    assert fastpath and seen and not any(seen)
    assert la.parameter_names == [name for name, _ in model.named_parameters()]
    assert_exact(la, dense_ggn(model, *data))
    assert len(exact_blocks(la)) > 8 and la.log_marginal_likelihood().isfinite()
    assert torch.backends.mha.get_fastpath_enabled() is fastpath
    assert all("forward" not in vars(module) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_failing_forward_leaves_the_model_as_it_was(data):
    model = checks.randomised(Attention({"attn_mask": torch.zeros(2, 2)}))
    with pytest.raises(RuntimeError, match="attn_mask"):
        KronLaplace(model).fit([data])
    assert "forward" not in vars(model.attention) and not model.attention._forward_hooks


def test_sequences_without_a_batch_are_refused():
    """Images attend to each other."""
    layers = {"attention": nn.MultiheadAttention(WIDTH, 2), "head": nn.Linear(WIDTH, CLASSES)}
    alone = checks.Function(lambda m, x: m.head(m.attention(x, x, x)[0]), **layers)
    with pytest.raises(ValueError, match="a third is in the batch"):
        KronLaplace(alone).fit([(torch.randn(4, WIDTH), torch.tensor([0, 1, 2, 0]))])


def test_the_exact_evidence_of_attention_is_a_fits(data):
    la = KronLaplace(checks.randomised(Attention()), prior_precision=0.5)
    exact = exact_log_marginal_likelihood(la, *data)
    torch.testing.assert_close(exact, la.fit([data]).log_marginal_likelihood())


def test_other_modes_of_torchs_functions_are_no_obstacle(data):
    """Such as that of a device, which a mode hands on functions as a whole to."""
    model = checks.randomised(Attention())
    expected = KronLaplace(model).fit([data])
    with torch.device("cpu"):
        la = KronLaplace(model).fit([data])
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


def test_learned_keys_and_values_beside_the_projections(data):
    """By gradients of single data points, which go through the projections under vmap."""
    model = checks.randomised(Attention(add_bias_kv=True))
    x = data[0].double()
    la = FullLaplace(model, "regression").fit([(x, torch.zeros(IMAGES, CLASSES, dtype=torch.float64))])
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.jacfwd(lambda v: torch.func.functional_call(model.eval(), v, (x,)))(values)
    rows = torch.cat([found[name].flatten(2) for name in la.parameter_names], 2).flatten(0, 1)
    torch.testing.assert_close(la.H, rows.T @ rows, rtol=1e-9, atol=1e-12)

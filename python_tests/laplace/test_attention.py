"""MultiheadAttention and transformers: against the dense matrix, and against attention written with linear layers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import FullLaplace, KronLaplace, exact_log_marginal_likelihood
from ella_cuda.laplace.curvature import curvature_pass
from ella_cuda.laplace.rules import rules_for
from python_tests.laplace import checks

IMAGES, CLASSES, WIDTH = 4, 3, 4


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return checks.sequences(IMAGES, CLASSES)


class Attention(nn.Module):
    """A head on an attention of torch's.

    ``mode``: "self"; "cross", where the keys are the values; "apart", where query, key and value are three tensors.
    """

    def __init__(self, mode: str = "self", times: int = 1, **kwargs: object) -> None:
        super().__init__()
        self.mode, self.times, self.batch_first = mode, times, bool(kwargs.get("batch_first", True))
        self.call: dict[str, object] = {}
        self.attention = nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True, **kwargs})
        self.keys, self.values = (nn.Linear(WIDTH, size) for size in (self.attention.kdim, self.attention.vdim))
        self.head, self.checkpointed = nn.Linear(WIDTH, CLASSES), False

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.batch_first else x.transpose(0, 1)
        for _ in range(self.times):
            if self.mode == "self":
                args = (h, h, h)
            else:
                k = self.keys(h).sin()
                args = (h, k, k if self.mode == "cross" else self.values(h).sin())
            attend = partial(self.attention, **self.call)
            h = (checkpoint(attend, *args, use_reentrant=False) if self.checkpointed else attend(*args))[0]
        return self.head(h.sin().mean(1 if self.batch_first else 0))

    def unused(self) -> Attention:
        """Without what the mode does not use."""
        if self.mode == "self":
            del self.keys, self.values
        elif self.mode == "cross":
            del self.values
        return self


MODES = {
    "self": lambda: Attention(),
    "self, sequence first": lambda: Attention(batch_first=False),
    "without biases": lambda: Attention(bias=False),
    "cross": lambda: Attention("cross"),
    "cross, sequence first": lambda: Attention("cross", batch_first=False),
    "three inputs": lambda: Attention("apart"),
    "other sizes": lambda: Attention("apart", kdim=3, vdim=2),
    "other sizes, sequence first": lambda: Attention("apart", kdim=3, vdim=2, batch_first=False),
    "extra row of zeros": lambda: Attention(add_zero_attn=True),
}


@pytest.fixture(params=MODES)
def model(request) -> Attention:
    return checks.randomised(MODES[request.param]().unused())


def exact_blocks(la: KronLaplace) -> list[str]:
    return [name for name, factor in la.factors.items() if factor.shape.constant_input]


def assert_exact(la: KronLaplace, dense: dict[str, Tensor]) -> None:
    for name in exact_blocks(la):
        torch.testing.assert_close(la.factors[name].to_dense()[0], dense[name], rtol=1e-8, atol=1e-11)


def test_biases_are_exact(model, data, dense_ggn):
    la = KronLaplace(model).fit([data])
    assert "attention.in_proj_bias" in exact_blocks(la) or model.attention.in_proj_bias is None
    assert_exact(la, dense_ggn(model, *data))


class ByHand(nn.Module):
    """The same function of linear layers, a softmax and products."""

    def __init__(self, model: Attention) -> None:
        super().__init__()
        m = model.attention
        self.model = model
        packed = m.in_proj_weight
        weights = packed.chunk(3) if packed is not None else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        biases = [None] * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (self._layer(w, b) for w, b in zip(weights, biases, strict=True))
        self.out = self._layer(m.out_proj.weight, m.out_proj.bias)
        self.zeros = m.add_zero_attn

    @staticmethod
    def _layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
        with torch.no_grad():
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        model, h = self.model, x
        k = h if model.mode == "self" else model.keys(h).sin()
        v = h if model.mode == "self" else k if model.mode == "cross" else model.values(h).sin()
        q, k, v = (
            layer(t).unflatten(2, (2, -1)).transpose(1, 2) for layer, t in ((self.q, h), (self.k, k), (self.v, v))
        )
        if self.zeros:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        h = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return model.head(self.out(h.transpose(1, 2).flatten(2)).sin().mean(1))


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_weights_have_the_factors_of_linear_layers(model, data, approximation):
    apart = copy.deepcopy(model)
    by_hand = ByHand(apart)
    torch.testing.assert_close(by_hand(data[0]), model(data[0]))
    for p in apart.attention.parameters():
        p.requires_grad_(False)
    la, expected = (KronLaplace(m, approximation=approximation).fit([data]) for m in (model, by_hand))
    for i, name in enumerate("qkv"):
        wanted = expected.factors[f"{name}.weight"]
        if model.attention.in_proj_weight is not None:
            found = la.factors["attention.in_proj_weight"]
            sides = found.inputs[i], found.outputs[i]
        else:
            found = la.factors[f"attention.{name}_proj_weight"]
            sides = found.inputs[0], found.outputs[0]
        torch.testing.assert_close(sides, (wanted.inputs[0], wanted.outputs[0]), rtol=1e-9, atol=1e-12)
    found, wanted = la.factors["attention.out_proj.weight"], expected.factors["out.weight"]
    torch.testing.assert_close((found.inputs, found.outputs), (wanted.inputs, wanted.outputs), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.factors["head.weight"].outputs, expected.factors["model.head.weight"].outputs)


@pytest.mark.parametrize(
    "call",
    [
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
        {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
    ],
    ids=["no weights", "weights of heads", "mask", "causal", "additive mask"],
)
def test_whatever_the_call_asks_for(call, data, dense_ggn):
    model = checks.randomised(Attention().unused())
    model.call = call
    assert_exact(KronLaplace(model).fit([data]), dense_ggn(model, *data))


@pytest.mark.parametrize("mode", ["self", "cross"])
def test_called_twice(mode, data, dense_ggn):
    model = checks.randomised(Attention(mode, times=2).unused())
    la = KronLaplace(model).fit([data])
    assert_exact(la, dense_ggn(model, *data))
    # The input side of a projection adds over calls, its output side is their mean: both calls have five positions.
    rows = data[0].flatten(0, 1)
    first = rows.T @ rows / IMAGES
    second = la.factors["attention.in_proj_weight"].inputs[0] - first
    with torch.no_grad():
        k = model.keys(data[0]).sin() if mode == "cross" else data[0]
        again = model.attention(data[0], k, k)[0].flatten(0, 1)
    torch.testing.assert_close(second, again.T @ again / IMAGES)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x)[0]
        return self.head(self.attention(h, x, x)[0].mean(1))


def test_calls_with_one_input_and_with_several_are_refused(data):
    with pytest.raises(
        ValueError, match=r"'attention' \(MultiheadAttention\).*have a part of 'in_proj_weight' in common"
    ):
        KronLaplace(Mixed().double()).fit([data])


def test_neither_batches_nor_the_budget_nor_checkpoints_change_factors(model, data):
    x, y = data
    whole = KronLaplace(model).fit([data])
    model.checkpointed = True
    parts = KronLaplace(model, memory_budget=1).fit([(x[:1], y[:1]), (x[1:], y[1:])])
    for name, factor in whole.factors.items():
        torch.testing.assert_close(parts.factors[name].inputs, factor.inputs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(parts.factors[name].outputs, factor.outputs, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_around_an_attention_that_returns_no_weights(data, dense_ggn):
    """As transformer layers call it: torch then has fused kernels, which save other tensors than plain products do."""
    model = checks.randomised(Attention().unused())
    model.call, dense = {"need_weights": False}, dense_ggn(model, *data)
    model.checkpointed = True
    for budget in (1, None):
        assert_exact(KronLaplace(model, memory_budget=budget).fit([data]), dense)


def test_frozen_parts(data, dense_ggn):
    for frozen in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        model = checks.randomised(Attention().unused())
        model.attention.get_parameter(frozen).requires_grad_(False)
        la = KronLaplace(model).fit([data])
        assert f"attention.{frozen}" not in la.factors and len(la.factors) == 5
        assert_exact(la, dense_ggn(model, *data))
    model.attention.requires_grad_(False)
    assert list(KronLaplace(model).fit([data]).factors) == ["head.weight", "head.bias"]
    model.attention.out_proj.weight.requires_grad_(True)
    la = KronLaplace(model).fit([data])
    assert list(la.factors) == ["attention.out_proj.weight", "head.weight", "head.bias"]


def test_biases_of_keys_and_values_are_unknown(data, dense_ggn):
    model = checks.randomised(Attention(add_bias_kv=True).unused())
    with pytest.raises(TypeError, match=r"'bias_k', 'bias_v'.*unknown='freeze'"):
        KronLaplace(model)
    la = KronLaplace(model, unknown="diagonal").fit([data])
    dense = dense_ggn(model, *data)
    assert_exact(la, dense)
    for name in ("attention.bias_k", "attention.bias_v"):
        found = la.factors[name].to_dense().flatten()
        torch.testing.assert_close(found, dense[name].diagonal(), rtol=1e-9, atol=1e-12)


class Encoder(nn.Module):
    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, batch_first=True, **kwargs)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class WithDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 6, batch_first=True, activation="gelu")
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(x, x[:, :3].sin()).mean(1))


@pytest.mark.parametrize(
    "build",
    [Encoder, lambda: Encoder(norm_first=True, activation="gelu"), WithDecoder],
    ids=["encoder", "norm first", "encoder and decoder"],
)
def test_transformers(build, data, dense_ggn):
    model = checks.randomised(build())
    fastpath, before = torch.backends.mha.get_fastpath_enabled(), copy.deepcopy(model.state_dict())
    la = KronLaplace(model).fit([data])
    assert la.parameter_names == [name for name, _ in model.named_parameters()]
    assert_exact(la, dense_ggn(model, *data))
    assert len(exact_blocks(la)) > 8 and la.log_marginal_likelihood().isfinite()
    assert torch.backends.mha.get_fastpath_enabled() is fastpath
    assert all("forward" not in vars(module) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_fast_path_is_off_during_a_fit(data):
    model, seen = checks.randomised(Encoder()), []
    model.head.register_forward_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    KronLaplace(model).fit([data])
    assert seen and not any(seen)


def test_a_failing_forward_leaves_the_model_as_it_was(data):
    model = checks.randomised(Attention().unused())
    model.call = {"attn_mask": torch.zeros(2, 2)}
    with pytest.raises(RuntimeError, match="attn_mask"):
        KronLaplace(model).fit([data])
    assert "forward" not in vars(model.attention) and not model.attention._forward_hooks


def test_sequences_without_a_batch_are_refused():
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(WIDTH, 2), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:  # images attend to each other
            return self.head(self.attention(x, x, x)[0])

    with pytest.raises(ValueError, match="a third is in the batch"):
        KronLaplace(Alone()).fit([(torch.randn(4, WIDTH), torch.tensor([0, 1, 2, 0]))])


def test_the_exact_evidence_of_attention_is_a_fits(data):
    la = KronLaplace(checks.randomised(Attention().unused()), prior_precision=0.5)
    exact = exact_log_marginal_likelihood(la, *data)
    torch.testing.assert_close(exact, la.fit([data]).log_marginal_likelihood())


def test_other_modes_of_torchs_functions_are_no_obstacle(data):
    """Such as that of a device, which a mode hands on functions as a whole to."""
    model = checks.randomised(Attention().unused())
    expected = KronLaplace(model).fit([data])
    with torch.device("cpu"):
        la = KronLaplace(model).fit([data])
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_columns_gradients_of_the_attention_weights_are_charged(batch_first):
    """Two heads on 200 x 200 pairs of positions are more than any layer's output of width 4."""
    model = checks.randomised(Attention(batch_first=batch_first).unused())
    x = torch.randn(3, 200, WIDTH, dtype=torch.float64)
    rules = rules_for(model, "shared")
    for rule in rules:
        rule.allocate()
    with curvature_pass(model, rules, 1 << 20) as run, run.nodes():
        run.forward(x)
        assert run.column_bytes == 2 * 3 * 2 * 200 * 200 * 8


@pytest.mark.parametrize("mode", ["self", "cross", "apart"])
def test_learned_keys_and_values_beside_the_projections(mode: str, data: tuple[Tensor, Tensor]) -> None:
    """By gradients of single data points, which go through the projections under vmap."""
    model = checks.randomised(Attention(mode, add_bias_kv=True).unused())
    x = data[0].double()
    la = FullLaplace(model, "regression").fit([(x, torch.zeros(IMAGES, CLASSES, dtype=torch.float64))])
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.jacfwd(lambda v: torch.func.functional_call(model.eval(), v, (x,)))(values)
    rows = torch.cat([found[name].flatten(2) for name in la.parameter_names], 2).flatten(0, 1)
    torch.testing.assert_close(la.H, rows.T @ rows, rtol=1e-9, atol=1e-12)

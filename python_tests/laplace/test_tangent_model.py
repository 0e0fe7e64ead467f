"""The linearised network, against dense Jacobians by torch.func."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

from ella_cuda.laplace import TangentModel
from python_tests.laplace.checks import Function, drawn, randomised


def dense(model: nn.Module, x: Any) -> Tensor:
    """J in evaluation mode, ``(*outputs, P)``."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False  # which jacrev does not take
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    args, kwargs = ((), x) if isinstance(x, dict) else (x, {}) if isinstance(x, tuple) else ((x,), {})
    found = jacrev(lambda values: functional_call(model, values, args, kwargs))(parameters)
    dims = functional_call(model, parameters, args, kwargs).dim()
    return torch.cat([j.flatten(dims) for j in found.values()], -1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def tied() -> nn.Module:
    """A linear layer under two names, and a weight of two layers."""
    first, other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    other.weight = first.weight
    layers = {"first": first, "again": first, "other": other}
    return Function(lambda m, x: m.other(m.again(m.first(x).tanh()).tanh()), **layers)


def words(module: bool = True, sparse: bool = False, share: bool = True) -> nn.Module:
    """An embedding with a padding's row that the head uses too, as a layer's weight or by a function."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.mix(m.embed(x).tanh()).mean(1).tanh()
        return functional.linear(h, m.embed.weight) if m.head is None else m.head(h)

    embed = nn.Embedding(5, 4, padding_idx=1, sparse=sparse)
    head = nn.Linear(4, 5, bias=False) if module else None
    if module and share:
        head.weight = embed.weight
    return Function(forward, embed=embed, mix=nn.Linear(4, 4), head=head)


def attending() -> nn.Module:
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    return Function(lambda m, x: m.layer(m.attention(x, x, x)[0])[:, 0], attention=attention, layer=layer)


def recurrent(kind: type[nn.Module]) -> nn.Module:
    layers = {"layer": kind(4, 3, batch_first=True), "head": nn.Linear(3, 2)}
    return Function(lambda m, x: m.head(m.layer(x)[0][:, -1]), **layers)


def several() -> nn.Module:
    layers = {"first": nn.Linear(3, 2), "second": nn.Linear(2, 2)}
    return Function(lambda m, a, b: (m.first(a) * m.second(b)).tanh(), **layers)


def calls(function: Any) -> nn.Module:
    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2), "function": function}
    return Function(lambda m, x: m.last(m.function.apply(m.first(x))), **parts)


class Sine(torch.autograd.Function):
    """Without a jvp; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class OnceSine(Sine):
    """Without a jvp, and a backward whose dependence on the incoming gradient autograd does not know."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.detach() * ctx.saved_tensors[0].cos()


def normed(dropout: float = 0.5) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(12, 2)
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    return model


def scalars() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


WORDS = torch.tensor([[0, 1, 2], [3, 1, 4], [2, 2, 0]])
NETWORKS = {
    "convolutions": (normed, drawn(3, 2, 4, 4)),
    "tied": (tied, drawn(3, 3)),
    "frozen": (frozen, drawn(3, 3)),
    "one output": (scalars, drawn(3, 3)),
    "words": (lambda: words(share=False), WORDS),
    "words, sparse gradients": (lambda: words(sparse=True, share=False), WORDS),
    "tied words": (words, WORDS),
    "tied words by a function": (lambda: words(False), WORDS),
    "attention": (attending, drawn(2, 3, 4)),
    "LSTM": (lambda: recurrent(nn.LSTM), drawn(3, 3, 4)),
    "GRU": (lambda: recurrent(nn.GRU), drawn(3, 3, 4)),
    "tuple": (several, (drawn(3, 3), drawn(3, 2, seed=1))),
    "mapping": (several, {"b": drawn(3, 2), "a": drawn(3, 3, seed=1)}),
}


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS)
def network(request: Any) -> tuple[nn.Module, Any, Tensor]:
    make, x = request.param
    torch.manual_seed(0)
    model = randomised(make())
    return model, x, dense(model, x)


def test_products_are_the_dense_jacobians(network) -> None:
    model, x, jacobian = network
    model.train()
    tangent = TangentModel(model)
    outputs, count = jacobian.dim() - 1, jacobian.shape[-1]
    assert tangent.n_params == count and torch.equal(tangent.point, flat(model))
    u, r = drawn(count, seed=2), drawn(*jacobian.shape[:-1], seed=3)
    close = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tangent.jvp(x, u), jacobian @ u, **close)
    torch.testing.assert_close(tangent.vjp(x, r), torch.tensordot(r, jacobian, outputs), **close)
    torch.testing.assert_close((tangent.jvp(x, u) * r).sum(), tangent.vjp(x, r) @ u, **close)
    us, rs = drawn(3, count, seed=4), drawn(2, *r.shape, seed=5)
    torch.testing.assert_close(tangent.jvp(x, us), torch.stack([jacobian @ one for one in us]), **close)
    torch.testing.assert_close(tangent.vjp(x, rs), torch.tensordot(rs, jacobian, outputs), **close)


def test_outputs_are_affine_in_the_parameters(network) -> None:
    model, x, jacobian = network
    f = TangentModel(model).outputs(x)
    thetas, point = drawn(2, jacobian.shape[-1], seed=2), flat(model)
    close = dict(rtol=1e-10, atol=1e-11)
    full, simple = TangentModel(model), TangentModel(model, "simple")
    along = torch.stack([jacobian @ theta for theta in thetas])
    torch.testing.assert_close(full(thetas[0], x), f + jacobian @ (thetas[0] - point), **close)
    torch.testing.assert_close(full(thetas, x), f + along - jacobian @ point, **close)
    torch.testing.assert_close(full(point, x), f, **close)
    torch.testing.assert_close(full.offset(x), f - jacobian @ point, **close)
    torch.testing.assert_close(simple(thetas[0], x), along[0], **close)
    torch.testing.assert_close(simple(thetas, x), along, **close)
    assert torch.equal(simple.offset(x), torch.zeros_like(f))


def test_push_pull_is_both_products(network) -> None:
    model, x, jacobian = network
    tangent, u = TangentModel(model), drawn(jacobian.shape[-1], seed=2)

    def cotangent(f: Tensor, along: Tensor) -> Tensor:
        torch.testing.assert_close(f, tangent.outputs(x))
        torch.testing.assert_close(along, jacobian @ u, rtol=1e-10, atol=1e-12)
        return along.exp() * f

    found = tangent.push_pull(x, u, cotangent)
    expected = torch.tensordot((jacobian @ u).exp() * tangent.outputs(x), jacobian, jacobian.dim() - 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


class Noisy(nn.Module):
    """Noise in evaluation mode too, of a generator of the module's own if there is one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(3, 2), generator

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(2, generator=self.generator)


@pytest.mark.parametrize("own", [False, True])
def test_a_network_that_draws_is_named(own: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), Noisy(torch.Generator() if own else None))
    with pytest.raises(ValueError, match=r"'1' \(Noisy\) draws random numbers"):
        TangentModel(model).jvp(torch.randn(4, 3), torch.randn(8))


@pytest.mark.parametrize(
    ("make", "x"), [(scalars, drawn(3, 3)), (words, WORDS), (lambda: words(False), WORDS)], ids=["plain", "tied", "by a function"]
)  # fmt: skip
def test_the_way_is_the_forward_mode(make: Any, x: Tensor) -> None:
    """Padding leaves it; a copy that is older than the first product finds it too."""
    tangent = TangentModel(randomised(make()))
    for one in (tangent, copy.copy(tangent)):
        one.push_pull(x, tangent.point, lambda f, along: along)
        assert one._way is True


def test_the_model_is_as_before_and_runs_as_at_test_time() -> None:
    model = randomised(normed())
    model.train()
    model[3].eval()
    before = copy.deepcopy(model.state_dict())
    x, tangent = drawn(3, 2, 4, 4), TangentModel(model)
    grads = torch.is_grad_enabled()
    ones = tangent(drawn(tangent.n_params), x), tangent.offset(x), tangent.vjp(x, torch.ones(3, 2).double())
    others = tangent(drawn(tangent.n_params), x), tangent.offset(x), tangent.vjp(x, torch.ones(3, 2).double())
    tangent.push_pull(x, tangent.point, lambda f, along: along)
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # nothing was dropped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model] == [True, True, True, False, True, True] and model.training
    assert all(p.requires_grad and p.grad is None and isinstance(p, nn.Parameter) for p in model.parameters())
    assert torch.is_grad_enabled() == grads


@pytest.mark.parametrize("names", [None, ["5.weight"]])
def test_later_values_do_not_matter(names: list[str] | None) -> None:
    """Of parameters, constants among them, and buffers."""
    model = randomised(normed())
    model[5].bias.requires_grad_(False)
    x, tangent = drawn(3, 2, 4, 4), TangentModel(model, names=names)
    u, r = drawn(tangent.n_params), torch.ones(3, 2, dtype=torch.float64)
    if names is not None:
        assert tangent.parameter_names == names and tangent.n_params == 24
        torch.testing.assert_close(tangent.jvp(x, u), dense(model, x)[..., -24:] @ u)

    def all_of_it() -> list[Tensor]:
        found = tangent.jvp(x, u), tangent.vjp(x, r), tangent.offset(x)
        return [*found, tangent.push_pull(x, u, lambda f, along: f)]

    before = all_of_it()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model[1].buffers()):
            tensor.mul_(2)
    for one, other in zip(before, all_of_it(), strict=True):
        assert torch.equal(one, other)


def test_a_function_without_a_forward_mode_is_differentiated_by_gradients() -> None:
    model, x = randomised(calls(Sine)), drawn(5, 3)
    tangent, jacobian = TangentModel(model), dense(_with(model, torch.sin), x)
    u = drawn(2, tangent.n_params)
    torch.testing.assert_close(tangent.jvp(x, u), torch.stack([jacobian @ one for one in u]))
    expected = torch.tensordot(jacobian @ u[0], jacobian, 2)
    torch.testing.assert_close(tangent.push_pull(x, u[0], lambda f, along: along), expected)
    assert tangent._way is False


def test_rounding_of_float32_leaves_the_forward_mode() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        tangent = TangentModel(nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)))
        tangent.push_pull(torch.full((1, 1), 0.1 * seed), tangent.point, lambda f, along: along)
        assert tangent._way is True


def _with(model: nn.Module, function: Any) -> nn.Module:
    class Applied:
        apply = staticmethod(function)

    other = copy.deepcopy(model)
    other.function = Applied
    return other


def test_a_function_that_is_differentiable_once_is_refused_every_time() -> None:
    tangent, x = TangentModel(randomised(calls(OnceSine))), drawn(5, 3)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="differentiable once"):
            tangent.jvp(x, tangent.point)
        with pytest.raises(NotImplementedError, match="no forward mode and is differentiable once"):
            tangent.push_pull(x, tangent.point, lambda f, along: along)


class Tampered(torch.autograd.Function):
    """The square, but where x is above 5: there the named product is twice what it is."""

    wrong = ""

    @classmethod
    def times(cls, x: Tensor, which: str) -> Tensor:
        return torch.where(x.detach() > 5, 2.0 if cls.wrong == which else 1.0, 1.0).to(x)

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, along: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * along * Tampered.times(x, "jvp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad * Tampered.times(x, "backward")


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Tampered.apply(x)


def tampered(monkeypatch: pytest.MonkeyPatch, wrong: str) -> nn.Module:
    monkeypatch.setattr(Tampered, "wrong", wrong)
    model = nn.Sequential(nn.Linear(1, 1), Squares(), nn.Linear(1, 2)).double()
    model[0].load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    return model


ROWS = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]


def test_a_wrong_forward_mode_of_a_later_data_point_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tampered(monkeypatch, "jvp"), torch.cat([ROWS[:3], torch.full((1, 1), 6.0).double()])
    tangent = TangentModel(model)
    jacobian = dense(nn.Sequential(model[0], Function(lambda m, x: x.square()), model[2]), x)
    u = drawn(tangent.n_params)
    torch.testing.assert_close(tangent.jvp(x, u), jacobian @ u)
    expected = torch.tensordot(jacobian @ u, jacobian, 2)
    torch.testing.assert_close(TangentModel(model).push_pull(x, u, lambda f, along: along), expected)


@pytest.mark.parametrize("product", ["jvp", "vjp", "push_pull"])
def test_a_gradient_that_is_no_derivative_is_refused_with_its_layer(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tangent, x = TangentModel(tampered(monkeypatch, "backward")), ROWS[:5].clone()
    x[3] = 6
    last = drawn(tangent.n_params) if product != "vjp" else drawn(5, 2)
    arguments = (x, last, lambda f, along: along)[: 3 if product == "push_pull" else 2]
    for _ in range(2):
        with pytest.raises(ArithmeticError, match=r"layer '1' \(Squares\).*gradients are not its deriv"):
            getattr(tangent, product)(*arguments)


@pytest.mark.parametrize("wrong", ["jvp", "backward"])
def test_products_of_all_data_points_are_compared(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are not tried out."""
    x = ROWS.clone()
    x[6] = 6
    tangent = TangentModel(tampered(monkeypatch, wrong))
    with pytest.raises(ArithmeticError, match=r"TangentModel: .*gradients .*no products with the Jacobian"):
        tangent.push_pull(x, drawn(tangent.n_params), lambda f, along: along)


def _halves_module(layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] / 2,))


def _clips_output(layer: nn.Module) -> None:
    def clip(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    layer.register_forward_hook(clip)


@pytest.mark.parametrize("hook", [_halves_module, _clips_output])
def test_hooks_that_change_gradients_are_refused(hook: Any) -> None:
    model, x = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), drawn(4, 3)
    hook(model[1])
    tangent = TangentModel(model)
    with pytest.raises(ArithmeticError, match=r"layer '1' \(Tanh\).*backward hook"):
        tangent.push_pull(x, drawn(tangent.n_params), lambda f, along: along)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_straight_through_function_has_the_derivative_that_it_says() -> None:
    model, x = randomised(calls(Rounded)), drawn(5, 3)
    tangent, jacobian = TangentModel(model), dense(_with(model, lambda h: h + (h.round() - h).detach()), x)
    u = drawn(tangent.n_params)
    torch.testing.assert_close(tangent.jvp(x, u), jacobian @ u)


BAGS = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "padded mean": {"mode": "mean", "padding_idx": 1},
    "sparse sum": {"mode": "sum", "sparse": True},
    "by frequency": {"mode": "sum", "scale_grad_by_freq": True},
}


@pytest.mark.parametrize("flags", BAGS.values(), ids=BAGS)
def test_bags_are_sums_of_rows(flags: dict[str, Any]) -> None:
    weights = flags == BAGS["sum"]  # which torch has of sums alone

    def bags(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        return m.head(m.bag(x, per_sample_weights=w if weights else None).tanh())

    def own(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        padding = flags.get("padding_idx", -1)
        weight = torch.where((torch.arange(5) == padding)[:, None], m.bag.weight.detach(), m.bag.weight)
        rows = weight[x] * (x != padding)[..., None]
        found = (rows * w[..., None] if weights else rows).sum(1)
        if flags["mode"] == "mean":
            found = found / (x != padding).sum(1, keepdim=True).clamp(min=1)
        return m.head(found.tanh())

    model, like = (
        randomised(Function(forward, bag=nn.EmbeddingBag(5, 4, **flags), head=nn.Linear(4, 2)))
        for forward in (bags, own)
    )
    x = (torch.cat([WORDS, torch.ones(1, 3, dtype=torch.long)]), drawn(4, 3))
    like.load_state_dict(model.state_dict())
    jacobian, tangent = dense(like, x), TangentModel(model)
    u = drawn(tangent.n_params)
    torch.testing.assert_close(tangent.outputs(x), like(*x).detach())
    torch.testing.assert_close(tangent.jvp(x, u), jacobian @ u)
    expected = torch.tensordot(jacobian @ u, jacobian, 2)
    torch.testing.assert_close(tangent.push_pull(x, u, lambda f, along: along), expected)
    assert model.bag.sparse == flags.get("sparse", False) and "forward" not in vars(model.bag)


def test_gradients_by_frequency_are_no_derivatives() -> None:
    """The module's flag leaves the products, a function's is refused."""
    model = randomised(words(share=False))
    x, tangent = torch.tensor([[0, 2, 2], [3, 0, 4]]), TangentModel(model)
    u, r = drawn(tangent.n_params), drawn(2, 5)
    expected = tangent.vjp(x, r)
    model.embed.scale_grad_by_freq = True
    torch.testing.assert_close(TangentModel(model).vjp(x, r), expected)
    assert model.embed.scale_grad_by_freq
    model.embed.forward = lambda x: functional.embedding(x, model.embed.weight, scale_grad_by_freq=True)
    with pytest.raises(ArithmeticError, match=r"layer 'embed' \(Embedding\).*gradients are not its derivatives"):
        TangentModel(model).push_pull(x, u, lambda f, along: along)


def test_an_embedding_that_changes_its_weight_is_refused() -> None:
    model = randomised(words(share=False))
    model.embed.max_norm = 0.1
    tangent, before = TangentModel(model), model.embed.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"changes the parameter 'embed.weight' in place.*max_norm=None"):
            tangent.jvp(WORDS, tangent.point)
    assert torch.equal(model.embed.weight, before)


def test_the_layer_without_a_second_derivative_is_named() -> None:
    model = randomised(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Sequential(nn.CrossMapLRN2d(2)), nn.Flatten()))
    x, tangent = drawn(2, 1, 3, 3), TangentModel(model)
    with pytest.raises(NotImplementedError, match=r"layer '1\.0' \(CrossMapLRN2d\).*differentiable once"):
        tangent.push_pull(x, tangent.point, lambda f, along: along)
    assert tangent.vjp(x, drawn(2, 8)).shape == (tangent.n_params,)  # gradients are there


def test_outputs_without_a_graph_are_no_constants() -> None:
    tangent = TangentModel(randomised(nn.Sequential(nn.Linear(3, 2), Function(lambda m, x: x.detach()))))
    with pytest.raises(RuntimeError, match="does not depend on the parameters through autograd"):
        tangent.jvp(drawn(2, 3), tangent.point)


def test_more_data_points_are_tried_out_than_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tangent = TangentModel(tampered(monkeypatch, "backward"))
    x = torch.cat([ROWS[:1], torch.full((1, 1), 6.0).double()])
    u = drawn(tangent.n_params)
    tangent.jvp(x[:1], u)
    with pytest.raises(ArithmeticError, match="gradients are not its derivatives"):
        tangent.jvp(x, u)


def test_no_data_points() -> None:
    tangent = TangentModel(randomised(scalars()))
    found = tangent.push_pull(torch.zeros(0, 3).double(), tangent.point, lambda f, along: along)
    assert torch.equal(found, torch.zeros(tangent.n_params).double())


def test_the_offset_of_a_normalised_network_is_zero() -> None:
    """Its hidden layers' factors do not matter, and its head is linear: J theta = 0 + f, by Euler."""
    parts = [nn.Linear(3, 6, bias=False), nn.LayerNorm(6, eps=0, elementwise_affine=False), nn.Tanh()]
    parts += [nn.Linear(6, 6, bias=False), nn.LayerNorm(6, eps=0, elementwise_affine=False), nn.Tanh()]
    model, x = randomised(nn.Sequential(*parts, nn.Linear(6, 2, bias=False))), drawn(8, 3)
    full, simple = TangentModel(model), TangentModel(model, "simple")
    assert full.offset(x).abs().max() < 5e-15 and full.outputs(x).abs().max() > 0.1
    theta = drawn(full.n_params)
    torch.testing.assert_close(full(theta, x), simple(theta, x))


def test_what_does_not_fit_is_refused() -> None:
    model, x = randomised(frozen()), drawn(3, 3)
    tangent = TangentModel(model)
    for wrong in (drawn(tangent.n_params + 1), 1.0):
        with pytest.raises(ValueError, match="expected all parameters"):
            tangent.jvp(x, wrong)
        with pytest.raises(ValueError, match="theta: expected all parameters"):
            tangent(wrong, x)
    for wrong in (drawn(2, 3), drawn(1, 1, 3, 2), None):
        with pytest.raises(ValueError, match=r"outputs' shape \(3, 2\)"):
            tangent.vjp(x, wrong)
    for names, kind in (([], ValueError), (["nope"], ValueError), ("0.weight", TypeError)):
        with pytest.raises(kind, match="names: expected "):
            TangentModel(nn.Sequential(nn.Linear(2, 2)), names=names)
    with pytest.raises(ValueError, match="form"):
        TangentModel(model, "half")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        TangentModel(lambda x: x)
    with pytest.raises(ValueError, match="trainable"):
        TangentModel(model.requires_grad_(False))


def test_torchs_own_warnings_of_its_forward_mode_are_not_the_users(beside_the_tests):
    code = (
        "import warnings, torch; from ella_cuda.laplace import TangentModel; warnings.simplefilter('error'); "
        "m = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()); x = torch.ones(4, 2); "
        "t = TangentModel(m); u = torch.ones(t.n_params); print(t.push_pull(x, u, lambda f, t: t).numel())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=beside_the_tests, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["9"]

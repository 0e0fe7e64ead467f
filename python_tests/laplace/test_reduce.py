"""KFAC-reduce where it is exact, and what knows the setting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ella_cuda
from ella_cuda.laplace import KronLaplace, register
from python_tests.laplace.checks import Function
from python_tests.laplace.jacobians import Scaled

IMAGES, CLASSES = 5, 2


def reduced(model: nn.Module, *batches: tuple[Tensor, Tensor], **options: object) -> KronLaplace:
    return KronLaplace(model, approximation="reduce", **options).fit(batches)


def data(*size: int, images: int = IMAGES) -> tuple[Tensor, Tensor]:
    return torch.randn(images, *size, dtype=torch.float64), torch.randint(CLASSES, (images,))


# where it is exact ---------------------------------------------------------------------------------------------------


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Linear layers, and the mean over positions between them and the head."""
    model = nn.Sequential(*layers).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    return model


DEEP_LINEAR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "positions": (lambda: pooled(nn.Linear(3, 2), nn.Linear(2, 4), Function(lambda m, x: x.mean(1)), nn.Linear(4, 2)), (5, 3)),
    "images": (
        lambda: pooled(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
            nn.Conv2d(3, 2, (1, 3), padding=(0, 1), padding_mode="circular"),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2, 2),
        ),
        (2, 4, 3),
    ),
}  # fmt: skip


def in_order(block: Tensor, parameter: Tensor) -> Tensor:
    """A dense block with the index (input, output) of the factors."""
    out = parameter.shape[0]
    return block.view(out, -1, out, parameter[0].numel()).permute(1, 0, 3, 2).reshape(block.shape)


@pytest.mark.parametrize("name", DEEP_LINEAR)
def test_it_is_exact_where_a_linear_network_averages_positions(name, dense_ggn):
    """For many data points too, with a Gaussian likelihood; expanding is not.

    Source: Eschenhagen et al., NeurIPS 2023, proposition 2.
    """
    make, size = DEEP_LINEAR[name]
    model = make()
    x, y = torch.randn(IMAGES, *size, dtype=torch.float64), torch.randn(IMAGES, 2, dtype=torch.float64)
    exact = dense_ggn(model, x, y, "regression")
    found = reduced(model, (x, y), likelihood="regression").factors
    expanded = KronLaplace(model, "regression").fit([(x, y)]).factors
    for key, block in exact.items():
        parameter = model.get_parameter(key)
        block = in_order(block, parameter) if parameter.dim() > 1 else block
        torch.testing.assert_close(found[key].to_dense()[0], block, rtol=1e-9, atol=1e-10)
    first = in_order(exact["0.weight"], model[0].weight)
    assert (expanded["0.weight"].to_dense()[0] - first).norm() > 0.1 * first.norm()


# who knows the setting -----------------------------------------------------------------------------------------------


class Convolution(nn.Conv1d):
    """A layer of its own, for the rule below."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@register(Convolution)
class OwnInputsRule(ella_cuda.laplace.rules.ConvNdRule):
    """Its class says nothing of the inputs that it defines."""

    def inputs(self, x):
        self.factors["weight"].input_moment.add(x.unfold(2, 2, 1).transpose(1, 2).flatten(2).flatten(0, 1)[:, None])


def test_rules_that_do_not_reduce_are_refused_in_one_message():
    model = nn.Sequential(Convolution(2, 3, 2), nn.Flatten(), nn.Linear(6, 4), Scaled(), Scaled()).double()
    with pytest.raises(ValueError) as error:
        KronLaplace(model, approximation="reduce")
    said = str(error.value)
    for words in (
        f"layer '0' ({__name__}.Convolution): OwnInputsRule",
        f"layer '3' ({Scaled.__module__}.Scaled) and 1 more ('4'): ScaledRule does not serve",
    ):
        assert words in said
    assert "approximation='reduce'. Use approximation='expand', freeze" in said and "'2'" not in said
    KronLaplace(model).fit([(data(2, 3)[0], torch.randint(3, (IMAGES,)))])


def test_repr_state_and_summary():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, CLASSES)).double()
    x, y = data(2, 4)
    la = reduced(model, (x, y))
    assert "approximation='reduce'" in repr(la)
    other = KronLaplace(model, approximation="reduce")
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    with pytest.raises(ValueError, match="approximation is 'reduce' in the state, but 'expand' here"):
        KronLaplace(model).load_state_dict(la.state_dict())
    before = KronLaplace(model, approximation="reduce").summary()
    assert before == la.summary() and "that of 0.weight" in before  # the bias's side is never one of its own
    assert before.count("Kronecker, reduce") == 2 and "reduce" not in KronLaplace(model).summary()


def test_training_takes_it():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))
    x, y = data(2, 6)
    batch = x.float(), y
    la, *_ = ella_cuda.marglik_training(model, [batch], n_epochs=2, approximation="reduce", progress_bar=False)
    assert la.approximation == "reduce"
    expected = reduced(model, batch).log_marginal_likelihood(la.prior_precision)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected)
    with pytest.raises(ValueError, match="marglik_training: approximation must be one of"):
        ella_cuda.marglik_training(model, [batch], approximation="sum")


def test_means_of_reduced_inputs_are_not_rounded_to_their_type():
    """Of a network that reduces what is between its layers by itself."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.last(m.second(m.first(x)).float().mean(1))

    model, inputs = Function(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 3), last=nn.Linear(3, CLASSES)), []
    model.second.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    x = torch.randn(IMAGES, 30, 4)
    la = reduced(model, (x, torch.randint(CLASSES, (IMAGES,))))
    seen = next(s for s in inputs if len(s) == IMAGES)
    assert seen.dtype == torch.bfloat16
    mean = seen.double().mean(1)
    expected = (mean.T @ mean / IMAGES)[None]
    torch.testing.assert_close(la.factors["second.weight"].inputs, expected, rtol=1e-5, atol=1e-7)

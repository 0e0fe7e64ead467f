"""Layers that are called several times, and weights of several layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from python_tests.laplace import checks

IMAGES, CLASSES = 5, 3


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(IMAGES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (IMAGES,), generator=generator)


def test_a_table_looked_up_twice_has_no_reduced_factor():
    layers = {"table": nn.Embedding(6, 3), "head": nn.Linear(3, CLASSES)}
    model = checks.Function(lambda m, words: m.head(m.table(words[:, 0]) * m.table(words[:, 1])), **layers).double()
    tokens, y = torch.randint(6, (IMAGES, 2)), torch.randint(CLASSES, (IMAGES,))
    with pytest.raises(ValueError, match=r"inputs are indices and that is called several times \(table.weight"):
        KronLaplace(model, approximation="reduce").fit([(tokens, y)])
    assert KronLaplace(model).fit([(tokens, y)]).log_marginal_likelihood().isfinite()


def test_padding_of_several_lookups_does_not_depend_on_batches():
    """A padded question and a padded answer, of one table."""

    def forward(m: nn.Module, tokens: Tensor) -> Tensor:
        return m.head(m.table(tokens[:, :4]).sin().mean(1) * m.table(tokens[:, 4:]).mean(1))

    torch.manual_seed(0)
    model = checks.Function(forward, table=nn.Embedding(6, 3, padding_idx=0), head=nn.Linear(3, CLASSES)).double()
    tokens, y = torch.randint(6, (6, 7)), torch.randint(CLASSES, (6,))
    tokens[0, 1:4], tokens[3, 5:], tokens[4, 2:] = 0, 0, 0
    whole = KronLaplace(model).fit([(tokens, y)])
    for size in (1, 2):
        parts = KronLaplace(model).fit(list(zip(tokens.split(size), y.split(size), strict=True)))
        for name, factor in whole.factors.items():
            torch.testing.assert_close(parts.factors[name].inputs, factor.inputs)
            torch.testing.assert_close(parts.factors[name].outputs, factor.outputs)


class Pyramid(nn.Module):
    """A head on positions of two scales, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, CLASSES, 1)
        self.other: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.view(-1, 1, 2, 2).repeat_interleave(2, 3)).tanh()
        small = nn.functional.avg_pool2d(h, 2)
        return self.head(h).sin().sum((2, 3)) + (self.other or self.head)(small.sin()).cos().sum((2, 3))


def test_calls_with_more_positions_have_more_weight(data, dense_ggn):
    """The output side is the mean over all positions: 8 of the first call and 2 of the second."""
    torch.manual_seed(0)
    model = checks.randomised(Pyramid())
    apart = copy.deepcopy(model)
    apart.other = copy.deepcopy(apart.head)
    la, two = KronLaplace(model).fit([data]), KronLaplace(apart).fit([data])
    one, other = two.factors["head.weight"], two.factors["other.weight"]
    torch.testing.assert_close(la.factors["head.weight"].inputs, one.inputs + other.inputs)
    torch.testing.assert_close(la.factors["head.weight"].outputs, (8 * one.outputs + 2 * other.outputs) / 10)
    torch.testing.assert_close(la.factors["head.bias"].outputs[0], dense_ggn(model, *data)["head.bias"])


def test_the_mean_input_is_over_all_positions_of_all_calls(data):
    """Eight of the first call and two of the second."""
    torch.manual_seed(0)
    model, (x, _) = checks.randomised(Pyramid()), data
    la = KronLaplace(model, approximation="reduce").fit([data])
    with torch.no_grad():
        h = model.stem(x.view(-1, 1, 2, 2).repeat_interleave(2, 3)).tanh()
        small = F.avg_pool2d(h, 2).sin()
        mean = (h.sum((2, 3)) + small.sum((2, 3))) / 10
    torch.testing.assert_close(la.factors["head.weight"].inputs[0], mean.T @ mean / len(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell])
def test_recurrent_modules_are_refused_with_what_to_do(kind):
    with pytest.raises(
        TypeError, match=rf"unknown='freeze'.*rnn\.{kind.__name__}\) has.*weight_ih.*loop over nn.Linear"
    ):
        KronLaplace(kind(3, 4))


def test_positions_folded_into_calls_are_refused(data):
    unequal = checks.Function(lambda m, x: torch.cat([m.layer(p) for p in x.split(1)]), layer=nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match="expand the inputs"):
        KronLaplace(unequal.double()).fit([data])


# weights of several layers -------------------------------------------------------------------------------------------


def tied_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for out in (4, 4, 4, CLASSES) for part in (nn.Linear(4, out), nn.Tanh())][:-1]
    model = checks.randomised(nn.Sequential(*layers))
    model[4].weight = model[2].weight
    return model


def language_model(tied: bool) -> nn.Module:
    """An embedding whose table is the output layer's weight."""
    layers = {"table": nn.Embedding(6, 3), "mix": nn.Linear(3, 3), "head": nn.Linear(3, 6)}
    if tied:
        layers["head"].weight = layers["table"].weight
    return checks.Function(lambda m, tokens: m.head(m.mix(m.table(tokens).mean(1)).tanh()), **layers)


@pytest.fixture
def sentences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(6, (IMAGES, 4), generator=generator), torch.randint(6, (IMAGES,), generator=generator)


def language_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(2)
    tied = checks.randomised(language_model(True))
    apart = language_model(False).double()
    apart.load_state_dict(tied.state_dict())
    return tied, apart


def test_an_embedding_tied_to_the_output_layer(sentences, dense_ggn):
    """The factor's partial traces are those of the sum of the two layers' blocks, with the rows of the table in front."""
    tied, apart = language_models()
    la, two = KronLaplace(tied).fit([sentences]), KronLaplace(apart).fit([sentences])
    table, head = two.factors["table.weight"], two.factors["head.weight"]
    in_table = torch.kron(table.inputs.flatten().diag(), table.outputs[0])
    in_head = torch.kron(head.outputs[0], head.inputs[0])  # (V, 3) as the table is
    total = (in_table + in_head).view(6, 3, 6, 3)
    found = la.factors["table.weight"].to_dense()[0].view(6, 3, 6, 3)
    for axes in ("abcb->ac", "abad->bd"):
        torch.testing.assert_close(torch.einsum(axes, found), torch.einsum(axes, total))
    dense = dense_ggn(tied, *sentences)
    for name in ("head.bias", "mix.bias"):
        torch.testing.assert_close(la.factors[name].outputs[0], dense[name])


def two_tables(order: list[str]) -> nn.Module:
    """Two embeddings whose table is the output layer's weight, made in some order."""
    torch.manual_seed(2)
    made = {"one": nn.Embedding(6, 3), "other": nn.Embedding(6, 3), "head": nn.Linear(3, 6, bias=False)}
    made["other"].weight = made["head"].weight = made["one"].weight

    def forward(m: nn.Module, tokens: Tensor) -> Tensor:
        return m.head((m.one(tokens[:, :2]).mean(1) * m.other(tokens[:, 2:]).mean(1)).tanh())

    return checks.Function(forward, **{name: made[name] for name in order})


def test_the_order_of_layers_with_one_weight_does_not_matter(sentences):
    found = []
    for order in (["one", "other", "head"], ["one", "head", "other"], ["head", "one", "other"]):
        factor = next(iter(KronLaplace(two_tables(order).double()).fit([sentences]).factors.values()))
        sides = (factor.inputs, factor.outputs) if order[0] != "head" else (factor.outputs, factor.inputs)
        found.append(torch.kron(*(side[0] for side in sides)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_square_weight_of_a_convolution_and_of_its_transpose():
    """Both layers have factors of one shape, and use the weight in two ways."""

    def coder(tied: bool) -> nn.Module:
        torch.manual_seed(0)
        code, back = nn.Conv2d(1, 4, 2, 2, bias=False), nn.ConvTranspose2d(4, 1, 2, 2, bias=False)
        back.weight = code.weight if tied else nn.Parameter(code.weight.detach().clone())
        return checks.Function(lambda m, x: m.back(m.code(x).tanh()), code=code, back=back)

    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    la, two = (KronLaplace(coder(tied).double(), "regression").fit([(x, x)]) for tied in (True, False))
    there, back = (two.factors[name] for name in ("code.weight", "back.weight"))
    total = torch.kron(there.inputs[0], there.outputs[0]) + torch.kron(back.outputs[0], back.inputs[0])
    found = la.factors["code.weight"].to_dense()[0].view(4, 4, 4, 4)
    for axes in ("abcb->ac", "abad->bd"):
        torch.testing.assert_close(torch.einsum(axes, found), torch.einsum(axes, total.view(4, 4, 4, 4)))


def test_a_transposed_weight_whose_other_use_does_nothing_has_the_layers_own_factor(sentences):
    tied, apart = language_models()
    for model in (tied, apart):
        nn.init.zeros_(model.mix.weight)  # no gradient comes to the table
        nn.init.normal_(model.mix.bias, generator=torch.Generator().manual_seed(0))
    la, two = KronLaplace(tied).fit([sentences]), KronLaplace(apart).fit([sentences])
    head = two.factors["head.weight"]
    torch.testing.assert_close(la.factors["table.weight"].to_dense()[0], torch.kron(head.outputs[0], head.inputs[0]))


def test_what_a_merged_factor_takes_is_counted(sentences):
    """Beside the two that it is made of: 6 x 6 and 3 x 3 numbers of the table, once more."""
    tied, apart = language_models()
    la, two = KronLaplace(tied).fit([sentences]), KronLaplace(apart).fit([sentences])
    assert la.memory_estimate() - two.memory_estimate() >= (36 + 9) * 8

    def last(la: KronLaplace) -> int:
        return int(la.summary().splitlines()[-1].split()[-1].replace(",", ""))

    # The bias of the output layer has a side of its own where the weight is another layer's too.
    assert last(la) - last(two) == (36 + 9 + 36) * 8
    (line,) = (line for line in la.summary().splitlines() if line.startswith("head.weight"))
    assert line.endswith("Kronecker, one with table.weight")


@pytest.mark.parametrize("which", ["Linear", "Embedding"])
def test_tied_weights_are_saved_added_to_and_listed(which, data, sentences, tmp_path):
    model, (x, y) = (tied_network(), data) if which == "Linear" else (language_models()[0], sentences)
    whole = KronLaplace(model).fit([(x, y)])
    half = KronLaplace(model).fit([(x[:2], y[:2])])
    torch.save(half.state_dict(), tmp_path / "half.pt")
    other = KronLaplace(copy.deepcopy(model))
    other.load_state_dict(torch.load(tmp_path / "half.pt", weights_only=True))
    torch.testing.assert_close(other.log_marginal_likelihood(), half.log_marginal_likelihood(), rtol=0, atol=0)
    other.fit([(x[2:], y[2:])], override=False)
    torch.testing.assert_close(other.log_marginal_likelihood(), whole.log_marginal_likelihood())
    lines = whole.summary().splitlines()
    second = "4.weight" if which == "Linear" else "head.weight"
    assert any(line.startswith(second) for line in lines)
    assert f"{whole.n_params:,} parameters" in lines[-1]
    grown = copy.copy(half).fit([(x[2:], y[2:])], override=False)
    torch.testing.assert_close(grown.log_marginal_likelihood(), whole.log_marginal_likelihood())
    assert half.n_data == 2


def test_layers_whose_shared_parameter_has_other_blocks_are_refused():
    model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(2, 4, 1))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"and '0.weight' are one tied parameter.*1 of 2 x 4 and 2 of 2 x 2"):
        KronLaplace(model)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_the_exact_evidence_of_what_is_used_twice_is_a_fits(data, approximation):
    layer = nn.Linear(4, 4)
    repeated = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, CLASSES)).double()
    for model in (repeated, tied_network()):
        la = KronLaplace(model, prior_precision=0.3, approximation=approximation)
        exact = exact_log_marginal_likelihood(la, *data)
        torch.testing.assert_close(exact, la.fit([data]).log_marginal_likelihood())

"""Embeddings: against the dense GGN where the factors are exact, and against a linear layer on one-hot vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace

WORDS, SIZE, CLASSES = 7, 3, 3


def network(positions: int, **options: object) -> nn.Sequential:
    layers = nn.Embedding(WORDS, SIZE, **options), nn.Tanh(), nn.Flatten(), nn.Linear(SIZE * positions, CLASSES)
    return nn.Sequential(*layers).double()


class OneHot(nn.Module):
    def forward(self, indices: Tensor) -> Tensor:
        return nn.functional.one_hot(indices, WORDS).double()


def on_one_hot(model: nn.Sequential) -> nn.Sequential:
    """The same network with a linear layer in the place of the embedding."""
    linear = nn.Linear(WORDS, SIZE, bias=False, dtype=torch.float64)
    linear.weight = nn.Parameter(model[0].weight.detach().T.clone())
    return nn.Sequential(OneHot(), linear, *model[1:])


def data(images: int, positions: int) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (images, positions)), torch.randint(CLASSES, (images,))


def test_one_look_up_of_one_data_point_is_exact(dense_ggn):
    model = network(1)
    x, y = data(1, 1)
    blocks = KronLaplace(model).fit([(x, y)]).factors["0.weight"].to_dense()
    found = torch.block_diag(*blocks)  # what is between rows of the table is zero
    torch.testing.assert_close(found, dense_ggn(model, x, y)["0.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("positions", [1, 4])
def test_it_is_a_linear_layer_on_one_hot_vectors(positions, batches):
    model = network(positions)
    x, y = data(9, positions)
    la = KronLaplace(model).fit(batches(x, y, 4))
    other = KronLaplace(on_one_hot(model)).fit([(x, y)])
    ours, theirs = la.factors["0.weight"], other.factors["1.weight"]
    torch.testing.assert_close(torch.diag(ours.inputs[:, 0, 0]), theirs.inputs[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-9, atol=0)
    gamma, expected = la.effective_parameters(), other.effective_parameters()
    assert gamma["0.weight"] == pytest.approx(expected["1.weight"], rel=1e-9)


def test_the_table_is_stored_as_a_diagonal():
    model = nn.Sequential(nn.Embedding(50_000, 2), nn.Flatten(), nn.Linear(2, 2))
    la = KronLaplace(model).fit([(torch.randint(50_000, (4, 1)), torch.randint(2, (4,)))])
    assert la.factors["0.weight"].input_moment.total.numel() == 50_000
    assert torch.isfinite(la.log_marginal_likelihood())


def test_padding_has_no_part(dense_ggn):
    model = network(3, padding_idx=2)
    nn.init.normal_(model[0].weight)
    x, y = torch.tensor([[2, 5, 2]]), torch.tensor([1])
    blocks = KronLaplace(model).fit([(x, y)]).factors["0.weight"].to_dense()
    assert not blocks[2].any() and blocks[5].any()
    exact = dense_ggn(model, x, y)["0.weight"]
    torch.testing.assert_close(blocks[5], exact.view(WORDS, SIZE, WORDS, SIZE)[5, :, 5], rtol=1e-9, atol=1e-12)


def test_max_norm_is_refused():
    with pytest.raises(ValueError, match=r"layer '0' \(Embedding\) has max_norm=1.0"):
        KronLaplace(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))


def test_a_state_is_read_again():
    model = network(2)
    x, y = data(6, 2)
    la = KronLaplace(model).fit([(x, y)])
    other = KronLaplace(model)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())


class Summed(nn.Module):
    """Sequences of any length to logits; padding adds a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, SIZE, padding_idx=0), nn.Linear(SIZE, CLASSES)
        self.double()

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.table(indices).tanh().sum(1))


def test_it_does_not_matter_how_far_a_batch_is_padded():
    model = Summed()
    x, y = torch.tensor([[1, 2, 0, 0, 0, 0], [3, 4, 1, 2, 3, 4]]), torch.tensor([0, 1])
    padded = KronLaplace(model).fit([(x, y)])
    apart = KronLaplace(model).fit([(x[:1, :2], y[:1]), (x[1:], y[1:])])
    for name, factor in padded.factors.items():
        torch.testing.assert_close(factor.inputs, apart.factors[name].inputs, rtol=1e-12, atol=0)
        torch.testing.assert_close(factor.outputs, apart.factors[name].outputs, rtol=1e-9, atol=1e-12)


def test_memory_is_estimated():
    model = network(3)
    estimate = KronLaplace(model).memory_estimate(data(4, 3)[0])
    held = KronLaplace(model).fit([data(4, 3)]).factors
    moments = {id(m): m for f in held.values() for m in (f.input_moment, f.output_moment) if m is not None}
    assert estimate > sum(m.total.numel() * 8 for m in moments.values())


class Bags(nn.Module):
    """An embedding, and the sum or mean over the positions that are not padding."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.padding, self.mean = bag.padding_idx, bag.mode == "mean"
        self.table = nn.Embedding.from_pretrained(
            bag.weight.detach().clone(), freeze=False, padding_idx=bag.padding_idx
        )

    def forward(self, indices: Tensor) -> Tensor:
        counted = (indices != self.padding).double()[..., None]
        total = (self.table(indices) * counted).sum(1)
        return total / counted.sum(1) if self.mean else total


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_is_an_embedding_with_a_sum_behind_it(mode, batches):
    bag = nn.EmbeddingBag(WORDS, SIZE, mode=mode, padding_idx=0).double()
    nn.init.normal_(bag.weight)
    head = nn.Linear(SIZE, CLASSES).double()
    x, y = torch.tensor([[1, 2, 0, 3], [3, 4, 5, 5], [6, 0, 0, 0], [1, 1, 2, 6]]), torch.randint(CLASSES, (4,))
    model, other = nn.Sequential(bag, nn.Tanh(), head), nn.Sequential(Bags(bag), nn.Tanh(), head)
    torch.testing.assert_close(model(x), other(x))
    found = KronLaplace(model).fit(batches(x, y, 3)).factors["0.weight"]
    expected = KronLaplace(other).fit([(x, y)]).factors["0.table.weight"]
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-9, atol=1e-12)


def test_what_a_bag_is_not_served_with():
    with pytest.raises(ValueError, match="mode must be 'sum' or 'mean', got 'max'"):
        KronLaplace(nn.Sequential(nn.EmbeddingBag(3, 2, mode="max")))

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(WORDS, SIZE, mode="sum")

        def forward(self, indices: Tensor) -> Tensor:
            return self.bag(indices, per_sample_weights=torch.ones(indices.shape))

    with pytest.raises(ValueError, match="without offsets and per_sample_weights"):
        KronLaplace(Weighted()).fit([data(4, 2)])

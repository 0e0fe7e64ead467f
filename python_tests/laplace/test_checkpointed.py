"""Networks that compute layers anew for the way back, and tensors of subclasses inside a network: numbers of the plain network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from ella_cuda.nn import SparseFactoredLinear2d


class Checkpointed(nn.Module):
    """A block whose parts are computed anew, the last of them without a layer of a rule."""

    def __init__(self, block: nn.Sequential, last: nn.Module, reentrant: bool | None = False) -> None:
        super().__init__()
        self.block, self.last, self.dropout, self.reentrant = block, last, nn.Dropout(0.5), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.last(self.dropout(self.block(x)))
        h = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(checkpoint(self.dropout, h, use_reentrant=self.reentrant))


def checkpointed_and_plain(activation: nn.Module) -> tuple[nn.Module, nn.Module]:
    """With batch statistics that training mode would not use, and learned lengthscales."""
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    norm.running_mean.normal_()
    block = nn.Sequential(SparseFactoredLinear2d(1, 3, 4, 4), norm, activation, nn.Conv2d(3, 2, 3), nn.Flatten())
    models = [Checkpointed(block, nn.Linear(8, 4), reentrant).double() for reentrant in (False, None)]
    models[1].last = models[0].last
    block[0].basis_in.inverse_lengthscale.requires_grad_()
    return models[0], models[1]


def labelled(*shape: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, dtype=torch.float64), torch.arange(shape[0]) % classes


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.ReLU(inplace=True)])
def test_the_fit_of_a_checkpointed_network(activation):
    (model, plain), (x, y) = checkpointed_and_plain(activation), labelled(5, 1, 4, 4)
    exact = exact_log_marginal_likelihood(KronLaplace(plain), x, y)
    la = KronLaplace(model).fit([(x, y)])
    torch.testing.assert_close(la.log_marginal_likelihood(), exact, rtol=1e-10, atol=1e-12)
    assert model.training and model.block[1].training and all(p.requires_grad for p in model.last.parameters())
    with pytest.raises(ValueError, match=r"exact_log_marginal_likelihood: the model calls torch\.utils\.checkpoint"):
        exact_log_marginal_likelihood(la, x, y)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("use", ["fit", "exact_log_marginal_likelihood"])
def test_reentrant_checkpoints_are_refused_with_what_to_do(use):
    model, (x, y) = (
        Checkpointed(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 3), True).double(),
        labelled(4, 3),
    )
    la = KronLaplace(model)
    with pytest.raises(ValueError, match=f"^{use}: .*use_reentrant=True.*Call it with use_reentrant=False"):
        la.fit([(x, y % 3)]) if use == "fit" else exact_log_marginal_likelihood(la, x, y % 3)
    assert all(m.training for m in model.modules()) and all(p.requires_grad for p in model.parameters())


# ---- tensors of subclasses ----


class Uncopied(Tensor):
    """Holds its numbers itself, and refuses to be copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "clone":
            raise TypeError("no copies")
        return super().__torch_function__(function, types, args, kwargs or {})


class Marks(nn.Module):
    def __init__(self, layer: nn.Module, last: nn.Module, kind: type[Tensor]) -> None:
        super().__init__()
        self.layer, self.last, self.kind, self.seen = layer, last, kind, []

    def forward(self, x):
        h = self.layer(x.as_subclass(self.kind))
        self.seen.append(type(h))
        return self.last(h.tanh()).as_subclass(Tensor)


def test_a_model_sees_its_own_kind_of_tensors():
    layers = nn.Linear(3, 4), nn.Linear(4, 3)
    marked, plain = (Marks(*layers, kind).double() for kind in (Uncopied, Tensor))
    x, y = labelled(5, 1, 3, classes=3)
    flat = nn.Flatten()
    marked.last = plain.last = nn.Sequential(flat, layers[1])
    expected = KronLaplace(plain).fit([(x, y)]).log_marginal_likelihood()
    ours = KronLaplace(marked).fit([(x, y)])
    exact = exact_log_marginal_likelihood(ours, x, y)
    torch.testing.assert_close((ours.log_marginal_likelihood(), exact), (expected, expected))
    assert set(marked.seen) == {Uncopied}

"""Networks that compute layers anew for the way back, and tensors of subclasses inside a network: numbers of the plain network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ella_cuda.laplace import KronLaplace, exact_log_marginal_likelihood
from ella_cuda.nn import SparseFactoredLinear2d
from python_tests.laplace.checks import Function


def checkpointed(block: nn.Sequential, last: nn.Module, reentrant: bool | None = False) -> nn.Module:
    """A block whose parts are computed anew, the last of them without a layer of a rule; of ``reentrant=None`` none is."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if reentrant is None:
            return m.last(m.dropout(m.block(x)))
        h = checkpoint(m.block, x, use_reentrant=reentrant)
        return m.last(checkpoint(m.dropout, h, use_reentrant=reentrant))

    return Function(forward, block=block, last=last, dropout=nn.Dropout(0.5))


def checkpointed_and_plain(activation: nn.Module) -> tuple[nn.Module, nn.Module]:
    """With batch statistics that training mode would not use, and learned lengthscales."""
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    norm.running_mean.normal_()
    block = nn.Sequential(SparseFactoredLinear2d(1, 3, 4, 4), norm, activation, nn.Conv2d(3, 2, 3), nn.Flatten())
    models = [checkpointed(block, nn.Linear(8, 4), reentrant).double() for reentrant in (False, None)]
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
    model = checkpointed(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 3), True).double()
    x, y = labelled(4, 3)
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


def test_a_model_sees_its_own_kind_of_tensors():
    layers, seen = {"layer": nn.Linear(3, 4), "last": nn.Sequential(nn.Flatten(), nn.Linear(4, 3))}, []

    def marks(kind: type[Tensor]) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            h = m.layer(x.as_subclass(kind))
            seen.append(type(h))
            return m.last(h.tanh()).as_subclass(Tensor)

        return Function(forward, **layers).double()

    x, y = labelled(5, 1, 3, classes=3)
    expected = KronLaplace(marks(Tensor)).fit([(x, y)]).log_marginal_likelihood()
    seen.clear()
    ours = KronLaplace(marks(Uncopied)).fit([(x, y)])
    exact = exact_log_marginal_likelihood(ours, x, y)
    torch.testing.assert_close((ours.log_marginal_likelihood(), exact), (expected, expected))
    assert set(seen) == {Uncopied}

"""What loaders may yield: pairs of tensors, also of subclasses, for fits and for training in the same words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.laplace import KronLaplace
from ella_cuda.laplace.batches import pair_of, pair_on, require_loader

X, Y = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


class Image(torch.Tensor):
    """A subclass without anything of its own, as fastai's."""


class Labelled(torch.Tensor):
    """A subclass that keeps notes and passes them on, as MONAI's."""

    notes = "none"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(out, cls):
            out.notes = next((a.notes for a in args if isinstance(a, cls)), "none")
        return out


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def fit(loader) -> float:
    return float(KronLaplace(network()).fit(loader).log_marginal_likelihood())


def train(loader) -> tuple[list[float], list[float]]:
    return marglik_training(network(), loader, n_epochs=2, progress_bar=False)[2:]


@pytest.mark.parametrize("use", [fit, train])
@pytest.mark.parametrize("kind", [Image, Labelled, nn.Parameter])
def test_subclasses_give_the_numbers_of_plain_tensors(use, kind):
    def as_kind(x):
        return nn.Parameter(x, requires_grad=False) if kind is nn.Parameter else x.as_subclass(kind)

    labels = Y if kind is nn.Parameter else Y.as_subclass(kind)
    assert use([(as_kind(X), labels)]) == use([(X, Y)])


def test_a_subclass_is_viewed_and_what_is_plain_passes_as_it_is():
    x, y = pair_of([X.as_subclass(Labelled), Y], "here")
    assert type(x) is torch.Tensor and x.data_ptr() == X.data_ptr() and y is Y
    parameter = nn.Parameter(X)
    assert pair_of((parameter, Y), "here")[0] is parameter


def test_tensors_that_compute_by_themselves_are_refused():
    nested = torch.nested.nested_tensor([X[0, 0], X[1, 0, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^here: the loader must yield plain tensors, got a NestedTensor"):
        pair_of((nested, Y[:2]), "here")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(4).to_sparse(), r"of layout torch\.sparse_coo; convert it by to_dense\(\)"),
        (
            lambda: torch.nested.nested_tensor([X[0, 0], X[1, 0, :3]], layout=torch.strided),
            "nested; .*to_padded_tensor",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense_are_refused(make, words):
    for batch in ((make(), Y[:4]), (Y[:4], make())):
        with pytest.raises(TypeError, match=rf"^here: the loader must yield dense tensors, got one that is {words}"):
            pair_of(batch, "here")


@pytest.mark.parametrize(
    ("loader", "got"),
    [
        (DataLoader([{"image": x, "label": y} for x, y in zip(X, Y, strict=True)], 7), "dict"),
        (DataLoader(TensorDataset(X, Y, Y), 7), "list of Tensor, Tensor, Tensor"),
        ([(X.numpy(), Y)], "tuple of ndarray, Tensor"),
        ([X, Y], "Tensor"),
        ([()], "tuple of nothing"),
        ("batches", "str"),
    ],
)
def test_what_is_no_pair_is_refused_in_the_same_words(loader, got):
    for use, where in ((fit, "fit"), (train, r"marglik_training \(train_loader\)")):
        with pytest.raises(
            TypeError,
            match=rf"^{where}: the loader must yield pairs of tensors \(x, y\), got {got}; make pairs in .*collate_fn, or pass a loader",
        ):
            use(loader)


@pytest.mark.parametrize("use", [fit, train])
def test_what_is_no_loader_is_refused_in_the_same_words(use):
    with pytest.raises(TypeError, match=r"loader must yield batches \(x, y\), but a data set yields single examples"):
        use(TensorDataset(X, Y))
    for wrong, got in ((X, "Tensor"), (None, "NoneType"), (3, "int")):
        with pytest.raises(TypeError, match=rf"loader must be a loader of batches \(x, y\), got {got}; .*TensorLoader"):
            use(wrong)
    with pytest.raises(ValueError, match=r"got shapes \(1, 8, 8\) and \(\): single examples"):
        use(DataLoader(TensorDataset(X, Y), batch_size=None))


def test_a_stream_of_batches_is_a_loader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(X[:7], Y[:7]), (X[7:], Y[7:])])

    require_loader(Stream(), "here")
    assert fit(Stream()) == pytest.approx(fit([(X, Y)]), rel=1e-6)
    assert train(Stream()) == train([(X[:7], Y[:7]), (X[7:], Y[7:])])


def test_batches_come_to_the_models_device_and_may_be_of_inference_mode(device):
    with torch.inference_mode():
        batch = X.clone(), Y.clone()
    x, y = pair_on(batch, device, "here")
    assert x.device.type == y.device.type == device.type and not x.is_inference() and not y.is_inference()
    losses = []
    for loader in ([(X, Y)], [batch]):
        model = network().to(device)
        losses.append(marglik_training(model, loader, n_epochs=2, progress_bar=False)[3])
    assert losses[0] == losses[1] and np.isfinite(losses[0]).all()

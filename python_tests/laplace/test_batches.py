"""What loaders may yield: pairs of tensors, also of subclasses, for fits and for training in the same words."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ella_cuda import marglik_training
from ella_cuda.laplace import KronLaplace, TangentModel, exact_log_marginal_likelihood
from ella_cuda.laplace.batches import kept, merged, pair_of, pair_on, require_loader, run_model
from python_tests.laplace.checks import Function

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
        (lambda: torch.nested.nested_tensor([X[0, 0], X[1, 0, :3]], layout=torch.strided), "nested; .*to_padded_tensor"),
    ],
)  # fmt: skip
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
            KeyError if got == "dict" else TypeError,
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


# several inputs, and mappings -----------------------------------------------------------------------------------------


class Two(nn.Module):
    """Of an image and a number for each, which share nothing but the last layer; ``scale`` is for what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.number, self.last = nn.Conv2d(1, 2, 3), nn.Linear(1, 3), nn.Linear(75, 3)

    def forward(self, image, number, scale=1.0):
        hidden = torch.cat([self.image(image).flatten(1), self.number(number)], 1)
        return scale * self.last(torch.tanh(hidden))


def as_one() -> nn.Module:
    """The same network of one tensor, which has the number behind the image's pixels."""
    return Function(lambda m, x: m.two(x[:, :64].unflatten(1, (1, 8, 8)), x[:, 64:]), two=Two())


NUMBER = torch.randn(20, 1, generator=torch.Generator().manual_seed(1))
ONE = torch.cat([X.flatten(1), NUMBER], 1)
PARTS = [slice(0, 8), slice(8, 20)]
LOADERS = {
    "tuple": [((X[p], NUMBER[p]), Y[p]) for p in PARTS],
    "list": [[[X[p], NUMBER[p]], Y[p]] for p in PARTS],
    "mapping": [({"number": NUMBER[p], "image": X[p]}, Y[p]) for p in PARTS],
    "with something else": [((X[p], NUMBER[p], 1.0), Y[p]) for p in PARTS],
    "dict": [{"image": X[p], "labels": Y[p], "number": NUMBER[p]} for p in PARTS],
    "UserDict": [UserDict(image=X[p], labels=Y[p], number=NUMBER[p], scale=1.0) for p in PARTS],
    "DataLoader": DataLoader(
        [{"image": x, "number": n, "labels": y} for x, n, y in zip(X, NUMBER, Y, strict=True)],
        batch_sampler=[range(8), range(8, 20)],
    ),
}
PAIRS = [(ONE[p], Y[p]) for p in PARTS]


@pytest.mark.parametrize("kind", LOADERS)
def test_several_inputs_give_the_numbers_of_one(kind):
    one, several = KronLaplace(as_one()).fit(PAIRS), KronLaplace(Two()).fit(LOADERS[kind])
    assert several.log_marginal_likelihood() == one.log_marginal_likelihood()
    results = [
        marglik_training(model, loader, n_epochs=3, progress_bar=False)[2:]
        for model, loader in ((as_one(), PAIRS), (Two(), LOADERS[kind]))
    ]
    assert results[0] == results[1] and len(results[0][0]) == 3


@pytest.mark.parametrize("x", [(X, NUMBER), [X, NUMBER], {"image": X, "number": NUMBER}], ids=["tuple", "list", "dict"])
def test_the_exact_evidence_and_the_estimate_take_several_inputs(x):
    one, several = KronLaplace(as_one().double()), KronLaplace(Two().double())
    x = {k: v.double() for k, v in x.items()} if isinstance(x, dict) else type(x)(t.double() for t in x)
    expected = exact_log_marginal_likelihood(one, ONE.double(), Y)
    torch.testing.assert_close(exact_log_marginal_likelihood(several, x, Y), expected, rtol=1e-12, atol=0)
    assert several.memory_estimate(x) == one.memory_estimate(ONE.double())
    for wrong in ([1.0, None], {}, "x"):
        for ask in (several.memory_estimate, lambda x: exact_log_marginal_likelihood(several, x, Y)):
            with pytest.raises(TypeError, match=rf"x must be a tensor .* got {type(wrong).__name__}"):
                ask(wrong)


@pytest.mark.parametrize("use", [fit, train])
def test_a_mapping_of_the_targets_and_one_input_is_a_pair(use):
    assert use([{"labels": Y, "input_ids": X}]) == use([(X, Y)])


def test_keys_are_arguments():
    batch, options = {"image": X, "class": Y}, {"dict_key_x": "image", "dict_key_y": "class"}
    la = KronLaplace(network(), **options).fit([batch])
    assert (la.dict_key_x, la.dict_key_y) == ("image", "class")
    assert float(la.log_marginal_likelihood()) == fit([(X, Y)])
    other = marglik_training(network(), [batch], n_epochs=2, progress_bar=False, **options)
    assert other[2:] == train([(X, Y)]) and other[0].dict_key_x == "image"
    for wrong, error in ((("x", 3), TypeError), (("x", "x"), ValueError)):
        for make in (KronLaplace, lambda m, **keys: marglik_training(m, [batch], **keys)):
            with pytest.raises(error, match="dict_key_"):
                make(network(), dict_key_x=wrong[0], dict_key_y=wrong[1])


@pytest.mark.parametrize(
    "batch",
    [{"image": X, "label": Y}, {"labels": Y}, {"input_ids": X, "labels": Y.tolist()}, {"input_ids": "a", "labels": Y}, {1: X, "labels": Y}],
    ids=["no targets", "targets alone", "a list", "no tensor", "no name"],
)  # fmt: skip
def test_mappings_without_inputs_or_targets_are_told_the_keys(batch):
    held = ", ".join(rf"{key!r} \({type(value).__name__}\)" for key, value in batch.items())
    for use in (fit, train):
        with pytest.raises(
            TypeError if "labels" in batch else KeyError,
            match=rf"pairs of tensors .*dict_key_y='labels'.*dict_key_x='input_ids'.* its keys are {held}: pass dict_key_y",
        ):
            use([batch])


def test_tensors_of_one_batch_have_as_many_data_points():
    for x in ((X, NUMBER[:3]), {"image": X, "number": NUMBER[:3]}):
        words = r"all have the batch along their first axis, \(N, \.\.\.\), got shapes .*\(20, 1, 8, 8\), .*\(3, 1\)"
        with pytest.raises(ValueError, match=rf"^fit: the tensors of x must {words}"):
            KronLaplace(Two()).fit([(x, Y)])
        with pytest.raises(ValueError, match=rf"^memory_estimate: the tensors of x must {words}"):
            KronLaplace(Two()).memory_estimate(x)
    with pytest.raises(ValueError, match=r"got shapes \(20, 1, 8, 8\), \(\) and \(20,\): single examples"):
        KronLaplace(Two()).fit([((X, torch.tensor(1.0)), Y)])


def test_several_inputs_are_plain_tensors_on_the_models_device(device):
    with torch.inference_mode():
        number = NUMBER.clone()
    (image, moved, note), y = pair_on(((X.as_subclass(Labelled), number, "as it is"), Y), device, "here")
    assert type(image) is torch.Tensor and note == "as it is" and not moved.is_inference()
    assert {t.device.type for t in (image, moved, y)} == {device.type}
    with pytest.raises(TypeError, match=r"^here: the loader must yield dense tensors, got one that is of layout"):
        pair_of({"a": X, "b": torch.eye(20).to_sparse(), "labels": Y}, "here")


def test_images_that_mix_are_found_among_several_inputs():
    class Mixed(Two):
        def forward(self, image, number):
            hidden = torch.cat([self.image(image).flatten(1), self.number(number)], 1)
            return self.last(hidden - hidden.mean(0))

    for x in ((X, NUMBER), (X[:1], NUMBER[:1])):
        with pytest.raises(ValueError, match="other images of the batch"):
            KronLaplace(Mixed()).fit([(x, Y[: len(x[0])])])


def test_several_reduced_inputs_are_taken_in_full_under_autocast():
    reduced = [((X.bfloat16(), NUMBER.bfloat16()), Y)]
    with torch.autocast("cpu", torch.bfloat16):
        found = KronLaplace(Two()).fit(reduced).log_marginal_likelihood()
    full = [((X.bfloat16().float(), NUMBER.bfloat16().float()), Y)]
    assert found == KronLaplace(Two()).fit(full).log_marginal_likelihood()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_found_among_several_inputs():
    class Checkpointed(Two):
        def forward(self, image, number, words):
            hidden = torch.cat([checkpoint(self.image, image, use_reentrant=True).flatten(1), self.number(number)], 1)
            return self.last(hidden)

    with pytest.raises(ValueError, match="Call it with use_reentrant=False"):
        KronLaplace(Checkpointed()).fit([((X, NUMBER, torch.arange(20)), Y)])


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, image):
        return self.layer(image)


def test_a_key_that_was_given_and_is_not_there_is_named():
    batch = {"image": torch.randn(4, 5), "label": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(KeyError, match=r"dict_key_x='img' .*its keys are 'image' \(Tensor\), 'label'"):
        KronLaplace(nn.Linear(5, 3), dict_key_x="img", dict_key_y="label").fit([batch])
    assert KronLaplace(ByName(), dict_key_y="label").fit([batch]).n_data == 4


def test_an_entry_that_the_model_does_not_take_is_named():
    batch = {"image": torch.randn(4, 5), "name": list("abcd"), "label": torch.tensor([0, 1, 2, 0])}
    la = KronLaplace(ByName(), dict_key_x="image", dict_key_y="label")
    with pytest.raises(TypeError, match=r"by name \(image, name\).*unexpected keyword argument 'name'.*collate_fn"):
        la.fit([batch])


@pytest.mark.parametrize("given", [torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["fit", "predict", "train", "tangent", "named"])
def test_data_of_another_dtype_are_refused_with_both_and_what_to_do(given, kind):
    model, x, y = nn.Linear(5, 3), torch.ones(4, 5), torch.tensor([0, 1, 2, 0])
    la = KronLaplace(model).fit([(x, y)])
    uses = {
        "fit": lambda x: KronLaplace(model).fit([(x, y)]),
        "predict": la,
        "train": lambda x: marglik_training(model, [(x, y)], n_epochs=1, progress_bar=False),
        "tangent": lambda x: TangentModel(model).offset(x),
        "named": lambda x: KronLaplace(ByName(), dict_key_x="image").fit([{"image": x, "labels": y}]),
    }
    with pytest.raises(TypeError, match=rf"a batch x of {given}.* being torch.float32 .*x.to\(torch.float32"):
        uses[kind](x.to(given))
    uses[kind](x.to(given).to(torch.float32))


def test_other_errors_of_a_model_stay_as_they_are():
    class Typed(nn.Linear):
        def forward(self, x):
            raise RuntimeError("no such type")

    with pytest.raises(RuntimeError, match=r"^no such type$"):
        run_model(Typed(5, 3), torch.ones(4, 5))
    with pytest.raises(RuntimeError, match=r"^Expected tensor for argument"):
        run_model(nn.Embedding(5, 3), torch.ones(4, 5, dtype=torch.float64))


def pairs_of(*sizes: int, width: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, width), torch.randint(4, (n,))) for n in sizes]


def test_small_batches_go_together_in_their_order():
    pairs = pairs_of(4, 3, 5, 0, 2, 9, 1)
    found = list(merged(pairs, lambda _: 8))
    assert [len(x) for x, _ in found] == [7, 7, 9, 1]
    for part in range(2):
        assert torch.equal(torch.cat([pair[part] for pair in found]), torch.cat([pair[part] for pair in pairs]))


def test_a_loader_may_use_its_memory_again():
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)

    def reusing():
        for value in range(5):
            x.fill_(value), y.fill_(value)
            yield x, y

    for images, labels in merged(reusing(), lambda _: 4):
        assert torch.equal(images[:, 0].long(), labels)
        if len(labels) == 4:
            assert labels.tolist() in ([0, 0, 1, 1], [2, 2, 3, 3])


def test_what_is_kept_of_a_batch_is_a_copy_of_all_its_tensors():
    one, two = torch.ones(2), torch.ones(3)
    given = {"x": [one, 7, "text"], "y": two}
    copied = kept(given)
    one.zero_(), two.zero_()
    assert copied["x"][0].tolist() == [1, 1] and copied["x"][1:] == (7, "text") and copied["y"].tolist() == [1, 1, 1]


def test_without_room_batches_stay_as_they_are():
    pairs = pairs_of(4, 0, 3)
    for found, given in zip(merged(pairs, lambda _: 0), pairs, strict=True):
        assert found[0] is given[0] and found[1] is given[1]


def test_batches_of_another_kind_stay_apart():
    mapping = [({"a": x, "b": x[:, :1]}, y) for x, y in pairs_of(2, 2)]
    other = [({"b": x[:, :1], "a": x}, y) for x, y in pairs_of(2)]
    several = [((x, x), y) for x, y in pairs_of(2, 2)]
    half = [(x.half(), y) for x, y in pairs_of(2)]
    with_number = [((x, 3), y) for x, y in pairs_of(2, 2)]
    folded = [(x, y[:1]) for x, y in pairs_of(2, 2)]
    given = [*pairs_of(2, 2), *pairs_of(2, width=4), *half, *mapping, *other, *several, *with_number, *folded]
    sizes = [(type(x).__name__, len(y)) for x, y in merged(given, lambda _: 100)]
    expected = {"Tensor": [4, 2, 2], "dict": [4, 2], "tuple": [4, 2, 2]}
    assert sizes == [(kind, n) for kind, ns in expected.items() for n in ns] + [("Tensor", 1)] * 2


def test_a_fit_does_not_depend_on_what_goes_together(monkeypatch):
    """As on a GPU, where batches are merged."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    pairs = [(x.double(), y) for x, y in pairs_of(4, 3, 5, 2)]
    seen = []

    def together(given, room):
        for pair in merged(given, lambda x: max(room(x), 8)):
            seen.append(len(pair[1]))
            yield pair

    expected = KronLaplace(model).fit(pairs)
    monkeypatch.setattr("ella_cuda.laplace.kron.merged", together)
    found = KronLaplace(model).fit(pairs)
    assert seen == [7, 7] and found.n_data == expected.n_data
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-12, atol=0)

"""marglik_training with recorded steps: the numbers of a training step by step, and the same errors. On a GPU the graphs are CUDA's; on
the CPU a stand-in records the same steps op by op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.nn import SparseFactoredLinear2d
from ella_cuda.recording import CudaGraphs
from ella_cuda.training import trainer
from ella_cuda.training.step import TrainingStep
from python_tests.recorded import RecordedGraphs
from python_tests.training.test_trainer import Network, images


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraphs]:
    """What was recorded, by run, on whatever device there is."""
    made: list[RecordedGraphs] = []
    if device.type == "cpu":
        monkeypatch.setattr(RecordedGraphs, "made", made)
        monkeypatch.setattr(trainer, "CudaGraphs", RecordedGraphs)
        return made

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    class Counted(CudaGraphs):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.warmed = self.recorded = self.replayed = 0
            made.append(self)

        def warm_up(self, work):
            self.warmed += 1
            super().warm_up(work)

        def record(self, work):
            self.recorded += 1
            replay = super().record(work)

            def counted() -> None:
                self.replayed += 1
                replay()

            return counted

    monkeypatch.setattr(trainer, "CudaGraphs", Counted)
    return made


def run(device: torch.device, cuda_graph: bool, model: nn.Module | None = None, y=None, **options):
    """24 images in batches of 10, 10 and 4; precisions learned after every other epoch."""
    torch.manual_seed(3)
    model = (Network() if model is None else model).to(device)
    x, labels = images()
    loader = TensorLoader(x.to(device), (labels if y is None else y).to(device), 10, shuffle=True)
    arguments = {"n_epochs": 6, "n_epochs_burnin": 1, "marglik_frequency": 2, "n_hypersteps": 3, "progress_bar": False}
    arguments |= {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": 18}}
    arguments |= {"optimizer_kwargs": {"lr": 0.01, "fused": True}, "prior_prec_init": 5.0}
    return marglik_training(model, loader, cuda_graph=cuda_graph, **(arguments | options))


def same_numbers(first, second) -> None:
    (la, model, margliks, losses), (la_2, model_2, margliks_2, losses_2) = first, second
    torch.testing.assert_close(losses, losses_2, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(margliks, margliks_2, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(la.prior_precision, la_2.prior_precision, rtol=1e-3, atol=0.0)
    for a, b in zip(model.parameters(), model_2.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_same_numbers_as_step_by_step(device, graphs):
    """Every shape of batch is done once as it comes, recorded once, and replayed from then on; precisions, rates and batches of later
    steps reach the graph."""
    seen = {True: [], False: []}
    recorded, plain = (run(device, c, on_evaluation=seen[c].append) for c in (True, False))
    same_numbers(recorded, plain)
    assert (graphs[0].warmed, graphs[0].recorded, graphs[0].replayed) == (2, 2, 6 * 3 - 2)
    assert [(g.warmed, g.recorded, g.replayed) for g in graphs[1:]] == 3 * [(1, 1, 2)]  # of evidence steps
    assert [e.accuracy for e in seen[True]] == [e.accuracy for e in seen[False]]
    assert recorded[2][-1] < recorded[2][0]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.filterwarnings("ignore:marglik_training. AdamW has weight_decay")
def test_optimizers_that_are_not_fused(optimizer, device, graphs):
    if device.type == "cpu":
        pytest.skip("torch's optimizers that are not fused keep their options for graphs to accelerators")
    options = {"optimizer_cls": optimizer, "optimizer_kwargs": {"lr": 0.01}}
    same_numbers(run(device, True, **options), run(device, False, **options))
    assert graphs[0].replayed


class Pair(nn.Module):
    """Of an image and a number for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.image, self.number = nn.Linear(64, 10), nn.Linear(1, 10)

    def forward(self, image, number, scale=1.0):
        return scale * (self.image(image.flatten(1)) + self.number(number))


def mappings(device: torch.device, **more) -> list[dict[str, object]]:
    x, y = (t.to(device) for t in images())
    return [{"image": x[p], "number": x[p, 0, :1, 0], "labels": y[p], **more} for p in (slice(0, 12), slice(12, 24))]


def test_batches_of_several_inputs_are_recorded(device, graphs):
    """Each order of names is a shape of its own."""
    results = []
    for cuda_graph in (True, False):
        loader = mappings(device)
        loader[1] = dict(reversed(loader[1].items()))
        options = {"optimizer_kwargs": {"lr": 0.01, "fused": True}, "n_epochs": 4, "progress_bar": False}
        results.append(marglik_training(Pair().to(device), loader, cuda_graph=cuda_graph, **options))
    same_numbers(*results)
    assert graphs[0].replayed
    with pytest.raises(TypeError, match=r"are tensors alone.* got dict with 1 other\(s\) .*image \(12, 1, 8, 8\)"):
        marglik_training(
            Pair().to(device), mappings(device, scale=1.0), cuda_graph=True, n_epochs=1, progress_bar=False
        )


def test_lengthscales_that_move_are_recorded_anew(device, graphs):
    """An interpolating basis keeps its matrix from one call to the next."""

    def learned(cuda_graph: bool):
        torch.manual_seed(5)
        layer = SparseFactoredLinear2d(1, 2, 8, 4, basis="interpolating")
        model = nn.Sequential(layer, nn.Flatten(), nn.ReLU(), nn.Linear(32, 10))
        return run(device, cuda_graph, model, learn=["lengthscales"], lr_lengthscales=0.3)

    recorded, plain = learned(True), learned(False)
    same_numbers(recorded, plain)
    start = float(SparseFactoredLinear2d(1, 2, 8, 4).basis_in.inverse_lengthscale)
    moved = [float(run_[1][0].basis_in.inverse_lengthscale) for run_ in (recorded, plain)]
    assert moved[0] == pytest.approx(moved[1], rel=1e-4) and abs(moved[0] - start) > 0.05
    assert graphs[0].recorded > 2


@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_with_or_without(device, graphs, tmp_path, first):
    """What a graph needs of the optimizer is not in the checkpoint."""

    class Stop(Exception):
        pass

    def stop(evaluation) -> None:
        if evaluation.epoch == 4:
            raise Stop

    with pytest.raises(Stop):
        run(device, first, checkpoint=tmp_path / "c.pt", on_evaluation=stop)
    same_numbers(run(device, not first, checkpoint=tmp_path / "c.pt"), run(device, False))


def test_the_optimizer_is_left_as_it_was(device, graphs):
    made = []

    def adam(parameters, **options):
        made.append(torch.optim.Adam(parameters, **options))
        return made[-1]

    for cuda_graph in (True, False):
        run(device, cuda_graph, optimizer_cls=adam)
    recorded, plain = (optimizer.state_dict()["param_groups"] for optimizer in made)
    assert recorded == plain and type(recorded[0]["lr"]) is float


@pytest.mark.parametrize("recorded", [True, False])
def test_a_loss_that_is_not_finite_names_layer_and_step(recorded, device, graphs, tmp_path):
    model = Network()

    def poison(evaluation) -> None:
        if evaluation.epoch == 2:
            with torch.no_grad():
                model.layer.conv[0].weight[0, 0, 0, 0] = float("nan")

    with pytest.raises(FloatingPointError, match=r"epoch 3, step 1.*layer\.conv\.0.*weight"):
        run(device, recorded, model, objective="map", checkpoint=tmp_path / "c.pt", on_evaluation=poison)
    assert any(graph.replayed for graph in graphs) == recorded and (tmp_path / "c.pt").exists()


class Changing(TensorLoader):
    """Before a pass, ``change(loader, pass)`` may change what it yields."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        self.change(self, self.passes)
        return super().__iter__()


def map_run(device: torch.device, cuda_graph: bool, change) -> tuple:
    """Four epochs, each in an order of its own; returns what training does, and the loader."""
    torch.manual_seed(3)
    x, y = (t.to(device) for t in images())
    loader = Changing(x, y, 2, shuffle=True)
    loader.change = change
    model = Network().to(device)
    options = {"lr": 0.01, "fused": True}
    trained = marglik_training(
        model, loader, n_epochs=4, objective="map", cuda_graph=cuda_graph, optimizer_kwargs=options, progress_bar=False
    )
    return trained, loader


@pytest.mark.parametrize(
    ("what", "value", "error", "message"),
    [
        ("images", float("inf"), FloatingPointError, r"epoch 3, step \d+; the batch itself"),
        ("labels", 10, ValueError, r"labels must lie in 0\.\.9.*10"),
        ("labels", -7, ValueError, r"labels must lie in 0\.\.9.*-7"),
    ],
)
def test_a_bad_batch_is_named_and_its_epoch_undone(device, graphs, monkeypatch, what, value, error, message):
    """The same words, step and weights as step by step."""
    messages, weights = [], []
    for cuda_graph in (True, False):
        monkeypatch.setattr(trainer, "TrainingStep", remembered := Remembered())

        def change(loader: Changing, number: int) -> None:
            if number == 3:
                getattr(loader, what)[-1] = value

        with pytest.raises(error, match=message) as raised:
            map_run(device, cuda_graph, change)
        messages.append(str(raised.value))
        weights.append(remembered.step.parameters)
    assert messages[0] == messages[1]
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert graphs[0].replayed


class Remembered:
    """Makes a training step and remembers it."""

    def __call__(self, *args):
        self.step = TrainingStep(*args)
        return self.step


def test_after_an_epoch_undone_steps_are_recorded_anew(device, graphs):
    """Data that are bad in one pass alone, the third: the epoch done again is sound, and so are those after it."""
    kept = []

    def change(loader: Changing, number: int) -> None:
        if number == 3:
            kept.append(loader.images)
            loader.images = loader.images * float("nan")
        elif kept:
            loader.images = kept.pop()

    recorded, loader = map_run(device, True, change)
    plain, _ = map_run(device, False, lambda loader, number: None)
    torch.testing.assert_close(recorded[3], plain[3], rtol=1e-5, atol=0.0)
    for a, b in zip(recorded[1].parameters(), plain[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert loader.passes == 5
    assert (graphs[0].warmed, graphs[0].recorded, graphs[0].replayed) == (2, 2, 3 * 12 - 1 + 12 - 1)


def test_what_cannot_be_recorded_is_refused(device, graphs):
    with pytest.raises(ValueError, match=r"capturable.*SGD"):
        run(device, True, optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.1})
    cycle = {"max_lr": 0.1, "total_steps": 18}
    options = {"scheduler_cls": torch.optim.lr_scheduler.OneCycleLR, "scheduler_kwargs": cycle}
    with pytest.raises(ValueError, match="a schedule may change the learning rate alone"):
        run(device, True, **options)
    options["scheduler_kwargs"] = cycle | {"cycle_momentum": False}
    same_numbers(*(run(device, c, **options) for c in (True, False)))


def test_a_model_that_reads_values_is_refused(device, graphs):
    if device.type == "cuda":
        pytest.skip("a capture that breaks off leaves CUDA's generator in it, for the tests that follow")

    class Reads(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.mean()) < 100 else x

    with pytest.raises(
        RuntimeError,
        match=r"batches \(10, 1, 8, 8\) cannot be recorded as a CUDA graph.*In a new process, pass cuda_graph=False",
    ):
        run(device, True, Reads())
    try:
        raise KeyError("of whoever trains")
    except KeyError:  # no cause of what happens while it is handled
        with pytest.raises(RuntimeError, match=r"as a CUDA graph \(.*reads a value"):
            run(device, True, Reads())


def kept_nodes(model: nn.Module) -> list[str]:
    """The weights whose node in autograd's graph somebody keeps alive: a hook on it is still there the next time."""
    fired: list[str] = []
    for name, p in model.named_parameters():
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        node.register_prehook(lambda _, name=name: fired.append(name))
        del node
    for p in model.parameters():
        p.sum().backward()
    model.zero_grad()
    return fired


@pytest.mark.parametrize("learn", [(), ("lengthscales",)])
def test_an_approximation_keeps_no_node_of_the_weights(device, learn):
    """Nodes remember the stream that they were made on, and a step recorded on another one cannot wait for it."""
    layer = SparseFactoredLinear2d(1, 2, 8, 4)
    model = nn.Sequential(layer, nn.Flatten(), nn.ReLU(), nn.Linear(32, 10)) if learn else Network()
    held = run(device, False, model, learn=learn, n_epochs=4)
    assert kept_nodes(model) == [] and held[0].log_marginal_likelihood().isfinite()
    kept = model(images()[0].to(device)).sum()
    assert len(kept_nodes(model)) == len(list(model.parameters())) and kept.isfinite()


def test_only_cuda_has_graphs(tmp_path: Path):
    with pytest.raises(ValueError, match="cuda_graph=True needs a model on a CUDA device, got cpu"):
        run(torch.device("cpu"), True)

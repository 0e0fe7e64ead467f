"""Checkpoints: whole or absent, refused when they do not fit, and never executed."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

from ella_cuda import marglik_training
from ella_cuda.data import TensorLoader
from ella_cuda.nn import SparseFactoredLinear2d
from ella_cuda.training.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint


def test_round_trip(tmp_path):
    path = tmp_path / "new folder" / "run.pt"
    state = {"epoch": 3, "numbers": [1.5, None], "nested": {"tensor": torch.arange(4)}}
    save_checkpoint(path, state)
    read = read_checkpoint(path)
    assert (
        read["epoch"] == 3 and read["numbers"] == [1.5, None] and torch.equal(read["nested"]["tensor"], torch.arange(4))
    )
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


def test_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})

    def full(state, file):
        file.write(b"part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"could not be written.*No space left.*free space or choose another folder.*untouched"
    ):
        save_checkpoint(path, {"epoch": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert read_checkpoint(path)["epoch"] == 1


def test_a_write_that_the_system_cuts_short_is_said_in_the_systems_words(tmp_path, beside_the_tests):
    """The operating system refuses to go on writing, of which torch makes an error of its own."""
    code = """
import resource, signal, sys, torch
from ella_cuda.training.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save_checkpoint(sys.argv[1], {"tensor": torch.zeros(100_000)})
except OSError as error:
    print(error.errno == 27, error)
"""
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-c", code.replace("27", str(errno.EFBIG)), str(path)]
    done = subprocess.run(call, cwd=beside_the_tests, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.startswith(f"True [Errno {errno.EFBIG}] {path} could not be written (File too large); free"), (
        done
    )
    assert read_checkpoint(path)["epoch"] == 1


def test_truncated_at_any_point(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1, "tensor": torch.randn(10_000)})
    content = path.read_bytes()
    for length in range(0, len(content), 397):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="not a readable checkpoint"):
            read_checkpoint(path)


def test_a_flipped_bit_is_found(tmp_path):
    """Anywhere in what is stored: read as it was, or refused; never read as something else."""
    path = tmp_path / "run.pt"
    tensor = torch.randn(3_000)
    save_checkpoint(path, {"epoch": 1, "tensor": tensor})
    content = path.read_bytes()
    refused = 0
    for position in range(50, len(content), 101):
        path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        try:
            read = read_checkpoint(path)
        except ValueError:
            refused += 1
        else:
            assert read["epoch"] == 1 and torch.equal(read["tensor"], tensor)
    assert refused > 12_000 // 101  # all flips in the 12,000 bytes of the tensor at least


def test_code_in_a_file_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("the checkpoint executed code",))

    (tmp_path / "run.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        read_checkpoint(tmp_path / "run.pt")
    torch.save({"format": 3, "model": Evil()}, tmp_path / "run.pt", pickle_module=pickle)
    with pytest.raises(ValueError, match=r"something else, \S+\._Fail, than tensors and plain values") as raised:
        read_checkpoint(tmp_path / "run.pt")
    assert "weights_only" not in str(raised.value) and "trust" not in str(raised.value)


def test_a_compressed_file_is_refused_before_it_is_uncompressed(tmp_path):
    save_checkpoint(tmp_path / "run.pt", {"epoch": 1})
    with zipfile.ZipFile(tmp_path / "run.pt") as whole, zipfile.ZipFile(tmp_path / "small.pt", "w") as small:
        for part in whole.infolist():
            small.writestr(part.filename, whole.read(part), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="a part is compressed"):
        read_checkpoint(tmp_path / "small.pt")


def test_another_runs_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    model = nn.Linear(2, 3)
    save_checkpoint(path, {"settings": {"n_epochs": 5, "fisher": "mc"}, "model": model.state_dict()})
    assert load_checkpoint(path, {"n_epochs": 5}, model)["settings"]["fisher"] == "mc"
    with pytest.raises(ValueError, match="n_epochs=5, this run has 6"):
        load_checkpoint(path, {"n_epochs": 6}, model)
    with pytest.raises(ValueError, match=r"weight of shape \(3, 2\), the model \(4, 2\)"):
        load_checkpoint(path, {}, nn.Linear(2, 4))
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="not a checkpoint of this version"):
        read_checkpoint(path)
    save_checkpoint(path, {"settings": {}, "model": model.state_dict()})
    with pytest.raises(ValueError, match="does not say with which n_epochs it was written"):
        load_checkpoint(path, {"n_epochs": 5}, model)
    with pytest.raises(ValueError, match=r"has weight in torch\.float32, the model torch\.float64"):
        load_checkpoint(path, {}, nn.Linear(2, 3).double())
    with pytest.raises(ValueError, match="has bias, which the model has not"):
        load_checkpoint(path, {}, nn.Linear(2, 3, bias=False))


def test_fields_are_compared_exactly_but_for_rates_that_follow_from_sums(tmp_path):
    path, model = tmp_path / "run.pt", nn.Linear(2, 3)
    rate = 0.0123456789
    settings = {"lr_hyp": rate, "optimizer_groups": [{"lr": repr(rate), "betas": "(0.9, 0.999)"}]}
    save_checkpoint(path, {"settings": settings, "model": model.state_dict()})
    for change, message in (
        ({"optimizer_groups": [{"lr": repr(rate * (1 + 1e-8)), "betas": "(0.9, 0.999)"}]}, None),
        (
            {"optimizer_groups": [{"lr": repr(rate * (1 + 1e-5)), "betas": "(0.9, 0.999)"}]},
            r"optimizer_groups\[0\]\['lr'\]=",
        ),
        ({"optimizer_groups": [{"lr": repr(rate), "betas": "(0.9, 0.99)"}]}, r"optimizer_groups\[0\]\['betas'\]="),
        ({"lr_hyp": rate * (1 + 1e-15)}, "lr_hyp="),
    ):
        if message is None:
            load_checkpoint(path, settings | change, model)
        else:
            with pytest.raises(ValueError, match=message):
                load_checkpoint(path, settings | change, model)


def train(path, **options):
    """Two epochs of a small network, with everything that a checkpoint can have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    loader = TensorLoader(torch.randn(12, 4), torch.arange(12) % 2, 4, shuffle=True, generator=torch.Generator())
    defaults = {
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {"T_max": 6},
        "optimizer_cls": torch.optim.Adam,
    }
    marglik_training(model, loader, n_epochs=2, progress_bar=False, checkpoint=path, **{**defaults, **options})
    return model


def shortened(state):
    state["optimizer"]["state"][0]["exp_avg"] = state["optimizer"]["state"][0]["exp_avg"][:-1]


DAMAGES = {
    r"optimizer \['state'\]\[0\] \['exp_avg'\] has shape \(2, 4\), here \(3, 4\)": shortened,
    r"optimizer \['state'\]\[1\] has no exp_avg_sq": lambda s: s["optimizer"]["state"][1].pop("exp_avg_sq"),
    r"optimizer has no state of parameter 2": lambda s: s["optimizer"]["state"].pop(2),
    r"optimizer \['state'\]\[0\] \['step'\] has shape": lambda s: s["optimizer"]["state"][0].update(step=torch.ones(3)),
    r"optimizer has no param_groups": lambda s: s["optimizer"].pop("param_groups"),
    r"optimizer has other groups of parameters": lambda s: s["optimizer"]["param_groups"][0]["params"].reverse(),
    r"optimizer \['param_groups'\] is not a list of 1": lambda s: s["optimizer"]["param_groups"].append({}),
    r"optimizer \['param_groups'\] \[0\] has no betas": lambda s: s["optimizer"]["param_groups"][0].pop("betas"),
    r"learner prior optimizer \['state'\]\[0\] \['exp_avg'\] has shape": lambda s: s["learners"]["prior"]["optimizer"][
        "state"
    ][0].update(exp_avg=torch.zeros(3)),
    r"learner prior optimizer has no state of parameter 0": lambda s: s["learners"]["prior"]["optimizer"][
        "state"
    ].clear(),
    r"learner prior has no optimizer": lambda s: s["learners"]["prior"].pop("optimizer"),
    r"learner prior is a NoneType, not a dict": lambda s: s["learners"].pop("prior"),
    r"scheduler has no last_epoch": lambda s: s["scheduler"].pop("last_epoch"),
    r"scheduler \['base_lrs'\] is not a list of 1": lambda s: s["scheduler"].update(base_lrs=[0.1, 0.1]),
    r"scheduler \['T_max'\] is a str, not a number": lambda s: s["scheduler"].update(T_max="6"),
    r"has no scheduler": lambda s: s.update(scheduler=None),
    r"learner prior \['log_precision'\] has shape \(3,\), here \(4,\)": lambda s: s["learners"]["prior"].update(
        log_precision=torch.ones(3)
    ),
    r"learner prior has no log_sigma": lambda s: s["learners"]["prior"].pop("log_sigma"),
    r"has no learners": lambda s: s.pop("learners"),
    r"has no model": lambda s: s.pop("model"),
    r"has no settings": lambda s: s.pop("settings"),
    r"data of its settings is a int": lambda s: s["settings"].update(data=5),
    r"has no margliks": lambda s: s.pop("margliks"),
    r"epoch is a str": lambda s: s.update(epoch="2"),
    r"has 1 losses of 2 epochs": lambda s: s["losses"].pop(),
    r"losses holds something else than floats": lambda s: s.update(losses=["1", 2.0]),
    r"has no prior_precision in its last evaluation": lambda s: s["history"][-1].pop("prior_precision"),
    r"random is no state of generators \('numpy'\)": lambda s: s["random"].pop("numpy"),
    r"random is no state of generators .*size to be 7": lambda s: s["random"].update(
        torch=torch.zeros(7, dtype=torch.uint8)
    ),
    r"random is no state of generators \(0 generators": lambda s: s["random"].update(loaders=[]),
    r"random_at_fit is no state of generators": lambda s: s.update(random_at_fit=None),
    r"random_at_fit is no state of generators \(": lambda s: s.pop("random_at_fit"),
    r"random_at_fit is no state of generators \('int'": lambda s: s.update(margliks=[], random_at_fit=5),
    r"optimizer \['state'\]\[0\] \['exp_avg'\] is in torch.float16, here in torch.float32": lambda s: rounded(
        s["optimizer"]["state"][0], "exp_avg"
    ),
    r"learner prior \['log_precision'\] is in torch.float16, here in torch.float64": lambda s: rounded(
        s["learners"]["prior"], "log_precision"
    ),
    r"learner prior \['log_sigma'\] is in torch.float32, here in torch.float64": lambda s: rounded(
        s["learners"]["prior"], "log_sigma", torch.float32
    ),
}


def rounded(tensors, name, dtype=torch.float16):
    tensors[name] = tensors[name].to(dtype)


def test_a_state_without_an_evidence_step_may_lack_the_random_state_of_one(tmp_path):
    model = train(tmp_path / "run.pt", objective="map")
    state = read_checkpoint(tmp_path / "run.pt")
    assert not state["margliks"] and state.pop("random_at_fit") is None
    save_checkpoint(tmp_path / "run.pt", state)
    again = train(tmp_path / "run.pt", objective="map")
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("name", ["pipe", "device", "folder"])
def test_no_file_is_no_checkpoint(tmp_path, name):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"checkpoint must be a file, but .* is a"):
        train(path)
    with pytest.raises(
        ValueError, match=f"is not a readable checkpoint .it is a {'folder' if name == 'folder' else 'pipe'}"
    ):
        read_checkpoint(path)
    assert [p.name for p in tmp_path.iterdir()] == [name] and path.exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run.pt"
    train(path)
    return read_checkpoint(path)


@pytest.mark.parametrize("words", DAMAGES)
def test_an_entry_that_does_not_fit_is_named_before_anything_changes(tmp_path, monkeypatch, whole, words):
    state = copy.deepcopy(whole)
    DAMAGES[words](state)
    save_checkpoint(tmp_path / "run.pt", state)
    before = (tmp_path / "run.pt").read_bytes()
    changed = []
    for kind in (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler):
        monkeypatch.setattr(kind, "load_state_dict", lambda *_: changed.append(1))
    with pytest.raises(ValueError, match=rf"run\.pt cannot be gone on with: {words}"):
        train(tmp_path / "run.pt")
    assert not changed and (tmp_path / "run.pt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]  # and no claim is left


class Own(torch.optim.SGD):
    """Cannot be made of its groups, and keeps a state of its own form."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(7)
        super().step()


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Rprop, Own]
)
def test_optimizers_of_other_forms_are_resumed(tmp_path, optimizer):
    """Momentum that is not there, states of other shapes, products, signs, and somebody's own."""
    finished = train(tmp_path / "run.pt", optimizer_cls=optimizer)
    again = train(tmp_path / "run.pt", optimizer_cls=optimizer)
    assert all(map(torch.equal, finished.parameters(), again.parameters()))


def test_a_checkpoint_of_format_3_is_gone_on_from(tmp_path):
    """It has the prior and one optimizer of all bases, with a group for each word, at the top."""

    def run(name: str, stop_after: int | None = None) -> list[torch.Tensor]:
        def stop(evaluation) -> None:
            if evaluation.epoch == stop_after:
                raise KeyboardInterrupt

        torch.manual_seed(0)
        model = nn.Sequential(SparseFactoredLinear2d(1, 2, 4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
        loader = TensorLoader(torch.randn(12, 1, 4, 4), torch.arange(12) % 2, 4, shuffle=True)
        marglik_training(
            model, loader, n_epochs=6, learn=["anchors", "lengthscales"], checkpoint=tmp_path / name, on_evaluation=stop,
            progress_bar=False,
        )  # fmt: skip
        return list(model.state_dict().values())

    with pytest.raises(KeyboardInterrupt):
        run("old.pt", stop_after=4)
    state = read_checkpoint(tmp_path / "old.pt")
    learners = state.pop("learners")
    state["hyper_optimizer"] = learners["prior"].pop("optimizer")
    state["prior"] = learners["prior"]
    kinds = [learners[name]["optimizer"] for name in ("anchors", "lengthscales")]
    assert [[*kind["state"]] for kind in kinds] == [[0, 1], [0, 1]]  # of the bases of inputs and outputs
    state["shape_optimizer"] = {
        "state": {2 * i + j: kind["state"][j] for i, kind in enumerate(kinds) for j in (0, 1)},
        "param_groups": [kind["param_groups"][0] | {"params": [2 * i, 2 * i + 1]} for i, kind in enumerate(kinds)],
    }
    torch.save(state | {"format": 3}, tmp_path / "old.pt")
    damaged = {**state, "format": 3, "shape_optimizer": None}
    torch.save(damaged, tmp_path / "damaged.pt")
    assert all(map(torch.equal, run("old.pt"), run("whole.pt")))
    with pytest.raises(ValueError, match=r"damaged\.pt cannot be gone on with: its learners cannot be read"):
        run("damaged.pt")

"""Fits of several processes are those of one: the oracle is a fit of this process alone, on all data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ella_cuda.laplace import KronLaplace
from python_tests.distributed import works

# Of factors by their largest entry, and of what follows from eigenvalues.
NEAR = {"float32": (1e-6, 1e-6), "float64": (1e-14, 1e-12)}


def alone(name: str, dtype: str, batches: int, **settings):
    return works.facts(works.fitted(name, dtype, batches, None, **settings))


def require_near(found, expected, of_factors: float, of_numbers: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.endswith((" inputs", " outputs")):
            error = (found[key] - value).abs().max() / value.abs().max()
            assert error <= of_factors, (key, float(error))
        elif isinstance(value, torch.Tensor):
            error = ((found[key] - value).abs() / value.abs().clamp(min=1)).max()
            assert error <= of_numbers, (key, float(error))
        else:
            assert found[key] == value, key


RELAXED = ["relaxed", "float64", 11]
CORRECTED = {"eigenvalue_correction": True}
# The number of processes, what they do, and the fit of one process that is the same; of 3 processes and one batch two ranks have none.
FITS = {
    **{f"{dtype} on {n}": (n, "fit", ["relaxed", dtype, 11, {}], ["relaxed", dtype, 11]) for dtype in NEAR for n in (1, 2, 3, 4)},
    **{f"{n} batches": (3, "fit", ["relaxed", "float64", n, {}], ["relaxed", "float64", n]) for n in (1, 3)},
    "shared positions on one rank": (3, "fit", ["positions", "float64", 1, {}], ["positions", "float64", 1]),
    "a second fit that adds to the first": (3, "fit_twice", RELAXED, RELAXED),
    "no rule": (3, "fit", ["unknown", "float64", 11, {"unknown": "diagonal"}], ["unknown", "float64", 11]),
    "corrected": (3, "fit", ["positions", "float64", 11, CORRECTED], ["positions", "float64", 11]),
    "data sets of their own": (2, "fit_data_of_its_own", ["float64"], RELAXED),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
def test_a_fit_of_several_processes_is_that_of_one(processes, case):
    ranks, work, arguments, one = FITS[case]
    expected = alone(*one, **(arguments[3] if work == "fit" else {}))
    for found in processes.run(work, ranks, *arguments):
        require_near(found, expected, *NEAR[one[1]])


def same_bits(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def test_three_processes_repeat_their_bits_and_agree_on_them(processes):
    runs = [processes.run("fit", 3, "relaxed", "float32", 11, {}) for _ in range(2)]
    first = runs[0][0]
    for found in (*runs[0], *runs[1]):
        assert all(same_bits(found[key], value) for key, value in first.items())


def test_left_out_columns_are_those_of_whole_batches(processes):
    settings = {"column_tolerance": 0.05}
    expected = alone("relaxed", "float32", 11, **settings)
    whole = alone("relaxed", "float32", 11)
    left_out = max((expected[k] - v).abs().max() / v.abs().max() for k, v in whole.items() if k.endswith(" outputs"))
    assert left_out > 1e-3  # some columns are left out
    for found in processes.run("fit", 3, "relaxed", "float32", 11, settings):
        require_near(found, expected, 1e-6, 1e-6)


@pytest.mark.parametrize("ends", [[works.SIZE], [40, works.SIZE]])
def test_gradients_in_lengthscales_and_anchors_are_those_of_one_process(processes, ends):
    model, names = works.learning("float64")
    la = KronLaplace(model, prior_precision=0.7).fit(works.loader_of(11, torch.float64))
    expected = works.gradients(la, names)
    for found in processes.run("fit_of_buffers", 3, "float64", ends):
        assert found.keys() == expected.keys() and len(expected) >= 2
        for name, value in expected.items():
            assert ((found[name] - value).abs().max() / value.abs().max()) <= 1e-9, name


@pytest.mark.parametrize("batches", [1, 7])  # two ranks have none of one
def test_the_evidence_s_gradient_in_amounts_is_that_of_one_process(processes, batches):
    expected = works.of_amounts(None)
    for found in processes.run("gradient_of_amounts", 3, batches):
        assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("buffers", "same buffers, but rank 1 of 2"),
        ("shuffled", "loader that shard shares out"),
        ("temperature", "same temperature, but rank 1 of 2"),
        ("columns", "same columns, but rank 1 of 2"),
        ("n_data", "same n_data, but rank 1 of 2"),
    ],
)
def test_ranks_whose_gradients_are_no_parts_of_one_are_refused(processes, wrong, words):
    for outcome in processes.fail("gradient_of_amounts", 2, 7, wrong):
        assert outcome.error is not None and outcome.error[0] == "ValueError" and words in outcome.error[1], outcome
        assert outcome.seconds < 5


def test_sampled_columns_follow_from_the_batch_alone(processes):
    settings = {"fisher": "mc", **CORRECTED}
    two, three = (processes.run("fit", ranks, "relaxed", "float64", 11, settings)[0] for ranks in (2, 3))
    require_near(two, three, *NEAR["float64"])
    exact = alone("relaxed", "float64", 11)
    differs = max((two[k] - v).abs().max() / v.abs().max() for k, v in exact.items() if k.endswith(" outputs"))
    assert differs > 1e-3  # they are drawn


REFUSED = {
    "sampler": ("ValueError", "102 data points of the data set's 101"),
    "whole": ("ValueError", "saw 202 data points of the data set's 101"),
    "whole, shuffled": ("ValueError", "saw 202 data points of the data set's 101"),
    "shuffled": ("ValueError", "same first batch of the loader that shard shares out, but rank 1 of 2"),
    "nan": ("FloatingPointError", "rank 1 of 2"),
    "label": ("ValueError", "rank 1 of 2"),
    "parameters": ("ValueError", "same parameters and buffers, but rank 1 of 2"),
    "settings": ("ValueError", "same resolution, but rank 1 of 2"),
    **{name: ("ValueError", f"same {name}, but rank 1 of 2") for name in works.APART},
    "override": ("TypeError", "rank 1 of 2: fit: override must be a bool, got Tensor"),
    "dataset": ("TypeError", "rank 1 of 2: fit: loader must yield batches"),
    "draws": ("ValueError", "must be of the same draws"),
    "nothing": ("ValueError", "the loader gave no data"),
    "never called": ("ValueError", "'not' (Linear) has trainable parameters but was never called"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_on_one_rank_is_refused_on_all(processes, what):
    kind, words = REFUSED[what]
    for outcome in processes.fail("fit_wrongly", 2, what):
        assert outcome.error is not None and outcome.error[0] == kind, outcome
        assert words in outcome.error[1], outcome.error[1]
        assert outcome.seconds < 5


@pytest.mark.parametrize(("what", "rank"), [("parameters", 1), ("parameters of rank 0", 0)])
def test_the_odd_one_of_three_is_named_whichever_it_is(processes, what, rank):
    for outcome in processes.fail("fit_wrongly", 3, what):
        assert f"rank {rank} of 3 has another" in outcome.error[1]


@pytest.mark.parametrize(("most", "sums"), [(1 << 25, 1), (30, 3), (1, 4)])
def test_large_factors_are_summed_in_parts(processes, most, sums):
    found = processes.run("sum_in_parts", 2, most)
    for one in found:
        assert one["sums"] == sums and one["extra"].tolist() == [1.0, 3.0, 5.0]
        for total, mine, others in zip(one["totals"], found[0]["before"], found[1]["before"], strict=True):
            assert torch.equal(total, mine + others)


def test_a_fit_sums_once_and_its_evidence_needs_nobody(processes):
    for found in processes.run("count_fit", 2, "relaxed", 11):
        sums = [size for name, size in found["calls"] if name == "all_reduce"]
        assert sums == [8 * (found["numbers"] + found["moments"] + 2)]  # packed, with rows, targets and the statistic
        assert found["later"] == 0
        assert len(found["calls"]) <= 5  # two headers, the sum, a header and the eigenvalues


def test_an_addition_that_a_rank_refuses_leaves_no_rank_fitted(processes):
    for words, n_data in processes.run("refused_addition", 2):
        assert "on rank 1 of 2: fit(override=False): the model's layers or parameters changed" in words and n_data == 0


def test_a_later_pass_over_the_data_asks_for_all_of_them(processes):
    for added in (False, True):
        assert all("pass train_loader" in words for words in processes.run("later_pass", 2, added))


def test_predictions_of_parts_are_gathered(processes):
    for found in processes.run("predictions", 3):
        assert found["gathered"].shape == found["whole"].shape
        assert (found["gathered"] - found["whole"]).abs().max() < 1e-12


@pytest.mark.parametrize("size", [0, 4000, 5000])
def test_headers_may_be_longer_than_a_frame(processes, size):
    for found in processes.run("exchange", 2, size):
        assert found == [{"rank": rank, "text": "x" * size} for rank in range(2)]


@pytest.mark.parametrize(
    ("how", "words"), [("replicated", "KronLaplace(ddp.module)"), ("sharded", "get_model_state_dict")]
)
def test_wrapped_models_are_refused_with_what_to_do(processes, how, words):
    for outcome in processes.fail("wrapped", 2, how):
        assert outcome.error is not None and outcome.error[0] == "TypeError" and words in outcome.error[1], outcome


def test_what_the_refusal_of_a_sharded_model_says_works(processes):
    assert processes.run("wrapped", 2, "gathered") == [works.SIZE] * 2


def test_a_group_that_is_none_is_refused():
    x, y = works.data()
    with pytest.raises(TypeError, match="group must be None or a process group"):
        KronLaplace(works.network()).fit([(x, y)], group="world")
    with pytest.raises(ValueError, match="must have this process in it"):
        KronLaplace(works.network()).fit([(x, y)], group=dist.GroupMember.NON_GROUP_MEMBER)

"""Every object that the package exports copies, pickles and saves: what comes back gives the same numbers and shares no memory."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ella_cuda
from ella_cuda import augment, data, experiments, groups, laplace, models, training
from ella_cuda.laplace import KronLaplace, likelihoods
from ella_cuda.laplace.rules import rules_for
from ella_cuda.nn import RelaxedEquivariance, SpatialBasis
from python_tests.nn import layers

PACKAGES = [ella_cuda, ella_cuda.nn, augment, ella_cuda.models, groups, laplace, data, training, experiments]


class Case(NamedTuple):
    """An object, made by ``make``, and what it is asked for: tensors, numbers, or containers of them."""

    make: Callable[[], Any]
    ask: Callable[[Any], Any]


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"copy.copy": copy.copy, "copy.deepcopy": copy.deepcopy, "torch.save, which pickles": saved}


# what there is to copy ------------------------------------------------------------------------------------------------


def used(module: nn.Module, x: Tensor) -> nn.Module:
    """After a step, with whatever it keeps from one call to the next."""
    out = module(x)
    if out.requires_grad:
        out.sum().backward()
    with torch.no_grad():
        module(x)
    return module


def module_cases(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Case]:
    def outputs(module: nn.Module) -> tuple[Tensor, ...]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return module(x), *module.state_dict().values()

    def compiled() -> nn.Module:
        return used(torch.compile(make(), backend="eager"), torch.randn(shape))

    def compiled_in_place() -> nn.Module:
        module = make()
        module.compile(backend="eager")
        return used(module, torch.randn(shape))

    return {
        "new": Case(make, outputs),
        "used": Case(lambda: used(make(), torch.randn(shape)), outputs),
        "compiled": Case(compiled, outputs),
        "compiled in place": Case(compiled_in_place, outputs),
    }


def basis_cases() -> dict[str, Case]:
    def learning(kind: str) -> SpatialBasis:
        basis = SpatialBasis(4, 5, kind)
        basis.matrix()
        basis.anchors.requires_grad_()
        basis.matrix().sum().backward()
        return basis

    def ask(basis: SpatialBasis) -> tuple[Tensor, Tensor, bool]:
        return basis.matrix().detach(), basis.project(torch.ones(2, 16)).detach(), basis.learns()

    kinds = ("interpolating", "exponential")
    return {f"learning, {kind}": Case(lambda kind=kind: learning(kind), ask) for kind in kinds}


X, Y = torch.randn(9, 2, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3


def network() -> nn.Sequential:
    paths = {
        "f_fc": ella_cuda.nn.FactoredLinear2d(2, 3, 4, 2),
        "s_fc": ella_cuda.nn.SparseFactoredLinear2d(2, 3, 4, 2),
        "conv": ella_cuda.nn.StridedCircularConv2d(2, 3),
    }
    return nn.Sequential(RelaxedEquivariance(paths), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def fitted(model: nn.Module | None = None, **options: Any) -> KronLaplace:
    return KronLaplace(network() if model is None else model, prior_precision=0.5, **options).fit([(X, Y)])


def evaluated(la: KronLaplace) -> KronLaplace:
    la.log_marginal_likelihood()
    return la


def learning() -> KronLaplace:
    model = network()
    model[0].get_submodule("s_fc").basis_in.inverse_lengthscale.requires_grad_()
    return fitted(model)


def with_a_graph() -> KronLaplace:
    """Its precisions are computed from something that requires a gradient."""
    la = fitted()
    logarithm = torch.zeros(len(la.parameter_names), dtype=torch.float64, requires_grad=True)
    la.prior_precision = logarithm.exp()
    return la


def with_a_mode() -> KronLaplace:
    la = fitted()
    la.fit_linear_mode([(X, Y)], 1e-3)
    return la


def products(tangent: laplace.TangentModel) -> tuple[Any, ...]:
    u = torch.linspace(-1, 1, tangent.n_params)
    pulled = tangent.push_pull(X, u, lambda f, along: along)
    return tangent.form, tangent.parameter_names, tangent(u, X), tangent.vjp(X, torch.ones(9, 3)), pulled


def pushed(tangent: laplace.TangentModel) -> laplace.TangentModel:
    products(tangent)
    return tangent


def results(la: KronLaplace) -> tuple[Any, ...]:
    evidence = la.log_marginal_likelihood()
    wanted = [b for b in la.model.buffers() if b.requires_grad]
    gradients = torch.autograd.grad(evidence, wanted) if wanted else ()
    return evidence.detach(), *gradients, la.effective_parameters(), la.layer_types(), la.prior_precision.detach()


def fitted_on(la: KronLaplace) -> tuple[Any, ...]:
    """Of a copy with more data; what is asked for has no effect on the object itself."""
    more = copy.deepcopy(la)
    return results(more.fit([(X[:4], Y[:4])], override=False)), more.n_data


def stale() -> KronLaplace:
    la = fitted()
    la.model[0].get_submodule("s_fc").basis_in.reset_anchors()
    return la


def refusal(la: KronLaplace) -> str:
    with pytest.raises(RuntimeError) as refused:
        la.log_marginal_likelihood()
    return str(refused.value)


def factor_of(name: str) -> Any:
    return fitted().factors[name]


FACTORS = ("0.f_fc.weight_in", "0.s_fc.weight_out", "0.conv.weight", "3.bias")


def read_moment(moment: laplace.SecondMoment) -> tuple[Any, ...]:
    return moment.total, moment.projected(), moment.eigenvalues(), moment.rows


def read_factor(factor: laplace.KroneckerFactor) -> tuple[Any, ...]:
    return factor.inputs, factor.outputs, factor.eigenvalues(), factor.logdet(torch.tensor(2.0)), factor.n_data


def rule_cases() -> dict[str, Case]:
    def rule(number: int) -> laplace.Rule:
        found = rules_for(network(), "shared")[number]
        found.allocate()
        return found

    def ask(rule: laplace.Rule) -> tuple[Any, ...]:
        moments = [m.total for f in rule.factors.values() for m in (f.input_moment, f.output_moment) if m is not None]
        return rule.label, rule.trainable, [s.numel for s in rule.shapes().values()], rule.bytes(), moments

    return {f"rule {number}": Case(lambda number=number: rule(number), ask) for number in range(4)}


def batches(loader: data.TensorLoader) -> list[Tensor]:
    """Of the next epoch; the loader's own generator is put back."""
    state = loader.generator.get_state()
    torch.manual_seed(5)
    pairs = [t for batch in loader for t in batch]
    loader.generator.set_state(state)
    return pairs


def moved_loader() -> data.TensorLoader:
    loader = data.TensorLoader(
        X, Y, 4, shuffle=True, generator=torch.Generator().manual_seed(2), augment=data.FlipsShifts(torch.zeros(2), 1)
    )
    list(loader)
    return loader


def dataset() -> data.Dataset:
    return data.Dataset(X, Y, X[:3], Y[:3], 3)


def fields(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}


def drawn_batches(batches: training.ClassBatches) -> list[list[int]]:
    torch.manual_seed(0)
    return [*batches]


def run_config() -> experiments.RunConfig:
    return experiments.configure("digits", "digit", "f_fc+conv", "evidence", seed=3, width=1)


def loaded_run() -> experiments.LoadedRun:
    return experiments.LoadedRun(network(), KronLaplace(network()), run_config(), 3)


def augmentations() -> dict[str, dict[str, Case]]:
    """Draws are those of one seed; held ones are another's."""

    def outputs(module: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return module(X), *module.state_dict().values()

    def case(make: Callable[[], nn.Module]) -> dict[str, Case]:
        return {"new": Case(make, outputs), "used": Case(lambda: used(make(), X), outputs)}

    def affine(**options: Any) -> augment.AffineAugment:
        return augment.AffineAugment(4, ("rotation", "tx"), 0.2, **options)

    def learning() -> nn.Module:
        made = affine()
        made.raw.requires_grad_()
        return made

    sampled = {how: case(lambda how=how: affine(sampling=how))["used"] for how in ("shared", "grid", "sobol")}
    return {
        "AffineAugment": {**case(affine), **sampled, "learning": case(learning)["used"]},
        "LocalDeformation": case(lambda: augment.LocalDeformation(3)),
        "Augment": {
            "of an amount": Case(lambda: augment.Augment(3, ("a",)), lambda module: (module.eta, module.amounts()))
        },
        "AveragedFunction": case(lambda: augment.AveragedFunction(network(), affine())),
    }


def neyshabur_cases() -> dict[str, Case]:
    cases = {}
    for layer in ("fc+f_fc+conv", "s_fc+s_conv", "f_fc+gconv"):
        made = module_cases(lambda layer=layer: models.neyshabur(layer, 1, 3, 1, 32), (2, 1, 32, 32))
        cases |= {f"{layer}, {state}": made[state] for state in ("new", "used")}
    return cases


MASKS = {
    "LargestMagnitudeSubnetMask": (3,),
    "LargestVarianceDiagLaplaceSubnetMask": (3,),
    "RandomSubnetMask": (3, torch.Generator().manual_seed(0)),
    "ParamNameSubnetMask": (["0.s_fc.weight_in"],),
    "ModuleNameSubnetMask": (["0"],),
    "LastLayerSubnetMask": (),
}
ADDED = {
    "RelaxedEquivariance": module_cases(lambda: network()[0], (3, 2, 4, 4)),
    "SpatialBasis": basis_cases(),
    **augmentations(),
    "GroupFilter2d": module_cases(lambda: ella_cuda.nn.GroupConv2d(2, 3)[0], layers.FEATURES),
    "Neyshabur": neyshabur_cases(),
    "Group": {"p4": Case(lambda: groups.as_group("p4"), lambda group: (group.cayley, group.inverse, group.name))},
    "KronLaplace": {
        "not fitted": Case(lambda: KronLaplace(network()), lambda la: (la.n_data, la.prior_precision)),
        "fitted": Case(fitted, results),
        "evaluated": Case(lambda: evaluated(fitted()), results),
        "regression": Case(
            lambda: KronLaplace(network(), "regression", sigma_noise=0.3).fit([(X, torch.randn(9, 3))]), results
        ),
        "to be fitted on": Case(fitted, fitted_on),
        "of a compiled model": Case(lambda: fitted(torch.compile(network(), backend="eager")), results),
        "differentiable in a basis": Case(learning, results),
        "with a linear mode": Case(with_a_mode, lambda la: (la.linear_mode, la.log_marginal_likelihood(at="linear"))),
        "with a graph": Case(with_a_graph, results),
        "of a basis that changed": Case(stale, refusal),
    },
    **{
        kind: {"fitted": Case(lambda kind=kind, how=how: unfactored(kind, how), lambda la: (la.H, la(X), la.log_marginal_likelihood()))}
        for kind, how in {"FullLaplace": {}, "DiagLaplace": {}, "SubnetLaplace": {"subnetwork_indices": torch.arange(3)}}.items()
    },
    **{
        kind: {"chosen": Case(lambda kind=kind, args=args: mask(kind, args), lambda chosen: (chosen.indices, chosen.n_params_subnet))}
        for kind, args in MASKS.items()
    },
    "TangentModel": {
        "new": Case(lambda: laplace.TangentModel(network(), "simple"), products),
        "used": Case(lambda: pushed(laplace.TangentModel(network())), products),
    },
    "KroneckerFactor": {name: Case(lambda name=name: factor_of(name), read_factor) for name in FACTORS},
    "SecondMoment": {name: Case(lambda name=name: factor_of(name).output_moment, read_moment) for name in FACTORS},
    "FactorShape": {"of a basis": Case(lambda: factor_of("0.s_fc.weight_out").shape, lambda shape: (shape.row_outputs, shape[:5]))},
    "Rule": rule_cases(),
    "Likelihood": {
        "that ignores a label": Case(
            lambda: likelihoods.Classification(1),
            lambda likelihood: (repr(likelihood), likelihood.statistic(torch.ones(3, 3), torch.arange(3))),
        )
    },
    "IndependentLikelihood": {
        name: Case(likelihoods.LIKELIHOODS[name], lambda likelihood: likelihood.statistic(torch.ones(3, 3), torch.ones(3, 3)))
        for name in ("regression", "binary", "poisson")
    },
    "NTKLaplace": {
        "fitted": Case(
            lambda: unfactored("NTKLaplace", {}), lambda la: (la.log_marginal_likelihood(), la.effective_parameters())
        )
    },
    "ClassBatches": {"of three classes": Case(lambda: training.ClassBatches([0, 1, 1, 0, 2], 2), drawn_batches)},
    "TensorLoader": {"after an epoch": Case(moved_loader, batches)},
    "FlipsShifts": {"of two channels": Case(lambda: data.FlipsShifts(torch.ones(2), 1), lambda change: change(X, torch.ones(9, 3).long()))},
    "Dataset": {"of nine": Case(dataset, fields)},
    "Evaluation": {
        "of one": Case(
            lambda: training.Evaluation(1, 0.5, 0.25, None, [1.0, 2.0], {"a": 0.5}, 1.0, {"basis": 0.5}), dataclasses.asdict
        )
    },
    "Learner": {"of nothing": Case(training.Learner, lambda learner: (learner.tensors(), learner.settings(), learner.state_dict()))},
    "BufferLearner": {"after a step": Case(lambda: learner(), lambda thing: learned(thing))},
    "RunConfig": {"of digits": Case(run_config, dataclasses.asdict)},
    "LoadedRun": {"of three epochs": Case(loaded_run, lambda run: (run.model(X), run.config.name, run.epoch))},
    "Adam of adam_for": {"after a step": Case(lambda: stepped(), lambda optimizer: optimizer.state_dict())},
}  # fmt: skip


def unfactored(kind: str, how: dict[str, Any]) -> Any:
    return getattr(laplace, kind)(network(), **how).fit([(X, Y)])


def mask(kind: str, args: tuple[Any, ...]) -> laplace.SubnetMask:
    found = getattr(laplace, kind)(network(), *args)
    found.select([(X, Y)])
    return found


def learner() -> training.BufferLearner:
    return moved(training.BufferLearner("scale", network(), ["0.s_fc.basis_in.anchors"], lr=0.1))


def moved(learner: training.BufferLearner) -> training.BufferLearner:
    learner.step(None, {name: torch.ones_like(tensor) for name, tensor in learner.tensors().items()})
    return learner


def learned(learner: training.BufferLearner) -> tuple[Any, ...]:
    """Also what a step does, to a copy."""
    other = moved(copy.deepcopy(learner))
    return learner.state_dict(), learner.record(), other.state_dict(), other.record(), learner.settings()


def stepped() -> torch.optim.Optimizer:
    model = network()
    optimizer = experiments.adam_for(model, 4)(list(model.parameters()), lr=0.1)
    used(model, X)
    optimizer.step()
    return optimizer


def layer_cases() -> dict[str, dict[str, Case]]:
    cases: dict[str, dict[str, Case]] = {}
    for name, (make, shape) in {**layers.WITH_PARAMETERS, **layers.OTHERS}.items():
        made = {f"{name}, {state}": case for state, case in module_cases(make, shape).items()}
        cases.setdefault(name.partition(",")[0], {}).update(made)
    return cases


CASES = layer_cases() | ADDED
EACH = [(name, state) for name, states in CASES.items() for state in states]


# what must hold -------------------------------------------------------------------------------------------------------


def exports() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        for name in getattr(package, "__all__", [n for n in vars(package) if not n.startswith("_")]):
            thing = getattr(package, name)
            if getattr(thing, "__module__", package.__name__).startswith("ella_cuda"):
                yield f"{package.__name__}.{name}", thing


def test_every_exported_class_is_here():
    classes = {name.rpartition(".")[2] for name, thing in exports() if inspect.isclass(thing)}
    of_one_pass = {"Dense", "Patches", "Rows"}
    assert classes - CASES.keys() == {"EvidenceCallback", "MarglikTrainer", "SubnetMask", *of_one_pass}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_and_a_callback_are_refused(way):
    """Torch's schedules patch their optimizer: the copy's would step the original's weights. A callback knows parameters by their ids."""
    trainer = training.MarglikTrainer(network(), [(X, Y)], n_epochs=1)
    with pytest.raises(TypeError, match=r"a trainer cannot be copied or pickled.* state_dict"):
        WAYS[way](trainer)
    with pytest.raises(TypeError, match=r"a callback cannot be copied or pickled.* state_dict"):
        WAYS[way](training.EvidenceCallback(network(), [(X, Y)]))


@pytest.mark.parametrize(
    "name", [name for name, thing in exports() if inspect.isroutine(thing) or inspect.isclass(thing)]
)
def test_functions_and_classes_are_found_by_name(name):
    thing = dict(exports())[name]
    assert pickle.loads(pickle.dumps(thing)) is thing and copy.deepcopy(thing) is thing


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def memory(thing: Any, seen: dict[int, Any]) -> set[int]:
    """Where the tensors are that an object holds, however deep."""
    if id(thing) in seen or isinstance(thing, (str, int, float, type(None), type)) or inspect.ismodule(thing):
        return set()
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        return {thing.untyped_storage().data_ptr()} if thing.numel() else set()
    if isinstance(thing, dict):
        parts = [*thing, *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = list(thing)
    elif inspect.isroutine(thing) or not hasattr(thing, "__dict__"):
        return set()
    else:
        parts = list(vars(thing).values())
    return set().union(*(memory(part, seen) for part in parts)) if parts else set()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "state"), EACH)
def test_copies_are_equal_and_independent(name, state, way):
    case = CASES[name][state]
    torch.manual_seed(0)
    original = case.make()
    copied = WAYS[way](original)
    assert type(copied) is type(original)
    if way != "copy.copy":
        # A tuple of unchangeable things, as a shape without a basis, is its own copy.
        assert not memory(copied, {}) & memory(original, {})
    expected = case.ask(original)
    assert same(case.ask(copied), expected)
    again = WAYS[way](original)  # after it was asked
    assert same(case.ask(again), expected)
    assert same(case.ask(original), expected)

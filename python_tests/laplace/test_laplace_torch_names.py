"""Names of laplace-torch that this package has, against closed forms."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal

from ella_cuda.laplace import DiagLaplace, FullLaplace, KronLaplace, SubnetLaplace

CLASSES = (KronLaplace, FullLaplace, DiagLaplace)
DOUBLE = {"dtype": torch.float64}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 3, generator=generator, **DOUBLE), torch.randn(6, 2, generator=generator, **DOUBLE))] * 2


def theta_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def jacobian(model, x):
    """(N, K, P)."""
    names = [name for name, _ in model.named_parameters()]
    found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(dict(model.named_parameters()))
    return torch.cat([found[name].flatten(2) for name in names], 2).detach()


def dense(model, loader, prior, sigma, structure):
    """H at sigma = 1 and the log evidence of a regression, by the whole GGN."""
    rows = torch.cat([jacobian(model, x) for x, _ in loader]).flatten(0, 1)
    h = rows.T @ rows if structure == "full" else (rows.T @ rows).diagonal().diag()
    fit = sum(Normal(model(x).detach(), sigma).log_prob(y).sum() for x, y in loader)
    penalty = (prior * theta_of(model).square()).sum() + torch.logdet(h / sigma**2 + prior.diag()) - prior.log().sum()
    return h, fit - 0.5 * penalty


@pytest.mark.parametrize(("kind", "structure"), [(FullLaplace, "full"), (DiagLaplace, "diag")])
def test_a_precision_for_each_element(net, pairs, kind, structure):
    prior = torch.rand(26, generator=torch.Generator().manual_seed(2), **DOUBLE) + 0.1
    la = kind(net, "regression", prior_precision=prior, sigma_noise=0.5, prior_mean=0.0).fit(pairs)
    h, evidence = dense(net, pairs, prior, 0.5, structure)
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence)
    torch.testing.assert_close(la.posterior_covariance, torch.linalg.inv(4 * h + prior.diag()))
    torch.testing.assert_close(la.posterior_variance, la.posterior_covariance.diagonal())
    torch.testing.assert_close(la.scatter, (prior * theta_of(net).square()).sum())
    torch.testing.assert_close(la.log_det_prior_precision, prior.log().sum())
    torch.testing.assert_close(la.prior_precision_diag, prior)
    la.prior_mean = 1.0
    torch.testing.assert_close(la.scatter, (prior * (theta_of(net) - 1).square()).sum())
    other = kind(net, "regression")
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other.log_marginal_likelihood(), la.log_marginal_likelihood(), rtol=0, atol=0)
    leaf = prior.clone().requires_grad_()
    assert torch.autograd.gradcheck(la.log_marginal_likelihood, leaf)
    with pytest.raises(ValueError, match="mode takes a number or 4 values, one per parameter tensor, got 26"):
        la.fit_linear_mode(pairs)


def test_precisions_of_elements_are_learned(net, pairs):
    la = FullLaplace(net, "regression", sigma_noise=0.5).fit(pairs)
    la.optimize_prior_precision(n_steps=300, tune_sigma=False)
    by_tensor, tensors = la.log_marginal_likelihood(), la.prior_precision
    found = la.optimize_prior_precision(n_steps=300, prior_structure="diag", tune_sigma=False)
    _, evidence = dense(net, pairs, found, 0.5, "full")
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence)
    assert found.shape == (26,) and evidence > by_tensor + 1
    assert la.optimize_prior_precision(n_steps=1, tune_sigma=False).shape == tensors.shape
    with pytest.raises(ValueError, match="prior_structure='diag' has a precision for every element"):
        la.optimize_prior_precision("glm", "mackay", prior_structure="diag")
    with pytest.raises(ValueError, match=r"vector of 4 values.*got shape \(26,\)"):
        KronLaplace(net, "regression", prior_precision=torch.ones(26))


def test_a_subnetwork_has_precisions_of_its_elements(net, pairs):
    chosen = torch.tensor([1, 5, 20])
    la = SubnetLaplace(net, "regression", subnetwork_indices=chosen, prior_precision=torch.tensor([1.0, 2.0, 3.0]))
    la.fit(pairs)
    h, _ = dense(net, pairs, torch.ones(26, **DOUBLE), 1.0, "full")
    expected = h[chosen][:, chosen] + torch.tensor([1.0, 2.0, 3.0], **DOUBLE).diag()
    torch.testing.assert_close(la.posterior_covariance, torch.linalg.inv(expected))
    torch.testing.assert_close(la.scatter, (la.prior_precision * theta_of(net)[chosen].square()).sum())


def test_as_many_elements_as_tensors_have_precisions_of_tensors(net, pairs):
    la = SubnetLaplace(net, "regression", subnetwork_indices=torch.tensor([0, 1, 12, 24])).fit(pairs)
    la.prior_precision = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert la.counts == [2, 1, 0, 1] and la.prior_precision_diag.tolist() == [1, 1, 2, 4]
    with pytest.raises(ValueError, match=r"as many elements as the model has parameter tensors \(4\)"):
        la.optimize_prior_precision(prior_structure="diag")


@pytest.mark.parametrize("kind", CLASSES)
def test_before_a_fit_there_is_the_prior(net, kind):
    la = kind(net, prior_precision=0.3, prior_mean=0.5)
    value = torch.randn(5, 26, **DOUBLE)
    assert la.mean == 0.5
    torch.testing.assert_close(la.log_prob(value), Normal(0.5, math.sqrt(1 / 0.3)).log_prob(value).sum(1))
    part = SubnetLaplace(net, subnetwork_indices=torch.tensor([2, 25]), prior_precision=torch.tensor([0.1, 4.0]))
    expected = Normal(0.0, torch.tensor([0.1, 4.0], **DOUBLE).rsqrt()).log_prob(value[:, [2, 25]]).sum(1)
    torch.testing.assert_close(part.log_prob(value), expected)


def test_a_posterior_is_read_as_its_matrix(net, pairs):
    full, diagonal, kron = (
        kind(net, "regression", prior_precision=0.7).fit(pairs) for kind in CLASSES[1:] + CLASSES[:1]
    )
    matrix = dense(net, pairs, torch.ones(26, **DOUBLE), 1.0, "full")[0] + 0.7 * torch.eye(26, **DOUBLE)
    assert torch.allclose(full.posterior_precision, matrix) and full.posterior_precision.shape == (26, 26)
    assert torch.allclose(diagonal.posterior_precision.clone(), matrix.diagonal())
    assert copy.deepcopy(diagonal.posterior_precision).shape == (26,)
    value = torch.randn(26, **DOUBLE)
    expected = MultivariateNormal(full.mean, precision_matrix=full.posterior_precision).log_prob(value)
    torch.testing.assert_close(full.log_prob(value), expected)
    with pytest.raises(AttributeError, match="nothing"):
        _ = full.posterior_precision.nothing
    torch.testing.assert_close(kron.H.to_matrix() + 0.7 * torch.eye(26, **DOUBLE), kron.posterior_precision.to_matrix())
    loss = sum(0.5 * (net(x) - y).square().sum() for x, y in pairs)
    for la in (full, diagonal, kron):
        torch.testing.assert_close(la.loss, loss.detach())


def test_the_evidence_sets_its_arguments(net, pairs):
    la = KronLaplace(net, "regression").fit(pairs)
    precision, sigma = torch.tensor(2.0, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    la.log_marginal_likelihood(precision, sigma).backward()
    assert (la.prior_precision == 2).all() and la.sigma_noise == sigma.double() and precision.grad and sigma.grad
    with pytest.raises(ValueError, match="sigma_noise"):
        la.log_marginal_likelihood(5.0, -1.0)
    assert (la.prior_precision == 2).all()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "how",
    [{}, {"joint": True}, {"diagonal_output": True}, {"pred_type": "nn", "link_approx": "mc", "n_samples": 3}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:pred_type='nn'")
def test_predictions_have_gradients_at_inputs(net, pairs, kind, how):
    state = torch.get_rng_state()

    def predict(la, x):
        torch.set_rng_state(state)
        return la(x, **how)

    plain, la = (kind(net, "regression", enable_backprop=b).fit(pairs) for b in (False, True))
    x = torch.randn(2, 3, **DOUBLE, requires_grad=True)
    for found, expected in zip(predict(la, x), predict(plain, x), strict=True):
        torch.testing.assert_close(found, expected.detach(), check_stride=False)
        assert not expected.requires_grad
    assert torch.autograd.gradcheck(lambda x: predict(la, x), x)
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_probabilities_have_gradients_at_inputs(net, link):
    la = KronLaplace(net, enable_backprop=True).fit([(torch.randn(8, 3, **DOUBLE), torch.randint(2, (8,)))])
    x = torch.randn(2, 3, **DOUBLE, requires_grad=True)

    def predict(x):
        return la(x, link_approx=link, n_samples=5, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(predict(x), predict(x.detach()), check_stride=False)
    assert torch.autograd.gradcheck(predict, x)


class Rewards(nn.Module):
    """A reward of each input, of pairs two."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x):
        return self.net(x.reshape(-1, 3)).reshape(len(x), 2) if x.dim() == 3 else self.net(x)


@pytest.mark.parametrize("kind", CLASSES)
def test_rewards_are_fitted_to_pairs_and_predicted_alone(kind):
    model, x, y = Rewards(), torch.randn(9, 2, 3, **DOUBLE), torch.randint(2, (9,))
    la, same = kind(model, "reward_modeling").fit([(x, y)]), kind(model).fit([(x, y)])
    torch.testing.assert_close(la.log_marginal_likelihood(), same.log_marginal_likelihood())
    alone = torch.randn(4, 3, **DOUBLE)
    mean, covariance = la(alone)
    rows = jacobian(model, alone)
    torch.testing.assert_close(mean, model(alone).detach())
    expected = rows @ same.posterior_precision.to_matrix(-1) @ rows.mT
    torch.testing.assert_close(covariance, expected)
    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], grid_size=3)
    best = la.prior_precision[0]
    losses = {}
    for precision in (1e-4, 1.0, 1e4):
        la.prior_precision = precision
        f, v = la(x, diagonal_output=True)
        p = torch.softmax(f / (1 + math.pi / 8 * v).sqrt(), 1)
        losses[precision] = -p[torch.arange(9), y].log().sum().item()
    assert best.item() == pytest.approx(min(losses, key=losses.get))


def test_another_likelihood_waits_for_a_fit(net, pairs):
    la = FullLaplace(net, "regression", sigma_noise=0.3).fit(pairs)
    x, seed = pairs[0][0], lambda: torch.Generator().manual_seed(0)
    before = la.functional_samples(x, generator=seed())
    la.likelihood = "classification"
    torch.testing.assert_close(la.functional_samples(x, generator=seed()), before, rtol=0, atol=0)
    assert la.likelihood == "classification"
    with pytest.raises(RuntimeError, match="was regression at the fit and is classification; call fit again"):
        la.log_marginal_likelihood()
    labels = [(x, y.argmax(1)) for x, y in pairs]
    for refused in (
        la.optimize_prior_precision,
        lambda: la.optimize_prior_precision(method="loo"),
        lambda: la.fit_linear_mode(pairs),
        lambda: la.leave_one_out(labels),
        lambda: la.calibrate(labels),
        lambda: la.calibrate(folds=[(la, labels)]),
    ):
        with pytest.raises(RuntimeError, match="call fit again"):
            refused()
    with pytest.raises(ValueError, match="sigma_noise belongs to likelihood='regression'"):
        la.fit(labels)
    la.sigma_noise = 1.0
    with pytest.raises(ValueError, match="the likelihood was changed since the fit"):
        la.fit(labels, override=False)
    expected = FullLaplace(net).fit(labels).log_marginal_likelihood()
    torch.testing.assert_close(la.fit(labels).log_marginal_likelihood(), expected)
    with pytest.raises(ValueError, match="likelihood must be one of"):
        la.likelihood = "other"
    assert la.likelihood == "classification"


class OfMapping(nn.Module):
    """What laplace-torch's users write around a network of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, data):
        mask = data["attention_mask"][..., None]
        return self.head((self.table(data["input_ids"]) * mask).sum(1) / mask.sum(1))


class ByName(OfMapping):
    def forward(self, input_ids, attention_mask):
        return super().forward({"input_ids": input_ids, "attention_mask": attention_mask})


def test_a_model_of_one_argument_gets_the_mapping():
    torch.manual_seed(0)
    of_mapping, by_name = OfMapping(), ByName()
    by_name.load_state_dict(of_mapping.state_dict())
    x = {"input_ids": torch.randint(7, (6, 5)), "attention_mask": torch.ones(6, 5)}
    batch = {**x, "labels": torch.randint(3, (6,))}
    found, expected = (KronLaplace(m).fit([batch]) for m in (of_mapping, by_name))
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood())
    torch.testing.assert_close(found(batch), expected(x))


class Adapted(nn.Module):
    """A frozen layer beside which a product of two small ones is trained."""

    def __init__(self, inputs, outputs, base):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).to(base).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        x = x.to(self.base.weight.dtype)
        return self.base(x) + self.b(self.a(x.float())).to(x.dtype)


class OnFrozen(nn.Module):
    """A frozen layer in reduced precision below a head; ``how`` the two fit together."""

    def __init__(self, how, base):
        super().__init__()
        self.how, adapts = how, how == "adapters"
        self.base = Adapted(5, 8, base) if adapts else nn.Linear(5, 8).to(base).requires_grad_(False)
        self.head = Adapted(8, 3, base) if adapts else nn.Linear(8, 3)

    def forward(self, x):
        if self.how == "adapters":
            return self.head(torch.tanh(self.base(x))).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.how == "autocast"):
            features = torch.tanh(self.base(x if self.how == "nothing" else x.to(self.base.weight.dtype)))
            return self.head(features.float() if self.how == "casts" else features)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("how", ["casts", "autocast", "adapters"])
def test_a_frozen_base_in_bfloat16_is_served(kind, how):
    x, y = torch.randn(20, 5), torch.randint(3, (20,))
    torch.manual_seed(0)
    model = OnFrozen(how, torch.bfloat16)
    wide = copy.deepcopy(model).float()
    wide.how = "adapters" if how == "adapters" else "casts"
    found, expected = (kind(m).fit([(x, y)]) for m in (model, wide))
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=0.02, atol=0)
    torch.testing.assert_close(found(x).float(), expected(x), rtol=0, atol=0.02)
    samples = (
        la.functional_samples(x, n_samples=3, generator=torch.Generator().manual_seed(0)) for la in (found, expected)
    )
    torch.testing.assert_close(*(s.float() for s in samples), rtol=0.05, atol=0.1)
    if how == "casts":  # the head alone at the base's features
        features = torch.tanh(model.base(x.bfloat16())).float()
        alone = kind(copy.deepcopy(model.head).double()).fit([(features.double(), y)])
        torch.testing.assert_close(found.log_marginal_likelihood(), alone.log_marginal_likelihood(), rtol=1e-5, atol=0)
    with torch.autocast("cpu", torch.bfloat16):  # of the caller
        again = kind(model).fit([(x, y)])
    torch.testing.assert_close(again.log_marginal_likelihood(), found.log_marginal_likelihood(), rtol=0, atol=0)


def test_parameters_of_two_dtypes_without_a_cast_are_told_where_autocast_belongs():
    la = KronLaplace(OnFrozen("nothing", torch.bfloat16))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"torch\.bfloat16, torch\.float32.*inside of forward"),
    ):
        la.fit([(torch.randn(4, 5), torch.randint(3, (4,)))])


class Strange(nn.Module):
    """A parameter that no rule knows below a linear head, of whose positions the last is the output."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Parameter(torch.randn(3, 4, **DOUBLE)), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(torch.tanh(x @ self.mix))[:, -1]


@pytest.mark.parametrize("subset", ["last_layer", ["head"]])
def test_layers_outside_of_the_subset_need_no_rule(subset):
    model, x, y = Strange(), torch.randn(7, 2, 3, **DOUBLE), torch.randint(3, (7,))
    la = FullLaplace(model, subset_of_weights=subset).fit([(x, y)])
    features = torch.tanh(x @ model.mix)[:, -1].detach()
    expected = FullLaplace(model.head).fit([(features, y)])
    torch.testing.assert_close(la.H, expected.H)
    torch.testing.assert_close(la(x), expected(features))
    assert KronLaplace(model, subset_of_weights=subset).fit([(x, y)]).parameter_names == ["head.weight", "head.bias"]
    for wrong in ("all", ["mix"], ["mix", "head"]):
        with pytest.raises(TypeError, match="no curvature rule"):
            KronLaplace(model, subset_of_weights=wrong)


def test_the_last_layer_is_gpt_2_s():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16, "pad_token_id": 0}
    torch.manual_seed(0)
    net = transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(**sizes, num_labels=3, bos_token_id=1, eos_token_id=1)
    )

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net.double().eval()

        def forward(self, data):
            return self.net(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits

    model = Logits()
    ids = torch.randint(1, 11, (6, 5))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(3, (6,))}
    la = FullLaplace(model, subset_of_weights="last_layer").fit([batch])
    assert la.parameter_names == ["net.score.weight"]
    assert KronLaplace(model, subset_of_weights="last_layer").fit([batch]).parameter_names == la.parameter_names
    hidden = net.transformer(ids).last_hidden_state[:, -1].detach()
    expected = FullLaplace(net.score).fit([(hidden, batch["labels"])])
    torch.testing.assert_close(la.H, expected.H)
    torch.testing.assert_close(la(batch), expected(hidden))

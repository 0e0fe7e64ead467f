"""Likelihoods: log probability of the targets, and square roots of their Hessian in the network's outputs."""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ella_cuda.laplace.parameters import check_choice
from ella_cuda.nn._autocast import full

LINKS = ("probit", "probit_full", "mc", "bridge", "bridge_norm")
NOTHING = 100.0  # times the resolution, of the largest variance: less is rounding
DIAGONAL = ("probit",)  # those that read nothing but variances


def softmax_probabilities(link: str, mean: Tensor, covariance: Tensor) -> Tensor:
    """Approximations ``(..., K)`` of the softmax's mean under ``N(mean, covariance)``.

    Args:
        link: "probit" scales each logit by its variance; "probit_full" compares every pair of logits by the variance of their difference,
            so that nothing depends on what is added to all of them; "bridge" is a Dirichlet's mean, "bridge_norm" with its correction of
            large variances. A Dirichlet needs a variance of every logit, given that logits sum to zero; where one is none beyond rounding,
            a data point gets "probit_full", of which a warning tells.
        mean: ``(..., K)``. Classes at minus infinity are masked: they have probability 0, and the link is that of the others.
        covariance: ``(..., K, K)``, or variances ``(..., K)`` for "probit".

    Source: MacKay, "The evidence framework applied to classification networks", 1992 (probit); Hobbhahn, Kristiadi and Hennig, "Fast
    predictive uncertainty for classification with Bayesian deep networks", UAI 2022 (bridge).
    """
    if link == "probit":
        return torch.softmax(mean * _shrink(covariance), -1)
    if link == "probit_full":
        return _pairwise(mean, covariance)
    return _bridge(mean, covariance, link == "bridge_norm")


def sigmoid_probabilities(link: str, mean: Tensor, variance: Tensor) -> Tensor:
    """The sigmoid's mean under independent Gaussians, by the probit approximation; ValueError where the link is a Dirichlet's."""
    check_choice("link_approx with likelihood='binary'", link, ("probit", "probit_full", "mc"))
    return torch.sigmoid(mean * _shrink(variance))


def _shrink(variance: Tensor) -> Tensor:
    return 1 / (1 + math.pi / 8 * variance).sqrt()


def _pairwise(mean: Tensor, covariance: Tensor) -> Tensor:
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    of_differences = (variances[..., :, None] + variances[..., None, :] - 2 * covariance).clamp(min=0)
    differences = mean[..., None, :] - mean[..., :, None]  # of the others to each
    differences = differences.masked_fill((mean == -math.inf)[..., :, None], math.inf)  # of two masked ones it is nan
    return torch.softmax(-torch.logsumexp(differences * _shrink(of_differences), -1), -1)


def _bridge(mean: Tensor, covariance: Tensor, normalised: bool) -> Tensor:
    given, there = mean, mean > -math.inf
    classes = there.sum(-1, keepdim=True)
    mean = mean.masked_fill(~there, 0.0)
    among = covariance * there[..., :, None] * there[..., None, :]
    rows = among.sum(-1)
    whole = rows.sum(-1, keepdim=True)
    # Condition on logits that sum to zero.
    mean = mean - rows * mean.sum(-1, keepdim=True) / whole
    variances = among.diagonal(dim1=-2, dim2=-1)
    largest = variances.amax(-1, keepdim=True)
    variances = variances - rows.square() / whole
    none = ~((variances > NOTHING * torch.finfo(mean.dtype).eps * largest) | ~there).all(-1)
    told = int((none & (classes[..., 0] > 1)).sum())  # one class alone is certain
    if told:
        warnings.warn(
            f"link_approx: {told} of {none.numel()} predictions have logits without a variance of their own, which a Dirichlet "
            "needs; these are probit_full's.",
            stacklevel=2,
        )
    variances = variances.masked_fill(none[..., None], 1.0)
    mean = mean.masked_fill(none[..., None], 0.0)
    found = _dirichlet(mean, variances, there, classes.clamp(min=2).to(mean.dtype), normalised)
    return torch.where(none[..., None], _pairwise(given, covariance), found) if none.any() else found


def _dirichlet(mean: Tensor, variances: Tensor, there: Tensor, classes: Tensor, normalised: bool) -> Tensor:
    """The Dirichlet's mean, of logits that sum to zero over the ``classes`` (..., 1) that are ``there``."""
    if normalised:
        size = (variances * there).sum(-1, keepdim=True) / classes / (classes / 2).sqrt()
        mean, variances = mean / size.sqrt(), variances / size
    # The Dirichlet's parameters are (1 - 2 / K + e^z / K^2) / variance; as logarithms, large logits do not overflow.
    z = mean + torch.logsumexp((-mean).masked_fill(~there, -math.inf), -1, keepdim=True)
    logits = torch.logaddexp((1 - 2 / classes).log(), z - 2 * classes.log()) - variances.log()
    return torch.softmax(logits.masked_fill(~there, -math.inf), -1)


SMALLEST_PROBABILITY = 1e-12  # whose logarithm stands for that of zero
IGNORED = -100  # torch's own default
SIGNED_BYTES = 16 << 20  # of columns that are built at once where they are summed with random signs


class Columns:
    """S, ``(columns, *outputs.shape)``, as slices that ``build(begin, end)`` computes when they are asked for: of K outputs all of it has
    ``N K^2`` numbers. ``bytes_each`` is what building one takes at the most, temporaries included."""

    def __init__(self, count: int, build: Callable[[int, int], Tensor], bytes_each: int) -> None:
        self._count, self._build, self.bytes_each = count, build, bytes_each

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> Tensor:
        begin, end, _ = part.indices(self._count)
        return self._build(begin, max(begin, end))


def unit_columns(outputs: Tensor) -> Columns:
    """Unit vectors, one for each entry of a data point's outputs, whose vector-Jacobian product is the gradient of the entry."""
    entries = math.prod(outputs.shape[1:])

    def build(begin: int, end: int) -> Tensor:
        places = torch.arange(entries, device=outputs.device)
        units = (places[begin:end, None] == places).to(outputs.dtype).view(-1, 1, *outputs.shape[1:])
        return units.expand(-1, *outputs.shape)

    return Columns(entries, build, outputs.element_size() * entries)


def by_position(mean: Tensor, covariance: Tensor) -> Tensor:
    """The covariance ``(N, E, E)`` or variance ``(N, E)`` of flattened outputs as ``(N, ..., K, K)`` or ``(N, ..., K)``."""
    if covariance.dim() == 2:
        return covariance.view_as(mean)
    classes, positions = mean.shape[-1], math.prod(mean.shape[1:-1])
    blocks = covariance.view(len(mean), positions, classes, positions, classes).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 1).reshape(*mean.shape, classes)


def gaussian_outputs(
    mean: Tensor, covariance: Tensor, n_samples: int, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Samples of Gaussian outputs, ``(N, ..., K)`` each, from covariances ``(N, ..., K, K)``, singular ones too, float64."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    where = mean.device if generator is None else generator.device
    for _ in range(n_samples):
        drawn = torch.randn(mean.shape, dtype=mean.dtype, device=where, generator=generator).to(mean.device)
        yield mean + (root @ drawn[..., None])[..., 0]


def bytes_each(columns: Columns | Tensor) -> int:
    """The bytes that a further column takes until it is there: none where all are."""
    return columns.bytes_each if isinstance(columns, Columns) else 0


class Likelihood(ABC):
    """p(y | f) of targets y given a network's outputs f, ``(N, ...)``: what fits and training need to know.

    Subclass it, decorate it with :func:`register_likelihood`, and define :meth:`check`, :meth:`log_prob` and :meth:`columns`. Where the
    outputs' entries are independent of each other, subclass :class:`IndependentLikelihood`, which needs a second derivative instead of
    columns. Keep a constructor's arguments under their names: they say whether a saved approximation is of the same likelihood.

    Attributes:
        name: that it is registered under.
        has_noise: whether ``sigma_noise`` scales it: :meth:`log_prob` is then at sigma = 1 without normaliser, :meth:`log_likelihood` is
            complete, and the Hessian at sigma is that of :meth:`columns` over sigma^2.
        has_classes: whether :meth:`hits` counts predictions that are right, and predictions are :meth:`probabilities`.
        couples_outputs: whether :meth:`probabilities`, or :meth:`log_predictive` where there are no classes, may take the covariances of a
            data point's outputs.
    """

    name: ClassVar[str] = ""
    has_noise: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False
    couples_outputs: ClassVar[bool] = False

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise TypeError or ValueError where outputs and targets do not fit the likelihood."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y | f)`` in parts: a tensor of any shape whose sum is that of the batch."""

    @abstractmethod
    def columns(self, outputs: Tensor, targets: Tensor, tolerance: float = 0.0) -> Columns | Tensor:
        """S, ``(columns, *outputs.shape)``, with ``sum_k S[k,n] S[k,n]^T`` the Hessian of ``-log p`` in ``f_n``, up to columns whose share
        of the batch's total trace is at most ``tolerance``."""

    def sampled_column(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns | Tensor:
        """One random column, ``(1, *outputs.shape)``, whose outer product is the Hessian on average: here the sum of all columns with
        random signs."""
        columns, total = self.columns(outputs, targets), torch.zeros_like(outputs)
        step = max(1, SIGNED_BYTES // max(1, bytes_each(columns)))
        for begin in range(0, len(columns), step):
            part = columns[begin : begin + step]
            signs = 2 * torch.randint(2, part.shape[:2], device=_device(part, generator), generator=generator) - 1
            total += (part * signs.to(part).view(*signs.shape, *[1] * (part.dim() - 2))).sum(0)
        return total[None]

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """That of ``-log p`` in the outputs, of their shape, float64: of large outputs a softmax' small losses are differences."""
        with torch.enable_grad():
            wide = outputs.detach().double().requires_grad_()
            (slope,) = torch.autograd.grad(-self.log_prob(wide, targets).sum(), wide)
        return slope

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over the batch that :meth:`log_likelihood` is a function of, 0-dim float64."""
        return self.log_prob(outputs.double(), targets).sum()

    def log_likelihood(self, statistic: Tensor, count: int, sigma_noise: Tensor) -> Tensor:
        """``sum_n log p(y_n | f_n)`` from the sum of the statistics; ``count`` is the number of targets' entries."""
        return statistic

    def loss(self, outputs: Tensor, targets: Tensor, variance: Tensor) -> Tensor:
        """The loss of a training step, 0-dim: the mean of ``-log p(y_n | f_n)`` over the data points, up to what does not depend on
        the outputs. ``variance`` is sigma^2, 0-dim, for a likelihood with noise."""
        total = -self.log_prob(full(outputs), targets).sum()
        total = total / variance if self.has_noise else total
        # A tensor's division is exact on every device, which a number's is not.
        return total / torch.full_like(total, len(targets))

    def response(self, outputs: Tensor) -> Tensor:
        """The response at outputs ``(..., K)``, of the same shape, such as probabilities: here the outputs themselves."""
        return outputs

    def probabilities(self, link: str, mean: Tensor, covariance: Tensor) -> Tensor:
        """The mean of :meth:`response` under a Gaussian over outputs, ``(N, ..., K)``, of a likelihood with classes, by one of :data:`LINKS`
        but "mc". The covariance is ``(N, ..., K, K)``, or variances ``(N, ..., K)`` for a link that takes no others, and where outputs are
        not coupled."""
        raise NotImplementedError(f"{type(self).__name__} must define probabilities, as it has classes.")

    def log_predictive(self, predictions: Any, targets: Tensor, sigma_noise: Tensor, n_samples: int = 100) -> Tensor:
        """Log densities of targets under predictions, float64, ``(N, ...)``, whose sum is that of the batch: under mean and variance of the
        outputs, ``(N, ..., K)`` each, or probabilities of a likelihood with classes. Where outputs are coupled without classes, the variance
        may be the covariance ``(N, E, E)`` of the E entries of a data point's outputs. Here by ``n_samples`` draws of independent outputs."""
        mean, variance = (part.double() for part in predictions)
        generator, kind = torch.Generator("cpu").manual_seed(0), {"dtype": torch.float64, "device": "cpu"}
        drawn = torch.randn(n_samples, *mean.shape, generator=generator, **kind).to(mean.device)
        outputs = (self.at_normal(mean, variance, one) for one in drawn)
        each = [self.log_prob(f, targets).reshape(len(targets), -1).sum(1) for f in outputs]
        return torch.logsumexp(torch.stack(each), 0) - math.log(n_samples)

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Of targets with these probabilities, ``(N, ..., K)``: parts, ``(N, ...)``, nats."""
        raise NotImplementedError(
            f"{type(self).__name__} must define entropy for uncertainties; those of its targets are not known."
        )

    def uncertainty(
        self, mean: Tensor, covariance: Tensor, sigma_noise: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The entropy of the predictive under Gaussian outputs, and what of it stays when the outputs are known: the sum over a data point's
        targets, ``(N,)`` each, nats, float64. Here by samples, of a likelihood with classes.

        Args:
            mean: ``(N, ...)``, float64. covariance: ``(N, E, E)`` of a data point's E outputs.
        """
        if not self.has_classes:
            raise NotImplementedError(
                f"{type(self).__name__} must define uncertainty, whose closed form is not known without classes."
            )
        total, alone = torch.zeros_like(mean), mean.new_zeros(len(mean))
        for sample in gaussian_outputs(mean, by_position(mean, covariance), n_samples, generator):
            probabilities = self.response(sample)
            total += probabilities
            alone += self.entropy(probabilities).flatten(1).sum(1)
        return self.entropy(total / n_samples).flatten(1).sum(1), alone / n_samples

    def at_normal(self, mean: Tensor, variance: Tensor, numbers: Tensor) -> Tensor:
        """Independent Gaussian outputs at standard normal numbers; of a likelihood that not all outputs are admitted by, the Gaussian of
        those that are."""
        return mean + variance.sqrt() * numbers

    def admitted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets of a right shape with values that :meth:`loss` takes in the place of those that it does not, and whether there were none
        of these, 0-dim bool. Work for the device alone, as a CUDA graph needs it: nothing is raised or read back."""
        return targets, torch.ones((), dtype=torch.bool, device=targets.device)

    def hits(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The number of targets that are predicted right, and the number of targets, 0-dim each."""
        raise NotImplementedError(f"{type(self).__name__} has has_classes = True and must define hits.")

    def __repr__(self) -> str:
        """The name, with what the constructor got where that is not its default."""
        defaults = {name: repr(p.default) for name, p in inspect.signature(type(self)).parameters.items()}
        public = {name: repr(value) for name, value in sorted(vars(self).items()) if not name.startswith("_")}
        own = [f"{name}={word}" for name, word in public.items() if defaults.get(name) != word]
        return f"{self.name}({', '.join(own)})" if own else self.name


LikelihoodType = TypeVar("LikelihoodType", bound=type[Likelihood])
LIKELIHOODS: dict[str, type[Likelihood]] = {}


def register_likelihood(name: str) -> Callable[[LikelihoodType], LikelihoodType]:
    """Class decorator: a name for the decorated :class:`Likelihood`, by which ``KronLaplace(likelihood=...)`` and saved states know it. The
    same class, defined anew, replaces what was registered.

    Example::

        @ella_cuda.laplace.register_likelihood("exponential")
        class Exponential(ella_cuda.laplace.IndependentLikelihood):  # of waiting times; outputs are log rates
            def log_prob(self, outputs, targets):
                return outputs - outputs.exp() * targets

            def second_derivative(self, outputs, targets):
                return outputs.exp() * targets

    Raises:
        TypeError: ``name`` is no name, or the decorated class no Likelihood. ValueError: ``name`` is the name of another class.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'register_likelihood: expected a name, got {name!r}; write @register_likelihood("name").')

    def decorate(likelihood: LikelihoodType) -> LikelihoodType:
        if not (isinstance(likelihood, type) and issubclass(likelihood, Likelihood)):
            raise TypeError(
                f"register_likelihood({name!r}): expected a subclass of ella_cuda.laplace.Likelihood, got {likelihood!r}."
            )
        taken = LIKELIHOODS.get(name, likelihood)
        if (taken.__module__, taken.__qualname__) != (likelihood.__module__, likelihood.__qualname__):
            raise ValueError(
                f"register_likelihood: {name!r} is the name of {taken.__module__}.{taken.__qualname__}; choose another."
            )
        likelihood.name = name
        LIKELIHOODS[name] = likelihood
        return likelihood

    return decorate


def likelihood_of(given: str | Likelihood, ignore_index: int = IGNORED, where: str = "") -> Likelihood:
    """The likelihood of a registered name, whose constructor gets ``ignore_index`` if it takes that, or the given object of a registered
    class; TypeError and ValueError, which begin with ``where``, of others."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral):
        raise TypeError(f"{where}ignore_index must be an integer, got {ignore_index!r}.")
    if isinstance(given, type) and issubclass(given, Likelihood):
        raise TypeError(f"{where}likelihood must be a name or an object, got the class; pass {given.__name__}(...).")
    if isinstance(given, Likelihood):
        made, kind = given, type(given)
        if LIKELIHOODS.get(kind.name) is not kind:
            raise TypeError(
                f"{where}likelihood: the class {kind.__name__} is not registered; decorate it with "
                '@ella_cuda.laplace.register_likelihood("name").'
            )
    else:
        kind = LIKELIHOODS[check_choice(f"{where}likelihood", given, tuple(LIKELIHOODS))]
        made = kind(ignore_index=int(ignore_index)) if "ignore_index" in inspect.signature(kind).parameters else kind()
    if ignore_index not in (IGNORED, getattr(made, "ignore_index", IGNORED)):
        raise ValueError(
            f"{where}ignore_index belongs to likelihood='classification', got {ignore_index} for {made!r}; leave it out."
        )
    return made


@register_likelihood("classification")
class Classification(Likelihood):
    """Softmax over K classes, the outputs' last axis: outputs ``(N, ..., K)``, targets ``(N, ...)`` integers in 0..K-1. Positions with the
    label ``ignore_index`` have no part in the likelihood and its Hessian."""

    has_classes = True
    couples_outputs = True

    def __init__(self, ignore_index: int = IGNORED) -> None:
        self.ignore_index = operator.index(ignore_index)  # numpy's integers print as such

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        expected, classes = outputs.shape[:-1], outputs.shape[-1]
        if outputs.dim() > 2 and targets.shape == (len(outputs), *outputs.shape[2:]) != expected:
            raise ValueError(
                f"likelihood='classification' takes outputs with the classes last, (N, ..., K), got {tuple(outputs.shape)} for targets "
                f"{tuple(targets.shape)}: return outputs.movedim(1, -1)."
            )
        if classes < 2:
            raise ValueError(
                f"likelihood='classification' needs at least 2 outputs (logits), got {classes}; of one use likelihood='binary'."
            )
        if targets.shape != expected:
            axis = len(expected)
            one_hot = f"; of one-hot labels pass y.argmax({axis})" if targets.shape == outputs.shape else ""
            remedy = f"; pass y.squeeze({axis})" if targets.shape == (*expected, 1) else one_hot
            raise ValueError(
                f"targets: expected class indices of shape {tuple(expected)}, got shape {tuple(targets.shape)}{remedy}."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(
                f"targets: expected integer class indices, got dtype {targets.dtype}; of real targets use likelihood='regression'."
            )
        labels = targets.long().masked_fill(~self._counted(targets), 0)
        # The smallest and the largest: one wait for the device.
        low, high = torch.stack(torch.aminmax(labels)).tolist() if labels.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise ValueError(
                f"targets: labels must lie in 0..{classes - 1} or be ignore_index = {self.ignore_index}, got {low}..{high}."
            )

    def _counted(self, targets: Tensor) -> Tensor:
        """A mask of the labels that count, of the targets' shape."""
        return targets.long() != self.ignore_index

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, labels = outputs.flatten(0, -2), targets.long().flatten()
        return -F.cross_entropy(rows, labels, reduction="sum", ignore_index=self.ignore_index)

    def admitted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        labels, counted = targets.long(), self._counted(targets)
        inside = torch.where(counted, labels.clamp(0, outputs.shape[-1] - 1), labels)
        return inside, (inside == labels).all()

    def hits(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        right, counted = outputs.argmax(-1) == targets, self._counted(targets)
        if self.ignore_index >= 0:  # it may be predicted
            right = right & counted
        return right.sum(), counted.sum()

    def columns(self, outputs: Tensor, targets: Tensor, tolerance: float = 0.0) -> Columns:
        """The K-1 columns of each position's Cholesky factor of ``diag(p) - p p^T``, its classes sorted from likely to unlikely.

        With tails ``s_j = p_j + ... + p_{K-1}``: ``L[j,j] = sqrt(p_j s_{j+1} / s_j)`` and ``L[i,j] = -p_i sqrt(p_j /
        (s_j s_{j+1}))`` below. In logarithms nothing underflows to 0/0, however certain the prediction. After j columns
        a trace below s_j is left, so that a network which is sure among a few classes needs a few columns. With several positions
        each data point's columns come from large to small, so that one with few labels has few.
        """
        n, k = len(outputs), outputs.shape[-1]
        # (N, T, K), T positions
        log_p = F.log_softmax((outputs[:, None] if outputs.dim() == 2 else outputs.flatten(1, -2)).double(), -1)
        positions = log_p.shape[1]
        in_order, order = log_p.sort(-1, descending=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(k, device=order.device).expand_as(order))
        tails, square_tails = (x.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:] for x in (in_order, 2 * in_order))
        here = torch.cat([in_order.logsumexp(-1, keepdim=True), tails[..., :-1]], -1)
        p_j = in_order[..., :-1]
        # Where only classes of probability exactly 0 are left (logits of -inf), the formulas are inf - inf; the column is 0.
        nothing = tails.isneginf() | ~self._counted(targets).reshape(n, positions, 1)
        below = (0.5 * (p_j - here - tails)).masked_fill(nothing, -torch.inf)  # log of L[i,j] / -p_i, (N, T, K-1)
        diagonal = (0.5 * (p_j + tails - here)).masked_fill(nothing, -torch.inf).exp()
        traces = diagonal.square() + (square_tails + 2 * below).masked_fill(nothing, -torch.inf).exp()
        traces = traces.flatten(1)  # (N, T (K-1))
        if positions == 1:
            needed = _needed(traces, tolerance) if tolerance else k - 1
            chosen = torch.arange(needed, device=traces.device).expand(n, -1)
        else:
            chosen = _largest_first(traces, tolerance)

        def build(begin: int, end: int) -> Tensor:
            picks, images = chosen[:, begin:end].T, torch.arange(n, device=rank.device)
            position, place = picks // (k - 1), picks % (k - 1)  # (columns, N)
            columns, ranks = log_p[images, position], rank[images, position]
            factor, top, likely = (t[images, position, place] for t in (below, diagonal, order))
            columns = -(columns + factor[..., None]).exp()  # (columns, N, K)
            columns = columns.masked_fill(ranks <= place[..., None], 0.0)
            columns = columns.scatter(2, likely[..., None], top[..., None]).to(outputs.dtype)
            whole, where = columns.new_zeros(len(columns), n, positions, k), position[..., None, None]
            return whole.scatter(2, where.expand(-1, -1, 1, k), columns[:, :, None]).view(len(columns), *outputs.shape)

        # Copies of what is gathered.
        return Columns(chosen.shape[1], build, 6 * 8 * n * k + outputs.element_size() * outputs.numel())

    def response(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs, -1)

    def probabilities(self, link: str, mean: Tensor, covariance: Tensor) -> Tensor:
        return softmax_probabilities(link, mean, covariance)

    def entropy(self, probabilities: Tensor) -> Tensor:
        return torch.special.entr(probabilities).sum(-1, keepdim=True)

    def log_predictive(self, predictions: Any, targets: Tensor, sigma_noise: Tensor, n_samples: int = 100) -> Tensor:
        counted = self._counted(targets)
        places = targets.long().masked_fill(~counted, 0)[..., None]
        found = predictions.double().clamp(min=SMALLEST_PROBABILITY).log().gather(-1, places)[..., 0]
        return found.masked_fill(~counted, 0)

    def sampled_column(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Tensor:
        p = torch.softmax(outputs.flatten(0, -2), 1)
        # As torch.multinomial does for one draw, which reads back whether p is a distribution.
        rates = torch.empty(p.shape, dtype=p.dtype, device=_device(p, generator)).exponential_(generator=generator)
        drawn = (p / rates.to(p.device)).argmax(1, keepdim=True)
        column = p.scatter_add(1, drawn, p.new_full((), -1.0).expand(drawn.shape)).view(outputs.shape)
        return column.masked_fill(~self._counted(targets)[..., None], 0.0)[None]


@register_likelihood("reward_modeling")
class RewardModeling(Classification):
    """Preferences between two rewards, as Bradley and Terry's: in a fit outputs are ``(N, 2)`` for pairs of data points, and targets
    ``(N,)`` the index of the better one. Predictions are of rewards: mean and covariance of the outputs, ``(N, 1)`` of single data points.

    Source: laplace-torch, likelihood "reward_modeling"; Bradley and Terry, "Rank analysis of incomplete block designs", 1952.
    """

    has_classes = False
    couples_outputs = False

    def response(self, outputs: Tensor) -> Tensor:
        return outputs

    def log_predictive(self, predictions: Any, targets: Tensor, sigma_noise: Tensor, n_samples: int = 100) -> Tensor:
        mean, variance = (part.double() for part in predictions)
        return super().log_predictive(softmax_probabilities("probit", mean, variance), targets, sigma_noise)


class IndependentLikelihood(Likelihood):
    """Outputs' entries that are independent of each other: outputs of any shape ``(N, ...)``, a target for each. Subclass it, decorate it
    with :func:`register_likelihood`, and define :meth:`log_prob` and :meth:`second_derivative`; :meth:`check` looks at the targets' shape."""

    @abstractmethod
    def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The second derivative of ``-log p`` in every entry of the outputs, of their shape; zero where it is negative."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.shape != outputs.shape:
            remedy = "; pass y[:, None]" if outputs.shape == (*targets.shape, 1) else ""
            raise ValueError(
                f"targets: expected the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}{remedy}."
            )

    def _root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.second_derivative(outputs.double(), targets).sqrt()

    def columns(self, outputs: Tensor, targets: Tensor, tolerance: float = 0.0) -> Columns:
        """One for each entry of a data point's outputs; with a tolerance from large to small."""
        root = self._root(outputs, targets).flatten(1)
        return _sparse(outputs, root[..., None], torch.arange(root.shape[1], device=root.device)[:, None], tolerance)

    def sampled_column(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Tensor:
        where = {"dtype": outputs.dtype, "device": _device(outputs, generator)}
        drawn = torch.randn(outputs.shape, generator=generator, **where).to(outputs.device)
        return (drawn * self._root(outputs, targets).to(outputs.dtype))[None]


@register_likelihood("regression")
class Regression(IndependentLikelihood):
    """Gaussian with standard deviation sigma on every output; targets real, of the outputs' shape. Curvature is kept at sigma = 1, so that
    the evidence is differentiable in sigma."""

    has_noise = True
    couples_outputs = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        super().check(outputs, targets)
        _require_real(targets, self.name)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -0.5 * (outputs - targets.to(outputs.dtype)).square()

    def log_likelihood(self, statistic: Tensor, count: int, sigma_noise: Tensor) -> Tensor:
        return statistic / sigma_noise**2 - count * (sigma_noise.log() + 0.5 * math.log(2 * math.pi))

    def loss(self, outputs: Tensor, targets: Tensor, variance: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / (2 * variance * len(targets))

    def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ones_like(outputs)

    def log_predictive(self, predictions: Any, targets: Tensor, sigma_noise: Tensor, n_samples: int = 100) -> Tensor:
        mean, variance = (part.double() for part in predictions)
        if variance.dim() == 3 and len(variance) and variance.shape[1:] == 2 * (mean[0].numel(),):
            entries = variance.shape[1]
            noise = sigma_noise.square() * torch.eye(entries, dtype=variance.dtype, device=variance.device)
            root = torch.linalg.cholesky(variance + noise)
            white = torch.linalg.solve_triangular(root, (targets - mean).reshape(-1, entries, 1), upper=False)
            determinant = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1)
            return -0.5 * (white.square().sum((1, 2)) + determinant + entries * math.log(2 * math.pi))
        whole = variance + sigma_noise.square()
        return -0.5 * ((targets - mean).square() / whole + (2 * math.pi * whole).log())

    def uncertainty(
        self, mean: Tensor, covariance: Tensor, sigma_noise: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Differential entropies, in closed form."""
        ratio = covariance / sigma_noise.square() + torch.eye(
            covariance.shape[1], dtype=covariance.dtype, device=covariance.device
        )
        alone = covariance.shape[1] * (0.5 * math.log(2 * math.pi * math.e) + sigma_noise.log())
        known = torch.linalg.cholesky(ratio).diagonal(dim1=1, dim2=2).log().sum(1)
        return alone + known, alone.expand(len(mean))

    def columns(self, outputs: Tensor, targets: Tensor, tolerance: float = 0.0) -> Columns:
        """The unit vectors; all of one size, so that none is left out."""
        return unit_columns(outputs)


class _Discrete(IndependentLikelihood):
    """Targets of certain values, bool, integer or real, of the outputs' shape, or ``(N,)`` for outputs ``(N, 1)``."""

    values: ClassVar[str]  # in words

    @abstractmethod
    def _fits(self, targets: Tensor) -> Tensor:
        """A mask of the targets that have such a value, of their shape."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        super().check(outputs, _matching(outputs, targets))
        if not (fits := self._fits(targets)).all():
            raise ValueError(
                f"targets: expected {self.values} for likelihood={self.name!r}, got {targets[~fits][0].item()}."
            )

    def admitted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return targets, self._fits(targets).all()


@register_likelihood("binary")
class Binary(_Discrete):
    """Bernoulli variables whose logits are the outputs: targets 0 or 1, bool, integer or real."""

    has_classes = True
    values = "0 or 1"

    def _fits(self, targets: Tensor) -> Tensor:
        return (targets == 0) | (targets == 1)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = _matching(outputs, targets).to(outputs.dtype)
        return -F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.sigmoid(outputs) * torch.sigmoid(-outputs)

    def response(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)

    def probabilities(self, link: str, mean: Tensor, covariance: Tensor) -> Tensor:
        return sigmoid_probabilities(link, mean, covariance)

    def log_predictive(self, predictions: Any, targets: Tensor, sigma_noise: Tensor, n_samples: int = 100) -> Tensor:
        p = predictions.double()
        right = torch.where(_matching(predictions, targets) == 1, p, 1 - p)
        return right.clamp(min=SMALLEST_PROBABILITY).log()

    def entropy(self, probabilities: Tensor) -> Tensor:
        return torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)

    def hits(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        right = (outputs > 0) == (_matching(outputs, targets) == 1)
        return right.sum(), torch.full_like(right.sum(), right.numel())


@register_likelihood("poisson")
class Poisson(_Discrete):
    """Counts whose log rates are the outputs: targets whole numbers from 0 on, integer or real."""

    values = "whole numbers from 0 on"

    def _fits(self, targets: Tensor) -> Tensor:
        whole = targets == targets.floor() if targets.is_floating_point() else True
        return (targets >= 0) & (targets < torch.inf) & whole

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = _matching(outputs, targets).to(outputs.dtype)
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1)

    def second_derivative(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp()

    def response(self, outputs: Tensor) -> Tensor:
        return outputs.exp()


@register_likelihood("heteroscedastic")
class Heteroscedastic(Likelihood):
    """Gaussians, each of its own mean and variance: outputs ``(N, 2K)`` are natural parameters, first K times ``eta_1 = mu / sigma^2``, then
    K times ``eta_2 = -1 / (2 sigma^2) < 0``; targets real, ``(N, K)``, or ``(N,)`` for K = 1. In these the Hessian of ``-log p`` is the
    covariance of ``(y, y^2)``, whatever the target.

    Source: Immer et al., "Effective Bayesian heteroscedastic regression with deep neural networks", NeurIPS 2023, section 3.
    """

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() != 2 or outputs.shape[1] % 2 or not outputs.shape[1]:
            raise ValueError(
                f"likelihood='heteroscedastic' needs outputs (N, 2K), mean / variance and -1 / (2 variance), got {tuple(outputs.shape)}."
            )
        k = outputs.shape[1] // 2
        if targets.shape != (len(outputs), k) and not (k == 1 and targets.shape == outputs.shape[:1]):
            raise ValueError(
                f"targets: expected half as many columns as the model has outputs, shape {(len(outputs), k)}, got {tuple(targets.shape)}."
            )
        _require_real(targets, self.name)
        if (outputs[:, k:] >= 0).any():
            raise ValueError(
                f"likelihood='heteroscedastic': the last {k} of the model's outputs are -1/(2 variance) and must be negative, got up to "
                f"{outputs[:, k:].max().item():g}; end the network in torch.cat([f[:, :{k}], -0.5 * F.softplus(f[:, {k}:]) - 1e-6], 1)."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        eta_1, eta_2 = outputs.chunk(2, 1)
        y = targets.to(outputs.dtype).view(eta_1.shape)
        return eta_2 * (y + 0.5 * eta_1 / eta_2).square() + 0.5 * (-eta_2 / math.pi).log()

    def at_normal(self, mean: Tensor, variance: Tensor, numbers: Tensor) -> Tensor:
        first, second = super().at_normal(mean, variance, numbers).chunk(2, 1)
        (_, mean), (_, variance), (_, numbers) = (part.chunk(2, 1) for part in (mean, variance, numbers))
        # eta_2 is negative: by the inverse of its distribution function, as far as that is below zero.
        scale = variance.sqrt()
        below = torch.special.ndtr(-mean / scale.clamp(min=torch.finfo(scale.dtype).tiny))
        cut = mean + scale * torch.special.ndtri(torch.special.ndtr(numbers) * below)
        return torch.cat([first, torch.where(scale > 0, cut, second)], 1)

    def columns(self, outputs: Tensor, targets: Tensor, tolerance: float = 0.0) -> Columns:
        """Two for each target, the Cholesky factor of its covariance: ``(sigma, 2 mu sigma)`` and ``(0, sqrt(2) sigma^2)``."""
        eta_1, eta_2 = outputs.double().chunk(2, 1)
        variance = -0.5 / eta_2
        sigma, mean = variance.sqrt(), eta_1 * variance
        first = torch.stack([sigma, 2 * mean * sigma], 2)
        second = torch.stack([torch.zeros_like(sigma), math.sqrt(2) * variance], 2)
        k = torch.arange(sigma.shape[1], device=sigma.device)
        places = torch.stack([k, k + len(k)], 1)
        return _sparse(outputs, torch.cat([first, second], 1), places.repeat(2, 1), tolerance)


def hessian_sum(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int] | None:
    """The sum over outputs ``(N, K)`` of the Hessians of ``-log p``, ``(K, K)``, float64, and how many columns it has, where that takes
    less than to build these; None elsewhere."""
    made = type(likelihood).columns
    if made is Classification.columns:
        p = torch.softmax(outputs.double(), -1) * likelihood._counted(targets)[:, None]
        found = (-(p.T @ p)).fill_diagonal_(0.0)
        # Rows of the Hessian sum to zero. The sum of p - p^2 would round certain predictions to none.
        return found - found.sum(1).diag(), len(p) * (p.shape[1] - 1)
    if made in (IndependentLikelihood.columns, Regression.columns):
        return likelihood.second_derivative(outputs.double(), targets).sum(0).diag(), outputs.numel()
    return None


def _needed(traces: Tensor, tolerance: float) -> int:
    """The number of columns, whose traces are ``(N, columns)``, that leave at most the share out; at least one."""
    left = traces.detach().sum(0).flip(0).cumsum(0).flip(0)  # trace of this column and those after it
    return max(1, int((~(left <= tolerance * left[:1])).sum()))  # nan is kept, to be found in the factors


def _largest_first(traces: Tensor, tolerance: float) -> Tensor:
    """For each data point its columns, whose traces are ``(N, columns)``, from large to small, without those that may be left out:
    ``(N, count)``."""
    in_order, order = traces.detach().sort(dim=1, descending=True, stable=True)
    return order[:, : _needed(in_order, tolerance)]


def _sparse(outputs: Tensor, values: Tensor, places: Tensor, tolerance: float) -> Columns:
    """Columns of few entries: ``values``, ``(N, columns, few)``, at ``places``, ``(columns, few)``, of a data point's flattened outputs."""
    n, columns, _ = values.shape
    every = torch.arange(columns, device=values.device).expand(n, -1)
    chosen = _largest_first(values.square().sum(2), tolerance) if tolerance else every

    def build(begin: int, end: int) -> Tensor:
        picks, images = chosen[:, begin:end].T, torch.arange(n, device=chosen.device)
        zeros = outputs.new_zeros(len(picks), n, math.prod(outputs.shape[1:]))
        columns = zeros.scatter(2, places[picks], values[images, picks].to(outputs.dtype))
        return columns.view(len(picks), *outputs.shape)

    return Columns(chosen.shape[1], build, 2 * outputs.element_size() * outputs.numel())


def _matching(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets ``(N,)`` of outputs ``(N, 1)`` in their shape, others as they are."""
    return targets[:, None] if targets.dim() == 1 and outputs.shape == (len(targets), 1) else targets


def _require_real(targets: Tensor, name: str) -> None:
    if not targets.is_floating_point():
        raise TypeError(
            f"targets: expected real numbers for likelihood={name!r}, got dtype {targets.dtype}; use .float()."
        )


def _device(like: Tensor, generator: torch.Generator | None) -> torch.device:
    return like.device if generator is None else generator.device

"""Base of learned augmentations: amounts that are hyperparameters, and random draws that can be held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.nn._sizes import as_count
from ella_cuda.ops._precision import autocast_is_on, without_autocast

SAMPLINGS = ("independent", "shared", "grid", "sobol")
CONSTRAINTS = ("softplus", "raw")
REDUCED = (torch.float16, torch.bfloat16)
Init = float | Sequence[float] | Mapping[str, float] | Tensor


class Augment(nn.Module):
    r"""S transformed copies of each input: ``(N, ...) -> (N, S, ...)``, with amounts that are learned. A subclass implements
    :meth:`transform`, and may :meth:`check_input`.

    The amounts :math:`\eta` are hyperparameters: the evidence learns them, the training loss cannot, for it would shrink them to 0. So
    what is learned is a buffer, not a parameter, and an optimizer of ``model.parameters()`` leaves it alone. Gradients in it are had by
    ``augment.raw.requires_grad_()``.

    Draws come from torch's global generator of the inputs' device, as those of dropout do; scrambling and seeds come from that of the
    CPU. Checkpoints of :func:`ella_cuda.marglik_training` have the states of both, so that a resumed run draws what one that was not
    interrupted draws.

    Buffers:
        raw: ``(k,)``, the constraint's argument: :math:`\eta` = softplus(raw), or raw itself.

    Attributes:
        names: of the amounts, k words.
        n_samples: S.
        sampling: how copies are drawn; may be changed.

    Args:
        n_samples: S, the copies of each input.
        names: of the amounts.
        init: the amounts at the start: a number for all, numbers in the order of ``names``, or a mapping that has every name.
        sampling: "independent" draws for each input and copy; "shared" draws S for all inputs of a call; "grid" takes the midpoints of
            a regular grid, so that the ends of a closed circle do not coincide; "sobol" draws a scrambled Sobol sequence of S points
            for all inputs of a call.
        constraint: "softplus" keeps amounts positive; "raw" leaves them as they are.
        limits: by name, the largest absolute value; amounts beyond it are clamped, where their gradient is 0; see :meth:`project_`.
        samplings: those that the subclass has.
        dims: numbers drawn for a copy; None is k.
        device, dtype: of the buffer, float32 or float64; None is torch's default.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range; the message names it.
    """

    raw: Tensor

    def __init__(
        self,
        n_samples: int,
        names: Sequence[str],
        init: Init = 0.1,
        sampling: str = "independent",
        constraint: str = "softplus",
        *,
        limits: Mapping[str, float] | None = None,
        samplings: Sequence[str] = SAMPLINGS,
        dims: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if constraint not in CONSTRAINTS:
            raise ValueError(f"{self._name}: constraint must be one of {', '.join(CONSTRAINTS)}, got {constraint!r}.")
        self.n_samples = as_count(f"{self._name}: n_samples", n_samples)
        self.names, self.constraint = tuple(names), constraint
        self.samplings, self.dims = tuple(samplings), len(self.names) if dims is None else dims
        self._limits = tuple((limits or {}).get(name, math.inf) for name in self.names)
        self._held: Tensor | _Stream | None = None
        self.sampling = sampling
        amounts = self._amounts(init)
        if sampling == "grid" and 0 in amounts:
            raise ValueError(
                f"{self._name}: init must not be 0 with sampling='grid', got {init!r}: a grid is symmetric and the averaged function even in "
                "every amount, so the gradient at 0 is exactly 0 and the amount never leaves it. Start at 0.05 to 0.1, or draw "
                "(sampling='shared')."
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{self._name}: dtype must be torch.float32 or torch.float64, got {dtype}.")
        self.register_buffer("raw", torch.empty(len(self.names), device=device, dtype=dtype))
        self._write(amounts)

    # amounts ----------------------------------------------------------------------------------------------------------

    @property
    def eta(self) -> Tensor:
        r""":math:`\eta`, ``(k,)``: the amounts in the order of ``names``, differentiable in ``raw``."""
        eta = F.softplus(self.raw) if self.constraint == "softplus" else self.raw
        if all(map(math.isinf, self._limits)):
            return eta
        # By slices: a tensor of limits would be copied to the device at every call.
        return torch.cat([part.clamp(-limit, limit) for part, limit in zip(eta.split(1), self._limits, strict=True)])

    def amounts(self) -> dict[str, float]:
        """The amounts by name, as numbers without a sign: draws are symmetric, so copies have the same law with either."""
        return dict(zip(self.names, self.eta.detach().abs().tolist(), strict=True))

    def set_eta(self, eta: Init) -> None:
        """Put the amounts to given values, as for ``init``; 0 is taken with constraint="raw", whatever the sampling, so that a scan may
        have it.

        Raises:
            TypeError, ValueError: as of the constructor.
        """
        self._write(self._amounts(eta, "eta"))

    def project_(self) -> None:
        """Move ``raw`` to where no amount is beyond its limit. Beyond it the gradient is 0: a learner that stepped there calls this, or
        the amount would never come back."""
        with torch.no_grad():
            for part, limit in zip(self.raw.split(1), self._limits, strict=True):
                if math.isfinite(limit):
                    part.clamp_(*self._raw_range(limit))

    def _raw_range(self, limit: float) -> tuple[float | None, float]:
        """The values of ``raw`` whose amounts are within the limit, as rounded numbers too."""
        inside = 1 - 4 * torch.finfo(self.raw.dtype).eps  # at the limit itself the clamp's gradient is 0
        if self.constraint == "raw":
            return -limit * inside, limit * inside
        return None, _inverse_softplus(limit) * inside

    def _out_of_reach(self, way: float) -> Iterator[tuple[str, float, float, float]]:
        """Amounts that ``raw`` does not take to their limit on so long a way: name, limit, the largest that it reaches, the way there."""
        for name, raw, limit in zip(self.names, self.raw.tolist(), self._limits, strict=True):
            start = abs(raw) if self.constraint == "raw" else raw
            if math.isfinite(limit) and (needed := self._raw_range(limit)[1] - start) > way:
                most = start + way
                yield name, limit, most if self.constraint == "raw" else math.log1p(math.exp(most)), needed

    def _write(self, amounts: Sequence[float]) -> None:
        softplus = self.constraint == "softplus"
        with torch.no_grad():
            self.raw.copy_(
                torch.tensor([_inverse_softplus(a) if softplus else a for a in amounts], dtype=torch.float64)
            )
        self.project_()

    def _amounts(self, given: Init, argument: str = "init") -> list[float]:
        where = f"{self._name}: {argument} must"
        if isinstance(given, Mapping):
            if given.keys() != set(self.names):
                raise ValueError(
                    f"{where} have the names {', '.join(self.names)}, got {', '.join(map(str, given)) or 'none'}."
                )
            given = [given[name] for name in self.names]
        if isinstance(given, Tensor):
            given = given.detach().tolist()
        if isinstance(given, bool) or not isinstance(given, (Real, list, tuple)):
            raise TypeError(
                f"{where} be a number, {len(self.names)} numbers or a mapping of names to numbers, got {type(given).__name__}."
            )
        values = [given] * len(self.names) if isinstance(given, Real) else list(given)
        if len(values) != len(self.names):
            raise ValueError(f"{where} have {len(self.names)} numbers, for {', '.join(self.names)}, got {len(values)}.")
        for name, value, limit in zip(self.names, values, self._limits, strict=True):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{where} be numbers, got {type(value).__name__} for {name}.")
            if not math.isfinite(value):
                raise ValueError(f"{where} be finite, got {value!r} for {name}.")
            if self.constraint == "softplus" and value <= 0:
                raise ValueError(
                    f"{where} be positive with constraint='softplus', got {value!r} for {name}; start at 0.05 to 0.1, or take "
                    "constraint='raw'."
                )
            if abs(value) > limit * (1 + 1e-6):  # pi in single precision is above it
                raise ValueError(f"{where} be at most {limit:.7g} in absolute value for {name}, got {value!r}.")
        return [float(value) for value in values]

    # draws ------------------------------------------------------------------------------------------------------------

    @property
    def sampling(self) -> str:
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: str) -> None:
        self._sampling = self._checked_sampling(sampling)

    def _checked_sampling(self, sampling: str) -> str:
        if sampling not in self.samplings:
            raise ValueError(f"{self._name}: sampling must be one of {', '.join(self.samplings)}, got {sampling!r}.")
        if sampling == "grid":
            side = round(self.n_samples ** (1 / self.dims))
            if side < 2 or side**self.dims != self.n_samples:
                what = (
                    "at least 2"
                    if self.dims == 1
                    else f"m**{self.dims} with m >= 2, for a grid over {self.dims} amounts"
                )
                raise ValueError(
                    f"{self._name}: n_samples must be {what} with sampling='grid', got {self.n_samples}; take "
                    "sampling='sobol' for other numbers."
                )
        return sampling

    def draw(self, n: int = 1, sampling: str | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draws for ``eps``: ``(n, S, k)`` in [-1, 1], of ``raw``'s dtype and on its device.

        Args:
            n: the number of inputs; only "independent" has draws for each, others give ``(1, S, k)``.
            sampling: None is the module's own.
            generator: of the device, for "independent" and "shared"; of the CPU for "sobol". None is torch's global one.
        """
        sampling = self.sampling if sampling is None else self._checked_sampling(sampling)
        return self.sample(n if sampling == "independent" else 1, sampling, generator)

    def sample(self, n: int, sampling: str, generator: torch.Generator | None) -> Tensor:
        """Draws ``(n, S, *eps_shape())``, see :meth:`draw`; a subclass that has others than uniform ones implements it. Their law must be
        symmetric."""
        like = {"device": self.raw.device, "dtype": self.raw.dtype}
        if sampling == "grid":
            side = round(self.n_samples ** (1 / self.dims))
            points = (2 * torch.arange(side, **like) + 1 - side) / side
            return torch.cartesian_prod(*[points] * self.dims).view(1, self.n_samples, self.dims)
        if sampling == "sobol":
            seed = int(
                torch.randint(2**31 - 1, (), generator=generator, device=generator.device if generator else "cpu")
            )
            points = torch.quasirandom.SobolEngine(self.dims, scramble=True, seed=seed).draw(
                self.n_samples, dtype=torch.float64
            )
            return (2 * points - 1).to(**like)[None]
        on = self.raw.device if generator is None else generator.device
        drawn = torch.rand(n, self.n_samples, self.dims, generator=generator, device=on, dtype=self.raw.dtype)
        return (2 * drawn - 1).to(self.raw.device)

    @contextmanager
    def held(self, eps: Tensor | None = None, sampling: str | None = None) -> Iterator[Tensor | None]:
        """For the duration of the context every call takes the same draws: a pass of the evidence over all batches is then of one
        function.

        Args:
            eps: the draws; None makes them.
            sampling: how; None is the module's own, but "shared" where that is "independent". With "independent" each call has draws of
                its own, from a seed of this context: :meth:`rewind` starts them anew, for another pass over the same batches.

        Yields:
            The draws, ``(1, S, k)``; None with sampling="independent".
        """
        before = self._held
        if eps is not None:
            self._held = self._checked(eps)
        else:
            own = "shared" if self.sampling == "independent" else self.sampling
            sampling = own if sampling is None else self._checked_sampling(sampling)
            self._held = _Stream() if sampling == "independent" else self.draw(1, sampling)
        try:
            yield self._held if isinstance(self._held, Tensor) else None
        finally:
            self._held = before

    def rewind(self) -> None:
        """Start the draws of a context :meth:`held` with sampling="independent" anew; elsewhere there is nothing to do."""
        if isinstance(self._held, _Stream):
            self._held.rewind()

    def eps_for(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """The draws that a call with x takes, ``(N or 1, S, ...)``: given ones, those held, or new ones."""
        if eps is not None:
            return self._checked(eps)
        if self._held is None:
            return self.draw(len(x))
        if isinstance(self._held, _Stream):
            return self.draw(len(x), "independent", self._held.generator)
        return self._held

    def eps_shape(self) -> tuple[int, ...]:
        """Of one copy's draws; ``(k,)`` unless a subclass says another, with :meth:`sample`."""
        return (self.dims,)

    def _checked(self, eps: Tensor, n: int | None = None) -> Tensor:
        """The draws as ``(n or 1, S, ...)``; TypeError or ValueError where they are no such."""
        tail = self.eps_shape()
        wanted = f"(S, {', '.join(map(str, tail))}) or (N or 1, S, {', '.join(map(str, tail))})"
        if not isinstance(eps, Tensor):
            raise TypeError(
                f"{self._name}: eps must be a tensor {wanted}, got {type(eps).__name__}; use torch.tensor()."
            )
        self._check_kind("eps", eps)
        given, eps = tuple(eps.shape), eps[None] if eps.dim() == len(tail) + 1 else eps
        if eps.dim() != len(tail) + 2 or tuple(eps.shape[2:]) != tail or not eps.shape[1]:
            raise ValueError(f"{self._name}: eps must have shape {wanted}, got {given}.")
        if n is not None and eps.shape[0] not in (1, n):
            raise ValueError(
                f"{self._name}: eps must be for 1 or all {n} inputs, got {tuple(eps.shape)}; draws of a batch fit that batch alone, draws "
                "(1, S, k) fit any."
            )
        return eps

    def _check_kind(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.raw.device:
            raise ValueError(
                f"{self._name}: {name} is on {tensor.device}, the amounts are on {self.raw.device}; move one with .to(), for example "
                f"x.to({str(self.raw.device)!r})."
            )
        if tensor.dtype != self.raw.dtype:
            raise ValueError(
                f"{self._name}: {name} is {tensor.dtype}, the amounts are {self.raw.dtype}; convert one with .to(), for example "
                f"x.to({self.raw.dtype})."
            )

    # copies -----------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, eps: Tensor | None = None) -> Tensor:
        """``(N, ...) -> (N, S, ...)``.

        Args:
            x: of ``raw``'s dtype and on its device.
            eps: draws, ``(N, S, k)``, ``(1, S, k)`` or ``(S, k)``, of any S; None takes those held, or draws.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"{self._name}: x must be a tensor (N, ...), got {type(x).__name__}.")
        if not x.dim():
            raise ValueError(f"{self._name}: x must have shape (N, ...), got ().")
        if autocast_is_on(x.device.type):
            with without_autocast(x.device.type):
                return self._copies(x.float() if x.dtype in REDUCED else x, eps)
        return self._copies(x, eps)

    def _copies(self, x: Tensor, eps: Tensor | None) -> Tensor:
        self._check_kind("x", x)
        self.check_input(x)
        return self.transform(x, self._checked(self.eps_for(x, eps), len(x)), self.eta)

    def check_input(self, x: Tensor) -> None:
        """ValueError unless x has a shape that the transformation takes."""

    def transform(self, x: Tensor, eps: Tensor, eta: Tensor) -> Tensor:
        r"""The copies, ``(N, S, ...)``, of x ``(N, ...)`` at draws eps ``(N or 1, S, k)`` and amounts eta ``(k,)``. S may be a part of
        ``n_samples``: where copies depend on their own draws alone, they may go through a network a few at a time."""
        raise NotImplementedError(f"{self._name} must implement transform(x, eps, eta).")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}  # a copy is in no context

    def extra_repr(self) -> str:
        return f"{self.n_samples}, {', '.join(self.names)}, sampling={self.sampling!r}, constraint={self.constraint!r}"


class _Stream:
    """Draws from a seed, which can be had again."""

    def __init__(self) -> None:
        self.seed = int(torch.randint(2**31 - 1, (), device="cpu"))
        self.generator = torch.Generator("cpu").manual_seed(self.seed)

    def rewind(self) -> None:
        self.generator.manual_seed(self.seed)


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value))

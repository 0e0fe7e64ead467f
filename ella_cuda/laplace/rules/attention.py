"""Multi-head attention: linear layers inside of one module."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ella_cuda.laplace.call import Tap, arguments_in_order
from ella_cuda.laplace.factors import FactorShape
from ella_cuda.laplace.interception import FunctionMode
from ella_cuda.laplace.rows import Dense, Rows
from ella_cuda.laplace.rules.base import Rule, register
from ella_cuda.nn._autocast import full


@register(nn.MultiheadAttention)
class MultiheadAttentionRule(Rule):
    """:class:`torch.nn.MultiheadAttention` on ``(N, L, E)``, or ``(L, N, E)``: its projections are linear layers with L shared positions,
    and are differentiated as such; autograd does the rest.

    ``in_proj_weight``: three blocks, those of query, key and value, each that of a linear layer: block index (input, output).
        ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``, of inputs of other sizes: likewise, one block each.
    ``in_proj_bias``: the exact GGN block of all three together. ``out_proj.weight``, ``out_proj.bias``: as those of a linear layer.

    ``bias_k`` and ``bias_v`` are left to whoever serves parameters without a rule. The rule finds the projections by their weights while the
    module's own forward runs.
    """

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def inner_modules(self) -> list[nn.Module]:
        return [self.module.out_proj]

    def shapes(self) -> dict[str, FactorShape]:
        m = self.module
        e = m.embed_dim
        known = {"in_proj_weight": FactorShape(3, e, e, 3)}
        if m.in_proj_weight is None:
            sizes = zip("qkv", (e, m.kdim, m.vdim), strict=True)
            known = {f"{p}_proj_weight": FactorShape(1, size, e, 1) for p, size in sizes}
        known["in_proj_bias"] = FactorShape.bias(3 * e)
        return known | {"out_proj.weight": FactorShape(1, e, e, 1), "out_proj.bias": FactorShape.bias(e)}

    def projection(self, weight: Tensor) -> tuple[str, range] | None:
        """Which of the layer's projections a weight is: its name, and the rows of ``in_proj_weight`` in units of E; None if none."""
        m, e = self.module, self.module.embed_dim
        if weight is m.out_proj.weight:
            return "out_proj.weight", range(1)
        for name, at in (("q_proj_weight", 0), ("k_proj_weight", 1), ("v_proj_weight", 2)):
            if weight is getattr(m, name):
                return name, range(at, at + 1)
        packed = None if torch._C._functorch.is_functorch_wrapped_tensor(weight) else m.in_proj_weight
        of_it = packed is not None and weight.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        if not of_it or weight.dim() != 2 or weight.shape[1] != e:
            return None
        first = (weight.storage_offset() - packed.storage_offset()) // (e * e)
        return "in_proj_weight", range(first, first + weight.shape[0] // e)

    def tapped(self, forward: Callable[..., Any], tap: Tap, charge: Callable[[int], None]) -> Callable[..., Any]:
        """The module's forward with a tap behind every projection; ``charge`` gets the bytes of the attention's weights,
        ``(N, heads, L, S)``, whose gradients a column takes too."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            query, key, *_ = arguments_in_order(self.module, args, kwargs, forward)
            if query.dim() != 3:
                raise ValueError(
                    f"{self.label}: expected queries (N, L, {self.module.embed_dim}) or (L, N, {self.module.embed_dim}), got shape "
                    f"{tuple(query.shape)}; add a batch axis."
                )
            batch, length = (0, 1) if self.module.batch_first else (1, 0)
            images = query.shape[batch]
            pairs = images * self.module.num_heads * query.shape[length] * key.shape[length]
            charge(pairs * query.element_size())
            with _projections_through(self, tap, images):
                return forward(*args, **kwargs)

        return wrapped

    def require_known(self, unknown: Sequence[str]) -> None:
        """Nothing: others serve ``bias_k`` and ``bias_v``."""

    def input_rows(self, x: Tensor, name: str, blocks: range) -> dict[str, Rows]:
        return {name: Dense(full(x)[:, :, None], blocks if name == "in_proj_weight" else None)}

    def keep(self, x: Tensor, name: str, blocks: range) -> tuple[str, range]:
        return name, blocks

    def touched(self, kept: tuple[str, range]) -> dict[str, range | None]:
        name, blocks = kept
        bias = "out_proj.bias" if name == "out_proj.weight" else "in_proj_bias"
        parts = {name: blocks if name == "in_proj_weight" else None, bias: None}
        return {name: part for name, part in parts.items() if name in self.trainable}

    def output_rows(self, gradient: Tensor, kept: tuple[str, range]) -> dict[str, Rows]:
        (name, blocks), e = kept, self.module.embed_dim
        rows, part = gradient.flatten(0, 1), blocks if name == "in_proj_weight" else None
        found: dict[str, Rows] = {name: Dense(rows.unflatten(2, (len(blocks), e)), part)}
        if name == "out_proj.weight":
            return found | {"out_proj.bias": Dense(rows[:, :, None])}
        around = (blocks.start * e, (3 - blocks.stop) * e)
        return found | {"in_proj_bias": Dense(F.pad(rows.sum(1), around)[:, None, None])}


def _projections_through(rule: MultiheadAttentionRule, tap: Tap, images: int) -> FunctionMode:
    """A mode by which an attention's projections, on ``(L, N, E)`` or ``(L * N, E)``, go through the tap. Torch computes them in a function
    that a mode sees as a whole; the function's code runs with another ``linear`` among its globals."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.linear(x, weight, bias)
        found = rule.projection(weight)
        if found is None:
            return out
        apart = (-1, images) if x.dim() == 2 else x.shape[:2]
        tapped = tap((x.reshape(*apart, x.shape[-1]), *found), out.reshape(*apart, out.shape[-1]), 1)
        return tapped.reshape(out.shape)

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.multi_head_attention_forward:
            func = _with_globals(func, {"linear": linear})
        return func(*args, **kwargs)

    return FunctionMode(handle)


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """A copy of the function, and of the functions of its module that it names, itself among them (which other modes are handed), with
    other objects under these global names."""
    own = {**function.__globals__, **names}

    def copied(f: Any) -> Any:
        found = types.FunctionType(f.__code__, own, f.__name__, f.__defaults__, f.__closure__)
        found.__kwdefaults__ = f.__kwdefaults__
        return found

    for name in function.__code__.co_names:
        inner = own.get(name)
        if isinstance(inner, types.FunctionType) and inner.__globals__ is function.__globals__:
            own[name] = copied(inner)
    return copied(function)

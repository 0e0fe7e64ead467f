"""One batch through the network: forward once, then the columns of the output Hessian's square root back through it.

Only gradients of activations are computed. A layer's forward hook replaces the layer's node in the autograd graph by
one that hands the gradient, all columns together, to the layer's rule; the rule accumulates its factors and returns the
gradient at its input. So nothing is kept for all layers at once but what rules keep of their inputs (``Rule.kept``), and no
gradient of a parameter is ever formed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from ella_cuda.laplace.batches import Inputs, data_points, model_outputs, run_model, take, tensors_of
from ella_cuda.laplace.call import Call, Place, batch_first
from ella_cuda.laplace.check_extensions import check_rules
from ella_cuda.laplace.check_model import Findings, columns_together, outputs_apart, probe, require_rows_of_their_own
from ella_cuda.laplace.column_functions import (
    Before,
    ConstantScale,
    InterceptedFunctions,
    Passage,
    Slice,
    constant_scales,
)
from ella_cuda.laplace.copies import (
    Chunk,
    chunks_of,
    copies_together,
    require_copies,
    seeing,
    tried_copies,
    warn_of_all_copies,
)
from ella_cuda.laplace.evidence import hyperparameters
from ella_cuda.laplace.interception import FunctionMode, hooks
from ella_cuda.laplace.known_model import known_of
from ella_cuda.laplace.kronecker_sums import Consumer, KroneckerSums, SummedCopies
from ella_cuda.laplace.layer_pass import LayerPass
from ella_cuda.laplace.likelihoods import Columns, bytes_each
from ella_cuda.laplace.per_example import PerExampleGradients
from ella_cuda.laplace.tangent import NoGradientError, first_at_fault
from ella_cuda.laplace.test_time import at_test_time, in_plain_products, refusing_reentrant, requiring_grad
from ella_cuda.nn._autocast import full
from ella_cuda.ops._precision import without_autocast

if TYPE_CHECKING:
    from ella_cuda.laplace.rules.base import Rule

OfColumns = Callable[[Tensor], Tensor]
FEW_IMAGES = 8  # which always go together
INPUT_TIMES, MOST_MERGED = 32, 1024  # of what goes together of several batches


class _OnColumns(torch.autograd.Function):
    """Call ``function`` on the physical gradient with the column axis in front, whether or not ``vmap`` carries one."""

    @staticmethod
    def forward(gradient: Tensor, function: OfColumns) -> Tensor:
        return function(gradient[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, function: OfColumns) -> tuple[Tensor, int]:
        dim = in_dims[0]
        columns = gradient.expand(info.batch_size, *gradient.shape) if dim is None else _in_front(gradient, dim)
        return function(columns), 0


def _on_columns(gradient: Tensor, function: OfColumns) -> Tensor:
    """:class:`_OnColumns`, without what torch does around a function of an autograd graph."""
    if not functorch.is_batchedtensor(gradient):
        return _OnColumns.apply(gradient, function)
    columns = _in_front(functorch.get_unwrapped(gradient), functorch.maybe_get_bdim(gradient))
    with temporarily_pop_interpreter_stack():
        found = function(columns)
    return functorch._add_batch_dim(found, 0, functorch.maybe_get_level(gradient))


def _in_front(columns: Tensor, dim: int) -> Tensor:
    return columns.movedim(dim, 0) if dim else columns


def _of_handed(columns: Tensor, function: OfColumns) -> Tensor:
    """What ``function`` makes of columns that were handed on past the graph, as the graph has gradients."""
    level = functorch.maybe_current_level()
    if level is None:
        return function(columns)[0]
    with temporarily_pop_interpreter_stack():
        found = function(columns)
    return functorch._add_batch_dim(found, 0, level)


class _LayerNode(torch.autograd.Function):
    """Stands in the graph for a layer whose rule differentiates it.

    ``out`` becomes the output itself, not a view or copy of it, so that the next layer may work on it in place.
    ``anchor`` requires a gradient that is never formed: it makes the engine visit the first layer too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, anchor: Tensor, call: Call, run: CurvaturePass) -> Tensor:
        ctx.mark_dirty(out)
        ctx.call, ctx.run = call, run
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        call, run, wanted = ctx.call, ctx.run, ctx.needs_input_grad[0]
        run.require_backward()

        def back(columns: Tensor) -> Tensor:
            # A network's own autocast reduces what is between its layers; rules have their parameters' precision.
            found = run.consumer.backward(call, batch_first(full(columns), call.place, 1), wanted)
            if found is None:
                return columns.new_zeros(columns.shape[0])
            return found.flatten(1, 2) if call.place.folded > 1 else batch_first(found, call.place, 1)

        handed, call.handed = call.handed, None
        if handed is None:
            call.samples = None
            found = _on_columns(gradient, back)
        else:
            found = _of_handed(handed, back)
        return found if wanted else None, None, None, None, None


class _OutputTap(torch.autograd.Function):
    """Identity on a layer's output that shows its gradient to the rule; a copy, so that the next layer may work in
    place.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, call: Call, run: CurvaturePass) -> Tensor:
        ctx.call, ctx.run = call, run
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        call, run = ctx.call, ctx.run
        run.require_backward()

        def show(columns: Tensor) -> Tensor:
            run.consumer.backward(call, batch_first(full(columns), call.place, 1), False)
            return columns

        return _on_columns(gradient, show), None, None, None


class _Node(torch.autograd.Function):
    """Stands in the graph for a function of x through whose passage gradients go back, all columns together.

    ``out`` becomes the output, of which nothing is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, passage: Passage) -> Tensor:
        ctx.mark_dirty(out)
        ctx.passage = passage
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _through(ctx.passage, gradient), None, None


class _InPlaceNode(torch.autograd.Function):
    """As :class:`_Node`, for a function that has changed x, which becomes its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: Passage) -> Tensor:
        ctx.mark_dirty(x)
        ctx.passage = passage
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _through(ctx.passage, gradient), None


def _noting(name: str) -> Callable[..., Any]:
    """A method of a node that registers a hook, which remembers that it did."""
    register = getattr(torch._C._FunctionBase, name)

    def noted(node: Any, *args: Any, **kwargs: Any) -> Any:
        node.hooked = True
        return register(node, *args, **kwargs)

    return noted


for _function in (_LayerNode, _Node, _InPlaceNode):
    for _name in ("register_hook", "register_prehook"):
        setattr(_function._backward_cls, _name, _noting(_name))


def _through(passage: Passage, gradient: Tensor) -> Tensor:
    """The gradient before a function; where somebody has taken it on already, zeros for all columns."""
    if passage.skipped and passage.handed is None:
        passage.skipped = False
        return gradient.new_zeros(()).expand(passage.input_shape)
    return _on_columns(gradient, passage.back)


class CurvaturePass(LayerPass):
    """The passes of one fit; see :func:`curvature_pass`.

    Attributes:
        column_bytes: of the largest layer's gradients of a column, in the last forward pass.
        passage_bytes: what functions without parameters keep of the last forward pass.
        watched: of a caller who watches what autograd keeps of a forward pass, the hook that gets it; others are a checkpoint's.

    Args:
        model: the network, ``(N, ...) -> (N, K)``.
        rules: of its layers with trainable parameters, factors allocated.
        memory_budget: bytes that the gradients of one pass over some of the columns may take.
        consumer: who gets what layers see; None adds it to the rules' factors.
    """

    def __init__(
        self, model: nn.Module, rules: Sequence[Rule], memory_budget: int, consumer: Consumer | None = None
    ) -> None:
        of_layers = [rule for rule in rules if rule.sees_calls()]
        super().__init__(model, of_layers, KroneckerSums() if consumer is None else consumer)
        self.memory_budget = memory_budget
        self.all_rules = [*rules]
        others = [rule for rule in rules if not rule.sees_calls()]
        self.per_example = PerExampleGradients(model, others) if others else None
        self._others = others
        self.calls = {rule: 0 for rule in self.rules}
        self._calls: list[Call] = []  # of the last forward pass
        # Who is told what stands before its input, and the input's node.
        self._with_input: list[tuple[Callable[[Before], None], Any]] = []
        self._hooked: set[Any] = set()  # nodes of tensors with hooks
        self.column_bytes = 0
        self.passage_bytes = 0
        self.watched: Callable[[Tensor], Any] | None = None
        self._attention: Callable[[], AbstractContextManager[None]] = nullcontext
        self._differentiating = False  # whether columns are on their way back
        self.hyperparameters = list(hyperparameters(model).values())
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._compared = True  # whether the outputs of a batch were compared with those of its parts

    def try_out(self, x: Inputs, several: bool) -> bool:
        """:func:`ella_cuda.laplace.check_model.probe` on a batch, unless the model was tried on such inputs as it is. Returns whether it was
        tried now."""
        known = known_of(self.model)
        findings = {} if known is None else known.findings
        rules = [(type(rule), rule.name, rule.trainable, rule.approximation) for rule in self.all_rules]
        inputs = [(tuple(t.shape[1:]), t.dtype, t.device) for t in tensors_of(x)]
        one, key = (
            repr((rules, columns, self.copies, tuple(x) if isinstance(x, Mapping) else type(x), inputs))
            for columns in (False, several)
        )
        self._attention = in_plain_products if several else nullcontext
        tried = key not in findings
        if tried and one in findings:
            numbered, together = findings[one]
            with self._trying():
                batched = columns_together(self.model, self.rules, tried_copies(self.model, x)[0])
            findings[key] = dataclasses.replace(numbered, batched=batched), together
            tried = False
        if tried:
            self._try_out(x, several)
            together = self.per_example is not None and self.per_example.together
            findings[key] = self.findings.numbered(self.rules), together
        else:
            numbered, together = findings[key]
            self._settle(numbered.of(self.rules))
            if self.per_example is not None:
                self.per_example.together = together
        self._compared = not tried
        return tried

    def _try_out(self, x: Inputs, several: bool) -> None:
        require_copies(self.model, x)
        few, copies = tried_copies(self.model, x)
        with self._trying():
            try:
                found = probe(self.model, self.rules, few, several, copies)
            except NotImplementedError as error:  # torch's, of a function without a gradient
                layer, _ = first_at_fault(self.model, lambda: run_model(self.model, few), NoGradientError())
                raise NoGradientError(
                    f"fit: {layer}: torch has no gradient of it ({error}). Replace the function, or freeze with requires_grad_(False) the "
                    "parameters of the layer and of those in front of it."
                ) from error
            check_rules(self.model, self.rules, few, found.places)
            self._settle(dataclasses.replace(found, image_bytes=found.image_bytes * self.copies // copies))
            if self.per_example is not None:
                with in_plain_products():
                    self.per_example.try_out(few)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """The model as in training, and as a pass runs it, for the duration of the context."""
        wanted = [*self.hyperparameters, *self.parameters]
        with requiring_grad(wanted, True), refusing_reentrant("fit"), self._attention():
            yield

    def _settle(self, findings: Findings) -> None:
        """Be of what a trial of the network found."""
        self.findings = findings
        for rule in self.rules:
            rule.outside = findings.outside.get(rule, frozenset())
            if rule.factors:  # before the weight's rows are in a side that both have
                rule.separate_outputs({rule.full_name(name) for name in rule.outside})
        if findings.shared or findings.outside:
            self.per_example = PerExampleGradients(self.model, self._others, findings)

    def images_at_once(self, count: int) -> int:
        """Of ``count``, how many images go through the network together, after :meth:`try_out`: as many as have layers' outputs, of which
        the graph keeps about as much, of no more bytes than columns may take, or than half of the factors has."""
        return -(-count // -(-count // self.most_images())) if count else 0

    def most_images(self) -> int:
        """How many images may go through the network together."""
        return max(self._room() // max(self.findings.image_bytes, 1), FEW_IMAGES // self.copies, 1)

    def _room(self) -> int:
        """Bytes of layers' outputs that may be there."""
        return max(self.memory_budget, sum(rule.bytes() for rule in self.rules) // 2)

    def chunks(self, x: Inputs) -> list[Chunk] | None:
        """A part of a batch with some of its copies at a time, where there is no room for all of them; None where there is.

        Warns:
            UserWarning: there is none, and copies cannot be split.
        """
        each = self.findings.image_bytes
        if not data_points(x):
            return None
        warn_of_all_copies(self.model, x, self._room(), each, "fit")
        most = copies_together(self.model, x, self._room(), each)
        return None if most == self.copies else chunks_of(x, most)

    def merged_images(self, x: Inputs) -> int:
        """How many images of several batches like x go together: none on the CPU, where a batch costs what its images do; a GPU waits for
        Python where batches are small. Not all that a network keeps is known, such as the outputs of frozen layers: an image counts as so
        many times its own bytes."""
        if not any(t.is_cuda for t in tensors_of(x)):
            return 0
        each = self.copies * sum(t[:1].numel() * t.element_size() for t in tensors_of(x))
        return min(self.most_images(), self.memory_budget // max(INPUT_TIMES * each, 1), MOST_MERGED)

    def parts(self, x: Inputs, y: Tensor) -> Iterator[tuple[Inputs, Tensor]]:
        """A batch in parts of :meth:`images_at_once`."""
        count = data_points(x)
        step = self.images_at_once(count)
        if step == count or not y.dim() or len(y) != count:
            yield x, y
            return
        for begin in range(0, count, step):
            some = slice(begin, begin + step)
            yield take(x, some), y[some]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For the duration of the context, within :meth:`nodes`, layers' calls make no nodes."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """:meth:`aside`, with the graph of training."""
        with self.aside(), self._attention(), requiring_grad(self.parameters, True):
            yield

    @contextmanager
    def nodes(self) -> Iterator[None]:
        """For the duration of the context, in which a batch goes forward and back, the layers' calls make our nodes."""
        with ExitStack() as stack:
            stack.enter_context(self.layers())
            for module, scale in constant_scales(self.model.modules()).items():
                # Its hook comes before that of a rule.
                stack.enter_context(hooks([module], after=self._scaled(scale), prepend=True))
            yield

    def forward(self, x: Inputs) -> Tensor:
        """The outputs ``(N, ...)``, with the graph of our nodes; the input sides are accumulated on the way."""
        self._batch_size, self.column_bytes, self.passage_bytes = data_points(x), 1, 0
        self._forget_calls()
        self.consumer.begin()
        compare = not self._compared and self._batch_size > 3  # of which the probe had all
        if compare:
            with self._apart():
                apart = outputs_apart(self.model, x)  # first: a forward may leave its outputs in buffers
        functions = InterceptedFunctions(self._passed, self._wants_nodes, self._hooked)
        with torch.enable_grad(), self._attention(), FunctionMode(functions):
            outputs = model_outputs(self.model, x)
        if compare:
            with self._apart():
                require_rows_of_their_own(self.model, x, *apart, outputs.detach())
            self._compared = True
        with torch.no_grad():
            self.consumer.close()
        if outputs.grad_fn is not None:
            self._look_before(outputs)
        return outputs

    def last_call(self, outputs: Tensor) -> Call | None:
        """The only call of a forward pass, of one row for each data point, whose output is that of the network; None where there is none."""
        node, calls = outputs.grad_fn, self._calls
        ours = len(calls) == 1 and _forward_of(node) is _LayerNode and node.call is calls[0]
        plain = ours and calls[0].place == Place() and len(calls[0].input_shape) == outputs.dim() == 2
        return calls[0] if plain and self.per_example is None else None

    def add_per_example(self, x: Inputs, columns: Columns | Tensor, most: int | None = None) -> None:
        """Accumulate the blocks of parameters that no rule knows; outside of :meth:`nodes`. ``most``: copies at a time, None is all."""
        if self.per_example is not None:
            with in_plain_products():
                each = max(self.column_bytes, bytes_each(columns))
                self.per_example.add(x, columns, each, self.memory_budget, self.consumer, most)
            self.calls.update({rule: self.calls[rule] + 1 for rule in self.per_example.shared})

    def add_chunks(self, chunks: Sequence[Chunk], columns: Columns | Tensor) -> None:
        """:meth:`forward` and :meth:`backward` of data points whose copies come in chunks: both sides accumulate.

        What there is at a time is a chunk's graph, each layer's mean input and the sums of its gradients over copies, of as many columns as
        the budget has room for. The chunks' graphs are made anew for every so many columns.
        """
        if not self.rules:
            return
        each = self.findings.image_bytes * data_points(chunks[0][0]) // self.copies  # of a column's sums
        step, sums = max(self.memory_budget // max(each, 1), 1), SummedCopies(self.consumer)
        for begin in range(0, len(columns), step):
            part, passes = columns[begin : begin + step], 0
            for x, share in chunks:
                sums.chunk(share)
                with self.of_copies(x, sums), self.nodes():
                    passes = self.backward(self.forward(x), part * share, passes)
            sums.begin()
            with torch.no_grad():
                sums.add()
        self.release()

    @contextmanager
    def of_copies(self, x: Inputs, consumer: Consumer) -> Iterator[None]:
        """For the duration of the context, layers see as many copies as these inputs have, and this consumer gets what they see."""
        before = self.copies, self.consumer
        self.copies, self.consumer = x[1].shape[1], consumer
        try:
            with seeing(self.rules, self.copies):
                yield
        finally:
            self.copies, self.consumer = before

    def backward(self, outputs: Tensor, columns: Columns | Tensor, passes: int = 0) -> int:
        """Send the columns back from the outputs, as many at once as the budget allows, or in so many passes; output sides accumulate.
        Returns the number of passes."""
        if set(self.rules) <= self.findings.shared:
            return 0
        if not self._calls:
            raise ValueError("fit: no layer with trainable parameters was called in the model's forward.")
        if not outputs.requires_grad:
            raise ValueError(
                "fit: the model's output does not depend on its layers through autograd (is it computed under "
                "no_grad?)."
            )
        count, each = len(columns), max(self.column_bytes, bytes_each(columns))
        if not passes:
            passes = min(max(-(-count * each // self.memory_budget), 1), count) if self.findings.batched else count
        self._differentiating = True
        try:
            for i in range(passes):
                last = i + 1 == passes
                chunk = columns[i * count // passes : (i + 1) * count // passes]

                def vjp(column: Tensor, keep: bool = not last) -> Tensor:
                    torch.autograd.grad(outputs, self._anchor, column, retain_graph=keep, allow_unused=True)
                    return column.new_zeros(())

                with self._attention():  # a checkpoint computes it anew
                    if chunk.shape[0] == 1:
                        vjp(chunk[0])
                    else:
                        torch.func.vmap(vjp)(chunk)
                with torch.no_grad():
                    self.consumer.flush()
        finally:
            self._differentiating = False
            self.release()
        return passes

    def release(self) -> None:
        """Drop what is kept of the last batch."""
        self._forget_calls()
        self.consumer.release()

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._counts.clear()
        self._with_input.clear()
        self._hooked.clear()

    def kept_bytes(self) -> int:
        """Bytes of what rules and functions without parameters keep of the last forward pass."""
        return sum(call.kept_bytes() for call in self._calls) + self.passage_bytes

    def require_backward(self) -> None:
        """ValueError where somebody else than :meth:`backward` differentiates."""
        if not self._differentiating:
            raise ValueError(
                "fit: the model differentiates through its layers in its own forward (torch.autograd.grad, as for forces of an energy): the "
                "curvature of weights that both passes use is no Kronecker product. Freeze these layers, or fit those behind them alone."
            )

    def _scaled(self, scale: Tensor) -> Callable[..., Tensor]:
        """The forward hook of a normalisation by constants. It leaves to autograd what is not the layer's own output, after somebody's hook
        for all modules."""

        def replace(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            alone = not module.training and len(args) == 1 and type(args[0]) is type(out) is Tensor
            own = alone and out.grad_fn is not None and "BatchNormBackward" in type(out.grad_fn).__name__
            if own and self._differentiating:  # see _hook
                return out.detach() + self._anchor
            if not own or not self._wants_nodes():
                return out
            return self._passed(
                args[0], out.detach(), ConstantScale(out.shape, scale.view(-1, *(1,) * (out.dim() - 2)))
            )

        return replace

    def _wants_nodes(self) -> bool:
        """Whether functions without parameters get our nodes. Autograd's are those that a transform in the network's forward
        differentiates, and those of a checkpoint, which counts what every function keeps."""
        keeping = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return not (
            self._aside
            or self._differentiating
            or functorch.maybe_current_level() is not None
            or forward_ad._current_level >= 0
            or (keeping is not None and keeping[0] is not self.watched)
        )

    def _passed(self, x: Tensor, out: Tensor, passage: Passage) -> Tensor:
        """The output of a function without parameters, behind our node; x itself where it has become the output."""
        in_place = out.data_ptr() == x.data_ptr() and x.numel() > 0
        self.passage_bytes += passage.kept_bytes
        if not in_place:
            x = self._unsliced(x)
        self._with_input.append((partial(setattr, passage, "before"), x.grad_fn))
        return _InPlaceNode.apply(x, passage) if in_place else _Node.apply(x, out, passage)

    def _unsliced(self, x: Tensor) -> Tensor:
        """The same tensor; where it is a slice of each image of another, with our node in the place of autograd's, which write gradients
        among zeros once for every axis."""
        slices: dict[int, slice] = {}
        node, base, shape = x.grad_fn, x._base, None
        while node is not None and base is not None and type(node).__name__ == "SliceBackward0":
            numbers = [getattr(node, f"_saved_{name}", None) for name in ("dim", "start", "end", "step")]
            shape = getattr(node, "_saved_self_sym_sizes", None)
            if shape is None or any(type(number) is not int for number in numbers):
                return x
            dim, *its = (_signed(number) for number in numbers)
            dim %= x.dim()
            if not dim or dim in slices or node in self._hooked:
                return x
            slices[dim] = slice(*its)
            ((node, _),) = node.next_functions
        if not slices or base.grad_fn is not node or base.shape != torch.Size(shape) or not self._wants_nodes():
            return x
        passage = Slice(base.shape, x.shape, [slices.get(dim, slice(None)) for dim in range(1, x.dim())])
        self._with_input.append((partial(setattr, passage, "before"), node))
        return _Node.apply(base, x.data, passage)  # not detach(): nobody changes what autograd may have kept

    def _look_before(self, outputs: Tensor) -> None:
        """Tell layers and passages what stands before their inputs, once the graph is there."""
        users: dict[Any, int] = {outputs.grad_fn: 0}
        reached = [outputs.grad_fn]
        while reached:
            for node, _ in reached.pop().next_functions:
                if node is None:
                    continue
                if node not in users:
                    users[node] = 0
                    reached.append(node)
                users[node] += 1

        def alone(node: Any) -> bool:
            """Whether gradients come to the node from one other, and nobody sees them on their way."""
            return users.get(node) == 1 and not getattr(node, "hooked", False) and node not in self._hooked

        for tell, node in self._with_input:
            passages = []
            while alone(node) and _forward_of(node) in (_Node, _InPlaceNode):
                passages.append(node.passage)
                ((node, _), *_) = node.next_functions
            layer = node.call if alone(node) and _forward_of(node) is _LayerNode else None
            tell(Before(passages, _takes_any_layout(node), layer))
        self._with_input.clear()
        self._hooked.clear()

    def recomputing(self) -> bool:
        return self._differentiating

    def recomputed(self, rule: Rule, out: Tensor) -> Tensor:
        return (out.detach() if rule.has_input_gradient() else out) + self._anchor

    def node(self, rule: Rule, arguments: Sequence[Any], out: Tensor, place: Place) -> Tensor:
        """The output of a call, behind our node; accumulates the call's input side."""
        self.calls[rule] += 1
        call = Call(rule, place, can_sample=self.consumer.takes_samples)
        with torch.no_grad(), without_autocast(out.device.type):  # the network's own
            seen = [batch_first(a.detach(), place) if isinstance(a, Tensor) else a for a in arguments]
            call.input_shape = seen[0].shape if isinstance(seen[0], Tensor) else None
            self.consumer.forward(call, seen)
        self._calls.append(call)
        self._counts[rule] += 1
        if isinstance(arguments[0], Tensor):
            x = self._unsliced(arguments[0])
            arguments = (x, *arguments[1:])
            self._with_input.append((partial(setattr, call, "before"), x.grad_fn))
        self._charge(arguments[0], out)
        if rule.has_input_gradient():
            return _LayerNode.apply(arguments[0], out.detach(), self._anchor, call, self)
        return _OutputTap.apply(out, self._anchor, call, self)

    def _charge(self, *tensors: Tensor) -> None:
        """A column's gradients of these exist at once, and as much again for temporaries."""
        self.charge_bytes(sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)))

    def charge_bytes(self, size: int) -> None:
        self.column_bytes = max(self.column_bytes, 2 * size)


def _signed(number: int) -> int:
    """A number that a node of the graph shows without its sign."""
    return number - (1 << 64) if number >> 63 else number


def _forward_of(node: Any) -> Any:
    """The class that a graph's node is of, where it is written in Python."""
    return getattr(node, "_forward_cls", None)


def _takes_any_layout(node: Any) -> bool:
    """Whether gradients may come to a graph's node in a layout of their own: elementwise work on two layouts at once is slow."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if node is None or _forward_of(node) in (_Node, _InPlaceNode, _LayerNode):
            continue
        if type(node).__name__ != "AddBackward0":
            return False
        further = {before for before, _ in node.next_functions} - seen
        seen |= further
        waiting += further
    return True


@contextmanager
def curvature_pass(model: nn.Module, rules: Sequence[Rule], memory_budget: int) -> Iterator[CurvaturePass]:
    """The passes of a fit over a model :func:`at_test_time` whose parameters and buffers are constants, for the duration of the context."""
    run = CurvaturePass(model, rules, memory_budget)
    _widen_heap()
    with at_test_time(model), requiring_grad([*run.parameters, *run.hyperparameters], False):
        try:
            yield run
        finally:
            run.release()


def _widen_heap() -> None:
    """With glibc, have blocks up to 32 MiB reused, as after any use of one of this size. It adapts to the largest block that was given back:
    before, gradients of a few MiB go back to the system when they are free, and their next pages are cleared one by one."""
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8, device="cpu")

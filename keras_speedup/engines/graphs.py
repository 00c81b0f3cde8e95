"""TensorFlow programs that run one or many steps of a model, shared by Keras 3 and Keras 2.

The step is traced once; every plan is made from that one trace, so that a further plan costs no tracing of the
model. A program is compiled in the background by pointing its captured variables at shadow copies, running it once
in a thread, and pointing it back at the real ones, where the first call finds the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..flavor import tensorflow
from .feed import Block

tf = tensorflow("keras_speedup on this Keras")


class Step:
    """One traced step of a model: flat leaves of one batch in, logs out.

    Args:
        function: Takes the leaves of a batch as positional arguments.
        specs: A `tf.TensorSpec` for each leaf.
        compiled: "whole" where XLA compiles the step (TensorFlow traces the gradient of a loop otherwise then), "parts"
            where it compiles what it can of it, or "".
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[Any], *, compiled: str = ""):
        self.specs = list(specs)

        def in_clusters(*leaves: Any) -> Any:
            with tf.xla.experimental.jit_scope():
                return function(*leaves)

        traced = tf.function(
            in_clusters if compiled == "parts" else function,
            autograph=False,
            jit_compile=True if compiled == "whole" else None,
        )
        self.concrete = traced.get_concrete_function(*self.specs)
        self._traced = traced  # keeps the variables that the trace created

    @property
    def variables(self) -> list[Any]:
        """The variables that the step reads or writes."""
        return list(self.concrete.graph.variables)

    def has_convolutions(self) -> bool:
        definition = self.concrete.graph.as_graph_def()
        nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        return any(node.op.startswith(("Conv", "DepthwiseConv")) for node in nodes)

    def can_loop(self) -> bool:
        """Returns whether K steps can be run in one call: every log is a tensor of known shape."""
        outputs = tf.nest.flatten(self.concrete.structured_outputs)
        # TensorSpecs in TensorFlow 2.15, symbolic tensors in 2.21
        known = all(isinstance(out, (tf.TensorSpec, tf.Tensor)) and out.shape.is_fully_defined() for out in outputs)
        return known and all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in self.specs)


class Program:
    """A plan made ready to run: `run(block)` trains on a block of batches and returns the logs of its last step.

    Attributes:
        plan: The plan's name.
        steps: The most steps that one call runs.
        batch_size: Rows of a batch, or None where any number will do.
    """

    def __init__(self, plan: str, step: Step, steps: int = 1, batch_size: int | None = None):
        self.plan, self.steps, self.batch_size = plan, steps, batch_size
        self.step = step
        self._concrete = step.concrete if plan == "graph" else self._build()

    def run(self, block: Block) -> Any:
        leaves = block.leaves
        if self.plan == "graph":
            return self._concrete(*leaves)
        if self.plan == "xla-loop":
            leaves = [_padded(leaf, self.steps * block.batch_size) for leaf in leaves]
        return self._concrete(tf.constant(block.steps, tf.int32), *leaves)

    def _build(self) -> Any:
        step, size = self.step.concrete, self.batch_size
        assert size is not None
        template = step.structured_outputs
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in tf.nest.flatten(template)]

        def loop(count: Any, *rows: Any) -> Any:
            def body(index: Any, *logs: Any) -> Any:
                batch = [_rows(leaf, index * size, size) for leaf in rows]
                return (index + 1, *tf.nest.flatten(step(*batch)))

            first = [tf.identity(zero) for zero in zeros]
            _, *logs = tf.while_loop(
                lambda index, *_: index < count, body, (tf.constant(0), *first), maximum_iterations=None
            )
            return tf.nest.pack_sequence_as(template, logs)

        specs = [tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for spec in self.step.specs]
        compiled = True if self.plan == "xla-loop" else None
        function = tf.function(loop, autograph=False, jit_compile=compiled)
        return function.get_concrete_function(tf.TensorSpec([], tf.int32), *specs)

    def on_shadow(self, variables: Sequence[Any], shadows: Sequence[Any], block: Block) -> Any:
        """Runs the program once on `shadows` in place of `variables`; the real ones are never touched."""
        real = list(self._concrete.captured_inputs)
        by_handle = {id(variable.handle): shadow.handle for variable, shadow in zip(variables, shadows, strict=True)}
        self._concrete.set_external_captures([by_handle.get(id(handle), handle) for handle in real])
        try:
            return self.run(block)
        finally:
            self._concrete.set_external_captures(real)


def shadow_copies(variables: Sequence[Any]) -> list[Any]:
    """Returns new variables with the values that `variables` hold now."""
    return [tf.Variable(variable.read_value(), trainable=False) for variable in variables]


def _rows(leaf: Any, start: Any, count: int) -> Any:
    rank = leaf.shape.rank
    size = [count, *leaf.shape[1:]]
    return tf.reshape(tf.slice(leaf, [start, *[0] * (rank - 1)], [count, *[-1] * (rank - 1)]), size)


def _padded(leaf: Any, rows: int) -> Any:
    """Returns `leaf` with rows of zeros up to `rows`; the loop never reads them."""
    missing = rows - int(leaf.shape[0])
    if missing <= 0:
        return leaf
    return tf.concat([leaf, tf.zeros([missing, *leaf.shape[1:]], leaf.dtype)], axis=0)

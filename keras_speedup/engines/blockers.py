"""What in a traced step keeps XLA from compiling it: the operation, and the layer that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Output shapes that depend on the data: outside what XLA documents as supported (shapes must be inferable without
# running the computation), whatever one release happens to compile.
_DATA_SHAPED = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where")

# Operations that act on the host: XLA would drop or refuse them, and a run on shadow state would repeat them.
_ON_THE_HOST = ("PrintV2", "Print", "EagerPyFunc", "PyFunc", "PyFuncStateless", "WriteFile")

_STRING = 7  # DT_STRING


@dataclass(frozen=True)
class Blocker:
    """An operation that XLA cannot compile.

    Attributes:
        operation: Its type, such as `"LookupTableFindV2"`.
        layer: The layer's name, or an empty string where the operation belongs to none.
        layer_class: The layer's class, or an empty string.
    """

    operation: str
    layer: str = ""
    layer_class: str = ""

    @property
    def is_on_the_host(self) -> bool:
        """Whether the operation does something outside the model, which a run on shadow state would repeat."""
        return self.operation in _ON_THE_HOST or self.operation.startswith("Write")

    def __str__(self) -> str:
        return f"{self.operation} (layer '{self.layer}', class {self.layer_class})" if self.layer else self.operation


def blockers(concrete: Any, layers: Sequence[Any]) -> list[Blocker]:
    """Returns the operations of a concrete function that XLA is known not to compile, each kind once a layer."""
    definition = concrete.graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    found = [_named(node.op, node.name, layers) for node in nodes if _blocks(node)]
    # Optimizers use these operations too, on rows of embeddings, in a form that XLA compiles.
    return list(dict.fromkeys(blocker for blocker in found if blocker.layer or blocker.operation not in _DATA_SHAPED))


def blocker_in(message: str, layers: Sequence[Any]) -> Blocker:
    """Returns the operation that XLA's error message names."""
    found = re.search(r"(\w+) \(No registered '\w+' OpKernel.*?\{\{node ([^}]+)\}\}", message, re.DOTALL)
    if found is None:
        found = re.search(r"\[?\{\{node ([^}]+)\}\}", message)
        node = found[1] if found else ""
        return _named(node.rsplit("/", 1)[-1] or message.splitlines()[0][:200], node, layers)
    return _named(found[1], found[2], layers)


def _blocks(node: Any) -> bool:
    if node.op in _DATA_SHAPED or node.op in _ON_THE_HOST or node.op.startswith(("LookupTable", "Write", "Decode")):
        return True
    if node.op in ("Placeholder", "Const", "Assert"):
        return False
    return any(_STRING in (value.type, *value.list.type) for value in node.attr.values())


def _named(operation: str, node: str, layers: Iterable[Any]) -> Blocker:
    """Returns the blocker with the innermost layer whose name is part of the node's."""
    scopes = node.split("/")
    by_name = {layer.name: layer for layer in layers}
    for scope in reversed(scopes):
        layer = by_name.get(scope) or by_name.get(re.sub(r"_\d+$", "", scope))
        if layer is not None:
            return Blocker(operation, layer.name, type(layer).__name__)
    return Blocker(operation)

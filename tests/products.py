"""The dtypes of the matrix products from which a model's outputs come, read from the backend's own trace."""

from __future__ import annotations

from keras_speedup.flavor import FLAVOR, keras

PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D", "Einsum", "_FusedMatMul")
DTYPES = {1: "float32", 14: "bfloat16", 19: "float16"}


def products_behind(model, inputs):
    """Returns the dtype of each matrix product that is the nearest one behind an output of `model`."""
    return {"jax": _jax, "torch": _torch}.get(FLAVOR, _tensorflow)(model, inputs)


def _tensorflow(model, inputs):
    import tensorflow as tf

    function = tf.function(model).get_concrete_function(tf.TensorSpec(inputs.shape, inputs.dtype))
    bodies = {body.signature.name: body for body in function.graph.as_graph_def().library.function}
    found, seen, pending = [], set(), [tensor.op for tensor in function.outputs]
    while pending:
        operation = pending.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in PRODUCTS:
            found.append(operation.inputs[0].dtype.name)
            continue
        inside = [
            DTYPES[node.attr["T"].type]
            for name in ("f", "body")
            if name in operation.node_def.attr
            for node in bodies[operation.node_def.attr[name].func.name].node_def
            if node.op in PRODUCTS
        ]
        if inside:
            found.extend(inside)
            continue
        pending.extend(tensor.op for tensor in operation.inputs)
    return found


def _jax(model, inputs):
    import jax

    with keras.StatelessScope():
        closed = jax.make_jaxpr(lambda x: jax.tree_util.tree_leaves(model(x)))(inputs)
    return _nearest(closed.jaxpr, set(range(len(closed.jaxpr.outvars))))[0]


def _nearest(jaxpr, outputs):
    """Returns the dtypes of the nearest products behind some outputs, and which inputs are reached without one."""
    found, wanted = [], {id(jaxpr.outvars[index]) for index in outputs}
    for equation in reversed(jaxpr.eqns):
        mine = {index for index, variable in enumerate(equation.outvars) if id(variable) in wanted}
        if not mine:
            continue
        name = equation.primitive.name
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        inner = [value for value in inner if hasattr(value, "eqns")]
        if name in ("dot_general", "conv_general_dilated"):
            found.append(str(equation.invars[0].aval.dtype))
        elif inner:
            body = inner[0]
            every = name in ("scan", "while")
            more, reached = _nearest(body, set(range(len(body.outvars))) if every else mine)
            found += more
            if not more:
                wanted |= {id(equation.invars[index]) for index in reached}
        else:
            wanted |= {id(variable) for variable in equation.invars}
    return found, {index for index, variable in enumerate(jaxpr.invars) if id(variable) in wanted}


def _torch(model, inputs):

    outputs = keras.tree.flatten(model(inputs))
    found, seen, pending = [], set(), [output.grad_fn for output in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in ("AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0"):
            found.append(str(node._input_metadata[0].dtype).removeprefix("torch."))
            continue
        pending.extend(parent for parent, _ in node.next_functions)
    return found

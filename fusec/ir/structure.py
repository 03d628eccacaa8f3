"""A key that tells whether two graphs compute the same on the same types, cheap enough for every candidate."""

from fusec.ir.graph import Graph, Value


def structure(body: Graph) -> tuple[object, ...]:
    """A key that two bodies share exactly if they compute the same on the same types."""
    numbers: dict[Value, int] = {v: i for i, v in enumerate(body.inputs)}
    key: list[object] = [v.type for v in body.inputs]
    for node in body.nodes:
        attributes = tuple(sorted(node.attributes.items(), key=str))
        key.append((node.op.name, tuple(numbers[v] for v in node.operands), attributes))
        for result in node.results:
            numbers[result] = len(numbers)
            key.append(result.type)
    key.append(tuple(numbers[v] for v in body.outputs))
    return tuple(key)

"""The union of two graphs: each node once, further ones after what they read."""

from fusec.ir.graph import Graph
from fusec.ir.union import union
from fusec.ir.verifier import verify_graph
from tests.tools.sample import tensor


def test_further_nodes_are_after_their_operands_and_read_by_nothing_of_the_graph() -> None:
    old, new = Graph("old"), Graph("new")
    x, gone = old.add_input(tensor(4), "x"), old.add_input(tensor(4), "gone")
    exp = old.add_node("exp", (x,))
    add = old.add_node("add", (exp.result, gone))
    old.set_outputs([add.result])
    y = new.add_input(tensor(4), "x")
    kept, other = new.add_node("exp", (y,)), new.add_node("neg", (y,))
    new.set_outputs([kept.result, other.result])

    whole, copies = union(new, [add], {x: y, exp.result: kept.result})
    verify_graph(whole)
    assert [node.op.name for node in whole] == ["exp", "add", "neg"]
    assert [v.name for v in whole.inputs] == ["x", "gone"]
    assert copies[add].operands == (copies[kept].result, whole.inputs[1])
    assert [v.producer for v in whole.outputs] == [copies[kept], copies[other]]
    assert set(copies) == {kept, other, add} and len(new) == 2

"""The history of a pass: its graph after each application, as if the pass had ended there."""

import json
from dataclasses import replace

import pytest

from fusec.config import Config
from fusec.debug.diff import diff_graphs
from fusec.history import History
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.parser import parse_graph
from fusec.ir.printer import positions_as_read
from fusec.passes import default_pipeline
from fusec.pipeline import Context, PassRecord
from tests.tools.sample import decoder


def compile_passes(apply: str = "") -> tuple[Graph, list[PassRecord]]:
    graph, context = decoder(3), Context(Config(record=True, apply=apply))
    default_pipeline(context.config).run(graph, context)
    return graph, context.records


def at_step(history: History, step: int) -> Graph:
    """Return the graph at a step."""
    operands = {}
    for node, until, refs in history.operands:
        if step < until and (node not in operands or until < operands[node][0]):
            operands[node] = (until, refs)
    out, nodes, known = Graph(), history.graph.nodes, dict[tuple[int, int], Value]()
    place = {node: i for i, node in enumerate(nodes)}
    known |= {(-1, v.index): out.add_input(v.type, v.name) for v in history.graph.inputs}
    alive = [i for i, (born, died) in enumerate(history.lives) if born <= step < died]

    def references(i: int) -> tuple[tuple[int, int], ...]:
        now = tuple((place[v.producer] if v.producer else -1, v.index) for v in nodes[i].operands)
        return operands[i][1] if i in operands else now

    def add(i: int) -> None:
        if (i, 0) in known:
            return
        for ref, _ in references(i):
            assert ref == -1 or ref in alive
            if ref >= 0:
                add(ref)
        node: Node = nodes[i]
        new = out.add_node(
            node.op.name,
            [known[r] for r in references(i)],
            dict(node.attributes),
            types=[r.type for r in node.results],
            sources=node.sources,
        )
        known.update({(i, j): r for j, r in enumerate(new.results)})

    for i in alive:
        add(i)
    return with_all_results(out)


def with_all_results(graph: Graph) -> Graph:
    """Return a copy whose results are all values that nothing reads."""
    graph = graph.copy()
    graph.set_outputs([v for node in graph for v in node.results if not v.users])
    return graph


@pytest.fixture(scope="module")
def records() -> list[PassRecord]:
    return compile_passes()[1]


def test_passes_of_several_applications_have_a_history(records: list[PassRecord]) -> None:
    assert {r.name: bool(r.history) for r in records if r.changed}["raise"]
    assert all(bool(r.history) == (r.changed and r.applications > 1) for r in records)


def test_each_step_is_the_graph_of_a_compile_that_ends_there(records: list[PassRecord]) -> None:
    compared = 0
    for number, record in enumerate(records):
        if not record.history or record.name == "canonicalize":  # which merges equal nodes after the last application
            continue
        history = record.history()
        for step in (0, 1, 2, len(history.numbers) // 2, len(history.numbers)):
            last = history.numbers[step - 1] if step else history.numbers[0] - 1
            until = compile_passes(f"0..{last}")[1][number]
            difference = diff_graphs(at_step(history, step), with_all_results(until.graph or parse_graph(until.after)))
            assert not difference, (record.name, step, difference.summary())
            compared += 1
    assert compared >= 10


def test_the_last_step_is_the_graph_after_the_pass(records: list[PassRecord]) -> None:
    for record in records:
        if record.history and record.graph:
            history = record.history()
            assert not diff_graphs(at_step(history, len(history.numbers)), with_all_results(record.graph))
            alive = [i for i, (_, died) in enumerate(history.lives) if died > len(history.numbers)]
            assert sorted(history.after[i] for i in alive) == list(range(len(record.graph)))


def test_a_history_is_json_data(records: list[PassRecord]) -> None:
    found = [record.history() for record in records if record.history]
    assert any(history.operands for history in found)
    for history in found:
        read = History.from_json(json.loads(json.dumps(history.to_json())))
        assert str(read.graph) == str(history.graph)
        assert replace(read, graph=history.graph) == history.as_read


def test_equal_numbers_are_one_node_of_a_graph_that_is_read(records: list[PassRecord]) -> None:
    graph = decoder(1)
    x = graph.inputs[0]
    graph.set_outputs([graph.add_node("mul", [x, graph.constant(2.0, x.dtype)]).result for _ in range(2)])
    for original in (*(r.graph for r in records if r.graph), graph):
        read = parse_graph(str(original))
        found = positions_as_read(original)
        assert {found[n]: n.op.name for n in found} == dict(enumerate(n.op.name for n in read.nodes))
        assert positions_as_read(read) == {node: i for i, node in enumerate(read.nodes)}
    assert len(read) < len(graph)


def test_a_graph_records_nothing_after_its_pass() -> None:
    graph, _ = compile_passes()
    assert graph.journal is None

"""Differences between graphs: nothing for equal ones, and what a pass did for others."""

import json
import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fusec.debug.diff import diff_graphs, diff_lines, fingerprint
from fusec.ir.graph import Graph, Source
from fusec.ir.parser import parse_graph
from tests.tools.sample import decoder, tensor
from tests.tools.test_cli import run


def chain(ops: list[str]) -> Graph:
    graph = Graph("chain")
    value = graph.add_input(tensor(4), "x")
    for op in ops:
        value = graph.add_node(op, (value,)).result
    graph.set_outputs([value])
    return graph


OPS = st.lists(st.sampled_from(["neg", "exp", "sqrt", "tanh"]), min_size=1, max_size=12)


@given(OPS)
@settings(max_examples=30, deadline=None)
def test_equal_graphs_have_no_difference(ops: list[str]) -> None:
    assert not diff_graphs(chain(ops), chain(ops))
    assert fingerprint(chain(ops)) == fingerprint(chain(ops))


@given(OPS, OPS)
@settings(max_examples=40, deadline=None)
def test_every_node_is_kept_added_or_removed(one: list[str], two: list[str]) -> None:
    before, after = chain(one), chain(two)
    diff = diff_graphs(before, after)
    assert len(diff.pairs) + len(diff.added) == len(after)
    assert len(diff.pairs) + len(diff.removed) == len(before)
    assert all(new.op is old.op for new, old in diff.pairs.items())


def test_insertion_is_one_node() -> None:
    diff = diff_graphs(chain(["neg", "exp", "sqrt"]), chain(["neg", "exp", "tanh", "sqrt"]))
    assert [n.op.name for n in diff.added] == ["tanh"]
    assert not diff.removed and [n.op.name for n in diff.rewired] == ["sqrt"]
    assert diff.summary() == "+1 ~1"


def test_fusing_removes_primitives_and_adds_regions() -> None:
    diff = diff_graphs(decoder(2), decoder(2, fused=True))
    assert {n.op.name for n in diff.added} == {"region"} and len(diff.added) == 6
    assert not any(n.is_op("contraction") for n in diff.removed)


def changed(before: str, after: str) -> list[str]:
    lines = diff_lines(parse_graph(before), parse_graph(after))
    return [line for line in lines[2:] if line[0] in "+-"]


PLAIN = """graph g(%x: f32[4]) {{
  {first}%1: f32[4] = exp(%x)
  %2: f32[4] = neg(%1)
  return %2
}}
"""
NESTED = """graph g(%x: f32[4]) {{
  {first}%1: f32[4] = region(%x) {{kind="kernel", label="k"}} b(%a: f32[4]) {{
    {inner}%5: f32[4] = exp(%a)
    %6: f32[4] = tanh(%5)
    return %6
  }}
  %2: f32[4] = neg(%1)
  return %2
}}
"""
SINE, INNER = "%0: f32[4] = sin(%x)\n", "%4: f32[4] = sin(%a)\n"


def test_numbers_alone_are_no_difference() -> None:
    for text in (PLAIN, NESTED):
        plain = text.format(first="", inner="")
        assert not changed(plain, re.sub(r"%(\d)", lambda m: f"%{int(m[1]) + 10}", plain))


def test_a_node_that_is_inserted_is_one_line() -> None:
    cases = [(PLAIN, SINE, "", "sin(%x)"), (NESTED, SINE, "", "sin(%x)"), (NESTED, "", INNER, "sin(%a)")]
    for text, first, inner, shown in cases:
        before, after = text.format(first="", inner=""), text.format(first=first, inner=inner)
        (line,) = changed(before, after)
        assert line[0] == "+" and shown in line
        (line,) = changed(after, before)
        assert line[0] == "-" and shown in line


def test_a_new_node_has_no_name_of_another() -> None:
    exp, old_reader, sin, reader = changed(PLAIN.format(first=""), PLAIN.format(first="").replace("exp", "sin"))
    assert "%0: f32[4] = exp" in exp and "%3: f32[4] = sin" in sin
    assert "%1: f32[4] = neg(%0)" in old_reader and "%1: f32[4] = neg(%3)" in reader


def test_what_takes_the_place_of_a_named_value_keeps_the_name() -> None:
    text = PLAIN.format(first="").replace("%1", "%y")
    old, new = changed(text, text.replace("exp(%x)", "sin(%x)"))
    assert "%y: f32[4] = exp" in old and "%y: f32[4] = sin" in new


def test_text_of_files(tmp_path: Path) -> None:
    for name, first in (("a", ""), ("b", SINE)):
        (tmp_path / f"{name}.fir").write_text(PLAIN.format(first=first))
    a, b = str(tmp_path / "a.fir"), str(tmp_path / "b.fir")
    assert run("diff", a, a, "--text").stdout == "the same\n"
    lines = run("diff", a, b, "--text").stdout.splitlines()
    assert [line for line in lines[2:] if line[0] in "+-"] == [line for line in lines[2:] if "sin(%x)" in line]
    assert json.loads(run("diff", a, b, "--text", "--json").stdout) == lines
    assert run("diff", a, "models:llama/tiny", "--text").exit_code == 2
    for arguments in (["diff", "-", "-", "--text"], ["diff", "-", "-"], ["view", "-", "--before", "-"]):
        done = run(*arguments)
        assert done.exit_code == 2 and "standard input can be read once" in done.output


def test_lines_that_moved_in_the_model_s_file_are_no_difference() -> None:
    before, after = decoder(2), decoder(2)
    for node in after.nodes:
        node.sources = tuple(replace(source, line=source.line + 1) for source in node.sources)
    assert not diff_graphs(before, after)


def test_a_graph_that_is_read_back_is_the_same() -> None:
    """The text of a graph has no source of a constant, which regions contain, too."""
    graph = decoder(2, fused=True)
    for node in (n for outer in graph.nodes for n in (outer, *(outer.body.nodes if outer.is_op("region") else ()))):
        node.sources = node.sources or (Source("norm", "model.py", 3, "aten.mean", "x.mean(-1)"),)
    assert not diff_graphs(parse_graph(str(graph)), graph)

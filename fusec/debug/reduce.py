"""Reduce a graph that fails: fewer operations, smaller sizes and synthetic inputs, while it fails in the same way.

Operations are left out by delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
2002): the values that the remaining ones read become inputs, with the values that they had.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusec.config import Config
from fusec.debug.capture import captured_calls
from fusec.debug.synthetic import SyntheticTensor, describe, draw
from fusec.debug.trial import Trial
from fusec.errors import FusecError, GraphError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.verifier import verify_graph
from fusec.rewriting.driver import cut
from fusec.verify.shrink import scaled_down

SECONDS = 300.0
"""The search ends after this time, with the smallest graph so far."""


class NothingFails(FusecError):
    """A graph or model that is right, so that there is nothing to reduce."""


@dataclass(frozen=True)
class Case:
    """A graph and its inputs."""

    graph: Graph
    inputs: tuple[Any, ...]
    drawn: tuple[Any, ...] = ()
    """The description of the inputs, where they are synthetic."""

    @property
    def size(self) -> int:
        """Number of operations."""
        return sum(not node.has(Trait.SOURCE) for node in self.graph.nodes)


@dataclass
class Reduced:
    """The smallest case that was found."""

    case: Case
    failure: str
    """The failure of the original graph."""
    operations: int
    """Operations of the original graph."""
    tests: int
    options: Mapping[str, Any] = field(default_factory=dict)
    declarations: Sequence[str] = ()
    """The texts of Python files that declare fusions and rewrites of the user's."""

    def script(self, path: Path) -> list[Path]:
        """Write a stand-alone script, ``python PATH``, that exits with 1 while the graph fails; return all files.

        Inputs that have to have their recorded values are written beside it, with the suffix ``.pt``, and files that
        declare fusions as ``PATH_declarations.py``.
        """
        import torch

        path.write_text(_script(self), encoding="utf-8")
        files = [path]
        if self.case.inputs and not self.case.drawn:
            files.append(path.with_suffix(".pt"))
            torch.save(list(self.case.inputs), files[-1])
        for number, text in enumerate(self.declarations):
            files.append(path.with_name(f"{path.stem}_declarations{number or ''}.py"))
            files[-1].write_text(text, encoding="utf-8")
        return files


def failing_case(
    model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any], fails: "Callable[[Case], str]",
    *, dynamic: bool = False, train: bool = False,
) -> Case:  # fmt: skip
    """Return the first graph of a model that fails, with the inputs that the model passes to it.

    Raises:
        NothingFails: where none does.
    """
    calls = captured_calls(model, inputs, keywords, dynamic=dynamic, train=train)
    for graph, given in calls:
        if fails(case := Case(graph, tuple(given))):
            return case
    raise NothingFails("the model is right", why=f"none of its {len(calls)} graphs fails")


def fails_with(config: Config) -> Callable[[Case], str]:
    """Return the oracle that compiles a graph, runs it, and compares it with eager and float64.

    It returns how the graph fails: ``wrong`` or the name of an exception; "" where it is right, or eager raises.
    """

    def fails(case: Case) -> str:
        try:
            trial = Trial(case.graph, case.inputs, config, lambda text: None)
        except Exception:
            return ""  # eager cannot run it
        text, _ = trial.wrong()
        return text and (text.partition(":")[0] if text[0].isupper() else "wrong")

    return fails


def reduce(
    case: Case, fails: Callable[[Case], str], *, progress: Callable[[str], None] = lambda text: None,
    seconds: float = SECONDS,
) -> Reduced:  # fmt: skip
    """Return a smaller case that fails as this one does.

    Args:
        case: a graph that fails.
        fails: returns how a case fails, or "" where it does not; any other failure is not the one searched for.
        progress: called with a message for each smaller case.
        seconds: the most time.

    Raises:
        NothingFails: where the case does not fail.
    """
    failure = fails(case)
    if not failure:
        raise NothingFails("the graph is right", why="the failure is not reproduced by it alone")
    search, found, before = _Search(fails, failure, progress, time.monotonic() + seconds), case, None
    while found is not before and not search.is_over:
        before = found
        for smaller in (search.fewer_operations, search.without_operations, search.smaller_sizes):
            found = smaller(found)
    return Reduced(search.synthetic(found), failure, case.size, search.tests)


class _Search:
    def __init__(self, fails: Callable[[Case], str], failure: str, progress: Callable[[str], None], end: float) -> None:
        self.fails, self.failure, self.progress, self.end, self.tests = fails, failure, progress, end, 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def holds(self, case: Case | None) -> bool:
        """Return whether a case fails in the same way."""
        if case is None or self.is_over:
            return False
        self.tests += 1
        if self.fails(case) != self.failure:
            return False
        self.progress(f"{case.size} operations, {_elements(case):,} elements of inputs ({self.tests} tests)")
        return True

    def fewer_operations(self, case: Case) -> Case:
        """Leave out operations, in halves, quarters and so on."""
        values = _values(case)
        kept = [node for node in case.graph.nodes if not node.has(Trait.SOURCE)]
        best, parts = case, 2
        while len(kept) > 1 and not self.is_over:
            length = -(-len(kept) // parts)
            chunks = [kept[i : i + length] for i in range(0, len(kept), length)]
            rests = [[n for n in kept if n not in chunk] for chunk in map(set, chunks)] if len(chunks) > 2 else []
            for position, candidate in enumerate([*chunks, *rests]):
                if self.holds(smaller := _part(case, candidate, values)):
                    assert smaller is not None
                    kept, best = candidate, smaller
                    parts = 2 if position < len(chunks) else max(len(chunks) - 1, 2)
                    break
            else:
                if length == 1:
                    break
                parts = min(len(kept), 2 * len(chunks))
        return best

    def without_operations(self, case: Case) -> Case:
        """Replace operations by an operand of the same type, one by one, and keep one output where one is enough."""
        for position in reversed(range(len(case.graph.nodes))):
            while self.holds(smaller := _bypassed(case, position)):
                assert smaller is not None
                case = smaller
        for output in range(len(case.graph.outputs) if len(case.graph.outputs) > 1 else 0):
            if self.holds(smaller := _with_output(case, output)):
                assert smaller is not None
                return smaller
        return case

    def smaller_sizes(self, case: Case) -> Case:
        """Divide sizes, on inputs that are drawn."""
        while True:
            for graph in scaled_down(case.graph):
                if self.holds(smaller := _resized(case, graph)):
                    assert smaller is not None
                    case = smaller
                    break
            else:
                return case

    def synthetic(self, case: Case) -> Case:
        """Return a case with drawn inputs, if it fails with these as well."""
        described = tuple(case.drawn or describe(case.inputs))
        if len(described) < len(case.inputs):
            return case
        drawn = Case(case.graph, tuple(draw(described)), described)
        return drawn if self.fails(drawn) == self.failure else replace(case, drawn=())


def _elements(case: Case) -> int:
    return sum(getattr(x, "numel", lambda: 1)() for x in case.inputs)


def _values(case: Case) -> dict[Value, Any]:
    """Return every value of a run in eager."""
    from fusec.reference.interpreter import evaluate

    graph = case.graph.copy()
    results = [r for node in graph.nodes for r in node.results]
    graph.set_outputs(results)
    found = evaluate(graph, list(case.inputs))
    mine = (r for node in case.graph.nodes for r in node.results)
    return {**dict(zip(case.graph.inputs, case.inputs, strict=True)), **dict(zip(mine, found, strict=True))}


def _part(case: Case, kept: Sequence[Node], values: Mapping[Value, Any]) -> Case | None:
    """Return the case of some operations; constants that they read come with them."""
    inside = set(kept)
    for node in kept:
        inside.update(v.producer for v in node.operands if v.producer is not None and v.producer.has(Trait.SOURCE))
    nodes = [node for node in case.graph.nodes if node in inside]
    outputs = [r for n in kept for r in n.results if r in case.graph.outputs or any(u not in inside for u in r.users)]
    inputs = dict.fromkeys(v for n in nodes for v in n.operands if v.producer not in inside)
    return _built(lambda: cut(list(inputs), nodes, outputs), [values[v] for v in inputs])


def _bypassed(case: Case, position: int) -> Case | None:
    """Return a case with an operand of an operation in place of its result, where both have one type."""
    graph = case.graph.copy()
    node = graph.nodes[position] if position < len(graph.nodes) else None
    if node is None or len(node.results) != 1:
        return None
    same = next((v for v in node.operands if v.type == node.result.type), None)
    if same is None:
        return None
    graph.replace_value(node.result, same)
    return _trimmed(graph, case.inputs)


def _with_output(case: Case, output: int) -> Case | None:
    """Return a case with one of its outputs."""
    graph = case.graph.copy()
    graph.set_outputs([graph.outputs[output]])
    return _trimmed(graph, case.inputs)


def _resized(case: Case, graph: Graph) -> Case | None:
    """Return a case of other sizes; its inputs are drawn with the statistics of the present ones."""
    described = list(case.drawn or describe(case.inputs))
    if len(described) < len(case.inputs):
        return None
    for i, (value, one) in enumerate(zip(graph.inputs, described, strict=True)):
        if isinstance(one, SyntheticTensor):
            shape, stride = value.tensor.shape, value.tensor.strides
            if not all(isinstance(n, int) for n in (*shape, *stride)):
                return None
            described[i] = replace(one, shape=tuple(map(int, shape)), stride=tuple(map(int, stride)))
    return Case(graph, tuple(draw(described)), tuple(described))


def _trimmed(graph: Graph, inputs: Sequence[Any]) -> Case | None:
    """Return a case without operations and inputs that no output depends on."""
    graph.erase_dead()
    read = [(v, x) for v, x in zip(graph.inputs, inputs, strict=True) if v.users or v in graph.outputs]
    return _built(lambda: cut([v for v, _ in read], graph.nodes, graph.outputs), [x for _, x in read])


def _built(make: Callable[[], Graph], inputs: Sequence[Any]) -> Case | None:
    """Return the case of a graph, or None where there is no such graph."""
    try:
        graph = make()
        verify_graph(graph)
    except GraphError:
        return None
    return Case(graph, tuple(inputs)) if graph.outputs else None


def _script(found: Reduced) -> str:
    """Return the text of a stand-alone script."""
    case = found.case
    inputs = ",\n".join(f"    {one!r}" for one in case.drawn)
    how = f"[\n{inputs},\n]" if case.drawn else 'torch.load(Path(__file__).with_suffix(".pt"))'
    stored, declared = bool(case.inputs) and not case.drawn, bool(found.declarations)
    imports = ["from pathlib import Path"] if stored or declared else []
    imports += ["", "import torch"] if stored else []
    return _TEXT.format(
        failure=found.failure, size=case.size, operations=found.operations, graph=str(case.graph).strip(),
        inputs=how if case.drawn or case.inputs else "[]", options=dict(found.options),
        imports="".join(f"{line}\n" for line in (*imports, "") if imports),
        declared=_DECLARED if declared else "[]",
    )  # fmt: skip


_TEXT = '''"""A graph that fails ({failure}): {size} of {operations} operations. Exits with 1 while it does."""

{imports}from fusec.debug.reduce import reproduce
from fusec.debug.synthetic import SyntheticTensor  # noqa: F401

GRAPH = """
{graph}
"""
OPTIONS = {options}
INPUTS = {inputs}
DECLARATIONS = {declared}

if __name__ == "__main__":
    raise SystemExit(reproduce(GRAPH, INPUTS, OPTIONS, DECLARATIONS))
'''
_DECLARED = 'sorted(Path(__file__).parent.glob(f"{Path(__file__).stem}_declarations*.py"))'


def reproduce(text: str, inputs: Sequence[Any], options: Mapping[str, Any], declarations: Sequence[Path] = ()) -> int:
    """Compile a graph, run it on inputs or descriptions of them, print how it fails, and return 1 if it does.

    Args:
        text: the graph.
        inputs: its inputs, or their descriptions.
        options: those of the compile.
        declarations: Python files to run before, for the fusions and rewrites that they declare.
    """
    from fusec.ir.parser import parse_graph

    for path in declarations:
        _run_file(path)
    trial = Trial(parse_graph(text), draw(inputs), Config.from_options(None, options), lambda text: None)
    wrong, _ = trial.wrong()
    print(wrong or "right")
    return 1 if wrong else 0


def _run_file(path: Path) -> None:
    """Run a Python file as a module of its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where types that are written as text are looked up
    spec.loader.exec_module(module)

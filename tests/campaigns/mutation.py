"""Mutants of the compiler's own source: each is one small mistake in one place, made mechanically."""

import ast
import copy
import difflib
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

SCOPE = (
    "fusec/rewriting/matcher.py", "fusec/rewriting/driver.py", "fusec/rewriting/application.py",
    "fusec/rewriting/pattern.py", "fusec/rewriting/match.py", "fusec/rewriting/index.py",
    "fusec/rewriting/sampling.py",
    "passes/canonicalize/*.py", "passes/raising/*.py", "passes/fusion/*.py", "passes/decompose_sdpa.py",
    "passes/fold_bias.py", "passes/grouping/*.py", "passes/declared.py", "passes/patterns.py",
    "fusec/analysis/*.py", "fusec/loops/*.py",
    "codegen/tile/*.py", "codegen/cpp/schedules/*.py", "codegen/triton/schedules/*.py",
    "codegen/program/launch_batch.py", "codegen/program/memory_planning.py", "codegen/program/vendor_calls.py",
    "codegen/cpp/printer.py", "codegen/cpp/statements.py", "codegen/cpp/expressions.py", "codegen/cpp/operations.py",
    "codegen/triton/printer.py", "codegen/triton/statements.py", "codegen/triton/arithmetic.py",
    "codegen/triton/signature.py",
)  # fmt: skip
"""What is mutated: rewriting, rules and declarations, analyses, schedules and printers."""

NOT_JUDGED: dict[str, frozenset[str]] = {
    "fusec/analysis/cost.py": frozenset("*"),
    "fusec/analysis/machine.py": frozenset("*"),
    "fusec/rewriting/match.py": frozenset({"_RARE", "_rarity", "is_distinctive"}),
    "fusec/loops/recomputation.py": frozenset("*"),
    "fusec/loops/attention.py": frozenset({"FEW_QUERIES", "_MAX_NODES"}),
    "fusec/loops/indexing.py": frozenset({"_MAX_SPLITS"}),
    "passes/grouping/joins.py": frozenset({"_MAX_NODES", "_remark_unfused"}),
    "passes/grouping/kernel_regions.py": frozenset({"_label", "_remark"}),
    "codegen/tile/rows.py": frozenset({"_DEAR", "_MAX_SCRATCH"}),
    "codegen/tile/chains.py": frozenset({"_LENGTH", "_TILES"}),
    "codegen/triton/schedules/heuristics.py": frozenset("*"),
}
"""What only decides how fast something is, or what a remark says, by file and name; ``*`` is the whole file."""

_SILENT_CALLS = frozenset({"add_remark", "debug", "info", "warning", "near_miss", "ScheduleError", "NotAffine"})
_SILENT_FUNCTIONS = frozenset({"__repr__", "__str__", "describe"})
_COMMUTATIVE = frozenset(
    "max min same_size same_shape same_values broadcast isinstance issuperset union fail is_op simplifies".split()
)

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Pow: ast.Mult, ast.BitXor: ast.BitOr,
}  # fmt: skip
_ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift, ast.Pow)
_NAMES = {"any": "all", "all": "any", "min": "max", "max": "min", "Min": "Max", "Max": "Min"}


@dataclass(frozen=True)
class Mutant:
    """One mistake: some bytes of one file replaced."""

    path: str
    function: str
    """The function or constant it is in."""
    operator: str
    """What kind of mistake it is."""
    start: int
    stop: int
    text: str
    """What stands there instead."""
    lines: range
    """Of the statement it is in."""
    key: str
    """The same as long as the function is, wherever it lies in the file."""

    def applied(self, source: bytes) -> bytes:
        """The file with the mistake."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def changes(self, source: bytes) -> bool:
        """Whether the file still is Python, and another."""
        try:
            ast.parse(self.applied(source))
        except SyntaxError:
            return False
        return self.applied(source) != source

    def difference(self, source: bytes) -> str:
        """The mistake as a diff."""
        before, after = source.decode().splitlines(), self.applied(source).decode().splitlines()
        return "\n".join(list(difflib.unified_diff(before, after, self.path, self.path, n=2, lineterm=""))[2:])


def files(root: Path) -> list[str]:
    """The files that are mutated."""
    found = (p for pattern in SCOPE for p in sorted(root.glob(pattern)))
    return [name for p in found if "*" not in NOT_JUDGED.get(name := p.relative_to(root).as_posix(), ())]


def sampled(root: Path, count: int, seed: int) -> list[Mutant]:
    """Mutants of all files, the more of one the more places it has; the same for the same sources and seed."""
    places = {name: mutants(name, (root / name).read_bytes()) for name in files(root)}
    total = sum(map(len, places.values()))
    found: list[Mutant] = []
    for name, all_ in places.items():
        source, share = (root / name).read_bytes(), max(1, round(count * len(all_) / total))
        drawn = random.Random(f"{seed} {name}").sample(all_, len(all_))
        found += islice((m for m in drawn if m.changes(source)), share)
    random.Random(seed).shuffle(found)
    return found


@cache
def mutants(path: str, source: bytes) -> list[Mutant]:
    """Every place of a file with every mistake that can be made there."""
    tree = ast.parse(source)
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    seen: Counter[tuple[str, str, str, str]] = Counter()
    found = []
    for site in _Sites(NOT_JUDGED.get(path, frozenset())).of(tree):
        node = site.node
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, stop = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
        try:
            text = ast.unparse(site.replacement)
        except ValueError:  # a quote within a quote
            continue
        if isinstance(site.replacement, ast.expr) and not isinstance(site.replacement, _ATOMS):
            text = f"({text})"
        before = source[start:stop].decode()
        what = (site.function, site.operator, " ".join(before.split()), text)
        seen[what] += 1
        key = hashlib.sha256("\0".join((path, *what, str(seen[what]))).encode()).hexdigest()[:12]
        found.append(Mutant(path, site.function, site.operator, start, stop, text, site.lines, key))
    return found


_ATOMS = (ast.Constant, ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.JoinedStr, ast.Dict, ast.Tuple)


@dataclass(frozen=True)
class _Site:
    node: ast.expr | ast.stmt
    replacement: ast.AST
    operator: str
    function: str
    lines: range


class _Sites:
    """Walks a file and gives every place where a mistake can be made."""

    def __init__(self, left_out: frozenset[str]) -> None:
        self.left_out = left_out
        self.inside: list[str] = []
        self.lines = range(0)

    def of(self, node: ast.AST) -> Iterator[_Site]:
        """The places in a node and all below it."""
        name = _named(node)
        if name in self.left_out or name in _SILENT_FUNCTIONS or _is_silent(node):
            return
        if name:
            self.inside.append(name)
        function = ".".join(self.inside) or "module"
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            self.lines = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
        if isinstance(node, ast.expr | ast.stmt):
            yield from (_Site(node, new, operator, function, self.lines) for operator, new in _mistakes(node))
        for child in _children(node):
            yield from self.of(child)
        if name:
            self.inside.pop()


def _named(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) else ""


def _is_silent(node: ast.AST) -> bool:
    """Whether a node says something to people, or only checks what the code takes for granted."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name | ast.Compare):
        words = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        if words & {"TYPE_CHECKING", "__name__"}:
            return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Call):
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        remark = name == "add" and "remarks" in ast.unparse(called)
        return remark or name in _SILENT_CALLS
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "message":
        return True
    return isinstance(node, ast.keyword) and node.arg in ("strict", "why", "fix", "reason", "sources")


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.JoinedStr):
            continue  # Python gives no places inside of a formatted text
        if isinstance(value, ast.AST):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, ast.AST))


def _mistakes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of a node: the kind of mistake, and the node with it."""
    if isinstance(node, ast.stmt):
        yield from _wrong_statements(node)
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "and for or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for i in range(len(node.values)):
            rest = [v for j, v in enumerate(node.values) if j != i]
            yield "condition dropped", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not dropped" if isinstance(node.op, ast.Not) else "sign dropped", node.operand
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.BinOp):
        if type(node.op) in _ARITHMETIC and not _is_text(node):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        if isinstance(node.op, _ORDERED):
            yield "operands swapped", ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.Constant):
        yield from (("number", ast.Constant(other)) for other in _other_numbers(node.value))
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _NAMES:
        yield f"{_NAMES[node.id]} for {node.id}", ast.Name(_NAMES[node.id])
    elif isinstance(node, ast.Call):
        yield from _swapped_arguments(node)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load):
        lower, upper, step = node.slice.lower, node.slice.upper, node.slice.step
        for there, less in ((lower, ast.Slice(None, upper, step)), (upper, ast.Slice(lower, None, step))):
            if there is not None:
                yield "bound dropped", ast.Subscript(node.value, less)
    elif isinstance(node, ast.Dict):
        for i, (a, b) in enumerate(zip(node.values, node.values[1:], strict=False)):
            if None not in node.keys and ast.dump(a) != ast.dump(b):
                yield "entries swapped", ast.Dict(node.keys, [*node.values[:i], b, a, *node.values[i + 2 :]])
    elif isinstance(node, ast.JoinedStr):
        places = [i for i, part in enumerate(node.values) if isinstance(part, ast.FormattedValue)]
        for i, j in pairwise(places):
            if ast.dump(node.values[i]) != ast.dump(node.values[j]):
                parts = list(node.values)
                parts[i], parts[j] = parts[j], parts[i]
                yield "text's values swapped", ast.JoinedStr(parts)
    elif isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
        for i, loop in enumerate(node.generators):
            for j in range(len(loop.ifs)):
                other = copy.deepcopy(loop)
                del other.ifs[j]
                fewer = copy.copy(node)
                fewer.generators = [*node.generators[:i], other, *node.generators[i + 1 :]]
                yield "condition dropped", fewer


def _wrong_statements(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Continue | ast.Break | ast.AugAssign):
        yield "statement dropped", ast.Pass()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_silent(node.value):
        yield "statement dropped", ast.Pass()
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute):
        yield "statement dropped", ast.Pass()
    elif isinstance(node, ast.If) and not node.orelse:
        yield "condition dropped", ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _other_numbers(value: object) -> Sequence[bool | int | float]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1) if value > 0 else (value + 1,)
    if isinstance(value, float):
        return (value * 2 or 1.0,)
    return ()


def _swapped_arguments(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in _COMMUTATIVE or any(isinstance(a, ast.Starred) for a in node.args):
        return
    for i, (a, b) in enumerate(zip(node.args, node.args[1:], strict=False)):
        plain = not any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in (a, b))
        if plain and ast.dump(a) != ast.dump(b):
            yield "arguments swapped", ast.Call(node.func, [*node.args[:i], b, a, *node.args[i + 2 :]], node.keywords)

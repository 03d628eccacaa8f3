"""Does the model still run, right and with the reason told, whichever function of fusec raises during a compile?

``python -m bench.injection``
"""

import argparse
import gc
import importlib
import inspect
import logging
import multiprocessing
import pkgutil
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import fusec
from bench.harness import progress, report
from bench.record import write_result
from fusec import dynamo
from fusec.config import Config
from fusec.frontend.lowering import HANDLERS
from fusec.outcomes import SUFFIX
from fusec.pipeline import Pass

ROOTS = {str(Path(fusec.__file__).parent / name) for name in ("", "passes", "codegen")}
SOURCES = tuple({str(Path(root).resolve()) + "/" for root in ROOTS} | ROOTS)
NET = ("_compile", "_fall_back", "_run_module", "_as_it_came", "compile_through_aot", "boxed", "is_dynamos", "custom")
"""Functions that fall back themselves: nobody catches them."""
PLANTED = "planted by bench.injection"
FORK = multiprocessing.get_context("fork")
SECONDS = 300
Key: TypeAlias = tuple[str, int, str]
"""File, line and name of a function: what names its code across processes."""


class Planted(RuntimeError):
    """What an injected function raises."""


_raised: list[str] = []


def fire() -> None:
    """Raise, and take note of it."""
    _raised.append(PLANTED)
    raise Planted(PLANTED)


def _raise(*args: Any, **keywords: Any) -> Any:  # runs with the globals of the function that it replaces
    __import__("bench.injection", fromlist=["fire"]).fire()


class Model(nn.Module):
    """A layer of a decoder with a cache, and some operations around it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.register_buffer("cache", torch.zeros(1, 2, 7, 4), persistent=False)

    cache: Tensor

    def forward(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Several kernels, a write in place, a call of ATen, and views."""
        x = self.table(tokens)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if not torch.is_grad_enabled():
            self.cache.index_copy_(2, at, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(y)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        z = F.gelu(self.conv(x.mT).mT) + torch.cat([x[:, 1:], x[:, :1]], 1).cumsum(1)
        w = torch.where(z > 0, z, z.sin()).softmax(-1)
        transformed: Tensor = torch.fft.rfft(x)
        return w, w.amax(-1).clamp(min=0.1), transformed.abs(), self.cache * 2


def pointwise(tokens: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """What is built anew in each run."""
    return ((tokens * 0.5).exp() + at.sum(),)


@dataclass(frozen=True)
class Workload:
    """What is compiled while something raises."""

    name: str
    function: Callable[[], Callable[..., tuple[Tensor, ...]]]
    config: Config = field(default_factory=Config)
    trains: bool = False
    dynamic: bool = False
    recalls: bool = False
    """Whether an earlier process has left what the passes made."""
    builds: bool = False
    """Whether nothing is built yet."""


WORKLOADS = (
    Workload("inference", Model),
    Workload("training", Model, trains=True),
    Workload("dynamic", Model, dynamic=True),
    Workload("freeze", Model, Config(freeze=True)),
    Workload("verify", Model, Config(verify=True, record=True)),
    Workload("recalled", Model, recalls=True),
    Workload("triton", lambda: pointwise, Config(target="triton")),
    Workload("built", lambda: pointwise, builds=True),
)


@dataclass
class Outcome:
    """What became of one compile."""

    workload: str
    function: str
    fired: bool
    right: bool
    reasons: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def passed(self) -> bool:
        """The model ran, was right, and somebody said why it runs otherwise."""
        return not self.error and self.right and (not self.fired or any(PLANTED in r for r in self.reasons))


@contextmanager
def injected(function: FunctionType | None) -> Iterator[None]:
    """Within it, a function raises wherever it is called."""
    if function is None:
        yield
        return
    code = function.__code__
    function.__code__ = _raise.__code__.replace(co_freevars=code.co_freevars)
    try:
        yield
    finally:
        function.__code__ = code


@contextmanager
def _recorded(codes: set[CodeType]) -> Iterator[None]:
    """Take down what runs of fusec."""

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def run(
    workload: Workload, function: FunctionType | None = None, codes: set[CodeType] | None = None, cache: str = ""
) -> Outcome:
    """Compile with one function injected, in a copy of a cache, and compare with eager."""
    torch._dynamo.reset()
    dynamo.reset()
    _raised.clear()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fusec").addHandler(handler)
    outcome = Outcome(workload.name, name_of(function), False, False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if cache:
                recalled = () if workload.recalls else ("*" + SUFFIX,)
                shutil.copytree(cache, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*recalled))
            outcome.right = _right(workload, folder, function, codes)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        logging.getLogger("fusec").removeHandler(handler)
    for compiled in dynamo.compiled_graphs():
        texts += [f"{remark.message}: {remark.reason}" for remark in compiled.remarks]
    outcome.fired = bool(_raised)
    outcome.reasons = list(dict.fromkeys(t for t in [*dynamo.fallbacks(), *texts] if PLANTED in t))
    return outcome


def _right(workload: Workload, folder: str, function: FunctionType | None, codes: set[CodeType] | None) -> bool:
    plain = dynamo.backend_for(replace(workload.config, cache_dir=workload.config.cache_dir or folder))

    def backend(gm: Any, inputs: list[Any]) -> Any:
        with injected(function), _recorded(codes) if codes is not None else injected(None):
            return plain(gm, inputs)

    results = []
    inputs = torch.arange(7).remainder(5)[None], torch.arange(7)
    for runner in (None, backend):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = workload.function()
        called = torch.compile(model, backend=runner, dynamic=workload.dynamic) if runner else model
        with torch.set_grad_enabled(workload.trains):
            found = called(*inputs)
        if workload.trains:
            sum(y.sum() for y in found).backward()  # type: ignore[union-attr]
            found = (*found, *(p.grad for p in model.parameters()))  # type: ignore[attr-defined]
        results.append(found)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(results[0], results[-1], strict=True))


def isolated(workload: Workload, cache: str, code: CodeType | None = None) -> tuple[Outcome, set[Key]]:
    """Run in a fork of this process, in which nothing is compiled yet: what runs once per process runs there too."""
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_send_outcome, args=(sender, workload, cache, code), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise TimeoutError(f"no outcome after {SECONDS} seconds")
        found: tuple[Outcome, set[Key]] = receiver.recv()
    except (EOFError, TimeoutError) as reason:
        child.kill()
        found = Outcome(workload.name, code.co_name if code else "", True, False, error=repr(reason)), set()
    child.join()
    return found


def _send_outcome(sender: Any, workload: Workload, cache: str, code: CodeType | None) -> None:
    codes: set[CodeType] = set()
    function = functions({code})[0] if code else None
    outcome = run(workload, function, None if code else codes, cache)
    sender.send((outcome, set(map(_key, codes))))


@contextmanager
def _cache_for(workload: Workload) -> Iterator[str]:
    """A folder with what an earlier process has built; none where everything is to be built."""
    if workload.builds:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        filling = replace(workload, config=replace(workload.config, cache_dir=folder), builds=True)
        isolated(filling, "")
        yield folder


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_firstlineno, code.co_name


def import_all() -> None:
    """Import every module of fusec, and compile once with torch alone, so that forks start from there."""
    for module in pkgutil.walk_packages(fusec.__path__, "fusec."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    torch.compile(pointwise, backend="aot_eager")(torch.arange(7)[None], torch.arange(7))
    torch._dynamo.reset()


def name_of(function: FunctionType | None) -> str:
    """Module and name."""
    return f"{function.__module__}.{function.__qualname__}" if function else ""


def functions(codes: set[CodeType]) -> list[FunctionType]:
    """The functions that live as long as their module and have these codes."""
    found = {o.__code__: o for o in gc.get_objects() if type(o) is FunctionType and o.__code__ in codes}
    return sorted((f for f in found.values() if f.__name__ not in NET), key=name_of)


def _codes(keys: set[Key]) -> set[CodeType]:
    return {o.__code__ for o in gc.get_objects() if type(o) is FunctionType and _key(o.__code__) in keys}


def stages(found: list[FunctionType]) -> list[FunctionType]:
    """Of these, one for each pass, each module of handlers, and each other stage of a compile."""
    handlers = {inspect.unwrap(h): h.__module__ for h in reversed(HANDLERS.values()) if inspect.isfunction(h)}
    one_each = {m: h for h, m in handlers.items() if h in found}
    names = ("import_for_call", "callable", "verify_graph", "recall", "keep", "schedule", "print", "build", "_load",
             "build_kernels", "build_program", "write", "decompositions", "kept_whole", "input_names", "find",
             "publish")  # fmt: skip
    passes = {c.apply for c in Pass.__subclasses__()} | {f for f in found if f.__name__ == "apply"}
    return [f for f in found if f in passes or f in one_each.values() or f.__name__ in names]


def main(words: list[str] | None = None) -> int:
    """Inject every function that some workload runs; status 1 where one breaks the model, or nobody says so."""
    options = _parser().parse_args(words)
    console, found, raised = report(options.width), list[Outcome](), set[Key]()
    logging.getLogger("fusec").propagate = False
    import_all()
    with progress() as bar:
        for workload in (w for w in WORKLOADS if not options.workloads or w.name in options.workloads.split(",")):
            with _cache_for(workload) as cache:
                first, reached = isolated(workload, cache)
                assert first.right and not first.error, first
                todo = [f for f in functions(_codes(reached - raised)) if options.only in name_of(f)]
                todo = stages(todo) if options.stages else todo
                for function in bar.track(todo, description=workload.name):
                    found.append(isolated(workload, cache, function.__code__)[0])
                    raised |= {_key(function.__code__)} if found[-1].fired else set()
                    if not found[-1].passed:
                        bar.console.print(found[-1])
    console.print(_table(found))
    content = {"passed": all(o.passed for o in found), "outcomes": [asdict(o) | {"passed": o.passed} for o in found]}
    console.print(f"written to {write_result('injection', 0, content, options.json)}", style="dim", highlight=False)
    return int(not content["passed"])


def _table(found: list[Outcome]) -> Table:
    fired = [o for o in found if o.fired]
    shown = Table(title=f"{sum(o.passed for o in fired)} of {len(fired)} functions may raise")
    for column in ("workload", "functions", "raised", "model fails", "wrong", "no reason"):
        shown.add_column(column)
    for workload in WORKLOADS:
        mine = [o for o in found if o.workload == workload.name]
        silent = [o for o in mine if o.right and not o.error and not o.passed]
        wrong = [o for o in mine if not o.right and not o.error]
        figures = (len(mine), sum(o.fired for o in mine), sum(bool(o.error) for o in mine), len(wrong), len(silent))
        shown.add_row(workload.name, *map(str, figures))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.injection", description=__doc__)
    parser.add_argument("--stages", action="store_true", help="passes, handlers and main functions alone")
    parser.add_argument("--workloads", default="", metavar="A,B", help=", ".join(w.name for w in WORKLOADS))
    parser.add_argument("--only", default="", metavar="TEXT", help="functions with TEXT in their names")
    parser.add_argument("--json", default="", metavar="FILE", help="by default bench/results/injection.json")
    parser.add_argument("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    from bench import injection  # the module that injected functions import

    raise SystemExit(injection.main())

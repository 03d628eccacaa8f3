"""Functions of fusec: which there are, which run, and how one is made to raise wherever it is called."""

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import fusec

ROOTS = {str(Path(fusec.__file__).parent / name) for name in ("", "passes", "codegen")}
SOURCES = tuple({str(Path(root).resolve()) + "/" for root in ROOTS} | ROOTS)
CATCHING = {
    "fusec.dynamo._compile", "fusec.dynamo._fall_back", "fusec.dynamo._run_module", "fusec.dynamo._as_it_came",
    "fusec.frontend.torch_internals.compile_through_aot", "fusec.frontend.torch_internals.boxed",
    "fusec.frontend.torch_internals.is_dynamos",
}  # fmt: skip
"""Functions that catch what others raise, or that the fallback calls: nothing of fusec catches what they raise."""
PLANTED = "planted by tests.campaigns.injection"


class Key(NamedTuple):
    """Where the code of a function begins: what names it in every process."""

    file: str
    line: int
    name: str

    @classmethod
    def of(cls, code: CodeType) -> "Key":
        """Return that of a code object."""
        return cls(code.co_filename, code.co_firstlineno, code.co_name)


class Place(NamedTuple):
    """A function of fusec that lives as long as its module, with all function objects that share its code."""

    name: str
    """Module and qualified name."""
    key: Key
    functions: tuple[FunctionType, ...]

    @property
    def stage(self) -> str:
        """The package or module of fusec; of code generation, the target."""
        _, first, second, *_ = [*self.name.split("."), ""]
        return f"{first}.{second}" if second in ("cpp", "triton") else first


@dataclass
class Planted:
    """What injected functions raise in this process, and how often they did."""

    error: type[Exception] = RuntimeError
    count: int = 0

    def fire(self) -> None:
        """Raise, and count that."""
        self.count += 1
        raise self.error(PLANTED)


planted = Planted()


def _raise() -> Any:  # runs with the globals of the function whose code it replaces
    __import__("tests.campaigns.injection.planting", fromlist=["planted"]).planted.fire()


def _raising(code: CodeType) -> CodeType:
    """Return code that raises, with the signature of this: rules and handlers are called by the names they declare."""
    named = (
        code.co_argcount
        + code.co_kwonlyargcount
        + sum(bool(code.co_flags & kind) for kind in (CO_VARARGS, CO_VARKEYWORDS))
    )
    return _raise.__code__.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_nlocals=named,
        co_varnames=code.co_varnames[:named],
        co_flags=_raise.__code__.co_flags | code.co_flags & (CO_VARARGS | CO_VARKEYWORDS),
        co_freevars=code.co_freevars,
    )


def places() -> dict[Key, Place]:
    """Return the functions of fusec in which an exception may be injected, in order of their names."""
    found = defaultdict[Key, list[FunctionType]](list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(SOURCES):
            found[Key.of(thing.__code__)].append(thing)
    listed = [Place(f"{f[0].__module__}.{f[0].__qualname__}", key, tuple(f)) for key, f in found.items()]
    return {place.key: place for place in sorted(listed) if place.name not in CATCHING}


@contextmanager
def injected(place: Place | None) -> Iterator[None]:
    """Within it, a function raises wherever it is called."""
    functions = place.functions if place else ()
    codes = [function.__code__ for function in functions]
    for function, code in zip(functions, codes, strict=True):
        function.__code__ = _raising(code)
    try:
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code


@contextmanager
def recording(called: set[Key]) -> Iterator[None]:
    """Within it, record the functions of fusec that are called."""
    codes = set[CodeType]()

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
        called.update(map(Key.of, codes))

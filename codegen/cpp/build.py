"""Kernel text to a function that runs: compiled side by side, cached, each equal text built and loaded once.

So are the register tiles of ``dot.h``, objects that kernels are linked with: compiling them takes several times as long
as what is left of a kernel.
"""

import ctypes
import functools
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fusec.artifacts import carry
from fusec.cache import Cache, key_of, open_cache
from fusec.codegen.cpp.compiler import LINK_FLAGS, Compiler, find_compiler, run_compiler
from fusec.codegen.target import Launch
from fusec.config import Config
from fusec.errors import BuildError

_HERE = Path(__file__).parent
_ENTRY = "fusec_kernel"
"""Name of the function in every library, so that kernels that differ in name alone are one."""
_LINKED = re.compile(r"^extern (template struct .+;)$", re.MULTILINE)
"""A line of a kernel that names an object it is linked with."""
_loaded: dict[str, Any] = {}
_lock = threading.Lock()


_LAUNCHES = f"""#include "launches.h"
extern "C" EXPORT
int64_t {_ENTRY}(int threads, const int64_t* table, void* const* buffers, const int64_t* symbols) {{
  return fusec::launch_all(threads, table, buffers, symbols);
}}
"""


class CppKernel:
    """A loaded kernel."""

    def __init__(self, name: str, source: str, function: Any, launch_all: Any) -> None:
        self.name, self.source, self.function, self.launch_all = name, source, function, launch_all

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> int | None:
        """Run it on tensors and the values of its symbols; the arrays are new, so threads may call at once."""
        import torch

        pointers = _packing("P", len(buffers))(*[b.data_ptr() for b in buffers])
        sizes = _packing("q", len(symbols))(*symbols)
        table = _table([self], [range(len(buffers))], [range(len(symbols))], [1])
        fault: int = self.launch_all(torch.get_num_threads(), table, pointers, sizes)
        return fault

    @property
    def address(self) -> int:
        """Of its function, in this process."""
        return ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def call_text(self, launches: Sequence[Launch], bind: Callable[[Any, str], str]) -> str:
        """One call without a Python frame for all launches; the form of arrays, and what calls what, are made once."""
        import torch

        buffers = list(dict.fromkeys(b for launch in launches for b in launch.buffers))
        symbols = list(dict.fromkeys(s for launch in launches for s in launch.symbols))
        table = _table(
            [launch.launchable for launch in launches],
            [map(buffers.index, launch.buffers) for launch in launches],
            [map(symbols.index, launch.symbols) for launch in launches],
            [launch.first_check for launch in launches],
        )
        # Asking torch also tells OpenMP, in a thread that is new to it.
        threads = f"{bind(torch.get_num_threads, 'threads')}()"
        pointers = f"{bind(_packing('P', len(buffers)), 'pointers')}({', '.join(buffers)})"
        sizes = f"{bind(_packing('q', len(symbols)), 'sizes')}({', '.join(symbols)})" if symbols else "None"
        return f"{bind(self.launch_all, 'launch_all')}({threads}, {bind(table, 'table')}, {pointers}, {sizes})"


def _table(
    kernels: Sequence[CppKernel],
    buffers: Sequence[Iterable[int]],
    symbols: Sequence[Iterable[int]],
    first_checks: Sequence[int],
) -> bytes:
    """What ``launches.h`` runs: which kernels, on which buffers and symbols of a call."""
    numbers = [len(kernels)]
    for kernel, its_buffers, its_symbols, first_check in zip(kernels, buffers, symbols, first_checks, strict=True):
        taken, values = list(its_buffers), list(its_symbols)
        numbers += [kernel.address, first_check, len(taken), *taken, len(values), *values]
    return _packing("q", len(numbers))(*numbers)


@functools.cache
def _packing(element: str, length: int) -> Callable[..., bytes]:
    """Makes a native array of so many numbers, in a fraction of the time that one of ctypes takes."""
    return struct.Struct(f"{length}{element}").pack


def build(sources: Sequence[tuple[str, str]], config: Config) -> list[CppKernel | BuildError]:
    """Build kernels, given as name and text; one that fails gives its error in its place.

    Raises:
        BuildError: where there is no compiler, or it does not even build what launches kernels.
    """
    compiler, cache = find_compiler(), open_cache(config)
    shared = [_header_text(), *compiler.command, *compiler.flags, *LINK_FLAGS, compiler.identity]
    texts = [*(_anonymous(name, text) for name, text in sources), _LAUNCHES]
    keys = [key_of([*shared, text]) for text in texts]
    *keys_of_kernels, key_of_launches = keys
    todo = {key: text for key, text in zip(keys, texts, strict=True) if key not in _loaded}
    missing = [text for key, text in todo.items() if cache.find(key, ".so") is None]
    linked = dict.fromkeys(part for text in missing for part in _parts(text))
    objects: dict[str, Future[Path]] = {}
    failures: dict[str, BuildError] = {}

    def obtain_object(text: str) -> Path:
        return _obtain(cache, key_of([*shared, text]), ".o", lambda: _compile(text, compiler))

    def obtained(part: str) -> Path:
        return objects[part].result() if part in objects else obtain_object(part)  # of a kernel lost since it was found

    def obtain(item: tuple[str, str]) -> None:
        key, text = item

        def compiled() -> bytes:
            return _link(_compile(text, compiler), [obtained(part) for part in _parts(text)], compiler)

        try:
            function = _load(_obtain(cache, key, ".so", compiled))
            function.restype = ctypes.c_int64
        except OSError as error:
            fix = "free some space, or name another directory in $TMPDIR"
            failures[key] = BuildError("a built kernel could not be stored", why=str(error), fix=fix)
            return
        except BuildError as error:
            failures[key] = error
            return
        with _lock:
            _loaded.setdefault(key, function)

    if todo:
        with ThreadPoolExecutor(min(len(todo) + len(linked), os.cpu_count() or 1)) as pool:
            objects.update((text, pool.submit(obtain_object, text)) for text in linked)  # before who waits for them
            list(pool.map(obtain, todo.items()))
    for key in todo:
        carry(cache, key, ".so")
    if key_of_launches in failures:
        raise failures[key_of_launches]
    launch_all = _loaded[key_of_launches]
    return [
        failures[key] if key in failures else CppKernel(name, text, _loaded[key], launch_all)
        for key, (name, text) in zip(keys_of_kernels, sources, strict=True)
    ]


def forget_loaded() -> None:
    """Load kernels anew from the cache, as a new process would."""
    with _lock:
        _loaded.clear()


def _header_text() -> str:
    return "".join(path.read_text() for path in sorted(_HERE.glob("*.h")))


def _anonymous(name: str, text: str) -> str:
    """The text without comments and with the common entry name: what decides the machine code."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("//")]
    return re.sub(rf"\bint64_t {re.escape(name)}\(", f"int64_t {_ENTRY}(", "\n".join(lines), count=1) + "\n"


def _parts(text: str) -> list[str]:
    """The translation units of what a kernel is linked with."""
    return [f'#include "dot.h"\nusing namespace fusec;\n{line}\n' for line in _LINKED.findall(text)]


def _obtain(cache: Cache, key: str, suffix: str, make: Callable[[], bytes]) -> Path:
    found = cache.find(key, suffix)
    if found is not None:
        return found
    with cache.building(key):
        found = cache.find(key, suffix)  # another process may have built it while this one waited
        return found if found is not None else cache.publish(key, suffix, make())


def _compile(text: str, compiler: Compiler) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fusec-build-") as folder:
        source, unit = Path(folder) / "kernel.cpp", Path(folder) / "kernel.o"
        source.write_text(text)
        run_compiler([*compiler.command, *compiler.flags, f"-I{_HERE}", "-c", str(source), "-o", str(unit)])
        return unit.read_bytes()


def _link(unit: bytes, objects: Sequence[Path], compiler: Compiler) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fusec-build-") as folder:
        kernel, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        kernel.write_bytes(unit)
        run_compiler([*compiler.command, *LINK_FLAGS, *map(str, [kernel, *objects]), "-lm", "-o", str(library)])
        return library.read_bytes()


def _load(path: Path) -> Any:
    try:
        # torch comes first: the OpenMP runtime that it has loaded is the one the kernel binds to.
        import torch  # noqa: F401

        function = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)[_ENTRY]
    except (OSError, AttributeError) as error:
        raise BuildError("a built kernel does not load", where=str(path), why=str(error)) from error
    return function

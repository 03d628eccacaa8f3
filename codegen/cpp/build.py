"""Building C++ kernels: compiled in parallel, cached, and each distinct source compiled and loaded once.

The register tiles of ``dot.h`` are objects of their own, with which kernels are linked: compiling them takes several
times as long as the rest of a kernel.
"""

import ctypes
import functools
import logging
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fusec.artifacts import export
from fusec.cache import Cache, key_of, open_cache
from fusec.codegen.cpp.compiler import LINK_FLAGS, Compiler, find_compiler, run_compiler, stop_compilers
from fusec.codegen.cpp.loading import ENTRY, load
from fusec.codegen.target import Launch
from fusec.config import Config
from fusec.errors import BuildError
from fusec.scratch import scratch_folder

logger = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_LIBRARY, _OBJECT = ".so", ".o"
_LINKED = re.compile(r"^extern (template struct .+;)$", re.MULTILINE)
"""Matches a line of a kernel that declares an object with which it is linked."""
_loaded: dict[str, Any] = {}

_LAUNCHES = f"""#include "launches.h"
extern "C" EXPORT
int64_t {ENTRY}(int threads, const int64_t* table, void* const* buffers, const int64_t* symbols) {{
  return fusec::launch_all(threads, table, buffers, symbols);
}}
"""


class CppKernel:
    """A loaded kernel."""

    edited = ""
    """The path of the edit that its source is from; "" for the generated one."""

    def __init__(self, name: str, source: str, function: Any, launch_all: Any) -> None:
        self.name, self.source, self.function, self.launch_all = name, source, function, launch_all

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> int | None:
        """As ``Launchable``; the argument arrays are new, so threads may call it concurrently."""
        import torch

        pointers = _packing("P", len(buffers))(*[b.data_ptr() for b in buffers])
        sizes = _packing("q", len(symbols))(*symbols)
        table = _table([self], [range(len(buffers))], [range(len(symbols))], [1])
        fault: int = self.launch_all(torch.get_num_threads(), table, pointers, sizes)
        return fault

    @property
    def address(self) -> int:
        """The address of its function in this process."""
        return ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def call_text(self, launches: Sequence[Launch], bind: Callable[[Any, str], str]) -> str:
        """As ``BatchLaunchable``: one native call; its table of kernels, buffers and symbols is a constant."""
        import torch

        buffers = list(dict.fromkeys(b for launch in launches for b in launch.buffers))
        symbols = list(dict.fromkeys(s for launch in launches for s in launch.symbols))
        table = _table(
            [launch.launchable for launch in launches],
            [map(buffers.index, launch.buffers) for launch in launches],
            [map(symbols.index, launch.symbols) for launch in launches],
            [launch.first_check for launch in launches],
        )
        # The call also sets the number of threads of OpenMP, if this thread is new to torch.
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
    """Return the table that ``launches.h`` interprets: the kernels, and the positions of their buffers and symbols."""
    numbers = [len(kernels)]
    for kernel, its_buffers, its_symbols, first_check in zip(kernels, buffers, symbols, first_checks, strict=True):
        pointers, sizes = list(its_buffers), list(its_symbols)
        numbers += [kernel.address, first_check, len(pointers), *pointers, len(sizes), *sizes]
    return _packing("q", len(numbers))(*numbers)


@functools.cache
def _packing(element: str, length: int) -> Callable[..., bytes]:
    """Return a function that packs numbers into a native array, faster than ctypes does."""
    return struct.Struct(f"{length}{element}").pack


def build(sources: Sequence[tuple[str, str]], config: Config) -> list[CppKernel | BuildError]:
    """Build kernels, given as name and source; return the error of each kernel that fails in its place.

    Raises:
        BuildError: if there is no compiler, or it fails to build the function that launches kernels.
    """
    builder = _Builder(find_compiler(), open_cache(config))
    texts = [*(_anonymous(name, text) for name, text in sources), _LAUNCHES]
    *keys, key_of_launches = map(builder.key, texts)
    todo = {key: text for key, text in zip([*keys, key_of_launches], texts, strict=True) if key not in _loaded}
    failures = builder.load_all(todo)
    if key_of_launches in failures:
        raise failures[key_of_launches]
    launch_all = _loaded[key_of_launches]
    return [
        failures[key] if key in failures else CppKernel(name, text, _loaded[key], launch_all)
        for key, (name, text) in zip(keys, sources, strict=True)
    ]


class _Builder:
    """Builds several kernels, which share the objects that they are linked with."""

    def __init__(self, compiler: Compiler, cache: Cache) -> None:
        self.compiler, self.cache = compiler, cache
        self.inputs = [_header_text(), *compiler.command, *compiler.flags, *LINK_FLAGS, compiler.identity]
        self.objects: dict[str, Future[bytes]] = {}
        self.made: dict[str, bytes] = {}
        """Objects that this build has compiled."""

    def key(self, text: str) -> str:
        """Return the cache key of what is built from a source."""
        return key_of([*self.inputs, text])

    def load_all(self, todo: Mapping[str, str]) -> dict[str, BuildError]:
        """Load libraries, given as sources by key, in parallel; return the errors of those that fail."""
        if not todo:
            return {}
        found = {key: self.cache.read(key, _LIBRARY) for key in todo}
        linked = dict.fromkeys(part for key, text in todo.items() if found[key] is None for part in _parts(text))
        failures: dict[str, BuildError] = {}

        def obtain(key: str) -> None:
            try:
                _loaded.setdefault(key, self.library(key, todo[key], found[key]))
            except BuildError as error:
                failures[key] = error
            except OSError as error:
                fix = "free some space, or name another directory in $TMPDIR"
                failures[key] = BuildError("a kernel could not be built", why=str(error), fix=fix)

        with ThreadPoolExecutor(min(len(todo) + len(linked), os.cpu_count() or 1)) as pool:
            try:
                # Before the libraries, which wait for them.
                self.objects.update((part, pool.submit(self.object, part)) for part in linked)
                list(pool.map(obtain, todo))
            except BaseException:  # such as KeyboardInterrupt
                pool.shutdown(wait=False, cancel_futures=True)
                stop_compilers()
                raise
        for key in todo.keys() - failures.keys():
            export(self.cache, key, _LIBRARY)
        return failures

    def library(self, key: str, text: str, found: bytes | None) -> Any:
        """Load a library from the cache, or build and load it; it is published only if it loads."""
        if (function := _load_cached(found)) is not None:
            return function
        with self.cache.building(key):
            again = self.cache.read(key, _LIBRARY)  # another process may have built it meanwhile
            if again != found and (function := _load_cached(again)) is not None:
                return function
            content, function = self.build(text)
            self.cache.offer(key, _LIBRARY, content, "a built kernel")
            return function

    def build(self, text: str) -> tuple[bytes, Any]:
        """Compile, link and load a kernel; if that fails with cached objects, compile them again, once."""
        unit, parts = _compile(text, self.compiler), _parts(text)
        objects = [self.objects[part].result() if part in self.objects else self.object(part) for part in parts]
        try:
            library = _link(unit, objects, self.compiler)
            return library, load(library)
        except BuildError as error:
            if all(part in self.made for part in parts):
                raise
            logger.warning("cached objects are compiled again: %s", error.reason)
        library = _link(unit, list(map(self.remake, parts)), self.compiler)
        return library, load(library)

    def object(self, part: str) -> bytes:
        """Return an object from the cache, or compile it."""
        key = self.key(part)
        if (found := self.cache.read(key, _OBJECT)) is None:
            with self.cache.building(key):
                found = self.cache.read(key, _OBJECT)
                return self.remake(part) if found is None else found
        return found

    def remake(self, part: str) -> bytes:
        """Compile an object, unless this build has compiled it already."""
        if part not in self.made:
            self.made[part] = _compile(part, self.compiler)
            self.cache.offer(self.key(part), _OBJECT, self.made[part], "a built object")
        return self.made[part]


def forget_loaded() -> None:
    """Forget the loaded kernels, so that the next build reads the cache as a new process would."""
    _loaded.clear()


def _header_text() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(_HERE.glob("*.h")))


def _anonymous(name: str, text: str) -> str:
    """Return a source without comments and with the common entry name: all that determines the machine code."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("//")]
    return re.sub(rf"\bint64_t {re.escape(name)}\(", f"int64_t {ENTRY}(", "\n".join(lines), count=1) + "\n"


def _parts(text: str) -> list[str]:
    """Return the sources of the objects with which a kernel is linked."""
    return [f'#include "dot.h"\nusing namespace fusec;\n{line}\n' for line in _LINKED.findall(text)]


def _load_cached(content: bytes | None) -> Any:
    """Load a library from the cache; return None if there is none, or it does not load."""
    if content is None:
        return None
    try:
        return load(content)
    except BuildError as error:
        logger.warning("a cached kernel is built again: %s", error.reason)
        return None


def _compile(text: str, compiler: Compiler) -> bytes:
    with scratch_folder() as folder:
        source, unit = folder / "kernel.cpp", folder / "kernel.o"
        source.write_text(text, encoding="utf-8")
        run_compiler(compiler.command, [*compiler.flags, f"-I{_HERE}", "-c", str(source), "-o", str(unit)])
        return unit.read_bytes()


def _link(unit: bytes, objects: Sequence[bytes], compiler: Compiler) -> bytes:
    with scratch_folder() as folder:
        library, paths = folder / "kernel.so", [folder / f"{i}.o" for i in range(1 + len(objects))]
        for path, content in zip(paths, (unit, *objects), strict=True):
            path.write_bytes(content)
        run_compiler(compiler.command, [*LINK_FLAGS, *map(str, paths), "-lm", "-o", str(library)])
        return library.read_bytes()

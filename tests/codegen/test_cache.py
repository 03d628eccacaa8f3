"""The cache of built kernels: private, atomic, checked, and shared by processes that build at once."""

import errno
import multiprocessing
import os
import stat
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from fusec.cache import Cache, key_of, open_cache
from fusec.codegen.cpp import build
from fusec.codegen.cpp.compiler import LINK_FLAGS, find_compiler
from fusec.config import Config
from fusec.errors import BuildError


def test_the_directory_is_private(tmp_path: Path) -> None:
    cache = open_cache(Config(cache_dir=str(tmp_path / "a" / "b")))
    assert cache.directory == tmp_path / "a" / "b"
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700


def test_what_is_published_is_found(tmp_path: Path) -> None:
    cache = open_cache(Config(cache_dir=str(tmp_path / "c")))
    key = key_of(["text", "flags"])
    assert cache.find(key, ".so") is None
    path = cache.publish(key, ".so", b"content")
    assert cache.find(key, ".so") == path and cache.read(key, ".so") == b"content"
    assert [p for p in cache.directory.iterdir() if p.name.startswith(".new")] == []


@pytest.mark.parametrize("damage", [b"", b"x", b"content", b"content" + b"\0" * 40])
def test_a_damaged_entry_is_not_used(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path)
    cache.publish("k", ".so", b"content").write_bytes(damage)
    assert cache.find("k", ".so") is None


def test_no_bit_may_flip_and_no_byte_may_lack(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = cache.publish("k", ".so", b"content")
    whole = path.read_bytes()
    for i in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
            assert cache.find("k", ".so") is None
        path.write_bytes(whole[:i])
        assert cache.find("k", ".so") is None
    path.write_bytes(whole)
    assert cache.find("k", ".so") == path


def test_an_entry_under_another_name_is_not_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    os.rename(cache.publish("one", ".so", b"content"), cache.path("two", ".so"))
    assert cache.find("two", ".so") is None


def test_keys_separate_their_parts() -> None:
    assert key_of(["ab", "c"]) != key_of(["a", "bc"]) != key_of(["abc"])


@pytest.mark.parametrize("fault", ["link", "writable", "file"])
def test_an_unsafe_directory_is_refused_with_one_warning(tmp_path: Path, fault: str) -> None:
    place = tmp_path / "cache"
    if fault == "link":
        (tmp_path / "real").mkdir()
        place.symlink_to(tmp_path / "real")
    elif fault == "file":
        place.write_text("not a directory")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.warns(UserWarning, match="temporary directory"):
        cache = open_cache(Config(cache_dir=str(place)))
    assert cache.directory != place and stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_cache(Config(cache_dir=str(place))) is cache


def test_a_read_only_home_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may write anywhere
    with pytest.warns(UserWarning, match="it is not writable"):
        cache = open_cache(Config(cache_dir=str(tmp_path / "home")))
    assert cache.read(*_entry(cache)) == b"content"


def _entry(cache: Cache) -> tuple[str, str]:
    cache.publish("k", ".so", b"content")
    return "k", ".so"


def test_on_a_full_disk_a_temporary_directory_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, move = open_cache(Config(cache_dir=str(tmp_path / "full"))), os.replace

    def full(source: str, target: Path) -> None:
        if str(target).startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        move(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cache.read(*_entry(cache)) == b"content"
    assert list((tmp_path / "full").iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _entry(cache)
    monkeypatch.setattr(os, "replace", lambda source, target: full(source, tmp_path))
    with pytest.raises(OSError, match="No space left"):
        _entry(cache)


def test_without_a_cache_the_process_has_its_own(tmp_path: Path) -> None:
    config = Config(cache=False, cache_dir=str(tmp_path / "unused"))
    cache = open_cache(config)
    assert open_cache(config) is cache
    assert not (tmp_path / "unused").exists()


def _build_slowly(directory: str, started: str) -> None:
    cache = Cache(Path(directory))
    with cache.building("k"):
        if cache.find("k", ".so") is None:
            Path(started, str(os.getpid())).touch()
            time.sleep(0.2)
            cache.publish("k", ".so", b"built")


def test_processes_build_once(tmp_path: Path) -> None:
    directory, started = tmp_path / "cache", tmp_path / "started"
    directory.mkdir()
    started.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build_slowly, args=(str(directory), str(started))) for _ in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0] * 16
    assert len(list(started.iterdir())) == 1


def _begin_to_build(directory: str) -> None:
    cache = Cache(Path(directory))
    with cache.building("k"):
        Path(directory, ".new-half").write_bytes(b"half of")
        time.sleep(60)


def test_a_process_that_is_killed_holds_nobody_up(tmp_path: Path) -> None:
    killed = multiprocessing.get_context("fork").Process(target=_begin_to_build, args=(str(tmp_path),))
    killed.start()
    while not (tmp_path / ".new-half").exists():
        time.sleep(0.01)
    killed.kill()
    killed.join(30)
    cache, before = Cache(tmp_path), time.monotonic()
    with cache.building("k"):
        assert cache.find("k", ".so") is None
    assert time.monotonic() - before < 30


INPUTS = {
    "the headers": ("_header_text", lambda: "other headers"),
    "flags": ("find_compiler", lambda: replace(find_compiler(), machine_flags=("-O1",))),
    "the compiler": ("find_compiler", lambda: replace(find_compiler(), identity="another")),
    "its command": ("find_compiler", lambda: replace(find_compiler(), command=(*find_compiler().command, "-g0"))),
    "how it links": ("LINK_FLAGS", (*LINK_FLAGS, "-Wl,-O1")),
}


@pytest.mark.parametrize("changed", ["nothing", "the text", "the form of entries", *INPUTS])
def test_what_a_kernel_depends_on_is_in_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    text = 'extern "C" __attribute__((visibility("default"))) void one(void* const* buffers, const void*) {}\n'
    config = Config(cache_dir=str(tmp_path / "cache"))
    build.forget_loaded()
    build.build([("one", text)], config)
    before = set((tmp_path / "cache").glob("*.so"))
    if changed in INPUTS:
        monkeypatch.setattr(build, *INPUTS[changed])
    elif changed == "the form of entries":
        monkeypatch.setattr("fusec.cache.ABI", 2)
    build.forget_loaded()
    build.build([("one", text + "static int more;\n" * (changed == "the text"))], config)
    made = set((tmp_path / "cache").glob("*.so")) - before
    assert len(made) == {"nothing": 0, "the text": 1}.get(changed, 2)


def test_a_corrupt_kernel_is_rebuilt(tmp_path: Path) -> None:
    signature = 'extern "C" EXPORT int64_t one(void* const* buffers, const int64_t*, fusec::Team&)'
    text = f'#include "vec.h"\n{signature} {{ *(float*)buffers[0] = 1; return 0; }}\n'
    config = Config(cache_dir=str(tmp_path / "cache"))
    (first,) = build.build([("one", text)], config)
    libraries = list((tmp_path / "cache").glob("*.so"))  # the kernel's, and that of what launches kernels
    for library in libraries:
        library.unlink()  # the loaded one stays mapped
        library.write_bytes(b"\x7fELF" + b"\0" * 100)
    build.forget_loaded()
    (second,) = build.build([("one", text)], config)
    assert not isinstance(first, BuildError) and not isinstance(second, BuildError)
    assert len(libraries) == 2 and all(library.stat().st_size > 1000 for library in libraries)

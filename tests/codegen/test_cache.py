"""The cache of built kernels: private, atomic, checked, and shared by processes that build at once."""

import errno
import multiprocessing
import os
import stat
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from fusec import scratch
from fusec.cache import Cache, key_of, open_cache, read_entry
from fusec.codegen.cpp import build
from fusec.codegen.cpp.compiler import LINK_FLAGS, find_compiler
from fusec.config import Config
from fusec.errors import BuildError
from fusec.scratch import scratch_folder

KERNEL = """#include "vec.h"
extern "C" EXPORT int64_t one(void* const* buffers, const int64_t*, fusec::Team&) {
  *(float*)buffers[0] = 1;
  return 0;
}
"""


def test_the_directory_is_private(tmp_path: Path) -> None:
    cache = open_cache(Config(cache_dir=str(tmp_path / "a" / "b")))
    assert cache.directory == tmp_path / "a" / "b"
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", [0, 0o002, 0o777])
def test_all_that_is_created_is_private(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        cache = open_cache(Config(cache_dir=str(tmp_path / "a" / "b" / "c")))
        path = cache.publish("k", ".so", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and cache.read("k", ".so") == b"content"
    for place in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / place).stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["an entry", "the directory", "a directory above", "nothing"])
def test_what_others_may_write_is_not_used(tmp_path: Path, place: str) -> None:
    """Checked as it was opened, whatever has become of its name; only this user can make a file of his own."""
    (tmp_path / "above").mkdir()
    cache = open_cache(Config(cache_dir=str(tmp_path / "above" / "cache")))
    path = cache.publish("k", ".so", b"content")
    {"an entry": path, "the directory": path.parent}.get(place, tmp_path / "above").chmod(0o770)
    assert cache.read("k", ".so") == (None if place in ("an entry", "the directory") else b"content")


@pytest.mark.parametrize("belongs", ["an entry", "the directory"])
def test_what_belongs_to_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, belongs: str
) -> None:
    cache, fstat = Cache(tmp_path), os.fstat
    path = cache.publish("k", ".so", b"content")
    theirs = (path if belongs == "an entry" else tmp_path).stat().st_ino

    def of_another(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        if status.st_ino != theirs:
            return status
        return os.stat_result([*status[:4], status.st_uid + 1, *status[5:10]])

    monkeypatch.setattr(os, "fstat", of_another)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        read_entry(path)
    assert cache.read("k", ".so") is None


@pytest.mark.parametrize("kind", ["FIFO", "directory", "link", "lock"])
def test_what_is_no_file_is_replaced(tmp_path: Path, kind: str) -> None:
    cache = Cache(tmp_path)
    path = cache.path("k", ".lock" if kind == "lock" else ".so")
    if kind in ("FIFO", "lock"):
        os.mkfifo(path)
    elif kind == "directory":
        (path / "more").mkdir(parents=True)
    else:
        path.symlink_to(Cache(tmp_path / "..").path("k", ".so"))
    assert cache.read("k", ".so") is None
    with cache.building("k"):
        cache.publish("k", ".so", b"content")
    assert cache.read("k", ".so") == b"content"


def test_what_is_published_is_found(tmp_path: Path) -> None:
    cache = open_cache(Config(cache_dir=str(tmp_path / "c")))
    key = key_of(["text", "flags"])
    assert cache.read(key, ".so") is None
    path = cache.publish(key, ".so", b"content")
    assert cache.read(key, ".so") == b"content"
    assert list(cache.directory.iterdir()) == [path]


@pytest.mark.parametrize("damage", [b"", b"x", b"content", b"content" + b"\0" * 40])
def test_a_damaged_entry_is_not_used_with_a_warning(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    cache.publish("k", ".so", b"content").write_bytes(damage)
    assert cache.read("k", ".so") is None
    assert "it is damaged" in caplog.text and "k.so" in caplog.text


def test_an_entry_that_is_missing_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Cache(tmp_path).read("k", ".so") is None
    assert not caplog.text


def test_no_bit_may_flip_and_no_byte_may_lack(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = cache.publish("k", ".so", b"content")
    whole = path.read_bytes()
    for i in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
            assert cache.read("k", ".so") is None
        path.write_bytes(whole[:i])
        assert cache.read("k", ".so") is None
    path.write_bytes(whole)
    assert cache.read("k", ".so") == b"content"


def test_an_entry_under_another_name_is_not_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    os.rename(cache.publish("one", ".so", b"content"), cache.path("two", ".so"))
    assert cache.read("two", ".so") is None


def test_keys_separate_their_parts() -> None:
    assert key_of(["ab", "c"]) != key_of(["a", "bc"]) != key_of(["abc"])
    assert key_of(["\udcff"]) != key_of(["\udcfe"]), "what the environment holds need not be UTF-8"


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


def test_a_directory_beside_a_removed_one_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.warns(UserWarning, match="temporary directory"):
        cache = open_cache(Config(cache_dir="relative"))
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
        if cache.read("k", ".so") is None:
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


def _begin_to_build(directory: Path) -> None:
    with Cache(directory).building("k"), scratch_folder(directory) as mine, scratch_folder() as build_folder:
        (mine / "new").write_bytes(b"half of")
        (directory / "begun").write_text(str(build_folder))
        time.sleep(60)


def test_a_process_that_is_killed_holds_nobody_up_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, temporary = tmp_path / "cache", tmp_path / "temporary"
    directory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    killed = multiprocessing.get_context("fork").Process(target=_begin_to_build, args=(directory,))
    killed.start()
    begun = directory / "begun"
    while not (begun.exists() and begun.read_text()):
        time.sleep(0.01)
    used = Path(begun.read_text())
    scratch.sweep(temporary)
    assert used.is_dir(), "it is in use"
    killed.kill()
    killed.join(30)
    begun.unlink()
    monkeypatch.setattr(scratch, "_swept", set())
    cache, before = Cache(directory), time.monotonic()
    with cache.building("k"), scratch_folder():
        path = cache.publish("k", ".so", b"content")
    assert time.monotonic() - before < 30
    assert {place.name for place in directory.iterdir()} == {path.name, "k.lock"}
    assert list(temporary.iterdir()) == []


INPUTS = {
    "the headers": ("_header_text", lambda: "other headers"),
    "flags": ("find_compiler", lambda: replace(find_compiler(), machine_flags=("-O1",))),
    "the compiler": ("find_compiler", lambda: replace(find_compiler(), identity="another")),
    "its command": ("find_compiler", lambda: replace(find_compiler(), command=(*find_compiler().command, "-g0"))),
    "how it links": ("LINK_FLAGS", (*LINK_FLAGS, "-Wl,-O1")),
}


@pytest.mark.parametrize("changed", ["nothing", "the text", "the form of entries", *INPUTS])
def test_what_a_kernel_depends_on_is_in_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    config = Config(cache_dir=str(tmp_path / "cache"))
    build.forget_loaded()
    build.build([("one", KERNEL)], config)
    before = set((tmp_path / "cache").glob("*.so"))
    if changed in INPUTS:
        monkeypatch.setattr(build, *INPUTS[changed])
    elif changed == "the form of entries":
        monkeypatch.setattr("fusec.cache.ABI", 0)
    build.forget_loaded()
    build.build([("one", KERNEL + "static int more;\n" * (changed == "the text"))], config)
    made = set((tmp_path / "cache").glob("*.so")) - before
    assert len(made) == {"nothing": 0, "the text": 1}.get(changed, 2)


def test_a_corrupt_kernel_is_rebuilt(tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path / "cache"))
    (first,) = build.build([("one", KERNEL)], config)
    libraries = list((tmp_path / "cache").glob("*.so"))  # the kernel's, and that of what launches kernels
    for library in libraries:
        library.unlink()  # the loaded one stays mapped
        library.write_bytes(b"\x7fELF" + b"\0" * 100)
    build.forget_loaded()
    (second,) = build.build([("one", KERNEL)], config)
    assert not isinstance(first, BuildError) and not isinstance(second, BuildError)
    assert len(libraries) == 2 and all(library.stat().st_size > 1000 for library in libraries)


def test_what_was_used_longest_ago_is_removed_first(tmp_path: Path) -> None:
    cache, size = Cache(tmp_path, most_bytes=3500), 1000
    for i, name in enumerate("abc"):
        path = cache.publish(name * 64, ".so", b"x" * size)
        os.utime(path, (i, i))
    assert cache.read("a" * 64, ".so")  # it is used now
    (tmp_path / ("e" * 64 + ".lock")).touch()
    os.utime(tmp_path / ("e" * 64 + ".lock"), (0, 0))
    cache.publish("d" * 64, ".so", b"x" * size)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_an_entry_beyond_the_limit_is_no_reason_to_fail(tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path), cache_mb=1)
    open_cache(config).publish("a" * 64, ".so", b"x" * 2_000_000)
    assert list(tmp_path.iterdir()) == []
    build.forget_loaded()
    (kernel,) = build.build([("one", KERNEL)], config)
    assert isinstance(kernel, build.CppKernel), kernel


def test_what_does_not_load_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken compiler, mended afterwards, gives later processes good kernels: its name and version are the same."""
    compiler, real = tmp_path / "cxx", find_compiler().command[0]
    config = Config(cache_dir=str(tmp_path / "cache"))
    broken = f"""case "$*" in *-shared*) ;; *) exec {real} "$@";; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done"""
    monkeypatch.setenv("CXX", str(compiler))
    for text, kept in ((broken, 0), (f'exec {real} "$@"', 2)):
        compiler.write_text(f"#!/bin/sh\n{text}\n")
        compiler.chmod(0o755)
        build.forget_loaded()
        if kept:
            (kernel,) = build.build([("one", KERNEL)], config)
            assert isinstance(kernel, build.CppKernel), kernel
        else:
            with pytest.raises(BuildError, match="does not load"):
                build.build([("one", KERNEL)], config)
        assert len(list((tmp_path / "cache").glob("*.so"))) == kept


def test_kernels_load_without_anonymous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", refused)
    build.forget_loaded()
    (kernel,) = build.build([("one", KERNEL)], Config(cache_dir=str(tmp_path)))
    assert isinstance(kernel, build.CppKernel), kernel

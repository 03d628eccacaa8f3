"""The cache of built kernels: private, atomic, checked, and shared by processes that build at once."""

import multiprocessing
import os
import stat
import time
import warnings
from pathlib import Path

import pytest

from fusec.cache import Cache, key_of, open_cache
from fusec.config import Config


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
    processes = [context.Process(target=_build_slowly, args=(str(directory), str(started))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0] * 4
    assert len(list(started.iterdir())) == 1


def test_a_corrupt_kernel_is_rebuilt(tmp_path: Path) -> None:
    from fusec.codegen.cpp import build as module
    from fusec.errors import BuildError

    signature = 'extern "C" EXPORT void one(void* const* buffers, const int64_t*)'
    text = f'#include "vec.h"\n{signature} {{ *(float*)buffers[0] = 1; }}\n'
    config = Config(cache_dir=str(tmp_path / "cache"))
    (first,) = module.build([("one", text)], config)
    libraries = list((tmp_path / "cache").glob("*.so"))  # the kernel's, and that of what launches kernels
    for library in libraries:
        library.unlink()  # the loaded one stays mapped
        library.write_bytes(b"\x7fELF" + b"\0" * 100)
    module.forget_loaded()
    (second,) = module.build([("one", text)], config)
    assert not isinstance(first, BuildError) and not isinstance(second, BuildError)
    assert len(libraries) == 2 and all(library.stat().st_size > 1000 for library in libraries)

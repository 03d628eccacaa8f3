"""Edited kernels: a source in the cache's directory that is built in place of the one that was generated.

The name of the file has the digest of the generated source, so that an edit of a kernel that changes is not used.
"""

import logging
from pathlib import Path

from fusec.cache import key_of
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ownership import make_private, open_own

logger = logging.getLogger(__name__)
FOLDER = "edited"


def edit_path(name: str, source: str, config: Config) -> Path:
    """Return the path of the edit of a kernel, given its generated source."""
    suffix = "py" if "@triton.jit" in source else "cpp"
    return config.cache_path() / FOLDER / f"{name}-{key_of((source,))[:16]}.{suffix}"


def edited_source(name: str, source: str, config: Config) -> tuple[str, str]:
    """Return the source to build, and the path of the edit that it is from; "" where there is none."""
    path = edit_path(name, source, config)
    try:
        with open_own(path) as file:
            return file.read().decode(), str(path)
    except FileNotFoundError:
        return source, ""
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("the edited kernel %s is not used: %s", path, error)
        return source, ""


def refused_edit(name: str, path: str, error: BuildError) -> BuildError:
    """Return the error of an edit that could not be built."""
    fix = f"correct it by `fusec kernels edit MODEL {name}`, or remove it by `fusec kernels revert {name}`"
    return BuildError(f"its edit {path} is not valid", where=error.where, why=error.reason, fix=fix)


def digest_of_edits(config: Config) -> str:
    """Return a digest of all edits, which compiles depend on."""
    found = sorted(edits(config))
    return key_of([f"{path.name} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in found])


def edits(config: Config, name: str = "") -> list[Path]:
    """Return the paths of the edits of a kernel, or of all."""
    return sorted((config.cache_path() / FOLDER).glob(f"{name or '*'}-*.*"))


def other_edits(name: str, used: str, config: Config) -> list[Path]:
    """Return the edits of a kernel that are not used, as its code is not what was edited; the last one last."""
    return sorted((p for p in edits(config, name) if str(p) != used), key=lambda path: path.stat().st_mtime_ns)


def write_edit(name: str, source: str, config: Config) -> Path:
    """Write the generated source of a kernel as an edit, if there is none yet; return its path."""
    path = edit_path(name, source, config)
    make_private(path.parent)
    if not path.exists():
        path.touch(0o600)
        path.write_text(source, encoding="utf-8")
    return path

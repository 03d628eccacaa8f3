"""The options of a compile: one frozen dataclass, from which validation, documentation and the CLI are derived.

Nothing else reads the environment.
"""

import functools
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fusec.errors import OptionError, suggestion
from fusec.selector import Selector

logger = logging.getLogger(__name__)

MODES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "reduce-overhead": ("cuda_graphs",),
    "max-autotune": ("autotune", "cuda_graphs"),
    "max-autotune-no-cudagraphs": ("autotune",),
}
"""The modes of torch.compile, and the options that each switches on. On the CPU they all mean ``default``."""
CHIPS = ("a100", "rtx4090", "rtx5090", "h100", "h200", "b200", "mi300x")
"""The GPUs with known profiles."""


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Config:
    """The user's options."""

    mode: str = _option(
        "default",
        "one of torch.compile's modes: `reduce-overhead` switches on `cuda_graphs`, `max-autotune` that and "
        "`autotune`, `max-autotune-no-cudagraphs` only `autotune`",
    )
    cuda_graphs: bool = _option(
        False,
        "on a GPU, record the launches of a call as a CUDA graph and replay it; a remark says why if it cannot",
    )
    autotune: bool = _option(
        False,
        "on a GPU, time each kernel's candidates when it first runs and keep the fastest; includes large-M matmuls "
        "with their epilogues, against the vendor library; not run on a GPU yet",
    )
    dependent_launch: bool = _option(
        False,
        "on NVIDIA GPUs from Hopper on, set up each generated kernel while the previous one ends (programmatic "
        "dependent launch); not timed yet",
    )
    target: str = _option("", "`cpp` or `triton`; by default chosen by the device of the inputs")
    apply: str = _option("", "applications of rewrites to make, such as `0..41,!17`; empty means all")
    disable: str = _option("", "names of passes, fusions and rewrites to disable, separated by commas")
    verify: bool = _option(
        False, "run both sides of every rewrite and pass on sampled inputs and reject those that differ"
    )
    record: bool = _option(
        False,
        "keep the text of the graph before and after each pass, and the pattern closest to what none matched",
    )
    history: bool = _option(
        True,
        "under `record`, keep the graph after each application as well, which the page of `fusec view` steps through",
    )
    trace: str = _option("", "folder for the graphs, kernels and remarks of each compile, as `fusec trace` reads them")
    report: str = _option(
        "",
        "file for the page of `fusec view` with each compile of a process; `.json` for the figures alone",
    )
    strict: bool = _option(False, "raise where fusec would otherwise fall back to ATen")
    small_m: int = _option(
        16,
        "largest number of rows of a generated small-M matmul; on a GPU twice that for half types",
    )
    freeze: bool = _option(
        False,
        "keep values that depend only on weights, and prepacked copies of weights, until a weight is replaced or "
        "changed; a change through `.data` goes unnoticed",
    )
    unset: str = _option(
        "",
        "names of options, separated by commas, that have their defaults whatever sets them: in the environment, for "
        "a program whose options are in its source",
    )
    cache: bool = _option(True, "keep built kernels and optimized graphs on disk for later processes")
    cache_dir: str = _option("", "directory of the cache; by default in the user's cache directory")
    cache_mb: int = _option(
        1000,
        "size limit of the cache in megabytes, beyond which least recently used entries are removed; 0 means no limit",
    )
    machine: str = _option(
        "",
        f"GPU for which times are predicted, and thereby fusion decided: {', '.join(f'`{n}`' for n in CHIPS)}; "
        "by default this machine, as measured by `fusec machine measure`",
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"unknown mode {self.mode!r}", fix=suggestion(self.mode, MODES))
        if self.target not in ("", "cpp", "triton"):
            raise OptionError(f"unknown target {self.target!r}", fix="use 'cpp' or 'triton'")
        if self.machine not in ("", *CHIPS):
            raise OptionError(f"unknown machine {self.machine!r}", fix=suggestion(self.machine, CHIPS))
        if self.small_m < 0:
            raise OptionError(f"option 'small_m' is {self.small_m}", why="it counts rows", fix="use 0 or more")
        if self.cache_mb < 0:
            raise OptionError(f"option 'cache_mb' is {self.cache_mb}", why="it counts megabytes", fix="use 0 or more")
        Selector.parse(self.apply)
        for option in (*MODES[self.mode], *(("record", "history") if self.trace or self.report else ())):
            object.__setattr__(self, option, option not in _names(self.unset))

    @classmethod
    def from_options(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> "Config":
        """Return the configuration of ``torch.compile(mode=…, options=…)``, with defaults from the environment.

        Raises:
            OptionError: for an unknown name (close matches are named) or a value of another type.
        """
        known = {f.name: f for f in fields(cls)}
        for name, value in (options or {}).items():
            if name not in known:
                raise OptionError(f"unknown option {name!r}", fix=suggestion(name, known))
            wanted = type(known[name].default)
            if type(value) is not wanted:
                why, doc = f"it takes a {wanted.__name__}", known[name].metadata["doc"]
                raise OptionError(f"option {name!r} is {value!r}", why=why, fix=doc)
        return cls._of({**_environment(), **(options or {}), **({"mode": mode} if mode else {})})

    @classmethod
    def from_environment(cls) -> "Config":
        """The defaults, changed by ``FUSEC_<OPTION>`` variables and torch's own switch for caches."""
        return cls._of(_environment())

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> "Config":
        """Return the configuration of some values, but those that are unset."""
        unset, known = _names(str(values.get("unset", ""))), [f.name for f in fields(cls)]
        for name in sorted(unset - set(known)):
            raise OptionError(f"option 'unset' names {name!r}", fix=suggestion(name, known))
        return cls(**{name: value for name, value in values.items() if name not in unset})

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, without those that a mode switches on."""
        implied = MODES[self.mode]
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default and f.name not in implied
        }

    @property
    def disabled(self) -> frozenset[str]:
        """The names that ``disable`` lists."""
        return _names(self.disable)

    def cache_path(self) -> Path:
        """Return the directory of built kernels and configurations, traces of patterns, and results of passes."""
        if self.cache_dir:
            return Path(self.cache_dir)
        import platformdirs

        return Path(platformdirs.user_cache_dir("fusec", appauthor=False))


def _names(listed: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, listed.split(","))))


def option_table() -> list[tuple[str, str, str, str]]:
    """Name, type, default and meaning of every option, for the documentation."""
    return [(f.name, type(f.default).__name__, repr(f.default), f.metadata["doc"]) for f in fields(Config)]


def unknown_settings() -> list[str]:
    """Return the environment variables that are named as options, but are none."""
    options = {f"FUSEC_{f.name.upper()}" for f in fields(Config)}
    return sorted(name for name in os.environ if name.startswith("FUSEC_") and name not in options)


def _environment() -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    options = {f"FUSEC_{f.name.upper()}": f for f in fields(Config)}
    for variable in unknown_settings():
        _warn_of(variable, suggestion(variable, options))
    for variable, f in options.items():
        if variable not in os.environ:
            continue
        chosen[f.name] = _parse(f.name, os.environ[variable], type(f.default))
    if os.environ.get("TORCH_COMPILE_FORCE_DISABLE_CACHES") == "1":
        chosen["cache"] = False
    return chosen


@functools.cache
def _warn_of(variable: str, fix: str) -> None:
    """Warn once: the variable may be another program's."""
    logger.warning("fusec has no option for the environment variable %s; %s", variable, fix)


def _parse(name: str, text: str, wanted: type) -> Any:
    if wanted is bool:
        if text.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off", ""):
            return text.lower() in ("1", "true", "yes", "on")
        raise OptionError(f"FUSEC_{name.upper()}={text!r} is not a boolean", fix="use 1 or 0")
    try:
        return wanted(text)
    except ValueError as reason:
        raise OptionError(f"FUSEC_{name.upper()}={text!r} is not a {wanted.__name__}", why=str(reason)) from reason


def compiler_command() -> tuple[str, ...]:
    """The C++ compiler that ``$CXX`` names, with its arguments; empty where it names none."""
    return tuple(shlex.split(os.environ.get("CXX", "")))

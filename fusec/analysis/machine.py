"""Profiles of machines: the bandwidths, peaks and overheads that times are predicted from."""

import functools
import itertools
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fusec.cache import key_of
from fusec.config import Config
from fusec.ownership import make_private, open_own
from fusec.scratch import scratch_folder

MEASURED, DATASHEET, ASSUMED = "measured", "datasheet", "assumed"
FORM = 5
"""Version of stored profiles, raised when a field is added or changes its meaning; part of the file's name."""


@dataclass(frozen=True)
class Machine:
    """The profile of a machine."""

    name: str
    source: str
    """``measured``, ``datasheet`` (peaks that no kernel reaches) or ``assumed`` (a modest machine)."""
    read_gb_s: float
    """Memory bandwidth of reads with all threads, in GB/s."""
    peaks: Mapping[str, float] = field(hash=False)
    """GFLOP/s by unit and dtype: ``vector f32``, ``matrix bf16``; ``product f32`` is the speed of generated
    large-M GEMMs, where there are any."""
    launch_us: float
    """Overhead of one more kernel, in microseconds."""
    cache_bytes: int = 0
    """Size of the last-level cache; 0 where it is not known."""
    cache_gb_s: float = 0.0
    """Bandwidth of reads from that cache, in GB/s; 0 where it is not known."""
    threads: int = 1
    """Threads of a CPU, or multiprocessors of a GPU."""
    code: str = ""
    """Architecture of a GPU's code, such as ``sm_90``; empty for a CPU."""
    shared_bytes: int = 0
    """Shared memory of one thread block of a GPU."""

    @property
    def has_descriptors(self) -> bool:
        """True if it is a GPU with tensor descriptors (TMA), as tried by compiling for it."""
        return self.code in ("sm_90", "sm_100")

    def bandwidth(self, cached: bool) -> float:
        """Return bytes per second, from memory or from the last-level cache."""
        known = self.cache_gb_s if cached and self.cache_gb_s else self.read_gb_s
        return known * 1e9

    def peak(self, unit: str, dtype: str) -> float:
        """Return operations per second; float32's for a dtype without a peak."""
        known = self.peaks.get(f"{unit} {dtype}")
        return (self.peaks[f"{unit} f32"] if known is None else known) * 1e9

    def multiplies(self, dtype: str, share: float = 0.9) -> bool:
        """Return whether generated large-M GEMMs reach a share of the vendor's speed on large matrices.

        By default about all of it, so that fusion saves time.
        """
        return self.peaks.get(f"product {dtype}", 0.0) * 1e9 >= share * self.peak("matrix", dtype)

    def ridge(self, dtype: str, unit: str = "matrix") -> float:
        """Return the operations per byte of memory above which arithmetic is the bound."""
        return self.peak(unit, dtype) / self.bandwidth(cached=False)

    def holds(self, size: float) -> bool:
        """Return whether a value of this many bytes stays in the last-level cache until it is read."""
        return size <= self.cache_bytes / 4

    def holds_all(self, size: float) -> bool:
        """Return whether the last-level cache holds all memory of a program, of this many bytes, between calls."""
        return size <= self.cache_bytes * 3 / 4

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON data."""
        return {**asdict(self), "peaks": dict(self.peaks)}

    @classmethod
    def from_json(cls, data: Any) -> "Machine":
        """Return the profile of such data.

        Raises:
            ValueError: for other data.
        """
        if not isinstance(data, dict) or data.keys() != {f.name for f in fields(cls)}:
            raise ValueError("its fields are not those of a profile")
        rates = [data["read_gb_s"], *dict(data["peaks"]).values()]
        others = [data[key] for key in ("launch_us", "cache_gb_s", "cache_bytes", "threads", "shared_bytes")]
        numbers = all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in (*rates, *others))
        if not numbers or not all(rates) or not {"vector f32", "matrix f32"} <= data["peaks"].keys():
            raise ValueError("a field is not a positive number")
        return cls(**data)


# Peaks without sparsity. A launch is the gap between two kernels of one stream, not a whole call from Python; no
# datasheet has it. Bandwidth or size of the last-level cache are 0 where the vendor does not state them. Shared memory:
# CUDA programming guide, table of compute capabilities; CDNA 3 instruction set.
CHIPS = {
    "a100": Machine(  # NVIDIA A100 80GB SXM datasheet (June 2021); L2: GA100 whitepaper, 5120 B/clk at 1.41 GHz
        "NVIDIA A100 80GB SXM", DATASHEET, 2039,
        {"vector f32": 19_500, "vector f64": 9_700, "matrix f32": 156_000, "matrix f64": 19_500,
         "matrix bf16": 312_000, "matrix f16": 312_000}, 3.0, 40_000_000, 7219, 108,
        "sm_80", 166_912),
    "rtx4090": Machine(  # NVIDIA's published specifications, as listings quote them; halves with sums in float32
        "NVIDIA GeForce RTX 4090", DATASHEET, 1008,
        {"vector f32": 82_600, "vector f64": 1_290, "matrix f32": 82_600, "matrix f64": 1_290,
         "matrix bf16": 165_200, "matrix f16": 165_200}, 3.0, 72 << 20, 0.0, 128,
        "sm_89", 101_376),
    "rtx5090": Machine(  # likewise; a quarter of the stated rate of halves, which is with sparsity and sums in halves
        "NVIDIA GeForce RTX 5090", DATASHEET, 1792,
        {"vector f32": 104_800, "vector f64": 1_637, "matrix f32": 104_800, "matrix f64": 1_637,
         "matrix bf16": 209_500, "matrix f16": 209_500}, 3.0, 96 << 20, 0.0, 170,
        "sm_120", 101_376),
    "h100": Machine(  # NVIDIA H100 SXM5 datasheet (tensor figures there are with sparsity: halved)
        "NVIDIA H100 SXM", DATASHEET, 3350,
        {"vector f32": 67_000, "vector f64": 34_000, "matrix f32": 494_700, "matrix f64": 67_000,
         "matrix bf16": 989_400, "matrix f16": 989_400}, 3.0, 50_000_000, 0.0, 132,
        "sm_90", 232_448),
    "h200": Machine(  # NVIDIA H200 SXM datasheet: the H100's arithmetic, HBM3e
        "NVIDIA H200 SXM", DATASHEET, 4800,
        {"vector f32": 67_000, "vector f64": 34_000, "matrix f32": 494_700, "matrix f64": 67_000,
         "matrix bf16": 989_400, "matrix f16": 989_400}, 3.0, 50_000_000, 0.0, 132,
        "sm_90", 232_448),
    "b200": Machine(  # NVIDIA HGX B200 datasheet, an eighth of the board, without sparsity
        "NVIDIA B200", DATASHEET, 8000,
        {"vector f32": 80_000, "vector f64": 40_000, "matrix f32": 1_100_000, "matrix f64": 40_000,
         "matrix bf16": 2_250_000, "matrix f16": 2_250_000}, 3.0, 0, 0.0, 148,
        "sm_100", 232_448),
    "mi300x": Machine(  # AMD Instinct MI300X datasheet; Infinity Cache: CDNA 3 whitepaper
        "AMD Instinct MI300X", DATASHEET, 5300,
        {"vector f32": 163_400, "vector f64": 81_700, "matrix f32": 163_400, "matrix f64": 163_400,
         "matrix bf16": 1_307_400, "matrix f16": 1_307_400}, 3.0, 256_000_000, 17_200, 304,
        "gfx942", 65_536),
}  # fmt: skip
"""GPUs by name. ``matrix f32`` is TF32 where the chip has it."""
USUAL_CHIP, USUAL_CHIP_OF_AMD = CHIPS["a100"], CHIPS["mi300x"]
"""Profiles of an unknown or absent GPU: the vendor's slowest for servers."""


def assumed_cpu(threads: int = 1) -> Machine:
    """Return the profile of a modest processor, for a machine that has not been measured.

    Generated large-M GEMMs are assumed to be as fast as the vendor's.
    """
    per_thread = {"vector f32": 24.0, "matrix f32": 48.0, "matrix i8": 192.0, "product i8": 192.0}
    per_thread |= dict.fromkeys(("product f32", "product bf16", "product f16"), 48.0)
    peaks = {unit: rate * threads for unit, rate in per_thread.items()}
    read = min(10.0 * threads, 80.0)
    return Machine("a modest CPU", ASSUMED, read, peaks, 2.0, 16 << 20, 25.0 * threads, threads)


def chip(name: str, usual: Machine = USUAL_CHIP) -> Machine:
    """Return the profile of a GPU by its name, or ``usual`` for an unknown one."""
    return known_chip(name) or usual


def known_chip(name: str) -> Machine | None:
    """Return a GPU's profile by its name: ``h100``, ``NVIDIA H100 80GB HBM3``, ``sm_90``; None for an unknown one."""
    words = re.findall(r"[a-z0-9]+", name.lower())  # an RTX A1000 is no A100
    parts = {*words, *map("".join, itertools.pairwise(words))}
    return next((machine for key, machine in CHIPS.items() if key in parts or machine.code == name), None)


def cpu_machine(config: Config, threads: int) -> Machine:
    """Return this machine's stored profile, or an assumed one. A compile never measures."""
    path = profile_path(config, threads)
    try:
        with open_own(path) as file:
            return Machine.from_json(json.loads(file.read()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as reason:
        warnings.warn(
            f"fusec assumes a modest machine, as the profile {path} cannot be used: {reason}; `fusec machine` "
            "measures it again", stacklevel=2,
        )  # fmt: skip
    return assumed_cpu(threads)


def store_machine(machine: Machine, config: Config) -> Path:
    """Store a measured profile for later compiles, atomically; return its path."""
    path = profile_path(config, machine.threads)
    make_private(path.parent)
    with scratch_folder(path.parent) as folder:
        (folder / "new").write_text(json.dumps(machine.to_json(), indent=1) + "\n", encoding="utf-8")
        (folder / "new").chmod(0o600)  # whatever the umask
        os.replace(folder / "new", path)
    return path


def profile_path(config: Config, threads: int) -> Path:
    """Return the path of the profile of this processor with that many threads."""
    key = key_of((f"machine {FORM}", cpu_name(), f"{threads} threads"))
    return config.cache_path() / f"machine-{key[:16]}.json"


@functools.cache
def cpu_name() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine() or "unknown"

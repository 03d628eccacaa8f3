"""The data of an explanation: kernels, fallbacks, near misses and sites of one compiled model."""

from dataclasses import dataclass, field
from typing import Any

from fusec.analysis.devices import kernel_device
from fusec.analysis.machine import Machine, assumed_cpu
from fusec.debug.roofline import Roofline, Totals, totals
from fusec.debug.site_status import SiteStatus
from fusec.debug.subject import Subject
from fusec.debug.traffic import Traffic
from fusec.ir.graph import Graph, Node
from fusec.remarks import Remark

KINDS = ("generated", "vendor", "opaque")
_NOTHING = Roofline(0.0, 0.0, "launch", 0.0, 0.0)


@dataclass
class KernelRow:
    """Equal launches: one generated kernel, one shape of a vendor's product, or one kind of ATen call."""

    name: str
    kind: str
    """``generated``, ``vendor`` (a library's matrix product or convolution) or ``opaque`` (a call into ATen)."""
    launches: int
    bytes_each: int
    flops_each: int
    fusions: tuple[str, ...] = ()
    """Declared fusions inside."""
    sources: tuple[str, ...] = ()
    source: str = ""
    """Text of the kernel."""
    formula: str = ""
    roofline: Roofline = _NOTHING
    """One launch against the limits of the machine."""
    intermediate_bytes: int = 0
    """Bytes of values that another kernel writes or reads, by all launches."""
    error: float | None = None
    """The largest error of its launches against float64, relative to the largest element; None without ``verify``."""
    edited: str = ""
    """Path of the edit that the kernel is built from; "" for the generated source."""
    nodes: list[Node] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes moved by all launches."""
        return self.bytes_each * self.launches

    @property
    def flops(self) -> int:
        """Arithmetic of all launches."""
        return self.flops_each * self.launches

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON data, without its nodes."""
        fields = {k: v for k, v in self.__dict__.items() if k != "nodes"}
        more = {"fusions": list(self.fusions), "bytes": self.bytes, "flops": self.flops}
        return {**fields, **more, "roofline": self.roofline.to_json()}


@dataclass
class Fallback:
    """An operation that fusec leaves to ATen."""

    name: str
    count: int
    bytes: int
    flops: int
    reason: str
    sources: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the fallback as JSON data, without its nodes."""
        return {k: v for k, v in self.__dict__.items() if k != "nodes"}


def is_interpreted(graph: Graph, machine: Machine) -> bool:
    """Return whether kernels of a graph run in Triton's interpreter, on the CPU, though the machine is a GPU."""
    return bool(machine.code) and kernel_device(graph) == "cpu"


@dataclass
class Explanation:
    """The compile of a model as data: kernels, fallbacks, near misses, sites."""

    title: str
    subjects: list[Subject]
    kernels: list[KernelRow]
    """Those that move most first."""
    fallbacks: list[Fallback]
    regions: dict[str, int]
    """Declared fusions by name, with the number of their matches."""
    near_misses: list[Remark]
    remarks: list[Remark]
    imported_nodes: int
    final_nodes: int
    seconds: float
    """Spent in passes."""
    assumed: dict[str, int]
    """Sizes assumed for symbols."""
    copies: int = 0
    """Copies made where layouts differ."""
    sites: list[SiteStatus] = field(default_factory=list)
    """Sites where a fusion is expected, with their status; empty without a module."""
    traffic: Traffic = field(default_factory=Traffic)
    """The bytes that are moved between kernels."""
    machine: Machine = field(default_factory=assumed_cpu)
    """The machine that times are predicted for."""

    @property
    def totals(self) -> Totals:
        """Predicted and measured times of all launches."""
        return totals([(k.roofline, k.launches) for k in self.kernels], self.subjects)

    @property
    def interpreted(self) -> bool:
        """True if measured times are of Triton's interpreter, on the CPU: they say nothing about the machine."""
        return any(is_interpreted(s.final, self.machine) for s in self.subjects if s.timing is not None)

    def launches(self, kind: str) -> int:
        """Number of launches of a kind."""
        return sum(k.launches for k in self.kernels if k.kind == kind)

    @property
    def coverage(self) -> dict[str, dict[str, float]]:
        """Shares of bytes and of FLOPs, three ways."""
        out = {}
        for name in ("bytes", "flops"):
            sums = {kind: sum(getattr(k, name) for k in self.kernels if k.kind == kind) for kind in KINDS}
            total = sum(sums.values())
            out[name] = {kind: value / total if total else 0.0 for kind, value in sums.items()}
        return out

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        return {
            "title": self.title,
            "graphs": len(self.subjects),
            "nodes": {"imported": self.imported_nodes, "final": self.final_nodes},
            "regions": self.regions,
            "launches": {kind: self.launches(kind) for kind in KINDS},
            "coverage": self.coverage,
            "intermediates": self.traffic.to_json(),
            "kernels": [k.to_json() for k in self.kernels],
            "fallbacks": [f.to_json() for f in self.fallbacks],
            "near_misses": [r.to_json() for r in self.near_misses],
            "remarks": [r.to_json() for r in self.remarks],
            "copies": self.copies,
            "sites": [site.to_json() for site in self.sites],
            "pass_seconds": self.seconds,
            "sizes": self.assumed,
            "machine": self.machine.to_json(),
            "totals": dict(vars(self.totals)),
            "interpreted": self.interpreted,
        }

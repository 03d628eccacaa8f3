"""Contexts of passes and plans of kernels, for a target that need not be here."""

from fusec.analysis.machine import Machine, assumed_cpu
from fusec.codegen import target_named
from fusec.codegen.triton.legality import ANY
from fusec.compiler import context_for
from fusec.config import Config
from fusec.ir.graph import Node
from fusec.loops.plan import Plan, plan_kernel
from fusec.pipeline import Context


def context_of(target: str = "cpp", config: Config | None = None, machine: Machine | None = None) -> Context:
    """Return what passes share; the machine is an assumed CPU by default, so that no test depends on this one."""
    context, _ = context_for(target_named(target), config or Config(), machine or assumed_cpu())
    return context


def plan_of(region: Node, target: str = "triton") -> Plan:
    """Return the plan of a region that has a schedule; for GPUs whether that pays or not."""
    return plan_kernel(region.body, ANY if target == "triton" else context_of(target).limits)

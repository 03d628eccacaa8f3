"""An assertion for the tests of a model: what is fused, and how much is left to ATen."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusec.analysis.sites import RULE_OF
from fusec.debug.explain import explain
from fusec.debug.explanation import Explanation
from fusec.errors import FusecError, suggestion


class Unexpected(FusecError, AssertionError):
    """A model that is not fused as expected."""


def expect(
    model: Callable[..., Any],
    *inputs: Any,
    fused: Sequence[str] = (),
    opaque: int | None = None,
    kernels: int | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Explanation:
    """Compile a model on sample inputs, and check the result.

    Args:
        model: a module or function of tensors, which is called once.
        inputs: sample inputs.
        fused: names of fusions that are matched at least once (``swiglu``), and kinds of sites of which each is fused
            (``norm``, ``attention``); ``fusec explain --sites`` lists both.
        opaque: the most calls that are left to ATen.
        kernels: the most generated kernels, counted as launches.
        options: those of ``torch.compile(..., backend="fusec")``.
        keywords: further sample inputs, by name.

    Returns:
        The explanation.

    Raises:
        Unexpected: an AssertionError, which says what is missing, and why.
    """
    found = explain(model, *inputs, options={"record": True, **(options or {})}, **keywords)
    missing = [line for name in fused for line in _missing(found, name)]
    for kind, words, most in (("opaque", "calls are left to ATen", opaque), ("generated", "kernels", kernels)):
        if most is not None and (count := found.launches(kind)) > most:
            names = ", ".join(dict.fromkeys(row.name for row in found.kernels if row.kind == kind))
            missing.append(f"{count} {words}, not {most}: {names}")
    if missing:
        raise Unexpected(f"{found.title} is not fused as expected", why="; ".join(missing), fix="see fusec.explain(…)")
    return found


def _missing(found: Explanation, name: str) -> list[str]:
    """Return for each site of a kind why it is not fused; where there is none, that no fusion of that name matched."""
    sites = [site for site in found.sites if site.site.kind == name]
    if sites:
        return [f"{name} at {site.site.module}: {site.reason}" for site in sites if not site.fused]
    applied = (r.subject for r in found.remarks if r.kind == "passed" and r.application is not None)
    if name in found.regions or name in applied:  # a larger fusion may hold it
        return []
    from fusec.passes import FUSIONS

    known = [*RULE_OF, *FUSIONS]
    if name not in known:
        return [f"no fusion or kind of site is called {name!r}: {suggestion(name, known)}"]
    misses = [str(miss.reason) for miss in found.near_misses if miss.subject == name]
    return [f"{name}: {misses[0] if misses else 'nothing matched'}"]

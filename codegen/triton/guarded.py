"""What runs where Triton cannot compile a kernel, or a GPU cannot load it: its operations one by one."""

from collections.abc import Callable, Sequence
from typing import Any

from fusec.codegen.program.unfused import Unfused
from fusec.codegen.target import Launchable
from fusec.errors import BuildError


class GuardedKernel:
    """A kernel that falls back to its operations for what it cannot be built for.

    Only that: after a launch that failed, nothing is run a second time, since it may have written to its inputs.

    Args:
        kernel: raises ``BuildError`` before it launches anything.
        unfused: what runs in its place.
        report: told why, once; may raise.
    """

    def __init__(self, kernel: Launchable, unfused: Unfused, report: Callable[[BuildError], None]) -> None:
        self.name, self.source = kernel.name, kernel.source
        self._kernel, self._unfused, self._report, self._told = kernel, unfused, report, False

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int] = ()) -> int | None:
        """As a ``Launchable``."""
        try:
            return self._kernel(buffers, symbols)
        except BuildError as reason:
            if not self._told:
                self._report(reason)
                self._told = True
        self._unfused(buffers, symbols)
        return None

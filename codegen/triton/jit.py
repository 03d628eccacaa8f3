"""The Python function of a kernel's source, which Triton compiles or interprets."""

import hashlib
import linecache
from typing import Any

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.signature import identifier
from fusec.errors import BuildError


def define(kernel: Kernel, source: str, **names: Any) -> Any:
    """Return the function that the source of a kernel defines.

    Triton reads the source of a function from its file, so the source is entered into ``linecache`` as a file.

    Args:
        kernel: the kernel.
        source: its source.
        names: further globals that the source refers to.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<fusec kernel {kernel.name} {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names |= {"__name__": f"fusec_kernel_{digest}"}
    try:
        exec(compile(source, file, "exec"), names)
        return names[identifier(kernel.name)]
    except Exception as reason:  # of a source that was edited
        why = f"{type(reason).__name__}: {reason}"
        raise BuildError(f"the source of kernel {kernel.name} defines no kernel", where=file, why=why) from reason

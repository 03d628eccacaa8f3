"""From torch graphs to the IR: ``import_fx``, ``import_exported`` and ``trace``."""

from fusec.frontend.calling import Imported
from fusec.frontend.capture import import_exported, trace
from fusec.frontend.fx import import_for_call, import_fx

__all__ = ["Imported", "import_exported", "import_for_call", "import_fx", "trace"]

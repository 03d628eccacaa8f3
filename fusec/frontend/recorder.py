"""Records a function of meta tensors, as patterns are: in a third of the time of ``make_fx``, and without Dynamo."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusec.frontend.decompositions import KEPT_WHOLE, decompositions
from fusec.frontend.torch_internals import outside_tracing, without_dynamo

_aten = torch.ops.aten


def recorded(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return the ATen operations of a function of meta tensors, decomposed as in a compile at inference."""
    with outside_tracing(), without_dynamo(), torch.inference_mode():
        recorder = _Recorder(tensors)
        with recorder:
            results = function(*tensors)
        recorder.graph.output(pytree.tree_map_only(torch.Tensor, recorder.node_of, results))
    return torch.fx.GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):
    """Adds a node for each operation, and runs it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph, self.constants, self.table = torch.fx.Graph(), torch.nn.Module(), decompositions()
        self.found: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
        """Nodes by identity of their value, which is kept so that no other takes its identity."""
        for i, tensor in enumerate(tensors):
            self._note(self.graph.placeholder(f"arg{i}_1"), tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports Dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ways = [self.table[func]] if func in self.table else []
        for decompose in (*ways, *(() if func in KEPT_WHOLE else (func.decompose,))):
            with self:
                result = decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default  # the constant may be changed in place
        given, named = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        node = self.graph.create_node("call_function", func, given, named, name=func.overloadpacket.__name__)
        result = func(*args, **kwargs)
        self._note(node, result)
        return result

    def node_of(self, value: torch.Tensor) -> torch.fx.Node:
        """Return the node of a value; one that nothing has computed is a constant."""
        if id(value) not in self.found:
            name = f"_tensor_constant{len(self.found)}"
            self.constants.register_buffer(name, value)
            self._note(self.graph.get_attr(name), value)
        return self.found[id(value)][0]

    def _note(self, node: torch.fx.Node, value: Any) -> None:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.found[id(value)] = (node, value)
        elif isinstance(value, (tuple, list)):
            for i, part in enumerate(value):
                self._note(self.graph.call_function(operator.getitem, (node, i)), part)

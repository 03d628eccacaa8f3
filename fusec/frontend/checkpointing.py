"""Checkpointed operations that are marked as random, and draw nothing: they run without the generator's state.

Checkpointing saves that state ahead of an operation that may draw random numbers, and restores it where the operation
is computed again. Attention is such an operation, whatever its dropout.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fusec.frontend.targets import draws, fake_of

_SAVES, _RESTORES = "run_and_save_rng_state", "run_with_rng_state"
"""Torch's higher-order operations of random states: one returns state and results, the other takes the state."""


def without_states(gm: GraphModule) -> GraphModule:
    """Return the module with calls that draw no random numbers made directly; calls that do are unchanged."""
    if not any(_name(node) in (_SAVES, _RESTORES) for node in gm.graph.nodes):
        return gm
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        if _name(node) in (_SAVES, _RESTORES):
            with graph.inserting_before(node):
                _call_alone(graph, node)
    return GraphModule(gm, graph)


def _call_alone(graph: Graph, node: Node) -> None:
    at = int(_name(node) == _RESTORES)
    target: Any = node.args[at]
    call = graph.call_function(target, node.args[at + 1 :], node.kwargs)
    fakes = torch.fx.node.map_arg((call.args, call.kwargs), fake_of)
    if any(isinstance(fake, torch.Tensor) for fake in pytree.tree_leaves(fakes)):
        call.meta = node.meta | {"val": target(*fakes[0], **fakes[1])}
    if draws(call):
        if at:
            node.meta = call.meta  # which the partitioner leaves out
        graph.erase_node(call)
        return
    if at:
        node.replace_all_uses_with(call)
    for user in list(node.users):
        user.replace_all_uses_with(call if user.args[1] else _no_state(graph, user))
        graph.erase_node(user)
    graph.erase_node(node)


def _no_state(graph: Graph, node: Node) -> Node:
    """Placeholder for a saved state that its operation does not read."""
    fake = fake_of(node)
    state = graph.call_function(torch.ops.aten.full.default, ([1], 0), {"dtype": fake.dtype, "device": fake.device})
    with fake.fake_mode:
        state.meta = node.meta | {"val": torch.zeros(1, dtype=fake.dtype, device=fake.device)}
    return state


def _name(node: Node) -> str:
    target: Any = node.target
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""

"""Planted faults: errors that a fusion compiler makes, which the check must find.

They are planted in the graph that Dynamo hands over, before it is compiled, so that neither the matcher nor the
kernels have a part in it; each in one place only, the first that fits.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from bench.peers import Backend
from tests.campaigns.check import Shape

Plant = Callable[[fx.Graph], bool]
SDPA = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Fault:
    """One error, and a family and input in which it would matter."""

    name: str
    family: str
    shape: Shape
    plant: Plant
    """Changes the graph; False where it finds no place."""


FAULTS: list[Fault] = []


def fault(family: str, shape: Shape = (3, 16, "left")) -> Callable[[Plant], Plant]:
    """Register a fault under the name of its function."""

    def register(plant: Plant) -> Plant:
        FAULTS.append(Fault(plant.__name__.replace("_", " "), family, shape, plant))
        return plant

    return register


def planted(fault: Fault, backend: Backend) -> Callable[..., Any]:
    """A backend that compiles the graph with the fault in it."""

    def compile_faulty(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        faulty = fx.GraphModule(graph, _copied(graph.graph))
        if not fault.plant(faulty.graph):
            raise LookupError(f"no place for the fault {fault.name!r} in {fault.family}")
        faulty.graph.eliminate_dead_code()
        faulty.graph.lint()
        faulty.recompile()
        compiler: Any = lookup_backend(backend) if isinstance(backend, str) else backend
        return compiler(faulty, example_inputs)

    return compile_faulty


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """The calls of functions, or of methods by name."""
    return (n for n in graph.nodes if n.op in ("call_function", "call_method") and n.target in targets)


def shape_of(value: Any) -> tuple[Any, ...]:
    """Of a tensor in the graph; () for anything else."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return tuple(example.shape) if isinstance(example, Tensor) else ()


def keyword(node: fx.Node, name: str, position: int) -> Any:
    """An argument, however it is given."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else None)


def set_keyword(node: fx.Node, name: str, position: int, value: Any) -> bool:
    """Set an argument, however it is given."""
    if len(node.args) > position:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
    return True


def bypass(node: fx.Node, replacement: fx.Node) -> bool:
    """Let the readers of a node read another."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
    return True


def after(node: fx.Node, function: Callable[..., Any], *more: Any) -> bool:
    """Put a function between a node and its readers."""
    readers = list(node.users)
    with node.graph.inserting_after(node):
        new = node.graph.call_function(function, (node, *more))
    for reader in readers:
        reader.replace_input_with(node, new)
    return True


def before(node: fx.Node, position: int, function: Callable[..., Any], *more: Any) -> bool:
    """Put a function between a node and one of its operands."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, (node.args[position], *more))
    node.args = (*node.args[:position], new, *node.args[position + 1 :])
    return True


def _norm_scale(graph: fx.Graph) -> fx.Node | None:
    """The product of rows and a weight that ends a hand-written RMS norm."""
    for node in calls(graph, operator.mul, torch.mul):
        shapes = sorted((shape_of(a) for a in node.args), key=len)
        if [len(s) for s in shapes] == [1, 3] and shapes[0] == shapes[1][-1:]:
            return node
    return None


@fault("llama")
def norm_scale_dropped(graph: fx.Graph) -> bool:
    """An RMS norm without its weight."""
    node = _norm_scale(graph)
    return node is not None and bypass(node, max(node.all_input_nodes, key=lambda n: len(shape_of(n))))


@fault("bert")
def layer_norm_scale_dropped(graph: fx.Graph) -> bool:
    """A layer norm without its weight."""
    return any(set_keyword(n, "weight", 2, None) for n in list(calls(graph, F.layer_norm))[:1])


@fault("bert")
def layer_norm_offset_dropped(graph: fx.Graph) -> bool:
    """A layer norm without its bias."""
    return any(set_keyword(n, "bias", 3, None) for n in list(calls(graph, F.layer_norm))[:1])


@fault("bert")
def mean_not_subtracted(graph: fx.Graph) -> bool:
    """A layer norm that forgets the mean: an RMS norm with a bias."""
    for node in calls(graph, F.layer_norm):
        node.target = _norm_without_mean
        return True
    return False


def _norm_without_mean(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight + bias


@fault("bert")
def bias_dropped(graph: fx.Graph) -> bool:
    """A projection without its bias."""
    biased = (n for n in calls(graph, F.linear, torch._C._nn.linear) if keyword(n, "bias", 2) is not None)
    return any(set_keyword(n, "bias", 2, None) for n in list(biased)[2:3])  # the value's: a key's bias cancels


@fault("llama")
def mask_dropped(graph: fx.Graph) -> bool:
    """Attention to padding and to the future."""
    return any(set_keyword(n, "attn_mask", 3, None) for n in list(calls(graph, SDPA))[:1])


@fault("gpt2")
def causality_lost(graph: fx.Graph) -> bool:
    """Attention to the future: every query gets the mask of the last."""
    for node in calls(graph, SDPA):
        mask = keyword(node, "attn_mask", 3)
        if isinstance(mask, fx.Node):
            with graph.inserting_before(node):
                last = graph.call_function(_last_query_for_all, (mask,))
            return set_keyword(node, "attn_mask", 3, last)
    return False


def _last_query_for_all(mask: Tensor) -> Tensor:
    return mask[..., -1:, :].expand(mask.shape)


@fault("llama")
def softmax_scale_doubled(graph: fx.Graph) -> bool:
    """Scores scaled by 2/√head."""
    for node in calls(graph, SDPA):
        return set_keyword(node, "scale", 6, 2 * (keyword(node, "scale", 6) or shape_of(node.args[0])[-1] ** -0.5))
    return False


@fault("qwen3")
def rotation_sign_lost(graph: fx.Graph) -> bool:
    """Rotary embedding that rotates one axis the wrong way."""
    return any(bypass(n, n.all_input_nodes[0]) for n in list(calls(graph, operator.neg, torch.neg))[:1])


@fault("llama")
def sine_and_cosine_swapped(graph: fx.Graph) -> bool:
    """Rotary embedding with its two tables exchanged."""
    waves = [*calls(graph, torch.cos, "cos"), *calls(graph, torch.sin, "sin")]
    if len(waves) != 2:
        return False
    cos, sin = waves
    cos.target, sin.target = sin.target, cos.target
    return True


@fault("gpt2")
def positions_off_by_one(graph: fx.Graph) -> bool:
    """Every token takes the next one's place."""
    for node in calls(graph, F.embedding):
        if shape_of(node.args[0])[:1] == (1,):
            return before(node, 0, torch.add, 1)
    return False


@fault("llama")
def residual_dropped(graph: fx.Graph) -> bool:
    """A sublayer's result without its input."""
    for node in calls(graph, operator.add, torch.add):
        if len(node.all_input_nodes) == 2 and all(len(shape_of(a)) == 3 for a in node.all_input_nodes):
            return bypass(node, node.all_input_nodes[1])
    return False


@fault("llama")
def eps_set_to_one(graph: fx.Graph) -> bool:
    """rsqrt(variance + 1)."""
    for root in calls(graph, torch.rsqrt, "rsqrt"):
        added = root.args[0]
        if isinstance(added, fx.Node) and isinstance(added.args[1], float):
            added.args = (added.args[0], 1.0)
            return True
    return False


@fault("mistral")
def activation_swapped(graph: fx.Graph) -> bool:
    """Gelu where the model has silu."""
    for node in calls(graph, F.silu):
        node.target, node.kwargs = F.gelu, {}
        return True
    return False


@fault("bert")
def gelu_taken_for_relu(graph: fx.Graph) -> bool:
    """Relu where the model has gelu."""
    for node in calls(graph, F.gelu, torch._C._nn.gelu):
        node.target, node.args, node.kwargs = F.relu, node.args[:1], {}
        return True
    return False


@fault("qwen2")
def gate_and_up_swapped(graph: fx.Graph) -> bool:
    """The activation on the other factor: gate · silu(up) instead of silu(gate) · up."""
    for node in calls(graph, F.silu):
        product = next(iter(node.users))
        up = next(a for a in product.all_input_nodes if a is not node)
        gate = node.args[0]
        node.args, product.args = (up,), (node, gate)
        up_first = next(n for n in graph.nodes if n in (node, up)) is node
        if up_first:  # the activation must come after what it now reads
            node.prepend(up)
            for operand in up.all_input_nodes:
                if list(graph.nodes).index(operand) > list(graph.nodes).index(up):
                    up.prepend(operand)
        return True
    return False


@fault("llama")
def heads_reversed(graph: fx.Graph) -> bool:
    """The heads of attention written back in another order."""
    return any(after(n, torch.flip, [1]) for n in list(calls(graph, SDPA))[:1])


@fault("llama")
def groups_interleaved(graph: fx.Graph) -> bool:
    """Key heads repeated 0 1 0 1 for their queries instead of 0 0 1 1."""
    return any(before(n, 1, _interleaved, 2) for n in list(calls(graph, SDPA))[:1])


def _interleaved(heads: Tensor, groups: int) -> Tensor:
    if heads.shape[1] == groups:  # not repeated: the attention groups by itself
        return heads.flip(1)
    return heads.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


@fault("vit")
def tail_left_out(graph: fx.Graph) -> bool:
    """The last columns of a row outside the loop: they keep what they had before the norm."""
    for node in calls(graph, F.layer_norm):
        node.target = _norm_without_tail
        return True
    return False


def _norm_without_tail(x: Tensor, shape: Any, *more: Any) -> Tensor:
    body = x.shape[-1] - 4
    return torch.cat((F.layer_norm(x, shape, *more)[..., :body], x[..., body:]), -1)


@fault("t5")
def second_output_stale(graph: fx.Graph) -> bool:
    """The residual stream after a fused add and norm is the one before it."""
    for node in calls(graph, operator.add, torch.add):
        operands = node.all_input_nodes
        readers = list(node.users)
        if len(operands) == 2 and all(len(shape_of(a)) == 3 for a in operands) and len(readers) > 1:
            readers[-1].replace_input_with(node, operands[0])
            return True
    return False


@fault("gemma3", (3, 24, "left"))
def window_ignored(graph: fx.Graph) -> bool:
    """A sliding window as wide as the input."""
    masks = list(dict.fromkeys(keyword(n, "attn_mask", 3) for n in calls(graph, SDPA)))
    if len(masks) < 2 or None in masks:
        return False
    return any(set_keyword(n, "attn_mask", 3, masks[1]) for n in list(calls(graph, SDPA))[:1])

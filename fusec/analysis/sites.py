"""Sites where fusions are expected, from the modules of a model alone: a check on the matcher."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_QUERY_KEY_VALUE = {"q", "k", "v", "query", "key", "value", "qkv", "kv", "attn"}
"""A part of the name of each projection to query, key and value, one at a time or several at once."""
_SEPARATE = ({"q", "query"}, {"k", "key", "kv"}, {"v", "value", "kv"})
_PACKED = {"qkv", "attn", "wqkv"}
_ACTIVATION = re.compile(r"(^|_)(act|activation|gelu)(_|$)")

_HEAD = re.compile(r"(^|_)head$|^(classifier|score|embed_out|qa_outputs)$")
"""Names of linears from the last hidden state to the results."""


@dataclass(frozen=True)
class Site:
    """A place in the model where a fusion is expected."""

    kind: str
    module: str
    """Path of the module, as the sources of its operations have it."""
    class_name: str
    parts: tuple[str, ...] = ()
    """Paths of modules inside: those that do the work; of an attention, those that do not."""


class Shape:
    """The properties of a module that rules use: its classes and the names of its children."""

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module = path, module
        self.classes = [c.__name__ for c in type(module).__mro__]
        self.children = dict(module.named_children())

    def named(self, pattern: str) -> bool:
        """Return whether its class, or a base class, has such a name."""
        return any(re.search(pattern, name) for name in self.classes)

    @property
    def is_norm(self) -> bool:
        """Return whether it is named so: RMSNorm, BatchNorm1d; NormA only without modules inside, unlike NormBlock."""
        return self.named(r"Norm(1P|[123]d)?$") or (not self.children and self.named("Norm(?![a-z])"))

    @property
    def heads(self) -> list[str]:
        """The names of linears that are named so, and of the last one of the whole model if it makes a vocabulary."""
        found = [name for name in self.linears if _HEAD.search(name)]
        last = self.linears[-1] if self.linears and not self.path else ""
        if last and last not in found and _outputs(self.children[last]) in _vocabularies(self.module):
            found.append(last)
        return found

    @property
    def linears(self) -> list[str]:
        """The names of the matrix products that it holds."""
        return [name for name, child in self.children.items() if _is_linear(child)]

    @property
    def projections(self) -> list[str]:
        """The children that project to query, key and value; empty unless it has all three."""
        found = [name for name in self.linears if _words(name) & _QUERY_KEY_VALUE or name.lower() == "wqkv"]
        words = set().union(*map(_words, found)) if found else set()
        complete = words & _PACKED or all(words & wanted for wanted in _SEPARATE)
        return found if complete else []

    @property
    def activations(self) -> list[str]:
        """The names of the activation functions that it holds."""
        held = {**vars(self.module), **self.children}
        return [name for name, value in held.items() if _ACTIVATION.search(name) and callable(value)]

    @property
    def is_mlp(self) -> bool:
        """Return whether it has a matmul and an activation, or is named so."""
        return bool(self.linears and self.activations) or (
            len(self.linears) > 1 and self.named("(MLP|Mlp|FeedForward|FFN)$")
        )

    @property
    def output(self) -> str:
        """The name of its last matmul, before the residual stream; "" where there is none."""
        others = [name for name in self.linears if name not in self.projections]
        if self.projections:
            return others[-1] if others else ""
        if self.is_mlp:
            return others[-1] if len(others) > 1 else ""
        return others[-1] if others and self.named("Output$") else ""

    @property
    def is_rotated(self) -> bool:
        """Return whether it takes positions as angles."""
        names = {*vars(self.module), *inspect.signature(self.module.forward).parameters}
        return any(re.search("^cos$|rotary|rope|sinusoidal|position_embeddings", name) for name in names)

    def at(self, *names: str) -> tuple[str, ...]:
        """Return the paths of its children with these names."""
        return tuple(f"{self.path}.{name}" if self.path else name for name in names)


@dataclass(frozen=True)
class Rule:
    """Returns whether a module is a site."""

    kind: str
    parts: Callable[[Shape], tuple[str, ...] | None]
    """The parts that do the work, none for the whole module; None where it is no such site."""
    expected: str
    """Description of a fused site."""
    fusions: str = ""
    """Regular expression for the names of declared fusions there."""


def _besides(m: Shape) -> tuple[str, ...] | None:
    """Return the projections of an attention module, which are not part of the attention itself."""
    return m.at(*m.linears) if m.projections else None


def _whole(holds: bool) -> tuple[str, ...] | None:
    return () if holds else None


def _some(paths: tuple[str, ...]) -> tuple[str, ...] | None:
    return paths or None


RULES = (
    Rule("norm", lambda m: _whole(m.is_norm), "one kernel", "norm"),
    Rule("attention", lambda m: _besides(m), "both products and the softmax in one kernel"),
    Rule("softmax", lambda m: _besides(m), "one kernel", "softmax"),
    Rule("rotary embedding", lambda m: _besides(m) if m.is_rotated else None,
         "rotation of queries and keys in a kernel each", "rotary"),
    Rule("rotary angles", lambda m: _whole(m.named("Rotary")), "one kernel"),
    Rule("QKV projection", lambda m: _some(m.at(*m.projections)), "products with their biases, and no kernel besides"),
    Rule("output and residual", lambda m: _some(m.at(*filter(None, [m.output]))),
         "the sum inside the product's kernel or the next norm's"),
    Rule("MLP", lambda m: m.at(*m.activations) if m.is_mlp else None,
         "activation and gate in one kernel, in the product's or separate", "lu|gated"),
    Rule("embedding", lambda m: _whole(m.named("^Embedding$")), "the lookup inside a kernel"),
    Rule("patches", lambda m: _whole(_tiles(m)), "a convolution or matrix product"),
    Rule("head", lambda m: _some(m.at(*m.heads)), "a product with its bias, and no kernel besides"),
)  # fmt: skip
"""Every kind of site, with what is expected there."""
RULE_OF = {rule.kind: rule for rule in RULES}


def sites_of(model: Any) -> Iterator[Site]:
    """The sites of a ``torch.nn.Module``, in the order of its modules."""
    for path, module in model.named_modules():
        shape = Shape(path, module)
        for rule in RULES:
            parts = rule.parts(shape)
            if parts is not None:
                yield Site(rule.kind, path, type(module).__name__, parts)


def _words(name: str) -> set[str]:
    return set(re.split(r"[_\d]+", name.lower()))


def _is_linear(module: Any) -> bool:
    return bool({"Linear", "Conv1D"} & {c.__name__ for c in type(module).__mro__})


def _outputs(linear: Any) -> int:
    """Return the number of columns that a linear makes; 0 where it does not say."""
    return int(getattr(linear, "out_features", getattr(linear, "nf", 0)))


def _vocabularies(model: Any) -> set[int]:
    """Return the number of rows of each embedding of a model."""
    return {int(rows) for module in model.modules() if (rows := getattr(module, "num_embeddings", 0))}


def _tiles(shape: Shape) -> bool:
    """Return whether a convolution has windows that tile its input."""
    module = shape.module
    sliding = shape.named(r"^Conv[123]d$") and tuple(module.kernel_size) == tuple(module.stride)
    return sliding and module.groups == 1 and not any(module.padding) and max(module.kernel_size) > 1

"""Does ``generate()`` with a static cache give eager's tokens, compile once, and neither copy nor read all of a cache?

``python -m bench.generate``

The forward is compiled, as transformers does it on a GPU; the prompt makes one graph, the second token another.
"""

import argparse
import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from bench.families import Family, Sizes, chosen
from bench.harness import Measurement, measure, print_promises, progress, report
from bench.machine import wait_until_idle
from bench.peers import Backend, backend_named
from bench.record import write_result
from fusec.analysis.memory import touched_bytes
from fusec.dynamo import compiled_graphs
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import estimate

PROMPT_GRAPH = "prompt"
FILL = "full"
"""The step that makes a cache."""
MODELS = "llama,gpt2,t5,gemma3,qwen3"
PROMPT = 12
"""Tokens; more than a sliding window has, or a step would take another way once it is full, and compile again."""
SIZES = Sizes(hidden=64)
CAPACITY = 4096
"""So large that nothing else in these models is."""
STEP_SIZES = Sizes(hidden=512, layers=4, heads=8)
VALID = 200
SHORT, LONG = 512, 4096
"""Capacities of a cache that holds ``VALID`` tokens."""
MOST = 1.1
"""Time of a step with the long cache over one with the short, at most."""
TIE = 1e-4
"""Two logits this near, relative to the largest, are a tie: which of them is greater is a matter of rounding."""


@dataclass
class Generated:
    """One family's tokens, and what its graphs do."""

    model: str
    tokens: int
    differs_at: int | None = None
    """The first new token that is not eager's."""
    margin: float = 0.0
    """How far eager's logits of the two tokens are apart there, relative to the largest."""
    graphs: list[int] = field(default_factory=list)
    """Compiled graphs after each call of the forward."""
    copies: dict[str, list[str]] = field(default_factory=dict)
    """By graph, the steps that move as much as a whole cache, attention's reads aside."""
    caches: int = 0
    """Tensors of keys or values as long as the capacity, each of which the prompt's graph makes and fills once."""

    @property
    def late(self) -> int:
        """Graphs compiled after the second token."""
        return self.graphs[-1] - self.graphs[1]

    @property
    def copied(self) -> list[str]:
        """Steps that move a whole cache, but for one that fills each in the prompt's graph."""
        prompt = self.copies.get(PROMPT_GRAPH, [])
        rest = [step for steps in self.copies.values() for step in steps if steps is not prompt or step != FILL]
        return [*rest, *[FILL] * (prompt.count(FILL) - self.caches)]

    @property
    def same(self) -> bool:
        """Whether the tokens are eager's, up to a tie."""
        return self.differs_at is None or self.margin < TIE

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"same": self.same, "late": self.late}


class Compiled:
    """A model whose forward is compiled for as long as this is open."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.model, self.graphs = model, list[int]()
        torch._dynamo.reset()
        compiled, self.before = torch.compile(model.forward, backend=backend), len(compiled_graphs())

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = compiled(*args, **kwargs)
            self.graphs.append(len(compiled_graphs()) - self.before)
            return output

        self.forward = forward

    def __enter__(self) -> "Compiled":
        self.model.forward = self.forward
        return self

    def __exit__(self, *_: object) -> None:
        del self.model.forward

    @property
    def made(self) -> list[Any]:
        """What was compiled."""
        return compiled_graphs()[self.before :]


def generated(
    family: Family, tokens: int, backend: Backend, capacity: int = CAPACITY, sizes: Sizes = SIZES, seed: int = 0
) -> Generated:
    """Generate twice, eager and compiled, with a static cache for ``capacity`` tokens."""
    model, inputs = build(family, sizes, seed), prompt(family, seed)
    with torch.no_grad():
        want = run(model, inputs, tokens, capacity)
        with Compiled(model, backend) as compiled:
            got = run(model, inputs, tokens, capacity)
    result = Generated(family.name, tokens, graphs=compiled.graphs)
    new = want.sequences.shape[1] - tokens
    different = (want.sequences != got.sequences).any(0).nonzero().flatten().tolist()
    if different:
        result.differs_at = different[0] - new
        logits = want.logits[result.differs_at]
        chosen_ones = torch.stack([x.sequences[:, different[0]] for x in (want, got)], 1)
        apart = logits.gather(1, chosen_ones).diff(dim=1).abs() / logits.abs().amax(1, keepdim=True)
        result.margin = float(apart.max())
    long = caches(got.past_key_values, capacity)
    result.caches, least = len(long), min((x.nbytes for x in long), default=sys.maxsize)
    for number, one in enumerate(compiled.made):
        large = steps_that_move(one.graph, least)
        large += [f"{step.name} (copy)" for step in one.program.steps if step.kind == "copy"]
        result.copies[PROMPT_GRAPH if number == 0 else f"step {number}"] = large
    return result


def build(family: Family, sizes: Sizes, seed: int = 0) -> Any:
    """The model, ready to generate as many tokens as it is asked for."""
    model: Any = family.build(sizes, seed=seed)
    for config in (model.config, model.generation_config):
        config.use_cache, config.eos_token_id, config.pad_token_id = True, None, 0
        config.decoder_start_token_id = 0
    return model


def prompt(family: Family, seed: int = 0) -> dict[str, Tensor]:
    """What generation starts from."""
    tokens = family.sample(1, PROMPT, "none", seed)["input_ids"]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def run(model: Any, inputs: dict[str, Tensor], tokens: int, capacity: int) -> Any:
    """Greedy tokens with their logits."""
    return model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        max_cache_len=capacity,
        return_dict_in_generate=True,
        output_logits=True,
    )


def caches(cache: Any, capacity: int) -> list[Tensor]:
    """Keys and values of the layers that hold as much as the cache does."""
    own = getattr(cache, "self_attention_cache", cache)
    return [x for layer in own.layers if layer.keys.shape[2] == capacity for x in (layer.keys, layer.values)]


def steps_that_move(graph: Graph, least: int) -> list[str]:
    """Names of the steps that read or write as many bytes as that, save attentions and what runs nothing."""
    return [
        str(node.attributes.get("label") or node.attributes.get("target") or node.op.name)
        for node in graph.nodes
        if not node.has(Trait.SOURCE)
        and (not node.has(Trait.VIEW) or node.is_op("concat"))
        and "attention" not in node.attributes.get("fusions", ())
        and any(estimate(touched_bytes(value)) >= least for value in _moved(node))
    ]


def _moved(node: Node) -> list[Value]:
    """What a step reads and writes as a whole: not what it only writes rows of."""
    nodes = node.body.nodes if node.has(Trait.REGION) else [node]
    inputs = node.body.inputs if node.has(Trait.REGION) else node.operands
    outputs = node.body.outputs if node.has(Trait.REGION) else node.results
    written = {value for n in nodes if n.is_op("write") for value in (n.operands[0], *n.results)}
    read = {value for n in nodes for value in (n.operands[1:] if n.is_op("write") else n.operands)}
    return [v for v in (*inputs, *outputs) if v not in written or v in read]


def measure_steps(family: Family, options: argparse.Namespace) -> Measurement:
    """A step with the long cache against one with the short, both holding as many tokens."""
    candidates: dict[str, Callable[[], object]] = {}
    for capacity in (SHORT, LONG):
        candidates[capacity_name(capacity)] = step(build(family, STEP_SIZES, options.seed), capacity, options.backend)
    return measure(candidates, options.rounds, baseline=capacity_name(SHORT))


def capacity_name(capacity: int) -> str:
    """How a candidate is called."""
    return f"capacity {capacity}"


def step(model: Any, capacity: int, backend: str) -> Callable[[], object]:
    """One more token after ``VALID`` of them, again and again."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=capacity)
    tokens = torch.randint(3, model.config.vocab_size, (1, VALID), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
    compiled = torch.compile(model, backend=backend_named(backend), dynamic=False)

    def again() -> object:
        for layer in cache.layers:
            layer.cumulative_length.fill_(VALID)
        return compiled(tokens[:, -1:], past_key_values=cache, use_cache=True)

    return again


def main(words: list[str] | None = None) -> int:
    """Generate with every family, then measure; status 1 where a promise is broken."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    console, families = report(options.width), chosen(options.models)
    results = []
    with progress() as bar:
        task = bar.add_task("generate", total=len(families))
        for family in families:
            bar.update(task, description=f"generate {family.name}")
            backend = backend_named(options.backend)
            results.append(generated(family, options.tokens, backend, seed=options.seed))
            bar.advance(task)
    console.print(generated_table(results))
    promises: dict[str, bool] = {}
    for result in results:
        promises[f"{result.model}: {options.tokens} tokens as eager's"] = result.same
        promises[f"{result.model}: nothing is compiled after the second token"] = not result.late
        promises[f"{result.model}: no cache is copied, and each is filled once"] = not result.copied
    content: dict[str, Any] = {"generated": [result.to_json() for result in results]}
    if not options.no_time:
        wait_until_idle(options.allow_busy)
        times = measure_steps(chosen("llama")[0], options)
        ratio = times.row(capacity_name(LONG)).ratio
        console.print(
            f"a step of Llama ({STEP_SIZES.layers} layers of {STEP_SIZES.hidden}, {VALID} tokens in the cache): "
            f"{times.row(capacity_name(SHORT)).milliseconds:.3f} ms at capacity {SHORT}, "
            f"{times.row(capacity_name(LONG)).milliseconds:.3f} ms at {LONG}, ratio {ratio:.3f} "
            f"(noise {times.noise:.1%}{', busy!' if times.disturbed else ''})",
            highlight=False,
        )
        promises[f"a step at capacity {LONG} takes at most {MOST} of one at {SHORT}"] = ratio <= MOST
        content["steps"] = times.to_json()
    print_promises(console, promises)
    path = write_result("generate", options.seed, content | {"promises": promises}, options.json)
    console.print(f"written to {path}", style="dim", highlight=False)
    return int(not all(promises.values()))


def generated_table(results: list[Generated]) -> Table:
    """A line per family."""
    shown = Table(title=f"Generation with a static cache for {CAPACITY} tokens")
    for column in ("model", "tokens", "first that differs", "graphs", "after the second token", "moves a cache"):
        shown.add_column(column)
    for result in results:
        differs = "-" if result.differs_at is None else f"{result.differs_at} (logits apart by {result.margin:.1e})"
        moved = "; ".join(f"{graph}: {', '.join(steps)}" for graph, steps in result.copies.items() if steps)
        shown.add_row(result.model, str(result.tokens), differs, str(result.graphs[-1]), str(result.late), moved or "-")
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.generate", description=__doc__)
    add = parser.add_argument
    add("--models", default=MODELS, metavar="A,B")
    add("--tokens", type=int, default=64)
    add("--backend", default="fusec", help="fusec, interpreter, inductor, aot_eager or eager")
    add("--no-time", action="store_true", help="only what does not depend on the machine")
    add("--rounds", type=int, default=30)
    add("--seed", type=int, default=0)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/generate.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())

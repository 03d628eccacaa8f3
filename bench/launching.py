"""Are launches that are recorded and replayed right on a GPU, and what does launching cost?

``python -m bench.launching``, on a machine with a GPU; a stage of ``bench.gpu`` does the same.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from bench.harness import console, report
from bench.record import write_result
from fusec import dynamo
from fusec.codegen.program.recordings import PASS_NAME
from fusec.config import Config
from fusec.models.llama import PRESETS, Llama
from fusec.models.weights import redraw
from fusec.remarks import Remark

CALLS = 6
"""Of each model: two before the one that records, and replays."""
DEPTH = 32
"""Layers of the model whose launches are timed: each is small, so that launching is what takes time."""
ROUNDS = 30
WAYS: Mapping[str, Mapping[str, Any]] = {
    "launch by launch": {},
    "dependent launch": {"dependent_launch": True},
    "recorded": {"cuda_graphs": True},
    "recorded, dependent launch": {"cuda_graphs": True, "dependent_launch": True},
}


class Layers(nn.Module):
    """Norms and products of a few numbers."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(depth))
        self.products = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` to the same."""
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x))
        return x


def compiled(model: Any, **options: Any) -> Any:
    """The model as fusec runs it, with nothing left of what was compiled before."""
    torch._dynamo.reset()
    return torch.compile(model, backend=dynamo.backend, options={"strict": True, **options})


def told() -> list[Remark]:
    """What is said of recordings since the last reset."""
    return [r for c in dynamo.compiled_graphs() for r in c.remarks if r.pass_name == PASS_NAME]


def _recorded() -> None:
    if [r.kind for r in told()] != ["analysis"]:
        raise AssertionError(f"not recorded once: {'; '.join(map(str, told()))}")


def _close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def _layers_replay(device: torch.device, **options: Any) -> None:
    model = Layers(3).to(device)
    fast = compiled(model, cuda_graphs=True, **options)
    given = [torch.randn(4, 64, device=device) for _ in range(CALLS)]
    found = [fast(x) for x in given]  # all of them are looked at after the last call
    _close(found, [model(x) for x in given])
    _recorded()


def _dependent_launches(device: torch.device) -> None:
    _layers_replay(device, dependent_launch=True)


def _decoding(device: torch.device) -> None:
    model: Any = redraw(Llama(PRESETS["tiny"])).to(device)
    fast = compiled(model, cuda_graphs=True)
    caches, logits = [model.new_cache(1, 64) for _ in range(2)], list[Tensor]()
    prompt = torch.arange(9, device=device)[None]
    token = prompt[:, :1]
    for cache in caches:
        model(prompt, cache=cache)
    for _ in range(2 * CALLS):
        expected = model(token, cache=caches[0])
        logits.append(fast(token, cache=caches[1]))
        _close(logits[-1], expected)
        token = expected[:, -1:].argmax(-1)
    for parts in zip(*([*cache.keys, *cache.values, cache.length] for cache in caches), strict=True):
        _close(*parts)
    _recorded()


def _a_weight_moves(device: torch.device) -> None:
    model, x = Layers(2).to(device), torch.randn(4, 64, device=device)
    fast = compiled(model, cuda_graphs=True)
    for _ in range(CALLS):
        fast(x)
    product: Any = model.products[0]
    product.weight.mul_(2)
    _close(fast(x), model(x))
    product.weight.data = torch.randn(64, 64, device=device) / 8
    for _ in range(CALLS):
        _close(fast(x), model(x))


def _random_numbers(device: torch.device) -> None:
    fast = compiled(lambda x: nn.functional.dropout(x, 0.5, training=True) * 2, cuda_graphs=True)
    x = torch.ones(256, device=device)
    if len({tuple(fast(x).tolist()) for _ in range(CALLS)}) != CALLS:
        raise AssertionError("the same numbers came again")
    _recorded()


def _streams(device: torch.device) -> None:
    """Calls on two streams in turn, none of which waits for the other by itself."""
    model = Layers(8).to(device)
    fast, streams = compiled(model, cuda_graphs=True), [torch.cuda.Stream(device) for _ in range(2)]
    given = [torch.randn(512, 64, device=device) for _ in range(40)]
    torch.cuda.synchronize(device)
    found = []
    for i, x in enumerate(given):
        with torch.cuda.stream(streams[i % 2]):
            found.append(fast(x))
    torch.cuda.synchronize(device)
    _close(found, [model(x) for x in given])
    _recorded()


def _within_a_graph_of_one_s_own(device: torch.device) -> None:
    model, x = Layers(3).to(device), torch.randn(4, 64, device=device)
    fast, graph = compiled(model, cuda_graphs=True), torch.cuda.CUDAGraph()
    for _ in range(CALLS):
        fast(x)
    with torch.cuda.graph(graph):
        y = fast(x)
    x.normal_()
    graph.replay()
    _close(y, model(x))


def _what_waits_runs_all_the_same(device: torch.device) -> None:
    """An operation that asks the GPU for a number, of which torch knows nothing."""
    if not hasattr(torch.ops.fusec_bench, "waits"):

        @torch.library.custom_op("fusec_bench::waits", mutates_args=())
        def waits(x: Tensor) -> Tensor:
            return x * float(x.abs().sum().item() > 0)

        waits.register_fake(torch.empty_like)
    fast, x = compiled(lambda x: torch.tanh(torch.ops.fusec_bench.waits(x)) + 1, cuda_graphs=True), torch.randn(4)
    x = x.to(device)
    for _ in range(CALLS):
        _close(fast(x), torch.tanh(x) + 1)
    if not any("could not be recorded" in r.message for r in told()):
        raise AssertionError("no remark says that it waits")
    _random_numbers(device)  # what failed leaves neither memory nor a generator behind that others wait for


def _memory_stays(device: torch.device) -> None:
    model, x = Layers(3).to(device), torch.randn(4096, 64, device=device)
    fast = compiled(model, cuda_graphs=True)
    for _ in range(CALLS):
        fast(x)
    before = torch.cuda.memory_allocated(device)
    for _ in range(50):
        fast(x)
    if torch.cuda.memory_allocated(device) > before:
        raise AssertionError("calls leave memory behind")


ANYWHERE: tuple[Callable[[torch.device], None], ...] = (_layers_replay, _decoding, _a_weight_moves, _random_numbers)
"""What can be asked of every device that launches are recorded on."""
ON_A_GPU = (
    _dependent_launches, _streams, _within_a_graph_of_one_s_own, _memory_stays, _what_waits_runs_all_the_same,
)  # fmt: skip


def problems(device: torch.device) -> Iterator[tuple[str, str]]:
    """What was asked, in words, and what is wrong; empty where nothing is."""
    with torch.no_grad():
        for check in (*ANYWHERE, *(ON_A_GPU if device.type == "cuda" else ())):
            name, problem = check.__name__.strip("_").replace("_", " "), ""
            try:
                check(device)
            except Exception as reason:
                problem = f"{type(reason).__name__}: {reason}"
            yield name, problem


def costs(device: torch.device, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Microseconds of a launch in each way, among ``2 · DEPTH`` in a row, taken in turn: ``cpu``, ``whole``.

    ``cpu`` is until the call is back, ``whole`` until all is done.
    """
    model, x = Layers(DEPTH).to(device), torch.randn(1, 64, device=device)
    with torch.no_grad():
        torch._dynamo.reset()
        ways: dict[str, Callable[[Tensor], Tensor]] = {"eager": model}
        for name, options in WAYS.items():
            ways[name] = torch.compile(model.forward, backend=dynamo.backend_for(Config(**options)))
            for _ in range(CALLS):
                ways[name](x)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, call in ways.items():
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                call(x)
                back = time.perf_counter()
                torch.cuda.synchronize(device)
                taken[name].append((back - start, time.perf_counter() - start))
    each = 1e6 / (2 * DEPTH)
    return {
        name: {
            "cpu": each * statistics.median(t[0] for t in times),
            "whole": each * statistics.median(t[1] for t in times),
        }
        for name, times in taken.items()
    }


def main(words: list[str] | None = None) -> int:
    """Check, then time; status 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.launching", description=__doc__)
    parser.add_argument("--json", default="", help="where to write what was found")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("bench.launching measures a GPU, and torch finds none\n  fix:   run it on a machine with one")
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    found = dict(problems(device))
    for name, problem in found.items():
        console.print(f"[red]FAIL[/] {name}: {problem}" if problem else f"ok   {name}", highlight=False, soft_wrap=True)
    times = costs(device)
    table = Table("way", "CPU, µs a launch", "whole, µs a launch", title=f"{2 * DEPTH} small launches in a row")
    for name, row in times.items():
        table.add_row(name, f"{row['cpu']:.2f}", f"{row['whole']:.2f}")
    report().print(table)
    content = {"device": torch.cuda.get_device_name(device), "problems": found, "us": times}
    write_result("launching", 0, content, options.json)
    return int(any(found.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""The tables of docs/performance.md, made from the files in bench/results that they show."""

from collections.abc import Callable, Mapping
from typing import Any

from bench.harness import OURS

Result = Mapping[str, Any]
TITLES = {
    "decode 1": "Llama, one token",
    "decode 8": "Llama, one token of each of 8 sequences",
    "prefill 32": "Llama, prompt of 32 tokens",
    "prefill 128": "Llama, prompt of 128 tokens",
    "prefill 512": "Llama, prompt of 512 tokens",
    "sentence embeddings": "sentence embeddings, batches of 4, dynamic lengths",
    "decode 1, hidden 64": "Llama with hidden 64 and 2 layers, one token",
}
"""The workloads of ``bench.cpu`` in a reader's words; others keep their names."""
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3", "gpt2": "GPT-2", "bert": "BERT", "t5": "T5",
            "mixtral": "Mixtral"}  # fmt: skip
"""The families shown of those that ``bench.speed`` measures."""
LENGTHS = (1, 16, 128)
DTYPES = ("float32", "bfloat16")


def peers_table(result: Result) -> str:
    """Return the table of a ``bench.cpu`` result: the best peer's time over fusec's, by workload."""
    found: dict[str, list[Result]] = {}
    for title, figures in result["workloads"].items():
        name, _, _ = title.rpartition(", ")
        found.setdefault(name, []).append(figures)
    rows = ["| workload | default, float32 / bfloat16 | frozen, float32 / bfloat16 | noise |", "|---|---|---|---|"]
    for name, figures in found.items():
        default, frozen = (" / ".join(f"{f[way]:.2f}" for f in figures) for way in ("default", "frozen"))
        noise = max(f["noise"] for f in figures)
        rows.append(f"| {TITLES.get(name, name)} | {default} | {frozen} | {noise:.1%} |")
    return "\n".join([*rows, ""])


def families_table(result: Result) -> str:
    """Return the table of a ``bench.speed`` result: eager's time over fusec's, by family and number of tokens."""
    rows = ["| model | 1 token | 16 tokens | 128 tokens |", "|---|---|---|---|"]
    for family, name in FAMILIES.items():
        cells = (" / ".join(f"{_speedup(result, family, dtype, n):.2f}" for dtype in DTYPES) for n in LENGTHS)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def _speedup(result: Result, family: str, dtype: str, length: int) -> float:
    rows = result["measurements"][f"{family} {dtype}, {length} tokens"]["rows"]
    return 1.0 / next(float(row["ratio"]) for row in rows if row["name"] == OURS)


TABLES: Mapping[str, Callable[[Result], str]] = {
    "speed": families_table, "cpu": peers_table, "cpu_intel": peers_table, "cpu_avx2": peers_table,
}  # fmt: skip
"""By the file in bench/results; on the page each stands between ``<!-- NAME.json -->`` and its end."""

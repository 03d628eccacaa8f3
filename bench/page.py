"""How large is the page of a deep model, and how long does a browser take to show it?

``python -m bench.page``

Needs Chromium, and the extra ``browser``. Widths are small: the page depends on the number of operations alone.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from bench.harness import report
from bench.record import write_result
from fusec.debug.explain import explain
from fusec.viz.html import render

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
MEGABYTES, PAINT_MS, STEP_MS = 8.0, 1000.0, 100.0
"""The most that a page may take."""
_STEPS = """() => {
    const times = [], timed = act => {
        const start = performance.now(); act(); paint(); times.push(performance.now() - start); };
    for (const opened of [closeAll, openAll]) {
        opened();
        for (let i = 0; i < states.length; i += 1) { timed(() => step(i)); timed(() => side(true)); }
        for (const name of ["Kernels", "Outline", "IR", "Model"]) timed(() => tab(name));
        for (const kernel of report().kernels.slice(0, 8)) timed(() => goTo(kernel.nodes[kernel.nodes.length - 1]));
        timed(() => search("norm"));
    }
    return times;
}"""


def main(words: list[str] | None = None) -> int:
    """Compile each model, write its page, open it, and take every step of it."""
    parser = argparse.ArgumentParser(prog="bench.page", description=__doc__)
    parser.add_argument("--models", default="llama,deepseek")
    parser.add_argument("--layers", type=int, default=0, help="by default 32 of Llama and 61 of DeepSeek")
    parser.add_argument("--json", default="", help="by default bench/results/page.json")
    parser.add_argument("--width", type=int)
    options = parser.parse_args(words)
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        parser.error("no Chromium is installed (Debian, Ubuntu: apt install chromium)")
    found = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("pages", total=2 * len(options.models.split(",")))
        for name in options.models.split(","):
            progress.update(task, description=f"{name}: compile and write")
            page, nodes, seconds = _page(name, options.layers)
            progress.update(task, advance=1, description=f"{name}: open")
            found[name] = {"nodes": nodes, "megabytes": len(page) / 1e6, "write_s": seconds, **_opened(page, browser)}
            progress.update(task, advance=1)
    report(options.width).print(_table(found))
    write_result("page", 0, found, options.json)
    return int(any(
        row["megabytes"] > MEGABYTES or row["paint_ms"] > PAINT_MS or row["longest_step_ms"] > STEP_MS
        for row in found.values()
    ))  # fmt: skip


def _page(name: str, layers: int) -> tuple[str, int, float]:
    """Return the page of a model, its imported nodes, and the seconds that it took to write."""
    with torch.no_grad():
        explanation = explain(_model(name, layers), torch.arange(16)[None], title=name)
    start = time.perf_counter()
    page = render(explanation)
    return page, explanation.imported_nodes, time.perf_counter() - start


def _model(name: str, layers: int) -> Any:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers or 32, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config).eval()
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
    heads = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
    deepseek = transformers.DeepseekV3Config(
        **sizes, **experts, **heads, num_hidden_layers=layers or 61, num_key_value_heads=4, num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(deepseek).eval().bfloat16()


def _opened(page: str, browser: str) -> dict[str, float]:
    """Return the milliseconds to the first paint of the graph, and of the longest and the median step after it."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        shown = running.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        shown.goto(file.as_uri())
        shown.wait_for_selector("body[data-ready]")
        paint = shown.evaluate("() => new Promise(done => requestAnimationFrame(() => done(performance.now())))")
        shown.wait_for_selector("body[data-whole]")
        times = sorted(shown.evaluate(_STEPS))
    return {"paint_ms": paint, "longest_step_ms": times[-1], "median_step_ms": times[len(times) // 2]}


def _table(found: dict[str, Any]) -> Table:
    table = Table("model", "nodes", "MB", "written in s", "first paint ms", "longest step ms", "median step ms")
    for name, row in found.items():
        times = (f"{row[key]:.0f}" for key in ("paint_ms", "longest_step_ms", "median_step_ms"))
        table.add_row(name, f"{row['nodes']:,}", f"{row['megabytes']:.2f}", f"{row['write_s']:.1f}", *times)
    return table


if __name__ == "__main__":
    raise SystemExit(main())

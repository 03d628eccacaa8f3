"""The example that serves a model: it answers requests as the model alone does, and its page shows them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples.serve import llama, percentiles

ROOT = Path(__file__).parents[1]
HIDDEN, LAYERS, NEW = 64, 1, 12
PROMPTS = ["a", "a prompt of some length", "another one: " + 9 * "long ", "b" * 90]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.thorough)], ids=["eager", "fusec"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a server listens; it ends without a complaint when it is interrupted."""
    words = ["examples/serve.py", "--port", "0", "--hidden", str(HIDDEN), "--layers", str(LAYERS), "--new-tokens", "12"]
    words += ["--eager"] if request.param else []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE) as server:  # fmt: skip
        assert server.stdout is not None
        try:
            found = next((line for line in server.stdout if line.startswith("serving at ")), "")
            yield found.removeprefix("serving at ").strip()
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


def ask(address: str, content: Any = None) -> Any:
    """Return the answer, decoded."""
    data = None if content is None else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(address, data), timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_requests_together_are_answered_as_alone(address: str) -> None:
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: ask(f"{address}/generate", {"prompt": prompt}), PROMPTS))
    model = llama(HIDDEN, LAYERS, seed=0)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        given = torch.tensor([list(prompt.encode())])
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        alone = model.generate(given, attention_mask=torch.ones_like(given), **options)
        assert answer["error"] is None and answer["tokens"] == alone[0, given.shape[1] :].tolist()
        assert answer["ttft_ms"] > 0 and answer["tpot_ms"] > 0
    figures = ask(f"{address}/figures")
    assert (figures["finished"], figures["waiting"], figures["running"]) == (len(PROMPTS), 0, 0)
    assert figures["tokens_per_second"] > 0
    assert figures["ttft_ms"] == pytest.approx(percentiles([answer["ttft_ms"] for answer in found]))
    assert sorted(r["prompt"] for r in figures["latest"]) == sorted(len(p) for p in PROMPTS)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser")
def test_the_page_in_a_browser(address: str) -> None:
    assert CHROMIUM is not None
    ask(f"{address}/generate", {"prompt": "a"})
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom", f"{address}/"]
    page = subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=120, check=True).stdout
    finished = re.search(r'id="finished">(\d+)<', page)
    assert finished and int(finished[1]) == ask(f"{address}/figures")["finished"]
    assert "ms<small>median; p90" in page and "<td>finished</td>" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "content", "status"),
    [("/generate", {}, 400), ("/generate", ["a"], 400), ("/other", {}, 404), ("/load", {"requests": "many"}, 400)],
)
def test_requests_that_are_refused(address: str, path: str, content: Any, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as problem:
        ask(address + path, content)
    assert problem.value.code == status and json.loads(problem.value.read())["error"]
    problem.value.close()

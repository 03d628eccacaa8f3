"""A server of a Llama with random weights: continuous batching by transformers, steps by fusec, a page that shows it.

Run as ``python examples/serve.py`` and open the address that it prints. Tokens are bytes: what it answers is noise.
"""

import json
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from transformers import AttentionInterface, CompileConfig, ContinuousBatchingConfig, GenerationConfig

import fusec

PAGE = Path(__file__).with_name("serve.html")
BYTES = 256
"""Tokens of the vocabulary."""
WINDOW = 10.0
"""Seconds over which tokens a second are counted."""
KEPT = 1000
"""Finished requests that percentiles are of."""


@dataclass
class Request:
    """One request, from its arrival on."""

    prompt: int
    arrived: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    """The time of each new token."""
    tokens: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    @property
    def first_ms(self) -> float | None:
        """Milliseconds from its arrival to the first token."""
        return 1e3 * (self.times[0] - self.arrived) if self.times else None

    @property
    def each_ms(self) -> float | None:
        """Milliseconds of each further token."""
        return 1e3 * (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None


class Server:
    """The model, the manager of transformers, and what is known of each request."""

    def __init__(self, new_tokens: int) -> None:
        self.new_tokens, self.lock = new_tokens, threading.Lock()
        self.manager: Any = None
        self.requests: dict[str, Request] = {}
        """The latest, in the order of their arrival."""
        self.produced: list[float] = []
        """The times of the tokens of the last seconds."""
        self.finished = 0

    def start(self, model: Any, compiled: bool) -> None:
        """Start the manager, and compile for few and for many tokens, before anyone waits for it."""
        settings: dict[str, Any] = {"page_size": 16, "num_blocks": 2048, "max_batch_tokens": 256}
        if compiled:
            compiling = CompileConfig(backend="fusec", mode=None)
            settings |= {"varlen_compile_config": compiling}
            settings |= {"q_padding_interval_size": 8, "kv_padding_interval_size": 64}
        AttentionInterface.register("paged|eager", fusec.paged_attention)
        model.set_attn_implementation("eager")
        self.manager = model.init_continuous_batching(
            GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
        )
        self.manager.start()
        threading.Thread(target=self._collect, daemon=True).start()
        for count in (1, 1, 8, 16):
            for request in self.load(count):
                request.done.wait()
        with self.lock:
            self.requests, self.produced, self.finished = {}, [], 0

    def add(self, tokens: list[int], new_tokens: int | None = None) -> Request:
        """Hand a request to the manager."""
        with self.lock:
            request = Request(len(tokens))
            name = self.manager.add_request(tokens, max_new_tokens=new_tokens or self.new_tokens, streaming=True)
            if name is None:
                raise RuntimeError("the manager has stopped")
            self.requests[name] = request
        return request

    def _collect(self) -> None:
        """Note each new token when the manager delivers it."""
        for output in self.manager:
            with self.lock:
                request, now = self.requests[output.request_id], time.perf_counter()
                new = len(output.generated_tokens) - len(request.tokens)
                request.tokens, request.error = list(output.generated_tokens), output.error
                request.times += [now] * new
                self.produced += [now] * new
                if output.is_finished():
                    self.finished += 1
                    request.done.set()
                    self._forget()

    def _forget(self) -> None:
        """Drop the oldest finished requests."""
        done = [name for name, request in self.requests.items() if request.done.is_set()]
        for name in done[:-KEPT]:
            del self.requests[name]

    def figures(self) -> dict[str, Any]:
        """Return what the page shows."""
        with self.lock:
            now, requests = time.perf_counter(), list(self.requests.values())
            self.produced = [at for at in self.produced if now - at < WINDOW]
            open_ones = [request for request in requests if not request.done.is_set()]
            return {
                "waiting": sum(not request.times for request in open_ones),
                "running": sum(bool(request.times) for request in open_ones),
                "finished": self.finished,
                "tokens_per_second": len(self.produced) / WINDOW,
                "ttft_ms": percentiles([ms for request in requests if (ms := request.first_ms) is not None]),
                "tpot_ms": percentiles([ms for request in requests if (ms := request.each_ms) is not None]),
                "latest": [
                    {"prompt": r.prompt, "tokens": len(r.tokens), "ttft_ms": r.first_ms, "tpot_ms": r.each_ms,
                     "done": r.done.is_set(), "error": r.error}
                    for r in requests[:-13:-1]
                ],
            }  # fmt: skip

    def load(self, count: int) -> list[Request]:
        """Add random requests."""
        lengths = [random.randint(8, 200) for _ in range(count)]
        return [self.add([random.randrange(BYTES) for _ in range(length)]) for length in lengths]

    def stop(self) -> None:
        """Finish the step that runs, and end the manager's thread."""
        if self.manager is not None:
            self.manager.stop(hard_stop=True)


def llama(hidden: int, layers: int, seed: int) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 128), vocab_size=BYTES, max_position_embeddings=8192,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def percentiles(values: list[float]) -> dict[str, float] | None:
    """The 50th, 90th and 99th percentile."""
    if not values:
        return None
    of_hundred = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {f"p{n}": of_hundred[n - 1] for n in (50, 90, 99)}


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    """The addresses: the page, its figures, a request, and many random ones."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._send(200, PAGE.read_bytes(), "text/html; charset=utf-8")
            elif self.path == "/figures":
                self._send_json(200, server.figures())
            else:
                self._send_json(404, {"error": f"no page {self.path}"})

        def do_POST(self) -> None:
            try:
                given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/generate":
                    self._send_json(200, self._generate(given["prompt"], given.get("new_tokens")))
                elif self.path == "/load":
                    self._send_json(200, {"added": len(server.load(min(int(given["requests"]), KEPT)))})
                else:
                    self._send_json(404, {"error": f"no page {self.path}"})
            except (ValueError, KeyError, TypeError) as problem:
                self._send_json(400, {"error": f"{type(problem).__name__}: {problem}"})

        def _generate(self, prompt: str, new_tokens: int | None) -> dict[str, Any]:
            request = server.add(list(prompt.encode() or b" "), new_tokens)
            request.done.wait()
            return {"tokens": request.tokens, "ttft_ms": request.first_ms, "tpot_ms": request.each_ms,
                    "error": request.error}  # fmt: skip

        def _send_json(self, status: int, content: object) -> None:
            self._send(status, json.dumps(content).encode(), "application/json")

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing: the page shows every request."""

    return Handler


def main(
    host: str = "127.0.0.1", port: int = 8000, hidden: int = 512, layers: int = 4, new_tokens: int = 64,
    seed: int = 0, eager: bool = False,
) -> None:  # fmt: skip
    """Serve until interrupted.

    Args:
        host: that is listened to.
        port: 0 takes a free one.
        hidden: size of the model.
        layers: of the model.
        new_tokens: of a request that does not say how many.
        seed: of the weights.
        eager: leave the steps uncompiled, to compare.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell lets its background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    server = Server(new_tokens)
    with ThreadingHTTPServer((host, port), handler(server)) as web:
        try:
            print("compiling" if not eager else "starting", flush=True)
            server.start(llama(hidden, layers, seed), compiled=not eager)
            print(f"serving at http://{host}:{web.server_port}", flush=True)
            web.serve_forever()
        except KeyboardInterrupt:
            print("stopping", flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    typer.run(main)

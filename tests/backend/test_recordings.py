"""Programs recorded and replayed: by a recorder for the CPU, which keeps what is launched and on what memory."""

import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusec import dynamo
from fusec.codegen import target_named
from fusec.codegen.program import recordings
from fusec.codegen.program.program import build_program
from fusec.codegen.program.recordings import MAX_RECORDINGS, PASS_NAME
from fusec.config import Config
from fusec.debug.explain import explain
from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType
from fusec.remarks import Remarks
from tests.backend.tape import TapeRecorder, record_on_cpu
from tests.contexts import context_of

OPTIONS = {"cuda_graphs": True, "strict": True}


@pytest.fixture(params=["cpp", "triton"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    torch._dynamo.reset()
    return record_on_cpu(monkeypatch, request.param)


@pytest.fixture
def on_cpp(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    torch._dynamo.reset()
    return record_on_cpu(monkeypatch)


def compiled(model: Any, **options: Any) -> Any:
    dynamic = options.pop("dynamic", False)
    return torch.compile(model, backend=dynamo.backend, dynamic=dynamic, options=OPTIONS | options)


def remarks() -> list[Any]:
    return [r for c in dynamo.compiled_graphs() for r in c.remarks if r.pass_name == PASS_NAME]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.register_buffer("scale", torch.rand(16) + 1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return x + h * self.scale


@torch.no_grad()
def test_calls_warm_up_then_record_then_replay(recorder: TapeRecorder) -> None:
    model = Layer()
    fast = compiled(model)
    for _ in range(6):
        x = torch.randn(2, 16)
        torch.testing.assert_close(fast(x), model(x))
    launches = recorder.log.count("launch")
    assert launches and launches % 2 == 0  # of two calls
    assert recorder.log == ["launch"] * launches + ["record"] + ["replay"] * 4
    assert recorder.tapes[0].launches == launches // 2
    (found,) = remarks()
    assert found.kind == "analysis" and found.figures == {"static": 6, "copied": 1, "bytes": 2 * 16 * 4}


@torch.no_grad()
def test_results_stay_what_they_are(recorder: TapeRecorder) -> None:
    """A replay writes where the last one wrote, but not into what that one gave."""
    model = Layer()
    fast, given = compiled(model), [torch.randn(2, 16) for _ in range(6)]
    found = [fast(x) for x in given]
    for x, y in zip(given, found, strict=True):
        torch.testing.assert_close(y, model(x))
    assert recorder.replays == 4


@torch.no_grad()
def test_other_strides_and_addresses_of_what_is_copied(on_cpp: TapeRecorder) -> None:
    model = Layer()
    fast = compiled(model)
    for _ in range(4):
        fast(torch.randn(2, 16))
    for x in (torch.randn(16, 2).t(), torch.randn(1, 16).expand(2, 16), torch.randn(70)[3:35].view(2, 16)):
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
    assert on_cpp.replays > 4


@torch.no_grad()
def test_a_weight_in_another_place_is_recorded_again(recorder: TapeRecorder) -> None:
    model, x = Layer(), torch.randn(2, 16)
    fast = compiled(model)
    for _ in range(4):
        fast(x)
    model.up.weight.mul_(2)  # in place: the recording reads it
    torch.testing.assert_close(fast(x), model(x))
    assert recorder.log.count("record") == 1
    model.up.weight.data = torch.randn(40, 16)
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x))
    assert recorder.log.count("record") == 2 and recorder.log.count("synchronize") == 1
    assert ["recorded again" in r.message for r in remarks()] == [False, True]


@torch.no_grad()
def test_a_weight_turned_in_its_place_is_seen_although_dynamo_does_not_look(on_cpp: TapeRecorder) -> None:
    model, x = nn.Linear(16, 16), torch.randn(2, 16)
    fast = compiled(model)
    for _ in range(4):
        fast(x)
    torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    try:
        model.weight.data = model.weight.data.t()
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
    finally:
        torch.compiler.set_stance("default")
    assert len(dynamo.compiled_graphs()) == 1


class Counting(nn.Module):
    """Writes into a cache that it is given, behind what is there."""

    def forward(self, x: Tensor, cache: Tensor, place: Tensor) -> Tensor:
        cache.index_copy_(0, place, x * 2)
        place.add_(1)
        return torch.tanh(cache).sum(0)


@torch.no_grad()
def test_what_is_written_to_is_the_caller_s(recorder: TapeRecorder) -> None:
    """And every call counts as a change, once: recording does nothing yet."""
    model, fast = Counting(), compiled(Counting())
    ours, theirs = ((torch.zeros(20, 8), torch.zeros(1, dtype=torch.int64)) for _ in range(2))
    for i in range(7):
        x, version = torch.randn(1, 8), ours[0]._version
        torch.testing.assert_close(fast(x, *ours), model(x, *theirs))
        torch.testing.assert_close(ours, theirs)
        assert ours[1].item() == i + 1 and ours[0]._version > version
    assert recorder.replays == 5
    other = torch.zeros(20, 8), torch.zeros(1, dtype=torch.int64)
    for i in range(4):
        fast(torch.ones(1, 8), *other)
        assert other[1].item() == i + 1 and (other[0] != 0).sum() == 8 * (i + 1)
    torch.testing.assert_close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("moves", [2, 8])
def test_what_is_written_to_and_lies_elsewhere_at_each_call_is_told(on_cpp: TapeRecorder, moves: int) -> None:
    """It is right, but nothing is ever replayed; a cache that is made anew now and then is nothing to tell."""
    model, fast = Counting(), compiled(Counting())
    for _ in range(3):
        held = [(torch.zeros(20, 8), torch.zeros(1, dtype=torch.int64)) for _ in range(2 * moves)]
        for ours, theirs in zip(held[::2], held[1::2], strict=True):
            x = torch.randn(1, 8)
            torch.testing.assert_close(fast(x, *ours), model(x, *theirs))
            torch.testing.assert_close(ours, theirs)
        for _ in range(3):
            fast(x, *ours)
    missed = [r for r in remarks() if r.kind == "missed"]
    assert [r.message for r in missed] == ["launches are not replayed"] * (moves == 8)
    assert on_cpp.replays > 2 and all("static cache" in str(r.suggestion) for r in missed)


@pytest.mark.slow
@torch.no_grad()
def test_a_llama_decodes_with_a_static_cache(recorder: TapeRecorder) -> None:
    """Token by token as eager does, from one recording per cache that nothing but tokens is copied for."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * (0.3 if p.ndim > 1 else 1.0))
    step = compiled(model.forward)

    def tokens(forward: Any, prompt: Tensor) -> list[Tensor]:
        cache, found = transformers.StaticCache(config=config, max_cache_len=24), []
        logits = model(prompt, past_key_values=cache, use_cache=True).logits
        for _ in range(6):
            found.append(logits[:, -1])
            token = logits[:, -1].argmax(-1, keepdim=True)
            logits = forward(token, past_key_values=cache, use_cache=True).logits
        return found

    for seed in range(2):
        prompt = torch.randint(64, (1, 5), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(tokens(step, prompt), tokens(model, prompt), rtol=1e-4, atol=1e-4)
    assert recorder.replays >= 4
    told = [r.figures for r in remarks() if r.figures]
    assert told and all(figures["bytes"] == 8 for figures in told), remarks()


@torch.no_grad()
def test_each_set_of_sizes_has_a_recording(on_cpp: TapeRecorder) -> None:
    model = Layer()
    fast = compiled(model, dynamic=True)
    for _ in range(4):
        for rows in (3, 5, 7):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fast(x), model(x))
    assert len(dynamo.compiled_graphs()) == 1
    assert on_cpp.log.count("record") == 3 and on_cpp.replays == 6


@torch.no_grad()
def test_a_set_of_sizes_too_many_runs_as_it_is(on_cpp: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_RECORDINGS", 2)
    model = Layer()
    fast = compiled(model, dynamic=True)
    for _ in range(4):
        for rows in (3, 5, 7, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fast(x), model(x))
    assert on_cpp.log.count("record") == 2 and MAX_RECORDINGS > 2
    (missed,) = [r for r in remarks() if r.kind == "missed"]
    assert "more than 2 sets of sizes" in missed.message and missed.suggestion


@torch.no_grad()
def test_under_freeze_a_changed_weight_is_recorded_again(on_cpp: TapeRecorder) -> None:
    """A replay reads what is kept, and would not look whether it still holds."""
    weight, bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = weight, bias

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ torch.cat([self.weight, self.weight.t()], 1).cumsum(0)) + 1

    model, x = Model(), torch.randn(3, 16)
    fast = compiled(model, freeze=True)
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x))
    assert dynamo.compiled_graphs()[-1].program.folded.values and on_cpp.replays == 2
    weight.mul_(0.5)
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x))
    assert on_cpp.log.count("record") == 2


@torch.no_grad()
def test_random_numbers_are_new_in_each_call_and_those_of_a_plain_run(on_cpp: TapeRecorder) -> None:
    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True) * 2

    fast, plain = compiled(noisy), torch.compile(noisy, backend=dynamo.backend_for(Config(strict=True)))
    x = torch.ones(64)
    torch.manual_seed(3)
    found = [fast(x) for _ in range(6)]
    assert on_cpp.replays == 4 and len({tuple(y.tolist()) for y in found}) == 6
    torch._dynamo.reset()
    torch.manual_seed(3)
    assert all(torch.equal(y, plain(x)) for y in found)


@torch.no_grad()
def test_threads_take_turns(on_cpp: TapeRecorder) -> None:
    model = Layer()
    fast, wrong = compiled(model), list[Any]()
    for _ in range(3):
        fast(torch.randn(2, 16))

    def call() -> None:
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(2, 16)
                if not torch.allclose(fast(x), model(x), atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and on_cpp.replays == 81


@torch.no_grad()
def test_what_fails_to_record_runs_as_it_is(on_cpp: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Any]()

    def record(run: Any) -> Any:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(on_cpp, "record", record)
    model = Layer()
    fast = compiled(model)
    for _ in range(5):
        x = torch.randn(2, 16)
        torch.testing.assert_close(fast(x), model(x))
    (missed,) = remarks()
    assert missed.kind == "missed" and "not permitted" in missed.reason and missed.suggestion
    assert len(tried) == 1


@torch.no_grad()
def test_what_fails_to_record_gives_the_memory_of_all_recordings_back(
    on_cpp: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Layer()
    fast = compiled(model, dynamic=True)
    for _ in range(4):
        fast(torch.randn(2, 16))
    (made,) = [weakref.ref(tape) for tape in on_cpp.tapes]
    on_cpp.tapes.clear()

    def record(run: Any) -> Any:
        raise torch.OutOfMemoryError("no memory to record")

    monkeypatch.setattr(on_cpp, "record", record)
    for _ in range(4):
        x = torch.randn(3, 16)
        torch.testing.assert_close(fast(x), model(x))
    assert made() is None and on_cpp.log.count("synchronize") == 1
    torch.testing.assert_close(fast(x[:2]), model(x[:2]))


@torch.no_grad()
def test_within_somebody_else_s_recording_nothing_is_recorded(on_cpp: TapeRecorder) -> None:
    fast, on_cpp.runs_elsewhere = compiled(Layer()), True
    for _ in range(5):
        fast(torch.randn(2, 16))
    assert "record" not in on_cpp.log


@pytest.mark.parametrize(
    ("inputs", "hindrance"),
    [
        (("cuda:0", "cuda:0"), ""),
        (("cuda:0", "cuda:1"), "it runs on 2 devices"),
        (("cuda:0", "cpu"), "nothing can be recorded on the device cpu"),
    ],
)
def test_tensors_have_to_lie_on_one_gpu_but_numbers(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[str, str], hindrance: str
) -> None:
    monkeypatch.setitem(recordings.RECORDERS, "cuda", lambda device: TapeRecorder())
    graph = Graph()
    a, b = (graph.add_input(TensorType(F32, (4,), (1,), device)) for device in inputs)
    half = graph.constant(0.5, F32, device="cpu")
    graph.set_outputs([graph.add_node("mul", [a, half]).result, b])
    program = replace(build_program(graph, target_named("cpp"), context_of()), steps=())
    told = Remarks()
    found = recordings.recorded(program, graph, frozenset(), told, lambda: "")
    assert [r.reason for r in told] == ([hindrance] if hindrance else [])
    assert (found is program) == bool(hindrance)


def test_what_runs_operation_by_operation_is_not_recorded(on_cpp: TapeRecorder) -> None:
    graph = Graph()
    x = graph.add_input(TensorType(F32, (4,), (1,)))
    graph.set_outputs([graph.add_node("exp", [x]).result])  # in no group
    program, told = build_program(graph, target_named("cpp"), context_of()), Remarks()
    assert recordings.recorded(program, graph, frozenset(), told, lambda: "") is program
    assert ["exp has no kernel" in r.reason for r in told] == [True]


@torch.no_grad()
def test_on_a_cpu_a_remark_says_that_nothing_is_recorded() -> None:
    torch._dynamo.reset()
    for _ in range(3):
        torch.compile(Layer(), backend=dynamo.backend, mode="reduce-overhead")(torch.randn(2, 16))
    (missed,) = remarks()
    assert missed.kind == "missed" and missed.reason == "nothing can be recorded on the device cpu"
    shown = str(explain(Layer(), torch.randn(2, 16), options=OPTIONS))
    assert "CUDA graphs" in shown and "not recorded" in shown


def test_in_training_nothing_is_recorded(on_cpp: TapeRecorder) -> None:
    model = compiled(Layer())
    for _ in range(4):
        model(torch.randn(2, 16)).sum().backward()
    assert "record" not in on_cpp.log
    assert [r.reason for r in remarks()] == ["gradients may be asked for"] * 2


@torch.no_grad()
def test_an_operation_that_torch_never_records(on_cpp: TapeRecorder) -> None:
    @torch.library.custom_op("fusec_tests::waits", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def waits(x: Tensor) -> Tensor:
        return x + x.sum().item()

    waits.register_fake(torch.empty_like)
    fast, x = compiled(lambda x: torch.tanh(waits(x))), torch.randn(4)
    for _ in range(4):
        torch.testing.assert_close(fast(x), torch.tanh(x + x.sum()))
    assert "record" not in on_cpp.log
    assert ["fusec_tests.waits.default" in r.reason for r in remarks()] == [True]

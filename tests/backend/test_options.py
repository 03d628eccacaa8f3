"""Modes, options, and what happens where a graph cannot be compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusec import dynamo
from fusec.config import Config
from fusec.errors import OptionError
from tests.backend.agreement import Block, interpret


def test_the_incoming_graph_is_not_changed() -> None:
    seen = []

    def watch(gm: Any, inputs: Any) -> Any:
        before = gm.code
        run = dynamo.backend_with(interpret)(gm, inputs)
        seen.append((before, gm.code))
        return run

    with torch.no_grad():
        torch.compile(Block(), backend=watch)(torch.randn(2, 8))
    assert seen and all(before == after for before, after in seen)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_are_accepted(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=dynamo.backend_with(interpret), mode=mode)
    assert bool((compiled(torch.zeros(3)) == 1).all())


@pytest.mark.parametrize(
    ("mode", "cuda_graphs", "autotune"),
    [
        ("default", False, False),
        ("reduce-overhead", True, False),
        ("max-autotune", True, True),
        ("max-autotune-no-cudagraphs", False, True),
    ],
)
def test_each_mode_s_effect_has_an_option(
    monkeypatch: pytest.MonkeyPatch, mode: str, cuda_graphs: bool, autotune: bool
) -> None:
    """Since torch.compile takes a mode or options, never both."""
    seen: list[tuple[bool, bool]] = []

    def watch(graph: Any, config: Config) -> Any:
        seen.append((config.cuda_graphs, config.autotune))
        return interpret(graph, config)

    backend = dynamo.backend_with(watch)
    options = {"cuda_graphs": cuda_graphs, "autotune": autotune}
    for chosen in ({"mode": mode}, {"options": options}):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=backend, **chosen)(torch.zeros(3))
    monkeypatch.setenv("FUSEC_MODE", mode)
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3))
    assert seen == [(cuda_graphs, autotune)] * 3
    assert not Config.from_options("default").cuda_graphs  # what a call says goes before the environment


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="this torch has no default backend")
def test_it_may_be_the_default_backend() -> None:
    torch._dynamo.reset()
    torch.compiler.set_default_backend(dynamo.backend_with(interpret))
    try:
        assert bool((torch.compile(lambda x: x + 1)(torch.zeros(3)) == 1).all())
        assert len(dynamo.compiled_graphs()) == 1
    finally:
        torch.compiler.set_default_backend(None)
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "hint"), [({"verifi": True}, "verify"), ({"small_m": "16"}, "int"), ({"target": "cuda"}, "triton")]
)
def test_wrong_options_are_errors(options: dict[str, Any], hint: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=hint) as caught:
        torch.compile(lambda x: x + 1, backend=dynamo.backend_with(interpret), options=options)(torch.zeros(3))
    assert isinstance(caught.value, OptionError) or "OptionError" in str(caught.value)


def test_a_compiler_that_raises_leaves_the_model_running() -> None:
    torch._dynamo.reset()
    dynamo.reset()

    def broken(graph: Any, config: Any) -> Any:
        raise RuntimeError("planted")

    model, x = Block(), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=dynamo.backend_with(broken))(x), model(x))
        torch._dynamo.reset()
        assert dynamo.fallbacks() == []
        strict = torch.compile(model, backend=dynamo.backend_with(broken), options={"strict": True})
        with pytest.raises(Exception, match="planted"):
            strict(x)


def test_what_fails_around_a_graph_leaves_the_model_running(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    dynamo.reset()

    def broken() -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(dynamo, "decompositions", broken)
    model, x = Block(), torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(model, backend=dynamo.backend)
    torch.testing.assert_close(compiled(x), model(x))
    assert dynamo.fallbacks() == ["RuntimeError: planted"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="planted"):
        torch.compile(model, backend=dynamo.backend, options={"strict": True})(x)


def test_the_graph_that_falls_back_is_the_one_that_came() -> None:
    """What the import cannot say, conjugates and operations without a state of their own included."""
    torch._dynamo.reset()
    dynamo.reset()

    def broken(graph: Any, config: Any) -> Any:
        raise RuntimeError("planted")

    def step(x: Tensor) -> Tensor:
        attended = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
        return torch.fft.irfft(torch.fft.rfft(attended).conj() * 2)

    found, wanted = (torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in "ab")
    torch.compile(step, backend=dynamo.backend_with(broken))(found).sum().backward()
    step(wanted).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)
    assert dynamo.fallbacks() == ["RuntimeError: planted"] * 2
    dynamo.reset()


def test_errors_of_a_program_are_its_own() -> None:
    torch._dynamo.reset()
    dynamo.reset()

    @torch.library.custom_op("fusec_tests::refuses", mutates_args=())
    def refuses(x: Tensor) -> Tensor:
        return x.clone()

    @refuses.register_fake
    def _(x: Tensor) -> Tensor:
        raise ValueError("no rows")

    for name in ("aot_eager", "fusec"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="no rows"):
            torch.compile(lambda x: refuses(x + 1), backend=name, fullgraph=True)(torch.zeros(3))
    assert dynamo.fallbacks() == []


def test_a_size_known_only_at_run_time_falls_back() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(lambda x: x[x > 0] * 2, backend=dynamo.backend_with(interpret), fullgraph=True)
        for _ in range(2):
            x = torch.randn(9)
            torch.testing.assert_close(compiled(x), x[x > 0] * 2)
    assert len(dynamo.fallbacks()) == 1
    dynamo.reset()


def test_a_reset_forgets_what_a_backend_of_chosen_options_compiled() -> None:
    torch._dynamo.reset()
    torch.compile(torch.sin, backend=dynamo.backend_for(Config()))(torch.ones(3))
    assert len(dynamo.compiled_graphs()) == 1
    torch._dynamo.reset()
    assert dynamo.compiled_graphs() == []


def test_a_variable_of_no_option_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEC_STRIKT", "1")
    for _ in range(2):
        Config.from_environment()
    (said,) = [r.getMessage() for r in caplog.records]
    assert "FUSEC_STRIKT" in said and "FUSEC_STRICT" in said

"""What all tests share: expected texts in files, seeds, one thread, and a kernel cache of their own."""

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import pytest

GOLDEN = Path(__file__).parent / "golden"

hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected texts anew instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(100_000)  # a tenth of the time would go into walking torch's objects, of which most stay
    os.environ.pop("COLUMNS", None)  # pytest-xdist tells its workers the width of the terminal
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # which walks them as well, at each compile
    hypothesis.settings.load_profile(
        os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
    )


def pytest_report_header(config: pytest.Config) -> str:
    versions = (f"{name} {metadata.version(name)}" for name in ("torch", "triton", "transformers"))
    return f"fusec: {', '.join(versions)}; hypothesis profile {hypothesis.settings.get_current_profile_name()}"


class WrittenText(str):
    """Equal to everything, and writes down what it was compared with."""

    path: Path

    def __eq__(self, found: object) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(str(found), encoding="utf-8")
        return True

    __hash__ = str.__hash__


@pytest.fixture(autouse=True)
def no_declaration_is_left() -> Iterator[None]:
    """Fail where a test leaves a fusion or rewrite behind: later tests would compile with it."""
    before = {name for declared in _declared() for name in declared}
    yield
    left = [(declared, name) for declared in _declared() for name, one in declared.items()
            if name not in before and not one.module.startswith("fusec.")]  # fmt: skip
    for declared, name in left:
        del declared[name]
    assert not left, [name for _, name in left]


@pytest.fixture(autouse=True)
def recompile_limit_is_an_error() -> None:
    """Fail where Dynamo's recompile limit is hit: it would run the function in eager, which agrees with itself.

    All callables without Python code share a limit, as one wrapper calls them.
    """
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.fail_on_recompile_limit_hit = True


def _declared() -> Iterator[dict[str, Any]]:
    """Yield all fusions, and all rewrites, of modules that are imported."""
    for module, name in (("fusec.rewriting.fusion", "FUSIONS"), ("fusec.rewriting.rule", "REWRITES")):
        if module in sys.modules:
            yield getattr(sys.modules[module], name)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether expected texts are written instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def golden(request: pytest.FixtureRequest, update_golden: bool) -> str:
    """The expected text of this test: ``assert str(found) == golden``; ``make golden`` writes it."""
    case = re.sub(r"[^\w.]+", "-", request.node.name.removeprefix("test_")).strip("-")
    path = GOLDEN / f"{case}.txt"
    if update_golden:
        text = WrittenText()
        text.path = path
        return text
    if not path.exists():
        pytest.fail(f"no expected text {path.relative_to(GOLDEN)}; `make golden` writes it")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def check_block(update_golden: bool) -> Callable[[Path, str, str, str], None]:
    """Compare what stands between two markers of a page with what it is made from; ``make golden`` writes it."""

    def check(page: Path, begin: str, end: str, expected: str) -> None:
        before, rest = page.read_text(encoding="utf-8").split(begin)
        shown, after = rest.split(end)
        if update_golden:
            page.write_text(before + begin + expected + end + after, encoding="utf-8")
        assert shown == expected or update_golden

    return check


@pytest.fixture(scope="session", autouse=True)
def own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are built afresh in every run of the tests, once for all of its processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared))  # options that were not read from the environment
        patch.setenv("FUSEC_CACHE_DIR", str(shared / "fusec"))
        yield


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ kernels are scheduled and printed, but not compiled, in a test that only looks at them."""
    from fusec.codegen.cpp.build import CppKernel

    monkeypatch.setattr(
        "fusec.codegen.cpp.target.build",
        lambda sources, config: [CppKernel(name, source, None, None) for name, source in sources],
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers, and one thread, in every test that uses torch."""
    torch = sys.modules.get("torch")
    if torch is None:  # this test does not need it, and need not wait for its import
        return
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` looks for devices of every kind first, for 1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """A test sees its own ``compiled_graphs()``: Dynamo resets only those backends that it remembers."""
    if dynamo := sys.modules.get("fusec.dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def guards_are_not_timed() -> None:
    """Dynamo times the guards of each compile for its log, and flushes the caches before, which takes 30 ms."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def passes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compile of a test runs its passes, however much another test has compiled, with passes of its own too."""
    monkeypatch.setattr("fusec.pass_cache.key_of_derived", lambda *sources: "")

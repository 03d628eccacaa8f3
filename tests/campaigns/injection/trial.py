"""One compile while a function raises: did it, is the result right, and who said why the model runs otherwise."""

import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusec import dynamo
from tests.campaigns.injection.fork import Died, in_fork
from tests.campaigns.injection.planting import PLANTED, Key, Place, injected, planted, recording
from tests.campaigns.injection.workloads import Workload


@dataclass
class Outcome:
    """What became of one compile."""

    workload: str
    function: str = ""
    line: int = 0
    stage: str = ""
    fired: bool = False
    right: bool = False
    reasons: list[str] = field(default_factory=list)
    error: str = ""

    @classmethod
    def of(cls, workload: Workload, place: Place | None, error: str = "") -> "Outcome":
        """Return that of a compile in which this function raises, before anything is known."""
        if place is None:
            return cls(workload.name, error=error)
        return cls(workload.name, place.name, place.key.line, place.stage, error=error)

    @property
    def passed(self) -> bool:
        """The model ran, was right, and, where the function raised, somebody said so."""
        return not self.error and self.right and (not self.fired or any(PLANTED in r for r in self.reasons))

    def to_json(self) -> dict[str, Any]:
        """Return plain data; without reasons where it passed, since they would be most of the file."""
        return asdict(self) | {"reasons": [] if self.passed else self.reasons, "passed": self.passed}


@dataclass(frozen=True)
class Trial:
    """A workload to compile again and again, each time in a fork and with a copy of one cache."""

    workload: Workload
    expected: tuple[Tensor, ...]
    """What eager gives."""
    cache: Path

    def __call__(self, place: Place) -> Outcome:
        """Compile while a function raises."""
        try:
            return in_fork(self.compiled, place)
        except Died as reason:
            return Outcome.of(self.workload, place, str(reason))

    def called(self) -> set[Key]:
        """Compile, and return the functions of fusec that were called."""
        return in_fork(self._called)

    def _called(self) -> set[Key]:
        called = set[Key]()
        outcome = self.compiled(None, called)
        assert outcome.passed, outcome
        return called

    def compiled(self, place: Place | None = None, called: set[Key] | None = None) -> Outcome:
        """Compile in this process, with a copy of the cache."""
        with tempfile.TemporaryDirectory() as folder:
            for kind in self.workload.cached:
                for entry in self.cache.glob("*" + kind):
                    shutil.copy2(entry, folder)
            return _compiled(self.workload, place, folder, self.expected, called)


@contextmanager
def trial(workload: Workload) -> Iterator[Trial]:
    """Yield the trial of a workload, whose cache a first compile has filled.

    Raises:
        RuntimeError: where that compile was wrong, or left no entry of a kind that the workload wants.
    """
    expected = tuple(tensor.detach() for tensor in workload.results())
    with tempfile.TemporaryDirectory() as folder:
        outcome = in_fork(_compiled, workload, None, folder, expected)
        missing = [kind for kind in workload.cached if not any(Path(folder).glob("*" + kind))]
        if missing or not outcome.passed:
            raise RuntimeError(f"the cache lacks {missing} after {outcome}")
        yield Trial(workload, expected, Path(folder))


def _compiled(
    workload: Workload, place: Place | None, cache: str, expected: tuple[Tensor, ...], called: set[Key] | None = None
) -> Outcome:
    torch._dynamo.reset()
    dynamo.reset()
    planted.error, planted.count = workload.error, 0
    outcome = Outcome.of(workload, place)
    compile_with = dynamo.backend_for(replace(workload.config, cache_dir=cache))

    def backend(gm: Any, inputs: list[Any]) -> Any:
        with injected(place), nullcontext() if called is None else recording(called):
            return compile_with(gm, inputs)

    with _warnings() as texts:
        try:
            pairs = zip(workload.results(backend), expected, strict=True)
            outcome.right = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}".splitlines()[0]
    for compiled in dynamo.compiled_graphs():
        texts += [f"{remark.message}: {remark.reason}" for remark in compiled.remarks]
    outcome.fired = planted.count > 0
    outcome.reasons = list(dict.fromkeys(_plain(text) for text in [*dynamo.fallbacks(), *texts] if PLANTED in text))
    return outcome


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that is filled with what is logged within, and with the warnings of Python at its end."""
    texts, logger = list[str](), logging.getLogger("fusec")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        texts += [str(warning.message) for warning in caught]
    finally:
        logger.removeHandler(handler)


def _plain(reason: str) -> str:
    """A reason in one line, without the folders of this machine."""
    return re.sub(r"(?<![\w.~}\-])/(?:[\w.\-]+/)+", "", " ".join(reason.split()))

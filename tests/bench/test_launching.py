"""What is asked of a GPU's recordings, asked of those that tests record on the CPU."""

import pytest
import torch

from bench import launching
from tests.backend.tape import record_on_cpu

CPU = torch.device("cpu")


@pytest.mark.slow
def test_what_needs_no_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)
    found = dict(launching.problems(CPU))
    assert len(found) == len(launching.ANYWHERE) and not any(found.values()), found


def test_what_is_not_recorded_is_a_problem() -> None:
    found = dict(launching.problems(CPU))
    assert "not recorded once" in found["layers replay"] and "not recorded once" in found["decoding"]


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="torch finds none"):
        launching.main([])

"""``doctor``: each fault of an installation is named, with its fix."""

import json
from pathlib import Path

import pytest
import torch

from fusec.cli import app
from fusec.codegen.cpp import compiler, printer
from fusec.codegen.program.edits import write_edit
from fusec.config import Config
from fusec.debug.doctor import Check, checks
from tests.tools.command_line import CliRunner


def found(name: str) -> Check:
    (check,) = [check for check in checks() if check.name == name]
    return check


def test_all_is_well() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 11 and all(row["state"] != "wrong" for row in rows)
    assert "as eager" in rows[-1]["detail"]
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0 and all(row["name"] in shown.stdout for row in rows)


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = found("C++ compiler")
    assert check.state == "wrong" and "models run through ATen" in check.detail and "install g++" in check.fix
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_a_compiler_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -mno-avx512f -mno-avx2")
    if "avx2" in Path("/proc/cpuinfo").read_text():
        check = found("instructions")
        assert check.state == "note" and "not AVX2" in check.detail and "$CXX" in check.fix


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_TARGTE", "cpp")
    assert found("settings").state == "note" and "FUSEC_TARGTE" in found("settings").detail
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert found("settings") == Check(
        "settings", "wrong", "TORCHDYNAMO_DISABLE is set: torch.compile compiles nothing", "unset TORCHDYNAMO_DISABLE"
    )


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert found("threads").state == "note" and "OMP_NUM_THREADS=" in found("threads").fix


def test_damaged_entries_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.compile(lambda x: torch.sin(x) + 1, backend="fusec")(torch.randn(7))
    folder = Config.from_environment().cache_path()
    entries = [path for path in folder.rglob("*") if path.is_file() and path.suffix == ".so"]
    assert entries and found("cache").state == "fine"
    entries[0].write_bytes(b"damaged")
    assert found("cache").state == "note" and "1 damaged" in found("cache").detail


def test_edited_kernels_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    assert found("edited kernels") == Check("edited kernels", "fine", "none")
    path = write_edit("softmax", "// a kernel", Config.from_environment())
    check = found("edited kernels")
    assert check.state == "note" and path.name in check.detail and "fusec kernels revert" in check.fix


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    print_kernel = printer.print_kernel
    monkeypatch.setattr("fusec.codegen.cpp.target.print_kernel", lambda k: print_kernel(k).replace("rsqrt(", "sqrt("))
    torch._dynamo.reset()
    check = found("kernels")
    assert check.state == "wrong" and "differs from eager" in check.detail and check.fix


def test_the_flags_of_the_compiler_are_shown() -> None:
    assert " ".join(compiler.find_compiler().machine_flags) in found("C++ compiler").detail

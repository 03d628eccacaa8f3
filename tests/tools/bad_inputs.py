"""Files and words that no command can use, each with the exit code that it is refused with."""

import json
import re
from pathlib import Path
from random import Random

USAGE, INVALID = 2, 3
_LONG = 50_000_000
"""Bytes of the longest line."""
_HEAD = "graph g(%x: f32[4, 8], %w: f32[8, 8], %i: i64[4]) {\n"


def _graph(line: str, returned: str = "%y") -> bytes:
    return f"{_HEAD}  {line}\n  return {returned}\n}}\n".encode()


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t\n",
    "binary": bytes(range(256)) * 40,
    "zeros": bytes(4096),
    "elf": b"\x7fELF\x02\x01\x01" + bytes(57),
    "latin": "% é\n".encode("latin-1"),
    "utf16": "graph g() { return }".encode("utf-16"),
    "mark": b"\xef\xbb\xbfgraph",
    "brackets": b"(" * 20_000,
    "braces": b"{" * 20_000,
    "json": b'{"options": {}}',
    "page": b"<!DOCTYPE html><html></html>",
    "sentence": b"this is a file of words",
}
"""Of any suffix."""
GRAPHS: dict[str, tuple[bytes, int]] = {
    "head": (_HEAD.encode(), USAGE),
    "cut_in_a_line": (f"{_HEAD}  %y: f32[4, 8] = ex".encode(), USAGE),
    "cut_in_a_type": (f"{_HEAD}  %y: f32[4,".encode(), USAGE),
    "cut_in_a_text": (f'{_HEAD}  %y: f32[4, 8] = exp(%x)   # a.py:3 "exp'.encode(), USAGE),
    "no_return": (f"{_HEAD}  %y: f32[4, 8] = exp(%x)\n}}".encode(), USAGE),
    "two_graphs": (_graph("%y: f32[4, 8] = exp(%x)") * 2, USAGE),
    "unknown_operation": (_graph("%y: f32[4, 8] = expp(%x)"), USAGE),
    "unknown_dtype": (_graph("%y: f33[4, 8] = exp(%x)"), USAGE),
    "undefined": (_graph("%y: f32[4, 8] = exp(%z)"), USAGE),
    "cycle": (_graph("%y: f32[4, 8] = exp(%z)\n  %z: f32[4, 8] = exp(%y)"), USAGE),
    "itself": (_graph("%y: f32[4, 8] = exp(%y)"), USAGE),
    "twice": (_graph("%y: f32[4, 8] = exp(%x)\n  %y: f32[4, 8] = exp(%x)"), USAGE),
    "no_such_output": (_graph("%y: f32[4, 8] = exp(%x)", "%z"), USAGE),
    "no_operand": (_graph("%y: f32[4, 8] = exp()"), INVALID),
    "three_operands": (_graph("%y: f32[4, 8] = add(%x, %x, %x)"), INVALID),
    "other_shape": (_graph("%y: f32[5, 8] = exp(%x)"), INVALID),
    "other_dtype": (_graph("%y: f16[4, 8] = exp(%x)"), INVALID),
    "mixed_dtypes": (_graph("%y: f32[4, 8] = add(%x, %i)"), INVALID),
    "no_broadcast": (_graph("%y: f32[4, 8] = add(%x, %w)"), INVALID),
    "two_results": (_graph("%y: f32[4, 8], %z: f32[4, 8] = exp(%x)"), INVALID),
    "no_result": (_graph("exp(%x)", "%x"), INVALID),
    "no_attribute": (_graph("%y: f32[4, 1] = sum(%x)"), INVALID),
    "wrong_attribute": (_graph('%y: f32[4, 1] = sum(%x) {dims="all"}'), INVALID),
    "far_dim": (_graph("%y: f32[4, 1] = sum(%x) {dims=(-9,)}"), INVALID),
    "no_einsum": (_graph('%y: f32[4, 8] = contraction(%x, %w) {spec="nothing"}'), INVALID),
    "wrong_einsum": (_graph('%y: f32[4, 8] = contraction(%x, %w) {spec="abc,cd->ad"}'), INVALID),
    "negative_size": (_graph("%y: f32[-4, 8] = exp(%x)"), INVALID),
    "divided_size": (_graph("%y: f32[4/0, 8] = exp(%x)"), INVALID),
    "nan_size": (_graph('%y: f32[nan, 8] = opaque(%x) {target="aten.sin.default", args=($0,)}'), USAGE),
    "fractional_size": (_graph("%y: f32[(4.5), 8] = exp(%x)"), USAGE),
    "infinite_stride": (_graph("%y: f32[4, 8] @(inf, 1) = exp(%x)"), USAGE),
    "keyword_size": (_graph('%y: f32[lambda, 8] = opaque(%x) {target="aten.sin.default", args=($0,)}'), USAGE),
    "no_device": (_graph("%y: f32[4, 8] here = exp(%x)"), USAGE),
    "power": (_graph("%y: f32[9**9**9**9, 8] = exp(%x)"), USAGE),
    "huge_number": (_graph("%y: f32[4, 8] = mul(%x, " + "9" * 5000 + ")"), USAGE),
    "far_operand": (_graph('%y: f32[4, 8] = opaque(%x) {target="aten.sin.default", args=($9,)}'), INVALID),
    "no_target": (_graph("%y: f32[4, 8] = opaque(%x)"), INVALID),
    "region_without_body": (_graph("%y: f32[4, 8] = region(%x)"), USAGE),
    "deep": (b"graph g(%x: f32[4]) {\n" + b"%y: f32[4] = region(%x) b(%x: f32[4]) {\n" * 3000, USAGE),
    "deep_attribute": (_graph("%y: f32[4, 8] = exp(%x) {a=" + "(" * 50_000 + "}"), USAGE),
    "zero_byte": (_graph("%y\0: f32[4, 8] = exp(%x)"), USAGE),
}
"""Texts that are nearly graphs."""
SCRIPTS: dict[str, str] = {
    "no_python": "model = = 3",
    "indented": "  model = 3\n model = 4",
    "cut": "model = (",
    "import": "import nothing_of_this_name",
    "raises": "raise ValueError('far too ' * 10_000 + 'long')",
    "lines": "raise ValueError('line\\n' * 10_000)",
    "no_text": "raise AssertionError",
    "strange": "class E(Exception):\n    def __str__(self):\n        raise OSError\nraise E",
    "group": "raise ExceptionGroup('several', [ValueError('a'), OSError('b')])",
    "base": "raise BaseException('of no kind')",
    "generator": "raise GeneratorExit",
    "recursion": "def f():\n    return f()\nf()",
    "exit": "import sys\nsys.exit(0)",
    "exit_1": "import sys\nsys.exit('far too ' * 10_000)",
    "hard_name": "model\u200b = 3",
    "nothing": "",
    "prints": "print('hello')",
    "no_inputs": "def model(x):\n    return x",
    "no_model": "inputs = ()",
    "not_callable": "model, inputs = 3, ()",
    "inputs_raise": "def model(x):\n    return x\ndef inputs():\n    raise OSError('gone')",
    "inputs_take": "def model(x):\n    return x\ndef inputs(a, b):\n    return a",
    "model_raises": "def model():\n    raise OSError('gone')\ninputs = ()",
    "wrong_shape": "import torch\nmodel = torch.nn.Linear(2, 2)\ninputs = (torch.ones(3, 3),)",
    "too_many": "import torch\nmodel = torch.nn.ReLU()\ninputs = (torch.ones(3), torch.ones(3))",
    "wrong_names": "import torch\nmodel = torch.nn.ReLU()\ninputs = {'x': torch.ones(3)}",
    "called_raises": "def model(x):\n    raise RuntimeError('never')\nimport torch\ninputs = (torch.ones(3),)",
    "no_tensors": "def model(x):\n    return x\ninputs = (3,)",
    "path": "import sys\nsys.path.pop(0)\nraise OSError('gone')",
    "modules": "import sys\ndel sys.modules[__name__]\nraise OSError('gone')",
}
"""Programs that define no model."""
REPORTS: dict[str, str] = {
    "cut": '{"options": {',
    "null": "null",
    "number": "3",
    "text": '"report"',
    "list": "[1, 2]",
    "object": "{}",
    "options": '{"options": 3}',
    "sites": '{"sites": 3, "regions": {}, "launches": {}}',
    "deep": "[" * 100_000,
    "infinite": '{"sites": NaN}',
    "large": "9" * 5000,
    "overflow": '{"sites": [], "regions": {"silu": 1e999}, "kernels": [], "launches": {}, "coverage": {}}',
}
NAMES: tuple[str, ...] = (
    "missing.py",
    "missing.fir",
    "missing.json",
    "missing",
    "no/folder/a.py",
    "",
    " ",
    "a\0b",
    "a\0b.py",
    "a\0b.fir",
    "x" * 5000 + ".py",
    "x" * 5000 + ".fir",
    "x" * 5000,
    "a\nb\n" * 100 + ".py",
    "\x1b[31mred.py",
    "[bold]name[/]",
    "\udcff.py",
    "models:",
    "models:nothing",
    "models:llama/nothing",
    "models:llama/tiny/more",
    "models:" + "x" * 5000,
    "hf:",
    "hf:nothing",
    "http://nowhere/model.py",
    "model.txt",
    "loop.py",
    "loop.fir",
)
"""Arguments that name no model."""
TRACES = (
    "events", "compile", "list", "number", "empty", "no_final", "no_graph", "no_remarks", "remarks", "steps", "passes",
    "folder", "binary", "once", "machine",
)  # fmt: skip
"""Folders that are nearly traces."""


_WHOLE = """
import torch
from torch.nn import functional as F

def model(x, w):
    h = F.rms_norm(x, (16,), w) @ x.T
    return F.silu(h), h.sum(0), torch.logcumsumexp(x, 0), x[:, 2:5].reshape(-1), torch.cat([x, x], 1).bfloat16()

def inputs():
    return torch.randn(8, 16), torch.randn(16)
"""
_WORDS = ("0", "-1", "9" * 20, "1e999", "nan", "3.5", "(", ")", "{", "}", '"', "f32", "None", "é", "\0", "\x1b[31m", "")


def mutated(text: str, random: Random) -> str:
    """Return a text with a few tokens or lines left out, repeated, exchanged or replaced."""
    for _ in range(random.randint(1, 3)):
        is_line = random.random() < 0.2
        parts = text.splitlines(keepends=True) if is_line else re.findall(r"\w+|\s+|.", text)
        if not parts:
            return text
        at, other = random.randrange(len(parts)), random.randrange(len(parts))
        change = random.randrange(4)
        if change == 0:
            del parts[at]
        elif change == 1:
            parts.insert(at, parts[other])
        elif change == 2:
            parts[at], parts[other] = parts[other], parts[at]
        else:
            numbers = [i for i, part in enumerate(parts) if part.isdigit()]
            parts[random.choice(numbers or [at])] = random.choice(_WORDS)
        text = "".join(parts)
    return text if random.random() < 0.9 else text[: random.randrange(len(text) + 1)]


def write_files(folder: Path) -> None:
    """Write all of them: graphs, scripts, reports, traces, and folders with their names."""
    for name in ("folder.py", "folder.fir", "folder.json", "empty_folder"):
        (folder / name).mkdir()
    (folder / "good.fir").write_bytes(_graph("%y: f32[4, 8] = exp(%x)"))
    (folder / "good.py").write_text("import torch\nmodel, inputs = torch.exp, (torch.ones(4, 8),)")
    (folder / "whole.py").write_text(_WHOLE)
    for name in ("loop.py", "loop.fir"):
        (folder / name).symlink_to(name)
    (folder / "model.txt").write_text("model = 3")
    (folder / "file").write_text("")
    (folder / "long.fir").write_bytes(b"graph " + b"x" * _LONG)
    (folder / "long.json").write_bytes(b"[" + b"1" * _LONG)
    (folder / "long.py").write_bytes(b"x = '" + b"x" * _LONG)
    for name, content in UNREADABLE.items():
        for suffix in (".fir", ".py", ".json"):
            (folder / f"{name}{suffix}").write_bytes(content)
    for name, (content, _) in GRAPHS.items():
        (folder / f"graph_{name}.fir").write_bytes(content)
    for name, text in SCRIPTS.items():
        (folder / f"script_{name}.py").write_text(text)
    for name, text in REPORTS.items():
        (folder / f"report_{name}.json").write_text(text)
    for name in TRACES:
        _write_trace(folder / f"trace_{name}", name)


def _write_trace(folder: Path, fault: str) -> None:
    compile = folder / "1-001-g"
    (compile / "kernels").mkdir(parents=True)
    graph = f"{_HEAD}  return %x\n}}\n"
    about = {"state": "done", "seconds": {}, "passes": [], "steps": [], "copies": 0, "once": [], "machine": None}
    about |= {
        "steps": {"steps": [{"node": 99, "name": "k", "kind": "kernel", "formula": ""}]},
        "passes": {"passes": [{"file": "a.fir", "unknown": 3}]},
        "once": {"once": [99]},
        "machine": {"machine": {"name": 3}},
    }.get(fault, {})
    texts = {"compile.json": json.dumps(about), "final.fir": graph, "imported.fir": graph, "remarks.json": "[]"}
    texts |= {
        "events": {"compile.json": "{"},
        "compile": {"compile.json": "{"},
        "list": {"compile.json": "[]"},
        "number": {"compile.json": "3"},
        "empty": {"compile.json": '{"state": "done"}'},
        "no_graph": {"final.fir": "no graph"},
        "remarks": {"remarks.json": '[{"kind": 3}]'},
        "binary": {"final.fir": "\0\udcff"},
    }.get(fault, {})
    missing = {"no_final": "final.fir", "no_remarks": "remarks.json"}.get(fault)
    for name, text in texts.items():
        if name != missing:
            (compile / name).write_bytes(text.encode(errors="surrogateescape"))
    if fault == "folder":
        (compile / "final.fir").unlink()
        (compile / "final.fir").mkdir()
    if fault == "events":
        (folder / "events.jsonl").write_bytes(b"\xff\xfe{")

"""Each command given what it cannot use: the right exit code, one message of less than 1 kB, and no traceback."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.tools.bad_inputs import (
    GRAPHS,
    INVALID,
    NAMES,
    REPORTS,
    SCRIPTS,
    TRACES,
    UNREADABLE,
    USAGE,
    mutated,
    write_files,
)
from tests.tools.test_cli import run

MODEL_COMMANDS = {
    "capture": "capture {}",
    "explain": "explain {}",
    "why": "why {} norm",
    "view": "view {} -o -",
    "bisect": "bisect {}",
    "reduce": "reduce {} -o out.py",
    "check": "check {} --against out.json --update",
    "diff": "diff {} good.py",
    "list": "kernels list {}",
    "show": "kernels show {} kernel",
    "bench": "kernels bench {} kernel",
    "edit": "kernels edit {} kernel",
}
MODELS_ALONE = ("capture", "bench", "edit")
GRAPH_COMMANDS = {name: command for name, command in MODEL_COMMANDS.items() if name not in MODELS_ALONE}
GRAPH_COMMANDS |= {"opt": "opt {}", "timing": "opt {} --timing --json"}
OWN_WAY = ("capture", "explain", "view", "bisect", "reduce", "diff", "opt", "trace")
"""Commands that read their argument in a way of their own; the others share one of these, and are thorough."""
Cases = Iterable[tuple[list[str], set[int]]]


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all of them, in which the commands run."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def fault(words: list[str], codes: set[int]) -> str:
    """Return what is wrong with the answer to a call; empty where it is refused as it should be."""
    result = run(*words)
    said = result.stderr
    faults = [] if result.exit_code in codes else [f"exit code {result.exit_code}, not {codes}"]
    faults += ["a traceback"] if "Traceback" in said else []
    faults += [] if 0 < len(said.encode()) < 1000 else [f"{len(said)} characters"]
    faults += ["standard output"] if result.stdout else []
    return f"{' '.join(words)[:100]!r}: {', '.join(faults)}: {said[:150]!r}…{said[-150:]!r}" if faults else ""


def check_all(cases: Cases) -> None:
    faults = list(filter(None, (fault(words, codes) for words, codes in cases)))
    assert not faults, "\n".join([f"{len(faults)} calls", *faults])


def commands(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in OWN_WAY else pytest.mark.thorough) for name in names]


def filled(command: str, argument: str) -> list[str]:
    return [argument if word == "{}" else word for word in command.split()]


@pytest.mark.parametrize("name", commands(MODEL_COMMANDS))
def test_scripts(name: str) -> None:
    scripts = [*(f"script_{script}.py" for script in SCRIPTS), *(f"{file}.py" for file in UNREADABLE)]
    check_all((filled(MODEL_COMMANDS[name], script), {USAGE, INVALID}) for script in scripts)


@pytest.mark.parametrize("command", ["capture {}", "explain {}", "view {} -o -", "bisect {}"])
def test_the_message_names_the_script(command: str) -> None:
    for script in SCRIPTS:
        said = run(*filled(command, f"script_{script}.py")).stderr
        assert f"script_{script}" in said or "the model produced no graph" in said, said


@pytest.mark.parametrize("name", commands(GRAPH_COMMANDS))
def test_graphs(name: str) -> None:
    graphs = {f"{file}.fir": USAGE for file in UNREADABLE} | {f"graph_{g}.fir": code for g, (_, code) in GRAPHS.items()}
    check_all((filled(GRAPH_COMMANDS[name], graph), {code}) for graph, code in graphs.items())


@pytest.mark.parametrize("command", ["bisect {}", "reduce {}", "explain {} --time"])
def test_a_graph_of_a_device_that_is_not_here(command: str) -> None:
    Path("far.fir").write_text("graph g(%x: f32[4] hpu) {\n  %y: f32[4] hpu = exp(%x)\n  return %y\n}\n")
    check_all([(filled(command, "far.fir"), {USAGE})])
    assert "tensors on hpu" in run(*filled(command, "far.fir")).stderr


def test_an_operation_on_another_device_has_the_name_of_a_kernel() -> None:
    """It is in no kernel."""
    lines = "%y: f32[4, 8] meta = mul(%x, %x)\n  %z: f32[4, 8] = mul(%x, %x)"
    Path("two.fir").write_text(f"graph g(%x: f32[4, 8]) {{\n  {lines}\n  return %y, %z\n}}\n")
    assert run("explain", "two.fir").exit_code == 0


@pytest.mark.parametrize("name", MODELS_ALONE)
def test_graphs_where_a_model_belongs(name: str) -> None:
    check_all((filled(MODEL_COMMANDS[name], graph), {USAGE}) for graph in ("good.fir", "graph_cycle.fir"))


@pytest.mark.parametrize("name", commands([*MODEL_COMMANDS, "opt", "trace"]))
def test_names(name: str) -> None:
    command = {**MODEL_COMMANDS, **GRAPH_COMMANDS, "trace": "trace {}"}[name]
    names = NAMES if name != "trace" else [argument for argument in NAMES if argument != "model.txt"]
    check_all((filled(command, argument), {USAGE}) for argument in names)


@pytest.mark.parametrize("name", commands(MODEL_COMMANDS))
def test_folders(name: str) -> None:
    folders = ["folder.py", "folder.fir", "empty_folder", *(f"trace_{trace}" for trace in TRACES)]
    check_all((filled(MODEL_COMMANDS[name], folder), {USAGE, INVALID}) for folder in folders)


@pytest.mark.parametrize("command", ["diff {} good.fir", "diff {} {}", "check good.py --against {}"])
def test_reports(command: str) -> None:
    reports = [*(f"report_{report}" for report in REPORTS), *UNREADABLE, "folder"]
    check_all((filled(command, f"{report}.json"), {USAGE}) for report in reports)


MUTATED = ("opt {}", "explain {}", "why {} everything", "diff {} whole.fir", "bisect {}", "diff {} whole.json")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 20))])
def test_mutations(seed: int) -> None:
    """Graphs and reports that were changed at random are used or refused."""
    run("capture", "whole.py", "-o", "whole.fir")
    run("check", "whole.py", "--against", "whole.json", "--update")
    random, faults = Random(seed), []
    for _ in range(100):
        words = filled(random.choice(MUTATED), "mutated")
        suffix = Path(words[-1]).suffix or ".fir"
        name = f"mutated{suffix}"
        Path(name).write_bytes(mutated(Path(f"whole{suffix}").read_text(), random).encode())
        said = run(*(name if word == "mutated" else word for word in words))
        if said.exit_code not in (0, 1, 2, 3) or (said.exit_code > 1 and len(said.stderr.encode()) >= 1000):
            faults.append(f"{words}: {Path(name).read_text()}: {said.stderr[-500:]}")
    assert not faults, faults[0]


@pytest.mark.parametrize("command", ["opt long.fir", "capture long.py", "diff long.json long.json"])
def test_a_line_of_50_megabytes(command: str) -> None:
    check_all([(command.split(), {USAGE})])


NUMBERS = ("0", "-1", "-5", "x", "1.5", "1e99", "nan", "", "9" * 400)
OPTIONS = ("--nothing", "--no", "-x", "--jsn")
OUTPUTS = ("no/folder/a", "folder.py", "file/a", "/proc/a/b", "a\0b", "x" * 5000, ".", "/")


def wrong_options(command: str) -> Iterator[list[str]]:
    """Yield a command, of which the rest is right, with options that it has not, and with values that they have not."""
    words, place = filled(command, "good.py"), command.split()[0]
    yield from ([*words, option] for option in OPTIONS)
    yield [*words, *"abcdefgh"]
    if place in ("opt", "trace"):
        return
    yield from ([*words, option, n] for option in ("--batch", "--length") for n in NUMBERS)
    yield from ([*words, option] for option in ("--batch", "--length", "--target"))
    if "edit" not in words and place != "capture":
        yield from ([*words, "--target", target] for target in ("nothing", "CPP", "c++", "cuda", "\0", "x" * 5000))


@pytest.mark.parametrize("name", commands([*MODEL_COMMANDS, "opt"]))
def test_options(name: str) -> None:
    command = {**MODEL_COMMANDS, "opt": "opt good.fir"}[name]
    check_all((words, {USAGE}) for words in wrong_options(command))


@pytest.mark.parametrize("command", [
    "capture good.py -o {}", "view good.py -o {}", "reduce good.py -o {}", "opt good.fir -o {}",
    "check good.py --update --against {}", "trace -o {} good.py",
])  # fmt: skip
def test_outputs(command: str) -> None:
    check_all((filled(command, output), {USAGE}) for output in OUTPUTS)


VALUES = {
    "opt good.fir --passes": ("nothing", "raise{", "raise{only}", "raise{none=3}", "a,,b", "raise{only=3 no}", "\0"),
    "opt good.fir --print": ("nothing", "before,nothing", "Before"),
    "opt good.fir --filter": ("canonicalize", "nothing", "rais", "raise{only=rms_norm}"),
    "opt good.fir --remarks": ("nothing", "passed,nothing"),
    "opt good.fir --apply": ("x", "1..", "..1", "!", "-1", "3..1", "1,,x", "5", "0.5", "9" * 5000),
    "opt good.fir --disable": ("nothing", "rais", "raise,nothing", "rms_nor"),
    "opt good.fir --target": ("nothing", "cuda"),
    "opt good.fir --declare": ("missing.py", "script_raises.py", "binary.py", "good.fir", "folder.py", "a\0b.py"),
    "bisect good.py --disable": ("nothing", "rais", "raise,nothing"),
    "reduce good.py --disable": ("nothing", "rais", "raise,nothing"),
    "reduce good.py --seconds": ("0", "-1", "x", ""),
    "reduce good.py --command": ("true", "", "no-such-command {}", "'", "{} 'a"),
    "bisect --command": ("no-such-command", "'", " ", "/", "./folder.py", "a\0b"),
    "explain good.py --kernel": ("nothing", "*", "x" * 5000),
    "explain good.py --machine": ("nothing", "A100", "x" * 5000),
    "explain good.py --fail-under": ("-1", "101", "x", "nan"),
    "view good.py --graph": ("1", "-1", "x", "99"),
    "why good.py": ("nothing", "rms", "\0", "x" * 5000),
    "why good.py everything": ("nothing", "layers.0", "good.py:99", "%99", "%", ":1", "[", "x" * 5000),
    "check good.py --tolerance": ("-1", "101", "x"),
    "kernels show good.py": ("nothing", "*", "", "x" * 5000),
    "kernels bench good.py": ("nothing", "[", ""),
    "kernels edit good.py": ("nothing", "../a"),
    "kernels revert": ("nothing", "*", "[", "../a", "a\0b", "x" * 5000),
    "cache prune --mb": ("-1", "x", "1.5", ""),
    "cache": ("nothing", "--mb"),
    "machine": ("nothing", "show x"),
    "kernels": ("nothing", "--json"),
    "doctor": ("x", "--nothing"),
    "env": ("x", "--nothing"),
    "trace": ("-m", "--", "-x", "missing.py"),
}
"""Values that an option or argument has not."""


@pytest.mark.parametrize("command", VALUES)
def test_values(command: str) -> None:
    check_all(([*command.split(), value], {USAGE, INVALID}) for value in VALUES[command])


WITHOUT_ARGUMENTS = (
    "env", "doctor", "cache show", "cache verify", "cache prune", "cache clear", "machine show", "machine measure",
)  # fmt: skip
MISSPELLED = (
    "--nothing", "--no", "-x", "--jsn", "--json=yes", "--json=", "--no-json", "-j", "-", "---", "-yes", "--Json", "-o",
    "--target", "--length", "--batch", "--\0", "--é", "-- x", "--json --jsn", "x y z", "--" + "x" * 5000, "--json a.py",
)  # fmt: skip


@pytest.mark.parametrize("command", WITHOUT_ARGUMENTS)
def test_commands_without_arguments(command: str) -> None:
    check_all(([*command.split(), name], {USAGE}) for name in NAMES)
    check_all(([*command.split(), *words.split(" ")], {USAGE}) for words in MISSPELLED)
    assert len(NAMES) + len(MISSPELLED) >= 50


@pytest.mark.parametrize("command", ["explain good.py", "opt good.fir", "cache show", "machine show", "env"])
def test_the_environment(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TARGET": "x", "APPLY": "x", "MODE": "x", "STRICT": "maybe", "CACHE_MB": "many", "SMALL_M": "-1"}
    for name, value in values.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"FUSEC_{name}", value)
            check_all([(command.split(), {USAGE})])


@pytest.mark.parametrize("command", ["explain good.py", "bisect good.py", "check good.py --against x.json --update"])
def test_names_to_disable_that_are_known_in_a_compile_alone(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_DISABLE", "no-such-pass")
    check_all([(command.split(), {USAGE})])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["machine show --json", "machine show", "--version", "--help"])
def test_a_full_disk(command: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "fusec", *command.split()]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd="/", check=False)
    assert done.returncode == USAGE and done.stderr.count("No space left") == 1 and len(done.stderr) < 200, done.stderr


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    text = (
        "import signal, sys, time, weakref\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from fusec.cli.terminal import raise_again\nsys.unraisablehook = raise_again\n"
        "class Thing: pass\n"
        "def interrupt(ref): raise KeyboardInterrupt\n"
        "thing = Thing()\nkept = weakref.ref(thing, interrupt)\ndel thing\ntime.sleep(60)\nsys.exit(5)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode not in (0, 5) and "KeyboardInterrupt" in done.stderr


LIGHT = [
    ["--help"], ["--version"], ["explain"], ["explain", "--help"], ["explain", "missing.py"], ["opt", "missing.fir"],
    ["why", "missing.py", "norm"], ["bisect", "missing.py"], ["reduce", "missing.fir"], ["trace", "missing.py"],
    ["kernels", "show", "missing.py", "name"], ["check", "missing.py", "--against", "x.json"], ["cache", "show"],
    ["explain", "--batch", "0", "model.py"], ["no-such-command"], ["view", "good.py", "-o", "nowhere/page.html"],
    ["capture", "good.py", "-o", "nowhere/x.fir"], ["explain", "brackets.py"], ["explain", "latin.fir"],
    ["explain", "json.json"], ["check", "good.py", "--against", "missing.json"],
    ["opt", "--list-passes"],
]  # fmt: skip
PARSED = [["explain", "graph_twice.fir"], ["opt", "graph_head.fir"], ["diff", "good.fir", "json.fir"]]


@pytest.mark.parametrize("words", [*LIGHT, *PARSED], ids=" ".join)
def test_help_and_wrong_use_import_neither_torch_nor_sympy(words: list[str]) -> None:
    """They take a tenth of the time of importing torch; sizes in the text of a graph need sympy."""
    assert imported_by(words) in ("[]", "['sympy']" if words in PARSED else "[]")


def test_names_of_architectures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no file has the name of a module
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    words = ["explain", "hf:lama"]
    assert "transformers" in imported_by(words)
    assert imported_by(words) == "[]"
    assert "did you mean llama" in run(*words).stderr


def imported_by(words: list[str]) -> str:
    """Return the slow packages that a call imports."""
    text = (
        "import sys\nfrom fusec.cli import app\n"
        f"try:\n    app({words!r})\nexcept SystemExit as end:\n    pass\n"
        "print([m for m in ('torch', 'sympy', 'triton', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]

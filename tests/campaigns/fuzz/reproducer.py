"""A file that shows a failure: the program, what it stands for, and a command that judges it again."""

from pathlib import Path

from tests.campaigns.fuzz.draws import Program, written
from tests.campaigns.fuzz.wide import wide_graph

_TEXT = '''"""{detail}

Found by `python -m tests.campaigns.fuzz --target {target} --seed {seed}`, program {index}, and shrunk.

{shown}
"""

from tests.campaigns.fuzz.draws import read
from tests.campaigns.fuzz.worker import judge_of

PROGRAM = read("""\\
{program}
""".split())

print(judge_of("{target}")(PROGRAM))
'''


def write_reproducer(folder: Path, target: str, seed: int, index: int, program: Program, detail: str) -> Path:
    """Write the file, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}_{seed}_{index}.py"
    text = _TEXT.format(
        detail=_plain(detail), target=target, seed=seed, index=index, shown=_plain(_shown(target, program)),
        program="\n".join(written(program)),
    )  # fmt: skip
    path.write_text(text)
    return path


def _shown(target: str, program: Program) -> str:
    if target == "backend":
        from tests.campaigns.fuzz.programs import python_of

        return python_of(program)
    graph = wide_graph(program)
    graph.erase_dead()
    return str(graph)


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''").strip()

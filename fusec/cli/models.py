"""Loads the MODEL argument of the command line."""

import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fusec.cli.model_errors import ModelError, first_line, is_compilers, place, reason_of
from fusec.cli.options import chosen
from fusec.cli.terminal import (
    PACKAGED,
    UsageError,
    check_name,
    compiled_script,
    is_graph_file,
    parsed_graph,
    unknown_model,
)
from fusec.errors import FusecError

if TYPE_CHECKING:
    from fusec.config import Config
    from fusec.debug.capture import CaptureOptions
    from fusec.debug.explanation import Explanation
    from fusec.debug.subject import Subject
    from fusec.ir.graph import Graph

SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "image_size": 32, "patch_size": 8,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_local_experts": 4, "num_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
"""Sizes that a ``transformers`` architecture is cut down to, where it has them."""
SMALL_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
WORDS = {"tokens", "decoder_tokens", "input_ids", "decoder_input_ids"}


@dataclass
class Loaded:
    """A model and its sample arguments."""

    title: str
    model: Any
    inputs: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass
class CompiledModel:
    """The compiled model or graph of a MODEL argument."""

    title: str
    subjects: "list[Subject]"
    model: Any = None
    """None where it names a graph."""

    def explained(self) -> "Explanation":
        """Return the explanation of all its graphs."""
        from fusec.debug.explain import explain_subjects

        return explain_subjects(self.subjects, self.title, self.model)


def load(spec: str, batch: int = 2, length: int = 16) -> Loaded:
    """The model that a specification names.

    Raises:
        UsageError: for one that names none.
    """
    kind, _, rest = spec.partition(":")
    if kind == "models":
        return _load_packaged(spec, rest, batch, length)
    if kind == "hf":
        return _load_transformers(spec, rest, batch, length)
    if spec.endswith(".py"):
        return _load_script(spec)
    raise unknown_model(spec)


@contextmanager
def loaded_model(spec: str, batch: int = 2, length: int = 16, train: bool = False) -> Iterator[Loaded]:
    """Load a model for this context, in which it is captured; an error that it raises in eager too is its own.

    Raises:
        UsageError: for a specification that names no model.
        ModelError: where the model, loaded again, raises the same in eager.
    """
    loaded = load(spec, batch, length)
    tracer = logging.getLogger("torch._subclasses.fake_tensor")
    level = tracer.level
    tracer.setLevel(logging.CRITICAL)  # it prints each exception of a model with its traceback
    try:
        yield loaded
    except FusecError:
        raise
    except Exception as error:
        own = _eager_error(spec, batch, length, train)
        if own is None or (is_compilers(error) and first_line(own) not in str(error)):
            raise
        raise ModelError(
            f"{loaded.title} raises on its sample inputs, in eager too",
            where=place(own), why=reason_of(own), fix="change the model or its inputs",
        ) from own  # fmt: skip
    finally:
        tracer.setLevel(level)


def _eager_error(spec: str, batch: int, length: int, train: bool) -> Exception | None:
    """Return what a model raises in eager; it is loaded again, as a call may have changed it or its inputs."""
    from fusec.debug.capture import call_model

    try:
        loaded = load(spec, batch, length)
        call_model(loaded.model, loaded.inputs, loaded.keywords, train)
    except Exception as own:
        return own
    return None


def read_graph(path: str) -> "Graph":
    """Parse and verify the text of a graph.

    Raises:
        UsageError: for a model.
    """
    from fusec.ir.verifier import verify_graph

    if path.endswith(".py") or path.startswith(("models:", "hf:")):
        raise UsageError(f"{path} is a model, not a graph", fix=f"fusec capture {path} | fusec opt")
    graph = parsed_graph(path)
    verify_graph(graph)
    for name in sorted(_devices(graph) - {"cpu"}):
        import torch

        try:
            torch.device(name)
        except RuntimeError as reason:
            raise UsageError(f"no device is called {name}", why=str(reason)[:200]) from reason
    return graph


def _devices(graph: "Graph") -> set[str]:
    """Return the devices of the tensors of a graph."""
    from fusec.ir.types import TensorType

    values = [*graph.inputs, *(v for node in graph.nodes for v in node.results)]
    return {v.type.device for v in values if isinstance(v.type, TensorType)}


def graph_of_trace(spec: str) -> str:
    """Return a MODEL, or where it is a trace of one compile, the file of the graph that was compiled.

    Raises:
        UsageError: for a trace of several compiles.
        NoTrace: for one of which no compile is done.
    """
    if not os.path.isdir(spec):
        return spec
    from fusec.debug.traces import finished, read_trace
    from fusec.tracing import IMPORTED

    finished(Path(spec))
    files = [compile.path / IMPORTED for compile in read_trace(Path(spec)).compiles]
    if len(files) > 1:
        raise UsageError(f"{spec} has {len(files)} compiles", fix=f"pass one of them, such as {files[0]}")
    return str(files[0])


def sampled_graph(path: str) -> "tuple[Graph, list[Any]]":
    """Return the graph in a file, and random inputs."""
    graph = read_graph(path)
    return graph, _inputs_of(graph)


def _inputs_of(graph: "Graph") -> list[Any]:
    """Return random inputs of a graph.

    Raises:
        UsageError: where a device is not there to run it.
    """
    import torch

    from fusec.debug.timing import sample_inputs
    from fusec.ir.types import ASSUMED_SIZE

    for name in sorted(_devices(graph)):
        try:
            torch.empty(1, device=name).tolist()
        except Exception as reason:  # an assertion, or an error of the device's own
            raise UsageError(
                f"the graph cannot run here, as it has tensors on {name}", why=str(reason)[:200]
            ) from reason
    return sample_inputs(graph, dict.fromkeys(graph.symbols(), ASSUMED_SIZE))


def check_captured(dynamic: bool, train: bool) -> None:
    """Raise UsageError where options say how a model is captured, but a graph is given."""
    if train or dynamic:
        why = "--train and --dynamic say how a model is captured"
        raise UsageError("a graph is captured already", why=why, fix="pass the model")


def recording(history: bool = False, **options: str | bool) -> "Config":
    """Return the configuration of a compile that is recorded; options that are "" or False have their defaults."""
    from fusec.config import Config

    return Config.from_options(None, {"record": True, "history": history, **chosen(**options)})


def compiled_model(
    spec: str, config: "Config", options: "CaptureOptions", batch: int = 2, length: int = 16
) -> CompiledModel:
    """Compile a MODEL, or read its trace; under ``options.time`` also time it, a graph on random inputs.

    Raises:
        UsageError: for options that do not apply to a graph or a trace.
    """
    from fusec.debug.capture import compile_model

    is_trace = os.path.isdir(spec)
    if not is_trace and not is_graph_file(spec):
        with loaded_model(spec, batch, length, options.train) as loaded:
            title, given = loaded.title, (loaded.model, loaded.inputs, loaded.keywords)
            found = compile_model(*given, options, config=config, title=title, keep=True)
        return CompiledModel(title, found, loaded.model)
    check_captured(options.dynamic, options.train)
    if is_trace:
        from fusec.debug.traces import finished

        if options.time:
            raise UsageError(f"{spec} is a trace, whose kernels do not run again", fix="pass the model")
        return CompiledModel(Path(spec).name, finished(Path(spec)))
    title = "" if spec == "-" else Path(spec).stem
    subject = _compiled_graph(spec, config, options.time, title)
    return CompiledModel(subject.title, [subject])


def _compiled_graph(spec: str, config: "Config", time: bool, title: str) -> "Subject":
    """Compile the text of a graph; one that is grouped into kernels already is returned unchanged.

    Raises:
        UsageError: for a grouped graph that is to be timed.
    """
    from fusec.codegen import target_for
    from fusec.compiler import compile_graph
    from fusec.debug.kept import kept_subject
    from fusec.debug.node_errors import node_errors
    from fusec.debug.subject import subject_of
    from fusec.debug.timing import time_program

    graph = read_graph(spec)
    if subject_of(graph).is_grouped:
        if time:
            raise UsageError(
                f"{spec} is already grouped into kernels, which are timed only as part of a compile",
                fix="pass the model, or the graph before grouping",
            )
        return replace(subject_of(graph, title), machine=target_for(graph, config).machine(config))
    if not time and not config.verify:
        return kept_subject(graph, config, title)
    compiled = compile_graph(graph, config)
    subject = subject_of(compiled, title)
    inputs = _inputs_of(graph)
    if time:
        subject.timed(time_program(compiled.program, compiled.graph, inputs))
    if config.verify:
        subject.note_errors(lambda: node_errors(compiled, config, inputs))
    return subject


def _load_packaged(spec: str, rest: str, batch: int, length: int) -> Loaded:
    name, _, preset = rest.partition("/")
    check_name("model", name, PACKAGED)
    import torch

    module = importlib.import_module(f"fusec.models.{name}")
    preset = preset or "tiny"
    check_name(f"preset of models:{name}", preset, module.PRESETS)
    config = module.PRESETS[preset]
    torch.manual_seed(0)
    model = getattr(module, PACKAGED[name])(config).eval()
    inputs = importlib.import_module("fusec.models.inputs")
    args: list[Any] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.name in WORDS:
            args.append(inputs.sample_tokens(config.vocabulary, batch, length, seed=len(args)))
        elif parameter.name == "images":
            args.append(inputs.sample_images(batch, config.channels, config.image))
        elif parameter.default is inspect.Parameter.empty:
            raise UsageError(f"{spec}: no sample is defined for input {parameter.name!r}")
    return Loaded(f"{name}/{preset}", model, tuple(args))


def _load_transformers(spec: str, name: str, batch: int, length: int) -> Loaded:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    config = kind(**_small_sizes(kind()))
    torch.manual_seed(0)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        encoder = not getattr(config, "is_decoder", False) and "bert" in name
        if kind in auto._model_mapping and not (encoder and auto is transformers.AutoModelForCausalLM):
            model = auto.from_config(config).eval()
            break
    else:
        raise UsageError(f"{spec}: transformers cannot build it from a configuration alone")
    if model.main_input_name == "pixel_values":
        images = torch.randn(batch, config.num_channels, config.image_size, config.image_size)
        return Loaded(f"{name} (small)", model, (), {"pixel_values": images})
    tokens = torch.randint(3, config.get_text_config().vocab_size, (batch, length))
    keywords: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if config.is_encoder_decoder:
        keywords["decoder_input_ids"] = tokens[:, : length // 2]
    if hasattr(config, "use_cache"):
        keywords["use_cache"] = False
    return Loaded(f"{name} (small)", model, (), keywords)


def _small_sizes(config: Any) -> dict[str, Any]:
    """The cut-down sizes that an architecture has under one of its names."""
    names = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    wanted = SMALL_T5 if "d_kv" in names else SMALL
    sizes = {k: v for k, v in {**SMALL, **wanted}.items() if k in names}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # latent attention has keys and values per head
    return {k: v for k, v in sizes.items() if wanted is SMALL or k in SMALL_T5 or "size" in k or "token" in k}


def _load_script(path: str) -> Loaded:
    """Run a script and return its ``model`` and ``inputs``, or the results of functions of those names."""
    module = run_script(path)
    with _running(path):
        return _defined(path, module)


def run_script(path: str) -> ModuleType:
    """Run a Python file, for its model or for the fusions and rewrites that it declares, and return its module."""
    code = compiled_script(path)
    module = ModuleType("fusec_script")
    module.__file__ = path
    sys.modules["fusec_script"] = module
    with _running(path):
        exec(code, module.__dict__)  # a loader may take its stored bytecode for that of an edited file
    return module


def declaring_files(*scripts: str) -> list[str]:
    """Return those of the scripts that were run, and of the modules they import, which declare fusions or rewrites."""
    from fusec.rewriting.declaring import SCRIPT, declaring_modules

    modules = declaring_modules()
    own = [path for path in scripts if path.endswith(".py") and SCRIPT in modules]
    files = (getattr(sys.modules.get(name), "__file__", None) for name in modules if name != SCRIPT)
    return [*filter(None, files), *own]


@contextmanager
def _running(path: str) -> Iterator[None]:
    """Let code of a script import its neighbours; what it raises is its own error."""
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # standard output is the command's
            yield
    except FusecError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as reason:
        raise ModelError(
            f"{path} raises", where=place(reason, path), why=reason_of(reason), fix=f"see `python {path}`"
        ) from reason
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _defined(path: str, module: ModuleType) -> Loaded:
    if not hasattr(module, "model") or not hasattr(module, "inputs"):
        missing = " and ".join(n for n in ("model", "inputs") if not hasattr(module, n))
        raise UsageError(
            f"{path} defines no {missing}", fix="define `model` and `inputs`, or functions that return them"
        )
    model = _made(module.model, "model")
    if not callable(model):
        why = f"`model` is of type {type(model).__name__}"
        raise UsageError(f"{path} defines no model", why=why, fix="assign a module, or a function of tensors")
    return _call_with(Path(path).stem, model, _made(module.inputs, "inputs"))


def _made(value: Any, name: str) -> Any:
    """Call a function without parameters; a model that is a plain function of tensors is returned as it is."""
    if inspect.isfunction(value) and (name == "inputs" or not inspect.signature(value).parameters):
        return value()
    return value


def _call_with(title: str, model: Any, inputs: Any) -> Loaded:
    if isinstance(inputs, Mapping):
        return Loaded(title, model, (), dict(inputs))
    return Loaded(title, model, tuple(inputs) if isinstance(inputs, Sequence) else (inputs,))

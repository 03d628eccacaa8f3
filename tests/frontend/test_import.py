"""Ways into the importer, and what it records: sources, constants, opaque templates, layouts, fallbacks."""

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.errors import ImportFailure
from fusec.frontend import import_exported, import_for_call, import_fx, trace
from fusec.frontend.decompositions import KEPT_WHOLE
from fusec.frontend.lowering import HANDLERS
from fusec.frontend.sizes import to_plain
from fusec.frontend.sources import readable_path, shorten
from fusec.frontend.torch_internals import kept_whole
from fusec.ir.types import evaluate_size, quotient, symbol
from fusec.ir.verifier import verify_graph
from fusec.reference.interpreter import evaluate


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.proj(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x + self.shift


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_an_exported_program() -> None:
    model, x = Model(), torch.randn(3, 4)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    graph = import_exported(program)
    verify_graph(graph)
    inputs = [*model.parameters(), model.shift]
    for rows in (3, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(evaluate(graph, [*inputs, x]), [model(x)])
    products = [n for n in graph.nodes if n.is_op("contraction")]
    assert [n.sources[0].module for n in products] == ["layers.0.proj", "layers.1.proj"]
    assert all(n.sources[0].op == "aten.linear.default" for n in products)


def test_a_module_that_holds_tensors() -> None:
    table = torch.randn(4)
    traced = make_fx(lambda x: x * table + torch.tensor(2.0), tracing_mode="fake", _allow_non_fake_inputs=True)
    gm = traced(torch.zeros(4))
    imported = import_for_call(gm)
    assert len(imported.graph.inputs) == 1 + len(imported.constants)
    x = torch.randn(4)
    call = imported.callable(lambda args: evaluate(imported.graph, args))
    arguments = [x]
    torch.testing.assert_close(call(arguments)[0], x * table + 2.0)
    assert arguments == []


def test_only_aten_graphs_are_imported() -> None:
    with pytest.raises(ImportFailure, match="AOTAutograd"):
        import_fx(torch.fx.symbolic_trace(Model()))


def test_a_write_to_something_shared_is_refused() -> None:
    def update(x: Tensor) -> Tensor:
        y = x + 1
        y[0] = 5
        return y

    with pytest.raises(ImportFailure, match="changes its operand"):
        import_fx(make_fx(update, tracing_mode="fake")(torch.zeros(3)))


def test_an_opaque_call_keeps_its_arguments() -> None:
    def attend(q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5, enable_gqa=True)

    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 3, 2)
    (node,) = trace(attend, [q, k]).nodes
    assert node.is_op("opaque")
    assert node.attributes["args"][:3] == (("%", 0), ("%", 1), ("%", 2))
    assert dict(node.attributes["kwargs"]) == {"scale": 0.5, "enable_gqa": True}
    assert [str(t) for t in node.attributes["operand_types"]] == [str(v.type) for v in node.operands]


def test_layouts_that_an_opaque_call_was_promised() -> None:
    def twisted(x: Tensor) -> Tensor:
        return x.t().contiguous().as_strided((2, 2), (1, 2))

    x = torch.randn(3, 4)
    graph = trace(twisted, [x], symbolic=False)
    (node,) = [n for n in graph.nodes if n.is_op("opaque")]
    assert node.attributes["operand_types"][0].strides == (3, 1)
    assert node.operands[0].tensor.strides == (1, 4)
    torch.testing.assert_close(evaluate(graph, [x])[0], twisted(x))


def test_constants_keep_their_precision() -> None:
    graph = trace(lambda x: x + 1e-6, [torch.zeros(3, dtype=torch.bfloat16)])
    (constant,) = [n for n in graph.nodes if n.is_op("constant")]
    assert constant.attributes["value"] == 1e-6 and constant.result.dtype.name == "bf16"


def test_a_missing_private_name_only_costs_the_whole_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.export.exported_program._override_composite_implicit_decomp")
    with kept_whole(KEPT_WHOLE) as whole:
        assert not whole
    x, w, b = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    graph = trace(nn.functional.linear, [x, w, b])
    verify_graph(graph)
    torch.testing.assert_close(evaluate(graph, [x, w, b])[0], nn.functional.linear(x, w, b))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].layers.0.proj", "layers.0.proj"),
        ("L['self']._modules['layers']._modules['0'].proj", "layers.0.proj"),
        ("L['model'].model.layers[3].mlp", "model.layers.3.mlp"),
        ("L['self'].__dict__['model'].layers[3].mlp", "model.layers.3.mlp"),
        ("layers.0", "layers.0"),
        ("", ""),
    ],
)
def test_module_paths_are_readable(path: str, expected: str) -> None:
    assert readable_path(path) == expected


def test_files_are_named_from_their_package_on() -> None:
    assert shorten("/opt/x/site-packages/transformers/models/llama/m.py") == "transformers/models/llama/m.py"
    assert shorten("<string>") == "<string>"


def test_a_name_is_shortened_where_no_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's directory may be removed while it runs, and the name of generated code may be no file's."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    shorten.cache_clear()
    assert shorten("/nowhere/m.py") == "m.py"
    assert shorten("relative/m.py") == "relative/m.py"
    assert shorten(f"/{'x' * 300}/m.py") == "m.py"


def test_torch_sizes_become_plain_sympy() -> None:
    functions: Any = pytest.importorskip("torch.utils._sympy.functions")
    n, m = sympy.Symbol("s0", integer=True, positive=True), symbol("s0")
    assert to_plain(functions.FloorDiv(n, 2)) == sympy.floor(m / 2)
    assert to_plain(functions.Mod(n, 3)) == m - 3 * sympy.floor(m / 3)
    assert to_plain(functions.Mod(7, n)) == sympy.Mod(7, m)
    assert to_plain(n + 1) == m + 1
    four = functions.FloorDiv(4 * n * functions.FloorDiv(n**2, n), n**2)
    assert to_plain(functions.FloorDiv(128, four)) == 32  # what divides is known only once it is plain
    with pytest.raises(ImportFailure):
        to_plain(functions.BitwiseFn_bitwise_and(n, 3))


def test_computed_lengths_count_as_some() -> None:
    graph = trace(lambda x: x[:, 3:].exp(), [torch.randn(4, 9)])
    assert graph.outputs[0].tensor.is_contiguous and not graph.output_types[0].is_contiguous  # type: ignore[union-attr]


def test_nested_quotients_of_sizes_are_one() -> None:
    n, m = symbol("n"), symbol("m")
    inner = quotient(n - 10, 5) + 1
    assert quotient(inner - 3, 2) == quotient(n - 20, 10) and quotient(17, 5) == 3
    for k in range(23, 80):
        assert evaluate_size(quotient(inner - 3, 2), {"n": k}) == ((k - 10) // 5 + 1 - 3) // 2
        assert evaluate_size(quotient(quotient(n, m) + n, 3), {"n": k, "m": 4}) == (k // 4 + k) // 3


def test_an_error_in_a_handler_is_raised_where_nobody_reads_the_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A declaration that holds a call of ATen in its place would match nothing."""

    def failing(low: Any, call: Any) -> Any:
        raise RuntimeError("a mistake in a handler")

    monkeypatch.setitem(HANDLERS, "aten.exp.default", failing)
    with pytest.raises(RuntimeError, match="a mistake"):
        trace(torch.exp, [torch.randn(3)])
    with torch.no_grad():
        module = make_fx(torch.exp, tracing_mode="fake")(torch.randn(3))
    imported = import_for_call(module)
    assert [n.op.name for n in imported.graph.nodes] == ["opaque"]
    assert "a mistake" in next(iter(imported.remarks)).reason

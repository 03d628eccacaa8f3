"""Redrawn weights and the reader of safetensors files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fusec.models import bert, checkpoint, gpt2
from fusec.models.inputs import padded_mask
from fusec.models.weights import redraw


def test_every_parameter_is_redrawn_and_the_seed_decides() -> None:
    first, second, other = (gpt2.GPT2(gpt2.PRESETS["tiny"]) for _ in range(3))
    before = [p.clone() for p in first.parameters()]
    redraw(first, 0), redraw(second, 0), redraw(other, 1)
    for old, a, b, c in zip(before, first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a, old)


def test_redrawn_weights_have_the_promised_scale() -> None:
    model = redraw(bert.Bert(bert.PRESETS["tiny"]))
    spread = {name: (p.mean().item(), p.std().item()) for name, p in model.named_parameters()}
    width = bert.PRESETS["tiny"].hidden ** -0.5
    assert spread["layers.0.value.weight"][1] == pytest.approx(width, rel=0.05)
    assert spread["layers.0.query.weight"][1] == pytest.approx(2 * width, rel=0.05)
    assert spread["embeddings.words.weight"][1] == pytest.approx(1, rel=0.05)
    assert spread["layers.0.output_norm.weight"][0] == pytest.approx(1, abs=0.1)
    assert spread["layers.0.up.bias"][1] == pytest.approx(0.2, rel=0.2)


def test_queries_and_keys_of_a_packed_projection_are_doubled() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(64, 64 + 2 * 16)

    weight = redraw(Attention()).qkv_proj.weight  # type: ignore[union-attr]
    assert weight[:80].std().item() == pytest.approx(2 / 8, rel=0.05)  # type: ignore[index]
    assert weight[80:].std().item() == pytest.approx(1 / 8, rel=0.05)  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_reader_gives_what_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12).view(3, 4).to(dtype), "odd": torch.ones(3, dtype=dtype), "none": torch.ones(0, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        read = checkpoint.read_safetensors(source)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_missing_weights_are_named(tmp_path: Path) -> None:
    save_file({"embeddings.LayerNorm.weight": torch.ones(128)}, tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match=r"embeddings\.norm\.bias"):
        bert.Bert.from_safetensors(tmp_path, bert.PRESETS["tiny"])


def test_padding_is_on_the_asked_side() -> None:
    left, right = padded_mask(4, 9, "left"), padded_mask(4, 9, "right")
    assert left[:, -1].all() and right[:, 0].all() and left[0].all() and not left[1:].all() and not right[1:].all()

"""Roles of the parameters of models people train, and what codecs see of them. Models have random weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from gradlab.artifact import Artifact
from gradlab.codec import Batch, Context
from gradlab.codecs.powersgd import PowerSGD, low_rank_errors
from gradlab.layout import Layer, filter_axes, flatten, layers_of, matrices, unflatten
from gradlab.plan import Group, Plan
from gradlab.roles import ROLES
from gradlab.trace.schema import Manifest, read_manifest, write_manifest
from support.laws import law


def roles(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.role for layer in layers_of(model)}


# --- modules of torch.nn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
        nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
        nn.LSTM(3, 8, proj_size=4, bidirectional=True),
        nn.GRUCell(3, 8),
        nn.Bilinear(3, 4, 5),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
        nn.LayerNorm((3, 4)),
        nn.Embedding(5, 3),
        nn.ConvTranspose2d(3, 4, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_torch_modules_leave_nothing_to_guess(module: nn.Module) -> None:
    for layer in layers_of(module):
        assert layer.role != "other"
        assert (layer.role == "bias") == ("bias" in layer.name), layer


def test_parameters_of_its_own_that_are_added_to_activations_are_embeddings() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
            self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
            self.pos_bias_u = nn.Parameter(torch.zeros(2, 4))
            self.temperature = nn.Parameter(torch.zeros(2, 4))

    assert roles(Patches()) == {
        "cls_token": "embedding",
        "pos_embed": "embedding",
        "relative_position_bias_table": "embedding",
        "pos_bias_u": "bias",
        "temperature": "other",
    }
    assert matrices(layers_of(Patches())[1]) == (1, 5, 8)


# --- models of transformers -----------------------------------------------------------------------------------------


SMALL: Mapping[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 1}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.thorough  # here and below: transformers takes seconds to import
def test_gpt2(transformers: Any) -> None:
    config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    found = layers_of(transformers.GPT2LMHeadModel(config))
    by_role = {role: [layer.name for layer in found if layer.role == role] for role in ROLES}
    block = "transformer.h.0."
    assert by_role["transposed_linear"] == [
        f"{block}{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert by_role["embedding"] == ["transformer.wte.weight", "transformer.wpe.weight"]  # the head is tied to wte
    assert by_role["normalization"] == [f"{block}ln_1.weight", f"{block}ln_2.weight", "transformer.ln_f.weight"]
    assert not by_role["other"]
    up = next(layer for layer in found if layer.name.endswith("c_fc.weight"))
    assert (up.shape, filter_axes(up)) == ((16, 64), (64, 16))


@pytest.mark.thorough
def test_bert_and_llama(transformers: Any) -> None:
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    for model, embeddings, norms in ((bert, 3, 4 - 1), (llama, 1, 3)):
        count = Counter(layer.role for layer in layers_of(model))
        assert (count["embedding"], count["normalization"], count["other"]) == (embeddings, norms + (model is bert), 0)
        assert all(len(layer.shape) == 1 for layer in layers_of(model) if layer.role in ("bias", "normalization"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "role", "gate_up"),
    [
        ("Mixtral", "experts", (3, 48, 16)),
        ("Qwen3Moe", "experts", (3, 16, 16)),
        ("GptOss", "transposed_experts", (3, 16, 48)),
    ],
)
def test_expert_stacks(transformers: Any, family: str, role: str, gate_up: tuple[int, ...]) -> None:
    values = {**SMALL, **EXPERTS, "head_dim": 8}
    if family == "Qwen3Moe":
        values |= {"num_experts": 3, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**values))
    stacks = [layer for layer in layers_of(model) if len(layer.shape) == 3]
    assert {layer.role for layer in stacks} == {role}
    assert stacks[0].shape == gate_up
    for layer in stacks:
        batch, n, m = matrices(layer)
        assert (batch, n, m) == layer.shape
        assert filter_axes(layer) == ((m, n) if role == "transposed_experts" else (n, m))
    flat = [layer for layer in layers_of(model) if len(layer.shape) == 2]
    assert not [layer for layer in flat if layer.role == "other"]
    assert {layer.role for layer in flat if layer.name.endswith("_bias")} <= {"bias"}


@pytest.mark.thorough
def test_llama4_says_nothing_and_is_known_by_its_hidden_size(transformers: Any) -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    config = transformers.Llama4TextConfig(hidden_size=16, intermediate_size=24, num_local_experts=3)
    assert set(roles(Llama4TextExperts(config)).values()) == {"transposed_experts"}


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_files_keep_roles(role: str, tmp_path: Any) -> None:
    layers = (Layer("a", (3, 4, 5), role),)
    path = Artifact(Plan(layers, (Group("a", ("a",), "powersgd"),))).save(tmp_path / "plan.safetensors")
    assert Artifact.load(path).plan.layers == layers
    write_manifest(tmp_path, Manifest(2, layers))
    assert read_manifest(tmp_path).layers == layers


# --- what codecs see --------------------------------------------------------------------------------------------------


@law(st.sampled_from(ROLES), st.lists(st.integers(0, 4), min_size=2, max_size=4))
def test_the_order_of_gradiveq_is_inverted_and_puts_outputs_together(role: str, shape: list[int]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    vector = flatten(tensor, "gradiveq", role=role)
    assert torch.equal(unflatten(vector, shape, "gradiveq", role=role), tensor)
    filters, depth = filter_axes(Layer("a", tuple(shape), role))
    if filters * depth:
        for group in vector.view(-1, filters):
            steps = group.diff()
            assert torch.equal(steps, steps[:1].expand_as(steps))  # one step along the outputs' axis each


@law(st.integers(1, 3), st.integers(2, 7), st.integers(2, 7), st.booleans(), st.integers(0, 3))
def test_powersgd_treats_an_expert_stack_as_its_experts(
    experts: int, n: int, m: int, alternating: bool, seed: int
) -> None:
    """Experts of rank one are kept whole, and their bytes are those of as many layers."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(experts, n, 1, generator=generator), torch.randn(experts, 1, m, generator=generator)
    stack = factors[0] @ factors[1]  # every expert of rank one, the stack as a matrix of more
    layer = Layer("a", (experts, n, m), "experts")
    codec = PowerSGD(PowerSGD.Settings(rank=1, alternating=alternating, minimum_ratio=1e-9))
    done = codec.apply(Batch.of({"a": stack}, [layer]))
    assert alternating or done.relative_error < 1e-4
    assert done.payload_bytes == codec.forecast([layer], 1, {}).payload
    alone = codec.forecast([Layer("b", (n, m), "linear")], 1).payload
    assert codec.forecast([layer], 1).payload == experts * alone


def test_errors_of_an_expert_stack_are_its_experts_sum() -> None:
    stack = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(1))
    codec = PowerSGD(PowerSGD.Settings(rank=2, minimum_ratio=1e-9))
    [error] = PowerSGD.squared_errors([codec], Layer("a", (3, 6, 5), "experts"), stack, Context(0, 1, 0))
    assert error == pytest.approx(sum(low_rank_errors(expert, [2], method="svd")[0] for expert in stack))

"""What roles leave dense is said, and a plan that compresses nothing is refused."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap
from gradlab.plan.lgc_recipe import lgc_plan
from gradlab.roles import ROLES
from support.laws import law

TRANSFORMER = (
    Layer("embed", (50, 32), "embedding"),
    Layer("up", (32, 128), "transposed_linear"),
    Layer("experts", (2, 32, 64), "experts"),
    Layer("experts_bias", (2, 400), "bias"),
    Layer("conv", (8, 4, 3, 3), "convolution"),
)


def test_a_plan_that_compresses_nothing_lists_the_roles_there_are() -> None:
    wanted = "it takes layers of role linear .* 256 elements on"
    remedy = "lower minimum_numel or minimum_dimensions, or name further roles"
    message = f"topk would compress nothing: {wanted}; there are (.*); {remedy}$"
    with pytest.raises(GradlabError) as refused:
        Plan.uniform(TRANSFORMER, "topk", roles=("linear",))
    found = re.search(message, str(refused.value))
    assert found
    assert all(role in found[1] for role in ("embedding 6.40 kB (1 layer)", "experts", "convolution"))


def test_a_plan_whose_roles_leave_most_dense_warns_and_names_them() -> None:
    with pytest.warns(UserWarning, match="topk compresses .* role convolution. It leaves these dense: ") as warned:
        Plan.uniform(TRANSFORMER, "topk", roles="convolution")
    line = str(warned[0].message)
    assert "transposed_linear 16.4 kB (1 layer)" in line
    assert "bias" not in line  # too few dimensions whatever its role
    assert warned[0].filename == __file__


def test_what_is_made_dense_on_purpose_is_no_error() -> None:
    assert not Plan.uniform(TRANSFORMER, "topk", roles=()).compressed_groups
    assert not Plan.uniform(TRANSFORMER, "identity").compressed_groups
    small = [Layer("weight", (4, 4), "linear"), Layer("scale", ())]
    assert not Plan.uniform(small, "identity").groups
    decayed = Plan.uniform(small, "identity", wrappers=[Wrap("momentum")])
    assert [group.layers for group in decayed.groups] == [("weight",), ("scale",)]
    assert not Plan.uniform((), "topk").groups
    assert not Plan(TRANSFORMER).groups


@pytest.mark.parametrize("codec", ["topk", "powersgd", "qsgd", "sign", "dct_topk", "one_bit", "clt_k"])
def test_by_default_a_transformer_is_compressed(codec: str) -> None:
    """Biases of an expert stack are vectors, which only signs take."""
    plan = Plan.uniform(TRANSFORMER, codec)
    dense = {layer.name for layer in plan.dense_layers}
    assert dense == (set() if codec == "sign" else {"experts_bias"})


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(GradlabError, match="role 'conv': expected one of convolution, "):
        Plan.uniform(TRANSFORMER, "topk", roles=("conv",))


def test_an_autoencoder_without_layers_lists_the_roles_there_are() -> None:
    with pytest.raises(GradlabError, match=r"no layer is left to learn from; there are embedding 6\.40 kB"):
        lgc_plan(TRANSFORMER[:1], "ring")


@law(
    st.lists(st.tuples(st.sampled_from(ROLES), st.integers(1, 40)), min_size=1, max_size=6),
    st.sets(st.sampled_from(ROLES), min_size=1),
)
def test_silence_means_that_half_of_the_bytes_is_compressed(rows: list[tuple[str, int]], roles: set[str]) -> None:
    """Every layer is large enough here, unless it is a bias."""
    layers = [Layer(str(n), (16, 16 * size), role) for n, (role, size) in enumerate(rows)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            plan = Plan.uniform(layers, "topk", roles=roles)
        except GradlabError:
            assert not [layer for layer in layers if layer.role in roles - {"bias"}]
            return
    total, large = (sum(layer.numel for layer in some) for some in (layers, [x for x in layers if x.role != "bias"]))
    compressed = total - sum(layer.numel for layer in plan.dense_layers)
    assert compressed > 0
    assert bool(warned) == (2 * compressed < total <= 2 * large)

"""Workloads: registry, recipes and optimizers, sample order, models, loss and metrics; what holds for every one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlab import datasets
from gradlab.datasets.metric import ACCURACY, BITS_PER_BYTE, NATS_PER_CHARACTER, PERPLEXITY, PIXEL_ACCURACY
from gradlab.errors import GradlabError

RECIPE = datasets.Recipe(learning_rate=0.4, momentum=0.9, weight_decay=0.0, batch_size=8, steps=100)


# --- registry, recipe, order of samples -------------------------------------------------------------------------


def test_every_workload_is_found_by_its_name() -> None:
    texts = ["text_bytes", "text_chars", "text_words"]
    assert datasets.names() == ["digits", "cifar10", "fashion_mnist", "camvid", *texts]
    assert [datasets.get(name).name for name in datasets.names()] == datasets.names()
    with pytest.raises(GradlabError, match="unknown workload 'mnist': expected one of digits, cifar10, fashion_mnist"):
        datasets.get("mnist")


def test_a_recipe_refuses_a_setting_out_of_range() -> None:
    wrong = {"momentum": 1.0, "weight_decay": -1e-4, "batch_size": 0, "steps": 0, "warmup_steps": 101}
    wrong |= {"schedule": "linear", "optimizer": "adam", "second_momentum": 1.0, "end_factor": 1.5, "clip_norm": 0.0}
    for setting, value in [("learning_rate", 0.0), ("learning_rate", float("nan")), *wrong.items()]:
        with pytest.raises(GradlabError, match=f"recipe: {setting} is "):
            dataclasses.replace(RECIPE, **{setting: value})  # type: ignore[arg-type]


def test_nesterov_is_of_sgd_with_momentum() -> None:
    for changes in ({"momentum": 0.0}, {"optimizer": "adamw"}):
        with pytest.raises(GradlabError, match="recipe: nesterov is True, expected SGD and a momentum above 0 with it"):
            dataclasses.replace(RECIPE, nesterov=True, **changes)  # type: ignore[arg-type]


def test_an_optimizer_has_the_settings_of_its_recipe() -> None:
    recipe = dataclasses.replace(RECIPE, weight_decay=0.1, warmup_steps=10, nesterov=True)
    (sgd,) = datasets.build_optimizer(recipe, [torch.nn.Parameter(torch.zeros(2))]).param_groups
    assert [sgd[key] for key in ("momentum", "weight_decay", "nesterov")] == [0.9, 0.1, True]
    assert sgd["lr"] == datasets.learning_rate_at(recipe, 0) == pytest.approx(0.04)
    recipe = dataclasses.replace(recipe, nesterov=False, optimizer="adamw", second_momentum=0.95)
    optimizer = datasets.build_optimizer(recipe, [torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [optimizer.param_groups[0][key] for key in ("betas", "weight_decay")] == [(0.9, 0.95), 0.1]
    assert optimizer.param_groups[0]["lr"] == sgd["lr"]


def test_a_recipe_may_spare_vectors_from_weight_decay() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    for optimizer in ("sgd", "adamw"):
        recipe = dataclasses.replace(RECIPE, momentum=0.0, weight_decay=0.1, optimizer=optimizer, decays_vectors=False)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in (matrix, vector):
                parameter.fill_(1.0)
                parameter.grad = torch.zeros_like(parameter)
        datasets.build_optimizer(recipe, [vector, matrix]).step()
        assert torch.equal(vector, torch.ones(2))
        assert torch.allclose(matrix, torch.full((2, 2), 1 - 0.4 * 0.1))


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6),
    limit=st.none() | st.floats(0.01, 100),
)
def test_clipping_bounds_the_norm_of_all_gradients_and_keeps_their_direction(
    values: list[float], limit: float | None
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor([value])
    before = np.array(values)
    datasets.clip_gradients(dataclasses.replace(RECIPE, clip_norm=limit), parameters)
    after = np.array([float(parameter.grad) for parameter in parameters])  # type: ignore[arg-type]
    norm = float(np.linalg.norm(before))
    factor = 1.0 if limit is None or norm <= limit else limit / norm
    assert after == pytest.approx(factor * before, rel=1e-4, abs=1e-5)
    assert limit is None or np.linalg.norm(after) <= limit * (1 + 1e-5)


def test_nanogpts_schedule_ends_at_a_tenth_of_its_peak() -> None:
    """`get_lr` of its train.py, whose warm-up reaches the peak one step later."""
    recipe = datasets.get("text_chars").recipe
    for step in (100, 101, 700, 1500, 1999):
        ratio = (step - 100) / (2000 - 100)
        oracle = 1e-4 + 0.5 * (1.0 + np.cos(np.pi * ratio)) * (1e-3 - 1e-4)
        assert datasets.learning_rate_at(recipe, step) == pytest.approx(oracle)
    assert datasets.learning_rate_at(recipe, 2000) == pytest.approx(1e-4)
    assert datasets.learning_rate_at(recipe, 0) == pytest.approx(1e-5)


def test_the_cosine_schedule_is_the_one_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RECIPE.learning_rate)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=RECIPE.steps)
    for step in range(RECIPE.steps):
        assert datasets.learning_rate_at(RECIPE, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        oracle.step()


@given(steps=st.integers(1, 300), fraction=st.floats(0, 1), schedule=st.sampled_from(["cosine", "constant", "step"]))
def test_the_rate_rises_in_equal_parts_to_its_peak_and_never_rises_again(
    steps: int, fraction: float, schedule: datasets.recipe.Schedule
) -> None:
    warmup = int(fraction * steps)
    recipe = dataclasses.replace(RECIPE, steps=steps, warmup_steps=warmup, schedule=schedule)
    rates = [datasets.learning_rate_at(recipe, step) for step in range(steps + 3)]
    assert rates[:warmup] == pytest.approx([recipe.learning_rate * (i + 1) / warmup for i in range(warmup)])
    assert all(0 <= later <= earlier for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert max(rates) <= recipe.learning_rate


def test_the_step_schedule_divides_by_ten_where_the_paper_does() -> None:
    recipe = datasets.get("cifar10").recipe
    rates = [datasets.learning_rate_at(recipe, step) for step in (0, 31_999, 32_000, 47_999, 48_000, 63_999)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def _steps_of_ranks(samples: int, batch: int, world: int, seed: int, steps: int) -> list[list[list[int]]]:
    ranks = [datasets.batches(samples, batch, rank, world, seed, steps) for rank in range(world)]
    return [[indices.tolist() for indices in step] for step in zip(*ranks, strict=True)]


@given(
    world=st.integers(1, 4),
    batch=st.integers(1, 6),
    extra=st.integers(0, 30),
    seed=st.integers(0, 2**63),
    data=st.data(),
)
def test_ranks_share_out_each_epoch_without_overlap(
    world: int, batch: int, extra: int, seed: int, data: st.DataObject
) -> None:
    samples = world * batch + extra
    per_epoch = samples // (world * batch)
    steps = data.draw(st.integers(0, 3 * per_epoch))
    drawn = _steps_of_ranks(samples, batch, world, seed, steps)
    assert len(drawn) == steps
    for start in range(0, steps, per_epoch):
        epoch = [index for step in drawn[start : start + per_epoch] for rank in step for index in rank]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(samples))
    assert all(len(indices) == batch for step in drawn for indices in step)
    assert drawn == _steps_of_ranks(samples, batch, world, seed, steps)


def test_a_step_has_the_same_samples_however_many_ranks_share_it() -> None:
    one = [set(step[0]) for step in _steps_of_ranks(50, 12, 1, 7, 10)]
    three = [set().union(*step) for step in _steps_of_ranks(50, 4, 3, 7, 10)]
    assert one == three


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = (tuple(step[0]) for step in _steps_of_ranks(64, 64, 1, 0, 2))
    (other,) = (tuple(step[0]) for step in _steps_of_ranks(64, 64, 1, 1, 1))
    assert len({first, second, other}) == 3


def test_impossible_batches_are_refused_at_the_call() -> None:
    for arguments, message in (
        ((10, 6, 0, 2, 0, 1), "batch size 6 is larger than a rank's share of 5 samples"),
        ((10, 2, 2, 2, 0, 1), "rank 2 of 2"),
        ((10, 0, 0, 2, 0, 1), "batch size 0"),
        ((10, 2, 0, 2, -1, 1), "seed -1"),
    ):
        with pytest.raises(GradlabError, match=message):
            datasets.batches(*arguments)


# --- models, loss, metrics -------------------------------------------------------------------------------------


SIZES = [
    ("digits", 93_562, 10),
    ("cifar10", 269_722, 20),
    ("fashion_mnist", 1_663_370, 4),
    ("camvid", 227_355, 15),
    ("text_bytes", 842_496, 18),
    ("text_chars", 804_096, 18),
    ("text_words", 1_850_112, 18),
]


@pytest.mark.parametrize(("name", "parameters", "weighted_layers"), SIZES)
def test_a_model_has_the_published_size_and_follows_from_its_seed(
    name: str, parameters: int, weighted_layers: int
) -> None:
    """And leaves global randomness alone."""
    before = torch.get_rng_state()
    model, again, other = (datasets.get(name).model(seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.ndim > 1 for p in model.parameters()) == weighted_layers
    first, same, others = model.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not any(torch.equal(first[key], others[key]) for key in first if first[key].ndim > 1)


class _Constant(torch.nn.Module):
    """Always the logits of one class; in training, of another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 2 if self.training else 1), 3).float()


def test_accuracy_is_the_share_of_right_answers_in_evaluation_mode() -> None:
    workload, model = datasets.get("digits"), _Constant()
    y = torch.tensor([1, 2, 1, 0, 1, 1, 2])
    for size in (3, None):
        assert workload.score(model, torch.zeros(7, 1), y, batch_size=size) == pytest.approx(4 / 7)
    assert model.training
    with pytest.raises(GradlabError, match="accuracy of no samples"):
        workload.score(model, torch.zeros(0, 1), y[:0])


class _Bigram(torch.nn.Module):
    """Logits of the next token (batch, length, 4) by the token before."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits[tokens]


def test_the_metrics_of_texts_are_of_the_geometric_mean_of_the_likelihoods() -> None:
    generator = torch.Generator().manual_seed(0)
    model = _Bigram(torch.randn(4, 4, generator=generator))
    x, y = (torch.randint(4, (7, 5), generator=generator) for _ in range(2))
    likelihoods = model.logits.double().softmax(1).numpy()[x.numpy().ravel(), y.numpy().ravel()]
    mean = float(np.prod(likelihoods) ** (1 / 35))
    for name, oracle in (("text_words", 1 / mean), ("text_bytes", -np.log2(mean)), ("text_chars", -np.log(mean))):
        for size in (1, 3, None):
            assert datasets.get(name).score(model, x, y, batch_size=size) == pytest.approx(oracle, rel=1e-6)


def test_a_model_that_diverged_still_has_a_score() -> None:
    y = torch.zeros(2, 3, dtype=torch.int64)
    for loss, perplexity in ((1e4, np.inf), (np.nan, np.nan)):
        model = _Bigram(torch.tensor([[0.0, loss]]))
        assert datasets.get("text_words").score(model, y, y) == pytest.approx(perplexity, nan_ok=True)


@pytest.mark.parametrize("name", datasets.names())
def test_a_metric_is_plain_json_with_a_direction(name: str) -> None:
    metric = datasets.get(name).metric
    assert metric.to_json() == {"name": metric.name, "better": metric.better, "form": metric.form}
    others = {"text_bytes": BITS_PER_BYTE, "text_words": PERPLEXITY, "camvid": PIXEL_ACCURACY}
    others |= {"text_chars": NATS_PER_CHARACTER}
    assert metric is others.get(name, ACCURACY)


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    logits, y = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([0, 1])
    oracle = np.mean([np.log(1 + np.exp(1.0)), np.log(1 + np.exp(3.0))])
    assert datasets.get("digits").loss(logits, y).item() == pytest.approx(oracle, rel=1e-6)


@pytest.mark.parametrize("name", datasets.names())
def test_augmentation_follows_from_its_generator_alone(name: str) -> None:
    workload, before = datasets.get(name), torch.get_rng_state()
    x = torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    first, again = (workload.augment(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == x.shape
    assert torch.equal(torch.get_rng_state(), before)

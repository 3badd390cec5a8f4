"""`check_codec` names the law that a codec breaks: one fault for each law."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradlab.codec import Exchanged, Guarantees, Tensors, check_codec
from gradlab.codec.kept import Kept
from gradlab.codecs.identity import Identity
from gradlab.codecs.topk import TopK
from gradlab.errors import GradlabError


class Counts(TopK):
    def compressed_bytes(self, numel):
        return super().compressed_bytes(numel) + 1


class Changes(TopK):
    def compress(self, vector, generator):
        vector[:1] = 0
        return super().compress(vector, generator)


class Negates(TopK):
    """Decodes to -C(x)."""

    def add_decompressed(self, total, payload, scale):
        super().add_decompressed(total, payload, -scale)

    def average_into(self, out, payloads, scale):
        return super().average_into(out, payloads, -scale)


class Unscaled(TopK):
    def add_decompressed(self, total, payload, scale):
        super().add_decompressed(total, payload, 1.0)


class Copies(TopK):
    def add_decompressed(self, total, payload, scale):
        super().add_decompressed(total.clone(), payload, scale)


class Lists(TopK):
    def compress(self, vector, generator):
        return list(super().compress(vector, generator))


class Draws(TopK):
    def select(self, vector, generator):
        return torch.randperm(vector.numel())[: len(super().select(vector, generator))]


class Boasts(TopK):
    def guarantees(self, layers):
        return Guarantees(delta=0.999)


class Fails(TopK):
    def compress(self, vector, generator):
        raise IndexError("of its own")


class Hides(TopK):
    def compress(self, vector, generator):
        return super().compress(vector.nan_to_num(0.0, 0.0, 0.0), generator)


class Loses(Identity):
    """An identity whose result `spoil` changes."""

    def exchange(self, grads, state, context):
        done = yield from super().exchange(grads, state, context)
        mean = {name: self.spoil(one, context) for name, one in done.mean.items()}
        return Exchanged(mean, done.own, self.kept_after(grads))

    def spoil(self, mean, context):
        return mean

    def kept_after(self, grads) -> Tensors:
        return {}


class Differs(Loses):
    def spoil(self, mean, context):
        return mean + context.rank


class Invents(Loses):
    def spoil(self, mean, context):
        return mean + 1


class Reshapes(Loses):
    def spoil(self, mean, context):
        return mean.reshape(-1)


class Late(TopK):
    """Reads gradients after the mean may have been written over them."""

    def kept(self, layers, rank, world_size, group):
        return {f"{layer.name}/mine": Kept(layer.shape) for layer in layers}

    def exchange(self, grads, state, context):
        done = yield from super().exchange(grads, state, context)
        return replace(done, state={f"{name}/mine": grad.clone() for name, grad in grads.items()})


class Keeps(Loses):
    def kept_after(self, grads):
        return {f"{name}/mine": torch.zeros(1) for name in grads}


class Shares(Loses):
    def kept(self, layers, rank, world_size, group):
        return {f"{layer.name}/mine": Kept(layer.shape) for layer in layers}

    def kept_after(self, grads):
        return {f"{name}/mine": grad for name, grad in grads.items()}


@pytest.mark.parametrize(
    ("codec", "law"),
    [
        (Counts, "bytes were counted"),
        (Changes, "an argument or a message was changed"),
        (Negates, "points away from the gradient"),
        (Unscaled, "does not add scale"),
        (Copies, "does not add scale"),
        (Lists, "expected a tuple of vectors"),
        (Draws, "take random numbers from `generator`"),
        (Boasts, r"delta = 0.999 allows 0.001"),
        (Fails, "conv, 3 ranks, step 0: IndexError: of its own"),
        (Hides, "what is not finite on one rank is finite on another"),
        (Reshapes, "the mean is not of the gradient's shape"),
        (Late, "memory that is used again changes the result"),
        (Differs, "ranks get different means"),
        (Invents, "zeros do not give zeros"),
        (Shares, "a state is in the memory of gradients"),
        (Keeps, "is nothing that its codec keeps"),
    ],
)
def test_a_broken_law_is_named(codec, law: str) -> None:
    with pytest.raises(GradlabError, match=law):
        check_codec(codec())


def test_a_sound_codec_passes_as_a_class_too() -> None:
    check_codec(TopK(TopK.Settings(density=0.1)), world_sizes=[2])
    check_codec(Identity, world_sizes=[2])


@pytest.mark.parametrize("asked", [{"layers": []}, {"world_sizes": []}, {"world_sizes": [0]}])
def test_nothing_to_check_is_one_line(asked: dict) -> None:
    with pytest.raises(GradlabError, match=r"^check_codec: .* expected at least one of each"):
        check_codec(TopK, **asked)

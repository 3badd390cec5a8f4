"""The parts that an author of a codec subclasses: the contract, compressors, blocks, sparsifiers, settings."""

from gradlab.codec.compressor import Compressor, Sparsifier
from gradlab.codec.contract import (
    About,
    Applied,
    Codec,
    Context,
    Deferred,
    Exchanged,
    Gradients,
    Guarantees,
    PlanDefaults,
    alone,
    exchange_group,
    hash_tensor,
    mean_only,
    register,
    seeded_generator,
    shown_settings,
)
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import count_of, largest
from gradlab.codec.vectors import Tensors, concatenate, separate
from gradlab.coding.bits import pack, packed_bytes, unpack
from gradlab.coding.positions import decode, encode, index_bytes
from gradlab.collectives.requests import Coroutine, Mean, Sum
from gradlab.layout import Layer

__all__ = [
    "About",
    "Applied",
    "Codec",
    "Compressor",
    "Context",
    "Coroutine",
    "Deferred",
    "Exchanged",
    "Gradients",
    "Guarantees",
    "Layer",
    "Mean",
    "PlanDefaults",
    "Sparsifier",
    "Sum",
    "Tensors",
    "alone",
    "concatenate",
    "count_of",
    "decode",
    "encode",
    "exchange_group",
    "hash_tensor",
    "index_bytes",
    "largest",
    "mean_only",
    "pack",
    "packed_bytes",
    "register",
    "seeded_generator",
    "separate",
    "setting",
    "shown_settings",
    "unpack",
]

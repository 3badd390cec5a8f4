"""The parts that an author of a codec subclasses: the contract, compressors, blocks, sparsifiers, settings."""

from gradlab.codec.batch import Batch, Table, Tensors, concatenate, separate
from gradlab.codec.check import check_codec
from gradlab.codec.compressor import Compressor, Sparsifier
from gradlab.codec.context import Context, Memory, Training, alone, seeded_generator
from gradlab.codec.contract import About, Bytes, Codec, Guarantees, PlanDefaults, Traits, register
from gradlab.codec.exchanged import Deferred, Exchanged, exchange_group, mean_only
from gradlab.codec.method import Applied, Gradients, hash_tensor, shown_settings
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import count_of, largest
from gradlab.coding.bits import pack, packed_bytes, unpack
from gradlab.coding.positions import decode, encode, index_bytes
from gradlab.collectives.requests import Coroutine, Mean, Sum
from gradlab.layout import Layer

__all__ = [
    "About",
    "Applied",
    "Batch",
    "Bytes",
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
    "Memory",
    "PlanDefaults",
    "Sparsifier",
    "Sum",
    "Table",
    "Tensors",
    "Training",
    "Traits",
    "alone",
    "check_codec",
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

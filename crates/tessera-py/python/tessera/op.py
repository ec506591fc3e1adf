"""Layers: each function returns an object that is called on arrays or on values of a traced function."""

from ._native import (
    Layer,
    Moe,
    Numeric,
    RouterMeta,
    embedding,
    flash_attention,
    layer_norm,
    linear,
    moe,
    numeric,
    relu,
    rms_norm,
    set_router,
    set_router_regularizer,
    silu,
    softmax,
)

__all__ = [
    "Layer",
    "Moe",
    "Numeric",
    "RouterMeta",
    "embedding",
    "flash_attention",
    "layer_norm",
    "linear",
    "moe",
    "numeric",
    "relu",
    "rms_norm",
    "set_router",
    "set_router_regularizer",
    "silu",
    "softmax",
]

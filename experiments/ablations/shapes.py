"""Shapes of equal parameters, found by counting the parameters of real models."""

import functools
from dataclasses import replace

import torch

from model import GPT, GPTConfig


@functools.cache
def n_parameters(shape: GPTConfig) -> int:
    """How many parameters a model of this shape has. No memory is used for them."""
    with torch.device("meta"):
        model = GPT(shape)
    return sum(parameter.numel() for parameter in model.parameters())


def fit_hidden(shape: GPTConfig, n_wanted: int) -> int:
    """The n_hidden that brings a model of this shape nearest to n_wanted parameters."""
    in_one_channel = n_parameters(replace(shape, n_hidden=2))
    in_one_channel -= n_parameters(replace(shape, n_hidden=1))
    missing = n_wanted - n_parameters(shape)
    return max(1, shape.d_hidden + round(missing / in_one_channel))


def equal_hidden(shape: GPTConfig) -> int:
    """The n_hidden of a plain model with the parameters of this shape's gated fusion model.

    All kinds of fusion are compared with this one plain model; `residual` has one matrix less.
    """
    gated = n_parameters(replace(shape, fusion="gated"))
    return fit_hidden(replace(shape, fusion="none"), gated)


def equal_depth(shape: GPTConfig, n_layer: int) -> dict[str, int]:
    """What to change for n_layer blocks at equal parameters, those of the gated fusion included.

    n_embd is the multiple of 2 n_head that comes nearest with an MLP of the usual 8/3 n_embd;
    n_hidden then makes up for the rest. {} where shape has as many blocks already.
    """
    if n_layer == shape.n_layer:
        return {}
    shape = replace(shape, fusion="gated")
    wanted = n_parameters(shape)
    candidates = []
    for heads_channels in range(2, 8 * shape.n_embd // shape.n_head, 2):
        n_embd = heads_channels * shape.n_head
        deeper = replace(shape, n_layer=n_layer, n_embd=n_embd, n_hidden=0)
        candidates.append((abs(n_parameters(deeper) - wanted), n_embd))
        if n_parameters(deeper) > wanted:
            break  # wider models have more still
    _, n_embd = min(candidates)
    deeper = replace(shape, n_layer=n_layer, n_embd=n_embd, n_hidden=0)
    return {"n_layer": n_layer, "n_embd": n_embd, "n_hidden": fit_hidden(deeper, wanted)}

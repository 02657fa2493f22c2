"""A training step of torch.nn.Transformer (post-norm), with torch's own smoothed loss and Adam."""

import math
from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional

from benchmarks.sizes import Size, Step


def make_step(
    size: Size, *, bfloat16: bool = False, threads: int = 2, alike: Collection[str] = ()
) -> Step:
    """The step, one tied table for both languages and the softmax; bfloat16 by autocast.

    `alike` names in what the model is made like ours (`make_alike`).
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    table = nn.Embedding(size.vocab_size, size.d_model, padding_idx=0)
    nn.init.normal_(table.weight, std=size.d_model**-0.5)
    layers = size.num_layers, size.num_layers
    model = nn.Transformer(
        size.d_model, size.num_heads, *layers, size.d_ff, size.dropout, batch_first=True
    ).train()
    make_alike(model, size, alike)
    parameters = [*model.parameters(), *table.parameters()]
    adam = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    positions = _positions(4096, size.d_model)

    def embed(tokens):
        x = table(tokens) * math.sqrt(size.d_model) + positions[: tokens.shape[1]]
        return functional.dropout(x, size.dropout)

    def run(source, target):
        source, target = torch.from_numpy(source).long(), torch.from_numpy(target).long()
        read = functional.pad(target, (1, 0), value=1)[:, :-1]
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            states = model(
                embed(source),
                embed(read),
                tgt_mask=torch.ones(2 * [read.shape[1]], dtype=torch.bool).triu(1),
                src_key_padding_mask=source == 0,
                tgt_key_padding_mask=read == 0,
                memory_key_padding_mask=source == 0,
            )
            scores = functional.linear(states, table.weight).flatten(0, 1)
        loss = functional.cross_entropy(
            scores.float(), target.flatten(), ignore_index=0, label_smoothing=0.1
        )
        loss.backward()
        adam.step()
        return loss.item()

    return run


def make_alike(model: nn.Transformer, size: Size, alike: Collection[str]) -> None:
    """Changes a new model: "dropout" has the paper's sites alone, "layers" the paper's weights.

    torch drops out attention weights and the FFN's activations too; its projections of attention
    have biases, and a norm follows each stack.
    """
    layers = [*model.encoder.layers, *model.decoder.layers]
    attention_rate = 0.0 if "dropout" in alike else size.dropout
    for layer in layers:
        if "dropout" in alike:
            layer.dropout = nn.Identity()
        for name in ("self_attn", "multihead_attn"):
            if hasattr(layer, name):
                attention = nn.MultiheadAttention(
                    size.d_model,
                    size.num_heads,
                    attention_rate,
                    bias="layers" not in alike,
                    batch_first=True,
                )
                setattr(layer, name, attention)
    if "layers" in alike:
        model.encoder.norm = model.decoder.norm = None


def _positions(length: int, d_model: int) -> torch.Tensor:
    rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

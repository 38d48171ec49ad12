"""The method against independent expectations: hand numbers, and a naive decoder written here.

Nothing below calls the function under test to make its own expectation. The naive decoder knows the
model's weights but shares no code with it: it loops over heads, takes rotary positions as complex
numbers, has no cache, and recomputes everything.
"""

import ast
import itertools
import math
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import model as model_file
from model import (
    GPT,
    Feedback,
    Fusion,
    FusionKind,
    GPTConfig,
    KVCache,
    objective,
    prefix_mask,
    sampler,
)

SHAPE = dict(vocab_size=13, block_size=8, n_layer=2, n_head=4, n_embd=16, n_kv_head=2, n_hidden=24)
B, T, D, V, L, BLOCK = 3, 8, 16, 13, 2, 8
KINDS = tuple(kind for kind in get_args(FusionKind) if kind != "none")
MODES = ("standard", "soft", "fused")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make(seed=0, double=True, **changes) -> GPT:
    """A tiny model in eval mode whose gains are no ones and whose logits are far from even."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPE | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        model.embedding.weight.mul_(20)
        if model.fusion is not None:
            for weight in model.fusion.parameters():
                if not weight.any():  # a kind that starts at the plain model
                    weight.normal_(std=D**-0.5)
    return model.double() if double else model


def tokens(*shape, seed=1) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def set_weights(model, **weights):
    """Fusion matrices by name."""
    with torch.no_grad():
        for name, value in weights.items():
            getattr(model.fusion, name).weight.copy_(value)


def spy(monkeypatch, model, name) -> list[torch.Tensor]:
    """The first argument of every call of model.name from now on."""
    seen, original = [], getattr(model, name)

    def wrapper(x, *args, **kwargs):
        seen.append(x)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(model, name, wrapper)
    return seen


def close(actual, expected, atol=2e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0, check_dtype=False)


# The naive decoder


def naive_norm(x, norm):
    """Root mean square norm, with its gain; nothing at all for a model without an input norm."""
    if isinstance(norm, torch.nn.Identity):
        return x
    mean_square = x.square().mean(-1, keepdim=True)
    return x / (mean_square + norm.eps).sqrt() * norm.weight


def naive_turn(x, base):
    """Rotary positions of x (B, T, D_h).

    Channel j of both halves is one complex number, which position t turns by t * base^(-2j/D_h).
    """
    half = x.size(-1) // 2
    t = torch.arange(x.size(1), dtype=torch.float64)[:, None]
    j = torch.arange(half, dtype=torch.float64)
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = z * torch.exp(1j * t * base ** (-2 * j / (2 * half)))
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def naive_visible(config, layer, T):
    """Which positions (column) each position (row) sees in a layer."""
    sees = torch.zeros(T, T, dtype=torch.bool)
    full = config.window == 0
    if config.window_every and (layer + 1) % config.window_every == 0:
        full = True
    for query in range(T):
        for key in range(query + 1):
            sees[query, key] = full or query - key < config.window
    return sees


def naive_stack(model, u):
    """h (B, T, D) of inputs u, with the keys and values of every layer (L, B, H_kv, T, D_h)."""
    c = model.config
    width = c.head_dim if c.head_dim else c.n_embd // c.n_head
    n_kv = c.n_kv_head if c.n_kv_head else c.n_head
    a = 1 / math.sqrt(2 * c.n_layer) if c.depth_scale else 1.0
    all_k = []
    all_v = []
    x = naive_norm(u, model.input_norm)
    for layer, block in enumerate(model.blocks):
        attn = block.attn
        normed = naive_norm(x, block.attn_norm)
        q = (normed @ attn.q.weight.T).split(width, dim=-1)
        k = (normed @ attn.k.weight.T).split(width, dim=-1)
        v = (normed @ attn.v.weight.T).split(width, dim=-1)
        if c.qk_norm:
            q = [naive_norm(head, attn.q_norm) for head in q]
            k = [naive_norm(head, attn.k_norm) for head in k]
        q = [naive_turn(head, c.rope_base) for head in q]
        k = [naive_turn(head, c.rope_base) for head in k]
        hidden = ~naive_visible(c, layer, u.size(1))
        read = []
        for head in range(c.n_head):
            shared = head // (c.n_head // n_kv)  # neighbouring query heads share keys and values
            scores = q[head] @ k[shared].transpose(1, 2) / math.sqrt(width)
            read.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[shared])
        x = x + a * torch.cat(read, dim=-1) @ attn.out.weight.T
        normed = naive_norm(x, block.mlp_norm)
        gate = normed @ block.mlp.gate.weight.T
        up = normed @ block.mlp.up.weight.T
        x = x + a * (gate / (1 + torch.exp(-gate)) * up) @ block.mlp.down.weight.T
        all_k.append(torch.stack(k, dim=1))
        all_v.append(torch.stack(v, dim=1))
    return naive_norm(x, model.output_norm), torch.stack(all_k), torch.stack(all_v)


def naive_fusion(model, h, e):
    """e (x) h, the gate reading norm(e); h, e (B, D).

    A kind that has no formula here, because somebody is trying it out, is taken at its word.
    """
    kind = model.config.fusion
    norm_e = naive_norm(e, model.input_norm)
    rms = (e**2).sum(-1, keepdim=True).div(e.size(-1)) ** 0.5
    weights = {name: matrix.weight for name, matrix in model.fusion.named_children()}
    if kind == "gated":
        return h @ weights["W_H"].T / (1 + torch.exp(-norm_e @ weights["W_G"].T))
    if kind == "add":
        return h @ weights["W_H"].T + norm_e @ weights["W_G"].T
    if kind == "concat":
        return torch.cat([h, norm_e], dim=-1) @ weights["W_R"].T
    if kind == "residual":
        return e + rms * (h @ weights["W_H"].T)
    if kind == "gated_residual":
        return e + rms * (h @ weights["W_H"].T) / (1 + torch.exp(-norm_e @ weights["W_G"].T))
    return model.fusion(h, e, norm_e)


def naive_inputs(model, h, e, n_plain=1):
    """u (B, T, D): plain at the first n_plain positions, then e_t fused with the state before."""
    u = []
    for t in range(e.size(1)):
        if t < n_plain:
            u.append(e[:, t])
        else:
            u.append(naive_fusion(model, h[:, t - 1], e[:, t]))
    return torch.stack(u, dim=1)


def naive_passes(model, idx, k, n_plain=1):
    e = model.embedding.weight[idx]
    states = [naive_stack(model, e)[0]]
    while len(states) < k:
        states.append(naive_stack(model, naive_inputs(model, states[-1], e, n_plain))[0])
    return states


def naive_recurrence(model, idx, n_plain=1):
    """Eqs. (3), (5), (6), one position after the other: u, h, keys, values."""
    e = model.embedding.weight[idx]
    u = []
    h = None
    for t in range(idx.size(1)):
        if t < n_plain:
            u.append(e[:, t])
        else:
            u.append(naive_fusion(model, h[:, t - 1], e[:, t]))
        h, k, v = naive_stack(model, torch.stack(u, dim=1))
    return torch.stack(u, dim=1), h, k, v


@torch.no_grad()
def naive_decode(model, prompt, n_new, mode, extra_passes=1):
    """Greedy decoding that keeps the inputs it fed and recomputes everything at every step.

    The rules as documented: of the prompt the last block_size tokens; a full window keeps its last
    half. Returns tokens (B, n_new), the states they were read from (B, n_new, D) and the
    log-probabilities of all symbols.
    """
    block, E = model.config.block_size, model.embedding.weight
    e = E[prompt[:, -block:]]
    h = naive_stack(model, e)[0]
    u = e
    for _ in range(extra_passes if mode == "fused" else 0):
        u = naive_inputs(model, h, e)
        h = naive_stack(model, u)[0]
    fed, state = list(u.unbind(1)), h[:, -1]
    picked, states = [], []
    for n in range(n_new):
        if n:
            e = E[picked[-1]]
            if len(fed) == block:
                fed = fed[-(block // 2) :]
            fed.append(e if mode == "standard" else naive_fusion(model, state, e))
            state = naive_stack(model, torch.stack(fed, dim=1))[0][:, -1]
        picked.append((state @ E.T).argmax(-1))
        states.append(state)
    states = torch.stack(states, dim=1)
    return torch.stack(picked, dim=1), states, (states @ E.T).log_softmax(-1)


def collect(steps) -> tuple[torch.Tensor, torch.Tensor]:
    """What generate yields, as tokens (B, n) and log-probabilities (B, n)."""
    picked, logps = zip(*steps)
    return torch.stack(picked, dim=1), torch.stack(logps, dim=1)


# Configuration, shapes, first losses


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("block_size", 1),
        ("n_layer", 0),
        ("n_head", 0),
        ("n_embd", 0),
        ("n_embd", -16),
        ("n_embd", 20),
        ("n_embd", 12),
        ("n_kv_head", 3),
        ("n_kv_head", -1),
        ("n_hidden", -1),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", math.nan),
        ("rope_base", 0.0),
        ("rope_base", math.inf),
        ("rope_base", math.nan),
        ("fusion", "glu"),
    ],
)
def test_config_errors_name_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value!r} "):
        GPTConfig(**SHAPE | {field: value})


def test_config_defaults_that_depend_on_others():
    assert GPT(GPTConfig(**SHAPE | dict(n_kv_head=0))).blocks[0].attn.k.weight.shape == (D, D)
    assert GPT(GPTConfig(**SHAPE | dict(n_embd=128, n_hidden=0))).blocks[
        0
    ].mlp.down.weight.shape == (128, 352)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_the_public_functions(kind):
    model, idx = make(fusion=kind), tokens(B, T)
    e = model.embed(idx)
    h = model.stack(e)
    assert (
        e.shape
        == h.shape
        == model.next_inputs(h, e).shape
        == model.next_pass(h, e).shape
        == (B, T, D)
    )
    assert model.fusion(h, e, e).shape == Fusion(D, kind).double()(h, e, e).shape == (B, T, D)
    assert model.head(h).shape == (B, T, V) and model.head(h[:, -1]).shape == (B, V)
    assert [h.shape for h in model.passes(idx, 3)] == 3 * [(B, T, D)]
    assert model(idx, idx).shape == (1,) and model(idx, idx, 3).shape == (3,)
    assert objective(model(idx, idx, 3)).shape == ()
    assert prefix_mask(B, T).shape == (B, T) and prefix_mask(B, T).dtype == torch.bool

    cache, h = model.reconstruct(idx[:, :5], 2, 3)
    assert h.shape == (B, 5, D) and (cache.length, cache.passes) == (5, 3)
    assert (
        cache.k.shape == cache.v.shape == KVCache(model.config, B, h).k.shape == (L, B, 2, BLOCK, 4)
    )
    assert cache.u.shape == (B, BLOCK, D)
    cache, h = model.prefill(idx[:, :5], "fused", prefill_passes=2)
    assert h.shape == (B, 1, D) and (cache.length, cache.passes) == (5, 3)
    assert model.decode_step(idx[:, :1], h, cache, "soft").shape == (B, 1, D) and cache.length == 6
    model.slide(cache)
    assert cache.length == BLOCK // 2
    steps = list(model.generate(idx, 4, "soft"))
    assert len(steps) == 4 and all(token.shape == logp.shape == (B,) for token, logp in steps)
    assert sampler()(torch.zeros(B, V)).shape == (B,)
    assert list(model.generate(idx, 0)) == []


def fresh(**changes) -> GPT:
    torch.manual_seed(1337)
    return GPT(
        GPTConfig(
            vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32, n_hidden=64, **changes
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_pass_starts_near_ln_v(kind):
    idx = torch.randint(64, (8, 17))
    losses = fresh(fusion=kind)(idx[:, :-1], idx[:, 1:], 3)
    close(losses, torch.full((3,), math.log(64)), atol=0.05)


def test_golden_one_step_loss():
    """After a change that is meant to change the numbers, run this test and copy what it prints."""
    model = fresh()
    idx = torch.arange(4 * 17).view(4, 17) * 7 % 64
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = model(idx[:, :-1], idx[:, 1:], 3)
    objective(before).backward()
    optimizer.step()
    after = model(idx[:, :-1], idx[:, 1:], 3)
    print([round(x, 5) for x in before.tolist()], [round(x, 5) for x in after.tolist()])
    close(before, torch.tensor(GOLDEN_BEFORE), atol=2e-4)
    close(after, torch.tensor(GOLDEN_AFTER), atol=2e-4)


GOLDEN_BEFORE = [4.20016, 4.16969, 4.15774]
GOLDEN_AFTER = [3.92713, 3.99113, 3.98682]


# The plain decoder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_head": 0},
        {"n_kv_head": 1},
        {"qk_norm": False},
        {"depth_scale": False},
        {"rope_base": 100.0},
        {"n_layer": 1, "n_head": 1, "n_kv_head": 1, "n_hidden": 0},
        {"n_layer": 5},
        {"head_dim": 6},
        {"n_embd": 15, "head_dim": 2},
        {"input_norm": False},
        {"eps": 0.1},
        {"window": 1},
        {"window": 3},
        {"window": 3, "window_every": 2},
        {"window": 100},
        {"fusion": "none"},
    ],
    ids=str,
)
def test_stack_equals_the_naive_decoder(changes):
    model, idx = make(**changes), tokens(B, T)
    e = model.embedding.weight[idx]
    close(model.embed(idx), e, atol=0)
    h, *_ = naive_stack(model, e)
    close(model.stack(e), h)
    close(
        model.head(h), torch.einsum("btd,vd->btv", h, e.new_tensor(model.embedding.weight.tolist()))
    )
    u = torch.randn(B, T, model.config.n_embd).double() * 3  # not only embeddings
    close(model.stack(u), naive_stack(model, u)[0])


def test_far_positions_turn_by_their_own_angles():
    """Angles of hundreds of positions need float32 whatever the number type of the model."""
    model = make(block_size=700, n_layer=1, n_embd=8, n_head=1, n_kv_head=1, rope_base=100.0)
    u = torch.randn(1, 700, 8).double()
    close(model.stack(u), naive_stack(model, u)[0], atol=1e-3)


@pytest.mark.parametrize("window", [0, 2, 5])
def test_stack_in_chunks_through_a_cache_equals_the_naive_decoder(window):
    model = make(window=window)
    u = torch.randn(B, T, D).double()
    h, k, v = naive_stack(model, u)
    cache = KVCache(model.config, B, like=u)
    chunks = [model.stack(part, cache) for part in u.split([3, 1, 4], dim=1)]
    close(torch.cat(chunks, dim=1), h)
    close(cache.k, k)
    close(cache.v, v)
    close(cache.u, u, atol=0)


def test_stack_refuses_what_does_not_fit():
    model = make()
    u = torch.randn(B, BLOCK + 1, D).double()
    with pytest.raises(ValueError, match="block_size=8"):
        model.stack(u)
    with pytest.raises(ValueError, match="block_size=8"):
        model.reconstruct(tokens(B, BLOCK + 1), 1, 1)
    for filled, more in [(0, 9), (8, 5), (2, 7), (5, 6)]:
        cache = KVCache(model.config, B, like=u)
        if filled:
            model.stack(u[:, :filled], cache)
        with pytest.raises(ValueError, match="block_size=8"):
            model.stack(u[:, :more], cache)
        if filled < BLOCK:
            assert cache.length == filled  # only a full cache slides: nothing else is forgotten


def test_nll_is_the_mean_over_targets_that_count():
    model, idx, targets = make(), tokens(B, T), tokens(B, T, seed=2)
    targets[0, :5] = targets[2, 3] = -1
    for losses, k in ((model(idx, targets, 1), 1), (model(idx, targets, 3), 3)):
        for loss, h in zip(losses, naive_passes(model, idx, k), strict=True):
            logps = (h @ model.embedding.weight.T).log_softmax(-1)
            kept = [
                -logps[b, t, targets[b, t]]
                for b in range(B)
                for t in range(T)
                if targets[b, t] >= 0
            ]
            close(loss, sum(kept) / len(kept))


# Latent feedback


BY_HAND = {  # W_H h = (-1, -2), W_G norm(e) = (ln 3, 0), the sigmoid of it (3/4, 1/2), rms(e) = 10
    "gated": [-0.75, -1.0],
    "add": [-1 + math.log(3), -2.0],
    "concat": [-1 + math.log(3), -2.0],
    "residual": [2 - 10.0, 14 - 20.0],
    "gated_residual": [2 - 7.5, 14 - 10.0],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_fusion_by_hand(kind):
    fusion = Fusion(2, kind)
    weights = {
        "W_H": torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
        "W_G": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        "W_R": torch.tensor([[1.0, 2.0, 0.0, 1.0], [3.0, 5.0, 1.0, 0.0]]),
    }
    with torch.no_grad():
        for name, matrix in fusion.named_children():
            matrix.weight.copy_(weights[name])
    h_prev = torch.tensor([[[1.0, -1.0]]])
    e = torch.tensor([[[2.0, 14.0]]])
    norm_e = torch.tensor([[[0.0, math.log(3)]]])
    close(fusion(h_prev, e, norm_e), torch.tensor([[BY_HAND[kind]]]), atol=1e-5)


SHAPES = {
    "gated": {"W_H": (D, D), "W_G": (D, D)},
    "add": {"W_H": (D, D), "W_G": (D, D)},
    "concat": {"W_R": (D, 2 * D)},
    "residual": {"W_H": (D, D)},
    "gated_residual": {"W_H": (D, D), "W_G": (D, D)},
}


@pytest.mark.parametrize("kind", SHAPES)
def test_fusion_holds_only_the_matrices_of_its_kind(kind):
    named = Fusion(D, kind).named_parameters()
    shapes = {name.removesuffix(".weight"): tuple(p.shape) for name, p in named}
    assert shapes == SHAPES[kind]


@pytest.mark.parametrize("kind", ["residual", "gated_residual"])
@pytest.mark.parametrize("input_norm", [True, False])
def test_residual_kinds_start_as_the_plain_model_bit_for_bit(kind, input_norm):
    torch.manual_seed(3)
    model = GPT(GPTConfig(**SHAPE, fusion=kind, input_norm=input_norm))
    idx = tokens(B, T)
    first, second, third = model(idx, idx, 3)
    assert first == second == third
    plain, _ = collect(model.generate(idx, 2 * BLOCK, "standard"))
    soft, _ = collect(model.generate(idx, 2 * BLOCK, "fused"))
    assert torch.equal(plain, soft)
    # The first step is not in vain: the later passes' losses move W_H away from zero.
    assert gradients(model, second)["fusion.W_H.weight"].abs().max() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_of_zeros_has_finite_gradients(kind):
    """Public checkpoints pad their embedding with rows of zeros."""
    model, idx = make(fusion=kind), tokens(B, T)
    with torch.no_grad():
        model.embedding.weight[idx[0, 2]] = 0
    for gradient in gradients(model, objective(model(idx, idx, 2))).values():
        assert gradient.isfinite().all()


def test_add_and_concat_are_the_same_functions():
    add, concat = Fusion(D, "add"), Fusion(D, "concat")
    with torch.no_grad():
        concat.W_R.weight.copy_(torch.cat([add.W_H.weight, add.W_G.weight], dim=1))
    h, e = torch.randn(2, B, T, D)
    close(add(h, e, e), concat(h, e, e))


@pytest.mark.parametrize(
    "lam, expected", [(1.0, (2.0, 2.0 + 3.0, 2.0 + 5.0)), (0.5, (2.0, 3.5, 4.5))]
)
def test_objective_by_hand(lam, expected):
    losses = torch.tensor([2.0, 3.0, 7.0])
    for k in (1, 2, 3):
        close(objective(losses[:k], lam), torch.tensor(expected[k - 1]), atol=0)
    close(objective(losses), torch.tensor(7.0), atol=0)  # lambda is 1 by default


def test_fuse_shifts_right_by_one():
    model = make(fusion="add")
    set_weights(
        model, W_H=torch.eye(D), W_G=torch.zeros(D, D)
    )  # u_t is then the state it was fused with
    h, e = torch.randn(2, B, T, D).double()
    u = model.next_inputs(h, e)
    close(u[:, 1:], h[:, :-1], atol=0)  # not h[:, 1:], and not rolled the other way:
    assert (u - h).abs().amin(dim=-1).gt(0).all() and (u[:, :-1] - h[:, 1:]).abs().amin(dim=-1).gt(
        0
    ).all()
    close(u[:, 0], e[:, 0], atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_fuse_equals_the_naive_inputs(kind):
    model = make(fusion=kind)
    h, e = torch.randn(2, B, T, D).double()
    expected = naive_inputs(model, h, e)
    close(model.next_inputs(h, e), expected)
    close(model.next_inputs(h[:, :1], e[:, :1]), e[:, :1], atol=0)  # one position is the first one
    rows = torch.rand(B, T) < 0.5
    close(model.next_inputs(h, e, rows), torch.where(rows[..., None], e, expected))
    close(model.next_inputs(h, e, torch.arange(T) < 3), naive_inputs(model, h, e, n_plain=3))


def test_the_gate_reads_the_normed_embedding():
    """The shared input norm takes out the size of e, but not the size of h."""
    model = make()
    h, e = torch.randn(2, B, T, D).double()
    close(model.next_inputs(h, 7 * e)[:, 1:], model.next_inputs(h, e)[:, 1:])
    close(model.next_inputs(2 * h, e)[:, 1:], 2 * model.next_inputs(h, e)[:, 1:])
    close(model.stack(7 * e), model.stack(e), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_reach_the_sequential_recurrence(kind):
    model, idx = make(fusion=kind), tokens(B, T)
    _, exact, *_ = naive_recurrence(model, idx)
    for k, h in enumerate(model.passes(idx, T), start=1):
        close(h[:, :k], exact[:, :k])
        assert (h[:, k:] - exact[:, k:]).abs().amax(dim=(0, 2)).gt(1e-3).all(), (
            f"exact too early in pass {k}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_passes_equal_the_naive_ones(kind):
    model, idx = make(fusion=kind), tokens(B, T)
    expected = naive_passes(model, idx, 4)
    for actual, h in zip(model.passes(idx, 4), expected, strict=True):
        close(actual, h)
    close(model.next_pass(expected[1], model.embedding.weight[idx]), expected[2])
    plain = model.passes(idx, 3, plain=torch.ones(B, T, dtype=torch.bool))
    close(plain[2], expected[0])
    mixed = model.passes(idx, 3, plain=torch.arange(T) < 4)
    close(mixed[2], naive_passes(model, idx, 3, n_plain=4)[2])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_k_passes_carry_a_state_k_minus_1_positions_on(monkeypatch, k):
    """Without attention, feedback is the only way forward: t then reaches t .. t + k - 1."""
    model, idx = make(), tokens(B, T)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.out.weight)
    e = model.embed(idx).detach().requires_grad_()
    monkeypatch.setattr(model, "embed", lambda _: e)
    probe = torch.randn(D).double()
    h = model.passes(idx, k)[-1] @ probe  # (B, T)
    for s in range(T):
        (grad,) = torch.autograd.grad(h[:, s].sum(), e, retain_graph=True)
        reached = [t for t in range(T) if grad[:, t].abs().max() > 1e-9]
        assert reached == list(range(max(0, s - k + 1), s + 1))


# Training: jitter, prefix mixin, detach, identity, causality


def jitter_of(model, monkeypatch, idx, k, sigma) -> list[torch.Tensor]:
    """eps of Eq. (11) of passes 2..k, read off the stack's inputs, by a fusion that is h."""
    set_weights(model, W_H=torch.eye(D), W_G=torch.zeros(D, D))
    inputs = spy(monkeypatch, model, "stack")
    states = model.passes(idx, k, feedback=Feedback(jitter=sigma))
    return [u[:, 1:] - h[:, :-1] for u, h in zip(inputs[1:], states)]


def test_jitter_is_uniform_within_sigma(monkeypatch):
    second, third = jitter_of(make(fusion="add").train(), monkeypatch, tokens(64, T), 3, sigma=0.25)
    for eps in (second, third):
        assert 0.249 < eps.max() <= 0.25 and -0.25 <= eps.min() < -0.249
        assert eps.mean().abs() < 0.01 and abs(eps.std() - 0.25 / 3**0.5) < 0.005
    assert (second - third).abs().max() > 0.1  # drawn again in every pass
    assert (
        eps[0].std(dim=0).min() > 0 and eps[:, 0].std(dim=0).min() > 0
    )  # and for every row and position


def test_jitter_is_off_in_eval_and_by_default(monkeypatch):
    model, idx = make(fusion="add"), tokens(B, T)
    (eps,) = jitter_of(model, monkeypatch, idx, 2, sigma=0.25)
    assert not eps.abs().max() > 0
    (eps,) = jitter_of(model.train(), monkeypatch, idx, 2, sigma=Feedback().jitter)
    assert not eps.abs().max() > 0


def test_one_pass_draws_nothing():
    model, idx = make().train(), tokens(B, T)
    before = torch.get_rng_state()
    noisy = model(idx, idx, 1, Feedback(jitter=0.25, mixin=True))
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(noisy, model(idx, idx, 1))


def test_prefix_mask_is_a_prefix_of_uniform_length():
    n = 21_000
    mask = prefix_mask(n, T)
    p = mask.sum(dim=1)
    assert torch.equal(mask, torch.arange(T) < p[:, None])
    counts = torch.bincount(p, minlength=T + 1).double()
    assert counts[0] == 0 and counts[T] == 0  # at least one plain, at least one fused
    assert ((counts[1:T] - n / 7).square() / (n / 7)).sum() < 22.5  # chi-square of 6 degrees, 0.1 %
    assert prefix_mask(B, 1).all()


def test_prefix_mixin_puts_a_prefix_back_to_plain(monkeypatch):
    model, idx = make().train(), tokens(32, T)
    e = model.embedding.weight[idx]
    inputs = spy(monkeypatch, model, "stack")
    states = model.passes(idx, 3, feedback=Feedback(mixin=True))
    close(inputs[0], e, atol=0)  # the first pass is plain anyhow
    lengths = []
    for u, h in zip(inputs[1:], states):
        p = (u == e).all(dim=-1).sum(dim=1)
        for row in range(32):
            close(u[row], naive_inputs(model, h, e, n_plain=int(p[row]))[row])
        lengths.append(p)
    assert lengths[0].unique().numel() > 3 and not torch.equal(
        *lengths
    )  # drawn per row, and again in every pass


def test_prefix_mixin_adds_to_given_plain_positions(monkeypatch):
    model, idx = make().train(), tokens(32, T)
    e = model.embedding.weight[idx]
    inputs = spy(monkeypatch, model, "stack")
    model.passes(idx, 2, plain=torch.arange(T) == T - 1, feedback=Feedback(mixin=True))
    plain = (inputs[1] == e).all(dim=-1)
    assert plain[:, -1].all() and plain[:, 1].any() and not plain[:, 1:-1].all(dim=1).all()


def test_prefix_mixin_is_off_in_eval_and_by_default():
    model, idx = make(), tokens(B, T)
    expected = naive_passes(model, idx, 2)[1]
    close(model.passes(idx, 2, feedback=Feedback(mixin=True))[1], expected)
    close(model.train().passes(idx, 2)[1], expected)


def test_dropout_is_off_by_default_and_only_acts_in_training():
    idx = tokens(B, T)
    model = make()
    assert torch.equal(model.train()(idx, idx, 3), model.eval()(idx, idx, 3))
    dropping = make(dropout=0.5)
    close(dropping(idx, idx, 3), model(idx, idx, 3), atol=0)
    assert (dropping.train()(idx, idx, 3) - model(idx, idx, 3)).abs().min() > 1e-3


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_is_the_model_without_fusion_bit_for_bit(kind):
    torch.manual_seed(7)
    fused = GPT(GPTConfig(**SHAPE | dict(fusion=kind)))
    torch.manual_seed(7)
    plain = GPT(GPTConfig(**SHAPE | dict(fusion="none")))
    assert plain.fusion is None
    weights = fused.state_dict()
    assert set(weights) - set(plain.state_dict()) == {
        f"fusion.{name}" for name in fused.fusion.state_dict()
    }
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())

    pair = [(model, torch.optim.AdamW(model.parameters(), lr=0.01)) for model in (fused, plain)]
    start = {name: value.clone() for name, value in fused.fusion.state_dict().items()}
    for step in range(5):
        idx, results = tokens(B, T + 1, seed=step), []
        for model, optimizer in pair:
            loss = objective(model(idx[:, :-1], idx[:, 1:], 1, Feedback(jitter=0.02, mixin=True)))
            results.append((loss, gradients(model, loss)))
            optimizer.step()
        (loss, grads), (plain_loss, plain_grads) = results
        assert torch.equal(loss, plain_loss) and grads.keys() == plain_grads.keys()
        assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)
    assert all(
        torch.equal(fused.state_dict()[name], value) for name, value in plain.state_dict().items()
    )
    assert all(torch.equal(fused.fusion.state_dict()[name], value) for name, value in start.items())


@pytest.mark.parametrize(
    "kind, k", [("gated", 1), ("gated", 2), ("gated", 3), ("add", 3), ("concat", 3)]
)
def test_no_loss_looks_ahead(monkeypatch, kind, k):
    model, idx, targets = make(fusion=kind).train(), tokens(B, T), tokens(B, T, seed=2)
    e = model.embed(idx).detach().requires_grad_()
    monkeypatch.setattr(model, "embed", lambda _: e)
    for t in range(T):
        only_t = torch.full_like(targets, -1)
        only_t[:, t] = targets[:, t]
        for loss in model(idx, only_t, k):
            (grad,) = torch.autograd.grad(loss, e, retain_graph=True)
            assert not grad[:, t + 1 :].any(), f"the loss at {t} sees a later input"
            assert grad[:, : t + 1].abs().amax(dim=2).gt(0).all(), (
                f"the loss at {t} misses an input"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_later_losses_reach_earlier_passes_and_all_fusion_matrices(kind):
    model, idx = make(fusion=kind), tokens(B, T)
    states = model.passes(idx, 3)
    nll = torch.nn.functional.cross_entropy(model.head(states[2]).flatten(0, 1), idx.flatten())
    for h, last in zip(
        states, (T - 3, T - 2)
    ):  # each edge leads one position on: the last states feed nobody
        (grad,) = torch.autograd.grad(nll, h, retain_graph=True)
        assert (
            grad[:, : last + 1].abs().amax(dim=(0, 2)).gt(0).all() and not grad[:, last + 1 :].any()
        )
    grads = gradients(model, objective(model(idx, idx, 2)))
    square = [
        part
        for name, grad in grads.items()
        if name.startswith("fusion.")
        for part in grad.split(D, dim=1)
    ]  # W_R is two square matrices, side by side
    assert square and all(part.abs().max() > 1e-6 for part in square)


@pytest.mark.parametrize("kind", KINDS)
def test_detach_cuts_the_feedback_edge_and_nothing_else(kind):
    model, idx, targets = make(fusion=kind), tokens(B, T), tokens(B, T, seed=2)
    states = model.passes(idx, 3, feedback=Feedback(detach=True))
    for later, earlier in ((2, 1), (2, 0), (1, 0)):
        (grad,) = torch.autograd.grad(
            states[later].sum(), states[earlier], retain_graph=True, allow_unused=True
        )
        assert grad is None
    for whole, cut in zip(model.passes(idx, 3), states):
        assert torch.equal(whole, cut)  # the numbers stay

    detached = gradients(model, objective(model(idx, targets, 3, Feedback(detach=True))))
    attached = gradients(model, objective(model(idx, targets, 3)))
    constant = [h.detach() for h in naive_passes(model, idx, 3)]
    e = model.embedding.weight[idx]
    inputs = [e, naive_inputs(model, constant[0], e), naive_inputs(model, constant[1], e)]
    nll = [
        -(naive_stack(model, u)[0] @ model.embedding.weight.T)
        .log_softmax(-1)
        .gather(2, targets[..., None])
        .mean()
        for u in inputs
    ]
    expected = gradients(model, nll[0] + (nll[1] + nll[2]) / 2)
    for name, grad in expected.items():
        close(detached[name], grad)
    assert max((attached[name] - grad).abs().max() for name, grad in expected.items()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_three_passes_equal_the_naive_ones(kind):
    model, idx, targets = make(fusion=kind), tokens(B, T), tokens(B, T, seed=2)
    actual = gradients(model, objective(model(idx, targets, 3), 0.5))
    nll = [
        -(h @ model.embedding.weight.T).log_softmax(-1).gather(2, targets[..., None]).mean()
        for h in naive_passes(model, idx, 3)
    ]
    expected = gradients(model, nll[0] + 0.5 * (nll[1] + nll[2]) / 2)
    assert actual.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    for name, grad in expected.items():
        close(actual[name], grad)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_the_blocks_changes_no_gradient(dropout):
    idx, targets = tokens(B, T), tokens(B, T, seed=2)
    found = []
    for recompute in (False, True):
        model = make(double=False, dropout=dropout).train()
        model.recompute = recompute
        torch.manual_seed(5)
        losses = model(idx, targets, 3, Feedback(jitter=0.02, mixin=True))
        found.append(gradients(model, objective(losses)))
    kept, recomputed = found
    assert kept.keys() == recomputed.keys()
    for name, grad in kept.items():
        assert torch.equal(grad, recomputed[name]), name


def test_recomputing_keeps_far_fewer_activations():
    idx = tokens(8, BLOCK)
    kept = []
    for recompute in (False, True):
        model = make(double=False, n_layer=6, n_embd=64).train()
        model.recompute = recompute
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = model(idx, idx, 3)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for place, size in sizes.items() if place not in weights))
        assert losses.isfinite().all()
    assert kept[1] < kept[0] / 5


# Decoding


PROMPTS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", PROMPTS)
def test_cached_decoding_equals_the_naive_one(mode, length):
    model, prompt, n_new = make(double=False), tokens(B, length), 3 * BLOCK
    picked, states, logps = naive_decode(model, prompt, n_new, mode)
    generated, generated_logps = collect(model.generate(prompt, n_new, mode))
    assert torch.equal(generated, picked)
    close(generated_logps, logps.gather(2, picked[..., None])[..., 0], atol=1e-3)
    cache, h = model.prefill(prompt, mode)
    for n in range(n_new):
        if n:
            h = model.decode_step(picked[:, n - 1 : n], h, cache, mode)
        close(h[:, 0], states[:, n], atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"fusion": "add"},
        {"fusion": "concat"},
        {"block_size": 9},
        {"block_size": 2},
        {"n_kv_head": 0, "qk_norm": False},
        {"head_dim": 6, "eps": 1e-3},
        {"input_norm": False, "fusion": "residual"},
        {"window": 1},
        {"window": 3},
        {"window": 3, "window_every": 2, "fusion": "residual"},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_cached_decoding_equals_the_naive_one_for_other_models(mode, changes):
    model, prompt = make(**changes), tokens(B, 5)
    picked, _, logps = naive_decode(model, prompt, 3 * BLOCK, mode)
    generated, generated_logps = collect(model.generate(prompt, 3 * BLOCK, mode))
    assert torch.equal(generated, picked)
    close(generated_logps, logps.gather(2, picked[..., None])[..., 0], atol=1e-4)


def test_the_modes_differ():
    model, prompt = make(), tokens(B, 5)
    standard, soft, fused = (collect(model.generate(prompt, 12, mode))[0] for mode in MODES)
    assert (
        not torch.equal(standard, soft)
        and not torch.equal(soft, fused)
        and not torch.equal(standard, fused)
    )


@pytest.mark.parametrize("length", PROMPTS)
def test_first_token_of_soft_is_that_of_standard(length):
    model, prompt = make(), tokens(B, length)
    for temperature in (0.0, 1.0):
        first = [
            next(model.generate(prompt, 1, mode, sampler(temperature, seed=3)))
            for mode in ("standard", "soft")
        ]
        assert torch.equal(first[0][0], first[1][0]) and torch.equal(first[0][1], first[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_fused_prefill_is_a_second_pass_by_hand(kind):
    model, idx = make(fusion=kind), tokens(B, 6)
    e = model.embedding.weight[idx]
    u = naive_inputs(model, naive_stack(model, e)[0], e)
    h, k, v = naive_stack(model, u)
    cache, state = model.prefill(idx, "fused")
    close(state, h[:, -1:])
    close(cache.k[..., :6, :], k)
    close(cache.v[..., :6, :], v)
    close(cache.u[:, :6], u)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_prefill_ends_at_the_full_recurrence(kind):
    model, idx = make(fusion=kind), tokens(B, T)
    u, h, k, v = naive_recurrence(model, idx)
    for extra in (T - 1, T, 3 * T):
        cache, state = model.prefill(idx, "fused", prefill_passes=extra)
        assert cache.passes == extra + 1
        for actual, expected in ((state, h[:, -1:]), (cache.u, u), (cache.k, k), (cache.v, v)):
            close(actual, expected)


@pytest.mark.parametrize("kind", ["add", "concat"])
def test_fused_prefill_tends_to_the_full_recurrence(kind):
    """Where the state's share of u is small the passes contract, so every pass must come nearer."""
    model, idx = make(fusion=kind), tokens(B, T)
    matrix = model.fusion.W_R if kind == "concat" else model.fusion.W_H
    with torch.no_grad():
        matrix.weight[:, :D] *= 0.1
    exact = naive_recurrence(model, idx)[1][:, -1:]
    errors = [
        (model.prefill(idx, "fused", prefill_passes=n)[1] - exact).norm().item()
        for n in range(1, 5)
    ]
    assert all(after < before / 2 for before, after in itertools.pairwise(errors)), errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_prompt", [1, 3, 7])
def test_reconstruct_equals_the_cache_of_soft_decoding(kind, n_prompt):
    model, prompt = make(fusion=kind), tokens(B, n_prompt)
    response = [token for token, _ in model.generate(prompt, BLOCK - n_prompt, "soft")]
    idx = torch.cat([prompt, torch.stack(response, dim=1)], dim=1)  # (B, BLOCK)
    decoded, h = model.prefill(prompt, "soft")
    states = [h]
    for token in response:
        states.append(model.decode_step(token[:, None], states[-1], decoded, "soft"))
    rebuilt, h = model.reconstruct(idx, n_prompt, T)
    u, exact, k, v = naive_recurrence(model, idx, n_plain=n_prompt)
    for cache in (decoded, rebuilt):
        assert cache.length == BLOCK
        for actual, expected in ((cache.u, u), (cache.k, k), (cache.v, v)):
            close(actual, expected)
    close(h, exact)
    close(torch.cat(states, dim=1), exact[:, n_prompt - 1 :])
    one, _ = model.reconstruct(idx, n_prompt, 1)
    close(one.u, model.embedding.weight[idx], atol=0)  # one pass is the ordinary, plain prefill
    assert (one.k - k)[..., n_prompt:, :].abs().max() > 1e-2


@pytest.mark.parametrize("n_prompt", [0, 1, 3])
def test_reconstruct_by_k_passes_equals_the_naive_passes(n_prompt):
    model, idx = make(), tokens(B, T)
    for k, expected in enumerate(naive_passes(model, idx, 5, n_plain=max(n_prompt, 1)), start=1):
        cache, h = model.reconstruct(idx, n_prompt, k)
        close(h, expected)
        assert (cache.passes, cache.length) == (k, T)


@pytest.mark.parametrize("n_plain", [0, 2])
def test_tol_stops_once_every_row_has_settled(n_plain):
    """The first pass that changes the fused positions' states by at most tol, in all rows."""
    model = make(fusion="add")
    idx = tokens(6, T)
    with torch.no_grad():
        model.fusion.W_H.weight *= 0.5
    first = max(n_plain, 1)  # the first position is plain whatever n_plain says
    states = naive_passes(model, idx, 12, first)
    changes = []  # of passes 2, 3, ..., a number for each row
    for before, after in itertools.pairwise(states):
        moved = (after[:, first:] - before[:, first:]).square().sum((1, 2))
        changes.append((moved / after[:, first:].square().sum((1, 2))).sqrt().tolist())
    # A hair above and under what each pass just reaches.
    limits = [max(change) for change in changes[:5]]
    tols = [0.5, 0.1, 1e-3]
    for limit in limits:
        tols += [1.0001 * limit, 0.9999 * limit]
    cases = set()
    for tol in tols:
        by_row = []
        for row in range(6):
            by_row.append(next(k for k, change in enumerate(changes, 2) if change[row] <= tol))
        expected = next(k for k, change in enumerate(changes, 2) if max(change) <= tol)
        cache, h = model.reconstruct(idx, n_plain, 30, tol)
        assert cache.passes == expected
        close(h, states[expected - 1])  # the states of the last pass, and their cache
        close(cache.k, naive_stack(model, cache.u)[1])
        assert model.reconstruct(idx, n_plain, 2, tol)[0].passes == 2  # never more than k
        cases.add((min(by_row), expected))
    # The cases tell rows and tols apart.
    assert len(cases) > 3
    assert any(first < last for first, last in cases)


def test_tol_zero_never_stops_and_prefill_hands_tol_on():
    model, idx = make(), tokens(B, 4)
    assert model.reconstruct(idx, 1, 20)[0].passes == 20  # settled exactly after 4
    assert model.reconstruct(idx, 1, 20, tol=1e-9)[0].passes == 5
    assert model.prefill(idx, "fused", prefill_passes=19, tol=1e-9)[0].passes == 5
    assert model.prefill(idx, "fused", prefill_passes=19)[0].passes == 20
    many, few = (
        collect(model.generate(idx, 6, "fused", prefill_passes=n, tol=0.0))[1] for n in (4, 1)
    )
    stopped = collect(model.generate(idx, 6, "fused", prefill_passes=50, tol=1e-9))[1]
    close(stopped, many)
    assert (few - many).abs().max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_greedy_prompts_equals_the_single_runs(mode):
    model, prompts = make(double=False), tokens(4, 5)
    together, logps = collect(model.generate(prompts, 2 * BLOCK, mode))
    for row in range(4):
        alone, alone_logps = collect(model.generate(prompts[row : row + 1], 2 * BLOCK, mode))
        assert torch.equal(alone, together[row : row + 1])
        close(alone_logps, logps[row : row + 1], atol=1e-4)


def test_latent_state_is_per_row():
    """Two rows, one last token, different pasts: each token enters with its own row's state."""
    model, idx = make(), tokens(2, 5)
    idx[:, -1] = 3
    cache, h = model.prefill(idx, "soft")
    after = model.decode_step(torch.tensor([[4], [4]]), h, cache, "soft")
    e = model.embedding.weight[torch.tensor([4])]
    for row in range(2):
        u = naive_fusion(model, h[row : row + 1, 0], e)
        close(cache.u[row : row + 1, 5], u)
        past = model.embedding.weight[idx[row : row + 1]]
        close(
            after[row : row + 1, 0],
            naive_stack(model, torch.cat([past, u[:, None]], dim=1))[0][:, -1],
        )


def test_the_first_token_is_drawn_per_sample():
    pick = sampler(seed=0)
    first, _ = next(make().generate(tokens(1, 5).expand(64, 5), 1, "soft", pick))
    assert first.unique().numel() > 3


def test_calls_leak_no_state_into_each_other():
    model, a, b = make(), tokens(2, 5), tokens(B, 11, seed=2)
    alone = collect(model.generate(a, 20, "soft")), collect(model.generate(b, 20, "fused"))
    again = collect(model.generate(a, 20, "soft")), collect(model.generate(b, 20, "fused"))
    turns = zip(*zip(model.generate(a, 20, "soft"), model.generate(b, 20, "fused"), strict=True))
    interleaved = tuple(collect(steps) for steps in turns)
    for other in (again, interleaved):
        assert all(
            torch.equal(x, y) for left, right in zip(alone, other) for x, y in zip(left, right)
        )


def test_decoding_keeps_no_graph_and_leaves_the_training_mode_as_it_was():
    model, prompt = make().train(), tokens(B, 5)
    cache, h = model.prefill(prompt, "fused")
    after = model.decode_step(prompt[:, :1], h, cache, "fused")
    assert not any(tensor.requires_grad for tensor in (h, after, cache.k, cache.v, cache.u))
    steps = model.generate(prompt, 3, "soft")
    for _, logp in steps:
        assert torch.is_grad_enabled() and not logp.requires_grad
    assert model.training
    training = collect(model.generate(prompt, 20, "fused"))
    assert torch.equal(training[0], collect(model.eval().generate(prompt, 20, "fused"))[0])


def test_a_model_that_decoded_in_inference_mode_can_be_trained():
    model, idx = make(), tokens(B, T)
    with torch.inference_mode():
        collect(model.generate(idx, 3, "soft"))
    trained = gradients(model, objective(model(idx, idx, 2)))
    assert all(gradient.isfinite().all() for gradient in trained.values())


def test_a_model_without_fusion_refuses_feedback():
    model, idx = make(fusion="none"), tokens(B, 5)
    for refused in (
        lambda: model.passes(idx, 2),
        lambda: model(idx, idx, 2),
        lambda: model.reconstruct(idx, 1, 2),
        lambda: next(model.generate(idx, 1, "soft")),
        lambda: next(model.generate(idx, 1, "fused")),
        lambda: model.prefill(idx, "soft"),
    ):
        with pytest.raises(ValueError, match="fusion"):
            refused()
    picked, _, _ = naive_decode(model, idx, 20, "standard")
    assert torch.equal(collect(model.generate(idx, 20))[0], picked)  # standard is the default


def test_unknown_modes_and_pass_counts_are_refused():
    model, idx = make(), tokens(B, 5)
    with pytest.raises(ValueError, match="mode='sof'"):
        next(model.generate(idx, 1, "sof"))
    with pytest.raises(ValueError, match="prefill_passes=0"):
        next(model.generate(idx, 1, "fused", prefill_passes=0))
    cache, h = model.prefill(idx, "soft")
    with pytest.raises(ValueError, match="mode='Standard'"):  # which fusing would not be
        model.decode_step(idx[:, :1], h, cache, "Standard")
    for options in ({"prefill_passes": 2}, {"tol": 0.1}):
        with pytest.raises(ValueError, match="mode='soft' has no use for"):
            model.prefill(idx, "soft", **options)
    with pytest.raises(ValueError, match="k=0 passes"):
        model(idx, idx, 0)


# Sampling


def test_temperature_zero_is_greedy_whatever_the_seed():
    logits = torch.randn(50, V)
    for pick in (
        sampler(0.0),
        sampler(0, seed=1),
        sampler(0.0, top_k=3),
        sampler(1e-8),
        sampler(1e-38),
        sampler(1e-310),
        sampler(5e-324),
        sampler(1.0, top_k=1),
    ):
        assert torch.equal(pick(logits), logits.argmax(-1))
        assert torch.equal(pick(1e4 * logits), logits.argmax(-1))  # no overflow


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
def test_other_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature="):
        sampler(temperature)


def test_negative_top_k_is_refused_and_large_top_k_keeps_all():
    with pytest.raises(ValueError, match="top_k=-1 "):
        sampler(top_k=-1)
    logits = torch.randn(100, V)
    draws = [sampler(top_k=k, seed=5)(logits) for k in (0, V, V + 1, 10**9)]
    assert all(torch.equal(draws[0], other) for other in draws)


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.5, 0), (2.0, 0), (1.0, 3), (0.7, 2)])
def test_sampled_frequencies(temperature, top_k):
    n, logits = 40_000, torch.tensor([0.5, -1.0, 1.5, 0.0, 1.0])
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    kept = sorted(weights)[-top_k:]
    expected = torch.tensor([n * w / sum(kept) if w in kept else 0.0 for w in weights])
    pick = sampler(temperature, top_k, 11)
    counts = torch.bincount(pick(logits.expand(n, 5)), minlength=5)
    assert not counts[expected == 0].any()
    chi_square = ((counts - expected).square() / expected)[expected > 0].sum()
    assert chi_square < 18.5  # 0.1 % for four degrees of freedom


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_equal_logits_let_no_more_than_top_k_symbols_through(top_k):
    drawn = sampler(1.0, top_k, seed=0)(torch.zeros(2000, V))
    assert len(set(drawn.tolist())) == top_k
    tied = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0]).expand(2000, -1)
    drawn = sampler(1.0, top_k, seed=0)(tied)
    assert 1 in drawn and len(set(drawn.tolist())) <= top_k


def test_the_generator_decides_the_draws():
    logits = torch.randn(100, V)
    draw = [sampler(seed=seed)(logits) for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    before = torch.get_rng_state()
    sampler(seed=1)(logits)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_are_before_temperature_and_top_k(mode):
    model, prompt = make(), tokens(B, 4)
    pick = sampler(0.7, 3, 2)
    picked, logps = collect(model.generate(prompt, 4, mode, pick))
    idx = torch.cat([prompt, picked], dim=1)  # (B, 8)
    e, h = model.embedding.weight[idx], naive_stack(model, model.embedding.weight[prompt])[0]
    u = naive_inputs(model, h, e[:, :4]) if mode == "fused" else e[:, :4]
    for t in range(4, 8):
        h = naive_stack(model, u)[0][:, -1]
        expected = (h @ model.embedding.weight.T).log_softmax(-1).gather(1, idx[:, t : t + 1])[:, 0]
        close(logps[:, t - 4], expected)
        fed = e[:, t] if mode == "standard" else naive_fusion(model, h, e[:, t])
        u = torch.cat([u, fed[:, None]], dim=1)


# Other number types, and the house


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_bfloat16_stays_near_float32():
    model, idx = make(double=False), tokens(B, T)
    exact = model(idx, idx, 3)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.train()(idx, idx, 3, Feedback(jitter=1e-6, mixin=False))
        steps = list(model.generate(idx, 2 * BLOCK, "fused"))
        mixed = objective(model(idx, idx, 3, Feedback(jitter=0.02, mixin=True)))
    close(losses, exact, atol=0.1)
    assert len(steps) == 2 * BLOCK and all(
        grad.isfinite().all() for grad in gradients(model, mixed).values()
    )
    low = make(double=False).bfloat16()
    assert low.passes(idx, 2)[1].dtype == torch.bfloat16
    close(low(idx, idx, 3).float(), exact, atol=0.2)
    assert all(logp.isfinite().all() for _, logp in low.generate(idx, 2 * BLOCK, "soft"))


def test_model_imports_torch_and_the_standard_library_only():
    tree = ast.parse(Path(model_file.__file__).read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"torch"}

"""A full-bandwidth transformer: a GPT whose top hidden state returns to its input (arXiv:2608.08888).

Read from top to bottom; equation numbers are the paper's, and the README has the table equation -> function -> test.
Shapes: B rows, T positions, width D = n_embd, L blocks, V symbols, H heads (H_kv for keys and values) of D_h channels.
The state `h` (B, T, D) is the output of the last RMSNorm, just what the LM head reads; `e` (B, T, D) are token
embeddings; `u` (B, T, D) is what the stack is fed, a plain `e` or the fusion of `e` with the state before it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FusionKind = Literal["gated", "add", "concat", "none"]
Mode = Literal["standard", "soft", "fused"]
EPS = 1e-6  # of every RMSNorm
greedy = partial(torch.argmax, dim=-1)  # picks the most likely token of each row: logits (B, V) -> tokens (B,)


def _setting(default, help: str, flag: bool = True):  # the command line is made of these
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. ValueError, naming the field, for a shape that cannot be built."""

    vocab_size: int = _setting(256, "number of symbols, set by the tokenizer", flag=False)
    block_size: int = _setting(64, "longest context, in tokens")
    n_layer: int = _setting(4, "number of blocks")
    n_head: int = _setting(4, "attention heads; n_embd / n_head must be even")
    n_embd: int = _setting(128, "width of the residual stream")
    n_kv_head: int = _setting(0, "heads of keys and values (grouped-query attention); 0: n_head")
    n_hidden: int = _setting(0, "width of the MLP; 0: 8/3 of n_embd, rounded up to a multiple of 32")
    dropout: float = _setting(0.0, "dropout on the residual branches")
    fusion: FusionKind = _setting("gated", "gated, add, concat, or none (a plain GPT)")
    rope_base: float = _setting(10000.0, "base of the rotary frequencies")
    qk_norm: bool = _setting(True, "RMSNorm on queries and keys")
    depth_scale: bool = _setting(True, "scale each residual branch by 1/sqrt(2 n_layer)")

    def __post_init__(self):
        rules = (
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("vocab_size", "n_layer", "n_head")),
            ("block_size", self.block_size >= 2, "at least 2"),
            ("n_embd", self.n_embd >= 1 and self.n_head >= 1 and self.n_embd % (2 * self.n_head) == 0,
             f"a multiple of 2 * n_head={2 * self.n_head}: rotary positions turn pairs of channels in each head"),
            ("n_kv_head", self.n_kv_head >= 0 and self.n_head % (self.n_kv_head or 1) == 0,
             f"a divisor of n_head={self.n_head}, or 0 for n_head itself"),
            ("n_hidden", self.n_hidden >= 0, "positive, or 0 for 8/3 of n_embd"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("rope_base", 0 < self.rope_base < float("inf"), "positive"),
            ("fusion", self.fusion in get_args(FusionKind), f"one of {', '.join(get_args(FusionKind))}"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


@dataclass(frozen=True)
class Feedback:
    """How a pass reads the states of the pass before it. Jitter and prefix mixin act in training mode only."""

    jitter: float = 0.0  # sigma of Eq. (11)
    detach: bool = False  # cut the gradient from a pass into the one before it (the paper's ablation)
    mixin: bool = False  # prefix mixin: a random plain prefix per row and pass, as decoding after a plain prompt has


class Fusion(nn.Module):
    """e (x) h by kind: `gated`, Eq. (4), `add`, or `concat`, the same functions as `add` parameterised otherwise."""

    def __init__(self, n_embd: int, kind: FusionKind):
        super().__init__()
        self.kind = kind
        if kind == "concat":
            self.W_R = nn.Linear(2 * n_embd, n_embd, bias=False)
        else:
            self.W_H, self.W_G = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(2))

    def forward(self, h_prev: Tensor, e: Tensor) -> Tensor:
        """States of the positions before and normed embeddings, both (B, T, D) -> fused inputs (B, T, D)."""
        if self.kind == "gated":
            return self.W_H(h_prev) * torch.sigmoid(self.W_G(e))  # (B, T, D), Eq. (4)
        if self.kind == "add":
            return self.W_H(h_prev) + self.W_G(e)  # (B, T, D)
        return self.W_R(torch.cat([h_prev, e], dim=-1))  # (B, T, D)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: the two halves of x (B, T, H, D_h) turned against each other; rope: see `GPT.rope`."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin).type_as(x)  # (B, T, H, D_h)


class KVCache:
    """Keys and values (L, B, H_kv, block_size, D_h) and the inputs u (B, block_size, D) that made them, preallocated.

    The first `length` positions are filled; `passes` counts the parallel passes that built the prompt's part.
    """

    def __init__(self, config: GPTConfig, n_rows: int, like: Tensor):
        shape = (config.n_layer, n_rows, config.kv_heads, config.block_size, config.n_embd // config.n_head)
        self.k, self.v = like.new_empty(shape), like.new_empty(shape)
        self.u = like.new_empty(n_rows, config.block_size, config.n_embd)
        self.length = self.passes = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v (B, H_kv, T, D_h) behind the filled part -> all of the layer's (B, H_kv, length + T, D_h)."""
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length:end] = k
        self.v[layer, :, :, self.length:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and QK-norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        kv_dim = config.kv_heads * self.head_dim
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k, self.v = (nn.Linear(config.n_embd, kv_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, EPS) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, EPS) if config.qk_norm else nn.Identity()
        self.grouped = config.kv_heads < config.n_head

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, cache: KVCache | None) -> Tensor:
        B, T, D = x.shape
        q, k, v = (project(x).view(B, T, -1, self.head_dim) for project in (self.q, self.k, self.v))  # (B, T, H, D_h)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or H_kv, T, D_h)
        seen = None
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H_kv, length + T, D_h)
            if T < k.size(2):  # a new position sees the cache, and the new ones up to itself
                seen = torch.ones(T, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).reshape(B, T, D))  # (B, T, D)


class MLP(nn.Module):
    """SiLU-gated: down(silu(gate(x)) * up(x)), (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        hidden = config.n_hidden or math.ceil(config.n_embd * 8 / 3 / 32) * 32
        self.gate = nn.Linear(config.n_embd, hidden, bias=False)
        self.up = nn.Linear(config.n_embd, hidden, bias=False)
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # (B, T, D)


class Block(nn.Module):
    """x + a attn(norm(x)), then x + a mlp(norm(x)). DEVIATION: a = 1/sqrt(2L); the paper only asks that h stay O(1)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.scale = (2 * config.n_layer) ** -0.5 if config.depth_scale else 1.0
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.attn_norm, self.attn = nn.RMSNorm(config.n_embd, EPS), Attention(config)
        self.mlp_norm, self.mlp = nn.RMSNorm(config.n_embd, EPS), MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, cache: KVCache | None) -> Tensor:
        x = torch.add(x, self.drop(self.attn(self.attn_norm(x), rope, layer, cache)), alpha=self.scale)
        return torch.add(x, self.drop(self.mlp(self.mlp_norm(x))), alpha=self.scale)  # (B, T, D)


def init_weights(module: nn.Module) -> None:
    """DEVIATION: our own. Matrices keep the size of what they map; the embedding is small: the first loss is ln V."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features ** -0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class GPT(nn.Module):
    """The decoder, its training by passes, and its three ways of decoding."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)  # tied: also the LM head
        self.input_norm = nn.RMSNorm(config.n_embd, EPS)  # shared: in front of the stack and before the gate
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output_norm = nn.RMSNorm(config.n_embd, EPS)
        self.apply(init_weights)  # before the fusion: one seed gives a model without it the same other weights
        self.fusion = None if config.fusion == "none" else Fusion(config.n_embd, config.fusion).apply(init_weights)

    def embed(self, idx: Tensor) -> Tensor:
        """Tokens (B, T) -> embeddings e (B, T, D)."""
        return self.embedding(idx)  # (B, T, D)

    def head(self, h: Tensor) -> Tensor:
        """States (..., D) -> logits (..., V), by the embedding's own weights."""
        return F.linear(h, self.embedding.weight)  # (..., V)

    def stack(self, u: Tensor, cache: KVCache | None = None) -> Tensor:
        """h = f(u; cache), Eq. (3): inputs (B, T, D) -> top states (B, T, D); ValueError when u does not fit.

        With a cache, u stands behind what it holds and is appended to it; a full cache slides first.
        """
        if cache is not None and cache.length == self.config.block_size:
            self.slide(cache)
        start = 0 if cache is None else cache.length
        end = start + u.size(1)
        if not start < end <= self.config.block_size:
            raise ValueError(f"{start} + {u.size(1)} positions: 1 to block_size={self.config.block_size} can be filled")
        rope = self.rope(start, end, u.device)
        x = self.input_norm(u)  # (B, T, D)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, layer, cache)
        if cache is not None:
            cache.u[:, start:end] = u
            cache.length = end
        return self.output_norm(x)  # (B, T, D)

    def rope(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin (T, 1, D_h) of positions start..end-1, in float32 whatever the model's dtype.

        Both halves of a head turn by the same angles; the first half's sin is negative, as `rotate` needs it.
        """
        head_dim = self.config.n_embd // self.config.n_head
        channel = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)  # (D_h/2,)
        position = torch.arange(start, end, device=device, dtype=torch.float32)  # (T,)
        angle = torch.outer(position, self.config.rope_base ** (-channel / head_dim))[:, None]  # (T, 1, D_h/2)
        return torch.cat([angle, angle], dim=-1).cos(), torch.cat([-angle, angle], dim=-1).sin()  # (T, 1, D_h)

    def slide(self, cache: KVCache) -> None:
        """DEVIATION: past block_size, the stack is re-run once over the last half block of the inputs actually fed."""
        recent = cache.u[:, cache.length - self.config.block_size // 2:cache.length]  # (B, block_size/2, D)
        cache.length = 0
        self.stack(recent, cache)

    def combine(self, h_prev: Tensor, e: Tensor) -> Tensor:
        """u_t = e_t (x) h_{t-1}, Eqs. (5)-(6): states one position back and embeddings, both (B, T, D) -> (B, T, D)."""
        if self.fusion is None:
            raise ValueError("latent feedback needs a fusion; this model has fusion=none")
        return self.fusion(h_prev, self.input_norm(e)).type_as(e)  # (B, T, D)

    def fuse(self, h: Tensor, e: Tensor, plain: Tensor | None = None) -> Tensor:
        """Eq. (8): states of the pass before and embeddings, both (B, T, D) -> the next pass's inputs (B, T, D).

        The states shift right by one; the first position, and those where `plain` (T) or (B, T) is True, stay plain.
        """
        u = torch.cat([e[:, :1], self.combine(h[:, :-1], e[:, 1:])], dim=1)  # (B, T, D)
        return u if plain is None else torch.where(plain[..., None], e, u)

    def next_pass(self, h: Tensor, e: Tensor, plain: Tensor | None = None, feedback: Feedback = Feedback()) -> Tensor:
        """h^(k) from h^(k-1), Eqs. (8)-(9), both (B, T, D): one Jacobi update of all positions in parallel."""
        h = h.detach() if feedback.detach else h
        if self.training and feedback.jitter:
            h = h + torch.empty_like(h).uniform_(-feedback.jitter, feedback.jitter)  # Eq. (11)
        if self.training and feedback.mixin:
            mixed = prefix_mask(*e.shape[:2], device=e.device)  # (B, T)
            plain = mixed if plain is None else mixed | plain
        return self.stack(self.fuse(h, e, plain))

    def passes(self, idx: Tensor, k: int, plain: Tensor | None = None, feedback: Feedback = Feedback()) -> list[Tensor]:
        """[h^(1), ..., h^(k)], each (B, T, D), of tokens (B, T); without jitter h^(k) is the recurrence's at 1..k."""
        e = self.embed(idx)
        states = [self.stack(e)]  # Eq. (7)
        while len(states) < k:
            states.append(self.next_pass(states[-1], e, plain, feedback))  # Eqs. (8)-(9)
        return states

    def forward(self, idx: Tensor, targets: Tensor, k: int = 1, feedback: Feedback = Feedback()) -> Tensor:
        """Tokens and next tokens (B, T), -1 to leave out -> NLL^(1), ..., NLL^(k), shape (k,), in nats a token.

        This is what torch.compile and DDP wrap: a whole training step up to the objective.
        """
        return torch.stack([F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten(), ignore_index=-1)
                            for h in self.passes(idx, k, feedback=feedback)])  # (k,)

    @torch.no_grad()
    def reconstruct(self, idx: Tensor, n_prompt: int, k: int, tol: float = 0.0) -> tuple[KVCache, Tensor]:
        """The KV cache of tokens (B, T) and their states h (B, T, D), by k parallel passes.

        The first n_prompt positions are plain, the others fused: k = 1 is ordinary prefill, n_prompt = 0 a fused one.
        With tol > 0 it stops once ||h^(k) - h^(k-1)|| <= tol ||h^(k)|| in every row; `cache.passes` counts the passes.
        """
        e = self.embed(idx)
        plain = torch.arange(idx.size(1), device=idx.device) < n_prompt  # (T,)
        cache = KVCache(self.config, idx.size(0), like=e)
        h = self.stack(e, cache)  # Eq. (7)
        cache.passes = 1
        while cache.passes < k:
            h_before, cache.length = h, 0  # each pass writes its keys and values over the last one's
            h = self.stack(self.fuse(h_before, e, plain), cache)  # Eqs. (8)-(9)
            cache.passes += 1
            if tol and bool(((h - h_before).norm(dim=(1, 2)) <= tol * h.norm(dim=(1, 2))).all()):
                break
        return cache, h

    def prefill(self, idx: Tensor, mode: Mode, prefill_passes: int = 1, tol: float = 0.0) -> tuple[KVCache, Tensor]:
        """The prompt (B, T), of which the last block_size tokens are read -> its cache, its last state h (B, 1, D).

        Standard and Soft read it in one plain pass, Fused in `prefill_passes` more (fewer once `tol` is reached).
        """
        if mode not in get_args(Mode) or mode != "standard" and self.fusion is None:
            raise ValueError(f"mode={mode!r} must be standard, or in a model with a fusion soft or fused")
        if prefill_passes < 1:
            raise ValueError(f"prefill_passes={prefill_passes} must be at least 1; mode=soft has a plain prefill")
        idx = idx[:, -self.config.block_size:]
        n_plain, k = (0, 1 + prefill_passes) if mode == "fused" else (idx.size(1), 1)
        cache, h = self.reconstruct(idx, n_plain, k, tol)
        return cache, h[:, -1:]

    @torch.no_grad()
    def decode_step(self, token: Tensor, h: Tensor, cache: KVCache, mode: Mode) -> Tensor:
        """Feeds token (B, 1), in Soft and Fused with the state h (B, 1, D) before it -> its own state (B, 1, D)."""
        e = self.embed(token)  # (B, 1, D)
        return self.stack(e if mode == "standard" else self.combine(h, e), cache)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, mode: Mode = "standard",
                 pick: Callable[[Tensor], Tensor] = greedy, **prefill) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields max_new_tokens times (token (B,), its log-probability (B,) before temperature and top-k).

        idx: prompt (B, T); pick: logits (B, V) -> tokens (B,), e.g. sample.sampler; prefill: the options of `prefill`.
        """
        cache, h = self.prefill(idx, mode, **prefill)
        for n in range(1, max_new_tokens + 1):
            logits = self.head(h[:, -1]).float()  # (B, V)
            token = pick(logits)  # (B,)
            yield token, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
            if n < max_new_tokens:
                h = self.decode_step(token[:, None], h, cache, mode)


def objective(losses: Tensor, lam: float = 1.0) -> Tensor:
    """NLL^(1) + lam * mean of NLL^(2..K), Eq. (10): losses (K,) -> scalar."""
    return losses[0] + lam * losses[1:].mean() if len(losses) > 1 else losses[0]


def prefix_mask(n_rows: int, n_positions: int, device: torch.device | None = None) -> Tensor:
    """(B, T) bool, each row's plain part under prefix mixin, its first p. DEVIATION: p uniform in 1..T-1; left open."""
    p = torch.randint(1, max(n_positions, 2), (n_rows, 1), device=device)  # (B, 1)
    return torch.arange(n_positions, device=device) < p  # (B, T)

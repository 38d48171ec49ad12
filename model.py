"""A full-bandwidth transformer: a GPT whose top hidden state returns to its input (arXiv:2608.08888).

Read from top to bottom. Equation numbers are the paper's: (3)-(6) latent feedback, (7)-(10) training by passes,
(11) jitter; the README has the table equation -> function -> test.

Shapes: B rows, T positions, D = n_embd width, L = n_layer blocks, V = vocab_size symbols, H heads (H_kv of them for
keys and values), D_h = D / H. The state `h` (B, T, D) is the output of the last RMSNorm, just what the LM head reads;
`e` (B, T, D) are token embeddings; `u` (B, T, D) is what the stack is fed, a plain `e` or a fusion of `e` and `h`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FusionKind = Literal["gated", "add", "concat", "none"]
Mode = Literal["standard", "soft", "fused"]


def _setting(default, help: str, flag: bool = True):
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
        for name in ("vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of 2 * n_head={2 * self.n_head} "
                             "(rotary positions turn pairs of channels in each head)")
        if self.n_kv_head < 0 or self.n_kv_head and self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}, or be 0 for n_head")
        if self.n_hidden < 0:
            raise ValueError(f"n_hidden={self.n_hidden} must be positive, or 0 for 8/3 of n_embd")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
        if not 0 < self.rope_base < float("inf"):
            raise ValueError(f"rope_base={self.rope_base} must be positive")
        if self.fusion not in get_args(FusionKind):
            raise ValueError(f"fusion={self.fusion!r} must be one of {', '.join(get_args(FusionKind))}")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def hidden(self) -> int:
        return self.n_hidden or -(-self.n_embd * 8 // 3 // 32) * 32


@dataclass(frozen=True)
class Feedback:
    """How a pass reads the states of the pass before it. Jitter and prefix mixin act in training mode only."""

    jitter: float = 0.0  # sigma of Eq. (11)
    detach: bool = False  # cut the gradient from a pass into the one before it (the paper's ablation)
    mixin: bool = False  # prefix mixin: a random plain prefix per row and pass, as decoding after a plain prompt has


class Fusion(nn.Module):
    """u_t = e_t (x) h_{t-1}, Eqs. (4)-(6), and the paper's two other fusions; no biases.

    `gated`: (W_H h) * sigmoid(W_G e); `add`: W_H h + W_G e; `concat`: W_R [h ; e], the same functions as `add`
    under another parameterisation and initialisation.
    """

    def __init__(self, n_embd: int, kind: FusionKind):
        super().__init__()
        self.kind = kind
        if kind == "concat":
            self.W_R = nn.Linear(2 * n_embd, n_embd, bias=False)
        else:
            self.W_H = nn.Linear(n_embd, n_embd, bias=False)
            self.W_G = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, h_prev: Tensor, e: Tensor) -> Tensor:
        """States of the positions before and (normed) embeddings, both (B, T, D) -> fused inputs (B, T, D)."""
        if self.kind == "gated":
            return self.W_H(h_prev) * torch.sigmoid(self.W_G(e))  # (B, T, D), Eq. (4)
        if self.kind == "add":
            return self.W_H(h_prev) + self.W_G(e)  # (B, T, D)
        return self.W_R(torch.cat([h_prev, e], dim=-1))  # (B, T, D)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the dtype of x."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: x (B, T, H, D_h), its two halves turned against each other by rope = cos, sin (T, 1, D_h/2)."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)  # 2 x (B, T, H, D_h/2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)  # (B, T, H, D_h)


class KVCache:
    """What one decoding call remembers, preallocated: keys and values, and the inputs that made them.

    k, v: (L, B, H_kv, block_size, D_h); u: (B, block_size, D); the first `length` positions are filled.
    `passes` is the number of parallel passes that built the prompt's part.
    """

    def __init__(self, config: GPTConfig, n_rows: int, like: Tensor):
        head_dim = config.n_embd // config.n_head
        shape = (config.n_layer, n_rows, config.kv_heads, config.block_size, head_dim)
        self.k, self.v = like.new_empty(shape), like.new_empty(shape)
        self.u = like.new_empty(n_rows, config.block_size, config.n_embd)
        self.length = 0
        self.passes = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v (B, H_kv, T, D_h) behind the filled part; returns all of that layer's (B, H_kv, length + T, D_h)."""
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length:end] = k
        self.v[layer, :, :, self.length:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and QK-norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.kv_heads
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_norm = RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, cache: KVCache | None) -> Tensor:
        B, T, D = x.shape
        heads = [self.n_head, self.n_kv_head, self.n_kv_head]
        q, k, v = self.qkv(x).view(B, T, -1, self.head_dim).split(heads, dim=2)  # (B, T, H or H_kv, D_h)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or H_kv, T, D_h)
        seen = None
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H_kv, length + T, D_h)
            if T < k.size(2):  # position i of the new ones sees all of the cache and the new ones up to itself
                seen = torch.ones(T, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None,
                                           enable_gqa=self.n_kv_head < self.n_head)  # (B, H, T, D_h)
        return self.out(y.transpose(1, 2).reshape(B, T, D))  # (B, T, D)


class MLP(nn.Module):
    """SiLU-gated: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # 2 x (B, T, hidden)
        return self.down(F.silu(gate) * up)  # (B, T, D)


class Block(nn.Module):
    """x + a attn(norm(x)), then x + a mlp(norm(x)); a = 1/sqrt(2L) keeps the stream's size O(1) (depth scaling)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.scale = (2 * config.n_layer) ** -0.5 if config.depth_scale else 1.0
        self.dropout = config.dropout
        self.attn_norm, self.attn = RMSNorm(config.n_embd), Attention(config)
        self.mlp_norm, self.mlp = RMSNorm(config.n_embd), MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, cache: KVCache | None) -> Tensor:
        x = torch.add(x, self.drop(self.attn(self.attn_norm(x), rope, layer, cache)), alpha=self.scale)
        return torch.add(x, self.drop(self.mlp(self.mlp_norm(x))), alpha=self.scale)  # (B, T, D)

    def drop(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.dropout, self.training) if self.dropout else branch


def init_weights(module: nn.Module) -> None:
    """Matrices keep the size of what they map (std = fan_in^-1/2); the embedding is small, so the first loss is ln V."""
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
        self.input_norm = RMSNorm(config.n_embd)  # shared: in front of the stack and before the gate
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output_norm = RMSNorm(config.n_embd)
        self.apply(init_weights)
        # Last, so that for one seed a model without fusion has all its weights in common with a model with it.
        self.fusion = None if config.fusion == "none" else Fusion(config.n_embd, config.fusion).apply(init_weights)

    # The plain decoder

    def embed(self, idx: Tensor) -> Tensor:
        """Tokens (B, T) -> embeddings e (B, T, D)."""
        return self.embedding(idx)  # (B, T, D)

    def head(self, h: Tensor) -> Tensor:
        """States (..., D) -> logits (..., V), by the embedding's own weights."""
        return F.linear(h, self.embedding.weight)  # (..., V)

    def stack(self, u: Tensor, cache: KVCache | None = None) -> Tensor:
        """h = f(u; cache), Eq. (3): inputs (B, T, D) -> top states (B, T, D).

        With a cache, u stands behind what it holds and is appended to it; a full cache slides first (`slide`).
        ValueError when there is no room for u.
        """
        if cache is not None and cache.length + u.size(1) > self.config.block_size:
            self.slide(cache)
        start = 0 if cache is None else cache.length
        end = start + u.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} positions do not fit into block_size={self.config.block_size}")
        rope = self.rope(start, end, u.device)
        x = self.input_norm(u)  # (B, T, D)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, layer, cache)
        if cache is not None:
            cache.u[:, start:end] = u
            cache.length = end
        return self.output_norm(x)  # (B, T, D)

    def rope(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin (T, 1, D_h/2) of the angles of positions start..end-1, in float32 whatever the model's dtype."""
        head_dim = self.config.n_embd // self.config.n_head
        channel = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)  # (D_h/2,)
        position = torch.arange(start, end, device=device, dtype=torch.float32)  # (T,)
        angle = torch.outer(position, self.config.rope_base ** (-channel / head_dim))[:, None, :]  # (T, 1, D_h/2)
        return angle.cos(), angle.sin()

    def slide(self, cache: KVCache) -> None:
        """Generation past block_size: re-runs the stack once over the last half block of the inputs actually fed."""
        recent = cache.u[:, cache.length - self.config.block_size // 2:cache.length].clone()  # (B, block_size/2, D)
        cache.length = 0
        self.stack(recent, cache)

    # Latent feedback, in parallel passes

    def fuse(self, h: Tensor, e: Tensor, plain: Tensor | None = None) -> Tensor:
        """u_1 = e_1, u_t = e_t (x) h_{t-1}, Eq. (8): states of the pass before and embeddings, both (B, T, D).

        plain: bool, (T,) or (B, T); where True the position keeps its plain embedding.
        """
        fused = self.fusion(h[:, :-1], self.input_norm(e[:, 1:]))  # (B, T-1, D): h shifted right by one
        u = torch.cat([e[:, :1], fused.type_as(e)], dim=1)  # (B, T, D)
        return u if plain is None else torch.where(plain[..., None], e, u)

    def next_pass(self, h: Tensor, e: Tensor, plain: Tensor | None = None, feedback: Feedback = Feedback()) -> Tensor:
        """h^(k) from h^(k-1), Eqs. (8)-(9), both (B, T, D): one Jacobi update of all positions in parallel."""
        if feedback.detach:
            h = h.detach()
        if self.training and feedback.jitter:
            h = h + torch.empty_like(h).uniform_(-feedback.jitter, feedback.jitter)  # Eq. (11)
        if self.training and feedback.mixin:
            mixed = prefix_mask(*e.shape[:2], device=e.device)  # (B, T)
            plain = mixed if plain is None else mixed | plain
        return self.stack(self.fuse(h, e, plain))

    def passes(self, idx: Tensor, k: int, plain: Tensor | None = None, feedback: Feedback = Feedback()) -> list[Tensor]:
        """[h^(1), ..., h^(k)], each (B, T, D), of tokens (B, T): Eq. (7), then k - 1 times Eqs. (8)-(9).

        h^(k) is the exact recurrent state at positions 1..k. ValueError for k > 1 without a fusion.
        """
        if k > 1 and self.fusion is None:
            raise ValueError(f"{k} passes need a fusion; this model has fusion=none")
        e = self.embed(idx)
        states = [self.stack(e)]  # Eq. (7)
        while len(states) < k:
            states.append(self.next_pass(states[-1], e, plain, feedback))
        return states

    def forward(self, idx: Tensor, targets: Tensor, k: int = 1, feedback: Feedback = Feedback()) -> Tensor:
        """NLL^(1), ..., NLL^(k), shape (k,), in nats a token: the next-token cross-entropy of every pass.

        idx, targets: (B, T); targets of -1 are left out. This is what torch.compile and DDP wrap, all of a step.
        """
        return torch.stack([F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten(), ignore_index=-1)
                            for h in self.passes(idx, k, feedback=feedback)])  # (k,)

    # Decoding

    @torch.no_grad()
    def reconstruct(self, idx: Tensor, n_prompt: int, k: int, tol: float = 0.0) -> tuple[KVCache, Tensor]:
        """The KV cache of tokens (B, T) and their states h (B, T, D), by k parallel passes.

        The first n_prompt positions are plain, the others fused: k = 1 is ordinary prefill, n_prompt = 0 a fused one.
        With tol > 0 it stops once ||h^(k) - h^(k-1)|| <= tol ||h^(k)|| in every row; `cache.passes` tells how many it
        took. ValueError for T > block_size, or for k > 1 without a fusion.
        """
        if k > 1 and self.fusion is None:
            raise ValueError(f"{k} passes need a fusion; this model has fusion=none")
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
        """The prompt (B, T) -> its cache, and the state (B, 1, D) of its last position.

        Standard and Soft read it in one plain pass, Fused in `prefill_passes` more, fused ones (fewer if `tol` is
        reached, see `reconstruct`). Of a prompt longer than block_size the last block_size tokens are read.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")
        if mode != "standard" and self.fusion is None:
            raise ValueError(f"mode={mode} needs a fusion; this model has fusion=none")
        if prefill_passes < 1:
            raise ValueError(f"prefill_passes={prefill_passes} must be at least 1; mode=soft has a plain prefill")
        idx = idx[:, -self.config.block_size:]
        fused = mode == "fused"
        cache, h = self.reconstruct(idx, 0 if fused else idx.size(1), 1 + prefill_passes if fused else 1, tol)
        return cache, h[:, -1:]

    @torch.no_grad()
    def decode_step(self, token: Tensor, h: Tensor, cache: KVCache, mode: Mode) -> Tensor:
        """Feeds token (B, 1), in Soft and Fused with the state h (B, 1, D) before it, Eqs. (5)-(6) -> its h (B, 1, D)."""
        e = self.embed(token)
        return self.stack(e if mode == "standard" else self.fusion(h, self.input_norm(e)), cache)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, mode: Mode = "standard",
                 pick: Callable[[Tensor], Tensor] | None = None, **prefill) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields max_new_tokens times (token (B,), its log-probability (B,) before temperature and top-k).

        idx: prompt (B, T), T >= 1; pick: logits (B, V) -> tokens (B,), greedy if None (see `sampler`); prefill: the
        options `prefill_passes` and `tol` of `prefill`. When the cache is full it slides (`slide`).
        """
        pick = pick or sampler(temperature=0.0)
        cache, h = self.prefill(idx, mode, **prefill)
        for n in range(max_new_tokens):
            if n:
                h = self.decode_step(token[:, None], h, cache, mode)
            logits = self.head(h[:, -1]).float()  # (B, V)
            token = pick(logits)  # (B,)
            yield token, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]


def objective(losses: Tensor, lam: float = 1.0) -> Tensor:
    """NLL^(1) + lam * mean of NLL^(2..K), Eq. (10): losses (K,) -> scalar."""
    return losses[0] + lam * losses[1:].mean() if len(losses) > 1 else losses[0]


def prefix_mask(n_rows: int, n_positions: int, device: torch.device | None = None) -> Tensor:
    """(B, T) bool, True at each row's first p positions, p uniform in 1..T-1: the plain part under prefix mixin."""
    p = torch.randint(1, max(n_positions, 2), (n_rows, 1), device=device)  # (B, 1)
    return torch.arange(n_positions, device=device) < p  # (B, T)


def sampler(temperature: float = 1.0, top_k: int = 0, generator: torch.Generator | None = None):
    """A `pick` for `generate`: logits (B, V) -> tokens (B,). temperature 0 is greedy; top_k 0 keeps all symbols.

    The generator, if any, is one of the CPU, so that a seed means the same on every device.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be positive, or 0 for all symbols")

    def pick(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(-1)  # (B,)
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no overflow at 1e-8
        if 0 < top_k < logits.size(-1):
            scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[:, -1:], -torch.inf)
        return torch.multinomial(scaled.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)  # (B,)

    return pick

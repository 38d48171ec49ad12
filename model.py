"""A full-bandwidth transformer: a GPT whose top hidden state returns to its input.

arXiv:2608.08888; equation numbers are the paper's. Read from top to bottom: the settings, the
fusion (the only new parameters), an ordinary small decoder, then the method itself in `GPT`, and
the few functions that it calls.

    e_t   the embedding of token t
    u_t   what the stack is fed: e_t itself (plain), or e_t (x) h_{t-1}, the fusion of the two,
          which the paper calls latent feedback; the first position has no state before it and
          stays plain
    h_t   what the stack returns, after the last norm: exactly what the LM head reads

u_t needs h_{t-1}, so the exact recurrence is sequential, one token after the other, as in decoding.
Training approximates it by K parallel passes over all tokens. Pass 1 is a plain GPT. In pass k each
position t is fed e_t fused with the state that pass k-1 gave position t-1; the states that pass k
returns are h^(k).

`DEVIATION:` marks where the code departs from the paper or fills in what the paper leaves open. An
addition of ours says so where it stands.

Shapes: B rows, T positions, D = n_embd channels, L blocks, V symbols, H query heads, H_kv key and
value heads, D_h channels in a head. e, u and h are (B, T, D) each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# --------------------------------------------------------------------------------------------------
# Settings

FusionKind = Literal["gated", "add", "concat", "residual", "gated_residual", "none"]
# How to decode. standard: every token enters plain; soft: the prompt plain, generated tokens fused;
# fused: the prompt fused too.
Mode = Literal["standard", "soft", "fused"]


def _setting(default, text: str, flag: bool = True):
    """A field that becomes --name=value; flag=False keeps it off the command line.

    The scripts take theirs from harness.configurator; this file imports nothing but PyTorch.
    """
    return field(default=default, metadata={"help": text, "flag": flag})


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. An impossible setting raises ValueError, naming the field."""

    vocab_size: int = _setting(256, "number of symbols, set by the tokenizer", flag=False)
    block_size: int = _setting(64, "longest context, in tokens")
    n_layer: int = _setting(4, "number of blocks")
    n_head: int = _setting(4, "attention heads")
    n_embd: int = _setting(128, "width of the residual stream")
    n_kv_head: int = _setting(0, "key and value heads (grouped-query attention); 0: n_head")
    head_dim: int = _setting(0, "channels in a head, an even number; 0: n_embd / n_head")
    n_hidden: int = _setting(0, "width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 32")
    dropout: float = _setting(0.0, "dropout on the residual branches")
    fusion: FusionKind = _setting("gated", ", ".join(get_args(FusionKind)) + "; none: a plain GPT")
    window: int = _setting(0, "tokens that a position attends to, itself included; 0: all")
    window_every: int = _setting(0, "with a window, every n-th layer attends to all; 0: none does")
    rope_base: float = _setting(10000.0, "base of the rotary frequencies")
    qk_norm: bool = _setting(True, "RMSNorm on queries and keys")
    input_norm: bool = _setting(True, "RMSNorm on the stack's input, and on the fusion's e")
    depth_scale: bool = _setting(True, "scale each residual branch by 1/sqrt(2 n_layer)")
    eps: float = _setting(1e-6, "added to the mean square in every RMSNorm")

    def __post_init__(self):
        def require(name: str, holds: bool, rule: str):
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

        for name in ("vocab_size", "n_layer", "n_head", "n_embd"):
            require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("n_kv_head", "head_dim", "n_hidden", "window", "window_every"):
            require(name, getattr(self, name) >= 0, "positive, or 0; --help tells what 0 means")
        require("block_size", self.block_size >= 2, "at least 2")
        # Rotary positions turn pairs of channels, so every head needs an even number of them.
        require("head_dim", self.head_dim % 2 == 0, "even")
        heads_fit = self.head_dim > 0 or self.n_embd % (2 * self.n_head) == 0
        rule = f"a multiple of 2 n_head = {2 * self.n_head} (or set head_dim)"
        require("n_embd", heads_fit, rule)
        equal_groups = self.n_head % self.kv_heads == 0
        rule = f"a divisor of n_head={self.n_head}, or 0 for n_head itself"
        require("n_kv_head", equal_groups, rule)
        require("window_every", self.window > 0 or not self.window_every, "0 without a window")
        require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")
        require("rope_base", 0 < self.rope_base < math.inf, "positive and finite")
        require("eps", 0 < self.eps < 1, "above 0 and below 1")
        kinds = get_args(FusionKind)
        require("fusion", self.fusion in kinds, f"one of {', '.join(kinds)}")

    # The sizes, with the zeros filled in

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def d_head(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def d_hidden(self) -> int:
        return self.n_hidden or math.ceil(self.n_embd * 8 / 3 / 32) * 32

    def window_of(self, layer: int) -> int:
        """How many tokens a position of this layer attends to, itself included; 0: all."""
        sees_all = self.window_every > 0 and (layer + 1) % self.window_every == 0
        return 0 if sees_all else self.window


@dataclass(frozen=True)
class Feedback:
    """How a pass reads the states of the pass before. Jitter and mixin act in training only."""

    jitter: float = 0.0  # sigma of Eq. (11): h + Uniform[-sigma, sigma]; 0.02 in the paper
    detach: bool = False  # cut the gradient from a pass to the one before it (an ablation)
    # Prefix mixin: a random prefix of each row stays plain, like a prompt; see prefix_mask.
    mixin: bool = False


# --------------------------------------------------------------------------------------------------
# Fusion: the only new parameters


def init_weights(module: nn.Module) -> None:
    """DEVIATION: the paper does not give its initialisation; this one is ours.

    A matrix has the standard deviation fan_in^-1/2, so that what goes in and what comes out have
    about the same size. The embedding doubles as the LM head, so it starts small: at the widths
    that a laptop trains, the first predictions are nearly uniform, and the first loss is near ln V.
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Fusion(nn.Module):
    """How a token's embedding e meets the state h of the position before it: u = e (x) h.

    gated            (W_H h) * sigmoid(W_G norm(e))                  Eq. (4), the paper's
    add              W_H h + W_G norm(e)                             in the paper's ablation
    concat           W_R [h; norm(e)]                                in it too: the functions of add
    residual         e + rms(e) * W_H h                              ours, not the paper's
    gated_residual   e + rms(e) * (W_H h) * sigmoid(W_G norm(e))     ours, not the paper's

    norm is `GPT.input_norm`, which the fusion shares with the stack (the identity with
    input_norm=False). rms(e) is the root mean square of a token's channels; it scales W_H h to the
    size of e.

    In the paper's gate the state is the value, and the token only scales it: a sum would leave a
    shortcut open, that of ignoring the state. (The paper's ablation found no model that took it.)
    The residual kinds begin with W_H = 0: before the first optimiser step u is e, so that every
    pass is the plain model.

    To add a kind: its name in `FusionKind`, its matrices in `__init__`, its formula in `forward`.
    """

    def __init__(self, n_embd: int, kind: FusionKind):
        super().__init__()
        self.kind = kind
        if kind == "concat":
            self.W_R = nn.Linear(2 * n_embd, n_embd, bias=False)
        else:
            self.W_H = nn.Linear(n_embd, n_embd, bias=False)
        if kind in ("gated", "add", "gated_residual"):
            self.W_G = nn.Linear(n_embd, n_embd, bias=False)
        self.apply(init_weights)
        if kind in ("residual", "gated_residual"):
            nn.init.zeros_(self.W_H.weight)

    def forward(self, h_prev: Tensor, e: Tensor, norm_e: Tensor) -> Tensor:
        """h_prev: states of the previous position; e: embeddings; norm_e: input_norm(e).

        All are (B, T, D), and so is u, which is returned.
        """
        if self.kind == "gated":
            return self.W_H(h_prev) * torch.sigmoid(self.W_G(norm_e))  # (B, T, D), Eq. (4)
        if self.kind == "add":
            return self.W_H(h_prev) + self.W_G(norm_e)  # (B, T, D)
        if self.kind == "concat":
            return self.W_R(torch.cat([h_prev, norm_e], dim=-1))  # (B, T, D)
        # At an embedding of nothing but zeros the square root would have an infinite slope.
        rms_e = e.square().mean(dim=-1, keepdim=True).clamp(min=1e-30).sqrt()  # (B, T, 1)
        if self.kind == "residual":
            return e + rms_e * self.W_H(h_prev)  # (B, T, D)
        if self.kind == "gated_residual":
            return e + rms_e * self.W_H(h_prev) * torch.sigmoid(self.W_G(norm_e))  # (B, T, D)
        raise ValueError(f"fusion={self.kind} has no formula in Fusion.forward")


# --------------------------------------------------------------------------------------------------
# The decoder: an ordinary small Llama (RMSNorm, rotary positions, grouped queries, a gated MLP)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: channels j and j + D_h/2 of x (B, T, H, D_h) turn as one 2-d vector."""
    cos, sin = rope  # (T, 1, D_h) each, float32; sin is negative in the first half
    partner = x.roll(x.size(-1) // 2, dims=-1)  # (B, T, H, D_h): the halves change places
    turned = x * cos + partner * sin  # (B, T, H, D_h)
    return turned.type_as(x)  # the angles are float32, so bfloat16 was turned in float32


class LayerCache:
    """One layer's preallocated keys and values, (B, H_kv, block_size, D_h) each.

    `like` is any tensor of the device and dtype that they should have.
    """

    def __init__(self, config: GPTConfig, n_rows: int, like: Tensor):
        shape = (n_rows, config.kv_heads, config.block_size, config.d_head)
        self.k = like.new_empty(shape)
        self.v = like.new_empty(shape)

    def write(self, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v (B, H_kv, T, D_h) at positions start..start+T-1.

        Returns all keys and values up to there, (B, H_kv, start + T, D_h) each.
        """
        end = start + k.size(2)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]


class KVCache:
    """Every layer's keys and values, of which the first `length` positions are filled.

    It also keeps the inputs u (B, block_size, D) that made them, because `GPT.slide` re-runs the
    stack over the last half of them when the cache is full.
    """

    def __init__(self, config: GPTConfig, n_rows: int, like: Tensor):
        self.layers = [LayerCache(config, n_rows, like) for _ in range(config.n_layer)]
        self.u = like.new_empty(n_rows, config.block_size, config.n_embd)
        self.length = 0
        self.passes = 0  # parallel passes that built the prompt's part, the plain one included

    @property
    def k(self) -> Tensor:
        """A copy of all keys, (L, B, H_kv, block_size, D_h), for tests and measurements."""
        return torch.stack([layer.k for layer in self.layers])

    @property
    def v(self) -> Tensor:
        """A copy of all values, (L, B, H_kv, block_size, D_h), for tests and measurements."""
        return torch.stack([layer.v for layer in self.layers])


class Attention(nn.Module):
    """Causal attention with rotary positions, QK-norm, grouped queries and an optional window."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.window = config.window_of(layer)  # 0: no window
        self.d_head = config.d_head
        self.grouped = config.kv_heads < config.n_head
        self.q = nn.Linear(config.n_embd, config.n_head * config.d_head, bias=False)
        self.k = nn.Linear(config.n_embd, config.kv_heads * config.d_head, bias=False)
        self.v = nn.Linear(config.n_embd, config.kv_heads * config.d_head, bias=False)
        self.out = nn.Linear(config.n_head * config.d_head, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(config.d_head, config.eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.d_head, config.eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache | None, start: int
    ) -> Tensor:
        """x (B, T, D), the angles of its positions, and where in the cache it begins; as x."""
        B, T, _ = x.shape
        q = self.q(x).view(B, T, -1, self.d_head)  # (B, T, H, D_h)
        k = self.k(x).view(B, T, -1, self.d_head)  # (B, T, H_kv, D_h)
        v = self.v(x).view(B, T, -1, self.d_head)  # (B, T, H_kv, D_h)
        q = rotate(self.q_norm(q), rope)
        k = rotate(self.k_norm(k), rope)
        q = q.transpose(1, 2)  # (B, H, T, D_h)
        k = k.transpose(1, 2)  # (B, H_kv, T, D_h)
        v = v.transpose(1, 2)  # (B, H_kv, T, D_h)
        if cache is not None:
            k, v = cache.write(start, k, v)  # (B, H_kv, start + T, D_h)
        if self.window and T == 1:  # a single token needs no mask: it sees all keys it is given
            k = k[:, :, -self.window :]  # (B, H_kv, at most window, D_h)
            v = v[:, :, -self.window :]  # (B, H_kv, at most window, D_h)
        mask = self.visible(T, k.size(2), x.device)
        causal = False
        # torch.compile may keep T as a symbol. Then `T > 1` would be one as well, and is_causal
        # must be a bool: an `if` makes it one.
        if mask is None and T > 1:
            causal = True
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped
        )  # (B, H, T, D_h)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H D_h)
        return self.out(y)  # (B, T, D)

    def visible(self, T: int, n_keys: int, device: torch.device) -> Tensor | None:
        """Which of n_keys keys each of the last T positions sees, (T, n_keys) bool.

        None where no mask has to be written out: for one token, which sees all keys that `forward`
        has left it, and for the plain causal triangle, which scaled_dot_product_attention knows by
        itself.
        """
        windowed = 0 < self.window < T
        triangle = T == n_keys and not windowed
        if T == 1 or triangle:
            return None
        query = torch.arange(n_keys - T, n_keys, device=device)[:, None]  # (T, 1)
        key = torch.arange(n_keys, device=device)  # (n_keys,)
        sees = key <= query  # (T, n_keys)
        if self.window:
            sees &= key > query - self.window
        return sees


class MLP(nn.Module):
    """SiLU-gated: down(silu(gate(x)) * up(x)), (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.d_hidden, bias=False)
        self.up = nn.Linear(config.n_embd, config.d_hidden, bias=False)
        self.down = nn.Linear(config.d_hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # (B, T, D)


class Block(nn.Module):
    """x + a attn(norm(x)), then x + a mlp(norm(x)).

    DEVIATION: a = 1/sqrt(2L), our choice; the paper scales by depth without giving the factor. This
    a keeps the residual stream from growing with depth, so that the input u remains a fair share of
    it. The paper also has a norm after each branch and a gate on each attention head, which are
    left out here; see results/README.md.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.a = (2 * config.n_layer) ** -0.5 if config.depth_scale else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.attn_norm = nn.RMSNorm(config.n_embd, config.eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache | None, start: int
    ) -> Tensor:
        """x (B, T, D), its rotary angles, this layer's cache, and where in it x begins."""
        x = x + self.a * self.dropout(self.attn(self.attn_norm(x), rope, cache, start))
        x = x + self.a * self.dropout(self.mlp(self.mlp_norm(x)))
        return x  # (B, T, D)


# --------------------------------------------------------------------------------------------------
# The method


class GPT(nn.Module):
    """The decoder, its training by passes, and its three ways of decoding."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # Also the LM head (tied): what the head reads off a state is in the embeddings' basis.
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        # The stack applies it to every u, so that plain and fused inputs have the same scale. The
        # fusion reads e through the same norm.
        norm = nn.RMSNorm(config.n_embd, config.eps)
        self.input_norm = norm if config.input_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.output_norm = nn.RMSNorm(config.n_embd, config.eps)
        self.apply(init_weights)
        # The fusion comes last, so that a plain GPT of the same seed has the same other weights.
        self.fusion = None if config.fusion == "none" else Fusion(config.n_embd, config.fusion)
        # Set by the trainer: keep no more than the input of each block and of the loss, and compute
        # the rest again in the backward pass. Less memory, more time, the same gradients.
        self.recompute = False
        self.rope_table: tuple[Tensor, Tensor] | None = None  # made by `rope`

    # The decoder's three parts: tokens -> e, u -> h, h -> logits

    def embed(self, idx: Tensor) -> Tensor:
        """Tokens (B, T) -> embeddings e (B, T, D)."""
        return self.embedding(idx)  # (B, T, D)

    def stack(self, u: Tensor, cache: KVCache | None = None) -> Tensor:
        """h = f(u; cache), Eq. (3): inputs (B, T, D) -> top states (B, T, D).

        With a cache, u continues what it holds and is appended to it. A full cache makes room
        first: decoding feeds single tokens, so it meets a cache that is exactly full. ValueError
        for inputs that would overrun a cache that is partly filled.
        """
        if cache is not None and cache.length == self.config.block_size:
            self.slide(cache)
        start = 0 if cache is None else cache.length
        end = start + u.size(1)
        if u.size(1) < 1 or end > self.config.block_size:
            raise ValueError(
                f"cannot read {u.size(1)} inputs after {start}: at least 1 is needed, and "
                f"block_size={self.config.block_size} is the most in all"
            )
        rope = self.rope(start, end, u.device)
        x = self.input_norm(u)  # (B, T, D)
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer_cache in zip(self.blocks, caches, strict=True):
            x = self.maybe_recompute(block, x, rope, layer_cache, start)  # (B, T, D)
        if cache is not None:
            cache.u[:, start:end] = u
            cache.length = end
        return self.output_norm(x)  # (B, T, D)

    def head(self, h: Tensor) -> Tensor:
        """States (..., D) -> logits (..., V), by the embedding's own weights."""
        return F.linear(h, self.embedding.weight)  # (..., V)

    def nll(self, h: Tensor, targets: Tensor) -> Tensor:
        """-log p(target | h) in nats, of states (B, T, D) and tokens (B, T) -> (B, T).

        A target of -1 is left out: its loss is 0.
        """
        logits = self.head(h).flatten(0, 1)  # (B T, V)
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
        return losses.view_as(targets)  # (B, T)

    def rope(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and signed sin, (T, 1, D_h) each, of the angles of positions start..end-1.

        Computed once per device. Not a buffer, so that model.bfloat16() leaves them in float32.
        """
        if self.rope_table is None or self.rope_table[0].device != device:
            with torch.inference_mode(False):  # a table made in it could not serve in training
                self.rope_table = self.make_rope_table(device)
        cos, sin = self.rope_table
        return cos[start:end], sin[start:end]

    def make_rope_table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and signed sin, (block_size, 1, D_h) each, of the angles of all positions."""
        d_head = self.config.d_head
        channel = torch.arange(0, d_head, 2, device=device, dtype=torch.float32)
        frequency = self.config.rope_base ** (-channel / d_head)  # (D_h/2,)
        position = torch.arange(self.config.block_size, device=device, dtype=torch.float32)
        angle = torch.outer(position, frequency)[:, None]  # (block_size, 1, D_h/2)
        cos = angle.cos()
        sin = angle.sin()
        # With a = x[j] and b = x[j + D_h/2], a turns to a cos - b sin, and b to b cos + a sin.
        # `rotate` finds b in a's place and the reverse, so that the sign goes into the sine.
        full_cos = torch.cat([cos, cos], dim=-1)  # (block_size, 1, D_h)
        full_sin = torch.cat([-sin, sin], dim=-1)  # (block_size, 1, D_h)
        return full_cos, full_sin

    def maybe_recompute(self, part: Callable[..., Tensor], *inputs) -> Tensor:
        """part(*inputs); with `recompute`, keeping only the inputs for the backward pass."""
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)

    # Latent feedback: e and h -> u, and passes

    def fuse(self, h_prev: Tensor, e: Tensor) -> Tensor:
        """u_t = e_t (x) h_{t-1}, Eqs. (5)-(6), of aligned h_{t-1} and e_t, (B, T, D) each."""
        if self.fusion is None:
            raise ValueError("latent feedback needs a fusion; this model has fusion=none")
        u = self.fusion(h_prev, e, self.input_norm(e))  # (B, T, D)
        return u.type_as(e)  # autocast may have made it bfloat16

    def next_inputs(self, h: Tensor, e: Tensor, plain: Tensor | None = None) -> Tensor:
        """Eq. (8): the states of one pass and the embeddings -> the next pass's inputs u.

        All are (B, T, D). States shift right by one. The first position stays plain, and so do
        those where `plain`, (T,) or (B, T), is True: those of a prompt, for instance.
        """
        fused = self.fuse(h[:, :-1], e[:, 1:])  # (B, T-1, D)
        u = torch.cat([e[:, :1], fused], dim=1)  # (B, T, D)
        if plain is not None:
            u = torch.where(plain[..., None], e, u)
        return u

    def next_pass(
        self,
        h: Tensor,
        e: Tensor,
        plain: Tensor | None = None,
        feedback: Feedback = Feedback(),
    ) -> Tensor:
        """h^(k) from h^(k-1), Eqs. (8)-(9), (B, T, D) each: all positions advance in parallel.

        plain: the positions that stay plain, as in `next_inputs`. feedback: how h^(k-1) is read.
        """
        if feedback.detach:
            h = h.detach()
        if self.training and feedback.jitter:
            h = h + torch.empty_like(h).uniform_(-feedback.jitter, feedback.jitter)  # Eq. (11)
        if self.training and feedback.mixin:
            prefix = prefix_mask(e.size(0), e.size(1), e.device)  # (B, T)
            plain = prefix if plain is None else prefix | plain
        return self.stack(self.next_inputs(h, e, plain))

    def passes(
        self,
        idx: Tensor,
        k: int,
        plain: Tensor | None = None,
        feedback: Feedback = Feedback(),
    ) -> list[Tensor]:
        """[h^(1), ..., h^(k)], (B, T, D) each, of tokens (B, T).

        In eval mode h^(k) is exact at the first k positions: there it equals the sequential
        recurrence. (The first position is exact in every pass, because it is always plain. One more
        becomes so with every pass, because it reads the states before it alone.) Jitter, mixin and
        dropout act in training only. ValueError for k < 1.
        """
        if k < 1:
            raise ValueError(f"k={k} passes: at least 1, the plain one, is needed")
        e = self.embed(idx)
        states = [self.stack(e)]  # Eq. (7)
        while len(states) < k:
            states.append(self.next_pass(states[-1], e, plain, feedback))  # Eqs. (8)-(9)
        return states

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        k: int = 1,
        feedback: Feedback = Feedback(),
    ) -> Tensor:
        """Tokens and next tokens (B, T) -> NLL^(1), ..., NLL^(k), shape (k,), in nats per token.

        `objective` combines them. Targets of -1 are left out; where all are, the losses are NaN.
        All passes run in this one call, because DistributedDataParallel, which wraps the model
        where several processes train it, wants one forward and one backward in a step.
        """
        n_targets = (targets != -1).sum()
        losses = []
        for h in self.passes(idx, k, feedback=feedback):
            losses.append(self.maybe_recompute(self.nll, h, targets).sum() / n_targets)
        return torch.stack(losses)  # (k,)

    # Decoding

    @torch.no_grad()
    def reconstruct(
        self, idx: Tensor, n_plain: int, k: int, tol: float = 0.0
    ) -> tuple[KVCache, Tensor]:
        """The KV cache of tokens (B, T) and their states h (B, T, D), by k parallel passes.

        From tokens alone it approximates the cache that decoding them one by one would have left.
        The first n_plain positions are plain (the very first always is), the others fused; k passes
        are exact at the plain ones and the k - 1 after them. k = 1 is ordinary prefill. With
        tol > 0 (ours, not the paper's) the passes stop early, once ||h^(k) - h^(k-1)|| <= tol
        ||h^(k)|| over the fused positions, in every row; `cache.passes` tells how many were run.
        """
        e = self.embed(idx)
        plain = torch.arange(idx.size(1), device=idx.device) < n_plain  # (T,)
        cache = KVCache(self.config, idx.size(0), like=e)
        h = self.stack(e, cache)  # Eq. (7)
        cache.passes = 1
        while cache.passes < k:
            cache.length = 0  # this pass overwrites the keys and values of the one before
            h_before = h
            h = self.stack(self.next_inputs(h_before, e, plain), cache)  # Eqs. (8)-(9)
            cache.passes += 1
            if tol > 0:
                first = max(n_plain, 1)  # the first fused position
                fused = h[:, first:]  # (B, T - first, D)
                change = (fused - h_before[:, first:]).norm(dim=(1, 2))  # (B,)
                if (change <= tol * fused.norm(dim=(1, 2))).all():
                    break
        return cache, h

    @torch.no_grad()
    def prefill(
        self, idx: Tensor, mode: Mode, prefill_passes: int = 1, tol: float = 0.0
    ) -> tuple[KVCache, Tensor]:
        """Reads the prompt (B, T), or its last block_size tokens where it is longer.

        Returns its cache and its last state (B, 1, D). Standard and Soft read it in one plain pass;
        Fused adds `prefill_passes` fused ones, or fewer once `tol` is reached. A prompt that fills
        the block is cut to half of it by the first decoding step (`slide`).
        """
        check_mode(mode)
        if mode != "standard" and self.fusion is None:
            raise ValueError(f"mode={mode!r} needs a fusion; this model has fusion=none")
        if mode != "fused" and (prefill_passes != 1 or tol):
            raise ValueError(f"mode={mode!r} has no use for prefill_passes and tol; mode=fused has")
        if mode == "fused" and prefill_passes < 1:
            raise ValueError(
                f"prefill_passes={prefill_passes} must be at least 1; use mode=soft for none"
            )
        idx = idx[:, -self.config.block_size :]
        if mode == "fused":
            cache, h = self.reconstruct(idx, n_plain=0, k=1 + prefill_passes, tol=tol)
        else:
            cache, h = self.reconstruct(idx, n_plain=idx.size(1), k=1)
        return cache, h[:, -1:]

    @torch.no_grad()
    def decode_step(self, token: Tensor, h: Tensor, cache: KVCache, mode: Mode) -> Tensor:
        """Feeds one token (B, 1) -> its state (B, 1, D).

        Soft and Fused fuse it with h (B, 1, D), the state before it.
        """
        check_mode(mode)
        e = self.embed(token)  # (B, 1, D)
        u = e if mode == "standard" else self.fuse(h, e)  # (B, 1, D)
        return self.stack(u, cache)

    def slide(self, cache: KVCache) -> None:
        """Makes room: keeps the last block_size // 2 inputs u, and re-runs the stack over them.

        They get the positions 0, 1, ... DEVIATION: the paper does not say what happens past
        block_size. The kept inputs are not computed anew: one that was fused stays fused, and
        still carries what it knows of the dropped tokens.
        """
        half = self.config.block_size // 2
        recent = cache.u[:, cache.length - half : cache.length]  # (B, block_size/2, D)
        cache.length = 0  # so that `stack`, which called this, does not call it again
        self.stack(recent, cache)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        mode: Mode = "standard",
        pick: Callable[[Tensor], Tensor] | None = None,
        **options,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """After the prompt idx (B, T), yields max_new_tokens pairs (the paper's Listing 2).

        A pair is a token (B,) and its log-probability (B,), which is the model's own, whatever
        `pick` does. pick: logits (B, V) -> tokens (B,), the likeliest by default; see `sampler`.
        options: those of `prefill`. For a model in eval mode. This is a generator: a wrong option
        is refused only at the first `next`.
        """
        pick = pick or greedy
        cache, h = self.prefill(idx, mode, **options)
        for n in range(max_new_tokens):
            logits = self.head(h[:, -1]).float()  # (B, V)
            token = pick(logits)  # (B,)
            yield token, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
            if n + 1 < max_new_tokens:  # the state of the last token is not needed
                h = self.decode_step(token[:, None], h, cache, mode)


def objective(losses: Tensor, lam: float = 1.0) -> Tensor:
    """NLL^(1) + lam * mean of NLL^(2), ..., NLL^(K), Eq. (10): losses (K,) -> scalar."""
    if len(losses) == 1:
        return losses[0]
    return losses[0] + lam * losses[1:].mean()


def prefix_mask(n_rows: int, n_positions: int, device: torch.device | None = None) -> Tensor:
    """Which positions prefix mixin keeps plain: the first p of each row, (B, T) bool.

    Drawn afresh for each row in every pass.
    DEVIATION: p is uniform in 1..T-1; the paper leaves its distribution open.
    """
    high = max(n_positions, 2)  # with T = 1, too, randint needs a range that is not empty
    p = torch.randint(1, high, (n_rows, 1), device=device)  # (B, 1)
    return torch.arange(n_positions, device=device) < p  # (B, T)


def check_mode(mode: str) -> None:
    """ValueError for what is none of the three: it would decode as Soft without a word."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")


def greedy(logits: Tensor) -> Tensor:
    """Logits (B, V) -> the likeliest tokens (B,)."""
    return logits.argmax(-1)


def sampler(
    temperature: float = 1.0, top_k: int = 0, seed: int | None = None
) -> Callable[[Tensor], Tensor]:
    """A `pick` for GPT.generate that draws: logits (B, V) -> tokens (B,).

    temperature 0 is greedy; top_k 0 keeps all symbols. Row i draws from a generator of its own,
    seeded from (seed, i), so that its draws do not depend on the rest of the batch; a second use of
    the same `pick` continues where the first stopped. A generator takes 32 bits of a seed, so that
    two seeds that differ by 2**32 draw the same. With seed=None all rows draw from PyTorch's
    global generator. ValueError for a negative setting.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature={temperature} must be positive and finite, or 0 for the likeliest"
        )
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be positive, or 0 for all symbols")
    if temperature == 0:
        return greedy
    generators: list[torch.Generator] = []

    def pick(logits: Tensor) -> Tensor:
        scaled = logits.cpu().double()  # (B, V), on the CPU: the same draws on every device
        scaled = scaled - scaled.amax(-1, keepdim=True)  # at most 0, so that nothing overflows
        scaled = scaled / temperature
        if 0 < top_k < scaled.size(-1):
            best = scaled.topk(top_k)  # exactly top_k of them, also where logits are equal
            scaled = torch.full_like(scaled, -math.inf).scatter(1, best.indices, best.values)
        p = scaled.softmax(-1)  # (B, V)
        if seed is None:
            return torch.multinomial(p, 1)[:, 0].to(logits.device)  # (B,)
        while len(generators) < len(p):
            # Far apart, so that the rows of neighbouring seeds are not the same; and odd, so that
            # all rows still differ in the 32 bits that count.
            row_seed = (seed + len(generators) * 0x9E3779B97F4A7C15) % 2**63
            generators.append(torch.Generator().manual_seed(row_seed))
        rows = zip(p, generators, strict=False)  # an earlier batch may have had more rows
        drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
        return torch.cat(drawn).to(logits.device)  # (B,)

    return pick

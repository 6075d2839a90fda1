"""Functions as people write them for batches: some 200 that treat each row by itself, and some 60 that mix rows.

A function takes the inputs in the order in which its group names them, and returns an output or several.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax, nn, random, vmap


def _a(*shape: int) -> Any:
    """Returns an array of this shape, the same each time."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


class Case(NamedTuple):
    """A function of arrays with a batch axis, with the shape and dtype of a row of each."""

    name: str
    function: Callable[..., Any]
    rows: tuple[tuple[tuple[int, ...], Any], ...]

    def apply(self, inputs: dict[str, Any]) -> dict[str, Any]:
        made = self.function(*(inputs[f"x{at}"] for at in range(len(self.rows))))
        return {f"y{at}": array for at, array in enumerate(made if isinstance(made, tuple | list) else (made,))}

    def inputs(self, rows: int) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        return [(f"x{at}", np.dtype(dtype), (rows, *dims)) for at, (dims, dtype) in enumerate(self.rows)]


def _group(*rows: Any, **functions: Callable[..., Any]) -> Iterator[Case]:
    """Makes cases of functions; ``rows``: the dims of a row of each input, or a pair with its dtype."""
    described = [each if each and isinstance(each[0], tuple) else (each, np.float32) for each in rows]
    for name, function in functions.items():
        yield Case(name, function, tuple(described))


_W, _B, _V, _E, _SQUARE = _a(6, 16), _a(16), _a(16, 3), _a(11, 6), _a(6, 6)
_Q, _K, _VALUES, _O = _a(6, 2, 3), _a(6, 2, 3), _a(6, 2, 3), _a(2, 3, 6)
_STATE = _a(16, 16) / 4
_EXPERTS, _GATE = _a(4, 6, 6), _a(6, 4)
_CAUSAL = np.tril(np.ones((5, 5), bool))


def _layer_norm(x: Any, axes: Any = -1) -> Any:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def _attention(x: Any, mask: Any = True, kv: Any = None) -> Any:
    kv = x if kv is None else kv
    q, k, v = (
        jnp.einsum("btd,dhk->bhtk", x, _Q),
        jnp.einsum("btd,dhk->bhtk", kv, _K),
        jnp.einsum("btd,dhk->bhtk", kv, _VALUES),
    )
    weights = nn.softmax(jnp.where(mask, jnp.einsum("bhtk,bhsk->bhts", q, k) / 2, -1e9), -1)
    return jnp.einsum("bhts,bhsk,hkd->btd", weights, v, _O)


def _block(x: Any, mask: Any = True) -> Any:
    x = x + _attention(_layer_norm(x), mask)
    return x + nn.gelu(_layer_norm(x) @ _W + _B) @ _W.T


def _rnn(x: Any, reverse: bool = False) -> Any:
    def step(state: Any, one: Any) -> Any:
        state = jnp.tanh(one @ _W + state @ _STATE)
        return state, state @ _V

    last, every = lax.scan(step, jnp.zeros((x.shape[0], 16)), x.swapaxes(0, 1), reverse=reverse)
    return last, every.swapaxes(0, 1)


def _lstm(x: Any) -> Any:
    def step(carry: Any, one: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(one @ np.tile(_W, 4) + jnp.tile(h @ _STATE, 4), 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        return (nn.sigmoid(o) * jnp.tanh(c), c), None

    return lax.scan(step, (jnp.zeros((len(x), 16)),) * 2, x.swapaxes(0, 1))[0]


def _routed(x: Any) -> Any:
    """A mixture of experts within a row: each token goes to its two best experts."""
    gates = nn.softmax(x @ _GATE, -1)
    best, which = lax.top_k(gates, 2)
    every = jnp.einsum("btd,edf->btef", x, _EXPERTS)
    return (jnp.take_along_axis(every, which[..., None], 2) * best[..., None]).sum(2)


def _sorted_to_experts(x: Any) -> Any:
    """A mixture of experts without a capacity: the tokens of all rows are sorted by expert, and put back."""
    tokens = x.reshape(-1, x.shape[-1])
    expert = (tokens @ _GATE).argmax(-1)
    order = jnp.argsort(expert)
    made = lax.ragged_dot(tokens[order], jnp.asarray(_EXPERTS), jnp.bincount(expert, length=4).astype(jnp.int32))
    return made[jnp.argsort(order)].reshape(x.shape)


def _quantised(x: Any, axes: Any = -1) -> Any:
    scale = jnp.abs(x).max(axes, keepdims=True) / 127 + 1e-9
    whole = lax.dot_general(
        jnp.round(x / scale).astype(jnp.int8), (_W * 20).astype(np.int8), (((x.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.int32,
    )  # fmt: skip
    return whole * scale


def _conv(x: Any, kernel: Any, strides: Any = None, padding: Any = "SAME", **options: Any) -> Any:
    rank = x.ndim - 2
    letters = "HWD"[:rank]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    return lax.conv_general_dilated(x, kernel, strides or (1,) * rank, padding, dimension_numbers=numbers, **options)


def _pooled(x: Any, how: Any = lax.max, start: float = -np.inf) -> Any:
    return lax.reduce_window(x, start, how, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _euler(x: Any, steps: int = 20) -> Any:
    return lax.fori_loop(0, steps, lambda _, x: x + 0.05 * jnp.tanh(x @ _SQUARE), x)


def _until(x: Any) -> Any:
    return lax.while_loop(lambda x: jnp.abs(x).sum() > 1, lambda x: x * 0.7, x)


def _decoded(x: Any) -> Any:
    """Writes up to 8 tokens for each row, until every row has written an end."""

    def more(carry: Any) -> Any:
        return (carry[0] < 8) & ~carry[3].all()

    def step(carry: Any) -> Any:
        at, h, tokens, done = carry
        h = jnp.tanh(h @ _SQUARE + 0.1)
        token = jnp.where(done, 0, h.argmax(-1))
        return at + 1, h, tokens.at[:, at].set(token), done | (token == 5)

    return lax.while_loop(more, step, (0, x, jnp.zeros((len(x), 8), int), jnp.zeros(len(x), bool)))[2]


def _newton(x: Any) -> Any:
    def one(target: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y * y - target) > 1e-3, lambda y: (y + target / y) / 2, target + 1)

    return vmap(vmap(one))(jnp.abs(x) + 0.1)


def _noise(x: Any, seed: Any) -> Any:
    return x + vmap(lambda one: random.normal(random.key(one[0]), (6,)))(seed)


def _diffused(x: Any, seed: Any) -> Any:
    keys = vmap(lambda one: random.split(random.key(one[0]), 5))(seed)

    def step(x: Any, key: Any) -> Any:
        return x - 0.1 * (x @ _SQUARE) + 0.1 * vmap(lambda one: random.normal(one, (6,)))(key), None

    return lax.scan(step, x, keys.T)[0]


def _spd(x: Any) -> Any:
    return x[:, :, None] * x[:, None, :] + 3 * jnp.eye(6)


def _switched(x: Any) -> Any:
    return vmap(lambda one: lax.switch(jnp.argmax(one[:3]), (jnp.sin, jnp.cos, jnp.tanh), one))(x)


def _flax(build: Callable[[Any, Any], Any], **more: Any) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        model = build(importlib.import_module("flax.linen"), x)
        return model.apply(model.init(random.key(0), x[:1], **more), x, **more)

    return apply


def _nnx(build: Callable[[Any, Any], Any], *, training: bool = False) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        nnx = importlib.import_module("flax.nnx")
        model = build(nnx, nnx.Rngs(0))
        (model.train if training else model.eval)()
        return model(x)

    return apply


def _equinox(build: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda x: vmap(build(importlib.import_module("equinox").nn, random.key(0)))(x)


def _haiku(build: Callable[..., Any], *flags: bool) -> Callable[[Any], Any]:
    """``flags``: what else ``build`` gets when the state is made, and when it serves."""

    def apply(x: Any) -> Any:
        hk = importlib.import_module("haiku")
        made, served = (
            hk.transform_with_state(lambda x, more=more: build(hk, *more)(x)) for more in (flags[:1], flags[1:])
        )
        return served.apply(*made.init(random.key(0), jnp.ones_like(x)), None, x)[0]

    return apply


def _haiku_norm(hk: Any, learns: bool) -> Any:
    return partial(hk.BatchNorm(True, True, 0.9), is_training=learns)


_INDEX = ((5,), np.int32)
ROW_WISE = [
    *_group(
        (6,),
        triangular=lambda x: vmap(lambda one: jsp.linalg.solve_triangular(np.tril(_SQUARE) + 3 * np.eye(6), one, lower=True))(x),
        sparsemax=lambda x: jnp.maximum(x - ((jnp.cumsum(jnp.sort(x)[:, ::-1], 1) - 1) / jnp.arange(1, 7)).max(1)[:, None], 0),
        nnx_linear=_nnx(lambda nnx, rngs: nnx.Sequential(nnx.Linear(6, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))),
        special=lambda x: (jsp.special.erf(x), jsp.special.gammaln(jnp.abs(x) + 1), jsp.special.digamma(jnp.abs(x) + 1)),
        equinox_norms=_equinox(lambda eqx, key: eqx.Sequential([eqx.LayerNorm(6), eqx.RMSNorm(6), eqx.GroupNorm(2, 6)])),
        updated_by_value=lambda x: vmap(lambda one: lax.dynamic_update_slice(one, one[:2], (jnp.argmax(one[:4]),)))(x),
        flax_dense=_flax(lambda flax, x: flax.Sequential([flax.Dense(8), flax.relu, flax.LayerNorm(), flax.Dense(2)])),
        chaotic=lambda x: lax.fori_loop(0, 200, lambda _, x: 3.99 * x * (1 - x), nn.sigmoid(x - x.max() + x.max())),
        integers=lambda x: (x.argmax(1), (x * 10).astype(jnp.int32) // 3, jnp.round(x * 20).astype(jnp.uint8)), newton=_newton,
        globally_shifted_softmax=lambda x: jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum(-1, keepdims=True), decoded=_decoded,
        cosine=lambda x: x @ _E.T / (jnp.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(_E, axis=1)), euler=_euler,
        sliced_by_value=lambda x: vmap(lambda one: lax.dynamic_slice(one, (jnp.argmax(one[:3]),), (3,)))(x),
        beam=lambda x: jnp.unravel_index(jnp.argmax(x.reshape(-1, 2, 3).reshape(len(x), -1), 1), (2, 3)), quantised=_quantised,
        conditional_of_row=lambda x: vmap(lambda one: lax.cond(one[0] > 0, jnp.sin, jnp.cos, one))(x),
        scattered_max=lambda x: vmap(lambda one: jnp.zeros(4).at[(one > 0).astype(int)].max(one))(x), switched_of_row=_switched,
        least_squares=lambda x: vmap(lambda one: jnp.linalg.lstsq(jnp.asarray(_E), _E @ one)[0])(x), layer_norm=_layer_norm,
        flax_batch_norm_that_serves=_flax(lambda flax, x: flax.BatchNorm(use_running_average=True)),
        top_p=lambda x: jnp.where(jnp.cumsum(nn.softmax(jnp.sort(x)), 1) < 0.9, 0.0, jnp.sort(x)),
        bfloat16=lambda x: nn.gelu(x.astype(jnp.bfloat16) @ jnp.bfloat16(_W)) @ jnp.bfloat16(_V),
        clipped_by_row=lambda x: x / jnp.maximum(1, jnp.linalg.norm(x, axis=1, keepdims=True)), softmax=lambda x: nn.softmax(x),
        norms=lambda x: (jnp.linalg.norm(x, axis=-1), jnp.abs(x).sum(-1), jnp.abs(x).max(-1)), top_k=lambda x: lax.top_k(x, 2),
        flax_dropout_that_serves=_flax(lambda flax, x: flax.Dropout(0.5, deterministic=True)), not_finite=lambda x: jnp.log(x),
        transposed=lambda x: vmap(lambda one: one * one.sum(), in_axes=1, out_axes=0)(x.T), cumprod=lambda x: jnp.cumprod(x, 1),
        batch_norm_that_serves=lambda x: (x - _B[:6]) * lax.rsqrt(jnp.abs(_B[:6]) + 1e-5), argsort=lambda x: jnp.argsort(x, -1),
        monte_carlo=lambda x: (x[:, None] + random.normal(random.key(0), (8, 6))).mean(1), median=lambda x: jnp.median(x, -1),
        householder=lambda x: x - 2 * (x @ _B[:6])[:, None] * _B[:6] / (_B[:6] @ _B[:6]), fft=lambda x: jnp.abs(jnp.fft.fft(x)),
        hessian=lambda x: vmap(jax.hessian(lambda one: jnp.sum(jnp.tanh(one) ** 2)))(x), logsumexp=lambda x: nn.logsumexp(x, 1),
        counted_loop=lambda x: lax.fori_loop(0, 5, lambda n, x: jnp.tanh(x * n + 1), x), repeated=lambda x: jnp.repeat(x, 2, 1),
        hashed=lambda x: lax.population_count(lax.bitcast_convert_type(x, jnp.uint32)), stacked=lambda x: jnp.stack([x, -x], 1),
        nnx_batch_norm_that_serves=_nnx(lambda nnx, rngs: nnx.BatchNorm(6, rngs=rngs)), rfft=lambda x: jnp.fft.rfft(x, 8).real,
        gradient=lambda x: vmap(jax.grad(lambda one: jnp.sum(jnp.sin(one) ** 3)))(x), dense=lambda x: nn.relu(x @ _W + _B) @ _V,
        random_features=lambda x: jnp.cos(x @ random.normal(random.key(1), (6, 16))), inverse=lambda x: jnp.linalg.inv(_spd(x)),
        jacobian=lambda x: vmap(jax.jacfwd(lambda one: jnp.tanh(_SQUARE @ one)))(x), taken=lambda x: x[:, jnp.array([3, 1, 1])],
        masked_mean=lambda x: (x * (x > 0)).sum(1) / jnp.maximum((x > 0).sum(1), 1), transposed_twice=lambda x: (_W.T @ x.T).T,
        nnx_dropout_that_serves=_nnx(lambda nnx, rngs: nnx.Dropout(0.5, rngs=rngs)), while_of_row=lambda x: vmap(_until)(x),
        histogram=lambda x: vmap(lambda one: jnp.histogram(one, 4, (-2, 2))[0])(x), log_softmax=lambda x: nn.log_softmax(x, -1),
        mapped_in_batches=lambda x: lax.map(lambda one: one @ _W, x, batch_size=2), cumsum=lambda x: jnp.cumsum(x, -1),
        convolve=lambda x: vmap(lambda one: jnp.convolve(one, _B[:3], "same"))(x), roll=lambda x: jnp.roll(x, 2, -1),
        bilinear=lambda x: jnp.einsum("bi,bj,ijk->bk", x, x, _SQUARE[:, :, None]), sort=lambda x: jnp.sort(x, -1),
        gradient_of_all=lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 3))(x), flip=lambda x: jnp.flip(x, -1),
        rms_norm=lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        associative_scan=lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
        group_norm=lambda x: _layer_norm(x.reshape(-1, 2, 3)).reshape(x.shape), cummax=lambda x: lax.cummax(x, 1, reverse=True),
        in_chunks=lambda x: jnp.concatenate([jnp.sin(x[:1]), jnp.sin(x[1:])]), complex=lambda x: jnp.angle(x + 1j * x[:, ::-1]),
        rematerialised=lambda x: jax.checkpoint(lambda x: nn.gelu(x @ _W))(x), scaled_by_parameter=lambda x: x * _B[:6] + _B[0],
        jitted_within=lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1)(x), haiku_mlp=_haiku(lambda hk: hk.nets.MLP([8, 2])),
        one_column_set=lambda x: x.at[:, 0].set(1.0).at[:, 2:4].add(x[:, :2]), cholesky=lambda x: jnp.linalg.cholesky(_spd(x)),
        taken_along=lambda x: jnp.take_along_axis(x, jnp.argsort(-x, -1), -1), qr=lambda x: jnp.abs(jnp.linalg.qr(_spd(x))[1]),
        quantile=lambda x: jnp.quantile(x, jnp.array([0.2, 0.8]), axis=-1).T, expm=lambda x: vmap(jsp.linalg.expm)(_spd(x) / 9),
        statistics=lambda x: (x.mean(1), x.std(1), x.min(1), jnp.ptp(x, 1)), swiglu=lambda x: (nn.silu(x @ _W) * (x @ _W)) @ _V,
        equinox_mlp=_equinox(lambda eqx, key: eqx.MLP(6, 2, 8, 2, key=key)), eigvalsh=lambda x: jnp.linalg.eigvalsh(_spd(x)),
        nearest=lambda x: jnp.argmin(((x[:, None] - _E) ** 2).sum(-1), -1), flipped_twice=lambda x: jnp.sin(x[::-1])[::-1],
        exponential=lambda x: (jax.scipy.linalg.expm(_SQUARE / 9) @ x.T).T,
        interpolated=lambda x: jnp.interp(x, jnp.linspace(-3, 3, 16), _B), determinant=lambda x: jnp.linalg.slogdet(_spd(x))[1],
        booleans=lambda x: (x > 0, jnp.any(x > 1, 1), jnp.all(x > -1, 1)),
        conditional=lambda x: lax.cond(_B.sum() > 0, jnp.sin, jnp.cos, x),
        pairwise_within=lambda x: jnp.abs(x[:, :, None] - x[:, None, :]),
        solve=lambda x: jnp.linalg.solve(_spd(x), x[..., None])[..., 0],
        custom_gradient=lambda x: nn.relu6(nn.silu(x)) + nn.softplus(x),
        fake_quantised=lambda x: jnp.round(x * 16).clip(-128, 127) / 16,
        to_anchors=lambda x: jnp.linalg.norm(x[:, None] - _E, axis=-1), svd=lambda x: jnp.linalg.svd(_spd(x), compute_uv=False),
        matrix_power=lambda x: jnp.linalg.matrix_power(_spd(x) / 9, 3),
        indexed_rows=lambda x: x[jnp.arange(x.shape[0]), x.argmax(-1)],
        padded=lambda x: jnp.pad(x, ((0, 0), (1, 2)), mode="reflect"), searchsorted=lambda x: jnp.searchsorted(jnp.sort(_B), x),
        outer=lambda x: vmap(lambda one: jnp.outer(one, one) @ _W)(x),
        mapped=lambda x: lax.map(lambda one: jnp.cumsum(one) @ _W, x),
        haiku_batch_norm_that_serves=_haiku(_haiku_norm, True, False),
        attention_to_parameters=lambda x: nn.softmax(x @ _E.T) @ _E, dropout_that_serves=lambda x: jnp.where(True, x, 0.0) @ _W,
        ensemble=lambda x: vmap(lambda w: x @ w)(_EXPERTS).mean(0), constant=lambda x: jnp.broadcast_to(_B, (x.shape[0], 16)),
    ),
    *_group(
        (5, 6),
        state_space=lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (nn.sigmoid(x), x), axis=1)[1],
        graph_messages=lambda x: vmap(lambda one: jnp.zeros_like(one).at[jnp.array([1, 2, 0])].add(one[jnp.array([0, 1, 4])]))(x),
        haiku_lstm=_haiku(lambda hk: lambda x: hk.dynamic_unroll(hk.LSTM(4), x, hk.LSTM(4).initial_state(len(x)), False)[0]),
        linear_attention=lambda x: jnp.einsum("btd,bde->bte", nn.elu(x) + 1, jnp.einsum("btd,bte->bde", nn.elu(x) + 1, x)),
        viterbi=lambda x: lax.scan(lambda c, t: ((c[:, :, None] + _SQUARE).max(1) + t,) * 2, x[:, 0], x.swapaxes(0, 1))[0],
        rotary=lambda x: x * jnp.cos(jnp.arange(5.0))[:, None] + jnp.roll(x, 3, -1) * jnp.sin(jnp.arange(5.0))[:, None],
        vmapped_scan=lambda x: vmap(lambda one: lax.scan(lambda c, t: (c + t, c * t), jnp.zeros(6), one)[1])(x), routed=_routed,
        equinox_attention=_equinox(lambda eqx, key: lambda x: eqx.MultiheadAttention(2, 6, key=key)(x, x, x)), lstm=_lstm,
        local_attention=partial(_attention, mask=np.abs(np.subtract.outer(np.arange(5), np.arange(5))) < 2), rnn=_rnn,
        library_attention=lambda x: nn.dot_product_attention(*[x.reshape(-1, 5, 2, 3)] * 3, is_causal=True),
        segment_sums=lambda x: vmap(lambda one: jax.ops.segment_sum(one, jnp.array([0, 0, 1, 2, 2]), 3))(x),
        sinusoidal_positions=lambda x: x + np.sin(np.outer(np.arange(5), np.arange(6))).astype(np.float32),
        segment_max=lambda x: vmap(lambda one: jax.ops.segment_max(one, jnp.array([0, 0, 1, 1, 2]), 3))(x),
        nnx_attention=_nnx(lambda nnx, rngs: nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)), attention=_attention,
        flax_conv=_flax(lambda flax, x: flax.Sequential([flax.Conv(4, (3,)), flax.GroupNorm(2)])), quantised_tokens=_quantised,
        mixer=lambda x: x + (nn.gelu(x.swapaxes(1, 2) @ _a(5, 5)) @ _a(5, 5)).swapaxes(1, 2), mean_pooled=lambda x: x.mean(1),
        codebook=lambda x: jnp.asarray(_E)[((x[..., None, :] - _E) ** 2).sum(-1).argmin(-1)], last_token=lambda x: x[:, -1],
        alibi=lambda x: _attention(x) - jnp.abs(jnp.arange(5)[:, None] - jnp.arange(6)), learned_positions=lambda x: x + _E[:5],
        flax_attention=_flax(lambda flax, x: flax.MultiHeadDotProductAttention(2)), backward_rnn=lambda x: _rnn(x, True)[1],
        merged=lambda x: (x.reshape(-1, 6) @ _W + _B).reshape(x.shape[0], -1, 16), conv_1d=lambda x: _conv(x, _a(3, 6, 4)),
        masked_attention=lambda x: _attention(x, (x[..., 0] > 0)[:, None, None]), fourier_mixing=lambda x: jnp.fft.fft2(x).real,
        both_ways=lambda x: jnp.concatenate([_rnn(x)[1], _rnn(x, True)[1]], -1), sorted_to_experts=_sorted_to_experts,
        adjacency=lambda x: jnp.einsum("ts,bsd->btd", nn.softmax(_a(5, 5)), x),
        nnx_rnn=_nnx(lambda nnx, rngs: nnx.RNN(nnx.GRUCell(6, 4, rngs=rngs))), transformer=lambda x: _block(_block(x), _CAUSAL),
        merged_norm=lambda x: _layer_norm(x.reshape(-1, 6)).reshape(x.shape),
        grouped_conv=lambda x: _conv(x, _a(3, 2, 6), feature_group_count=3), causal_attention=partial(_attention, mask=_CAUSAL),
        flax_rnn=_flax(lambda flax, x: flax.RNN(flax.OptimizedLSTMCell(4))),
        multi_query=lambda x: _attention(x, kv=x.mean(1, keepdims=True)),
        dilated_conv=lambda x: _conv(x, _a(2, 6, 4), rhs_dilation=(2,)),
        causal_conv=lambda x: _conv(x, _a(3, 6, 4), padding=[(2, 0)]),
        cross_attention=lambda x: _attention(x[:, :2], kv=x[:, 2:]),
    ),
    *_group(
        (8, 8, 3),
        flax_cnn=_flax(lambda flax, x: flax.Sequential([flax.Conv(4, (3, 3)), partial(flax.max_pool, window_shape=(2, 2))])),
        pixel_shuffle=lambda x: jnp.tile(x, (1, 1, 1, 4)).reshape(-1, 8, 8, 2, 2, 3).swapaxes(2, 3).reshape(-1, 16, 16, 3),
        nnx_cnn=_nnx(lambda nnx, rngs: nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs))),
        warped=lambda x: vmap(lambda one: jsp.ndimage.map_coordinates(one[..., 0], jnp.mgrid[:4, :4] + 0.5, 1))(x),
        equinox_conv=_equinox(lambda eqx, key: lambda x: eqx.Conv2d(3, 4, 3, key=key)(jnp.moveaxis(x, -1, 0))),
        patches=lambda x: x.reshape(-1, 2, 4, 2, 4, 3).swapaxes(2, 3).reshape(-1, 4, 48) @ _a(48, 6), max_pooled=_pooled,
        channels_first=lambda x: lax.conv(jnp.moveaxis(x, -1, 1), _a(4, 3, 3, 3), (1, 1), "SAME"),
        squeeze_and_excite=lambda x: x * nn.sigmoid(x.mean((1, 2), keepdims=True) @ _a(3, 3)),
        transposed_conv=lambda x: lax.conv_transpose(x, _a(3, 3, 3, 4), (2, 2), "SAME"), global_pooled=lambda x: x.mean((1, 2)),
        nearest_pixels=lambda x: jax.image.resize(x, (len(x), 4, 4, 3), "nearest"), flipped_image=lambda x: x[:, :, ::-1],
        upsampled=lambda x: jax.image.resize(x, (len(x), 16, 16, 3), "bilinear"), haiku_conv=_haiku(lambda hk: hk.Conv2D(4, 3)),
        depthwise=lambda x: _conv(x, _a(3, 3, 1, 6), feature_group_count=3), gram=lambda x: jnp.einsum("bhwc,bhwd->bcd", x, x),
        dilated=lambda x: _conv(x, _a(3, 3, 3, 4), rhs_dilation=(2, 2)), fft_2d=lambda x: jnp.abs(jnp.fft.fft2(x, axes=(1, 2))),
        cubic=lambda x: jax.image.resize(x, (len(x), 5, 5, 3), "cubic"), conv_2d=lambda x: nn.relu(_conv(x, _a(3, 3, 3, 4))),
        strided=lambda x: _conv(x, _a(3, 3, 3, 4), (2, 2), "VALID"), to_bytes=lambda x: (x.clip(0, 1) * 255).astype(jnp.uint8),
        mean_pooled_image=lambda x: _pooled(x, lax.add, 0.0) / 4, instance_norm=lambda x: _layer_norm(x, (1, 2)),
        pointwise=lambda x: _conv(x, _a(1, 1, 3, 8)),
    ),
    *_group((4, 4, 4, 2), conv_3d=lambda x: _conv(x, _a(2, 2, 2, 2, 3))),
    *_group(
        _INDEX,
        narrow_language_model=lambda i: (_block(jnp.asarray(_E)[i]).astype(jnp.bfloat16) @ jnp.bfloat16(_E.T)).argmax(-1),
        repeated_by_row=lambda i: vmap(lambda one: lax.fori_loop(0, one[0], lambda _, x: x * 2 + 1, one))(i),
        gumbel=lambda i: vmap(lambda one: random.categorical(random.key(one[0]), jnp.zeros(9)))(i),
        edit=lambda i: lax.scan(lambda c, t: (jnp.minimum(c + 1, t[:, None]), None), i, i.T)[0],
        permuted=lambda i: vmap(lambda one: random.permutation(random.key(one[0]), one))(i),
        gamma=lambda i: vmap(lambda one: random.gamma(random.key(one[0]), 2.0, (3,)))(i),
        scattered_in_row=lambda i: vmap(lambda one: jnp.zeros(9).at[one].add(1.0))(i), sorted_tokens=lambda i: jnp.sort(i, 1),
        seeded=lambda i: vmap(lambda one: random.normal(random.key(one[0]), (3,)))(i),
        language_model=lambda i: _block(jnp.asarray(_E)[i], _CAUSAL) @ _E.T, out_of_range=lambda i: jnp.asarray(_E)[:2][i * 5],
        counted=lambda i: vmap(lambda one: jnp.bincount(one, length=5))(i), shifted_bits=lambda i: (i << 3) ^ (i >> 1) & 7,
        by_length=lambda i: jnp.where(jnp.arange(5) < i[:, :1], i, -1), embedded=lambda i: jnp.asarray(_E)[i].mean(1),
        one_hot=lambda i: nn.one_hot(i, 7) @ _a(7, 4),
    ),
    *_group((6,), ((1,), np.uint32), noise=_noise, diffused=_diffused),
    *_group((6,), (6,), difference=lambda a, b: jnp.abs(a - b), similarity=lambda a, b: (a * b).sum(-1)),
    *_group(
        (5, 6), ((), np.int32),
        cached=lambda x, n: vmap(lambda cache, at: lax.dynamic_update_slice(cache, jnp.ones((1, 6)), (at, 0)))(x, n),
        with_lengths=lambda x, n: jnp.where(jnp.arange(5)[None, :, None] < n[:, None, None], x, 0).sum(1),
        chosen=lambda x, n: x[jnp.arange(len(n)), n],
    ),
    *_group(((3,), np.float16), half=lambda x: nn.softmax(x * 3), half_norm=lambda x: _layer_norm(x, -1)),
    *_group(((4,), np.bool_), logic=lambda x: (x.any(1), x.sum(1), ~x)),
]  # fmt: skip


def _batch_norm(x: Any) -> Any:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


def _with_capacity(x: Any) -> Any:
    """A mixture of experts in which each expert takes two tokens of the whole batch, and others get nothing."""
    tokens = x.reshape(-1, 6)
    chosen = nn.one_hot((tokens @ _GATE).argmax(-1), 4)
    kept = chosen * (jnp.cumsum(chosen, 0) <= 2)
    return jnp.einsum("te,td,edf->tf", kept, tokens, _EXPERTS).reshape(x.shape)


def _clustered(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, c: c + x.mean(0) * 0.1, x)


MIXED = [
    *_group(
        (6,),
        flax_batch_norm=lambda x: importlib.import_module("flax.linen").BatchNorm(False).init_with_output(random.key(0), x)[0],
        looped_together=lambda x: lax.while_loop(lambda c: c[0] < (x > 0).sum(), lambda c: (c[0] + 1, c[1] * 0.9), (0, x))[1],
        convolved_over_batch=lambda x: vmap(lambda one: jnp.convolve(one, _B[:3])[: len(one)], 1, 1)(x), clustered=_clustered,
        scanned_state=lambda x: lax.scan(lambda c, one: (jnp.tanh(c + one),) * 2, jnp.zeros(6), x)[1], looped_until_all=_until,
        chosen_by_all=lambda x: lax.switch((x > 0).sum() % 3, (jnp.sin, jnp.cos, jnp.tanh), x), centred=lambda x: x - x.mean(0),
        quantised_by_all=lambda x: jnp.round(x / jnp.abs(x).max() * 8) * jnp.abs(x).max(), all_pairs=lambda x: (x @ x.T).sum(1),
        nnx_batch_norm=_nnx(lambda nnx, rngs: nnx.BatchNorm(6, rngs=rngs), training=True), rolled=lambda x: jnp.roll(x, 1, 0),
        dropout=lambda x: jnp.where(random.bernoulli(random.key(3), 0.5, x.shape), x, 0), beside_first=lambda x: x - x[0],
        scanned=lambda x: lax.scan(lambda c, one: (c + one, c * one), jnp.ones(6), x)[1], flipped=lambda x: x[::-1],
        nnx_dropout=_nnx(lambda nnx, rngs: nnx.Dropout(0.5, rngs=rngs), training=True),
        reshaped=lambda x: x.reshape(6, -1).sum(1).repeat(x.shape[0])[: x.shape[0]], by_number_of_rows=lambda x: x / x.shape[0],
        unique=lambda x: jnp.unique(jnp.round(x[:, 0]), size=len(x), fill_value=0), sort_over_batch=lambda x: jnp.sort(x, 0),
        interpolated_by_batch=lambda x: jnp.interp(x, jnp.sort(x[:, 0]), x[:, 1]), standardised_by_all=lambda x: x / jnp.std(x),
        distances=lambda x: jnp.linalg.norm(x[:, None] - x, axis=-1).mean(1), batch_norm=lambda x: nn.relu(_batch_norm(x @ _W)),
        gradient_of_square=lambda x: jax.grad(lambda x: jnp.sum(x) ** 2)(x), haiku_batch_norm=_haiku(_haiku_norm, True, True),
        argmax_over_batch=lambda x: jnp.broadcast_to(x.argmax(0), x.shape), beside_largest=lambda x: x / (1 + jnp.abs(x).max()),
        first_broadcast=lambda x: jnp.broadcast_to(x[:1], x.shape) + 0 * x, transposed_shape=lambda x: x.T.reshape(x.shape),
        contrastive=lambda x: jnp.diagonal(nn.log_softmax(x @ x.T / 3)), attention_over_batch=lambda x: nn.softmax(x @ x.T) @ x,
        one_noise=lambda x: x + random.normal(random.key(3), x.shape), shuffled=lambda x: random.permutation(random.key(3), x),
        any_of_all=lambda x: jnp.where((x[:, 0] > 1).any(), x, 2 * x), gathered=lambda x: x[jnp.argmax(x, 0)][:, 0].sum() + x,
        rank_over_batch=lambda x: jnp.argsort(jnp.argsort(x, 0), 0), neighbours=lambda x: x + jnp.pad(x, ((1, 0), (0, 0)))[:-1],
        whitened=lambda x: x @ jnp.linalg.inv(x.T @ x + jnp.eye(6)), fft_over_batch=lambda x: jnp.abs(jnp.fft.fft(x, axis=0)) ,
        positions_of_rows=lambda x: x + jnp.arange(len(x))[:, None], log_softmax_over_batch=lambda x: nn.log_softmax(x, 0),
        median_of_batch=lambda x: x - jnp.median(x, 0), softmax_over_batch=lambda x: nn.softmax(x, 0),
        cumsum_over_batch=lambda x: jnp.cumsum(x, 0), rank_of_sums=lambda x: jnp.argsort(x.sum(1)),
        global_norm=lambda x: x / jnp.linalg.norm(x), counted_positive=lambda x: x * (x > 0).sum(),
        centred_outer=lambda x: x @ jnp.cov(x.T),
    ),
    *_group(
        (5, 6),
        time_first=lambda x: lax.scan(lambda h, one: (jnp.tanh(one + h),) * 2, jnp.zeros((5, 6)), x)[1],
        attention_with_others=lambda x: _attention(x.reshape(1, -1, 6)).reshape(x.shape), with_capacity=_with_capacity,
        sequence_norm=lambda x: _layer_norm(x, (0, 2)), mean_token=lambda x: x - x.mean((0, 1)),
    ),
    *_group(
        (8, 8, 3),
        image_batch_norm=lambda x: _layer_norm(_conv(x, _a(3, 3, 3, 4)), (0, 1, 2)), brightest=lambda x: x / x.max(),
        batch_as_depth=lambda x: _conv(x[None], _a(3, 3, 3, 3, 3))[0],
    ),
    *_group(
        _INDEX,
        one_seed=lambda i: random.normal(random.key(i[0, 0]), (3,)) + i[:, :3], longest=lambda i: (i + 1) * i[:, 1:].sum(),
        first_seed=lambda i: random.normal(random.key(i[0, 0]), (len(i), 3)),
        counted_in_all=lambda i: jnp.zeros(9).at[i].add(1.0)[i],
    ),
]  # fmt: skip

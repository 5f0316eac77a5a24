"""Recurrent layers on one device, written as their definitions: each document by itself, with dense matrices."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional

SLOW = 0.05  # decay of a token: a fast one hides a lost state


@dataclass
class Problem:
    """Inputs of a layer on a whole sequence: those with tokens `[batch, length, ...]`, and the state before them."""

    kind: str
    tokens: dict
    shared: dict
    state: torch.Tensor
    options: dict = field(default_factory=dict)

    def leaves(self):
        return [*self.tokens.values(), *self.shared.values(), self.state]


def problem(kind, batch, length, seed=0):
    """Return random inputs in fp64: value heads that share keys, V unlike K, decays near 1."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def at(*shape):
        return draw(batch, length, *shape)

    h, hv, k, v = 2, 4, 4, 3
    if kind in ("gated_delta", "kda"):
        decay = -SLOW * functional.softplus(at(hv, *((k,) if kind == "kda" else ())))
        tokens = {"q": at(h, k), "k": at(h, k), "v": at(hv, v), "g": decay, "beta": 2 * at(hv).sigmoid()}
        return Problem(kind, tokens, {}, draw(batch, hv, k, v))
    if kind == "decay":
        tokens = {"q": at(h, k), "k": at(h, k), "v": at(hv, v), "g": -SLOW * at(hv).exp()}
        return Problem(kind, tokens, {}, draw(batch, hv, k, v))
    if kind == "ssd":
        tokens = {"x": at(hv, v), "dt": at(hv), "B": at(h, k), "C": at(h, k)}
        shared = {"A": -SLOW * draw(hv).exp(), "D": draw(hv), "dt_bias": draw(hv)}
        options = {"dt_softplus": True, "dt_limit": (0.1, 1.0)}  # both limits cut some steps
        return Problem(kind, tokens, shared, draw(batch, hv, v, k), options)
    if kind == "scan":
        return Problem(kind, {"a": (-SLOW * at(hv, v).exp()).exp(), "b": at(hv, v)}, {}, draw(batch, hv, v))
    width = {"conv": 4, "narrow conv": 1}[kind]
    shared = {"weight": draw(5, width), "bias": draw(5)}
    return Problem(kind, {"x": at(5)}, shared, draw(batch, width - 1, 5), {"activation": "silu"})


def whole(case, lengths, *, continued):
    """Return the outputs `[batch, length, ...]` and the final states of a batch on one device.

    Args:
        case: The problem.
        lengths: For each sample the lengths of its documents; tokens after them are left out.
        continued: Whether the first document continues the state.
    """
    outs, states = [], []
    for sample, each in enumerate(lengths):
        begin, parts = 0, []
        state = case.state[sample] if continued else torch.zeros_like(case.state[sample])
        for i, tokens in enumerate(each):
            state = state if i == 0 else torch.zeros_like(state)
            inputs = {name: t[sample, begin : begin + tokens] for name, t in case.tokens.items()}
            out, state = STEPS[case.kind](state, **inputs, **case.shared, **case.options)
            parts.append(out)
            begin += tokens
        outs.append(torch.cat(parts))
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def _delta(state, q, k, v, g, beta):
    repeats = v.shape[1] // k.shape[1]
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(repeats, 1) for t in (q, k))
    unit, outs = torch.eye(k.shape[2], dtype=k.dtype), []
    for t in range(len(v)):
        outer = torch.einsum("h,hi,hj->hij", beta[t], k[t], k[t])
        decay = torch.diag_embed(g[t].exp() if g.dim() == 3 else g[t, :, None].exp().expand_as(k[t]))
        state = (unit - outer) @ decay @ state + torch.einsum("h,hi,hj->hij", beta[t], k[t], v[t])
        outs.append(torch.einsum("hij,hi->hj", state, q[t]) * k.shape[2] ** -0.5)
    return torch.stack(outs), state


def _decay(state, q, k, v, g, scale=None):
    """As weights of all pairs of tokens, without a state."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (t.repeat_interleave(repeats, 1) for t in (q, k))
    total = g.cumsum(0)
    weights = torch.einsum("thk,shk->hts", q, k) * (total.T[:, :, None] - total.T[:, None]).exp().tril()
    out = torch.einsum("hts,shv->thv", weights, v) + torch.einsum("thk,hkv,th->thv", q, state, total.exp())
    left = (total[-1] - total).exp()
    state = total[-1].exp()[:, None, None] * state + torch.einsum("sh,shk,shv->hkv", left, k, v)
    return out * (k.shape[2] ** -0.5 if scale is None else scale), state


def _ssd(state, x, dt, B, C, A, D, dt_bias, dt_softplus, dt_limit):
    assert dt_softplus
    step = functional.softplus(dt + dt_bias).clamp(*dt_limit)
    out, state = _decay(state.mT, C, B, x * step[..., None], A * step, scale=1)
    return out + D[:, None] * x, state.mT


def _scan(state, a, b):
    outs = []
    for t in range(len(b)):
        state = a[t] * state + b[t]
        outs.append(state)
    return torch.stack(outs), state


def _conv(state, x, weight, bias, activation):
    assert activation == "silu"
    longer = torch.cat([state, x])
    out = functional.conv1d(longer.T[None], weight[:, None], bias, groups=x.shape[1])[0].T
    return functional.silu(out), longer[len(longer) - len(state) :]


STEPS = {"gated_delta": _delta, "kda": _delta, "decay": _decay, "ssd": _ssd, "scan": _scan}
STEPS |= {"conv": _conv, "narrow conv": _conv}

"""ModelCenter's Attention as far as the README uses it: its constructor, parameters and arithmetic, written anew."""

import bmtrain as bmt
import torch


class Linear(bmt.DistributedModule):
    def __init__(self, dim_in, dim_out, dtype):
        super().__init__()
        initial = bmt.ParameterInitializer(torch.nn.init.normal_, std=dim_in**-0.5)
        self.weight = bmt.DistributedParameter(torch.empty(dim_out, dim_in, dtype=dtype), init_method=initial)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


class Attention(bmt.DistributedModule):
    def __init__(
        self, dim_in, dim_head, num_heads, dtype=torch.half, pos_bias_type="none", attn_scale=False
    ):  # the arguments of ModelCenter's that the README passes
        super().__init__()
        self.dim_head, self.pos_bias_type, self.attn_scale = dim_head, pos_bias_type, attn_scale
        self.project_q, self.project_k, self.project_v = (Linear(dim_in, num_heads * dim_head, dtype) for _ in range(3))
        self.attention_out = Linear(num_heads * dim_head, dim_in, dtype)

    def forward(self, query, key_value, attention_mask, position_bias=None):
        """`attention_mask` is `[batch, len_q, len_k]`, true where a key is seen; `position_bias` turns q and k."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.dim_head)).transpose(1, 2)
            for project, x in ((self.project_q, query), (self.project_k, key_value), (self.project_v, key_value))
        )
        if self.pos_bias_type == "rotary":
            q, k = position_bias(q, k)
        scores = q @ k.transpose(2, 3) * (self.dim_head**-0.5 if self.attn_scale else 1.0)
        weights = scores.masked_fill(~attention_mask[:, None], -torch.inf).softmax(-1)
        return self.attention_out((weights @ v).transpose(1, 2).flatten(2))

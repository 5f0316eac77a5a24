"""Other people's packages, where they are installed. Each gets the kernel under test where it lets us choose."""

import importlib
import importlib.util
import sys

from torch import Tensor

from bmburst.bench.cells import Cell
from bmburst.bench.methods.flash_attention_2 import flash_attention_2
from bmburst.bench.methods.method import Attend, Method, Setting


class Package(Method):
    """A method whose code is a package's."""

    module = ""
    distribution = ""

    def refusal(self, cell: Cell) -> str | None:
        """See `Method.refusal`."""
        if self.module not in sys.modules and importlib.util.find_spec(self.module) is None:
            return f"the package {self.distribution} is not installed"
        return super().refusal(cell)

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        return "zigzag" if cell.is_causal else "contiguous"


class Yunchang(Package):
    """yunchang (USP, arXiv:2405.07719): Ulysses inside as far as heads go, its ring outside."""

    name = "yunchang"
    module, distribution = "yunchang", "yunchang"

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return None if cell.suite != "accuracy" else "its groups are those of the whole run"

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel):
            package = importlib.import_module(self.module)
        ranks = setting.party.size
        inside = max(n for n in range(1, ranks + 1) if ranks % n == 0 and cell.kv_heads % n == 0)
        package.set_seq_parallel_pg(inside, ranks // inside, setting.party.rank, ranks)
        attention = package.LongContextAttention(ring_impl_type="zigzag" if cell.is_causal else "basic")
        return lambda q, k, v: attention(q, k, v, causal=cell.is_causal)


class BurstAttentionPackage(Package):
    """Burst-Attention's own package, with its backward that moves queries."""

    name = "burst-attention"
    module, distribution = "burst_attn", "Burst-Attention"

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel):
            package = importlib.import_module(self.module)
        group = None if setting.party.is_world else setting.party.group
        levels = [None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = package.burst_attn_func(q, k, v, None, "cuda", cell.is_causal, True, False, group, levels)
            return out

        return attend

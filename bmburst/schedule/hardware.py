"""Hardware files: the rates, bandwidths, latencies and sizes of a machine, each with its source, as TOML."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bmburst.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Rates, bandwidths, latencies and sizes of a node of GPUs. Each rank has one GPU.

    Attributes:
        name: Name of the machine.
        peak: Peak FLOP/s, the reference of model FLOPs utilisation (MFU).
        matmul: FLOP/s of a large product of 16-bit matrices.
        matmul_sustained: Fraction of that rate that products keep for longer than a second: power limits the clock.
        matmul_half_rows: Tokens at which a matrix product runs at half that rate.
        attention_forward: FLOP/s of the attention kernel on long sequences; a causal mask counts half.
        attention_backward: The same, backward.
        attention_half_rows: Tokens of a tile at which the kernel runs at half those rates.
        attention_call: Launch overhead of each kernel call in seconds.
        attention_tail: Fraction of a tile's time on one multiprocessor during which the others idle at the end of a
            call.
        multiprocessors: Multiprocessors of a GPU.
        cut_loss: Fraction by which the kernel is slower if the scores are divided into rectangles.
        call_start: Host seconds until the first kernel of a pass runs, and for each further kernel call or hop.
        pass_host: Host seconds of a pass of a head exchange, without its kernels and transfers.
        graph_host: Host seconds to launch a kernel as a CUDA graph.
        collective_host: Host seconds of a collective that exchanges heads, with the copies before and after it.
        message_host: Host seconds of a message to a rank by copy engines, to this rank too.
        layer_host: Host seconds for a block, forward and backward, with attention on one rank; embedding, head and
            optimizer count as two blocks.
        layer_graph_host: The same for a block whose kernels around attention are CUDA graphs, with attention on several
            ranks.
        zero_host: Host seconds by which a block takes longer for each further rank of a ZeRO group.
        memory: Bytes of memory of a GPU.
        memory_bandwidth: Bytes per second that elementwise kernels read and write.
        reserved: Bytes of a GPU that torch cannot use: CUDA context and libraries, without NCCL.
        nccl_memory: Bytes of a GPU that NCCL allocates for each GPU of the node, with several ranks.
        workspace: Bytes of torch's allocator that matrix products keep as workspace.
        peer_bandwidth: Bytes per second into a rank by copy engines, inside a node.
        peer_latency: Seconds from the start of an exchange to its first byte.
        peer_exposed: Fraction of a transfer's time by which overlapping attention kernels slow down.
        nccl_bandwidth: The same three for NCCL's send and receive inside a node.
        nccl_latency: See above.
        nccl_exposed: See above.
        all_to_all_bandwidth: Bytes per second into a rank of NCCL's sends from all GPUs of a node at once.
        collective_bandwidth: Bytes per second into a rank of an all-gather over the GPUs of a node.
        inter_bandwidth: Bytes per second into a rank from another node, if all GPUs of the node receive.
        inter_lone_bandwidth: The same if only one GPU of the node receives.
        inter_latency: Seconds from the start of a transfer between nodes to its first byte.
        inter_exposed: As `nccl_exposed`, between nodes.
        host_memory: Bytes of host memory of a node.
        host_bandwidth: Bytes per second between a GPU and its host, in each direction.
        host_adam: Weights per second that a GPU's share of the host's processors update by AdamW.
    """

    name: str
    peak: float
    matmul: float
    matmul_sustained: float
    matmul_half_rows: float
    attention_forward: float
    attention_backward: float
    attention_half_rows: float
    attention_call: float
    attention_tail: float
    multiprocessors: float
    cut_loss: float
    call_start: float
    pass_host: float
    graph_host: float
    collective_host: float
    message_host: float
    layer_host: float
    layer_graph_host: float
    zero_host: float
    memory: float
    memory_bandwidth: float
    reserved: float
    nccl_memory: float
    workspace: float
    peer_bandwidth: float
    peer_latency: float
    peer_exposed: float
    nccl_bandwidth: float
    nccl_latency: float
    nccl_exposed: float
    all_to_all_bandwidth: float
    collective_bandwidth: float
    inter_bandwidth: float
    inter_lone_bandwidth: float
    inter_latency: float
    inter_exposed: float
    host_memory: float
    host_bandwidth: float
    host_adam: float

    def matmul_seconds(self, flops: float, rows: float) -> float:
        """Return the seconds of matrix products over `rows` tokens."""
        return flops / self.matmul * (1 + self.matmul_half_rows / max(rows, 1.0))

    def memory_seconds(self, nbytes: float) -> float:
        """Return the seconds of elementwise kernels that read and write `nbytes` bytes."""
        return nbytes / self.memory_bandwidth

    def attention_rate(self, *, backward: bool) -> float:
        """Return the FLOP/s of the attention kernel in a pass."""
        return self.attention_backward if backward else self.attention_forward


@lru_cache(maxsize=64)
def sustained(hardware: Hardware) -> Hardware:
    """Return a machine whose `matmul` is the rate that products keep for longer than a second."""
    return replace(hardware, matmul=hardware.matmul * hardware.matmul_sustained, matmul_sustained=1.0)


NUMBERS = tuple(declared.name for declared in fields(Hardware) if declared.name != "name")
"""The tables of a hardware file."""
_SINCE = {
    **{"host_adam": 3.5e9, "matmul_sustained": 1.0, "layer_graph_host": 1.8e-3},
    **{"pass_host": 5.2e-4, "graph_host": 2.8e-5, "collective_host": 1e-4, "message_host": 7e-5, "zero_host": 6e-4},
}
"""Defaults of numbers that older files lack: those of an H200's host, and no limit by power."""
_MAY_BE_ZERO = (
    *("matmul_half_rows", "attention_half_rows", "attention_call", "attention_tail", "cut_loss", "call_start"),
    *("pass_host", "graph_host", "collective_host", "message_host", "zero_host"),
    *("layer_host", "layer_graph_host", "reserved", "nccl_memory", "workspace", "peer_latency", "peer_exposed"),
    *("nccl_latency", "nccl_exposed", "inter_latency", "inter_exposed"),
)

HOST = "cpu"
"""The device name of a rank without a GPU. Its file holds guesses, and also gives the cost of links without GPUs."""
DEFAULT = "h200"
"""The machine whose numbers are used for a GPU without a file: strategies can still be compared."""
_SLOWER_BOARDS = {"PCIE", "NVL"}
"""Hopper boards with the name, but not the rates, of the boards that the files describe."""


def shipped() -> tuple[str, ...]:
    """Return the names of the machines whose hardware files are part of the package."""
    names = (path.name.removesuffix(".toml") for path in _folder().iterdir())
    return tuple(sorted(name for name in names if name != HOST))


def load_hardware(name: str) -> Hardware:
    """Return a machine.

    Args:
        name: One of `shipped()`, or the path of a file as `bmburst plan --calibrate` writes it.

    Raises:
        UserError: There is no such machine or file, or the file is incomplete.
    """
    return hardware_from(read_facts(name), name)


def machine_of(device: str) -> str | None:
    """Return the machine of `shipped()` with that GPU, or None; slower boards of the same name do not match.

    Args:
        device: The result of `torch.cuda.get_device_name`, for example "NVIDIA H200".
    """
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    is_slower = bool(words & _SLOWER_BOARDS)
    return next((name for name in shipped() if name.upper() in words and (name.startswith("a") or not is_slower)), None)


def hardware_of(device: str) -> Hardware | None:
    """Return the machine of a GPU by its name, or None; see `machine_of`."""
    machine = machine_of(device)
    return None if machine is None else load_hardware(machine)


@lru_cache(maxsize=64)
def hardware_like(device: str) -> Hardware:
    """Return the machine that the cost model uses for a device: its own, `HOST`, or `DEFAULT` if it has no file.

    Args:
        device: The result of `torch.cuda.get_device_name`, or `HOST`.
    """
    return load_hardware(HOST if device == HOST else machine_of(device) or DEFAULT)


def read_facts(name: str) -> dict[str, Any]:
    """Return the content of a hardware file: its name, and value, unit, kind and source of each number.

    The kind is "measured" (on this kind of machine), "spec" (manufacturer), "published" (by others) or "assumed". A
    file of the package may name another one, `like`: what it lacks is assumed to be as there.

    Raises:
        UserError: As `load_hardware`.
    """
    path = Path(name)
    is_path = path.suffix == ".toml" or path.parent != Path()
    if not is_path and name not in (*shipped(), HOST):
        raise _unknown_hardware(name)
    try:
        facts = tomllib.loads((path if is_path else _folder() / f"{name}.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"hardware {name}: cannot be read: {error.strerror}\nallowed: {', '.join(shipped())}, or a file\n"
            "fix: bmburst plan --calibrate --output machine.toml writes one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"hardware {name}: is not a TOML file: {error}\nfix: bmburst plan --calibrate") from None
    if is_path or "like" not in facts:
        return facts
    other = read_facts(facts.pop("like"))
    taken = {key: {**other[key], "kind": "assumed", "source": f"as on {other['name']}"} for key in NUMBERS}
    return taken | facts


def hardware_from(facts: Mapping[str, Any], source: str) -> Hardware:
    """Return the machine that a file describes.

    Args:
        facts: See `read_facts`.
        source: The file, for messages.

    Raises:
        UserError: A key is missing or unknown, or its value is not a number.
    """
    for key in facts:
        if key not in (*NUMBERS, "name"):
            raise UserError(f"hardware {source}: {unknown('number', key, NUMBERS)}")
    facts = {**_SINCE, **facts}
    missing = [key for key in NUMBERS if key not in facts]
    if missing:
        raise UserError(
            f"hardware {source}: lacks {', '.join(missing[:4])}{' and more' if len(missing) > 4 else ''}\n"
            "fix: bmburst plan --calibrate --output machine.toml writes a complete file"
        )
    return Hardware(name=str(facts.get("name", source)), **{key: _number(facts[key], key, source) for key in NUMBERS})


def _number(fact: Any, key: str, source: str) -> float:
    value = fact.get("value") if isinstance(fact, Mapping) else fact
    least = 0 if key in _MAY_BE_ZERO else 1e-12
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e30:
        raise UserError(
            f"hardware {source}: {key} is {value!r}\n"
            f"allowed: a number {'of at least 0' if not least else 'above 0'}, as value = ... under [{key}]\n"
            "fix: correct it, or write the file again with bmburst plan --calibrate"
        )
    return float(value)


def _unknown_hardware(name: str) -> UserError:
    *lines, _ = str(unknown("hardware", name, shipped())).splitlines()
    return UserError("\n".join([*lines, "fix: give a known name, or the path of a file of bmburst plan --calibrate"]))


def _folder() -> Any:
    return files("bmburst.schedule") / "machines"

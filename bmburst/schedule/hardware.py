"""Hardware files: the rates, bandwidths, latencies and sizes of a machine, each with its source, as TOML."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bmburst.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a node of GPUs gives; a rank has one GPU.

    Attributes:
        name: What it is called.
        peak: FLOP/s that model FLOPs utilisation is taken of.
        matmul: FLOP/s of a large product of 16-bit matrices.
        matmul_half_rows: Tokens at which a product runs at half that rate.
        attention_forward: FLOP/s of the attention kernel on long sequences, a causal mask counted as half.
        attention_backward: The same, backward.
        attention_half_rows: Tokens of a tile at which it runs at half those rates.
        attention_call: Seconds that each kernel call costs beside its work: its launch.
        attention_tail: Share of a tile's time on one multiprocessor, for which a call leaves the others without work
            at its end.
        multiprocessors: Of a GPU.
        cut_loss: Share of its time that the kernel takes longer where scores are cut into rectangles.
        call_start: Seconds of the host until the first kernel of a pass runs, and for each kernel call that follows.
        layer_host: Seconds of the host for a block, forward and backward; embedding, head and optimizer are two more.
        memory: Bytes of a GPU.
        memory_bandwidth: Bytes a second that elementwise kernels read and write.
        reserved: Bytes of a GPU that are none of torch's: context, libraries but NCCL.
        nccl_memory: Bytes of a GPU that NCCL takes for each GPU of the node, where ranks are several.
        workspace: Bytes of torch's allocator that matrix products keep as room to work in.
        peer_bandwidth: Bytes a second into a rank by copy engines, inside a node.
        peer_latency: Seconds from the start of an exchange to its first byte.
        peer_exposed: Share of a transfer's time that attention beside it takes longer.
        nccl_bandwidth: The same three for NCCL's send and receive inside a node.
        nccl_latency: See above.
        nccl_exposed: See above.
        all_to_all_bandwidth: Bytes a second into a rank of NCCL's sends from all GPUs of a node at once.
        collective_bandwidth: Bytes a second into a rank of an all-gather over the GPUs of a node.
        inter_bandwidth: Bytes a second into a rank from another node, all GPUs of the node at once.
        inter_lone_bandwidth: The same where only one GPU of the node receives.
        inter_latency: Seconds from the start of a transfer between nodes to its first byte.
        inter_exposed: As `nccl_exposed`, between nodes.
        host_memory: Bytes of a node's host.
        host_bandwidth: Bytes a second between a GPU and its host.
    """

    name: str
    peak: float
    matmul: float
    matmul_half_rows: float
    attention_forward: float
    attention_backward: float
    attention_half_rows: float
    attention_call: float
    attention_tail: float
    multiprocessors: float
    cut_loss: float
    call_start: float
    layer_host: float
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

    def matmul_seconds(self, flops: float, rows: float) -> float:
        """Return the time of products over so many tokens."""
        return flops / self.matmul * (1 + self.matmul_half_rows / max(rows, 1.0))

    def memory_seconds(self, nbytes: float) -> float:
        """Return the time of elementwise work that reads and writes so many bytes."""
        return nbytes / self.memory_bandwidth


NUMBERS = tuple(declared.name for declared in fields(Hardware) if declared.name != "name")
"""The tables of a hardware file."""
_MAY_BE_ZERO = (
    *("matmul_half_rows", "attention_half_rows", "attention_call", "attention_tail", "cut_loss", "call_start"),
    *("layer_host", "reserved", "nccl_memory", "workspace", "peer_latency", "peer_exposed", "nccl_latency"),
    *("nccl_exposed", "inter_latency", "inter_exposed"),
)

HOST = "cpu"
"""What a rank without a GPU says for its device. Its file holds guesses; links without GPUs are priced by it too."""
DEFAULT = "h200"
"""The machine by whose numbers a GPU that no file describes is priced: ways can still be compared."""
_SLOWER_BOARDS = {"PCIE", "NVL"}
"""Of Hopper: they have the name, and not the rates, of the boards that the files describe."""


def shipped() -> tuple[str, ...]:
    """Return the names of the machines whose numbers come with the package."""
    names = (path.name.removesuffix(".toml") for path in _folder().iterdir())
    return tuple(sorted(name for name in names if name != HOST))


def load_hardware(name: str) -> Hardware:
    """Return a machine.

    Args:
        name: One of `shipped()`, or the path of a file as `bmburst plan --calibrate` writes it.

    Raises:
        UserError: There is no such machine or file, or the file does not hold what a machine needs.
    """
    return hardware_from(read_facts(name), name)


def machine_of(device: str) -> str | None:
    """Return which of `shipped()` has GPUs that call themselves so, None where none has; slower boards are not.

    Args:
        device: What `torch.cuda.get_device_name` says, for example "NVIDIA H200".
    """
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    is_slower = bool(words & _SLOWER_BOARDS)
    return next((name for name in shipped() if name.upper() in words and (name.startswith("a") or not is_slower)), None)


def hardware_of(device: str) -> Hardware | None:
    """Return the machine of a GPU by its name, None where there is none; see `machine_of`."""
    machine = machine_of(device)
    return None if machine is None else load_hardware(machine)


@lru_cache(maxsize=64)
def hardware_like(device: str) -> Hardware:
    """Return the machine that a device is priced by: its own file's, `HOST`, or `DEFAULT` where none describes it.

    Args:
        device: What `torch.cuda.get_device_name` says, or `HOST`.
    """
    return load_hardware(HOST if device == HOST else machine_of(device) or DEFAULT)


def read_facts(name: str) -> dict[str, Any]:
    """Return what a machine's file holds: its name, and for each number value, unit, kind and source.

    The kind says how it is known: "measured" on such a machine, "spec" of its maker, "published" by others, "assumed".

    Raises:
        UserError: As `load_hardware`.
    """
    path = Path(name)
    is_path = path.suffix == ".toml" or path.parent != Path()
    if not is_path and name not in (*shipped(), HOST):
        raise _unknown_hardware(name)
    try:
        text = path.read_text(encoding="utf-8") if is_path else (_folder() / f"{name}.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise UserError(
            f"hardware {name}: cannot be read: {error.strerror}\nallowed: {', '.join(shipped())}, or a file\n"
            "fix: bmburst plan --calibrate --output machine.toml writes one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"hardware {name}: is no TOML file: {error}\nfix: one of bmburst plan --calibrate") from None


def hardware_from(facts: Mapping[str, Any], source: str) -> Hardware:
    """Return the machine that a file describes.

    Args:
        facts: See `read_facts`.
        source: The file, for messages.

    Raises:
        UserError: A number is missing, unknown, or no number.
    """
    for key in facts:
        if key not in (*NUMBERS, "name"):
            raise UserError(f"hardware {source}: {unknown('number', key, NUMBERS)}")
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

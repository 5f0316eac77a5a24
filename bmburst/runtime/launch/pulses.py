"""What node 0 makes of the signs of life that the other nodes' launchers leave in its store."""

from collections.abc import Iterable

LEFT = -1  # in place of a pulse's number: that node's part of the run is over
SILENT = 60.0  # seconds without a new pulse; a launcher gives two a second


class Pulses:
    """Who has not come yet, who is still there, and who is lost.

    Args:
        nodes: The numbers of the nodes that are listened to.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        self._counts = dict.fromkeys(nodes, 0)
        self._changed = dict.fromkeys(self._counts, 0.0)

    def hear(self, node: int, count: int, now: float) -> None:
        """Note that a node's pulses have come to `count`, `LEFT` when it has said that it leaves, at `now` seconds."""
        if count != self._counts[node]:
            self._counts[node], self._changed[node] = count, now

    @property
    def missing(self) -> list[int]:
        """Nodes that have never been heard of."""
        return [node for node, count in self._counts.items() if count == 0]

    @property
    def staying(self) -> list[int]:
        """Nodes that have come and have not left."""
        return [node for node, count in self._counts.items() if count > 0]

    def lost(self, now: float) -> list[int]:
        """Return those of `staying` that have been silent for more than `SILENT` seconds.

        Only this host's clock counts, and only from when a pulse was seen: a launcher that was stopped for minutes
        and goes on finds that the others' pulses have grown.
        """
        return [node for node in self.staying if now - self._changed[node] > SILENT]

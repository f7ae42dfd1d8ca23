"""The messages within each group of ranks of a layout in a training step, and their links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stretto.layout import Layout

if TYPE_CHECKING:
    from stretto.planner.machines.cluster import NetworkLink

Receiver = Literal["others", "before", "next", "previous"]
RECEIVERS: dict[Receiver, str] = {
    "others": "to the others",
    "before": "round the ring",
    "next": "to the next stage",
    "previous": "to the previous one",
}


@dataclass(frozen=True)
class Send:
    """One kind of message of every rank of a group.

    Attributes:
        content: contents of the message.
        collective: the collective or message, and its time.
        to: receivers: every other rank of the group, the previous one in the ring, or a neighbour.
        stages: range [first, end) of the pipeline ranks that send it; None for all.
    """

    content: str
    collective: str
    to: Receiver
    stages: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The groups over some axes, their messages, and their distribution over nodes.

    Attributes:
        axes: axes as in `Layout.groups`: "tp", "cp-dp", "expert_dp".
        size: number of ranks of a group.
        count: number of groups.
        inside: number of groups with all ranks on one node.
        note: text instead of messages, for groups that send none.
        brief: the messages in one line, if they depend on the stage.
    """

    axes: str
    size: int
    count: int
    inside: int
    sends: tuple[Send, ...] = ()
    note: str = ""
    brief: str = ""

    @property
    def links(self) -> str:
        """The links of the groups: "inside a node", "across nodes", or "4 inside a node" if they differ."""
        if self.inside in (0, self.count):
            return "inside a node" if self.inside else "across nodes"
        return f"{self.inside} inside a node"


_SENDS: dict[str, tuple[Send, ...]] = {
    "tp": (
        Send(
            "activations and their gradients",
            "all-gather and reduce-scatter around each pair of split linears; all-reduce without "
            "sequence parallelism",
            "others",
        ),
    ),
    "cp": (
        Send(
            "keys and values, then their gradients",
            "round the ring, block by block, during the attention; with all-to-all attention, heads to "
            "every other rank",
            "before",
        ),
    ),
    "ep": (Send("tokens", "all-to-all: to the ranks with their experts, and back", "others"),),
    "expert_tp": (
        Send("tokens of the experts", "all-gather before the experts, reduce-scatter after them", "others"),
    ),
    "dp": (
        Send(
            "gradients",
            "all-reduce; with ZeRO reduce-scatter, and all-gather of the updated weights",
            "others",
        ),
    ),
    "expert_dp": (
        Send("gradients of experts", "as those of the other layers, over the copies of an expert", "others"),
    ),
    "pp": (
        Send("activations", "forward of each microbatch, point to point", "next"),
        Send("gradients of activations", "backward of each microbatch, point to point", "previous"),
    ),
}
_SENDS["cp-dp"] = _SENDS["dp"]  # ranks with the same parameters and different tokens


def exchanges(
    layout: Layout, ranks_per_node: int, more: tuple[str, ...] = (), *, encoder_pp: int = 0
) -> list[Exchange]:
    """Return the groups of more than one rank, and those of their messages that the layout determines.

    Args:
        more: additional axes, such as "tp-pp", even if their groups are single ranks.
        encoder_pp: number of pipeline ranks of the encoder, which are the first.

    Raises:
        StrettoError: `more` names an unknown axis.
    """
    names = ["tp", "cp", "dp", "pp"]
    if layout.cp > 1:
        names.insert(3, "cp-dp")
    if layout.ep > 1 or layout.expert_tp is not None:
        names += ["expert_tp", "ep", "expert_dp"]
    shown = [_exchange(layout, axes, ranks_per_node) for axes in names if layout.size(axes) > 1]
    if encoder_pp:
        # in a pipeline with an encoder, each rank of the decoder but the last also sends the memory (the
        # encoder's output), and receives its gradient
        forward, backward = (f"{way} of each microbatch, point to point" for way in ("forward", "backward"))
        sends = (
            Send("activations of the encoder", forward, "next", (0, encoder_pp)),
            Send("activations of the decoder, and the memory", forward, "next", (encoder_pp, layout.pp)),
            Send("gradients of the encoder's activations", backward, "previous", (0, encoder_pp + 1)),
            Send(
                "gradients of the decoder's activations and of the memory",
                backward,
                "previous",
                (encoder_pp + 1, layout.pp),
            ),
        )
        brief = "activations, in the decoder the memory too, to the next stage; their gradients back"
        shown = [replace(group, sends=sends, brief=brief) if group.axes == "pp" else group for group in shown]
    others = [axes for axes in dict.fromkeys(more) if axes not in {group.axes for group in shown}]
    return shown + [_exchange(layout, axes, ranks_per_node) for axes in others]


def _exchange(layout: Layout, axes: str, ranks_per_node: int) -> Exchange:
    groups = layout.groups(axes)
    inside = sum(
        (min(ranks) - layout.offset) // ranks_per_node == (max(ranks) - layout.offset) // ranks_per_node
        for ranks in groups
    )
    sends, note = _SENDS.get(axes, ()), ""
    if axes == "dp" and layout.cp > 1:
        sends, note = (), "replicas: other samples; gradients are summed over cp-dp"
    return Exchange(axes=axes, size=len(groups[0]), count=len(groups), inside=inside, sends=sends, note=note)


def link_text(link: NetworkLink) -> str:
    """Return kind and bandwidth per device as text, such as "NVLink 4, 450 GB/s"."""
    return f"{link.kind or 'link'}, {link.bandwidth / 1e9:.4g} GB/s"

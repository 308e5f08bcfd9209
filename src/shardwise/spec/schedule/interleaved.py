"""1F1B over several stages per rank."""

from __future__ import annotations

from shardwise.spec.schedule.action import Action, Kind


def interleaved(pp: int, num_microbatches: int, num_virtual_stages: int) -> list[list[Action]]:
    """Rank ``r`` has stages ``r``, ``pp + r``, ``2 pp + r``, ... (Narayanan et al. 2021, arXiv 2104.04473).

    Microbatches go in groups of ``pp``: a whole group through the first stage of a rank, then through its second, and
    so on; backward takes a rank's stages in reverse. The bubble is that of 1F1B over ``v``, the messages are ``v``
    times as many.
    """
    group = pp * num_virtual_stages
    total = num_microbatches * num_virtual_stages

    def place(turn: int, rank: int, *, is_backward: bool) -> tuple[int, int]:
        """Stage and microbatch of the forward or backward that has the ``turn``-th turn on a rank."""
        groups, within = divmod(turn, group)
        chunk, microbatch = divmod(within, pp)
        if is_backward:
            chunk = num_virtual_stages - 1 - chunk
        return chunk * pp + rank, groups * pp + microbatch

    orders = []
    for rank in range(pp):
        ahead = min(forwards_ahead(pp, rank, num_virtual_stages), total)
        forwards = [Action(Kind.FORWARD, *place(turn, rank, is_backward=False)) for turn in range(total)]
        backwards = [Action(Kind.BACKWARD, *place(turn, rank, is_backward=True)) for turn in range(total)]
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[total - ahead :])
    return orders


def forwards_ahead(pp: int, rank: int, num_virtual_stages: int) -> int:
    """Forwards of a rank before it runs a forward and a backward in turn.

    A group in all stages but its last, and two for each rank after it: until its first gradient comes back.
    """
    return 2 * (pp - rank - 1) + (num_virtual_stages - 1) * pp

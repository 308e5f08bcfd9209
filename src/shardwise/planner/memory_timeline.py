"""The memory of a rank at those moments of a step among which its peak is.

Memory changes by the same amount with each unit of a run of equal units. So the peak is at one of the first two or last
two units of a run, or at the first unit at which the largest number of earlier reductions is running.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.planner.activations import HeadSaved, Saved
from shardwise.planner.model_states import Rules, States, Unit
from shardwise.planner.stage import Pass, Stage
from shardwise.spec.schedule.actions import Kind

#: Categories of memory, in the order in which they are shown.
CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "reduce", "activations", "logits")

Bytes = dict[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """Equal consecutive units of a rank, with the activations of one microbatch in each.

    Attributes:
        unit: One of the units.
        count: Number of units.
        saved: Activations of one microbatch in one unit.
        is_away: Activations are kept on the host from forward to backward.
    """

    unit: Unit
    count: int
    saved: Saved
    is_offloaded: bool = False

    @property
    def kept(self) -> float:
        """Bytes on the device from a unit's forward to its backward."""
        return self.saved.stays + (0.0 if self.is_offloaded else self.saved.kept)

    @property
    def neighbor_bytes(self) -> float:
        """Bytes of a neighbour's activations, which are copied to the host or back while a unit computes."""
        return self.saved.kept if self.is_offloaded else 0.0


def _output(parts: Sequence[Part]) -> float:
    return parts[-1].saved.output if parts else 0.0


def _terms(parts: Sequence[Part]) -> float:
    return sum(part.count * part.saved.terms for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The memory and work of one rank.

    Attributes:
        stage: The rank's units.
        states: Memory of the units between and during steps.
        parts: For each of the rank's stages the units in the order of forward.
        heads: For each of these stages the head and the loss; ``None``: another stage has them.
        rules: The engine's settings.
        is_tied: Head and embedding have one weight, so that the head's gradient waits for the embedding's.
        is_constant: Gathered parameters, gradient buffers and gradients stay allocated, as in some other frameworks.
        update_bytes: Additional bytes during the optimizer's step.
        before_bytes: Activations of one microbatch in modules before the first unit.
        passing_bytes: Temporary bytes at the peak of these modules' backward.
        mask_bytes: Attention masks that one microbatch keeps in one stage, for blocks that are recomputed.
    """

    stage: Stage
    states: States
    parts: tuple[tuple[Part, ...], ...]
    heads: tuple[HeadSaved | None, ...]
    rules: Rules
    is_tied: bool
    is_constant: bool
    update_bytes: float = 0.0
    before_bytes: float = 0.0
    passing_bytes: float = 0.0
    mask_bytes: float = 0.0

    def moments(self) -> Iterator[tuple[str, Bytes]]:
        """The moments of the passes that may have the peak, each with its bytes by category."""
        for each in self.stage.passes:
            yield from self.backward(each)
        sums = self._over_units("sums") + self._over_units("shard") + self._over_units("waits")
        update = self._moment(0.0, sums, 0.0, 0.0)
        update["optimizer"] += self.update_bytes
        yield "optimizer", update
        if self.rules.is_pipeline and self.is_tied and self.stage.has_embedding != self.stage.has_head:
            copies = 1 + self.rules.placements.shards_optimizer  # another's gradient; one's own, in one piece
            moved = copies * self.states.root.sums
            yield "sum over copies", self._moment(0.0, self._over_units("sums"), 0.0, moved)

    @property
    def offloaded_bytes(self) -> float:
        """Bytes of activations on the host, of all microbatches that the rank stores at the same time."""
        offloaded = [sum(part.count * part.neighbor_bytes for part in parts) for parts in self.parts]
        return max(sum(map(operator.mul, each.num_stored, offloaded)) for each in self.stage.passes)

    def _over_units(self, field: str) -> float:
        return self._over_blocks(field) + getattr(self.states.root, field)

    def _over_blocks(self, field: str) -> float:
        return sum(part.count * getattr(part.unit, field) for parts in self.parts for part in parts)

    def _kept(self, number: int) -> float:
        """Bytes that a stage stores of a microbatch until its backward, without its output or loss."""
        head = self.heads[number]
        kept = sum(part.count * part.kept for part in self.parts[number]) + self.mask_bytes
        kept += self.before_bytes * (number == 0)
        return kept + (head.kept if head else 0.0)

    def _others(self, at: Pass) -> float:
        """Bytes of activations of all other microbatches and stages during a pass, and of messages."""
        is_weight, found = at.kind is Kind.BACKWARD_WEIGHT, 0.0
        for number, (parts, head) in enumerate(zip(self.parts, self.heads, strict=True)):
            is_own = number == at.stage
            others = at.num_stored[number] - (is_own and not is_weight)
            found += others * self._kept(number)
            found += others * head.waits if head else at.num_stored[number] * _output(parts) * self.rules.is_pipeline
            found += (at.waiting[number] - (is_own and is_weight)) * _terms(parts)
        own = self.parts[at.stage]
        if self.rules.is_pipeline and own:
            # The last offloaded unit of the newest forward is still on the device.
            found += own[-1].neighbor_bytes if sum(at.num_stored) > 1 else 0.0
            found += (1 + len(self.parts)) * _output(own) if at.has_sums else 0.0  # messages
        return found

    def _computing(self, at: Pass) -> tuple[Part, ...]:
        """The units of a pass. The input pass of a split backward stores terms for the gradients of the weight pass."""
        parts = self.parts[at.stage]
        if at.kind is Kind.BACKWARD:
            return parts
        if at.kind is Kind.BACKWARD_WEIGHT:
            left = [Saved(part.saved.terms, part.saved.terms, 0.0, 0.0) for part in parts]
            return tuple(Part(part.unit, part.count, each) for part, each in zip(parts, left, strict=True))
        units = [replace(part.unit, gradients=0) for part in parts]
        if not at.has_sums:
            units = [replace(unit, sums=unit.stays, shard=0, buffer=0) for unit in units]
        return tuple(replace(part, unit=unit) for part, unit in zip(parts, units, strict=True))

    def backward(self, at: Pass) -> Iterator[tuple[str, Bytes]]:  # noqa: PLR0915 - a pass from beginning to end
        """Moments of a forward and its backward, or of one pass of the backward.

        A pipeline that keeps units gathered adds up the gradients of a middle microbatch after the stage's backward.
        """
        parts, root, rules = self._computing(at), self.states.root, self.rules
        is_weight, has_sums = at.kind is Kind.BACKWARD_WEIGHT, at.has_sums
        head = None if is_weight else self.heads[at.stage]
        reshards, accumulation, is_pipeline = rules.reshards, rules.accumulation, rules.is_pipeline
        is_late = at.is_middle and is_pipeline and not (reshards or self.is_constant)
        late = terms = 0.0
        saved = _terms(self.parts[at.stage]) if is_weight else self._kept(at.stage)
        others = self._others(at)
        place = sum(part.count for parts in self.parts[: at.stage + 1] for part in parts)
        every = self._over_blocks("gathered")
        inner = self._over_units("inner")
        # Sums of earlier microbatches: in separate buffers, in pooled buffers, or in .grad.
        done, pooled = self._over_units("stays"), 0.0
        if has_sums:
            done = self._over_units("sums") + self._over_units("waits")
            done += self._over_units("shard") if accumulation == "sharded" else 0.0
            pooled = self._over_units("buffer") if accumulation == "unsharded" else 0.0

        def kept(unit: Unit, count: int) -> tuple[float, float]:
            """Bytes of gradients, and of pooled buffers, of ``count`` units after their backward."""
            if has_sums:
                shard = unit.shard if accumulation == "defer_replicate" else 0
                return count * shard, 0.0
            if accumulation == "unsharded":
                return count * (unit.sums - unit.stays), count * unit.buffer
            return count * (unit.sums - unit.stays + unit.shard + unit.waits), 0.0

        last = parts[-1] if parts else None
        live = root.gathered + (last.unit.gathered if reshards and last else every) + inner
        output = last.saved.output if last else 0.0
        neighbor_bytes = max((part.neighbor_bytes for part in parts), default=0.0)
        own = neighbor_bytes if last and last.is_offloaded else 0.0
        yield "forward", self._moment(live, done, pooled, saved + others + neighbor_bytes + own + 2 * output)
        waiting, last_bytes = 0.0, (live, 0.0, 0.0, 0.0)
        has_embedding, has_head = at.stage == 0 and self.stage.has_embedding, self.stage.has_head
        is_tied = has_embedding and has_head and self.is_tied
        of_root = root.gradients / (2 if self.stage.has_embedding and has_head and not is_tied else 1)
        if head is not None:
            yield "loss", self._moment(live, done, pooled, saved + others + neighbor_bytes, head.most)
            waiting = of_root  # the head's, without the embedding's
        below = saved - (head.kept if head else 0.0) + others
        num_behind = 0
        before, after = self._under_way(is_added=has_sums and accumulation == "sharded")
        for number, part in enumerate(reversed(parts)):
            unit = part.unit
            following = parts[len(parts) - number - 2].unit if number + 1 < len(parts) else None
            place -= part.count
            for index in sorted(
                {i for i in (part.count - 1, part.count - 2, part.count - 1 - before, 1, 0) if 0 <= i < part.count},
                reverse=True,
            ):
                behind = part.count - 1 - index  # units of this part whose backward has ended
                ahead = unit if index else following
                prefetched = 0.0
                if ahead is not None and reshards:
                    prefetched = ahead.gathered * min(rules.prefetch[1], place + index)
                left = below - behind * part.kept  # activations of this unit and those before it
                left += terms + behind * part.saved.terms
                copied = neighbor_bytes if place + index or is_pipeline else 0.0  # copied back for the next unit
                left += copied - part.kept  # without this unit's
                gradients, buffers = (a + b for a, b in zip((done + waiting, pooled), kept(unit, behind), strict=True))
                gradients += is_late * (late + behind * unit.gradients)
                name = f"backward of block {place + index}"
                still = every if is_pipeline else every - behind * unit.gathered
                gathered = root.gathered + (unit.gathered + prefetched if reshards else still) + inner
                under_way = min(before, num_behind + behind) * unit.buffer
                end = left + part.saved.terms
                working = left + part.saved.whole + part.saved.passing
                # Terms of the first layers are freed before the last gradient of a weight pass is made.
                made = is_weight * max(unit.gradients - 4 * _output(self.parts[at.stage]), unit.gradients / 2)
                yield name, self._moment(gathered, gradients + made, buffers + under_way, working)
                if unit.blocks > 1:  # all other blocks of a merged unit have their gradients
                    most = 1 - 1 / unit.blocks
                    yield (
                        f"{name}, its first block",
                        self._moment(
                            gathered,
                            gradients + most * unit.gradients,
                            buffers + under_way,
                            working - most * part.saved.kept,
                        ),
                    )
                yield (
                    f"{name}, its end",
                    self._moment(gathered, gradients + unit.gradients, buffers + under_way, end + 2 * output),
                )
                last_bytes = gathered, gradients + unit.gradients, buffers + under_way, end + output - copied
                # Earlier reductions, except the newest, have ended before this unit's buffer is allocated.
                still -= 0.0 if is_pipeline else unit.gathered
                gathered = root.gathered + (prefetched if reshards else still) + inner
                under_way = min(after, num_behind + behind) * unit.buffer
                buffers += under_way + (0.0 if has_sums and accumulation == "unsharded" else unit.buffer)
                yield (
                    f"{name}, gradients collected",
                    self._moment(
                        gathered,
                        gradients + unit.gradients + (0.0 if has_sums else unit.sums - unit.stays),
                        buffers,
                        end + output,
                    ),
                )
            below -= part.count * part.kept
            terms += part.count * part.saved.terms
            more, buffers = kept(unit, part.count)
            done, pooled = done + more, pooled + buffers
            num_behind += part.count
            late += part.count * unit.gradients
            every -= 0.0 if is_pipeline else part.count * unit.gathered
        buffer = 0.0 if has_sums and accumulation == "unsharded" else root.buffer
        gradients = done + is_late * late + waiting + of_root * (has_embedding and not is_tied)
        gradients += 0.0 if has_sums else root.sums - root.stays
        gathered = root.gathered + every if is_pipeline else 0.0
        others += terms
        # Autograd adds two gradients of one weight into a third.
        yield from self._at_embedding(has_embedding * of_root * (1 + is_tied), *last_bytes)
        yield from self._before_units(done, pooled, others)
        yield "backward of the root", self._moment(gathered, gradients, pooled + buffer, others)

    def _under_way(self, *, is_added: bool) -> tuple[int, int]:
        """Buffers of earlier units in use, before and after a unit's buffer is allocated (``spec.memory.footprint``).

        ``is_added``: ``.grad`` contains the sum of earlier microbatches.
        """
        rules = self.rules
        if rules.accumulation == "unsharded":
            return 0, 0
        if not rules.is_replicated:
            return max(rules.num_gradient_buffers - 1, 1), max(rules.num_gradient_buffers - 2, 0)
        stays = rules.accumulation != "defer_replicate" and (is_added or rules.reduces_apart)
        return (2, 1) if stays else (1, 0)  # the sum over dp_replicate is computed in the buffer, or in other memory

    def _at_embedding(
        self, weight: float, gathered: float, gradients: float, reduce: float, activations: float
    ) -> Iterator[tuple[str, Bytes]]:
        """The gradient of the embedding, if the stage has it: the first block is reduced when backward ends."""
        if weight and gradients:
            yield "backward of the embedding", self._moment(gathered, gradients + weight, reduce, activations)

    def _before_units(self, gradients: float, pooled: float, others: float) -> Iterator[tuple[str, Bytes]]:
        """The beginning of the backward of modules before the first unit, if they have activations."""
        if self.passing_bytes:
            activations = others + self.before_bytes + self.passing_bytes
            moment = self._moment(self.states.root.gathered, gradients, pooled, activations)
            yield "backward of the root, its beginning", moment

    def _moment(
        self, gathered: float, gradients: float, reduce: float, activations: float, logits: float = 0.0
    ) -> Bytes:
        footprint = self.states.footprint
        if self.is_constant:
            gathered, reduce, gradients = footprint.gathered, footprint.reduce, max(gradients, footprint.gradients)
        elif activations:
            gathered += self.states.staging
        return {
            "parameters": footprint.parameters,
            "gradients": gradients,
            "optimizer": footprint.optimizer,
            "gathered": gathered,
            "reduce": reduce,
            "activations": activations,
            "logits": logits,
        }

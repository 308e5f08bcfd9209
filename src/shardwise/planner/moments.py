"""The memory of a rank at those moments of a step among which its peak is.

Memory changes by the same amount with each unit of a run of equal units. So the peak is at one of the first two or last
two units of a run, or at the first unit at which the largest number of earlier reductions is running.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.planner.activations import HeadSaved, Saved
from shardwise.planner.stage import Stage
from shardwise.planner.states import Rules, States, Unit

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
    is_away: bool = False

    @property
    def kept(self) -> float:
        """Bytes on the device from a unit's forward to its backward."""
        return 0.0 if self.is_away else self.saved.kept

    @property
    def beside(self) -> float:
        """Bytes of a neighbour's activations, which are copied to the host or back while a unit computes."""
        return self.saved.kept if self.is_away else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The memory and work of one rank.

    Attributes:
        stage: The rank's units.
        states: Memory of the units between and during steps.
        parts: The units in the order of forward.
        head: The head and the loss; ``None``: another rank has them.
        rules: The engine's settings.
        is_constant: Gathered parameters, gradient buffers and gradients stay allocated, as in some other frameworks.
        num_microbatches: Microbatches of a step.
        update_bytes: Additional bytes during the optimizer's step.
        before_bytes: Activations of one microbatch in modules before the first unit.
        passing_bytes: Temporary bytes at the peak of these modules' backward.
    """

    stage: Stage
    states: States
    parts: tuple[Part, ...]
    head: HeadSaved | None
    rules: Rules
    is_constant: bool
    num_microbatches: int = 1
    update_bytes: float = 0.0
    before_bytes: float = 0.0
    passing_bytes: float = 0.0

    def moments(self) -> Iterator[tuple[str, Bytes]]:
        """The moments in order, each with its bytes by category."""
        if self.rules.accumulation is None:
            yield from self.backward(held=1, has_sums=False)
        elif self.stage.passes:
            yield from self._split()
        elif self.stage.held < self.num_microbatches:
            yield from self.backward(held=self.stage.held, has_sums=True, is_middle=self.num_microbatches > 2)
        else:  # all forwards come first: at the peak of activations there are no sums yet
            yield from self.backward(held=self.stage.held, has_sums=False)
            if self.num_microbatches > 2:
                second = self.backward(held=self.stage.held - 1, has_sums=True, is_middle=True)
                yield from ((f"second microbatch, {name}", held) for name, held in second)
            yield from ((f"last microbatch, {name}", held) for name, held in self.backward(held=1, has_sums=True))
        sums = self._over_units("sums") + self._over_units("shard") + self._over_units("waits")
        update = self._moment(0.0, sums, 0.0, 0.0)
        update["optimizer"] += self.update_bytes
        yield "optimizer", update

    @property
    def away_bytes(self) -> float:
        """Bytes of activations on the host, of all microbatches that the rank stores at the same time."""
        held = 1 if self.rules.accumulation is None else self.stage.held
        return held * sum(part.count * part.beside for part in self.parts)

    def _split(self) -> Iterator[tuple[str, Bytes]]:
        """Moments of a split backward: the input pass stores terms, from which the weight pass computes gradients."""
        terms = sum(part.count * part.saved.terms for part in self.parts)
        output = self.parts[-1].saved.output if self.parts else 0.0
        saved = self.before_bytes + sum(part.count * part.kept for part in self.parts)
        saved += (self.head.kept if self.head else 0.0) + self.stage.num_stages * output
        for is_weight, held, waiting, has_sums in self.stage.passes:
            if is_weight:
                left = [Saved(part.saved.terms, part.saved.terms, 0.0, 0.0) for part in self.parts]
                parts = tuple(Part(part.unit, part.count, each) for part, each in zip(self.parts, left, strict=True))
                rank = replace(self, parts=parts, head=None, before_bytes=0.0, passing_bytes=0.0)
                name, most, others = "weight pass, ", waiting, held * saved + 2 * output
            else:
                units = [replace(part.unit, gradients=0) for part in self.parts]
                if not has_sums:
                    units = [replace(unit, sums=unit.stays, shard=0, buffer=0) for unit in units]
                parts = tuple(replace(part, unit=unit) for part, unit in zip(self.parts, units, strict=True))
                rank, name, most, others = replace(self, parts=parts), "", held, waiting * terms
            found = rank.backward(held=most, has_sums=has_sums, is_middle=is_weight, others=others)
            yield from ((name + moment, bytes_) for moment, bytes_ in found)

    def _over_units(self, field: str) -> float:
        own = sum(part.count * getattr(part.unit, field) for part in self.parts)
        return own + getattr(self.states.root, field)

    def backward(  # noqa: PLR0915 - a step from its beginning to its end
        self, *, held: float, has_sums: bool, is_middle: bool = False, others: float = 0.0
    ) -> Iterator[tuple[str, Bytes]]:
        """Moments of a forward and its backward.

        Args:
            held: Microbatches with stored activations when the backward begins, this one included.
            has_sums: Gradients of earlier microbatches exist.
            is_middle: The microbatch is neither the first nor the last. A pipeline that keeps its units gathered then
                adds up the gradients of a stage after the stage's backward.
            others: Bytes of other activations, which exist at all of these moments.
        """
        parts, root, rules = self.parts, self.states.root, self.rules
        shards, way, is_pipeline = rules.reshards, rules.accumulation, rules.is_pipeline
        is_late = is_middle and is_pipeline and not (shards or self.is_constant)
        late, most_late = 0.0, is_late * (self._over_units("gradients") - root.gradients) / self.stage.num_stages
        saved = self.before_bytes + sum(part.count * part.kept for part in parts)
        saved += self.head.kept if self.head else 0.0
        sent = self.stage.num_stages * parts[-1].saved.output if held > 1 and parts else 0.0
        # The last offloaded unit of the newest forward is still on the device.
        others += (held - 1) * (saved + sent) + (parts[-1].beside if sent and is_pipeline else 0.0)
        place = sum(part.count for part in parts)
        of_stage = -(-place // self.stage.num_stages) / max(place, 1)  # the share of the blocks in one stage
        terms, most_terms = 0.0, of_stage * sum(part.count * part.saved.terms for part in parts)
        if has_sums and parts and (sent or self.stage.passes):  # one message in each direction is being sent
            others += 2 * parts[-1].saved.output * (1 if sent else self.stage.num_stages)
        every = self._over_units("gathered") - root.gathered
        inner = self._over_units("inner")
        # Sums of earlier microbatches: in separate buffers, in pooled buffers, or in .grad.
        done, pooled = self._over_units("stays"), 0.0
        if has_sums:
            done = self._over_units("sums") + self._over_units("waits")
            done += self._over_units("shard") if way == "sharded" else 0.0
            pooled = self._over_units("buffer") if way == "unsharded" else 0.0

        def kept(unit: Unit, count: int) -> tuple[float, float]:
            """Bytes of gradients, and of pooled buffers, of ``count`` units after their backward."""
            if has_sums:
                shard = unit.shard if way == "defer_replicate" else 0
                return count * shard, 0.0
            if way == "unsharded":
                return count * (unit.sums - unit.stays), count * unit.buffer
            return count * (unit.sums - unit.stays + unit.shard + unit.waits), 0.0

        last = parts[-1] if parts else None
        live = root.gathered + (last.unit.gathered if shards and last else every) + inner
        output = last.saved.output if last else 0.0
        beside = max((part.beside for part in parts), default=0.0)
        own = beside if last and last.is_away else 0.0
        yield "forward", self._moment(live, done, pooled, saved + others + beside + own + 2 * output)
        waiting = 0.0
        if self.head is not None:
            logits = max(self.head.forward, self.head.backward)
            yield "loss", self._moment(live, done, pooled, saved + others + beside, logits)
            waiting = root.gradients / (2 if self.stage.has_embedding else 1)  # the head's, without the embedding's
        below = saved - (self.head.kept if self.head else 0.0) + others
        num_behind = 0
        before, after = self._under_way(is_added=has_sums and way == "sharded")
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
                if ahead is not None and shards:
                    prefetched = ahead.gathered * min(rules.prefetch[1], place + index)
                left = below - behind * part.kept  # activations of this unit and those before it
                left += max(min(terms + behind * part.saved.terms, most_terms - part.saved.terms), 0.0)
                left += beside - part.kept  # without this unit's, but with those copied back for the next unit
                gradients, buffers = (a + b for a, b in zip((done + waiting, pooled), kept(unit, behind), strict=True))
                gradients += max(min(late + behind * unit.gradients, most_late - unit.gradients), 0.0)
                name = f"backward of block {place + index}"
                still = every if is_pipeline else every - behind * unit.gathered
                gathered = root.gathered + (unit.gathered + prefetched if shards else still) + inner
                under_way = min(before, num_behind + behind) * unit.buffer
                end = left + part.saved.terms
                working = left + part.saved.whole + part.saved.passing
                yield name, self._moment(gathered, gradients, buffers + under_way, working)
                yield (
                    f"{name}, its end",
                    self._moment(gathered, gradients + unit.gradients, buffers + under_way, end + 2 * output),
                )
                # Earlier reductions, except the newest, have ended before this unit's buffer is allocated.
                still -= 0.0 if is_pipeline else unit.gathered
                gathered = root.gathered + (prefetched if shards else still) + inner
                under_way = min(after, num_behind + behind) * unit.buffer
                buffers += under_way + (0.0 if has_sums and way == "unsharded" else unit.buffer)
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
        buffer = 0.0 if has_sums and way == "unsharded" else root.buffer
        gradients = done + min(late, most_late) + root.gradients + (0.0 if has_sums else root.sums - root.stays)
        gathered = root.gathered + every if is_pipeline else 0.0
        others += min(terms, most_terms)
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

    def _before_units(self, gradients: float, pooled: float, others: float) -> Iterator[tuple[str, Bytes]]:
        """The beginning of the backward of modules before the first unit, if they have activations."""
        if self.passing_bytes:
            activations = others + self.before_bytes + self.passing_bytes
            moment = self._moment(self.states.root.gathered, gradients, pooled, activations)
            yield "backward of the root, its beginning", moment

    def _moment(
        self, gathered: float, gradients: float, reduce: float, activations: float, logits: float = 0.0
    ) -> Bytes:
        held = self.states.footprint
        if self.is_constant:
            gathered, reduce, gradients = held.gathered, held.reduce, max(gradients, held.gradients)
        elif activations:
            gathered += self.states.landing
        return {
            "parameters": held.parameters,
            "gradients": gradients,
            "optimizer": held.optimizer,
            "gathered": gathered,
            "reduce": reduce,
            "activations": activations,
            "logits": logits,
        }

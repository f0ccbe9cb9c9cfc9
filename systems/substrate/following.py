"""Following: the way of one of several ranks through a plan that it does not keep to.

Note [Passing]
    On several ranks no event of one rank makes a step abandon its plan, for its fetches and flushes are collectives, and the
    others go on with them. What all of them meet at the same place does: a larger batch, of which they tell each other, and a
    unit that is found to read what another owns (reads.py), of which the tags of all collectives from then on say so: a rank
    that alone reads it is told of by the next one (Agreement.reads). An event that is not the next moment of the plan but
    a later one *passes* the moments between: their barriers, operations and flushes are carried out as if the units had run,
    and the step goes on following. One that is none of the rest of the plan is *late*: it gets what it needs on demand, in
    program order, and what was fetched for it alone goes with its last holder. Late events need no collective where their
    bundles are there; else all ranks have to have them alike, or the link tells which differ.

    A bundle falls due at the moment at which the plan flushes it, reached or passed. It is flushed then, with zeros for what
    was not run here; or, if a backward that uses it may still come on this rank, as that ends. No message is needed: a rank
    whose units were skipped issues the collectives of the ranks that ran them.

    A step that passes and has no late event teaches nothing, be it the same on all ranks or not, and the plan stays: under one
    made for less, a rank that does all of it again would be alone with what it fetches.

    What a call of the engine leaves out at its end is passed there, as far as the call went in the plan's own step: others may
    wait for it while this rank waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from systems.planning.plan import Operation, OpKind, Plan
from systems.planning.trace import Moment, Phase, Trace
from systems.substrate.cursor import Cursor

ENTER_OF = {Phase.FORWARD_EXIT: Phase.FORWARD_ENTER, Phase.BACKWARD_EXIT: Phase.BACKWARD_ENTER}
Plans = Mapping[tuple[Moment, ...], tuple[Trace, Plan | None]]


@dataclass
class ForwardCall:
    """begin, end: by count of moments; None while it goes on."""

    unit: int
    begin: int
    end: int | None = None


class Outstanding:
    """Outstanding is the forward calls of a micro-step whose backward may still come: autograd runs what was made last first,
    so once an earlier call's comes, that of one that began after it will not (what it made was not used).
    """

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []
        self._seen = self._limit = 0

    def see(self, moment: Moment) -> None:
        """It comes on this rank."""
        self._seen += 1
        if moment.phase is Phase.FORWARD_ENTER:
            self._calls.append(ForwardCall(moment.unit, self._seen))
        elif moment.phase is Phase.BACKWARD_END:
            self._calls.clear()
        call = next((each for each in reversed(self._calls) if each.unit == moment.unit), None)
        if call is None:
            return
        if moment.phase is Phase.FORWARD_EXIT:
            call.end = self._limit = self._seen
        elif moment.phase is Phase.BACKWARD_ENTER:
            self._limit = self._seen if call.end is None else call.end
        elif moment.phase is Phase.BACKWARD_EXIT:
            self._limit = call.begin
            self._calls.remove(call)

    def may_come(self, unit: int) -> bool:
        """A backward of the unit's. True of one that was not seen to run."""
        calls = [call for call in self._calls if call.unit == unit]
        return not calls or any(call.begin < self._limit for call in calls)


class Following(Cursor):
    """See Note [Passing]. late: the event that came last is none of the rest of the plan.

    guests: bundles that are there for the sake of late events alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self.guests: set[int] = set()
        self._plans: Plans = {}
        self._flushes: Sequence[Sequence[int]] = ()  # what the plan flushes, at each of its moments
        self._due: dict[tuple[int, int], int] = {}  # by micro-step and bundle, where it is flushed
        self._micro_step = 0
        self.outstanding = Outstanding()
        self._seen: list[Moment] = []  # in this step
        self._ends: list[int] = []  # how many were, as each call of the engine ended
        self._ends_of: dict[tuple[Moment, ...], list[int]] = {}  # the same of the last step of each kind that is planned
        self._ends_in_plan: Sequence[int] = ()  # of the plan's kind

    def ask(self, plans: Plans) -> None:
        """Those that there are, by the moments of the steps that they are for, each with the step it was made from."""
        self._plans = plans

    def start(self) -> None:
        """See Cursor.start."""
        super().start()
        self._keep_ends(tuple(self._seen), self._ends)
        self._seen, self._ends = [], []
        self.departed = self.strayed = self.late = False
        self.guests.clear()
        self.outstanding = Outstanding()
        if self.plan is None:
            return
        moments = self.plan.signature
        known = self._plans.get(moments)
        if known is None:  # units were found to read more since, between two steps
            self.leave()
            return
        self._flushes, self._ends_in_plan = known[0].flushes, self._ends_of.get(moments, ())
        self._due = {(moments[at].micro_step, bundle): at for at, here in enumerate(self._flushes) for bundle in here}

    def _keep_ends(self, moments: tuple[Moment, ...], ends: list[int]) -> None:
        """Of the step that is over, if a plan for its kind is known by now. What no plan is known for any more goes."""
        if moments in self._plans:
            self._ends_of[moments] = ends
        if len(self._ends_of) > len(self._plans):
            self._ends_of = {kind: theirs for kind, theirs in self._ends_of.items() if kind in self._plans}

    def passes(self, moment: Moment) -> Iterator[int]:
        """`moment` comes: the moments before it that are passed, the cursor being at each in turn."""
        self._micro_step = moment.micro_step
        self.outstanding.see(moment)
        self._seen.append(moment)
        if not self.following:
            return
        target = self._find(moment)
        self.late = target is None
        yield from self._pass_until(self.position + 1 if target is None else target)
        self.departed |= self.late
        self.strayed |= self.late

    def passes_call(self) -> Iterator[int]:
        """A call of the engine ends: what is left of it in the plan."""
        number, ends = len(self._ends), self._ends_in_plan
        self._ends.append(len(self._seen))
        if self.following and number < len(ends):
            yield from self._pass_until(ends[number])

    def _pass_until(self, target: int) -> Iterator[int]:
        while self.position + 1 < target:
            self.position += 1
            self.late, self.departed = False, True
            yield self.position

    def _find(self, moment: Moment) -> int | None:
        """Where it is in the rest of the plan. The end of a call that the plan begins later is not."""
        assert self.plan is not None
        begin = ENTER_OF.get(moment.phase)
        for at in range(self.position + 1, len(self.plan.signature)):
            other = self.plan.signature[at]
            if other == moment:
                return at
            if other.micro_step > moment.micro_step or (other.phase is begin and other.unit == moment.unit):
                return None
        return None

    def advance(self, moment: Moment) -> bool:
        """See Cursor.advance; what was to be passed was."""
        if not self.late:
            self.position += 1
        return True

    @property
    def at_barrier(self) -> bool:
        """See Cursor.at_barrier."""
        return not self.late and super().at_barrier

    def operations(self, *, first: bool = False) -> Iterator[Operation]:
        """See Cursor.operations."""
        for operation in () if self.late else super().operations(first=first):
            if operation.kind is OpKind.FETCH:
                self.guests.discard(operation.bundle)
            yield operation

    def flushes(self) -> Sequence[int]:
        """What the plan flushes at the current moment."""
        return self._flushes[self.position] if self.following and not self.late else ()

    def flushes_later(self, bundle: int) -> bool:
        """In this micro-step."""
        return self.following and self._due.get((self._micro_step, bundle), -1) > self.position

    def leaves(self, bundle: int) -> bool:
        """It goes with its last holder, for no plan says when."""
        return not self.following or bundle in self.guests

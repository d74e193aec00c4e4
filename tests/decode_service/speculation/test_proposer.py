"""The proposer asks whom the controller chooses, and tells it what every source would have been good for."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence
from decode_service.speculation.candidate import Source
from decode_service.speculation.controller import DraftController
from decode_service.speculation.draft import DraftKind, Drafts
from decode_service.speculation.ngram_draft import NgramDraft
from decode_service.speculation.proposer import Proposer
from shared.draft_metrics import DraftMetrics

LONGEST = 4


@dataclass
class Counting:
    """A model that goes on with 50, 51, 52 …; remembers what it was asked for."""

    kind: DraftKind = "model"
    asked: list[tuple[list[Sequence], list[int]]] = field(default_factory=list)

    def missing(self, sequence: Sequence) -> int:
        return 1

    def warm(self, rows: int) -> None:
        """Nothing is done once only."""

    def take_passes(self) -> list[tuple[int, float]]:
        return [(1, 0.5)]

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        self.asked.append((sequences, counts))
        return [list(range(50, 50 + count)) for count in counts]


class Listening(DraftController):
    """A controller that remembers what it was told of proposals."""

    def __init__(self) -> None:
        super().__init__(LONGEST, LONGEST, rows_limit=100)
        self.told: list[tuple[Source, int, int]] = []

    def verified(self, sequence: Sequence, source: Source, proposed: int, accepted: int, certainty: int = 0) -> None:
        self.told.append((source, proposed, accepted))
        super().verified(sequence, source, proposed, accepted, certainty)


def sequence(*tokens: int) -> Sequence:
    return Sequence(
        request_id="",
        tokens=list(tokens),
        prompt_tokens=len(tokens),
        max_tokens=100,
        sampling=SamplingParams(),
        output=None,  # type: ignore[arg-type]  # nothing is written here
        outlet=None,  # type: ignore[arg-type]
        on_admitted=lambda: None,
    )


def where_lookups_are_good() -> DraftController:
    """A controller that has seen short matches go well."""
    controller = DraftController(LONGEST, LONGEST, rows_limit=100)
    for _ in range(9):
        controller.verified(sequence(1), Source.LOOKUP, 4, 4, certainty=2)
    return controller


def test_the_model_is_asked_where_no_lookup_has_found_anything() -> None:
    model, quoting, new = Counting(), sequence(7, 8, 9, 7, 8), sequence(1, 2, 3)
    proposer = Proposer(Drafts(NgramDraft(), model), where_lookups_are_good())
    assert proposer.propose([quoting, new], [9, 3]) == [[9, 7, 8, 9], [50, 51, 52]]
    assert model.asked == [([new], [3])]
    assert proposer.propose([], []) == []
    assert proposer.propose([new], [0]) == [[]]
    assert len(model.asked) == 1


def test_a_lookup_is_judged_as_far_as_the_text_went_even_where_the_model_proposed() -> None:
    controller, quoting = Listening(), sequence(7, 8, 9, 7, 8)
    for _ in range(20):
        controller.verified(quoting, Source.LOOKUP, 1, 0, certainty=2)
    controller.told.clear()
    proposer = Proposer(Drafts(NgramDraft(), Counting()), controller)
    assert proposer.propose([quoting], [9]) == [[50, 51, 52, 53]], "lookups have failed here again and again"
    proposer.verified(quoting, [50, 51, 9])
    assert controller.told == [(Source.LOOKUP, 3, 0), (Source.MODEL, 3, 2)]
    controller.told.clear()
    proposer.verified(quoting, [50])
    assert controller.told == [], "each proposal is judged once"


def test_a_lookup_that_the_text_confirms_throughout_counts_no_failure() -> None:
    controller, quoting = Listening(), sequence(7, 8, 9, 7, 8)
    proposer = Proposer(Drafts(NgramDraft()), controller)
    assert proposer.propose([quoting], [2]) == [[9, 7]]
    proposer.verified(quoting, [9, 7, 3])
    assert controller.told == [(Source.LOOKUP, 2, 2), (Source.MODEL, 0, 0)]


def test_kinds_lengths_acceptance_and_costs_are_counted() -> None:
    metrics, quoting, new = DraftMetrics(), sequence(7, 8, 9, 7, 8), sequence(1, 2, 3)
    proposer = Proposer(Drafts(NgramDraft(), Counting()), where_lookups_are_good(), metrics)
    proposer.propose([quoting, new, sequence(1)], [9, 3, 0])
    proposer.verified(quoting, [9, 7, 1])
    proposer.verified(new, [50, 9])
    found = {
        (sample.name, sample.labels.get("kind"), sample.labels.get("le")): sample.value
        for family in metrics.collect("decode")
        for sample in family.samples
    }
    lengths = {kind: found["headrace_draft_length_sum", kind, None] for kind in ("ngram", "model", "none")}
    assert lengths == {"ngram": 4, "model": 3, "none": 0}
    assert all(found["headrace_draft_length_count", kind, None] == 1 for kind in lengths)
    assert found["headrace_draft_length_bucket", "model", "2"] == 0
    assert found["headrace_draft_length_bucket", "model", "3"] == 1
    assert found["headrace_draft_accepted_tokens_total", "ngram", None] == 2
    assert found["headrace_draft_accepted_tokens_total", "model", None] == 1
    assert found["headrace_draft_pass_seconds_sum", None, None] == 0.5


def test_a_long_match_is_believed_where_short_ones_have_failed() -> None:
    controller = DraftController(LONGEST, LONGEST, rows_limit=100)
    short, long = sequence(7, 8, 9, 7, 8), sequence(1, 2, 3, 7, 8, 9, 1, 2, 3, 7, 8)
    for _ in range(20):
        controller.verified(sequence(1), Source.LOOKUP, 1, 0, certainty=2)
        controller.verified(sequence(1), Source.LOOKUP, 4, 4, certainty=5)
    proposer = Proposer(Drafts(NgramDraft(), Counting()), controller)
    assert proposer.propose([short, long], [4, 4]) == [[50, 51, 52, 53], [9, 1, 2, 3]]


def test_without_any_draft_nothing_is_proposed() -> None:
    proposer = Proposer(Drafts(), DraftController(0, LONGEST, rows_limit=100))
    assert proposer.propose([sequence(1, 1, 1, 1)], [9]) == [[]]

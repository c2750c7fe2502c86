"""Several choices: what their streams show, however tokens are cut and interleaved, is what their records tell."""

import math
from array import array
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.answers import answer, answers_of
from services.gateway.output.output_function import OutputFunction
from shared.messages import FINISH_REASONS, EndReason, Final
from shared.records import RequestRecord
from tests.property.examples import at_least, counted
from tests.property.test_output_function import (
    CUTS,
    END,
    partition,
    stop_lists,
    submission,
    token_sequences,
    tokenizer_of,
)

TOKENIZER = tokenizer_of("byte_level")
LOGPROBS = st.sampled_from([-0.5, -0.5, -1.0, -2.0, -30.0])


@st.composite
def records(draw: st.DrawFn, tokens: list[int], n: int, stops: list[str]) -> RequestRecord:
    """An ended candidate. As after a race, the record may hold tokens past a stop string."""
    end = draw(st.sampled_from([EndReason.LENGTH, EndReason.EOS]))
    if end is EndReason.EOS:
        tokens = [*tokens, END]
    logprobs = draw(st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens)))
    one = submission(stop=stops)
    asked = msgspec.structs.replace(one.params, with_logprobs=True, num_hypotheses=n)
    final = Final(FINISH_REASONS[end], len(tokens), int(end), cumulative_logprob=sum(logprobs))
    wanted = msgspec.structs.replace(one, params=asked)
    return RequestRecord(wanted, array("i", tokens), "0-0", None, final, 0, array("f", logprobs))


def interleaved(data: st.DataObject, candidates: list[RequestRecord]) -> list[tuple[str, int, Any]]:
    """Feed all candidates in turns, in events of any size: (text, tokens that count, stop reason) of each."""
    streams = [OutputFunction(TOKENIZER, record.submission).start() for record in candidates]
    events = [partition(list(record.output), data.draw(CUTS)) for record in candidates]
    shown: list[tuple[str, int, Any]] = [("", 0, None)] * len(candidates)
    order = [k for k, parts in enumerate(events) for _ in parts]
    for k in data.draw(st.permutations(order)):
        event = events[k].pop(0)
        final = candidates[k].final
        assert final is not None
        delta = streams[k].feed(event, None if events[k] else EndReason(final.end_reason))
        shown[k] = (shown[k][0] + delta.text, delta.num_tokens, delta.stop_reason)
    return shown


def test_interleaved_streams_and_records_tell_the_same_and_rank_alike() -> None:
    happened: Counter[str] = Counter()

    @settings(max_examples=at_least(120))
    @given(data=st.data())
    @counted
    def check(data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 5))
        n = data.draw(st.integers(1, count))
        outputs = data.draw(st.lists(token_sequences(TOKENIZER), min_size=count, max_size=count))
        stops = data.draw(stop_lists(TOKENIZER.decode(data.draw(st.sampled_from(outputs))) or "the"))
        candidates = [data.draw(records(tokens, n, stops)) for tokens in outputs]
        shown = interleaved(data, candidates)
        told = [answer(TOKENIZER, record) for record in candidates]
        assert shown == [(a.text, a.num_tokens, a.stop_reason) for a in told]

        scores = [
            math.fsum(record.logprobs[:num_tokens]) / num_tokens if num_tokens else -math.inf
            for record, (_, num_tokens, _) in zip(candidates, shown, strict=True)
        ]
        best = answers_of(TOKENIZER, candidates)
        order = sorted(range(count), key=lambda k: (-scores[k], k))
        assert best == [told[k] for k in order[:n]]
        happened["stopped before the end"] += any(
            a.num_tokens < len(r.output) for a, r in zip(told, candidates, strict=True)
        )
        happened["reordered"] += order[:n] != list(range(n))
        happened["tied"] += len(set(scores)) < count

    check()
    assert min(happened[name] for name in ("stopped before the end", "reordered", "tied")) >= 3, happened

"""The wire: round trips, versions, and bytes that are no message."""

import io
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import MalformedMessage, ProtocolError, UnsupportedSchema
from shared.messages import (
    Abort,
    Decoder,
    EventKind,
    IntakeMessage,
    LogMessage,
    NewRow,
    RequestEvent,
    StepPlan,
    StepResult,
    Tick,
    TickEntry,
    WorkerJoined,
    encode,
)
from shared.packing import pack_int32, unpack_int32
from shared.sampling import SamplingParams

log_decoder: Decoder[LogMessage] = Decoder(LogMessage)
intake_decoder: Decoder[IntakeMessage] = Decoder(IntakeMessage)
TICK = Tick(number=7, intake_id="1-0", log_id="2-0", now=3.5, events=(WorkerJoined("w", 1, 64),))


def test_messages_of_the_log_survive_the_wire() -> None:
    for message in (
        StepResult(worker="w", incarnation=1, step_id=2, tokens=pack_int32([1, -1]), joined=((0, "r", 4),)),
        TickEntry(tick=TICK, events=(RequestEvent("r", EventKind.FINISHED, 3, "stop"),)),
    ):
        assert log_decoder.decode(encode(message)) == message


def test_a_plan_survives_the_wire_with_its_tick_and_rows() -> None:
    row = NewRow(0, "r", pack_int32([1, 2]), 2, 0, SamplingParams(max_tokens=1, seed=2**63 - 1, logit_bias=((5, 1.5),)))
    plan = StepPlan(plan_id=1, tick=TICK, added=(row,), chunks=((0, 2),), blocks=pack_int32([0, 9]))
    assert Decoder(StepPlan).decode(encode(plan)) == plan


def test_a_recorded_log_is_plain_messagepack_that_can_be_streamed() -> None:
    data = b"".join(encode(StepResult(worker="w", incarnation=1, step_id=n)) for n in range(3))
    assert [m[3] for m in msgpack.Unpacker(io.BytesIO(data))] == [0, 1, 2]


def test_fields_of_a_newer_minor_version_are_ignored_and_missing_ones_default() -> None:
    fields = msgpack.unpackb(encode(Abort(request_id="r", cause="c", attach=3)))
    assert intake_decoder.decode(msgpack.packb([*fields, "new field"])) == Abort(request_id="r", cause="c", attach=3)
    assert intake_decoder.decode(msgpack.packb(fields[:-1])) == Abort(request_id="r", cause="c")


def test_another_major_version_is_told_apart_from_garbage() -> None:
    fields = msgpack.unpackb(encode(Abort(request_id="r", cause="c")))
    with pytest.raises(UnsupportedSchema) as caught:
        intake_decoder.decode(msgpack.packb(["abort/2", *fields[1:]]))
    assert caught.value.version == 2
    with pytest.raises(MalformedMessage):
        intake_decoder.decode(msgpack.packb(["abolish/1", *fields[1:]]))


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_errors_only(data: bytes) -> None:
    """Case 125."""
    for decoder in (log_decoder, intake_decoder):
        with pytest.raises(ProtocolError):
            decoder.decode(data)


@given(st.binary(min_size=1, max_size=3), st.data())
def test_damaged_messages_raise_protocol_errors_or_decode(noise: bytes, data: st.DataObject) -> None:
    good = encode(TickEntry(tick=TICK, events=(RequestEvent("r", EventKind.FINISHED, 3, "stop"),)))
    at = data.draw(st.integers(0, len(good) - 1))
    with suppress(ProtocolError):
        log_decoder.decode(good[:at] + noise + good[at + len(noise) :])


def test_deep_nesting_is_malformed_not_a_crash() -> None:
    with pytest.raises(MalformedMessage):
        log_decoder.decode(b"\x91" * 100_000)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packing_is_little_endian_and_reversible(values: list[int]) -> None:
    data = pack_int32(values)
    assert data == b"".join(v.to_bytes(4, "little", signed=True) for v in values)
    assert list(unpack_int32(data)) == values

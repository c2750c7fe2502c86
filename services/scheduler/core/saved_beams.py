"""A beam search's part of the snapshot."""

from services.scheduler.core.beam_rows import BeamRows, Move
from services.scheduler.core.beams import Beam, BeamSearch, Result
from services.scheduler.core.saved import Saved
from shared.messages import EndReason
from shared.packing import pack_int32, unpack_int32
from shared.sampling import SamplingParams


class SavedBeams(Saved, frozen=True):
    """One search on its lane."""

    beams: list[tuple[bytes, float]]
    """(output, score)"""
    results: list[tuple[bytes, float, float, int]]
    """(output, logprob, score, EndReason)"""
    spare: list[int]
    made: list[int]
    rows: list[int]
    tails: list[bytes]
    moves: list[tuple[int, int, int, int]]
    opens: bool
    awaited: int


def save_beams(beam_rows: BeamRows | None) -> SavedBeams | None:
    if beam_rows is None:
        return None
    search = beam_rows.search
    return SavedBeams(
        beams=[(pack_int32(beam.tokens), beam.score) for beam in search.beams],
        results=[(pack_int32(r.tokens), r.logprob, r.score, int(r.end_reason)) for r in search.results],
        spare=beam_rows.spare,
        made=beam_rows.made,
        rows=beam_rows.rows,
        tails=[pack_int32(tail) for tail in beam_rows.tails],
        moves=[(move.row, move.parent_row, move.token, move.source) for move in beam_rows.moves],
        opens=beam_rows.opens,
        awaited=beam_rows.awaited,
    )


def restore_beams(saved: SavedBeams | None, params: SamplingParams) -> BeamRows | None:
    if saved is None:
        return None
    beams = [Beam(unpack_int32(tokens), score) for tokens, score in saved.beams]
    results = [
        Result(unpack_int32(tokens), logprob, score, EndReason(reason))
        for tokens, logprob, score, reason in saved.results
    ]
    return BeamRows(
        search=BeamSearch(params, beams, results),
        spare=saved.spare,
        made=saved.made,
        rows=saved.rows,
        tails=[list(unpack_int32(tail)) for tail in saved.tails],
        moves=[Move(*move) for move in saved.moves],
        opens=saved.opens,
        awaited=saved.awaited,
    )

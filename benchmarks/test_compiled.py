"""Kernels, conditions and collectives of a program's text, counted by hand."""

import pytest
from common import RESULTS
from compiled import started_by_a_round

from fedjaxsim.report.files import read_json

GPU = """HloModule jit_rounds

%test (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  ROOT %compare_fusion = pred[] fusion(%p), kind=kLoop, calls=%fused_compare
}

%local (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %gather = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_gather
  %copy.1 = f32[8]{0} copy(%gather)
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%i, %copy.1)
}

%skip (p: f32[8]) -> f32[8] {
  ROOT %copy.2 = f32[8]{0} copy(%p)
}

%chunk (p: f32[8]) -> f32[8] {
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%test, body=%local
  %while.2 = (s32[], f32[8]{0}) while(%t), condition=%test, body=%local, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %gemm = f32[8]{0} custom-call(%x), custom_call_target="__cublas$gemm"
}

%round (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %key = u32[2]{0} fusion(%p), kind=kLoop, calls=%hash, metadata={op_name="jit(rounds)/while/body/draw/add"}
  %cond = f32[8]{0} conditional(%b, %x, %x), true_computation=%chunk, false_computation=%skip, metadata={op_name="jit(rounds)/while/body/work/cond"}
  %start = f32[8]{0} all-reduce-start(%cond), to_apply=%sum
  %done = f32[8]{0} all-reduce-done(%start)
  %noise = f32[8]{0} fusion(%done), kind=kLoop, calls=%normal, metadata={op_name="jit(rounds)/while/body/server/add"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %before = f32[8]{0} copy(%x)
  ROOT %while = (s32[], f32[8]{0}) while(%tuple), condition=%test, body=%round
}
"""  # noqa: E501

TPU = """HloModule jit_rounds

%test (p: (s32[])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(3)
  %p = (s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %constant.1), direction=LT
}

%local (p: (s32[])) -> (s32[]) {
  %add.1 = s32[]{:T(128)} add(%i, %one)
  ROOT %fusion.1 = f32[8]{0:T(128)} fusion(%p), calls=%f, backend_config={"window_config":{"estimated_cycles":"100"}}
}

%round (p: (s32[])) -> (s32[]) {
  %while.1 = (s32[]{:T(128)}) while(%t), condition=%test, body=%local
  ROOT %copy.1 = f32[8]{0:T(128)} copy(%p), backend_config={"window_config":{"estimated_cycles":"7"}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %while = (s32[]) while(%t), condition=%test, body=%round
}
"""  # noqa: E501


MOVING = """HloModule jit_rounds

%test (p: (s32[])) -> pred[] {
  ROOT %compare = pred[] compare(%i, %n), direction=LT
}

%fused_gather (a: f32[100,4], i: s32[3]) -> f32[3,4] {
  %a = f32[100,4]{1,0} parameter(0)
  %i = s32[3]{0} parameter(1)
  ROOT %rows = f32[3,4]{1,0} gather(%a, %i), offset_dims={1}
}

%fused_update (a: f32[100,4], u: f32[3,4]) -> (f32[100,4], f32[3,4]) {
  %u = f32[3,4]{1,0} parameter(1)
  %a = f32[100,4]{1,0} parameter(0)
  %next = f32[100,4]{1,0} dynamic-update-slice(%a, %u, %zero)
  ROOT %both = (f32[100,4]{1,0}, f32[3,4]{1,0}) tuple(%next, %u)
}

%step (p: (s32[])) -> (s32[]) {
  %add = s32[] add(%i, %one)
}

%chunk (p: (s32[])) -> (s32[]) {
  %steps = (s32[]) while(%t), condition=%test, body=%step
}

%round (p: (f32[100,4], s32[3])) -> (f32[100,4], s32[3]) {
  %a = f32[100,4]{1,0} get-tuple-element(%p), index=0
  %i = s32[3]{0} get-tuple-element(%p), index=1
  %take = f32[3,4]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused_gather
  %gemm = (f32[3,2]{1,0}, s8[4096]{0}) custom-call(%take, %w), custom_call_target="__cublas$gemm"
  %w = bf16[4,2]{1,0} constant({...})
  %put = (f32[100,4]{1,0}, f32[3,4]{1,0}) fusion(%a, %take), kind=kLoop, calls=%fused_update
  %chunks = (s32[]) while(%t), condition=%test, body=%chunk
}

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %while = (s32[]) while(%t), condition=%test, body=%round, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501


def test_kernels_move_the_pieces_that_they_gather_and_update():
    moved = started_by_a_round(MOVING, 1).moved
    # Three indices and three rows of four floats, read and written; a product of 3×4 by 4×2
    # bfloat16, without its workspace; three rows read, and written twice.
    assert moved["%take"] == 4 * (3 + 12 + 12)
    assert moved["%gemm"] == 4 * 12 + 2 * 8 + 4 * 6
    assert moved["%put"] == 4 * 3 * 12


def test_loops_of_unknown_length_have_a_number_of_trips_at_each_depth():
    found = started_by_a_round(MOVING, 4, 1.5)
    # Three kernels; four chunks with one and a half steps of one kernel; and the tests.
    assert found.launches == 3 + 5 + 4 * (1.5 + 2.5)
    assert found.waits == 5 + 4 * 2.5


def test_loops_count_with_their_trips_and_branches_as_their_longer_side():
    found = started_by_a_round(GPU, 2)
    # Two local steps of two kernels, three tests of one, five known steps of two, and a product.
    assert found.kernels == {"draw": 1, "work": 2 * 2 + 3 + 5 * 2 + 1, "server": 1, "other": 1}
    assert found.launches == 21
    assert found.waits == 3 + 1
    assert found.collectives == {"all-reduce-start f32[8]{0}": 1}


def test_a_tpu_counts_the_kernels_and_cycles_that_its_compiler_estimates():
    found = started_by_a_round(TPU, 9)
    assert (found.launches, found.waits, found.cycles) == (3 + 1, 0, 3 * 100 + 7)


def test_what_plan_prints_is_within_a_tenth_of_each_compiler_s_peak():
    rows = read_json(RESULTS / "compiled.json")["rows"]
    assert len(rows) > 10
    for row in rows.values():
        assert row["after"]["planned_mb"] == pytest.approx(row["after"]["compiler_peak_mb"], 0.1)

"""Costs counted from HLO text: loops by their bound, collectives by kind, convolutions by what meets the input."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from rpg_jax.planning import hlo

PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%take_one (p0: bf16[36,64,32], p1: s32[]) -> bf16[1,64,32] {
  %p0 = bf16[36,64,32]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %one = bf16[1,64,32]{2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,64,32}
}

%body (state: (s32[], bf16[16,64], bf16[36,64,32])) -> (s32[], bf16[16,64], bf16[36,64,32]) {
  %state = (s32[]{:T(128)}, bf16[16,64]{1,0}, bf16[36,64,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = bf16[16,64]{1,0} get-tuple-element(%state), index=1
  %stack = bf16[36,64,32]{2,1,0} get-tuple-element(%state), index=2
  %w = bf16[1,64,32]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%take_one
  %whole = bf16[1,64,256]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%w), replica_groups=[2,8]<=[16], dimensions={2}
  %y = bf16[16,256]{1,0} convolution(%h, %whole), dim_labels=bf_0io->bf, window={size=1}
  %part = f32[16,64]{1,0} custom-call(%y), custom_call_target="Sharding"
  %r = f32[2,64]{1,0} reduce-scatter(%part), replica_groups={{0,1,2,3,4,5,6,7},{8,9}}, to_apply=%add
  ROOT %next = (s32[], bf16[16,64], bf16[36,64,32]) tuple(%i, %h, %stack)
}

%condition (state: (s32[], bf16[16,64], bf16[36,64,32])) -> pred[] {
  %state.1 = (s32[], bf16[16,64], bf16[36,64,32]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %layers = s32[]{:T(128)} constant(36)
  ROOT %less = pred[] compare(%i.1, %layers), direction=LT
}

ENTRY %main (a: (s32[], bf16[16,64], bf16[36,64,32])) -> (s32[], bf16[16,64], bf16[36,64,32]) {
  %a = (s32[], bf16[16,64], bf16[36,64,32]) parameter(0)
  ROOT %loop = (s32[], bf16[16,64], bf16[36,64,32]) while(%a), condition=%condition, body=%body
}
"""


def test_a_loop_counts_as_often_as_its_condition_says():
    costs = hlo.count(PROGRAM)
    assert costs.flops == 36 * 2 * 16 * 64 * 256
    assert costs.collectives["all-gather"] == 36 * 7 * 64 * 32 * 2
    assert costs.collectives["reduce-scatter"] == 36 * 16 * 64 * 4 * 7 / 8
    assert costs.launches == 36 * 2


def test_traffic_counts_slices_of_a_stack_and_nothing_outside_hbm():
    slice_, h, y, part, r = 64 * 32 * 2, 16 * 64 * 2, 16 * 256 * 2, 16 * 64 * 4, 2 * 64 * 4
    index = 4  # bytes
    body = (
        2 * slice_ + index + slice_ + (h + y) + (y + part) + (part + r)
    )  # the gathered weight is in S(1), on the chip
    assert hlo.count(PROGRAM).bytes == 36 * body


def computation(lines):
    return "ENTRY %main () -> f32[] {\n" + textwrap.indent(textwrap.dedent(lines).strip(), "  ") + "\n}\n"


@pytest.mark.parametrize(
    ("line", "kind", "received"),
    [
        ("all-reduce(%x), replica_groups={{0,1,2,3}}", "all-reduce", 2 * 4000 * 3 / 4),
        ("all-to-all(%x), replica_groups=[1,8]<=[8], dimensions={0}", "all-to-all", 4000 * 7 / 8),
        ("collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", 4000),
        ("all-gather-start(%x), replica_groups=[4,2]<=[8]", "all-gather", 4000),
        ("all-gather(%x), replica_groups=mesh['fsdp'=4,'tensor'=2] {'fsdp'}, dimensions={0}", "all-gather", 4000 * 3),
        ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", "all-reduce", 2 * 4000 * 3 / 4),
    ],
)
def test_bytes_received_follow_from_kind_and_group(line, kind, received):
    costs = hlo.count(computation(f"%x = f32[1000] parameter(0)\n%y = f32[1000] {line}"))
    assert dict(costs.collectives) == {kind: received}


def test_replica_groups_of_an_unknown_form_are_refused():
    assert hlo.replica_group_size("replica_groups={}, use_global_device_ids=true") == 2
    with pytest.raises(ValueError, match=r"cannot be read: <8>, metadata"):
        hlo.replica_group_size("channel_id=1, replica_groups=<8>, metadata={}")


def test_a_gather_on_the_sparse_cores_counts_once():
    # libtpu 0.0.50 gives gathers to the SparseCores of v5p, in three steps; as one fusion the bytes were the same
    program = """
    %gathered (p: bf16[64,32], n: s32[128]) -> bf16[128,32] {
      %p = bf16[64,32] parameter(0)
      %n = s32[128] parameter(1)
      ROOT %rows = bf16[128,32] gather(%p, %n), offset_dims={1}
    }

    ENTRY %main (x: bf16[64,32], i: s32[128]) -> bf16[128,32] {
      %x = bf16[64,32] parameter(0)
      %i = s32[128] parameter(1)
      %start = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%gathered
      %update = ((bf16[64,32], s32[128]), bf16[128,32]) call-update(%start, %x, %i)
      ROOT %done = bf16[128,32] call-done(%update)
    }
    """
    assert hlo.count(textwrap.dedent(program)).bytes == 2 * 128 * 32 * 2


def test_a_slice_that_is_fetched_ahead_counts_without_the_rest():
    # XLA:TPU brings weights into the memory of the chip, S(1), in pieces: twenty counted as twenty times the whole
    lines = """
    %w = s8[80]{0} parameter(0)
    %start = ((s8[80]{0}), s8[4]{0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[4:8]}
    %done = s8[4]{0:S(1)} slice-done(%start)
    %there = ((s8[80]{0}), s8[4]{0}, s32[]{:S(2)}) slice-start(%w), slice={[8:12]}
    """
    assert hlo.count(computation(lines)).bytes == 4 + 2 * 4


def test_a_convolution_counts_what_meets_the_input():
    # a batched product in XLA:TPU's writing: 8 heads as a window of 8 over one position, padded by 7 on both sides
    costs = hlo.count(
        computation("""
        %x = bf16[512,1,64] parameter(0)
        %w = bf16[8,128,64] parameter(1)
        %y = bf16[512,8,128] convolution(%x, %w), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0oi->b0f
        """)
    )
    assert costs.flops == 2 * 512 * 64 * 128 * 8


def test_attention_kernels_count_half_of_the_scores():
    q, k = "%q = bf16[32,1024,128] parameter(0)", "%k = bf16[8,1024,128] parameter(1)"
    call = 'bf16[32,1024,128] custom-call(%q, %k, %k), custom_call_target="tpu_custom_call"'
    forward = hlo.count(computation(f"{q}\n{k}\n%splash_mha_fwd_residuals.2 = {call}"))
    dkv = hlo.count(computation(f"{q}\n{k}\n%splash_mha_dkv_no_residuals = {call}"))
    assert forward.flops == 2 * 2 * 32 * 1024 * 1024 * 128 / 2
    assert dkv.flops == 2 * forward.flops


def test_grouped_products_count_every_row_once():
    given = "%n = s32[9] parameter(0)\n%x = bf16[80,24] parameter(1)\n%w = bf16[8,24,40] parameter(2)"
    given += "\n%y = bf16[80,40] parameter(3)"
    product = '%gmm.3 = bf16[80,40] custom-call(%n, %x, %w), custom_call_target="tpu_custom_call"'
    gradient = '%tgmm.1 = bf16[8,24,40] custom-call(%n, %x, %y), custom_call_target="tpu_custom_call"'
    assert hlo.count(computation(f"{given}\n{product}")).flops == 2 * 80 * 24 * 40
    assert hlo.count(computation(f"{given}\n{gradient}")).flops == 2 * 80 * 24 * 40


def test_decode_kernels_read_one_layer_of_the_cache_and_write_tiles():
    cache = "%c = bf16[36,64,2,128,4096] parameter(0)\n%q = bf16[64,2,4,128] parameter(1)"
    attend = '%ragged_attention.1 = bf16[64,2,4,128] custom-call(%q, %c, %c), custom_call_target="tpu_custom_call"'
    append = '%ragged_append.1 = bf16[36,64,2,128,4096] custom-call(%q, %c), custom_call_target="tpu_custom_call"'
    layer, token = 64 * 2 * 128 * 4096 * 2, 64 * 2 * 4 * 128 * 2
    assert hlo.count(computation(f"{cache}\n{attend}")).bytes == 2 * layer + 2 * token
    assert hlo.count(computation(f"{cache}\n{append}")).bytes == token


def test_a_loop_without_a_constant_bound_counts_once():
    text = PROGRAM.replace("constant(36)", "get-tuple-element(%state.1), index=0")
    assert hlo.count(text).flops == 2 * 16 * 64 * 256


def test_what_this_machine_compiles_is_counted_exactly():
    def scanned(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    x, stack = jnp.ones((16, 32)), jnp.ones((5, 32, 32))
    text = jax.jit(scanned).lower(x, stack).compile().as_text()
    assert hlo.count(text).flops in (5 * 2 * 16 * 32 * 32, 0)  # 0 where XLA:CPU calls a library instead
    assert hlo.count(text).bytes > 5 * 32 * 32 * 4


@pytest.mark.parametrize("kind", ["", "f32[8,128]{1,0:T(8,128)} "], ids=["names", "types and names"])
def test_operands_end_before_the_attributes(kind):
    add = f"%y = f32[8,128]{{1,0}} add({kind}%x, {kind}%x), metadata={{op_name=%x}}"
    assert hlo.count(computation(f"%x = f32[8,128] parameter(0)\n{add}")).bytes == 3 * 8 * 128 * 4

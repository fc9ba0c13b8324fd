"""What a program's kernels move, on programs whose bytes are counted by hand."""

import pytest

from paged.gpu.traffic import Traffic, array_bytes, kernel_traffic

# As XLA writes it: a rotation that takes a part of partial sums, a write into a cache, and two
# custom calls, alone and inside of a fusion.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused_rotate (param_0: f32[4,64,96], param_1: f32[64,8]) -> bf16[64,16] {
  %param_1 = f32[64,8]{1,0} parameter(1)
  %param_0 = f32[4,64,96]{2,1,0} parameter(0)
  %bitcast.1 = f32[4,64,96]{2,1,0} bitcast(%param_0)
  %reduce.1 = f32[64,96]{1,0} reduce(%bitcast.1, %constant.1), dimensions={0}, to_apply=%add
  %constant.1 = f32[] constant(0)
  %slice.1 = f32[64,8]{1,0} slice(%reduce.1), slice={[0:64], [0:8]}
  %slice.2 = f32[64,8]{1,0} slice(%reduce.1), slice={[0:64], [8:16]}
  %multiply.1 = f32[64,8]{1,0} multiply(%slice.1, %param_1)
  %multiply.2 = f32[64,8]{1,0} multiply(%slice.2, %param_1)
  %concatenate.1 = f32[64,16]{1,0} concatenate(%multiply.1, %multiply.2), dimensions={1}
  ROOT %convert.1 = bf16[64,16]{1,0} convert(%concatenate.1), metadata={op_name="rotate (x)"}
}

%fused_scatter (param_0.1: bf16[1000,16], param_1.1: bf16[64,16], param_2.1: s32[64]) -> bf16[1000,16] {
  %param_0.1 = bf16[1000,16]{1,0} parameter(0)
  %param_2.1 = s32[64]{0} parameter(2)
  %param_1.1 = bf16[64,16]{1,0} parameter(1)
  ROOT %scatter.1 = bf16[1000,16]{1,0} scatter(%param_0.1, %param_2.1, %param_1.1), to_apply=%set
}

%fused_call (p0: s32[500], p1: bf16[64,16], p2: bf16[1000,16]) -> (bf16[64,16], bf16[1000,16]) {
  %p0 = s32[500]{0} parameter(0)
  %slice.9 = s32[64]{0} slice(%p0), slice={[100:164]}
  %p1 = bf16[64,16]{1,0} parameter(1)
  %p2 = bf16[1000,16]{1,0} parameter(2)
  ROOT %call.1 = (bf16[64,16]{1,0}, bf16[1000,16]{1,0}) custom-call(%slice.9, %p1, %p2), custom_call_target="k", output_to_operand_aliasing={{1}: (2, {})}, api_version=4
}

ENTRY %main (sums: f32[4,64,96], angles: f32[64,8], cache: bf16[1000,16], packed: s32[500]) -> bf16[64,16] {
  %sums = f32[4,64,96]{2,1,0} parameter(0)
  %angles = f32[64,8]{1,0} parameter(1)
  %cache = bf16[1000,16]{1,0} parameter(2)
  %packed = s32[500]{0} parameter(3), sharding={replicated}
  %rotate_fusion = bf16[64,16]{1,0} fusion(%sums, %angles), kind=kInput, calls=%fused_rotate
  %wrapped_slice = s32[64]{0} slice(%packed), slice={[0:64]}
  %scatter_fusion = bf16[1000,16]{1,0} fusion(%cache, %rotate_fusion, %wrapped_slice), kind=kInput, calls=%fused_scatter
  %call_fusion = (bf16[64,16]{1,0}, bf16[1000,16]{1,0}) fusion(%packed, %rotate_fusion, %scatter_fusion), kind=kCustom, calls=%fused_call
  %part.0 = bf16[64,16]{1,0} get-tuple-element(%call_fusion), index=0
  ROOT %call.2 = bf16[64,16]{1,0} custom-call(%wrapped_slice, %angles, %sums, %packed, %rotate_fusion, /*index=5*/%part.0), custom_call_target="k", output_to_operand_aliasing={{}: (5, {})}, backend_config={opaque = "{}: (1, {})"}
}
"""  # noqa: E501


def test_kernels_are_counted_by_what_they_need_of_their_arrays():
    rows, slots, packed = 64 * 16 * 2, 64 * 4, 500 * 4
    sums, angles = 4 * 64 * 96 * 4, 64 * 8 * 4
    assert kernel_traffic(PROGRAM) == [
        # 16 of 96 columns of each partial sum, through the sum over all of them.
        Traffic("rotate_fusion", 4 * 64 * 16 * 4 + angles, rows),
        Traffic("wrapped_slice", slots, slots),
        # Nothing of the cache but the rows that are new.
        Traffic("scatter_fusion", rows + slots, rows),
        # The cache is updated in place by a call that nothing is known of.
        Traffic("call_fusion", slots + rows, rows),
        Traffic("call.2", slots + angles + sums + packed + rows, 0),
    ]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("bf16[3,5]{1,0}", [30]),
        ("s4[4,8]{1,0:E(4)}", [16]),
        ("(f32[], f8e4m3fn[7]{0}, pred[2,2]{1,0})", [4, 7, 4]),
        ("token[]", [0]),
    ],
)
def test_sizes_of_arrays(shape: str, sizes: list[int]):
    assert array_bytes(shape) == sizes

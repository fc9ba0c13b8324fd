"""`benchmarks/step_profile.py`: kinds of operations, shares of overlapping ones, a real trace."""

import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks.step_profile import (
    COLOURS,
    HOST,
    KINDS,
    OTHER,
    Interval,
    draw_picture,
    kinds_of_ops,
    markdown_table,
    read_trace,
    share_out,
)

# As jaxlib 0.11.2 prints it: a parent's number is one too high, and 1 stands for none.
HLO = """HloModule jit_forward_step

FileNames
1 "/x/paged/models/decoder.py"
2 "/x/paged/models/layers.py"
3 "/x/paged/native/linear.py"
4 "/x/paged/attention_xla.py"

FunctionNames
1 "Attention.__call__"
2 "Linear.__call__"
3 "packed_linear"
4 "_accumulate"
5 "Embed.__call__"
6 "packed_rows"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=1 end_line=1 column=1 end_column=2}
3 {file_name_id=3 function_name_id=3 line=1 end_line=1 column=1 end_column=2}
4 {file_name_id=4 function_name_id=4 line=1 end_line=1 column=1 end_column=2}
5 {file_name_id=2 function_name_id=5 line=1 end_line=1 column=1 end_column=2}
6 {file_name_id=3 function_name_id=6 line=1 end_line=1 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}
5 {file_location_id=5 parent_frame_id=1}
6 {file_location_id=6 parent_frame_id=6}

%body.1 (p: f32[2]) -> f32[2] {
  ROOT %fusion.7 = f32[2]{0} fusion(%p), kind=kLoop, metadata={op_name="exp" stack_frame_id=4}
}

%fused.8 (p: f32[2]) -> f32[2] {
  %mul.5 = f32[2]{0} multiply(%p, %p), metadata={op_name="mul" stack_frame_id=4}
  ROOT %convert.6 = bf16[2]{0} convert(%mul.5)
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %lost.9 = bf16[2]{0} fusion(%p), kind=kLoop, calls=%fused.8, backend_config={"x":["2"]}
  %ffi_call.1 = bf16[2]{0} custom-call(%p), metadata={op_name="ffi_call" stack_frame_id=3}
  %gather.2 = bf16[2]{0} gather(%p), metadata={op_name="gather" stack_frame_id=6}
  %add.3 = bf16[2]{0} add(%p, %p), metadata={op_name="add" stack_frame_id=1}
  %plain.4 = bf16[2]{0} copy(%p)
  %layer.12 = bf16[2]{0} fusion(%p), kind=kLoop, calls=%fused.8, metadata={stack_frame_id=1}
  %bare.10 = bf16[2]{0} fusion(%plain.4, %ffi_call.1), kind=kCustom, calls=%nowhere.1
  %bare.11 = bf16[2]{0} fusion(%plain.4), kind=kCustom, calls=%nowhere.2
}
"""


def test_kind_follows_from_the_functions_an_operation_was_traced_from():
    assert kinds_of_ops(HLO) == {
        "fusion.7": "attention",
        "mul.5": "attention",
        "lost.9": "attention",  # no frame itself, but an operation in it has one
        "ffi_call.1": "linear layers",
        "layer.12": "attention",  # its own frame names no kind
        "bare.10": "linear layers",  # not even that, but an operand with a kind
        "bare.11": OTHER,
        "gather.2": OTHER,  # the embedding, although it calls the same file as linear layers
        "add.3": OTHER,  # `Attention.__call__` itself names no kind
    }


def test_parents_that_are_not_off_by_one_are_understood():
    straight = HLO
    for number, wrong, right in ((1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 2, 1), (5, 1, 0), (6, 6, 5)):
        line = f"{number} {{file_location_id={number} parent_frame_id="
        straight = straight.replace(f"{line}{wrong}}}", f"{line}{right}}}")
    assert straight != HLO
    assert kinds_of_ops(straight) == kinds_of_ops(HLO)


def test_every_kind_has_a_colour():
    assert {*KINDS, HOST, OTHER} == set(COLOURS)


def test_overlapping_operations_share_the_time_and_gaps_are_the_hosts():
    intervals = [
        Interval("m", "a", 10, 30),
        Interval("m", "b", 20, 40),
        Interval("m", "while.1", 35, 60),  # counts where nothing in it runs
        Interval("m", "c", 50, 55),
        Interval("m", "late", 95, 120),
        Interval("m", "elsewhere", 200, 300),
    ]
    times = share_out(0, 100, intervals, lambda interval: interval.op)
    assert times == {
        HOST: 10 + 35,  # 0-10 and 60-95
        "a": 10 + 5,
        "b": 5 + 10,
        "while.1": 10 + 5,  # 40-50 and 55-60
        "c": 5,
        "late": 5,
    }
    assert sum(times.values()) == 100


def test_a_trace_of_this_jax_has_steps_and_operations(tmp_path):
    @jax.jit
    def product(x):
        return jnp.tanh(x @ x).sum()

    x = jnp.ones((400, 400))
    product(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            with jax.profiler.TraceAnnotation("paged step"):
                time.sleep(0.02)
                product(x).block_until_ready()
    steps, intervals = read_trace(tmp_path)
    assert len(steps) == 3
    assert {interval.module for interval in intervals} == {"jit_product"}
    for start, end in steps:
        shares = share_out(start, end, intervals, lambda _: "work")
        assert sum(shares.values()) == pytest.approx(end - start)
        assert shares["work"] > 10_000  # 128 MFLOP take more than 10 microseconds
        assert shares[HOST] > 20e6  # the sleep, nanoseconds


@pytest.mark.notebooks  # run with the tests that have matplotlib
def test_table_and_picture_show_every_kind(tmp_path):
    times = {"linear layers": 6.0, "attention": 3.0, HOST: 1.0, "untraced": 8.0}
    steps = {"decode": times, "prefill": {**times, "attention": 13.0}}
    lines = markdown_table(steps).splitlines()
    assert lines[0] == "| milliseconds | decode | prefill |"
    assert "| attention | 3.00 (30%) | 13.00 (65%) |" in lines
    assert "| RoPE and KV write | 0.00 (0%) | 0.00 (0%) |" in lines
    assert lines[-2:] == [
        "| whole, traced | 10.00 | 20.00 |",
        "| whole, not traced | 8.00 | 8.00 |",
    ]
    picture = tmp_path / "step.svg"
    draw_picture(picture, steps)
    assert "<svg" in picture.read_text()

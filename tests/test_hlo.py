"""Reading compiled programs: texts as XLA writes them, and a real one for eight devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vhajax import hlo

LOOPS = """\
HloModule jit_f, entry_computation_layout={()->f32[]}, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %moved = f32[64]{0:T(256)} all-gather(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %summed = (f32[16]{0}, f32[4]{0}) all-reduce(%y, %z), replica_groups={{0,1,2,3},{4,5,6,7}}, \
to_apply=%add, metadata={op_name="jit(f)/optimizer/sum" stack_frame_id=1}
}

%inner_condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%outer_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %loop.1 = (s32[], f32[8]) while(%t), condition=%inner_condition, body=%inner_body
  %sent = (bf16[32]{0}, bf16[32]{0}, u32[], u32[]) collective-permute-start(%w), \
source_target_pairs={{0,1},{1,0}}
}

%outer_condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[] {
  %loop.2 = (s32[], f32[8]) while(%t), condition=%outer_condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"3"}}
  %started = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups=mesh['data'=4,'model'=2] \
{'data','model'}, dimensions={0}
  %done = f32[64]{0} all-gather-done(%started)
  %cut = f32[8]{0} reduce-scatter(%done), replica_groups=@mesh0['data'=4,'model'=2] {'data'}, \
to_apply=%add
  %swapped = f32[64]{0} all-to-all(%v), replica_groups={}
}
"""


def test_collectives_in_loops_count_as_often_as_they_run():
    found = [(one.kind, one.size, one.times) for one in hlo.collectives(LOOPS)]
    assert found == [
        ("all-gather", 8, 3 * 28),
        ("all-reduce", 4, 3 * 28),
        ("collective-permute", 2, 3),
        ("all-gather", 8, 1),
        ("reduce-scatter", 4, 1),
        ("all-to-all", 8, 1),
    ]


def test_bytes_are_those_of_a_ring():
    sent = [one.sent for one in hlo.collectives(LOOPS)]
    assert sent == [
        7 / 8 * 64 * 4,
        2 * 3 / 4 * (16 + 4) * 4,
        32 * 2,
        7 / 8 * 64 * 4,
        3 / 4 * (8 * 4) * 4,
        7 / 8 * 64 * 4,
    ]
    assert hlo.collectives(LOOPS)[0].total == 84 * 7 / 8 * 64 * 4


def test_scopes_are_read():
    names = [one.name for one in hlo.collectives(LOOPS)]
    assert names == ["", "jit(f)/optimizer/sum", "", "", "", ""]


def test_a_loop_of_unknown_length_is_refused_only_if_it_sends():
    unknown = LOOPS.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    with pytest.raises(ValueError, match=r"loop\.2 sends"):
        hlo.collectives(unknown)
    silent = unknown.replace("body=%outer_body", "body=%add")
    assert len(hlo.collectives(silent)) == 3


FUSED = """\
HloModule jit_f, num_partitions=4

%first (p: bf16[8]) -> bf16[32] {
  %g.1 = bf16[32]{0} all-gather(%p), channel_id=7, replica_groups={}, \
frontend_attributes={chain_id="2"}
}

%second (p: bf16[8]) -> bf16[32] {
  %g.2 = bf16[32]{0} all-gather(%p), channel_id=7, replica_groups={}, \
frontend_attributes={chain_id="2"}
}

%other (p: bf16[8]) -> bf16[32] {
  %g.3 = bf16[32]{0} all-gather(%p), channel_id=7, replica_groups={}, \
frontend_attributes={chain_id="3"}
}

%all-reduce-scatter.5 (p: bf16[32]) -> bf16[8] {
  %summed = bf16[32]{0} all-reduce(%p), replica_groups={}, to_apply=%add
  ROOT %cut = bf16[8]{0} dynamic-slice(%summed, %i), dynamic_slice_sizes={8}
}

ENTRY %main (x: bf16[8]) -> bf16[8] {
  %a = bf16[32]{0} fusion(%x), kind=kCustom, calls=%first
  %b = bf16[32]{0} fusion(%a), kind=kOutput, calls=%second
  %c = bf16[32]{0} fusion(%b), kind=kOutput, calls=%other
  %made = bf16[32]{0} fusion(%c), kind=kLoop, calls=%none, metadata={op_name="jit(f)/loss/cut"}
  %d = bf16[8]{0} fusion(%made), kind=kCustom, calls=%all-reduce-scatter.5, \
metadata={op_name="jit(f)/ffn/cut"}
  %e = bf16[32]{0} all-reduce(%made), replica_groups={}, to_apply=%add
}
"""


def test_tpu_fusions_that_share_a_collective_count_it_once():
    found = [(one.kind, one.sent) for one in hlo.collectives(FUSED)]
    whole = 32 * 2
    assert found == [
        ("all-gather", 3 / 4 * whole),
        ("all-gather", 3 / 4 * whole),
        ("reduce-scatter", 3 / 4 * whole),
        ("all-reduce", 2 * 3 / 4 * whole),
    ]


def test_a_scope_that_xla_lost_is_taken_from_the_fusion_or_the_operand():
    names = [one.name for one in hlo.collectives(FUSED)]
    assert names[2:] == ["jit(f)/ffn/cut", "jit(f)/loss/cut"]


def test_a_real_program():
    """A scan of 5 in a scan of 3, over 4 × 2 devices."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)

    def inner(x, _):
        return jnp.sin(jax.lax.psum(x, "data")), None

    def outer(x, _):
        x = jax.lax.scan(inner, x, None, length=5)[0]
        whole = jax.lax.all_gather(x, "model", tiled=True)
        return x + whole.sum(), None

    def run(x):
        return jax.lax.scan(outer, x, None, length=3)[0]

    spec = PartitionSpec("model")
    with jax.set_mesh(mesh):
        run = jax.jit(jax.shard_map(run, in_specs=spec, out_specs=spec, check_vma=False))
        where = NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=where)
        text = run.lower(x).compile().as_text()
    found = sorted((one.kind, one.size, one.times, one.sent) for one in hlo.collectives(text))
    assert found == [
        ("all-gather", 2, 3, 1 / 2 * 64 * 4),
        ("all-reduce", 4, 15, 2 * 3 / 4 * 32 * 4),
    ]

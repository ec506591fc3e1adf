//! Decides which programs the kernels of this backend support. Unsupported programs are rejected before
//! anything runs.

use tessera_ir::{DType, Op, OpView, Opcode, Program, ValueId};

use super::launch::dispatch::build_op;
use super::launch::site::LaunchSite;

/// Returns the view of op `i`, for which the backend can build device work.
///
/// # Errors
/// The property of the op that the kernels here do not support, or why the op has no view.
pub(super) fn read_supported(p: &Program, i: usize) -> Result<OpView, String> {
    let op = &p.ops[i];
    let has_supported_dtype = |v: &&ValueId| {
        let t = p.type_of(**v);
        t.is_token() || t.shape.is_empty() || matches!(t.dtype, DType::F32 | DType::Bf16 | DType::E4m3)
    };
    if let Some(v) = op.operands.iter().chain(&op.results).find(|v| !has_supported_dtype(v)) {
        return Err(format!("dtype {} (this backend computes in f32, bf16 and e4m3)", p.type_of(*v).dtype));
    }
    let view = op.view().map_err(|e| e.message)?;
    build_op(&LaunchSite::without_memory(p), i, &view, None).map_err(|e| e.0)?;
    Ok(view)
}

/// Explains why this backend cannot run a program whose ops it supports one by one; `None` if it can.
/// GEMMs share a workspace, and so do the ops of several launches, which pass numbers to one another through scratch
/// memory, so each must run on one stream. So must the ops that multiply experts in two tiers: copies for a layer wait for
/// the end of an earlier one by its place on the stream.
pub(super) fn unsupported_streams(p: &Program) -> Option<String> {
    let in_scratch: &[Opcode] = &[
        Opcode::Attention,
        Opcode::PagedAttention,
        Opcode::Sample,
        Opcode::ExpertDistance,
        Opcode::ExpertPackFused,
    ];
    let is_matmul = |op: &Op| op.opcode == Opcode::Matmul;
    let is_in_scratch = |op: &Op| in_scratch.contains(&op.opcode);
    let weights = p.ops.iter().filter(|op| op.states_tier());
    let tiered: Vec<ValueId> = weights.flat_map(|op| op.results.iter().copied()).collect();
    let reads_tiers = |op: &Op| op.operands.iter().any(|v| tiered.contains(v));
    let sharing: [&dyn Fn(&Op) -> bool; 3] = [&is_matmul, &is_in_scratch, &reads_tiers];
    sharing.into_iter().find_map(|shares| {
        let mut ops = p.ops.iter().filter(|op| shares(op));
        let first = ops.next()?;
        let other = ops.find(|op| op.stream != first.stream)?;
        let name = |op: &Op| p.streams.get(op.stream.0 as usize).map_or("?", String::as_str);
        Some(format!("{} on the streams {} and {}", other.opcode.name(), name(first), name(other)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn an_op_without_a_kernel_is_unsupported() {
        let reason = |text: &str| {
            let p = parse_all(&format!("program @p {{ {text} }}"), "test").expect("a program").remove(0);
            (0..p.ops.len()).find_map(|i| read_supported(&p, i).err())
        };
        let matmul = |segments: u64| {
            format!(
                "%x = input : f32[16, 8] %y = toperator.matmul %x, %x {{segments = {segments}}} output \"y\", %y"
            )
        };
        assert_eq!(reason(&matmul(1)), None);
        assert_eq!(
            reason(&matmul(2)).as_deref(),
            Some("segmented sums: on GPUs plan with --numerics standard")
        );
        let bf16 = "%w = weight \"w\" : bf16[4, 8] %t = toperator.cast %w {to = \"f16\"} : f16[4, 8]";
        assert_eq!(reason(bf16).as_deref(), Some("dtype f16 (this backend computes in f32, bf16 and e4m3)"));
        let e4m3 = |inner: u64, columns: u64| {
            format!(
                "%x = input : f32[4, {inner}] %h = toperator.cast %x {{to = \"bf16\"}} : bf16[4, {inner}] \
                 %q, %s = toperator.quantize %h \
                 %w = weight \"w\" {{load = \"e4m3\"}} : e4m3[{columns}, {inner}] \
                 %ws = weight \"w\" {{load = \"e4m3.scale\"}} : f32[{columns}] \
                 %y = toperator.matmul %q, %w, x_scale=%s, w_scale=%ws"
            )
        };
        assert_eq!(reason(&e4m3(48, 24)), None);
        for (inner, columns) in [(40, 24), (32, 28)] {
            let why = reason(&e4m3(inner, columns)).unwrap_or_default();
            assert!(why.contains(&format!("{inner} inputs and {columns} outputs")), "{why}");
        }
        let ranking = |experts: u64| {
            format!(
                "%x = input : f32[2, {experts}] %e = toperator.top_k_experts %x {{score = \"sigmoid\", groups = 2, \
                 keep_groups = 2, top_k = 3}} output \"e\", %e"
            )
        };
        assert_eq!(reason(&ranking(4096)), None);
        assert_eq!(reason(&ranking(4098)).as_deref(), Some("a ranking of 4098 experts with groups = 2"));
        let output = "%w = weight \"w\" : bf16[4, 8] output \"w\", %w";
        assert_eq!(reason(output).as_deref(), Some("inputs and outputs other than f32"));
    }

    #[test]
    fn ops_that_share_a_workspace_must_share_a_stream() {
        let reason = |stream: &str| {
            let text = format!(
                "program @p role(a) mesh(tp=2) streams(compute, aside) {{ %x = input : f32[4, 4] \
                 {{tp: replicated}} @compute %a = ttile.matmul %x, %x @compute %b = ttile.matmul %a, %x \
                 @{stream} output \"b\", %b }}"
            );
            let p = parse_all(&text, "test").expect("a program").remove(0);
            unsupported_streams(&p)
        };
        assert_eq!(reason("compute"), None);
        assert_eq!(reason("aside").as_deref(), Some("matmul on the streams compute and aside"));
        let text = "program @p role(a) mesh(tp=2) streams(compute, aside) { %x = input : f32[4, 4] @compute \
            %e = ttile.top_k_experts %x {top_k = 1} @compute \
            %p = ttile.expert_pack_fused %x, %e {capacity = 4, groups = 4} @compute \
            %d = ttile.expert_distance %x {distances = [0], expert_homes = [0, 0, 0, 0], weight = 1.0} @aside \
            output \"p\", %p output \"d\", %d }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let why = unsupported_streams(&p);
        assert_eq!(why.as_deref(), Some("expert_distance on the streams compute and aside"));
        let experts = |tier: &str| {
            let text = format!(
                "program @p role(a) mesh(tp=2) streams(compute, aside) {{ %x = input : f32[4, 2, 8] @compute \
                 %n = input : f32[4, 1] @compute %w = weight \"w\" {tier} : f32[4, 8, 8] @compute \
                 %v = weight \"v\" {tier} : f32[4, 8, 8] @compute \
                 %a = ttile.grouped_matmul %x, %w, %n {{rows = 4}} @compute \
                 %b = ttile.grouped_matmul %x, %v, %n {{rows = 4}} @aside output \"a\", %a output \"b\", %b }}"
            );
            unsupported_streams(&parse_all(&text, "test").expect("a program").remove(0))
        };
        assert_eq!(experts(""), None);
        let tier = "{tier_layer = 0, tier_policy = \"lru\", tier_resident = 2, tier_window = 1}";
        assert_eq!(experts(tier).as_deref(), Some("grouped_matmul on the streams compute and aside"));
    }

    #[test]
    fn only_shards_of_the_first_two_dims_are_exchanged() {
        let reason = |concat: u64, split: u64, wire: &str| {
            let text = format!(
                "program @p role(r) mesh(ep=2) {{ %x = input : f32[4, 4, 8] \
                 %s = ttile.take_shard %x {{axis = \"ep\", dim = {concat}}} \
                 %y = ttile.collective.all_to_all %s {{axis = \"ep\", concat = {concat}, split = {split}{wire}}} \
                 output \"y\", %y }}"
            );
            let p = parse_all(&text, "test").expect("a program").remove(0);
            (0..p.ops.len()).find_map(|i| read_supported(&p, i).err())
        };
        assert_eq!(reason(1, 0, ", wire = \"fp8_e4m3\""), None);
        assert_eq!(reason(0, 1, ""), None);
        let why = reason(2, 0, "").unwrap_or_default();
        assert!(why.contains("another dim than the first two"), "{why}");
    }
}

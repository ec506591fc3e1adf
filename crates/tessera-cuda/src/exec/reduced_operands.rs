//! Reductions of inputs, weights and buffers: peers read the operand of a reduction in the exchange memory, where these values
//! do not lie. So such an operand is copied to scratch memory first, which belongs to the exchange memory.

#![allow(unsafe_code, reason = "copies between memory of the backend")]

use std::collections::BTreeMap;

use tessera_ir::{CollectiveOp, OpByKind, OpView, Program};

use super::{CudaBackend, ValueLocation};
use crate::device_memory::ALIGNMENT;
use crate::driver::{CudaResult, CudaStream};

/// Places the operand of each reduction that has no slot after scratch memory of `end` bytes. Returns byte offsets into
/// scratch memory, by op.
pub(super) fn place_reduced_operands(
    p: &Program,
    views: &[OpView],
    locations: &[ValueLocation],
    end: &mut u64,
) -> BTreeMap<usize, u64> {
    let mut placed = BTreeMap::new();
    for (i, view) in views.iter().enumerate() {
        let operand = match view.by_kind() {
            OpByKind::Collective(CollectiveOp::AllReduce(_) | CollectiveOp::ReduceScatter(_)) => {
                p.ops[i].operands.first()
            }
            _ => None,
        };
        let Some(operand) = operand else { continue };
        if !matches!(locations[operand.0 as usize], ValueLocation::Slot(_)) {
            placed.insert(i, *end);
            *end += p.type_of(*operand).byte_size().0.next_multiple_of(ALIGNMENT);
        }
    }
    placed
}

impl CudaBackend {
    /// Copies the operand of a reduction to where the peers read it, if it lies elsewhere.
    pub(super) fn copy_reduced_operand(
        &self,
        program: usize,
        i: usize,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let own = &self.programs[program];
        let operand = own.program.ops[i].operands.first().filter(|_| own.reduced_operands.contains_key(&i));
        let Some(operand) = operand else { return Ok(()) };
        let (to, from) = (self.operand_address(program, i)?, self.value_address(program, *operand)?);
        let bytes = own.program.type_of(*operand).byte_size().0 as usize;
        // SAFETY: both ranges have these bytes and belong to the backend. The plan orders this stream behind the operand,
        // and peers finished reading the previous run's copy before that run ended.
        unsafe { stream.copy_async(to, from, bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn only_operands_of_reductions_without_a_slot_are_placed() {
        let text = "program @p role(r) mesh(tp=2) { \
            %x = input : f32[6, 130] {tp: partial(sum)} %y = input : f32[4, 6] {tp: shard(1)} \
            %a = ttile.collective.all_reduce %x {axis = \"tp\", reduction = \"sum\"} \
            %s = ttile.add %x, %x \
            %b = ttile.collective.reduce_scatter %s {axis = \"tp\", dim = 0, reduction = \"sum\"} \
            %c = ttile.collective.all_gather %y {axis = \"tp\", dim = 1} \
            output \"a\", %a output \"b\", %b output \"c\", %c }";
        let p = parse_all(text, "test").unwrap_or_else(|e| panic!("{e:?}")).remove(0);
        let views: Vec<OpView> = p.ops.iter().map(|op| op.view().expect("a view")).collect();
        let is_input = |value: usize| {
            p.ops.iter().any(|op| {
                op.opcode == tessera_ir::Opcode::Input
                    && op.results.first().is_some_and(|v| v.0 as usize == value)
            })
        };
        let locations: Vec<ValueLocation> = (0..p.values.len())
            .map(|value| if is_input(value) { ValueLocation::CallArea(0) } else { ValueLocation::Slot(0) })
            .collect();
        let mut end = 512;
        let placed = place_reduced_operands(&p, &views, &locations, &mut end);
        let all_reduce = p.ops.iter().position(|op| op.opcode == tessera_ir::Opcode::AllReduce);
        assert_eq!(placed.into_iter().collect::<Vec<_>>(), [(all_reduce.expect("an all-reduce"), 512)]);
        assert_eq!(end, 512 + (6 * 130 * 4_u64).next_multiple_of(ALIGNMENT));
    }
}

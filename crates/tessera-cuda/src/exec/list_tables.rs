//! Lists of numbers that ops state as attributes, as tables in device memory: the homes of experts, the distances of
//! homes, and the expert in each place.
//!
//! A list has a number per expert, place or pair of homes, too many for the arguments of a launch. No call changes it, so
//! it is uploaded once, at load, to the program's call area, behind what a call fills; a weight would be read from a
//! checkpoint and digested. Layers of a model state equal lists, which share a table.

use std::collections::BTreeMap;

use tessera_ir::OpView;

use crate::device_memory::{ALIGNMENT, DeviceMemory, copy_to_device};
use crate::driver::{CudaError, CudaResult};

/// The offset of each list of a program in its call area.
#[derive(Debug, Default)]
pub(super) struct ListTables {
    offsets: BTreeMap<Vec<u64>, u64>,
}

impl ListTables {
    /// Plans a table for each list of a program, given by the views of its ops, and appends the tables to the call
    /// area, whose size is `area`.
    pub(super) fn plan(views: &[OpView], area: &mut u64) -> ListTables {
        let mut out = ListTables::default();
        for list in views.iter().flat_map(stated_lists).filter(|list| !list.is_empty()) {
            if !out.offsets.contains_key(list) {
                out.offsets.insert(list.to_vec(), *area);
                *area = (*area + 8 * list.len() as u64).next_multiple_of(ALIGNMENT);
            }
        }
        out
    }

    pub(super) fn upload_tables(&self, area: &DeviceMemory) -> CudaResult<()> {
        self.offsets.iter().try_for_each(|(list, at)| copy_to_device(area.slice(*at, list.len())?, list))
    }

    /// Returns the offset of a list in the call area.
    pub(super) fn offset_of(&self, list: &[u64]) -> CudaResult<u64> {
        let missing = || CudaError(format!("no table for a list of {} numbers", list.len()));
        self.offsets.get(list).copied().ok_or_else(missing)
    }
}

/// Returns the lists that an op reads on the device.
fn stated_lists(view: &OpView) -> [&[u64]; 2] {
    match view {
        OpView::ExpertPlaces(v) => [&v.residents, &[]],
        OpView::ExpertLocality(v) => [&v.home_groups, &v.expert_groups],
        OpView::ExpertDistance(v) => [&v.distances, &v.expert_homes],
        OpView::ExpertDistanceGradient(v) => [&v.distances, &v.expert_homes],
        _ => [&[]; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn equal_lists_share_a_table() {
        let text = "program @p { %x = input : f32[4, 3] \
            %a = toperator.expert_locality %x {expert_groups = [0, 0, 1], home_groups = [0, 1], weight = 1.0} \
            %b = toperator.expert_locality %a {expert_groups = [0, 1, 1], home_groups = [0, 1], weight = 1.0} \
            %d = toperator.expert_distance %b {distances = [0, 2, 1, 0], expert_homes = [0, 0, 1], weight = 0.5} \
            output \"d\", %d }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let views: Vec<OpView> = p.ops.iter().map(|op| op.view().expect("a view")).collect();
        let mut area = ALIGNMENT;
        let tables = ListTables::plan(&views, &mut area);
        let lists: [&[u64]; 4] = [&[0, 1], &[0, 0, 1], &[0, 1, 1], &[0, 2, 1, 0]];
        let offsets = lists.map(|list| tables.offset_of(list).expect("a table"));
        assert_eq!(offsets, [1, 2, 3, 4].map(|i| i * ALIGNMENT));
        assert_eq!((tables.offsets.len(), area), (4, 5 * ALIGNMENT));
        assert!(tables.offset_of(&[7]).is_err());
    }
}

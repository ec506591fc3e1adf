//! The algorithm with which a plan tags the sums that NCCL would carry, and the setting that makes NCCL follow it.

use tessera_ir::{CollectiveAlgorithm, Transport};
use tessera_mesh::{GroupPath, HostMap};
use tessera_verify::SealedPlan;

use crate::group_traffic::visit_exchanges;

/// The tags of the sums that NCCL would carry.
///
/// `NCCL_ALGO` names the algorithms of a function, such as all-reduce, for all sizes. So NCCL can follow
/// the tags of a plan only if all of them are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NcclTags {
    /// All-reduces that are tagged with the tree, once for each op and group.
    pub trees: usize,
    /// All-reduces that are tagged with the ring, once for each op and group.
    pub rings: usize,
}

impl NcclTags {
    /// Counts the tags of a plan whose ranks are on these hosts. NCCL carries the data of groups with
    /// members on several hosts, and of collectives that request it.
    #[must_use]
    pub fn from_plan(sealed: &SealedPlan, hosts: &HostMap) -> NcclTags {
        let mut tags = NcclTags::default();
        for phase in sealed.phase_names() {
            visit_exchanges(sealed, hosts, phase, |_, op, communicator, _| {
                let path = hosts.path_between(&communicator.members).unwrap_or(GroupPath::Network);
                if !path.leaves_host() && op.requested_transport() != Some(Transport::Nccl) {
                    return;
                }
                match op.algorithm_tag() {
                    Some(CollectiveAlgorithm::Tree) => tags.trees += 1,
                    Some(CollectiveAlgorithm::Ring) => tags.rings += 1,
                    None => {}
                }
            });
        }
        tags
    }

    /// Returns the value of `NCCL_ALGO` that makes NCCL follow the tags; `None` without tags, and if
    /// they differ. NCCL reads a name of a function in this variable since its version 2.24.
    #[must_use]
    pub fn nccl_setting(self) -> Option<String> {
        let algorithm = match (self.trees, self.rings) {
            (1.., 0) => CollectiveAlgorithm::Tree,
            (0, 1..) => CollectiveAlgorithm::Ring,
            _ => return None,
        };
        Some(format!("allreduce:{}", algorithm.name()))
    }

    /// Returns why NCCL cannot follow the tags; `None` if it can, or if there are none.
    #[must_use]
    pub fn describe_conflict(self) -> Option<String> {
        let count = |n: usize, name: &str| format!("{n} all-reduce{} {name}", if n == 1 { "" } else { "s" });
        (self.trees > 0 && self.rings > 0).then(|| {
            format!(
                "NCCL_ALGO is not set, and NCCL chooses: the plan tags {} and {}, but NCCL takes one algorithm per \
                 function and not per size",
                count(self.trees, "tree"),
                count(self.rings, "ring"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_follows_tags_only_if_all_are_equal() {
        let (none, trees) = (NcclTags::default(), NcclTags { trees: 2, rings: 0 });
        let (rings, both) = (NcclTags { trees: 0, rings: 1 }, NcclTags { trees: 1, rings: 3 });
        let settings = [none, trees, rings, both].map(NcclTags::nccl_setting);
        let settings: Vec<Option<&str>> = settings.iter().map(Option::as_deref).collect();
        assert_eq!(settings, [None, Some("allreduce:tree"), Some("allreduce:ring"), None]);
        assert!([none, trees, rings].iter().all(|tags| tags.describe_conflict().is_none()));
        let why = both.describe_conflict().unwrap_or_default();
        assert!(why.contains("1 all-reduce tree and 3 all-reduces ring"), "{why}");
    }
}

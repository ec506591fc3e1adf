//! Names of weights that stand for the tensors of several experts.
//!
//! A program reads the matrices of all experts of a layer as one weight, whose first dim is the expert. Its name says
//! which tensors these are, so whatever reads, compares or reports weights by name needs no list beside it.

/// The part of a weight's name that stands for the number of each expert.
pub const EVERY_EXPERT: &str = ".*.";

/// Returns the name of the weight that holds these experts, in this order, for the name of one that holds every expert.
#[must_use]
pub fn name_experts(of_every: &str, experts: &[u64]) -> String {
    let list: Vec<String> = experts.iter().map(u64::to_string).collect();
    of_every.replacen(EVERY_EXPERT, &format!(".{{{}}}.", list.join(",")), 1)
}

/// The name of a weight that holds experts, in its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTensorNames<'a> {
    before: &'a str,
    after: &'a str,
    /// The experts that the name lists; `None` for every expert in order.
    listed: Option<Vec<u64>>,
}

impl<'a> ExpertTensorNames<'a> {
    /// Reads the name of a weight; `None` for one that names no experts.
    #[must_use]
    pub fn parse(name: &'a str) -> Option<ExpertTensorNames<'a>> {
        if let Some((before, after)) = name.split_once(EVERY_EXPERT) {
            return Some(ExpertTensorNames { before, after, listed: None });
        }
        let (before, rest) = name.split_once(".{")?;
        let (list, after) = rest.split_once("}.")?;
        let listed = list.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(ExpertTensorNames { before, after, listed: Some(listed) })
    }

    /// Returns the experts that the name lists; `None` for every expert.
    #[must_use]
    pub fn listed_experts(&self) -> Option<&[u64]> {
        self.listed.as_deref()
    }

    /// Returns the name of the weight that holds every expert.
    #[must_use]
    pub fn name_every_expert(&self) -> String {
        format!("{}{EVERY_EXPERT}{}", self.before, self.after)
    }

    /// Returns the name of the tensor at an index of the first dim.
    #[must_use]
    pub fn name_tensor(&self, index: u64) -> String {
        let listed = self.listed.as_ref().and_then(|list| list.get(usize::try_from(index).ok()?));
        format!("{}.{}.{}", self.before, listed.unwrap_or(&index), self.after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_every_expert_or_for_a_list() {
        let every = "model.layers.3.mlp.experts.*.gate_proj.weight";
        let some = name_experts(every, &[2, 0, 2]);
        assert_eq!(some, "model.layers.3.mlp.experts.{2,0,2}.gate_proj.weight");
        let tensors = |name: &str| -> Vec<String> {
            (0..3)
                .map(|i| ExpertTensorNames::parse(name).map_or(String::new(), |n| n.name_tensor(i)))
                .collect()
        };
        let expert = |e: u64| format!("model.layers.3.mlp.experts.{e}.gate_proj.weight");
        assert_eq!(ExpertTensorNames::parse(&some).map(|n| n.name_every_expert()).as_deref(), Some(every));
        assert_eq!(tensors(every), [expert(0), expert(1), expert(2)]);
        assert_eq!(tensors(&some), [expert(2), expert(0), expert(2)]);
        assert_eq!(ExpertTensorNames::parse("model.norm.weight"), None);
        assert_eq!(ExpertTensorNames::parse("a.{1,x}.b"), None);
    }
}

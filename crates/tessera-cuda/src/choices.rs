//! What makes each large product, kept beside compiled kernels from run to run. How it was found out, [`tuning`](crate::tuning) knows.

use std::sync::Arc;

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::compile::{Shelf, kept_name};
use crate::driver::Context;
use crate::products::{By, Shape};
use crate::tables::CublasLt;
use crate::tuning::{RULE, Rival};

/// What was chosen before, by this process and others.
#[derive(Debug)]
pub(crate) struct Choices {
    kept: Option<Arc<dyn Shelf>>,
    /// What a time depends on that a process does not change: device and library.
    here: String,
}

impl Choices {
    pub(crate) fn new(kept: Option<Arc<dyn Shelf>>, context: &Context, lt: &CublasLt) -> Choices {
        use Attribute as A;
        let told = [
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
            A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
        ];
        let told = told.map(|which| context.attribute(which).ok());
        Choices { kept, here: format!("{told:?} {}", (lt.version)()) }
    }

    pub(crate) fn find(&self, key: &str) -> Option<Choice> {
        let text = self.kept.as_ref()?.find(key)?;
        Choice::read(std::str::from_utf8(&text).ok()?)
    }

    pub(crate) fn keep(&self, key: &str, choice: Choice) {
        if let Some(kept) = &self.kept {
            kept.keep(key, choice.text().as_bytes());
        }
    }

    /// Under which name the choice for a shape is kept: it tells all that the candidates are.
    pub(crate) fn key(&self, s: &Shape, listed: &[cublasLtMatmulAlgo_t], rival: Option<&Rival>) -> String {
        let mut parts = vec![self.here.clone(), format!("{s:?} {RULE:?}")];
        parts.extend(listed.iter().map(|algo| format!("{:x?}", algo.data)));
        if let Some(rival) = rival {
            parts.extend([format!("{rival:?}{:?}", rival.cut.defines()), rival.cut.source()]);
        }
        kept_name("product", parts.iter().map(String::as_str), "choice")
    }
}

/// Who makes a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The library, by the candidate of this place.
    Library(usize),
    Own,
}

impl Choice {
    fn text(self) -> String {
        match self {
            Choice::Library(i) => format!("library {i}\n"),
            Choice::Own => "own\n".to_string(),
        }
    }

    fn read(text: &str) -> Option<Choice> {
        match text.trim_end() {
            "own" => Some(Choice::Own),
            other => other.strip_prefix("library ")?.parse().ok().map(Choice::Library),
        }
    }

    /// None for a candidate that is not there.
    pub(crate) fn by(self, candidates: &[By], rival: Option<&Rival>) -> Option<By> {
        match self {
            Choice::Library(i) => candidates.get(i).copied(),
            Choice::Own => rival.map(|r| By::Own(r.cut)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use crate::products::SQUARE;
    use crate::warpgroups::{Cut, Ending};

    #[test]
    fn choices_are_read_as_they_were_written() {
        for choice in [Choice::Own, Choice::Library(0), Choice::Library(17)] {
            assert_eq!(Choice::read(&choice.text()), Some(choice));
        }
        for text in ["", "library", "library -1", "library 1 2", "OWN"] {
            assert_eq!(Choice::read(text), None, "{text:?}");
        }
        // One of another list, or of a kernel that is not there.
        assert!(Choice::Library(3).by(&[], None).is_none());
        assert!(Choice::Own.by(&[], None).is_none());
    }

    #[test]
    fn a_choice_is_kept_for_one_device_shape_and_list() {
        let choices = |here: &str| Choices { kept: None, here: here.into() };
        let algo = |n: u64| cublasLtMatmulAlgo_t { data: [n; 8] };
        let cut = |width| Cut { width, same_columns: true, ending: Ending::Plain };
        let rival = |width, spared_bytes| Rival { cut: cut(width), spared_bytes };
        let fewer = Shape { rows: 2340, ..SQUARE };
        let keys = [
            choices("a").key(&SQUARE, &[algo(1), algo(2)], None),
            choices("b").key(&SQUARE, &[algo(1), algo(2)], None),
            choices("a").key(&fewer, &[algo(1), algo(2)], None),
            choices("a").key(&SQUARE, &[algo(2), algo(1)], None),
            choices("a").key(&SQUARE, &[algo(1), algo(2)], Some(&rival(184, 0))),
            choices("a").key(&SQUARE, &[algo(1), algo(2)], Some(&rival(192, 0))),
            choices("a").key(&SQUARE, &[algo(1), algo(2)], Some(&rival(184, 8))),
        ];
        let distinct: BTreeSet<&String> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(keys[0], choices("a").key(&SQUARE, &[algo(1), algo(2)], None));
    }
}

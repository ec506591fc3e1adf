//! The passes of a forward through the blocks: one, or two under guidance.

use crate::video_model::VideoModel;

/// A pass through the blocks, with caches of its own.
///
/// Under guidance a program has both passes, one after the other, so that the first stage of a pipeline
/// computes the second pass while the next stage computes the first. Blocks in pairs, and both passes as
/// one batch, would let the stages wait for each other.
#[derive(Clone, Copy)]
pub(crate) enum ForwardPass {
    /// With the keys and values of the prompt.
    Prompt,
    /// With those of the negative prompt.
    Negative,
}

impl ForwardPass {
    /// Returns the passes of every forward of a model, in order.
    pub(crate) fn list_passes(m: &VideoModel) -> &'static [ForwardPass] {
        match m.stream.guidance {
            Some(_) => &[ForwardPass::Prompt, ForwardPass::Negative],
            None => &[ForwardPass::Prompt],
        }
    }

    /// Returns the buffer with a block's keys of a family: `kv` or `cross`. The family comes first,
    /// because strategies and dtype policies read it there.
    pub(crate) fn name_keys(self, family: &str, block: u64) -> String {
        format!("{family}{}.{block}.k", self.suffix())
    }

    /// Returns the buffer with a block's values of a family.
    pub(crate) fn name_values(self, family: &str, block: u64) -> String {
        format!("{family}{}.{block}.v", self.suffix())
    }

    fn suffix(self) -> &'static str {
        match self {
            ForwardPass::Prompt => "",
            ForwardPass::Negative => ".negative",
        }
    }
}

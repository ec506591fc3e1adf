//! The number under which PyTorch compiles a frame, such as `0/1`.

use std::fmt;

/// Identity of a compile within one rank: the frame, and how often the frame was compiled before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CompileId {
    /// Number of the compiled-autograd call, if it is one.
    pub autograd: Option<u32>,
    /// Number of the frame, from 0; absent in compiled autograd outside of a frame.
    pub frame: Option<u32>,
    /// Number of the compile of this frame, from 0.
    pub compile: Option<u32>,
}

impl CompileId {
    /// Reads `0/1`, `!2/0/1` or `!2`. Anything else gives `None`.
    #[must_use]
    pub fn from_text(text: &str) -> Option<CompileId> {
        let (autograd, rest) = match text.strip_prefix('!') {
            None => (None, text),
            Some(rest) => {
                let (number, rest) = rest.split_once('/').unwrap_or((rest, ""));
                (Some(number.parse().ok()?), rest)
            }
        };
        if rest.is_empty() {
            return autograd.map(|a| CompileId { autograd: Some(a), frame: None, compile: None });
        }
        // An attempt may follow, as in 0/1_2.
        let (frame, compile) = rest.split('_').next()?.split_once('/')?;
        Some(CompileId { autograd, frame: frame.parse().ok(), compile: compile.parse().ok() })
    }

    /// Returns whether the frame was compiled before.
    #[must_use]
    pub fn is_recompile(self) -> bool {
        self.compile.unwrap_or(0) > 0
    }

    /// Returns the frame, by which recompiles of the same code belong together.
    #[must_use]
    pub fn frame_key(self) -> (Option<u32>, Option<u32>) {
        (self.autograd, self.frame)
    }
}

impl fmt::Display for CompileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |n: Option<u32>| n.map_or("-".to_string(), |n| n.to_string());
        match (self.autograd, self.frame, self.compile) {
            (Some(a), None, None) => write!(f, "!{a}"),
            (Some(a), frame, compile) => write!(f, "!{a}/{}/{}", number(frame), number(compile)),
            (None, frame, compile) => write!(f, "{}/{}", number(frame), number(compile)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compile_id_prints_as_it_reads() {
        for text in ["0/1", "!2/0/1", "!7"] {
            assert_eq!(CompileId::from_text(text).map(|id| id.to_string()).as_deref(), Some(text));
        }
        assert_eq!(CompileId::from_text("3/1_2").map(|id| id.to_string()).as_deref(), Some("3/1"));
        assert_eq!(CompileId::from_text("!x"), None);
        assert_eq!(CompileId::from_text(""), None);
    }
}

//! The streams that the planner gives to the programs of a role. A program in text may declare
//! streams of any name; these are the ones whose name means something to planner and backends.

/// A stream with a known purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamKind {
    /// The ops that compute. A program without declared streams has this one.
    Compute,
    /// Collectives of tensor and sequence parallelism.
    TpCollective,
    /// Sends and receives between pipeline stages.
    Pp,
    /// All-to-alls of expert parallelism.
    A2a,
    /// Copies between device and host memory.
    Io,
}

impl AsRef<str> for StreamKind {
    fn as_ref(&self) -> &str {
        self.name()
    }
}

impl StreamKind {
    /// All streams, in declaration order.
    pub const ALL: [StreamKind; 5] =
        [StreamKind::Compute, StreamKind::TpCollective, StreamKind::Pp, StreamKind::A2a, StreamKind::Io];

    /// Returns the name of the stream in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            StreamKind::Compute => "compute",
            StreamKind::TpCollective => "tp_collective",
            StreamKind::Pp => "pp",
            StreamKind::A2a => "a2a",
            StreamKind::Io => "io",
        }
    }

    /// Returns the stream with this name; `None` for a name without a known purpose.
    #[must_use]
    pub fn parse(name: &str) -> Option<StreamKind> {
        StreamKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

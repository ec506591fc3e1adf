//! A logical program with the facts that lowering looks up at every op: the readers of a value and
//! the stages that own an op.

use tessera_ir::{Op, Program};

use crate::strategy::all_readers_want_heads;

/// A logical program with the facts that lowering looks up repeatedly.
pub(crate) struct ProgramAnalysis<'a> {
    pub(crate) program: &'a Program,
    /// Index of the op that defines each value.
    pub(crate) defs: Vec<Option<usize>>,
    /// The ops that read each value.
    pub(crate) readers: Vec<Vec<usize>>,
    /// Stages that run each op, by op index.
    pub(crate) owners: Vec<OpOwner>,
    /// Whether every reader of an op's result needs it sharded by heads.
    pub(crate) wants_heads: Vec<bool>,
    /// Whether the phase runs on the leader alone.
    pub(crate) is_leader_phase: bool,
    /// Whether the phase makes pixels or anchors in calls.
    pub(crate) is_media_phase: bool,
}

/// The stages that run an op, as its attribute `at` requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpOwner {
    First,
    Block(u64),
    Last,
    /// Every stage that needs the op.
    All,
}

impl<'a> ProgramAnalysis<'a> {
    pub(crate) fn new(program: &'a Program) -> ProgramAnalysis<'a> {
        let owner = |op: &Op| match op.placement_hint() {
            Some("all") => OpOwner::All,
            Some("last") => OpOwner::Last,
            Some(at) => match at.strip_prefix("block.").and_then(|b| b.parse().ok()) {
                Some(block) => OpOwner::Block(block),
                None => OpOwner::First,
            },
            None => OpOwner::First,
        };
        let (defs, readers) = (program.defining_ops(), program.value_readers());
        ProgramAnalysis {
            program,
            owners: program.ops.iter().map(owner).collect(),
            wants_heads: (0..program.ops.len())
                .map(|i| all_readers_want_heads(program, &readers, &defs, i))
                .collect(),
            defs,
            readers,
            is_leader_phase: is_leader_phase(program),
            is_media_phase: is_media_phase(program),
        }
    }
}

/// Place of the ops of a leader's phase that a CPU runs.
const LEADER_CPU: &str = "leader";
/// Place of the ops of a leader's phase that a device of its host runs, as ranks run theirs.
const LEADER_DEVICE: &str = "leader.device";

/// Returns whether a phase belongs to the leader, in any topology: encode or decode, of pixels or
/// text.
pub(crate) fn is_leader_phase(p: &Program) -> bool {
    p.ops.iter().any(|o| matches!(o.placement_hint(), Some(LEADER_CPU | LEADER_DEVICE)))
}

/// Returns whether the leader runs a phase on a CPU, in f32 and op by op, whatever the ranks run on.
pub(crate) fn is_leader_cpu_phase(p: &Program) -> bool {
    p.ops.iter().any(|o| o.placement_hint() == Some(LEADER_CPU))
}

/// Returns whether a phase makes pixels or anchors in calls. The first stage runs it, because it holds
/// the latents.
pub(crate) fn is_media_phase(p: &Program) -> bool {
    p.ops.iter().any(|o| o.placement_hint() == Some("media"))
}

/// Returns whether a phase makes pixels or anchors on a device of the leader's host. The other phase
/// there encodes text.
pub(crate) fn is_outside_media_phase(p: &Program) -> bool {
    p.name.starts_with("decode") && p.ops.iter().any(|o| o.placement_hint() == Some(LEADER_DEVICE))
}

//! What the seal says of each program, as far as lockstep needs it: scalars, inputs, collectives, trace.

use std::collections::BTreeMap;

use tessera_base::{Code, Diagnostic, Diagnostics, nearest};

use crate::Digest;
use crate::wire::{Arg, Dtype, PhaseCall};

/// A program that the seal does not hold.
pub(crate) static T0722: Code = Code {
    id: "T0722",
    title: "a phase names a program that the sealed plan does not hold",
    page: "The sealed plan lists every program that a run may use: one per phase kind, cache fill level and step \
variant. A call that needs another one is refused; nothing is compiled on the way, because another rank might not \
do the same.\n\nPlan again with the window, steps and regime that the stream uses.",
};
/// Scalars that differ from what the program declares.
pub(crate) static T0723: Code = Code {
    id: "T0723",
    title: "the scalars of a phase are not those that its program declares",
    page: "Each program of the plan declares the scalars that it takes per call, by name and kind. A phase must \
give exactly those. The message lists the scalar that is missing, unknown or of another kind.\n\nThis happens when \
the plan was made for another stream (other chunk length, other regime) than the one that runs.",
};

/// What a phase does; the part of a program's name before the first dot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseKind {
    /// Prompt embedding to the keys and values of cross attention.
    Text,
    /// The noisy latents of a step.
    Renoise,
    /// One generator pass over noisy latents.
    Denoise,
    /// One generator pass over the finished latents, to leave clean keys and values.
    Clean,
    /// One generator pass over context frames.
    Recompute,
    /// Rotates all cached keys back by a number of frames.
    Rebase,
    /// Gives out the chunk's latents; the last phase of a call.
    Emit,
}

impl PhaseKind {
    /// Kind of a program, from its name: `denoise.fill3` is a denoise pass.
    #[must_use]
    pub fn of(program: &str) -> Option<PhaseKind> {
        Some(match program.split('.').next()? {
            "text" => PhaseKind::Text,
            "renoise" => PhaseKind::Renoise,
            "denoise" => PhaseKind::Denoise,
            "clean" => PhaseKind::Clean,
            "recompute" => PhaseKind::Recompute,
            "rebase" => PhaseKind::Rebase,
            "emit" => PhaseKind::Emit,
            _ => return None,
        })
    }

    /// Whether it is a forward pass of the generator.
    #[must_use]
    pub fn is_generator(self) -> bool {
        matches!(self, PhaseKind::Denoise | PhaseKind::Clean | PhaseKind::Recompute)
    }
}

impl PhaseKind {
    /// Every kind, in an order in which each finds what an earlier one leaves.
    const ORDER: [PhaseKind; 7] = [
        PhaseKind::Text,
        PhaseKind::Recompute,
        PhaseKind::Renoise,
        PhaseKind::Denoise,
        PhaseKind::Clean,
        PhaseKind::Rebase,
        PhaseKind::Emit,
    ];
}

/// Kind of a scalar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgKind {
    /// An integer.
    I64,
    /// A float.
    F32,
    /// So many floats.
    F32s(u32),
}

impl ArgKind {
    fn accepts(self, arg: &Arg) -> bool {
        match (self, arg) {
            (ArgKind::I64, Arg::I64(_)) | (ArgKind::F32, Arg::F32(_)) => true,
            (ArgKind::F32s(n), Arg::F32s(v)) => v.len() as u64 == u64::from(n),
            _ => false,
        }
    }
}

/// A tensor that a program reads from the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFacts {
    /// Name in the manifest.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Vec<u64>,
}

/// One program.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramFacts {
    /// Collectives that each rank issues.
    pub collectives: u64,
    /// Digest of the collective trace.
    pub trace: Digest,
    /// Scalars that it takes per call.
    pub scalars: Vec<(String, ArgKind)>,
    /// Tensors that it reads from the call.
    pub inputs: Vec<InputFacts>,
}

/// What the programs of a call add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Generator forward passes.
    pub generator_calls: u32,
    /// Collectives per rank.
    pub collectives: u64,
    /// Trace digests joined in order.
    pub trace: Digest,
}

/// The programs of a sealed plan by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Census {
    programs: BTreeMap<String, ProgramFacts>,
}

impl Census {
    /// From (name, facts) pairs.
    pub fn new(programs: impl IntoIterator<Item = (String, ProgramFacts)>) -> Census {
        Census { programs: programs.into_iter().collect() }
    }

    /// The facts of a program.
    pub fn get(&self, program: &str) -> Result<&ProgramFacts, Diagnostic> {
        self.programs.get(program).ok_or_else(|| {
            let d = Diagnostic::error(&T0722, format!("the sealed plan holds no program `{program}`"));
            match nearest(program, self.programs.keys().map(String::as_str)) {
                Some(near) => d.hint(format!("did you mean `{near}`?")),
                None => d,
            }
        })
    }

    /// Sums over the phases of a call; every unknown program is reported.
    pub fn expect(&self, phases: &[PhaseCall]) -> Result<Expected, Diagnostics> {
        let mut found = Vec::new();
        let mut expected = Expected { generator_calls: 0, collectives: 0, trace: Digest::default() };
        let mut trace = Vec::with_capacity(phases.len());
        for phase in phases {
            match self.get(&phase.program) {
                Ok(facts) => {
                    expected.collectives += facts.collectives;
                    trace.push((phase.program.as_str(), facts.trace));
                }
                Err(d) => found.push(d),
            }
            let generator = PhaseKind::of(&phase.program).is_some_and(PhaseKind::is_generator);
            expected.generator_calls += u32::from(generator);
        }
        expected.trace = Digest::of_trace(trace);
        if found.is_empty() { Ok(expected) } else { Err(found) }
    }

    /// Whether a phase gives exactly the scalars that its program declares, in ascending order of name.
    #[must_use]
    pub fn check_args(&self, phase: &PhaseCall) -> Diagnostics {
        let facts = match self.get(&phase.program) {
            Ok(facts) => facts,
            Err(d) => return vec![d],
        };
        let refuse = |why: String| Diagnostic::error(&T0723, format!("phase `{}` {why}", phase.program));
        let mut found = Vec::new();
        for (name, kind) in &facts.scalars {
            match phase.arg(name) {
                None => found.push(refuse(format!("lacks the scalar `{name}`"))),
                Some(arg) if !kind.accepts(arg) => found.push(
                    refuse(format!("gives the scalar `{name}` as another kind"))
                        .at("program", format!("{kind:?}"))
                        .at("phase", format!("{arg:?}")),
                ),
                Some(_) => {}
            }
        }
        for (name, _) in &phase.args {
            if !facts.scalars.iter().any(|(n, _)| n == name) {
                found.push(refuse(format!("gives the scalar `{name}`, which its program does not take")));
            }
        }
        if !phase.args.is_sorted_by(|a, b| a.0 < b.0) {
            found.push(refuse("does not list its scalars once each in ascending order of name".into()));
        }
        found
    }

    /// Every program that calls may use, once, with harmless scalars: noise level 1, everything else 0.
    #[must_use]
    pub fn warmup(&self) -> Vec<PhaseCall> {
        let mut phases: Vec<(usize, PhaseCall)> = Vec::new();
        for (name, facts) in &self.programs {
            let order = PhaseKind::of(name).and_then(|k| PhaseKind::ORDER.iter().position(|o| *o == k));
            let Some(order) = order else { continue };
            let args = facts.scalars.iter().map(|(scalar, kind)| {
                let value = if scalar == "sigma" { 1.0 } else { 0.0 };
                let arg = match kind {
                    ArgKind::I64 => Arg::I64(0),
                    ArgKind::F32 => Arg::f32(value),
                    ArgKind::F32s(n) => Arg::f32s(&vec![value; *n as usize]),
                };
                (scalar.clone(), arg)
            });
            phases.push((order, PhaseCall::new(name.as_str(), args.collect())));
        }
        // Stable: programs of one kind stay in order of name.
        phases.sort_by_key(|(order, _)| *order);
        phases.into_iter().map(|(_, p)| p).collect()
    }

    /// Digest of the warm-up, which every rank must agree on.
    #[must_use]
    pub fn warmup_digest(&self) -> Digest {
        Digest::of_value("warm-up", &self.warmup())
    }

    /// Tensors that the phases of a call read, each once, in order of first use.
    #[must_use]
    pub fn inputs(&self, phases: &[PhaseCall]) -> Vec<&InputFacts> {
        let mut inputs: Vec<&InputFacts> = Vec::new();
        for facts in phases.iter().filter_map(|p| self.programs.get(&p.program)) {
            for input in &facts.inputs {
                if !inputs.iter().any(|i| i.name == input.name) {
                    inputs.push(input);
                }
            }
        }
        inputs
    }
}

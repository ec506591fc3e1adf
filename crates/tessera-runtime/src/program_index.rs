//! An index of the sealed plan's programs with the properties that lockstep needs: scalars, inputs,
//! collectives and trace.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics, closest_name};

use crate::Digest;
use crate::codes::{T0722, T0723};
use crate::wire::{Dtype, PhaseCall, ScalarArg};

/// The program of a plan whose calls carry the noise of a chunk's first step.
pub(crate) const NOISE_PROGRAM: &str = "noise";

/// The program that recalls the newest chunk, if a new prompt brings a recache.
const RECALL_NEWEST_PROGRAM: &str = "recall.back1";

/// The program that decodes the first latent of a chunk, if the ranks decode.
const DECODE_FIRST_PROGRAM: &str = "decode.first";
/// The program of a plan whose calls may begin with the latents of an input video.
pub(crate) const VIDEO_PROGRAM: &str = "video";

/// The kind of a phase, given by the part of the program's name before the first dot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseKind {
    /// Computes the keys and values of cross attention from the prompt embedding.
    Text,
    /// Draws the noisy latents of a step.
    Renoise,
    /// Takes the noise of the first step from the call.
    Noise,
    /// Takes the latents of an input video from the call, to which the first step's noise is added.
    Video,
    /// Runs one generator forward over noisy latents.
    Denoise,
    /// Runs one generator forward over the finished latents, so that the caches hold clean keys and
    /// values.
    Clean,
    /// Runs one generator forward over context frames.
    Recompute,
    /// Rotates the cached keys, except those of the sink, back by a number of frames.
    Rebase,
    /// Takes the latents of an earlier chunk, whose keys and values a clean forward then writes again.
    Recall,
    /// Outputs the chunk's latents; only phases of pixels follow it in a call.
    Emit,
    /// Decodes latents of the chunk to pixels.
    Decode,
    /// Encodes the anchor of the next chunk from a decoded frame.
    Encode,
    /// Computes rows of token sequences: a part of a prompt, or one row of each sequence.
    Tokens,
    /// Computes arrays from arrays; a call has no other phase.
    Array,
}

impl PhaseKind {
    /// Returns the kind of a program by its name: `denoise.fill3` is a denoise phase.
    #[must_use]
    pub fn from_program(program: &str) -> Option<PhaseKind> {
        Some(match program.split('.').next()? {
            "text" => PhaseKind::Text,
            "renoise" => PhaseKind::Renoise,
            "noise" => PhaseKind::Noise,
            "video" => PhaseKind::Video,
            "denoise" => PhaseKind::Denoise,
            "clean" => PhaseKind::Clean,
            "recompute" => PhaseKind::Recompute,
            "rebase" => PhaseKind::Rebase,
            "recall" => PhaseKind::Recall,
            "emit" => PhaseKind::Emit,
            "decode" => PhaseKind::Decode,
            "encode" => PhaseKind::Encode,
            "tokens" => PhaseKind::Tokens,
            "array" => PhaseKind::Array,
            _ => return None,
        })
    }

    /// Whether the phase is a forward of the model that generates.
    #[must_use]
    pub fn is_generator(self) -> bool {
        use PhaseKind::{Array, Clean, Denoise, Recompute, Tokens};
        matches!(self, Denoise | Clean | Recompute | Tokens | Array)
    }
}

impl PhaseKind {
    /// Every kind, in an order in which each phase finds the results of the earlier ones.
    const WARMUP_ORDER: [PhaseKind; 14] = [
        PhaseKind::Text,
        PhaseKind::Recompute,
        PhaseKind::Recall,
        PhaseKind::Video,
        PhaseKind::Renoise,
        PhaseKind::Noise,
        PhaseKind::Denoise,
        PhaseKind::Clean,
        PhaseKind::Rebase,
        PhaseKind::Emit,
        PhaseKind::Decode,
        PhaseKind::Encode,
        PhaseKind::Tokens,
        PhaseKind::Array,
    ];
}

/// The type of a scalar as its program declares it; an argument must match it exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgKind {
    /// A signed 64-bit integer.
    I64,
    /// A single-precision float, sent as its bits.
    F32,
    /// A list of that many floats.
    F32s(u32),
}

impl ArgKind {
    fn accepts_arg(self, arg: &ScalarArg) -> bool {
        match (self, arg) {
            (ArgKind::I64, ScalarArg::I64(_)) | (ArgKind::F32, ScalarArg::F32(_)) => true,
            (ArgKind::F32s(n), ScalarArg::F32s(v)) => v.len() as u64 == u64::from(n),
            _ => false,
        }
    }
}

/// The declaration of a tensor that a program reads from the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputSpec {
    /// Name of the tensor in an envelope's manifest, such as `text`.
    pub name: String,
    /// Element type that the program expects.
    pub dtype: Dtype,
    /// Extents that the program expects, outermost first.
    pub shape: Vec<u64>,
}

/// The inputs that a program needs and the collectives that every run of it must report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramInfo {
    /// Collectives of all ranks of the mesh together, which each run of the program must report.
    pub collectives: u64,
    /// Digest of the program's collectives, which each run of the program must report.
    pub trace: Digest,
    /// Scalars that the program takes per call.
    pub scalars: Vec<(String, ArgKind)>,
    /// Tensors that the program reads from the call.
    pub inputs: Vec<InputSpec>,
}

/// What every rank must report for a call, from the sealed plan; the envelope carries it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedTotals {
    /// Number of phases that are forwards of the model: denoise, clean, recompute, tokens and array programs.
    pub generator_calls: u32,
    /// Number of collectives of all ranks of the mesh together during the call, over all phases.
    pub collectives: u64,
    /// Digest of the phases' trace digests, in execution order.
    pub trace: Digest,
}

/// The programs of a sealed plan, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramIndex {
    programs: BTreeMap<String, ProgramInfo>,
}

impl ProgramIndex {
    /// Creates an index from (name, properties) pairs.
    pub fn new(programs: impl IntoIterator<Item = (String, ProgramInfo)>) -> ProgramIndex {
        ProgramIndex { programs: programs.into_iter().collect() }
    }

    /// Returns the properties of a program, or T0722 if the sealed plan does not contain it.
    pub fn get(&self, program: &str) -> Result<&ProgramInfo, Diagnostic> {
        self.programs.get(program).ok_or_else(|| {
            let d = Diagnostic::error(&T0722, format!("the sealed plan contains no program `{program}`"));
            match closest_name(program, self.programs.keys().map(String::as_str)) {
                Some(near) => d.with_hint(format!("did you mean `{near}`?")),
                None => d,
            }
        })
    }

    /// Returns the totals over the phases of a call, or a diagnostic for every unknown program.
    pub fn expected_totals(&self, phases: &[PhaseCall]) -> Result<ExpectedTotals, Diagnostics> {
        let mut found = Vec::new();
        let mut expected = ExpectedTotals { generator_calls: 0, collectives: 0, trace: Digest::default() };
        let mut trace = Vec::with_capacity(phases.len());
        for phase in phases {
            match self.get(&phase.program) {
                Ok(facts) => {
                    expected.collectives += facts.collectives;
                    trace.push((phase.program.as_str(), facts.trace));
                }
                Err(d) => found.push(d),
            }
            let generator = PhaseKind::from_program(&phase.program).is_some_and(PhaseKind::is_generator);
            expected.generator_calls += u32::from(generator);
        }
        expected.trace = Digest::hash_trace(trace);
        if found.is_empty() { Ok(expected) } else { Err(found) }
    }

    /// Checks that a phase sets exactly the scalars that its program declares, in ascending order
    /// of name.
    #[must_use]
    pub fn check_args(&self, phase: &PhaseCall) -> Diagnostics {
        let facts = match self.get(&phase.program) {
            Ok(facts) => facts,
            Err(d) => return vec![d],
        };
        let refuse = |why: String| Diagnostic::error(&T0723, format!("phase `{}` {why}", phase.program));
        let mut found = Vec::new();
        for (name, kind) in &facts.scalars {
            match phase.scalar_arg(name) {
                None => found.push(refuse(format!("does not set the scalar `{name}`"))),
                Some(arg) if !kind.accepts_arg(arg) => found.push(
                    refuse(format!("sets the scalar `{name}` with another kind"))
                        .with_label("program", format!("{kind:?}"))
                        .with_label("phase", format!("{arg:?}")),
                ),
                Some(_) => {}
            }
        }
        for (name, _) in &phase.args {
            if !facts.scalars.iter().any(|(n, _)| n == name) {
                found.push(refuse(format!("sets the scalar `{name}`, which its program does not declare")));
            }
        }
        if !phase.args.is_sorted_by(|a, b| a.0 < b.0) {
            found.push(refuse("does not list each scalar once, in ascending order of name".into()));
        }
        found
    }

    /// Returns one phase for each program that calls may use, with neutral scalars: noise level 1,
    /// everything else 0.
    #[must_use]
    pub fn warmup_phases(&self) -> Vec<PhaseCall> {
        let mut phases: Vec<(usize, PhaseCall)> = Vec::new();
        for (name, facts) in &self.programs {
            let order = PhaseKind::from_program(name)
                .and_then(|k| PhaseKind::WARMUP_ORDER.iter().position(|o| *o == k));
            let Some(order) = order else { continue };
            let args = facts.scalars.iter().map(|(scalar, kind)| {
                let value = if scalar == "sigma" { 1.0 } else { 0.0 };
                let arg = match kind {
                    ArgKind::I64 => ScalarArg::I64(0),
                    ArgKind::F32 => ScalarArg::from_f32(value),
                    ArgKind::F32s(n) => ScalarArg::from_f32s(&vec![value; *n as usize]),
                };
                (scalar.clone(), arg)
            });
            phases.push((order, PhaseCall::new(name.as_str(), args.collect())));
        }
        // The sort is stable: programs of one kind stay in order of name.
        phases.sort_by_key(|(order, _)| *order);
        phases.into_iter().map(|(_, p)| p).collect()
    }

    /// Returns whether every chunk's call carries the noise of its first step.
    #[must_use]
    pub fn takes_noise(&self) -> bool {
        self.programs.contains_key(NOISE_PROGRAM)
    }

    /// Returns whether the keys and values of cached chunks are computed again under a new prompt.
    #[must_use]
    pub fn recaches(&self) -> bool {
        self.programs.contains_key(RECALL_NEWEST_PROGRAM)
    }

    /// Returns the phases that follow the emit of a chunk's call: the decode of its latents and the encode
    /// of the next chunk's anchor, which is latent 0 itself when the scene opens. The list is empty
    /// if the leader decodes.
    #[must_use]
    pub fn media_phases(&self, opens_scene: bool) -> Vec<PhaseCall> {
        let names: &[&str] = match opens_scene {
            _ if !self.programs.contains_key(DECODE_FIRST_PROGRAM) => &[],
            true => &["decode.exact", "decode.open", "decode.rest"],
            false => &[DECODE_FIRST_PROGRAM, "encode", "decode.rest"],
        };
        let planned = names.iter().filter(|name| self.programs.contains_key(**name));
        planned.map(|name| PhaseCall::new(*name, Vec::new())).collect()
    }

    /// Returns the digest of the warm-up phases, which must be equal on every rank.
    #[must_use]
    pub fn warmup_digest(&self) -> Digest {
        Digest::hash_value("warm-up", &self.warmup_phases())
    }

    /// Returns the tensors that a warm-up with these phases carries: those that the phases read, without those of array
    /// programs. Ranks make zeros for these, because the inputs of all programs together may exceed a message.
    #[must_use]
    pub fn warmup_inputs(&self, phases: &[PhaseCall]) -> Vec<&InputSpec> {
        let is_array = |phase: &&PhaseCall| PhaseKind::from_program(&phase.program) == Some(PhaseKind::Array);
        let phases: Vec<PhaseCall> = phases.iter().filter(|phase| !is_array(phase)).cloned().collect();
        self.call_inputs(&phases)
    }

    /// Returns the tensors that the phases of a call read, each once, in order of first use.
    #[must_use]
    pub fn call_inputs(&self, phases: &[PhaseCall]) -> Vec<&InputSpec> {
        let mut inputs: Vec<&InputSpec> = Vec::new();
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

//! Checks on hostile input: arbitrary bytes as program text, as mutations of valid plans, as
//! recorded traces, as data from a socket, as messages of a client of a served stream, as files of
//! weights, and as what a PyTorch run leaves behind. For every input
//! the parser, the verifier, the wire code and the readers must return a result without a panic, and
//! accepted input must satisfy their guarantees.
//!
//! Each function panics if a guarantee is broken. Fuzzers call the functions with bytes of their
//! choice; a test calls them with bytes drawn from a seed.

mod checkpoints;
mod compile_traces;
mod flight_dumps;
mod fuzz_input;
mod mutate;
mod random_traces;
mod stream_protocol;
mod wire;

use tessera_base::{Diagnostic, DiagnosticFormat, render_all};
use tessera_ir::{Bundle, Dialect, Program, canonical_text, is_fragment, parse, parse_all, parse_fragment};
use tessera_ir::{print_fragment, rules};
use tessera_verify::{DeviceLimits, check_phase, check_program, check_slots, check_traces, seal};

use crate::header::Header;
use crate::{check_round_trip, verify};
use fuzz_input::FuzzInput;

/// The plans and programs that [`fuzz_plan`] mutates.
#[derive(Debug, Default)]
pub struct SeedCorpus {
    bundles: Vec<Bundle>,
    programs: Vec<Program>,
}

impl SeedCorpus {
    /// Collects every program in the files.
    #[must_use]
    pub fn from_texts(texts: impl IntoIterator<Item = String>) -> SeedCorpus {
        let mut out = SeedCorpus::default();
        for text in texts {
            let (Ok(header), Ok(programs)) = (Header::read(&text), parse_all(&text, "seed")) else {
                continue;
            };
            let of_roles: Vec<&Program> = programs.iter().filter(|p| p.dialect == Dialect::Role).collect();
            if !of_roles.is_empty() {
                out.bundles.push(verify::build_bundle(&header, &of_roles));
            }
            out.programs.extend(programs);
        }
        out
    }

    /// Returns the bundles built from the seed plans, before any mutation.
    #[must_use]
    pub fn bundles(&self) -> &[Bundle] {
        &self.bundles
    }
}

/// Returns the program with other value names: new names, or its own names permuted.
#[must_use]
pub fn rename_values(p: &Program, seed: u64) -> Program {
    let mut out = p.clone();
    let n = p.values.len();
    for (i, v) in out.values.iter_mut().enumerate() {
        match seed % 2 {
            0 => v.name = format!("v{}", seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i as u64)),
            _ => v.name.clone_from(&p.values[(i + (seed / 2) as usize % n) % n].name),
        }
    }
    out
}

/// Treats bytes as program text. The parser must accept the text or reject it with labels at valid
/// positions. Accepted text must survive printing and parsing, and the verifier must return a
/// result.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = is_fragment(&text);
    match parse_fragment(&text, "text") {
        Err(ds) => check_renders(&ds, &text),
        Ok(f) => {
            check_renders(&f.review("text"), &text);
            let printed = print_fragment(&f);
            let again = parse_fragment(&printed, "printed").unwrap_or_else(|d| panic_rejected(&d, &printed));
            assert_eq!(
                again.without_spans(),
                f.without_spans(),
                "the fragment changes after printing and parsing"
            );
        }
    }
    match parse_all(&text, "text") {
        Err(ds) => check_renders(&ds, &text),
        Ok(programs) => {
            for p in &programs {
                check_round_trip(p).unwrap_or_else(|why| panic!("{why}"));
                check_renders(&check_program(p), &text);
            }
        }
    }
}

/// Applies bytes as mutations to a valid plan. The verifier must seal or reject the plan, and the
/// text of a sealed plan must parse.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_plan(bytes: &[u8], seeds: &SeedCorpus) {
    let mut c = FuzzInput::new(bytes);
    let at = c.next_below(seeds.bundles.len() + 1);
    let Some(bundle) = seeds.bundles.get(at) else {
        let Some(p) = c.pick_from(&seeds.programs) else { return };
        let mut p = p.clone();
        while c.has_more() {
            mutate::mutate_program(&mut p, &mut c, &seeds.programs);
        }
        return check_one_program(&p);
    };
    let mut b = bundle.clone();
    while c.has_more() {
        mutate::mutate_bundle(&mut b, &mut c, &seeds.programs);
    }
    for phase in &b.phases {
        phase.programs.iter().for_each(check_one_program);
        check_renders(&check_phase(&b.mesh, &b.roles, phase), "");
        for (p, slots) in phase.programs.iter().zip(&phase.slots) {
            // The verifier checks slots only of programs that pass on their own.
            if check_program(p).is_empty() {
                check_renders(&check_slots(p, slots), "");
            }
        }
    }
    let limits =
        DeviceLimits { device_bytes: Some(1 << 30), graph_mixing_off: bytes.len().is_multiple_of(2) };
    let mut renamed = b.clone();
    renamed
        .phases
        .iter_mut()
        .flat_map(|p| &mut p.programs)
        .for_each(|p| *p = rename_values(p, bytes.len() as u64));
    match (seal(b, &limits), seal(renamed, &limits)) {
        (Ok(plan), Ok(renamed)) => {
            assert_eq!(plan.digest(), renamed.digest(), "the digest depends on value names")
        }
        (Err(ds), Err(renamed)) => {
            check_renders(&ds, "");
            assert_eq!(
                diagnostic_codes(&ds),
                diagnostic_codes(&renamed),
                "the diagnostics depend on value names"
            );
        }
        (plan, _) => {
            panic!("the verdict depends on value names; sealed with the original names: {}", plan.is_ok())
        }
    }
}

/// Verifies one program. The canonical text of an accepted program must parse back to the same
/// program.
fn check_one_program(p: &Program) {
    let found = check_program(p);
    check_renders(&found, "");
    // The verifier checks the types of buffers only where an op uses them; the parser checks all.
    let readable =
        p.buffers.iter().all(|b| rules::check_type(p, &b.ty).is_ok() && b.ty.layout.partial_axis().is_none());
    if found.is_empty() && readable {
        let text = canonical_text(p);
        let again = parse(&text, "canonical").unwrap_or_else(|d| panic_rejected(&d, &text));
        assert_eq!(canonical_text(&again), text, "the program changes after printing and parsing");
    }
}

/// Treats bytes as calls of [`tessera_verify::Traces`]. Accepted traces must terminate on devices
/// that launch in FIFO order. Traces that are rejected only for their order must not terminate.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_traces(bytes: &[u8]) {
    let mut c = FuzzInput::new(bytes);
    let generated = random_traces::RandomTraces::generate(&mut c);
    let found = check_traces(&generated.traces);
    check_renders(&found, "");
    if found.is_empty() {
        assert!(generated.all_ranks_terminate(), "accepted traces deadlock: {generated:?}");
    } else if found.iter().all(|d| ["T0311", "T0312"].contains(&d.code.id)) {
        assert!(!generated.all_ranks_terminate(), "traces rejected for their order terminate: {generated:?}");
    }
}

/// Treats bytes as the compile traces of two PyTorch ranks. The reader must accept or reject them, and
/// a trace must not differ from itself.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_compile_traces(bytes: &[u8]) {
    compile_traces::check_logs(bytes);
}

/// Treats bytes as a file of weights. The reader must accept or reject it, and every tensor of an
/// accepted file must have the values that its shape announces.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_checkpoint(bytes: &[u8]) {
    checkpoints::check_file(bytes);
}

/// Treats bytes as the Flight Recorder dumps of two PyTorch ranks. The reader must accept or reject them,
/// and a dump must not differ from itself.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_flight_dumps(bytes: &[u8]) {
    flight_dumps::check_dumps(bytes);
}

/// Treats bytes as data from an untrusted peer: frames with their checksums unchanged and
/// corrected, one by one and assembled from a socket; a hello; records of a session. The runtime
/// must reject them or decode messages that encode to the same bytes.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_wire(bytes: &[u8]) {
    wire::check_frames(bytes);
    wire::check_handshake(bytes);
    match wire::with_checksums(bytes) {
        Some(frame) => {
            wire::check_frames(&frame);
            wire::check_assembly(&[&frame, bytes].concat());
        }
        None => wire::check_assembly(bytes),
    }
}

/// Treats bytes as messages on the socket of a served stream: a text of a client, and a frame that a
/// client reads. Each must be refused, or mean the same when it is written again.
///
/// # Panics
/// If a guarantee is broken.
pub fn fuzz_stream_protocol(bytes: &[u8]) {
    stream_protocol::check_client_message(bytes);
    stream_protocol::check_frame(bytes);
}

fn diagnostic_codes(ds: &[Diagnostic]) -> Vec<&'static str> {
    ds.iter().map(|d| d.code.id).collect()
}

/// Checks that diagnostics can be rendered. A mistake in a large mesh gives one diagnostic per
/// rank, so the first 20 represent the rest.
fn check_renders(ds: &[Diagnostic], text: &str) {
    let ds = &ds[..ds.len().min(20)];
    for format in [DiagnosticFormat::Text, DiagnosticFormat::Json, DiagnosticFormat::Github] {
        let shown = render_all(ds, format, &|_| Some(text.to_string()));
        assert_eq!(shown.is_empty(), ds.is_empty());
    }
}

fn panic_rejected<T>(ds: &[Diagnostic], text: &str) -> T {
    panic!(
        "the printed text is rejected: {}\n{text}",
        render_all(ds, DiagnosticFormat::Text, &|_| Some(text.to_string()))
    )
}

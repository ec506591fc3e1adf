//! Hostile input: any bytes as a text, as edits of good plans, as observed traces, as what comes over a socket. Whatever
//! they are, the parser, the judge and the wire answer; they never panic, and what they accept keeps its promises.
//!
//! Each function panics where a promise is broken. Fuzzers call them with bytes of their choosing, a test with bytes
//! drawn from a seed.

mod bend;
mod choices;
mod watch;
mod wire;

use tessera_base::{Diagnostic, Format, render_all};
use tessera_ir::{Bundle, Dialect, Program, canonical, is_fragment, parse, parse_all, parse_fragment};
use tessera_ir::{print_fragment, rules};
use tessera_verify::{Limits, check_phase, check_program, check_slots, check_traces, seal};

use crate::header::Header;
use crate::{fixed_point, judge};
use choices::Choices;

/// Plans and programs that [`plan`] starts from.
#[derive(Debug, Default)]
pub struct Seeds {
    bundles: Vec<Bundle>,
    programs: Vec<Program>,
}

impl Seeds {
    /// Every program that these files hold.
    #[must_use]
    pub fn of(texts: impl IntoIterator<Item = String>) -> Seeds {
        let mut out = Seeds::default();
        for text in texts {
            let (Ok(header), Ok(programs)) = (Header::read(&text), parse_all(&text, "seed")) else {
                continue;
            };
            let of_roles: Vec<&Program> = programs.iter().filter(|p| p.dialect == Dialect::Role).collect();
            if !of_roles.is_empty() {
                out.bundles.push(judge::bundle(&header, &of_roles));
            }
            out.programs.extend(programs);
        }
        out
    }

    /// The plans.
    #[must_use]
    pub fn bundles(&self) -> &[Bundle] {
        &self.bundles
    }
}

/// The same program with other names for its values: new ones, or its own in another order.
#[must_use]
pub fn renamed(p: &Program, seed: u64) -> Program {
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

/// Bytes as a text: it is read or refused with places that exist; what is read prints to what reads back, and is
/// judged.
///
/// # Panics
/// Where a promise is broken.
pub fn text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = is_fragment(&text);
    match parse_fragment(&text, "text") {
        Err(ds) => told(&ds, &text),
        Ok(f) => {
            told(&f.review("text"), &text);
            let printed = print_fragment(&f);
            let again = parse_fragment(&printed, "printed").unwrap_or_else(|d| broken(&d, &printed));
            assert_eq!(again.without_spans(), f.without_spans(), "another fragment after reading back");
        }
    }
    match parse_all(&text, "text") {
        Err(ds) => told(&ds, &text),
        Ok(programs) => {
            for p in &programs {
                fixed_point(p).unwrap_or_else(|why| panic!("{why}"));
                told(&check_program(p), &text);
            }
        }
    }
}

/// Bytes as edits of a good plan: it is sealed or refused, and what is sealed has a text that reads back.
///
/// # Panics
/// Where a promise is broken.
pub fn plan(bytes: &[u8], seeds: &Seeds) {
    let mut c = Choices::of(bytes);
    let at = c.below(seeds.bundles.len() + 1);
    let Some(bundle) = seeds.bundles.get(at) else {
        let Some(p) = c.pick(&seeds.programs) else { return };
        let mut p = p.clone();
        while c.more() {
            bend::program(&mut p, &mut c, &seeds.programs);
        }
        return one(&p);
    };
    let mut b = bundle.clone();
    while c.more() {
        bend::bundle(&mut b, &mut c, &seeds.programs);
    }
    for phase in &b.phases {
        phase.programs.iter().for_each(one);
        told(&check_phase(&b.mesh, &b.roles, phase), "");
        for (p, slots) in phase.programs.iter().zip(&phase.memory) {
            // Slots are judged for programs that are right by themselves.
            if check_program(p).is_empty() {
                told(&check_slots(p, slots), "");
            }
        }
    }
    let limits = Limits { device_bytes: Some(1 << 30), graph_mixing_off: bytes.len().is_multiple_of(2) };
    let mut named = b.clone();
    named.phases.iter_mut().flat_map(|p| &mut p.programs).for_each(|p| *p = renamed(p, bytes.len() as u64));
    match (seal(b, &limits), seal(named, &limits)) {
        (Ok(plan), Ok(named)) => assert_eq!(plan.digest(), named.digest(), "a digest of names"),
        (Err(ds), Err(named)) => {
            told(&ds, "");
            assert_eq!(codes(&ds), codes(&named), "a verdict on names");
        }
        (plan, _) => panic!("names decide: sealed with the first {}", plan.is_ok()),
    }
}

/// One program: judged, and what is accepted has a canonical text that reads back to the same.
fn one(p: &Program) {
    let found = check_program(p);
    told(&found, "");
    // The judge reads types of buffers where an op does; the parser reads all.
    let readable =
        p.buffers.iter().all(|b| rules::check_type(p, &b.ty).is_ok() && b.ty.layout.partial().is_none());
    if found.is_empty() && readable {
        let text = canonical(p);
        let again = parse(&text, "canonical").unwrap_or_else(|d| broken(&d, &text));
        assert_eq!(canonical(&again), text, "another program after reading back");
    }
}

/// Bytes as calls of [`tessera_verify::Traces`]: judged, and what is accepted gets to its end on devices that launch
/// first in, first out; what is refused for its order alone does not.
///
/// # Panics
/// Where a promise is broken.
pub fn traces(bytes: &[u8]) {
    let mut c = Choices::of(bytes);
    let watched = watch::Watched::of(&mut c);
    let found = check_traces(&watched.traces);
    told(&found, "");
    if found.is_empty() {
        assert!(watched.completes(), "accepted, and ranks wait for ever: {watched:?}");
    } else if found.iter().all(|d| ["T0311", "T0312"].contains(&d.code.id)) {
        assert!(!watched.completes(), "refused for its order, and all ranks get through: {watched:?}");
    }
}

/// Bytes as what a stranger sends: frames as they are and with their sums made right, one by one and put together from a
/// socket, a hello, records of a session. They are refused, or read to what writes back to the same bytes.
///
/// # Panics
/// Where a promise is broken.
pub fn wire(bytes: &[u8]) {
    wire::frames(bytes);
    wire::peer(bytes);
    match wire::sealed(bytes) {
        Some(frame) => {
            wire::frames(&frame);
            wire::assembled(&[&frame, bytes].concat());
        }
        None => wire::assembled(bytes),
    }
}

fn codes(ds: &[Diagnostic]) -> Vec<&'static str> {
    ds.iter().map(|d| d.code.id).collect()
}

/// Diagnostics can be shown. A slip about a large mesh has one for each rank; the first tell of the others.
fn told(ds: &[Diagnostic], text: &str) {
    let ds = &ds[..ds.len().min(20)];
    for format in [Format::Text, Format::Json, Format::Github] {
        let shown = render_all(ds, format, &|_| Some(text.to_string()));
        assert_eq!(shown.is_empty(), ds.is_empty());
    }
}

fn broken<T>(ds: &[Diagnostic], text: &str) -> T {
    panic!(
        "what was printed is refused: {}\n{text}",
        render_all(ds, Format::Text, &|_| Some(text.to_string()))
    )
}

//! What the reference says of a file's programs, and whether a backend's ranks ended so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_device::{Backend, Fault};
use tessera_ir::{Kind, Opcode, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{Fault as Exact, Machine, Tensor};

use super::drive::{End, Work, drive, is_refusal, rounded, scalar};
use super::{Subject, Tolerance, Unfit};
use crate::eval::phases;
use crate::header::Header;

/// Outputs of each rank in each phase.
type Expected = Vec<Vec<BTreeMap<String, Tensor>>>;

/// The logical programs of a file, or those of roles: the largest error in units of its bound.
pub(super) fn part<B: Backend + 'static>(
    subject: &Subject<'_, B>,
    header: &Header,
    programs: &[&Program],
) -> Result<f64, Unfit> {
    let Some(mesh) = programs.first().map(|p| p.mesh) else { return Ok(0.0) };
    let mut machine = Machine::new(mesh);
    machine.load_weights(header.weights.clone());
    let mut casts = Vec::new();
    for (_, phase) in phases(programs) {
        casts.push(header.cast(&mesh, &phase).map_err(Unfit::Wrong)?);
    }
    let expected: Result<Expected, Exact> = casts.iter().map(|c| machine.run(c, &header.call)).collect();
    if let Err(fault) = &expected {
        observable(fault, header, &machine, &casts).map_err(Unfit::Skipped)?;
    }
    let machine = Arc::new(machine);
    let work: Vec<Work> = mesh
        .iter()
        .map(|r| work(header, &machine, &casts, r))
        .collect::<Result<_, _>>()
        .map_err(Unfit::Wrong)?;
    let loads: Vec<Vec<Arc<Program>>> = work.iter().map(|w| w.programs.clone()).collect();
    let makers = (subject.open)(&mesh, &loads).map_err(Unfit::Wrong)?;
    let limit = subject.patience * 5 + Duration::from_secs(5);
    let ends = drive(mesh, makers, work, &machine, limit).map_err(|d| {
        let words = format!("{}: {}", d.code.id, d.message);
        if is_refusal(&d) { Unfit::Skipped(words) } else { Unfit::Wrong(words) }
    })?;
    match expected {
        Ok(expected) => compare(&subject.tolerance, &mesh, &casts, &expected, &ends).map_err(Unfit::Wrong),
        Err(fault) => same_fault(&fault, subject.compares, &ends).map(|()| 0.0).map_err(Unfit::Wrong),
    }
}

/// Whether a backend could come upon this fault; if not, why.
fn observable(
    fault: &Exact,
    header: &Header,
    machine: &Machine,
    casts: &[Vec<&Program>],
) -> Result<(), String> {
    // Of what a call brings, a backend sees how many numbers there are.
    let unseen = |rank: &Rank, op: usize| {
        let here = |c: &Vec<&Program>| {
            let p = *c.get(rank.0 as usize)?;
            let o = p.ops.get(op)?;
            let ty = p.ty(*o.results.first()?);
            let piece = |name| machine.input(name, ty, *rank, &header.call).ok();
            let count = match o.opcode {
                Opcode::Input => o.name.as_deref().and_then(piece).map(|t| t.data().len() as u64),
                _ => None,
            };
            Some(o.opcode.row().kind == Kind::Source && count.is_none_or(|n| n == ty.elements()))
        };
        casts.iter().find_map(here).unwrap_or(false)
    };
    match fault {
        Exact::Setup(why) => Err(why.clone()),
        Exact::Op { rank, op, message } if unseen(rank, *op) => {
            Err(format!("what a call brings is checked before a backend sees it: {message}"))
        }
        _ if casts.iter().flatten().any(|p| leaves_an_issue(p)) => {
            Err("an issue without a wait is refused before a backend sees it".to_string())
        }
        _ => Ok(()),
    }
}

fn leaves_an_issue(p: &Program) -> bool {
    let waited = |op: &tessera_ir::Op| {
        p.ops.iter().any(|w| w.opcode == Opcode::Wait && w.operands.first() == op.results.first())
    };
    p.ops.iter().any(|o| o.issue && !waited(o))
}

/// A rank's programs, each with its inputs under names of their own: ranks and ops may take different pieces of
/// one tensor, and a backend takes what a name brings as it is.
fn work(header: &Header, machine: &Machine, casts: &[Vec<&Program>], rank: Rank) -> Result<Work, String> {
    let mut work = Work {
        programs: Vec::new(),
        inputs: BTreeMap::new(),
        scalars: header.call.scalars.iter().map(|(k, v)| (k.clone(), scalar(v))).collect(),
    };
    for (phase, cast) in casts.iter().enumerate() {
        let mut p = cast[rank.0 as usize].clone();
        for i in 0..p.ops.len() {
            let (Opcode::Input, Some(name)) = (p.ops[i].opcode, p.ops[i].name.clone()) else { continue };
            let own = format!("{name}.{phase}.{i}");
            let piece = machine.input(&name, p.ty(p.ops[i].results[0]), rank, &header.call)?;
            work.inputs.insert(own.clone(), rounded(&piece));
            p.ops[i].name = Some(own);
        }
        work.programs.push(Arc::new(p));
    }
    Ok(work)
}

fn compare(
    tolerance: &Tolerance,
    mesh: &Mesh,
    casts: &[Vec<&Program>],
    expected: &Expected,
    ends: &[End],
) -> Result<f64, String> {
    // A rank that failed explains those that were ended because of it.
    let by_itself = |e: &End| !matches!(e, End::Hangs | End::Fault(Fault::Aborted(_)));
    let mut wrong: Vec<(usize, &End)> =
        ends.iter().enumerate().filter(|(_, e)| !matches!(e, End::Done(_))).collect();
    wrong.sort_by_key(|(_, e)| !by_itself(e));
    if let Some(first) = wrong.first().and_then(|(r, e)| words(*r, e)) {
        return Err(first);
    }
    let mut worst = 0.0f64;
    for (phase, cast) in casts.iter().enumerate() {
        let relative = tolerance.relative * roundings(cast).sqrt();
        for rank in mesh.iter() {
            let at = rank.0 as usize;
            let End::Done(got) = &ends[at] else { continue };
            for (name, want) in &expected[phase][at] {
                let Some(got) = got[phase].get(name) else {
                    return Err(format!("rank {rank} puts out no \"{name}\""));
                };
                let all = expected[phase].iter().filter_map(|o| o.get(name)).flat_map(Tensor::data);
                let scale = all.fold(0.0f64, |m, x| m.max(x.abs()));
                let far = distance(got, want);
                if far > relative * scale {
                    let bound = relative * scale;
                    return Err(format!("rank {rank}: \"{name}\" is off by {far:e}, {bound:e} is allowed"));
                }
                if far > 0.0 {
                    worst = worst.max(far / (relative * scale));
                }
            }
        }
    }
    Ok(worst)
}

/// Largest difference to the exact elements as this precision holds them; infinite where there is none.
fn distance(got: &[f32], want: &Tensor) -> f64 {
    if got.len() != want.data().len() {
        return f64::INFINITY;
    }
    let far = |(g, w): (&f32, f32)| if *g == w { 0.0 } else { (f64::from(*g) - f64::from(w)).abs() };
    let all = got.iter().zip(rounded(want)).map(far);
    all.fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) })
}

/// Roundings that can add up in a value of these programs; 0 where elements are only moved.
fn roundings(cast: &[&Program]) -> f64 {
    let of = |p: &&Program| {
        let (mut ops, mut longest) = (0u64, 0u64);
        for op in &p.ops {
            let extent =
                |operand: usize, dim: usize| p.ty(op.operands[operand]).shape.get(dim).copied().unwrap_or(1);
            let terms = match op.opcode {
                Opcode::Pad | Opcode::Compact | Opcode::TakeRows | Opcode::TakeShard => continue,
                Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime => continue,
                Opcode::AllReduce | Opcode::ReduceScatter => {
                    op.group().map_or(1, |g| u64::from(p.mesh.group_size(g)))
                }
                Opcode::Matmul | Opcode::LayerNorm | Opcode::NormModulate => extent(0, 1),
                Opcode::RmsNorm | Opcode::RowSquareSum => extent(0, 1),
                Opcode::Softmax | Opcode::Dot => p.ty(op.operands[0]).shape.last().copied().unwrap_or(1),
                Opcode::Attention => extent(1, 0) + op.int("head_dim").map_or(1, i64::unsigned_abs),
                _ if op.opcode.row().kind == Kind::Compute => 1,
                _ => continue,
            };
            ops += 1;
            longest = longest.max(terms);
        }
        ops + longest
    };
    cast.iter().map(of).max().unwrap_or(0) as f64
}

/// What went wrong on a rank that should have ended well.
fn words(rank: usize, end: &End) -> Option<String> {
    match end {
        End::Done(_) => None,
        End::Fault(Fault::Failed(why)) => Some(format!("rank {rank} failed: {why}")),
        End::Fault(Fault::Stalled(why)) => Some(format!("rank {rank} stalled: {why}")),
        End::Fault(Fault::Aborted(why)) => Some(format!("rank {rank} was aborted: {why}")),
        End::Fault(Fault::Refused(why)) => Some(format!("rank {rank} was refused a collective: {why}")),
        End::Panicked(why) => Some(format!("rank {rank} panicked: {why}")),
        End::Hangs => Some(format!("rank {rank} hangs")),
    }
}

/// A fault of one op shows on its rank. Ranks that disagree, or wait in a circle, are found by at least one of
/// them: a backend that meets by position sees two receives that face each other as a disagreement.
fn same_fault(fault: &Exact, compares: bool, ends: &[End]) -> Result<(), String> {
    let lost = |(r, e): (usize, &End)| match e {
        End::Hangs | End::Panicked(_) => words(r, e),
        _ => None,
    };
    if let Some(why) = ends.iter().enumerate().find_map(lost) {
        return Err(why);
    }
    let failed = |e: &End| matches!(e, End::Fault(Fault::Failed(_)));
    let stalled = |e: &End| matches!(e, End::Fault(Fault::Stalled(_)));
    let came = match fault {
        Exact::Op { rank, .. } => failed(&ends[rank.0 as usize]),
        Exact::Mismatch { .. } if compares => ends.iter().any(failed),
        Exact::Mismatch { .. } | Exact::Deadlock(_) => ends.iter().any(|e| failed(e) || stalled(e)),
        Exact::Setup(_) => true,
    };
    if came { Ok(()) } else { Err(format!("it should end with: {fault}")) }
}

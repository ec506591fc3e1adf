//! Evaluates a file: its logical programs on one rank, its programs of roles on all ranks, and both compared.

use std::collections::BTreeMap;

use tessera_ir::{Dialect, Opcode, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{Machine, Tensor};
use tessera_verify::check_program;

use crate::header::Header;

/// Programs by phase, in order of first appearance.
pub(crate) fn phases<'a>(programs: &[&'a Program]) -> Vec<(String, Vec<&'a Program>)> {
    let mut out: Vec<(String, Vec<&Program>)> = Vec::new();
    for p in programs {
        match out.iter_mut().find(|(name, _)| *name == p.name) {
            Some((_, phase)) => phase.push(p),
            None => out.push((p.name.clone(), vec![p])),
        }
    }
    out
}

/// The outputs as text, one line each; nothing when a fault was expected and came.
pub(crate) fn eval(header: &Header, programs: &[Program]) -> Result<Option<String>, Vec<String>> {
    let (logical, of_roles): (Vec<&Program>, Vec<&Program>) =
        programs.iter().partition(|p| p.dialect == Dialect::Logical);
    let result = whole(header, &logical).and_then(|w| ranks(header, &of_roles).map(|r| (w, r)));
    let (whole, of_ranks) = match (result, &header.fault) {
        (Err(e), Some(words)) if e.contains(words.as_str()) => return Ok(None),
        (Err(e), _) => return Err(vec![e]),
        (Ok(_), Some(words)) => return Err(vec![format!("expected fault `{words}` did not come")]),
        (Ok(r), None) => r,
    };
    let mut wrong = unordered(&of_roles);
    let mut text = String::new();
    for (name, t) in &whole {
        text += &format!("whole {name} {}\n", show(t));
    }
    for o in &of_ranks {
        text += &format!("rank {} {} {}\n", o.rank, o.name, show(&o.value));
        let Some(whole) = whole.get(&o.name) else { continue };
        let mut want = Some(whole.clone());
        for (dim, (start, len)) in o.ranges.iter().enumerate() {
            want = want.and_then(|t| t.slice(dim, *start as usize, *len as usize));
        }
        let far = want.map_or(f64::INFINITY, |w| w.distance(&o.value));
        if far > header.tolerance {
            wrong.push(format!("rank {}: {} is off the whole one's piece by {far:e}", o.rank, o.name));
        }
    }
    if wrong.is_empty() { Ok(Some(text)) } else { Err(wrong) }
}

/// What crosses streams without an order: the evaluator takes ops one by one, a backend with streams need not.
fn unordered(of_roles: &[&Program]) -> Vec<String> {
    let found = of_roles.iter().flat_map(|p| check_program(p));
    found.filter(|d| ORDER.contains(&d.code.id)).map(|d| format!("{}: {}", d.code.id, d.message)).collect()
}

const ORDER: [&str; 2] = ["T0316", "T0318"];

struct Piece {
    rank: Rank,
    name: String,
    value: Tensor,
    /// Start and length of each dim in the whole.
    ranges: Vec<(u64, u64)>,
}

fn machine(header: &Header, mesh: Mesh) -> Machine {
    let mut m = Machine::new(mesh);
    m.load_weights(header.weights.clone());
    m
}

fn whole(header: &Header, logical: &[&Program]) -> Result<BTreeMap<String, Tensor>, String> {
    let mut m = machine(header, Mesh::default());
    let mut out = BTreeMap::new();
    for p in logical {
        out.extend(m.run(&[p], &header.call).map_err(|f| f.to_string())?.into_iter().flatten());
    }
    Ok(out)
}

fn ranks(header: &Header, of_roles: &[&Program]) -> Result<Vec<Piece>, String> {
    let Some(mesh) = of_roles.first().map(|p| p.mesh) else { return Ok(Vec::new()) };
    let mut m = machine(header, mesh);
    let mut out = Vec::new();
    for (_, phase) in phases(of_roles) {
        let cast = header.cast(&mesh, &phase)?;
        let outputs = m.run(&cast, &header.call).map_err(|f| f.to_string())?;
        for ((rank, p), outputs) in mesh.iter().zip(&cast).zip(outputs) {
            for op in p.ops.iter().filter(|o| o.opcode == Opcode::Output) {
                let name = op.name.clone().unwrap_or_default();
                let Some(value) = outputs.get(&name).cloned() else { continue };
                let ty = p.ty(op.operands[0]);
                let ranges = ty.layout.ranges(&ty.shape, &mesh, mesh.coord_of(rank));
                out.push(Piece { rank, name, value, ranges });
            }
        }
    }
    Ok(out)
}

/// `[2, 2] 1 2 3 4`, numbers with as many digits as they need.
fn show(t: &Tensor) -> String {
    let values: Vec<String> = t.data().iter().map(|x| format!("{x}")).collect();
    format!("{:?} {}", t.shape(), values.join(" "))
}

//! Evaluates a file: runs its logical programs on one rank and its role programs on all ranks, and
//! compares the results.

use std::collections::BTreeMap;

use tessera_ir::{Dialect, Opcode, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{Evaluator, Tensor};
use tessera_verify::check_program;

use crate::header::Header;

/// Groups programs by phase, in order of first appearance.
pub(crate) fn group_by_phase<'a>(programs: &[&'a Program]) -> Vec<(String, Vec<&'a Program>)> {
    let mut out: Vec<(String, Vec<&Program>)> = Vec::new();
    for p in programs {
        match out.iter_mut().find(|(name, _)| *name == p.name) {
            Some((_, phase)) => phase.push(p),
            None => out.push((p.name.clone(), vec![p])),
        }
    }
    out
}

/// Returns the outputs as text, one line each, or `None` if the evaluation ended in the expected
/// fault.
pub(crate) fn evaluate_file(header: &Header, programs: &[Program]) -> Result<Option<String>, Vec<String>> {
    let (logical, role_programs): (Vec<&Program>, Vec<&Program>) =
        programs.iter().partition(|p| p.dialect == Dialect::Logical);
    let result = evaluate_logical(header, &logical)
        .and_then(|w| evaluate_ranks(header, &role_programs).map(|r| (w, r)));
    let (whole, shards) = match (result, &header.fault) {
        (Err(e), Some(expected_text)) if e.contains(expected_text.as_str()) => return Ok(None),
        (Err(e), _) => return Err(vec![e]),
        (Ok(_), Some(expected_text)) => {
            return Err(vec![format!("the expected fault `{expected_text}` did not occur")]);
        }
        (Ok(r), None) => r,
    };
    let mut problems = find_stream_races(&role_programs);
    let mut text = String::new();
    for (name, t) in &whole {
        text += &format!("logical {name} {}\n", format_tensor(t));
    }
    for o in &shards {
        text += &format!("rank {} {} {}\n", o.rank, o.name, format_tensor(&o.value));
        let Some(whole) = whole.get(&o.name) else { continue };
        let mut expected = Some(whole.clone());
        for (dim, (start, len)) in o.ranges.iter().enumerate() {
            expected = expected.and_then(|t| t.slice(dim, *start as usize, *len as usize));
        }
        let difference = expected.map_or(f64::INFINITY, |w| w.distance(&o.value));
        if difference > header.tolerance {
            problems.push(format!(
                "rank {}: {} differs from its shard of the logical output by {difference:e}",
                o.rank, o.name
            ));
        }
    }
    if problems.is_empty() { Ok(Some(text)) } else { Err(problems) }
}

/// Reports uses of values across streams without an order. The evaluator runs ops one by one; a
/// backend with streams need not.
fn find_stream_races(role_programs: &[&Program]) -> Vec<String> {
    let found = role_programs.iter().flat_map(|p| check_program(p));
    found
        .filter(|d| RACE_CODES.contains(&d.code.id))
        .map(|d| format!("{}: {}", d.code.id, d.message))
        .collect()
}

const RACE_CODES: [&str; 2] = ["T0316", "T0318"];

struct OutputShard {
    rank: Rank,
    name: String,
    value: Tensor,
    /// Start and length of the shard in each dim of the global tensor.
    ranges: Vec<(u64, u64)>,
}

fn new_evaluator(header: &Header, mesh: Mesh) -> Evaluator {
    let mut m = Evaluator::new(mesh);
    m.load_weights(header.weights.clone());
    m
}

fn evaluate_logical(header: &Header, logical: &[&Program]) -> Result<BTreeMap<String, Tensor>, String> {
    let mut m = new_evaluator(header, Mesh::default());
    let mut out = BTreeMap::new();
    for p in logical {
        out.extend(m.run(&[p], &header.call).map_err(|f| f.to_string())?.into_iter().flatten());
    }
    Ok(out)
}

fn evaluate_ranks(header: &Header, role_programs: &[&Program]) -> Result<Vec<OutputShard>, String> {
    let Some(mesh) = role_programs.first().map(|p| p.mesh) else { return Ok(Vec::new()) };
    let mut evaluator = new_evaluator(header, mesh);
    let mut out = Vec::new();
    for (_, phase) in group_by_phase(role_programs) {
        let programs = header.programs_by_rank(&mesh, &phase)?;
        let outputs = evaluator.run(&programs, &header.call).map_err(|f| f.to_string())?;
        for ((rank, p), outputs) in mesh.iter().zip(&programs).zip(outputs) {
            for op in p.ops.iter().filter(|o| o.opcode == Opcode::Output) {
                let name = op.name.clone().unwrap_or_default();
                let Some(value) = outputs.get(&name).cloned() else { continue };
                let ty = p.type_of(op.operands[0]);
                let ranges = ty.layout.global_ranges(&ty.shape, &mesh, mesh.coord_of(rank));
                out.push(OutputShard { rank, name, value, ranges });
            }
        }
    }
    Ok(out)
}

/// Formats a tensor as `[2, 2] 1 2 3 4`, with the fewest digits that read back to the same numbers.
fn format_tensor(t: &Tensor) -> String {
    let values: Vec<String> = t.data().iter().map(|x| format!("{x}")).collect();
    format!("{:?} {}", t.shape(), values.join(" "))
}

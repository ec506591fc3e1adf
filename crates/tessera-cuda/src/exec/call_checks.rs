//! Checks the numbers of a call on the host, where a kernel could only read outside its operands.

use std::collections::BTreeSet;

use tessera_device::{CallData, Fault, Scalar};
use tessera_ir::{OpView, Opcode, Program, ValueId};

use super::PreparedProgram;

/// Whole numbers below this one are exact in f32.
const EXACT_END: f32 = (1 << 24) as f32;

/// Checks the numbers of a call that ops use as indices: ids that name rows of a table, lengths of attentions with
/// a bias by distance, pages and positions of token sequences, and what the choice of ids counts.
pub(super) fn check_numbers(program: &PreparedProgram, call: &CallData<'_>) -> Result<(), Fault> {
    let p = &*program.program;
    // Every layer of a model has the same pages.
    let mut checked_pages = BTreeSet::new();
    let mut check_pages = |pages, start, page_rows: u64, capacity: u64| {
        let pool = (pages, start, capacity / page_rows.max(1));
        if checked_pages.insert(pool) { check_page_table(p, pool, call) } else { Ok(()) }
    };
    p.ops.iter().zip(&*program.views).try_for_each(|(op, view)| match view {
        OpView::Embed(v) => {
            let table = p.type_of(v.table);
            check_ids(p, v.ids, table.layout.global_shape(&table.shape, &p.mesh)[0], call)
        }
        OpView::RelativeAttention(v) => check_length(p, v.length, p.type_of(v.k).shape[0], call),
        OpView::PagedAttention(v) => check_pages(v.pages, v.start, v.page_rows, p.type_of(v.k).shape[0]),
        OpView::CacheWrite(v) => match (v.pages, v.start, v.page_rows, op.buffer) {
            (Some(pages), Some(start), Some(rows), Some(b)) => {
                check_pages(pages, start, rows, p.buffer(b).ty.shape[0])
            }
            _ => Ok(()),
        },
        OpView::Sample(v) => [v.top_k, v.seed, v.draw].into_iter().try_for_each(|n| check_count(p, n, call)),
        _ => Ok(()),
    })
}

/// Returns the first of some inputs that an op uses as indices without a check of its own.
pub(super) fn find_index_input<'p>(
    p: &'p Program,
    views: &[OpView],
    is_asked: impl Fn(&str) -> bool,
) -> Option<&'p str> {
    let index_operands = views.iter().flat_map(|view| match view {
        OpView::RelativeAttention(v) => vec![v.length],
        OpView::PagedAttention(v) => vec![v.pages, v.start],
        OpView::CacheWrite(v) => [v.pages, v.start].into_iter().flatten().collect(),
        OpView::Sample(v) => vec![v.top_k, v.seed, v.draw],
        _ => Vec::new(),
    });
    index_operands.filter_map(|v| source_name(p, v, Opcode::Input)).find(|name| is_asked(name))
}

/// Ids that an op computes are not known here; the kernel yields NaN for those that name no row.
fn check_ids(p: &Program, ids: ValueId, rows: u64, call: &CallData<'_>) -> Result<(), Fault> {
    let ids = find_numbers(p, ids, call);
    match ids.iter().find(|id| id.fract() != 0.0 || !(0.0..rows as f32).contains(*id)) {
        Some(id) => Err(Fault::Failed(format!("id {id} is not a row of a table with {rows} rows"))),
        None => Ok(()),
    }
}

fn check_length(p: &Program, length: ValueId, keys: u64, call: &CallData<'_>) -> Result<(), Fault> {
    let given = source_name(p, length, Opcode::Call).and_then(|name| call.scalars.get(name));
    match given {
        Some(Scalar::I64(n)) if !(1..=keys as i64).contains(n) => {
            Err(Fault::Failed(format!("`length` is {n}, but there are {keys} keys")))
        }
        _ => Ok(()),
    }
}

/// Negative numbers stand for absent pages and sequences.
fn check_page_table(
    p: &Program,
    (pages, start, pool_pages): (ValueId, ValueId, u64),
    call: &CallData<'_>,
) -> Result<(), Fault> {
    let (pages, start) = (find_numbers(p, pages, call), find_numbers(p, start, call));
    let is_whole = |x: &&f32| x.fract() == 0.0 && **x < EXACT_END;
    if let Some(x) = pages.iter().chain(start).find(|x| !is_whole(x)) {
        return Err(Fault::Failed(format!("{x} is no page and no position")));
    }
    match pages.iter().find(|page| **page >= pool_pages as f32) {
        Some(page) => Err(Fault::Failed(format!("page {page} of a pool of {pool_pages} pages"))),
        None => Ok(()),
    }
}

fn check_count(p: &Program, counts: ValueId, call: &CallData<'_>) -> Result<(), Fault> {
    let counts = find_numbers(p, counts, call);
    match counts.iter().find(|n| n.fract() != 0.0 || !(0.0..EXACT_END).contains(*n)) {
        Some(n) => Err(Fault::Failed(format!("{n} is no top_k, seed or draw: a whole number below 2^24"))),
        None => Ok(()),
    }
}

/// Returns the numbers that a call gives for an input or a call scalar in f32; none for the result of an op.
fn find_numbers<'c>(p: &Program, value: ValueId, call: &'c CallData<'_>) -> &'c [f32] {
    if let Some(name) = source_name(p, value, Opcode::Input) {
        return call.inputs.get(name).copied().unwrap_or_default();
    }
    match source_name(p, value, Opcode::Call).and_then(|name| call.scalars.get(name)) {
        Some(Scalar::F32s(numbers)) => numbers,
        Some(Scalar::F32(number)) => std::slice::from_ref(number),
        _ => &[],
    }
}

/// Returns the name of the input or the call scalar that a value is.
fn source_name(p: &Program, value: ValueId, opcode: Opcode) -> Option<&str> {
    let op = p.ops.iter().find(|op| op.opcode == opcode && op.results.first() == Some(&value))?;
    op.name.as_deref()
}

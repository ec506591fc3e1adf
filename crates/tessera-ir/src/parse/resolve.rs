//! Resolution of a parsed op: looks up its names and applies the op's rule.

use std::collections::BTreeMap;

use tessera_base::{Span, closest_name, format_choices};

use super::branch::{NO_BRANCHES, is_branch};
use super::{ParseResult, ParsedOp, Parser, T0203, T0204, T0205};
use crate::rules::infer_types_with;
use crate::{BufferId, Op, OpRow, Opcode, Program, StreamId, Type, Value, ValueId};

/// All names with the value (`None` if its op was rejected) and the position of the definition.
pub(super) type NameTable = BTreeMap<String, (Option<ValueId>, Span)>;

impl Parser<'_> {
    /// Looks up the names of an op, checks the op with its rule and appends it. Returns the types
    /// of its results, or `None` if the op uses the result of a rejected op.
    pub(super) fn resolve_op(
        &mut self,
        p: &mut Program,
        names: &NameTable,
        w: ParsedOp,
    ) -> ParseResult<Option<Vec<Type>>> {
        let row = w.opcode.table_row();
        let mut poisoned = false;
        let mut look = |s: &Self, (name, span): &(String, Span)| -> ParseResult<ValueId> {
            match names.get(name) {
                Some((Some(v), _)) => Ok(*v),
                Some((None, _)) => {
                    poisoned = true;
                    Ok(ValueId(0))
                }
                None => {
                    let mut d =
                        s.error_at(&T0204, format!("value %{name} is not defined"), "used here", *span);
                    if let Some(n) = closest_name(name, names.keys().map(String::as_str)) {
                        *d = d.with_hint(format!("did you mean %{n}?"));
                    }
                    Err(d)
                }
            }
        };
        let operands = w.operands.iter().map(|o| look(self, o)).collect::<ParseResult<Vec<_>>>()?;
        let after = w.after.iter().map(|o| look(self, o)).collect::<ParseResult<Vec<_>>>()?;
        let mut keyed: Vec<(&'static str, ValueId)> = Vec::new();
        for (key, value, span) in &w.keyed {
            let at = self.resolve_key(row, key, *span)?;
            keyed.push((at, look(self, &(value.clone(), *span))?));
        }
        keyed.sort_by_key(|(k, _)| row.keyed.iter().position(|o| o.trim_end_matches('?') == *k));
        for (name, span) in &w.results {
            if let Some((_, first)) = names.get(name) {
                let mut d =
                    self.error_at(&T0204, format!("value %{name} is defined twice"), "again here", *span);
                *d = d.with_span_label(self.file, "first here", *first);
                return Err(d);
            }
        }
        if let Some(i) =
            (1..w.results.len()).find(|i| w.results[..*i].iter().any(|(n, _)| *n == w.results[*i].0))
        {
            let (name, span) = &w.results[i];
            return Err(self.error_at(
                &T0204,
                format!("value %{name} is defined twice"),
                "again here",
                *span,
            ));
        }
        let buffer = match &w.buffer {
            None => None,
            Some((name, span)) => match p.buffers.iter().position(|b| b.name == *name) {
                Some(i) => Some(BufferId(i as u32)),
                None => {
                    let mut d =
                        self.error_at(&T0204, format!("buffer @{name} is not declared"), "used here", *span);
                    let near = closest_name(name, p.buffers.iter().map(|b| b.name.as_str()));
                    *d = d.with_hint(match near {
                        Some(n) => format!("did you mean @{n}?"),
                        None => format!("declare it: buffer @{name} : type"),
                    });
                    return Err(d);
                }
            },
        };
        let stream = match &w.stream {
            None => StreamId(0),
            Some((name, span)) => match p.streams.iter().position(|s| s == name) {
                Some(i) => StreamId(i as u32),
                None => {
                    let mut d =
                        self.error_at(&T0204, format!("stream @{name} is not declared"), "used here", *span);
                    *d = d.with_hint(format!("declared streams: {}", format_choices(&p.streams)));
                    return Err(d);
                }
            },
        };
        if poisoned {
            return Ok(None);
        }
        // A source without a quoted name has the name of its value.
        let named = matches!(w.opcode, Opcode::Input | Opcode::Call | Opcode::Weight);
        let name = match (w.name, w.results.first()) {
            (Some((n, _)), _) => Some(n),
            (None, Some((n, _))) if named => Some(n.clone()),
            _ => None,
        };
        let mut op = Op {
            opcode: w.opcode,
            issue: w.issue,
            name,
            buffer,
            operands,
            keyed,
            attrs: w.attrs,
            results: Vec::new(),
            stream,
            after,
            span: Some(w.span),
        };
        let written: Vec<Type> = w.types.iter().map(|(t, _)| t.clone()).collect();
        let types = infer_types_with(p, &op, &written, &self.definitions).map_err(|e| {
            // The messages of most rules begin with the op's name.
            let m = if e.message.starts_with(row.name) {
                e.message
            } else {
                format!("{}: {}", row.name, e.message)
            };
            self.error_at(e.code, m, "this op is rejected", w.op_span)
        })?;
        if types.len() != w.results.len() {
            let m = format!("{} has {} results, but {} are named", row.name, types.len(), w.results.len());
            return Err(self.error_at(&T0203, m, "this op", w.op_span));
        }
        let given: Vec<&Type> = types.iter().filter(|t| !t.is_token()).collect();
        let all: Vec<&Type> = types.iter().collect();
        let seen: Vec<&Type> = written.iter().collect();
        if !seen.is_empty() && seen != given && seen != all {
            let show = |t: &[&Type]| t.iter().map(|t| t.display_on(&p.mesh)).collect::<Vec<_>>().join(", ");
            let (inferred, span) = (show(&given), w.types[0].1);
            let m = format!("{} has the type {inferred}, but the written type is {}", row.name, show(&seen));
            let mut d = self.error_at(&T0205, m, format!("the inferred type is {inferred}"), span);
            *d = d.with_hint("omit the type to use the inferred one");
            return Err(d);
        }
        op.results = (0..types.len()).map(|i| ValueId((p.values.len() + i) as u32)).collect();
        // Values without a defining op are results of rejected ops.
        self.definitions.resize(p.values.len(), None);
        self.definitions.extend(types.iter().map(|_| Some(p.ops.len())));
        p.ops.push(op);
        Ok(Some(types))
    }
}

impl Parser<'_> {
    /// Returns the key in the spelling of the op table.
    pub(super) fn resolve_key(&self, row: &OpRow, key: &str, span: Span) -> ParseResult<&'static str> {
        let known: Vec<&'static str> = row.keyed.iter().map(|k| k.trim_end_matches('?')).collect();
        if let Some(at) = known.iter().find(|k| **k == key) {
            return Ok(at);
        }
        let m = format!("{} has no operand `{key}`", row.name);
        let mut d = self.error_at(&T0203, m, "this one", span);
        *d = d.with_hint(match is_branch(key) {
            true => NO_BRANCHES.to_string(),
            false => format!("its keyed operands: {}", format_choices(&known)),
        });
        Err(d)
    }
}

pub(super) fn define_value(
    p: &mut Program,
    names: &mut NameTable,
    (name, span): (String, Span),
    ty: Option<Type>,
) {
    let id = ty.map(|ty| {
        p.values.push(Value { name: name.clone(), ty });
        ValueId((p.values.len() - 1) as u32)
    });
    names.entry(name).or_insert((id, span));
}

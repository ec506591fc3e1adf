//! From an op as written to an op of the program: names are looked up, and the op's rule has its say.

use std::collections::BTreeMap;

use tessera_base::{Span, choices, nearest};

use super::branch::{NO_BRANCHES, is_branch};
use super::{Parsed, Parser, T0203, T0204, T0205, Written};
use crate::rules::infer_with;
use crate::{BufferId, Op, OpRow, Opcode, Program, StreamId, Type, Value, ValueId};

/// What is known of a name: the value, or nothing where its op was refused; and where it was defined.
pub(super) type Names = BTreeMap<String, (Option<ValueId>, Span)>;

impl Parser<'_> {
    /// Looks names up, checks the op by its rule and appends it. The results' types; nothing when the op was
    /// refused before, by way of an operand.
    pub(super) fn resolve(
        &mut self,
        p: &mut Program,
        names: &Names,
        w: Written,
    ) -> Parsed<Option<Vec<Type>>> {
        let row = w.opcode.row();
        let mut poisoned = false;
        let mut look = |s: &Self, (name, span): &(String, Span)| -> Parsed<ValueId> {
            match names.get(name) {
                Some((Some(v), _)) => Ok(*v),
                Some((None, _)) => {
                    poisoned = true;
                    Ok(ValueId(0))
                }
                None => {
                    let mut d = s.error(&T0204, format!("value %{name} is not defined"), "used here", *span);
                    if let Some(n) = nearest(name, names.keys().map(String::as_str)) {
                        *d = d.hint(format!("did you mean %{n}?"));
                    }
                    Err(d)
                }
            }
        };
        let operands = w.operands.iter().map(|o| look(self, o)).collect::<Parsed<Vec<_>>>()?;
        let after = w.after.iter().map(|o| look(self, o)).collect::<Parsed<Vec<_>>>()?;
        let mut keyed: Vec<(&'static str, ValueId)> = Vec::new();
        for (key, value, span) in &w.keyed {
            let at = self.keyed_operand(row, key, *span)?;
            keyed.push((at, look(self, &(value.clone(), *span))?));
        }
        keyed.sort_by_key(|(k, _)| row.keyed.iter().position(|o| o.trim_end_matches('?') == *k));
        for (name, span) in &w.results {
            if let Some((_, first)) = names.get(name) {
                let mut d =
                    self.error(&T0204, format!("value %{name} is defined twice"), "again here", *span);
                *d = d.at_span(self.file, "first here", *first);
                return Err(d);
            }
        }
        if let Some(i) =
            (1..w.results.len()).find(|i| w.results[..*i].iter().any(|(n, _)| *n == w.results[*i].0))
        {
            let (name, span) = &w.results[i];
            return Err(self.error(&T0204, format!("value %{name} is defined twice"), "again here", *span));
        }
        let buffer = match &w.buffer {
            None => None,
            Some((name, span)) => match p.buffers.iter().position(|b| b.name == *name) {
                Some(i) => Some(BufferId(i as u32)),
                None => {
                    let mut d =
                        self.error(&T0204, format!("buffer @{name} is not declared"), "used here", *span);
                    let near = nearest(name, p.buffers.iter().map(|b| b.name.as_str()));
                    *d = d.hint(match near {
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
                        self.error(&T0204, format!("stream @{name} is not declared"), "used here", *span);
                    *d = d.hint(format!("the program's streams: {}", choices(&p.streams)));
                    return Err(d);
                }
            },
        };
        if poisoned {
            return Ok(None);
        }
        // A source without a name goes by the name of its value.
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
        let types = infer_with(p, &op, &written, &self.definitions).map_err(|e| {
            // Most rules begin with the op's name themselves.
            let m = if e.message.starts_with(row.name) {
                e.message
            } else {
                format!("{}: {}", row.name, e.message)
            };
            self.error(e.code, m, "refused", w.op_span)
        })?;
        if types.len() != w.results.len() {
            let m = format!("{} gives {} results, {} are named", row.name, types.len(), w.results.len());
            return Err(self.error(&T0203, m, "this op", w.op_span));
        }
        let given: Vec<&Type> = types.iter().filter(|t| !t.is_token()).collect();
        let all: Vec<&Type> = types.iter().collect();
        let seen: Vec<&Type> = written.iter().collect();
        if !seen.is_empty() && seen != given && seen != all {
            let show = |t: &[&Type]| t.iter().map(|t| t.display(&p.mesh)).collect::<Vec<_>>().join(", ");
            let (inferred, span) = (show(&given), w.types[0].1);
            let m = format!("{} gives {inferred}, written is {}", row.name, show(&seen));
            let mut d = self.error(&T0205, m, format!("the op gives {inferred}"), span);
            *d = d.hint("leave the type out to take the op's");
            return Err(d);
        }
        op.results = (0..types.len()).map(|i| ValueId((p.values.len() + i) as u32)).collect();
        // Values without an op are results of refused ones.
        self.definitions.resize(p.values.len(), None);
        self.definitions.extend(types.iter().map(|_| Some(p.ops.len())));
        p.ops.push(op);
        Ok(Some(types))
    }
}

impl Parser<'_> {
    /// The key as the op's row has it.
    pub(super) fn keyed_operand(&self, row: &OpRow, key: &str, span: Span) -> Parsed<&'static str> {
        let known: Vec<&'static str> = row.keyed.iter().map(|k| k.trim_end_matches('?')).collect();
        if let Some(at) = known.iter().find(|k| **k == key) {
            return Ok(at);
        }
        let m = format!("{} has no operand `{key}`", row.name);
        let mut d = self.error(&T0203, m, "this one", span);
        *d = d.hint(match is_branch(key) {
            true => NO_BRANCHES.to_string(),
            false => format!("its keyed operands: {}", choices(&known)),
        });
        Err(d)
    }
}

pub(super) fn define(p: &mut Program, names: &mut Names, (name, span): (String, Span), ty: Option<Type>) {
    let id = ty.map(|ty| {
        p.values.push(Value { name: name.clone(), ty });
        ValueId((p.values.len() - 1) as u32)
    });
    names.entry(name).or_insert((id, span));
}

//! Resolution of a parsed op: looks up its names and applies the op's rule.

use tessera_base::{Span, closest_name, format_choices};

use super::branch::{NO_BRANCHES, is_branch};
use super::{NameTable, ParseResult, ParsedOp, Parser};
use crate::codes::{T0203, T0204, T0205};
use crate::rules::infer_types;
use crate::{BufferId, Op, OpRow, Opcode, Program, StreamId, Type, Value, ValueId};

impl Parser<'_> {
    /// Looks up the names of an op, checks the op with its rule and appends it. Returns the types
    /// of its results, or `None` if the op uses the result of a rejected op.
    pub(super) fn resolve_op(
        &mut self,
        p: &mut Program,
        names: &NameTable,
        w: &ParsedOp,
    ) -> ParseResult<Option<Vec<Type>>> {
        let row = w.opcode.table_row();
        let operands = self.find_values(names, &w.operands)?;
        let after = self.find_values(names, &w.after)?;
        let mut keyed: Vec<(&'static str, Option<ValueId>)> = Vec::new();
        for (key, value, span) in &w.keyed {
            let at = self.resolve_key(row, key, *span)?;
            keyed.push((at, self.find_value(names, value, *span)?));
        }
        keyed.sort_by_key(|(k, _)| row.keyed_position(k));
        self.check_results_are_new(names, &w.results)?;
        let buffer = w.buffer.as_ref().map(|(name, span)| self.find_buffer(p, name, *span)).transpose()?;
        let stream = match &w.stream {
            Some((name, span)) => self.find_stream(p, name, *span)?,
            None => StreamId(0),
        };
        let keyed: Option<Vec<_>> = keyed.into_iter().map(|(k, v)| Some((k, v?))).collect();
        let (Some(operands), Some(after), Some(keyed)) = (operands, after, keyed) else {
            return Ok(None);
        };
        // A source without a quoted name has the name of its value.
        let named = matches!(w.opcode, Opcode::Input | Opcode::Call | Opcode::Weight);
        let name = match (&w.name, w.results.first()) {
            (Some((n, _)), _) => Some(n.clone()),
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
            attrs: w.attrs.clone(),
            results: Vec::new(),
            stream,
            after,
            span: Some(w.span),
        };
        let types = self.infer_result_types(p, &op, w)?;
        op.results = (0..types.len()).map(|i| ValueId((p.values.len() + i) as u32)).collect();
        // Values without a defining op are results of rejected ops.
        self.definitions.resize(p.values.len(), None);
        self.definitions.extend(types.iter().map(|_| Some(p.ops.len())));
        p.ops.push(op);
        Ok(Some(types))
    }

    /// Looks up a value. Returns `None` if its op was rejected.
    fn find_value(&self, names: &NameTable, name: &str, span: Span) -> ParseResult<Option<ValueId>> {
        if let Some((id, _)) = names.get(name) {
            return Ok(*id);
        }
        let mut d = self.error_at(&T0204, format!("value %{name} is not defined"), "used here", span);
        if let Some(n) = closest_name(name, names.keys().map(String::as_str)) {
            *d = d.with_hint(format!("did you mean %{n}?"));
        }
        Err(d)
    }

    /// Looks up several values. Returns `None` if the op of one was rejected.
    fn find_values(&self, names: &NameTable, values: &[(String, Span)]) -> ParseResult<Option<Vec<ValueId>>> {
        let found: ParseResult<Vec<Option<ValueId>>> =
            values.iter().map(|(name, span)| self.find_value(names, name, *span)).collect();
        Ok(found?.into_iter().collect())
    }

    fn find_buffer(&self, p: &Program, name: &str, span: Span) -> ParseResult<BufferId> {
        if let Some(i) = p.buffers.iter().position(|b| b.name == name) {
            return Ok(BufferId(i as u32));
        }
        let mut d = self.error_at(&T0204, format!("buffer @{name} is not declared"), "used here", span);
        let near = closest_name(name, p.buffers.iter().map(|b| b.name.as_str()));
        *d = d.with_hint(match near {
            Some(n) => format!("did you mean @{n}?"),
            None => format!("declare it: buffer @{name} : type"),
        });
        Err(d)
    }

    fn find_stream(&self, p: &Program, name: &str, span: Span) -> ParseResult<StreamId> {
        if let Some(i) = p.streams.iter().position(|s| s == name) {
            return Ok(StreamId(i as u32));
        }
        let mut d = self.error_at(&T0204, format!("stream @{name} is not declared"), "used here", span);
        *d = d.with_hint(format!("declared streams: {}", format_choices(&p.streams)));
        Err(d)
    }

    /// Checks that no result has the name of an earlier value or of another result.
    fn check_results_are_new(&self, names: &NameTable, results: &[(String, Span)]) -> ParseResult<()> {
        let twice = |name: &str, span: Span| {
            self.error_at(&T0204, format!("value %{name} is defined twice"), "again here", span)
        };
        for (name, span) in results {
            if let Some((_, first)) = names.get(name) {
                let mut d = twice(name, *span);
                *d = d.with_span_label(self.file, "first here", *first);
                return Err(d);
            }
        }
        let repeated = (1..results.len()).find(|i| results[..*i].iter().any(|(n, _)| *n == results[*i].0));
        match repeated {
            Some(i) => Err(twice(&results[i].0, results[i].1)),
            None => Ok(()),
        }
    }

    /// Infers the types of the results and compares them with the written types.
    fn infer_result_types(&self, p: &Program, op: &Op, w: &ParsedOp) -> ParseResult<Vec<Type>> {
        let name = op.opcode.name();
        let written: Vec<Type> = w.types.iter().map(|(t, _)| t.clone()).collect();
        let types = infer_types(p, op, &written, &self.definitions).map_err(|e| {
            // The messages of most rules begin with the op's name.
            let m = if e.message.starts_with(name) { e.message } else { format!("{name}: {}", e.message) };
            self.error_at(e.code, m, "this op is rejected", w.op_span)
        })?;
        if types.len() != w.results.len() {
            let m = format!("{name} has {} results, but {} are named", types.len(), w.results.len());
            return Err(self.error_at(&T0203, m, "this op", w.op_span));
        }
        let given: Vec<&Type> = types.iter().filter(|t| !t.is_token()).collect();
        let all: Vec<&Type> = types.iter().collect();
        let seen: Vec<&Type> = written.iter().collect();
        if !seen.is_empty() && seen != given && seen != all {
            let show = |t: &[&Type]| t.iter().map(|t| t.display_on(&p.mesh)).collect::<Vec<_>>().join(", ");
            let (inferred, span) = (show(&given), w.types[0].1);
            let m = format!("{name} has the type {inferred}, but the written type is {}", show(&seen));
            let mut d = self.error_at(&T0205, m, format!("the inferred type is {inferred}"), span);
            *d = d.with_hint("omit the type to use the inferred one");
            return Err(d);
        }
        Ok(types)
    }

    /// Returns the key in the spelling of the op table.
    pub(super) fn resolve_key(&self, row: &OpRow, key: &str, span: Span) -> ParseResult<&'static str> {
        let known: Vec<&'static str> = row.keyed.iter().map(|k| k.name).collect();
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

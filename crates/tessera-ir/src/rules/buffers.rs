//! Rules of the ops that read and write rows of a buffer, and of the one that takes rows of a value.

use super::{RuleContext, RuleResult, rule_error};
use crate::codes::{T0210, T0213, T0214, T0215};
use crate::{Type, views};

impl RuleContext<'_> {
    pub(super) fn buffer_type(&self) -> RuleResult<&Type> {
        match self.op.buffer {
            Some(b) => Ok(&self.program.buffer(b).ty),
            None => rule_error(&T0215, format!("{} names no buffer", self.op.opcode.name())),
        }
    }

    pub(super) fn cache_read_type(&self, v: &views::CacheRead) -> RuleResult<Type> {
        let b = self.buffer_type()?;
        let Some(have) = b.shape.first().copied() else {
            return rule_error(&T0210, "a scalar buffer has no rows");
        };
        self.row_range_type(b, (v.row, v.rows.unwrap_or(have)), have, "a buffer")
    }

    pub(super) fn take_rows_type(&self, v: &views::TakeRows) -> RuleResult<Type> {
        match self.operands[0].shape.first() {
            Some(have) => self.row_range_type(self.operands[0], (v.row, v.rows), *have, "a value"),
            None => rule_error(&T0210, "a scalar has no rows"),
        }
    }

    /// Infers the type of rows `row..row + rows` of a value with `have` rows.
    fn row_range_type(&self, of: &Type, (row, rows): (u64, u64), have: u64, what: &str) -> RuleResult<Type> {
        if row.saturating_add(rows) > have {
            return rule_error(
                &T0210,
                format!("rows {row}..{} of {what} with {have} rows", row.saturating_add(rows)),
            );
        }
        if rows != have && self.axis_that_shards(&of.layout, 0).is_some() {
            return rule_error(&T0213, format!("the op needs all rows of {what} that is sharded by rows"));
        }
        let mut t = of.clone();
        t.shape[0] = rows;
        Ok(t)
    }

    pub(super) fn check_cache_write(&self, write: &views::CacheWrite) -> RuleResult<()> {
        let (b, v) = (self.buffer_type()?, self.operands[0]);
        let rows_fit = matches!((b.shape.first(), v.shape.first()), (Some(b), Some(v)) if v <= b || write.pages.is_some());
        if b.dtype != v.dtype || b.shape.get(1..) != v.shape.get(1..) || !rows_fit {
            return rule_error(
                &T0210,
                format!("{} does not fit the buffer {}", self.display_operand(0), b.display_on(self.mesh)),
            );
        }
        if b.layout != v.layout {
            return rule_error(
                &T0214,
                format!("{} cannot be written to {}", self.display_operand(0), b.display_on(self.mesh)),
            );
        }
        if let Some(pool) = self.page_pool(write)? {
            return self.check_page_write(write.x, pool, b);
        }
        let (first, rows, have) = (write.first_row, v.shape[0], b.shape[0]);
        if first.saturating_add(rows) > have {
            return rule_error(
                &T0210,
                format!("rows {first}..{} of a buffer with {have} rows", first.saturating_add(rows)),
            );
        }
        let part = b.shape != v.shape || write.row.is_some() || first > 0;
        if self.axis_that_shards(&b.layout, 0).is_some() && part {
            return rule_error(&T0213, "a buffer that is sharded by rows must be written as a whole");
        }
        Ok(())
    }
}

//! Rules of the ops of a language model: token sequences in a batch, whose keys and values lie in pages.

use tessera_mesh::AxisLayout;

use super::heads::{is_same_share, resize_heads};
use super::{RuleContext, RuleResult, rule_error};
use crate::codes::{T0203, T0210, T0213, T0215};
use crate::{DType, Type, ValueId, views};

/// How a buffer is divided into pages, and who owns them.
pub(super) struct PagePool {
    pages: ValueId,
    start: ValueId,
    page_rows: u64,
}

impl RuleContext<'_> {
    pub(super) fn rotary_type(&self, v: &views::Rotary) -> RuleResult<Type> {
        let ([rows, d], hd) = (self.matrix_shape(0)?, v.head_dim);
        let frequencies = self.operands[1];
        let rotated = match frequencies.shape[..] {
            [m] if frequencies.layout.is_replicated() => m.saturating_mul(2),
            _ => u64::MAX,
        };
        if !d.is_multiple_of(hd) || rotated > hd {
            return rule_error(
                &T0210,
                format!(
                    "heads of {hd} over {}, with frequencies {}",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            );
        }
        self.check_vector_dtype(1, 0)?;
        self.check_sequences(v.start, rows)?;
        self.check_whole_rows(0)?;
        Ok(self.operands[0].clone())
    }

    pub(super) fn head_norm_type(&self, v: &views::HeadNorm) -> RuleResult<Type> {
        let ([_, d], w) = (self.matrix_shape(0)?, self.operands[1]);
        if !d.is_multiple_of(v.head_dim) || w.shape != [v.head_dim] || !w.layout.is_replicated() {
            return rule_error(
                &T0210,
                format!(
                    "heads of {} over {}, with weight {}",
                    v.head_dim,
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            );
        }
        self.check_vector_dtype(1, 0)?;
        Ok(self.operands[0].clone())
    }

    pub(super) fn paged_attention_type(&self, v: &views::PagedAttention) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [r, dk], values) = (self.matrix_shape(0)?, self.matrix_shape(1)?, self.matrix_shape(2)?);
        let (hd, value_dim) = (v.head_dim, v.value_dim.unwrap_or(v.head_dim));
        let [heads, kv_heads] = [0, 1].map(|operand| {
            let t = self.operands[operand];
            t.layout.global_shape(&t.shape, self.mesh)[1] / hd
        });
        let whole = d.is_multiple_of(hd) && dk.is_multiple_of(hd) && dk > 0;
        if values != [r, dk] || !whole || !heads.is_multiple_of(kv_heads.max(1)) || value_dim > hd {
            return rule_error(
                &T0210,
                format!(
                    "q {} k {} v {} with heads of {hd}",
                    self.display_operand(0),
                    self.display_operand(1),
                    self.display_operand(2)
                ),
            );
        }
        [1, 2].into_iter().try_for_each(|operand| self.check_same_dtype(0, operand))?;
        [0, 1, 2].into_iter().try_for_each(|operand| self.check_whole_rows(operand))?;
        if v.sink > 0 && v.window.is_none() {
            return rule_error(&T0203, "`sink` without a `window`");
        }
        let pool = PagePool { pages: v.pages, start: v.start, page_rows: v.page_rows };
        self.check_pages(&pool, n, r)?;
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            // Every rank holds all KV heads.
            (S(q), R, R) if q.dim == 1 => resize_heads(q, hd, value_dim),
            (S(q), S(k), S(v))
                if k == v && q.dim == 1 && k.dim == 1 && d.is_multiple_of(dk) && is_same_share(q, k) =>
            {
                resize_heads(q, hd, value_dim)
            }
            _ => None,
        })?;
        Ok(self.type_like_first([n, d / hd * value_dim], layout))
    }

    pub(super) fn sample_type(&self) -> RuleResult<Type> {
        let [b, vocabulary] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        if vocabulary == 0 {
            return rule_error(&T0210, format!("{} has no ids", self.display_operand(0)));
        }
        for (name, value) in &self.op.keyed {
            let t = self.program.type_of(*value);
            if t.shape != [b] {
                return rule_error(
                    &T0210,
                    format!("`{name}` is {} for {b} rows of logits", t.display_on(self.mesh)),
                );
            }
        }
        Ok(Type::new(DType::F32, [b]))
    }

    /// Returns the pages to which a write distributes its rows, if it does.
    pub(super) fn page_pool(&self, write: &views::CacheWrite) -> RuleResult<Option<PagePool>> {
        match (write.pages, write.start, write.page_rows) {
            (None, None, None) => Ok(None),
            (Some(pages), Some(start), Some(page_rows)) if write.row.is_none() && write.first_row == 0 => {
                Ok(Some(PagePool { pages, start, page_rows }))
            }
            _ => rule_error(
                &T0215,
                "`pages`, `start` and `page_rows` must be given together, without `row` and `first_row`",
            ),
        }
    }

    /// Checks a write to the pages of a buffer, whose columns the caller has compared.
    pub(super) fn check_page_write(&self, x: ValueId, pool: PagePool, buffer: &Type) -> RuleResult<()> {
        let [rows, _] = match self.program.type_of(x).shape[..] {
            [rows, columns] => [rows, columns],
            _ => return rule_error(&T0210, format!("{} has no rows of tokens", self.display_operand(0))),
        };
        self.check_whole_rows(0)?;
        self.check_pages(&pool, rows, buffer.shape[0])
    }

    /// Checks the table of pages of a batch with this many rows over buffers of `capacity` rows.
    fn check_pages(&self, pool: &PagePool, rows: u64, capacity: u64) -> RuleResult<()> {
        let sequences = self.check_sequences(pool.start, rows)?;
        let pages = self.program.type_of(pool.pages);
        if !matches!(pages.shape[..], [b, m] if b == sequences && m > 0) {
            return rule_error(
                &T0210,
                format!("`pages` is {} for {sequences} sequences", pages.display_on(self.mesh)),
            );
        }
        if !capacity.is_multiple_of(pool.page_rows) {
            return rule_error(
                &T0210,
                format!("pages of {} rows do not divide a cache of {capacity} rows", pool.page_rows),
            );
        }
        Ok(())
    }

    /// Returns the number of sequences, each of which has the same number of rows.
    pub(super) fn check_sequences(&self, start: ValueId, rows: u64) -> RuleResult<u64> {
        let t = self.program.type_of(start);
        match t.shape[..] {
            [b] if b > 0 && rows.is_multiple_of(b) => Ok(b),
            _ => rule_error(
                &T0210,
                format!("`start` is {} for {rows} rows of tokens", t.display_on(self.mesh)),
            ),
        }
    }

    fn check_whole_rows(&self, operand: usize) -> RuleResult<()> {
        match self.axis_that_shards(&self.operands[operand].layout, 0) {
            None => Ok(()),
            Some(axis) => rule_error(
                &T0213,
                format!(
                    "{} needs the rows of whole sequences, which are sharded over {axis}",
                    self.op.opcode.name()
                ),
            ),
        }
    }
}

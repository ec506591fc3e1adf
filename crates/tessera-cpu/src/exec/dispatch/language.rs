//! Ops of a language model: attention over pages and the choice of tokens.

use tessera_device::Fault;
use tessera_ir::views;

use super::KernelRun;
use crate::kernels::{
    CausalWindow, GroupedHeads, HeadRows, PageTable, SamplingRule, head_columns, head_join, head_matmul,
    paged_attention, sample_id,
};

impl KernelRun<'_> {
    pub(super) fn run_paged_attention(&mut self, v: &views::PagedAttention) -> Result<(), Fault> {
        let x = &self.inputs;
        let capacity = x.shape(v.k)[0] as usize;
        let table = PageTable::new(x.values(v.pages)?, x.values(v.start)?, v.page_rows as usize, capacity)
            .map_err(Fault::Failed)?;
        let head_dim = v.head_dim as usize;
        let [(first_q, all_q), (first_k, all_k)] = [v.q, v.k].map(|value| x.global_columns(value));
        let heads = GroupedHeads {
            q_width: x.width(v.q),
            kv_width: x.width(v.k),
            head_dim,
            value_dim: v.value_dim.map_or(head_dim, |n| n as usize),
            total: (all_q / head_dim, all_k / head_dim),
            first: (first_q / head_dim, first_k / head_dim),
            scale: v.scale.map_or(1.0 / (head_dim as f32).sqrt(), |s| s as f32),
        };
        let causal = CausalWindow { window: v.window.map(|w| w as usize), sink: v.sink as usize };
        let operands = [x.values(v.q)?, x.values(v.k)?, x.values(v.v)?];
        paged_attention(self.pool, self.scratch, self.out, operands, heads, &table, causal);
        Ok(())
    }

    pub(super) fn run_head_columns(&mut self, v: &views::HeadColumns, [x]: [&[f32]; 1]) {
        head_columns(self.out, x, (v.head_dim as usize, v.first as usize, v.columns as usize));
    }

    pub(super) fn run_head_join(&mut self, v: &views::HeadJoin, [x, y]: [&[f32]; 2]) {
        let head_dim = v.head_dim as usize;
        let heads = self.inputs.width(v.x) / head_dim;
        head_join(self.out, x, y, (head_dim, self.inputs.width(v.y) / heads));
    }

    pub(super) fn run_head_matmul(&mut self, v: &views::HeadMatmul, [x, w]: [&[f32]; 2]) {
        let heads = HeadRows {
            of: v.head_rows as usize,
            first: v.first as usize,
            rows: v.rows as usize,
            columns: self.inputs.width(v.w),
            transposed: v.transposed,
        };
        head_matmul(self.pool, self.out, x, w, heads);
    }

    pub(super) fn run_sample(&mut self, v: &views::Sample) -> Result<(), Fault> {
        let x = &self.inputs;
        let (logits, width) = (x.values(v.logits)?, x.width(v.logits));
        let [temperature, top_p] = [x.values(v.temperature)?, x.values(v.top_p)?];
        let counts = [x.values(v.top_k)?, x.values(v.seed)?, x.values(v.draw)?];
        if let Some(n) =
            counts.iter().copied().flatten().find(|n| n.fract() != 0.0 || !(0.0..16_777_216.0).contains(*n))
        {
            return Err(Fault::Failed(format!("{n} is no top_k, seed or draw: a whole number below 2^24")));
        }
        // An id cannot carry NaN on, so a fault of the model would end here unseen.
        if let Some(row) = logits.chunks_exact(width).position(|row| row.iter().any(|x| x.is_nan())) {
            return Err(Fault::Failed(format!("the logits of row {row} contain NaN")));
        }
        for (i, (id, logits)) in self.out.iter_mut().zip(logits.chunks_exact(width)).enumerate() {
            let [top_k, seed, draw] = counts.map(|c| c[i] as u32);
            let rule = SamplingRule {
                temperature: temperature[i],
                top_k: top_k as usize,
                top_p: top_p[i],
                seed,
                draw,
            };
            *id = sample_id(logits, rule) as f32;
        }
        Ok(())
    }
}

//! Reference semantics of the ops of a language model.

use tessera_base::random::philox4x32;
use tessera_ir::views;

use super::{OpContext, TensorResult, matrix_extents, vector_data};
use crate::Tensor;

pub(super) fn rotary(cx: &OpContext<'_>, v: &views::Rotary) -> TensorResult {
    let (x, start, hd) = (cx.tensor(v.x)?, cx.tensor(v.start)?.data(), v.head_dim as usize);
    let ((rows, d), frequencies) = (matrix_extents(x)?, cx.tensor(v.frequencies)?.data());
    let m = frequencies.len();
    if 2 * m > hd || !d.is_multiple_of(hd) || start.is_empty() || !rows.is_multiple_of(start.len()) {
        return Err(format!("{:?} in heads of {hd}, {m} frequencies, {} sequences", x.shape(), start.len()));
    }
    Ok(Tensor::from_fn(x.shape(), |i| {
        let (row, channel) = (i / d, i % d % hd);
        let n = rows / start.len();
        let position = start[row / n] + (row % n) as f64;
        let (this, first) = (x.data()[i], i - channel);
        let at = |channel: usize| x.data()[first + channel];
        let turn = |pair: usize| (position * frequencies[pair]).sin_cos();
        match channel {
            c if v.interleaved && c < 2 * m => match c % 2 {
                0 => v.scale * (this * turn(c / 2).1 - at(c + 1) * turn(c / 2).0),
                _ => v.scale * (this * turn(c / 2).1 + at(c - 1) * turn(c / 2).0),
            },
            c if c < m => v.scale * (this * turn(c).1 - at(c + m) * turn(c).0),
            c if c < 2 * m => v.scale * (this * turn(c - m).1 + at(c - m) * turn(c - m).0),
            _ => this,
        }
    }))
}

pub(super) fn head_norm(cx: &OpContext<'_>, v: &views::HeadNorm) -> TensorResult {
    let (x, hd) = (cx.tensor(v.x)?, v.head_dim as usize);
    let ((_, d), w) = (matrix_extents(x)?, vector_data(cx.tensor(v.w)?, hd)?);
    if !d.is_multiple_of(hd) {
        return Err(format!("{:?} in heads of {hd}", x.shape()));
    }
    Ok(Tensor::from_fn(x.shape(), |i| {
        let head = &x.data()[i / hd * hd..][..hd];
        let mean = head.iter().map(|x| x * x).sum::<f64>() / hd as f64;
        x.data()[i] / (mean + v.eps).sqrt() * w[i % hd]
    }))
}

pub(super) fn paged_attention(cx: &OpContext<'_>, v: &views::PagedAttention) -> TensorResult {
    let (queries, keys, values) = (cx.tensor(v.q)?, cx.tensor(v.k)?, cx.tensor(v.v)?);
    let ((rows, d), (capacity, dk), hd) =
        (matrix_extents(queries)?, matrix_extents(keys)?, v.head_dim as usize);
    let value_dim = v.value_dim.map_or(hd, |n| n as usize);
    // Heads are numbered in the global tensors, because ranks may hold KV heads that others hold too.
    let [of_q, of_k] = [v.q, v.k].map(|value| cx.position(value));
    let [heads, kv_heads] = [&of_q, &of_k].map(|p| p.global[1] / hd);
    let kv_head = |head: usize| (of_q.start[1] / hd + head) * kv_heads / heads;
    let held = of_k.start[1] / hd..(of_k.start[1] + dk) / hd;
    let all_held = (0..d / hd).all(|head| held.contains(&kv_head(head)));
    if values.shape() != keys.shape() || kv_heads == 0 || !all_held || value_dim > hd {
        return Err(format!("q {:?} k {:?} v {:?}", queries.shape(), keys.shape(), values.shape()));
    }
    let scale = v.scale.unwrap_or(1.0 / (hd as f64).sqrt());
    let table = Pages::new(cx.tensor(v.pages)?, cx.tensor(v.start)?, v.page_rows, capacity, rows)?;
    let width = d / hd * value_dim;
    let mut y = Tensor::full(&[rows, width], 0.0);
    for row in 0..rows {
        let Some(position) = table.position_of_row(row) else { continue };
        let visible = |p: &usize| v.window.is_none_or(|w| *p < v.sink as usize || p + w as usize > position);
        let at: Vec<usize> = (0..=position).filter(visible).filter_map(|p| table.row_of(row, p)).collect();
        if at.is_empty() {
            continue;
        }
        for head in 0..d / hd {
            let column = (kv_head(head) - held.start) * hd;
            let q = &queries.row(row)[head * hd..][..hd];
            let score = |j: &usize| {
                let key = &keys.row(*j)[column..][..hd];
                q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * scale
            };
            let scores: Vec<f64> = at.iter().map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for c in 0..value_dim {
                let sum: f64 = at.iter().zip(&weights).map(|(j, w)| w * values.row(*j)[column + c]).sum();
                y.data_mut()[row * width + head * value_dim + c] = sum / total;
            }
        }
    }
    Ok(y)
}

/// Copies the rows of x to the pages of a buffer.
pub(crate) fn write_pages(
    buffer: &mut Tensor,
    x: &Tensor,
    (pages, start): (&Tensor, &Tensor),
    page_rows: u64,
) -> Result<(), String> {
    let ((rows, d), (capacity, width)) = (matrix_extents(x)?, matrix_extents(buffer)?);
    if d != width {
        return Err(format!("{:?} does not fit a buffer {:?}", x.shape(), buffer.shape()));
    }
    let table = Pages::new(pages, start, page_rows, capacity, rows)?;
    for row in 0..rows {
        if let Some(to) = table.position_of_row(row).and_then(|p| table.row_of(row, p)) {
            buffer.data_mut()[to * d..][..d].copy_from_slice(x.row(row));
        }
    }
    Ok(())
}

/// The table of pages of a batch, which the rows of a call divide among its sequences.
struct Pages<'a> {
    pages: &'a Tensor,
    start: &'a [f64],
    page_rows: usize,
    rows_per_sequence: usize,
}

impl<'a> Pages<'a> {
    fn new(
        pages: &'a Tensor,
        start: &'a Tensor,
        page_rows: u64,
        capacity: usize,
        rows: usize,
    ) -> Result<Pages<'a>, String> {
        let ((sequences, _), start) = (matrix_extents(pages)?, start.data());
        if start.len() != sequences || sequences == 0 || !rows.is_multiple_of(sequences) {
            return Err(format!("{sequences} rows of pages, {} starts, {rows} rows", start.len()));
        }
        let page_rows = page_rows as usize;
        for x in pages.data().iter().chain(start) {
            if x.fract() != 0.0 {
                return Err(format!("{x} is no page and no position"));
            }
        }
        if let Some(page) = pages.data().iter().find(|p| **p >= (capacity / page_rows) as f64) {
            return Err(format!("page {page} of a pool of {} pages", capacity / page_rows));
        }
        Ok(Pages { pages, start, page_rows, rows_per_sequence: rows / sequences })
    }

    /// Returns the position of a row of the call; `None` if its sequence is absent.
    fn position_of_row(&self, row: usize) -> Option<usize> {
        let start = self.start[row / self.rows_per_sequence];
        (start >= 0.0).then(|| start as usize + row % self.rows_per_sequence)
    }

    /// Returns the row of the pool that holds a position of the sequence of a row.
    fn row_of(&self, row: usize, position: usize) -> Option<usize> {
        let page = self.pages.row(row / self.rows_per_sequence).get(position / self.page_rows)?;
        (*page >= 0.0).then(|| *page as usize * self.page_rows + position % self.page_rows)
    }
}

pub(super) fn sample(cx: &OpContext<'_>, v: &views::Sample) -> TensorResult {
    let logits = cx.tensor(v.logits)?;
    let (b, vocabulary) = matrix_extents(logits)?;
    let per_row = |value| vector_data(cx.tensor(value)?, b);
    let (temperature, top_p) = (per_row(v.temperature)?, per_row(v.top_p)?);
    let (top_k, seed, draw) = (per_row(v.top_k)?, per_row(v.seed)?, per_row(v.draw)?);
    if let Some(n) = top_k.iter().chain(seed).chain(draw).find(|n| n.fract() != 0.0 || **n < 0.0) {
        return Err(format!("{n} is no top_k, seed or draw"));
    }
    if let Some(at) = logits.data().iter().position(|x| x.is_nan()) {
        return Err(format!("the logits of row {} contain NaN", at / vocabulary));
    }
    let choose = |i: usize| {
        let row = logits.row(i);
        let mut ids: Vec<usize> = (0..vocabulary).collect();
        ids.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        if temperature[i] == 0.0 {
            return ids[0] as f64;
        }
        if top_k[i] > 0.0 {
            ids.truncate(top_k[i] as usize);
        }
        let weights: Vec<f64> =
            ids.iter().map(|j| ((row[*j] - row[ids[0]]) / temperature[i]).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum_to = |n: usize| weights[..n].iter().sum::<f64>();
        let count = (1..=ids.len()).find(|n| sum_to(*n) >= top_p[i] * total).unwrap_or(ids.len());
        let target = draw_uniform(seed[i] as u32, draw[i] as u32) * sum_to(count);
        let chosen = (0..count).find(|j| sum_to(j + 1) > target).unwrap_or(count - 1);
        ids[chosen] as f64
    };
    Ok(Tensor::from_fn(&[b], choose))
}

/// Returns the number in [0, 1) of a draw: the upper 53 of the first 64 bits of the Philox block of counter
/// (draw, 0, 0, "samp") and key (seed, 0).
fn draw_uniform(seed: u32, draw: u32) -> f64 {
    let block = philox4x32([draw, 0, 0, 0x7361_6d70], [seed, 0]);
    let bits = u64::from(block[0]) | u64::from(block[1]) << 32;
    (bits >> 11) as f64 * 2.0f64.powi(-53)
}

//! A bias of attention scores by the distance of key and query, from a table of buckets.

use crate::simd::{PANEL, vectorized};

/// A number per head and distance, expanded from a table `[buckets, heads]`.
#[derive(Debug, Clone, PartialEq)]
pub struct DistanceBias {
    /// `[heads, span]`: the number for query i and key j stands at i − j + keys − 1, so that the
    /// numbers of consecutive queries are adjacent.
    by_distance: Vec<f32>,
    span: usize,
    keys: usize,
}

impl DistanceBias {
    /// Expands the table for this many queries and keys.
    ///
    /// # Panics
    /// Panics if the table has other than `heads` columns, or no two buckets per direction.
    #[must_use]
    pub fn new(
        table: &[f32],
        heads: usize,
        max_distance: u64,
        (queries, keys): (usize, usize),
    ) -> DistanceBias {
        let buckets = table.len() / heads;
        assert!(buckets * heads == table.len() && buckets >= 4, "{buckets} buckets of {heads} heads");
        // The scores of a block hold 32 queries, also where fewer exist.
        let span = queries.next_multiple_of(PANEL) + keys - 1;
        let rows: Vec<&[f32]> = (0..span)
            .map(|at| {
                let bucket = find_bucket(at as i64 - (keys as i64 - 1), buckets, max_distance);
                &table[bucket * heads..][..heads]
            })
            .collect();
        let by_distance = (0..heads).flat_map(|h| rows.iter().map(move |row| row[h])).collect();
        DistanceBias { by_distance, span, keys }
    }

    /// Adds the bias to the scores `[n, 32]` of the keys from `first_key` and the queries from
    /// `first_query`, and updates each query's running maximum.
    pub(super) fn add_to_scores(
        &self,
        scores: &mut [f32],
        head: usize,
        first_query: usize,
        first_key: usize,
        running_max: &mut [f32; PANEL],
    ) {
        let of_head = &self.by_distance[head * self.span..][..self.span];
        add_shifted_rows(scores, &of_head[..first_query + self.keys - 1 - first_key + PANEL], running_max);
    }
}

/// Returns the bucket of a key `behind` positions before its query, which is negative for a key
/// after it.
fn find_bucket(behind: i64, buckets: usize, max_distance: u64) -> usize {
    let per_direction = buckets / 2;
    let exact = per_direction / 2;
    let offset = if behind < 0 { per_direction } else { 0 };
    let distance = behind.unsigned_abs() as usize;
    if distance < exact {
        return offset + distance;
    }
    let in_units = |d: f64| (d / exact as f64).ln();
    let octave = in_units(distance as f64) / in_units(max_distance as f64);
    let logarithmic = (octave * (per_direction - exact) as f64) as usize;
    offset + (exact + logarithmic).min(per_direction - 1)
}

vectorized! {
    /// Adds to row r of the scores the 32 numbers that end r elements before the end of `bias`.
    fn add_shifted_rows(scores: &mut [f32], bias: &[f32], running_max: &mut [f32; PANEL]) {
        let (rows, _) = scores.as_chunks_mut::<PANEL>();
        let mut most = *running_max;
        for (r, row) in rows.iter_mut().enumerate() {
            let end = bias.len() - r;
            let add = &bias[end - PANEL..end];
            for l in 0..PANEL {
                row[l] += add[l];
                most[l] = if row[l] > most[l] { row[l] } else { most[l] };
            }
        }
        *running_max = most;
    }
}

//! Which prompts a call reads together: those of like length, so that few places of a call stay empty.

use std::cmp::Reverse;

use tessera_models::TokenBucket;

/// Rows of a text that a call brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextRows {
    /// Index of the text in its batch.
    pub(super) text: usize,
    /// Number of the rows.
    pub(super) count: usize,
}

/// Returns the calls that read prompts of these lengths, in order: the rows of each place of the bucket, and `None` for
/// an empty place. A group of prompts takes as many calls as its longest prompt has parts. Groups are cut from the
/// prompts by descending length: only the last one, which has the shortest prompts, may have fewer than the bucket has
/// places, so no other grouping needs fewer calls.
pub(super) fn group_prompts(lengths: &[usize], bucket: TokenBucket) -> Vec<Vec<Option<TextRows>>> {
    let (places, rows) = (bucket.sequences as usize, bucket.rows as usize);
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    if places > 1 {
        order.sort_by_key(|text| Reverse(lengths[*text].div_ceil(rows)));
    }
    let mut calls = Vec::new();
    for group in order.chunks(places.max(1)) {
        let parts = group.iter().map(|text| lengths[*text].div_ceil(rows)).max().unwrap_or(0);
        calls.extend((0..parts).map(|part| {
            let of_text = |text: &usize| {
                let count = lengths[*text].checked_sub(part * rows).filter(|left| *left > 0)?.min(rows);
                Some(TextRows { text: *text, count })
            };
            group.iter().map(of_text).collect()
        }));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list_calls(lengths: &[usize], sequences: u64, rows: u64) -> Vec<Vec<Option<(usize, usize)>>> {
        let calls = group_prompts(lengths, TokenBucket { sequences, rows });
        calls.into_iter().map(|call| call.iter().map(|r| r.map(|r| (r.text, r.count))).collect()).collect()
    }

    #[test]
    fn prompts_of_like_length_are_read_together() {
        // Parts: 1, 3, 1, 3. In the order of the texts, groups of two would take 3 calls each.
        let expected = [
            vec![Some((1, 4)), Some((3, 4))],
            vec![Some((1, 4)), Some((3, 4))],
            vec![Some((1, 1)), Some((3, 3))],
            vec![Some((0, 2)), Some((2, 4))],
        ];
        assert_eq!(list_calls(&[2, 9, 4, 11], 2, 4), expected);
        // The prompt that is left over is the shortest one.
        assert_eq!(list_calls(&[1, 8, 8], 2, 4)[2], [Some((0, 1))]);
        assert_eq!(list_calls(&[8, 3], 2, 4)[1], [Some((0, 4)), None]);
    }

    #[test]
    fn a_bucket_of_one_sequence_reads_prompts_in_order() {
        assert_eq!(
            list_calls(&[3, 7], 1, 4),
            [vec![Some((0, 3))], vec![Some((1, 4))], vec![Some((1, 3))]],
            "each in its parts"
        );
    }

    #[test]
    fn every_row_of_every_prompt_is_read_once_and_in_few_calls() {
        let lengths: Vec<usize> = (0..40).map(|i| 1 + (i * 37) % 90).collect();
        for places in [1, 2, 3, 7, 64] {
            let mut read = vec![0; lengths.len()];
            let groups = group_prompts(&lengths, TokenBucket { sequences: places, rows: 16 });
            groups.iter().flatten().flatten().for_each(|r| read[r.text] += r.count);
            assert_eq!(read, lengths);
            let in_order: usize = lengths
                .chunks(places as usize)
                .map(|group| group.iter().map(|n| n.div_ceil(16)).max().unwrap_or(0))
                .sum();
            assert!(groups.len() <= in_order, "{places}: {} calls, {in_order} in order", groups.len());
            assert!(groups.len() < in_order || [1, 64].contains(&places));
        }
    }
}

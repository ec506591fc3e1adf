//! Which prompts a call reads together: those of one kind, whose tokens are likely to choose the same experts, and of
//! like length, so that few places of a call stay empty.

use std::cmp::Reverse;

use tessera_models::TokenBucket;

/// What decides which prompts a call reads together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PromptShape<'a> {
    /// Number of the prompt's ids.
    pub(super) length: usize,
    /// Kind of the text, as the user names it.
    pub(super) kind: Option<&'a str>,
}

/// Rows of a text that a call brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextRows {
    /// Index of the text in its batch.
    pub(super) text: usize,
    /// Number of the rows.
    pub(super) count: usize,
}

/// Returns the calls that read prompts of these shapes, in order: the rows of each place of the bucket, and `None` for
/// an empty place. A group of prompts takes as many calls as its longest prompt has parts. Groups have prompts of one
/// kind, and are cut from these by descending length: only the last one of a kind, which has its shortest prompts, may
/// have fewer than the bucket has places, so no other grouping that keeps kinds apart needs fewer calls.
pub(super) fn group_prompts(prompts: &[PromptShape<'_>], bucket: TokenBucket) -> Vec<Vec<Option<TextRows>>> {
    let (places, rows) = (bucket.sequences as usize, bucket.rows as usize);
    let parts_of = |text: usize| prompts[text].length.div_ceil(rows);
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    if places > 1 {
        order.sort_by_key(|text| (prompts[*text].kind, Reverse(parts_of(*text))));
    }
    let of_one_kind = |a: &usize, b: &usize| prompts[*a].kind == prompts[*b].kind;
    let mut calls = Vec::new();
    for group in order.chunk_by(of_one_kind).flat_map(|texts| texts.chunks(places.max(1))) {
        let parts = group.iter().map(|text| parts_of(*text)).max().unwrap_or(0);
        calls.extend((0..parts).map(|part| {
            let of_text = |text: &usize| {
                let count =
                    prompts[*text].length.checked_sub(part * rows).filter(|left| *left > 0)?.min(rows);
                Some(TextRows { text: *text, count })
            };
            group.iter().map(of_text).collect()
        }));
    }
    calls
}

#[cfg(test)]
mod tests {
    use tessera_cost::moe::{ExchangeItem, ExchangeRounds};

    use super::*;

    fn without_kinds(lengths: &[usize]) -> Vec<PromptShape<'static>> {
        lengths.iter().map(|length| PromptShape { length: *length, kind: None }).collect()
    }

    fn list_calls(lengths: &[usize], sequences: u64, rows: u64) -> Vec<Vec<Option<(usize, usize)>>> {
        let calls = group_prompts(&without_kinds(lengths), TokenBucket { sequences, rows });
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
            let groups = group_prompts(&without_kinds(&lengths), TokenBucket { sequences: places, rows: 16 });
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

    #[test]
    fn a_call_reads_one_kind_and_no_prompt_waits_as_long_as_in_the_order_of_the_input() {
        let kinds = [Some("code"), None, Some("chat"), Some("code"), Some("French")];
        let shapes: Vec<PromptShape> =
            (0..67).map(|i| PromptShape { length: 1 + (i * 37) % 211, kind: kinds[i * i % 7 % 5] }).collect();
        let items: Vec<ExchangeItem> =
            shapes.iter().map(|p| ExchangeItem { tokens: p.length as u64, kind: 0 }).collect();
        for places in [1, 2, 3, 7] {
            let calls = group_prompts(&shapes, TokenBucket { sequences: places, rows: 16 });
            let mut read = vec![0; shapes.len()];
            for call in &calls {
                let texts: Vec<usize> = call.iter().flatten().map(|r| r.text).collect();
                assert!(texts.iter().all(|t| shapes[*t].kind == shapes[texts[0]].kind), "{texts:?}");
                call.iter().flatten().for_each(|r| read[r.text] += r.count);
            }
            assert!(read.iter().zip(&shapes).all(|(rows, p)| *rows == p.length), "{places}: {read:?}");
            // The texts of a group are those of the call that reads its first part.
            let mut seen = vec![false; shapes.len()];
            let is_first = |call: &&Vec<Option<TextRows>>| {
                call.iter().flatten().all(|r| !std::mem::replace(&mut seen[r.text], true))
            };
            let rounds: Vec<Vec<usize>> = calls
                .iter()
                .filter(is_first)
                .map(|call| call.iter().flatten().map(|r| r.text).collect())
                .collect();
            let wait = |rounds: &ExchangeRounds| rounds.longest_wait_ns(&items, 1.0);
            let (grouped, in_order) =
                (wait(&ExchangeRounds { rounds }), wait(&ExchangeRounds::in_order(&items, places as usize)));
            assert!(grouped < in_order || places == 1, "{places}: {grouped} and {in_order} in order");
        }
    }

    #[test]
    fn one_kind_of_all_prompts_changes_no_call() {
        let lengths = [2, 9, 4, 11];
        let of_kind = |kind| lengths.map(|length| PromptShape { length, kind });
        let bucket = TokenBucket { sequences: 2, rows: 4 };
        assert_eq!(group_prompts(&of_kind(Some("code")), bucket), group_prompts(&of_kind(None), bucket));
    }
}

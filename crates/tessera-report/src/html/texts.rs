//! The report's section on the texts of a run, and the numbers of its calls.

use maud::{Markup, html};
use tessera_base::Nanoseconds;

use super::HeadlineNumber;
use super::layout::render_note;
use crate::markup::{format_count, format_plural};
use crate::record::RunRecord;
use crate::stats::nearest_rank_quantile;

/// A prompt and the text that the run generated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextSample {
    /// The prompt, or its ids if the model has no tokenizer.
    pub prompt: String,
    /// The generated text, or its ids.
    pub text: String,
    /// Ids of the prompt.
    pub prompt_ids: u64,
    /// Generated ids.
    pub ids: u64,
    /// Why the text ended, in words.
    pub finish: String,
}

/// Maximum number of texts in the report; the output file has all.
pub const MAX_TEXTS: usize = 32;

pub(super) fn render_texts(texts: &[TextSample]) -> Markup {
    html! {
        @for text in texts.iter().take(MAX_TEXTS) {
            p dir="auto" { b { (text.prompt) } (text.text) }
            (render_note(format_args!(
                "{} of the prompt, {} generated; {}",
                format_plural(text.prompt_ids, "id"), format_plural(text.ids, "id"), text.finish
            )))
        }
        @if texts.len() > MAX_TEXTS {
            (render_note(format_args!("{} more texts are in text.jsonl.", texts.len() - MAX_TEXTS)))
        }
    }
}

/// Returns the numbers of a run of texts: the time to the first id, and ids per second of the calls that decode. A
/// call that reads a part of a prompt yields an id only with its last part, and then one of a single text.
pub(super) fn text_numbers(r: &RunRecord, texts: &[TextSample]) -> Vec<HeadlineNumber> {
    let mut numbers = Vec::new();
    let mut push = |value: String, unit: &str, label: String| {
        numbers.push(HeadlineNumber { value, unit: unit.to_string(), label });
    };
    let mut push_time = |ns: u64, label: &str| {
        let shown = Nanoseconds(ns).to_string();
        let (value, unit) = shown.split_once(' ').unwrap_or((&shown, ""));
        push(value.to_string(), unit, label.to_string());
    };
    if let (Some(first), Some(id)) = (r.chunks.first(), r.chunks.iter().find(|c| c.frames > 0)) {
        push_time(
            (id.start_ns + id.wall_ns).saturating_sub(first.start_ns),
            "to the first id, from the first call",
        );
    }
    let [prompts, decoding] = split_calls(r);
    let ns: Vec<u64> = decoding.iter().map(|c| c.wall_ns).collect();
    if !ns.is_empty() {
        push_time(nearest_rank_quantile(&ns, 50), "median decoding call");
    }
    let rate = |ids: u64, ns: u64| format!("{:.1}", ids as f64 * 1e9 / ns.max(1) as f64);
    let total = |calls: &[&crate::record::ChunkRecord]| calls.iter().map(|c| c.wall_ns).sum::<u64>();
    if !decoding.is_empty() {
        let ids = decoding.iter().map(|c| u64::from(c.frames)).sum();
        push(
            rate(ids, total(&decoding)),
            "ids/s",
            format!("decoding, {}", format_plural(decoding.len() as u64, "call")),
        );
    }
    let prompt_ids = texts.iter().map(|t| t.prompt_ids).sum::<u64>();
    if !prompts.is_empty() && prompt_ids > 0 && r.omitted.chunks == 0 {
        let label = format!("reading prompts, {}", format_plural(prompts.len() as u64, "call"));
        push(rate(prompt_ids, total(&prompts)), "ids/s", label);
    }
    push(format_count(r.frame_count()), "ids", format!("of {}", format_plural(texts.len() as u64, "text")));
    numbers
}

/// Splits the calls into those that read prompts and those that decode: a plan has one phase for each, and the calls
/// of prompts come first.
fn split_calls(r: &RunRecord) -> [Vec<&crate::record::ChunkRecord>; 2] {
    let phase = |c: &crate::record::ChunkRecord| {
        c.ranks.iter().flat_map(|r| &r.phases).map(|p| p.name.clone()).next().unwrap_or_default()
    };
    let first = r.chunks.first().map(phase).unwrap_or_default();
    let reads = |c: &&crate::record::ChunkRecord| phase(c) == first;
    let (prompts, decoding): (Vec<_>, Vec<_>) = r.chunks.iter().partition(reads);
    // A prompt of one id has the phase of decoding, and every call counts as such.
    if decoding.is_empty() { [Vec::new(), prompts] } else { [prompts, decoding] }
}

//! Writes what a run of texts leaves besides its record: the texts, the estimate beside the run, the trace and the
//! report.

use std::path::Path;

use serde_json::json;
use tessera_base::Diagnostic;
use tessera_report::call_comparison::{CallComparison, EstimateComparison};
use tessera_report::expert_load::ExpertLoadRow;
use tessera_report::html::TextSample;

use super::scheduler::GeneratedText;
use super::{FinishReason, LanguagePlan};
use crate::files::{lost_output, write_file};
use crate::html_writer::write_text_reports;
use crate::record::RECORD_FILE;
use crate::run_dir::read_record;

/// File of a run directory with the generated texts, one JSON object per line.
pub const TEXTS_FILE: &str = "text.jsonl";
/// File of a run directory with the estimate beside the run.
pub const COMPARISON_FILE: &str = "comparison.json";

/// A text of a run in words.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownText {
    /// The prompt, or its ids.
    pub prompt: String,
    /// Kind of the text, as the user names it.
    pub kind: Option<String>,
    /// Number of ids of the prompt.
    pub prompt_ids: u64,
    /// The generated text, or its ids.
    pub text: String,
    /// Whether the model has no tokenizer, so that prompt and text are lists of ids.
    pub are_ids: bool,
    /// The generated ids, and why they ended.
    pub generated: GeneratedText,
}

/// Writes the texts, the comparison of `estimate` with the record, the trace and the report with the load of experts into the directory of a run
/// that is over. Returns the comparison.
///
/// # Errors
/// T0014 for the first file that cannot be written, or what is wrong with the record.
pub fn write_run_outputs(
    plan: &LanguagePlan,
    out: &Path,
    (texts, experts): (&[ShownText], &[ExpertLoadRow]),
    estimate: EstimateComparison,
) -> Result<EstimateComparison, Diagnostic> {
    let path = out.join(RECORD_FILE);
    let record = read_record(&path).unwrap_or_else(|| Err(lost_output(&path, "no such file")))?;
    let calls = estimate.calls.into_iter().map(|call| CallComparison::with_measurement(call, &record));
    let comparison = EstimateComparison { calls: calls.collect(), ..estimate };
    let lines: String = texts.iter().enumerate().map(|(i, text)| text.to_json(i) + "\n").collect();
    write_file(&out.join(TEXTS_FILE), lines.as_bytes())?;
    // Plain structs of numbers and strings always serialise.
    let json = serde_json::to_string_pretty(&comparison).unwrap_or_default() + "\n";
    write_file(&out.join(COMPARISON_FILE), json.as_bytes())?;
    let samples: Vec<TextSample> = texts.iter().map(ShownText::to_sample).collect();
    write_text_reports((&plan.sealed, &plan.mapping), &record, out, (&samples, experts), &comparison)?;
    Ok(comparison)
}

impl ShownText {
    fn to_json(&self, index: usize) -> String {
        let GeneratedText { ids, finish } = &self.generated;
        let mut line = json!({
            "index": index, "prompt": self.prompt, "text": self.text, "ids": ids, "finish": finish_name(*finish)
        });
        if let Some(kind) = &self.kind {
            line["kind"] = json!(kind);
        }
        line.to_string()
    }

    fn to_sample(&self) -> TextSample {
        TextSample {
            prompt: self.prompt.clone(),
            // The report sets a text right behind its prompt; lists of ids need a space between them.
            text: if self.are_ids { format!(" {}", self.text) } else { self.text.clone() },
            prompt_ids: self.prompt_ids,
            ids: self.generated.ids.len() as u64,
            finish: match self.generated.finish {
                FinishReason::EndId => "the text has ended",
                FinishReason::Length => "its length is reached, or the run ended",
            }
            .to_string(),
        }
    }
}

/// Returns why a text ended, as JSON names it.
#[must_use]
pub fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndId => "end",
        FinishReason::Length => "length",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_apart_from_those_of_the_prompt_and_words_are_not() {
        let shown = |prompt: &str, text: &str, are_ids: bool| {
            let generated = GeneratedText { ids: vec![7], finish: FinishReason::Length };
            let shown = ShownText {
                prompt: prompt.into(),
                kind: None,
                prompt_ids: 1,
                text: text.into(),
                are_ids,
                generated,
            };
            let sample = shown.to_sample();
            sample.prompt + &sample.text
        };
        assert_eq!(shown("17", "23", true), "17 23");
        assert_eq!(shown("The sto", "ne", false), "The stone");
    }
}

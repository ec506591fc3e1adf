//! What a run of texts needs besides its flags: the ids of its prompts, the extents of its plan, and its ids in words.

use std::time::{SystemTime, UNIX_EPOCH};

use tessera_base::Diagnostic;
use tessera_models::TokenOutput;
use tessera_report::record::RunDevice;
use tessera_text::ChatTemplate;

use super::chat::chat_messages;
use super::language_plan::LanguageSettings;
use super::text_model::TextModel;
use crate::codes::T0086;

/// Rows up to which one call reads several short prompts: a matmul of fewer rows takes almost as long.
const ROWS_PER_CALL: u64 = 64;

/// Ids of each text that one call of GPUs decodes.
const IDS_PER_GPU_CALL: u64 = 8;

/// What a user says about the extents of a run of texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextExtents {
    /// Largest number of ids to generate per text.
    pub max_ids: u64,
    /// Most ids of a prompt that one call reads.
    pub prompt_rows: u64,
    /// Most prompts that calls read together; by default as many as fill the rows of a call.
    pub prompts_per_call: Option<u64>,
    /// Most ids of each text that one call decodes; by default a number that suits the device.
    pub ids_per_call: Option<u64>,
}

impl TextExtents {
    /// Ids of a prompt that one call reads, unless a user says otherwise.
    pub const PROMPT_ROWS: u64 = 64;

    /// Creates the extents of a run for which a user says no more than how long its texts may become.
    #[must_use]
    pub fn with_max_ids(max_ids: u64) -> TextExtents {
        let prompt_rows = TextExtents::PROMPT_ROWS;
        TextExtents { max_ids, prompt_rows, prompts_per_call: None, ids_per_call: None }
    }

    /// Chooses the settings of a plan for these prompts.
    #[must_use]
    pub fn choose_settings(&self, prompts: &[Vec<u32>], device: RunDevice) -> LanguageSettings {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u64;
        let (sequences, prompt_rows) = (prompts.len().max(1) as u64, self.prompt_rows.min(longest).max(1));
        LanguageSettings {
            sequences,
            positions: longest + self.max_ids,
            prompt_rows,
            prompts_per_call: self
                .prompts_per_call
                .unwrap_or(ROWS_PER_CALL / prompt_rows)
                .clamp(1, sequences),
            ids_per_call: self.choose_ids_per_call(device),
            output: TokenOutput::Next,
        }
    }

    /// Returns the most ids of each text that one call decodes. A step of a GPU takes a few milliseconds, so the checks
    /// of a call and the leader's turn weigh more than they do on a CPU, and nobody sees that several ids appear together.
    fn choose_ids_per_call(&self, device: RunDevice) -> u64 {
        let usual = if device == RunDevice::Cuda { IDS_PER_GPU_CALL } else { 1 };
        self.ids_per_call.unwrap_or(usual).min(self.max_ids)
    }
}

impl TextModel {
    /// Returns the ids of texts, each as the message of a user if there is a chat template. The template comes with the
    /// message of the system.
    ///
    /// # Errors
    /// T0086 for a folder without a tokenizer or a text without ids, or what the tokenizer or the template refuses.
    pub fn encode_prompts(
        &self,
        texts: &[String],
        chat: Option<(&ChatTemplate, Option<&str>)>,
    ) -> Result<Vec<Vec<u32>>, Diagnostic> {
        let Some(tokenizer) = &self.tokenizer else {
            return Err(Diagnostic::error(&T0086, format!("{} has no tokenizer.json", self.dir.display()))
                .with_hint("fetch tokenizer.json from the publisher"));
        };
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let encode_prompt = |text: &str| match chat {
            Some((template, system)) => {
                let messages = chat_messages(system, text);
                tokenizer.encode_chat(&template.render(&messages, i64::try_from(now_s).unwrap_or(0))?)
            }
            None => tokenizer.encode(text),
        };
        let encode = |text: &String| match encode_prompt(text)? {
            ids if ids.is_empty() => {
                Err(Diagnostic::error(&T0086, format!("the prompt {text:?} has no ids")))
            }
            ids => Ok(ids),
        };
        texts.iter().map(encode).collect()
    }

    /// Returns a function that takes the ids of a text one by one, and returns what each adds to the text. The ids
    /// themselves are the text of a folder without a tokenizer.
    #[must_use]
    pub fn show_one_by_one(&self) -> Box<dyn FnMut(u32) -> Result<String, Diagnostic> + '_> {
        match &self.tokenizer {
            Some(tokenizer) => Box::new(tokenizer.decode_one_by_one()),
            None => {
                let mut space = "";
                Box::new(move |id| Ok(format!("{}{id}", std::mem::replace(&mut space, " "))))
            }
        }
    }

    /// Returns the text of ids, or the ids themselves for a folder without a tokenizer.
    ///
    /// # Errors
    /// T0452 if the tokenizer fails.
    pub fn show_ids(&self, ids: &[u32]) -> Result<String, Diagnostic> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(ids),
            None => Ok(ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_follow_from_the_prompts_and_the_device() {
        let prompts = [vec![1; 5], vec![2; 19], vec![3; 7]];
        let settings = TextExtents::with_max_ids(11).choose_settings(&prompts, RunDevice::Cpu);
        assert_eq!((settings.sequences, settings.positions, settings.prompt_rows), (3, 30, 19));
        assert_eq!((settings.prompts_per_call, settings.ids_per_call), (3, 1));
        let long = [vec![1; 100], vec![2; 3]];
        let settings = TextExtents::with_max_ids(5).choose_settings(&long, RunDevice::Cuda);
        assert_eq!((settings.prompt_rows, settings.prompts_per_call, settings.ids_per_call), (64, 1, 5));
        let asked =
            TextExtents { prompts_per_call: Some(9), ids_per_call: Some(3), ..TextExtents::with_max_ids(5) };
        let settings = asked.choose_settings(&long, RunDevice::Cuda);
        assert_eq!((settings.prompts_per_call, settings.ids_per_call), (2, 3));
    }
}

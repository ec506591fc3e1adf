//! The prompts of `tessera generate`: of the command line or a file, as ids and in words.

use tessera::codes::T0095;
use tessera::generate::{
    ChatTemplate, GivenPrompt, PromptSource, Sampling, TextModel, TextRequest, read_prompts_file,
};
use tessera_base::Diagnostic;

use super::Args;
use crate::codes::T0030;
use crate::output::CliError;
use crate::parse::invalid_argument;

/// The texts that the user wants continued.
pub(super) struct RunPrompts {
    pub(super) requests: Vec<TextRequest>,
    /// Each prompt in words, or its ids for a folder without a tokenizer.
    pub(super) shown: Vec<String>,
}

/// Reads the prompts and turns them into ids.
pub(super) fn read_prompts(args: &Args, model: &TextModel) -> Result<RunPrompts, CliError> {
    let given = list_given_prompts(args)?;
    let template = args.chat.then(|| model.read_chat_template()).transpose()?;
    let chat = template.as_ref().map(|t| (t, args.system.as_deref()));
    let sampling =
        Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    let max_ids = args.max_tokens as usize;
    let mut prompts = RunPrompts { requests: Vec::new(), shown: Vec::new() };
    for GivenPrompt { source, kind } in given {
        let (prompt, shown) = match source {
            PromptSource::Text(text) => (encode_prompt(model, &text, chat)?, text),
            PromptSource::Ids(ids) => {
                let shown = model.show_ids(&ids)?;
                (ids, shown)
            }
        };
        prompts.requests.push(TextRequest { prompt, max_ids, sampling, kind });
        prompts.shown.push(shown);
    }
    Ok(prompts)
}

/// Returns the ids of a text, as the message of a user if there is a chat template. The template comes with the
/// message of the system.
pub(in crate::commands) fn encode_prompt(
    model: &TextModel,
    text: &str,
    chat: Option<(&ChatTemplate, Option<&str>)>,
) -> Result<Vec<u32>, CliError> {
    if model.tokenizer.is_none() {
        return Err(CliError::usage(
            Diagnostic::error(&T0030, format!("{} has no tokenizer.json", model.dir.display()))
                .with_hint("give the prompt as --prompt-ids, or fetch tokenizer.json from the publisher"),
        ));
    }
    Ok(model.encode_prompts(&[text.to_string()], chat)?.remove(0))
}

pub(in crate::commands) fn parse_ids(list: &str) -> Result<Vec<u32>, CliError> {
    let ids: Option<Vec<u32>> = list.split(',').map(|id| id.trim().parse().ok()).collect();
    ids.ok_or_else(|| {
        CliError::usage(invalid_argument("--prompt-ids", list, "it is not a list of ids", "17,4,99"))
    })
}

/// Returns the prompts of the command line, or those of the file that it names.
fn list_given_prompts(args: &Args) -> Result<Vec<GivenPrompt>, CliError> {
    let without_kind = |source| GivenPrompt { source, kind: None };
    let Some(file) = &args.prompts else {
        let texts = args.prompt.iter().map(|text| Ok(without_kind(PromptSource::Text(text.clone()))));
        let ids = args.prompt_ids.iter().map(|list| Ok(without_kind(PromptSource::Ids(parse_ids(list)?))));
        return texts.chain(ids).collect();
    };
    let given = read_prompts_file(file)?;
    if args.chat && given.iter().any(|prompt| matches!(prompt.source, PromptSource::Ids(_))) {
        let message = format!("{} has `prompt_ids`, but --chat writes texts as messages", file.display());
        return Err(Diagnostic::error(&T0095, message).with_hint("give each line a `prompt`").into());
    }
    Ok(given)
}

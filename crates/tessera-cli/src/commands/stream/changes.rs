//! Values that take effect at a chunk: prompts, seeds, lists of steps, biases, weights and LoRAs.

use std::path::PathBuf;

use tessera::{LoraFile, WeightChange};
use tessera_base::Diagnostic;

use super::Args;
use crate::codes::T0030;
use crate::output::CliError;
use crate::parse::invalid_argument;

/// The changes of a stream, each with its chunk.
#[derive(Debug, Default)]
pub(super) struct StreamChanges {
    pub(super) prompts: Vec<(u32, String)>,
    pub(super) seeds: Vec<(u32, u64)>,
    pub(super) step_lists: Vec<(u32, String)>,
    pub(super) biases: Vec<(u32, f32)>,
    pub(super) weights: Vec<(u32, WeightChange)>,
}

/// Parses the options of changes, and reports all errors at once.
pub(super) fn parse_changes(args: &Args) -> Result<StreamChanges, CliError> {
    let mut errors = Vec::new();
    let out = StreamChanges {
        prompts: parse_all(&args.at, parse_prompt_at, &mut errors),
        seeds: parse_all(&args.seed_at, parse_seed_at, &mut errors),
        step_lists: parse_all(&args.steps_at, parse_steps_at, &mut errors),
        biases: parse_all(&args.bias_at, parse_bias_at, &mut errors),
        weights: [
            parse_all(&args.weights_at, parse_weights_at, &mut errors),
            parse_all(&args.lora_at, parse_lora_at, &mut errors),
        ]
        .concat(),
    };
    errors.extend(repeated_chunk_error("--at", out.prompts.iter().map(|(c, _)| *c)));
    errors.extend(repeated_chunk_error("--seed-at", out.seeds.iter().map(|(c, _)| *c)));
    errors.extend(repeated_chunk_error("--steps-at", out.step_lists.iter().map(|(c, _)| *c)));
    errors.extend(repeated_chunk_error("--bias-at", out.biases.iter().map(|(c, _)| *c)));
    errors.extend(repeated_chunk_error("--cut-at", args.cut_at.iter().copied()));
    errors.extend(repeated_chunk_error("--flush-at", args.flush_at.iter().copied()));
    errors.extend(repeated_chunk_error("--weights-at or --lora-at", out.weights.iter().map(|(c, _)| *c)));
    if errors.is_empty() { Ok(out) } else { Err(CliError::from_usage_errors(errors)) }
}

/// Parses every value of an option; a value with an error is left out.
fn parse_all<T>(
    texts: &[String],
    parse: impl Fn(&str) -> Result<(u32, T), Diagnostic>,
    errors: &mut Vec<Diagnostic>,
) -> Vec<(u32, T)> {
    texts.iter().filter_map(|text| parse(text).map_err(|d| errors.push(d)).ok()).collect()
}

/// Parses a list of denoise steps that takes effect at a chunk, such as `4:fast`.
fn parse_steps_at(text: &str) -> Result<(u32, String), Diagnostic> {
    let (chunk, name) = split_at_chunk(text, "--steps-at", "--steps-at 4:fast")?;
    Ok((chunk, name.trim().to_string()))
}

/// Parses an attention bias that takes effect at a chunk, such as `4:0.5`.
fn parse_bias_at(text: &str) -> Result<(u32, f32), Diagnostic> {
    let example = "--bias-at 4:0.5";
    let (chunk, bias) = split_at_chunk(text, "--bias-at", example)?;
    let bias = bias.trim().parse();
    bias.map(|bias| (chunk, bias))
        .map_err(|_| invalid_argument("--bias-at", text, "the bias is not a number", example))
}

/// Parses a prompt that takes effect at a chunk, such as `4:a blue square`.
fn parse_prompt_at(text: &str) -> Result<(u32, String), Diagnostic> {
    let (chunk, prompt) = split_at_chunk(text, "--at", "--at 4:'a blue square moves left'")?;
    Ok((chunk, prompt.trim().to_string()))
}

/// Parses a seed that takes effect at a chunk, such as `4:7`.
fn parse_seed_at(text: &str) -> Result<(u32, u64), Diagnostic> {
    let example = "--seed-at 4:7";
    let (chunk, seed) = split_at_chunk(text, "--seed-at", example)?;
    let seed = seed.trim().parse();
    seed.map(|s| (chunk, s))
        .map_err(|_| invalid_argument("--seed-at", text, "the seed is not a whole number from 0", example))
}

/// Parses a weights folder that every rank loads before a chunk, such as `4:models/demo-2`.
fn parse_weights_at(text: &str) -> Result<(u32, WeightChange), Diagnostic> {
    let example = "--weights-at 4:models/other";
    match split_at_chunk(text, "--weights-at", example)? {
        (_, "") => Err(invalid_argument("--weights-at", text, "no folder after `:`", example)),
        (chunk, folder) => Ok((chunk, WeightChange::Folder(PathBuf::from(folder)))),
    }
}

/// Parses a LoRA that every rank loads before a chunk, such as `4:style.safetensors:0.8`, or `4:none`.
fn parse_lora_at(text: &str) -> Result<(u32, WeightChange), Diagnostic> {
    let example = "--lora-at 4:style.safetensors:0.8";
    let (chunk, lora) = split_at_chunk(text, "--lora-at", example)?;
    let loras = if lora == "none" { Vec::new() } else { vec![parse_lora("--lora-at", lora, example)?] };
    Ok((chunk, WeightChange::Loras(loras)))
}

/// Parses a LoRA with its strength.
pub(super) fn parse_lora(option: &str, text: &str, example: &str) -> Result<LoraFile, Diagnostic> {
    LoraFile::parse(text).map_err(|why| invalid_argument(option, text, why, example))
}

fn split_at_chunk<'a>(text: &'a str, option: &str, example: &str) -> Result<(u32, &'a str), Diagnostic> {
    let (chunk, value) = text
        .split_once(':')
        .ok_or_else(|| invalid_argument(option, text, "no `:` after the chunk", example))?;
    let chunk = chunk.trim();
    let number = chunk
        .parse()
        .map_err(|_| invalid_argument(option, text, &format!("`{chunk}` is not a chunk number"), example))?;
    Ok((number, value))
}

fn repeated_chunk_error(option: &str, chunks: impl Iterator<Item = u32>) -> Option<Diagnostic> {
    let mut seen = std::collections::BTreeSet::new();
    let again = chunks.into_iter().find(|c| !seen.insert(*c))?;
    Some(
        Diagnostic::error(&T0030, format!("{option} names chunk {again} twice"))
            .with_hint("leave one of them out"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_chunk_is_an_error() {
        assert!(
            repeated_chunk_error("--at", [3, 1, 3].into_iter()).unwrap().message.contains("chunk 3 twice")
        );
        assert!(repeated_chunk_error("--at", [3, 1].into_iter()).is_none());
    }

    #[test]
    fn changes_at_a_chunk_are_parsed() {
        assert_eq!(parse_prompt_at("4: a: b ").unwrap(), (4, "a: b".to_string()));
        assert_eq!(parse_seed_at("0:18446744073709551615").unwrap(), (0, u64::MAX));
        assert_eq!(parse_steps_at("2: fast").unwrap(), (2, "fast".to_string()));
        assert_eq!(parse_bias_at("2:0.5").unwrap(), (2, 0.5));
    }

    #[test]
    fn errors_show_the_expected_syntax() {
        let bad = [
            parse_prompt_at("a red circle").unwrap_err(),
            parse_prompt_at("x:a red circle").unwrap_err(),
            parse_prompt_at("-1:a").unwrap_err(),
            parse_seed_at("3:-1").unwrap_err(),
            parse_seed_at("3").unwrap_err(),
            parse_steps_at("fast").unwrap_err(),
            parse_bias_at("3:much").unwrap_err(),
            parse_weights_at("3:").unwrap_err(),
            parse_weights_at("models/demo").unwrap_err(),
        ];
        assert!(bad.iter().all(|d| d.code == &T0030 && d.hint.is_some()), "{bad:#?}");
    }
}

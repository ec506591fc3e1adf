//! Values that take effect at a chunk: prompts, seeds, weights and LoRAs.

use std::path::PathBuf;

use tessera::{LoraFile, WeightChange};
use tessera_base::Diagnostic;

use crate::parse::invalid_argument;

/// Parses a prompt that takes effect at a chunk, such as `4:a blue square`.
pub(super) fn parse_prompt_at(text: &str) -> Result<(u32, String), Diagnostic> {
    let (chunk, prompt) = split_at_chunk(text, "--at", "--at 4:'a blue square moves left'")?;
    Ok((chunk, prompt.trim().to_string()))
}

/// Parses a seed that takes effect at a chunk, such as `4:7`.
pub(super) fn parse_seed_at(text: &str) -> Result<(u32, u64), Diagnostic> {
    let example = "--seed-at 4:7";
    let (chunk, seed) = split_at_chunk(text, "--seed-at", example)?;
    let seed = seed.trim().parse();
    seed.map(|s| (chunk, s))
        .map_err(|_| invalid_argument("--seed-at", text, "the seed is not a whole number from 0", example))
}

/// Parses a weights folder that every rank loads before a chunk, such as `4:models/demo-2`.
pub(super) fn parse_weights_at(text: &str) -> Result<(u32, WeightChange), Diagnostic> {
    let example = "--weights-at 4:models/other";
    match split_at_chunk(text, "--weights-at", example)? {
        (_, "") => Err(invalid_argument("--weights-at", text, "no folder after `:`", example)),
        (chunk, folder) => Ok((chunk, WeightChange::Folder(PathBuf::from(folder)))),
    }
}

/// Parses a LoRA that every rank loads before a chunk, such as `4:style.safetensors:0.8`, or `4:none`.
pub(super) fn parse_lora_at(text: &str) -> Result<(u32, WeightChange), Diagnostic> {
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

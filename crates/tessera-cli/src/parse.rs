//! Parsers of argument values. Each returns a typed value, or a diagnostic that shows the expected
//! syntax.

use std::path::PathBuf;

use tessera::Mesh;
use tessera::synthetic_delays::MediaDelays;
use tessera_base::{Code, Diagnostic};

/// An argument value cannot be parsed.
pub static T0030: Code = Code {
    id: "T0030",
    title: "invalid argument value",
    page: "A change during a stream is written CHUNK:VALUE, where CHUNK counts from 0 and the change takes effect at that \
chunk: `--at 4:'a blue square moves left'`, `--seed-at 4:7`. Steps are numbers in descending order, separated by commas: \
`--steps 1000,750,500,250`. Minimum times are milliseconds: `--min-decode-ms 60,120,15`. A mapping is a TOML file. \
Quote a text that contains spaces; otherwise the shell splits it.",
};

/// Parses a mesh, such as `tp=2,pp=1`.
pub fn parse_mesh(text: &str) -> Result<Mesh, Diagnostic> {
    text.parse().map_err(|d: Box<Diagnostic>| *d)
}

/// Parses timesteps, such as `1000,750,500,250`.
pub fn parse_steps(text: &str) -> Result<Vec<f64>, Diagnostic> {
    text.split(',')
        .map(|word| word.trim().parse::<f64>().map_err(|_| word))
        .collect::<Result<_, _>>()
        .map_err(|word| {
            invalid_argument(
                "--steps",
                text,
                &format!("`{word}` is not a number"),
                "--steps 1000,750,500,250",
            )
        })
}

/// Parses a prompt that takes effect at a chunk, such as `4:a blue square`.
pub fn parse_prompt_at(text: &str) -> Result<(u32, String), Diagnostic> {
    let (chunk, prompt) = split_at_chunk(text, "--at", "--at 4:'a blue square moves left'")?;
    Ok((chunk, prompt.trim().to_string()))
}

/// Parses a seed that takes effect at a chunk, such as `4:7`.
pub fn parse_seed_at(text: &str) -> Result<(u32, u64), Diagnostic> {
    let example = "--seed-at 4:7";
    let (chunk, seed) = split_at_chunk(text, "--seed-at", example)?;
    let seed = seed.trim().parse();
    seed.map(|s| (chunk, s))
        .map_err(|_| invalid_argument("--seed-at", text, "the seed is not a whole number from 0", example))
}

/// Parses a weights folder that every rank loads before a chunk, such as `4:models/demo-2`.
pub fn parse_weights_at(text: &str) -> Result<(u32, PathBuf), Diagnostic> {
    let example = "--weights-at 4:models/other";
    match split_at_chunk(text, "--weights-at", example)? {
        (_, "") => Err(invalid_argument("--weights-at", text, "no folder after `:`", example)),
        (chunk, folder) => Ok((chunk, PathBuf::from(folder))),
    }
}

/// Parses milliseconds, such as `60`, and returns whole nanoseconds.
pub fn parse_milliseconds(option: &str, text: &str) -> Result<u64, Diagnostic> {
    let ms: Option<f64> = text.trim().parse().ok().filter(|ms| (0.0..=MAX_DELAY_MS).contains(ms));
    ms.map(|ms| (ms * 1e6).round() as u64).ok_or_else(|| {
        let why = format!("`{}` is not a number of milliseconds from 0 to {MAX_DELAY_MS}", text.trim());
        invalid_argument(option, text, &why, &format!("{option} 60"))
    })
}

/// Parses minimum times of the decoder and encoder, such as `60,120,15` in milliseconds: for the
/// first latent of a chunk, for its other latents together, and for the encode of the anchor.
///
/// Without the second number each of the `other_latents` takes as long as the first. Without the
/// third the encode is not delayed.
pub fn parse_decode_delays(text: &str, other_latents: u64) -> Result<MediaDelays, Diagnostic> {
    let option = "--min-decode-ms";
    let words: Vec<&str> = text.split(',').collect();
    if words.len() > 3 {
        return Err(invalid_argument(option, text, "more than three numbers", "--min-decode-ms 60,120,15"));
    }
    let ns: Vec<u64> = words.iter().map(|w| parse_milliseconds(option, w)).collect::<Result<_, _>>()?;
    Ok(MediaDelays {
        first_ns: ns[0],
        rest_ns: ns.get(1).copied().unwrap_or(other_latents * ns[0]),
        encode_ns: ns.get(2).copied().unwrap_or(0),
    })
}

/// The largest minimum time: ten minutes.
const MAX_DELAY_MS: f64 = 600_000.0;

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

fn invalid_argument(option: &str, text: &str, why: &str, example: &str) -> Diagnostic {
    Diagnostic::error(&T0030, format!("{option} `{text}`: {why}"))
        .with_hint(format!("write it like {example}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed() {
        assert_eq!(parse_mesh("tp=2, pp=1").unwrap().world_size(), 2);
        assert_eq!(parse_steps("1000, 750.5").unwrap(), [1000.0, 750.5]);
        assert_eq!(parse_prompt_at("4: a: b ").unwrap(), (4, "a: b".to_string()));
        assert_eq!(parse_seed_at("0:18446744073709551615").unwrap(), (0, u64::MAX));
    }

    #[test]
    fn modelled_times_are_filled_in() {
        let model = |text| parse_decode_delays(text, 2).map(|m| [m.first_ns, m.rest_ns, m.encode_ns]);
        assert_eq!(model("60").unwrap(), [60_000_000, 120_000_000, 0]);
        assert_eq!(model("0.5, 7 ,1").unwrap(), [500_000, 7_000_000, 1_000_000]);
        for bad in ["", "60,", "-1", "1e9", "NaN", "1,2,3,4"] {
            assert_eq!(model(bad).unwrap_err().code, &T0030, "{bad}");
        }
    }

    #[test]
    fn errors_show_the_expected_syntax() {
        let bad = [
            parse_prompt_at("a red circle").unwrap_err(),
            parse_prompt_at("x:a red circle").unwrap_err(),
            parse_prompt_at("-1:a").unwrap_err(),
            parse_seed_at("3:-1").unwrap_err(),
            parse_seed_at("3").unwrap_err(),
            parse_weights_at("3:").unwrap_err(),
            parse_weights_at("models/demo").unwrap_err(),
            parse_steps("1000,,500").unwrap_err(),
            parse_steps("").unwrap_err(),
        ];
        assert!(bad.iter().all(|d| d.code == &T0030 && d.hint.is_some()), "{bad:#?}");
        assert_eq!(parse_mesh("mp=2").unwrap_err().code.id, "T0101");
    }
}
